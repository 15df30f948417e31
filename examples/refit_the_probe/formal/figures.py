"""The formal grid's figures, each made from saved rows alone; None where a run has no rows for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pandas as pd

from probelens.examples.refit_the_probe.formal.rows import LAST, main_cells, of_kind, over_seeds
from probelens.examples.refit_the_probe.shared.rows import of_learned, where
from probelens.examples.refit_the_probe.shared.setup import LABELS, TASKS, TITLES, WHAT
from probelens.results import plots

if TYPE_CHECKING:
    import plotly.graph_objects as go


def behaviour(rows: pd.DataFrame) -> go.Figure | None:
    """Accuracy of the models' answers by length."""
    found = main_cells(rows, "behaviour")
    if found.empty:
        return None
    table = over_seeds(of_learned(found), ["model", "task", "length"], "accuracy")
    table["task"] = table["task"].map(TITLES)
    return plots.length_curve(table.astype({"length": int}), color="model", facet="task", train_length=40)


def profiles(rows: pd.DataFrame) -> go.Figure | None:
    """Probe accuracy by layer, late positions, with the untrained model dashed."""
    found = where(main_cells(rows, "probe"), control="task", span="late")
    kept = found[[lab in LABELS[task] for lab, task in zip(found["label"], found["task"], strict=True)]]
    if kept.empty:
        return None
    table = over_seeds(kept, ["cell", "model", "layer"], "accuracy").astype({"layer": int})
    return plots.layer_profile(table, color="model", facet="cell", baselines={"untrained": "untrained"})


def embedding_scale(rows: pd.DataFrame) -> go.Figure | None:
    """The same profile for three scales of the initial embedding."""
    about = {"control": "task", "span": "late", "label": "state", "arch": ("lstm", "gru"), "task": ("parity", "s3")}
    found = where(of_kind(rows, "probe"), **about)
    if found["embedding_std"].nunique() < 2:
        return None
    found = found.assign(cell=found["model"] + ", " + found["cell"], std=found["embedding_std"].map("std {:g}".format))
    table = over_seeds(found.sort_values("embedding_std", kind="stable"), ["cell", "std", "layer"], "accuracy")
    return plots.layer_profile(
        table.astype({"layer": int}), color="std", facet="cell", baselines={"majority": "majority class"}
    )


def ablations(rows: pd.DataFrame, task: str) -> go.Figure | None:
    """Drop in accuracy by layer for each way to remove a task's variables."""
    found = _of_task(rows, task)
    if found.empty:
        return None
    table = over_seeds(found, ["cell", "what", "layer"], "drop").astype({"layer": int})
    return plots.layer_profile(table, y="drop", color="what", facet="cell", baselines={}, y_label="drop in accuracy")


def refits(rows: pd.DataFrame, task: str) -> go.Figure | None:
    """Accuracy by layer of a probe refitted on the ablated activations."""
    found = _of_task(rows, task).drop(columns=["lo", "hi"])
    if found.empty:
        return None
    return plots.layer_profile(
        over_seeds(found, ["cell", "what", "layer"], "refit_accuracy").astype({"layer": int}),
        y="refit_accuracy", color="what", facet="cell", y_label="refitted probe",
        baselines={"probe_accuracy": "before", "baseline": "baseline"},
    )  # fmt: skip


def _of_task(rows: pd.DataFrame, task: str) -> pd.DataFrame:
    found = where(main_cells(rows, "ablation"), task=task)
    if found.empty:
        return found
    return found.assign(cell=found["model"] + ", " + found["cell"], what=found["what"].map(WHAT))


def transfer(rows: pd.DataFrame) -> go.Figure | None:
    """Damage by the frozen best direction and by frozen LEACE at the layer where it is largest, by length.

    Beyond the trained length only positions count that training never saw, and only of models that answer better than
    a guess there.
    """
    found = main_cells(rows, "length")
    found = found[(found["layer"] >= 0) & (found["layer"] < LAST)]
    if found.empty:
        return None
    trained = found["length"].min()
    first = where(found, length=trained, span="all")
    beyond = where(found[(found["length"] > trained) & ~found["floor"].astype(bool)], span="beyond")
    at = over_seeds(first, ["cell", "model", "what", "layer"], "drop").sort_values("drop", ascending=False)
    worst = at.drop_duplicates(["cell", "model", "what"])[["cell", "model", "what", "layer"]]
    table = over_seeds(pd.concat([first, beyond]).merge(worst), ["cell", "model", "what", "length"], "drop")
    table = table.astype({"length": int}).assign(cell=table["cell"] + ", " + table["what"].map(WHAT))
    table = table.sort_values(["_task", "cell", "_arch", "length"], kind="stable")
    return plots.length_curve(table, y="drop", color="model", facet="cell", y_label="largest drop", train_length=40)


FIGURES: dict[str, tuple[Callable[[pd.DataFrame], go.Figure | None], str]] = {
    "behaviour": (
        behaviour,
        "Accuracy of the models' own answers by sequence length; the dashed line is the length of training.",
    ),
    "profiles": (
        profiles,
        "Probe accuracy by layer, positions from the 16th on; dashed: the same architecture untrained.",
    ),
    "embedding": (
        embedding_scale,
        "The same for LSTM and GRU with three scales of the initial embedding: the layer at which the state becomes "
        "readable depends on it.",
    ),
    **{
        f"ablations-{task}": (
            functools.partial(ablations, task=task),
            f"{TITLES[task]}: what it costs to take the variable out at one layer: the probe's best direction, all its "
            "rows, the same of the class means where they were ablated, LEACE, INLP.",
        )
        for task in TASKS
    },
    **{
        f"refits-{task}": (
            functools.partial(refits, task=task),
            f"{TITLES[task]}: what a linear probe refitted on the ablated activations reads, beside the probe before "
            "(dashed) and the baseline.",
        )
        for task in TASKS
    },
    "transfer": (
        transfer,
        "Drop at the inner layer where it is largest, when the best direction or LEACE, fitted at 40 tokens, is taken out of "
        "longer sequences: at their positions beyond the 40th, where the model still answers better than a guess.",
    ),
}

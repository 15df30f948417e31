"""The formal grid's figures, each made from saved rows alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pandas as pd

from probelens import plots
from probelens.examples.refit_the_probe.setup import ARCHS, LABELS, NAMES, TASKS, TITLES

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["FIGURES", "main_cells", "named"]

WHAT = {"direction": "best direction", "rows": "all probe rows", "leace": "LEACE", "inlp": "INLP"}
LAST = 3  # the block whose output feeds the readout: ablating it must hurt


def named(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of the paper, with the names that figures show."""
    order = {arch: i for i, arch in enumerate(ARCHS)}, {task: i for i, task in enumerate(TASKS)}
    found = rows.assign(
        model=rows["arch"].map(NAMES),
        cell=[f"{TITLES[t]}: {label}" if isinstance(label, str) and len(LABELS[t]) > 1 else TITLES[t]
              for t, label in zip(rows["task"], rows.get("label", rows["task"]), strict=True)],
        _arch=rows["arch"].map(order[0]), _task=rows["task"].map(order[1]),
    )  # fmt: skip
    return found.sort_values(["_task", "_arch"], kind="stable")


def main_cells(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of one kind from the cells of the paper: usual embedding, with convolution."""
    found = rows[(rows["kind"] == kind) & (rows["embedding_std"] == 0.02) & rows["convolution"].astype(bool)]
    return named(found)


def over_seeds(rows: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """One row for each group: its only seed with its interval over sequences, or mean and interval over seeds."""
    from probelens.stats import hierarchical_bootstrap

    made = []
    for _, part in rows.groupby(by, sort=False, dropna=False):
        row = part.iloc[0].to_dict()
        if len(part) > 1:
            found = hierarchical_bootstrap([[v] for v in part[value].astype(float)])
            row |= {value: float(found.estimate), "lo": float(found.low), "hi": float(found.high)}
            row |= {
                k: part[k].astype(float).mean()
                for k in ("untrained", "refit_accuracy", "baseline")
                if k in part
            }
        made.append(row)
    return pd.DataFrame(made)


def behaviour(rows: pd.DataFrame) -> go.Figure:
    """Accuracy of the models' answers by length."""
    found = main_cells(rows, "behaviour")
    table = over_seeds(found[found["span"] == "all"], ["model", "task", "length"], "accuracy")
    table["task"] = table["task"].map(TITLES)
    return plots.length_curve(table.astype({"length": int}), color="model", facet="task", train_length=40)


def profiles(rows: pd.DataFrame) -> go.Figure:
    """Probe accuracy by layer, late positions, with the untrained model dashed."""
    found = main_cells(rows, "probe")
    found = found[(found["control"] == "task") & (found["span"] == "late")]
    kept = found[[lab in LABELS[task] for lab, task in zip(found["label"], found["task"], strict=True)]]
    table = over_seeds(kept, ["cell", "model", "layer"], "accuracy").astype({"layer": int})
    return plots.layer_profile(table, color="model", facet="cell", baselines={"untrained": "untrained"})


def embedding_scale(rows: pd.DataFrame) -> go.Figure:
    """The same profile for three scales of the initial embedding."""
    found = named(
        rows[(rows["kind"] == "probe") & (rows["control"] == "task") & rows["arch"].isin(["lstm", "gru"])]
    )
    found = found[
        found["task"].isin(["parity", "s3"]) & (found["label"] == "state") & (found["span"] == "late")
    ]
    found = found.assign(
        cell=found["model"] + ", " + found["cell"], std=found["embedding_std"].map("std {:g}".format)
    )
    table = over_seeds(
        found.sort_values("embedding_std", kind="stable"), ["cell", "std", "layer"], "accuracy"
    )
    return plots.layer_profile(
        table.astype({"layer": int}), color="std", facet="cell", baselines={"majority": "majority class"}
    )


def ablations(rows: pd.DataFrame, task: str) -> go.Figure:
    """What each way of taking a task's variables out costs by layer."""
    table = over_seeds(_of_task(rows, task), ["cell", "what", "layer"], "drop").astype({"layer": int})
    return plots.layer_profile(
        table, y="drop", color="what", facet="cell", baselines={}, y_label="drop in accuracy"
    )


def refits(rows: pd.DataFrame, task: str) -> go.Figure:
    """What a probe refitted on the ablated activations reads."""
    found = _of_task(rows, task).drop(columns=["lo", "hi"])
    return plots.layer_profile(
        over_seeds(found, ["cell", "what", "layer"], "refit_accuracy").astype({"layer": int}),
        y="refit_accuracy", color="what", facet="cell", y_label="refitted probe",
        baselines={"probe_accuracy": "before", "baseline": "baseline"},
    )  # fmt: skip


def _of_task(rows: pd.DataFrame, task: str) -> pd.DataFrame:
    found = main_cells(rows, "ablation")
    found = found[found["task"] == task]
    return found.assign(cell=found["model"] + ", " + found["cell"], what=found["what"].map(WHAT))


def transfer(rows: pd.DataFrame) -> go.Figure:
    """Damage by the frozen best direction and by frozen LEACE at the layer where it is largest, by length."""
    found = main_cells(rows, "length")
    found = found[(found["span"] == "all") & (found["layer"] < LAST)]
    worst = found[found["length"] == found["length"].min()].sort_values("drop", ascending=False)
    worst = worst.drop_duplicates(["cell", "model", "what", "train_seed"])[
        ["cell", "model", "what", "train_seed", "layer"]
    ]
    table = over_seeds(found.merge(worst), ["cell", "model", "what", "length"], "drop").astype(
        {"length": int}
    )
    table = table.assign(panel=table["cell"] + ", " + table["what"].map(WHAT))
    table = table.sort_values(["_task", "panel", "_arch", "length"], kind="stable")
    return plots.length_curve(
        table, y="drop", color="model", facet="panel", y_label="largest drop", train_length=40
    )


FIGURES: dict[str, tuple[Callable[[pd.DataFrame], go.Figure], str]] = {
    "behaviour": (behaviour, "Accuracy of the models' own answers by sequence length; trained at 40 tokens."),
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
            "rows, LEACE, INLP.",
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
        "Largest drop over inner layers when the best direction or LEACE, fitted at 40 tokens, is taken out of longer "
        "sequences.",
    ),
}

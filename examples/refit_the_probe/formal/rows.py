"""Rows of the formal grid, named and chosen as its figures and claims need them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.shared.rows import learned_only, where
from probelens.examples.refit_the_probe.shared.setup import ARCHS, LABELS, NAMES, TASKS, TITLES
from probelens.results.report import Claim

COLUMNS = {"span", "control", "label", "layer", "length", "what", "lo", "hi", "accuracy", "drop", "floor"}

CELL = ("arch", "task", "train_seed", "embedding_std", "convolution")

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


def of_kind(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of one kind, named; a run that has none may lack their columns, and gets them empty."""
    found = rows[rows["kind"] == kind]
    if found.empty:
        found = found.reindex(columns=[*found.columns, *sorted(COLUMNS - set(found.columns))])
    return named(found)


def main_cells(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of one kind from the cells of the paper: usual embedding, with convolution, and the task learned."""
    found = of_kind(learned_only(rows, CELL), kind)
    return found[(found["embedding_std"] == 0.02) & found["convolution"].astype(bool)]


def over_seeds(rows: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """One row for each group: its only seed with its interval over sequences, or mean and interval over seeds."""
    from probelens.numerics.stats import hierarchical_bootstrap

    made = []
    # Near the ceiling a linear interval leaves the range of an accuracy; a drop may be of either sign.
    scale: Any = "logit" if value.endswith("accuracy") else "linear"
    for _, part in rows.groupby(by, sort=False, dropna=False):
        row = part.iloc[0].to_dict()
        if len(part) > 1:
            found = hierarchical_bootstrap([[v] for v in part[value].astype(float)], scale=scale)
            low, high = float(found.low), float(found.high)
            if scale == "logit" and float(found.se) == 0 and {"lo", "hi"} <= set(part):
                # Seeds that are all perfect don't show their spread; the sequences of the least certain one bound it.
                low, high = part["lo"].min(), part["hi"].max()
            row |= {value: float(found.estimate), "lo": low, "hi": high}
            others = ("untrained", "refit_accuracy", "probe_accuracy", "baseline", "majority")
            row |= {k: part[k].astype(float).mean() for k in others if k in part and k != value}
        made.append(row)
    return pd.DataFrame(made)


class Missing(ValueError):
    """The run has no row of the kind a claim needs."""

    def __init__(self, claim: str, paper: str) -> None:
        super().__init__(claim)
        self.claim = Claim(claim, paper, "not run", agrees=None)


def rows_of(rows: pd.DataFrame, kind: str, claim: str, paper: str, **columns: Any) -> pd.DataFrame:
    """Those of ``main_cells`` whose columns have these values; raises Missing where there are none."""
    found = main_cells(rows, kind)
    if found.empty or (found := where(found, **columns)).empty:
        raise Missing(claim, paper)
    return found

"""How a claim is judged: which rows may speak, and what their intervals allow to be said.

A claim agrees where every cell that can say something says so, and doesn't where one says otherwise with its whole
interval; where no cell can say, it stays open.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from probelens.examples.refit_the_probe.figures import main_cells
from probelens.report import Claim

__all__ = [
    "LEARNED",
    "MARGIN",
    "MUCH",
    "SOLVED",
    "Missing",
    "above",
    "every",
    "intervals",
    "learned",
    "rows_of",
]

LEARNED = 0.95  # at the trained length; a model below it can't speak for its architecture
SOLVED = 0.99  # "generalise perfectly"
MUCH = 0.10  # "costs much accuracy"; the paper gives no number
MARGIN = 0.02  # a refitted probe within this of the one before has recovered


class Missing(ValueError):
    """The run has no row of the kind a claim needs."""

    def __init__(self, claim: str, paper: str) -> None:
        super().__init__(claim)
        self.claim = Claim(claim, paper, "not run", agrees=None)


def rows_of(rows: pd.DataFrame, kind: str, claim: str, paper: str) -> pd.DataFrame:
    found = main_cells(rows, kind)
    if found.empty:
        raise Missing(claim, paper)
    return found


def every(verdicts: Iterable[bool | None]) -> bool | None:
    said = [bool(v) for v in verdicts if v is not None]
    return all(said) if said else None


def above(row: pd.Series, bound: float, value: str = "accuracy") -> bool | None:
    """Whether a value lies above a bound with its whole interval; None where the interval holds the bound."""
    lo, hi = (row["lo"], row["hi"]) if pd.notna(row.get("lo")) else (row[value], row[value])
    return True if lo > bound else False if hi < bound else None


def learned(found: pd.DataFrame) -> set[tuple[str, str]]:
    """Architecture and task of the cells that answer well at the length they were trained on."""
    at = found[(found["length"] == found["length"].min()) & (found["accuracy"] >= LEARNED)]
    return set(zip(at["arch"], at["task"], strict=True))


def intervals(found: pd.DataFrame) -> str:
    if "lo" not in found or found["lo"].isna().all():
        return ""
    return "; ".join(f"{lo:.3f} to {hi:.3f}" for lo, hi in zip(found["lo"], found["hi"], strict=True))

"""How a claim is judged: which rows may speak, and what their intervals allow to be said.

A claim agrees where all the cells it is about say so, each with its whole interval; it doesn't where one says otherwise
with its whole interval; in between, and where a family that it names hasn't learned the task, it stays open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.figures import main_cells
from probelens.examples.refit_the_probe.running import each
from probelens.results.report import Claim

__all__ = [
    "MARGIN",
    "MUCH",
    "READABLE",
    "SOLVED",
    "Missing",
    "above",
    "combined",
    "every",
    "fits",
    "intervals",
    "recovered",
    "rows_of",
]

SOLVED = 0.99  # "generalise perfectly"
MUCH = 0.10  # "costs much accuracy"; the paper gives no number
MARGIN = 0.02  # a refitted probe within this of the one before has recovered
READABLE = 0.1  # a probe this far above the best of its baselines reads something


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
    """False if one is, else None if one is or there are none, else True."""
    said = list(verdicts)
    if False in said:
        return False
    return None if None in said or not said else True


def above(row: pd.Series, bound: float, value: str = "accuracy") -> bool | None:
    """Whether a value lies above a bound with its whole interval; None where the interval holds the bound."""
    lo, hi = (row["lo"], row["hi"]) if pd.notna(row.get("lo")) else (row[value], row[value])
    return True if lo > bound else False if hi < bound else None


def fits(row: Any, word: str) -> bool | None:
    """Whether a profile is "immediate", "late" or "gradual", as its verdict has it.

    Without a word of its own a profile may still have left no room for the one that is asked for. None where it
    has, and where the model has not learned.
    """
    if row.verdict == word:
        return True
    if row.verdict == "not learned":
        return None
    if row.verdict != "undetermined":
        return False
    end = {name: getattr(row, name, math.nan) for name in ("early_share_hi", "final_share_hi", "concentration_lo", "com_lo", "com_hi")}  # fmt: skip
    no = {
        "immediate": end["early_share_hi"] <= 0.9,
        "late": end["final_share_hi"] <= 0.5,
        "gradual": end["concentration_lo"] >= 0.5 or end["com_lo"] >= 0.75 or end["com_hi"] <= 0.25,
    }[word]
    return False if no else None


def recovered(found: pd.DataFrame) -> list[bool | None]:
    """For each ablation whether the refitted probe reads as much as the one before, up to ``MARGIN``.

    By the interval of the gap; rows from before there was one are judged by the gap itself.
    """
    gap = found["probe_accuracy"] - found["refit_accuracy"]
    lo, hi = (found[c].fillna(gap) if c in found else gap for c in ("refit_gap_lo", "refit_gap_hi"))
    return [True if b <= MARGIN else False if a > MARGIN else None for a, b in zip(lo, hi, strict=True)]


def combined(
    parts: Sequence[tuple[float, float, float]], weights: Sequence[float]
) -> tuple[float, float, float]:
    """Weighted sum of independent estimates, each (value, lo, hi), with its interval from theirs.

    Source:
        Zou and Donner 2008, Statistics in Medicine 27 (MOVER): each side takes the distances to the limits
        that push the sum to that side.
    """
    pairs = list(zip(weights, parts, strict=True))
    value = sum(w * p[0] for w, p in pairs)
    down, up = (
        math.sqrt(sum((w * (p[0] - p[side if w > 0 else 3 - side])) ** 2 for w, p in pairs))
        for side in (1, 2)
    )
    return value, value - down, value + up


def intervals(found: pd.DataFrame, names: Sequence[str] = ()) -> str:
    """The intervals of rows in percent, each with its name where there are several."""
    if "lo" not in found or found["lo"].isna().all():
        return ""
    ends = [f"{r.lo:.1%} to {r.hi:.1%}" for r in each(found)]
    return ends[0] if len(ends) == 1 else "; ".join(f"{n} {e}" for n, e in zip(names, ends, strict=True))

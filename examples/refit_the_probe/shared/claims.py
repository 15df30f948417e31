"""How a claim is judged: which rows may speak, and what their intervals allow to be said.

A claim agrees where all the cells it is about say so, each with its whole interval; it doesn't where one says otherwise
with its whole interval; in between, and where a family that it names hasn't learned the task, it stays open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.shared.rows import each
from probelens.examples.refit_the_probe.shared.setup import RANKS
from probelens.results.report import Claim

SOLVED = 0.99  # "generalise perfectly"
MUCH = 0.10  # "costs much accuracy"; the paper gives no number
MARGIN = 0.02  # a refitted probe within this of the one before has recovered
READABLE = 0.1  # a probe this far above the best of its baselines reads something
FEW = 5  # layers; of fewer no share is worth a verdict
INLP = (
    "B. INLP against random subspaces of its rank: what looked inert carries most of the task",
    "reverses the conclusion",
)


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


def combined(parts: Sequence[tuple[float, float, float]], weights: Sequence[float]) -> tuple[float, float, float]:
    """Weighted sum of independent estimates, each (value, lo, hi), with its interval from theirs.

    Source: Zou and Donner 2008, Statistics in Medicine 27 (MOVER): each side takes the distances to the limits that
    push the sum to that side.
    """
    pairs = list(zip(weights, parts, strict=True))
    value = sum(w * p[0] for w, p in pairs)
    down, up = (math.sqrt(sum((w * (p[0] - p[side if w > 0 else 3 - side])) ** 2 for w, p in pairs)) for side in (1, 2))
    return value, value - down, value + up


def intervals(found: pd.DataFrame, names: Sequence[str] = ()) -> str:
    """The intervals of rows in percent, each with its name where there are several."""
    if "lo" not in found or found["lo"].isna().all():
        return ""
    ends = [f"{r.lo:.1%} to {r.hi:.1%}" for r in each(found)]
    return ends[0] if len(ends) == 1 else "; ".join(f"{n} {e}" for n, e in zip(names, ends, strict=True))


def with_known(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Ablations with the column ``known``: the best guess of the label, the last tokens' among them."""
    keys = [k for k in ("model", "arch", "task", "train_seed", "embedding_std", "convolution", "label") if k in rows]
    if "last_w" not in rows or rows["last_w"].isna().all():
        return found.assign(known=found["baseline"])
    last = rows[rows["kind"] == "probe"].groupby(keys, dropna=False)["last_w"].max().rename("_last")
    merged = found.merge(last.reset_index(), on=keys, how="left")
    return merged.assign(known=merged[["baseline", "_last"]].max(axis=1)).drop(columns="_last")


def readable(found: pd.DataFrame) -> pd.Series:
    return found["probe_accuracy"] > found["known"] + READABLE


def refit_claim(claim: str, paper: str, found: pd.DataFrame) -> Claim:
    """v2's claim that a refitted probe recovers, from ablations of readable inner layers.

    It agrees where the probe does at every one, and doesn't where at one it doesn't with the whole interval.
    """
    if found.empty:
        return Claim(claim, paper, "nothing is readable at an inner layer")
    back = recovered(found)
    cells = found.assign(back=[b is True for b in back]).groupby(["model", "cell", "train_seed"])["back"].all()
    said = f"at {back.count(True)} of {len(found)} readable inner layers; in {cells.sum()} of {len(cells)} cells at every one"
    if None in back:
        said += f"; open at {back.count(None)}"
    least = found.assign(gap=found["probe_accuracy"] - found["refit_accuracy"]).nlargest(1, "gap").iloc[0]
    known = pd.notna(least.get("refit_gap_lo"))
    ends = f" (gap {least['refit_gap_lo']:.1%} to {least['refit_gap_hi']:.1%})" if known else ""
    note = f"Recovered: within {100 * MARGIN:.0f} points. Least: {least['model']} {least['cell']} block {least['layer']:.0f}, {least['probe_accuracy']:.1%} to {least['refit_accuracy']:.1%}{ends}."
    return Claim(claim, paper, said, "", every(back), note)


def inlp_claim(one: pd.DataFrame, whole: pd.DataFrame, dose: pd.DataFrame) -> Claim:
    """v2's claim about INLP, from inner layers: ablations of the best direction, of INLP to chance, and of its first ranks.

    It agrees where at some rank INLP costs half of the task more than random subspaces of that rank, with its whole
    interval, at most of the layers that one direction leaves alone, and doesn't where at every rank it costs less
    than that at most of them. At full rank any subspace may take everything, so that alone says nothing; nor do fewer
    than ``FEW`` layers.
    """
    keys = ["model", "cell", "train_seed", "layer"]
    one = one[(one["drop"] < MUCH) & readable(one)][keys]
    said, shares = [], []
    for rank in RANKS:
        part = dose[dose["rank"] == rank].merge(one, on=keys) if len(dose) else dose
        if len(part):
            carries, less = part["effect_lo"] > 0.5, part["effect_hi"] < 0.5
            shares.append((float(carries.mean()), float(less.mean())))
            below = (part["effect_hi"] < 0).sum()
            fewer = f" (and less than they do at {below})" if below else ""
            said.append(f"{carries.sum()} of {len(part)} at rank {rank}{fewer}")
    whole = whole.merge(one, on=keys)
    note = ""
    if len(whole):
        matched = whole["effect_against"] == "random_matched"
        note = f"Against random subspaces that remove as much variance as INLP to chance (median rank {whole['rank'].median():.0f}): {(matched & (whole['effect_lo'] > 0.5)).sum()} of {matched.sum()}."
    if not said:
        return Claim(*INLP, f"no readable inner layer loses less than {MUCH:.0%} by one direction", note=note)
    text = (
        f"{len(one)} readable inner layers lose less than {MUCH:.0%} by one direction; INLP costs half of the task more than "
        f"random subspaces of its rank at {', '.join(said)}"
    )
    verdict = True if any(c > 0.5 for c, _ in shares) else False if all(n > 0.5 for _, n in shares) else None
    return Claim(*INLP, text, "", verdict if len(one) >= FEW else None, note)

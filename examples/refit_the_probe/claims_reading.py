"""The paper's claims about what models answer and where their state is readable: 1 to 5, and the Counter beside them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from probelens.examples.refit_the_probe.claim_rules import (
    SOLVED,
    Missing,
    above,
    every,
    intervals,
    learned,
    rows_of,
)
from probelens.examples.refit_the_probe.figures import over_seeds
from probelens.examples.refit_the_probe.running import each
from probelens.examples.refit_the_probe.setup import LABELS, NAMES, TITLES
from probelens.report import Claim

__all__ = ["READING"]

RECURRENT, SSM = ("lstm", "gru"), ("mamba", "mamba2")


def _sizes(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "1. Size: 4 layers, d_model 128, about 830K parameters where possible", "≈ 830K"
    found = rows_of(rows, "training", claim, paper).dropna(subset=["n_params"]).drop_duplicates("arch")
    said = ", ".join(f"{NAMES[r.arch]} {r.n_params / 1000:.0f}K" for r in each(found))
    return [
        Claim(
            claim, paper, said, agrees=None, note="Mamba and Mamba-2 with their published blocks are smaller."
        )
    ]


def _accuracies(rows: pd.DataFrame, claim: str, paper: str) -> pd.DataFrame:
    found = rows_of(rows, "behaviour", claim, paper)
    return over_seeds(found[found["span"] == "all"], ["arch", "task", "length"], "accuracy")


def _perfect(rows: pd.DataFrame) -> list[Claim]:
    made = []
    for task in ("parity", "s3"):
        claim, paper = f"2. LSTM and GRU generalise perfectly on {TITLES[task]}", "100 % at 40 to 120 tokens"
        found = _accuracies(rows, claim, paper)
        found = found[found["arch"].isin(RECURRENT) & (found["task"] == task)]
        if found.empty:
            made.append(Missing(claim, paper).claim)
            continue
        worst = found.sort_values("accuracy").drop_duplicates("arch")
        said = ", ".join(f"{NAMES[r.arch]} {r.accuracy:.1%} at {r.length:.0f}" for r in each(worst))
        able = learned(found)
        agrees = every(r.accuracy >= SOLVED if (r.arch, task) in able else None for r in each(worst))
        made.append(Claim(claim, paper, f"worst: {said}", intervals(worst), agrees))
    return made


def _by_family(
    found: pd.DataFrame, task: str, beyond: int, families: Sequence[Sequence[str]]
) -> tuple[list[list[pd.Series]], str]:
    """Mean accuracy at longer sequences: of each family those that learned the task, and all of them in words.

    The words are empty where a family wasn't run.
    """
    part = found[(found["task"] == task) & (found["length"] > beyond)]
    mean = part.groupby("arch")[["accuracy", "lo", "hi"]].mean()
    able = learned(found)
    said = [
        f"{NAMES[arch]} {mean.loc[arch, 'accuracy']:.1%}" + ("" if (arch, task) in able else " (not learned)")
        for arch in mean.index
    ]
    rows = {str(arch): row for arch, row in mean.iterrows() if (arch, task) in able}
    groups = [[rows[arch] for arch in some if arch in rows] for some in families]
    whole = all(any(arch in mean.index for arch in some) for some in families)
    return groups, ", ".join(said) if whole else ""


def _compare(low: list[pd.Series], high: list[pd.Series]) -> bool | None:
    """Whether the worst of some is above the best of others, by intervals."""
    worst = min(high, key=lambda r: r["accuracy"])
    best = max(low, key=lambda r: r["accuracy"])
    return True if worst["lo"] > best["hi"] else False if worst["hi"] < best["lo"] else None


def _beats(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "2. LSTM and GRU beat SSMs and Transformer on Dyck", "recurrent above the others"
    found = _accuracies(rows, claim, paper)
    (low, high), said = _by_family(found, "dyck", 40, ((*SSM, "transformer"), RECURRENT))
    if not said:
        return [Missing(claim, paper).claim]
    agrees = _compare(low, high) if high and low else None
    return [Claim(claim, paper, f"mean of 60 to 120 tokens: {said}", "", agrees)]


def _order(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "2. Order on S3 as on Parity", "recurrent > SSM > Transformer"
    found = _accuracies(rows, claim, paper)
    verdicts: list[bool | None] = []
    said = []
    for task in ("parity", "s3"):
        groups, words = _by_family(found, task, 40, (("transformer",), SSM, RECURRENT))
        if not words:
            continue
        said.append(f"{TITLES[task]}: {words}")
        for low, high in itertools.pairwise(groups):
            verdicts.append(_compare(low, high) if low and high else None)
    both = None if len(said) < 2 or (None in verdicts and False not in verdicts) else every(verdicts)
    return [
        Claim(claim, paper, "; ".join(said) or "not run", "mean of 60 to 120 tokens" if said else "", both)
    ]


def _indices(rows: pd.DataFrame, claim: str, paper: str) -> pd.DataFrame:
    found = rows_of(rows, "indices", claim, paper)
    return found[found["span"] == "late"]


def _words(found: pd.DataFrame) -> str:
    said = []
    for arch, part in found.groupby("arch", sort=False):
        words = list(dict.fromkeys(part["verdict"]))
        com = part["com"].dropna() if "com" in part else pd.Series(dtype=float)
        said.append(
            f"{NAMES[str(arch)]} {' / '.join(words)}" + (f" (COM {com.mean():.2f})" if len(com) else "")
        )
    return ", ".join(said)


def _expected(found: pd.DataFrame, word: str) -> bool | None:
    known = found[~found["verdict"].isin(["undetermined", "not learned"])]
    # A profile without a word of its own may still have left no room for the one expected.
    ruled_out = found[(found["verdict"] == "undetermined")]
    if word == "late" and "final_share_hi" in found:
        ruled_out = ruled_out[ruled_out["final_share_hi"] <= 0.5]
    elif word == "gradual" and "concentration_lo" in found:
        ruled_out = ruled_out[
            (ruled_out["concentration_lo"] >= 0.5)
            | (ruled_out["com_lo"] >= 0.75)
            | (ruled_out["com_hi"] <= 0.25)
        ]
    return every([v == word for v in known["verdict"]] + [False] * len(ruled_out))


def _late(rows: pd.DataFrame) -> list[Claim]:
    made = []
    for task in ("parity", "s3"):
        for archs, word, paper in (
            ((*SSM, *RECURRENT), "late", "jump at the last layer"),
            (("transformer",), "gradual", "gradual rise from L1 to L3"),
        ):
            who = "Transformer" if len(archs) == 1 else "Mamba, Mamba-2, LSTM and GRU"
            claim = f"3. {TITLES[task]}: {who}"
            try:
                found = _indices(rows, claim, paper)
            except Missing as err:
                made.append(err.claim)
                continue
            found = found[(found["task"] == task) & (found["label"] == "state") & found["arch"].isin(archs)]
            if found.empty:
                made.append(Missing(claim, paper).claim)
                continue
            made.append(Claim(claim, paper, _words(found), _bounds(found), _expected(found, word)))
    return made


def _bounds(found: pd.DataFrame) -> str:
    if "final_share" not in found or found["final_share"].isna().all():
        return ""
    part = found.dropna(subset=["final_share"])
    said = [f"{NAMES[r.arch]} {r.final_share_lo:.2f} to {r.final_share_hi:.2f}" for r in each(part)]
    return "final share " + ", ".join(said)


def _dyck(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "4. Dyck depth: Transformer near-perfect at L0 and L1", "near-perfect at L0 and L1"
    found = rows_of(rows, "probe", claim, paper)
    found = found[(found["control"] == "task") & (found["task"] == "dyck") & (found["span"] == "late")]
    made = []
    for label in LABELS["dyck"]:
        part = found[
            (found["arch"] == "transformer") & (found["label"] == label) & found["layer"].isin([0, 1])
        ]
        name = claim if label == "depth" else "4. Dyck, innermost bracket: the same"
        if part.empty:
            made.append(Missing(name, paper).claim)
            continue
        part = over_seeds(part, ["layer"], "accuracy")
        said = ", ".join(f"L{r.layer:.0f} {r.accuracy:.1%} (untrained {r.untrained:.1%})" for r in each(part))
        made.append(Claim(name, paper, said, intervals(part), every(above(r, 0.95) for _, r in part.iterrows()),
                          "What the untrained model shows as well was not learned."))  # fmt: skip
    claim, paper = "4. Dyck depth: recurrent and SSM build up layer by layer", "gradual"
    try:
        words = _indices(rows, claim, paper)
    except Missing as err:
        return [*made, err.claim]
    words = words[(words["task"] == "dyck") & (words["label"] == "depth") & (words["arch"] != "transformer")]
    if words.empty:
        return [*made, Missing(claim, paper).claim]
    return [*made, Claim(claim, paper, _words(words), _bounds(words), _expected(words, "gradual"))]


def _groups(
    rows: pd.DataFrame,
    claim: str,
    paper: str,
    one: tuple[str, str],
    near: tuple[str, str],
    far: tuple[str, str],
) -> Claim:
    """Whether a task's centre of mass lies nearer to one task's than to another's, family by family."""
    found = _indices(rows, claim, paper)
    if "com" not in found:
        raise Missing(claim, paper)
    said, verdicts = [], list[bool | None]()
    for arch in NAMES:
        coms = []
        for task, label in (one, near, far):
            part = found[
                (found["arch"] == arch) & (found["task"] == task) & (found["label"] == label)
            ].dropna(subset=["com"])
            coms.append(None if part.empty else part[["com", "com_lo", "com_hi"]].astype(float).mean())
        if any(c is None for c in coms):
            continue
        x, a, b = coms
        closer = abs(x["com"] - a["com"]) < abs(x["com"] - b["com"])  # type: ignore[index]
        apart = a["com_hi"] < b["com_lo"] or b["com_hi"] < a["com_lo"]  # type: ignore[index]
        verdicts.append(bool(closer) if apart else None)
        said.append(f"{NAMES[arch]} {x['com']:.2f} ({a['com']:.2f} and {b['com']:.2f})")  # type: ignore[index]
    text = "COM " + ", ".join(said) if said else "no family learned all three tasks"
    return Claim(
        claim, paper, text, "", every(verdicts), f"in brackets {TITLES[near[0]]} and {TITLES[far[0]]}"
    )


def _grouping(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "5. S3 groups with Parity, not with Dyck, in all families", "all five"
    return [_groups(rows, claim, paper, ("s3", "state"), ("parity", "state"), ("dyck", "depth"))]


def _counter(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "(added) Counter groups with Dyck depth, so depth needs no stack", "not in the paper"
    return [_groups(rows, claim, paper, ("counter", "depth"), ("dyck", "depth"), ("parity", "state"))]


READING = (_sizes, _perfect, _beats, _order, _late, _dyck, _grouping, _counter)

"""The paper's claims about what models use: ablation, convolution, refit, INLP, erasure (6, 7, A, B, D)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pandas as pd

from probelens.examples.refit_the_probe.formal.rows import LAST, Missing, over_seeds, rows_of
from probelens.examples.refit_the_probe.shared.claims import (
    INLP,
    MUCH,
    READABLE,
    above,
    every,
    inlp_claim,
    intervals,
    readable,
    refit_claim,
    with_known,
)
from probelens.examples.refit_the_probe.shared.rows import each, of_learned, where
from probelens.examples.refit_the_probe.shared.setup import TITLES
from probelens.numerics.permutation import holm, sign_flip
from probelens.numerics.stats import hierarchical_bootstrap
from probelens.results.report import Claim

INNER = tuple(range(LAST))
SEEDS = 6  # with fewer, no sign-flip test can come under p = 0.05, two-sided
PAPER_CONV = {"s3": -12.64, "parity": -6.83, "dyck": 4.04}


def _inner(rows: pd.DataFrame, what: str, claim: str, paper: str) -> pd.DataFrame:
    """Ablations at the blocks whose output isn't what the readout reads.

    Column ``known``: what a label can be guessed with at best, from its frequency, the position or the last tokens.
    """
    found = rows_of(rows, "ablation", claim, paper, what=what, layer=INNER)
    found = found[found["verdict"] != "floor"]
    if found.empty:
        raise Missing(claim, paper)
    return with_known(found, rows)


def _largest(found: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of each model and label the layer, or the layer and length, with the largest drop over its seeds."""
    return (
        over_seeds(found, ["cell", "arch", *by], "drop")
        .sort_values("drop", ascending=False)
        .drop_duplicates(["cell", "arch"])
        .sort_values(["_task", "_arch"])
    )


def _direction(rows: pd.DataFrame, what: str, name: str) -> Claim:
    claim, paper = f"6. Ablating {name} costs much accuracy (Parity, Dyck)", "much, no number known"
    found = where(_inner(rows, what, claim, paper), task=("parity", "dyck"))
    if found.empty:
        raise Missing(claim, paper)
    worst = _largest(found, ["layer"])
    names = [f"{r.model} {r.cell}" for r in each(worst)]
    said = ", ".join(f"{n} {r.drop:.1%}" for n, r in zip(names, each(worst), strict=True))
    verdict = every(above(r, MUCH, "drop") for _, r in worst.iterrows())
    said = f"largest of the inner layers: {said}"
    return Claim(claim, paper, said, intervals(worst, names), verdict, f"Much is {MUCH:.0%}.")


def _longer(rows: pd.DataFrame) -> Claim:
    claim, paper = "6. The same at 80, 100 and 120 tokens, frozen at 40, beyond the 40th", "much, no number known"
    longer = rows_of(rows, "length", claim, paper)
    longer = where(
        longer[longer["length"] >= 80], what="direction", span="beyond", task=("parity", "dyck"), layer=INNER
    )
    worst = longer[~longer["floor"].astype(bool)]
    counted = set(zip(worst["model"], worst["cell"], strict=True))
    cells = dict.fromkeys(zip(longer["model"], longer["cell"], strict=True))
    lost = [f"{model} {cell}" for model, cell in cells if (model, cell) not in counted]
    note = f"Left out, within 0.2 of chance there: {', '.join(lost)}." if lost else ""
    if worst.empty:
        return Claim(claim, paper, "no model answers there" if lost else "not run", note=note)
    worst = _largest(worst, ["layer", "length"])
    names = [f"{r.model} {r.cell}" for r in each(worst)]
    said = ", ".join(f"{n} {r.drop:.1%} at {r.length:.0f}" for n, r in zip(names, each(worst), strict=True))
    verdict = every(above(r, MUCH, "drop") for _, r in worst.iterrows())
    return Claim(claim, paper, said, intervals(worst, names), verdict, note)


def _convolution(rows: pd.DataFrame, task: str) -> Claim:
    behaviour = where(rows, kind="behaviour", arch="mamba", embedding_std=0.02)
    gaps = {name: _gaps(where(behaviour, task=name)) for name in PAPER_CONV}
    tested = {name: float(sign_flip(found["mean"]).p) for name, found in gaps.items() if len(found) >= SEEDS}
    p = dict(zip(tested, holm(list(tested.values())).tolist(), strict=True)) if tested else {}
    said, interval, verdict, paper, found = list[str](), "", None, PAPER_CONV[task], gaps[task]
    if n := len(found):
        seeds = f"{n} seed{'s' * (n > 1)}"
        here = found.mean()
        said.append(
            f"retrained {here['first']:+.1f} at {found.attrs['at']:.0f} tokens, {here['mean']:+.1f} over all lengths ({seeds})"
        )
        if n > 1:
            over = hierarchical_bootstrap([[gap] for gap in found["mean"]])
            interval = f"{float(over.low):.1f} to {float(over.high):.1f}"
        if task in p:
            said.append(f"sign-flip p {p[task]:.3f}, after Holm")
            differs = p[task] < 0.05
            verdict = not differs if task == "dyck" else bool((here["mean"] > 0) == (paper > 0)) if differs else None
    elif len(where(behaviour, task=task, convolution=False)):
        said.append("one of the two did not learn the task")
    past = where(rows, kind="convolution", arch="mamba", task=task, how="current_tap")
    if len(past):
        said.append(f"past taps zeroed in the trained model {-100 * past['drop'].mean():+.1f}")
    claim = f"7. Mamba without its convolution: {TITLES[task]}"
    number = f"{paper:+.2f} points" + (", not significant" if task == "dyck" else "")
    note = f"A sign-flip test needs at least {SEEDS} seeds for p < 0.05." if said and task not in p else ""
    return Claim(claim, number, "; ".join(said) or "not run", interval, verdict, note)


def _gaps(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Accuracy without the convolution minus with it, in points, of the seeds that learned with it.

    Columns: ``first``, at the length of training, which is kept in ``attrs["at"]``, and ``mean``, over all lengths.
    """
    part = where(behaviour, span="all")
    table = part.pivot_table(index=["train_seed", "length"], columns="convolution", values="accuracy").dropna()
    if not {True, False} <= set(table.columns) or table.empty:
        return pd.DataFrame({"first": [], "mean": []})
    at = float(part["length"].min())
    with_it = of_learned(where(behaviour, convolution=True))
    able = set(with_it[with_it["n_learned"] > 0]["train_seed"])
    gap = 100 * (table[False] - table[True])
    found = pd.DataFrame({"first": gap.xs(at, level="length"), "mean": gap.groupby(level="train_seed").mean()})
    found = found[found.index.isin(able)]
    found.attrs["at"] = at
    return found


def _refit(rows: pd.DataFrame, what: str, name: str) -> Claim:
    claim, paper = f"A. A probe refitted after removing {name} recovers", "in every cell"
    found = _inner(rows, what, claim, paper)
    made = refit_claim(claim, paper, found[readable(found)])
    if what != "means":
        return made
    # Equal class means leave a linear probe nothing on the rows that they are of.
    return dataclasses.replace(
        made, note=f"{made.note} Near chance by construction: equal class means tell a linear probe nothing."
    )


def _inlp(rows: pd.DataFrame) -> Claim:
    one = _inner(rows, "direction", *INLP)
    dose = rows_of(rows, "dose", *INLP) if "dose" in set(rows["kind"]) else rows.iloc[:0]
    return inlp_claim(one, _inner(rows, "inlp", *INLP), dose)


def _chance(rows: pd.DataFrame) -> Claim:
    claim, paper = "D. Erasure to chance, at every layer of every cell", "reached nowhere within its budget"
    found = with_known(rows_of(rows, "ablation", claim, paper), rows)
    said, reached, notes = [], 0, []
    for what, name in (("leace", "LEACE"), ("inlp", "INLP")):
        part = where(found[found["layer"] >= 0], what=what)
        if part.empty:
            continue
        inner, done = part["layer"] < LAST, part["at_chance"].astype(bool)
        over = part["refit_accuracy"] - part["baseline"]
        words = []
        for at, which in ((inner, "inner"), (~inner, "last")):
            if at.any():
                left = over[at & ~done]
                most = f" (at the others up to {left.max():.2f} above)" if len(left) else ""
                words.append(f"{(at & done).sum()} of {at.sum()} {which} layers{most}")
        said.append(f"{name}: a fresh linear probe is at chance at {' and '.join(words)}")
        reached += int(done.sum())
        erased = part[done & inner & readable(part)]
        by_position = (erased["refit_position_accuracy"] > erased["baseline"] + READABLE).sum()
        mlp = (erased["refit_mlp_accuracy"] > erased["baseline"] + READABLE).sum()
        notes.append(
            f"{name}: of {len(erased)} inner layers erased this way, a probe at each position still reads {by_position}, an MLP {mlp}"
        )
    if not said:
        raise Missing(claim, paper)
    note = f"{'; '.join(notes)}. The budget here is larger than the paper's."
    return Claim(claim, paper, "; ".join(said), "", reached == 0, note)


USING: tuple[Callable[[pd.DataFrame], Claim], ...] = (
    partial(_direction, what="direction", name="the best probe direction"),
    _longer,
    *(partial(_convolution, task=task) for task in PAPER_CONV),
    partial(_refit, what="direction", name="the best direction"),
    partial(_refit, what="rows", name="all rows of the probe"),
    _inlp,
    _chance,
)

# The same of the class means, in runs that ablated them: what holds of a filter need not hold of the variable.
UNDER_MEANS: tuple[Callable[[pd.DataFrame], Claim], ...] = (
    partial(_direction, what="mean_direction", name="the best class-mean direction"),
    partial(_refit, what="mean_direction", name="the best class-mean direction"),
    partial(_refit, what="means", name="the span of the class means"),
)

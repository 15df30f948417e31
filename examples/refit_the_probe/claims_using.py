"""The paper's claims about what models use: ablation, convolution, refit, INLP, erasure (6, 7, A, B, D)."""

from __future__ import annotations

import pandas as pd

from probelens.examples.refit_the_probe.claim_rules import (
    MARGIN,
    MUCH,
    READABLE,
    Missing,
    above,
    every,
    intervals,
    recovered,
    rows_of,
)
from probelens.examples.refit_the_probe.figures import LAST, over_seeds
from probelens.examples.refit_the_probe.formal_cell import RANKS
from probelens.examples.refit_the_probe.running import each
from probelens.examples.refit_the_probe.setup import TITLES
from probelens.examples.refit_the_probe.speaking import of_learned
from probelens.numerics.permutation import holm, sign_flip
from probelens.numerics.stats import hierarchical_bootstrap
from probelens.results.report import Claim

__all__ = ["INLP", "USING", "inlp_claim", "readable", "refit_claim", "with_known"]

INLP = (
    "B. INLP against random subspaces of its rank: what looked inert carries most of the task",
    "reverses the conclusion",
)
SEEDS = 6  # with fewer, no sign-flip test can come under p = 0.05, two-sided
FEW = 5  # layers; of fewer no share is worth a verdict
PAPER_CONV = {"s3": -12.64, "parity": -6.83, "dyck": 4.04}


def _inner(rows: pd.DataFrame, what: str, claim: str, paper: str) -> pd.DataFrame:
    """Ablations at the blocks whose output isn't what the readout reads.

    Column ``known``: what a label can be guessed with at best, from its frequency, the position or the last tokens.
    """
    found = rows_of(rows, "ablation", claim, paper)
    found = found[
        (found["what"] == what)
        & (found["layer"] >= 0)
        & (found["layer"] < LAST)
        & (found["verdict"] != "floor")
    ]
    if found.empty:
        raise Missing(claim, paper)
    return with_known(found, rows)


def with_known(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Ablations with the column ``known``: the best guess of the label, the last tokens' among them."""
    keys = [
        k
        for k in ("model", "arch", "task", "train_seed", "embedding_std", "convolution", "label")
        if k in rows
    ]
    if "last_w" not in rows or rows["last_w"].isna().all():
        return found.assign(known=found["baseline"])
    last = rows[rows["kind"] == "probe"].groupby(keys, dropna=False)["last_w"].max().rename("_last")
    merged = found.merge(last.reset_index(), on=keys, how="left")
    return merged.assign(known=merged[["baseline", "_last"]].max(axis=1)).drop(columns="_last")


def readable(found: pd.DataFrame) -> pd.Series:
    return found["probe_accuracy"] > found["known"] + READABLE


def _largest(found: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of each model and label the layer, or the layer and length, with the largest drop over its seeds."""
    return (
        over_seeds(found, ["cell", "arch", *by], "drop")
        .sort_values("drop", ascending=False)
        .drop_duplicates(["cell", "arch"])
        .sort_values(["_task", "_arch"])
    )


def _direction(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = (
        "6. Ablating the best probe direction costs much accuracy (Parity, Dyck)",
        "much, no number known",
    )
    found = _inner(rows, "direction", claim, paper)
    found = found[found["task"].isin(["parity", "dyck"])]
    if found.empty:
        raise Missing(claim, paper)
    worst = _largest(found, ["layer"])
    names = [f"{r.model} {r.cell}" for r in each(worst)]
    said = ", ".join(f"{n} {r.drop:.1%}" for n, r in zip(names, each(worst), strict=True))
    verdict = every(above(r, MUCH, "drop") for _, r in worst.iterrows())
    note = f"Much is {MUCH:.0%}."
    made = [
        Claim(claim, paper, f"largest of the inner layers: {said}", intervals(worst, names), verdict, note)
    ]
    claim = "6. The same at 80, 100 and 120 tokens, frozen at 40, beyond the 40th"
    try:
        longer = rows_of(rows, "length", claim, paper)
    except Missing as err:
        return [*made, err.claim]
    longer = longer[
        (longer["what"] == "direction")
        & (longer["span"] == "beyond")
        & (longer["length"] >= 80)
        & longer["task"].isin(["parity", "dyck"])
    ]
    longer = longer[(longer["layer"] >= 0) & (longer["layer"] < LAST)]
    worst = longer[~longer["floor"].astype(bool)]
    heard = set(zip(worst["model"], worst["cell"], strict=True))
    lost = [
        f"{m} {c}"
        for m, c in dict.fromkeys(zip(longer["model"], longer["cell"], strict=True))
        if (m, c) not in heard
    ]
    note = f"Within 0.2 of chance there, and silent: {', '.join(lost)}." if lost else ""
    if worst.empty:
        return [*made, Claim(claim, paper, "no model answers there" if lost else "not run", note=note)]
    worst = _largest(worst, ["layer", "length"])
    names = [f"{r.model} {r.cell}" for r in each(worst)]
    said = ", ".join(f"{n} {r.drop:.1%} at {r.length:.0f}" for n, r in zip(names, each(worst), strict=True))
    verdict = every(above(r, MUCH, "drop") for _, r in worst.iterrows())
    return [*made, Claim(claim, paper, said, intervals(worst, names), verdict, note)]


def _convolution(rows: pd.DataFrame) -> list[Claim]:
    behaviour = rows[
        (rows["kind"] == "behaviour") & (rows["arch"] == "mamba") & (rows["embedding_std"] == 0.02)
    ]
    test_time = rows[(rows["kind"] == "convolution") & (rows["arch"] == "mamba")]
    said: dict[str, list[str]] = {task: [] for task in PAPER_CONV}
    gaps = {task: _gaps(behaviour[behaviour["task"] == task]) for task in PAPER_CONV}
    tested = [task for task, found in gaps.items() if len(found) >= SEEDS]
    p = (
        dict(zip(tested, holm([float(sign_flip(gaps[t]["mean"]).p) for t in tested]).tolist(), strict=True))
        if tested
        else {}
    )
    made = []
    for task, paper in PAPER_CONV.items():
        interval, verdict, found = "", None, gaps[task]
        if n := len(found):
            seeds = f"{n} seed{'s' * (n > 1)}"
            here = found.mean()
            said[task].append(
                f"retrained {here['first']:+.1f} at {found.attrs['at']:.0f} tokens, {here['mean']:+.1f} over all lengths ({seeds})"
            )
            if n > 1:
                over = hierarchical_bootstrap([[gap] for gap in found["mean"]])
                interval = f"{float(over.low):.1f} to {float(over.high):.1f}"
            if task in p:
                said[task].append(f"sign-flip p {p[task]:.3f}, after Holm")
                differs = p[task] < 0.05
                verdict = (
                    not differs
                    if task == "dyck"
                    else bool((here["mean"] > 0) == (paper > 0))
                    if differs
                    else None
                )
        elif len(behaviour[(behaviour["task"] == task) & ~behaviour["convolution"].astype(bool)]):
            said[task].append("one of the two did not learn the task")
        past = (
            test_time[(test_time["task"] == task) & (test_time["how"] == "current_tap")]
            if len(test_time)
            else test_time
        )
        if len(past):
            said[task].append(f"past taps zeroed in the trained model {-100 * past['drop'].mean():+.1f}")
        number = f"{paper:+.2f} points" + (", not significant" if task == "dyck" else "")
        note = (
            f"A sign-flip test needs at least {SEEDS} seeds for p < 0.05."
            if said[task] and task not in p
            else ""
        )
        made.append(
            Claim(
                f"7. Mamba without its convolution: {TITLES[task]}",
                number,
                "; ".join(said[task]) or "not run",
                interval,
                verdict,
                note,
            )
        )
    return made


def _gaps(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Accuracy without the convolution minus with it, in points, of the seeds that learned with it.

    Columns: ``first``, at the length of training, which stands in ``attrs["at"]``, and ``mean``, over all lengths.
    """
    part = behaviour[behaviour["span"] == "all"]
    table = part.pivot_table(
        index=["train_seed", "length"], columns="convolution", values="accuracy"
    ).dropna()
    if not {True, False} <= set(table.columns) or table.empty:
        return pd.DataFrame({"first": [], "mean": []})
    at = float(part["length"].min())
    with_it = of_learned(behaviour[behaviour["convolution"].astype(bool)])
    able = set(with_it[with_it["n_learned"] > 0]["train_seed"])
    gap = 100 * (table[False] - table[True])
    found = pd.DataFrame(
        {"first": gap.xs(at, level="length"), "mean": gap.groupby(level="train_seed").mean()}
    )
    found = found[found.index.isin(able)]
    found.attrs["at"] = at
    return found


def _refit(rows: pd.DataFrame) -> list[Claim]:
    made = []
    for what, name in (("direction", "the best direction"), ("rows", "all rows of the probe")):
        claim, paper = f"A. A probe refitted after removing {name} recovers", "in every cell"
        try:
            found = _inner(rows, what, claim, paper)
        except Missing as err:
            made.append(err.claim)
            continue
        made.append(refit_claim(claim, paper, found[readable(found)]))
    return made


def refit_claim(claim: str, paper: str, found: pd.DataFrame) -> Claim:
    """v2's claim that a refitted probe recovers, from ablations of readable inner layers.

    It agrees where the probe does at every one, and doesn't where at one it doesn't with the whole interval.
    """
    if found.empty:
        return Claim(claim, paper, "nothing is readable at an inner layer")
    back = recovered(found)
    cells = (
        found.assign(back=[b is True for b in back]).groupby(["model", "cell", "train_seed"])["back"].all()
    )
    said = f"at {back.count(True)} of {len(found)} readable inner layers; in {cells.sum()} of {len(cells)} cells at every one"
    if None in back:
        said += f"; open at {back.count(None)}"
    least = found.assign(gap=found["probe_accuracy"] - found["refit_accuracy"]).nlargest(1, "gap").iloc[0]
    ends = (
        f" (gap {least['refit_gap_lo']:.1%} to {least['refit_gap_hi']:.1%})"
        if pd.notna(least.get("refit_gap_lo"))
        else ""
    )
    note = f"Recovered: within {100 * MARGIN:.0f} points. Least: {least['model']} {least['cell']} block {least['layer']:.0f}, {least['probe_accuracy']:.1%} to {least['refit_accuracy']:.1%}{ends}."
    return Claim(claim, paper, said, "", every(back), note)


def _inlp(rows: pd.DataFrame) -> list[Claim]:
    one = _inner(rows, "direction", *INLP)
    dose = rows_of(rows, "dose", *INLP) if "dose" in set(rows["kind"]) else rows.iloc[:0]
    return [inlp_claim(one, _inner(rows, "inlp", *INLP), dose)]


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
            said.append(
                f"{carries.sum()} of {len(part)} at rank {rank}"
                + (f" (and less than they do at {below})" if below else "")
            )
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


def _chance(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "D. Erasure to chance, at every layer of every cell", "reached nowhere within its budget"
    found = rows_of(rows, "ablation", claim, paper)
    found = with_known(found, rows)
    said, reached, notes = [], 0, []
    for what, name in (("leace", "LEACE"), ("inlp", "INLP")):
        part = found[(found["what"] == what) & (found["layer"] >= 0)]
        if part.empty:
            continue
        inner, done = part["layer"] < LAST, part["at_chance"].astype(bool)
        over = part["refit_accuracy"] - part["baseline"]
        words = []
        for where, which in ((inner, "inner"), (~inner, "last")):
            if where.any():
                left = over[where & ~done]
                words.append(
                    f"{(where & done).sum()} of {where.sum()} {which} layers"
                    + (f" (at the others up to {left.max():.2f} above)" if len(left) else "")
                )
        said.append(f"{name}: a fresh linear probe is at chance at {' and '.join(words)}")
        reached += int(done.sum())
        gone = part[done & inner & readable(part)]
        by_position = (gone["refit_position_accuracy"] > gone["baseline"] + READABLE).sum()
        mlp = (gone["refit_mlp_accuracy"] > gone["baseline"] + READABLE).sum()
        notes.append(
            f"{name}: of {len(gone)} inner layers erased so, a probe at each position still reads {by_position}, an MLP {mlp}"
        )
    if not said:
        raise Missing(claim, paper)
    return [
        Claim(
            claim,
            paper,
            "; ".join(said),
            "",
            reached == 0,
            f"{'; '.join(notes)}. The budget here is larger than the paper's.",
        )
    ]


USING = (_direction, _convolution, _refit, _inlp, _chance)

"""The paper's claims about what models use: ablation, convolution, refit, INLP, erasure (6, 7, A, B, D)."""

from __future__ import annotations

import pandas as pd

from probelens.examples.refit_the_probe.claim_rules import (
    MARGIN,
    MUCH,
    Missing,
    above,
    every,
    intervals,
    learned,
    rows_of,
)
from probelens.examples.refit_the_probe.figures import LAST
from probelens.examples.refit_the_probe.running import each
from probelens.examples.refit_the_probe.setup import TITLES
from probelens.report import Claim

__all__ = ["INLP", "USING", "inlp_claim"]

INLP = (
    "B. INLP against random subspaces of its rank: what looked inert carries most of the task",
    "reverses the conclusion",
)
PAPER_CONV = {"s3": -12.64, "parity": -6.83, "dyck": 4.04}


def _inner(rows: pd.DataFrame, what: str, claim: str, paper: str) -> pd.DataFrame:
    """Ablations at the blocks whose output isn't what the readout reads."""
    found = rows_of(rows, "ablation", claim, paper)
    found = found[
        (found["what"] == what)
        & (found["layer"] >= 0)
        & (found["layer"] < LAST)
        & (found["verdict"] != "floor")
    ]
    if found.empty:
        raise Missing(claim, paper)
    return found


def _direction(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = (
        "6. Ablating the best probe direction costs much accuracy (Parity, Dyck)",
        "much, no number known",
    )
    found = _inner(rows, "direction", claim, paper)
    found = found[found["task"].isin(["parity", "dyck"])]
    worst = (
        found.sort_values("drop", ascending=False)
        .drop_duplicates(["cell", "arch"])
        .sort_values(["_task", "_arch"])
    )
    said = ", ".join(f"{r.model} {r.cell} {r.drop:.1%}" for r in each(worst))
    made = [
        Claim(
            claim,
            paper,
            f"largest at an inner layer: {said}",
            intervals(worst),
            every(above(r, MUCH, "drop") for _, r in worst.iterrows()),
        )
    ]
    claim, paper = "6. The same at 80, 100 and 120 tokens, frozen at 40", "much, no number known"
    try:
        longer = rows_of(rows, "length", claim, paper)
    except Missing as err:
        return [*made, err.claim]
    longer = longer[
        (longer["what"] == "direction")
        & (longer["span"] == "all")
        & (longer["length"] >= 80)
        & longer["task"].isin(["parity", "dyck"])
    ]
    longer = longer[(longer["layer"] >= 0) & (longer["layer"] < LAST)]
    at_floor = longer[longer["floor"].astype(bool)].groupby(["model", "cell"]).ngroups
    worst = (
        longer[~longer["floor"].astype(bool)]
        .sort_values("drop", ascending=False)
        .drop_duplicates(["cell", "arch"])
        .sort_values(["_task", "_arch"])
    )
    if worst.empty:
        return [*made, Missing(claim, paper).claim]
    said = ", ".join(f"{r.model} {r.cell} {r.drop:.1%} at {r.length:.0f}" for r in each(worst))
    note = (
        f"{at_floor} cells are within 0.2 of chance at some length and say nothing there." if at_floor else ""
    )
    return [
        *made,
        Claim(
            claim,
            paper,
            said,
            intervals(worst),
            every(above(r, MUCH, "drop") for _, r in worst.iterrows()),
            note,
        ),
    ]


def _convolution(rows: pd.DataFrame) -> list[Claim]:
    made = []
    behaviour = rows[
        (rows["kind"] == "behaviour") & (rows["arch"] == "mamba") & (rows["embedding_std"] == 0.02)
    ]
    test_time = rows[(rows["kind"] == "convolution") & (rows["arch"] == "mamba")]
    for task, paper in PAPER_CONV.items():
        claim, said, verdict = f"7. Mamba without its convolution: {TITLES[task]}", [], None
        part = behaviour[(behaviour["task"] == task) & (behaviour["span"] == "all")]
        trained, without = (part[part["convolution"].astype(bool) == kept] for kept in (True, False))
        if len(trained) and len(without):
            at = trained["length"].min()
            gaps = []
            for seed in sorted(set(trained["train_seed"]) & set(without["train_seed"])):
                pair = [
                    p[p["train_seed"] == seed].set_index("length")["accuracy"] for p in (without, trained)
                ]
                gaps.append((100 * (pair[0][at] - pair[1][at]), 100 * float((pair[0] - pair[1]).mean())))
            here, mean = (sum(g[i] for g in gaps) / len(gaps) for i in (0, 1))
            said.append(
                f"retrained {here:+.1f} at {at:.0f} tokens, {mean:+.1f} over all lengths ({len(gaps)} seed{'s' * (len(gaps) > 1)})"
            )
            if ("mamba", task) in learned(trained):
                verdict = bool((here > 0) == (paper > 0)) if abs(here) >= 1 else None
            else:
                said.append("the model has not learned the task")
        found = (
            test_time[(test_time["task"] == task) & (test_time["how"] == "current_tap")]
            if len(test_time)
            else test_time
        )
        if len(found):
            said.append(f"past taps zeroed in the trained model {-100 * found['drop'].mean():+.1f}")
        number = f"{paper:+.2f} points" + (", not significant" if task == "dyck" else "")
        note = "One seed can't be significant: a sign-flip test needs at least 6 for p < 0.05."
        made.append(Claim(claim, number, "; ".join(said) or "not run", "", verdict, note if said else ""))
    return made


def _refit(rows: pd.DataFrame) -> list[Claim]:
    made = []
    for what, name in (("direction", "the best direction"), ("rows", "all rows of the probe")):
        claim, paper = f"A. A probe refitted after removing {name} recovers", "in every cell"
        try:
            found = _inner(rows, what, claim, paper)
        except Missing as err:
            made.append(err.claim)
            continue
        read = found[found["probe_accuracy"] > found["baseline"] + 0.1]
        back = read["refit_accuracy"] >= read["probe_accuracy"] - MARGIN
        least = read.assign(gap=read["refit_accuracy"] - read["probe_accuracy"]).sort_values("gap")
        cells = read.assign(back=back).groupby(["model", "cell"])["back"].all()
        said = f"at {back.sum()} of {len(read)} readable inner layers; in {cells.sum()} of {len(cells)} cells at every one"
        note = ""
        if len(least) and least.iloc[0]["gap"] < -MARGIN:
            row = least.iloc[0]
            note = f"Least: {row['model']} {row['cell']} layer {row['layer']:.0f}, {row['probe_accuracy']:.1%} to {row['refit_accuracy']:.1%}."
        made.append(Claim(claim, paper, said, "", bool(cells.all()) if len(cells) else None, note))
    return made


def _inlp(rows: pd.DataFrame) -> list[Claim]:
    one = _inner(rows, "direction", *INLP)
    dose = rows_of(rows, "dose", *INLP) if "dose" in set(rows["kind"]) else rows.iloc[:0]
    return [inlp_claim(one, _inner(rows, "inlp", *INLP), dose)]


def inlp_claim(one: pd.DataFrame, whole: pd.DataFrame, dose: pd.DataFrame) -> Claim:
    """v2's claim about INLP, from inner layers: ablations of the best direction, of INLP to chance, and of its first ranks.

    It agrees where at some rank more than half of the layers that one direction leaves alone lose half of the task more
    than by random subspaces of that rank. At full rank any subspace may take everything, so that alone says nothing.
    """
    keys = ["model", "cell", "train_seed", "layer"]
    one = one[(one["drop"] < MUCH) & (one["probe_accuracy"] > one["baseline"] + 0.1)][keys]
    said, note, shares = [], "", []
    for rank in (4, 16, 64):
        part = dose[dose["rank"] == rank].merge(one, on=keys) if len(dose) else dose
        if len(part):
            carries = (part["damage"] - part["damage_random"]) > 0.5
            shares.append(float(carries.mean()))
            said.append(f"{carries.sum()} of {len(part)} at rank {rank}")
    whole = whole.merge(one, on=keys)
    if len(whole):
        carries = (whole["damage"] - whole["damage_random"]) > 0.5
        said.append(f"{carries.sum()} of {len(whole)} at its full rank (median {whole['rank'].median():.0f})")
        matched = (whole["effect"] > 0.5) & (whole["effect_against"] == "random_matched")
        note = f"Against random subspaces that remove as much variance, at full rank: {matched.sum()}."
    if not said:
        return Claim(*INLP, f"no readable inner layer loses less than {MUCH:.0%} by one direction")
    text = (
        f"{len(one)} readable inner layers lose less than {MUCH:.0%} by one direction; INLP costs half of the task more than "
        f"random subspaces of its rank at {', '.join(said)}"
    )
    return Claim(*INLP, text, "", max(shares) > 0.5 if shares else None, note)


def _chance(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = (
        "D. Erasure to chance at every layer of every cell",
        "not within their budget, even at one layer",
    )
    found = rows_of(rows, "ablation", claim, paper)
    said = []
    for what, name in (("leace", "LEACE"), ("inlp", "INLP")):
        part = found[(found["what"] == what) & (found["layer"] >= 0)]
        if len(part):
            inner = part["layer"] < LAST
            done = part["at_chance"].astype(bool)
            left = (part["refit_accuracy"] - part["baseline"])[~done & inner]
            said.append(
                f"{name}: a fresh linear probe is at chance at {(done & inner).sum()} of {inner.sum()} inner layers"
                + (f", at the others at most {left.max():.2f} above" if len(left) else "")
                + f", and at {(done & ~inner).sum()} of {(~inner).sum()} last ones"
            )
            late = part[done & inner & (part["probe_accuracy"] > part["baseline"] + 0.1)]
            hidden = (late["refit_position_accuracy"] > late["baseline"] + 0.1).sum()
            said[-1] += (
                f" ({hidden} of the {len(late)} that were readable before still are by a probe at each position)"
            )
    if not said:
        raise Missing(claim, paper)
    return [
        Claim(
            claim,
            paper,
            "; ".join(said),
            "",
            None,
            "The sweep over every layer was run; an MLP reads on in most.",
        )
    ]


USING = (_direction, _convolution, _refit, _inlp, _chance)

"""The paper's claims about formal models beside what the rows of a run say: paper, ours, agrees.

"Agrees" follows rules that were fixed before the runs: True where every cell that can say something says so, False where
at least one says otherwise with its whole interval, None where no cell can say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.figures import LAST, main_cells, over_seeds
from probelens.examples.refit_the_probe.setup import LABELS, NAMES, TITLES
from probelens.report import Claim

__all__ = ["claims", "inlp_claim"]

RECURRENT, SSM = ("lstm", "gru"), ("mamba", "mamba2")
LEARNED = 0.95  # at the trained length; a model below it can't speak for its architecture
SOLVED = 0.99  # "generalise perfectly"
MUCH = 0.10  # "costs much accuracy"; the paper gives no number
NEEDED = {
    "span",
    "length",
    "accuracy",
    "how",
    "drop",
    "lo",
    "hi",
    "verdict",
    "com",
    "n_params",
    "what",
    "label",
}
INLP = (
    "B. INLP against random subspaces of its rank: what looked inert carries most of the task",
    "reverses the conclusion",
)
MARGIN = 0.02  # a refitted probe within this of the one before has recovered


def claims(rows: pd.DataFrame) -> list[Claim]:
    """The claims that a run of the formal grid can speak about, in the paper's order.

    Args:
        rows: Rows of the run, of any of its cells.

    Returns:
        A row for each, also where the cells it needs are missing.
    """
    made: list[Claim] = []
    # A run without rows of one kind may lack their columns.
    rows = rows.reindex(columns=[*rows.columns, *sorted(NEEDED - set(rows.columns))])
    for check in (_sizes, _perfect, _beats, _order, _late, _dyck, _grouping, _counter, _direction, _convolution, _refit, _inlp,
                  _chance):  # fmt: skip
        try:
            made += check(rows)
        except (KeyError, IndexError, ValueError) as err:
            if not isinstance(err, _Missing):
                raise
            made.append(err.claim)
    return made


class _Missing(ValueError):
    """The run has no row of the kind a claim needs."""

    def __init__(self, claim: str, paper: str) -> None:
        super().__init__(claim)
        self.claim = Claim(claim, paper, "not run", agrees=None)


def _of(rows: pd.DataFrame, kind: str, claim: str, paper: str) -> pd.DataFrame:
    found = main_cells(rows, kind) if kind in set(rows["kind"]) else rows.iloc[:0]
    if found.empty:
        raise _Missing(claim, paper)
    return found


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    said = [bool(v) for v in verdicts if v is not None]
    return all(said) if said else None


def _above(row: pd.Series, bound: float, value: str = "accuracy") -> bool | None:
    """Whether a value lies above a bound with its whole interval; None where the interval holds the bound."""
    lo, hi = (row["lo"], row["hi"]) if pd.notna(row.get("lo")) else (row[value], row[value])
    return True if lo > bound else False if hi < bound else None


def _learned(found: pd.DataFrame) -> set[tuple[str, str]]:
    """Architecture and task of the cells that answer well at the length they were trained on."""
    at = found[(found["length"] == found["length"].min()) & (found["accuracy"] >= LEARNED)]
    return set(zip(at["arch"], at["task"], strict=True))


def _each(table: pd.DataFrame) -> Iterator[Any]:
    return table.itertuples()


def _sizes(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "1. Size: 4 layers, d_model 128, about 830K parameters where possible", "≈ 830K"
    found = _of(rows, "training", claim, paper).dropna(subset=["n_params"]).drop_duplicates("arch")
    said = ", ".join(f"{NAMES[r.arch]} {r.n_params / 1000:.0f}K" for r in _each(found))
    return [
        Claim(
            claim, paper, said, agrees=None, note="Mamba and Mamba-2 with their published blocks are smaller."
        )
    ]


def _accuracies(rows: pd.DataFrame, claim: str, paper: str) -> pd.DataFrame:
    found = _of(rows, "behaviour", claim, paper)
    return over_seeds(found[found["span"] == "all"], ["arch", "task", "length"], "accuracy")


def _perfect(rows: pd.DataFrame) -> list[Claim]:
    made = []
    for task in ("parity", "s3"):
        claim, paper = f"2. LSTM and GRU generalise perfectly on {TITLES[task]}", "100 % at 40 to 120 tokens"
        found = _accuracies(rows, claim, paper)
        found = found[found["arch"].isin(RECURRENT) & (found["task"] == task)]
        if found.empty:
            made.append(_Missing(claim, paper).claim)
            continue
        worst = found.sort_values("accuracy").drop_duplicates("arch")
        said = ", ".join(f"{NAMES[r.arch]} {r.accuracy:.1%} at {r.length:.0f}" for r in _each(worst))
        learned = _learned(found)
        agrees = _all(r.accuracy >= SOLVED if (r.arch, task) in learned else None for r in _each(worst))
        made.append(Claim(claim, paper, f"worst: {said}", _interval(worst), agrees))
    return made


def _interval(found: pd.DataFrame) -> str:
    if "lo" not in found or found["lo"].isna().all():
        return ""
    return "; ".join(f"{lo:.3f} to {hi:.3f}" for lo, hi in zip(found["lo"], found["hi"], strict=True))


def _by_family(found: pd.DataFrame, task: str, beyond: int) -> dict[str, pd.Series]:
    part = found[(found["task"] == task) & (found["length"] > beyond)]
    mean = part.groupby("arch")[["accuracy", "lo", "hi"]].mean()
    return {arch: mean.loc[arch] for arch in mean.index}


def _compare(low: list[pd.Series], high: list[pd.Series]) -> bool | None:
    """Whether the worst of some is above the best of others, by intervals."""
    worst = min(high, key=lambda r: r["accuracy"])
    best = max(low, key=lambda r: r["accuracy"])
    return True if worst["lo"] > best["hi"] else False if worst["hi"] < best["lo"] else None


def _beats(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "2. LSTM and GRU beat SSMs and Transformer on Dyck", "recurrent above the others"
    acc = _by_family(_accuracies(rows, claim, paper), "dyck", 40)
    high, low = [acc[a] for a in RECURRENT if a in acc], [acc[a] for a in (*SSM, "transformer") if a in acc]
    if not high or not low:
        return [_Missing(claim, paper).claim]
    said = ", ".join(f"{NAMES[a]} {r['accuracy']:.1%}" for a, r in acc.items())
    return [Claim(claim, paper, f"mean of 60 to 120 tokens: {said}", "", _compare(low, high))]


def _order(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "2. Order on S3 as on Parity", "recurrent > SSM > Transformer"
    found = _accuracies(rows, claim, paper)
    verdicts: list[bool | None] = []
    said = []
    for task in ("parity", "s3"):
        acc = _by_family(found, task, 40)
        groups = [[acc[a] for a in some if a in acc] for some in (("transformer",), SSM, RECURRENT)]
        if not all(groups):
            continue
        verdicts += [_compare(groups[0], groups[1]), _compare(groups[1], groups[2])]
        said.append(
            f"{TITLES[task]}: " + ", ".join(f"{NAMES[a]} {r['accuracy']:.0%}" for a, r in acc.items())
        )
    both = _all(verdicts) if len(said) == 2 else None
    return [
        Claim(claim, paper, "; ".join(said) or "not run", "mean of 60 to 120 tokens" if said else "", both)
    ]


def _indices(rows: pd.DataFrame, claim: str, paper: str) -> pd.DataFrame:
    found = _of(rows, "indices", claim, paper)
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
    return _all([v == word for v in known["verdict"]] + [False] * len(ruled_out))


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
            except _Missing as err:
                made.append(err.claim)
                continue
            found = found[(found["task"] == task) & (found["label"] == "state") & found["arch"].isin(archs)]
            if found.empty:
                made.append(_Missing(claim, paper).claim)
                continue
            made.append(Claim(claim, paper, _words(found), _bounds(found), _expected(found, word)))
    return made


def _bounds(found: pd.DataFrame) -> str:
    if "final_share" not in found or found["final_share"].isna().all():
        return ""
    part = found.dropna(subset=["final_share"])
    said = [f"{NAMES[r.arch]} {r.final_share_lo:.2f} to {r.final_share_hi:.2f}" for r in _each(part)]
    return "final share " + ", ".join(said)


def _dyck(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "4. Dyck depth: Transformer near-perfect at L0 and L1", "near-perfect at L0 and L1"
    found = _of(rows, "probe", claim, paper)
    found = found[(found["control"] == "task") & (found["task"] == "dyck") & (found["span"] == "late")]
    made = []
    for label in LABELS["dyck"]:
        part = found[
            (found["arch"] == "transformer") & (found["label"] == label) & found["layer"].isin([0, 1])
        ]
        name = claim if label == "depth" else "4. Dyck, innermost bracket: the same"
        if part.empty:
            made.append(_Missing(name, paper).claim)
            continue
        part = over_seeds(part, ["layer"], "accuracy")
        said = ", ".join(
            f"L{r.layer:.0f} {r.accuracy:.1%} (untrained {r.untrained:.1%})" for r in _each(part)
        )
        made.append(Claim(name, paper, said, _interval(part), _all(_above(r, 0.95) for _, r in part.iterrows()),
                          "What the untrained model shows as well was not learned."))  # fmt: skip
    claim, paper = "4. Dyck depth: recurrent and SSM build up layer by layer", "gradual"
    try:
        words = _indices(rows, claim, paper)
    except _Missing as err:
        return [*made, err.claim]
    words = words[(words["task"] == "dyck") & (words["label"] == "depth") & (words["arch"] != "transformer")]
    if words.empty:
        return [*made, _Missing(claim, paper).claim]
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
        raise _Missing(claim, paper)
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
        claim, paper, text, "", _all(verdicts), f"in brackets {TITLES[near[0]]} and {TITLES[far[0]]}"
    )


def _grouping(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "5. S3 groups with Parity, not with Dyck, in all families", "all five"
    return [_groups(rows, claim, paper, ("s3", "state"), ("parity", "state"), ("dyck", "depth"))]


def _counter(rows: pd.DataFrame) -> list[Claim]:
    claim, paper = "(added) Counter groups with Dyck depth, so depth needs no stack", "not in the paper"
    return [_groups(rows, claim, paper, ("counter", "depth"), ("dyck", "depth"), ("parity", "state"))]


def _inner(rows: pd.DataFrame, what: str, claim: str, paper: str) -> pd.DataFrame:
    """Ablations at the blocks whose output isn't what the readout reads."""
    found = _of(rows, "ablation", claim, paper)
    found = found[
        (found["what"] == what)
        & (found["layer"] >= 0)
        & (found["layer"] < LAST)
        & (found["verdict"] != "floor")
    ]
    if found.empty:
        raise _Missing(claim, paper)
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
    said = ", ".join(f"{r.model} {r.cell} {r.drop:.1%}" for r in _each(worst))
    made = [
        Claim(
            claim,
            paper,
            f"largest at an inner layer: {said}",
            _interval(worst),
            _all(_above(r, MUCH, "drop") for _, r in worst.iterrows()),
        )
    ]
    claim, paper = "6. The same at 80, 100 and 120 tokens, frozen at 40", "much, no number known"
    try:
        longer = _of(rows, "length", claim, paper)
    except _Missing as err:
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
        return [*made, _Missing(claim, paper).claim]
    said = ", ".join(f"{r.model} {r.cell} {r.drop:.1%} at {r.length:.0f}" for r in _each(worst))
    note = (
        f"{at_floor} cells are within 0.2 of chance at some length and say nothing there." if at_floor else ""
    )
    return [
        *made,
        Claim(
            claim,
            paper,
            said,
            _interval(worst),
            _all(_above(r, MUCH, "drop") for _, r in worst.iterrows()),
            note,
        ),
    ]


PAPER_CONV = {"s3": -12.64, "parity": -6.83, "dyck": 4.04}


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
            if ("mamba", task) in _learned(trained):
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
        except _Missing as err:
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
    dose = _of(rows, "dose", *INLP) if "dose" in set(rows["kind"]) else rows.iloc[:0]
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
    found = _of(rows, "ablation", claim, paper)
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
        raise _Missing(claim, paper)
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

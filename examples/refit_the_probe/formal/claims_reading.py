"""The paper's claims about what models answer and where their state is readable: 1 to 5, and the Counter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.formal.rows import Missing, of_kind, over_seeds, rows_of
from probelens.examples.refit_the_probe.shared.claims import SOLVED, above, combined, every, fits, intervals
from probelens.examples.refit_the_probe.shared.rows import each, of_learned, where
from probelens.examples.refit_the_probe.shared.setup import LABELS, NAMES, TITLES
from probelens.numerics.indices import STATISTICS
from probelens.results.report import Claim

Key = tuple[str, str]  # task and label
RECURRENT, SSM = ("lstm", "gru"), ("mamba", "mamba2")
PARITY, S3, DYCK, COUNTER = ("parity", "state"), ("s3", "state"), ("dyck", "depth"), ("counter", "depth")


def _sizes(rows: pd.DataFrame) -> Claim:
    claim, paper = "1. Size: 4 layers, d_model 128, about 830K parameters where possible", "≈ 830K"
    found = rows_of(rows, "training", claim, paper).dropna(subset=["n_params"]).drop_duplicates("arch")
    said = ", ".join(f"{NAMES[r.arch]} {r.n_params / 1000:.0f}K" for r in each(found))
    return Claim(claim, paper, said, note="Mamba and Mamba-2 with their published blocks are smaller.")


def _accuracies(rows: pd.DataFrame, claim: str, paper: str) -> pd.DataFrame:
    return over_seeds(of_learned(rows_of(rows, "behaviour", claim, paper)), ["arch", "task", "length"], "accuracy")


def _named(row: Any) -> str:
    """Name of a family, and the number of its seeds that learned if not all did."""
    if row["n_learned"] == 0:
        return f"{NAMES[row['arch']]} (not learned)"
    part = f" ({row['n_learned']:.0f} of {row['n_seeds']:.0f} seeds learned)"
    return NAMES[row["arch"]] + (part if row["n_learned"] < row["n_seeds"] else "")


def _perfect(rows: pd.DataFrame, task: str) -> Claim:
    claim, paper = f"2. LSTM and GRU generalise perfectly on {TITLES[task]}", "100 % at 40 to 120 tokens"
    found = of_learned(rows_of(rows, "behaviour", claim, paper, task=task, arch=RECURRENT))
    # "Perfectly" is said of every trained model, so each seed is held against it.
    worst = found.sort_values("accuracy", kind="stable").drop_duplicates("arch")
    names = [_named(row) for _, row in worst.iterrows()]
    said = ", ".join(
        f"{n} {r.accuracy:.1%} at {r.length:.0f}"
        + (f" (seed {r.train_seed:.0f} of {r.n_seeds:.0f})" if r.n_seeds > 1 else "")
        for n, r in zip(names, each(worst), strict=True)
    )
    verdicts = [above(r, SOLVED) for _, r in found.iterrows() if r["n_learned"]]
    absent = [None for arch in RECURRENT if arch not in set(found[found["n_learned"] > 0]["arch"])]
    return Claim(claim, paper, f"worst: {said}", intervals(worst, names), every([*verdicts, *absent]))


def _by_family(found: pd.DataFrame, task: str, families: Sequence[Sequence[str]]) -> tuple[list[list[pd.Series]], str]:
    """Mean accuracy beyond 40 tokens, of the architectures that learned the task, and of all of them as text.

    The words are empty where a family wasn't run.
    """
    part = where(found[found["length"] > 40], task=task)
    mean = part.groupby("arch")[["accuracy", "lo", "hi", "n_seeds", "n_learned"]].mean().reset_index()
    said = [f"{_named(row)} {row['accuracy']:.1%}" for _, row in mean.iterrows()]
    rows = {str(row["arch"]): row for _, row in mean.iterrows() if row["n_learned"]}
    groups = [[rows[arch] for arch in some if arch in rows] for some in families]
    whole = all(any(arch in set(mean["arch"]) for arch in some) for some in families)
    return groups, ", ".join(said) if whole else ""


def _compare(low: list[pd.Series], high: list[pd.Series]) -> bool | None:
    """Whether the worst of some is above the best of others, by intervals."""
    worst = min(high, key=lambda r: r["accuracy"])
    best = max(low, key=lambda r: r["accuracy"])
    return True if worst["lo"] > best["hi"] else False if worst["hi"] < best["lo"] else None


def _beats(rows: pd.DataFrame) -> Claim:
    claim, paper = "2. LSTM and GRU beat SSMs and Transformer on Dyck", "recurrent above the others"
    found = _accuracies(rows, claim, paper)
    (low, high), said = _by_family(found, "dyck", ((*SSM, "transformer"), RECURRENT))
    if not said:
        raise Missing(claim, paper)
    agrees = _compare(low, high) if high and low else None
    return Claim(claim, paper, f"mean of 60 to 120 tokens: {said}", "", agrees)


def _order(rows: pd.DataFrame) -> Claim:
    claim, paper = "2. Order on S3 as on Parity", "recurrent > SSM > Transformer"
    found = _accuracies(rows, claim, paper)
    verdicts: list[bool | None] = []
    said = []
    for task in ("parity", "s3"):
        groups, words = _by_family(found, task, (("transformer",), SSM, RECURRENT))
        if not words:
            continue
        said.append(f"{TITLES[task]}: {words}")
        for low, high in itertools.pairwise(groups):
            verdicts.append(_compare(low, high) if low and high else None)
    both = None if len(said) < 2 else every(verdicts)
    return Claim(claim, paper, "; ".join(said) or "not run", "mean of 60 to 120 tokens" if said else "", both)


def _indices(rows: pd.DataFrame, claim: str, paper: str, **columns: Any) -> pd.DataFrame:
    return rows_of(rows, "indices", claim, paper, span="late", **columns)


def _words(found: pd.DataFrame) -> str:
    """The verdict on each family, and how many of its seeds have it where there are several."""
    said = []
    for arch, part in found.groupby("arch", sort=False):
        counts = part["verdict"].value_counts(sort=False)
        words = [str(word) if len(part) == 1 else f"{word} in {n} of {len(part)}" for word, n in counts.items()]
        com = part["com"].dropna()
        said.append(f"{NAMES[str(arch)]} {' / '.join(words)}" + (f" (COM {com.mean():.2f})" if len(com) else ""))
    return ", ".join(said)


def _pooled(found: pd.DataFrame) -> pd.DataFrame:
    """Profile statistics of the seeds that learned: one seed's own interval, or the interval over several."""
    by = ["arch", "task", "label"]
    made = []
    for key, part in found.dropna(subset=["com"]).groupby(by, sort=False):
        row = dict(zip(by, key, strict=True)) | {"seeds": len(part)}
        for name in STATISTICS:
            if name in part:
                ends = part.assign(lo=part[f"{name}_lo"], hi=part[f"{name}_hi"])
                one = over_seeds(ends, by, name).iloc[0]
                row |= {name: one[name], f"{name}_lo": one["lo"], f"{name}_hi": one["hi"]}
        made.append(row)
    return pd.DataFrame(made)


def _expected(found: pd.DataFrame, word: str, archs: Sequence[str]) -> bool | None:
    """Whether every trained model has a profile of this kind, each of the families among them."""
    learned = found[found["verdict"] != "not learned"]
    absent = [None for arch in archs if arch not in set(learned["arch"])]
    return every([*(fits(row, word) for row in each(learned)), *absent])


def _late(rows: pd.DataFrame, task: str, archs: Sequence[str], word: str, paper: str) -> Claim:
    claim = f"3. {TITLES[task]}: {'Transformer' if len(archs) == 1 else 'Mamba, Mamba-2, LSTM and GRU'}"
    found = _indices(rows, claim, paper, task=task, label="state", arch=archs)
    note = _scales(rows, task, archs)
    return Claim(claim, paper, _words(found), _bounds(found), _expected(found, word, archs), note)


def _scales(rows: pd.DataFrame, task: str, archs: Sequence[str]) -> str:
    """The verdicts at other scales of the initial embedding, as a note."""
    found = where(of_kind(rows, "indices"), span="late", task=task, arch=archs, label="state")
    said = [f"{std:g}: {_words(part)}" for std, part in found.groupby("embedding_std") if std != 0.02]
    return f"From an embedding of std 0.02; std {'; std '.join(said)}." if said else ""


def _bounds(found: pd.DataFrame) -> str:
    if "final_share" not in found or found["final_share"].isna().all():
        return ""
    pooled = each(_pooled(found))
    said = [f"{NAMES[r.arch]} {r.final_share_lo:.2f} to {r.final_share_hi:.2f}" for r in pooled]
    return "final share " + ", ".join(said)


def _at_once(rows: pd.DataFrame, label: str) -> Claim:
    claim = "4. Dyck depth: Transformer near-perfect at L0 and L1"
    claim, paper = claim if label == "depth" else "4. Dyck, innermost bracket: the same", "near-perfect at L0 and L1"
    about = {"control": "task", "task": "dyck", "span": "late", "arch": "transformer", "label": label, "layer": (0, 1)}
    part = rows_of(rows, "probe", claim, paper, **about)
    # "Near-perfect" is said of every trained model, so each seed is held against it.
    verdict = every(above(r, 0.95) for _, r in part.iterrows())
    seeds = part["train_seed"].nunique()
    part = part.sort_values("accuracy", kind="stable").drop_duplicates("layer").sort_values("layer")
    said = ", ".join(f"L{r.layer:.0f} {r.accuracy:.1%} (untrained {r.untrained:.1%})" for r in each(part))
    said += f"; the worst of {seeds} seeds" if seeds > 1 else ""
    ends = intervals(part, [f"L{r.layer:.0f}" for r in each(part)])
    return Claim(claim, paper, said, ends, verdict, "What the untrained model shows as well was not learned.")


def _layer_by_layer(rows: pd.DataFrame) -> Claim:
    claim, paper, archs = "4. Dyck depth: recurrent and SSM build up layer by layer", "gradual", (*SSM, *RECURRENT)
    found = _indices(rows, claim, paper, task="dyck", label="depth", arch=archs)
    return Claim(claim, paper, _words(found), _bounds(found), _expected(found, "gradual", archs))


def _groups(claim: str, paper: str, one: Key, near: Key, far: Key, note: str, rows: pd.DataFrame) -> Claim:
    """Whether a task's centre of mass lies nearer to one task's than to another's, family by family."""
    coms = _coms(_indices(rows, claim, paper))
    said, verdicts = [], list[bool | None]()
    for arch in NAMES:
        if not all((arch, *key) in coms for key in (one, near, far)):
            continue
        x, a, b = (coms[arch, *key] for key in (one, near, far))
        # How much nearer it lies to the one than to the other, |x - b| - |x - a|, without its bends.
        of_a, of_b = (1.0 if x[0] > y[0] else -1.0 for y in (a, b))
        _, lo, hi = combined((x, a, b), (of_b - of_a, of_a, -of_b))
        verdicts.append(True if lo > 0 else False if hi < 0 else None)
        said.append(f"{NAMES[arch]} {x[0]:.2f} ({a[0]:.2f} and {b[0]:.2f})")
    text = "COM " + ", ".join(said) if said else "no family learned all three tasks"
    absent = [None] * (len(NAMES) - len(verdicts))
    between = f"In brackets {TITLES[near[0]]} and {TITLES[far[0]]}."
    return Claim(claim, paper, text, "", every([*verdicts, *absent]), f"{between} {note}".strip())


def _coms(found: pd.DataFrame) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """Centre of mass with its interval, by architecture, task and label."""
    return {(r.arch, r.task, r.label): (float(r.com), float(r.com_lo), float(r.com_hi)) for r in each(_pooled(found))}


def _reversal(rows: pd.DataFrame) -> Claim:
    claim, paper = "(title of v1) From Parity to Dyck the families swap their order", "they do; no number known"
    coms = _coms(_indices(rows, claim, paper))
    said, bounds, verdicts = [], [], list[bool | None]()
    for arch in SSM:
        keys = [(a, *key) for key in (PARITY, DYCK) for a in (arch, "transformer")]
        if all(key in coms for key in keys):
            value, lo, hi = combined([coms[key] for key in keys], (1, -1, -1, 1))
            parity, dyck = (coms[a][0] - coms[b][0] for a, b in (keys[:2], keys[2:]))
            said.append(f"{NAMES[arch]} {value:+.2f} ({parity:+.2f} on Parity, {dyck:+.2f} on Dyck depth)")
            bounds.append(f"{lo:.2f} to {hi:.2f}")
            verdicts.append(True if lo > 0 else False if hi < 0 else None)
    if not said:
        raise Missing(claim, paper)
    note = "COM of the family minus that of the Transformer, on Parity less on Dyck: above 0 where it reverses."
    return Claim(claim, paper, ", ".join(said), "; ".join(bounds), every(verdicts), note)


COUNTED = "(added) Counter, a clipped sum without a stack, groups with Dyck depth"
CLIPPED = "Clipping isn't linear, so a Counter that lies elsewhere doesn't show that depth needs a stack."
READING: tuple[Callable[[pd.DataFrame], Claim], ...] = (
    _sizes,
    *(partial(_perfect, task=task) for task in ("parity", "s3")),
    _beats,
    _order,
    *(
        partial(_late, task=task, archs=archs, word=word, paper=paper)
        for task in ("parity", "s3")
        for archs, word, paper in (
            ((*SSM, *RECURRENT), "late", "jump at the last layer"),
            (("transformer",), "gradual", "gradual rise from L1 to L3"),
        )
    ),
    *(partial(_at_once, label=label) for label in LABELS["dyck"]),
    _layer_by_layer,
    _reversal,
    partial(_groups, "5. S3 groups with Parity, not with Dyck, in all families", "all five", S3, PARITY, DYCK, ""),
    partial(_groups, COUNTED, "not in the paper", COUNTER, DYCK, PARITY, CLIPPED),
)

"""Probes refitted after an ablation: a linear one, a small MLP, and one at each position.

A probe that is pooled over positions misses a code that, for example, changes its sign with the position. So
probes are refitted in both ways, and each has its own baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.numerics.stats import ratio_of_means
from probelens.numerics.tensors import class_numbers, tensor_of
from probelens.probing.fitting import Fitted, by_position, share
from probelens.probing.intervals import by_group
from probelens.probing.mlp import mlp_accuracy
from probelens.probing.power import residue_power
from probelens.probing.solvers.logistic import DEFAULT_CS
from probelens.probing.splits import FRACTIONS, Split, split_by_group

__all__ = ["PositionProbes", "balanced", "chance_margin", "guess_accuracy", "position_probes", "refit_accuracy"]
__all__ += ["refit_check"]

_ALPHAS = tuple(10.0**k for k in range(-3, 4))


@dataclass(frozen=True, eq=False)
class PositionProbes:
    """Accuracy of one probe per position, each fitted and tested there.

    Args:
        accuracy: Over all test rows.
        by_position: Accuracy at each position, NaN where no row counts. (pos,)
        alpha: The ridge penalty that did best on validation, per training row.
    """

    accuracy: float
    by_position: Tensor
    alpha: float


@exact
def position_probes(x: Tensor, labels: Tensor, mask: Tensor, split: Split) -> PositionProbes:
    """One ridge classifier per position, the penalty shared and chosen on validation.

    A least-squares fit to the classes is solved for all penalties by one singular value decomposition.

    Args:
        x: Activations. (n, pos, d)
        labels: Class ids. (n, pos)
        mask: Where labels count. (n, pos)
        split: Sequences of train, validation and test.

    Returns:
        Accuracy on the test sequences. Compare with ``guess_accuracy``.

    Examples:
        >>> gen = torch.Generator().manual_seed(0)
        >>> y = torch.randint(2, (60, 4), generator=gen)
        >>> sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> x = (2.0 * y - 1)[..., None] * sign[:, None] + 0.1 * torch.randn(60, 4, 3, generator=gen)
        >>> split = split_by_group(torch.arange(60))
        >>> position_probes(x, y, torch.ones(60, 4, dtype=torch.bool), split).accuracy
        1.0
    """
    labels, known = class_numbers(labels, mask)
    k, truth, keep = len(known), labels[split.test], mask[split.test]
    common = _common(labels, mask, split, k)
    guesses = common.expand(len(_ALPHAS), *truth.shape).clone()
    right = torch.zeros(len(_ALPHAS))
    for t in range(x.shape[1]):
        train, val, test = (rows[mask[rows, t]] for rows in (split.train, split.val, split.test))
        if not len(train) or not len(test):
            continue
        scores = _ridge(x[train, t], labels[train, t], [x[val, t], x[test, t]], k)
        right += (scores[0].argmax(-1) == labels[val, t]).float().sum(-1)
        guesses[:, keep[:, t], t] = scores[1].argmax(-1)
    best = len(_ALPHAS) - 1 - int(right.flip(0).argmax())  # on a tie the larger penalty
    hits = (guesses[best] == truth) & keep
    return PositionProbes(share(hits[keep]), by_position(hits, keep), _ALPHAS[best])


def guess_accuracy(labels: Tensor, mask: Tensor, split: Split, given: Tensor | None = None) -> tuple[float, ...]:
    """Test accuracy of guesses without activations: of a constant, from the position alone, and from strata.

    Args:
        labels, mask, split: As for ``position_probes``.
        given: Ids of strata. (n, pos)

    Returns:
        Of the most frequent class of the test rows themselves, which no constant guess beats, and of the class most
        frequent in training at each position; with ``given`` also of the one most frequent in training in each stratum.

    Examples:
        >>> y = torch.tensor([[0, 1, 1]] * 10)
        >>> guess_accuracy(y, torch.ones(10, 3, dtype=torch.bool), split_by_group(torch.arange(10)))[1]
        1.0
    """
    labels, known = class_numbers(labels, mask)
    k, truth, keep = len(known), labels[split.test], mask[split.test]
    most = torch.bincount(truth[keep]).max().item() / int(keep.sum())
    position = share((_common(labels, mask, split, k) == truth)[keep])
    return (most, position) if given is None else (most, position, _guess_from(given, labels, mask, split))


def chance_margin(baseline: float, margin: float) -> float:
    """How far above its baseline an accuracy still counts as chance.

    Args:
        baseline: Accuracy of a guess.
        margin: The distance asked for.

    Returns:
        The margin, or a quarter of the distance to 1 where that is less: otherwise an accuracy of 1 would be
        chance beside a baseline of 0.98 or more.

    Examples:
        >>> chance_margin(0.5, 0.02), round(chance_margin(0.98, 0.02), 3)
        (0.02, 0.005)
    """
    return min(margin, (1 - baseline) / 4)


def _common(labels: Tensor, mask: Tensor, split: Split, k: int) -> Tensor:
    """The most frequent class at each position of the training sequences. (pos,)"""
    y, keep = labels[split.train], mask[split.train]
    seen = torch.nn.functional.one_hot(y.where(keep, 0).long(), k) * keep[..., None]
    total = seen.sum((0, 1))
    # Classes tie at early positions; the more frequent one over all positions is the better guess.
    return (seen.sum(0) * (total.sum() + 1) + total).argmax(-1)


def _ridge(x: Tensor, y: Tensor, others: list[Tensor], k: int) -> list[Tensor]:
    """Class scores of other rows under every penalty. each (penalty, row, class)"""
    x = x.double()
    mean, scale = x.mean(0), x.std(0, correction=0)
    scale = torch.where(scale > 1e-9 * (1 + mean.abs()), scale, 1.0)
    target = torch.nn.functional.one_hot(y.long(), k).double()
    prior = target.mean(0)
    u, s, v = torch.linalg.svd((x - mean) / scale, full_matrices=False)
    shrink = s / (s.square() + torch.tensor(_ALPHAS).double()[:, None] * len(x))  # (penalty, rank)
    weights = v.mT @ (shrink[..., None] * (u.mT @ (target - prior)))  # (penalty, d, class)
    return [((other.double() - mean) / scale) @ weights + prior for other in others]


@exact
def refit_accuracy(
    clean: Tensor, ablated: Tensor, labels: Tensor, mask: Tensor, groups: Tensor, *, mlp: bool = True,
    name: str = "label", seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Whether a label can still be read after an ablation: probes fitted before and after it.

    Args:
        clean: Activations before. (n, pos, d)
        ablated: Activations after. (n, pos, d)
        labels: Class ids. (n, pos)
        mask: Where labels count. (n, pos)
        groups: What a split keeps together. (n,)
        mlp: Also a small MLP on the ablated activations.
        name: Of the label, for errors.
        seed: Of the split.

    Returns:
        probe_accuracy, refit_accuracy, refit_mlp_accuracy (None without ``mlp``), the majority baseline, and the number
        of test rows, all on the same test sequences; refit_gap, how much less the refitted linear probe reads than the
        one before, with refit_gap_lo and refit_gap_hi, a 95 % interval over test groups, paired (None for a single
        sequence); and the refitted linear probe's accuracy at each position. (pos,)

    Raises:
        ShapeError: Tensors that don't fit together.
        InputError: One class only, or too few groups to split.

    Source:
        The refitted probe: arXiv 2606.00926 v2.
    """
    shapes = [tuple(tensor_of("an argument", t).shape) for t in (clean, ablated, labels, mask, groups)]
    lead = shapes[0][:-1]
    if len(lead) != 2 or shapes != [shapes[0], (*lead, shapes[1][-1]), lead, lead, lead[:1]]:
        raise ShapeError(
            "need clean and ablated (n, pos, d), labels and mask (n, pos), groups (n,), got "
            + ", ".join(map(str, shapes))
        )
    labels, _ = class_numbers(labels, mask)
    split = split_by_group(groups, FRACTIONS, seed)
    tasks = {name: labels}
    before = Fitted.of(clean, tasks, mask, split, DEFAULT_CS, 1e-3, None, seed)
    after = Fitted.of(ablated, tasks, mask, split, DEFAULT_CS, 1e-3, None, seed)
    keep = mask[split.test]
    truth = labels[split.test][keep]
    most = torch.bincount(labels[split.train][mask[split.train]]).argmax()
    right = [(fit.guess[name] == labels[split.test]) & keep for fit in (before, after)]
    row = {
        "refit_score": "accuracy",
        "probe_accuracy": share(right[0][keep]),
        "refit_accuracy": share(right[1][keep]),
        **_gap(right[0], right[1], keep, groups[split.test]),
        "refit_mlp_accuracy": _mlp(ablated, labels, mask, split, seed) if mlp else None,
        "baseline": share(truth == most),
        "refit_n_test": int(keep.sum()),
    }
    return row, by_position(right[1], keep)


def _mlp(x: Tensor, labels: Tensor, mask: Tensor, split: Split, seed: int) -> float:
    """Test accuracy of an MLP on activations (n, pos, d) where labels (n, pos) count."""
    train, val, test = ((x[i][mask[i]], labels[i][mask[i]]) for i in (split.train, split.val, split.test))
    return mlp_accuracy(train, val, test, seed=seed)


def _gap(before: Tensor, after: Tensor, keep: Tensor, groups: Tensor) -> dict[str, float | None]:
    """Accuracy lost between two probes, with its interval over groups."""
    lost, counted = by_group(groups, (before.double() - after.double()).sum(-1), keep.double().sum(-1))
    if len(lost) < 2:
        gap = float(lost.sum() / counted.sum())
        return {"refit_gap": gap, "refit_gap_lo": None, "refit_gap_hi": None}
    found = ratio_of_means(lost, counted)
    ends = {"refit_gap_lo": float(found.low.clamp(min=-1)), "refit_gap_hi": float(found.high.clamp(max=1))}
    return {"refit_gap": float(found.estimate), **ends}


def balanced(labels: Tensor, mask: Tensor, given: Tensor, seed: int = 0) -> Tensor:
    """Rows in which strata tell as little as possible of a label, at the cost of its most frequent class in each.

    A label that was erased given another can still be read through that other one, which stays. So in every stratum the
    most frequent class keeps as many rows, chosen at random, as the second one has: of two classes the stratum then tells
    nothing. A stratum of one class tells its rows' label whatever a probe reads, and is left out.

    Args:
        labels: Class ids. (n, pos)
        mask: Where labels count. (n, pos)
        given: Ids of the strata. (n, pos)
        seed: Of the choice.

    Returns:
        The rows that are kept. (n, pos)

    Raises:
        InputError: Every stratum holds one class only.

    Examples:
        >>> y, given = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
        >>> kept = balanced(y, torch.ones(1, 6, dtype=torch.bool), given)
        >>> kept.sum(), kept[0, 3:]
        (tensor(2), tensor([ True, False, False]))
    """
    out = torch.zeros_like(mask)
    rng = torch.Generator().manual_seed(seed)
    y, strata, flat = labels[mask], given.to(labels.device)[mask], out.view(-1)
    where = mask.view(-1).nonzero().squeeze(1)
    for stratum in strata.unique():
        rows = (strata == stratum).nonzero().squeeze(1)
        counts = torch.bincount(y[rows])
        most = counts.argmax()
        second = int(counts.where(torch.arange(len(counts), device=counts.device) != most, 0).max())
        if not second:
            continue
        frequent = rows[y[rows] == most]
        chosen = frequent[torch.randperm(len(frequent), generator=rng)[:second].to(frequent.device)]
        flat[where[torch.cat([chosen, rows[y[rows] != most]])]] = True
    if not bool(out.any()):
        raise InputError(
            "what is given tells the label wholly: each of its strata holds one class, so nothing can be read beyond it"
        )
    return out


def _guess_from(given: Tensor, labels: Tensor, mask: Tensor, split: Split) -> float:
    """Test accuracy of the class most frequent in training at each stratum."""
    k, strata = int(labels[mask].max()) + 1, given.to(labels.device)
    ids = strata.where(mask, 0)
    train, test = mask[split.train], mask[split.test]
    seen = torch.zeros(int(ids.max()) + 1, k, dtype=torch.long, device=labels.device)
    seen.index_put_((ids[split.train][train], labels[split.train][train]), torch.tensor(1), accumulate=True)
    return share(seen.argmax(1)[ids[split.test][test]] == labels[split.test][test])


@exact
def refit_check(
    clean: Tensor,
    ablated: Tensor,
    labels: Tensor,
    mask: Tensor,
    groups: Tensor,
    *,
    mlp: bool = True,
    margin: float = 0.02,
    given: Tensor | None = None,
    power: bool = True,
    name: str = "label",
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """All probes that an ablation is tested with, trained and tested on ablated activations.

    A variable that no probe reads after the ablation may still be there, in a code that takes more sequences to learn. So
    a residue is planted into the ablated activations, and ``powered`` says whether the probes read that one. Or the
    variable was never there. So where no linear probe read it before either, the other probes are fitted on the untouched
    activations too.

    Args:
        Those of ``refit_accuracy``.
        margin: A probe reads the label when its accuracy is above the baseline by more than this, or by more than a
            quarter of what is left to read where that is less.
        given: Strata, ids of what the label was erased given. Then all probes read ``balanced`` rows, in which the
            strata tell little or nothing of the label, and what they do tell is a baseline too. (n, pos)
        power: Whether to plant the residue, which takes longer than all else.

    Returns:
        What ``refit_accuracy`` returns, with refit_position_accuracy (one probe per position), majority,
        position_baseline (best guess from the position alone), given_baseline (best guess from the stratum; None without
        ``given``), baseline (the largest of them), readable_before and
        readable_after (whether any probe reads the label), probe_position_accuracy and probe_mlp_accuracy (before; None
        where others answered that already); and where no probe reads the label after, whether these probes read a
        residue planted there (powered), how well (residue_accuracy), the smallest size that they read (residue_size), and
        with how many sequences they would (n_needed, None where no sample tried is enough); see ``residue_power``. (pos,)

    Source:
        The refitted probe: arXiv 2606.00926 v2; the MLP: Ravfogel et al. 2020, arXiv 2004.07667, section 5.
    """
    labels, _ = class_numbers(labels, mask)
    if given is not None:
        mask = balanced(labels, mask, given, seed)
    row, by_position = refit_accuracy(clean, ablated, labels, mask, groups, mlp=mlp, name=name, seed=seed)
    split = split_by_group(groups, FRACTIONS, seed)
    majority, position, *stratum = guess_accuracy(labels, mask, split, given)
    row["refit_position_accuracy"] = position_probes(ablated, labels, mask, split).accuracy
    # What the position alone tells isn't counted as read.
    row.update(majority=majority, position_baseline=position, given_baseline=stratum[0] if stratum else None)
    row["baseline"] = max(majority, position, *stratum)
    bar = row["baseline"] + chance_margin(row["baseline"], margin)
    after = [row["refit_accuracy"], row["refit_mlp_accuracy"], row["refit_position_accuracy"]]
    row["readable_after"] = any(one is not None and one > bar for one in after)
    row.update(powered=None, residue_accuracy=None, residue_size=None, n_needed=None)
    if power and not row["readable_after"] and bar < 1:  # where the position tells all, nothing is left to read
        found = residue_power(ablated, labels, mask, split, bar, mlp=mlp, seed=seed)
        row.update(powered=found.powered, residue_accuracy=found.accuracy, residue_size=found.size)
        row.update(n_needed=found.n_needed)
    # An ablation adds no information, so what is read after it was readable before.
    row["readable_before"] = row["readable_after"] or row["probe_accuracy"] > bar
    row.update(probe_position_accuracy=None, probe_mlp_accuracy=None)
    if not row["readable_before"]:
        row["probe_position_accuracy"] = position_probes(clean, labels, mask, split).accuracy
        row["readable_before"] = row["probe_position_accuracy"] > bar
    if mlp and not row["readable_before"]:
        row["probe_mlp_accuracy"] = _mlp(clean, labels, mask, split, seed)
        row["readable_before"] = row["probe_mlp_accuracy"] > bar
    return row, by_position

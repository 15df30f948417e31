"""Intervals of accuracies and of R² over the groups of the test sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.shares import share_interval
from probelens.numerics.stats import ratio_of_means


def by_group(groups: Tensor, *per_sequence: Tensor) -> list[Tensor]:
    """Sums over the sequences of each group in which something counts. (n,) -> (group,)

    The last of ``per_sequence`` says how much counts. A single group is left as its sequences.
    """
    counts = per_sequence[-1] > 0
    if len(groups[counts].unique()) < 2:
        return [values[counts] for values in per_sequence]
    kept, where = groups[counts].unique(return_inverse=True)
    empty = torch.zeros(len(kept), dtype=torch.float64)
    return [empty.index_add(0, where, values[counts].double()) for values in per_sequence]


def accuracy_interval(right: Tensor, keep: Tensor, groups: Tensor) -> tuple[float, float]:
    """The 95 % interval over groups of the share of guesses that are right, where they count. (n, pos)"""
    hits, counted = by_group(groups, right.double().sum(1), keep.double().sum(1))
    return share_interval(hits, counted)


def r2_interval(
    guess: Tensor, truth: Tensor, keep: Tensor, groups: Tensor, n_boot: int, seed: int
) -> tuple[float, float, float]:
    """R² of guesses at the rows that count, (row,), with its 95 % interval over groups, at most 1; ``keep`` is (n, pos)."""

    def per_sequence(values: Tensor) -> Tensor:
        return torch.zeros(keep.shape, dtype=torch.float64).masked_scatter(keep, values).sum(1)

    wrong, spread = per_sequence((guess - truth).square()), per_sequence((truth - truth.mean()).square())
    if not bool(spread.sum() > 0):
        raise InputError("all test values are equal, so R² is undefined. Give more sequences.")
    wrong, spread, _ = by_group(groups, wrong, spread, keep.double().sum(1))
    found = ratio_of_means(wrong[None], spread[None], n_draws=n_boot, seed=seed)
    return 1 - float(found.estimate), 1 - float(found.high), 1 - float(found.low.clamp(min=0))

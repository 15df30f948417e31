"""Splitting by sequence: no sequence, and no copy of one, is on two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.tasks.data import Batch

__all__ = ["FRACTIONS", "Split", "copies_together", "groups_of", "real_tokens", "split_by_group"]

FRACTIONS = (0.6, 0.2, 0.2)
"""Shares of train, validation and test."""


@dataclass(frozen=True, eq=False)
class Split:
    """Indices of the training, validation and test sequences.

    Args:
        train: Indices of sequences, ascending. (n_train,)
        val: (n_val,)
        test: (n_test,)
    """

    train: Tensor
    val: Tensor
    test: Tensor


def split_by_group(groups: Tensor, fractions: Sequence[float] = FRACTIONS, seed: int = 0) -> Split:
    """Divide groups at random into train, validation and test.

    Args:
        groups: Group of each sequence; equal ids stay together. (n,) integers
        fractions: Shares of the groups.
        seed: Of the shuffle; the global random state isn't touched.

    Returns:
        Indices of the sequences.

    Raises:
        InputError: Fractions that aren't three positive numbers summing to 1, or too few groups.

    Source:
        Positions of one sequence share its prefix, so splitting rows would test on what was trained on.

    Examples:
        >>> split = split_by_group(torch.tensor([0, 0, 1, 2, 3, 4]), seed=1)
        >>> sorted(torch.cat([split.train, split.val, split.test]).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    shares = [float(f) for f in fractions]
    if len(shares) != 3 or min(shares, default=0) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            f"splits={tuple(fractions)}: give three positive fractions that sum to 1, for train, validation "
            "and test, such as (0.6, 0.2, 0.2)"
        )
    unique, ids = torch.unique(groups, return_inverse=True)
    n = len(unique)
    n_val, n_test = max(1, round(shares[1] * n)), max(1, round(shares[2] * n))
    if n < 3 or n - n_val - n_test < 1:
        raise InputError(
            f"{n} sequences are too few to split {tuple(shares)}: train, validation and test need at "
            "least one each, and a few dozen to be meaningful. Pass more sequences, or finer groups."
        )
    order = np.random.default_rng([seed, 0x5B117]).permutation(n)
    side = np.zeros(n, dtype=np.int64)
    side[order[:n_test]] = 2
    side[order[n_test : n_test + n_val]] = 1
    rows = torch.as_tensor(side, device=ids.device)[ids]
    return Split(*((rows == k).nonzero()[:, 0] for k in range(3)))


def real_tokens(tokens: Tensor, mask: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Tokens with -1 for padding, so that padding makes no sequences differ.

    Args:
        tokens: (n, pos)
        mask: Where labels count; tokens after the last of them are treated as padding. (n, pos)
        attention_mask: True on real tokens. (n, pos)

    Returns:
        (n, pos)

    Examples:
        >>> real_tokens(torch.tensor([[5, 6, 0]]), torch.tensor([[False, True, False]]))
        tensor([[ 5,  6, -1]])
    """
    counts = mask.bool().flip(1).cumsum(1).flip(1) > 0
    return tokens.where(counts if attention_mask is None else counts & attention_mask.bool(), -1)


def groups_of(batch: Batch) -> Tensor:
    """The groups of a batch, those that share a sequence merged. Tokens in padding don't make sequences differ.

    Args:
        batch: Sequences.

    Returns:
        Group ids. (n,)
    """
    if isinstance(batch, Batch) and not batch.examples.plain:
        return copies_together(batch.examples.copies()[:, None], batch.groups)
    attention = getattr(batch, "attention_mask", None)
    return copies_together(real_tokens(batch.tokens, batch.mask, attention), batch.groups)


def copies_together(tokens: Tensor, groups: Tensor) -> Tensor:
    """Groups in which equal sequences are one group.

    Args:
        tokens: (n, pos)
        groups: (n,)

    Returns:
        New group ids. (n,)

    Raises:
        ShapeError: tokens that aren't (n, pos), or groups that aren't one each.

    Examples:
        >>> copies_together(torch.tensor([[1, 2], [3, 4], [1, 2]]), torch.tensor([0, 1, 2]))
        tensor([0, 1, 0])
    """
    if tokens.ndim != 2 or groups.ndim != 1:
        raise ShapeError(
            f"tokens must be (n, pos) and groups (n,), got {tuple(tokens.shape)} and {tuple(groups.shape)}"
        )
    if len(tokens) != len(groups):
        raise ShapeError(f"{len(tokens)} token sequences for {len(groups)} groups; give one per sequence")
    if not tokens.shape[1]:
        raise ShapeError(f"tokens have no position: {tuple(tokens.shape)}")
    _, same = torch.unique(tokens, dim=0, return_inverse=True)
    _, ids = torch.unique(groups, return_inverse=True)
    # Lowest label reachable through shared groups and shared texts, by repeated minima.
    label = torch.arange(len(tokens), device=ids.device)
    while True:
        before = label
        for key in (same, ids):
            least = torch.full_like(label, len(label)).scatter_reduce(0, key, label, "amin")
            label = least[key]
        if torch.equal(before, label):
            return torch.unique(label, return_inverse=True)[1]

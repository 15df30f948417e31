"""How far two labels go together, and the strata that labels divide rows into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probelens.errors import ShapeError

__all__ = ["ASSOCIATED", "association", "strata_of"]

ASSOCIATED = 0.05  # share of the smaller entropy from which on two labels count as going together
_DRAWS = 20


def association(a: Tensor, b: Tensor, mask: Tensor, *, draws: int = _DRAWS, seed: int = 0) -> float:
    """Mutual information of two labels as a share of the smaller entropy, without what chance alone gives.

    Chance is estimated from draws in which ``b`` comes from another sequence and starts at another position, so that the
    likeness of neighbouring positions stays as it is. Their mean is subtracted, and an association that is
    within their range is 0: a few sequences don't make one.

    Args:
        a: Class ids. (n, pos)
        b: Other class ids. (n, pos)
        mask: Where both count. (n, pos)
        draws: Draws of the null.
        seed: Of the draws.

    Returns:
        0 for labels that don't go together to 1 where one tells the other.

    Raises:
        ShapeError: Tensors that aren't all of one shape (n, pos).

    Source:
        Vinh, Epps and Bailey 2010, JMLR 11 (correction for chance); its null is of single rows.

    Examples:
        >>> y = torch.randint(2, (200, 10), generator=torch.Generator().manual_seed(0))
        >>> mask = torch.ones(200, 10, dtype=torch.bool)
        >>> association(y, 1 - y, mask), association(y, y.roll(1, 0), mask)
        (1.0, 0.0)
    """
    if a.ndim != 2 or not a.shape == b.shape == mask.shape:
        raise ShapeError(
            f"labels and mask must be of one shape (n, pos), got {tuple(a.shape)}, {tuple(b.shape)}, {tuple(mask.shape)}"
        )
    mask = mask.cpu()
    a, b = (label.cpu().unique(return_inverse=True)[1] for label in (a, b))
    if not bool(mask.any()):
        return 0.0
    rng = torch.Generator().manual_seed(seed)
    null = []
    for _ in range(draws):
        rows, shift = torch.randperm(len(a), generator=rng), int(torch.randint(a.shape[1], (), generator=rng))
        other, keep = b[rows].roll(shift, 1), mask & mask[rows].roll(shift, 1)
        null.append(_mutual(a[keep], other[keep]) if bool(keep.any()) else 0.0)
    found, least = _mutual(a[mask], b[mask]), min(_entropy(a[mask]), _entropy(b[mask]))
    chance = sum(null) / max(len(null), 1)
    if found <= max(null, default=0.0) or least <= chance:
        return 0.0
    return min((found - chance) / (least - chance), 1.0)


def strata_of(labels: Sequence[Tensor]) -> Tensor:
    """Number the combinations of some labels.

    Args:
        labels: Class ids, each (n, pos).

    Returns:
        The number of the combination at each position, from 0. (n, pos)

    Examples:
        >>> strata_of([torch.tensor([[0, 0, 7]]), torch.tensor([[1, 2, 1]])])
        tensor([[0, 1, 2]])
    """
    stacked = torch.stack([label.cpu() for label in labels], -1)
    _, ids = stacked.flatten(0, -2).unique(dim=0, return_inverse=True)
    return ids.view(stacked.shape[:-1])


def _mutual(a: Tensor, b: Tensor) -> float:
    """In nats."""
    return _entropy(a) + _entropy(b) - _entropy(a * (b.max() + 1) + b)


def _entropy(ids: Tensor) -> float:
    """In nats, of numbers from 0 on. (n,)"""
    few = int(ids.max()) < 16 * len(ids)  # so that counting needs no sorting, and little memory
    counts = ids.bincount() if few else ids.unique(return_counts=True)[1]
    return float(torch.special.entr(counts.double() / len(ids)).sum())

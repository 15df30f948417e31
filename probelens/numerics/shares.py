"""Exact intervals of shares, such as accuracies: of independent trials, and of clusters of unequal size."""

from __future__ import annotations

from typing import Any

from probelens.errors import InputError, ShapeError
from probelens.numerics.bootstrap import as_array, t_quantile

__all__ = ["exact_interval", "share_interval"]


def exact_interval(hits: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share, which covers at least as often as it says at every share and n.

    Where all n are hits its lower end is (1 − level)/2 to the power of 1/n, about 1 − 3.7/n at 95 % (the rule of three
    with both tails).

    Args:
        hits: Successes; need not be whole, as effective numbers are not.
        n: Trials.
        level: Nominal coverage.

    Returns:
        Lower and upper end, within 0 and 1.

    Raises:
        InputError: No trials, hits outside of 0 to n, or an impossible level.

    Source:
        Clopper and Pearson 1934, Biometrika 26; Hanley and Lippman-Hand 1983, JAMA 249 (rule of three).

    Examples:
        >>> [round(end, 3) for end in exact_interval(100, 100)]
        [0.964, 1.0]
        >>> [round(end, 3) for end in exact_interval(3, 10)]
        [0.067, 0.652]
    """
    from scipy.special import betaincinv

    if not 0.0 < level < 1.0:
        raise InputError(f"level must be between 0 and 1, got {level}")
    if not (n > 0 and 0 <= hits <= n):
        raise InputError(f"hits={hits} of n={n}: n must be above 0 and hits from 0 to n")
    tail = (1 - level) / 2
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return low, high


def share_interval(hits: Any, counts: Any, *, level: float = 0.95) -> tuple[float, float]:
    """The interval of Σ hits / Σ counts over independent clusters, such as sequences, that are right and wrong together.

    The exact interval of as many independent trials as would vary as much: the variance over clusters gives that number.
    Where every cluster is all right, or all wrong, the clusters don't show their spread, and are counted as one trial each.
    An accuracy of 1 thus never has an interval of width zero.

    Args:
        hits: What is right in each cluster. (cluster,)
        counts: What counts in each cluster, above 0. (cluster,)
        level: Nominal coverage.

    Returns:
        Lower and upper end, within 0 and 1.

    Raises:
        ShapeError: Hits and counts that don't pair.
        InputError: Fewer than two clusters, empty clusters, or hits outside of 0 to the count.

    Source:
        Korn and Graubard 1998, Survey Methodology 24 (effective number of trials with Student's correction).

    Examples:
        >>> [round(end, 3) for end in share_interval([10] * 50, [10] * 50)]
        [0.929, 1.0]
        >>> [round(end, 3) for end in share_interval([10, 0] * 25, [10] * 50)]  # as 50 trials, not as 500
        [0.35, 0.65]
    """
    right, count = as_array(hits), as_array(counts)
    if right.ndim != 1 or right.shape != count.shape:
        raise ShapeError(f"hits and counts must be (cluster,) each, got {right.shape} and {count.shape}")
    m, total = len(right), float(count.sum())
    if m < 2:
        raise InputError(f"an interval needs at least 2 clusters, got {m}. Give more sequences, or finer groups.")
    if not ((count > 0) & (right >= 0) & (right <= count)).all():
        raise InputError("each cluster needs a count above 0, and hits from 0 to its count")
    share = min(float(right.sum()) / total, 1.0)
    if share in (0.0, 1.0):
        return exact_interval(share * m, m, level=level)
    variance = m / (m - 1) * float(((right - share * count) ** 2).sum()) / total**2
    most = max(total, m)
    n = share * (1 - share) / variance if variance > 0 else most
    n *= float(t_quantile(level, most - 1) / t_quantile(level, m - 1)) ** 2
    n = min(n, most)
    return exact_interval(share * n, n, level=level)

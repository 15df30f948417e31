"""Permutation tests by flipping signs, and p values adjusted for their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.bootstrap import Array, as_array
from probelens.numerics.modes import exact
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SignFlip", "holm", "max_t", "sign_flip", "smallest_p"]

Alternative = Literal["two-sided", "greater", "less"]

_CHUNK = 2**22  # elements of a table of flips held at once


@dataclass(frozen=True)
class SignFlip(Result):
    """The outcome of a sign-flip test, and the smallest p value that it could have had.

    Args:
        mean: Mean difference. (...)
        p: p value. (...)
        smallest_p: The smallest p value that this many differences can give.
        n: How many differences.
        exact: True when all 2^n sign patterns were tried.
        alternative: Which side was tested.
    """

    mean: Tensor
    p: Tensor
    smallest_p: float
    n: int
    exact: bool
    alternative: str

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each test: index, mean, p, and the smallest p there could be."""
        import pandas as pd

        table = pd.DataFrame({"mean": self.mean.reshape(-1).numpy(), "p": self.p.reshape(-1).numpy()})
        table.insert(0, "index", np.arange(len(table)))
        return table.assign(smallest_p=self.smallest_p, n=self.n, exact=self.exact, alternative=self.alternative)


def smallest_p(n: int, alternative: Alternative = "two-sided") -> float:
    """The smallest p value that a sign-flip test of ``n`` differences can give.

    Args:
        n: Number of differences, usually of seeds.
        alternative: "two-sided", "greater" or "less".

    Returns:
        2 / 2^n, or 1 / 2^n one-sided. Four seeds can't go below 0.125 two-sided; six reach 0.031.

    Raises:
        InputError: A negative ``n``.

    Examples:
        >>> smallest_p(4), smallest_p(6)
        (0.125, 0.03125)
    """
    if n < 0:
        raise InputError(f"n={n} must be a number of differences, at least 0")
    return min(1.0, (2.0 if alternative == "two-sided" else 1.0) * 2.0**-n)


@exact
def sign_flip(
    differences: ArrayLike | Tensor,
    *,
    alternative: Alternative = "two-sided",
    n_permutations: int = 10_000,
    seed: int = 0,
) -> SignFlip:
    """Permutation test of "differences are symmetric about zero", by flipping their signs.

    Args:
        differences: One per independent unit, usually per seed: (n, ...); trailing axes are
            separate tests that share their flips.
        alternative: "two-sided", "greater" (mean above zero) or "less".
        n_permutations: All 2^n patterns are tried where there are no more than this many;
            otherwise this many random ones, and the observed one is counted in.
        seed: Seeds the random patterns.

    Returns:
        Mean, p and the smallest p that n differences can give.

    Raises:
        InputError: NaN, or fewer than two differences.

    Source:
        Fisher 1935; Phipson and Smyth 2010, arXiv 1603.05766 (p values of sampled permutations).

    Examples:
        >>> sign_flip([0.2, 0.3, 0.1, 0.4]).p
        tensor(0.1250, dtype=torch.float64)
    """
    table, shape = _differences(differences)
    observed = table.mean(axis=0)
    tie = 1e-12 * np.abs(table).mean(axis=0)  # rounding must not break a tie with the observed pattern

    def as_large(means: Array) -> NDArray[np.bool_]:
        return _side(means, alternative) >= _side(observed, alternative) - tie

    p, tried, exact = _share(table, as_large, n_permutations, seed)
    return SignFlip(
        mean=torch.from_numpy(observed.reshape(shape).copy()),
        p=torch.from_numpy(p.reshape(shape).copy()),
        smallest_p=max(smallest_p(len(table), alternative), 0.0 if exact else 1.0 / (tried + 1)),
        n=len(table),
        exact=exact,
        alternative=alternative,
    )


@exact
def max_t(
    differences: ArrayLike | Tensor,
    *,
    alternative: Alternative = "two-sided",
    n_permutations: int = 10_000,
    seed: int = 0,
) -> Tensor:
    """p values of many sign-flip tests, adjusted together by the step-down maximum of t.

    All tests share the flips, so their dependence is used where Holm must assume the worst.

    Args:
        differences: One row per independent unit, one column per test. (n, tests)
        alternative, n_permutations, seed: As for ``sign_flip``.

    Returns:
        Adjusted p values; the family-wise error is at most alpha when those up to alpha are rejected. (tests,)

    Raises:
        InputError: NaN, or fewer than two differences.

    Source:
        Westfall and Young 1993, algorithm 4.1.

    Examples:
        >>> max_t([[1.0, 0.1], [1.1, -0.2], [0.9, 0.1], [1.0, 0.0]])[0]
        tensor(0.1250, dtype=torch.float64)
    """
    table, shape = _differences(differences)
    n, k = table.shape
    square = (table**2).sum(axis=0)

    def t(mean: Array) -> Array:
        # The sum of squares does not change when signs flip.
        var = np.maximum(square / n - mean**2, 1e-15 * square / n)
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(_side(mean / np.sqrt(var / (n - 1)), alternative))

    observed = t(table.mean(axis=0))
    order = np.argsort(-observed)
    bar = observed[order] * (1 - 1e-9 * np.sign(observed[order]))

    def as_large(means: Array) -> NDArray[np.bool_]:
        scores = t(means)[:, order]
        return np.maximum.accumulate(scores[:, ::-1], axis=1)[:, ::-1] >= bar

    adjusted = np.empty(k)
    adjusted[order] = np.maximum.accumulate(_share(table, as_large, n_permutations, seed)[0])
    return torch.from_numpy(adjusted.reshape(shape))


def holm(p: ArrayLike | Tensor) -> Tensor:
    """p values adjusted for their number by Holm's step-down rule.

    Args:
        p: Raw p values. (...)

    Returns:
        Adjusted p values of the same shape: reject those up to alpha, and the chance of any false
        rejection is at most alpha, whatever the dependence. (...)

    Raises:
        InputError: A value outside 0 to 1.

    Source:
        Holm 1979, Scandinavian Journal of Statistics 6.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        tensor([0.0300, 0.0600, 0.0600], dtype=torch.float64)
    """
    raw = as_array(p)
    if not np.all((raw >= 0) & (raw <= 1)):
        raise InputError("p values must lie between 0 and 1 and not be NaN: drop undefined tests first")
    flat = raw.reshape(-1)
    order = np.argsort(flat)
    steps = flat[order] * np.arange(flat.size, 0, -1)
    adjusted = np.empty_like(flat)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return torch.from_numpy(adjusted.reshape(raw.shape))


def _differences(differences: ArrayLike | Tensor) -> tuple[Array, tuple[int, ...]]:
    table = as_array(differences)
    if table.ndim == 0 or len(table) < 2:
        raise InputError(f"a sign-flip test needs at least two differences, got shape {table.shape}")
    if not np.isfinite(table).all():
        raise InputError("differences hold NaN or infinity: drop the undefined units first")
    return table.reshape(len(table), -1), table.shape[1:]


def _share(
    table: Array, as_large: Callable[[Array], NDArray[np.bool_]], n_permutations: int, seed: int
) -> tuple[Array, int, bool]:
    """The share of sign patterns that are ``as_large`` as the observed one, their number, and whether they are all.

    Two-sided tests count the patterns of either sign; SciPy's permutation_test doubles the smaller tail, which
    random patterns make larger than that.
    """
    n, width = len(table), max(table.shape)
    if n_permutations < 1:
        raise InputError(f"n_permutations must be at least 1, got {n_permutations}; 10,000 is usual")
    exact = n < 60 and 2**n <= n_permutations
    if exact:
        flips = np.where((np.arange(2**n)[:, None] >> np.arange(n)) & 1 == 1, -1.0, 1.0)
    else:
        flips = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n_permutations, n))
    count = np.zeros(table.shape[1])
    for part in np.array_split(flips, max(1, len(flips) * width // _CHUNK)):
        count += as_large(part @ table / n).sum(axis=0)
    return (count if exact else count + 1) / (len(flips) + (not exact)), len(flips), exact


def _side(values: Array, alternative: Alternative) -> Array:
    if alternative not in ("two-sided", "greater", "less"):
        raise InputError(f"alternative {alternative!r} is not known. Allowed: 'two-sided', 'greater', 'less'")
    return np.abs(values) if alternative == "two-sided" else values if alternative == "greater" else -values

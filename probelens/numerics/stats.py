"""Intervals and tests for results that vary by training seed and, within a seed, by example.

The unit is the sequence: average its positions first, because they are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.bootstrap import Array, Scale, Statistic, Values, as_tensor, by_seed, calibrate, resample
from probelens.numerics.modes import exact
from probelens.numerics.permutation import SignFlip, holm, max_t, sign_flip, smallest_p
from probelens.numerics.shares import exact_interval, share_interval
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["Interval", "contrast", "coverage", "hierarchical_bootstrap", "paired_difference", "ratio_of_means"]
__all__ += ["SignFlip", "exact_interval", "holm", "max_t", "share_interval", "sign_flip", "smallest_p"]


@dataclass(frozen=True)
class Interval(Result):
    """An estimate with its interval, and the population that the interval generalises to.

    Args:
        estimate: The statistic of each seed, averaged over seeds. (...)
        low: Lower end. (...)
        high: Upper end. (...)
        se: Standard error of the estimate. (...)
        draws: Bootstrap draws on the scale of the interval: its ends are their quantiles. (draw, ...)
        per_seed: The statistic of each seed. (seed, ...)
        df: Degrees of freedom of the Student quantile. (...)
        level: Nominal coverage.
        n_seeds: How many seeds.
        n_examples: How many examples, over all seeds.
        scope: "seeds and examples", or "examples only" when there was one seed: then the interval says what more
            examples for this one trained model would change, nothing about retraining.
    """

    estimate: Tensor
    low: Tensor
    high: Tensor
    se: Tensor
    draws: Tensor
    per_seed: Tensor
    df: Tensor
    level: float
    n_seeds: int
    n_examples: int
    scope: str

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each element of the statistic: index, estimate, low, high, se."""
        import pandas as pd

        flat = {name: getattr(self, name).reshape(-1).numpy() for name in ("estimate", "low", "high", "se", "df")}
        table = pd.DataFrame({"index": np.arange(flat["estimate"].size), **flat})
        return table.assign(level=self.level, n_seeds=self.n_seeds, n_examples=self.n_examples, scope=self.scope)

    def plot(self) -> go.Figure:
        """Estimates with their intervals as error bars."""
        import plotly.express as px

        table = self.to_dataframe()
        table["above"], table["below"] = table["high"] - table["estimate"], table["estimate"] - table["low"]
        title = f"{self.level:.0%} intervals over {self.scope}"
        return px.scatter(table, x="index", y="estimate", error_y="above", error_y_minus="below", title=title)

    def excludes(self, value: float = 0.0) -> Tensor:
        """Whether the interval excludes ``value``.

        Args:
            value: Usually 0: no effect.

        Returns:
            True where the interval excludes it. (...) bool
        """
        return (self.low > value) | (self.high < value)

    def __repr__(self) -> str:
        if self.estimate.numel() == 1:
            ends = (float(x) for x in (self.estimate, self.low, self.high))
            body = "{:.4g} [{:.4g}, {:.4g}]".format(*ends)
        else:
            body = f"shape={tuple(self.estimate.shape)}"
        return f"Interval({body}, level={self.level:g}, n_seeds={self.n_seeds}, scope={self.scope!r})"


@exact
def hierarchical_bootstrap(
    values: Values,
    seeds: ArrayLike | Tensor | None = None,
    *,
    statistic: Statistic | None = None,
    scale: Scale = "linear",
    n_draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval for a mean, or a function of means, of examples nested in seeds.

    Seeds are resampled, then the examples of each drawn seed. With four to six seeds, plain percentiles of such draws
    cover too little: no draw leaves the range of the seeds, and their spread is too small by sqrt((S-1)/S). So the
    draws give the interval its skew only, and its width is Student's: 2 t(S-1) times the standard error of the S
    seeds' statistics. For normal seed effects this is the exact t interval, whatever the share of variance within seeds
    (``coverage`` checks a design); where all seeds tie exactly, the examples within them give the width. Accuracies
    near the ceiling are skewed, and ``scale="logit"`` covers better there: the same interval of log odds, taken back to
    a fraction. Neither can hold when one seed in ten behaves differently and the sample has none of those. When all
    seeds are scored on the same sequences, the interval is about other seeds on these sequences.

    Args:
        values: Numbers per example: (seed, example, ...), a list with one (example, ...) per seed where seeds differ in
            examples, (example,) for a single seed, or (row, ...) with ``seeds``. Trailing axes are resampled together.
        seeds: Seed of each row of flat ``values``. (row,)
        statistic: Function of a seed's mean, vectorised over leading axes: (..., *features) -> (..., *out). Default:
            the mean itself.
        scale: "logit" for accuracies and other shares, which stay between 0 and 1. Not for values that may have either
            sign, such as a drop. A share of exactly 0 or 1 has the exact interval of as many trials as there are examples.
        n_draws: Bootstrap draws.
        level: Nominal coverage.
        seed: Seeds the draws.

    Returns:
        The interval, in the statistic's unit. With one seed only examples are resampled and ``scope`` says so; the
        percentiles are then widened by the small-sample factor sqrt(n/(n-1)) t/z.

    Raises:
        ShapeError: Features or lengths that don't fit together.
        InputError: NaN, no examples, an impossible level, or ``scale="logit"`` for numbers not between 0 and 1.

    Source:
        Davison and Hinkley 1997, section 3.8 (nested resampling); Hesterberg 2015, arXiv 1411.5279, section 5
        (narrowness bias of percentiles in small samples); Korn and Graubard 1999, Analysis of Health Surveys (logit
        limits of shares in clustered samples).

    Examples:
        >>> values = [[0.9, 1.0, 0.8], [0.7, 0.9, 0.8]]
        >>> hierarchical_bootstrap(values).estimate
        tensor(0.8500, dtype=torch.float64)
        >>> hierarchical_bootstrap(values[0]).scope
        'examples only'
    """
    return contrast(
        [values],
        [1.0],
        None if seeds is None else [seeds],
        statistic=statistic,
        scale=scale,
        n_draws=n_draws,
        level=level,
        seed=seed,
    )


def contrast(
    groups: Sequence[Values],
    weights: Sequence[float],
    seeds: Sequence[ArrayLike | Tensor | None] | None = None,
    *,
    statistic: Statistic | None = None,
    scale: Scale = "linear",
    n_draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval for a weighted sum of one statistic over independent groups of seeds.

    The groups are resampled independently, each as in ``hierarchical_bootstrap``, with Welch's degrees of freedom.

    Args:
        groups: Values of each group, in any form that ``hierarchical_bootstrap`` takes.
        weights: One per group, such as ``[1, -1]`` for a difference.
        seeds: Seed of each row, for each group whose values are flat. (row,) each
        statistic, scale, n_draws, level, seed: As for ``hierarchical_bootstrap``.

    Returns:
        The interval. ``per_seed`` lists the groups' seeds one after another, unweighted. ``scope`` is "examples only" as
        soon as one group has a single seed.

    Raises:
        ShapeError: Groups and weights, or features, that don't fit together.
        InputError: NaN, no examples, an impossible level, or numbers that don't fit the scale.

    Source:
        Welch 1947, Biometrika 34.

    Examples:
        >>> contrast([[[1.0, 2.0], [2.0, 3.0]], [[0.0, 1.0], [1.0, 0.0]]], [1, -1]).estimate
        tensor(1.5000, dtype=torch.float64)
    """
    if not 0.0 < level < 1.0:
        raise InputError(f"level must be between 0 and 1, got {level}")
    if n_draws < 2:
        raise InputError(f"n_draws must be at least 2, got {n_draws}; 2000 is usual")
    if not len(groups):
        raise InputError("contrast() needs at least one group of values")
    if len(groups) != len(weights) or (seeds is not None and len(seeds) != len(groups)):
        raise ShapeError(f"{len(groups)} groups need as many weights (and seeds), got {len(weights)}")
    if scale not in ("linear", "logit"):
        raise InputError(f"scale {scale!r} is not known. Allowed: 'linear', 'logit'")
    rng = np.random.default_rng(seed)
    nested = [by_seed(group, None if seeds is None else seeds[i]) for i, group in enumerate(groups)]
    parts = [resample(rows, statistic, n_draws, rng, level) for rows in nested]
    shapes = {p[0].shape[1:] for p in parts}
    if len(shapes) > 1:
        raise ShapeError(f"groups differ in the features of their statistic: {sorted(shapes)}")
    estimate = np.asarray(sum(w * p[0].mean(axis=0) for w, p in zip(weights, parts)))
    raw = sum(w * p[1] for w, p in zip(weights, parts))
    var = [w**2 * p[2] for w, p in zip(weights, parts)]
    total = np.asarray(sum(var))
    with np.errstate(divide="ignore", invalid="ignore"):
        df = total**2 / sum(v**2 / p[3] for v, p in zip(var, parts))
    df = np.where(np.isfinite(df), df, sum(np.asarray(p[3], float) for p in parts))
    if scale == "logit" and not ((estimate >= 0) & (estimate <= 1)).all():
        raise InputError(
            f'scale="logit" is for shares between 0 and 1, got {estimate.min():.4g} to {estimate.max():.4g}. '
            'Give scale="linear" for values that may have either sign.'
        )
    draws, low, high = calibrate(estimate, np.asarray(raw), np.sqrt(total), df, level, scale)
    n_examples = sum(len(rows) for group in nested for rows in group)
    if scale == "logit":
        least, most = (
            exact_interval(n_examples, n_examples, level=level)[0],
            exact_interval(0, n_examples, level=level)[1],
        )
        low, high = np.where(estimate == 1, least, low), np.where(estimate == 0, most, high)
    return Interval(
        estimate=as_tensor(estimate),
        low=as_tensor(low),
        high=as_tensor(high),
        se=as_tensor(np.sqrt(total)),
        draws=as_tensor(draws),
        per_seed=as_tensor(np.concatenate([p[0] for p in parts])),
        df=as_tensor(df),
        level=level,
        n_seeds=sum(len(p[0]) for p in parts),
        n_examples=n_examples,
        scope="examples only" if min(map(len, nested)) == 1 else "seeds and examples",
    )


def paired_difference(a: Values, b: Values, seeds: ArrayLike | Tensor | None = None, **options: Any) -> Interval:
    """Interval for the mean of a − b where both were measured on the same examples.

    Args:
        a: Values of one condition, as in ``hierarchical_bootstrap``.
        b: Values of the other, of the same shape.
        seeds: Seed of each row of flat values. (row,)
        **options: As in ``hierarchical_bootstrap``.

    Returns:
        The interval of the difference.

    Raises:
        ShapeError: Conditions of different shapes.

    Examples:
        >>> paired_difference([[1.0, 0.9]], [[0.5, 0.4]]).estimate
        tensor(0.5000, dtype=torch.float64)
    """
    first, second = by_seed(a, seeds), by_seed(b, seeds)
    shapes = [x.shape for x in first], [x.shape for x in second]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"paired values must have the same shapes, got {shapes[0]} and {shapes[1]}")
    return hierarchical_bootstrap([x - y for x, y in zip(first, second)], **options)


def ratio_of_means(
    numerator: Values, denominator: Values, seeds: ArrayLike | Tensor | None = None, **options: Any
) -> Interval:
    """Interval for mean(numerator) / mean(denominator), the pairs resampled together.

    So patching recovery is pooled over pairs: one with a small gap counts little, and would dominate a mean of ratios.

    Args:
        numerator: Values per example. (seed, example, ...) or any form of ``hierarchical_bootstrap``.
        denominator: Values per example; it may lack the trailing axes of the numerator.
        seeds: Seed of each row of flat values. (row,)
        **options: As in ``hierarchical_bootstrap``.

    Returns:
        The interval of the ratio, a fraction, of each seed's ratio averaged when there are several.

    Raises:
        ShapeError: Numerator and denominator that don't pair.
        InputError: The mean of a denominator is zero.

    Source:
        Davison and Hinkley 1997, example 2.9 (city populations).

    Examples:
        >>> ratio_of_means([1.0, 3.0], [2.0, 6.0]).estimate
        tensor(0.5000, dtype=torch.float64)
    """
    top, bottom = by_seed(numerator, seeds), by_seed(denominator, seeds)
    if [len(x) for x in top] != [len(x) for x in bottom]:
        shapes = " and ".join(str([x.shape for x in side]) for side in (top, bottom))
        raise ShapeError(f"numerator and denominator must have the same shape, got {shapes}")
    inner, outer = bottom[0].shape[1:], top[0].shape[1:]
    if inner != outer[: len(inner)]:
        raise ShapeError(f"features {outer} of the numerator don't begin with {inner} of the denominator")
    if any(np.any(np.abs(x.mean(axis=0)) <= 1e-12 * np.abs(x).max(axis=0, initial=0.0)) for x in bottom):
        raise InputError("the mean of the denominator is zero: there is no gap to take a fraction of")
    size = int(np.prod(inner))
    packed = [np.concatenate([y.reshape(len(y), -1), x.reshape(len(x), -1)], 1) for x, y in zip(top, bottom)]

    def ratio(means: Array) -> Array:
        lead = means.shape[:-1]
        below = means[..., :size].reshape((*lead, *inner, *(1,) * (len(outer) - len(inner))))
        # A resample of few examples may have no gap at all; its ratio is then undefined, which is NaN.
        with np.errstate(divide="ignore", invalid="ignore"):
            return means[..., size:].reshape((*lead, *outer)) / below

    return hierarchical_bootstrap(packed, statistic=ratio, **options)


def coverage(
    n_seeds: int = 5,
    n_examples: int = 100,
    *,
    between: float = 1.0,
    within: float = 1.0,
    accuracy: float | None = None,
    scale: Scale = "linear",
    n_datasets: int = 1000,
    n_draws: int = 400,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, float]:
    """How often the intervals contain the true value, by simulation of a nested design.

    Args:
        n_seeds: Seeds of each data set.
        n_examples: Examples of each seed.
        between: Standard deviation of the seed effects (in logits when ``accuracy`` is given).
        within: Standard deviation of examples within a seed; unused when ``accuracy`` is given.
        accuracy: None for normal values; otherwise examples are right or wrong, with this median accuracy over seeds.
        scale: As in ``hierarchical_bootstrap``.
        n_datasets: Data sets to simulate.
        n_draws: Bootstrap draws for each.
        level: Nominal coverage.
        seed: Seeds everything.

    Returns:
        ``coverage`` of ``hierarchical_bootstrap``; ``percentile``, that of plain percentiles of the same nested draws;
        ``width``, the mean width; ``error``, the standard error of ``coverage``.

    Raises:
        InputError: No data sets.

    Examples:
        >>> sorted(coverage(n_datasets=20))
        ['coverage', 'error', 'percentile', 'width']
    """
    if n_datasets < 1:
        raise InputError(f"n_datasets must be at least 1, got {n_datasets}")
    rng = np.random.default_rng(seed)
    truth, odds = 0.0, 0.0
    if accuracy is not None:
        odds = float(np.log(accuracy / (1 - accuracy)))
        nodes, mass = np.polynomial.hermite_e.hermegauss(64)
        truth = float((mass / mass.sum()) @ (1 / (1 + np.exp(-(odds + between * nodes)))))
    hits, plain, width = 0, 0, 0.0
    for i in range(n_datasets):
        effect = between * rng.standard_normal((n_seeds, 1))
        if accuracy is None:
            values = effect + within * rng.standard_normal((n_seeds, n_examples))
        else:
            right = 1 / (1 + np.exp(-(odds + effect)))
            values = (rng.random((n_seeds, n_examples)) < right).astype(np.float64)
        found = hierarchical_bootstrap(values, scale=scale, n_draws=n_draws, level=level, seed=seed + i)
        hits += bool(found.low <= truth <= found.high)
        width += float(found.high - found.low) / n_datasets
        raw = resample(list(values), None, n_draws, np.random.default_rng(seed + i), level)[1]
        low, high = np.quantile(raw, [(1 - level) / 2, (1 + level) / 2])
        plain += bool(low <= truth <= high)
    rate = hits / n_datasets
    error = float(np.sqrt(rate * (1 - rate) / n_datasets))
    return {"coverage": rate, "percentile": plain / n_datasets, "width": width, "error": error}

"""Nested resampling of plain arrays, and the calibration of its draws to a Student interval."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from probelens.errors import InputError, ShapeError

Array = NDArray[np.float64]
Values = Any  # Tensor, array, or a sequence of one of these per seed
Statistic = Callable[[Array], Array]
Scale = Literal["linear", "logit"]

_CHUNK = 2**22  # elements of a resampling table held at once


def resample(
    nested: list[Array], statistic: Statistic | None, n_draws: int, rng: np.random.Generator, level: float
) -> tuple[Array, Array, Array, Any]:
    """Per-seed statistics, raw draws, variance of the estimate and its degrees of freedom; no statistic is the mean."""
    function = statistic or (lambda means: means)
    n_seeds = len(nested)
    per_seed = np.stack([np.asarray(function(rows.mean(axis=0))) for rows in nested])
    slots = np.zeros((n_draws, 1), int) if n_seeds == 1 else rng.integers(n_seeds, size=(n_draws, n_seeds))
    drawn = np.empty((*slots.shape, *per_seed.shape[1:]))
    for s, rows in enumerate(nested):
        here = slots == s
        drawn[here] = function(_resampled_means(rows, int(here.sum()), rng))
    draws = drawn.mean(axis=1)
    if n_seeds > 1:
        between = per_seed.var(axis=0, ddof=1) / n_seeds
        # Seeds that tie exactly, as counts of few examples may, don't show their spread; their examples do.
        tied = between == 0
        if not tied.any():
            return per_seed, draws, between, n_seeds - 1.0
        often = [s for s in range(n_seeds) if (slots == s).sum() > 1]
        within = np.mean([drawn[slots == s].var(axis=0) for s in often], axis=0) / n_seeds
        df = np.where(tied, max(sum(len(rows) - 1 for rows in nested), n_seeds - 1), n_seeds - 1.0)
        return per_seed, draws, np.where(tied, within, between), df
    # One seed: the percentiles' half width serves as the standard error, as it resists heavy tails.
    n = len(nested[0])
    if n < 2:
        raise InputError(
            "an interval needs at least 2 examples, or 2 seeds, and there is 1 example of 1 seed. Give more."
        )
    low, high = _quantiles(draws, level)
    z = float(t_quantile(level, np.inf))
    return per_seed, draws, ((high - low) / 2 / z) ** 2 * n / (n - 1), n - 1.0


def _resampled_means(rows: Array, n_draws: int, rng: np.random.Generator) -> Array:
    n, flat = len(rows), rows.reshape(len(rows), -1)
    out = np.empty((n_draws, flat.shape[1]))
    step = max(1, _CHUNK // n)
    for start in range(0, n_draws, step):
        m = min(step, n_draws - start)
        picks = rng.integers(n, size=(m, n), dtype=np.int32)
        picks += np.arange(m, dtype=np.int32)[:, None] * np.int32(n)
        counts = np.bincount(picks.reshape(-1), minlength=m * n).reshape(m, n)
        out[start : start + m] = counts @ flat / n
    return out.reshape(n_draws, *rows.shape[1:])


def _stretched(estimate: Array, raw: Array, half: Array, level: float) -> tuple[Array, Array, Array]:
    """Draws moved to the estimate and stretched until their quantiles are 2 ``half`` apart, and these."""
    low, high = _quantiles(raw, level)
    spread = (high - low) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        stretch = np.where(spread > 0, half / spread, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # With heavy tails the mean leaves the bulk of the draws, and the interval would leave the estimate.
        centre = np.clip(np.nanmean(raw, axis=0), *_quantiles(raw, 0.5))
    flat = (spread <= 0) & (half > 0)
    # Draws can be infinite where a resample has a denominator of zero; the ends are then undefined.
    with np.errstate(invalid="ignore"):
        draws = estimate + stretch * (raw - centre)
        low = np.where(flat, estimate - half, estimate + stretch * (low - centre))
        high = np.where(flat, estimate + half, estimate + stretch * (high - centre))
    return draws, low, high


def calibrate(
    estimate: Array, raw: Array, se: Array, df: Array, level: float, scale: Scale
) -> tuple[Array, Array, Array]:
    """Draws moved to the estimate and stretched to the width of a Student interval, and its ends; log odds for "logit"."""
    half = t_quantile(level, df) * se
    if scale == "linear":
        return _stretched(estimate, raw, half, level)
    # Draws go to log odds along the tangent at the estimate, so that one of exactly 0 or 1 stays finite.
    inside = (estimate > 0) & (estimate < 1)
    share = np.where(inside, estimate, 0.5)
    slope = share * (1 - share)
    odds = np.log(share / (1 - share))
    with np.errstate(over="ignore"):
        found = (1 / (1 + np.exp(-x)) for x in _stretched(odds, raw / slope, half / slope, level))
        return tuple(np.where(inside, x, estimate) for x in found)  # type: ignore[return-value]


def _quantiles(draws: Array, level: float) -> tuple[Array, Array]:
    # A statistic may be undefined on some draws; on all of them the ends are NaN.
    find = np.nanquantile if np.isnan(draws).any() else np.quantile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = find(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def t_quantile(level: float, df: Any) -> Array:
    """Half width of a central Student interval in standard errors; the normal one at infinite ``df``."""
    from scipy.special import ndtri, stdtrit

    tail = (1 + level) / 2
    return np.where(np.isinf(df), ndtri(tail), stdtrit(np.where(np.isinf(df), 1.0, df), tail))


def as_tensor(values: Any) -> Tensor:
    """A float64 tensor of its own memory."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


def by_seed(values: Values, seeds: ArrayLike | Tensor | None) -> list[Array]:
    """Any accepted form of values as one (example, ...) array per seed, checked."""
    if seeds is not None:
        rows, ids = as_array(values), as_array(seeds) if isinstance(seeds, Tensor) else np.asarray(seeds)
        if ids.ndim != 1 or rows.ndim == 0 or len(ids) != len(rows):
            raise ShapeError(f"seeds must name the seed of each row: got {ids.shape} for values {rows.shape}")
        found = [rows[ids == s] for s in np.unique(ids)]
    elif isinstance(values, (Tensor, np.ndarray)):
        table = as_array(values)
        found = [table] if table.ndim < 2 else list(table)
    elif not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise InputError(f"values must be numbers per example, got a {type(values).__name__}")
    else:
        items = [as_array(v) for v in values]
        found = [np.stack(items)] if items and all(v.ndim == 0 for v in items) else items
    if not found or any(rows.ndim == 0 or len(rows) == 0 for rows in found):
        raise InputError(
            "no examples: give (seed, example, ...), one (example, ...) per seed, or flat values and seeds"
        )
    if len({rows.shape[1:] for rows in found}) > 1:
        raise ShapeError(f"seeds differ in the features of an example: {[rows.shape for rows in found]}")
    if not all(np.isfinite(rows).all() for rows in found):
        raise InputError("values hold NaN or infinity: drop or mask the undefined examples first")
    return found


def as_array(values: Any) -> Array:
    """A float64 array of a tensor or of anything array-like."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as err:
        raise InputError(f"numbers are needed, got {type(values).__name__}: {err}") from err

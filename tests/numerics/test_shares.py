"""Exact intervals of shares against scipy, and how often those of clusters cover, by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from probelens.errors import InputError, ShapeError
from probelens.numerics.shares import exact_interval, share_interval


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 7), (7, 7), (300, 300), (299, 300)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_exact_interval_is_scipys(hits: int, n: int, level: float) -> None:
    want = stats.binomtest(hits, n).proportion_ci(level, method="exact")
    assert exact_interval(hits, n, level=level) == pytest.approx((want.low, want.high))


def test_clusters_that_are_right_as_a_whole_count_as_trials_and_independent_positions_as_themselves() -> None:
    whole = share_interval([8] * 70 + [0] * 30, [8] * 100)
    want = stats.binomtest(70, 100).proportion_ci(method="exact")
    assert whole == pytest.approx((want.low, want.high), abs=2e-3)
    rng = np.random.default_rng(0)
    single = share_interval(rng.binomial(8, 0.7, 1000), torch.full((1000,), 8))
    want = stats.binomtest(5600, 8000).proportion_ci(method="exact")
    assert single[1] - single[0] == pytest.approx(want.high - want.low, rel=0.1)


def test_a_perfect_or_hopeless_share_has_the_bound_of_as_many_trials_as_clusters() -> None:
    assert share_interval([5, 9, 2] * 20, [5, 9, 2] * 20) == pytest.approx((0.025 ** (1 / 60), 1.0))
    assert share_interval([0] * 60, [5] * 60) == pytest.approx((0.0, 1 - 0.025 ** (1 / 60)))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98, 0.998])
@pytest.mark.parametrize("alike", [None, 2.0])
def test_intervals_cover_at_the_ceiling_too(share: float, alike: float | None) -> None:
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        chance = np.full(80, share) if alike is None else rng.beta(share * alike, (1 - share) * alike, 80)
        low, high = share_interval(rng.binomial(10, chance), np.full(80, 10))
        hits += low <= share <= high
    assert hits >= 400 * 0.91  # a true 0.95 falls below in one of 4,000


def test_bad_input_is_refused() -> None:
    with pytest.raises(ShapeError, match="cluster"):
        share_interval([1, 2], [1, 2, 3])
    with pytest.raises(InputError, match="at least 2 clusters"):
        share_interval([1], [1])
    with pytest.raises(InputError, match="count above 0"):
        share_interval([1, 0], [1, 0])
    with pytest.raises(InputError, match="hits=3 of n=2"):
        exact_interval(3, 2)
    with pytest.raises(InputError, match="level"):
        exact_interval(1, 2, level=1.0)

"""The effect's prediction interval and p values over sites, by simulation: what they promise holds under the null."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.numerics.effects import effect, max_t_over_sites


def null(seed: int, m: int, n: int, spread: float, noise: float) -> torch.Tensor:
    """Costs of a target that is one more draw of its control, target first. (1 + m, n)"""
    gen = torch.Generator().manual_seed(seed)
    return (
        spread * torch.randn(m + 1, 1, generator=gen)
        + noise * torch.randn(m + 1, n, generator=gen)
        + 0.1 * torch.rand(n, generator=gen)
    )


def test_costs_that_are_no_numbers_have_no_p() -> None:
    nan, fine = torch.full((10,), torch.nan), torch.rand(20, 10)
    for target, draws, room in (
        (nan, fine, torch.ones(10)),
        (fine[0], fine * nan, torch.ones(10)),
        (fine[0], fine, nan),
    ):
        with pytest.raises(InputError, match="NaN"):
            effect(target, draws, room)
    with pytest.raises(InputError, match="NaN"):
        max_t_over_sites(torch.tensor([1.0, torch.nan]), torch.rand(2, 20))
    for options in ({"level": 95}, {"samples": 0}):
        with pytest.raises(InputError, match="level"):
            effect(fine[0], fine, torch.ones(10), **options)


def test_the_seed_moves_no_end_by_more_than_the_sequences_noise() -> None:
    costs = null(0, 99, 300, 0.2, 0.02)
    found = [effect(costs[0], costs[1:], torch.ones(300), seed=seed) for seed in range(5)]
    for ends in ([one.low for one in found], [one.high for one in found]):
        assert max(ends) - min(ends) < 1e-3  # 0.05 where each sample's draw is a random one


@pytest.mark.parametrize("m", [20, 99])
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_a_target_that_is_a_draw_of_its_control_has_zero_inside_in_nineteen_of_twenty(m: int, spread: float) -> None:
    outside, small = 0, 0
    for seed in range(200):
        costs = null(seed, m, 60, spread, 0.3)
        found = effect(costs[0], costs[1:], torch.ones(60), seed=seed, samples=400)
        outside += found.low > 0 or found.high < 0
        small += found.p <= 0.05
    # 200 draws of a coin of 0.05: 3 to 18 in 99 % of runs.
    assert 3 <= outside <= 18
    assert small <= 18


def test_an_interval_over_sequences_alone_would_leave_zero_in_most_cases() -> None:
    """The control of the test above: the same data with what the interval must not forget left out."""
    outside = 0
    for seed in range(100):
        costs = null(seed, 20, 60, 0.2, 0.3).double()
        each = costs[0] - costs[1:].mean(0)
        half = 1.96 * each.std() / 60**0.5
        outside += bool(abs(each.mean()) > half)
    assert outside > 50


def test_a_real_effect_is_found_with_its_size_and_a_noisier_target_widens_the_interval() -> None:
    costs = null(0, 99, 200, 0.02, 0.1)
    found = effect(costs[0] + 0.5, costs[1:], torch.full((200,), 0.8))
    assert found.estimate == pytest.approx(float((costs[0] + 0.5 - costs[1:].mean(0)).mean()) / 0.8, abs=1e-6)
    assert found.low > 0.4
    assert found.p == pytest.approx(0.01)
    noisy = effect(
        costs[0] + 0.5 + 3 * torch.randn(200, generator=torch.Generator().manual_seed(1)),
        costs[1:],
        torch.full((200,), 0.8),
    )
    assert noisy.high - noisy.low > 3 * (found.high - found.low)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(draw, example\)"):
        effect(torch.zeros(3), torch.zeros(2, 4), torch.ones(4))
    with pytest.raises(InputError, match="two control draws"):
        effect(torch.zeros(4), torch.zeros(1, 4), torch.ones(4))
    with pytest.raises(InputError, match="nothing to lose"):
        effect(torch.zeros(4), torch.zeros(2, 4), torch.zeros(4))
    with pytest.raises(ShapeError, match="site"):
        max_t_over_sites(torch.zeros(3), torch.zeros(2, 9))


def test_over_thirteen_unused_sites_some_adjusted_p_is_small_in_one_run_of_twenty() -> None:
    raw, adjusted = 0, 0
    for seed in range(400):
        costs = torch.randn(13, 100, generator=torch.Generator().manual_seed(seed))
        p = max_t_over_sites(costs[:, 0], costs[:, 1:])
        adjusted += bool((p <= 0.05).any())
        raw += bool((((costs[:, :1] <= costs).double().mean(1)) <= 0.05).any())
    assert 8 <= adjusted <= 33  # 20 expected
    assert raw > 150  # without adjusting about half


def test_adjusted_p_steps_down_and_never_falls_below_the_raw_one() -> None:
    gen = torch.Generator().manual_seed(3)
    draws = torch.randn(4, 99, generator=gen)
    targets = torch.tensor([9.0, 8.0, 1.5, 0.0])
    p = max_t_over_sites(targets, draws)
    raw = (torch.cat([targets[:, None], draws], 1) >= targets[:, None]).double().mean(1)
    assert bool((p >= raw - 1e-12).all())
    assert p.tolist() == sorted(p.tolist())
    # With the two strong sites gone through first, the third is compared with the two that are left only.
    alone = max_t_over_sites(targets[2:], draws[2:])
    assert float(p[2]) == pytest.approx(float(alone[0]))


@pytest.mark.parametrize(("alike", "least", "most"), [(False, 0.0, 0.08), (True, 0.3, 0.6)])
def test_draws_must_be_made_for_each_site_where_the_sites_resemble_each_other(
    alike: bool, least: float, most: float
) -> None:
    rng = np.random.default_rng(0)

    def cost(*shape: int) -> np.ndarray:
        """What a random direction shares with the one that is read, the same one at all sites."""
        drawn = rng.standard_normal((*shape, 8))
        return drawn[..., 0] ** 2 / (drawn**2).sum(-1)

    found = 0
    for _ in range(400):
        draws = np.repeat(cost(1, 99), 13, 0) if alike else cost(13, 99)
        p = max_t_over_sites(torch.tensor(cost(13)), torch.tensor(draws))
        found += bool((p <= 0.05).any())
    assert least <= found / 400 <= most


def test_the_whole_spread_of_sequences_on_top_of_the_draws_would_be_counted_twice() -> None:
    """numpy, sample by sequence sample, with one draw each: the interval is right where sequences hardly differ."""

    def twice(costs: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
        m, n = len(costs) - 1, costs.shape[1]
        means = rng.multinomial(n, np.full(n, 1 / n), size=1000) @ costs.T / n
        target, draws = means[:, 0], means[:, 1:]
        one = draws[np.arange(1000), rng.integers(m, size=1000)] - draws.mean(1)
        low, high = np.quantile(target - draws.mean(1) - one * ((m + 1) / (m - 1)) ** 0.5, [0.025, 0.975])
        return float(low), float(high)

    rng = np.random.default_rng(1)
    for noise, apart in ((0.01, (0.97, 1.03)), (0.3, (1.3, 1.7))):
        ratio = []
        for seed in range(20):
            costs = null(seed, 99, 60, 0.02, noise).numpy().astype(np.float64)
            found = effect(torch.tensor(costs[0]), torch.tensor(costs[1:]), torch.ones(60, dtype=torch.float64))
            low, high = twice(costs, rng)
            ratio.append((high - low) / (found.high - found.low))
        assert apart[0] < np.mean(ratio) < apart[1], (noise, np.mean(ratio))

"""Intervals: coverage by simulation, agreement with SciPy, what a single seed can say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.numerics.stats import (
    Interval,
    contrast,
    coverage,
    hierarchical_bootstrap,
    paired_difference,
    ratio_of_means,
)


def nested(n_seeds=5, n_examples=80, between=1.0, within=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return between * rng.standard_normal((n_seeds, 1)) + within * rng.standard_normal((n_seeds, n_examples))


@pytest.mark.parametrize(
    ("design", "options"),
    [
        ("seeds dominate", {"n_seeds": 5, "n_examples": 100, "within": 0.5}),
        ("examples dominate", {"n_seeds": 4, "n_examples": 100, "between": 0.1}),
        ("right or wrong", {"n_seeds": 6, "n_examples": 200, "accuracy": 0.8, "between": 0.5}),
    ],
)
def test_intervals_cover_95_percent_of_nested_data_sets(design, options):
    found = coverage(n_datasets=1000, n_draws=200, **options)
    assert 0.93 <= found["coverage"] <= 0.97, found


@pytest.mark.parametrize("n_seeds", [3, 4])
def test_log_odds_cover_where_accuracies_are_near_the_ceiling_and_seeds_far_apart(n_seeds):
    options = {"n_examples": 200, "accuracy": 0.95, "between": 1.0, "n_datasets": 1000, "n_draws": 200}
    linear, logit = (coverage(n_seeds, scale=scale, **options) for scale in ("linear", "logit"))
    assert linear["coverage"] < 0.915, "the control: Student's width alone is not enough here"
    assert 0.93 <= logit["coverage"] <= 0.97, logit


def test_the_width_in_log_odds_is_the_t_interval_of_the_survey_literature():
    from scipy import special, stats

    values = (np.random.default_rng(0).random((5, 80)) < np.array([0.99, 0.9, 0.97, 0.8, 0.95])[:, None]) * 1.0
    found = hierarchical_bootstrap(values, scale="logit")
    p, se = values.mean(), stats.sem(values.mean(axis=1))
    width = special.logit(float(found.high)) - special.logit(float(found.low))
    assert width == pytest.approx(2 * stats.t.ppf(0.975, 4) * se / (p * (1 - p)), rel=1e-9)
    assert 0 < float(found.low) < p < float(found.high) < 1
    ends = np.quantile(found.draws.numpy(), [0.025, 0.975])
    assert ends == pytest.approx([float(found.low), float(found.high)])
    assert float(hierarchical_bootstrap(values).high) > 1, "the control: the linear one leaves the range of shares"


def test_log_odds_are_symmetric_and_a_perfect_score_has_the_exact_bound_of_its_examples():
    values = (np.random.default_rng(0).random((4, 60)) < 0.9) * 1.0
    right, wrong = (hierarchical_bootstrap(v, scale="logit") for v in (values, 1 - values))
    assert float(right.low) == pytest.approx(1 - float(wrong.high))
    perfect = hierarchical_bootstrap(np.ones((3, 20)), scale="logit")
    assert (float(perfect.estimate), float(perfect.high)) == (1.0, 1.0)
    assert float(perfect.low) == pytest.approx(0.025 ** (1 / 60))
    assert float(hierarchical_bootstrap(np.zeros((3, 20)), scale="logit").high) == pytest.approx(1 - 0.025 ** (1 / 60))
    both = hierarchical_bootstrap(np.stack([values, np.ones_like(values)], axis=-1), scale="logit")
    assert float(both.low[0]) == pytest.approx(float(right.low), abs=0.02)
    assert float(both.low[1]) == pytest.approx(0.025 ** (1 / 240))


def test_plain_percentiles_cover_too_little_with_few_seeds():
    # The control: without the correction the same simulation misses the truth far too often.
    found = coverage(5, 50, within=0.5, n_datasets=400, n_draws=200)
    assert found["percentile"] < 0.9 < found["coverage"]


def test_for_means_the_width_is_the_exact_t_interval_of_the_seed_means():
    from scipy import stats

    values = nested()
    low, high = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values.mean(axis=1)))
    found = hierarchical_bootstrap(values)
    assert float(found.high - found.low) == pytest.approx(high - low, rel=1e-9)
    assert float(found.estimate) == pytest.approx(values.mean())
    assert float(found.low) == pytest.approx(low, abs=0.05 * (high - low))


def test_resampling_only_examples_would_be_far_too_narrow():
    values = nested(within=0.2)
    pooled = hierarchical_bootstrap(values.reshape(-1))
    both = hierarchical_bootstrap(values)
    assert pooled.scope == "examples only"
    assert both.scope == "seeds and examples"
    assert float(both.high - both.low) > 3 * float(pooled.high - pooled.low)


def test_single_seed_interval_agrees_with_scipy_bca():
    from scipy import stats

    values = np.random.default_rng(1).exponential(size=400)
    reference = stats.bootstrap((values,), np.mean, method="BCa", n_resamples=5000, rng=np.random.default_rng(0))
    found = hierarchical_bootstrap(values, n_draws=5000)
    width = reference.confidence_interval.high - reference.confidence_interval.low
    assert float(found.low) == pytest.approx(reference.confidence_interval.low, abs=0.08 * width)
    assert float(found.high) == pytest.approx(reference.confidence_interval.high, abs=0.08 * width)


def test_the_ends_are_quantiles_of_the_draws_and_keep_their_skew():
    values = np.random.default_rng(0).exponential(size=(4, 20)) ** 2
    found = hierarchical_bootstrap(values)
    ends = np.quantile(found.draws.numpy(), [0.025, 0.975])
    assert ends == pytest.approx([float(found.low), float(found.high)])
    assert float(found.high - found.estimate) > float(found.estimate - found.low)


def test_flat_rows_with_seeds_equal_nested_rows_and_seeds_may_differ_in_size():
    a, b = np.arange(4.0), np.arange(7.0)
    rows, seeds = np.concatenate([b, a]), torch.tensor([1] * 7 + [0] * 4)
    flat, listed = hierarchical_bootstrap(rows, seeds), hierarchical_bootstrap([a, b])
    assert torch.equal(flat.low, listed.low)
    assert torch.equal(flat.per_seed, torch.tensor([1.5, 3.0]).double())
    assert float(flat.estimate) == 2.25  # seeds weigh the same whatever their size
    assert flat.n_examples == 11


def test_features_are_resampled_together():
    values = nested()
    stacked = np.stack([values, 1.0 - values], axis=-1)
    total = hierarchical_bootstrap(stacked, statistic=lambda m: m.sum(axis=-1))
    assert torch.allclose(total.low, torch.ones((), dtype=torch.float64))
    assert torch.allclose(total.high, torch.ones((), dtype=torch.float64))
    assert hierarchical_bootstrap(stacked).estimate.shape == (2,)


def test_draws_depend_on_the_seed_alone_and_leave_the_global_state():
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first, again, other = (hierarchical_bootstrap(nested(), seed=s) for s in (1, 1, 2))
    assert torch.equal(first.draws, again.draws)
    assert not torch.equal(first.draws, other.draws)
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])


def test_paired_difference_removes_what_the_conditions_share():
    values = nested(between=3.0)
    paired = paired_difference(values + 0.1, values)
    apart = contrast([values + 0.1, values], [1, -1])
    assert bool(paired.excludes(0.0))
    assert not bool(apart.excludes(0.0))
    with pytest.raises(ShapeError, match="same shapes"):
        paired_difference(values, values[:, 1:])


def test_contrast_of_two_groups_has_the_width_of_welchs_interval():
    from scipy import stats

    a, b = nested(5, seed=1), nested(4, between=3.0, seed=2)
    reference = stats.ttest_ind(a.mean(1), b.mean(1), equal_var=False).confidence_interval(0.95)
    found = contrast([a, b], [1, -1])
    assert float(found.high - found.low) == pytest.approx(reference.high - reference.low, rel=1e-6)
    assert found.n_seeds == 9


def test_ratio_of_means_weighs_pairs_by_their_gap():
    top, bottom = torch.tensor([0.9, 9.0, 0.5]), torch.tensor([1.0, 10.0, 0.001])
    found = ratio_of_means(top, bottom)
    assert float(found.estimate) == pytest.approx(10.4 / 11.001, rel=1e-6)
    assert float((top / bottom).mean()) > 100  # the mean of ratios that this replaces


def test_ratio_of_means_takes_a_grid_of_patches_against_one_gap():
    rng = np.random.default_rng(0)
    gap = rng.uniform(1, 2, size=(3, 50))
    share = np.linspace(0, 1, 6).reshape(2, 3)
    found = ratio_of_means(gap[..., None, None] * share, gap)
    assert found.estimate.shape == (2, 3)
    np.testing.assert_allclose(found.estimate.numpy(), share, atol=1e-12)
    np.testing.assert_allclose(found.high.numpy(), share, atol=1e-12)


def test_ratio_of_means_interval_covers_for_a_noisy_ratio():
    hits, rng = 0, np.random.default_rng(0)
    for i in range(400):
        gap = rng.gamma(4.0, 1.0, size=60)
        patched = 0.6 * gap + rng.standard_normal(60)
        found = ratio_of_means(patched, gap, n_draws=400, seed=i)
        hits += bool(found.low <= 0.6 <= found.high)
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hierarchical_bootstrap([]), "no examples"),
        (lambda: hierarchical_bootstrap([1.0, float("nan")]), "NaN"),
        (lambda: hierarchical_bootstrap([1.0]), "at least 2 examples, or 2 seeds"),
        (lambda: hierarchical_bootstrap([1.0, 2.0], level=95), "between 0 and 1"),
        (lambda: ratio_of_means([1.0, 2.0], [-1.0, 1.0]), "no gap"),
        (lambda: hierarchical_bootstrap([-0.2, -0.1], scale="logit"), "either sign"),
        (lambda: hierarchical_bootstrap([0.2, 0.1], scale="log"), "'linear', 'logit'"),
    ],
)
def test_impossible_requests_say_what_to_do(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_ragged_features_and_seed_lengths_are_refused():
    with pytest.raises(ShapeError, match="features"):
        hierarchical_bootstrap([np.zeros((3, 2)), np.zeros((3, 4))])
    with pytest.raises(ShapeError, match="seed of each row"):
        hierarchical_bootstrap(np.zeros(3), [0, 1])


def test_interval_round_trips_and_tabulates(tmp_path):
    found = hierarchical_bootstrap(np.stack([nested(), nested(seed=1)], axis=-1))
    back = Interval.load(found.save(tmp_path / "interval.safetensors"))
    assert torch.equal(back.draws, found.draws)
    assert list(found.to_dataframe()["estimate"]) == found.estimate.tolist()
    assert len(found.plot().data) == 1
    assert pl.stats.hierarchical_bootstrap is hierarchical_bootstrap


if __name__ == "__main__":  # prints the table of coverages in docs/api/numerics.md
    print("| seeds | examples | between | values | linear | logit | plain percentiles |")
    print("|---|---|---|---|---|---|---|")
    for n_seeds in (3, 4, 5, 6, 8):
        for name, n_examples, between, accuracy in [
            ("normal, sd 1", 100, 1.0, None),
            ("normal, sd 1", 100, 0.1, None),
            ("accuracy near 0.8", 200, 0.5, 0.8),
            ("accuracy near 0.95", 200, 0.5, 0.95),
            ("accuracy near 0.95, seeds far apart", 200, 1.0, 0.95),
            ("accuracy near 0.99, seeds far apart", 200, 1.0, 0.99),
            ("accuracy near 0.9, seeds very far apart", 200, 1.5, 0.9),
        ]:
            options = {"between": between, "accuracy": accuracy, "n_datasets": 2000}
            row = coverage(n_seeds, n_examples, **options)
            logit = coverage(n_seeds, n_examples, scale="logit", **options) if accuracy else None
            rates = f"{row['coverage']:.1%} | {logit['coverage']:.1%}" if logit else f"{row['coverage']:.1%} |"
            print(f"| {n_seeds} | {n_examples} | {between} | {name} | {rates} | {row['percentile']:.1%} |", flush=True)


def test_an_interval_holds_its_estimate_also_with_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        below = rng.normal(0.5, 1, 20)
        found = ratio_of_means(0.8 * below + 0.3 * rng.normal(size=20), below, n_draws=500)
        assert float(found.low) < float(found.estimate) < float(found.high)


def test_seeds_that_tie_have_the_width_of_their_examples() -> None:
    tied = hierarchical_bootstrap([[1.0] * 9 + [0.0], [0.0] + [1.0] * 9])
    assert float(tied.low) < 0.8
    assert float(tied.high) > 0.95
    seeds = [[1.0] * 9 + [0.0], [0.0] + [1.0] * 9] * 4
    few = hierarchical_bootstrap(seeds, n_draws=2)  # most seeds are drawn at most once
    assert 0.5 < float(few.low) < 0.9 < float(few.high)
    alike = hierarchical_bootstrap([[1.0] * 10, [1.0] * 10])
    assert (float(alike.low), float(alike.high)) == (1.0, 1.0), "nothing differs anywhere"
    assert coverage(2, 20, between=0, accuracy=0.9)["coverage"] > 0.9

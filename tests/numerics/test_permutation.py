"""Sign flips against SciPy, adjusted p values by hand and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probelens.errors import InputError
from probelens.numerics.permutation import SignFlip
from probelens.numerics.stats import holm, max_t, sign_flip, smallest_p


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("n", [4, 9])
def test_exact_sign_flip_equals_scipy(alternative, n):
    from scipy import stats

    x = np.random.default_rng(n).normal(0.4, 1.0, size=n)
    reference = stats.permutation_test(
        (x,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative=alternative
    )
    found = sign_flip(x, alternative=alternative)
    assert found.exact
    assert float(found.p) == pytest.approx(reference.pvalue, abs=1e-12)
    assert float(found.mean) == pytest.approx(x.mean())


def test_sampled_sign_flip_approaches_the_exact_one_and_counts_the_observed_pattern():
    x = np.random.default_rng(0).normal(0.5, 1.0, size=12)
    exact = sign_flip(x, n_permutations=4096)
    sampled = sign_flip(x, n_permutations=4000, seed=1)
    assert exact.exact
    assert not sampled.exact
    assert float(sampled.p) == pytest.approx(float(exact.p), abs=0.02)
    certain = sign_flip(np.ones(40), n_permutations=99)
    assert float(certain.p) == pytest.approx(0.01)
    assert certain.smallest_p == pytest.approx(0.01)


def test_four_seeds_cannot_be_significant_and_six_can():
    assert smallest_p(4) == 0.125
    assert float(sign_flip([1.0, 2.0, 3.0, 4.0]).p) == smallest_p(4)
    assert float(sign_flip([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).p) == smallest_p(6) < 0.05
    assert smallest_p(5, "greater") == 1 / 32


def test_ties_with_the_observed_pattern_count_despite_rounding():
    # 0.1 + 0.2 - 0.3 is not exactly zero: without slack, patterns equal in truth would be missed.
    assert float(sign_flip([0.1, 0.2, 0.3, 0.3]).p) == pytest.approx(0.125)
    assert float(sign_flip([0.0, 0.0, 0.0]).p) == 1.0


def test_columns_are_tested_as_if_alone():
    table = np.random.default_rng(0).normal(size=(7, 3, 2))
    together = sign_flip(table)
    assert together.p.shape == (3, 2)
    assert float(together.p[2, 1]) == float(sign_flip(table[:, 2, 1]).p)


def test_sign_flip_holds_its_level_under_the_null():
    rng = np.random.default_rng(0)
    p = sign_flip(rng.standard_normal((8, 2000))).p
    assert 0.03 <= float((p <= 0.05).double().mean()) <= 0.05 + 3 * (0.05 * 0.95 / 2000) ** 0.5


def test_holm_equals_the_rule_worked_by_hand():
    p = [0.01, 0.04, 0.03, 0.005]
    # sorted 0.005*4, 0.01*3, 0.03*2, 0.04*1, each at least the one before
    assert holm(p).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]).tolist() == [1.0, 1.0]
    assert holm(torch.tensor([[0.01], [0.5]])).shape == (2, 1)


def test_holm_lies_between_raw_and_bonferroni():
    p = np.random.default_rng(0).uniform(size=50)
    adjusted = holm(p).numpy()
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(50 * p, 1)).all()
    order = np.argsort(p)
    assert (np.diff(adjusted[order]) >= 0).all()


def test_max_t_of_one_test_is_its_sign_flip():
    x = np.random.default_rng(0).normal(0.5, 1.0, size=9)
    assert float(max_t(x[:, None])[0]) == pytest.approx(float(sign_flip(x).p))


def test_max_t_equals_the_step_down_rule_worked_pattern_by_pattern():
    table = np.random.default_rng(2).normal([1.5, 0.0, 0.7], 1.0, size=(6, 3))
    signs = np.array([[1 - 2 * ((i >> j) & 1) for j in range(6)] for i in range(64)])

    def t(x):
        return abs(x.mean(0)) / (x.std(0, ddof=1) / np.sqrt(len(x)))

    observed = t(table)
    order = np.argsort(-observed)
    scores = np.array([t(table * s[:, None]) for s in signs])
    p, floor = {}, 0.0
    for rank, j in enumerate(order):
        left = order[rank:]
        floor = max(floor, np.mean(scores[:, left].max(1) >= observed[j] - 1e-9))
        p[j] = floor
    assert max_t(table).tolist() == pytest.approx([p[0], p[1], p[2]])


def test_max_t_controls_false_rejections_and_gains_on_holm_when_tests_are_correlated():
    rng, false, power = np.random.default_rng(0), 0, [0, 0]
    for _ in range(200):
        shared = rng.standard_normal((8, 1))
        table = shared + 0.3 * rng.standard_normal((8, 20))
        false += bool((max_t(table) <= 0.05).any())
        power[0] += int((max_t(table + 1.2) <= 0.05).sum())
        power[1] += int((holm(sign_flip(table + 1.2).p) <= 0.05).sum())
    assert false / 200 <= 0.05 + 2.5 * (0.05 * 0.95 / 200) ** 0.5
    assert power[0] > power[1] + 200


def test_bad_differences_and_p_values_are_refused():
    for bad in ([1.0], [1.0, float("nan")]):
        with pytest.raises(InputError, match="differences"):
            sign_flip(bad)
    with pytest.raises(InputError, match="between 0 and 1"):
        holm([0.1, float("nan")])
    with pytest.raises(InputError, match="two-sided"):
        sign_flip([1.0, 2.0], alternative="both")


def test_result_round_trips(tmp_path):
    found = sign_flip(np.random.default_rng(0).normal(size=(5, 3)))
    back = SignFlip.load(found.save(tmp_path / "flip.safetensors"))
    assert torch.equal(back.p, found.p)
    assert len(found.to_dataframe()) == 3

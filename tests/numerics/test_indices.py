"""Planted profiles must get their word, and only that one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.numerics.indices import (
    STATISTICS,
    ProfileIndices,
    profile_indices,
    profile_statistics,
    reversal,
    verdict,
)
from probelens.numerics.stats import hierarchical_bootstrap

N = 8
STEP_LAST = [0.5] * N + [1.0]
STEP_FIRST = [0.5] + [1.0] * N
RAMP = list(np.linspace(0.5, 1.0, N + 1))
FLAT = [0.5] * (N + 1)


def sample(profile, n_seeds=4, n_sequences=100, positions=20, seed=0, jitter=0.0):
    """Per-sequence accuracies drawn around a profile, the layers of a sequence independent."""
    rng = np.random.default_rng(seed)
    centre = np.asarray(profile) + jitter * rng.standard_normal((n_seeds, 1, len(profile)))
    right = np.clip(centre, 0, 1) * np.ones((1, n_sequences, 1))
    return rng.binomial(positions, right) / positions


@pytest.mark.parametrize(
    ("profile", "word"), [(STEP_LAST, "late"), (STEP_FIRST, "immediate"), (RAMP, "gradual"), (FLAT, "not learned")]
)
def test_planted_profiles_get_their_word(profile, word):
    found = profile_indices(sample(profile), 0.5, solved=1.0)
    assert found.verdict == word, found.reason
    assert set(found.per_seed) == {word}


def test_noise_over_seeds_is_undetermined_although_every_seed_has_a_word():
    # Each seed jumps at its own layer: no statement about the architecture holds.
    jumps = [[0.5] * k + [1.0] * (N + 1 - k) for k in (1, 3, 6, N)]
    found = profile_indices([sample(p, 1)[0] for p in jumps], 0.5, solved=1.0)
    assert found.verdict == "undetermined"
    assert found.per_seed[0] == "immediate"
    assert found.per_seed[-1] == "late"
    # Averaged accuracies would look like a ramp: the word that the per-seed statistics avoid.
    mean = profile_statistics(np.mean(jumps, axis=0), 0.5)
    assert verdict(*2 * ({k: float(v) for k, v in mean.items()},))[0] == "gradual"


def test_noisy_profiles_are_undetermined_where_clean_ones_are_late():
    late = [0.5] * (N - 1) + [0.72, 1.0]
    assert profile_indices(sample(late), 0.5).verdict == "late"
    noisy = sample(late, n_sequences=6, positions=2, jitter=0.08)
    assert profile_indices(noisy, 0.5).verdict == "undetermined"


def test_statistics_equal_the_formulas_written_out():
    acc = np.array([0.5, 0.55, 0.7, 0.65, 0.9])
    r = np.clip((acc - 0.5) / 0.5, 0, None)
    big = [max(r[: i + 1]) for i in range(5)]
    g = [big[i + 1] - big[i] for i in range(4)]
    p = [x / sum(g) for x in g]
    found = profile_statistics(acc, 0.5)
    assert float(found["com"]) == pytest.approx(sum(i * x for i, x in enumerate(p)) / 3)
    assert float(found["concentration"]) == pytest.approx((4 * sum(x * x for x in p) - 1) / 3)
    assert float(found["final_share"]) == pytest.approx(p[3])
    assert float(found["early_share"]) == pytest.approx(big[1] / big[4])  # n = 4: the first block
    assert float(found["l95"]) == 3


@pytest.mark.parametrize(("n", "first_quarter"), [(2, 0), (4, 0), (5, 1), (8, 1), (12, 2), (24, 5)])
def test_early_share_is_read_at_the_end_of_the_first_quarter(n, first_quarter):
    before = np.full(n + 1, 0.5)
    before[first_quarter + 2 :] = 1.0  # readable one block too late
    at = np.full(n + 1, 0.5)
    at[first_quarter + 1 :] = 1.0
    assert float(profile_statistics(at, 0.5)["early_share"]) == 1.0
    assert float(profile_statistics(before, 0.5)["early_share"]) == 0.0


def test_extremes_of_concentration_and_centre_of_mass():
    ramp, last = profile_statistics(RAMP, 0.5), profile_statistics(STEP_LAST, 0.5)
    assert float(ramp["concentration"]) == pytest.approx(0.0)
    assert float(ramp["com"]) == pytest.approx(0.5)
    assert float(last["concentration"]) == pytest.approx(1.0)
    assert float(profile_statistics(STEP_FIRST, 0.5)["com"]) == pytest.approx(0.0)


def test_a_dip_does_not_count_as_forgetting_and_below_baseline_counts_as_zero():
    dipped = profile_statistics([0.5, 0.3, 0.9, 0.6, 0.9], 0.5)
    plain = profile_statistics([0.5, 0.5, 0.9, 0.9, 0.9], 0.5)
    assert {k: float(v) for k, v in dipped.items()} == {k: float(v) for k, v in plain.items()}


def test_a_variable_already_in_the_embedding_is_immediate_and_has_no_centre():
    found = profile_statistics([1.0] * 5, 0.5)
    assert found["com"].isnan()
    assert float(found["l95"]) == -1
    assert profile_indices(sample([1.0] * 5), 0.5).verdict == "immediate"
    # Nearly all in the embedding, the small rest added by the last block: not late.
    almost = profile_indices(sample([0.97, 0.97, 0.97, 0.97, 0.999], positions=200), 0.5)
    assert float(almost.statistics.estimate[STATISTICS.index("final_share")]) > 0.5
    assert almost.verdict == "immediate"


def test_unsolved_seeds_are_left_out_and_said_so():
    rows = np.concatenate([sample(STEP_LAST, 3), sample(STEP_FIRST, 1)])
    found = profile_indices(rows, 0.5, solved=[0.99, 1.0, 0.96, 0.90])
    assert found.learned == (True, True, True, False)
    assert found.verdict == "late"
    assert "3 of 4 seeds" in found.reason
    assert found.per_seed[3] == "not learned"
    nobody = profile_indices(rows, 0.5, solved=0.9)
    assert nobody.verdict == "not learned"
    assert nobody.statistics is None
    assert "0.900" in nobody.reason


def test_weak_readability_is_not_learned_and_the_threshold_is_at_a_fifth():
    def word(top):
        return profile_indices(sample([0.5] * N + [top], n_sequences=2000), 0.5).verdict

    assert word(0.58) == "not learned"
    assert word(0.62) == "late"


def test_each_seed_is_scaled_by_its_own_baseline():
    rows = np.stack([sample(STEP_LAST, 1)[0], sample([0.2] * N + [1.0], 1)[0]])
    found = profile_indices(rows, [0.5, 0.2])
    assert found.readability.shape == (N + 1,)
    assert float(found.readability[0]) < 0.02
    assert profile_indices(rows, 0.2).readability[0] > 0.15


def test_reversal_is_above_zero_only_when_the_order_swaps():
    late, early = sample(STEP_LAST, seed=1), sample(STEP_FIRST, seed=2)
    swapped = reversal(late, early, early, late, [0.5] * 4)
    assert float(swapped.low) > 0
    assert float(swapped.estimate) == pytest.approx(2.0, abs=0.1)
    same = reversal(late, early, late, early, [0.5] * 4)
    assert float(same.low) <= 0 <= float(same.high)
    back = reversal(early, late, late, early, [0.5] * 4)
    assert float(back.high) < 0
    with pytest.raises(InputError, match="did not learn"):
        reversal(late, early, np.full_like(early, 0.5), late, [0.5] * 4)


def test_batches_of_profiles_are_computed_at_once():
    table = np.stack([STEP_LAST, RAMP])[:, None].repeat(3, 1)
    found = profile_statistics(torch.from_numpy(table), torch.tensor([[0.5], [0.5]]))
    assert found["com"].shape == (2, 3)
    assert found["com"][:, 0].tolist() == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    ("accuracy", "baseline", "error"),
    [([0.5, 1.0], 0.5, ShapeError), ([0.5, 0.7, 1.2], 0.5, InputError), ([0.5, 0.7, 1.0], 1.0, InputError)],
)
def test_impossible_accuracies_are_refused(accuracy, baseline, error):
    with pytest.raises(error):
        profile_statistics(accuracy, baseline)


def test_result_round_trips_also_without_a_profile(tmp_path):
    for profile in (RAMP, FLAT):
        found = profile_indices(sample(profile), 0.5)
        back = ProfileIndices.load(found.save(tmp_path / "profile.safetensors"))
        assert back.verdict == found.verdict
        assert back.learned == found.learned
        assert (back.statistics is None) == (found.statistics is None)
        assert (back.to_dataframe()["verdict"] == found.verdict).all()
        assert len(found.plot().data) == 2


def test_shares_and_their_intervals_stay_between_zero_and_one() -> None:
    """Four seeds that jump at the last block or shortly before: Student's interval of their final share leaves 1."""
    late, early = [0.5, 0.5, 0.5, 0.5, 1.0], [0.5, 0.5, 0.5, 0.75, 1.0]
    soon, sooner = [0.5, 1.0, 1.0, 1.0, 1.0], [0.5, 0.9, 1.0, 1.0, 1.0]
    unlike = [0.98, 0.98, 0.98, 0.98, 1.0]
    for profiles in ([late, early, late, late], [soon, sooner, soon], [late, soon], [unlike, soon, late]):
        found = profile_indices([[p] * 8 for p in profiles], baseline=0.5).statistics
        assert found is not None
        low, high = torch.zeros(5), torch.ones(5)
        low[4], high[4] = -1, 3
        for ends in (found.low, found.high, found.draws):
            assert bool(((ends >= low) & (ends <= high)).all()), profiles
    # The control: the same seeds' final share with nothing cut off.
    shares = [[float(profile_statistics(p, 0.5)["final_share"])] for p in (late, early, late, late)]
    assert float(hierarchical_bootstrap(shares).high) > 1

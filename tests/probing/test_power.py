"""The power of a refit check: a residue of known size, read where there are enough sequences and not where there aren't."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor

from probelens.probing.power import RESIDUE, _codes, plant, residue_power
from probelens.probing.refit import refit_check
from probelens.probing.splits import split_by_group

D, POS = 16, 12


def noise(n: int, seed: int = 0, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Activations that tell nothing of a label, the label, and a mask of ones."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n, POS), generator=gen)
    return torch.randn(n, POS, D, generator=gen), y, torch.ones(n, POS, dtype=torch.bool)


def test_the_product_of_three_signs_tells_the_bit_and_less_than_three_tell_nothing() -> None:
    gen = torch.Generator().manual_seed(0)
    x, bit = torch.randn(6000, 5, generator=gen).double(), torch.randint(2, (6000, 1), generator=gen)
    moved = (plant(x, bit, seed=3) - x) / x.std(0, correction=0) / RESIDUE
    _, size, axes = torch.linalg.svd(moved, full_matrices=False)
    assert torch.linalg.matrix_rank(moved) == 3
    # Independent of the code: every orthonormal basis of the residue's own span holds its signs turned.
    np.testing.assert_allclose((size[:3] / 6000**0.5).numpy(), 1.0, atol=0.05)
    shown = (moved @ axes[:3].T).numpy()
    y = bit[:, 0].numpy()
    for degree, reads in ((1, False), (2, False), (3, True)):
        features = PolynomialFeatures(degree).fit_transform(shown)
        found = LogisticRegression(C=100, max_iter=2000).fit(features[:4000], y[:4000]).score(features[4000:], y[4000:])
        assert (found > 0.99) if reads else (found < 0.55), degree


def test_the_size_is_in_standard_deviations_of_each_feature() -> None:
    gen = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, 8, dtype=torch.float64)
    x, bit = torch.randn(4000, 8, generator=gen).double(), torch.randint(2, (4000, 1), generator=gen)
    torch.testing.assert_close(plant(x * scale, bit) / scale, plant(x, bit))


@pytest.mark.parametrize("k", [2, 5])
def test_too_few_sequences_are_said_to_be_underpowered_and_the_number_named_is_enough(k: int) -> None:
    few, y, mask = noise(150, k=k, seed=3)
    row, _ = refit_check(few, few, y, mask, torch.arange(150))
    assert not row["readable_after"]
    assert row["powered"] is False
    assert row["residue_accuracy"] < row["baseline"] + 0.1
    assert 300 <= row["n_needed"] <= 2400
    assert row["residue_size"] in (None, 2.0, 3.0)
    many, y, mask = noise(row["n_needed"], k=k, seed=4)
    row, _ = refit_check(many, many, y, mask, torch.arange(len(y)))
    assert (row["powered"], row["n_needed"]) == (True, len(y))
    # A residue that somebody else left is then read too.
    assert row["residue_size"] == RESIDUE
    real = plant(many.flatten(0, 1), y.reshape(-1, 1) % 2, seed=77).view_as(many)
    assert refit_check(real, real, y, mask, torch.arange(len(y)))[0]["readable_after"]


def test_where_the_label_is_read_its_power_is_no_question() -> None:
    x, y, mask = noise(60)
    x[..., 0] += 3 * y
    row, _ = refit_check(x, x, y, mask, torch.arange(60), mlp=False)
    assert row["readable_after"]
    assert [row[name] for name in ("powered", "residue_accuracy", "n_needed")] == [None, None, None]


def test_where_the_residue_is_too_small_the_size_that_would_be_read_is_named() -> None:
    x, y, mask = noise(200, seed=5)
    found = residue_power(x, y, mask, split_by_group(torch.arange(200)), 0.52)
    assert (found.powered, found.size) == (False, 2.0)
    parts = [plant(x.flatten(0, 1), y.reshape(-1, 1), size=size, seed=8).view_as(x) for size in (RESIDUE, 2.0)]
    small, large = (refit_check(left, left, y, mask, torch.arange(200), power=False)[0] for left in parts)
    assert large["refit_mlp_accuracy"] > small["refit_mlp_accuracy"] + 0.1


def test_nothing_is_tried_where_the_bar_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probelens.probing.power.MLPProbe", None)  # trying would fail
    x, y, mask = noise(60)
    found = residue_power(x, y, mask, split_by_group(torch.arange(60)), 0.98)
    assert (found.powered, found.accuracy, found.n_needed, found.size) == (False, None, None, None)


def test_where_nothing_varies_a_residue_is_planted_all_the_same() -> None:
    x, y, mask = noise(60)
    assert residue_power(torch.ones_like(x), y, mask, split_by_group(torch.arange(60)), 0.52).powered


def test_linear_probes_alone_are_asked_for_a_linear_residue_and_the_activations_stay_as_they_are() -> None:
    x, y, mask = noise(60)
    x = x.double()
    before, split = x.clone(), split_by_group(torch.arange(60))
    found = residue_power(x, y, mask, split, 0.52, mlp=False)
    assert found.powered
    assert found.accuracy == pytest.approx(0.919, abs=0.03)  # Φ(1.4): signs of size 1.4 beside noise of size 1
    assert not residue_power(x, y, mask, split, 0.52).powered
    assert torch.equal(x, before)


def test_classes_are_halved_evenly_and_more_bits_are_taken_where_one_does_not_show() -> None:
    def parts(y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(len(y), 1), y)] * 3

    even = torch.arange(8).repeat(10)
    codes, best = _codes(parts(even), 1 / 8 + 0.02)
    assert codes.shape == (8, 1)
    assert codes.sum() == 4
    assert best == pytest.approx(2 / 8)
    codes, best = _codes(parts(even), 0.4)  # what the position tells, say: one bit alone lifts a guess to 1/4 only
    assert codes.shape == (8, 2)
    assert best == pytest.approx(4 / 8)
    codes, best = _codes(parts(torch.tensor([0] * 98 + [1] * 2)), 0.985)
    assert (codes.shape, best) == ((2, 1), 1.0)


def test_masked_rows_have_no_part_in_it() -> None:
    x, y, mask = noise(80)
    mask[::2, 6:] = False
    junk = torch.where(mask[..., None], x, torch.full_like(x, 1e6))
    split = split_by_group(torch.arange(80))
    for mlp in (False, True):
        one, two = (
            residue_power(a, b, mask, split, 0.52, mlp=mlp) for a, b in ((x, y), (junk, y.where(mask, torch.tensor(0))))
        )
        assert one == two

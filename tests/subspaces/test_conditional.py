"""LEACE given another label: what is left within strata, against covariances and class means computed in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.numerics.association import association, strata_of
from probelens.subspaces.leace import ConditionalLeaceFitter, leace

D = 9


def labelled(n: int = 4000, k: int = 2, strata: int = 2, agree: float = 0.8, seed: int = 0) -> tuple[Tensor, ...]:
    """Activations to which y and z each add their class means, z mostly following y, with correlated noise."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(strata, (n,), generator=gen)
    z = torch.where(torch.rand(n, generator=gen) < agree, y % k, torch.randint(k, (n,), generator=gen))
    mix = torch.randn(D, D, generator=gen, dtype=torch.float64)
    means = torch.randn(strata, D, generator=gen).double(), torch.randn(k, D, generator=gen).double()
    return torch.randn(n, D, generator=gen).double() @ mix + 2 * means[0][y] + 2 * means[1][z] + 5.0, y, z


def within(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x less the mean of its stratum."""
    out = x.astype(float).copy()
    for stratum in np.unique(y):
        out[y == stratum] -= out[y == stratum].mean(0)
    return out


def spread(x: Tensor, z: Tensor, rows: Tensor) -> float:
    """Largest distance between class means among some rows, in standard deviations."""
    means = torch.stack([x[rows & (z == c)].mean(0) for c in z[rows].unique()])
    return float(((means - means.mean(0)).abs() / x.std(0)).max())


def test_two_classes_are_the_partial_covariance_of_numpy() -> None:
    x, y, z = labelled()
    rows, label = within(x.numpy(), y.numpy()), within(z.numpy()[:, None], y.numpy())[:, 0]
    reads = np.linalg.solve(rows.T @ rows, rows.T @ label)
    writes = rows.T @ label
    moved = (x.numpy() - x.numpy().mean(0)) @ reads[:, None] @ (writes / (writes @ reads))[None]
    np.testing.assert_allclose(leace(x, z, given=y)(x).numpy(), x.numpy() - moved, atol=1e-9)


@pytest.mark.parametrize(("k", "strata"), [(2, 2), (3, 4), (5, 3)])
def test_covariance_within_strata_is_zero_and_class_means_agree_in_each_of_them(k: int, strata: int) -> None:
    x, y, z = labelled(n=40_000, k=k, strata=strata)
    eraser = leace(x, z, given=y)
    assert eraser.rank == k - 1
    after = eraser(x)
    one_hot = np.eye(k)[z.numpy()]
    left = within(after.numpy(), y.numpy()).T @ within(one_hot, y.numpy()) / len(x)
    assert np.abs(left).max() < 1e-9
    assert np.abs(within(x.numpy(), y.numpy()).T @ within(one_hot, y.numpy()) / len(x)).max() > 0.1
    for stratum in range(strata):
        rows = y == stratum
        assert spread(x, z, rows) > 0.3
        assert spread(after, z, rows) < 0.15  # the rows of rare classes are few
    torch.testing.assert_close(after.mean(0), x.mean(0))
    torch.testing.assert_close(eraser(after), after)


def test_the_given_label_stays_readable_and_unconditional_erasure_takes_it_too() -> None:
    x, y, z = labelled(n=20_000, agree=0.9)
    every = torch.ones_like(y, dtype=torch.bool)
    kept, lost = spread(leace(x, z, given=y)(x), y, every), spread(leace(x, z)(x), y, every)
    assert kept > 3 * lost


def test_what_a_model_reads_at_the_label_itself_does_not_live_on_as_a_prediction_from_the_given_one() -> None:
    """The total covariance would leave in z's place what y predicts of it, and a reader of z would hardly notice."""
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(2, (20_000,), generator=gen)
    z = torch.where(torch.rand(20_000, generator=gen) < 0.9, y, 1 - y)
    x = torch.stack([2.0 * y - 1, 2.0 * z - 1], 1).double() + 0.1 * torch.randn(20_000, 2, generator=gen).double()

    total = torch.linalg.solve(torch.cov(x.T), torch.tensor([0.0, 1.0]).double())
    rival = x - (x - x.mean(0)) @ total[:, None] @ torch.tensor([[0.0, 1.0]]).double() / total[1]
    assert abs(float(torch.cov(torch.stack([rival[:, 1], z.double()]))[0, 1])) > 0.1
    ours = leace(x, z, given=y)(x)
    assert float(ours[:, 1].std()) < 0.1
    assert float(rival[:, 1].std()) > 0.7
    for after in (ours, rival):  # both guard z within strata
        for stratum in (0, 1):
            assert spread(after, z, y == stratum) < 0.1


def test_streaming_is_the_same_also_when_strata_and_classes_come_late() -> None:
    x, y, z = labelled(k=4, strata=3)
    order = (3 * y + z).argsort()
    x, y, z = x[order], y[order], z[order]
    streamed = ConditionalLeaceFitter()
    for part in torch.arange(len(x)).split(370):
        streamed.update(x[part], z[part], y[part])
    torch.testing.assert_close(streamed.eraser(x), leace(x, z, given=y)(x), rtol=1e-8, atol=1e-8)
    assert (streamed.n, streamed.n_strata) == (len(x), 3)
    # One stratum is no condition.
    torch.testing.assert_close(leace(x, z, given=y * 0)(x), leace(x, z)(x))
    numbers = x[:, 0] + y
    found = leace(x, numbers, given=y)(x)
    assert (
        np.abs(within(found.numpy(), y.numpy()).T @ within(numbers.numpy()[:, None], y.numpy())).max() / len(x) < 1e-9
    )


def test_errors_of_conditional_erasers() -> None:
    x, y, z = labelled(n=100)
    with pytest.raises(InputError, match="constant within each of the 2 strata"):
        leace(x, y, given=y)
    with pytest.raises(InputError, match="integer ids"):
        leace(x, z, given=y.double())
    with pytest.raises(InputError, match="no rows yet"):
        ConditionalLeaceFitter().eraser  # noqa: B018
    with pytest.raises(ShapeError, match="labels"):
        leace(x, z, given=y[1:])


# -- the association of labels -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 6])
def test_the_association_is_the_adjusted_mutual_information_of_scikit_learn(k: int) -> None:
    from sklearn.metrics import adjusted_mutual_info_score

    gen = torch.Generator().manual_seed(0)
    y = torch.randint(k, (60, 12), generator=gen)
    mask = torch.rand(60, 12, generator=gen) < 0.8
    for agree in (0.3, 0.9):
        z = torch.where(torch.rand(60, 12, generator=gen) < agree, y % 3, torch.randint(3, (60, 12), generator=gen))
        want = adjusted_mutual_info_score(y[mask].numpy(), z[mask].numpy(), average_method="min")
        assert association(y, z, mask) == pytest.approx(want, abs=0.02)
        assert association(y, z, mask) == pytest.approx(association(z, y, mask), abs=0.02)


def test_few_sequences_of_labels_that_stay_long_do_not_make_an_association() -> None:
    """Labels of a random walk agree for long by chance: what single rows would call significant is within the null."""
    gen = torch.Generator().manual_seed(0)
    steps = (torch.rand(2, 15, 8, 40, generator=gen) < 0.05).long().cumsum(-1) % 2
    mask = torch.ones(8, 40, dtype=torch.bool)
    found = [association(a, b, mask, seed=i) for i, (a, b) in enumerate(zip(steps[0], steps[1], strict=True))]
    assert sum(value > 0.05 for value in found) <= 3
    assert association(steps[0, 0], steps[0, 0], mask) == 1.0
    assert association(steps[0, 0], steps[0, 0] * 0, mask) == 0.0
    with pytest.raises(ShapeError):
        association(steps[0, 0], steps[0, 0, :4], mask)


def test_strata_are_the_combinations() -> None:
    a, b = torch.tensor([[0, 0, 3, 3]]), torch.tensor([[1, 2, 1, 1]])
    assert strata_of([a, b]).tolist() == [[0, 1, 2, 2]]
    assert isinstance(
        pl.leace(torch.randn(8, 2), torch.tensor([0, 1] * 4), given=torch.zeros(8).long()), pl.subspaces.Eraser
    )

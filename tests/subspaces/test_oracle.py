"""Erasers that know the label: what their theorems say, and agreement with the package concept-erasure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.examples import planted
from probelens.examples.planted import SITE
from probelens.subspaces import QuadraticFitter, leace, oracle, quadratic

D = 8


def classes(n: int = 3000, k: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes of unequal frequency, with means and covariances of their own."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.arange(1.0, k + 1), n, replacement=True, generator=gen)
    mix = torch.randn(k, D, D, generator=gen).double()
    means = 2 * torch.randn(k, D, generator=gen).double()
    x = torch.einsum("nd,nde->ne", torch.randn(n, D, generator=gen).double(), mix[y]) + means[y] + 3
    return x, y


def means(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x[y == c].mean(0) for c in y.unique()])


def covariances(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([torch.cov(x[y == c].mT) for c in y.unique()])


@pytest.mark.parametrize("k", [2, 3, 6])
def test_oracle_agrees_with_concept_erasure_and_moves_less_than_leace(k: int) -> None:
    from concept_erasure import OracleEraser as Reference

    x, y = classes(k=k)
    z = torch.nn.functional.one_hot(y, k).double()
    ours = oracle(x, y)
    torch.testing.assert_close(ours(x, y), Reference.fit(x, z, svd_tol=1e-12)(x, z), rtol=1e-9, atol=1e-9)
    after = ours(x, y)
    assert float((means(after, y) - after.mean(0)).abs().max()) < 1e-9
    assert float((means(x, y) - x.mean(0)).abs().max()) > 0.5
    moved, blind = ((new - x).square().sum(1).mean() for new in (after, leace(x, y)(x)))
    assert moved < blind
    assert ours.moved == pytest.approx(float(moved))
    assert len(ours.directions) == k - 1
    torch.testing.assert_close(after.mean(0), x.mean(0))


@pytest.mark.parametrize("k", [2, 3, 6])
def test_quadratic_agrees_with_concept_erasure(k: int) -> None:
    from concept_erasure import QuadraticEraser as Reference

    x, y = classes(k=k)
    theirs = Reference.fit(x, y, shrinkage=False)
    # The package puts the mean of the class means where the paper has the mean of x.
    want = theirs(x, y) - theirs.global_mean + x.mean(0)
    scale = float(x.std())
    assert float((quadratic(x, y)(x, y) - want).abs().max()) / scale < 1e-4


@pytest.mark.parametrize("k", [2, 3, 5])
def test_after_a_quadratic_eraser_classes_have_one_mean_and_covariance_and_discriminants_are_at_chance(k: int) -> None:
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis

    x, y = classes(k=k)
    eraser = quadratic(x, y)
    after, linear = eraser(x, y), oracle(x, y)(x, y)
    assert float((means(after, y) - x.mean(0)).abs().max()) < 1e-9
    found = covariances(after, y)
    assert float((found - found[0]).norm() / found[0].norm()) < 1e-6
    assert float(torch.linalg.eigvalsh(eraser.maps).min()) > 0
    found = covariances(linear, y)
    assert float((found - found[0]).norm() / found[0].norm()) > 0.3
    # A discriminant that knows the covariances reads what is left of a linear erasure, and nothing here.
    share = float((y == y.mode().values).double().mean())

    def read(rows: Tensor) -> float:
        return QuadraticDiscriminantAnalysis().fit(rows.numpy(), y.numpy()).score(rows.numpy(), y.numpy())

    assert read(linear) > share + 0.2
    assert read(after) == pytest.approx(share, abs=1e-3)
    moved = float((after - x).square().sum(1).mean())
    assert eraser.moved == pytest.approx(moved, rel=1e-2)


def test_the_barycenter_costs_less_than_any_other_common_covariance() -> None:
    """Each class carried to another covariance by its own optimal transport moves further on the whole."""
    import scipy.linalg

    x, y = classes(k=3)
    shares = torch.bincount(y).double() / len(y)
    found = covariances(x, y).numpy()
    bary = covariances(quadratic(x, y)(x, y), y)[0].numpy()

    def cost(to: np.ndarray) -> float:
        total = 0.0
        for share, sigma in zip(shares.tolist(), found, strict=True):
            root = scipy.linalg.sqrtm(sigma)
            total += share * float(np.trace(sigma + to - 2 * np.real(scipy.linalg.sqrtm(root @ to @ root))))
        return total

    gen = np.random.default_rng(0)
    for _ in range(5):
        shake = np.eye(D) + 0.05 * gen.normal(size=(D, D))
        assert cost(bary) < cost(shake @ bary @ shake.T)
    assert cost(bary) < cost(np.average(found, 0, shares.numpy()))


def test_streaming_masks_ids_and_dtypes() -> None:
    x, y = classes()
    ids = torch.tensor([4, 70_000, 9])[y]
    streamed = QuadraticFitter()
    for part in torch.arange(len(x)).split(411):
        streamed.update(x[part], ids[part])
    torch.testing.assert_close(streamed.eraser(x, ids), quadratic(x, y)(x, y), rtol=1e-7, atol=1e-7)
    mask = torch.rand(len(x), generator=torch.Generator().manual_seed(0)) < 0.7
    for fit in (oracle, quadratic):
        eraser = fit(x, ids, mask)
        torch.testing.assert_close(eraser(x[mask], ids[mask]), fit(x[mask], ids[mask])(x[mask], ids[mask]))
        kept = eraser(x, ids.where(mask, -100), mask)
        assert torch.equal(kept[~mask], x[~mask])
        torch.testing.assert_close(kept[mask], eraser(x[mask], ids[mask]))
        shaped = x.float().view(30, 100, D)
        assert eraser(shaped, ids.view(30, 100)).dtype == torch.float32
    numbers = x[:, :2] + 0.1
    left = oracle(x, numbers)(x, numbers)
    assert float((left.mT @ (numbers - numbers.mean(0))).abs().max() / len(x)) < 1e-9


def test_oracle_given_another_label_leaves_no_covariance_within_strata() -> None:
    x, y = classes(n=6000, k=4)
    given, z = y // 2, y % 2
    after = oracle(x, z, given=given)(x, z)
    for_all = torch.cat([after[given == s] - after[given == s].mean(0) for s in (0, 1)])
    label = torch.cat([z[given == s].double() - z[given == s].double().mean() for s in (0, 1)])
    assert float((for_all.mT @ label).abs().max()) / len(x) < 1e-9


def test_erase_takes_the_labels_of_the_held_batch(tmp_path) -> None:
    made = planted.unused()
    kw = {"label": "y", "sites": SITE, "controls": 3, "mlp": False}
    x, y = made.acts(made.held), made.held.labels["y"]
    for method, fit in (("oracle", oracle), ("quadratic", quadratic)):
        got = pl.erase(made.model, made.fit, made.held, method=method, **kw)
        row, erased = got.rows[0], fit(made.acts(made.fit), made.fit.labels["y"])(x, y)
        # Independent: the model run by hand on activations that the eraser changed.
        with made.model.hooks([(SITE, lambda t, hook, new=erased: new)]):
            by_hand = (made.model(made.held.tokens).argmax(-1) == y).double().mean()
        assert row["value"] == pytest.approx(float(by_hand), abs=1e-6)
        assert row["verdict"] == "erased"
        assert (row["control_problem"] is None) == (method == "oracle")
        back = pl.ErasureResult.load(got.save(tmp_path / f"{method}.safetensors"))
        torch.testing.assert_close(back.subspaces[SITE](x, y), erased, rtol=1e-6, atol=1e-6)
        assert not made.model.has_hooks()


def test_where_labels_cannot_be_had_an_eraser_that_needs_them_says_why() -> None:
    spare = planted.spare()
    x, y = spare.acts(spare.fit), spare.fit.labels["y"]
    for eraser in (oracle(x, y), quadratic(x, y)):
        with pytest.raises(InputError, match="needs the labels"):
            eraser(x)
        with (
            pytest.raises(InputError, match="hook on other inputs or while generating"),
            spare.model.hooks([(SITE, pl.edits.erase(eraser))]),
        ):
            spare.model(spare.held.tokens)
        assert not spare.model.has_hooks()
        with pytest.raises(InputError, match="Give a Subspace or an Eraser"):
            pl.dose_response(spare.model, spare.held, {SITE: eraser}, label="y")
        with pytest.raises(ShapeError, match="just these activations"):
            eraser(x, y[:, 1:])
        with pytest.raises(ShapeError, match="width"):
            eraser(x[..., 1:], y)
        with pytest.raises(InputError, match="not among the 2 classes"):
            eraser(x, y + 5)
    with pytest.raises(InputError, match="no quadratic eraser within strata"):
        pl.erase(spare.model, spare.fit, spare.held, label="y", method="quadratic", given="y")
    few, label = classes(n=9)
    with pytest.raises(InputError, match="too few for its covariance"):
        quadratic(few, label)
    with pytest.raises(InputError, match="class ids"):
        quadratic(few, label.double())
    with pytest.raises(InputError, match="at least 2"):
        quadratic(few, label * 0)
    with pytest.raises(InputError, match="one class only"):
        oracle(few, label * 0)

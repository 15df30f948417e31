"""LEACE: what its theorem says, on every kind of data, and agreement with concept-erasure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probelens as pl
from probelens.errors import InputError, ShapeError, StoreError
from probelens.numerics.linalg import whitening
from probelens.subspaces.leace import Eraser, LeaceFitter, leace


def planted(n=3000, d=20, n_classes=3, seed=0, strength=2.0):
    """Correlated features of very different scale, with class means in generic directions."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(n_classes, (n,), generator=gen)
    mix = torch.randn(d, d, generator=gen, dtype=torch.float64) * torch.logspace(1, -1, d, dtype=torch.float64)
    means = strength * torch.randn(n_classes, d, generator=gen, dtype=torch.float64)
    return (torch.randn(n, d, generator=gen, dtype=torch.float64) + means[y]) @ mix + 3.0, y


def class_means(x, y):
    return torch.stack([x[y == c].mean(0) for c in y.unique()])


def spread(x, y):
    """Largest distance between class means, in standard deviations of each feature."""
    means = class_means(x, y)
    return float(((means - means.mean(0)).abs() / x.std(0)).max())


def sklearn_accuracy(x, y, seed=0):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x = torch.as_tensor(StandardScaler().fit_transform(x))
    half = len(x) // 2
    probe = LogisticRegression(max_iter=500).fit(x[:half], y[:half])
    return probe.score(x[half:], y[half:])


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_class_means_are_equal_after_and_were_not_before(n_classes):
    x, y = planted(n_classes=n_classes)
    assert spread(x, y) > 0.1
    eraser = leace(x, y)
    assert spread(eraser(x), y) < 1e-9
    assert eraser.rank == n_classes - 1


def test_a_linear_probe_falls_to_chance_from_near_perfect():
    x, y = planted(n=4000)
    half = len(x) // 2
    before = sklearn_accuracy(x, y)
    after = leace(x, y)(x)
    majority = float((y[half:] == y[:half].mode().values).double().mean())
    assert before > 0.9
    assert sklearn_accuracy(after, y) < majority + 0.03


def test_held_out_rows_fall_to_chance_with_an_eraser_fitted_on_others():
    x, y = planted(n=8000)
    eraser = leace(x[:4000], y[:4000])
    assert sklearn_accuracy(x[4000:], y[4000:]) > 0.9
    assert sklearn_accuracy(eraser(x[4000:]), y[4000:]) < 1 / 3 + 0.04


@pytest.mark.parametrize("n_classes", [2, 5])
def test_agrees_with_concept_erasure_once_its_defaults_are_tightened(n_classes):
    from concept_erasure import LeaceFitter as Reference

    x, y = planted(n_classes=n_classes)
    z = torch.nn.functional.one_hot(y).double()

    def reference(**options):
        fitted = Reference(20, n_classes, dtype=torch.float64, **options).update(x, z)
        return fitted.eraser(x)

    ours = leace(x, y)(x)
    tight = reference(shrinkage=False, svd_tol=1e-12, constrain_cov_trace=False)
    assert float((ours - tight).abs().max() / x.std()) < 1e-5


def test_rows_off_the_support_of_the_covariance_agree_with_concept_erasure_too():
    from concept_erasure import LeaceFitter as Reference

    gen = torch.Generator().manual_seed(0)
    y = torch.randint(4, (500,), generator=gen)
    z = torch.nn.functional.one_hot(y, 4).double()
    plane = torch.randn(6, 12, generator=gen).double() * torch.logspace(0, 3, 12).double()
    x = (torch.randn(500, 6, generator=gen).double() + torch.nn.functional.one_hot(y, 6)) @ plane
    options = {"shrinkage": False, "svd_tol": 1e-12, "constrain_cov_trace": False, "dtype": torch.float64}
    reference = Reference(12, 4, **options).update(x, z).eraser
    fitter = LeaceFitter().update(x, y)
    assert spread(fitter.eraser(x), y) < 1e-9
    torch.testing.assert_close(fitter.eraser(x), reference(x), rtol=0, atol=1e-6)
    off = x + 10 * torch.randn(500, 12, generator=gen).double()
    torch.testing.assert_close(fitter.eraser(off), reference(off), rtol=0, atol=1e-6)
    # Control: whitening in the scale of the features reads the part off the support, which says nothing of the label.
    white, unwhite = whitening(fitter.covariance, 1e-12)
    u = torch.linalg.svd(white.mT @ fitter.cross_covariance, full_matrices=False).U[:, :3]
    leaky = off - (off - x.mean(0)) @ white @ u @ u.mT @ unwhite.mT
    assert float((leaky - reference(off)).norm(dim=1).mean()) > 10


def test_defaults_of_the_reference_leave_a_residue_that_a_probe_finds_and_ours_do_not():
    from concept_erasure import LeaceFitter as Reference

    # A class in 500 rows one: its covariance with the features is under the reference's svd_tol of 0.01.
    gen = torch.Generator().manual_seed(0)
    y = (torch.rand(20_000, generator=gen) < 0.002).long()
    x = torch.randn(20_000, 10, generator=gen).double() + y[:, None] * torch.eye(10)[0]
    reference = Reference(10, 2, dtype=torch.float64).update(x, torch.nn.functional.one_hot(y)).eraser
    assert spread(reference(x), y) > 0.4
    assert spread(leace(x, y)(x), y) < 1e-9


def test_moves_x_least_among_maps_that_equalise_class_means():
    x, y = planted(n_classes=2)
    eraser = leace(x, y)
    moved = float((eraser(x) - x).square().sum(1).mean())
    rivals = {"mean difference": pl.subspaces.mean_difference(x, y).project_out(x)}
    gen = torch.Generator().manual_seed(1)
    for i in range(10):  # the same reading direction replaced by others that also guard
        write = eraser.left + 0.3 * eraser.left.norm() * torch.randn(20, 1, generator=gen).double() / 20**0.5
        difference = class_means(x, y).diff(dim=0)[0]
        read = eraser.right / (eraser.right @ difference) * 0 + difference / (difference @ write)
        rivals[f"oblique {i}"] = x - (x - x.mean(0)) @ read.reshape(-1, 1) @ write.mT
    for name, rival in rivals.items():
        assert float((rival - x).square().sum(1).mean()) > moved, name
    # Minimal in every norm: rescaling the features first changes nothing.
    scale = torch.logspace(-2, 2, 20, dtype=torch.float64)
    torch.testing.assert_close(leace(x * scale, y)(x * scale) / scale, eraser(x), rtol=1e-6, atol=1e-6)


def test_two_classes_the_mean_difference_guards_and_the_probe_row_does_not():
    x, y = planted(n=6000, n_classes=2, strength=1.0)
    difference = pl.subspaces.mean_difference(x, y)
    assert sklearn_accuracy(x, y) > 0.9
    assert spread(difference.project_out(x), y) < 1e-9
    assert sklearn_accuracy(difference.project_out(x), y) < 0.54

    from sklearn.linear_model import LogisticRegression

    row = LogisticRegression(max_iter=2000).fit(x, y).coef_
    without_row = pl.subspaces.from_probe(row, mean=x.mean(0)).project_out(x)
    assert sklearn_accuracy(without_row, y) > 0.8


@pytest.mark.parametrize("defect", ["copied features", "fewer rows than features", "constant feature"])
def test_rank_deficient_activations_are_guarded_and_left_finite(defect):
    x, y = planted(n=400, d=10, n_classes=3)
    if defect == "copied features":
        x = torch.cat([x, x[:, :4] + x[:, 4:8]], dim=1)
    elif defect == "constant feature":
        x = torch.cat([x, torch.full((400, 1), 7.0).double()], dim=1)
    else:
        gen = torch.Generator().manual_seed(0)
        x = torch.randn(60, 100, generator=gen).double() + y[:60, None]
        y = y[:60]
    eraser = leace(x, y)
    after = eraser(x)
    assert torch.isfinite(after).all()
    assert eraser.rank == 2
    means = class_means(after, y)
    assert float((means - means.mean(0)).abs().max()) < 1e-8
    torch.testing.assert_close(eraser.matrix @ eraser.matrix, eraser.matrix, rtol=1e-7, atol=1e-7)


def test_streamed_merged_and_batch_fits_agree_also_when_classes_appear_late():
    x, y = planted(n_classes=4)
    order = y.argsort()  # batches then hold different classes, the last class only at the end
    x, y = x[order], y[order]
    whole = leace(x, y)
    streamed = LeaceFitter()
    for part, label in zip(x.split(450), y.split(450)):
        streamed.update(part, label)
    left, right = LeaceFitter().update(x[:2000], y[:2000]), LeaceFitter().update(x[2000:], y[2000:])
    for other in (streamed.eraser, left.merge(right).eraser):
        torch.testing.assert_close(other(x), whole(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(streamed.covariance, torch.cov(x.mT, correction=0))
    assert streamed.n == len(x)


def test_one_large_offset_does_not_spoil_the_covariance():
    x, y = planted(n_classes=2)
    torch.testing.assert_close(leace(x + 1e6, y)(x + 1e6) - 1e6, leace(x, y)(x), rtol=1e-6, atol=1e-6)


def test_the_eraser_follows_updates():
    x, y = planted()
    fitter = LeaceFitter().update(x[:1000], y[:1000])
    first = fitter.eraser
    assert fitter.eraser is first
    second = fitter.update(x[1000:], y[1000:]).eraser
    assert not torch.equal(first.left, second.left)


def test_integer_labels_one_hot_and_any_invertible_coding_erase_the_same():
    x, y = planted()
    one_hot = torch.nn.functional.one_hot(y)
    coding = one_hot.double() @ torch.tensor([[1.0, 0.0], [0.0, 5.0], [-2.0, 1.0]]).double()
    expected = leace(x, y)(x)
    for z in (one_hot, one_hot.float(), coding):
        torch.testing.assert_close(leace(x, z)(x), expected, rtol=1e-8, atol=1e-8)


def test_a_continuous_label_is_uncorrelated_with_every_feature_after():
    x, _ = planted()
    z = x[:, 0] - 0.5 * x[:, 3] + torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    eraser = leace(x, z)
    correlation = np.corrcoef(torch.cat([eraser(x), z[:, None]], 1).numpy().T)[-1, :-1]
    assert eraser.rank == 1
    assert np.abs(np.corrcoef(x[:, 0], z)[0, 1]) > 0.5
    assert np.abs(correlation).max() < 1e-9


def test_masked_rows_do_not_count():
    x, y = planted(n=1200)
    shaped, label = x.view(60, 20, 20), y.view(60, 20)
    mask = torch.rand(60, 20, generator=torch.Generator().manual_seed(0)) < 0.6
    junk = shaped.clone()
    junk[~mask] = torch.nan
    bad = label.clone()
    bad[~mask] = -1
    expected = leace(x[mask.view(-1)], y[mask.view(-1)])
    torch.testing.assert_close(leace(junk, bad, mask)(x), expected(x))


def test_erasing_twice_changes_nothing_more_and_keeps_mean_shape_and_dtype():
    x, y = planted()
    eraser = leace(x, y)
    once = eraser(x)
    torch.testing.assert_close(eraser(once), once, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(once.mean(0), x.mean(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        shaped = x.to(dtype).view(30, 100, 20)
        before = shaped.clone()
        found = eraser(shaped)
        assert found.dtype == dtype
        assert found.shape == shaped.shape
        assert torch.equal(shaped, before)
        assert torch.equal(found, eraser(shaped.double()).to(dtype))


def test_nothing_correlated_means_nothing_erased():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    x, y = torch.cat([x, x]), torch.tensor([0] * 4 + [1] * 4)
    eraser = leace(x, y)
    assert eraser.rank == 0
    assert torch.equal(eraser(x), x)


def test_correlations_are_the_canonical_ones():
    x, y = planted(n_classes=2)
    found = float(leace(x, y).correlations[0])
    weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y.double().numpy(), rcond=None)[0]
    assert found == pytest.approx(np.corrcoef(np.c_[x, np.ones(len(x))] @ weights, y)[0, 1])


def test_save_and_load(tmp_path):
    x, y = planted()
    eraser = leace(x, y)
    back = Eraser.load(eraser.save(tmp_path / "eraser.safetensors"))
    assert torch.equal(back(x), eraser(x))
    assert len(eraser.to_dataframe()) == 2
    with pytest.raises(StoreError):
        pl.Subspace.load(tmp_path / "eraser.safetensors")


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (InputError, "one class only", lambda x, y: leace(x, torch.zeros_like(y))),
        (InputError, "constant", lambda x, y: leace(x, torch.full((len(x),), 0.1))),
        (InputError, "NaN", lambda x, y: leace(x.masked_fill(x > 30, torch.nan), y)),
        (InputError, "negative", lambda x, y: leace(x, y - 1)),
        (InputError, "classes occur", lambda x, y: leace(torch.randn(20_001, 2), torch.arange(20_001))),
        (InputError, "call update", lambda x, y: LeaceFitter().eraser),
        (InputError, "call update", lambda x, y: leace(x, y, torch.zeros(len(y), dtype=torch.bool))),
        (ShapeError, "labels", lambda x, y: leace(x, y[1:])),
        (ShapeError, "mask", lambda x, y: leace(x, y, y[1:] > 0)),
        (ShapeError, "width", lambda x, y: LeaceFitter().update(x, y).update(x[:, 1:], y)),
        (ShapeError, "kind", lambda x, y: LeaceFitter().update(x, y).update(x, y.double())),
        (ShapeError, "width", lambda x, y: leace(x, y)(x[:, 1:])),
    ],
)
def test_errors_say_what_is_wrong(error, words, call):
    with pytest.raises(error, match=words):
        call(*planted())


def test_classes_may_have_any_ids_also_where_later_batches_bring_new_ones():
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (400,), generator=gen)
    x = torch.randn(400, 6, generator=gen) + torch.eye(4, 6)[y]
    ids = torch.tensor([5, 70, 900_000, 10**12])[y]
    plain, far = leace(x, y), leace(x, ids)
    torch.testing.assert_close(far(x), plain(x))
    parts = LeaceFitter()
    for some in (y > 1, y % 2 == 0, y == 1):  # the first batch lacks the smallest ids
        parts.update(x[some], ids[some])
    whole = LeaceFitter().update(x[y > 1], y[y > 1]).update(x[y % 2 == 0], y[y % 2 == 0]).update(x[y == 1], y[y == 1])
    assert parts.cross_covariance.shape == (6, 4)
    torch.testing.assert_close(parts.cross_covariance, whole.cross_covariance)
    torch.testing.assert_close(parts.eraser(x), whole.eraser(x))


def test_labels_may_be_true_and_false() -> None:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=gen), torch.rand(200, generator=gen) < 0.5
    torch.testing.assert_close(pl.leace(x, y)(x), pl.leace(x, y.long())(x))

"""Subspaces: the algebra of projections, what each constructor spans, and matched random controls."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch

from probelens import subspaces as sub
from probelens.errors import InputError, ShapeError, UnknownHookError
from probelens.numerics.linalg import between_rows
from probelens.probing import LinearProbe, probe, split_by_group
from probelens.subspaces.fitted import from_probe, probe_rows
from probelens.subspaces.inlp import Inlp
from probelens.subspaces.subspace import Subspace


def spectrum(d=30, power=1.5, seed=0):
    """A covariance with a power-law spectrum in a random eigenbasis, as residual streams have."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=torch.float64)).Q
    return (q * torch.arange(1, d + 1, dtype=torch.float64) ** -power) @ q.mT


def gaussian(n=2000, d=12, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=gen) * torch.linspace(3, 0.3, d) + torch.linspace(-2, 5, d)


def same_span(a, b):
    return a.rank == b.rank and a.overlap(b) == pytest.approx(1.0, abs=1e-6)


@pytest.fixture
def plane():
    return sub.random(3, 12, seed=4, mean=torch.linspace(-2, 5, 12))


def test_projections_are_idempotent_complementary_and_keep_the_mean(plane):
    x = gaussian().double()
    out, kept = plane.project_out(x), plane.keep(x)
    torch.testing.assert_close(plane.project_out(out), out)
    torch.testing.assert_close(plane.keep(kept), kept)
    torch.testing.assert_close(out + kept - plane.mean, x)
    torch.testing.assert_close(plane.project_out(plane.mean), plane.mean)
    assert int(torch.linalg.matrix_rank(out - plane.mean, tol=1e-8)) == 12 - 3
    assert float(plane.coordinates(out).abs().max()) < 1e-12
    centred = Subspace(plane.basis, x.mean(0))
    torch.testing.assert_close(centred.project_out(x).mean(0), x.mean(0))


def test_raw_projection_moves_the_mean_and_the_default_does_not(plane):
    x = gaussian().double()
    space = Subspace(plane.basis, x.mean(0))
    raw = space.project_out_raw(x)
    torch.testing.assert_close(raw, x - (x @ plane.basis.mT) @ plane.basis)
    assert float((raw.mean(0) - x.mean(0)).norm()) > 1.0
    torch.testing.assert_close(raw, Subspace(plane.basis, torch.zeros(12)).project_out(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12), (0, 12)])
def test_any_shape_and_dtype_comes_back_rounded_once(plane, dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    for fn in (plane.project_out, plane.project_out_raw, plane.keep):
        assert fn(x).dtype == dtype
        assert torch.equal(fn(x), fn(x.double()).to(dtype))
    assert plane.coordinates(x).shape == (*shape[:-1], 3)
    assert torch.equal(x, before)


def test_variance_removed_is_what_the_projection_takes(plane):
    x = gaussian().double()
    mean, covariance = sub.moments(x)
    torch.testing.assert_close(covariance, torch.cov(x.mT, correction=0))
    space = Subspace(plane.basis, mean)
    lost = torch.cov(x.mT, correction=0).trace() - torch.cov(space.project_out(x).mT, correction=0).trace()
    assert space.variance_removed(covariance) == pytest.approx(float(lost))


def test_union_and_complement():
    a, b = (Subspace(torch.eye(5)[i : i + 2], torch.ones(5), label) for i, label in ((0, "a"), (1, "b")))
    both = a.union(b)
    assert (both.rank, both.label) == (3, "a+b")
    assert both.overlap(a) == pytest.approx(1.0)
    rest = both.complement()
    assert rest.rank == 2
    assert rest.overlap(both) == pytest.approx(0.0, abs=1e-12)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rest.keep(x), both.project_out(x))
    with pytest.raises(InputError, match="means"):
        a.union(Subspace(b.basis, torch.zeros(5)))
    empty = Subspace(torch.zeros(0, 5), torch.zeros(5))
    assert torch.equal(empty.project_out(x), x)
    assert empty.complement().rank == 5


def test_probe_rows_are_unstandardised_and_centred():
    scale = torch.linspace(0.1, 10, 6).double()
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    common = torch.randn(6, generator=torch.Generator().manual_seed(1)).double()
    space = sub.from_probe(rows, torch.zeros(6), scale=scale)
    assert space.rank == 3
    raw = rows / scale
    assert same_span(space, Subspace(torch.linalg.svd(raw - raw.mean(0)).Vh[:3], torch.zeros(6)))
    # A softmax doesn't see what all rows share.
    assert same_span(sub.from_probe(rows + common * scale, torch.zeros(6), scale=scale), space)
    assert not same_span(sub.from_probe(rows, torch.zeros(6)), space)
    assert sub.from_probe(rows, torch.zeros(6), rank=1).rank == 1


def test_a_projected_probe_reads_a_constant():
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x = gaussian()
    y = (x[:, 1] > x[:, 1].mean()).long() + (x[:, 5] > x[:, 5].mean()).long()
    scaler = StandardScaler().fit(x)
    probe = LogisticRegression(max_iter=500).fit(scaler.transform(x), y)
    space = sub.from_probe(probe, x.mean(0), scale=torch.as_tensor(scaler.scale_))
    logits = probe.decision_function(scaler.transform(space.project_out(x)))
    gaps = logits - logits.mean(axis=1, keepdims=True)
    assert np.ptp(gaps, axis=0).max() < 1e-4
    assert np.ptp(probe.decision_function(scaler.transform(x)), axis=0).max() > 1


def test_a_probe_result_gives_its_rows_and_mean_by_site_and_label():
    x = gaussian(600).view(60, 10, 12)
    labels = {"a": (x[..., 0] > x[..., 0].mean()).long(), "b": torch.arange(600).view(60, 10) % 3}
    acts = {"one": x, "two": x.flip(-1)}
    result = probe(acts, labels, Cs=[0.1])
    space = sub.from_probe(result, site="two", label="a")
    assert space.rank == 1
    assert space.label == "a"
    assert int(space.basis[0].abs().argmax()) == 11
    assert sub.from_probe(result, site="one", label="b").rank == 2
    torch.testing.assert_close(space.mean, x.flip(-1).reshape(-1, 12).double().mean(0), rtol=0, atol=0.3)
    with pytest.raises(InputError, match="site="):
        sub.from_probe(result, label="a")
    with pytest.raises(UnknownHookError, match="three"):
        sub.from_probe(result, site="three", label="a")
    fitted = LinearProbe().fit(x.reshape(-1, 12), labels["b"].reshape(-1))
    assert sub.from_probe(fitted, x.reshape(-1, 12).mean(0)).rank == 2
    with pytest.raises(InputError, match="mean="):
        sub.from_probe(fitted)


def test_a_binary_row_is_not_centred_away():
    row = torch.tensor([[3.0, 4.0]])
    for rows in (row, row[0], row.numpy()):
        torch.testing.assert_close(sub.from_probe(rows, torch.zeros(2)).basis.abs(), row.double() / 5)
    with pytest.raises(InputError, match="has no direction"):
        sub.from_probe(torch.ones(3, 2), torch.zeros(2))


def test_mean_difference_and_class_means_make_the_means_equal():
    x = gaussian()
    y = torch.arange(len(x)) % 4
    x = x + torch.randn(4, 12, generator=torch.Generator().manual_seed(3))[y]
    space = sub.class_means(x, y)
    out = space.project_out(x.double())
    means = torch.stack([out[y == c].mean(0) for c in range(4)])
    assert space.rank == 3
    assert float((means - means[0]).abs().max()) < 1e-10
    two = sub.mean_difference(x, y % 2)
    assert same_span(two, sub.class_means(x, y % 2))
    with pytest.raises(InputError, match="class_means"):
        sub.mean_difference(x, y)
    with pytest.raises(InputError, match="at least two"):
        sub.class_means(x, torch.zeros_like(y))
    with pytest.raises(InputError, match="no direction"):
        sub.class_means(torch.cat([x[:50], x[:50]]), torch.arange(100) // 50)


def test_pca_and_svd_equal_numpy_and_differ_by_the_mean():
    x = gaussian().double()
    vectors = np.linalg.svd(x - x.mean(0), full_matrices=False)[2]
    assert same_span(sub.pca(x, 3), Subspace(torch.as_tensor(vectors[:3]), torch.zeros(12)))
    raw = np.linalg.svd(x, full_matrices=False)[2]
    assert same_span(sub.svd(x, 3), Subspace(torch.as_tensor(raw[:3]), torch.zeros(12)))
    assert not same_span(sub.pca(x, 3), sub.svd(x, 3))
    assert sub.svd(x, 1).overlap(sub.from_probe(x.mean(0), torch.zeros(12))) > 0.9
    mean, covariance = sub.moments(x)
    assert same_span(sub.top_pca(3, covariance, mean), sub.pca(x, 3))


def test_masked_rows_do_not_count():
    x = gaussian().view(40, 50, 12)
    y = torch.randint(3, (40, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(40, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    junk = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(sub.pca(junk, 2, mask).basis, sub.pca(x[mask], 2).basis)
    torch.testing.assert_close(sub.class_means(junk, y, mask).mean, x[mask].double().mean(0))
    with pytest.raises(InputError, match="NaN"):
        sub.pca(junk, 2)


def test_random_subspaces_are_uniform_and_follow_the_seed():
    draws = [sub.random(2, 10, seed=s) for s in range(400)]
    mean = torch.stack([q.basis.mT @ q.basis for q in draws]).mean(0)
    torch.testing.assert_close(mean, 0.2 * torch.eye(10).double(), rtol=0, atol=0.05)
    assert torch.equal(sub.random(2, 10, seed=7).basis, draws[7].basis)
    state = torch.get_rng_state()
    sub.random_matched(draws[0], spectrum(10), n=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("d", [12, 60])
@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("kind", ["random", "low variance", "high variance"])
def test_matched_subspaces_have_the_rank_and_within_one_percent_the_variance(d, rank, kind):
    sigma = spectrum(d)
    vectors = torch.linalg.eigh(sigma).eigenvectors
    if kind == "random":
        target = sub.random(rank, d, seed=11)
    else:  # in the fifth of the spectrum's end, but not the extreme directions themselves
        order = vectors if kind == "low variance" else vectors.flip(1)
        width = min(3 * rank, d - 2)
        target = Subspace((order[:, :width] @ sub.random(rank, width, seed=5).basis.mT).mT, torch.zeros(d))
    wanted = target.variance_removed(sigma)
    draws = sub.random_matched(target, sigma, n=20, seed=1, max_overlap=1.0)
    assert len(draws) == 20
    for q in draws:
        assert q.rank == rank
        assert abs(q.variance_removed(sigma) / wanted - 1) <= 0.01
        torch.testing.assert_close(q.basis @ q.basis.mT, torch.eye(rank).double(), rtol=0, atol=1e-10)
    pairs = [a.overlap(b) for i, a in enumerate(draws) for b in draws[:i]]
    assert np.mean(pairs) < 0.99  # draws, not one subspace twenty times
    # The control: plain random subspaces of the rank are nowhere near the target's variance.
    if kind != "random":
        plain = [sub.random(rank, d, seed=s).variance_removed(sigma) for s in range(20)]
        assert np.mean([abs(v / wanted - 1) <= 0.01 for v in plain]) < 0.2


def test_matched_draws_favour_no_direction_beyond_its_variance():
    # Eigenvalues equal in pairs: the two directions of a pair must be hit equally often.
    sigma = torch.diag(torch.tensor([5.0, 5.0, 1.0, 1.0, 0.2, 0.2])).double()
    target = Subspace(torch.tensor([[0.0, 1.0, 1.0, 0, 0, 0]]).double() / 2**0.5, torch.zeros(6))
    draws = sub.random_matched(target, sigma, n=2000)
    mass = torch.stack([q.basis[0] ** 2 for q in draws]).mean(0)
    for i in (0, 2, 4):
        assert float(mass[i]) == pytest.approx(float(mass[i + 1]), abs=0.03)
    signs = torch.stack([q.basis[0] * q.basis[0, 0].sign() for q in draws])[:, 1:].mean(0)
    assert float(signs.abs().max()) < 0.05


def test_matching_follows_its_seed():
    sigma, target = spectrum(), sub.random(3, 30, seed=1)
    first, again, other = (sub.random_matched(target, sigma, n=2, seed=s) for s in (3, 3, 4))
    assert torch.equal(first[1].basis, again[1].basis)
    assert first[0].overlap(other[0]) < 0.9


def test_impossible_matches_are_refused_with_the_reason():
    sigma = spectrum()
    top = sub.top_pca(2, sigma, torch.zeros(30))
    with pytest.raises(InputError, match="nearly coincide"):
        sub.random_matched(top, sigma)
    with pytest.raises(InputError, match="only one subspace"):
        sub.random_matched(sub.random(30, 30), sigma)
    flat = sigma.clone()
    flat[:5] = flat[:, :5] = 0.0
    with pytest.raises(InputError, match="no variance"):
        sub.random_matched(Subspace(torch.eye(30)[:2], torch.zeros(30)), flat)
    one_scale = torch.eye(30)  # every subspace removes the same: nothing to search, nothing refused
    assert len(sub.random_matched(sub.random(2, 30, seed=1), one_scale, n=3)) == 3


def test_matching_works_where_the_covariance_is_singular():
    x = gaussian(n=8, d=12)
    _, sigma = sub.moments(x)
    target = sub.class_means(x, torch.arange(8) % 2)
    wanted = target.variance_removed(sigma)
    for q in sub.random_matched(target, sigma, n=5):
        assert q.variance_removed(sigma) == pytest.approx(wanted, rel=0.01)


def test_an_eraser_is_matched_by_how_far_it_moves_activations():
    x = gaussian()
    y = (x[:, 1] + torch.randn(len(x), generator=torch.Generator().manual_seed(0)) > x[:, 1].mean()).long()
    eraser = sub.leace(x, y)
    _, sigma = sub.moments(x)
    moved = float((eraser(x.double()) - x).square().sum(1).mean())
    assert eraser.variance_removed(sigma) == pytest.approx(moved)
    for q in sub.random_matched(eraser, sigma, n=5):
        assert q.rank == eraser.rank
        assert float((q.project_out(x.double()) - x).square().sum(1).mean()) == pytest.approx(moved, rel=0.02)


def test_broken_subspaces_are_refused():
    for basis, mean, error in [
        (torch.ones(2, 3), torch.zeros(3), InputError),
        (torch.eye(3)[:1] * torch.nan, torch.zeros(3), InputError),
        (torch.eye(3)[:1], torch.zeros(2), ShapeError),
        (torch.eye(3)[0], torch.zeros(3), ShapeError),
    ]:
        with pytest.raises(error):
            Subspace(basis, mean)
    with pytest.raises(ShapeError, match="width"):
        sub.random(1, 3).project_out(torch.zeros(2, 4))
    with pytest.raises(InputError, match="from 1 to 3"):
        sub.random(4, 3)


def test_save_and_load(tmp_path, plane):
    back = Subspace.load(plane.save(tmp_path / "plane.safetensors"))
    assert torch.equal(back.basis, plane.basis)
    assert back.label == plane.label
    x = gaussian()
    single = Subspace(plane.basis.float(), plane.mean.float())  # stored short, made orthonormal again
    torch.testing.assert_close(single.project_out(x), plane.project_out(x), rtol=1e-5, atol=1e-5)
    assert list(plane.to_dataframe()["rank"]) == [3]


def planted(n=3000, d=24, directions=3, seed=0, noise=1.0):
    """A sign that several directions carry, so that removing one row of a probe leaves it readable."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=gen)
    x = torch.randn(n, d, generator=gen) * torch.logspace(0, -1, d)
    signs = 2.0 * y[:, None] - 1
    groups = torch.arange(n) // 10
    for i in range(directions):
        # Redundant and non-Gaussian: each direction alone tells the class.
        x[:, i] = (signs[:, 0] * (0.5 + torch.rand(n, generator=gen)) + noise * 0.3 * x[:, i]) * 2.0**-i
    return x, y, groups


def refit(x, y, groups, seed=1):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x, y = StandardScaler().fit_transform(x), y.numpy()
    test = (groups % 4 == seed).numpy()
    return LogisticRegression(max_iter=500).fit(x[~test], y[~test]).score(x[test], y[test])


def test_inlp_goes_on_until_an_independent_refit_is_at_chance():
    x, y, groups = planted()
    found = sub.inlp(x, y, groups)
    assert found.stopped == "at chance"
    assert found.at_chance
    assert 3 <= found.rank <= 12
    assert refit(x, y, groups) > 0.95
    assert refit(found.project_out(x), y, groups) < 0.56
    # The control: one probe direction, as single-direction ablations delete, is not enough.
    first = Subspace(found.basis[:1], found.mean)
    assert refit(first.project_out(x), y, groups) > 0.9


def test_inlp_records_each_refit_and_its_baseline():
    x, y, groups = planted()
    found = sub.inlp(x, y, groups)
    table = found.to_dataframe()
    assert table["rank"].tolist() == list(range(found.rank + 1))
    assert table["accuracy"].iloc[0] > 0.95
    assert table["accuracy"].iloc[-1] == found.accuracy <= found.baseline + 0.02
    assert (table["accuracy"].iloc[:-1] > found.baseline + 0.02).all()
    assert 0.45 < found.baseline < 0.55
    assert len(found.plot().data) == 1


def test_inlp_says_where_the_budget_ended():
    x, y, groups = planted()
    found = sub.inlp(x, y, groups, max_rank=1)
    assert found.stopped == "max_rank"
    assert not found.at_chance
    assert found.rank == 1
    assert found.accuracy > 0.9
    everything = sub.inlp(x[:, :2], y, groups, baseline=0.0)
    assert everything.rank == 2
    assert everything.stopped == "max_rank"


def test_inlp_stops_at_once_where_nothing_is_readable():
    gen = torch.Generator().manual_seed(0)
    found = sub.inlp(torch.randn(4000, 5, generator=gen), torch.randint(2, (4000,), generator=gen), margin=0.05)
    assert found.rank == 0
    assert found.at_chance


def test_a_penalty_that_no_longer_suits_does_not_pass_for_an_erasure(monkeypatch):
    module = importlib.import_module("probelens.subspaces.inlp")
    real = module.fit_path

    def spoiled(shared, y, Cs, **options):
        """C = 0.1, which is chosen first, finds nothing once a direction is gone."""
        (path,) = real(shared, y, Cs, **options)
        if shared.removed is None:
            return [path]
        zero = {"coef": torch.zeros_like(path[0].coef), "intercept": torch.zeros_like(path[0].intercept)}
        return [[dataclasses.replace(fit, **zero) if fit.C == 0.1 else fit for fit in path]]

    x, y, groups = planted()
    honest = sub.inlp(x, y, groups, Cs=(0.1, 1.0))
    monkeypatch.setattr(module, "fit_path", spoiled)
    fooled = sub.inlp(x, y, groups, Cs=0.1)
    assert fooled.at_chance
    assert refit(fooled.project_out(x), y, groups) > 0.9
    found = sub.inlp(x, y, groups, Cs=(0.1, 1.0))
    assert [row["C"] for row in found.history[:2]] == [0.1, 1.0]
    assert found.at_chance
    assert honest.at_chance
    assert found.rank > fooled.rank
    assert refit(found.project_out(x), y, groups) < 0.56


def test_inlp_handles_many_classes_positions_and_masks():
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(5, (120, 30), generator=gen)
    x = torch.randn(120, 30, 16, generator=gen) + 4 * torch.randn(5, 16, generator=gen)[y]
    mask = torch.rand(120, 30, generator=gen) < 0.8
    junk = x.masked_fill(~mask[..., None], torch.nan)
    found = sub.inlp(junk, y, mask=mask)
    assert found.at_chance
    assert found.history[0]["accuracy"] > 0.9
    assert found.history[1]["rank"] == 4  # classes - 1 directions a step
    assert refit(found.project_out(x[mask]), y[mask], torch.arange(120)[:, None].expand(120, 30)[mask]) < 0.26


def test_inlp_keeps_a_sequence_in_one_part():
    # The label is a property of the sequence and nothing else is readable: across sequences it is at chance,
    # but a split by rows would recognise each sequence.
    gen = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (60,), generator=gen)
    names = torch.randn(60, 200, generator=gen)
    x = names[:, None] + 0.01 * torch.randn(60, 20, 200, generator=gen)
    y = labels[:, None].expand(60, 20)
    by_sequence = sub.inlp(x, y, max_rank=0)
    by_row = sub.inlp(x.reshape(-1, 200), y.reshape(-1), max_rank=0)
    assert by_row.accuracy == 1.0
    assert by_sequence.accuracy < 0.9


def test_inlp_factorises_the_features_once_while_few_directions_are_gone(monkeypatch):
    from probelens.probing.solvers import factor

    real, widths = factor._eigh, []
    monkeypatch.setattr(factor, "_eigh", lambda gram, floor: widths.append(len(gram)) or real(gram, floor))
    x, y, groups = planted()
    few = sub.inlp(x, y, groups, max_rank=4, baseline=0.0)
    assert few.rank == 4
    assert widths == [x.shape[1]]
    # The control: with most directions of many classes gone, a factorisation without them costs less.
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(600, 8, generator=gen)
    sub.inlp(noise, torch.randint(6, (600,), generator=gen), baseline=-1.0, max_rank=8)
    assert widths.count(8) > 1


def test_inlp_finds_the_span_of_scikit_learns_loop():
    from sklearn.linear_model import LogisticRegression

    x, y, groups = planted(noise=0.3)
    ours = sub.inlp(x, y, groups, Cs=1.0, tol=1e-8, max_rank=3)
    # The same training rows, standardised once, penalty on the weights over standardised features.
    train = split_by_group(groups, seed=0).train
    xt, yt = x[train].double(), y[train]
    mean, scale = xt.mean(0), xt.std(0, correction=0)
    removed = torch.zeros(0, x.shape[1]).double()
    for _ in range(3):
        # Weights that read nothing of the removed directions: logistic regression in their null space.
        null = torch.linalg.qr((removed / scale).mT, mode="complete").Q.mT[len(removed) :]
        z = ((xt - mean) / scale) @ null.mT
        coef = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(z, yt).coef_
        row = torch.as_tensor(coef) @ null / scale
        row = row - (row @ removed.mT) @ removed
        removed = torch.cat([removed, row / row.norm()])
    assert Subspace(removed, mean).overlap(ours) == pytest.approx(1.0, abs=1e-4)


def test_inlp_round_trips_and_follows_its_seed(tmp_path):
    x, y, groups = planted(n=800)
    found = sub.inlp(x, y, groups, seed=3)
    back = Inlp.load(found.save(tmp_path / "inlp.safetensors"))
    assert torch.equal(back.basis, found.basis)
    assert back.history == found.history
    assert torch.equal(sub.inlp(x, y, groups, seed=3).basis, found.basis)
    assert not torch.equal(sub.inlp(x, y, groups, seed=4).basis[0], found.basis[0])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("too few to split", lambda x, y: sub.inlp(x[:2], y[:2])),
        ("one class", lambda x, y: sub.inlp(x, torch.zeros_like(y))),
        ("integers", lambda x, y: sub.inlp(x, y.float())),
        ("max_rank", lambda x, y: sub.inlp(x, y, max_rank=99)),
    ],
)
def test_inlp_errors(words, call):
    x, y, _ = planted(n=100)
    with pytest.raises(InputError, match=words):
        call(x, y)


def test_class_means_cut_to_a_rank_weigh_each_class_by_its_own_share() -> None:
    """A class of 2 % lies far off along axis 0, two of 49 % lie apart along axis 1: most between-class variance is there."""
    y = np.repeat([0, 1, 2], [20, 490, 490])
    means = np.zeros((3, 6))
    means[0, 0], means[1, 1], means[2, 1] = 6.0, 2.0, -2.0
    x = means[y] + 0.1 * np.random.default_rng(0).standard_normal((1000, 6))
    share = np.bincount(y) / len(y)
    found = np.stack([x[y == k].mean(0) - x.mean(0) for k in range(3)])
    values, vectors = np.linalg.eigh(np.einsum("k,ki,kj->ij", share, found, found))
    order = values.argsort()[::-1]
    for rank in (1, 2):
        space = sub.class_means(torch.tensor(x), torch.tensor(y), rank=rank)
        assert same_span(space, sub.Subspace(torch.tensor(vectors[:, order[:rank]].T.copy()), torch.zeros(6)))
    first = sub.class_means(torch.tensor(x), torch.tensor(y)).basis[0]
    assert int(first.abs().argmax()) == 1
    assert abs(np.linalg.svd(found - found.mean(0))[2][0, 0]) > 0.9, "with equal weights it would be axis 0"
    held = probe({"a": torch.tensor(x).float()[:, None]}, torch.tensor(y)[:, None]).directions("a").class_means
    assert int(torch.linalg.svd(held)[2][0].abs().argmax()) == 1, "a probe keeps the same directions"


def test_between_rows_are_those_of_numpy_for_classes_and_for_a_number() -> None:
    gen = np.random.default_rng(1)
    y = gen.integers(0, 3, 9000) * 5  # any ids
    x = gen.standard_normal((9000, 4)) + y[:, None] * [1.0, 0.5, 0, 0] + 100
    found = between_rows(torch.tensor(x), torch.tensor(y))
    means = np.stack([x[y == k].mean(0) - x.mean(0) for k in np.unique(y)])
    share = np.array([(y == k).mean() for k in np.unique(y)])
    np.testing.assert_allclose(found.mT @ found, np.einsum("k,ki,kj->ij", share, means, means), atol=1e-9)
    row = between_rows(torch.tensor(x), torch.tensor(y).double())
    want = ((x - x.mean(0)) * (y - y.mean())[:, None]).mean(0) / y.std()
    np.testing.assert_allclose(row, want[None], atol=1e-9)


def test_probe_rows_of_every_site_and_none_where_nothing_was_found() -> None:
    x = torch.randn(200, 4, 6, generator=torch.Generator().manual_seed(0))
    labels = {"three": (x[..., 0] > 0).long() + (x[..., 1] > 0).long(), "size": x[..., 2] * 2.0}
    found = probe({"here": x, "nothing": torch.zeros_like(x)}, labels)
    spaces = probe_rows(found, "three")
    assert {site: space.rank for site, space in spaces.items()} == {"here": 2, "nothing": 0}
    same = from_probe(found, site="here", label="three")
    torch.testing.assert_close(spaces["here"].project_out(x), same.project_out(x))
    torch.testing.assert_close(spaces["nothing"].project_out(x), x)
    assert probe_rows(found, "three", rank=1)["here"].rank == 1
    number = probe_rows(found, "size")["here"]
    assert number.rank == 1
    assert float(number.basis[0, 2].abs()) > 0.99, "the one direction of a regression"
    with pytest.raises(InputError, match="not a Tensor"):
        probe_rows(x)

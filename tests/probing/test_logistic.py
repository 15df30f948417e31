"""The probe solver: scikit-learn's objective and minimum, on every kind of problem."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from probelens.errors import InputError, ShapeError
from probelens.probing import fit_path
from probelens.probing.solvers import logistic
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.ridge import ridge_path


def problem(
    n: int, d: int, k: int, *, signal: float = 1.0, decay: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features with a power-law spectrum around a mean that isn't zero, and labels that all occur."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) * np.arange(1, d + 1) ** -decay
    logits = signal * (x / x.std(0)) @ rng.standard_normal((d, k))
    y = (logits + rng.gumbel(size=(n, k))).argmax(1)
    y[:k] = np.arange(k)
    return x + 3 * rng.standard_normal(d), y


def objective(
    coef: np.ndarray, intercept: np.ndarray, x: np.ndarray, y: np.ndarray, C: float, weight: np.ndarray | None = None
) -> float:
    """scikit-learn's objective, written down independently of the solver."""
    z = x @ np.asarray(coef).T + np.asarray(intercept)
    if z.shape[1] == 1:
        loss = np.logaddexp(0, z[:, 0]) - y * z[:, 0]
    else:
        loss = np.logaddexp.reduce(z, axis=1) - z[np.arange(len(y)), y]
    return C * float((loss if weight is None else loss * weight).sum()) + 0.5 * float((coef**2).sum())


SHAPES = {
    "binary": (300, 8, 2, 1.0, 0.0),
    "three classes": (300, 8, 3, 1.0, 0.0),
    "many classes": (600, 16, 12, 1.0, 0.0),
    "wider than long": (60, 100, 4, 0.5, 0.0),
    "binary, wider than long": (60, 100, 2, 0.5, 0.0),
    "ill-conditioned": (400, 20, 5, 1.0, 3.0),
    "binary, ill-conditioned": (400, 20, 2, 1.0, 3.0),
}


@pytest.mark.parametrize("C", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_coefficients_and_objective_are_those_of_scikit_learn(shape: str, weighted: bool, C: float) -> None:
    n, d, k, signal, decay = SHAPES[shape]
    x, y = problem(n, d, k, signal=signal, decay=decay)
    weight = np.random.default_rng(1).uniform(0, 2, n) if weighted else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newton-cholesky falls back to lbfgs on some of these
        theirs = LogisticRegression(C=C, tol=1e-10, max_iter=20_000, solver="newton-cholesky").fit(x, y, weight)
    w = None if weight is None else torch.from_numpy(weight)
    ((ours,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), C, w, tol=1e-10)
    best = objective(theirs.coef_, theirs.intercept_, x, y, C, weight)
    reached = objective(ours.coef.numpy(), ours.intercept.numpy(), x, y, C, weight)
    assert ours.converged
    assert reached <= best * (1 + 1e-9)
    assert ours.objective == pytest.approx(reached, rel=1e-9)
    assert ours.coef.shape == theirs.coef_.shape
    scale = np.abs(theirs.coef_).max()
    np.testing.assert_allclose(ours.coef, theirs.coef_, atol=2e-3 * scale)
    assert (ours.predict(torch.from_numpy(x)).numpy() == theirs.predict(x)).mean() > 0.995


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_the_true_gap_is_what_the_tolerance_says(tol: float, dtype: torch.dtype) -> None:
    gaps = []
    for n, d, k, signal, decay in [
        (400, 20, 2, 0.3, 0.0),
        (400, 20, 10, 3.0, 0.0),
        (60, 100, 4, 3.0, 0.0),
        (800, 40, 30, 1.0, 1.0),
        (500, 30, 2, 3.0, 1.0),
    ]:
        x, y = problem(n, d, k, signal=signal, decay=decay)
        features, labels = torch.from_numpy(x).to(dtype), torch.from_numpy(y)
        Cs = [1e-3, 1.0, 1e3]
        (exact,) = fit_path(features.double(), labels, Cs, tol=1e-11)
        (path,) = fit_path(features, labels, Cs, tol=tol)
        alone = [fit_path(features, labels, C, tol=tol)[0][0] for C in Cs]
        assert all(fit.converged for fit in [*exact, *path, *alone])
        for reference, *found in zip(exact, path, alone):
            for fit in found:
                reached = objective(fit.coef.numpy(), fit.intercept.numpy(), features.double().numpy(), y, fit.C)
                gaps.append(reached / reference.objective - 1)
    # The stopping rule goes by an estimate: nearly separable classes at a huge C may exceed it a little.
    assert min(gaps) > -1e-7
    assert np.mean(np.array(gaps) <= tol) > 0.9
    assert max(gaps) <= 2 * tol


def test_the_gap_of_ordered_classes_is_what_the_tolerance_says() -> None:
    """Classes along a bent line, as a counter's in a small model: the curvature differs from row to row."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 8, 1500)
    x = np.tanh(y[:, None] * rng.standard_normal(24) / 4 + rng.standard_normal(24))
    x += 0.05 * rng.standard_normal(x.shape)
    x = (x - x.mean(0)) / x.std(0)
    features, labels, Cs = torch.from_numpy(x), torch.from_numpy(y), [1.0, 10.0, 100.0, 1000.0]
    (path,) = fit_path(features.float(), labels, Cs, tol=1e-3)
    (exact,) = fit_path(features, labels, Cs, tol=1e-8)
    for fit, reference in zip(path, exact):
        assert fit.converged
        assert reference.converged
        assert sum(f.n_iter for f in path) < 100
        reached, best = (objective(f.coef.numpy(), f.intercept.numpy(), x, y, f.C) for f in (fit, reference))
        assert -1e-6 < reached / best - 1 < 2e-3


def test_a_loose_tolerance_is_really_looser() -> None:
    """The control of the test above: it can tell a gap from none."""
    x, y = problem(800, 40, 30, decay=1.0)
    loose, exact = (fit_path(torch.from_numpy(x), torch.from_numpy(y), 1.0, tol=t)[0][0] for t in (0.1, 1e-10))
    assert loose.objective > exact.objective * (1 + 1e-5)
    assert loose.n_iter < exact.n_iter


def test_label_sets_fitted_together_equal_those_fitted_alone() -> None:
    x, first = problem(300, 12, 5)
    second, third = problem(300, 12, 2, seed=1)[1], problem(300, 12, 9, seed=2)[1]
    labels = [torch.from_numpy(y) for y in (first, second, third)]
    features = torch.from_numpy(x)
    together = fit_path(features, labels, [0.01, 1.0], tol=1e-10)
    for y, path in zip(labels, together):
        (alone,) = fit_path(features, y, [0.01, 1.0], tol=1e-10)
        for a, b in zip(path, alone):
            torch.testing.assert_close(a.coef, b.coef, atol=1e-6, rtol=1e-4)


def test_fits_come_back_in_the_order_of_the_values_of_C() -> None:
    x, y = problem(100, 4, 3)
    (path,) = fit_path(torch.from_numpy(x), torch.from_numpy(y), [10.0, 0.1, 1.0])
    assert [fit.C for fit in path] == [10.0, 0.1, 1.0]
    assert path[1].coef.norm() < path[2].coef.norm() < path[0].coef.norm()


def test_stop_leaves_out_larger_C_of_one_label_set_only() -> None:
    x, y = problem(100, 4, 3)
    labels = torch.from_numpy(y)
    paths = fit_path(torch.from_numpy(x), [labels, labels], [0.1, 1.0, 10.0], stop=lambda i, fit: i == 0 and fit.C >= 1)
    assert [[fit.C for fit in path] for path in paths] == [[0.1, 1.0], [0.1, 1.0, 10.0]]


def test_without_intercept_the_model_goes_through_the_origin() -> None:
    x, y = problem(200, 6, 3)
    theirs = LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=5000).fit(x, y)
    ((ours,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), 1.0, fit_intercept=False, tol=1e-10)
    assert not ours.intercept.any()
    np.testing.assert_allclose(ours.coef, theirs.coef_, atol=1e-3)


@pytest.mark.parametrize("k", [2, 4])
def test_standardised_fits_are_given_in_raw_space(k: int) -> None:
    x, y = problem(300, 10, k, decay=2.0)
    scaled = (x - x.mean(0)) / x.std(0)
    ((raw,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), 0.1, standardize=True, tol=1e-10)
    ((inner,),) = fit_path(torch.from_numpy(scaled), torch.from_numpy(y), 0.1, tol=1e-10)
    torch.testing.assert_close(raw.coef * torch.from_numpy(x.std(0)), inner.coef, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        raw.logits(torch.from_numpy(x)), inner.logits(torch.from_numpy(scaled)), atol=1e-5, rtol=1e-5
    )


def test_softmax_form_of_two_classes_gives_the_same_probabilities() -> None:
    x, y = problem(100, 4, 2)
    features = torch.from_numpy(x)
    ((fit,),) = fit_path(features, torch.from_numpy(y), 1.0)
    decision = features @ fit.coef[0] + fit.intercept[0]
    torch.testing.assert_close(fit.logits(features).softmax(1)[:, 1], decision.sigmoid())
    assert fit.softmax()[0].shape == (2, 4)


def test_float32_far_from_the_origin_loses_nothing() -> None:
    """Centring comes before rounding, so a large common offset doesn't cost the digits."""
    x, y = problem(400, 10, 3)
    ((near,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), 1.0, tol=1e-8)
    far = Factorised.of(torch.from_numpy(x + 1e6), dtype=torch.float32)
    ((shifted,),) = fit_path(far, torch.from_numpy(y), 1.0, tol=1e-8)
    assert shifted.objective == pytest.approx(near.objective, rel=1e-6)


@pytest.mark.parametrize("refactor", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("standardize", [False, True])
def test_projecting_out_equals_fitting_the_projected_features(refactor: tuple[bool, bool], standardize: bool) -> None:
    x, y = problem(300, 12, 4, decay=1.0)
    basis = torch.linalg.qr(torch.from_numpy(np.random.default_rng(3).standard_normal((12, 3)))).Q.T
    features, labels = torch.from_numpy(x), torch.from_numpy(y)
    shared = Factorised.of(features, standardize=standardize)
    step = shared.project_out(basis[:1], refactor=refactor[0]).project_out(basis[1:], refactor=refactor[1])
    ((fit,),) = fit_path(step, labels, 1.0, tol=1e-12)
    assert float((fit.coef @ basis.T).abs().max()) < 1e-8
    if not standardize:
        ((plain,),) = fit_path(features - features @ basis.T @ basis, labels, 1.0, tol=1e-12)
        torch.testing.assert_close(fit.coef, plain.coef, atol=1e-5, rtol=1e-4)
    ((before,),) = fit_path(shared, labels, 1.0)
    assert fit.objective > before.objective  # something was taken away


def test_absent_classes_get_a_column_that_is_never_chosen() -> None:
    x, y = problem(200, 5, 3)
    ((fit,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), 1.0, n_classes=5)
    assert fit.coef.shape == (5, 5)
    assert set(fit.predict(torch.from_numpy(x)).tolist()) <= {0, 1, 2}


def test_rows_of_weight_zero_are_as_good_as_absent() -> None:
    x, y = problem(200, 5, 3)
    weight = torch.ones(200, dtype=torch.float64)
    weight[150:] = 0
    features, labels = torch.from_numpy(x), torch.from_numpy(y)
    ((weighted,),) = fit_path(features, labels, 1.0, weight, tol=1e-10)
    ((dropped,),) = fit_path(features[:150], labels[:150], 1.0, tol=1e-10)
    torch.testing.assert_close(weighted.coef, dropped.coef, atol=1e-6, rtol=1e-5)


def test_max_iter_ends_it_and_says_so() -> None:
    x, y = problem(300, 30, 5, signal=3.0)
    ((fit,),) = fit_path(torch.from_numpy(x), torch.from_numpy(y), 100.0, tol=1e-8, max_iter=2)
    assert fit.n_iter == 2
    assert not fit.converged
    assert fit.gap > 1e-8


def test_random_state_and_threads_are_left_alone() -> None:
    x, y = problem(100, 5, 3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    first = fit_path(torch.from_numpy(x).float(), torch.from_numpy(y))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    again = fit_path(torch.from_numpy(x).float(), torch.from_numpy(y))
    assert all(torch.equal(a.coef, b.coef) for a, b in zip(first[0], again[0]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d"), [(200, 10), (30, 80)])
def test_ridge_is_that_of_scikit_learn(n: int, d: int, weighted: bool) -> None:
    x, _ = problem(n, d, 2)
    rng = np.random.default_rng(2)
    targets = x[:, :2] @ rng.standard_normal((2, 3)) + rng.standard_normal((n, 3))
    weight = rng.uniform(0, 2, n) if weighted else None
    alphas = [1e-3, 1.0, 100.0]
    fits = ridge_path(
        torch.from_numpy(x), torch.from_numpy(targets), alphas, None if weight is None else torch.from_numpy(weight)
    )
    for alpha, fit in zip(alphas, fits):
        theirs = Ridge(alpha=alpha).fit(x, targets, weight)
        np.testing.assert_allclose(fit.coef, theirs.coef_, atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(fit.predict(torch.from_numpy(x)), theirs.predict(x), atol=1e-5)


def test_ridge_after_a_projection_ignores_what_was_removed() -> None:
    x, _ = problem(200, 6, 2)
    target = torch.from_numpy(x[:, 0] + x[:, 1])
    shared = Factorised.of(torch.from_numpy(x), standardize=True).project_out(torch.eye(6)[:1])
    (fit,) = ridge_path(shared, target, 1e-6)
    assert abs(float(fit.coef[0, 0])) < 1e-8
    assert float(fit.coef[0, 1]) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"X": torch.randn(10)}, ShapeError, "must be \\(n, d\\)"),
        ({"X": torch.full((10, 3), torch.nan)}, InputError, "NaN or infinity in 10 of 10 rows"),
        ({"ys": torch.zeros(10).long()}, InputError, "one class only"),
        ({"ys": torch.arange(9)}, ShapeError, "must be \\(10,\\)"),
        ({"ys": torch.rand(10)}, InputError, "must be integers"),
        ({"ys": torch.arange(10) - 1}, InputError, "ids from -1 to 8"),
        ({"Cs": [1.0, -1.0]}, InputError, "positive"),
        ({"Cs": []}, InputError, "at least one"),
        ({"tol": 0.0}, InputError, "tol"),
        ({"sample_weight": -torch.ones(10)}, InputError, "not negative"),
        ({"sample_weight": torch.ones(3)}, ShapeError, "one per row"),
        ({"n_classes": [3, 3]}, InputError, "one for each"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], error: type[Exception], text: str) -> None:
    good: dict[str, object] = {"X": torch.randn(10, 3), "ys": torch.arange(10) % 3, "Cs": 1.0}
    fit_path(**good)  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        fit_path(**{**good, **change})  # type: ignore[arg-type]


def test_what_features_remember_of_one_label_set_does_not_reach_another() -> None:
    x, y = problem(300, 12, 2)
    features, labels = torch.from_numpy(x), torch.from_numpy(y)
    shared = Factorised.of(features)
    other = labels.roll(7)
    for each in (labels, other, labels):
        ((again,),) = fit_path(shared, each, 1.0, tol=1e-10)
        ((fresh,),) = fit_path(Factorised.of(features), each, 1.0, tol=1e-10)
        torch.testing.assert_close(again.coef, fresh.coef, atol=1e-7, rtol=1e-5)
    ((one,),) = fit_path(shared, other, 1.0)
    ((two,),) = fit_path(shared, labels, 1.0)
    assert float((one.coef - two.coef).abs().max()) > 0.1


@pytest.mark.parametrize("columns", [3, 40])
def test_products_in_parts_are_the_products(columns: int) -> None:
    x, weights = torch.randn(2100, 30, dtype=torch.float64), torch.randn(columns, 30, dtype=torch.float64)
    torch.testing.assert_close(logistic._logits(x, weights), x @ weights.T)

"""LinearProbe and RidgeProbe: scikit-learn estimators that also take tensors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.probing import LinearProbe, RidgeProbe


def blobs(n: int = 300, d: int = 6, k: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    return rng.standard_normal((k, d))[y] + rng.standard_normal((n, d)), y


@parametrize_with_checks([LinearProbe(), LinearProbe(standardize=True), RidgeProbe()])
def test_scikit_learn_conformance(estimator: object, check: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        check(estimator)  # type: ignore[operator]


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_everything_agrees_with_logistic_regression(k: int, class_weight: str | None) -> None:
    x, y = blobs(k=k)
    names = np.array(["ab", "bc", "cd", "de", "ef"])[y]
    ours = LinearProbe(C=0.5, tol=1e-10, class_weight=class_weight).fit(x, names)
    theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=5000, class_weight=class_weight).fit(x, names)
    assert ours.classes_.tolist() == theirs.classes_.tolist()
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-4)
    np.testing.assert_allclose(ours.decision_function(x), theirs.decision_function(x), atol=1e-3)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-4)
    np.testing.assert_allclose(ours.predict_log_proba(x), theirs.predict_log_proba(x), atol=1e-3)
    assert (ours.predict(x) == theirs.predict(x)).mean() > 0.99
    assert ours.score(x, names) == pytest.approx(theirs.score(x, names), abs=0.01)


def test_float32_features_of_a_layer_reach_the_accuracy_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    decay = np.arange(1, 97) ** -0.5
    z = rng.standard_normal((6000, 96))
    y = (z @ (rng.standard_normal((96, 11)) * decay[:, None]) * 2 + rng.gumbel(size=(6000, 11))).argmax(1)
    x = ((z * decay) @ np.linalg.qr(rng.standard_normal((96, 96)))[0]).astype(np.float32)
    ours = LinearProbe(C=1.0).fit(x[:4000], y[:4000])
    theirs = LogisticRegression(C=1.0, max_iter=2000, tol=1e-6).fit(x[:4000].astype(float), y[:4000])
    p = theirs.predict_log_proba(x[:4000].astype(float))
    best = -p[np.arange(4000), y[:4000]].sum() + 0.5 * (theirs.coef_**2).sum()
    assert ours.objective_ == pytest.approx(best, rel=1e-4)
    assert ours.score(x[4000:], y[4000:]) == pytest.approx(theirs.score(x[4000:], y[4000:]), abs=0.002)
    assert theirs.score(x[4000:], y[4000:]) > 0.3  # there is something to agree on


def test_tensors_and_arrays_give_the_same_probe() -> None:
    x, y = blobs()
    array = LinearProbe().fit(x, y)
    tensor = LinearProbe().fit(torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_allclose(array.coef_, tensor.coef_)
    assert isinstance(tensor.predict(torch.from_numpy(x)), np.ndarray)
    assert (tensor.predict(torch.from_numpy(x).float()) == array.predict(x)).all()
    assert tensor.score(torch.from_numpy(x), y) == array.score(x, y)


def test_half_precision_tensors_that_need_gradients_are_fine() -> None:
    x, y = blobs()
    half = torch.from_numpy(x).half().requires_grad_()
    assert LinearProbe().fit(half, y).score(half, y) > 0.6


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("standardize", [False, True])
def test_raw_coefficients_have_a_row_per_class_and_act_on_raw_features(k: int, standardize: bool) -> None:
    x, y = blobs(k=k)
    x = x * np.logspace(-2, 2, 6) + 5
    probe = LinearProbe(standardize=standardize).fit(x, y)
    logits = x @ probe.raw_coef_.T + probe.raw_intercept_
    assert probe.raw_coef_.shape == (k, 6)
    p = torch.from_numpy(logits).softmax(1).numpy()
    np.testing.assert_allclose(p, probe.predict_proba(x), atol=1e-8)


def test_standardising_inside_equals_a_pipeline_and_differs_from_none() -> None:
    x, y = blobs()
    x = x * np.logspace(-2, 2, 6)
    inside = LinearProbe(C=0.01, standardize=True, tol=1e-10).fit(x, y)
    outside = make_pipeline(StandardScaler(), LinearProbe(C=0.01, tol=1e-10)).fit(x, y)
    np.testing.assert_allclose(inside.predict_proba(x), outside.predict_proba(x), atol=1e-5)
    plain = LinearProbe(C=0.01, tol=1e-10).fit(x, y)
    assert np.abs(plain.predict_proba(x) - inside.predict_proba(x)).max() > 0.01


def test_it_can_be_cloned_and_searched() -> None:
    x, y = blobs()
    search = GridSearchCV(LinearProbe(), {"C": [1e-3, 1.0]}, cv=3).fit(x, y)
    assert search.best_score_ > 0.6
    assert clone(search.best_estimator_).get_params()["C"] == search.best_params_["C"]


def test_stopping_early_warns() -> None:
    x, y = blobs()
    with pytest.warns(ConvergenceWarning, match="Raise max_iter"):
        LinearProbe(C=1e3, max_iter=1, tol=1e-9).fit(x, y)


def test_ridge_probe_agrees_with_ridge() -> None:
    x, y = blobs()
    ours, theirs = RidgeProbe(alpha=2.0).fit(x, y), Ridge(alpha=2.0).fit(x, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-8)
    assert ours.intercept_ == pytest.approx(theirs.intercept_)
    assert ours.score(torch.from_numpy(x), y) == pytest.approx(theirs.score(x, y))
    assert RidgeProbe().fit(x, np.stack([y, y], 1)).predict(x).shape == (300, 2)


@pytest.mark.parametrize(
    ("x", "y", "error", "text"),
    [
        (torch.randn(10, 2), torch.zeros(10), InputError, "one class only"),
        (torch.randn(10, 2), torch.arange(9), ShapeError, "9 labels for 10 rows"),
        (torch.full((10, 2), torch.inf), torch.arange(10) % 2, InputError, "NaN or infinity"),
        (torch.randn(10, 2, 2), torch.arange(10) % 2, ShapeError, "reshape"),
    ],
)
def test_bad_tensors_are_named(x: torch.Tensor, y: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LinearProbe().fit(x, y)


def test_wrong_width_and_unfitted_probes_are_errors() -> None:
    x, y = blobs()
    with pytest.raises(NotFittedError):
        LinearProbe().predict(torch.from_numpy(x))
    probe = LinearProbe().fit(x, y)
    with pytest.raises(ShapeError, match="4 features"):
        probe.predict(torch.randn(3, 4))


def test_it_is_exported() -> None:
    assert pl.LinearProbe is LinearProbe

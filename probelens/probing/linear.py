"""LinearProbe and RidgeProbe: the solvers as scikit-learn estimators."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.probing.solvers.factor import Factorised, as_features, row_weights
from probelens.probing.solvers.logistic import fit_path
from probelens.probing.solvers.ridge import ridge_path

__all__ = ["LinearProbe", "RidgeProbe"]


class _Linear(BaseEstimator):
    """What both probes share: reading arrays and tensors, and the affine map."""

    coef_: np.ndarray
    intercept_: np.ndarray
    n_features_in_: int

    def _features(self, X: Any) -> Tensor:
        """Checked features of a fitted probe; tensors stay on their device. (n, d)"""
        check_is_fitted(self)
        if not isinstance(X, Tensor):
            dtypes = [np.float64, np.float32]
            return _tensor(validate_data(self, X, dtype=dtypes, ensure_min_samples=1, reset=False))
        x = as_features(X)
        if x.shape[1] != self.n_features_in_:
            raise ShapeError(
                f"X has {x.shape[1]} features, but {type(self).__name__} was fitted on {self.n_features_in_}"
            )
        return x

    def _training(self, X: Any, y: Any, **checks: Any) -> tuple[Tensor, np.ndarray]:
        if isinstance(y, Tensor):
            # NumPy has no bfloat16.
            y = (y.float() if y.dtype == torch.bfloat16 else y).detach().cpu().numpy()
        if not isinstance(X, Tensor):
            x, y = validate_data(self, X, y, dtype=[np.float64, np.float32], **checks)
            return _tensor(x), y
        x = as_features(X)
        count = len(y) if np.ndim(y) else 0
        if count != len(x):
            raise ShapeError(f"y has {count} labels for {len(x)} rows of X; give one per row")
        y = check_array(y, ensure_2d=False, allow_nd=True, dtype=None)
        self.__dict__.pop("feature_names_in_", None)
        self.n_features_in_ = x.shape[1]
        return x, y

    @exact
    def _affine(self, X: Any) -> np.ndarray:
        x = self._features(X)
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        coef = torch.as_tensor(self.coef_, dtype=dtype, device=x.device)
        intercept = torch.as_tensor(self.intercept_, dtype=dtype, device=x.device)
        return (x.to(dtype) @ torch.atleast_2d(coef).T + intercept).cpu().numpy()


class LinearProbe(ClassifierMixin, _Linear):
    """Logistic regression with scikit-learn's objective and conventions, from tensors or arrays.

    Minimises C · Σᵢ wᵢ · log-lossᵢ + ½‖W‖², multinomial for more than two classes. Tensors are used where
    they are, on a GPU too. Everything returned is numpy.

    Args:
        C: Inverse strength of the penalty.
        tol: Relative gap in the objective to stop at.
        max_iter: Most iterations.
        class_weight: None, "balanced", or weight by class.
        fit_intercept: Whether to fit an intercept, which isn't penalised.
        standardize: Penalise the weights of standardised features, so that C means the same at every layer. ``coef_``
            applies to the features as given all the same.

    Attributes:
        classes_: The labels, sorted. (n_classes,)
        coef_: As in scikit-learn: one row per class, a single one for two classes. (k, d)
        intercept_: (k,)
        raw_coef_: One row per class for two classes as well: the directions for a subspace. (n_classes, d)
        raw_intercept_: (n_classes,)
        objective_: Value reached, in nats.
        gap_: Estimated relative distance of it from the minimum.
        n_iter_: Iterations. (1,)
        n_features_in_: d.

    Source:
        Alain and Bengio 2016, arXiv 1610.01644, for linear probes.

    Examples:
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> probe = LinearProbe().fit(x, x[:, 1] > 0)
        >>> probe.score(x, (x[:, 1] > 0).numpy()) > 0.95
        True
    """

    def __init__(
        self,
        C: float = 1.0,
        *,
        tol: float = 1e-6,
        max_iter: int = 1000,
        class_weight: Any = None,
        fit_intercept: bool = True,
        standardize: bool = False,
    ) -> None:
        self.C = C
        self.tol = tol
        self.max_iter = max_iter
        self.class_weight = class_weight
        self.fit_intercept = fit_intercept
        self.standardize = standardize

    @exact
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LinearProbe:
        """Fit the probe.

        Args:
            X: Features. (n, d)
            y: Labels of any type. (n,)
            sample_weight: Weight of each row. (n,)

        Returns:
            The probe itself.

        Raises:
            InputError: One class only, NaN or infinity, or a parameter out of range.
            ShapeError: Labels or weights don't fit the rows.

        Warns:
            ConvergenceWarning: ``max_iter`` iterations didn't reach ``tol``.
        """
        x, y = self._training(X, y)
        check_classification_targets(y)
        self.classes_, ids = np.unique(y, return_inverse=True)
        weights = row_weights(sample_weight, x)
        weight = None if weights is None else weights.cpu().numpy()
        seen = np.unique(ids if weight is None else ids[weight != 0])
        if len(seen) < 2:
            raise InputError(
                f"y has one class only, {self.classes_[seen[0]]!r}, in the rows with a weight; "
                "a probe needs at least two classes"
            )
        if self.class_weight is not None:
            if isinstance(self.class_weight, str) and self.class_weight == "balanced":
                # Before version 1.7 scikit-learn's own leaves sample weights out of it.
                counts = np.bincount(ids.reshape(-1), weights=weight, minlength=len(self.classes_))
                per_class = counts.sum() / (len(counts) * np.where(counts > 0, counts, np.inf))
            else:
                per_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            weight = per_class[ids] if weight is None else weight * per_class[ids]
        shared = Factorised.of(x, weight, fit_intercept=self.fit_intercept, standardize=self.standardize)
        labels = torch.as_tensor(ids.reshape(-1), device=x.device)
        ((fit,),) = fit_path(
            shared, labels, float(self.C), n_classes=len(self.classes_), tol=self.tol, max_iter=self.max_iter
        )
        if not fit.converged:
            warnings.warn(
                f"the solver stopped after {fit.n_iter} iterations at an estimated relative gap of "
                f"{fit.gap:.1e}, above tol={self.tol}. Raise max_iter, lower C, or standardise the features.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.coef_, self.intercept_ = fit.coef.cpu().numpy(), fit.intercept.cpu().numpy()
        raw, raw_intercept = fit.softmax()
        self.raw_coef_, self.raw_intercept_ = raw.cpu().numpy(), raw_intercept.cpu().numpy()
        self.objective_, self.gap_ = fit.objective, fit.gap
        self.n_iter_ = np.array([fit.n_iter], dtype=np.int32)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits; for two classes, that of the second.

        Args:
            X: Features. (n, d)

        Returns:
            Logits: (n, n_classes), or (n,) for two classes.
        """
        logits = self._affine(X)
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class of each row.

        Args:
            X: Features. (n, d)

        Returns:
            Labels, as they were given to ``fit``. (n,)
        """
        logits = self.decision_function(X)
        return self.classes_[(logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(1)]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log-probability of each class.

        Args:
            X: Features. (n, d)

        Returns:
            Nats. (n, n_classes)
        """
        logits = self.decision_function(X)
        if logits.ndim == 1:
            logits = np.stack([np.zeros_like(logits), logits], 1)
        return torch.log_softmax(torch.as_tensor(logits), 1).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class.

        Args:
            X: Features. (n, d)

        Returns:
            Probabilities; each row adds up to 1. (n, n_classes)
        """
        return np.exp(self.predict_log_proba(X))


class RidgeProbe(RegressorMixin, _Linear):
    """Ridge regression with scikit-learn's objective, from tensors or arrays.

    Args:
        alpha: Strength of the penalty.
        fit_intercept: Whether to fit an intercept, which isn't penalised.
        standardize: Penalise the weights of standardised features.

    Attributes:
        coef_: (d,), or (k, d) for several targets.
        intercept_: A number, or (k,).
        n_features_in_: d.

    Examples:
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> RidgeProbe(alpha=1e-3).fit(x, 3 * x[:, 1]).coef_.round(2) + 0
        array([0., 3., 0., 0.])
    """

    def __init__(self, alpha: float = 1.0, *, fit_intercept: bool = True, standardize: bool = False) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @exact
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RidgeProbe:
        """Fit the probe.

        Args:
            X, sample_weight: As for ``LinearProbe.fit``.
            y: Targets. (n,) or (n, k)

        Returns:
            The probe itself.

        Raises:
            InputError: NaN or infinity, or a parameter out of range.
            ShapeError: Targets or weights don't fit the rows.
        """
        x, y = self._training(X, y, multi_output=True, y_numeric=True)
        (fit,) = ridge_path(
            x,
            torch.as_tensor(np.asarray(y, dtype=np.float64)),
            float(self.alpha),
            sample_weight,
            fit_intercept=self.fit_intercept,
            standardize=self.standardize,
        )
        self.coef_, self.intercept_ = fit.coef.cpu().numpy(), fit.intercept.cpu().numpy()
        if y.ndim == 1:
            self.coef_, self.intercept_ = self.coef_[0], self.intercept_[0]
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predicted targets.

        Args:
            X: Features. (n, d)

        Returns:
            Predictions in the targets' unit: (n,) or (n, k).
        """
        out = self._affine(X)
        return out[:, 0] if np.ndim(self.intercept_) == 0 else out


def _tensor(array: np.ndarray) -> Tensor:
    # torch warns about read-only memory, which joblib and pandas hand out.
    return torch.from_numpy(array if array.flags.writeable else array.copy())

"""Ridge regression for numeric labels: every penalty and every label from one eigendecomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.probing.solvers.factor import Factorised

__all__ = ["RidgeFit", "ridge_path"]


@dataclass(frozen=True, eq=False)
class RidgeFit:
    """One solved ridge regression, in the space of the features that were given.

    Args:
        alpha: Strength of the penalty, as in scikit-learn.
        coef: One row per target. (k, d) float64
        intercept: (k,) float64
    """

    alpha: float
    coef: Tensor
    intercept: Tensor

    @exact
    def predict(self, X: Tensor) -> Tensor:
        """Predicted targets.

        Args:
            X: Features, as given to the fit. (n, d)

        Returns:
            Predictions in the targets' unit. (n, k)
        """
        return X @ self.coef.T.to(X) + self.intercept.to(X)


@exact
def ridge_path(
    X: Tensor | Factorised | Any,
    Y: Tensor | Any,
    alphas: float | Sequence[float] = 1.0,
    sample_weight: Tensor | None = None,
    *,
    fit_intercept: bool = True,
    standardize: bool = False,
) -> list[RidgeFit]:
    """Minimise Σᵢ wᵢ‖yᵢ − Wxᵢ − b‖² + α‖W‖² for several penalties at once.

    Args:
        X: Features, or their `Factorised` to use again. (n, d)
        Y: Targets, one or several. (n,) or (n, k)
        alphas: Penalties, not negative; at 0, the least-squares solution of the smallest norm.
        sample_weight, fit_intercept, standardize: As for ``probing.fit_path``.

    Returns:
        One fit per penalty, in the order given.

    Raises:
        InputError: Targets or penalties that aren't finite numbers, or a negative penalty.
        ShapeError: Targets that don't fit the rows.

    Source:
        Hoerl and Kennard 1970; the objective is that of scikit-learn's Ridge.

    Examples:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> ridge_path(x, 2 * x[:, 0] + 1, alphas=0.0)[0].coef.round(decimals=4)
        tensor([[2.]], dtype=torch.float64)
    """
    if isinstance(X, Factorised):
        if sample_weight is not None:
            raise InputError("sample_weight was given with factorised features: give it to Factorised.of")
        shared = X.exactly()
    else:
        shared = Factorised.of(X, sample_weight, fit_intercept=fit_intercept, standardize=standardize, precise=True)
    targets = torch.as_tensor(Y, device=shared.x.device).detach().double()
    targets = targets[:, None] if targets.ndim == 1 else targets
    if targets.ndim != 2 or len(targets) != shared.n:
        raise ShapeError(f"Y has shape {tuple(targets.shape)}; it must be ({shared.n},) or ({shared.n}, k)")
    if not bool(torch.isfinite(targets).all()):
        raise InputError("Y has NaN or infinity: mask the rows without a label")
    penalties = [float(a) for a in (alphas if hasattr(alphas, "__len__") else [alphas])]  # type: ignore[union-attr]
    if not penalties or not all(0 <= a < math.inf for a in penalties):
        raise InputError(f"alphas={alphas!r}: give at least one penalty, each a number of at least 0")

    weight = shared.weight
    mean = torch.zeros(targets.shape[1], dtype=torch.float64, device=targets.device)
    if shared.fit_intercept:
        mean = targets.mean(0) if weight is None else weight @ targets / weight.sum()
    centred = targets - mean
    cross = shared.cross(centred if weight is None else centred * weight[:, None]) @ shared.vectors
    out = []
    for alpha in penalties:
        coef = (cross / (shared.values + alpha)) @ shared.vectors.T / shared.scale
        out.append(RidgeFit(alpha, coef, mean - coef @ shared.mean))
    return out

"""The preconditioner of a logistic regression: the inverse Hessian, if predictions were the same in every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.probing.solvers.factor import Factorised

# From gradients by weights and intercepts to a step back.
Metric = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """Inverse of C · S ⊗ XᵀX + I for the weights and of C · n · S for the intercepts.

    S is the mean covariance of the predicted classes. Were it the same in every row, this would be the inverse Hessian.
    """

    shared: Factorised
    vectors: Tensor  # of XᵀX, in the dtype of the fit (d, r)
    inverse: Tensor  # in their basis, for each eigenvector of S (k, r)
    classes: Tensor  # eigenvectors of S, as columns (k, k)
    intercept: Tensor  # the inverse for the intercepts, for each eigenvector of S (k,)
    # Directions Q (m, d) removed after the factorisation, QV (m, r), and (Q M⁻¹ Qᵀ)⁻¹ for each inverted M (k, m, m).
    constraint: tuple[Tensor, Tensor, Tensor] | None

    def __call__(self, gw: Tensor, gb: Tensor) -> tuple[Tensor, Tensor]:
        w, b = gw.to(self.vectors.dtype), gb.to(self.vectors.dtype)
        if len(b) > 1:
            # One constant added to all intercepts changes nothing: no curvature there to divide by.
            b = b - b.mean()
        w = self.classes @ self._inverse(self.classes.T @ w)
        b = self.classes @ (self.intercept * (self.classes.T @ b))
        return self.shared.restrict(w.to(gw.dtype)), b.to(gb.dtype)

    def _inverse(self, w: Tensor) -> Tensor:
        inside = w @ self.vectors
        if self.constraint is not None:
            # What the inverse would give along removed directions is taken out before it is applied.
            removed, seen, inner = self.constraint
            along = (self.inverse * inside) @ seen.T
            if not self._spanned:
                along = along + self._rest(w, inside) @ removed.T
            pull = torch.einsum("kij,kj->ki", inner, along)
            w, inside = w - pull @ removed, inside - pull @ seen
        out = (self.inverse * inside) @ self.vectors.T
        return out if self._spanned else out + self._rest(w, inside)

    @property
    def _spanned(self) -> bool:
        return self.vectors.shape[0] == self.vectors.shape[1]

    def _rest(self, w: Tensor, inside: Tensor) -> Tensor:
        """What lies outside the span of the features, where only the penalty curves."""
        # Twice, since one subtraction leaves rounding errors that are large beside the smallest eigenvalues of
        # the inverse.
        rest = w - inside @ self.vectors.T
        return rest - (rest @ self.vectors) @ self.vectors.T

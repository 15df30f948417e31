"""Features with what every fit on them shares: centring, eigendecomposition, projections.

Fits for every C, label set, control and INLP step share the same features. `Factorised` does the costly part once: the
eigendecomposition of the Gram matrix, which preconditions any multinomial problem and solves ridge for every penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.numerics.tensors import tensor_of

__all__ = ["Factorised", "as_features"]

_CHUNK = 4096  # rows of a product that is summed in float64
_BLOCKS = 4  # of columns, in which a Gram matrix is formed
_CACHED = 2**17  # numbers promoted to float64 at once: as many as stay in the cache
_SMALL = 2_000_000  # elements up to which float64 features stay float64


@dataclass(frozen=True, eq=False)
class Factorised:
    """Centred, perhaps scaled features and the eigendecomposition of their Gram matrix.

    Make one with `Factorised.of`; `fit_path` and `ridge_path` accept it in place of the features. What they
    return is in the space of the features as given: means and scales are folded back in.

    Args:
        x: Centred and scaled features, in the dtype of the fit. (n, d)
        mean: What was subtracted. (d,)
        scale: What was divided by, ones without standardising. (d,)
        weight: Weight of each row, None for ones. (n,)
        values: Eigenvalues of the weighted Gram matrix of x above rounding error. (r,)
        vectors: Their eigenvectors, as columns. (d, r)
        gram: The weighted Gram matrix; None where n < d, where it is not formed. (d, d)
        precise: Whether the Gram matrix was summed in float64.
        removed: Orthonormal rows spanning what was projected out, on the scale of x. (k, d)
        fit_intercept: Whether the features are centred.
        refactored: Whether values and vectors are those of the features without what was projected out.
        memo: Tensors that all factorisations of these features share: by name, made of what, and the tensor. each (...)

    Units:
        Memory: one copy of the features, none with ``overwrite``, plus d² numbers in float64.

    Examples:
        >>> x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
        >>> shared = Factorised.of(x)
        >>> shared.n, shared.d
        (100, 5)
    """

    x: Tensor
    mean: Tensor
    scale: Tensor
    weight: Tensor | None
    values: Tensor
    vectors: Tensor
    gram: Tensor | None
    removed: Tensor | None
    fit_intercept: bool
    precise: bool
    _source: Tensor | None  # the features as given; None where they were overwritten
    refactored: bool = False
    memo: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _exact: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    @exact
    def of(
        cls,
        X: Any,
        sample_weight: Any = None,
        *,
        fit_intercept: bool = True,
        standardize: bool = False,
        precise: bool = False,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> Factorised:
        """Centre and factorise features.

        Args:
            X: Features, a tensor or an array. (n, d)
            sample_weight: Non-negative weight of each row, or one for all. (n,)
            fit_intercept: Centre the features. Off, models go through the origin.
            standardize: Divide each feature by its standard deviation, so that a penalty treats all equally.
            precise: Sum the Gram matrix in float64 although the products are float32, as ridge regression needs.
            dtype: Of the products: float32 or float64. None: float64 for small float64 features, float32 otherwise.
            overwrite: Centre and scale X itself, where it has that dtype and is centred: no copy is made, and X is lost.

        Returns:
            The factorised features, on the device of X.

        Raises:
            ShapeError: X isn't two-dimensional or the weights don't fit it.
            InputError: No rows, NaN or infinity, or weights that are negative or sum to zero.
        """
        source = as_features(X)
        weight = row_weights(sample_weight, source)
        total = float(len(source)) if weight is None else float(weight.sum())
        if dtype is None:
            small = source.dtype == torch.float64 and source.numel() <= _SMALL
            dtype = torch.float64 if small else torch.float32
        mean = _sum(source, weight) / total
        overwrite = overwrite and fit_intercept and source.dtype == dtype
        x = source if overwrite else torch.empty(source.shape, dtype=dtype, device=source.device)
        for rows in _cached(source):
            x[rows] = (source[rows].double() - mean).to(dtype)
        deviation = (_sum(x, weight, squared=True) / total).sqrt()
        constant = deviation <= 1e-12 * mean.abs().clamp(min=1e-150)
        scale = torch.where(constant, 1.0, deviation) if standardize else torch.ones_like(deviation)
        if not fit_intercept:
            mean = torch.zeros_like(mean)
            x.copy_(source)
        if standardize:
            x /= scale.to(dtype)
        precise = precise or dtype == torch.float64
        values, vectors, gram = _eigen(x, weight, precise)
        return cls(
            x, mean, scale, weight, values, vectors, gram, None, fit_intercept, precise, None if overwrite else source
        )

    @property
    def n(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @property
    def d(self) -> int:
        """Features."""
        return self.x.shape[1]

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.n) if self.weight is None else float(self.weight.sum())

    def at(self, dtype: torch.dtype) -> Tensor:
        """The centred features in another dtype; a float64 copy is made once and kept.

        Args:
            dtype: float32 or float64.

        Returns:
            Centred and scaled features. (n, d)
        """
        if dtype == self.x.dtype:
            return self.x
        if (key := str(dtype)) not in self._exact:
            given = self._source
            self._exact[key] = (self.x if given is None else (given.double() - self.mean) / self.scale).to(dtype)
        return self._exact[key]

    def rotation(self) -> Tensor:
        """The eigenvectors in the dtype of the fit. (d, r)"""
        kept = self.memo.get("vectors")
        if kept is None or kept[0] is not self.vectors:
            kept = self.memo["vectors"] = self.vectors, self.vectors.to(self.x.dtype)
        return kept[1]

    @exact
    def project_out(self, basis: Tensor, *, refactor: bool = False) -> Factorised:
        """The same features without a subspace, as in INLP; no copy of the features is made.

        A fit on x(I − QᵀQ) is a fit on x whose weights are kept in the complement of Q: so the features
        stay, and weights and gradients are projected.

        Args:
            basis: Further directions to remove, in the space of the features as given. (k, d)
            refactor: Recompute the eigendecomposition, O(d³). The solver doesn't need it.

        Returns:
            Features that share this one's memory.

        Raises:
            ShapeError: The directions have another width.

        Examples:
            >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
            >>> Factorised.of(x).project_out(torch.eye(3)[:1]).removed.shape
            torch.Size([1, 3])
        """
        if basis.ndim != 2 or basis.shape[1] != self.d:
            raise ShapeError(f"basis has shape {tuple(basis.shape)}; it must be (k, {self.d}), directions in rows")
        # Weights u of the given features are w / scale: u ⟂ q means w ⟂ q / scale.
        rows = basis.to(self.mean) / self.scale
        if self.removed is not None:
            rows = torch.cat([self.removed, rows])
        removed = _orthonormal(rows)
        if not refactor:
            return replace(self, removed=removed, refactored=False)
        if self.gram is not None:
            gram = self.gram - (self.gram @ removed.T) @ removed
            gram = gram - removed.T @ (removed @ gram)
            values, vectors = _eigh((gram + gram.T) / 2, 1e-12)
        else:
            cut = removed.to(self.x.dtype)
            values, vectors, _ = _eigen(self.x - (self.x @ cut.T) @ cut, self.weight, self.precise)
        return replace(self, removed=removed, values=values, vectors=vectors, refactored=True)

    def exactly(self) -> Factorised:
        """The same with a float64 eigendecomposition of the features as they are, projections included."""
        full = self
        if not self.precise:
            values, vectors, gram = _eigen(self.x, self.weight, True)
            full = replace(self, values=values, vectors=vectors, gram=gram, precise=True, refactored=False)
        return full if self.removed is None else full.project_out(self.removed[:0], refactor=True)

    @exact
    def cross(self, columns: Tensor) -> Tensor:
        """columnsᵀ x, summed in float64.

        Args:
            columns: One row for each row of the features. (n, k)

        Returns:
            The products. (k, d)
        """
        out = torch.zeros(columns.shape[1], self.d, dtype=torch.float64, device=self.x.device)
        for some, x in zip(columns.split(_CHUNK), self.x.split(_CHUNK), strict=True):
            out += some.double().T @ x.double()
        return out

    @exact
    def restrict(self, weights: Tensor) -> Tensor:
        """Weights or gradients with the removed directions taken out.

        Args:
            weights: On the scale of x. (k, d)

        Returns:
            The part that reads what is left. (k, d)
        """
        if self.removed is None:
            return weights
        cut = self.removed.to(weights.dtype)
        return weights - (weights @ cut.T) @ cut


def as_features(X: Any) -> Tensor:
    """A finite floating (n, d) tensor of anything array-like; tensors keep their memory and device."""
    x = tensor_of("X", X).detach()
    if x.ndim != 2:
        raise ShapeError(
            f"X has shape {tuple(x.shape)}; it must be (n, d), one row per observation. "
            "Flatten (n, pos, d) with x.reshape(-1, x.shape[-1])."
        )
    if x.numel() == 0:
        raise InputError(f"X has shape {tuple(x.shape)}: there is nothing to fit. Check the mask and the split.")
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype() if x.dtype == torch.bool else torch.float64)
    # Where the sum is finite, so is every number: one cheap pass, and a closer look only where it isn't.
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        bad = (~torch.isfinite(x)).any(1).nonzero()[:, 0]
        raise InputError(
            f"X has NaN or infinity in {len(bad)} of {len(x)} rows, first in row {int(bad[0])}. "
            "Check the model's output, or mask these rows."
        )
    return x


def row_weights(sample_weight: Any, x: Tensor) -> Tensor | None:
    """Weights of the rows in float64, checked; a single number holds for all. (n,)"""
    if sample_weight is None:
        return None
    given = sample_weight if isinstance(sample_weight, Tensor) else np.asarray(sample_weight, dtype=np.float64)
    weight = torch.as_tensor(given, device=x.device).detach().double()
    weight = weight.expand(len(x)).clone() if weight.ndim == 0 else weight
    if weight.shape != x.shape[:1]:
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}; it must be ({len(x)},), one per row")
    if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()) or float(weight.sum()) <= 0:
        raise InputError("sample_weight must be finite and not negative, and the weights must not all be zero")
    return weight


def _sum(x: Tensor, weight: Tensor | None, squared: bool = False) -> Tensor:
    """Weighted sum of the rows, or of their squares, in float64. (d,)"""
    out = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for rows in _cached(x):
        part = x[rows].square() if squared else x[rows]
        out += part.double().sum(0) if weight is None else weight[rows] @ part.double()
    return out


def _eigen(x: Tensor, weight: Tensor | None, precise: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Eigenvalues, eigenvectors and, where it is the smaller one, the Gram matrix, in float64."""
    n, d = x.shape
    dtype = torch.float64 if precise else x.dtype
    root = None if weight is None else weight.sqrt()[:, None]
    if n < d:
        # The n × n matrix has the same nonzero eigenvalues.
        rows64 = x.double() if root is None else x.double() * root
        values, left = _eigh(rows64 @ rows64.T, 1e-13)
        return values, (rows64.T @ left) / values.sqrt(), None
    # On a common scale first: otherwise rounding errors of large features would exceed the small ones.
    size = (_sum(x, None, squared=True) / n).sqrt()
    size = torch.where(size > torch.finfo(x.dtype).tiny, size, 1.0).to(dtype)
    alike = float(size.min()) > 0.5 and float(size.max()) < 2
    gram = torch.zeros(d, d, dtype=torch.float64, device=x.device)
    width = -(-d // _BLOCKS)
    for rows in _chunks(n, _CHUNK):
        part = x[rows].to(dtype) if alike else x[rows].to(dtype) / size
        if root is not None:
            part = part * root[rows].to(dtype)
        for start in range(0, d, width):  # the half above the diagonal is enough
            gram[start : start + width, start:] += part[:, start : start + width].T @ part[:, start:]
    gram = gram.triu() + gram.triu(1).T
    if not alike:
        gram *= size.double() * size.double()[:, None]
    return *_eigh(gram, 1e-13 if precise else 1e-10), gram


def _eigh(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues above a fraction of the largest, and their eigenvectors."""
    if not bool(torch.isfinite(matrix).all()):
        raise InputError("the features are too large: their squares overflow. Scale them down.")
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > values[-1].clamp(min=0) * floor
    return values[keep], vectors[:, keep]


def _orthonormal(rows: Tensor) -> Tensor:
    _, size, basis = torch.linalg.svd(rows, full_matrices=False)
    return basis[size > size.max().clamp(min=1e-300) * 1e-10]


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _cached(x: Tensor) -> list[slice]:
    """Rows that stay in the cache while they are worked on; whole on a GPU."""
    return _chunks(len(x), max(1, _CACHED // x.shape[1]) if x.device.type == "cpu" else _CHUNK)

"""A linear subspace of activation space, and what can be done to activations with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.linalg import covariance_of, orthonormal_rows
from probelens.numerics.tensors import tensor_of, to_float64
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Subspace"]


@dataclass(frozen=True)
class Subspace(Result):
    """Orthonormal directions Q and the point μ around which they are removed.

    Maps compute in float64 and return the dtype and device of their input; gradients pass through.

    Args:
        basis: Q, orthonormal rows; none for the empty subspace. (rank, d)
        mean: μ, usually the mean activation. (d,)
        label: What the subspace is, for tables.

    Raises:
        ShapeError: Basis and mean that don't fit together.
        InputError: Rows that aren't orthonormal, or NaN.

    Examples:
        >>> plane = Subspace(torch.eye(3)[:2], mean=torch.ones(3))
        >>> plane.project_out(torch.tensor([5.0, 6.0, 7.0]))
        tensor([1., 1., 7.])
        >>> plane.project_out_raw(torch.tensor([5.0, 6.0, 7.0]))
        tensor([0., 0., 7.])
    """

    basis: Tensor
    mean: Tensor
    label: str = ""

    def __post_init__(self) -> None:
        basis = to_float64(tensor_of("basis", self.basis).detach())
        mean = to_float64(tensor_of("mean", self.mean).detach())
        if basis.ndim != 2 or mean.shape != basis.shape[1:]:
            raise ShapeError(
                f"a subspace needs a basis (rank, d) and a mean (d,), got {tuple(basis.shape)} and {tuple(mean.shape)}"
            )
        if len(basis) > basis.shape[1]:
            raise ShapeError(f"{len(basis)} directions can't be independent in width {basis.shape[1]}")
        off = (basis @ basis.mT - torch.eye(len(basis), dtype=basis.dtype, device=basis.device)).abs()
        if not bool(torch.isfinite(basis).all() and torch.isfinite(mean).all()):
            raise InputError("basis or mean hold NaN or infinity")
        if off.numel() and float(off.max()) > 1e-4:
            raise InputError(
                f"the rows of the basis aren't orthonormal (off by {float(off.max()):.2g}): "
                "make the subspace with probelens.subspaces.from_probe(rows, mean)"
            )
        if off.numel() and float(off.max()) > 1e-12:  # a basis that was stored in float32
            basis = orthonormal_rows(basis, tol=0.0)
        object.__setattr__(self, "basis", basis)
        object.__setattr__(self, "mean", mean.to(basis.device))

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.basis.shape[0]

    @property
    def d(self) -> int:
        """Width of the activations."""
        return self.basis.shape[1]

    def project_out(self, x: Tensor) -> Tensor:
        """x − QᵀQ(x − μ): the directions are set to their mean, everything else stays.

        Args:
            x: Activations. (..., d)

        Returns:
            (..., d)

        Raises:
            ShapeError: ``x`` has another width.
        """
        return self._apply(x, lambda full, q, mean: full - ((full - mean) @ q.mT) @ q)

    def project_out_raw(self, x: Tensor) -> Tensor:
        """x − QᵀQx: the directions are set to zero, which also moves the mean of x.

        What follows in a model then sees activations off their usual mean, and an effect may be that of the shift.

        Args:
            Those of ``Subspace.project_out``.

        Returns:
            (..., d)

        Raises:
            ShapeError: ``x`` has another width.
        """
        return self._apply(x, lambda full, q, mean: full - (full @ q.mT) @ q)

    def keep(self, x: Tensor) -> Tensor:
        """μ + QᵀQ(x − μ): only the directions vary, everything else is at its mean.

        Args:
            x: Activations. (..., d)

        Returns:
            (..., d)

        Raises:
            ShapeError: ``x`` has another width.
        """
        return self._apply(x, lambda full, q, mean: mean + ((full - mean) @ q.mT) @ q)

    def coordinates(self, x: Tensor) -> Tensor:
        """Q(x − μ).

        Args:
            x: Activations. (..., d)

        Returns:
            (..., rank)

        Raises:
            ShapeError: ``x`` has another width.
        """
        return self._apply(x, lambda full, q, mean: (full - mean) @ q.mT)

    def variance_removed(self, covariance: Tensor) -> float:
        """tr QΣQᵀ, the variance that ``project_out`` takes away.

        Args:
            covariance: Σ of the activations. (d, d)

        Returns:
            The variance; divide by ``covariance.trace()`` for the share.

        Raises:
            ShapeError: Σ of another width.

        Examples:
            >>> sigma = torch.diag(torch.tensor([3.0, 1.0]))
            >>> Subspace(torch.eye(2)[:1], torch.zeros(2)).variance_removed(sigma)
            3.0
        """
        sigma = covariance_of(covariance, self.d)
        return float(((self.basis @ sigma.to(self.basis.device)) * self.basis).sum())

    def overlap(self, other: Subspace) -> float:
        """Mean squared cosine of the principal angles: 1 if one contains the other, 0 if orthogonal.

        Args:
            other: A subspace of the same width. Random ones overlap by about max(rank) / d.

        Returns:
            Between 0 and 1; 0 if either has rank 0.

        Raises:
            ShapeError: Another width.
        """
        self._same_width(other)
        least = min(self.rank, other.rank)
        if not least:
            return 0.0
        return float((self.basis @ other.basis.to(self.basis.device).mT).square().sum()) / least

    def union(self, *others: Subspace, label: str | None = None) -> Subspace:
        """The smallest subspace that contains this one and the others.

        Args:
            *others: Subspaces of the same width and mean.
            label: Name of the result; default: the names joined by "+".

        Returns:
            Of rank at most the sum of the ranks; around this subspace's mean.

        Raises:
            ShapeError: Different widths.
            InputError: Different means: it would be unclear to which value the shared directions go.

        Examples:
            >>> one, two = (Subspace(torch.eye(3)[i : i + 1], torch.zeros(3)) for i in (0, 2))
            >>> one.union(two).rank
            2
        """
        for other in others:
            self._same_width(other)
            scale = 1e-6 * (self.mean.norm() + other.mean.norm())
            if float((self.mean - other.mean.to(self.mean.device)).norm()) > float(scale):
                raise InputError("the subspaces have different means: build them with one mean first")
        rows = torch.cat([self.basis, *(o.basis.to(self.basis.device) for o in others)])
        name = "+".join([self.label, *(o.label for o in others)]) if label is None else label
        return Subspace(orthonormal_rows(rows), self.mean, name)

    def complement(self, label: str | None = None) -> Subspace:
        """Everything orthogonal to this subspace, around the same mean.

        Args:
            label: Name of the result; default: "not " and this name.

        Returns:
            Of rank d − rank.
        """
        full = torch.linalg.qr(self.basis.mT, mode="complete").Q.mT if self.rank else torch.eye(self.d).double()
        return Subspace(full[self.rank :], self.mean, f"not {self.label}" if label is None else label)

    def to_dataframe(self) -> pd.DataFrame:
        """One row: label, rank and width."""
        import pandas as pd

        return pd.DataFrame({"label": [self.label], "rank": [self.rank], "d": [self.d]})

    def _same_width(self, other: Subspace) -> None:
        if other.d != self.d:
            raise ShapeError(f"subspaces of width {self.d} and {other.d} don't share a space")

    def _apply(self, x: Tensor, fn: Any) -> Tensor:
        x = tensor_of("activations", x)
        if x.shape[-1:] != (self.d,):
            raise ShapeError(f"subspace {self.label!r} has width {self.d}, got activations {tuple(x.shape)}")
        full = to_float64(x)
        q, mean = self.basis.to(full.device), self.mean.to(full.device)
        return fn(full, q, mean).to(device=x.device, dtype=x.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, d={self.d}, label={self.label!r})"

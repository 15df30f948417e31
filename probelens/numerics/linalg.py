"""Linear algebra that PyTorch lacks or gets wrong: stacks of matrices, covariances of values and classes, bases."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.tensors import tensor_of, to_float64

_CHUNK = 4096
_SMALL = 32  # rows


def inverse(matrices: Tensor) -> Tensor:
    """The inverse of each matrix. (..., d, d)"""
    if _safe(matrices):
        return torch.linalg.inv(matrices)
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    return torch.stack([torch.linalg.inv(one) for one in flat]).reshape(matrices.shape)


def solve(matrices: Tensor, right: Tensor) -> Tensor:
    """X with ``matrices`` X = ``right``. (..., d, d) and (..., d, k) -> (..., d, k)"""
    if _safe(matrices):
        return torch.linalg.solve(matrices, right)
    pairs = zip(matrices.reshape(-1, *matrices.shape[-2:]), right.reshape(-1, *right.shape[-2:]))
    return torch.stack([torch.linalg.solve(one, of) for one, of in pairs]).reshape(right.shape)


def _safe(matrices: Tensor) -> bool:
    """Whether PyTorch may be given the whole stack.

    It divides a stack's LU factorisations among its threads, and MKL's, called from several threads at once,
    is not safe for matrices of about 150 rows and more: it prints "Parameter 6 was incorrect on entry to
    DLASWP", and the answer is wrong or never comes (pytorch/pytorch issues 141358 and 142815).
    """
    return matrices.ndim == 2 or matrices.device.type != "cpu" or not matrices.numel() or matrices.shape[-1] <= _SMALL


def covariance_of(covariance: Tensor, d: int | None = None) -> Tensor:
    """A covariance as a float64 matrix; ``ShapeError`` where it isn't (d, d), with ``d`` its own width by default."""
    sigma = tensor_of("covariance", covariance)
    d = (len(sigma) if sigma.ndim else 0) if d is None else d
    if sigma.shape != (d, d):
        raise ShapeError(f"covariance has shape {tuple(sigma.shape)}; it must be ({d}, {d})")
    return to_float64(sigma)


def eigenvectors(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a covariance (d,), largest first, none below 0, and eigenvectors as columns (d, d)."""
    sigma = covariance_of(covariance)
    if not len(sigma) or not bool(torch.isfinite(sigma).all()):
        raise InputError("the covariance is empty, or holds NaN or infinity")
    values, vectors = torch.linalg.eigh((sigma + sigma.mT) / 2)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def orthonormal_rows(rows: Tensor, tol: float = 1e-7) -> Tensor:
    """A float64 basis of the span of some rows, largest directions first. (k, d) -> (rank, d)

    Singular values under ``tol`` times the largest count as zero.
    """
    full = to_float64(rows)
    if not full.numel():
        return full.reshape(0, rows.shape[-1])
    if not bool(torch.isfinite(full).all()):
        raise InputError("the rows hold NaN or infinity, so they have no direction")
    _, size, vectors = torch.linalg.svd(full, full_matrices=False)
    return vectors[(size > tol * size[0]) & (size > 0)].contiguous()


def between_rows(x: Tensor, y: Tensor) -> Tensor:
    """Rows whose outer products sum to the between-class covariance Σ_k p_k (μ_k − μ)(μ_k − μ)ᵀ. (n, d), (n,) -> (class, d)

    Of classes √p_k (μ_k − μ), in float64, each with its own share p_k. Of a number its covariance with x, divided by
    its standard deviation: the part of x's covariance that the number explains linearly. (1, d)
    """
    parts = range(0, len(x), _CHUNK)
    if y.is_floating_point():
        z = to_float64(y).to(to_float64(x[:0]).device)
        z = z - z.mean()
        found = [to_float64(x[i : i + _CHUNK]).mT @ z[i : i + _CHUNK] for i in parts]
        return (torch.stack(found).sum(0) / len(x) / z.square().mean().sqrt().clamp_min(1e-300))[None]
    ids, where, counts = y.unique(return_inverse=True, return_counts=True)
    sums = to_float64(x[:0]).new_zeros(len(ids), x.shape[1])
    for i in parts:
        part = to_float64(x[i : i + _CHUNK])
        sums.index_add_(0, where[i : i + _CHUNK].to(part.device), part)
    counts = counts.to(sums)[:, None]
    return (sums / counts - sums.sum(0) / len(x)) * (counts / len(x)).sqrt()


def whitening(covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Factors A, B with Aᵀ Σ A = I and A Bᵀ the identity on the support of Σ.

    Eigenvalues are those of the correlations: a feature of huge scale, which residual streams have,
    then can't push small ones under the floor. LEACE doesn't depend on the scale of features, but where Σ lost rank:
    A then reads what lies off the support too, where the pseudo-inverse of B doesn't.
    """
    scale = covariance.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values, vectors = torch.linalg.eigh(covariance / torch.outer(scale, scale))
    keep = values > values[-1].clamp(min=0) * floor
    root = values[keep].sqrt()
    return vectors[:, keep] / root / scale[:, None], vectors[:, keep] * root * scale[:, None]


def pseudo_inverse(tall: Tensor) -> Tensor:
    """Transposed, of a matrix of full column rank: zero on everything orthogonal to its columns. (d, r)"""
    q, r = torch.linalg.qr(tall)
    return torch.linalg.solve_triangular(r, q.mT, upper=True).mT

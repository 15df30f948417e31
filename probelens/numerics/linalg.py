"""Inverses and solutions of stacks of matrices, one matrix at a time.

PyTorch shares a stack's LU factorisations out among its threads, and MKL's, called from several threads at
once, is not safe for matrices of about 150 rows and more: it prints "Parameter 6 was incorrect on entry to
DLASWP", and the answer is wrong or never comes (pytorch/pytorch issues 141358 and 142815).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse", "solve"]


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
    return matrices.ndim == 2 or matrices.device.type != "cpu" or not matrices.numel()

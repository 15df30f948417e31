"""The search behind random subspaces of given variance: one parameter per draw, solved for all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.numerics import linalg as _linalg

__all__ = ["matched_frames"]


def matched_frames(frames: Tensor, values: Tensor, wanted: float, tol: float) -> Tensor:
    """Orthonormal frames in the eigenbasis, (n, d, rank), of which each has the wanted variance."""
    n, _, rank = frames.shape
    log = values.clamp(min=float(values[0]) * 1e-14).log()
    # For each sign of β the span is written as [I; Z] with I on the rows that grow fastest: then no entry
    # ever overflows, and the limit β → ∞ is those rows themselves.
    start = _variance(frames, values)
    up = (start < wanted)[:, None, None]
    ordered = torch.where(up, frames, frames.flip(1))
    ordered_log = torch.where(up[:, 0], log, -log.flip(0))
    ordered_values = torch.where(up[:, 0], values, values.flip(0))
    rest = ordered[:, rank:] @ _linalg.inverse(ordered[:, :rank])
    gain = ordered_log[:, rank:, None] - ordered_log[:, None, :rank]  # never positive
    eye = torch.eye(rank, dtype=frames.dtype, device=frames.device).expand(n, rank, rank)

    def at(beta: Tensor) -> Tensor:
        return torch.cat([eye, rest * (0.5 * beta[:, None, None] * gain).exp()], dim=1)

    def short(beta: Tensor) -> Tensor:
        """Whether the frames have not yet reached the wanted variance on their way to the end."""
        variance = _variance(at(beta), ordered_values)
        return torch.where(up[:, 0, 0], variance < wanted, variance > wanted)

    low, high = torch.zeros(n).to(log), torch.ones(n).to(log)
    for _ in range(40):
        far = short(high)
        if not bool(far.any()):
            break
        low, high = torch.where(far, high, low), torch.where(far, 2 * high, high)
    for _ in range(60):
        middle = (low + high) / 2
        far = short(middle)
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
        if bool(((_variance(at(low), ordered_values) / wanted - 1).abs() < 0.01 * tol).all()):
            break
    basis = torch.linalg.qr(at(low)).Q
    return torch.where(up, basis, basis.flip(1))


def _variance(frames: Tensor, values: Tensor) -> Tensor:
    """tr QΛQᵀ of the spans of frames that need not be orthonormal. (n, d, rank) -> (n,)"""
    gram = frames.mT @ frames
    inner = frames.mT @ (values[..., :, None] * frames)
    return _linalg.solve(gram, inner).diagonal(dim1=-2, dim2=-1).sum(-1)

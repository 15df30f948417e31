"""Modules as linear maps of parts: a norm whose scale is held, and an output projection of one head at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from probelens.errors import InputError

__all__ = ["held_norm", "of_each_head", "stacked_on_last"]


def of_each_head(down: nn.Module, z: Tensor) -> list[Tensor]:
    """What an affine map of heads side by side makes of each head alone, without its bias: (..., head, d_head) -> (..., d)."""
    with torch.no_grad():
        nothing: Tensor = down(z.new_zeros(z.shape[-2] * z.shape[-1]))
        parts = []
        for head in range(z.shape[-2]):
            alone = torch.zeros_like(z)
            alone[..., head, :] = z[..., head, :]
            parts.append(down(alone.flatten(-2)) - nothing)
    return parts


def held_norm(norm: nn.Module, whole: Tensor) -> Callable[[Tensor], Tensor]:
    """The map of parts (..., d) that a norm is at the scale of ``whole`` (..., d), with its weight and without its bias.

    A LayerNorm takes the mean away and an RMSNorm does not; weights may be stored as w or as 1 + w. All of that shows in
    what the norm makes of a few vectors, so its class need not be known. An InputError where it isn't of that form.
    """
    d = whole.shape[-1]
    with torch.no_grad():
        device = next((p.device for p in norm.parameters()), whole.device)

        def run(x: Tensor) -> Tensor:
            out: Tensor = norm(x.to(device)).to(whole.device).float()
            return out

        # Zero mean and no zeros, so that what becomes of it shows the weight up to one factor, which cancels below.
        known = torch.ones(d, dtype=whole.dtype, device=whole.device)
        known[1::2] = -1
        if d % 2:
            known[-3:] = known.new_tensor([1, 1, -2])
        # A norm may expect (batch, pos, d); without these axes the results broadcast against parts of any shape.
        bias = run(torch.zeros_like(known)[None, None])[0, 0]
        weight = (run(known[None, None])[0, 0] - bias) / known.float()
        wide = whole.float()
        shifted = run(whole + whole.abs().mean() + 1)
        centers = torch.allclose(shifted, run(whole), rtol=1e-2, atol=1e-3 * float(shifted.abs().max()))
        middle = wide - wide.mean(-1, keepdim=True) if centers else wide
        weighted, out = middle * weight, run(whole) - bias
        scale = (weighted * weighted).sum(-1, keepdim=True) / (weighted * out).sum(-1, keepdim=True)
        if not torch.allclose(weighted / scale, out, rtol=1e-2, atol=1e-2 * float(out.abs().max())):
            raise InputError(
                f"a {type(norm).__name__} is no norm with one scale for each position, so none can be held"
            )

    def apply(parts: Tensor) -> Tensor:
        parts = parts.float() - parts.float().mean(-1, keepdim=True) if centers else parts.float()
        return parts * weight / scale

    return apply


def stacked_on_last(parts: list[Tensor]) -> Tensor:
    """On the device of the last, where a model is spread over several."""
    return torch.stack([part.to(parts[-1].device) for part in parts])

"""The short convolution of Mamba's mixers: along positions, channel by channel, and causal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from probelens.errors import ShapeError
from probelens.kernels import compiled as _compiled


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None = None, *, need_state: bool = True
) -> tuple[Tensor, Tensor]:
    """A convolution along positions, each channel by itself, each position seeing itself and those before.

    Args:
        x: Input. (batch, pos, channel)
        weight: Kernel, last position last. (channel, 1, kernel size) or (channel, kernel size)
        bias: (channel,)
        state: Inputs before ``x``, latest last; zero if None. (batch, channel, kernel size or one less)
        need_state: False to skip the second result, which is then empty.

    Returns:
        Output (batch, pos, channel), and the last inputs, as a later call's ``state`` (batch, channel, kernel size).

    Raises:
        ShapeError: A state of another shape.

    Examples:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> causal_conv(x, torch.tensor([[10.0, 1.0]]), None)[0].flatten()
        tensor([ 1., 12., 23.])
    """
    weight = weight.squeeze(1) if weight.ndim == 3 else weight
    size = weight.shape[1]
    batch, _, channels = x.shape
    if state is None and not need_state and _compiles(x, weight, bias):
        y: Tensor = _CompiledConv.apply(x, weight.T, x.new_zeros(channels) if bias is None else bias)
        return y, x.new_empty(0)
    if state is None:
        padded = F.pad(x, (0, 0, size, 0))
    else:
        if state.shape[:2] != (batch, channels) or state.shape[2] not in (size, size - 1):
            raise ShapeError(
                f"conv_state has shape {tuple(state.shape)}, allowed are ({batch}, {channels}, {size}) "
                f"and ({batch}, {channels}, {size - 1})"
            )
        state = F.pad(state, (size - state.shape[2], 0)).to(device=x.device, dtype=x.dtype)
        padded = torch.cat([state.transpose(1, 2), x], dim=1)
    after = padded[:, -size:].transpose(1, 2).contiguous() if need_state else x.new_empty(0)
    if x.dtype in (torch.float32, torch.float64):
        return _shifted_sums(padded, weight.T, bias), after
    taken = padded[:, 1:].transpose(1, 2).to(weight.dtype)
    out = F.conv1d(taken, weight[:, None], bias, groups=channels)
    return out.transpose(1, 2).to(x.dtype), after


def _compiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the compiled loops, which check nothing themselves, can take these."""
    given = [v for v in (x, weight, bias) if v is not None]
    fits = x.ndim == 3 and weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])
    alike = len({(v.dtype, v.device) for v in given}) == 1
    return fits and alike and len(weight) == x.shape[2] and _compiled.suits_conv(x, weight)


def _shifted_sums(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of (batch, kernel size + pos, channel), with its backward pass in half the time of F.conv1d's."""
    size = len(weight)
    length = padded.shape[1] - size
    out = padded[:, 1 : length + 1] * weight[0]
    for k in range(1, size):
        out = torch.addcmul(out, padded[:, k + 1 : k + 1 + length], weight[k])
    return out if bias is None else out + bias


class _CompiledConv(torch.autograd.Function):
    """x is (batch, pos, channel), weight (kernel size, channel), bias (channel,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _compiled.conv(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if not torch.is_grad_enabled():
            found = _compiled.conv_gradients(inputs[0], inputs[1], grad_y)
            return tuple(g if need else None for g, need in zip(found, needed))
        # create_graph=True: somebody wants second derivatives. Aliases, since one input may be made from another.
        x, weight, bias = aliases = [v.view_as(v) for v in inputs]
        y = _shifted_sums(F.pad(x, (0, 0, len(weight), 0)), weight, bias)
        wanted = [v for v, need in zip(aliases, needed) if need]
        grads = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=True))
        return tuple(next(grads) if need else None for need in needed)

"""Reference forward of RecurrentGemma's recurrent block: convolution and real-gated linear recurrence, with taps.

The recurrence, for every channel, with two gates i and r and a learned decay rate, is

    a[t]     = exp(-8 * r[t] * softplus(rate))
    state[t] = a[t] * state[t-1] + sqrt(1 - a[t]**2) * i[t] * x[t]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probelens.kernels.conv import causal_conv
from probelens.kernels.tap import KernelPoint, NullTap, StatePoint, Tap, offer

# The gradient of the square root is bounded by this, as in transformers.
_STEEPEST = 1000.0


def _point(axes: str, note: str, step: bool = False) -> KernelPoint:
    return KernelPoint(("batch", "pos", axes), note, step)


RG_LRU_POINTS: dict[str, KernelPoint] = {
    "hook_in": _point("d_model", "what the mixer gets, after the block's norm"),
    "hook_in_proj": _point("d_in_proj", "the recurrent branch and the gate branch, side by side; reaches everything"),
    "hook_conv": _point("d_lru", "output of the convolution, trimmed: what the recurrence and its gates read"),
    "hook_lru_gate_i": _point("d_lru", "input gate, after its sigmoid: how much of hook_conv is written"),
    "hook_lru_gate_r": _point(
        "d_lru", "recurrence gate, after its sigmoid; an edit reaches a and, with it, what is written"
    ),
    "hook_lru_a": _point(
        "d_lru", "the share of the state that stays, 0 where a sequence begins; what is written stays as it is"
    ),
    "hook_lru_write": _point("d_lru", "sqrt(1 - a²) * i * hook_conv, what a position adds to the state"),
    "hook_lru_state": _point(
        "d_lru", "state after the step; an edit changes this step's output and every later state", True
    ),
    "hook_gate": _point("d_lru", "activated gate branch: what the state is multiplied with"),
    "hook_out": _point("d_model", "what the mixer adds to the residual stream"),
}
"""Points of ``rg_lru_mixer``, in the order in which they are reached."""


def rg_lru_mixer(
    module: nn.Module,
    hidden: Tensor,
    tap: Tap | None = None,
    *,
    begins: Tensor | None = None,
    conv_state: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    offset: int = 0,
) -> Any:
    """The forward of a recurrent block, equal to the module's own, tapped at every point of ``RG_LRU_POINTS``.

    Args:
        module: A mixer with ``linear_x, linear_y, conv_1d, rg_lru, act_fn, linear_out``.
        hidden: Input. (batch, pos, d_model)
        tap: Listens and edits; None for nobody.
        begins: True where a sequence begins, so that nothing of the state before stays; None for the first position.
            (batch or 1, pos)
        conv_state: What the convolution read before ``hidden``. (batch, d_lru, kernel size or one less)
        state: State before the first position. (batch, d_lru)
        return_state: Also give what the convolution read last, and the last state.
        offset: Position of ``hidden[:, 0]`` in the whole sequence, for taps.

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and (what the convolution read last, the state).

    Source:
        De et al. 2024, arXiv 2402.19427, section 2.4; transformers' RecurrentGemmaRecurrentBlock.
    """
    tap = tap if tap is not None else NullTap()
    m: Any = module
    hidden = offer(tap, "hook_in", hidden)
    x, gate = offer(tap, "hook_in_proj", torch.cat([m.linear_x(hidden), m.linear_y(hidden)], -1)).chunk(2, dim=-1)
    x, after = causal_conv(x, m.conv_1d.weight, m.conv_1d.bias, conv_state, need_state=return_state)
    x = offer(tap, "hook_conv", x)
    if begins is None:
        begins = torch.arange(x.shape[1], device=x.device)[None] == 0
    states = _recurrence(m.rg_lru, x, begins[..., None], state, tap, offset)
    y = states.to(x.dtype) * offer(tap, "hook_gate", m.act_fn(gate))
    out = offer(tap, "hook_out", m.linear_out(y))
    return (out, (after, states[:, -1])) if return_state else out


def _recurrence(m: Any, x: Tensor, begins: Tensor, state: Tensor | None, tap: Tap, offset: int) -> Tensor:
    """The state after every step. (batch, pos, d_lru)"""
    write_gate = offer(tap, "hook_lru_gate_i", _gate(x, m.input_gate_weight, m.input_gate_bias))
    keep_gate = offer(tap, "hook_lru_gate_r", _gate(x, m.recurrent_gate_weight, m.recurrent_gate_bias))
    log_a = -8.0 * keep_gate * F.softplus(m.recurrent_param)
    size = _BoundedRoot.apply(1 - torch.exp(2 * log_a))
    size = torch.where(begins, torch.ones_like(size), size).to(x.dtype)
    a = offer(tap, "hook_lru_a", torch.exp(log_a) * ~begins)
    write = offer(tap, "hook_lru_write", x * write_gate * size)
    now = torch.zeros_like(write[:, 0], dtype=torch.float32) if state is None else state.to(x.device)
    point = StatePoint(tap, "hook_lru_state", x.shape[1], offset)
    states = []
    for step, (kept, added) in enumerate(zip(a.float().unbind(1), write.float().unbind(1))):
        now = point(step, kept * now + added)
        states.append(now)
    point.done()
    return torch.stack(states, dim=1)


def _gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A gate that reads each block of channels apart. weight: (block, width, width)"""
    blocks = x.unflatten(-1, weight.shape[:2]).movedim(2, 0).flatten(1, 2)
    out = torch.baddbmm(bias[:, None], blocks, weight)
    return torch.sigmoid(out.movedim(0, 1).reshape(x.shape))


class _BoundedRoot(torch.autograd.Function):
    """A square root whose gradient is bounded; 0 below 0, where an edit of a gate may lead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0).sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (4 * x).clamp_min(_STEEPEST**-2).sqrt()

"""Reference forward of the gated delta net of Qwen3-Next: convolution and gated delta rule, with taps.

The recurrence, for every head, with unit keys k, a decay exp(g) and a rate of writing beta, is

    S'   = exp(g[t]) * S[t-1]
    S[t] = S' + k[t] (beta[t] * (v[t] - S'ᵀ k[t]))ᵀ
    y[t] = S[t]ᵀ q[t]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probelens.kernels.conv import causal_conv
from probelens.kernels.tap import KernelPoint, NullTap, StatePoint, Tap, masked, offer


def _point(axes: str, note: str, step: bool = False) -> KernelPoint:
    return KernelPoint(("batch", "pos", *axes.split()), note, step)


DELTA_POINTS: dict[str, KernelPoint] = {
    "hook_in": _point("d_model", "what the mixer gets, after the block's norm, padding still in it"),
    "hook_in_proj": _point(
        "d_in_proj", "q, k, v, the gate, and what beta and g are made of, side by side; reaches everything"
    ),
    "hook_conv": _point("d_conv", "q, k and v after the convolution, trimmed, before the activation"),
    "hook_delta_q": _point("key_head d_key", "what reads the state, of unit length over sqrt(d_key); heads as stored"),
    "hook_delta_k": _point("key_head d_key", "where in the state a position writes, of unit length; heads as stored"),
    "hook_delta_v": _point("head d_value", "what a position writes, after the activation"),
    "hook_delta_beta": _point("head", "how much of what the state holds at k gives way to v, 0 to 1"),
    "hook_delta_g": _point("head", "log of the share of the state that stays before a position writes"),
    "hook_delta_state": _point(
        "head d_key d_value", "state after the step; an edit changes this step's output and every later state", True
    ),
    "hook_delta_y": _point("head d_value", "what q reads from the state, before the gated norm"),
    "hook_gate": _point("head d_value", "activated gate: what the norm of hook_delta_y is multiplied with"),
    "hook_inner_norm": _point("d_inner", "gated norm of hook_delta_y, what the output projection reads"),
    "hook_out": _point("d_model", "what the mixer adds to the residual stream"),
}
"""Points of ``delta_mixer``, in the order in which they are reached."""


def delta_mixer(
    module: nn.Module,
    hidden: Tensor,
    tap: Tap | None = None,
    *,
    conv_state: Tensor | None = None,
    ssm_state: Tensor | None = None,
    attention_mask: Tensor | None = None,
    return_state: bool = False,
    offset: int = 0,
) -> Any:
    """The forward of a gated delta net, equal to the module's own, tapped at every point of ``DELTA_POINTS``.

    The recurrence runs in float32, one step after the other; the module's own runs in chunks.

    Args:
        module: A mixer with ``in_proj_qkvz, in_proj_ba`` (or one projection for each of ``qkv, z, b, a``), ``conv1d,
            dt_bias, A_log, norm, out_proj``.
        hidden: Input. (batch, pos, d_model)
        tap: Listens and edits; None for nobody.
        conv_state: What the convolution read before ``hidden``. (batch, d_conv, kernel size or one less)
        ssm_state: State before the first position. (batch, head, d_key, d_value)
        attention_mask: 1 for real positions, 0 for padding, which writes nothing. (batch, pos)
        return_state: Also give what the convolution read last, and the last state.
        offset: Position of ``hidden[:, 0]`` in the whole sequence, for taps.

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and (what the convolution read last, the state).

    Source:
        Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464; transformers' Qwen3NextGatedDeltaNet.
    """
    tap = tap if tap is not None else NullTap()
    m: Any = module
    hidden = masked(offer(tap, "hook_in", hidden), attention_mask)
    parts = offer(tap, "hook_in_proj", torch.cat(_projected(m, hidden), dim=-1))
    x, z, b, a = parts.split([m.conv_dim, m.value_dim, m.num_v_heads, m.num_v_heads], dim=-1)
    x, after = causal_conv(x, m.conv1d.weight, m.conv1d.bias, conv_state, need_state=return_state)
    x = F.silu(offer(tap, "hook_conv", x))
    q, k, v = x.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
    q, k = (_unit(part.unflatten(-1, (-1, m.head_k_dim)).float()) for part in (q, k))
    q, k = offer(tap, "hook_delta_q", q * m.head_k_dim**-0.5), offer(tap, "hook_delta_k", k)
    v = offer(tap, "hook_delta_v", v.unflatten(-1, (-1, m.head_v_dim)))
    beta = offer(tap, "hook_delta_beta", b.sigmoid())
    g = offer(tap, "hook_delta_g", -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias))
    y, state = _delta_rule(q, k, v.float(), beta.float(), g.float(), ssm_state, tap, offset)
    y = offer(tap, "hook_delta_y", y.to(hidden.dtype))
    gate = offer(tap, "hook_gate", F.silu(z.unflatten(-1, (-1, m.head_v_dim)).float()))
    y = offer(tap, "hook_inner_norm", (_normed(m.norm, y) * gate).to(hidden.dtype).flatten(2))
    out = offer(tap, "hook_out", m.out_proj(y))
    return (out, (after, state)) if return_state else out


def _projected(m: Any, hidden: Tensor) -> list[Tensor]:
    """q with k and v, the gate, b and a."""
    if hasattr(m, "in_proj_qkvz"):
        parts = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden), m.in_proj_ba(hidden))
        return [part.flatten(2) for part in parts]
    return [m.in_proj_qkv(hidden), m.in_proj_z(hidden), m.in_proj_b(hidden), m.in_proj_a(hidden)]


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor | None, tap: Tap, offset: int
) -> tuple[Tensor, Tensor]:
    """What is read at every step (batch, pos, head, d_value), and the last state."""
    heads = v.shape[2]
    q, k = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (q, k))
    now = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1]) if state is None else state.to(v)
    point = StatePoint(tap, "hook_delta_state", v.shape[1], offset)
    ys = []
    steps = zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), g.exp().unbind(1))
    for step, (q_now, k_now, v_now, rate, kept) in enumerate(steps):
        now = now * kept[..., None, None]
        held = (k_now[..., None, :] @ now).squeeze(-2)
        now = point(step, now + k_now[..., None] * ((v_now - held) * rate[..., None])[..., None, :])
        ys.append((q_now[..., None, :] @ now).squeeze(-2))
    point.done()
    return torch.stack(ys, dim=1), now


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _normed(norm: Any, y: Tensor) -> Tensor:
    wide = y.float()
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(y.dtype)

"""Reference forward of RWKV's time mixing: values averaged with weights that decay, with taps.

The recurrence, for every channel, with a decay w and a bonus u for the current position, is

    y[t] = (sum[t-1] + exp(u + k[t]) * v[t]) / (weight[t-1] + exp(u + k[t]))
    sum[t] = exp(w) * sum[t-1] + exp(k[t]) * v[t]
    weight[t] = exp(w) * weight[t-1] + exp(k[t])

Sums and weights grow as exp(k), so they are kept over exp(highest). What hooks see has no such scale, so that it can be
carried from one run to another: the average sum / weight, and the log of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from probelens.kernels.tap import KernelPoint, NullTap, StatePoint, Tap, offer


def _point(axes: str, note: str, step: bool = False) -> KernelPoint:
    return KernelPoint(("batch", "pos", *axes.split()), note, step)


WKV_POINTS: dict[str, KernelPoint] = {
    "hook_in": _point("d_model", "what the mixer gets, after the block's norm"),
    "hook_wkv_r": _point("d_att", "receptance, after its sigmoid: what hook_wkv_y is multiplied with"),
    "hook_wkv_k": _point("d_att", "log of a position's weight in the average"),
    "hook_wkv_v": _point("d_att", "what is averaged"),
    "hook_wkv_state": _point(
        "part d_att",
        "after the step, the average of the values so far and the log of their weight; an edit reaches every later "
        "position: this one's output is made before it",
        True,
    ),
    "hook_wkv_y": _point("d_att", "average of the values with the current one, before the receptance"),
    "hook_out": _point("d_model", "what the mixer adds to the residual stream"),
}
"""Points of ``wkv_mixer``, in the order in which they are reached."""


def wkv_mixer(
    module: nn.Module,
    hidden: Tensor,
    tap: Tap | None = None,
    *,
    before: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
    offset: int = 0,
) -> Any:
    """The forward of RWKV's time mixing, equal to the module's own, tapped at every point of ``WKV_POINTS``.

    Args:
        module: A mixer with ``time_mix_key`` and its like, ``key, value, receptance, output, time_decay, time_first``.
        hidden: Input. (batch, pos, d_model)
        tap: Listens and edits; None for nobody.
        before: The input of the position before ``hidden``; zero if None. (batch, d_model)
        state: Sum, weight and the log of their scale before the first position. each (batch, d_att)
        return_state: Also give them after the last position.
        offset: Position of ``hidden[:, 0]`` in the whole sequence, for taps.

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and the state.

    Source:
        Peng et al. 2023, arXiv 2305.13048, section 3; transformers' RwkvSelfAttention.
    """
    tap = tap if tap is not None else NullTap()
    m: Any = module
    hidden = offer(tap, "hook_in", hidden)
    first = torch.zeros_like(hidden[:, 0]) if before is None else before.to(hidden)
    shifted = torch.cat([first[:, None], hidden[:, :-1]], dim=1)

    def mixed(share: Tensor) -> Tensor:
        return hidden * share + shifted * (1 - share)

    k, v, r = m.key(mixed(m.time_mix_key)), m.value(mixed(m.time_mix_value)), m.receptance(mixed(m.time_mix_receptance))
    r = offer(tap, "hook_wkv_r", torch.sigmoid(r))
    k, v = offer(tap, "hook_wkv_k", k), offer(tap, "hook_wkv_v", v)
    y, after = _averages(m, k, v, state, tap, offset)
    out = offer(tap, "hook_out", m.output(r * offer(tap, "hook_wkv_y", y.to(k.dtype))))
    return (out, after) if return_state else out


def _averages(
    m: Any, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor, Tensor] | None, tap: Tap, offset: int
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    if state is None:
        zero = torch.zeros_like(k[:, 0], dtype=torch.float32)
        state = (zero, zero, zero - 1e38)
    total, weight, highest = state
    decay, bonus = -torch.exp(m.time_decay), m.time_first
    point = StatePoint(tap, "hook_wkv_state", k.shape[1], offset)
    ys = []
    for step, (k_now, v_now) in enumerate(zip(k.float().unbind(1), v.unbind(1))):
        top = torch.maximum(highest, k_now + bonus)
        old, new = torch.exp(highest - top), torch.exp(k_now + bonus - top)
        ys.append((old * total + new * v_now) / (old * weight + new))
        top = torch.maximum(highest + decay, k_now)
        old, new = torch.exp(highest + decay - top), torch.exp(k_now - top)
        total, weight, highest = old * total + new * v_now, old * weight + new, top
        if point.kept(step):
            seen = torch.stack([total / weight, weight.log() + highest], dim=1)
            edited = point(step, seen)
            if edited is not seen:
                total, highest = edited.unbind(1)
                weight = torch.ones_like(weight)
    point.done()
    return torch.stack(ys, dim=1), (total, weight, highest)

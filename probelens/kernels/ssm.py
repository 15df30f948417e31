"""Reference forwards of Mamba and Mamba-2 mixers: plain functions of a module's parameters, with taps inside.

They work on every class that keeps the parameter names of the original code: transformers' mixers (Mamba,
FalconMamba, Jamba; Mamba-2) and those of the mamba-ssm package. Nothing is imported from either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probelens.errors import InputError, ShapeError
from probelens.kernels.conv import causal_conv
from probelens.kernels.scan import ScanOutput, compute_dtype, fused_kernel, scan_stopping, selective_scan
from probelens.kernels.ssd import ssd_scan, ssd_stopping
from probelens.kernels.tap import KernelPoint, NullTap, Tap, masked, offer, offer_last_use, segments, steps_to_offer

__all__ = [
    "MAMBA2_POINTS",
    "MAMBA_POINTS",
    "KernelPoint",
    "MambaState",
    "NullTap",
    "ScanOutput",
    "Tap",
    "causal_conv",
    "fused_kernel",
    "is_mamba2",
    "mamba2_mixer",
    "mamba_mixer",
    "mamba_step",
    "segments",
    "selective_scan",
    "ssd_scan",
]


def _point(axes: str, note: str, step: bool = False) -> KernelPoint:
    return KernelPoint(("batch", "pos", *axes.split()), note, step)


_BOTH = {
    "hook_in": _point("d_model", "what the mixer gets, after the block's norm, padding still in it"),
    "hook_in_proj": _point("d_in_proj", "all branches, before they are split; reaches everything"),
    "hook_out": _point("d_model", "what the mixer adds to the residual stream"),
    "hook_gate": _point("d_inner", "silu of the gate branch: what hook_ssm_y is multiplied with"),
}
_DT = "step size after softplus and clamp: how much is written and, with A, how much is kept"
_B = "where in the state a position writes"
_C = "what a position reads from the state"
_WRITE = "dt * B * x, what a position adds to the state"
_STATE = "state after the step; an edit changes this step's output and every later state"
_Y = "output of the scan with the skip D * x, before the gate"

MAMBA_POINTS: dict[str, KernelPoint] = {
    "hook_in": _BOTH["hook_in"],
    "hook_in_proj": _BOTH["hook_in_proj"],
    "hook_conv": _point("d_inner", "convolution, trimmed, before the activation; reaches x, dt, B and C"),
    "hook_ssm_x": _point("d_inner", "what the scan writes, after the activation; not seen by dt, B and C"),
    "hook_ssm_dt": _point("d_inner", _DT),
    "hook_ssm_B": _point("d_state", _B),
    "hook_ssm_C": _point("d_state", _C),
    "hook_ssm_write": _point("d_inner d_state", _WRITE),
    "hook_ssm_state": _point("d_inner d_state", _STATE, step=True),
    "hook_ssm_y": _point("d_inner", _Y),
    "hook_gate": _BOTH["hook_gate"],
    "hook_out": _BOTH["hook_out"],
}
"""Points of ``mamba_mixer``, in the order in which they are reached."""

MAMBA2_POINTS: dict[str, KernelPoint] = {
    "hook_in": _BOTH["hook_in"],
    "hook_in_proj": _BOTH["hook_in_proj"],
    "hook_conv": _point("d_conv", "x, B and C after the convolution, trimmed, before the activation"),
    "hook_ssm_x": _point("heads d_head", "what the scan writes, after the activation"),
    "hook_ssm_dt": _point("heads", _DT),
    "hook_ssm_B": _point("groups d_state", _B),
    "hook_ssm_C": _point("groups d_state", _C),
    "hook_ssm_write": _point("heads d_head d_state", _WRITE),
    "hook_ssm_state": _point("heads d_head d_state", _STATE, step=True),
    "hook_ssm_y": _point("heads d_head", _Y),
    "hook_gate": _BOTH["hook_gate"],
    "hook_inner_norm": _point("d_inner", "gated RMS norm of the scan's output; absent without that norm"),
    "hook_out": _BOTH["hook_out"],
}
"""Points of ``mamba2_mixer``, in the order in which they are reached."""


class MambaState(NamedTuple):
    """What a mixer carries from one call to the next, in the layout of transformers' cache.

    ``conv``: the last inputs of the convolution (batch, d_conv, kernel size). ``ssm``: the state (batch, d_inner,
    d_state), for Mamba-2 (batch, heads, d_head, d_state).
    """

    conv: Tensor
    ssm: Tensor


def is_mamba2(module: nn.Module) -> bool:
    """Whether a mixer is of the Mamba-2 kind: one decay rate per head, no ``x_proj``.

    Args:
        module: The mixer.

    Returns:
        False for a mixer of the first Mamba.

    Raises:
        InputError: The module has no ``A_log``, so it is no Mamba mixer at all.
    """
    if not isinstance(A_log := getattr(module, "A_log", None), Tensor):
        raise InputError(
            f"{type(module).__name__} has no parameter A_log, so it isn't a Mamba mixer. "
            "Needed: in_proj, conv1d, A_log, D, out_proj, and x_proj with dt_proj or dt_bias."
        )
    return A_log.ndim == 1


def mamba_mixer(
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
    """The forward of a Mamba mixer, equal to the module's own, tapped at every point of ``MAMBA_POINTS``.

    The convolution is computed from ``conv1d``'s weights; the linear maps and optional norms of dt, B and C
    are called as modules. The scan runs in float32 at least, fused; it stops at single steps only where
    ``hook_ssm_state`` may be edited there, and everywhere if ``hook_ssm_write`` may be edited.

    Args:
        module: A mixer with ``in_proj, conv1d, x_proj, dt_proj, A_log, D, out_proj``.
        hidden: Input. (batch, pos, d_model)
        tap: Listens and edits; None for nobody.
        conv_state: Inputs of the convolution before ``hidden``. (batch, d_inner, kernel size or one less)
        ssm_state: State before the first position. (batch, d_inner, d_state)
        attention_mask: 1 for real positions, 0 for padding: those neither enter the convolution (except
            for ``in_proj``'s bias) nor write to the state, as in transformers. (batch, pos)
        return_state: Also give the state after the last position.
        offset: Position of ``hidden[:, 0]`` in the whole sequence, for taps.

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and a ``MambaState``.

    Raises:
        InputError: A Mamba-2 mixer, or no Mamba mixer.
        ShapeError: States or a mask that don't fit.

    Source:
        Gu and Dao 2023, arXiv 2312.00752; transformers' MambaMixer.
    """
    tap = tap if tap is not None else NullTap()
    if is_mamba2(module):
        raise InputError(f"{type(module).__name__} is a Mamba-2 mixer: use mamba2_mixer")
    m: Any = module
    _check_input(hidden, attention_mask)
    # transformers before 5.15 masks the branch after in_proj, so that its bias doesn't reach the padding.
    late = hasattr(m, "slow_forward")
    hidden = masked(offer(tap, "hook_in", hidden), None if late else attention_mask)
    x, z = offer(tap, "hook_in_proj", m.in_proj(hidden)).chunk(2, dim=-1)
    x = masked(x, attention_mask if late else None)
    x, new_conv = causal_conv(x, m.conv1d.weight, m.conv1d.bias, conv_state, need_state=return_state)
    x = masked(_activation(m)(offer(tap, "hook_conv", x)), attention_mask)

    d_state = m.A_log.shape[1]
    dt, B, C = torch.split(m.x_proj(x), [m.dt_proj.weight.shape[1], d_state, d_state], dim=-1)
    dt, B, C = _norms(m, dt, B, C)
    dt = F.softplus(m.dt_proj(dt))
    x, dt = offer(tap, "hook_ssm_x", x), offer(tap, "hook_ssm_dt", dt)
    B, C = offer(tap, "hook_ssm_B", B), offer(tap, "hook_ssm_C", C)
    dtype = compute_dtype(x)
    scan = _tapped_scan(tap, x, dt, -torch.exp(m.A_log.to(dtype)), B, C, m.D, ssm_state, offset, return_state)
    y = offer(tap, "hook_ssm_y", scan.y)
    y = y * offer(tap, "hook_gate", F.silu(z))
    out = offer(tap, "hook_out", m.out_proj(y.to(hidden.dtype)))
    return (out, MambaState(new_conv, scan.state)) if return_state else out


def mamba2_mixer(
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
    """The forward of a Mamba-2 mixer, equal to the module's own, tapped at every point of ``MAMBA2_POINTS``.

    Args:
        module: A mixer with ``in_proj, conv1d, dt_bias, A_log, D, out_proj`` and mostly ``norm``, the gated
            RMS norm, in transformers' or in mamba-ssm's form.
        Those of ``mamba_mixer``.
        conv_state: Inputs of the convolution before ``hidden``. (batch, d_conv, kernel size or one less)
        ssm_state: State before the first position. (batch, heads, d_head, d_state)

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and a ``MambaState``.

    Raises:
        InputError: A Mamba mixer of the first kind, or no Mamba mixer.
        ShapeError: States or a mask that don't fit.

    Source:
        Dao and Gu 2024, arXiv 2405.21060; transformers' Mamba2Mixer and FalconH1Mixer, mamba-ssm's Mamba2.
    """
    tap = tap if tap is not None else NullTap()
    if not is_mamba2(module):
        raise InputError(f"{type(module).__name__} is a Mamba mixer of the first kind: use mamba_mixer")
    m: Any = module
    _check_input(hidden, attention_mask)
    heads, d_conv = m.A_log.shape[0], m.conv1d.weight.shape[0]
    d_state, groups = _size(m, "ssm_state_size", "d_state"), _size(m, "n_groups", "ngroups")
    d_inner = d_conv - 2 * groups * d_state

    hidden = masked(offer(tap, "hook_in", hidden), attention_mask)
    # Falcon-H1 scales what goes into the projection, and every branch of what comes out.
    scaled = _times(hidden, getattr(m, "ssm_in_multiplier", None))
    parts = offer(tap, "hook_in_proj", _times(m.in_proj(scaled), getattr(m, "mup_vector", None)))
    # mamba-ssm can keep a gated MLP beside the state space model, in front of everything else.
    d_mlp = (parts.shape[-1] - d_inner - d_conv - heads) // 2
    mlp_gate, mlp_x, z, x, dt = torch.split(parts, [d_mlp, d_mlp, d_inner, d_conv, heads], dim=-1)
    x, new_conv = causal_conv(x, m.conv1d.weight, m.conv1d.bias, conv_state, need_state=return_state)
    x = masked(_activation(m)(offer(tap, "hook_conv", x)), attention_mask)
    x, B, C = torch.split(x, [d_inner, groups * d_state, groups * d_state], dim=-1)
    dt = F.softplus(dt + m.dt_bias.to(dt.dtype))
    low, high = map(float, getattr(m, "time_step_limit", None) or getattr(m, "dt_limit", None) or (0.0, torch.inf))
    if low > 0 or high < torch.inf:
        dt = dt.clamp(low, high)
    x, dt = offer(tap, "hook_ssm_x", x.unflatten(-1, (heads, -1))), offer(tap, "hook_ssm_dt", dt)
    B = offer(tap, "hook_ssm_B", B.unflatten(-1, (groups, -1)))
    C = offer(tap, "hook_ssm_C", C.unflatten(-1, (groups, -1)))
    dtype = compute_dtype(x)
    D = m.D if m.D.shape[0] == heads else m.D.unflatten(0, (heads, -1))
    scan = _tapped_scan(tap, x, dt, -torch.exp(m.A_log.to(dtype)), B, C, D, ssm_state, offset, return_state)
    y = offer(tap, "hook_ssm_y", scan.y).flatten(2)
    gate = offer(tap, "hook_gate", F.silu(z.to(dtype)))
    norm = inner_norm(m)
    y = y * gate if norm is None else offer(tap, "hook_inner_norm", _gated_norm(norm, y, gate))
    if d_mlp:
        y = torch.cat([F.silu(mlp_gate) * mlp_x, y.to(hidden.dtype)], dim=-1)
    out = offer(tap, "hook_out", m.out_proj(y.to(hidden.dtype)))
    return (out, MambaState(new_conv, scan.state)) if return_state else out


def mamba_step(
    module: nn.Module, hidden: Tensor, state: MambaState | None, tap: Tap | None = None, *, offset: int = 0
) -> tuple[Tensor, MambaState]:
    """One token through a mixer of either kind, going on from a state.

    Args:
        module: A Mamba or Mamba-2 mixer.
        hidden: Input of one position. (batch, d_model)
        state: What the call before returned, or a cache's; None at the start.
        tap: Listens and edits; None for nobody.
        offset: The position, for taps.

    Returns:
        Output of that position (batch, d_model) and the state after it.

    Raises:
        ShapeError: More than one position.
    """
    if hidden.ndim != 2:
        raise ShapeError(f"one step takes (batch, d_model), got {tuple(hidden.shape)}")
    mixer = mamba2_mixer if is_mamba2(module) else mamba_mixer
    conv, ssm = state if state is not None else (None, None)
    out, after = mixer(module, hidden[:, None], tap, conv_state=conv, ssm_state=ssm, return_state=True, offset=offset)
    return out[:, 0], after


def _tapped_scan(
    tap: Tap, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None,
    offset: int, need_state: bool,
) -> ScanOutput:  # fmt: skip
    length, ssd, write = x.shape[1], A.ndim == 1, None
    if tap.wants("hook_ssm_write"):
        dtype = compute_dtype(x)
        u = (dt[..., None] if ssd else dt).to(dtype) * x.to(dtype)
        to = B.to(dtype)
        # (batch, pos, heads or nothing, 1, d_state) beside (batch, pos, ..., d_inner or d_head, 1)
        to = to.repeat_interleave(x.shape[2] // to.shape[2], dim=2)[..., None, :] if ssd else to[:, :, None]
        write = offer(tap, "hook_ssm_write", u[..., None] * to)
        if not tap.edits("hook_ssm_write"):
            write = None
    edits = tap.wants("hook_ssm_state") and tap.edits("hook_ssm_state")
    reads = tap.wants("hook_ssm_state") and not edits
    if not edits and write is None:
        if ssd:
            out = ssd_scan(x, dt, A, B, C, D, state, read_states=reads, need_state=need_state)
        else:
            out = selective_scan(x, dt, A, B, C, D, state, read_states=reads)
    else:

        def on_state(step: int, state: Tensor) -> Tensor:
            return tap("hook_ssm_state", state.clone(), offset + step, offset + length)

        steps = steps_to_offer(tap, ["hook_ssm_state"], length, offset) if edits else []
        stop = ssd_stopping if ssd else scan_stopping
        out = stop(x, dt, A, B, C, D, state, on_state, steps, write, read_states=reads)
    if reads:
        assert out.states is not None
        offer_last_use(tap, "hook_ssm_state", out.states, offset + length)
    return out


def _times(tensor: Tensor, factor: Any) -> Tensor:
    return tensor if factor is None else tensor * factor


def inner_norm(module: nn.Module) -> nn.Module | None:
    """The gated norm of a Mamba-2 mixer; None where it has none, or something that does nothing in its place."""
    norm = getattr(module, "norm", None)
    return None if isinstance(norm, nn.Identity) else norm


def _gated_norm(norm: Any, y: Tensor, gate: Tensor) -> Tensor:
    after = bool(getattr(norm, "norm_before_gate", False))
    if not after:
        y = y * gate
    size = getattr(norm, "group_size", None) or y.shape[-1] // getattr(norm, "n_groups", 1)
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    grouped = y.unflatten(-1, (-1, size))
    y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = norm.weight * y
    if (bias := getattr(norm, "bias", None)) is not None:
        y = y + bias
    return y * gate if after else y


def _norms(m: Any, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if getattr(m, "dt_layernorm", None) is not None:
        return m.dt_layernorm(dt), m.b_layernorm(B), m.c_layernorm(C)
    if hasattr(m, "b_c_rms"):
        # FalconMamba before transformers 5.15: the same norms, as a function without weights
        dt, B, C = (
            (v.float() * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + m.rms_eps)).to(v.dtype)
            for v in (dt, B, C)
        )
    return dt, B, C


def _activation(m: Any) -> Any:
    act = getattr(m, "act", None)
    return act if callable(act) else F.silu


def _size(m: Any, *names: str) -> int:
    for name in names:
        if isinstance(getattr(m, name, None), int):
            return int(getattr(m, name))
    raise InputError(f"{type(m).__name__} has none of the attributes {', '.join(names)}, needed to split x, B and C")


def _check_input(hidden: Tensor, mask: Tensor | None) -> None:
    if hidden.ndim != 3:
        raise ShapeError(f"a mixer takes (batch, pos, d_model), got {tuple(hidden.shape)}")
    if mask is not None and mask.shape != hidden.shape[:2]:
        raise ShapeError(
            f"attention_mask has shape {tuple(mask.shape)}, but the input has (batch, pos) = {tuple(hidden.shape[:2])}"
        )

"""The recurrence of Mamba-2 (SSD): in chunks of matrix products, and in a form that stops at steps.

For every head the state is a matrix (d_head, d_state) that decays by one number per step:

    state[t] = exp(dt[t] * A) * state[t-1] + dt[t] * outer(x[t], B[t])
    y[t]     = state[t] @ C[t],  + D * x[t]
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from probelens.errors import InputError, ShapeError
from probelens.kernels.scan import ScanOutput, by_steps, check_each, compute_dtype, first_state
from probelens.kernels.tap import run_between

# Positions per chunk: the work inside a chunk grows with its square, the Python loop is over chunks.
_CHUNK = 64


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    read_states: bool = False,
    need_state: bool = True,
    method: str = "chunks",
) -> ScanOutput:
    """Mamba-2's recurrence over a whole sequence.

    Inside a chunk of 64 positions the recurrence is a masked matrix product, like attention without a softmax; one
    state per chunk is kept. Memory grows linearly with the number of positions.

    Args:
        x: What is written, per head. (batch, pos, heads, d_head)
        dt: Step sizes, positive, after the softplus. (batch, pos, heads)
        A: Decay rates, negative, ``-exp(A_log)``. (heads,)
        B: Where in the state each position writes; heads share it in groups. (batch, pos, groups, d_state)
        C: What each position reads. (batch, pos, groups, d_state)
        D: Weight of the skip connection from ``x`` to ``y``. (heads,) or (heads, d_head)
        initial_state: State before the first step; zero if None. (batch, heads, d_head, d_state)
        read_states: Also give the state after every step: batch * pos * heads * d_head * d_state numbers.
        need_state: False where nobody asks for the last state, which is then empty: it is a third of the work
            on sequences of one chunk.
        method: "chunks", or "steps" for one step after the other.

    Returns:
        ``y`` (batch, pos, heads, d_head), the last state (batch, heads, d_head, d_state) and, if asked for, all states
        (batch, pos, heads, d_head, d_state); in float32, or float64 for float64 inputs.

    Raises:
        ShapeError: Shapes that don't fit together.
        InputError: An unknown method.

    Source:
        Dao and Gu 2024, arXiv 2405.21060, section 6.

    Examples:
        >>> import torch
        >>> x = torch.ones(1, 3, 1, 1)
        >>> out = ssd_scan(x, dt=x[..., 0], A=torch.tensor([-0.6931472]), B=x, C=x)
        >>> out.y.flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    if method not in ("chunks", "steps"):
        raise InputError(f"unknown SSD method {method!r}. Allowed: 'chunks', 'steps'.")
    _check_shapes(x, dt, A, B, C, D, initial_state)
    if method == "steps":
        return ssd_stopping(x, dt, A, B, C, D, initial_state, read_states=read_states)
    with torch.autocast(x.device.type, enabled=False):
        dtype = compute_dtype(x)
        x, dt, A, B, C = (v.to(dtype) for v in (x, dt, A, B, C))
        first = None if initial_state is None else first_state(x, B, initial_state)
        y, last = _chunks(x, dt, A, B, C, first, need_state)
        if D is not None:
            y = y + x * _per_head(D, dtype)
        states = _all_states(x, dt, A, B, C, initial_state) if read_states else None
    return ScanOutput(y, last, states)


def ssd_stopping(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    on_state: Callable[[int, Tensor], Tensor] | None = None,
    steps: Collection[int] | None = None,
    write: Tensor | None = None,
    *,
    read_states: bool = False,
) -> ScanOutput:
    """As ``scan_stopping``, for the states of ``ssd_scan``."""
    heads = x.shape[2]
    if on_state and steps is not None and write is None and not read_states and 2 * len(steps) <= x.shape[1]:

        def run(piece: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
            return ssd_scan(x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece], D, state)[:2]

        def read(step: int, state: Tensor) -> Tensor:
            return _read(state, _to_heads(C[:, step], heads), x[:, step], D)

        return ScanOutput(*run_between(steps, x.shape[1], initial_state, run, read, on_state))
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, A, B, C = (v.to(dtype) for v in (x, dt, A, B, C))
        u_steps = (dt[..., None] * x)[..., None].unbind(1)
        B_steps, C_steps = (_to_heads(v, heads).unbind(1) for v in (B, C))
        made = (u * b[:, :, None] for u, b in zip(u_steps, B_steps))
        writes = made if write is None else write.to(dtype).unbind(1)
        steps_of = zip(writes, torch.exp(dt * A)[..., None, None].unbind(1), C_steps, x.unbind(1))
        return by_steps(first_state(x, B, initial_state), steps_of, _read, D, on_state, steps, read_states)


def _chunks(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor | None, need_state: bool
) -> tuple[Tensor, Tensor]:
    length, groups = x.shape[1], B.shape[2]
    q = min(_CHUNK, length)
    pad = -length % q
    # Padding with dt = 0 neither decays nor writes.
    x, dt, B, C = (F.pad(v, (0, 0) * (v.ndim - 2) + (0, pad)) for v in (x, dt, B, C))
    # One axis of groups and one of the heads in a group, so that B and C broadcast over the heads that share them.
    u = rearrange(dt[..., None] * x, "b (chunk q) (g h) d -> b chunk g h q d", q=q, g=groups)
    B, C = (rearrange(v, "b (chunk q) g state -> b chunk g 1 q state", q=q) for v in (B, C))
    # The decay from step j to step i is exp of a difference of sums; in float32 that difference would
    # lose digits where the sums are large.
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    total = rearrange((dt * A).to(wide), "b (chunk q) heads -> b chunk q heads", q=q).cumsum(2)
    total = rearrange(total, "b chunk q (g h) -> b chunk g h q", g=groups)
    upper = torch.ones(q, q, dtype=torch.bool, device=x.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).to(x.dtype).exp()
    inside = ((C @ B.transpose(-1, -2)) * between) @ u
    since_start = total.to(x.dtype).exp()
    # A chunk's end is the start of the next one; after the last one it is the state to return.
    ends = total.shape[1] - (not need_state)
    to_end = (total[:, :ends, ..., -1:] - total[:, :ends]).to(x.dtype).exp()
    written = (u[:, :ends] * to_end[..., None]).transpose(-1, -2) @ B[:, :ends]
    begin = first_state(x, B, None) if first is None else first
    states = [rearrange(begin, "b (g h) d state -> b g h d state", g=groups)]
    for chunk_decay, chunk_written in zip(since_start[..., -1].unbind(1), written.unbind(1)):
        states.append(torch.addcmul(chunk_written, chunk_decay[..., None, None], states[-1]))
    y = inside
    if first is not None or total.shape[1] > 1:
        before = states[: total.shape[1]]
        start = before[0][:, None] if len(before) == 1 else torch.stack(before, dim=1)
        y = y + (C @ start.transpose(-1, -2)) * since_start[..., None]
    y = rearrange(y, "b chunk g h q d -> b (chunk q) (g h) d")[:, :length]
    return y, rearrange(states[-1], "b g h d state -> b (g h) d state") if need_state else x.new_empty(0)


def _all_states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None) -> Tensor:
    tensors = [x, dt, A, B] + ([] if initial_state is None else [initial_state])
    if torch.is_grad_enabled() and any(v.requires_grad for v in tensors):
        states = ssd_stopping(x, dt, A, B, C, None, initial_state, read_states=True).states
        assert states is not None
        return states
    heads = x.shape[2]
    state = first_state(x, B, initial_state)
    # One buffer and writes into it: stacking would hold the trajectory twice.
    states = x.new_empty(x.shape[1], *state.shape)
    u, decay, B = (dt[..., None] * x)[..., None], torch.exp(dt * A)[..., None, None], _to_heads(B, heads)
    for step, out in enumerate(states.unbind(0)):
        torch.mul(u[:, step], B[:, step, :, None], out=out)
        state = out.addcmul_(decay[:, step], state)
    return states.transpose(0, 1)


def _read(state: Tensor, C: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    y = (state @ C.to(state.dtype)[..., None]).squeeze(-1)
    return y if D is None else y + x.to(y.dtype) * _per_head(D, y.dtype)


def _to_heads(v: Tensor, heads: int) -> Tensor:
    return repeat(v, "... groups state -> ... (groups each) state", each=heads // v.shape[-2])


def _per_head(D: Tensor, dtype: torch.dtype) -> Tensor:
    return (D[:, None] if D.ndim == 1 else D).to(dtype)


def _check_shapes(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> None:
    if x.ndim != 4 or B.ndim != 4:
        raise ShapeError(
            "x must be (batch, pos, heads, d_head) and B (batch, pos, groups, d_state), "
            f"got {tuple(x.shape)} and {tuple(B.shape)}"
        )
    batch, length, heads, d_head = x.shape
    groups, d_state = B.shape[2:]
    if length == 0:
        raise ShapeError("the sequence has no positions")
    if groups == 0 or heads % groups:
        raise ShapeError(f"{heads} heads can't be shared out among {groups} groups")
    check_each(
        f"x {tuple(x.shape)} and B {tuple(B.shape)}",
        dt=(dt, (batch, length, heads)),
        A=(A, (heads,)),
        B=(B, (batch, length, groups, d_state)),
        C=(C, (batch, length, groups, d_state)),
        D=(D, (heads,), (heads, d_head)),
        initial_state=(initial, (batch, heads, d_head, d_state)),
    )

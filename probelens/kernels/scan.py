"""The selective scan of Mamba: a fused form with a backward pass of its own, and a form that stops at steps.

The recurrence, for every channel and every state dimension, is

    state[t] = exp(dt[t] * A) * state[t-1] + dt[t] * x[t] * B[t]
    y[t]     = sum over state dimensions of C[t] * state[t],  + D * x[t]

Inside this file a step's state is (batch, state, channel): the innermost axis is then the long one, which is two to
five times faster on a CPU than the (batch, channel, state) that callers see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.kernels import compiled as _compiled
from probelens.kernels import pages as _pages
from probelens.kernels.tap import run_between

StateFn = Callable[[int, Tensor], Tensor]

# Elements of one buffer of the fused scan. On a CPU the buffers of a block should stay in the second-level cache;
# elsewhere few large operations are better than many small ones.
_CPU_ELEMENTS = 1 << 18
_GPU_ELEMENTS = 1 << 25


class ScanOutput(NamedTuple):
    """What a scan gives.

    ``y`` is the output (batch, pos, d_inner) and ``state`` the last state (batch, d_inner, d_state). ``states`` has the
    state after every step (batch, pos, d_inner, d_state), or is None if not asked for. For Mamba-2 read (heads, d_head)
    in place of d_inner.
    """

    y: Tensor
    state: Tensor
    states: Tensor | None = None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    read_states: bool = False,
    method: Literal["fused", "steps"] = "fused",
) -> ScanOutput:
    """Mamba's recurrence over a whole sequence.

    The fused method never holds more than about sqrt(pos) states, in forward and in backward: backward starts from
    saved states and recomputes the ones between (a backward with ``create_graph`` holds all). Where numba is
    installed, large inputs on a CPU go through compiled loops (`fused_kernel`), which take half the time, with the
    gradient less than a third. The method "steps" is the same recurrence in plain autograd operations, one step after
    the other, for functorch transforms; it holds every state.

    Args:
        x: What is written, per channel. (batch, pos, d_inner)
        dt: Step sizes, positive, after the softplus. (batch, pos, d_inner)
        A: Decay rates, negative, ``-exp(A_log)``. (d_inner, d_state)
        B: Where in the state each position writes. (batch, pos, d_state)
        C: What each position reads. (batch, pos, d_state)
        D: Weight of the skip connection from ``x`` to ``y``. (d_inner,)
        initial_state: State before the first step; zero if None. (batch, d_inner, d_state)
        read_states: Also give the state after every step, batch * pos * d_inner * d_state numbers; nothing else of
            that size is made.
        method: "fused" or "steps".

    Returns:
        ``y`` (batch, pos, d_inner), the last state (batch, d_inner, d_state) and, if asked for, all states
        (batch, pos, d_inner, d_state); in float32, or float64 for float64 inputs.

    Raises:
        ShapeError: Shapes that don't fit together.
        InputError: An unknown method.

    Source:
        Gu and Dao 2023, arXiv 2312.00752, algorithm 2; recomputation in backward as in section 3.3.2.

    Examples:
        >>> import torch
        >>> x = torch.ones(1, 3, 1)
        >>> out = selective_scan(x, dt=x, A=torch.full((1, 1), -0.6931472), B=x, C=x, read_states=True)
        >>> out.y.flatten()
        tensor([1.0000, 1.5000, 1.7500])
        >>> torch.equal(out.states[:, -1], out.state)
        True
    """
    if method not in ("fused", "steps"):
        raise InputError(f"unknown scan method {method!r}. Allowed: 'fused', 'steps'.")
    _check_shapes(x, dt, A, B, C, D, initial_state)
    if method == "steps":
        return scan_stopping(x, dt, A, B, C, D, initial_state, read_states=read_states)
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, A, B, C = (v.to(dtype) for v in (x, dt, A, B, C))
        state = first_state(x, B, initial_state).transpose(1, 2)
        y, last, states = _FusedScan.apply(dt * x, dt, A.T.contiguous(), B, C, state, read_states)
        if D is not None:
            y = torch.addcmul(y, x, D.to(dtype))
    return ScanOutput(y, last.transpose(1, 2), states.permute(1, 0, 3, 2) if read_states else None)


def fused_kernel(x: Tensor, A: Tensor) -> Literal["numba", "torch"]:
    """What carries out the fused scan and its gradient.

    "numba" are compiled loops, which come with ``pip install "probelens[fast]"``: for float32 on a CPU, from a million
    numbers (batch * pos * d_inner * d_state) on; not where states are read and a gradient is wanted. "torch" are
    PyTorch's operations, always there. Both give the same numbers but for rounding.

    Args:
        x: What would be written. (batch, pos, d_inner)
        A: Decay rates. (d_inner, d_state)

    Returns:
        "numba" or "torch".

    Raises:
        ShapeError: Shapes that don't fit together.

    Examples:
        >>> import torch
        >>> fused_kernel(torch.ones(1, 3, 8), -torch.ones(8, 16))  # too small to be worth it
        'torch'
    """
    if x.ndim != 3 or A.ndim != 2 or x.shape[2] != len(A):
        raise ShapeError(
            f"x must be (batch, pos, d_inner) and A (d_inner, d_state), got {tuple(x.shape)} and {tuple(A.shape)}"
        )
    return "numba" if _compiled.suits_scan(x, A.T) else "torch"


def scan_stopping(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    on_state: StateFn | None = None,
    steps: Collection[int] | None = None,
    write: Tensor | None = None,
    *,
    read_states: bool = False,
) -> ScanOutput:
    """The recurrence of `selective_scan` one step after the other, or fused between few edited steps.

    ``on_state(step, state)`` gets the state after each of ``steps`` (None: every one), (batch, d_inner, d_state); that
    step's ``y``, every later step and ``read_states`` see what it returns. ``write`` takes the place of ``dt * x * B``.
    """
    if on_state and steps is not None and write is None and not read_states and 2 * len(steps) <= x.shape[1]:

        def run(piece: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
            return selective_scan(x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece], D, state)[:2]

        def read(step: int, state: Tensor) -> Tensor:
            return _read(state, C[:, step], x[:, step], D)

        return ScanOutput(*run_between(steps, x.shape[1], initial_state, run, read, on_state))
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, A, B, C = (v.to(dtype) for v in (x, dt, A, B, C))
        # unbind, not indexing: the gradient of an index is a tensor as large as what was indexed, at every step, which
        # makes backward quadratic in length.
        u_steps, dt_steps, B_steps = (dt * x).unbind(1), dt.unbind(1), B.unbind(1)
        made = (u[..., None] * b[:, None] for u, b in zip(u_steps, B_steps))
        writes = made if write is None else write.to(dtype).unbind(1)
        steps_of = zip(writes, (torch.exp(d[..., None] * A) for d in dt_steps), C.unbind(1), x.unbind(1))
        return by_steps(first_state(x, B, initial_state), steps_of, _read, D, on_state, steps, read_states)


def by_steps(
    state: Tensor,
    inputs: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]],
    read: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    D: Tensor | None,
    on_state: StateFn | None,
    at: Collection[int] | None,
    read_states: bool,
) -> ScanOutput:
    """The loop of both recurrences. Each step's inputs are what it writes, its decay, C and x."""
    ys, states = [], []
    for step, (write, decay, C, x) in enumerate(inputs):
        state = torch.addcmul(write, decay, state)
        if on_state is not None and (at is None or step in at):
            state = on_state(step, state)
        ys.append(read(state, C, x, D))
        if read_states:
            states.append(state)
    return ScanOutput(torch.stack(ys, dim=1), state, torch.stack(states, dim=1) if read_states else None)


def _read(state: Tensor, C: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    y = (state @ C.to(state.dtype)[..., None]).squeeze(-1)
    return y if D is None else torch.addcmul(y, x.to(y.dtype), D.to(y.dtype))


def compute_dtype(x: Tensor) -> torch.dtype:
    """States are summed over many steps, so half precision isn't enough for them."""
    return torch.promote_types(x.dtype, torch.float32)


def first_state(x: Tensor, B: Tensor, initial: Tensor | None) -> Tensor:
    """The state before the first step. (batch, *what of x, d_state)"""
    if initial is None:
        return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
    return initial.to(device=x.device, dtype=x.dtype)


def _check_shapes(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> None:
    if x.ndim != 3 or A.ndim != 2:
        raise ShapeError(
            f"x must be (batch, pos, d_inner) and A (d_inner, d_state), got {tuple(x.shape)} and {tuple(A.shape)}"
        )
    batch, length, channels = x.shape
    d_state = A.shape[1]
    if length == 0:
        raise ShapeError("the sequence has no positions")
    check_each(
        f"x {tuple(x.shape)} and A {tuple(A.shape)}",
        dt=(dt, (batch, length, channels)),
        A=(A, (channels, d_state)),
        B=(B, (batch, length, d_state)),
        C=(C, (batch, length, d_state)),
        D=(D, (channels,)),
        initial_state=(initial, (batch, channels, d_state)),
    )


def check_each(given: str, **expected: tuple[Tensor | None, *tuple[tuple[int, ...], ...]]) -> None:
    """Raise a ShapeError for the first tensor that has none of its allowed shapes."""
    for name, (tensor, *shapes) in expected.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            allowed = " or ".join(map(str, shapes))
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, but {given} need {allowed}")


def _plan(batch: int, length: int, per_example: int, device: str) -> tuple[int, int, int]:
    """Examples per block, steps per vectorised chunk, steps between saved states."""
    budget = _CPU_ELEMENTS * torch.get_num_threads() if device == "cpu" else _GPU_ELEMENTS
    block = max(1, min(batch, budget // per_example))
    chunk = max(1, min(length, budget // (per_example * block)))
    span = max(chunk, math.isqrt(length - 1) + 1)
    return block, chunk, -(-span // chunk) * chunk


class _FusedScan(torch.autograd.Function):
    """u, dt are (batch, pos, channel), A (state, channel), B, C (batch, pos, state), states (batch, state, channel)."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, channels = u.shape
        d_state = A.shape[0]
        ctx.keep = keep
        saving = any(ctx.needs_input_grad)
        # The gradient of states that are kept needs some of them saved besides, which only PyTorch's operations do.
        if not (keep and saving) and _compiled.suits_scan(u, A):
            if keep:
                states = _pages.empty(u, (length, batch, d_state, channels))
                return *_compiled.scan_keeping(u, dt, A, B, C, first, states), states
            y, last = _compiled.scan(u, dt, A, B, C, first)
            if saving:
                ctx.save_for_backward(u, dt, A, B, C, first, u.new_empty(0))
            ctx.plan = None
            states = u.new_empty(0)
            ctx.mark_non_differentiable(states)
            return y, last, states
        block, chunk, span = _plan(batch, length, d_state * channels, u.device.type)
        y = u.new_empty(u.shape)
        last = u.new_empty(batch, d_state, channels)
        states = _pages.empty(u, (length, batch, d_state, channels)) if keep else u.new_empty(0)
        saved = u.new_empty((-(-length // span), batch, d_state, channels) if saving else 0)
        shape = (chunk, min(block, batch), d_state, channels)
        decay = u.new_empty(shape)
        # Two buffers in turn: the last state of one chunk is read while the next chunk is written.
        work = u.new_empty(0 if keep else (2, *shape))
        for i in range(0, batch, block):
            rows = slice(i, i + block)
            state = first[rows]
            n = state.shape[0]
            u_, dt_, B_, C_ = (v[rows].transpose(0, 1) for v in (u, dt, B, C))
            for k in range(0, length, chunk):
                m = min(chunk, length - k)
                if saving and k % span == 0:
                    saved[k // span, rows] = state
                now = slice(k, k + m)
                new = states[now, rows] if keep else work[k // chunk % 2, :m, :n]
                state = _advance(u_[now], dt_[now], A, B_[now], state, decay[:m, :n], new)
                y[rows, now] = torch.matmul(C_[now, :, None], new).squeeze(2).transpose(0, 1)
            last[rows] = state
        if saving:
            ctx.save_for_backward(u, dt, A, B, C, first, saved)
        ctx.plan = block, chunk, span
        if not keep:
            ctx.mark_non_differentiable(states)
        return y, last, states

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_last: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, saved = ctx.saved_tensors
        grads = (grad_y, grad_last, *((grad_states,) if ctx.keep else ()))
        with torch.autocast(saved.device.type, enabled=False):
            if torch.is_grad_enabled():  # create_graph=True: somebody wants second derivatives
                return _differentiable_backward(inputs, ctx.needs_input_grad, grads)
            u, dt, A, B, C, first = inputs
            if ctx.plan is None:
                found = _compiled.scan_gradients(u, dt, A, B, C, first, grad_y, grad_last)
                return (*(g if need else None for g, need in zip(found, ctx.needs_input_grad)), None)
            return _backward(ctx, u, dt, A, B, C, saved, grad_y, grad_last, grad_states if ctx.keep else None)


def _advance(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor, decay: Tensor, out: Tensor) -> Tensor:
    """Write the states of some steps to ``out`` and their decays to ``decay``; give the last state."""
    torch.mul(dt[:, :, None], A, out=decay).exp_()
    torch.mul(u[:, :, None], B[..., None], out=out)
    for decay_step, out_step in zip(decay.unbind(0), out.unbind(0)):
        state = out_step.addcmul_(decay_step, state)
    return state


def _backward(
    ctx: Any, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, saved: Tensor,
    grad_y: Tensor, grad_last: Tensor, grad_states: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    block, chunk, span = ctx.plan
    need_u, need_dt, need_A, need_B, need_C, need_first = ctx.needs_input_grad[:6]
    batch, length, channels = u.shape
    d_state = A.shape[0]
    g_u, g_dt = (u.new_empty(u.shape) if need else None for need in (need_u, need_dt))
    g_B, g_C = (u.new_empty(B.shape) if need else None for need in (need_B, need_C))
    g_first = u.new_empty(batch, d_state, channels) if need_first else None
    rows_most = min(block, batch)
    shape = (min(span, length), rows_most, d_state, channels)
    all_states = u.new_empty(shape[0] + 1, *shape[1:])
    all_decays = u.new_empty(shape)
    # grad holds dL/dstate of a chunk; flow, what comes into it from the step after the chunk.
    all_grad, all_tmp = u.new_empty(chunk, *shape[1:]), u.new_empty(chunk, *shape[1:])
    all_carry = u.new_empty(shape[1:])
    sum_A = u.new_zeros(chunk, *shape[1:]) if need_A else None
    for i in range(0, batch, block):
        rows = slice(i, i + block)
        n = min(block, batch - i)
        states, decays, carry = all_states[:, :n], all_decays[:, :n], all_carry[:n]
        u_, dt_, B_, C_, gy_ = (v[rows].transpose(0, 1) for v in (u, dt, B, C, grad_y))
        flow = grad_last[rows]
        for start in reversed(range(0, length, span)):
            stop = min(start + span, length)
            flow = carry.copy_(flow)
            state = states[0].copy_(saved[start // span, rows])
            for k in range(start, stop, chunk):
                now, here = slice(k, min(k + chunk, stop)), slice(k - start, min(k + chunk, stop) - start)
                after = slice(here.start + 1, here.stop + 1)
                state = _advance(u_[now], dt_[now], A, B_[now], state, decays[here], states[after])
            for k in reversed(range(start, stop, chunk)):
                now, here = slice(k, min(k + chunk, stop)), slice(k - start, min(k + chunk, stop) - start)
                state_before, state_after = states[here], states[here.start + 1 : here.stop + 1]
                m = now.stop - k
                grad, decay, tmp = all_grad[:m, :n], decays[here], all_tmp[:m, :n]
                gy = gy_[now][:, :, None]
                if g_C is not None:
                    g_C[rows, now] = torch.matmul(gy, state_after.transpose(-1, -2)).squeeze(2).transpose(0, 1)
                torch.mul(gy, C_[now][..., None], out=grad)
                if grad_states is not None:
                    grad.add_(grad_states[now, rows])
                for grad_step, decay_step in zip(reversed(grad.unbind(0)), reversed(decay.unbind(0))):
                    grad_step.add_(flow)
                    flow = decay_step.mul_(grad_step)
                if g_B is not None:
                    g_B[rows, now] = (
                        torch.matmul(u_[now][:, :, None], grad.transpose(-1, -2)).squeeze(2).transpose(0, 1)
                    )
                if g_u is not None:
                    g_u[rows, now] = torch.matmul(B_[now][:, :, None], grad).squeeze(2).transpose(0, 1)
                if g_dt is None and sum_A is None:
                    continue
                # decay holds decay * grad by now; times the state before, it is the gradient of dt * A.
                exponent = torch.mul(decay, state_before, out=grad)
                if g_dt is not None:
                    g_dt[rows, now] = torch.mul(exponent, A, out=tmp).sum(2).transpose(0, 1)
                if sum_A is not None:
                    sum_A[:m, :n].addcmul_(exponent, dt_[now][:, :, None])
        if g_first is not None:
            g_first[rows] = flow
    g_A = None if sum_A is None else sum_A.sum((0, 1))
    return g_u, g_dt, g_A, g_B, g_C, g_first, None


def _differentiable_backward(
    inputs: list[Tensor], needed: tuple[bool, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    # Aliases, since u was made from dt: the gradient of dt must not go through u here.
    u, dt, A, B, C, state = aliases = [v.view_as(v) for v in inputs]
    ys, states = [], []
    for u_step, dt_step, B_step, C_step in zip(u.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1)):
        state = torch.exp(dt_step[:, None] * A) * state + u_step[:, None] * B_step[..., None]
        ys.append((C_step[:, None] @ state).squeeze(1))
        states.append(state)
    outputs = (torch.stack(ys, dim=1), state, torch.stack(states))[: len(grads)]
    wanted = [v for v, need in zip(aliases, needed) if need]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True))
    return (*(next(found) if need else None for need in needed[:6]), None)

"""Loops that numba compiles, for Mamba on a CPU: the selective scan, the convolution before it, their gradients.

The scan is the recurrence of `probelens._scan`, in its layout. One example and a few channels are run over the whole
sequence at a time, so that what a step needs stays in the first-level cache; backward runs forward again and keeps
only that piece's states. numba comes with the extra ``probelens[fast]``; without it PyTorch's operations run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["conv", "conv_gradients", "kernels", "scan", "scan_gradients", "suits_conv", "suits_scan"]

# Loading the compiled loops takes a tenth of a second, compiling them seconds, once per installation.
_FEWEST_ELEMENTS = 1 << 20
# Floats of one piece's states in backward; they and the decays then just fit a common second-level cache.
_PIECE_FLOATS = 1 << 18
_MOST_FLOATS = 1 << 24
_NARROWEST, _WIDEST = 16, 256


class _Kernels(NamedTuple):
    scan: Callable[..., None]
    scan_gradients: Callable[..., None]
    conv: Callable[..., None]
    conv_gradients: Callable[..., None]


def suits_scan(u: Tensor, A: Tensor) -> bool:
    """Whether the compiled loops can run the scan, and are worth it.

    Args:
        u: What is written. (batch, pos, channel)
        A: Decay rates. (state, channel)
    """
    within = u.shape[1] * A.shape[0] * _NARROWEST <= _MOST_FLOATS
    return within and _suits(u, u.numel() * A.shape[0])


def suits_conv(x: Tensor, weight: Tensor) -> bool:
    """Whether the compiled loops can run the convolution, and are worth it.

    Args:
        x: Input. (batch, pos, channel)
        weight: Kernel. (channel, kernel size)
    """
    return _suits(x, x.numel() * weight.shape[1])


def _suits(x: Tensor, elements: int) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or elements < _FEWEST_ELEMENTS:
        return False
    return kernels() is not None


def scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state.

    Args:
        u, dt, A, B, C, first: As `probelens._scan` lays them out, float32 on the CPU.

    Returns:
        y (batch, pos, channel) and the last state (batch, state, channel).
    """
    y, last = _zeros(u), first.clone(memory_format=torch.contiguous_format)
    arrays = *_arrays(u, dt, A, B, C), y.numpy(), last.numpy()
    run = _found().scan
    _by_rows(len(u), lambda start, stop: run(start, stop, _width(u, A), *arrays))
    return y, last


def scan_gradients(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor, grad_y: Tensor, grad_last: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of u, dt, A, B, C and the first state.

    Args:
        u, dt, A, B, C, first: The inputs of `scan`.
        grad_y: Gradient of y. (batch, pos, channel)
        grad_last: Gradient of the last state. (batch, state, channel)
    """
    g_u, g_dt, g_B, g_C, g_first = (_zeros(v) for v in (u, dt, B, C, first))
    arrays = *_arrays(u, dt, A, B, C, first, grad_y, grad_last), *_arrays(g_u, g_dt, g_B, g_C, g_first)
    run, parts = _found().scan_gradients, list[Tensor]()

    def share(start: int, stop: int) -> None:
        g_A = _zeros(A)
        run(start, stop, _width(u, A), *arrays, g_A.numpy())
        parts.append(g_A)

    _by_rows(len(u), share)
    return g_u, g_dt, torch.stack(parts).sum(0), g_B, g_C, g_first


def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution along positions, channel by channel, each position seeing itself and those before.

    Args:
        x: Input, float32 on the CPU. (batch, pos, channel)
        weight: Kernel, last position last. (kernel size, channel)
        bias: (channel,)

    Returns:
        (batch, pos, channel)
    """
    y = _zeros(x)
    arrays = *_arrays(x, weight, bias), y.numpy()
    run = _found().conv
    _by_rows(len(x), lambda start, stop: run(start, stop, *arrays))
    return y


def conv_gradients(x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias.

    Args:
        x, weight: The inputs of `conv`.
        grad_y: Gradient of its output. (batch, pos, channel)
    """
    g_x = _zeros(x)
    arrays = *_arrays(x, weight, grad_y), g_x.numpy()
    run, parts = _found().conv_gradients, list[tuple[Tensor, Tensor]]()

    def share(start: int, stop: int) -> None:
        g_weight, g_bias = _zeros(weight), x.new_zeros(x.shape[2])
        run(start, stop, *arrays, g_weight.numpy(), g_bias.numpy())
        parts.append((g_weight, g_bias))

    _by_rows(len(x), share)
    g_weights, g_biases = zip(*parts)
    return g_x, torch.stack(g_weights).sum(0), torch.stack(g_biases).sum(0)


def _found() -> _Kernels:
    found = kernels()
    assert found is not None
    return found


def _zeros(like: Tensor) -> Tensor:
    return like.new_zeros(like.shape)


def _arrays(*tensors: Tensor) -> Iterator[Any]:
    return (v.detach().contiguous().numpy() for v in tensors)


def _width(u: Tensor, A: Tensor) -> int:
    """Channels of a piece."""
    fits = _PIECE_FLOATS // (u.shape[1] * A.shape[0])
    return min(_WIDEST, max(_NARROWEST, fits // _NARROWEST * _NARROWEST))


def _by_rows(batch: int, run: Callable[[int, int], None]) -> None:
    """Share the examples out among as many threads as PyTorch uses."""
    n = min(torch.get_num_threads(), batch)
    if n <= 1:
        return run(0, batch)
    bounds = [batch * i // n for i in range(n + 1)]
    with ThreadPoolExecutor(n) as pool:
        list(pool.map(run, bounds[:-1], bounds[1:]))
    return None


@functools.cache
def kernels() -> _Kernels | None:
    """The compiled loops; None where numba is not installed or doesn't work."""
    try:
        import numba
    except ImportError:
        return None
    except Exception as err:  # numba refuses versions of NumPy it doesn't know, in its own ways
        warnings.warn(
            f"numba is installed but can't be used ({err}); PyTorch's operations run instead", stacklevel=2
        )
        return None
    try:
        return _compile(numba.njit, cache=True)
    except RuntimeError:  # nowhere to write the compiled code to
        return _compile(numba.njit, cache=False)


def _compile(njit: Callable[..., Any], cache: bool) -> _Kernels:
    import numpy as np

    f32, i32 = np.float32, np.int32
    log2e, ln2_high, ln2_low = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
    p0, p1, p2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
    p3, p4, p5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)
    half, one, lowest, highest = f32(0.5), f32(1.0), f32(-87.0), f32(88.0)

    # Cephes' expf (Moshier), relative error 8e-8. The compiler can't use several lanes for the C library's, and
    # may not reorder the two subtractions, so this function alone allows no reassociation.
    @njit(fastmath={"contract"}, cache=cache)
    def exp(x):  # type: ignore[no-untyped-def]
        x = min(max(x, lowest), highest)
        n = np.floor(x * log2e + half)
        r = x - n * ln2_high
        r = r - n * ln2_low
        p = ((((p0 * r + p1) * r + p2) * r + p3) * r + p4) * r + p5
        p = p * r * r + r + one
        return p * i32((i32(n) + i32(127)) << i32(23)).view(f32)

    loose = {"contract", "nsz", "reassoc"}

    # Each of these loops touches few arrays: the compiler uses several lanes only where it can check that they
    # don't overlap, and gives up beyond a handful.
    @njit(fastmath=loose, cache=cache)
    def step(decay, dt, A, u, write, before, after):  # type: ignore[no-untyped-def]
        for c in range(len(decay)):
            decay[c] = exp(dt[c] * A[c])
        for c in range(len(decay)):
            after[c] = decay[c] * before[c] + u[c] * write

    @njit(fastmath=loose, cache=cache)
    def add(out, a, b):  # type: ignore[no-untyped-def]
        for c in range(len(out)):
            out[c] += a[c] * b[c]

    @njit(fastmath=loose, cache=cache)
    def add_scaled(out, a, scale):  # type: ignore[no-untyped-def]
        for c in range(len(out)):
            out[c] += a[c] * scale

    @njit(fastmath=loose, cache=cache)
    def multiply(a, b, out):  # type: ignore[no-untyped-def]
        for c in range(len(out)):
            out[c] = a[c] * b[c]

    @njit(fastmath=loose, cache=cache)
    def dot(a, b):  # type: ignore[no-untyped-def]
        total = f32(0.0)
        for c in range(len(a)):
            total += a[c] * b[c]
        return total

    @njit(fastmath=loose, nogil=True, cache=cache)
    def run_scan(start, stop, width, u, dt, A, B, C, y, state):  # type: ignore[no-untyped-def]
        length, channels = u.shape[1:]
        decays = np.empty(width, np.float32)
        for b in range(start, stop):
            for low in range(0, channels, width):
                high = min(low + width, channels)
                decay = decays[: high - low]
                for t in range(length):
                    u_now, dt_now, y_now = u[b, t, low:high], dt[b, t, low:high], y[b, t, low:high]
                    for n in range(len(A)):
                        s = state[b, n, low:high]
                        step(decay, dt_now, A[n, low:high], u_now, B[b, t, n], s, s)
                        add_scaled(y_now, s, C[b, t, n])

    @njit(fastmath=loose, nogil=True, cache=cache)
    def run_scan_gradients(  # type: ignore[no-untyped-def]
        start, stop, width, u, dt, A, B, C, first, g_y, g_last, g_u, g_dt, g_B, g_C, g_first, g_A
    ):
        length, channels = u.shape[1:]
        d_state = len(A)
        states = np.empty((length + 1, d_state, width), np.float32)
        decays = np.empty((length, d_state, width), np.float32)
        flows = np.empty((d_state, width), np.float32)
        sums = np.empty((d_state, width), np.float32)
        for b in range(start, stop):
            for low in range(0, channels, width):
                high = min(low + width, channels)
                w = high - low
                for n in range(d_state):
                    states[0, n, :w] = first[b, n, low:high]
                    flows[n, :w] = g_last[b, n, low:high]
                    sums[n, :w] = f32(0.0)
                for t in range(length):
                    u_now, dt_now = u[b, t, low:high], dt[b, t, low:high]
                    for n in range(d_state):
                        step(
                            decays[t, n, :w], dt_now, A[n, low:high], u_now, B[b, t, n],
                            states[t, n, :w], states[t + 1, n, :w],
                        )  # fmt: skip
                for t in range(length - 1, -1, -1):
                    u_now, dt_now, g_now = u[b, t, low:high], dt[b, t, low:high], g_y[b, t, low:high]
                    g_u_now, g_dt_now = g_u[b, t, low:high], g_dt[b, t, low:high]
                    for n in range(d_state):
                        flow = flows[
                            n, :w
                        ]  # the gradient of the state, and then of decay times the state before
                        g_C[b, t, n] += dot(g_now, states[t + 1, n, :w])
                        add_scaled(flow, g_now, C[b, t, n])
                        g_B[b, t, n] += dot(u_now, flow)
                        add_scaled(g_u_now, flow, B[b, t, n])
                        exponent = decays[t, n, :w]  # its gradient, from here on
                        multiply(flow, exponent, flow)
                        multiply(flow, states[t, n, :w], exponent)
                        add(g_dt_now, exponent, A[n, low:high])
                        add(sums[n, :w], exponent, dt_now)
                for n in range(d_state):
                    g_first[b, n, low:high] = flows[n, :w]
                    g_A[n, low:high] += sums[n, :w]

    @njit(fastmath=loose, nogil=True, cache=cache)
    def run_conv(start, stop, x, weight, bias, y):  # type: ignore[no-untyped-def]
        size = len(weight)
        for b in range(start, stop):
            for t in range(x.shape[1]):
                now = y[b, t]
                now[:] = bias
                for k in range(max(0, size - 1 - t), size):
                    add(now, x[b, t - size + 1 + k], weight[k])

    @njit(fastmath=loose, nogil=True, cache=cache)
    def run_conv_gradients(start, stop, x, weight, g_y, g_x, g_weight, g_bias):  # type: ignore[no-untyped-def]
        size = len(weight)
        sums = np.empty_like(weight)
        for b in range(start, stop):
            sums[:] = f32(0.0)
            for t in range(x.shape[1]):
                now = g_y[b, t]
                for k in range(max(0, size - 1 - t), size):
                    add(g_x[b, t - size + 1 + k], now, weight[k])
                    add(sums[k], now, x[b, t - size + 1 + k])
            g_weight += sums
            for t in range(x.shape[1]):
                add_scaled(g_bias, g_y[b, t], one)

    return _Kernels(run_scan, run_scan_gradients, run_conv, run_conv_gradients)

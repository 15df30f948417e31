"""The loops of `probelens.kernels.compiled` as numba compiles them; it comes with ``probelens[fast]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # At the top of a module: numba finds what it compiled in an earlier process only of functions without a closure.
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(fn)
        except RuntimeError:  # nowhere to write the compiled code to
            return numba.njit(**options)(fn)

    return decorate


f32, i32 = np.float32, np.int32
log2e, ln2_high, ln2_low = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
p0, p1, p2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
p3, p4, p5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)
half, one, lowest, highest = f32(0.5), f32(1.0), f32(-87.0), f32(88.0)


# Cephes' expf (Moshier), relative error 8e-8. The compiler can't use several lanes for the C library's, and
# may not reorder the two subtractions, so this function alone allows no reassociation.
@_compiled(fastmath={"contract"})
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
@_compiled(fastmath=loose)
def step(decay, dt, A, u, write, before, after):  # type: ignore[no-untyped-def]
    for c in range(len(decay)):
        decay[c] = exp(dt[c] * A[c])
    for c in range(len(decay)):
        after[c] = decay[c] * before[c] + u[c] * write


@_compiled(fastmath=loose)
def add(out, a, b):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        out[c] += a[c] * b[c]


@_compiled(fastmath=loose)
def add_scaled(out, a, scale):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        out[c] += a[c] * scale


@_compiled(fastmath=loose)
def multiply(a, b, out):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        out[c] = a[c] * b[c]


@_compiled(fastmath=loose)
def dot(a, b):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for c in range(len(a)):
        total += a[c] * b[c]
    return total


@_compiled(fastmath=loose, nogil=True)
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


@_compiled(fastmath=loose, nogil=True)
def run_scan_keeping(start, stop, u, dt, A, B, C, first, y, states):  # type: ignore[no-untyped-def]
    """As `run_scan`, with the state after every step, (pos, batch, state, channel), written in the order of memory."""
    length, channels = u.shape[1:]
    decay = np.empty(channels, np.float32)
    for t in range(length):
        for b in range(start, stop):
            for n in range(len(A)):
                before = first[b, n] if t == 0 else states[t - 1, b, n]
                step(decay, dt[b, t], A[n], u[b, t], B[b, t, n], before, states[t, b, n])
                add_scaled(y[b, t], states[t, b, n], C[b, t, n])


@_compiled(fastmath=loose, nogil=True)
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
                    flow = flows[n, :w]  # the gradient of the state, and then of decay times the state before
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


@_compiled(fastmath=loose, nogil=True)
def run_conv(start, stop, x, weight, bias, y):  # type: ignore[no-untyped-def]
    size = len(weight)
    for b in range(start, stop):
        for t in range(x.shape[1]):
            now = y[b, t]
            now[:] = bias
            for k in range(max(0, size - 1 - t), size):
                add(now, x[b, t - size + 1 + k], weight[k])


@_compiled(fastmath=loose, nogil=True)
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

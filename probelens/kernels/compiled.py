"""Loops that numba compiles, for Mamba on a CPU: the selective scan, the convolution before it, their gradients.

The scan is the recurrence of `probelens.kernels.scan`, in its layout. One example and a few channels are run over the
whole sequence at a time, so that what a step needs stays in the first-level cache; backward runs forward again and
keeps only that piece's states. numba comes with the extra ``probelens[fast]``; without it PyTorch's operations run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

# Loading numba and the compiled loops takes 0.4 s of CPU time, compiling them seconds, once per installation.
_FEWEST_ELEMENTS = 1 << 20
# Floats of one piece's states in backward; they and the decays then just fit a common second-level cache.
_PIECE_FLOATS = 1 << 18
_MOST_FLOATS = 1 << 24
_NARROWEST, _WIDEST = 16, 256

T = TypeVar("T")


def suits_scan(u: Tensor, A: Tensor) -> bool:
    """Whether the compiled loops can run the scan, and are worth it. (batch, pos, channel), (state, channel)"""
    within = u.shape[1] * A.shape[0] * _NARROWEST <= _MOST_FLOATS
    return within and _suits(u, u.numel() * A.shape[0])


def suits_conv(x: Tensor, weight: Tensor) -> bool:
    """Whether the compiled loops can run the convolution, and are worth it. (batch, pos, channel), (channel, size)"""
    return _suits(x, x.numel() * weight.shape[1])


def _suits(x: Tensor, elements: int) -> bool:
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and elements >= _FEWEST_ELEMENTS
    return fits and kernels() is not None


def scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """y (batch, pos, channel) and the last state (batch, state, channel), from float32 inputs on the CPU."""
    y, last = _zeros(u), first.clone(memory_format=torch.contiguous_format)
    arrays = *_arrays(u, dt, A, B, C), y.numpy(), last.numpy()
    run = _loops().run_scan
    _by_rows(len(u), lambda start, stop: run(start, stop, _width(u, A), *arrays))
    return y, last


def scan_keeping(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """As `scan`, and write the state after every step to ``states``, contiguous (pos, batch, state, channel)."""
    y = _zeros(u)
    arrays = *_arrays(u, dt, A, B, C, first), y.numpy(), states.numpy()
    run = _loops().run_scan_keeping
    _by_rows(len(u), lambda start, stop: run(start, stop, *arrays))
    return y, states[-1].clone()


def scan_gradients(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor, grad_y: Tensor, grad_last: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the inputs of `scan`, from those of its outputs."""
    g_u, g_dt, g_B, g_C, g_first = (_zeros(v) for v in (u, dt, B, C, first))
    arrays = *_arrays(u, dt, A, B, C, first, grad_y, grad_last), *_arrays(g_u, g_dt, g_B, g_C, g_first)
    run = _loops().run_scan_gradients

    def share(start: int, stop: int) -> Tensor:
        g_A = _zeros(A)
        run(start, stop, _width(u, A), *arrays, g_A.numpy())
        return g_A

    return g_u, g_dt, torch.stack(_by_rows(len(u), share)).sum(0), g_B, g_C, g_first


def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A causal convolution of each channel, float32 on the CPU. (batch, pos, channel), (kernel size, channel)"""
    y = _zeros(x)
    arrays = *_arrays(x, weight, bias), y.numpy()
    run = _loops().run_conv
    _by_rows(len(x), lambda start, stop: run(start, stop, *arrays))
    return y


def conv_gradients(x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the x, weight and bias of `conv`, from that of its output."""
    g_x = _zeros(x)
    arrays = *_arrays(x, weight, grad_y), g_x.numpy()
    run = _loops().run_conv_gradients

    def share(start: int, stop: int) -> tuple[Tensor, Tensor]:
        g_weight, g_bias = _zeros(weight), x.new_zeros(x.shape[2])
        run(start, stop, *arrays, g_weight.numpy(), g_bias.numpy())
        return g_weight, g_bias

    g_weights, g_biases = zip(*_by_rows(len(x), share))
    return g_x, torch.stack(g_weights).sum(0), torch.stack(g_biases).sum(0)


def _loops() -> ModuleType:
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


def _by_rows(batch: int, run: Callable[[int, int], T]) -> list[T]:
    """Share the examples out among as many threads as PyTorch uses; results in the order of the examples."""
    n = min(torch.get_num_threads(), batch)
    if n <= 1:
        return [run(0, batch)]
    bounds = [batch * i // n for i in range(n + 1)]
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, bounds[:-1], bounds[1:]))


@functools.cache
def kernels() -> ModuleType | None:
    """The compiled loops; None where numba is not installed or doesn't work."""
    try:
        import numba
    except ImportError:
        return None
    except Exception as err:  # numba refuses versions of NumPy it doesn't know, in its own ways
        _warn(err)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):
        return None
    try:
        with _said():
            from probelens.kernels import loops

            _try(loops)
    except Exception as err:  # a damaged cache of compiled code, say
        _warn(err)
        return None
    return loops


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Say on stderr what takes so long, once, where the loops are compiled and not merely loaded."""
    from numba.core import event

    class Listener(event.Listener):
        said = False

        def on_start(self, event: object) -> None:
            if not self.said:
                self.said = True
                sys.stderr.write("probelens: compiling Mamba's loops with numba, some seconds, once per installation\n")

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield


def _warn(err: Exception) -> None:
    warnings.warn(
        f"numba is installed but can't be used ({type(err).__name__}: {err}); PyTorch's operations run instead",
        stacklevel=4,
    )


def _try(loops: ModuleType) -> None:
    """Call each loop once, which loads it or compiles it."""
    x, A, B = (torch.zeros(shape).numpy() for shape in ((1, 1, 1), (1, 1), (1, 1, 1)))
    out = [torch.zeros(1, 1, 1).numpy() for _ in range(5)]
    loops.run_scan(0, 1, 1, x, x, A, B, B, out[0], out[1])
    loops.run_scan_keeping(0, 1, x, x, A, B, B, x, out[0], out[1][None].copy())
    loops.run_scan_gradients(0, 1, 1, x, x, A, B, B, x, x, x, *out, A.copy())
    loops.run_conv(0, 1, x, A, A[0], out[0])
    loops.run_conv_gradients(0, 1, x, A, x, out[0], A.copy(), A[0].copy())

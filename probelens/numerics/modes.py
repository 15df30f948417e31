"""PyTorch's modes around the library's own computations: without autocast, and with gradients where needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocasting() -> list[str]:
    """Kinds of device for which autocast is on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in autocasting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def exact(fn: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, which is meant for the model and not for measurements on it."""

    @functools.wraps(fn)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        with full_precision():
            return fn(*args, **kwargs)

    return outside


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Gradients inside the block, also where the caller is under ``no_grad`` or ``inference_mode``."""
    with torch.inference_mode(False), torch.enable_grad():
        yield

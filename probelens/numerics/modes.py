"""PyTorch's modes around a call: what they must not reach, and what a computation of ours needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

__all__ = ["autocasting", "differentiable", "exact", "full_precision"]

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocasting() -> list[str]:
    """The kinds of device for which the caller switched autocast on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in autocasting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def exact(fn: Callable[P, R]) -> Callable[P, R]:
    """A function whose numbers don't depend on autocast: that is for the model, not for what is measured on it."""

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

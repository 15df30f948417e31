"""PyTorch's modes around the library's own computations: without autocast, and with gradients where needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def autocasting() -> list[str]:
    """Kinds of device for which autocast is on."""
    return [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in autocasting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# Decorates measurements: autocast is meant for the model.
exact = full_precision()


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Gradients inside the block, also where the caller is under ``no_grad`` or ``inference_mode``."""
    with torch.inference_mode(False), torch.enable_grad():
        yield

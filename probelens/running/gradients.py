"""Gradients through a wrapped model: whether any come back, and weights that get none meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.numerics.modes import differentiable

__all__ = ["frozen", "need_gradients"]


def need_gradients(model: HookedModel, who: str, instead: str) -> None:
    """Refuse (InputError) a model from which no gradient comes back; ``who`` asks for it, ``instead`` needs none."""
    if not model.adapter.differentiable:
        raise InputError(
            f"{who} needs a gradient, and none comes back from a model run by {model.adapter.name!r} elsewhere. "
            f"Use {instead}"
        )
    if any(p.is_inference() for p in model.module.parameters()):
        raise InputError(
            f"{who} needs a gradient, and this model was made under torch.inference_mode, so it can have none. "
            f"Make it outside, or use {instead}"
        )


@contextlib.contextmanager
def frozen(model: HookedModel) -> Iterator[None]:
    """Gradients inside the block for what hooks put in, none for weights; in eval mode, all as before at the end."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.module.modules())
    with model.undisturbed(), differentiable(), _without_recurrent_kernels() if recurrent else contextlib.nullcontext():
        flags = [(p, p.requires_grad) for p in model.module.parameters() if p.is_leaf]
        try:
            for p, _ in flags:
                p.requires_grad_(False)
            yield
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)


_LOCK = threading.Lock()
# How many blocks do without the kernels, which are the whole process's, and what was set before the first.
_blocks = 0
_before: list[bool] = []


@contextlib.contextmanager
def _without_recurrent_kernels() -> Iterator[None]:
    """Neither cuDNN's kernels, which have a backward pass in training mode only, nor oneDNN's, which take no frozen weights in bfloat16."""
    global _blocks, _before
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    with _LOCK:
        if not _blocks:
            _before = [backend.enabled for backend in backends]
        _blocks += 1
        for backend in backends:
            backend.enabled = False
    try:
        yield
    finally:
        with _LOCK:
            _blocks -= 1
            if not _blocks:
                for backend, enabled in zip(backends, _before, strict=True):
                    backend.enabled = enabled

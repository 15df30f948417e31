"""Gradients through a wrapped model: whether any come back, and weights that get none meanwhile."""

from __future__ import annotations

import contextlib
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
    flags = [(p, p.requires_grad) for p in model.module.parameters() if p.is_leaf]
    # Recurrent kernels of cuDNN have a backward pass in training mode only, and oneDNN's take no frozen weights in bfloat16.
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.module.modules())
    enabled = [backend.enabled for backend in backends]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        for backend in backends if recurrent else ():
            backend.enabled = False
        with model.evaluating(), differentiable():
            yield
    finally:
        for backend, before in zip(backends, enabled, strict=True):
            backend.enabled = before
        for p, flag in flags:
            p.requires_grad_(flag)

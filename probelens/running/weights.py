"""A hash of what a model holds, by which folders of results know it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from probelens.hooks.forwards import stored

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel


def weights_hash(model: HookedModel) -> str:
    """64 hexadecimal digits that change with a parameter or buffer: its name, dtype, shape or a value."""
    digest = hashlib.sha256()
    add_weights(digest, model)
    return digest.hexdigest()


def add_weights(digest: hashlib._Hash, model: HookedModel) -> None:
    """Add every parameter and buffer to a hash."""
    with model.undisturbed():
        model.adapter.apply_lazy_rescaling()
    for name, kind in _state(model.module):
        value = stored(model.module, name)
        digest.update(f"{name} {kind}".encode())
        if value is not None:
            value = value.detach().cpu().contiguous()
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            numbers: Any = value.flatten().view(torch.uint8).numpy()
            digest.update(numbers)


def _state(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters and buffers: all that a run depends on, but for what the length of the last run leaves behind."""
    for name, _ in module.named_parameters():
        yield name, "parameter"
    for name, _ in module.named_buffers():
        owner = module.get_submodule(name.rpartition(".")[0])
        rope = str(getattr(owner, "rope_type", ""))
        if not ("dynamic" in rope or "longrope" in rope):
            yield name, "buffer"

"""``edit_weights``: change parameters for the length of a block, and get them back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, UnknownHookError, nearest
from probelens.hooks.points import in_block
from probelens.hooks.protocol import Wrapped

Model = TypeVar("Model", bound=Wrapped)

__all__ = ["edited_weights", "weight_name"]


def weight_name(model: Wrapped, name: str) -> str:
    """The user's own name of a parameter or buffer.

    Args:
        model: The wrapped model.
        name: A canonical name such as ``"blocks.0.mixer.conv1d.weight"`` or ``"unembed.weight"``, or
            the user's own.

    Returns:
        The name in the module's state dict.

    Raises:
        UnknownHookError: There is none; the message has the nearest.
    """
    tensors = _tensors(model)
    if name in tensors:
        return name
    head, _, rest = name.partition(".")
    adapter = model.adapter
    if head in adapter.parts:
        found = f"{adapter.parts[head]}.{rest}"
        if found in tensors:
            return found
    layer, inside = in_block(name)
    options = list(tensors)
    if layer is not None:
        if layer >= len(adapter.blocks):
            raise UnknownHookError(
                f"weight {name!r} not found: this {type(model.module).__name__} has {len(adapter.blocks)} blocks"
            )
        block = adapter.blocks[layer]
        segment, _, tail = inside.partition(".")
        own = adapter.segments.get(f"{layer}.{segment}") or adapter.segments.get(segment, segment)
        for found in (f"{block}.{inside}", f"{block}.{own}.{tail}"):
            if found in tensors:
                return found
        options = [f"blocks.{layer}.{n.removeprefix(block + '.')}" for n in tensors if n.startswith(block + ".")]
    raise UnknownHookError(f"weight {name!r} not found. Nearest: {nearest(name, options) or options[:3]}")


@contextlib.contextmanager
def edited_weights(model: Model, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[Model]:
    """Parameters changed while the block lasts; see ``HookedModel.edit_weights``.

    Args:
        model: The wrapped model.
        Those of ``HookedModel.edit_weights``.

    Yields:
        The model; the weights come back bit for bit.

    Raises:
        InputError: Something that isn't a function of a tensor, or a weight that isn't in memory.
        ShapeError: A function that returns another shape.
    """
    with model.turn.kept("edit_weights()"):
        tensors = _tensors(model)
        saved: list[tuple[Tensor, Tensor]] = []
        try:
            for name, fn in edits.items():
                if not callable(fn):
                    raise InputError(f"edit_weights takes functions of a tensor, got {type(fn).__name__} for {name!r}")
                tensor = _need_data(name, tensors[weight_name(model, name)])
                before = tensor.detach().clone()
                with torch.no_grad():
                    new = fn(before.clone())
                    if not isinstance(new, Tensor) or new.shape != tensor.shape:
                        shown = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
                        raise ShapeError(f"the edit of {name!r} returned {shown}, the weight has {tuple(tensor.shape)}")
                    saved.append((tensor, before))
                    tensor.copy_(new)
            yield model
        finally:
            # Backwards, so that a weight edited twice ends as it was before the first edit.
            with torch.no_grad():
                for tensor, before in reversed(saved):
                    tensor.copy_(before)


def _tensors(model: Wrapped) -> dict[str, Tensor]:
    named = model.module.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(model.module.named_buffers(remove_duplicate=False))}


def _need_data(name: str, weight: Tensor) -> Tensor:
    """The weight, if it holds numbers; an InputError where it is on the meta device."""
    if weight.device.type == "meta":
        raise InputError(
            f"weight {name!r} isn't in memory: it is offloaded, or the model has no weights (device 'meta'). "
            "Load the model without device_map, or with one that keeps this part on a device."
        )
    return weight

"""Edits for batches of packed sequences, whose activations have the positions of the longest in the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.edits.edit import Edit
from probelens.hooks.points import HookFn, HookPoint


def shortened(fn: HookFn) -> HookFn:
    """An edit whose masks and values may have more positions than the tensor, cut to the tensor's; other hooks as they are."""
    return Shortened(fn) if isinstance(fn, Edit) else fn


@dataclasses.dataclass(frozen=True)
class Shortened:
    """An edit that is cut to the positions of the tensor that it meets.

    Args:
        edit: The edit, made for the longest sequence.
    """

    edit: Edit

    def __call__(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        axis = hook.pos_axis
        if hook.pos is not None or tensor.ndim <= axis:
            return self.edit(tensor, hook)
        return _cut(self.edit, tensor, axis)(tensor, hook)


def _cut(edit: Edit, tensor: Tensor, axis: int) -> Edit:
    length, changes = tensor.shape[axis], dict[str, Any]()
    for field in dataclasses.fields(edit):
        value = getattr(edit, field.name)
        if isinstance(value, Edit):
            changes[field.name] = _cut(value, tensor, axis)
        if not isinstance(value, Tensor) or field.name in edit.everywhere:
            continue
        if field.name == "pos" and value.dtype == torch.bool and value.ndim == 2 and value.shape[1] > length:
            if bool(value[:, length:].any()):
                raise ShapeError(
                    f"positions from {length} on are to be edited in a batch whose activations have {length}, as packed "
                    "sequences do. Leave them out of the batch's mask"
                )
            changes[field.name] = value[:, :length]
        # A value has the axes of the tensor, or those without the examples.
        elif field.name != "pos" and tensor.ndim - value.ndim in (0, 1):
            at = axis - (tensor.ndim - value.ndim)
            if at >= 0 and value.shape[at] > length:
                changes[field.name] = value.narrow(at, 0, length)
    return dataclasses.replace(edit, **changes) if changes else edit

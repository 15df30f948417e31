"""Layout: where examples and positions are in a module's tensor, and how it is turned for a hook and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.passes.current import Pass
from probelens.hooks.points import HookPoint

__all__ = ["Layout", "called_again"]


@dataclass(frozen=True)
class Layout:
    """What was found of one hook point.

    Args:
        axes: Of the tensor that a hook gets; None where they aren't known, and then it gets the module's own tensor.
        batch_axis: Where the module's tensor has the examples.
        flat: Which of examples and positions comes first, where they share the module's first axis.
        calls: How often one forward reaches the point.
        steps: Whether each call is one position of the sequence.
        ndim: Number of axes.
        varies: Whether the tensor has one row for each example; False where one serves all.
        same_each_time: Whether every forward reaches it as often.
        declared: Whether ``axes`` are the adapter's.
        why: Why the axes aren't known.
    """

    axes: tuple[str, ...] | None
    batch_axis: int = 0
    flat: Literal["", "batch", "pos"] = ""
    calls: int = 1
    steps: bool = False
    ndim: int = 0
    varies: bool = True
    same_each_time: bool = True
    declared: bool = False
    why: str = ""

    def replace(self, **changed: Any) -> Layout:
        """A copy with other fields."""
        return dataclasses.replace(self, **changed)

    def name_axes(self, point: HookPoint) -> None:
        """Put the axes that were found into a point, or why they aren't known."""
        if self.axes is None:
            point.axes = ("unknown",) * max(1, self.ndim)
            point.note = self.why
        elif not (self.declared or (len(point.axes) == len(self.axes) and point.axes[:2] == self.axes[:2])):
            point.axes = self.axes

    def to_hook(self, tensor: Tensor, now: Pass | None) -> Tensor:
        """The module's tensor as a hook sees it: (batch, pos, …) where the axes are known."""
        if self.axes is None:
            return tensor
        if self.flat:
            if tensor.ndim >= len(self.axes):
                return tensor  # declared to share an axis where this version of the model does so
            batch = None if now is None else now.batch
            if not batch or tensor.shape[0] % batch:
                raise InputError(
                    f"a tensor {tuple(tensor.shape)} holds examples and positions on one axis, and how many examples there "
                    "are isn't known here. Call the wrapped model, or the whole module"
                )
            by_batch = self.flat == "batch"
            tensor = tensor.unflatten(0, (batch, -1) if by_batch else (-1, batch))
            return tensor if by_batch else tensor.transpose(0, 1)
        return tensor.movedim(self.batch_axis, 0) if self.batch_axis else tensor

    def from_hook(self, tensor: Tensor, ndim: int) -> Tensor:
        """The inverse of ``to_hook``, of whose tensor ``ndim`` is the number of axes."""
        if self.axes is None or (self.flat and ndim == tensor.ndim):
            return tensor
        if self.flat:
            return (tensor if self.flat == "batch" else tensor.transpose(0, 1)).flatten(0, 1)
        return tensor.movedim(0, self.batch_axis) if self.batch_axis else tensor


def called_again(name: str) -> InputError:
    """The error for a point that one forward reaches a second time, where nobody said which call is meant."""
    return InputError(
        f"{name!r} was reached a second time in one forward of this model. Say which call you mean: {name + '#0'!r}, "
        f"{name + '#1'!r} and so on, or all of them in a list"
    )

"""An edit limited to some heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.edits.edit import Edit
from probelens.hooks.points import HookPoint

__all__ = ["HEAD_AXES", "AtHeads", "at_heads"]

HEAD_AXES = ("head", "heads", "kv_head")
"""Names of axes that run over heads."""


@dataclass(frozen=True, eq=False)
class AtHeads(Edit):
    """Apply an edit to some heads and leave the other heads as they are.

    Args:
        pos: Where; see ``Edit``.
        edit: What is done at these heads.
        heads: Indices of the heads, negative ones from the end.
    """

    edit: Edit = Edit()  # noqa: RUF009 - it is frozen
    heads: tuple[int, ...] = ()

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """The tensor with some heads edited.

        Raises:
            ShapeError: The point has no axis of heads.
            InputError: A head that it doesn't have.
        """
        axes = () if hook is None else hook.axes
        axis = next((i for i, name in enumerate(axes) if name in HEAD_AXES), None)
        if hook is None or axis is None:
            where = "a tensor outside a model" if hook is None else f"{hook.name!r} with the axes {axes}"
            raise ShapeError(f"at_heads() needs a hook point with heads, got {where}. Take attn.hook_z")
        if hook.pos is not None and hook.pos_axis < axis:
            axis -= 1
        n = tensor.shape[axis]
        if not all(-n <= head < n for head in self.heads):
            raise InputError(f"heads={list(self.heads)}: {hook.name!r} has {n}, from 0 to {n - 1}")
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[list(self.heads)] = True
        chosen = chosen.to(tensor.device).reshape(-1, *[1] * (tensor.ndim - axis - 1))
        return torch.where(chosen, self.edit(tensor, hook), tensor)


def at_heads(heads: int | Sequence[int], edit: Edit) -> AtHeads:
    """Limit an edit to some heads, at a hook point that has an axis of heads.

    Args:
        heads: A head or several, negative ones from the end.
        edit: What is done there.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: No head.

    Examples:
        >>> from probelens.hooks.edits import zero
        >>> point = HookPoint("attn.hook_z", "boundary", ("batch", "pos", "head", "d_head"), "attn")
        >>> at_heads(1, zero())(torch.ones(1, 1, 2, 2), point)
        tensor([[[[1., 1.],
                  [0., 0.]]]])
    """
    chosen = (heads,) if isinstance(heads, int) else tuple(heads)
    if not chosen:
        raise InputError(f"heads={heads!r} names no head, so nothing would be edited. Give an index, or several")
    return AtHeads(None, edit, chosen)

"""An edit that takes one part of an activation, or all but that part, from another run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.edits.edit import Edit, Positions, fit
from probelens.hooks.points import HookPoint
from probelens.numerics.modes import full_precision
from probelens.numerics.tensors import tensor_of

__all__ = ["Swap", "swap"]


@dataclass(frozen=True, eq=False)
class Swap(Edit):
    """Take the part L R of an activation from a source: h + L R (s − h), or all but it: s − L R (s − h).

    Axes after that of the positions are taken together, heads and states included.

    Args:
        pos: Where; see ``Edit``.
        source: s, the activation of the other run. (...), (pos, ...) or (batch, pos, ...)
        left: L, the directions that change as rows. (rank, d)
        right: R, those that are read. (rank, d)
        complement: Take all but that part.
    """

    everywhere: ClassVar[tuple[str, ...]] = ("left", "right")
    source: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    complement: bool = False

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """The activation with the part of the source.

        Args:
            tensor: (batch, pos, ...)
            hook: The hook point.

        Returns:
            The same shape, in float32 or wider.

        Raises:
            ShapeError: Directions of another width than the activation's.
        """
        assert self.source is not None
        assert self.left is not None
        assert self.right is not None
        wide = torch.promote_types(tensor.dtype, torch.float32)
        change = fit("source", self.source, tensor, hook).to(wide) - tensor.to(wide)
        lead = 1 if hook is not None and hook.pos is not None else 2
        flat = change.flatten(lead) if change.ndim > lead else change
        if flat.shape[-1] != self.left.shape[-1]:
            raise ShapeError(
                f"the directions have width {self.left.shape[-1]}, but the hook point"
                f"{'' if hook is None else f' {hook.name!r}'} gives {tuple(tensor.shape)}, {flat.shape[-1]} wide"
            )
        with full_precision():  # autocast is meant for the model
            part = flat @ self.right.to(flat).mT @ self.left.to(flat)
        return tensor.to(wide) + (flat - part if self.complement else part).reshape(change.shape)


def swap(source: Tensor, directions: Any, pos: Positions = None, *, complement: bool = False) -> Swap:
    """Put only a subspace's projection of the source's activation in.

    Args:
        source: The activation of the other run. (...), (pos, ...) or (batch, pos, ...)
        directions: A ``Subspace``, an ``Eraser``, or orthonormal rows (rank, d).
        pos: Positions, as for ``Edit``.
        complement: Put everything but that projection in.

    Returns:
        The edit.

    Raises:
        ShapeError: Directions that aren't rows.

    Source:
        Geiger et al. 2021, arXiv 2106.02997.

    Examples:
        >>> h, s = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[5.0, 7.0]]])
        >>> swap(s, torch.tensor([[0.0, 1.0]]))(h), swap(s, torch.tensor([[0.0, 1.0]]), complement=True)(h)
        (tensor([[[1., 7.]]]), tensor([[[5., 2.]]]))
    """
    left, right = factors(directions)
    return Swap(pos, tensor_of("source", source), left, right, complement)


def factors(directions: Any) -> tuple[Tensor, Tensor]:
    """L and R of a subspace (twice its basis), of an eraser, or of orthonormal rows. each (rank, d)"""
    if hasattr(directions, "left") and hasattr(directions, "right"):
        return directions.left.mT, directions.right
    rows = tensor_of("directions", getattr(directions, "basis", directions))
    if rows.ndim != 2:
        raise ShapeError(f"directions must be rows (rank, d), got {tuple(rows.shape)}")
    return rows, rows

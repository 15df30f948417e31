"""Edits that take a subspace or a variable away, wholly or in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.edits.edit import Edit, Positions
from probelens.hooks.points import HookPoint

__all__ = ["Erase", "Project", "Removable", "erase", "project"]


class Removable(Protocol):
    """What ``project`` asks of a subspace; ``probelens.subspaces.Subspace`` has it."""

    def project_out(self, x: Tensor) -> Tensor: ...

    def project_out_raw(self, x: Tensor) -> Tensor: ...

    def keep(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Project(Edit):
    """Take ``alpha`` of a subspace away: x + α (projected x − x).

    Args:
        pos: Where; see ``Edit``.
        subspace: What to remove.
        alpha: Dose: 0 leaves x, 1 removes all, 2 reflects.
        raw: Set the directions to zero (``project_out_raw``) instead of to their mean.
        keep: Keep only the subspace, and set everything else to its mean.
    """

    subspace: Removable | None = None
    alpha: float = 1.0
    raw: bool = False
    keep: bool = False

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        space = self.subspace
        assert space is not None
        return _dose(
            space.keep if self.keep else space.project_out_raw if self.raw else space.project_out, tensor, self.alpha
        )


@dataclass(frozen=True, eq=False)
class Erase(Edit):
    """Apply ``alpha`` of an eraser, or of any map of activations: x + α (r(x) − x).

    Args:
        pos: Where; see ``Edit``.
        eraser: Maps activations to erased ones of the same shape, such as ``probelens.leace(X, y)``.
        alpha: Dose: 0 leaves x, 1 is the eraser.
    """

    eraser: Callable[[Tensor], Tensor] | None = None
    alpha: float = 1.0

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.eraser is not None
        return _dose(self.eraser, tensor, self.alpha)


def project(
    subspace: Removable, alpha: float = 1.0, pos: Positions = None, *, raw: bool = False, keep: bool = False
) -> Project:
    """Project a subspace out.

    Args:
        Those of ``Project``.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: ``raw`` and ``keep`` together.

    Examples:
        >>> import probelens as pl
        >>> line = pl.subspaces.Subspace(torch.tensor([[1.0, 0.0]]), mean=torch.tensor([4.0, 0.0]))
        >>> project(line, alpha=0.5)(torch.tensor([[[8.0, 3.0]]]))
        tensor([[[6., 3.]]])
    """
    if raw and keep:
        raise InputError("raw and keep exclude each other: choose one")
    return Project(pos, subspace, alpha, raw, keep)


def erase(eraser: Callable[[Tensor], Tensor], alpha: float = 1.0, pos: Positions = None) -> Erase:
    """Apply an eraser.

    Args:
        Those of ``Erase``.

    Returns:
        The edit, to be used as a hook function.

    Examples:
        >>> erase(lambda x: -x, alpha=0.5)(torch.ones(1, 2))
        tensor([[0., 0.]])
    """
    return Erase(pos, eraser, alpha)


def _dose(fn: Callable[[Tensor], Tensor], tensor: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return fn(tensor)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide + alpha * (fn(wide) - wide)

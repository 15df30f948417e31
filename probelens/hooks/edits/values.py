"""Edits that set, add or multiply values: zeros, means, given tensors, and other examples' activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.edits.edit import Edit, Positions, fit
from probelens.hooks.points import HookPoint

__all__ = ["Add", "Mean", "Replace", "Resample", "Scale", "Zero", "add", "mean", "replace", "resample", "scale", "zero"]


@dataclass(frozen=True, eq=False)
class Zero(Edit):
    """Zero ablation. It takes activations far off their distribution: prefer ``Resample``.

    Args:
        pos: Where; see ``Edit``.
    """

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        return torch.zeros_like(tensor)


@dataclass(frozen=True, eq=False)
class Mean(Edit):
    """Mean ablation with given means: one for all positions or one per position.

    Args:
        pos: Where; see ``Edit``.
        value: Means over examples: (...) or (pos, ...), where (...) are the axes of the point after batch and pos.
    """

    value: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.value is not None
        return _unshared(fit("mean", self.value, tensor, hook, batch=False), self.pos)


@dataclass(frozen=True, eq=False)
class Replace(Edit):
    """Put given values in place, as a patch does; (batch, ...) at one step.

    At a state point (pos, ...) goes before (batch, ...) where both fit; under ``probelens.at`` that is an error.

    Args:
        pos: Where; see ``Edit``.
        value: What is put in place: (...), (pos, ...) or (batch, pos, ...), where (...) are the axes of the point after
            batch and pos; a number fills.
    """

    value: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.value is not None
        return _unshared(fit("replacement", self.value, tensor, hook), self.pos)


@dataclass(frozen=True, eq=False)
class Add(Edit):
    """Add ``alpha`` times a vector or tensor: steering.

    Args:
        pos: Where; see ``Edit``.
        value: What is added: (...), (pos, ...) or (batch, pos, ...).
        alpha: Factor.
    """

    value: Tensor | None = None
    alpha: float = 1.0

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.value is not None
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return tensor.to(wide) + self.alpha * fit("vector", self.value, tensor, hook).to(wide)


@dataclass(frozen=True, eq=False)
class Scale(Edit):
    """Multiply by ``factor``; 0 is ``Zero``, 1 changes nothing.

    Args:
        pos: Where; see ``Edit``.
        factor: The factor.
    """

    factor: float = 1.0

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        return tensor * self.factor


@dataclass(frozen=True, eq=False)
class Resample(Edit):
    """Take the activation of another example at the same position.

    Args:
        pos: Where; see ``Edit``.
        source: Activations of other runs at the same point. (example, pos, ...)
        seed: Seeds the assignment. Edits with the same seed and sizes take the same examples, so
            resampling several points at once stays a joint sample.
        rows: Which example of ``source`` each row of the batch takes; overrides the draw. (batch,)
    """

    everywhere: ClassVar[tuple[str, ...]] = ("rows",)
    source: Tensor | None = None
    seed: int = 0
    rows: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """The activations of the drawn examples, rows of ``source``.

        Raises:
            ShapeError: ``rows`` or ``source`` don't fit the tensor.
        """
        assert self.source is not None
        rows = self.draw(tensor.shape[0])
        if rows.shape != tensor.shape[:1]:
            raise ShapeError(f"rows {tuple(rows.shape)} must name an example for each row of {tuple(tensor.shape)}")
        taken = self.source[rows.to(self.source.device)]
        if hook is not None and hook.pos is not None and taken.shape == tensor.shape:
            # A source of one step: its first axis is that of the examples in any case.
            return taken.to(tensor)
        return fit("source", taken, tensor, hook)

    def draw(self, batch: int) -> Tensor:
        """The example that each row takes.

        When batch and source have the same size they are taken to be the same examples, and no row takes its own: a
        random cyclic order of the examples is shifted by one.

        Args:
            batch: Rows of the batch.

        Returns:
            Index into ``source`` for each row. (batch,) int64
        """
        if self.rows is not None:
            return self.rows
        assert self.source is not None
        gen = torch.Generator().manual_seed(self.seed)
        n = self.source.shape[0]
        if batch != n or n == 1:
            return torch.randint(n, (batch,), generator=gen)
        order = torch.randperm(n, generator=gen)
        rows = torch.empty(n, dtype=torch.int64)
        rows[order] = order.roll(1)
        return rows


def zero(pos: Positions = None) -> Zero:
    """Set activations to zero.

    Args:
        pos: Where; see ``Edit``.

    Returns:
        The edit, to be used as a hook function.

    Examples:
        >>> zero(pos=-1)(torch.ones(1, 3))
        tensor([[1., 1., 0.]])
    """
    return Zero(pos)


def mean(value: Tensor, pos: Positions = None) -> Mean:
    """Set activations to given means.

    Args:
        Those of ``Mean``.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: NaN.

    Examples:
        >>> acts = torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]])
        >>> mean(acts.mean(0))(acts)[0]
        tensor([[2.],
                [4.]])
        >>> mean(acts.mean((0, 1)))(acts)[0]
        tensor([[3.],
                [3.]])
    """
    return Mean(pos, _finite("mean", value))


def replace(value: Tensor, pos: Positions = None) -> Replace:
    """Put given values in place, as a patch does.

    Args:
        Those of ``Replace``.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: NaN.

    Examples:
        >>> replace(torch.tensor([7.0, 8.0]), pos=0)(torch.zeros(1, 2, 2))
        tensor([[[7., 8.],
                 [0., 0.]]])
    """
    return Replace(pos, _finite("replacement", value))


def add(value: Tensor, alpha: float = 1.0, pos: Positions = None) -> Add:
    """Add a vector.

    Args:
        Those of ``Add``.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: NaN.

    Examples:
        >>> add(torch.tensor([1.0, 0.0]), alpha=3.0)(torch.ones(1, 1, 2))
        tensor([[[4., 1.]]])
    """
    return Add(pos, _finite("vector", value), alpha)


def scale(factor: float, pos: Positions = None) -> Scale:
    """Multiply by a factor.

    Args:
        factor: The factor.
        pos: Where; see ``Edit``.

    Returns:
        The edit, to be used as a hook function.

    Examples:
        >>> scale(2.0)(torch.ones(1, 2))
        tensor([[2., 2.]])
    """
    return Scale(pos, factor)


def resample(source: Tensor, seed: int = 0, pos: Positions = None, *, rows: Tensor | None = None) -> Resample:
    """Set activations to those of other examples: the ablation that stays on distribution.

    Args:
        Those of ``Resample``.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: NaN, or no examples.

    Examples:
        >>> acts = torch.arange(3.0).view(3, 1, 1)
        >>> bool((resample(acts)(acts) == acts).any())
        False
    """
    if source.ndim < 2 or len(source) == 0:
        raise InputError(f"resample needs activations (example, pos, ...), got shape {tuple(source.shape)}")
    return Resample(pos, _finite("source", source), seed, rows)


def _unshared(value: Tensor, pos: Positions) -> Tensor:
    """A copy where no positions are given: the model goes on with this tensor, and may write into it."""
    return value.clone() if pos is None else value


def _finite(name: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"the {name} holds NaN or infinity: mask the runs that it comes from")
    return tensor

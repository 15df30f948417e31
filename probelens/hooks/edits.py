"""Edits of activations: small frozen objects that work as hook functions at any hook point.

Each is pure: it returns a new tensor of the same shape, dtype and device and leaves its input as it
was. Restrict one to positions with ``pos=`` here or with ``probelens.at``. At a state point, which
hooks see one step at a time, ``pos`` and per-position values follow ``hook.pos``.

    model.run_with_hooks(tokens, fwd_hooks=[("blocks.3.hook_resid_post", edits.project(subspace))])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.tensors import tensor_of

if TYPE_CHECKING:
    from probelens.hooks.points import HookPoint
    from probelens.subspaces.fitted import Subspace

__all__ = [
    "Add",
    "Edit",
    "Erase",
    "Mean",
    "Project",
    "Replace",
    "Resample",
    "Scale",
    "Zero",
    "add",
    "erase",
    "mean",
    "project",
    "replace",
    "resample",
    "scale",
    "zero",
]

Positions: TypeAlias = "int | slice | Sequence[int] | Tensor | None"


@dataclass(frozen=True, eq=False)
class Edit:
    """Base of all edits: limits what a subclass computes to some positions.

    Args:
        pos: None for everywhere; a position, slice or list, negative ones from the end; an integer
            tensor with one position per example (batch,); or a boolean mask (batch, pos). Positions are
            counted on the hook point's own axis of positions: at a pattern, that of the query.
    """

    pos: Positions = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """What the tensor becomes where the edit applies; subclasses say.

        Args:
            tensor: The activation where the edit applies. (batch, pos, ...)
            hook: The hook point, for messages; None outside a model.

        Returns:
            The new activation, of the same shape.
        """
        raise NotImplementedError

    def __call__(self, tensor: Tensor, hook: HookPoint | None = None) -> Tensor:
        """Apply the edit.

        Args:
            tensor: (batch, pos, ...), or (batch, ...) where ``hook.pos`` is set.
            hook: The hook point.

        Returns:
            A new tensor of the same shape, dtype and device.

        Raises:
            ShapeError: Values or positions that don't fit the tensor.
        """
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise ShapeError("an edit needs a tensor (batch, pos, ...), or (batch, ...) at one step")
        where = _where(self.pos, tensor, hook)
        changed = self.new(tensor, hook).to(device=tensor.device, dtype=tensor.dtype)
        return changed if where is None else torch.where(where, changed, tensor)


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
    """Mean ablation with given means: one for all positions (d, ...) or one per position (pos, d, ...).

    Args:
        pos: Where; see ``Edit``.
        value: Means over examples. (d, ...) or (pos, d, ...)
    """

    value: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.value is not None
        return _fit("mean", self.value, tensor, hook, batch=False)


@dataclass(frozen=True, eq=False)
class Replace(Edit):
    """Put given values in place: (...), (pos, ...) or (batch, pos, ...); (batch, ...) at one step.

    At a state point (pos, ...) goes before (batch, ...) where both fit; under ``probelens.at`` that is an error.

    Args:
        pos: Where; see ``Edit``.
        value: What is put in place: (...), (pos, ...) or (batch, pos, ...).
    """

    value: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.value is not None
        return _fit("replacement", self.value, tensor, hook)


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
        return tensor.to(wide) + self.alpha * _fit("vector", self.value, tensor, hook).to(wide)


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

    source: Tensor | None = None
    seed: int = 0
    rows: Tensor | None = None

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """The activations of the drawn examples.

        Args:
            tensor: The activation where the edit applies. (batch, pos, ...)
            hook: The hook point, for messages; None outside a model.

        Returns:
            Rows of ``source``, of the same shape.

        Raises:
            ShapeError: ``rows`` or ``source`` don't fit the tensor.
        """
        assert self.source is not None
        rows = self.draw(tensor.shape[0])
        if rows.shape != tensor.shape[:1]:
            raise ShapeError(
                f"rows {tuple(rows.shape)} must name an example for each row of {tuple(tensor.shape)}"
            )
        taken = self.source[rows.to(self.source.device)]
        if hook is not None and hook.pos is not None and taken.shape == tensor.shape:
            return taken.to(
                tensor
            )  # A source of one step: its first axis is that of the examples in any case.
        return _fit("source", taken, tensor, hook)

    def draw(self, batch: int) -> Tensor:
        """The example that each row takes.

        When batch and source have the same size they are taken to be the same examples, and no row
        takes its own: a random cyclic order of the examples is shifted by one.

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

    subspace: Subspace | None = None
    alpha: float = 1.0
    raw: bool = False
    keep: bool = False

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        space = self.subspace
        assert space is not None
        return _dose(
            space.keep if self.keep else space.project_out_raw if self.raw else space.project_out,
            tensor,
            self.alpha,
        )


@dataclass(frozen=True, eq=False)
class Erase(Edit):
    """Apply ``alpha`` of an eraser, or of any map of activations: x + α (r(x) − x).

    Args:
        pos: Where; see ``Edit``.
        eraser: Maps activations to erased ones of the same shape, such as an ``Eraser``.
        alpha: Dose: 0 leaves x, 1 is the eraser.
    """

    eraser: Callable[[Tensor], Tensor] | None = None
    alpha: float = 1.0

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        assert self.eraser is not None
        return _dose(self.eraser, tensor, self.alpha)


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
        value: Means over examples: for all positions (...) or for each (pos, ...), where (...) are
            the axes of the point after batch and pos.
        pos: Where; see ``Edit``.

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


def resample(source: Tensor, seed: int = 0, pos: Positions = None, *, rows: Tensor | None = None) -> Resample:
    """Set activations to those of other examples: the ablation that stays on distribution.

    Args:
        source: Activations of other runs at the same point. (example, pos, ...)
        seed: Seeds which example each row takes.
        pos: Where; see ``Edit``.
        rows: Choose the examples instead. (batch,)

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


def project(
    subspace: Subspace, alpha: float = 1.0, pos: Positions = None, *, raw: bool = False, keep: bool = False
) -> Project:
    """Project a subspace out.

    Args:
        subspace: What to remove.
        alpha: Dose, 0 to 1.
        pos: Where; see ``Edit``.
        raw: To zero instead of to the mean.
        keep: Keep the subspace and remove the rest.

    Returns:
        The edit, to be used as a hook function.

    Raises:
        InputError: ``raw`` and ``keep`` together.

    Examples:
        >>> from probelens.subspaces.fitted import Subspace
        >>> line = Subspace(torch.tensor([[1.0, 0.0]]), mean=torch.tensor([4.0, 0.0]))
        >>> project(line, alpha=0.5)(torch.tensor([[[8.0, 3.0]]]))
        tensor([[[6., 3.]]])
    """
    if raw and keep:
        raise InputError("raw and keep exclude each other: choose one")
    return Project(pos, subspace, alpha, raw, keep)


def erase(eraser: Callable[[Tensor], Tensor], alpha: float = 1.0, pos: Positions = None) -> Erase:
    """Apply an eraser.

    Args:
        eraser: Such as ``probelens.leace(X, y)``.
        alpha: Dose, 0 to 1.
        pos: Where; see ``Edit``.

    Returns:
        The edit, to be used as a hook function.

    Examples:
        >>> erase(lambda x: -x, alpha=0.5)(torch.ones(1, 2))
        tensor([[0., 0.]])
    """
    return Erase(pos, eraser, alpha)


def replace(value: Tensor, pos: Positions = None) -> Replace:
    """Put given values in place, as a patch does.

    Args:
        value: (...), (pos, ...) or (batch, pos, ...), where (...) are the axes of the point after
            batch and pos; a number fills.
        pos: Where; see ``Edit``.

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
        value: (...), (pos, ...) or (batch, pos, ...), as in ``replace``.
        alpha: Factor.
        pos: Where; see ``Edit``.

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


def _dose(fn: Callable[[Tensor], Tensor], tensor: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return fn(tensor)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide + alpha * (fn(wide) - wide)


def _finite(name: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"the {name} holds NaN or infinity: mask the runs that it comes from")
    return tensor


def _fit(name: str, value: Tensor, tensor: Tensor, hook: HookPoint | None, batch: bool = True) -> Tensor:
    """A value spread over the tensor, in the tensor's dtype, or an error naming both shapes."""
    step = None if hook is None else hook.pos
    shape = tensor.shape
    accepted = [(*shape[i:],) for i in range(0 if batch else 1, min(3, tensor.ndim + 1))]
    if step is not None:
        # One step of a point that has a position axis elsewhere: the value's is picked from here.
        core = shape[1:]
        lead = value.ndim - len(core) - 1
        axis = lead + getattr(hook, "pos_axis", 1) - 1
        rest = (*value.shape[lead:axis], *value.shape[axis + 1 :])
        if lead in ((0, 1) if batch else (0,)) and rest == (*core,):
            value = _at_step(name, value, axis, shape if batch else None, hook)
        accepted = [(*shape,), (*core,)] if batch else [(*core,)]
    if value.ndim and (*value.shape,) not in accepted:
        raise ShapeError(
            f"the {name} has shape {tuple(value.shape)}, but the hook point"
            f"{'' if hook is None else f' {hook.name!r}'} gives {tuple(shape)}: "
            f"allowed are {', '.join(map(str, dict.fromkeys(accepted)))} or a single number"
        )
    return value.to(device=tensor.device, dtype=tensor.dtype).expand(shape).clone()


def _at_step(name: str, value: Tensor, axis: int, shape: torch.Size | None, hook: Any) -> Tensor:
    """A value with an axis of positions at the hook's step; itself where it is one of (batch, ...)."""
    held, length, step = value.shape[axis], getattr(hook, "length", None), hook.pos
    if value.shape == shape and held != length:
        return value
    # State points come in chunks of any size, and one of as many rows as positions must mean the same as the others.
    if value.shape == shape and not hook.step:
        raise ShapeError(
            f"the {name} of shape {tuple(value.shape)} fits as (batch, ...) and as (pos, ...), as there are as many "
            f"examples as positions. Give (batch, pos, ...), or pos= of the edit in place of probelens.at"
        )
    if not step < held or held != (length or held):
        raise ShapeError(
            f"the {name} has {held} positions, but the hook is at {step}{f' of {length}' if length else ''}"
        )
    return value.select(axis, step)


def _where(pos: Positions, tensor: Tensor, hook: HookPoint | None) -> Tensor | None:
    """Where to edit, shaped to broadcast against the tensor; None for everywhere."""
    if pos is None:
        return None
    step = None if hook is None else hook.pos
    axis, axes = getattr(hook, "pos_axis", 1), getattr(hook, "axes", ())
    if step is None and (tensor.ndim <= axis or (axes and not {"pos", "key_pos"} & {*axes})):
        at = "" if hook is None else f", and {hook.name!r} has the axes {axes}"
        raise ShapeError(f"pos={pos!r} needs a tensor (batch, pos, ...), got {tuple(tensor.shape)}{at}")
    batch, length = tensor.shape[0], tensor.shape[axis] if step is None else getattr(hook, "length", None)
    if isinstance(pos, Tensor) and pos.dtype == torch.bool:
        if pos.ndim != 2 or pos.shape[0] != batch or (length is not None and pos.shape[1] != length):
            raise ShapeError(f"the mask {tuple(pos.shape)} must be (batch, pos) = ({batch}, {length})")
        table = pos
    else:
        table = _table(pos, batch, length, step)
    found = table if step is None else table[:, step]
    shape = [len(found), *[1] * (tensor.ndim - 1)]
    if step is None:
        shape[axis] = found.shape[1]
    return found.to(tensor.device).view(shape)


def _table(pos: Any, batch: int, length: int | None, step: int | None) -> Tensor:
    """Positions as a mask (batch or 1, pos)."""
    each = isinstance(pos, Tensor) and pos.ndim == 1
    if not isinstance(pos, slice):
        pos = tensor_of("pos", pos).cpu()
        if (pos.is_floating_point() and pos.numel()) or pos.ndim > 1:
            raise InputError(f"pos must be integers on one axis, got {pos.dtype} of shape {tuple(pos.shape)}")
        pos = pos.long().reshape(-1)
    if length is None:
        if isinstance(pos, slice) or bool((pos < 0).any()):
            raise InputError(f"this hook doesn't tell the sequence length, so count from 0, not pos={pos!r}")
        length = max([step or 0, *pos.tolist()]) + 1
    chosen = torch.arange(length)[pos] if isinstance(pos, slice) else pos
    if each and len(chosen) != batch:
        raise ShapeError(f"pos has {len(chosen)} positions for {batch} examples; a list means all examples")
    if not chosen.numel():
        raise InputError(
            f"pos={pos!r} names no position of {length}, so nothing would be edited. None means all"
        )
    if not -length <= int(chosen.min()) <= int(chosen.max()) < length:
        raise InputError(
            f"pos={chosen.tolist()}: allowed are {-length} to {length - 1}, the sequence has {length}"
        )
    table = torch.zeros(batch if each else 1, length, dtype=torch.bool)
    table[torch.arange(batch) if each else 0, chosen] = True
    return table

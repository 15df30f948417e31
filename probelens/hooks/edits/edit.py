"""``Edit``, the base of all edits: where an edit applies, and how a value is spread over the tensor there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.passes.at import last_real
from probelens.hooks.passes.current import offset_of
from probelens.hooks.points import HookPoint, has_positions, no_positions
from probelens.numerics.tensors import tensor_of

__all__ = ["Edit", "Positions", "fit"]

Positions: TypeAlias = "int | slice | Sequence[int] | Tensor | str | None"


@dataclass(frozen=True, eq=False)
class Edit:
    """Base of all edits: limits what a subclass computes to some positions.

    Args:
        pos: None for everywhere; a position, slice or list, negative ones from the end; an integer
            tensor with one position per example (batch,); "last" for each example's last real token by the mask of
            the run; or a boolean mask (batch, pos). Positions are those of the sequence, also while generating with
            a cache, on the hook point's own axis of positions: at a pattern, that of the query.
    """

    pos: Positions = None
    pure: ClassVar[bool] = True  # leaves what it gets as it is
    everywhere: ClassVar[tuple[str, ...]] = ()  # fields with a tensor that has no axis of positions

    def new(self, tensor: Tensor, hook: HookPoint | None) -> Tensor:
        """Compute what the tensor becomes where the edit applies. Subclasses define it.

        Args:
            tensor: The activation where the edit applies. (batch, pos, ...)
            hook: The hook point, for messages; None outside a model.

        Returns:
            The new activation, of the same shape.
        """
        raise NotImplementedError

    def __call__(self, tensor: Tensor, hook: HookPoint | None = None) -> Tensor:
        """Apply the edit to (batch, pos, ...), or to (batch, ...) where ``hook.pos`` is set; returns a new tensor."""
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise ShapeError("an edit needs a tensor (batch, pos, ...), or (batch, ...) at one step")
        where = _where(self.pos, tensor, hook)
        changed = self.new(tensor, hook).to(device=tensor.device, dtype=tensor.dtype)
        return changed if where is None else torch.where(where, changed, tensor)


def fit(name: str, value: Tensor, tensor: Tensor, hook: HookPoint | None, batch: bool = True) -> Tensor:
    """Spread a value over a tensor (batch, pos, ...), in the tensor's dtype, without a copy where that is possible.

    The value is (...), (pos, ...) or, where ``batch``, (batch, pos, ...). ``name`` says in messages what it is.
    """
    step = None if hook is None else hook.pos
    shape = tensor.shape
    accepted = [(*shape[i:],) for i in range(0 if batch else 1, min(3, tensor.ndim + 1))]
    if step is not None:
        # One step of a point that has a position axis elsewhere: the value's is picked from here.
        core = shape[1:]
        lead = value.ndim - len(core) - 1
        axis = lead + (1 if hook is None else hook.pos_axis) - 1
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
    return value.to(device=tensor.device, dtype=tensor.dtype).expand(shape)


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
    axis = 1 if hook is None else hook.pos_axis
    if step is None and (tensor.ndim <= axis or (hook is not None and not has_positions(hook))):
        at = "" if hook is None else f" at {hook.name!r}, where {no_positions(hook)}"
        raise ShapeError(f"pos={pos!r} needs a tensor (batch, pos, ...), got {tuple(tensor.shape)}{at}")
    begin = 0 if hook is None or step is not None else offset_of(hook, pos)
    batch, length = tensor.shape[0], begin + tensor.shape[axis] if step is None else getattr(hook, "length", None)
    if isinstance(pos, Tensor) and pos.dtype == torch.bool:
        if pos.ndim != 2 or pos.shape[0] != batch or (length is not None and pos.shape[1] != length):
            raise ShapeError(f"the mask {tuple(pos.shape)} must be (batch, pos) = ({batch}, {length})")
        table = pos
    else:
        table = _table(pos, batch, length, step, hook)
    found = table[:, begin:] if step is None else table[:, step]
    shape = [len(found), *[1] * (tensor.ndim - 1)]
    if step is None:
        shape[axis] = found.shape[1]
    return found.to(tensor.device).view(shape)


def _table(pos: Any, batch: int, length: int | None, step: int | None, hook: HookPoint | None) -> Tensor:
    """Positions as a mask (batch or 1, pos)."""
    if isinstance(pos, str):
        if pos != "last":
            raise InputError(f"pos={pos!r} is not known. Allowed: None, integers, a slice, a tensor, 'last'")
        pos = last_real(length, None if hook is None else hook.real)
        pos = pos if len(pos) == batch else pos.tolist()
    each = isinstance(pos, Tensor) and pos.ndim == 1
    if not isinstance(pos, slice):
        pos = tensor_of("pos", pos).cpu()
        if (pos.is_floating_point() and pos.numel()) or pos.ndim > 1:
            raise InputError(f"pos must be integers on one axis, got {pos.dtype} of shape {tuple(pos.shape)}")
        pos = pos.long().reshape(-1)
    if length is None:
        if isinstance(pos, slice) or bool((pos < 0).any()):
            raise InputError(f"the length of the sequence is not known at this hook, so count from 0, got pos={pos!r}")
        length = max([step or 0, *pos.tolist()]) + 1
    chosen = torch.arange(length)[pos] if isinstance(pos, slice) else pos
    if each and len(chosen) != batch:
        raise ShapeError(f"pos has {len(chosen)} positions for {batch} examples; a list means all examples")
    if not chosen.numel():
        raise InputError(f"pos={pos!r} names no position of {length}, so nothing would be edited. None means all")
    low, high = map(int, chosen.aminmax())
    if not -length <= low <= high < length:
        raise InputError(
            f"pos={chosen.tolist()}{f' at {hook.name!r}' if hook else ''}: allowed are {-length} to {length - 1}, "
            f"the tensor has {length} positions. None edits all"
        )
    at = torch.arange(length)
    if each:
        return at == (chosen % length)[:, None]
    return torch.isin(at, chosen % length)[None]

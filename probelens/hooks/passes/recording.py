"""Hooks that record what they see, and which positions of it they keep."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.passes.at import At, last_real
from probelens.hooks.passes.current import offset_of
from probelens.hooks.passes.entry import Entry
from probelens.hooks.points import HookPoint, has_positions, no_positions

__all__ = ["Slice", "recorders", "slice_positions", "without_batch"]

Slice = int | slice | list[int] | Tensor | tuple[Any, ...] | str | None
"""Positions or examples: an int, a slice, a list, a tensor (one per example), "last", TransformerLens' `(start, stop)` or `Slice`, or None."""


def slice_positions(tensor: Tensor, pos: Slice, axis: int = 1, real: Tensor | None = None) -> Tensor:
    """Positions of an activation. An int removes the axis; None keeps all.

    Args:
        tensor: (batch, pos, ...)
        pos: None, int, slice, list of positions for all examples, tensor of one position per example (batch,), "last"
            for the last real token of each example, or TransformerLens' ``(start, stop)`` or ``Slice``.
        axis: Where the positions are.
        real: 1 for real tokens; None for no padding. (batch, pos)

    Returns:
        The positions kept, in the order asked for: (batch, kept, ...), or (batch, ...) for an int.

    Raises:
        ShapeError: The tensor has no position axis, a position is out of range, or none is left.
    """
    if pos is None:
        return tensor
    if tensor.ndim <= axis:
        raise ShapeError(f"positions {pos!r} asked of a tensor of shape {tuple(tensor.shape)}: no position axis")
    length = tensor.shape[axis]
    if isinstance(pos, tuple):
        pos = slice(*pos)
    pos = getattr(pos, "slice", pos)  # TransformerLens' Slice
    if isinstance(pos, str):
        if pos != "last":
            raise InputError(f"pos={pos!r} is not known. Allowed: None, integers, a slice, a tensor, 'last'")
        found = last_real(length, real)
        pos = found if real is not None else found.tolist()
    if isinstance(pos, Tensor) and pos.ndim == 1:
        return _one_each(tensor, pos, axis)
    wanted = [pos] if isinstance(pos, int) else [] if isinstance(pos, slice) else [int(p) for p in pos]
    bad = [p for p in wanted if not -length <= p < length]
    if bad:
        raise ShapeError(
            f"position {bad[0]} asked for, but the sequence has {length}: allowed are {-length} to {length - 1}"
        )
    turned = tensor.movedim(axis, 0)
    if isinstance(pos, int):
        return turned[pos]
    kept = turned[pos] if isinstance(pos, slice) else turned[wanted]
    if not len(kept):
        raise ShapeError(f"positions {pos!r} keep none of the {length}. Leave them out to keep all")
    return kept.movedim(0, axis)


def _one_each(tensor: Tensor, pos: Tensor, axis: int) -> Tensor:
    """One position of each example: (batch, 1, ...) of (batch, pos, ...)."""
    length = tensor.shape[axis]
    if len(pos) != len(tensor):
        raise ShapeError(f"pos has {len(pos)} positions for {len(tensor)} examples; a list means all examples")
    bad = pos[(pos < -length) | (pos >= length)]
    if len(bad) or pos.is_floating_point():
        raise ShapeError(f"pos={pos.tolist()}: allowed are integers from {-length} to {length - 1}")
    turned = tensor.movedim(axis, 1)
    return turned[torch.arange(len(turned)), pos.to(tensor.device)][:, None].movedim(1, axis)


def recorders(
    points: Iterable[HookPoint], incl_bwd: bool, device: Any, dtype: torch.dtype | None,
    pos_slice: Slice, cache: dict[str, Any] | None = None, squeeze: bool = False,
) -> tuple[dict[str, Any], list[Entry], list[Entry]]:  # fmt: skip
    """A dict, and the entries for the forward and the backward pass that copy what they see at the points into it.

    Gradients go under ``name + "_grad"``. A state point that is offered step by step fills a list with one tensor
    (batch, ...) a step. ``squeeze`` leaves out a batch axis of size 1.
    """
    cache = {} if cache is None else cache
    # One position keeps its axis here, as in TransformerLens; its Slice(-1) doesn't.
    pos_slice = [pos_slice] if isinstance(pos_slice, int) else getattr(pos_slice, "slice", pos_slice)

    def kept_of(tensor: Tensor, hook: HookPoint, last_use: bool = False) -> Tensor:
        kept = tensor.detach()
        if hook.pos is None and pos_slice is not None:
            if not has_positions(hook):
                raise ShapeError(f"pos={pos_slice!r} asked of {hook.name!r} {tuple(kept.shape)}: {no_positions(hook)}")
            offset_of(hook, pos_slice)
            kept = slice_positions(kept, pos_slice, hook.pos_axis, hook.real)
        # A slice would hold the whole in memory, and backward may need what is in a graph.
        last_use = last_use and pos_slice is None and not tensor.requires_grad
        kept = kept.to(device=device, dtype=dtype, copy=not last_use)
        return kept[0] if squeeze and len(kept) == 1 else kept

    recorded: dict[str, list[int]] = {}

    def record(tensor: Tensor, hook: HookPoint, suffix: str = "", last_use: bool = False) -> None:
        name = hook.name + suffix
        if hook.pos is None:
            cache[name] = kept_of(tensor, hook, last_use)
        elif _kept(hook.pos, hook.length, pos_slice):
            steps = recorded.setdefault(name, [])
            if hook.pos in steps or not isinstance(cache.get(name), list):
                steps.clear()
                cache[name] = []
            # The backward pass visits steps in reverse.
            place = bisect.bisect(steps, hook.pos)
            steps.insert(place, hook.pos)
            cache[name].insert(place, kept_of(tensor, hook))

    def record_grad(tensor: Tensor, hook: HookPoint) -> None:
        record(tensor, hook, "_grad")

    keep = functools.partial(record, last_use=True)
    fwd = [Entry(p, record, "fwd", reads=True, keep=keep) for p in points]
    bwd = [Entry(p, record_grad, "bwd") for p in points] if incl_bwd else []
    return cache, fwd, bwd


def without_batch(hooks: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Hooks that see their tensor without its batch axis; a ShapeError when called with more than one example."""

    def one(fn: Any) -> Any:
        def call(tensor: Tensor, hook: HookPoint) -> Tensor | None:
            if len(tensor) != 1:
                raise ShapeError(
                    f"remove_batch_dim needs a batch of 1, but {hook.name!r} has shape {tuple(tensor.shape)}"
                )
            new = fn(tensor[0], hook=hook)
            return new[None] if isinstance(new, Tensor) else new

        return call

    return [(name, At(fn.positions, one(fn.fn)) if isinstance(fn, At) else one(fn)) for name, fn in hooks]


def _kept(pos: int, length: int | None, wanted: Slice) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, tuple):
        wanted = slice(*wanted)
    if isinstance(wanted, slice):
        return length is None or pos in range(*wanted.indices(length))
    several = [wanted] if isinstance(wanted, int) else [int(p) for p in wanted]
    return pos in several or (length is not None and pos - length in several)

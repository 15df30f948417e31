"""Recording: the hooks that fill a cache with copies nobody can change afterwards."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.cache import Slice, slice_positions
from probelens.hooks.points import At, HookPoint
from probelens.hooks.switchboard import Entry

__all__ = ["recorders", "without_batch"]


def recorders(
    points: Iterable[HookPoint], incl_bwd: bool, device: Any, dtype: torch.dtype | None,
    pos_slice: Slice, cache: dict[str, Any] | None = None, squeeze: bool = False,
) -> tuple[dict[str, Any], list[Entry], list[Entry]]:  # fmt: skip
    """Hooks that copy what they see into a dict.

    Args:
        points: Where to listen.
        incl_bwd: Also the gradients there, under ``name + "_grad"``.
        device: Where the copies go; None leaves them where they are.
        dtype: Dtype of the copies; None keeps it.
        pos_slice: Positions to keep.
        cache: The dict to fill; None for a new one.
        squeeze: Leave out a batch axis of size 1.

    Returns:
        The dict, and the entries for the forward and the backward pass. A state point that is
        offered step by step fills a list with one tensor (batch, ...) a step.
    """
    cache = {} if cache is None else cache

    def copy(tensor: Tensor, hook: HookPoint, last_use: bool = False) -> Tensor:
        kept = tensor.detach()
        kept = kept if hook.pos is not None else slice_positions(kept, pos_slice, hook.pos_axis)
        # A slice would hold the whole in memory, and backward may need what is in a graph.
        last_use = last_use and pos_slice is None and not tensor.requires_grad
        kept = kept.to(device=device, dtype=dtype, copy=not last_use)
        return kept[0] if squeeze and len(kept) == 1 else kept

    held: dict[str, list[int]] = {}

    def record(tensor: Tensor, hook: HookPoint, suffix: str = "", last_use: bool = False) -> None:
        name = hook.name + suffix
        if hook.pos is None:
            cache[name] = copy(tensor, hook, last_use)
        elif _kept(hook.pos, hook.length, pos_slice):
            steps = held.setdefault(name, [])
            if hook.pos in steps or not isinstance(cache.get(name), list):
                steps.clear()
                cache[name] = []
            # A backward pass comes by the steps from the last to the first.
            place = bisect.bisect(steps, hook.pos)
            steps.insert(place, hook.pos)
            cache[name].insert(place, copy(tensor, hook))

    def record_grad(tensor: Tensor, hook: HookPoint) -> None:
        record(tensor, hook, "_grad")

    keep = functools.partial(record, last_use=True)
    fwd = [Entry(p, record, "fwd", reads=True, keep=keep) for p in points]
    bwd = [Entry(p, record_grad, "bwd") for p in points] if incl_bwd else []
    return cache, fwd, bwd


def without_batch(hooks: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Hooks that see their tensor without its batch axis, which must have size 1.

    Args:
        hooks: Pairs (name, fn).

    Raises:
        ShapeError: When a hook is called with more than one example.
    """

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

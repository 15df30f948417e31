"""Recording: the hooks that fill a cache with copies nobody can change afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from probelens.cache import Slice, slice_positions
from probelens.hooks import Entry
from probelens.points import HookPoint

__all__ = ["recorders"]


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
        squeeze: Leave out the batch axis.

    Returns:
        The dict, and the entries for the forward and the backward pass. A state point that is
        offered step by step fills a list with one tensor (batch, ...) a step.
    """
    cache = {} if cache is None else cache

    def copy(tensor: Tensor, hook: HookPoint) -> Tensor:
        kept = tensor.detach()
        kept = kept if hook.pos is not None else slice_positions(kept, pos_slice, hook.pos_axis)
        kept = kept.to(device=device, dtype=dtype, copy=True)
        return kept[0] if squeeze else kept

    def record(tensor: Tensor, hook: HookPoint, suffix: str = "") -> None:
        name = hook.name + suffix
        if hook.pos is None:
            cache[name] = copy(tensor, hook)
        elif _kept(hook.pos, hook.length, pos_slice):
            if hook.pos == 0 or not isinstance(cache.get(name), list):
                cache[name] = []
            cache[name].append(copy(tensor, hook))

    def record_grad(tensor: Tensor, hook: HookPoint) -> None:
        record(tensor, hook, "_grad")

    fwd = [Entry(p, record, "fwd", reads=True) for p in points]
    bwd = [Entry(p, record_grad, "bwd") for p in points] if incl_bwd else []
    return cache, fwd, bwd


def _kept(pos: int, length: int | None, wanted: Slice) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, tuple):
        wanted = slice(*wanted)
    if isinstance(wanted, slice):
        return length is None or pos in range(*wanted.indices(length))
    several = [wanted] if isinstance(wanted, int) else [int(p) for p in wanted]
    return pos in several or (length is not None and pos - length in several)

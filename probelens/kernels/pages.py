"""Memory for one large result, in huge pages where the system has them, used again once the result is gone."""

from __future__ import annotations

import collections
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1 << 24  # bytes: below, an allocator has it at hand
# Bytes of freed results that are kept for later ones.
_MOST = 1 << 29
_FREED: dict[int, list[mmap.mmap]] = collections.defaultdict(list)


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised contiguous tensor of the dtype and device of another.

    Pages of 4 kB are cleared when they are first written to, which takes longer than to compute a state that goes
    there. Pages of 2 MB, which Linux gives on request, take a fifth, unless it has to gather them first. So up to 512 MiB
    of pages are kept when their tensor is freed, for the next one of that size; Linux takes them back when memory is short.
    """
    size = (count := math.prod(shape)) * like.element_size()
    if like.device.type != "cpu" or size < _SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    try:
        memory = _FREED[size].pop()
    except IndexError:
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them, or no room: the usual allocator decides
            return like.new_empty(shape)
    held = np.frombuffer(memory, np.uint8)
    # The tensor and its views hold the array, and nothing else does.
    weakref.finalize(held, _free, memory).atexit = False
    return torch.from_numpy(held).view(like.dtype)[:count].view(tuple(shape))


def _free(memory: mmap.mmap) -> None:
    """Keep the pages of a tensor that is gone for a later one, where they are not too many."""
    kept = sum(size * len(found) for size, found in list(_FREED.items()))
    if kept + len(memory) > _MOST or not hasattr(mmap, "MADV_FREE"):
        return
    try:
        memory.madvise(mmap.MADV_FREE)
    except OSError:  # a kernel that can't take them back later
        return
    _FREED[len(memory)].append(memory)

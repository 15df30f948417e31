"""Memory for one large result, in huge pages where the system has them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = 1 << 24  # bytes: below, an allocator has it at hand


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised contiguous tensor of the dtype and device of another.

    Pages of 4 kB are cleared when they are first written to, which takes longer than to compute a state that goes
    there. Pages of 2 MB, which Linux gives on request, take a fifth; they are freed with the tensor.
    """
    size = (count := math.prod(shape)) * like.element_size()
    if like.device.type != "cpu" or size < _SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or no room: the usual allocator decides
        return like.new_empty(shape)
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(tuple(shape))

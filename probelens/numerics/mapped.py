"""Activations in a mapped file, read a part at a time: pages that were read are given back, or they count as the process's memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.errors import InputError

__all__ = ["Mapped", "chunks", "gather", "require_finite"]

_MAPS, _SMAPS = "/proc/self/maps", "/proc/self/smaps"
_BYTES = 2**22  # of activations read at once
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)


@dataclass(frozen=True)
class Mapped:
    """Where a tensor's file is mapped: what of it was read can be read from there again.

    Args:
        start: First address of the mapping.
        stop: The one after its last.
        changed: Whether something was written to it that the file doesn't have, and that giving back would lose.
    """

    start: int
    stop: int
    changed: bool

    @classmethod
    def of(cls, x: Tensor) -> Mapped | None:
        """The mapping that a tensor lies in; None where it lies in plain memory, or where the system doesn't tell.

        Args:
            x: Any tensor.

        Returns:
            The mapping.
        """
        if x.device.type != "cpu" or not x.numel():
            return None
        try:
            # The short list first: for the long one the system walks through all pages of the process.
            with open(_MAPS) as file:
                if not any(_heading(line, x.data_ptr()) for line in file):
                    return None
            with open(_SMAPS) as file:
                return _find(file.read().splitlines(), x.data_ptr())
        except OSError:
            return None

    def give_back(self, part: Tensor) -> None:
        """Let the system take back the pages of a contiguous part, which stay in its cache while there is room.

        Args:
            part: A part of the tensor that was asked about.
        """
        page = mmap.PAGESIZE
        first, last = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
        first, last = max(first // page * page, self.start), min(-(-last // page) * page, self.stop)
        if not self.changed and first < last and part.is_contiguous():
            advise = ctypes.CDLL(None, use_errno=True).madvise
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)


def _heading(line: str, address: int) -> tuple[int, int] | None:
    """The file mapping of a line "start-stop rights offset device inode path", if the address lies in it."""
    head, _, rest = line.partition(" ")
    start, _, stop = head.partition("-")
    if int(start, 16) <= address < int(stop, 16) and rest.split(maxsplit=4)[3] != "0":
        return int(start, 16), int(stop, 16)
    return None


def _find(lines: list[str], address: int) -> Mapped | None:
    """The file mapping around an address, from the lines of smaps: a heading for each mapping, then its sizes."""
    found: tuple[int, int] | None = None
    for line in lines:
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            found = _heading(line, address)
        elif found is not None and head == "Anonymous:":
            return Mapped(*found, changed=rest.split()[0] != "0")
    return None


def gather(
    x: Tensor, masks: list[Tensor], dtype: torch.dtype | None = None, less: Tensor | None = None, site: str = ""
) -> list[Tensor]:
    """Rows of activations (n, pos, d) by mask (n, pos), each set in the order of the rows.

    Args:
        x: Activations; those in a mapped file are checked, since nothing else reads all of it. (n, pos, d)
        masks: Of each set. each (n, pos)
        dtype: Of the rows; None for that of the activations.
        less: What is subtracted before the dtype is changed. (d,)
        site: Their name, for errors.

    Returns:
        The rows. each (row, d)

    Raises:
        InputError: NaN or infinite activations in a mapped file.
    """
    mapped = Mapped.of(x) is not None
    out = [x.new_empty(int(mask.sum()), x.shape[-1], dtype=dtype or x.dtype) for mask in masks]
    filled = [0] * len(out)
    for rows, part in chunks(x):
        for i, mask in enumerate(masks):
            found = part[mask[rows]]
            if mapped:
                require_finite(found, site)
            if less is not None:
                found = found - less
            out[i][filled[i] : filled[i] + len(found)] = found
            filled[i] += len(found)
    return out


def chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of activations (n, ...), one after the other; pages of a mapped file are given back when the next is asked for."""
    mapped = Mapped.of(x)
    size = max(1, _BYTES // max(1, x[:1].numel() * x.element_size()))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        part = x[rows]
        yield rows, part
        if mapped is not None:
            mapped.give_back(part)


def require_finite(x: Tensor, site: str) -> None:
    """Refuse (InputError) NaN and infinity among activations that count.

    Args:
        x: Activations. (row, d)
        site: Their name.
    """
    # Where the sum is finite, so is every number: a closer look only where it isn't.
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        raise InputError(f"activations at {site!r} have NaN or infinite values where the mask is True")

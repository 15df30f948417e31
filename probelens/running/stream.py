"""Activations on disk: one ``.npy`` file for each site, with a record of how far the run got and what was written."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from probelens.errors import InputError, StoreError
from probelens.results.files import atomic_path

RECORD, LOCK = "collect.json", "collect.lock"
_STORABLE = (torch.float16, torch.float32, torch.float64)
_FORMAT = 3
_PARTS = 100  # Checksums a site, whatever the number of pieces: the record is written anew after each piece.
_BLOCK = 2**20


class Stream:
    """Activations on disk, of ``n`` examples in all.

    ``key`` names the data, sites and model: a stream with another key is refused (StoreError), and one that has changed.
    """

    def __init__(self, folder: Path, n: int, key: str) -> None:
        self.folder, self.n, self.key = folder, n, key
        self.record = folder / RECORD
        self.text: str | None = None
        self.files: dict[str, str] = {}
        self.arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        # By part: the row where it ends, then the checksum of each file's rows in it.
        self.sums: list[list[int]] = []
        self.done = 0
        self._read()

    def _read(self) -> None:
        """Read the record in the folder, if it is new, and check the files that it names."""
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise StoreError(f"can't write to {str(self.folder)!r}: it is a file. Give a folder as out=")
        try:
            text = self.record.read_text()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as err:
            raise StoreError(f"{str(self.record)!r} can't be read: {err}. {_advice(err)}") from err
        if text == self.text:
            return
        try:
            found = json.loads(text)
            written, same, self.done = found["format"], found["key"] == self.key, int(found["done"])
            self.files = {name: Path(file).name for name, file in found["files"].items()}
            self.arrays = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in found["arrays"].items()}
            self.sums = [[int(value) for value in part] for part in found["sums"]]
            ends = [0, *(part[0] for part in self.sums)]
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as err:
            raise StoreError(f"{str(self.record)!r} is damaged ({err}). Remove the folder or choose another.") from err
        if not same or written != _FORMAT:
            what = (
                f"a stream of format {written}, and this probelens reads format {_FORMAT}" if written != _FORMAT
                else "activations of other data, sites, positions or another model (other weights or buffers count)"
            )  # fmt: skip
            raise StoreError(f"{str(self.folder)!r} holds {what}. Choose another folder, or remove this one.")
        if not self._adds_up():
            raise StoreError(
                f"{str(self.record)!r} is damaged (its rows don't add up). Remove the folder or choose another."
            )
        for i, (name, file) in enumerate(self.files.items()):
            for start, part in zip(ends, self.sums, strict=False):
                if self._sum(name, start, part[0]) != part[1 + i]:
                    raise StoreError(
                        f"examples {start} to {part[0] - 1} in {str(self.folder / file)!r} are not what collect wrote "
                        f"there: their checksum differs. Restore the file from a copy, or remove {str(self.folder)!r} "
                        "to collect again."
                    )
            self._open(name)
        self.text = text

    def _adds_up(self) -> bool:
        ends = [0, *(part[0] for part in self.sums)]
        rows = all(shape[:1] == (self.n,) for _, shape in self.arrays.values())
        full = all(len(part) == 1 + len(self.files) for part in self.sums)
        rising = all(a < b for a, b in pairwise(ends))
        known = bool(self.files) and rows and 0 < self.done <= self.n
        return known and full and rising and ends[-1] == self.done

    def _sum(self, name: str, start: int, stop: int) -> int:
        """Checksum of some examples, read without mapping them: mapped, they would count as the process's memory."""
        held = self._open(name)
        each = held.nbytes // len(held)
        left, found, block = each * (stop - start), 0, memoryview(bytearray(_BLOCK))
        with (self.folder / self.files[name]).open("rb", buffering=0) as file:
            file.seek(held.offset + each * start)
            while left and (got := file.readinto(block[:left])):
                found, left = zlib.crc32(block[:got], found), left - got
        return found

    def _open(self, name: str, mode: Any = "r") -> Any:
        import numpy as np

        path = self.folder / self.files[name]
        try:
            _no_link(path)
            # Read only first: for writing, numpy would fill up a file that was cut with zeros.
            held = np.load(path, mmap_mode="r", allow_pickle=False)
            if mode != "r":
                held = np.load(path, mmap_mode=mode, allow_pickle=False)
        except (OSError, ValueError, EOFError) as err:
            what = "read" if mode == "r" else "written"
            raise StoreError(f"{str(path)!r} can't be {what}: {err}. {_advice(err)}") from err
        if (held.dtype.str, held.shape) != self.arrays.get(name) or not held.flags.c_contiguous:
            raise StoreError(
                f"{str(path)!r} holds {held.dtype} {held.shape}, which is not what was written there. "
                "Remove the folder to collect again."
            )
        return held

    def _new(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        """A file with room for everything: a full disk shows now, not as a crash in the midst of writing."""
        import numpy as np

        try:
            _no_link(path)
            np.lib.format.open_memmap(path, "w+", dtype, shape)
            if hasattr(os, "posix_fallocate"):
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as err:
            if not path.is_symlink():
                with contextlib.suppress(NotADirectoryError):
                    path.unlink(missing_ok=True)
            raise StoreError(f"can't write to {str(self.folder)!r}: {err}") from err

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Alone on the folder: another process or thread waits, and then finds what this one wrote.

        A finished stream is only read, and no one waits.
        """
        if self.done == self.n:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise StoreError(f"can't write to {str(self.folder)!r}: {err}") from err
        # Where a network file system has no locks, filelock says so with an error, and nobody waits.
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, NotImplementedError):
                held.enter_context(FileLock(self.folder / LOCK))
            self._read()
            if self.done < self.n:
                for name in self.files:
                    self._open(name, "r+")  # Refused before the model runs.
            yield

    def put(self, start: int, found: Mapping[str, Tensor]) -> None:
        """Write the activations (example, ...) of the examples from row ``start`` on, but for those before ``done``; then the record."""
        import numpy as np

        stop = start + len(next(iter(found.values())))
        width = -(-self.n // _PARTS)
        begun = self.sums[-2][0] if len(self.sums) > 1 else 0
        if not self.sums or self.done - begun >= width:
            self.sums.append([self.done] + [0] * len(found))
        sums = self.sums[-1]
        for i, (name, tensor) in enumerate(found.items()):
            need_storable(tensor.dtype)
            values: Any = np.ascontiguousarray(tensor.numpy()[self.done - start :])
            if name not in self.files:
                self.files[name] = file = f"site_{i:03d}.npy"
                self.arrays[name] = (values.dtype.str, (self.n, *values.shape[1:]))
                self._new(self.folder / file, values.dtype, (self.n, *values.shape[1:]))
            # Opened anew for each piece: pages of a file that stays mapped count as the process's memory.
            held = self._open(name, "r+")
            held[self.done : stop] = values
            held.flush()
            sums[1 + i] = zlib.crc32(values, sums[1 + i])
        sums[0] = self.done = stop
        content = {
            "format": _FORMAT, "key": self.key, "done": stop, "files": self.files, "arrays": self.arrays, "sums": self.sums,
        }  # fmt: skip
        with atomic_path(self.record) as part:
            part.write_text(json.dumps(content))

    def tensors(self) -> dict[str, Tensor]:
        """Every site, mapped: read when used, and what is changed in it changes memory only, never the file."""
        return {name: torch.from_numpy(self._private(name)) for name in self.files}

    def _private(self, name: str) -> Any:
        import numpy as np

        held, path = self._open(name), self.folder / self.files[name]
        if not hasattr(mmap, "MAP_PRIVATE"):
            return np.load(path, mmap_mode="c", allow_pickle=False)
        # numpy's own mode "c" asks the system to set memory aside for all of it, refused for files larger than that.
        flags = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE, named from Python 3.13
        try:
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return np.frombuffer(pages, held.dtype, held.size, held.offset).reshape(held.shape)
        except (OSError, ValueError) as err:
            raise StoreError(f"{str(path)!r} can't be mapped into memory: {err}.") from err


def need_storable(dtype: torch.dtype) -> None:
    """Refuse (InputError) a floating dtype that ``.npy`` files don't have, such as bfloat16."""
    if dtype.is_floating_point and dtype not in _STORABLE:
        raise InputError(
            f"{str(dtype).removeprefix('torch.')} can't be streamed to disk. Give dtype=torch.float16 or torch.float32"
        )


def _advice(err: Exception) -> str:
    if isinstance(err, OSError) and err.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Permission denied. Fix the folder's permissions or choose another one; its data may be intact."
    return "Remove the folder to collect again."


def _no_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(f"{path.name} is a link: what is written to it would end up elsewhere")

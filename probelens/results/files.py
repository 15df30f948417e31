"""Files that are whole or not there, and that tell when they have been changed: tensors and tables of rows.

A file takes its name only when it is complete, so a kill at any moment leaves the old one or the new one. Both
kinds carry checksums, which reading compares; files written without (by other programs, or before there were
any) are read unchecked.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.errors import StoreError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

__all__ = ["atomic_path", "need_room", "read_rows", "read_tensors", "write_rows", "write_tensors"]

_CHECKSUM = "probelens.crc32"
_PLAUSIBLE = 2**30  # bytes in memory up to which a table may be any multiple of its file
_MULTIPLE = 500  # above that, how many times its file it may be: tables of results compress less than tenfold


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Any:
    """A temporary path beside ``path`` that takes its place only when the block ends well.

    Args:
        path: Where the finished file goes. Missing parent folders are made.

    Yields:
        The path to write to. It is removed when the block raises.

    Raises:
        StoreError: The folder can't be written.

    Examples:
        >>> import tempfile, os
        >>> folder = tempfile.mkdtemp()
        >>> with atomic_path(os.path.join(folder, "a.txt")) as part:
        ...     _ = part.write_text("whole")
        >>> os.listdir(folder)
        ['a.txt']
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as err:
        raise StoreError(f"can't write {str(target)!r}: {err}. Choose a folder that can be written.") from err
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes a private file; a result should have the permissions of any new file.
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        os.replace(part, target)
    except OSError as err:
        if isinstance(err, StoreError):
            raise
        raise StoreError(f"can't write {str(target)!r}: {err}. Nothing was changed there.") from err
    finally:
        part.unlink(missing_ok=True)


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Write one safetensors file with a checksum of what it holds, whole or not at all.

    Args:
        path: The file; missing folders are made.
        tensors: By name, of any shape, contiguous.
        header: Metadata, strings only.

    Returns:
        The path written.

    Raises:
        StoreError: The folder can't be written, or the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path) as part:
        try:
            save_file(tensors, part, metadata={**header, _CHECKSUM: _checksum(tensors, header)})
        except SafetensorError as err:
            # safetensors wraps what the system says, such as a full disk, in an error of its own.
            raise OSError(str(err)) from err
    return Path(path)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file, and compare its checksum if `write_tensors` wrote it.

    Args:
        path: The file.

    Returns:
        The tensors by name, on the CPU, and the metadata without the checksum.

    Raises:
        StoreError: The file is missing, no safetensors file, cut, larger than the memory that is free, or what it
            holds was changed.

    Examples:
        >>> import tempfile, os, torch
        >>> path = os.path.join(tempfile.mkdtemp(), "x.safetensors")
        >>> _ = write_tensors(path, {"x": torch.arange(3)}, {"by": "me"})
        >>> read_tensors(path)
        ({'x': tensor([0, 1, 2])}, {'by': 'me'})
    """
    from safetensors import SafetensorError, safe_open

    try:
        # A file with holes may be of any size on a small disk.
        need_room(path, os.path.getsize(path))
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as err:
        raise StoreError(f"can't read {str(path)!r}: there is no such file") from err
    except (OSError, SafetensorError, ValueError, MemoryError) as err:
        why = "it is a folder, not a file" if os.path.isdir(path) else err
        raise StoreError(f"can't read {str(path)!r}: {why}") from err
    written = header.pop(_CHECKSUM, None)
    if written is not None and written != _checksum(tensors, header):
        why = "what it holds was changed after it was written, its checksum differs"
        raise StoreError(f"can't read {str(path)!r}: {why}. Bring the file back from a copy, or make it again")
    return tensors, header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    import torch

    kinds = {name: [str(t.dtype), list(t.shape)] for name, t in sorted(tensors.items())}
    found = zlib.crc32(json.dumps([kinds, sorted(header.items())]).encode())
    for name in kinds:
        found = zlib.crc32(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def write_rows(path: str | os.PathLike[str], rows: pd.DataFrame, **options: Any) -> Path:
    """Write a table as one Parquet file with checksums, whole or not at all.

    Args:
        path: The file; missing folders are made.
        rows: The table; its index is left out.
        options: For `pandas.DataFrame.to_parquet`, such as compression="zstd".

    Returns:
        The path written.

    Raises:
        StoreError: The folder can't be written, or the disk is full.
    """
    with atomic_path(path) as part:
        rows.to_parquet(part, index=False, write_page_checksum=True, **options)
    return Path(path)


def read_rows(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a Parquet file, and compare the checksums of its pages if it has any.

    Args:
        path: The file.

    Returns:
        The table.

    Raises:
        StoreError: The file is missing, no Parquet file, cut, its values were changed, or it grows in memory beyond what
            is free, or beyond 1 GiB and 500 times its size.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            declared = file.metadata.num_rows * file.metadata.num_columns // 8  # a bit for each value is the least
            _need_plausible(path, declared)
            batches, size = [], 0
            # In pieces: what a page of repeated values grows to shows only when it is read.
            for batch in file.iter_batches(batch_size=1024):
                size += batch.nbytes
                _need_plausible(path, size)
                batches.append(batch)
            return pa.Table.from_batches(batches, file.schema_arrow).to_pandas()
    except StoreError:
        raise
    except Exception as err:
        # pyarrow raises errors of many kinds on a damaged file.
        raise StoreError(f"can't read {str(path)!r}: {str(err).rstrip('.')}") from err


def _need_plausible(path: str | os.PathLike[str], size: int) -> None:
    """Refuse a table that is far larger in memory than its file can honestly hold."""
    if size > max(_PLAUSIBLE, _MULTIPLE * os.path.getsize(path)):
        raise StoreError(
            f"can't read {str(path)!r}: a file of {os.path.getsize(path):,} bytes that is over {size:,} bytes in memory. "
            "It is damaged, or made to fill the memory"
        )
    need_room(path, size)


def need_room(path: str | os.PathLike[str], size: int) -> None:
    """Refuse what is larger than the memory that is free; files of up to 64 MiB are read without asking.

    Args:
        path: The file, for the message.
        size: Bytes that it takes in memory.

    Raises:
        StoreError: Less is free.
    """
    if size > 2**26 and (free := _free_memory()) is not None and size > free:
        raise StoreError(f"can't read {str(path)!r}: it needs {size:,} bytes of memory, and {free:,} are free")


def _free_memory() -> int | None:
    """Bytes that a process can still get, where the system says so."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2]
        return int(found.split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None

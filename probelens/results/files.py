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

import torch
from torch import Tensor

from probelens.errors import StoreError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["atomic_path", "read_rows", "read_tensors", "write_rows", "write_tensors"]

_CHECKSUM = "probelens.crc32"


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
        StoreError: The file is missing, no safetensors file, cut, or what it holds was changed.

    Examples:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "x.safetensors")
        >>> _ = write_tensors(path, {"x": torch.arange(3)}, {"by": "me"})
        >>> read_tensors(path)
        ({'x': tensor([0, 1, 2])}, {'by': 'me'})
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as err:
        raise StoreError(f"can't read {str(path)!r}: there is no such file") from err
    except (OSError, SafetensorError, ValueError) as err:
        why = "it is a folder, not a file" if os.path.isdir(path) else err
        raise StoreError(f"can't read {str(path)!r}: {why}") from err
    written = header.pop(_CHECKSUM, None)
    if written is not None and written != _checksum(tensors, header):
        why = "what it holds was changed after it was written, its checksum differs"
        raise StoreError(f"can't read {str(path)!r}: {why}. Bring the file back from a copy, or make it again")
    return tensors, header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
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
        StoreError: The file is missing, no Parquet file, cut, or its values were changed.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path, page_checksum_verification=True)
    except Exception as err:
        # pyarrow raises errors of many kinds on a damaged file.
        raise StoreError(f"can't read {str(path)!r}: {str(err).rstrip('.')}") from err

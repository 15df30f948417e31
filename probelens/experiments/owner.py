"""One owner of a folder of results: a second run that would write there at the same time is refused by name.

The lock is the operating system's, on ``run.lock``, so that a process that was killed leaves nothing stale. On network
file systems it holds between machines where the system's locks do (NFS 4, Lustre mounted with ``flock``, GPFS); where
they are local to a machine, two machines don't see each other. Where there are no such locks, filelock keeps a marker
file and says so in a warning; a process that was killed then leaves the marker behind.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from probelens.errors import StoreError
from probelens.results.files import atomic_path

__all__ = ["LOCK", "owned"]

LOCK, OWNER = "run.lock", "owner.json"

_OWNED: contextvars.ContextVar[frozenset[Path]] = contextvars.ContextVar("owned", default=frozenset())


@contextlib.contextmanager
def owned(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Be the only one that writes results into a folder, in this process and in others.

    A block inside that asks for the same folder has it already. Other threads are refused, as other processes are.

    Args:
        folder: The folder; made when missing.

    Yields:
        Nothing.

    Raises:
        StoreError: Another run writes there now, or the folder can't be written.

    Examples:
        >>> import tempfile
        >>> with owned(tempfile.mkdtemp()) as nothing:
        ...     pass
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        place = place.resolve()
    except OSError as err:
        raise StoreError(f"can't write to {str(folder)!r}: {err}. Choose a folder that can be written.") from err
    if place in _OWNED.get():
        yield
        return
    if (place / LOCK).is_symlink():
        raise StoreError(f"{str(place / LOCK)!r} is a link. Remove it, or choose another folder.")
    lock = FileLock(place / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"{str(folder)!r} is being written by another run{_who(place)}. Wait until it ends, or choose another folder."
        ) from None
    except (OSError, NotImplementedError) as err:
        raise StoreError(f"can't write to {str(folder)!r}: {err}. Choose a folder that can be written.") from err
    token = _OWNED.set(_OWNED.get() | {place})
    try:
        about = {
            "process": os.getpid(),
            "machine": socket.gethostname(),
            "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        }
        with atomic_path(place / OWNER) as part:
            part.write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        _OWNED.reset(token)
        with contextlib.suppress(OSError):
            (place / OWNER).unlink(missing_ok=True)
        lock.release()


def _who(place: Path) -> str:
    """The owner as it wrote itself down; nothing where it hasn't yet."""
    try:
        found = json.loads((place / OWNER).read_text(encoding="utf-8"))
        return f" (process {found['process']:d} on {found['machine']:.80}, since {found['since']:.20})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""

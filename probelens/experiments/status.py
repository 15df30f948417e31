"""Progress of a running cell: one small file in its folder, so that any process can watch.

A file needs nothing between the watcher and the cell but a shared folder, which processes, Dask
workers and SLURM jobs all have.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probelens.results.files import atomic_path

__all__ = ["Status", "watching"]

FILE = "status.json"


class Status:
    """Write the progress of a cell.

    Args:
        folder: The cell's folder.
        every: Seconds between two writes of one stage.
    """

    def __init__(self, folder: Path, every: float = 0.3) -> None:
        self.path = Path(folder) / FILE
        self.every = every
        self._last = 0.0
        self._stage = ""

    def update(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Write how far a stage is.

        Args:
            stage: Name of the stage.
            done: Steps done.
            total: Number of steps.
            note: A short remark, such as the accuracy reached.
        """
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._last < self.every:
            return
        self._last, self._stage = now, stage
        with atomic_path(self.path) as part:
            part.write_text(json.dumps({"stage": stage, "done": done, "total": total, "note": note}))


@contextlib.contextmanager
def watching(folders: Mapping[str, Path], show: bool) -> Iterator[None]:
    """Show a line for each cell, by name its folder, while the block lasts, if stderr is a terminal."""
    if not show or not folders or not sys.stderr.isatty():
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_draw, args=(folders, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _draw(folders: Mapping[str, Path], stop: threading.Event) -> None:
    from tqdm.auto import tqdm

    width = max(len(name) for name in folders)
    bars = {
        name: tqdm(total=1, desc=f"{name:<{width}} waiting", position=i, leave=True, bar_format="{desc} {bar}{postfix}")
        for i, name in enumerate(folders)
    }
    began = time.time()
    while True:
        last = stop.is_set()
        for name, folder in folders.items():
            found = _read(folder / FILE, began)
            if found is not None:
                bar = bars[name]
                bar.total, bar.n = max(1, found["total"]), found["done"]
                bar.set_description_str(
                    f"{name:<{width}} {found['stage']} {found['done']}/{found['total']}", refresh=False
                )
                bar.set_postfix_str(found["note"], refresh=True)
        if last:
            break
        stop.wait(0.3)
    for bar in bars.values():
        bar.close()


def _read(path: Path, began: float) -> dict[str, Any] | None:
    try:
        if path.stat().st_mtime < began:
            return None
        found = json.loads(path.read_text())
        kinds = {"stage": str, "done": int, "total": int, "note": str}
        return {key: kind(found[key]) for key, kind in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""The grid: runs the cells that the store lacks, in processes of their own, and reports failures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probelens.errors import InputError
from probelens.experiments.status import watching
from probelens.experiments.store import Row, Store, cell_key
from probelens.results import atomic_path

__all__ = ["GridReport", "RunCell", "run_grid"]

ERROR = "error.txt"
GRACE = 3.0  # seconds in which interrupted processes may save what they were at
Config = Mapping[str, Any]
RunCell = Callable[[Config, Path], "list[Row]"]


@dataclass(frozen=True)
class GridReport:
    """What a grid did.

    Args:
        keys: Every cell asked for, in order.
        ran: Cells that ran now.
        found: Cells that were complete already.
        failed: Cell to traceback.
    """

    keys: list[str]
    ran: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_grid(
    run_cell: RunCell,
    configs: Iterable[Config],
    store: Store,
    *,
    executor: concurrent.futures.Executor | None = None,
    workers: int | None = None,
    threads: int = 1,
    progress: bool = True,
) -> GridReport:
    """Run every cell that isn't complete yet. A cell that fails doesn't stop the others.

    Args:
        run_cell: ``run_cell(config, folder) -> rows``, importable in a fresh process. It keeps
            checkpoints and results in ``folder``.
        configs: One a cell; plain data.
        store: Where rows go.
        executor: Any ``concurrent.futures.Executor``, such as Dask's ``client.get_executor()``;
            None for processes on this machine.
        workers: Processes of the local executor; None for one a core. 1 runs in this process.
        threads: torch threads of each local process.
        progress: Show a line for each cell; ``config["name"]`` is what it is called.

    Returns:
        What ran, what was there, what failed and why; a failed cell's folder has the traceback in ``error.txt``.

    Raises:
        InputError: Two cells with the same config.
        KeyboardInterrupt: Passed on; finished cells are kept, and the next run goes on.
    """
    planned = [(cell_key(config), dict(config)) for config in configs]
    keys = [key for key, _ in planned]
    if len(set(keys)) != len(keys):
        raise InputError("two cells of the grid have the same config: give each a seed or a name of its own")
    report = GridReport(keys, found=[key for key in keys if store.done(key)])
    todo = [(key, config) for key, config in planned if key not in report.found]
    if not todo:
        return report
    workers = min(workers or os.cpu_count() or 1, len(todo))
    names = {str(config.get("name", key)): store.cell(key) for key, config in todo}
    with watching(names, progress):
        if executor is None and workers == 1:
            for key, config in todo:
                _note(report, key, *_guarded(run_cell, config, store.folder, key, None))
            return report
        owned = None
        if executor is None:
            # Spawned, not forked: a fork of a process that has used torch's threads can hang.
            context = multiprocessing.get_context("spawn")
            executor = owned = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
        try:
            with _without_interrupts() if owned is not None else contextlib.nullcontext():
                waiting = {
                    executor.submit(_guarded, run_cell, config, store.folder, key, threads): key
                    for key, config in todo
                }
            for future in concurrent.futures.as_completed(waiting):
                key = waiting[future]
                error = future.exception()
                if error is not None:
                    _note(report, key, "".join(traceback.format_exception(error)))
                else:
                    _note(report, key, future.result()[0])
        except BaseException:
            if owned is not None:
                _stop(owned)
            raise
        finally:
            if owned is not None:
                owned.shutdown(wait=True, cancel_futures=True)
    return report


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, which the processes started inside inherit: only the one that started them reacts to it.

    Otherwise each of them, hit amid its imports, would print a traceback of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """End the processes of a pool: a training saves itself on Ctrl-C, everything else may be cut off anywhere."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    end = time.monotonic() + GRACE
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.terminate()


def _note(report: GridReport, key: str, error: str | None) -> None:
    if error is None:
        report.ran.append(key)
    else:
        report.failed[key] = error


def _guarded(
    run_cell: RunCell, config: Config, folder: Path, key: str, threads: int | None
) -> tuple[str | None]:
    """Run one cell and write its rows; the traceback if it fails."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    store = Store(folder)
    place = store.cell(key)
    try:
        place.mkdir(parents=True, exist_ok=True)
        store.write(key, config, run_cell(config, place))
    except Exception:
        said = traceback.format_exc()
        with contextlib.suppress(OSError), atomic_path(place / ERROR) as part:
            part.write_text(said, encoding="utf-8")
        return (said,)
    with contextlib.suppress(OSError):
        (place / ERROR).unlink(missing_ok=True)
    return (None,)

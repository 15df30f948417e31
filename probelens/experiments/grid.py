"""The grid: the cells that the store lacks are run in their own processes, and failures are reported."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probelens.errors import InputError, ProbelensError, StoreError
from probelens.experiments.code import code_of
from probelens.experiments.owner import owned
from probelens.experiments.status import watching
from probelens.experiments.store import Row, Store, cell_key
from probelens.results.files import atomic_path
from probelens.running.executors import Local, Spec, current, opened, spec_of

__all__ = ["GridReport", "RunCell", "run_grid"]

ERROR = "error.txt"
ARRIVAL = 10.0  # seconds after which rows written on another machine must have arrived on a shared disk
Config = Mapping[str, Any]
RunCell = Callable[[Config, Path], "list[Row]"]


@dataclass(frozen=True)
class GridReport:
    """Outcome of a grid.

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
    executor: concurrent.futures.Executor | Spec | str | None = None,
    workers: int | None = None,
    threads: int = 1,
    progress: bool = True,
    code: str | None = None,
) -> GridReport:
    """Run every cell that isn't complete yet. A cell that fails doesn't stop the others.

    A cell whose code changed isn't complete: it runs again beside the old one, and a warning names it. Its code is its
    function and what that names, directly or through others, in its module and in other modules of the same folder or
    package; comments and docstrings don't count.

    Args:
        run_cell: ``run_cell(config, folder) -> rows``, importable in a fresh process. It keeps
            checkpoints and results in ``folder``.
        configs: One per cell, plain data.
        store: Where rows go. On a cluster its folder must be on a disk that all machines share.
        executor: "local" (processes of this machine), "dask" or "submitit", or one of these with its
            settings (`probelens.running.executors`), or any ``concurrent.futures.Executor``. None for that
            of the enclosing ``executors.using(...)`` block, which is what the command line sets, else "local".
        workers: Cells at once; None for one per core, on a cluster for as many as it allows. 1 with the local
            executor runs in this process.
        threads: torch threads of each cell.
        progress: Show a line for each cell; ``config["name"]`` is what it is called.
        code: A version of your own in place of the code, to keep results over a change that doesn't matter to them;
            None for the code.

    Returns:
        What ran, what was there, what failed and why; a failed cell's folder has the traceback in ``error.txt``.

    Raises:
        InputError: Two cells with the same config.
        StoreError: Another run writes to the store's folder now.
        KeyboardInterrupt: Passed on. Finished cells are kept, and the next run continues.
    """
    configs = list(configs)
    if wrong := [config for config in configs if not isinstance(config, Mapping)]:
        raise InputError(f"a config is a dict of settings, and {wrong[0]!r:.80} is a {type(wrong[0]).__name__}")
    code = code_of(run_cell) if code is None else code
    planned = [(cell_key(config, code=code), dict(config)) for config in configs]
    keys = [key for key, _ in planned]
    if len(set(keys)) != len(keys):
        raise InputError("two cells of the grid have the same config: give each a seed or a name of its own")
    if all(map(store.done, keys)):
        return GridReport(keys, found=keys)
    given = current() if executor is None else spec_of(executor) if isinstance(executor, str) else executor
    with owned(store.folder):
        # Only now: another run may have ended a moment ago.
        report = GridReport(keys, found=[key for key in keys if store.done(key)])
        todo = [(key, config) for key, config in planned if key not in report.found]
        if not todo:
            return report
        _name_changed(store, keys, todo)
        in_process = isinstance(given, Local) and (workers == 1 or (executor is None and len(todo) == 1))
        _run_missing(run_cell, todo, store, report, None if in_process else given, workers, threads, progress)
    return report


def _name_changed(store: Store, keys: Sequence[str], todo: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Warn of cells that are complete with the same config under another key."""
    there: dict[str, str] = {}
    for key in set(store.keys()) - set(keys):
        with contextlib.suppress(StoreError):
            there[json.dumps(store.config(key), sort_keys=True)] = key
    changed = [(config, there[text]) for _, config in todo if (text := json.dumps(config, sort_keys=True)) in there]
    if changed:
        cells = ", ".join(f"{config.get('name', old)} ({old})" for config, old in changed[:5])
        warnings.warn(
            f"{len(changed)} complete cells run again, since their code or the version of probelens changed: {cells}"
            f"{', …' * (len(changed) > 5)}. Their earlier results stay in {str(store.folder / 'cells')!r} until you remove "
            "them; store.all_rows(report.keys) has the new ones only.",
            stacklevel=3,
        )


def _run_missing(
    run_cell: RunCell, todo: Sequence[tuple[str, dict[str, Any]]], store: Store, report: GridReport,
    given: concurrent.futures.Executor | Spec | None, workers: int | None, threads: int, progress: bool,
) -> None:  # fmt: skip
    """Run cells with an executor, or in this process, and note how each ended."""
    names = {str(config.get("name", key)): store.cell(key) for key, config in todo}
    with watching(names, progress):
        if given is None:
            for key, config in todo:
                _note(report, key, _guarded(run_cell, config, store.folder, key, None))
            return
        folder = store.folder.absolute()  # a worker may have been started in another one
        with opened(given, folder, workers, len(todo)) as pool:
            waiting = {pool.submit(_guarded, run_cell, config, folder, key, threads): key for key, config in todo}
            for future in concurrent.futures.as_completed(waiting):
                _note(report, waiting[future], _outcome(future, store, waiting[future]))


def _outcome(future: concurrent.futures.Future[Any], store: Store, key: str) -> str | None:
    """The error of a cell; None if its rows are in the store."""
    try:
        said: str | None = future.result()
    except concurrent.futures.CancelledError:
        said = "the cell was cancelled: its executor was closed, or the connection to it was lost"
    except Exception as err:
        said = "".join(traceback.format_exception(err))
    else:
        if said is not None or _arrived(store, key):
            return said
        said = (
            f"the cell was run to its end, but its rows are not in {str(store.cell(key))!r}. "
            "The run folder must be on a disk that every worker sees under the same path."
        )
    with contextlib.suppress(ProbelensError):
        _keep(store.make(key), said)
    return said


def _arrived(store: Store, key: str) -> bool:
    end = time.monotonic() + ARRIVAL
    while not store.done(key):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _note(report: GridReport, key: str, error: str | None) -> None:
    if error is None:
        report.ran.append(key)
    else:
        report.failed[key] = error


def _keep(place: Path, said: str) -> None:
    with contextlib.suppress(OSError), atomic_path(place / ERROR) as part:
        part.write_text(said, encoding="utf-8")


def _guarded(run_cell: RunCell, config: Config, folder: Path, key: str, threads: int | None) -> str | None:
    """Run one cell and write its rows; the traceback if it fails."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    store = Store(folder)
    if store.done(key):
        # A worker that was considered dead may have finished the cell.
        return None
    try:
        place = store.make(key)
    except ProbelensError:
        return traceback.format_exc()
    try:
        store.write(key, config, run_cell(config, place))
    except Exception:
        said = traceback.format_exc()
        _keep(place, said)
        return said
    with contextlib.suppress(OSError):
        (place / ERROR).unlink(missing_ok=True)
    return None

"""The run of a recipe: its cells, what failed, the command that makes it again, and what every report says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.errors import ProbelensError, StoreError
from probelens.experiments.code import code_of
from probelens.experiments.grid import RunCell, run_grid
from probelens.experiments.owner import owned
from probelens.experiments.record import RunRecord, versions
from probelens.experiments.store import Store, cell_key
from probelens.results.files import write_rows

if TYPE_CHECKING:
    import pandas as pd


def run_recipe(
    name: str, config: Any, cells: Sequence[Mapping[str, Any]], run_cell: RunCell, report: Callable[[RunRecord], object],
    *, free: Sequence[str], progress: bool,
) -> Path:  # fmt: skip
    """Run the cells that a run folder lacks, report those that are there, say which failed, and return the folder.

    ``config`` has ``out`` and ``workers``; settings in ``free`` may differ from those of the run that the folder holds.
    """
    store = Store(config.out)
    code = code_of(run_cell)
    keys = [cell_key(cell, code=code) for cell in cells]
    record = RunRecord(name, dataclasses.asdict(config), keys, versions())
    with owned(store.folder):
        record.start(store.folder, free=free)
        done = run_grid(run_cell, cells, store, workers=config.workers, progress=progress, code=code)
        if any(map(store.done, record.cells)):
            report(record)
    if done.failed:
        lines = [
            f"{error.strip().splitlines()[-1]} ({store.cell(key) / 'error.txt'})" for key, error in done.failed.items()
        ]
        first = f"{len(lines)} of {len(done.keys)} models failed; the others are kept and reported:"
        raise ProbelensError("\n  ".join([first, *lines]))
    return store.folder


def settings_of(config: Any, without: Sequence[str] = ("out", "workers")) -> dict[str, Any]:
    """Settings as plain data, lists for tuples, without some of them."""
    found = dataclasses.asdict(config).items()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found if k not in without}


def command_of(name: str, config: Any) -> str:
    """The command that makes a run of these settings again; only what differs from the defaults is set."""
    defaults = settings_of(type(config)())
    changed = [
        f"--set {k}={','.join(map(str, v)) if isinstance(v, list) else v}"
        for k, v in settings_of(config).items()
        if v != defaults[k]
    ]
    return " ".join([f"probelens run {name}", *changed])


def about_run(config: Any, record: RunRecord) -> dict[str, Any]:
    """What every report says of its run, as keywords of ``write_report``."""
    command = command_of(record.recipe, config)
    return {"config": settings_of(config), "versions": record.versions, "reproduce": [command]}


def unfinished(record: RunRecord, folder: Path) -> dict[str, str]:
    """What a report must say of cells that were planned and are not in it; empty where all are."""
    missing = sum(not Store(folder).done(key) for key in record.cells)
    if not missing:
        return {}
    planned = len(record.cells)
    return {"Not finished": f"{missing} of {planned} cells failed or were not run; they are in no number here"}


def finished_rows(out: str, keys: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows of a run folder's finished cells (of those in ``keys``, if given), also written to ``rows.parquet``."""
    store = Store(out)
    keys = store.keys() if keys is None else [key for key in keys if store.done(key)]
    if not keys:
        raise StoreError(f"no model in {out!r} is finished, so there is nothing to report. Run it first.")
    rows = store.all_rows(keys)
    write_rows(store.folder / "rows.parquet", rows)
    return rows

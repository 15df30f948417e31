"""A run of a recipe: its cells, its command, what failed, and its claims as a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import probelens as pl
from probelens.experiments import RunRecord, Store, cell_key, run_grid, versions
from probelens.results.files import write_rows

if TYPE_CHECKING:
    from probelens.experiments.grid import RunCell
    from probelens.results.report import Claim

__all__ = ["command_of", "run_cells", "unfinished", "write_claims"]


def run_cells(
    recipe: str,
    config: Any,
    cells: Sequence[Mapping[str, Any]],
    run_cell: RunCell,
    free: Sequence[str],
    progress: bool,
    report: Callable[[RunRecord], object],
) -> Path:
    """Run what a run folder lacks, report what is there, and say what failed.

    Args:
        recipe: Its name.
        config: Its settings, with ``out`` and ``workers``.
        cells: The settings of each cell.
        run_cell: As for ``run_grid``.
        free: Settings that may differ from those of the run that the folder holds.
        progress: Show progress.
        report: Called with the run's record once any cell is finished.

    Returns:
        The run folder.

    Raises:
        probelens.InputError: The folder holds another run.
        probelens.ProbelensError: A cell failed: which, and where its traceback is.
    """
    store = Store(config.out)
    record = RunRecord(recipe, dataclasses.asdict(config), [cell_key(cell) for cell in cells], versions())
    record.start(store.folder, free=free)
    done = run_grid(run_cell, cells, store, workers=config.workers, progress=progress)
    if store.keys():
        report(record)
    if done.failed:
        told = [
            f"{text.strip().splitlines()[-1]} ({store.cell(key) / 'error.txt'})"
            for key, text in done.failed.items()
        ]
        first = f"{len(told)} of {len(done.keys)} models failed; the others are kept and reported:"
        raise pl.ProbelensError("\n  ".join([first, *told]))
    return store.folder


def command_of(recipe: str, config: Any) -> str:
    """The command that makes a run of these settings again: what differs from the recipe's defaults is said."""
    own = dataclasses.asdict(type(config)())
    said = [
        f"--set {k}={','.join(map(str, v)) if isinstance(v, (list, tuple)) else v}"
        for k, v in dataclasses.asdict(config).items()
        if k not in ("out", "workers") and v != own[k]
    ]
    return " ".join([f"probelens run {recipe}", *said])


def unfinished(record: RunRecord, folder: Path) -> dict[str, str]:
    """What a report must say of cells that were planned and are not in it; empty where all are."""
    done = set(Store(folder).keys())
    missing = [key for key in record.cells if key not in done]
    if not missing:
        return {}
    return {
        "Not finished": f"{len(missing)} of {len(record.cells)} cells failed or were not run; they are in no number here"
    }


def write_claims(claims: Sequence[Claim], folder: Path) -> None:
    """Write ``claims.parquet``; ``agrees`` is True, False or None, the rest is text."""
    import pandas as pd

    rows = [{**{k: str(v) for k, v in vars(claim).items()}, "agrees": claim.agrees} for claim in claims]
    write_rows(folder / "claims.parquet", pd.DataFrame(rows).astype({"agrees": "boolean"}))

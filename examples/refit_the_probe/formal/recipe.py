"""The paper's formal experiments: five architectures on Parity, S3, Dyck and Counter, everything measured on each.

    probelens run paper-formal --preset smoke     under a minute; proves that it runs, its models learn nothing
    probelens run paper-formal --preset cpu       two cores, some hours, one seed
    probelens run paper-formal --preset paper     six seeds and more data

A cell is one trained model. Finished cells are kept, so a run can be stopped at any time and continues where it
stopped; architectures, tasks and seeds can be added to a run folder. The folder gets `rows.parquet` (every number),
`claims.parquet` (the paper's claims and ours), figures and `report.html`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.formal.settings import FREE, PRESETS, Config
from probelens.examples.refit_the_probe.shared.measuring import Cell, measure, shown, trained_rows
from probelens.examples.refit_the_probe.shared.setup import ARCHS, TASKS, build, make_task, training
from probelens.experiments import RunRecord, Status
from probelens.experiments.recipe import finished_rows, run_recipe

__all__ = ["PRESETS", "Config", "report", "run", "run_cell"]


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train and measure one cell; every number as rows, distinguished by the column ``kind``."""
    task, status = make_task(config["task"]), Status(folder)
    model, recurrent = build(config, task, config["seed"]), config["arch"] in ("mamba", "mamba2")
    trained = pl.training.train(
        model, task, config=training(config), checkpoint_dir=folder / "train", progress=shown(status, config["steps"]),
        backend="reference" if recurrent else None,
    )  # fmt: skip
    trained.save(folder / "training.safetensors")
    # One backend for every condition, since the cost of the convolution is a difference between conditions.
    with model.backend("reference") if recurrent else contextlib.nullcontext():
        rows = [*trained_rows(trained), *measure(Cell(config, folder, model, task), status)]
    about = {
        "arch": config["arch"], "task": config["task"], "train_seed": config["seed"],
        "embedding_std": config["embedding_std"], "convolution": config["convolution"],
    }  # fmt: skip
    # Some tables have columns of these names themselves; what they say of the cell comes first, and wins.
    return [{**about, **row, **about} for row in rows]


def run(config: Config, progress: bool = True) -> Path:
    """Run what is missing and write tables, figures and the report."""
    for asked, allowed in ((config.archs, ARCHS), (config.tasks, TASKS), (config.retrained, TASKS)):
        if unknown := [name for name in asked if name not in allowed]:
            raise pl.InputError(f"unknown {', '.join(map(repr, unknown))}: allowed are {', '.join(allowed)}")
    if bad := [std for std in config.stds if not std > 0]:
        raise pl.InputError(f"stds={bad[0]}: a scale of an embedding is above 0")
    if not (config.archs and config.tasks and config.seeds):
        raise pl.InputError("archs, tasks and seeds must name at least one each")
    cells, finish = config.cells(), functools.partial(report, config)
    return run_recipe("paper-formal", config, cells, run_cell, finish, free=FREE, progress=progress)


def report(config: Config, record: RunRecord) -> Path:
    """Write tables, figures and the report again, from saved rows alone."""
    from probelens.examples.refit_the_probe.formal.report import write

    return write(finished_rows(config.out), config, record)

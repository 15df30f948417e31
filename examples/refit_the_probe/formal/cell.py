"""One cell of the formal grid: train a model, then measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.shared.measuring import Cell, _tidy, measure
from probelens.examples.refit_the_probe.shared.setup import build, make_task, training
from probelens.experiments import Status

__all__ = ["run_cell"]


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train and measure one cell.

    Args:
        config: As ``formal.Config.cells`` makes it.
        folder: Where checkpoints and results stay.

    Returns:
        Every number as rows, distinguished by the column ``kind``.
    """
    task, status = make_task(config["task"]), Status(folder)
    model = build(config, task, config["seed"])

    def show(step: Mapping[str, Any]) -> None:
        said = f"accuracy {step['accuracy']:.2f} at length {step['length']}"
        status.update("training, step", int(step["step"]), config["steps"], said)

    trained = pl.training.train(
        model, task, config=training(config), checkpoint_dir=folder / "train", progress=show,
        backend="reference" if config["arch"] in ("mamba", "mamba2") else None,
    )  # fmt: skip
    trained.save(folder / "training.safetensors")
    rows = _tidy("training", trained)
    rows[-1] |= {"n_params": trained.n_params, "learned": trained.reached, "cpu_seconds": trained.cpu_seconds}
    # One backend for every condition, since the cost of the convolution is a difference between conditions.
    with model.backend("reference") if config["arch"] in ("mamba", "mamba2") else contextlib.nullcontext():
        rows += measure(Cell(config, folder, model, task), status)
    # Some tables have columns of these names themselves; what they say of the cell comes first, and wins.
    return [{**about(config), **row, **about(config)} for row in rows]


def about(config: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that say which cell a row is from."""
    return {
        "arch": config["arch"], "task": config["task"], "train_seed": config["seed"],
        "embedding_std": config["embedding_std"], "convolution": config["convolution"],
    }  # fmt: skip

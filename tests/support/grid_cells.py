"""Cells for the tests of the grid: importable by a fresh process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def square(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A cell that leaves a trace of every run in a log beside the store."""
    with (folder.parent.parent / "log.txt").open("a") as log:
        log.write(f"{config['x']}\n")
    time.sleep(config.get("sleep", 0.0))
    if config.get("fail"):
        raise ValueError(f"cell {config['x']} fails on purpose")
    return [{"x": config["x"], "y": config["x"] ** 2, "part": i} for i in range(2)]


def numbered(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A cell that says which process runs it, and takes two minutes."""
    (folder / "pid.part").write_text(str(os.getpid()))
    (folder / "pid.part").rename(folder / "pid")
    time.sleep(120)
    return [{"x": config["x"]}]


def mortal(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """`square`, but its process is killed in the middle of the first ``deaths`` runs."""
    grave = folder / "deaths.txt"
    deaths = len(grave.read_text()) if grave.exists() else 0
    if deaths < config.get("deaths", 0):
        grave.write_text("x" * (deaths + 1))
        (folder / ".rows.parquet.half.part").write_bytes(b"PAR1 and no end")
        os.kill(os.getpid(), signal.SIGKILL)
    return square(config, folder)


def trained(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A training that saves itself every 4 steps, and is killed when it takes step ``killed_at`` the first time."""
    import probelens as pl

    task = pl.tasks.Parity()
    model = pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8, hidden_size=8))
    log, taken = folder / "steps.txt", []

    def step(row: Mapping[str, Any]) -> None:
        taken.append(row["step"])
        if row["step"] == config.get("killed_at") and not log.exists():
            log.write_text(str(row["step"]))
            os.kill(os.getpid(), signal.SIGKILL)

    settings = pl.training.TrainConfig(
        steps=20, decay_steps=4, batch_size=8, length=6, eval_sequences=8, checkpoint_every=4, threads=1
    )
    pl.training.train(model, task, config=settings, checkpoint_dir=folder, progress=step)
    weights = {name: float(p.double().sum()) for name, p in model.named_parameters()}
    return [{"first_step": taken[0], "last_step": taken[-1], **weights}]

"""Writes docs/data/models: trained formal models and what each is, from the cells of a run of paper-formal.

    probelens run paper-formal --set archs=lstm --set tasks=dyck --set seeds=0 --out RUN
    python docs/tools/formal_models.py RUN/cells/*/train

A folder that training left becomes one file, ``lstm-dyck-0.safetensors``, and one entry of ``models.json``: the command
that made it, its training steps, its accuracy by length, and its checksum. Mamba learns Dyck too slowly for the settings of
that run, and is trained here with others:

    python docs/tools/formal_models.py mamba-dyck RUN
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import probelens as pl
from probelens.examples.refit_the_probe.shared.setup import build, make_task, training
from probelens.models.build import config_of

MODELS = Path(__file__).resolve().parents[1] / "data/models"
LENGTHS = (40, 60, 80, 100, 120)
# Models with settings of their own: the next length comes earlier, the rate falls longer.
OTHER: dict[str, dict[str, Any]] = {"mamba-dyck": {"target_accuracy": 0.9, "decay_steps": 600}}


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(name: str, out: Path) -> Path:
    """Train a model of ``OTHER``; its folder, as a run of paper-formal leaves it. A run that was stopped goes on."""
    torch.set_num_threads(1)
    arch, task_name = name.split("-")
    cell = {
        "arch": arch,
        "task": task_name,
        "embedding_std": 0.02,
        "convolution": True,
        "steps": 8000,
        "length": 40,
        "seed": 0,
    }
    task = make_task(task_name)
    settings = dataclasses.replace(training(cell), **OTHER[name])
    folder = out / name / "train"

    def show(at: dict[str, Any]) -> None:
        if at["step"] % 50 == 0:
            print(at["step"], at["length"], round(at["accuracy"], 4), at["phase"], flush=True)

    found = pl.training.train(
        build(cell, task, 0), task, config=settings, checkpoint_dir=folder, progress=show, backend="reference"
    )
    found.save(folder.parent / "training.safetensors")
    return folder


def entry(folder: Path, task_name: str) -> dict[str, Any]:
    """Copy a trained model here, and say what it is."""
    module = pl.models.load(folder)
    config = config_of(module)
    assert config is not None
    trained = pl.training.TrainResult.load(folder.parent / "training.safetensors")
    name = f"{config.arch}-{task_name}-{config.seed}"
    MODELS.mkdir(parents=True, exist_ok=True)
    file = MODELS / f"{name}.safetensors"
    shutil.copyfile(folder / "model.safetensors", file)
    found = pl.training.evaluate(module, make_task(task_name), LENGTHS, n=256, trained_length=40, late=20, seed=0)
    command = f"probelens run paper-formal --set archs={config.arch} --set tasks={task_name} --set seeds={config.seed}"
    if f"{config.arch}-{task_name}" in OTHER:
        command = f"python docs/tools/formal_models.py {config.arch}-{task_name} RUN"
    return {
        "name": name, "file": file.name, "sha256": checksum(file), "steps": trained.steps,
        "command": command,
        "accuracy_after_position_20": {str(n): round(found.accuracy(n, "late"), 4) for n in LENGTHS},
    }  # fmt: skip


def main(folders: list[str]) -> None:
    """Add the models of these folders, or one that is trained first, and keep those that are there."""
    if folders[0] in OTHER:
        folders = [str(train(folders[0], Path(folders[1])))]
    listed = MODELS / "models.json"
    known = {e["name"]: e for e in json.loads(listed.read_text())} if listed.exists() else {}
    for folder in map(Path, folders):
        task = next(t for t in ("parity", "s3", "dyck", "counter") if t in folder.parent.name.lower())
        made = entry(folder, task)
        known[made["name"]] = made
    listed.write_text(json.dumps([known[name] for name in sorted(known)], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes docs/data/models: trained formal models and what each is, from the cells of a run of paper-formal.

    probelens run paper-formal --set archs=lstm --set tasks=dyck --set seeds=0 --out RUN
    python docs/tools/formal_models.py RUN/cells/*/train

A folder that training left becomes one file, ``lstm-dyck-0.safetensors``, and one entry of ``models.json``: the command
that made it, its training steps, its accuracy by length, and its checksum.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.shared.setup import make_task
from probelens.models.build import config_of

MODELS = Path(__file__).resolve().parents[1] / "data/models"
LENGTHS = (40, 60, 80, 100, 120)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
    return {
        "name": name, "file": file.name, "sha256": checksum(file), "steps": trained.steps,
        "command": f"probelens run paper-formal --set archs={config.arch} --set tasks={task_name} --set seeds={config.seed}",
        "accuracy_after_position_20": {str(n): round(found.accuracy(n, "late"), 4) for n in LENGTHS},
    }  # fmt: skip


def main(folders: list[str]) -> None:
    """Add the models of these folders, and keep those that are there."""
    listed = MODELS / "models.json"
    known = {e["name"]: e for e in json.loads(listed.read_text())} if listed.exists() else {}
    for folder in map(Path, folders):
        task = next(t for t in ("parity", "s3", "dyck", "counter") if t in folder.parent.name.lower())
        made = entry(folder, task)
        known[made["name"]] = made
    listed.write_text(json.dumps([known[name] for name in sorted(known)], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

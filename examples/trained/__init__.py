"""The quickstart's trained models: those that probelens brings with it, or those of a former run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probelens.errors import InputError, StoreError
from probelens.experiments import Store

__all__ = ["NONE", "SHIPPED", "find"]

SHIPPED, NONE = "shipped", "none"
FOLDER = Path(__file__).parent
_DECIDES = ("arch", "seed", "length", "steps")  # settings that decide a model's weights


def find(config: Mapping[str, Any]) -> tuple[Path, Path] | None:
    """The files of a cell's trained model and of its training; None where it must be trained.

    ``config["trained"]`` is "shipped", "none", or the folder of a run that trained with equal settings.
    """
    source = config["trained"]
    if source == NONE:
        return None
    wanted = {key: config[key] for key in _DECIDES}
    if source == SHIPPED:
        return _shipped(wanted)
    store = Store(source)
    for key in store.keys() if Path(source).is_dir() else ():
        about = store.config(key)
        if {name: about.get(name) for name in _DECIDES} == wanted:
            return store.cell(key) / "model.safetensors", store.cell(key) / "training.safetensors"
    settings = ", ".join(f"{key}={value}" for key, value in wanted.items())
    raise InputError(
        f"{source!r} holds no finished model of {settings}. Give the folder of a run of the quickstart with these "
        f"settings, {SHIPPED!r} for the models that come with probelens, or {NONE!r} to train"
    )


def _shipped(wanted: Mapping[str, Any]) -> tuple[Path, Path] | None:
    for about in json.loads((FOLDER / "models.json").read_text()):
        if about["settings"] != wanted:
            continue
        files = [(FOLDER / name, digest) for name, digest in about["sha256"].items()]
        for file, digest in files:
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise StoreError(
                    f"{str(file)!r} is missing or isn't what probelens brings with it. Install probelens again, or train: "
                    f"--trained {NONE}"
                )
        (model, _), (training, _) = files
        return model, training
    return None

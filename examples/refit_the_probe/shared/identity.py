"""Which model a cell is about: its name, and a hash of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def identified(name: str) -> dict[str, str]:
    """The settings of a cell that say which model it is about."""
    # Absolute, since a worker of a cluster starts in another folder.
    place = str(Path(name).absolute()) if Path(name).is_dir() else name
    return {"model": place, "weights": identity(place)}


def identity(name: str) -> str:
    """Identity of a model beyond its name: a hash of a folder's config and weights, "" for a hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]

"""Cells for the tests of the grid: importable by a fresh process."""

from __future__ import annotations

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

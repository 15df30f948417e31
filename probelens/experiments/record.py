"""The record of a run folder, ``run.json``: recipe, settings, cells and versions.

It is written when a run starts, so a report can be made again from the folder alone, also after an interruption.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from probelens.errors import InputError, StoreError
from probelens.results.files import atomic_path
from probelens.results.types import fits

__all__ = ["RunRecord", "versions"]

FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """The recipe, settings, cells and versions behind a run folder.

    Args:
        recipe: Name of the recipe.
        config: Its settings, plain data.
        cells: Keys of its cells, in order.
        versions: Versions of what the numbers depend on.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = RunRecord("quickstart", {"seed": 1}).save(folder)
        >>> RunRecord.load(folder).config
        {'seed': 1}
    """

    recipe: str
    config: dict[str, Any]
    cells: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the record into a run folder, whole or not at all.

        Args:
            folder: The run folder; made when missing.

        Returns:
            The file written.

        Raises:
            InputError: Settings that aren't plain data.
            StoreError: The folder can't be written.
        """
        try:
            text = json.dumps({"format": 1, **asdict(self)}, indent=2, allow_nan=False)
        except (TypeError, ValueError) as err:
            raise InputError(f"a run's settings must be plain data (strings, numbers, None, lists): {err}") from err
        path = Path(folder) / FILE
        with atomic_path(path) as part:
            part.write_text(text, encoding="utf-8")
        return path

    def start(self, folder: str | os.PathLike[str], free: Sequence[str] = ("out", "workers")) -> Path:
        """Write the record into a folder that is new or holds this same run; refuse one that holds another.

        Args:
            folder: The run folder.
            free: Settings that may differ: those that only add cells to a run, or don't change its numbers.

        Returns:
            The file written.

        Raises:
            InputError: The folder holds a run of another recipe or with other settings, whose report
                would be written over by this one's.
            StoreError: The folder's record is damaged, or it can't be written.
        """
        if os.path.exists(Path(folder) / FILE):
            before = RunRecord.load(folder)
            # As they come back from the file: tuples are lists there.
            both = (json.loads(json.dumps(r.config)) for r in (self, before))
            mine, theirs = ({k: v for k, v in config.items() if k not in free} for config in both)
            changed = [f"{k}={theirs.get(k)!r} there, {mine[k]!r} now" for k in mine if mine[k] != theirs.get(k)]
            if before.recipe != self.recipe or changed:
                what = "; ".join(changed) or f"recipe {before.recipe!r} there, {self.recipe!r} now"
                raise InputError(
                    f"{str(folder)!r} holds a run with other settings ({what}). "
                    "Choose another folder with --out FOLDER, or remove this one."
                )
        return self.save(folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunRecord:
        """Read the record of a run folder.

        Args:
            folder: The run folder.

        Returns:
            The record.

        Raises:
            StoreError: No folder, no record in it, or one that is damaged or foreign.
        """
        path = Path(folder) / FILE
        if not os.path.isfile(path):
            what = "has no run.json" if os.path.isdir(folder) else "is not a folder"
            raise StoreError(
                f"{str(folder)!r} is not a run folder: it {what}. "
                "Give the folder that `probelens run` or `probelens profile` wrote."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = cls(content["recipe"], content["config"], content["cells"], content["versions"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
            raise StoreError(
                f"{str(path)!r} is damaged: {type(err).__name__}: {err}. Remove it and run the recipe again: "
                "what is finished is kept."
            ) from err
        hints = {"recipe": str, "config": dict[Any, Any], "cells": list[str], "versions": dict[Any, str]}
        if not all(fits(getattr(found, name), hint) for name, hint in hints.items()):
            raise StoreError(f"{str(path)!r} is not the record of a run. Remove it and run the recipe again.")
        return found


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    packages = {name: metadata.version(name) for name in ("probelens", "torch", "transformers")}
    return {**packages, "Python": platform.python_version()}

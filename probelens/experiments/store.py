"""The store of a run: one folder per cell, named by a hash of its config, complete or absent.

A cell's rows are written last and in one piece, so a run that was killed at any moment continues
where it stopped: a cell with rows is done, one without is run again and finds its checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError, StoreError
from probelens.results.files import atomic_path, read_rows, write_rows

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Store", "cell_key"]

Row = dict[str, Any]


def cell_key(config: Mapping[str, Any], version: str | None = None, code: str = "") -> str:
    """The name of a cell: a hash of its config, of the library's version and of its code.

    Args:
        config: Settings that change the result; strings, numbers, None, lists and dicts.
        version: Version of the library; None for the installed one.
        code: Hash of the cell's own code, as ``probelens.experiments.code.code_of`` gives it; empty for none.

    Returns:
        16 hexadecimal digits, the same in every process and on every machine.

    Raises:
        InputError: A value that isn't data.

    Examples:
        >>> cell_key({"seed": 0, "arch": "lstm"}, "1") == cell_key({"arch": "lstm", "seed": 0}, "1")
        True
    """
    try:
        parts = [config, version or metadata.version("probelens"), *([code] if code else [])]
        text = json.dumps(parts, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as err:
        raise InputError(f"a cell's config must be plain data (strings, numbers, None, lists, dicts): {err}") from err
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The folder of a run.

    Args:
        folder: Where everything goes; made when first written to.

    Raises:
        InputError: An empty path.
        StoreError: The path is a file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not os.fspath(folder):
            raise InputError("a run needs a folder, got an empty path")
        self.folder = Path(folder)
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise StoreError(f"{str(folder)!r} is a file, not a folder. Choose another run folder.")

    def cell(self, key: str) -> Path:
        """The folder of a cell, for its checkpoints and results.

        Args:
            key: From ``cell_key``.

        Returns:
            The folder, which may not exist yet.

        Raises:
            InputError: Not a cell's key.
        """
        if not key or any(c not in "0123456789abcdef" for c in key):
            raise InputError(f"{key!r} is not a cell's key: keys come from cell_key()")
        return self.folder / "cells" / key

    def make(self, key: str) -> Path:
        """The folder of a cell, made when missing, to write to.

        Args:
            key: From ``cell_key``.

        Returns:
            The folder.

        Raises:
            InputError: Not a cell's key.
            StoreError: A link leads out of the run folder, or the folder can't be made.
        """
        folder = self.cell(key)
        for place in (folder.parent, folder):
            # Before it is made: a link to nowhere would be followed too.
            if place.is_symlink():
                raise StoreError(
                    f"{str(place)!r} is a link to {os.readlink(place)!r}, and cells are written inside their run folder "
                    "only. Remove the link; to keep runs on another disk, make the run folder itself there."
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise StoreError(f"can't write to {str(folder)!r}: {err}. Choose a folder that can be written.") from err
        return folder

    def done(self, key: str) -> bool:
        """Whether the cell is complete.

        Args:
            key: From ``cell_key``.

        Returns:
            True once its rows are written.
        """
        return os.path.isfile(self.cell(key) / "rows.parquet")

    def write(self, key: str, config: Mapping[str, Any], rows: Iterable[Row]) -> Path:
        """Complete a cell: its config, then its rows, each whole or not at all.

        Args:
            key: From ``cell_key``.
            config: Its settings, as JSON can keep them.
            rows: Mappings from column to value, at least one.

        Returns:
            The cell's folder.

        Raises:
            InputError: No rows, or a column whose values are of several types.
            StoreError: The folder can't be written, or a link leads out of the run folder.
        """
        import pandas as pd
        import pyarrow as pa

        found = rows
        rows = list(rows) if isinstance(rows, Iterable) else [rows]
        if isinstance(found, Mapping) or not all(isinstance(row, Mapping) for row in rows):
            raise InputError(
                f"a cell must return a list of rows, each a dict of column to value, and this one returned {found!r:.80}"
            )
        if not rows:
            raise InputError("a cell without rows looks like one that did not run. Return at least one row.")
        folder = self.make(key)
        with atomic_path(folder / "config.json") as part:
            part.write_text(json.dumps(dict(config), indent=2, sort_keys=True, allow_nan=False))
        try:
            write_rows(folder / "rows.parquet", pd.DataFrame(rows))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
            raise InputError(
                f"the rows of a cell can't be a table: {'; '.join(map(str, err.args))}. Give each column values of "
                "one type: two kinds of rows that use a name differently need two names."
            ) from err
        return folder / "rows.parquet"

    def config(self, key: str) -> dict[str, Any]:
        """The settings of one complete cell.

        Args:
            key: From ``cell_key``.

        Returns:
            The settings, as JSON keeps them.

        Raises:
            StoreError: The file is missing or damaged.
        """
        path = self.cell(key) / "config.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as err:
            raise StoreError(f"{str(path)!r} can't be read: {err}. Remove the cell and run the grid again.") from err
        if not isinstance(found, dict):
            raise StoreError(f"{str(path)!r} is not a cell's config. Remove the cell and run the grid again.")
        return found

    def rows(self, key: str) -> pd.DataFrame:
        """The rows of one complete cell.

        Args:
            key: From ``cell_key``.

        Returns:
            The rows as they were written.

        Raises:
            StoreError: The cell isn't complete, or its file is damaged.
        """
        path = self.cell(key) / "rows.parquet"
        if not path.is_file():
            raise StoreError(f"cell {key} in {str(self.folder)!r} is not complete. Run the grid again.")
        try:
            return read_rows(path)
        except StoreError as err:
            raise StoreError(f"{err}. Remove it and run the grid again.") from err

    def keys(self) -> list[str]:
        """Complete cells, sorted."""
        cells = self.folder / "cells"
        if not cells.is_dir():
            return []
        return sorted(p.name for p in cells.iterdir() if (p / "rows.parquet").is_file())

    def all_rows(self, keys: Iterable[str] | None = None) -> pd.DataFrame:
        """The rows of several complete cells under each other, with their keys in a column ``cell``.

        Args:
            keys: Cells; None for every complete one.

        Returns:
            One table; empty if there are no cells.
        """
        import pandas as pd

        frames = [self.rows(key).assign(cell=key) for key in (self.keys() if keys is None else keys)]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

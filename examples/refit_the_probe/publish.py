"""Publish a run of this folder's recipes: its rows, its figures as SVG, its claims and numbers as tables of a page.

    python -m probelens.examples.refit_the_probe.publish runs/paper-pretrained/rows.parquet \\
        --data docs/data/paper/pretrained.parquet --figures docs/figures/paper --page docs/paper.md

Everything is made from the rows, so a published file serves as well as the run's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd

import probelens as pl
from probelens.examples.refit_the_probe.code_depth import report as code_depth
from probelens.examples.refit_the_probe.formal import tables as formal
from probelens.examples.refit_the_probe.pretrained import report as pretrained
from probelens.examples.refit_the_probe.shared.pages import exit_with_message, fill, write_pictures
from probelens.examples.refit_the_probe.shared.rows import merged, slim
from probelens.results.files import atomic_path, read_rows, write_rows


def recipe_of(rows: pd.DataFrame) -> ModuleType:
    """The tables and figures of the recipe that wrote these rows."""
    return code_depth if "balanced_lo" in rows else pretrained if "n_layers" in rows else formal


def filled(page: str, rows: pd.DataFrame) -> str:
    """Return a page with its tables written again, each between ``<!-- NAME -->`` and ``<!-- end NAME -->``."""
    return fill(page, recipe_of(rows).tables(rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Publish a run: its rows, its figures as SVG, and its tables in a Markdown page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="+",
        help="rows.parquet of runs, or a file that --data wrote; a model in several files is taken from the last",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, help="file for the rows, without empty columns and in float32")
    parser.add_argument("--figures", type=Path, help="folder for an SVG of each figure; needs kaleido and Chrome")
    parser.add_argument("--page", type=Path, help="Markdown page with tables between the marks <!-- NAME -->")
    args = parser.parse_args(argv)
    recipes = {recipe_of(read_rows(path)) for path in args.rows if path.is_file()} or {formal}
    if len(recipes) > 1:
        raise pl.InputError("these are rows of several recipes. Publish the rows of one recipe at a time.")
    (recipe,) = recipes
    # Rounded first, so that the tables of a page are those of the rows published beside it.
    rows = slim(merged(args.rows, recipe.CELL))
    if args.data is not None:
        write_rows(args.data, rows, compression="zstd")
    if args.figures is not None:
        write_pictures(recipe.pictures(rows), args.figures)
    if args.page is not None:
        text = filled(args.page.read_text(encoding="utf-8"), rows)
        with atomic_path(args.page) as part:
            part.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    exit_with_message(main)

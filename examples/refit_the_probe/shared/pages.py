"""What a run becomes beside its report: claims as a file, tables between the marks of a page, figures as SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import probelens as pl
from probelens.results.files import atomic_path, write_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from probelens.results.report import Claim

__all__ = ["claims_table", "exit_with_message", "fill", "write_claims", "write_pictures"]


def write_pictures(figures: Mapping[str, go.Figure | None], folder: Path) -> None:
    """Write an SVG of each figure, on white; needs kaleido and a Chrome."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            with atomic_path(folder / f"{name}.svg") as part:
                figure.update_layout(paper_bgcolor="white", plot_bgcolor="white").write_image(part, format="svg")


def exit_with_message(main: Callable[[], object]) -> None:
    """Run a command; what it can't use is said in a sentence, with exit status 2."""
    try:
        main()
    except pl.ProbelensError as err:
        print(err, file=sys.stderr)
        sys.exit(2)


def claims_table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    word = {True: "yes", False: "no", None: "can't say"}
    lines = ["| claim | paper | here | 95 % interval | agrees |", "|---|---|---|---|---|"]
    for claim in claims:
        ours = f"{claim.ours}. {claim.note}" if claim.note else str(claim.ours)
        lines.append(f"| {claim.claim} | {claim.paper} | {ours} | {claim.interval} | {word[claim.agrees]} |")
    return "\n".join(lines) + "\n"


def fill(page: str, tables: Mapping[str, str]) -> str:
    """A page with its tables written again: each stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        probelens.InputError: The page has none of these marks.
    """
    if not any(f"<!-- {name} -->" in page for name in tables):
        raise pl.InputError(
            f"the page has no table to write again: none of the marks {', '.join(f'<!-- {n} -->' for n in tables)}"
        )
    for name, table in tables.items():
        first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
        if first in page:
            head, rest = page.split(first, 1)
            page = f"{head}{first}\n\n{table}\n{last}{rest.split(last, 1)[1]}"
    return page


def write_claims(claims: Sequence[Claim], folder: Path) -> None:
    """Write ``claims.parquet``; ``agrees`` is True, False or None, the rest is text."""
    import pandas as pd

    rows = [{**{k: str(v) for k, v in vars(claim).items()}, "agrees": claim.agrees} for claim in claims]
    write_rows(folder / "claims.parquet", pd.DataFrame(rows).astype({"agrees": "boolean"}))

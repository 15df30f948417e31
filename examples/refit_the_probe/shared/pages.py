"""What a run becomes beside its report: claims as a file, tables between the marks of a page, figures as SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

import probelens as pl
from probelens.experiments import RunRecord
from probelens.experiments.recipe import about_run, unfinished
from probelens.results.files import atomic_path, write_rows
from probelens.results.report import Claim, write_report

if TYPE_CHECKING:
    import plotly.graph_objects as go


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
    """A page with its tables written again: each stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``."""
    if not any(f"<!-- {name} -->" in page for name in tables):
        marks = ", ".join(f"<!-- {name} -->" for name in tables)
        raise pl.InputError(f"the page has no table to write again: none of the marks {marks}")
    for name, table in tables.items():
        first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
        if first in page:
            head, rest = page.split(first, 1)
            page = f"{head}{first}\n\n{table}\n{last}{rest.split(last, 1)[1]}"
    return page


def write_paper_report(
    config: Any, record: RunRecord, claims: Sequence[Claim], measured: Mapping[str, object], **report: Any
) -> Path:
    """Write ``claims.parquet`` and ``report.html`` into the run folder, and return the latter's path.

    ``agrees`` of a claim is True, False or None, the rest of it is text. ``report`` is title, lead and sections.
    """
    folder = Path(config.out)
    rows = [{**{k: str(v) for k, v in vars(claim).items()}, "agrees": claim.agrees} for claim in claims]
    write_rows(folder / "claims.parquet", pd.DataFrame(rows).astype({"agrees": "boolean"}))
    measured = {**unfinished(record, folder), **measured}
    return write_report(folder / "report.html", **report, paper=claims, measured=measured, **about_run(config, record))

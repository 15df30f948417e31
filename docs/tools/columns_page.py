"""Writes docs/columns.md from the declared columns of results: ``python docs/tools/columns_page.py``.

A test compares the page with what the classes declare, another the rows of real calls.
"""

from __future__ import annotations

from pathlib import Path

import probelens as pl
from probelens.hooks.verify import VerifyReport
from probelens.models.evaluation import EvalResult
from probelens.results.result import Result
from probelens.results.types import said

PAGE = Path(__file__).resolve().parents[1] / "columns.md"

INTRO = """\
# Columns of results

<!-- Written by docs/tools/columns_page.py from the classes. Change the columns there, then run it again. -->

What a primitive returns is a table too: `result.rows` is a list of dicts, `result.to_dataframe()` the same as a pandas
DataFrame with the columns in this order, and `result.find(site=…, condition="target")` the one row with these values.
Printing a result says its finding in a few sentences; `result.findings()` gives all of them. A column that no row has is
left out of the table. Intervals are of 95 %.
"""


def classes() -> list[type[Result]]:
    """The classes of results that declare columns, in the order of the page."""
    return [
        pl.ProbeResult, pl.AblationResult, pl.ErasureResult, pl.DoseResult, pl.LengthTransfer, pl.ComponentResult,
        pl.PatchResult, pl.PatchSitesResult, pl.Profile, EvalResult, VerifyReport,
    ]  # fmt: skip


def section(cls: type[Result]) -> str:
    """The table of one class."""
    about = (cls.__doc__ or "").strip().splitlines()[0]
    lines = ["| column | type | unit | on | meaning |", "|---|---|---|---|---|"]
    for c in cls.columns:
        cells = [f"`{c.name}`", said(c.type), c.unit, c.on, c.meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return f"## {cls.__name__}\n\n{about}\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    return "\n".join([INTRO, *map(section, classes())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

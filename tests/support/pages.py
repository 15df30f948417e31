"""Runs the Python of a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(page: str) -> str:
    """The Python of a page with its line numbers kept, so that a traceback points into the page."""
    text = (ROOT / page).read_text()
    lines = [""] * text.count("\n")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        start = text.count("\n", 0, block.start(1))
        lines[start : start + block[1].count("\n")] = block[1].splitlines()
    return "\n".join(lines)


def run_page(page: str, **names: object) -> dict[str, object]:
    names["__name__"] = page
    exec(compile(python_blocks(page), page, "exec"), names)
    return names

"""Writes the pages and notebooks of docs/tutorials from their sources: ``python docs/tools/tutorials.py [NAME]``.

A source is Python with cells (jupytext's "percent" format). Its page has the cells' text and code and what the
code gave when this script ran it; its notebook has the same cells and one before them that installs probelens.
A test runs every source again and compares. Figures are drawn by the Chromium of the system.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

DOCS = Path(__file__).resolve().parents[1]
FOLDER = DOCS / "tutorials"
FIGURES = FOLDER / "figures"
SOURCES = sorted(FOLDER.glob("*.py"))
# Pages that are notebooks too: their fenced Python blocks are the cells.
PAGES = [DOCS / "quickstart.md", DOCS / "write-an-adapter.md"]

INSTALL = """\
# In Colab, or wherever probelens isn't installed yet
import importlib.util

if importlib.util.find_spec("probelens") is None:
    %pip install --quiet probelens"""
Show = Callable[[Any, str], str]


@dataclass
class Cell:
    """A cell and what it gave.

    Args:
        kind: "markdown" or "code".
        text: Its source.
        alt: What its figure shows, in words.
        line: Where it starts in the source, for tracebacks.
        printed: What the code printed.
        value: The value of its last expression.
    """

    kind: str
    text: str
    alt: str = ""
    line: int = 0
    printed: str = ""
    value: Any = field(default=None, repr=False)


def cells(path: Path) -> list[Cell]:
    """The cells of a source."""
    import jupytext

    source, found, line = path.read_text(encoding="utf-8"), [], 0
    for cell in jupytext.reads(source, fmt="py:percent").cells:
        if cell.cell_type == "code":
            line = source.count("\n", 0, source.index(cell.source))
        found.append(Cell(cell.cell_type, cell.source, cell.metadata.get("alt", ""), line))
    return found


def execute(path: Path) -> tuple[list[Cell], dict[str, Any]]:
    """Run a source in an empty folder: its cells with what they gave, and the names it defined."""
    import torch

    found: list[Cell] = cells(path)
    names: dict[str, Any] = {"__name__": f"tutorial_{path.stem}"}
    modules = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.random.fork_rng():
        torch.manual_seed(0)
        sys.path.insert(0, folder)
        try:
            for cell in found:
                if cell.kind == "code":
                    _run(cell, path, names)
        finally:
            sys.path.remove(folder)
            # Modules that the source wrote are not to be found by the next one.
            for name in set(sys.modules) - modules:
                if folder in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
    return found, names


def _run(cell: Cell, path: Path, names: dict[str, Any]) -> None:
    tree = ast.parse("\n" * cell.line + cell.text, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, str(path), "exec"), names)
        if isinstance(last, ast.Expr):
            cell.value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
    cell.printed = out.getvalue().rstrip()


def table(frame: Any) -> str:
    """A DataFrame as a Markdown table with numbers of three places."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if value != value else f"{value:.3f}".removesuffix("000").removesuffix(".")
        return "" if value is None else str(value).replace("|", "\\|")

    names = [str(name) for name in frame.columns]
    numbers = [frame[name].dtype.kind in "fi" for name in frame.columns]
    rows = ["| " + " | ".join(names) + " |", "|" + "|".join("--:" if n else "---" for n in numbers) + "|"]
    rows += ["| " + " | ".join(map(text, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join(rows)


def shown(cell: Cell, figure: Show) -> str:
    """What a code cell gave, as Markdown; "" if nothing."""
    parts = []
    if cell.printed:
        parts.append(f"```text\n{cell.printed}\n```")
    value = cell.value
    kind = type(value).__module__.partition(".")[0], type(value).__name__
    if kind == ("pandas", "DataFrame"):
        parts.append(table(value))
    elif kind == ("plotly", "Figure"):
        parts.append(figure(value, cell.alt))
    elif value is not None:
        parts.append(f"```text\n{value!r}\n```")
    return "\n\n".join(parts)


def page(path: Path, found: list[Cell], figure: Show) -> str:
    """The page of a source whose cells were run."""
    stem = path.stem
    head = f"<!-- Written by docs/tools/tutorials.py from docs/tutorials/{stem}.py. Change that, then run it again. -->"
    parts = [head]
    for i, cell in enumerate(found):
        if cell.kind == "markdown":
            parts.append(cell.text)
            if i == 0:
                parts.append(
                    f"[Notebook]({stem}.ipynb){{ download={stem}.ipynb }} · [Python]({stem}.py){{ download={stem}.py }}"
                )
            continue
        parts.append(f"```python\n{cell.text}\n```")
        if given := shown(cell, figure):
            parts.append(given)
    return "\n\n".join(parts) + "\n"


def notebook(path: Path) -> str:
    """The notebook of a source or of a page, without output: an installing cell, then its cells."""
    import jupytext
    import nbformat.v4 as v4

    fmt = "py:percent" if path.suffix == ".py" else "md"
    text = path.read_text(encoding="utf-8")
    made = jupytext.reads(text, fmt=fmt)
    install = INSTALL.replace("--quiet probelens", '--quiet "probelens[dask]"') if '"dask"' in text else INSTALL
    made.cells.insert(1, v4.new_code_cell(install))
    for i, cell in enumerate(made.cells):
        if cell.source.startswith("%%bash\n"):
            # Commands of the page are for a terminal, to be read here and not to be run.
            commands = cell.source.removeprefix("%%bash\n")
            made.cells[i] = cell = v4.new_markdown_cell(f"```bash\n{commands}\n```")
        cell.id = f"cell-{i}"
        cell.metadata = {}
        if cell.cell_type == "markdown":
            cell.source = _for_notebook(cell.source)
    made.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return jupytext.writes(made, fmt="ipynb").rstrip() + "\n"


def _for_notebook(text: str) -> str:
    """Links to other pages lead nowhere from a notebook: their words stay."""
    text = re.sub(r"(?<!!)\[([^]]+)\]\((?!https?://|#)[^)]+\)(\{[^}]*\})?", r"\1", text)
    return re.sub(r"<!--.*?-->\n*", "", text, flags=re.S)


def without_figures(figure: Any, alt: str) -> str:
    """A figure's place, for comparing pages."""
    return f"![{alt}]()"


@contextlib.contextmanager
def drawing(stem: str) -> Iterator[Show]:
    """Writes the figures of one page as SVG, with text that can be read on light and dark."""
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    FIGURES.mkdir(exist_ok=True)
    for old in FIGURES.glob(f"{stem}-*.svg"):
        old.unlink()
    count = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.set_content("<html><body></body></html>")
        tab.add_script_tag(content=get_plotlyjs())

        def show(figure: Any, alt: str) -> str:
            nonlocal count
            count += 1
            name = f"{stem}-{count}.svg"
            height = figure.layout.height or 420
            url = tab.evaluate(
                "([fig, height]) => Plotly.toImage(JSON.parse(fig), {format: 'svg', width: 760, height})",
                [figure.to_json(), height],
            )
            svg = unquote(url.partition(",")[2])
            svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)
            svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
            (FIGURES / name).write_text(svg + "\n", encoding="utf-8")
            return f"![{alt}](figures/{name})"

        yield show
        browser.close()


def write(path: Path) -> None:
    """Run a source, and write its page, figures and notebook."""
    since = time.process_time()
    found, _ = execute(path)
    took = time.process_time() - since
    with drawing(path.stem) as figure:
        path.with_suffix(".md").write_text(page(path, found, figure), encoding="utf-8")
    path.with_suffix(".ipynb").write_text(notebook(path), encoding="utf-8")
    print(f"{path.stem}: {took:.1f} s of CPU")


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for source in SOURCES:
        if not chosen or source.stem in chosen:
            write(source)
    for source in PAGES:
        if not chosen or source.stem in chosen:
            source.with_suffix(".ipynb").write_text(notebook(source), encoding="utf-8")

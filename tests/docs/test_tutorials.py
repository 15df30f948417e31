"""The tutorials run as they stand, give what their pages show, and find what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tutorials

NAMES = [path.stem for path in tutorials.SOURCES]
Names = dict[str, Any]


def wrap(names: Names) -> None:
    assert names["report"].ok


def probe(names: Names) -> None:
    rows = names["rows"].set_index(["label", "layer"])
    assert (rows.loc[["top", "depth"], "added"].xs(0, level="layer") > 0.05).all()
    assert rows.loc[("depth", 1), "selectivity"] > 0.2


def ablate(names: Names) -> None:
    filters, means = ({row["layer"]: row for row in names[name].targets()} for name in ("filters", "ablated"))
    assert filters[1]["drop"] < 0.25
    assert abs(filters[2]["drop"]) < 0.05
    assert filters[1]["refit_accuracy"] > 0.95
    assert all(means[i]["drop"] > filters[i]["drop"] + 0.2 for i in (0, 1, 2))
    assert all(means[i]["between_variance"] > 0.99 > filters[i]["between_variance"] for i in (0, 1, 2))
    assert all(means[i]["refit_accuracy"] < 0.65 and means[i]["refit_mlp_accuracy"] > 0.9 for i in (0, 1, 2))
    assert all(rows[i]["verdict"] == "inconclusive" for rows in (filters, means) for i in (0, 1))
    assert [means[i]["needed"] for i in (0, 1, 2)] == ["yes", "yes", "can't tell"]
    assert {means[i]["effect_against"] for i in (0, 1, 2)} == {"random"}
    erased = {row["layer"]: row for row in names["erased"].rows}
    assert erased[1]["drop"] > 0.4
    assert erased[1]["refit_mlp_accuracy"] > 0.9
    assert not erased[-1]["readable_after"]
    assert min(row["drop"] for row in names["replaced"].rows) > 0.4
    shares = names["shares"]
    assert shares["target"].min() > 0.95
    assert shares["complement"].max() < 0.05
    assert set(names["verdicts"].drop(-1)) == {"used"}
    assert names["verdicts"][-1] in ("unreadable", "underpowered"), "no probe reads the parity in the embedding"


def patch(names: Names) -> None:
    recovery = names["patched"].recovery()
    assert recovery[1, 3] > 0.8
    assert recovery[3, 11] == pytest.approx(1.0, abs=1e-4)
    readings = names["readings"].set_index("site")["recovery"]
    assert readings["G"] > 0.8
    assert readings[["E", "H"]].max() < 0.2


def state(names: Names) -> None:
    curves = names["curves"]
    assert curves["all of the state"][5:].min() == 1.0
    assert curves["c of layer 0"][6:].min() > 0.9
    assert max(curves["h of layer 0"][7:].max(), curves["c of layer 1"][7:].max()) < 0.3


def own_task(names: Names) -> None:
    assert names["profile"].behaviour["all"] > 0.95
    answers = names["profile"].answers()
    assert {"readable", "needed", "sufficient", "used"} <= set(answers)
    assert len(answers) == 4
    assert names["data"].mask.sum() == 13


def grid(names: Names) -> None:
    assert len(names["rows"]) == 5 * 3
    assert len(names["report"].found) == 5


SAYS: dict[str, Callable[[Names], None]] = {f.__name__: f for f in (wrap, probe, ablate, patch, state, own_task, grid)}


def blurred(page: str) -> str:
    """A page without its numbers, which differ in the last digits from one machine to another."""
    page = re.sub(r"\]\(figures/[^)]*\)", "]()", page)
    page = re.sub(r"-?\d+(\.\d+)?|\bnan\b", "#", page)
    return re.sub(r"[ \t]+", " ", page)


def test_every_tutorial_has_its_claims_checked_and_is_in_the_menu() -> None:
    assert set(SAYS) == set(NAMES)
    menu = (tutorials.DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    index = (tutorials.FOLDER / "index.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"tutorials/{name}.md" not in menu or f"({name}.md)" not in index] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs_and_its_page_shows_what_it_gave(name: str) -> None:
    source = tutorials.FOLDER / f"{name}.py"
    found, names = tutorials.execute(source)
    SAYS[name](names)
    written = source.with_suffix(".md").read_text(encoding="utf-8")
    again = tutorials.page(source, found, tutorials.without_figures)
    assert blurred(written) == blurred(again), f"the page is stale: python docs/tools/tutorials.py {name}"
    for figure in re.findall(r"\]\((figures/[^)]*)\)", written):
        assert (tutorials.FOLDER / figure).is_file()


@pytest.mark.parametrize("path", [*tutorials.SOURCES, *tutorials.PAGES], ids=lambda path: path.stem)
def test_a_notebook_is_its_source_after_a_cell_that_installs(path: Path) -> None:
    written = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert written == tutorials.notebook(path), f"stale: python docs/tools/tutorials.py {path.stem}"
    code = ["".join(c["source"]) for c in json.loads(written)["cells"] if c["cell_type"] == "code"]
    assert "%pip install --quiet" in code[0]
    if path.suffix == ".py":
        assert code[1:] == [cell.text for cell in tutorials.cells(path) if cell.kind == "code"]
    else:
        blocks = re.findall(r"^```python\n(.*?)\n```", path.read_text(encoding="utf-8"), re.M | re.S)
        assert code[1:] == blocks, "the Python of the page, and nothing for a terminal"


def test_a_page_that_shows_something_else_is_noticed() -> None:
    assert blurred("| 0 | 0.984 | erased |") == blurred("| 0 | 0.979 | erased |")
    assert blurred("| 0 | 0.984 | erased |") != blurred("| 0 | 0.984 | inconclusive |")

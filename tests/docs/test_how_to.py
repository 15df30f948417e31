"""The page of short recipes runs, and explains every verdict that the library can give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from docs_inventory import read, sources
from pages import run_page

from probelens.ablation.verdict import verdict


def words(code: str) -> Iterator[str]:
    """The verdicts in a piece of code: what functions called verdict return, and what is given as one."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and node.name == "verdict":
            for given in ast.walk(node):
                if isinstance(given, ast.Return):
                    yield from _texts(given.value)
        elif isinstance(node, ast.keyword) and node.arg == "verdict":
            yield from _texts(node.value)
        elif isinstance(node, ast.Assign):
            target = node.targets[0].elts[0] if isinstance(node.targets[0], ast.Tuple) else node.targets[0]
            if ast.unparse(target) == "verdict" or ast.unparse(target).endswith("['verdict']"):
                yield from _texts(node.value)


def _texts(value: ast.expr | None) -> Iterator[str]:
    """The constants that an expression can be; of a tuple those of its first element."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.Tuple):
        yield from _texts(value.elts[0])


def explained(table: str) -> list[str]:
    """The words of a table of the page."""
    part = read("docs/how-to.md").split(f"<!-- {table} verdicts -->")[1].split("<!-- end -->")[0]
    return re.findall(r"^\| `([\w ]+)` \| .{20,} \| .{20,} \|$", part, re.M)


def test_every_verdict_of_the_library_is_explained() -> None:
    found = {word for path in sources() for word in words(path.read_text(encoding="utf-8"))}
    tables = [explained(name) for name in ("ablation", "profile", "interchange")]
    told = {word for table in tables for word in table}
    assert told == found, "docs/how-to.md explains each verdict, and what to do next"
    assert all(len(set(table)) == len(table) for table in tables), "a word twice in one table"


def test_the_verdicts_of_an_ablation_are_those_that_can_come_out() -> None:
    cases = [
        verdict(floor=floor, readout=readout, before=before, after=after, unread=unread, power=power)
        for floor in (True, False)
        for readout in (True, False)
        for before in (True, False, None)
        for after in (True, False, None)
        for unread in (True, False)
        for power in (True, False, None)
    ]
    assert set(cases) == set(explained("ablation"))


def test_a_new_verdict_is_noticed() -> None:
    code = 'def verdict(x):\n    if x:\n        return "odd", "why"\n    return "even" if x else "none"\n'
    assert set(words(code)) == {"odd", "even", "none"}
    assert set(words('row["verdict"] = "a"\nverdict, why = "b", "c"\nf(verdict="d")\nother = "e"')) == {"a", "b", "d"}


def test_the_page_runs_and_leaves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        names = run_page("docs/how-to.md")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"activations", "readable.safetensors", "readable.csv", "readable.html", "report.html"}
    said, printed = capsys.readouterr().out.split("\n", 1)
    assert re.fullmatch(r"0\.\d{3} \[0\.\d{3}, 0\.\d{3}\], generalises to seeds and examples", said)
    assert printed == f"{names['read']}\n{names['plan']}\n"
    assert printed.startswith("ProbeResult: 'state' probed at 3 sites")
    everywhere = names["everywhere"].values  # type: ignore[attr-defined]
    assert torch.allclose(everywhere[:, [0, 9]], names["at_two"].values, atol=1e-5)  # type: ignore[attr-defined]
    assert names["readable"].accuracy("blocks.0.hook_resid_post") > 0.9  # type: ignore[attr-defined]
    recovery = names["where_they_differ"].recovery()  # type: ignore[attr-defined]
    assert recovery[0, 0] == pytest.approx(1.0, abs=1e-4), "the embedding is all in which the two strings differ"

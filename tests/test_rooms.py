"""The order of the rooms: a room imports only rooms before it, no imports run in circles, and no room is overfull."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "errors", "results", "numerics", "tasks", "kernels", "hooks", "running", "adapters", "models", "probing", "subspaces",
    "ablation", "patching", "profiling", "experiments", "examples", "bench", "cli",
)  # fmt: skip
MOST_FILES, MOST_LINES, MOST_AT_THE_TOP = 17, 450, 5

pytestmark = pytest.mark.skipif(not (ROOT / "adapters").is_dir(), reason="needs a source tree")


def sources() -> dict[str, Path]:
    """Every module by its name without ``probelens.``; a package goes by the name of its folder."""
    found = {}
    for top, start in (("probelens", ()), ("adapters", ("adapters",)), ("examples", ("examples",))):
        for path in (ROOT / top).rglob("*.py"):
            if path.resolve() == path:
                parts = [*start, *path.relative_to(ROOT / top).with_suffix("").parts]
                found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imported(text: str, modules: set[str]) -> set[str]:
    """The modules of the library that a source imports, wherever the import stands: at the top, in a function, for types."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            whole = "." * node.level + (node.module or "")
            assert node.level == 0, f"a relative import of {whole}: name the module from probelens on"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name.startswith("probelens.") and name.removeprefix("probelens.") not in modules:
                name = "" if name == "probelens.__version__" else name.rpartition(".")[0]
            if name.split(".")[0] == "probelens":
                found.add(name.removeprefix("probelens."))
    return found


def arrows() -> dict[str, set[str]]:
    paths = sources()
    return {name: imported(path.read_text(), set(paths)) - {name} for name, path in paths.items()}


def upward(graph: dict[str, set[str]]) -> set[str]:
    """The imports that run against the order of the rooms. ``probelens`` itself is for rooms that use the library."""
    place = {room: i for i, room in enumerate(ORDER)} | {"probelens": ORDER.index("examples")}

    def at(name: str) -> int:
        return place.get(name.partition(".")[0], len(ORDER))

    return {f"{a} imports {b}" for a, targets in graph.items() for b in targets if a and at(b) > at(a)}


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The modules from which a chain of imports leads back to themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph.get(name, ())
        return seen

    return {f"{name} imports itself" for name in graph if name in reached(name)}


def sizes(paths: dict[str, Path]) -> set[str]:
    folders: dict[Path, int] = {}
    found = set()
    for name, path in paths.items():
        folders[path.parent] = folders.get(path.parent, 0) + 1
        if path.stem.startswith("_") and path.stem not in ("__init__", "__main__"):
            found.add(f"{name} has a leading underscore")
        if len(path.read_text().splitlines()) > MOST_LINES:
            found.add(f"{name} is too long")
    found |= {f"{p.relative_to(ROOT).as_posix()} has too many files" for p, n in folders.items() if n > MOST_FILES}
    top = [p for p in (ROOT / "probelens").iterdir() if p.is_file()]
    return found | ({"probelens has too many files"} if len(top) > MOST_AT_THE_TOP else set())


def test_rooms_keep_their_order_and_no_import_runs_in_a_circle() -> None:
    paths = sources()
    assert {name.partition(".")[0] for name in paths} - {""} == set(ORDER)
    graph = arrows()
    assert upward(graph) | circles(graph) | sizes(paths) == set()


def test_every_kind_of_import_is_seen() -> None:
    modules = {"hooks", "hooks.model", "errors", "probing.probe"}
    text = """
from typing import TYPE_CHECKING
import torch
import probelens.errors
if TYPE_CHECKING:
    from probelens.hooks import model
def later():
    from probelens.probing.probe import probe
"""
    assert imported(text, modules) == {"errors", "hooks.model", "probing.probe"}
    assert (
        imported("import probelens as pl", modules) == imported("from probelens import wrap", modules) == {"probelens"}
    )
    assert imported("from probelens import __version__", modules) == set()
    graph = {
        "hooks.model": {"probing.probe"},
        "probing.probe": {"hooks.model", "errors"},
        "errors": {"probelens"},
        "cli": {"probelens"},
    }
    assert upward(graph) == {"hooks.model imports probing.probe", "errors imports probelens"}
    assert circles(graph) == {"hooks.model imports itself", "probing.probe imports itself"}


def test_no_two_test_files_share_a_name() -> None:
    """Tests are imported by their file's name alone, so of two files of one name only one runs."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []

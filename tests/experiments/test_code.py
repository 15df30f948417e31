"""A cell whose code changed runs again and is named; a change that it doesn't reach keeps its results."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import probelens as pl
from probelens.examples import quickstart
from probelens.experiments import Store, cell_key, run_grid
from probelens.experiments.code import code_of

CELLS = """
import functools
import mathematics
from mathematics import twice as double
from shapes import *

STEPS = 3
COLOURS = ["red"]
TABLE = {}


def register(f):
    TABLE[f.__name__] = f
    return f


@register
def found_by_name(x):
    return x - 1


class Model:
    def forward(self, x):
        return helper(x) + STEPS


def helper(x):
    "Helps."
    from lazily import late
    return double(x) + mathematics.once(x) + late(x) + area(x)


def cell(config, folder):
    return [{"value": Model().forward(config["x"]) + TABLE["found_by_name"](0)}]


@functools.cache
def plot(rows):
    return COLOURS, functools


if __name__ == "__main__":
    print("runs as a script")
"""
OTHERS = {
    "mathematics.py": "def once(x):\n    return x\n\ndef twice(x):\n    return 2 * x\n",
    "shapes.py": "def area(x):\n    return x * x\n",
    "lazily.py": "from deeper.inside import late\n",
    "deeper/__init__.py": "",
    "deeper/inside.py": "from .constants import ONE as one\n\ndef late(x):\n    return one\n\ndef later(x):\n    return 7\n",
    "deeper/constants.py": "ONE = 1\nTWO = 2\n",
    "unused.py": "X = 1\n",
}


def loaded(folder: Path, changes: dict[str, tuple[str, str]]) -> ModuleType:
    files = {"cells.py": CELLS, **OTHERS}
    for name, (old, new) in changes.items():
        assert old in files[name]
        files[name] = files[name].replace(old, new)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location("cells", folder / "cells.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cells"] = module
    for name in ("mathematics", "shapes", "lazily", "deeper", "deeper.inside", "deeper.constants"):
        sys.modules.pop(name, None)
    spec.loader.exec_module(module)
    return module


REACHED = {
    "the function": {"cells.py": ('config["x"])', 'config["x"] + 1)')},
    "a method of a class that it names": {"cells.py": ("+ STEPS", "- STEPS")},
    "a constant": {"cells.py": ("STEPS = 3", "STEPS = 4")},
    "a function in a table": {"cells.py": ("return x - 1", "return x - 2")},
    "a function of another file": {"mathematics.py": ("return 2 * x", "return 3 * x")},
    "an attribute of another file": {"mathematics.py": ("return x\n", "return x + 0\n")},
    "a function behind a star": {"shapes.py": ("x * x", "x * x * x")},
    "a constant of another package, imported late": {"deeper/constants.py": ("ONE = 1", "ONE = 11")},
}
KEPT = {
    "a comment": {"cells.py": ("STEPS = 3", "STEPS = 3  # as always")},
    "a docstring": {"cells.py": ("Helps.", "Helps a lot.")},
    "the format": {"cells.py": ("helper(x) + STEPS", "(helper(x)  +  STEPS)")},
    "a plot in the same file": {"cells.py": ("return COLOURS, functools", "return COLOURS, 2")},
    "a constant of the plot": {"cells.py": ('"red"', '"blue"')},
    "the script": {"cells.py": ("runs as", "is run as")},
    "a function beside one that it names": {"deeper/inside.py": ("return 7", "return 8")},
    "a constant beside one that it names": {"deeper/constants.py": ("TWO = 2", "TWO = 3")},
    "a file that it doesn't import": {"unused.py": ("X = 1", "X = 2")},
}


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("what", [*REACHED, *KEPT])
def test_the_code_of_a_cell_is_what_it_reaches_by_name(cells: Path, what: str) -> None:
    before = code_of(loaded(cells, {}).cell)
    after = code_of(loaded(cells, {**REACHED, **KEPT}[what]).cell)
    assert (before != after) is (what in REACHED)
    assert before == code_of(loaded(cells, {}).cell)
    assert len(before) == 16


def test_a_cell_whose_code_changed_runs_again_and_is_named(tmp_path: Path) -> None:
    def go(value: str) -> tuple[list[str], str]:
        (tmp_path / "mycell.py").write_text(
            f"VALUE = {value}\n\ndef cell(config, folder):\n    return [{{**config, 'value': VALUE}}]\n"
        )
        code = (
            "from mycell import cell; from probelens.experiments import Store, run_grid; store = Store('r'); "
            "r = run_grid(cell, [{'seed': 0, 'name': 'the cell'}], store, workers=1, progress=False); "
            "print(len(r.ran), len(r.found), store.all_rows(r.keys).value.tolist())"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split(), done.stderr

    assert go("1")[0] == ["1", "0", "[1]"]
    out, err = go("2")
    assert out == ["1", "0", "[2]"]
    assert "1 complete cells run again, since their code or the version of probelens changed: the cell" in err
    assert go("2  # the same") == (["0", "1", "[2]"], "")


def test_a_version_of_ones_own_keeps_results_over_a_change(tmp_path: Path) -> None:
    def grid(value: int, code: str | None) -> list[str]:
        cell = functools.partial(lambda value, config, folder: [{"a": value}], value)
        return run_grid(cell, [{"x": 1}], Store(tmp_path), workers=1, code=code).ran

    assert grid(1, None)
    assert not grid(1, None)
    with pytest.warns(UserWarning, match="run again"):
        assert grid(2, None), "what is given to a partial counts"
    with pytest.warns(UserWarning, match="run again"):
        assert grid(3, "mine")
    assert not grid(4, "mine")


def test_functions_of_probelens_count_by_its_version_and_code_that_cannot_be_read_is_said() -> None:
    assert code_of(quickstart.run_cell) == ""
    assert cell_key({"x": 1}, code="") == cell_key({"x": 1}) != cell_key({"x": 1}, code="a")
    space: dict[str, object] = {"__name__": "nowhere"}
    exec("def cell(config, folder): return []", space)
    with pytest.warns(UserWarning, match="can't be read"):
        assert code_of(space["cell"]) == ""  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert code_of(functools.partial(pl.leace)) == ""

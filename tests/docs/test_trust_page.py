"""The page of what was tried to break it names tests that exist, and counts what they count."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "trust.md"
FILES = {path.relative_to(TESTS.parent).as_posix(): path for path in TESTS.rglob("test_*.py")}
NAMED = re.compile(r"`([\w/]*test_\w+\.py)::(test_\w+)`")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a source tree")


def missing(text: str) -> list[str]:
    """The tests that a text names and that don't exist."""
    known: dict[str, set[str]] = {}
    for file in {file for file, _ in NAMED.findall(text)}:
        tree = ast.parse(FILES[file].read_text(encoding="utf-8")) if file in FILES else ast.Module([], [])
        known[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in known[file]]


def cases(*modules: str) -> list[int]:
    """The generated cases of each property test."""
    found = [f for name in modules for key, f in vars(importlib.import_module(name)).items() if key.startswith("test_")]
    settings = [getattr(f, "_hypothesis_internal_use_settings", None) for f in found]
    return [s.max_examples for s in settings if s is not None]


def number(test: str, pattern: str) -> int:
    """A constant in the source of a test."""
    file, name = test.split("::")
    (found,) = re.findall(pattern, inspect.getsource(getattr(importlib.import_module(file), name)))
    return int(found)


def counted() -> list[str]:
    """What the tests count, in the words of the page."""
    import test_cli
    import test_faults
    import test_interrupts
    import test_properties
    import test_trust

    drawn = cases("test_trust", "test_properties", "test_cli", "test_results", "test_plots")
    each = number("test_properties::test_arguments_of_every_kind_give_numbers_or_one_of_our_errors", r"range\((\d+)\)")
    damaged = sum(len(test_faults.damaged(bytes(5000), name)) for name in test_faults.FILES)
    kills = number("test_experiments::test_killed_at_random_moments_no_row_is_lost_torn_or_doubled", r"kills < (\d+)")
    marks = {m.name: m for m in test_trust.test_many_calls_leave_no_hooks_and_no_memory.pytestmark}
    times = {call.__name__: n for call, n in marks["parametrize"].args[1]}
    interrupts = test_interrupts.MOMENTS + test_interrupts.MOMENTS_FROM_THE_START

    def drawn_by(module: object, name: str) -> int:
        return getattr(module, name)._hypothesis_internal_use_settings.max_examples

    return [
        f"{len(drawn)} property tests with {sum(drawn):,} generated cases",
        f"{len(test_properties.CALLS)} public functions of numbers, each called {each} times",
        f"of {len(test_properties.CALLS)} public functions, {each} times each",
        f"about {round(damaged, -2)} damaged contents of {len(test_faults.FILES)} kinds of file",
        f"{kills} kills (SIGKILL) and {interrupts} interrupts (Ctrl-C)",
        f"`kill -9` at {kills} random moments",
        f"{times['hooked']:,} hooked calls and {times['failing']:,} failing ones",
        f"at each of {len(test_faults.MOMENTS)} moments of {len(test_faults.WRITERS)} writers",
        f"Ctrl-C at {test_interrupts.MOMENTS} random moments of `probelens run quickstart`, and at "
        f"{test_interrupts.MOMENTS_FROM_THE_START} while it still imports",
        f"hook point ({drawn_by(test_trust, 'test_any_text_is_a_hook_point_or_an_unknown_hook_error')} cases)",
        f"text ({drawn_by(test_trust, 'test_hooks_that_return_anything_are_followed_or_refused')} cases)",
        f"key ({drawn_by(test_trust, 'test_the_name_of_a_cell_cannot_leave_the_run_folder')} cases)",
        f"command line ({drawn_by(test_cli, 'test_any_text_as_a_setting_is_read_or_refused')} cases)",
    ]  # fmt: skip


def test_every_test_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 40
    assert missing(text) == []
    there = "test_many_calls_leave_no_hooks_and_no_memory"
    wrong = ["tests/trust/test_trust.py::test_of_nothing", "tests/test_none.py::test_x", f"test_trust.py::{there}"]
    assert missing(", ".join(f"`{name}`" for name in [*wrong, f"tests/trust/test_trust.py::{there}"])) == wrong


def test_the_counts_of_the_page_are_those_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in sorted({path.parent for path in FILES.values()}):
        monkeypatch.syspath_prepend(folder)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [words for words in counted() if words not in text] == []

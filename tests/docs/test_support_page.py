"""The page of what works where says what comes of really calling every method on every family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import support_calls
import support_page
import torch
import transformers
import zoo
from packaging.version import Version

import probelens as pl
from probelens.hooks.model import HookedModel

pytestmark = [
    pytest.mark.skipif(not support_page.PAGE.is_file(), reason="needs a source tree"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.15"), reason="the page tells of the current transformers"
    ),
]


def written() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    return support_page.written(support_page.PAGE.read_text(encoding="utf-8"))


def test_the_text_of_the_page_is_what_its_script_writes() -> None:
    page = support_page.page(*written())
    assert page == support_page.PAGE.read_text(encoding="utf-8"), "python docs/tools/support_page.py"


def some(names: Sequence[str], most: int = 2) -> tuple[str, ...]:
    """A few models of a family of many, from all over the list: each has its own tests elsewhere."""
    return tuple(names[:: math.ceil(len(names) / most)])


def told_of(name: str, cell: str) -> str:
    """What a cell says of one model: what holds of most, or of those that it names."""
    most, *others = cell.split("; ")
    for other in others:
        text, _, names = other.rpartition(": ")
        if name in names.split(", "):
            return text
    return most


@pytest.mark.slow
@pytest.mark.parametrize("title", support_page.FAMILIES)
def test_every_cell_of_a_family_is_what_its_call_gives(title: str) -> None:
    columns, why = written()
    family = support_page.FAMILIES[title]
    found = support_page.outcomes(dataclasses.replace(family, names=some(family.names)))
    for text, by_name in zip(columns[title], found.values(), strict=True):
        for name, outcome in by_name.items():
            assert support_page.said(outcome) == told_of(name, text), (
                "the page is stale: python docs/tools/support_page.py"
            )
    told = " ".join(line for lines in why.values() for line in lines)
    for by_name in found.values():
        for outcome in by_name.values():
            if outcome.how == "refused":
                assert support_page.plain(outcome.text) in told


def test_every_model_of_the_zoo_is_in_a_column() -> None:
    shown = [name for family in support_page.FAMILIES.values() for name in family.names]
    assert set(zoo.EVERY) <= set(shown)


def test_a_call_that_gives_something_wrong_is_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pl.wrap(zoo.build("lstm"))
    method = "`run_with_hooks`, `hooks`"
    assert support_calls.tried(method, model).how == "works"
    monkeypatch.setattr(support_calls, "minus", lambda tensor, hook: tensor.clone())
    with pytest.raises(AssertionError):
        support_calls.tried(method, model)

    def broken(model: HookedModel) -> str:
        raise IndexError("no error of ours")

    monkeypatch.setitem(support_calls.METHODS, method, broken)
    with pytest.raises(IndexError):
        support_calls.tried(method, model)
    monkeypatch.setitem(support_calls.METHODS, method, lambda m: str(m(torch.tensor([[99]]))))
    assert support_calls.tried(method, model).error == "InputError"

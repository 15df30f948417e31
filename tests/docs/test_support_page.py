"""The page of what works where says what comes of really calling every method on every family."""

from __future__ import annotations

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
def test_every_third_cell_of_a_family_is_what_its_call_gives(title: str) -> None:
    """Every method on a third of the families, and a third of the methods on each, with two of its models in turn."""
    columns, why = written()
    family, place = support_page.FAMILIES[title], list(support_page.FAMILIES).index(title)
    told = " ".join(line for lines in why.values() for line in lines)
    names = (family.names[0], family.names[len(family.names) // 2])
    models = {name: family.make(name) for name in names}
    cells = list(zip(family.methods, columns[title], strict=True))
    for turn, (method, text) in enumerate(cells[place % 3 :: 3]):
        name = names[turn % 2]
        outcome = support_calls.tried(method, models[name], family.methods)
        assert support_page.said(outcome) == told_of(name, text), "the page is stale: python docs/tools/support_page.py"
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

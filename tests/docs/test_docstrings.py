"""Every public name says what it takes, gives and raises, and stands on the pages of the API."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import docstrings
import numpy as np
import pytest
from docstrings import Public, faults, shaped
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError

# Modules with no page of their own, and why.
ELSEWHERE = {
    "probelens.adapters.*": "chosen by wrap, not imported; the page on hook points has each",
    "probelens.bench.*": "a command",
    "probelens.hooks.inputs": "part of HookedModel, and shown there",
    "probelens.hooks.lens": "part of HookedModel, and shown there",
    "probelens.hooks.names": "part of HookedModel, and shown there",
    "probelens.results.progress": "used by the engine",
    "probelens.hooks.recording": "used by the engine",
}
# Names that modules of one package take from each other.
INSIDE = {
    "probelens.experiments.executors": {"EXECUTORS", "Processes", "current", "named", "opened"},
    "probelens.experiments.grid": {"RunCell"},
    "probelens.experiments.status": {"watching"},
    "probelens.probing.solvers.factor": {"as_features"},
    "probelens.probing.mdl": {"PORTIONS"},
    "probelens.probing.mlp": {"mlp_accuracy"},
    "probelens.probing.solvers.logistic": {"DEFAULT_CS"},
    "probelens.probing.splits": {"FRACTIONS"},
    "probelens.tasks.data": {"IGNORE"},
}


@pytest.mark.parametrize("item", docstrings.names(), ids=lambda item: item.name)
def test_a_public_name_says_what_it_takes_gives_and_raises(item: Public) -> None:
    assert faults(item) == [], "python docs/tools/docstrings.py lists all of them"


# -- what the check notices -------------------------------------------------------------------------


def complete(x: Tensor, n: int = 1) -> Tensor:
    """Rows, as often as asked.

    Args:
        x: Rows. (row, d)
        n: How often.

    Returns:
        The rows. (row × n, d)

    Raises:
        InputError: A negative n.
    """
    if n < 0:
        raise InputError("n")
    return x.repeat(n, 1)


def without_a_parameter(x: Tensor, n: int = 1) -> None:
    """Rows.

    Args:
        x: Rows. (row, d)
        m: How often.
    """


def without_returns(n: int) -> int:
    """Twice.

    Args:
        n: A number.
    """
    return 2 * n


def without_raises(n: int) -> None:
    """Nothing.

    Args:
        n: A number.

    Raises:
        InputError: It is negative.
    """
    if n > 3:
        raise ShapeError("n")

    def later() -> None:
        raise pl.MetricError("raised by somebody else")


def without_shapes(x: Tensor, y: np.ndarray | None = None) -> Tensor:
    """A sum.

    Args:
        x: Rows of numbers (float32).
        y: More of them.

    Returns:
        The sum.
    """
    return x


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("function", "lacks"),
    [
        (complete, []),
        (without_a_parameter, ["Args lacks n", "Args has m, which is no parameter"]),
        (without_returns, ["no Returns"]),
        (without_raises, ["Raises lacks ShapeError"]),
        (without_shapes, ["no shape of x", "no shape of y", "no shape of what it returns"]),
        (nothing, ["no docstring"]),
    ],
)
def test_what_is_missing_is_noticed(function: Any, lacks: list[str]) -> None:
    assert faults(Public(function.__name__, "function", function)) == lacks


def test_a_method_that_overrides_may_leave_the_rest_to_its_base() -> None:
    class Base:
        def read(self, x: Tensor) -> Tensor:
            """What is there.

            Args:
                x: Activation. (batch, d)

            Returns:
                The same. (batch, d)
            """
            return x

    class Silent(Base):
        def read(self, x: Tensor) -> Tensor:
            return x

    class Raising(Base):
        def read(self, x: Tensor) -> Tensor:
            raise ShapeError("x")

    of = {cls: next(docstrings.members(cls)) for cls in (Silent, Raising)}
    assert faults(of[Silent]) == []
    assert faults(of[Raising]) == ["Raises lacks ShapeError"], "what only it raises, the base doesn't say"


@pytest.mark.parametrize(
    "text",
    ["Rows. (d,)", "(batch, pos, …)", "A number. ()", "(...)", "(row, d_model / n_heads)", "a scalar"],
)
def test_these_are_shapes(text: str) -> None:
    assert shaped(text)


@pytest.mark.parametrize("text", ["Rows (float32).", "Many (at least three of them).", "Rows."])
def test_these_are_none(text: str) -> None:
    assert not shaped(text)


SOURCES = {
    "ablation.ablate": ("2606.00926", "2004.07667"),
    "components.ablate_component": ("2404.15255",),
    "erasure.LeaceFitter": ("Belrose et al. 2023", "2306.03819"),
    "erasure.leace": ("Belrose et al. 2023", "2306.03819"),
    "inlp.inlp": ("Ravfogel et al. 2020", "2004.07667"),
    "metrics.recovered": ("Heimersheim and Nanda 2024", "2404.15255"),
    "patching.attribute": ("Nanda 2023", "2310.10348"),
    "patching.patch": ("2404.15255", "2309.16042"),
    "permutation.holm": ("Holm 1979",),
    "permutation.max_t": ("Westfall and Young 1993",),
    "probing.controls.control_labels": ("Hewitt and Liang 2019", "1909.03368"),
    "probing.controls.selectivity": ("Hewitt and Liang 2019", "1909.03368"),
    "probing.mdl.online_codelength": ("Voita and Titov 2020", "2003.12298"),
    "probing.refit.refit_accuracy": ("2606.00926",),
    "ssm.mamba_mixer": ("Gu and Dao 2023", "2312.00752"),
    "ssm.mamba2_mixer": ("Dao and Gu 2024", "2405.21060"),
    "stats.hierarchical_bootstrap": ("Davison and Hinkley 1997",),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_method_of_a_paper_names_it(name: str) -> None:
    (item,) = [one for one in docstrings.names() if one.name == f"probelens.{name}"]
    source = item.doc.partition("Source:\n")[2]
    assert [cited for cited in SOURCES[name] if cited not in source] == []


# -- the pages of the API ---------------------------------------------------------------------------


def hidden(module: str) -> bool:
    return any(re.fullmatch(pattern.replace(".*", r"\..*"), module) for pattern in ELSEWHERE)


def test_every_public_module_is_on_a_page_or_says_why_not() -> None:
    shown = {id(value) for _, value in docstrings.shown()}
    missing: dict[str, set[str]] = {}
    for module in docstrings.modules():
        loaded = importlib.import_module(module)
        left = {name for name in loaded.__all__ if id(getattr(loaded, name)) not in shown}
        if left and not hidden(module):
            missing[module] = left
    assert missing == INSIDE, (
        "put the name on a page of docs/api (:::), or into INSIDE or ELSEWHERE with a reason"
    )
    assert [
        m
        for m in ELSEWHERE
        if not any(map(re.compile(m.replace(".*", r"\..*")).fullmatch, docstrings.modules()))
    ] == []


def test_what_the_pages_show_exists_and_every_public_name_is_among_it() -> None:
    shown = {id(value) for _, value in docstrings.shown()}
    assert [n for n in pl.__all__ if n != "__version__" and not _shown(n, shown)] == []


def _shown(name: str, shown: set[int]) -> bool:
    value = getattr(pl, name)
    paths = docstrings.directives()
    return id(value) in shown or any(path.startswith(f"probelens.{name}") for path in paths)


def overview() -> Iterator[tuple[str, str, str]]:
    """The rows of docs/api/index.md: name, target of the link, the line about it."""
    text = (docstrings.PAGES / "index.md").read_text(encoding="utf-8")
    yield from re.findall(r"^\| \[`([\w.]+)`\]\[([\w.]+)\] \| (.*) \|$", text, re.M)


def test_the_overview_has_every_name_of_the_pages_once_with_a_line() -> None:
    rows = list(overview())
    assert [name for name, _, line in rows if len(line) < 10] == []
    assert [n for n, count in Counter(target for _, target, _ in rows).items() if count > 1] == []
    at = dict(docstrings.shown())
    assert [target for _, target, _ in rows if target not in at] == []
    listed_ids = Counter(id(at[target]) for _, target, _ in rows)
    lacking = sorted(path for path, value in at.items() if id(value) not in listed_ids)
    assert lacking == [], "add a row to docs/api/index.md, where it belongs in the order of work"


def test_the_overview_calls_names_what_a_user_calls_them() -> None:
    at = dict(docstrings.shown())
    for name, target, _ in overview():
        head, _, rest = name.partition(".")
        if head == "pl":
            found: Any = pl
            for part in rest.split("."):
                found = getattr(found, part)
        else:
            module, _, attribute = name.rpartition(".")
            found = getattr(importlib.import_module(module), attribute)
            assert getattr(pl, attribute, None) is not found, f"{name} is pl.{attribute}"
        assert found is at[target], f"{name} is not {target}"

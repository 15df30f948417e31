"""Every public name says what it takes, gives and raises, and stands on the pages of the API."""

from __future__ import annotations

from typing import Any

import docstrings
import numpy as np
import pytest
from docstrings import Public, faults, shaped
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError


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


def leaving_some(x: Tensor, n: int, m: int) -> Tensor:
    """Rows of another sort.

    Args:
        x, n: As for ``complete``.
        m: A number.

    Returns:
        The rows. (row,)
    """
    return x


def leaving_all(x: Tensor) -> None:
    """Rows, looked at.

    Args:
        Those of ``complete``, without ``n``.
    """


def leaving_too_many(x: Tensor) -> None:
    """Rows, looked at.

    Args:
        Those of ``leaving_some``.
    """


def leaving_an_unknown_one(x: Tensor, k: int) -> None:
    """Rows, looked at.

    Args:
        x, k: As for ``complete``.
    """


def leaving_to_nobody(x: Tensor) -> None:
    """Rows, looked at.

    Args:
        Those of ``nobody``.
    """


@pytest.mark.parametrize(
    ("function", "lacks"),
    [
        (complete, []),
        (without_a_parameter, ["Args lacks n", "Args has m, which is no parameter"]),
        (without_returns, ["no Returns"]),
        (without_raises, ["Raises lacks ShapeError"]),
        (without_shapes, ["no shape of x", "no shape of y", "no shape of what it returns"]),
        (nothing, ["no docstring"]),
        (leaving_some, []),
        (leaving_all, []),
        (leaving_too_many, ["Args has n, which is no parameter", "Args has m, which is no parameter"]),
        (leaving_an_unknown_one, ["Args takes k from complete, which documents x, n"]),
        (leaving_to_nobody, [f"Args names nobody, which is neither in {__name__} nor in probelens"]),
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
    "text", ["Rows. (d,)", "(batch, pos, …)", "A number. ()", "(...)", "(row, d_model / n_heads)", "a scalar"]
)
def test_these_are_shapes(text: str) -> None:
    assert shaped(text)


@pytest.mark.parametrize("text", ["Rows (float32).", "Many (at least three of them).", "Rows."])
def test_these_are_none(text: str) -> None:
    assert not shaped(text)


SOURCES = {
    "ablate": ("2606.00926", "2004.07667"),
    "ablate_component": ("2404.15255",),
    "LeaceFitter": ("Belrose et al. 2023", "2306.03819"),
    "leace": ("Belrose et al. 2023", "2306.03819"),
    "inlp": ("Ravfogel et al. 2020", "2004.07667"),
    "recovered": ("Heimersheim and Nanda 2024", "2404.15255"),
    "attribute": ("Nanda 2023", "2310.10348"),
    "patch": ("2404.15255", "2309.16042"),
    "holm": ("Holm 1979",),
    "max_t": ("Westfall and Young 1993",),
    "control_labels": ("Hewitt and Liang 2019", "1909.03368"),
    "selectivity": ("Hewitt and Liang 2019", "1909.03368"),
    "online_codelength": ("Voita and Titov 2020", "2003.12298"),
    "refit_accuracy": ("2606.00926",),
    "mamba_mixer": ("Gu and Dao 2023", "2312.00752"),
    "mamba2_mixer": ("Dao and Gu 2024", "2405.21060"),
    "hierarchical_bootstrap": ("Davison and Hinkley 1997",),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_method_of_a_paper_names_it(name: str) -> None:
    (item,) = [one for one in docstrings.names() if one.name.endswith(f".{name}") and one.owner is None]
    source = item.doc.partition("Source:\n")[2]
    assert [cited for cited in SOURCES[name] if cited not in source] == []

"""Errors are typed, and say what was asked, found, allowed and what to do."""

from __future__ import annotations

import pytest

import probelens as pl
from probelens import errors


def test_every_error_is_a_probelens_error_and_a_builtin_one_too() -> None:
    kinds = {
        pl.UnknownHookError: KeyError, pl.HookNotFiredError: RuntimeError, pl.AdapterNotFoundError: TypeError,
        pl.ShapeError: ValueError, pl.InputError: ValueError, pl.MetricError: ValueError, pl.StoreError: OSError,
        pl.MissingDependencyError: ImportError,
    }  # fmt: skip
    for kind, builtin in kinds.items():
        assert issubclass(kind, pl.ProbelensError)
        assert issubclass(kind, builtin)
    assert set(kinds) | {pl.ProbelensError} == {
        getattr(errors, name) for name in errors.__all__ if name.endswith("Error")
    }


def test_a_message_reads_as_a_sentence_also_where_the_builtin_would_quote_it() -> None:
    assert str(pl.UnknownHookError("hook point 'x' not found")) == "hook point 'x' not found"


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    with pytest.raises(pl.MissingDependencyError) as err:
        errors.require("no_such_package_at_all", "dask", "the dask executor")
    text = str(err.value)
    assert "the dask executor needs the package 'no_such_package_at_all'" in text
    assert 'pip install "probelens[dask]"' in text
    assert errors.require("json", "dask", "nothing").loads("1") == 1


def test_the_extra_of_every_optional_package_exists() -> None:
    import tomllib
    from pathlib import Path

    content = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    extras = set(content["project"]["optional-dependencies"])
    assert {"transformer-lens", "nnsight", "mamba-ssm", "dask", "submitit", "docs", "dev", "all"} <= extras


@pytest.mark.parametrize(
    ("asked", "options", "first"),
    [("resid_pots", ["resid_post", "embed"], ["resid_post"]), ("zzz", ["resid_post"], []), ("a", [], [])],
)
def test_nearest(asked: str, options: list[str], first: list[str]) -> None:
    assert errors.nearest(asked, options) == first

"""Errors are typed, and say what was asked, found, allowed and what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

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


def hooked() -> tuple[pl.HookedModel, Tensor]:
    return pl.wrap(zoo.build("neox")), torch.arange(12).view(2, 6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, x, _: pl.collect(m, x, batch_size=2.5), "batch_size=2.5 must be a whole number, at least 1"),
        (lambda m, x, _: pl.collect(m, x, batch_size="8"), "batch_size='8' must be a whole number, at least 1"),
        (lambda m, x, _: pl.collect(m, x, batch_size=True), "batch_size=True must be a whole number"),
        (lambda m, x, _: pl.collect(m, x, dtype="float16"), "a floating dtype such as torch.float16, got dtype='float16'"),
        (lambda m, x, _: pl.collect(m, x, dtype=torch.int32), "got dtype=torch.int32"),
        (lambda m, x, file: pl.collect(m, x, out=file), "can't write to .*file"),
        (lambda m, x, _: m(x > 5), r"tokens are integers \(batch, pos\), got .* torch.bool"),
        (lambda m, x, _: pl.load(None), "needs a hub id or a folder, got a NoneType"),
        (lambda m, x, _: pl.load(m.module), "A model that is in memory goes to pl.wrap"),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_kind_is_named(call: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(pl.ProbelensError, match=said):
        call(*hooked(), file)
    assert file.read_text() == "kept"


def test_what_a_hook_raises_names_the_point_and_stays_what_it_was() -> None:
    model, x = hooked()
    point = "blocks.1.hook_resid_post"
    said = f"Raised by the hook at '{point}', which was called as fn(tensor, hook=point)."

    def divide(tensor: Tensor, hook: pl.HookPoint) -> None:
        raise ZeroDivisionError("mine")

    for fn, kind in ((divide, ZeroDivisionError), (lambda tensor: tensor, TypeError)):
        for wrapped in (fn, pl.at(2, fn)):
            with pytest.raises(kind) as err:
                model.run_with_hooks(x, [(point, wrapped)])
            assert err.value.__notes__ == [said]
    with pytest.raises(ZeroDivisionError) as err, model.hooks(bwd_hooks=[(point, divide)]):
        model(x).sum().backward()
    assert said in getattr(err.value, "__notes__", [])


@pytest.fixture(scope="module")
def parity() -> SimpleNamespace:
    task = pl.tasks.Parity(bos=True)
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=8, hidden_size=8)
    model, batch = pl.wrap(pl.models.build(config)), task.sample(6, length=5)
    space = {"blocks.0.hook_resid_post": pl.subspaces.random(1, 8)}
    return SimpleNamespace(task=task, model=model, batch=batch, space=space, pairs=task.pairs(4, length=5))


def undefined(logits: Tensor, *args: Tensor, **labels: Tensor) -> Tensor:
    """NaN for every example of patching, and at every position of an ablation."""
    return logits[..., 0] * torch.nan


def narrow(logits: Tensor) -> Tensor:
    return logits[..., 0]


def constant(logits: Tensor, answers: Tensor) -> Tensor:
    return torch.ones(len(logits))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda p: pl.patch(p.model, p.pairs, metric=undefined), pl.MetricError, "'undefined' is NaN on the clean run of all 4"),
        (lambda p: pl.attribute(p.model, p.pairs, metric=undefined), pl.MetricError, "'undefined' is NaN on the clean run"),
        (lambda p: pl.patch_sites(p.model, p.pairs, metric=undefined), pl.MetricError, "'undefined' is NaN on the clean run"),
        (lambda p: pl.ablate(p.model, p.batch, p.space, undefined, False, 2, label="state"), pl.MetricError,
         "'undefined' is NaN or infinite in 6 of 6 sequences"),
        (lambda p: pl.ablate(p.model, p.batch, p.space, narrow, False, 2, label="state"), pl.MetricError,
         r"narrow is called as metric\(logits, tokens=tokens, mask=mask, state=state\), but it takes"),
        (lambda p: pl.patch(p.model, p.pairs, metric=narrow), pl.MetricError, r"narrow is called as metric\(logits, answers\)"),
        (lambda p: pl.attribute(p.model, p.pairs, metric=constant), pl.MetricError, "gradient of the metric, which has none"),
        (lambda p: pl.ablate(p.model, p.batch[:1], p.space, label="state"), pl.InputError, "at least 2 sequences .* has 1"),
        (lambda p: pl.length_transfer(p.model, p.space, p.task), pl.InputError, "expected a task, got a dict"),
        (lambda p: pl.length_transfer(p.model, p.task, [5], p.space), pl.InputError, "got a list.* a mapping from hook point to Subspace"),
        (lambda p: pl.profile(p.model, p.batch.tokens), pl.InputError, "expected a task, a Batch or PatchPairs, got a Tensor"),
    ],
)  # fmt: skip
def test_a_measure_that_cannot_be_made_says_what_was_given_and_what_is_needed(
    parity: SimpleNamespace, call: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call(parity)


def test_a_metric_that_is_defined_and_takes_its_arguments_is_measured(parity: SimpleNamespace) -> None:
    assert pl.patch(parity.model, parity.pairs, metric=constant).metric == "constant"
    found = pl.ablate(
        parity.model, parity.batch[:2], parity.space, lambda logits, **_: logits[..., 0], False, 2, label="state"
    )
    assert found.clean.shape == (2,)

"""What a plan says holds for the run that comes: also where the trial fails, or the model's dtype changed since."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sweep_plan import FAMILIES, READ, Counted, cells, pairs, tokens, wrapped
from torch import Tensor

import probelens as pl
from probelens.adapters.hf.resume import KeyValues
from probelens.running.sweep.conditions import Condition, Read
from probelens.running.sweep.memory import Sizes, mib
from probelens.running.sweep.plan import plan, sweep
from probelens.running.sweep.resume import Resume
from probelens.running.sweep.strategy import Strategy

SITES: list[Any] = ["layers", ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"], "hook_embed"]


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [int(n.replace(",", "")) for n in found.groups()]


@pytest.mark.parametrize("name", ["neox", "mamba"])
@pytest.mark.parametrize("batch_size", [64, 2])
def test_a_plan_says_what_a_trial_that_fails_costs(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(name)
    counted = Counted(model, monkeypatch)
    planned = plan(model, tokens(), cells(), READ, batch_size=batch_size)
    assert planned.otherwise is not None
    blocks, more, unembedded, also = numbers(
        r"turns that down: path skip, ([\d,]+) block-positions \(([\d,]+) more\), ([\d,]+) unembedded \(([\d,]+) more\)",
        str(planned),
    )
    assert more == blocks - planned.block_positions > 0
    assert also == unembedded - planned.unembedded
    assert "resume if a first trial on the inputs agrees" in str(planned)
    assert isinstance(planned._strategy, Resume)
    resumer = planned._strategy.resumer
    right = type(resumer).tail
    # The run from the middle is counted, and its numbers are wrong.
    monkeypatch.setattr(type(resumer), "tail", lambda *a: right(*a) * 1.01)
    found: list[Any] = []
    assert counted.of(lambda: found.append(planned.run())) == (blocks, unembedded)
    assert found[0].path == planned.otherwise.path == "skip"
    assert blocks == planned.trial + planned.otherwise.block_positions


def test_without_a_trial_to_make_none_is_printed() -> None:
    model = wrapped("neox")
    assert plan(model, tokens(), cells(), READ).trial > 0
    sweep(model, tokens(), cells(), READ)
    for found in (plan(model, tokens(), cells(), READ), plan(wrapped("lstm-bidirectional"), tokens(), cells(), READ)):
        assert (found.trial, found.otherwise) == (0, None)
        assert "trial" not in str(found)


def test_a_budget_in_which_only_runs_from_the_middle_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a vocabulary so large a whole forward's logits alone exceed it.
    monkeypatch.setattr(Sizes, "width", staticmethod(lambda model: 5000))
    model = wrapped("neox")
    found = plan(model, tokens(), cells(), READ, memory=150_000)
    assert (found.path, found.otherwise) == ("resume", None)
    assert "if the trial turns that down: an error" in str(found)
    enough = plan(model, tokens(), cells(), READ, memory=300_000).otherwise
    assert enough is not None
    assert enough.bytes <= 300_000
    right = KeyValues.tail
    monkeypatch.setattr(KeyValues, "tail", lambda *a: right(*a) * 1.01)
    with pytest.raises(pl.InputError, match="Give at least"):
        found.run()


def test_patching_prints_the_factor_that_a_failed_trial_leaves() -> None:
    planned = pl.patch_plan(wrapped("neox"), pairs(), "layers")
    other = planned.sweep.otherwise
    assert other is not None
    worst = planned.sweep.trial + other.block_positions + planned.source.block_positions + planned.collected
    assert f"at least, {planned.naive_block_positions / worst:.2f}x if the trial turns that down" in str(planned)
    assert planned.ratio > planned.naive_block_positions / worst


@pytest.mark.parametrize("name", FAMILIES)
def test_a_patch_plan_counts_all_unembedded_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(name)
    # The layout of a model of the user's own is tried once, before anything is counted.
    for sites in SITES:
        pl.collect(model, pairs().clean, sites)
    collected, counted = [], Counted(model, monkeypatch)
    for sites in SITES:
        planned = pl.patch_plan(model, pairs(), sites, batch_size=3)
        blocks, unembedded = counted.of(planned.run)
        assert blocks <= planned.block_positions
        assert planned.sweep.unembedded < unembedded <= planned.unembedded
        assert (blocks, unembedded) == (planned.block_positions, planned.unembedded) or not planned.sweep.exact
        assert planned.unembedded > planned.sweep.unembedded
        assert planned.naive_unembedded >= planned.unembedded
        rest = planned.source.unembedded + planned.collected_unembedded
        assert f"{rest:,} unembedded positions more" in str(planned)
        collected.append(planned.collected_unembedded)
    assert collected == [pairs().clean.numel(), 0, pairs().clean.numel()]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_another_dtype_since_the_plan_stays_within_the_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(name)
    budget = 30_000 if name == "gru" else 100_000
    planned = pl.patch_plan(model, pairs(), "layers", memory=budget)
    ran: list[tuple[int, int, int]] = []
    native = Strategy.run_all

    def run(self: Strategy, *args: Any) -> Any:
        ran.append((self.batch, sum(self.held().values()), self.work.sizes.source))
        return native(self, *args)

    monkeypatch.setattr(Strategy, "run_all", run)
    model.module.double()
    got = planned.run()
    torch.testing.assert_close(got.values, pl.patch(model, pairs(), "layers").values)
    batch, held, source = ran[0]
    assert source == 2 * planned.sweep._strategy.work.sizes.source
    assert held <= budget
    assert batch < planned.sweep.batch_size
    fresh = pl.patch_plan(model, pairs(), "layers", memory=budget)
    assert (fresh.sweep.batch_size, fresh.bytes) == (batch, held)


@pytest.mark.parametrize("memory", [-5, 0])
@pytest.mark.parametrize("call", [pl.patch, pl.patch_plan])
def test_a_budget_below_one_byte_is_said_to_be_none(call: Callable[..., Any], memory: int) -> None:
    with pytest.raises(pl.InputError, match=rf"memory={memory}: a budget is a positive number of bytes"):
        call(wrapped("lstm-bidirectional"), pairs(), memory=memory)


@pytest.mark.parametrize("memory", [10, 1000, 2000])
def test_a_small_budget_is_named_once(memory: int) -> None:
    with pytest.raises(pl.InputError, match=f"memory={memory} bytes") as err:
        pl.patch(wrapped("lstm-bidirectional"), pairs(), memory=memory)
    assert ("(" + mib(memory) + ")" in str(err.value)) == (memory == 2000)
    assert str(err.value).count(f"{memory} bytes") == 1


def wrong(logits: Tensor, *rest: Any, **labels: Any) -> Tensor:
    raise RuntimeError("mine")


class Scorer:
    def __call__(self, *args: Any, **labels: Any) -> Tensor:
        raise RuntimeError("mine")


def notes(call: Callable[[], Any], error: type[Exception] = RuntimeError) -> list[str]:
    with pytest.raises(error) as err:
        call()
    return getattr(err.value, "__notes__", [])


@pytest.mark.parametrize("name", ["neox", "gru"])
@pytest.mark.parametrize("metric", [wrong, Scorer()])
def test_an_error_in_a_metric_of_the_callers_names_it(name: str, metric: Any) -> None:
    model = wrapped(name)
    batch = pl.Batch(tokens(), {"odd": tokens() % 2})
    shown = "wrong" if metric is wrong else "Scorer"
    space = {"blocks.1.hook_resid_post": pl.subspaces.random(1, model.cfg.d_model)}
    calls: dict[str, Callable[[], Any]] = {
        "logits, answers": lambda: pl.patch(model, pairs(), metric=metric),
        "logits, answers)": lambda: pl.attribute(model, pairs(), metric=metric),
        "logits, answers).": lambda: pl.patch_sites(model, pairs(), metric=metric),
        "logits, tokens=tokens, mask=mask, odd=odd": lambda: pl.ablate(model, batch, space, metric, refit=False),
        "logits, tokens=tokens, mask=mask, odd=odd).": lambda: pl.ablate_component(
            model, batch, "mixer_out" if name == "mamba" else list(space), metric=metric
        ),
        "logits": lambda: sweep(model, tokens(), cells(), Read(metric)),
        "logits, a=a": lambda: sweep(model, tokens(), [Condition((), ())], Read(metric, None, {"a": tokens()})),
    }
    for arguments, call in calls.items():
        said = f"Raised by the metric {shown}, which was called as metric({arguments.rstrip(').')})."
        assert notes(call) == [said], arguments


def test_an_error_of_the_librarys_own_is_left_without_a_note() -> None:
    model = wrapped("lstm-bidirectional")
    answers = pairs().answers + 1000
    far = pl.PatchPairs(pairs().clean, pairs().corrupted, pairs().edit_pos, pairs().read_pos, answers)
    assert notes(lambda: pl.patch(model, far), pl.InputError) == []
    with pytest.raises(pl.ShapeError, match="one value for each example"):
        pl.patch(model, pairs(), metric=lambda logits, answers: logits)

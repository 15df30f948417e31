"""Half precision: resumed runs are off by no more than whole runs in other batches are, or whole blocks are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens.adapters.hf.resume import KeyValues
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import plan, sweep
from probelens.running.sweep.resume import Resume
from probelens.running.sweep.rounding import between_batches, share

N, LENGTH = 4, 16
READ = Read(lambda logits: logits.flatten(1), torch.full((N, 1), LENGTH - 1))


def wrapped(name: str, dtype: torch.dtype) -> pl.HookedModel:
    # Plain sizes: enlarged weights make a model chaotic in half precision.
    return pl.wrap(zoo.more(name, scale=1.0).to(dtype))


def at(name: str, pos: int, said: int | None = None, size: float = 1.0) -> Condition:
    def edit(tensor: Tensor, hook: Any) -> Tensor:
        out = tensor.clone()
        out[..., pos, :] += size * torch.linspace(-1, 1, tensor.shape[-1]).square().to(tensor)
        return out

    first = None if said is None else torch.full((N,), said)
    return Condition((name, pos), (Intervention(name, lambda rows: edit, first),))


def cells() -> list[Condition]:
    return [at(f"blocks.{layer}.hook_resid_pre", pos) for layer in range(3) for pos in range(LENGTH)]


def whole(model: pl.HookedModel, x: Tensor, conditions: list[Condition]) -> Tensor:
    rows = torch.arange(len(x))
    with torch.no_grad():
        runs = [model.run_with_hooks(x, [(i.name, i.edit_for(rows)) for i in c.interventions]) for c in conditions]
    return torch.stack(runs)[:, :, -1]


@pytest.mark.parametrize(("name", "dtype"), [("neox", torch.bfloat16), ("llama", torch.float16)])
def test_resumed_values_are_off_by_no_more_than_rounding(name: str, dtype: torch.dtype) -> None:
    model, x = wrapped(name, dtype), zoo.tokens(N, LENGTH, seed=3)
    planned = plan(model, x, cells(), READ)
    assert planned.path == "resume"
    assert planned.rounding is None
    assert "whole runs in other batches do, which the trial measures" in str(planned)
    got, want = planned.run(), whole(model, x, cells())
    assert got.path == "resume"
    assert got.rounding is not None
    assert got.rounding.within
    assert str(got.rounding) in str(plan(model, x, cells(), READ))
    # Two steps of the dtype at the largest value.
    assert share(got.values, want, want) <= 2 * torch.finfo(dtype).eps
    assert share(got.base.expand_as(want), want, want) > 0.05


def test_a_result_says_how_far_its_values_may_be_off(tmp_path: Path) -> None:
    model, x = wrapped("neox", torch.bfloat16), zoo.tokens(N, LENGTH, seed=3)
    other = (x + 1) % model.cfg.d_vocab
    end, answers = torch.full((N,), LENGTH - 1), torch.tensor([[1, 2]] * N)
    found = pl.patch(model, pl.PatchPairs(x, other, end, end, answers))
    assert found.path == "resume"
    said = found.extra["rounding"]
    assert said.startswith("bfloat16: runs from mid-sequence differ from whole ones by ")
    assert said in str(found)
    found.save(tmp_path / "found")
    assert pl.PatchResult.load(tmp_path / "found").extra["rounding"] == said
    whole_numbers = pl.patch(pl.wrap(zoo.more("neox")), pl.PatchPairs(x, other, end, end, answers))
    assert "rounding" not in whole_numbers.extra


def test_what_is_off_by_more_than_other_batches_is_turned_down(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wrapped("neox", torch.bfloat16), zoo.tokens(N, LENGTH, seed=3)
    right = KeyValues.tail
    monkeypatch.setattr(KeyValues, "tail", lambda *a: right(*a) * (1 + 2**-5))
    planned = plan(model, x, cells(), READ)
    got = planned.run()
    monkeypatch.undo()
    assert got.path == "skip"
    assert got.why.startswith("a trial on this model gave other numbers; bfloat16: runs from mid-sequence differ")
    assert torch.equal(got.values, whole(model, x, cells()))
    again = plan(model, x, cells(), READ)
    assert (again.path, again.why) == ("skip", got.why)


def test_the_difference_of_batches_is_that_of_the_worst_of_them() -> None:
    own = torch.arange(1.0, 25.0).reshape(2, 6, 2)

    def run(rows: slice, positions: int, copies: int) -> Tensor:
        found = own[rows, :positions].clone()
        found[-1, -1, -1] += 1.5 if positions == 3 else 0.75
        return found

    assert between_batches(run, own) == 1.5 / 24
    assert between_batches(lambda rows, positions, copies: own[rows, :positions], own) == 0
    assert share(own * torch.nan, own, own) == float("inf")


def test_a_trial_in_half_precision_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wrapped("neox", torch.bfloat16), zoo.tokens(N, LENGTH, seed=3)
    first = plan(model, x, cells(), READ)
    seen = 0

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        hidden = args[0] if args else kwargs["hidden_states"]
        seen += hidden.shape[0] * hidden.shape[1]

    first.run()
    again = plan(model, x, cells(), READ)
    assert again.trial == 0
    extra = first.block_positions - again.block_positions
    fresh = wrapped("neox", torch.bfloat16)
    planned = plan(fresh, x, cells(), READ)
    strategy = planned._strategy
    assert isinstance(strategy, Resume)
    runs = Resume._try

    def tried(self: Any, *args: Any) -> None:
        handles = [
            fresh.module.get_submodule(p).register_forward_pre_hook(count, with_kwargs=True)
            for p in fresh.adapter.blocks
        ]
        runs(self, *args)
        for handle in handles:
            handle.remove()

    monkeypatch.setattr(Resume, "_try", tried)
    strategy.run_all(False, "")
    assert seen == extra


@pytest.mark.parametrize("said", [6, 12])
def test_rounding_before_the_position_that_an_edit_names_does_not_count(
    said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pattern is offered by another kernel than the model's own, which rounds differently everywhere.
    model, x = wrapped("neox", torch.float32), zoo.tokens(N, LENGTH, seed=3)
    conditions = [at(f"blocks.{layer}.attn.hook_pattern", 6, said) for layer in range(3)]
    begun: list[int] = []
    begin = Resume._begin

    def noted(self: Any, *args: Any) -> int:
        begun.append(begin(self, *args))
        return begun[-1]

    monkeypatch.setattr(Resume, "_begin", noted)
    got, want = sweep(model, x, conditions, READ), whole(model, x, conditions)
    assert got.path == "resume"
    assert (got.values - want).abs().max() <= 1e-5 * want.abs().max()
    assert (want - got.base).abs().max() > 1e-3 * want.abs().max()
    # What an edit says is not believed where more than rounding differs before.
    assert begun == [6] * 3 if said == 6 else max(begun) <= 6

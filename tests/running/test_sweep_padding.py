"""Padded sequences are resumed, too, and get the numbers that each has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens.adapters.hf.resume import KeyValues
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import plan, sweep

N, LENGTH = 4, 12
PADS = (0, 2, 5, 7)
PLACES = (1, 3, 6, 9, 11)
SITES = ("hook_embed", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_post")
FAMILIES = ("neox", "llama", "gpt2", "opt", "bloom", "mamba", "mamba2")


def masked(side: str, pads: tuple[int, ...] = PADS) -> Tensor:
    place = torch.arange(LENGTH)
    real = torch.stack([place >= pad if side == "left" else place < LENGTH - pad for pad in pads])
    return real.long()


def add(tensor: Tensor, pos: int) -> Tensor:
    out = tensor.clone()
    out[:, pos] += torch.linspace(-1, 1, tensor.shape[-1]).square()
    return out


def cells() -> list[Condition]:
    def at(name: str, pos: int) -> Condition:
        def edit(tensor: Tensor, hook: Any) -> Tensor:
            return add(tensor, pos)

        return Condition((name, pos), (Intervention(name, lambda rows: edit),))

    return [at(name, pos) for name in SITES for pos in PLACES]


def alone(model: pl.HookedModel, x: Tensor, mask: Tensor) -> Tensor:
    """Logits of the last real position, each sequence without its padding and without a mask. (condition, example, vocab)"""
    out = []
    for name in SITES:
        for pos in PLACES:
            row = []
            for tokens, real in zip(x, mask.bool(), strict=True):
                at = pos - int(real.long().argmax())
                inside = bool(real[pos])
                hooks = [(name, lambda t, hook, at=at: add(t, at))] if inside else []
                with torch.no_grad():
                    row.append(model.run_with_hooks(tokens[real][None], hooks)[0, -1])
            out.append(torch.stack(row))
    return torch.stack(out)


def last_real(mask: Tensor) -> Read:
    return Read(lambda logits: logits.flatten(1), LENGTH - 1 - mask.flip(1).argmax(1, keepdim=True))


@pytest.mark.parametrize(
    ("name", "side"), [*((name, "left") for name in FAMILIES), ("llama", "right"), ("mamba2", "right")]
)
def test_padded_sequences_get_the_numbers_that_each_has_alone(name: str, side: str) -> None:
    model, x, mask = pl.wrap(zoo.more(name)), zoo.tokens(N, LENGTH, seed=3), masked(side)
    got = sweep(model, x, cells(), last_real(mask), attention_mask=mask)
    want = alone(model, x, mask)
    assert (got.path, got.why) == ("resume", "")
    assert (got.values - want).abs().max() <= 2e-5 * want.abs().max()
    assert (want - got.base).abs().max() > 1e-2 * want.abs().max()


def test_what_a_tokenizer_gives_is_resumed_like_tokens_and_their_mask() -> None:
    model, x, mask = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH, seed=3), masked("left")
    want = sweep(model, x, cells(), last_real(mask), attention_mask=mask)
    found = sweep(model, {"input_ids": x, "attention_mask": mask}, cells(), last_real(mask))
    assert (want.path, found.path) == ("resume", "resume")
    assert torch.equal(found.values, want.values)
    more = {"input_ids": x, "attention_mask": mask, "position_ids": torch.arange(LENGTH).repeat(N, 1)}
    other = sweep(model, more, cells(), last_real(mask))
    assert (other.path, other.why) == ("full", "inputs that are several arguments")
    assert (other.values - want.values).abs().max() <= 2e-5 * want.values.abs().max()


def test_each_kind_of_padding_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, mask = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH, seed=3), masked("left")
    assert sweep(model, x, cells(), last_real(mask)).path == "resume"
    with monkeypatch.context() as changed:
        # As a resumer would that forgets the padding before the position at which it begins.
        changed.setattr(
            KeyValues, "tail_call", lambda self, resid, layer, pos, extra: self.model.prepare(resid, None, layer, extra)
        )
        found = sweep(model, x, cells(), last_real(mask), attention_mask=mask)
    assert (found.path, found.why) == ("skip", "a trial on this model gave other numbers")
    assert sweep(model, x, cells(), last_real(mask), attention_mask=mask).path == "skip", "remembered"
    assert sweep(model, x, cells(), last_real(mask)).path == "resume", "without padding it was right"
    right = masked("right")
    assert sweep(model, x, cells(), last_real(right), attention_mask=right).path == "resume"


def test_a_batch_without_padding_does_not_vouch_for_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, mask = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH, seed=3), masked("left", (0, 0, 3, 5))
    planned = plan(model, x, cells(), last_real(mask), attention_mask=mask, batch_size=2)
    assert planned._strategy.trials == {0, 2}  # type: ignore[attr-defined]
    monkeypatch.setattr(
        KeyValues, "tail_call", lambda self, resid, layer, pos, extra: self.model.prepare(resid, None, layer, extra)
    )
    found = planned.run()
    assert found.path == "skip"
    want = alone(model, x, mask)
    assert (found.values - want).abs().max() <= 2e-5 * want.abs().max()


def test_a_resumer_that_knows_no_padding_is_not_used_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, mask = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH, seed=3), masked("left")
    monkeypatch.setattr(KeyValues, "masks", False)
    found = plan(model, x, cells(), last_real(mask), attention_mask=mask)
    assert found.path == "skip"
    assert "padding" in found.why
    assert f"no shorter one: {found.why}" in str(found)
    assert plan(model, x, cells(), last_real(mask)).path == "resume"

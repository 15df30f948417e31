"""Padding: a mask has the effect that it says, real tokens get the numbers that they have alone, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo

import probelens as pl
from probelens.hooks.inputs import padding_mask, reads_both_ways

SITES = ["blocks.0.hook_resid_post", "blocks.2.hook_resid_post"]
EXACT = ("neox", "gpt2", "llama", "gemma2", "opt", "bloom", "mamba", "jamba", "stablelm")


def padded(gap: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences alone, the same with padding before (and amid) them, and the mask."""
    x = zoo.tokens(3, 8, 1).clamp(min=2)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[:, :3] = 0
    if gap:
        mask = mask.roll(-2, 1)  # one before, two after
        mask[:, [4, 10]] = mask[:, [10, 4]]
    tokens = torch.ones(3, 11, dtype=torch.long)
    tokens[mask.bool()] = x.flatten()
    return x, tokens, mask


@pytest.mark.parametrize("name", ["neox", "llama"])
def test_padding_on_the_left_vouches_for_none_between_real_tokens(name: str) -> None:
    """Rotary positions need not be told of the one, and need it of the other, whichever comes first."""
    model = pl.wrap(zoo.more(name))
    x, tokens, mask = padded()
    _, amid, gap = padded(gap=True)
    pl.collect(model, pl.Batch(tokens, attention_mask=mask), SITES)
    both = pl.Batch(torch.cat([tokens, amid]), attention_mask=torch.cat([mask, gap]))
    for batch, part in ((pl.Batch(amid, attention_mask=gap), slice(3)), (both, slice(3, 6))):
        told = pl.collect(model, batch, SITES, batch_size=6)
        for site in SITES:
            alone, found = pl.collect(model, x, SITES)[site], told[site][part]
            assert (found[gap.bool()].view_as(alone) - alone).abs().max() <= 1e-5 * alone.abs().max()
    found = {}
    for first in (pl.Batch(tokens, attention_mask=mask), None):
        model = pl.wrap(zoo.more(name))
        pairs = pl.PatchPairs(amid, amid.roll(1, 0), read_pos="last", answers=[[1, 2]] * 3, mask=gap.bool())
        if first is not None:
            pl.patch(
                model, pl.PatchPairs(tokens, tokens.roll(1, 0), read_pos=-1, answers=[[1, 2]] * 3, mask=mask.bool())
            )
        found[first is None] = pl.patch(model, pairs, "resid_post")
    assert (found[True].values - found[False].values).abs().max() <= 1e-5 * found[True].values.abs().max()
    assert (found[True].clean - found[False].clean).abs().max() <= 1e-5 * found[True].clean.abs().max()


@pytest.mark.parametrize("name", EXACT)
def test_real_tokens_after_padding_have_the_numbers_that_they_have_alone(name: str) -> None:
    model = pl.wrap(zoo.more(name))
    x, tokens, mask = padded()
    alone, told = (pl.collect(model, b, SITES) for b in (x, pl.Batch(tokens, attention_mask=mask)))
    untold = pl.collect(model, tokens, SITES)
    for site in SITES:
        size = alone[site].abs().max()
        assert (told[site][:, 3:] - alone[site]).abs().max() <= 1e-5 * size
        assert (untold[site][:, 3:] - alone[site]).abs().max() > 1e-2 * size, "the control: without the mask they don't"
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask)
        assert torch.equal(model({"input_ids": tokens, "attention_mask": mask}), whole)
        resid = model(tokens, stop_at_layer=1, attention_mask=mask)
        later = model(resid, start_at_layer=1, attention_mask=mask)
    assert torch.allclose(later[:, 3:], whole[:, 3:], rtol=1e-4, atol=1e-5)


def test_positions_that_the_user_gives_stay_and_gaps_are_counted_over() -> None:
    raw = zoo.build("gpt2")
    model = pl.wrap(raw)
    x, tokens, mask = padded(gap=True)
    with torch.no_grad():
        alone = model(x)
        found = model(tokens, attention_mask=mask)[mask.bool()].view_as(alone)
        assert torch.allclose(found, alone, atol=1e-5)
        given = torch.arange(20, 31).expand(3, -1)
        want = zoo.logits(raw, tokens, attention_mask=mask, position_ids=given)
        assert torch.equal(model(tokens, attention_mask=mask, position_ids=given), want)
        keywords = {"input_ids": tokens, "attention_mask": mask, "position_ids": given}
        assert torch.equal(model(keywords), want)
        right = mask.sort(1, descending=True).values
        assert torch.equal(model(tokens, attention_mask=right), zoo.logits(raw, tokens, attention_mask=right))


@pytest.mark.parametrize("name", ["rwkv", "recurrent-gemma", "bart"])
def test_a_mask_that_does_not_keep_padding_out_is_refused(name: str) -> None:
    model = pl.wrap(zoo.more(name))
    _, tokens, mask = padded()
    real = pl.Batch(tokens, {"y": tokens % 2}, mask.bool(), attention_mask=mask)
    site = "blocks.1.hook_resid_post"
    calls: list[Any] = [
        lambda: pl.collect(model, real, site),
        lambda: model(tokens, attention_mask=mask),
        lambda: model({"input_ids": tokens, "attention_mask": mask}),
        lambda: pl.ablate(model, real, {site: pl.subspaces.random(1, zoo.WIDTH)}, refit=False, controls=0),
    ]
    for call in calls:
        with pytest.raises(pl.InputError, match="padding before real tokens.*Pad on the right"):
            call()
    # On the right it reaches nothing, so there is nothing to refuse.
    right, left_out = mask.flip(1), torch.where(mask.flip(1).bool(), tokens, 3)
    with torch.no_grad():
        a, b = model(tokens, attention_mask=right), model(left_out, attention_mask=right)
    assert torch.allclose(a[:, :8], b[:, :8], atol=1e-5)


def pairs(pad: int) -> pl.PatchPairs:
    gen = torch.Generator().manual_seed(0)
    clean = torch.randint(2, zoo.VOCAB, (4, 9), generator=gen)
    corrupted = clean.clone()
    corrupted[:, 1] = (corrupted[:, 1] - 1) % 21 + 2
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[:2, 6:] = False
    filled = [x.where(mask, torch.tensor(pad)) for x in (clean, corrupted)]
    one = torch.ones(4, dtype=torch.long)
    return pl.PatchPairs(*filled, one, 4 * one, torch.tensor([[0, 1]] * 4), mask)


@pytest.mark.parametrize("name", ["lstm-bidirectional", "gru-bidirectional-fused"])
def test_padding_on_the_right_of_pairs_is_not_read_behind_the_users_back(name: str) -> None:
    model, site = pl.wrap(zoo.build(name)), "blocks.1.hook_resid_pre"
    for call in (pl.patch, pl.attribute):
        with pytest.raises(pl.InputError, match=r"no attention_mask.*equal length"):
            call(model, pairs(0), [site], pos=1)
    with pytest.raises(pl.InputError, match="no attention_mask"):
        pl.patch_sites(model, pairs(0))
    forwards = pl.wrap(zoo.build(name.split("-")[0]))
    a, b = (pl.patch(forwards, pairs(pad), [site], pos=1).values for pad in (0, 1))
    assert torch.equal(a, b), "a causal model needs no mask, and doesn't read padding on the right"


class Encoder(torch.nn.Module):
    """Attention both ways, without a module that is called bidirectional."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(zoo.VOCAB, zoo.WIDTH)
        self.layers = torch.nn.ModuleList(
            [torch.nn.TransformerEncoderLayer(zoo.WIDTH, 4, 32, batch_first=True) for _ in range(2)]
        )
        self.head = torch.nn.Linear(zoo.WIDTH, zoo.VOCAB)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)
        return self.head(x)


def test_what_reads_both_ways_is_tried() -> None:
    torch.manual_seed(0)
    encoder = pl.wrap(Encoder().eval(), blocks="layers", embed="embed", unembed="head")
    assert reads_both_ways(encoder)
    a, b = (pl.patch(encoder, pairs(pad), ["blocks.1.hook_resid_pre"], pos=1).values for pad in (0, 1))
    assert torch.allclose(a, b, atol=1e-5)
    mask = pairs(0).mask
    assert mask is not None
    assert padding_mask(mask, encoder) is not None
    for name in ("neox", "lstm", "mamba"):
        assert not reads_both_ways(pl.wrap(zoo.build(name)))
        assert padding_mask(mask, pl.wrap(zoo.build(name))) is None
    assert padding_mask(mask.flip(1), None) is not None

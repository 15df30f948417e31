"""Distributed alignment search: finds a planted plane and not more, equals a hand-written training step, leaves models alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import zoo
from test_interchange import LENGTH, own_pairs
from torch import Tensor, nn
from torch.nn import functional as F

import probelens as pl
from probelens.errors import InputError
from probelens.patching.das_result import judged
from probelens.patching.das_training import Learned, Lesson, Schedule, Swaps, learn, learn_rank
from probelens.patching.pairs import chosen_sides

RESID = "blocks.0.hook_resid_post"
VALUES, COPIES, WIDTH = 3, 40, 12
FAST: dict[str, Any] = {"controls": 2, "steps": 100, "lr": 0.05}


class Plane(nn.Module):
    """Answers with one of three values that tokens write to a plane of the residual stream; other directions hold noise."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        n = VALUES * COPIES
        turned = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=gen)).Q
        self.embed, self.block, self.head = nn.Embedding(n, WIDTH), nn.Identity(), nn.Linear(WIDTH, VALUES, bias=False)
        angle = 2 * torch.pi * torch.arange(VALUES) / VALUES
        points = torch.stack([angle.cos(), angle.sin()], 1)
        held = torch.randn(n, WIDTH, generator=gen)
        held[:, :2] = points[torch.arange(n) % VALUES]
        with torch.no_grad():
            self.embed.weight.copy_(held @ turned)
            self.head.weight.copy_(3 * F.pad(points, (0, WIDTH - 2)) @ turned)
        self.plane, self.cut = turned[:2], cut

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.block(self.embed(input_ids))
        return self.head(h.detach() if self.cut else h)


def planted(cut: bool = False, n: int = 240) -> tuple[pl.HookedModel, pl.PatchPairs]:
    model = pl.wrap(Plane(cut), blocks=["block"], embed="embed", unembed="head")
    gen = torch.Generator().manual_seed(1)
    clean, other = torch.randint(VALUES * COPIES, (2, 8 * n, 5), generator=gen)
    corrupted = clean.clone()
    corrupted[:, -1] = other[:, -1]
    rows = (clean[:, -1] % VALUES != corrupted[:, -1] % VALUES).nonzero()[:n, 0]
    answers = torch.stack([clean[:, -1] % VALUES, corrupted[:, -1] % VALUES], 1)[rows]
    at = torch.full((n,), 4)
    return model, pl.PatchPairs(clean[rows], corrupted[rows], at, at, answers)


@pytest.fixture(scope="module")
def found() -> pl.DASResult:
    model, pairs = planted()
    return pl.das(model, pairs, RESID, 4, 2, **FAST)


def truth() -> pl.Subspace:
    return pl.Subspace(Plane().plane, torch.zeros(WIDTH))


def test_the_plane_that_is_read_is_found_and_used(found: pl.DASResult) -> None:
    assert found.subspace.overlap(truth()) > 0.99
    row = found.target()
    assert (row["iia"], row["verdict"], row["why"]) == (1.0, "used", None)
    assert found.find(condition="full")["iia"] == 1.0
    assert found.find(condition="complement")["iia_hi"] < 0.2
    assert max(r["iia"] for r in found.rows if r["condition"] in ("random", "orthogonal_pca")) < 0.7


def test_shuffled_answers_lead_elsewhere(found: pl.DASResult) -> None:
    row = found.find(condition="shuffled")
    assert row["iia_hi"] < found.target()["iia_lo"]
    assert float(found.losses["shuffled"][-10:].mean()) > 5 * float(found.loss[-10:].mean())


def test_another_site_that_nobody_reads_and_an_untrained_model_lead_nowhere() -> None:
    model, pairs = planted()
    fresh = Plane()
    nn.init.normal_(fresh.embed.weight, generator=torch.Generator().manual_seed(5))
    nn.init.normal_(fresh.head.weight, generator=torch.Generator().manual_seed(6))
    other = pl.wrap(fresh, blocks=["block"], embed="embed", unembed="head")
    found = pl.das(model, pairs, RESID, 4, 2, untrained=other, other_site="hook_embed", **FAST)
    # The embedding is the residual stream here, so the other site does as well, and the verdict says so.
    assert found.find(condition="other_site")["site"] == "hook_embed"
    assert found.find(condition="other_site")["iia"] == 1.0
    assert found.target()["verdict"] == "unspecific"
    alone = pl.das(model, pairs, RESID, 4, 2, untrained=other, **FAST)
    assert alone.find(condition="untrained")["n"] == alone.target()["n"]
    assert alone.find(condition="untrained")["iia_hi"] < alone.target()["iia_lo"]
    assert "untrained" not in (alone.target()["control_problem"] or "")


def test_a_control_that_cannot_be_made_is_said(found: pl.DASResult) -> None:
    assert "untrained: how to make a Plane again" in found.target()["control_problem"]
    assert {row["condition"] for row in found.rows}.isdisjoint({"untrained", "other_site"})
    model, pairs = planted()
    without = pl.das(model, pairs, RESID, 4, 2, untrained=False, **FAST)
    assert "untrained" not in (without.target()["control_problem"] or "")


def test_the_rank_is_learned() -> None:
    model, pairs = planted()
    found = pl.das(model, pairs, RESID, 4, **FAST)
    assert found.subspace.rank == 2
    assert found.subspace.overlap(truth()) > 0.95
    by_rank = {tried["rank"]: tried["iia"] for tried in found.ranks}
    assert by_rank[1] < 0.8 < by_rank[2]


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 6, 8, 11])
def test_the_smallest_sufficient_rank_is_found_by_doubling_and_halving(needed: int) -> None:
    empty = torch.zeros(0)

    def fit(rank: int, first: Tensor | None) -> Learned:
        assert first is None or len(first) < rank
        return Learned(torch.zeros(rank, 16), empty)

    kept, tried = learn_rank(fit, lambda q: (min(1.0, len(q) / needed), 0.0), 1000, 16)
    assert len(kept.basis) == needed
    assert len(tried) <= 8
    assert len({t["rank"] for t in tried}) == len(tried)
    low, _ = learn_rank(fit, lambda q: (0.1, 0.0), 1000, 16)
    assert len(low.basis) == 1  # more directions bring nothing


SITES = [
    ("neox", "blocks.1.hook_resid_post", None), ("neox", "blocks.0.attn.hook_z", 1), ("lstm", "blocks.0.rnn.hook_h", None),
    ("lstm", "blocks.1.rnn.hook_c", None), ("gru-fused-time-first", "blocks.0.rnn.hook_h", None),
    ("mamba", "blocks.0.mixer.hook_ssm_state", None), ("mamba2", "blocks.1.mixer.hook_ssm_state", None),
]  # fmt: skip


def by_hand(
    model: pl.HookedModel, pairs: pl.PatchPairs, site: str, pos: Any, weight: Tensor, before: int, width: int
) -> Tensor:
    """The loss of one step: a plain hook, and the model's own whole forward."""
    with torch.no_grad():
        _, cache = model.run_with_cache(pairs.clean, site)
    q = torch.linalg.qr(weight).Q.mT
    wide = torch.zeros(len(q), width)
    wide = torch.cat([wide[:, :before], q, wide[:, before + q.shape[1] :]], 1)

    def hook(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        lead = 2 if hook.pos is None else 1
        source = cache[site] if hook.pos is None else cache[site][:, hook.pos]
        change = (source - tensor).flatten(lead) @ wide.mT @ wide
        new = tensor + change.reshape(tensor.shape)
        if pos is None:
            return new
        steps = torch.arange(LENGTH)[None] == (torch.full((len(pairs),), pos) if isinstance(pos, int) else pos)[:, None]
        keep = steps if hook.pos is None else steps[:, hook.pos]
        return torch.where(keep.reshape(*keep.shape, *[1] * (tensor.ndim - keep.ndim)), new, tensor)

    logits = model.run_with_hooks(pairs.corrupted, [(site, hook)])
    return F.cross_entropy(logits[torch.arange(len(pairs)), pairs.read_pos], pairs.answers[:, 0])


@pytest.mark.parametrize(("family", "site", "head"), SITES)
@pytest.mark.parametrize("pos", [None, 2, "each example its own"])
def test_loss_and_gradient_of_a_step_are_those_of_a_hand_written_one(
    family: str, site: str, head: int | None, pos: Any
) -> None:
    model = pl.wrap(zoo.build(family))
    pairs = own_pairs(model, 6)
    where = torch.arange(len(pairs)) % (LENGTH - 1) if isinstance(pos, str) else pos
    shape = pl.collect(model, pairs.clean[:1], [site])[site].shape[2:]
    width = shape.numel()
    part, before = (width, 0) if head is None else (width // shape[0], head * width // shape[0])
    weight = torch.randn(part, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    want = by_hand(model, pairs, site, where, weight, before, width)
    (want_grad,) = torch.autograd.grad(want, weight)
    column = torch.full((len(pairs),), where) if isinstance(where, int) else where
    swaps = Swaps(model, chosen_sides(model, pairs, "das()"), site, column, (before, width - before - part))
    lesson = Lesson(swaps, torch.arange(len(pairs)), pairs.answers[:, 0])
    got = lesson.loss(torch.linalg.qr(weight).Q.mT, lesson.rows)
    (grad,) = torch.autograd.grad(got, weight)
    assert want_grad.norm() > 0
    assert abs(got.item() - want.item()) < 1e-6
    assert float((grad - want_grad).abs().max()) < 1e-6 * max(1, float(want_grad.abs().max()))


@pytest.mark.parametrize(("family", "site", "head"), SITES)
def test_states_heads_and_residuals_are_learned_and_tested(family: str, site: str, head: int | None) -> None:
    model = pl.wrap(zoo.build(family))
    pairs = own_pairs(model, 40)
    found = pl.das(
        model, pairs, site, None, 2, head=head, controls=1, kinds=("random",), steps=12, lr=0.1, untrained=False, batch_size=32,
    )  # fmt: skip
    assert {"target", "full", "complement", "random", "train", "shuffled"} <= {row["condition"] for row in found.rows}
    assert float(found.loss[-3:].mean()) < float(found.loss[0])
    if head is not None:
        d_head = found.subspace.d // model.cfg.n_heads
        outside = torch.ones(found.subspace.d, dtype=torch.bool)
        outside[head * d_head : (head + 1) * d_head] = False
        assert not found.subspace.basis[:, outside].any()
        again = pl.interchange(model, pairs[found.held], found.spaces(), controls=0, kinds=())
        assert again.targets()[0]["iia"] == found.target()["iia"]


def test_pairs_that_agree_are_learned_on_and_tested() -> None:
    model, pairs = planted()
    clean = pairs.clean
    other = clean.clone()
    other[:, -1] = (clean[:, -1] + VALUES) % (VALUES * COPIES)  # another token of the same value
    stays = clean[:, -1] % VALUES
    same = dataclasses.replace(pairs, corrupted=other, answers=torch.stack([(stays + 1) % VALUES, stays], 1))
    found = pl.das(model, pairs, RESID, 4, 2, same_pairs=same, **FAST)
    assert found.find(condition="same_value")["iia"] == 1.0
    assert found.target()["iia"] == 1.0


def test_no_sequence_is_on_both_sides_and_the_seed_decides(found: pl.DASResult) -> None:
    model, pairs = planted()
    sides = [
        {tuple(row) for tokens in (pairs.clean, pairs.corrupted) for row in tokens[part].tolist()}
        for part in (found.train, found.held)
    ]
    assert not sides[0] & sides[1]
    assert len(found.train) + len(found.held) == len(pairs)
    before = torch.get_rng_state()
    again = pl.das(model, pairs, RESID, 4, 2, **FAST)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.rows == found.rows
    assert torch.equal(again.loss, found.loss)
    other = pl.das(model, pairs, RESID, 4, 2, **{**FAST, "seed": 1})
    assert not torch.equal(other.held, found.held)


def test_a_model_is_as_it_was_also_after_an_error() -> None:
    model, pairs = planted(cut=True)
    module = model.module
    module.train()
    module.head.weight.requires_grad_(False)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(pl.InputError, match="none comes back there"):
        pl.das(model, pairs, RESID, 4, 2, **FAST)
    assert module.training
    assert [p.requires_grad for p in module.parameters()] == [True, False]
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    whole, _ = planted()
    whole.module.head.weight.requires_grad_(False)
    pl.das(whole.train(), pairs, RESID, 4, 2, untrained=False, **FAST)
    assert whole.module.training
    assert [p.requires_grad for p in whole.module.parameters()] == [True, False]
    assert all(p.grad is None for p in whole.module.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in whole.module.state_dict().items())


def test_a_caller_without_gradients_gets_the_same(found: pl.DASResult) -> None:
    model, pairs = planted()
    with torch.no_grad():
        assert pl.das(model, pairs, RESID, 4, 2, **FAST).rows == found.rows
    with torch.inference_mode():
        assert pl.das(model, pairs, RESID, 4, 2, **FAST).rows == found.rows


def test_training_ends_where_the_loss_is_flat() -> None:
    model, pairs = planted()
    swaps = Swaps(
        model, chosen_sides(model, pairs, "das()"), "hook_embed", torch.zeros(len(pairs), dtype=torch.long)
    )  # nobody reads there
    lesson = Lesson(swaps, torch.arange(len(pairs)), pairs.answers[:, 0])

    class Bar:
        def update(self, n: int) -> None:
            pass

    assert len(learn([lesson], WIDTH, 1, Schedule(1000, 0.01, len(pairs), 0), Bar()).loss) < 300


def test_the_verdict_heeds_subspaces_learned_where_nothing_is() -> None:
    def row(condition: str, low: float, high: float, overlap: float | None = None) -> dict[str, Any]:
        return {"condition": condition, "iia_lo": low, "iia_hi": high, "control_overlap": overlap}

    target = {**row("target", 0.9, 1), "verdict": "used", "why": None}
    assert judged([target, row("untrained", 0.4, 0.6), row("shuffled", 0.1, 0.2, 0.1)]) == ("used", None)
    for kind in ("untrained", "other_site", "shuffled"):
        word, why = judged([target, row(kind, 0.85, 0.95, 0.1)])
        assert word == "unspecific"
        assert why is not None
        assert kind.split("_")[0] in why
    assert judged([target, row("shuffled", 0.85, 0.95, 0.5)])[0] == "used"  # half of the target, which hedges
    elsewhere = {**target, "verdict": "not here"}
    assert judged([elsewhere, row("untrained", 0.85, 0.95)])[0] == "not here"


def test_the_result_prints_is_drawn_saved_and_its_subspace_is_one_like_others(
    found: pl.DASResult, tmp_path: Any
) -> None:
    said = repr(found)
    assert "Rank 2 of 12, learned at layer 0 (blocks.0.hook_resid_post), position 4" in said
    assert "Verdict: used." in said
    assert "learned on shuffled answers" in said
    held = [
        {**row, "controls_left_out": "2 of 3 random"} if row["condition"] == "target" else row for row in found.rows
    ]
    assert "left out: 2 of 3 random" in repr(dataclasses.replace(found, rows=held))
    assert [trace.name for trace in found.plot().data] == ["the answers", "learned on shuffled answers"]
    loaded = pl.DASResult.load(found.save(tmp_path / "found.safetensors"))
    assert loaded.rows == found.rows
    assert torch.equal(loaded.subspace.basis, found.subspace.basis)
    model, pairs = planted()
    again = pl.interchange(model, pairs[found.held], {RESID: loaded.subspace}, pos=4, controls=0)
    assert again.targets()[0]["iia"] == found.target()["iia"]
    batch = pl.Batch(pairs.clean, {"value": pairs.clean % VALUES})
    costs = pl.ablate(model, batch, {RESID: loaded.subspace}, label="value", controls=2, refit=False)
    assert costs.targets()[0]["drop"] > 0.5


def test_pairs_of_one_group_are_on_one_side_and_count_once() -> None:
    model, pairs = planted()
    groups = torch.arange(len(pairs)) % 30
    found = pl.das(model, pairs, RESID, 4, 2, groups=groups, untrained=False, **FAST)
    learned, tested = (set(groups[part].tolist()) for part in (found.train, found.held))
    assert not learned & tested
    assert len(learned) + len(tested) == 30
    assert found.target()["n_groups"] == len(tested)
    # Tokens that both sides share still bind pairs, whatever the groups.
    alone = pl.das(model, pairs, RESID, 4, 2, groups=torch.arange(len(pairs)), untrained=False, **FAST)
    assert torch.equal(alone.held, pl.das(model, pairs, RESID, 4, 2, untrained=False, **FAST).held)
    with pytest.raises(pl.ShapeError, match=r"groups must be \(example,\) = \(240,\)"):
        pl.das(model, pairs, RESID, 4, 2, groups=groups[1:])


def test_bad_input_is_named() -> None:
    model, pairs = planted()
    with pytest.raises(pl.InputError, match="names 2"):
        pl.das(model, pairs, ["hook_embed", RESID])
    with pytest.raises(pl.InputError, match="must be None, one position"):
        pl.das(model, pairs, RESID, [1, 2])
    with pytest.raises(pl.InputError, match="rank=13"):
        pl.das(model, pairs, RESID, 4, 13)
    with pytest.raises(pl.InputError, match="has no heads"):
        pl.das(model, pairs, RESID, 4, 2, head=0)
    with pytest.raises(pl.InputError, match="0 correctly"):
        pl.das(model, dataclasses.replace(pairs, answers=pairs.answers.flip(1)), RESID, 4, 2)
    with pytest.raises(pl.InputError, match="steps=0"):
        pl.das(model, pairs, RESID, 4, 2, steps=0)
    with pytest.raises(pl.UnknownHookError):
        pl.das(model, pairs, "blocks.7.hook_resid_post", 4, 2)


@pytest.mark.parametrize("lr", [math.nan, 0.0, -1.0, math.inf, None])
def test_a_learning_rate_that_is_none_is_named(lr: float) -> None:
    model, pairs = planted()
    with pytest.raises(InputError, match="the learning rate must be a number above 0"):
        pl.das(model, pairs, RESID, 4, 2, lr=lr)

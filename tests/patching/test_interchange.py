"""Interchange: equal to hand-written hooks for every family, and its verdicts on models whose truth is known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.patching.interchange import interchange, interchange_plan
from probelens.patching.interchange_rows import verdict

FAMILIES = ["neox", "mamba", "mamba2", "lstm", "gru-fused-time-first"]
LENGTH = 6


def own_pairs(model: pl.HookedModel, n: int = 12) -> pl.PatchPairs:
    """Pairs whose answers are what the model itself says, so that both runs are right."""
    clean = zoo.tokens(40 * n, LENGTH, seed=5)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 1) % zoo.VOCAB
    with torch.no_grad():
        said = [model(x)[:, -1].argmax(-1) for x in (clean, corrupted)]
    differ = (said[0] != said[1]).nonzero().flatten()[:n]
    at = torch.full((len(differ),), LENGTH - 1)
    return pl.PatchPairs(clean[differ], corrupted[differ], torch.ones_like(at), at, torch.stack(said, 1)[differ])


def answers_by_hand(model: pl.HookedModel, pairs: pl.PatchPairs, site: str, matrix: Tensor, pos: int | None) -> Tensor:
    """Whether the source's answer is given after h ← h + A (s − h), by a plain hook."""
    _, cache = model.run_with_cache(pairs.clean, site)

    def hook(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        source = cache[site] if hook.pos is None else cache[site][:, hook.pos]
        flat = (source - tensor).flatten(1 if hook.pos is not None else 2)
        new = tensor + (flat @ matrix.to(flat)).reshape(tensor.shape)
        if hook.pos is not None:
            return new if pos is None or hook.pos == pos else tensor
        out = tensor.clone()
        where = slice(None) if pos is None else pos
        out[:, where] = new[:, where]
        return out

    with torch.no_grad():
        logits = model.run_with_hooks(pairs.corrupted, [(site, hook)])[torch.arange(len(pairs)), pairs.read_pos]
    return logits.argmax(-1) == pairs.answers[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pos", [None, "each"])
def test_every_cell_equals_one_full_forward_with_a_hand_written_hook(family: str, pos: str | None) -> None:
    model = pl.wrap(zoo.build(family))
    pairs = own_pairs(model)
    width = model.cfg.d_model
    space = pl.subspaces.random(width // 2, width, seed=1)
    basis = space.basis
    found = interchange(model, pairs, {"resid_post": space}, pos=pos, controls=1, kinds=("random",), batch_size=5)
    assert len(pairs) >= 8
    assert bool(found.correct.all())
    moved = set()
    for row, got in zip(found.rows, found.followed, strict=True):
        if row["condition"] in ("random", "noise"):
            continue
        part = basis.mT @ basis
        matrix = {"target": part, "complement": torch.eye(width) - part, "full": torch.eye(width)}[row["condition"]]
        want = answers_by_hand(model, pairs, row["site"], matrix, None if row["pos"] == "all" else int(row["pos"]))
        assert torch.equal(got, want), row
        moved.add(float(want.double().mean()))
    assert len(moved) > 1  # something moved some answers and something else did not


@pytest.mark.parametrize(
    ("family", "name"),
    [("lstm", "rnn.hook_h"), ("lstm", "rnn.hook_c"), ("mamba", "mixer.hook_ssm_state"), ("neox", "attn.hook_z")],
)
def test_states_and_heads_are_interchanged_as_one_vector_per_step(family: str, name: str) -> None:
    model = pl.wrap(zoo.build(family))
    pairs = own_pairs(model)
    site = f"blocks.1.{name}"
    _, cache = model.run_with_cache(pairs.clean, site)
    width = cache[site].flatten(2).shape[-1]
    space = pl.subspaces.random(width // 2, width, seed=1)
    found = interchange(model, pairs, {site: space}, pos=2, controls=0, kinds=())
    part = space.basis.mT @ space.basis
    for row, got in zip(found.rows, found.followed, strict=True):
        if row["condition"] == "noise":
            assert row["changed"]
            continue
        matrix = {"target": part, "complement": torch.eye(width) - part, "full": torch.eye(width)}[row["condition"]]
        assert torch.equal(got, answers_by_hand(model, pairs, site, matrix, 2)), row


class Adds(nn.Module):
    """Answers with the sign of its first feature; a token's bit is written to feature 0, or to both 0 and 1."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.block = nn.Identity()
        self.head = nn.Linear(6, 2, bias=False)
        gen = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.embed.weight.copy_(0.1 * torch.randn(4, 6, generator=gen))
            for token in range(4):
                sign = 2.0 * (token % 2) - 1
                self.embed.weight[token, 0] = sign
                self.embed.weight[token, 1] = sign if both else 0.05 * token
            self.head.weight.zero_()
            self.head.weight[1, 0] = 1.0
            if both:
                # Either feature alone is enough.
                self.head.weight[1, 1] = 1.0
        self.both = both

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.block(self.embed(input_ids))
        if self.both:
            strongest = h[..., :2].abs().argmax(-1, keepdim=True)
            return torch.cat([-h.gather(-1, strongest), h.gather(-1, strongest)], -1)
        return self.head(h) - self.head(h).flip(-1)


def known(both: bool = False) -> tuple[pl.HookedModel, pl.PatchPairs]:
    model = pl.wrap(Adds(both), blocks=["block"], embed="embed", unembed=None if both else "head")
    gen = torch.Generator().manual_seed(1)
    clean = torch.randint(4, (120, 3), generator=gen)
    corrupted = clean.clone()
    corrupted[:, -1] ^= 1
    at = torch.full((120,), 2)
    return model, pl.PatchPairs(clean, corrupted, at, at, torch.stack([clean[:, -1] % 2, corrupted[:, -1] % 2], 1))


def axis(*which: int, d: int = 6) -> pl.Subspace:
    return pl.Subspace(torch.eye(d)[list(which)], torch.zeros(d))


def test_the_feature_that_is_read_is_used_and_another_is_used_elsewhere() -> None:
    model, pairs = known()
    row = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos=2).targets()[0]
    assert (row["iia"], row["verdict"]) == (1.0, "used")
    assert row["iia_lo"] < 1.0  # a share of 1 has an interval with a width
    other = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(2)}, pos=2).targets()[0]
    assert (other["iia"], other["verdict"]) == (0.0, "used elsewhere")


def test_each_site_has_draws_of_its_own_also_where_sites_hold_the_same() -> None:
    model, pairs = known()
    sites = ("blocks.0.hook_resid_pre", "hook_embed")
    found = interchange(model, pairs, {site: axis(0) for site in sites}, pos=2, kinds=("random",), controls=4)
    carried = [[r["variance"] for r in found.rows if r["site"] == s and r["condition"] == "random"] for s in sites]
    assert len(carried[0]) == 4
    assert not set(carried[0]) & set(carried[1])
    assert len({r["variance"] for r in found.targets()}) == 1, "the sites do hold the same"


def test_a_position_that_nobody_reads_is_unread_and_one_without_the_variable_is_not_where_it_is() -> None:
    model, pairs = known()
    row = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos=0).targets()[0]
    assert row["verdict"] == "unread"
    # Attention reads the first position, at which the two runs are one.
    model = pl.wrap(zoo.build("neox"))
    space = pl.subspaces.random(1, zoo.WIDTH, seed=1)
    row = interchange(model, own_pairs(model), {("resid_post", 0): space}, pos=0, controls=2).targets()[0]
    assert (row["verdict"], row["iia"]) == ("not here", 0.0)


def test_a_control_that_cannot_be_drawn_is_said_beside_the_target() -> None:
    model, pairs = known()
    strongest = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos=2).targets()[0]
    assert "variance" in strongest["control_problem"]
    weak = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(2)}, pos=2).targets()[0]
    assert weak["control_problem"] is None
    whole = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(*range(6))}, pos=2).targets()[0]
    assert "nothing to compare" in whole["control_problem"]
    empty = interchange(model, pairs, {"blocks.0.hook_resid_post": axis()}, pos=2).targets()[0]
    assert (empty["verdict"], empty["why"]) == (
        "no control",
        "the subspace is empty, so there is nothing to compare with",
    )


def test_few_pairs_are_underpowered() -> None:
    model, pairs = known()
    row = interchange(model, pairs[:3], {"blocks.0.hook_resid_post": axis(0)}, pos=2).targets()[0]
    assert row["verdict"] == "underpowered"


def test_pairs_that_agree_in_the_variable_keep_their_answer() -> None:
    model, pairs = known()
    clean = pairs.clean
    other = clean.clone()
    other[:, -1] ^= 2  # another token of the same bit
    at, bit = pairs.read_pos, clean[:, -1] % 2
    same = pl.PatchPairs(clean, other, at, at, torch.stack([bit, 1 - bit], 1))
    # The two sides agree, so the base gives the answer of the source; the second answer is what the base says.
    same = dataclasses.replace(same, answers=torch.stack([1 - bit, bit], 1))
    found = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos=2, same_pairs=same)
    (row,) = [r for r in found.rows if r["condition"] == "same_value"]
    assert row["iia"] == 1.0


def test_a_control_that_contains_the_target_is_left_out_of_the_verdict() -> None:
    def row(condition: str, low: float, high: float, overlap: float | None = None) -> dict[str, object]:
        return {
            "condition": condition,
            "rank": 1,
            "iia": (low + high) / 2,
            "iia_lo": low,
            "iia_hi": high,
            "control_overlap": overlap,
        }

    three = [row("full", 0.98, 1), row("target", 0.9, 1), row("complement", 0, 0.02)]
    containing, another = row("random_matched", 0.9, 1, 0.8), row("random", 0, 0.02, 0.1)
    assert verdict([*three, containing, another]) == ("used", None)
    assert verdict([*three, containing])[0] == "no control"
    assert verdict(three) == ("no control", "no random subspace was drawn")
    assert verdict([*three, row("random_matched", 0.9, 1, 0.1), another])[0] == "unspecific"
    spread = [three[0], three[1], row("complement", 0.9, 1)]
    assert verdict([*spread, another])[0] == "spread"


def test_a_plan_says_what_runs_and_gives_the_same() -> None:
    model, pairs = known()
    kwargs = {"pos": "each", "controls": 2}
    plan = interchange_plan(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, **kwargs)
    assert "21 runs at 1 site\n" in str(plan)
    assert repr(plan) == str(plan)
    assert plan.run().rows == interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, **kwargs).rows


def test_printing_says_the_finding_and_figures_show_every_condition() -> None:
    model, pairs = known()
    found = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, controls=2)
    said = repr(found)
    assert "100" in said
    assert "used at layer 0" in said
    assert len(said.splitlines()) <= 12
    assert {trace.name for trace in found.plot().data if trace.name} >= {
        "the subspace",
        "everything",
        "everything but it",
    }
    each = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos="each", controls=2)
    assert each.plot().data[0].type == "heatmap"


def test_a_result_is_saved_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, pairs = known()
    found = interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, controls=1)
    assert type(found).load(found.save(tmp_path / "found.safetensors")).rows == found.rows


def test_bad_input_is_named_before_anything_runs() -> None:
    model, pairs = known()
    site = "blocks.0.hook_resid_post"
    with pytest.raises(pl.ShapeError, match="width 5"):
        interchange(model, pairs, {site: axis(0, d=5)})
    with pytest.raises(pl.InputError, match="empty"):
        interchange(model, pairs, {})
    with pytest.raises(pl.InputError, match="'random_matched'"):
        interchange(model, pairs, {site: axis(0)}, kinds=("shuffled",))
    with pytest.raises(pl.UnknownHookError):
        interchange(model, pairs, {"blocks.7.hook_resid_post": axis(0)})
    with pytest.raises(pl.InputError, match="a Tensor"):
        interchange(model, pairs, {site: torch.eye(6)[:1]})
    with pytest.raises(pl.InputError, match="more than once"):
        interchange(model, pairs, {site: axis(0)}, pos=[2, -1])
    for pos in (True, 3, -4, [0, 1.5], 2.0):
        with pytest.raises(pl.InputError, match="from -3 to 2"):
            interchange(model, pairs, {site: axis(0)}, pos=pos)  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="pl.patch scores") as refused:
        interchange(
            model, dataclasses.replace(pairs, answers=pairs.answers[..., None].expand(-1, -1, 2)), {site: axis(0)}
        )
    assert refused.value.reason == "answers are of up to 2 tokens, and several tokens have no argmax"

"""Ablation of a subspace: right drops, damages, effects and verdicts where the answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens import subspaces
from probelens.ablation.comparing import compare
from probelens.ablation.reading import feeds_readout
from probelens.ablation.scoring import after
from probelens.ablation.verdict import verdict
from probelens.examples import planted
from probelens.examples.planted import SITE, World
from probelens.probing.refit import refit_check
from probelens.probing.splits import copies_together
from probelens.running.collect import collect

D, LENGTH = 8, 5


class Sums(nn.Module):
    """Two identity blocks over a fixed code for each token; the answer is read off along known directions."""

    def __init__(self, codes: Tensor, readout: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(codes)
        self.layers = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(2)])
        self.norm = nn.Identity()
        self.head = nn.Linear(D, len(readout), bias=False)
        with torch.no_grad():
            for layer in self.layers:
                nn.init.eye_(layer.weight)  # type: ignore[arg-type]
            self.head.weight.copy_(readout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def known(n: int = 60, bos: bool = False, seed: int = 0, wide: bool = False) -> tuple[pl.HookedModel, pl.Batch]:
    """Four answers, two bits along axes 0 and 1; everything else is noise that nothing reads."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randn(64, D, generator=gen) * torch.linspace(3.0, 0.5, D)
    ids = torch.arange(64)
    first, second = ids & 1, ids >> 1 & 1
    codes[:, 0], codes[:, 1] = 2.0 * first - 1, 2.0 * second - 1
    readout = torch.zeros(4, D)
    readout[:, 0] = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    readout[:, 1] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    model = pl.wrap(Sums(codes, readout), blocks="layers", embed="embed", ln_final="norm", unembed="head")
    tokens = torch.randint(64, (n, LENGTH), generator=gen)
    mask = torch.ones(n, LENGTH, dtype=torch.bool)
    mask[:, 0] = not bos
    if wide:
        mask[::3, -2:] = False
    labels = {"answer": tokens & 3, "first": tokens & 1, "noise": tokens >> 2 & 1}
    return model, pl.Batch(tokens, labels, mask)


def axes(*which: int, mean: Tensor | None = None) -> pl.Subspace:
    return pl.Subspace(torch.eye(D)[list(which)], torch.zeros(D) if mean is None else mean)


def target(result: pl.AblationResult) -> dict[str, object]:
    (row,) = result.targets()
    return row


# -- the numbers ---------------------------------------------------------------------------------------------


def test_drop_and_damage_are_those_of_arithmetic() -> None:
    model, batch = known()
    # Along axis 0 the code goes to 0, so that answers 0/1 and 2/3 tie and argmax takes the even one.
    got = target(
        pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0)}, label="answer", controls=0, refit=False)
    )
    even = (batch.labels["answer"] % 2 == 0).double().mean().item()
    chance = torch.bincount(batch.labels["answer"].flatten()).max().item() / batch.tokens.numel()
    assert got["clean"] == 1.0
    assert got["value"] == pytest.approx(even)
    assert got["drop"] == pytest.approx(1 - even)
    assert got["chance"] == pytest.approx(chance)
    assert got["damage"] == pytest.approx((1 - even) / (1 - chance))
    assert got["lo"] < got["drop"] < got["hi"]  # type: ignore[operator]


def test_a_subspace_that_nothing_reads_costs_nothing_and_one_that_is_read_costs_all_of_its_bit() -> None:
    model, batch = known()
    site = "blocks.0.hook_resid_post"
    idle = pl.ablate(model, batch, {site: axes(2, 3)}, label="answer", controls=5, refit=False)
    both = pl.ablate(model, batch, {site: axes(0, 1)}, label="answer", controls=5, refit=False)
    assert target(idle)["drop"] == 0.0
    assert target(both)["damage"] > 0.9  # type: ignore[operator]
    assert target(both)["effect"] > target(idle)["effect"] + 0.5  # type: ignore[operator]


def test_the_effect_is_the_damage_beyond_the_mean_of_the_matched_controls() -> None:
    model, batch = known()
    got = pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0, 4)}, label="answer", controls=6, refit=False)
    rows, row = got.rows, target(got)
    matched = [r["damage"] for r in rows if r["condition"] == "random_matched"]
    assert len(matched) == 6
    assert row["effect"] == pytest.approx(row["damage"] - sum(matched) / 6)  # type: ignore[operator]
    assert row["effect_against"] == "random_matched"
    assert row["effect_lo"] <= row["effect"] <= row["effect_hi"]  # type: ignore[operator]
    worse = sum(r["drop"] >= row["drop"] for r in rows if r["condition"] == "random_matched")
    assert row["effect_p"] == pytest.approx((1 + worse) / 7)
    assert row["damage_random_matched"] == pytest.approx(sum(matched) / 6)
    only = pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0, 4)}, label="answer", controls=6, refit=False, kinds=["random"])  # fmt: skip
    assert target(only)["effect_against"] == "random"
    assert target(only)["damage_random_matched"] is None


def test_values_are_means_over_the_positions_of_each_example() -> None:
    model, batch = known(wide=True)
    space = axes(0)
    got = pl.ablate(model, batch, {"blocks.1.hook_resid_pre": space}, label="answer", controls=0, refit=False)
    with torch.no_grad():
        hook = pl.edits.project(space, pos=batch.mask)
        logits = model.run_with_hooks(batch.tokens, [("blocks.1.hook_resid_pre", hook)])
    right = (logits.argmax(-1) == batch.labels["answer"]) & batch.mask
    torch.testing.assert_close(got.values[0], (right.sum(1) / batch.mask.sum(1)).float())
    torch.testing.assert_close(got.by_position[0], (right.sum(0) / batch.mask.sum(0)).float())
    assert got.clean.shape == (60,)


def test_chance_is_on_the_scale_of_the_accuracy_where_sequences_have_unequal_lengths() -> None:
    """Half of the sequences have one position and answer 0, the others five of answer 1: guessing gets a half."""
    model, _ = known()
    answer = torch.tensor([0] * 20 + [1] * 20)
    tokens = (torch.arange(40)[:, None] * 4 % 64 + answer[:, None]).expand(40, LENGTH).contiguous()
    batch = pl.Batch(tokens, {"answer": tokens & 3}, torch.ones(40, LENGTH, dtype=torch.bool))
    batch.mask[:20, 1:] = False
    pooled = 20 * LENGTH / (20 * LENGTH + 20)
    site = "blocks.0.hook_resid_post"
    # Along axis 0 the answers 0 and 1 tie, and argmax takes 0: what is left is to guess.
    got = pl.ablate(model, batch, {site: axes(0)}, label="answer", controls=0, refit=False)
    row = target(got)
    assert (row["clean"], row["value"]) == (1.0, 0.5)
    assert row["chance"] == got.chance == 0.5
    assert row["damage"] == 1.0
    assert pooled > 1 - 0.2, "pooled over positions this would be called a floor"
    assert row["verdict"] != "floor"
    # The control: of equal lengths the two are one.
    full = pl.Batch(tokens[10:], {"answer": tokens[10:] & 3})
    row = target(pl.ablate(model, full, {site: axes(0)}, label="answer", controls=0, refit=False))
    assert row["chance"] == pytest.approx(2 / 3)
    assert row["damage"] == pytest.approx((2 / 3) / (1 / 3))
    one = pl.Batch(tokens[20:], {"answer": tokens[20:] & 3}, batch.mask[20:])
    row = target(pl.ablate(model, one, {site: axes(0)}, label="answer", controls=0, refit=False))
    assert (row["chance"], row["damage"]) == (1.0, None)


@pytest.mark.parametrize("rank", [1, 3])
def test_controls_are_matched_in_rank_and_variance_within_one_per_cent(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = known()
    site, drawn = "blocks.0.hook_resid_post", []
    from probelens.ablation import scoring

    removing = scoring._removing

    def spy(name: str, space: pl.Subspace, *rest: object) -> object:
        drawn.append(space)
        return removing(name, space, *rest)

    monkeypatch.setattr(scoring, "_removing", spy)
    asked = subspaces.random(rank, D, seed=3)
    got = pl.ablate(model, batch, {site: asked}, label="answer", controls=20, refit=False)
    _, covariance = subspaces.moments(collect(model, batch, site)[site])
    kinds = [row["condition"] for row in got.rows]
    assert kinds == ["target", *["random"] * 20, *["random_matched"] * 20, "pca", "orthogonal_pca"]
    assert all(space.rank == rank for space in drawn)
    wanted = asked.variance_removed(covariance)
    for kind, space in zip(kinds, drawn, strict=True):
        if kind == "random_matched":
            assert space.variance_removed(covariance) == pytest.approx(wanted, rel=0.01)
    top = drawn[-2].variance_removed(covariance)
    assert top >= max(space.variance_removed(covariance) for space in drawn) - 1e-9
    plain = [s.variance_removed(covariance) for k, s in zip(kinds, drawn) if k == "random"]
    assert max(abs(v / wanted - 1) for v in plain) > 0.05, "without matching they differ"


def test_alpha_of_zero_changes_nothing_and_the_dose_grows() -> None:
    model, batch = known()
    site = "blocks.0.hook_resid_post"
    at = [
        pl.ablate(model, batch, {site: axes(0, mean=4 * torch.eye(D)[0])}, label="answer", controls=3, refit=False, alpha=a)
        for a in (0.0, 0.1, 0.6, 1.0)
    ]  # fmt: skip
    assert torch.equal(at[0].values, at[0].clean.expand_as(at[0].values))
    drops = [target(r)["drop"] for r in at]
    assert drops[0] == drops[1] == 0.0
    assert drops[3] >= drops[2] > 0.3  # type: ignore[operator]
    assert {row["alpha"] for row in at[2].rows} == {0.6}


def test_positions_outside_the_mask_keep_their_activation() -> None:
    model, batch = known(bos=True)
    mean = 100 * torch.eye(D)[0]
    seen: dict[str, Tensor] = {}

    def keep(logits: Tensor, tokens: Tensor, mask: Tensor, **labels: Tensor) -> Tensor:
        seen["logits"] = logits
        return (logits.argmax(-1) == labels["answer"]).float()

    got = pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0, mean=mean)}, keep, label="answer", controls=0, refit=False)  # fmt: skip
    clean = model(batch.tokens)
    assert torch.equal(seen["logits"][:, 0], clean[:, 0]), "BOS is left alone"
    assert not torch.isclose(seen["logits"][:, 1:], clean[:, 1:]).all(-1).any(), "all others are not"
    assert got.metric == "keep"


# -- verdicts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spare() -> World:
    return planted.spare()


@pytest.fixture(scope="module")
def spare_leace(spare: World) -> pl.Eraser:
    return pl.leace(spare.acts(spare.fit), spare.fit.labels["y"])


def test_erased_when_no_probe_recovers_and_inconclusive_when_one_does(spare: World, spare_leace: pl.Eraser) -> None:
    gone = target(pl.ablate(spare.model, spare.held, {SITE: spare_leace}, controls=2))
    assert gone["verdict"] == "erased"
    assert gone["refit_accuracy"] < gone["baseline"] + 0.02  # type: ignore[operator]
    assert gone["probe_accuracy"] == 1.0
    # A line through the quiet copy leaves the loud one.
    quiet = pl.Subspace(torch.eye(planted.WIDTH)[9:10], torch.zeros(planted.WIDTH))
    left = target(pl.ablate(spare.model, spare.held, {SITE: quiet}, controls=2))
    assert left["verdict"] == "inconclusive"
    assert left["refit_accuracy"] > 0.99  # type: ignore[operator]


@pytest.mark.parametrize(
    ("floor", "readout", "before", "after", "word"),
    [
        (True, True, True, True, "floor"),
        (False, True, True, False, "tautological"),
        (False, True, None, None, "tautological"),
        (False, False, None, None, "not refitted"),
        (False, False, True, True, "inconclusive"),
        (False, False, True, False, "erased"),
        (False, False, False, False, "absent"),
    ],
)
def test_each_verdict_by_hand(floor: bool, readout: bool, before: bool | None, after: bool | None, word: str) -> None:
    assert verdict(floor=floor, readout=readout, before=before, after=after) == word
    assert f'"{word}"' in (pl.ablate.__doc__ or "")


def test_few_sequences_are_underpowered_and_the_findings_say_how_many_would_do(
    spare: World, spare_leace: pl.Eraser
) -> None:
    # A seed with which no probe passes the bar by chance, as 1 in 5 of so few test rows does.
    for seed in range(6):
        got = pl.ablate(spare.model, spare.held[:120], {SITE: spare_leace}, label="y", controls=0, seed=seed)
        row = target(got)
        if not row["readable_after"]:
            break
    assert (row["verdict"], row["powered"]) == ("underpowered", False)
    assert row["n_needed"] in (240, 480, 960)
    assert f"{row['n_needed']} sequences would do" in str(got)
    assert "they don't read a planted residue of 1.4 standard deviations of a feature either" in str(got)
    linear = pl.ablate(spare.model, spare.held[:120], {SITE: spare_leace}, label="y", controls=0, seed=seed, mlp=False)
    assert (target(linear)["verdict"], target(linear)["powered"]) == ("erased", True)
    assert "no probe reads it any more, and one of 1.4 standard deviations of a feature they would have" in str(linear)


def test_no_residue_is_planted_where_the_verdict_rests_on_something_else(
    spare: World, spare_leace: pl.Eraser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probelens.probing.refit.residue_power", None)  # planting would fail
    coin = torch.randint(2, spare.held.tokens.shape, generator=torch.Generator().manual_seed(5))
    batch = pl.Batch(spare.held.tokens[:300], {"y": spare.held.labels["y"][:300], "coin": coin[:300]})
    row = target(pl.ablate(spare.model, batch, {SITE: spare_leace}, label="y", target="coin", controls=0, mlp=False))
    assert (row["verdict"], row["powered"], row["readable_after"]) == ("floor", None, False)


def test_absent_where_nothing_could_be_read_in_the_first_place(spare: World, spare_leace: pl.Eraser) -> None:
    coin = torch.randint(2, spare.held.tokens.shape, generator=torch.Generator().manual_seed(5))
    both = pl.Batch(spare.held.tokens, {**spare.held.labels, "coin": coin})
    row = target(pl.ablate(spare.model, both, {SITE: spare_leace}, label="coin", target="y", controls=0))
    assert row["verdict"] == "absent"
    assert row["drop"] > 0.4, "the cost is not about the coin"  # type: ignore[operator]
    before = ("probe_accuracy", "probe_mlp_accuracy", "probe_position_accuracy")
    assert max(row[name] for name in before) <= row["baseline"] + 0.02  # type: ignore[type-var, operator]


def test_erased_also_where_only_an_mlp_could_read_it() -> None:
    made = planted.exclusive()
    bits = [subspaces.class_means(made.acts(made.fit), made.fit.labels[bit]) for bit in "ab"]
    both = pl.Subspace(torch.linalg.qr(torch.cat([bit.basis for bit in bits]).mT).Q.mT, bits[0].mean)
    row = target(pl.ablate(made.model, made.held, {SITE: both}, label="y", controls=0))
    assert row["probe_accuracy"] < row["baseline"] + 0.02  # type: ignore[operator]
    assert row["probe_mlp_accuracy"] > 0.95  # type: ignore[operator]
    assert row["verdict"] == "erased"
    assert row["drop"] > 0.4  # type: ignore[operator]
    blind = target(pl.ablate(made.model, made.held, {SITE: both}, label="y", controls=0, mlp=False))
    assert blind["verdict"] == "absent", "without the MLP no probe could read it"
    assert blind["probe_mlp_accuracy"] is None


def test_erased_also_where_only_a_probe_at_each_position_could_read_it() -> None:
    made = planted.flipping()
    signed = torch.where(torch.arange(made.held.tokens.shape[1]) % 2 == 0, 1, 0)
    flipped = made.fit.labels["y"] ^ signed[: made.fit.tokens.shape[1]]
    line = subspaces.mean_difference(made.acts(made.fit), flipped)
    row = target(pl.ablate(made.model, made.held, {SITE: line}, label="y", controls=0))
    assert row["probe_accuracy"] < row["baseline"] + 0.02  # type: ignore[operator]
    assert row["probe_position_accuracy"] > 0.95  # type: ignore[operator]
    assert row["verdict"] == "erased"


@pytest.mark.parametrize(
    ("name", "site"), [("gru", "blocks.0.rnn.hook_h"), ("lstm-fused", "blocks.0.rnn.hook_c"), ("gru", "blocks.0.hook_resid_post")]
)  # fmt: skip
def test_probes_are_refitted_on_the_states_that_the_model_has_when_every_step_is_edited(name: str, site: str) -> None:
    """An eraser fitted on the states as they are leaves nothing of the token before in them, and something in these."""
    model, tokens = pl.wrap(zoo.build(name)), zoo.tokens(400, 12) % 2
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[::3, 0] = False
    before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
    batch = pl.Batch(tokens, {"before": before}, mask)
    x = collect(model, batch, site)[site]
    eraser = pl.leace(x, before, mask=mask)
    got = target(pl.ablate(model, batch, {site: eraser}, "next_token_loss", controls=0, mlp=False, batch_size=64))
    seen: list[Tensor] = []

    def edit(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        where = mask if hook.pos is None else mask[:, hook.pos]
        return torch.where(where[..., None], eraser(tensor), tensor)

    def record(tensor: Tensor, hook: pl.HookPoint) -> None:
        seen.append(tensor)

    with torch.no_grad():
        model.run_with_hooks(tokens, [(site, edit), (site, record)])
    stepped = model.point(site).step
    real = torch.stack(seen, 1) if stepped else seen[0]
    groups = copies_together(tokens, batch.groups)
    want, once = (refit_check(x, new, before, mask, groups, mlp=False)[0] for new in (real, eraser(x)))
    keys = ("refit_accuracy", "refit_position_accuracy", "readable_after", "baseline")
    assert [got[key] for key in keys] == pytest.approx([want[key] for key in keys], abs=0.01)
    assert once["refit_accuracy"] <= once["baseline"] + 0.02
    new = after(model, batch, {site: x}, site, eraser, 1.0, 64)  # type: ignore[arg-type]
    torch.testing.assert_close(new[mask], real[mask])
    assert torch.allclose(real[mask], eraser(x)[mask], atol=1e-3) is not stepped
    if name == "gru" and stepped:
        assert got["refit_accuracy"] > once["baseline"] + 0.02, "read again, where the eraser once leaves nothing"  # type: ignore[operator]


def test_half_a_dose_leaves_the_variable_readable(spare: World, spare_leace: pl.Eraser) -> None:
    half = target(pl.ablate(spare.model, spare.held, {SITE: spare_leace}, controls=0, alpha=0.5, mlp=False))
    assert half["verdict"] == "inconclusive"
    assert half["refit_mlp_accuracy"] is None


def test_tautological_where_a_linear_readout_reads_the_site(spare: World) -> None:
    last = "blocks.1.hook_resid_post"
    acts = collect(spare.model, spare.fit, last)[last]
    row = target(pl.ablate(spare.model, spare.held, {last: pl.leace(acts, spare.fit.labels["y"])}, controls=0))
    assert row["verdict"] == "tautological"
    assert row["drop"] > 0.4  # type: ignore[operator]
    assert feeds_readout(spare.model, last)
    assert not feeds_readout(spare.model, SITE)
    neox = pl.wrap(zoo.build("neox"))
    assert feeds_readout(neox, "ln_final.hook_out")
    assert feeds_readout(neox, "unembed.hook_in")
    assert not feeds_readout(neox, f"blocks.{zoo.LAYERS - 1}.hook_resid_post"), "a norm stands between"
    lstm = pl.wrap(zoo.build("lstm"))
    assert feeds_readout(lstm, f"blocks.{zoo.LAYERS - 1}.hook_resid_post")
    head = neox.adapter.parts["unembed"]
    paths = {"gpt_neox.final_layer_norm.hook_out": True, f"{head}.hook_in": True, f"{head}.hook_out": False,
             "gpt_neox.final_layer_norm.hook_in": False, "gpt_neox.layers.2.hook_out": False}  # fmt: skip
    assert {path: feeds_readout(neox, path) for path in paths} == paths
    paths = {"layers.2.hook_out": True, "head.hook_in": True, "layers.1.hook_out": False, "layers.2.hook_in": False}
    assert {path: feeds_readout(lstm, path) for path in paths} == paths


def test_floor_where_the_model_does_not_know_the_answer() -> None:
    model, batch = known()
    wrong = pl.Batch(batch.tokens, {"answer": batch.labels["noise"]})
    row = target(pl.ablate(model, wrong, {"blocks.0.hook_resid_post": axes(0)}, controls=0))
    assert row["verdict"] == "floor"
    right = target(pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0)}, label="answer", controls=0))
    assert right["verdict"] != "floor"


def test_without_a_refit_the_verdict_says_so() -> None:
    model, batch = known()
    got = pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0)}, label="answer", controls=0, refit=False)
    assert target(got)["verdict"] == "not refitted"
    assert got.refit_by_position is None


def test_the_baseline_knows_what_the_position_gives_away() -> None:
    """A label that depends on the position alone: nothing is read, though a pooled majority is far below."""
    model, batch = known(n=100)
    periodic = (torch.arange(LENGTH) % 2).expand(100, -1).contiguous()
    both = pl.Batch(batch.tokens, {"answer": batch.labels["answer"], "when": periodic})
    row = target(
        pl.ablate(model, both, {"blocks.0.hook_resid_post": axes(2)}, label="when", target="answer", controls=0)
    )
    assert row["position_baseline"] == 1.0
    assert row["majority"] == pytest.approx(0.6)
    assert row["baseline"] == 1.0
    assert row["refit_position_accuracy"] == 1.0
    assert row["verdict"] == "absent", "guessing from the position is not reading"


# -- what is given -------------------------------------------------------------------------------------------


def test_an_eraser_a_subspace_and_a_probe_result_are_all_taken(spare: World, spare_leace: pl.Eraser) -> None:
    read = pl.probe({SITE: spare.acts(spare.fit)}, {"y": spare.fit.labels["y"]}, spare.fit.groups)
    rows = subspaces.from_probe(read)
    by_result = pl.ablate(spare.model, spare.held, read, controls=3, refit=False, directions="filter")
    by_rows = pl.ablate(spare.model, spare.held, {SITE: rows}, controls=3, refit=False)
    torch.testing.assert_close(by_result.values, by_rows.values)
    erased = pl.ablate(spare.model, spare.held, {SITE: spare_leace}, controls=3, refit=False)
    assert target(erased)["drop"] > 0.4  # type: ignore[operator]
    assert target(erased)["rank"] == 1
    assert 0 <= target(erased)["control_overlap"] < 0.95  # type: ignore[operator]


def test_several_sites_are_ablated_one_at_a_time_and_named_by_their_layer() -> None:
    model, batch = known()
    sites = ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    got = pl.ablate(model, batch, {s: axes(0) for s in sites}, label="answer", controls=2, refit=False)
    assert [row["layer"] for row in got.targets()] == [-1, 0, 1]
    assert len({row["drop"] for row in got.targets()}) == 1, "in a model of identities they all cost the same"
    assert len(got.rows) == 3 * (1 + 2 + 2 + 1 + 1)


def test_nothing_to_remove_costs_nothing_and_all_of_it_has_no_matched_control() -> None:
    model, batch = known()
    site = "blocks.0.hook_resid_post"
    empty = pl.Subspace(torch.zeros(0, D), torch.zeros(D))
    none = pl.ablate(model, batch, {site: empty}, label="answer", controls=4)
    assert [row["condition"] for row in none.rows] == ["target"]
    assert target(none)["drop"] == 0.0
    assert "empty" in str(target(none)["control_problem"])
    every = pl.ablate(model, batch, {site: axes(*range(D))}, label="answer", controls=4, refit=False)
    assert "it takes every direction" in str(target(every)["control_problem"])
    assert len(every.rows) == 1, "a random subspace of every direction is the target itself"
    assert (target(every)["effect"], target(every)["needed"]) == (None, "can't tell")


def test_one_class_only_is_said_of_the_label_by_its_own_name() -> None:
    model, batch = known()
    constant = pl.Batch(
        batch.tokens, {"answer": batch.labels["answer"], "tense": torch.zeros_like(batch.labels["answer"])}
    )
    with pytest.raises(pl.InputError, match="'tense' have one class only"):
        pl.ablate(model, constant, {"blocks.0.hook_resid_post": axes(0)}, label="tense", target="answer", controls=2)


@pytest.mark.parametrize("family", ["neox", "mamba", "lstm", "gru-fused-time-first"])
def test_every_family_is_ablated_as_by_a_hand_written_hook(family: str) -> None:
    model, tokens = pl.wrap(zoo.build(family)), zoo.tokens(6, 7)
    batch = pl.Batch(tokens, {"answer": model(tokens).argmax(-1)})
    site = "blocks.1.hook_resid_post"
    space = subspaces.random(12, zoo.WIDTH, seed=1)

    def probability(logits: Tensor, answer: Tensor, **rest: Tensor) -> Tensor:
        return logits.softmax(-1).gather(-1, answer[..., None])[..., 0]

    got = pl.ablate(model, batch, {site: space}, probability, controls=0, refit=False, batch_size=4)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, [(site, pl.edits.project(space))])
    torch.testing.assert_close(got.values[0], probability(logits, **batch.labels).mean(1))
    assert not torch.allclose(got.values[0], got.clean, rtol=0, atol=1e-4)
    assert got.path == "skip"


# -- metrics -------------------------------------------------------------------------------------------------


def test_a_loss_rises_and_has_no_damage_but_an_effect_in_nats() -> None:
    model, tokens = pl.wrap(zoo.build("neox")), zoo.tokens(12, 7)
    mask = torch.ones(12, 7, dtype=torch.bool)
    mask[:4, 4:] = False
    batch = pl.Batch(tokens, {"token": tokens}, mask)
    site = "blocks.1.hook_resid_post"
    got = pl.ablate(model, batch, {site: subspaces.random(3, zoo.WIDTH)}, "next_token_loss", False, 4)
    row = target(got)
    assert row["damage"] is None
    assert row["chance"] is None
    matched = [r["drop"] for r in got.rows if r["condition"] == "random_matched"]
    assert row["effect"] == pytest.approx(row["drop"] - sum(matched) / 4, abs=1e-6)  # type: ignore[operator]
    assert row["effect_p"] == (1 + sum(drop <= row["drop"] for drop in matched)) / 5  # type: ignore[operator]
    with torch.no_grad():
        every = nn.functional.cross_entropy(
            model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
    real = mask[:, 1:]
    want = (every.view(12, 6) * real).sum(1) / real.sum(1)
    torch.testing.assert_close(got.clean, want)


def test_effect_p_is_small_where_the_subspace_costs_most_in_either_direction_of_the_metric() -> None:
    """Answers are the next tokens' bits; along axes 0 and 1 they are read, along 6 and 7 nothing is."""
    model, batch = known()
    site, kw = "blocks.0.hook_resid_post", {"label": "answer", "refit": False, "kinds": ["random"]}
    tokens = batch.tokens & 3
    batch = pl.Batch(tokens[:, :1].expand_as(tokens).contiguous(), {"answer": tokens[:, :1].expand_as(tokens)})

    def right(logits: Tensor, answer: Tensor, **rest: Tensor) -> Tensor:
        return (logits.argmax(-1) == answer).float()

    for metric in ("next_token_loss", "accuracy", right):
        read, idle = (
            target(pl.ablate(model, batch, {site: axes(*which)}, metric, controls=20, **kw))  # type: ignore[arg-type]
            for which in ((0, 1), (6, 7))
        )
        assert idle["drop"] == 0 != read["drop"]
        if callable(metric):
            assert read["effect_p"] is idle["effect_p"] is None
            assert read["effect"] > 0.2  # type: ignore[operator]
        else:
            assert read["effect_p"] == 1 / 21, metric
            assert idle["effect_p"] == 1, metric


def test_a_metric_of_ones_own_gets_the_labels_and_must_return_a_value_a_position() -> None:
    model, batch = known()
    site = {"blocks.0.hook_resid_post": axes(0)}

    def probability(logits: Tensor, answer: Tensor, **rest: Tensor) -> Tensor:
        return logits.softmax(-1).gather(-1, answer[..., None])[..., 0]

    row = target(pl.ablate(model, batch, site, probability, label="answer", controls=0, refit=False))
    assert 0 < row["drop"] < 1  # type: ignore[operator]
    with pytest.raises(pl.ShapeError, match="one value per position"):
        pl.ablate(model, batch, site, lambda logits, **rest: logits, label="answer", controls=0, refit=False)


# -- errors and results --------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed() -> None:
    model, batch = known()
    site, space = "blocks.0.hook_resid_post", axes(0)
    kw = {"label": "answer", "controls": 0, "refit": False}
    with pytest.raises(pl.UnknownHookError, match="2 blocks"):
        pl.ablate(model, batch, {"blocks.7.hook_resid_post": space}, **kw)  # type: ignore[arg-type]
    with pytest.raises(pl.ShapeError, match="width 5"):
        pl.ablate(model, batch, {site: subspaces.random(1, 5)}, **kw)  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="a Subspace or an Eraser"):
        pl.ablate(model, batch, {site: torch.eye(D)}, **kw)  # type: ignore[arg-type, dict-item]
    with pytest.raises(pl.InputError, match="empty"):
        pl.ablate(model, batch, {}, **kw)  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match=r"\['answer', 'first', 'noise'\]"):
        pl.ablate(model, batch, {site: space}, controls=0)
    with pytest.raises(pl.InputError, match="target='depth'"):
        pl.ablate(model, batch, {site: space}, label="answer", target="depth")
    with pytest.raises(pl.InputError, match="'random', 'random_matched', 'pca'"):
        pl.ablate(model, batch, {site: space}, label="answer", kinds=["shuffled"])  # type: ignore[list-item]
    with pytest.raises(pl.InputError, match="alpha must be from 0 to 1"):
        pl.ablate(model, batch, {site: space}, label="answer", alpha=1.5)
    with pytest.raises(pl.InputError, match="next_token_loss"):
        pl.ablate(model, batch, {site: space}, "acc", **kw)  # type: ignore[arg-type]
    high = pl.Batch(batch.tokens, {"answer": batch.labels["answer"] + 4})
    with pytest.raises(pl.MetricError, match="4 logits"):
        pl.ablate(model, high, {site: space}, controls=0, refit=False)
    heads = pl.wrap(zoo.build("neox"))
    some = pl.Batch(zoo.tokens(4, 6), {"answer": zoo.tokens(4, 6)})
    with pytest.raises(pl.ShapeError, match="ablate_component"):
        pl.ablate(heads, some, {"blocks.0.attn.hook_z": subspaces.random(1, 4)}, controls=0, refit=False)


@pytest.mark.parametrize("method", ["ablate", "leace", "inlp"])
def test_nan_is_refused_by_the_name_of_its_site(method: str) -> None:
    model, batch = known(n=40)
    _, other = known(n=40, seed=1)
    with torch.no_grad():
        model.module.layers[1].weight[0, 0] = float("nan")  # type: ignore[index, union-attr]
    whole, nan = "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"
    calls = {
        "ablate": lambda: pl.ablate(model, batch, {whole: axes(0), nan: axes(0)}, label="answer", controls=2),
        "leace": lambda: pl.erase(model, batch, other, label="answer", sites=[whole, nan]),
        "inlp": lambda: pl.erase(model, batch, other, label="answer", sites=[whole, nan], method="inlp"),
    }
    with pytest.raises(pl.InputError, match=rf"'{nan}' hold NaN .* 200 of 200 .* sequence 0 at position 0"):
        calls[method]()
    with pytest.raises(pl.MetricError, match="logits hold NaN"):
        pl.ablate(model, batch, {whole: axes(0)}, label="answer", controls=0, refit=False)


def test_nan_where_no_label_counts_is_nobodys_business() -> None:
    model, batch = known(n=40, bos=True)
    site = "blocks.0.hook_resid_post"

    def spoil(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        tensor = tensor.clone()
        tensor[:, 0] = float("nan")
        return tensor

    with model.hooks([(site, spoil)]):
        row = target(pl.ablate(model, batch, {site: axes(0)}, label="answer", controls=2))
    assert row["clean"] == 1.0


def test_one_point_under_two_names_is_refused() -> None:
    model, tokens = pl.wrap(zoo.build("mamba")), zoo.tokens(4, 6)
    batch, space = pl.Batch(tokens, {"answer": tokens}), subspaces.random(1, zoo.WIDTH)
    names = ["blocks.0.mixer.hook_out", "blocks.0.hook_mixer_out"]
    assert len({model.point(name).name for name in names}) == 1
    with pytest.raises(pl.InputError, match="twice"):
        pl.ablate(model, batch, dict.fromkeys(names, space), controls=0, refit=False)


def test_results_are_tables_figures_and_files(tmp_path: Path) -> None:
    model, batch = known()
    got = pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0)}, label="answer", controls=3)
    back = pl.AblationResult.load(got.save(tmp_path / "a.safetensors"))
    assert back.rows == got.rows
    assert torch.equal(back.values, got.values)
    table = got.to_dataframe()
    assert len(table) == len(got.rows) == 1 + 3 + 3 + 1 + 1
    assert len(got.plot().data) > 2


def test_the_same_seed_gives_the_same_result_and_leaves_the_global_state_alone() -> None:
    model, batch = known()
    state = torch.random.get_rng_state()
    one, two, other = (
        pl.ablate(model, batch, {"blocks.0.hook_resid_post": axes(0)}, label="answer", controls=4, seed=s)
        for s in (3, 3, 4)
    )
    assert one.rows == two.rows
    assert one.rows != other.rows
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_probe_that_found_nothing_has_an_empty_subspace_whose_ablation_costs_nothing() -> None:
    task = pl.tasks.Parity()
    model = pl.wrap(pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8)))
    held = task.sample(12, length=6, seed=1)
    found = pl.probe(pl.collect(model, task.sample(12, length=6), "layers"), held.labels, held.groups)
    blank = {key: torch.zeros_like(rows) for key, rows in found.coefs.items()}
    nothing = dataclasses.replace(found, coefs=blank)
    result = pl.ablate(model, held, nothing, directions="filter", label="state", controls=2, mlp=False)
    assert {row["rank"] for row in result.targets()} == {0}
    assert {row["drop"] for row in result.rows} == {0.0}


def test_copies_of_a_sequence_are_on_one_side_of_the_refit() -> None:
    """Labels at random: what a refitted probe reads on a copy, it has learned by heart."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2, (24, 10), generator=g).repeat_interleave(6, 0)
    labels = torch.randint(0, 2, (24, 10), generator=g).repeat_interleave(6, 0)
    model = pl.wrap(zoo.build("gru"))
    site = "blocks.1.hook_resid_post"
    d = model.cfg.d_model
    space = pl.Subspace(torch.eye(d)[:1], torch.zeros(d))
    found = pl.ablate(model, pl.tasks.Batch(tokens, {"y": labels}), {site: space}, label="y", metric="accuracy", target="y", controls=0, mlp=False)  # fmt: skip
    assert found.targets()[0]["refit_position_accuracy"] < 0.75


def test_a_model_at_chance_has_no_scale_for_a_loss() -> None:
    """Means that differ from chance by rounding alone: no damage, no effect, and no error."""
    clean = torch.tensor([0.4, 0.5, 0.6, 0.5], dtype=torch.float64)
    values = torch.stack([clean - 0.1, clean, clean])
    for chance in (0.5, 0.5 - 1e-16, 0.5 - 1e-9):
        rows: list[dict[str, object]] = [
            {"condition": "target", "site": "s", "damage": None, "drop": 0.1},
            *[{"condition": "random_matched", "site": "s", "damage": None, "drop": 0.0}] * 2,
        ]
        compare(rows, values, clean, chance, 0, 1, "max_t", 1.0)  # type: ignore[arg-type]
        assert rows[0]["effect"] is None
    compare(rows, values, clean, 0.25, 0, 1, "max_t", 1.0)  # type: ignore[arg-type]
    assert rows[0]["effect"] == pytest.approx(0.4)

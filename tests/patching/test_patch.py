"""Patching: equal to hand-written hooks, 1 and 0 where they must be, for every family."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import zoo

import probelens as pl

FAMILIES = ["neox", "gpt2", "mamba", "mamba2", "lstm", "gru", "lstm-fused", "gru-fused-time-first"]
N, LENGTH = 9, 6


def some_pairs(n: int = N, length: int = LENGTH) -> pl.PatchPairs:
    clean = zoo.tokens(n, length, seed=5)
    corrupted = clean.clone()
    edit = torch.arange(n) % (length - 2)
    rows = torch.arange(n)
    corrupted[rows, edit] = (clean[rows, edit] + 1) % zoo.VOCAB
    answers = torch.stack([torch.arange(n) % zoo.VOCAB, (torch.arange(n) + 3) % zoo.VOCAB], 1)
    return pl.PatchPairs(clean, corrupted, edit, torch.full((n,), length - 1) - rows % 2, answers)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> pl.HookedModel:
    return pl.wrap(zoo.build(request.param))


def by_hand(
    model: pl.HookedModel, pairs: pl.PatchPairs, site: str, pos: int | None, noise: bool = False
) -> torch.Tensor:
    """One full forward with a hand-written hook."""
    source, into = (pairs.corrupted, pairs.clean) if noise else (pairs.clean, pairs.corrupted)
    _, cache = model.run_with_cache(source, site)

    def hook(tensor: torch.Tensor, hook: pl.HookPoint) -> torch.Tensor:
        tensor = tensor.clone()
        where = slice(None) if pos is None else pos
        tensor[:, where] = cache[site][:, where]
        return tensor

    logits = model.run_with_hooks(into, [(site, hook)])[torch.arange(len(into)), pairs.read_pos]
    picked = logits.gather(1, pairs.answers)
    return picked[:, 0] - picked[:, 1]


def test_every_cell_equals_one_full_forward_with_a_hand_written_hook(model: pl.HookedModel) -> None:
    pairs = some_pairs()
    for mode in ("denoise", "noise"):
        got = pl.patch(model, pairs, "layers", mode=mode, batch_size=4)
        with torch.no_grad():
            for i, site in enumerate(got.sites):
                for j in range(LENGTH):
                    want = by_hand(model, pairs, site, j, mode == "noise")
                    assert torch.allclose(got.values[i, j], want, atol=1e-4), (site, j)
    assert got.path == "skip"
    assert got.values.std() > 0


def test_patching_everything_restores_one_and_nothing_restores_zero(model: pl.HookedModel) -> None:
    pairs = some_pairs()
    every = pl.patch(model, pairs, "layers", pos=None)
    assert torch.allclose(every.recovery(False), torch.ones(4, 1), atol=1e-4)
    same = pl.PatchPairs(pairs.corrupted, pairs.clean, pairs.edit_pos, pairs.read_pos, pairs.answers.flip(1))
    after = pl.patch(model, same, "blocks.2.hook_resid_post", pos=0)
    # The last layer at position 0 is read by nobody later.
    assert after.recovery(False).abs().max() == 0
    mirror = pl.patch(model, pairs, "layers", pos=None, mode="noise")
    assert torch.allclose(mirror.recovery(False), torch.ones(4, 1), atol=1e-4)


def test_the_last_residual_at_the_read_position_restores_exactly_one(model: pl.HookedModel) -> None:
    pairs = some_pairs()
    got = pl.patch(model, pairs, f"blocks.{zoo.LAYERS - 1}.hook_resid_post", pos=pairs.read_pos)
    assert torch.allclose(got.recovery(False), torch.ones(1, 1), atol=1e-4)
    assert got.positions == ["per example"]


def test_positions_in_every_form(model: pl.HookedModel) -> None:
    pairs, site = some_pairs(), "blocks.1.hook_resid_pre"
    each = pl.patch(model, pairs, site)
    assert each.positions == [str(i) for i in range(LENGTH)]
    assert torch.equal(pl.patch(model, pairs, site, pos=2).values[0, 0], each.values[0, 2])
    assert torch.equal(pl.patch(model, pairs, site, pos=-1).values[0, 0], each.values[0, -1])
    assert torch.equal(pl.patch(model, pairs, site, pos=slice(1, 3)).values[0], each.values[0, 1:3])
    assert torch.equal(pl.patch(model, pairs, site, pos=[0, 4]).values[0], each.values[0, [0, 4]])
    own = pl.patch(model, pairs, site, pos=pairs.edit_pos).values[0, 0]
    assert torch.allclose(own, each.values[0, pairs.edit_pos, torch.arange(N)], atol=1e-5)
    for bad in (LENGTH, "all", [], [99], torch.tensor([1, 2])):
        with pytest.raises(pl.ProbelensError):
            pl.patch(model, pairs, site, pos=bad)


def test_joint_sites_are_patched_in_one_run() -> None:
    model, pairs = pl.wrap(zoo.build("neox-sequential")), some_pairs()
    sites = ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out", "blocks.1.hook_resid_pre"]
    joint = pl.patch(model, pairs, sites, pos=None, joint=True)
    assert joint.sites == [" + ".join(sorted(sites, key=sites.index))]
    assert torch.allclose(joint.recovery(False), torch.ones(1, 1), atol=1e-4)
    alone = pl.patch(model, pairs, sites[:2], pos=None).recovery(False)
    assert (alone - 1).abs().max() > 1e-2


def test_recovery_is_a_ratio_of_means_over_pairs_both_runs_answer() -> None:
    result = pl.PatchResult(
        values=torch.tensor([[[1.0, 0.0, 9.0]]]), clean=torch.tensor([2.0, 6.0, 1.0]),
        corrupted=torch.tensor([-2.0, -2.0, 5.0]), correct=torch.tensor([True, True, False]),
        sites=["blocks.0.hook_resid_pre"], layers=[-1], positions=["0"],
    )  # fmt: skip
    # (mean(1, 0) − mean(−2, −2)) / (mean(2, 6) − mean(−2, −2)); a mean of ratios would be 0.5.
    assert torch.allclose(result.recovery(), torch.tensor([[2.5 / 6.0]]))
    assert torch.allclose(result.recovery(correct_only=False), torch.tensor([[3.0 / (3.0 - 1 / 3)]]))
    lo, hi = result.interval()
    assert lo.item() <= result.recovery().item() <= hi.item()


def test_no_correct_pair_and_no_gap_are_errors() -> None:
    kw = {"sites": ["hook_embed"], "layers": [-1], "positions": ["0"]}
    wrong = pl.PatchResult(torch.zeros(1, 1, 2), -torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), **kw)
    with pytest.raises(pl.MetricError, match="none of the 2 pairs"):
        wrong.recovery()
    flat = pl.PatchResult(torch.zeros(1, 1, 2), torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bool), **kw)
    with pytest.raises(pl.MetricError, match="no gap"):
        flat.recovery()


def test_a_gap_of_rounding_is_none_and_one_lost_among_the_pairs_is_said_to_be() -> None:
    kw = {"sites": ["hook_embed"], "layers": [-1], "positions": ["0"], "metric": "value"}
    gen = torch.Generator().manual_seed(0)
    clean, right = 1 + torch.rand(40, generator=gen), torch.ones(40, dtype=torch.bool)
    rounded = pl.PatchResult(torch.rand(1, 1, 40), clean, clean * (1 + 1e-7), right, **kw)
    with pytest.raises(pl.MetricError, match="up to rounding"):
        rounded.recovery()
    shift = torch.randn(40, generator=gen)
    either = pl.PatchResult(
        torch.rand(1, 1, 40), clean, clean + shift - shift.mean() + 0.01, right, **{**kw, "metric": "logit_diff"}
    )
    assert "Their gap, -0.01 [-0." in str(either)
    assert "can't be told from 0, so shares of it say nothing" in str(either)
    # The model's own number counts in the direction of each pair's gap, so that gaps of both signs don't cancel.
    signed = dataclasses.replace(either, metric="value")
    assert "can't be told" not in str(signed)
    gap = (clean - either.corrupted).double()
    want = ((either.values - either.corrupted).double() * gap.sign()).mean() / gap.abs().mean()
    assert signed.recovery().item() == pytest.approx(want.item(), rel=1e-6)
    clear = pl.PatchResult(torch.rand(1, 1, 40), clean, clean + shift.abs(), right, **kw)
    assert "can't be told" not in str(clear)


def test_attribution_is_exact_where_the_model_is_linear_and_close_for_small_changes() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(zoo.VOCAB, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.head = torch.nn.Linear(8, zoo.VOCAB)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids).cumsum(1)
            for layer in self.layers:
                x = layer(x).cumsum(1)
            return self.head(x)

    torch.manual_seed(0)
    model = pl.wrap(Sum().requires_grad_(False), blocks="layers", embed="embed", unembed="head")
    pairs = some_pairs()
    for mode in ("denoise", "noise"):
        exact = pl.patch(model, pairs, "layers", mode=mode)
        guess = pl.attribute(model, pairs, "layers", mode=mode)
        assert torch.allclose(exact.values, guess.values, atol=1e-3)
        assert torch.allclose(exact.clean, guess.clean, atol=1e-4)
        assert guess.kind == "attribution"
    neox = pl.wrap(zoo.build("neox", scale=0.5))
    exact, guess = (f(neox, pairs, "layers").recovery(False) for f in (pl.patch, pl.attribute))
    assert torch.corrcoef(torch.stack([exact.flatten(), guess.flatten()]))[0, 1] > 0.7


def test_metrics(tmp_path: Path) -> None:
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs()
    by_name = pl.patch(model, pairs, "resid_post")
    by_function = pl.patch(model, pairs, "resid_post", metric=lambda l, a: l.gather(1, a)[:, 0] - l.gather(1, a)[:, 1])
    assert torch.allclose(by_name.values, by_function.values)
    prob = pl.patch(model, pairs, "resid_post", metric="prob_diff")
    assert prob.values.abs().max() <= 1
    with pytest.raises(pl.InputError, match="logit_diff"):
        pl.patch(model, pairs, "resid_post", metric="logitdiff")  # type: ignore[arg-type]
    with pytest.raises(pl.ShapeError, match="one value for each example"):
        pl.patch(model, pairs, "resid_post", metric=lambda l, a: l)
    big = pl.PatchPairs(pairs.clean, pairs.corrupted, pairs.edit_pos, pairs.read_pos, pairs.answers + zoo.VOCAB)
    with pytest.raises(pl.InputError, match="23 logits"):
        pl.patch(model, big, "resid_post")
    with pytest.raises(pl.InputError, match="'denoise', 'noise'"):
        pl.patch(model, pairs, "resid_post", mode="both")  # type: ignore[arg-type]
    back = pl.PatchResult.load(by_name.save(tmp_path / "p.safetensors"))
    assert torch.equal(back.values, by_name.values)
    assert back.sites == by_name.sites
    table = by_name.to_dataframe(correct_only=False)
    assert len(table) == 3 * LENGTH
    assert (table["lo"] <= table["hi"]).all()
    assert len(by_name.plot(correct_only=False).data) >= 1


def test_which_pairs_are_answered_correctly_is_the_same_whatever_the_metric() -> None:
    """A log probability is below 0 in every run, a logit may be above: their signs say nothing about the answers."""
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs(n=40)
    with torch.no_grad():
        picked = [model(x)[torch.arange(40), pairs.read_pos] for x in (pairs.clean, pairs.corrupted)]
    best = torch.stack([logits.argmax(-1) for logits in picked], 1)
    differ = (best[:, 0] != best[:, 1]) & (torch.arange(40) % 2 == 0)
    pairs.answers[differ] = best[differ]
    prefers = [logits.gather(1, pairs.answers).argmax(1) for logits in picked]
    right = (prefers[0] == 0) & (prefers[1] == 1)
    assert 2 < right.sum() < 35

    def log_probability(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(1, answers[:, :1])[:, 0]

    def shifted(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        return log_probability(logits, answers) + 1000

    where = ("blocks.1.hook_resid_pre", 0)
    for call in (pl.patch, pl.attribute):
        for mode in ("denoise", "noise"):
            for metric in ("logit_diff", "prob_diff", log_probability, shifted):
                got = call(model, pairs, *where, mode, metric)  # type: ignore[operator]
                assert torch.equal(got.correct, right), (call, mode, metric)
        # What it counts decides the number.
        low, high = (call(model, pairs, *where, "noise", m) for m in (log_probability, shifted))  # type: ignore[operator]
        torch.testing.assert_close(low.recovery(), high.recovery(), rtol=1e-2, atol=1e-3)
        assert abs(low.recovery() - low.recovery(False)) > 1e-3
    # Answers that are no tokens can be those of a metric of one's own, and no run prefers them.
    none = pl.PatchPairs(pairs.clean, pairs.corrupted, pairs.edit_pos, pairs.read_pos, pairs.answers + zoo.VOCAB)
    total = pl.patch(model, none, *where, metric=lambda l, a: l.logsumexp(-1))
    assert not total.correct.any()
    assert total.values.std() > 0


def test_hooks_that_are_in_place_stay_in_place_during_a_sweep() -> None:
    model, pairs = pl.wrap(zoo.build("neox")), some_pairs()
    with model.hooks([("hook_embed", lambda t, hook: t * 0.5)]):
        got = pl.patch(model, pairs, "resid_pre")
        with torch.no_grad():
            want = by_hand(model, pairs, "blocks.1.hook_resid_pre", 2)
    assert got.path == "full"
    assert torch.allclose(got.values[1, 2], want, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "lstm", "gru"])
def test_state_points_are_patched_step_by_step(name: str) -> None:
    model, pairs = pl.wrap(zoo.build(name)), some_pairs()
    site = "ssm_state" if name.startswith("mamba") else "blocks.*.rnn.hook_h"
    names = [n for n in model.hook_dict if n.endswith(("hook_ssm_state", "rnn.hook_h", "rnn.hook_c"))]
    every = pl.patch(model, pairs, site, pos=None)
    assert every.values.shape == (zoo.LAYERS, 1, N)
    if not name.startswith("mamba"):
        # All states of all layers at all steps are all that a recurrent network has.
        joint = pl.patch(model, pairs, names, pos=None, joint=True)
        assert torch.allclose(joint.recovery(False), torch.ones(1, 1), atol=1e-4)
    own = pl.patch(model, pairs, names[0], pos=pairs.edit_pos)
    none = pl.patch(model, pairs, names[0], pos=torch.zeros(N, dtype=torch.long))
    assert not torch.allclose(own.values, none.values)


def test_a_sweep_takes_no_shortcut_where_something_goes_around_the_blocks() -> None:
    torch.manual_seed(0)
    model, pairs = pl.wrap(zoo.Around().eval()), some_pairs()
    got = pl.patch(model, pairs, ["layers", "blocks.1.hook_resid_pre"])
    with torch.no_grad():
        for i, site in enumerate(got.sites):
            assert torch.allclose(got.values[i, 1], by_hand(model, pairs, site, 1), atol=1e-5)


def test_the_last_block_alone_is_patched_where_a_projection_comes_after_it() -> None:
    # What this block returns is wider than what the final norm gets, so a run can't begin with the edited output.
    model = pl.wrap(zoo.more("opt-norm-after"))
    source, at = zoo.tokens(4, 8), torch.full((4,), 3)
    pairs = pl.PatchPairs(source, (source + 1) % zoo.VOCAB, at, at, torch.tensor([[0, 1]] * 4))
    found = pl.patch(model, pairs, ("resid_post", -1), pos="each")
    assert found.path == "resume"
    assert torch.allclose(found.values[0, 3], found.clean, atol=1e-5)
    rest = [pos for pos in range(8) if pos != 3]
    assert torch.allclose(found.values[0, rest], found.corrupted.expand(7, -1), atol=1e-5)
    assert not torch.allclose(found.clean, found.corrupted, atol=1e-3)

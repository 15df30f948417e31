"""Attribution beside exact patching: agreement cell by cell, and gradients at points that are called once a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from scipy.stats import pearsonr, spearmanr
from test_patch import N, some_pairs
from torch import Tensor

import probelens as pl
from probelens.errors import InputError


def result(recovery: Tensor, **kw: Any) -> pl.PatchResult:
    """A result with this recovery (site, pos): the clean run is 1, the corrupted 0, in every pair."""
    fields: dict[str, Any] = {
        "values": recovery[..., None].expand(-1, -1, 3), "clean": torch.ones(3), "corrupted": torch.zeros(3),
        "correct": torch.tensor([True, True, False]), "sites": [f"s{i}" for i in range(len(recovery))],
        "layers": list(range(len(recovery))), "positions": [str(i) for i in range(recovery.shape[1])],
    }  # fmt: skip
    return pl.PatchResult(**{**fields, **kw})


def noisy() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(4, 6, generator=gen)
    return exact, exact + 0.7 * torch.randn(4, 6, generator=gen)


def test_correlations_are_those_of_scipy_and_ties_share_their_rank() -> None:
    exact, guess = noisy()
    guess = guess.round(decimals=0)  # many ties
    got = result(exact).agreement(result(guess), top=5)
    a, b = exact.flatten().numpy(), guess.flatten().numpy()
    assert got["correlation"] == pytest.approx(pearsonr(a, b).statistic, abs=1e-6)
    assert got["rank_correlation"] == pytest.approx(spearmanr(a, b).statistic, abs=1e-6)
    assert got["max_difference"] == pytest.approx(abs(a - b).max(), abs=1e-6)
    assert got["mean_difference"] == pytest.approx(abs(a - b).mean(), abs=1e-6)
    assert got["cells"] == 24


def test_top_overlap_counts_the_largest_cells_of_either_sign() -> None:
    exact = torch.tensor([[5.0, -4.0, 0.1, 0.2], [3.0, 0.0, 0.3, 0.1]])
    guess = torch.tensor([[4.0, -5.0, 9.0, 0.2], [0.2, 0.0, 0.3, 0.1]])
    assert result(exact).agreement(result(guess), top=3)["top_overlap"] == pytest.approx(2 / 3)
    assert result(exact).agreement(result(guess), top=1)["top_overlap"] == 0
    every = result(exact).agreement(result(guess), top=99)
    assert (every["top_overlap"], every["top"]) == (1.0, 8)


def test_a_result_agrees_with_itself_and_not_with_its_mirror() -> None:
    exact, _ = noisy()
    same = result(exact).agreement(result(exact))
    assert same["correlation"] == pytest.approx(1)
    assert (same["max_difference"], same["top_overlap"]) == (0, 1)
    mirror = result(exact).agreement(result(-exact))
    assert mirror["correlation"] == pytest.approx(-1)
    assert mirror["rank_correlation"] == pytest.approx(-1)
    flat = result(exact).agreement(result(torch.ones(4, 6)))
    assert math.isnan(flat["correlation"])
    assert math.isnan(flat["rank_correlation"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sites": ["a", "b", "c", "d"]}, "different sites"),
        ({"positions": list("abcdef")}, "different positions"),
        ({"mode": "noise"}, "different mode"),
        ({"metric": "prob_diff"}, "different metric"),
        ({"tokens": torch.ones(3, 6).long()}, "different pairs"),
        ({"values": torch.zeros(4, 6, 2)}, "different pairs"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(change: dict[str, Any], text: str) -> None:
    exact = result(noisy()[0], tokens=torch.zeros(3, 6).long())
    with pytest.raises(InputError, match=text):
        exact.agreement(replace(exact, **change))
    with pytest.raises(InputError, match="top must be"):
        exact.agreement(exact, top=0)


def test_attribution_agrees_with_patching_where_the_model_is_tame_and_less_where_it_is_not() -> None:
    pairs = some_pairs()
    agreed = {}
    for scale in (1.0, 3.0):
        model = pl.wrap(zoo.build("mamba", scale=scale))
        exact, guess = (f(model, pairs, "layers") for f in (pl.patch, pl.attribute))
        agreed[scale] = exact.agreement(guess, correct_only=False)
    assert agreed[1.0]["correlation"] > 0.9
    assert agreed[1.0]["top_overlap"] > 0.7
    assert agreed[3.0]["correlation"] < agreed[1.0]["correlation"]
    assert agreed[3.0]["max_difference"] > agreed[1.0]["max_difference"]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("gru", "blocks.1.rnn.hook_h"), ("lstm-fused", "blocks.1.rnn.hook_c"), ("mamba", "blocks.1.mixer.hook_ssm_state"),
        ("mamba2", "blocks.1.mixer.hook_ssm_state"), ("gru", "blocks.1.rnn.hook_gate_z"),
        ("mamba", "blocks.1.mixer.hook_conv"), ("neox", "blocks.1.attn.hook_v"),
    ],
)  # fmt: skip
def test_attribution_is_the_derivative_of_patching_also_at_each_step_of_a_state(name: str, site: str) -> None:
    """Against a difference quotient: a hundredth of the patch at one position, either way."""
    model, pairs, eps = pl.wrap(zoo.build(name).double()), some_pairs(), 1e-2
    got = pl.attribute(model, pairs, site)
    effect = got.values[0] - got.corrupted
    _, clean = model.run_with_cache(pairs.clean, site)
    rows = torch.arange(N)

    def metric(pos: int, size: float) -> Tensor:
        def nudge(tensor: Tensor, hook: Any) -> Tensor:
            return tensor + size * (clean[site][:, pos] - tensor)

        with torch.no_grad():
            logits = model.run_with_hooks(pairs.corrupted, [(site, pl.at(pos, nudge))])[rows, pairs.read_pos]
        picked = logits.gather(1, pairs.answers)
        return picked[:, 0] - picked[:, 1]

    for pos in range(pairs.length):
        slope = (metric(pos, eps) - metric(pos, -eps)) / (2 * eps)
        torch.testing.assert_close(effect[pos].double(), slope.double(), rtol=2e-2, atol=2e-4)
    assert effect.abs().max() > 1e-3
    # Nothing after the position that is read has an effect.
    assert effect[-1][pairs.read_pos < pairs.length - 1].abs().max() == 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "granite", "opt", "mamba", "lstm-bidirectional", "gru"])
def test_attribution_is_the_derivative_at_every_point_that_a_model_advertises(name: str) -> None:
    """A difference quotient along clean − corrupted at all positions; also where a module splits its heads."""
    model, eps = pl.wrap(zoo.more(name).double()), 3e-3
    clean = zoo.tokens(2, 4, seed=5)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 1) % zoo.VOCAB
    read, answers = torch.full((2,), 3), torch.tensor([[0, 3], [1, 4]])
    sites = [site for site in model.hook_dict if not site.startswith("blocks.0.")]
    got = pl.attribute(model, pl.PatchPairs(clean, corrupted, torch.ones(2).long(), read, answers), sites, None)
    _, source = model.run_with_cache(clean)
    _, own = model.run_with_cache(corrupted)
    slopes = {}
    for site in sites:
        step = source[site] - own[site]

        def metric(size: float, site: str = site, step: Tensor = step) -> Tensor:
            def nudge(tensor: Tensor, hook: Any) -> Tensor:
                return tensor + size * (step if hook.pos is None else step[:, hook.pos])

            with torch.no_grad():
                picked = model.run_with_hooks(corrupted, [(site, nudge)])[:, -1].gather(1, answers)
            return picked[:, 0] - picked[:, 1]

        slopes[site] = (metric(eps) - metric(-eps)) / (2 * eps)
    for i, site in enumerate(sites):
        effect = (got.values[i, 0] - got.corrupted).double()
        torch.testing.assert_close(effect, slopes[site].double(), rtol=5e-3, atol=5e-4, msg=site)
    moving = [site for site in sites if slopes[site].abs().max() > 1e-3]
    assert len(moving) > 0.7 * len(sites), "the quotients are not zero themselves"
    assert name not in zoo.TRANSFORMERS or "blocks.1.attn.hook_z" in moving


def test_a_point_that_the_answer_does_not_depend_on_by_gradient_is_an_error_not_a_zero() -> None:
    class Cut(torch.nn.Module):
        def __init__(self, cut: bool) -> None:
            super().__init__()
            self.cut, self.embed = cut, torch.nn.Embedding(zoo.VOCAB, 4)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.head = torch.nn.Linear(4, zoo.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = self.layers[0](x.detach() if self.cut else x)
            return self.head(self.layers[1](x))

    pairs = some_pairs()
    for cut in (True, False):
        model = pl.wrap(Cut(cut), blocks="layers", embed="embed", unembed="head")
        assert pl.attribute(model, pairs, "blocks.1.hook_resid_pre").values.std() > 0
        if cut:
            with pytest.raises(InputError, match=r"gradient at 'hook_embed'.*Use patch\(\)"):
                pl.attribute(model, pairs, ["hook_embed", "blocks.1.hook_resid_pre"])
        else:
            assert pl.attribute(model, pairs, ["hook_embed", "blocks.1.hook_resid_pre"]).values.std() > 0

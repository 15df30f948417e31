"""What an ablation is compared with: how many draws, which are no control, adjusted p, and the words that follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_ablate import D, axes, known, target
from torch import Tensor, nn

import probelens as pl
from probelens import subspaces
from probelens.ablation.reading import moves_answers
from probelens.ablation.verdict import needed
from probelens.numerics.effects import effect
from probelens.running.collect import collect

SITES = ("hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre")


def counts(found: pl.AblationResult) -> dict[str, int]:
    """Draws by kind at the first site."""
    mine = [r["condition"] for r in found.rows if r["site"] == found.rows[0]["site"]]
    return {kind: mine.count(kind) for kind in dict.fromkeys(mine)}


# -- draws and p values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_sites", "options", "matched", "other"),
    [(1, {}, 20, 20), (3, {}, 99, 20), (3, {"adjust": "holm"}, 59, 20), (3, {"controls": 4}, 4, 4)],
)
def test_controls_are_as_many_as_the_sites_need(
    n_sites: int, options: dict[str, Any], matched: int, other: int
) -> None:
    model, batch = known(n=30)
    spaces = {site: axes(5) for site in SITES[:n_sites]}
    got = pl.ablate(model, batch, spaces, label="answer", refit=False, **options)
    assert counts(got) == {"target": 1, "random": other, "random_matched": matched, "pca": 1, "orthogonal_pca": 1}
    smallest = {"holm": n_sites / (matched + 1)}.get(options.get("adjust", ""), 1 / (matched + 1))
    if "controls" not in options:
        assert smallest <= 0.05, "a real effect can be significant"


@pytest.mark.parametrize("adjust", ["max_t", "holm"])
def test_adjusted_p_is_what_numpy_makes_of_the_rows(adjust: str) -> None:
    model, batch = known(n=40)
    spaces = {site: subspaces.random(2, D, seed=6 + i) for i, site in enumerate(SITES)}
    got = pl.ablate(
        model, batch, spaces, label="answer", refit=False, controls=12, adjust=adjust,  # type: ignore[arg-type]
    )  # fmt: skip
    table = []  # (site, 1 + draw)
    for row in got.targets():
        rows = [r for r in got.rows if (r["site"], r["condition"]) == (row["site"], row["effect_against"])]
        table.append([row["drop"], *(r["drop"] for r in sorted(rows, key=lambda r: r["draw"]))])
    costs = np.array(table)
    raw = (costs >= costs[:, :1] - 1e-12).mean(1)
    if adjust == "holm":
        order, worst, want = raw.argsort(kind="stable"), 0.0, np.empty(3)
        for i, site in enumerate(order):
            worst = max(worst, min(1.0, (3 - i) * raw[site]))
            want[site] = worst
    else:
        z = (costs - costs.mean(1, keepdims=True)) / costs.std(1, keepdims=True)
        left, worst, want = list((-z[:, 0]).argsort(kind="stable")), 0.0, np.empty(3)
        while left:
            site = left[0]
            worst = max(worst, (z[left].max(0) >= z[site, 0] - 1e-12).mean())
            want[site] = worst
            left.pop(0)
    assert [row["effect_p"] for row in got.targets()] == pytest.approx(raw.tolist())
    assert [row["effect_p_adjusted"] for row in got.targets()] == pytest.approx(np.maximum(want, raw).tolist())
    assert any(a > r for a, r in zip(want, raw, strict=True)), "three sites are not one"


def test_each_site_has_draws_of_its_own_also_where_sites_hold_the_same() -> None:
    model, batch = known(n=40)
    got = pl.ablate(
        model, batch, {site: axes(0, 5) for site in SITES}, label="answer", refit=False, controls=30, metric="accuracy"
    )
    for kind in ("random", "random_matched"):
        drops = [[r["drop"] for r in got.rows if (r["site"], r["condition"]) == (s, kind)] for s in SITES]
        assert [len(d) for d in drops] == [30, 30, 30]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert abs(np.corrcoef(drops[one], drops[other])[0, 1]) < 0.5, (kind, one, other)
    assert len({r["drop"] for r in got.targets()}) == 1, "the sites do hold the same"


def test_an_unknown_adjustment_is_refused() -> None:
    model, batch = known(n=10)
    with pytest.raises(pl.InputError, match="adjust='bonferroni' is not known. Allowed: 'max_t', 'holm'"):
        pl.ablate(model, batch, {SITES[0]: axes(0)}, label="answer", adjust="bonferroni")  # type: ignore[arg-type]


# -- which control -------------------------------------------------------------------------------------------


def test_components_orthogonal_to_a_subspace_are_those_of_numpy() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=gen, dtype=torch.float64) @ torch.randn(6, 6, generator=gen, dtype=torch.float64)
    space = subspaces.random(2, 6, seed=3)
    found = subspaces.orthogonal_pca(space, torch.cov(x.mT))
    left = (x - x.mean(0)).numpy() @ (np.eye(6) - space.basis.numpy().T @ space.basis.numpy())
    want = np.linalg.svd(left, full_matrices=False)[2][:2]
    np.testing.assert_allclose(np.abs(np.linalg.svd(found.basis.numpy() @ want.T)[1]), 1, atol=1e-9)
    assert found.overlap(space) < 1e-20
    with pytest.raises(pl.InputError, match="rank 6 of 6"):
        subspaces.orthogonal_pca(subspaces.random(6, 6), torch.eye(6))


def loud(gain: float) -> tuple[pl.HookedModel, pl.Batch]:
    """The known model with its two answer bits ``gain`` times as loud."""
    model, batch = known(n=80)
    with torch.no_grad():
        model.module.embed.weight[:, :2] *= gain  # type: ignore[union-attr, operator]
    return model, batch


def test_a_matched_control_that_contains_the_target_is_none_and_is_said_to_be_none() -> None:
    model, batch = loud(3.0)
    got = pl.ablate(model, batch, {SITES[1]: axes(0, 1)}, label="answer", refit=False)
    row = target(got)
    assert row["control_overlap"] > 0.3  # type: ignore[operator]
    assert "contain it and are no control" in row["control_problem"]  # type: ignore[operator]
    assert "No control of equal variance: random subspaces that remove as much variance share" in str(got)
    assert row["effect_against"] == "random"
    random = [r["damage"] for r in got.rows if r["condition"] == "random"]
    assert row["effect"] == pytest.approx(row["damage"] - sum(random) / len(random))  # type: ignore[operator]
    # Beyond random draws, and beyond the leading components that are orthogonal to it.
    assert row["damage_orthogonal_pca"] == 0.0
    assert row["needed"] == "yes"
    fewer = pl.ablate(
        model, batch, {SITES[1]: axes(0, 1)}, label="answer", refit=False, kinds=("random", "random_matched")
    )
    assert target(fewer)["needed"] == "can't tell", "nothing that removes much without the target is left"
    # The control: with quiet bits matched draws are a control.
    model, batch = loud(1.0)
    row = target(pl.ablate(model, batch, {SITES[1]: axes(0, 1)}, label="answer", refit=False))
    assert (row["effect_against"], row["control_problem"]) == ("random_matched", None)
    assert row["control_overlap"] < 0.3  # type: ignore[operator]


def test_a_value_that_a_removal_puts_in_is_no_need_of_the_direction() -> None:
    model, batch = known(n=80)
    x = pl.collect(model, batch, SITES[1])[SITES[1]][batch.mask]
    mean, q = x.mean(0), torch.eye(x.shape[-1])[:1]
    sd = float((x @ q[0]).std(correction=0))
    for far in (0.0, 0.5, 6.0):
        space = pl.Subspace(q, mean + far * sd * q[0])
        got = pl.ablate(model, batch, {SITES[1]: space}, label="answer", refit=False, controls=20)
        row = target(got)
        assert row["mean_shift"] == pytest.approx(far, abs=1e-4)
        if far > 1:
            assert row["needed"] == "can't tell"
            assert f"The subspace's mean is {far:.2f} standard deviations" in str(got)
        else:
            assert row["needed"] == "yes", "the control: the bit is read"
            assert "The subspace's mean is" not in str(got)


def test_the_overlap_stands_on_every_control() -> None:
    model, batch = known(n=30)
    got = pl.ablate(model, batch, {SITES[1]: axes(0, 1)}, label="answer", refit=False, controls=5)
    by = {kind: [r["control_overlap"] for r in got.rows if r["condition"] == kind] for kind in counts(got)}
    assert by["orthogonal_pca"] == [pytest.approx(0.0, abs=1e-12)]
    assert target(got)["control_overlap"] == pytest.approx(sum(by["random_matched"]) / 5)
    q = pl.subspaces.random(2, D, seed=0).basis
    assert by["random"][0] == pytest.approx(float(q[:, :2].square().sum()) / 2)


# -- is the site read ----------------------------------------------------------------------------------------


class Final(nn.Module):
    """An LSTM whose answer is read from its outputs, or from its final hidden state instead."""

    def __init__(self, state: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = nn.Embedding(2, 12), nn.LSTM(12, 12, 1, batch_first=True), nn.Linear(12, 2)
        self.state = state

    def forward(self, ids: Tensor) -> Tensor:
        out, (h, _) = self.rnn(self.embed(ids))
        return self.head(h[-1])[:, None].expand(-1, ids.shape[1], -1) if self.state else self.head(out)


@pytest.mark.parametrize("state", [True, False])
def test_a_site_whose_noise_changes_no_output_is_unread(state: bool) -> None:
    net = Final(state).eval()
    model = pl.wrap(net)
    ids = torch.randint(2, (40, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # answers in equal parts, so that there is something to lose
        net.head.bias[1] -= (net(ids)[:, 5] @ torch.tensor([-1.0, 1.0])).median()
        batch = pl.Batch(ids, {"answer": net(ids).argmax(-1)}, torch.arange(6).expand(40, 6) == 5)
    sites = ["hook_embed", "blocks.0.hook_resid_post"]
    got = pl.ablate(
        model, batch, {s: subspaces.random(2, 12) for s in sites}, label="answer", refit=False, controls=2
    )  # fmt: skip
    words = [row["verdict"] for row in got.targets()]
    assert words[0] != "unread"
    assert words[1] == ("unread" if state else "tautological")
    assert got.targets()[1]["needed"] == ("no" if state else "can't tell")
    assert ("noise there changes no output" in str(got)) == state


def test_a_site_that_is_read_at_some_positions_only_is_read() -> None:
    """Noise where labels count, at the first position alone, reaches what is answered later only through the state."""
    ids = torch.randint(2, (40, 6), generator=torch.Generator().manual_seed(1))
    model = pl.wrap(Final(False).eval())
    batch = pl.Batch(ids, {"answer": ids}, torch.arange(6).expand(40, 6) == 0)
    (row,) = pl.ablate(model, batch, {"hook_embed": subspaces.random(2, 12)}, refit=False, controls=0).targets()
    assert row["verdict"] != "unread"


def test_answers_that_move_say_that_a_site_is_read_and_rounding_does_not() -> None:
    clean, scored = torch.ones(10, 10), torch.ones(10, 10, dtype=torch.bool)
    rounded = clean + 1e-4 * torch.randn(3, 10, 10, generator=torch.Generator().manual_seed(0))
    few, more = rounded.clone(), rounded.clone()
    few[1, :2, :2] = 0.0  # 4 of 100
    more[2, :2, :3] = 0.0  # 6 of 100
    assert [moves_answers(values, clean, scored) for values in (rounded, few, more)] == [False, False, True]
    scored[:2] = False
    assert not moves_answers(more, clean, scored), "only scored answers count"
    assert not moves_answers(clean[None] * float("nan"), clean * float("nan"), scored)


# -- needed --------------------------------------------------------------------------------------------------

ROW = {
    "verdict": "erased", "effect": 0.5, "effect_lo": 0.4, "effect_hi": 0.6, "effect_p_adjusted": 0.01,
    "effect_against": "random_matched", "lo": 0.2, "hi": 0.3, "clean": 0.9, "chance": 0.4,
}  # fmt: skip
NULL = {"effect": 0.0, "effect_lo": -0.04, "effect_hi": 0.04, "effect_p_adjusted": 0.6}


def control(kind: str, overlap: float = 0.1, low: float = 0.0, high: float = 0.1) -> dict[str, Any]:
    return {"condition": kind, "control_overlap": overlap, "lo": low, "hi": high}


BESIDE = [control("random"), control("random_matched"), control("orthogonal_pca", 0.0)]


@pytest.mark.parametrize(
    ("change", "beside", "metric", "word"),
    [
        ({}, BESIDE, "accuracy", "yes"),
        ({"verdict": "inconclusive"}, BESIDE, "accuracy", "yes"),
        ({"effect_p_adjusted": 0.06}, BESIDE, "accuracy", "can't tell"),
        ({"effect_lo": -0.01}, BESIDE, "accuracy", "can't tell"),
        *(({"verdict": word}, BESIDE, "accuracy", "can't tell") for word in ("floor", "tautological", "absent")),
        ({"verdict": "unread"}, BESIDE, "accuracy", "no"),
        ({"effect_against": "random"}, BESIDE, "accuracy", "yes"),
        ({"effect_against": "random"}, [*BESIDE[:2], control("orthogonal_pca", 0.0, 0.1, 0.25)], "accuracy", "can't tell"),
        ({"effect_against": "random"}, BESIDE[:2], "accuracy", "can't tell"),
        (NULL, BESIDE, "accuracy", "no"),
        ({**NULL, "effect_hi": 0.06}, BESIDE, "accuracy", "can't tell"),
        ({**NULL, "effect_hi": 0.3, "lo": -0.01, "hi": 0.02}, BESIDE, "accuracy", "no"),
        ({**NULL, "effect_hi": 0.3, "lo": -0.01, "hi": 0.03}, BESIDE, "accuracy", "can't tell"),
        ({**NULL, "verdict": "inconclusive", "lo": -0.01, "hi": 0.02}, BESIDE, "accuracy", "can't tell"),
        ({**NULL, "verdict": "inconclusive"}, BESIDE, "accuracy", "can't tell"),
        ({**NULL, "verdict": "underpowered"}, BESIDE, "accuracy", "can't tell"),
        ({**NULL, "effect_against": "random"}, [control("random", 0.4)], "accuracy", "can't tell"),
        ({"association": 0.5, "given": None}, BESIDE, "accuracy", "can't tell"),
        ({"association": 0.5, "given": "y"}, BESIDE, "accuracy", "yes"),
        ({"effect": None}, BESIDE, "accuracy", "can't tell"),
        ({"effect": -0.5, "effect_lo": -0.6, "effect_hi": -0.4, "lo": -0.3, "hi": -0.2}, BESIDE, "next_token_loss", "yes"),
        ({}, BESIDE, "next_token_loss", "no"),
        ({"effect_p_adjusted": None}, BESIDE, len, "can't tell"),
    ],
)  # fmt: skip
def test_needed_by_hand(change: dict[str, Any], beside: list[dict[str, Any]], metric: Any, word: str) -> None:
    assert needed({**ROW, **change}, beside, metric) == word


def test_needed_where_the_truth_is_known() -> None:
    model, batch = known(n=200)
    spaces = {SITES[0]: axes(0, 1), SITES[1]: axes(4), SITES[2]: axes(0)}
    got = pl.ablate(model, batch, spaces, label="answer", mlp=False)
    read, idle, half = got.targets()
    assert read["needed"] == half["needed"] == "yes"
    assert idle["needed"] != "yes"
    assert idle["effect_p_adjusted"] > 0.05
    # The label is still read after an axis is gone that has nothing of it, so that it is unused isn't shown.
    assert (idle["verdict"], idle["needed"]) == ("inconclusive", "can't tell")


# -- ceilings and the worst site -----------------------------------------------------------------------------


def test_a_drop_of_zero_or_one_in_every_sequence_has_the_width_of_the_rule_of_three() -> None:
    model, batch = known(n=60)
    unseen = 1 - 0.025 ** (1 / 60)
    got = pl.ablate(model, batch, {SITES[1]: axes(5)}, label="answer", refit=False, controls=3)
    row = target(got)
    assert (row["drop"], row["lo"], row["hi"]) == (0.0, pytest.approx(-unseen), pytest.approx(unseen))
    assert row["effect_lo"] < -unseen < unseen < row["effect_hi"]  # type: ignore[operator]
    costs, room = torch.ones(60), torch.full((60,), 1.0)
    found = effect(costs, torch.zeros(5, 60), room, most=1.0)
    assert (found.estimate, found.low, found.high) == (1.0, pytest.approx(1 - unseen), pytest.approx(1 + unseen))
    assert effect(costs, torch.zeros(5, 60), room).low == 1.0, "without a limit nothing is known"
    gone = pl.Batch(batch.tokens & ~1, {"answer": batch.labels["answer"] & ~1})
    flipped = pl.Subspace(torch.eye(D)[:1], 9 * torch.eye(D)[0])
    lost = target(pl.ablate(model, gone, {SITES[1]: flipped}, label="answer", refit=False, controls=0))
    assert (lost["drop"], lost["lo"], lost["hi"]) == (1.0, pytest.approx(1 - unseen), 1.0)


def test_a_site_that_costs_no_more_than_its_control_is_not_the_worst() -> None:
    base = {
        "condition": "target", "chance": 0.5, "clean": 0.9, "rank": 1, "directions": "given", "variance": 0.5,
        "between_variance": None, "verdict": "inconclusive", "effect_against": "random_matched", "effect_p": 0.05,
        "effect_lo": -1.0, "effect_hi": 1.0, "needed": "can't tell",
    }  # fmt: skip
    embed = {**base, "site": "hook_embed", "layer": -1, "drop": 0.4, "lo": 0.3, "hi": 0.5, "effect": -0.1}
    block = {**base, "site": "b", "layer": 0, "drop": 0.2, "lo": 0.1, "hi": 0.3, "effect": 0.3}
    empty = torch.zeros(2, 3)

    def said(*rows: dict[str, Any]) -> str:
        return pl.AblationResult(list(rows), empty, empty[0], empty, empty[0], "y").findings()[1]

    assert said(embed, block).startswith("Costs most at layer 0 (b)")
    assert said(embed).startswith("No site costs more than its control; the largest is at the embedding")
    spans = [{**row, "length": 40, "span": "all", "damage": row["drop"], "floor": False} for row in (embed, block)]
    assert "Damage at layer 0 (b)" in pl.LengthTransfer(spans, "y", "y", 40).findings()[0]


def test_what_the_activations_are_is_collected_once_and_left_as_it_is() -> None:
    model, batch = known(n=30)
    before = collect(model, batch, SITES[1])[SITES[1]].clone()
    pl.ablate(model, batch, {SITES[1]: axes(0)}, label="answer", refit=False, controls=2)
    assert torch.equal(collect(model, batch, SITES[1])[SITES[1]], before)

"""What keeps an interchange from being fooled: illusions, unread sites, missing controls, pairs that depend on each other."""

from __future__ import annotations

import math

import pytest
import torch
import zoo
from scipy.stats import binomtest
from test_interchange import answers_by_hand, axis, known, own_pairs
from torch import nn

import probelens as pl
from probelens.examples import planted
from probelens.examples.planted import NEURONS, POST, SITE, illusory
from probelens.patching.interchange import CONTROLS, interchange
from probelens.patching.interchange_reader import reader_of
from probelens.patching.interchange_rows import share, verdict


def test_a_direction_of_a_dormant_and_an_unread_part_is_an_illusion_and_the_true_one_is_none() -> None:
    model, pairs = illusory()
    mixed = torch.zeros(1, NEURONS)
    mixed[0, 1:3] = math.sqrt(0.5)
    found = {
        name: interchange(model, pairs, {POST: pl.Subspace(rows, torch.zeros(NEURONS))}, pos=2, controls=5)
        for name, rows in {"mixed": mixed, "true": torch.eye(NEURONS)[:1]}.items()
    }
    row = found["mixed"].targets()[0]
    assert (row["iia"], row["illusory"], row["verdict"]) == (1.0, True, "illusory")
    by_kind = {r["condition"]: r for r in found["mixed"].rows}
    # By every other control the illusion looks used.
    assert by_kind["complement"]["iia"] == by_kind["row_space"]["iia"] == by_kind["null_space"]["iia"] == 0
    assert (by_kind["null_space"]["changed"], by_kind["row_space"]["rank"]) == (False, 1)
    assert by_kind["full"]["iia"] == 1
    row = found["true"].targets()[0]
    assert (row["iia"], row["illusory"], row["verdict"]) == (1.0, False, "used")
    assert "illusory at layer 0" in repr(found["mixed"])


def test_the_illusion_check_needs_a_plain_linear_layer_that_runs_as_it_is() -> None:
    class Other(nn.Linear):
        """May compute anything."""

    for family in ("gpt2", "llama", "neox", "gemma2"):
        model = pl.wrap(zoo.build(family))
        for name in ("blocks.1.mlp.hook_post", "blocks.1.attn.hook_z", "unembed.hook_in"):
            found = reader_of(model, name)
            assert found.basis is not None, found.why
            site = model.point(name).site
            assert site is not None
            module = model.module.get_submodule(site.path)
            matrix = module.weight.detach().double()
            matrix = matrix.mT if type(module).__name__ == "Conv1D" else matrix  # (out, in)
            rank = int(torch.linalg.matrix_rank(matrix.float()))
            assert found.basis.shape == (rank, matrix.shape[1])
            # What is left of the weight beside these directions is nothing.
            assert torch.allclose(matrix @ found.basis.mT @ found.basis, matrix, atol=1e-6)
        for name in ("blocks.1.hook_resid_post", "blocks.1.hook_mlp_out", "ln_final.hook_out"):
            assert reader_of(model, name).basis is None
    model = pl.wrap(zoo.build("llama"))
    mlp = model.module.model.layers[1].mlp
    mlp.down_proj.__class__ = Other
    assert "no plain linear layer" in reader_of(model, "blocks.1.mlp.hook_post").why


def test_a_row_says_why_it_has_no_illusion_check_and_false_where_all_is_read() -> None:
    model = pl.wrap(zoo.build("neox"))
    pairs = own_pairs(model)
    spaces = {name: pl.subspaces.random(2, zoo.WIDTH, seed=1) for name in ("blocks.1.hook_resid_post",)}
    (row,) = interchange(model, pairs, spaces, controls=0, kinds=()).targets()
    assert row["illusory"] is None
    assert "not the input of one linear map" in row["illusory_why"]
    # The weight of z is square and has full rank: nothing of it is unread.
    spaces = {"blocks.1.attn.hook_z": pl.subspaces.random(2, zoo.WIDTH, seed=1)}
    found = interchange(model, pairs, spaces, controls=0, kinds=())
    assert found.targets()[0]["illusory"] is False
    assert "row_space" not in {row["condition"] for row in found.rows}


@pytest.mark.parametrize("same", [True, False])
def test_an_answer_that_moves_between_runs_that_agree_is_not_used(same: bool) -> None:
    model, pairs = known()
    clean = pairs.clean
    other = clean.clone()
    other[:, -1] ^= 2 if same else 1  # another token of the same bit, or what is no such token
    at, bit = pairs.read_pos, other[:, -1] % 2
    agree = pl.PatchPairs(clean, other, at, at, torch.stack([1 - bit, bit], 1))
    row = interchange(model, pairs, {("resid_post", 0): axis(0)}, pos=2, same_pairs=agree).targets()[0]
    assert row["verdict"] == ("used" if same else "unspecific")
    assert row["why"] is None or "agree in the variable" in row["why"]


def test_without_a_control_nothing_is_called_used() -> None:
    model, pairs = known()
    site = "blocks.0.hook_resid_post"
    row = interchange(model, pairs, {site: axis(0)}, pos=2, controls=0, kinds=()).targets()[0]
    assert (row["iia"], row["verdict"], row["why"]) == (1.0, "no control", "no random subspace was drawn")
    # Components orthogonal to it alone don't say how often chance would do it.
    row = interchange(model, pairs, {site: axis(2)}, pos=2, controls=0).targets()[0]
    assert row["verdict"] == "used elsewhere"
    row = interchange(model, pairs, {site: axis(0)}, pos=2, controls=0, kinds=("orthogonal_pca",)).targets()[0]
    assert (row["iia"], row["verdict"]) == (1.0, "no control")
    # Half of the width: each random subspace shares about half of it.
    row = interchange(model, pairs, {site: axis(0, 2, 3)}, pos=2, kinds=("random",)).targets()[0]
    assert (row["iia"], row["verdict"]) == (1.0, "no control")
    assert "0.3 or more" in row["why"]
    # What does not work is said without any.
    row = interchange(model, pairs, {site: axis(2)}, pos=2, controls=0, kinds=()).targets()[0]
    assert row["verdict"] == "used elsewhere"


def test_a_share_of_independent_pairs_has_the_exact_binomial_interval() -> None:
    for k, n in ((0, 7), (3, 7), (7, 7), (120, 300)):
        hits = torch.arange(n) < k
        found = share(hits, torch.arange(n))
        exact = binomtest(k, n).proportion_ci(0.95, method="exact")
        assert (found["iia_lo"], found["iia_hi"]) == pytest.approx((exact.low, exact.high), abs=1e-12)
    assert share(torch.zeros(0), torch.zeros(0))["iia"] is None


def test_pairs_of_one_sequence_count_as_often_as_there_are_sequences() -> None:
    hits, groups = torch.ones(60).bool(), torch.arange(60) // 6
    alike = binomtest(10, 10).proportion_ci(0.95, method="exact")
    assert share(hits, groups)["iia_lo"] == pytest.approx(alike.low)
    # Copies: the interval of ten pairs, not of sixty, up to what few groups say about their variance.
    some = share((groups < 6), groups)
    ten = binomtest(6, 10).proportion_ci(0.95, method="exact")
    assert some["iia_hi"] - some["iia_lo"] >= 0.95 * (ten.high - ten.low)
    assert some["n_groups"] == 10


def test_intervals_over_groups_cover_and_those_that_ignore_them_do_not() -> None:
    gen = torch.Generator().manual_seed(0)
    groups = torch.arange(120) // 6
    covered = {"groups": 0, "ignored": 0}
    runs = 400
    for _ in range(runs):
        # Sequences differ in how often their pairs follow: the mean is 0.5.
        chance = torch.rand(20, generator=gen)
        hits = torch.rand(120, generator=gen) < chance[groups]
        for name, of in (("groups", groups), ("ignored", torch.arange(120))):
            row = share(hits, of)
            covered[name] += row["iia_lo"] <= 0.5 <= row["iia_hi"]
    assert covered["groups"] / runs >= 0.93
    assert covered["ignored"] / runs < 0.9


def test_groups_are_given_or_those_of_equal_clean_sequences() -> None:
    model, pairs = known()
    space = {("resid_post", 0): axis(0)}
    row = interchange(model, pairs, space, pos=2, controls=0, kinds=()).targets()[0]
    assert (row["n"], row["n_groups"]) == (120, len({tuple(x) for x in pairs.clean.tolist()}))
    row = interchange(model, pairs, space, pos=2, controls=0, kinds=(), groups=torch.arange(120) // 60).targets()[0]
    assert (row["n_groups"], row["iia_lo"]) == (2, pytest.approx(0.025**0.5))
    with pytest.raises(pl.ShapeError, match="120"):
        interchange(model, pairs, space, groups=torch.arange(3))


def test_probes_give_the_directions_by_name_and_rows_say_what_they_carry() -> None:
    model = pl.wrap(zoo.build("neox"))
    tokens = zoo.tokens(150, 6)
    acts = pl.collect(model, tokens, "resid_post")
    probes = pl.probe(acts, {"a": tokens % 3, "b": tokens % 2})
    pairs = own_pairs(model)
    site, kw = "blocks.1.hook_resid_post", {"controls": 1, "kinds": ("random",)}
    for definition in (None, "pattern", "filter", "leace"):
        found = interchange(model, pairs, probes, site, directions=definition, label="a", rank=1, **kw)
        spaces = pl.subspaces.directions(probes, "a", definition or "class_means", rank=1)
        given = interchange(model, pairs, spaces, site, **kw)
        assert torch.equal(found.followed, given.followed)
        (row,), (other,) = found.targets(), given.targets()
        assert (row["directions"], other["directions"]) == (definition or "class_means", spaces[site].label)
        space = spaces[site]
        clean, corrupted = (model.run_with_cache(x, site)[1][site].double() for x in (pairs.clean, pairs.corrupted))
        change = clean - corrupted
        part = change @ space.basis.mT if definition != "leace" else change @ space.right.mT @ space.left.mT
        assert row["variance"] == pytest.approx(float(part.square().sum() / change.square().sum()), rel=1e-4)
        assert other["between_variance"] is None
        if definition != "filter":
            assert 0 < row["between_variance"] <= 1 + 1e-9
    assert "rank 1 (leace, " in repr(found)
    with pytest.raises(pl.InputError, match="Give one of them"):
        interchange(model, pairs, probes, site)
    for wrong in ({"directions": "filter"}, {"label": "a"}, {"rank": 1}):
        with pytest.raises(pl.InputError, match="a mapping of subspaces"):
            interchange(model, pairs, spaces, site, **wrong)
    with pytest.raises(pl.InputError, match="got a Subspace"):
        interchange(model, pairs, axis(0), site)


def test_single_heads_are_interchanged_and_leave_the_others() -> None:
    model = pl.wrap(zoo.build("neox"))
    pairs = own_pairs(model)
    site, wide = "blocks.1.attn.hook_z", zoo.WIDTH // zoo.HEADS
    space = pl.subspaces.random(2, wide, seed=3)
    found = interchange(model, pairs, {("z", 1): {0: space, 2: space}}, pos=5, controls=2, kinds=("random",))
    assert {row["head"] for row in found.rows} == {0, 2}
    for row, got in zip(found.rows, found.followed, strict=True):
        if row["condition"] in ("random", "noise"):
            continue
        part, eye = space.basis.mT @ space.basis, torch.eye(wide).double()
        inner = {"target": part, "complement": eye - part, "full": eye}[row["condition"]]
        matrix = torch.zeros(zoo.WIDTH, zoo.WIDTH).double()
        here = slice(row["head"] * wide, (row["head"] + 1) * wide)
        matrix[here, here] = inner
        assert torch.equal(got, answers_by_hand(model, pairs, site, matrix, 5)), row
    with pytest.raises(pl.InputError, match="allowed are 0 to 3"):
        interchange(model, pairs, {("z", 1): {4: space}})
    with pytest.raises(pl.InputError, match="no heads"):
        interchange(model, pairs, {("resid_post", 1): {0: space}})
    with pytest.raises(pl.ShapeError, match="in head 0"):
        interchange(model, pairs, {("z", 1): {0: pl.subspaces.random(2, zoo.WIDTH, seed=3)}})


@pytest.mark.parametrize(
    ("family", "name"),
    [("neox", "hook_resid_mid"), ("llama", "hook_attn_out"), ("mamba", "mixer.hook_out"), ("mamba2", "mixer.hook_ssm_state"),
     ("gru", "rnn.hook_h"), ("lstm", "rnn.hook_c"), ("llama", "mlp.hook_post")],
)  # fmt: skip
def test_every_kind_of_site_takes_every_kind_of_position(family: str, name: str) -> None:
    model = pl.wrap(zoo.build("neox-sequential" if name == "hook_resid_mid" else family))
    pairs = own_pairs(model, 8)
    site = f"blocks.1.{name}"
    width = model.run_with_cache(pairs.clean, site)[1][site].flatten(2).shape[-1]
    space = pl.subspaces.random(width - 2, width, seed=1)
    kw = {"controls": 0, "kinds": ()}
    each = interchange(model, pairs, {site: space}, pos="each", **kw)
    of = {(r["condition"], r["pos"]): f for r, f in zip(each.rows, each.followed, strict=True)}
    places = torch.arange(len(pairs)) % pairs.length
    by_example = interchange(model, pairs, {site: space}, pos=places, **kw)
    for row, got in zip(by_example.rows, by_example.followed, strict=True):
        if row["condition"] in ("target", "complement", "full", "noise"):
            want = torch.stack([of[row["condition"], str(int(p))][i] for i, p in enumerate(places)])
            assert torch.equal(got, want), row
    one = interchange(model, pairs, {site: space}, pos=-1, **kw)
    assert torch.equal(one.followed[0], of["full", str(pairs.length - 1)])
    whole = interchange(model, pairs, {site: space}, pos=None, **kw)
    assert torch.equal(whole.followed[0], answers_by_hand(model, pairs, site, torch.eye(width), None))


def test_noise_and_what_it_says_do_not_depend_on_batches() -> None:
    model, pairs = known()
    two = [
        interchange(model, pairs, {("resid_post", 0): axis(0)}, pos="each", controls=1, batch_size=size).rows
        for size in (7, 64)
    ]
    for a, b in zip(*two, strict=True):
        assert a == {**b, "recovery": a["recovery"]}
        assert a["recovery"] == pytest.approx(b["recovery"], abs=1e-4)


def test_random_targets_are_seldom_called_used() -> None:
    """What is interchanged is itself a draw of the control; the answer can be moved by few directions only."""
    model, pairs = known()
    said = []
    for i in range(40):
        space = pl.subspaces.random(1, 6, seed=10_000 + i)
        found = interchange(model, pairs, {("resid_post", 0): space}, pos=2, seed=i, kinds=("random",))
        row = found.targets()[0]
        said.append((row["verdict"] == "used", row["p_adjusted"] <= 0.05))
    assert sum(used for used, _ in said) <= 3
    assert sum(small for _, small in said) <= 6  # 1 of 20, with the 99 % bound of 40


def test_a_verdict_that_rests_on_the_illusion_check_waits_for_it() -> None:
    def row(condition: str, low: float, high: float, **more: object) -> dict[str, object]:
        shared = {
            "condition": condition,
            "rank": 1,
            "iia": (low + high) / 2,
            "iia_lo": low,
            "iia_hi": high,
            "changed": True,
        }
        return {**shared, "control_overlap": None, **more}

    four = [row("full", 0.98, 1), row("complement", 0, 0.02), row("random", 0, 0.02), row("row_space", 0.3, 0.7)]
    unread = row("null_space", 0, 0.02, changed=False)
    target = row("target", 0.9, 1, illusory=None, illusory_why="too wide")
    assert verdict([target, *four, unread]) == ("underpowered", "too wide")
    assert verdict([{**target, "illusory": False}, *four, unread])[0] == "used"
    assert verdict([{**target, "illusory": True}, *four, unread])[0] == "illusory"
    # Where the null space moves the output, the map is not the only reader, and there is no check.
    assert verdict([target, *four, {**unread, "changed": True}])[0] == "used"


@pytest.mark.parametrize(
    ("interval", "word", "readable"),
    [((0.60, 0.65), "used", "yes"), ((0.50, 0.52), "unreadable", "no"), ((0.50, 0.56), "underpowered", "can't tell")],
)
def test_where_the_probe_reads_no_more_than_a_guess_its_class_means_are_not_used(
    interval: tuple[float, float], word: str, readable: str
) -> None:
    # z goes with y, which the model uses, so the class means of z differ along y.
    made = planted.unused()
    y = made.fit.labels["y"]
    z = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.6, y, 1 - y)
    probes = pl.probe(pl.collect(made.model, made.fit, SITE), {"z": z}, made.fit.groups, mask=made.fit.mask, tokens=y)
    probes.rows[0] |= {"majority": 0.5, "position": 0.5, "last_w": 0.51, "lo": interval[0], "hi": interval[1]}
    found = pl.interchange(made.model, made.pairs(lambda t: t ^ 1), probes, pos=planted.LENGTH - 1, controls=5)
    (row,) = found.targets()
    assert (row["verdict"], row["readable"]) == (word, readable)
    assert row["iia_lo"] > 0.9, "the answer follows all the same"
    assert word == "used" or "probe" in row["why"]
    # The only reader's subspace is one of sixteen directions, which equal variance can't avoid.
    left = {kind: [r["control_overlap"] for r in found.rows if r["condition"] == kind] for kind in CONTROLS}
    said = [f"{sum(o >= 0.3 for o in all_)} of {len(all_)} {kind}" for kind, all_ in left.items() if max(all_) >= 0.3]
    assert said
    assert row["controls_left_out"] == ", ".join(said)
    assert f"so are left out: {row['controls_left_out']} at layer 0, position 11." in str(found)


def test_where_no_control_contains_the_subspace_none_is_said_to_be_left_out() -> None:
    made = planted.unused()
    wide = pl.subspaces.random(1, planted.WIDTH, seed=3)
    found = pl.interchange(
        made.model, made.pairs(lambda t: t ^ 1), {SITE: wide}, pos=planted.LENGTH - 1, controls=1, kinds=("orthogonal_pca",)
    )  # fmt: skip
    assert found.targets()[0]["controls_left_out"] is None
    assert found.targets()[0]["readable"] is None
    assert "left out" not in str(found)


def test_pairs_said_to_agree_that_differ_are_noticed() -> None:
    made = planted.unused()
    space = pl.subspaces.class_means(made.acts(made.fit), made.fit.labels["y"])
    pairs, alike = made.pairs(lambda t: t ^ 1), made.held.tokens.clone()
    alike[:, -1] ^= 2  # z, which nothing reads
    y, at = made.held.labels["y"][:, -1], torch.full((len(alike),), planted.LENGTH - 1)
    same = pl.PatchPairs(alike, made.held.tokens, at, at, torch.stack([1 - y, y], 1))
    for other, stays, anyway in ((same, 1.0, 1.0), (pairs, 0.0, 0.0)):
        found = pl.interchange(
            made.model, pairs, {SITE: space}, same_pairs=other, pos=planted.LENGTH - 1, controls=3, kinds=("random",)
        )  # fmt: skip
        row = found.find(condition="same_value")
        assert (row["iia"], row["stays_anyway"]) == (stays, anyway)
    assert found.targets()[0]["verdict"] == "unspecific"
    assert found.targets()[0]["why"].endswith(
        "if they do: the model itself answers most of their clean sides otherwise"
    )


def test_pairs_that_the_model_does_not_answer_so_are_not_too_few() -> None:
    made = planted.unused()
    space = pl.subspaces.class_means(made.acts(made.fit), made.fit.labels["y"])
    pairs, alike = made.pairs(lambda t: t ^ 1), made.held.tokens.clone()
    alike[:, -1] ^= 2
    y, at = made.held.labels["y"][:, -1], torch.full((len(alike),), planted.LENGTH - 1)
    wrong = pl.PatchPairs(alike, made.held.tokens, at, at, torch.stack([y, 1 - y], 1))
    found = pl.interchange(
        made.model, pairs, {SITE: space}, same_pairs=wrong, pos=planted.LENGTH - 1, controls=3, kinds=("random",)
    )
    row = found.targets()[0]
    assert found.find(condition="same_value")["n"] == 0
    assert (row["verdict"], row["why"]) == (
        "underpowered", "the model answers no pair that agrees in the variable as the pairs say",
    )  # fmt: skip


def test_logits_of_nan_are_named_and_not_called_wrong_answers() -> None:
    model, pairs = known()
    with torch.no_grad():
        model.module.head.weight[0, 0] = float("nan")
    with pytest.raises(pl.MetricError, match="NaN in 240 of 240 runs"):
        interchange(model, pairs, {"blocks.0.hook_resid_post": axis(0)}, pos=2, controls=1)
    with pytest.raises(pl.MetricError, match="NaN in 240 of 240 runs"):
        pl.das(model, pairs, "blocks.0.hook_resid_post", 2, 1, steps=1)

"""patch_sites: what must be 0 or 1 is, on every family, and the rest equals runs chained through real caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, MetricError, ShapeError
from probelens.patching.final_layer import LETTERS, PatchSitesResult, patch_sites

N, LENGTH = 8, 11
SSMS = ("mamba", "mamba2")
RNNS = ("lstm", "gru", "lstm-fused", "gru-fused-time-first")


def some_pairs(n: int = N, length: int = LENGTH) -> pl.PatchPairs:
    clean = zoo.tokens(n, length, seed=5)
    corrupted, rows, edit = clean.clone(), torch.arange(n), torch.arange(n) % 4
    corrupted[rows, edit] = (clean[rows, edit] + 1) % zoo.VOCAB
    answers = torch.stack([rows % zoo.VOCAB, (rows + 3) % zoo.VOCAB], 1)
    return pl.PatchPairs(clean, corrupted, edit, torch.full((n,), length - 1) - rows % 2, answers)


def measured(name: str, **kw: Any) -> PatchSitesResult:
    return patch_sites(pl.wrap(zoo.build(name)), some_pairs(), correct_only=False, n_boot=50, batch_size=5, **kw)


def diff(logits: Tensor, answers: Tensor) -> Tensor:
    picked = logits.gather(1, answers)
    return picked[:, 0] - picked[:, 1]


@pytest.mark.parametrize("mode", ["denoise", "noise"])
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_what_the_architecture_forces_comes_out_exactly_and_the_rest_does_not(name: str, mode: Any) -> None:
    result = measured(name, mode=mode)
    forced = {"A": 1, "B": 0, "F": 1}
    if name in SSMS + RNNS:
        forced["I"] = 1
    for site, value in forced.items():
        assert result.row(site)["applicable"], site
        assert result.row(site)["expected"] == value
        assert result.recovery(site) == pytest.approx(value, abs=1e-4), site
        assert result.row(site)["holds"]
    assert result.ok
    # The control: sites that aren't forced are neither 0 nor 1 on random weights.
    for site in ("D", "J"):
        assert result.row(site)["expected"] is None
        assert min(abs(result.recovery(site) - v) for v in (0, 1)) > 1e-3, site


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_sites_that_a_family_does_not_have_say_why(name: str) -> None:
    result = measured(name)
    absent = {row["site"]: row["why"] for row in result.rows if not row["applicable"]}
    if name in SSMS:
        assert not absent
    elif name in RNNS:
        assert list(absent) == ["H+conv"]
        assert "no convolution" in absent["H+conv"]
        assert result.row("C")["why"].startswith("a recurrent layer has no residual path")
        assert result.recovery("C") == pytest.approx(1, abs=1e-4)
    elif "bidirectional" in name:
        assert list(absent) == ["H", "H+conv", "I"]
        assert "both directions" in absent["I"]
    else:
        assert list(absent) == ["H", "H+conv", "I"]
        assert "block 2 has no state point" in absent["H"]
        with pytest.raises(InputError, match="keys and values"):
            result.recovery("H")


# -- against runs that never see a hook ---------------------------------------------------------------------


def continued(name: str, pair: tuple[Tensor, Tensor], m: int, read: int, mix: Callable[..., None]) -> Tensor:
    """Logits at ``read`` of the corrupted run, whose state after m was changed by ``mix(corrupted, clean)``.

    Mamba and Mamba-2 go on from transformers' own cache, recurrent layers from torch's own states.
    """
    module = zoo.build(name)
    with torch.no_grad():
        if name in SSMS:
            caches = [module(tokens[:, : m + 1], use_cache=True).cache_params for tokens in pair]
            mix(*caches)
            key = "cache" if "cache" in inspect.signature(module.forward).parameters else "cache_params"
            for t in range(m + 1, read + 1):
                out = module(pair[0][:, t : t + 1], use_cache=True, **{key: caches[0]})
            return out.logits[:, 0]
        states = []
        for tokens in pair:
            x, held = module.embed(tokens[:, : m + 1]), []
            for layer in module.layers:
                x, state = layer(x)
                held.append(state)
            states.append(held)
        mix(*states)
        x = module.embed(pair[0][:, m + 1 : read + 1])
        for layer, state in zip(module.layers, states[0], strict=True):
            x, _ = layer(x, state)
        return module.head(x)[:, -1]


def mixing(site: str) -> Callable[[Any, Any], None]:
    """What site H, H+conv or I puts from the clean run's state into the corrupted run's."""

    def inner(held: Any) -> Tensor:
        return held[0] if isinstance(held, (dict, list)) else held

    def mix(into: Any, source: Any) -> None:
        if isinstance(into, list):
            for i in range(len(into)) if site == "I" else [-1]:
                into[i] = source[i]
            return
        layers = list(zip(into.layers, source.layers, strict=True))
        for mine, theirs in layers if site in ("I", "I without conv") else layers[-1:]:
            inner(mine.recurrent_states).copy_(inner(theirs.recurrent_states))
            if site in ("I", "H+conv"):
                inner(mine.conv_states).copy_(inner(theirs.conv_states))

    return mix


@pytest.mark.parametrize("name", [*SSMS, "lstm", "gru"])
def test_state_sites_equal_a_run_continued_from_a_cache(name: str) -> None:
    pairs = some_pairs()
    model = pl.wrap(zoo.build(name))
    result = patch_sites(model, pairs, which="HI", correct_only=False, n_boot=50)
    sites = ["H", "H+conv", "I"] if name in SSMS else ["H", "I"]
    for site in sites:
        got = result.values[result.sites.index(site)]
        for i in range(N):
            pair = (pairs.corrupted[i : i + 1], pairs.clean[i : i + 1])
            m, read = int(result.pos[i]), int(result.read_pos[i])
            want = diff(continued(name, pair, m, read, mixing(site)), pairs.answers[i : i + 1])
            assert torch.allclose(got[i], want[0], atol=1e-4), (site, i)
    if name in SSMS:
        assert abs(result.recovery("H") - result.recovery("H+conv")) > 1e-3
        # All states without what the convolutions remember aren't everything.
        gaps = []
        for i in range(N):
            pair = (pairs.corrupted[i : i + 1], pairs.clean[i : i + 1])
            m, read = int(result.pos[i]), int(result.read_pos[i])
            less = diff(continued(name, pair, m, read, mixing("I without conv")), pairs.answers[i : i + 1])
            gaps.append(float((less - result.clean[1, i]).abs()))
        assert max(gaps) > 1e-2


@pytest.mark.parametrize("name", ["neox", "mamba", "lstm-fused"])
def test_residual_sites_equal_hand_written_hooks(name: str) -> None:
    model, pairs, last = pl.wrap(zoo.build(name)), some_pairs(), zoo.LAYERS - 1
    result = patch_sites(model, pairs, correct_only=False, n_boot=50)
    rows, m, read = torch.arange(N), result.pos, result.read_pos
    at_m = torch.arange(LENGTH) == m[:, None]
    to_read = (torch.arange(LENGTH) >= m[:, None]) & (torch.arange(LENGTH) <= read[:, None])
    entering, after = f"blocks.{last}.hook_resid_pre", f"blocks.{last}.hook_resid_post"
    every = [*(f"blocks.{i}.hook_resid_pre" for i in range(zoo.LAYERS)), after]
    mixer = {"neox": f"blocks.{last}.hook_attn_out", "mamba": f"blocks.{last}.hook_mixer_out"}.get(name, after)
    _, cache = model.run_with_cache(pairs.clean, [*every, mixer])
    at_t = pairs.answers
    own = result.answers_at_pos
    for site, names, where, read_at, answers in [
        ("A", [after], at_m, m, own), ("B", [after], at_m, read, at_t), ("C", [mixer], at_m, m, own),
        ("D", [entering], at_m, m, own), ("E", [entering], at_m, read, at_t), ("F", [after], to_read, read, at_t),
        ("G", [entering], to_read, read, at_t), ("J", every, at_m, read, at_t),
    ]:  # fmt: skip

        def put(tensor: Tensor, hook: Any, where: Tensor = where) -> Tensor:
            return torch.where(where[..., None], cache[hook.name], tensor)

        with torch.no_grad():
            logits = model.run_with_hooks(pairs.corrupted, [(n, put) for n in names])[rows, read_at]
        want = diff(logits, answers)
        assert torch.allclose(result.values[result.sites.index(site)], want, atol=1e-4), site
    with torch.no_grad():
        clean, corrupted = model(pairs.clean), model(pairs.corrupted)
    assert torch.allclose(result.clean[1], diff(clean[rows, read], at_t), atol=1e-4)
    assert torch.allclose(result.corrupted[0], diff(corrupted[rows, m], own), atol=1e-4)


def test_recovery_is_a_ratio_of_means_with_the_interval_of_patch() -> None:
    """B and E as ``patch`` computes them, cell and interval."""
    model, pairs = pl.wrap(zoo.build("mamba")), some_pairs()
    result = patch_sites(model, pairs, which="BE", correct_only=False, n_boot=200, seed=3)
    for site, name in (("B", "blocks.2.hook_resid_post"), ("E", "blocks.2.hook_resid_pre")):
        one = pl.patch(model, pairs, name, pos=result.pos)
        low, high = one.interval(correct_only=False, n_boot=200, seed=3)
        row = result.row(site)
        assert row["recovery"] == pytest.approx(one.recovery(False).item(), abs=1e-5)
        assert (row["lo"], row["hi"]) == pytest.approx((low.item(), high.item()), abs=1e-4)
        assert row["n"] == N


def test_forced_sites_hold_on_formal_models_of_one_layer() -> None:
    """With one layer, what enters the last block is the embedding."""
    for arch in ("transformer", "mamba", "mamba2", "lstm", "gru"):
        task = pl.tasks.Parity()
        config = pl.models.FormalConfig.for_task(arch, task, n_layers=1, d_model=32)
        model = pl.wrap(pl.models.build(config))
        result = patch_sites(model, task.pairs(6, length=9), correct_only=False, n_boot=20)
        assert result.ok, arch
        assert result.row("I")["applicable"] == (arch != "transformer")


def test_a_readout_that_mixes_positions_is_noticed() -> None:
    class Mixed(torch.nn.Module):
        """What follows the last block sums over positions, so the last residual at m does reach T."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(zoo.VOCAB, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.head = torch.nn.Linear(8, zoo.VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x).cumsum(1)
            return self.head(x)

    torch.manual_seed(0)
    model = pl.wrap(Mixed(), "generic", blocks="layers", embed="embed", unembed="head")
    result = patch_sites(model, some_pairs(), pos=some_pairs().edit_pos, correct_only=False, n_boot=20)
    assert result.row("B")["holds"] is False
    assert not result.ok
    assert result.recovery("B") > 0.05
    assert "no state point" in result.row("I")["why"]
    assert "mixer" in result.row("C")["why"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jamba", "block 1 has no state point; through its attention"),
        ("zamba2", "block 1 has attention beside its recurrent state"),
        ("rwkv", "beside its state, block 0 carries the position before"),
        ("lfm2", "block 0 has no state point (hook"),
        ("falcon-mamba", None),
    ],
)
def test_only_a_model_whose_states_are_all_that_is_carried_has_site_i(name: str, why: str | None) -> None:
    result = patch_sites(pl.wrap(zoo.more(name)), some_pairs(), correct_only=False, n_boot=20)
    assert result.ok
    if why is None:
        assert result.recovery("I") == pytest.approx(1, abs=1e-4)
    else:
        assert result.row("I")["why"].startswith(why)


# -- where, which, what is counted ---------------------------------------------------------------------------


def test_m_is_halfway_unless_given() -> None:
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs()
    kw: dict[str, Any] = {"which": "E", "correct_only": False, "n_boot": 20}
    assert torch.equal(patch_sites(model, pairs, **kw).pos, (pairs.edit_pos + pairs.read_pos) // 2)
    five = patch_sites(model, pairs, 5, **kw)
    assert five.pos.tolist() == [5] * N
    assert torch.equal(patch_sites(model, pairs, 5 - LENGTH, **kw).values, five.values)
    own = patch_sites(model, pairs, pairs.edit_pos, **kw)
    assert torch.equal(own.pos, pairs.edit_pos)
    assert not torch.allclose(own.values, five.values)


def test_m_where_the_pair_still_differs_or_is_already_read_is_refused() -> None:
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs()
    with pytest.raises(InputError, match=r"m=2 for pair 3: this pair last differs at 3 and is read at 9"):
        patch_sites(model, pairs, 2)
    with pytest.raises(InputError, match=r"m must be from 0 to 9"):
        patch_sites(model, pairs, LENGTH - 1)
    with pytest.raises(ShapeError, match=r"\(8,\) with one for each pair"):
        patch_sites(model, pairs, torch.tensor([4, 4]))
    late = pairs.corrupted.clone()
    late[:, 6] = (late[:, 6] + 1) % zoo.VOCAB
    twice = pl.PatchPairs(pairs.clean, late, pairs.edit_pos, pairs.read_pos, pairs.answers)
    with pytest.raises(InputError, match="last differs at 6"):
        patch_sites(model, twice, 5)
    halfway = patch_sites(model, twice, correct_only=False, n_boot=20)
    assert torch.equal(halfway.pos, (6 + pairs.read_pos) // 2)
    assert halfway.ok


def test_only_the_letters_asked_for_are_run() -> None:
    model, pairs = pl.wrap(zoo.build("mamba")), some_pairs()
    calls: list[int] = []
    model.module.register_forward_pre_hook(lambda *_: calls.append(1))

    def runs(which: str) -> int:
        calls.clear()
        found = patch_sites(model, pairs, which=which, correct_only=False, n_boot=20)
        assert [site[0] for site in found.sites if site != "H+conv"] == sorted(which)
        return len(calls)

    runs(LETTERS)  # the first call also finds out from which blocks a run may start
    # A and B are one run, read at two positions.
    assert runs("BA") == runs("A") < runs("AF") < runs("ADF") == runs("FEDBA")
    assert patch_sites(model, pairs, which=["H"], correct_only=False, n_boot=20).sites == ["H", "H+conv"]
    assert patch_sites(model, pairs, which=["H+conv"], correct_only=False, n_boot=20).sites == ["H+conv"]
    for bad in ("K", "", "abc", ["A", "AB"]):
        with pytest.raises(InputError, match=LETTERS):
            patch_sites(model, pairs, which=bad)


def test_answers_at_m_are_the_models_own_unless_given() -> None:
    model, pairs = pl.wrap(zoo.build("mamba")), some_pairs()
    rows = torch.arange(N)
    own = patch_sites(model, pairs, which="ADE", correct_only=False, n_boot=20)
    with torch.no_grad():
        want = [model(t)[rows, own.pos].argmax(-1) for t in (pairs.clean, pairs.corrupted)]
    assert torch.equal(own.answers_at_pos, torch.stack(want, 1))
    differ = want[0] != want[1]
    assert 0 < int(differ.sum()) < N
    assert torch.equal(own.counted[0], differ)
    assert own.row("D")["n"] == int(differ.sum())
    assert own.row("E")["n"] == N
    given = patch_sites(model, pairs, which="ADE", answers_at_pos=pairs.answers, correct_only=False, n_boot=20)
    assert given.row("D")["n"] == N
    assert given.recovery("A") == pytest.approx(1, abs=1e-4)
    assert given.recovery("D") != pytest.approx(own.recovery("D"), abs=1e-3)
    assert given.recovery("E") == pytest.approx(own.recovery("E"), abs=1e-6)
    with pytest.raises(ShapeError, match="answers_at_pos"):
        patch_sites(model, pairs, answers_at_pos=pairs.answers[:3])
    with pytest.raises(InputError, match="23 logits"):
        patch_sites(model, pairs, answers_at_pos=pairs.answers + zoo.VOCAB)


def test_where_the_model_answers_alike_at_m_the_answers_at_the_end_are_read() -> None:
    pairs = some_pairs()[:6]
    result = patch_sites(pl.wrap(zoo.build("lstm")), pairs, which="ADE", correct_only=False, n_boot=20)
    assert torch.equal(result.answers_at_pos, pairs.answers)
    assert "answers alike" in result.row("D")["why"]
    assert result.row("E")["why"] == ""
    assert result.recovery("A") == pytest.approx(1, abs=1e-4)


def test_only_pairs_that_both_runs_answer_count_unless_told() -> None:
    model, pairs = pl.wrap(zoo.build("mamba")), some_pairs()
    with torch.no_grad():
        rows = torch.arange(N)
        best = [model(t)[rows, pairs.read_pos].argmax(-1) for t in (pairs.clean, pairs.corrupted)]
    answers = pairs.answers.clone()
    right = best[0] != best[1]
    answers[right] = torch.stack(best, 1)[right]
    given = pl.PatchPairs(pairs.clean, pairs.corrupted, pairs.edit_pos, pairs.read_pos, answers)
    result = patch_sites(model, given, n_boot=20)
    base = [diff(model(t)[rows, pairs.read_pos], answers) for t in (pairs.clean, pairs.corrupted)]
    assert torch.equal(result.counted[1], (base[0] > 0) & (base[1] < 0))
    assert 0 < result.row("E")["n"] < N
    below = patch_sites(model, given, metric=lambda l, a: diff(l, a) - 1e3, n_boot=20)
    assert torch.equal(below.counted, result.counted), "a metric of one sign counts the same pairs"
    assert bool((below.clean < 0).all())
    wrong = pl.PatchPairs(pairs.corrupted, pairs.clean, pairs.edit_pos, pairs.read_pos, answers)
    with pytest.raises(MetricError, match="none of the .* pairs is answered correctly by both"):
        patch_sites(model, wrong[right])


def test_a_result_is_a_table_a_figure_and_a_file(tmp_path: Path) -> None:
    result = measured("mamba")
    table = result.to_dataframe()
    assert table["site"].tolist() == ["A", "B", "C", "D", "E", "F", "G", "H", "H+conv", "I", "J"]
    shown = table.dropna(subset=["lo"])
    assert (shown["lo"] <= shown["recovery"] + 1e-6).all()
    assert (shown["recovery"] <= shown["hi"] + 1e-6).all()
    back = PatchSitesResult.load(result.save(tmp_path / "sites.safetensors"))
    assert back.rows == result.rows
    assert torch.equal(back.values, result.values)
    for some in (result, measured("neox")):
        figure = some.plot(title="sites")
        assert {"measured", "forced by the architecture"} <= {trace.name for trace in figure.data}
        assert "Recovery by site" in figure.layout.meta["alt"]
    assert any("keys and values" in text for trace in figure.data for text in trace.hovertext)
    with pytest.raises(InputError, match="was not measured"):
        measured("mamba", which="A").row("B")


def test_a_pair_that_makes_no_difference_where_it_is_read_has_no_recovery_and_says_so() -> None:
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs()
    # The metric sees nothing of what the site changes.
    flat = patch_sites(model, pairs, metric=lambda logits, answers: logits[:, 0] * 0 + 1, correct_only=False)
    for site in "ABF":
        row = flat.row(site)
        assert (row["recovery"], row["holds"], row["applicable"]) == (None, None, True)
        assert f"no gap at {row['read']}" in row["why"]
    assert "no gap" in str(flat.plot().data[0].hovertext)
    one = patch_sites(model, pairs[:1], which="BE", correct_only=False)
    assert one.recovery("E") != 0
    assert one.row("E")["lo"] is None


def test_metrics_modes_and_batches() -> None:
    model, pairs = pl.wrap(zoo.build("gru")), some_pairs()
    kw: dict[str, Any] = {"correct_only": False, "n_boot": 20}
    whole = patch_sites(model, pairs, **kw)
    split = patch_sites(model, pairs, batch_size=3, **kw)
    assert torch.allclose(whole.values, split.values, atol=1e-5, equal_nan=True)
    by_function = patch_sites(model, pairs, metric=diff, **kw)
    assert torch.allclose(whole.values, by_function.values, atol=1e-6, equal_nan=True)
    prob = patch_sites(model, pairs, metric="prob_diff", **kw)
    assert prob.values.nan_to_num().abs().max() <= 1
    assert prob.ok
    with pytest.raises(InputError, match="'denoise', 'noise'"):
        patch_sites(model, pairs, mode="both")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="logit_diff"):
        patch_sites(model, pairs, metric="logits")  # type: ignore[arg-type]


def test_nothing_stays_on_the_model_and_seeds_decide_everything() -> None:
    model, pairs = pl.wrap(zoo.build("mamba2")), some_pairs()
    before = zoo.logits(model.module, pairs.clean)
    state = torch.random.get_rng_state()
    results = [patch_sites(model, pairs, correct_only=False, n_boot=30, seed=4) for _ in range(2)]
    assert results[0].rows == results[1].rows
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.has_hooks()
    assert torch.equal(zoo.logits(model.module, pairs.clean), before)

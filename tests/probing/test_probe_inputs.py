"""probe(): every form of input, what may never leak across a split, and what a label of numbers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.probing import control_labels, online_codelength, refit_accuracy, split_by_group
from probelens.probing.refit import refit_check
from probelens.probing.splits import real_tokens
from probelens.tasks import Dyck, Parity

N, T, D = 200, 8, 12


def planted(strength: float = 3.0, k: int = 3, seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    """Activations (n, pos, d) in which a random label stands along its own direction."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n, T), generator=g)
    return torch.randn(n, T, D, generator=g) + torch.nn.functional.one_hot(y, D).float() * strength, y


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- nothing leaks -------------------------------------------------------------------------------------------


def test_the_identity_of_a_sequence_is_read_at_chance_across_the_split_and_not_when_rows_are_split() -> None:
    """Each sequence has its own code and its own random label: only who saw the sequence can know."""
    identity = torch.randint(0, 2, (N,), generator=torch.Generator().manual_seed(0))[:, None].expand(N, T)
    x = noise(N, 1, 128).expand(N, T, 128) + 0.1 * noise(N, T, 128, seed=2)
    whole = [pl.probe(x, identity, seed=s, n_boot=50).row("activations") for s in range(8)]
    assert abs(np.mean([row["accuracy"] for row in whole]) - 0.5) < 0.08
    # The control: the same rows, each its own group.
    rows = pl.probe(x.flatten(0, 1), identity.flatten(), n_boot=50)
    assert rows.accuracy("activations") > 0.9


def test_copies_of_a_sequence_stay_together_when_tokens_are_known() -> None:
    tokens = torch.randint(0, 5, (N // 2, T), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    label = torch.randint(0, 2, (N // 2,), generator=torch.Generator().manual_seed(1))
    label = label.repeat(2)[:, None].expand(N, T)
    x = noise(N // 2, 1, 96).repeat(2, 1, 1).expand(N, T, 96) + 0.1 * noise(N, T, 96, seed=2)
    told = [pl.probe(x, label, tokens=tokens, seed=s, n_boot=50).accuracy("activations") for s in range(3)]
    blind = [pl.probe(x, label, seed=s, n_boot=50).accuracy("activations") for s in range(3)]
    assert np.mean(told) < 0.65 < 0.75 < np.mean(blind)
    # Different sequences are split as before.
    unique = tokens + 5 * torch.arange(N)[:, None]
    assert pl.probe(x, label, tokens=unique, n_boot=50).accuracy("activations") == blind[0]


def test_the_sequences_of_each_side_are_those_of_the_split() -> None:
    """Rows of test sequences carry a value of their own: the mean of the training rows shows none of it."""
    x, y = planted()
    split = split_by_group(torch.arange(N), seed=5)
    for side, seen in ((split.test, False), (split.val, False), (split.train, True)):
        marked = x.clone()
        marked[side, :, -1] += 1000
        mean = pl.probe({"site": marked}, y, seed=5, n_boot=20).mean("site")
        assert (mean[-1] > 500) == seen


# -- forms of input ------------------------------------------------------------------------------------------


def test_flat_activations_take_masks_untrained_ones_and_several_labels() -> None:
    x, y = planted(n=600)
    x, y = x[:, 0], y[:, 0]
    mask = torch.arange(600) % 3 != 0
    bad = x.clone()
    bad[~mask] = torch.nan
    result = pl.probe(
        {"site": bad}, {"a": y, "b": (y == 1).long()}, mask=mask, untrained={"site": noise(600, D)}, n_boot=50
    )
    row = result.row("site", "a")
    assert row["n_test"] + row["n_train"] + row["n_val"] == int(mask.sum())
    assert row["untrained"] < 0.55 < 0.85 < row["accuracy"]
    assert result.by_position[f"site|a|{row['seed']}|task"].shape == (1,)
    with pytest.raises(InputError, match="needs tokens"):
        pl.probe(x, y, tokens=torch.zeros(600, 1).long(), control_task=True)


def test_lists_arrays_booleans_halves_and_heads_are_read_alike() -> None:
    x, y = planted()
    y = y % 2
    want = pl.probe({"site": x}, y, n_boot=50)
    for labels in (y.tolist(), y.numpy(), y.bool(), y.to(torch.uint8), {"label": y.numpy()}):
        assert pl.probe({"site": x}, labels, n_boot=50).rows == want.rows
    heads = pl.probe({"site": x.unflatten(-1, (3, 4))}, y, n_boot=50)
    assert heads.rows == want.rows
    half = pl.probe({"site": x.to(torch.bfloat16)}, y, n_boot=50)
    assert half.accuracy("site") == pytest.approx(want.accuracy("site"), abs=0.02)
    assert half.coef("site").dtype == torch.float32


def test_labels_at_all_positions_fit_activations_at_some() -> None:
    model = pl.wrap(zoo.build("gru"))
    task = Parity()
    batch = task.sample(120, length=16, seed=0)
    some = [2, 5, 6]
    acts = pl.collect(model, batch, "resid_post", pos=some)
    y = batch.labels["state"]
    whole = pl.probe(acts, y, batch.groups, mask=batch.mask, n_boot=50)
    cut = pl.probe(acts, y[:, some], batch.groups, mask=batch.mask[:, some], n_boot=50)
    assert whole.rows == cut.rows
    assert whole.rows[0]["n_test"] == 3 * len(split_by_group(batch.groups).test)
    assert "last_w" in whole.rows[0]
    with pytest.raises(ShapeError, match="one label per position"):
        pl.probe(acts, y[:, :-1], batch.groups)
    single = pl.collect(model, batch, "resid_post", pos=-1)
    assert pl.probe(single, y, batch.groups, n_boot=20).rows[0]["n_test"] == len(split_by_group(batch.groups).test)


def test_sequences_that_agree_at_the_collected_positions_only_are_not_copies() -> None:
    tokens = torch.randint(0, 2, (N, T), generator=torch.Generator().manual_seed(0)) + 2 * torch.arange(N)[:, None]
    tokens[:, 3] = 0
    x, y = planted()
    kw: dict[str, Any] = {"layers": {"s": 0}, "pos": torch.tensor([3])}
    acts = pl.Activations({"s": x[:, 3:4]}, tokens=tokens, **kw)
    assert pl.probe(acts, y[:, 3:4], n_boot=20).rows[0]["n_test"] == len(split_by_group(torch.arange(N)).test)


def test_a_bos_token_is_neither_trained_on_nor_scored() -> None:
    model = pl.wrap(zoo.build("lstm"))
    task = Dyck(bos=True)
    batch = task.sample(120, length=T, seed=0)
    assert not batch.mask[:, 0].any()
    acts = pl.collect(model, batch, "layers")
    assert acts.mask is not None
    result = pl.probe(acts, {"depth": batch.labels["depth"]}, batch.groups, n_boot=50)
    row = result.rows[0]
    assert row["n_test"] == T * len(split_by_group(batch.groups).test)
    position = result.by_position[next(iter(result.by_position))]
    assert position[0].isnan()
    assert not position[1:].isnan().any()
    assert {"majority", "position", "last_w", "embedding"} <= set(row)


# -- what stands beside ---------------------------------------------------------------------------------------


def test_the_embedding_stands_beside_every_layer() -> None:
    x, y = planted()
    weak, _ = planted(0.5)
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    acts = pl.Activations(dict(zip(names, (weak, x), strict=True)), layers={names[0]: -1, names[1]: 0})
    result = pl.probe(acts, {"a": y, "b": (y > 0).long()}, seeds=(0, 1), n_boot=50)
    for label in "ab":
        for seed in (0, 1):
            first = result.accuracy(names[0], label, seed)
            assert [result.row(n, label, seed)["embedding"] for n in names] == [first, first]
            assert first < result.accuracy(names[1], label, seed)
    assert "embedding" not in pl.probe({"site": x}, y, n_boot=20).row("site")


def test_the_control_task_has_about_256_contexts_however_few_the_tokens() -> None:
    batch = Parity().sample(300, length=24, seed=0)
    y = batch.labels["state"]
    x = noise(300, 24, D)
    result = pl.probe({"site": x}, y, tokens=batch.tokens, control_task=True, seed=4, n_boot=20)
    control = control_labels(batch.tokens, y, batch.mask, seed=4)
    alone = pl.probe({"site": x}, control, tokens=batch.tokens, seed=4, n_boot=20)
    assert result.accuracy("site", control="control_task") == pytest.approx(alone.accuracy("site"), abs=0.01)
    # Four tokens of two kinds would make 16 contexts, which the last-w baseline then knows by heart.
    assert alone.row("site")["last_w"] < 0.8


def test_the_codelength_is_that_of_whole_sequences() -> None:
    x, y = planted(1.0, n=80)
    groups = torch.arange(80) // 2
    result = pl.probe({"site": x}, y, groups, mdl=True, seed=3, n_boot=20)
    want = online_codelength(x.flatten(0, 1), y.flatten(), 3, groups=groups.repeat_interleave(T), seed=3, tol=1e-3)
    row = result.row("site")
    assert row["codelength"] == pytest.approx(want.bits, rel=1e-3)
    assert row["compression"] == pytest.approx(want.compression, rel=1e-3)
    few = pl.probe({"site": x}, y, groups, mdl=True, seed=3, max_rows=20 * T, n_boot=20).row("site")
    assert few["uniform_codelength"] == pytest.approx(20 * T * np.log2(3))
    assert few["n_train"] == 20 * T


# -- classes that are missing somewhere -------------------------------------------------------------------------


def test_a_class_that_only_test_sequences_have_counts_as_missed() -> None:
    x, y = planted(k=2)
    split = split_by_group(torch.arange(N))
    y[split.test[:4], 0] = 2
    result = pl.probe({"site": x}, y, n_boot=50)
    row, recall = result.row("site"), result.by_class["site|label|0|task"]
    assert row["n_classes"] == 3
    assert recall[2] == 0
    assert row["balanced_accuracy"] == pytest.approx(float(recall.mean()), abs=1e-6)
    assert result.coef("site").shape == (3, D)


def test_a_class_that_no_test_sequence_has_is_left_out_of_the_balance() -> None:
    x, y = planted(k=2)
    split = split_by_group(torch.arange(N))
    y[split.train[:4], 0] = 2
    result = pl.probe({"site": x}, y, n_boot=50)
    recall = result.by_class["site|label|0|task"]
    assert recall[2].isnan()
    assert result.row("site")["balanced_accuracy"] == pytest.approx(float(recall[:2].mean()), abs=1e-6)


def test_what_a_side_of_the_split_lacks_is_named() -> None:
    x, y = planted()
    split = split_by_group(torch.arange(N))
    for side, name in ((split.train, "training"), (split.val, "validation"), (split.test, "test")):
        mask = torch.ones(N, T, dtype=torch.bool)
        mask[side] = False
        with pytest.raises(InputError, match=f"only 0 {name} sequences"):
            pl.probe(x, y, mask=mask)
    with pytest.raises(InputError, match="only 1 test sequences"):
        pl.probe(x[:5], y[:5])
    with pytest.raises(InputError, match="too few"):
        pl.probe(x[:2], y[:2])
    one = torch.zeros(N, T, dtype=torch.long)
    one[split.test] = 1
    with pytest.raises(InputError, match="'label' have one class only among the training sequences"):
        pl.probe(x, one)
    negative = y.clone()
    negative[0, 0] = -1
    with pytest.raises(InputError, match="negative class ids"):
        pl.probe(x, negative)
    with pytest.raises(InputError, match="max_rows must be at least 2"):
        pl.probe(x, y, max_rows=1)
    with pytest.raises(InputError, match="labels is empty"):
        pl.probe(x, {})
    with pytest.raises(ShapeError, match="all sites must have the same"):
        pl.probe({"a": x, "b": x[:-1]}, y)
    with pytest.raises(ShapeError, match="tokens have shape"):
        pl.probe(x, y, tokens=torch.zeros(N, T + 1).long())
    with pytest.raises(ShapeError, match=r"untrained has \(n, pos\) = \(200, 7\)"):
        pl.probe({"site": x}, y, untrained={"site": x[:, :-1]})


def test_intervals_hold_the_accuracy_and_narrow_with_more_sequences() -> None:
    width = {}
    for n in (60, 960):
        x, y = planted(1.0, n=n)
        found = pl.probe({"site": x}, {"a": y, "b": (y > 0).long()}, seeds=(0, 1), n_boot=200)
        for row in found.rows:
            assert 0 <= row["lo"] <= row["accuracy"] <= row["hi"] <= 1
        width[n] = np.mean([row["hi"] - row["lo"] for row in found.rows])
    # A sixteenth of the sequences: four times the width, or nearly.
    assert 2.5 < width[60] / width[960] < 6


def test_the_global_random_state_decides_nothing_and_is_left_alone() -> None:
    batch = Parity().sample(80, length=T, seed=0)
    x, y = noise(80, T, D), batch.labels["state"]
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        results.append(
            pl.probe(
                {"site": x}, {"c": y, "n": y + 0.5 * x[..., 0]}, tokens=batch.tokens, control_task=True, mdl=True,
                max_rows=200, untrained={"site": x.flip(0)}, n_boot=50,
            ).rows
        )  # fmt: skip
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert results[0] == results[1]
    twice = pl.probe({"site": x}, y, seeds=(3, 3, 4), n_boot=20)
    assert [row["seed"] for row in twice.rows] == [3, 4]


# -- labels that are numbers -------------------------------------------------------------------------------------


def mixed(**kw: Any) -> tuple[pl.ProbeResult, Tensor, Tensor]:
    x, y = planted()
    value = 2 * x[..., 3] - x[..., 7] + 0.5 * noise(N, T) + 4
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    acts = pl.Activations({names[0]: noise(N, T, D, seed=8), names[1]: x}, layers={names[0]: -1, names[1]: 0})
    return pl.probe(acts, {"class": y, "value": value}, n_boot=50, **kw), x, value


def test_a_label_of_numbers_is_scored_by_r2_beside_labels_of_classes() -> None:
    result, x, value = mixed(seed=2)
    site = result.sites[1]
    row = result.row(site, "value")
    assert row["kind"] == "regression"
    assert row["control"] == "task"
    assert result.row(site, "class")["kind"] == "classification"
    assert result.r2(site, "value") == pytest.approx(1 - 0.25 / 5.25, abs=0.02)
    assert row["lo"] <= row["r2"] <= row["hi"]
    assert abs(row["embedding"]) < 0.05
    alone = pl.probe({"s": x}, value, seed=2, n_boot=50)
    assert row["r2"] == pytest.approx(alone.r2("s"), abs=1e-6)
    assert row["position"] == pytest.approx(alone.rows[0]["position"], abs=1e-6)
    assert torch.allclose(result.coef(site, "value"), alone.coef("s"))
    assert result.best("value")["site"] == site
    guess = x @ result.coef(site, "value")[0] + result.intercept(site, "value")
    split = split_by_group(torch.arange(N), seed=2)
    error = (guess - value)[split.test].square().sum() / (value[split.test] - value[split.test].mean()).square().sum()
    assert row["r2"] == pytest.approx(1 - float(error), abs=1e-3)


def test_a_label_of_numbers_has_its_untrained_model_control_task_and_subspace(tmp_path: Path) -> None:
    tokens = torch.randint(0, 4, (N, T), generator=torch.Generator().manual_seed(0))
    other = {name: noise(N, T, D, seed=9) for name in ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post")}
    result, x, _ = mixed(untrained=other, control_task=True, tokens=tokens, seeds=(0, 1))
    site = result.sites[1]
    row = result.row(site, "value", 1)
    assert row["untrained"] == result.r2(site, "value", 1, "untrained")
    assert abs(row["untrained"]) < 0.1
    assert row["selectivity"] == pytest.approx(row["r2"] - result.r2(site, "value", 1, "control_task"))
    assert row["selectivity"] > 0.7
    space = pl.subspaces.from_probe(result, site=site, label="value")
    assert space.rank == 1
    removed = pl.probe({"s": space.project_out(x.double()).float()}, {"v": mixed()[2]}, n_boot=20)
    assert removed.r2("s", "v") < 0.2
    back = pl.ProbeResult.load(result.save(tmp_path / "mixed.safetensors"))
    assert back.rows == result.rows
    assert torch.equal(back.coef(site, "value", 1), result.coef(site, "value", 1))


def test_numbers_alone_and_what_they_lack() -> None:
    x, y = planted()
    value = x[..., 3] + 0.1 * noise(N, T)
    result = pl.probe({"site": x}, value, n_boot=50)
    assert result.r2("site") > 0.95
    assert result.mean("site").shape == (D,)
    with pytest.raises(InputError, match="has no accuracy, as its kind is regression: ask for r2"):
        result.accuracy("site")
    with pytest.raises(InputError, match="ask for r2"):
        result.sequences()
    with pytest.raises(InputError, match="ask for accuracy"):
        pl.probe({"site": x}, y, n_boot=20).r2("site")
    assert "codelength" not in pl.probe({"site": x}, value, mdl=True, n_boot=20).row("site")
    with pytest.raises(InputError, match="everywhere: there is nothing to probe"):
        pl.probe(x, torch.full((N, T), 2.5))
    holes = value.clone()
    holes[3, 2] = torch.nan
    with pytest.raises(InputError, match="NaN or infinite"):
        pl.probe(x, holes)
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[3, 2] = False
    assert pl.probe({"site": x}, holes, mask=mask, n_boot=20).r2("site") > 0.95


def test_figures_show_classes_or_numbers() -> None:
    result, _, _ = mixed()
    assert "accuracy" in result.plot().layout.meta["alt"]
    assert "R²" in result.plot(label="value").layout.meta["alt"]
    two = result.plot(label="class")
    assert {"majority class"} <= {trace.name for trace in two.data}
    with pytest.raises(InputError, match="Give one of them"):
        result.plot(label="other")
    x, y = planted()
    acts = pl.Activations({"a": x}, layers={"a": 0})
    assert "R²" in pl.probe(acts, {"u": x[..., 1], "v": x[..., 2]}, n_boot=20).plot().layout.meta["alt"]
    assert len(pl.probe(acts, {"u": y, "v": y}, n_boot=20).plot().data) >= 2


# -- the refit ---------------------------------------------------------------------------------------------------


def test_refit_accuracy_says_what_is_left_and_in_which_form() -> None:
    """A label along one direction, and once more as the sign of a product, which only an MLP reads."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (N, T), generator=g)
    a = torch.randn(N, T, generator=g).sign()
    x = torch.stack([6.0 * y, 2 * a, 2 * a * (2 * y - 1)], -1) + 0.3 * torch.randn(N, T, 3, generator=g)
    removed = x.clone()
    removed[..., 0] = 0
    mask = torch.ones(N, T, dtype=torch.bool)
    row, by_position = refit_accuracy(x, removed, y, mask, torch.arange(N))
    assert row["probe_accuracy"] > 0.99
    assert row["refit_accuracy"] < 0.6
    assert row["refit_mlp_accuracy"] > 0.95
    assert abs(row["baseline"] - 0.5) < 0.05
    assert float(by_position.mean()) == pytest.approx(row["refit_accuracy"], abs=1e-5)
    assert row["refit_n_test"] == len(split_by_group(torch.arange(N)).test) * T
    assert row["refit_gap"] == pytest.approx(row["probe_accuracy"] - row["refit_accuracy"])
    assert 0.3 < row["refit_gap_lo"] < row["refit_gap"] < row["refit_gap_hi"] < 0.6
    pairs, _ = refit_accuracy(x, removed, y, mask, torch.arange(N) // 2, mlp=False)
    assert pairs["refit_gap"] == pytest.approx(pairs["probe_accuracy"] - pairs["refit_accuracy"])
    same, _ = refit_accuracy(x, x, y, mask, torch.arange(N), mlp=False)
    assert (same["refit_gap_lo"], same["refit_gap_hi"]) == (0, 0), "paired: two equal probes differ nowhere"
    assert same["refit_accuracy"] == same["probe_accuracy"]
    assert same["refit_mlp_accuracy"] is None


def test_baselines_read_the_last_tokens_also_where_few_positions_were_collected() -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (600, 12), generator=g)
    y = torch.zeros(600, 12).long()
    y[:, 1:] = (tokens[:, 1:] == tokens[:, :-1]).long()
    x = torch.randn(600, 12, 6, generator=g)
    for some in ([11], [3, 7, 11]):
        acts = pl.Activations({"s": x[:, some]}, {}, pos=torch.tensor(some), tokens=tokens)
        mask = torch.zeros(600, 12, dtype=torch.bool)
        mask[:, some] = True
        masked = pl.probe({"s": x}, y, mask=mask, tokens=tokens, control_task=True, n_boot=20)
        cut = pl.probe(acts, y, control_task=True, n_boot=20)
        assert masked.rows[0]["last_w"] > 0.99
        for name in ("majority", "position", "last_w", "accuracy", "selectivity"):
            assert cut.rows[0][name] == masked.rows[0][name], name
        numbers = pl.probe(acts, y.float(), n_boot=20)
        assert numbers.rows[0]["last_w"] > 0.9


def test_whole_sequences_keep_copies_together_for_flat_activations() -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (200, 8), generator=g).repeat_interleave(4, 0)
    x = torch.randn(200, 300, generator=g).repeat_interleave(4, 0)
    y = torch.randint(0, 2, (200,), generator=g).repeat_interleave(4, 0)
    assert pl.probe(x, y, n_boot=20).rows[0]["accuracy"] > 0.9, "the copies teach it by heart"
    assert pl.probe(x, y, tokens=tokens, n_boot=20).rows[0]["accuracy"] < 0.7
    with pytest.raises(ShapeError, match="whole sequences"):
        pl.probe(x, y, tokens=tokens[:, 0], n_boot=20)


def test_positions_out_of_order_are_refused() -> None:
    x, y = torch.randn(60, 3, 4), torch.randint(0, 2, (60, 3))
    acts = pl.Activations({"s": x}, {}, pos=torch.tensor([2, 1, 0]), tokens=torch.randint(0, 9, (60, 3)))
    with pytest.raises(InputError, match="ascending"):
        pl.probe(acts, y)


def test_next_to_a_baseline_of_almost_one_a_perfect_probe_still_reads() -> None:
    g = torch.Generator().manual_seed(0)
    y = (torch.rand(300, 20, generator=g) < 0.015).long()
    x = torch.randn(300, 20, 8, generator=g)
    x[..., 0] += 8 * y
    mask, groups = torch.ones(300, 20, dtype=torch.bool), torch.arange(300)
    row, _ = refit_check(x, x, y, mask, groups, mlp=False)
    assert row["baseline"] > 0.98
    assert row["readable_before"] is True
    found = pl.subspaces.inlp(x.flatten(0, 1), y.flatten(), groups.repeat_interleave(20))
    assert found.rank >= 1
    noise, _ = refit_check(x[..., 1:], x[..., 1:], y, mask, groups, mlp=False)
    assert noise["readable_before"] is False


def test_what_stands_in_padding_changes_no_split() -> None:
    g = torch.Generator().manual_seed(0)
    tokens, y = torch.randint(2, 6, (120, 9), generator=g), torch.randint(0, 2, (120, 9), generator=g)
    mask = torch.ones(120, 9, dtype=torch.bool)
    mask[::2, 4:] = False
    x = torch.randn(120, 9, 5, generator=g)
    rows = [
        pl.probe(x, y, mask=mask, tokens=tokens.where(mask, pad), n_boot=20).rows[0]
        for pad in (torch.tensor(0), torch.randint(0, 9, (120, 9), generator=g))
    ]
    assert {k: rows[0][k] for k in ("accuracy", "n_test", "C")} == {k: rows[1][k] for k in ("accuracy", "n_test", "C")}
    same = real_tokens(tokens.where(mask, 0), mask)
    assert torch.equal(same, real_tokens(tokens.where(mask, 1), mask))
    assert not torch.equal(same, real_tokens(tokens.where(mask, 0), mask.logical_not()))


def test_refitted_probes_take_classes_of_any_ids() -> None:
    g = torch.Generator().manual_seed(0)
    x, groups = torch.randn(60, 5, 6, generator=g), torch.arange(60)
    y, mask = (x[..., 1] > 0.3).long(), torch.rand(60, 5, generator=g) < 0.9
    plain, positions = refit_check(x, x * torch.tensor([0.0, 0, 1, 1, 1, 1]), y, mask, groups)
    far, same = refit_check(x, x * torch.tensor([0.0, 0, 1, 1, 1, 1]), (y * 900_000).where(mask, -1), mask, groups)
    assert far == plain
    assert torch.equal(positions.nan_to_num(), same.nan_to_num())

"""probe(): what is planted is found, what isn't is not, and every number can be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pages import run_page
from torch import Tensor

import probelens as pl
from probelens.errors import InputError, ShapeError, UnknownHookError
from probelens.numerics.stats import ratio_of_means
from probelens.probing import online_codelength, split_by_group
from probelens.tasks import Dyck, Parity

N, T, D = 240, 12, 16


def planted(strength: float = 3.0, k: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Activations (n, pos, d) in which a random label stands along its own direction."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (N, T), generator=g)
    code = torch.nn.functional.one_hot(y, D).float() * strength
    return torch.randn(N, T, D, generator=g) + code, y


def shuffled(y: Tensor, seed: int = 9) -> Tensor:
    flat = y.flatten()
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))].view_as(y)


def test_a_planted_variable_is_found_and_a_shuffled_one_is_not() -> None:
    x, y = planted()
    result = pl.probe({"site": x}, {"real": y, "shuffled": shuffled(y)})
    assert result.accuracy("site", "real") > 0.9
    row = result.row("site", "shuffled")
    assert abs(row["accuracy"] - 1 / 3) < 0.06
    assert row["lo"] <= row["accuracy"] <= row["hi"]
    assert row["accuracy"] <= row["majority"] + 0.05


def test_accuracy_is_what_a_probe_made_by_hand_reaches() -> None:
    """The whole protocol rebuilt with scikit-learn."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x, y = planted(1.0)
    Cs = (1e-3, 1e-1, 10.0)
    result = pl.probe(x, y, Cs=Cs, seed=3, tol=1e-8)
    split = split_by_group(torch.arange(N), seed=3)
    sides = [(x[i].flatten(0, 1).numpy(), y[i].flatten().numpy()) for i in (split.train, split.val, split.test)]
    scaler = StandardScaler().fit(sides[0][0])
    fits = [
        LogisticRegression(C=C, tol=1e-8, max_iter=5000).fit(scaler.transform(sides[0][0]), sides[0][1]) for C in Cs
    ]
    best = max(fits, key=lambda m: m.score(scaler.transform(sides[1][0]), sides[1][1]))
    row = result.row("activations")
    assert row["C"] == best.C
    assert row["accuracy"] == pytest.approx(best.score(scaler.transform(sides[2][0]), sides[2][1]), abs=2e-3)
    assert (row["n_train"], row["n_val"], row["n_test"]) == tuple(len(s[1]) for s in sides)


def test_directions_are_in_the_space_of_the_activations() -> None:
    x, y = planted()
    x = x * torch.logspace(-2, 2, D) + 7
    result = pl.probe({"site": x}, y)
    logits = x @ result.coef("site").T + result.intercept("site")
    split = split_by_group(torch.arange(N))
    right = (logits.argmax(-1) == y)[split.test].double().mean()
    assert float(right) == pytest.approx(result.accuracy("site"), abs=2e-3)
    torch.testing.assert_close(result.mean("site"), x[split.train].flatten(0, 1).mean(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("k", [2, 5])
def test_there_is_one_direction_per_class_for_two_classes_as_well(k: int) -> None:
    x, y = planted(k=k)
    result = pl.probe({"site": x}, y)
    assert result.coef("site").shape == (k, D)
    assert result.intercept("site").shape == (k,)


def test_the_mask_leaves_out_positions_everywhere() -> None:
    x, y = planted()
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[:, :4] = False
    x[:, :4] = torch.nan  # must not be touched at all
    y[:, :4] = -100
    result = pl.probe({"site": x}, y, mask=mask)
    row = result.row("site")
    assert row["n_test"] == len(split_by_group(torch.arange(N)).test) * 8
    by_position = next(iter(result.by_position.values()))
    assert by_position[:4].isnan().all()
    assert float(by_position[4:].mean()) == pytest.approx(row["accuracy"], abs=1e-4)


def test_groups_stay_together() -> None:
    """Labels that only the group tells: readable when a group is cut in two, not when it is kept whole."""
    g = torch.Generator().manual_seed(0)
    groups = torch.arange(N) // 8
    code = torch.randn(N // 8, 64, generator=g)
    label = torch.randint(0, 2, (N // 8,), generator=g)
    x = code[groups][:, None] + 0.1 * torch.randn(N, T, 64, generator=g)
    y = label[groups][:, None].expand(N, T)
    cut = pl.probe({"site": x}, y)
    whole = [pl.probe({"site": x}, y, groups, seed=s).accuracy("site") for s in range(6)]
    assert cut.accuracy("site") > 0.95
    assert np.mean(whole) < 0.8


def test_by_position_and_by_class_accuracies_are_those_of_their_parts() -> None:
    x, y = planted()
    x[:, : T // 2] = torch.randn(N, T // 2, D, generator=torch.Generator().manual_seed(4))
    result = pl.probe({"site": x}, y)
    key = next(iter(result.by_position))
    assert float(result.by_position[key][: T // 2].max()) < 0.6
    assert float(result.by_position[key][T // 2 :].min()) > 0.7
    assert float(result.by_class[key].mean()) == pytest.approx(result.row("site")["balanced_accuracy"], abs=1e-5)
    assert float(result.by_sequence[key].mean()) == pytest.approx(result.accuracy("site"), abs=1e-5)


def test_balanced_accuracy_shows_a_class_that_is_never_found() -> None:
    g = torch.Generator().manual_seed(0)
    y = (torch.rand(N, T, generator=g) < 0.05).long()
    result = pl.probe({"site": torch.randn(N, T, D, generator=g)}, y)
    row = result.row("site")
    assert row["accuracy"] > 0.9
    assert row["balanced_accuracy"] == pytest.approx(0.5, abs=0.05)
    assert row["majority"] == pytest.approx(row["accuracy"], abs=0.02)


def test_untrained_activations_stand_beside_the_trained_ones() -> None:
    x, y = planted()
    noise = torch.randn(N, T, D, generator=torch.Generator().manual_seed(1))
    result = pl.probe({"site": x}, y, untrained={"site": noise})
    row = result.row("site")
    assert row["untrained"] == result.accuracy("site", control="untrained")
    assert row["untrained"] < 0.45 < 0.9 < row["accuracy"]


def test_control_task_gives_selectivity() -> None:
    batch = Parity().sample(N, length=T, seed=0)
    y = batch.labels["state"]
    x = torch.nn.functional.one_hot(y, D).float() + 0.1 * torch.randn(
        N, T, D, generator=torch.Generator().manual_seed(0)
    )
    result = pl.probe({"site": x}, y, tokens=batch.tokens, control_task=True)
    row = result.row("site")
    control = result.accuracy("site", control="control_task")
    assert row["selectivity"] == pytest.approx(row["accuracy"] - control)
    assert row["selectivity"] > 0.2


def test_codelength_falls_as_a_label_becomes_readable() -> None:
    x, y = planted(3.0)
    weak, _ = planted(0.3)
    result = pl.probe({"strong": x, "weak": weak}, y, mdl=True)
    strong_row, weak_row = result.row("strong"), result.row("weak")
    assert strong_row["codelength"] < 0.5 * weak_row["codelength"]
    assert strong_row["uniform_codelength"] == pytest.approx(N * T * np.log2(3))
    assert strong_row["compression"] == pytest.approx(strong_row["uniform_codelength"] / strong_row["codelength"])


def test_baselines_come_from_tokens_and_match_those_of_the_task() -> None:
    from probelens.tasks.baselines import baselines

    batch = Dyck().sample(N, length=T, seed=0)
    y = batch.labels["depth"]
    result = pl.probe(
        {"site": torch.randn(N, T, D, generator=torch.Generator().manual_seed(0))}, y, batch.groups,
        mask=batch.mask, tokens=batch.tokens,
    )  # fmt: skip
    split = split_by_group(batch.groups)
    theirs = baselines(
        batch.tokens[split.train], y[split.train], batch.tokens[split.test], y[split.test],
        batch.mask[split.train], batch.mask[split.test],
    )  # fmt: skip
    for name in ("majority", "position", "last_w"):
        assert result.row("site")[name] == pytest.approx(theirs[name]["accuracy"])


def test_seeds_give_their_own_rows_and_equal_seeds_equal_results() -> None:
    x, y = planted(1.0)
    state = torch.random.get_rng_state()
    a, b = (pl.probe({"site": x}, y, seeds=(0, 1)) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [r["seed"] for r in a.rows] == [0, 1]
    assert a.rows == b.rows
    assert torch.equal(a.coef("site", seed=1), b.coef("site", seed=1))
    assert not torch.equal(a.coef("site", seed=0), a.coef("site", seed=1))


def test_intervals_are_over_sequences_and_wider_where_sequences_agree_with_themselves() -> None:
    """Positions of one sequence that stand or fall together carry less than as many independent ones."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (N, T), generator=g)
    loud = torch.nn.functional.one_hot(y, D).float() * 8
    noise = torch.randn(N, T, D, generator=g)
    whole = torch.where((torch.rand(N, 1, 1, generator=g) < 0.5), loud, torch.zeros(())) + noise
    single = torch.where((torch.rand(N, T, 1, generator=g) < 0.5), loud, torch.zeros(())) + noise
    result = pl.probe({"whole": whole, "single": single}, y)
    width = {s: result.row(s)["hi"] - result.row(s)["lo"] for s in result.sites}
    assert width["whole"] > 1.5 * width["single"]


def test_results_survive_saving(tmp_path: object) -> None:
    x, y = planted()
    result = pl.probe({"site": x}, {"a": y, "b": shuffled(y)}, seeds=(0, 1))
    loaded = pl.ProbeResult.load(result.save(f"{tmp_path}/probe.safetensors"))
    assert loaded.rows == result.rows
    assert torch.equal(loaded.coef("site", "a", 1), result.coef("site", "a", 1))
    assert loaded.to_dataframe().equals(result.to_dataframe())


def test_flat_activations_are_one_position_each() -> None:
    x, y = planted()
    result = pl.probe(x.flatten(0, 1), y.flatten(), torch.arange(N).repeat_interleave(T))
    assert result.accuracy("activations") == pytest.approx(pl.probe(x, y).accuracy("activations"), abs=0.01)


def test_collected_activations_bring_their_mask_and_layers() -> None:
    x, y = planted()
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[:, 0] = False
    acts = pl.Activations(dict.fromkeys(names, x), layers={names[0]: -1, names[1]: 0}, mask=mask)
    result = pl.probe(acts, y)
    assert [row["layer"] for row in result.rows] == [-1, 0]
    assert result.rows[0]["n_test"] == len(split_by_group(torch.arange(N)).test) * (T - 1)
    assert len(result.plot().data) >= 1
    assert result.best()["site"] in names


def test_fewer_rows_are_taken_when_asked_and_said() -> None:
    x, y = planted()
    row = pl.probe({"site": x}, y, max_rows=300).row("site")
    assert row["n_train"] == 300
    assert row["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": torch.zeros(N, T).long()}, InputError, "one class only"),
        ({"labels": torch.zeros(N, T + 1).long()}, ShapeError, "labels"),
        ({"mask": torch.zeros(N, T).bool()}, InputError, "False everywhere"),
        ({"mask": torch.ones(N, T - 1).bool()}, ShapeError, "mask"),
        ({"groups": torch.arange(3)}, ShapeError, "groups"),
        ({"groups": torch.zeros(N).long()}, InputError, "too few"),
        ({"acts": {"site": torch.full((N, T, D), torch.nan)}}, InputError, "NaN or infinite"),
        ({"acts": {}}, InputError, "empty"),
        ({"acts": "site"}, InputError, "acts must be"),
        ({"seeds": ()}, InputError, "must not be empty"),
        ({"control_task": True}, InputError, "needs tokens"),
        ({"untrained": {"other": torch.zeros(N, T, D)}}, InputError, "same ones"),
        ({"splits": (0.5, 0.5)}, InputError, "three positive fractions"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], error: type[Exception], text: str) -> None:
    x, y = planted()
    with pytest.raises(error, match=text):
        pl.probe(**{"acts": {"site": x}, "labels": y, **change})  # type: ignore[arg-type]


def test_asking_a_result_for_what_it_lacks_is_an_error() -> None:
    x, y = planted()
    result = pl.probe({"site": x}, {"a": y, "b": y})
    with pytest.raises(UnknownHookError, match="site"):
        result.accuracy("sit", "a")
    with pytest.raises(InputError, match="this result has"):
        result.accuracy("site")
    with pytest.raises(InputError, match="no probe of"):
        result.accuracy("site", "a", seed=5)


def test_the_page_about_probing_runs_and_shows_a_readable_depth() -> None:
    names = run_page("docs/api/probing.md")
    row = names["row"]
    assert row["accuracy"] > row["last_w"] > row["majority"]  # type: ignore[index]
    before, after = names["best"], names["rest"][0][4]  # type: ignore[index]
    assert after.objective > 2 * before.objective  # type: ignore[attr-defined]


def rare(n: int, length: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A label of few positives that one feature tells perfectly."""
    g = torch.Generator().manual_seed(1)
    y = (torch.rand(n, length, generator=g) < share).long()
    x = torch.randn(n, length, 16, generator=g)
    x[..., 0] += 6 * y
    return x, y


@pytest.mark.parametrize(("n", "length", "share"), [(100, 10, 0.05), (60, 5, 0.1), (30, 4, 0.25)])
def test_a_rare_class_is_found_although_small_C_only_guesses(n: int, length: int, share: float) -> None:
    x, y = rare(n, length, share)
    row = pl.probe(x, y, n_boot=50).rows[0]
    assert row["accuracy"] > 0.98 > row["majority"]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    assert pl.probe(noise, y, n_boot=50).rows[0]["accuracy"] <= row["majority"] + 0.02


def test_intervals_are_over_groups() -> None:
    """Sequences of a module are alike, so a module counts as one draw: three times as wide as ten would be."""
    g = torch.Generator().manual_seed(0)
    groups = torch.arange(60).repeat_interleave(10)
    y = torch.randint(0, 2, (600, 6), generator=g)
    hard = (torch.rand(60, generator=g) < 0.5)[groups]
    x = torch.where(hard[:, None], torch.randn(600, 6, generator=g), 2.0 * y - 1)[..., None]
    alike, single = (pl.probe(x, y, kept).rows[0] for kept in (groups, torch.arange(600)))
    assert alike["hi"] - alike["lo"] > 2 * (single["hi"] - single["lo"])
    assert alike["lo"] < alike["accuracy"] < alike["hi"]


def test_sequences_of_unequal_length_count_by_their_positions() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (200, 40), generator=g)
    mask = torch.ones(200, 40, dtype=torch.bool)
    mask[:160, 2:] = False  # four of five are two positions long, and easy
    x = torch.where(mask.all(1)[:, None], torch.randn(200, 40, generator=g), 2.0 * y - 1)[..., None]
    result = pl.probe(x, y, mask=mask)
    row = result.rows[0]
    split = split_by_group(torch.arange(200))
    counted = mask[split.test].double().sum(1)
    right = result.sequences("label")[:, 0].double() * counted
    want = ratio_of_means(right[None], counted[None], n_draws=1000)
    assert row["accuracy"] == pytest.approx(float(want.estimate))
    # Two methods, one answer: the bootstrap over sequences, and the exact interval of the effective number of trials.
    assert (row["lo"], row["hi"]) == pytest.approx((float(want.low), float(want.high)), abs=0.03)


def test_a_perfect_accuracy_has_the_exact_lower_bound_of_its_test_sequences() -> None:
    y = torch.randint(0, 2, (100, 8), generator=torch.Generator().manual_seed(0))
    row = pl.probe((2.0 * y - 1)[..., None] + torch.zeros(8), y).rows[0]
    assert (row["accuracy"], row["hi"]) == (1.0, 1.0)
    assert row["lo"] == pytest.approx(0.025 ** (1 / 20))  # 20 sequences in test, of 8 positions each


def test_codelength_does_not_depend_on_how_classes_are_numbered() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 10, 4, generator=g), torch.randint(0, 2, (60, 10), generator=g)
    plain = pl.probe(x, y, mdl=True, n_boot=50).rows[0]
    far = pl.probe(x, y * 6 + 3, mdl=True, n_boot=50).rows[0]
    assert plain["compression"] == pytest.approx(1.0, abs=0.05)
    assert far["compression"] == pytest.approx(plain["compression"])
    assert online_codelength(x.flatten(0, 1), y.flatten() * 9).compression == pytest.approx(1.0, abs=0.05)


def test_compression_is_judged_against_the_labels_frequencies() -> None:
    g = torch.Generator().manual_seed(0)
    y = (torch.rand(200, 10, generator=g) < 0.1).long()
    noise = torch.randn(200, 10, 4, generator=g)
    blind, seeing = (pl.probe({"site": x}, y, mdl=True, n_boot=50) for x in (noise, noise + 9 * y[..., None]))
    p = float(y.double().mean())
    entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    for result in (blind, seeing):
        assert result.rows[0]["label_codelength"] == pytest.approx(2000 * entropy)
        assert result.rows[0]["compression_floor"] == pytest.approx(1 / entropy)
    assert 1.8 < blind.rows[0]["compression"] <= blind.rows[0]["compression_floor"]
    floor = f"{1 / entropy:.3g}"
    assert f"no more than the {floor} that the label's frequencies alone give" in str(blind)
    assert f"times the {floor} that the label's" in str(seeing)
    assert "directions to read with" not in str(blind)  # what reads nothing has no direction to speak of


@pytest.mark.parametrize("ids", [(5, 900_000), (0, 2**40), (7, 8)])
def test_classes_may_have_any_ids(ids: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    x, tokens = torch.randn(60, 6, 8, generator=g), torch.randint(0, 3, (60, 6), generator=g)
    y = (x[..., 0] > 0.5).long()
    mask = torch.rand(60, 6, generator=g) < 0.9
    options: dict[str, Any] = {"tokens": tokens, "control_task": True, "mdl": True, "n_boot": 20, "mask": mask}
    plain = pl.probe({"site": x}, y, **options)
    far = pl.probe({"site": x}, torch.tensor(ids)[y].where(mask, -100), **options)
    assert far.rows == plain.rows
    assert (plain.classes["label"].tolist(), far.classes["label"].tolist()) == ([0, 1], list(ids))
    assert far.coef("site").shape == (2, 8)
    torch.testing.assert_close(far.coef("site"), plain.coef("site"))
    assert far.by_class["site|label|0|task"].shape == (2,)


def test_rows_say_how_much_variance_the_probes_rows_and_the_class_means_carry() -> None:
    """A label that lies along a loud axis, and is read off a quiet one that cancels the loud one's noise."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (300, 10), generator=g)
    noise = 30 * torch.randn(300, 10, generator=g)
    loud, quiet = noise + 20.0 * y, torch.randn(300, 10, generator=g) * 0.1 + y
    x = torch.stack([loud, quiet], -1)
    result = pl.probe({"site": x}, y, Cs=(1e3,))
    row, split = result.rows[0], split_by_group(torch.arange(300))
    train, labels = x[split.train].flatten(0, 1).double().numpy(), y[split.train].flatten().numpy()
    sigma = np.cov(train.T, bias=True)
    means = np.stack([train[labels == k].mean(0) for k in (0, 1)])
    spans = {"filter": result.coef("site").double().numpy(), "class_means": means}
    for name, rows in spans.items():
        direction = (rows[1] - rows[0]) / np.linalg.norm(rows[1] - rows[0])
        gap = means[1] - means[0]
        assert row[f"{name}_variance"] == pytest.approx(direction @ sigma @ direction / np.trace(sigma), rel=1e-3)
        assert row[f"{name}_between_variance"] == pytest.approx((direction @ gap) ** 2 / (gap @ gap), rel=1e-3)
    assert row["filter_variance"] < 0.01 < 0.9 < row["class_means_variance"]
    assert row["class_means_between_variance"] == pytest.approx(1)
    assert "directions to read with, not where the label lies" in str(result)
    assert "directions to read with" not in str(pl.probe(*planted()))
    number = pl.probe({"site": x}, y.double()).rows[0]
    assert 0 < number["filter_variance"] < 1
    assert number["class_means_variance"] == pytest.approx(row["class_means_variance"], rel=1e-3)


def test_float64_features_with_a_large_offset_keep_their_digits() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (100, 10), generator=g)
    x = torch.randn(100, 10, 8, generator=g).double()
    x[..., 0] += 4 * y
    plain = pl.probe(x, y, n_boot=50)
    far = pl.probe(x + 1e8, y, n_boot=50)
    assert plain.accuracy("activations") > 0.9
    assert far.accuracy("activations") == pytest.approx(plain.accuracy("activations"), abs=0.005)


def test_half_precision_features_are_coded_as_the_same_values_in_single() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (1000,), generator=g)
    x = (torch.randn(1000, 8, generator=g) + torch.eye(8)[0] * y[:, None] + 50).bfloat16()
    assert online_codelength(x, y).bits == pytest.approx(online_codelength(x.float(), y).bits)

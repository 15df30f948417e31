"""pl.probe of numeric labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_squared_error, r2_score
from sklearn.preprocessing import StandardScaler

import probelens as pl
from probelens.errors import InputError, ShapeError, StoreError, UnknownHookError
from probelens.probing import split_by_group
from probelens.results.files import write_tensors

N, T, D = 200, 10, 12


def planted(noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, T, D, generator=g)
    return x, 3 * x[..., 2] - x[..., 5] + noise * torch.randn(N, T, generator=g) + 4


def test_a_planted_number_is_found_and_a_shuffled_one_is_not() -> None:
    x, y = planted()
    g = torch.Generator().manual_seed(1)
    wrong = y.flatten()[torch.randperm(y.numel(), generator=g)].view_as(y)
    result = pl.probe({"site": x}, {"real": y, "shuffled": wrong})
    assert result.r2("site", "real") == pytest.approx(1 - 0.25 / (10 + 0.25), abs=0.01)
    assert abs(result.r2("site", "shuffled")) < 0.03
    row = result.rows[0]
    assert row["lo"] < row["r2"] < row["hi"]


def test_r2_and_direction_are_those_of_scikit_learn() -> None:
    x, y = planted()
    x = x * torch.logspace(-2, 2, D) + 5
    result = pl.probe({"site": x}, y, alphas=[10.0], seed=2)
    split = split_by_group(torch.arange(N), seed=2)
    train, test = ((x[i].flatten(0, 1).numpy(), y[i].flatten().numpy()) for i in (split.train, split.test))
    scaler = StandardScaler().fit(train[0])
    theirs = Ridge(alpha=10.0).fit(scaler.transform(train[0]), train[1])
    assert result.r2("site") == pytest.approx(r2_score(test[1], theirs.predict(scaler.transform(test[0]))), abs=1e-5)
    error = mean_squared_error(test[1], theirs.predict(scaler.transform(test[0])))
    assert result.row("site")["mse"] == pytest.approx(error, rel=1e-4)
    np.testing.assert_allclose(result.coef("site")[0], theirs.coef_ / scaler.scale_, rtol=1e-3, atol=1e-6)


def test_the_penalty_is_chosen_on_validation() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, 100, generator=g)  # as many features as training rows
    y = x[..., 0] + 2 * torch.randn(60, 3, generator=g)
    chosen = pl.probe({"site": x}, y)
    none = pl.probe({"site": x}, y, alphas=[1e-6])
    assert chosen.rows[0]["alpha"] > 1
    assert chosen.r2("site") > none.r2("site") + 0.2


def test_baselines_say_what_position_and_tokens_tell() -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (N, T), generator=g)
    previous = torch.cat([torch.zeros(N, 1).long(), tokens[:, :-1]], 1)
    labels = {"position": torch.arange(T).expand(N, T).float(), "window": (tokens * 2 + previous).float()}
    x = torch.randn(N, T, D, generator=g)
    result = pl.probe({"site": x}, labels, tokens=tokens, w=2)
    by_position, by_window = result.rows
    assert by_position["position"] == pytest.approx(1)
    assert by_position["last_w"] < 0.3
    assert by_window["last_w"] == pytest.approx(1)
    assert by_window["position"] < 0.3


def test_masked_positions_are_not_touched() -> None:
    x, y = planted()
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[:, :3] = False
    x[:, :3], y[:, :3] = torch.nan, torch.nan
    result = pl.probe({"site": x}, y, mask=mask)
    assert result.rows[0]["n_test"] == len(split_by_group(torch.arange(N)).test) * (T - 3)
    assert result.r2("site") > 0.9


def test_flat_features_saving_and_plotting(tmp_path: object) -> None:
    x, y = planted()
    groups = torch.arange(N).repeat_interleave(T)
    flat = pl.probe(x.flatten(0, 1), y.flatten(), groups)
    assert flat.r2("activations") > 0.9
    acts = pl.Activations({"blocks.0.hook_resid_post": x}, layers={"blocks.0.hook_resid_post": 0})
    result = pl.probe(acts, y, seeds=(0, 1))
    loaded = pl.ProbeResult.load(result.save(f"{tmp_path}/values.safetensors"))
    assert loaded.to_dataframe().equals(result.to_dataframe())
    assert len(loaded.plot().data) >= 1


def test_results_of_numbers_that_earlier_versions_saved_are_read(tmp_path: Path) -> None:
    fields = {
        "rows": {"l": [{"d": {"site": {"v": "s"}, "layer": {"v": 0}, "label": {"v": "y"}, "seed": {"v": 3}, "r2": {"v": 0.5}}}]},
        "coefs": {"d": {"s|y|3": {"t": "coef"}}},
        "intercepts": {"d": {"s|y|3": {"t": "intercept"}}},
    }  # fmt: skip
    tensors = {"coef": torch.tensor([1.0, 2.0]), "intercept": torch.tensor(4.0)}
    for name in ("ValueProbeResult", "Interval"):
        header = {"probelens": json.dumps({"class": name, "format": 1, "fields": fields})}
        write_tensors(tmp_path / name, tensors, header)
    old = pl.ProbeResult.load(tmp_path / "ValueProbeResult")
    assert old.r2("s", "y", 3) == 0.5
    assert torch.equal(old.coef("s"), tensors["coef"][None])
    assert torch.equal(old.intercept("s"), tensors["intercept"][None])
    with pytest.raises(InputError, match="without mean activations"):
        old.mean("s")
    with pytest.raises(StoreError, match="holds a Interval"):
        pl.ProbeResult.load(tmp_path / "Interval")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": torch.zeros(N, T)}, InputError, "are 0 everywhere"),
        ({"labels": torch.full((N, T), torch.nan)}, InputError, "NaN"),
        ({"labels": torch.zeros(N, T + 1)}, ShapeError, "labels 'label' have shape"),
        ({"labels": {}}, InputError, "labels is empty"),
        ({"mask": torch.zeros(N, T).bool()}, InputError, "False everywhere"),
        ({"mask": torch.ones(N, 2).bool()}, ShapeError, "mask"),
        ({"groups": torch.arange(3)}, ShapeError, "groups"),
        ({"groups": torch.zeros(N)}, InputError, "too few"),
        ({"acts": {"site": torch.full((N, T, D), torch.nan)}}, InputError, "NaN"),
        ({"alphas": [-1.0]}, InputError, "a number of at least 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], error: type[Exception], text: str) -> None:
    x, y = planted()
    with pytest.raises(error, match=text):
        pl.probe(**{"acts": {"site": x}, "labels": y, **change})  # type: ignore[arg-type]
    with pytest.raises(UnknownHookError, match="not probed"):
        pl.probe({"site": x}, y).r2("sit")


def test_the_last_tokens_back_off_to_shorter_windows() -> None:
    """With 300 tokens no window of four recurs; the value is a function of the last token alone."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 300, (200, 20), generator=g)
    value = torch.randn(300, generator=g)[tokens]
    x = torch.randn(200, 20, 4, generator=g)
    assert pl.probe(x, value, tokens=tokens, w=1).rows[0]["last_w"] > 0.99
    assert pl.probe(x, value, tokens=tokens).rows[0]["last_w"] > 0.99
    assert pl.probe(x, torch.randn(200, 20, generator=g), tokens=tokens).rows[0]["last_w"] < 0.1


def test_copies_of_a_sequence_are_on_one_side() -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (20, 8), generator=g).repeat_interleave(8, 0)
    x = torch.randn(20, 8, 200, generator=g).repeat_interleave(8, 0)
    value = torch.randn(20, 8, generator=g).repeat_interleave(8, 0)
    assert pl.probe(x, value).rows[0]["r2"] > 0.9, "the copies teach it by heart"
    assert pl.probe(x, value, tokens=tokens).rows[0]["r2"] < 0.2

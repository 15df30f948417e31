"""Directions of a probe by name: what is taken out, and how much of the variance it carries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import probelens as pl
from probelens.examples import planted
from probelens.examples.planted import SITE, World
from probelens.subspaces import directions

NAMES = ("class_means", "pattern", "filter", "leace")


@pytest.fixture(scope="module")
def spare() -> World:
    """y in a loud copy, which the model uses, and a quiet one, on which a probe leans."""
    return planted.spare()


@pytest.fixture(scope="module")
def read(spare: World) -> pl.ProbeResult:
    return pl.probe({SITE: spare.acts(spare.fit)}, {"y": spare.fit.labels["y"]}, spare.fit.groups)


def by_hand(spare: World, map_: np.ndarray, mean: np.ndarray) -> float:
    """Accuracy with x → x − (x − mean) mapᵀ put in by a torch hook."""
    module = spare.model.module
    matrix, centre = torch.tensor(map_).float(), torch.tensor(mean).float()
    block = module.get_submodule(spare.model.adapter.blocks[0])
    handle = block.register_forward_hook(lambda m, a, out: out - (out - centre) @ matrix.mT)
    with torch.no_grad():
        out = module(spare.held.tokens)
    handle.remove()
    return float((out.argmax(-1) == spare.held.labels["y"]).double().mean())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_of_a_probe_is_what_it_is_called(name: str, spare: World, read: pl.ProbeResult) -> None:
    got = pl.ablate(spare.model, spare.held, read, directions=name, controls=2, refit=False)  # type: ignore[arg-type]
    (row,) = got.targets()
    # The same directions from the probe's training rows, in numpy.
    from probelens.probing.splits import FRACTIONS, split_by_group

    train = split_by_group(spare.fit.groups, FRACTIONS, 0).train
    x = spare.acts(spare.fit)[train].flatten(0, 1).double().numpy()
    y = spare.fit.labels["y"][train].flatten().numpy()
    sigma, mean = np.cov(x.T, bias=True), x.mean(0)
    means = x[y == 1].mean(0) - x[y == 0].mean(0)
    filter_ = (read.coef(SITE)[1] - read.coef(SITE)[0]).double().numpy()
    line = {"class_means": means, "pattern": sigma @ filter_, "filter": filter_}.get(name)
    if line is None:
        inverse = np.linalg.inv(sigma)
        projector = np.outer(means, inverse @ means) / (means @ inverse @ means)
    else:
        projector = np.outer(line, line) / (line @ line)
    assert row["value"] == pytest.approx(by_hand(spare, projector, mean), abs=2e-3)
    assert {r["directions"] for r in got.rows} == {name}, "controls say what they stand beside"


def test_class_means_are_the_default_and_cost_what_the_filter_does_not(spare: World, read: pl.ProbeResult) -> None:
    (default,), (rows,) = (
        pl.ablate(spare.model, spare.held, read, controls=2, refit=False, **how).targets()  # type: ignore[arg-type]
        for how in ({}, {"directions": "filter"})
    )
    assert default["directions"] == "class_means"
    assert (default["drop"] > 0.45, rows["drop"]) == (True, 0.0)
    assert rows["variance"] < 0.05 < 0.1 < default["variance"]
    assert rows["between_variance"] < 0.5 < 0.99 < default["between_variance"]


def test_every_row_has_the_shares_of_variance_that_numpy_finds_on_the_batch_where_labels_count(
    spare: World, read: pl.ProbeResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probelens.ablation import scoring

    drawn = []
    removing = scoring._removing
    monkeypatch.setattr(
        scoring, "_removing", lambda name, space, *rest: drawn.append(space) or removing(name, space, *rest)
    )
    held = dataclasses.replace(spare.held, mask=torch.arange(12).expand(800, 12) % 3 > 0)
    rows = pl.ablate(spare.model, held, read, label="y", controls=3, refit=False).rows
    x, y = (t[held.mask].double().numpy() for t in (spare.acts(held), held.labels["y"]))
    sigma = np.cov(x.T, bias=True)
    gap = (
        np.stack([x[y == k].mean(0) - x.mean(0) for k in (0, 1)])
        * np.sqrt(np.bincount(y.astype(int)) / len(y))[:, None]
    )
    assert len(drawn) == len(rows) == 9
    for row, space in zip(rows, drawn, strict=True):
        q = space.basis.numpy()
        assert row["variance"] == pytest.approx(np.trace(q @ sigma @ q.T) / np.trace(sigma))
        assert row["between_variance"] == pytest.approx(np.square(gap @ q.T).sum() / np.square(gap).sum())


def test_a_mapping_goes_by_its_own_labels(spare: World, read: pl.ProbeResult) -> None:
    for space in (pl.Subspace(torch.eye(planted.WIDTH)[:2], torch.zeros(planted.WIDTH)), directions(read)[SITE]):
        (row,) = pl.ablate(spare.model, spare.held, {SITE: space}, label="y", controls=0, refit=False).targets()
        assert row["directions"] == (space.label or "given")
    (row,) = pl.ablate(spare.model, spare.held, {SITE: space}, label="y", controls=0, refit=False, alpha=0.0).targets()
    assert row["variance"] > 0.1, "also where nothing is removed"


def test_shares_stay_between_0_and_1_also_of_an_eraser_fitted_elsewhere(spare: World) -> None:
    few = spare.fit[:3]
    eraser = pl.leace(spare.acts(few), few.labels["y"])
    (row,) = pl.ablate(spare.model, spare.held, {SITE: eraser}, label="y", controls=0, refit=False).targets()
    assert 0 <= row["variance"] <= 1
    assert 0 <= row["between_variance"] <= 1
    held = dataclasses.replace(
        spare.held, labels={"y": torch.zeros_like(spare.held.labels["y"]), "z": spare.held.labels["y"]}
    )
    (row,) = pl.ablate(
        spare.model, held, {SITE: eraser}, label="y", target="z", controls=0, refit=False
    ).targets()  # fmt: skip
    assert row["between_variance"] is None, "one class has no variance between classes"


def test_rank_takes_the_first_directions_and_doses_and_lengths_take_names_too(
    spare: World, read: pl.ProbeResult
) -> None:
    made = planted.crowded()
    groups = pl.probe({SITE: made.acts(made.fit)}, {"z": made.fit.labels["z"]}, made.fit.groups)
    options = {"label": "z", "target": "y", "controls": 0, "refit": False}
    one = pl.ablate(made.model, made.held, groups, rank=1, **options)  # type: ignore[arg-type]
    assert one.targets()[0]["rank"] == 1
    doses = pl.dose_response(made.model, made.held, groups, directions="pattern", **options)  # type: ignore[arg-type]
    assert [(r["rank"], r["full_rank"], r["directions"]) for r in doses.rows] == [
        (1, 3, "pattern"), (2, 3, "pattern"), (3, 3, "pattern"),
    ]  # fmt: skip
    whole = pl.ablate(made.model, made.held, groups, directions="pattern", **options)  # type: ignore[arg-type]
    assert doses.rows[-1]["drop"] == whole.rows[0]["drop"]
    cut = pl.dose_response(made.model, made.held, groups, rank=2, **options)  # type: ignore[arg-type]
    assert [(r["rank"], r["full_rank"], r["directions"]) for r in cut.rows] == [
        (1, 2, "class_means"), (2, 2, "class_means"),
    ]  # fmt: skip
    assert cut.rows[0]["drop"] == one.rows[0]["drop"]
    task = pl.tasks.Parity()
    model = pl.wrap(pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8)))
    fit = task.sample(60, length=8)
    probes = pl.probe(pl.collect(model, fit, ("resid_post", 0)), fit.labels, fit.groups)
    got = pl.length_transfer(model, task, probes, (8, 12), trained_length=8, n=20, controls=0, directions="filter")
    assert {row["directions"] for row in got.rows} == {"filter"}
    assert all(0 <= row["variance"] <= 1 for row in got.rows)


@pytest.mark.parametrize("call", ["ablate", "dose_response", "length_transfer"])
def test_a_name_with_a_mapping_and_a_probe_without_patterns_are_refused(
    call: str, spare: World, read: pl.ProbeResult
) -> None:
    task = pl.tasks.Parity()
    given = task if call == "length_transfer" else spare.held
    run = getattr(pl, call)
    label = "state" if call == "length_transfer" else "y"
    space = {SITE: pl.subspaces.random(1, planted.WIDTH)}
    with pytest.raises(pl.InputError, match=r"directions='filter' says what is taken of a ProbeResult.*Leave it out"):
        run(spare.model, given, space, directions="filter", label=label)
    with pytest.raises(pl.InputError, match="rank=1 says"):
        run(spare.model, given, space, rank=1, label=label)
    old = dataclasses.replace(read, located={}, rows=[{**row, "label": label} for row in read.rows])
    old.coefs.update({key.replace("|y|", f"|{label}|"): rows for key, rows in read.coefs.items()})
    with pytest.raises(pl.InputError, match='Probe again, take those with directions="filter"'):
        run(spare.model, given, old, label=label)
    with pytest.raises(pl.InputError, match="directions='rows' is not known. Allowed: 'class_means', 'pattern'"):
        run(spare.model, given, old, directions="rows", label=label)


def test_a_probe_saved_without_patterns_still_has_its_filter(spare: World, read: pl.ProbeResult) -> None:
    old = dataclasses.replace(read, located={})
    (row,) = pl.ablate(spare.model, spare.held, old, directions="filter", controls=0, refit=False).targets()
    assert row["drop"] == 0.0

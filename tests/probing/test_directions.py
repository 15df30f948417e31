"""Filter, pattern, class means and LEACE of one probe, against plain linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probelens as pl
from probelens.probing.splits import split_by_group
from probelens.subspaces import between_share, directions, variance_share


def data(n: int = 1500, d: int = 12, classes: int = 4) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n, 1), generator=gen)
    mixed = torch.randn(n, 1, d, generator=gen) @ (torch.randn(d, d, generator=gen) * torch.logspace(1, -1, d))
    return mixed + torch.randn(classes, d, generator=gen)[y] + 3 * torch.randn(d, generator=gen), y


@pytest.fixture(scope="module")
def fitted() -> tuple[pl.ProbeResult, Tensor, Tensor]:
    """A probe, and the training rows that it saw."""
    x, y = data()
    train = split_by_group(torch.arange(len(x)), (0.6, 0.2, 0.2), 0).train
    return pl.probe({"a": x}, {"y": y}), x[train, 0].double(), y[train, 0]


def least_cosine(a: Tensor, b: Tensor) -> float:
    """Of the principal angles between two row spaces."""
    return float(torch.linalg.svdvals(torch.linalg.qr(a.mT).Q.mT @ torch.linalg.qr(b.mT).Q).min())


def test_the_pattern_is_the_covariance_times_the_rows_ordered_by_what_is_read(
    fitted: tuple[pl.ProbeResult, Tensor, Tensor],
) -> None:
    probes, x, _ = fitted
    sigma = torch.cov(x.mT, correction=0)
    rows = probes.coef("a").double()
    values, vectors = torch.linalg.eigh(sigma)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.mT
    _, _, order = torch.linalg.svd(root @ (rows - rows.mean(0)).mT, full_matrices=False)
    expected = (sigma @ (rows - rows.mean(0)).mT @ order.mT).mT
    for rank in (1, 2, 3):
        found = directions(probes, definition="pattern", rank=rank)["a"]
        assert least_cosine(found.basis, expected[:rank]) > 1 - 1e-6


def test_class_means_are_the_top_eigenvectors_of_the_between_class_covariance(
    fitted: tuple[pl.ProbeResult, Tensor, Tensor],
) -> None:
    probes, x, y = fitted
    mean = x.mean(0)
    deviations = torch.stack([x[y == k].mean(0) - mean for k in range(4)])
    shares = torch.bincount(y).double() / len(y)
    between = (deviations.mT * shares) @ deviations
    held = probes.directions("a").class_means
    torch.testing.assert_close(held.mT @ held, between, rtol=1e-4, atol=1e-5)
    top = torch.linalg.eigh(between).eigenvectors.flip(1).mT
    for rank in (1, 2, 3):
        assert least_cosine(directions(probes, rank=rank)["a"].basis, top[:rank]) > 1 - 1e-6


def test_without_the_class_means_all_classes_have_one_mean_and_without_the_filter_they_do_not(
    fitted: tuple[pl.ProbeResult, Tensor, Tensor],
) -> None:
    probes, x, y = fitted

    def spread(x: Tensor) -> float:
        return float(torch.stack([x[y == k].mean(0) for k in range(4)]).std(0).norm())

    whole = spread(x)
    assert spread(directions(probes)["a"].project_out(x)) < 1e-4 * whole
    assert spread(directions(probes, definition="leace")["a"](x)) < 1e-3 * whole
    assert spread(directions(probes, definition="filter")["a"].project_out(x)) > 0.3 * whole


def test_leace_of_the_probe_is_leace_of_its_training_rows(fitted: tuple[pl.ProbeResult, Tensor, Tensor]) -> None:
    probes, x, y = fitted
    own, reference = directions(probes, definition="leace")["a"], pl.leace(x, y)
    torch.testing.assert_close(own.matrix, reference.matrix, rtol=0, atol=1e-3)
    torch.testing.assert_close(own.correlations, reference.correlations, rtol=0, atol=1e-4)
    one = directions(probes, definition="leace", rank=1)["a"]
    torch.testing.assert_close(one.left, own.left[:, :1])


def test_a_number_has_one_direction_its_covariance_with_the_activations() -> None:
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(400, 3, 6, generator=gen) * torch.tensor([5.0, 1, 1, 1, 1, 1])
    y = x[..., 2] + 0.2 * torch.randn(400, 3, generator=gen)
    probes = pl.probe({"a": x}, {"y": y})
    train = split_by_group(torch.arange(400), (0.6, 0.2, 0.2), 0).train
    rows, values = x[train].flatten(0, 1).double(), y[train].flatten().double()
    expected = (rows - rows.mean(0)).mT @ (values - values.mean())
    assert directions(probes)["a"].rank == 1
    assert least_cosine(directions(probes)["a"].basis, expected[None]) > 1 - 1e-6


def test_a_readable_direction_of_no_variance_is_filter_but_not_class_means() -> None:
    gen = torch.Generator().manual_seed(2)
    y = torch.randint(2, (2000, 1), generator=gen)
    loud = 4 * torch.randn(2000, generator=gen)
    # Feature 0 holds the class under a loud nuisance; feature 1 is that nuisance, but for a hundredth of the class.
    x = torch.stack([y[:, 0] + loud, loud, torch.randn(2000, generator=gen)], -1)[:, None]
    probes = pl.probe({"a": x}, {"y": y}, Cs=(1000.0,))
    sigma = torch.cov(x[:, 0].double().mT)
    held = probes.directions("a").class_means
    share = {k: variance_share(directions(probes, definition=k)["a"], sigma) for k in ("filter", "class_means")}
    assert share["filter"] < 0.01 < 0.2 < share["class_means"]
    assert between_share(directions(probes)["a"], held) == pytest.approx(1, abs=1e-6)
    assert between_share(directions(probes, definition="filter")["a"], held) < 0.7


def test_directions_survive_saving(fitted: tuple[pl.ProbeResult, Tensor, Tensor], tmp_path) -> None:  # type: ignore[no-untyped-def]
    probes = fitted[0]
    again = pl.ProbeResult.load(probes.save(tmp_path / "probes.safetensors"))
    torch.testing.assert_close(directions(again)["a"].basis, directions(probes)["a"].basis)


def test_a_result_saved_without_patterns_says_so_and_still_has_its_rows(
    fitted: tuple[pl.ProbeResult, Tensor, Tensor],
) -> None:
    import dataclasses

    old = dataclasses.replace(fitted[0], located={})
    with pytest.raises(pl.InputError, match="saved without patterns"):
        directions(old)
    assert directions(old, definition="filter")["a"].rank == 3


@pytest.mark.parametrize(("kwargs", "said"), [({"definition": "rows"}, "'class_means'"), ({"rank": 0}, "at least 1")])
def test_bad_arguments_are_named(fitted: tuple[pl.ProbeResult, Tensor, Tensor], kwargs: dict, said: str) -> None:
    with pytest.raises(pl.InputError, match=said):
        directions(fitted[0], **kwargs)
    with pytest.raises(pl.InputError, match="a Tensor"):
        directions(torch.zeros(3))

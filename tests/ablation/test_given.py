"""A label that goes with the one that the model uses: erased given it at no cost, and named where it wasn't."""

from __future__ import annotations

import pytest
import torch

import probelens as pl
from probelens.examples import planted
from probelens.examples.planted import LENGTH, NUISANCE, SITE
from probelens.numerics.association import ASSOCIATED
from probelens.probing.refit import balanced, refit_check

KW = {"sites": SITE, "controls": 3, "mlp": False}


def correlated(agree: float, n: int = 1200) -> tuple[pl.HookedModel, pl.Batch, pl.Batch]:
    """The model that reads y only, on tokens in which z is y with this probability."""
    gen = torch.Generator().manual_seed(5)
    y = torch.randint(2, (n, LENGTH), generator=gen)
    z = torch.where(torch.rand(n, LENGTH, generator=gen) < agree, y, 1 - y)
    tokens = (torch.randint(NUISANCE, (n, LENGTH), generator=gen) << 2) | (z << 1) | y
    batch = pl.Batch(tokens, {"y": y, "z": z})
    return planted.unused().model, batch[: n // 2], batch[n // 2 :]


def test_what_is_not_used_costs_nothing_given_what_it_goes_with() -> None:
    model, fit, held = correlated(0.9)
    plain = pl.erase(model, fit, held, label="z", target="y", **KW)  # type: ignore[arg-type]
    given = pl.erase(model, fit, held, label="z", target="y", given="y", **KW)  # type: ignore[arg-type]
    assert plain.rows[0]["drop"] > 0.2
    assert given.rows[0]["drop"] == 0.0
    assert (given.rows[0]["verdict"], given.rows[0]["given"]) == ("erased", "y")
    # What is used is so given its shadow too.
    used = pl.erase(model, fit, held, label="y", given=["z"], **KW)  # type: ignore[arg-type]
    assert used.rows[0]["drop"] > 0.8


def test_inlp_stops_where_nothing_is_read_beyond_what_is_given() -> None:
    model, fit, held = correlated(0.9)
    row = pl.erase(model, fit, held, label="z", target="y", given="y", method="inlp", **KW).rows[0]  # type: ignore[arg-type]
    assert (row["stopped"], row["verdict"]) == ("at chance", "erased")
    assert row["fit_baseline"] < 0.56  # and not the 0.9 that y tells of z


def test_the_result_names_the_label_that_was_not_given() -> None:
    model, fit, held = correlated(0.9)
    plain = pl.erase(model, fit, held, label="z", target="y", **KW)  # type: ignore[arg-type]
    # P(z = y) = 0.9: mutual information 1 − h(0.9) bits of 1 bit each.
    assert plain.rows[0]["association"] == pytest.approx(0.531, abs=0.02)
    assert any("given='y'" in line for line in plain.findings())
    given = pl.erase(model, fit, held, label="z", target="y", given="y", **KW)  # type: ignore[arg-type]
    assert not any("given='y'" in line for line in given.findings())
    assert "given y" in given.findings()[0]
    model, fit, held = correlated(0.5)
    free = pl.erase(model, fit, held, label="z", target="y", **KW)  # type: ignore[arg-type]
    assert free.rows[0]["association"] < ASSOCIATED
    assert not any("given=" in line for line in free.findings())
    assert pl.erase(model, fit, held, label="y", **KW).rows[0]["association"] is None  # type: ignore[arg-type]


def test_the_check_within_strata_reads_what_an_unconditional_one_takes_for_the_other_label() -> None:
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(2, (300, 8), generator=gen)
    z = torch.where(torch.rand(300, 8, generator=gen) < 0.8, y, 1 - y)
    mask, groups = torch.ones_like(y, dtype=torch.bool), torch.arange(300)
    noise = torch.randn(300, 8, 4, generator=gen)
    only_y = noise + 5 * torch.nn.functional.one_hot(y, 4)
    row, _ = refit_check(only_y, only_y, z, mask, groups, mlp=False)
    assert row["refit_accuracy"] == pytest.approx(0.8, abs=0.04)
    assert row["readable_after"]
    row, _ = refit_check(only_y, only_y, z, mask, groups, mlp=False, given=y)
    assert not row["readable_after"]
    assert row["given_baseline"] < 0.55
    both = only_y + 5 * torch.nn.functional.one_hot(2 + z, 4)
    row, _ = refit_check(both, both, z, mask, groups, mlp=False, given=y)
    assert row["refit_accuracy"] > 0.95


def test_balanced_rows_are_of_two_classes_equally_many_in_each_stratum_and_from_the_mask() -> None:
    gen = torch.Generator().manual_seed(0)
    y, given = torch.randint(4, (50, 9), generator=gen) // 3, torch.randint(3, (50, 9), generator=gen)
    y[given == 2] = 1
    mask = torch.rand(50, 9, generator=gen) < 0.7
    kept = balanced(y, mask, given)
    assert not bool((kept & ~mask).any())
    for stratum in (0, 1):
        counts = torch.bincount(y[kept & (given == stratum)], minlength=2)
        rare = int((mask & (given == stratum) & (y == 1)).sum())
        assert counts.tolist() == [rare, rare]
    assert not bool(kept[given == 2].any())
    with pytest.raises(pl.InputError, match="tells the label wholly"):
        balanced(y, mask, y)


def test_errors_of_what_is_given() -> None:
    model, fit, held = correlated(0.7, 60)
    for given, words in (("z", "can't be given"), ("x", "given='x'"), (["y", "z"], "can't be given")):
        with pytest.raises(pl.InputError, match=words):
            pl.erase(model, fit, held, label="z", target="y", given=given, **KW)  # type: ignore[arg-type]
    numbers = [pl.Batch(b.tokens, {**b.labels, "v": b.labels["y"].float()}) for b in (fit, held)]
    with pytest.raises(pl.InputError, match="no strata"):
        pl.erase(model, *numbers, label="z", target="y", given="v", **KW)  # type: ignore[arg-type]
    constant = [pl.Batch(b.tokens, {**b.labels, "c": torch.full_like(b.labels["y"], 3)}) for b in (fit, held)]
    with pytest.raises(pl.InputError, match="given='c' is 3 wherever labels count"):
        pl.erase(model, *constant, label="z", target="y", given="c", **KW)  # type: ignore[arg-type]
    new = pl.Batch(held.tokens, {**held.labels, "y": held.labels["y"] + 1})
    with pytest.raises(pl.InputError, match="given='y' is 2 in held_batch, and never in fit_batch"):
        pl.erase(model, fit, new, label="z", target="z", given="y", **KW)  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [float("nan"), -0.1, 1.0])
def test_a_margin_that_turns_verdicts_over_is_refused(margin: float) -> None:
    made = planted.unused()
    with pytest.raises(pl.InputError, match="margin="):
        pl.erase(made.model, made.fit, made.held, label="z", target="y", sites=planted.SITE, margin=margin)
    space = {planted.SITE: pl.subspaces.random(1, planted.WIDTH, seed=0)}
    with pytest.raises(pl.InputError, match="margin="):
        pl.ablate(made.model, made.held, space, label="y", margin=margin)


@pytest.mark.parametrize("method", ["oracle", "quadratic"])
def test_erasers_that_take_labels_are_refused_at_a_recurrent_state(method: str) -> None:
    made, _ = planted.held_back(60)
    with pytest.raises(pl.InputError, match="step by step"):
        pl.erase(made.model, made.fit, made.held, label="y", sites="blocks.0.rnn.hook_c", method=method)

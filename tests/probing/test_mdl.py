"""Online codelength: what is known about it exactly, and what it tells that accuracy doesn't."""

from __future__ import annotations

import math

import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.probing import fit_path
from probelens.probing.mdl import PORTIONS, online_codelength


def features(n: int, d: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def draw(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, k, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [2, 11])
def test_random_labels_cost_what_they_cost_without_a_model(k: int) -> None:
    code = online_codelength(features(4000), draw(4000, k))
    assert code.uniform_bits == pytest.approx(4000 * math.log2(k))
    assert code.bits == pytest.approx(code.uniform_bits, rel=0.02)


@pytest.mark.parametrize("k", [2, 5])
def test_separable_labels_cost_almost_nothing(k: int) -> None:
    y = draw(4000, k)
    x = torch.nn.functional.one_hot(y, 8) * 6.0 + features(4000)
    code = online_codelength(x, y)
    assert code.compression > 25


def test_labels_independent_of_the_features_cost_their_entropy() -> None:
    y = (torch.rand(20_000, generator=torch.Generator().manual_seed(0)) < 0.1).long()
    entropy = -(0.1 * math.log2(0.1) + 0.9 * math.log2(0.9))
    code = online_codelength(features(20_000, 2), y)
    assert code.bits == pytest.approx(20_000 * entropy, rel=0.03)


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1], [0.8] + [0.02] * 10])
def test_the_compression_of_features_that_know_nothing_is_its_floor(shares: list[float]) -> None:
    p = torch.tensor(shares) / sum(shares)
    y = torch.multinomial(p, 8000, True, generator=torch.Generator().manual_seed(0))
    code = online_codelength(features(8000, 32), y, len(p))
    entropy = -float((p * p.log2()).sum())
    assert code.label_bits == pytest.approx(8000 * entropy, rel=0.03)
    assert code.floor == pytest.approx(math.log2(len(p)) / entropy, rel=0.03)
    assert 0.95 * code.floor < code.compression < 1.005 * code.floor
    known = online_codelength(features(8000, 32) + 6 * torch.nn.functional.one_hot(y, 32), y, len(p))
    assert known.compression > 5 * known.floor


def test_a_known_noise_costs_its_conditional_entropy() -> None:
    """Labels drawn from a logistic model: no code can beat their conditional entropy, a good one is near."""
    x = features(20_000, 4)
    logit = 3 * x[:, 0]
    y = (torch.rand(20_000, generator=torch.Generator().manual_seed(5)) < logit.sigmoid()).long()
    p = logit.sigmoid().double().clamp(1e-12, 1 - 1e-12)
    floor = float(-(p * p.log2() + (1 - p) * (1 - p).log2()).sum())
    code = online_codelength(x, y)
    assert floor * 0.98 < code.bits < floor * 1.05


def test_it_tells_a_rule_from_a_memory_where_accuracy_cannot() -> None:
    """Both labels are read without error at the end; one had to be learned item by item."""
    items = draw(8000, 300)
    code = features(300, 20, 7)  # what the activations say about each item
    x = torch.cat([torch.nn.functional.one_hot(items, 300).float(), code[items]], 1)
    rule, memory = (code[:, 0] > 0).long()[items], draw(300, 2, 8)[items]
    bits = []
    for y in (rule, memory):
        ((fit,),) = fit_path(x[:6000], y[:6000], 1.0)
        assert float((fit.predict(x[6000:]) == y[6000:]).float().mean()) > 0.98
        bits.append(online_codelength(x, y).bits)
    assert bits[1] > 2 * bits[0]


def test_the_blocks_are_those_of_the_source_and_add_up() -> None:
    code = online_codelength(features(10_000), draw(10_000, 3))
    assert code.ends == tuple(round(p * 10_000) for p in PORTIONS)
    assert sum(code.block_bits) == pytest.approx(code.bits)
    assert code.block_bits[0] == pytest.approx(10 * math.log2(3))


def test_blocks_end_where_sequences_end() -> None:
    groups = torch.arange(50).repeat_interleave(20)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    code = online_codelength(features(1000), draw(1000, 2), groups=groups)
    assert all(end % 20 == 0 for end in code.ends)
    assert code.ends[-1] == 1000
    again = online_codelength(features(1000), draw(1000, 2), groups=groups)
    other = online_codelength(features(1000), draw(1000, 2), groups=groups, seed=1)
    assert again.bits == code.bits != other.bits


def test_classes_that_come_late_can_be_coded() -> None:
    y = torch.cat([torch.zeros(500), torch.ones(300), torch.full((200,), 2.0)]).long()
    code = online_codelength(features(1000), y, n_classes=4)
    assert math.isfinite(code.bits)
    assert code.n_classes == 4


def test_bad_input_is_named() -> None:
    x = features(100)
    with pytest.raises(InputError, match="1 classes"):
        online_codelength(x, torch.zeros(100).long())
    with pytest.raises(ShapeError, match="one per row"):
        online_codelength(x, draw(99, 2))
    with pytest.raises(InputError, match="classes only"):
        online_codelength(x, torch.rand(100))
    with pytest.raises(InputError, match="grow"):
        online_codelength(x, draw(100, 2), portions=(0.5, 0.2, 1.0))
    with pytest.raises(InputError, match="NaN"):
        online_codelength(torch.full((100, 2), torch.nan), draw(100, 2))

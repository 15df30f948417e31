"""MLPProbe: reads what a linear probe can't, and nothing that isn't there."""

from __future__ import annotations

import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.probing.mlp import MLPProbe, mlp_accuracy
from probelens.probing.solvers.logistic import fit_path


def xor(n: int = 1500, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    return x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()


def parts(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    n = len(x)
    cuts = [slice(0, n * 6 // 10), slice(n * 6 // 10, n * 8 // 10), slice(n * 8 // 10, n)]
    return [(x[c], y[c]) for c in cuts]


def test_it_finds_a_code_that_no_linear_probe_reads() -> None:
    x, y = xor()
    train, val, test = parts(x, y)
    assert mlp_accuracy(train, val, test) > 0.9
    ((linear,),) = fit_path(train[0], train[1], 1.0)
    assert float((linear.predict(test[0]) == test[1]).float().mean()) < 0.6


def test_it_finds_nothing_in_shuffled_labels() -> None:
    x, y = xor(4000)
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    assert 0.44 < mlp_accuracy(*parts(x, y)) < 0.56


def test_it_is_deterministic_and_leaves_the_random_state_alone() -> None:
    x, y = xor(400)
    train, val, test = parts(x, y)
    state = torch.random.get_rng_state()
    a, b, c = (MLPProbe(seed=s).fit(*train, *val).logits(test[0]) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_trains_inside_no_grad_and_keeps_the_best_epoch() -> None:
    x, y = xor(400)
    wrong = torch.rand(400, generator=torch.Generator().manual_seed(2)) < 0.2
    train, val, _ = parts(x, torch.where(wrong, 1 - y, y))
    with torch.no_grad():
        probe = MLPProbe(max_epochs=200, patience=3).fit(*train, *val)
    assert probe.n_epochs_ < 200
    loss = torch.nn.functional.cross_entropy(probe.logits(val[0]), val[1])
    assert float(loss) == pytest.approx(probe.val_loss_, abs=1e-5)


def test_scale_and_offset_of_features_change_nothing() -> None:
    x, y = xor(600)
    scaled = x * torch.tensor([1e-3, 1e3, 1, 1, 1, 1]) + 50
    assert mlp_accuracy(*parts(scaled, y)) > 0.85


def test_bad_input_is_named() -> None:
    x, y = xor(100)
    with pytest.raises(InputError, match="one class only"):
        MLPProbe().fit(x, torch.zeros(100).long(), x, y)
    with pytest.raises(ShapeError, match="one per row"):
        MLPProbe().fit(x, y[:9], x, y)
    with pytest.raises(ShapeError, match="must agree"):
        MLPProbe().fit(x, y, x[:, :2], y)
    with pytest.raises(InputError, match="NaN"):
        MLPProbe().fit(x * torch.nan, y, x, y)
    with pytest.raises(InputError, match="integers"):
        MLPProbe().fit(x, y.float(), x, y)


def test_classes_may_have_any_ids() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=gen)
    y = (x[:, 0] > 0).long()
    parts = [slice(0, 180), slice(180, 240), slice(240, 300)]
    plain = mlp_accuracy(*((x[p], y[p]) for p in parts))
    far = mlp_accuracy(*((x[p], y[p] * 10**12 + 7) for p in parts))
    assert far == plain > 0.9
    probe = MLPProbe(max_epochs=1).fit(x[:180], y[:180] * 900_000, x[180:], y[180:] * 900_000)
    assert (probe.classes_.tolist(), probe.logits(x).shape) == ([0, 900_000], (300, 2))
    assert set(probe.predict(x).tolist()) <= {0, 900_000}

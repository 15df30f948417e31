"""What rounding leaves of activations that were taken away is no signal, and what is small but real stays."""

from __future__ import annotations

import pytest
import torch

from probelens.numerics.rounding import without_rounding
from probelens.probing.refit import refit_check
from probelens.subspaces.subspace import Subspace


def everything_removed(dtype: torch.dtype, offset: float = 5.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(120, 6, 4, generator=gen, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.1, 1.0]) + offset
    x = x.to(dtype)
    q = torch.linalg.qr(torch.randn(4, 4, generator=gen, dtype=torch.float64)).Q
    return x, Subspace(q, x.double().mean((0, 1))).project_out(x), torch.ones(120, 6, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_varies_where_all_directions_are_removed(dtype: torch.dtype) -> None:
    x, left, mask = everything_removed(dtype)
    out = without_rounding(x, left, mask)
    assert out.dtype == dtype
    assert all(len(feature.unique()) == 1 for feature in out.flatten(0, 1).T)
    torch.testing.assert_close(out, left)


def test_a_refit_reads_nothing_of_it_although_rounding_tells_the_label() -> None:
    x, left, mask = everything_removed(torch.float64, offset=0.0)
    assert 0 < (left - left.mean((0, 1))).abs().max() < 1e-14
    y = (left - left.mean((0, 1)))[..., 1].gt(0).long()
    raw, _ = refit_check(x, left, y, mask, torch.arange(120), power=False)
    assert raw["readable_after"], "a probe standardises what rounding leaves"
    row, _ = refit_check(x, without_rounding(x, left, mask), y, mask, torch.arange(120), power=False)
    assert not row["readable_after"]


def test_small_features_that_were_small_before_stay_and_so_do_masked_rows() -> None:
    x = torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1e-5])
    mask = torch.ones(50, 3, dtype=torch.bool)
    assert without_rounding(x, x, mask) is x
    left = x.clone()
    left[..., 0] = 1 + 1e-9 * x[..., 0]
    left[:, 1] = 7.0
    mask[:, 1] = False
    out = without_rounding(x, left, mask)
    assert torch.equal(out[..., 1], left[..., 1])
    assert torch.equal(out[:, 1], left[:, 1])


def test_one_position_may_be_rounding_alone() -> None:
    gen = torch.Generator().manual_seed(2)
    x, mask = 1 + torch.randn(80, 2, 3, generator=gen), torch.ones(80, 2, dtype=torch.bool)
    left = x.clone()
    left[:, 0] = 1 + 2.0**-23 * torch.randint(2, (80, 3), generator=gen)
    assert len(left[:, 0, 0].unique()) == 2
    out = without_rounding(x, left, mask)
    assert len(out[:, 0, 0].unique()) == 1
    assert torch.equal(out[:, 1], x[:, 1])

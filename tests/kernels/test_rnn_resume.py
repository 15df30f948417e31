"""Conditions that leave a known run of a recurrent layer give what torch gives for each of them by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from probelens.kernels.rnn_layer import Weights
from probelens.kernels.rnn_resume import KeptLayer

LENGTH, EXAMPLES, WIDTH = 9, 3, 4


@pytest.mark.parametrize("make", [nn.LSTM, lambda *a: nn.LSTM(*a, proj_size=2), nn.GRU, nn.RNN])
@pytest.mark.parametrize("pos", [0, 2])
def test_each_condition_goes_on_from_its_own_step(make: Any, pos: int) -> None:
    torch.manual_seed(0)
    rnn, x = make(WIDTH, 5), torch.randn(LENGTH, EXAMPLES, WIDTH)
    hx = tuple(torch.randn(1, EXAMPLES, n) for n in ((rnn.proj_size or 5, 5) if rnn.mode == "LSTM" else (5,)))
    start = hx if rnn.mode == "LSTM" else hx[0]
    with torch.no_grad():
        h = rnn(x, start)[0]
        ends = [rnn(x[: t + 1], start)[1] for t in range(LENGTH)]
        kept = (h, torch.cat([end[1] for end in ends])) if rnn.mode == "LSTM" else (h,)
        # One changes a step, one all that follow, one nothing; two begin together.
        begins = [pos, pos, 4, 8]
        inputs = [x.clone() for _ in begins]
        inputs[0][pos] += 1
        inputs[1][pos:] += torch.randn(LENGTH - pos, EXAMPLES, WIDTH)
        inputs[3][8, 1] -= 1
        want = torch.cat([rnn(each, start)[0] for each in inputs], 1)
        first = tuple(s[0].repeat(len(begins), 1) for s in hx)
        got, last = KeptLayer(rnn.mode, Weights.of(rnn, 0), x, kept).go_on(
            torch.cat(inputs, 1)[pos:], pos, begins, first
        )
    assert (got - want[pos:]).abs().max() <= 1e-6
    assert (want - h.repeat(1, 4, 1)).abs().max() > 0.1
    assert torch.equal(last[0], got[-1])

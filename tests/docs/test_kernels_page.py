"""The page on the recurrent kernels says what the kernels do."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from pages import run_page
from torch import nn

from probelens.kernels.rnn import rnn_points
from probelens.kernels.ssm import MAMBA2_POINTS, MAMBA_POINTS, KernelPoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "kernels.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a source tree")


def of_layer(*modules: nn.Module) -> dict[str, KernelPoint]:
    """Points of the first layer without the layer's number, each once."""
    found = {}
    for module in modules:
        found.update({name.removeprefix("0."): point for name, point in rnn_points(module).items()})
    return found


@pytest.mark.parametrize(
    ("table", "points"),
    [("mamba", MAMBA_POINTS), ("mamba2", MAMBA2_POINTS), ("rnn", of_layer(nn.LSTM(1, 1), nn.GRU(1, 1), nn.RNN(1, 1)))],
)
def test_tables_list_every_point_with_its_axes_and_note(table: str, points: dict[str, KernelPoint]) -> None:
    body = PAGE.read_text().split(f"<!-- {table} -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", body, re.MULTILINE)
    written = {name: (tuple(axes.split(", ")), note) for name, axes, note in rows}
    assert written == {name: (point.axes, point.note) for name, point in points.items()}


def test_example_runs_and_prints_what_it_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_page("docs/api/kernels.md")
    assert printed.getvalue().strip() == str([True] * 5 + [False] * 7)

"""Stacks of matrices under several threads: PyTorch's own batched LU answers wrongly there, or never."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import probelens
from probelens.numerics import linalg

LU = {"det", "inv", "inv_ex", "inverse", "logdet", "lu", "lu_factor", "lu_solve", "slogdet", "solve"}
ROOT = Path(probelens.__file__).parent

MATCHED = """
import torch
from probelens import subspaces
torch.set_num_threads(2)
q = torch.linalg.qr(torch.randn(164, 164, generator=torch.Generator().manual_seed(0)).double()).Q
sigma = (q * torch.logspace(1, -2, 164).double()) @ q.T
target = subspaces.random(155, 164, seed=1)
draws = subspaces.random_matched(target, sigma, n=6, max_overlap=1.0)
print(max(abs(d.variance_removed(sigma) / target.variance_removed(sigma) - 1) for d in draws))
"""

INVERSE = """
import torch
from probelens.numerics import linalg
torch.set_num_threads(2)
x = torch.randn(6, 200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
eye = torch.eye(200, dtype=x.dtype)
print(float(max((linalg.inverse(x) @ x - eye).abs().max(), (linalg.solve(x, x) - eye).abs().max())))
"""


@pytest.mark.parametrize(("code", "most"), [(MATCHED, 0.01), (INVERSE, 1e-9)], ids=["matched", "inverse"])
def test_large_stacks_come_out_right_under_two_threads(code: str, most: float) -> None:
    # In a process of its own: what this guards against may also never return.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stdout + done.stderr
    assert float(done.stdout) <= most


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
def test_one_at_a_time_is_what_torch_gives_for_a_stack(lead: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(*lead, 4, 4, generator=gen, dtype=torch.float64)
    b = torch.randn(*lead, 4, 2, generator=gen, dtype=torch.float64)
    torch.testing.assert_close(linalg.inverse(a), torch.linalg.inv(a))
    torch.testing.assert_close(linalg.solve(a, b), torch.linalg.solve(a, b))


def lu_calls(source: str) -> list[str]:
    """Calls of an LU routine, as a function of torch or a method of a tensor."""
    called = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(func)
        for func in called
        if isinstance(func, ast.Attribute) and func.attr in LU and ast.unparse(func.value) != "linalg"
    ]


def test_nothing_in_the_library_factorises_stacks_by_itself() -> None:
    assert lu_calls("torch.linalg.inv(x)\nx.det()\ntorch.inverse(x)") != []
    found = {
        path.name: calls
        for path in ROOT.rglob("*.py")
        if path.name != "linalg.py" and (calls := lu_calls(path.read_text()))
    }
    assert found == {}

"""Prints how close the reference forwards are to the native ones, family by family: ``python tests/support/fidelity.py``.

Largest difference of the logits, relative to the largest logit: native against reference in float32, and in
bfloat16 each of the two against float32. Native Mamba models of the mamba-ssm package run their own torch
references.
"""

from __future__ import annotations

import sys

import torch
import zoo
from torch import Tensor

import probelens as pl


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value of the second."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def row(name: str) -> str:
    """One line of the table."""
    raw = zoo.more(name)
    model, x = pl.wrap(raw), zoo.tokens(4, 16)
    report = model.verify(x[:2, :8])
    passed = sum(r["ok"] for r in report.rows)
    own = zoo.logits(raw, x)
    with torch.no_grad(), model.backend("reference"):
        full = relative(model(x), own)
        raw.to(torch.bfloat16)
        half = relative(model(x), own)
    native = relative(zoo.logits(raw, x), own)
    return f"{name:24} {passed:4} of {len(report.rows):3} {full:10.1e} {half:14.1e} {native:14.1e}"


if __name__ == "__main__":
    print(f"{'family':24} {'verified':>11} {'float32':>10} {'bf16 reference':>14} {'bf16 native':>14}")
    for wanted in sys.argv[1:] or zoo.EVERY:
        print(row(wanted), flush=True)

"""Search for clean/corrupted pairs: attempts until there are enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from probelens.errors import InputError
from probelens.tasks.drawing.distinct import ROUNDS

Pairs = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # clean and corrupted strings (n, length), position of the change (n,)


def collect_pairs(attempt: Callable[[], Pairs], n: int, what: str) -> Pairs:
    """Call ``attempt`` until there are ``n`` pairs."""
    kept, found = [], 0
    for _ in range(ROUNDS):
        kept.append(attempt())
        found += len(kept[-1][0])
        if found >= n:
            clean, corrupted, edit = (np.concatenate(part)[:n] for part in zip(*kept, strict=True))
            return clean, corrupted, edit
    raise InputError(
        f"found {found} of {n} pairs of {what}, in {ROUNDS} rounds of drawing. "
        "Ask for fewer, read elsewhere, or choose another label."
    )

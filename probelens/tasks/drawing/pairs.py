"""Finding clean/corrupted pairs by trying: change one early token, keep what is legal and changes a label."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from probelens.errors import InputError
from probelens.tasks.drawing.distinct import ROUNDS

if TYPE_CHECKING:
    from probelens.tasks.base import Task

__all__ = ["Pairs", "change_one_token", "collect_pairs"]

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def change_one_token(
    task: Task, n: int, length: int, read: int, label: str, rng: np.random.Generator
) -> Pairs:
    """Strings, the same with a random token of the first half of [0, read] changed, and where."""
    rows = np.arange(max(n, 64))

    def attempt() -> Pairs:
        clean = np.array(task.draw(len(rows), length, rng), dtype=np.int64)
        edit = rng.integers(0, read // 2 + 1, len(rows))
        corrupted = clean.copy()
        other = rng.integers(1, max(task.n_symbols, 2), len(rows))
        corrupted[rows, edit] = (clean[rows, edit] + other) % task.n_symbols
        good = (corrupted[rows, edit] != clean[rows, edit]) & (edit < read) & task.legal(corrupted)
        clean, corrupted, edit = clean[good], corrupted[good], edit[good]
        if not len(clean):
            return clean, corrupted, edit
        before = task.annotate(clean[:, : read + 1])[label][:, -1]
        after = task.annotate(corrupted[:, : read + 1])[label][:, -1]
        good = (before != after) & (before >= 0) & (after >= 0)
        return clean[good], corrupted[good], edit[good]

    return collect_pairs(
        attempt, n, f"{task.name} whose {label!r} at position {read} depends on an early token"
    )


def collect_pairs(attempt: Callable[[], Pairs], n: int, what: str) -> Pairs:
    """Call ``attempt`` until ``n`` pairs have come together."""
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

"""Search for clean/corrupted pairs: change one early token, keep what is legal and changes a label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from probelens.errors import InputError
from probelens.tasks.drawing.distinct import ROUNDS

__all__ = ["Pairs", "change_one_token", "collect_pairs"]

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def change_one_token(
    draw: Callable[[int], np.ndarray],
    legal: Callable[[np.ndarray], np.ndarray],
    classes: Callable[[np.ndarray], np.ndarray],
    n: int,
    n_symbols: int,
    read: int,
    rng: np.random.Generator,
    what: str,
) -> Pairs:
    """Draw strings and change one random token of the first half of [0, read] in each.

    Args:
        draw: Gives so many strings. (n, length)
        legal: Which strings are allowed. (n,) bool
        classes: The class at each position, which must differ at ``read``, below 0 where undefined. (n, pos)
        n: Number of pairs.
        n_symbols: Number of token ids.
        read: Position that is read.
        rng: The only source of randomness.
        what: Names the pairs in an error.

    Returns:
        Clean and corrupted strings (n, length), and the position of the change (n,).

    Raises:
        InputError: Too few such pairs were found.
    """
    rows = np.arange(max(n, 64))

    def attempt() -> Pairs:
        clean = np.array(draw(len(rows)), dtype=np.int64)
        edit = rng.integers(0, read // 2 + 1, len(rows))
        corrupted = clean.copy()
        other = rng.integers(1, max(n_symbols, 2), len(rows))
        corrupted[rows, edit] = (clean[rows, edit] + other) % n_symbols
        good = (corrupted[rows, edit] != clean[rows, edit]) & (edit < read) & legal(corrupted)
        clean, corrupted, edit = clean[good], corrupted[good], edit[good]
        if not len(clean):
            return clean, corrupted, edit
        before, after = classes(clean[:, : read + 1])[:, -1], classes(corrupted[:, : read + 1])[:, -1]
        good = (before != after) & (before >= 0) & (after >= 0)
        return clean[good], corrupted[good], edit[good]

    return collect_pairs(attempt, n, what)


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

"""Searches that draw, in rounds, until there are enough strings: not excluded ones, different ones, and pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from probelens.errors import InputError

# Rounds of drawing after which a search for strings is given up.
ROUNDS = 400

Draw = Callable[[int], np.ndarray]
# Clean and corrupted strings (n, length), and the position of the change (n,).
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def hashed(symbols: np.ndarray) -> np.ndarray:
    """64-bit hash per string. A collision only drops one string more. (n,)"""
    weights = np.random.default_rng(20260606).integers(1, 2**63, symbols.shape[1], dtype=np.uint64) * 2 + 1
    return ((symbols.astype(np.uint64) + np.uint64(1)) * weights).sum(1, dtype=np.uint64)


def avoid(draw: Draw, n: int, excluded: np.ndarray | None, what: str) -> np.ndarray:
    """Draw ``n`` strings whose hashes aren't in ``excluded``."""
    symbols = draw(n)
    if excluded is None:
        return symbols
    bad = np.flatnonzero(np.isin(hashed(symbols), excluded))
    for _ in range(ROUNDS):
        if not len(bad):
            return symbols
        symbols[bad] = draw(len(bad))
        bad = bad[np.isin(hashed(symbols[bad]), excluded)]
    raise InputError(
        f"no string of {what} is left after excluding {len(excluded)} (tried {ROUNDS} times). "
        "Exclude fewer, or use longer strings."
    )


def unique(draw: Draw, n: int, what: str, rng: np.random.Generator) -> np.ndarray:
    """Draw ``n`` different strings, in random order."""
    pool = draw(max(n, 256))
    for _ in range(ROUNDS):
        pool = pool[np.sort(np.unique(hashed(pool), return_index=True)[1])]
        if len(pool) >= n:
            # Frequent strings are found first: without shuffling the last split would hold the rare ones.
            return rng.permutation(pool[:n])
        found = len(pool)
        pool = np.concatenate([pool, draw(max(n - found, 256))])
    raise InputError(
        f"only {found} of {n} different strings of {what} were found in {ROUNDS} rounds of drawing. "
        "Ask for fewer, or use longer strings."
    )


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

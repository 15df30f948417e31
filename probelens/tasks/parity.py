"""Parity: whether the number of ones so far is odd."""

from __future__ import annotations

import numpy as np

from probelens.tasks.base import Task

__all__ = ["Parity"]


class Parity(Task):
    """Running exclusive or of fair bits: y_t = x_1 ⊕ … ⊕ x_t.

    Every guess from the position or from the last tokens is right half the time, and one flipped bit flips
    all later labels. Short prefixes recur across splits (there are 2^t of length t): report t ≥ 16 separately.

    Labels:
        - ``state``: 0 even, 1 odd. 2 classes.

    Pairs:
        One bit of the first half is flipped. Both strings are legal, as all are.

    Args:
        target: Label that models are trained on; there is one.
        bos: Put a BOS token in front.

    Raises:
        InputError: An unknown target.

    Examples:
        >>> task = Parity()
        >>> batch = task.sample(1, length=5, seed=1)
        >>> batch.tokens, batch.labels["state"]
        (tensor([[0, 0, 1, 1, 0]]), tensor([[0, 0, 1, 0, 0]]))
    """

    def __init__(self, target: str = "state", bos: bool = False) -> None:
        super().__init__("parity", ("0", "1"), {"state": ("even", "odd")}, target=target, bos=bos)

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, 2, (n, length), dtype=np.int8)

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": np.bitwise_xor.accumulate(symbols, axis=1)}

    def n_strings(self, length: int) -> int:
        return 2**length

"""Counter: a clipped count of ups and downs, like the depth of brackets without a stack."""

from __future__ import annotations

import numpy as np

from probelens.errors import InputError
from probelens.numerics.tensors import whole_number
from probelens.tasks.base import Task
from probelens.tasks.drawing import walks as _walk
from probelens.tasks.drawing.arguments import probability
from probelens.tasks.drawing.search import Pairs, collect_pairs

__all__ = ["Counter"]


class Counter(Task):
    """Sum of ±1 steps, clipped after each to 0 … m: y_t = min(m, max(0, y_{t−1} ± 1)).

    Bracket depth is such a sum too, and legal brackets never clip. Compared with Dyck it separates what a model does
    for counting from what it does for the stack. Every string is legal, and as for Dyck

    - the first t tokens of a long string are distributed as a string of length t, and
    - after 2m tokens the count is uniform over 0 … m at every position.

    Labels:
        - ``depth``: The count, 0 … m.

    Pairs:
        A "+" of the first half becomes a "-", after which the count stays 2 lower: the strings are drawn such
        that neither clips after the edit, since clipping makes the two run together.

    Args:
        max_depth: Greatest count m.
        noop: Probability of a no-op token, which changes nothing; 0 leaves it out of the vocabulary.
        target: Label that models are trained on; there is one.
        bos: Put a BOS token in front.

    Raises:
        InputError: An argument out of range or an unknown target.

    Examples:
        >>> import torch
        >>> task = Counter(max_depth=2)
        >>> task.labels(torch.tensor([[0, 0, 0, 1, 1, 1, 0]]))["depth"]
        tensor([[1, 2, 2, 1, 0, 0, 1]])
    """

    def __init__(self, max_depth: int = 10, noop: float = 0.0, target: str = "depth", bos: bool = False) -> None:
        self.max_depth = whole_number("max_depth", max_depth)
        self.noop = probability("noop", noop)
        symbols = ["+", "-", *(["."] if self.noop else [])]
        depths = [str(i) for i in range(self.max_depth + 1)]
        super().__init__("counter", symbols, {"depth": depths}, target=target, bos=bos)
        self._kernel = _walk.clipped(self.max_depth, self.noop)
        self._thresholds = _walk.to_stationary(self._kernel, np.full(len(depths), 1 / len(depths)))

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return _walk.walk(self._thresholds, self._kernel[1], n, length, rng).T

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        change = np.ascontiguousarray(_walk.CHANGE[symbols].T)
        depth = np.empty_like(change)
        count = np.zeros(change.shape[1], dtype=np.intp)
        for t in range(len(change)):
            count = (count + change[t]).clip(0, self.max_depth)
            depth[t] = count
        return {"depth": depth.T}

    def n_strings(self, length: int) -> int:
        return self.n_symbols**length

    def draw_pairs(self, n: int, length: int, read: int, label: str, rng: np.random.Generator) -> Pairs:
        """Strings in which one step of the walk is changed, and which clip nowhere after it.

        Raises:
            InputError: A ``max_depth`` below 3, where the two strings meet again.
        """
        if self.max_depth < 3:
            raise InputError(
                f"pairs need max_depth of at least 3; this task has {self.max_depth}. With less room the two "
                "strings clip and meet again."
            )
        after = _walk.plain(_walk.reflected(self.max_depth - 2, self.noop))

        def attempt() -> Pairs:
            rows = np.arange(max(n, 64))
            clean = np.array(self.draw(len(rows), length, rng), dtype=np.int64)
            before = np.pad(self.annotate(clean)["depth"], ((0, 0), (1, 0)))[:, : read // 2 + 1]
            usable = (before >= 1) & (before < self.max_depth)
            score = np.where(usable, rng.random(usable.shape), -1.0)
            edit, kept = score.argmax(1), np.flatnonzero(score.max(1) >= 0)
            clean, edit, rows = clean[kept], edit[kept], rows[: len(kept)]
            clean[rows, edit] = _walk.UP
            above = before[kept, edit] - 1  # the corrupted count, which ranges over 0 … m − 2
            for t in range(1, length):
                moves = _walk.step(rng.random(len(rows)), after[above])
                clean[:, t] = np.where(edit < t, moves, clean[:, t])
                above += np.where(edit < t, _walk.CHANGE[moves], 0)
            corrupted = clean.copy()
            corrupted[rows, edit] = _walk.DOWN
            return clean, corrupted, edit

        return collect_pairs(attempt, n, f"{self.name} of length {length} read at {read}")

"""What L-BFGS remembers of its steps, as two matrices: a direction takes a few products, whatever the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.probing.solvers.precondition import Metric

_MEMORY = 20


class Pairs:
    """The last steps and the changes of the gradient over them, oldest first.

    Args:
        like: Weights, whose shape and dtype the steps have. (k, d)

    Source:
        The compact form of the two-loop recursion: Byrd, Nocedal and Schnabel 1994, theorem 2.2.
    """

    def __init__(self, like: Tensor) -> None:
        self._k = len(like)
        # Rows are appended, and moved to the top when the space is full: so they stay one matrix.
        self._space = like.new_empty(2, _MEMORY + _MEMORY // 2, self._k * (like.shape[1] + 1))
        self.clear()

    def __len__(self) -> int:
        return self._end - self._start

    def clear(self) -> None:
        """Forget every step."""
        self._start = self._end = 0
        self._products = self._space.new_empty(0, 0)  # of steps with changes (m, m)

    def add(self, step: tuple[Tensor, Tensor], change: tuple[Tensor, Tensor]) -> None:
        """Remember a step of weights and intercepts, if the gradient grew along it."""
        s, y = _flat(*step), _flat(*change)
        own = torch.dot(s, y)
        if not float(own) > 0:
            return
        if len(self) == _MEMORY:
            self._start += 1
            self._products = self._products[1:, 1:]
        if self._end == self._space.shape[1]:
            kept = self._space[:, self._start : self._end].clone()
            self._start, self._end = 0, kept.shape[1]
            self._space[:, : self._end] = kept
        steps, changes = self._space[:, self._start : self._end]
        top = torch.cat([self._products, (steps @ y)[:, None]], 1)
        self._products = torch.cat([top, torch.cat([changes @ s, own[None]])[None]])
        self._space[0, self._end], self._space[1, self._end] = s, y
        self._end += 1

    def direction(self, gw: Tensor, gb: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
        """The way down from a gradient, in weights (k, d) and intercepts (k,)."""
        if not len(self):
            w, b = metric(gw, gb)
            return -w, -b
        steps, changes = self._space[:, self._start : self._end]
        upper, own = self._products.triu(), self._products.diagonal()
        g = _flat(gw, gb)
        a = _solve(upper, steps @ g, upper=True)
        rest = torch.addmv(g, changes.T, a, alpha=-1)
        v = _flat(*metric(*self._parts(rest)))
        c = _solve(upper.T, own * a - changes @ v, upper=False)
        w, b = self._parts(torch.addmv(v, steps.T, c))
        return -w, -b

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        return flat[: -self._k].view(self._k, -1), flat[-self._k :]


def _solve(triangle: Tensor, right: Tensor, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(triangle, right[:, None], upper=upper)[:, 0]


def _flat(w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([w.reshape(-1), b])

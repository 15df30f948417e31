"""The Hessian of a logistic regression at one point, factorised: what few iterations with few weights can pay for."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.links import Link

__all__ = ["Newton", "cost"]

_MOST = 1500  # weights and intercepts of which a Hessian is formed
_NUMBERS = 2**20  # in a part of the rows times the classes
_NEVER = 1e-12  # of the mean curvature by an intercept: that of a class that isn't there
_FEW = 8  # iterations, below which no Hessian is worth it


def cost(columns: int, d: int) -> float:
    """About how many iterations of L-BFGS a Hessian takes the time of; infinity where it is too large."""
    return max(columns * d * d / 1000, _FEW) if columns * (d + 1) <= _MOST else float("inf")


class Newton:
    """Inverse Hessian of C · loss + ½‖W‖² at one point; applied to a gradient, the Newton step back.

    Args:
        shared: The features.
        link: The loss.
        C: Inverse penalty.
        r: Probabilities minus targets at the point, as ``link.loss`` gives them. (n, columns)

    Raises:
        torch.linalg.LinAlgError: Rounding left the Hessian without an inverse.
    """

    def __init__(self, shared: Factorised, link: Link, C: float, r: Tensor) -> None:
        self._shared = shared
        k, d = link.columns, shared.d
        whole = torch.zeros(k * (d + 1), k * (d + 1), dtype=torch.float64, device=r.device)
        rows = max(1, _NUMBERS // len(whole))
        for start in range(0, shared.n, rows):
            part = slice(start, start + rows)
            x = shared.restrict(shared.x[part])
            x = torch.cat([x, torch.full_like(x[:, :1], float(shared.fit_intercept))], 1)
            whole += link.hessian(r[part], x, part)
        whole *= C
        blocks = whole.view(k, d + 1, k, d + 1)
        ids = torch.arange(k, device=r.device)
        for i in range(d):  # the penalty
            blocks[ids, i, ids, i] += 1
        size = blocks[ids, d, ids, d].mean().clamp(min=1e-300)
        blocks[ids, d, ids, d] += _NEVER * size if shared.fit_intercept else 1.0
        if k > 1:  # one constant added to all intercepts changes nothing
            blocks[:, d, :, d] += size
        self._factor = torch.linalg.cholesky(whole)

    def __call__(self, gw: Tensor, gb: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.cat([gw, gb[:, None]], 1).to(self._factor)
        step = torch.cholesky_solve(g.reshape(-1, 1), self._factor).view_as(g).to(gw.dtype)
        return self._shared.restrict(step[:, :-1]), step[:, -1]

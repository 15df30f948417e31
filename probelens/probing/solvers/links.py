"""Losses of the two logistic models, as functions of the logits alone.

Both follow scikit-learn: more than two classes have one column of weights per class, two classes have one.
Logits are kept relative to the right class. Where classes separate, a row's loss is then log(1 + ε) of a
small ε computed without cancellation, which is what lets float32 solve problems with a large C.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Link:
    """Loss, residual and curvature of one label set, with class ids (n,) and row weights (n,), None for ones."""

    columns: int

    def __init__(self, y: Tensor, weight: Tensor | None) -> None:
        self.y = y
        self.weight = weight

    def sum(self, per_row: Tensor) -> float:
        """Weighted sum over rows, in float64."""
        per_row = per_row.double()
        return float(per_row.sum() if self.weight is None else self.weight @ per_row)

    def weighted(self, r: Tensor) -> Tensor:
        """Rows times their weights. (n, columns)"""
        return r if self.weight is None else r * self.weight[:, None].to(r.dtype)

    def start(self) -> Tensor:
        """Intercepts at which the probabilities are the class frequencies. (columns,)"""
        raise NotImplementedError

    def relative(self, z: Tensor) -> Tensor:
        """Logits, or a direction of logits, relative to the right class; may overwrite z. (n, columns)"""
        raise NotImplementedError

    def loss(self, z: Tensor) -> tuple[float, Tensor]:
        """Weighted log-loss of relative logits in nats, and probabilities minus targets. (), (n, columns)"""
        raise NotImplementedError

    def slope(self, r: Tensor, a: Tensor) -> float:
        """Derivative of the loss along a relative direction."""
        return self.sum(torch.linalg.vecdot(r, a))

    def curvature(self, r: Tensor, a: Tensor, b: Tensor) -> float:
        """Second derivative of the loss along relative directions a and b."""
        raise NotImplementedError

    def covariance(self, r: Tensor) -> Tensor:
        """Weighted sum over rows of the Hessian by the logits. (columns, columns) float64"""
        raise NotImplementedError

    def hessian(self, r: Tensor, x: Tensor, rows: slice) -> Tensor:
        """Hessian by the weights, from some rows and their features x (m, d). (columns · d, columns · d)"""
        raise NotImplementedError


class Softmax(Link):
    """Multinomial log-loss over ``n_classes`` columns."""

    def __init__(self, y: Tensor, n_classes: int, weight: Tensor | None) -> None:
        super().__init__(y, weight)
        self.columns = n_classes
        self._index = y[:, None]

    def start(self) -> Tensor:
        counts = torch.bincount(self.y, weights=self.weight, minlength=self.columns).double()
        # A class without weight has its optimum at minus infinity; a small count keeps the start finite.
        log = (counts + 1e-3).log()
        return log - log.mean()

    def relative(self, z: Tensor) -> Tensor:
        return z.sub_(z.gather(1, self._index))

    def loss(self, z: Tensor) -> tuple[float, Tensor]:
        top = z.amax(1, keepdim=True)  # at least 0, the right class
        e = torch.sub(z, top).exp_()
        right = torch.exp(-top)
        e.scatter_(1, self._index, 0.0)
        others = e.sum(1, keepdim=True)
        total = others + right
        # log(total / right), without losing a small ratio and without dividing by an underflow.
        per_row = torch.where(top > 20, top + total.log(), torch.log1p(others / right.clamp(min=1e-30)))
        r = e.div_(total)
        r.scatter_(1, self._index, -(others / total))
        return self.sum(per_row[:, 0]), r

    def curvature(self, r: Tensor, a: Tensor, b: Tensor) -> float:
        ra = r * a
        mean_a = ra.sum(1)
        mean_b = mean_a if a is b else torch.linalg.vecdot(r, b)
        return self.sum(torch.linalg.vecdot(ra, b) - mean_a * mean_b)

    def covariance(self, r: Tensor) -> Tensor:
        p = r.scatter_add(1, self._index, torch.ones_like(r[:, :1]))
        wp = self.weighted(p)
        return torch.diag(wp.sum(0, dtype=torch.float64)) - (p.T @ wp).double()

    def hessian(self, r: Tensor, x: Tensor, rows: slice) -> Tensor:
        p = r.scatter_add(1, self._index[rows], torch.ones_like(r[:, :1])).to(x.dtype)
        root = 1.0 if self.weight is None else self.weight[rows, None].sqrt().to(x.dtype)
        out = -_gram(((p * root)[:, :, None] * x[:, None, :]).flatten(1)).double()
        blocks = out.view(self.columns, x.shape[1], self.columns, x.shape[1])
        for i, share in enumerate((p * root * root).T):
            blocks[i, :, i, :] += (x * share[:, None]).T @ x
        return out


class Sigmoid(Link):
    """Binary log-loss of one column; the logit is that of class 1."""

    columns = 1

    def __init__(self, y: Tensor, weight: Tensor | None) -> None:
        super().__init__(y, weight)
        # Relative logits are those of the wrong class: z for class 0, −z for class 1.
        self._sign = (1.0 - 2.0 * y)[:, None]

    def start(self) -> Tensor:
        counts = torch.bincount(self.y, weights=self.weight, minlength=2).double() + 1e-3
        return (counts[1:] / counts[:1]).log()

    def relative(self, z: Tensor) -> Tensor:
        return z.mul_(self._sign)

    def loss(self, z: Tensor) -> tuple[float, Tensor]:
        return self.sum(torch.nn.functional.softplus(z[:, 0], threshold=40.0)), torch.sigmoid(z)

    def weighted(self, r: Tensor) -> Tensor:
        return super().weighted(r * self._sign.to(r.dtype))

    def curvature(self, r: Tensor, a: Tensor, b: Tensor) -> float:
        return self.sum((r * (1 - r) * a * b)[:, 0])

    def covariance(self, r: Tensor) -> Tensor:
        total = self.sum((r * (1 - r))[:, 0])
        return torch.tensor([[total]], dtype=torch.float64, device=r.device)

    def hessian(self, r: Tensor, x: Tensor, rows: slice) -> Tensor:
        own = (r * (1 - r)).to(x.dtype)
        return (x * (own if self.weight is None else own * self.weight[rows, None].to(x.dtype))).T @ x


def _gram(x: Tensor) -> Tensor:
    """xᵀx, of which the half above the diagonal is enough. (d, d)"""
    out = x.new_zeros(x.shape[1], x.shape[1])
    width = -(-x.shape[1] // 4)
    for start in range(0, x.shape[1], width):
        out[start : start + width, start:] = x[:, start : start + width].T @ x[:, start:]
    return out.triu() + out.triu(1).T


def link_for(y: Tensor, n_classes: int, weight: Tensor | None) -> Link:
    """The loss of a label set: binary for two classes, multinomial for more."""
    return Sigmoid(y, weight) if n_classes == 2 else Softmax(y, n_classes, weight)

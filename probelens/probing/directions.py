"""Where a probed variable lies: filter, pattern, class means and LEACE of one probe, from its training rows.

A probe's row is a *filter*: what to read with. It is not where the variable lies. The *pattern* of a filter w is Σw, and
the class means span the subspace in which the classes differ at all: without it no linear probe beats a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.linalg import between_rows
from probelens.probing.solvers.factor import Factorised

Definition = Literal["class_means", "pattern", "filter", "leace"]
DEFINITIONS: tuple[str, ...] = get_args(Definition)
_SMALL = 1e-6  # canonical correlations up to this are rounding of float32 features


@dataclass(frozen=True, eq=False)
class Directions:
    """The directions of one variable at one site, by every definition.

    Source: patterns: Haufe et al. 2014, NeuroImage 87; LEACE: Belrose et al. 2023, arXiv 2306.03819, theorem 4.2.
    """

    filter: Tensor  # the probe's rows in the space of the activations (class, d), or (1, d) for a number
    pattern: Tensor  # Σ_xx W, the columns along which what the probe reads varies most first (k, d)
    # √p_k (μ_k − μ) of each class, or Σ_xz/σ_z of a number: their outer products sum to the between-class covariance.
    class_means: Tensor  # (class, d), or (1, d)
    leace_left: Tensor  # what LEACE changes, the largest canonical correlation first (k, d)
    leace_right: Tensor  # what it reads (k, d)
    # Shares of the training rows' variance and of the between-class variance in the span of "filter" and "class_means".
    carried: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, shared: Factorised, rows: Tensor, y: Tensor) -> Directions:
        """Every definition in float64, from factorised training rows, the probe's rows (class, d) and labels (n,)."""
        n, scale = shared.n, shared.scale.double()
        w = rows.double()
        w = w - w.mean(0) if len(w) > 1 else w
        read = (shared.x @ (w * scale).to(shared.x).mT).double()
        values, vectors = torch.linalg.eigh(read.mT @ read / n)
        order = values.argsort(descending=True)[: int((values > values[-1].clamp_min(0) * 1e-10).sum())]
        pattern = shared.cross(read @ vectors[:, order]) / n * scale
        means = between_rows(shared.x, y) * scale
        # What a class has in common with all others says nothing: Σ_xz of one-hot z is p_k (μ_k − μ).
        white = shared.vectors / (shared.values / n).sqrt() / scale[:, None]
        unwhite = shared.vectors * (shared.values / n).sqrt() * scale[:, None]
        u, s, _ = torch.linalg.svd(white.mT @ means.mT, full_matrices=False)
        u = u[:, : max(1, len(means) - 1)][:, s[: max(1, len(means) - 1)] > _SMALL]
        found = cls(rows.double(), pattern, means, (unwhite @ u).mT, (white @ u).mT)
        for definition in ("filter", "class_means"):
            basis = torch.nn.functional.normalize(found.rows(definition), dim=1)
            found.carried[definition] = _share(unwhite.mT, basis), _share(means, basis)
        return found

    def rows(self, definition: str) -> Tensor:
        """At most classes − 1 rows of a definition, largest first, neither orthogonal nor of unit length. (k, d)"""
        if definition == "pattern":
            return self.pattern
        if definition not in ("filter", "class_means"):
            raise InputError(f"directions={definition!r} is not known. Allowed: {', '.join(map(repr, DEFINITIONS))}")
        rows = self.filter if definition == "filter" else self.class_means
        if definition == "filter" and len(rows) > 1:
            rows = rows - rows.mean(0)  # a softmax reads differences of rows only
        _, size, right = torch.linalg.svd(rows, full_matrices=False)
        kept = int((size > size.max().clamp_min(1e-300) * 1e-6).sum())
        return size[:kept, None] * right[:kept]


def _share(rows: Tensor, basis: Tensor) -> float:
    """The share of the squares of rows (k, d) that lies in the span of an orthonormal basis (r, d)."""
    total = float(rows.square().sum())
    return min(float((rows @ basis.to(rows).mT).square().sum()) / total, 1.0) if total > 0 else 0.0

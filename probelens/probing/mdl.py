"""Online codelength: how many bits the labels cost someone who has the activations.

Where accuracy is at its ceiling, the codelength still falls when that accuracy is reached from fewer
examples. The labels are sent block by block, each coded with the probe fitted on all blocks before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.numerics.tensors import tensor_of
from probelens.probing.solvers.factor import Factorised, as_features
from probelens.probing.solvers.logistic import DEFAULT_CS, LogisticFit, fit_path

__all__ = ["PORTIONS", "Codelength", "online_codelength"]

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the data at which a block ends."""

# Shares of the uniform distribution to choose from, beside 1 / (labels sent + 1).
_EPSILONS = (0.03, 0.3)


@dataclass(frozen=True)
class Codelength:
    """The cost of sending labels to someone who has the activations.

    Args:
        bits: Online codelength.
        uniform_bits: Codelength by an even distribution: n · log₂(number of classes).
        compression: uniform_bits / bits; compare it with ``floor``, not with 1.
        ends: Number of labels sent at the end of each block.
        block_bits: Bits of each block; the first is sent uniformly.
        n_classes: Number of classes.
        label_bits: Codelength by the labels' own frequencies, without activations: n · H(y). Features that know nothing
            cost about as much.
    """

    bits: float
    uniform_bits: float
    compression: float
    ends: tuple[int, ...]
    block_bits: tuple[float, ...]
    n_classes: int
    label_bits: float

    @property
    def floor(self) -> float:
        """The compression that the labels' frequencies alone give, log₂(number of classes) / H(y): 1 for even classes."""
        return self.uniform_bits / self.label_bits


@exact
def online_codelength(
    X: Tensor | Any,
    y: Tensor,
    n_classes: int | None = None,
    *,
    groups: Tensor | None = None,
    portions: Sequence[float] = PORTIONS,
    Cs: Sequence[float] = DEFAULT_CS,
    seed: int = 0,
    tol: float = 1e-3,
) -> Codelength:
    """Code labels block by block with linear probes fitted on the blocks before.

    The receiver can do everything that decides the code: C and the share of a uniform distribution that is
    mixed in are chosen on the last fifth of the labels already sent, then the probe is fitted on all of them.

    Args:
        X: Features, standardised on what was sent. (n, d)
        y: Class ids. (n,)
        n_classes: Number of classes, known to both sides, with ids below it; None: the classes that occur.
        groups: Sequence of each row. Sequences are shuffled and sent whole. None: the rows are sent as given. (n,)
        portions: Ascending shares of the rows at which a block ends; the last is 1.
        Cs: Inverse penalties to choose from.
        seed: Seeds the order of the groups.
        tol: Relative gap in the objective at which the solver stops.

    Returns:
        The codelength and its parts, in bits. Labels that the features say nothing of cost about n · H(y), so their
        compression is ``floor``: 1 for even classes, more for uneven ones.

    Raises:
        ShapeError: Labels or groups that don't fit the rows.
        InputError: One class only, NaN, or portions that don't grow to 1.

    Source:
        Voita and Titov 2020, arXiv 2003.12298, section 2.2.

    Examples:
        >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
        >>> online_codelength(x, (x[:, 0] > 0).long()).compression > 10
        True
    """
    x = as_features(X)
    y = tensor_of("y", y).to(x.device)
    if y.shape != x.shape[:1]:
        raise ShapeError(f"y has shape {tuple(y.shape)}; it must be ({len(x)},), one per row")
    if y.is_floating_point() or bool((y < 0).any()):
        raise InputError("y must be class ids from 0; codelengths are defined for classes only")
    if n_classes is None:
        known, y = torch.unique(y, return_inverse=True)
    k = len(known) if n_classes is None else n_classes
    if len(y.unique()) < 2 or int(y.max()) >= k:
        raise InputError(f"y has {len(y.unique())} classes with ids up to {int(y.max())}; n_classes is {k}")
    shares = [float(p) for p in portions]
    if not shares or any(b <= a for a, b in pairwise([0.0, *shares])) or abs(shares[-1] - 1) > 1e-9:
        raise InputError(f"portions={tuple(portions)}: they must grow from above 0 to 1")

    n = len(x)
    order, starts = _order(groups, n, seed)
    x, y = x[order.to(x.device)], y[order.to(x.device)].long()
    ends = sorted({_boundary(share * n, starts) for share in shares})
    blocks = [ends[0] * math.log2(k)]
    for sent, until in pairwise(ends):
        blocks.append(_bits(x[:sent], y[:sent], x[sent:until], y[sent:until], k, Cs, starts, tol))
    uniform, bits = n * math.log2(k), sum(blocks)
    p = y.unique(return_counts=True)[1].double() / n
    return Codelength(bits, uniform, uniform / bits, tuple(ends), tuple(blocks), k, -n * float((p * p.log2()).sum()))


def _order(groups: Tensor | None, n: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """A row order with whole groups, and the rows (from 1) after which a group ends."""
    if groups is None:
        return torch.arange(n), np.arange(1, n + 1)
    if groups.shape != (n,):
        raise ShapeError(f"groups has shape {tuple(groups.shape)}; it must be ({n},), one per row")
    _, ids = np.unique(groups.cpu().numpy(), return_inverse=True)
    rank = np.random.default_rng([seed, 0x0D1]).permutation(int(ids.max()) + 1)[ids]
    order = np.argsort(rank, kind="stable")
    return torch.from_numpy(order), np.cumsum(np.bincount(rank))


def _boundary(target: float, starts: np.ndarray) -> int:
    """The end of a group nearest to a number of rows, at least the first."""
    return int(starts[np.abs(starts - target).argmin()])


def _bits(
    x: Tensor, y: Tensor, x_next: Tensor, y_next: Tensor, k: int, Cs: Sequence[float], starts: np.ndarray, tol: float
) -> float:
    """Bits of the next labels under a model of those already sent."""
    n = len(y)
    earlier = starts[starts < n]
    inner = _boundary(0.8 * n, earlier) if len(earlier) else 0
    seen, ids = torch.unique(y, return_inverse=True)
    if inner and len(seen) > 1 and len(ids[:inner].unique()) > 1:
        C, epsilon = _choose(x[:inner], y[:inner], x[inner:], y[inner:], k, Cs, 1 / (n + 1), tol)
        if C is not None:
            ((fit,),) = fit_path(Factorised.of(x, standardize=True), ids, C, tol=tol)
            return float(_code(_spread(fit, seen, x_next, k), y_next, epsilon).sum())
    return len(y_next) * math.log2(k)


def _choose(
    x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, k: int, Cs: Sequence[float], least: float, tol: float
) -> tuple[float | None, float]:
    """C and the share of the uniform distribution with the shortest code; None for uniform alone."""
    seen, ids = torch.unique(y, return_inverse=True)
    found: list[tuple[float, float, float]] = []

    def worse_twice(_: int, fit: LogisticFit) -> bool:
        p = _spread(fit, seen, x_val, k)
        found.append(min((float(_code(p, y_val, e).mean()), e, fit.C) for e in (least, *_EPSILONS)))
        costs = [cost for cost, _, _ in found]
        return len(costs) > 2 and min(costs[-2:]) > min(costs[:-2])

    fit_path(Factorised.of(x, standardize=True), ids, sorted(Cs), tol=tol, stop=worse_twice)
    cost, epsilon, C = min(found)
    return (C, epsilon) if cost < math.log2(k) else (None, 1.0)


def _spread(fit: LogisticFit, seen: Tensor, x: Tensor, k: int) -> Tensor:
    """Probabilities of all classes; those not seen yet have none. (n, k)"""
    p = torch.zeros(len(x), k, dtype=torch.float64, device=x.device)
    p[:, seen] = fit.logits(x).double().softmax(1)
    return p


def _code(p: Tensor, y: Tensor, epsilon: float) -> Tensor:
    """Bits of each label under probabilities mixed with the uniform ones. (n,)"""
    right = p.gather(1, y[:, None])[:, 0]
    return -((1 - epsilon) * right + epsilon / p.shape[1]).log2()

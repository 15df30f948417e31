"""One solver for every logistic probe: all label sets and all C on shared features at once.

Minimises scikit-learn's objective, C · Σᵢ wᵢ · log-lossᵢ + ½‖W‖², the intercept not penalised, by L-BFGS in
which each part removes a cost that fitting one probe after the other would pay again:

- The preconditioner is C · S ⊗ XᵀX + I, with S the mean covariance of the predicted classes. Its
  eigendecomposition is that of XᵀX, shared by everything fitted on the features, and a small one per C.
- Logits are linear in the weights, so the logits of a direction are computed once and the line search
  never touches the features: one product forward and one backward per iteration, whatever it tries.
- The next C starts from the best point in the span of the last solution and its last change, found in
  logit space as well. At large C, where the classes separate, this saves most of the iterations.
- Where the weights are few, a problem that takes long goes on with its exact Hessian as the preconditioner.
- All label sets walk their paths side by side, and their products with the features are one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import exact
from probelens.numerics.tensors import tensor_of
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.links import Link, link_for
from probelens.probing.solvers.walker import LogisticFit, Request, Walker

__all__ = ["DEFAULT_CS", "LogisticFit", "fit_path"]

DEFAULT_CS = tuple(10.0**k for k in range(-4, 4))

_MANY, _ROWS = 32, 1024  # columns of a product from which on it is done in parts, and their rows

Walk = Generator[Request, Tensor, list[LogisticFit]]


@exact
def fit_path(
    X: Tensor | Factorised | Any,
    ys: Tensor | Sequence[Tensor],
    Cs: float | Sequence[float] = DEFAULT_CS,
    sample_weight: Tensor | None = None,
    *,
    n_classes: int | Sequence[int] | None = None,
    tol: float = 1e-4,
    max_iter: int = 1000,
    fit_intercept: bool = True,
    standardize: bool = False,
    stop: Callable[[int, LogisticFit], bool] | None = None,
) -> list[list[LogisticFit]]:
    """Logistic regressions for several label sets and several C on the same features.

    Args:
        X: Features, or their `Factorised` to use again. (n, d)
        ys: Class ids from 0, one tensor or one per label set. each (n,)
        Cs: Inverse penalties, positive. Solved upwards, returned in the order given.
        sample_weight: Weight of each row; with a `Factorised`, give it there. (n,)
        n_classes: Classes of each label set; None: one more than its largest id. Classes that don't
            occur get a column too.
        tol: Relative gap in the objective to stop at. From 1e-6 down, float64 finishes the work.
        max_iter: Iterations at each C.
        fit_intercept: Whether to fit an intercept; with a `Factorised`, it decides.
        standardize: Penalise the weights of standardised features; with a `Factorised`, it decides.
        stop: Called with (label set, fit) after each C; True leaves out the larger C of that label set.

    Returns:
        Fits by label set, then by C. A list is shorter where ``stop`` ended it.

    Raises:
        InputError: A label set with one class, negative ids, or C, tol or max_iter out of range.
        ShapeError: Labels that don't fit the rows.

    Units:
        The objective is in nats. On one core, 20,000 × 768 features with 11, 3 and 256 classes and 8 values
        of C take about 25 s.

    Source:
        Objective: scikit-learn's LogisticRegression. L-BFGS: Nocedal and Wright 2006, chapter 7.

    Examples:
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> (fit,), = fit_path(x, torch.tensor([0, 0, 1, 1]), Cs=1.0)
        >>> fit.predict(x).tolist(), fit.coef.shape
        ([0, 0, 1, 1], torch.Size([1, 1]))
    """
    if isinstance(X, Factorised):
        if sample_weight is not None:
            raise InputError("sample_weight was given with factorised features: give it to Factorised.of")
        shared = X
    else:
        shared = Factorised.of(X, sample_weight, fit_intercept=fit_intercept, standardize=standardize)
    values = [float(Cs)] if isinstance(Cs, int | float) else [float(C) for C in Cs]
    if not values or not all(0 < C < math.inf for C in values):
        raise InputError(f"Cs={Cs!r}: give at least one inverse penalty, each a positive number")
    if not tol > 0 or max_iter < 1:
        raise InputError(f"tol={tol}, max_iter={max_iter}: tol must be above 0 and max_iter at least 1")
    if not isinstance(ys, (Tensor, Sequence)) or isinstance(ys, (str, bytes)):
        raise InputError(f"ys must be class ids or a list of such tensors, got a {type(ys).__name__}")
    labels = [ys] if isinstance(ys, Tensor) else list(ys)
    counts = [n_classes] * len(labels) if n_classes is None or isinstance(n_classes, int) else list(n_classes)
    if len(counts) != len(labels):
        raise InputError(f"n_classes has {len(counts)} entries for {len(labels)} label sets; give one for each")
    links = [_link(y, count, shared, i) for i, (y, count) in enumerate(zip(labels, counts))]
    order = sorted(set(values))
    walks = [
        Walker(shared, link, order, tol, max_iter, None if stop is None else partial(stop, i)).run()
        for i, link in enumerate(links)
    ]
    paths = _drive(shared, walks)
    found = [{fit.C: fit for fit in path} for path in paths]
    return [[fits[C] for C in values if C in fits] for fits in found]


def _link(y: Tensor, count: int | None, shared: Factorised, which: int) -> Link:
    y = tensor_of(f"label set {which}", y).to(shared.x.device)
    if y.shape != (shared.n,):
        raise ShapeError(f"label set {which} has shape {tuple(y.shape)}; it must be ({shared.n},), one per row")
    if y.is_floating_point() or y.is_complex():
        raise InputError(f"label set {which} has dtype {y.dtype}; class ids must be integers. Use .long().")
    y = y.long()
    low, high = int(y.min()), int(y.max())
    k = high + 1 if count is None else count
    if low < 0 or high >= k:
        raise InputError(f"label set {which} has ids from {low} to {high}; with {k} classes, 0 to {k - 1} are allowed")
    if low == high:
        raise InputError(f"label set {which} has one class only, {low}; a probe needs at least two")
    return link_for(y, k, shared.weight)


def _drive(shared: Factorised, walks: list[Walk]) -> list[list[LogisticFit]]:
    """Run the walks side by side, doing the products they ask for in batches."""
    results: list[list[LogisticFit]] = [[] for _ in walks]
    waiting: dict[int, Request] = {}

    def go_on(i: int, answer: Tensor | None) -> None:
        try:
            # The first is started without an answer, and may end without a question.
            waiting[i] = next(walks[i]) if answer is None else walks[i].send(answer)
        except StopIteration as done:
            results[i] = done.value
            waiting.pop(i, None)

    for i in range(len(walks)):
        go_on(i, None)
    while waiting:
        kinds = {(kind, t.dtype) for kind, t in waiting.values()}
        for kind, dtype in sorted(kinds, key=str):
            who = [i for i, (k, t) in waiting.items() if k == kind and t.dtype == dtype]
            parts = [waiting[i][1] for i in who]
            x = shared.at(dtype)
            # Weights are (columns, d), so that the thin factor comes first: several times faster on CPUs.
            if kind == "logits":
                answers = _logits(x, _join(parts, 0)).split([len(p) for p in parts], 1)
            else:
                answers = (_join(parts, 1).T @ x).split([p.shape[1] for p in parts], 0)
            for i, answer in zip(who, answers):
                go_on(i, answer.contiguous())
    return results


def _logits(x: Tensor, weights: Tensor) -> Tensor:
    """x (n, d) times weights (columns, d), transposed. Of many columns it is a quarter faster in parts that stay in the cache."""
    if len(weights) < _MANY or x.device.type != "cpu":
        return x @ weights.T
    turned, out = weights.T.contiguous(), x.new_empty(len(x), len(weights))
    for rows in range(0, len(x), _ROWS):
        torch.mm(x[rows : rows + _ROWS], turned, out=out[rows : rows + _ROWS])
    return out


def _join(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

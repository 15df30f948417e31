"""Control tasks: random labels by context, to measure what a probe can memorise.

Hewitt and Liang give each word type a random label, so a probe scores well there by memorising only. Formal
tasks have too few tokens for that: here the type is a window of the last w tokens, with w chosen so that there
are about 256 of them.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.tensors import tensor_of
from probelens.tasks.baselines import windows

__all__ = ["contexts", "control_labels", "selectivity"]


def contexts(
    tokens: Tensor, n_contexts: int = 256, mask: Tensor | None = None, w: int | None = None
) -> tuple[Tensor, int]:
    """Number the windows of the last w tokens at each position.

    Args:
        tokens: Token ids. (batch, pos)
        n_contexts: Number of different windows wanted. w is the smallest that gives as many, or the largest that
            still adds any.
        mask: True where a position counts. (batch, pos)
        w: Length of the windows; None: chosen by ``n_contexts``.

    Returns:
        Ids from 0, hashed down to ``n_contexts`` where there are more, and w. (batch, pos), ()

    Raises:
        ShapeError: tokens aren't (batch, pos).
        InputError: n_contexts below 2, w below 1, or tokens that aren't integers.

    Examples:
        >>> ids, w = contexts(torch.tensor([[0, 1, 0, 1, 1, 0]]), n_contexts=4)
        >>> w, int(ids.max()) + 1
        (2, 4)
    """
    tokens = tensor_of("tokens", tokens)
    if tokens.ndim != 2:
        raise ShapeError(f"tokens has shape {tuple(tokens.shape)}; it must be (batch, pos)")
    if tokens.is_floating_point():
        raise InputError(f"tokens must be integers, got {tokens.dtype}")
    if n_contexts < 2 or (w is not None and w < 1):
        raise InputError(f"n_contexts={n_contexts}, w={w}: at least two contexts and one token are needed")
    x = tokens.cpu().numpy().astype(np.int64)
    keep = np.ones(x.shape, bool) if mask is None else mask.bool().cpu().numpy()
    if keep.shape != x.shape:
        raise ShapeError(f"the mask has shape {keep.shape}; it must be {x.shape}, as the tokens")
    ids, kinds, back = np.zeros(x.shape, np.int64), 0, 0
    most = x.shape[1] if w is None else min(w, x.shape[1])
    for (ids,) in itertools.islice(windows(x), most):
        back += 1
        now, seen = len(np.unique(ids[keep])), int(ids.max(initial=-1)) + 1
        # Where a longer window distinguishes nothing new, neither does any longer one.
        if w is None and (now >= n_contexts or now == keep.sum() or seen == kinds):
            break
        kinds = seen
    if ids.max(initial=0) >= n_contexts:
        ids = _hash(ids) % n_contexts
    return torch.as_tensor(ids, device=tokens.device), back


def control_labels(
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    n_contexts: int = 256,
    w: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Random labels that depend on the last w tokens only, each as frequent as the real one.

    Args:
        tokens: Token ids. (batch, pos)
        labels: The real labels, whose frequencies are matched: class ids, or numbers. (batch, pos)
        mask: True where a label counts. (batch, pos)
        n_contexts, w: As for ``contexts``.
        seed: Seeds the assignment.

    Returns:
        Control labels, of the dtype of ``labels``. (batch, pos)

    Raises:
        ShapeError: Shapes that differ.
        InputError: Nothing is left by the mask.

    Source:
        Hewitt and Liang 2019, arXiv 1909.03368, section 2.

    Examples:
        >>> tokens = torch.randint(0, 2, (50, 20), generator=torch.Generator().manual_seed(0))
        >>> control = control_labels(tokens, tokens.cumsum(1) % 2, seed=0)
        >>> control.shape, control.unique().tolist()
        (torch.Size([50, 20]), [0, 1])
    """
    tokens, labels = tensor_of("tokens", tokens), tensor_of("labels", labels)
    mask = None if mask is None else tensor_of("mask", mask)
    if labels.shape != tokens.shape:
        raise ShapeError(f"labels {tuple(labels.shape)} and tokens {tuple(tokens.shape)} must have one shape")
    ids, _ = contexts(tokens, n_contexts, mask, w)
    where = ids.cpu().numpy()
    keep = np.ones(where.shape, bool) if mask is None else mask.bool().cpu().numpy()
    if not keep.any():
        raise InputError("no label counts: the mask is False everywhere")
    rng = np.random.default_rng([seed, 0xC0117])
    real = labels.cpu().numpy()
    sizes = np.bincount(where[keep], minlength=int(where.max()) + 1).astype(float)
    if labels.is_floating_point():
        drawn = rng.choice(real[keep], size=len(sizes))
        return torch.as_tensor(drawn[where], device=labels.device).to(labels.dtype)
    kinds, counts = np.unique(real[keep], return_counts=True)
    # Large contexts first; each class is drawn in proportion to how much of its share is left.
    open_share = counts.astype(float)
    given = np.zeros(len(sizes), np.int64)
    for context in np.lexsort((rng.random(len(sizes)), -sizes)):
        chance = np.clip(open_share, 0, None)
        chance = chance / chance.sum() if chance.sum() > 0 else counts / counts.sum()
        pick = rng.choice(len(kinds), p=chance)
        given[context] = pick
        open_share[pick] -= sizes[context]
    return torch.as_tensor(kinds[given[where]], device=labels.device).to(labels.dtype)


def selectivity(task: float, control: float) -> float:
    """Accuracy on the task minus accuracy on its control task.

    Args:
        task: Accuracy on the task.
        control: Accuracy of the same kind of probe on the control task.

    Returns:
        The difference, in the same unit.

    Source:
        Hewitt and Liang 2019, arXiv 1909.03368.

    Examples:
        >>> selectivity(0.75, 0.5)
        0.25
    """
    return task - control


def _hash(ids: np.ndarray) -> np.ndarray:
    """A fixed mixing of integers (splitmix64), so that neighbours don't share a bucket."""
    with np.errstate(over="ignore"):
        x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)

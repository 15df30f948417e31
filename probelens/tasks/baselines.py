"""Baselines: how well a label can be guessed without tracking any state.

Only a score above these says something about a state. They need tokens and labels but no task, so probing
uses them too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.tensors import whole_number
from probelens.tasks.data import Batch

__all__ = ["baseline_predictions", "baselines", "windows"]


def baseline_predictions(
    train_tokens: Tensor, train_labels: Tensor, test_tokens: Tensor, train_mask: Tensor | None = None, w: int = 4
) -> dict[str, np.ndarray]:
    """Guesses of each baseline at every position of the test sequences.

    Args:
        train_tokens: Where the guesses are learned. (batch, pos)
        train_labels: Class ids. (batch, pos)
        test_tokens: Where to guess; may be longer. (batch, pos)
        train_mask: True where a training label counts. (batch, pos) bool
        w: Window of the last-tokens guess.

    Returns:
        Class ids by baseline name, as in `baselines`. each (batch, pos)

    Raises:
        InputError: w below 1, or no label counts in training.
        ShapeError: Labels or mask don't fit the tokens.
    """
    w = whole_number("w", w)
    train = Batch(train_tokens, {"label": train_labels}, train_mask)
    x, y, keep = train.tokens.cpu().numpy(), train.labels["label"].cpu().numpy(), train.mask.cpu().numpy()
    x_test = Batch(test_tokens).tokens.cpu().numpy()
    if not keep.any():
        raise InputError("no training label counts: the mask is False everywhere. Pass a batch with labels.")
    # Classes are counted by their place among those that occur, so ids may be of any size.
    known, y_kept = np.unique(y[keep], return_inverse=True)
    n_classes = len(known)
    majority = int(np.bincount(y_kept).argmax())

    positions = np.broadcast_to(np.arange(x.shape[1]), x.shape)[keep]
    by_position = _mode(positions, y_kept, x.shape[1], n_classes)
    position = np.full(x_test.shape[1], majority)
    shared = min(x.shape[1], x_test.shape[1])
    position[:shared] = np.where(by_position[:shared] >= 0, by_position[:shared], majority)

    # The longest window that was seen in training decides.
    last_w = np.full(x_test.shape, majority)
    for context, context_test in itertools.islice(windows(x, x_test), w):
        n_contexts = 1 + max(int(ids.max(initial=0)) for ids in (context, context_test))
        guess = _mode(context[keep], y_kept, n_contexts, n_classes)[context_test]
        last_w = np.where(guess >= 0, guess, last_w)

    return {
        "majority": np.full(x_test.shape, known[majority]),
        "position": np.broadcast_to(known[position], x_test.shape).copy(),
        "last_w": known[last_w],
    }


def baselines(
    train_tokens: Tensor,
    train_labels: Tensor,
    test_tokens: Tensor,
    test_labels: Tensor,
    train_mask: Tensor | None = None,
    test_mask: Tensor | None = None,
    *,
    w: int = 4,
) -> dict[str, dict[str, float]]:
    """Accuracy of guessing a label without its state, learned on train and scored on test.

    - ``majority``: the most frequent class.
    - ``position``: the most frequent class at this position; the majority at positions that train lacks.
    - ``last_w``: the most frequent class after these last w tokens. A window that train lacks backs off to
      the last w−1, …, 1 tokens, then to the majority. At the first positions the window is shorter.

    Args:
        Those of ``baseline_predictions``.
        test_labels: Class ids. (batch, pos)
        test_mask: True where a test label counts. (batch, pos) bool

    Returns:
        ``{name: {"accuracy": …, "balanced_accuracy": …}}``. Balanced accuracy is the mean recall over the
        classes that occur in test, so every constant guess scores one over their number.

    Raises:
        InputError: w below 1, or no label counts.
        ShapeError: Labels or masks don't fit the tokens.

    Units:
        Fractions of the positions where the mask is True.

    Examples:
        >>> import torch
        >>> tokens = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])
        >>> baselines(tokens, tokens, tokens, tokens, w=1)["last_w"]
        {'accuracy': 1.0, 'balanced_accuracy': 1.0}
    """
    test = Batch(test_tokens, {"label": test_labels}, test_mask)
    keep, truth = test.mask.cpu().numpy(), test.labels["label"].cpu().numpy()
    if not keep.any():
        raise InputError("no test label counts: the mask is False everywhere. Pass a batch with labels.")
    guesses = baseline_predictions(train_tokens, train_labels, test_tokens, train_mask, w)
    return {name: _score(guess[keep], truth[keep]) for name, guess in guesses.items()}


def _score(guess: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    right = guess == truth
    _, truth = np.unique(truth, return_inverse=True)
    recall = np.bincount(truth, weights=right) / np.bincount(truth)
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(recall.mean())}


def _mode(context: np.ndarray, labels: np.ndarray, n_contexts: int, n_classes: int) -> np.ndarray:
    """The most frequent label per context, −1 where unseen; ties go to the lowest class. (n_contexts,)"""
    pairs, counts = np.unique(context * n_classes + labels, return_counts=True)
    order = np.lexsort((pairs, -counts))[::-1]  # best pair of each context last, so that it is written last
    best = np.full(n_contexts, -1, dtype=np.int64)
    best[pairs[order] // n_classes] = pairs[order] % n_classes
    return best


def windows(*tokens: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Numbers the windows of the last 1, 2, … tokens, equal windows alike. each (batch, pos) -> each (batch, pos)"""
    start = 1 + max(int(x.max(initial=0)) for x in tokens)  # stands for what comes before the first token
    ids = [np.zeros(x.shape, np.int64) for x in tokens]
    for back in itertools.count():
        keys = [i * (start + 1) for i in ids]
        for key, x in zip(keys, tokens, strict=True):
            key[:, :back] += start
            key[:, back:] += x[:, : max(x.shape[1] - back, 0)]
        flat = np.unique(np.concatenate([key.ravel() for key in keys]), return_inverse=True)[1]
        ends = np.cumsum([x.size for x in tokens])[:-1]
        ids = [part.reshape(x.shape) for part, x in zip(np.split(flat, ends), tokens, strict=True)]
        yield ids

"""Linear probes of every label on one site and split: C chosen on validation, guesses on test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from probelens.errors import InputError
from probelens.probing.directions import Directions
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.logistic import LogisticFit, fit_path
from probelens.probing.splits import Split

# The search towards larger C ends after so many in a row without a gain on validation.
_PATIENCE = 2


@dataclass(frozen=True, eq=False)
class Fitted:
    """Probes of every label on one site and split, and their guesses on the test sequences."""

    fits: dict[str, LogisticFit]
    guess: dict[str, Tensor]  # class ids guessed on the test sequences, each (n_test, pos)
    mean: Tensor  # of the training rows (d,)
    n_rows: tuple[int, int]  # of training and of validation
    train: tuple[Factorised, dict[str, Tensor]] | None = None  # the training rows (n, d) and each label there (n,)

    @classmethod
    def of(
        cls, x: Tensor, tasks: Mapping[str, Tensor], mask: Tensor, split: Split, Cs: Sequence[float],
        tol: float, max_rows: int | None, seed: int,
    ) -> Fitted:  # fmt: skip
        """Fit every label's path of C on shared features, and keep the best on validation."""
        train, val = mask[split.train], mask[split.val]
        x_train = x[split.train][train]
        rows = _some(len(x_train), max_rows, seed)
        x_train, x_val, x_test = x_train[rows], x[split.val][val], x[split.test]
        # float32 can't hold a large offset and the digits after it, so the offset is subtracted in float64 first.
        offset = torch.zeros(x.shape[-1], dtype=torch.float64)
        if x.dtype == torch.float64:
            offset = x_train.mean(0)
            x_train, x_val, x_test = (part - offset for part in (x_train, x_val, x_test))
        x_train, x_val, x_test = x_train.float(), x_val.float(), x_test.float()
        ys = [y[split.train][train][rows] for y in tasks.values()]
        for name, y in zip(tasks, ys, strict=True):
            if len(y.unique()) < 2:
                raise InputError(
                    f"labels {name!r} have one class only among the training sequences. Give more sequences."
                )
        val_ys = [y[split.val][val] for y in tasks.values()]
        counts = [int(y[mask].max()) + 1 for y in tasks.values()]
        scores: list[list[float]] = [[] for _ in ys]
        losses: list[list[float]] = [[] for _ in ys]
        blind = [share(val_y == y.bincount().argmax()) for y, val_y in zip(ys, val_ys, strict=True)]

        def no_gain(which: int, fit: LogisticFit) -> bool:
            score, loss, logits = scores[which], losses[which], fit.logits(x_val)
            score.append(share(logits.argmax(1) == val_ys[which]))
            loss.append(float(cross_entropy(logits.double(), val_ys[which])))
            if len(score) <= _PATIENCE or max(score[-_PATIENCE:]) > max(score[:-_PATIENCE]):
                return False
            # A probe of a rare class guesses the most frequent one until C is large; only its loss shows that it learns.
            return max(score) > blind[which] or min(loss[-_PATIENCE:]) >= min(loss[:-_PATIENCE])

        fits: dict[str, LogisticFit] = {}
        kept: tuple[Factorised, dict[str, Tensor]] | None = None
        if tasks:
            shared = Factorised.of(x_train, standardize=True)
            paths = fit_path(shared, ys, sorted(Cs), n_classes=counts, tol=tol, stop=no_gain)
            for name, path, score in zip(tasks, paths, scores, strict=True):
                # On a tie the smaller C: the simpler probe.
                fits[name] = path[max(range(len(path)), key=lambda i: (score[i], -i))]
            kept = shared, dict(zip(tasks, ys, strict=True))
        guess = {
            name: fit.logits(x_test.flatten(0, 1)).argmax(1).unflatten(0, x_test.shape[:2])
            for name, fit in fits.items()
        }
        if bool(offset.any()):
            fits = {
                name: dataclasses.replace(fit, intercept=fit.intercept - fit.coef @ offset.to(fit.coef))
                for name, fit in fits.items()
            }
        mean = x_train.double().mean(0) + offset
        return cls(fits, guess, mean.float(), (len(x_train), len(x_val)), kept)

    def directions(self, label: str) -> Directions:
        """Where a label lies in the activations, by every definition."""
        assert self.train is not None
        shared, ys = self.train
        return Directions.of(shared, self.fits[label].softmax()[0], ys[label])


def _some(n: int, most: int | None, seed: int) -> Tensor:
    """All rows in order, or ``most`` of them at random, in order."""
    if most is None or n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:most].sort().values


def share(right: Tensor) -> float:
    """Share of True values."""
    return right.double().mean().item()


def by_position(right: Tensor, keep: Tensor) -> Tensor:
    """Accuracy at each position, NaN where nothing counts. (pos,)"""
    return ((right & keep).double().sum(0) / keep.double().sum(0)).float()

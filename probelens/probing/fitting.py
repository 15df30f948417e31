"""Linear probes of every label on one site and split: C chosen on validation, guesses on test."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from probelens.errors import InputError
from probelens.numerics.mapped import chunks, gather
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
    # Class ids guessed where labels count in the test sequences, 0 elsewhere. each (n_test, pos)
    guess: dict[str, Tensor]
    mean: Tensor  # of the training rows (d,)
    n_rows: tuple[int, int]  # of training and of validation
    directions: dict[str, Directions]  # where a label lies in the activations, of the labels asked for

    @classmethod
    def of(
        cls, x: Tensor, tasks: Mapping[str, Tensor], mask: Tensor, split: Split, Cs: Sequence[float],
        tol: float, max_rows: int | None, seed: int, located: Collection[str] = (), site: str = "",
    ) -> Fitted:  # fmt: skip
        """Fit every label's path of C on shared features, and keep the best on validation.

        ``located`` are the labels whose directions are wanted. The activations are read once (float64 ones twice), and what
        is held of them is one float32 copy of the rows that are used.
        """
        train, val, _ = sides = _sides(mask, split, max_rows, seed)
        if not tasks:
            return cls({}, {}, _mean(x, train).float(), (int(train.sum()), int(val.sum())), {})
        for name, y in tasks.items():
            if len(y[train].unique()) < 2:
                raise InputError(
                    f"labels {name!r} have one class only among the training sequences. Give more sequences."
                )
        # float32 can't hold a large offset and the digits after it, so the offset is subtracted in float64 first.
        offset = _mean(x, train) if x.dtype == torch.float64 else torch.zeros(x.shape[-1], dtype=torch.float64)
        x_train, x_val, x_test = gather(x, sides, torch.float32, offset.to(x) if bool(offset.any()) else None, site)
        ys = [y[train] for y in tasks.values()]
        val_ys = [y[val] for y in tasks.values()]
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
        directions: dict[str, Directions] = {}
        n_train = len(x_train)
        # The training rows become the features: nothing else holds them from here on.
        shared = Factorised.of(x_train, standardize=True, overwrite=True)
        del x_train
        paths = fit_path(shared, ys, sorted(Cs), n_classes=counts, tol=tol, stop=no_gain)
        for name, y, path, score in zip(tasks, ys, paths, scores, strict=True):
            # On a tie the smaller C: the simpler probe.
            fits[name] = fit = path[max(range(len(path)), key=lambda i: (score[i], -i))]
            if name in located:
                directions[name] = Directions.of(shared, fit.softmax()[0], y)
        keep = mask[split.test]
        guess = {
            name: torch.zeros(keep.shape, dtype=torch.long, device=keep.device).masked_scatter(
                keep, fit.predict(x_test)
            )
            for name, fit in fits.items()
        }
        if bool(offset.any()):
            fits = {
                name: dataclasses.replace(fit, intercept=fit.intercept - fit.coef @ offset.to(fit.coef))
                for name, fit in fits.items()
            }
        mean = shared.mean + offset.to(shared.mean)
        return cls(fits, guess, mean.float(), (n_train, len(x_val)), directions)


def _sides(mask: Tensor, split: Split, most: int | None, seed: int) -> list[Tensor]:
    """Where labels count in training, validation and test; of training at most some at random. each (n, pos)"""
    out = []
    for rows in (split.train, split.val, split.test):
        side = torch.zeros_like(mask)
        side[rows] = mask[rows]
        out.append(side)
    where = out[0].flatten().nonzero()[:, 0]
    if most is not None and len(where) > most:
        some = torch.randperm(len(where), generator=torch.Generator().manual_seed(seed))[:most]
        out[0] = torch.zeros_like(mask)
        out[0].view(-1)[where[some]] = True
    return out


def _mean(x: Tensor, keep: Tensor) -> Tensor:
    """Of the rows that are kept, in float64. (d,)"""
    total = torch.zeros(x.shape[-1], dtype=torch.float64)
    for rows, part in chunks(x):
        total += part[keep[rows]].sum(0, dtype=torch.float64).cpu()
    return total / int(keep.sum())


def share(right: Tensor) -> float:
    """Share of True values."""
    return right.double().mean().item()


def by_position(right: Tensor, keep: Tensor) -> Tensor:
    """Accuracy at each position, NaN where nothing counts. (pos,)"""
    return ((right & keep).double().sum(0) / keep.double().sum(0)).float()

"""Ridge probes of numeric labels on one site and split, and guesses without activations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.numerics.mapped import gather
from probelens.probing.data import Data
from probelens.probing.directions import Directions
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.ridge import RidgeFit, ridge_path
from probelens.probing.splits import Split
from probelens.tasks.baselines import windows

DEFAULT_ALPHAS = tuple(10.0**k for k in range(-2, 6))
_ROWS = 4096  # predicted at once


@dataclass(frozen=True, eq=False)
class ValueFit:
    """The ridge probe of one label on one site and split, and its guesses on the test rows."""

    alpha: float
    coef: Tensor  # (d,)
    intercept: Tensor  # ()
    guess: Tensor  # where labels count in the test sequences (row,)
    n_rows: tuple[int, int]  # of training and of validation
    directions: Directions


def fit_values(
    x: Tensor,
    tasks: Sequence[Mapping[str, Tensor]],
    mask: Tensor,
    split: Split,
    alphas: Sequence[float],
    site: str = "",
) -> list[dict[str, ValueFit]]:
    """Fit ridge probes of several sets of labels on one site, with one factorisation for all.

    ``x`` is (n, pos, d), labels and mask are (n, pos). The penalty is chosen on validation, for standardised features.
    """
    sides = (split.train, split.val, split.test)
    train, val, test = gather(x, [_side(mask, rows) for rows in sides], site=site)
    n_rows = len(train), len(val)
    shared = Factorised.of(train, standardize=True, precise=True, overwrite=True)
    del train
    out: list[dict[str, ValueFit]] = []
    for values in tasks:
        truth = [torch.stack([y[rows][mask[rows]].double() for y in values.values()], 1) for rows in sides[:2]]
        fits = ridge_path(shared, truth[0], alphas)
        errors = torch.stack([(_predict(fit, val) - truth[1]).square().mean(0) for fit in fits])
        found: dict[str, ValueFit] = {}
        for j, (label, best) in enumerate(zip(values, errors.argmin(0).tolist(), strict=True)):
            fit = fits[best]
            guess = _predict(fit, test)[:, j]
            directions = Directions.of(shared, fit.coef[j][None], truth[0][:, j])
            found[label] = ValueFit(fit.alpha, fit.coef[j].float(), fit.intercept[j].float(), guess, n_rows, directions)
        out.append(found)
    return out


def _side(mask: Tensor, rows: Tensor) -> Tensor:
    """Where labels count among some sequences. (n, pos)"""
    out = torch.zeros_like(mask)
    out[rows] = mask[rows]
    return out


def _predict(fit: RidgeFit, x: Tensor) -> Tensor:
    """Predictions in float64, of a part of the rows at a time. (row, label)"""
    return torch.cat([fit.predict(part.double()) for part in x.split(_ROWS)])


def value_guesses(data: Data, values: Tensor, split: Split, w: int) -> dict[str, float]:
    """R² of guesses without activations: of the mean at each position and, with tokens, of the mean after the longest
    window of at most the last ``w`` tokens that occurs in training.
    """
    mask, at = data.mask, data.at
    train, test = mask[split.train], mask[split.test]
    y, truth = values[split.train][train], values[split.test][test]
    spread = (truth - truth.mean()).square().sum()
    keys = {"position": [torch.arange(mask.shape[1]).expand(mask.shape)]}
    if data.tokens is not None:
        found = [torch.from_numpy(ids) for (ids,) in itertools.islice(windows(data.tokens.numpy()), w)]
        keys["last_w"] = found if at is None else [ids[:, at] if at.ndim == 1 else ids.gather(1, at) for ids in found]
    out = {}
    for name, shorter_first in keys.items():
        guess = y.mean().expand(len(truth))
        for ids in shorter_first:
            size = int(ids.max()) + 1
            seen, asked = ids[split.train][train], ids[split.test][test]
            count = torch.bincount(seen, minlength=size).double()
            mean = torch.zeros(size, dtype=torch.float64).index_add_(0, seen, y) / count.clamp(min=1)
            guess = torch.where(count[asked] > 0, mean[asked], guess)
        out[name] = float(1 - (guess - truth).square().sum() / spread)
    return out

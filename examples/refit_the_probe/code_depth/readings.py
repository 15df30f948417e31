"""Balanced accuracy of probes and of guesses, with intervals over modules, and where along the layers it rises."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.numerics.indices import READABLE, STATISTICS, profile_statistics, verdict
from probelens.numerics.tensors import class_numbers
from probelens.probing.splits import split_by_group
from probelens.running.activations import Activations
from probelens.tasks.data import Batch

DRAWS = 1000

LEAST = 3  # modules: the recall of a class that fewer of the test modules hold is that of a function or two


@dataclasses.dataclass(frozen=True, eq=False)
class Readings:
    """The balanced accuracy of the probes of one label.

    Args:
        balanced: Balanced accuracy at each site. (site,)
        drawn: The same of resampled modules. (draw, site)
        guesses: Balanced accuracy of guesses that don't read the model.
        classes: The classes that count.
    """

    balanced: Tensor
    drawn: Tensor
    guesses: dict[str, float]
    classes: tuple[int, ...]

    @classmethod
    def of(cls, found: pl.ProbeResult, acts: Activations, batch: Batch, label: str, seed: int) -> Readings:
        """Score the probes again on their test sequences, corrected for the frequency of the classes."""
        split = split_by_group(batch.groups, seed=seed)
        places, known = class_numbers(batch.labels[label], batch.mask)
        batch = dataclasses.replace(batch, labels={label: places})
        train, test = batch[split.train], batch[split.test]
        counts = torch.bincount(train.labels[label][train.mask], minlength=len(known))
        prior = (counts / counts.sum()).log()
        hits = []
        for site in found.sites:
            logits = acts[site][split.test] @ found.coef(site, label).T + found.intercept(site, label)
            right, asked = recalls((logits - prior).argmax(-1), test, label, len(prior))
            hits.append(right)
        kept = counted(asked)
        balanced = torch.stack([(right.sum(0) / asked.sum(0))[kept].mean() for right in hits])
        guesses = {}
        for name, w in (("majority", -1), ("position", 0), ("last_w", 4)):
            right, asked = recalls(guess(train, test, label, w, len(prior)), test, label, len(prior))
            guesses[name] = float((right.sum(0) / asked.sum(0))[kept].mean())
        drawn = resampled(torch.stack(hits)[..., kept], asked[:, kept], seed)
        return cls(balanced, drawn, guesses, tuple(known[kept].tolist()))


def guess(train: Batch, test: Batch, label: str, w: int, n_classes: int) -> Tensor:
    """The class that gains most over its frequency, given the position (w = 0), the last w tokens, or nothing (w = −1).

    Contexts of w tokens are backed by those of fewer, each with the weight of one example.
    """
    counts = torch.bincount(train.labels[label][train.mask], minlength=n_classes).double()
    prior = counts / counts.sum()
    if w < 0:
        return torch.full(test.tokens.shape, int(prior.argmax()))
    asked = prior.expand(*test.tokens.shape, -1)
    for size in range(1, w + 1) if w else (0,):
        keys = [_contexts(part, size) for part in (train, test)]
        _, place = torch.cat(keys).unique(dim=0, return_inverse=True)
        at, there = place[: len(keys[0])], place[len(keys[0]) :]
        keep = train.mask.flatten()
        cell = at[keep] * n_classes + train.labels[label].flatten()[keep]
        table = torch.bincount(cell, minlength=(int(place.max()) + 1) * n_classes).double().reshape(-1, n_classes)
        total = table.sum(-1, keepdim=True)
        asked = (table[there].reshape(asked.shape) + asked) / (total[there].reshape(*asked.shape[:2], 1) + 1)
    return (asked / prior.clamp_min(1e-12)).argmax(-1)


def _contexts(batch: Batch, w: int) -> Tensor:
    """The last w tokens at each position, or the position where w is 0. (batch · pos, w)"""
    n, length = batch.tokens.shape
    if not w:
        return torch.arange(length).repeat(n)[:, None]
    padded = torch.nn.functional.pad(batch.tokens, (w - 1, 0), value=-1)
    return padded.unfold(1, w, 1).reshape(n * length, w)


def recalls(guess: Tensor, test: Batch, label: str, n_classes: int) -> tuple[Tensor, Tensor]:
    """Right answers, and answers asked for, of each class in each module. both (module, class)"""
    truth, keep = test.labels[label], test.mask
    _, module = test.groups.unique(return_inverse=True)
    cell = (module[:, None] * n_classes + truth.clamp_min(0))[keep]
    size = (int(module.max()) + 1) * n_classes
    hit = (guess == truth)[keep].double()
    right = torch.bincount(cell, weights=hit, minlength=size)
    return right.reshape(-1, n_classes), torch.bincount(cell, minlength=size).double().reshape(-1, n_classes)


def counted(asked: Tensor) -> Tensor:
    """The classes that ``LEAST`` modules hold, or all that occur if fewer than two do. (module, class) -> (class,)"""
    held = (asked > 0).sum(0)
    return held >= LEAST if int((held >= LEAST).sum()) > 1 else held > 0


def resampled(hits: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Balanced accuracy of resampled modules at each site. (draw, site)

    Only draws that hold every class of the sample count: without its rarest and hardest class the mean recall is
    that of an easier task. A class that one module holds alone therefore adds nothing to the spread.
    """
    rng = np.random.default_rng([seed, 11])
    n, held = len(counts), counts.sum(0) > 0
    kept: list[Tensor] = []
    for _ in range(100):
        weights = torch.from_numpy(rng.multinomial(n, np.full(n, 1 / n), DRAWS)).double()
        kept.append(weights[(weights @ counts > 0)[:, held].all(1)])
        if sum(map(len, kept)) >= DRAWS:
            break
    weights = torch.cat(kept)[:DRAWS]
    if not len(weights):
        return torch.full((1, len(hits)), torch.nan, dtype=torch.float64)
    rates = torch.einsum("dm,smc->sdc", weights, hits[..., held]) / (weights @ counts[:, held])
    return rates.mean(-1).T


def profile(own: Tensor, drawn: Tensor, base: float) -> dict[str, Any]:
    """Profile statistics of the balanced accuracy, their intervals, and the verdict by their bounds."""
    if float(own.max() - base) / (1 - base) < READABLE:
        return {"verdict": "not readable", "why": f"at most {own.max():.3f}, where a guess gets {base:.3f}"}
    at, spread = profile_statistics(own, base), profile_statistics(drawn, base)
    low = {name: float(spread[name].nanquantile(0.025)) for name in STATISTICS}
    high = {name: float(spread[name].nanquantile(0.975)) for name in STATISTICS}
    word, why = verdict(low, high)
    row: dict[str, Any] = {"verdict": word, "why": why}
    for name in STATISTICS:
        row |= {name: float(at[name]), f"{name}_lo": low[name], f"{name}_hi": high[name]}
    return row

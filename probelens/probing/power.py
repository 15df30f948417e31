"""Could the refitted probes have read a residue? A small one is planted into ablated activations and read.

"No probe reads it" says little where there are too few sequences for the probes to learn a code that isn't linear.
The residue here is one: random signs along three directions, of which only the product tells the label, so that
neither a linear probe nor two of the directions read anything. Any residue is too small for some number of sequences, so
what "none is left" can mean is that none of a stated size is.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.numerics.modes import exact
from probelens.probing.fitting import Fitted, share
from probelens.probing.mlp import MLPProbe, Rows
from probelens.probing.solvers.logistic import DEFAULT_CS
from probelens.probing.splits import Split

__all__ = ["RESIDUE", "Power", "plant", "residue_power"]

RESIDUE = 1.4  # size of the residue along each of its directions, in standard deviations of a feature
_LARGER = (2.0, 3.0)  # sizes tried where that one isn't read
_SIGNS = 3
_MARGIN = 0.05  # what the residue must add to the bar at least, so that reading it shows
_FACTORS = (2, 4, 8, 16)
_DROPPED = 3  # of every so many training sequences one is left out: who reads with fewer will read with all
_MOST_ROWS = 40_000  # training rows beyond which no larger sample is tried
_FEWEST = 5  # test rows over the bar with which reading could show at all


@dataclass(frozen=True)
class Power:
    """Whether a planted residue is read.

    Args:
        powered: Whether a residue of size ``RESIDUE`` is read: the probe gets at least half of what a reader of its signs
            would get beyond the bar.
        accuracy: Its accuracy on the test rows; None where the bar leaves no room.
        n_needed: Sequences at which it is read, the number given or a multiple of it; None where the largest sample tried
            isn't enough.
        size: The smallest size tried that is read with the sequences given, in standard deviations of a feature; None
            where none is.
    """

    powered: bool
    accuracy: float | None
    n_needed: int | None
    size: float | None


@exact
def plant(x: Tensor, code: Tensor, *, size: float = RESIDUE, signs: int = _SIGNS, seed: int = 0) -> Tensor:
    """Add a residue that codes bits: each is the product of random signs, along random orthonormal directions.

    Args:
        x: Activations. (n, d)
        code: Bits, 0 or 1. (n, bits)
        size: Of each sign, in standard deviations of a feature, which probes standardise; 1 where it is constant.
        signs: Directions for a bit; 1 codes it linearly.
        seed: Of directions and signs.

    Returns:
        Activations with the residue. (n, d)

    Examples:
        >>> gen = torch.Generator().manual_seed(0)
        >>> x, bit = torch.randn(4000, 8, generator=gen), torch.randint(2, (4000, 1), generator=gen)
        >>> moved = plant(x, bit) - x
        >>> round(float(moved.square().sum(1).mean()), 1)  # three directions of size 1.4: 3 · 1.4²
        5.9
        >>> bool((moved[bit[:, 0] == 1].mean(0) - moved[bit[:, 0] == 0].mean(0)).norm() < 0.3)
        True
    """
    rng = torch.Generator().manual_seed(seed)
    n, bits = code.shape
    signs = max(1, min(signs, x.shape[1] // bits))
    axes = torch.linalg.qr(torch.randn(x.shape[1], bits * signs, generator=rng)).Q.to(x)
    drawn = 1 - 2 * torch.randint(2, (n, bits, signs), generator=rng).to(x)
    drawn[..., -1] = (1 - 2 * code.to(x)) * drawn[..., :-1].prod(-1)
    spread = x.std(0, correction=0)
    return x + size * (drawn.flatten(1)[:, : axes.shape[1]] @ axes.mT) * spread.where(spread > 0, 1.0)


@exact
def residue_power(
    x: Tensor, labels: Tensor, mask: Tensor, split: Split, bar: float, *, mlp: bool = True, seed: int = 0
) -> Power:
    """Whether the probes read a residue that is planted into activations in which they read nothing.

    The residue codes one bit, in which half of the classes the label is, or as many bits as it takes to lift the best
    guess above the bar. The MLP probe, the one that can read it, gets two thirds of the training sequences that the refit
    check gave it: learning such a code succeeds or fails as a whole, and close to the number it takes that is a matter of
    luck. Where the residue isn't read, larger ones are tried, and samples of twice to 16 times the size: the same rows
    again, with fresh signs and the labels dealt anew. Without ``mlp`` the residue is linear, as linear probes read no other.

    Args:
        x: Ablated activations. (n, pos, d)
        labels: Class ids. (n, pos)
        mask: Where labels count. (n, pos)
        split: Sequences of train, validation and test.
        bar: Accuracy above which a probe counts as reading the label.
        mlp: Whether the check has an MLP.
        seed: Of the residue, the probe and the samples.

    Returns:
        What was read, the size that is, and the number of sequences that would do. Nothing is tried where the bar leaves
        room for less than five test rows.

    Units:
        Time: one MLP fit, that stops once the residue is read; where it isn't, one for each larger residue and sample.
    """
    if (1 - bar) * int(mask[split.test].sum()) < _FEWEST:
        return Power(False, None, None, None)
    fewer = split.train[torch.arange(len(split.train)) % _DROPPED != _DROPPED - 1]
    if len(labels[fewer][mask[fewer]].unique()) < 2:
        fewer = split.train
    parts = [(x[i][mask[i]], labels[i][mask[i]]) for i in (fewer, split.val, split.test)]
    codes, best = _codes(parts, bar)
    read = functools.partial(_mlp if mlp else _linear, codes=codes, seed=seed)

    def enough(size: float) -> float:
        return bar + _shown(size, (_SIGNS if mlp else 1) * codes.shape[1]) * (best - bar) / 2

    accuracy = read(parts, size=RESIDUE)
    if accuracy >= enough(RESIDUE):
        return Power(True, accuracy, len(x), RESIDUE)
    found = next((size for size in _LARGER if read(parts, size=size) >= enough(size)), None)
    for factor in _FACTORS:
        if factor * len(parts[0][0]) > _MOST_ROWS:
            break
        more = [_resampled(*part, factor, seed + k) for k, part in enumerate(parts)]
        if read(more, size=RESIDUE) >= enough(RESIDUE):
            return Power(False, accuracy, factor * len(x), found)
    return Power(False, accuracy, None, found)


def _shown(size: float, signs: int) -> float:
    """Correlation of the product of so many signs of a size with that of the signs that show beside noise of size 1."""
    return math.erf(size / math.sqrt(2)) ** signs


def _codes(parts: list[Rows], bar: float) -> tuple[Tensor, float]:
    """Bits of each class (class, bits), and the test accuracy of a guess that knows them.

    Classes are dealt to cells, the most frequent first, each to the cell that has least.
    """
    k = int(max(y.max() for _, y in parts)) + 1
    seen, test = (torch.bincount(y, minlength=k).double() for y in (torch.cat([y for _, y in parts]), parts[2][1]))
    bits = 0
    while True:
        bits += 1
        load, cell = torch.zeros(2**bits, dtype=torch.float64), torch.zeros(k, dtype=torch.long)
        for one in seen.argsort(descending=True).tolist():
            cell[one] = int(load.argmin())
            load[cell[one]] += seen[one]
        best = sum(float(test[cell == c].max()) for c in cell.unique()) / float(test.sum())
        if best >= bar + min(_MARGIN, (1 - bar) / 2) or 2**bits >= k:
            return (cell[:, None] >> torch.arange(bits)) & 1, best


def _mlp(parts: list[Rows], codes: Tensor, size: float, seed: int) -> float:
    """Test accuracy of the MLP probe on rows with a residue that isn't linear."""
    train, val, test = _planted(parts, codes, _SIGNS, size, seed)
    y = torch.cat([y for _, y in parts])
    cells = torch.unique(codes, dim=0, return_inverse=True)[1].to(y.device)
    gained = 0.6 * _shown(size, _SIGNS * codes.shape[1]) ** 2 * _entropy(cells[y])
    return MLPProbe(seed=seed, enough=_entropy(y) - gained).fit(*train, *val).score(*test)


def _linear(parts: list[Rows], codes: Tensor, size: float, seed: int) -> float:
    """Test accuracy of a linear probe on rows with a linear residue."""
    x, y = (torch.cat(both)[:, None] for both in zip(*_planted(parts, codes, 1, size, seed), strict=True))
    split = Split(*torch.arange(len(y)).split([len(y) for _, y in parts]))
    fitted = Fitted.of(x, {"label": y}, torch.ones_like(y, dtype=torch.bool), split, DEFAULT_CS, 1e-3, None, seed)
    return share(fitted.guess["label"] == y[split.test])


def _planted(parts: list[Rows], codes: Tensor, signs: int, size: float, seed: int) -> list[Rows]:
    x, y = torch.cat([x for x, _ in parts]).double(), torch.cat([y for _, y in parts])
    found = plant(x, codes.to(y.device)[y], size=size, signs=signs, seed=seed).float()
    return [(some, part[1]) for some, part in zip(found.split([len(y) for _, y in parts]), parts, strict=True)]


def _resampled(x: Tensor, y: Tensor, factor: int, seed: int) -> Rows:
    """Every row and every label several times, but paired anew: in ablated activations neither tells the other."""
    order = torch.randperm(factor * len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    return x.repeat(factor, 1), y.repeat(factor)[order]


def _entropy(ids: Tensor) -> float:
    """Of class ids, in nats."""
    shares = torch.bincount(ids).double() / len(ids)
    return float(torch.special.entr(shares).sum())

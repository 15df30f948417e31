"""The effect of a target beside draws of its control: its prediction interval, and p values over many sites."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.shares import exact_interval

_PERCENTILES_FROM = 99  # draws: with fewer, Student's t stands in for the quantiles of so small a sample


@dataclass(frozen=True)
class Effect:
    """What a target costs beyond its control: the mean cost of the draws is ``against``, their deviation ``spread``."""

    estimate: float
    low: float
    high: float
    p: float  # share of the draws that cost as much as the target, which is counted among them
    against: float
    spread: float


@torch.no_grad()
def effect(
    target: Tensor,
    draws: Tensor,
    room: Tensor,
    *,
    level: float = 0.95,
    seed: int = 0,
    samples: int = 2000,
    most: float | None = None,
) -> Effect:
    """How much more a target costs than one more draw of its control would. (example,), (draw, example), (example,)

    The ends are of a prediction interval: *one* draw differs from the mean of m draws by √((m+1)/(m−1)) times what the
    m draws do. Sequences are resampled for target and draws together; what that adds counts as far as it is more than
    the noise that the draws' own spread already holds. A target that is itself a draw of its control so leaves 0
    outside in about one case of twenty; an interval over sequences alone does in most. Adding the whole of the sequences'
    spread counts it twice, as a draw's mean cost has it too: where draws are alike such an interval is half as wide again,
    and leaves 0 outside in no case at all. All costs are divided by the mean of ``room``, what there is to lose in each
    example.

    A target that costs each sequence the same doesn't show the sequences' spread. Where ``most``, the largest cost of a
    sequence, is known, the ends are then further out by what a change in none of n sequences leaves open (about 3.7/n).

    Source: prediction intervals: Vovk et al. 2005; p values of control draws: Phipson and Smyth 2010.
    """
    target, draws, room = target.double(), draws.double(), room.double()
    m, n = draws.shape if draws.ndim == 2 else (0, 0)
    if target.shape != (n,) or room.shape != (n,):
        raise ShapeError(
            f"costs must be (example,), (draw, example) and (example,), got {tuple(target.shape)}, "
            f"{tuple(draws.shape)} and {tuple(room.shape)}"
        )
    if not 0 < level < 1 or samples < 1:
        raise InputError(f"level={level} and samples={samples}: give a level between 0 and 1, and at least one sample")
    if not all(bool(costs.isfinite().all()) for costs in (target, draws, room)):
        raise InputError("costs hold NaN or infinity. Leave these examples out, or find where the metric is undefined")
    if m < 2 or n < 1:
        raise InputError(f"an effect needs at least two control draws and one example, got {m} and {n}")
    scale = room.mean()
    if not float(scale) > 0:
        raise InputError("there is nothing to lose: the clean metric is not above chance")
    costs = torch.cat([target[None], draws])
    means = costs.mean(1) / scale
    against = means[1:].mean()
    estimate = means[0] - against
    gen = torch.Generator().manual_seed(seed)
    picked = torch.randint(n, (samples, n), generator=gen)
    weights = torch.zeros(samples, n, dtype=torch.float64)
    weights.scatter_add_(1, picked, torch.ones_like(weights[:1, :1]).expand(samples, n))
    lost = weights @ room
    # A sample in which there is nothing to lose has no scale; with room of both signs it may occur.
    by_sample = (weights @ costs.T / lost[:, None])[lost > 0]
    apart = by_sample - by_sample[:, 1:].mean(1, keepdim=True)
    noise = apart[:, 1:].var(0).mean() * (m + 1) / (m - 1)
    more = (1 - noise / apart[:, 0].var().clamp_min(1e-300)).clamp_min(0).sqrt() * (apart[:, 0] - estimate)
    one = torch.arange(len(by_sample)) % m  # each draw as often as any other, so that no seed makes its ends noisy
    found = estimate + more - (means[1:][one] - against) * ((m + 1) / (m - 1)) ** 0.5
    tail = (1 - level) / 2
    if m >= _PERCENTILES_FROM:
        low, high = torch.quantile(found, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    else:
        from scipy.stats import t

        spread = (more.var() + means[1:].var() * (1 + 1 / m)).sqrt()
        half = float(t.ppf(1 - tail, m - 1) * spread)
        low, high = float(estimate) - half, float(estimate) + half
    if most is not None and float(target.std(correction=0)) < 1e-12:
        unseen = most * exact_interval(0, n, level=level)[1] / float(scale)
        low, high = low - unseen, high + unseen
    p = (1 + int((means[1:] >= means[0] - 1e-12).sum())) / (1 + m)
    return Effect(float(estimate), low, high, p, float(against), float(means[1:].std()))


def max_t_over_sites(targets: Tensor, draws: Tensor) -> Tensor:
    """p values adjusted for the number of sites, at least 1/(draws + 1). (site,), (site, draw) -> (site,)

    At each site the costs of target and draws are standardised together. A target's p is the share of draw numbers, its
    own included, whose largest standardised cost over the sites is as large as the target's; the sites are gone through
    from the largest statistic down, each compared with those left (Westfall and Young 1993, step-down max-T).

    That holds where draws at different sites are no more alike than targets are: made independently. Draws that are one
    direction at every site are one number 13 times over where 13 sites cost alike, and p isn't adjusted at all.
    """
    if draws.ndim != 2 or targets.shape != draws.shape[:1]:
        raise ShapeError(
            f"need targets (site,) and draws (site, draw), got {tuple(targets.shape)}, {tuple(draws.shape)}"
        )
    costs = torch.cat([targets[:, None], draws], 1).double()
    if not bool(costs.isfinite().all()):
        raise InputError("costs hold NaN or infinity. Leave these sites out, or find where the metric is undefined")
    spread = costs.std(1, keepdim=True)
    scores = (costs - costs.mean(1, keepdim=True)) / torch.where(spread > 0, spread, torch.ones_like(spread))
    order = scores[:, 0].argsort(descending=True, stable=True)
    # The largest score over a site and those after it in the order, for every draw number.
    left = scores[order].flip(0).cummax(0).values.flip(0)
    p = (left >= scores[order, :1] - 1e-12).double().mean(1).cummax(0).values
    return torch.empty_like(p).scatter_(0, order, p)

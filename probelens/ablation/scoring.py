"""Running ablations and scoring them: one sweep for all conditions, then drop, damage and effect of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.answers import Metric, reader, scored_positions, where
from probelens.ablation.comparing import ROOM, Adjust, compare
from probelens.ablation.controls import Removal
from probelens.errors import InputError, MetricError, metric_name
from probelens.hooks.edits.edit import Edit, Positions
from probelens.hooks.edits.removal import Erase, Project
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.numerics.shares import exact_interval
from probelens.numerics.stats import hierarchical_bootstrap
from probelens.numerics.tensors import class_numbers
from probelens.running.activations import Activations
from probelens.running.collect import collect
from probelens.running.shapes import positions_at
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.plan import sweep
from probelens.subspaces.leace import Eraser
from probelens.subspaces.oracle import BoundEraser
from probelens.subspaces.subspace import Subspace
from probelens.tasks.examples import spread_mask

# The sign of clean − ablated where the ablation hurts; unknown for a metric of the caller's own.
COST = {"accuracy": 1, "next_token_loss": -1, "mse": -1, "r2": 1, "kl": -1}
NOTHING_SCORED = "no position is scored: the mask is False everywhere, or the sequences are too short"


@dataclass(frozen=True, eq=False)
class Runs:
    """The metric of every row (row, example, pos) and without ablation, where it counts (example, pos), and the path."""

    values: Tensor
    clean: Tensor
    scored: Tensor
    path: str


def run(
    model: HookedModel, batch: Any, drawn: Sequence[Removal], metric: Metric, target: str, alpha: float, batch_size: int,
    progress: bool = False, memory: int | None = None,
) -> Runs:  # fmt: skip
    """Run every ablation on every sequence."""
    read = reader(model, batch, metric, target)
    told = mask_for_model(model, batch.attention_mask, batch.inputs)
    sites = list(dict.fromkeys(d.about["site"] for d in drawn))
    masks = {site: spread_mask(batch.mask, n) for site, n in positions_at(model, batch.examples, sites, told).items()}
    conditions = [
        Condition(
            (d.about["site"], d.about["condition"], d.about["draw"]),
            ()
            if d.space is None or alpha == 0
            else (_removing(d.about["site"], d.space, alpha, masks[d.about["site"]]),),
        )
        for d in drawn
    ]
    found = sweep(
        model, batch.inputs, conditions, read, batch_size=batch_size, memory=memory,
        attention_mask=batch.attention_mask, progress=progress, describe="ablations",
    )  # fmt: skip
    return Runs(found.values, found.base, scored_positions(batch, metric, read.by_position), found.path)


def per_sequence(values: Tensor, scored: Tensor) -> Tensor:
    """The mean over each sequence's scored positions, of the sequences that have any: (..., scored example) float64."""
    keep = scored.any(1)
    if not bool(keep.any()):
        raise InputError(NOTHING_SCORED)
    count = scored.sum(-1).clamp_min(1)
    # A metric may be NaN where it doesn't count.
    means = [one.double().where(scored, 0.0).sum(-1) / count for one in values.reshape(-1, *scored.shape)]
    return torch.stack(means).reshape(*values.shape[:-1])[..., keep]


def score(
    rows: list[dict[str, Any]],
    runs: Runs,
    scored: Tensor,
    chance: float | None,
    seed: int,
    metric: Metric,
    adjust: Adjust = "max_t",
) -> tuple[Tensor, Tensor]:
    """Write value, drop, its interval, damage and, on targets, the effect into the rows, one for each of ``runs.values``.

    Where every sequence loses the same they don't show their spread, and the interval is that of a change in none of them.

    Returns the metric of each example that counts, under each row and without ablation: (row, example) and (example,).
    """
    values, clean = per_sequence(runs.values, scored), per_sequence(runs.clean, scored)
    if lost := int((~clean.isfinite()).sum()) or int((~values.isfinite()).any(0).sum()):
        raise MetricError(
            f"the metric {metric_name(metric)!r} is NaN or infinite in {lost} of {len(clean)} sequences. Check the metric and "
            "the model's logits, or leave these positions out of the batch's mask."
        )
    # One bootstrap over examples for every row at once: the examples are the same in all of them.
    if len(clean) < 2:
        raise InputError("intervals need at least 2 sequences with scored positions, and the batch has 1. Give more.")
    found = hierarchical_bootstrap((clean - values).T[None], seed=seed, n_draws=1000)
    most = 1.0 if metric == "accuracy" else None  # by which a metric can change
    unseen = 0.0 if most is None else most * exact_interval(0, len(clean))[1]
    constant = (values - clean).std(1) < 1e-12
    room = clean.mean().item() - (chance if chance is not None else 0.0)
    for i, row in enumerate(rows):
        drop, low, high = (float(end[i]) for end in (found.estimate, found.low, found.high))
        if constant[i]:
            low, high = drop - unseen, drop + unseen
        row.update(
            chance=chance,
            value=values[i].mean().item(), clean=clean.mean().item(), drop=drop,
            lo=low if most is None else max(low, -most), hi=high if most is None else min(high, most),
            damage=drop / room if chance is not None and room > ROOM else None,
        )  # fmt: skip
    cost = COST.get(metric) if isinstance(metric, str) else None
    compare(rows, values, clean, chance, seed, cost, adjust, most)
    return values, clean


def accuracy_chance(batch: Any, target: str, metric: Metric, scored: Tensor | None = None) -> float | None:
    """Best accuracy of a constant answer, averaged over sequences; 0 for R², of a constant value; None for other metrics.

    Each sequence weighs the same however many positions it has, as in the accuracy it is compared with.
    """
    if metric != "accuracy":
        return 0.0 if metric == "r2" else None
    labels = batch.labels[target].cpu()
    if labels.ndim == 1:
        labels, scored = labels[:, None], where(batch, False)[:, None]
    scored = (batch.mask if scored is None else scored).cpu()
    if not bool(scored.any()):
        raise InputError(NOTHING_SCORED)
    rows, _ = scored.nonzero(as_tuple=True)
    # Counts are divided last, so that a single class is exactly 1.
    numbers = class_numbers(labels[scored])[0]
    pairs, counts = torch.stack([rows, numbers]).unique(dim=1, return_counts=True)
    by_class = torch.bincount(pairs[1], weights=counts.double() / scored.sum(1)[pairs[0]])
    return (by_class.max() / scored.any(1).sum()).item()


def removal(space: Subspace | Eraser, alpha: float = 1.0, pos: Positions = None) -> Edit:
    """The edit x → x + α (x without the subspace − x)."""
    return Project(pos, space, alpha) if isinstance(space, Subspace) else Erase(pos, space, alpha)


def after(
    model: HookedModel,
    batch: Any,
    acts: Activations,
    name: str,
    space: Subspace | Eraser,
    alpha: float,
    batch_size: int,
) -> Tensor:
    """Activations of a site with the subspace removed there. (example, pos, d)

    A state is computed from the one before it, so an edit of states takes a run of its own.
    """
    if not space.rank or not alpha:
        return acts[name]
    if not model.point(name).step:
        return removal(space, alpha)(acts[name])
    parts = []
    mask = spread_mask(batch.mask, acts[name].shape[1])
    for rows in torch.arange(len(batch)).split(batch_size):
        with model.hooks([(name, removal(_of(space, rows), alpha, mask[rows]))]):
            parts.append(collect(model, batch[rows], [name], batch_size=batch_size)[name])
    return torch.cat(parts)


def _removing(name: str, space: Subspace | Eraser, alpha: float, mask: Tensor) -> Intervention:
    return Intervention(name, lambda rows: removal(_of(space, rows), alpha, mask[rows]))


def _of(space: Subspace | Eraser, rows: Any) -> Subspace | Eraser:
    """What to remove from some examples of the batch."""
    return space.on(rows) if isinstance(space, BoundEraser) else space

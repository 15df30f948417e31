"""Running ablations and scoring them: one sweep for all conditions, then drop, damage and effect of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.ablation.comparing import ROOM, Adjust, compare
from probelens.ablation.controls import Removal
from probelens.errors import InputError, MetricError, ShapeError, metric_name, metric_note, need_arguments, noted
from probelens.hooks.edits.edit import Edit, Positions
from probelens.hooks.edits.removal import Erase, Project
from probelens.hooks.model import HookedModel
from probelens.numerics.shares import exact_interval
from probelens.numerics.stats import hierarchical_bootstrap
from probelens.running.collect import Activations, collect
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import sweep
from probelens.subspaces.leace import Eraser
from probelens.subspaces.oracle import BoundEraser
from probelens.subspaces.subspace import Subspace

Metric = Literal["accuracy", "next_token_loss"] | Callable[..., Tensor]
# The sign of clean − ablated where the ablation hurts; unknown for a metric of the caller's own.
COST = {"accuracy": 1, "next_token_loss": -1}
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
    conditions = [
        Condition(
            (d.about["site"], d.about["condition"], d.about["draw"]),
            () if d.space is None or alpha == 0 else (_removing(d.about["site"], d.space, alpha, batch.mask),),
        )
        for d in drawn
    ]
    found = sweep(
        model, batch.tokens, conditions, reader(batch, metric, target), batch_size=batch_size, memory=memory,
        attention_mask=batch.attention_mask, progress=progress, describe="ablations",
    )  # fmt: skip
    return Runs(found.values, found.base, scored_positions(batch, metric), found.path)


def scored_positions(batch: Any, metric: Metric) -> Tensor:
    """Where the metric counts. (example, pos)"""
    scored: Tensor = batch.mask.clone()
    if metric == "next_token_loss":
        # A loss belongs to the position that predicts the token, so the next position must be real.
        scored[:, -1] = False
        scored[:, :-1] &= batch.mask[:, 1:]
    return scored


def reader(batch: Any, metric: Metric, target: str) -> Read:
    """What the sweep keeps of each run: the metric at each position."""
    data = {"tokens": batch.tokens, "mask": batch.mask}
    if metric == "accuracy":
        data = {**data, "answer": batch.labels[target]}
    elif callable(metric):
        data = {**data, **batch.labels}
    return Read(_metric(metric, target), None, data)


def per_sequence(values: Tensor, scored: Tensor) -> Tensor:
    """The mean over each sequence's scored positions, of the sequences that have any: (..., scored example) float64."""
    keep = scored.any(1)
    if not bool(keep.any()):
        raise InputError(NOTHING_SCORED)
    count = scored.sum(-1).clamp_min(1)
    means = [(one.double() * scored).sum(-1) / count for one in values.reshape(-1, *scored.shape)]
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
    """Best accuracy of a constant answer, averaged over sequences; None for other metrics.

    Each sequence weighs the same however many positions it has, as in the accuracy it is compared with.
    """
    if metric != "accuracy":
        return None
    scored = (batch.mask if scored is None else scored).cpu()
    if not bool(scored.any()):
        raise InputError(NOTHING_SCORED)
    rows, _ = scored.nonzero(as_tuple=True)
    # Counts are divided last, so that a single class is exactly 1.
    pairs, counts = torch.stack([rows, batch.labels[target].cpu()[scored]]).unique(dim=1, return_counts=True)
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
    for rows in torch.arange(len(batch)).split(batch_size):
        with model.hooks([(name, removal(_of(space, rows), alpha, batch.mask[rows]))]):
            parts.append(collect(model, batch[rows], [name], batch_size=batch_size)[name])
    return torch.cat(parts)


def _removing(name: str, space: Subspace | Eraser, alpha: float, mask: Tensor) -> Intervention:
    return Intervention(name, lambda rows: removal(_of(space, rows), alpha, mask[rows]))


def _of(space: Subspace | Eraser, rows: Any) -> Subspace | Eraser:
    """What to remove from some examples of the batch."""
    return space.on(rows) if isinstance(space, BoundEraser) else space


def _metric(metric: Metric, target: str) -> Callable[..., Tensor]:
    if callable(metric):
        given = metric

        def custom(logits: Tensor, **data: Tensor) -> Tensor:
            arguments = ", ".join(["logits", *(f"{k}={k}" for k in data)])
            need_arguments(given, arguments, logits, **data)
            with noted(lambda: metric_note(given, arguments)):
                value = given(logits, **data)
            if not isinstance(value, Tensor) or value.shape != logits.shape[:2]:
                raise ShapeError(
                    f"metric must return one value per position, {tuple(logits.shape[:2])}, got "
                    f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
                )
            return value.float()

        return custom
    if metric == "accuracy":

        def accuracy(logits: Tensor, answer: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
            high = int(answer[mask].max()) if bool(mask.any()) else 0
            if high >= logits.shape[-1]:
                raise MetricError(
                    f"label {target!r} has class {high}, but the model has {logits.shape[-1]} logits. "
                    'Give target= the label that the model answers with, or metric="next_token_loss".'
                )
            if bool(logits.isnan().any(-1)[mask].any()):
                # The argmax of NaN is a class like any other.
                raise MetricError(
                    "the model's logits hold NaN, so there is no answer to score. Look for the first site with NaN in "
                    'pl.collect(model, batch, "layers").'
                )
            return (logits.argmax(-1) == answer).float()

        return accuracy
    if metric == "next_token_loss":

        def loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
            if int(tokens.max()) >= logits.shape[-1]:
                raise MetricError(
                    f"the tokens go up to {int(tokens.max())}, but the model has {logits.shape[-1]} logits, so it doesn't "
                    'predict tokens. Give metric="accuracy", or a function.'
                )
            values = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            return torch.nn.functional.pad(values.reshape(len(tokens), -1), (0, 1))

        return loss
    raise InputError(f"metric {metric!r} is not known. Allowed: 'accuracy', 'next_token_loss', or a function")

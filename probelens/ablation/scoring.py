"""What every ablation shares: subspaces with their controls, one run for all of them, and scores for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, ShapeError, metric_note, noted
from probelens.hooks.edits.edit import Edit, Positions
from probelens.hooks.edits.removal import Erase, Project
from probelens.hooks.points import has_positions
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import sweep

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.collect import Activations
    from probelens.subspaces.leace import Eraser
    from probelens.subspaces.subspace import Subspace

__all__ = [
    "CONTROLS",
    "Control",
    "Drawn",
    "Metric",
    "Runs",
    "accuracy_chance",
    "after",
    "check_finite",
    "draw",
    "label_of",
    "per_sequence",
    "run",
    "score",
]

Metric = Literal["accuracy", "next_token_loss"] | Callable[..., Tensor]
Control = Literal["random", "random_matched", "pca"]
CONTROLS: tuple[Control, ...] = ("random", "random_matched", "pca")
# The sign of clean − ablated where the ablation hurts; of a metric of the caller's own it isn't known.
COST = {"accuracy": 1, "next_token_loss": -1}
NOTHING_SCORED = "no position is scored: the mask is False everywhere, or the sequences are too short"
ROOM = 1e-6  # a model no further above chance than rounding has nothing to lose, so no scale for a loss


@dataclass(frozen=True, eq=False)
class Drawn:
    """A subspace to remove at one site: the one asked for ("target") or a draw of a control.

    Args:
        about: site, layer, label, condition, draw, rank; on targets also control_overlap, how much
            of the subspace the matched controls share (0 to 1), and control_problem, the reason why
            they could not be drawn; either may be None.
        space: What to remove; None where there is nothing.
    """

    about: dict[str, Any]
    space: Subspace | Eraser | None


@dataclass(frozen=True, eq=False)
class Runs:
    """The metric of every row, example and position.

    Args:
        values: (row, example, pos)
        clean: The same without ablation. (example, pos)
        scored: Where the metric counts. (example, pos)
        path: How the engine ran.
    """

    values: Tensor
    clean: Tensor
    scored: Tensor
    path: str
    extra: dict[str, Any] = field(default_factory=dict)


def label_of(batch: Any, label: str | None, what: str) -> str:
    """The label meant, which may be left out where there is one."""
    if not hasattr(batch, "labels") or not hasattr(batch, "mask"):
        raise InputError(
            f"ablation needs a Batch with tokens, labels and mask, got a {type(batch).__name__}. "
            "Make one with task.sample(), or probelens.Batch(tokens, {name: labels})."
        )
    known = list(batch.labels)
    if label is None and len(known) == 1:
        return str(known[0])
    if label not in known:
        raise InputError(f"{what}={label!r}: the batch has the labels {known}. Give one of them.")
    return str(label)


def draw(
    model: HookedModel, acts: Activations, mask: Tensor, spaces: Mapping[str, Subspace | Eraser], label: str,
    kinds: Sequence[str], controls: int, seed: int,
) -> list[Drawn]:  # fmt: skip
    """Each site's subspace and its controls."""
    unknown = [k for k in kinds if k not in CONTROLS]
    if unknown:
        raise InputError(f"control {unknown[0]!r} is not known. Allowed: {', '.join(map(repr, CONTROLS))}")
    out: list[Drawn] = []
    for name, space in spaces.items():
        point = model.point(name)
        if acts[name].ndim != 3 or not has_positions(point) or point.pos_axis != 1:
            raise ShapeError(
                f"{name!r} has activations {tuple(acts[name].shape)}, axes {point.axes}; a subspace is removed from "
                "(example, pos, d). Choose a point of these axes, or ablate_component() for heads and states."
            )
        check_finite(name, acts[name], mask)
        real = acts[name][mask]
        if real.shape[-1] != space.d:
            raise ShapeError(
                f"the subspace for {name!r} has width {space.d}, the activations there have {real.shape[-1]}"
            )
        site = {"site": name, "layer": model.point(name).depth, "label": label}
        drawn, problem = _controls(space, real, kinds, controls, seed)
        about = {**site, "condition": "target", "draw": 0, "rank": space.rank}
        about.update(control_overlap=_overlap(space, drawn), control_problem=problem)
        out.append(Drawn(about, space if space.rank else None))
        out += [Drawn({**site, "condition": kind, "draw": i, "rank": q.rank}, q) for kind, i, q in drawn]
    return out


def check_finite(name: str, x: Tensor, mask: Tensor) -> None:
    """Refuse NaN and infinity where labels count, by the name of the site.

    Args:
        name: Hook point.
        x: Activations. (example, pos, ...)
        mask: Where labels count. (example, pos)

    Raises:
        InputError: The site, how many positions, and the first of them.
    """
    bad = (~torch.isfinite(x)).flatten(2).any(-1).cpu() & mask.cpu()
    if bool(bad.any()):
        example, pos = bad.nonzero()[0].tolist()
        raise InputError(
            f"activations at {name!r} hold NaN or infinity at {int(bad.sum())} of {int(mask.sum())} positions, first in "
            f"sequence {example} at position {pos}. Check the model up to there, or leave these positions out of the mask."
        )


def _controls(
    space: Subspace | Eraser, real: Tensor, kinds: Sequence[str], controls: int, seed: int
) -> tuple[list[tuple[str, int, Subspace]], str | None]:
    from probelens import subspaces as make

    out: list[tuple[str, int, Subspace]] = []
    problem: str | None = None
    if not controls or not kinds or not space.rank:
        return out, None if space.rank else "the subspace is empty, so there is nothing to compare with"
    mean, covariance = make.moments(real)
    if "random" in kinds:
        out += [
            ("random", i, make.random(space.rank, space.d, seed=seed * 1000 + i, mean=mean))
            for i in range(controls)
        ]
    if "random_matched" in kinds:
        try:
            matched = make.random_matched(space, covariance, n=controls, seed=seed, mean=mean)
            out += [("random_matched", i, q) for i, q in enumerate(matched)]
        except InputError as err:
            problem = str(err)
    if "pca" in kinds:
        out.append(("pca", 0, make.top_pca(space.rank, covariance, mean)))
    return out, problem


def _overlap(space: Subspace | Eraser, drawn: Sequence[tuple[str, int, Subspace]]) -> float | None:
    from probelens.subspaces.subspace import Subspace

    matched = [q for kind, _, q in drawn if kind == "random_matched"]
    if not matched:
        return None
    if not isinstance(space, Subspace):
        space = Subspace(torch.linalg.qr(space.left).Q.mT, space.mean)
    return sum(space.overlap(q) for q in matched) / len(matched)


def run(
    model: HookedModel, batch: Any, drawn: Sequence[Drawn], metric: Metric, target: str, alpha: float, batch_size: int,
    progress: bool = False, memory: int | None = None,
) -> Runs:  # fmt: skip
    """Run every ablation on every sequence."""
    conditions = [
        Condition(
            (d.about["site"], d.about["condition"], d.about["draw"]),
            ()
            if d.space is None or alpha == 0
            else (_removing(d.about["site"], d.space, alpha, batch.mask),),
        )
        for d in drawn
    ]
    found = sweep(
        model, batch.tokens, conditions, reader(batch, metric, target), batch_size=batch_size, memory=memory,
        attention_mask=getattr(batch, "attention_mask", None), progress=progress, describe="ablations",
    )  # fmt: skip
    return Runs(found.values, found.base, scored_positions(batch, metric), found.path)


def scored_positions(batch: Any, metric: Metric) -> Tensor:
    """Where the metric counts. (example, pos)"""
    scored: Tensor = batch.mask.clone()
    if metric == "next_token_loss":
        # A loss stands where its token is predicted, so the next one must be real.
        scored[:, -1] = False
        scored[:, :-1] &= batch.mask[:, 1:]
    return scored


def reader(batch: Any, metric: Metric, target: str) -> Read:
    """What the engine keeps of each run: the metric at each position."""
    data = {"tokens": batch.tokens, "mask": batch.mask}
    if metric == "accuracy":
        data = {**data, "answer": batch.labels[target]}
    elif callable(metric):
        data = {**data, **batch.labels}
    return Read(_metric(metric, target), None, data)


def per_sequence(values: Tensor, scored: Tensor) -> Tensor:
    """The mean over each sequence's scored positions, of the sequences that have any.

    Args:
        values: (..., example, pos)
        scored: Where to count. (example, pos)

    Returns:
        (..., scored example) float64
    """
    keep = scored.any(1)
    if not bool(keep.any()):
        raise InputError(NOTHING_SCORED)
    return ((values.double() * scored).sum(-1) / scored.sum(-1).clamp_min(1))[..., keep]


def score(
    rows: list[dict[str, Any]], runs: Runs, scored: Tensor, chance: float | None, seed: int, metric: Metric
) -> tuple[Tensor, Tensor]:
    """Write value, drop, its interval, damage and, on targets, the effect into the rows.

    Args:
        rows: One for each of ``runs.values``.
        runs: What was measured.
        scored: Where to count. (example, pos)
        chance: What guessing gets, for an accuracy.
        seed: Of the intervals.
        metric: What was measured, to know in which direction it drops when something is lost.

    Returns:
        The metric of each example that counts, under each row and without ablation: (row, example)
        and (example,).
    """
    from probelens.numerics.stats import hierarchical_bootstrap

    values, clean = per_sequence(runs.values, scored), per_sequence(runs.clean, scored)
    # One bootstrap over examples for every row at once: the examples are the same in all of them.
    found = hierarchical_bootstrap((clean - values).T[None], seed=seed, n_draws=1000)
    room = clean.mean().item() - (chance if chance is not None else 0.0)
    for i, row in enumerate(rows):
        drop = found.estimate[i].item()
        row.update(
            chance=chance,
            value=values[i].mean().item(), clean=clean.mean().item(), drop=drop, lo=found.low[i].item(),
            hi=found.high[i].item(), damage=drop / room if chance is not None and room > ROOM else None,
        )  # fmt: skip
    _effects(rows, values, clean, chance, seed, COST.get(metric) if isinstance(metric, str) else None)
    return values, clean


def _effects(
    rows: list[dict[str, Any]],
    values: Tensor,
    clean: Tensor,
    chance: float | None,
    seed: int,
    cost: int | None,
) -> None:
    """N = D of the subspace − mean D of the controls that remove equal variance, paired over examples.

    ``cost`` is the sign of a drop that hurts; None where it isn't known.
    """
    from probelens.numerics.stats import ratio_of_means

    for i, row in enumerate(rows):
        if row.get("condition") != "target":
            continue
        row.update(effect=None, effect_lo=None, effect_hi=None, effect_against=None, effect_p=None)
        for kind in CONTROLS:
            found_damage = [
                r["damage"]
                for r in rows
                if (r["site"], r["condition"]) == (row["site"], kind) and r["damage"] is not None
            ]
            row[f"damage_{kind}"] = sum(found_damage) / len(found_damage) if found_damage else None
        # Without a chance level there is no scale, and the effect is in the metric's own unit.
        room = torch.ones_like(clean) if chance is None else clean - chance
        for kind in ("random_matched", "random"):
            mine = [j for j, r in enumerate(rows) if r["site"] == row["site"] and r["condition"] == kind]
            if mine and room.mean() > ROOM:
                found = ratio_of_means(
                    (values[mine].mean(0) - values[i])[None], room[None], seed=seed, n_draws=1000
                )
                p = None
                if cost is not None:
                    p = (1 + sum(cost * rows[j]["drop"] >= cost * row["drop"] for j in mine)) / (
                        1 + len(mine)
                    )
                row.update(
                    effect=found.estimate.item(), effect_lo=found.low.item(), effect_hi=found.high.item(),
                    effect_against=kind,
                    # The interval is over examples; how much control draws differ is asked apart.
                    effect_p=p,
                )  # fmt: skip
                break


def accuracy_chance(batch: Any, target: str, metric: Metric, scored: Tensor | None = None) -> float | None:
    """What always giving one answer gets at best, as ``score`` counts; None for a metric that is no accuracy.

    Sequences count alike however many positions they have, as in the accuracy it is compared with.
    """
    if metric != "accuracy":
        return None
    scored = (batch.mask if scored is None else scored).cpu()
    if not bool(scored.any()):
        raise InputError(NOTHING_SCORED)
    rows, _ = scored.nonzero(as_tuple=True)
    # Counted before it is divided, so that a single class is exactly 1.
    pairs, counts = torch.stack([rows, batch.labels[target].cpu()[scored]]).unique(dim=1, return_counts=True)
    by_class = torch.bincount(pairs[1], weights=counts.double() / scored.sum(1)[pairs[0]])
    return (by_class.max() / scored.any(1).sum()).item()


def removal(space: Subspace | Eraser, alpha: float = 1.0, pos: Positions = None) -> Edit:
    """The edit x → x + α (x without the subspace − x)."""
    from probelens.subspaces.subspace import Subspace

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
    """What a site gives with the subspace removed there. (example, pos, d)

    A state that is edited at one step is what the next is computed from, so that it takes a run of its own.
    """
    if not space.rank or not alpha:
        return acts[name]
    if not model.point(name).step:
        return removal(space, alpha)(acts[name])
    from probelens.running.collect import collect

    attention = getattr(batch, "attention_mask", None)
    parts = []
    for rows in torch.arange(len(batch.tokens)).split(batch_size):
        mask = None if attention is None else attention[rows]
        with model.hooks([(name, removal(space, alpha, batch.mask[rows]))]):
            parts.append(
                collect(model, batch.tokens[rows], [name], batch_size=batch_size, attention_mask=mask)[name]
            )
    return torch.cat(parts)


def _removing(name: str, space: Subspace | Eraser, alpha: float, mask: Tensor) -> Intervention:
    return Intervention(name, lambda rows: removal(space, alpha, mask[rows]))


def _metric(metric: Metric, target: str) -> Callable[..., Tensor]:
    if callable(metric):
        given = metric

        def custom(logits: Tensor, **data: Tensor) -> Tensor:
            with noted(lambda: metric_note(given, ", ".join(["logits", *(f"{k}={k}" for k in data)]))):
                value = given(logits, **data)
            if not isinstance(value, Tensor) or value.shape != logits.shape[:2]:
                raise ShapeError(
                    f"metric must return one value a position, {tuple(logits.shape[:2])}, got "
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
            values = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            return torch.nn.functional.pad(values.reshape(len(tokens), -1), (0, 1))

        return loss
    raise InputError(f"metric {metric!r} is not known. Allowed: 'accuracy', 'next_token_loss', or a function")

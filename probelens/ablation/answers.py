"""The metrics of ablations: what outputs are compared with, at each position or once for each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, ShapeError, metric_note, need_arguments, noted
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.numerics.metrics import kl
from probelens.running.shapes import output_shape
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.references import Unedited

Metric = Literal["accuracy", "next_token_loss", "mse", "r2", "kl"] | Callable[..., Tensor]
NAMES = ("accuracy", "next_token_loss", "mse", "r2", "kl")


def reader(model: HookedModel, batch: Any, metric: Metric, target: str) -> Read:
    """What a sweep keeps of each run: the metric (example, pos), or (example, 1) where the model answers once for each.

    Raises InputError, before anything long runs, where the metric, the target and the model's outputs don't go together.
    """
    if not callable(metric) and metric not in NAMES:
        raise InputError(f"metric {metric!r} is not known. Allowed: {', '.join(map(repr, NAMES))}, or a function")
    told = mask_for_model(model, batch.attention_mask, batch.inputs)
    shape = output_shape(model, batch.examples, told)
    answers = batch.labels.get(target) if metric in ("accuracy", "mse", "r2") else None
    each = len(shape) == 3 or (len(shape) == 2 and _a_number_at_each_position(answers, batch, shape))
    kind = f"this {type(model.module).__name__} gives outputs {('(example, class)', '(example, pos, class)')[each]}"
    if len(shape) == 1:
        kind = f"this {type(model.module).__name__} gives one number for each example"
    if metric == "next_token_loss" and (not each or batch.examples.tokens is None):
        raise InputError(
            f"metric='next_token_loss' needs tokens and an output at each position, and {kind} for {batch.examples.describe()}"
        )
    if answers is not None:
        _check(answers, each, shape, metric, target, kind)
    data: dict[str, Any] = {} if batch.examples.tokens is None else {"tokens": batch.tokens}
    data["mask"] = where(batch, each)
    if answers is not None:
        data["answer"] = answers.squeeze(-1) if not each and answers.ndim == 2 else answers
    elif callable(metric):
        data |= batch.labels
    if metric == "r2":
        data["spread"] = _spread(data["answer"], data["mask"]).expand(len(batch))
    at = _read_at(batch, metric, shape) if each else None
    if at is not None:
        data["at"] = at
    if metric == "kl":
        data["reference"] = Unedited(model, batch.examples, told, at)
    return Read(_Reading(metric, target, each), at, data, by_position=each)


def scored_positions(batch: Any, metric: Metric, by_position: bool = True) -> Tensor:
    """Where the metric counts: (example, pos), or (example, 1) of a model that answers once for each example."""
    if not by_position:
        return where(batch, False)[:, None]
    scored: Tensor = batch.mask.clone()
    if metric == "next_token_loss":
        # A loss belongs to the position that predicts the token, so the next position must be real.
        scored[:, -1] = False
        scored[:, :-1] &= batch.mask[:, 1:]
    return scored


def _read_at(batch: Any, metric: Metric, shape: tuple[int, ...]) -> Tensor | None:
    """The positions at which a metric counts, (example, read), where reading no others saves half or more; None otherwise.

    Examples with fewer of them read some others too. A metric of the caller's own is given all positions.
    """
    if callable(metric) or len(shape) < 3 or shape[1] != batch.mask.shape[1]:
        return None
    scored = scored_positions(batch, metric)
    most = int(scored.sum(1).max())
    return scored.long().argsort(dim=1, descending=True, stable=True)[:, :most] if 0 < 2 * most <= shape[1] else None


def where(batch: Any, by_position: bool) -> Tensor:
    """Where labels count: (example, pos), or (example,) of a model that answers once for each."""
    mask: Tensor = batch.mask
    if by_position:
        if mask.ndim == 1:
            raise ShapeError(
                "the model answers at each position, and the batch doesn't say how many there are. Give labels or a mask "
                "(example, pos)"
            )
        return mask
    return mask if mask.ndim == 1 else mask.any(1)


def filled(outputs: Tensor, mask: Tensor) -> Tensor:
    """The outputs of packed sequences, which end with the longest of the batch, at all positions."""
    given = outputs.shape[1]
    if given > mask.shape[1] or bool(mask[:, given:].any()):
        raise ShapeError(
            f"the model gives {given} positions where the batch's mask has {mask.shape[1]} and counts some beyond. Give a "
            "mask of the outputs' positions, False where a sequence has ended"
        )
    return torch.cat([outputs, outputs.new_zeros(len(outputs), mask.shape[1] - given, *outputs.shape[2:])], 1)


def _a_number_at_each_position(answers: Tensor | None, batch: Any, shape: tuple[int, ...]) -> bool:
    return (
        answers is not None and answers.is_floating_point() and answers.ndim == 2 and answers.shape[1] == shape[1] > 1
    )


def _check(answers: Tensor, each: bool, shape: tuple[int, ...], metric: Metric, target: str, kind: str) -> None:
    values = answers.is_floating_point()
    if values and metric == "accuracy":
        raise InputError(
            f"metric='accuracy' is for classes, and label {target!r} holds values. Give metric='r2' or 'mse', or target= a "
            "label of classes"
        )
    if not values and metric != "accuracy":
        raise InputError(f"metric={metric!r} is for values, and label {target!r} holds classes. Use labels.float()")
    if values and not (len(shape) == 1 or shape[-1] == 1 or (len(shape) == 2 and each)):
        raise InputError(f"metric={metric!r} needs one number as the answer, and {kind} of size {shape[-1]}")
    if not values and len(shape) == 1:
        raise InputError(
            f"metric='accuracy' needs a logit for each class, and {kind}. Give metric='mse' and float labels"
        )
    if answers.ndim == 2 and not each and answers.shape[1] > 1:
        raise InputError(
            f"label {target!r} has one value at each position, and {kind}: one answer for each example. Give target= a label "
            "(example,)"
        )
    if answers.ndim == 1 and each:
        raise InputError(
            f"label {target!r} has one value for each example, and {kind}. Give target= a label (example, pos), such as "
            "pairs.batch() has of PatchPairs, or say with pl.wrap(module, output=...) which position answers"
        )


def _spread(answer: Tensor, mask: Tensor) -> Tensor:
    """The variance of values where they count, every example weighing the same. ()"""
    y, keep = answer.double().reshape(len(answer), -1), mask.reshape(len(mask), -1)
    weight = keep / keep.sum(1, keepdim=True).clamp_min(1)
    weight = weight / weight.sum().clamp_min(1e-300)
    y = y.where(keep, 0.0)
    variance = (weight * (y - (weight * y).sum()).square()).sum()
    if not bool(variance > 0):
        raise InputError("metric='r2': all values that count are equal, so R² is undefined. Give metric='mse'")
    return variance


class _Reading:
    """A metric of outputs and what goes with them, as values (batch, pos), or (batch, 1)."""

    def __init__(self, metric: Metric, target: str, by_position: bool) -> None:
        self.metric, self.target, self.by_position = metric, target, by_position
        # What a metric refers to for each example is cut with the batch.
        self.references = getattr(metric, "references", {})

    def __call__(self, outputs: Tensor, **data: Tensor) -> Tensor:
        if self.metric == "next_token_loss":
            data["next"] = data["tokens"].roll(-1, 1)
        mask, at = data["mask"], data.pop("at", None)
        if at is not None:
            some = {key: x.gather(1, at) for key, x in data.items() if key in ("mask", "answer", "next")}
            value = self._value(outputs, some["mask"], {**data, **some})
            return value.new_zeros(mask.shape).scatter(1, at, value)
        if self.by_position and outputs.shape[1] != mask.shape[1]:
            outputs = filled(outputs, mask)
        value = self._value(outputs, mask, data)
        return value if self.by_position else value[:, None]

    def _value(self, outputs: Tensor, mask: Tensor, data: dict[str, Tensor]) -> Tensor:
        metric = self.metric
        if callable(metric):
            return self._custom(metric, outputs, data)
        if metric == "accuracy":
            return self._accuracy(outputs, data["answer"], mask)
        if metric == "next_token_loss":
            tokens = data["tokens"]
            if int(tokens.max()) >= outputs.shape[-1]:
                raise MetricError(
                    f"the tokens go up to {int(tokens.max())}, but the model has {outputs.shape[-1]} logits, so it doesn't "
                    'predict tokens. Give metric="accuracy", or a function.'
                )
            following = data["next"]
            found = torch.nn.functional.cross_entropy(
                outputs.float().flatten(0, 1), following.flatten(), reduction="none"
            )
            return found.reshape(following.shape)
        if metric == "kl":
            reference = data["reference"]
            if self.by_position:
                if reference.shape[1] != outputs.shape[1]:
                    reference = filled(reference, mask)
                shape = outputs.shape[:2]
                outputs, reference = outputs.flatten(0, 1), reference.flatten(0, 1)
                return kl(outputs, reference, mask.flatten()).reshape(shape)
            return kl(outputs, reference, mask)
        answer = data["answer"]
        found = outputs.reshape(answer.shape).float()
        if bool(found.isnan()[mask].any()):
            raise MetricError("the model's outputs hold NaN, so there is nothing to score")
        wrong = (found - answer).square()
        return wrong if metric == "mse" else 1 - wrong / data["spread"].reshape(-1, *[1] * (wrong.ndim - 1)).float()

    def _accuracy(self, logits: Tensor, answer: Tensor, mask: Tensor) -> Tensor:
        high = int(answer[mask].max()) if bool(mask.any()) else 0
        if high >= logits.shape[-1]:
            raise MetricError(
                f"label {self.target!r} has class {high}, but the model has {logits.shape[-1]} logits. "
                'Give target= the label that the model answers with, or metric="next_token_loss".'
            )
        if bool(logits.isnan().any(-1)[mask].any()):
            # The argmax of NaN is a class like any other.
            raise MetricError(
                "the model's logits hold NaN, so there is no answer to score. Look for the first site with NaN in "
                'pl.collect(model, batch, "layers").'
            )
        return (logits.argmax(-1) == answer).float()

    def _custom(self, given: Callable[..., Tensor], outputs: Tensor, data: dict[str, Tensor]) -> Tensor:
        arguments = ", ".join(["logits", *(f"{k}={k}" for k in data)])
        need_arguments(given, arguments, outputs, **data)
        with noted(lambda: metric_note(given, arguments)):
            value = given(outputs, **data)
        wanted, each = (outputs.shape[:2], "position") if self.by_position else (outputs.shape[:1], "example")
        if not isinstance(value, Tensor) or value.shape != wanted:
            raise ShapeError(
                f"metric must return one value per {each}, {tuple(wanted)}, got "
                f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
            )
        return value.float()

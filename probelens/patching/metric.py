"""The metric that patching reads at the end of each run, and whether a run prefers its own right answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, ShapeError, metric_name, metric_note, need_arguments, noted
from probelens.numerics.metrics import kl

Metric = Literal["logit_diff", "prob_diff", "value", "mse", "kl"] | Callable[..., Tensor]
NAMES = ("logit_diff", "prob_diff", "value", "mse", "kl")


def read_metric(metric: Metric, by_position: bool = True, any_of: bool = False) -> Callable[..., Tensor]:
    """From outputs and answers to the metric and the logit difference. (example, 2)

    Outputs are logits (example, 1, d_vocab), or what a model that answers once for each example gives. The sign of the
    second number says whose answer a run prefers, which that of a metric of the caller's own doesn't; it is 0 without
    answers.
    """
    if not callable(metric) and metric not in NAMES:
        raise InputError(
            f"metric {metric!r} is not known. Allowed: {', '.join(map(repr, NAMES))}, or a function "
            "of logits (batch, d_vocab) and answers (batch, 2)"
        )
    return _Reading(metric, by_position, any_of)


class _Reading:
    def __init__(self, metric: Metric, by_position: bool, any_of: bool) -> None:
        self.metric, self.by_position, self.any_of = metric, by_position, any_of
        # What a metric refers to for each example is cut with the batch.
        self.references = getattr(metric, "references", {})

    def __call__(
        self, logits: Tensor, answers: Tensor | None = None, unedited: Tensor | None = None, **data: Any
    ) -> Tensor:
        outputs, metric = logits[:, 0] if self.by_position else logits, self.metric
        if callable(metric):
            value = _custom(metric, outputs, answers, data)
            known = answers is None or answers.is_floating_point() or outputs.ndim != 2
            preferred = _nearer(outputs.detach(), answers) if known else self._preferred(outputs.detach(), answers)
            return torch.stack([value, preferred.to(value.device)], 1)
        if metric in ("logit_diff", "prob_diff"):
            assert answers is not None
            difference = _difference(answer_scores(outputs.float(), answers, strict=True))
            if metric == "prob_diff":
                chances = outputs.float().log_softmax(-1)
                return torch.stack([_difference(answer_scores(chances, answers).exp()), difference], 1)
            return torch.stack([difference, difference], 1)
        if metric == "kl":
            assert unedited is not None
            value = kl(outputs, unedited[:, 0] if self.by_position else unedited)
            classes = answers is not None and not answers.is_floating_point()
            return torch.stack(
                [value, self._preferred(outputs.detach(), answers) if classes else torch.zeros_like(value)], 1
            )
        number = outputs.reshape(len(outputs)).float()
        if metric == "mse":
            assert answers is not None
            return torch.stack([(number - answers[:, 0]).square(), _nearer(number.detach(), answers)], 1)
        return torch.stack([number, _nearer(number.detach(), answers)], 1)

    def _preferred(self, logits: Tensor, answers: Any) -> Tensor:
        """The logit difference; 0, by which no answer is preferred, where answers are no tokens or logits are NaN."""
        width = logits.shape[-1]
        scores = answer_scores(
            logits.float(), answers.clamp(max=width - 1) if answers.ndim == 3 else answers.clamp(0, width - 1)
        )
        known = ((answers >= 0) | (answers.ndim == 3)) & (answers < width)
        return torch.where(known.flatten(1).all(1), _difference(scores), 0.0).nan_to_num(0.0)


def answer_scores(scores: Tensor, answers: Tensor, strict: bool = False) -> Tensor:
    """The score of both answers, of sets that of any of them: (example, class) -> (example, 2)."""
    if strict:
        need_known(scores, answers)
        if bool(scores.isnan().any()):
            raise MetricError("logits are NaN at a counted position: the run before this metric went wrong")
    if answers.ndim == 2:
        return scores.gather(1, answers)
    picked = scores.gather(1, answers.clamp(min=0).flatten(1)).view(answers.shape)
    return picked.masked_fill(answers < 0, -torch.inf).logsumexp(-1)


def need_known(scores: Tensor, answers: Tensor) -> None:
    """Refuse (InputError) answers that are no class of the scores. (example, class), (example, ...)"""
    if (high := int(answers.max())) >= scores.shape[-1]:
        raise InputError(f"answer id {high} is outside the {scores.shape[-1]} logits of the model")


def chosen_answers(outputs: Tensor, answers: Tensor) -> Tensor:
    """Whether the argmax over all classes is the source's answer, whether the base's, the logit difference, a sum over all.

    Outputs are logits (example, 1, class), or (example, class) of a model that answers once for each example; answers
    (example, 2) are classes, or sets of them (example, 2, class) with -1 for none. (example, 4)
    """
    scores = (outputs[:, 0] if outputs.ndim == 3 else outputs).float()
    need_known(scores, answers)
    hits = is_answer(scores, answers)
    # Weights without a pattern: whatever logit changes, the sum does.
    weights = torch.cos(1.7 * torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype))
    gap = _difference(answer_scores(scores, answers)).masked_fill(scores.isnan().any(-1), torch.nan)
    return torch.cat([hits.float(), gap[:, None], (scores @ weights)[:, None]], 1)


def need_logits(*runs: Tensor) -> None:
    """Refuse (MetricError) runs, as ``chosen_answers`` reads them, whose logits are NaN. each (example, 4)"""
    if bad := sum(int(run[:, 2].isnan().sum()) for run in runs):
        raise MetricError(
            f"the model's logits hold NaN in {bad} of {sum(map(len, runs))} runs, so there is no answer to follow. Look for the "
            'first site with NaN in pl.collect(model, inputs, "layers").'
        )


def is_answer(scores: Tensor, answers: Tensor) -> Tensor:
    """Whether the argmax over classes is each answer, or any of a set of them: (example, class) -> (example, 2)."""
    best = scores.argmax(-1).view(-1, *[1] * (answers.ndim - 1))
    return (best == answers).reshape(*answers.shape[:2], -1).any(-1)


def _difference(scores: Tensor) -> Tensor:
    return scores[:, 0] - scores[:, 1]


def _nearer(outputs: Tensor, answers: Tensor | None) -> Tensor:
    """How much nearer a number is to the clean answer than to the corrupted one; 0 without answers that are numbers."""
    if answers is None or answers.ndim != 2 or outputs.numel() != len(outputs):
        return outputs.new_zeros(len(outputs))
    number = outputs.reshape(-1, 1).float()
    away = (number - answers).abs()
    return away[:, 1] - away[:, 0]


def _custom(metric: Callable[..., Tensor], outputs: Tensor, answers: Tensor | None, data: dict[str, Any]) -> Tensor:
    given = (outputs,) if answers is None else (outputs, answers)
    arguments = ", ".join(["logits", "answers"][: len(given)] + [f"{k}={k}" for k in data])
    need_arguments(metric, arguments, *given, **data)
    with noted(lambda: metric_note(metric, arguments)):
        value = metric(*given, **data)
    if not isinstance(value, Tensor) or value.shape != (len(outputs),):
        raise ShapeError(
            f"metric must return one value for each example, ({len(outputs)},), got "
            f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
        )
    return value


def need_numbers(metric: Metric | str, clean: Tensor, corrupted: Tensor) -> None:
    """Refuse (MetricError) a metric that is NaN for every pair, on the clean or on the corrupted run. (example,)"""
    for name, values in (("clean", clean), ("corrupted", corrupted)):
        if bool(values.isnan().all()):
            raise MetricError(
                f"the metric {metric_name(metric)!r} is NaN on the {name} run of all {len(values)} pairs, so there is no gap to "
                "restore. Check the metric, and the model's logits for NaN."
            )


def answered(clean: Tensor, corrupted: Tensor) -> Tensor:
    """Whether both runs prefer their own right answer, from what ``read_metric`` reads of them: (..., 2) -> (...) bool."""
    return (clean[..., 1] > 0) & (corrupted[..., 1] < 0)

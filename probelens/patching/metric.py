"""The metric that patching reads at the end of each run, and whether a run prefers its own right answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, ShapeError, metric_name, metric_note, need_arguments, noted
from probelens.numerics.metrics import logit_diff

Metric = Literal["logit_diff", "prob_diff"] | Callable[[Tensor, Tensor], Tensor]


def read_metric(metric: Metric) -> Callable[..., Tensor]:
    """From logits (example, 1, d_vocab) and answers (example, 2) to the metric and the logit difference. (example, 2)

    The sign of the second says whose answer a run prefers, which that of a metric of the caller's own doesn't.
    """
    if not callable(metric) and metric not in ("logit_diff", "prob_diff"):
        raise InputError(
            f"metric {metric!r} is not known. Allowed: 'logit_diff', 'prob_diff', or a function "
            "of logits (batch, d_vocab) and answers (batch, 2)"
        )

    def read(logits: Tensor, answers: Tensor) -> Tensor:
        if callable(metric):
            value = _custom(metric, logits[:, 0], answers)
            return torch.stack([value, _preferred(logits[:, 0].detach(), answers).to(value.device)], 1)
        scores = logits[:, 0].float()
        high = int(answers.max())
        if high >= scores.shape[-1]:
            raise InputError(f"answer id {high} is outside the {scores.shape[-1]} logits of the model")
        difference = logit_diff(scores, answers)
        value = logit_diff(scores.softmax(-1), answers) if metric == "prob_diff" else difference
        return torch.stack([value, difference], 1)

    return read


def _preferred(logits: Tensor, answers: Tensor) -> Tensor:
    """The logit difference; 0, by which no answer is preferred, where answers are no tokens or logits are NaN."""
    width = logits.shape[-1]
    scores = logits.float().gather(1, answers.clamp(0, width - 1))
    known = ((answers >= 0) & (answers < width)).all(1)
    return torch.where(known, scores[:, 0] - scores[:, 1], 0.0).nan_to_num(0.0)


def _custom(metric: Callable[[Tensor, Tensor], Tensor], logits: Tensor, answers: Tensor) -> Tensor:
    need_arguments(metric, "logits, answers", logits, answers)
    with noted(lambda: metric_note(metric, "logits, answers")):
        value = metric(logits, answers)
    if not isinstance(value, Tensor) or value.shape != (len(logits),):
        raise ShapeError(
            f"metric must return one value for each example, ({len(logits)},), got "
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

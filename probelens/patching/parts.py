"""The parts that patching shares: which positions, which metric, the edit that puts values in, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, metric_note, noted
from probelens.hooks.model import HookedModel
from probelens.hooks.points import has_positions
from probelens.numerics.metrics import logit_diff

Metric = Literal["logit_diff", "prob_diff"] | Callable[[Tensor, Tensor], Tensor]
Pos = Literal["each"] | int | slice | Sequence[int] | Tensor | None
Mode = Literal["denoise", "noise"]


def check_positions(model: HookedModel, names: Sequence[str], columns: Sequence[Tensor | None]) -> None:
    """Refuse points without an axis of positions where some positions are to be patched and others not.

    Args:
        model: The wrapped model.
        names: Hook points.
        columns: As ``columns`` gives them.

    Raises:
        InputError: Names the point and its axes.
    """
    if all(column is None for column in columns):
        return
    for name in names:
        point = model.point(name)
        if not has_positions(point):
            raise InputError(
                f"{name!r} has the axes {point.axes}, none of positions, so it can't be patched at some of them. "
                "Patch it at all positions at once with pos=None, or take another point"
            )


def columns(pos: Pos, length: int, n: int) -> tuple[list[Tensor | None], list[str]]:
    """Columns of a patch result: a position for each example, or None for all at once; and labels."""

    def constant(p: int) -> Tensor:
        if not -length <= p < length:
            raise InputError(
                f"position {p} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
            )
        return torch.full((n,), p % length)

    if pos is None:
        return [None], ["all"]
    if isinstance(pos, str):
        if pos != "each":
            raise InputError(
                f"pos={pos!r} is not known. Allowed: None, 'each', an int, a slice, a list, a tensor"
            )
        pos = slice(None)
    if isinstance(pos, Tensor) and pos.ndim == 1 and len(pos) == n and n != 0:
        if bool(((pos < -length) | (pos >= length)).any()):
            raise InputError(f"a position is outside the {length} positions of the sequences")
        return [pos.long() % length], ["per example"]
    if isinstance(pos, int):
        wanted = [pos]
    elif isinstance(pos, slice):
        wanted = list(range(length))[pos]
    elif isinstance(pos, Tensor):
        raise ShapeError(f"pos as a tensor must be (example,) with {n} examples, got {tuple(pos.shape)}")
    else:
        wanted = [int(p) for p in pos]
    if not wanted:
        raise InputError(f"pos={pos!r} selects no position of {length}")
    return [constant(p) for p in wanted], [str(p % length) for p in wanted]


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
    with noted(lambda: metric_note(metric, "logits, answers")):
        value = metric(logits, answers)
    if not isinstance(value, Tensor) or value.shape != (len(logits),):
        raise ShapeError(
            f"metric must return one value for each example, ({len(logits)},), got "
            f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
        )
    return value


def answered(clean: Tensor, corrupted: Tensor) -> Tensor:
    """Whether both runs prefer their own right answer, from what ``read_metric`` reads of them.

    Args:
        clean: Of the clean run. (..., 2)
        corrupted: Of the corrupted run. (..., 2)

    Returns:
        (...) bool
    """
    return (clean[..., 1] > 0) & (corrupted[..., 1] < 0)


def check_pairs(pairs: Any, mode: str) -> None:
    """Refuse what isn't PatchPairs, or an unknown mode."""
    if mode not in ("denoise", "noise"):
        raise InputError(f"mode {mode!r} is not known. Allowed: 'denoise', 'noise'")
    if not hasattr(pairs, "clean") or not hasattr(pairs, "answers"):
        raise InputError(
            f"patching needs PatchPairs, got a {type(pairs).__name__}. Make them with task.pairs(), or "
            "probelens.PatchPairs(clean, corrupted, edit_pos, read_pos, answers)."
        )
    if not len(pairs):
        raise InputError("there is no pair to patch: clean and corrupted have no example")


def marks(pairs: Any) -> dict[str, int]:
    """Positions that all pairs share: where they were edited, and where the answer is read."""
    found = {"edited": pairs.edit_pos, "read": pairs.read_pos}
    return {name: int(pos[0]) for name, pos in found.items() if bool((pos == pos[0]).all())}

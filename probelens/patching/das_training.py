"""Learning a subspace by gradient: interchanges through a frozen model, and the answer that they should bring.

Q (rank, d) is the span of the columns of a matrix W: QR gives orthonormal rows, and the matrix is put back to them after
each step of Adam, so that a step is a rotation of Q whatever the size of W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from probelens.errors import InputError
from probelens.hooks.edits.swap import Swap
from probelens.hooks.model import HookedModel
from probelens.numerics.modes import full_precision
from probelens.patching.metric import is_answer
from probelens.patching.pairs import Sides
from probelens.patching.plan import Source
from probelens.running.faster_forwards import faster_forwards
from probelens.running.gradients import frozen
from probelens.running.sweep.conditions import Condition
from probelens.running.sweep.strategy import Full, Skip, Unfit
from probelens.running.sweep.work import Work

__all__ = ["Learned", "Lesson", "Schedule", "Swaps", "learn", "learn_rank"]

_HELD = 1 << 30  # bytes of activations kept over all steps; beyond, they are collected again at each
_WINDOW, _PATIENCE, _GAIN, _SOLVED = 25, 4, 0.01, 0.01


@dataclass(frozen=True)
class Schedule:
    """How a subspace is learned.

    Args:
        steps: Most steps.
        lr: Learning rate of Adam at the first step, about the angle that it turns by; it falls linearly to 0.
        batch_size: Pairs in a step.
        seed: Of the first subspace and of the order of pairs.
    """

    steps: int
    lr: float
    batch_size: int
    seed: int


@dataclass(frozen=True, eq=False)
class Learned:
    """A learned subspace.

    Args:
        basis: Orthonormal rows in float64. (rank, d)
        loss: Cross-entropy at each step, in nats. (step,)
    """

    basis: Tensor
    loss: Tensor


class Swaps:
    """Interchanges of some pairs at one hook point, through which gradients reach the directions.

    Args:
        model: The wrapped model.
        sides: Both runs: the source is the clean one, the base the corrupted one.
        site: Name of the hook point.
        column: Position of each pair, or a mask of several (example, pos); None for all positions. (example,)
        lift: How many features of the activation lie before and after those that the subspace lies in.
        taken: The position on the clean side, where that is another. (example,)
    """

    def __init__(
        self, model: HookedModel, sides: Sides, site: str, column: Tensor | None, lift: tuple[int, int] = (0, 0),
        taken: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model, self.site, self.column, self.lift, self.taken = model, site, column, lift, taken
        self.source = Source(model, sides.clean.examples, [site], sides.clean.told)
        self.source.hold(_HELD)
        base = sides.corrupted
        work = Work(
            model, base.examples, [self._condition(torch.zeros(1))], replace(base.read, fn=_logits, data={}),
            base.told, sides.n, None, 0, base.always,
        )  # fmt: skip
        try:
            self.runs: Full = Skip(work)
        except Unfit:
            self.runs = Full(work)
        (self.start,) = self.runs.starts
        self.entering = self._enter() if self.start else None

    def logits(self, basis: Tensor, rows: Tensor) -> Tensor:
        """Logits at the read position after the swap of span(basis). (rank, d), (batch,) -> (batch, d_vocab)"""
        resid = None if self.entering is None else self.entering[rows]
        return self.runs.traced(rows, self._condition(basis), self.start, resid)

    def _condition(self, basis: Tensor) -> Condition:
        wide = F.pad(basis, self.lift)
        made = self.source.put_in(
            self.site, self.column, lambda pos, source: Swap(pos, source, wide, wide), taken=self.taken
        )
        return Condition((), (made,))

    def _enter(self) -> Tensor | None:
        """The base run's residual stream where swapped runs begin; None where it is too large to be kept."""
        if self.runs.work.sizes.resid * len(self.runs.work.examples) > _HELD:
            return None
        with torch.no_grad():
            parts = []
            for rows in torch.arange(len(self.runs.work.examples)).split(64):
                tokens, arguments = self.runs.inputs(rows)
                hooks = self.runs.hooks(self.runs.work.always, rows)
                parts.append(self.model.run_with_hooks(tokens, hooks, stop_at_layer=self.start, **arguments))
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Lesson:
    """Pairs and the answers that a swap should bring.

    Args:
        swaps: Interchanges of the pairs.
        rows: Which of them are learned from. (n,)
        answers: Class for each pair, also for those that aren't learned from; of several any is right, -1 for none. (example,)
            or (example, class)
    """

    swaps: Swaps
    rows: Tensor
    answers: Tensor

    def loss(self, basis: Tensor, rows: Tensor) -> Tensor:
        """Mean cross-entropy of the answers of some pairs, in nats. (rank, d), (batch,) -> ()"""
        logits = self.swaps.logits(basis, rows).float()
        return _surprise(logits, self.answers[rows].to(logits.device)).mean()

    def scores(self, basis: Tensor, size: int) -> tuple[float, float]:
        """Share of the pairs whose answer is the wanted one, and the mean cross-entropy in nats."""
        model = self.swaps.model
        right, loss = 0, 0.0
        with frozen(model), torch.no_grad(), faster_forwards(model, [self.swaps.site]):
            for rows in self.rows.split(size):
                logits = self.swaps.logits(basis, rows).float()
                answers = self.answers[rows].to(logits.device)
                right += int(is_answer(logits, answers[:, None]).sum())
                loss += float(_surprise(logits, answers).sum())
        return right / len(self.rows), loss / len(self.rows)


def learn(
    lessons: Sequence[Lesson], width: int, rank: int, schedule: Schedule, bar: Any, first: Tensor | None = None
) -> Learned:
    """The subspace of one rank that lowers the mean cross-entropy of the lessons, each counting the same.

    Args:
        lessons: What is learned from, each in batches of its own.
        width: d, how many features the subspace lies in.
        rank: Its rank.
        schedule: Steps, learning rate, batch size and seed. It ends early once four times 25 steps brought less than 1 %.
        bar: A progress bar, updated at each step.
        first: Directions to begin with, filled up with random ones. (less than rank, d)

    Returns:
        The subspace, and the loss at each step.

    Raises:
        InputError: The loss doesn't depend on the directions, or isn't a number.
    """
    gen = torch.Generator().manual_seed(schedule.seed)
    drawn = torch.randn(width, rank, generator=gen, dtype=torch.float64)
    if first is not None:
        drawn = torch.cat([first.mT.to(drawn), drawn[:, len(first) :]], 1)
    model = lessons[0].swaps.model
    # On the CPU in float64: it is small, and swaps take it to where and what the activations are.
    weight = torch.linalg.qr(drawn).Q.requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=schedule.lr)
    orders = [_batches(lesson.rows, schedule.batch_size, gen) for lesson in lessons]
    losses: list[float] = []
    with frozen(model), faster_forwards(model, [lessons[0].swaps.site]):
        for step in range(schedule.steps):
            optimizer.param_groups[0]["lr"] = schedule.lr * (1 - step / schedule.steps)
            basis = torch.linalg.qr(weight).Q.mT
            each = [lesson.loss(basis, next(order)) for lesson, order in zip(lessons, orders, strict=True)]
            loss = torch.stack(each).mean()
            weight.grad = _gradient(loss, weight, lessons[0].swaps.site)
            optimizer.step()
            with torch.no_grad():
                q, r = torch.linalg.qr(weight)
                weight.copy_(q * r.diagonal().sign())
            losses.append(float(loss.detach()))
            bar.update(1)
            if _flat(losses):
                break
    return Learned(torch.linalg.qr(weight.detach()).Q.mT.contiguous(), torch.tensor(losses))


def learn_rank(
    fit: Callable[[int, Tensor | None], Learned], score: Callable[[Tensor], tuple[float, float]], n: int, most: int
) -> tuple[Learned, list[dict[str, Any]]]:
    """The smallest rank that does as well on validation pairs as any that was tried.

    Ranks 1, 2, 4, … are fitted, each beginning with the directions of the one before, until two doublings bring no more
    pairs than one standard error; then the gap below the smallest sufficient one is halved.

    Args:
        fit: Learns a subspace of a rank, from directions to begin with.
        score: The share of validation pairs that follow a subspace, and the loss.
        n: Validation pairs.
        most: The highest rank to try.

    Returns:
        The subspace, and what was tried: "rank", "iia", "loss" and "n".

    Source:
        The rule of one standard error: Breiman et al. 1984, Classification and Regression Trees, section 3.4.3.
    """
    found: dict[int, Learned] = {}
    tried: list[dict[str, Any]] = []

    def attempt(rank: int) -> float:
        below = [r for r in found if r < rank]
        found[rank] = fit(rank, found[max(below)].basis if below else None)
        iia, loss = score(found[rank].basis)
        tried.append({"rank": rank, "iia": iia, "loss": loss, "n": n})
        return iia

    def enough(iia: float) -> bool:
        """Whether a share is within one standard error of the best."""
        best = max(t["iia"] for t in tried)
        p = (best * n + 1) / (n + 2)  # never 0 or 1, where the error would vanish
        return iia >= best - math.sqrt(p * (1 - p) / n)

    rank, stale, high = 1, 0, -1.0
    while rank <= most and stale < 2 and high < 1:
        before, got = high, attempt(rank)
        high = max(high, got)
        stale = 0 if before < 0 or not enough(before) else stale + 1
        rank = min(2 * rank, most) if rank < most else most + 1
    good = min(t["rank"] for t in tried if enough(t["iia"]))
    low = max((r for r in found if r < good), default=0)
    while good - low > 1:
        middle = (low + good) // 2
        if enough(attempt(middle)):
            good = middle
        else:
            low = middle
    return found[good], tried


def _gradient(loss: Tensor, weight: Tensor, site: str) -> Tensor:
    if not bool(torch.isfinite(loss)):
        raise InputError(
            f"the loss of swaps at {site!r} is {float(loss)}: look for NaN or infinity in the model's logits"
        )
    with full_precision():  # backward, an operation has the precision that it had forward
        grad = torch.autograd.grad(loss, weight, allow_unused=True)[0] if loss.requires_grad else None
    if grad is None:
        raise InputError(
            f"das() needs a gradient at {site!r}, and none comes back there: what is read doesn't depend on the tensor that "
            "this point gives, or the model cuts the gradient (detach, no_grad, a kernel without a backward pass) after it. "
            "Take another point, or a subspace that needs no gradient (pl.subspaces) with pl.interchange"
        )
    return grad


def _batches(rows: Tensor, size: int, gen: torch.Generator) -> Any:
    """Batches without end, each pair once in every round."""
    while True:
        yield from rows[torch.randperm(len(rows), generator=gen)].split(size)


def _flat(losses: Sequence[float]) -> bool:
    """Whether the loss is at its end: next to nothing, or no better than it was a few windows ago."""
    if len(losses) % _WINDOW:
        return False
    means = [sum(losses[i : i + _WINDOW]) / _WINDOW for i in range(0, len(losses), _WINDOW)]
    if means[-1] < _SOLVED:
        return True
    before = means[:-_PATIENCE]
    return bool(before) and min(means[-_PATIENCE:]) > (1 - _GAIN) * min(before)


def _surprise(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy of answers, of several that of any of them, in nats: (batch, class) -> (batch,)."""
    if answers.ndim == 1:
        return F.cross_entropy(logits, answers, reduction="none")
    picked = logits.gather(1, answers.clamp(min=0)).masked_fill(answers < 0, -torch.inf)
    return logits.logsumexp(-1) - picked.logsumexp(-1)


def _logits(logits: Tensor) -> Tensor:
    return logits[:, 0] if logits.ndim == 3 else logits

"""Which conditions can begin in the middle of a sequence, and which of them share a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from probelens.hooks.model import HookedModel
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.memory import Limits

_EMBEDDINGS = ("hook_embed", "hook_pos_embed")
SHORTEST = 8
"""Positions of a sequence whose prefix is worth keeping."""


@dataclass(frozen=True)
class Job:
    """A condition whose edits all lie in blocks ``start`` to ``stop − 1`` (−1: the embedding).

    ``at`` is the one hook point that all of them edit where that is the residual entering block
    ``stop``: then no block has to run to apply the edits.
    """

    index: int
    interventions: tuple[Intervention, ...]
    start: int
    stop: int
    at: str | None

    def earliest(self, rows: Tensor) -> int:
        """The first position that may change, as far as that is known before it runs."""
        if self.at is None and self.stop > 0:
            # With hooks inside it a block may run another kernel, whose rounding differs at every position.
            return 0
        return min(edit.earliest(rows) for edit in self.interventions)


@dataclass(frozen=True)
class Load:
    """Jobs whose edited residuals are held at the same time.

    Args:
        jobs: In the order of running.
        groups: Which of them share a pass, by index; without those that can't reach what is read.
        blocks: Block-positions of these passes.
        held: Bytes of the edited residuals.
    """

    jobs: tuple[Job, ...]
    groups: tuple[tuple[int, ...], ...]
    blocks: int
    held: int


def jobs_of(model: HookedModel, conditions: Sequence[Condition]) -> list[Job]:
    """The conditions that can begin in mid-sequence."""
    # Asked once for each block, not for each condition: an answer holds while the model is as it is.
    starts = functools.cache(model.can_start_at)
    return [job for i, c in enumerate(conditions) if (job := _job(model, i, c, starts)) is not None]


def loads(
    jobs: Sequence[Job], begins: Sequence[int], last: int, rows: int, length: int, n: int, limits: Limits,
    passes: Callable[[Sequence[int], int], Iterable[tuple[int, int]]],
) -> list[Load]:  # fmt: skip
    """Divide the jobs of a batch into loads that fit into memory, and each load into passes.

    ``begins`` says where each may begin at the earliest, ``last`` is the last position that is read, ``n`` counts the
    model's blocks; ``passes`` takes where runs begin, not increasing, and examples to the slices that share a pass.
    """
    parts: list[list[tuple[Job, int]]] = [[]]
    held = [0]
    for job, begin in zip(jobs, begins, strict=True):
        more = rows * (length - begin) * limits.vector if begin <= last else 0
        if parts[-1] and held[-1] + more > limits.edited:
            parts.append([])
            held.append(0)
        parts[-1].append((job, begin))
        held[-1] += more
    out = []
    for part, size in zip(parts, held, strict=True):
        run = sorted(((j, b) for j, b in part if b <= last), key=lambda p: (-p[1], p[0].stop, p[0].index))
        groups = [run[lo:hi] for lo, hi in passes([b for _, b in run], rows)]
        blocks = sum((n - j.stop) * (length - group[-1][1]) * rows for group in groups for j, _ in group)
        named = tuple(tuple(j.index for j, _ in group) for group in groups)
        out.append(Load(tuple(j for j, _ in part), named, blocks, size))
    return out


def _job(model: HookedModel, index: int, condition: Condition, starts: Callable[[int], bool]) -> Job | None:
    """The job of a condition; None where an edit is outside the blocks, or a run can't begin there."""
    points = {point.name: point for point in (model.point(one.name) for one in condition.interventions)}
    layers = [-1 if name in _EMBEDDINGS else point.block for name, point in points.items()]
    known = [layer for layer in layers if layer is not None]
    if not known or len(known) < len(layers):
        return None
    start, last = min(known), max(known)
    only = next(iter(points)) if len(points) == 1 else None
    ends: dict[str, Literal[0, 1]] = {"hook_resid_pre": 0, "hook_resid_post": 1}
    kind = only.rsplit(".", 1)[-1] if only is not None and start >= 0 else ""
    direct = only if only == f"blocks.{start}.{kind}" and kind in ends else None
    stop = start + ends[kind] if direct is not None else last + 1
    if (start > 0 and not starts(start)) or not starts(stop):
        return None
    return Job(index, condition.interventions, start, stop, direct)


# A plan asks for what its run asks for again, batch by batch.
@functools.lru_cache(maxsize=64)
def passes(
    positions: tuple[int, ...], rows: int, length: int, overhead: float, most: int, together: int = 1 << 30,
    joins: bool = False,
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Slices of ``positions`` that cost least: which neighbouring runs share a pass that begins where the earliest does.

    Args:
        positions: Where each run may begin, not increasing.
        rows: Examples of each run.
        length: Positions of a sequence.
        overhead: Cost of a pass, in tokens.
        most: Tokens of a pass; one run alone may take more.
        together: Runs that may share a pass.
        joins: Whether a run costs nothing before its own position in a pass that begins earlier.

    Examples:
        >>> passes((3, 2, 1, 0), rows=1, length=4, overhead=0, most=100)
        ((0, 1), (1, 2), (2, 3), (3, 4))
        >>> passes((3, 2, 1, 0), rows=1, length=4, overhead=100, most=100)
        ((0, 4),)
    """
    cost, before = [0.0], [0]
    for stop in range(1, len(positions) + 1):
        width = rows * (length - positions[stop - 1])
        choices, own = [], 0
        for start in range(stop - 1, -1, -1):
            tokens = (stop - start) * width
            if stop - start > 1 and (tokens > most or stop - start > together):
                break
            own += rows * (length - positions[start])
            choices.append((cost[start] + overhead + (own if joins else tokens), start))
        best, start = min(choices)
        cost.append(best)
        before.append(start)
    out = []
    stop = len(positions)
    while stop:
        out.append((before[stop], stop))
        stop = before[stop]
    return tuple(out[::-1])

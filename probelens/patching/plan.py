"""``patch_plan``: what activation patching will run, and what it costs, before it runs.

Patching describes its runs and leaves them to the sweep. The activations that it puts in are those of a
second run, which is made batch by batch during the sweep, so that only one batch of them is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, metric_name
from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.heads import HEAD_AXES, AtHeads
from probelens.hooks.edits.values import Replace
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.passes.at import at
from probelens.hooks.points import HookFn, has_positions
from probelens.hooks.shorthand import Names
from probelens.patching.metric import Metric, need_numbers
from probelens.patching.pairs import (
    Heads,
    Mode,
    Pos,
    Side,
    Sides,
    check_pairs,
    check_positions,
    columns,
    length_at,
    notes,
    sides_of,
)
from probelens.patching.result import PatchResult
from probelens.results.sentences import count
from probelens.running.collect import collect, stops_at
from probelens.running.shapes import site_shapes
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.plan import SweepPlan, plan
from probelens.running.sweep.rounding import kept
from probelens.tasks.examples import Examples

__all__ = ["PatchPlan", "patch_plan"]


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """What ``patch`` will run; ``run`` runs it and gives exactly what ``patch`` gives.

    Where the model's first trial on the inputs turns the path "resume" down, the run costs more than is counted here:
    see ``SweepPlan`` for how much, which is printed, too.

    Args:
        sweep: The patched runs, with the unedited run that they are put into.
        source: The unedited run that the activations come from.
        collected: Block-positions of collecting these activations.
        collected_unembedded: Positions that go through the final norm and the unembedding meanwhile: none where
            collecting stops before the last block.
        sites: Hook point of each row.
        positions: Position of each column, as text: "7", "all", "per example".
        mode: "denoise" or "noise".
        metric: Name of the metric.
        joint: Whether all sites are patched together in one run.
        heads: Head of each row; None for all.
    """

    sweep: SweepPlan
    source: SweepPlan
    collected: int
    collected_unembedded: int
    sites: list[str]
    positions: list[str]
    mode: str
    metric: str
    joint: bool
    heads: list[int | None]
    _layers: list[int]
    _pairs: Any
    _sides: Sides
    _values: Source

    @property
    def block_positions(self) -> int:
        """Blocks times positions times examples of all runs: patched, unedited and collecting."""
        return self.sweep.block_positions + self.source.block_positions + self.collected

    @property
    def naive_block_positions(self) -> int:
        """The same with one whole forward for each patch."""
        return self.sweep.naive_block_positions + self.source.naive_block_positions + self.collected

    @property
    def unembedded(self) -> int:
        """Positions of all runs that go through the final norm and the unembedding."""
        return self.sweep.unembedded + self.source.unembedded + self.collected_unembedded

    @property
    def naive_unembedded(self) -> int:
        """The same with one whole forward for each patch."""
        return self.sweep.naive_unembedded + self.source.naive_unembedded + self.collected_unembedded

    @property
    def path(self) -> str:
        """How the patched runs go: "resume", "skip" or "full"; see ``SweepPlan``."""
        return self.sweep.path

    @property
    def why(self) -> str:
        """Why no shorter path is possible."""
        return self.sweep.why

    @property
    def ratio(self) -> float:
        """How many times fewer block-positions than with one whole forward for each patch."""
        return self.naive_block_positions / self.block_positions

    @property
    def bytes(self) -> int:
        """What is held at most; see ``SweepPlan.held``."""
        return max(self.sweep.bytes, self.source.bytes)

    def __str__(self) -> str:
        least = "" if self.sweep.exact else " at least"
        if (other := self.sweep.otherwise) is not None:
            more = self.sweep.trial + other.block_positions - self.sweep.block_positions
            worst = self.naive_block_positions / max(1, self.block_positions + max(0, more))
            least += f", {worst:.2f}x if the trial turns that down"
        return (
            f"patch, {self.mode}, {self.metric}: {count(len(self.sites), 'site')} at "
            f"{count(len(self.positions), 'position')}\n{self.sweep}\n"
            f"source: {self.source.block_positions + self.collected:,} block-positions and "
            f"{self.source.unembedded + self.collected_unembedded:,} unembedded positions more, for the activations and "
            f"the metric of the other run; in all {self.ratio:.2f}x fewer{least}"
        )

    __repr__ = __str__

    def run(self, progress: bool = False) -> PatchResult:
        """Patch as planned.

        Args:
            progress: Show a progress bar.

        Returns:
            What ``patch`` returns: ``values`` (site, pos, example), and ``recovery()`` (site, pos).
        """
        try:
            run = self.sweep.run(progress, "patches")
        finally:
            self._values.forget()
        other = self.source.run()
        sides, probabilities = self._sides, self.metric == "prob_diff"
        into, source, patched = (sides.joined(x, probabilities) for x in (run.base, other.base, run.values))
        clean, corrupted = (source, into) if self.mode == "denoise" else (into, source)
        need_numbers(self.metric, clean[:, 0], corrupted[:, 0])
        tokens = self._pairs.sides[0].tokens
        return PatchResult(
            patched[..., 0].reshape(len(self.sites), len(self.positions), -1), clean[:, 0], corrupted[:, 0],
            sides.answered_by(clean, corrupted), self.sites, self._layers, self.positions, self.mode, self.metric, "patch",
            run.path, None if tokens is None else tokens.cpu(), self.joint,
            notes(self._pairs, sides.answered) | kept(run.rounding),
            self.heads if any(head is not None for head in self.heads) else [],
        )  # fmt: skip


def patch_plan(
    model: HookedModel,
    pairs: Any,
    sites: Names = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    heads: Heads = None,
    joint: bool = False,
    batch_size: int = 64,
    memory: int | None = None,
) -> PatchPlan:
    """Say what ``patch`` will run with these arguments, by which path and why, and what it costs.

    Nothing long runs, and nothing stays on the model.

    Args:
        Those of ``patch``, without ``progress`` and ``executor``.

    Returns:
        The plan, to print; its ``run()`` gives what ``patch`` gives.

    Raises:
        InputError: An unknown mode, metric or position, a point without positions and ``pos`` other than None, or a
            budget too small for one pair at one patch.
        UnknownHookError: A site that the model doesn't have.
    """
    need_wrapped(model)
    check_pairs(pairs, mode)
    names = [point.name for point in resolve(model, sites)]
    sides = sides_of(model, pairs, metric, batch_size)
    into, source = (sides.corrupted, sides.clean) if mode == "denoise" else (sides.clean, sides.corrupted)
    length = length_at(model, into, names, pairs, pos is not None)
    where, labels = columns(pos, length, len(pairs), pairs)
    check_positions(model, names, [target for target, _ in where])
    if mode == "noise":
        where = [(other, target) for target, other in where]
    values = Source(model, source.examples, names, source.told, source.always)
    parts = [(name, head) for name in names for head in heads_of(model, into, name, heads)]
    groups = [parts] if joint else [[part] for part in parts]
    conditions = [
        Condition(
            (i, j), tuple(values.put_in(name, sides.each(to), head=head, taken=sides.each(of)) for name, head in group)
        )
        for i, group in enumerate(groups)
        for j, (to, of) in enumerate(where)
    ]
    planned = plan(
        model, into.examples, conditions, into.read, batch_size=batch_size, source_bytes=values.size, always=into.always,
        attention_mask=into.told, memory=memory,
    )  # fmt: skip
    n, stop, size = model.cfg.n_layers, stops_at(model, names), len(source.examples) * planned.positions
    return PatchPlan(
        planned,
        plan(
            model, source.examples, (), source.read, batch_size=planned.batch_size, always=source.always,
            attention_mask=source.told, memory=memory,
        ),
        (n if stop is None else stop) * size,
        size if stop is None else 0,
        [" + ".join(dict.fromkeys(name for name, _ in group)) for group in groups],
        labels,
        mode,
        metric_name(metric),
        joint,
        [group[0][1] if len(group) == 1 else None for group in groups],
        [model.point(group[0][0]).depth for group in groups],
        pairs,
        sides,
        values,
    )  # fmt: skip


def heads_of(model: HookedModel, side: Side, name: str, heads: Heads) -> list[int | None]:
    """The heads of a point that are patched one at a time; None for all at once."""
    if heads is None:
        return [None]
    axes = model.point(name).axes
    axis = next((i for i, one in enumerate(axes) if one in HEAD_AXES), None)
    if axis is None:
        raise InputError(f"{name!r} has no heads: its axes are {axes}. Leave heads out, or take attn.hook_z")
    n = site_shapes(model, side.examples, [name], side.told)[name][axis]
    wanted = list(range(n)) if isinstance(heads, str) else [heads] if isinstance(heads, int) else list(heads)
    if (isinstance(heads, str) and heads != "each") or not wanted or not all(-n <= h < n for h in wanted):
        raise InputError(f"heads={heads!r}: {name!r} has {n} heads. Give indices from 0 to {n - 1}, or 'each'.")
    return [h % n for h in wanted]


class Source:
    """Activations of one run at several sites, for the batch that was asked for last. Inputs and mask (example, ...)."""

    def __init__(
        self,
        model: HookedModel,
        inputs: Any,
        names: list[str],
        mask: Tensor | None,
        always: Sequence[Intervention] = (),
    ) -> None:
        self.model, self.examples, self.names, self.mask = model, Examples.of(inputs), names, mask
        self.always = always
        self.whole: dict[str, Tensor] = {}
        self.forget()

    def put_in(
        self, name: str, column: Tensor | None, edit: Callable[[Tensor | None, Tensor], Edit] = Replace, *,
        head: int | None = None, taken: Tensor | None = None,
    ) -> Intervention:  # fmt: skip
        """Put them in at a point: ``column`` is the position of each example on its axis; None for all. (example,)

        A span (example, pos) is True where they are put in. ``taken`` is the position from which they come, where that is another; ``head`` the only head that is put in.
        """
        point = self.model.point(name)
        # At a state point other steps then run without a stop at each.
        span = column is not None and column.ndim == 2
        every = column.any(0).nonzero() if span and column is not None else column
        steps = sorted(set(every.flatten().tolist())) if every is not None and point.step else None

        def edit_for(rows: Tensor) -> HookFn:
            values = self._rows(name, rows)
            if column is not None and taken is not None and not torch.equal(column, taken):
                values = _moved(values, taken[rows], column[rows], point.pos_axis)
            made = edit(None if column is None else column[rows], values)
            made = made if head is None else AtHeads(None, made, (head,))
            return made if steps is None else at(steps, made)

        first = column.long().argmax(1) if span and column is not None else column
        return Intervention(name, edit_for, first)

    def hold(self, most: int) -> None:
        """Collect all examples at once, for runs that ask for each often, where that takes at most so many bytes."""
        if self.size() * len(self.examples) <= most:
            self.whole = self.collected(torch.arange(len(self.examples)), 64)

    def forget(self) -> None:
        """Free the activations of the batch."""
        self.rows: Tensor | None = None
        self.held: dict[str, Tensor] = {}

    def size(self) -> int:
        """Bytes of an example at all points."""
        if not self.examples.plain:
            # The caller's hooks aren't called to find out sizes.
            shapes = {} if self.model.has_hooks() else site_shapes(self.model, self.examples, self.names, self.mask)
            return sum(math.prod(shape[1:]) for shape in shapes.values()) * self.model.cfg.dtype.itemsize
        tokens = self.examples.main
        length, width = tokens.shape[1], self.model.cfg.d_model
        points = [self.model.point(name) for name in self.names]
        inside = [p.name for p in points if p.axes != ("batch", "pos", "d_model")]
        found = {p.name: length * width for p in points}
        # The caller's hooks aren't called to find out sizes.
        if inside and not self.model.has_hooks():
            short = tokens[:1, :2]
            mask = None if self.mask is None else torch.ones_like(short)
            acts = collect(self.model, short, inside, attention_mask=mask).tensors
            for name, x in acts.items():
                point = self.model.point(name)
                # A pattern has an axis for the query's positions and one for the key's; some points have none.
                times = max(has_positions(point), ("pos" in point.axes) + ("key_pos" in point.axes))
                found[name] = math.ceil(x.numel() * (length / short.shape[1]) ** times)
        return sum(found.values()) * self.model.cfg.dtype.itemsize

    def collected(self, rows: Tensor, batch_size: int | None = None) -> dict[str, Tensor]:
        """The activations of some examples at all points. each (batch, ...)"""
        if self.always and batch_size is not None and batch_size < len(rows):
            # What is always in place is made for the rows of one batch.
            parts = [self.collected(part) for part in rows.split(batch_size)]
            return {name: torch.cat([part[name] for part in parts]) for name in self.names}
        with self.model.hooks([(one.name, one.edit_for(rows)) for one in self.always]):
            return collect(
                self.model, self.examples.part(rows).inputs, self.names, batch_size=batch_size or len(rows),
                attention_mask=None if self.mask is None else self.mask[rows],
            ).tensors  # fmt: skip

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        if self.whole:
            return self.whole[name][rows]
        if self.rows is None or not torch.equal(self.rows, rows):
            self.forget()
            self.held = self.collected(rows)
            self.rows = rows
        return self.held[name]


def _moved(values: Tensor, taken: Tensor, column: Tensor, axis: int) -> Tensor:
    """Values with what stands at one position of each example put at another, on the axis of positions."""
    out, rows = values.clone().movedim(axis, 1), torch.arange(len(values))
    out[rows, column] = values.movedim(axis, 1)[rows, taken]
    return out.movedim(1, axis)

"""``patch_plan``: what activation patching will run, and what it costs, before it runs.

Patching describes its runs and leaves them to the sweep. The activations that it puts in are those of a
second run, which is made batch by batch during the sweep, so that only one batch of them is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import metric_name
from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.values import Replace
from probelens.hooks.inputs import padding_mask
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.passes.at import at
from probelens.hooks.points import HookFn, has_positions
from probelens.hooks.shorthand import Names
from probelens.patching.metric import Metric, answered, need_numbers, read_metric
from probelens.patching.pairs import Mode, Pos, check_pairs, check_positions, columns, marks
from probelens.patching.result import PatchResult
from probelens.results.sentences import count
from probelens.running.collect import collect, stops_at
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import SweepPlan, plan

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
    _layers: list[int]
    _pairs: Any
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
        clean, corrupted = (other.base, run.base) if self.mode == "denoise" else (run.base, other.base)
        need_numbers(self.metric, clean[:, 0], corrupted[:, 0])
        return PatchResult(
            run.values[..., 0].reshape(len(self.sites), len(self.positions), -1), clean[:, 0], corrupted[:, 0],
            answered(clean, corrupted), self.sites, self._layers, self.positions, self.mode, self.metric, "patch",
            run.path, self._pairs.clean.cpu(), self.joint, {"marks": marks(self._pairs)},
        )  # fmt: skip


def patch_plan(
    model: HookedModel,
    pairs: Any,
    sites: Names = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    joint: bool = False,
    batch_size: int = 64,
    memory: int | None = None,
) -> PatchPlan:
    """Say what ``patch`` will run with these arguments, by which path and why, and what it costs.

    Nothing long runs, and nothing stays on the model.

    Args:
        Those of ``patch``, without ``progress``.

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
    where, labels = columns(pos, pairs.clean.shape[1], len(pairs))
    check_positions(model, names, where)
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask, model, pairs.clean)
    read = Read(read_metric(metric), pairs.read_pos[:, None].long(), {"answers": pairs.answers})
    values = Source(model, source, names, mask)
    groups = [names] if joint else [[name] for name in names]
    conditions = [
        Condition((i, j), tuple(values.put_in(name, column) for name in group))
        for i, group in enumerate(groups)
        for j, column in enumerate(where)
    ]
    shared: dict[str, Any] = {"attention_mask": mask, "memory": memory}
    planned = plan(model, into, conditions, read, batch_size=batch_size, source_bytes=values.size, **shared)
    n, stop = model.cfg.n_layers, stops_at(model, names)
    return PatchPlan(
        planned,
        plan(model, source, (), read, batch_size=planned.batch_size, **shared),
        (n if stop is None else stop) * source.numel(),
        source.numel() if stop is None else 0,
        [" + ".join(group) for group in groups],
        labels,
        mode,
        metric_name(metric),
        joint,
        [model.point(group[0]).depth for group in groups],
        pairs,
        values,
    )


class Source:
    """Activations of one run at several sites, for the batch that was asked for last. Tokens and mask (example, pos)."""

    def __init__(self, model: HookedModel, tokens: Tensor, names: list[str], mask: Tensor | None) -> None:
        self.model, self.tokens, self.names, self.mask = model, tokens, names, mask
        self.whole: dict[str, Tensor] = {}
        self.forget()

    def put_in(
        self, name: str, column: Tensor | None, edit: Callable[[Tensor | None, Tensor], Edit] = Replace
    ) -> Intervention:
        """Put them in at a point: ``column`` is the position of each example on its axis; None for all. (example,)"""
        # At a state point other steps then run without a stop at each.
        steps = sorted(set(column.tolist())) if column is not None and self.model.point(name).step else None

        def edit_for(rows: Tensor) -> HookFn:
            made = edit(None if column is None else column[rows], self._rows(name, rows))
            return made if steps is None else at(steps, made)

        return Intervention(name, edit_for, column)

    def hold(self, most: int) -> None:
        """Collect all examples at once, for runs that ask for each often, where that takes at most so many bytes."""
        if self.size() * len(self.tokens) <= most:
            self.whole = self._collect(torch.arange(len(self.tokens)), 64)

    def forget(self) -> None:
        """Free the activations of the batch."""
        self.rows: Tensor | None = None
        self.held: dict[str, Tensor] = {}

    def size(self) -> int:
        """Bytes of an example at all points."""
        length, width = self.tokens.shape[1], self.model.cfg.d_model
        points = [self.model.point(name) for name in self.names]
        inside = [p.name for p in points if p.axes != ("batch", "pos", "d_model")]
        found = {p.name: length * width for p in points}
        # The caller's hooks aren't called to find out sizes.
        if inside and not self.model.has_hooks():
            short = self.tokens[:1, :2]
            mask = None if self.mask is None else torch.ones_like(short)
            acts = collect(self.model, short, inside, attention_mask=mask).tensors
            for name, x in acts.items():
                point = self.model.point(name)
                # A pattern has an axis for the query's positions and one for the key's; some points have none.
                times = max(has_positions(point), ("pos" in point.axes) + ("key_pos" in point.axes))
                found[name] = math.ceil(x.numel() * (length / short.shape[1]) ** times)
        return sum(found.values()) * self.model.cfg.dtype.itemsize

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        if self.whole:
            return self.whole[name][rows]
        if self.rows is None or not torch.equal(self.rows, rows):
            self.forget()
            self.held = self._collect(rows, len(rows))
            self.rows = rows
        return self.held[name]

    def _collect(self, rows: Tensor, batch_size: int) -> dict[str, Tensor]:
        mask = None if self.mask is None else self.mask[rows]
        return collect(self.model, self.tokens[rows], self.names, batch_size=batch_size, attention_mask=mask).tensors

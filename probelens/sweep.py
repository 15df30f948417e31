"""The one engine that runs interventions: many conditions on one set of inputs.

Patching, ablation and profiles only describe what to run. The engine runs the unedited model
once, keeps the residual where an edit begins, starts every condition there, and computes logits
only where they are read. On causal models it also leaves out the positions before the first changed
one, and runs conditions that begin near each other in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from probelens._quick import quick
from probelens._suffix import SuffixRuns
from probelens.collect import told
from probelens.errors import InputError, ShapeError
from probelens.hooks import HookFn, at
from probelens.model import HookedModel
from probelens.progress import progress_bar

__all__ = ["Condition", "Edit", "Read", "SweepResult", "sweep"]


@dataclass(frozen=True)
class Edit:
    """One edit at one hook point.

    Args:
        name: Hook point.
        fn: ``fn(tensor, hook, **rows)`` with the batch's rows of ``data``; returns a tensor or None.
        data: Tensors with one row an example, cut to the batch that runs. (example, ...)
        pos: Limit to these positions, through ``probelens.at``; None for the whole tensor.
    """

    name: str
    fn: Callable[..., Tensor | None]
    data: Mapping[str, Tensor] = field(default_factory=dict)
    pos: tuple[int, ...] | None = None

    def hook(self, rows: Tensor) -> HookFn:
        """The hook function for the examples ``rows``.

        Args:
            rows: Which examples are in the batch. (batch,)

        Returns:
            A hook function for this batch.
        """
        cut = {key: value[rows.to(value.device)] for key, value in self.data.items()}

        def call(tensor: Tensor, hook: Any) -> Tensor | None:
            return self.fn(tensor, hook, **cut)

        return call if self.pos is None else at(self.pos, call)


@dataclass(frozen=True)
class Condition:
    """Edits that are in place together during one run, and a key that names the run.

    Args:
        key: Names the run; any tuple that can be told from the others.
        edits: Edits of that run.
    """

    key: tuple[Any, ...]
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Read:
    """What is kept of each run.

    Args:
        fn: ``fn(logits, **rows)`` to a value for each example. Logits (batch, read, d_vocab).
        pos: Positions read of each example; None for all. (example, read)
        data: Tensors with one row an example, given to ``fn``. (example, ...)
    """

    fn: Callable[..., Tensor]
    pos: Tensor | None = None
    data: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepResult:
    """Values of every condition and of the unedited run.

    Args:
        values: (condition, example, ...)
        base: (example, ...)
        path: "resume" if runs began at their first changed block and position, many in a pass; "skip" if
            they began at their first edited block; "full" if not.
    """

    values: Tensor
    base: Tensor
    path: str


def sweep(
    model: HookedModel,
    tokens: Tensor,
    conditions: Sequence[Condition],
    read: Read,
    *,
    batch_size: int = 64,
    attention_mask: Tensor | None = None,
    progress: bool = False,
    describe: str = "conditions",
) -> SweepResult:
    """Run every condition on every example.

    Args:
        model: The wrapped model; run in eval mode, without gradients.
        tokens: Inputs. (example, pos)
        conditions: What to run.
        read: What to keep.
        batch_size: Examples in one forward pass.
        attention_mask: 1 for real tokens. (example, pos)
        progress: Show a progress bar.
        describe: What the bar counts.

    Returns:
        Values on the CPU, in the order of ``conditions``.

    Raises:
        InputError: No examples, or a batch size below 1.
        HookNotFiredError: An edit that the run didn't reach.
    """
    if batch_size < 1 or len(tokens) == 0:
        raise InputError(
            f"sweep needs examples and a batch size of at least 1, got {len(tokens)} and {batch_size}"
        )
    engine = _Engine(model, tokens, read, told(model, attention_mask))
    starts = [engine.start(condition) for condition in conditions]
    suffix = engine.suffix(conditions, batch_size)
    values: list[list[Tensor]] = [[] for _ in conditions]
    base: list[Tensor] = []
    chunks = torch.arange(len(tokens)).split(batch_size)
    with (
        torch.no_grad(),
        model.evaluating(),
        quick(model, {edit.name for condition in conditions for edit in condition.edits}),
        progress_bar(len(chunks) * (len(conditions) + 1), describe, progress) as bar,
    ):
        for rows in chunks:
            found = suffix.run(rows, bar.update) if suffix is not None else None
            resids: dict[int, Tensor] = {}
            if found is None:
                suffix = None
                resids, value = engine.base(rows, {s for s in starts if s is not None})
                found = value, {}
            value, done = found
            base.append(value)
            bar.update(1)
            for i, (condition, start, kept) in enumerate(zip(conditions, starts, values, strict=True)):
                if i in done:
                    kept.append(done[i])
                    continue
                kept.append(
                    engine.edited(rows, condition, start if start in resids or not start else None, resids)
                )
                bar.update(1)
    stacked = (
        torch.stack([torch.cat(kept) for kept in values])
        if conditions
        else torch.empty(0, *torch.cat(base).shape)
    )
    short = "skip" if any(start is not None for start in starts) else "full"
    path = short if suffix is None else "resume"
    return SweepResult(stacked, torch.cat(base), path)


class _Engine:
    """Runs one batch under one condition, by the shortest way that gives the same numbers."""

    def __init__(self, model: HookedModel, tokens: Tensor, read: Read, mask: Tensor | None) -> None:
        self.model = model
        self.tokens = tokens
        self.read = read
        self.mask = mask
        self.n = model.cfg.n_layers
        if read.pos is not None and (read.pos.ndim != 2 or len(read.pos) != len(tokens)):
            raise ShapeError(
                f"read positions must be (example, read) with {len(tokens)} examples, got {tuple(read.pos.shape)}"
            )
        # Hooks that the caller left on the model may stand anywhere, so every run is then a full one.
        # Where something goes around the blocks, starting at one would be wrong.
        self.short = model.can_skip() and not model.has_hooks() and model.chained(self.n)

    def start(self, condition: Condition) -> int | None:
        """The first block that the condition touches; None to run everything."""
        layers = []
        for edit in condition.edits:
            name = self.model.point(edit.name).name
            if not name.startswith("blocks."):
                return None
            layers.append(int(name.split(".")[1]))
        return min(layers) if self.short and layers and self.model.chained(min(layers)) else None

    def suffix(self, conditions: Sequence[Condition], batch_size: int) -> SuffixRuns | None:
        """Runs from the first changed position on, where they are possible and sure to be right."""
        if not self.short or self.mask is not None:
            return None
        return SuffixRuns.of(self.model, self.tokens, self.read, conditions, batch_size)

    def base(self, rows: Tensor, starts: set[int]) -> tuple[dict[int, Tensor], Tensor]:
        tokens, mask = self._inputs(rows)
        if not starts:
            return {}, self._value(self.model(tokens, attention_mask=mask), rows)
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in starts if layer > 0}
        if not names:
            logits = self.model(tokens, attention_mask=mask)
            return {}, self._value(logits, rows)
        logits, cache = self.model.run_with_cache(tokens, list(names.values()), attention_mask=mask)
        return {layer: cache[name] for layer, name in names.items()}, self._value(logits, rows)

    def edited(
        self, rows: Tensor, condition: Condition, start: int | None, resids: dict[int, Tensor]
    ) -> Tensor:
        hooks = [(edit.name, edit.hook(rows)) for edit in condition.edits]
        tokens, mask = self._inputs(rows)
        begin: dict[str, Any] = {"attention_mask": mask}
        inputs = tokens
        if start:
            inputs, begin["start_at_layer"] = resids[start], start
        if start is None or self.read.pos is None:
            return self._value(self.model.run_with_hooks(inputs, hooks, **begin), rows)
        resid = self.model.run_with_hooks(inputs, hooks, stop_at_layer=self.n, **begin)
        # Only the read positions need the final norm and the unembedding.
        where = self.read.pos[rows].to(resid.device)
        picked = resid.gather(1, where[..., None].expand(-1, -1, resid.shape[-1]))
        return self._value(self.model(picked, start_at_layer=self.n), rows, picked=True)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.tokens[rows], None if self.mask is None else self.mask[rows]

    def _value(self, logits: Tensor, rows: Tensor, picked: bool = False) -> Tensor:
        if self.read.pos is not None and not picked:
            where = self.read.pos[rows].to(logits.device)
            logits = logits.gather(1, where[..., None].expand(-1, -1, logits.shape[-1]))
        data = {key: value[rows].to(logits.device) for key, value in self.read.data.items()}
        return self.read.fn(logits, **data).detach().cpu()

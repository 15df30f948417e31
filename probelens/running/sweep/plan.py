"""Sweeps: many conditions run on one set of inputs, planned before they run.

Patching, ablation and profiles only describe what to run. A sweep runs the unedited model
once, keeps the residual where an edit begins, starts every condition there, and computes logits
only where they are read. On causal models it also leaves out the positions before the first changed
one, and runs conditions that begin near each other in one pass. A plan says beforehand which of this
is possible, what it costs and what it holds in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.hooks.trials import require_repeatable
from probelens.numerics.tensors import whole_number
from probelens.results.sentences import count
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.memory import mib
from probelens.running.sweep.resume import Resume
from probelens.running.sweep.resumer import why_distrusted
from probelens.running.sweep.rounding import Rounding, is_half
from probelens.running.sweep.spreading import run_spread, seconds, weights
from probelens.running.sweep.strategy import Full, Skip, Strategy, TrialFailed, Unfit
from probelens.running.sweep.work import Work, state_of
from probelens.running.workers import workers_here
from probelens.tasks.examples import Examples

__all__ = ["SweepPlan", "SweepResult", "choose", "plan", "sweep"]


@dataclass(frozen=True)
class SweepResult:
    """Values of every condition and of the unedited run.

    Args:
        values: (condition, example, ...)
        base: (example, ...)
        path: "resume" if runs began at their first changed block and position, many in a pass; "skip" if
            they began at their first edited block; "full" if not.
        why: Why no shorter path was taken; "" for "resume".
        rounding: In half precision and on the path "resume", how far such runs were from whole ones in the trial, and
            whole runs in batches of other shapes; None elsewhere, and where workers ran.
    """

    values: Tensor
    base: Tensor
    path: str
    why: str = ""
    rounding: Rounding | None = None


_PATHS = {
    "resume": "each run begins at its first changed block and position, many in a pass",
    "skip": "each run begins at its first edited block",
    "full": "each run is a whole forward",
}


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """What a sweep will run, by which path and why, what that costs and what it holds; ``run`` runs it.

    Costs are counts of what runs for the sweep: a block-position is one block run on one position of one example.
    On the path "resume" they are upper bounds: where an edit first changes something is known only once it runs,
    and runs that change something later, or nothing, cost less. For edits inside a block the plan assumes the first
    position. Trials on a few random tokens, made once for each model, are not counted.

    A model's first run on the path "resume" begins with a trial on the inputs themselves. Where it gives other
    numbers, the run falls back to a longer path, and then costs ``trial`` and what ``otherwise`` costs, which is more
    than these counts. ``print`` says how much. The result's ``path`` and ``why`` say what ran.

    Args:
        conditions: How many.
        examples: How many.
        positions: Of a sequence.
        batch_size: Examples of a batch; fewer than asked for where the memory budget demands it.
        batches: How many.
        path: "resume", "skip" or "full", as in ``SweepResult``; with a ``trial``, "resume" only if that agrees.
        why: Why no shorter path is possible; "" for "resume".
        block_positions: Of all runs.
        unembedded: Positions that go through the final norm and the unembedding.
        naive_block_positions: The same with one whole forward for each condition and one unedited.
        naive_unembedded: The same.
        exact: Whether the counts are what will run; otherwise they are the most.
        held: Bytes held at most, beside the weights, the inputs, the values and what a forward of one batch
            needs while it runs: "states" and "residuals" kept of the unedited run, "edited" residuals, copies for
            "passes" that conditions share, "logits", "source" (activations that are put in).
        memory: The budget in bytes; None for none.
        trial: Block-positions that are run before a first trial on the inputs can turn "resume" down, counted in
            ``block_positions`` too; 0 where no trial is left to make.
        otherwise: What is run after such a trial; None where there is none, or the budget is too small for it.
    """

    conditions: int
    examples: int
    positions: int
    batch_size: int
    batches: int
    path: str
    why: str
    block_positions: int
    unembedded: int
    naive_block_positions: int
    naive_unembedded: int
    exact: bool
    held: Mapping[str, int]
    memory: int | None
    trial: int
    otherwise: SweepPlan | None
    _strategy: Strategy

    @property
    def ratio(self) -> float:
        """How many times fewer block-positions than with a whole forward for each condition.

        At least so many, unless ``exact``, and provided that a first ``trial`` agrees.
        """
        return self.naive_block_positions / max(1, self.block_positions)

    @property
    def bytes(self) -> int:
        """The sum of ``held``: never above ``memory``."""
        return sum(self.held.values())

    def __str__(self) -> str:
        most, least = ("", "") if self.exact else (" at most", " at least")
        parts = ", ".join(f"{name} {mib(size)}" for name, size in self.held.items())
        return "\n".join(
            [
                f"{self.conditions} conditions on {self.examples} examples of {self.positions} positions, in "
                f"{self.batches} {'batch' if self.batches == 1 else 'batches'} of up to {self.batch_size}",
                f"path: {self.path}{' if a first trial on the inputs agrees' if self.trial else ''}, {_PATHS[self.path]}"
                + (f" (no shorter one: {self.why})" if self.why else ""),
                f"block-positions: {self.block_positions:,}{most}, whole forwards {self.naive_block_positions:,}: "
                f"{self.ratio:.2f}x fewer{least}",
                f"unembedded positions: {self.unembedded:,}{most}, whole forwards {self.naive_unembedded:,}: "
                f"{self.naive_unembedded / max(1, self.unembedded):.2f}x fewer{least}",
                f"held: {mib(self.bytes)} at most ({parts}), "
                + ("no budget" if self.memory is None else f"budget {mib(self.memory)}"),
                *self._rounded(),
                *self._turned_down(),
            ]
        )  # fmt: skip

    __repr__ = __str__

    def cost(self, workers: int = 1) -> str:
        """What the runs take, estimated: time, from that of one forward of up to 4 examples, and memory.

        Args:
            workers: Processes that share the work, as ``pl.Workers`` counts them.

        Returns:
            A sentence. The time counts block-positions alone, so a large vocabulary adds to it, and shared cores too.
        """
        whole_number("workers", workers)
        each = weights(self._strategy.work.model) + self.bytes
        took = seconds(self._strategy) / workers
        shown = f"{took:.1f} s" if took < 120 else f"{took / 60:.0f} min" if took < 7200 else f"{took / 3600:.1f} h"
        return f"about {shown} on {count(workers, 'worker')}, {mib(each)} in each, weights included"

    @property
    def rounding(self) -> Rounding | None:
        """In half precision, what a trial found: as in ``SweepResult``; None before it."""
        return self._strategy.rounding

    def _rounded(self) -> list[str]:
        dtype = self._strategy.work.model.cfg.dtype
        if self.path != "resume" or not is_half(dtype):
            return []
        name = str(dtype).removeprefix("torch.")
        rule = f"{name}: runs from mid-sequence may differ from whole ones by what whole runs in other batches do"
        return [str(self.rounding) if self.rounding is not None else f"{rule}, which the trial measures"]

    def _turned_down(self) -> list[str]:
        if not self.trial:
            return []
        other = self.otherwise
        if other is None:
            return ["if the trial turns that down: an error, since the budget is too small for any other path"]
        blocks = self.trial + other.block_positions
        return [
            f"if the trial turns that down: path {other.path}, {blocks:,} block-positions "
            f"({max(0, blocks - self.block_positions):,} more), {other.unembedded:,} unembedded "
            f"({max(0, other.unembedded - self.unembedded):,} more), held {mib(max(self.bytes, other.bytes))} at most"
        ]

    def run(self, progress: bool = False, describe: str = "conditions") -> SweepResult:
        """Run what was planned.

        Where the model's hooks, dtype or device changed since, or a trial on the inputs shows that resuming
        gives other numbers, a new plan is made and run; the result's ``path`` and ``why`` are those of what ran.

        Args:
            progress: Show a progress bar.
            describe: What the bar counts.

        Returns:
            Values on the CPU, in the order of the conditions. (condition, example, ...)

        Raises:
            HookNotFiredError: An edit that the run didn't reach.
        """
        now, work = self, self._strategy.work
        if state_of(work.model) != work.state:
            now = plan(
                work.model, work.examples, work.conditions, work.read, batch_size=work.batch_size, attention_mask=work.mask,
                memory=work.memory, source_bytes=work.source, always=work.always,
            )  # fmt: skip
        try:
            if workers_here(now._strategy.work.model):
                return SweepResult(*run_spread(now._strategy, now.why, choose, progress, describe))
            found = now._strategy.run_all(progress, describe)
            return SweepResult(*found, now.path, now.why, now._strategy.rounding)
        except TrialFailed:
            # Not planned anew: a model that changes whenever it runs would have its failed trial forgotten.
            strategy, why = choose(now._strategy.work, resume=False)
            return SweepResult(*strategy.run_all(progress, describe), strategy.path, why)


def plan(
    model: HookedModel,
    inputs: Any,
    conditions: Sequence[Condition],
    read: Read,
    *,
    batch_size: int = 64,
    attention_mask: Tensor | None = None,
    memory: int | None = None,
    source_bytes: int | Callable[[], int] = 0,
    always: Sequence[Intervention] = (),
) -> SweepPlan:
    """Say what a sweep will run, and what it costs, before it runs.

    Args:
        model: The wrapped model; run in eval mode, without gradients.
        inputs: Tokens (example, pos), features (example, ...), or a mapping of the forward's arguments.
        conditions: What to run.
        read: What to keep.
        batch_size: Examples in one forward pass, at most.
        attention_mask: 1 for real tokens. (example, pos)
        memory: Bytes that may be held at once, as ``SweepPlan.held`` counts them. The work is cut to fit:
            fewer examples a batch, fewer conditions a pass, a longer path where what the shorter one keeps is
            too much. Values stay the same up to rounding. None cuts as ever: 1 GiB of states, 256 MiB of edited residuals,
            64 MiB of logits, 1 GiB of copies for passes.
        source_bytes: Bytes of an example that the edits' own functions hold for a batch; or a function that gives
            them, which is asked again where the plan is made anew.
        always: What is in place in every run, also in the one that is called unedited.

    Returns:
        The plan; its ``run`` gives what ``sweep`` gives.

    Raises:
        InputError: No examples, a batch size below 1, or a budget too small for one example under one condition.
        UnknownHookError: An edit at a point that the model doesn't have.
    """
    whole_number("batch_size", batch_size)
    examples = Examples.of(inputs)
    if len(examples) == 0:
        raise InputError(f"sweep needs examples, got inputs of shape {tuple(examples.main.shape)}")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int)):
        raise InputError(f"memory={memory!r}: give a whole number of bytes, such as 2**30, or None")
    if memory is not None and memory < 1:
        raise InputError(
            f"memory={memory}: a budget is a positive number of bytes, such as 2**30; None is for no budget"
        )
    require_repeatable(model, examples.inputs)
    examples, attention_mask = _as_tokens(model, examples, attention_mask)
    mask = mask_for_model(model, attention_mask, examples.inputs)
    work = Work(model, examples, conditions, read, mask, batch_size, memory, source_bytes, tuple(always))
    strategy, why = choose(work)
    trial, otherwise = strategy.trial(), None
    if trial:
        # A budget too small for it is an error only once it is needed.
        with contextlib.suppress(InputError):
            otherwise = _described(*choose(work, resume=False), 0, None)
    return _described(strategy, why, trial, otherwise)


def _as_tokens(model: HookedModel, examples: Examples, attention_mask: Tensor | None) -> tuple[Examples, Tensor | None]:
    """Tokens and their mask in place of a mapping of nothing else, as tokenizers give it: a run can begin in their midst."""
    tokens, mask, given = examples.batched.get("input_ids"), examples.attention_mask, {*examples.batched}
    if tokens is None or given != {*examples.inputs} or given - {"input_ids", "attention_mask"}:
        return examples, attention_mask
    if (
        tokens.ndim != 2
        or tokens.is_floating_point()
        or ("attention_mask" in given and (mask is None or mask.shape != tokens.shape))
    ):
        return examples, attention_mask
    try:
        call = model.adapter.call(tokens[:1], None if mask is None else mask[:1].long(), {})
    except InputError:
        return examples, attention_mask
    # An adapter may make more of tokens, such as the inputs of a decoder.
    if call.args or {*call.kwargs} - {"use_cache"} != given:
        return examples, attention_mask
    return Examples(tokens), mask


def choose(work: Work, resume: bool = True) -> tuple[Strategy, str]:
    """The shortest way to run some work that gives the same numbers.

    Args:
        work: What to run.
        resume: Whether runs may begin in mid-sequence.

    Returns:
        The strategy, and why no shorter one is possible; "" if there is none.

    Raises:
        InputError: A budget too small for one example under one condition.
    """
    if not work.conditions:
        return Full(work), "no conditions"  # nothing starts in the midst, so no start is tried
    why = "" if resume else why_distrusted(work.model)
    for kind in (Resume, Skip) if resume else (Skip,):
        try:
            return kind(work), why
        except Unfit as reason:
            why = str(reason)
    return Full(work), why


def _described(strategy: Strategy, why: str, trial: int, otherwise: SweepPlan | None) -> SweepPlan:
    work = strategy.work
    blocks, reads = strategy.counts()
    whole = (len(work.conditions) + 1) * len(work.examples) * work.length
    return SweepPlan(
        len(work.conditions), len(work.examples), work.length, strategy.batch, len(strategy.batches()), strategy.path, why,
        blocks, reads, whole * work.n_layers, whole, strategy.exact, strategy.held(), work.memory, trial, otherwise,
        strategy,
    )  # fmt: skip


def sweep(
    model: HookedModel,
    inputs: Any,
    conditions: Sequence[Condition],
    read: Read,
    *,
    batch_size: int = 64,
    attention_mask: Tensor | None = None,
    memory: int | None = None,
    progress: bool = False,
    describe: str = "conditions",
) -> SweepResult:
    """Run every condition on every example: ``plan`` and its ``run``.

    Args:
        Those of ``plan``, without ``source_bytes`` and ``always``.
        progress: Show a progress bar.
        describe: What the bar counts.

    Returns:
        Values on the CPU, in the order of ``conditions``.

    Raises:
        InputError: No examples, a batch size below 1, or a memory budget that one example exceeds.
        HookNotFiredError: An edit that the run didn't reach.
    """
    planned = plan(model, inputs, conditions, read, batch_size=batch_size, attention_mask=attention_mask, memory=memory)
    return planned.run(progress, describe)

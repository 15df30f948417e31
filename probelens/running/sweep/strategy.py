"""Ways to run a sweep: the face that all have, whole forwards, and runs that begin at a block."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.points import HookFn
from probelens.results.progress import progress_bar
from probelens.running.faster_forwards import faster_forwards
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.lengths import shortened
from probelens.running.sweep.memory import in_bytes, largest, mib
from probelens.running.sweep.rounding import Rounding
from probelens.running.sweep.work import Work


class Unfit(Exception):
    """A strategy can't run some work; the message is the reason."""


class TrialFailed(Exception):
    """A strategy gave other numbers than the model's own forward, on the inputs of the sweep."""


class Strategy(ABC):
    """One way to run every condition on every example; raises ``Unfit`` when it is made if it can't run the work."""

    path: ClassVar[str]
    # Whether ``count`` is what will run, and not the most.
    exact: ClassVar[bool] = True
    # Examples of a batch.
    batch: int

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Bytes held at most for a batch, by what they are for."""

    @abstractmethod
    def count(self, rows: Tensor, first: bool) -> tuple[int, int]:
        """Block-positions of a batch, and positions through the unembedding; ``first`` says whether it is the first batch."""

    @abstractmethod
    def run(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, list[Tensor]]:
        """Run a batch; ``done`` is called with the number of runs that were finished.

        Returns what is kept of the unedited run, and of each condition's (batch, ...); TrialFailed if the numbers are others.
        """

    @property
    def rounding(self) -> Rounding | None:
        """In half precision, how far runs of this way were seen to be from whole ones; None where they are whole."""
        return None

    def trial(self) -> int:
        """Block-positions until a first trial on the inputs has failed; 0 where none is left to make."""
        return 0

    def batches(self) -> list[Tensor]:
        """Numbers of the examples, batch by batch."""
        return list(torch.arange(len(self.work.examples)).split(self.batch))

    def counts(self) -> tuple[int, int]:
        """Block-positions of all batches, and positions through the unembedding."""
        found = [self.count(rows, i == 0) for i, rows in enumerate(self.batches())]
        return sum(blocks for blocks, _ in found), sum(reads for _, reads in found)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is in place while batches are run."""
        model = self.work.model
        names = {one.name for condition in self.work.conditions for one in condition.interventions}
        with torch.no_grad(), model.undisturbed(), faster_forwards(model, names):
            yield

    def run_all(self, progress: bool, describe: str) -> tuple[Tensor, Tensor]:
        """Run all batches.

        Returns values (condition, example, ...), and those of the unedited run; TrialFailed if this way gives other numbers.
        """
        work, batches = self.work, self.batches()
        found: list[tuple[Tensor, list[Tensor]]] = []
        with self.running(), progress_bar(len(batches) * (len(work.conditions) + 1), describe, progress) as bar:
            for rows in batches:
                found.append(self.run(rows, bar.update))
        base = torch.cat([part for part, _ in found])
        if not work.conditions:
            return torch.empty(0, *base.shape), base
        each = zip(*(values for _, values in found), strict=True)
        return torch.stack([torch.cat(parts) for parts in each]), base

    def edited(self, rows: Tensor, condition: Condition, start: int | None, resid: Tensor | None = None) -> Tensor:
        """Run one condition without what is kept of earlier positions; what is kept of it. (batch, ...)

        ``start`` is a block up to which nothing is edited, None where edits lie outside the blocks, too; ``resid`` what enters
        that block (batch, pos, d_model), None to run from the tokens.
        """
        return self.traced(rows, condition, start, resid).detach().cpu()

    def traced(self, rows: Tensor, condition: Condition, start: int | None, resid: Tensor | None = None) -> Tensor:
        """``edited``, on the model's device and with its gradient, for callers who turn gradients on. (batch, ...)"""
        model, n = self.work.model, self.work.n_layers
        # What is always in place lies before the blocks, so a run from a block has it in its residual.
        hooks = self.hooks(() if resid is not None else self.work.always, rows) + self.hooks(
            condition.interventions, rows
        )
        inputs, begin = self.inputs(rows)
        if resid is not None:
            inputs, begin["start_at_layer"] = resid, start
        if start is None or self.work.read.pos is None:
            return self._value(model.run_with_hooks(inputs, hooks, **begin), rows)
        after: Tensor = model.run_with_hooks(inputs, hooks, stop_at_layer=n, **begin)
        # Only the read positions need the final norm and the unembedding.
        picked = pick(after, self.work.read.pos[rows])
        return self.work.read.value(model(picked, start_at_layer=n), rows)

    def inputs(self, rows: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Tokens of some examples, and the arguments that go with them."""
        work = self.work
        return work.examples.rows(rows), {"attention_mask": None if work.mask is None else work.mask[rows]}

    def hooks(self, interventions: Sequence[Intervention], rows: Tensor) -> list[tuple[str, HookFn]]:
        """Interventions on some examples as hooks; they fit batches of packed sequences, which may be shorter than others."""
        made = [(one.name, one.edit_for(rows)) for one in interventions]
        return made if self.work.examples.plain else [(name, shortened(fn)) for name, fn in made]

    def value(self, logits: Tensor, rows: Tensor) -> Tensor:
        """What is kept of logits at all positions. (batch, ...)"""
        return self._value(logits, rows).detach().cpu()

    def _value(self, logits: Tensor, rows: Tensor) -> Tensor:
        read = self.work.read
        return read.value(logits if read.pos is None else pick(logits, read.pos[rows]), rows)


class Full(Strategy):
    """Each run is a whole forward; InputError for a memory budget that one example exceeds."""

    path = "full"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        # The first block that each condition edits; None to run everything.
        self.starts = self.first_blocks()
        self.batch = largest(work.batch_size, work.memory, lambda batch: sum(self._needs(batch).values()))
        if not self.batch:
            self.refuse(self._needs(1))

    def first_blocks(self) -> Sequence[int | None]:
        """The block at which each condition's run begins; None for the tokens."""
        return [None] * len(self.work.conditions)

    def refuse(self, needs: dict[str, int]) -> None:
        """Raise the error of a budget too small for what one example needs."""
        parts = ", ".join(f"{name} {mib(size)}" for name, size in needs.items() if size)
        raise InputError(
            f"memory={in_bytes(self.work.memory or 0)}: one example of {self.work.length} positions under one "
            f"condition needs {sum(needs.values())} ({parts}). Give at least that, or shorter sequences, or "
            "memory=None for no budget."
        )

    def held(self) -> dict[str, int]:
        return {name: size for name, size in self._needs(self.batch).items() if size}

    def _needs(self, batch: int) -> dict[str, int]:
        sizes, kept = self.work.sizes, len({start for start in self.starts if start})
        short = any(start is not None for start in self.starts)
        return {
            "residuals": batch * (kept + 2 * short) * sizes.resid,
            "logits": batch * (sizes.logits + (0 if self.work.read.pos is None else sizes.reads)),
            "source": batch * sizes.source,
        }

    def count(self, rows: Tensor, first: bool) -> tuple[int, int]:
        work = self.work
        # The unedited run is a whole one.
        starts = [None, *self.starts]
        blocks = sum(work.n_layers - (start or 0) for start in starts) * work.length
        reads = sum(work.length if start is None else work.n_read for start in starts)
        return blocks * len(rows), reads * len(rows)

    def run(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, list[Tensor]]:
        base, entering = self._unedited(rows)
        done(1)
        values = []
        for condition, start in zip(self.work.conditions, self.starts, strict=True):
            values.append(self.edited(rows, condition, start, entering.get(start)))
            done(1)
        return base, values

    def _unedited(self, rows: Tensor) -> tuple[Tensor, dict[int | None, Tensor]]:
        """What is kept of the unedited run, and the residuals that enter the blocks at which runs begin."""
        (tokens, arguments), model = self.inputs(rows), self.work.model
        names = {start: f"blocks.{start}.hook_resid_pre" for start in self.starts if start}
        always = self.hooks(self.work.always, rows)
        if not names:
            return self.value(model.run_with_hooks(tokens, always, **arguments), rows), {}
        with model.hooks(always):
            logits, cache = model.run_with_cache(tokens, list(names.values()), **arguments)
        return self.value(logits, rows), {start: cache[name] for start, name in names.items()}


class Skip(Full):
    """Each run begins at its first edited block, with the residual stream of the unedited run.

    Unfit if no run can begin at a block, or what is kept for it exceeds the memory budget.
    """

    path = "skip"

    def first_blocks(self) -> Sequence[int | None]:
        model, conditions = self.work.model, self.work.conditions
        if why := why_not_skip(self.work):
            raise Unfit(why)
        starts = first_blocks(model, conditions, self.work.examples.main)
        if all(start is None for start in starts):
            raise Unfit("no condition edits the blocks alone")
        return starts

    def refuse(self, needs: dict[str, int]) -> None:
        raise Unfit(f"does not fit the memory budget of {mib(self.work.memory or 0)}: needs {mib(sum(needs.values()))}")


def why_not_skip(work: Work) -> str:
    """Why no run of some work can begin at a block; "" if one can."""
    model = work.model
    if not isinstance(work.examples.inputs, Tensor):
        return "inputs that are several arguments"
    if not work.read.by_position:
        return "one answer for each example, of which other things than the residual may be part"
    # Hooks that the caller left on the model may be anywhere, so every run is then a full one.
    if model.has_hooks():
        return "hooks on the model"
    if not model.can_skip():
        return "the adapter can't begin a run of this model at a block"
    # Where something goes around the blocks, starting at one would be wrong.
    if not model.can_start_at(model.cfg.n_layers, work.examples.main):
        return "something goes around the blocks of this model"
    return ""


def first_blocks(model: HookedModel, conditions: Sequence[Condition], tokens: Tensor) -> list[int | None]:
    """The first block that each condition edits; None where a run of it can't begin there."""
    # Asked once for each block, not for each condition: an answer holds while the model is as it is.
    starts = functools.cache(lambda layer: model.can_start_at(layer, tokens))
    out: list[int | None] = []
    for condition in conditions:
        layers = [model.point(one.name).block for one in condition.interventions]
        found = [layer for layer in layers if layer is not None]
        whole = not found or len(found) < len(layers) or not starts(min(found))
        out.append(None if whole else min(found))
    return out


def pick(tensor: Tensor, pos: Tensor) -> Tensor:
    """A tensor at some positions of each example: (batch, pos, d) at (batch, read) -> (batch, read, d)."""
    length = tensor.shape[1]
    if pos.numel() and (int(pos.min()) < 0 or int(pos.max()) >= length):
        # Counted from the end where the inputs don't tell how many positions the outputs have.
        turned = torch.where(pos < 0, pos + length, pos)
        bad = pos[(turned < 0) | (turned >= length)]
        if len(bad):
            raise InputError(
                f"position {int(bad[0])} is read, but the outputs have {length} positions: allowed are {-length} to {length - 1}"
            )
        pos = turned
    return tensor.gather(1, pos.to(tensor.device)[..., None].expand(-1, -1, tensor.shape[-1]))

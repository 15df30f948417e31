"""Plans a sweep's batches and path, and runs them: the plain way here, in mid-sequence by ``SuffixRuns``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.trials import fingerprint
from probelens.results.progress import progress_bar
from probelens.running.faster_forwards import faster_forwards
from probelens.running.sweep.limits import Limits, Sizes, in_bytes, largest, limits_of, mib
from probelens.running.sweep.resume import distrusted
from probelens.running.sweep.suffix import SuffixRuns

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.conditions import Condition, Read

__all__ = ["Engine"]


class Engine:
    """Runs every condition on every example, by the shortest way that gives the same numbers.

    Args:
        model: The wrapped model.
        tokens: (example, pos)
        conditions: What to run.
        read: What to keep.
        mask: 1 for real tokens. (example, pos)
        batch_size: Examples of a batch, at most.
        memory: Bytes that may be held; None for the usual limits.
        source: Bytes that the conditions hold for an example of the batch, or a function that gives them.
        resume: Whether runs may begin in mid-sequence.
    """

    def __init__(
        self, model: HookedModel, tokens: Tensor, conditions: Sequence[Condition], read: Read, mask: Tensor | None,
        batch_size: int, memory: int | None, source: int | Callable[[], int], resume: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokens = tokens
        self.conditions = conditions
        self.read = read
        self.mask = mask
        self.n = model.cfg.n_layers
        if read.pos is not None and (read.pos.ndim != 2 or len(read.pos) != len(tokens)):
            raise ShapeError(
                f"read positions must be (example, read) with {len(tokens)} examples, got {tuple(read.pos.shape)}"
            )
        self.seen = self.state()
        # Asked again by a plan made anew: the model's dtype may be another by then.
        self.source = source
        self.sizes = Sizes.of(model, tokens, read, source() if callable(source) else source)
        self.batch_size, self.memory = min(batch_size, len(tokens)), memory
        no_skip = self._no_skip()
        self.starts = [None if no_skip else self._start(condition) for condition in conditions]
        self.suffix: SuffixRuns | None = None
        self.path, self.why = "resume", ""
        why = no_skip or (self._resume() if resume else "a trial on this model gave other numbers")
        if why:
            self.path, self.why = "skip", why
            self.limits = self._plain(no_skip)
        chunks = torch.arange(len(tokens)).split(self.limits.batch)
        self.chunks = list(chunks)

    # -- which path ----------------------------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """What of the model a plan depends on and the caller may change."""
        model = self.model
        hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules())
        return (
            model.has_hooks(), hooked, model.cfg.dtype, model.cfg.device, distrusted(model), fingerprint(model.module),
        )  # fmt: skip

    def _no_skip(self) -> str:
        """Why no run can begin at a block; "" if one can."""
        # Hooks that the caller left on the model may stand anywhere, so every run is then a full one.
        if self.model.has_hooks():
            return "hooks on the model"
        if not self.model.can_skip():
            return "the adapter can't begin a run of this model at a block"
        # Where something goes around the blocks, starting at one would be wrong.
        if not self.model.can_start_at(self.n):
            return "something goes around the blocks of this model"
        return ""

    def _start(self, condition: Condition) -> int | None:
        """The first block that the condition touches; None to run everything."""
        blocks = [self.model.point(edit.name).block for edit in condition.interventions]
        first = min((block for block in blocks if block is not None), default=None)
        return first if first is not None and None not in blocks and self.model.can_start_at(first) else None

    def _resume(self) -> str:
        """Plan runs from the first changed position on; the reason where they aren't possible or sure to be right."""
        if self.mask is not None:
            return "attention mask given"
        runs = SuffixRuns.of(self.model, self.tokens, self.read, self.conditions)
        if isinstance(runs, str):
            return runs
        limits = limits_of(runs, self.sizes, self.batch_size, self.memory)
        if isinstance(limits, int):
            budget = runs.resumer.BUDGET if self.memory is None else self.memory
            return f"does not fit the memory budget of {mib(budget)}: needs {mib(limits)}"
        self.suffix, runs.limits, self.limits = runs, limits, limits
        return ""

    def _plain(self, no_skip: str) -> Limits:
        """The batches of runs that begin at a block, or else at the tokens."""
        if any(start is not None for start in self.starts):
            batch = largest(self.batch_size, self.memory, lambda b: sum(self._needs(b).values()))
            if batch:
                return Limits(batch)
            self.why = f"does not fit the memory budget of {mib(self.memory or 0)}: needs {mib(sum(self._needs(1).values()))}"
            self.starts = [None] * len(self.starts)
        elif self.conditions:
            self.why = no_skip or "no condition edits the blocks alone"
        self.path = "full"
        batch = largest(self.batch_size, self.memory, lambda b: sum(self._needs(b).values()))
        if not batch:
            raise InputError(
                f"memory={in_bytes(self.memory or 0)}: one example of {self.tokens.shape[1]} positions "
                f"under one condition needs {sum(self._needs(1).values())} "
                f"({', '.join(f'{name} {mib(size)}' for name, size in self._needs(1).items() if size)}). "
                "Give at least that, or shorter sequences, or memory=None for no budget."
            )
        return Limits(batch)

    def _needs(self, batch: int) -> dict[str, int]:
        """Bytes of the plain way."""
        sizes, kept = self.sizes, len({s for s in self.starts if s})
        short = any(start is not None for start in self.starts)
        return {
            "residuals": batch * (kept + 2 * short) * sizes.resid,
            "logits": batch * (sizes.logits + (0 if self.read.pos is None else sizes.reads)),
            "source": batch * sizes.source,
        }

    # -- what it costs -------------------------------------------------------------------------------

    def holds(self) -> dict[str, int]:
        """Bytes held at most, by what they are for."""
        held = self._needs(self.limits.batch) if self.suffix is None else self.suffix.holds(self.sizes)
        return {name: size for name, size in held.items() if size}

    def counts(self) -> tuple[int, int]:
        """Block-positions, and positions through the unembedding; at most."""
        length = self.tokens.shape[1]
        blocks = reads = 0
        picked = length if self.read.pos is None else self.read.pos.shape[1]
        resumed = set() if self.suffix is None else {job.index for job in self.suffix.jobs}
        for i, rows in enumerate(self.chunks):
            if self.suffix is None:
                blocks, reads = blocks + self.n * length * len(rows), reads + length * len(rows)
            else:
                more = self.suffix.blocks(rows, i == 0)
                blocks, reads = blocks + more[0], reads + more[1]
                resumed |= set(self.suffix.unedited)
            for index, start in enumerate(self.starts):
                if index not in resumed:
                    # Beside runs in mid-sequence no residual is kept for runs that begin at a later block.
                    start = None if self.suffix is not None and start else start
                    blocks += (self.n - (start or 0)) * length * len(rows)
                    reads += (length if start is None else picked) * len(rows)
        return blocks, reads

    def trial(self) -> int:
        """Block-positions until a first trial on the inputs has turned resuming down; 0 where none is left to make."""
        if self.suffix is None or not (tried := self.suffix.trial(len(self.chunks[0]))):
            return 0
        return tried + self.n * self.tokens.shape[1] * len(self.chunks[0])

    # -- running -------------------------------------------------------------------------------------

    def run(self, progress: bool, describe: str) -> tuple[Tensor, Tensor] | None:
        """Values (condition, example, ...) and those of the unedited run; None if resuming proves wrong."""
        values: list[list[Tensor]] = [[] for _ in self.conditions]
        base: list[Tensor] = []
        with (
            torch.no_grad(),
            self.model.evaluating(),
            faster_forwards(
                self.model, {edit.name for condition in self.conditions for edit in condition.interventions}
            ),
            progress_bar(len(self.chunks) * (len(self.conditions) + 1), describe, progress) as bar,
        ):
            for rows in self.chunks:
                resids: dict[int, Tensor] = {}
                done: dict[int, Tensor] = {}
                if self.suffix is None:
                    resids, value = self._base(rows, {s for s in self.starts if s is not None})
                else:
                    found = self.suffix.run(rows, bar.update)
                    if found is None:
                        return None
                    value, done = found
                base.append(value)
                bar.update(1)
                for i, (condition, start, kept) in enumerate(
                    zip(self.conditions, self.starts, values, strict=True)
                ):
                    if i in done:
                        kept.append(done[i])
                        continue
                    begin = start if start in resids or not start else None
                    kept.append(self._edited(rows, condition, begin, resids))
                    bar.update(1)
        stacked = (
            torch.stack([torch.cat(kept) for kept in values])
            if self.conditions
            else torch.empty(0, *torch.cat(base).shape)
        )
        return stacked, torch.cat(base)

    def _base(self, rows: Tensor, starts: set[int]) -> tuple[dict[int, Tensor], Tensor]:
        tokens, mask = self._inputs(rows)
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in starts if layer > 0}
        if not names:
            return {}, self._value(self.model(tokens, attention_mask=mask), rows)
        logits, cache = self.model.run_with_cache(tokens, list(names.values()), attention_mask=mask)
        return {layer: cache[name] for layer, name in names.items()}, self._value(logits, rows)

    def _edited(
        self, rows: Tensor, condition: Condition, start: int | None, resids: dict[int, Tensor]
    ) -> Tensor:
        hooks = [(one.name, one.edit_for(rows)) for one in condition.interventions]
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
        return self.read.value(logits, rows).detach().cpu()

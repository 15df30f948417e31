"""Conditions of a sweep from their first changed block and position on, many in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probelens.hooks.switchboard import Entry
from probelens.running.sweep.jobs import SHORTEST, Job, Load, jobs_of, loads
from probelens.running.sweep.limits import Limits, Sizes
from probelens.running.sweep.resume import Resumer, distrust, distrusted, first_change, passes, resumer_of

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.conditions import Condition, Read

__all__ = ["SuffixRuns"]


@dataclass(frozen=True)
class _Held:
    """What a job's edits made of the residual entering block ``stop``, from position ``begin`` on."""

    index: int
    stop: int
    begin: int
    resid: Tensor


class SuffixRuns:
    """Runs a sweep's conditions on batches of its examples.

    A condition's edits change the residual that enters the block after them. Where that is equal to the
    unedited run's, bit by bit, up to some position, the rest begins there. Conditions that begin at the same
    position, or near each other, share a pass, which each joins at the block where its edits end. Nothing is assumed about what an edit does.

    Args:
        resumer: How runs go on from the middle.
        tokens: (example, pos)
        read: What to keep.
        jobs: What to run.
        unedited: Conditions that edit nothing, by index.
        others: How many conditions run the plain way.
    """

    limits: Limits

    def __init__(
        self, resumer: Resumer, tokens: Tensor, read: Read, jobs: Sequence[Job], unedited: Sequence[int],
        others: int,
    ) -> None:  # fmt: skip
        self.resumer = resumer
        self.model = resumer.model
        self.n = self.model.cfg.n_layers
        self.tokens = tokens
        self.length = tokens.shape[1]
        self.read = read
        self.jobs = jobs
        self.unedited = unedited
        self.others = others
        self._begins: dict[tuple[int, int], tuple[int, ...]] = {}
        self._loads: dict[tuple[int, tuple[int, ...], int], list[Load]] = {}

    @classmethod
    def of(
        cls, model: HookedModel, tokens: Tensor, read: Read, conditions: Sequence[Condition]
    ) -> SuffixRuns | str:
        """The runs; where the plain way is the right one, the reason."""
        if not conditions:
            return "no conditions"
        if tokens.ndim != 2 or tokens.is_floating_point():
            return "inputs that aren't tokens (example, pos)"
        if tokens.shape[1] < SHORTEST:
            # A shorter sequence has hardly a prefix to spare.
            return f"sequences shorter than {SHORTEST} positions"
        if model.cfg.dtype not in (torch.float32, torch.float64):
            # Sums then depend on the shape of a pass.
            return f"half precision ({model.cfg.dtype})"
        if any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules()):
            return "hooks on the model's modules"
        resumer = resumer_of(model)
        if resumer is None and distrusted(model):
            return "a trial on this model gave other numbers"
        if resumer is None:
            return "the adapter can't resume this model in mid-sequence"
        jobs = jobs_of(model, conditions)
        # One condition or two don't pay for trying whether resuming is right.
        if len(jobs) <= 2:
            return f"{len(jobs)} conditions that could begin in mid-sequence, which takes 3"
        unedited = [i for i, c in enumerate(conditions) if not c.interventions]
        return cls(resumer, tokens, read, jobs, unedited, len(conditions) - len(jobs) - len(unedited))

    # -- what it takes -------------------------------------------------------------------------------

    def needs(self, sizes: Sizes, batch: int, spacing: int) -> dict[str, int]:
        """Bytes that a batch needs at least, one condition at a time."""
        resid = batch * sizes.resid
        return {
            "states": self.resumer.holds(batch, self.length, spacing),
            # The last residual is kept beside the named ones, and once more while the trial lasts.
            "residuals": (len(self._names()) + 2) * resid,
            "edited": 4 * resid,
            "passes": self.resumer.copied(batch, self.length) + 3 * resid,
            "logits": batch * (sizes.logits if self.others else sizes.reads),
            "source": batch * sizes.source,
        }

    def holds(self, sizes: Sizes) -> dict[str, int]:
        """Bytes that the first batch, the largest, holds at most."""
        limits, jobs = self.limits, len(self.jobs)
        held = self.needs(sizes, limits.batch, limits.spacing)
        planned = self.planned(torch.arange(limits.batch))
        held["edited"] = max(load.held for load in planned) + 3 * limits.batch * sizes.resid
        shared = min(
            limits.together, max(1, limits.tokens // limits.batch), max(len(p.jobs) for p in planned)
        )
        held["passes"] *= shared
        held["logits"] = max(held["logits"], min(limits.logits, (jobs + 1) * limits.batch * sizes.reads))
        return held

    def blocks(self, rows: Tensor, first: bool) -> tuple[int, int]:
        """Block-positions that a batch takes at most, and positions through the unembedding.

        Args:
            rows: The examples.
            first: Whether it is the first batch, on which resuming is tried if it wasn't before.
        """
        batch, length = len(rows), self.length
        total = self.n * batch * length
        total += self.trial(batch) if first else 0
        total += sum((job.stop - max(job.start, 0)) * length * batch for job in self.jobs if job.at is None)
        planned = self.planned(rows)
        runs = sum(len(group) for load in planned for group in load.groups)
        reads = length if self.read.pos is None else self.read.pos.shape[1]
        return total + sum(load.blocks for load in planned), (runs + 1) * reads * batch

    def trial(self, batch: int) -> int:
        """Block-positions of trying on so many examples whether resuming is right; 0 where it was seen to be."""
        if self.resumer.trusted >= self.length:
            return 0
        layer = min(job.stop for job in self.jobs)
        again = (self.n - layer) * (self.length - self._floor(self.length // 2))
        return (self.n * self.length + again) * batch

    def planned(self, rows: Tensor) -> list[Load]:
        """The jobs, as many at a time as may be held, with the passes that they take at most."""
        last = self.length - 1 if self.read.pos is None else int(self.read.pos[rows].max())
        # Batches are neighbouring examples; the run of a plan asks for what its counts asked for.
        batch = (int(rows[0]), len(rows))
        if batch not in self._begins:
            self._begins[batch] = tuple(self._floor(job.earliest(rows)) for job in self.jobs)
        begins = self._begins[batch]
        key = (len(rows), begins, last)
        if key not in self._loads:
            self._loads.clear()
            self._loads[key] = loads(
                self.jobs, begins, last, len(rows), self.length, self.n, self.limits, self._passes
            )
        return self._loads[key]

    def _floor(self, pos: int) -> int:
        return pos - pos % self.limits.spacing

    def _passes(self, begins: Sequence[int], rows: int) -> list[tuple[int, int]]:
        limits = self.limits
        return passes(begins, rows, self.length, self.resumer.overhead(), limits.tokens, limits.together)

    # -- running -------------------------------------------------------------------------------------

    def run(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Values of the unedited run and, by index, of the conditions; None if resuming proves wrong here.

        Args:
            rows: The examples.
            done: Told how many conditions were finished.
        """
        self.resumer.spacing = self.limits.spacing
        try:
            final, cache = self.resumer.base(self.tokens[rows], self._names())
        except Exception:
            # Whatever a model's forward has against a cache, the plain way needs none.
            if self.resumer.trusted:
                raise
            distrust(self.model)
            return None
        entering = {stop: self._entering(stop, final, cache) for stop in {job.stop for job in self.jobs}}
        if not self._trust(rows, entering, final):
            return None
        readout = _Readout(self.model, self.read, rows, self.limits.logits)
        where = None if self.read.pos is None else self.read.pos[rows].to(final.device)
        readout.put(-1, final if where is None else _pick(final, where))
        (base,) = readout.values().values()
        values: dict[int, Tensor] = dict.fromkeys(self.unedited, base)
        done(len(values))
        for load in self.planned(rows):
            held: list[_Held] = []
            for job in load.jobs:
                plain = entering[job.stop]
                edited = self._edited(job, rows, plain, cache)
                begin = self.resumer.floor(first_change(edited, plain))
                if begin == plain.shape[1] or (where is not None and int(where.max()) < begin):
                    values[job.index] = base
                    done(1)
                    continue
                held.append(_Held(job.index, job.stop, begin, edited[:, begin:].clone()))
            self._finish(held, load, entering, final, where, readout, done)
        return base, {**values, **readout.values()}

    def _names(self) -> list[str]:
        """Residuals to keep of the unedited run: where conditions begin, and where they end."""
        names = {job.at: None for job in self.jobs if job.at is not None}
        for job in self.jobs:
            if job.at is None and job.start > 0:
                names[f"blocks.{job.start}.hook_resid_pre"] = None
            if job.stop < self.n:
                names[f"blocks.{job.stop}.hook_resid_pre"] = None
        return list(names)

    def _entering(self, stop: int, final: Tensor, cache: Mapping[str, Tensor]) -> Tensor:
        return final if stop == self.n else cache[f"blocks.{stop}.hook_resid_pre"]

    def _trust(self, rows: Tensor, entering: Mapping[int, Tensor], final: Tensor) -> bool:
        """Whether both the kept run and a run from its middle give what the model's own forward gives.

        Tried on these very inputs, once for the longest sequence so far.
        """
        length, layer = final.shape[1], min(entering)
        if self.resumer.trusted >= length:
            return True
        pos = self.resumer.floor(length // 2)
        try:
            own = self.model(self.tokens[rows], stop_at_layer=self.n)
            right = _equal(final, own)
            if right and layer < self.n:
                again = self.resumer.tail(entering[layer][:, pos:].clone(), layer, pos, self.n)
                right = _equal(again, own[:, pos:])
        except Exception:
            right = False
        if right:
            self.resumer.trusted = length
        else:
            distrust(self.model)
        return right

    def _edited(self, job: Job, rows: Tensor, plain: Tensor, cache: Mapping[str, Tensor]) -> Tensor:
        """The residual entering block ``job.stop`` under the job's edits. (example, pos, d_model)"""
        if job.at is not None and (job.at.endswith("pre") or torch.equal(cache[job.at], plain)):
            tensor = plain.clone()
            point = self.model.point(job.at)
            for edit in job.interventions:
                tensor = Entry(point, edit.edit_for(rows)).forward(tensor, point)
            return tensor
        hooks = [(one.name, one.edit_for(rows)) for one in job.interventions]
        start = job.start if job.start > 0 else None
        inputs = self.tokens[rows] if start is None else cache[f"blocks.{start}.hook_resid_pre"]
        with self.resumer.running():
            out: Tensor = self.model.run_with_hooks(
                inputs, hooks, start_at_layer=start, stop_at_layer=job.stop
            )
        return out

    def _finish(
        self, held: list[_Held], load: Load, entering: Mapping[int, Tensor], final: Tensor,
        where: Tensor | None, readout: _Readout, done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Run what is held to the last block and hand it to the readout."""
        rows = len(final)
        for group in self._groups(held, load, rows):
            group.sort(key=lambda one: one.stop)
            begin = min(one.begin for one in group)
            after = self._together(group, begin, entering)
            for one, resid in zip(group, after.split(rows), strict=True):
                whole = torch.cat([final[:, :begin], resid], 1)
                readout.put(one.index, whole if where is None else _pick(whole, where))
            done(len(group))

    def _groups(self, held: list[_Held], load: Load, rows: int) -> list[list[_Held]]:
        """Which conditions share a pass: never a division that takes more than was planned."""
        held = sorted(held, key=lambda one: (-one.begin, one.stop, one.index))
        groups = [held[lo:hi] for lo, hi in self._passes([one.begin for one in held], rows)]
        took = sum(
            (self.n - one.stop) * (self.length - group[-1].begin) * rows for group in groups for one in group
        )
        by = {one.index: one for one in held}
        if took > load.blocks and by.keys() <= {i for group in load.groups for i in group}:
            planned = [[by[i] for i in group if i in by] for group in load.groups]
            groups = [group for group in planned if group]
        return groups

    def _together(self, group: list[_Held], begin: int, entering: Mapping[int, Tensor]) -> Tensor:
        """One pass over the blocks, which each condition joins where its edits end. (condition · example, ...)"""
        stops = sorted({one.stop for one in group})
        out: list[Tensor] = []
        for stop, until in zip(stops, [*stops[1:], self.n], strict=True):
            plain = entering[stop]
            out += [torch.cat([plain[:, begin : o.begin], o.resid], 1) for o in group if o.stop == stop]
            resid = torch.cat(out)
            out = [self.resumer.tail(resid, stop, begin, until) if stop < self.n else resid]
        return out[0]


class _Readout:
    """Final norm and unembedding of many conditions at once, and the value of each."""

    def __init__(self, model: HookedModel, read: Read, rows: Tensor, most: int) -> None:
        self.model, self.read, self.rows = model, read, rows
        # Tokens whose logits may be there at once.
        self._most = most // (Sizes.width(model) * model.cfg.dtype.itemsize)
        self._tokens = 0
        self._held: list[tuple[int, Tensor]] = []
        self._values: dict[int, Tensor] = {}

    def put(self, index: int, resid: Tensor) -> None:
        """Take the residual of a condition after the last block, at the positions read. (example, read, d_model)"""
        tokens = resid.shape[0] * resid.shape[1]
        if self._tokens + tokens > self._most:
            self._flush()
        self._held.append((index, resid))
        self._tokens += tokens

    def values(self) -> dict[int, Tensor]:
        """Values by index, of all that came since the last call."""
        self._flush()
        out, self._values = self._values, {}
        return out

    def _flush(self) -> None:
        if not self._held:
            return
        logits = self.model(torch.cat([r for _, r in self._held]), start_at_layer=self.model.cfg.n_layers)
        for (index, _), part in zip(self._held, logits.split(len(self._held[0][1])), strict=True):
            self._values[index] = self.read.value(part, self.rows).detach().cpu()
        self._held, self._tokens = [], 0


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _pick(resid: Tensor, where: Tensor) -> Tensor:
    return resid.gather(1, where[..., None].expand(-1, -1, resid.shape[-1]))

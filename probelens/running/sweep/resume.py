"""Runs that begin at their first changed block and position, many in a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.hooks.forwards import hooked_by_hand
from probelens.hooks.passes.entry import Entry
from probelens.hooks.trials import agree
from probelens.running.sweep.jobs import SHORTEST, Job, Load, jobs_of, loads, passes
from probelens.running.sweep.memory import EDITED, LOGITS, PASSES, WORK, Limits, largest, mib
from probelens.running.sweep.readout import Readout
from probelens.running.sweep.resumer import Resumer, distrust, distrusted, padding_of, resumer_of, tried, why_distrusted
from probelens.running.sweep.rounding import Rounding, between_batches, is_half, shapes, share
from probelens.running.sweep.strategy import Strategy, TrialFailed, Unfit, first_blocks, pick, why_not_skip
from probelens.running.sweep.work import Work


@dataclass(frozen=True)
class _Changed:
    """What a job's edits made of the residual entering block ``stop``, from position ``begin`` on."""

    index: int
    stop: int
    begin: int
    resid: Tensor


class Resume(Strategy):
    """Each run begins at its first changed block and position.

    A condition's edits change the residual that enters the block after them. Where that is equal to the
    unedited run's, bit by bit, up to some position, the rest begins there. Conditions that begin at the same
    position, or near each other, share a pass, which each joins at the block where its edits end. Nothing is
    assumed about what an edit does; where it says at which position it begins, differences before that which are no more
    than rounding don't count. In half precision values may differ from whole runs' by as much as those of other batches do. Unfit where the model or inputs don't allow it, or what is kept exceeds the budget.
    """

    path = "resume"
    exact = False

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.resumer, self.jobs = _resumable(work)
        self.n, self.length, self.half = work.n_layers, work.length, is_half(work.model.cfg.dtype)
        self.unedited = [i for i, c in enumerate(work.conditions) if not c.interventions]
        resumed = {job.index for job in self.jobs} | set(self.unedited)
        # Conditions that run without what is kept, and where: beside what is kept no residual is kept for them.
        self.others = {
            i: 0 if start == 0 else None
            for i, start in enumerate(first_blocks(work.model, work.conditions, work.examples.main))
            if i not in resumed
        }
        self.names = self._names()
        self.limits = self._cut()
        self.batch = self.limits.batch
        # The kind of padding of each batch, by its first example, and of the batches that begin with a trial.
        self.padding = {int(rows[0]): padding_of(self._mask(rows)) for rows in self.batches()}
        if distrusted(work.model) & {*self.padding.values()}:
            raise Unfit(why_distrusted(work.model))
        kinds = {kind: first for first, kind in reversed(self.padding.items())}
        self.trials = {first for kind, first in kinds.items() if self.resumer.trusted(kind) < self.length}
        self._begins: dict[tuple[int, int], tuple[int, ...]] = {}
        self._loads: dict[tuple[int, tuple[int, ...], int], list[Load]] = {}

    # -- what it takes -------------------------------------------------------------------------------

    def _needs(self, batch: int, spacing: int = 1) -> dict[str, int]:
        """Bytes that a batch needs at least, one condition at a time."""
        sizes = self.work.sizes
        resid = batch * sizes.resid
        return {
            "states": self.resumer.holds(batch, self.length, spacing),
            # The last residual is kept beside the named ones, and once more while the trial lasts.
            "residuals": (len(self.names) + 2) * resid,
            "edited": 4 * resid,
            "passes": self.resumer.copied(batch, self.length) + 3 * resid,
            "logits": batch * (sizes.logits if self.others else sizes.reads),
            "source": batch * sizes.source,
        }

    def _cut(self) -> Limits:
        """How the work is cut to stay within the budget."""
        work, resumer, length = self.work, self.resumer, self.length
        batch, memory, vector = work.batch_size, work.memory, work.sizes.vector

        def least(examples: int, spacing: int = 1) -> int:
            return sum(self._needs(examples, spacing).values())

        if memory is None:
            budget, alone = resumer.BUDGET, resumer.holds(batch, length, resumer.spacings(length)[-1])
            kept = resumer.fit(batch, length, budget)
        else:
            # Kept states lie close as long as that is possible: fewer examples cost nothing, detours do.
            budget, alone = memory, least(1, resumer.spacings(length)[-1])
            batch, kept = largest(batch, memory, least), 1
            if not batch:
                batch = 1
                kept = resumer.fit(1, length, memory - least(1) + resumer.holds(1, length))
        if kept is None:
            raise Unfit(f"does not fit the memory budget of {mib(budget)}: needs {mib(alone)}")
        need = self._needs(batch, kept)
        spare = None if memory is None else (memory - sum(need.values())) // 3

        def most(part: str, usual: int) -> int:
            enough = max(usual, need[part])
            return enough if spare is None else min(enough, need[part] + spare)

        tokens = resumer.TOKENS if work.model.cfg.device.type == "cpu" else 1 << 16
        shared = most("passes", PASSES)
        if memory is not None:
            # A pass then needs no more than a batch by itself, or what the budget leaves.
            tokens = min(tokens, max(batch * length, shared // (WORK * vector)))
        return Limits(
            batch,
            kept,
            most("edited", EDITED) - 3 * batch * work.sizes.resid,
            most("logits", LOGITS),
            max(1, shared // need["passes"]),
            tokens,
            vector,
        )

    def held(self) -> dict[str, int]:
        limits, jobs, sizes = self.limits, len(self.jobs), self.work.sizes
        # Those of the first batch, the largest.
        held = self._needs(limits.batch, limits.spacing)
        planned = self.planned(torch.arange(limits.batch))
        held["edited"] = max(load.held for load in planned) + 3 * limits.batch * sizes.resid
        shared = min(limits.together, max(1, limits.tokens // limits.batch), max(len(p.jobs) for p in planned))
        held["passes"] *= shared
        held["logits"] = max(held["logits"], min(limits.logits, (jobs + 1) * limits.batch * sizes.reads))
        return {name: size for name, size in held.items() if size}

    def count(self, rows: Tensor, first: bool) -> tuple[int, int]:
        batch, length = len(rows), self.length
        whole = self.n * batch * length
        blocks = whole * (1 + len(self.others))
        blocks += self._tried(rows)
        blocks += sum((job.stop - max(job.start, 0)) * length * batch for job in self.jobs if job.at is None)
        planned = self.planned(rows)
        runs = 1 + sum(len(group) for load in planned for group in load.groups)
        reads = runs * self.work.n_read
        reads += sum(length if start is None else self.work.n_read for start in self.others.values())
        return blocks + sum(load.blocks for load in planned), reads * batch

    def trial(self) -> int:
        rows = self.batches()[0]
        tried = self._tried(rows)
        return tried + self.n * self.length * len(rows) if tried else 0

    def _tried(self, rows: Tensor) -> int:
        """Block-positions of a batch's trial; 0 where resuming was found right before."""
        if int(rows[0]) not in self.trials:
            return 0
        n, length, rest = self.n, self.length, self.n - min(job.stop for job in self.jobs)
        again = sum(len(begins) * (length - begins[0]) for begins in self._trial_passes())
        other = sum(positions * copies for _, positions, copies in shapes(len(rows), length)) if self.half else 0
        return (n * (length + other) + rest * again) * len(rows)

    @property
    def rounding(self) -> Rounding | None:
        """What trials in half precision found; None in others, and before."""
        found = [tried(self.work.model, kind).rounding for kind in dict.fromkeys(self.padding.values())]
        return max((one for one in found if one is not None), key=lambda one: one.resumed, default=None)

    def _mask(self, rows: Tensor) -> Tensor | None:
        """The mask of some examples, on the model's device; None where the model is given none. (batch, pos)"""
        mask, device = self.work.mask, self.work.model.cfg.device
        return None if mask is None else mask[rows].to(device)

    def planned(self, rows: Tensor) -> list[Load]:
        """The jobs, as many at a time as may be held, with the passes that they take at most."""
        last = self.length - 1 if self.work.read.pos is None else int(self.work.read.pos[rows].max())
        # Batches are neighbouring examples; the run of a plan asks for what its counts asked for.
        batch = (int(rows[0]), len(rows))
        if batch not in self._begins:
            self._begins[batch] = tuple(self._floor(job.earliest(rows)) for job in self.jobs)
        begins = self._begins[batch]
        key = (len(rows), begins, last)
        if key not in self._loads:
            self._loads.clear()
            self._loads[key] = loads(self.jobs, begins, last, len(rows), self.length, self.n, self.limits, self._passes)
        return self._loads[key]

    def _floor(self, pos: int) -> int:
        return pos - pos % self.limits.spacing

    def _trial_passes(self) -> list[list[int]]:
        """Where the runs of the trial begin, by pass, the earliest first.

        In the middle, and for a run that joins it between there and the end; in half precision, whose rounding depends on
        the shape of a pass, also with few positions, alone and several together.
        """
        length = self.length
        middle = self._floor(length // 2)
        passes = [[middle, (middle + length) // 2] if self.resumer.joins else [middle]]
        return passes + ([[self._floor(3 * length // 4)] * 4, [self._floor(length - 1)]] if self.half else [])

    def _passes(self, begins: Sequence[int], rows: int) -> Iterable[tuple[int, int]]:
        limits = self.limits
        return passes(
            tuple(begins),
            rows,
            self.length,
            self.resumer.overhead(),
            limits.tokens,
            limits.together,
            self.resumer.joins,
        )

    # -- running -------------------------------------------------------------------------------------

    def run(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, list[Tensor]]:
        base, values = self._resumed(rows, done)
        done(1)
        for index, start in self.others.items():
            values[index] = self.edited(rows, self.work.conditions[index], start)
            done(1)
        return base, [values[i] for i in range(len(self.work.conditions))]

    def _resumed(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, dict[int, Tensor]]:
        """Values of the unedited run and, by index, of the conditions that begin in mid-sequence."""
        work, model = self.work, self.work.model
        self.resumer.spacing, self.resumer.mask = self.limits.spacing, self._mask(rows)
        padding = padding_of(self.resumer.mask)
        try:
            final, cache = self.resumer.base(work.examples.main[rows], self.names)
        except Exception as err:
            # Whatever a model's forward has against a cache, the other strategies need none.
            if self.resumer.trusted(padding):
                raise
            distrust(model, padding)
            raise TrialFailed from err
        entering = {
            stop: final if stop == self.n else cache[f"blocks.{stop}.hook_resid_pre"]
            for stop in {job.stop for job in self.jobs}
        }
        self._try(rows, padding, entering, final)
        readout = Readout(model, work.read, rows, self.limits.logits)
        where = None if work.read.pos is None else work.read.pos[rows].to(final.device)
        readout.put(-1, final if where is None else pick(final, where))
        (base,) = readout.values().values()
        values: dict[int, Tensor] = dict.fromkeys(self.unedited, base)
        done(len(values))
        for load in self.planned(rows):
            changed: list[_Changed] = []
            for job in load.jobs:
                plain = entering[job.stop]
                edited = self._edited(job, rows, plain, cache)
                begin = self.resumer.floor(self._begin(job, rows, edited, plain))
                if begin == plain.shape[1] or (where is not None and int(where.max()) < begin):
                    values[job.index] = base
                    done(1)
                    continue
                changed.append(_Changed(job.index, job.stop, begin, edited[:, begin:].clone()))
            self._finish(changed, load, entering, final, where, readout, done)
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

    def _try(self, rows: Tensor, padding: str, entering: Mapping[int, Tensor], final: Tensor) -> None:
        """Raise TrialFailed if the kept run, or a run from its middle, gives other numbers than the model's own forward.

        Tried on these very inputs, once for each kind of padding and the longest sequence so far.
        """
        length, layer, model = final.shape[1], min(entering), self.work.model
        if self.resumer.trusted(padding) >= length:
            return
        reason: Exception | None = None
        rounding: Rounding | None = None
        try:
            own = model(self.work.examples.main[rows], stop_at_layer=self.n, attention_mask=self.resumer.mask)
            agreeing = functools.partial(agree, bits=6, half=False)
            runs = self._trial_runs(entering, layer, own)
            if self.half:
                rounding = self._rounding(
                    rows, own, max(share(found, right, own) for found, right in [(final, own), *runs])
                )
                right = rounding.within
            else:
                right = agreeing(final, own) and all(agreeing(found, expected) for found, expected in runs)
        except Exception as err:
            right, reason = False, err
        if not right:
            distrust(model, padding, rounding)
            raise TrialFailed from reason
        self.resumer.trust(length, padding, rounding)

    def _trial_runs(self, entering: Mapping[int, Tensor], layer: int, own: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs of the trial from the middle, and what whole runs give there."""
        for begins in self._trial_passes() if layer < self.n else ():
            resid, expected = (x[:, begins[0] :].repeat(len(begins), 1, 1) for x in (entering[layer], own))
            yield self.resumer.tail(resid, layer, begins[0], self.n, begins), expected

    def _rounding(self, rows: Tensor, own: Tensor, resumed: float) -> Rounding:
        """How far runs from the middle are off in half precision, beside whole runs in other batches."""
        model, tokens, mask = self.work.model, self.work.examples.main[rows], self.resumer.mask

        def run(some: slice, positions: int, copies: int) -> Tensor:
            real = None if mask is None else mask[some, :positions]
            if real is not None and not bool(real.any(1).all()):
                return own[some, :positions]  # nothing but padding is no run
            real = None if real is None else real.repeat(copies, 1)
            x = tokens[some, :positions].repeat(copies, 1)
            out: Tensor = model(x, stop_at_layer=self.n, attention_mask=real)
            return out[: len(out) // copies]

        return Rounding(str(model.cfg.dtype).removeprefix("torch."), resumed, between_batches(run, own))

    def _begin(self, job: Job, rows: Tensor, edited: Tensor, plain: Tensor) -> int:
        """The first position at which an edit changes the residual. Tensors (example, pos, d_model)."""
        first, said = _first_change(edited, plain), min(edit.earliest(rows) for edit in job.interventions)
        if said <= first:
            return first
        # With hooks inside it a block may run another kernel, whose rounding differs at every position.
        before, same = edited[:, :said], plain[:, :said]
        if self.half:
            allowed = tried(self.work.model, padding_of(self.resumer.mask)).rounding
            only_rounding = allowed is not None and share(before, same, plain) <= allowed.batches
        else:
            only_rounding = agree(before, same, bits=6, half=False)
        return said if only_rounding else first

    def _edited(self, job: Job, rows: Tensor, plain: Tensor, cache: Mapping[str, Tensor]) -> Tensor:
        """The residual entering block ``job.stop`` under the job's edits. (example, pos, d_model)"""
        if job.at is not None and (job.at.endswith("pre") or torch.equal(cache[job.at], plain)):
            tensor, mask = plain.clone(), self.resumer.mask
            point = self.work.model.point(job.at)
            if mask is not None:
                point = point.during(real=mask)
            for edit in job.interventions:
                tensor = Entry(point, edit.edit_for(rows)).forward(tensor, point)
            return tensor
        hooks = [(one.name, one.edit_for(rows)) for one in job.interventions]
        # Where a block's output isn't what the next one receives, what entered the block may not have been kept.
        entered = f"blocks.{job.start}.hook_resid_pre"
        start = job.start if job.start > 0 and entered in cache else None
        inputs = self.work.examples.main[rows] if start is None else cache[entered]
        with self.resumer.running():
            out: Tensor = self.work.model.run_with_hooks(
                inputs, hooks, start_at_layer=start, stop_at_layer=job.stop, attention_mask=self.resumer.mask
            )
        return out

    def _finish(
        self, changed: list[_Changed], load: Load, entering: Mapping[int, Tensor], final: Tensor,
        where: Tensor | None, readout: Readout, done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Run what was changed to the last block and give it to the readout."""
        rows = len(final)
        for group in self._groups(changed, load, rows):
            begin = min(one.begin for one in group)
            for one, resid in zip(group, self._together(group, begin, entering), strict=True):
                whole = torch.cat([final[:, :begin], resid], 1)
                readout.put(one.index, whole if where is None else pick(whole, where))
            done(len(group))

    def _groups(self, changed: list[_Changed], load: Load, rows: int) -> list[list[_Changed]]:
        """Which conditions share a pass: never a division that takes more than was planned."""
        changed = sorted(changed, key=lambda one: (-one.begin, one.stop, one.index))
        groups = [changed[lo:hi] for lo, hi in self._passes([one.begin for one in changed], rows)]
        took = sum((self.n - one.stop) * (self.length - group[-1].begin) * rows for group in groups for one in group)
        by = {one.index: one for one in changed}
        if took > load.blocks and by.keys() <= {i for group in load.groups for i in group}:
            planned = [[by[i] for i in group if i in by] for group in load.groups]
            groups = [group for group in planned if group]
        return groups

    def _together(self, group: list[_Changed], begin: int, entering: Mapping[int, Tensor]) -> list[Tensor]:
        """One pass over the blocks, which each condition joins where its edits end. each (example, pos, d_model)"""
        stops = sorted({one.stop for one in group})
        rows, now = len(entering[stops[0]]), dict[int, Tensor]()
        for stop, until in zip(stops, [*stops[1:], self.n], strict=True):
            plain = entering[stop]
            now |= {o.index: torch.cat([plain[:, begin : o.begin], o.resid], 1) for o in group if o.stop == stop}
            # A condition that begins earlier comes first.
            running = sorted((o for o in group if o.stop <= stop), key=lambda o: o.begin)
            if stop < self.n:
                resid = torch.cat([now[o.index] for o in running])
                after = self.resumer.tail(resid, stop, begin, until, [o.begin for o in running])
                now = dict(zip((o.index for o in running), after.split(rows), strict=True))
        return [now[one.index] for one in group]


def _resumable(work: Work) -> tuple[Resumer, list[Job]]:
    """How runs of the model go on from the middle, and the conditions that can; raises Unfit where few or none can."""
    model = work.model
    if why := why_not_skip(work):
        raise Unfit(why)
    if work.always:
        raise Unfit("an edit that is in place in every run")
    if not work.conditions:
        raise Unfit("no conditions")
    if not work.examples.plain:
        raise Unfit("inputs that aren't tokens (example, pos)")
    if work.length < SHORTEST:
        # A shorter sequence has hardly a prefix to spare.
        raise Unfit(f"sequences shorter than {SHORTEST} positions")
    # Those of transformers stay once hidden states were asked for, and do nothing in other runs.
    if hooked_by_hand(model.module, ("transformers",)) is not None:
        raise Unfit("hooks on the model's modules")
    resumer = resumer_of(model)
    if resumer is None:
        raise Unfit("the adapter can't resume this model in mid-sequence")
    if work.mask is not None and not resumer.masks:
        raise Unfit("padding, of which the adapter's runs from mid-sequence know nothing")
    jobs = jobs_of(model, work.conditions)
    # One condition or two don't pay for trying whether resuming is right.
    if len(jobs) <= 2:
        raise Unfit(f"{len(jobs)} conditions that could begin in mid-sequence, which takes 3")
    return resumer, jobs


def _first_change(edited: Tensor, base: Tensor) -> int:
    """The first position at which any example differs; the length if none does. Tensors (example, pos, d)."""
    changed = (edited != base).flatten(2).any(-1).any(0)
    return int(torch.argmax(changed.int())) if bool(changed.any()) else base.shape[1]

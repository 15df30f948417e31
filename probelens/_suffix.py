"""Conditions of a sweep from their first changed block and position on, many in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from probelens._resume import Resumer, distrust, first_change, passes, resumer_of
from probelens.hooks import Entry

if TYPE_CHECKING:
    from probelens.model import HookedModel
    from probelens.sweep import Condition, Edit, Read

__all__ = ["SuffixRuns"]

# A shorter sequence has hardly a prefix to spare.
_SHORTEST = 8
_HELD_BYTES = 1 << 28


@dataclass(frozen=True)
class _Job:
    """A condition whose edits all lie in blocks ``start`` to ``stop − 1`` (−1: the embedding).

    ``at`` is the one hook point that all of them edit where that is the residual entering block
    ``stop``: nothing has to run then to know what they make of it.
    """

    index: int
    edits: tuple[Edit, ...]
    start: int
    stop: int
    at: str | None


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
    """

    def __init__(
        self, resumer: Resumer, tokens: Tensor, read: Read, jobs: Sequence[_Job], unedited: Sequence[int] = ()
    ) -> None:
        self.resumer = resumer
        self.model = resumer.model
        self.n = self.model.cfg.n_layers
        self.tokens = tokens
        self.read = read
        self.jobs = jobs
        self.unedited = unedited

    @classmethod
    def of(
        cls, model: HookedModel, tokens: Tensor, read: Read, conditions: Sequence[Condition], batch: int
    ) -> SuffixRuns | None:
        """The runs, or None where the plain way is the right one.

        That is: short sequences, inputs that aren't tokens, half precision (whose sums depend on the shape
        of a pass), hooks of the user's own on the modules, an adapter that can't resume, or too much to keep.
        """
        if tokens.ndim != 2 or tokens.shape[1] < _SHORTEST or tokens.is_floating_point():
            return None
        if model.cfg.dtype not in (torch.float32, torch.float64) or not conditions:
            return None
        if any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules()):
            return None
        resumer = resumer_of(model)
        if resumer is None or not resumer.fits(min(batch, len(tokens)), tokens.shape[1]):
            return None
        jobs = [job for i, c in enumerate(conditions) if (job := _job(model, i, c)) is not None]
        # One condition or two don't pay for trying whether resuming is right.
        unedited = [i for i, c in enumerate(conditions) if not c.edits]
        return cls(resumer, tokens, read, jobs, unedited) if len(jobs) > 2 else None

    def run(self, rows: Tensor, done: Callable[[int], None]) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Values of the unedited run and, by index, of the conditions; None if resuming proves wrong here.

        Args:
            rows: The examples.
            done: Told how many conditions were finished.
        """
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
        readout = _Readout(self.model, self.read, rows)
        where = None if self.read.pos is None else self.read.pos[rows].to(final.device)
        readout.put(-1, final if where is None else _pick(final, where))
        (base,) = readout.values().values()
        values: dict[int, Tensor] = dict.fromkeys(self.unedited, base)
        done(len(values))
        held: list[_Held] = []
        for job in self.jobs:
            plain = entering[job.stop]
            edited = self._edited(job, rows, plain, cache)
            begin = self.resumer.floor(first_change(edited, plain))
            if begin == plain.shape[1] or (where is not None and int(where.max()) < begin):
                values[job.index] = base
                done(1)
                continue
            held.append(_Held(job.index, job.stop, begin, edited[:, begin:].clone()))
            if sum(one.resid.numel() * one.resid.element_size() for one in held) > _HELD_BYTES:
                self._finish(held, entering, final, where, readout, done)
                held = []
        self._finish(held, entering, final, where, readout, done)
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

    def _edited(self, job: _Job, rows: Tensor, plain: Tensor, cache: Mapping[str, Tensor]) -> Tensor:
        """The residual entering block ``job.stop`` under the job's edits. (example, pos, d_model)"""
        if job.at is not None and (job.at.endswith("pre") or torch.equal(cache[job.at], plain)):
            tensor = plain.clone()
            point = self.model.point(job.at)
            for edit in job.edits:
                tensor = Entry(point, edit.hook(rows)).forward(tensor, point)
            return tensor
        hooks = [(edit.name, edit.hook(rows)) for edit in job.edits]
        start = job.start if job.start > 0 else None
        inputs = self.tokens[rows] if start is None else cache[f"blocks.{start}.hook_resid_pre"]
        with self.resumer.running():
            out: Tensor = self.model.run_with_hooks(
                inputs, hooks, start_at_layer=start, stop_at_layer=job.stop
            )
        return out

    def _finish(
        self, held: list[_Held], entering: Mapping[int, Tensor], final: Tensor,
        where: Tensor | None, readout: _Readout, done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Run what is held to the last block and hand it to the readout."""
        held.sort(key=lambda one: (-one.begin, one.stop, one.index))
        rows, length = final.shape[:2]
        most = 2048 if final.device.type == "cpu" else 1 << 16
        for lo, hi in passes([one.begin for one in held], rows, length, self.resumer.overhead(), most):
            group = sorted(held[lo:hi], key=lambda one: one.stop)
            begin = min(one.begin for one in group)
            after = self._together(group, begin, entering)
            for one, resid in zip(group, after.split(rows), strict=True):
                whole = torch.cat([final[:, :begin], resid], 1)
                readout.put(one.index, whole if where is None else _pick(whole, where))
            done(len(group))

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

    def __init__(self, model: HookedModel, read: Read, rows: Tensor) -> None:
        self.model, self.read, self.rows = model, read, rows
        self._held: list[tuple[int, Tensor]] = []
        self._values: dict[int, Tensor] = {}

    def put(self, index: int, resid: Tensor) -> None:
        """Take the residual of a condition after the last block, at the positions read. (example, read, d_model)"""
        self._held.append((index, resid))
        tokens = sum(r.shape[0] * r.shape[1] for _, r in self._held)
        if tokens * max(self.model.cfg.d_vocab, resid.shape[-1]) * 4 > _HELD_BYTES // 4:
            self._flush()

    def values(self) -> dict[int, Tensor]:
        """Values by index, of all that came since the last call."""
        self._flush()
        out, self._values = self._values, {}
        return out

    def _flush(self) -> None:
        if not self._held:
            return
        logits = self.model(torch.cat([r for _, r in self._held]), start_at_layer=self.model.cfg.n_layers)
        data = {key: value[self.rows].to(logits.device) for key, value in self.read.data.items()}
        for (index, _), part in zip(self._held, logits.split(len(self._held[0][1])), strict=True):
            self._values[index] = self.read.fn(part, **data).detach().cpu()
        self._held = []


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _pick(resid: Tensor, where: Tensor) -> Tensor:
    return resid.gather(1, where[..., None].expand(-1, -1, resid.shape[-1]))


def _job(model: HookedModel, index: int, condition: Condition) -> _Job | None:
    """What to run for a condition; None where an edit lies outside the blocks, or a run can't begin there."""
    names = {model.point(edit.name).name for edit in condition.edits}
    layers = [_layer(name) for name in names]
    if not layers or None in layers:
        return None
    start, last = (f(layer for layer in layers if layer is not None) for f in (min, max))
    only: str | None = next(iter(names)) if len(names) == 1 else None
    ends: dict[str, Literal[0, 1]] = {"hook_resid_pre": 0, "hook_resid_post": 1}
    kind = only.rsplit(".", 1)[-1] if only is not None and start >= 0 else ""
    direct = only if only == f"blocks.{start}.{kind}" and kind in ends else None
    stop = start + ends[kind] if direct is not None else last + 1
    if (start > 0 and not model.chained(start)) or not model.chained(stop):
        return None
    return _Job(index, condition.edits, start, stop, direct)


def _layer(name: str) -> int | None:
    if name in ("hook_embed", "hook_pos_embed"):
        return -1
    return int(name.split(".")[1]) if name.startswith("blocks.") else None

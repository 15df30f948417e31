"""A sweep over several workers: whole batches, or a share of the conditions where there are fewer batches than workers."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.results.progress import progress_bar
from probelens.results.sentences import count
from probelens.running.sweep.memory import mib
from probelens.running.sweep.strategy import Strategy, TrialFailed
from probelens.running.sweep.work import Work
from probelens.running.workers import share_memory, spread, workers_here

Choose = Callable[..., tuple[Strategy, str]]
PATHS = ("resume", "skip", "full")  # from the shortest


@dataclass(eq=False)
class _Part:
    """Some conditions on some examples, by the way that a worker chooses as the caller's process would."""

    choose: Choose
    work: Work
    chosen: dict[range, tuple[Strategy, str]] = field(default_factory=dict)

    def inside(self, model: HookedModel) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def __call__(self, model: HookedModel, item: tuple[Tensor, range]) -> tuple[Tensor, list[Tensor], str, str]:
        rows, which = item
        if which not in self.chosen:
            work = dataclasses.replace(self.work, conditions=[self.work.conditions[i] for i in which])
            self.chosen = {which: self.choose(work)}
        strategy, why = self.chosen[which]
        try:
            with strategy.running():
                return *strategy.run(rows, lambda _: None), strategy.path, why
        except TrialFailed:
            self.chosen[which] = self.choose(strategy.work, resume=False)
            return self(model, item)


def run_spread(
    strategy: Strategy, why: str, choose: Choose, progress: bool, describe: str
) -> tuple[Tensor, Tensor, str, str]:
    """What ``Strategy.run_all`` gives, from the workers; the path, and why no shorter one.

    Raises InputError where the workers of this machine would need more memory than is free.
    """
    work, items = strategy.work, _items(strategy)
    need_memory(strategy)
    part = _Part(choose, dataclasses.replace(work, batch_size=strategy.batch))
    bases: list[Tensor] = []
    values: dict[int, list[Tensor]] = {i: [] for i in range(len(work.conditions))}
    path, reason = strategy.path, why
    with (
        progress_bar(
            len(strategy.batches()) * len(work.conditions),
            f"{describe}, {count(workers_here(work.model), 'worker')}",
            progress,
        ) as bar,
        spread(work.model, part, items) as parts,
    ):
        for (rows, which), (base, found, went, its_why) in zip(items, parts, strict=True):
            if sum(map(len, bases)) <= int(rows[0]):
                bases.append(base)
            for i, value in zip(which, found, strict=True):
                values[i].append(value)
            if PATHS.index(went) > PATHS.index(path):
                path, reason = went, its_why
            bar.update(len(which))
    base = torch.cat(bases)
    if not work.conditions:
        return torch.empty(0, *base.shape), base, path, reason
    return torch.stack([torch.cat(each) for each in values.values()]), base, path, reason


def _items(strategy: Strategy) -> list[tuple[Tensor, range]]:
    """Batches, each with its conditions; every ``shares``-th of them where there are fewer batches than workers."""
    batches, conditions = strategy.batches(), len(strategy.work.conditions)
    shares = max(1, min(conditions, -(-workers_here(strategy.work.model) // len(batches))))
    return [(rows, range(k, conditions, shares)) for rows in batches for k in range(shares)]


def need_memory(strategy: Strategy) -> None:
    """Refuse to run more workers on this machine than its free memory holds; that of a GPU isn't asked."""
    if strategy.work.model.cfg.device.type != "cpu":
        return
    free, each = free_memory(), weights(strategy.work.model) + sum(strategy.held().values())
    n = workers_here(strategy.work.model)
    if free is not None and share_memory(strategy.work.model) and n * each > free:
        raise InputError(
            f"{n} workers need about {mib(each)} each, for the weights and what the sweep holds, and {mib(free)} are free "
            "on this machine. Give fewer workers, a smaller batch_size, or a memory budget."
        )


def weights(model: HookedModel) -> int:
    """Bytes of the parameters and buffers."""
    return sum(x.numel() * x.element_size() for x in (*model.module.parameters(), *model.module.buffers()))


def free_memory() -> int | None:
    """Bytes that may be used on this machine now; None where the system doesn't say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def seconds(strategy: Strategy) -> float:
    """About how long all runs take in one process, from the time of a forward of the first examples, run twice."""
    work = strategy.work
    rows = strategy.batches()[0][:4]
    with strategy.running():
        for _ in range(2):
            begin = time.perf_counter()
            work.model(work.examples.rows(rows), attention_mask=None if work.mask is None else work.mask[rows])
            took = time.perf_counter() - begin
    return took * strategy.counts()[0] / (max(1, work.n_layers) * work.length * len(rows))

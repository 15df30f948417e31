"""Settings of `paper-formal`, its presets, and its cells; imports nothing that takes time, so that it is listed at once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from probelens.errors import at_least
from probelens.examples.refit_the_probe.shared.setup import ARCHS, NAMES, TASKS, TITLES
from probelens.experiments.recipe import settings_of

FREE = ("out", "archs", "tasks", "seeds", "stds", "retrained", "workers")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the formal grid.

    Args:
        out: Run folder.
        archs: Models: "transformer", "mamba", "mamba2", "lstm", "gru".
        tasks: "parity", "s3", "dyck", "counter".
        seeds: One training run each.
        stds: Further scales of the initial embedding, tried on LSTM and GRU, probes only.
        retrained: Tasks on which Mamba is also trained without its convolution, behaviour only.
        length: Tokens in a training sequence.
        lengths: Tokens in the sequences of length transfer.
        steps: Most training steps; training stops earlier, at 99 %.
        n_probe: Sequences for probes, split 60/20/20.
        n_leace: Sequences that LEACE is fitted on: what it leaves on new ones shrinks with their number.
        n_inlp: Of these, how many INLP is fitted on.
        n_held: Sequences that ablations are measured on.
        n_length: Sequences of each length of the transfer.
        n_pairs: Clean/corrupted pairs for patching.
        controls: Random subspaces compared with each ablation, of each kind.
        workers: Cells at once, one thread each; None for one per core.
    """

    out: str = "runs/paper-formal"
    archs: tuple[str, ...] = ARCHS
    tasks: tuple[str, ...] = TASKS
    seeds: tuple[int, ...] = (0,)
    stds: tuple[float, ...] = (0.2, 1.0)
    retrained: tuple[str, ...] = ("parity", "s3", "dyck")
    length: int = 40
    lengths: tuple[int, ...] = (40, 60, 80, 100, 120)
    steps: int = 8000
    n_probe: int = 400
    n_leace: int = 4000
    n_inlp: int = 1000
    n_held: int = 300
    n_length: int = 60
    n_pairs: int = 200
    controls: int = 20
    workers: int | None = None

    def __post_init__(self) -> None:
        at_least(
            self, seeds=0, length=2, lengths=1, steps=1, n_probe=5, n_leace=5, n_inlp=5, n_held=2, n_length=1, n_pairs=1, controls=0, workers=1,
        )  # fmt: skip

    def cells(self) -> list[dict[str, Any]]:
        """The settings of each cell on which its numbers depend."""
        whole = itertools.product(self.seeds, self.tasks, self.archs)
        found = [self._cell(*one, parts=["probes", "erasure", "patching", "convolution"]) for one in whole]
        scaled = [task for task in self.tasks if task in ("parity", "s3")]
        gated = [arch for arch in self.archs if arch in ("lstm", "gru")]
        for seed, task, arch, std in itertools.product(self.seeds, scaled, gated, self.stds):
            found.append(self._cell(seed, task, arch, parts=["probes"], embedding_std=std))
        retrained = [task for task in self.retrained if task in self.tasks and "mamba" in self.archs]
        for seed, task in itertools.product(self.seeds, retrained):
            found.append(self._cell(seed, task, "mamba", parts=[], convolution=False))
        return found

    def _cell(self, seed: int, task: str, arch: str, parts: list[str], **changed: Any) -> dict[str, Any]:
        name = f"{NAMES[arch]} {TITLES[task]}"
        if "embedding_std" in changed:
            name += f", embedding std {changed['embedding_std']:g}"
        if "convolution" in changed:
            name += ", no convolution"
        return {
            "recipe": "paper-formal", "name": f"{name}, seed {seed}", "arch": arch, "task": task, "seed": seed,
            "parts": parts, "embedding_std": 0.02, "convolution": True, **settings_of(self, FREE), **changed,
        }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "archs": ("gru", "mamba"), "tasks": ("parity",), "stds": (), "retrained": ("parity",), "length": 12,
        "lengths": (12, 20), "steps": 20, "n_probe": 40, "n_leace": 60, "n_inlp": 60, "n_held": 30, "n_length": 8, "n_pairs": 20,
        "controls": 2,
    },
    "cpu": {},
    "paper": {"seeds": (0, 1, 2, 3, 4, 5), "n_probe": 1000, "n_leace": 10000, "n_inlp": 2000, "n_held": 600, "n_length": 200, "steps": 20000},
}  # fmt: skip

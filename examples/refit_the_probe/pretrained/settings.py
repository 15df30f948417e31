"""Settings of `paper-pretrained`, its presets, and its cells; imports nothing that takes time, so that it is listed at once."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from probelens.errors import at_least
from probelens.examples.refit_the_probe.shared.identity import identified
from probelens.examples.refit_the_probe.shared.setup import TITLES
from probelens.experiments.recipe import settings_of

FREE = ("out", "model", "tasks", "seeds", "workers")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the pretrained experiments.

    Args:
        out: Run folder.
        model: Hub ids, or folders written by `save_pretrained` with a tokenizer.
        revision: Revision of hub ids; None for the newest.
        tasks: "parity", "s3", "dyck", "counter".
        seeds: One fine-tuning each.
        labels: Of the labels that `paper-formal` ablates, only these; none for all.
        least: A cell that answers less well than this is probed, but not ablated and not patched: there is little to
            take away.
        length: Tokens in a sequence.
        steps: Most training steps; training stops earlier, at 99 %.
        batch_size: Sequences per step.
        lr: Peak learning rate.
        bf16: Fine-tune under bfloat16 autocast; everything is measured in float32.
        checkpointing: Recompute activations in the backward pass, to save memory.
        n_probe: Sequences for probes, split 60/20/20.
        n_leace: Sequences that LEACE is fitted on.
        n_inlp: Of these, how many INLP is fitted on.
        n_held: Sequences that ablations are measured on.
        n_pairs: Clean/corrupted pairs for patching.
        controls: Random subspaces compared with each ablation, of equal rank and of equal variance.
        device: "auto", "cpu" or "cuda".
        workers: Cells at once; None for one per core.
    """

    out: str = "runs/paper-pretrained"
    model: tuple[str, ...] = ("EleutherAI/pythia-160m", "EleutherAI/pythia-410m", "state-spaces/mamba-130m-hf")
    revision: str | None = None
    tasks: tuple[str, ...] = ("parity", "s3", "dyck")
    seeds: tuple[int, ...] = (0,)
    labels: tuple[str, ...] = ()
    least: float = 0.9
    length: int = 40
    steps: int = 8000
    batch_size: int = 64
    lr: float = 1e-4
    bf16: bool = True
    checkpointing: bool = False
    n_probe: int = 1000
    n_leace: int = 8000
    n_inlp: int = 2000
    n_held: int = 400
    n_pairs: int = 300
    controls: int = 20
    device: str = "auto"
    workers: int | None = 1

    def __post_init__(self) -> None:
        at_least(
            self, seeds=0, length=2, steps=1, batch_size=1, n_probe=5, n_leace=5, n_inlp=5, n_held=1, n_pairs=1, controls=0, workers=1,
        )  # fmt: skip

    def cells(self) -> list[dict[str, Any]]:
        """The settings of each cell on which its numbers depend."""
        shared = settings_of(self, FREE)
        found = []
        for name, seed, task in itertools.product(self.model, self.seeds, self.tasks):
            found.append({
                "recipe": "paper-pretrained", "name": f"{Path(name).name} {TITLES[task]}, seed {seed}",
                **identified(name), "task": task, "seed": seed, "lengths": [],
                "parts": ["probes", "erasure", "patching"], **shared,
            })  # fmt: skip
        return found


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "tasks": ("parity",), "least": 0.0, "length": 12, "steps": 12, "batch_size": 8, "bf16": False, "n_probe": 40, "n_leace": 60,
        "n_inlp": 60, "n_held": 30, "n_pairs": 20, "controls": 2,
    },
    "cpu": {
        "labels": ("state", "depth"), "steps": 1500, "batch_size": 32, "lr": 1e-3, "bf16": False, "n_probe": 300,
        "n_leace": 2000, "n_inlp": 500, "n_held": 150, "n_pairs": 150,
    },
    "paper": {"seeds": (0, 1, 2, 3)},
}  # fmt: skip

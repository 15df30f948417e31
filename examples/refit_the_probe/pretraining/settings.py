"""Settings of `paper-pretrain`, its presets, and its cells; imports nothing that takes time, so that it is listed at once."""

from __future__ import annotations

import dataclasses
from typing import Any

from probelens.errors import at_least
from probelens.experiments.recipe import settings_of

FREE = ("out", "archs", "workers")
NAMES = {"transformer": "GPT-NeoX", "mamba": "Mamba"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the pretraining.

    Args:
        out: Run folder.
        archs: Models: "transformer" (GPT-NeoX), "mamba".
        corpus: "stdlib", a folder of Python files, or a .jsonl(.gz) file of CodeSearchNet. Three in ten of its
            modules (or repositories) are kept out, by a hash of their names.
        functions: At most so many functions of it; None for all.
        seed: Of initial weights and data.
        vocab: Tokens of the byte-level BPE tokenizer, which is learned from the training text.
        n_layers: Blocks.
        d_model: Width.
        length: Tokens in a window.
        batch_size: Windows per step.
        steps: Training steps; a fifth of them are the final decay.
        lr: Peak learning rate.
        bf16: Train under bfloat16 autocast.
        checkpointing: Recompute activations in the backward pass, to save memory.
        device: "auto", "cpu" or "cuda".
        workers: Models at once; None for one per core.
    """

    out: str = "runs/paper-pretrain"
    archs: tuple[str, ...] = ("transformer", "mamba")
    corpus: str = "stdlib"
    functions: int | None = None
    seed: int = 0
    vocab: int = 1024
    n_layers: int = 6
    d_model: int = 128
    length: int = 128
    batch_size: int = 16
    steps: int = 1200
    lr: float = 2e-3
    bf16: bool = False
    checkpointing: bool = False
    device: str = "auto"
    workers: int | None = None

    def __post_init__(self) -> None:
        at_least(self, functions=1, seed=0, vocab=1, n_layers=1, d_model=1, length=2, batch_size=1, steps=1, workers=1)

    def cell(self, arch: str) -> dict[str, Any]:
        """The settings on which one model depends."""
        return {"recipe": "paper-pretrain", "name": NAMES[arch], "arch": arch, **settings_of(self, FREE)}


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"functions": 400, "n_layers": 2, "d_model": 32, "vocab": 300, "steps": 6, "batch_size": 4, "length": 32},
    "cpu": {},
    "paper": {"n_layers": 12, "d_model": 512, "vocab": 8192, "steps": 20000, "batch_size": 64, "length": 256, "lr": 6e-4,
              "bf16": True, "workers": 1},
}  # fmt: skip

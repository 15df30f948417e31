"""Settings of `paper-code-depth`, its presets, and its cells; imports nothing that takes time, so that it is listed at once."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from probelens.errors import at_least
from probelens.examples.refit_the_probe.shared.identity import identified
from probelens.experiments.recipe import settings_of

FREE = ("out", "model", "seeds", "workers")
LABELS = ("depth", "indent")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of Code-Depth.

    Args:
        out: Run folder.
        model: Hub ids, or folders written by `save_pretrained` with a tokenizer.
        revision: Revision of hub ids; None for the newest.
        corpus: "stdlib", a folder of Python files, or a .jsonl(.gz) file of CodeSearchNet.
        unseen: Of the standard library, only modules that `paper-pretrain` has kept out. What else a model was
            pretrained on isn't known to this recipe.
        seeds: Choice of functions and split.
        n: Functions, split 60/20/20 by module.
        length: Tokens of each function; longer ones are cut.
        max_depth: Class of the greatest depth and indent; deeper positions belong to it.
        every: Read one block in so many, and the last.
        max_rows: At most so many training rows of a probe.
        device: "auto", "cpu" or "cuda".
        workers: Cells at once; None for one per core.
    """

    out: str = "runs/paper-code-depth"
    model: tuple[str, ...] = (
        "EleutherAI/pythia-160m",
        "EleutherAI/pythia-410m",
        "state-spaces/mamba-130m-hf",
        "HuggingFaceTB/SmolLM2-135M",
    )
    revision: str | None = None
    corpus: str = "stdlib"
    unseen: bool = True
    seeds: tuple[int, ...] = (0,)
    n: int = 1000
    length: int = 128
    max_depth: int = 3
    every: int = 1
    max_rows: int | None = 30000
    device: str = "auto"
    workers: int | None = 1

    def __post_init__(self) -> None:
        at_least(self, seeds=0, n=5, length=1, max_depth=1, every=1, max_rows=1, workers=1)

    def cells(self) -> list[dict[str, Any]]:
        """The settings of each cell on which its numbers depend."""
        shared = settings_of(self, FREE)
        if self.corpus != "stdlib":
            shared["corpus"] = str(Path(self.corpus).absolute())
        found = []
        for name, seed in itertools.product(self.model, self.seeds):
            found.append({"recipe": "paper-code-depth", "name": f"{Path(name).name}, seed {seed}", **identified(name),
                          "seed": seed, **shared})  # fmt: skip
        return found


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"n": 40, "length": 32, "max_depth": 1, "every": 2, "max_rows": 500},
    "cpu": {"n": 400, "length": 96, "max_rows": 10000},
    "paper": {"n": 2000, "seeds": (0, 1, 2, 3)},
}  # fmt: skip

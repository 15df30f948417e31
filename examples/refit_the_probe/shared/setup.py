"""What the paper's formal experiments run on: the four tasks, the labels that are read, one model per cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import probelens as pl

ARCHS = ("transformer", "mamba", "mamba2", "lstm", "gru")
NAMES = {"transformer": "Transformer", "mamba": "Mamba", "mamba2": "Mamba-2", "lstm": "LSTM", "gru": "GRU"}
TASKS = ("parity", "s3", "dyck", "counter")
TITLES = {"parity": "Parity", "s3": "S3", "dyck": "Dyck", "counter": "Counter"}

# What is probed, and of these what is ablated and erased: the variables that the answer is made of.
PROBED = {"parity": ("state",), "s3": ("state", "sign", "mod_sign"), "dyck": ("depth", "top"), "counter": ("depth",)}
LABELS = {"parity": ("state",), "s3": ("state",), "dyck": ("depth", "top"), "counter": ("depth",)}
# Clean/corrupted pairs by name: the keyword arguments of `task.pairs`.
PAIRS: dict[str, dict[str, dict[str, str]]] = {
    "parity": {"state": {}},
    "s3": {"state": {}},
    "dyck": {"depth": {"label": "state", "kind": "depth"}, "top": {"label": "state", "kind": "type"}},
    "counter": {"depth": {}},
}
RANKS = (4, 16, 64)  # of INLP's directions: to chance it takes most of the space; the paper's stopped much earlier
# The ways to take a variable out. The first two are the paper's: a probe's rows are a filter, what to read with, and may
# carry hardly any variance. The next two are the same of the class means, where the variable lies.
WHAT = {
    "direction": "best direction", "rows": "all probe rows", "mean_direction": "best class-mean direction",
    "means": "class means", "leace": "LEACE", "inlp": "INLP",
}  # fmt: skip


def make_task(name: str) -> Any:
    """A task as all cells have it: a start token, no-ops where they are needed to tell depth from position."""
    made: dict[str, Callable[[], Any]] = {
        "parity": lambda: pl.tasks.Parity(bos=True),
        "s3": lambda: pl.tasks.GroupWords("S3", generators="all", bos=True),
        "dyck": lambda: pl.tasks.Dyck(k=2, max_depth=10, noop=0.2, target="state", bos=True),
        "counter": lambda: pl.tasks.Counter(max_depth=10, noop=0.2, bos=True),
    }
    if name not in made:
        raise pl.InputError(f"unknown task {name!r}. Allowed: {', '.join(TASKS)}")
    return made[name]()


def build(config: Mapping[str, Any], task: Any, seed: int) -> pl.HookedModel:
    """The model of a cell, at its random initialisation."""
    formal = pl.models.FormalConfig.for_task(
        config["arch"], task, seed=seed, embedding_std=config["embedding_std"],
        d_conv=None if config["convolution"] else 1,
    )  # fmt: skip
    return pl.wrap(pl.models.build(formal))


def training(config: Mapping[str, Any]) -> pl.training.TrainConfig:
    """Training settings of a cell: a curriculum over length, a constant rate, a decay once the task is learned."""
    return pl.training.TrainConfig(
        steps=config["steps"], lr=5e-4 if config["arch"] == "transformer" else 1e-3,
        decay_steps=min(200, config["steps"] // 2), length=config["length"],
        start_length=min(6, config["length"]), seed=config["seed"], threads=1,
    )  # fmt: skip

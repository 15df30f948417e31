"""The paper's pretrained experiments: fine-tune Pythia and Mamba on Parity, S3 and Dyck, then probe, ablate, erase, patch.

    probelens run paper-pretrained                                             Pythia-160M, 410M and Mamba-130M, one GPU
    probelens run paper-pretrained --preset cpu --model FOLDER,FOLDER          two cores, with models of `paper-pretrain`
    probelens run paper-pretrained --preset smoke --model FOLDER               under a minute; proves that it runs

A cell is one model on one task. The task is written in the model's own vocabulary, see `words.py`: symbols and answers
are single tokens, the model keeps its head and is fine-tuned whole. What is measured is that of `paper-formal`, and the
probes also on the model as it was before fine-tuning. A cell that has not learned its task is probed and not ablated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.pretrained.words import InVocabulary
from probelens.examples.refit_the_probe.shared.measuring import BATCH, Cell, measure, saved_as, shown, trained_rows
from probelens.examples.refit_the_probe.shared.models import identified, is_mamba, load_pretrained, mixed
from probelens.examples.refit_the_probe.shared.setup import LABELS, PROBED, TASKS, TITLES, make_task
from probelens.experiments import RunRecord, Status
from probelens.experiments.recipe import finished_rows, run_recipe, settings_of
from probelens.experiments.settings import at_least
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.models.untrained import untrained
from probelens.running.collect import collect

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


class PretrainedCell(Cell):
    """A fine-tuned model with what it is measured on."""

    kinds = ("random", "random_matched")

    @functools.cached_property
    def untrained(self) -> pl.HookedModel:
        """The same architecture at its random initialisation."""
        return untrained(self.model, self.seed + 1000)

    @saved_as("probes_before", pl.ProbeResult)
    def before(self) -> pl.ProbeResult:
        """Probes by layer of the pretrained model, before it was fine-tuned."""
        fit = self.data["probe"]
        return pl.probe(
            collect(load_pretrained(self.config), fit, LAYER_AXIS, batch_size=BATCH),
            {label: fit.labels[label] for label in PROBED[self.config["task"]]}, fit.groups, mask=fit.mask,
            tokens=fit.tokens, seed=self.seed,
        )  # fmt: skip


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Fine-tune and measure one model on one task; every number as rows, distinguished by the column ``kind``."""
    status, model = Status(folder), load_pretrained(config)
    task = InVocabulary(make_task(config["task"]), model.tokenizer)
    config = {**config, "arch": "mamba" if is_mamba(model) else "transformer"}
    trained = pl.training.train(
        model, task, config=training(config), checkpoint_dir=folder / "train",
        progress=shown(status, config["steps"], "fine-tuning"),
        backend=mixed(model, bf16=config["bf16"], checkpointing=config["checkpointing"]),
    )  # fmt: skip
    trained.save(folder / "training.safetensors")
    rows = trained_rows(trained)
    rows[-1] |= {"symbols": " ".join(task.symbols), "answers": " ".join(task.answers)}
    cell = PretrainedCell(config, folder, model, task)
    cell.labels = tuple(name for name in LABELS[config["task"]] if name in config["labels"] or not config["labels"])
    if cell.behaviour().accuracy(config["length"]) < config["least"]:
        cell.config = {**config, "parts": ["probes"]}
    rows += [{**row, "kind": "probe_before"} for row in cell.before().rows]
    rows += measure(cell, status)
    about = {"model": Path(config["model"]).name, "arch": config["arch"], "task": config["task"], "train_seed": config["seed"],
             "n_layers": model.cfg.n_layers}  # fmt: skip
    return [{**about, **row, **about} for row in rows]


def training(config: Mapping[str, Any]) -> pl.training.TrainConfig:
    """Training settings of a cell: like those of the formal models, with a curriculum over length."""
    return pl.training.TrainConfig(
        steps=config["steps"], lr=config["lr"], batch_size=config["batch_size"],
        warmup=min(100, config["steps"] // 4), decay_steps=min(200, config["steps"] // 4), length=config["length"],
        start_length=min(6, config["length"]), seed=config["seed"],
    )  # fmt: skip


def run(config: Config, progress: bool = True) -> Path:
    """Run what is missing and write tables, figures and the report."""
    if unknown := [name for name in config.tasks if name not in TASKS]:
        raise pl.InputError(f"unknown {', '.join(map(repr, unknown))}: allowed are {', '.join(TASKS)}")
    if not (config.model and config.tasks and config.seeds):
        raise pl.InputError("model, tasks and seeds must name at least one each")
    cells, finish = config.cells(), functools.partial(report, config)
    return run_recipe("paper-pretrained", config, cells, run_cell, finish, free=FREE, progress=progress)


def report(config: Config, record: RunRecord) -> Path:
    """Write tables, figures and the report again, from saved rows alone."""
    from probelens.examples.refit_the_probe.pretrained.report import write

    return write(finished_rows(config.out), config, record)

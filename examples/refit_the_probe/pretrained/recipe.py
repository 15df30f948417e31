"""The paper's pretrained experiments: fine-tune Pythia and Mamba on Parity, S3 and Dyck, then probe, ablate, erase, patch.

    probelens run paper-pretrained                                             Pythia-160M, 410M and Mamba-130M, one GPU
    probelens run paper-pretrained --preset cpu --model FOLDER,FOLDER          two cores, with models of `paper-pretrain`
    probelens run paper-pretrained --preset smoke --model FOLDER               under a minute; proves that it runs

A cell is one model on one task. The task is written in the model's own vocabulary, see `words.py`: symbols and answers
are single tokens, the model keeps its head and is fine-tuned whole. What is measured is that of `paper-formal`, and the
probes also on the model as it was before fine-tuning. A cell that has not learned its task is probed and not ablated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.pretrained.settings import FREE, PRESETS, Config
from probelens.examples.refit_the_probe.pretrained.words import InVocabulary
from probelens.examples.refit_the_probe.shared.measuring import BATCH, Cell, measure, saved_as, shown, trained_rows
from probelens.examples.refit_the_probe.shared.models import is_mamba, load_pretrained, mixed
from probelens.examples.refit_the_probe.shared.setup import LABELS, PROBED, TASKS, make_task
from probelens.experiments import RunRecord, Status
from probelens.experiments.recipe import finished_rows, run_recipe
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.models.untrained import untrained
from probelens.running.collect import collect

__all__ = ["PRESETS", "Config", "report", "run", "run_cell"]


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

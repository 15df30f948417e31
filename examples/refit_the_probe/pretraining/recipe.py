"""Pretrain a small GPT-NeoX and a small Mamba on the standard library's source, as stand-ins for Pythia and Mamba-130M.

    probelens run paper-pretrain                     two cores: a quarter of an hour of CPU for each model
    probelens run paper-pretrain --preset smoke      seconds; proves that it runs, its models learn nothing
    probelens run paper-pretrain --preset paper      one GPU: larger models, longer

Each model lands in `models/NAME` of the run folder, as `save_pretrained` writes it, with its tokenizer: give that folder
to `paper-pretrained` and `paper-code-depth` as `--model`. Nothing is fetched. A run that was stopped continues where it
stopped.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import probelens as pl
from probelens.examples.refit_the_probe.pretraining.text import NextToken, make_tokenizer
from probelens.examples.refit_the_probe.shared.corpus import functions, held_out
from probelens.examples.refit_the_probe.shared.models import device_of, mixed, quiet
from probelens.experiments import RunRecord, Status, Store
from probelens.experiments.recipe import about_run, finished_rows, run_recipe, settings_of
from probelens.experiments.settings import at_least

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


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Pretrain one model, save it in ``folder/model``, and say how well it predicts modules it hasn't seen."""
    status = Status(folder)
    status.update("reading the corpus", 0, 1)
    seen, unseen, tokenizer = texts(config["corpus"], config["vocab"], config["functions"])
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    task, held = NextToken(seen, names), NextToken(unseen, names)
    sizes = {"d_vocab": len(tokenizer), "n_layers": config["n_layers"], "d_model": config["d_model"]}
    formal = pl.models.FormalConfig(config["arch"], seed=config["seed"], **sizes)
    model = pl.wrap(pl.models.build(formal)).to(device_of(config))

    def show(step: Mapping[str, Any]) -> None:
        status.update("training, step", int(step["step"]), config["steps"], f"loss {step['loss']:.2f}")

    result = pl.training.train(
        model, task, checkpoint_dir=folder / "train", progress=show,
        config=pl.training.TrainConfig(
            steps=config["steps"], decay_steps=config["steps"] // 5, warmup=min(100, config["steps"] // 5),
            batch_size=config["batch_size"], lr=config["lr"], length=config["length"], start_length=None,
            target_accuracy=None, eval_every=max(1, config["steps"] // 10), eval_sequences=64, seed=config["seed"],
            checkpoint_every=50,
        ),
        backend=mixed(model, bf16=config["bf16"], checkpointing=config["checkpointing"]),
    )  # fmt: skip
    module: Any = model.module
    module.config.bos_token_id = module.config.eos_token_id = tokenizer.eos_token_id
    with quiet():
        module.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows: list[dict[str, Any]] = [{**row, "kind": "training"} for row in result.history]
    rows.append({
        **predicted(model, held, seen, config), "kind": "held_out", "cpu_seconds": result.cpu_seconds,
        "n_params": result.n_params, "corpus_tokens": len(seen),
        "trained_tokens": result.steps * config["batch_size"] * config["length"],
    })  # fmt: skip
    return [{"model": config["name"], "arch": config["arch"], **row} for row in rows]


def texts(corpus: str, vocab: int, most: int | None) -> tuple[np.ndarray, np.ndarray, Any]:
    """Token ids of the modules to learn from and of the others, and the tokenizer learned from the former."""
    found = functions(corpus)
    # Spread over the corpus: the first ones are all of one module.
    found = found[:: 1 if most is None else max(1, len(found) // most)]
    seen = [code for module, code in found if not held_out(module)]
    unseen = [code for module, code in found if held_out(module)]
    if not seen or not unseen:
        raise pl.InputError(
            f"of the {len(found)} functions, {len(unseen)} are of modules that are kept out; both parts are needed. "
            "Use a corpus of more modules, or more functions."
        )
    tokenizer = make_tokenizer(seen, vocab)

    def ids(codes: list[str]) -> np.ndarray:
        encoded = tokenizer(codes, add_special_tokens=False, verbose=False)["input_ids"]
        return np.concatenate([[*part, tokenizer.eos_token_id] for part in encoded])

    return ids(seen), ids(unseen), tokenizer


def predicted(model: pl.HookedModel, held: NextToken, seen: np.ndarray, config: Mapping[str, Any]) -> dict[str, float]:
    """Loss on unseen modules, beside that of guessing by frequency."""
    windows = held.sample(200, length=config["length"], seed=config["seed"]).tokens
    with torch.no_grad(), model.evaluating():
        losses = [float(model(part, return_type="loss")) for part in windows.split(50)]
    nats = sum(losses) / len(losses)
    counts = np.bincount(seen, minlength=held.d_vocab) + 1.0
    truth = windows[:, 1:].numpy().ravel()
    unigram = -float(np.log(counts / counts.sum())[truth].mean())
    chars = sum(map(len, (held.vocab[i] for i in truth))) / len(truth)
    bits = nats / math.log(2) / chars
    return {"nats_per_token": nats, "unigram_nats_per_token": unigram, "bits_per_character": bits}


def run(config: Config, progress: bool = True) -> Path:
    """Pretrain what is missing, and put each model into ``models/NAME``."""
    if not config.archs or not set(config.archs) <= set(NAMES):
        raise pl.InputError(f"archs={config.archs!r}: allowed are {', '.join(NAMES)}")
    cells = [config.cell(arch) for arch in config.archs]

    def finish(record: RunRecord) -> None:
        store = Store(config.out)
        for arch, key in zip(config.archs, record.cells, strict=True):
            if store.done(key):
                _publish(store.cell(key) / "model", store.folder / "models" / arch)
        report(config, record)

    return run_recipe("paper-pretrain", config, cells, run_cell, finish, free=FREE, progress=progress)


def _publish(source: Path, target: Path) -> None:
    """Copy a folder, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(shutil.copytree(source, Path(scratch) / "fresh"))
        if target.exists():
            os.replace(target, Path(scratch) / "old")
        os.replace(fresh, target)


def report(config: Config, record: RunRecord) -> Path:
    """Write the table and the report again, from saved rows alone."""
    from probelens.results.plots import training_curve
    from probelens.results.report import Chart, Section, Table, write_report

    rows = finished_rows(config.out)
    curve = rows[rows["kind"] == "training"].dropna(axis=1, how="all")
    chart = Chart(
        training_curve(curve, y=("loss", "accuracy"), color="model"),
        "Loss and accuracy of the next token; accuracy on other windows of the same modules.",
        name="training",
    )
    table = rows[rows["kind"] == "held_out"].dropna(axis=1, how="all")
    lead = (
        "Small language models of Python, pretrained on the functions of the standard library. Three in ten of its modules, "
        "chosen by a hash of their names, were kept out: the table is about these."
    )
    held = Table("On modules that were kept out", table, name="held-out", open=True)
    return write_report(
        Path(config.out) / "report.html", title="Refit the probe: pretrained stand-ins", lead=lead,
        sections=[Section("Pretraining", charts=[chart], tables=[held])], **about_run(config, record),
    )  # fmt: skip

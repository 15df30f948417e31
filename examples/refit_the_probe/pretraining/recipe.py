"""Pretrain a small GPT-NeoX and a small Mamba on the standard library's source, as stand-ins for Pythia and Mamba-130M.

    probelens run paper-pretrain                     two cores: a quarter of an hour of CPU for each model
    probelens run paper-pretrain --preset smoke      seconds; proves that it runs, its models learn nothing
    probelens run paper-pretrain --preset paper      one GPU: larger models, longer

Each model lands in `models/NAME` of the run folder, as `save_pretrained` writes it, with its tokenizer: give that folder
to `paper-pretrained` and `paper-code-depth` as `--model`. Nothing is fetched. A run that was stopped continues where it
stopped.
"""

from __future__ import annotations

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
from probelens.examples.refit_the_probe.pretraining.settings import FREE, NAMES, PRESETS, Config
from probelens.examples.refit_the_probe.pretraining.text import NextToken, make_tokenizer
from probelens.examples.refit_the_probe.shared.corpus import functions, held_out
from probelens.examples.refit_the_probe.shared.models import device_of, mixed, quiet
from probelens.experiments import RunRecord, Status, Store
from probelens.experiments.recipe import about_run, finished_rows, run_recipe

__all__ = ["PRESETS", "Config", "report", "run", "run_cell"]


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

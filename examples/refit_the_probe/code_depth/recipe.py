"""Code-Depth: the layers at which a language model represents the depth of brackets and of indented blocks in real Python.

    probelens run paper-code-depth --model HuggingFaceTB/SmolLM2-135M,EleutherAI/pythia-160m
    probelens run paper-code-depth --preset cpu --model FOLDER           two cores; a folder of `paper-pretrain`, or any other
    probelens run paper-code-depth --model FOLDER --corpus python_train_0.jsonl.gz           your own CodeSearchNet file
    probelens run paper-code-depth --preset smoke --model FOLDER         seconds; proves that it runs

A cell is one frozen model with its own tokenizer; nothing is trained but probes. Three quarters of all tokens are at
depth 0, so balanced accuracy is reported: the mean recall of the classes that at least three test modules hold,
with intervals over modules. Every guess is corrected for how frequent the classes are: log p(class) is taken off the
probe's logits. The baselines are the position alone, the last four tokens alone, the embedding, and the same
architecture untrained.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.examples.refit_the_probe.code_depth.readings import Readings, profile
from probelens.examples.refit_the_probe.code_depth.settings import FREE, LABELS, PRESETS, Config
from probelens.examples.refit_the_probe.shared.corpus import functions, held_out
from probelens.examples.refit_the_probe.shared.models import is_mamba, load_pretrained
from probelens.experiments import RunRecord, Status
from probelens.experiments.recipe import finished_rows, run_recipe
from probelens.models.untrained import untrained
from probelens.running.collect import collect

__all__ = ["PRESETS", "Config", "report", "run", "run_cell"]


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Probe one frozen model: probes by layer, baselines and profile statistics as rows, told apart by ``kind``."""
    status = Status(folder)
    status.update("reading the corpus", 0, 3)
    model = load_pretrained(config)
    task = make_task(config, model.tokenizer)
    batch = task.sample(config["n"], length=config["length"], seed=config["seed"])
    sites = chosen(model, config["every"])
    status.update("running the model", 1, 3)
    acts = collect(model, batch, sites, batch_size=16)
    status.update("running it untrained", 2, 3)
    fresh = collect(untrained(model, config["seed"] + 1000), batch, sites, batch_size=16)
    status.update("probing", 2, 3)
    labels, seed = {label: batch.labels[label] for label in LABELS}, config["seed"]
    options = {"mask": batch.mask, "tokens": batch.tokens, "max_rows": config["max_rows"], "seed": seed}
    found, before = (pl.probe(some, labels, batch.groups, **options) for some in (acts, fresh))
    found.save(folder / "probes.safetensors")
    rows: list[dict[str, Any]] = []
    for label in LABELS:
        own = Readings.of(found, acts, batch, label, seed)
        rows += measured(found, own, Readings.of(before, fresh, batch, label, seed), label)
    about = {
        "model": Path(config["model"]).name, "arch": "mamba" if is_mamba(model) else "transformer", "seed": config["seed"],
        "n_layers": model.cfg.n_layers, "n_params": pl.models.n_params(model.module), "functions": len(batch),
        "modules": len(batch.groups.unique()), "corpus_digest": task.digest,
    }  # fmt: skip
    status.update("probing", 3, 3, "done")
    return [{**row, **about} for row in rows]


def make_task(config: Mapping[str, Any], tokenizer: Any) -> pl.tasks.CodeDepth:
    """Code-Depth for a tokenizer, on modules that no model of this folder was pretrained on."""
    if tokenizer is None:
        said = "the model came without a tokenizer, and it does not read bytes. Save a tokenizer in its folder."
        raise pl.InputError(said)
    corpus: Any = config["corpus"]
    if corpus == "stdlib" and config["unseen"]:
        corpus = [(module, code) for module, code in functions(max_chars=2000) if held_out(module)]
    bos = tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None
    most = config["max_depth"]
    return pl.tasks.CodeDepth(tokenizer, corpus, max_depth=most, max_indent=most, bos=bos)


def chosen(model: pl.HookedModel, every: int) -> list[str]:
    """The embedding, one block in ``every``, and the last block."""
    last = model.cfg.n_layers - 1
    blocks = sorted({*range(every - 1, last + 1, every), last})
    return ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in blocks)]


def measured(found: pl.ProbeResult, own: Readings, bare: Readings, label: str) -> list[dict[str, Any]]:
    """Rows of one label: probes, guesses, and the profile of the balanced accuracy over layers."""
    low, high = own.drawn.quantile(0.025, 0), own.drawn.quantile(0.975, 0)
    rows: list[dict[str, Any]] = []
    for i, site in enumerate(found.sites):
        row = found.row(site, label)
        rows.append({
            **{k: row[k] for k in ("site", "layer", "label", "accuracy", "lo", "hi", "n_test", "majority", "position", "last_w")},
            "kind": "probe", "classes": " ".join(map(str, own.classes)), "balanced_accuracy": float(own.balanced[i]), "balanced_lo": float(low[i]),
            "balanced_hi": float(high[i]), "untrained_balanced": float(bare.balanced[i]),
            **{f"{name}_balanced": value for name, value in own.guesses.items()},
        })  # fmt: skip
    base = max(own.guesses.values())
    return [*rows, {"kind": "indices", "label": label, "baseline": base, **profile(own.balanced, own.drawn, base)}]


def run(config: Config, progress: bool = True) -> Path:
    """Run what is missing and write tables, figure and report."""
    if not (config.model and config.seeds) or config.every < 1:
        raise pl.InputError("model and seeds must name at least one each, and every must be at least 1")
    free, finish = (*FREE, "every"), functools.partial(report, config)
    return run_recipe("paper-code-depth", config, config.cells(), run_cell, finish, free=free, progress=progress)


def report(config: Config, record: RunRecord) -> Path:
    """Write tables, figure and report again, from saved rows alone."""
    from probelens.examples.refit_the_probe.code_depth.report import write

    return write(finished_rows(config.out), config, record)

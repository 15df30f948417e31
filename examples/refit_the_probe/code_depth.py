"""Code-Depth: where along its layers a language model reads how deep in brackets and in indented blocks real Python is.

    probelens run paper-code-depth --model HuggingFaceTB/SmolLM2-135M,EleutherAI/pythia-160m
    probelens run paper-code-depth --preset cpu --model FOLDER           two cores; a folder of `paper-pretrain`, or any other
    probelens run paper-code-depth --model FOLDER --corpus python_train_0.jsonl.gz           your own CodeSearchNet file
    probelens run paper-code-depth --preset smoke --model FOLDER         seconds; proves that it runs

A cell is one frozen model with its own tokenizer; nothing is trained but probes. Three quarters of all tokens stand at
depth 0, so what is reported is balanced accuracy: the mean recall of the classes that at least three test modules hold,
with intervals over modules. Every guess is corrected for how frequent the classes are: log p(class) is taken off the
probe's logits. Beside it stand what position or the last four tokens alone give, the embedding, and the same
architecture untrained.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.examples.refit_the_probe.corpus import functions, held_out
from probelens.examples.refit_the_probe.running import (
    device_of,
    finished_rows,
    identity,
    is_mamba,
    quiet,
    run_cells,
    untrained,
)
from probelens.experiments import RunRecord, Status
from probelens.experiments.settings import at_least
from probelens.numerics.indices import READABLE, STATISTICS, profile_statistics, verdict
from probelens.probing.splits import split_by_group
from probelens.running.collect import Activations, collect
from probelens.tasks.data import Batch

__all__ = ["PRESETS", "Config", "report", "run"]

FREE = ("out", "model", "seeds", "workers")
LABELS = ("depth", "indent")
DRAWS = 1000
LEAST = 3  # modules: the recall of a class that fewer of the test modules hold is that of a function or two


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
        max_depth: Class of the greatest depth and indent told apart; deeper ones belong to it.
        every: Read every so-manieth block, and the last.
        max_rows: At most so many training rows of a probe.
        device: "auto", "cpu" or "cuda".
        workers: Cells at once; None for one a core.
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
        shared = {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE}
        if self.corpus != "stdlib":
            shared["corpus"] = str(Path(self.corpus).absolute())
        found = []
        for name, seed in itertools.product(self.model, self.seeds):
            # Absolute, since a worker of a cluster starts in another folder.
            place = str(Path(name).absolute()) if Path(name).is_dir() else name
            found.append({"recipe": "paper-code-depth", "name": f"{Path(name).name}, seed {seed}", "model": place,
                          "weights": identity(place), "seed": seed, **shared})  # fmt: skip
        return found


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"n": 40, "length": 32, "max_depth": 1, "every": 2, "max_rows": 500},
    "cpu": {"n": 400, "length": 96, "max_rows": 10000},
    "paper": {"n": 2000, "seeds": (0, 1, 2, 3)},
}  # fmt: skip


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Probe one frozen model.

    Args:
        config: As ``Config.cells`` makes it.
        folder: Where results stay.

    Returns:
        Probes by layer, baselines and profile statistics as rows, told apart by the column ``kind``.
    """
    status = Status(folder)
    status.update("reading the corpus", 0, 3)
    with quiet():
        options = {"revision": config["revision"]} if config["revision"] and not config["weights"] else {}
        model = pl.load(config["model"], device=device_of(config), dtype="float32", **options)
    task = make_task(config, model.tokenizer)
    batch = task.sample(config["n"], length=config["length"], seed=config["seed"])
    sites = chosen(model, config["every"])
    status.update("running the model", 1, 3)
    acts = collect(model, batch, sites, batch_size=16)
    status.update("running it untrained", 2, 3)
    fresh = collect(untrained(model, config["seed"] + 1000), batch, sites, batch_size=16)
    status.update("probing", 2, 3)
    labels = {label: batch.labels[label] for label in LABELS}
    both = [
        pl.probe(some, labels, batch.groups, mask=batch.mask, tokens=batch.tokens, max_rows=config["max_rows"],
                 seed=config["seed"])
        for some in (acts, fresh)
    ]  # fmt: skip
    both[0].save(folder / "probes.safetensors")
    rows: list[dict[str, Any]] = []
    for label in LABELS:
        own, bare = (Readings.of(result, some, batch, label, config["seed"])
                     for result, some in zip(both, (acts, fresh), strict=True))  # fmt: skip
        rows += measured(both[0], own, bare, label)
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
        raise pl.InputError(
            "the model came without a tokenizer, and bytes are not what it reads. Save one beside it."
        )
    corpus: Any = config["corpus"]
    if corpus == "stdlib" and config["unseen"]:
        corpus = [(module, code) for module, code in functions(max_chars=2000) if held_out(module)]
    bos = tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None
    most = config["max_depth"]
    return pl.tasks.CodeDepth(tokenizer, corpus, max_depth=most, max_indent=most, bos=bos)


def chosen(model: pl.HookedModel, every: int) -> list[str]:
    """The embedding, every so-manieth block and the last one."""
    last = model.cfg.n_layers - 1
    blocks = sorted({*range(every - 1, last + 1, every), last})
    return ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in blocks)]


@dataclasses.dataclass(frozen=True, eq=False)
class Readings:
    """What the probes of one label get right.

    Args:
        balanced: Balanced accuracy at each site. (site,)
        drawn: The same of resampled modules. (draw, site)
        guesses: Balanced accuracy of guesses that don't read the model.
        classes: The classes that count.
    """

    balanced: Tensor
    drawn: Tensor
    guesses: dict[str, float]
    classes: tuple[int, ...]

    @classmethod
    def of(cls, found: pl.ProbeResult, acts: Activations, batch: Batch, label: str, seed: int) -> Readings:
        """Score the probes again on their test sequences, corrected for the frequency of the classes."""
        split = split_by_group(batch.groups, seed=seed)
        train, test = batch[split.train], batch[split.test]
        counts = torch.bincount(
            train.labels[label][train.mask], minlength=found.coef(found.sites[0], label).shape[0]
        )
        prior = (counts / counts.sum()).log()
        hits = []
        for site in found.sites:
            logits = acts[site][split.test] @ found.coef(site, label).T + found.intercept(site, label)
            right, asked = recalls((logits - prior).argmax(-1), test, label, len(prior))
            hits.append(right)
        kept = counted(asked)
        balanced = torch.stack([(right.sum(0) / asked.sum(0))[kept].mean() for right in hits])
        guesses = {}
        for name, w in (("majority", -1), ("position", 0), ("last_w", 4)):
            right, asked = recalls(guess(train, test, label, w, len(prior)), test, label, len(prior))
            guesses[name] = float((right.sum(0) / asked.sum(0))[kept].mean())
        drawn = resampled(torch.stack(hits)[..., kept], asked[:, kept], seed)
        return cls(balanced, drawn, guesses, tuple(kept.nonzero().flatten().tolist()))


def guess(train: Batch, test: Batch, label: str, w: int, n_classes: int) -> Tensor:
    """The class that gains most over its frequency, given the position (w = 0) or the last w tokens; w = −1 for neither.

    Contexts of w tokens are backed by those of fewer, each with the weight of one example.
    """
    counts = torch.bincount(train.labels[label][train.mask], minlength=n_classes).double()
    prior = counts / counts.sum()
    if w < 0:
        return torch.full(test.tokens.shape, int(prior.argmax()))
    asked = prior.expand(*test.tokens.shape, -1)
    for size in range(1, w + 1) if w else (0,):
        keys = [_contexts(part, size) for part in (train, test)]
        _, place = torch.cat(keys).unique(dim=0, return_inverse=True)
        at, there = place[: len(keys[0])], place[len(keys[0]) :]
        keep = train.mask.flatten()
        cell = at[keep] * n_classes + train.labels[label].flatten()[keep]
        table = (
            torch.bincount(cell, minlength=(int(place.max()) + 1) * n_classes).double().reshape(-1, n_classes)
        )
        total = table.sum(-1, keepdim=True)
        asked = (table[there].reshape(asked.shape) + asked) / (total[there].reshape(*asked.shape[:2], 1) + 1)
    return (asked / prior.clamp_min(1e-12)).argmax(-1)


def _contexts(batch: Batch, w: int) -> Tensor:
    """The last w tokens at each position, or the position where w is 0. (batch · pos, w)"""
    n, length = batch.tokens.shape
    if not w:
        return torch.arange(length).repeat(n)[:, None]
    padded = torch.nn.functional.pad(batch.tokens, (w - 1, 0), value=-1)
    return padded.unfold(1, w, 1).reshape(n * length, w)


def measured(found: pl.ProbeResult, own: Readings, bare: Readings, label: str) -> list[dict[str, Any]]:
    """Rows of one label: probes beside guesses, and where along the layers the balanced accuracy rises."""
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
    return [
        *rows,
        {"kind": "indices", "label": label, "baseline": base, **profile(own.balanced, own.drawn, base)},
    ]


def recalls(guess: Tensor, test: Batch, label: str, n_classes: int) -> tuple[Tensor, Tensor]:
    """Right answers, and answers asked for, of each class in each module. both (module, class)"""
    truth, keep = test.labels[label], test.mask
    _, module = test.groups.unique(return_inverse=True)
    cell = (module[:, None] * n_classes + truth.clamp_min(0))[keep]
    size = (int(module.max()) + 1) * n_classes
    hit = (guess == truth)[keep].double()
    right = torch.bincount(cell, weights=hit, minlength=size)
    return right.reshape(-1, n_classes), torch.bincount(cell, minlength=size).double().reshape(-1, n_classes)


def counted(asked: Tensor) -> Tensor:
    """Which classes enough modules hold for their recall to be worth a share of the mean; all that any holds if too few are.

    Args:
        asked: Positions of each class in each module. (module, class)

    Returns:
        (class,) bool
    """
    held = (asked > 0).sum(0)
    return held >= LEAST if int((held >= LEAST).sum()) > 1 else held > 0


def resampled(hits: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Balanced accuracy of resampled modules at each site. (draw, site)

    Only draws that hold every class of the sample count: without its rarest and hardest class the mean recall is
    that of an easier task. A class that one module holds alone therefore adds nothing to the spread.
    """
    rng = np.random.default_rng([seed, 11])
    n, held = len(counts), counts.sum(0) > 0
    kept: list[Tensor] = []
    for _ in range(100):
        weights = torch.from_numpy(rng.multinomial(n, np.full(n, 1 / n), DRAWS)).double()
        kept.append(weights[(weights @ counts > 0)[:, held].all(1)])
        if sum(map(len, kept)) >= DRAWS:
            break
    weights = torch.cat(kept)[:DRAWS]
    if not len(weights):
        return torch.full((1, len(hits)), torch.nan, dtype=torch.float64)
    rates = torch.einsum("dm,smc->sdc", weights, hits[..., held]) / (weights @ counts[:, held])
    return rates.mean(-1).T


def profile(own: Tensor, drawn: Tensor, base: float) -> dict[str, Any]:
    """Profile statistics of the balanced accuracy, their intervals, and the verdict by their bounds."""
    if float(own.max() - base) / (1 - base) < READABLE:
        return {"verdict": "not readable", "why": f"at most {own.max():.3f}, where a guess gets {base:.3f}"}
    at, spread = profile_statistics(own, base), profile_statistics(drawn, base)
    low = {name: float(spread[name].nanquantile(0.025)) for name in STATISTICS}
    high = {name: float(spread[name].nanquantile(0.975)) for name in STATISTICS}
    word, why = verdict(low, high)
    row: dict[str, Any] = {"verdict": word, "why": why}
    for name in STATISTICS:
        row |= {name: float(at[name]), f"{name}_lo": low[name], f"{name}_hi": high[name]}
    return row


def run(config: Config, progress: bool = True) -> Path:
    """Run what is missing and write tables, figure and report.

    Args:
        config: Settings.
        progress: Show progress.

    Returns:
        The run folder.

    Raises:
        probelens.InputError: No model, or a folder that holds another run.
        probelens.ProbelensError: A cell failed; the others are kept and reported.
    """
    if not (config.model and config.seeds) or config.every < 1:
        raise pl.InputError("model and seeds must name at least one each, and every must be at least 1")
    free = (*FREE, "every")
    return run_cells(
        "paper-code-depth",
        config,
        config.cells(),
        run_cell,
        free,
        progress,
        lambda record: report(config, record),
    )


def report(config: Config, record: RunRecord) -> Path:
    """Write tables, figure and report again, from saved rows alone.

    Args:
        config: Settings of the run; its ``out`` is the run folder.
        record: What the run folder says about itself.

    Returns:
        The report's file.

    Raises:
        probelens.StoreError: No cell of the run is finished.
    """
    from probelens.examples.refit_the_probe.code_depth_report import write

    return write(finished_rows(config.out), config, record)

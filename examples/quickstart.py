"""Take a trained LSTM and Transformer, and see where the depth of brackets is readable, needed, sufficient and used.

    probelens run quickstart                    the trained models that come with probelens
    probelens run quickstart --trained none     train them first

Two cores take about two minutes, and some more to train. The run folder gets `report.html` (open it in
a browser, it needs no network), `rows.parquet` (every number, tidy), and for each model its checkpoint and results. A
second run finds the finished models and only writes the report again.

To try it on a model of your own, copy this file and change `train_model`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.errors import at_least
from probelens.examples import trained
from probelens.experiments import RunRecord, Status, Store
from probelens.experiments.recipe import finished_rows, run_recipe, settings_of
from probelens.results.files import atomic_path

LABELS = {"depth": "depth (open brackets, 0 to 10)", "top": "top of stack (type of the innermost open bracket)"}
NAMES = {"lstm": "LSTM", "gru": "GRU", "transformer": "Transformer", "mamba": "Mamba", "mamba2": "Mamba-2"}
FREE = ("out", "archs", "workers")  # models may be added to a run; any other change makes it another run
LENGTHS = (40, 60, 80, 100, 120)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the quickstart.

    Args:
        out: Run folder.
        archs: Models: "lstm", "gru", "transformer", "mamba", "mamba2".
        seed: Of initial weights, data, splits and controls.
        length: Tokens in a training sequence.
        steps: Most training steps; training stops earlier at its target.
        n_probe: Sequences for probes.
        n_ablate: Sequences for ablations.
        n_pairs: Clean/corrupted pairs for patching.
        controls: Random subspaces compared with each ablation, of each kind.
        trained: Where trained models are from: "shipped" with probelens, where it has them of these settings; the folder of
            a former run; or "none" to train.
        workers: Models at once; None for one per core.
    """

    out: str = "runs/quickstart"
    archs: tuple[str, ...] = ("lstm", "transformer")
    seed: int = 0
    length: int = 40
    steps: int = 3000
    n_probe: int = 200
    n_ablate: int = 60
    n_pairs: int = 48
    controls: int = 20
    trained: str = "shipped"
    workers: int | None = None

    def __post_init__(self) -> None:
        at_least(self, seed=0, length=2, steps=1, n_probe=5, n_ablate=1, n_pairs=1, controls=0, workers=1)

    def cell(self, arch: str) -> dict[str, Any]:
        """The settings on which one model's results depend."""
        return {"recipe": "quickstart", "name": NAMES.get(arch, arch), "arch": arch, **settings_of(self, FREE)}


# `smoke` only proves that everything runs: its models don't learn the task.
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 30, "n_probe": 30, "n_ablate": 8, "n_pairs": 4, "controls": 2, "length": 16}
}


def make_task() -> pl.tasks.Dyck:
    """Dyck-2 of depth 10 with no-ops; the model answers depth and innermost bracket at every position."""
    return pl.tasks.Dyck(k=2, max_depth=10, noop=0.2, target="state", bos=True)


def untrained(arch: str, seed: int) -> pl.HookedModel:
    """A model at its random initialisation."""
    return pl.wrap(pl.models.build(pl.models.FormalConfig.for_task(arch, make_task(), seed=seed, embedding_std=1.0)))


def train_model(
    config: Mapping[str, Any], folder: Path, status: Status
) -> tuple[pl.HookedModel, pl.training.TrainResult]:
    """The trained model of one cell, found or trained; an interrupted training continues where it stopped."""
    if found := trained.find(config):
        for file, name in zip(found, ("model.safetensors", "training.safetensors"), strict=True):
            with atomic_path(folder / name) as part:
                part.write_bytes(file.read_bytes())
        return pl.wrap(pl.models.load(folder)), pl.training.TrainResult.load(folder / "training.safetensors")
    task, model = make_task(), untrained(config["arch"], config["seed"])
    recurrent_state = config["arch"] in ("mamba", "mamba2")

    def show(step: Mapping[str, Any]) -> None:
        status.update("training, step", int(step["step"]), config["steps"], f"accuracy {step['accuracy']:.2f}")

    result = pl.training.train(
        model, task, checkpoint_dir=folder, progress=show, backend="reference" if recurrent_state else None,
        config=pl.training.TrainConfig(
            steps=config["steps"], batch_size=32, lr=2e-3, warmup=50, grow_at=0.95, target_accuracy=0.95,
            decay_steps=min(200, config["steps"] // 2), eval_sequences=128, length=config["length"],
            seed=config["seed"], threads=1,
        ),
    )  # fmt: skip
    status.update("training, step", result.steps, result.steps)
    return model, result


def run_cell(config: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train one model and measure it. Results stay in ``folder``; the rows are what a table needs."""
    task, status = make_task(), Status(folder)
    model, training = train_model(config, folder, status)
    lengths = tuple(dict.fromkeys((config["length"], *LENGTHS)))
    status.update("measuring, part", 0, 2)
    behaviour = pl.training.evaluate(model, task, lengths, n=128, trained_length=config["length"], seed=config["seed"])
    n, length, seed = config["n_pairs"], config["length"], config["seed"]
    pairs = {
        name: aligned(task.pairs(40 * n, length, seed, label="state", kind=kind), n)
        for name, kind in (("depth", "depth"), ("top", "type"))
    }
    status.update("measuring, part", 1, 2)
    found = pl.profile(
        model, task, labels=list(LABELS), length=config["length"], n_probe=config["n_probe"],
        n_ablate=config["n_ablate"], pairs=pairs, untrained=untrained(config["arch"], config["seed"] + 1000),
        controls=config["controls"], seed=config["seed"],
    )  # fmt: skip
    training.save(folder / "training.safetensors")
    behaviour.save(folder / "behaviour.safetensors")
    found.save(folder / "profile.safetensors")
    status.update("measuring, part", 2, 2, "done")
    return tidy(config, training, behaviour, found)


def aligned(pairs: pl.PatchPairs, n: int) -> pl.PatchPairs:
    """Pairs that were edited at one and the same position, so that a map over positions can be read."""
    common = pairs.edit_pos.bincount().argmax()
    return pairs[(pairs.edit_pos == common).nonzero().flatten()[:n]]


def tidy(config: Mapping[str, Any], training: Any, behaviour: Any, found: pl.Profile) -> list[dict[str, Any]]:
    """Every number of a cell as rows, distinguished by the column ``kind``."""
    tables = {"training": training.to_dataframe(), "behaviour": behaviour.to_dataframe()}
    own = [{**row, "kind": kind} for kind, table in tables.items() for row in table.to_dict("records")]
    return [{"model": config["name"], **row} for row in [*own, *found.measurements()]]


def run(config: Config, progress: bool = True) -> Path:
    """Run what is missing and write the report."""
    if not config.archs or not set(config.archs) <= set(NAMES):
        raise pl.InputError(f"archs={config.archs!r}: allowed are {', '.join(NAMES)}")
    cells, finish = [config.cell(arch) for arch in config.archs], functools.partial(report, config)
    for cell in cells:
        trained.find(cell)  # a folder without such a model is refused before the run's own is taken
    return run_recipe("quickstart", config, cells, run_cell, finish, free=FREE, progress=progress)


def report(config: Config, record: RunRecord) -> Path:
    """Write the table and the report again, from saved results alone."""
    from probelens.examples.quickstart_report import write

    finished_rows(config.out, record.cells)
    store = Store(config.out)
    cells = [(store.config(key), store.cell(key)) for key in record.cells if store.done(key)]
    return write(store, cells, config, record)

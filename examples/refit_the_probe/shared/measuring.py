"""One trained model: what is measured on it, each result kept as its own file of the cell's folder.

A result that is in the folder is not measured again, so a cell that was killed continues where it stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import probelens as pl
from probelens.ablation.controls import CONTROLS, Control
from probelens.ablation.erase import ErasureResult
from probelens.examples.refit_the_probe.shared.setup import LABELS, PAIRS, PROBED, RANKS, WHAT, build
from probelens.experiments import Status
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.models.evaluation import EvalResult
from probelens.models.training import TrainResult
from probelens.numerics.indices import ProfileIndices, profile_indices
from probelens.patching.final_layer import PatchSitesResult
from probelens.results.result import Result
from probelens.running.collect import collect
from probelens.subspaces.fitted import probe_rows

R = TypeVar("R", bound=Result)
LATE = 16  # short prefixes recur in every split, so later positions are also reported separately
SPANS = ("all", "late")
BATCH = 100


def saved_as(name: str, kind: type[R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a method of ``Cell`` read its result from the cell's folder, or save it there, as ``name`` of its arguments."""

    def decorate(compute: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(compute)
        def result(cell: Cell, *args: Any) -> R:
            path = cell.folder / f"{name.format(*args)}.safetensors"
            if path.exists():
                return kind.load(path)
            found = compute(cell, *args)
            found.save(path)
            return found

        return result

    return decorate


class Cell:
    """A trained model with the data it is measured on; each piece is made when a result first needs it."""

    kinds: tuple[Control, ...] = CONTROLS

    def __init__(self, config: Mapping[str, Any], folder: Path, model: pl.HookedModel, task: Any) -> None:
        self.config, self.folder, self.model, self.task = config, folder, model, task
        self.labels, self.seed, self.length = LABELS[config["task"]], config["seed"], config["length"]

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Disjoint sets of sequences: for probes, for erasers, and to measure ablations on."""
        sizes = {name: self.config[f"n_{name}"] for name in ("probe", "leace", "held")}
        return self.task.splits(sizes, length=self.length, seed=self.seed)

    @functools.cached_property
    def untrained(self) -> pl.HookedModel:
        """The same architecture at another random initialisation."""
        return build(self.config, self.task, self.seed + 1000)

    @saved_as("probes_{}", pl.ProbeResult)
    def read(self, span: str) -> pl.ProbeResult:
        """Probes by layer beside their baselines, on all positions or on late ones only."""
        fit = self.data["probe"]
        mask = fit.mask.clone()
        if span == "late":
            mask[:, : min(LATE, self.length // 2) + int(self.task.bos)] = False
        return pl.probe(
            collect(self.model, fit, LAYER_AXIS, batch_size=BATCH),
            {label: fit.labels[label] for label in PROBED[self.config["task"]]}, fit.groups, mask=mask,
            tokens=fit.tokens, untrained=collect(self.untrained, fit, LAYER_AXIS, batch_size=BATCH),
            control_task=span == "all", mdl=span == "all", seed=self.seed,
        )  # fmt: skip

    def indices(self, label: str, span: str) -> ProfileIndices:
        """Profile statistics and verdict of one label."""
        found = self.read(span)
        row = found.row(found.sites[0], label)
        baseline = max(row[k] for k in ("majority", "position", "last_w") if row.get(k) is not None)
        solved = self.behaviour().accuracy(self.length, "late")
        return profile_indices(found.sequences(label)[None], baseline, solved=solved, seed=self.seed)

    @saved_as("behaviour", EvalResult)
    def behaviour(self) -> EvalResult:
        """Accuracy of the model's answers by length."""
        lengths = tuple(dict.fromkeys((self.length, *self.config["lengths"])))
        return pl.training.evaluate(
            self.model, self.task, lengths, n=256, trained_length=self.length, late=min(20, self.length // 2),
            seed=self.seed, backend="reference" if self.config["arch"] in ("mamba", "mamba2") else None,
        )  # fmt: skip

    @saved_as("{1}_{0}", pl.AblationResult)
    def ablation(self, label: str, what: str) -> pl.AblationResult:
        """The probe's rows or the span of the class means, all of it or the best direction, taken out at each layer."""
        return pl.ablate(
            self.model, self.data["held"], self.read("all"), label=label, target=self.task.target,
            directions="filter" if what in ("direction", "rows") else "class_means",
            rank=1 if what in ("direction", "mean_direction") else None,
            controls=self.config["controls"], kinds=self.kinds, batch_size=BATCH, seed=self.seed,
        )  # fmt: skip

    @saved_as("interchange_{}", pl.InterchangeResult)
    def interchanged(self, label: str) -> pl.InterchangeResult:
        """Whether the answer follows the class means of another run, at each layer."""
        return pl.interchange(
            self.model, self.pairs(label), self.read("all"), label=label, controls=max(1, self.config["controls"] // 4),
            batch_size=BATCH, seed=self.seed,
        )  # fmt: skip

    def pairs(self, name: str) -> pl.PatchPairs:
        """Clean/corrupted pairs that differ in a variable, which names them."""
        return self.task.pairs(self.config["n_pairs"], self.length, self.seed, **PAIRS[self.config["task"]][name])

    @saved_as("{1}_{0}", ErasureResult)
    def erased(self, label: str, method: Any) -> ErasureResult:
        """LEACE or INLP at every layer."""
        fit = self.data["leace"]
        return pl.erase(
            self.model, fit if method == "leace" else fit[: self.config["n_inlp"]], self.data["held"], label=label,
            target=self.task.target, method=method, controls=self.config["controls"], kinds=self.kinds, batch_size=BATCH,
            seed=self.seed,
        )  # fmt: skip

    @saved_as("dose_{}", pl.DoseResult)
    def dose(self, label: str, ranks: Sequence[int]) -> pl.DoseResult:
        """The first directions of INLP, a few and more, beside random subspaces of as many."""
        return pl.dose_response(
            self.model, self.data["held"], self.erased(label, "inlp").subspaces, ranks, refit=False, label=label,
            controls=self.config["controls"], target=self.task.target, kinds=("random",), batch_size=BATCH,
            seed=self.seed,
        )  # fmt: skip

    @saved_as("length_{1}_{0}", pl.LengthTransfer)
    def transfer(self, label: str, what: str) -> pl.LengthTransfer:
        """What the subspaces, frozen at the trained length, cost at longer ones."""
        spaces = self.erased(label, what).subspaces if what == "leace" else probe_rows(self.read("all"), label, rank=1)
        return pl.length_transfer(
            self.model, self.task, spaces, self.config["lengths"], trained_length=self.length, label=label,
            n=self.config["n_length"], controls=max(1, self.config["controls"] // 4),
            kinds=("random", "random_matched"), exclude=self.data, batch_size=BATCH, seed=self.seed,
        )  # fmt: skip

    @saved_as("sites_{}", PatchSitesResult)
    def sites(self, name: str) -> PatchSitesResult:
        """Every reading of "patch a middle position at the final layer"."""
        return pl.patch_sites(self.model, self.pairs(name), batch_size=BATCH, seed=self.seed)

    @saved_as("convolution", pl.ComponentResult)
    def convolution(self) -> pl.ComponentResult:
        """The short convolution taken away from the trained model, in each sense of it."""
        held, target = self.data["held"], self.task.target
        return pl.ablate_convolution(self.model, held, target=target, batch_size=BATCH, seed=self.seed)


def measure(cell: Cell, status: Status) -> list[dict[str, Any]]:
    """All parts that the cell's config asks for, as rows."""
    config, rows = cell.config, list[dict[str, Any]]()
    parts: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
        ("behaviour", lambda: _tidy("behaviour", cell.behaviour()))
    ]
    if "probes" in config["parts"]:
        parts += [(f"probes, {span}", partial(_read, cell, span)) for span in SPANS]
    for label in cell.labels if "erasure" in config["parts"] else ():
        parts += [(f"{what}, {label}", partial(_ablated, cell, label, what)) for what in WHAT]
        parts.append((f"dose, {label}", partial(_dose, cell, label)))
        parts.append((f"interchange, {label}", partial(_interchanged, cell, label)))
        for what in ("direction", "leace") if config["lengths"] else ():
            parts.append((f"lengths, {what}, {label}", partial(_lengths, cell, label, what)))
    if "patching" in config["parts"]:
        parts += [(f"sites, {name}", partial(_sites, cell, name)) for name in PAIRS[config["task"]]]
    if "convolution" in config["parts"] and config["arch"] in ("mamba", "mamba2"):
        parts.append(("convolution", lambda: _tidy("convolution", cell.convolution())))
    for i, (name, compute) in enumerate(parts):
        status.update("measuring, part", i, len(parts), name)
        rows += compute()
    status.update("measuring, part", len(parts), len(parts), "done")
    return rows


def shown(status: Status, steps: int, doing: str = "training") -> Callable[[Mapping[str, Any]], None]:
    """What ``train`` calls to show its progress: accuracy and length at each step."""

    def show(step: Mapping[str, Any]) -> None:
        said = f"accuracy {step['accuracy']:.2f} at length {step['length']}"
        status.update(f"{doing}, step", int(step["step"]), steps, said)

    return show


def trained_rows(trained: TrainResult) -> list[dict[str, Any]]:
    """The history of a training as rows; the last one also says what came of it."""
    rows = [{**row, "kind": "training"} for row in trained.history]
    rows[-1] |= {"n_params": trained.n_params, "learned": trained.reached, "cpu_seconds": trained.cpu_seconds}
    return rows


def _tidy(kind: str, result: Any, **columns: Any) -> list[dict[str, Any]]:
    # A table may have a column `kind` itself; here it says which table the row is from.
    return [{**row, **columns, "kind": kind} for row in result.to_dataframe().to_dict("records")]


def _read(cell: Cell, span: str) -> list[dict[str, Any]]:
    rows = _tidy("probe", cell.read(span), span=span)
    for label in PROBED[cell.config["task"]]:
        found = cell.indices(label, span)
        row: dict[str, Any] = {
            "kind": "indices", "span": span, "label": label, "verdict": found.verdict, "why": found.reason,
            "baseline": float(found.baseline.mean()),
        }  # fmt: skip
        for item in found.to_dataframe().dropna(subset=["statistic"]).to_dict("records"):
            name = item["statistic"]
            row |= {name: item["estimate"], f"{name}_lo": item["low"], f"{name}_hi": item["high"]}
        rows.append(row)
    return rows


def _ablated(cell: Cell, label: str, what: str) -> list[dict[str, Any]]:
    rows = cell.erased(label, what).rows if what in ("leace", "inlp") else cell.ablation(label, what).targets()
    return [{**row, "label": label, "what": what, "kind": "ablation"} for row in rows]


def _interchanged(cell: Cell, label: str) -> list[dict[str, Any]]:
    # Of random subspaces the one that most answers followed, which is what the verdict compares with.
    found = cell.interchanged(label).to_dataframe().sort_values("iia", kind="stable", na_position="first")
    kept = found.drop_duplicates(["site", "condition"], keep="last").sort_index()
    records: list[dict[Any, Any]] = kept.to_dict("records")
    return [{**row, "label": label, "kind": "interchange"} for row in records]


def _dose(cell: Cell, label: str) -> list[dict[str, Any]]:
    largest = max(space.rank for space in cell.erased(label, "inlp").subspaces.values())
    ranks = [rank for rank in RANKS if rank <= largest]
    return _targets("dose", cell.dose(label, ranks), what="inlp", label=label) if ranks else []


def _lengths(cell: Cell, label: str, what: str) -> list[dict[str, Any]]:
    return _targets("length", cell.transfer(label, what), what=what, label=label)


def _targets(kind: str, result: Any, **columns: Any) -> list[dict[str, Any]]:
    return [row for row in _tidy(kind, result, **columns) if row["condition"] == "target"]


def _sites(cell: Cell, name: str) -> list[dict[str, Any]]:
    try:
        return _tidy("site", cell.sites(name), pairs=name)
    except pl.MetricError as err:
        # A model that answers no pair has no recovery to report; the row says so.
        return [{"kind": "site", "pairs": name, "problem": str(err)}]

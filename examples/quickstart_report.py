"""The quickstart's report: made from saved results only, so it can be written again at any time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import probelens as pl
from probelens.experiments import RunRecord, Store
from probelens.experiments.recipe import about_run
from probelens.models.evaluation import EvalResult
from probelens.models.training import TrainResult
from probelens.results import plots
from probelens.results.report import Chart, Section, Table, write_report

SAYS = {"depth": "depth", "top": "top of stack"}
PAIRS = {
    "depth": "one early opening bracket of the clean sequence is a closing one in the corrupted one, so that the "
    "depth at the end differs by two",
    "top": "the bracket that is innermost at the end has the other type in the corrupted sequence",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model's saved results."""

    name: str
    training: TrainResult
    behaviour: EvalResult
    profile: pl.Profile
    n_params: int


def write(store: Store, cells: Sequence[tuple[Mapping[str, Any], Path]], config: Any, record: RunRecord) -> Path:
    """Write ``report.html`` into the run folder."""
    found = [
        Cell(
            about["name"],
            TrainResult.load(folder / "training.safetensors"),
            EvalResult.load(folder / "behaviour.safetensors"),
            pl.Profile.load(folder / "profile.safetensors"),
            pl.models.n_params(pl.models.load(folder)),
        )
        for about, folder in cells
    ]
    names = " and ".join(f"the {cell.name}" for cell in found)
    lead = (
        f"Small language models, {names}, were trained to read sequences of {config.length} brackets of two types, "
        "nested at most ten deep, and to answer at every position how many brackets are open and which type the "
        "innermost one has. Below: where in each model these two variables can be read, whether removing them hurts, "
        "whether putting them back repairs the answer, and whether the answer follows when only their directions are taken "
        "from another run. A variable that can be read need not be used."
    )
    needed = [_needed(cell, config) for cell in found]
    return write_report(
        store.folder / "report.html",
        title="Nested brackets: where depth and innermost bracket are kept",
        lead=lead,
        sections=[
            _answers(found),
            _behaviour(found, config),
            _readable(found),
            *needed,
            _sufficient(found),
            _used(found),
        ],
        findings=[sentence for cell in found for sentence in findings(cell)],
        measured={
            "Task": "Dyck-2, at most 10 deep, with no-op tokens (probability 0.2): legal prefixes of nested brackets",
            "Models": "; ".join(f"{c.name}, 4 layers, {c.n_params:,} parameters" for c in found),
            "Answer": "one of 21 classes at every position: depth 0, or depth 1 to 10 with the type on top",
            "Probed labels": "depth (11 classes) and top of stack (empty, ( or [ )",
            "Sequences": f"{config.n_probe} for probes (60/20/20), {config.n_ablate} others for ablations, "
            f"{config.n_pairs} clean/corrupted pairs of each kind",
            "Seeds": f"one training run each (seed {config.seed}): intervals are over sequences and say nothing about "
            "how another training run would differ",
        },
        **about_run(config, record),
    )


def findings(cell: Cell) -> list[str]:
    """The main results of one model, one sentence each."""
    found = cell.profile
    late = f"{found.behaviour['late']:.1%} of positions after the 20th correctly at the length it was trained on"
    out = [f"{cell.name}: answers {late}."]
    return out + [f"{cell.name}, {line.strip()}" for label in found.probes.labels for line in found.said(label)[:1]]


def _answers(cells: Sequence[Cell]) -> Section:
    found = [cell.profile.answers().drop(columns=["site"]).assign(model=cell.name) for cell in cells]
    rows = pd.concat(found)
    return Section(
        "Four questions",
        "Readable, needed, sufficient, used: one row a layer, each answer beside the number that it rests on.",
        [],
        [Table("The four answers by layer", rows[["model", *rows.columns[:-1]]], open=True)],
        explain=("questions", "layers"),
    )


def _behaviour(cells: Sequence[Cell], config: Any) -> Section:
    by_length = pd.concat([c.behaviour.to_dataframe().assign(model=c.name) for c in cells])
    by_length = by_length[by_length["span"] == "all"]
    training = pd.concat([c.training.to_dataframe().assign(model=c.name) for c in cells])
    charts = [
        Chart(
            plots.length_curve(by_length, color="model", train_length=config.length),
            "Accuracy of the models' own answers by sequence length; 128 fresh sequences of each length.",
            name="behaviour",
        ),
        Chart(
            plots.training_curve(training, color="model"),
            "Training: loss and accuracy of each batch; the sequences get longer as the model gets better.",
            name="training",
        ),
    ]
    text = (
        "Does the model know the task at all? Both variables are part of the answer, so a model that answers well must "
        "compute them. Longer sequences than in training are harder, chiefly for what has to be remembered for longer."
    )
    return Section("Behaviour", text, charts, explain=("training",))


def _readable(cells: Sequence[Cell]) -> Section:
    probes = pd.concat([c.profile.probes.to_dataframe().assign(model=c.name) for c in cells])
    task = probes[probes["control"] == "task"]
    charts = [
        Chart(
            plots.layer_profile(task[task["label"] == label], color="model"),
            f"Probe accuracy for {SAYS[label]} by layer, with 95 % intervals over test sequences; dashed: baselines and "
            "the untrained model.",
            name=f"readable-{label}",
        )
        for label in dict.fromkeys(task["label"])
    ]
    found = [(c.name, label, index) for c in cells for label, index in c.profile.indices.items()]
    rows = [{"model": m, "label": label, "verdict": index.verdict, "why": index.reason} for m, label, index in found]
    text = (
        "Where can a linear probe read each variable? A rise from one layer to the next says that the block made it "
        "easier to read. What the untrained model shows as well was there before training."
    )
    note = (
        "Readable is not used: these curves alone say nothing about what the model does with the variable. The next "
        "sections ask that."
    )
    tables = [Table("Verdict of each profile, by the bounds of its intervals", rows, open=True)]
    return Section(
        "Readable", text, charts, tables, note,
        explain=("questions", "layers", "probe", "baselines", "untrained", "interval", "profile"),
    )  # fmt: skip


def _needed(cell: Cell, config: Any) -> Section:
    charts = [
        Chart(
            cell.profile.plot_needed(label),
            f"{cell.name}: what removing the class means of {SAYS[label]} costs at each layer, beside the probe's own rows "
            "and random subspaces and, below, what a probe still reads afterwards.",
            name=f"needed-{cell.name.lower()}-{label}",
        )
        for label in cell.profile.ablations
    ]
    columns = {
        "layer": "layer", "directions": "directions", "rank": "rank", "variance": "variance", "drop": "drop", "drop lo": "lo", "drop hi": "hi", "probe": "probe_accuracy",
        "refit": "refit_accuracy", "refit MLP": "refit_mlp_accuracy", "baseline": "baseline", "effect": "effect",
        "needed": "needed", "verdict": "verdict",
    }  # fmt: skip
    rows = [
        {"label": label, **{name: row.get(column) for name, column in columns.items()}}
        for found in (cell.profile.ablations, cell.profile.filters)
        for label, result in found.items()
        for row in result.targets()
    ]
    text = (
        "Does the answer get worse when the variable is taken out? The span of its class means is removed at one layer at a "
        "time and the accuracy of the model's answers is measured again, on sequences that no probe has seen. Beside it "
        "stands what removing the probe's own rows costs: what a probe reads with need not be where the variable lies."
    )
    note = (
        "Read the two panels together. Where the refitted probe stays high, the variable is still there after the "
        "ablation, and the drop says nothing about necessity, large or small. Where random subspaces cost as much, the "
        "drop does not belong to this variable. `tautological` marks layers that the answer is read from directly, "
        "`absent` those where nothing could be read before the ablation either, `underpowered` those where nothing is read "
        "afterwards but a small residue would not be either."
    )
    tables, explain = [Table(f"{cell.name}: ablations by layer", rows)], ("ablation", "refit", "random", "tautological")
    return Section(f"Needed: {cell.name}", text, charts, tables, note, explain)


def _sufficient(cells: Sequence[Cell]) -> Section:
    charts, missing = [], []
    for cell in cells:
        for name, result in cell.profile.patches.items():
            try:
                figure = result.plot()
            except pl.MetricError as err:
                missing.append(f"{cell.name}, {SAYS[name]}: {err}")
                continue
            caption = (
                f"{cell.name}: share of the clean-corrupted gap that one patched activation restores, by layer and "
                f"position; {SAYS[name]} pairs ({PAIRS[name]}); {int(result.correct.sum())} of {len(result.correct)} pairs "
                "that both runs answer correctly."
            )
            charts.append(Chart(figure, caption, name=f"sufficient-{cell.name.lower()}-{name}"))
    text = (
        "Does putting the variable back repair the answer? The activation at one layer and position of the clean run is "
        "copied into the corrupted run, and the answer at the last position is read again. Position 0 is the start token. "
        "All pairs of a map were edited at the position marked."
    )
    note = (
        "The last layer at the last position restores all of it by construction, since the answer is read from there."
    )
    explain = ("patching", "recovery", "vacuous")
    return Section("Sufficient", text, charts, note="\n\n".join([note, *missing]), explain=explain)


def _used(cells: Sequence[Cell]) -> Section:
    charts, rows = [], []
    columns = ("layer", "rank", "n", "iia", "iia_lo", "iia_hi", "p_adjusted", "verdict")
    for cell in cells:
        for label, result in cell.profile.interchanges.items():
            caption = (
                f"{cell.name}: share of pairs whose answer becomes that of the other run when only the span of the class "
                f"means of {SAYS[label]} is taken from it, at all positions; beside it everything, everything but that span, "
                "and random subspaces."
            )
            charts.append(Chart(result.plot(), caption, name=f"used-{cell.name.lower()}-{label}"))
            rows += [{"model": cell.name, "label": label, **{k: r.get(k) for k in columns}} for r in result.targets()]
    text = (
        "Does the model follow? Two runs differ in the variable. Only the part of the activation in the span of the class "
        "means is taken from the one and put into the other."
    )
    return Section("Used", text, charts, [Table("Interchanges by layer", rows)], explain=("interchange",))

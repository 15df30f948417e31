"""The quickstart's report: made from saved results only, so it can be written again at any time."""

from __future__ import annotations

import dataclasses
from collections import Counter
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
        "and whether putting them back repairs the answer. A variable that can be read need not be used."
    )
    needed = [_needed(cell, config) for cell in found]
    return write_report(
        store.folder / "report.html",
        title="Nested brackets: where depth and innermost bracket are kept",
        lead=lead,
        sections=[_behaviour(found, config), _readable(found), *needed, _sufficient(found)],
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
    for label in found.probes.labels:
        index, best = found.indices[label], found.probes.best(label)
        first = found.probes.row(found.probes.sites[0], label)
        sentence = (
            f"{cell.name}, {SAYS[label]}: read best at {_place(best)} with {best['accuracy']:.1%} "
            f"(embedding {first['accuracy']:.1%}, best guess without a state {found.baseline[label]:.1%}"
        )
        if best.get("untrained") is not None:
            sentence += f", untrained model there {best['untrained']:.1%}"
        out.append(f"{sentence}); the profile is {index.verdict}.")
        out.append(f"{cell.name}, {SAYS[label]}: {_ablated(found.ablations[label])}")
    return out


def _place(row: Mapping[str, Any]) -> str:
    return "the embedding" if row["layer"] == -1 else f"layer {row['layer']}"


def _ablated(result: pl.AblationResult) -> str:
    targets = result.targets()
    if all(row["verdict"] == "floor" for row in targets):
        return "the model has not learned the task well enough for an ablation to cost anything."
    worst = max(targets, key=lambda row: row["drop"])
    random = []
    for kind, said in (("random", "of equal rank"), ("random_matched", "that remove equal variance")):
        drops = [r["drop"] for r in result.rows if r["site"] == worst["site"] and r["condition"] == kind]
        if drops:
            random.append(f"{said} {100 * sum(drops) / len(drops):.0f}")
    text = f"removing the probe's subspace costs most at {_place(worst)}, {100 * worst['drop']:.0f} points of accuracy"
    if random:
        text += f" (random subspaces {', '.join(random)})"
    count = Counter(row["verdict"] for row in targets)
    recovered = count["inconclusive"]
    text += f"; at {recovered} of {len(targets) - count['tautological']} layers a refitted probe still reads it"
    if recovered:
        text += ", so a drop there does not show that the model needs this subspace"
    if count["absent"]:
        text += f"; at {count['absent']} no probe reads it in the first place"
    if count["underpowered"]:
        text += (
            f"; at {count['underpowered']} no probe reads it, but with so few sequences none could read a small residue"
        )
    return text + "."


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
            result.plot(),
            f"{cell.name}: what removing the probe's subspace for {SAYS[label]} costs at each layer, beside random "
            f"subspaces ({config.controls} draws each) and, below, what a probe still reads afterwards.",
            name=f"needed-{cell.name.lower()}-{label}",
        )
        for label, result in cell.profile.ablations.items()
    ]
    columns = {
        "layer": "layer", "rank": "rank", "drop": "drop", "drop lo": "lo", "drop hi": "hi", "probe": "probe_accuracy",
        "refit": "refit_accuracy", "refit MLP": "refit_mlp_accuracy", "baseline": "baseline", "effect": "effect",
        "verdict": "verdict",
    }  # fmt: skip
    rows = [
        {"label": label, **{name: row[column] for name, column in columns.items()}}
        for label, result in cell.profile.ablations.items()
        for row in result.targets()
    ]
    text = (
        "Does the answer get worse when the variable is taken out? The probe's subspace is removed at one layer at a "
        "time and the accuracy of the model's answers is measured again, on sequences that no probe has seen."
    )
    note = (
        "Read the two panels together. Where the refitted probe stays high, the variable is still there after the "
        "ablation, and the drop says nothing about necessity, large or small. Where random subspaces cost as much, the "
        "drop does not belong to this variable. `tautological` marks layers that the answer is read from directly, "
        "`absent` those where nothing could be read before the ablation either."
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

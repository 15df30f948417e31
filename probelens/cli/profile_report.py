"""The report of one model's profile: made from what is saved, so it can be written again at any time."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from probelens.errors import MetricError
from probelens.experiments.record import RunRecord
from probelens.profiling import Profile
from probelens.results.report import Chart, Section, Table, write_report


@dataclass(frozen=True)
class ProfileSettings:
    """How much is measured, and how."""

    length: int = 40  # tokens in each sequence
    n_probe: int = 400  # sequences for probes
    n_ablate: int = 150  # sequences for ablations
    n_pairs: int = 64  # clean/corrupted pairs for patching; 0 for no patching
    controls: int = 20  # random subspaces compared with each ablation, of each kind
    batch_size: int = 64  # sequences in one forward pass
    seed: int = 0  # of data, splits and controls
    mlp: bool = True  # also refit a small MLP
    mdl: bool = False  # also measure the description length
    control_task: bool = False  # also probe a control task, for selectivity


def write(path: Path, found: Profile, record: RunRecord) -> Path:
    """Write the page."""
    task = found.task.get("task", "a task")
    labels = list(found.indices)
    names = ", ".join(labels)
    return write_report(
        path,
        title=f"{found.model} on {task}: where {names} can be read, is needed, suffices, is used",
        lead=(
            f"The model {found.model} reads sequences of the task {task}. Below: at which layer {names} can be read by a "
            "linear probe, whether removing the directions in which its classes differ hurts the model's answers, whether "
            "putting one activation back repairs them, and whether the answer follows when only those directions are taken "
            "from another run. A variable that can be read need not be used."
        ),
        findings=[sentence for label in labels for sentence in _findings(found, label)],
        measured={
            "Model": str(record.config.get("model", found.model)),
            "Task": ", ".join(f"{k}={v}" for k, v in found.task.items() if k != "task") or task,
            "Probed labels": names,
            "Own accuracy": f"{found.behaviour['all']:.1%} of all positions, {found.behaviour['late']:.1%} of those "
            "after the 20th (of all, where sequences are shorter)",
            "Sequences": f"{record.config.get('n_probe')} for probes (60/20/20), {record.config.get('n_ablate')} others "
            f"for ablations, up to {record.config.get('n_pairs')} clean/corrupted pairs",
            "Seeds": "one model: intervals are over sequences and say nothing about another training run",
        },
        sections=[
            _answers(found), _readable(found), *(_needed(found, label) for label in found.ablations), *_sufficient(found),
            *_used(found),
        ],
        config={**record.config, "task": found.task},
        versions=record.versions,
        reproduce=_command(found, record),
    )  # fmt: skip


def _findings(found: Profile, label: str) -> list[str]:
    return [line.strip() for line in found.said(label)]


def _answers(found: Profile) -> Section:
    return Section(
        "Four questions",
        "Readable, needed, sufficient, used: one row a layer, each answer beside the number that it rests on.",
        [],
        [Table("The four answers by layer", found.answers().drop(columns=["site"]), open=True)],
        explain=("questions", "layers"),
    )


def _readable(found: Profile) -> Section:
    untrained = any(row["control"] == "untrained" for row in found.probes.rows)
    before = " The untrained model shows what was there before training." if untrained else ""
    rows = [{"label": label, "verdict": index.verdict, "why": index.reason} for label, index in found.indices.items()]
    caption = "Probe accuracy by layer with 95 % intervals over test sequences."
    chart = Chart(found.probes.plot(), caption, name="readable")
    terms = ["questions", "layers", "probe", "baselines", "interval", "profile"] + ["untrained"] * untrained
    return Section(
        "Readable",
        f"Where can a linear probe read each variable?{before}",
        [chart],
        [Table("Verdict of each profile, by the bounds of its intervals", rows, open=True)],
        "Readable is not used: these curves alone say nothing about what the model does with the variable.",
        explain=terms,
    )


def _needed(found: Profile, label: str) -> Section:
    result = found.ablations[label]
    columns = ("layer", "rank", "variance", "between_variance", "drop", "lo", "hi", "probe_accuracy", "refit_accuracy",
               "refit_mlp_accuracy", "baseline", "effect", "effect_lo", "effect_hi", "effect_p_adjusted", "needed",
               "verdict")  # fmt: skip
    rows = [{key: row.get(key) for key in columns} for row in result.targets()]
    return Section(
        f"Needed: {label}",
        "Do the answers get worse when the variable is taken out? The span of its class means is removed at one layer at a "
        "time, on sequences that no probe has seen. Beside it stands what removing the probe's own rows costs: what a probe "
        "reads with need not be where the variable lies.",
        [Chart(found.plot_needed(label), f"What removing the class means of {label} costs at each layer.", name=f"needed-{label}")],
        [Table(f"{label}: ablations by layer", rows)],
        "Where the refitted probe stays high, the variable is still there after the ablation, and the drop says nothing "
        "about necessity. Where random subspaces cost as much, the drop does not belong to this variable. `absent` marks "
        "layers where nothing could be read before the ablation either.",
        explain=("ablation", "refit", "random", "tautological"),
    )  # fmt: skip


def _sufficient(found: Profile) -> list[Section]:
    charts, missing = list[Chart](), list[str]()
    for name, result in found.patches.items():
        try:
            figure = result.plot()
        except MetricError as err:
            missing.append(f"{name}: {err}")
            continue
        n = int(result.correct.sum())
        caption = (
            f"Share of the clean-corrupted gap that one patched activation restores, by layer and position; {n} of "
            f"{len(result.correct)} pairs that both runs answer correctly."
        )
        charts.append(Chart(figure, caption, name=f"sufficient-{name}"))
    if not charts and not missing:
        return []
    text = (
        "Does putting the variable back repair the answer? The activation at one layer and position of the clean run is "
        "copied into the corrupted run, and the answer at the last position is read again."
    )
    return [Section("Sufficient", text, charts, note="\n\n".join(missing), explain=("patching", "recovery", "vacuous"))]


def _used(found: Profile) -> list[Section]:
    charts, tables = list[Chart](), list[Table]()
    columns = ("layer", "rank", "n", "iia", "iia_lo", "iia_hi", "recovery", "p_adjusted", "verdict")
    for label, result in found.interchanges.items():
        caption = (
            f"Share of pairs whose answer becomes that of the other run when only the span of the class means of {label} is "
            "taken from it, by layer, at all positions; beside it everything, everything but that span, and random subspaces."
        )
        charts.append(Chart(result.plot(), caption, name=f"used-{label}"))
        tables.append(
            Table(f"{label}: interchanges by layer", [{k: row.get(k) for k in columns} for row in result.targets()])
        )
    if not charts:
        return []
    text = (
        "Does the model follow? Two runs differ in the variable. Only the part of the activation in the span of the class "
        "means is taken from the one and put into the other."
    )
    return [Section("Used", text, charts, tables, explain=("interchange",))]


def _command(found: Profile, record: RunRecord) -> str:
    config, task = dict(record.config), dict(found.task)
    group = str(task.pop("group", task.get("task")))
    words = ["probelens", "profile", str(config.get("model", "MODEL")), "--task", group]
    for key, value in task.items():
        if key not in ("task", "tokenizer", "corpus", "digest"):
            words += ["--task-set", f"{key}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"]
    words += ["--labels", ",".join(found.indices), "--length", str(found.length)]
    defaults = ProfileSettings()
    for key, value in config.items():
        if key != "length" and hasattr(defaults, key) and value != getattr(defaults, key):
            words += ["--set", f"{key}={value}"]
    return shlex.join(words)

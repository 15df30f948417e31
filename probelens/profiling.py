"""``profile``: readable, needed, sufficient, layer by layer: the three questions in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.ablation.ablate import ablate
from probelens.ablation.columns import ABLATION
from probelens.ablation.result import AblationResult
from probelens.errors import InputError, MetricError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.numerics.indices import READABLE, SOLVED, ProfileIndices, profile_indices
from probelens.patching.patch import patch
from probelens.patching.result import PatchResult
from probelens.probing import ProbeResult, probe
from probelens.results.columns import Column, table
from probelens.results.result import Result
from probelens.results.sentences import percent
from probelens.running.collect import collect
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.plan import sweep
from probelens.tasks.base import need_task

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["Profile", "profile"]

WARM_UP = 20
_COST = (
    "clean", "value", "drop", "damage", "effect", "effect_lo", "effect_hi", "refit_accuracy", "refit_mlp_accuracy", "verdict",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Profile(Result):
    """Where one model keeps each variable of a task, and whether it uses it.

    Args:
        probes: Readability: probes at every site of the layer axis.
        ablations: Necessity, by label.
        patches: Sufficiency, by name of the pairs.
        indices: Profile statistics and verdict, by label.
        behaviour: The model's own accuracy on the target: "all", and "late" (positions over 20).
        baseline: The best guess of each label without its state, which the indices count from.
        task: The task's config.
        length: Tokens in each sequence.
        model: Name of the model.
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = (
        Column("model", str, "Name of the model."),
        *ProbeResult.columns,
        *(dataclasses.replace(c, type=c.type | None) for c in ABLATION if c.name in _COST),
        Column("drop_lo", float | None, "Lower end of the 95 % interval of the drop, over sequences.", "fraction of 1"),
        Column("drop_hi", float | None, "Upper end of it.", "fraction of 1"),
    )

    probes: ProbeResult
    ablations: dict[str, AblationResult]
    patches: dict[str, PatchResult]
    indices: dict[str, ProfileIndices]
    behaviour: dict[str, float]
    baseline: dict[str, float]
    task: dict[str, Any]
    length: int
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dataframe(self) -> pd.DataFrame:
        """The task's probes, each with what ablating its directions cost and what a refitted probe reads.

        Returns:
            One row per site, label and seed.
        """
        rows = []
        for row in self.probes.rows:
            if row["control"] != "task":
                continue
            merged = {"model": self.model, **row}
            ablation = self.ablations.get(row["label"])
            if ablation is not None:
                found = next((r for r in ablation.targets() if r["site"] == row["site"]), {})
                merged |= {name: found.get(name) for name in _COST}
                merged.update(drop_lo=found.get("lo"), drop_hi=found.get("hi"))
            rows.append(merged)
        return table(rows, self.columns)

    def measurements(self) -> list[dict[str, Any]]:
        """Every row of the probes, ablations and patches.

        Returns:
            Rows with the columns of their own tables, and ``kind``: "probe", "ablation" or "patch", the latter with
            ``pairs``. Of pairs that the model never answers correctly, one row with the reason as ``problem``.
        """
        results: list[tuple[dict[str, Any], Any]] = [({"kind": "probe"}, self.probes)]
        results += [({"kind": "ablation"}, found) for found in self.ablations.values()]
        results += [({"kind": "patch", "pairs": name}, found) for name, found in self.patches.items()]
        rows: list[dict[str, Any]] = []
        for about, found in results:
            try:
                records = found.to_dataframe().to_dict("records")
            except MetricError as err:
                records = [{"problem": str(err)}]
            # A table may have a column `kind`; here it says which table the row is from.
            rows += [{**record, **about} for record in records]
        return rows

    def findings(self) -> list[str]:
        """What the model knows, and for each label where it is read, what it costs to remove and where it is put in."""
        known = percent(self.behaviour["all"])
        if self.length + self.task.get("bos", False) > WARM_UP + 1:  # some positions are later
            known += f" ({percent(self.behaviour['late'])} after position {WARM_UP})"
        lines = [f"{self.model} on {self.task.get('task', 'a task')} of length {self.length}, own accuracy {known}."]
        read = self.probes.findings()[1:]
        for label, found in self.indices.items():
            lines.append(f"{label}: {found.verdict}, {found.reason}.")
            start = next((i for i, line in enumerate(read) if line.startswith(f"{label}: ")), len(read))
            own = read[start : start + 1] + [line for line in read[start + 1 : start + 2] if line.startswith("  ")]
            lines += [line.removeprefix(f"{label}: ").strip() for line in own]
            lines += self.ablations[label].findings()[1:] if label in self.ablations else []
        lines += [
            f"pairs of {name}: {line}"
            for name, patched in self.patches.items()
            for line in patched.findings()[1:]
            if line.startswith(("Most", "No pair")) or "no gap" in line
        ]
        return lines

    def plot(self) -> go.Figure:
        """Probe accuracy by layer with its baselines."""
        return self.probes.plot()


def profile(
    model: HookedModel,
    task: Any,
    *,
    labels: Sequence[str] | None = None,
    length: int = 40,
    n_probe: int = 400,
    n_ablate: int = 150,
    n_pairs: int = 64,
    pairs: Mapping[str, Any] | None = None,
    untrained: HookedModel | None = None,
    controls: int = 20,
    refit: bool = True,
    mlp: bool = True,
    control_task: bool = False,
    mdl: bool = False,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Profile:
    """Probe, ablate and patch every layer of a model that was trained on a task.

    Probes are fitted on one set of sequences, ablations measured on another, and no sequence is in
    both. The model answers ``task.target``; ``labels`` may be other variables of the task.

    Args:
        model, batch_size, progress: As for ``ablate``.
        task: A task of ``probelens.tasks`` or one of your own.
        labels: Variables to look for; the task's target if None.
        length: Tokens in each sequence.
        n_probe: Sequences for probes, split 60/20/20.
        n_ablate: Sequences for ablations.
        n_pairs: Clean/corrupted pairs, when ``pairs`` is None.
        pairs: PatchPairs by name; None for the task's own pairs on its target; {} for no patching.
        untrained: The same architecture at random initialisation.
        controls: Draws of each random control of the ablations.
        refit: Refit probes on the ablated activations.
        mlp: The refit includes a small MLP.
        control_task: Also probe a control task, for selectivity.
        mdl: Also the online codelength.
        seed: Of data, splits, controls and intervals.

    Returns:
        A Profile: ``.probes``, ``.ablations``, ``.patches``, ``.indices`` (with the verdict by label).

    Raises:
        InputError: An unknown label.
    """
    need_wrapped(model)
    need_task(task)
    labels = [task.target] if labels is None else list(labels)
    unknown = [label for label in labels if label not in task.label_names]
    if unknown or not labels:
        raise InputError(f"labels={labels}: this task has {list(task.label_names)}. Give some of them.")
    data = task.splits({"probe": n_probe, "ablate": n_ablate}, length=length, seed=seed)
    fit, held = data["probe"], data["ablate"]
    acts = collect(model, fit, LAYER_AXIS, batch_size=batch_size, progress=progress)
    base = None if untrained is None else collect(untrained, fit, LAYER_AXIS, batch_size=batch_size)
    probes = probe(
        acts, {label: fit.labels[label] for label in labels}, fit.groups, mask=fit.mask, tokens=fit.tokens,
        untrained=base, control_task=control_task, mdl=mdl, seed=seed, progress=progress,
    )  # fmt: skip
    ablations = {
        label: ablate(
            model, held, probes, refit=refit, controls=controls, label=label, target=task.target, mlp=mlp,
            batch_size=batch_size, seed=seed, progress=progress,
        )
        for label in labels
    }  # fmt: skip
    if pairs is None:
        pairs = {task.target: task.pairs(n_pairs, length=length, seed=seed)}
    patches = {
        name: patch(model, some, LAYER_AXIS, pos="each", batch_size=batch_size, progress=progress)
        for name, some in pairs.items()
    }
    behaviour = _behaviour(model, held, task.target, batch_size)
    baseline: dict[str, float] = {}
    indices: dict[str, ProfileIndices] = {}
    for label in labels:
        row = probes.row(probes.sites[0], label)
        baseline[label] = max(row[k] for k in ("majority", "position", "last_w") if row.get(k) is not None)
        scores = probes.sequences(label)
        if scores.shape[-1] < 3:
            indices[label] = _shallow(scores, baseline[label], behaviour["late"])
            continue
        indices[label] = profile_indices(scores[None], baseline[label], solved=behaviour["late"], seed=seed)
    return Profile(
        probes, ablations, patches, indices, behaviour, baseline, dict(task.config), length, model.cfg.model_name
    )


def _shallow(scores: Tensor, baseline: float, solved: float) -> ProfileIndices:
    """The indices of a model of one block: readable or not, without a profile over layers."""
    accuracy = scores.double().mean(0)
    scale = max(1.0 - baseline, 1e-12)
    readability = ((accuracy - baseline) / scale).clamp(min=0.0).cummax(-1).values
    learned = solved >= SOLVED and float(readability[-1]) >= READABLE
    verdict, why = "undetermined", "a model of one block has no profile over layers"
    if not learned:
        verdict = "not learned"
        why = f"accuracy {solved:.3f}, needed {SOLVED}; R {readability[-1]:.3f}, needed {READABLE}"
    bases = torch.tensor([baseline], dtype=torch.float64)
    return ProfileIndices(verdict, why, None, accuracy, readability, bases, (learned,), (verdict,))


def _behaviour(model: HookedModel, batch: Any, target: str, batch_size: int) -> dict[str, float]:
    read = Read(lambda logits, answer: (logits.argmax(-1) == answer).float(), None, {"answer": batch.labels[target]})
    found = sweep(model, batch.tokens, (), read, batch_size=batch_size, attention_mask=batch.attention_mask).base
    late = batch.mask.clone()
    late[:, : WARM_UP + 1] = False
    if not bool(late.any()):
        late = batch.mask
    return {"all": found[batch.mask].mean().item(), "late": found[late].mean().item()}

"""``profile``: readable, needed, sufficient, used, layer by layer: the four questions in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.ablate import ablate
from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.numerics.indices import READABLE, SOLVED, ProfileIndices, profile_indices
from probelens.patching.interchange import interchange
from probelens.patching.patch import patch
from probelens.patching.result import PatchResult
from probelens.probing.probe import probe
from probelens.profiling.answers import BY_CONSTRUCTION
from probelens.profiling.result import WARM_UP, Profile
from probelens.running.collect import collect
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.plan import sweep
from probelens.tasks.base import need_task

__all__ = ["profile"]


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
    controls: int | None = None,
    refit: bool = True,
    mlp: bool = True,
    filters: bool = True,
    control_task: bool = False,
    mdl: bool = False,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Profile:
    """Probe, ablate, patch and interchange every layer of a model that was trained on a task.

    Probes are fitted on one set of sequences, ablations measured on another, and no sequence is in
    both. The model answers ``task.target``; ``labels`` may be other variables of the task. What is ablated and
    interchanged is the span of the class means; beside it stands what removing the probe's own rows costs. An
    interchange takes pairs that differ in the label: those of the label's own name.

    Args:
        model, batch_size, progress: As for ``ablate``.
        task: A task of ``probelens.tasks`` or one of your own.
        labels: Variables to look for; the task's target if None.
        length: Tokens in each sequence.
        n_probe: Sequences for probes, split 60/20/20.
        n_ablate: Sequences for ablations.
        n_pairs: Clean/corrupted pairs, when ``pairs`` is None.
        pairs: PatchPairs by name; None for the task's own pairs on its target; {} for none. Pairs under the name of a
            label differ in it, and are interchanged as well as patched.
        untrained: The same architecture at random initialisation.
        controls: Draws of each random control of ablations and interchanges; None for what each needs.
        refit: Refit probes on the ablated activations.
        mlp: The refit includes a small MLP.
        filters: Also ablate the probe's own rows, with a refitted linear probe.
        control_task: Also probe a control task, for selectivity.
        mdl: Also the online codelength.
        seed: Of data, splits, controls and intervals.

    Returns:
        A Profile: ``.probes``, ``.ablations``, ``.filters``, ``.patches``, ``.interchanges``, ``.indices`` (with the
        verdict by label), and ``.answers()``, a table of the four questions.

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
    beside = {
        label: ablate(
            model, held, probes, directions="filter", refit=refit, controls=0, label=label, target=task.target, mlp=False,
            batch_size=batch_size, seed=seed, progress=progress,
        )
        for label in labels
        if filters
    }  # fmt: skip
    if pairs is None:
        pairs = {task.target: task.pairs(n_pairs, length=length, seed=seed)}
    patches = {name: _patch(model, some, batch_size, progress) for name, some in pairs.items()}
    interchanges = {
        label: interchange(
            model,
            pairs[label],
            probes,
            label=label,
            controls=controls,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
        for label in labels
        if label in pairs
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
        probes, ablations, patches, indices, behaviour, baseline, dict(task.config), length, model.cfg.model_name, beside,
        interchanges,
    )  # fmt: skip


def _patch(model: HookedModel, pairs: Any, batch_size: int, progress: bool) -> PatchResult:
    """Patches at each layer and position, with the cells whose recovery is fixed by construction among the notes.

    These are the embedding of the only position where the runs differ, which gives 1, and the last block's output, of which
    only the position that is read reaches the answer.
    """
    found = patch(model, pairs, LAYER_AXIS, pos="each", batch_size=batch_size, progress=progress)
    differ = (pairs.clean != pairs.corrupted).any(0).nonzero().flatten().tolist()
    last = model.cfg.n_layers - 1
    anyway = [[i, differ[0]] for i, layer in enumerate(found.layers) if layer == -1 and len(differ) == 1]
    anyway += [[i, j] for i, layer in enumerate(found.layers) if layer >= last for j in range(len(found.positions))]
    found.extra[BY_CONSTRUCTION] = anyway
    return found


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

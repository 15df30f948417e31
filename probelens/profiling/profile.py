"""``profile``: readable, needed, sufficient, used, layer by layer: the four questions in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.ablate import ablate
from probelens.ablation.answers import Metric, reader, scored_positions
from probelens.ablation.scoring import per_sequence
from probelens.errors import InputError, metric_name
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.hooks.shorthand import LAYER_AXIS
from probelens.numerics.indices import READABLE, SOLVED, ProfileIndices, profile_indices
from probelens.numerics.tensors import whole_number
from probelens.patching.interchange import interchange
from probelens.patching.interchange_result import InterchangeResult
from probelens.patching.pairs import chosen_sides
from probelens.patching.patch import patch
from probelens.patching.result import PatchResult
from probelens.probing.probe import probe
from probelens.probing.result import ProbeResult
from probelens.profiling.answers import BY_CONSTRUCTION
from probelens.profiling.material import Material, Swapped, material
from probelens.profiling.result import Profile
from probelens.running.collect import collect
from probelens.running.sweep.plan import sweep
from probelens.running.workers import Executor, takes_executor
from probelens.tasks.examples import spread_mask

__all__ = ["profile"]


@takes_executor
def profile(
    model: HookedModel,
    task: Any,
    *,
    labels: Sequence[str] | None = None,
    target: str | None = None,
    metric: Metric | None = None,
    length: int | None = None,
    n_probe: int | None = None,
    n_ablate: int | None = None,
    n_pairs: int | None = None,
    pairs: Any = None,
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
    executor: Executor = None,
) -> Profile:
    """Probe, ablate, patch and interchange every layer of a model, on a task, a batch or pairs of any inputs.

    Probes are fitted on one set of examples, ablations measured on another, and no example is in both. The model answers
    ``target``; ``labels`` may be other variables. What is ablated and interchanged is the span of the class means; beside it
    stands what removing the probe's own rows costs. An interchange takes pairs that differ in the label: those of the
    label's own name. Labels that are values are read by R², and needed by the metric "r2" or "mse"; what has no meaning for
    them, or for the model's outputs, isn't asked, and ``Profile.unasked`` says why.

    Args:
        model, batch_size, progress, executor: As for ``ablate``.
        task: A task of ``probelens.tasks`` or one of your own; or a ``Batch`` of any inputs, half of whose groups are for
            probes; or {"probe": Batch, "ablate": Batch}; or ``PatchPairs`` with one answer for each side, whose examples are
            probed and ablated where the answer is read.
        labels: Variables to look for; the target if None.
        target: The label that the model answers with. None for the task's or the pairs' own, or the only label.
        metric: As for ``ablate``; None for "accuracy", or "r2" where the target holds values.
        length: Tokens in each sequence of a task; None for 40.
        n_probe: Sequences of a task for probes, split 60/20/20; None for 400.
        n_ablate: Sequences of a task for ablations; None for 150.
        n_pairs: Pairs of a task, or of a batch at most, where ``pairs`` is None; None for 64, 0 for none. Those of a batch are two of
            the examples for ablations, of equal masks and lengths, whose targets differ.
        pairs: PatchPairs, or PatchPairs by name; None for pairs on the target; {} for none. Pairs under the name of a
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
        InputError: Data of another kind, too few examples, an unknown label, no target where there are several labels, a
            metric that the target and the model's outputs don't fit, or sizes of a task that go with no task.
    """
    need_wrapped(model)
    if n_pairs is not None:
        whole_number("n_pairs", n_pairs, 0)
    sizes = {"length": length, "n_probe": n_probe, "n_ablate": n_ablate, "n_pairs": n_pairs}
    data = material(model, task, labels, target, metric, pairs, seed, sizes)
    behaviour = _behaviour(model, data, batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    probes = _probes(model, data, untrained, control_task=control_task, mdl=mdl, seed=seed, **options)
    removing: dict[str, Any] = {"refit": refit, "target": data.target, "seed": seed, **options}
    ablations = {
        label: ablate(model, data.held, probes, data.metric, controls=controls, label=label, mlp=mlp, **removing)
        for label in data.labels
    }
    beside = {
        label: ablate(
            model, data.held, probes, data.metric, directions="filter", controls=0, label=label, mlp=False, **removing
        )
        for label in data.labels
        if filters
    }
    unasked: dict[str, str] = {}
    patches: dict[str, PatchResult] = {}
    interchanges: dict[str, InterchangeResult] = {}
    for name, some in data.pairs.items():
        patches[name] = _patch(model, some, batch_size, progress)
        if name not in data.labels:
            continue
        swapped = data.swapped.get(name, Swapped(some))
        try:
            chosen_sides(model, swapped.pairs, "interchange()")
        except InputError as err:
            unasked[f"{name}: used"] = err.reason
            continue
        interchanges[name] = interchange(
            model, swapped.pairs, probes, pos=swapped.pos, groups=swapped.groups, label=name, controls=controls, seed=seed,
            **options,
        )  # fmt: skip
    for label in data.labels:
        if n_pairs == 0 and pairs is None:
            unasked[f"{label}: sufficient and used"] = "n_pairs=0 asks for no pairs"
        if data.pairs and label not in data.pairs:
            unasked[f"{label}: sufficient and used"] = (
                f"the pairs differ in {', '.join(map(repr, data.pairs))}: give pairs={{{label!r}: PatchPairs(...)}}"
            )
    baseline: dict[str, float] = {}
    indices: dict[str, ProfileIndices] = {}
    for label in data.labels:
        row = probes.row(probes.sites[0], label)
        baseline[label] = max([0.0, *(row[k] for k in ("majority", "position", "last_w") if row.get(k) is not None)])
        indices[label] = _indices(probes, label, baseline[label], behaviour.get("late"), seed)
    return Profile(
        probes, ablations, patches, indices, behaviour, baseline, data.about, data.length, model.cfg.model_name, beside,
        interchanges, target=data.target or "", metric=metric_name(data.metric), unasked=unasked,
    )  # fmt: skip


def _probes(
    model: HookedModel,
    data: Material,
    untrained: HookedModel | None,
    *,
    batch_size: int,
    progress: bool,
    **options: Any,
) -> ProbeResult:
    """Probes of every label at every layer, fitted on the examples for it."""
    fit = data.fit
    acts = collect(model, fit, LAYER_AXIS, batch_size=batch_size, progress=progress)
    base = None if untrained is None else collect(untrained, fit, LAYER_AXIS, batch_size=batch_size)
    mask = fit.mask
    if not fit.examples.plain:
        mask = spread_mask(mask, next(iter(acts.tensors.values())).shape[1])
    return probe(
        acts, {label: fit.labels[label] for label in data.labels}, fit.groups, mask=mask, untrained=base, progress=progress,
        **options,
    )  # fmt: skip


def _patch(model: HookedModel, pairs: Any, batch_size: int, progress: bool) -> PatchResult:
    """Patches at each layer and position, with the cells whose recovery is fixed by construction among the notes.

    These are the embedding of the only position where the runs differ, which gives 1, and the last block's output, of which
    only the position that is read reaches the answer.
    """
    values = isinstance(pairs.answers, Tensor) and pairs.answers.is_floating_point()
    found = patch(
        model, pairs, LAYER_AXIS, pos="each", metric="value" if values else "logit_diff", batch_size=batch_size,
        progress=progress,
    )  # fmt: skip
    differ = _differing(pairs, len(found.positions))
    last = model.cfg.n_layers - 1
    anyway = [[i, differ[0]] for i, layer in enumerate(found.layers) if layer == -1 and len(differ) == 1]
    anyway += [[i, j] for i, layer in enumerate(found.layers) if layer >= last for j in range(len(found.positions))]
    found.extra[BY_CONSTRUCTION] = anyway
    return found


def _differing(pairs: Any, positions: int) -> list[int]:
    """Positions at which some pair differs; all where an input isn't one of positions."""
    found = torch.zeros(positions, dtype=torch.bool)
    clean, corrupted = (side.batched or {"": side.main} for side in pairs.sides)
    for name, x in clean.items():
        differs = x != corrupted[name]
        if x.ndim in (2, 3) and x.shape[1] == positions:
            found |= differs.reshape(len(x), positions, -1).any(-1).any(0)
        elif bool(differs.any()):
            found[:] = True
    return found.nonzero().flatten().tolist()


def _indices(probes: ProbeResult, label: str, baseline: float, solved: float | None, seed: int) -> ProfileIndices:
    """The profile over layers of a label; a label of values, or a model of one block, has none."""
    row = probes.row(probes.sites[0], label)
    if "r2" in row:
        scores = torch.tensor([[probes.r2(site, label) for site in probes.sites]])
        return _shallow(scores.clamp(min=0.0), baseline, solved, "R² isn't a mean over sequences, so it has no profile")
    scores = probes.sequences(label)
    if baseline >= 1:
        return _shallow(scores, baseline, solved, "the best guess without a state is always right")
    if scores.shape[-1] < 3:
        return _shallow(scores, baseline, solved, "a model of one block has no profile over layers")
    return profile_indices(scores[None], baseline, solved=solved, seed=seed)


def _shallow(scores: Tensor, baseline: float, solved: float | None, why: str) -> ProfileIndices:
    """The indices of what has no profile over layers: readable or not."""
    accuracy = scores.double().mean(0)
    scale = max(1.0 - baseline, 1e-12)
    readability = ((accuracy - baseline) / scale).clamp(min=0.0).cummax(-1).values
    learned = (solved is None or solved >= SOLVED) and (baseline >= 1 or float(readability[-1]) >= READABLE)
    verdict = "undetermined"
    if not learned:
        verdict = "not learned"
        why = "" if baseline >= 1 else f"R {readability[-1]:.3f}, needed {READABLE}"
        if solved is not None:
            why = "; ".join(filter(None, [f"accuracy {solved:.3f}, needed {SOLVED}", why]))
    bases = torch.tensor([baseline], dtype=torch.float64)
    return ProfileIndices(verdict, why, None, accuracy, readability, bases, (learned,), (verdict,))


def _behaviour(model: HookedModel, data: Material, batch_size: int) -> dict[str, float]:
    """The metric without any change; of a task also at late positions."""
    held = data.held
    read = reader(model, held, data.metric, data.target or data.labels[0])
    found = sweep(
        model, held.inputs, (), read, batch_size=batch_size, attention_mask=held.attention_mask
    ).base  # fmt: skip
    scored = scored_positions(held, data.metric, read.by_position)
    out = {"all": per_sequence(found, scored).mean().item()}
    if data.late is None:
        return out
    late = scored.clone()
    late[:, : data.late + 1] = False
    out["late"] = per_sequence(found, late if bool(late.any()) else scored).mean().item()
    return out

"""What a profile is measured on: examples for probes, others for ablations, and pairs, of a task, a batch, or pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.answers import Metric, where
from probelens.ablation.erase import require_disjoint
from probelens.errors import InputError
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.probing.splits import groups_of
from probelens.running.shapes import output_shape
from probelens.tasks.data import Batch
from probelens.tasks.examples import label_mask
from probelens.tasks.pairs import PatchPairs, answer_tokens

LENGTH, N_PROBE, N_ABLATE, N_PAIRS = 40, 400, 150, 64
WARM_UP = 20
PARTS = ("probe", "ablate")
APART = 0.5  # standard deviations by which the values of a drawn pair differ


@dataclass(frozen=True, eq=False)
class Swapped:
    """Pairs that are interchanged: which, at what positions, and which of them are not independent."""

    pairs: Any
    pos: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Material:
    """Examples to fit on and others to measure on, with the labels, the target and the metric.

    ``pairs`` are patched; ``swapped`` says what an interchange takes where that isn't all of them; ``late`` is the position
    from which on a task's answers need a state, None without a task.
    """

    fit: Batch
    held: Batch
    labels: list[str]
    target: str | None
    metric: Metric
    pairs: Mapping[str, Any]
    about: dict[str, Any]
    length: int
    late: int | None = None
    swapped: dict[str, Swapped] = field(default_factory=dict)


def material(
    model: HookedModel, given: Any, labels: Sequence[str] | None, target: str | None, metric: Metric | None,
    pairs: Any, seed: int, sizes: Mapping[str, int | None],
) -> Material:  # fmt: skip
    """What to measure on, from any of the kinds of data that ``profile`` takes."""
    named = isinstance(given, Mapping)
    if not named and not isinstance(given, Batch | PatchPairs):
        if not hasattr(given, "sample") or not hasattr(given, "label_names"):
            raise InputError(
                f"expected a task, a Batch or PatchPairs, got a {type(given).__name__}. Give pl.Batch(inputs, labels), or one of "
                "probelens.tasks, such as Parity()"
            )
        return _of_task(given, labels, target, metric, pairs, seed, sizes)
    if asked := [name for name, size in sizes.items() if size is not None and name != "n_pairs"]:
        raise InputError(
            f"{asked[0]}={sizes[asked[0]]} says how much of a task to draw, and a {type(given).__name__} was given. Leave it "
            'out, or cut the data: {"probe": batch[:400], "ablate": batch[400:]}'
        )
    if isinstance(given, PatchPairs):
        return _of_pairs(model, given, labels, target, metric, pairs, seed)
    if named:
        if set(given) != set(PARTS) or not all(isinstance(part, Batch) for part in given.values()):
            raise InputError(
                'a mapping of data must be {"probe": Batch, "ablate": Batch}, as task.splits gives it; this one has '
                f"{ {name: type(part).__name__ for name, part in given.items()} }. For the arguments of a forward give "
                "pl.Batch(inputs, labels)"
            )
        fit, held = (given[name] for name in PARTS)
        require_disjoint(fit, held)
    else:
        fit, held = _halves(given, groups_of(given), seed)
    known = [name for name in fit.labels if name in held.labels]
    target = _target(known, labels, target, metric)
    labels = list(labels) if labels else known if target is None else [target]
    _need_known([*labels, *([target] if target else [])], known)
    metric = metric or _metric(held, target)
    n = sizes["n_pairs"]
    swapped: dict[str, Swapped] = {}
    if pairs is None:
        made = drawn(model, held, target, N_PAIRS if n is None else n, seed) if n != 0 and target is not None else None
        swapped = {} if made is None or target is None else {target: made}
        pairs = {name: some.pairs for name, some in swapped.items()}
    about = {"inputs": _described(fit, len(fit) + len(held))}
    return Material(
        fit, held, labels, target, metric, _pairs_by_name(pairs, target), about, fit.length, swapped=swapped
    )


def _of_task(
    task: Any, labels: Sequence[str] | None, target: str | None, metric: Metric | None, pairs: Any, seed: int,
    sizes: Mapping[str, int | None],
) -> Material:  # fmt: skip
    target = task.target if target is None else target
    labels = [target] if labels is None else list(labels)
    if not labels:
        raise InputError(f"labels={labels}: this task has {list(task.label_names)}. Give some of them.")
    _need_known([*labels, target], list(task.label_names))
    defaults = {"length": LENGTH, "n_probe": N_PROBE, "n_ablate": N_ABLATE, "n_pairs": N_PAIRS}
    size = {name: defaults[name] if given is None else given for name, given in sizes.items()}
    data = task.splits({"probe": size["n_probe"], "ablate": size["n_ablate"]}, length=size["length"], seed=seed)
    if pairs is None:
        n = size["n_pairs"]
        pairs = {target: task.pairs(n, length=size["length"], seed=seed)} if n else {}
    return Material(
        data["probe"], data["ablate"], labels, target, metric or "accuracy", _pairs_by_name(pairs, target),
        dict(task.config), size["length"], WARM_UP,
    )  # fmt: skip


def _of_pairs(
    model: HookedModel, pairs: PatchPairs, labels: Sequence[str] | None, target: str | None, metric: Metric | None,
    others: Any, seed: int,
) -> Material:  # fmt: skip
    """Both sides of pairs as examples, labelled by their answers where these are read."""
    name = pairs.label or "answer"
    if others is not None:
        raise InputError("pairs= goes with a task or a batch, and PatchPairs were given already. Leave it out")
    if (labels is not None and list(labels) != [name]) or target not in (None, name):
        raise InputError(
            f"labels={labels}, target={target!r}: pairs have one label, {name!r}. Give pl.Batch(inputs, labels) and pairs= for "
            "others"
        )
    batch, n = dataclasses.replace(pairs, answers=answer_tokens(model, pairs.answers)).batch(), len(pairs)
    fit, held = _halves(batch, groups_of(batch), seed)
    kept = torch.isin(torch.arange(n), held.groups)
    swapped = Swapped(pairs[kept], None if pairs.read_pos is None else pairs.read_pos[kept])
    about = {"inputs": f"{n} pairs"}
    return Material(
        fit,
        held,
        [name],
        name,
        metric or _metric(held, name),
        {name: pairs},
        about,
        fit.length,
        swapped={name: swapped},
    )


def _halves(batch: Batch, groups: Tensor, seed: int) -> tuple[Batch, Batch]:
    """Half of the groups of a batch, and the other half."""
    unique, ids = torch.unique(groups, return_inverse=True)
    if len(unique) < 8:
        raise InputError(
            f"{len(batch)} examples in {len(unique)} groups of equal or dependent ones are too few: half are for probes, which "
            "are fitted, tuned and tested on different ones, and half for ablations. Give some dozens"
        )
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed))
    first = torch.zeros(len(unique), dtype=torch.bool)
    first[order[: len(unique) // 2]] = True
    return batch[first[ids]], batch[~first[ids]]


def _described(batch: Batch, n: int) -> str:
    """Examples in words: "60 examples × 7 positions of tokens, pitch"."""
    parts = ", ".join(batch.examples.batched) or f"{str(batch.examples.main.dtype).removeprefix('torch.')} inputs"
    positions = f" × {batch.length} positions" if batch.mask.ndim == 2 else ""
    return f"{n} examples{positions} of {'tokens' if batch.examples.plain else parts}"


def _target(
    known: Sequence[str], labels: Sequence[str] | None, target: str | None, metric: Metric | None
) -> str | None:
    """The label that the model answers with; None where there are several and the metric needs none."""
    if target is not None:
        return target
    some = known if labels is None else list(labels)
    if len(some) == 1:
        return some[0]
    if metric in (None, "accuracy", "r2", "mse"):
        raise InputError(
            f"target is None, and the labels are {list(known)}. Give target= the one that the model answers with"
        )
    return None


def _need_known(labels: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [label for label in labels if label not in known]:
        raise InputError(f"label {unknown[0]!r} is not known: there are {list(known)}. Give some of them.")


def _metric(batch: Batch, target: str | None) -> Metric:
    return "r2" if target is not None and batch.labels[target].is_floating_point() else "accuracy"


def _pairs_by_name(pairs: Any, target: str | None) -> Mapping[str, Any]:
    if isinstance(pairs, Mapping):
        return pairs
    if not isinstance(pairs, PatchPairs):
        raise InputError(
            f"pairs= is a {type(pairs).__name__}; it must be PatchPairs, or a mapping of label to PatchPairs"
        )
    return {pairs.label or target or "answer": pairs}


def drawn(model: HookedModel, batch: Batch, target: str, n: int, seed: int) -> Swapped | None:
    """Pairs of two examples of a batch whose targets differ; None where there are none.

    Two that a forward treats differently, by their masks or by what counts something of them, make no pair. Where the model
    answers at each position, it is the last at which both have a label and these differ.
    """
    told = mask_for_model(model, batch.attention_mask, batch.inputs)
    each = len(output_shape(model, batch.examples, told)) == 3
    counts = where(batch, each)
    y = batch.labels[target]
    if y.ndim == 2 and not each:
        y = y[:, 0]
    if y.ndim != counts.ndim:
        return None
    alike = _alike(batch)
    spread = y[label_mask(counts, y)].double().std() * APART if y.is_floating_point() else 0
    far: Callable[[int, int], Tensor] = lambda i, j: counts[i] & counts[j] & ((y[i] - y[j]).abs() > spread)  # noqa: E731
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    free, chosen = list(reversed(order)), list[tuple[int, int]]()
    for i in order:
        other = next((j for j in free if i != j and alike[i] == alike[j] and bool(far(i, j).any())), None)
        if other is not None and len(chosen) < n:
            free.remove(other)
            chosen.append((i, other))
    if not chosen:
        return None
    rows = torch.tensor(chosen)
    read = None
    if each:
        read = torch.stack([far(i, j).nonzero().max() for i, j in chosen])
        values = torch.stack([y[rows[:, side], read] for side in (0, 1)], 1)
    else:
        values = y[rows]
    clean, corrupted = (batch[rows[:, side]] for side in (0, 1))
    masks: dict[str, Any] = {}
    if batch.attention_mask is not None and batch.examples.plain:
        masks = {"mask": clean.attention_mask, "corrupted_mask": corrupted.attention_mask}
    made = PatchPairs(clean.inputs, corrupted.inputs, None, read, values, label=target, **masks)
    return Swapped(made, None, clean.groups)


def _alike(batch: Batch) -> Tensor:
    """A number for each example, equal where masks and what counts something of an example are equal. (example,)"""
    parts = [batch.mask.reshape(len(batch), -1)]
    parts += [] if batch.attention_mask is None else [batch.attention_mask]
    for part in batch.examples.batched.values():
        if not part.is_floating_point() and (part.ndim == 1 or part.dtype == torch.bool):
            parts.append(part.reshape(len(batch), -1))
    rows = torch.cat([part.long() for part in parts], 1)
    return torch.unique(rows, dim=0, return_inverse=True)[1]

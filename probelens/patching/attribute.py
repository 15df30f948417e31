"""Attribution patching: every patch at once, to first order, from one backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, metric_name
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.points import HookPoint, has_positions
from probelens.hooks.shorthand import Names
from probelens.numerics.modes import differentiable
from probelens.numerics.tensors import whole_number
from probelens.patching.metric import Metric, need_numbers
from probelens.patching.pairs import Mode, Pos, Side, check_pairs, check_positions, columns, length_at, notes, sides_of
from probelens.patching.plan import Source
from probelens.patching.result import PatchResult
from probelens.results.progress import progress_bar
from probelens.running.faster_forwards import faster_forwards
from probelens.running.gradients import need_gradients
from probelens.running.sweep.plan import plan

__all__ = ["attribute"]


def attribute(
    model: HookedModel,
    pairs: Any,
    sites: Names = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> PatchResult:
    """Attribution patching: a first-order estimate of ``patch`` from one backward pass.

    Args:
        model: As for ``patch``; it must be differentiable at the sites.
        pairs, sites, pos, mode, metric, batch_size, progress: As for ``patch``.

    Returns:
        A PatchResult of ``kind="attribution"``. A prefilter: check what matters with ``patch``, and
        compare the two with ``agreement`` on a few cells.

    Raises:
        InputError: What ``patch`` refuses, a point from which no gradient comes back, or a model that gives none: one
            run elsewhere, or made under ``torch.inference_mode``.
        MetricError: A metric without a gradient, or one that ``patch`` refuses.

    Source:
        Nanda 2023; Syed, Rager and Conmy 2023, arXiv 2310.10348.
    """
    need_wrapped(model)
    need_gradients(model, "attribute()", "patch()")
    check_pairs(pairs, mode)
    whole_number("batch_size", batch_size)
    points = resolve(model, sites)
    names = [point.name for point in points]
    sides = sides_of(model, pairs, metric, batch_size)
    into, source = (sides.corrupted, sides.clean) if mode == "denoise" else (sides.clean, sides.corrupted)
    where, labels = columns(pos, length_at(model, into, names, pairs, pos is not None), len(pairs), pairs)
    if any(target is not None and not torch.equal(target, of) for target, of in where if of is not None):
        raise InputError(
            "attribute() estimates patches of the same position on both sides. Give one position for each pair, or use patch()"
        )
    column = [sides.each(target) for target, _ in where]
    check_positions(model, names, column)
    values = Source(model, source.examples, names, source.told, source.always)
    parts: list[Tensor] = []
    base: list[Tensor] = []
    chunks = torch.arange(len(into.examples)).split(batch_size)
    with (
        model.undisturbed(),
        differentiable(),
        faster_forwards(model, names),
        progress_bar(len(chunks), "backward passes", progress) as bar,
    ):
        for rows in chunks:
            with torch.no_grad():
                given = values.collected(rows)
            found, value = first_order(model, into, names, given, rows)
            cells = [torch.stack([_at(x, None if c is None else c[rows]) for c in column]) for x in found]
            parts.append(torch.stack(cells) + value[:, 0])
            base.append(value)
            bar.update(1)
    # What is read of several answers of one pair is joined as in patch().
    likely = metric == "prob_diff"
    if likely and sides.runs > 1:
        raise InputError("attribute() estimates the log-probability of answers of several tokens: metric='logit_diff'")
    own, changed = sides.joined(torch.cat(base), likely), torch.cat(parts, dim=-1)
    if sides.runs > 1:
        changed = changed[..., : sides.n] - changed[..., sides.n :]
    other = sides.joined(
        plan(
            model, source.examples, (), source.read, batch_size=batch_size, attention_mask=source.told, always=source.always
        ).run().base,
        likely,
    )  # fmt: skip
    clean, corrupted = (other, own) if mode == "denoise" else (own, other)
    tokens = pairs.sides[0].tokens
    need_numbers(metric, clean[:, 0], corrupted[:, 0])
    return PatchResult(
        changed, clean[:, 0], corrupted[:, 0], sides.answered_by(clean, corrupted), names,
        [point.depth for point in points], labels, mode,
        metric_name(metric),
        "attribution", "full", None if tokens is None else tokens.cpu(), False, notes(pairs, sides.answered),
    )  # fmt: skip


def _at(effect: Tensor, column: Tensor | None) -> Tensor:
    """An effect (example, pos) at one position of each example, at a span (example, pos) of them, or at all. (example,)"""
    if column is None:
        return effect.sum(1)
    if column.ndim == 2:
        return effect.where(column[:, : effect.shape[1]], 0.0).sum(1)
    return effect[torch.arange(len(effect)), column]


def first_order(
    model: HookedModel, side: Side, names: list[str], values: dict[str, Tensor], rows: Tensor
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradient times difference at each site, summed over features: (example, pos) each; and what is read."""
    held: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in names}

    def keep(tensor: Tensor, hook: HookPoint) -> Tensor:
        # A frozen model computes no gradient by itself.
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        # A tensor of its own is what the run goes on with; the one given back unchanged may be left for another.
        tensor = tensor.view_as(tensor)
        held[hook.name].append((hook.pos or 0, tensor))
        return tensor

    always, read = [(one.name, one.edit_for(rows)) for one in side.always], side.read
    mask = None if side.told is None else side.told[rows]
    hooks = [*always, *((name, keep) for name in names)]
    outputs = model.run_with_hooks(side.examples.rows(rows), hooks, attention_mask=mask)
    if read.pos is not None:
        where = read.pos[rows].to(outputs.device)
        outputs = outputs.gather(1, where[..., None].expand(-1, -1, outputs.shape[-1]))
    value = read.value(outputs, rows)
    if not value.requires_grad:
        raise MetricError(
            "attribute() needs the gradient of the metric, which has none. Compute it from logits, or use patch()."
        )
    for steps in held.values():
        # The backward direction visits steps in reverse.
        steps.sort(key=lambda pair: pair[0])
    every = [tensor for name in names for _, tensor in held[name]]
    grads = iter(torch.autograd.grad(value[:, 0].sum(), every, allow_unused=True))
    found = []
    for name in names:
        # A state point was called once a step; any other point once, with all positions.
        point = model.point(name)
        parts = []
        of_point = [next(grads) for _ in held[name]]
        # A state after the read position has no gradient: nothing is read from it. Elsewhere it would mean 0.
        if all(grad is None for grad in of_point) or not (point.step or all(g is not None for g in of_point)):
            raise InputError(
                f"attribute() needs a gradient at {name!r}, and none comes back there: what is read doesn't depend on the "
                "tensor that this point gives, or the model cuts the gradient (detach, no_grad) after it. Use patch() "
                "there, or take another point"
            )
        for (i, tensor), grad in zip(held[name], of_point, strict=True):
            new = values[name][:, i] if point.step else values[name]
            new, old = new.to(tensor.device), tensor.detach()
            # Equal infinities, as of masked scores, don't differ by NaN.
            change = torch.where(new == old, 0, new - old)
            effect = torch.zeros_like(change) if grad is None else grad * change
            if not point.step and has_positions(point):
                parts.append(effect.movedim(point.pos_axis, 1).flatten(2).sum(-1))
            else:
                parts.append(effect.flatten(1).sum(-1)[:, None])
        found.append(torch.cat(parts, 1).cpu())
    return found, value.detach().cpu()

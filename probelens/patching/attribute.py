"""Attribution patching: every patch at once, to first order, from one backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, metric_name
from probelens.hooks.inputs import padding_mask
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.points import HookPoint, has_positions
from probelens.hooks.shorthand import Names
from probelens.numerics.modes import differentiable
from probelens.patching.metric import Metric, answered, need_numbers, read_metric
from probelens.patching.pairs import Mode, Pos, check_pairs, check_positions, columns
from probelens.patching.result import PatchResult
from probelens.results.progress import progress_bar
from probelens.running.collect import collect
from probelens.running.faster_forwards import faster_forwards
from probelens.running.gradients import need_gradients
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.plan import sweep

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
    points = resolve(model, sites)
    names = [point.name for point in points]
    where, labels = columns(pos, pairs.clean.shape[1], len(pairs))
    check_positions(model, names, where)
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask, model, pairs.clean)
    fn = read_metric(metric)
    read = Read(fn, pairs.read_pos[:, None].long(), {"answers": pairs.answers})
    values = collect(model, source, names, batch_size=batch_size, attention_mask=mask).tensors
    parts: list[Tensor] = []
    base: list[Tensor] = []
    chunks = torch.arange(len(pairs)).split(batch_size)
    with (
        model.evaluating(),
        differentiable(),
        faster_forwards(model, names),
        progress_bar(len(chunks), "backward passes", progress) as bar,
    ):
        for rows in chunks:
            found, value = first_order(
                model, into[rows], None if mask is None else mask[rows], names, values, rows, read
            )
            cells = [
                torch.stack([x.sum(1) if c is None else x[torch.arange(len(rows)), c[rows]] for c in where])
                for x in found
            ]
            parts.append(torch.stack(cells) + value[:, 0])
            base.append(value)
            bar.update(1)
    own = torch.cat(base)
    other = sweep(model, source, (), read, batch_size=batch_size, attention_mask=mask).base
    clean, corrupted = (other, own) if mode == "denoise" else (own, other)
    need_numbers(metric, clean[:, 0], corrupted[:, 0])
    return PatchResult(
        torch.cat(parts, dim=-1), clean[:, 0], corrupted[:, 0], answered(clean, corrupted), names,
        [point.depth for point in points], labels, mode,
        metric_name(metric),
        "attribution", "full", pairs.clean.cpu(),
    )  # fmt: skip


def first_order(
    model: HookedModel, tokens: Tensor, mask: Tensor | None, names: list[str], values: dict[str, Tensor],
    rows: Tensor, read: Read,
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

    logits = model.run_with_hooks(tokens, [(name, keep) for name in names], attention_mask=mask)
    where = read.pos[rows].to(logits.device)  # type: ignore[index]
    picked = logits.gather(1, where[..., None].expand(-1, -1, logits.shape[-1]))
    value = read.value(picked, rows)
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
            new = values[name][rows][:, i] if point.step else values[name][rows]
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

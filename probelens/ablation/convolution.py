"""Ablation of the short convolution of Mamba and other mixers, in each sense of "remove it".

Each channel of a mixer is y_t = w_k x_t + Σ w_i x_{t−i} + bias. "Remove the convolution" may mean to
keep the current tap, to pass x through, or to take the output away, and these cost very different
amounts. Training without a convolution is a sixth sense, and needs another model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.ablation.answers import Metric, reader, scored_positions
from probelens.ablation.components import ComponentResult, donor_rows, position_means, replacement, result_of
from probelens.ablation.controls import label_of
from probelens.ablation.scoring import Runs, per_sequence
from probelens.errors import InputError, UnknownHookError
from probelens.hooks.edits.values import Add
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.hooks.weights import weight_name
from probelens.running.collect import collect
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.plan import sweep

__all__ = ["VARIANTS", "ablate_convolution"]

Variant = Literal["current_tap", "delta", "zero", "mean", "resample_past"]
VARIANTS: tuple[Variant, ...] = ("current_tap", "delta", "zero", "mean", "resample_past")
"""The ways to ablate a convolution."""


def ablate_convolution(
    model: HookedModel,
    batch: Any,
    how: Variant | Sequence[Variant] = VARIANTS,
    layers: Literal["together", "each"] | Sequence[int] = "together",
    metric: Metric = "accuracy",
    *,
    draws: int = 5,
    target: str | None = None,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ComponentResult:
    """Ablate the convolutions, clean and ablated runs on one backend.

    - "current_tap": keep the weight of the current input and the bias, zero the past taps.
    - "delta": pass the input through: a weight of one on the current input, no bias.
    - "zero": zero the output.
    - "mean": the output's mean at each position.
    - "resample_past": keep the current tap and the bias, take what the past taps add from another
      example.

    Weights are changed while it runs and restored bit for bit.

    Args:
        model: A wrapped model whose mixers have a ``hook_conv``: Mamba, Mamba-2, LFM2 and other hybrids; run in eval
            mode, on the reference backend.
        batch: Sequences to measure on. tokens (example, pos).
        how: One or several of the above.
        layers: "together" ablates all layers in one run, "each" one at a time; or the layers to
            ablate together.
        metric, draws, target, batch_size, memory, seed, progress: As for ``ablate_component``.

    Returns:
        One row per way and group of layers.

    Raises:
        UnknownHookError: The model has no convolution, or not that layer.
        InputError: An unknown ``how``, or layers without a convolution.

    Source:
        The ablation of arXiv 2606.00926, which doesn't say which of these it is.
    """
    need_wrapped(model)
    ways = [how] if isinstance(how, str) else list(how)
    unknown = [w for w in ways if w not in VARIANTS]
    if unknown or not ways or draws < 1:
        raise InputError(
            f"how={how!r}, draws={draws}: how must be among {', '.join(map(repr, VARIANTS))}, and draws at least 1"
        )
    if metric == "kl":
        raise InputError(
            "metric='kl' compares runs on the same weights, and convolutions are ablated by changing them. Give another metric"
        )
    known = label_of(batch, target, "target") if metric == "accuracy" or target is not None else ""
    groups = _groups(model, layers)
    read = reader(model, batch, metric, known)
    scored = scored_positions(batch, metric, read.by_position)
    shared: dict[str, Any] = {
        "batch_size": batch_size, "memory": memory, "attention_mask": batch.attention_mask,
        "progress": progress,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    values: list[Tensor] = []
    with model.backend("reference"):
        clean = sweep(model, batch.inputs, (), read, **shared)
        for way in ways:
            for group in groups:
                kept, conditions = _plan(model, batch, way, group, draws, batch_size, seed)
                with model.edit_weights(kept):
                    run = sweep(model, batch.inputs, conditions, read, **shared)
                found = (run.values if conditions else run.base[None]).double()
                each = per_sequence(found, scored).mean(1)
                rows.append(
                    {
                        "site": " + ".join(_name(layer) for layer in group),
                        "layer": model.point(_name(group[0])).depth,
                        "layers": ",".join(map(str, group)), "head": None, "how": way, "draws": len(found),
                        "draw_sd": each.std().item() if len(each) > 1 else None,
                    }
                )  # fmt: skip
                values.append(found.mean(0))
    return result_of(rows, Runs(torch.stack(values), clean.base, scored, clean.path), batch, known, metric, seed)


def _name(layer: int) -> str:
    return f"blocks.{layer}.mixer.hook_conv"


def _groups(model: HookedModel, layers: Any) -> list[list[int]]:
    n = model.cfg.n_layers
    every = [layer for layer in range(n) if _name(layer) in model.hook_dict]
    if not every:
        raise UnknownHookError(
            f"this {type(model.module).__name__} has no mixer.hook_conv: ablate_convolution() is for mixers with a "
            "short convolution, such as those of Mamba and Mamba-2"
        )
    if isinstance(layers, str):
        if layers not in ("together", "each"):
            raise InputError(f"layers={layers!r} is not known. Allowed: 'together', 'each', or a list of layers")
        return [every] if layers == "together" else [[layer] for layer in every]
    wanted = list(layers)
    bad = [layer for layer in wanted if layer not in every]
    if bad or not wanted:
        raise InputError(f"layers={wanted}: the layers with a convolution are {every}. Give some of them.")
    return [wanted]


def _plan(
    model: HookedModel, batch: Any, way: str, group: list[int], draws: int, batch_size: int, seed: int
) -> tuple[dict[str, Callable[[Tensor], Tensor]], list[Condition]]:
    """The weights to change and the conditions to run; without any condition the run has no hooks."""
    names = [_name(layer) for layer in group]
    if way in ("zero", "mean"):
        means: dict[str, Tensor] = {}
        if way == "mean":
            acts = _collected(model, batch, names, batch_size)
            means = {name: position_means(x, batch.mask, batch.mask) for name, x in acts.items()}
        edits = [replacement(model.point(name), None, means.get(name), batch.mask) for name in names]
        return {}, [Condition((way,), tuple(edits))]
    kept = _weights(model, group, delta=way == "delta")
    if way != "resample_past":
        return kept, []
    past = {}
    for layer, name in zip(group, names, strict=True):
        # One layer at a time, so that the input of each is clean.
        whole = _collected(model, batch, [name], batch_size)[name]
        with model.edit_weights(_weights(model, [layer])):
            past[name] = whole - _collected(model, batch, [name], batch_size)[name]
    rows = [donor_rows(batch, batch, seed * 1000 + i) for i in range(draws)]
    return kept, [Condition((i,), tuple(_adding(n, past[n], r, batch.mask) for n in names)) for i, r in enumerate(rows)]


def _collected(model: HookedModel, batch: Any, names: list[str], batch_size: int) -> dict[str, Tensor]:
    return collect(model, batch, names, batch_size=batch_size).tensors


def _weights(model: HookedModel, group: list[int], delta: bool = False) -> dict[str, Callable[[Tensor], Tensor]]:
    """Edits that leave only the current tap of each layer; as a weight of one, for ``delta``."""

    def current(weight: Tensor) -> Tensor:
        out = torch.zeros_like(weight)
        out[..., -1] = 1.0 if delta else weight[..., -1]
        return out

    edits: dict[str, Callable[[Tensor], Tensor]] = {}
    for layer in group:
        weight, bias = (_parameter(model, layer, part) for part in ("weight", "bias"))
        edits[str(weight)] = current
        if delta and bias is not None:
            edits[bias] = torch.zeros_like
    return edits


def _parameter(model: HookedModel, layer: int, part: str) -> str | None:
    """The name of the weight or the bias of a mixer's convolution; None where it has none."""
    for name in ("conv1d", "conv", "conv_1d"):
        with contextlib.suppress(UnknownHookError):
            weight_name(model, full := f"blocks.{layer}.mixer.{name}.{part}")
            return full
    return None


def _adding(name: str, past: Tensor, donors: Tensor, mask: Tensor) -> Intervention:
    """Add what the past taps of other examples gave to the current tap's output."""
    added = torch.where(mask[..., None], past[donors], past)
    return Intervention(name, lambda rows: Add(None, added[rows]))

"""Activation patching: put activations of one run into another and see what comes back.

Denoising puts clean activations into the corrupted run (sufficiency); noising puts corrupted ones
into the clean run (necessity). Attribution patching estimates either to first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError
from probelens.hooks.model import HookedModel
from probelens.hooks.sites import Sites, expand, layer_of, need_wrapped
from probelens.numerics.modes import differentiable
from probelens.patching.parts import (
    Metric,
    Mode,
    Pos,
    answered,
    at_column,
    check_pairs,
    check_positions,
    columns,
    first_order,
    read_metric,
)
from probelens.patching.plan import patch_plan
from probelens.results.result import Result
from probelens.running.collect import collect, padding_mask
from probelens.running.quick import quick
from probelens.running.sweep.plan import Read, sweep

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["PatchResult", "attribute", "patch"]

plan = patch_plan


@dataclass(frozen=True, eq=False)
class PatchResult(Result):
    """What patching did, for every site, position and example.

    Args:
        values: The metric after each patch, in its own unit. (site, pos, example)
        clean: The metric on the clean run. (example,)
        corrupted: The metric on the corrupted run. (example,)
        correct: Whether both runs prefer their own right answer, by the logits, whatever the metric. (example,)
        sites: Hook point of each row.
        layers: Layer of each row; −1 is the embedding.
        positions: Position of each column, as text: "7", "all", "per example".
        mode: "denoise" or "noise".
        metric: Name of the metric.
        kind: "patch" for exact values, "attribution" for the first-order estimate.
        path: How the engine ran: "resume", "skip" or "full"; see ``sweep``.
        tokens: The clean tokens, for labels. (example, length)
        joint: Whether all sites were patched together in one run.
        extra: What the caller wants to keep with the result; saved and loaded with it. "marks" are shown
            by ``plot``.
    """

    values: Tensor
    clean: Tensor
    corrupted: Tensor
    correct: Tensor
    sites: list[str]
    layers: list[int]
    positions: list[str]
    mode: str = "denoise"
    metric: str = "logit_diff"
    kind: str = "patch"
    path: str = "full"
    tokens: Tensor | None = None
    joint: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def kept(self, correct_only: bool = True) -> Tensor:
        """Which examples count.

        Args:
            correct_only: Only pairs that both runs answer correctly; False counts all.

        Returns:
            True where an example counts. (example,) bool

        Raises:
            MetricError: None does.
        """
        chosen = self.correct if correct_only else torch.ones_like(self.correct)
        if not bool(chosen.any()):
            raise MetricError(
                f"none of the {len(self.correct)} pairs is answered correctly by both runs, so there is no gap to "
                "restore. Train the model longer, or look at all pairs with correct_only=False."
            )
        return chosen

    def recovery(self, correct_only: bool = True) -> Tensor:
        """The share of the clean−corrupted gap that each patch moves; not clipped.

        A ratio of means over examples. Denoising: 1 is the clean run, 0 the corrupted one. Noising
        is the mirror: 1 means that the patch takes the whole gap away, 0 that it takes nothing.

        Args:
            correct_only: Count only pairs that both runs answer correctly.

        Returns:
            (site, pos)

        Raises:
            MetricError: No pair counts, or clean and corrupted are equal on average.

        Source:
            Heimersheim and Nanda 2024, arXiv 2404.15255, section 3.
        """
        return self._ratio(self.kept(correct_only).nonzero().flatten())

    def _ratio(self, rows: Tensor) -> Tensor:
        clean, corrupted = self.clean[rows].double().mean(), self.corrupted[rows].double().mean()
        gap = clean - corrupted
        if bool(gap.isnan()):
            raise MetricError(
                "the metric is NaN for some pairs, so there is no gap to restore. Mask these pairs, or mend it."
            )
        if not bool(gap.abs() > 1e-12):
            raise MetricError(
                "clean and corrupted runs have the same mean metric, so there is no gap to restore. "
                "Check that the pairs differ in what the metric reads."
            )
        patched = self.values[:, :, rows].double().mean(-1)
        done = (patched - corrupted) / gap if self.mode == "denoise" else (clean - patched) / gap
        # Adding zero turns −0.0, which reads like a sign, into 0.0.
        return done.to(torch.float32) + 0.0

    def interval(
        self, level: float = 0.95, n_boot: int = 1000, seed: int = 0, correct_only: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Bootstrap interval of ``recovery`` over examples, clean, corrupted and patched paired.

        Args:
            level: Coverage.
            n_boot: Resamples.
            seed: Of the resampling.
            correct_only: As for ``recovery``.

        Returns:
            Lower and upper bounds, each (site, pos); NaN where a single example counts.
        """
        from probelens.numerics.stats import ratio_of_means

        rows = self.kept(correct_only).nonzero().flatten()
        value = self._ratio(rows)
        if len(rows) == 1:
            return torch.full_like(value, torch.nan), torch.full_like(value, torch.nan)
        clean, corrupted = self.clean[rows].double(), self.corrupted[rows].double()
        patched = self.values[:, :, rows].double().movedim(-1, 0)
        top = patched - corrupted[:, None, None] if self.mode == "denoise" else clean[:, None, None] - patched
        found = ratio_of_means(top[None], (clean - corrupted)[None], level=level, n_draws=n_boot, seed=seed)
        return found.low.float(), found.high.float()

    def agreement(self, other: PatchResult, top: int = 10, correct_only: bool = True) -> dict[str, float]:
        """How well another result, such as ``attribute``'s estimate, agrees with this one cell by cell.

        Args:
            other: The same sites, positions, mode and metric on the same pairs.
            top: Cells of the largest absolute recovery to compare; all where there are fewer.
            correct_only: As for ``recovery``.

        Returns:
            ``correlation`` (Pearson) and ``rank_correlation`` (Spearman) of recovery over cells, NaN
            where one of the two is constant; ``max_difference`` and ``mean_difference``, absolute;
            ``top_overlap``, the share of this result's ``top`` cells that are among the other's;
            ``top`` and ``cells``, how many were compared.

        Raises:
            InputError: Other sites, positions, mode, metric or pairs, or ``top`` below 1.

        Examples:
            >>> exact = PatchResult(
            ...     torch.tensor([[[0.0], [1.0], [2.0]]]), torch.ones(1), -torch.ones(1),
            ...     torch.tensor([True]), ["hook_embed"], [-1], ["0", "1", "2"])
            >>> exact.agreement(exact, top=1)["top_overlap"]
            1.0
        """
        for name in ("sites", "positions", "mode", "metric"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InputError(f"the results have different {name}: {mine} here, {theirs} in the other")
        same = self.tokens is None or other.tokens is None or torch.equal(self.tokens, other.tokens)
        if self.values.shape != other.values.shape or not same:
            raise InputError("the results are of different pairs: patch and attribute the same ones")
        if top < 1:
            raise InputError(f"top must be at least 1, got {top}")
        a, b = (r.recovery(correct_only).flatten().double() for r in (self, other))
        top = min(top, len(a))
        first, second = (set(x.abs().topk(top).indices.tolist()) for x in (a, b))
        return {
            "correlation": _correlation(a, b),
            "rank_correlation": _correlation(_ranks(a), _ranks(b)),
            "max_difference": (a - b).abs().max().item(),
            "mean_difference": (a - b).abs().mean().item(),
            "top_overlap": len(first & second) / top,
            "top": top,
            "cells": len(a),
        }

    def to_dataframe(self, correct_only: bool = True) -> pd.DataFrame:
        """One row a cell: site, layer, pos, recovery, lo, hi, n, mode, metric, kind.

        Args:
            correct_only: As for ``recovery``.

        Returns:
            One table, sites in order.
        """
        import pandas as pd

        recovery, (lo, hi) = self.recovery(correct_only), self.interval(correct_only=correct_only)
        n = int(self.kept(correct_only).sum())
        return pd.DataFrame(
            [
                {
                    "site": site, "layer": self.layers[i], "pos": pos, "recovery": recovery[i, j].item(),
                    "lo": lo[i, j].item(), "hi": hi[i, j].item(), "n": n,
                    "mode": self.mode, "metric": self.metric, "kind": self.kind,
                }
                for i, site in enumerate(self.sites)
                for j, pos in enumerate(self.positions)
            ]
        )  # fmt: skip

    def plot(self, tokens: Sequence[str] | None = None, correct_only: bool = True) -> go.Figure:
        """Heat map of recovery, layer by position.

        Args:
            tokens: Text of each position, shown on the axis.
            correct_only: As for ``recovery``.

        Returns:
            A heat map with intervals in the hover text.
        """
        from probelens.results import plots

        lo, hi = self.interval(correct_only=correct_only)
        where = [int(p) if p.isdigit() else i for i, p in enumerate(self.positions)]
        return plots.patch_heatmap(
            self.recovery(correct_only),
            self.sites,
            where,
            tokens=tokens,
            lo=lo,
            hi=hi,
            mode="noise" if self.mode == "noise" else "denoise",
            marks=self.extra.get("marks") if self.positions and self.positions[0].isdigit() else None,
        )


def patch(
    model: HookedModel,
    pairs: Any,
    sites: Sites = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    joint: bool = False,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> PatchResult:
    """Patch each site and position, and measure what that does to the answer.

    Args:
        model: The wrapped model; run in eval mode.
        pairs: PatchPairs: clean and corrupted tokens (example, pos), where to read, the answers.
        sites: Where: a shorthand such as "resid_pre", "layers", names, globs, or a list.
        pos: "each" for every position by itself; None for all positions at once; an int; a slice or
            list for each of these; or a tensor (example,) with a position for each example. At a
            pattern (``attn.hook_pattern``, ``hook_attn_scores``) it is the position of the query.
        mode: "denoise" puts clean activations into the corrupted run, "noise" the mirror.
        metric: "logit_diff" (clean minus corrupted answer), "prob_diff", or a function of the
            logits at the read position (batch, d_vocab) and the answers (batch, 2).
        joint: Patch all sites together in one run instead of each by itself.
        batch_size: Pairs in one forward pass, at most.
        memory: Bytes that may be held at once, for a sweep that would need too much; None for the usual
            limits. Values stay the same up to rounding. ``patch_plan`` says what is held.
        seed: Not used: exact patching draws nothing.
        progress: Show a progress bar.

    Returns:
        ``values`` (site, pos, example), and ``recovery()`` (site, pos).

    Raises:
        InputError: An unknown mode, metric or position, a point without positions and ``pos`` other than None,
            an answer outside the vocabulary, or a memory budget that one pair at one patch exceeds.
        UnknownHookError: A site that the model doesn't have.

    Source:
        Denoising ρ = (LD_patch − LD_corr)/(LD_clean − LD_corr): Heimersheim and Nanda 2024,
        arXiv 2404.15255; Zhang and Nanda 2024, arXiv 2309.16042.
    """
    return patch_plan(
        model, pairs, sites, pos, mode, metric, joint=joint, batch_size=batch_size, memory=memory, seed=seed
    ).run(progress)


def attribute(
    model: HookedModel,
    pairs: Any,
    sites: Sites = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> PatchResult:
    """Attribution patching: a first-order estimate of ``patch`` from one backward pass.

    Args:
        model: As for ``patch``; it must be differentiable at the sites.
        pairs: As for ``patch``.
        sites: As for ``patch``.
        pos: As for ``patch``.
        mode: As for ``patch``.
        metric: As for ``patch``.
        batch_size: Pairs in one pass.
        seed: Not used; kept for one signature.
        progress: Show a progress bar.

    Returns:
        A PatchResult of ``kind="attribution"``. A prefilter: check what matters with ``patch``, and
        compare the two with ``agreement`` on a few cells.

    Raises:
        InputError: What ``patch`` refuses, a point from which no gradient comes back, or a model that gives none: one
            run elsewhere, or made under ``torch.inference_mode``.

    Source:
        Nanda 2023; Syed, Rager and Conmy 2023, arXiv 2310.10348.
    """
    need_wrapped(model)
    from probelens.results.progress import progress_bar

    if not model.adapter.differentiable:
        raise InputError(
            f"attribute() needs a gradient, and none comes back from a model run by {model.adapter.name!r} elsewhere. "
            "Use patch()"
        )
    check_pairs(pairs, mode)
    names = expand(model, sites)
    where, labels = columns(pos, pairs.clean.shape[1], len(pairs))
    check_positions(model, names, where)
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask, model)
    fn = read_metric(metric)
    read = Read(fn, pairs.read_pos[:, None].long(), {"answers": pairs.answers})
    values = collect(model, source, names, batch_size=batch_size, attention_mask=mask).tensors
    parts: list[Tensor] = []
    base: list[Tensor] = []
    chunks = torch.arange(len(pairs)).split(batch_size)
    if any(p.is_inference() for p in model.module.parameters()):
        raise InputError(
            "attribute() needs a gradient, and this model was made under torch.inference_mode, so it can have none. "
            "Make it outside, or use patch()"
        )
    with (
        model.evaluating(),
        differentiable(),
        quick(model, names),
        progress_bar(len(chunks), "backward passes", progress) as bar,
    ):
        for rows in chunks:
            found, value = first_order(
                model, into[rows], None if mask is None else mask[rows], names, values, rows, read
            )
            cells = [torch.stack([at_column(x, c, rows) for c in where]) for x in found]
            parts.append(torch.stack(cells) + value[:, 0])
            base.append(value)
            bar.update(1)
    own = torch.cat(base)
    other = sweep(model, source, (), read, batch_size=batch_size, attention_mask=mask).base
    clean, corrupted = (other, own) if mode == "denoise" else (own, other)
    return PatchResult(
        torch.cat(parts, dim=-1), clean[:, 0], corrupted[:, 0], answered(clean, corrupted), names,
        [layer_of(name, model) for name in names], labels, mode,
        metric if isinstance(metric, str) else getattr(metric, "__name__", "custom"),
        "attribution", "full", pairs.clean.cpu(),
    )  # fmt: skip


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return (a @ b / size).item() if size > 0 else float("nan")


def _ranks(x: Tensor) -> Tensor:
    """Ranks, equal values sharing their mean rank. (cell,)"""
    _, ids, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[ids]

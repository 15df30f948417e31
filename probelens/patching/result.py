"""``PatchResult``: what patching did, as a metric for every site, position and example."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError
from probelens.results.columns import Column, table
from probelens.results.result import Result
from probelens.results.sentences import between, count, fixed, place, positions, valued

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["PatchResult"]

GAP = "fraction of the gap"
ROUNDING = 1e-6  # of the metric's size: a smaller difference of means is none


def need_answered(correct: Tensor) -> None:
    """Refuse pairs none of which is answered correctly by both runs. (example,)"""
    if not bool(correct.any()):
        raise MetricError(
            f"none of the {len(correct)} pairs is answered correctly by both runs, so there is no gap to "
            "restore. Train the model longer, or look at all pairs with correct_only=False."
        )


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
            by ``plot``, "unanswered" says that the pairs have no right answers, and "rounding" how far runs from
            mid-sequence were from whole ones in half precision.
        heads: Head of each row; empty where whole activations were patched.
    """

    columns = (
        Column("site", str, "Hook point."),
        Column("layer", int, "Place on the layer axis; −1 is the embedding."),
        Column("head", int | None, "The head that was patched, or None for all."),
        Column("pos", str, 'Position patched, as text: "7", "all", "per example".'),
        Column("recovery", float, "Share of the clean−corrupted gap that the patch moves; not clipped.", GAP),
        Column("lo", float, "Lower end of its 95 % interval, over pairs; NaN for a single pair.", GAP),
        Column("hi", float, "Upper end of it.", GAP),
        Column("n", int, "Pairs counted.", "pairs"),
        Column("mode", str, '"denoise" or "noise".'),
        Column("metric", str, "Name of the metric."),
        Column("kind", str, '"patch" for exact values, "attribution" for the first-order estimate.'),
    )

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
    heads: list[int | None] = field(default_factory=list)

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
        need_answered(chosen)
        return chosen

    def recovery(self, correct_only: bool = True) -> Tensor:
        """The share of the clean−corrupted gap that each patch moves; not clipped.

        A ratio of means over examples. Denoising: 1 is the clean run, 0 the corrupted one. Noising
        is the mirror: 1 means that the patch takes the whole gap away, 0 that it takes nothing. The gap of the metric
        "value" may have either sign, so each pair is counted in the direction of its own.

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
        moved, gaps = self._moved(rows)
        gap = gaps.mean()
        if bool(gap.isnan()):
            raise MetricError(
                "the metric is NaN for some pairs, so there is no gap to restore. Mask those pairs, or fix the metric."
            )
        size = max(run[rows].double().abs().mean().item() for run in (self.clean, self.corrupted))
        if not bool(gap.abs() > ROUNDING * size):
            raise MetricError(
                "clean and corrupted runs have the same mean metric up to rounding, so there is no gap to restore. "
                "Check that the pairs differ in what the metric reads."
            )
        done = moved.mean(-1) / gap
        # Adding zero turns −0.0, which reads like a sign, into 0.0.
        return done.to(torch.float32) + 0.0

    def _moved(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What each patch moves of some pairs (site, pos, example), and the gap of each (example,)."""
        clean, corrupted, patched = (x[..., rows].double() for x in (self.clean, self.corrupted, self.values))
        gap, moved = clean - corrupted, patched - corrupted if self.mode == "denoise" else clean - patched
        sign = gap.sign() if self.metric == "value" else 1.0
        return moved * sign, gap * sign

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
        moved, gap = self._moved(rows)
        found = ratio_of_means(moved.movedim(-1, 0)[None], gap[None], level=level, n_draws=n_boot, seed=seed)
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
        """
        from scipy.stats import pearsonr, spearmanr

        for name in ("sites", "heads", "positions", "mode", "metric"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                raise InputError(f"the results have different {name}: {here} here, {there} in the other")
        same = self.tokens is None or other.tokens is None or torch.equal(self.tokens, other.tokens)
        if self.values.shape != other.values.shape or not same:
            raise InputError("the results are of different pairs: patch and attribute the same ones")
        if top < 1:
            raise InputError(f"top must be at least 1, got {top}")
        a, b = (r.recovery(correct_only).flatten().double() for r in (self, other))
        # Of a constant or a single cell scipy warns before it gives NaN.
        varied = all(bool((x != x[0]).any()) for x in (a, b))
        mine, theirs = a.numpy(), b.numpy()
        top = min(top, len(a))
        first, second = (set(x.abs().topk(top).indices.tolist()) for x in (a, b))
        return {
            "correlation": pearsonr(mine, theirs).statistic.item() if varied else float("nan"),
            "rank_correlation": spearmanr(mine, theirs).statistic.item() if varied else float("nan"),
            "max_difference": (a - b).abs().max().item(),
            "mean_difference": (a - b).abs().mean().item(),
            "top_overlap": len(first & second) / top,
            "top": top,
            "cells": len(a),
        }

    def to_dataframe(self, correct_only: bool = True) -> pd.DataFrame:
        """One row per site and position.

        Args:
            correct_only: As for ``recovery``.

        Returns:
            One table, sites in order.
        """
        recovery, (lo, hi) = self.recovery(correct_only), self.interval(correct_only=correct_only)
        n = int(self.kept(correct_only).sum())
        return table(
            [
                {
                    "site": site, "layer": self.layers[i], "head": self._head(i), "pos": pos, "recovery": recovery[i, j].item(),
                    "lo": lo[i, j].item(), "hi": hi[i, j].item(), "n": n,
                    "mode": self.mode, "metric": self.metric, "kind": self.kind,
                }
                for i, site in enumerate(self.sites)
                for j, pos in enumerate(self.positions)
            ],
            self.columns,
        )  # fmt: skip

    def _head(self, row: int) -> int | None:
        return self.heads[row] if self.heads else None

    def findings(self) -> list[str]:
        """The cell of the largest recovery, and the layers and positions where much comes back."""
        n, counted = len(self.correct), int(self.correct.sum())
        together = len(self.sites[0].split(" + ")) if self.joint else 1
        where = f"{together} sites together" if together > 1 else count(len(self.sites), "site")
        some = ("" if n == 1 else "all ") if counted == n else "not " if n == 1 else f"{counted} of them "
        lines = [
            f"{self.kind} of {self.metric} ({self.mode}) at {where} × {count(len(self.positions), 'position')}, on "
            f"{count(n, 'pair')}"
            + ("." if self.extra.get("unanswered") else f", {some}answered correctly by both runs.")
        ]
        lines += [self.extra["rounding"]] if "rounding" in self.extra else []
        if not counted:
            return [*lines, "No pair is answered correctly by both runs, so there is no gap to recover."]
        means = [valued(run[self.correct].mean().item()) for run in (self.clean, self.corrupted)]
        try:
            recovery = self.recovery()
        except MetricError:
            why = (
                "is NaN for some pairs"
                if "unknown" in means
                else f"is the same on clean and corrupted runs, {means[0]}"
            )
            return [*lines, f"{self.metric} {why}, so there is no gap to recover."]
        lines.append(f"{self.metric} is {means[0]} on clean runs and {means[1]} on corrupted ones.{self._doubt()}")
        i, j = divmod(int(recovery.nan_to_num(-torch.inf).argmax()), len(self.positions))
        cell = dataclasses.replace(self, values=self.values[i : i + 1, j : j + 1])
        low, high = (end.item() for end in cell.interval())
        spots = [place({"site": site, "layer": layer}) for site, layer in zip(self.sites, self.layers)]
        spots = [spot if self._head(i) is None else f"{spot}, head {self._head(i)}" for i, spot in enumerate(spots)]
        spots = [f"all {together} sites together"] if together > 1 else spots
        what = "is recovered at" if self.mode == "denoise" else "is removed at"
        lines.append(
            f"Most {what} {spots[i]}, {positions([self.positions[j]])}: {fixed(recovery[i, j].item())}"
            f"{between(low, high, fixed)} of the gap."
        )
        much = [[p for j, p in enumerate(self.positions) if recovery[i, j] >= 0.5] for i in range(len(spots))]
        found = [f"  {spot}, {positions(at)}" for spot, at in zip(spots, much) if at]
        return [*lines, "Half of the gap or more:", *found] if found else [*lines, "Half of the gap or more: nowhere."]

    def _doubt(self) -> str:
        """A warning where the gap that recoveries are shares of is lost in the differences between pairs."""
        from probelens.numerics.stats import hierarchical_bootstrap

        gap = self._moved(self.correct.nonzero().flatten())[1]
        if len(gap) < 2:
            return ""
        found = hierarchical_bootstrap(gap[None], n_draws=1000)
        low, high = float(found.low), float(found.high)
        if not low <= 0 <= high:
            return ""
        return (
            f" Their gap, {valued(gap.mean().item())}{between(low, high)}, can't be told from 0, so shares of it say nothing. "
            "Orient the pairs so that it has one sign, or take another metric."
        )

    def plot(self, tokens: Sequence[str] | None = None, correct_only: bool = True) -> go.Figure:
        """Heat map of recovery, layer by position, with intervals in the hover text.

        Args:
            tokens: Text of each position, shown on the axis.
            correct_only: As for ``recovery``.
        """
        from probelens.results import plots

        lo, hi = self.interval(correct_only=correct_only)
        where = [int(p) if p.isdigit() else i for i, p in enumerate(self.positions)]
        return plots.patch_heatmap(
            self.recovery(correct_only),
            [site if self._head(i) is None else f"{site} head {self._head(i)}" for i, site in enumerate(self.sites)],
            where,
            tokens=tokens,
            lo=lo,
            hi=hi,
            mode="noise" if self.mode == "noise" else "denoise",
            marks=self.extra.get("marks") if self.positions and self.positions[0].isdigit() else None,
        )

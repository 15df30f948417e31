"""Activation patching: put activations of one run into another and see what comes back.

Denoising puts clean activations into the corrupted run (sufficiency); noising puts corrupted ones
into the clean run (necessity). Attribution patching estimates either to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.collect import collect, padding_mask
from probelens.errors import InputError, MetricError, ShapeError
from probelens.metrics import logit_diff
from probelens.model import HookedModel
from probelens.points import HookPoint
from probelens.results import Result
from probelens.sites import Sites, expand, layer_of
from probelens.sweep import Condition, Edit, Read, sweep

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["PatchResult", "attribute", "patch"]

Metric = Literal["logit_diff", "prob_diff"] | Callable[[Tensor, Tensor], Tensor]
Pos = Literal["each"] | int | slice | Sequence[int] | Tensor | None
Mode = Literal["denoise", "noise"]


@dataclass(frozen=True, eq=False)
class PatchResult(Result):
    """What patching did, for every site, position and example.

    Args:
        values: The metric after each patch, in its own unit. (site, pos, example)
        clean: The metric on the clean run. (example,)
        corrupted: The metric on the corrupted run. (example,)
        correct: Whether both runs prefer their own right answer. (example,)
        sites: Hook point of each row.
        layers: Layer of each row; −1 is the embedding.
        positions: Position of each column, as text: "7", "all", "edit_pos".
        mode: "denoise" or "noise".
        metric: Name of the metric.
        kind: "patch" for exact values, "attribution" for the first-order estimate.
        path: How the engine ran: "skip" or "full".
        tokens: The clean tokens, for labels. (example, length)
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
        """Which examples count. (example,) bool

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
            Lower and upper bounds, each (site, pos).
        """
        from probelens.stats import ratio_of_means

        rows = self.kept(correct_only).nonzero().flatten()
        self._ratio(rows)
        clean, corrupted = self.clean[rows].double(), self.corrupted[rows].double()
        patched = self.values[:, :, rows].double().movedim(-1, 0)
        top = patched - corrupted[:, None, None] if self.mode == "denoise" else clean[:, None, None] - patched
        found = ratio_of_means(top[None], (clean - corrupted)[None], level=level, n_draws=n_boot, seed=seed)
        return found.low.float(), found.high.float()

    def to_dataframe(self, correct_only: bool = True) -> pd.DataFrame:
        """One row a cell: site, layer, pos, recovery, lo, hi, n, mode, metric, kind."""
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
        """Heat map of recovery, layer by position."""
        from probelens import plots

        lo, hi = self.interval(correct_only=correct_only)
        where = [int(p) if p.isdigit() else i for i, p in enumerate(self.positions)]
        return plots.patch_heatmap(
            self.recovery(correct_only), self.sites, where, tokens=tokens, lo=lo, hi=hi, mode="noise" if self.mode == "noise" else "denoise"
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
    seed: int = 0,
    progress: bool = False,
) -> PatchResult:
    """Patch each site and position, and measure what that does to the answer.

    Args:
        model: The wrapped model; run in eval mode.
        pairs: PatchPairs: clean and corrupted tokens (example, pos), where to read, the answers.
        sites: Where: a shorthand such as "resid_pre", "layers", names, globs, or a list.
        pos: "each" for every position by itself; None for all positions at once; an int; a slice or
            list for each of these; or a tensor (example,) with a position for each example.
        mode: "denoise" puts clean activations into the corrupted run, "noise" the mirror.
        metric: "logit_diff" (clean minus corrupted answer), "prob_diff", or a function of the
            logits at the read position (batch, d_vocab) and the answers (batch, 2).
        joint: Patch all sites together in one run instead of each by itself.
        batch_size: Pairs in one forward pass.
        seed: Not used by exact patching; kept in the result.
        progress: Show a progress bar.

    Returns:
        ``values`` (site, pos, example), and ``recovery()`` (site, pos).

    Raises:
        InputError: An unknown mode, metric or position, or an answer outside the vocabulary.
        UnknownHookError: A site that the model doesn't have.

    Source:
        SCIENCE: denoising ρ = (LD_patch − LD_corr)/(LD_clean − LD_corr), Heimersheim and Nanda 2024,
        arXiv 2404.15255; Zhang and Nanda 2024, arXiv 2309.16042.
    """
    if mode not in ("denoise", "noise"):
        raise InputError(f"mode {mode!r} is not known. Allowed: 'denoise', 'noise'")
    names = expand(model, sites)
    columns, labels = _columns(pos, pairs.clean.shape[1], len(pairs))
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask)
    read = Read(_metric(metric), pairs.read_pos[:, None].long(), {"answers": pairs.answers})
    values = collect(model, source, names, batch_size=batch_size, attention_mask=mask).tensors
    groups = [names] if joint else [[name] for name in names]
    conditions = [
        Condition((i, j), tuple(_replace(model, name, values[name], column) for name in group))
        for i, group in enumerate(groups)
        for j, column in enumerate(columns)
    ]
    run = sweep(
        model,
        into,
        conditions,
        read,
        batch_size=batch_size,
        attention_mask=mask,
        progress=progress,
        describe="patches",
    )
    other = sweep(model, source, (), read, batch_size=batch_size, attention_mask=mask)
    clean, corrupted = (other.base, run.base) if mode == "denoise" else (run.base, other.base)
    shown = [" + ".join(group) for group in groups]
    n = model.cfg.n_layers
    return PatchResult(
        run.values.reshape(len(groups), len(columns), -1),
        clean,
        corrupted,
        (clean > 0) & (corrupted < 0),
        shown,
        [layer_of(group[0], n) for group in groups],
        labels,
        mode,
        metric if isinstance(metric, str) else getattr(metric, "__name__", "custom"),
        "patch",
        run.path,
        pairs.clean.cpu(),
        joint,
    )


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

    Source:
        Nanda 2023; Syed, Rager and Conmy 2023, arXiv 2310.10348.
    """
    from probelens.progress import progress_bar

    if mode not in ("denoise", "noise"):
        raise InputError(f"mode {mode!r} is not known. Allowed: 'denoise', 'noise'")
    names = expand(model, sites)
    columns, labels = _columns(pos, pairs.clean.shape[1], len(pairs))
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask)
    fn = _metric(metric)
    read = Read(fn, pairs.read_pos[:, None].long(), {"answers": pairs.answers})
    values = collect(model, source, names, batch_size=batch_size, attention_mask=mask).tensors
    parts: list[Tensor] = []
    base: list[Tensor] = []
    chunks = torch.arange(len(pairs)).split(batch_size)
    with model.evaluating(), progress_bar(len(chunks), "backward passes", progress) as bar:
        for rows in chunks:
            found, value = _first_order(
                model, into[rows], None if mask is None else mask[rows], names, values, rows, read
            )
            cells = [torch.stack([_at_column(x, c, rows) for c in columns]) for x in found]
            parts.append(torch.stack(cells) + value)
            base.append(value)
            bar.update(1)
    own = torch.cat(base)
    other = sweep(model, source, (), read, batch_size=batch_size, attention_mask=mask).base
    clean, corrupted = (other, own) if mode == "denoise" else (own, other)
    n = model.cfg.n_layers
    return PatchResult(
        torch.cat(parts, dim=-1), clean, corrupted, (clean > 0) & (corrupted < 0), names,
        [layer_of(name, n) for name in names], labels, mode,
        metric if isinstance(metric, str) else getattr(metric, "__name__", "custom"),
        "attribution", "full", pairs.clean.cpu(),
    )  # fmt: skip


def _first_order(
    model: HookedModel, tokens: Tensor, mask: Tensor | None, names: list[str], values: dict[str, Tensor],
    rows: Tensor, read: Read,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradient times difference at each site, summed over features: (example, pos) each; and the metric."""
    held: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: HookPoint) -> Tensor:
        # A frozen model computes no gradient by itself; from here on one is needed.
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        held[hook.name] = tensor
        return tensor

    with torch.enable_grad():
        logits = model.run_with_hooks(tokens, [(name, keep) for name in names], attention_mask=mask)
        where = read.pos[rows].to(logits.device)  # type: ignore[index]
        picked = logits.gather(1, where[..., None].expand(-1, -1, logits.shape[-1]))
        value = read.fn(picked, **{k: v[rows].to(logits.device) for k, v in read.data.items()})
        grads = torch.autograd.grad(value.sum(), [held[name] for name in names])
    found = []
    for name, grad in zip(names, grads, strict=True):
        change = values[name][rows].to(grad.device) - held[name].detach()
        found.append((grad * change).flatten(2).sum(-1).cpu())
    return found, value.detach().cpu()


def _at_column(x: Tensor, column: Tensor | None, rows: Tensor) -> Tensor:
    if column is None:
        return x.sum(1)
    return x[torch.arange(len(rows)), column[rows]]


def _replace(model: HookedModel, name: str, values: Tensor, column: Tensor | None) -> Edit:
    """The edit that puts ``values`` (example, pos, ...) in at one position of each example."""
    data: dict[str, Tensor] = {"value": values}
    if column is not None:
        data["where"] = column

    def step(tensor: Tensor, hook: HookPoint, value: Tensor, where: Tensor | None = None) -> Tensor | None:
        new = value[:, hook.pos].to(tensor)
        if where is None:
            return new
        chosen = torch.eq(where, hook.pos or 0).to(tensor.device).reshape(-1, *[1] * (tensor.ndim - 1))
        return torch.where(chosen, new, tensor)

    def whole(tensor: Tensor, hook: HookPoint, value: Tensor, where: Tensor | None = None) -> Tensor:
        if value.shape[1:] != tensor.shape[1:]:
            raise ShapeError(
                f"can't patch {hook.name!r}: the source has shape {tuple(value.shape)}, the run {tuple(tensor.shape)}"
            )
        if where is None:
            return value.to(tensor)
        rows = torch.arange(len(tensor), device=tensor.device)
        where = where.to(tensor.device)
        out = tensor.clone()
        out[rows, where] = value.to(tensor)[rows, where]
        return out

    if not model.point(name).step:
        return Edit(name, whole, data)
    steps = None if column is None else tuple(sorted(set(column.tolist())))
    return Edit(name, step, data, steps)


def _columns(pos: Pos, length: int, n: int) -> tuple[list[Tensor | None], list[str]]:
    """Columns of a patch result: a position for each example, or None for all at once; and labels."""

    def constant(p: int) -> Tensor:
        if not -length <= p < length:
            raise InputError(
                f"position {p} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
            )
        return torch.full((n,), p % length)

    if pos is None:
        return [None], ["all"]
    if isinstance(pos, str):
        if pos != "each":
            raise InputError(
                f"pos={pos!r} is not known. Allowed: None, 'each', an int, a slice, a list, a tensor"
            )
        pos = slice(None)
    if isinstance(pos, Tensor) and pos.ndim == 1 and len(pos) == n and n != 0:
        if bool(((pos < -length) | (pos >= length)).any()):
            raise InputError(f"a position is outside the {length} positions of the sequences")
        return [pos.long() % length], ["per example"]
    if isinstance(pos, int):
        wanted = [pos]
    elif isinstance(pos, slice):
        wanted = list(range(length))[pos]
    elif isinstance(pos, Tensor):
        raise ShapeError(f"pos as a tensor must be (example,) with {n} examples, got {tuple(pos.shape)}")
    else:
        wanted = [int(p) for p in pos]
    if not wanted:
        raise InputError(f"pos={pos!r} selects no position of {length}")
    return [constant(p) for p in wanted], [str(p % length) for p in wanted]


def _metric(metric: Metric) -> Callable[..., Tensor]:
    if callable(metric):
        given = metric

        def custom(logits: Tensor, answers: Tensor) -> Tensor:
            value = given(logits[:, 0], answers)
            if not isinstance(value, Tensor) or value.shape != (len(logits),):
                raise ShapeError(
                    f"metric must return one value for each example, ({len(logits)},), got "
                    f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
                )
            return value

        return custom
    if metric not in ("logit_diff", "prob_diff"):
        raise InputError(
            f"metric {metric!r} is not known. Allowed: 'logit_diff', 'prob_diff', or a function "
            "of logits (batch, d_vocab) and answers (batch, 2)"
        )

    def difference(logits: Tensor, answers: Tensor) -> Tensor:
        scores = logits[:, 0].float()
        high = int(answers.max())
        if high >= scores.shape[-1]:
            raise InputError(f"answer id {high} is outside the {scores.shape[-1]} logits of the model")
        return logit_diff(scores.softmax(-1) if metric == "prob_diff" else scores, answers)

    return difference

"""Ablation of whole components: an attention, MLP or mixer output, a head, a convolution, a state.

Zero ablation moves activations far off their distribution, and the mean of a position is still a value that
no run has. Prefer resampling, which puts in the activations of another sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.ablation.answers import Metric, reader, scored_positions
from probelens.ablation.columns import SCORES, SITE
from probelens.ablation.controls import label_of
from probelens.ablation.result import Costs
from probelens.ablation.scoring import Runs, accuracy_chance, per_sequence, score
from probelens.errors import InputError, metric_name
from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.heads import AtHeads
from probelens.hooks.edits.values import Mean, Replace, Zero
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.points import HookPoint
from probelens.hooks.shorthand import Names
from probelens.numerics.modes import exact
from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import count, listed
from probelens.running.collect import collect
from probelens.running.shapes import positions_at
from probelens.running.sweep.conditions import Condition, Intervention
from probelens.running.sweep.plan import sweep
from probelens.tasks.examples import spread_mask

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["ComponentResult", "ablate_component"]

How = Literal["zero", "mean", "resample"]
HEAD_AXES = ("head", "heads")


@dataclass(frozen=True, eq=False)
class ComponentResult(Rows):
    """What ablating each component cost.

    Args:
        rows: One per component and way; ``columns`` says what each holds.
        values: The metric of each example under each row, averaged over draws. (row, example)
        clean: The metric of each example without ablation. (example,)
        target: The label that the model's answer is compared with.
        metric: Name of the metric.
        chance: Best accuracy of a constant answer, averaged over sequences, as in ``clean``.
        path: How the engine ran: "resume", "skip" or "full"; see ``sweep``.
        extra: The caller's own notes, saved and loaded with the result.
    """

    columns = (
        *SITE,
        Column("layers", str, "Layers ablated together, separated by commas.", on="rows of `ablate_convolution`"),
        Column("head", int | str | None, "The head, several separated by commas, or None for all."),
        Column("how", str, 'What was put in: "zero", "mean", "resample", or a way of `ablate_convolution`.'),
        Column("draws", int, "Resamples that were averaged."),
        Column(
            "draw_sd", float | None, "Standard deviation of the value over draws; None for one.", "that of the metric"
        ),
        *SCORES,
    )

    rows: list[dict[str, Any]]
    values: Tensor
    clean: Tensor
    target: str = ""
    metric: str = "accuracy"
    chance: float = 0.0
    path: str = "full"
    extra: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> list[str]:
        """The components that cost most, for each way of ablating them."""
        costs = Costs(self.metric)
        ways = list(dict.fromkeys(row["how"] for row in self.rows))
        lines = [
            f"{count(len(self.rows), 'ablation')} of components on {count(len(self.clean), 'sequence')}. "
            f"{costs.metric(self.rows[0])}"
        ]
        for way in ways:
            rows = sorted((r for r in self.rows if r["how"] == way), key=lambda r: -costs.sign * r["drop"])
            sure = sum((row["lo"] if costs.sign > 0 else -row["hi"]) > 0 for row in rows)
            best = listed((f"{_component(row)} {costs.cost(row)}" for row in rows[:3]), 3)
            lines.append(f"{way}: {sure} of {len(rows)} cost more than nothing. Most: {best}.")
        return lines

    def plot(self) -> go.Figure:
        """Drop of each component, with its interval."""
        import plotly.express as px

        table = self.to_dataframe()
        table["component"] = [_component(row) for row in self.rows]
        table["above"], table["below"] = table["hi"] - table["drop"], table["drop"] - table["lo"]
        return px.bar(
            table, x="component", y="drop", color="how", barmode="group", error_y="above", error_y_minus="below"
        )


def _component(row: Mapping[str, Any]) -> str:
    return str(row["site"]) if row["head"] is None else f"{row['site']} head {row['head']}"


def ablate_component(
    model: HookedModel,
    batch: Any,
    sites: Names,
    how: How | Sequence[How] = "resample",
    metric: Metric = "accuracy",
    *,
    heads: int | Sequence[int] | Literal["each"] | None = None,
    joint: bool = False,
    source: Any = None,
    draws: int = 5,
    target: str | None = None,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ComponentResult:
    """Replace whole activations at each site by zeros, by their means, or by those of other sequences.

    Edits are made where ``batch.mask`` is True: a BOS token or padding keeps its activation.

    Args:
        model, metric, batch_size, memory, progress: As for ``ablate``.
        batch: Inputs of any kind to measure on. (example, ...)
        sites: Components: a shorthand such as "attn_out", "mlp_out", "mixer_out", names, globs, or a
            list. State points ("ssm_state", "blocks.*.rnn.hook_h") are set at every step.
        how: "zero"; "mean" over the examples of ``source`` at each position; "resample": what
            another example has at the same position, one example for all positions and, when
            joint, for all sites; or several of these.
        heads: Ablate these heads of each site, one at a time: an index, several, or "each".
        joint: Ablate all sites (or all the heads given) together in one run.
        source: Where means and other examples come from, of the same length; ``batch`` if None.
        draws: Resamples to average over.
        target: The label that the model answers with; needed unless the batch has one.
        seed: Of resampling and intervals.

    Returns:
        Drops with intervals over sequences. A drop says that the component matters for the answer,
        not for which variable; and with ``joint=False`` two components that do the same may each
        seem unused.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        InputError: An unknown ``how``, heads at a site without them, a site whose first axes aren't
            (batch, pos), a single example to resample from, no example that is long enough, or for "mean": a
            position of the batch where every source example is padding.

    Source:
        Heimersheim and Nanda 2024, arXiv 2404.15255, section 3 (zero, mean, resample).
    """
    need_wrapped(model)
    names = [point.name for point in resolve(model, sites)]
    ways = [how] if isinstance(how, str) else list(how)
    unknown = [w for w in ways if w not in ("zero", "mean", "resample")]
    if unknown or not ways:
        raise InputError(f"how={how!r} is not known. Allowed: 'zero', 'mean', 'resample'")
    if draws < 1:
        raise InputError(f"draws must be at least 1, got {draws}")
    source = batch if source is None else source
    read = reader(model, batch, metric, known := _target(batch, metric, target))
    if source.length != batch.length:
        raise InputError(
            f"source has sequences of {source.length} tokens, batch of {batch.length}: means and "
            "resamples are taken position by position, so both must have the same length"
        )
    points = [_point(model, name) for name in names]
    told = mask_for_model(model, batch.attention_mask, batch.inputs)
    masks = {name: spread_mask(batch.mask, n) for name, n in positions_at(model, batch.examples, names, told).items()}
    others = masks if source is batch else {name: spread_mask(source.mask, m.shape[1]) for name, m in masks.items()}
    acts: dict[str, Tensor] = {}
    if ways != ["zero"] or heads is not None:
        acts = collect(model, source, names, batch_size=batch_size).tensors
    donors = [donor_rows(batch, source, seed * 1000 + i) for i in range(draws)] if "resample" in ways else []
    parts = [(p, h) for p in points for h in _heads(p, heads, acts.get(p.name))]
    groups = [parts] if joint else [[part] for part in parts]
    rows: list[dict[str, Any]] = []
    conditions: list[Condition] = []
    for way in ways:
        for group in groups:
            rows.append(_about(group, way, model, draws if way == "resample" else 1))
            for i in range(rows[-1]["draws"]):
                edits = [
                    replacement(
                        p, h, _value(way, acts.get(p.name), masks[p.name], others[p.name], donors, i), masks[p.name]
                    )
                    for p, h in group
                ]
                conditions.append(Condition((len(rows), i), tuple(edits)))
    found = sweep(
        model, batch.inputs, conditions, read, batch_size=batch_size, memory=memory,
        attention_mask=batch.attention_mask, progress=progress, describe="components",
    )  # fmt: skip
    scored = scored_positions(batch, metric, read.by_position)
    split = found.values.double().split([row["draws"] for row in rows])
    for row, values in zip(rows, split, strict=True):
        each = per_sequence(values, scored).mean(1)
        row["draw_sd"] = each.std().item() if len(each) > 1 else None
    runs = Runs(torch.stack([v.mean(0) for v in split]), found.base, scored, found.path)
    return result_of(rows, runs, batch, known, metric, seed)


def result_of(
    rows: list[dict[str, Any]], runs: Runs, batch: Any, target: str, metric: Metric, seed: int
) -> ComponentResult:
    """Score the rows of a component ablation."""
    chance = accuracy_chance(batch, target, metric)
    values, clean = score(rows, runs, runs.scored, chance, seed, metric)
    return ComponentResult(rows, values.float(), clean.float(), target, metric_name(metric), chance or 0.0, runs.path)


def _about(group: Sequence[tuple[HookPoint, int | None]], way: str, model: HookedModel, draws: int) -> dict[str, Any]:
    names = list(dict.fromkeys(p.name for p, _ in group))
    heads = [h for _, h in group if h is not None]
    return {
        "site": " + ".join(names), "layer": model.point(names[0]).depth,
        "head": None if not heads else heads[0] if len(heads) == 1 else ",".join(map(str, heads)),
        "how": way, "draws": draws,
    }  # fmt: skip


def _point(model: HookedModel, name: str) -> HookPoint:
    point = model.point(name)
    if point.axes and point.axes[1] != "pos":
        raise InputError(
            f"{name!r} has the axes {point.axes}; components are ablated where the second one is 'pos'. "
            "For attention, take attn.hook_z (heads) or hook_attn_out."
        )
    return point


def _heads(point: HookPoint, heads: Any, acts: Tensor | None) -> list[int | None]:
    if heads is None or acts is None:
        return [None]
    if len(point.axes) < 3 or point.axes[2] not in HEAD_AXES:
        raise InputError(
            f"{point.name!r} has no heads: its axes are {point.axes}. Leave heads out, or take attn.hook_z"
        )
    n = acts.shape[2]
    wanted = list(range(n)) if isinstance(heads, str) else [heads] if isinstance(heads, int) else list(heads)
    if (isinstance(heads, str) and heads != "each") or not wanted or not all(-n <= h < n for h in wanted):
        raise InputError(f"heads={heads!r}: {point.name!r} has {n} heads. Give indices from 0 to {n - 1}, or 'each'.")
    return [h % n for h in wanted]


def _target(batch: Any, metric: Metric, target: str | None) -> str:
    """The label that the answer is compared with; "" where the metric needs none."""
    needed = metric in ("accuracy", "mse", "r2")
    return label_of(batch, target, "target") if needed or target is not None else ""


def _value(
    way: str, acts: Tensor | None, mask: Tensor, others: Tensor, donors: Sequence[Tensor], draw: int
) -> Tensor | None:
    """What to put in: None for zeros, (1, pos, ...) for means, (example, pos, ...) for other examples'."""
    if way == "zero" or acts is None:
        return None
    if way == "resample":
        return acts[donors[draw]]
    return position_means(acts, others, mask)


def position_means(acts: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
    """Means (1, pos, ...) over the examples that are real at each position, summed in float64; zeros where none is real.

    InputError where none is real and one is wanted: ``wanted`` (row, pos) is True where means will be put in.
    """
    mask = mask.to(acts.device)
    count = mask.sum(0, keepdim=True)
    lacking = (wanted.any(0).to(count.device) & (count[0] == 0)).nonzero().flatten().tolist()
    if lacking:
        raise InputError(
            f"means are taken position by position, and no example of the source has a real token at position {lacking[0]}"
            f"{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}, where the batch has one. Give a source with "
            "longer examples, or leave these positions out of the batch's mask."
        )
    shape = [1] * (acts.ndim - 2)
    # Sums in half precision overflow, and lose the small terms.
    real = acts if bool(mask.all()) else acts.masked_fill(~mask.reshape(*mask.shape, *shape), 0)
    total = real.sum(0, keepdim=True, dtype=torch.float64) / count.clamp_min(1).reshape(1, -1, *shape)
    return total.to(torch.promote_types(acts.dtype, torch.float32))


@exact
def donor_rows(batch: Any, source: Any, seed: int) -> Tensor:
    """For each example, the index of another example of ``source`` that is not padded where this one isn't. (example,)"""
    gen = torch.Generator().manual_seed(seed)
    # Counts positions that the receiver has and the donor lacks.
    lacking = batch.mask.float().reshape(len(batch), -1) @ (~source.mask).float().reshape(len(source), -1).T
    fit = lacking == 0
    if source is batch:
        fit.fill_diagonal_(False)
    if not bool(fit.any(1).all()):
        raise InputError(
            "resampling needs, for each example, another one that is at least as long: "
            f"{int((~fit.any(1)).sum())} of {len(fit)} have none. Give a source with longer examples."
        )
    return torch.multinomial(fit.float(), 1, generator=gen)[:, 0]


def replacement(point: HookPoint, head: int | None, value: Tensor | None, mask: Tensor) -> Intervention:
    """Put ``value`` in where the mask is True: None for zeros, (1, pos, ...) for means, (example, pos, ...) for others'."""

    def edit_for(rows: Tensor) -> Edit:
        where = mask[rows]
        edit: Edit = Zero(where)
        if value is not None:
            edit = Mean(where, value[0]) if len(value) == 1 else Replace(where, value[rows])
        return edit if head is None else AtHeads(None, edit, (head,))

    return Intervention(point.name, edit_for)

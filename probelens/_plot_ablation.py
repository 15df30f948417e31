"""The ablation figure: what removing a subspace costs, its random controls, and the refitted probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probelens import _plot_style as style
from probelens._plot_style import PALETTE, escape

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens._plot_style import Rows

CONDITIONS = {
    "target": "probe subspace",
    "random": "random, equal rank",
    "random_matched": "random, equal variance",
    "pca": "top principal components",
    "leace": "LEACE",
    "inlp": "INLP",
}


def ablation(
    data: Rows,
    *,
    x: str = "layer",
    drop: str = "drop",
    lo: str = "lo",
    hi: str = "hi",
    condition: str = "condition",
    controls: Sequence[str] | None = None,
    probe: str = "probe_accuracy",
    refit: str = "refit_accuracy",
    baseline: str = "baseline",
    names: Mapping[str, str] | None = None,
    metric: str = "accuracy",
    percent: bool = True,
    title: str | None = None,
) -> go.Figure:
    """What ablating a subspace costs at each layer, and whether a refitted probe still reads the label.

    The upper panel has a line for each ablated subspace and a band with points for its random controls: only
    a drop outside the band belongs to the subspace. The lower panel has the probe's accuracy before ablation,
    the accuracy of a probe refitted on the ablated activations, and the baseline: a refitted probe above the
    baseline means that the label can still be read, so the drop says nothing about necessity either way.

    Args:
        data: Rows of ONE model and ONE label. Columns:

            * ``x``: the layer, an int; -1 is the embedding.
            * ``condition``: what was ablated: ``"target"`` (the probe's rows), ``"random"``,
              ``"random_matched"``, ``"pca"``, ``"leace"``, ``"inlp"``, or any other name.
            * ``drop``: the metric without ablation minus with it, a fraction of 1 if ``percent`` (shown in
              percentage points); positive when ablation hurts.
            * ``lo``, ``hi`` (optional): the bounds of its interval.
            * ``probe``, ``refit``, ``baseline`` (optional, together they make the lower panel), on the rows
              of subspaces that aren't controls: accuracy of the probe on the untouched activations, of a new
              probe trained on the ablated ones, and of the best baseline. Fractions of 1.

            A control has one row per layer and draw; a subspace, or a control given as an interval, has one
            per layer.
        x: Name of the layer column.
        drop: Name of the drop column.
        lo: Name of the lower-bound column.
        hi: Name of the upper-bound column.
        condition: Name of the condition column.
        controls: Conditions drawn as bands. Default: those whose name starts with "random".
        probe: Name of the column with the probe's accuracy before ablation.
        refit: Name of the column with the refitted probe's accuracy.
        baseline: Name of the column with the baseline.
        names: How to call the conditions in the legend.
        metric: What dropped, for the axis title.
        percent: The drop is a fraction of 1, shown in percentage points. False: shown in the unit that
            ``metric`` names.
        title: Shown above the figure.

    Returns:
        The figure.

    Raises:
        InputError: No rows, a missing column, text where a number belongs, or two rows of a subspace at one
            layer.

    Units:
        Drops and accuracies in fractions of 1.

    Source:
        Random controls and the refit: arXiv 2606.00926 v2.

    Examples:
        >>> rows = [{"layer": 0, "condition": "target", "drop": 0.4}]
        >>> rows += [{"layer": 0, "condition": "random", "drop": d} for d in (0.0, 0.02, 0.01)]
        >>> [trace.name for trace in ablation(rows).data if trace.showlegend]
        ['probe subspace', 'random, equal rank (3 draws)']
    """
    who = "ablation"
    df = style.frame(data, [x, drop, condition], who).sort_values(x, kind="stable")
    called = {**CONDITIONS, **(names or {})}
    parts = style.groups(df, condition)
    bands = list(controls) if controls is not None else [n for n, _ in parts if n.startswith("random")]
    subspaces = [(name, part) for name, part in parts if name not in bands]
    lower = any(v is not None for _, part in subspaces for v in style.numbers(part, refit, who))
    # The lower panel has a legend of its own, which needs a line for each entry on a phone.
    gap = 20 * (len(subspaces) + 2) + 14
    fig = style.panels([250, 230] if lower else [320], title=title, gap=gap)
    scale, say = (100.0, "{:.1f} pp".format) if percent else (1.0, "{:.4g}".format)
    said = []
    for i, (name, part) in enumerate(subspaces):
        style.unique(
            part, [x], who, "Give one model and one label, seeds averaged; controls= names the random ones."
        )
        value, low, high = (_scaled(part, column, scale) for column in (drop, lo, hi))
        look: dict[str, Any] = {
            "color": PALETTE[i % len(PALETTE)],
            "marker": style.MARKERS[i % len(style.MARKERS)],
        }
        layers, label = style.defined(part, x, who), called.get(name, name)
        said.append(
            style.add_line(
                fig,
                layers,
                value,
                lo=low,
                hi=high,
                name=label,
                where="layer",
                what=f"{metric} drop",
                say=say,
                **look,
            )
        )
    for i, (name, part) in enumerate(p for p in parts if p[0] in bands):
        color = style.GREY if i == 0 else PALETTE[-i]
        said.append(
            _control(
                fig, part, (x, drop, lo, hi), called.get(name, name), f"{metric} drop", color, scale, say
            )
        )
    if lower:
        said += _refits(fig, subspaces, called, x, probe, refit, baseline)
    fig.add_hline(y=0, line={"color": style.GREY, "width": 1}, row=1, col=1)
    fig.update_yaxes(title_text=f"{escape(metric)} drop" + (" (pp)" if percent else ""), row=1)
    fig.update_xaxes(**style.layer_ticks(style.defined(df, x, who)))
    fig.update_xaxes(title_text="ablated layer (residual after block)", row=2 if lower else 1)
    kept = [x, condition, "draw", drop, lo, hi, probe, refit, baseline]
    return style.finish(fig, "Ablation by layer. " + ". ".join(said) + ".", df, kept)


def _scaled(part: pd.DataFrame, column: str, scale: float) -> list[float | None]:
    return [None if v is None else scale * v for v in style.numbers(part, column, "ablation")]


def _control(
    fig: go.Figure,
    part: pd.DataFrame,
    columns: tuple[str, str, str, str],
    label: str,
    what: str,
    color: str,
    scale: float,
    say: Callable[[float], str],
) -> str:
    """The mean of a control's draws, with a band over their range and a point for each."""
    x, drop, lo, hi = columns
    part = part[[v is not None for v in _scaled(part, drop, scale)]]
    layers = style.defined(part, x, "ablation")
    by_layer = {at: part[[other == at for other in layers]] for at in dict.fromkeys(layers)}
    layers = list(by_layer)
    draws = [[v for v in _scaled(rows, drop, scale) if v is not None] for rows in by_layer.values()]
    most = max(map(len, draws), default=0)
    low: list[float | None]
    high: list[float | None]
    if most > 1:
        label = f"{label} ({most} draws)"
        low, high = [min(d) for d in draws], [max(d) for d in draws]
    else:
        low, high = ([_scaled(rows, c, scale)[0] for rows in by_layer.values()] for c in (lo, hi))
    said = style.add_line(
        fig,
        layers,
        [sum(d) / len(d) for d in draws],
        lo=low,
        hi=high,
        name=label,
        where="layer",
        what=f"mean {what}",
        say=say,
        color=color,
        dash="dot",
    )
    if most > 1:
        fig.add_scatter(
            x=[at for at, d in zip(layers, draws) for _ in d],
            y=[v for d in draws for v in d],
            mode="markers",
            marker={"color": style.rgba(color, 0.55), "size": 4},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=label,
            row=1,
            col=1,
        )
    return said


def _refits(
    fig: go.Figure,
    subspaces: list[tuple[str, pd.DataFrame]],
    called: Mapping[str, str],
    x: str,
    probe: str,
    refit: str,
    baseline: str,
) -> list[str]:
    """The lower panel: the probe before, the refitted probes, the baseline."""
    look: dict[str, Any] = {
        "where": "layer",
        "what": "accuracy",
        "say": style.percent,
        "row": 2,
        "legend": "legend2",
    }
    first = subspaces[0][1]
    layers = style.defined(first, x, "ablation")
    said = []
    if probe in first:
        before = style.numbers(first, probe, "ablation")
        said.append(
            style.add_line(
                fig, layers, before, name="probe before ablation", color=PALETTE[2], marker="diamond", **look
            )
        )
    for i, (name, part) in enumerate(subspaces):
        after, base = (style.numbers(part, c, "ablation") for c in (refit, baseline))
        notes = [
            "" if v is None or b is None else f"{100 * (v - b):+.1f} pp against the baseline"
            for v, b in zip(after, base)
        ]
        alone = len(subspaces) == 1
        label = "probe refitted after ablation" if alone else f"refitted after {called.get(name, name)}"
        color, marker = (PALETTE[3], "triangle-up") if alone else (PALETTE[i % 6], style.MARKERS[i % 6])
        at = style.defined(part, x, "ablation")
        said.append(
            style.add_line(fig, at, after, name=label, notes=notes, color=color, marker=marker, **look)
        )
    if baseline in first:
        base = style.numbers(first, baseline, "ablation")
        said.append(style.add_line(fig, layers, base, name="baseline", color=style.GREY, dash="dash", **look))
    top = fig.layout.yaxis2.domain[1] + 8 / fig.layout.height
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": top, "yanchor": "bottom", "tracegroupgap": 0}
    fig.update_layout(legend2=place)
    fig.update_yaxes(title_text="probe accuracy (%)", tickformat=".0%", range=[0, 1.03], row=2)
    return said

"""Lines with intervals and dashed baselines: by layer, by length, by training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from probelens.errors import InputError
from probelens.results.plots import style
from probelens.results.plots.style import PALETTE, escape

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.results.plots.style import Rows

BY_LAYER = "layer (residual stream after block)"
BASELINES = {
    "majority": "majority class",
    "position": "position only",
    "last_w": "last w tokens",
    "embedding": "embedding",
    "untrained": "untrained model",
}


def layer_profile(
    data: Rows,
    *,
    y: str = "accuracy",
    color: str | None = None,
    facet: str | None = None,
    baselines: Mapping[str, str] | None = None,
    y_label: str = "probe accuracy",
    percent: bool = True,
    title: str | None = None,
) -> go.Figure:
    """A measured value by layer, with intervals and dashed baselines.

    Args:
        data: One row per (facet, colour, layer). Columns:

            * ``layer``: an int; -1 is the embedding and is labelled "embed", l is the residual after block l.
            * ``site`` (optional): the hook point; a layer whose site is the final norm is labelled "norm".
            * ``y``: the value, a fraction of 1 if ``percent``. NaN or None leaves a gap.
            * ``lo``, ``hi`` (optional): the bounds of its interval, drawn as a band.
            * one column per baseline (optional), by default any of ``majority``, ``position``, ``last_w``,
              ``embedding`` and ``untrained`` that are there, in the unit of ``y``: one grey dashed line where it is
              the same for every row of a panel, otherwise a dashed line for each series, in its colour.
            * ``color``, ``facet`` (optional): names.
            * ``seed`` (optional): rows of one point that differ in it are drawn as their mean, with Student's interval
              over seeds as the band, or the mean of their own intervals where that is wider.
        y: Name of the value column.
        color: Column that separates the lines, for example ``"model"``. None: one line.
        facet: Column that separates the panels, for example ``"label"``. None: one panel.
        baselines: Baseline columns and how to call them. Default: as above.
        y_label: Title of the vertical axis, without the unit.
        percent: ``y`` is a fraction of 1, shown in per cent on an axis from 0 to 100.
        title: Shown above the figure. A report has captions instead.

    Returns:
        The figure; panels are stacked and share the layer axis.

    Raises:
        InputError: No rows, a missing column, text where a number belongs, or two rows for one point.

    Units:
        Accuracies in fractions of 1; layers counted from -1, the embedding.

    Examples:
        >>> rows = [{"layer": l, "accuracy": a, "majority": 0.3} for l, a in [(-1, 0.3), (0, 0.6), (1, 0.9)]]
        >>> [trace.name for trace in layer_profile(rows).data]
        ['probe accuracy', 'majority class']
    """
    columns = _Columns("layer", y, color, facet, baselines)
    fig, panels = _lines(data, "layer_profile", columns, y_label, percent, title)
    rows = style.frame(data, ["layer"], "layer_profile")
    fig.update_xaxes(**style.layer_ticks(style.layer_names(rows, "layer", "layer_profile")))
    fig.update_xaxes(title_text=BY_LAYER, row=panels)
    return fig


def length_curve(
    data: Rows,
    *,
    y: str = "accuracy",
    color: str | None = None,
    facet: str | None = None,
    train_length: int | None = None,
    y_label: str = "accuracy",
    title: str | None = None,
) -> go.Figure:
    """Accuracy by the length of the evaluated sequences, with the length of training marked.

    Args:
        data: One row per (facet, colour, length): ``length`` an int in tokens, ``y``, ``lo``, ``hi``, baselines,
            ``color``, ``facet`` and ``seed`` as in ``layer_profile``.
        y, color, facet, y_label, title: As for ``layer_profile``.
        train_length: Length the models were trained at, in tokens; a dotted vertical line.

    Returns:
        The figure.

    Raises:
        InputError: No rows, a missing column, text where a number belongs, or two rows for one point.

    Examples:
        >>> rows = [{"length": n, "accuracy": 1 - n / 1000, "model": "LSTM"} for n in (40, 80, 120)]
        >>> length_curve(rows, color="model", train_length=40).data[0].name
        'LSTM'
    """
    columns = _Columns("length", y, color, facet, None)
    fig, panels = _lines(data, "length_curve", columns, y_label, True, title)
    fig.update_xaxes(title_text="sequence length (tokens)", row=panels)
    if train_length is not None:
        for row in range(1, panels + 1):
            line = {"color": style.GREY, "dash": "dot", "width": 1.5}
            note = {"text": "training length", "y": 0, "yanchor": "bottom", "font": {"size": 12}}
            fig.add_vline(x=train_length, line=line, annotation=note, row=row, col=1)
    return fig


def training_curve(
    data: Rows,
    *,
    y: str | Sequence[str] = ("loss", "accuracy"),
    color: str | None = None,
    target: float | None = None,
    title: str | None = None,
) -> go.Figure:
    """What training logged, one panel per quantity.

    Args:
        data: One row per (colour, step). Columns: ``step`` of the optimiser, an int; each name in ``y``, NaN
            or None where that step logged nothing; ``color`` (optional).
        y: Columns to draw. One whose name contains "acc" is a fraction of 1 shown in per cent from 0 to 100;
            one whose name contains "loss" is in nats on a logarithmic axis.
        color, title: As for ``layer_profile``.
        target: Accuracy at which training stops, a fraction of 1; a dashed line in the accuracy panels.

    Returns:
        The figure; panels are stacked and share the step axis.

    Raises:
        InputError: No rows, a missing column, text where a number belongs, or two rows for one point.

    Units:
        Loss in nats per token, accuracy in fractions of 1, steps of the optimiser.

    Examples:
        >>> rows = [{"step": s, "loss": 1 / s, "accuracy": 1 - 1 / s} for s in (1, 10, 100)]
        >>> training_curve(rows, target=0.99).layout.yaxis.type
        'log'
    """
    who, x = "training_curve", "step"
    names = [y] if isinstance(y, str) else list(y)
    if not names:
        raise InputError("training_curve: y names no column to draw")
    df = style.frame(data, [c for c in (x, *names, color) if c], who)
    style.unique(df, [c for c in (x, color) if c], who, "Separate the runs with color=.")
    df = style.ordered(df, x, who)
    fig = style.panels([210] * len(names), title=title)
    said = []
    for row, name in enumerate(names, start=1):
        percent = "acc" in name.lower()
        for i, (series, part) in enumerate(style.groups(df, color)):
            both = zip(style.defined(part, x, who), style.numbers(part, name, who))
            logged = {at: value for at, value in both if value is not None}
            look: dict[str, Any] = {"name": series or "run", "color": PALETTE[i % len(PALETTE)], "row": row}
            say = style.percent if percent else "{:.4g}".format
            style.add_line(fig, list(logged), list(logged.values()), where=x, what=name, say=say, **look)
            if logged:
                at, value = list(logged.items())[-1]
                said.append(f"{series or 'run'}: {name} {value:.4g} at {x} {at:g}")
        if percent:
            fig.update_yaxes(title_text=f"{escape(name)} (%)", tickformat=".0%", range=[0, 1.03], row=row)
            if target is not None:
                fig.add_hline(y=target, line={"color": style.GREY, "dash": "dash", "width": 1.5}, row=row, col=1)
        elif "loss" in name.lower():
            ticks = [m * 10.0**e for e in range(-9, 4) for m in (1, 2, 5)]
            fig.update_yaxes(title_text=f"{escape(name)} (nats)", type="log", row=row)
            fig.update_yaxes(tickmode="array", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks], row=row)
        else:
            fig.update_yaxes(title_text=escape(name), row=row)
    fig.update_xaxes(title_text="training step", row=len(names))
    fig.update_layout(showlegend=color is not None)
    return style.finish(fig, "Training curves. " + "; ".join(said) + ".", df, [x, color, *names])


class _Columns(NamedTuple):
    """Which column plays which part."""

    x: str
    y: str
    color: str | None
    facet: str | None
    baselines: Mapping[str, str] | None


def _lines(data: Rows, who: str, c: _Columns, y_label: str, percent: bool, title: str | None) -> tuple[go.Figure, int]:
    """The figure and how many panels it has."""
    keys = [name for name in (c.facet, c.color, c.x) if name]
    df = style.frame(data, [*keys, c.y, *(c.baselines or {})], who)
    known = {k: v for k, v in BASELINES.items() if k in df.columns} if c.baselines is None else c.baselines
    df = _over_seeds(df, keys, c.y, list(known), who, percent)
    style.unique(
        df, keys, who, "Average over seeds first (a column 'seed' does it), or separate them with color= or facet=."
    )
    facets = style.groups(df, c.facet)
    order = [name for name, _ in style.groups(df, c.color)]
    heights = [300 if len(facets) == 1 else 230] * len(facets)
    fig = style.panels(heights, [name and f"{c.facet}: {name}" for name, _ in facets], title)
    say = style.percent if percent else "{:.4g}".format
    places = style.layer_names(df, c.x, who) if who == "layer_profile" else None
    said = []
    for row, (panel, part) in enumerate(facets, start=1):
        part = style.ordered(part, c.x, who)
        look: dict[str, Any] = {"where": c.x, "say": say, "row": row, "places": places}
        spoken = []
        for name, series in style.groups(part, c.color):
            i = order.index(name)
            y, lo, hi = (style.numbers(series, column, who) for column in (c.y, "lo", "hi"))
            own: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "marker": style.MARKERS[i % len(style.MARKERS)]}
            at = style.defined(series, c.x, who)
            spoken.append(style.add_line(fig, at, y, lo=lo, hi=hi, name=name or y_label, what=y_label, **own, **look))
        for i, (column, label) in enumerate(known.items()):
            dash = {"dash": style.DASHES[i % len(style.DASHES)], "what": "baseline"}
            spoken += _baseline(fig, part, who, c, column, label, order, **look, **dash)
        said.append((f"Panel {panel}: " if panel else "") + "; ".join(spoken) + ".")
        fig.update_yaxes(title_text=escape(y_label) + (" (%)" if percent else ""), row=row)
        if percent:
            fig.update_yaxes(tickformat=".0%", range=[0, 1.03], row=row)
    alt = f"Line chart of {y_label} by {c.x}. " + " ".join(said)
    return style.finish(fig, alt, df, [c.facet, c.color, c.x, "site", "seed", c.y, "lo", "hi", *known]), len(facets)


def _over_seeds(
    df: pd.DataFrame, keys: list[str], y: str, baselines: list[str], who: str, percent: bool
) -> pd.DataFrame:
    """One row for each point: where its rows differ in their seed, their mean, and an interval of it as the band.

    The band is Student's over the seeds, or the mean of the seeds' own intervals where that is wider: splits of the same
    sequences, say, agree more with each other than new sequences would.
    """
    if (
        "seed" not in df.columns
        or "seed" in keys
        or not df.duplicated(keys).any()
        or df.duplicated([*keys, "seed"]).any()
    ):
        return df
    from scipy.special import stdtrit

    made = []
    for _, part in df.groupby(keys, sort=False, dropna=False):
        row = part.iloc[0].to_dict()
        found = [value for value in style.numbers(part, y, who) if value is not None]
        for name in (*baselines, "lo", "hi"):
            if name in part:
                defined = [value for value in style.numbers(part, name, who) if value is not None]
                row[name] = sum(defined) / len(defined) if defined else None
        row[y] = mean = sum(found) / len(found) if found else None
        if mean is not None and len(found) > 1:
            variance = sum((value - mean) ** 2 for value in found) / (len(found) - 1) / len(found)
            half = float(stdtrit(len(found) - 1, 0.975)) * variance**0.5
            ends = [mean - half, mean + half]
            ends = [max(ends[0], 0.0), min(ends[1], 1.0)] if percent else ends
            low, high = row.get("lo"), row.get("hi")
            row["lo"] = ends[0] if low is None else min(ends[0], low)
            row["hi"] = ends[1] if high is None else max(ends[1], high)
        made.append({**row, "seed": f"mean of {len(part)}" if len(part) > 1 else row["seed"]})
    return type(df)(made)


def _baseline(
    fig: go.Figure, part: pd.DataFrame, who: str, c: _Columns, column: str, label: str, order: list[str], **look: Any
) -> list[str]:
    """One grey line where the baseline is one number, one line for each series where it is not."""
    levels = [v for v in style.numbers(part, column, who) if v is not None]
    if not levels:
        return []
    if len(set(levels)) == 1:
        x = sorted(set(style.defined(part, c.x, who)))
        return [style.add_line(fig, x, levels[:1] * len(x), name=label, color=style.GREY, **look)]
    said = []
    for name, series in style.groups(part, c.color):
        color = PALETTE[order.index(name) % len(PALETTE)] if name else style.GREY
        x, y = style.defined(series, c.x, who), style.numbers(series, column, who)
        said.append(style.add_line(fig, x, y, name=f"{label}, {name}" if name else label, color=color, **look))
    return said

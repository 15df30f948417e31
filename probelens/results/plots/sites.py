"""The figure of ``patch_sites``: recovery by site, what the architecture forces set apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError
from probelens.results.plots import style

if TYPE_CHECKING:
    import plotly.graph_objects as go


def sites_figure(rows: Sequence[Mapping[str, Any]], mode: str, title: str | None = None) -> go.Figure:
    """Recovery with intervals, one line of the figure a site, A on top.

    Args:
        rows: Rows of a ``PatchSitesResult``.
        mode: "denoise" or "noise", for the name of the axis.
        title: Shown above the figure.

    Returns:
        The figure: filled points are measured, hollow ones forced to 0 or 1; one that is
        missing has its reason in the hover text.

    Raises:
        InputError: No row.
    """
    import pandas as pd
    import plotly.graph_objects as go

    if not rows:
        raise InputError("there is no site to show")
    names = [str(row["site"]) for row in rows]
    fig = go.Figure()
    for label, forced in (("measured", False), ("forced by the architecture", True)):
        some = [r for r in rows if r["recovery"] is not None and (r["expected"] is not None) == forced]
        if not some:
            continue
        fig.add_scatter(
            x=[r["recovery"] for r in some],
            y=[r["site"] for r in some],
            mode="markers",
            name=label,
            marker={
                "size": 10, "color": style.GREY if forced else style.PALETTE[0],
                "symbol": "circle-open" if forced else "circle", "line": {"width": 2},
            },
            error_x={
                "type": "data", "symmetric": False,
                "array": [_reach(r["hi"], r["recovery"]) for r in some],
                "arrayminus": [_reach(r["recovery"], r["lo"]) for r in some],
            },
            hovertext=[_hover(r) for r in some],
            hoverinfo="text",
        )  # fmt: skip
    absent = [r for r in rows if r["recovery"] is None]
    if absent:
        fig.add_scatter(
            x=[0.5] * len(absent), y=[r["site"] for r in absent], mode="text", text=["not measured"] * len(absent),
            hovertext=[_hover(r) for r in absent], hoverinfo="text", showlegend=False, textfont={"color": style.GREY},
        )  # fmt: skip
    for x in (0, 1):
        fig.add_vline(x=x, line={"color": style.GREY, "dash": "dot", "width": 1})
    what = "recovered" if mode == "denoise" else "removed"
    fig.update_layout(template=style.template(), height=110 + 30 * len(rows))
    fig.update_xaxes(title_text=f"{what} fraction of the gap")
    fig.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], title_text="site")
    if title:
        fig.update_layout(title_text=style.escape(title), margin_t=64)
    spoken = "; ".join(f"{r['site']}: {_value(r)}" for r in rows)
    df = pd.DataFrame(list(rows), dtype=object)
    return style.finish(fig, f"Recovery by site. {spoken}", df, list(df.columns))


def _reach(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else max(0.0, high - low)


def _value(row: Mapping[str, Any]) -> str:
    if row["recovery"] is None:
        return f"not measured, {row['why']}"
    return style.measured(row["recovery"], row["lo"], row["hi"], "{:.3g}".format)


def _hover(row: Mapping[str, Any]) -> str:
    text = f"<b>{style.escape(row['site'])}</b>: {style.escape(row['description'])}<br>recovery "
    text += style.escape(_value(row))
    if row["expected"] is not None:
        text += f"<br>has to be {row['expected']:g}"
    return text + (f"<br>{style.escape(row['why'])}" if row["why"] and row["recovery"] is not None else "")

"""The figures of patching: recovery by site and position, and by the sites of the final layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from probelens.errors import InputError, ShapeError
from probelens.results.plots import style
from probelens.results.plots.style import escape

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ENDS = {"hook_embed": "embed", "ln_final.hook_in": "norm in", "ln_final.hook_out": "norm"}
LIMIT = 1.5


def patch_heatmap(
    values: Any,
    sites: Sequence[object],
    positions: Sequence[int],
    tokens: Sequence[str] | None = None,
    *,
    lo: Any = None,
    hi: Any = None,
    mode: Literal["denoise", "noise"] = "denoise",
    marks: Mapping[str, int] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Recovery by layer and position: what copying one clean activation into the corrupted run restores.

    Args:
        values: Recovered fraction of the clean-corrupted gap; NaN where nothing was measured. (site, position)
        sites: What was patched, from the bottom row up: hook point names, layers as ints, or any names. Names of one
            kind are shown by layer alone: -1 is "embed", and ``"blocks.3.hook_resid_pre"`` is the residual after
            block 2.
        positions: Token indices of the columns. (position,)
        tokens: Text of the token at each position, when all pairs share it. (position,)
        lo: Lower bounds of intervals, for the hover text. (site, position)
        hi: Upper bounds. (site, position)
        mode: "denoise": 0 is the corrupted run and 1 the clean run. "noise", where corrupted activations went into
            the clean run: 0 is the clean run and 1 the corrupted run.
        marks: Named positions to mark with a dotted line, for example ``{"edited": 3, "read": 40}``.
        title: Shown above the figure.

    Returns:
        The figure: a diverging scale centred at 0, with 0 and 1 named. Values beyond ±1.5 share the end colour, so
        that one outlier can't wash out the map; the hover text and the rows keep the exact value.

    Raises:
        ShapeError: ``values``, ``lo``, ``hi`` or ``tokens`` don't match ``sites`` and ``positions``.
        InputError: No site or no position, or no finite value.

    Units:
        Fractions of the clean-corrupted gap, not clipped.

    Examples:
        >>> fig = patch_heatmap([[0.0, 1.0]], ["blocks.0.hook_resid_pre"], [0, 1])
        >>> fig.layout.coloraxis.cmid, fig.data[0].y
        (0, ('embed',))
    """
    import numpy as np
    import pandas as pd
    import plotly.graph_objects as go

    def grid(array: Any, name: str) -> np.ndarray:
        out = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array, dtype=float)
        if out.shape != (len(sites), len(positions)):
            raise ShapeError(
                f"patch_heatmap needs {name} of shape (site, position) = ({len(sites)}, {len(positions)}); it has "
                f"shape {out.shape}. Average over examples first, or give the matching sites and positions."
            )
        return out

    if mode not in ("denoise", "noise"):
        raise InputError(f"patch_heatmap has no mode {mode!r}. Allowed: 'denoise', 'noise'")
    if not len(sites) or not len(positions):
        raise InputError("patch_heatmap got no site or no position. Give at least one of each.")
    shown = grid(values, "values")
    low, high = (None if b is None else grid(b, name) for b, name in ((lo, "lo"), (hi, "hi")))
    if tokens is not None and len(tokens) != len(positions):
        raise ShapeError(f"patch_heatmap got {len(tokens)} tokens for {len(positions)} positions. Give one each.")
    finite = shown[np.isfinite(shown)]
    if not finite.size:
        raise InputError("patch_heatmap got no finite value: nothing was measured, or the gap was 0 everywhere.")
    labels, axis = site_axis(sites)
    hover, rows = [], []
    for i, site in enumerate(sites):
        line = []
        for j, position in enumerate(positions):
            v = float(shown[i, j]) if np.isfinite(shown[i, j]) else None
            a, b = (None if g is None or not np.isfinite(g[i, j]) else float(g[i, j]) for g in (low, high))
            token = "" if tokens is None else f", token {escape(tokens[j])}"
            said = style.measured(v, a, b, "{:.3g}".format)
            line.append(f"<b>{escape(site)}</b><br>position {position}{token}<br>recovery {said}")
            row: dict[str, Any] = {"site": str(site), "position": int(position), "recovery": v}
            row |= {} if tokens is None else {"token": str(tokens[j])}
            row |= {} if low is None else {"lo": a}
            row |= {} if high is None else {"hi": b}
            rows.append(row)
        hover.append(line)
    end = float(min(max(1.0, np.abs(finite).max()), LIMIT))
    fig = go.Figure(
        go.Heatmap(
            z=[[None if not np.isfinite(v) else float(v) for v in line] for line in shown],
            x=[int(p) for p in positions],
            y=_distinct([escape(label) for label in labels]),
            coloraxis="coloraxis",
            hovertext=hover,
            hoverinfo="text",
            # Many columns are thin on a phone: a gap would eat them.
            xgap=1 if len(positions) <= 24 else 0,
            ygap=1,
        )
    )
    ends = ("corrupted", "clean") if mode == "denoise" else ("clean", "corrupted")
    ticks = {-1.0: "\u22121", 0.0: f"0 {ends[0]} run", 1.0: f"1 {ends[1]} run"}
    if (np.abs(finite) > end).any():
        ticks = {-end: f"\u2264 \u2212{end:g}", 0.0: ticks[0.0], 1.0: f"1 {ends[1]}", end: f"\u2265 {end:g}"}
    # From the top: title, name of the scale, scale, its ticks, marks.
    head = 28 if title else 0
    top = head + 66 + (18 if marks else 0)
    height = top + 56 + max(26, min(44, 420 // len(sites))) * len(sites)
    across = {"orientation": "h", "x": 0, "xanchor": "left", "xpad": 0}
    down = {"y": 1 - (head + 22) / height, "yref": "container", "yanchor": "top", "ypad": 0}
    named = {"len": 1, "ticklabeloverflow": "allow", "tickvals": list(ticks), "ticktext": list(ticks.values())}
    scale = {"cmid": 0, "cmin": -end, "cmax": end, "colorbar": across | down | named}
    fig.update_layout(template=style.template(), height=height, margin={"t": top, "r": 38}, coloraxis=scale)
    place: dict[str, Any] = {"yref": "paper", "y": 1, "showarrow": False}
    corner = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "top", "yshift": top - head}
    fig.add_annotation(text=_axis_title(mode), **corner, **place)
    fig.update_yaxes(type="category", ticks="", showgrid=False, title_text=escape(axis))
    fig.update_xaxes(title_text="patched position (token index)", showgrid=False)
    if tokens is not None and len(tokens) <= 30:
        names = [f"{p}<br>{escape(t)}" for p, t in zip(positions, tokens)]
        fig.update_xaxes(tickmode="array", tickvals=list(positions), ticktext=names)
    for name, position in (marks or {}).items():
        fig.add_vline(x=position, line={"color": style.GREY, "dash": "dot", "width": 1.5})
        fig.add_annotation(text=escape(name), x=position, yanchor="bottom", font_size=12, **place)
    if title:
        fig.update_layout(title={"text": escape(title), "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 4}})
    best_site, best_position = divmod(int(np.nanargmax(shown)), len(positions))
    alt = (
        f"Heat map of recovery, {len(sites)} sites by {len(positions)} positions, from {finite.min():.2f} to "
        f"{finite.max():.2f}; highest at {labels[best_site]}, position {positions[best_position]}. "
        f"0 is the {ends[0]} run, 1 the {ends[1]} run."
    )
    df = pd.DataFrame(rows, dtype=object)
    return style.finish(fig, alt, df, list(df.columns))


def site_name(site: object) -> str:
    """A short name for a patched or probed site.

    Args:
        site: A hook point name, a layer, or any name.

    Returns:
        ``"resid_pre 3"`` for ``"blocks.3.hook_resid_pre"``; other names without their hook prefix.

    Examples:
        >>> site_name("blocks.3.mixer.hook_out"), site_name("hook_embed"), site_name(-1)
        ('mixer.out 3', 'embed', 'embed')
    """
    if not isinstance(site, str):
        return style.layer_name(site)
    parts = site.split(".")
    if len(parts) >= 3 and parts[0] == "blocks" and parts[1].isdigit():
        return f"{'.'.join(p.removeprefix('hook_') for p in parts[2:])} {parts[1]}"
    return site.removeprefix("hook_")


def site_axis(sites: Sequence[object]) -> tuple[list[str], str]:
    """Labels of the rows and the axis title: layers alone where all sites are one kind of point."""
    split = [re.fullmatch(r"blocks\.(\d+)\.(.+)", site) if isinstance(site, str) else None for site in sites]
    kinds = {match[2].replace("hook_", "") for match in split if match}
    rest = [site for site, match in zip(sites, split) if not match]
    residual = "layer (residual after block)"
    if len(kinds) == 1 and all(site in _ENDS for site in rest):
        kind = kinds.pop()
        # The residual that enters block l is the one after block l - 1.
        shift = kind == "resid_pre"
        named = [str(int(match[1]) - shift) if match else _ENDS[str(site)] for site, match in zip(sites, split)]
        title = residual if kind in ("resid_pre", "resid_post") else f"block ({kind})"
        return list(map(style.layer_name, named)), title
    if all(isinstance(site, int) for site in sites):
        return list(map(style.layer_name, sites)), residual
    return [site_name(site) for site in sites], "patched at"


def _distinct(names: list[str]) -> list[str]:
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if n == 1 else f"{name} ({n})" for name, n in zip(names, counts)]


def sites_figure(rows: Sequence[Mapping[str, Any]], mode: str, title: str | None = None) -> go.Figure:
    """Recovery with intervals by site of a ``PatchSitesResult``, the first row on top.

    Filled points are measured, hollow ones forced to 0 or 1; one that is missing has its reason in the hover text.
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
        color, symbol = (style.GREY, "circle-open") if forced else (style.PALETTE[0], "circle")
        dots = {"size": 10, "color": color, "symbol": symbol, "line": {"width": 2}}
        bars: dict[str, Any] = {"type": "data", "symmetric": False}
        bars["array"] = [_reach(r["hi"], r["recovery"]) for r in some]
        bars["arrayminus"] = [_reach(r["recovery"], r["lo"]) for r in some]
        at = {
            "x": [r["recovery"] for r in some],
            "y": [r["site"] for r in some],
            "hovertext": [_hover(r) for r in some],
        }
        fig.add_scatter(**at, mode="markers", name=label, marker=dots, error_x=bars, hoverinfo="text")
    absent = [r for r in rows if r["recovery"] is None]
    if absent:
        fig.add_scatter(
            x=[0.5] * len(absent), y=[r["site"] for r in absent], mode="text", text=["not measured"] * len(absent),
            hovertext=[_hover(r) for r in absent], hoverinfo="text", showlegend=False, textfont={"color": style.GREY},
        )  # fmt: skip
    for x in (0, 1):
        fig.add_vline(x=x, line={"color": style.GREY, "dash": "dot", "width": 1})
    fig.update_layout(template=style.template(), height=110 + 30 * len(rows))
    fig.update_xaxes(title_text=_axis_title(mode))
    fig.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], title_text="site")
    if title:
        fig.update_layout(title_text=style.escape(title), margin_t=64)
    spoken = "; ".join(f"{r['site']}: {_value(r)}" for r in rows)
    df = pd.DataFrame(list(rows), dtype=object)
    return style.finish(fig, f"Recovery by site. {spoken}", df, list(df.columns))


def _axis_title(mode: str) -> str:
    return f"{'recovered' if mode == 'denoise' else 'removed'} fraction of the gap"


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

"""How every figure looks, and the pieces figures are made of: palette, themes, escaping, lines with intervals.

The series colours have at least 3:1 contrast on white and on the dark page and stay apart under the three kinds of
colour blindness; markers differ too. Backgrounds are transparent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from probelens.errors import InputError, nearest
from probelens.results.result import Result
from probelens.results.sentences import is_embedding

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    Rows = pd.DataFrame | Result | Sequence[Mapping[str, Any]]

Theme = Literal["auto", "light", "dark"]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#A17CFD", "#825E2F", "#9F1DFE")
"""Colours of lines, in order, distinct under a colour deficiency too."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "x")
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")
GREY = "#7F8791"
PAGE = {"light": "#ffffff", "dark": "#14171c"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_INK = {"auto": "#7A7F87", "light": "#23282f", "dark": "#e4e7eb"}
_GRID = {"auto": "rgba(127,135,145,0.25)", "light": "#e3e6ea", "dark": "#2c323a"}
_HOVER = {"auto": "#ffffff", "light": "#ffffff", "dark": "#22272e"}
_HOVER_INK = {"auto": "#23282f", "light": "#23282f", "dark": "#e4e7eb"}
_DIVERGING = {
    "light": ("#8c3a00", "#e08a4f", "#f4f4f2", "#5aa2d6", "#004f86"),
    "dark": ("#ffa869", "#a4511b", "#22272e", "#1f6ea8", "#7cc4ff"),
}


def template(theme: Theme = "auto") -> go.layout.Template:
    """A plotly template for one theme.

    Args:
        theme: "light" or "dark" for a page of that colour; "auto" has mid-grey text that can be read on both, and is
            what the figures of this module start with.

    Returns:
        The template, for ``figure.update_layout(template=template("dark"))``; plotly's global templates aren't touched.

    Raises:
        InputError: An unknown theme.

    Examples:
        >>> template("dark").layout.paper_bgcolor
        'rgba(0,0,0,0)'
    """
    import plotly.graph_objects as go

    if theme not in _INK:
        raise InputError(f"no theme {theme!r}. Allowed: {', '.join(map(repr, _INK))}")
    ink, grid = _INK[theme], _GRID[theme]
    hover = {"family": FONT, "size": 13, "color": _HOVER_INK[theme]}
    lines = {"gridcolor": grid, "linecolor": ink, "tickcolor": ink, "showline": True, "ticks": "outside", "ticklen": 4}
    axis = {**lines, "zeroline": False, "automargin": True, "title": {"standoff": 8, "font": {"size": 13}}}
    stops = _DIVERGING["dark" if theme == "dark" else "light"]
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": ink},
            "title": {"font": {"size": 15}, "x": 0, "xref": "paper", "xanchor": "left"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(PALETTE),
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
            "hoverlabel": {"align": "left", "bgcolor": _HOVER[theme], "bordercolor": GREY, "font": hover},
            "legend": legend_at(1.02),
            "margin": {"l": 56, "r": 22, "t": 16, "b": 48},
            "coloraxis": {
                "colorscale": [[i / (len(stops) - 1), color] for i, color in enumerate(stops)],
                "colorbar": {"outlinewidth": 0, "ticks": "", "thickness": 12},
            },
        }
    )


def legend_at(y: float) -> dict[str, Any]:
    """A horizontal legend whose lower left corner is at this height of the paper."""
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": y, "yanchor": "bottom", "tracegroupgap": 0}


def escape(text: object) -> str:
    """Text that plotly shows as it is: no pseudo-HTML tags, entities, template fields or line breaks.

    Args:
        text: A name, label or token from anywhere.

    Returns:
        Text safe in any title, tick, legend or hover string.

    Examples:
        >>> escape("<b>x</b> & %{y}")
        '&lt;b&gt;x&lt;/b&gt; &amp; %&#123;y}'
    """
    out = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "%&#123;")
    # A dollar pair would be handed to MathJax on a page that loads it.
    return " ".join(out.replace("$", "&#36;").split()) or "\u200b"


def rgba(color: str, alpha: float) -> str:
    """A hex colour with an opacity, as plotly writes it."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def frame(data: Rows, columns: Iterable[str], caller: str) -> pd.DataFrame:
    """The rows as a DataFrame that has these columns, or an error that names what is missing."""
    import pandas as pd

    if isinstance(data, Result):
        data = data.to_dataframe()
    # dtype=object keeps ints beside missing values, and text that pandas' own strings can't hold.
    df = data if isinstance(data, pd.DataFrame) else pd.DataFrame(list(data), dtype=object)
    if df.empty:
        raise InputError(f"{caller} got no rows. Give at least one row, as a DataFrame or a list of dicts.")
    for column in columns:
        if column not in df.columns:
            near = nearest(column, map(str, df.columns))
            hint = f"Nearest: {', '.join(map(repr, near))}. " if near else ""
            have = f"the rows have {', '.join(repr(str(c)) for c in df)}"
            raise InputError(f"{caller} needs the column {column!r}; {have}. {hint}Rename the column or pass its name.")
    return df.reset_index(drop=True)


def numbers(df: pd.DataFrame, column: str | None, caller: str) -> list[float | None]:
    """A column as floats, with None where there is no finite number."""
    if column is None or column not in df.columns:
        return [None] * len(df)
    out: list[float | None] = []
    given = df[column].astype(object)
    for value in given.where(given.notna(), math.nan).tolist():
        try:
            number = float(value)
        except (TypeError, ValueError) as err:
            raise InputError(
                f"{caller} needs numbers in the column {column!r}; it found {value!r}. "
                "Give a float, or NaN where nothing was measured."
            ) from err
        out.append(number if math.isfinite(number) else None)
    return out


def groups(df: pd.DataFrame, column: str | None) -> list[tuple[str, pd.DataFrame]]:
    """(name, rows) for each value of a column in order of appearance; one unnamed group without a column."""
    if column is None:
        return [("", df)]
    keys = [str(value) for value in df[column].tolist()]
    return [(name, df[[key == name for key in keys]]) for name in dict.fromkeys(keys)]


def ordered(df: pd.DataFrame, column: str, caller: str) -> pd.DataFrame:
    """The rows by increasing number in a column; rows that are equal keep their order."""
    values = defined(df, column, caller)
    return df.iloc[sorted(range(len(values)), key=values.__getitem__)]


def unique(df: pd.DataFrame, columns: Sequence[str], caller: str, advice: str) -> None:
    """Refuse rows that would put two points on one place of one line."""
    repeated = df[df.duplicated(list(columns), keep=False)]
    if len(repeated):
        where = ", ".join(f"{column}={repeated[column].iloc[0]!s}" for column in columns)
        raise InputError(f"{caller} found {len(repeated)} rows that share a point ({where}). {advice}")


def percent(value: float) -> str:
    """A fraction of 1 in a hover text."""
    return f"{100 * value:.1f} %"


def measured(value: float | None, lo: float | None, hi: float | None, say: Callable[[float], str]) -> str:
    """A value and its interval in words: ``93.4 % [92.0 %, 94.1 %]``, or ``not measured``."""
    if value is None:
        return "not measured"
    return say(value) if lo is None or hi is None else f"{say(value)} [{say(lo)}, {say(hi)}]"


def layer_name(layer: object) -> str:
    """``embed`` for layer -1, the number of the block for the others."""
    name = f"{layer:g}" if isinstance(layer, float) else str(layer)
    return "embed" if name == "-1" else name


def layer_names(df: pd.DataFrame, column: str, caller: str) -> dict[float, str]:
    """What to call each layer: "embed", the block's number, or "norm" and "before" where the rows' site says so."""
    layers = defined(df, column, caller)
    sites = [str(site) for site in df["site"].tolist()] if "site" in df.columns else [""] * len(layers)
    return {at: _name_of(at, site) for at, site in zip(layers, sites)}


def _name_of(layer: float, site: str) -> str:
    if site.startswith("ln_final"):
        return "norm"
    return "before" if layer == -1 and site and not is_embedding(site) else layer_name(layer)


def layer_ticks(names: Mapping[float, str]) -> dict[str, Any]:
    """Axis settings that name the layers, at most about a dozen of them and always the last."""
    found = sorted(names)
    step = max(1, math.ceil(len(found) / 13))
    last = found[-1]
    shown = [v for i, v in enumerate(found) if v == last or (i % step == 0 and last - v >= step / 2) or v < 0]
    return {"tickmode": "array", "tickvals": shown, "ticktext": [names[v] for v in shown]}


def add_band(
    fig: go.Figure, x: Sequence[float], lo: Sequence[Any], hi: Sequence[Any], *, color: str, group: str, row: int
) -> None:
    """A shaded interval, one piece for each run of points that have both bounds."""
    shade = rgba(color, 0.18)
    for known, piece in itertools.groupby(zip(x, lo, hi), lambda at: at[1] is not None and at[2] is not None):
        if known:
            xs, low, high = map(list, zip(*piece))
            # A lone point has no area: its outline is what can be seen.
            outline = {"color": shade, "width": 6 if len(xs) == 1 else 0}
            look = {"fill": "toself", "fillcolor": shade, "line": outline, "mode": "lines", "hoverinfo": "skip"}
            ring = {"x": xs + xs[::-1], "y": high + low[::-1]}
            fig.add_scatter(**ring, **look, showlegend=False, legendgroup=group, row=row, col=1)


def add_line(
    fig: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    *,
    name: str,
    where: str,
    what: str,
    say: Callable[[float], str],
    color: str,
    lo: Sequence[float | None] | None = None,
    hi: Sequence[float | None] | None = None,
    notes: Sequence[str] | None = None,
    places: Mapping[float, str] | None = None,
    marker: str | None = None,
    dash: str = "solid",
    row: int = 1,
    legend: str = "legend",
) -> str:
    """One line with its band and hover texts; returns what a screen reader says of it.

    ``name``, ``where`` ("layer"), ``what`` ("accuracy"), ``notes`` (one for each point) and ``places`` (what to call
    a value of x) are raw text. Lines of one name share a legend entry. Points without a value leave a gap.
    """
    at_x = [(places or {}).get(at, f"{at:g}") for at in x]
    low, high = lo or [None] * len(x), hi or [None] * len(x)
    add_band(fig, x, low, high, color=color, group=name, row=row)
    hover = []
    for i, place in enumerate(at_x):
        text = f"<b>{escape(name)}</b><br>{escape(where)} {escape(place)}<br>{escape(what)} "
        note = f"<br>{escape(notes[i])}" if notes and notes[i] else ""
        hover.append(text + measured(y[i], low[i], high[i], say) + note)
    line = {"color": color, "dash": dash, "width": 2.25 if dash == "solid" else 1.75}
    dots = {"symbol": marker, "size": 8, "color": color} if marker else None
    look = {"mode": "lines+markers" if marker else "lines", "line": line, "marker": dots, "connectgaps": False}
    first = not any(trace.legendgroup == name and trace.showlegend for trace in fig.data)
    entry = {"name": escape(name), "legend": legend, "legendgroup": name, "showlegend": first}
    fig.add_scatter(x=list(x), y=list(y), hovertext=hover, hoverinfo="text", row=row, col=1, **look, **entry)
    spoken = (f"{place}: {measured(v, None, None, say)}" for place, v in zip(at_x, y))
    return f"{name}, {what} by {where}: " + ", ".join(spoken)


def panels(
    heights: Sequence[int], titles: Sequence[str] = (), title: str | None = None, gap: int | None = None
) -> go.Figure:
    """An empty figure of panels under each other that share their horizontal axis; sizes in pixels."""
    from plotly.subplots import make_subplots

    total, n = sum(heights), len(heights)
    gap = gap or (46 if any(titles) else 26)
    whole = total + gap * (n - 1)
    names = [escape(t) if t else "" for t in titles] or None
    sizes = {"row_heights": [h / total for h in heights], "vertical_spacing": gap / whole if n > 1 else 0}
    fig = make_subplots(rows=n, cols=1, shared_xaxes=True, subplot_titles=names, **sizes)
    fig.update_layout(template=template(), height=whole + 90)
    fig.update_annotations(font_size=13, x=0, xanchor="left")
    # The legend is above the first panel's title, at any height of the figure.
    fig.update_layout(legend_y=1 + (26 if any(titles) else 8) / total)
    if title:
        fig.update_layout(title_text=escape(title), margin_t=44)
    return fig


def finish(fig: go.Figure, alt: str, df: pd.DataFrame, columns: Iterable[str | None]) -> go.Figure:
    """Keep what the report needs beside the picture: a text alternative and the rows behind it."""
    kept = [c for c in dict.fromkeys(columns) if c is not None and c in df.columns]
    rows = [{str(key): value for key, value in row.items()} for row in df[kept].to_dict("records")]
    fig.update_layout(meta={"alt": alt, "rows": rows})
    return fig


def defined(df: pd.DataFrame, column: str, who: str) -> list[float]:
    """A column as floats, none of which may be missing."""
    found = numbers(df, column, who)
    if None in found:
        given = df[column].tolist()[found.index(None)]
        raise InputError(f"{who} needs a number in every row of {column!r}; it found {given!r}.")
    return [value for value in found if value is not None]

"""Interchange accuracy by layer beside its controls, or by layer and position with the verdicts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError
from probelens.results.plots import style
from probelens.results.plots.lines import layer_profile
from probelens.results.plots.patching import site_axis
from probelens.results.plots.style import escape, frame

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_NAMES = {
    "target": "the subspace", "full": "everything", "complement": "everything but it", "random": "random, equal rank",
    "random_matched": "random, equal variance", "orthogonal_pca": "components orthogonal to it",
    "row_space": "the part that is read",
}  # fmt: skip
# Marks of the verdicts that say something about a cell whose answers follow; other cells have none.
_MARKS = {"used": "circle", "spread": "square", "illusory": "x", "unspecific": "diamond", "no control": "triangle-up"}
_SCALE = [[0.0, "rgba(0,114,178,0.05)"], [1.0, "rgba(0,114,178,1)"]]  # see-through, so that it fits any page
_MOST = ("random", "random_matched", "orthogonal_pca")


def interchange(data: Any, *, title: str | None = None) -> go.Figure:
    """Share of pairs whose answer follows what was taken from the other run.

    Args:
        data: Rows of an ``InterchangeResult``: site, layer, pos, condition, iia, iia_lo, iia_hi, verdict.
        title: Shown above the figure.

    Returns:
        With one position a line by layer for each condition, means over draws, a panel for each kind of site; with
        several the subspace's accuracy by layer and position, where marks say the verdicts.

    Raises:
        InputError: No rows, or a missing column.
    """
    table = frame(data, ("site", "layer", "pos", "condition", "iia", "iia_lo", "iia_hi", "verdict"), "interchange()")
    if "head" not in table:
        table = table.assign(head=None)
    table = table.assign(head=table["head"].astype(object).where(table["head"].notna(), None))
    targets = table[table["condition"] == "target"]
    if targets["pos"].nunique() > 1:
        return _map(table, targets, title)
    shown = table[table["condition"].isin(list(_NAMES))]
    shown = shown.assign(kind=[_kind(site, head) for site, head in zip(shown["site"], shown["head"], strict=True)])
    by = ["condition", "kind", "layer"]
    lines = shown.groupby(by, sort=False)[["iia", "iia_lo", "iia_hi"]].mean().reset_index()
    lines = lines.rename(columns={"iia_lo": "lo", "iia_hi": "hi"})
    lines.loc[~lines["condition"].isin(["target", "full", "complement", "row_space"]), ["lo", "hi"]] = float("nan")
    lines["condition"] = lines["condition"].map(_NAMES)
    facet = "kind" if lines["kind"].nunique() > 1 and lines.duplicated(["condition", "layer"]).any() else None
    return layer_profile(lines, y="iia", color="condition", facet=facet, y_label="answers that follow", title=title)


def _kind(site: str, head: int | None) -> str:
    """What a site is called without its block, and the head where there is one."""
    kind = re.sub(r"^blocks\.\d+\.", "", str(site)).replace("hook_", "")
    return kind if head is None else f"{kind}, head {int(head)}"


def _map(table: pd.DataFrame, targets: pd.DataFrame, title: str | None) -> go.Figure:
    """Sites by positions: the subspace's accuracy as colour, verdicts as marks, controls in the hover text."""
    import pandas as pd
    import plotly.graph_objects as go

    keys = list(dict.fromkeys(zip(targets["site"], targets["head"], strict=True)))
    positions = sorted({int(p) for p in targets["pos"]})
    names, axis = site_axis([site for site, _ in keys])
    names = [name if head is None else f"{name}, head {int(head)}" for name, (_, head) in zip(names, keys, strict=True)]
    labels = [f"{name} ({names[: i + 1].count(name)})" if name in names[:i] else name for i, name in enumerate(names)]
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in table.to_dict("records"):
        cell = cells.setdefault((row["site"], row["head"], int(row["pos"])), {})
        value = None if row["iia"] is None or row["iia"] != row["iia"] else float(row["iia"])
        if row["condition"] == "target":
            cell.update(iia=value, lo=row["iia_lo"], hi=row["iia_hi"], verdict=row["verdict"])
        elif row["condition"] in ("full", "complement"):
            cell[row["condition"]] = value
        elif row["condition"] in _MOST and value is not None:
            cell["control"] = max(value, cell.get("control", 0.0))
    grid, hover, rows = [], [], []
    marked: dict[str, list[tuple[int, str]]] = {}
    for label, (site, head) in zip(labels, keys, strict=True):
        line, said = [], []
        for position in positions:
            cell = cells.get((site, head, position), {})
            line.append(cell.get("iia"))
            said.append(_said(str(site), head, position, cell))
            rows.append({"site": str(site), "head": head, "position": position, **cell})
            if cell.get("verdict") in _MARKS:
                marked.setdefault(cell["verdict"], []).append((position, label))
        grid.append(line)
        hover.append(said)
    found = [
        (v, label, p)
        for line, label in zip(grid, labels, strict=True)
        for v, p in zip(line, positions)
        if v is not None
    ]
    if not found:
        raise InputError("interchange got no accuracy to show: no pair is answered correctly by both runs")
    fig = go.Figure(
        go.Heatmap(
            z=grid, x=positions, y=[escape(label) for label in labels], coloraxis="coloraxis", hovertext=hover,
            hoverinfo="text", xgap=1 if len(positions) <= 24 else 0, ygap=1, showlegend=False,
        )
    )  # fmt: skip
    for word, symbol in _MARKS.items():
        if word in marked:
            fig.add_scatter(
                x=[p for p, _ in marked[word]], y=[escape(label) for _, label in marked[word]], mode="markers", name=word,
                marker={"symbol": symbol, "size": 7, "color": "#ffffff", "line": {"color": "#23282f", "width": 1}},
                hoverinfo="skip",
            )  # fmt: skip
    # From the top: title, name of the scale, scale, its ticks, legend.
    head_room = 28 if title else 0
    top = head_room + 66 + (26 if marked else 0)
    height = top + 56 + max(26, min(44, 420 // len(keys))) * len(keys)
    bar = {
        "orientation": "h", "x": 0, "xanchor": "left", "xpad": 0, "len": 1, "y": 1 - (head_room + 22) / height,
        "yref": "container", "yanchor": "top", "ypad": 0, "tickvals": [0, 0.5, 1], "ticktext": ["0", "50 %", "100 %"],
        "ticklabeloverflow": "allow",
    }  # fmt: skip
    scale = {"cmin": 0, "cmax": 1, "colorscale": _SCALE, "colorbar": bar}
    fig.update_layout(
        template=style.template(),
        height=height,
        margin={"t": top, "r": 38},
        coloraxis=scale,
        legend=style.legend_at(1.0),
    )
    fig.add_annotation(
        text="answers that follow the subspace", xref="paper", x=0, xanchor="left", yref="paper", y=1, yanchor="top",
        yshift=top - head_room, showarrow=False,
    )  # fmt: skip
    axis = axis if axis != "patched at" else "interchanged at"
    fig.update_yaxes(type="category", categoryorder="array", categoryarray=[escape(label) for label in labels])
    fig.update_yaxes(ticks="", showgrid=False, title_text=escape(axis))
    ends = [positions[0] - 0.5, positions[-1] + 0.5]
    fig.update_xaxes(title_text="interchanged position (token index)", showgrid=False, range=ends)
    if title:
        place = {"text": escape(title), "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 4}}
        fig.update_layout(title=place)
    best, label, position = max(found, key=lambda cell: cell[0])
    counted = ", ".join(f"{word} in {len(places)}" for word, places in marked.items()) or "none marked"
    alt = (
        f"Heat map of the answers that follow the subspace, {len(keys)} sites by {len(positions)} positions; most, "
        f"{style.percent(best)}, at {label}, position {position}. Verdicts: {counted} of {len(keys) * len(positions)}."
    )
    df = pd.DataFrame(rows, dtype=object)
    return style.finish(fig, alt, df, list(df.columns))


def _said(site: str, head: int | None, position: int, cell: dict[str, Any]) -> str:
    """The hover text of a cell."""
    if not cell:
        return f"<b>{escape(site)}</b><br>position {position}<br>not measured"
    of = "" if head is None else f", head {int(head)}"
    follows = style.measured(cell["iia"], cell["lo"], cell["hi"], style.percent)
    beside = [
        f"{name} {style.percent(cell[key])}"
        for key, name in (("full", "everything"), ("complement", "everything but it"), ("control", "highest control"))
        if cell.get(key) is not None
    ]
    lines = [f"<b>{escape(site)}</b>{of}", f"position {position}: {escape(cell['verdict'])}", f"follows in {follows}"]
    return "<br>".join([*lines, *beside])

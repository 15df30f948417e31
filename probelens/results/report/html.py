"""The pieces of a report page: escaped text, tables, figures, and the data embedded beside them.

Text reaches the page through ``text`` and data through ``Document.embed``; nothing else writes a caller's string.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError, nearest
from probelens.results.report.terms import TERMS
from probelens.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from probelens.results.plots.style import Rows

_SHOWN = 200
_BUTTONS = {
    "csv": ("CSV", "save the data"),
    "png": ("PNG", "save a picture"),
    "svg": ("SVG", "save a drawing"),
    "reset": ("Reset view", "undo zooming"),
}
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
# A pseudo-HTML tag of plotly that isn't plain formatting: links, styles, anything unknown.
_TAG = re.compile(r"<(?=[a-z/!])(?!/?(?:b|i|em|s|u|br|sub|sup|extra)\s*/?>)", re.IGNORECASE)
_TILES = re.compile(r"(map|mapbox|geo)$|^choropleth")


@dataclass
class Document:
    """The page under construction: its parts, contents list, data, and the terms already explained."""

    body: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)
    figures: int = 0
    tables: int = 0

    def section(self, title: str, content: str) -> None:
        """Add a headed part and its line in the contents."""
        key = f"s{len(self.contents) + 1}"
        self.contents.append(f'<li><a href="#{key}">{text(title)}</a></li>')
        heading = f'<h2 id="{key}-title">{text(title)}</h2>'
        self.body.append(f'<section id="{key}" aria-labelledby="{key}-title">\n{heading}\n{content}\n</section>')

    def embed(self, key: str, value: object) -> None:
        """Add data for the page's script."""
        out = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
        # Inside <script> only these can end the element or open a comment.
        out = out.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        self.data.append(f'<script type="application/json" id="{key}">{out}</script>')

    def terms(self, keys: Sequence[str]) -> str:
        """Explain each term the first time, and point back to it later."""
        for key in keys:
            if key not in TERMS:
                near = f"Nearest: {', '.join(found)}. " if (found := nearest(key, TERMS)) else ""
                raise InputError(f"no term {key!r} to explain. {near}Allowed: {', '.join(TERMS)}")
        new = [key for key in dict.fromkeys(keys) if key not in self.explained]
        old = [key for key in dict.fromkeys(keys) if key in self.explained]
        self.explained.update(new)
        out = ""
        if new:
            entry = '<div id="term-{}"><h3>{}</h3><p>{}</p></div>'.format
            entries = [entry(key, text(TERMS[key][0]), inline(TERMS[key][1])) for key in new]
            out += f'<div class="terms">{"".join(entries)}</div>'
        if old:
            links = ", ".join(f'<a href="#term-{key}">{text(TERMS[key][0])}</a>' for key in old)
            out += f'<p class="again">Explained above: {links}.</p>'
        return out

    def chart(self, figure: go.Figure, caption: str, rows: Rows | None, alt: str | None, name: str | None) -> str:
        """A figure with caption, buttons, text alternative and table."""
        self.figures += 1
        n = self.figures
        spec, meta = figure_spec(figure, caption)
        if rows is None:
            rows = meta.get("rows") or points(spec)
        stem = slug(name or f"figure {n} {caption}", f"figure-{n}")
        self.embed(f"figure-{n}", spec)
        table, count = self.table(rows, f"rows-{n}", f"Data of figure {n}")
        buttons = "".join(
            f'<button type="button" data-do="{do}" data-name="{stem}" data-rows="rows-{n}" '
            f'aria-label="{label}: {what} of figure {n}">{label}</button>'
            for do, (label, what) in _BUTTONS.items()
        )
        height = int(spec["layout"].get("height") or 420)
        return (
            f'<figure id="fig{n}" data-figure="figure-{n}">\n'
            f'<figcaption id="fig{n}-caption"><b>Figure {n}.</b> {inline(caption)}</figcaption>\n'
            f'<div class="plot" style="min-height:{height}px" role="img" aria-labelledby="fig{n}-caption" '
            f'aria-describedby="fig{n}-words"></div>\n<div class="actions">{buttons}</div>\n'
            f"<details><summary>Figure {n} in words and numbers ({count})</summary>"
            f'<p class="words" id="fig{n}-words">{text(alt or meta.get("alt") or caption)}</p>{table}</details>\n</figure>'
        )

    def folded_table(self, caption: str, rows: Rows, name: str | None, unfolded: bool) -> str:
        """A numbered table under a summary that opens it."""
        self.tables += 1
        n = self.tables
        table, count = self.table(rows, f"table-{n}", caption)
        button = _csv_button(f"table-{n}", slug(name or f"table {n} {caption}", f"table-{n}"), f"table {n}")
        return (
            f"<details{' open' if unfolded else ''}><summary>Table {n}. {inline(caption)} ({count})</summary>"
            f"{table}{button}</details>"
        )

    def open_table(self, caption: str, rows: Rows, name: str) -> str:
        """A table that is always shown."""
        return self.table(rows, name, caption)[0] + _csv_button(name, name, "this table")

    def table(self, rows: Rows, key: str, caption: str) -> tuple[str, str]:
        """The HTML of the first rows and the count in words; all rows are embedded for the CSV."""
        records = _records(rows)
        columns = list(dict.fromkeys(column for record in records for column in record))
        cells = [[plain(record.get(column)) for column in columns] for record in records]
        self.embed(key, {"columns": columns, "rows": cells})
        numeric = [all(row[i] is None or _is_number(row[i]) for row in cells) for i in range(len(columns))]
        sides = [" class=n" if yes else "" for yes in numeric]
        head = "".join(f'<th scope="col"{side}>{text(column)}</th>' for column, side in zip(columns, sides))
        body = "".join(
            "<tr>" + "".join(f"<td{side}>{_cell(v)}</td>" for v, side in zip(row, sides)) + "</tr>\n"
            for row in cells[:_SHOWN]
        )
        if len(cells) > _SHOWN:
            caption += f" (the first {_SHOWN} of {len(cells)} rows; the CSV has all)"
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table><caption>'
            f"{inline(caption)}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
        ), "1 row" if len(cells) == 1 else f"{len(cells)} rows"


def text(value: object) -> str:
    """Escaped for HTML text and quoted attributes; characters that no page can hold become U+FFFD."""
    clean = _UNPRINTABLE.sub("\ufffd", str(value)).replace("\r\n", "\n").replace("\r", "\n")
    return html.escape(clean, quote=True)


def inline(value: object) -> str:
    """Escaped text in which `backticks` make code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text(value))


def prose(value: str) -> str:
    """Paragraphs, parted by blank lines."""
    paragraphs = re.split(r"\n\s*\n", value.strip())
    return "\n".join(f"<p>{inline(' '.join(p.split()))}</p>" for p in paragraphs if p.strip())


def bullets(items: Sequence[str]) -> str:
    """A list of sentences."""
    return '<ul class="findings">' + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>"


def facts(pairs: Mapping[str, object], code: bool = False) -> str:
    """Names and their values."""
    out = ""
    for name, value in pairs.items():
        shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        shown = f"<code>{text(shown)}</code>" if code else inline(shown)
        out += f"<div><dt>{text(name)}</dt><dd>{shown}</dd></div>"
    return f'<dl class="facts{" settings" if code else ""}">{out}</dl>'


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as ``a.b``."""
    out: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def commands(lines: Sequence[str]) -> str:
    """Commands to copy."""
    code = "\n".join(map(text, lines))
    return f'<div><pre><code>{code}</code></pre><button type="button" data-do="copy">Copy</button></div>'


def script(source: str) -> str:
    """JavaScript that cannot end its element early, with the line ends that the browser hashes."""
    unix = source.replace("\r\n", "\n").replace("\r", "\n")
    return unix.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")


def sha256(source: str) -> str:
    """The hash by which a content security policy names a script."""
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def slug(value: str, fallback: str) -> str:
    """A file name's stem: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:60].strip("-") or fallback


def figure_spec(figure: go.Figure, caption: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figure as plain data without its theme, and the ``meta`` that ``probelens.plots`` left in it."""
    import plotly.graph_objects as go

    if not isinstance(figure, go.Figure):
        raise InputError(
            f"the chart {caption!r} needs a plotly Figure; it got a {type(figure).__name__}. "
            "Give what a function of probelens.plots or a result's plot() returns."
        )
    spec = _listed(json.loads(str(figure.to_json(engine="json"))))
    data, layout = spec["data"], spec.get("layout", {})
    layout.pop("template", None)
    meta = layout.pop("meta", None)
    remote = [trace["type"] for trace in data if _TILES.search(trace.get("type", "")) and "heat" not in trace["type"]]
    sources = [holder.get("source") for holder in (*layout.get("images", ()), *data)]
    remote += [source for source in sources if isinstance(source, str) and not source.startswith("data:")]
    if remote:
        raise InputError(
            f"the chart {caption!r} would load {remote[0]!r} from the network, and a report loads nothing. "
            "Use a figure without maps; give images as data: URIs."
        )
    return {"data": _tame(data), "layout": _tame(layout)}, meta if isinstance(meta, dict) else {}


def points(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a figure that carries none: one for each point of each trace."""
    rows = []
    for i, trace in enumerate(spec["data"]):
        name = trace.get("name", f"trace {i}")
        columns = {k: trace[k] for k in ("x", "y", "z", "value", "text") if isinstance(trace.get(k), list)}
        z = columns.get("z")
        if z and isinstance(z[0], list):
            xs, ys = columns.get("x", range(len(z[0]))), columns.get("y", range(len(z)))
            rows += [{"trace": name, "x": x, "y": y, "z": v} for y, line in zip(ys, z) for x, v in zip(xs, line)]
        else:
            rows += [{"trace": name, **dict(zip(columns, point))} for point in zip(*columns.values())]
    return rows


def plain(value: Any) -> str | int | float | bool | None:
    """A value that JSON and JavaScript keep exactly; None for NaN."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    return str(value)


def _csv_button(key: str, name: str, what: str) -> str:
    return (
        f'<div class="actions"><button type="button" data-do="csv" data-rows="{key}" data-name="{name}" '
        f'aria-label="CSV: save the data of {what}">CSV</button></div>'
    )


def _tame(value: Any) -> Any:
    if isinstance(value, str):
        return _TAG.sub("&lt;", value)
    if isinstance(value, list):
        return [_tame(v) for v in value]
    if isinstance(value, dict):
        return {k: _tame(v) for k, v in value.items()}
    return value


def _listed(value: Any) -> Any:
    """Decode the arrays that plotly writes as base64, since the tables need their numbers."""
    if isinstance(value, list):
        return [_listed(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "bdata" not in value or "dtype" not in value:
        return {k: _listed(v) for k, v in value.items()}
    import numpy as np

    array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]).newbyteorder("<"))
    if "shape" in value:
        array = array.reshape([int(n) for n in str(value["shape"]).split(",")])
    return _finite(array.tolist())


def _finite(value: Any) -> Any:
    return [_finite(v) for v in value] if isinstance(value, list) else plain(value)


def _records(rows: Rows) -> list[dict[str, Any]]:
    table: Any = rows.to_dataframe() if isinstance(rows, Result) else rows
    if not isinstance(table, Sequence):
        table = table.astype(object).where(table.notna(), None).to_dict("records")
    return [{str(key): value for key, value in dict(record).items()} for record in table]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: str | int | float | bool | None) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else inline(value)

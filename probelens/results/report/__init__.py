"""One self-contained HTML page for a run: what was measured on what, the figures, their data, how to reproduce.

The page opens from disk, asks the network for nothing, and its content security policy allows only its own two
scripts. Every text given here is shown as it is, never read as markup; `backticks` make code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from probelens.errors import InputError
from probelens.results.files import atomic_path
from probelens.results.report import html as parts
from probelens.results.report.terms import TERMS

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from probelens.results.plots.style import Rows

__all__ = ["TERMS", "Chart", "Claim", "Section", "Table", "render_report", "write_report"]


@dataclass(frozen=True)
class Chart:
    """A figure with its caption and the rows behind it.

    Args:
        figure: Any plotly figure that needs no map tiles or remote images; those of ``probelens.plots`` carry
            their rows and text alternative with them.
        caption: What is shown: measured quantity, model, label, number of sequences.
        rows: The data offered as CSV and as a table. None: the rows that the figure carries, otherwise its traces'
            points.
        alt: The figure in words, for those who can't see it. None: the text that the figure carries, otherwise the
            caption.
        name: Stem of the saved files' names. None: made from the caption.
    """

    figure: go.Figure
    caption: str
    rows: Rows | None = None
    alt: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows to show, folded unless ``open``, with their CSV.

    Args:
        caption: What the rows are.
        rows: A DataFrame, a result or a list of dicts.
        name: Stem of the CSV's name. None: made from the caption.
        open: Show the table unfolded.
    """

    caption: str
    rows: Rows
    name: str | None = None
    open: bool = False


@dataclass(frozen=True)
class Section:
    """One headed part of the report.

    Args:
        title: The heading.
        text: What was done and found; a blank line starts a new paragraph.
        charts: Figures, side by side where there is room.
        tables: Tables under the figures.
        note: A caveat, in a box of its own.
        explain: Keys of ``TERMS``: each is explained where the report first needs it.
    """

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    explain: Sequence[str] = ()


@dataclass(frozen=True)
class Claim:
    """One row of the paper / ours table.

    Args:
        claim: What is claimed.
        paper: The paper's value, as text or a number.
        ours: Ours.
        interval: Ours, as (low, high) or text.
        agrees: True, False, or None where the data can't say.
        note: Why, or what differs in the set-up.
    """

    claim: str
    paper: str | float
    ours: str | float
    interval: str | tuple[float, float] = ""
    agrees: bool | None = None
    note: str = ""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    findings: Sequence[str] = (),
    measured: Mapping[str, object] | None = None,
    paper: Sequence[Claim] = (),
    config: Mapping[str, object] | None = None,
    versions: Mapping[str, object] | None = None,
    reproduce: str | Sequence[str] = (),
) -> Path:
    """Write a run's report as one HTML file, whole or not at all.

    Args:
        path: The file, usually ``report.html``; missing folders are made.
        title: Heading of the page.
        lead: What was asked and what came out, in a few sentences that need nothing else.
        sections: The report's parts, in order.
        findings: The main results, one sentence each.
        measured: What was measured on what: models, task, labels, number of sequences, seeds.
        paper: Rows of the paper / ours table; none, no table.
        config: The run's settings; nested mappings are shown as ``a.b``.
        versions: Versions of the packages and, if it matters, the machine.
        reproduce: The command or commands that make this report again.

    Returns:
        The path written.

    Raises:
        InputError: A term in ``explain`` that isn't in ``TERMS``, an empty title, a figure that needs the
            network, or something that isn't a plotly figure.
        StoreError: The folder can't be written.

    Units:
        As in the rows given; nothing is converted.

    Examples:
        >>> import tempfile, os
        >>> from probelens.results.plots import layer_profile
        >>> figure = layer_profile([{"layer": l, "accuracy": 0.5} for l in (-1, 0)])
        >>> chart = Chart(figure, "Probe accuracy by layer, 400 test sequences.")
        >>> section = Section("Where it can be read", charts=[chart], explain=["probe"])
        >>> file = os.path.join(tempfile.mkdtemp(), "report.html")
        >>> write_report(file, title="Parity in an LSTM", lead="One model.", sections=[section]).name
        'report.html'
    """
    text = render_report(
        title=title,
        lead=lead,
        sections=sections,
        findings=findings,
        measured=measured,
        paper=paper,
        config=config,
        versions=versions,
        reproduce=reproduce,
    )
    with atomic_path(path) as part:
        part.write_bytes(text.encode("utf-8"))
    return Path(path)


def render_report(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    findings: Sequence[str] = (),
    measured: Mapping[str, object] | None = None,
    paper: Sequence[Claim] = (),
    config: Mapping[str, object] | None = None,
    versions: Mapping[str, object] | None = None,
    reproduce: str | Sequence[str] = (),
) -> str:
    """The page that ``write_report`` writes, as text; the same page for the same input.

    Args:
        Those of ``write_report``, without ``path``.

    Returns:
        One HTML document, plotly.js included.

    Raises:
        InputError: As ``write_report``.
    """
    from plotly.offline import get_plotlyjs

    from probelens.results.plots import template

    if not title.strip():
        raise InputError("a report needs a title; it got an empty one. Say what was measured on what.")
    doc = parts.Document()
    if findings:
        doc.section("Findings", parts.bullets(findings))
    if measured:
        doc.section("What was measured on what", parts.facts(measured))
    for section in sections:
        doc.section(section.title, _section(section, doc))
    if paper:
        doc.section("Paper and ours", _claims(paper, doc))
    commands = [reproduce] if isinstance(reproduce, str) else list(reproduce)
    if commands:
        doc.section("Reproduce", parts.commands(commands))
    if config:
        doc.section("Configuration", parts.facts(parts.flat(config), code=True))
    if versions:
        doc.section("Versions", parts.facts(versions, code=True))
    doc.embed("page-data", {name: template(name).to_plotly_json() for name in ("light", "dark")})
    plotly, script = parts.script(get_plotlyjs()), parts.script(_asset("report.js"))
    version = parts.text(metadata.version("probelens"))
    scripts = {"plotly": plotly, "js": script, "plotly_hash": parts.sha256(plotly), "js_hash": parts.sha256(script)}
    body = {"toc": "\n".join(doc.contents), "body": "\n".join(doc.body), "data": "\n".join(doc.data)}
    head = {"version": version, "title": parts.text(title), "lead": parts.prose(lead), "css": _asset("report.css")}
    # Every value is escaped HTML, a hash, or a file of this package.
    return _asset("page.html").format(**head, **body, **scripts)


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath("assets", name).read_text(encoding="utf-8")


def _section(section: Section, doc: parts.Document) -> str:
    out = [parts.prose(section.text), doc.terms(section.explain)]
    if section.charts:
        charts = [doc.chart(c.figure, c.caption, c.rows, c.alt, c.name) for c in section.charts]
        out.append('<div class="charts">' + "\n".join(charts) + "</div>")
    out += [doc.folded_table(t.caption, t.rows, t.name, t.open) for t in section.tables]
    if section.note:
        out.append(f'<div class="note">{parts.prose(section.note)}</div>')
    return "\n".join(filter(None, out))


def _claims(claims: Sequence[Claim], doc: parts.Document) -> str:
    verdicts = {True: "\u2713 yes", False: "\u2717 no", None: "? undetermined"}
    rows = []
    for c in claims:
        interval = c.interval if isinstance(c.interval, str) else "[{:.4g}, {:.4g}]".format(*c.interval)
        told = {"Interval": interval, "Agrees": verdicts[c.agrees], "Note": c.note}
        rows.append({"Claim": c.claim, "Paper": c.paper, "Ours": c.ours, **told})
    intro = "<p>A disagreement is a result like any other; undetermined means that the interval can't decide.</p>"
    return intro + doc.open_table("The paper's claims and ours", rows, "paper-and-ours")

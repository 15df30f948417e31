"""The report: whole, offline, safe against any text, the same for the same input, and usable in a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from probelens import plots
from probelens.errors import InputError, StoreError
from probelens.results.report import TERMS, Chart, Claim, Section, Table, render_report, write_report

# Hostile text: markup, script ends, quotes, formats, separators, characters that no page or UTF-8 can hold.
HOSTILE = [
    '<img src=x onerror="window.pwned = 1">',
    "</script><script>window.pwned = 1</script>",
    "</style></title></textarea><svg onload='window.pwned = 1'>",
    "<!--<script>",
    "a\u2028b\u2029c",
    '" onmouseover="window.pwned = 1',
    "' autofocus onfocus='window.pwned = 1",
    "<a href='javascript:window.pwned = 1'>link</a>",
    "{title} %(x)s ${y} `code` &lt;b&gt;",
    "null\x00bell\x07half\ud800",
]
NAME = " ".join(HOSTILE)


def profile(names: tuple[str, ...] = ("LSTM", "Transformer")) -> go.Figure:
    rows = [
        {"model": m, "layer": at, "accuracy": 0.4 + 0.1 * at + 0.05 * i, "lo": 0.3 + 0.1 * at,
         "hi": 0.5 + 0.1 * at, "majority": 0.2}
        for i, m in enumerate(names)
        for at in (-1, 0, 1, 2, 3)
    ]  # fmt: skip
    return plots.layer_profile(rows, color="model")


def ablation(metric: str = "accuracy") -> go.Figure:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for at in (-1, 0, 1, 2, 3):
        rows.append({"layer": at, "condition": "target", "drop": 0.1 + 0.1 * at, "probe_accuracy": 0.9,
                     "refit_accuracy": 0.7, "refit_mlp_accuracy": 0.8, "baseline": 0.3})  # fmt: skip
        rows += [{"layer": at, "condition": "random", "draw": d, "drop": rng.normal(0, 0.02)} for d in range(20)]
    return plots.ablation(rows, metric=metric)


def heatmap(names: tuple[Any, ...] = (-1, 0, 1, 2, 3)) -> go.Figure:
    values = np.linspace(-0.2, 1, len(names) * 41).reshape(len(names), 41)
    return plots.patch_heatmap(values, names, range(41), marks={"edited": 3, "read": 40})


def sample(text: str = "Dyck depth", name: str = "LSTM") -> dict[str, Any]:
    """A report of every part, with ``text`` and ``name`` wherever a caller's string can go."""
    rows = [{"model": name, "value": 0.1, text or "c": text}, {"model": "b", "value": float("nan"), "more": math.inf}]
    return {
        "title": f"Where is {text}?",
        "lead": f"About {text}.\n\nSecond paragraph.",
        "findings": [f"Found {text}."],
        "measured": {name: text, "Seeds": [0, 1]},
        "sections": [
            Section(
                f"Reading {text}",
                f"Text {text}",
                [Chart(profile((name, "other")), f"Profile of {text}"), Chart(ablation(text), text, alt=text)],
                [Table(f"Rows of {text}", rows)],
                f"Note {text}",
                ["probe", "baselines"],
            ),
            Section("Patching", charts=[Chart(heatmap((name, "x")), "Map", name=text)], explain=["probe", "patching"]),
        ],
        "paper": [Claim(text, text, 0.5, (0.4, 0.6), True, text), Claim("b", 0.81, 0.5, "", False), Claim("c", 1, 2)],
        "config": {"task": {text: text, "length": 40}},
        "versions": {text: text},
        "reproduce": [f"probelens run quickstart {text}"],
    }


class Page(HTMLParser):
    """What a browser's parser makes of the page: elements, attributes, text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, (tag, self.open[-3:])

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def data(self, key: str) -> Any:
        """The JSON embedded under an id."""
        scripts = iter([text for tag, text in self.texts if tag == "script"])
        found = {attrs.get("id"): next(scripts) for attrs in self.all("script")}
        return json.loads(found[key])

    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag not in ("script", "style"))


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_report(**sample()))


def test_the_page_is_well_formed_with_one_heading_tree(page: Page) -> None:
    assert page.open == []
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    inside = levels[levels.index(1) :]
    assert all(b - a <= 1 for a, b in itertools.pairwise(inside))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for attrs in page.all("a")]
    assert all(link and link.startswith("#") and link[1:] in ids for link in links)
    assert "#main" in links
    for _, attrs in page.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attrs.get(key) is None or attrs[key] in ids


def test_the_page_says_everything_it_was_given(page: Page) -> None:
    text = page.text()
    given = ["Where is Dyck depth?", "Second paragraph.", "Found Dyck depth.", "0, 1", "Note Dyck depth"]
    given += ["probelens run quickstart Dyck depth", "task.length", "[0.4, 0.6]"]
    given += ["\u2713 yes", "\u2717 no", "? undetermined", *(TERMS[key][1][:50] for key in ("probe", "patching"))]
    for part in given:
        assert part in text, part
    contents = list(re.findall(r'<li><a href="#s\d+">([^<]+)</a>', render_report(**sample())))
    assert ", ".join(contents) == (
        "Findings, What was measured on what, Reading Dyck depth, Patching, Paper and ours, Reproduce, "
        "Configuration, Versions"
    )


def test_each_figure_has_a_caption_words_buttons_and_its_data(page: Page) -> None:
    assert len(page.all("figure")) == len(page.all("figcaption")) == 3
    plots_ = [attrs for attrs in page.all("div") if attrs.get("class") == "plot"]
    assert [attrs["role"] for attrs in plots_] == ["img"] * 3
    buttons = page.all("button")
    assert all(attrs.get("type") == "button" for attrs in buttons)
    assert [attrs.get("data-do") for attrs in buttons].count("csv") == 3 + 2
    assert "embed: 30.0 %, 0: 40.0 %" in page.text()


def test_nothing_on_the_page_points_to_the_network(page: Page) -> None:
    for tag, attrs in page.elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base", "form", "audio", "video"}
        for key in ("src", "srcset", "action", "data", "poster", "xlink:href", "background"):
            assert key not in attrs
    style = "".join(text for tag, text in page.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_carries_the_licence_of_the_plotly_js_that_it_includes() -> None:
    source = render_report(**sample())
    notice, script = source.split("<script>")[:2]
    assert "Permission is hereby granted, free of charge" in notice
    assert "WITHOUT WARRANTY OF ANY KIND" in notice
    assert re.search(r"plotly\.js v\d.*Copyright [\d-]+, Plotly, Inc\..*MIT license", script[:400], re.S)


def test_only_the_two_scripts_of_the_page_may_run(page: Page) -> None:
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    texts = [text for tag, text in page.texts if tag == "script"]
    running = [text for attrs, text in zip(page.all("script"), texts, strict=True) if "type" not in attrs]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert allowed["script-src"] == " ".join(f"'sha256-{h}'" for h in hashes)
    assert len(running) == 2
    assert "plotly.js" in running[0][:200]
    assert "MIT" in running[0][:200]


def test_terms_are_explained_once_and_linked_later() -> None:
    source = render_report(**sample())
    assert source.count('<div id="term-probe">') == 1
    assert 'Explained above: <a href="#term-probe">Probe</a>' in source
    with pytest.raises(InputError, match=r"no term 'patchin'.*Nearest: patching.*Allowed: "):
        render_report(title="t", lead="l", sections=[Section("s", explain=["patchin"])])


@pytest.mark.parametrize("key", sorted(TERMS))
def test_each_term_is_two_to_five_sentences(key: str) -> None:
    heading, text = TERMS[key]
    assert heading
    assert 2 <= len(re.findall(r"[.:?](?:\s|$)", text)) <= 12
    assert 80 <= len(text) <= 620


# Text from anywhere


@pytest.mark.parametrize("text", [*HOSTILE, NAME])
def test_no_text_becomes_markup(text: str) -> None:
    plain, hostile = Page(render_report(**sample("x", "y"))), Page(render_report(**sample(text, text)))
    shape = [(tag, sorted(attrs)) for tag, attrs in hostile.elements]
    # `backticks` are the one thing that a text can ask for.
    assert [s for s in shape if s[0] != "code"] == [(t, sorted(a)) for t, a in plain.elements if t != "code"]
    visible = re.sub(r"[\x00-\x08\x7f\ud800-\udfff]", "\ufffd", text).replace("`", "")
    # Paragraphs, whose white space is folded, are compared without it.
    assert "".join(visible.split()) in "".join(hostile.text().split())


def test_embedded_data_keeps_hostile_text_exactly() -> None:
    page = Page(render_report(**sample(NAME, NAME)))
    table = page.data("table-1")
    assert table["columns"] == ["model", "value", NAME, "more"]
    assert table["rows"] == [[NAME, 0.1, NAME, None], ["b", None, None, "inf"]]
    assert page.data("rows-1")["rows"][0][0] == NAME
    source = render_report(**sample(NAME, NAME))
    for script in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', source, re.S):
        assert not re.search(r"[<>&\u2028\u2029]", script)


def test_links_and_styles_in_figures_are_neutralised_and_formatting_is_kept() -> None:
    figure = go.Figure(go.Scatter(y=[1], name="<a href='https://example.org'>x</a><b>b</b><br>"))
    figure.update_layout(title_text="<span style='background:url(https://example.org)'>t</span> <i>i</i> 1 < 2")
    page = Page(render_report(title="t", lead="l", sections=[Section("s", charts=[Chart(figure, "c")])]))
    spec = page.data("figure-1")
    assert spec["data"][0]["name"] == "&lt;a href='https://example.org'>x&lt;/a><b>b</b><br>"
    assert spec["layout"]["title"]["text"].startswith("&lt;span")
    assert spec["layout"]["title"]["text"].endswith("<i>i</i> 1 < 2")


@pytest.mark.parametrize(
    ("figure", "what"),
    [
        (go.Figure(go.Scattermap(lat=[0], lon=[0])), "scattermap"),
        (go.Figure(go.Choropleth(locations=["FRA"], z=[1])), "choropleth"),
        (go.Figure(layout={"images": [{"source": "https://example.org/a.png"}]}), "https://example.org/a.png"),
        ("not a figure", "needs a plotly Figure; it got a str"),
    ],
)
def test_figures_that_need_the_network_are_refused(figure: Any, what: str) -> None:
    with pytest.raises(InputError, match=re.escape(what)):
        render_report(title="t", lead="l", sections=[Section("s", charts=[Chart(figure, "c")])])


def test_heat_maps_and_inline_images_are_not_taken_for_maps() -> None:
    inline = go.Figure(go.Heatmap(z=[[1]]), {"images": [{"source": "data:image/png;base64,AAAA"}]})
    render_report(title="t", lead="l", sections=[Section("s", charts=[Chart(inline, "c")])])


# Data


def test_tables_show_the_first_rows_and_embed_all() -> None:
    rows = pd.DataFrame({"i": range(500), "x": np.linspace(0, 1, 500, dtype=np.float32)})
    source = render_report(title="t", lead="l", sections=[Section("s", tables=[Table("Many", rows)])])
    page = Page(source)
    assert page.elements.count(("tr", {})) == 201
    assert "the first 200 of 500 rows" in page.text()
    assert page.data("table-1")["rows"] == [[i, float(x)] for i, x in zip(rows["i"], rows["x"], strict=True)]


def test_missing_values_of_every_kind_are_empty_cells() -> None:
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [None, "x"], "c": [float("nan"), 2.5]})
    page = Page(render_report(title="t", lead="l", sections=[Section("s", tables=[Table("T", frame)])]))
    assert page.data("table-1")["rows"] == [[1, None, None], [None, "x", 2.5]]


def test_a_figure_without_rows_gives_its_points() -> None:
    figure = go.Figure(
        [go.Scatter(x=np.array([1.0, 2.0]), y=np.array([3, 4]), name="a"), go.Heatmap(z=[[1, 2], [3, 4]], x=["p", "q"])]
    )
    page = Page(render_report(title="t", lead="l", sections=[Section("s", charts=[Chart(figure, "c")])]))
    assert page.data("rows-1") == {
        "columns": ["trace", "x", "y", "z"],
        "rows": [["a", 1.0, 3, None], ["a", 2.0, 4, None], ["trace 1", "p", 0, 1], ["trace 1", "q", 0, 2],
                 ["trace 1", "p", 1, 3], ["trace 1", "q", 1, 4]],
    }  # fmt: skip


def test_rows_given_with_a_chart_replace_those_it_carries() -> None:
    chart = Chart(profile(), "c", rows=[{"x": 2**60, "y": np.float64(0.5)}])
    page = Page(render_report(title="t", lead="l", sections=[Section("s", charts=[chart])]))
    assert page.data("rows-1")["rows"] == [[str(2**60), 0.5]]


# The file


def test_same_input_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import test_report as t; t.write_report(sys.argv[2], **t.sample())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    file = tmp_path / "report.html"
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(file)], check=True, env=env)
    assert file.read_bytes() == render_report(**sample()).encode()
    assert file.read_bytes() != render_report(**sample("else")).encode()


def test_a_failed_report_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = write_report(tmp_path / "new" / "report.html", **sample())
    old = path.read_bytes()
    with pytest.raises(InputError):
        write_report(path, title=" ", lead="l", sections=[])
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == ["report.html"]


def test_a_path_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="can't write"):
        write_report(tmp_path / "file" / "report.html", **sample())

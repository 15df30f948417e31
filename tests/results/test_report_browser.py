"""The report in headless Chromium: silent, offline, usable by keyboard and phone, deaf to hostile names."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from test_report import HOSTILE, NAME, heatmap, profile, sample

from probelens.results.report import Chart, Section, Table, write_report

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Visit:
    """A page in Chromium with everything it logged and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **options)
        self.context.set_default_timeout(60_000)
        self.tab = self.context.new_page()
        self.logged: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.logged.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.logged.append(f"error: {error}"))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        self.tab.goto(self.url)
        self.tab.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def outside(self) -> list[str]:
        return [url for url in self.requests if url != self.url and not url.startswith(("data:", "blob:"))]

    def download(self, selector: str) -> bytes:
        button = self.tab.locator(selector).first
        button.evaluate("b => b.closest('details')?.setAttribute('open', '')")
        with self.tab.expect_download() as waiting:
            button.click()
        return Path(waiting.value.path()).read_bytes()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives Chromium, isn't installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", **sample())


@pytest.fixture(scope="module")
def visit(browser: Any, path: Path) -> Iterator[Visit]:
    opened = Visit(browser, path, viewport={"width": 1300, "height": 900}, color_scheme="light")
    yield opened
    opened.context.close()


def test_the_page_draws_its_figures_silently_and_asks_for_nothing(visit: Visit) -> None:
    assert visit.tab.locator(".plot .main-svg").count() >= 3
    assert visit.tab.locator(".plot .scatterlayer .trace").count() > 5
    assert visit.tab.locator(".plot .heatmaplayer image").count() == 1
    assert visit.logged == []
    assert visit.outside() == []


def test_the_browser_check_would_notice_a_request_and_an_error(browser: Any, path: Path, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    # Without its policy, and with what a careless report would hold.
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    bad = '<img src="http://127.0.0.1:9/pixel.png"><script>console.error("noticed")</script>'
    (tmp_path / "bad.html").write_text(source.replace("</main>", bad + "</main>"), encoding="utf-8")
    opened = Visit(browser, tmp_path / "bad.html")
    assert "http://127.0.0.1:9/pixel.png" in opened.outside()
    assert any("noticed" in line for line in opened.logged)
    opened.context.close()


def test_the_policy_stops_injected_scripts_and_images(browser: Any, path: Path, tmp_path: Path) -> None:
    bad = '<img src="http://127.0.0.1:9/p.png" onerror="window.pwned=1"><script>window.pwned = 1</script>'
    source = path.read_text(encoding="utf-8").replace("</main>", bad + "</main>")
    (tmp_path / "bad.html").write_text(source, encoding="utf-8")
    opened = Visit(browser, tmp_path / "bad.html")
    assert opened.tab.evaluate("window.pwned") is None
    assert sum("Content Security Policy" in line for line in opened.logged) >= 2
    opened.context.close()


def test_data_downloads_as_csv_that_reads_back(visit: Visit) -> None:
    figure = profile(("LSTM", "other"))
    got = pd.read_csv(io.BytesIO(visit.download("#fig1 [data-do=csv]")))
    pd.testing.assert_frame_equal(got, pd.DataFrame(figure.layout.meta["rows"]), check_dtype=False)
    table = visit.download("[data-rows=table-1]").decode()
    assert next(csv.reader(io.StringIO(table))) == ["model", "value", "Dyck depth", "more"]


FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1+1", " =1+1", "\uff1d1+1", "a;=1+1", '=HYPERLINK("x";"y")']
NUMBERS = [-0.5, -3, 2.5e-9, float("-inf"), -(2**60)]


def test_text_that_a_spreadsheet_would_run_is_text_in_a_csv_and_numbers_are_numbers(
    browser: Any, tmp_path: Path
) -> None:
    rows = [{"=name": text, "value": value} for text in FORMULAS for value in NUMBERS]
    file = write_report(
        tmp_path / "report.html", title="t", lead="l", sections=[Section("s", "t", [], [Table("t", rows)])]
    )
    opened = Visit(browser, file)
    found = list(csv.reader(io.StringIO(opened.download("[data-rows=table-1]").decode(), newline="")))
    opened.context.close()
    assert found[0] == ["'=name", "value"]
    assert [row[0] for row in found[1::5]] == [t if t.startswith("a") else "'" + t for t in FORMULAS]
    assert [float(row[1]) for row in found[1:]] == NUMBERS * len(FORMULAS)


def test_figures_download_as_png_and_svg_on_white(visit: Visit) -> None:
    png = visit.download("#fig1 [data-do=png]")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20], "big") == 1800
    svg = ElementTree.fromstring(visit.download("#fig3 [data-do=svg]"))
    assert svg.tag.endswith("svg")
    assert "rgb(255, 255, 255)" in ElementTree.tostring(svg, encoding="unicode")
    assert visit.logged == []


def test_the_theme_follows_the_system_and_the_button_by_keyboard(browser: Any, path: Path) -> None:
    opened = Visit(browser, path, color_scheme="dark")
    tab = opened.tab

    def look() -> tuple[str, str, str]:
        return tuple(
            tab.evaluate(
                """() => [getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.querySelector('.plot .xtick text')).fill,
                document.getElementById('theme').textContent]"""
            )
        )

    dark = look()
    assert dark[0] == "rgb(20, 23, 28)"
    assert dark[2] == "Light theme"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "theme"
    tab.keyboard.press("Enter")
    tab.wait_for_function(
        "old => getComputedStyle(document.querySelector('.plot .xtick text')).fill !== old", arg=dark[1]
    )
    light = look()
    assert light[0] == "rgb(255, 255, 255)"
    assert light[2] == "Dark theme"
    tab.reload()
    tab.wait_for_selector("html[data-ready=true]")
    assert look() == light
    assert opened.logged == []
    opened.context.close()


def test_every_control_is_reached_by_keyboard_and_details_open(visit: Visit) -> None:
    tab = visit.tab
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = false); scrollTo(0, 0)")
    assert tab.locator("details table:visible").count() == 0
    wanted = tab.locator("button:visible, summary:visible, a:visible").count()
    reached = set()
    for _ in range(3 * wanted):
        tab.keyboard.press("Tab")
        reached.add(
            tab.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")
        )
        if tab.evaluate("document.activeElement.tagName") == "SUMMARY" and not tab.locator("details[open]").count():
            tab.keyboard.press("Enter")
    for label in ("CSV: save the data of figure 3", "PNG: save a picture of figure 1", "Copy", "Reading Dyck depth"):
        assert label in reached
    assert tab.locator("details[open] table:visible").count() == 1


def test_the_commands_are_copied(browser: Any, path: Path) -> None:
    opened = Visit(browser, path)
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.tab.locator("[data-do=copy]").click()
    opened.tab.wait_for_function("() => document.getElementById('said').textContent === 'Copied'")
    assert opened.tab.evaluate("navigator.clipboard.readText()") == "probelens run quickstart Dyck depth"
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_sideways_scrolling_or_clipped_text(
    browser: Any, scheme: str, tmp_path: Path
) -> None:
    long = {**sample(), "title": "Averyveryverylongunbrokenwordinthetitle" * 3}
    long["sections"] = [*long["sections"], Section("Map", charts=[Chart(heatmap(), "Map")])]
    file = write_report(tmp_path / "report.html", **long)
    opened = Visit(
        browser, file, viewport={"width": 360, "height": 740}, color_scheme=scheme, is_mobile=True, has_touch=True
    )
    opened.tab.locator("summary").evaluate_all("all => all.forEach(s => s.parentElement.open = true)")
    assert opened.tab.evaluate("document.documentElement.scrollWidth") == 360
    clipped = opened.tab.evaluate(
        """() => [...document.querySelectorAll('.plot svg text')].filter(t => {
            const box = t.getBoundingClientRect(), plot = t.closest('.plot').getBoundingClientRect();
            return box.width && (box.left < plot.left - 1 || box.right > plot.right + 1);
        }).map(t => t.textContent)"""
    )
    assert clipped == []
    small = opened.tab.evaluate(
        "[...document.querySelectorAll('.plot svg text')].map(t => parseFloat(getComputedStyle(t).fontSize))"
    )
    assert min(small) >= 11.5
    opened.context.close()


def test_hostile_names_are_shown_and_run_nothing(browser: Any, tmp_path: Path) -> None:
    file = write_report(tmp_path / "report.html", **sample(NAME, NAME))
    opened = Visit(browser, file)
    tab = opened.tab
    tab.wait_for_timeout(200)
    assert tab.evaluate("window.pwned") is None
    assert tab.locator(".plot a, .plot img, main img, main svg[onload]").count() == 0
    legend = tab.locator("#fig1 .legendtext").first.text_content()
    assert legend.startswith('<img src=x onerror="window.pwned = 1"> </script><script>')
    tab.locator("#fig1").scroll_into_view_if_needed()
    point = tab.locator("#fig1 .scatterlayer .point").first.bounding_box()
    tab.mouse.move(point["x"] + 4, point["y"] + 4)
    tab.wait_for_selector("#fig1 .hoverlayer .hovertext")
    assert HOSTILE[0] in tab.locator("#fig1 .hoverlayer").text_content()
    # UTF-8 has no lone surrogates: the browser writes them as U+FFFD.
    rows = list(csv.reader(io.StringIO(opened.download("[data-rows=table-1]").decode("utf-8"), newline="")))
    assert rows[0][2] == rows[1][0] == NAME.replace("\ud800", "\ufffd")
    assert opened.logged == []
    assert opened.outside() == []
    opened.context.close()

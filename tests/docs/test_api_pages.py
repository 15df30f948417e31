"""The pages of the API show every public name once, and a new primitive stands there of itself."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from types import ModuleType

import api_pages
import pytest

import probelens as pl

pytestmark = pytest.mark.skipif(not api_pages.DOCS.is_dir(), reason="needs a source tree")


def test_every_public_name_is_on_one_page() -> None:
    shown = [path for _, path, _ in api_pages.shown()]
    assert [path for path, n in Counter(shown).items() if n > 1] == []
    values = {id(value) for _, _, value in api_pages.shown()}
    public = {name: getattr(pl, name) for name in pl.__all__ if name != "__version__"}
    assert [n for n, v in public.items() if not isinstance(v, ModuleType) and id(v) not in values] == []
    rooms = {page for page, _, _ in api_pages.shown()} | {path.split(".")[1] for path in shown}
    used = {n for n, v in public.items() if isinstance(v, ModuleType) and v.__name__ == f"probelens.{n}"}
    assert used - rooms == api_pages.WITHOUT_A_PAGE


def test_every_page_is_in_the_menu() -> None:
    assert {p.stem for p in (api_pages.DOCS / "api").glob("*.md")} - {"index"} == set(api_pages.pages())


def test_the_overview_has_what_users_call_each_name_and_a_line_about_it() -> None:
    rows = re.findall(r"^\| \[`([\w.]+)`\]\[([\w.]+)\] \| (.*) \|$", api_pages.overview(), re.M)
    assert len(rows) > 150
    assert [name for name, _, line in rows if len(line) < 10] == []
    assert ("pl.patch", "probelens.patching.patch.patch") in {(name, path) for name, path, _ in rows}
    assert "pl.stats.coverage" in {name for name, _, _ in rows}


def test_a_module_shows_functions_before_classes_and_only_what_is_public() -> None:
    assert api_pages.members("probelens.patching.plan")[0] == "patch_plan"
    assert api_pages.members("probelens.patching.plan")[-1] == "PatchPlan"
    text = api_pages.filled("patching")
    assert text.count("::: probelens.patching.patch\n") == 1, "named on the page, so not again for the room"
    assert "::: probelens.patching.plan\n" in text, "named by probelens alone"
    assert "probelens.patching.pairs" not in text


def test_a_primitive_that_the_facade_names_is_on_the_page_of_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def interchange() -> None:
        """Swap one variable between two runs."""

    interchange.__module__ = "probelens.patching.pairs"
    pairs = pytest.importorskip("probelens.patching.pairs")
    monkeypatch.setattr(pairs, "interchange", interchange, raising=False)
    monkeypatch.setattr(pairs, "__all__", ["interchange"], raising=False)
    monkeypatch.setattr(pl, "interchange", interchange, raising=False)
    monkeypatch.setattr(pl, "__all__", [*pl.__all__, "interchange"])
    for cached in (api_pages.named, api_pages.public, api_pages.members):
        monkeypatch.setattr(api_pages, cached.__name__, cached.__wrapped__)
    assert "::: probelens.patching.pairs\n" in api_pages.filled("patching")
    assert ("patching", "probelens.patching.pairs.interchange", interchange) in list(api_pages.shown())
    assert api_pages.called("probelens.patching.pairs.interchange", interchange) == "pl.interchange"


def test_the_page_of_columns_has_a_table_for_each_class_of_results_that_declares_some() -> None:
    text = api_pages.columns()
    for cls in (pl.ProbeResult, pl.AblationResult, pl.PatchResult):
        assert f"## [{cls.__name__}]" in text
        assert all(f"| `{column.name}` |" in text for column in cls.columns)
    assert "## [Activations]" not in text, "it is no table"


def test_the_changelog_says_where_modules_are_now() -> None:
    text = (api_pages.DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.partition("### Modules moved")[2].partition("###")[0], re.M)
    assert len(rows) > 20
    for _, now in rows[2:]:
        for path in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`", now):
            if not path.startswith("model."):
                module, _, name = f"probelens.{path}".rpartition(".")
                assert api_pages.is_module(f"probelens.{path}") or hasattr(importlib.import_module(module), name), path

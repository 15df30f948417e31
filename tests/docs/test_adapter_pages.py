"""The pages for people who come from other libraries, or who write an adapter, run and say what is so."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
import transformer_lens.patching as patching
import zoo
from pages import ROOT, run_page
from transformer_lens.model_bridge.sources import build_bridge_from_module

import probelens as pl


@pytest.fixture(scope="module")
def coming_from() -> dict[str, object]:
    printed = io.StringIO()
    # nnsight reads the source of a trace by its path.
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        return {**run_page("docs/coming-from.md"), "printed": printed.getvalue()}


def test_the_page_for_users_of_other_libraries_runs(coming_from: dict[str, object]) -> None:
    assert coming_from["by_layer_and_position"].shape == (3, 6)  # type: ignore[attr-defined]
    assert "build_bridge_from_module" in str(coming_from["printed"]), "the error says where the weights are"
    assert coming_from["one"].values.shape == (1, 1, 4)  # type: ignore[attr-defined]
    assert coming_from["acts"].names == [f"blocks.{i}.hook_resid_post" for i in range(3)]  # type: ignore[attr-defined]


def test_every_name_that_the_page_calls_the_same_is_there(coming_from: dict[str, object]) -> None:
    text = (ROOT / "docs/coming-from.md").read_text()
    rows = dict(re.findall(r"^\| (Running|Sizes|Cache|Tokens) \| (.+) \|$", text, re.M))
    model, cache = pl.wrap(zoo.build("gpt2")), coming_from["clean_cache"]
    owners = {"Running": model, "Sizes": model.cfg, "Cache": cache, "Tokens": model}
    for row, owner in owners.items():
        names = re.findall(r"`(?:model\.cfg\.)?(\w+)`", rows[row].split(", with ")[0])
        assert len(names) > 3, row
        for name in names:
            assert hasattr(owner, name), name


def test_every_patching_function_is_named_or_needs_weights(coming_from: dict[str, object]) -> None:
    text = (ROOT / "docs/coming-from.md").read_text()
    for name in dir(patching):
        if name.startswith("get_act_patch_"):
            short = name.removeprefix("get_act_patch_")
            assert short.startswith(("attn_head_", "direct_path")) or f"`{short}`" in text, name
    assert build_bridge_from_module.__name__ in text


def test_the_page_on_adapters_runs_and_its_adapter_is_complete() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = run_page("docs/write-an-adapter.md")
    report = names["report"]
    assert report.ok, str(report)  # type: ignore[attr-defined]
    kinds = [row["kind"] for row in report.rows]  # type: ignore[attr-defined]
    assert kinds.count("interior") == 6
    assert len(kinds) == 1 + 3 * 6 + 4
    assert len(names["cache"]) == 3  # type: ignore[arg-type]
    block = re.search(r"^class TowerAdapter.*?^```", (ROOT / "docs/write-an-adapter.md").read_text(), re.M | re.S)
    assert block is not None
    assert len([line for line in block[0].splitlines() if line.strip()]) <= 45


def test_the_methods_that_the_page_explains_exist() -> None:
    text = (ROOT / "docs/write-an-adapter.md").read_text()
    explained = re.findall(r"^((?:`\w+`(?:, )?)+)$", text, re.M)
    names = [name for line in explained for name in re.findall(r"`(\w+)`", line)]
    assert len(names) >= 12
    adapter = pl.wrap(zoo.build("gpt2")).adapter
    assert [name for name in names if not hasattr(adapter, name)] == []

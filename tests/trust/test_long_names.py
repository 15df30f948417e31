"""Names that no file system takes and configs that no memory holds: errors of probelens, never the system's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

import probelens as pl
from probelens.cli.main import main
from probelens.experiments import RunRecord, Store, run_grid
from probelens.results.report import Section, write_report

LONG = "n" * 300

CALLS: dict[str, Callable[[], Any]] = {
    "a grid": lambda: run_grid(lambda *a: [{"a": 1}], [{"x": 1}], Store(LONG), workers=1),
    "a record": lambda: RunRecord.load(LONG),
    "a new record": lambda: RunRecord("r", {}).start(LONG),
    "a result": lambda: pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(LONG),
    "a saved result": lambda: pl.PatchResult.load(LONG),
    "activations": lambda: pl.collect(pl.wrap(zoo.build("gru")), zoo.tokens(2, 3), out=LONG),
    "a model": lambda: pl.load(f"./{LONG}"),
    "a model of the hub": lambda: pl.load(LONG),
    "a formal model": lambda: pl.models.load(LONG),
    "a report": lambda: write_report(f"{LONG}.html", title="t", lead="l", sections=[Section("s", "t", [], [])]),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_name_of_300_characters_is_an_error_of_probelens(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((pl.StoreError, pl.InputError)):
        CALLS[what]()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["report", LONG], ["run", "quickstart", "--out", LONG], ["hooks", f"./{LONG}"]])
def test_a_name_of_300_characters_on_the_command_line_is_status_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_cell_may_have_a_name_of_300_characters(tmp_path: Path) -> None:
    assert run_grid(lambda *a: [{"a": 1}], [{"name": LONG}], Store(tmp_path), workers=1).ran


@pytest.mark.parametrize("task", [None, "causal-lm"])
@pytest.mark.parametrize(
    ("kind", "depth"), [("gpt_neox", "num_hidden_layers"), ("gpt2", "n_layer"), ("mamba", "num_hidden_layers")]
)
def test_a_config_of_a_million_layers_is_refused_before_one_is_made(
    kind: str, depth: str, task: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Linear, "__init__", lambda *a, **k: pytest.fail("a layer was made"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, depth: 10**6, "hidden_size": 8, "num_attention_heads": 2})
    )
    with pytest.raises(pl.InputError, match=r"1,000,000, and at most 10,000"):
        pl.load(tmp_path, task=task)

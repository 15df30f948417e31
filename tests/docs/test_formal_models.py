"""The trained formal models in the docs are what their list says."""

from __future__ import annotations

import json

import formal_models
import pytest

import probelens as pl
from probelens.examples.refit_the_probe.shared.setup import make_task

LISTED = json.loads((formal_models.MODELS / "models.json").read_text()) if formal_models.MODELS.is_dir() else []
pytestmark = pytest.mark.skipif(not LISTED, reason="needs a source tree")


def test_every_file_is_listed() -> None:
    assert {path.name for path in formal_models.MODELS.glob("*.safetensors")} == {entry["file"] for entry in LISTED}


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry["name"])
def test_a_model_is_the_one_that_was_measured(entry: dict) -> None:
    path = formal_models.MODELS / entry["file"]
    assert formal_models.checksum(path) == entry["sha256"]
    task = make_task(entry["name"].split("-")[1])
    found = pl.training.evaluate(pl.models.load(path), task, (40,), n=64, trained_length=40, late=20, seed=0)
    # 64 sequences here, 256 in the list.
    assert found.accuracy(40, "late") == pytest.approx(entry["accuracy_after_position_20"]["40"], abs=0.02)

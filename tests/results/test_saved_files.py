"""Files written by the version before modules moved into rooms load with the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import saved_files
import torch

import probelens as pl
from probelens.experiments.record import RunRecord
from probelens.experiments.store import Store
from probelens.results.files import read_tensors, write_tensors
from probelens.results.result import Result

SAVED = Path(saved_files.__file__).with_name("saved_by_0_1_0_dev")
RESULTS = sorted(path.stem for path in SAVED.glob("*.safetensors"))
FORMER = ["ValueProbeResult"]  # read by the class that replaced it


def summary(name: str) -> Any:
    return json.loads((SAVED / f"{name}.json").read_text())


def as_json(value: Any) -> Any:
    """As it comes back from the file beside the result."""
    return json.loads(json.dumps(saved_files.plain(value)))


def class_named(name: str) -> type[Result]:
    """The class that a user would call ``load`` of."""
    for public in pl.__all__:
        getattr(pl, public)
    from probelens.hooks import verify

    below, known = [Result], {verify.VerifyReport.__name__: verify.VerifyReport}
    for cls in below:
        below += cls.__subclasses__()
        known[cls.__name__] = cls
    return known[name]


def test_the_saved_files_are_here() -> None:
    # Data that git or a package leaves out would make the tests below pass on nothing.
    assert len(RESULTS) >= 20
    assert (SAVED / "training" / "model.safetensors").is_file()


def _of(old: Any, new: Any) -> Any:
    """What ``new`` has of the keys of ``old``: fields that came later have their defaults."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _of(old[key], new[key]) for key in old if key in new}
    return new


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in FORMER])
def test_a_result_saved_before_the_move_has_the_same_numbers(name: str) -> None:
    expected = summary(name)
    found = as_json(class_named(expected["class"]).load(SAVED / f"{name}.safetensors"))
    assert found["class"] == expected["class"]
    assert _of(expected, found) == expected


def test_a_probe_of_numbers_saved_before_the_move_is_read_by_the_class_that_replaced_it() -> None:
    expected = summary("ValueProbeResult")["fields"]
    found = pl.ProbeResult.load(SAVED / "ValueProbeResult.safetensors")
    for row, old in zip(found.rows, expected["rows"], strict=True):
        assert {name: row[name] for name in old} == old
        name = f"{old['site']}|{old['label']}|{old['seed']}"
        assert found.coef(old["site"]).flatten().tolist() == expected["coefs"][name]["values"]
        assert found.intercept(old["site"]).flatten().tolist() == expected["intercepts"][name]["values"]


def test_a_changed_number_would_show() -> None:
    # The control of the test above.
    found = pl.Subspace.load(SAVED / "Subspace.safetensors")
    moved = pl.Subspace(found.basis, found.mean + 1e-6, found.label)
    assert as_json(found) == summary("Subspace") != as_json(moved)


def test_a_file_names_the_class_of_a_nested_result_without_its_module(tmp_path: Path) -> None:
    old = pl.ErasureResult.load(SAVED / "ErasureResult.safetensors")
    assert b"probelens.erasure:Eraser" in (SAVED / "ErasureResult.safetensors").read_bytes()
    path = old.save(tmp_path / "new.safetensors")
    header = read_tensors(path)[1]["probelens"]
    assert '"r": "Eraser"' in header
    assert '"r": "AblationResult"' in header
    assert as_json(pl.ErasureResult.load(path)) == as_json(old)
    # The module in an old file decides nothing.
    tensors, about = read_tensors(SAVED / "ErasureResult.safetensors")
    moved = about["probelens"].replace("probelens.erasure:Eraser", "os:Eraser")
    path = write_tensors(tmp_path / "moved.safetensors", tensors, {"probelens": moved})
    assert as_json(pl.ErasureResult.load(path)) == as_json(old)


def test_a_model_saved_before_the_move_has_the_same_weights() -> None:
    model = pl.models.load(SAVED / "training")
    assert saved_files.plain(dict(model.state_dict())) == summary("training")
    assert pl.load(SAVED / "training").cfg.n_layers == 2


def test_a_finished_training_run_from_before_the_move_is_read_not_repeated(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "training", tmp_path / "training")
    task = pl.tasks.Parity(bos=True)
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=4, hidden_size=4)
    torch.manual_seed(0)
    model = pl.wrap(pl.models.build(config))
    steps: list[Any] = []
    found = pl.training.train(
        model, task, config=pl.training.TrainConfig(**saved_files.TRAINING), checkpoint_dir=folder,
        progress=steps.append,
    )  # fmt: skip
    assert as_json(found) == summary("TrainResult")
    assert steps == []
    assert saved_files.plain(dict(model.module.state_dict())) == summary("training")


def test_activations_streamed_before_the_move_are_read_and_those_of_another_model_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "stream", tmp_path / "stream")
    model = pl.load(SAVED / "training")
    found = pl.collect(model, saved_files.stream_batch(), "layers", out=folder)
    assert as_json(found.tensors) == summary("stream")
    assert (folder / "collect.json").read_bytes() == (SAVED / "stream" / "collect.json").read_bytes()
    with torch.no_grad():
        next(model.module.parameters()).add_(1)
    with pytest.raises(pl.StoreError, match="another model"):
        pl.collect(model, saved_files.stream_batch(), "layers", out=folder)


def test_a_run_folder_from_before_the_move_has_the_same_rows() -> None:
    expected, store = summary("run"), Store(SAVED / "run")
    record = RunRecord.load(SAVED / "run")
    assert record.cells == [expected["key"]]
    assert store.done(expected["key"])
    assert store.config(expected["key"]) == expected["config"]
    rows = pd.read_parquet(store.cell(expected["key"]) / "rows.parquet")
    assert rows.to_dict("records") == expected["rows"]


def test_the_report_of_a_profile_from_before_the_move_is_made_again(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "profile", tmp_path / "profile")
    assert saved_files.cli(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "not learned" in page

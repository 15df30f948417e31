"""The quickstart from end to end at its smallest: interrupted, continued, found again, reported again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import probelens as pl
from probelens.cli.main import main
from probelens.examples import quickstart, trained
from probelens.experiments import RunRecord, Status, Store

WORDS = ("run", "quickstart", "--preset", "smoke", "--set", "workers=1")


def statuses(folder: Path) -> dict[str, int]:
    """When each file of a run was written, in nanoseconds."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Ctrl-C in the second model, a report of what there is, the same command again, and once more."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    words = [*WORDS, "--out", str(folder)]
    trained: list[str] = []
    whole = quickstart.train_model

    def train(config: Mapping[str, Any], place: Path, status: Any) -> Any:
        trained.append(config["arch"])
        if len(trained) == 2:
            raise KeyboardInterrupt
        return whole(config, place, status)

    found = SimpleNamespace(folder=folder, trained=trained)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "train_model", train)
        found.first = main(words)
        found.after_first = statuses(folder)
        found.partial = main(["report", str(folder)])
        found.partial_page = (folder / "report.html").read_text() if found.partial == 0 else ""
        found.second = main(words)
        found.after_second = statuses(folder)
        found.third = main(words)
        found.after_third = statuses(folder)
    return found


def test_an_interrupted_run_keeps_what_is_finished_and_goes_on(story: SimpleNamespace) -> None:
    assert (story.first, story.second, story.third) == (130, 0, 0)
    assert story.trained == ["lstm", "transformer", "transformer"], "the finished model is not trained again"
    done = [name for name in story.after_first if name.endswith("rows.parquet")]
    assert len(done) == 1
    assert all(story.after_second[name] == at for name, at in story.after_first.items() if name.startswith("cells"))


def test_a_second_run_finds_the_finished_models(story: SimpleNamespace) -> None:
    cells = {name: at for name, at in story.after_second.items() if name.startswith("cells")}
    assert {name: story.after_third[name] for name in cells} == cells
    assert story.after_third["report.html"] > story.after_second["report.html"], "only the report is written again"


def test_an_interrupted_run_can_be_reported(story: SimpleNamespace) -> None:
    assert story.partial == 0
    assert "the LSTM" in story.partial_page
    assert "Transformer" not in re.sub(r"<script.*?</script>", "", story.partial_page, flags=re.S).split("<main")[-1]


def test_the_run_folder_is_complete(story: SimpleNamespace) -> None:
    store = Store(story.folder)
    record = RunRecord.load(story.folder)
    assert record.recipe == "quickstart"
    assert record.config["steps"] == 30
    assert sorted(record.cells) == store.keys()
    for key in record.cells:
        files = {p.name for p in store.cell(key).iterdir()}
        wanted = {"config.json", "rows.parquet", "model.safetensors", "profile.safetensors", "behaviour.safetensors"}
        assert wanted | {"training.safetensors", "train.safetensors"} <= files
        assert not [name for name in files if name.endswith(".part") or name == "error.txt"]
        model = pl.load(store.cell(key))
        assert model(quickstart.make_task().sample(1, length=16).tokens).shape[:2] == (1, 17)
        profile = pl.Profile.load(store.cell(key) / "profile.safetensors")
        assert list(profile.indices) == ["depth", "top"]


def test_every_number_is_in_the_rows(story: SimpleNamespace) -> None:
    rows = pd.read_parquet(story.folder / "rows.parquet")
    assert set(rows["model"]) == {"LSTM", "Transformer"}
    counts = rows.groupby(["model", "kind"]).size().unstack()
    assert set(counts.columns) == {"training", "behaviour", "probe", "ablation", "filter", "patch", "interchange"}
    assert counts.notna().all().all(), "each kind of each model"
    probes = rows[rows["kind"] == "probe"]
    assert set(probes["label"]) == {"depth", "top"}
    assert {"task", "untrained"} <= set(probes["control"])
    for column in ("accuracy", "majority", "position", "last_w"):
        assert probes.loc[probes["control"] == "task", column].between(0, 1).all()
    ablated = rows[rows["kind"] == "ablation"]
    assert {"random", "random_matched"} < set(ablated["condition"])
    assert rows["cell"].nunique() == 2


def test_the_report_says_what_was_measured_and_asks_the_network_for_nothing(story: SimpleNamespace) -> None:
    page = (story.folder / "report.html").read_text()
    text = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    for wanted in ("LSTM", "Transformer", "Dyck-2", "depth", "top of stack", "Readable", "Needed: LSTM",
                   "Needed: Transformer", "Sufficient", "Used", "Four questions", "30 for probes", "probelens run quickstart --set", "--set steps=30"):  # fmt: skip
        assert wanted in text, wanted
    assert text.count("<h1") == 1
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", text, re.I)
    assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text, re.I)
    assert not re.search(r"<script[^>]*\bsrc\b|<link|<iframe|<object|<embed", page, re.I)
    assert "Content-Security-Policy" in page
    # The pattern finds such a request where there is one.
    assert re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", '<img src="https://x.y/z">')


def test_the_report_can_be_made_again_from_the_folder_alone(
    story: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*a: Any, **k: Any) -> None:
        raise AssertionError("a report trains nothing")

    monkeypatch.setattr(quickstart, "train_model", never)
    page = (story.folder / "report.html").read_bytes()
    before = statuses(story.folder)
    assert main(["report", str(story.folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["report"] == str(story.folder / "report.html")
    assert err == ""
    assert (story.folder / "report.html").read_bytes() == page
    after = statuses(story.folder)
    assert {k: v for k, v in after.items() if k.startswith("cells")} == {
        k: v for k, v in before.items() if k.startswith("cells")
    }


def test_a_new_setting_means_new_cells(story: SimpleNamespace) -> None:
    keys = RunRecord.load(story.folder).cells
    other = quickstart.Config(out=str(story.folder), **{**quickstart.PRESETS["smoke"], "seed": 1})
    from probelens.experiments import cell_key

    assert cell_key(other.cell("lstm")) not in keys
    moved = quickstart.Config(out="elsewhere", **quickstart.PRESETS["smoke"])
    assert cell_key(moved.cell("lstm")) in keys, "where the folder is changes nothing"


@pytest.mark.parametrize("place", ["a file", "below a file", "no such device"])
def test_a_run_folder_that_cannot_be_written_is_an_error_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.setattr(quickstart, "run_cell", lambda *a: pytest.fail("trained"))
    (tmp_path / "file").write_text("mine")
    out = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "run"}.get(place, Path("/proc/run"))
    with pytest.raises(pl.StoreError):
        quickstart.run(quickstart.Config(out=str(out), workers=1), progress=False)
    assert main([*WORDS, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert str(out) in err
    assert "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_that_fails_is_named_with_where_its_traceback_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: Any, folder: Path, status: Any) -> None:
        raise pl.InputError(f"no {config['arch']} today")

    monkeypatch.setattr(quickstart, "train_model", fails)
    assert main([*WORDS, "--out", str(tmp_path / "run"), "--set", "archs=gru"]) == 1
    err = capsys.readouterr().err
    assert "1 of 1 models failed" in err
    assert "no gru today" in err
    assert "Traceback" not in err
    log = next((tmp_path / "run").rglob("error.txt"))
    assert str(log) in err
    assert "Traceback" in log.read_text()
    assert main(["report", str(tmp_path / "run")]) == 2, "there is nothing to report"
    assert os.listdir(tmp_path) == ["run"]


def test_the_default_run_takes_the_models_that_come_with_probelens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl.training, "train", lambda *a, **k: pytest.fail("trained"))
    for arch in quickstart.Config().archs:
        config = quickstart.Config().cell(arch)
        folder = tmp_path / arch
        folder.mkdir()
        model, training = quickstart.train_model(config, folder, Status(folder))
        found = pl.training.evaluate(model, quickstart.make_task(), (40,), n=64, trained_length=40, seed=1)
        assert found.to_dataframe()["accuracy"].min() > 0.9
        assert training.accuracy > 0.9
        assert (folder / "model.safetensors").is_file()
        # Other weights would have come out, so these are trained.
        assert trained.find({**config, "seed": 1}) is None
        assert trained.find({**config, "trained": "none"}) is None
        assert trained.find({**config, "controls": 3}) is not None


def test_trained_models_of_a_former_run_are_found_by_their_settings(story: SimpleNamespace) -> None:
    config = quickstart.Config(**quickstart.PRESETS["smoke"], trained=str(story.folder)).cell("transformer")
    model, training = trained.find(config)
    assert json.loads((model.parent / "config.json").read_text())["arch"] == "transformer"
    assert training.is_file()
    with pytest.raises(pl.InputError, match="no finished model of arch=transformer, seed=3"):
        trained.find({**config, "seed": 3})
    with pytest.raises(pl.InputError, match="no finished model"):
        trained.find({**config, "trained": str(story.folder / "nowhere")})


def test_a_damaged_model_of_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in trained.FOLDER.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    assert trained.find(quickstart.Config().cell("lstm")) is not None
    damaged = bytearray((tmp_path / "lstm.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "lstm.safetensors").write_bytes(damaged)
    with pytest.raises(pl.StoreError, match="lstm.safetensors"):
        trained.find(quickstart.Config().cell("lstm"))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(pl.InputError, match="mamba2"):
        quickstart.run(quickstart.Config(archs=("rnn",)))


def test_a_folder_of_a_run_with_other_settings_is_refused_and_kept(
    story: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = statuses(story.folder)
    assert main([*WORDS, "--set", "seed=1", "--out", str(story.folder)]) == 2
    told = capsys.readouterr().err
    assert "seed=0 there, 1 now" in told
    assert "--out FOLDER" in told
    assert statuses(story.folder) == before


def test_a_folder_without_the_model_is_refused_before_the_run_takes_its_own(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="holds no finished model"):
        quickstart.run(quickstart.Config(out=str(tmp_path / "run"), trained=str(tmp_path / "typo")), progress=False)
    assert not (tmp_path / "run").exists()

"""The command line: what it prints, how it ends, and what it says when something is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grid_cells
import pandas as pd
import pytest
import torch
import zoo
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import probelens as pl
from probelens.cli import profile_run as _profile_run
from probelens.cli.main import main
from probelens.examples import RECIPES
from probelens.experiments import RunRecord
from probelens.experiments.settings import arguments, configure, restore

SMALL = ("n_probe=40", "n_ablate=10", "n_pairs=8", "controls=2", "mlp=false")
SMALL_FLAGS = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a transformers model, one whose last block is dead, and a trained formal model."""
    folder = tmp_path_factory.mktemp("models")
    zoo.build("neox").save_pretrained(folder / "neox")
    dead = zoo.build("neox")
    with torch.no_grad():
        for p in dead.gpt_neox.layers[2].mlp.parameters():  # type: ignore[union-attr,index]
            p.zero_()
    dead.save_pretrained(folder / "dead")
    task = pl.tasks.Dyck(k=2, max_depth=3, bos=True)
    model = pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=16, hidden_size=24))
    short = pl.training.TrainConfig(
        steps=120, batch_size=32, lr=1e-2, warmup=5, decay_steps=10, length=12, eval_sequences=32
    )
    pl.training.train(model, task, config=short, checkpoint_dir=folder / "gru", progress=False)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run the command line in this process: status, stdout and stderr."""

    def call(*words: object) -> SimpleNamespace:
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit:
            status = int(exit.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return call


def fake_recipe(monkeypatch: pytest.MonkeyPatch, do: Callable[..., Any], report: Any = None) -> None:
    """A recipe ``fake`` with one setting."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        out: str = "runs/fake"
        seed: int = 0

    members: dict[str, Any] = {"Config": Config, "PRESETS": {"tiny": {"seed": 7}}, "run": do, "__doc__": "Fake."}
    if report is not None:
        members["report"] = report
    module = SimpleNamespace(**members)
    monkeypatch.setitem(RECIPES, "fake", "probelens_fake_recipe")
    monkeypatch.setitem(sys.modules, "probelens_fake_recipe", module)  # type: ignore[arg-type]


# -- help, version, list ----------------------------------------------------------------------------


def test_help_teaches_with_examples(run: Any) -> None:
    found = run("--help")
    assert found.status == 0
    for text in ("run quickstart", "hooks", "verify", "profile", "report", "exit status"):
        assert text in found.out
    for command in ("run", "list", "report", "hooks", "verify", "profile", "bench"):
        found = run(command, "--help")
        assert found.status == 0
        assert f"probelens {command}" in found.out.split("examples:")[1], "each command shows how it is called"
        assert "exit status" in found.out


def test_without_a_command_the_help_and_status_2(run: Any) -> None:
    found = run()
    assert found.status == 2
    assert "examples:" in found.out


def test_version(run: Any) -> None:
    found = run("--version")
    assert (found.status, found.out.strip()) == (0, f"probelens {pl.__version__}")


def test_list_in_words_and_as_json(run: Any) -> None:
    found = run("list")
    assert found.status == 0
    assert "quickstart:" in found.out
    assert "smoke" in found.out
    content = json.loads(run("list", "--json").out)
    quickstart = next(item for item in content if item["name"] == "quickstart")
    assert quickstart["presets"] == ["smoke"]
    assert quickstart["settings"]["seed"] == 0
    assert quickstart["summary"].startswith("Take a trained LSTM")


# -- what can't be understood -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], ["command 'lst'", "Nearest: list"]),
        (["run"], ["NAME"]),
        (["run", "quikstart"], ["'quikstart'", "Nearest: quickstart"]),
        (["run", "quickstart", "--preset", "smok"], ["'smok'", "Nearest: smoke"]),
        (["run", "quickstart", "--prset", "smoke"], ["--prset", "Nearest: --preset"]),
        (["run", "quickstart", "--quiett"], ["--quiett", "--quiet"]),
        (["run", "quickstart", "extra"], ["extra"]),
        (["run", "quickstart", "--set", "sed=1"], ["'sed'", "Nearest: seed", "n_probe"]),
        (["run", "quickstart", "--set", "seed"], ["key=value", "'seed'"]),
        (["run", "quickstart", "--set", "=1"], ["key=value"]),
        (["run", "quickstart", "--set", "seed=x"], ["seed='x'", "integer"]),
        (["run", "quickstart", "--seed", "x"], ["seed='x'", "integer"]),
        (["run", "quickstart", "--sed", "1"], ["--sed", "Nearest: --seed"]),
        (["run", "quickstart", "--seed"], ["--seed"]),
        (["run", "quickstart", "--set", "archs=lstn"], ["lstn", "lstm"]),
        (["run", "quickstart", "--set", "out="], ["empty"]),
        (["list", "--jsn"], ["--jsn", "--json"]),
        (["profile"], ["MODEL"]),
        (["profile", "x", "--length", "ten"], ["ten", "--length"]),
        (["profile", "x", "--set", "n_prob=3"], ["'n_prob'", "Nearest: n_probe"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_understood_is_status_2_with_the_nearest_name(
    run: Any, words: list[str], says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(*words)
    assert found.status == 2, found.err
    for text in says:
        assert text in found.err
    assert found.err.startswith("probelens: ")
    assert "Traceback" not in found.err
    assert found.out == ""
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_abbreviated_options_are_refused(run: Any) -> None:
    assert run("list", "--js").status == 2


# -- how a run ends ---------------------------------------------------------------------------------


def test_a_run_prints_its_report_and_takes_presets_settings_and_out(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def do(config: Any, progress: bool) -> Path:
        seen.append((config.seed, config.out, progress))
        folder = Path(config.out)
        folder.mkdir()
        (folder / "report.html").write_text("x")
        return folder

    fake_recipe(monkeypatch, do)
    first = run("run", "fake", "--out", tmp_path / "a")
    assert (first.status, first.out.strip(), first.err) == (0, str(tmp_path / "a" / "report.html"), "")
    run("run", "fake", "--out", tmp_path / "b", "--preset", "tiny", "--quiet")
    second = run("run", "fake", "--preset", "tiny", "--set", "seed=3", "--set", f"out={tmp_path / 'c'}", "--json")
    assert run("run", "fake", "--seed", 5, f"--out={tmp_path / 'd'}", "--preset=tiny").status == 0
    assert run("run", "fake", "--seed=-6", "--out", tmp_path / "e").status == 0
    assert [s[::2] for s in seen] == [(0, True), (7, False), (3, True), (5, True), (-6, True)]
    assert json.loads(second.out) == {"folder": str(tmp_path / "c"), "report": str(tmp_path / "c" / "report.html")}


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (pl.ProbelensError("it failed"), 1, "it failed"),
        (pl.ShapeError("of another shape"), 1, "of another shape"),
        (pl.StoreError("can't write"), 2, "can't write"),
        (pl.MissingDependencyError("not installed"), 2, "not installed"),
        (pl.InputError("bad"), 2, "bad"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (MemoryError(), 1, "MemoryError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_have_a_status_and_no_traceback_unless_asked(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, says: str
) -> None:
    def do(config: Any, progress: bool) -> Path:
        raise error

    fake_recipe(monkeypatch, do)
    found = run("run", "fake")
    assert found.status == status
    assert says in found.err
    assert "Traceback" not in found.err
    assert found.out == ""
    if status == 130:
        return
    for words in (["run", "fake", "--debug"], ["--debug", "run", "fake"]):
        with pytest.raises(type(error)):
            main(words)


def test_the_page_and_the_help_have_every_exit_status(run: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.M) == ["0", "1", "2", "130", "143"]
    for words in ((), ("run",), ("hooks",), ("verify",), ("profile",), ("report",), ("list",), ("bench",)):
        status = " ".join(run(*words, "--help").out.split()).partition("exit status: ")[2]
        assert re.findall(r"\b(\d+) [at]?", status) == ["0", "1", "2", "130", "143"], words


def test_sigterm_ends_a_command_with_143_and_is_given_back(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def do(config: Any, progress: bool) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    fake_recipe(monkeypatch, do)
    before = signal.getsignal(signal.SIGTERM)
    found = run("run", "fake")
    assert (found.status, found.out) == (143, "")
    assert found.err.startswith("terminated; what is finished is kept")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_stops_reading_is_no_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def do(config: Any, progress: bool) -> Path:
        raise BrokenPipeError

    fake_recipe(monkeypatch, do)
    # In this process the standard output is the test's own, which must not be redirected.
    monkeypatch.setattr(os, "dup2", lambda *a: None)
    found = run("run", "fake")
    assert (found.status, found.err) == (0, "")


# -- models -----------------------------------------------------------------------------------------


def test_hooks_lists_the_points_of_a_model(run: Any, models: Path) -> None:
    found = run("hooks", models / "neox")
    assert found.status == 0
    names = list(pl.load(models / "neox").hook_dict)
    assert all(name in found.out for name in names)
    content = json.loads(run("hooks", models / "neox", "--json", "--match", "blocks.0.*").out)
    assert [row["name"] for row in content] == [n for n in names if n.startswith("blocks.0.")]
    assert set(content[0]) == {"name", "kind", "axes", "module", "aliases", "note"}
    short = run("hooks", models / "neox", "--json", "--match", "resid_post")
    assert [row["name"] for row in json.loads(short.out)] == [n for n in names if n.endswith("hook_resid_post")]
    none = run("hooks", models / "neox", "--match", "blocks.0.hook_resid_pots")
    assert none.status == 2
    assert "hook_resid_post" in none.err
    assert f"All names: probelens hooks {models / 'neox'}" in none.err
    several = ("--match", "blocks.[0,2].hook_resid_pre,embed", "--match", "resid_post,0,-1")
    assert [row["name"] for row in json.loads(run("hooks", models / "neox", "--json", *several).out)] == [
        "blocks.0.hook_resid_pre", "blocks.2.hook_resid_pre", "hook_embed", "blocks.0.hook_resid_post", "blocks.2.hook_resid_post",
    ]  # fmt: skip
    assert "layer 7 was asked for at 'resid_post'" in run("verify", models / "neox", "--match", "resid_post,7").err
    assert "blocks.0.rnn.hook_h" in run("hooks", models / "gru").out, "a formal model's folder"


def test_verify_passes_a_good_model_and_fails_one_with_a_dead_part(run: Any, models: Path) -> None:
    good = run("verify", models / "neox")
    assert good.status == 0
    assert "hook points pass" in good.out
    assert "1 of 1 hook points pass" in run("verify", models / "neox", "--match", "embed").out
    bad = run("verify", models / "dead", "--json")
    assert bad.status == 1
    content = json.loads(bad.out)
    assert not content["ok"]
    silent = [p["name"] for p in content["points"] if not p["ok"]]
    assert "blocks.2.mlp.hook_post" in silent
    assert not any(name.startswith("blocks.1.") for name in silent)
    assert len(run("verify", models / "neox", "--all").out.splitlines()) > len(good.out.splitlines()) + 5


@pytest.mark.parametrize("command", ["hooks", "verify", "profile"])
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("./nowhere", 2, "no folder"),
        ("/nowhere/at/all", 2, "no folder"),
        ("empty", 2, "holds no model"),
        ("someone/no-such-model", 2, "can't load 'someone/no-such-model'"),
        ("", 2, "empty name"),
        ("broken", 2, "model.safetensors"),
    ],
)
def test_models_that_cannot_be_loaded(
    run: Any, command: str, name: str, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_text("not a model")
    found = run(command, name)
    assert found.status == status
    assert says in found.err
    assert "Traceback" not in found.err
    assert not (tmp_path / "runs").exists()


def test_code_that_comes_with_a_model_is_never_run(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}})
    )
    (folder / "mine.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass C: ...\nclass M: ...\n")
    found = run("hooks", folder)
    assert found.status == 2
    assert "trust_remote_code" in found.err
    assert not trace.exists()


# -- profile and report -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles") / "run"
    words = ["profile", str(models / "gru"), "--length", "12", "--out", str(folder), *SMALL_FLAGS]
    assert main(words) == 0
    return folder


def test_profile_writes_results_rows_and_report(profiled: Path, models: Path) -> None:
    found = pl.Profile.load(profiled / "profile.safetensors")
    assert found.task == pl.tasks.Dyck(k=2, max_depth=3, bos=True).config, "the task that training recorded"
    assert list(found.indices) == ["depth"]
    rows = pd.read_parquet(profiled / "rows.parquet")
    assert set(rows["kind"]) == {"behaviour", "probe", "ablation", "filter", "patch", "interchange"}
    assert {"task", "untrained"} <= set(rows["control"].dropna()), "a formal model is compared with an untrained one"
    page = (profiled / "report.html").read_text()
    for text in ("depth", "Readable", "Needed: depth", "Sufficient", "max_depth=3", str(models / "gru")):
        assert text in page


def test_report_makes_the_same_page_again_from_a_moved_folder(run: Any, profiled: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(profiled, moved)
    for name in ("report.html", "rows.parquet"):
        (moved / name).unlink()
    found = run("report", moved)
    assert (found.status, found.out.strip(), found.err) == (0, str(moved / "report.html"), "")
    assert (moved / "report.html").read_bytes() == (profiled / "report.html").read_bytes()
    pd.testing.assert_frame_equal(pd.read_parquet(moved / "rows.parquet"), pd.read_parquet(profiled / "rows.parquet"))
    assert json.loads(run("report", moved, "--json").out)["rows"] == str(moved / "rows.parquet")


def test_profile_of_a_transformers_model_as_json(run: Any, models: Path, tmp_path: Path) -> None:
    words = ["--task", "S3", "--task-set", "generators=transpositions", "--labels", "state", "--length", "10"]
    found = run("profile", models / "neox", *words, *SMALL_FLAGS, "--out", tmp_path / "p", "--json")
    assert found.status == 0, found.err
    content = json.loads(found.out)
    assert content["labels"]["state"]["verdict"] == "not learned"
    assert 0 <= content["labels"]["state"]["accuracy"] <= 1
    saved = pl.Profile.load(content["profile"])
    assert saved.task["generators"] == "transpositions"


def test_a_model_of_one_block_has_a_profile_without_layers(run: Any, tmp_path: Path) -> None:
    task = pl.tasks.Dyck(max_depth=3)
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8, hidden_size=8)
    pl.models.save(pl.models.build(config), tmp_path / "m" / "model.safetensors")
    words = ["--task", "dyck", "--task-set", "max_depth=3", "--length", "10", *SMALL_FLAGS]
    found = run("profile", tmp_path / "m", *words, "--out", tmp_path / "p")
    assert found.status == 0, found.err
    assert "depth: not learned" in found.out
    index = pl.Profile.load(tmp_path / "p" / "profile.safetensors").indices["depth"]
    assert index.accuracy.shape == (2,)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["neox"], ["doesn't say what it was trained on", "--task parity"]),
        (["neox", "--task", "dick"], ["'dick'", "dyck"]),
        (["neox", "--task", "dyck", "--task-set", "max_dept=3"], ["'max_dept'", "Nearest: max_depth"]),
        (["neox", "--task", "dyck", "--task-set", "max_depth=x"], ["max_depth='x'", "integer"]),
        (["neox", "--task", "dyck", "--task-set", "target=dpth"], ["dpth", "depth"]),
        (["neox", "--task", "dyck", "--labels", "dpth"], ["dpth", "depth"]),
        (["neox", "--task", "S5"], ["doesn't fit", "120", "23"]),
        (["gru", "--task", "S4"], ["doesn't fit", "24"]),
        (["neox", "--task", "parity", "--length", "100"], ["100", "64 positions"]),
        (["neox", "--task", "parity", "--length", "0"], ["length"]),
        (["neox", "--task", "parity", "--set", "n_probe=0"], ["probe"]),
    ],
    ids=lambda value: " ".join(value) if len(value) and value[0] in ("neox", "gru") else None,
)
def test_profiles_that_cannot_be_made(
    run: Any, models: Path, tmp_path: Path, words: list[str], says: list[str]
) -> None:
    found = run("profile", models / words[0], *words[1:], "--out", tmp_path / "p")
    assert found.status == 2, found.err
    for text in says:
        assert text in found.err
    assert not (tmp_path / "p" / "report.html").exists()


def test_profile_leaves_other_folders_alone(run: Any, models: Path, tmp_path: Path) -> None:
    RunRecord("quickstart", {}).save(tmp_path / "other")
    (tmp_path / "file").write_text("x")
    for name in ("other", "file", "file/below"):
        found = run("profile", models / "gru", "--length", "12", *SMALL_FLAGS, "--out", tmp_path / name)
        assert found.status == 2
        assert str(tmp_path / "file") in found.err or "another recipe" in found.err
    assert RunRecord.load(tmp_path / "other").recipe == "quickstart"
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["run.json"]


def test_a_profile_is_not_written_over_by_that_of_another_model_or_with_other_settings(
    run: Any, profiled: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "p", tmp_path / "other"
    shutil.copytree(profiled, folder)
    shutil.copytree(models / "gru", other)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr("probelens.profiling.profile", lambda *a, **k: pytest.fail("measured before it was refused"))
    state = load_file(other / "model.safetensors")
    with safe_open(other / "model.safetensors", "pt") as file:
        header = {key: value for key, value in file.metadata().items() if key != "probelens.crc32"}
    save_file({key: value + 1e-3 for key, value in state.items()}, other / "model.safetensors", metadata=header)
    shutil.copytree(models / "gru", tmp_path / "kept")
    shutil.rmtree(models / "gru")
    shutil.copytree(other, models / "gru")  # other weights under the same name
    try:
        found = run("profile", models / "gru", "--length", "12", "--out", folder, *SMALL_FLAGS)
    finally:
        shutil.rmtree(models / "gru")
        shutil.copytree(tmp_path / "kept", models / "gru")
    assert (found.status, "weights=" in found.err, "--out FOLDER" in found.err) == (2, True, True), found.err
    found = run("profile", models / "gru", "--length", "11", "--out", folder, *SMALL_FLAGS)
    assert (found.status, "length=12 there, 11 now" in found.err) == (2, True), found.err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    def interrupted(*a: Any, **k: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("probelens.profiling.profile", interrupted)
    found = run("profile", models / "gru", "--length", "12", "--out", folder, *SMALL_FLAGS)
    assert found.status == 130, "the control: the same profile is measured again"
    kept = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert all(kept[name] == before[name] for name in ("profile.safetensors", "rows.parquet", "report.html"))
    assert run("profile", models / "gru", "--length", "9", "--out", tmp_path / "new", *SMALL_FLAGS).status == 130
    assert run("profile", models / "gru", "--length", "8", "--out", tmp_path / "new", *SMALL_FLAGS).status == 130, (
        "nothing was finished there, so there is nothing to keep"
    )
    with FileLock(folder / "run.lock"):
        for words in (["report", folder], ["profile", models / "gru", "--length", "12", "--out", folder, *SMALL_FLAGS]):
            found = run(*words)
            assert found.status == 2
            assert "is being written by another run" in found.err


def test_the_default_folder_of_a_profile_stays_below_runs(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    went = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("probelens.cli.main._load", lambda name: None)
    monkeypatch.setattr(_profile_run, "task_for", lambda *a: SimpleNamespace(name="../../up"))

    def stop(model: Any, task: Any, folder: Path, *a: Any, **kw: Any) -> None:
        went.append(folder)
        raise pl.InputError("stop")

    monkeypatch.setattr(_profile_run, "profile_model", stop)
    for name in ("a/..", "..", "/", "x/\n", "~/m"):
        run("profile", name)
    assert all(folder.resolve().parent == (tmp_path / "runs").resolve() for folder in went)
    assert len(went) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no run.json"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"recipe": 3, "config": {}, "cells": [], "versions": {}}', "not the record"),
        ('{"recipe": "profile", "config": [], "cells": [], "versions": {}}', "not the record"),
        ('{"recipe": "profile", "config": {}, "cells": [], "versions": {}}', "not finished"),
        ('{"recipe": "os", "config": {}, "cells": [], "versions": {}}', "'os'"),
        ('{"recipe": "../../x", "config": {}, "cells": [], "versions": {}}', "recipe"),
        ('{"recipe": "quickstart", "config": {"sed": 1}, "cells": [], "versions": {}}', "'sed'"),
        ('{"recipe": "quickstart", "config": {"seed": "rm"}, "cells": [], "versions": {}}', "seed='rm'"),
        ('{"recipe": "quickstart", "config": {}, "cells": ["../../etc"], "versions": {}}', "key"),
        ('{"recipe": "quickstart", "config": {}, "cells": [], "versions": {}}', "no model"),
    ],
)
def test_report_of_a_folder_that_is_no_run(run: Any, tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    found = run("report", tmp_path)
    assert found.status in (1, 2)
    assert says in found.err
    assert "Traceback" not in found.err
    assert {p.name for p in tmp_path.iterdir()} - {"run.lock"} == (set() if text is None else {"run.json"})


def test_a_run_folder_cannot_send_its_report_elsewhere(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    fake_recipe(monkeypatch, lambda *a, **k: None, lambda config, record: seen.append(config))
    RunRecord("fake", {"out": "/etc", "seed": 4}).save(tmp_path)
    assert run("report", tmp_path).status == 0
    assert [(config.out, config.seed) for config in seen] == [(str(tmp_path), 4)]


# -- settings ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Several:
    seed: int = 0
    rate: float = 0.5
    name: str = "x"
    flag: bool = False
    many: tuple[int, ...] = ()
    perhaps: int | None = None


def test_settings_are_read_by_their_type() -> None:
    words = ["seed=3", "rate=1e-3", "name=a=b", "flag=yes", "many=1, 2,3", "perhaps=none"]
    assert configure(Several, words, {}) == Several(3, 1e-3, "a=b", True, (1, 2, 3), None)
    assert configure(Several, ["perhaps=4"], {"p": {"seed": 9}}, "p") == Several(9, perhaps=4)
    for word in ("seed=1.5", "rate=fast", "flag=maybe", "many=1,x", "perhaps=x", "seed=", "__class__=1"):
        with pytest.raises(pl.InputError):
            configure(Several, [word], {})


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.sampled_from(["", "seed", "rate", "name", "flag", "many", "perhaps"]))
def test_any_text_as_a_setting_is_read_or_refused(text: str, key: str) -> None:
    for read in (lambda w: configure(Several, [w], {}), lambda w: arguments(pl.tasks.Dyck, [w])):
        with contextlib.suppress(pl.InputError):
            read(f"{key}={text}" if key else text)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.booleans(),
    st.lists(st.integers()),
    st.none() | st.integers(),
)
def test_a_saved_config_comes_back(
    seed: int, rate: float, name: str, flag: bool, many: list[int], perhaps: int | None
) -> None:
    config = Several(seed, rate, name, flag, tuple(many), perhaps)
    assert restore(Several, json.loads(json.dumps(dataclasses.asdict(config)))) == config


# -- in a process of its own ------------------------------------------------------------------------


def started(code: str, *words: object, cwd: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], cwd=cwd, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        # A shell starts what runs in its background deaf to Ctrl-C, and the tests may run there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


CLI = "import sys; from probelens.cli.main import main; sys.exit(main())"


def test_the_process_is_quiet_off_a_terminal_and_ends_with_the_status(models: Path, tmp_path: Path) -> None:
    process = started(CLI, "hooks", models / "neox", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"blocks.2.hook_resid_post" in out
    assert err == b"", "no progress bars and no warnings where nobody looks"


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("to", ["the group", "the parent"])
def test_signals_end_the_whole_grid_without_a_traceback(
    tmp_path: Path, sent: signal.Signals, status: int, to: str
) -> None:
    # Two cells in processes of their own, both at work when Ctrl-C comes.
    recipe = (
        "import sys, types, dataclasses, pathlib\n"
        f"sys.path.insert(0, {str(Path(grid_cells.__file__).parent)!r})\n"
        "from grid_cells import square\n"
        "from probelens.experiments import Store, run_grid\n"
        "@dataclasses.dataclass\n"
        "class Config:\n    out: str = 'run'\n"
        "def run(config, progress):\n"
        "    run_grid(square, [{'x': i, 'sleep': 100} for i in range(4)], Store(config.out), workers=2)\n"
        "    return pathlib.Path(config.out)\n"
        "sys.modules['slow'] = types.SimpleNamespace(Config=Config, PRESETS={}, run=run, __doc__='Slow.')\n"
        "from probelens.examples import RECIPES\nRECIPES['slow'] = 'slow'\n"
    )
    process = started(recipe + CLI, "run", "slow", cwd=tmp_path)
    log, deadline = tmp_path / "run" / "log.txt", time.monotonic() + 90
    log.parent.mkdir()
    while (not log.exists() or len(log.read_text().split()) < 2) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (os.killpg if to == "the group" else os.kill)(process.pid, sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err.decode()
    assert (b"interrupted" if sent == signal.SIGINT else b"terminated") in err
    assert b"Traceback" not in err
    assert b"leaked" not in err, "nothing of multiprocessing's is left"
    assert out == b""
    assert len(log.read_text().split()) == 2, "no further cell was started"


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [
        ("quickstart", "n_probe=1"), ("quickstart", "steps=-1"), ("quickstart", "controls=-2"), ("paper-formal", "lengths=40,0"),
        ("paper-pretrain", "vocab=0"), ("paper-pretrained", "batch_size=0"), ("paper-code-depth", "n=0"),
    ],
)  # fmt: skip
def test_a_setting_that_no_run_could_use_is_refused_before_the_folder_is_taken(
    recipe: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe, "--preset", "smoke", "--set", setting, "--out", str(tmp_path / "run")]) == 2
    assert re.search(r"must be at least \d+", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_help_and_the_list_of_recipes_load_no_torch() -> None:
    code = (
        "import sys; from probelens.cli.main import main\n"
        "for words in (['--help'], ['report', '--help'], ['run', '--help'], ['hooks', '--help'], ['list'], ['bench', '--list']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'pandas', 'sklearn'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]"

"""Executors by name: cells in real processes of Dask and submitit, killed ones among them, and none of them lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grid_cells
import pandas as pd
import pytest
from grid_cells import mortal, square, trained

import probelens as pl
from probelens.cli.main import main
from probelens.experiments import Store, run_grid
from probelens.experiments.settings import named
from probelens.running import executors
from probelens.running.executors import Dask, Local, Submitit, using

HERE = Path(grid_cells.__file__).parent
CELLS: list[dict[str, Any]] = [{"x": 1}, {"x": 2, "fail": True}, {"x": 3, "deaths": 1}, {"x": 4}]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that submitit and Dask start find the cells by PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))


def ran(folder: Path) -> list[int]:
    return sorted(int(line) for line in (folder / "log.txt").read_text().split())


def check(store: Store, report: Any) -> None:
    """CELLS came out as they must: every cell complete with its own rows, or reported with the reason."""
    bad = report.keys[1]
    assert list(report.failed) == [bad]
    assert "ValueError: cell 2 fails on purpose" in report.failed[bad]
    assert report.failed[bad] == (store.cell(bad) / "error.txt").read_text()
    assert sorted(report.ran) == sorted(key for key in report.keys if key != bad)
    assert store.keys() == sorted(report.ran)
    table = store.all_rows()
    assert sorted(table["y"]) == [1, 1, 9, 9, 16, 16]
    # Dask may lose what a worker said of cell 2 with the worker, and asks for it again.
    assert [x for x in ran(store.folder) if x != 2] == [1, 3, 4], "each ran to its end once, the killed one too"
    assert (store.cell(report.keys[2]) / "deaths.txt").read_text() == "x"


# -- real processes -----------------------------------------------------------------------------------


def test_local_processes_run_a_killed_cell_again_and_report_one_that_always_dies(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    always = {"x": 5, "deaths": 99}
    report = run_grid(mortal, [*CELLS, always], store, executor="local", workers=2)
    key = report.keys.pop()
    said = report.failed.pop(key)
    assert "died 3 times" in said
    assert "more memory than there is" in said
    assert (store.cell(key) / "deaths.txt").read_text() == "xxx"
    assert (store.cell(key) / "error.txt").read_text() == said
    check(store, report)


def test_a_training_in_a_killed_cell_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    report = run_grid(trained, [{"killed_at": 10}, {}], store, workers=2)
    assert not report.failed
    killed, whole = (store.rows(key).iloc[0] for key in report.keys)
    assert (killed.pop("first_step"), whole.pop("first_step")) == (9, 1), "steps 9 and 10 were lost, 1 to 8 were not"
    pd.testing.assert_series_equal(killed, whole, check_exact=True, check_names=False)


def test_a_dask_cluster_of_our_own_runs_the_grid(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    with using("dask"):
        report = run_grid(mortal, CELLS, store, workers=2)
    check(store, report)


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[str]:
    """A scheduler and a worker started by Dask's own commands, in a folder of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    dask = [sys.executable, "-m", "dask"]
    scheduler = [
        *dask,
        "scheduler",
        "--host",
        address.rpartition(":")[0],
        "--port",
        address.rpartition(":")[2],
        "--no-dashboard",
    ]
    worker = [*dask, "worker", address, "--nthreads", "1", "--no-dashboard"]
    with (tmp_path / "log").open("w") as log:
        started = [subprocess.Popen(command, cwd=elsewhere, stdout=log, stderr=log) for command in (scheduler, worker)]
    yield address
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(30)


def test_workers_of_a_running_dask_scheduler_write_into_the_run_folder(
    tmp_path: Path, dask_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("run")  # relative: the workers were started in another folder
    report = run_grid(mortal, CELLS, store, executor=Dask(dask_cluster))
    check(store, report)
    again = run_grid(mortal, [CELLS[0], CELLS[2], CELLS[3], {"x": 6}], store, executor=Dask(dask_cluster))
    assert again.found == [report.keys[i] for i in (0, 2, 3)]
    assert [x for x in ran(store.folder) if x != 2] == [1, 3, 4, 6], "what was complete did not run again"


def test_submitit_jobs_run_the_grid(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    report = run_grid(mortal, CELLS, store, executor=Submitit(cluster="local", time=5), workers=2)
    check(store, report)
    logs = [p.name for p in (store.folder / "slurm").rglob("*_log.err")]
    assert len(logs) == 5, "four cells, one of them twice"
    assert store.keys() == sorted(report.ran), "logs in the run folder are no cells"


# -- what is said when it doesn't work ----------------------------------------------------------------


def test_rows_written_where_nobody_sees_them_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(executors.concurrent.futures.Executor):
        def submit(self, fn: Any, /, run_cell: Any, config: Any, folder: Path, *args: Any) -> Any:  # type: ignore[override]
            future: Any = executors.concurrent.futures.Future()
            future.set_result(fn(run_cell, config, tmp_path / "other", *args))
            return future

    from probelens.experiments import grid

    monkeypatch.setattr(grid, "ARRIVAL", 0.3)
    store = Store(tmp_path / "run")
    report = run_grid(square, [{"x": 1}], store, executor=Elsewhere())
    assert "every worker sees under the same path" in report.failed[report.keys[0]]
    assert report.ran == []
    assert Store(tmp_path / "other").done(report.keys[0]), "it did run"


def test_a_scheduler_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match=re.escape("no Dask scheduler at 'nonsense://x'")):
        run_grid(square, [{"x": 1}], Store(tmp_path), executor=Dask("nonsense://x"))


def test_slurm_where_there_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pl.InputError, match="where `sbatch` works"):
        run_grid(square, [{"x": 1}], Store(tmp_path), executor="submitit")


@pytest.mark.parametrize(("name", "module"), [("dask", "distributed"), ("submitit", "submitit")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pl.MissingDependencyError, match=re.escape(f'pip install "probelens[{name}]"')):
        run_grid(square, [{"x": 1}], Store(tmp_path), executor=name)


def test_names_and_settings_are_checked() -> None:
    assert named("submitit", ["partition=gpu", "time=60", "memory=none"]) == Submitit(partition="gpu", time=60)
    assert named("local") == Local()
    for words, said in (
        (("dusk",), "executor 'dusk' not found. Nearest: dask"),
        (("submitit", ["partitoin=x"]), "Nearest: partition"),
        (("submitit", ["time=soon"]), "time='soon' is not"),
        (("submitit", ["time=0"]), "time=0: it must be at least 1"),
        (("submitit", ["cluster=slrm"]), "Nearest: slurm"),
        (("dask", ["partition=x"]), "setting 'partition' not found"),
        (("local", ["workers=2"]), "setting 'workers' not found"),
    ):
        with pytest.raises(pl.InputError, match=re.escape(said)):
            named(*words)  # type: ignore[arg-type]


def test_using_holds_inside_its_block_only() -> None:
    assert executors.current() == Local()
    seen = []

    def fails() -> None:
        with using(Dask("tcp://a:1")):
            seen.append(executors.current())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [*seen, executors.current()] == [Dask("tcp://a:1"), Local()]


# -- the command line ---------------------------------------------------------------------------------


def test_the_command_line_hands_its_executor_to_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from probelens.examples import quickstart

    seen: list[Any] = []
    monkeypatch.setattr(quickstart, "run", lambda config, progress: seen.append(executors.current()) or tmp_path)
    run = ["run", "quickstart", "--out", str(tmp_path)]
    assert main(run) == 0
    assert main([*run, "--executor", "dask", "--scheduler", "tcp://a:1"]) == 0
    assert main([*run, "--executor", "submitit", "--executor-set", "partition=gpu", "--executor-set", "gpus=1"]) == 0
    assert seen == [Local(), Dask("tcp://a:1"), Submitit(partition="gpu", gpus=1)]
    capsys.readouterr()
    for words, said in (
        (["--executor", "submit"], "Nearest: submitit"),
        (["--scheduler", "tcp://a:1"], "--scheduler belongs to --executor dask"),
        (["--executor-set", "time=3"], "--executor-set belongs to --executor"),
        (["--executor", "submitit", "--executor-set", "tme=3"], "Nearest: time"),
    ):
        assert main([*run, *words]) == 2
        assert said in capsys.readouterr().err
    assert len(seen) == 3

"""Store and grid: a cell is complete or absent, is run once, and one that fails stops no other."""

from __future__ import annotations

import concurrent.futures
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import grid_cells
import pytest
from grid_cells import square

import probelens as pl
from probelens.errors import InputError
from probelens.experiments import RunRecord, Store, cell_key, run_grid

HERE = Path(grid_cells.__file__).parent


def ran(folder: Path) -> list[int]:
    log = folder / "log.txt"
    return sorted(int(line) for line in log.read_text().split()) if log.exists() else []


def test_keys_depend_on_content_alone() -> None:
    assert cell_key({"a": 1, "b": [1, 2]}) == cell_key({"b": [1, 2], "a": 1})
    assert cell_key({"a": 1}) != cell_key({"a": 2})
    assert cell_key({"a": 1}, "1.0") != cell_key({"a": 1}, "1.1")
    code = "from probelens.experiments import cell_key; print(cell_key({'a': 1}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert other.stdout.strip() == cell_key({"a": 1})
    for bad in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(pl.InputError, match="plain data"):
            cell_key(bad)


def test_a_grid_runs_what_is_missing_and_only_that(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    first = run_grid(square, [{"x": 1}, {"x": 2}], store, workers=1)
    assert ran(store.folder) == [1, 2]
    assert first.ran == first.keys
    second = run_grid(square, [{"x": 1}, {"x": 2}, {"x": 3}], store, workers=1)
    assert ran(store.folder) == [1, 2, 3]
    assert second.found == first.keys
    table = store.all_rows(second.keys)
    assert table["y"].tolist() == [1, 1, 4, 4, 9, 9]
    assert table["cell"].nunique() == 3
    assert store.keys() == sorted(second.keys)


@pytest.mark.parametrize("how", ["in this process", "processes", "an executor"])
def test_a_failing_cell_is_reported_and_stops_no_other(tmp_path: Path, how: str) -> None:
    store = Store(tmp_path / "run")
    configs = [{"x": 1}, {"x": 2, "fail": True}, {"x": 3}]
    if how == "an executor":
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            report = run_grid(square, configs, store, executor=pool)
    else:
        report = run_grid(square, configs, store, workers=2 if how == "processes" else 1)
    assert list(report.failed) == [report.keys[1]]
    assert "fails on purpose" in report.failed[report.keys[1]]
    assert sorted(report.ran) == sorted([report.keys[0], report.keys[2]])
    assert not store.done(report.keys[1])


@pytest.mark.slow
def test_killed_at_random_moments_no_row_is_lost_torn_or_doubled(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from grid_cells import square\nfrom probelens.experiments import Store, run_grid\n"
        f"run_grid(square, [{{'x': i, 'sleep': 0.02}} for i in range(60)], Store({str(folder)!r}), workers=1)\n"
    )
    rng = random.Random(0)
    kills, done = 0, 0
    while kills < 8:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        seen = len(ran(folder))
        # Wait until it works, so that the kill lands among the cells and not in the imports.
        deadline = time.monotonic() + 60
        while len(ran(folder)) == seen and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.2))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        store = Store(folder)
        complete = store.keys()
        assert len(complete) >= done
        done = len(complete)
        if complete:
            assert len(store.all_rows()) == 2 * done
    assert kills >= 4
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    store = Store(folder)
    table = store.all_rows()
    assert sorted(table["x"].tolist()) == sorted([*range(60), *range(60)])
    assert table["cell"].nunique() == 60
    # A cell that was killed half-way runs again; one that was complete never does.
    assert len(ran(folder)) <= 60 + kills


def test_damaged_and_foreign_files_are_errors(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    key = run_grid(square, [{"x": 1}], store, workers=1).keys[0]
    path = store.cell(key) / "rows.parquet"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(pl.StoreError, match="can.t read"):
        store.rows(key)
    path.unlink()
    with pytest.raises(pl.StoreError, match="not complete"):
        store.rows(key)
    for bad in ("../../etc", "", "x/y"):
        with pytest.raises(pl.InputError, match="key"):
            store.cell(bad)
    (tmp_path / "file").write_text("x")
    with pytest.raises(pl.StoreError, match="is a file"):
        Store(tmp_path / "file")
    with pytest.raises(pl.InputError, match="empty"):
        Store("")


def test_equal_cells_and_cells_without_rows_are_errors(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    with pytest.raises(pl.InputError, match="same config"):
        run_grid(square, [{"x": 1}, {"x": 1}], store)
    with pytest.raises(pl.InputError, match="at least one row"):
        store.write(cell_key({"x": 1}), {"x": 1}, [])


def test_rows_that_use_a_column_in_two_ways_are_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = cell_key({"seed": 1})
    with pytest.raises(InputError, match="column reached .*two names"):
        store.write(key, {"seed": 1}, [{"reached": True}, {"reached": "chance"}])
    assert not store.done(key)
    assert store.keys() == []


def test_a_run_may_grow_but_not_change(tmp_path: Path) -> None:
    first = RunRecord("r", {"out": "a", "steps": 5, "seeds": (0,)}, ["0"])
    first.start(tmp_path, free=("out", "seeds"))
    grown = RunRecord("r", {"out": "b", "steps": 5, "seeds": (0, 1)}, ["0", "1"])
    grown.start(tmp_path, free=("out", "seeds"))
    assert RunRecord.load(tmp_path).cells == ["0", "1"]
    for other in (RunRecord("r", {"steps": 6, "seeds": (0,)}), RunRecord("s", {"steps": 5})):
        with pytest.raises(InputError, match="holds a run with other settings"):
            other.start(tmp_path, free=("out", "seeds"))
    assert RunRecord.load(tmp_path).cells == ["0", "1"]


@pytest.mark.parametrize("bad", [{"a": 1}, "abc", None, 3, [1, 2]])
def test_a_cell_that_returns_no_rows_has_failed(tmp_path: Path, bad: object) -> None:
    report = run_grid(lambda config, folder: bad, [{"x": 1}], Store(tmp_path / "run"), workers=1)  # type: ignore[arg-type,return-value]
    assert "list of rows" in report.failed[report.keys[0]]
    good = run_grid(lambda config, folder: [{"a": 1}], [{"x": 1}], Store(tmp_path / "run"), workers=1)
    assert not good.failed


def test_a_config_that_is_no_dict_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="a config is a dict"):
        run_grid(square, [3], Store(tmp_path / "run"), workers=1)  # type: ignore[list-item]


@pytest.mark.parametrize("link", ["cells", "cells/KEY"])
@pytest.mark.parametrize("there", [True, False])
def test_a_cell_is_not_written_through_a_link(tmp_path: Path, link: str, there: bool) -> None:
    store, outside = Store(tmp_path / "run"), tmp_path / "outside"
    key = cell_key({"x": 1})
    if there:
        outside.mkdir()
        (outside / "config.json").write_text("mine")
    place = store.folder / link.replace("KEY", key)
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    calls = []
    report = run_grid(lambda *a: calls.append(a) or [{"a": 1}], [{"x": 1}], store, workers=1, code="")  # type: ignore[func-returns-value]
    assert "is a link to" in report.failed[key]
    assert not calls, "nothing ran there either"
    with pytest.raises(pl.StoreError, match="is a link"):
        store.write(key, {"x": 1}, [{"a": 1}])
    assert [p.name for p in outside.iterdir()] == ["config.json"] if there else not outside.exists()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    good = run_grid(square, [{"x": 1}], Store(tmp_path / "linked"), workers=1, code="")
    assert good.ran == [key], "the control: the run folder itself may be a link"

"""A folder of results has one owner: of two runs at once one is refused by name, and a killed one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from grid_cells import square

import probelens as pl
from probelens.experiments import Store, run_grid
from probelens.experiments.owner import owned
from probelens.experiments.recipe import finished_rows

HERE = Path(__file__).resolve().parents[1] / "support"


def until(true: object, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_second_run_is_refused_by_name_until_the_first_ends_or_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from grid_cells import numbered\nfrom probelens.experiments import Store, run_grid\n"
        "if __name__ == '__main__':\n"
        f"    run_grid(numbered, [{{'x': 1}}, {{'x': 2}}], Store({str(folder)!r}), workers=2, executor='local')\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until(lambda: len(list(folder.glob("cells/*/pid"))) == 2)
    cells = [int(path.read_text()) for path in folder.glob("cells/*/pid")]
    with pytest.raises(pl.StoreError, match=f"being written by another run .process {first.pid} on .*, since"):
        run_grid(square, [{"x": 3}], Store(folder), workers=1)
    assert Store(folder).keys() == []
    assert all(map(alive, cells)), "the control"
    first.send_signal(signal.SIGKILL)
    first.wait()
    report = run_grid(square, [{"x": 3}, {"x": 4}], Store(folder), workers=1)
    assert report.ran == report.keys
    assert finished_rows(str(folder), report.keys)["y"].tolist() == [9, 9, 16, 16]
    assert not (folder / "owner.json").exists()
    until(lambda: not any(map(alive, cells)), 20)


def test_of_two_that_start_at_once_one_owns_the_folder(tmp_path: Path) -> None:
    for turn in range(20):
        start, tried = threading.Barrier(2), threading.Barrier(2)
        got: list[bool] = []

        def take(folder: Path, start: threading.Barrier, tried: threading.Barrier, got: list[bool]) -> None:
            start.wait()
            try:
                with owned(folder):
                    got.append(True)
                    tried.wait()
            except pl.StoreError:
                got.append(False)
                tried.wait()

        # On a folder that is new, and on one that was used before.
        folder = tmp_path / str(turn // 2)
        threads = [threading.Thread(target=take, args=(folder, start, tried, got)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(got) == [False, True]


def test_an_owner_has_its_folder_already_and_gives_it_back_after_an_exception(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    def failing() -> None:
        with owned(tmp_path), owned(tmp_path / "link"):
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    with owned(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    os.symlink(secret, run / "run.lock")
    with pytest.raises(pl.StoreError, match="is a link"):
        run_grid(square, [{"x": 1}], Store(run), workers=1)
    assert secret.read_text() == "mine"

"""Ctrl-C at any moment of a run: it ends with status 130 and whole files, and the same command finishes it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_cli import CLI, started

import probelens as pl
from probelens.experiments import RunRecord, Store
from probelens.models.evaluation import EvalResult
from probelens.models.training import TrainResult

MOMENTS = 4
MOMENTS_FROM_THE_START = 2
SIZES = ("archs=gru", "steps=40", "n_probe=20", "n_ablate=4", "n_pairs=2", "controls=1", "workers=1")
WORDS = ["run", "quickstart", "--preset", "smoke", *(w for s in SIZES for w in ("--set", s))]

# Processes that have imported everything, so that the moments fall into the work: a fork for every line.
FORKS = """
import os, signal, sys, time
import pandas, plotly.graph_objects, pyarrow.parquet, safetensors.torch, sklearn.base, torch
import probelens.profiling, probelens.models.training
from probelens.cli.main import main
from probelens.examples import quickstart, quickstart_report
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
words = sys.argv[1:]
print("ready", flush=True)
for line in sys.stdin:
    folder, delay, err = line.split()
    if not (pid := os.fork()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = main([*words, "--out", folder])
        sys.stderr.flush()
        os._exit(status)
    began = time.monotonic()
    while time.monotonic() < began + float(delay):
        time.sleep(0.005)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    else:
        os.kill(pid, signal.SIGINT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, time.monotonic() - began, flush=True)
"""

READERS: dict[str, Callable[[Path], Any]] = {
    "run.json": lambda p: RunRecord.load(p.parent),
    "run.lock": lambda p: None,
    "config.json": lambda p: Store(p.parents[2]).config(p.parent.name),
    "status.json": lambda p: json.loads(p.read_text()),
    "rows.parquet": pd.read_parquet,
    "model.safetensors": pl.models.load,
    "train.safetensors": lambda p: __import__("safetensors.torch").torch.load_file(p),
    "training.safetensors": TrainResult.load,
    "behaviour.safetensors": EvalResult.load,
    "profile.safetensors": pl.Profile.load,
    "report.html": lambda p: p.read_text().rstrip().endswith("</html>") or pytest.fail("torn"),
}


def whole(folder: Path) -> set[str]:
    """The names of a run folder's files, each of which must be read and be one of a finished run's."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    for path in files:
        READERS[path.name](path)
    return {p.name for p in files}


def numbers(folder: Path) -> pd.DataFrame:
    """What was measured, without the time it took."""
    rows = pd.read_parquet(folder / "rows.parquet")
    return rows.drop(columns=[c for c in rows if "seconds" in c])


class Forks:
    """Runs of the same command in forks of one process."""

    def __init__(self, place: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS, *WORDS], env=env, cwd=place, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.err = place / "stderr"
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, folder: Path, delay: float) -> tuple[int, float, str]:
        """Status, seconds and stderr of a run to which SIGINT is sent after ``delay`` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder} {delay} {self.err}\n")
        self.process.stdin.flush()
        status, seconds = self.process.stdout.readline().split()
        return int(status), float(seconds), self.err.read_text()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def check(status: int, err: str, folder: Path) -> None:
    """An interrupted run: how it ended, what it said, what it left."""
    assert status == 130, err
    assert err.strip().splitlines()[-1].startswith("interrupted; what is finished is kept"), err
    assert "Traceback" not in err, err
    if folder.exists():
        assert whole(folder) <= set(READERS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_interrupted_at_random_moments_is_finished_by_the_same_command(tmp_path: Path) -> None:
    rng, folder, alone = random.Random(0), tmp_path / "run", tmp_path / "alone"
    left: set[frozenset[str]] = set()
    forks = Forks(tmp_path)
    try:
        status, seconds, err = forks.run(alone, 600)
        assert status == 0, err
        assert whole(alone) == set(READERS), "the control: an uninterrupted run has every file"
        hits = misses = 0
        while hits < MOMENTS:
            if hits % 2 == 0:
                shutil.rmtree(folder, ignore_errors=True)  # else on top of what the one before left
            # All over the run, the first as it begins; of one that goes on, less is left.
            share = (hits // 2 + rng.random()) / (MOMENTS / 2) * (0.3 if hits % 2 else 0.8) if hits else 0.0
            status, _, err = forks.run(folder, 0.1 + seconds * share)
            if status == 0:
                # Finished before its moment came: the next begins with nothing, so that there is something to interrupt.
                assert numbers(folder).equals(numbers(alone))
                shutil.rmtree(folder)
                misses += 1
                assert misses < 3 * MOMENTS, "nothing was interrupted"
                continue
            check(status, err, folder)
            hits += 1
            left.add(frozenset(whole(folder)))
        status, _, err = forks.run(folder, 600)
        assert status == 0, err
    finally:
        forks.close()
    assert len(left) > 1, "the control: at several stages of the work"
    assert whole(folder) == set(READERS)
    assert numbers(folder).equals(numbers(alone))


@pytest.mark.slow
def test_an_interrupt_while_everything_is_still_being_imported_is_one_too(tmp_path: Path) -> None:
    rng = random.Random(1)
    code = CLI.replace("import main;", "import main; print('in', flush=True);")
    assert code != CLI
    for _ in range(MOMENTS_FROM_THE_START):
        process = started(code, *WORDS, "--out", tmp_path / "run", cwd=tmp_path)
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        time.sleep(rng.uniform(0.1, 2.0))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        check(process.returncode, err.decode(), tmp_path / "run")

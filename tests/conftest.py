"""What every test runs under: one thread a process, no hub, workers only for the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported anywhere: its thread pool is sized once. Workers inherit these.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

# The same examples on every run and machine: a failure in CI is one that anybody can repeat.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")

MAX_WORKERS = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: with one of them last, all workers but one would wait for it."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core for the whole suite; none for named files, where starting workers costs more."""
    named = [arg for arg in config.args if Path(arg.split("::")[0]).is_file()]
    if named or config.getoption("collectonly"):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)

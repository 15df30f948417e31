"""How a row of the table is measured: contenders in turn, medians of CPU and wall time, results compared."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS = "probelens"
TL, NNSIGHT, MAMBAPY = "TransformerLens", "nnsight", "transformers, mambapy"
# Of each peer that probelens doesn't require: its module, and how to install it.
PEERS = {
    TL: ("transformer_lens", 'pip install "probelens[transformer-lens]"'),
    NNSIGHT: ("nnsight", 'pip install "probelens[nnsight]"'),
    MAMBAPY: ("mambapy", "pip install mambapy"),
}


def installed(peer: str) -> bool:
    """Whether this contender can run here."""
    return importlib.util.find_spec(PEERS[peer][0]) is not None


@dataclass
class Work:
    """What one row runs, with everything built that isn't timed.

    A contender does ``share`` of the whole work in one timed run, 1 where not named: its cost for each condition is the
    same, so a sample of conditions stands for all. ``least`` is what no way of doing the work can leave out: operations
    in GFLOP, bytes in GB, and in words what they are.
    """

    runs: dict[str, Callable[[], Any]]  # by contender; probelens is one of them
    compare: Callable[[dict[str, Any]], Mapping[str, float]]  # from results to differences by name
    limits: dict[str, float]  # the largest differences allowed
    share: dict[str, float] = field(default_factory=dict)
    note: str = ""  # what a reader of the table should know
    facts: dict[str, float | str] = field(default_factory=dict)  # numbers about the work, such as how often it skips
    describe: Callable[[dict[str, Any]], Mapping[str, float | str]] = lambda results: {}  # facts out of the results
    least: Callable[[dict[str, Any]], tuple[float, float, str]] | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Its aims are, by contender, the least ratio of its time to ours, or with a minus sign the largest of ours to its own.
    """

    name: str  # for --only
    what: str
    # From a size ("quick", "medium", "full") and a device; "module:function" of this room.
    build: str | Callable[[str, str], Work]
    aims: dict[str, float]
    needs: tuple[str, ...] = ()  # peers without which nothing is left to compare with
    takes: tuple[str, ...] = ()  # peers that build leaves out where they aren't installed

    def missing(self) -> list[str]:
        """What of the row is left out here, and which package to install for it; the whole row where ``needs`` isn't met."""
        left = [(peer, f"{self.name} is left out") for peer in self.needs if not installed(peer)]
        left = left or [(p, f"{self.name} runs without its contender {p!r}") for p in self.takes if not installed(p)]
        return [f"{said}: {PEERS[peer][1]}" for peer, said in left]

    def work(self, size: str, device: str) -> Work:
        """What is run and compared, whose module is loaded now."""
        if not isinstance(self.build, str):
            return self.build(size, device)
        module, _, function = self.build.partition(":")
        found: Work = getattr(importlib.import_module(f"probelens.bench.{module}"), function)(size, device)
        return found

    def runs_here(self) -> bool:
        """Whether every peer that it needs is installed."""
        return all(installed(peer) for peer in self.needs)


def cpu_seconds() -> float:
    """CPU time of this process and of the children that ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def measure(case: Case, size: str, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Run a row: one run of each to warm up and to compare, then ``repeats`` rounds of all in turn."""
    work = case.work(size, device)
    results = {name: run() for name, run in work.runs.items()}
    differences = {key: float(value) for key, value in work.compare(results).items()}
    facts = {**work.facts, **work.describe(results)}
    least = None if work.least is None else work.least(results)
    del results
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work.runs}
    names = list(work.runs)
    for i in range(repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(_time(work.runs[name], device))
    medians = {}
    for name, taken in times.items():
        part = work.share.get(name, 1.0)
        cpu, wall = (statistics.median(t[k] for t in taken) / part for k in (0, 1))
        low, high = (f(t[0] for t in taken) / part for f in (min, max))
        medians[name] = {"cpu": cpu, "wall": wall, "cpu_min": low, "cpu_max": high, "share": part}
    clock = "wall" if device.startswith("cuda") else "cpu"
    ratios = {name: medians[name][clock] / medians[OURS][clock] for name in medians if name != OURS}
    wrong = [k for k, v in differences.items() if not v <= work.limits.get(k, float("inf"))]
    return {
        "case": case.name, "what": case.what, "size": size, "device": device, "repeats": repeats,
        "times": medians, "ratios": ratios, "aims": case.aims, "differences": differences, "limits": work.limits,
        "equal": not wrong, "note": work.note, "facts": facts, "left_out": case.missing(), "machine": machine(),
        "least": None if least is None else {"gflop": least[0], "gbyte": least[1], "what": least[2], **speed(device)},
    }  # fmt: skip


def _time(run: Callable[[], Any], device: str) -> tuple[float, float]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    return cpu_seconds() - cpu, time.perf_counter() - wall


def speed(device: str = "cpu") -> dict[str, float]:
    """What the machine does at best: float32 matrix products in GFLOP/s, and GB/s read by a matrix times a vector."""
    import torch

    square, long = torch.ones(1024, 1024, device=device), torch.ones(16384, 4096, device=device)
    found = {}
    runs = {"gflops": (lambda: square @ square, 2 * 1024**3), "gbytes": (lambda: long @ long[0], 4 * long.numel())}
    for name, (run, amount) in runs.items():
        run()
        clock = 1 if device.startswith("cuda") else 0
        found[name] = amount / 1e9 / min(_time(run, device)[clock] for _ in range(5))
    return found


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    import torch

    versions = {}
    for package in ("torch", "transformers", "transformer-lens", "nnsight", "scikit-learn", "mambapy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "python": platform.python_version(), "versions": versions,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """How far resident memory grows inside the block, in bytes; None where the system doesn't tell."""

    growth: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            # What was freed but is still held would hide what is taken next.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._before = _status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            self.growth = (_status("VmHWM") or 0) - self._before


def _status(key: str) -> int | None:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None


def worst(a: Any, b: Any, relative: bool = True) -> float:
    """Largest absolute difference of two tensors, over the size of the second if relative."""
    a, b = a.detach().float().cpu(), b.detach().float().cpu()
    scale = float(b.abs().max()) if relative else 1.0
    return float((a - b).abs().max()) / (scale or 1.0)

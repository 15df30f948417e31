"""How many threads long work runs on: measured once, since two on a shared machine can take several times as long as one."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from probelens.errors import InputError

__all__ = ["SWITCH", "few_threads", "quickest"]

SWITCH = "PROBELENS_THREADS"
_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ROUNDS = 8
_ENOUGH = 0.3  # seconds of measuring: on a busy machine one round may take as long
_GAIN = 0.9  # of one thread's time, below which more threads are worth it
_VALID = 600.0  # seconds after which a machine may have become busy, or idle
_measured: dict[int, tuple[float, int]] = {}  # by PyTorch's number: when, and what was chosen


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """One thread inside the block where PyTorch's own number of threads is measured to be no faster.

    A number that the user chose stays: by ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``, ``torch.set_num_threads`` with another
    number than PyTorch takes by itself, or ``PROBELENS_THREADS``, which is a number, or "keep" for PyTorch's.
    """
    before = torch.get_num_threads()
    count = _chosen(before, os.environ)
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _chosen(before: int, environ: Mapping[str, str]) -> int:
    given = environ.get(SWITCH, "")
    if given and given != "keep":
        if not given.isdigit() or int(given) < 1:
            raise InputError(f'{SWITCH}={given!r}: give a number of threads, or "keep" for PyTorch\'s')
        return int(given)
    own = {os.cpu_count() or 1, (os.cpu_count() or 1) // 2}
    if hasattr(os, "sched_getaffinity"):
        own |= {len(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)) // 2}
    if given or before == 1 or before not in own or any(environ.get(name) for name in _GIVEN):
        return before
    when, count = _measured.get(before, (-_VALID, before))
    if time.monotonic() - when < _VALID:
        return count
    said = count
    count = quickest(before)
    _measured[before] = time.monotonic(), count
    if count != said:
        sys.stderr.write(
            f"probelens: {count} of {before} threads, as {before} take longer here at the moment ({SWITCH}=keep keeps them)\n"
        )
    return count


def quickest(most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """The faster of one thread and several, by what a small model does.

    Args:
        most: The number of several threads.
        clock: Seconds.

    Returns:
        1, or ``most`` where that takes a tenth less.
    """
    before, began = torch.get_num_threads(), clock()
    taken: dict[int, list[float]] = {1: [], most: []}
    try:
        while len(taken[most]) <= _ROUNDS and (len(taken[most]) < 2 or clock() - began < _ENOUGH):
            for count, times in taken.items():
                torch.set_num_threads(count)
                start = clock()
                _work()
                times.append(clock() - start)
    finally:
        torch.set_num_threads(before)
    # The first round starts the threads. A mean, as it is waiting now and then that makes several threads slow.
    one, several = (statistics.fmean(times[1:]) for times in (taken[1], taken[most]))
    return most if several < _GAIN * one else 1


def _work() -> None:
    """Products and pointwise operations of a size at which threads begin to pay."""
    x = torch.ones(256, 256)
    with torch.no_grad():
        for _ in range(2):
            x = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x @ x, x.shape[1:])).softmax(-1)

"""Executors by name: processes of this machine, a Dask cluster, or SLURM through submitit.

With each of them, a cell whose process dies (killed, out of memory, a lost node) is run again, at most twice, and
then reported. Other cells are not affected.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probelens.errors import InputError, ProbelensError, at_least, require, unknown

__all__ = ["EXECUTORS", "Dask", "Local", "Processes", "Submitit", "current", "opened", "spec_of", "using"]

GRACE = 3.0  # seconds that interrupted processes get to save their state
RETRIES = 2  # how often a cell runs again after its process died
DIED = (
    "the process died {n} times before its part was done: it was killed from outside, or used more memory than there is. "
    "Run the same again: the cell of a grid goes on from its last checkpoint."
)


@dataclass(frozen=True)
class Local:
    """Processes of this machine, each running one cell after another."""


@dataclass(frozen=True)
class Dask:
    """A Dask cluster; its workers must see the run folder under the same path.

    Args:
        scheduler: Address of one that runs, such as "tcp://10.0.0.1:8786"; None starts a scheduler and workers,
            in processes of their own, on this machine.
    """

    scheduler: str | None = None


@dataclass(frozen=True)
class Submitit:
    """SLURM jobs through submitit, one per cell, submitted as arrays; the run folder must be on a shared disk.

    A job that reaches its time limit or is preempted is queued again, and its training continues from the last
    checkpoint.

    Args:
        cluster: "slurm", or "local" for the same jobs as processes of this machine, to try things out.
        partition: SLURM partition.
        account: SLURM account.
        qos: SLURM quality of service.
        constraint: Features that a node must have.
        time: Time limit of a job in minutes.
        cpus: CPUs of a job.
        gpus: GPUs of a job.
        memory: Memory of a job in GB; None for the cluster's default.
        requeues: How often a job that reaches its time limit is queued again.
        logs: Folder of submitit's files; None for ``slurm`` in the run folder.

    Raises:
        InputError: An unknown cluster, or a number below what makes sense.
    """

    cluster: str = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: int = 240
    cpus: int = 1
    gpus: int = 0
    memory: int | None = None
    requeues: int = 10
    logs: str | None = None

    def __post_init__(self) -> None:
        if self.cluster not in ("slurm", "local"):
            raise InputError(unknown("cluster", self.cluster, ("slurm", "local")))
        at_least(self, time=1, cpus=1, gpus=0, memory=1, requeues=0)


Spec = Local | Dask | Submitit
EXECUTORS: dict[str, type[Spec]] = {"local": Local, "dask": Dask, "submitit": Submitit}
"""The executors that have a name, with the class of their settings."""

_current: contextvars.ContextVar[Spec | None] = contextvars.ContextVar("executor", default=None)


def spec_of(name: str) -> Spec:
    """The executor of a name, with its default settings; InputError for another name."""
    if name not in EXECUTORS:
        raise InputError(unknown("executor", name, EXECUTORS))
    return EXECUTORS[name]()


def current() -> Spec:
    """The executor that ``run_grid`` uses when none is given."""
    return _current.get() or Local()


@contextlib.contextmanager
def using(spec: Spec | str) -> Iterator[None]:
    """Use an executor for every grid inside the block, recipes included.

    Args:
        spec: A name, or ``Local()``, ``Dask(...)``, ``Submitit(...)``.

    Yields:
        Nothing.

    Examples:
        >>> with using(Dask("tcp://10.0.0.1:8786")):
        ...     current()
        Dask(scheduler='tcp://10.0.0.1:8786')
    """
    token = _current.set(spec_of(spec) if isinstance(spec, str) else spec)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def opened(
    spec: Spec | concurrent.futures.Executor, folder: Path, workers: int | None, cells: int, *, main: bool = True
) -> Iterator[concurrent.futures.Executor]:
    """A running executor, closed at the end; after an exception its cells are cancelled. One that is given stays open.

    With ``workers`` None it runs one cell per core, on a cluster as many as that allows; ``folder`` is for logs. ``main``
    says whether processes of this machine import the caller's script, as they must where its functions are sent by name.
    """
    if isinstance(spec, concurrent.futures.Executor):
        yield spec
        return
    here = min(workers or os.cpu_count() or 1, cells)
    if isinstance(spec, Dask):
        with _dask(spec, here) as pool:
            yield pool
        return
    if isinstance(spec, Submitit):
        most = (here if spec.cluster == "local" else cells) if workers is None else min(workers, cells)
        jobs: Processes | _Jobs = _Jobs(spec, folder, most)
    else:
        jobs = Processes(here, main)
    try:
        yield jobs
    except BaseException:
        jobs.stop()
        raise
    finally:
        jobs.shutdown(wait=True, cancel_futures=True)


class Processes(concurrent.futures.Executor):
    """Processes of this machine. If one dies, only its own cell fails."""

    def __init__(self, workers: int, main: bool = True) -> None:
        self._main = main
        # Spawned, not forked: a fork of a process that has used torch's threads can hang.
        self._context = multiprocessing.get_context("spawn")
        self._pools: list[concurrent.futures.ProcessPoolExecutor] = []
        self._idle: queue.SimpleQueue[concurrent.futures.ProcessPoolExecutor] = queue.SimpleQueue()
        self._closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="cell")
        with _without_interrupts():
            for _ in range(workers):
                self._idle.put(self._pool())  # starts its process, which inherits that interrupts are ignored

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """As ``concurrent.futures.Executor.submit``."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pool = self._idle.get()
        try:
            for _ in range(1 + RETRIES):
                try:
                    return pool.submit(fn, *args, **kwargs).result()
                except BrokenProcessPool:
                    pool.shutdown(wait=False)
                    self._pools.remove(pool)
                    if self._closed:
                        raise
                    pool = self._pool()
            raise ProbelensError(DIED.format(n=1 + RETRIES))
        finally:
            self._idle.put(pool)

    def _pool(self) -> concurrent.futures.ProcessPoolExecutor:
        pool = concurrent.futures.ProcessPoolExecutor(1, self._context, initializer=_begin)
        with contextlib.nullcontext() if self._main else _no_script():
            pool.submit(int)  # starts its process
        self._pools.append(pool)
        return pool

    def stop(self) -> None:
        """End the processes. A training run saves itself on Ctrl-C, and anything else may stop at any point."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        processes = [p for pool in self._pools for p in (getattr(pool, "_processes", None) or {}).values()]
        end = time.monotonic() + GRACE
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                process.terminate()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ``concurrent.futures.Executor.shutdown``."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._closed = True
        for pool in list(self._pools):
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)


_one_start = threading.Lock()


@contextlib.contextmanager
def _no_script() -> Iterator[None]:
    """Processes started inside don't run the caller's script again, which may lack a guard, or be no file."""
    with _one_start:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


def _begin() -> None:
    """What a cell's process does first: ignore Ctrl-C, which its parent handles, and end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()


def _end_with_parent() -> None:
    # A pool's process would otherwise finish its cell beside the next run's, and then wait for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal inside the block; without effect outside the main thread, where no handler can be set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _without_interrupts() -> contextlib.AbstractContextManager[None]:
    """Ignore Ctrl-C in the processes started inside, which, interrupted during imports, would print a traceback each."""
    return handling(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _dask(spec: Dask, workers: int) -> Iterator[concurrent.futures.Executor]:
    distributed = require("distributed", "dask", 'executor "dask"')
    import dask

    # One cell per worker. The others wait at the scheduler: a worker that dies counts against its own cell only.
    ours = {"distributed.scheduler.allowed-failures": RETRIES, "distributed.scheduler.worker-saturation": 1.0}
    with contextlib.ExitStack() as stack:
        cluster = None
        if spec.scheduler is None:
            stack.enter_context(dask.config.set(ours))
            with _without_interrupts():
                cluster = distributed.LocalCluster(
                    n_workers=workers, threads_per_worker=1, processes=True, memory_limit=None,
                    dashboard_address=None, silence_logs="ERROR",
                )  # fmt: skip
            stack.callback(cluster.close)
        try:
            client = distributed.Client(cluster or spec.scheduler, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as err:
            raise InputError(
                f"no Dask scheduler at {spec.scheduler!r}: {err}. Start one with `dask scheduler`, and workers with "
                "`dask worker ADDRESS`, or leave the address out to have both started here."
            ) from err
        stack.callback(client.close)
        pool = client.get_executor(pure=False)
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False)
            raise


class _Cell:
    """A call that submitit may queue again: at its time limit, or when it was preempted."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    def checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, fn, *args)


@dataclass
class _Submitted:
    future: concurrent.futures.Future[Any]
    call: tuple[Any, ...]
    tries: int = 0
    job: Any = None


class _Jobs(concurrent.futures.Executor):
    """submitit's jobs as futures. A thread submits jobs and checks which are done."""

    def __init__(self, spec: Submitit, folder: Path, most: int) -> None:
        submitit = require("submitit", "submitit", 'executor "submitit"')
        self.spec, self.most = spec, most
        logs = Path(spec.logs) if spec.logs else folder / "slurm"
        limits = {"slurm_max_num_timeout": spec.requeues, "local_max_num_timeout": spec.requeues}
        try:
            self.backend = submitit.AutoExecutor(folder=logs / "%j", cluster=spec.cluster, **limits)
        except RuntimeError as err:
            raise InputError(
                f"cluster={spec.cluster!r} can't be used from this machine: {err}. Run the command where `sbatch` "
                "works, or try cluster=local."
            ) from err
        self.backend.update_parameters(
            name="probelens", timeout_min=spec.time, cpus_per_task=spec.cpus, gpus_per_node=spec.gpus or None,
            mem_gb=spec.memory, slurm_partition=spec.partition, slurm_account=spec.account, slurm_qos=spec.qos,
            slurm_constraint=spec.constraint, slurm_array_parallelism=most,
        )  # fmt: skip
        self._waiting: list[_Submitted] = []
        self._running: list[_Submitted] = []
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="submitit", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """As ``concurrent.futures.Executor.submit``, without keywords."""
        if kwargs or self._closed:
            raise RuntimeError("jobs take no keywords, and none after shutdown")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._waiting.append(_Submitted(future, (fn, *args)))
        return future

    def _watch(self) -> None:
        pause = 0.2 if self.spec.cluster == "local" else 2.0
        while True:
            # The pause comes first, so that a grid's cells are all there and become one array.
            self._wake.wait(pause)
            self._wake.clear()
            with self._lock:
                if self._closed and not self._waiting and not self._running:
                    return
                try:
                    self._submit()
                    for item in [item for item in self._running if item.job.done()]:
                        self._running.remove(item)
                        self._finish(item)
                except Exception as err:
                    # The queue itself fails, such as sbatch refusing the partition: nothing will come.
                    for item in [*self._waiting, *self._running]:
                        item.future.set_exception(err)
                    self._waiting, self._running = [], []

    def _submit(self) -> None:
        free = max(0, self.most - len(self._running))
        batch, self._waiting = self._waiting[:free], self._waiting[free:]
        batch = [item for item in batch if item.tries or item.future.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            with self.backend.batch():
                for item in batch:
                    item.job = self.backend.submit(_Cell(), *item.call)
        except BaseException:
            self._waiting = batch + self._waiting
            raise
        self._running += batch

    def _finish(self, item: _Submitted) -> None:
        import submitit

        # On a shared disk the result may appear some time after the job has ended; here it is there or never.
        here = self.spec.cluster == "local"
        died = here and not item.job.paths.result_pickle.exists()
        error = None if died else item.job.exception()
        if died or isinstance(error, submitit.core.utils.UncompletedJobError):
            item.tries += 1
            cancelled = not here and "CANCELLED" in item.job.state.upper()
            if item.tries <= RETRIES and not cancelled and not self._closed:
                self._waiting.append(item)
                return
            tail = "" if error is None else f"\n{error}"
            error = ProbelensError(f"{DIED.format(n=item.tries)} Logs: {item.job.paths.folder}{tail}")
        if error is not None:
            item.future.set_exception(error)
        else:
            item.future.set_result(item.job.result())

    def stop(self) -> None:
        """Cancel every job."""
        with self._lock:
            self._closed = True
            for item in self._waiting:
                item.future.cancel()
            jobs, self._waiting, self._running = [item.job for item in self._running], [], []
        for job in jobs:
            with contextlib.suppress(Exception):
                job.cancel(check=False)
        end = time.monotonic() + (GRACE if self.spec.cluster == "local" else 0.0)
        while time.monotonic() < end and not all(job.done() for job in jobs):
            time.sleep(0.1)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ``concurrent.futures.Executor.shutdown``."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                for item in self._waiting:
                    item.future.cancel()
                self._waiting = []
        self._wake.set()
        if wait:
            self._thread.join()

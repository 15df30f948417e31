"""``Workers``: one call spread over processes that each load the model themselves.

A primitive with ``executor=`` opens the processes once. What runs many batches or conditions meanwhile, ``collect`` and
sweeps, leaves them to ``spread``, which gives the results back in order. Everything else, statistics among it, stays in
the caller's process, so that it is the same whatever the number of workers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import hashlib
import io
import itertools
import os
import pickle
import pkgutil
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import cloudpickle
import torch

from probelens.errors import InputError, ProbelensError
from probelens.hooks.forwards import hooked_by_hand
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.numerics.tensors import whole_number
from probelens.numerics.threads import few_threads
from probelens.running.executors import Dask, Local, Spec, Submitit, opened, spec_of
from probelens.running.weights import weights_hash

__all__ = ["Executor", "Workers"]

P = ParamSpec("P")
R = TypeVar("R")
Load = str | os.PathLike[str] | Callable[[], HookedModel]


@dataclass(frozen=True)
class Workers:
    """Processes that run a call together, and how each of them makes the model.

    Batches of examples are split, or conditions where there are fewer batches than workers, and put together in order. With
    equal batches and threads the values are those of one process, bit for bit in float32; where conditions are split,
    they may differ by rounding. Each worker compares every weight with the caller's model before it runs. A worker that dies
    is replaced, and runs its part again, at most twice.

    Args:
        load: What makes the model in a worker: a hub id or folder for ``pl.load``, or a function without arguments that
            gives the wrapped model. None for the way in which ``pl.load`` made the caller's.
        executor: "local" for processes of this machine, "dask", "submitit", one of these with its settings
            (`probelens.running.executors`), or any ``concurrent.futures.Executor``.
        workers: Processes at once; None for one per core. On a cluster it must be said.
        threads: torch threads of each worker.

    Raises:
        InputError: Numbers below 1, an unknown executor, or a cluster without a number of workers.

    Examples:
        >>> Workers("EleutherAI/pythia-160m", "local", workers=2)
        Workers(load='EleutherAI/pythia-160m', executor='local', workers=2, threads=1)
    """

    load: Load | None = None
    executor: Spec | concurrent.futures.Executor | str = "local"
    workers: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        whole_number("threads", self.threads)
        if self.workers is not None:
            whole_number("workers", self.workers)
        spec = self.spec
        if isinstance(spec, concurrent.futures.ThreadPoolExecutor):
            raise InputError(
                "executor=: threads share one model, whose hooks would mix. Give an executor of processes."
            )
        if self.workers is None and not self.local:
            raise InputError(
                f"executor={self.executor!r}: how many workers it has isn't known here. Give pl.Workers(..., workers=)"
            )

    @contextlib.contextmanager
    def open(self, model: HookedModel) -> Iterator[None]:
        """Keep the workers over several calls on a model, which then need no ``executor=`` of their own.

        Args:
            model: The wrapped model.

        Yields:
            Nothing.

        Raises:
            InputError: ``load`` is None and the model wasn't made by ``pl.load``, or it has hooks.
        """
        with opened_for(model, self):
            yield

    @property
    def spec(self) -> Spec | concurrent.futures.Executor:
        """The executor with its settings."""
        return spec_of(self.executor) if isinstance(self.executor, str) else self.executor

    @property
    def local(self) -> bool:
        """Whether the workers are started here, on this machine."""
        spec = self.spec
        if isinstance(spec, Dask):
            return spec.scheduler is None
        return isinstance(spec, Local) or (isinstance(spec, Submitit) and spec.cluster == "local")

    @property
    def count(self) -> int:
        """How many processes there are at once."""
        return self.workers or os.cpu_count() or 1


Executor = Workers | Spec | concurrent.futures.Executor | str | None
"""What ``executor=`` takes: None for the caller's process; a name or executor for a model that ``pl.load`` made."""


class Task(Protocol):
    """What is done with each item, on the model; ``inside`` is in place while it is, once for all items."""

    def inside(self, model: HookedModel) -> contextlib.AbstractContextManager[Any]: ...

    def __call__(self, model: HookedModel, item: Any, /) -> Any: ...


_recipes: weakref.WeakKeyDictionary[HookedModel, Callable[[], HookedModel]] = weakref.WeakKeyDictionary()
_open: contextvars.ContextVar[_Pool | None] = contextvars.ContextVar("workers", default=None)


def remember(model: HookedModel, load: Callable[[], HookedModel]) -> HookedModel:
    """Note how a model was made, for workers that must make it again; the model."""
    _recipes[model] = load
    return model


def takes_executor(fn: Callable[Concatenate[HookedModel, P], R]) -> Callable[Concatenate[HookedModel, P], R]:
    """Let a primitive's ``executor=`` open the workers for as long as the call lasts; on few threads where more are slower."""

    @functools.wraps(fn)
    def call(model: HookedModel, *args: P.args, **kw: P.kwargs) -> R:
        executor: Any = kw.pop("executor", None)
        if executor is None:
            with few_threads():
                return fn(model, *args, **kw)
        with opened_for(model, executor):
            return fn(model, *args, **kw)

    return call


@contextlib.contextmanager
def opened_for(model: HookedModel, executor: Workers | Spec | concurrent.futures.Executor | str) -> Iterator[None]:
    """Workers for a model, used by everything that runs it inside."""
    need_wrapped(model)
    if not isinstance(executor, (Workers, str, concurrent.futures.Executor, *Spec.__args__)):
        raise InputError(
            f"executor={executor!r}: it must be None, a name such as 'local', pl.Workers(...), or an executor"
        )
    settings = executor if isinstance(executor, Workers) else Workers(None, executor)
    load = settings.load if settings.load is not None else _recipes.get(model)
    if load is None:
        raise InputError(
            "executor=: workers can't make this model, which pl.load didn't make. Say how: "
            "executor=pl.Workers(load, ...), with a folder, a hub id, or a function that gives the wrapped model."
        )
    path = hooked_by_hand(model.module)
    if model.has_hooks() or path is not None:
        where = "the model has hooks of add_hook() or hooks()" if path is None else f"{path!r} has a PyTorch hook"
        raise InputError(
            f"executor=: {where}, which workers would not have. Remove it (model.reset_hooks(), handle.remove()), or run "
            "without executor."
        )
    with (
        tempfile.TemporaryDirectory(prefix="probelens-") as logs,
        opened(settings.spec, _logs(settings.spec, logs), settings.count, settings.count, main=False) as running,
    ):
        token = _open.set(_Pool(model, load, settings, running))
        try:
            yield
        finally:
            _open.reset(token)


def workers_here(model: HookedModel) -> int:
    """How many workers run what is spread now; 0 for the caller's process."""
    pool = _open.get()
    # Hooks that a primitive has set meanwhile are in the caller's process alone.
    return pool.settings.count if pool is not None and pool.model is model and not model.has_hooks() else 0


def share_memory(model: HookedModel) -> bool:
    """Whether what is spread now runs in workers of this machine, which share its memory."""
    pool = _open.get()
    return pool is not None and pool.settings.local and workers_here(model) > 0


@contextlib.contextmanager
def spread(model: HookedModel, task: Task, items: Sequence[Any]) -> Iterator[Iterator[Any]]:
    """What a task gives for each item, in order: from the workers that are open, or from here one by one."""
    pool = _open.get()
    if pool is None or not workers_here(model):
        with task.inside(model):
            yield (task(model, item) for item in items)
        return
    with pool.spread(task, items) as found:
        yield found


class _Pool:
    """Open workers, and the model that they have copies of."""

    def __init__(self, model: HookedModel, load: Load, settings: Workers, running: concurrent.futures.Executor) -> None:
        self.model, self.settings, self.running = model, settings, running
        with _sendable():
            self.recipe = cloudpickle.dumps((load, settings.threads, _identity(model)))

    @contextlib.contextmanager
    def spread(self, task: Task, items: Sequence[Any]) -> Iterator[Iterator[Any]]:
        packed = _packed(self.model, task)
        # A SLURM job begins with loading the model, so there are no more of them than workers.
        share = -(-len(items) // self.settings.count) if isinstance(self.settings.spec, Submitit) else 1
        groups = [items[i : i + share] for i in range(0, len(items), share)]
        futures = [self.running.submit(_serve, self.recipe, packed, pickle.dumps(group)) for group in groups]
        try:
            yield itertools.chain.from_iterable(map(_result, futures))
        finally:
            for future in futures:
                future.cancel()


def _result(future: concurrent.futures.Future[bytes]) -> Any:
    found, error, where = pickle.loads(future.result())
    if error is not None:
        error.add_note(f"in a worker:\n{where}")
        raise error
    return found


def _logs(spec: Any, temporary: str) -> Path:
    """Where submitit keeps what it sends: on a disk that the cluster shares."""
    return Path() if isinstance(spec, Submitit) and spec.cluster != "local" else Path(temporary)


def _identity(model: HookedModel) -> tuple[str, str]:
    """What a worker's copy must have in common: adapter, hook points and every weight."""
    points = hashlib.sha256("\n".join(sorted(model.hook_dict)).encode()).hexdigest()
    return f"{type(model.adapter).__name__} {points}", weights_hash(model)


# -- what is sent -------------------------------------------------------------------------------------


def _parts(model: HookedModel) -> dict[tuple[str, str], Any]:
    """The parts of a model that a task may hold, by name: each worker puts its own in their place."""
    return {
        ("model", ""): model,
        ("adapter", ""): model.adapter,
        **{("parameter", name): one for name, one in model.module.named_parameters()},
        **{("module", name): one for name, one in model.module.named_modules()},
        **{("point", name): model.point(name) for name in model.hook_dict},
    }


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, model: HookedModel) -> None:
        super().__init__(file)
        self.names = {id(one): name for name, one in _parts(model).items()}

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return self.names.get(id(obj))


def _packed(model: HookedModel, task: Task) -> bytes:
    out = io.BytesIO()
    with _sendable():
        _Pickler(out, model).dump(task)
    return out.getvalue()


@contextlib.contextmanager
def _sendable() -> Iterator[None]:
    """Say in our words what can't be sent."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as err:
        raise InputError(
            f"executor=: something of this call can't be sent to another process: {err}. Metrics and factories must not "
            "hold locks, open files or generators."
        ) from err


# -- in the worker ------------------------------------------------------------------------------------

_one_at_a_time = threading.Lock()
_held: dict[str, Any] = {}


def _serve(recipe: bytes, packed: bytes, items: bytes) -> bytes:
    """In a worker: the results of some items, or the exception and its traceback."""
    with _one_at_a_time:
        try:
            if _held.get("recipe") != recipe:
                _held.clear()
                _held.update(model=_made(recipe), recipe=recipe)
            model = _held["model"]
            if _held.get("packed") != packed:
                _held.update(task=_unpacked(model, packed), packed=packed)
            task = _held["task"]
            with task.inside(model):
                found = [task(model, item) for item in pickle.loads(items)]
            return pickle.dumps((found, None, ""))
        except Exception as err:
            said = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(err))
            except Exception:
                err = ProbelensError(f"{type(err).__name__}: {err}")
            return pickle.dumps((None, err, said))


def _made(recipe: bytes) -> HookedModel:
    load, threads, identity = pickle.loads(recipe)
    torch.set_num_threads(threads)
    if isinstance(load, (str, os.PathLike)):
        load = functools.partial(pkgutil.resolve_name("probelens:load"), load)
    model = load()
    if not isinstance(model, HookedModel):
        raise InputError(f"pl.Workers: load gives a {type(model).__name__}; it must give a wrapped model, pl.wrap(...)")
    kind, weights = _identity(model)
    if (kind, weights) != identity:
        other = "other weights" if kind == identity[0] else "other hook points"
        raise InputError(
            f"pl.Workers: the model that load makes in a worker has {other} than the caller's. Save the model and give its "
            "folder, or set the seed in load."
        )
    return model


def _unpacked(model: HookedModel, packed: bytes) -> Task:
    parts = _parts(model)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: tuple[str, str]) -> Any:
            return parts[pid]

    task: Task = Unpickler(io.BytesIO(packed)).load()
    return task

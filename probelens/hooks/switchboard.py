"""Switchboard: calls hooks at hook points, counts the calls and removes the hooks.

It registers PyTorch hooks on the user's modules only while hooks are in place at a point.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from probelens.hooks.passes.at import At
from probelens.hooks.passes.current import Passes
from probelens.hooks.passes.eager import eager, hold, release
from probelens.hooks.passes.entry import Entry
from probelens.hooks.passes.scope import Scope
from probelens.hooks.passes.turned import Layout, called_again
from probelens.hooks.points import HookPoint

__all__ = ["Reach", "Switchboard", "Tap"]


class Tap:
    """What an instrumented forward calls at each interior point.

    Args:
        switchboard: The switchboard that holds the hooks.
        names: From the forward's own short names to canonical names.
        path: Of the module.
    """

    def __init__(self, switchboard: Switchboard, names: Mapping[str, str], path: str = "") -> None:
        self._switchboard = switchboard
        self._names = names
        self._path = path

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        """Offer a tensor (batch, pos, ...), or (batch, ...) at step ``pos``; returns what the hooks made of it."""
        return self._offer(name, tensor, pos, length)

    def offer_last_use(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        """Offer a tensor that the forward doesn't use again: a recorder alone at the point keeps it as it is.

        Args:
            name: Short name of the point.
            tensor: (batch, pos, ...)
            pos, length: As for ``Switchboard.fire``.

        Returns:
            The tensor, or what the hooks made of it, of the same shape.
        """
        return self._offer(name, tensor, pos, length, last_use=True)

    def _offer(self, name: str, tensor: Tensor, pos: int | None, length: int | None, last_use: bool = False) -> Tensor:
        full = self._names.get(name)
        if full is None or full not in self._switchboard.entries:
            return tensor
        return self._switchboard.fire(full, tensor, pos, length, last_use)

    def batch(self) -> int | None:
        """How many examples the running forward pass has; None where nothing says it."""
        now = self._switchboard.passes.now()
        return None if now is None else now.batch

    def offset(self) -> int | None:
        """How many positions came before those of the running forward pass; None where nothing says it."""
        now = self._switchboard.passes.now()
        return None if now is None else now.offset

    def wants(self, name: str) -> bool:
        """Whether this caller has a hook at the point.

        Args:
            name: Short name of the point.

        Returns:
            True if the tensor must be offered.
        """
        return bool(self._switchboard.listeners(self._names.get(name)))

    def here(self) -> bool:
        """Whether the module runs the forward with this tap in calls of this caller: others get their own forward."""
        board = self._switchboard
        entries = (entry for name in self._names.values() for entry in board.entries.get(name, ()))
        return any(entry.here() for entry in entries) or any(s.here() for s in board.asked.get(self._path, ()))

    def edits(self, name: str) -> bool:
        """Whether a hook may change the tensor, rather than only read it.

        Args:
            name: Short name of the point.

        Returns:
            False also without any hook.
        """
        return any(not e.reads for e in self._switchboard.listeners(self._names.get(name)))

    def positions(self, name: str, length: int | None = None) -> list[int] | None:
        """Steps at which a state point must be offered one by one: None for every step.

        A hook that reads beside one that edits needs every step, as edited.

        Args:
            name: Short name of the state point.
            length: How many steps there are, to count negative positions from the end.

        Returns:
            Positions in order; None for every step.
        """
        found: set[int] = set()
        for entry in self._switchboard.listeners(self._names.get(name)):
            if not isinstance(entry.fn, At):
                return None
            now, begin = self._switchboard.passes.now(), self._switchboard.begun(self._names[name])
            hook = entry.point if now is None else now.at(entry.point)
            where = entry.fn.resolve(None if length is None else length + begin, hook.real)
            found.update(p - begin for p in where if p >= begin)
        return sorted(p for p in found if length is None or p < length)


class Reach(Protocol):
    """What the switchboard asks of an adapter: how to reach the hook points in a module."""

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        """Make the model call ``switchboard.fire`` at a boundary point; handles that undo it."""

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        """Run the instrumented forward of a module while the context lasts."""

    def tap_names(self, path: str) -> dict[str, str]:
        """Canonical names by the short names of an instrumented forward."""


class Switchboard:
    """Calls hooks at the points of one module, and keeps PyTorch hooks only where one is in place.

    Args:
        root: The wrapped module.
        reach: Knows how to reach the points, and the instrumented forwards.
    """

    def __init__(self, root: nn.Module, reach: Reach) -> None:
        self.root = root
        self._reach = reach
        self.entries: dict[str, list[Entry]] = {}
        # Those of ``add_hook``, until ``reset_hooks``.
        self.staying: list[Entry] = []
        self._handles: dict[str, list[Any]] = {}
        self._instruments: dict[str, tuple[int, contextlib.AbstractContextManager[None]]] = {}
        # By module path, the blocks in which its instrumented forward runs without hooks.
        self.asked: dict[str, tuple[Scope, ...]] = {}
        self._lock = threading.RLock()
        self._muted: set[int] = set()
        self.passes = Passes(root)
        self.passes.heard = self.heard
        # Where examples and positions are, by hook point, for points whose adapter doesn't know it.
        self.layouts: dict[str, Layout] = {}

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Call no hook in this thread: for a run that only looks at how the model is built."""
        thread = threading.get_ident()
        nested = thread in self._muted
        self._muted.add(thread)
        try:
            yield
        finally:
            if not nested:
                self._muted.discard(thread)

    def in_use(self) -> bool:
        """Whether the module carries hooks or forwards of this switchboard, of whatever thread."""
        return bool(self.entries or self._instruments)

    def heard(self) -> bool:
        """Whether this caller's runs reach any hook."""
        return any(e.here() for each in list(self.entries.values()) for e in each)

    def listeners(self, name: str | None) -> list[Entry]:
        """The entries at a point that this caller's runs reach.

        Args:
            name: Canonical name; None for a point that the model doesn't advertise.

        Returns:
            Entries in the order in which they were added.
        """
        if name is None or threading.get_ident() in self._muted:
            return []
        return [e for e in self.entries.get(name, ()) if e.here()]

    def fire(
        self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None, last_use: bool = False,
        call: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Call every hook at a point, in the order in which they were added.

        Args:
            name: Canonical name of the point.
            tensor: The activation, in the point's axes. (batch, pos, ...), or (batch, ...) of one step
            pos: Which step it is, at a state point.
            length: How many steps there are.
            last_use: Whether the model doesn't use the tensor again.
            call: How many calls at a boundary point came before this one in the pass; None at an interior point.

        Returns:
            What the model goes on with, of the same shape.
        """
        listeners = self.listeners(name)
        if not listeners:
            return tensor
        now, layout = self.passes.now(), self.layouts.get(name)
        steps = layout is not None and layout.steps
        module = listeners[0].point.module
        if now is not None and now.finished.get(module) and listeners[0].point.kind == "interior" and not steps:
            raise called_again(name)
        if steps and pos is None and (axis := listeners[0].point.pos_axis) < tensor.ndim and tensor.shape[axis] == 1:
            return self.fire(name, tensor.squeeze(axis), 0, 1, last_use, call).unsqueeze(axis)
        begin = self.begun(name, call) if pos is not None else 0
        for entry in listeners:
            hook = entry.point if now is None else now.at(entry.point)
            if pos is not None:
                whole = None if length is None else now.total() if steps and now is not None else length + begin
                hook = hook.at(pos + begin, whole)
            tensor = entry.forward(tensor, hook, last_use and len(listeners) == 1)
        return tensor

    def begun(self, name: str, call: int | None = None) -> int:
        """How many positions of the sequence came before the tensor that the module of a point is called with.

        Args:
            name: Canonical name of the point.
            call: As for ``fire``.

        Returns:
            Those in a cache, and those of earlier steps of a loop.
        """
        now, layout = self.passes.now(), self.layouts.get(name)
        if now is None or name not in self.entries:
            return 0
        if call is not None:
            return (now.offset or 0) + call
        # A forward with taps counts from its own cache on.
        steps = layout is not None and layout.steps
        return now.finished.get(self.entries[name][0].point.module, 0) if steps else 0

    def listeners_muted(self) -> bool:
        """Whether this thread's runs call no hook now."""
        return threading.get_ident() in self._muted

    def listening_here(self) -> list[Entry]:
        """The hooks in place that only this caller's runs reach, as inside ``hooks``."""
        return [e for each in self.entries.values() for e in each if e.scope is not None and e.here()]

    def add(self, entries: Iterable[Entry], first: bool = False) -> None:
        """Put hooks in place. On an error none of them stays.

        Args:
            entries: Functions at points.
            first: Before those that are there.
        """
        added: list[Entry] = []
        with self._lock:
            try:
                for entry in entries:
                    name = entry.point.name
                    if not self.entries:
                        hold()
                        self.passes.watch()
                    new = name not in self.entries
                    here = self.entries.get(name, [])
                    self.entries[name] = [entry, *here] if first else [*here, entry]
                    added.append(entry)
                    if new:
                        self._install(entry.point)
            except BaseException:
                self.remove(added)
                raise

    def remove(self, entries: Iterable[Entry]) -> None:
        """Remove hooks, and the PyTorch hooks that no other one needs.

        Args:
            entries: Those to remove. Ones that aren't in place are ignored.
        """
        with self._lock:
            for entry in entries:
                entry.active = False
                name = entry.point.name
                here = self.entries.get(name)
                if here is None or entry not in here:
                    continue
                # A new list: a forward running in another thread may be walking along the old one.
                left = [e for e in here if e is not entry]
                if left:
                    self.entries[name] = left
                else:
                    del self.entries[name]
                    if not self.entries:
                        release()
                        self.passes.unwatch()
                    self._uninstall(entry.point)

    @contextlib.contextmanager
    def listening(self, entries: Sequence[Entry], stay: bool = False, clear: bool = False) -> Iterator[None]:
        """``add`` on entering, ``remove`` on every way out.

        Args:
            entries: Functions at points.
            stay: Leave the hooks in place, among ``staying``, after a block without an error.
            clear: Empty the ``ctx`` of the points at the end.

        Yields:
            Nothing.
        """
        scope = Scope()
        for entry in entries:
            entry.scope = scope
        left = False
        with scope.entered():
            self.add(entries)
            try:
                yield
                left = stay
            finally:
                if left:
                    self.staying += entries
                    for entry in entries:
                        entry.scope = None
                else:
                    self.remove(entries)
            if clear:
                for entry in entries:
                    entry.point.ctx.clear()

    @contextlib.contextmanager
    def instrumented(self, paths: Iterable[str]) -> Iterator[None]:
        """Run the instrumented forward of these modules in the block, whether or not a hook needs it.

        Args:
            paths: Module paths.

        Yields:
            Nothing.
        """
        done: list[str] = []
        scope = Scope()
        with eager(), scope.entered():
            try:
                for path in paths:
                    self._instrument(path, scope)
                    done.append(path)
                yield
            finally:
                for path in reversed(done):
                    self._deinstrument(path, scope)

    def _install(self, point: HookPoint) -> None:
        if point.kind == "interior":
            self._instrument(point.module)
        else:
            self._handles[point.name] = list(self._reach.attach(self, point))
        self.passes.count(point.module)

    def _uninstall(self, point: HookPoint) -> None:
        if point.kind == "interior":
            self._deinstrument(point.module)
        for handle in self._handles.pop(point.name, ()):
            handle.remove()
        self.passes.uncount(point.module)

    def _instrument(self, path: str, scope: Scope | None = None) -> None:
        with self._lock:
            count, context = self._instruments.get(path, (0, None))
            if context is None:
                context = self._reach.instrument(path, Tap(self, self._reach.tap_names(path), path))
                context.__enter__()
            self._instruments[path] = (count + 1, context)
            if scope is not None:
                self.asked[path] = (*self.asked.get(path, ()), scope)

    def _deinstrument(self, path: str, scope: Scope | None = None) -> None:
        with self._lock:
            if path not in self._instruments:
                return
            self.asked[path] = tuple(s for s in self.asked.get(path, ()) if s is not scope)
            if not self.asked[path]:
                del self.asked[path]
            count, context = self._instruments[path]
            if count > 1:
                self._instruments[path] = (count - 1, context)
                return
            del self._instruments[path]
            context.__exit__(None, None, None)

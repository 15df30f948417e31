"""Turns: one caller at a time runs a model, since modes, weights and the state of its modules are everybody's.

A caller is a thread, or a task of asyncio. Hooks and forwards of ours reach their own caller only, so a user's own
forward of the module waits for nobody. A caller waits for another one's call, which ends by itself, but not for a block
of another one's code, whose end may depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from probelens.errors import InputError

__all__ = ["Turn", "in_eval_mode", "share_turn", "turn_of"]

# Seconds after which a caller that waits says for whom.
PATIENCE = 10.0

_Caller = tuple[int, Any]
_CHANGED = threading.Condition()
_TURNS: weakref.WeakKeyDictionary[nn.Module, Turn] = weakref.WeakKeyDictionary()
# By thread, the turn that it waits for.
_WAITING: dict[int, Turn] = {}


def _caller() -> _Caller:
    loop = asyncio._get_running_loop()
    return threading.get_ident(), None if loop is None else asyncio.current_task(loop)


class Turn:
    """The right to run one model. Whoever has it may take it again."""

    def __init__(self) -> None:
        self._holder: _Caller | None = None
        self._depth = 0
        # Those who wait, in the order in which they came.
        self._queue: list[_Caller] = []
        # The user's block for which it is kept; "" in a call.
        self._block = ""
        # What the training flags were before each block in eval mode, the first one first.
        self.modes: list[list[dict[nn.Module, bool]]] = []

    def __enter__(self) -> Turn:
        caller = _caller()
        with _CHANGED:
            # A loop of tasks that code with the turn runs is part of that code.
            if not self._depth and not self._queue:
                self._holder = caller
            elif not self._depth or self._holder not in (caller, (caller[0], None)):
                self._wait(caller)
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:  # fmt: skip
        with _CHANGED:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                if self._queue:
                    _CHANGED.notify_all()

    @contextlib.contextmanager
    def kept(self, block: str) -> Iterator[None]:
        """Have the turn for a block of the user's code; other callers are refused and told so.

        Args:
            block: What the user called to begin it.

        Yields:
            Nothing.
        """
        with self:
            outer, self._block = self._block, self._block or block
            try:
                yield
            finally:
                self._block = outer

    def _wait(self, caller: _Caller) -> None:
        """Wait in the queue until nobody else has the turn, and take it; an InputError where that could be for ever."""
        thread = caller[0]
        patience: float | None = PATIENCE
        self._queue.append(caller)
        _WAITING[thread] = self
        try:
            while self._depth or self._queue[0] is not caller:
                if self._depth:
                    self._refuse(thread)
                if not _CHANGED.wait(patience) and self._depth and patience is not None:
                    patience = None
                    warnings.warn(f"waiting for {self._who()}, which runs this model", stacklevel=2)
            self._holder = caller
        finally:
            self._queue.remove(caller)
            del _WAITING[thread]
            _CHANGED.notify_all()

    def _refuse(self, thread: int) -> None:
        """An InputError where whoever has the turn may wait for this thread."""
        assert self._holder is not None
        how, when = "", ""
        if self._block:
            how, when = f"inside model.{self._block}, whose block changes it for everybody", "after that block"
        elif self._holder[0] == thread:
            how, when = "and awaits something in the midst", "in that task, or after it"
        elif self._waits_for(thread):
            how = "and waits for a model that this thread runs"
            when = "outside of hooks of the other model"
        if how:
            raise InputError(
                f"this model is in use by {self._who()}, {how}. Run it {when}, or wrap a copy: "
                "pl.wrap(copy.deepcopy(model.module))"
            )

    def _waits_for(self, thread: int) -> bool:
        """Whether whoever has the turn waits for this thread, directly or through others."""
        turn: Turn | None = self
        while turn is not None and turn._holder is not None:
            if turn._holder[0] == thread:
                return True
            turn = _WAITING.get(turn._holder[0])
        return False

    def _who(self) -> str:
        """Whoever has the turn, with the call of probelens that it is in."""
        assert self._holder is not None
        ident, task = self._holder
        thread = next((t.name for t in threading.enumerate() if t.ident == ident), str(ident))
        who = f"thread {thread!r}" if task is None else f"task {task.get_name()!r} in thread {thread!r}"
        call = "" if ident == threading.get_ident() else _outermost(sys._current_frames().get(ident))
        return f"{who}, in {call}" if call else who


def _outermost(frame: FrameType | None) -> str:
    """The function of probelens that somebody else's code called; "" where none runs."""
    name = ""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("probelens."):
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name}()" if name else ""


def turn_of(module: nn.Module) -> Turn:
    """The turn of a module, the same for every model that wraps it."""
    found = _TURNS.get(module)
    if found is None:
        with _CHANGED:
            found = _TURNS.setdefault(module, Turn())
    return found


def share_turn(root: nn.Module, modules: Iterable[nn.Module]) -> Turn:
    """The turn of a module that is being wrapped, and from now on of all in it that have weights.

    Args:
        root: The module.
        modules: It, and what is in it.

    Returns:
        Where one of them was wrapped before, the turn it has.
    """
    parts = [root, *(each for each in modules if each._parameters)]
    with _CHANGED:
        turn = next((found for each in parts if (found := _TURNS.get(each)) is not None), None) or Turn()
        for each in parts:
            _TURNS.setdefault(each, turn)
    return turn


@contextlib.contextmanager
def in_eval_mode(root: nn.Module, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Eval mode inside the block. The flags of before come back when the last of several callers leaves.

    Args:
        root: The module.
        modules: All whose flags count.

    Yields:
        Nothing.
    """
    modes, all_of_them = turn_of(root).modes, list(modules)
    with _CHANGED:
        before = [{each: each.training for each in all_of_them}]
        modes.append(before)
        root.eval()
    try:
        yield
    finally:
        with _CHANGED:
            place = next(i for i, one in enumerate(modes) if one is before)
            if place + 1 < len(modes):
                modes[place + 1][0] = before[0]
            else:
                for each, training in before[0].items():
                    each.training = training
            del modes[place]

"""Where hooks act: in the thread or asyncio task that put them in place, and in the tasks that it starts meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["Scope"]


class Scope:
    """A block of somebody's code. Other threads, and tasks that were there before, don't run inside it."""

    def here(self) -> bool:
        """Whether what runs now was called from inside the block."""
        return self in _ENTERED.get()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Scope]:
        """The block."""
        _ENTERED.set(_ENTERED.get() | {self})
        try:
            yield self
        finally:
            # Not by a token: a block may end in another context than it began in, as in cells of a notebook.
            _ENTERED.set(_ENTERED.get() - {self})


_ENTERED: ContextVar[frozenset[Scope]] = ContextVar("entered", default=frozenset())

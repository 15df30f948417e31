"""Without compiled code: ``torch.compile`` keeps code that calls no hooks, so it is set aside while hooks are in place."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch

from probelens.errors import InputError

__all__ = ["eager", "hold", "release"]

_LOCK = threading.Lock()
_count = 0
_stance: contextlib.AbstractContextManager[None] | None = None


def hold() -> None:
    """Set compilation aside until as many ``release`` have come; an InputError under torch.compile."""
    global _count, _stance
    with _LOCK:
        # Who never used torch.compile doesn't have to wait for its import.
        if _stance is None and "torch._dynamo" in sys.modules:
            try:
                stance = torch.compiler.set_stance("force_eager")
                stance.__enter__()
            except RuntimeError as err:
                raise InputError(
                    f"a wrapped model was called from inside a function under torch.compile: {err}. "
                    "Compile the model instead; probelens runs it uncompiled while hooks are in place."
                ) from err
            _stance = stance
        _count += 1


def release() -> None:
    """Undo one ``hold``."""
    global _count, _stance
    with _LOCK:
        _count -= 1
        if _count == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """No compiled code inside the block."""
    hold()
    try:
        yield
    finally:
        release()

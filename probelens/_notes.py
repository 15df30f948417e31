"""Notes on errors that functions of the caller's raise: which function it was, and how it was called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["metric_note", "noted"]


@contextlib.contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Add a note to whatever a function of the caller's raises, with its traceback as it was.

    Args:
        note: Makes the note; called only on an error.

    Yields:
        Nothing.
    """
    try:
        yield
    except Exception as err:
        err.add_note(note())
        raise


def metric_note(metric: Callable[..., Any], arguments: str) -> str:
    """The note on an error in a metric function.

    Args:
        metric: The function.
        arguments: How it was called.

    Returns:
        One sentence.

    Examples:
        >>> metric_note(len, "logits, answers")
        'Raised by the metric len, which was called as metric(logits, answers).'
    """
    name = getattr(metric, "__qualname__", None) or type(metric).__qualname__
    return f"Raised by the metric {name}, which was called as metric({arguments})."

"""The errors a user can meet: every one says what was asked, found, allowed and what to do."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = [
    "AdapterNotFoundError",
    "HookNotFiredError",
    "InputError",
    "MetricError",
    "MissingDependencyError",
    "ProbelensError",
    "ShapeError",
    "StoreError",
    "UnknownHookError",
]


class ProbelensError(Exception):
    """Base of every error that probelens raises on purpose."""


class UnknownHookError(ProbelensError, KeyError):
    """A hook point, module path or layer that the wrapped model doesn't have."""

    # KeyError prints its argument with repr(), which turns a sentence into a quoted string.
    __str__ = Exception.__str__


class HookNotFiredError(ProbelensError, RuntimeError):
    """A hook was asked for, the model ran, and the hook was never called."""


class AdapterNotFoundError(ProbelensError, TypeError):
    """No installed adapter knows the module, or the adapter asked for isn't installed."""


class ShapeError(ProbelensError, ValueError):
    """A tensor whose shape isn't the one the call needs."""


class InputError(ProbelensError, ValueError):
    """Any other argument that can't be used: NaN activations, one class only, an unknown option."""


class MetricError(ProbelensError, ValueError):
    """A metric that is undefined on this input, such as recovery of a gap of zero."""


class StoreError(ProbelensError, OSError):
    """A file that can't be read back: truncated, foreign, or of another class."""


class MissingDependencyError(ProbelensError, ImportError):
    """An optional package is needed and isn't installed; the text names the extra to install."""


def nearest(name: str, options: Iterable[str], n: int = 3) -> list[str]:
    """The options most like ``name``, best first.

    Args:
        name: What was asked for.
        options: What there is.
        n: At most this many.

    Returns:
        Up to ``n`` options, possibly none.

    Examples:
        >>> nearest("blocks.3.hook_resid_pots", ["blocks.3.hook_resid_post", "hook_embed"])
        ['blocks.3.hook_resid_post']
    """
    return difflib.get_close_matches(str(name), [str(o) for o in options], n=n, cutoff=0.5)


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional package, or say which extra of probelens brings it.

    Args:
        module: Name to import, for example ``"mamba_ssm"``.
        extra: The extra of probelens that brings it.
        why: What needs it, for the message.

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: The package isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        missing = err.name or module
        raise MissingDependencyError(
            f"{why} needs the package {module!r}, which can't be imported ({missing!r}: {err}). "
            f'Install it with: pip install "probelens[{extra}]"'
        ) from err


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

"""Checks of tasks' arguments, and the random generator made from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from probelens.errors import InputError, nearest
from probelens.numerics.tensors import whole_number


def probability(name: str, value: Any, high: float = 1.0) -> float:
    """``value`` as a float within [0, high), or an InputError that names the argument."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}={value!r} must be a number, at least 0 and below {high}.") from None
    if not 0.0 <= number < high:
        raise InputError(f"{name}={number} must be a number, at least 0 and below {high}.")
    return number


def choice(what: str, value: Any, options: list[str] | tuple[str, ...]) -> str:
    """``value`` if it is one of ``options``, or an InputError with the nearest of them."""
    if isinstance(value, str) and value in options:
        return value
    close = nearest(str(value), options)
    hint = f" Nearest: {', '.join(map(repr, close))}." if close else ""
    shown = ", ".join(map(repr, options[:12])) + (f", … ({len(options)} in all)" if len(options) > 12 else "")
    raise InputError(f"unknown {what} {value!r}.{hint} Allowed: {shown}.")


def rng_from(seed: Any, *stream: str | int) -> np.random.Generator:
    """A generator of its own for (seed, stream): equal inputs give equal draws, others independent ones."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in stream]
    return np.random.default_rng([whole_number("seed", seed, 0), *words])


def sizes_of(sizes: Any) -> dict[str, int]:
    """The number of strings of each split, checked."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise InputError(f"sizes={sizes!r} must name the splits, such as {{'train': 800, 'test': 200}}.")
    return {str(name): whole_number(f"sizes[{name!r}]", size) for name, size in sizes.items()}

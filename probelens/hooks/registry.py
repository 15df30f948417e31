"""Finds the adapter for a model among the installed entry points of ``probelens.adapters``.

Built-in adapters are found in the same way as those of other packages. A plug-in that fails to
import is set aside with a warning and hurts no other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from typing import Any

from probelens.errors import AdapterNotFoundError, InputError, nearest
from probelens.hooks.adapter import Adapter

__all__ = ["adapters", "find_adapter"]

GROUP = "probelens.adapters"


@functools.lru_cache(maxsize=1)
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    # Not importlib.metadata.entry_points(): of two records of one package (an installed one, and an
    # egg-info left by an older build in the current folder) it reads the first only.
    for package in importlib.metadata.distributions():
        for point in package.entry_points:
            if point.group == GROUP:
                found.setdefault(point.name, point)
    return found


@functools.cache
def _load(name: str) -> type[Adapter] | str:
    """The adapter class behind an entry point, or why it can't be used."""
    try:
        found = _entry_points()[name].load()
    except Exception as err:
        # Another package's import may fail in any way; it must not take the others with it.
        reason = f"{type(err).__name__}: {err}"
    else:
        if isinstance(found, type) and issubclass(found, Adapter):
            return found
        reason = f"it is {found!r}, not a subclass of probelens.Adapter"
    warnings.warn(f"probelens adapter {name!r} can't be used: {reason}", RuntimeWarning, stacklevel=3)
    return reason


def refresh() -> None:
    """Forget what was found, after packages were installed in the running process."""
    _entry_points.cache_clear()
    _load.cache_clear()


def adapters() -> dict[str, type[Adapter]]:
    """Every adapter that can be imported, the most particular first.

    Returns:
        Entry point name to class, by falling ``priority`` and then by name.
    """
    loaded = {name: _load(name) for name in _entry_points()}
    usable = {name: found for name, found in loaded.items() if isinstance(found, type)}
    return dict(sorted(usable.items(), key=lambda item: (-item[1].priority, item[0])))


def find_adapter(
    module: Any, name: str | None = None, options: dict[str, Any] | None = None
) -> type[Adapter]:
    """The adapter class for a model.

    Args:
        module: What the user wants to wrap.
        name: Entry point name, to skip the search.
        options: Keywords for the adapter. One that no matching adapter takes is an error.

    Returns:
        The first adapter, most particular first, whose ``matches`` says yes.

    Raises:
        AdapterNotFoundError: None knows the module, or ``name`` isn't installed.
        InputError: An option that the adapter doesn't take.
    """
    wanted = set(options or {})
    if name is not None:
        if name not in _entry_points():
            known = sorted(_entry_points())
            raise AdapterNotFoundError(
                f"adapter {name!r} is not known. Nearest: {nearest(name, known) or 'none'}. "
                f"Installed: {', '.join(known)}"
            )
        found = _load(name)
        if isinstance(found, str):
            raise AdapterNotFoundError(f"adapter {name!r} can't be used: {found}")
        _check_options(found, name, wanted)
        return found
    matching = [(key, cls) for key, cls in adapters().items() if cls.matches(module)]
    if wanted:
        # blocks="…" says that the user describes the model: the adapter that needs nothing else is meant.
        taking = [(key, cls) for key, cls in adapters().items() if wanted <= set(cls.options)]
        chosen = [pair for pair in matching if pair in taking] or [
            pair for pair in taking if pair[1].any_module
        ]
        if not chosen:
            if matching:
                _check_options(matching[0][1], matching[0][0], wanted)
            known = sorted({option for cls in adapters().values() for option in cls.options})
            odd = next((option for option in sorted(wanted) if option not in known), sorted(wanted)[0])
            raise InputError(
                f"no adapter for a {type(module).__name__} takes the option {odd!r}. "
                f"Nearest: {nearest(odd, known) or 'none'}. Known: {', '.join(known)}"
            )
        return chosen[0][1]
    if matching:
        return matching[0][1]
    kind = type(module)
    broken = {key: why for key in _entry_points() if isinstance(why := _load(key), str)}
    raise AdapterNotFoundError(
        f"no adapter knows {kind.__module__}.{kind.__qualname__}. Installed: {', '.join(adapters())}. "
        + (f"Broken: {broken}. " if broken else "")
        + 'For any module with a list of blocks: pl.wrap(module, blocks="path.to.the.list"), '
        "with embed=, ln_final= and unembed= as far as they exist."
    )


def _check_options(cls: type[Adapter], name: str, wanted: set[str]) -> None:
    unknown = sorted(wanted - set(cls.options))
    if unknown:
        raise InputError(
            f"adapter {name!r} doesn't take {unknown[0]!r}. "
            f"Allowed: {', '.join(cls.options) or 'no options'}. Nearest: {nearest(unknown[0], cls.options) or 'none'}"
        )

"""Settings from text: ``key=value`` strings and saved JSON to the fields of a dataclass or the arguments of a function."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from probelens.errors import InputError, ProbelensError, unknown
from probelens.results.types import fits, said
from probelens.running.executors import Spec, spec_of


def configure(
    config: type[Any], settings: Sequence[str], presets: Mapping[str, Mapping[str, Any]], preset: str | None = None
) -> Any:
    """A config from its defaults, a preset and ``key=value`` settings, whose values are read by the field's type.

    >>> Config = dataclasses.make_dataclass("Config", [("seed", int, 0)])
    >>> configure(Config, ["seed=3"], {})
    Config(seed=3)
    """
    if preset is not None and preset not in presets:
        raise InputError(unknown("preset", preset, presets))
    changes = {} if preset is None else dict(presets[preset])
    return _make(config, changes | _read(settings, "--set", "setting", _hints(config)))


def named(name: str, settings: Sequence[str] = ()) -> Spec:
    """An executor from its name and ``key=value`` settings, as a command line has them.

    >>> named("submitit", ["partition=gpu", "time=60"]).time
    60
    """
    return configure(type(spec_of(name)), settings, {})


def restore(config: type[Any], saved: Mapping[str, Any]) -> Any:
    """A config from what JSON kept of it: lists become tuples, and every value must fit its field.

    >>> Config = dataclasses.make_dataclass("Config", [("archs", tuple[str, ...], ())])
    >>> restore(Config, {"archs": ["lstm"]})
    Config(archs=('lstm',))
    """
    hints, changes = _hints(config), {}
    for key, value in saved.items():
        if key not in hints:
            raise InputError(unknown("setting", key, hints))
        if isinstance(value, list):
            value = tuple(value)
        if not fits(value, hints[key]):
            raise InputError(f"setting {key}={value!r} has the wrong type: it must be {said(hints[key])}")
        changes[key] = value
    return _make(config, changes)


def arguments(function: Callable[..., Any], settings: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """Keyword arguments of a function or class from ``key=value`` strings, read by its annotations.

    >>> arguments(lambda depth=4, bos=False: None, ["depth=3", "bos=true"])
    {'depth': 3, 'bos': True}
    """
    made = isinstance(function, type)
    hints = typing.get_type_hints(function.__init__ if made else function)
    known: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        plain = type(parameter.default) if isinstance(parameter.default, (bool, int, float)) else str
        known[name] = hints.get(name, plain)
    return _read(settings, flag, "argument", known)


def _hints(config: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def _make(config: type[Any], changes: dict[str, Any]) -> Any:
    try:
        return config(**changes)
    except (TypeError, ValueError) as err:
        if isinstance(err, ProbelensError):
            raise
        raise InputError(f"these settings do not fit together: {err}") from err


def _read(settings: Sequence[str], flag: str, what: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for setting in settings:
        name, sep, value = setting.partition("=")
        if not sep or not (key := name.strip()):
            raise InputError(f"{flag} takes key=value, got {setting!r}")
        if key not in hints:
            raise InputError(unknown(what, key, hints))
        found[key] = _parse(key, value, hints[key])
    return found


def _parse(key: str, value: str, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if type(None) in options and value.lower() in ("none", "null", ""):
            return None
        plain = [a for a in options if a in (bool, int, float)]
        return _parse(key, value, plain[0] if plain else str)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_parse(key, part.strip(), inner) for part in value.split(",") if part.strip())
    if hint is bool:
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in known:
            raise InputError(f"{key}={value!r}: allowed are true and false")
        return known[value.lower()]
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise InputError(f"{key}={value!r} is not {said(hint)}") from None
    return value

"""Whether a value is what a type hint says: the check of everything that is read back from a file."""

from __future__ import annotations

import types
import typing
from typing import Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a hint made of plain types, lists, tuples, dicts, unions and literals.

    An int fits a float, as everywhere in Python; a bool fits neither. Hints of other kinds accept everything.

    >>> fits((1, 2), tuple[int, ...]), fits({"a": 1.0}, dict[str, str]), fits(None, int | None)
    (True, False, True)
    """
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[-1:] == (Ellipsis,):
            return all(fits(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if origin is list:
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def said(hint: Any) -> str:
    """A hint in words, for an error message."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(said, typing.get_args(hint)))
    words = {type(None): "None", int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint))

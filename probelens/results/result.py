"""The one store for results: a frozen dataclass to and from a single safetensors file.

Tensors become the file's tensors, everything else its JSON header. Reading such a file executes nothing, so a result
from a stranger is safe to open; a checksum tells when it was changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from probelens.errors import InputError, ProbelensError, StoreError
from probelens.results.columns import Column
from probelens.results.files import read_tensors, write_tensors
from probelens.results.types import fits, said

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["Result"]

_KEY = "probelens"
_SEP = "\x1f"
_MOST_LINES = 12
_R = TypeVar("_R", bound="Result")


class Result:
    """Mixin for the frozen dataclasses that primitives return.

    A field may hold a tensor, None, a number, a string, or lists, tuples and string-keyed
    dicts of these. ``save`` and ``load`` keep dtype, shape and NaN exactly. ``columns`` declares those of its table.
    """

    columns: ClassVar[tuple[Column, ...]] = ()

    def __init_subclass__(cls) -> None:
        # A dataclass would write out every number of every tensor; it leaves a __repr__ that is there alone.
        # Without super() and globals: cloudpickle, which takes edits to other machines, makes subclasses
        # before the functions of this class have theirs.
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = cls.__mro__[1].__repr__  # type: ignore[assignment,method-assign]
        if cls.__doc__ and cls.__dict__.get("columns"):
            cls.__doc__ += "\n\n    Columns:\n" + "\n".join(f"        {column}" for column in cls.__dict__["columns"])

    def __repr__(self) -> str:
        try:
            lines = self.findings()
        except (ArithmeticError, LookupError, TypeError, ValueError, ProbelensError):
            lines = []  # made by hand, without the columns or numbers that the sentences are about
        if not lines:
            parts = [f"{name}={_short(getattr(self, name))}" for name in _field_names(type(self))]
            return f"{type(self).__name__}({', '.join(parts)})"
        if len(lines) > _MOST_LINES:
            left = len(lines) - _MOST_LINES + 1
            lines = [*lines[: _MOST_LINES - 1], f"… and {left} lines more in .findings()"]
        return f"{type(self).__name__}: " + "\n".join(lines)

    def findings(self) -> list[str]:
        """The finding in plain sentences: what was measured on what, then what came out.

        Returns:
            One line each; printing a result shows at most 12. Empty where there is nothing to say.
        """
        return []

    def to_dataframe(self) -> pd.DataFrame:
        """Tidy rows, one measurement a row.

        Returns:
            The table, with the columns that ``columns`` declares.

        Raises:
            InputError: This class of result has no table.
        """
        raise InputError(f"{type(self).__name__} has no table. Its fields: {', '.join(_field_names(type(self)))}")

    def plot(self) -> go.Figure:
        """The result as a plotly figure.

        Returns:
            The figure, to show, change or write to a file.

        Raises:
            InputError: This class of result has no figure.
        """
        raise InputError(f"{type(self).__name__} has no figure. Its fields: {', '.join(_field_names(type(self)))}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one safetensors file, whole or not at all.

        Args:
            path: The file; an existing one is replaced at the end of a successful write.

        Returns:
            The path written.

        Raises:
            StoreError: The folder can't be written, or a field holds something that isn't data.
        """
        tensors: dict[str, Tensor] = {}
        fields = {name: _pack(getattr(self, name), name, tensors) for name in _field_names(type(self))}
        header = {_KEY: json.dumps({"class": type(self).__name__, "format": 1, "fields": fields})}
        return write_tensors(path, tensors, header)

    @classmethod
    def load(cls: type[_R], path: str | os.PathLike[str]) -> _R:
        """Read a result back.

        Args:
            path: A file written by ``save`` of the same class.

        Returns:
            An equal result, its tensors on the CPU.

        Raises:
            StoreError: The file is missing, truncated, changed, of another program or another class.
        """
        try:
            tensors, metadata = read_tensors(path)
        except StoreError as err:
            again = " If it belongs to a run, remove that cell's folder and give the same command again."
            why = str(err).removeprefix(f"can't read {str(path)!r}: ").rstrip(".")
            raise StoreError(
                f"{str(path)!r} is not a file of {cls.__name__}.save(): {why}.{again if os.path.exists(path) else ''}"
            ) from err
        if (header := metadata.get(_KEY)) is None:
            raise StoreError(
                f"{str(path)!r} is a safetensors file but not a probelens result. "
                f"Give a file written by {cls.__name__}.save()."
            )
        try:
            content = json.loads(header)
            name, fields = content["class"], content["fields"]
            fields = {key: _unpack(value, tensors) for key, value in fields.items()}
            if name != cls.__name__:
                former = cls._read_former(name, fields)
                if former is None:
                    raise StoreError(f"{str(path)!r} holds a {name}, not a {cls.__name__}: use {name}.load().")
                fields = former
            if surplus := sorted(set(fields).difference(_field_names(cls))):
                raise StoreError(
                    f"{str(path)!r} has fields that this version's {cls.__name__} doesn't know: {surplus}. "
                    "It was written by another version of probelens."
                )
            return _build(cls, fields)
        except StoreError:
            raise
        except Exception as err:
            raise StoreError(f"{str(path)!r} is damaged: {type(err).__name__}: {str(err)[:300]}") from err

    @classmethod
    def _read_former(cls, name: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """This class's fields from those of a class of another name that it has replaced; None for any other."""
        return None


def _field_names(cls: type[Any]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _short(value: Any) -> str:
    """A field in a few words."""
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}" if value.ndim else f"{value.item():.4g}"
    if isinstance(value, (list, tuple, dict)) and (len(value) > 4 or len(repr(value)) > 60):
        return f"<{type(value).__name__} of {len(value)}>"
    return repr(value)


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # Each tensor is stored by itself: two fields may be views of one storage.
        tensors[where] = value.detach().cpu().clone().contiguous()
        return {"t": where}
    if value is None or isinstance(value, (bool, str, int, float)):
        return {"f": repr(value)} if isinstance(value, float) and not math.isfinite(value) else {"v": value}
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "u"
        return {kind: [_pack(item, f"{where}{_SEP}{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise StoreError(f"field {where!r} can't be saved: its dict has keys that aren't strings")
        return {"d": {key: _pack(item, f"{where}{_SEP}{key}", tensors) for key, item in value.items()}}
    if isinstance(value, Result):
        names = _field_names(type(value))
        packed = {name: _pack(getattr(value, name), f"{where}{_SEP}{name}", tensors) for name in names}
        return {"r": type(value).__name__, "d": packed}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _pack(value.item(), where, tensors)
    raise StoreError(
        f"field {where!r} can't be saved: it holds a {type(value).__name__}. "
        "Allowed: tensors, numbers, strings, None, and lists, tuples and dicts of these."
    )


def _unpack(value: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if "t" in value:
        return tensors[value["t"]]
    if "v" in value:
        return value["v"]
    if "f" in value:
        return float(value["f"])
    if "l" in value:
        return [_unpack(item, tensors) for item in value["l"]]
    if "u" in value:
        return tuple(_unpack(item, tensors) for item in value["u"])
    content = {key: _unpack(item, tensors) for key, item in value["d"].items()}
    if "r" in value:
        return _build(_class_of(value["r"], content), content)
    return content


def _build(cls: type[_R], fields: dict[str, Any]) -> _R:
    """The result, if every field is of its declared type: a file may say anything."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError):  # a class of the user's own may name types that only it can see
        hints = typing.get_type_hints(cls)
    for key, value in fields.items():
        if key in hints and not fits(value, hints[key]):
            raise ValueError(
                f"{cls.__name__}.{key} must be {said(hints[key])}, and the file has a {type(value).__name__}"
            )
    return cls(**fields)


def _class_of(name: str, fields: Iterable[str]) -> type[Result]:
    """The subclass of Result that has this name and these fields; nothing is imported by a name in a file.

    Files written before modules moved into rooms have the module before the name: it is ignored.
    """
    wanted, known = name.rpartition(":")[2], set(fields)
    facade = sys.modules[__name__.partition(".")[0]]
    for load in (False, True):
        for public in facade.__all__ if load else ():
            getattr(facade, public)  # imports the room that has it
        named = [cls for cls in _subclasses(Result) if cls.__name__ == wanted]
        if found := [cls for cls in named if known.issubset(_field_names(cls))]:
            return found[-1]
    raise ValueError(f"no class {wanted!r} of results has been imported that has the fields {sorted(known)}")


def _subclasses(cls: type) -> list[type]:
    below: list[type] = cls.__subclasses__()
    return [*below, *(deeper for sub in below for deeper in _subclasses(sub))]

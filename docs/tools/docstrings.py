"""What a docstring lacks: used by ``test_docstrings.py``, and by hand, ``python docs/tools/docstrings.py [WORD]``.

A public name is one that the API pages show (``api_pages.py``), or a public method or property that a class of probelens
gives one of these.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe
from api_pages import shown
from shared_arguments import filled

from probelens import errors

ERRORS = {n for n in errors.__all__ if isinstance(getattr(errors, n), type)}
# A shape: "(batch, pos, …)", "(d,)", "(n_heads, d_model / n_heads)", "(...)" or "()"; or a stated scalar.
AXIS = r"[\w.…*]+(?: ?[+*/×·−-] ?\w+)*"
SHAPE = re.compile(rf"\((?:{AXIS},(?: ?{AXIS},?)*|\.\.\.|…)?\)")
WORDS = re.compile(r"scalar|\bsame shape\b|\bown shape\b|any shape|of the shape of")


@dataclasses.dataclass(frozen=True)
class Public:
    """A public name: where it is defined, what it is, and the docstring a reader sees.

    Args:
        name: Dotted path.
        kind: "class", "function", "method" or "property".
        value: The class, function, or the function behind a property.
        owner: The class of a method or property.
    """

    name: str
    kind: str
    value: Any
    owner: type | None = None

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.value.__doc__ or "")

    @property
    def inherited(self) -> str:
        """The docstring of the method that this one overrides; it holds as far as its own says nothing else."""
        bases = self.owner.__mro__[1:] if self.owner is not None else ()
        found = (vars(base).get(self.name.rpartition(".")[2]) for base in bases)
        return next((inspect.getdoc(f) or "" for f in found if f is not None and inspect.getdoc(f)), "")


def names() -> list[Public]:
    """Every public class and function once, with methods and properties, under the module that defines it."""
    found: dict[str, Public] = {}
    for _, _, value in shown():
        value = inspect.unwrap(value) if inspect.isroutine(value) else value
        if not getattr(value, "__module__", "").startswith("probelens") or not hasattr(value, "__qualname__"):
            continue  # a constant, or an alias of a type
        where = f"{value.__module__}.{value.__qualname__}"
        if inspect.isclass(value):
            found[where] = Public(where, "class", value)
            for cls in value.__mro__:
                if cls.__module__.startswith("probelens"):
                    found.update({member.name: member for member in members(cls)})
        elif inspect.isfunction(value):
            found[where] = Public(where, "function", value)
    return [found[name] for name in sorted(found)]


def members(cls: type) -> Iterator[Public]:
    """Public methods and properties that a class of probelens defines, under the class that defines them."""
    for name, value in vars(cls).items():
        where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, (property, functools.cached_property)):
            body = value.fget if isinstance(value, property) else value.func
            yield Public(where, "property", body, cls)
        elif isinstance(value, (staticmethod, classmethod)):
            yield Public(where, "method", value.__func__, cls)
        elif inspect.isfunction(value):
            yield Public(where, "method", inspect.unwrap(value), cls)


def sections(doc: str) -> dict[str, dict[str, str]]:
    """Args, Returns, Yields and Raises of a Google docstring: text by name; "" is the name of unnamed ones."""
    found: dict[str, dict[str, str]] = {}
    for section in griffe.Docstring(doc, parser="google").parse("google", warnings=False):
        if section.kind.value in ("parameters", "returns", "yields", "raises", "other parameters"):
            rows = found.setdefault(section.kind.value, {})
            for item in section.value:
                name = item.annotation if section.kind.value == "raises" else item.name
                rows[str(name or "")] = f"{item.annotation or ''} {item.description}"
    return found


def signature(item: Public) -> dict[str, inspect.Parameter]:
    """The parameters that a caller gives; a field with an underscore is for the class itself."""
    found = {n: p for n, p in inspect.signature(item.value).parameters.items() if not n.startswith("_")}
    first = next(iter(found), None)
    if item.owner is not None and first in ("self", "cls"):
        del found[first]
    return found


def own_raises(item: Public) -> set[str]:
    """Typed errors that the body itself raises, leaving out functions inside it."""
    bodies = [item.value]
    if item.kind == "class":
        bodies = [vars(item.value)[n] for n in ("__init__", "__post_init__", "__new__") if n in vars(item.value)]
    found: set[str] = set()
    for body in bodies:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(body)))
        except (OSError, TypeError):
            continue  # made by dataclass
        found |= set(_raised(tree.body[0]))
    return found & ERRORS


def _raised(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            made = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            if isinstance(made, ast.Name):
                yield made.id
        yield from _raised(child)


def faults(item: Public) -> list[str]:
    """What the docstring of a public name lacks; empty where it is complete."""
    doc = item.doc or item.inherited
    if not doc.strip():
        return ["no docstring"]
    try:
        doc = filled(doc, item.value.__module__)
    except LookupError as err:
        return [str(err)]
    said, found = {**sections(item.inherited), **sections(doc)}, []
    made = item.kind != "class" or _is_made_by_users(item.value)
    given = signature(item) if made and item.kind != "property" else {}
    rows = {name.lstrip("*"): text for name, text in said.get("parameters", {}).items()}
    found += [f"Args lacks {name}" for name in given if name not in rows]
    found += [f"Args has {name}, which is no parameter" for name in rows if name not in given]
    returned = _returned(item)
    answers = said.get("returns") or said.get("yields") or {}
    if item.kind in ("function", "method") and returned and not answers and (given or len(doc.splitlines()) > 1):
        found.append("no Returns")
    if not returned and answers:
        found.append("Returns of a function that returns nothing")
    missing = own_raises(item) - set(said.get("raises", {}))
    found += [f"Raises lacks {name}" for name in sorted(missing)]
    found += [
        f"no shape of {name}" for name, p in given.items() if _tensor(p.annotation) and not shaped(rows.get(name, ""))
    ]
    if item.kind != "class" and _tensor(returned) and not any(map(shaped, answers.values() or [doc])):
        found.append("no shape of what it returns")
    return found


def _is_made_by_users(cls: type) -> bool:
    """Whether users make objects of the class: errors and protocols are only caught or implemented."""
    made = vars(cls).get("__init__") or dataclasses.is_dataclass(cls)
    return bool(made) and not issubclass(cls, Exception) and not getattr(cls, "_is_protocol", False)


def _returned(item: Public) -> str:
    """The annotation of what is returned, as text; "" for nothing."""
    if item.kind == "class":
        return ""
    text = str(getattr(item.value, "__annotations__", {}).get("return", ""))
    return "" if text in ("None", "NoReturn", "<class 'NoneType'>") else text


def _tensor(annotation: Any) -> bool:
    """Whether an annotation is a tensor or array itself, or a union with one; not a table of several."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return any(re.fullmatch(r"(\w+\.)*(Tensor|ndarray(\[.*\])?)", part.strip()) for part in text.split("|"))


def shaped(text: str) -> bool:
    """Whether a description says a shape."""
    return bool(SHAPE.search(text) or WORDS.search(text))


if __name__ == "__main__":
    lacking = 0
    for one in names():
        for fault in faults(one):
            if len(sys.argv) < 2 or sys.argv[1] in one.name:
                lacking += 1
                print(f"{one.name}: {fault}")
    print(f"{len(names())} names, {lacking} faults")

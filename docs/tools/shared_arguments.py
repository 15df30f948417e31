"""Arguments that a docstring leaves to another function, filled in: for the pages (``mkdocs.yml``) and ``docstrings.py``.

In an Args section ``Those of ``patch``, without ``progress``.`` means every argument that ``patch`` documents but that
one, and ``seed, memory: As for ``patch``.`` these two. A name is looked up where the function is defined, then in
``probelens``. What stands in the section itself goes before what another function says.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import griffe

import probelens

ALL = re.compile(r"Those of ``([\w.]+)``(?:, without ((?:``\w+``(?:, | and )?)+))?\.")
SOME = re.compile(r"(\w+(?:, \w+)+): As for ``([\w.]+)``\.")


def filled(doc: str, module: str) -> str:
    """A docstring with the arguments that it leaves to other functions.

    Args:
        doc: With common indentation removed.
        module: Where the function is defined.

    Raises:
        LookupError: The other function isn't found, or documents no such argument.
    """
    head, args, rest = doc.partition("\nArgs:\n")
    body, blank, after = rest.partition("\n\n")
    own = set(re.findall(r"^    \**(\w+):", body, re.M))
    lines = []
    for line in body.splitlines():
        if whole := ALL.fullmatch(line.strip()):
            rows = _rows(whole[1], module)
            without = re.findall(r"\w+", (whole[2] or "").replace(" and ", " "))
            _known(without, rows, whole[1])
            lines += [f"    {name}: {text}" for name, text in rows.items() if name not in own.union(without)]
        elif some := SOME.fullmatch(line.strip()):
            rows, wanted = _rows(some[2], module), some[1].split(", ")
            _known(wanted, rows, some[2])
            lines += [f"    {name}: {rows[name]}" for name in wanted]
        else:
            lines.append(line)
    return head + args + "\n".join(lines) + blank + after


def _rows(name: str, module: str) -> dict[str, str]:
    """The arguments that a function documents, those that it leaves to others included."""
    for found in (sys.modules[module], probelens):
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            text = filled(inspect.getdoc(found) or "", inspect.unwrap(found).__module__)
            sections = griffe.Docstring(text, parser="google").parse("google", warnings=False)
            items = [item for section in sections if section.kind.value == "parameters" for item in section.value]
            return {item.name: " ".join(item.description.split()) for item in items}
    raise LookupError(f"Args names {name}, which is neither in {module} nor in probelens")


def _known(names: list[str], rows: dict[str, str], other: str) -> None:
    if lacking := [name for name in names if name not in rows]:
        raise LookupError(f"Args takes {lacking[0]} from {other}, which documents {', '.join(rows)}")


class SharedArguments(griffe.Extension):
    """Fills in the docstrings that the pages show."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        doc = "" if func.docstring is None else inspect.cleandoc(func.docstring.value)
        if func.docstring is not None and (ALL.search(doc) or SOME.search(doc)):
            func.docstring.value = filled(doc, importlib.import_module(func.module.path).__name__)

"""Fills the pages of the API: a hook of mkdocs, named in ``mkdocs.yml``.

``[room NAME]`` on a page becomes the public modules of a room that no page shows by name, ``[overview]`` the table of all
public names, ``[columns]`` the columns that results declare. A module is public if ``probelens`` or the ``__init__`` of its room takes a name from it, or if a page shows
it. It shows the names that are taken from it, or its whole ``__all__`` if a page or a room names the module itself,
functions before classes. So a new primitive needs no line here and on no page.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import probelens as pl
from probelens.results.result import Result
from probelens.results.types import said

DOCS = Path(__file__).resolve().parents[1]
SHOWN = re.compile(r"^::: (\S+)$(?!\n    options)", re.M)
ROOM = re.compile(r"^\[room (\w+)\]$", re.M)
OPTIONS = (
    "::: {path}\n    options:\n      heading_level: {level}\n      group_by_category: false\n      members: [{members}]"
)
# Used by commands and chosen by `wrap`, not imported by users.
WITHOUT_A_PAGE = {"adapters", "bench", "cli", "examples"}


@functools.cache
def pages() -> list[str]:
    """The pages of the API in the order of the menu."""
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    return [name for name in re.findall(r"api/(\w+)\.md", menu) if name != "index"]


@functools.cache
def source(page: str) -> str:
    return (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")


def is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def defined_in(value: Any) -> str:
    return str(getattr(inspect.unwrap(value) if callable(value) else value, "__module__", ""))


@functools.cache
def named() -> list[Any]:
    """What ``probelens`` and the ``__init__`` of a room name."""
    rooms = [m for name in pl.__all__ if isinstance(m := getattr(pl, name), ModuleType) and hasattr(m, "__path__")]
    return [getattr(m, name) for m in [pl, *rooms] for name in getattr(m, "__all__", ())]


@functools.cache
def written() -> list[str]:
    """The modules and names that pages show by name."""
    return [path for page in pages() for path in re.findall(r"^::: (\S+)$", source(page), re.M)]


@functools.cache
def public() -> list[str]:
    """The public modules, those of the pages first."""
    found = {v.__name__ if isinstance(v, ModuleType) else defined_in(v) for v in named()}
    own = [m for m in found if m.startswith("probelens.") and m.split(".")[1] not in WITHOUT_A_PAGE]
    rooms = {name for name in own if name.count(".") == 1 and hasattr(importlib.import_module(name), "__path__")}
    ordered = dict.fromkeys([*written(), *sorted(set(own) - rooms)])
    return [name for name in ordered if is_module(name) and getattr(importlib.import_module(name), "__all__", ())]


@functools.cache
def members(module: str) -> list[str]:
    """What a public module shows, functions first."""
    loaded = importlib.import_module(module)
    whole = module in written() or any(value is loaded for value in named())
    names = [
        name
        for name in loaded.__all__
        if home(value := getattr(loaded, name), name) == module
        and f"{module}.{name}" not in written()
        and (whole or any(value is one for one in named()))
    ]
    return sorted(names, key=lambda name: not inspect.isroutine(getattr(loaded, name)))


def home(value: Any, name: str) -> str:
    """The public module that shows a value: the one that defines it, otherwise the first that lists it."""
    lists = [m for m in public() if getattr(importlib.import_module(m), name, None) is value]
    lists = [m for m in lists if name in importlib.import_module(m).__all__]
    made = defined_in(value)
    return made if made in lists else next(iter(lists), "")


def filled(page: str) -> str:
    """A page with its modules in place of ``[room NAME]``, and with the members of each module in order."""
    text = ROOM.sub(
        lambda m: "\n\n".join(
            f"::: {name}" for name in public() if name.split(".")[1] == m[1] and name not in written() and members(name)
        ),
        source(page),
    )
    return SHOWN.sub(
        lambda m: OPTIONS.format(path=m[1], level=2, members=", ".join(members(m[1]))) if m[1] in public() else m[0],
        text,
    )


def shown() -> Iterator[tuple[str, str, Any]]:
    """Every public name: the page, the path there, and its value."""
    for page in pages():
        for path in re.findall(r"^::: (\S+)$", filled(page), re.M):
            module, _, name = path.rpartition(".")
            if path in public():
                loaded = importlib.import_module(path)
                yield from ((page, f"{path}.{name}", getattr(loaded, name)) for name in members(path))
            else:
                yield page, path, getattr(importlib.import_module(module), name)


def called(path: str, value: Any) -> str:
    """What users call a name: ``pl.patch``, ``pl.stats.coverage``, otherwise its whole path."""
    name = path.rpartition(".")[2]
    if getattr(pl, name, None) is value:
        return f"pl.{name}"
    for module in pl.__all__:
        lists = getattr(getattr(pl, module), "__all__", ())
        if name in lists and getattr(getattr(pl, module), name) is value:
            return f"pl.{module}.{name}"
    return path


def overview() -> str:
    """The table of all public functions and classes, one heading for each page."""
    text = []
    for page in pages():
        rows = [
            f"| [`{called(path, value)}`][{path}] | {(inspect.getdoc(value) or '').partition(chr(10))[0]} |"
            for where, path, value in shown()
            if where == page and (inspect.isclass(value) or inspect.isroutine(value))
        ]
        title = re.search(r"^# (.+)$", source(page), re.M)
        text.append("\n".join([f"## {title[1] if title else page}", "", "| name | |", "|---|---|", *rows]))
    return "\n\n".join(text)


def results() -> dict[str, type[Result]]:
    """The classes of results that declare columns, by path."""
    classes = {path: value for _, path, value in shown() if inspect.isclass(value)}
    return {path: cls for path, cls in classes.items() if issubclass(cls, Result) and cls.columns}


def columns() -> str:
    """A table of the columns of each class of results."""
    text = []
    for path, cls in results().items():
        cells = [(f"`{c.name}`", said(c.type), c.unit, c.on, c.meaning) for c in cls.columns]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        about = (inspect.getdoc(cls) or "").partition("\n")[0]
        head = ["| column | type | unit | on | meaning |", "|---|---|---|---|---|"]
        text.append("\n".join([f"## [{cls.__name__}][{path}]", "", about, "", *head, *rows]))
    return "\n\n".join(text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill a page; mkdocs calls this."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder != "api":
        return markdown
    return {
        "index": lambda: markdown.replace("[overview]", overview()),
        "columns": lambda: markdown.replace("[columns]", columns()),
    }.get(name, lambda: filled(name))()

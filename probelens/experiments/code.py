"""The code of a cell: a hash of its function and of what it names, so that a cell whose code changed is run again.

What counts: the function, and each function, class and variable that it names, directly or through others, in its module
and in other modules of the same folder or package. Comments, docstrings, formatting and what the cell doesn't name, such
as plots in the same file, don't count. Other packages don't either; probelens counts by its version. What is found by no
name, as a function that a registry elsewhere holds, isn't seen.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["code_of"]

_STANDARD = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}

Place = tuple[Path, str]  # a file and a name in it; the empty name is the whole file


def code_of(function: Callable[..., Any]) -> str:
    """A hash of a cell's code.

    Args:
        function: The cell's function, or a ``functools.partial`` of it, whose plain arguments count too.

    Returns:
        16 hexadecimal digits; empty for functions of probelens, and, with a warning, where there is no source.

    Examples:
        >>> code_of(json.dumps) == code_of(json.loads)
        False
    """
    given: list[Any] = []
    while isinstance(function, functools.partial):
        given.append([function.args, function.keywords])
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function)  # an object that is called
    module = str(getattr(function, "__module__", "") or "")
    if module.partition(".")[0] == "probelens":
        return ""
    digest = hashlib.sha256(json.dumps(given, default=lambda v: type(v).__qualname__, sort_keys=True).encode())
    try:
        file = Path(inspect.getsourcefile(function) or "").resolve()
        if file.is_file():
            # Packages count from their top: the folder that they are imported from.
            root = file.parents[module.count(".") + (file.name == "__init__.py")]
            name = function.__qualname__.partition(".")[0]
            parts = _reached((file, "" if name == "<lambda>" else name), root)
        else:
            parts = [ast.unparse(_plain(ast.parse(inspect.cleandoc(inspect.getsource(function)))))]  # a notebook's cell
    except (OSError, TypeError, ValueError, IndexError, SyntaxError) as err:
        warnings.warn(
            f"the code of {getattr(function, '__qualname__', function)!r} can't be read ({err}), so a change of it isn't "
            "noticed. Put the function in a file, or give run_grid(code=...) a version.",
            stacklevel=3,
        )
        return ""
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _reached(first: Place, root: Path) -> list[str]:
    """The definitions that a name leads to, in an order that is the same everywhere."""
    waiting, seen, found = [first], set[Place](), list[str]()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        file, name = place
        body = _statements(file)
        # A star may bring any name that isn't found here.
        waiting += [(found, "") for node in body if _is_star(node) for found, _ in _imported(node, file, root, "")]
        here = [node for node in body if not name or name in _binds(node) | _changes(node)]
        imports = [node for node in here if isinstance(node, (ast.Import, ast.ImportFrom))]
        if name and imports and not any(list(_imported(node, file, root, name)) for node in imports):
            # Of another package: what it decorates is not thereby named.
            here = [
                node for node in here if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            ]
        if not here and name:
            # It can't be followed, as in a file that makes its names at run time: the whole file counts.
            here = body
        for node in here:
            imported = list(_imported(node, file, root, name))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                waiting += imported
                continue
            found.append(f"{file.relative_to(root).as_posix()} {ast.unparse(node)}")
            # Also imports inside functions.
            waiting += [p for n in ast.walk(node) if n is not node for p in _imported(n, file, root, "")]
            waiting += [(file, bound) for bound in _binds(node)]  # where it was reached as what changes another
            known = {bound for each in body for bound in _binds(each)}
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            waiting += [(file, used) for used in names & known]
    return sorted(found)


@functools.cache
def _parsed(text: str) -> ast.Module:
    return _plain(ast.parse(text))


def _statements(file: Path) -> list[ast.stmt]:
    """A module's statements, also those under ``if`` and ``try``, but what runs only as a script."""
    waiting, found = list(_parsed(file.read_text(encoding="utf-8")).body), list[ast.stmt]()
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            waiting = [*inner, *(s for h in getattr(node, "handlers", []) for s in h.body), *waiting]
        else:
            found.append(node)
    return found


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _changes(node: ast.stmt) -> set[str]:
    """The names whose values a statement may change: ``TABLE["a"] = f``, ``TABLE.update(...)``, or ``@TABLE.add``."""
    if isinstance(node, ast.Expr):
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return (
            {n.id for n in ast.walk(called) if isinstance(n, ast.Name)} if isinstance(called, ast.Attribute) else set()
        )
    parts: list[ast.AST] = list(getattr(node, "decorator_list", []))
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Subscript, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            parts.append(inner.value)
        elif isinstance(inner, ast.Global):
            parts += [ast.Name(name) for name in inner.names]
    return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)


def _imported(node: ast.AST, file: Path, root: Path, only: str) -> Iterator[Place]:
    """What an import statement leads to below ``root``; with ``only`` what it binds to that name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if _own(file, root, alias.name) and (not only or (alias.asname or alias.name).partition(".")[0] == only):
                yield from ((found, "") for found in _files(root, alias.name))
    elif isinstance(node, ast.ImportFrom):
        base = file.parents[node.level - 1] if node.level else root
        if not node.level and not _own(file, root, node.module or ""):
            return
        for alias in node.names:
            if only and (alias.asname or alias.name) != only:
                continue
            inner = ".".join(filter(None, [node.module, alias.name]))
            if found := _files(base, inner):  # a module of its own
                yield from ((each, "") for each in found)
            else:
                name = "" if alias.name == "*" else alias.name
                yield from ((each, name) for each in _files(base, node.module or "__init__"))


def _files(base: Path, module: str) -> list[Path]:
    place = base.joinpath(*module.split("."))
    return [
        found.resolve() for found in (place.with_name(place.name + ".py"), place / "__init__.py") if found.is_file()
    ]


def _own(file: Path, root: Path, module: str) -> bool:
    """Whether a module counts: where packages are installed, only the cell's own does, not those beside it."""
    top = module.partition(".")[0]
    installed = "site-packages" in root.parts or "dist-packages" in root.parts or root in _STANDARD
    return top != "probelens" and (not installed or top == file.relative_to(root).parts[0].removesuffix(".py"))


def _plain(tree: ast.Module) -> ast.Module:
    """Without docstrings, which change no number."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return tree

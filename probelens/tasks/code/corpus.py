"""Python functions to label: from a folder, a CodeSearchNet file, or a list."""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import json
import os
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from probelens.errors import InputError
from probelens.tasks.code.nesting import nesting

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_CODE, _GROUP = ("code", "whole_func_string", "original_string"), ("repo", "repository_name")


@dataclass
class Corpus:
    """Functions, their groups, and how many were left out for which reason."""

    codes: list[str] = field(default_factory=list)
    depths: list[np.ndarray] = field(default_factory=list)
    indents: list[np.ndarray] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of all texts in order."""
        return hashlib.blake2b("\0".join(self.codes).encode("utf-8", "replace"), digest_size=16).hexdigest()


Source = str | os.PathLike[str] | Iterable[tuple[str, str]]


def load(corpus: Source, min_chars: int, max_chars: int) -> Corpus:
    """Read a corpus; see `probelens.tasks.CodeDepth`. The standard library is read once per process."""
    if corpus == STDLIB:
        return _load_stdlib(min_chars, max_chars)
    if isinstance(corpus, str | os.PathLike):
        return _load_path(Path(corpus), set(), min_chars, max_chars)
    try:
        pairs = [(str(group), code) for group, code in corpus]
        if not all(isinstance(code, str) for _, code in pairs):
            raise TypeError
    except (TypeError, ValueError):
        raise InputError(
            f"corpus must be 'stdlib', a folder, a .jsonl or .jsonl.gz file, or pairs of strings (group, source text), "
            f"got a {type(corpus).__name__} of something else."
        ) from None
    return _collect(iter(pairs), {}, min_chars, max_chars)


@functools.lru_cache(maxsize=2)
def _load_stdlib(min_chars: int, max_chars: int) -> Corpus:
    return _load_path(Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB, min_chars, max_chars)


def _load_path(path: Path, skipped: set[str], min_chars: int, max_chars: int) -> Corpus:
    counts: dict[str, int] = {}
    if path.is_dir():
        pairs = _from_folder(path, skipped, counts)
    elif path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz")):
        pairs = _from_jsonl(path, counts)
    else:
        raise InputError(
            f"corpus {str(path)!r} must be an existing folder, or a .jsonl or .jsonl.gz file. "
            "Leave it out for the standard library of the running Python."
        )
    return _collect(pairs, counts, min_chars, max_chars)


def _collect(pairs: Iterator[tuple[str, str]], counts: dict[str, int], min_chars: int, max_chars: int) -> Corpus:
    out = Corpus(counts=counts)
    counts.update(dict.fromkeys(("functions", "too_short", "too_long", "unreadable", "duplicate", "kept"), 0))
    seen: set[bytes] = set()
    ids: dict[str, int] = {}
    for group, text in pairs:
        counts["functions"] += 1
        code = text.replace("\r\n", "\n").replace("\r", "\n")
        if not min_chars <= len(code) <= max_chars:
            counts["too_short" if len(code) < min_chars else "too_long"] += 1
            continue
        # White space and comment lines don't make a function a new one.
        lines = ("".join(line.split()) for line in code.split("\n"))
        normal = "".join(line for line in lines if not line.startswith("#"))
        key = hashlib.blake2b(normal.encode("utf-8", "replace"), digest_size=16).digest()
        if key in seen:
            counts["duplicate"] += 1
            continue
        levels = nesting(code)
        if levels is None:
            counts["unreadable"] += 1
            continue
        seen.add(key)
        out.codes.append(code)
        out.depths.append(levels[0])
        out.indents.append(levels[1])
        out.groups.append(ids.setdefault(group, len(ids)))
    counts["kept"], counts["groups"] = len(out.codes), len(ids)
    out.names = list(ids)
    if not out.codes:
        raise InputError(
            f"the corpus holds no usable Python function of {min_chars} to {max_chars} characters: {counts}. "
            "Widen the limits or choose another corpus."
        )
    return out


def _from_folder(root: Path, skipped: set[str], counts: dict[str, int]) -> Iterator[tuple[str, str]]:
    counts["files"] = counts["unreadable_files"] = 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skipped.intersection(parts):
            continue
        counts["files"] += 1
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's code
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            counts["unreadable_files"] += 1
            continue
        lines = source.split("\n")
        for node in _functions(tree):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield parts[0].removesuffix(".py"), textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but not those inside another function, which would be counted twice."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _functions(child)


def _from_jsonl(path: Path, counts: dict[str, int]) -> Iterator[tuple[str, str]]:
    counts["other_language"] = 0
    opened = gzip.open if path.suffix == ".gz" else open
    number = 1
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for line in file:
                number += 1
                if not line.strip():
                    continue
                row = json.loads(line)
                if row.get("language", "python") != "python":
                    counts["other_language"] += 1
                    continue
                code = next((row[key] for key in _CODE if isinstance(row.get(key), str)), None)
                group = next((row[key] for key in _GROUP if isinstance(row.get(key), str)), None)
                if code is None or group is None:
                    raise ValueError(f"it needs one of {_CODE} and one of {_GROUP}")
                yield group, textwrap.dedent(code)
    except (ValueError, AttributeError, EOFError, OSError) as err:
        raise InputError(
            f"{str(path)!r} can't be read as a CodeSearchNet file, at line {number - 1}: {err}. "
            "Give one JSON object per line."
        ) from err

"""What is wrong with a command that the documentation shows, found without running it: ``python docs/tools/docs_commands.py``.

A command of probelens goes through the real ``main`` up to where its work would begin, so recipes, presets, settings
and tasks are judged as for a user. Of other programs files, modules, options, extras and packages must be there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import re
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from docs_inventory import ROOT, Command, commands

from probelens.bench import command as benchmarks
from probelens.cli import main as cli
from probelens.cli import profile_run as _profile_run
from probelens.errors import InputError
from probelens.examples import RECIPES
from probelens.tasks import Dyck, Task

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What stands for a word of the reader's own, and a word that may stand there.
STAND_INS = {("run", "NAME"): "quickstart", ("--task", "NAME"): "dyck"}


class Reached(BaseException):
    """Everything the command line could say against the command has been said."""


@contextlib.contextmanager
def nothing_done() -> Iterator[None]:
    """The command line as it is, up to the point where work would begin."""

    def reached(*args: Any, **kw: Any) -> Any:
        raise Reached

    def profile(model: Any, task: Task, folder: Path, settings: Any, *, labels: Any, **kw: Any) -> None:
        for label in labels or ():
            task.class_names(label)
        raise Reached

    def bench(args: Namespace) -> int:
        known = benchmarks._cases()
        wrong = [name for name in args.only or () if name not in known]
        if wrong:
            raise InputError(f"row {wrong[0]!r} not found")
        raise Reached

    recipes = [importlib.import_module(module) for module in RECIPES.values()]
    changes = [
        *(mock.patch.object(recipe, "run", reached) for recipe in recipes),
        mock.patch.object(cli, "_load", return_value=SimpleNamespace(tokenizer=None)),
        mock.patch.object(_profile_run, "_trained_on", return_value=dict(Dyck().config)),
        mock.patch.object(_profile_run, "_check_fit"),
        mock.patch.object(_profile_run, "profile_model", profile),
        mock.patch.dict(cli.DO, dict.fromkeys(("hooks", "verify", "report", "list"), reached)),
        mock.patch.dict(cli.DO, bench=bench),
    ]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _probelens(command: Command) -> str:
    words = [STAND_INS.get(pair, pair[1]) for pair in zip(command.words, command.words[1:])]
    if words[:1] == ["COMMAND"] and words[1:] == ["--help"]:
        return ""
    if command.mention and len(words) == 1 and words[0] in cli.DO:
        return ""  # a sentence about the command
    said = io.StringIO()
    try:
        with nothing_done(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            status: Any = cli.main(words)
    except Reached:
        return ""
    except SystemExit as ended:
        status = ended.code
    return "" if status == 0 else said.getvalue().strip() or f"it would end with status {status}"


def _python(command: Command) -> str:
    words = list(command.words[1:])
    folder = ROOT / command.folder
    if words[:1] == ["-m"]:
        name = words[1]
        if name in ("venv", "pip", "build"):
            return "" if importlib.util.find_spec(name) else f"no module {name}"
        own = folder / f"{name.replace('.', '/')}.py"
        spec = None if own.is_file() and command.folder else _spec(name)
        file = own if spec is None else Path(spec.origin or "")
        words = words[2:]
        if not file.is_file():
            return f"no module {name} in {folder}"
    elif words and words[0].endswith(".py"):
        file, words = folder / words[0], words[1:]
        if not file.is_file():
            return f"no file {words[0] if words else command.words[1]}"
    else:
        return "python with neither -m nor a file: teach docs/tools/docs_commands.py what it means"
    known = options(file)
    wrong = [w for w in words if w.startswith("--") and w.partition("=")[0] not in known]
    return f"{file.name} takes no {wrong[0]}" if wrong else _paths(words)


def _spec(name: str) -> Any:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name)
    return None


def options(file: Path) -> set[str]:
    """The options that a script gives to argparse."""
    calls = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"]
    return {a.value for c in calls for a in c.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")}


def _paths(words: list[str]) -> str:
    """Paths in the project must be there; folders that only a run makes are not in it."""
    inside = [w for w in words if re.match(r"(docs|tests|probelens|adapters|examples|\.ci)/", w)]
    missing = [w for w in inside if not (ROOT / w.partition("::")[0]).exists()]
    return f"no file {missing[0]}" if missing else ""


def _pip(command: Command) -> str:
    words = list(command.words[1:])
    if words[:1] == ["list"]:
        return ""
    if words[:1] != ["install"]:
        return "pip is only checked for install and list"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    rest = [w for w in words[1:] if not w.startswith("-")]
    if "-c" in words:
        rest.remove(words[words.index("-c") + 1])
        if not (ROOT / words[words.index("-c") + 1]).is_file():
            return f"no file {words[words.index('-c') + 1]}"
    for word in rest:
        name, _, extras = word.rstrip("]").partition("[")
        if name not in (".", "probelens") and not re.search(rf"^{re.escape(name)}==", pinned, re.M):
            return f"{name} is not in constraints.txt"
        unknown = [e for e in extras.split(",") if e and e not in PROJECT["optional-dependencies"]]
        if unknown:
            return f"no extra {unknown[0]}"
    return ""


def problem(command: Command) -> str:
    """What is wrong with a command; "" for nothing."""
    words = list(command.words[1:])
    match command.program:
        case "probelens":
            return _probelens(command)
        case "python" | "python3":
            return _python(command)
        case "pip":
            return _pip(command)
        case "pytest":
            return _paths(words)
        case "mkdocs":
            return "" if words[:1] in (["serve"], ["build"]) else f"mkdocs {words[:1]}"
        case "pre-commit":
            return "" if (ROOT / ".pre-commit-config.yaml").is_file() and words == ["install"] else "pre-commit"
        case "bash":
            return "" if words and (ROOT / words[0]).is_file() else "no such script"
        case "cd":
            return "" if (ROOT / words[0]).is_dir() else f"no folder {words[0]}"
        case "jq":
            return ""
    return f"{command.program} is not known: teach docs/tools/docs_commands.py what to check of it"


if __name__ == "__main__":
    found = [(one, problem(one)) for one in commands()]
    for one, wrong in found:
        print(f"{one.where}: {' '.join(one.words)}: {wrong or 'ok'}")
    sys.exit(any(wrong for _, wrong in found))

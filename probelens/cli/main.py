"""The command line: run recipes, and look into a model without writing code."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from probelens.bench.command import bench
from probelens.cli.parser import build
from probelens.errors import (
    AdapterNotFoundError,
    InputError,
    MissingDependencyError,
    ProbelensError,
    StoreError,
    UnknownHookError,
    unknown,
)
from probelens.experiments.settings import configure, named, restore
from probelens.running.executors import current, handling, using

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.hooks.points import HookPoint

# Errors that the user can fix by giving something else: exit status 2. Any other error: 1.
UNUSABLE = (InputError, StoreError, UnknownHookError, AdapterNotFoundError, MissingDependencyError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments, or those of the process; returns the exit status that its help explains."""
    # SIGTERM ends a command as Ctrl-C does: processes are ended, files closed, hooks removed.
    with handling(signal.SIGTERM, _terminate):
        return _main(argv)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems and ``kill`` send it."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _main(argv: Sequence[str] | None) -> int:
    debug, kept = False, "what is finished is kept, and the same command continues from there"
    try:
        parser, commands = build(DO)
        args, rest = parser.parse_known_args(argv)
        debug, kept = args.debug, getattr(args, "kept", kept)
        settings: list[str] = []
        if rest and args.command == "run":
            settings = [field.name for field in dataclasses.fields(_recipe(args.recipe).Config)]
            rest = _flags(args, rest, settings)
        if rest:
            commands.get(args.command, parser).unrecognized(rest, settings)
        if args.command is None:
            parser.print_help()
            return 2
        status = int(args.do(args))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as err:
        ended = isinstance(err, _Terminated)
        what = "terminated" if ended else "interrupted"
        print(f"{what}; {kept}", file=sys.stderr)
        return 143 if ended else 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not try to write the rest when it exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ProbelensError as err:
        if debug:
            raise
        print(f"probelens: {err}", file=sys.stderr)
        return 2 if isinstance(err, UNUSABLE) else 1
    except Exception as err:
        if debug:
            raise
        said = f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
        print(f"probelens: {said}\nAdd --debug to see where it happened.", file=sys.stderr)
        return 1


def _flags(args: argparse.Namespace, words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Move ``--model X`` and ``--model=X`` into the settings where the recipe has such a setting, and return the rest."""
    left, words = list[str](), list(words)
    while words:
        flag, sep, value = words.pop(0).partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or key not in known or not (sep or words):
            left.append(flag + sep + value)
            continue
        args.settings.append(f"{key}={value if sep else words.pop(0)}")
    return left


def _recipe(name: str) -> Any:
    from probelens.examples import RECIPES

    if name not in RECIPES:
        raise InputError(unknown("recipe", name, RECIPES))
    return importlib.import_module(RECIPES[name])


def _listed(name: str) -> tuple[Any, str]:
    """The module with a recipe's Config and PRESETS, and what the recipe says first; a recipe in a folder isn't loaded."""
    from probelens.examples import RECIPES

    module, _, last = RECIPES[name].rpartition(".")
    if last != "recipe":
        recipe = _recipe(name)
        return recipe, (recipe.__doc__ or "").strip().split("\n")[0]
    settings = importlib.import_module(f"{module}.settings")
    source = Path(str(settings.__file__)).with_name("recipe.py").read_text(encoding="utf-8")
    return settings, (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def _load(name: str) -> Any:
    from probelens.models.loading import load

    if not sys.stderr.isatty():
        # transformers draws its bars everywhere; it reads this when it is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return load(name)


def _written(folder: Path) -> dict[str, str]:
    files = {"report": folder / "report.html", "rows": folder / "rows.parquet"}
    return {"folder": str(folder), **{key: str(path) for key, path in files.items() if path.exists()}}


def _show(written: dict[str, Any], as_json: bool) -> int:
    print(json.dumps(written, indent=2) if as_json else written.get("report", written["folder"]))
    return 0


def _executor(args: argparse.Namespace) -> Any:
    settings = list(args.executor_settings)
    if args.scheduler is not None:
        if args.executor != "dask":
            raise InputError("--scheduler belongs to --executor dask")
        settings.append(f"scheduler={args.scheduler}")
    if settings and args.executor is None:
        raise InputError("--executor-set belongs to --executor NAME")
    return current() if args.executor is None else named(args.executor, settings)


def _run(args: argparse.Namespace) -> int:
    recipe = _recipe(args.recipe)
    settings = args.settings if args.out is None else [*args.settings, f"out={args.out}"]
    config = configure(recipe.Config, settings, recipe.PRESETS, args.preset)
    # Before torch, which swallows an interrupt while it imports numpy; that can't be imported again then.
    importlib.import_module("numpy")
    with using(_executor(args)):
        folder = Path(recipe.run(config, progress=not args.quiet))
    return _show(_written(folder), args.json)


def _report(args: argparse.Namespace) -> int:
    from probelens.cli import profile_run
    from probelens.experiments import RunRecord, Store
    from probelens.experiments.owner import owned

    folder = Path(args.folder)
    record = RunRecord.load(folder)
    if record.recipe == profile_run.NAME:
        profile_run.need_finished(folder)
        with owned(folder):
            profile_run.report_again(folder)
        return _show(_written(folder), args.json)
    recipe = _recipe(record.recipe)
    if not hasattr(recipe, "report"):
        raise InputError(
            f"the recipe {record.recipe!r} can't make its report again. Run it again: finished cells are kept"
        )
    # The folder may have been moved, and what it says about its place is not to be trusted.
    config = restore(recipe.Config, {**record.config, "out": str(folder)})
    with owned(folder):
        recipe.report(config, record)
    missing = sum(not Store(folder).done(key) for key in record.cells)
    if missing:
        what = f"{missing} of {len(record.cells)} models are not finished and not in the report"
        again = f"`probelens run {record.recipe}` with the same settings continues the run"
        print(f"probelens: {what}; {again}", file=sys.stderr)
    return _show(_written(folder), args.json)


def _list(args: argparse.Namespace) -> int:
    from probelens.examples import RECIPES

    found: list[dict[str, Any]] = []
    for name in RECIPES:
        recipe, summary = _listed(name)
        defaults = recipe.Config()
        settings = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
        found.append({"name": name, "summary": summary, "presets": sorted(recipe.PRESETS), "settings": settings})
    if args.json:
        print(json.dumps(found, indent=2, default=str))
        return 0
    for item in found:
        print(f"{item['name']}: {item['summary']}")
        if item["presets"]:
            print(f"  presets: {', '.join(item['presets'])}")
        for key, value in item["settings"].items():
            print(f"  {key} = {value!r}")
    return 0


def _matched(model: HookedModel, args: argparse.Namespace) -> list[HookPoint] | None:
    """The hook points that ``--match`` means, or None where it isn't given: names, each with layers after it or none."""
    from probelens.hooks.names import ALL_NAMES, resolve

    if args.match is None:
        return None
    names: list[Any] = []
    # A comma between brackets belongs to a glob.
    for text in re.split(r",(?![^\[\]]*\])", ",".join(args.match)):
        if names and re.fullmatch(r"-?\d+", text):
            short = names[-1] if isinstance(names[-1], str) else names[-1][0]
            # The first layer takes the place of the name for every layer.
            names[len(names) - isinstance(names[-1], str) :] = [(short, int(text))]
        else:
            names.append(text)
    try:
        return resolve(model, names)
    except UnknownHookError as err:
        raise UnknownHookError(str(err).replace(ALL_NAMES, f"All names: probelens hooks {args.model}")) from None


def _hooks(args: argparse.Namespace) -> int:
    model = _load(args.model)
    table = model.hook_points(_matched(model, args))
    print(table.to_json(orient="records", indent=2) if args.json else table.to_string(index=False))
    return 0


def _verify(args: argparse.Namespace) -> int:
    model = _load(args.model)
    report = model.verify(names=_matched(model, args), progress=not args.quiet)
    if args.json:
        content = {"model": report.model, "ok": report.ok, "left_behind": report.left_behind, "points": report.rows}
        print(json.dumps(content, indent=2))
    else:
        if args.all:
            print(report.to_dataframe().to_string(index=False))
        print(report)
    return 0 if report.ok else 1


def _profile(args: argparse.Namespace) -> int:
    from probelens.cli import profile_run
    from probelens.cli.profile_report import ProfileSettings

    extra = [] if args.length is None else [f"length={args.length}"]
    settings = configure(ProfileSettings, [*args.settings, *extra], {})
    labels = None if args.labels is None else [part.strip() for part in args.labels.split(",") if part.strip()]
    model = _load(args.model)
    task = profile_run.task_for(model, args.model, args.task, args.task_settings)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{Path(args.model).name}-{task.name}").strip("-")[:200]
    folder = Path(f"runs/profile-{name}" if args.out is None else args.out)
    found = profile_run.profile_model(
        model, task, folder, settings, labels=labels, source=args.model, progress=not args.quiet
    )
    written = _written(folder)
    if not args.json:
        for label, index in found.indices.items():
            print(f"{label}: {index.verdict} ({index.reason})")
        return _show(written, False)
    about = {}
    for label, index in found.indices.items():
        best = found.probes.best(label)
        about[label] = {
            "verdict": index.verdict, "reason": index.reason, "best_layer": best["layer"],
            "accuracy": best["accuracy"], "baseline": found.baseline[label],
        }  # fmt: skip
    return _show({**written, "profile": str(folder / profile_run.FILE), "labels": about}, True)


DO = {
    "run": _run, "list": _list, "report": _report, "hooks": _hooks, "verify": _verify, "profile": _profile,
    "bench": bench,
}  # fmt: skip

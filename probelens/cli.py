"""The command line: run recipes, and look into a model without writing code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from probelens import __version__
from probelens._settings import configure, restore, unknown
from probelens.errors import (
    AdapterNotFoundError,
    InputError,
    MissingDependencyError,
    ProbelensError,
    StoreError,
    UnknownHookError,
    nearest,
)

__all__ = ["main"]

STATUS = (
    "exit status: 0 all well, 1 the work failed, 2 the command, or a file, folder or model that it needs, can't be\n"
    "used, 130 interrupted, 143 terminated; after both the same command goes on from what was finished"
)
# What the user can mend by giving something else; the rest is a failure of the work.
UNUSABLE = (InputError, StoreError, UnknownHookError, AdapterNotFoundError, MissingDependencyError)

EPILOG = f"""examples:
  probelens run quickstart                      train two small models, measure them, write report.html
  probelens run quickstart --set seed=1         the same with another seed
  probelens list                                recipes, their presets and settings
  probelens report runs/quickstart              make the report again from the saved results
  probelens hooks EleutherAI/pythia-160m        the hook points of a model (hub id or folder)
  probelens verify EleutherAI/pythia-160m       prove that each of them fires and edits what it should
  probelens profile MY_MODEL --task dyck        where a model keeps a variable, and whether it uses it

`probelens COMMAND --help` says more about each command.
{STATUS}"""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that names what was probably meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            options = re.findall(r"[\w-]+", wrong[2])
            what = "command" if "COMMAND" in message else "value"
            message = unknown(what, wrong[1], options)
        self.exit(2, f"probelens: {message}. Help: {self.prog} --help\n")

    def unrecognized(self, words: Sequence[str], settings: Sequence[str] = ()) -> NoReturn:
        """Refuse options and arguments that the command doesn't have."""
        options = [o for action in self._actions for o in action.option_strings]
        options += [f"--{name.replace('_', '-')}" for name in settings]
        near = nearest(words[0].partition("=")[0], options)
        hint = f" Nearest: {', '.join(near)}" if near else ""
        self.error(f"{self.prog} doesn't take {' '.join(words)}.{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status: 0 all well, 1 the work failed, 2 the command, or a file, folder or model that it
        needs, can't be used, 130 interrupted, 143 terminated.
    """
    with _terminated_like_interrupted():
        return _main(argv)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems and ``kill`` send it."""


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: its processes are ended, its files closed, its hooks removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _main(argv: Sequence[str] | None) -> int:
    debug = False
    try:
        parser, commands = _parser()
        args, rest = parser.parse_known_args(argv)
        debug = args.debug
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
        print(f"{what}; what was finished is kept, and the same command goes on from there", file=sys.stderr)
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


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="probelens",
        description="Find where a sequence model keeps a variable, and whether it uses it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"probelens {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made: dict[str, _Parser] = {}

    def command(name: str, do: Any, short: str, long: str, examples: str) -> _Parser:
        made[name] = commands.add_parser(
            name, help=short, description=long, epilog=f"examples:\n{examples}\n\n{STATUS}", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        made[name].add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        made[name].set_defaults(do=do)
        return made[name]

    run = command(
        "run", _run, "run a recipe",
        "Run a recipe: a complete experiment with its report. What is finished already is not run again,\n"
        "so after an interruption the same command goes on where it stopped.",
        "  probelens run quickstart\n"
        "  probelens run quickstart --preset smoke --out /tmp/try       everything once, in seconds\n"
        "  probelens run quickstart --set archs=gru,mamba --set seed=1\n"
        "  probelens run quickstart --archs gru,mamba --seed 1              the same: a setting is a flag, too\n"
        "  probelens run quickstart --executor dask --scheduler tcp://10.0.0.1:8786\n"
        "  probelens run quickstart --executor submitit --executor-set partition=gpu --executor-set time=60\n"
        "  probelens list                                               all settings and their defaults",
    )  # fmt: skip
    run.add_argument("recipe", metavar="NAME", help="see `probelens list`")
    run.add_argument("--preset", help="a named set of settings of the recipe")
    _set_option(run, "settings", "--set", "change one setting; repeatable, over the preset's")
    run.add_argument("--out", metavar="FOLDER", help="run folder; the same as --set out=FOLDER")
    run.add_argument(
        "--executor", metavar="NAME",
        help="where cells run: local (processes of this machine, the default), dask, or submitit (SLURM)",
    )  # fmt: skip
    run.add_argument(
        "--scheduler", metavar="ADDRESS", help="of a Dask scheduler that runs; without it one is started here"
    )
    _set_option(
        run, "executor_settings", "--executor-set", "submitit: partition, account, qos, constraint, time (minutes), "
        "cpus, gpus, memory (GB), requeues, cluster (slurm or local), logs; repeatable",
    )  # fmt: skip
    _output_options(run)

    listing = command(
        "list", _list, "recipes, their presets and settings", "What `probelens run` can run.",
        "  probelens list\n  probelens list --json",
    )  # fmt: skip
    listing.add_argument("--json", action="store_true", help="machine-readable")

    report = command(
        "report", _report, "make the report of a run again",
        "Write rows.parquet and report.html of a run folder again, from its saved results; nothing is run.\n"
        "Of an interrupted run it shows what is finished.",
        "  probelens report runs/quickstart",
    )  # fmt: skip
    report.add_argument(
        "folder", metavar="RUN", help="a folder that `probelens run` or `probelens profile` wrote"
    )
    report.add_argument("--json", action="store_true", help="machine-readable")

    hooks = command(
        "hooks", _hooks, "the hook points of a model",
        "Names, axes and modules of every place at which a model can be read and edited.",
        "  probelens hooks EleutherAI/pythia-160m\n"
        "  probelens hooks ./my_model --match 'blocks.0.*'\n"
        "  probelens hooks ./my_model --json | jq -r '.[].name'",
    )  # fmt: skip
    hooks.add_argument("model", metavar="MODEL", help="hub id or folder")
    hooks.add_argument("--match", metavar="GLOB", help="only names that fit, such as 'blocks.0.*'")
    hooks.add_argument("--json", action="store_true", help="machine-readable")

    verify = command(
        "verify", _verify, "try every hook point of a model",
        "Try every hook point of a model: it must fire, an identity edit must change nothing, noise must\n"
        "change the output, and another run's residual stream must bring that run's output back. Exit\n"
        "status 1 if a point fails.",
        "  probelens verify EleutherAI/pythia-160m\n  probelens verify ./my_model --all",
    )  # fmt: skip
    verify.add_argument("model", metavar="MODEL", help="hub id or folder")
    verify.add_argument("--all", action="store_true", help="list the points that pass, too")
    _output_options(verify)

    profile = command(
        "profile", _profile, "where a model keeps a variable, and whether it uses it",
        "Probe, ablate and patch every layer of a model that answers a task, and write profile.safetensors,\n"
        "rows.parquet and report.html. The model's vocabulary must fit the task's. A folder that training\n"
        "left knows its task; any other model needs --task.",
        "  probelens profile runs/quickstart/cells/KEY                  the task it was trained on\n"
        "  probelens profile ./my_model --task dyck --labels depth,top --task-set max_depth=8\n"
        "  probelens profile ./my_model --task S3 --length 60 --set n_probe=1000\n"
        "  probelens profile ./my_model --task parity --json | jq .labels.state.verdict",
    )  # fmt: skip
    profile.add_argument("model", metavar="MODEL", help="hub id or folder")
    profile.add_argument("--task", help="parity, dyck, counter, flip_flop, code_depth, or a group such as S3")
    _set_option(profile, "task_settings", "--task-set", "an argument of the task; repeatable")
    profile.add_argument(
        "--labels", metavar="A,B", help="variables to look for; without it what the task asks for"
    )
    profile.add_argument("--length", type=int, metavar="N", help="tokens in each sequence (default 40)")
    _set_option(
        profile, "settings", "--set", "n_probe, n_ablate, n_pairs, controls, batch_size, seed, …; repeatable"
    )
    profile.add_argument("--out", metavar="FOLDER", help="run folder (default runs/profile-MODEL-TASK)")
    _output_options(profile)
    return parser, made


def _set_option(parser: argparse.ArgumentParser, dest: str, flag: str, text: str) -> None:
    parser.add_argument(flag, action="append", default=[], metavar="KEY=VALUE", dest=dest, help=text)


def _output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--quiet", action="store_true", help="no progress bars; none are shown off a terminal anyway"
    )


def _flags(args: argparse.Namespace, words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Move ``--model X`` and ``--model=X`` into the settings where the recipe has such a setting; what is left over."""
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


def _load(name: str) -> Any:
    from probelens.loading import load

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
    from probelens.experiments import executors

    settings = list(args.executor_settings)
    if args.scheduler is not None:
        if args.executor != "dask":
            raise InputError("--scheduler belongs to --executor dask")
        settings.append(f"scheduler={args.scheduler}")
    if settings and args.executor is None:
        raise InputError("--executor-set belongs to --executor NAME")
    return executors.current() if args.executor is None else executors.named(args.executor, settings)


def _run(args: argparse.Namespace) -> int:
    from probelens.experiments.executors import using

    recipe = _recipe(args.recipe)
    settings = args.settings if args.out is None else [*args.settings, f"out={args.out}"]
    config = configure(recipe.Config, settings, recipe.PRESETS, args.preset)
    with using(_executor(args)):
        folder = Path(recipe.run(config, progress=not args.quiet))
    return _show(_written(folder), args.json)


def _report(args: argparse.Namespace) -> int:
    from probelens import _profile_run
    from probelens.experiments import RunRecord, Store

    folder = Path(args.folder)
    record = RunRecord.load(folder)
    if record.recipe == _profile_run.NAME:
        _profile_run.report_again(folder)
        return _show(_written(folder), args.json)
    recipe = _recipe(record.recipe)
    if not hasattr(recipe, "report"):
        raise InputError(
            f"the recipe {record.recipe!r} can't make its report again. Run it again; what is done is kept"
        )
    # The folder may have been moved, and what it says about its place is not to be trusted.
    config = restore(recipe.Config, {**record.config, "out": str(folder)})
    recipe.report(config, record)
    missing = [key for key in record.cells if not Store(folder).done(key)]
    if missing:
        print(
            f"probelens: {len(missing)} of {len(record.cells)} models are not finished and not in the report; "
            f"`probelens run {record.recipe}` with the same settings goes on",
            file=sys.stderr,
        )
    return _show(_written(folder), args.json)


def _list(args: argparse.Namespace) -> int:
    from probelens.examples import RECIPES

    found: list[dict[str, Any]] = []
    for name in RECIPES:
        recipe = _recipe(name)
        defaults = recipe.Config()
        found.append(
            {
                "name": name,
                "summary": (recipe.__doc__ or "").strip().split("\n")[0],
                "presets": sorted(recipe.PRESETS),
                "settings": {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)},
            }
        )
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


def _hooks(args: argparse.Namespace) -> int:
    import fnmatch

    table = _load(args.model).hook_points()
    if args.match:
        names = list(table["name"])
        table = table[[fnmatch.fnmatchcase(name, args.match) for name in names]]
        if table.empty:
            near = nearest(args.match, names)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise InputError(f"no hook point fits {args.match!r}.{hint} Leave --match out to see all of them")
    print(table.to_json(orient="records", indent=2) if args.json else table.to_string(index=False))
    return 0


def _verify(args: argparse.Namespace) -> int:
    report = _load(args.model).verify(progress=not args.quiet)
    if args.json:
        content = {
            "model": report.model,
            "ok": report.ok,
            "left_behind": report.left_behind,
            "points": report.rows,
        }
        print(json.dumps(content, indent=2))
    else:
        if args.all:
            print(report.to_dataframe().to_string(index=False))
        print(report)
    return 0 if report.ok else 1


def _profile(args: argparse.Namespace) -> int:
    from probelens import _profile_run

    extra = [] if args.length is None else [f"length={args.length}"]
    settings = configure(_profile_run.ProfileSettings, [*args.settings, *extra], {})
    labels = (
        None if args.labels is None else [part.strip() for part in args.labels.split(",") if part.strip()]
    )
    model = _load(args.model)
    task = _profile_run.task_for(model, args.model, args.task, args.task_settings)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{Path(args.model).name}-{task.name}").strip("-")
    folder = Path(f"runs/profile-{name}" if args.out is None else args.out)
    found = _profile_run.profile_model(
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
    return _show({**written, "profile": str(folder / _profile_run.FILE), "labels": about}, True)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: run recipes, and look into a model without writing code."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probelens import __version__
from probelens.errors import InputError, ProbelensError, nearest

__all__ = ["main"]

EPILOG = """examples:
  probelens run quickstart                      train two small models, measure them, write report.html
  probelens run quickstart --set seed=1         the same with another seed
  probelens list                                recipes and their presets
  probelens hooks EleutherAI/pythia-160m        the hook points of a model (hub id or folder)
  probelens verify EleutherAI/pythia-160m       prove that each of them fires and edits what it should

exit status: 0 all well, 1 the run failed, 2 the command can't be understood, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(args.do(args))
    except KeyboardInterrupt:
        print(
            "interrupted; what was finished is kept, and the same command goes on from there", file=sys.stderr
        )
        return 130
    except ProbelensError as err:
        if args.debug:
            raise
        print(f"probelens: {err}", file=sys.stderr)
        return 2 if isinstance(err, InputError) else 1
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="probelens",
        description="Find where a sequence model keeps a variable, and whether it uses it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"probelens {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser(
        "run", parents=[common], help="run a recipe", description="Run a recipe by name."
    )
    run.add_argument("recipe", metavar="NAME", help="see `probelens list`")
    run.add_argument("--preset", default=None, help="a named set of settings of the recipe")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change one setting; repeatable",
    )
    run.add_argument("--quiet", action="store_true", help="no progress bars")
    run.set_defaults(do=_run)

    listing = commands.add_parser("list", parents=[common], help="recipes, their presets and settings")
    listing.add_argument("--json", action="store_true", help="machine-readable")
    listing.set_defaults(do=_list)

    hooks = commands.add_parser("hooks", parents=[common], help="the hook points of a model")
    hooks.add_argument("model", metavar="MODEL", help="hub id or folder")
    hooks.add_argument(
        "--match", default=None, metavar="GLOB", help="only names that fit, such as 'blocks.0.*'"
    )
    hooks.add_argument("--json", action="store_true", help="machine-readable")
    hooks.set_defaults(do=_hooks)

    verify = commands.add_parser(
        "verify", parents=[common], help="try every hook point of a model",
        description="Try every hook point of a model: it must fire, an identity edit must change nothing, noise "
        "must change the output, and another run's residual stream must bring that run's output back. "
        "Exit status 1 if a point fails.",
    )  # fmt: skip
    verify.add_argument("model", metavar="MODEL", help="hub id or folder")
    verify.add_argument("--all", action="store_true", help="list the points that pass, too")
    verify.add_argument("--json", action="store_true", help="machine-readable")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")
    verify.set_defaults(do=_verify)
    return parser


def _recipe(name: str) -> Any:
    from probelens.examples import RECIPES

    if name not in RECIPES:
        raise InputError(
            f"recipe {name!r} not found. Nearest: {nearest(name, RECIPES) or 'none'}. All: {', '.join(RECIPES)}"
        )
    return importlib.import_module(RECIPES[name])


def _run(args: argparse.Namespace) -> int:
    recipe = _recipe(args.recipe)
    config = configure(recipe.Config, args.settings, recipe.PRESETS, args.preset)
    folder = recipe.run(config, progress=not args.quiet)
    report = Path(folder) / "report.html"
    print(report if report.exists() else folder)
    return 0


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

    from probelens.loading import load

    table = load(args.model).hook_points()
    if args.match:
        table = table[[fnmatch.fnmatch(name, args.match) for name in table["name"]]]
        if table.empty:
            raise InputError(f"no hook point fits {args.match!r}. Leave --match out to see all of them")
    print(table.to_json(orient="records", indent=2) if args.json else table.to_string(index=False))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from probelens.loading import load

    report = load(args.model).verify(progress=not args.quiet)
    if args.json:
        content = {"model": report.model, "ok": report.ok, "left_behind": report.left_behind, "points": report.rows}
        print(json.dumps(content, indent=2))
    else:
        if args.all:
            print(report.to_dataframe().to_string(index=False))
        print(report)
    return 0 if report.ok else 1


def configure(
    config: type[Any], settings: Sequence[str], presets: dict[str, dict[str, Any]], preset: str | None = None
) -> Any:
    """A recipe's config from its defaults, a preset and ``key=value`` settings.

    Args:
        config: The dataclass.
        settings: Strings ``key=value``; values are read by the field's type.
        presets: Named changes.
        preset: One of them, or None.

    Raises:
        InputError: An unknown key or preset (with the nearest), or a value of the wrong type.

    Examples:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Config:
        ...     seed: int = 0
        >>> configure(Config, ["seed=3"], {})
        Config(seed=3)
    """
    changes: dict[str, Any] = {}
    if preset is not None:
        if preset not in presets:
            raise InputError(
                f"preset {preset!r} not found. Nearest: {nearest(preset, presets) or 'none'}. "
                f"Allowed: {', '.join(presets) or 'none'}"
            )
        changes.update(presets[preset])
    hints = typing.get_type_hints(config)
    for setting in settings:
        key, sep, value = setting.partition("=")
        if not sep:
            raise InputError(f"--set takes key=value, got {setting!r}")
        if key not in hints:
            raise InputError(
                f"setting {key!r} not found. Nearest: {nearest(key, hints) or 'none'}. Allowed: {', '.join(hints)}"
            )
        changes[key] = _parse(key, value, hints[key])
    try:
        return config(**changes)
    except (TypeError, ValueError) as err:
        if isinstance(err, ProbelensError):
            raise
        raise InputError(f"these settings don't go together: {err}") from err


def _parse(key: str, value: str, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value.lower() in ("none", "null", ""):
            return None
        return _parse(key, value, next(a for a in typing.get_args(hint) if a is not type(None)))
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_parse(key, part.strip(), inner) for part in value.split(",") if part.strip())
    if hint is bool:
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in known:
            raise InputError(f"{key}={value!r}: allowed are true and false")
        return known[value.lower()]
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise InputError(
                f"{key}={value!r} is not {'an integer' if hint is int else 'a number'}"
            ) from None
    return value


if __name__ == "__main__":
    sys.exit(main())

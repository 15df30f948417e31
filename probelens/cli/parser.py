"""What the command line takes and what its help says; what the commands do is in ``cli``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from probelens import __version__
from probelens.bench import command as benchmarks
from probelens.errors import nearest, unknown

STATUS = (
    "exit status: 0 all well, 1 the work failed, 2 the command, or a file, folder or model that it needs, can't be\n"
    "used, 130 interrupted, 143 terminated"
)
RESUMES = "; after both the same command continues from what is finished"
EPILOG = f"""examples:
  probelens run quickstart                      measure two small trained models, write report.html
  probelens run quickstart --set seed=1         the same with another seed
  probelens list                                recipes, their presets and settings
  probelens report runs/quickstart              make the report again from the saved results
  probelens hooks EleutherAI/pythia-160m        the hook points of a model (hub id or folder)
  probelens verify EleutherAI/pythia-160m       prove that each of them fires and edits what it should
  probelens profile MY_MODEL --task dyck        where a model keeps a variable, and whether it uses it
  probelens bench                               compare its speed with other tools on the same work

`probelens COMMAND --help` says more about each command.
{STATUS}{RESUMES}"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations, and whose errors name the nearest option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            what = "command" if "COMMAND" in message else "value"
            message = unknown(what, wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"probelens: {message}. Help: {self.prog} --help\n")

    def unrecognized(self, words: Sequence[str], settings: Sequence[str] = ()) -> NoReturn:
        """Refuse options and arguments that the command doesn't have."""
        options = [o for action in self._actions for o in action.option_strings]
        options += [f"--{name.replace('_', '-')}" for name in settings]
        near = nearest(words[0].partition("=")[0], list(dict.fromkeys(options)))
        hint = f" Nearest: {', '.join(near)}" if near else ""
        self.error(f"{self.prog} doesn't take {' '.join(words)}.{hint}")


def build(do: Mapping[str, Callable[[argparse.Namespace], int]]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line and those of its commands; parsed arguments have what to ``do``."""
    about = "Find where a sequence model keeps a variable, and whether it uses it."
    parser = Parser(prog="probelens", description=about, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"probelens {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made: dict[str, Parser] = {}

    def command(name: str, short: str, long: str, examples: str, after: str = "") -> Parser:
        made[name] = commands.add_parser(
            name, help=short, description=long, epilog=f"examples:\n{examples}\n\n{STATUS}{after}"
        )
        made[name].add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        made[name].set_defaults(do=do[name])
        return made[name]

    run = command(
        "run", "run a recipe",
        "Run a recipe: a complete experiment with its report. Finished cells are not run again,\n"
        "so after an interruption the same command continues where it stopped.",
        "  probelens run quickstart\n"
        "  probelens run quickstart --preset smoke --out /tmp/try       everything once, in seconds\n"
        "  probelens run quickstart --set archs=gru,mamba --set seed=1\n"
        "  probelens run quickstart --archs gru,mamba --seed 1              the same: a setting is a flag, too\n"
        "  probelens run quickstart --executor dask --scheduler tcp://10.0.0.1:8786\n"
        "  probelens run quickstart --executor submitit --executor-set partition=gpu --executor-set time=60\n"
        "  probelens list                                               all settings and their defaults",
        RESUMES,
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
        "list", "recipes, their presets and settings", "What `probelens run` can run.",
        "  probelens list\n  probelens list --json",
    )  # fmt: skip
    listing.add_argument("--json", action="store_true", help="machine-readable")

    report = command(
        "report", "make the report of a run again",
        "Write rows.parquet and report.html of a run folder again, from its saved results; nothing is run.\n"
        "Of an interrupted run it shows what is finished.",
        "  probelens report runs/quickstart",
    )  # fmt: skip
    report.add_argument("folder", metavar="RUN", help="a folder that `probelens run` or `probelens profile` wrote")
    report.add_argument("--json", action="store_true", help="machine-readable")

    hooks = command(
        "hooks", "the hook points of a model",
        "Names, axes and modules of every place at which a model can be read and edited.",
        "  probelens hooks EleutherAI/pythia-160m\n"
        "  probelens hooks ./my_model --match 'blocks.0.*'\n"
        "  probelens hooks ./my_model --json | jq -r '.[].name'",
    )  # fmt: skip
    hooks.add_argument("model", metavar="MODEL", help="hub id or folder")
    _match_option(hooks)
    hooks.add_argument("--json", action="store_true", help="machine-readable")

    verify = command(
        "verify", "try every hook point of a model",
        "Try every hook point of a model: it must fire, an identity edit must change nothing, noise must\n"
        "change the output, and another run's residual stream must bring that run's output back. Exit\n"
        "status 1 if a point fails.",
        "  probelens verify EleutherAI/pythia-160m\n  probelens verify ./my_model --all\n"
        "  probelens verify ./my_model --match 'blocks.0.*'",
    )  # fmt: skip
    verify.add_argument("model", metavar="MODEL", help="hub id or folder")
    _match_option(verify)
    verify.add_argument("--all", action="store_true", help="also list the points that pass")
    _output_options(verify)

    profile = command(
        "profile", "where a model keeps a variable, and whether it uses it",
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
    profile.add_argument("--labels", metavar="A,B", help="variables to look for; without it what the task asks for")
    profile.add_argument("--length", type=int, metavar="N", help="tokens in each sequence (default 40)")
    _set_option(profile, "settings", "--set", "n_probe, n_ablate, n_pairs, controls, batch_size, seed, …; repeatable")
    profile.add_argument("--out", metavar="FOLDER", help="run folder (default runs/profile-MODEL-TASK)")
    _output_options(profile)

    bench = command("bench", benchmarks.SHORT, benchmarks.LONG, benchmarks.EXAMPLES)
    benchmarks.add_options(bench)
    bench.set_defaults(kept="rows that were finished are printed, and kept with --out")
    _output_options(bench)
    return parser, made


def _set_option(parser: argparse.ArgumentParser, dest: str, flag: str, text: str) -> None:
    parser.add_argument(flag, action="append", default=[], metavar="KEY=VALUE", dest=dest, help=text)


def _match_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--match", metavar="NAMES", action="append",
        help="only these: names, shorthands and globs with commas between them, 'blocks.0.*' or resid_post,embed; a number "
        "is a layer of the name before it: resid_post,0,-1; may be repeated",
    )  # fmt: skip


def _output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--quiet", action="store_true", help="no progress bars; none are shown off a terminal anyway")

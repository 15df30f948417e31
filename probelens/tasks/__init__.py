"""Tasks: strings with a known state at every position, and pairs of them that differ in one token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from probelens.errors import InputError
from probelens.tasks.base import Task
from probelens.tasks.baselines import baseline_predictions, baselines
from probelens.tasks.code.code_depth import CodeDepth
from probelens.tasks.counter import Counter
from probelens.tasks.data import Batch
from probelens.tasks.drawing.arguments import choice
from probelens.tasks.dyck import Dyck
from probelens.tasks.examples import Constant
from probelens.tasks.flip_flop import FlipFlop
from probelens.tasks.group_words import GroupWords
from probelens.tasks.pairs import PatchPairs
from probelens.tasks.parity import Parity

__all__ = [
    "Batch",
    "CodeDepth",
    "Constant",
    "Counter",
    "Dyck",
    "FlipFlop",
    "GroupWords",
    "Parity",
    "PatchPairs",
    "Task",
    "baseline_predictions",
    "baselines",
    "make",
]

_TASKS: tuple[type[Task], ...] = (Parity, GroupWords, Dyck, Counter, FlipFlop, CodeDepth)


def make(config: Mapping[str, Any] | str, **options: Any) -> Task:
    """A task from its name or its ``config``, for configuration files and command lines.

    Args:
        config: ``task.config`` of an existing task, or the name of a class, in any case and with or without
            underscores. A group such as "S3" gives `GroupWords`.
        options: Arguments of the task, over those in ``config``.

    Returns:
        The task.

    Raises:
        InputError: An unknown task, or an argument it doesn't have.

    Examples:
        >>> make("dyck", max_depth=4)
        Dyck(k=2, max_depth=4, noop=0.0, target='depth', bos=False)
        >>> make(make("S3").config)
        GroupWords(group='S3', generators='all', target='state', bos=False)
    """
    options = {**({} if isinstance(config, str) else config), **options}
    name = config if isinstance(config, str) else options.pop("task", None)
    classes = {cls.__name__.lower(): cls for cls in _TASKS}
    key = str(name).replace("_", "").replace("-", "").lower()
    if key not in classes and key[:1] in "zsa" and key[1:].isdigit():
        key, options = "groupwords", {"group": key.upper(), **options}
    if key not in classes:
        snake = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower() for cls in _TASKS if cls is not GroupWords)
        # Words of a group are named by the group.
        choice("task", name, (*snake, "S3", "Z5", "A5"))
    cls = classes[key]
    try:
        return cls(**options)
    except TypeError as err:
        raise InputError(f"{cls.__name__} can't be made from {options}: {err}. See help({cls.__name__}).") from None

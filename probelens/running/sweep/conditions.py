"""What a sweep runs and keeps: interventions, conditions of several of them, and what is read of each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from probelens.errors import metric_note, noted
from probelens.hooks.points import HookFn


@dataclass(frozen=True)
class Intervention:
    """One hook at one hook point, made anew for each batch of examples.

    Args:
        name: Hook point.
        edit_for: From the numbers of a batch's examples to the hook function that they get, which is usually one of
            ``pl.edits``: ``lambda rows: pl.edits.replace(values[rows], pos=columns[rows])``. It should hold
            nothing of other batches, since a hook may be sent to where the model runs.
        first: The first position that may change in each example, for a plan; None if that isn't known.
            What runs doesn't depend on it. (example,)
    """

    name: str
    edit_for: Callable[[Tensor], HookFn]
    first: Tensor | None = None

    def earliest(self, rows: Tensor) -> int:
        """The first position that may change in any of some examples, as far as ``first`` says."""
        return 0 if self.first is None else int(self.first[rows].min())


@dataclass(frozen=True)
class Condition:
    """Interventions that are in place together during one run, named by a key; none for an unedited run."""

    key: tuple[Any, ...]
    interventions: tuple[Intervention, ...]


@dataclass(frozen=True)
class Read:
    """What is kept of each run.

    Args:
        fn: ``fn(logits, **rows)`` to a value for each example. Logits (batch, read, d_vocab), or outputs (batch, ...) where
            the model answers once for each example.
        pos: Positions read of each example; None for all. (example, read)
        data: Tensors with one row an example, given to ``fn``, or functions from the numbers of examples to their rows.
            (example, ...)
        by_position: Whether the model answers at each position.
    """

    fn: Callable[..., Tensor]
    pos: Tensor | None = None
    data: Mapping[str, Tensor | Callable[[Tensor], Tensor]] = field(default_factory=dict)
    by_position: bool = True

    def value(self, logits: Tensor, rows: Tensor) -> Tensor:
        """What is kept of some examples' logits at the positions read: (batch, read, d_vocab) -> (batch, ...)."""
        fn = self.fn
        given = {**self.data, **getattr(fn, "references", {})}
        data = {k: (v[rows] if isinstance(v, Tensor) else v(rows)).to(logits.device) for k, v in given.items()}
        # The library's own readers name the metric that they were given.
        if str(getattr(fn, "__module__", "")).partition(".")[0] == "probelens":
            return fn(logits, **data)
        with noted(lambda: metric_note(fn, ", ".join(["logits", *(f"{key}={key}" for key in data)]))):
            return fn(logits, **data)

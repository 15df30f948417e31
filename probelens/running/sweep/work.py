"""What a sweep has to run, on which model, and how much it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.trials import fingerprint
from probelens.running.shapes import positions_at
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.memory import Sizes
from probelens.running.sweep.resumer import distrusted
from probelens.tasks.examples import Examples


@dataclass(eq=False)
class Work:
    """What a sweep has to run on a model as it is now, and what it may hold: ``plan`` says what each argument is.

    ``always`` is in place in every run, also in the one called unedited. ``sizes`` are the bytes of an example's tensors, ``state`` is what of the model a plan depends on, ``n_read`` the
    positions read of each example. Raises ShapeError for positions to read of other examples than the inputs'.
    """

    model: HookedModel
    examples: Examples
    conditions: Sequence[Condition]
    read: Read
    mask: Tensor | None
    batch_size: int
    memory: int | None
    source: int | Callable[[], int]
    always: Sequence[Intervention] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Sent to a worker without what follows from the fields, which is of the model that is there.
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    def __post_init__(self) -> None:
        self.examples = Examples.of(self.examples)
        model, n, where, source = self.model, len(self.examples), self.read.pos, self.source
        if where is not None and (where.ndim != 2 or len(where) != n):
            raise ShapeError(f"read positions must be (example, read) with {n} examples, got {tuple(where.shape)}")
        self.length = _length(model, self.examples, self.mask)
        # A function is asked again by a plan made anew: the model's dtype may be another by then.
        self.sizes = Sizes.of(model, self.length, self.read, source() if callable(source) else source)
        self.batch_size = min(self.batch_size, n)
        self.state = state_of(model)
        self.n_layers = model.cfg.n_layers
        self.n_read = (self.length if self.read.by_position else 1) if where is None else where.shape[1]


def _length(model: HookedModel, examples: Examples, mask: Tensor | None) -> int:
    """Positions of the residual stream, which inputs other than tokens don't tell."""
    if examples.plain:
        return examples.main.shape[1]
    first = "blocks.0.hook_resid_pre"
    found = positions_at(model, examples, [first], mask) if first in model.hook_dict else {}
    return found.get(first) or examples.length or 1


def state_of(model: HookedModel) -> tuple[Any, ...]:
    """What of a model a plan depends on and the caller may change: equal as long as nothing of it changed."""
    hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules())
    return (
        model.has_hooks(), hooked, model.cfg.dtype, model.cfg.device, distrusted(model), fingerprint(model.module),
    )  # fmt: skip

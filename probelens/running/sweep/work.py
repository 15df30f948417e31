"""What a sweep has to run, on which model, and how much it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.trials import fingerprint
from probelens.running.sweep.conditions import Condition, Read
from probelens.running.sweep.memory import Sizes
from probelens.running.sweep.resumer import distrusted

__all__ = ["Work", "state_of"]


@dataclass(frozen=True, eq=False)
class Work:
    """What a sweep has to run.

    Args:
        model: The wrapped model.
        tokens: Inputs. (example, pos)
        conditions: What to run.
        read: What to keep.
        mask: 1 for real tokens; None for all. (example, pos)
        batch_size: Examples of a batch, at most.
        memory: Bytes that may be held; None for the usual limits.
        source: Bytes that the conditions hold for an example of the batch, or a function that gives them.
        sizes: Bytes of an example's tensors.
        state: What of the model a plan depends on, as it was when the plan was made.
    """

    model: HookedModel
    tokens: Tensor
    conditions: Sequence[Condition]
    read: Read
    mask: Tensor | None
    batch_size: int
    memory: int | None
    source: int | Callable[[], int]
    sizes: Sizes
    state: tuple[Any, ...]

    @classmethod
    def of(
        cls, model: HookedModel, tokens: Tensor, conditions: Sequence[Condition], read: Read, mask: Tensor | None,
        batch_size: int, memory: int | None, source: int | Callable[[], int],
    ) -> Work:  # fmt: skip
        """The work on a model as it is now.

        Raises:
            ShapeError: Positions to read of other examples than the inputs'.
        """
        if read.pos is not None and (read.pos.ndim != 2 or len(read.pos) != len(tokens)):
            raise ShapeError(
                f"read positions must be (example, read) with {len(tokens)} examples, got {tuple(read.pos.shape)}"
            )
        # A function is asked again by a plan made anew: the model's dtype may be another by then.
        sizes = Sizes.of(model, tokens, read, source() if callable(source) else source)
        size = min(batch_size, len(tokens))
        return cls(model, tokens, conditions, read, mask, size, memory, source, sizes, state_of(model))

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return self.model.cfg.n_layers

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return self.tokens.shape[1]

    @property
    def n_read(self) -> int:
        """Positions read of each example."""
        return self.length if self.read.pos is None else self.read.pos.shape[1]


def state_of(model: HookedModel) -> tuple[Any, ...]:
    """What of a model a plan depends on and the caller may change.

    Args:
        model: The wrapped model.

    Returns:
        Equal as long as nothing of it changed.
    """
    hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules())
    return (
        model.has_hooks(), hooked, model.cfg.dtype, model.cfg.device, distrusted(model), fingerprint(model.module),
    )  # fmt: skip

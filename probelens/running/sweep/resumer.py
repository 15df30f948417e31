"""What an adapter gives for runs that begin in the middle of a sequence, and which models it was wrong for.

In a causal model an edit changes nothing before its position. A run can begin at the first changed position of a
block if what later positions need of earlier ones is kept: keys and values, or recurrent states.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.trials import recall, remember

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel

# Answered with the longest sequence on which resumed runs were seen to be right, or with _WRONG.
_QUESTION, _WRONG = "resume", -1


class Resumer(ABC):
    """Runs of one model that begin at a block and at a position."""

    # Bytes that may be kept of a batch where the caller names no budget.
    BUDGET: ClassVar[int] = 1 << 30
    # Positions from one kept state to the next. A sweep sets it before it runs.
    spacing = 1

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.n = model.cfg.n_layers

    @property
    def trusted(self) -> int:
        """The longest sequence on which a run from the middle was seen to equal a whole one, of the model as it is."""
        return max(0, recall(self.model, self.model.module, _QUESTION) or 0)

    @trusted.setter
    def trusted(self, length: int) -> None:
        remember(self.model, self.model.module, _QUESTION, length)

    @abstractmethod
    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        """Bytes that ``base`` keeps of some sequences for later positions, with what it needs while it runs."""

    @abstractmethod
    def copied(self, batch: int, length: int) -> int:
        """Bytes that one condition needs in a pass, at most, for its own copy of what was kept."""

    def spacings(self, length: int) -> range:
        """Distances that are possible between kept states, the closest first."""
        return range(1, 2)

    def fit(self, batch: int, length: int, memory: int) -> int | None:
        """The closest spacing whose ``holds`` is at most ``memory`` bytes; None if there is none."""
        return next((s for s in self.spacings(length) if self.holds(batch, length, s) <= memory), None)

    @abstractmethod
    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Run without edits, cache the named points, and keep what later positions need of earlier ones.

        Returns the residual after the last block (example, pos, d_model), and the cache.
        """

    def forward(self, tokens: Tensor, names: Iterable[str], **arguments: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The residual after the last block, and what the named points saw; edits within block 0 need none."""
        if wanted := list(names):
            return self.model.run_with_cache(tokens, wanted, stop_at_layer=self.n, **arguments)
        return self.model(tokens, stop_at_layer=self.n, **arguments), {}

    def floor(self, pos: int) -> int:
        """The last position up to ``pos`` at which a run can begin."""
        return pos - pos % self.spacing

    @abstractmethod
    def tail(self, resid: Tensor, layer: int, pos: int, until: int) -> Tensor:
        """Run from a block and a position that ``floor`` gives on, up to block ``until``, for several conditions at once.

        ``resid`` (condition · example, pos from ``pos`` on, d_model) is what enters the block; the result has its shape.
        """

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which whole runs give exactly the numbers that ``base`` gives."""
        return contextlib.nullcontext()

    def overhead(self) -> float:
        """The fixed cost of a pass, in tokens."""
        block = self.model.module.get_submodule(self.model.adapter.blocks[0])
        weights = max(1, sum(p.numel() for p in block.parameters()))
        # Measured on one core: about 2 ms a block, beside 2 · weights operations a token at 1e11 a second.
        return (1e8 if self.model.cfg.device.type == "cpu" else 3e9) / weights


def resumer_of(model: HookedModel) -> Resumer | None:
    """The model's resumer; None where there is none, or runs from the middle were found to give other numbers."""
    found = None if distrusted(model) else model.adapter.resumer(model)
    if found is not None and not isinstance(found, Resumer):
        raise InputError(
            f"{type(model.adapter).__name__}.resumer() gave a {type(found).__name__}. It must give a "
            "probelens.running.sweep.resumer.Resumer, or None"
        )
    return found


def distrust(model: HookedModel) -> None:
    """Don't resume runs of this model again, as it is."""
    remember(model, model.module, _QUESTION, _WRONG)


def distrusted(model: HookedModel) -> bool:
    """Whether runs from the middle were found to give other numbers on this model, as it is."""
    return recall(model, model.module, _QUESTION) == _WRONG

"""What an adapter gives for runs that begin in the middle of a sequence, and which models it was wrong for.

In a causal model an edit changes nothing before its position. A run can begin at the first changed position of a
block if what later positions need of earlier ones is kept: keys and values, or recurrent states.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.inputs import between, has_gap, positions_for_padding
from probelens.hooks.trials import recall, remember
from probelens.running.sweep.rounding import Rounding

if TYPE_CHECKING:
    from probelens.hooks.config import Call
    from probelens.hooks.model import HookedModel

# Answered for each kind of padding.
_QUESTION = "resume"


@dataclass(frozen=True)
class Tried:
    """What trials of runs from the middle found.

    Args:
        length: The longest sequence on which they were right; −1 where they were wrong.
        rounding: In half precision, how far they were off.
    """

    length: int = 0
    rounding: Rounding | None = None


class Resumer(ABC):
    """Runs of one model that begin at a block and at a position."""

    # Bytes that may be kept of a batch where the caller names no budget.
    BUDGET: ClassVar[int] = 1 << 30
    # Whether ``base`` and ``tail`` treat the ``mask`` as a whole run does. Where they don't, padded inputs aren't resumed.
    masks: ClassVar[bool] = False
    # Tokens of a pass on a CPU, beyond which more at once aren't faster.
    TOKENS: ClassVar[int] = 2048
    # Whether each condition of a pass begins at its own position, and costs nothing before it.
    joins = False
    # Positions from one kept state to the next. A sweep sets it before it runs.
    spacing = 1
    # 1 for real tokens, in the batch that runs; None where the model is given no mask. A sweep sets it before ``base``.
    mask: Tensor | None = None
    # The positions that a whole run of the batch is given, where the model counts padding unless it is.
    _counted: Tensor | None = None

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.n = model.cfg.n_layers

    def trusted(self, padding: str = "") -> int:
        """The longest sequence on which a run from the middle was seen to equal a whole one, of the model as it is.

        ``padding`` is the kind of it, as ``padding_of`` says: each is tried by itself.
        """
        return max(0, tried(self.model, padding).length)

    def trust(self, length: int, padding: str = "", rounding: Rounding | None = None) -> None:
        """Remember that a run of so many positions was right, in half precision up to such rounding."""
        _answer(self.model, padding, Tried(length, rounding))

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
        if self.mask is not None:
            arguments |= {"attention_mask": self.mask, **self._positions(tokens)}
        if wanted := list(names):
            return self.model.run_with_cache(tokens, wanted, stop_at_layer=self.n, **arguments)
        return self.model(tokens, stop_at_layer=self.n, **arguments), {}

    def _positions(self, tokens: Tensor) -> dict[str, Tensor]:
        """The ``position_ids`` that a whole run of padded tokens is given, if any; kept for ``tail_call``."""
        given = positions_for_padding(self.model, self.mask, {}, tokens)
        self._counted = given.get("position_ids")
        return given

    def tail_call(self, resid: Tensor, layer: int, pos: int, extra: Mapping[str, Any]) -> Call:
        """The call of ``tail``, which is given the padding of the positions before, too.

        Args:
            resid: What enters block ``layer``. (condition · example, pos from ``pos`` on, d_model)
            layer: Block.
            pos: Position.
            extra: Keywords for the module's forward.
        """
        if self.mask is None:
            return self.model.prepare(resid, start=layer, extra=extra)
        copies = len(resid) // len(self.mask)
        if self._counted is not None:
            extra = {**extra, "position_ids": self._counted[:, pos:].repeat(copies, 1)}
        # What the model does with a mask was tried when ``base`` ran.
        return self.model.adapter.resid_call(resid, self.mask.repeat(copies, 1), dict(extra))

    def floor(self, pos: int) -> int:
        """The last position up to ``pos`` at which a run can begin."""
        return pos - pos % self.spacing

    @abstractmethod
    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        """Run from a block and a position that ``floor`` gives on, up to block ``until``, for several conditions at once.

        ``resid`` (condition · example, pos from ``pos`` on, d_model) is what enters the block; the result has its shape.
        ``begins`` says before which position that is the unedited run's for each condition, not decreasing; None for ``pos``.
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
    """The model's resumer; None where there is none."""
    found = model.adapter.resumer(model)
    if found is not None and not isinstance(found, Resumer):
        raise InputError(
            f"{type(model.adapter).__name__}.resumer() gave a {type(found).__name__}. It must give a "
            "probelens.running.sweep.resumer.Resumer, or None"
        )
    return found


def padding_of(mask: Tensor | None) -> str:
    """What kind of padding a batch has, in words; "" where the model is given no mask. Mask (example, pos)."""
    if mask is None:
        return ""
    kind = "none" if bool(mask.all()) else "before real tokens" if has_gap(mask) else "on the right"
    kind = "between real tokens" if bool(between(mask).any()) else kind
    # Some models skip the mask for a batch of one.
    return f"{kind}, of one example" if len(mask) == 1 else kind


def distrust(model: HookedModel, padding: str = "", rounding: Rounding | None = None) -> None:
    """Don't resume runs of this model with such padding again, as it is."""
    _answer(model, padding, Tried(-1, rounding))


def distrusted(model: HookedModel) -> frozenset[str]:
    """The kinds of padding with which runs from the middle were found to give other numbers on this model, as it is."""
    return frozenset(padding for padding, found in _answers(model).items() if found.length < 0)


def why_distrusted(model: HookedModel) -> str:
    """Why a model that was tried isn't resumed, in words."""
    said = [
        str(found.rounding) for found in _answers(model).values() if found.length < 0 and found.rounding is not None
    ]
    return "; ".join(["a trial on this model gave other numbers", *said[:1]])


def tried(model: HookedModel, padding: str = "") -> Tried:
    """What trials with such padding found of this model, as it is."""
    return _answers(model).get(padding, Tried())


def _answers(model: HookedModel) -> dict[str, Tried]:
    return recall(model, model.module, _QUESTION) or {}


def _answer(model: HookedModel, padding: str, found: Tried) -> None:
    remember(model, model.module, _QUESTION, {**_answers(model), padding: found})

"""What probelens asks of a wrapped model: the Protocol by which its parts are typed.

A ``HookedModel`` has all of it. Anything else that does can take its place in ``verify``, in trials and in caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, ModelConfig
from probelens.hooks.names import Points
from probelens.hooks.passes.turns import Turn
from probelens.hooks.shorthand import Names
from probelens.hooks.switchboard import Switchboard

__all__ = ["Wrapped"]


class Wrapped(Protocol):
    """A wrapped model: a module, what its architecture says about itself, its hook points, and ways to run it."""

    module: nn.Module
    adapter: Adapter
    points: Points
    switchboard: Switchboard
    turn: Turn

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the model."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""

    def __call__(
        self, inputs: Any, *, stop_at_layer: int | None = None, start_at_layer: int | None = None, **kw: Any
    ) -> Any:
        """Run the model, or some blocks of it: logits (batch, pos, d_vocab), or a residual (batch, pos, d_model)."""

    def run_with_hooks(self, inputs: Any, fwd_hooks: Iterable[tuple[Names, Any]] = (), **kw: Any) -> Any:
        """Run once with hooks; see ``HookedModel.run_with_hooks``.

        Args:
            inputs, fwd_hooks: As for ``HookedModel.run_with_hooks``.
            **kw: As for calling the model.

        Returns:
            As calling the model does.
        """

    def run_with_cache(self, inputs: Any, names_filter: Names = None, **kw: Any) -> tuple[Any, Mapping[str, Tensor]]:
        """Run once and keep activations; see ``HookedModel.run_with_cache``.

        Args:
            inputs, names_filter: As for ``HookedModel.run_with_cache``.
            **kw: As for calling the model.

        Returns:
            The output, and activations by full name. (batch, pos, ...)
        """

    def prepare(
        self, inputs: Any, mask: Tensor | None = None, start: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Call:  # fmt: skip
        """The call of the module that inputs ask for.

        Args:
            Those of ``HookedModel.prepare``.

        Returns:
            A call for ``run``.
        """

    def run(self, call: Call, *, start: int | None = None, stop: int | None = None, resid: Tensor | None = None) -> Any:
        """Run a prepared call, or some blocks of it, without checking that hooks fire.

        Args:
            Those of ``HookedModel.run``.

        Returns:
            What the module returned; with ``stop`` the residual (batch, pos, d_model).
        """

    def evaluating(self) -> AbstractContextManager[Any]:
        """Eval mode inside the block."""

    def undisturbed(self) -> AbstractContextManager[Any]:
        """Eval mode inside the block, and no call of another thread meanwhile."""

    def can_skip(self) -> bool:
        """Whether ``start_at_layer`` and ``stop_at_layer`` reach every block and the readout."""

    def can_start_at(self, layer: int, inputs: Any = None) -> bool:
        """Whether the residual entering a block is all that the rest of the model depends on.

        Args:
            Those of ``HookedModel.can_start_at``.

        Returns:
            False also where that could not be tried.
        """

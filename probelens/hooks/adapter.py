"""Adapter: what an architecture says about itself so that every other part works on it.

A subclass names the blocks and the modules around them. The base class makes hook points of these, calls the model, and
starts at or stops before a block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.config import Call, ModelConfig, pick, tokenized
from probelens.hooks.forwards import (
    attach_to_module,
    called_with,
    device_of,
    length_of_output,
    passed_over,
    stopped_before,
    submodule,
)
from probelens.hooks.passes.current import arguments
from probelens.hooks.passes.turns import in_eval_mode
from probelens.hooks.points import NOTES, HookPoint, boundary, interior
from probelens.hooks.switchboard import Switchboard, Tap

__all__ = ["Adapter"]


class Adapter:
    """Base of all adapters.

    A subclass sets ``name`` and, in ``__init__``, calls ``super().__init__(module)`` and fills
    ``cfg``, ``blocks`` (module paths in order) and ``parts`` (paths of "embed", "ln_final" and
    "unembed", as far as they exist). It adds ``block_points`` for what is inside a block.

    Args:
        module: The user's module. It is never changed.
    """

    name: ClassVar[str] = ""
    priority: ClassVar[int] = 50
    options: ClassVar[tuple[str, ...]] = ()
    # Whether the options say all there is to know, so that the adapter takes modules it doesn't match.
    any_module: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    nonlinear_head: bool = False  # whether more than a linear layer reads the final norm, or the last block
    # What is known of its points: all, the axes but not the number of calls, or neither. The rest is tried.
    layout: Literal["known", "calls", "unknown"] = "known"
    tries_layout: ClassVar[bool] = True
    batch_first: bool | None = None
    resid_axis: int = 0  # where blocks have their examples
    # Whether the weights that run are those of ``module``, so that edits of them count.
    has_weights: ClassVar[bool] = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.blocks: list[str] = []
        self.parts: dict[str, str] = {}
        # From canonical path segments to the module's own: {"mixer": "mixer"}; {"1.mixer": "inner.mixer"} for block 1.
        self.segments: dict[str, str] = {}
        self.lens_names: dict[str, str] = {}  # of TransformerLens: to names here, or to "transformer.h.1.ln_2.hook_in"
        self.cfg = ModelConfig(n_layers=0, d_model=0)
        self.tokenizer: Any = None
        self._block_outputs: int | None = None

    @classmethod
    def matches(cls, module: Any) -> bool:
        """Whether this adapter knows the module. Must be cheap and import nothing heavy.

        Args:
            module: Any object that a user passes to ``wrap``.

        Returns:
            True if ``wrap`` may choose this adapter.
        """
        return False

    @classmethod
    def adapt(cls, module: Any, **options: Any) -> Adapter:
        """The adapter for a module that this class matches. ``probelens.wrap`` makes a HookedModel with it.

        Args:
            module: The user's module.
            options: Passed to the adapter.

        Returns:
            An adapter: of this class, or of another one that the module's kind needs.
        """
        return cls(module, **options)

    # -- hook points ---------------------------------------------------------------------------

    def points(self) -> list[HookPoint]:
        """Every hook point, in the order in which a forward pass reaches them."""
        out: list[HookPoint] = []
        if "embed" in self.parts:
            out.append(self.boundary("hook_embed", self.parts["embed"], "out", note=NOTES["embed"]))
        for layer, path in enumerate(self.blocks):
            prefix = f"blocks.{layer}."
            out.append(self.boundary(prefix + "hook_resid_pre", path, "in", note=NOTES["resid_pre"]))
            out.extend(self.block_points(layer, path))
            out.append(self.boundary(prefix + "hook_resid_post", path, "out", note=NOTES["resid_post"]))
        return out + self.readout_points()

    def readout_points(self) -> list[HookPoint]:
        """Input and output of the final norm and of the unembedding, as far as they exist."""
        out: list[HookPoint] = []
        for part, axis in (("ln_final", "d_model"), ("unembed", "d_vocab")):
            if part in self.parts:
                path, axes = self.parts[part], ("batch", "pos", axis)
                out.append(self.boundary(f"{part}.hook_in", path, "in", note=NOTES[f"{part}_in"]))
                note = NOTES[f"{part}_out"]
                out.append(self.boundary(f"{part}.hook_out", path, "out", axes=axes, note=note))
        return out

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        """Points between a block's resid_pre and resid_post. The base class has none.

        Args:
            layer: Number of the block.
            path: Its module path.

        Returns:
            Points in the order in which they are computed.
        """
        return []

    def absent(self, name: str) -> str | None:
        """Why a point that other architectures have is absent here, or None.

        Args:
            name: Canonical name of a point.

        Returns:
            One sentence for the user, or None if there is nothing to say.
        """
        return None

    def renormed(self, layer: int) -> bool:
        """Whether a block begins with a norm of the residual stream itself, not of what it reads from it.

        Args:
            layer: Number of the block.

        Returns:
            False in the base class.
        """
        return False

    def unsummed(self, layer: int) -> str | None:
        """Why what the blocks before ``layer`` add doesn't sum to the residual stream, or None.

        Args:
            layer: Number of a block; the number of blocks for all.

        Returns:
            One sentence for the user, or None where it sums.
        """
        return None

    def find(self, name: str) -> HookPoint | None:
        """A point that isn't advertised but can be hooked under a name of the backend's own, or None.

        Args:
            name: A name that isn't among the advertised points.

        Returns:
            The point, or None if there is none.
        """
        return None

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        """Make the model call ``switchboard.fire(point.name, tensor)`` at a boundary point.

        Args:
            switchboard: Where to hand the tensor.
            point: The boundary point.

        Returns:
            Handles whose ``remove()`` undoes it.
        """
        return attach_to_module(switchboard, point)

    boundary = staticmethod(boundary)
    interior = staticmethod(interior)

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        """Swap in the instrumented forward of one module while the context lasts.

        Args:
            path: Module path.
            tap: Who listens and edits inside it.

        Returns:
            A context, after which the module's own forward is restored.

        Raises:
            InputError: The adapter has no instrumented forward for this module.
        """
        raise InputError(f"adapter {self.name!r} has no instrumented forward for {path!r}")

    def instrumented_paths(self) -> list[str]:
        """Modules that have an instrumented forward: what ``backend("reference")`` swaps in."""
        return []

    def required_paths(self) -> list[str]:
        """Modules that can't run their own forward here, so that every run uses the instrumented one. None by default."""
        return []

    def faster_paths(self) -> list[str]:
        """Modules whose instrumented forward is faster here and equal up to rounding, for collecting and sweeps."""
        return []

    def tap_names(self, path: str) -> dict[str, str]:
        """From an instrumented forward's short names to canonical ones, for the module at ``path``.

        Args:
            path: Module path.

        Returns:
            Canonical name by short name, interior points only.
        """
        return {
            point.name.rsplit(".", 1)[1]: point.name
            for point in self.all_points
            if point.kind == "interior" and point.module == path
        }

    @functools.cached_property
    def all_points(self) -> list[HookPoint]:
        """``points()``, made once."""
        return self.points()

    # -- calling the model ---------------------------------------------------------------------

    def device(self) -> torch.device:
        """Where the inputs go: the device of the embedding, otherwise of the first parameter."""
        places = (device_of(submodule(self.module, path)) for path in (self.parts.get("embed", ""), ""))
        return next(filter(None, places), torch.device("cpu"))

    def blocks_with(self, path: str) -> list[int]:
        """The blocks that a module is, or lies in.

        Args:
            path: Module path.

        Returns:
            Their numbers: several where one module holds several blocks, as a fused recurrent stack does; none
            outside the blocks.
        """
        return [i for i, block in enumerate(self.blocks) if f"{path}.".startswith(f"{block}.")]

    def accepts(self, keyword: str) -> bool:
        """Whether the module's forward takes this keyword.

        Args:
            keyword: Name of an argument.

        Returns:
            True where it is an argument by name; a forward that takes any keyword may ignore it.
        """
        return keyword in arguments(type(self.module).forward)

    def tokenize(self, texts: list[str], prepend_bos: bool | None) -> tuple[Tensor, Tensor | None]:
        """Token ids of texts, padded to the longest.

        Args:
            texts, prepend_bos: As for ``tokenized``.

        Returns:
            Ids (batch, pos), and 1 for real tokens (batch, pos) where padding was needed, None otherwise.
        """
        return tokenized(self.tokenizer, texts, prepend_bos, self.device())

    def call(self, tokens: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        """Arguments for a run on tokens (or on whatever tensor the module takes).

        Args:
            tokens: The input, on the right device. (batch, pos)
            mask: 1 for real tokens, 0 for padding. (batch, pos)
            extra: Further keywords from the user.

        Returns:
            Positional arguments, keywords, and the tokens if they are any.

        Raises:
            InputError: A mask for a module whose forward takes no attention_mask.
        """
        if mask is not None:
            if not self.accepts("attention_mask"):
                raise InputError(
                    f"{type(self.module).__name__}.forward takes no attention_mask. "
                    "Pad on the right and ignore those positions (where the model reads both ways, run sequences of "
                    "equal length together), or pass inputs as a mapping."
                )
            extra = {**extra, "attention_mask": mask}
        return Call((tokens,), extra, tokens if not tokens.is_floating_point() else None, mask)

    def apply_lazy_rescaling(self) -> None:
        """Rescale the weights as the first run of the model would, where it would; called in eval mode."""

    def modules(self) -> list[nn.Module]:
        """Every module whose training flag counts."""
        return list(self.module.modules())

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Eval mode inside the block; every module's own training flag comes back after it."""
        return in_eval_mode(self.module, self.modules())

    def run(self, call: Call) -> Any:
        """Call the module, and give back what it returned.

        Args:
            call: Arguments, made by ``call``.

        Returns:
            Whatever the module returns.
        """
        return self.module(*call.args, **call.kwargs)

    def resid_call(self, resid: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        """Arguments for a run whose residual is put in by ``starting_at``: only shapes matter.

        Args:
            resid: Residual that enters the first block that runs. (batch, pos, d_model)
            mask, extra: As for ``Adapter.call``.

        Returns:
            A call on any tokens of the same batch and length.
        """
        tokens = torch.zeros(resid.shape[:2], dtype=torch.long, device=resid.device)
        return self.call(tokens, mask, extra)

    def output(self, raw: Any) -> Tensor:
        """The logits (or main output) in what the module returned.

        Args:
            raw: What the module returned.

        Returns:
            Logits, or the main output. (batch, pos, d_vocab)
        """
        return pick(raw, "logits" if isinstance(raw, Mapping) and "logits" in raw else None, "output")

    def loss(self, logits: Tensor, call: Call, per_token: bool = False) -> Tensor:
        """Next-token cross-entropy in nats, padding left out; see ``Call.loss``.

        Args:
            call: What was run.
            logits, per_token: As for ``Call.loss``.

        Returns:
            The mean (), or (batch, pos − 1).
        """
        return call.loss(logits, per_token)

    # -- starting and stopping at a block --------------------------------------------------------

    def rereads(self, layer: int) -> bool:
        """Whether block ``layer`` or a later one reads more than the residual stream.

        Then a patched residual doesn't bring another run back, and no run can start there.

        Args:
            layer: Number of a block.

        Returns:
            True where runs can't start at this block.
        """
        return False

    def resumer(self, model: Any) -> object | None:
        """What begins a sweep's runs in the middle of a sequence, or None if they can't.

        Args:
            model: The wrapped model.

        Returns:
            A ``probelens.running.sweep.resumer.Resumer``, which the sweep checks, or None.
        """
        return None

    def can_skip(self) -> bool:
        """Whether a run can start at or stop before every block, and at the readout after the last."""
        return bool(self.blocks) and ("ln_final" in self.parts or "unembed" in self.parts)

    def after_blocks(self) -> str:
        """The module that reads the residual after the last block.

        Returns:
            Its path.

        Raises:
            InputError: The architecture has no known module after its blocks.
        """
        for part in ("ln_final", "unembed"):
            if part in self.parts:
                return self.parts[part]
        raise InputError(
            f"{type(self.module).__name__} has no known module after its blocks, "
            f"so it can't stop after block {len(self.blocks) - 1}"
        )

    def stopping_at(self, layer: int) -> contextlib.AbstractContextManager[None]:
        """End the forward where block ``layer`` (or what follows the last one) would begin.

        Args:
            layer: Block before which the forward ends, or the number of blocks for what follows the last.

        Returns:
            A context; a forward inside it raises ``StopForward``, which carries the residual.
        """
        return stopped_before(self._block_or_readout(layer), f"residual entering block {layer}")

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        """Skip the blocks before ``layer`` and feed it ``resid``.

        Args:
            layer: First block that runs.
            resid: What enters it. (batch, pos, d_model)

        Yields:
            Nothing. Afterwards the forward is the module's own.
        """
        module = self._block_or_readout(layer)
        skipped = [submodule(self.module, path) for path in self.blocks[:layer]]
        if skipped and self._block_outputs is None:
            call = self.resid_call(resid[:1], None, {})
            self._block_outputs = length_of_output(skipped[0], lambda: self.run(call))
        resid = resid.to(device_of(module) or resid.device)
        with passed_over(skipped, self._block_outputs or 0), called_with(module, resid):
            yield

    def _block_or_readout(self, layer: int) -> nn.Module:
        path = self.blocks[layer] if layer < len(self.blocks) else self.after_blocks()
        return submodule(self.module, path)

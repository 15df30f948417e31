"""HookedModel: one surface over every architecture for running a model with hooks and caches."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from probelens.errors import HookNotFiredError, InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.cache import ActivationCache
from probelens.hooks.config import Call, ModelConfig, StopForward
from probelens.hooks.inputs import described, need_whole, prepared
from probelens.hooks.lens import TransformerLensMethods
from probelens.hooks.names import Points
from probelens.hooks.passes.eager import eager
from probelens.hooks.passes.entry import Entry
from probelens.hooks.passes.fired import check_fired
from probelens.hooks.passes.layout import each_call, settle, settle_before
from probelens.hooks.passes.recording import Slice, recorders, without_batch
from probelens.hooks.passes.turns import share_turn
from probelens.hooks.points import Direction, HookFn, HookPoint
from probelens.hooks.shorthand import Names
from probelens.hooks.switchboard import Switchboard
from probelens.hooks.trials import Untried, can_start_at, require_start_at
from probelens.hooks.verify import VerifyReport, verify
from probelens.hooks.weights import edited_weights

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HookSpec", "HookedModel"]

HookSpec = tuple[Names, HookFn]
"""A pair of what names hook points, and a hook."""
ReturnType = Literal["logits", "loss", "both"] | None


class HookedModel(TransformerLensMethods):
    """A model with hook points, made by ``probelens.wrap`` or ``probelens.load``.

    The user's module keeps its class, its state dict and its results. PyTorch hooks are registered on it only
    while a call that needs them runs.

    Args:
        module: The user's module.
        adapter: What the architecture says about itself.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self.module = module
        self.adapter = adapter
        self.points = Points(adapter, weakref.ref(self))
        self.switchboard = Switchboard(module, adapter)
        self.switchboard.passes.before = settle_before(weakref.ref(self))
        self.turn = share_turn(module, adapter.modules())

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the module and what is known of it, which ``__setstate__`` wraps anew."""
        if self.switchboard.in_use():
            raise InputError(
                "a wrapped model can't be copied or pickled while hooks are in place. Do it outside the `with` block, or "
                "after model.reset_hooks(including_permanent=True)"
            )
        adapter = copy.copy(self.adapter)
        adapter.__dict__.pop("all_points", None)  # they belong to one wrapped model, and are made anew
        return {"module": self.module, "adapter": adapter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookedModel.__init__(self, **state)

    def __repr__(self) -> str:
        return (
            f"HookedModel({type(self.module).__name__}, adapter={self.adapter.name!r}, "
            f"n_layers={self.cfg.n_layers}, d_model={self.cfg.d_model}, {len(self.points.named)} hook points)"
        )

    # -- what the model is ------------------------------------------------------------------------

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the model; ``device`` and ``dtype`` are those of now."""
        cfg = self.adapter.cfg
        cfg.device = self.adapter.device()
        cfg.dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), cfg.dtype)
        return cfg

    def hook_points(self, names: Names = None) -> pd.DataFrame:
        """A table of the hook points: name, kind, axes, module, aliases, note.

        Args:
            names: Which ones, as for ``run_with_cache``; None for all.

        Returns:
            One row for each point.

        Raises:
            UnknownHookError: A name that fits no hook point.
        """
        return self.points.table(names)

    def point(self, name: Names) -> HookPoint:
        """The hook point of a name that means one.

        Args:
            name: As for ``run_with_cache``: ``"blocks.3.hook_resid_post"``, ``("resid_post", 3)``, or
                ``"gpt_neox.layers.3.mlp.hook_out"`` for any module path of the user's model.

        Returns:
            The hook point.

        Raises:
            UnknownHookError: There is none, and the message says why and names the nearest; or there are several.
        """
        return self.points.find(name)

    # -- running ------------------------------------------------------------------------------------

    def __call__(
        self, inputs: Any, return_type: ReturnType = "logits", stop_at_layer: int | None = None,
        start_at_layer: int | None = None, attention_mask: Tensor | None = None,
        loss_per_token: bool = False, **kw: Any,
    ) -> Any:  # fmt: skip
        """Run the model.

        Args:
            inputs: Tokens (batch, pos); a string or strings; or a mapping of keyword arguments.
                With ``start_at_layer``, the residual entering that block (batch, pos, d_model).
            return_type: "logits", "loss" (mean next-token cross-entropy in nats), "both", or None.
            stop_at_layer: Return the residual entering this block; the rest doesn't run.
                ``n_layers`` gives the residual after the last block; negative counts from the end.
            start_at_layer: Skip the blocks before this one.
            attention_mask: 1 for real tokens, 0 for padding. (batch, pos)
            loss_per_token: The loss of each prediction, (batch, pos − 1), instead of their mean.
            **kw: Passed to the module's forward.

        Returns:
            Logits (batch, pos, d_vocab), a loss (), both, None, or the residual.

        Raises:
            InputError: A token outside the vocabulary, text without a tokenizer, ``start_at_layer`` where a run from
                that block would give other numbers or could not be tried.
            UnknownHookError: A layer out of range.
            HookNotFiredError: A hook of ``add_hook`` that this run should have reached.
        """
        start = self.points.block_number(start_at_layer, "start_at_layer")
        stop = self.points.block_number(stop_at_layer, "stop_at_layer")
        if start:
            require_start_at(self, start)
        if return_type not in ("logits", "loss", "both", None):
            raise InputError(f"return_type {return_type!r} is not known. Allowed: 'logits', 'loss', 'both', None")
        with self.turn:
            added = [e for e in self.switchboard.staying if e.here() and self.points.within(e.point, start, stop)]
            before = [e.fired + e.attached for e in added]
            call = self.prepare(inputs, attention_mask, start, kw)
            need_whole(self, call, start)
            out = self.run(call, start=start, stop=stop, resid=None if start is None else inputs)
        silent = [e for e, count in zip(added, before, strict=True) if e.fired + e.attached == count]
        check_fired([Entry(e.point, e.fn, e.dir) for e in silent])
        if stop is not None or return_type is None:
            return None if stop is None else out
        logits = self.adapter.output(out)
        if return_type == "logits":
            return logits
        loss = self.adapter.loss(logits, call, loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def prepare(
        self, inputs: Any, mask: Tensor | None = None, start: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Call:  # fmt: skip
        """The call of the module that inputs ask for.

        Args:
            inputs: As for calling the model.
            mask: 1 for real tokens, 0 for padding. (batch, pos)
            start: Block whose residual the inputs are; None for the model's own inputs.
            extra: Keywords for the module's forward.

        Returns:
            A call for ``run``, on the model's device.

        Raises:
            InputError: A token outside the vocabulary, text without a tokenizer, or inputs of another kind.
            ShapeError: Tokens that aren't (batch, pos), or a residual that isn't (batch, pos, d_model).
        """
        return prepared(self, inputs, mask, start, dict(extra or {}))

    def run(self, call: Call, *, start: int | None = None, stop: int | None = None, resid: Tensor | None = None) -> Any:
        """Run a prepared call, or some blocks of it, without checking that hooks fire.

        Args:
            call: What ``prepare`` returned.
            start: First block that runs; None for all.
            stop: Block before which the run ends; None for none.
            resid: What enters block ``start``. (batch, pos, d_model)

        Returns:
            What the module returned; with ``stop`` the residual (batch, pos, d_model).

        Raises:
            HookNotFiredError: The forward never reached block ``stop``.
        """
        settle(self, call if start is None else None, start is not None or stop is not None)
        with self.turn, contextlib.ExitStack() as stack:
            stack.enter_context(eager())
            stack.enter_context(self.switchboard.passes.prepared())
            stack.enter_context(self.switchboard.instrumented(self.adapter.required_paths()))
            if stop is not None:
                stack.enter_context(self.adapter.stopping_at(stop))
            if start is not None and resid is not None:
                with self.switchboard.muted():
                    stack.enter_context(self.adapter.starting_at(start, resid.to(self.adapter.device())))
            try:
                out = self.adapter.run(call)
            except StopForward as stopped:
                return stopped.resid.movedim(self.adapter.resid_axis, 0)
        if stop is not None:
            raise HookNotFiredError(f"the forward of this {type(self.module).__name__} ended before block {stop}")
        return out

    def _entries(
        self, specs: Iterable[HookSpec], dir: Direction, start: int | None = None, stop: int | None = None
    ) -> list[Entry]:
        entries: list[Entry] = []
        for spec in specs:
            if not isinstance(spec, (tuple, list)) or len(spec) != 2 or not callable(spec[1]):
                raise InputError(f"a hook is a pair (name, function), got {spec!r}")
            entries += [Entry(point, spec[1], dir) for point in self.points.reached(spec[0], start, stop)]
        return entries

    @contextlib.contextmanager
    def hooks(
        self, fwd_hooks: Iterable[HookSpec] = (), bwd_hooks: Iterable[HookSpec] = (),
        reset_hooks_end: bool = True, clear_contexts: bool = False,
    ) -> Iterator[HookedModel]:  # fmt: skip
        """Keep hooks in place inside the block, also for ``model.module.generate(...)``.

        Args:
            fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: As for ``HookedModel.run_with_hooks``.

        Yields:
            This model.

        Raises:
            HookNotFiredError: At the end of a block without an error, for a hook that was never called.
        """
        entries = [*self._entries(fwd_hooks, "fwd"), *self._entries(bwd_hooks, "bwd")]
        with (
            self.switchboard.instrumented(self.adapter.required_paths()),
            self.switchboard.listening(entries, not reset_hooks_end, clear_contexts),
        ):
            yield self
            check_fired(entries)

    def run_with_hooks(
        self, inputs: Any, fwd_hooks: Iterable[HookSpec] = (), bwd_hooks: Iterable[HookSpec] = (),
        reset_hooks_end: bool = True, clear_contexts: bool = False, return_type: ReturnType = "logits",
        stop_at_layer: int | None = None, start_at_layer: int | None = None, remove_batch_dim: bool = False,
        **kw: Any,
    ) -> Any:  # fmt: skip
        """Run once with hooks. Backward hooks stay attached to what this call returns, for a later ``.backward()``.

        Args:
            inputs: As for calling the model.
            fwd_hooks: Pairs (name, fn); a name as for ``run_with_cache``, fn(tensor, hook) returns a tensor or None for
                no change.
            bwd_hooks: The same on gradients.
            reset_hooks_end: False keeps the hooks until ``reset_hooks``.
            clear_contexts: Empty each hook point's ``ctx`` at the end.
            return_type: As for calling the model.
            stop_at_layer: As for calling the model; patterns then mean the points before it.
            start_at_layer: As for calling the model; patterns then mean the points from it on.
            remove_batch_dim: Call the hooks without the batch axis, which must have size 1.
            **kw: Passed to the module's forward.

        Returns:
            As calling the model does: logits (batch, pos, d_vocab), a loss (), both, None, or the residual.

        Raises:
            HookNotFiredError: A hook was not called.
            ShapeError: A hook returned another shape than it got.
        """
        if remove_batch_dim:
            fwd_hooks, bwd_hooks = without_batch(fwd_hooks), without_batch(bwd_hooks)
        part = (start_at_layer, stop_at_layer)
        entries = [*self._entries(fwd_hooks, "fwd", *part), *self._entries(bwd_hooks, "bwd", *part)]
        with self.switchboard.listening(entries, not reset_hooks_end, clear_contexts):
            out = self(inputs, return_type, stop_at_layer, start_at_layer, **kw)
            check_fired(entries, backward=False)
        for entry in entries:
            # The graph of the output still refers to them, so that a later backward pass calls them.
            entry.active = entry.active or entry.dir == "bwd"
        return out

    def run_with_cache(
        self, inputs: Any, names_filter: Names = None, stop_at_layer: int | None = None,
        start_at_layer: int | None = None, pos_slice: Slice = None, device: torch.device | str | None = None,
        remove_batch_dim: bool = False, incl_bwd: bool = False, return_type: ReturnType = "logits",
        return_cache_object: bool = True, dtype: torch.dtype | None = None, reset_hooks_end: bool = True,
        clear_contexts: bool = False, **kw: Any,
    ) -> tuple[Any, ActivationCache]:  # fmt: skip
        """Run once and keep activations.

        The cache holds copies, so neither a hook that writes in place nor the model itself can
        change them afterwards. Hooks that are in place when this is called come first: their
        edits are seen.

        Args:
            inputs: As for calling the model.
            names_filter: None for every hook point; a full name; a shorthand for every layer, "resid_post", or for
                one, ("resid_post", 3); a path of the module's own, "h.3.mlp.hook_out"; a glob; a predicate on full names;
                a HookPoint; or a list of these. Patterns keep each call of a module that a forward calls several times.
            stop_at_layer: As for calling the model; patterns then mean the points before it.
            start_at_layer: As for calling the model; patterns then mean the points from it on.
            pos_slice: Positions to keep: int, slice, list or (start, stop).
            device: Where the copies go; None leaves them where they are.
            remove_batch_dim: Remove the batch axis, which must have size 1.
            incl_bwd: Call ``.backward()`` on the output (a scalar: ``return_type="loss"``) and keep
                the gradients as ``name + "_grad"``.
            return_type: As for calling the model.
            return_cache_object: False gives a plain dict.
            dtype: Dtype of the copies; None keeps the model's.
            reset_hooks_end: Accepted so that calls written for TransformerLens run; what records is always removed.
            clear_contexts: Accepted for the same reason, without effect.
            **kw: Passed to the module's forward.

        Returns:
            The output, and an ActivationCache of (batch, pos, ...) tensors.

        Raises:
            UnknownHookError: A name or pattern that fits nothing.
            HookNotFiredError: A point asked for was not reached.
            InputError: ``incl_bwd`` with an output that is not one number.
        """
        points = each_call(self, names_filter, start_at_layer, stop_at_layer, (inputs, kw))
        cache, fwd, bwd = recorders(points, incl_bwd, device, dtype, pos_slice)
        entries = [*fwd, *bwd]
        with self.switchboard.listening(entries):
            out = self(inputs, return_type, stop_at_layer, start_at_layer, **kw)
            check_fired(entries, backward=False)
            if incl_bwd:
                if not isinstance(out, Tensor) or out.numel() != 1:
                    raise InputError(
                        "incl_bwd=True calls .backward() on the output, which must be one number. "
                        f'Use return_type="loss"; got {described(out)}'
                    )
                out.backward()
                check_fired(entries)
        order = {name: i for i, name in enumerate(self.points.named)}
        done = {name: torch.stack(kept, dim=1) if isinstance(kept, list) else kept for name, kept in cache.items()}
        done = dict(sorted(done.items(), key=lambda kv: order.get(kv[0].removesuffix("_grad"), len(order))))
        result = ActivationCache(done, self)
        if remove_batch_dim:
            result = result.remove_batch_dim()
        return out, (result if return_cache_object else result.cache_dict)  # type: ignore[return-value]

    def can_skip(self) -> bool:
        """Whether ``start_at_layer`` and ``stop_at_layer`` reach every block and the readout."""
        return self.adapter.can_skip()

    def can_start_at(self, layer: int, inputs: Any = None) -> bool:
        """Whether the residual entering a block is all that the rest of the model depends on.

        It isn't where something goes around the blocks, such as a connection from an early layer to the output. This is
        tried with random tokens and remembered until something in the model is exchanged.

        Args:
            layer: Block; ``n_layers`` for what follows the last one.
            inputs: What the model runs on; a few of them are tried where random tokens alone don't run.

        Returns:
            False if a run that starts there gives other logits than a full one, and where no trial could be made.
        """
        try:
            return can_start_at(self, layer, inputs)
        except Untried:
            return False

    @contextlib.contextmanager
    def backend(self, kind: Literal["native", "reference"]) -> Iterator[HookedModel]:
        """Choose which forward runs inside the block.

        Args:
            kind: "reference" runs the instrumented forwards whether or not a hook needs them, so
                that every condition of an experiment uses one backend; "native" the model's own
                wherever no hook needs another.

        Yields:
            This model.

        Raises:
            InputError: An unknown kind.
        """
        if kind not in ("native", "reference"):
            raise InputError(f"backend {kind!r} is not known. Allowed: 'native', 'reference'")
        with self.switchboard.instrumented(self.adapter.instrumented_paths() if kind == "reference" else []):
            yield self

    def verify(
        self, inputs: Any = None, names: Names = None, *, tolerance: float | None = None, seed: int = 0,
        progress: bool = False,
    ) -> VerifyReport:  # fmt: skip
        """Try every hook point of this model on these inputs.

        Each point must fire. An edit that returns its input must change nothing, and noise must change the output.
        Another run's residual stream must restore that run's output. Nothing may be left on the module.

        Args:
            inputs: Tokens, text, features, or a mapping of the forward's own arguments; None for random tokens.
            names: Which points, as for ``run_with_cache``; None for all.
            tolerance: Largest relative change by an identity edit; None for 1e-5 (0.05 in half precision
                and under autocast).
            seed: Of the noise and of the other run's tokens.
            progress: Show a progress bar.

        Returns:
            A report: ``report.ok``, ``report.failures()``, ``report.to_dataframe()``.

        Raises:
            InputError: No inputs for a model that doesn't take tokens.
            UnknownHookError: A name that fits no hook point.
        """
        return verify(self, inputs, names, tolerance=tolerance, seed=seed, progress=progress)

    def edit_weights(
        self, edits: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> contextlib.AbstractContextManager[HookedModel]:
        """Change parameters inside a ``with`` block. They are restored bit for bit, also after an exception.

        Args:
            edits: Name to function of the weight. Names are canonical
                (``"blocks.0.mixer.conv1d.weight"``, ``"unembed.weight"``) or the user's own.

        Returns:
            A context that gives this model.

        Raises:
            UnknownHookError: No such weight.
            ShapeError: A function that returns another shape.
            InputError: A weight that isn't in memory.
        """
        if self.adapter.has_weights:
            return edited_weights(self, edits)
        raise InputError("edit_weights changes the weights here, and a remote model runs on others")

"""HookedModel: one surface over every architecture for running a model with hooks and caches."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from probelens.adapter import Adapter, Call, ModelConfig, StopForward
from probelens.cache import ActivationCache, Slice, slice_positions
from probelens.errors import InputError, ShapeError, UnknownHookError, nearest
from probelens.hooks import Direction, Entry, HookFn, HookPoint, Site, Switchboard, check_fired

if TYPE_CHECKING:
    import pandas as pd

    from probelens.verify import VerifyReport

__all__ = ["HookSpec", "HookedModel", "NamesFilter"]

NamesFilter = str | Iterable[str] | Callable[[str], bool] | None
HookSpec = tuple["str | HookPoint | Callable[[str], bool] | Iterable[str]", HookFn]
ReturnType = Literal["logits", "loss", "both"] | None


class HookedModel:
    """A model with hook points, made by ``probelens.wrap`` or ``probelens.load``.

    The user's module stays what it is: same class, same state dict, same results. PyTorch hooks
    stand on it only while a call that needs them runs.

    Args:
        module: The user's module.
        adapter: What the architecture says about itself.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self.module = module
        self.adapter = adapter
        self._board = Switchboard(module, adapter)
        self._points: dict[str, HookPoint] = {}
        self._aliases: dict[str, str] = {}
        for point in adapter.all_points:
            self._points[point.name] = point
            self._aliases.update(dict.fromkeys(point.aliases, point.name))
        self._added: list[Entry] = []

    def __repr__(self) -> str:
        return (
            f"HookedModel({type(self.module).__name__}, adapter={self.adapter.name!r}, "
            f"n_layers={self.cfg.n_layers}, d_model={self.cfg.d_model}, {len(self._points)} hook points)"
        )

    # -- what the model is ------------------------------------------------------------------------

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the model; ``device`` and ``dtype`` are those of now."""
        cfg = self.adapter.cfg
        cfg.device = self.adapter.device()
        cfg.dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), cfg.dtype)
        return cfg

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.adapter.tokenizer

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every advertised hook point by canonical name, in the order of the forward pass."""
        return dict(self._points)

    def hook_points(self) -> pd.DataFrame:
        """A table of the hook points: name, kind, axes, module, aliases, note."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "name": p.name, "kind": p.kind, "axes": ", ".join(p.axes), "module": p.module,
                    "aliases": ", ".join(p.aliases), "note": p.note,
                }
                for p in self._points.values()
            ],
            columns=["name", "kind", "axes", "module", "aliases", "note"],
        )  # fmt: skip

    def alias(self, name: str) -> str:
        """The canonical name of an alias; other names come back as they are."""
        return self._aliases.get(name, name)

    def point(self, name: str | HookPoint) -> HookPoint:
        """The hook point of a canonical name, an alias or a raw module path.

        Args:
            name: For example ``"blocks.3.hook_resid_post"``, or
                ``"gpt_neox.layers.3.mlp.hook_out"`` for any module path of the user's model.

        Raises:
            UnknownHookError: There is none; the message names the nearest and says why.
        """
        if isinstance(name, HookPoint):
            name = name.name
        if not isinstance(name, str):
            raise UnknownHookError(f"a hook point's name is a string, got {name!r}")
        name = self.alias(name)
        if name in self._points:
            return self._points[name]
        own = self.adapter.find(name)
        if own is not None:
            return own
        path, _, side = name.rpartition(".hook_")
        if side in ("in", "out") and self._has_module(path):
            return HookPoint(name, "boundary", (), path, site=Site(path, side))  # type: ignore[arg-type]
        raise UnknownHookError(self._unknown(name))

    def _has_module(self, path: str) -> bool:
        try:
            self.module.get_submodule(path)
        except AttributeError:
            return False
        return True

    def _unknown(self, name: str) -> str:
        kind, n = type(self.module).__name__, self.cfg.n_layers
        text = f"hook point {name!r} not found"
        found = re.match(r"blocks\.(\d+)\.(.*)", name)
        if found and int(found[1]) >= n:
            last = f"blocks.{n - 1}.{found[2]}"
            near = [last] if last in self._points or last in self._aliases else []
            text += f": this {kind} has {n} blocks"
        else:
            near = []
            reason = self.adapter.absent(name)
            text += f": {reason}" if reason else f" in this {kind}"
        near = near or nearest(name, [*self._points, *self._aliases])
        if not near:
            paths = [f"{path}.hook_out" for path, _ in self.module.named_modules() if path]
            near = nearest(name, paths)
        listed = ", ".join(repr(x) for x in near) or "none"
        return f"{text}. Nearest: {listed}. All names: model.hook_points()"

    def match(self, names: NamesFilter | HookPoint) -> tuple[list[HookPoint], bool]:
        """The points that a names filter means, and whether each was named by the caller.

        Args:
            names: None for all; a name; a glob such as ``"blocks.*.hook_resid_post"``; a predicate
                on names; or an iterable of names and globs.

        Raises:
            UnknownHookError: A name or pattern that fits nothing.
        """
        if names is None:
            return list(self._points.values()), False
        if isinstance(names, HookPoint):
            return [self.point(names)], True
        if isinstance(names, str):
            if not any(c in names for c in "*?["):
                return [self.point(names)], True
            found = fnmatch.filter(self._points, names)
            aliased = [self._aliases[a] for a in fnmatch.filter(self._aliases, names)]
            if not found and not aliased:
                found = self._raw_matches(names)
            if not found and not aliased:
                raise UnknownHookError(f"pattern {names!r} fits no hook point. All names: model.hook_points()")
            return [self.point(n) for n in dict.fromkeys([*found, *aliased])], False
        if callable(names):
            found = [n for n in self._points if names(n)]
            if not found:
                raise UnknownHookError(
                    "the names filter accepted no hook point. All names: model.hook_points()"
                )
            return [self._points[n] for n in found], False
        points: dict[str, HookPoint] = {}
        explicit = True
        for name in names:
            some, named = self.match(name)
            points.update({p.name: p for p in some})
            explicit = explicit and named
        if not points:
            raise UnknownHookError("the names filter is an empty list. Give None for every hook point")
        return list(points.values()), explicit

    def _raw_matches(self, pattern: str) -> list[str]:
        paths = [p for p, _ in self.module.named_modules() if p]
        return fnmatch.filter([f"{p}.hook_{side}" for p in paths for side in ("in", "out")], pattern)

    # -- tokens -------------------------------------------------------------------------------------

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = None) -> Tensor:
        """Token ids of text, padded to the longest. (batch, pos)

        Args:
            input: One string or several.
            prepend_bos: Put the beginning-of-sequence token in front; None for the tokenizer's habit.

        Raises:
            InputError: The model has no tokenizer.
        """
        return self._tokenize(input, prepend_bos)[0]

    def to_string(self, tokens: Tensor) -> str | list[str]:
        """Text of token ids: one string for (pos,), a list for (batch, pos)."""
        tokens = torch.as_tensor(tokens)
        decode = self._need_tokenizer().decode
        if tokens.ndim <= 1:
            return str(decode(tokens.reshape(-1).tolist()))
        return [str(decode(row.tolist())) for row in tokens]

    def to_str_tokens(self, input: str | Tensor, prepend_bos: bool | None = None) -> list[str]:
        """The text of each token of one string or one row of ids."""
        tokens = self.to_tokens(input, prepend_bos)[0] if isinstance(input, str) else torch.as_tensor(input)
        return [str(self.to_string(t.reshape(1))) for t in tokens.reshape(-1)]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is one token. Raises InputError if it is several."""
        ids = self.to_tokens(string, prepend_bos=False)[0].tolist()
        if len(ids) != 1:
            raise InputError(f"{string!r} is {len(ids)} tokens ({self.to_str_tokens(string, False)}), not one")
        return int(ids[0])

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InputError(
                f"text given, but this {type(self.module).__name__} has no tokenizer. "
                "Give tokens (batch, pos), or pl.wrap(module, tokenizer=...)"
            )
        return self.tokenizer

    def _tokenize(self, text: str | Sequence[str], prepend_bos: bool | None = None) -> tuple[Tensor, Tensor | None]:
        tokenizer = self._need_tokenizer()
        texts = [text] if isinstance(text, str) else list(text)
        rows = [list(tokenizer(t, add_special_tokens=prepend_bos is None)["input_ids"]) for t in texts]
        if prepend_bos:
            if tokenizer.bos_token_id is None:
                raise InputError("prepend_bos=True, but the tokenizer has no beginning-of-sequence token")
            rows = [[tokenizer.bos_token_id, *row] for row in rows]
        width = max((len(row) for row in rows), default=0)
        if not width:
            raise InputError(f"the text {text!r} gives no tokens")
        if all(len(row) == width for row in rows):
            return torch.tensor(rows, device=self.adapter.device()), None
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        left = getattr(tokenizer, "padding_side", "right") == "left"
        tokens, mask = [], []
        for row in rows:
            gap = width - len(row)
            tokens.append([pad] * gap + row if left else row + [pad] * gap)
            mask.append([0] * gap + [1] * len(row) if left else [1] * len(row) + [0] * gap)
        device = self.adapter.device()
        return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)

    def _call(self, inputs: Any, mask: Tensor | None, start: int | None, extra: dict[str, Any]) -> Call:
        device = self.adapter.device()
        bos = extra.pop("prepend_bos", None)
        if mask is not None:
            mask = torch.as_tensor(mask).to(device)
        if start is not None:
            if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 3:
                raise ShapeError(
                    f"start_at_layer={start} needs the residual entering that block, (batch, pos, d_model), "
                    f"got {_described(inputs)}"
                )
            return self.adapter.resid_call(inputs.to(device), mask, extra)
        if isinstance(inputs, str) or (
            isinstance(inputs, (list, tuple)) and len(inputs) > 0 and all(isinstance(t, str) for t in inputs)
        ):
            tokens, made = self._tokenize(inputs, bos)
            return self.adapter.call(tokens, made if mask is None else mask, extra)
        if isinstance(inputs, Mapping):
            kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            mask = mask if mask is not None else kwargs.get("attention_mask")
            if mask is not None:
                kwargs["attention_mask"] = mask
            tokens = kwargs.get("input_ids")
            self._check_tokens(tokens)
            return Call((), {**kwargs, **extra}, tokens, mask)
        if isinstance(inputs, (list, tuple)):
            try:
                inputs = torch.tensor(inputs)
            except (ValueError, TypeError, RuntimeError) as err:
                raise InputError(f"inputs must be tokens, text or a mapping of keywords, got {inputs!r}") from err
        if isinstance(inputs, Tensor):
            if not inputs.is_floating_point() and inputs.ndim == 1:
                inputs = inputs[None]
            self._check_tokens(inputs)
            return self.adapter.call(inputs.to(device), mask, extra)
        return self.adapter.call(inputs, mask, extra)

    def _check_tokens(self, tokens: Any) -> None:
        vocab = self.adapter.cfg.d_vocab
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or not vocab:
            return
        if tokens.numel() == 0 or tokens.ndim != 2:
            raise ShapeError(f"tokens must be (batch, pos) and not empty, got shape {tuple(tokens.shape)}")
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise InputError(
                f"token id {bad} is outside the vocabulary: this {type(self.module).__name__} takes ids 0 to {vocab - 1}"
            )

    # -- running ------------------------------------------------------------------------------------

    def __call__(
        self,
        inputs: Any,
        return_type: ReturnType = "logits",
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        attention_mask: Tensor | None = None,
        **kw: Any,
    ) -> Any:
        """Run the model.

        Args:
            inputs: Tokens (batch, pos); a string or strings; or a mapping of keyword arguments.
                With ``start_at_layer``, the residual entering that block (batch, pos, d_model).
            return_type: "logits", "loss" (mean next-token cross-entropy in nats), "both", or None.
            stop_at_layer: Return the residual entering this block; the rest doesn't run.
                ``n_layers`` gives the residual after the last block; negative counts from the end.
            start_at_layer: Skip the blocks before this one.
            attention_mask: 1 for real tokens, 0 for padding. (batch, pos)
            **kw: Passed to the module's forward.

        Returns:
            Logits (batch, pos, d_vocab), a loss (), both, None, or the residual.

        Raises:
            InputError: A token outside the vocabulary, text without a tokenizer.
            UnknownHookError: A layer out of range.
            HookNotFiredError: A hook of ``add_hook`` that this run should have reached.
        """
        start, stop = self._layer(start_at_layer, "start_at_layer"), self._layer(stop_at_layer, "stop_at_layer")
        added = [e for e in self._added if e.here() and self._reached(e.point, start, stop)]
        before = [e.fired + e.attached for e in added]
        out = self._forward(inputs, return_type, start, stop, attention_mask, kw)
        silent = [e for e, count in zip(added, before, strict=True) if e.fired + e.attached == count]
        if silent:
            check_fired([_unfired(e) for e in silent])
        return out

    def _forward(
        self, inputs: Any, return_type: ReturnType, start: int | None, stop: int | None,
        mask: Tensor | None, extra: dict[str, Any],
    ) -> Any:  # fmt: skip
        if return_type not in ("logits", "loss", "both", None):
            raise InputError(
                f"return_type {return_type!r} is not known. Allowed: 'logits', 'loss', 'both', None"
            )
        call = self._call(inputs, mask, start, dict(extra))
        with contextlib.ExitStack() as stack:
            if stop is not None:
                stack.enter_context(self.adapter.stopping_at(stop))
            if start is not None:
                with self._board.muted():
                    starting = self.adapter.starting_at(start, inputs.to(self.adapter.device()))
                    stack.enter_context(starting)
            try:
                raw = self.adapter.run(call)
            except StopForward as stopped:
                return stopped.resid
        if return_type is None:
            return None
        logits = self.adapter.output(raw)
        if return_type == "logits":
            return logits
        loss = self.adapter.loss(logits, call)
        return loss if return_type == "loss" else (logits, loss)

    def _layer(self, layer: int | None, what: str) -> int | None:
        if layer is None:
            return None
        n = self.adapter.cfg.n_layers
        if not isinstance(layer, int) or not -n <= layer <= n:
            raise UnknownHookError(
                f"{what}={layer!r}: this {type(self.module).__name__} has {n} blocks, allowed are {-n} to {n}"
            )
        return layer + n if layer < 0 else layer

    def _reached(self, point: HookPoint, start: int | None, stop: int | None) -> bool:
        """Whether a run from block ``start`` to block ``stop`` comes by this point."""
        n = self.adapter.cfg.n_layers
        if point.name.startswith("blocks."):
            layer = point.layer()
        elif point.name in self._points:
            layer = -1 if point.name == "hook_embed" else n
        else:
            inside = [i for i, b in enumerate(self.adapter.blocks) if f"{point.module}.".startswith(f"{b}.")]
            if not inside:
                return start is None and stop is None
            layer = inside[0]
        return (start is None or layer >= start) and (stop is None or layer < stop)

    def _entries(self, specs: Iterable[HookSpec], dir: Direction, **kw: Any) -> list[Entry]:
        entries: list[Entry] = []
        for spec in specs:
            if not isinstance(spec, (tuple, list)) or len(spec) != 2 or not callable(spec[1]):
                raise InputError(f"a hook is a pair (name, function), got {spec!r}")
            entries += [Entry(point, spec[1], dir, **kw) for point in self.match(spec[0])[0]]
        return entries

    @contextlib.contextmanager
    def hooks(
        self,
        fwd_hooks: Iterable[HookSpec] = (),
        bwd_hooks: Iterable[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedModel]:
        """Hooks that stay while the block lasts, also for ``model.module.generate(...)``.

        Args:
            fwd_hooks: Pairs (name, fn); fn(tensor, hook) returns a tensor or None for no change.
            bwd_hooks: The same on gradients.
            reset_hooks_end: False keeps the hooks until ``reset_hooks``.
            clear_contexts: Empty each hook point's ``ctx`` at the end.

        Raises:
            HookNotFiredError: At the end of a block that ended well, for a hook never called.
        """
        entries = [*self._entries(fwd_hooks, "fwd"), *self._entries(bwd_hooks, "bwd")]
        self._board.add(entries)
        kept = False
        try:
            yield self
            check_fired(entries)
            if not reset_hooks_end:
                kept = True
                self._added += entries
        finally:
            if not kept:
                self._board.remove(entries)
            if clear_contexts:
                for entry in entries:
                    entry.point.ctx.clear()

    def run_with_hooks(
        self,
        inputs: Any,
        fwd_hooks: Iterable[HookSpec] = (),
        bwd_hooks: Iterable[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        return_type: ReturnType = "logits",
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        **kw: Any,
    ) -> Any:
        """Run once with hooks.

        Backward hooks stay attached to what this call returns, so a later ``.backward()`` on it
        calls them.

        Args:
            inputs: As for calling the model.
            fwd_hooks: Pairs (name, fn). A name may be a glob, a list or a predicate.
            bwd_hooks: The same on gradients.
            reset_hooks_end: False keeps the hooks until ``reset_hooks``.
            clear_contexts: Empty each hook point's ``ctx`` at the end.
            return_type: As for calling the model.
            stop_at_layer: As for calling the model.
            start_at_layer: As for calling the model.
            **kw: Passed to the module's forward.

        Raises:
            HookNotFiredError: A hook was not called.
            ShapeError: A hook returned another shape than it got.
        """
        entries = [*self._entries(fwd_hooks, "fwd"), *self._entries(bwd_hooks, "bwd")]
        self._board.add(entries)
        kept = False
        try:
            out = self(inputs, return_type, stop_at_layer, start_at_layer, **kw)
            check_fired(entries, backward=False)
            if not reset_hooks_end:
                kept = True
                self._added += entries
        finally:
            if not kept:
                self._board.remove(entries)
                # The graph of the output still holds them: a later backward pass calls them.
                for entry in entries:
                    entry.active = entry.dir == "bwd"
            if clear_contexts:
                for entry in entries:
                    entry.point.ctx.clear()
        return out

    def run_with_cache(
        self,
        inputs: Any,
        names_filter: NamesFilter = None,
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        pos_slice: Slice = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        return_type: ReturnType = "logits",
        return_cache_object: bool = True,
        dtype: torch.dtype | None = None,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kw: Any,
    ) -> tuple[Any, ActivationCache]:
        """Run once and keep activations.

        The cache holds copies, so neither a hook that writes in place nor the model itself can
        change them afterwards. Hooks that are in place when this is called come first: their
        edits are seen.

        Args:
            inputs: As for calling the model.
            names_filter: None for every hook point, a name, a glob, an iterable of these, or a
                predicate on names.
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
            **kw: Passed to the module's forward.

        Returns:
            The output, and an ActivationCache of (batch, pos, ...) tensors.

        Raises:
            UnknownHookError: A name or pattern that fits nothing.
            HookNotFiredError: A point asked for was not reached.
        """
        points = self._wanted(names_filter, start_at_layer, stop_at_layer)
        cache, fwd, bwd = self._recorders(points, incl_bwd, device, dtype, pos_slice)
        entries = [*fwd, *bwd]
        with self._board.listening(entries):
            out = self(inputs, return_type, stop_at_layer, start_at_layer, **kw)
            check_fired(entries, backward=False)
            if incl_bwd:
                if not isinstance(out, Tensor) or out.numel() != 1:
                    raise InputError(
                        "incl_bwd=True calls .backward() on the output, which must be one number. "
                        f'Use return_type="loss"; got {_described(out)}'
                    )
                out.backward()
                check_fired(entries)
        order = {name: i for i, name in enumerate(self._points)}
        done = {
            name: torch.stack(kept, dim=1) if isinstance(kept, list) else kept for name, kept in cache.items()
        }
        done = dict(sorted(done.items(), key=lambda kv: order.get(kv[0].removesuffix("_grad"), len(order))))
        result = ActivationCache(done, self)
        if remove_batch_dim:
            result = result.remove_batch_dim()
        return out, (result if return_cache_object else result.cache_dict)  # type: ignore[return-value]

    def get_caching_hooks(
        self, names_filter: NamesFilter = None, incl_bwd: bool = False,
        device: torch.device | str | None = None, remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None, pos_slice: Slice = None,
    ) -> tuple[dict[str, Any], list[HookSpec], list[HookSpec]]:  # fmt: skip
        """A dict and the hooks that fill it, for use with ``hooks`` and ``run_with_hooks``.

        Returns:
            The dict (name to activation), forward hooks, backward hooks. A state point's value is
            a list with one tensor (batch, ...) a step.
        """
        cache = {} if cache is None else cache
        points = self._wanted(names_filter, None, None)
        _, fwd, bwd = self._recorders(points, incl_bwd, device, None, pos_slice, cache, remove_batch_dim)
        return cache, [(e.point.name, e.fn) for e in fwd], [(e.point.name, e.fn) for e in bwd]

    def _wanted(self, names: NamesFilter, start: int | None, stop: int | None) -> list[HookPoint]:
        points, explicit = self.match(names)
        if explicit or (start is None and stop is None):
            return points
        lo, hi = self._layer(start, "start_at_layer"), self._layer(stop, "stop_at_layer")
        return [p for p in points if self._reached(p, lo, hi)]

    def _recorders(
        self, points: Iterable[HookPoint], incl_bwd: bool, device: Any, dtype: torch.dtype | None,
        pos_slice: Slice, cache: dict[str, Any] | None = None, squeeze: bool = False,
    ) -> tuple[dict[str, Any], list[Entry], list[Entry]]:  # fmt: skip
        cache = {} if cache is None else cache

        def copy(tensor: Tensor, hook: HookPoint) -> Tensor:
            kept = tensor.detach()
            kept = kept if hook.pos is not None else slice_positions(kept, pos_slice, hook.pos_axis)
            kept = kept.to(device=device, dtype=dtype, copy=True)
            return kept[0] if squeeze else kept

        def record(tensor: Tensor, hook: HookPoint, suffix: str = "") -> None:
            name = hook.name + suffix
            if hook.pos is None:
                cache[name] = copy(tensor, hook)
            elif _kept(hook.pos, hook.length, pos_slice):
                if hook.pos == 0 or not isinstance(cache.get(name), list):
                    cache[name] = []
                cache[name].append(copy(tensor, hook))

        def record_grad(tensor: Tensor, hook: HookPoint) -> None:
            record(tensor, hook, "_grad")

        fwd = [Entry(p, record, "fwd", reads=True) for p in points]
        bwd = [Entry(p, record_grad, "bwd") for p in points] if incl_bwd else []
        return cache, fwd, bwd

    # -- hooks that stay ------------------------------------------------------------------------------

    def add_hook(
        self, name: NamesFilter | HookPoint, hook: HookFn, dir: Direction = "fwd", is_permanent: bool = False
    ) -> None:
        """A hook that stays until ``reset_hooks``, for every thread.

        Args:
            name: Name, glob, list, predicate or HookPoint.
            hook: fn(tensor, hook) returning a tensor, or None for no change.
            dir: "fwd" or "bwd".
            is_permanent: Stay also through ``reset_hooks()``.

        Raises:
            UnknownHookError: No such point.
        """
        if dir not in ("fwd", "bwd"):
            raise InputError(f"dir={dir!r} is not known. Allowed: 'fwd', 'bwd'")
        entries = self._entries([(name, hook)], dir, everywhere=True, permanent=is_permanent)  # type: ignore[list-item]
        self._board.add(entries)
        self._added += entries

    def reset_hooks(
        self, clear_contexts: bool = True, direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
    ) -> None:  # fmt: skip
        """Remove the hooks of ``add_hook``.

        Args:
            clear_contexts: Empty every hook point's ``ctx``.
            direction: "fwd", "bwd" or "both".
            including_permanent: Also those added with ``is_permanent=True``.
        """
        if direction not in ("fwd", "bwd", "both"):
            raise InputError(f"direction={direction!r} is not known. Allowed: 'fwd', 'bwd', 'both'")
        gone = [
            e for e in self._added
            if direction in ("both", e.dir) and (including_permanent or not e.permanent)
        ]  # fmt: skip
        self._board.remove(gone)
        self._added = [e for e in self._added if e not in gone]
        if clear_contexts:
            for point in self._points.values():
                point.ctx.clear()

    def has_hooks(self) -> bool:
        """Whether hooks are in place that a call from this thread would reach."""
        return any(self._board.listeners(name) for name in self._board.entries)

    def can_skip(self) -> bool:
        """Whether ``start_at_layer`` and ``stop_at_layer`` reach every block and the readout."""
        return self.adapter.can_skip()

    # -- the user's module ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backend(self, kind: Literal["native", "reference"]) -> Iterator[HookedModel]:
        """Choose which forward runs inside the block.

        Args:
            kind: "reference" runs the instrumented forwards whether or not a hook needs them, so
                that every condition of an experiment uses one backend; "native" the model's own
                wherever no hook needs another.
        """
        if kind not in ("native", "reference"):
            raise InputError(f"backend {kind!r} is not known. Allowed: 'native', 'reference'")
        paths = self.adapter.instrumented_paths() if kind == "reference" else []
        with self._board.instrumented(paths):
            yield self

    def verify(
        self, inputs: Any = None, *, tolerance: float | None = None, seed: int = 0, progress: bool = False
    ) -> VerifyReport:
        """Try every hook point of this very model on these inputs.

        Each point must fire; an edit that returns its input must change nothing; noise must change
        the output; another run's residual stream must bring that run's output back; and nothing may
        be left on the module.

        Args:
            inputs: Tokens, text or features; None for random tokens.
            tolerance: Largest relative change by an identity edit; None for 1e-5 (0.05 in half precision).
            seed: Of the noise and of the other run's tokens.
            progress: Show a progress bar.

        Returns:
            A report: ``report.ok``, ``report.failures()``, ``report.to_dataframe()``.

        Raises:
            InputError: No inputs for a model that doesn't take tokens.
        """
        from probelens.verify import verify

        return verify(self, inputs, tolerance=tolerance, seed=seed, progress=progress)

    def edit_weights(
        self, edits: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> contextlib.AbstractContextManager[HookedModel]:
        """Change parameters inside a ``with`` block; they come back bit for bit, also after an exception.

        Args:
            edits: Name to function of the weight. Names are canonical
                (``"blocks.0.mixer.conv1d.weight"``, ``"unembed.weight"``) or the user's own.

        Raises:
            UnknownHookError: No such weight.
            ShapeError: A function that returns another shape.
        """
        from probelens.weights import edited_weights

        return edited_weights(self, edits)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[HookedModel]:
        """Eval mode inside the block; every module's own training flag comes back after it."""
        flags = {m: m.training for m in self.module.modules()}
        try:
            self.module.eval()
            yield self
        finally:
            for module, training in flags.items():
                module.training = training

    def eval(self) -> HookedModel:
        """Put the module in eval mode."""
        self.module.eval()
        return self

    def train(self, mode: bool = True) -> HookedModel:
        """Put the module in training mode."""
        self.module.train(mode)
        return self

    def to(self, *args: Any, **kw: Any) -> HookedModel:
        """Move the module, as ``torch.nn.Module.to``."""
        self.module.to(*args, **kw)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters."""
        return self.module.parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module's parameters."""
        self.module.zero_grad(set_to_none)


def _unfired(entry: Entry) -> Entry:
    fresh = Entry(entry.point, entry.fn, entry.dir)
    return fresh


def _kept(pos: int, length: int | None, wanted: Slice) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, tuple):
        wanted = slice(*wanted)
    if isinstance(wanted, slice):
        return length is None or pos in range(*wanted.indices(length))
    several = [wanted] if isinstance(wanted, int) else [int(p) for p in wanted]
    return pos in several or (length is not None and pos - length in several)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"

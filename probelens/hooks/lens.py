"""TransformerLens' methods of a HookedModel: what code written for TransformerLens calls beside runs, hooks and caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from probelens.errors import InputError, elsewhere
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call
from probelens.hooks.inputs import described, need_tokenizer, tokens_of
from probelens.hooks.names import Points
from probelens.hooks.passes.entry import Entry
from probelens.hooks.passes.recording import Slice, recorders
from probelens.hooks.passes.turns import Turn
from probelens.hooks.points import Direction, HookFn, HookPoint
from probelens.hooks.shorthand import Names
from probelens.hooks.switchboard import Switchboard


class TransformerLensMethods:
    """The part of a HookedModel that TransformerLens' habits ask for, over what the rest of it holds."""

    module: nn.Module
    adapter: Adapter
    points: Points
    switchboard: Switchboard
    turn: Turn

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Not while the model is being made: without its adapter there is no cfg to ask.
            raise elsewhere("HookedModel", name, self if "adapter" in self.__dict__ else None)

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every advertised hook point by full name, in the order of the forward pass."""
        return dict(self.points.named)

    def forward(self, *args: Any, **kw: Any) -> Any:
        """Calling the model, by the name that modules have for it.

        Args:
            args: Inputs, and what else calling the model takes.
            kw: The same by name.

        Returns:
            As calling the model does: logits (batch, pos, d_vocab), a loss (), both, None, or the residual.
        """
        return self(*args, **kw)  # type: ignore[operator]

    # -- hooks that stay ------------------------------------------------------------

    def add_hook(
        self, name: Names, hook: HookFn, dir: Direction = "fwd", is_permanent: bool = False, *, prepend: bool = False
    ) -> None:
        """A hook that stays until ``reset_hooks``, for every thread.

        Args:
            name: As for ``run_with_cache``.
            hook: fn(tensor, hook) returning a tensor, or None for no change.
            dir: "fwd" or "bwd".
            is_permanent: Stay also through ``reset_hooks()``.
            prepend: Call it before the hooks that are there.

        Raises:
            UnknownHookError: No such point.
            InputError: An unknown ``dir``.
        """
        if dir not in ("fwd", "bwd"):
            raise InputError(f"dir={dir!r} is not known. Allowed: 'fwd', 'bwd'")
        if not callable(hook):
            raise InputError(f"a hook is a function fn(tensor, hook), got {hook!r}")
        points = self.points.match(name)[0]
        entries = [Entry(p, hook, dir, is_permanent) for p in points]
        self.switchboard.add(entries, first=prepend)
        self.switchboard.staying += entries

    def reset_hooks(
        self, clear_contexts: bool = True, direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False, name: Names = None,
    ) -> None:  # fmt: skip
        """Remove the hooks of ``add_hook``, and inside ``hooks`` those of the block.

        Args:
            clear_contexts: Empty every hook point's ``ctx``.
            direction: "fwd", "bwd" or "both".
            including_permanent: Also those added with ``is_permanent=True``.
            name: Only those at these hook points, named as for ``run_with_cache``; None for all.

        Raises:
            InputError: An unknown direction.
            UnknownHookError: A name that fits no hook point.
        """
        if direction not in ("fwd", "bwd", "both"):
            raise InputError(f"direction={direction!r} is not known. Allowed: 'fwd', 'bwd', 'both'")
        where = None if name is None else {point.name for point in self.points.match(name)[0]}
        gone = [
            e for e in {*self.switchboard.staying, *self.switchboard.listening_here()}
            if direction in ("both", e.dir) and (including_permanent or not e.permanent)
            and (where is None or e.point.name in where)
        ]  # fmt: skip
        self.switchboard.remove(gone)
        self.switchboard.staying = [e for e in self.switchboard.staying if e not in gone]
        if clear_contexts:
            self.clear_contexts()

    def has_hooks(self) -> bool:
        """Whether hooks are in place that a call from here would reach: another thread's are not."""
        return any(self.switchboard.listeners(name) for name in list(self.switchboard.entries))

    def add_perma_hook(self, name: Names, hook: HookFn, dir: Direction = "fwd") -> None:
        """``add_hook`` with ``is_permanent=True``.

        Args:
            Those of ``TransformerLensMethods.add_hook``, without ``is_permanent`` and ``prepend``.
        """
        self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self, direction: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = False
    ) -> None:
        """``reset_hooks`` that leaves each point's ``ctx`` alone.

        Args:
            direction, including_permanent: As for ``TransformerLensMethods.reset_hooks``.
        """
        self.reset_hooks(False, direction, including_permanent)

    def clear_contexts(self) -> None:
        """Empty every hook point's ``ctx``."""
        for point in self.points.named.values():
            point.ctx.clear()

    def add_caching_hooks(
        self, names_filter: Names = None, incl_bwd: bool = False,
        device: torch.device | str | None = None, remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Hooks that stay until ``reset_hooks`` and fill a dict whenever the model runs.

        Args:
            Those of ``TransformerLensMethods.get_caching_hooks``, without ``pos_slice``.

        Returns:
            The dict; empty until then.
        """
        cache, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, fn in fwd:
            self.add_hook(name, fn)
        for name, fn in bwd:
            self.add_hook(name, fn, "bwd")
        return cache

    def get_caching_hooks(
        self, names_filter: Names = None, incl_bwd: bool = False,
        device: torch.device | str | None = None, remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None, pos_slice: Slice = None,
    ) -> tuple[dict[str, Any], list[tuple[str, HookFn]], list[tuple[str, HookFn]]]:  # fmt: skip
        """A dict and the hooks that fill it, for use with ``hooks`` and ``run_with_hooks``.

        Args:
            names_filter: As for ``run_with_cache``.
            incl_bwd: Keep gradients too, as ``name + "_grad"``.
            device: Where the copies go; None leaves them where they are.
            remove_batch_dim: Remove the batch axis, which must have size 1.
            cache: The dict to fill; None for a new one.
            pos_slice: Positions to keep: int, slice, list or (start, stop).

        Returns:
            The dict (name to activation), forward hooks, backward hooks. A state point's value is
            a list with one tensor (batch, ...) a step. What is asked for by another name of its point is under both.
        """
        cache = {} if cache is None else cache
        points = self.points.match(names_filter)[0]
        _, fwd, bwd = recorders(points, incl_bwd, device, None, pos_slice, cache, remove_batch_dim)
        asked = [names_filter] if isinstance(names_filter, str) else names_filter
        others: dict[str, list[str]] = {}
        for name in asked if isinstance(asked, list) else []:
            if isinstance(name, str) and (full := self.points.alias(name)) != name:
                others.setdefault(full, []).append(name)

        def under_both(point: HookPoint, fn: HookFn, suffix: str = "") -> HookFn:
            def record(tensor: Tensor, hook: HookPoint) -> None:
                fn(tensor, hook=hook)
                cache.update({name + suffix: cache[point.name + suffix] for name in others[point.name]})

            return record if point.name in others else fn

        forward = [(e.point.name, under_both(e.point, e.fn)) for e in fwd]
        return cache, forward, [(e.point.name, under_both(e.point, e.fn, "_grad")) for e in bwd]

    # -- text ------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.adapter.tokenizer

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = None) -> Tensor:
        """Token ids of text, padded to the longest.

        Args:
            input: One string or several.
            prepend_bos: Put the beginning-of-sequence token in front; None for the tokenizer's habit.

        Returns:
            Ids, int64. (batch, pos)

        Raises:
            InputError: The model has no tokenizer.
        """
        return tokens_of(self.adapter, input, prepend_bos)[0]

    def to_string(self, tokens: Tensor) -> str | list[str]:
        """Text of token ids: one string for (pos,), a list for (batch, pos).

        Args:
            tokens: Token ids. (pos,) or (batch, pos)

        Returns:
            One string, or one a row.
        """
        tokens = torch.as_tensor(tokens)
        decode = need_tokenizer(self.adapter).decode
        if tokens.ndim <= 1:
            return str(decode(tokens.reshape(-1).tolist()))
        return [str(decode(row.tolist())) for row in tokens]

    def to_str_tokens(
        self, input: str | Sequence[str] | Tensor, prepend_bos: bool | None = None
    ) -> list[str] | list[list[str]]:
        """The text of each token of a string, of several strings or of one row of ids.

        Args:
            input: A string, strings, or ids. (pos,)
            prepend_bos: As for ``to_tokens``; of strings only.

        Returns:
            One string a token; a list of these for each of several strings.

        Raises:
            InputError: Something else, or the model has no tokenizer.
        """
        if isinstance(input, (list, tuple)) and input and all(isinstance(text, str) for text in input):
            return [[str(token) for token in self.to_str_tokens(text, prepend_bos)] for text in input]
        try:
            tokens = self.to_tokens(input, prepend_bos)[0] if isinstance(input, str) else torch.as_tensor(input)
        except (TypeError, ValueError, RuntimeError) as err:
            raise InputError(f"to_str_tokens takes a string, strings, or ids (pos,), got {described(input)}") from err
        if tokens.is_floating_point():
            raise InputError(f"to_str_tokens takes ids, which are integers, got {described(input)}")
        return [str(self.to_string(t.reshape(1))) for t in tokens.reshape(-1)]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is one token.

        Args:
            string: Text, with the space in front of it if it has one.

        Returns:
            The token id.

        Raises:
            InputError: The string is several tokens, or the model has no tokenizer.
        """
        ids = self.to_tokens(string, prepend_bos=False)[0].tolist()
        if len(ids) != 1:
            raise InputError(f"{string!r} is {len(ids)} tokens ({self.to_str_tokens(string, False)}), not one")
        return int(ids[0])

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token id.

        Args:
            int_token: Token id.

        Returns:
            Its text.
        """
        return str(self.to_string(torch.tensor([int_token])))

    def get_token_position(
        self, single_token: str | int, input: str | Tensor, mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
    ) -> int:  # fmt: skip
        """The position of a token in one text.

        Args:
            single_token: Text that is one token, or its id.
            input: Text, or tokens (pos,) or (1, pos).
            mode: Which one, if there are several.
            prepend_bos: As for ``to_tokens``.

        Returns:
            The position, counted from the start.

        Raises:
            InputError: The token isn't there, or ``input`` is a batch.
        """
        tokens = self.to_tokens(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input)
        if tokens.ndim > 1 and len(tokens) != 1:
            raise InputError(f"get_token_position needs one text, got tokens of shape {tuple(tokens.shape)}")
        if mode not in ("first", "last"):
            raise InputError(f"mode={mode!r} is not known. Allowed: 'first', 'last'")
        wanted = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        found = (tokens.reshape(-1) == wanted).nonzero().flatten().tolist()
        if not found:
            raise InputError(f"token {single_token!r} doesn't occur in the {tokens.numel()} tokens of the input")
        return int(found[0 if mode == "first" else -1])

    # -- what TransformerLens' models do as modules ----------------------------------------

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """Next-token cross-entropy in nats.

        Args:
            logits: (batch, pos, d_vocab)
            tokens: (batch, pos)
            attention_mask: 1 for real tokens; padding is left out. (batch, pos)
            per_token: The loss of each prediction instead of their mean.

        Returns:
            () or, per token, (batch, pos − 1) with zeros at padding.
        """
        tokens = tokens.to(logits.device)
        mask = None if attention_mask is None else torch.as_tensor(attention_mask).to(logits.device)
        return self.adapter.loss(logits, Call((), {}, tokens, mask), per_token)

    @property
    def original_model(self) -> nn.Module:
        """The module that is wrapped, by its name on TransformerLens' bridges, whose functions look there for training mode."""
        return self.module

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Self]:
        """Eval mode inside the block; every module's own training flag comes back after it."""
        with self.adapter.evaluating():
            yield self

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[Self]:
        """Eval mode inside the block, and no other thread's call of the model meanwhile: these wait."""
        with self.turn, self.adapter.evaluating():
            yield self

    def eval(self) -> Self:
        """Put the module in eval mode."""
        return self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Put the module in training mode.

        Args:
            mode: False for eval mode.

        Returns:
            This model.
        """
        with self.turn:
            self.module.train(mode)
        return self

    def to(self, *args: Any, **kw: Any) -> Self:
        """Move the module, as ``torch.nn.Module.to``.

        Args:
            args: Device, dtype, or both.
            kw: The same by name.

        Returns:
            This model.
        """
        with self.turn:
            self.module.to(*args, **kw)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters.

        Args:
            recurse: Also those of submodules.

        Yields:
            Each parameter once.
        """
        return self.module.parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module's parameters.

        Args:
            set_to_none: None instead of zeros.
        """
        self.module.zero_grad(set_to_none)

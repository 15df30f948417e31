"""The forward pass that runs in each thread while hooks are in place: where in the sequence it is, and its calls of each module."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.points import HookPoint

# What models call what they keep of earlier positions.
_KEPT = ("cache", "past_key_values", "cache_params", "state", "mems")
_MASKS = ("attention_mask", "decoder_attention_mask")
_INPUTS = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")


def not_copied() -> InputError:
    """The error for a module that is copied while hooks are in place inside it."""
    return InputError(
        "a module can't be copied or pickled while hooks are in place inside it: the copy would run with the hooks, or the "
        "weights, of the original. Do it outside the `with` block, or after model.reset_hooks()"
    )


@dataclass(eq=False, slots=True)
class Ours:
    """A function that stands on a module while hooks are in place. A copy of the module would take it along."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied()


@dataclass(eq=False)
class Pass:
    """One forward pass.

    Args:
        batch: Examples in it; None where nothing says it.
        length: New positions of the sequence in it; None where nothing says it.
        offset: Positions that came before, in a cache; None where that isn't known.
        masks: 1 for real tokens, by the name of the argument. (batch, offset + length)
        begun: How often each site was reached, by hook point.
        finished: How many calls of each counted module have ended, by path.
    """

    batch: int | None = None
    length: int | None = None
    offset: int | None = 0
    masks: dict[str, Tensor] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    decodes: bool = False

    def at(self, point: HookPoint) -> HookPoint:
        """The point as a hook of this pass sees it: with the offset and the mask of its sequence."""
        encoder = point.name.startswith("encoder.")
        real = self.masks.get("decoder_attention_mask" if self.decodes and not encoder else "attention_mask")
        offset = 0 if encoder else self.offset
        if real is None and offset == 0:
            return point
        return point.during(real=real, offset=offset)

    def reach(self, name: str) -> int:
        """Count a call at a hook point; how many came before it in this pass."""
        count = self.begun.get(name, 0)
        self.begun[name] = count + 1
        return count

    def total(self) -> int | None:
        """How many positions the sequence has with this pass; None where nothing says it."""
        return None if self.length is None or self.offset is None else self.offset + self.length


class Passes:
    """Notices where each forward pass of a module begins and ends, as long as ``watching``."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        # Called with the arguments of a pass before it begins.
        self.before: Callable[[Any, Any], None] = lambda args, kwargs: None
        # Whether a pass from here reaches a hook.
        self.heard: Callable[[], bool] = lambda: True
        self._prepared: set[int] = set()
        self._counted: dict[str, tuple[int, Any]] = {}
        self._running: dict[int, list[Pass]] = {}
        self._handles: list[Any] = []
        # How many positions are in a cache that doesn't say it itself.
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def now(self) -> Pass | None:
        """The pass that runs in this thread; None outside of one."""
        running = self._running.get(threading.get_ident())
        return running[-1] if running else None

    def watch(self) -> None:
        """Begin to notice passes."""
        self._handles = [
            self.root.register_forward_pre_hook(Ours(self._begin), with_kwargs=True, prepend=True),
            self.root.register_forward_hook(Ours(self._end), with_kwargs=True, always_call=True),
        ]

    def unwatch(self) -> None:
        """Leave nothing on the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """A block whose pass needs no ``before``, and leaves none behind, however it ends."""
        thread, depth = threading.get_ident(), self.depth()
        outer = thread in self._prepared
        self._prepared.add(thread)
        try:
            yield
        finally:
            self.leave(depth)
            if not outer:
                self._prepared.discard(thread)

    def leave(self, depth: int) -> None:
        """Forget this thread's passes beyond the first ``depth``, as where one was ended in its midst."""
        thread = threading.get_ident()
        del self._running.get(thread, [])[depth:]
        if not self._running.get(thread):
            self._running.pop(thread, None)

    def count(self, path: str) -> None:
        """Count the calls of a module in each pass from now on, until as many ``uncount`` have come."""
        uses, handle = self._counted.get(path, (0, None))
        if not uses and isinstance(module := _at(self.root, path), nn.Module):
            handle = module.register_forward_hook(Ours(functools.partial(self._finish, path)))
        self._counted[path] = uses + 1, handle

    def _finish(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if (now := self.now()) is not None:
            now.finished[path] = now.finished.get(path, 0) + 1

    def uncount(self, path: str) -> None:
        """Undo one ``count``."""
        uses, handle = self._counted.pop(path, (0, None))
        if uses > 1:
            self._counted[path] = uses - 1, handle
        elif handle is not None:
            handle.remove()

    def depth(self) -> int:
        """How many passes run in this thread, one inside the other."""
        return len(self._running.get(threading.get_ident(), ()))

    def _begin(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if kwargs is None or not self.heard():
            # A pass of another thread, without hooks.
            self._running.setdefault(threading.get_ident(), []).append(Pass())
            return
        if threading.get_ident() not in self._prepared:
            self.before(args, kwargs)
        given = {**dict(zip(arguments(type(module).forward), args, strict=False)), **kwargs}
        self._running.setdefault(threading.get_ident(), []).append(self._pass(given))

    def _end(self, module: nn.Module, *args: Any) -> None:
        self.leave(max(0, self.depth() - 1))

    def _pass(self, given: Mapping[str, Any]) -> Pass:
        named = [given[name] for name in reversed(_INPUTS) if isinstance(given.get(name), Tensor)]
        tensors = named or [value for value in given.values() if isinstance(value, Tensor) and value.ndim]
        shape = tuple(tensors[0].shape) if tensors else ()
        length = shape[1] if len(shape) > 1 else None
        masks = {name: given[name] for name in _MASKS if isinstance(given.get(name), Tensor) and given[name].ndim == 2}
        decodes = any(name.startswith("decoder_") and value is not None for name, value in given.items())
        kept = next((given[name] for name in _KEPT if given.get(name) is not None), None)
        offset = 0 if kept is None else self._offset(kept, length, masks)
        return Pass(shape[0] if shape else None, length, offset, masks, decodes=decodes)

    def _offset(self, kept: Any, length: int | None, masks: Mapping[str, Tensor]) -> int | None:
        """How many positions came before those of this pass; None where nothing says it."""
        try:
            return int(kept.get_seq_length())
        except (AttributeError, TypeError, ValueError):
            pass
        if isinstance(kept, (tuple, list)) and kept and isinstance(kept[0], (tuple, list)):
            return int(kept[0][0].shape[-2])
        mask = masks.get("attention_mask")
        if length is None:
            return None
        try:
            before = self._seen.get(kept)
            if before is None and mask is not None and mask.shape[1] > length:
                before = mask.shape[1] - length
            if before is None and not _fresh(kept):
                return None
            self._seen[kept] = (before or 0) + length
        except TypeError:  # a list, say, to which nothing can refer weakly
            return mask.shape[1] - length if mask is not None and mask.shape[1] > length else None
        return before or 0


def _at(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:  # what belongs to another program, as on a remote model
        return None


def _fresh(kept: Any) -> bool:
    """Whether a cache of recurrent states says that it holds nothing yet."""
    told = getattr(kept, "has_previous_state", None)
    try:
        return told is not None and not (told() if callable(told) else told)
    except Exception:
        return False


def offset_of(hook: HookPoint, asked: Any) -> int:
    """Where in the sequence a hook's tensor begins; an InputError where the model doesn't say it."""
    if hook.offset is None:
        raise InputError(
            f"pos={asked!r} at {hook.name!r}: this run goes on from a state that doesn't say how many positions came before, "
            "so where it is in the sequence isn't known. Run the whole sequence (generate(..., use_cache=False)), or edit "
            "all positions"
        )
    return hook.offset


@functools.cache
def arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a module class's forward, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]

"""A module's forward: run another in its place, with its weights at hand; notice where a caller changed it.

``device_map="auto"`` and ``cpu_offload`` of accelerate put a forward of their own on the modules, which
brings the weights in and takes them out again; a forward of ours in its place does the same.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from probelens.errors import InputError, ShapeError
from probelens.hooks.config import StopForward, first_argument, pick, put
from probelens.hooks.passes.current import Ours, Passes, not_copied
from probelens.hooks.passes.turned import Layout, called_again
from probelens.hooks.points import HookPoint, version_of

_LOCK = threading.Lock()

Here = Callable[[], bool]
"""Whether what runs now is meant."""


class SwappedForward:
    """What stands in for a module's own forward: it runs others in the calls that these are for, and its own in all else.

    A copy of it would read the weights of the original module.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self.own = own
        # Whether a caller had put it on the module, in place of the one of its class.
        self.set_by_caller = False
        # In the order in which they came: whether a call is for it, and what it runs.
        self.others: tuple[tuple[Here, Callable[..., Any]], ...] = ()

    def now(self) -> Callable[..., Any]:
        """What a call from here runs."""
        return next((run for here, run in reversed(self.others) if here()), self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.now()(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied()


def forward_now(module: nn.Module) -> Callable[..., Any]:
    """What a call of a module from here runs: its own forward, or one that stands in for it."""
    forward: Callable[..., Any] = module.forward
    return forward.now() if isinstance(forward, SwappedForward) else forward


def this_thread() -> Here:
    """Says whether it is called in the thread that is running now."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


def submodule(root: nn.Module, path: str) -> nn.Module:
    """A module at a path that was there when ``root`` was wrapped; an InputError where it has been taken away."""
    try:
        return root.get_submodule(path)
    except AttributeError as err:
        raise InputError(
            f"the model has changed since it was wrapped: {path!r} is gone ({err}). Wrap it again: pl.wrap(model.module)"
        ) from err


def replaced_forward(
    module: nn.Module, packages: Collection[str], methods: Collection[str] = ("forward",)
) -> str | None:
    """Whether a module of these packages runs a forward that somebody else put there, and how that came.

    A wrapper that calls the original, as accelerate's and nnsight's do, counts as the original.

    Args:
        module: The module.
        packages: Names of the packages whose classes are known.
        methods: What the forward consists of.

    Returns:
        In words, what replaces the class's own; None if nothing does.
    """
    kinds = type(module).__mro__
    known = [kind for kind in kinds if kind.__module__.split(".")[0] in packages]
    for name in methods:
        patched = module.__dict__.get(name)
        wraps = hasattr(module, "_hf_hook") or type(patched).__module__.split(".")[0] == "nnsight"
        if patched is not None and not isinstance(patched, SwappedForward) and not wraps:
            return f"its attribute {name!r} was set"
        home = next((kind for kind in kinds if name in vars(kind)), None)
        if not known or home is None:
            continue
        if home not in known:
            return f"{home.__name__} overrides {name!r}"
        if str(getattr(vars(home)[name], "__module__", "")).split(".")[0] not in packages:
            return f"{name!r} of the class {home.__name__} was set"
    return None


# Hooks of these packages belong to the model: they record outputs, or compute a weight from its parameters. Ours are
# another matter: ``HookedModel.has_hooks``.
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "nnsight", "probelens")


def hooked_by_hand(module: nn.Module, packages: Collection[str] = _PACKAGES) -> str | None:
    """Path of the first module with a PyTorch forward hook of the caller's, "" for the module itself; None for none.

    Hooks of ``packages`` aren't the caller's.
    """
    for path, each in module.named_modules():
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()):
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if str(home).split(".")[0] not in packages:
                return path
    return None


def refuse_replaced_forward(
    module: nn.Module, packages: Collection[str], methods: Collection[str] = ("forward",)
) -> None:
    """Refuse to run a reference forward where that would leave out what somebody else does in the module's forward.

    Args:
        Those of ``replaced_forward``.

    Raises:
        InputError: The module's forward isn't its class's own.
    """
    replaced = replaced_forward(module, packages, methods)
    if replaced is not None:
        raise InputError(
            f"what lies inside a {type(module).__name__} is read from a reference forward, and this one runs another: "
            f"{replaced}, and would be left out. Put the class's own forward back, or stay at the points around it"
        )


@contextlib.contextmanager
def swapped_forward(
    module: nn.Module, forward: Callable[..., Any], reads_weights: bool = True, here: Here | None = None
) -> Iterator[None]:
    """Run ``forward`` instead of the module's own while the block lasts.

    The class and the state dict stay as they are: only the instance's ``forward`` attribute is
    set, and what was there before comes back on every way out, once nobody else has one there.

    Args:
        module: The module.
        forward: What to run.
        reads_weights: False leaves weights that accelerate offloaded where they are.
        here: Says of a call whether it is for this forward; None for every call. ``tap.here`` says it of those whose
            caller has hooks inside the module, so that other threads run the module's own forward.

    Yields:
        Nothing.
    """
    if reads_weights:
        forward = with_weights(module, forward)
    entry = (here or _everywhere, forward)
    with _LOCK:
        stand_in = module.__dict__.get("forward")
        if not isinstance(stand_in, SwappedForward):
            set_by_caller, stand_in = stand_in is not None, SwappedForward(module.forward)
            stand_in.set_by_caller = set_by_caller
            stand_in.others = (entry,)
            module.__dict__["forward"] = stand_in
        else:
            stand_in.others = (*stand_in.others, entry)
    try:
        yield
    finally:
        with _LOCK:
            stand_in.others = tuple(one for one in stand_in.others if one is not entry)
            if not stand_in.others:
                if stand_in.set_by_caller:
                    module.__dict__["forward"] = stand_in.own
                else:
                    module.__dict__.pop("forward", None)


def _everywhere() -> bool:
    return True


# -- weights that accelerate offloaded ---------------------------------------------------------------


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module with offloaded weights runs; None if accelerate doesn't say."""
    for found in module.modules():
        hook = getattr(found, "_hf_hook", None)
        for one in (hook, *getattr(hook, "hooks", ())):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module runs: the device of its first parameter, or of an offloaded one when it runs; None without any."""
    found = next(module.parameters(), None)
    if found is None:
        return None
    offloaded = execution_device(module) if found.device.type == "meta" else None
    return offloaded or found.device


def with_weights(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs with the offloaded weights of the module and of all below it in place, which it may read."""
    own: Any = getattr(module, "_hf_hook", None)
    below: list[Any] = [m for m in module.modules() if m is not module and getattr(m, "_hf_hook", None) is not None]
    if own is None and not below:
        return forward

    @functools.wraps(forward)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for one in below:
                one._hf_hook.pre_forward(one)
                stack.callback(one._hf_hook.post_forward, one, None)
            if own is None:
                return forward(*args, **kwargs)
            args, kwargs = own.pre_forward(module, *args, **kwargs)
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                own.post_forward(module, None)
                raise
            return own.post_forward(module, output)

    return placed


def stored(root: nn.Module, name: str) -> Tensor | None:
    """The numbers of a parameter or buffer, also of an offloaded one; None where there are none."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    weight: Tensor = getattr(owner, leaf)
    if weight.device.type != "meta":
        return weight
    kept = getattr(getattr(owner, "_hf_hook", None), "weights_map", None)
    return None if kept is None else torch.as_tensor(kept[leaf])


# -- hooks on a module -----------------------------------------------------------------------------


class Fires(Protocol):
    """What calls the hooks at the points of a module: a ``Switchboard``."""

    root: nn.Module
    passes: Passes
    layouts: dict[str, Layout]

    def listeners(self, name: str | None) -> list[Any]:
        """The hooks at a point that this thread's calls reach."""

    def fire(
        self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None, last_use: bool = False,
        call: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The tensor, or what the hooks at this point made of it."""


def attach_to_module(switchboard: Fires, point: HookPoint) -> list[Any]:
    """PyTorch hooks on the module at ``point.site`` that fire the point; returns their handles."""
    name, site = point.name, point.site
    assert site is not None, f"{name!r} is a boundary point without a site"
    module = submodule(switchboard.root, site.path)
    moved: dict[int, Tensor] = {}

    def fire(value: Tensor | PackedSequence) -> tuple[bool, Any]:
        # What an interrupted forward left here must not reach the next one.
        moved.pop(threading.get_ident(), None)
        if not switchboard.listeners(name):
            return False, value
        now, layout = switchboard.passes.now(), switchboard.layouts.get(name)
        call = 0 if now is None else now.reach(name)
        if point.call is not None and call != point.call:
            return False, value
        steps = layout is not None and layout.steps
        if call and point.call is None and not steps:
            raise called_again(name)
        tensor = value if isinstance(value, Tensor) else pad_packed_sequence(value, batch_first=True)[0]
        seen = site.to_hook(tensor) if isinstance(value, Tensor) else tensor
        if layout is not None and isinstance(value, Tensor):
            ndim, seen = seen.ndim, layout.to_hook(seen, now)
        version = version_of(seen)
        step = steps and layout is not None and seen.ndim < len(layout.axes or ())
        new = switchboard.fire(name, seen, 0 if step else None, 1 if step else None, call=call)
        if new is seen:
            # What a hook writes into a view reaches the model; what it writes into a copy is put back.
            copied = site.scale != 1 or not isinstance(value, Tensor)
            if not copied or (version is not None and version_of(seen) == version):
                return False, value
        if isinstance(value, Tensor):
            back = site.from_hook(new if layout is None else layout.from_hook(new, ndim))
            if site.carry is not None:
                moved[threading.get_ident()] = back - value
            return True, back
        _, lengths = pad_packed_sequence(value, batch_first=True)
        return True, pack_padded_sequence(new, lengths, batch_first=True, enforce_sorted=False)

    # PyTorch calls a hook without the keywords that it asked for where another thread took it away just before.
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None or not switchboard.listeners(name):
            return None
        key = site.index if site.index is not None else first_argument(args, kwargs, name)
        if isinstance(key, int):
            changed, new = fire(args[key])
            return ((*args[:key], new, *args[key + 1 :]), kwargs) if changed else None
        changed, new = fire(kwargs[key])
        return (args, {**kwargs, key: new}) if changed else None

    def after(module: nn.Module, args: Any, *rest: Any) -> Any:
        output = rest[-1]
        if not switchboard.listeners(name):
            return None
        changed, new = fire(pick(output, site.index, name))
        return put(output, site.index, new) if changed else None

    def carry(module: nn.Module, args: Any, *rest: Any) -> Any:
        output = rest[-1]
        delta = moved.pop(threading.get_ident(), None)
        if delta is None:
            return None
        whole = pick(output, None, name)
        return put(output, None, whole + delta.view_as(whole))

    if site.side == "out":
        return [module.register_forward_hook(Ours(after), with_kwargs=True)]
    handles = [module.register_forward_pre_hook(Ours(before), with_kwargs=True)]
    if site.carry is not None:
        # Before the other hooks there: hook_resid_post must see the moved output.
        block = submodule(switchboard.root, site.carry)
        handles.append(block.register_forward_hook(Ours(carry), with_kwargs=True, prepend=True))
    return handles


# -- a part of a model -------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped_before(module: nn.Module, what: str) -> Iterator[None]:
    """End a forward pass of this thread where ``module`` would begin, by a ``StopForward`` with its first tensor."""
    thread = threading.get_ident()

    def stop(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if threading.get_ident() == thread:
            raise StopForward(pick(args if args else tuple(kwargs.values()), None, what))

    with module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True):
        yield


@contextlib.contextmanager
def called_with(module: nn.Module, tensor: Tensor) -> Iterator[None]:
    """Put ``tensor`` in place of the first tensor that this thread calls ``module`` with."""
    thread = threading.get_ident()

    def feed(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if threading.get_ident() != thread:
            return None
        return (put(args, None, tensor), kwargs) if args else (args, put(kwargs, None, tensor))

    with module.register_forward_pre_hook(feed, with_kwargs=True, prepend=True):
        yield


@contextlib.contextmanager
def passed_over(blocks: Iterable[nn.Module], outputs: int) -> Iterator[None]:
    """Let blocks give back the first tensor they are called with, instead of running, in this thread.

    ``outputs`` is the length of the tuple that a block returns; 0 where it returns a tensor.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = pick(args if args else tuple(kwargs.values()), None, "residual")
        return (hidden, *[None] * (outputs - 1)) if outputs else hidden

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(swapped_forward(block, forward, False, this_thread()))
        yield


def length_of_output(module: nn.Module, run: Callable[[], Any]) -> int:
    """Length of the tuple that a module returns when ``run`` runs the model as far as it; 0 for a tensor."""
    seen: list[int] = []
    here = this_thread()

    def stop(module: nn.Module, args: Any, out: Any) -> None:
        if not here():
            return
        seen.append(len(out) if isinstance(out, tuple) else 0)
        raise StopForward(pick(out, None, "a block"))

    with module.register_forward_hook(stop), torch.no_grad(), contextlib.suppress(StopForward):
        run()
    if not seen:
        raise ShapeError(f"a {type(module).__name__} of the blocks wasn't called by the model's forward")
    return seen[0]

"""A module's forward: run another in its place, and notice where somebody else changed what it does."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from probelens.errors import InputError
from probelens.hooks.offload import with_weights

__all__ = ["hooked_by_hand", "makeup", "refuse_replaced_forward", "replaced_forward", "swapped_forward"]

# Forwards that stand in for a module's own, to tell them from a user's.
_SWAPPED: weakref.WeakValueDictionary[int, Callable[..., Any]] = weakref.WeakValueDictionary()


def _is_swapped(forward: Any) -> bool:
    return _SWAPPED.get(id(forward)) is forward


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
        if patched is not None and not _is_swapped(patched) and not wraps:
            return f"its attribute {name!r} was set"
        home = next((kind for kind in kinds if name in vars(kind)), None)
        if not known or home is None:
            continue
        if home not in known:
            return f"{home.__name__} overrides {name!r}"
        if str(getattr(vars(home)[name], "__module__", "")).split(".")[0] not in packages:
            return f"{name!r} of the class {home.__name__} was set"
    return None


def makeup(module: nn.Module) -> tuple[Any, ...]:
    """What a module consists of: equal until a module, a class or a function in it is exchanged.

    What was found out about a model by a trial holds as long as this stays the same. Weights don't count.

    Args:
        module: The module, with everything in it.

    Returns:
        Something to compare with ``==``.
    """
    return tuple(
        (
            id(each),
            type(each),
            type(each).forward,
            *(v for k, v in vars(each).items() if k[0] != "_" and callable(v) and not _is_swapped(v)),
        )
        for each in module.modules()
    )


# Hooks of these packages belong to the model: they record outputs, or compute a weight from its parameters. Ours are
# another matter: ``HookedModel.has_hooks``.
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "nnsight", "probelens")


def hooked_by_hand(module: nn.Module) -> str | None:
    """Whether PyTorch forward hooks of the caller's stand on a module or anything in it.

    Args:
        module: The module.

    Returns:
        Path of the first module with one, "" for the module itself; None if there is none.
    """
    for path, each in module.named_modules():
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()):
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if str(home).split(".")[0] not in _PACKAGES:
                return path
    return None


def refuse_replaced_forward(
    module: nn.Module, packages: Collection[str], methods: Collection[str] = ("forward",)
) -> None:
    """Refuse to run a reference forward where that would leave out what somebody else does in the module's forward.

    Args:
        module: The module.
        packages: Names of the packages whose classes the reference forward is equal to.
        methods: What the forward consists of.

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
    module: nn.Module, forward: Callable[..., Any], reads_weights: bool = True
) -> Iterator[None]:
    """Run ``forward`` instead of the module's own while the block lasts.

    The class and the state dict stay as they are: only the instance's ``forward`` attribute is
    set, and what was there before comes back on every way out.

    Args:
        module: The module.
        forward: What to run.
        reads_weights: False leaves weights that accelerate offloaded where they are.

    Yields:
        Nothing.
    """
    if reads_weights:
        forward = with_weights(module, forward)
    _SWAPPED[id(forward)] = forward
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is missing:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

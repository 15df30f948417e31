"""Which of two equal forwards the primitives run: on a CPU an SSM's reference mixers are many times the faster one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from probelens.hooks.trials import fingerprint

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel

__all__ = ["faster_forwards"]

# Of each model, what it consisted of when it was tried, and whether both forwards gave the same numbers.
_EQUAL: WeakKeyDictionary[HookedModel, tuple[Any, bool]] = WeakKeyDictionary()


@contextlib.contextmanager
def faster_forwards(model: HookedModel, names: Iterable[str] = ()) -> Iterator[None]:
    """Run the faster forwards while the context lasts, where they are sure to see what the model's own would.

    The model's own forward runs where the caller has hooks on the model, or a point is on a module inside a mixer,
    since the two forwards may not call the same modules. Whether both give the same numbers is tried, and remembered until something in the model is exchanged.

    Args:
        model: The wrapped model.
        names: Hook points that are read or edited meanwhile.

    Yields:
        Nothing.
    """
    paths = model.adapter.faster_paths()
    inside = tuple(f"{path}." for path in paths)
    clear = (
        bool(paths)
        # Rounding in half precision depends on the order of sums.
        and model.cfg.dtype in (torch.float32, torch.float64)
        and not model.has_hooks()
        and not any(model.point(name).module.startswith(inside) for name in names)
        and not any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
            for path in paths
            for module in model.module.get_submodule(path).modules()
        )
    )
    with (
        model._switchboard.instrumented(paths) if clear and _equal(model, paths) else contextlib.nullcontext()
    ):
        yield


def _equal(model: HookedModel, paths: list[str]) -> bool:
    now = fingerprint(model.module)
    if model not in _EQUAL or _EQUAL[model][0] != now:
        _EQUAL[model] = now, _tried(model, paths)
    return _EQUAL[model][1]


def _tried(model: HookedModel, paths: list[str]) -> bool:
    if not model.cfg.d_vocab:
        return False
    x = torch.randint(model.cfg.d_vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    with model._switchboard.muted(), torch.no_grad(), model.evaluating():
        try:
            own = model(x)
            with model._switchboard.instrumented(paths):
                found = model(x)
        except Exception:
            # A model that needs more than tokens fails in a way of its own; its own forward is then the safe one.
            return False
    return found.shape == own.shape and bool((found - own).abs().max() <= 1e-4 * own.abs().max())

"""Devices that this machine doesn't have: tensors with real numbers that say they are on ``cuda:1`` and refuse to mix.

Inside ``pretended()`` a tensor sent to a cuda device stays in memory and remembers where it would be. An operation on
tensors of two devices is an error, as it would be there; what comes out is where its inputs were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
_get = Tensor.device.__get__  # type: ignore[attr-defined]


class Placed(Tensor):
    """A tensor that says it is on another device."""

    place: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _place(tensor: Tensor) -> torch.device:
    return tensor.place if isinstance(tensor, Placed) else CPU


def _put(tensor: Any, place: torch.device) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        if place.type == "cpu":
            return tensor.as_subclass(Tensor) if isinstance(tensor, Placed) else tensor
        tensor = tensor.as_subclass(Placed)
        tensor.place = place
        return tensor


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        return torch.device(value)
    return None


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return _checked(func, args, kwargs)


def _checked(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if func == _get:
        return _place(args[0])
    if name in ("__get__", "__set__", "__repr__", "__format__") and getattr(func, "__self__", None) is not Tensor.data:
        if name != "__get__":
            args, kwargs = tree_map(lambda t: _put(t, CPU), (args, kwargs))
        found = func(*args, **kwargs)
        return _put(found, _place(args[0])) if isinstance(found, Tensor) else found
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    asked = _device(kwargs.get("device"))
    if name in ("grad", "backward"):
        return (
            tuple(_put(g, _place(t)) for g, t in zip(func(*args, **kwargs), args[1]))
            if name == "grad"
            else func(*args, **kwargs)
        )
    if name in ("to", "cpu", "cuda", "copy_"):
        target = {"cpu": CPU, "cuda": torch.device("cuda:0")}.get(name)
        others = [_device(a) for a in args[1:]] + [
            _place(a) for a in args[1:] if isinstance(a, Tensor) and name == "to"
        ]
        target = target or asked or next((d for d in others if d is not None), _place(args[0]))
        if name == "copy_":
            target = _place(args[0])
    else:
        places = {_place(t) for t in tensors if t.dim() or isinstance(t, Placed)}
        places = {p for p in places if p.type != "cpu"} | {
            _place(t) for t in tensors if t.dim() and _place(t).type == "cpu" and not _index(name)
        }
        if len(places) > 1:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, found {sorted(map(str, places))}"
            )
        target = asked or next(iter(places), CPU)
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    args = tuple(CPU if _device(a) is not None and name in ("to", "new_zeros", "new_empty") else a for a in args)
    if name == "cuda":
        args = args[:1]
        func = Tensor.clone
    return tree_map(lambda t: _put(t, target), func(*args, **kwargs))


def _index(name: str) -> bool:
    # An index on the CPU is allowed for a tensor anywhere.
    return name in ("__getitem__", "__setitem__", "index_put_")


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.as_subclass or getattr(func, "__name__", "") == "as_subclass":
            return func(*args, **kwargs)
        return _run(func, args, kwargs)


@contextmanager
def pretended() -> Iterator[None]:
    """Two more devices while the block lasts. They have no random numbers of their own."""
    state = {"get_rng_state": lambda *_: torch.empty(0), "set_rng_state": lambda *_: None}
    with _Mode(), mock.patch.multiple(torch.cuda, **state):
        yield


def spread(module: nn.Module, places: dict[str, str]) -> nn.Module:
    """Put the parameters and buffers below each path on its device; the last path that fits counts."""
    for path, owner in module.named_modules():
        for store in (owner._parameters, owner._buffers):
            for key, value in list(store.items()):
                fits = [d for p, d in places.items() if f"{path}.{key}.".startswith(f"{p}." if p else "")]
                if value is None or not fits:
                    continue
                placed = _put(value.detach(), torch.device(fits[-1]))
                if isinstance(value, nn.Parameter):
                    placed = nn.Parameter(placed, value.requires_grad)
                    placed.place = torch.device(fits[-1])
                store[key] = placed
    return module

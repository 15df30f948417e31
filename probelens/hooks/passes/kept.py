"""What a module keeps between calls, such as a hidden state: put back after a trial, and named where it matters."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Kept", "restored"]

_PYTORCH = {*nn.Module().__dict__, "forward"}
_CONTAINERS = (list, dict, set, deque)


class Kept:
    """The plain attributes and the buffers of a module and all below it, as they were at one time.

    Args:
        root: The module. Its parameters are not among them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._held: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for path, module in root.named_modules():
            plain = {name: value for name, value in list(module.__dict__.items()) if name not in _PYTORCH}
            inside = {**plain, **{f"buffer {name}": value for name, value in module._buffers.items()}}
            copies = {
                name: _copied(value) for name, value in inside.items() if isinstance(value, (Tensor, *_CONTAINERS))
            }
            self._held.append((path, module, plain, dict(module._buffers), copies))

    def put_back(self) -> list[str]:
        """Undo what has changed since; the paths of it."""
        changed: list[str] = []
        for path, module, plain, buffers, copies in self._held:
            now = {name: value for name, value in list(module.__dict__.items()) if name not in _PYTORCH}
            different = [name for name in {**plain, **now} if plain.get(name, self) is not now.get(name, self)]
            for name in different:
                if name in plain:
                    module.__dict__[name] = plain[name]
                else:
                    del module.__dict__[name]
            for name in [
                n for n in {**buffers, **module._buffers} if buffers.get(n, self) is not module._buffers.get(n, self)
            ]:
                different.append(name)
                module._buffers.pop(name, None)
                if name in buffers:
                    module._buffers[name] = buffers[name]
            for name, (held, version) in copies.items():
                value = buffers[name.removeprefix("buffer ")] if name.startswith("buffer ") else plain[name]
                if _refill(value, held, version):
                    different.append(name.removeprefix("buffer "))
            changed += [f"{path}.{name}" if path else name for name in dict.fromkeys(different)]
        return changed


def _copied(value: Any) -> tuple[Any, int | None]:
    if not isinstance(value, Tensor):
        return copy.copy(value), None
    if value.is_inference() or value.device.type == "meta":
        return value, None
    return value.detach().clone(), value._version


def _refill(value: Any, held: Any, version: int | None) -> bool:
    """Put a copy's contents back where they have changed; whether they had."""
    if isinstance(value, Tensor):
        if version is None or value._version == version:
            return False
        with torch.no_grad():
            value.copy_(held)
        return True
    if len(value) == len(held) and all(a is b for a, b in zip(_items(value), _items(held), strict=True)):
        return False
    value.clear()
    value.extend(held) if isinstance(value, (list, deque)) else value.update(held)
    return True


def _items(container: Any) -> list[Any]:
    return [x for pair in container.items() for x in pair] if isinstance(container, dict) else list(container)


@contextlib.contextmanager
def restored(root: nn.Module) -> Iterator[Kept]:
    """What the module keeps is as before after the block, and so are PyTorch's random numbers."""
    kept = Kept(root)
    kinds = {p.device for p in root.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(sorted(device.index or 0 for device in kinds)):
        try:
            yield kept
        finally:
            kept.put_back()

"""A tap for the kernel tests: reads some points, edits others, at all steps or at some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Edit = Callable[[Tensor, Any], Tensor | None]


class Recorder:
    """Keeps what it is offered and edits where it is told to.

    Args:
        read: Points to read.
        edit: Point to function ``fn(tensor, pos)``; None leaves the tensor alone.
        at: Steps at which state points are edited; None for every step.
    """

    def __init__(
        self, read: Iterable[str] = (), edit: Mapping[str, Edit] | None = None, at: list[int] | None = None
    ) -> None:
        self.read = set(read)
        self.edit = dict(edit or {})
        self.at = at
        self.calls: list[tuple[str, int | None]] = []
        self.whole: dict[str, Tensor] = {}
        self.steps: dict[str, dict[int, Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        if not self.wants(name):
            return tensor
        self.calls.append((name, pos))
        if pos is None:
            assert name not in self.whole, f"{name} offered twice"
            self.whole[name] = tensor.clone()
        else:
            assert length is not None
            assert 0 <= pos < length
            assert pos not in self.steps.setdefault(name, {}), f"{name} offered twice at {pos}"
            self.steps[name][pos] = tensor.clone()
        if name in self.edit and (pos is None or self.at is None or pos in self.at):
            new = self.edit[name](tensor, pos)
            if new is not None:
                assert new.shape == tensor.shape
                return new
        return tensor

    def wants(self, name: str) -> bool:
        return name in self.read or name in self.edit

    def edits(self, name: str) -> bool:
        return name in self.edit

    def positions(self, name: str, length: int | None = None) -> list[int] | None:
        return self.at

    def trajectory(self, name: str) -> Tensor:
        """What a state point showed, (batch, pos, ...), however it was offered."""
        if name in self.whole:
            return self.whole[name]
        steps = self.steps[name]
        assert sorted(steps) == list(range(len(steps)))
        return torch.stack([steps[k] for k in sorted(steps)], dim=1)


def same(tensor: Tensor, pos: int | None) -> Tensor:
    """The identity edit, through a new tensor."""
    return tensor * 1.0


def zero(tensor: Tensor, pos: int | None) -> Tensor:
    return torch.zeros_like(tensor)


def halve(tensor: Tensor, pos: int | None) -> Tensor:
    return tensor * 0.5 + 0.25

"""Which pairs are patched, in which direction and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.points import has_positions

Pos = Literal["each"] | int | slice | Sequence[int] | Tensor | None
Mode = Literal["denoise", "noise"]


def check_pairs(pairs: Any, mode: str) -> None:
    """Refuse what isn't PatchPairs, or an unknown mode."""
    if mode not in ("denoise", "noise"):
        raise InputError(f"mode {mode!r} is not known. Allowed: 'denoise', 'noise'")
    if not hasattr(pairs, "clean") or not hasattr(pairs, "answers"):
        raise InputError(
            f"patching needs PatchPairs, got a {type(pairs).__name__}. Make them with task.pairs(), or "
            "probelens.PatchPairs(clean, corrupted, edit_pos, read_pos, answers)."
        )
    if not len(pairs):
        raise InputError("there is no pair to patch: clean and corrupted have no example")


def marks(pairs: Any) -> dict[str, int]:
    """Positions that all pairs share: where they were edited, and where the answer is read."""
    found = {"edited": pairs.edit_pos, "read": pairs.read_pos}
    return {name: int(pos[0]) for name, pos in found.items() if bool((pos == pos[0]).all())}


def check_positions(model: HookedModel, names: Sequence[str], columns: Sequence[Tensor | None]) -> None:
    """Refuse (InputError) points without an axis of positions where some positions are to be patched and others not."""
    if all(column is None for column in columns):
        return
    for name in names:
        point = model.point(name)
        if not has_positions(point):
            raise InputError(
                f"{name!r} has the axes {point.axes}, none of positions, so it can't be patched at some of them. "
                "Patch it at all positions at once with pos=None, or take another point"
            )


def columns(pos: Pos, length: int, n: int) -> tuple[list[Tensor | None], list[str]]:
    """Columns of a patch result: a position for each example, or None for all at once; and labels."""

    def constant(p: int) -> Tensor:
        if not -length <= p < length:
            raise InputError(
                f"position {p} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
            )
        return torch.full((n,), p % length)

    if pos is None:
        return [None], ["all"]
    if isinstance(pos, str):
        if pos != "each":
            raise InputError(f"pos={pos!r} is not known. Allowed: None, 'each', an int, a slice, a list, a tensor")
        pos = slice(None)
    if isinstance(pos, Tensor) and pos.ndim == 1 and len(pos) == n and n != 0:
        if bool(((pos < -length) | (pos >= length)).any()):
            raise InputError(f"a position is outside the {length} positions of the sequences")
        return [pos.long() % length], ["per example"]
    if isinstance(pos, int):
        wanted = [pos]
    elif isinstance(pos, slice):
        wanted = list(range(length))[pos]
    elif isinstance(pos, Tensor):
        raise ShapeError(f"pos as a tensor must be (example,) with {n} examples, got {tuple(pos.shape)}")
    else:
        wanted = [int(p) for p in pos]
    if not wanted:
        raise InputError(f"pos={pos!r} selects no position of {length}")
    return [constant(p) for p in wanted], [str(p % length) for p in wanted]

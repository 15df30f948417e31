"""Which pairs are patched, in which direction and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.points import has_positions

Pos = Literal["each", "last"] | int | slice | Sequence[int] | Tensor | None
Heads = Literal["each"] | int | Sequence[int] | None
# A position of each pair on the side that is patched, None for all at once, and the one that its activations come from.
Column = tuple[Tensor | None, Tensor | None]
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
    known = {name: pos for name, pos in found.items() if pos is not None}
    return {name: int(pos.flatten()[0]) for name, pos in known.items() if bool((pos == pos.flatten()[0]).all())}


def notes(pairs: Any, answered: bool) -> dict[str, Any]:
    """What a result keeps of its pairs: positions that all share, and whether they lack right answers."""
    return {"marks": marks(pairs), **({} if answered else {"unanswered": True})}


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


def columns(pos: Pos, length: int, n: int, pairs: Any = None) -> tuple[list[Column], list[str]]:
    """Columns of a patch result, as if corrupted runs were patched with clean activations; and their labels.

    Each is the position on the corrupted side and that on the clean side, both of each example (example,), or None for
    all positions at once.
    """

    def constant(p: int) -> Column:
        if not -length <= p < length:
            raise InputError(
                f"position {p} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
            )
        where = torch.full((n,), p % length)
        return where, where

    if pos is None:
        return [(None, None)], ["all"]
    if isinstance(pos, str):
        if pos == "last" and pairs is not None:
            return [(pairs.places("last", 1), pairs.places("last", 0))], ["last"]
        if pairs is not None and pos in pairs.spans:
            return [(pairs.spans[pos], pairs.spans[pos])], [pos]
        if pos != "each":
            raise InputError(
                f"pos={pos!r} is not known. Allowed: None, 'each', 'last', an int, a slice, a list, a tensor"
                + "".join(f", {name!r}" for name in getattr(pairs, "spans", {}))
            )
        pos = slice(None)
    if isinstance(pos, Tensor) and pos.shape in ((n,), (n, 2)) and pos.ndim and n != 0:
        if bool(((pos < -length) | (pos >= length)).any()):
            raise InputError(f"a position is outside the {length} positions of the sequences")
        pos = pos.long() % length
        return [(pos, pos) if pos.ndim == 1 else (pos[:, 1], pos[:, 0])], ["per example"]
    if isinstance(pos, int):
        wanted = [pos]
    elif isinstance(pos, slice):
        wanted = list(range(length))[pos]
    elif isinstance(pos, Tensor):
        raise ShapeError(
            f"pos as a tensor must be (example,), or (example, 2) = [clean, corrupted], with {n} examples, got "
            f"{tuple(pos.shape)}"
        )
    else:
        wanted = [int(p) for p in pos]
    if not wanted:
        raise InputError(f"pos={pos!r} selects no position of {length}")
    return [constant(p) for p in wanted], [str(p % length) for p in wanted]


def shared_columns(pos: Pos, length: int, n: int) -> tuple[list[Tensor | None], list[str]]:
    """Columns of positions that are the same on both sides, and their labels."""
    found, labels = columns(pos, length, n)
    if any(a is not None and b is not None and not torch.equal(a, b) for a, b in found):
        raise ShapeError(f"pos must be (example,) with {n} examples here: the same position on both sides")
    return [target for target, _ in found], labels

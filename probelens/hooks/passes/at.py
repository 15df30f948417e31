"""Hooks limited to positions of the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.passes.current import offset_of
from probelens.hooks.points import HookFn, HookPoint, checked, has_positions, no_positions, version_of

__all__ = ["At", "at", "last_real"]


@dataclass(frozen=True)
class At:
    """A hook function limited to some positions; made by ``at``.

    Args:
        positions: Where; negative ones count from the end. "last" is each example's last real token, a tensor one
            position per example (batch,).
        fn: ``fn(tensor, hook)`` for one position: the tensor comes without its position axis.
    """

    positions: tuple[int, ...] | Literal["last"] | Tensor
    fn: HookFn
    pure: ClassVar[bool] = True  # it copies what ``fn`` may write into

    def resolve(self, length: int | None, real: Tensor | None = None) -> list[int]:
        """The positions counted from the start.

        Args:
            length: How many positions the sequence has; None where that isn't known.
            real: 1 for real tokens; None for no padding. (batch, length)

        Returns:
            Numbers from 0 to ``length`` − 1, each once.

        Raises:
            InputError: A position outside ``length``, or counted from the end of a sequence of unknown length.
        """
        return sorted({*self._rows(length, real).flatten().tolist()})

    def _rows(self, length: int | None, real: Tensor | None) -> Tensor:
        """The positions from the start, of all examples (n,), or one per example (batch, 1)."""
        if isinstance(self.positions, str):
            return last_real(length, real).reshape(-1, 1) if real is not None else last_real(length, None)
        given = torch.as_tensor(self.positions).cpu()
        if length is None:
            if bool((given < 0).any()):
                raise InputError(
                    f"the length of the sequence isn't known at this hook: count from 0, got {given.tolist()}"
                )
        elif len(bad := given[(given < -length) | (given >= length)]):
            raise InputError(
                f"position {int(bad[0])} asked for, but the sequence has {length} positions: "
                f"allowed are {-length} to {length - 1}"
            )
        else:
            given = given % length
        return given[:, None] if isinstance(self.positions, Tensor) else given

    def __call__(self, tensor: Tensor, hook: HookPoint) -> Tensor | None:
        axis, step = hook.pos_axis, hook.pos
        if step is None and (tensor.ndim <= axis or not has_positions(hook)):
            raise ShapeError(f"{hook.name!r} gives a tensor of shape {tuple(tensor.shape)}: {no_positions(hook)}")
        offset = offset_of(hook, self.positions)
        length = hook.length if step is not None else offset + tensor.shape[axis]
        where = self._rows(length, hook.real)
        if where.ndim > 1 and len(where) not in (1, len(tensor)):
            raise ShapeError(
                f"pos has {len(where)} positions for the {len(tensor)} examples at {hook.name!r}; a list means all examples"
            )
        if step is not None:
            return self._at(tensor, hook, where) if bool(where.eq(step).any()) else None
        result = None
        for p in sorted({*where.flatten().tolist()}):
            if not offset <= p < offset + tensor.shape[axis]:
                continue
            before = (tensor if result is None else result).select(axis, p - offset)
            new = self._at(before, hook.at(p, length), where)
            if new is not None:
                if result is None:
                    result = tensor.clone()
                result.select(axis, p - offset).copy_(new)
        return result

    def _at(self, before: Tensor, hook: HookPoint, where: Tensor) -> Tensor | None:
        """What the hook makes of one position (batch, ...); None for no change."""
        given = before.clone()
        version = version_of(given)
        new = self.fn(given, hook=hook)
        if new is None:
            # A hook may also write into what it gets.
            if version_of(given) == version and (version is not None or torch.equal(given, before)):
                return None
            new = given
        new = checked(new, before, hook)
        if where.ndim == 1:
            return new
        rows = where.eq(hook.pos or 0).any(1).to(before.device)
        return torch.where(rows.view(-1, *[1] * (before.ndim - 1)), new, before)


def at(pos: int | Sequence[int] | Literal["last"] | Tensor, fn: HookFn) -> At:
    """Limit a hook to positions of the sequence, the same way for every kind of hook point, also while generating.

    Args:
        pos: A position or several; negative ones count from the end. "last" is each example's last real token by the
            mask of the run. A tensor has one position per example. (batch,)
        fn: Hook function. It is called once for each position, with the tensor there
            (batch, ...) and ``hook.pos`` set; None leaves that position alone. What it makes of examples for which
            the position isn't meant is dropped.

    Returns:
        A hook function for ``run_with_hooks``, ``hooks`` and ``add_hook``. At a state point the
        engine may run fused kernels between the positions named here.

    Raises:
        InputError: No position, or one that isn't an integer.

    Examples:
        >>> import torch
        >>> hook = HookPoint("hook_embed", "boundary", ("batch", "pos", "d_model"), "embed")
        >>> zero_first = at(0, lambda tensor, hook: torch.zeros_like(tensor))
        >>> zero_first(torch.ones(1, 2, 3), hook=hook)
        tensor([[[0., 0., 0.],
                 [1., 1., 1.]]])
    """
    if (
        isinstance(pos, Tensor)
        and pos.ndim == 1
        and len(pos)
        and not (pos.is_floating_point() or pos.dtype == torch.bool)
    ):
        return At(pos.detach().cpu().long(), fn)
    if isinstance(pos, str) and pos == "last":
        return At("last", fn)
    positions = (pos,) if isinstance(pos, (int, str)) or not isinstance(pos, Iterable) else tuple(pos)
    if not positions or not all(isinstance(p, int) and not isinstance(p, bool) for p in positions):
        raise InputError(
            f"at() needs a position, a list of positions (integers), a tensor (batch,) or 'last', got {pos!r}"
        )
    return At(positions, fn)


def last_real(length: int | None, real: Tensor | None) -> Tensor:
    """The last real position of each example (batch,), or the last of all (1,) without a mask.

    Args:
        length: How many positions the sequence has.
        real: 1 for real tokens. (batch, length)

    Returns:
        Positions from the start. (batch,), or (1,) without a mask

    Raises:
        InputError: The length isn't known.
        ShapeError: A mask of another length, or an example that is all padding.

    Examples:
        >>> last_real(3, torch.tensor([[1, 1, 0], [0, 1, 1]])), last_real(3, None)
        (tensor([1, 2]), tensor([2]))
    """
    if length is None:
        raise InputError("the length of the sequence isn't known at this hook: pos='last' can't be told")
    if real is None:
        return torch.tensor([length - 1])
    if real.shape[-1] != length:
        raise ShapeError(
            f"pos='last' needs a mask of this hook point's {length} positions, and the run's has {real.shape[-1]}"
        )
    found = real.bool().cpu()
    if not bool(found.any(1).all()):
        empty = (~found.any(1)).nonzero().flatten().tolist()
        raise ShapeError(f"example {empty[0]} is all padding, so it has no last real token")
    return length - 1 - found.flip(1).long().argmax(1)

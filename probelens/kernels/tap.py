"""What the recurrent kernels ask of a tap, and how they run from one edited step to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from probelens.errors import InputError


@dataclass(frozen=True)
class KernelPoint:
    """What a kernel says about one of its points.

    Args:
        axes: Names of the axes of the whole tensor, "pos" among them also for a state point.
        step: True for a state point, which is offered one step at a time when it may be edited.
        note: What is there, and what an edit reaches.
    """

    axes: tuple[str, ...]
    note: str
    step: bool = False


class Tap(Protocol):
    """Called by a kernel at each of its points; what it returns is used from there on.

    A state point is offered one step at a time, with ``pos`` set, when somebody may edit it, and as the whole
    trajectory (batch, pos, ...) in one call, with ``pos`` None, when all that listen only read.
    """

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        """Offer a tensor; the result has the same shape."""
        ...

    def wants(self, name: str) -> bool:
        """Whether anybody listens at the point.

        Args:
            name: Point, by the kernel's short name.

        Returns:
            True if the tensor must be offered.
        """
        ...

    def edits(self, name: str) -> bool:
        """Whether anybody that listens may return something else than what was offered.

        Args:
            name: Point, by the kernel's short name.

        Returns:
            False when all that listen only read.
        """
        ...

    def positions(self, name: str, length: int | None = None) -> list[int] | None:
        """Steps at which a state point must be offered one by one; None for every step.

        Args:
            name: State point, by the kernel's short name.
            length: How many steps there are, to count negative positions from the end; None where that isn't known.

        Returns:
            Positions in order; None for every step.
        """
        ...


class NullTap(Tap):
    """A tap that listens nowhere, so that the kernels take their fastest way.

    Examples:
        >>> NullTap().wants("hook_conv")
        False
    """

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        return tensor

    def wants(self, name: str) -> bool:
        return False

    def edits(self, name: str) -> bool:
        return False

    def positions(self, name: str, length: int | None = None) -> list[int] | None:
        return []


def segments(positions: Iterable[int], length: int) -> list[tuple[int, int, bool]]:
    """Cut a sequence after each edited position, so that a fused kernel can run every piece.

    Args:
        positions: Edited positions; negative ones count from the end, repeats count once.
        length: Number of positions.

    Returns:
        Pieces (start, stop, edited) that cover 0 to ``length`` in order. ``edited`` says that the
        last position of the piece, ``stop - 1``, is one of ``positions``.

    Raises:
        InputError: A position outside the sequence.

    Examples:
        >>> segments([3, -1], 8)
        [(0, 4, True), (4, 8, True)]
        >>> segments([3], 8)
        [(0, 4, True), (4, 8, False)]
        >>> segments([], 8)
        [(0, 8, False)]
    """
    for pos in (positions := list(positions)):
        if not -length <= pos < length:
            raise InputError(
                f"position {pos} asked for, but the sequence has {length} positions: "
                f"allowed are {-length} to {length - 1}"
            )
    starts = [0, *sorted({pos % length + 1 for pos in positions})]
    pieces = [(start, stop, True) for start, stop in itertools.pairwise(starts)]
    return pieces if pieces and starts[-1] == length else [*pieces, (starts[-1], length, False)]


def steps_to_offer(tap: Tap, names: Iterable[str], length: int, offset: int = 0) -> list[int] | None:
    """Steps of this call, sorted, at which a kernel has to stop for one or more state points; None for all.

    ``offset`` is the position of the first of ``length`` steps in the whole sequence.
    """
    steps: set[int] = set()
    for name in names:
        if not tap.wants(name):
            continue
        positions = tap.positions(name, offset + length)
        if positions is None:
            return None
        # Positions of an earlier or later call of a chain aren't this call's business.
        steps.update(p - offset for p in positions if offset <= p < offset + length)
    return sorted(steps)


def offer(tap: Tap, name: str, tensor: Tensor) -> Tensor:
    """Call the tap with a tensor that an in-place hook may write to without harm to autograd."""
    return tap(name, tensor.clone() if tap.edits(name) else tensor)


def offer_last_use(tap: Tap, name: str, trajectory: Tensor, length: int) -> None:
    """Offer a trajectory that the kernel doesn't use again; a tap with ``offer_last_use`` may keep it as it is."""
    hand_over: Callable[[str, Tensor, int | None, int | None], Tensor] = getattr(tap, "offer_last_use", tap)
    hand_over(name, trajectory, None, length)


def run_between(
    steps: Iterable[int],
    length: int,
    state: Tensor | None,
    run: Callable[[slice, Tensor | None], tuple[Tensor, Tensor]],
    read: Callable[[int, Tensor], Tensor],
    on_state: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Run a fused kernel from one edited step to the next: output of all steps (batch, pos, ...) and the last state.

    ``run`` takes a range of steps and the state before it and gives their output and the state after it. ``on_state``
    takes an edited step and the state after it and gives the state to go on with, from which ``read`` makes that
    step's output (batch, ...).
    """
    parts: list[Tensor] = []
    for start, stop, edited in segments(steps, length):
        y, state = run(slice(start, stop), state)
        if edited:
            state = on_state(stop - 1, state)
            y = torch.cat([y[:, :-1], read(stop - 1, state)[:, None].to(y.dtype)], dim=1)
        parts.append(y)
    assert state is not None
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), state


class StatePoint:
    """One state point of a kernel that runs step by step: edited where somebody asks, kept for those who only read.

    Args:
        tap: Listens and edits.
        name: The point, by the kernel's short name.
        length: How many steps this call has.
        offset: Position of its first step in the whole sequence.
    """

    def __init__(self, tap: Tap, name: str, length: int, offset: int = 0) -> None:
        self._tap, self._name, self._offset, self._end = tap, name, offset, offset + length
        heard = tap.wants(name)
        self._edits = heard and tap.edits(name)
        self._reads = heard and not self._edits
        self._at = steps_to_offer(tap, [name], length, offset) if self._edits else []
        self._kept: list[Tensor] = []

    def edited(self, step: int) -> bool:
        """Whether somebody may edit the state after this step of the call."""
        return self._edits and (self._at is None or step in self._at)

    def kept(self, step: int) -> bool:
        """Whether somebody wants the state after this step of the call, to read or to edit it."""
        return self._reads or self.edited(step)

    def __call__(self, step: int, state: Tensor) -> Tensor:
        """The state to go on with after a step of the call. (batch, ...)"""
        if self.edited(step):
            return self._tap(self._name, state.clone(), self._offset + step, self._end)
        if self._reads:
            self._kept.append(state)
        return state

    def done(self) -> None:
        """Hand the trajectory to those who read, after the last step."""
        if self._reads:
            offer_last_use(self._tap, self._name, torch.stack(self._kept, dim=1), self._end)


def masked(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """What goes into a mixer, with zeros in the place of padding."""
    return hidden if mask is None else (hidden * mask[:, :, None]).to(hidden.dtype)

"""Half precision: how far runs from mid-sequence may be from whole ones, which is what whole runs in other batches are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounding:
    """The largest differences of the residual after the last block, as shares of its largest value.

    Args:
        dtype: What the model computes in.
        resumed: Between runs from mid-sequence and whole runs.
        batches: Between whole runs in batches of other shapes: fewer examples or more, and the first positions alone.
    """

    dtype: str
    resumed: float
    batches: float

    @property
    def within(self) -> bool:
        """Whether resuming changes no more than another batch does."""
        return self.resumed <= self.batches

    def __str__(self) -> str:
        return (
            f"{self.dtype}: runs from mid-sequence differ from whole ones by {self.resumed:.1e} of the largest value, whole "
            f"runs in other batches by {self.batches:.1e}"
        )


def kept(rounding: Rounding | None) -> dict[str, str]:
    """What a result keeps of it among its ``extra``: a sentence, where there was half precision."""
    return {} if rounding is None else {"rounding": f"{rounding}."}


def is_half(dtype: torch.dtype) -> bool:
    """Whether sums are so coarse that their bits depend on the shape of a batch."""
    return dtype not in (torch.float32, torch.float64)


def shapes(examples: int, length: int) -> list[tuple[int, int, int]]:
    """Batches of other shapes than the whole: examples of each, positions from the first on, and copies of the examples."""
    sizes = {1, (examples + 1) // 2} - {examples}
    several = [(size, length, 1) for size in sorted(sizes)] or [(2, length, 2)]
    return several + [(examples, first, 1) for first in sorted({1, 3, length // 2}) if 0 < first < length]


def between_batches(run: Callable[[slice, int, int], Tensor], own: Tensor) -> float:
    """The largest difference between whole runs in batches of other shapes, as a share of the largest value.

    ``run(rows, positions, copies)`` runs some examples at the first positions, several times in one batch, and gives the
    first copy; ``own`` is the run of all. (example, pos, d_model)
    """
    worst = 0.0
    for size, length, copies in shapes(*own.shape[:2]):
        for first in range(0, len(own), size):
            rows = slice(first, first + size)
            worst = max(worst, share(run(rows, length, copies), own[rows, :length], own))
    return worst


def share(found: Tensor, expected: Tensor, of: Tensor) -> float:
    """The largest difference as a share of the largest value of ``of``; infinite where it isn't a number."""
    # Equal values that aren't finite, as padding may have, don't differ.
    off = torch.where(found == expected, 0.0, (found.float() - expected.float()).abs()).max()
    size = of.float().masked_fill(~torch.isfinite(of), 0).abs().max()
    ratio = float(off / size) if float(off) else 0.0
    return ratio if ratio == ratio else float("inf")

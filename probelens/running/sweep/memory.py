"""How large the tensors of a sweep are, and the limits that keep them within a memory budget."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from probelens.hooks.model import HookedModel
from probelens.running.sweep.conditions import Read

# Limits in bytes where the caller names no budget.
EDITED = 1 << 28
PASSES = 1 << 30
LOGITS = 1 << 26
# About how many widths of the residual stream a block needs for a token while it runs: MLP, projections, gates.
WORK = 16


@dataclass(frozen=True)
class Sizes:
    """Bytes for one example.

    Args:
        resid: The residual stream at every position.
        logits: Logits at every position.
        reads: Logits at the positions that are read.
        source: Activations that conditions hold for a batch.
        vector: The residual stream at one position.
    """

    resid: int
    logits: int
    reads: int
    source: int
    vector: int

    @classmethod
    def of(cls, model: HookedModel, length: int, read: Read, source: int) -> Sizes:
        """The sizes of a sweep's tensors."""
        item = model.cfg.dtype.itemsize
        whole = length if read.by_position else 1
        reads = whole if read.pos is None else read.pos.shape[1]
        wide, vector = cls.width(model) * item, model.cfg.d_model * item
        return cls(length * vector, whole * wide, reads * wide, source, vector)

    @staticmethod
    def width(model: HookedModel) -> int:
        """Numbers that the readout makes of a token, or takes where that is more."""
        cfg = model.cfg
        return max(cfg.d_vocab_out or cfg.d_vocab, cfg.d_model, 1)


@dataclass(frozen=True)
class Limits:
    """How the work is cut.

    Args:
        batch: Examples of a batch.
        spacing: Positions from one kept state to the next.
        edited: Bytes of edited residuals that are held before they are run on.
        logits: Bytes of logits that exist at once.
        together: Conditions that may share a pass.
        tokens: Tokens of a pass that conditions share.
        vector: Bytes of the residual stream at one position.
    """

    batch: int
    spacing: int = 1
    edited: int = EDITED
    logits: int = LOGITS
    together: int = 1
    tokens: int = 1
    vector: int = 4


def in_bytes(size: int) -> str:
    """A number of bytes, and in words where these are shorter: 300 bytes, 20000 bytes (19.53 KiB)."""
    return f"{size} bytes" + (f" ({mib(size)})" if size >= 1 << 10 else "")


def mib(size: int) -> str:
    """Bytes in words: 3.00 MiB, 1.46 KiB, 300 bytes."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.{2 if size < 100 * unit else 0}f} {name}"
    return f"{size} bytes"


def largest(batch: int, memory: int | None, need: Callable[[int], int]) -> int:
    """The most examples, up to ``batch``, whose need stays within the budget; 0 if one alone is too much."""
    return batch if memory is None else bisect.bisect_right(range(1, batch + 1), memory, key=need)

"""FlipFlop: remember the bit last written while later bits are to be ignored."""

from __future__ import annotations

import numpy as np

from probelens.errors import InputError
from probelens.tasks.base import Task
from probelens.tasks.drawing.arguments import probability
from probelens.tasks.drawing.search import Pairs
from probelens.tasks.pairs import PatchPairs

__all__ = ["FlipFlop"]

_ZERO, _ONE, _WRITE, _READ, _IGNORE = range(5)


class FlipFlop(Task):
    """Instructions and bits in turn: "w" writes the bit that follows, "i" asks to ignore it, "r" reads.

    The first instruction is a write; the others are drawn independently. After w and i the bit is random, after r it
    is the bit last written. Rarer writes make longer memories: the paper trains with ignore = 0.8 and tests with 0.98
    and 0.1. Its strings also end in a read; here they end anywhere, so that the law at a position doesn't depend on
    the length.

    Labels:
        - ``state``: The bit last written, counting a write at its bit. Undefined, and masked, at the first token.
        - ``recall``: At "r" the bit that must come next, elsewhere "none". 3 classes.

    Pairs:
        The bit of an early write is flipped, and everything up to where it is read is ignored, so nothing
        else may change. ``label="state"`` reads at the last position. ``label="recall"`` reads at the last
        "r"; a bit after it is the clean string's, so the corrupted one is legal up to the read.

    Args:
        ignore: Probability of "i". Of the rest, half are "w" and half "r".
        target: Label that models are trained on.
        bos: Put a BOS token in front.

    Raises:
        InputError: An argument out of range or an unknown target.

    Source:
        Liu et al. 2023, Exposing Attention Glitches with Flip-Flop Language Modeling, arXiv 2306.00946.

    Examples:
        >>> import torch
        >>> task = FlipFlop()
        >>> tokens = torch.tensor([[2, 1, 4, 0, 3, 1]])
        >>> task.decode(tokens)
        ['w1i0r1']
        >>> labels = task.labels(tokens)
        >>> labels["state"], labels["recall"]
        (tensor([[-100, 1, 1, 1, 1, 1]]), tensor([[-100, 2, 2, 2, 1, 2]]))
    """

    def __init__(self, ignore: float = 0.8, target: str = "state", bos: bool = False) -> None:
        self.ignore = probability("ignore", ignore)
        if not self.ignore:
            raise InputError("ignore=0.0 leaves nothing to remember through; it must be above 0 and below 1.")
        classes = {"state": ("0", "1"), "recall": ("0", "1", "none")}
        super().__init__("flip_flop", ("0", "1", "w", "r", "i"), classes, target=target, bos=bos)

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        pairs = (length + 1) // 2
        u = rng.random((n, pairs))
        instructions = np.where(u < self.ignore, _IGNORE, np.where(u < (1 + self.ignore) / 2, _WRITE, _READ))
        instructions[:, 0] = _WRITE
        bits = rng.integers(0, 2, (n, pairs))
        symbols = np.stack([instructions, bits], axis=2).reshape(n, 2 * pairs)
        # The bit of a read is what was written: fill it in before cutting a dangling instruction.
        reads = instructions == _READ
        symbols[:, 1::2][reads] = _stored(symbols)[:, ::2][reads]
        return symbols[:, :length]

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        bad = self._broken(symbols)
        if bad.any():
            row, pos = np.argwhere(bad)[0]
            raise InputError(
                f"string {row} isn't a flip-flop string: {self.vocab[symbols[row, pos]]!r} at token {pos}. "
                "Instructions and bits take turns, w is first, and r is followed by the bit last written."
            )
        state = _stored(symbols)
        return {"state": state, "recall": np.where(symbols == _READ, state, 2)}

    def legal(self, symbols: np.ndarray) -> np.ndarray:
        return ~np.any(self._broken(symbols), axis=1)

    def n_strings(self, length: int) -> int:
        # w0 or w1 first; then w0, w1, i0, i1 or a read, whose bit is decided; then perhaps a lone w, r or i.
        pairs, dangling = divmod(length, 2)
        return 2 * 5 ** (pairs - 1) * (3 if dangling else 1) if pairs else 1

    def pairs(
        self, n: int, length: int = 40, seed: int = 0, *, label: str | None = None, read_pos: int | None = None
    ) -> PatchPairs:
        """Pairs as `Task.pairs`; ``label="recall"`` is read at an instruction.

        Args:
            Those of ``Task.pairs``.
            length: Tokens in each string, BOS not counted; at least 3.
            read_pos: Where to read, BOS counted. When left out the last position, or the last instruction for
                "recall".

        Returns:
            Pairs that are legal up to where they are read, and to the end for "state".

        Raises:
            InputError: An argument out of range, or a "recall" read at a bit.

        Examples:
            >>> task = FlipFlop()
            >>> pairs = task.pairs(1, length=8, label="recall")
            >>> task.decode(pairs.clean), task.decode(pairs.corrupted), pairs.read_pos
            (['w0i0i1r0'], ['w1i0i1r0'], tensor([6]))
        """
        if label == "recall" or (label is None and self.target == "recall"):
            if read_pos is None and isinstance(length, int):
                read_pos = (length - 1) // 2 * 2 + self.bos
            elif read_pos is not None and (read_pos - self.bos) % 2:
                raise InputError(
                    f"read_pos={read_pos} holds a bit; 'recall' is read at an instruction, every second "
                    f"position from {int(self.bos)}. Use {read_pos - 1} or {read_pos + 1}."
                )
        return self._make_pairs(n, length, seed, label, read_pos)

    def draw_pairs(self, n: int, length: int, read: int, label: str, rng: np.random.Generator) -> Pairs:
        """Strings in which one written bit is flipped and nothing is written after it.

        Raises:
            InputError: A read before any bit can have been written.
        """
        if read < 2:
            raise InputError(f"there is no bit before position {read}; read at position 2 or later.")
        clean = np.array(self.draw(n, length, rng))
        rows, positions = np.arange(n), np.arange(length)
        edit = 2 * rng.integers(0, (read // 2 + 1) // 2, n) + 1
        later = positions > edit[:, None]
        clean[rows, edit - 1] = _WRITE
        clean[rows, edit] = rng.integers(0, 2, n)
        clean = np.where(later, np.where(positions % 2 == 0, _IGNORE, rng.integers(0, 2, clean.shape)), clean)
        if read % 2 == 0 and (label == "recall" or read == length - 1):
            clean[:, read] = _READ
            clean[:, read + 1 : read + 2] = clean[rows, edit][:, None]
        corrupted = clean.copy()
        corrupted[rows, edit] = 1 - clean[rows, edit]
        return clean, corrupted, edit

    def _broken(self, symbols: np.ndarray) -> np.ndarray:
        """Where a string breaks the rules. (n, length) bool"""
        bad = (symbols >= _WRITE) != (np.arange(symbols.shape[1]) % 2 == 0)
        bad[:, 0] |= symbols[:, 0] != _WRITE
        bad[:, 1:] |= (symbols[:, :-1] == _READ) & (symbols[:, 1:] != _stored(symbols)[:, 1:])
        return bad


def _stored(symbols: np.ndarray) -> np.ndarray:
    """The bit last written, −1 before the first. (n, length)"""
    written = np.zeros(symbols.shape, dtype=bool)
    written[:, 1::2] = (symbols[:, :-1] == _WRITE)[:, ::2]
    last = np.maximum.accumulate(np.where(written, np.arange(symbols.shape[1]), -1), axis=1)
    return np.where(last >= 0, np.take_along_axis(symbols, last.clip(0), axis=1), -1)

"""Dyck: nested brackets of k types, at most m deep, labelled by depth and innermost open bracket."""

from __future__ import annotations

import numpy as np

from probelens.errors import InputError
from probelens.numerics.tensors import whole_number
from probelens.tasks.base import Task
from probelens.tasks.drawing import walks as _walk
from probelens.tasks.drawing.arguments import choice, probability
from probelens.tasks.drawing.search import Pairs, collect_pairs
from probelens.tasks.pairs import PatchPairs

__all__ = ["Dyck"]

_OPENERS, _CLOSERS = "([{<", ")]}>"


class Dyck(Task):
    """Prefixes of Dyck-(k, m) words: brackets of k types that nest correctly, at most m deep.

    Strings are legal prefixes; brackets may be open at the end. Opener types are uniform. The depth is a
    random walk reflected at 0 and m, with these guarantees about its law:

    - The first t tokens of a long string are distributed as a string of length t: a length shift is never a
      depth shift. The same holds for every label.
    - After 2m tokens the law of the depth no longer changes. With ``noop > 0`` it is 1 : 2 : … : 2 : 1 over
      0 … m at every position. With ``noop = 0`` an odd number of tokens gives an odd depth, and the law is
      that one restricted to the depths of the right parity.

    So the best guess of a later depth from its position is right 1/m of the time with no-ops, 2/m without.
    What grows with length is how long ago an open bracket may have been opened. No-ops come with
    probability ``noop`` after the first 2m tokens; within these there are a few more where ``noop`` is small.

    Labels:
        - ``depth``: Open brackets after this token, 0 … m.
        - ``top``: Type of the innermost open bracket, or "empty". k + 1 classes.
        - ``closer``: The closer that may come next, or "none". Same ids as top, since one decides the other.
        - ``state``: depth and top together. 1 + k·m classes.

    Pairs:
        ``kind="type"`` changes the type of an opener that is on top where it is read; its closer, if any,
        comes later than the string ends. ``kind="depth"`` changes an opener to the closer that is legal
        there, after which the depth is 2 lower; brackets that were open by then are not closed later on. Both
        strings are legal.

    Args:
        k: Number of bracket types.
        max_depth: Greatest depth m.
        noop: Probability of a no-op token, which changes nothing; 0 leaves it out of the vocabulary.
        target: Label that models are trained on.
        bos: Put a BOS token in front.

    Raises:
        InputError: An argument out of range or an unknown target.

    Source:
        Bounded Dyck languages: Hewitt et al. 2020, arXiv 2010.07515; Yao et al. 2021, arXiv 2105.11115.

    Examples:
        >>> import torch
        >>> task = Dyck(k=2, max_depth=3)
        >>> tokens = torch.tensor([[0, 1, 3, 2]])
        >>> task.decode(tokens)
        ['([])']
        >>> labels = task.labels(tokens)
        >>> labels["depth"], labels["top"]
        (tensor([[1, 2, 1, 0]]), tensor([[0, 1, 0, 2]]))
        >>> task.n_classes
        {'depth': 4, 'top': 3, 'closer': 3, 'state': 7}
    """

    def __init__(
        self, k: int = 2, max_depth: int = 10, noop: float = 0.0, target: str = "depth", bos: bool = False
    ) -> None:
        self.k = whole_number("k", k)
        self.max_depth = whole_number("max_depth", max_depth)
        self.noop = probability("noop", noop)
        openers = list(_OPENERS[: self.k]) if self.k <= len(_OPENERS) else [f"({i}" for i in range(self.k)]
        closers = list(_CLOSERS[: self.k]) if self.k <= len(_CLOSERS) else [f"){i}" for i in range(self.k)]
        depths = range(1, self.max_depth + 1)
        classes = {
            "depth": ["0", *map(str, depths)],
            "top": [*openers, "empty"],
            "closer": [*closers, "none"],
            "state": ["empty", *(f"{depth} {opener}" for depth in depths for opener in openers)],
        }
        symbols = [*openers, *closers, *(["."] if self.noop else [])]
        super().__init__("dyck", symbols, classes, target=target, bos=bos)
        self._kernel = _walk.reflected(self.max_depth, self.noop)
        law = np.full(self.max_depth + 1, 2.0)
        law[[0, -1]] = 1.0
        self._thresholds = _walk.to_stationary(self._kernel, law / law.sum())

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return self._write(self._moves(n, length, rng), rng.integers(0, self.k, (length, n), dtype=np.intp)).T

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        depth, top, bad = self._parse(symbols)
        if bad.any():
            row, pos = np.argwhere(bad)[0]
            text = " ".join(self.vocab[i] for i in symbols[row, : pos + 1][-20:])
            raise InputError(
                f"string {row} isn't a prefix of Dyck-({self.k}, {self.max_depth}): illegal at token {pos}, "
                f"after '{text}'. A closer must match the innermost open bracket, and at most "
                f"{self.max_depth} may be open."
            )
        state = np.where(top == self.k, 0, 1 + (depth - 1) * self.k + top)
        return {"depth": depth, "top": top, "closer": top, "state": state}

    def legal(self, symbols: np.ndarray) -> np.ndarray:
        return ~np.any(self._parse(symbols)[2], axis=1)

    def n_strings(self, length: int) -> int:
        counts = [1] + [0] * self.max_depth
        for _ in range(length):
            wider = [0, *counts, 0]
            noops = counts if self.noop else [0] * len(counts)
            counts = [self.k * wider[d] + wider[d + 2] + noops[d] for d in range(len(counts))]
        return sum(counts)

    def pairs(
        self,
        n: int,
        length: int = 40,
        seed: int = 0,
        *,
        label: str | None = None,
        read_pos: int | None = None,
        kind: str | None = None,
    ) -> PatchPairs:
        """Pairs as `Task.pairs`, of two kinds.

        Args:
            Those of ``Task.pairs``.
            label: Whose classes the answers are. When left out, the target if this kind changes it; otherwise "top" for
                kind "type" and "depth" for kind "depth".
            kind: "type" or "depth". When left out, the one that changes the label.

        Returns:
            Pairs that are legal from end to end.

        Raises:
            InputError: A label this kind doesn't change, an unknown kind, k or max_depth too small for it.

        Examples:
            >>> pairs = Dyck().pairs(1, length=10, seed=4, kind="type")
            >>> Dyck().decode(pairs.clean), Dyck().decode(pairs.corrupted), pairs.label
            (['()([(())()'], ['()(((())()'], 'top')
        """
        changed = {"type": ("top", "closer", "state"), "depth": ("depth", "state")}
        if kind is None:
            kind = "depth" if (label or self.target) == "depth" else "type"
        kind = choice("kind of Dyck pairs", kind, ("type", "depth"))
        if label is None:
            label = self.target if self.target in changed[kind] else changed[kind][0]
        elif label in self.label_names and label not in changed[kind]:
            raise InputError(
                f"kind={kind!r} doesn't change the label {label!r} in every pair; it changes "
                f"{', '.join(map(repr, changed[kind]))}. Choose one of these or the other kind."
            )
        # With a depth of 2 and no no-ops, an opener can be on top again only after an odd number of tokens.
        need = 2 if kind == "type" and self.noop else 3
        if self.max_depth < need or (kind == "type" and self.k < 2):
            raise InputError(
                f"kind={kind!r} needs max_depth of at least {need}{', k of at least 2' * (kind == 'type')}; "
                f"this task has max_depth={self.max_depth}, k={self.k}."
            )
        return self._make_pairs(n, length, seed, label, read_pos, kind=kind)

    def draw_pairs(
        self, n: int, length: int, read: int, label: str, rng: np.random.Generator, kind: str = "depth"
    ) -> Pairs:
        """Strings in which one bracket is changed, so that depth or type differs at ``read``.

        Args:
            Those of ``Task.draw_pairs``.
            kind: "depth" or "type": what the changed bracket changes.
        """
        window = slice(0, read // 2 + 1)

        def attempt() -> Pairs:
            rows = max(n, 64)
            moves = self._moves(rows, length, rng)
            before = np.concatenate([np.zeros((1, rows), dtype=np.intp), _depths(moves)])[window]
            usable = before <= self.max_depth - 2
            if kind == "depth":
                usable &= before >= 1
            elif not self.noop:
                usable[(read + 1) % 2 :: 2] = False  # only an even number of moves leads back to one depth
            score = np.where(usable, rng.random(usable.shape), -1.0)
            edit, kept = score.argmax(0), np.flatnonzero(score.max(0) >= 0)
            edit, moves = edit[kept], moves[:, kept]
            self._keep_open(moves, edit, before[edit, kept], read if kind == "type" else 0, rng)
            types = rng.integers(0, self.k, moves.shape, dtype=np.intp)
            clean = self._write(moves, types)
            corrupted, at = clean.copy(), (edit, np.arange(len(edit)))
            if kind == "type":
                corrupted[at] = (clean[at] + rng.integers(1, self.k, len(edit))) % self.k
            else:
                corrupted[at] = self.k + self._tops(moves, _depths(moves), types)[edit - 1, at[1]]
            return clean.T, corrupted.T, edit

        return collect_pairs(attempt, n, f"{self.name} of length {length} and kind {kind!r}, read at {read}")

    def _keep_open(
        self, moves: np.ndarray, edit: np.ndarray, before: np.ndarray, read: int, rng: np.random.Generator
    ) -> None:
        """Put an opener at ``edit`` that never closes and, where ``read`` isn't 0, is on top at ``read``."""
        headroom = self.max_depth - before - 1
        walk, bridge = {}, {}
        for room in range(1, self.max_depth):
            kernel = _walk.reflected(room, self.noop)
            walk[room], bridge[room] = _walk.plain(kernel), _walk.bridge(kernel, read)
        above = np.zeros(len(edit), dtype=np.intp)
        moves[edit, np.arange(len(edit))] = _walk.UP
        for t in range(1, len(moves)):
            u = rng.random(len(edit))
            for room in range(1, self.max_depth):
                on = np.flatnonzero((edit < t) & (headroom == room))
                table = bridge[room][read - t] if t <= read else walk[room]
                moves[t, on] = _walk.step(u[on], table[above[on]])
            above += np.where(edit < t, _walk.CHANGE[moves[t]], 0)

    def _moves(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return _walk.walk(self._thresholds, self._kernel[1], n, length, rng)

    def _tops(self, moves: np.ndarray, depths: np.ndarray, types: np.ndarray) -> np.ndarray:
        """Type of the innermost open bracket after each token, k where there is none. (length, n)"""
        n = moves.shape[1]
        stack = np.full((self.max_depth + 1) * n, self.k, dtype=np.intp)
        slots = depths * n + np.arange(n)
        tops = np.empty(moves.shape, dtype=np.intp)
        opens = moves == _walk.UP
        for t in range(len(moves)):
            tops[t] = np.where(opens[t], types[t], stack.take(slots[t]))
            stack.put(slots[t], tops[t])
        return tops

    def _write(self, moves: np.ndarray, types: np.ndarray) -> np.ndarray:
        """Token ids of a walk whose openers have these types. (length, n)"""
        tops = self._tops(moves, _depths(moves), types)
        closes = np.concatenate([tops[:1], tops[:-1]]) + self.k
        return np.where(moves == _walk.UP, types, np.where(moves == _walk.DOWN, closes, 2 * self.k))

    def _parse(self, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Depth and top after each token, and where a string breaks the rules. each (n, length)"""
        tokens = np.ascontiguousarray(symbols.T)
        moves = (tokens >= self.k).view(np.int8) + (tokens >= 2 * self.k).view(np.int8)
        depths = _depths(moves)
        bad = (depths < 0) | (depths > self.max_depth)
        tops = self._tops(moves, depths.clip(0, self.max_depth), tokens)
        closes = np.concatenate([tops[:1], tops[:-1]]) + self.k
        bad |= (moves == _walk.DOWN) & (tokens != closes)
        return depths.T, tops.T, bad.T


def _depths(moves: np.ndarray) -> np.ndarray:
    return _walk.CHANGE[moves].cumsum(0)

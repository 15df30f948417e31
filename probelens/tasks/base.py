"""Task: draws and labels strings; batches, splits, streams and pairs follow from that.

A subclass defines how strings are drawn (`draw`) and how each position is labelled (`annotate`). Batches,
disjoint splits, endless training data, clean/corrupted pairs and baselines follow from these two.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from probelens.errors import InputError, ShapeError
from probelens.numerics.tensors import whole_number
from probelens.tasks.baselines import baselines
from probelens.tasks.data import IGNORE, Batch, Exclude, parts_of
from probelens.tasks.drawing.arguments import rng_from, sizes_of
from probelens.tasks.drawing.search import Pairs, avoid, collect_pairs, hashed, unique
from probelens.tasks.pairs import PatchPairs
from probelens.tasks.vocabulary import Vocabulary, to_int64

__all__ = ["Task"]


def need_task(task: object) -> None:
    """Refuse what has no labels and can't be sampled, such as arguments in another order."""
    if not hasattr(task, "sample") or not hasattr(task, "label_names"):
        raise InputError(
            f"expected a task, got a {type(task).__name__}. Give one of probelens.tasks, such as Parity(), or one of your own"
        )


class Task(Vocabulary, ABC):
    """A family of token strings with class labels at every position.

    To bring your own task, subclass it, call ``super().__init__`` and write `draw` and `annotate`; see
    Examples. Strings have exactly ``length`` tokens; ``bos=True`` puts one more token, ``<bos>``, in front,
    where the mask is False. Its id is the last one, so the other ids are the same with and without it.

    Args:
        name: Short name, used in tables and files.
        symbols: The token strings, without BOS.
        classes: Class names of each label.
        target: The label that models are trained on.
        bos: Put a BOS token in front.

    Attributes:
        vocab: Token strings, BOS last where there is one.

    Raises:
        InputError: target isn't one of the labels.

    Examples:
        >>> class LastSymbol(Task):
        ...     def __init__(self, bos: bool = False) -> None:
        ...         super().__init__("last", ("a", "b"), {"symbol": ("a", "b")}, target="symbol", bos=bos)
        ...     def draw(self, n, length, rng):
        ...         return rng.integers(0, 2, (n, length))
        ...     def annotate(self, symbols):
        ...         return {"symbol": symbols}
        >>> task = LastSymbol(bos=True)
        >>> batch = task.sample(2, length=3)
        >>> batch.tokens.shape, task.vocab
        (torch.Size([2, 4]), ('a', 'b', '<bos>'))
    """

    def __init__(
        self, name: str, symbols: Sequence[str], classes: Mapping[str, Sequence[str]], *, target: str, bos: bool = False
    ) -> None:  # fmt: skip
        super().__init__(name, symbols, classes, target=target, bos=bos)

    # Defined by a subclass

    @abstractmethod
    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Draw strings.

        Args:
            n: Number of strings.
            length: Tokens in each.
            rng: The only source of randomness.

        Returns:
            Token ids without BOS. (n, length) integers
        """

    @abstractmethod
    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        """Label every position of given strings, from the tokens up to and including it.

        Args:
            symbols: Token ids without BOS, in range. (n, length) int64

        Returns:
            Class ids per label, below 0 where the label is undefined. each (n, length) integers

        Raises:
            InputError: A string that the task doesn't allow.
        """

    def legal(self, symbols: np.ndarray) -> np.ndarray:
        """Which strings the task allows; all of them unless a subclass says otherwise.

        Args:
            symbols: Strings without BOS. (n, length)

        Returns:
            True where a string is allowed. (n,) bool
        """
        return np.ones(len(symbols), dtype=bool)

    def n_strings(self, length: int) -> int | None:
        """Number of strings of this length, or None where that isn't known.

        Args:
            length: Tokens in each string, BOS not counted.

        Returns:
            A number, or None.
        """
        return None

    def draw_pairs(self, n: int, length: int, read: int, label: str, rng: np.random.Generator) -> Pairs:
        """Draw clean strings, and the same strings with one random token of the first half of [0, read] changed.

        Args:
            n: Number of pairs.
            length: Tokens in each string, BOS not counted.
            read: Position that is read, BOS not counted.
            label: Whose classes must differ there.
            rng: The only source of randomness.

        Returns:
            Clean symbols (n, length), corrupted symbols (n, length), and the position of the change (n,).

        Raises:
            InputError: No such pair exists, or none was found.
        """
        rows = np.arange(max(n, 64))

        def attempt() -> Pairs:
            clean = np.array(self.draw(len(rows), length, rng), dtype=np.int64)
            edit = rng.integers(0, read // 2 + 1, len(rows))
            corrupted, other = clean.copy(), rng.integers(1, max(self.n_symbols, 2), len(rows))
            corrupted[rows, edit] = (clean[rows, edit] + other) % self.n_symbols
            good = (corrupted[rows, edit] != clean[rows, edit]) & (edit < read) & self.legal(corrupted)
            clean, corrupted, edit = clean[good], corrupted[good], edit[good]
            if not len(clean):
                return clean, corrupted, edit
            before, after = (self.annotate(symbols[:, : read + 1])[label][:, -1] for symbols in (clean, corrupted))
            good = (before != after) & (before >= 0) & (after >= 0)
            return clean[good], corrupted[good], edit[good]

        return collect_pairs(attempt, n, f"{self.name} whose {label!r} at position {read} depends on an early token")

    # Derived from it

    def sample(self, n: int, length: int = 40, seed: int = 0, *, exclude: Exclude | None = None) -> Batch:
        """Draw labelled strings.

        Args:
            n: Number of strings.
            length: Tokens in each, BOS not counted.
            seed: Equal seeds give equal batches; the global random state is neither read nor changed.
            exclude: Strings that must not be drawn: a batch, its tokens, a dict or several of these. Only
                those of the same length matter: a shorter string may be the beginning of a longer one.

        Returns:
            Tokens (n, length + bos), all labels, the mask and the groups 0 … n−1.

        Raises:
            InputError: n, length or seed out of range, or no string is left after the exclusion.

        Examples:
            >>> import probelens as pl
            >>> pl.tasks.Parity().sample(1, length=6, seed=3).labels["state"]
            tensor([[1, 1, 1, 0, 1, 0]])
        """
        n, length = whole_number("n", n), whole_number("length", length)
        return self._fresh(n, length, rng_from(seed, "sample", length), self._hashes(exclude, length))

    def splits(self, sizes: Mapping[str, int], length: int = 40, seed: int = 0) -> dict[str, Batch]:
        """Batches in which no string occurs twice, within one or across two.

        Args:
            sizes: Number of strings per split, for example ``{"train": 6000, "test": 2000}``.
            length, seed: As for ``Task.sample``.

        Returns:
            One batch per split; groups are numbered through all of them. Whole strings differ; the labels of
            the first positions are still determined by prefixes that recur, so report late positions separately.

        Raises:
            InputError: More strings asked for than there are, or than a long search finds.

        Examples:
            >>> from probelens.tasks import Parity
            >>> parts = Parity().splits({"train": 10, "test": 6}, length=4)
            >>> {name: len(part) for name, part in parts.items()}
            {'train': 10, 'test': 6}
        """
        length = whole_number("length", length)
        counts = sizes_of(sizes)
        total = sum(counts.values())
        space = self.n_strings(length)
        if space is not None and total > space:
            raise InputError(
                f"asked for {total} different strings, but {self.name} has only {space} of length {length}. "
                "Ask for fewer, or use longer strings."
            )
        rng = rng_from(seed, "splits", length)
        draw = partial(self._draw, length=length, rng=rng)
        symbols = unique(draw, total, f"{self.name} of length {length}", rng)
        firsts = itertools.accumulate(counts.values(), initial=0)
        return {name: self._batch(symbols[i : i + size], i) for (name, size), i in zip(counts.items(), firsts)}

    def stream(
        self, batch_size: int, length: int = 40, seed: int = 0, *, exclude: Exclude | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """Fresh training batches without end.

        Args:
            batch_size: Strings per batch.
            length, seed, exclude: As for ``Task.sample``.
            start: Number of the first batch. Batch i depends on seed and i only, so a resumed run that starts
                at step i sees what the uninterrupted one would have seen.

        Yields:
            One batch after another.

        Raises:
            InputError: As `sample`, at the call.

        Examples:
            >>> from probelens.tasks import Parity
            >>> task = Parity()
            >>> held_out = task.splits({"test": 100})["test"]
            >>> len(next(task.stream(64, exclude=held_out)))
            64
        """
        batch_size, length = whole_number("batch_size", batch_size), whole_number("length", length)
        seed, start = whole_number("seed", seed, 0), whole_number("start", start, 0)
        hashes = self._hashes(exclude, length)
        rngs = (rng_from(seed, "stream", length, step) for step in itertools.count(start))
        return (self._fresh(batch_size, length, rng, hashes) for rng in rngs)

    def labels(self, tokens: Tensor) -> dict[str, Tensor]:
        """Label given strings, such as tokens that `sample` didn't draw.

        Args:
            tokens: Token ids, with the BOS column if the task has one. (batch, pos)

        Returns:
            Class ids per label, −100 where undefined and on BOS. each (batch, pos) int64

        Raises:
            InputError: A token out of the vocabulary, BOS missing or misplaced, or an illegal string.

        Examples:
            >>> from probelens.tasks import Parity
            >>> Parity().labels(torch.tensor([[1, 0, 1]]))["state"]
            tensor([[1, 1, 0]])
        """
        return self._batch(self._symbols(Batch(tokens).tokens)).labels

    def pairs(
        self, n: int, length: int = 40, seed: int = 0, *, label: str | None = None, read_pos: int | None = None
    ) -> PatchPairs:
        """Clean and corrupted strings that differ in one token of the first half, before where they are read.

        Args:
            n: Number of pairs.
            length, seed: As for ``Task.sample``.
            label: Whose classes the answers are; the target when left out.
            read_pos: Position that is read, BOS counted; the last one when left out.

        Returns:
            Pairs of legal strings whose answers always differ.

        Raises:
            InputError: An argument out of range, or no such pair exists.

        Examples:
            >>> from probelens.tasks import Parity
            >>> pairs = Parity().pairs(2, length=8)
            >>> (pairs.clean != pairs.corrupted).sum(1)
            tensor([1, 1])
        """
        return self._make_pairs(n, length, seed, label, read_pos)

    def baselines(
        self, train: Batch, test: Batch | None = None, label: str | None = None, w: int = 4
    ) -> dict[str, dict[str, float]]:
        """Scores of guesses without the state: see `probelens.tasks.baselines.baselines`.

        Args:
            train: Where the guesses are learned.
            test: Where they are scored; ``train`` itself when left out.
            label: Which label; the target when left out.
            w: Window of the last-tokens guess.

        Returns:
            ``{"majority" | "position" | "last_w": {"accuracy": …, "balanced_accuracy": …}}``

        Raises:
            InputError: A batch that lacks the label.
        """
        label, test = self._label(label), train if test is None else test
        for name, batch in (("train", train), ("test", test)):
            if not isinstance(batch, Batch) or label not in batch.labels:
                raise InputError(f"{name} has no label {label!r}; pass a Batch drawn from this task.")
        return baselines(train.tokens, train.labels[label], test.tokens, test.labels[label], train.mask, test.mask, w=w)

    def _batch(self, symbols: np.ndarray, first_group: int = 0) -> Batch:
        labels = {name: torch.from_numpy(to_int64(values)) for name, values in self.annotate(symbols).items()}
        mask = torch.stack([values >= 0 for values in labels.values()]).all(0)
        labels = {name: values.masked_fill(~mask, IGNORE) for name, values in labels.items()}
        if self.bos:
            mask = pad(mask, (1, 0), value=False)
            labels = {name: pad(values, (1, 0), value=IGNORE) for name, values in labels.items()}
        groups = torch.arange(first_group, first_group + len(symbols))
        return Batch(self._tokens(symbols), labels, mask, groups)

    def _make_pairs(
        self, n: int, length: int, seed: int, label: str | None, read_pos: int | None, **options: Any
    ) -> PatchPairs:
        n, length = whole_number("n", n), whole_number("length", length, 2)
        label = self._label(label)
        low, high = 1 + self.bos, length - 1 + self.bos
        read = (high if read_pos is None else whole_number("read_pos", read_pos, low, high)) - self.bos
        rng = rng_from(seed, "pairs", length, read)
        clean, corrupted, edit = self.draw_pairs(n, length, read, label, rng, **options)
        # Labels look backward only, so nothing after the read position matters.
        answers = [self.annotate(symbols[:, : read + 1])[label][:, -1] for symbols in (clean, corrupted)]
        edit_at, read_at = torch.from_numpy(to_int64(edit)) + self.bos, torch.full((n,), read + self.bos)
        found = torch.from_numpy(to_int64(np.stack(answers, axis=1)))
        return PatchPairs(self._tokens(clean), self._tokens(corrupted), edit_at, read_at, found, label=label)

    def _draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        symbols = np.asarray(self.draw(n, length, rng))
        if symbols.shape != (n, length):
            raise ShapeError(f"draw of {self.name} gave {symbols.shape}; it must give {(n, length)}.")
        return symbols

    def _fresh(self, n: int, length: int, rng: np.random.Generator, hashes: np.ndarray | None) -> Batch:
        draw = partial(self._draw, length=length, rng=rng)
        return self._batch(avoid(draw, n, hashes, f"{self.name} of length {length}"))

    def _hashes(self, exclude: Exclude | None, length: int) -> np.ndarray | None:
        tokens = [Batch(part.tokens if isinstance(part, Batch) else part).tokens for part in parts_of(exclude)]
        found = [hashed(self._symbols(x)) for x in tokens if x.shape[1] == length + self.bos]
        return np.unique(np.concatenate(found)) if found else None

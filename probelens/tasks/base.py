"""Task: what a formal task says about itself, and everything that follows from it.

A task says how to draw strings (`draw`) and what is true at each position of one (`annotate`). Batches,
disjoint splits, endless fresh training data, clean/corrupted pairs and baselines follow from these two.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from probelens.errors import InputError, ShapeError
from probelens.numerics.tensors import whole_number
from probelens.tasks.baselines import baselines
from probelens.tasks.data import IGNORE, Batch, PatchPairs
from probelens.tasks.drawing.arguments import choice, rng_from
from probelens.tasks.drawing.distinct import avoid, hashed, unique
from probelens.tasks.drawing.pairs import Pairs, change_one_token

__all__ = ["Batch", "PatchPairs", "Task"]

BOS = "<bos>"

Exclude = Batch | Tensor | Iterable[Batch | Tensor] | Mapping[str, Batch]


class Task(ABC):
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
        name: Short name.
        vocab: Token strings, BOS last where there is one.
        target: Label that models are trained on.
        bos: Whether a BOS token stands in front.

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
        self,
        name: str,
        symbols: Sequence[str],
        classes: Mapping[str, Sequence[str]],
        *,
        target: str,
        bos: bool = False,
    ) -> None:
        self.name = name
        self.bos = bool(bos)
        self.vocab: tuple[str, ...] = (*symbols, BOS) if self.bos else tuple(symbols)
        self._classes = {label: tuple(names) for label, names in classes.items()}
        self.target = choice(f"label for target of {name}", target, self.label_names)

    # What a subclass says

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
        """How many strings of this length there are, or None where that isn't known.

        Args:
            length: Tokens in each string, BOS not counted.

        Returns:
            A number, or None.
        """
        return None

    def draw_pairs(self, n: int, length: int, read: int, label: str, rng: np.random.Generator) -> Pairs:
        """Clean strings, the same with one early token changed, and where.

        Args:
            n: Number of pairs.
            length: Tokens in each string, BOS not counted.
            read: Position that is read, BOS not counted.
            label: Whose classes must differ there.
            rng: The only source of chance.

        Returns:
            Clean symbols (n, length), corrupted symbols (n, length), and the position of the change (n,).

        Raises:
            InputError: No such pair exists, or none was found.
        """
        return change_one_token(
            lambda rows: self.draw(rows, length, rng),
            self.legal,
            lambda symbols: self.annotate(symbols)[label],
            n,
            self.n_symbols,
            read,
            rng,
            f"{self.name} whose {label!r} at position {read} depends on an early token",
        )

    # What follows

    @property
    def n_symbols(self) -> int:
        """Number of token ids without BOS."""
        return len(self.vocab) - self.bos

    @property
    def d_vocab(self) -> int:
        """Number of token ids, BOS included."""
        return len(self.vocab)

    @property
    def vocab_size(self) -> int:
        """Width a model's embedding and logits need: every token in, every class of the target out."""
        return max(self.d_vocab, self.n_classes[self.target])

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that every batch carries."""
        return tuple(self._classes)

    @property
    def n_classes(self) -> dict[str, int]:
        """Number of classes of each label."""
        return {label: len(names) for label, names in self._classes.items()}

    def class_names(self, label: str | None = None) -> list[str]:
        """What the classes of a label (the target when left out) are called, in the order of their ids.

        Args:
            label: Label; the target when left out.

        Returns:
            One name a class.
        """
        return list(self._classes[self._label(label)])

    def sample(self, n: int, length: int = 40, seed: int = 0, *, exclude: Exclude | None = None) -> Batch:
        """Draw labelled strings.

        Args:
            n: Number of strings.
            length: Tokens in each, BOS not counted.
            seed: Equal seeds give equal batches; the global random state is neither read nor changed.
            exclude: Strings that must not come out: a batch, its tokens, a dict or several of these. Only
                those of the same length matter: a shorter string may well be the beginning of a longer one.

        Returns:
            Tokens (n, length + bos), all labels, the mask and the groups 0 … n−1.

        Raises:
            InputError: n, length or seed out of range, or no string is left after the exclusion.

        Examples:
            >>> from probelens.tasks import Parity
            >>> Parity().sample(1, length=6, seed=3).labels["state"]
            tensor([[1, 1, 1, 0, 1, 0]])
        """
        n, length = whole_number("n", n, 1), whole_number("length", length, 1)
        return self._fresh(n, length, rng_from(seed, "sample", length), self._hashes(exclude, length))

    def splits(self, sizes: Mapping[str, int], length: int = 40, seed: int = 0) -> dict[str, Batch]:
        """Batches in which no string occurs twice, within one or across two.

        Args:
            sizes: Number of strings per split, for example ``{"train": 6000, "test": 2000}``.
            length: Tokens in each string, BOS not counted.
            seed: As in `sample`.

        Returns:
            One batch per split; groups are numbered through all of them. Whole strings differ; the labels of
            the first positions are still determined by prefixes that recur, so report late positions apart.

        Raises:
            InputError: More strings asked for than there are, or than turn up in a long search.

        Examples:
            >>> from probelens.tasks import Parity
            >>> parts = Parity().splits({"train": 10, "test": 6}, length=4)
            >>> {name: len(part) for name, part in parts.items()}
            {'train': 10, 'test': 6}
        """
        length = whole_number("length", length, 1)
        counts = self._sizes(sizes)
        total = sum(counts.values())
        space = self.n_strings(length)
        if space is not None and total > space:
            raise InputError(
                f"{total} different strings asked for, but {self.name} has only {space} of length {length}. "
                "Ask for fewer, or use longer strings."
            )
        rng = rng_from(seed, "splits", length)
        draw = partial(self._draw, length=length, rng=rng)
        symbols = unique(draw, total, f"{self.name} of length {length}", rng)
        out, first = {}, 0
        for name, size in counts.items():
            out[name] = self._batch(symbols[first : first + size], first)
            first += size
        return out

    def stream(
        self,
        batch_size: int,
        length: int = 40,
        seed: int = 0,
        *,
        exclude: Exclude | None = None,
        start: int = 0,
    ) -> Iterator[Batch]:
        """Fresh training batches without end.

        Args:
            batch_size: Strings per batch.
            length: Tokens in each string, BOS not counted.
            seed: As in `sample`.
            exclude: Held-out strings that never come out, as in `sample`.
            start: Number of the first batch. Batch i depends on seed and i only, so a resumed run that starts
                at step i sees what the uninterrupted one would have seen.

        Yields:
            One Batch after the other.

        Raises:
            InputError: As `sample`, at the call.

        Examples:
            >>> from probelens.tasks import Parity
            >>> task = Parity()
            >>> held_out = task.splits({"test": 100})["test"]
            >>> len(next(task.stream(64, exclude=held_out)))
            64
        """
        batch_size, length = whole_number("batch_size", batch_size, 1), whole_number("length", length, 1)
        seed, start = whole_number("seed", seed, 0), whole_number("start", start, 0)
        hashes = self._hashes(exclude, length)

        def batches() -> Iterator[Batch]:
            step = start
            while True:
                yield self._fresh(batch_size, length, rng_from(seed, "stream", length, step), hashes)
                step += 1

        return batches()

    def labels(self, tokens: Tensor) -> dict[str, Tensor]:
        """The labels of given strings, for tokens that `sample` didn't draw.

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
        self,
        n: int,
        length: int = 40,
        seed: int = 0,
        *,
        label: str | None = None,
        read_pos: int | None = None,
    ) -> PatchPairs:
        """Clean and corrupted strings that differ in one token of the first half, before where they are read.

        Args:
            n: Number of pairs.
            length: Tokens in each string, BOS not counted.
            seed: As in `sample`.
            label: Whose classes the answers are; the target when left out.
            read_pos: Where to read, BOS counted; the last position when left out.

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
        """What can be guessed without the state: see `probelens.tasks.baselines.baselines`.

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
        return baselines(
            train.tokens, train.labels[label], test.tokens, test.labels[label], train.mask, test.mask, w=w
        )

    def decode(self, tokens: Tensor) -> list[str]:
        """Token ids as readable strings.

        Args:
            tokens: Token ids. (batch, pos)

        Returns:
            One string a sequence.
        """
        glue = "" if all(len(symbol) == 1 for symbol in self.vocab[: self.n_symbols]) else " "
        return [glue.join(self.vocab[i] for i in row) for row in Batch(tokens).tokens.tolist()]

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that make this task again, as JSON-able values; see `probelens.tasks.make`."""
        return {"task": type(self).__name__, **self._arguments()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._arguments().items())})"

    def _arguments(self) -> dict[str, Any]:
        # As in scikit-learn: a task keeps each argument under its own name.
        return {k: getattr(self, k) for k in inspect.signature(type(self).__init__).parameters if k != "self"}

    def _label(self, label: str | None) -> str:
        return self.target if label is None else choice(f"label of {self.name}", label, self.label_names)

    def _sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        if not isinstance(sizes, Mapping) or not sizes:
            raise InputError(
                f"sizes={sizes!r}; it must name the splits, such as {{'train': 800, 'test': 200}}."
            )
        return {str(name): whole_number(f"sizes[{name!r}]", size, 1) for name, size in sizes.items()}

    def _batch(self, symbols: np.ndarray, first_group: int = 0) -> Batch:
        labels = {name: torch.from_numpy(_int64(values)) for name, values in self.annotate(symbols).items()}
        mask = torch.ones(symbols.shape, dtype=torch.bool)
        for values in labels.values():
            mask &= values >= 0
        labels = {name: values.masked_fill(~mask, IGNORE) for name, values in labels.items()}
        if self.bos:
            mask = pad(mask, (1, 0), value=False)
            labels = {name: pad(values, (1, 0), value=IGNORE) for name, values in labels.items()}
        groups = torch.arange(first_group, first_group + len(symbols))
        return Batch(self._tokens(symbols), labels, mask, groups)

    def _make_pairs(
        self, n: int, length: int, seed: int, label: str | None, read_pos: int | None, **options: Any
    ) -> PatchPairs:
        n, length = whole_number("n", n, 1), whole_number("length", length, 2)
        label = self._label(label)
        low, high = 1 + self.bos, length - 1 + self.bos
        read = (high if read_pos is None else whole_number("read_pos", read_pos, low, high)) - self.bos
        rng = rng_from(seed, "pairs", length, read)
        clean, corrupted, edit = self.draw_pairs(n, length, read, label, rng, **options)
        # Labels look backward only, so nothing after the read position matters.
        answers = [self.annotate(symbols[:, : read + 1])[label][:, -1] for symbols in (clean, corrupted)]
        return PatchPairs(
            self._tokens(clean),
            self._tokens(corrupted),
            torch.from_numpy(_int64(edit)) + self.bos,
            torch.full((n,), read + self.bos),
            torch.from_numpy(_int64(np.stack(answers, axis=1))),
            label=label,
        )

    def _tokens(self, symbols: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(_int64(symbols))
        return pad(tokens, (1, 0), value=self.d_vocab - 1) if self.bos else tokens

    def _symbols(self, tokens: Tensor) -> np.ndarray:
        symbols = tokens.cpu().numpy()
        if self.bos:
            if symbols.shape[1] < 2 or (symbols[:, 0] != self.d_vocab - 1).any():
                raise InputError(
                    f"strings of this task start with {BOS}, id {self.d_vocab - 1}; put it in front."
                )
            symbols = symbols[:, 1:]
        if symbols.size and symbols.max() >= self.n_symbols:
            raise InputError(
                f"token id {symbols.max()} is out of the vocabulary: {self.name} has the ids 0 to "
                f"{self.n_symbols - 1}{f', and {BOS} in front only' if self.bos else ''}. See task.vocab."
            )
        return symbols

    def _draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        symbols = np.asarray(self.draw(n, length, rng))
        if symbols.shape != (n, length):
            raise ShapeError(f"draw of {self.name} gave {symbols.shape}; it must give {(n, length)}.")
        return symbols

    def _fresh(self, n: int, length: int, rng: np.random.Generator, hashes: np.ndarray | None) -> Batch:
        draw = partial(self._draw, length=length, rng=rng)
        return self._batch(avoid(draw, n, hashes, f"{self.name} of length {length}"))

    def _hashes(self, exclude: Exclude | None, length: int) -> np.ndarray | None:
        if exclude is None:
            return None
        if isinstance(exclude, Mapping):
            exclude = list(exclude.values())
        if isinstance(exclude, Batch | Tensor):
            exclude = [exclude]
        found = []
        for part in exclude:
            tokens = Batch(part.tokens if isinstance(part, Batch) else part).tokens
            if tokens.shape[1] == length + self.bos:
                found.append(hashed(self._symbols(tokens)))
        return np.unique(np.concatenate(found)) if found else None


def _int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)

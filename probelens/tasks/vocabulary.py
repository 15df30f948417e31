"""Vocabulary: the tokens of a task, its labels, and the ids of both, with or without a BOS token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from probelens.errors import InputError
from probelens.tasks.data import Batch
from probelens.tasks.drawing.arguments import choice

BOS = "<bos>"


class Vocabulary:
    """Token strings and class names, by id; the arguments are those of `Task`."""

    def __init__(
        self, name: str, symbols: Sequence[str], classes: Mapping[str, Sequence[str]], *, target: str, bos: bool = False
    ) -> None:  # fmt: skip
        self.name = name
        self.bos = bool(bos)
        self.vocab: tuple[str, ...] = (*symbols, BOS) if self.bos else tuple(symbols)
        self._classes = {label: tuple(names) for label, names in classes.items()}
        self.target = choice(f"label for target of {name}", target, self.label_names)

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
        """Width of a model's embedding and logits: room for every token and every class of the target."""
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
        """Names of the classes of a label, in the order of their ids.

        Args:
            label: Label; the target when left out.

        Returns:
            One name per class.
        """
        return list(self._classes[self._label(label)])

    def decode(self, tokens: Tensor) -> list[str]:
        """Token ids as readable strings.

        Args:
            tokens: Token ids. (batch, pos)

        Returns:
            One string per sequence.
        """
        glue = "" if all(len(symbol) == 1 for symbol in self.vocab[: self.n_symbols]) else " "
        return [glue.join(self.vocab[i] for i in row) for row in Batch(tokens).tokens.tolist()]

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that recreate this task, as JSON values; see `probelens.tasks.make`."""
        return {"task": type(self).__name__, **self._arguments()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._arguments().items())})"

    def _arguments(self) -> dict[str, Any]:
        # As in scikit-learn: a task keeps each argument under its own name.
        return {k: getattr(self, k) for k in inspect.signature(type(self).__init__).parameters if k != "self"}

    def _label(self, label: str | None) -> str:
        return self.target if label is None else choice(f"label of {self.name}", label, self.label_names)

    def _tokens(self, symbols: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(to_int64(symbols))
        return pad(tokens, (1, 0), value=self.d_vocab - 1) if self.bos else tokens

    def _symbols(self, tokens: Tensor) -> np.ndarray:
        symbols = tokens.cpu().numpy()
        if self.bos:
            if symbols.shape[1] < 2 or (symbols[:, 0] != self.d_vocab - 1).any():
                raise InputError(f"strings of this task start with {BOS}, id {self.d_vocab - 1}: put it in front.")
            symbols = symbols[:, 1:]
        if symbols.size and symbols.max() >= self.n_symbols:
            raise InputError(
                f"token id {symbols.max()} is out of the vocabulary: {self.name} has the ids 0 to "
                f"{self.n_symbols - 1}{f', and {BOS} in front only' if self.bos else ''}. See task.vocab."
            )
        return symbols


def to_int64(values: np.ndarray) -> np.ndarray:
    """An int64 array in memory of its own order, as torch.from_numpy needs it."""
    return np.ascontiguousarray(values, dtype=np.int64)

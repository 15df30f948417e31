"""A task in the words of a pretrained vocabulary, so that a language model can be fine-tuned on it as it is.

Every symbol of the task is one token of the tokenizer, and so is every answer: the model keeps its embedding and its
head, and answers with the logits of the whole vocabulary. No head is added.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.tasks import Task
from probelens.tasks.pairs import PatchPairs

ANSWER = "answer"


class InVocabulary(Task):
    """Another task, its tokens and its target's classes written as tokens of a tokenizer.

    A symbol is written as itself where that is one token, such as "(" or "0"; if any isn't, the symbols are written
    a, b, c, … in their order, as the elements of S3 are. The classes of the target are written A, B, C, … in their
    order. Where the task has BOS, it is the tokenizer's BOS, or its EOS where it has none, as in Pythia.

    The labels are the task's, to be probed and erased, and the target ``answer``: the token that the model is to answer
    with. ``symbols`` and ``answers`` say how each is written. An InputError says what can't be written.
    """

    def __init__(self, task: Task, tokenizer: Any) -> None:
        if tokenizer is None:
            said = "the model came without a tokenizer, so the task's symbols have no tokens. Save one beside it."
            raise pl.InputError(said)
        self.task = task
        names = list(task.vocab[: task.n_symbols])
        if any(_token(tokenizer, name) is None for name in names):
            names = list(string.ascii_lowercase[: len(names)])
        classes = len(task.class_names(task.target))
        if max(classes, task.n_symbols) > len(string.ascii_uppercase):
            raise pl.InputError(
                f"{task.name} has {task.n_symbols} symbols and {classes} classes of {task.target!r}; at most 26 of each "
                "can be written as letters. Choose another target or smaller sizes."
            )
        self.symbols, self.answers = tuple(names), tuple(string.ascii_uppercase[:classes])
        ids = [_one(tokenizer, name) for name in self.symbols] + ([_start(tokenizer)] if task.bos else [])
        self._ids = torch.tensor(ids)
        self._answer_ids = torch.tensor([_one(tokenizer, name) for name in self.answers])
        if len(set(ids)) < len(ids) or len(set(self._answer_ids.tolist())) < classes:
            raise pl.InputError(f"two symbols or two classes of {task.name} are one and the same token: {ids}")
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        vocab = [f"<{i}>" if name is None else name for i, name in enumerate(names)]
        labels = {label: task.class_names(label) for label in task.label_names}
        super().__init__(task.name, vocab, {**labels, ANSWER: vocab}, target=ANSWER)
        self.bos = task.bos
        self._back = torch.full((len(vocab),), -1)
        self._back[self._ids] = torch.arange(len(ids))

    @property
    def n_symbols(self) -> int:
        return self.task.n_symbols

    @property
    def config(self) -> dict[str, Any]:
        """The task's own, and the ids its tokens and answers are written with."""
        return {**self.task.config, "ids": self._ids.tolist(), "answer_ids": self._answer_ids.tolist()}

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return self.task.draw(n, length, rng)

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        labels = self.task.annotate(symbols)
        state = labels[self.task.target]
        answer = np.where(state < 0, -1, self._answer_ids.numpy()[np.maximum(state, 0)])
        return {**labels, ANSWER: answer}

    def legal(self, symbols: np.ndarray) -> np.ndarray:
        return self.task.legal(symbols)

    def n_strings(self, length: int) -> int | None:
        return self.task.n_strings(length)

    def pairs(self, n: int, length: int = 40, seed: int = 0, *, label: str | None = None, **options: Any) -> PatchPairs:
        """The task's pairs, with tokens and answers in this vocabulary; ``label`` may only be the task's target."""
        if label not in (None, ANSWER, self.task.target):
            raise pl.InputError(f"the model answers {self.task.target!r}; pairs can't be read by {label!r}")
        found = self.task.pairs(n, length, seed, label=self.task.target, **options)
        return PatchPairs(
            self._ids[found.clean], self._ids[found.corrupted], found.edit_pos, found.read_pos,
            self._answer_ids[found.answers], found.mask, ANSWER,
        )  # fmt: skip

    def _tokens(self, symbols: np.ndarray) -> Tensor:
        return self._ids[self.task._tokens(symbols)]

    def _symbols(self, tokens: Tensor) -> np.ndarray:
        own = self._back[tokens.cpu()]
        if bool((own < 0).any()):
            odd = self.vocab[int(tokens.cpu()[own < 0][0])]
            raise pl.InputError(f"token {odd!r} is no symbol of {self.name}: {', '.join(self.symbols)}")
        return self.task._symbols(own)


def _token(tokenizer: Any, text: str) -> int | None:
    ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None


def _one(tokenizer: Any, text: str) -> int:
    found = _token(tokenizer, text)
    if found is None:
        raise pl.InputError(f"the tokenizer writes {text!r} with several tokens; a symbol must be one token")
    return found


def _start(tokenizer: Any) -> int:
    for found in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise pl.InputError("the tokenizer has neither a BOS nor an EOS token to begin a string with")

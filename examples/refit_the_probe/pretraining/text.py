"""Text to pretrain on: a tokenizer learned from it, and next-token prediction as a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import probelens as pl

END = "<|endoftext|>"


def make_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE tokenizer, GPT-2's kind, of ``size`` tokens, learned from texts.

    Every byte is a token, and so is `END`, which is BOS and EOS at once; fewer than 257 tokens are an InputError.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        raise pl.InputError(f"vocab={size}: a byte-level tokenizer has at least 257 tokens")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=END, eos_token=END)


class NextToken(pl.tasks.Task):
    """Windows of a text (n_tokens,), and the token that follows each position: language modelling as a task.

    The label ``next`` is the next token's id; it is undefined at a window's last position.
    """

    def __init__(self, ids: np.ndarray, vocab: Sequence[str]) -> None:
        self.ids = ids.astype(np.int64)
        super().__init__("next_token", vocab, {"next": vocab}, target="next")

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        if len(self.ids) <= length:
            raise pl.InputError(f"the text has {len(self.ids)} tokens, too few for windows of {length}")
        starts = rng.integers(0, len(self.ids) - length, n)
        return self.ids[starts[:, None] + np.arange(length)]

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        return {"next": np.concatenate([symbols[:, 1:], np.full((len(symbols), 1), -1)], axis=1)}

    @property
    def config(self) -> dict[str, Any]:
        """Which text: its length and a hash."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=8).hexdigest()
        return {"task": "next_token", "tokens": len(self.ids), "digest": digest, "vocab": self.d_vocab}

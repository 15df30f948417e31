"""Token ids of texts, and the number of characters read after each token, with any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from probelens.errors import InputError


class ByteEncoder:
    """UTF-8 bytes, then padding (id 256) and BOS (id 257)."""

    def __init__(self) -> None:
        shown = [chr(i) if 32 < i < 127 else f"<0x{i:02X}>" for i in range(256)]
        self.vocab, self.pad, self.bos = (*shown, "<pad>", "<bos>"), 256, 257

    def __call__(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids, and the number of characters read after each token. both (n_tokens,) int32"""
        out = []
        for text in texts:
            ids = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
            starts = ids & 0xC0 != 0x80  # every byte but 10xxxxxx starts a character
            out.append((ids.astype(np.int32), starts.cumsum(dtype=np.int32)))
        return out

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class OffsetEncoder:
    """A fast Hugging Face tokenizer, from ``transformers`` or ``tokenizers``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if hasattr(tokenizer, "encode_batch"):
            size = tokenizer.get_vocab_size()
            names = [tokenizer.id_to_token(i) for i in range(size)]
            self.pad, self.bos = 0, None
        else:
            size = len(tokenizer)
            names = tokenizer.convert_ids_to_tokens(list(range(size)))
            special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id]
            self.pad = next((i for i in special if i is not None), 0)
            self.bos = next((i for i in special[:0:-1] if i is not None), None)
        self.vocab = tuple(f"<{i}>" if name is None else name for i, name in enumerate(names))

    def __call__(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        if hasattr(self.tokenizer, "encode_batch"):
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
            ids, offsets = [e.ids for e in encodings], [e.offsets for e in encodings]
        else:
            output = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, offsets = output["input_ids"], output["offset_mapping"]
        out = []
        for i, spans in zip(ids, offsets, strict=True):
            ends = np.array([end for _, end in spans], dtype=np.int32)
            # A token without characters of its own ends where the one before it ends.
            out.append((np.array(i, dtype=np.int32), np.maximum.accumulate(ends)))
        return out

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))


def encoder_for(tokenizer: Any) -> ByteEncoder | OffsetEncoder:
    """The encoder of a tokenizer; bytes when it is None."""
    if tokenizer is None:
        return ByteEncoder()
    if hasattr(tokenizer, "encode_batch") or getattr(tokenizer, "is_fast", False):
        return OffsetEncoder(tokenizer)
    raise InputError(
        f"tokenizer is a {type(tokenizer).__name__}, which doesn't give the offsets of its tokens. "
        "Pass a fast one (from AutoTokenizer.from_pretrained, or a tokenizers.Tokenizer), or None for bytes."
    )

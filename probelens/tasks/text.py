"""Batches and pairs from text: tokens padded to one length, what is padding, and where the two texts of a pair differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError


def tokens_of_texts(model: Any, texts: Sequence[str], what: str) -> tuple[Tensor, Tensor]:
    """Token ids and True on real ones, both (example, pos), padded on the tokenizer's side.

    Raises InputError for a model without a tokenizer, or texts that are none.
    """
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{what} must be a list of strings, and not an empty one")
    if model.tokenizer is None:
        raise InputError(
            f"{what} is text, and this model has no tokenizer. Give tokens, or pl.wrap(module, tokenizer=...)"
        )
    tokens, mask = model.adapter.tokenize(list(texts), None)
    tokens = tokens.cpu()
    return tokens, torch.ones_like(tokens).bool() if mask is None else mask.bool().cpu()


def aligned(
    model: Any, clean: Sequence[str], corrupted: Sequence[str], align: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Tokens (example, pos) of both sides, their masks, and from where to where they differ, (example, side, 2).

    ``align`` is "token" for pairs of equally many tokens, or "right" to pad the shorter one on the left.
    """
    if align not in ("token", "right"):
        raise InputError(f"align={align!r} is not known. Allowed: 'token', 'right'")
    if isinstance(clean, str) or isinstance(corrupted, str) or len(clean) != len(corrupted):
        raise InputError("clean and corrupted must be lists of equally many strings")
    n = len(clean)
    tokens, mask = tokens_of_texts(model, [*clean, *corrupted], "clean and corrupted")
    lengths = mask.sum(1)
    unequal = (lengths[:n] != lengths[n:]).nonzero().flatten().tolist()
    if align == "token" and unequal:
        i = unequal[0]
        raise InputError(
            f"{len(unequal)} of {n} pairs have different numbers of tokens, first pair {i}: {int(lengths[i])} for "
            f"{clean[i]!r}, {int(lengths[n + i])} for {corrupted[i]!r}. Change the texts, or give align='right', which pads "
            "the shorter one on the left"
        )
    if align == "right":
        order = mask.long().argsort(dim=1, stable=True)
        tokens, mask = tokens.gather(1, order), mask.gather(1, order)
    spans = torch.stack(
        [_differing(*(side[i] for side in (tokens[:n], mask[:n], tokens[n:], mask[n:]))) for i in range(n)]
    )
    same = (spans[:, :, 0] == spans[:, :, 1]).all(1).nonzero().flatten().tolist()
    if same:
        raise InputError(f"clean and corrupted have equal tokens in pair {same[0]}: {clean[same[0]]!r}. Drop it.")
    return (tokens[:n], tokens[n:]), (mask[:n], mask[n:]), spans


def _differing(clean: Tensor, clean_mask: Tensor, corrupted: Tensor, corrupted_mask: Tensor) -> Tensor:
    """First position and end of what differs between a common beginning and a common ending, on both sides. (side, 2)"""
    a, b = clean[clean_mask].tolist(), corrupted[corrupted_mask].tolist()
    short = min(len(a), len(b))
    start = next((i for i in range(short) if a[i] != b[i]), short)
    end = next((i for i in range(short - start) if a[-1 - i] != b[-1 - i]), short - start)
    firsts = [int(mask.long().argmax()) for mask in (clean_mask, corrupted_mask)]
    return torch.tensor([[first + start, first + len(x) - end] for first, x in zip(firsts, (a, b), strict=True)])

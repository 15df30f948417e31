"""Inputs of a model: tokens, text or keywords, checked and made into a call on the right device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call
from probelens.hooks.padding import positions_for_padding
from probelens.hooks.protocol import Wrapped

__all__ = ["described", "need_tokenizer", "prepared", "tokens_of"]


def prepared(model: Wrapped, inputs: Any, mask: Any, start: int | None, extra: dict[str, Any]) -> Call:
    """The call of the module that inputs ask for.

    Args:
        model: The wrapped model.
        inputs: Tokens (batch, pos), text, keywords, or the residual that enters block ``start``.
        mask: 1 for real tokens, 0 for padding; None for no padding. (batch, pos)
        start: First block that runs; None for all.
        extra: Keywords for the module's forward, and ``prepend_bos``.

    Returns:
        A call on the model's device.

    Raises:
        InputError: A token outside the vocabulary, text without a tokenizer, or inputs of another kind.
        ShapeError: Tokens that aren't (batch, pos), or a residual that isn't (batch, pos, d_model).
    """
    adapter = model.adapter
    device = adapter.device()
    bos, extra = extra.get("prepend_bos"), {k: v for k, v in extra.items() if k != "prepend_bos"}
    if mask is not None:
        mask = torch.as_tensor(mask).to(device)
    if start is not None:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 3:
            raise ShapeError(
                f"start_at_layer={start} needs the residual entering that block, (batch, pos, d_model), "
                f"got {described(inputs)}"
            )
        return adapter.resid_call(inputs.to(device), mask, positions_for_padding(model, mask, extra))
    if isinstance(inputs, str) or (
        isinstance(inputs, (list, tuple)) and len(inputs) > 0 and all(isinstance(t, str) for t in inputs)
    ):
        tokens, made = tokens_of(adapter, inputs, bos)
        mask = made if mask is None else mask
        return adapter.call(tokens, mask, positions_for_padding(model, mask, extra))
    if isinstance(inputs, Mapping):
        kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        mask = mask if mask is not None else kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = mask
        ids = kwargs.get("input_ids")
        _check_tokens(model, ids)
        return Call((), positions_for_padding(model, mask, {**kwargs, **extra}), ids, mask)
    if isinstance(inputs, (list, tuple)):
        if not len(inputs):
            raise ShapeError(f"tokens must be (batch, pos) and not empty, got {inputs!r}")
        try:
            inputs = torch.tensor(inputs)
        except (ValueError, TypeError, RuntimeError) as err:
            raise InputError(f"inputs must be tokens, text or a mapping of keywords, got {inputs!r}") from err
    if isinstance(inputs, Tensor):
        if not inputs.is_floating_point() and inputs.ndim == 1:
            inputs = inputs[None]
        _check_tokens(model, inputs)
        return adapter.call(inputs.to(device), mask, positions_for_padding(model, mask, extra))
    return adapter.call(inputs, mask, extra)


def need_tokenizer(adapter: Adapter) -> Any:
    """The model's tokenizer.

    Args:
        adapter: What the architecture says about itself.

    Returns:
        ``adapter.tokenizer``.

    Raises:
        InputError: There is none.
    """
    if adapter.tokenizer is None:
        raise InputError(
            f"text given, but this {type(adapter.module).__name__} has no tokenizer. "
            "Give tokens (batch, pos), or pl.wrap(module, tokenizer=...)"
        )
    return adapter.tokenizer


def tokens_of(
    adapter: Adapter, text: str | Sequence[str], prepend_bos: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Token ids of text, padded to the longest.

    Args:
        adapter: What the architecture says about itself.
        text: One string or several.
        prepend_bos: Put the beginning-of-sequence token in front; None for the tokenizer's habit.

    Returns:
        Ids (batch, pos), and 1 for real tokens (batch, pos) where padding was needed, None otherwise.

    Raises:
        InputError: The model has no tokenizer, or the text gives no tokens.
    """
    need_tokenizer(adapter)
    return adapter.tokenize([text] if isinstance(text, str) else list(text), prepend_bos)


def _check_tokens(model: Wrapped, tokens: Any) -> None:
    vocab = model.adapter.cfg.d_vocab
    if not isinstance(tokens, Tensor) or not vocab:
        return
    if tokens.is_floating_point():
        if tokens.ndim == 2:
            raise InputError(f"tokens are integers (batch, pos), got {described(tokens)}. Use tokens.long().")
        return
    if tokens.dtype == torch.bool:
        raise InputError(f"tokens are integers (batch, pos), got {described(tokens)}: a mask?")
    if tokens.numel() == 0 or tokens.ndim != 2:
        raise ShapeError(f"tokens must be (batch, pos) and not empty, got shape {tuple(tokens.shape)}")
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise InputError(
            f"token id {bad} is outside the vocabulary: this {type(model.module).__name__} takes ids 0 to {vocab - 1}"
        )


def described(value: Any) -> str:
    """A value in words, for an error message.

    Args:
        value: Anything.

    Returns:
        Its shape and dtype, or its type.
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"

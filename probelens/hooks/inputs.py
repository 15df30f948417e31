"""What goes into a model: tokens, text, or keywords, checked and put on the right device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probelens.errors import InputError, ShapeError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call
from probelens.hooks.padding import positions_for_padding

__all__ = ["ModelInputs", "described"]


class ModelInputs:
    """The part of a HookedModel that turns what a user gives into a call of the module.

    Args:
        module: The user's module.
        adapter: What the architecture says about itself.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self.module = module
        self.adapter = adapter

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.adapter.tokenizer

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = None) -> Tensor:
        """Token ids of text, padded to the longest.

        Args:
            input: One string or several.
            prepend_bos: Put the beginning-of-sequence token in front; None for the tokenizer's habit.

        Returns:
            Ids, int64. (batch, pos)

        Raises:
            InputError: The model has no tokenizer.
        """
        return self._tokenize(input, prepend_bos)[0]

    def to_string(self, tokens: Tensor) -> str | list[str]:
        """Text of token ids: one string for (pos,), a list for (batch, pos).

        Args:
            tokens: Token ids. (pos,) or (batch, pos)

        Returns:
            One string, or one a row.
        """
        tokens = torch.as_tensor(tokens)
        decode = self.adapter.need_tokenizer().decode
        if tokens.ndim <= 1:
            return str(decode(tokens.reshape(-1).tolist()))
        return [str(decode(row.tolist())) for row in tokens]

    def to_str_tokens(self, input: str | Tensor, prepend_bos: bool | None = None) -> list[str]:
        """The text of each token of one string or one row of ids.

        Args:
            input: One string, or ids. (pos,)
            prepend_bos: As for ``to_tokens``; of strings only.

        Returns:
            One string a token.
        """
        tokens = self.to_tokens(input, prepend_bos)[0] if isinstance(input, str) else torch.as_tensor(input)
        return [str(self.to_string(t.reshape(1))) for t in tokens.reshape(-1)]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is one token.

        Args:
            string: Text, with the space in front of it if it has one.

        Returns:
            The token id.

        Raises:
            InputError: The string is several tokens, or the model has no tokenizer.
        """
        ids = self.to_tokens(string, prepend_bos=False)[0].tolist()
        if len(ids) != 1:
            raise InputError(
                f"{string!r} is {len(ids)} tokens ({self.to_str_tokens(string, False)}), not one"
            )
        return int(ids[0])

    def _tokenize(self, text: str | Sequence[str], prepend_bos: bool | None) -> tuple[Tensor, Tensor | None]:
        return self.adapter.tokenize([text] if isinstance(text, str) else list(text), prepend_bos)

    def _call(self, inputs: Any, mask: Tensor | None, start: int | None, extra: dict[str, Any]) -> Call:
        device = self.adapter.device()
        bos = extra.pop("prepend_bos", None)
        if mask is not None:
            mask = torch.as_tensor(mask).to(device)
        if start is not None:
            if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 3:
                raise ShapeError(
                    f"start_at_layer={start} needs the residual entering that block, (batch, pos, d_model), "
                    f"got {described(inputs)}"
                )
            return self.adapter.resid_call(inputs.to(device), mask, positions_for_padding(self, mask, extra))
        if isinstance(inputs, str) or (
            isinstance(inputs, (list, tuple)) and len(inputs) > 0 and all(isinstance(t, str) for t in inputs)
        ):
            tokens, made = self._tokenize(inputs, bos)
            mask = made if mask is None else mask
            return self.adapter.call(tokens, mask, positions_for_padding(self, mask, extra))
        if isinstance(inputs, Mapping):
            kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            mask = mask if mask is not None else kwargs.get("attention_mask")
            if mask is not None:
                kwargs["attention_mask"] = mask
            ids = kwargs.get("input_ids")
            self._check_tokens(ids)
            return Call((), positions_for_padding(self, mask, {**kwargs, **extra}), ids, mask)
        if isinstance(inputs, (list, tuple)):
            if not len(inputs):
                raise ShapeError(f"tokens must be (batch, pos) and not empty, got {inputs!r}")
            try:
                inputs = torch.tensor(inputs)
            except (ValueError, TypeError, RuntimeError) as err:
                raise InputError(
                    f"inputs must be tokens, text or a mapping of keywords, got {inputs!r}"
                ) from err
        if isinstance(inputs, Tensor):
            if not inputs.is_floating_point() and inputs.ndim == 1:
                inputs = inputs[None]
            self._check_tokens(inputs)
            return self.adapter.call(inputs.to(device), mask, positions_for_padding(self, mask, extra))
        return self.adapter.call(inputs, mask, extra)

    def _check_tokens(self, tokens: Any) -> None:
        vocab = self.adapter.cfg.d_vocab
        if not isinstance(tokens, Tensor) or not vocab:
            return
        if tokens.is_floating_point():
            if tokens.ndim == 2:
                raise InputError(
                    f"tokens are integers (batch, pos), got {described(tokens)}. Use tokens.long()."
                )
            return
        if tokens.dtype == torch.bool:
            raise InputError(f"tokens are integers (batch, pos), got {described(tokens)}: a mask?")
        if tokens.numel() == 0 or tokens.ndim != 2:
            raise ShapeError(f"tokens must be (batch, pos) and not empty, got shape {tuple(tokens.shape)}")
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise InputError(
                f"token id {bad} is outside the vocabulary: this {type(self.module).__name__} takes ids 0 to {vocab - 1}"
            )


def described(value: Any) -> str:
    """A value in words, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"

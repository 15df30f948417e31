"""Sizes of a wrapped model, and one call of a module: its arguments, tokens and loss, and the tensors that go in and out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from probelens.errors import InputError, ShapeError

__all__ = ["Call", "ModelConfig", "StopForward", "first_argument", "pick", "put", "tokenized"]


@dataclass
class ModelConfig:
    """The sizes of a wrapped model, under TransformerLens' names.

    Args:
        n_layers: Number of blocks.
        d_model: Width of the residual stream (of a recurrent network: of a layer's output).
        d_vocab: Number of input token ids; 0 for models that don't take tokens.
        n_heads: Attention heads; 0 where there is no attention.
        d_head: Width of one head.
        n_key_value_heads: Heads of keys and values where grouped queries share them; None elsewhere.
        d_mlp: Width inside the MLP; 0 if there is none.
        n_ctx: Longest sequence the model takes; 0 for no limit.
        d_vocab_out: Number of logits.
        model_name: Class or hub name.
        architecture: Adapter's name for the family.
        device: Where the inputs go.
        dtype: Of the parameters.
        extra: Sizes of this family only, such as ``d_state``.
    """

    n_layers: int
    d_model: int
    d_vocab: int = 0
    n_heads: int = 0
    d_head: int = 0
    n_key_value_heads: int | None = None
    d_mlp: int = 0
    n_ctx: int = 0
    d_vocab_out: int = 0
    model_name: str = ""
    architecture: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def attn_only(self) -> bool:
        """Whether the blocks have attention and no MLP."""
        return self.n_heads > 0 and self.d_mlp == 0


@dataclass
class Call:
    """One call of the user's module, ready to make: arguments, and the tokens if there are any.

    Args:
        args: Positional arguments of the forward.
        kwargs: Keyword arguments of the forward.
        tokens: Token ids; None for inputs of another kind. (batch, pos)
        mask: 1 for real tokens, 0 for padding; None for no padding. (batch, pos)
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None = None
    mask: Tensor | None = None

    def loss(self, logits: Tensor, per_token: bool = False) -> Tensor:
        """Next-token cross-entropy in nats, padding left out.

        Args:
            logits: (batch, pos, d_vocab)
            per_token: The loss of each prediction, 0 at padding, instead of their mean.

        Returns:
            The mean (), or (batch, pos − 1).

        Raises:
            InputError: The input wasn't tokens, or the mask leaves none, so there is nothing to predict.
        """
        tokens = self.tokens
        if tokens is None or logits.ndim != 3 or tokens.shape[1] < 2:
            raise InputError(
                'return_type="loss" needs tokens (batch, pos) with at least two positions and logits '
                f"(batch, pos, d_vocab); the logits have shape {tuple(logits.shape)}. "
                'Use return_type="logits" and compute a loss of your own.'
            )
        answers = tokens[:, 1:].to(logits.device)
        losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), answers.flatten(), reduction="none")
        shape = answers.shape
        if self.mask is None:
            return losses.view(shape) if per_token else losses.mean()
        weight = (self.mask[:, 1:] * self.mask[:, :-1]).flatten().to(losses)
        if not per_token and not bool(weight.any()):
            raise InputError("the attention mask leaves no two neighbouring tokens, so there is nothing to predict")
        return (losses * weight).view(shape) if per_token else (losses * weight).sum() / weight.sum()


class StopForward(BaseException):
    """Ends a forward pass early; carries the residual. Never leaves ``HookedModel``.

    Args:
        resid: The residual stream where the forward ended. (batch, pos, d_model)
    """

    def __init__(self, resid: Tensor) -> None:
        super().__init__("forward pass stopped on purpose")
        self.resid = resid


def tokenized(
    tokenizer: Any, texts: list[str], prepend_bos: bool | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Token ids of texts, padded to the longest on the tokenizer's side.

    Args:
        tokenizer: Called as tokenizers of transformers are.
        texts: Strings.
        prepend_bos: Put the beginning-of-sequence token in front; None for the tokenizer's habit.
        device: Where the ids go.

    Returns:
        Ids (batch, pos), and 1 for real tokens (batch, pos) where padding was needed, None otherwise.

    Raises:
        InputError: The tokenizer has no such token, or the texts give no tokens.
    """
    rows = [list(tokenizer(t, add_special_tokens=prepend_bos is None)["input_ids"]) for t in texts]
    if prepend_bos:
        if tokenizer.bos_token_id is None:
            raise InputError("prepend_bos=True, but the tokenizer has no beginning-of-sequence token")
        rows = [[tokenizer.bos_token_id, *row] for row in rows]
    width = max((len(row) for row in rows), default=0)
    if not width:
        raise InputError(f"the text {texts[0] if len(texts) == 1 else texts!r} gives no tokens")
    if all(len(row) == width for row in rows):
        return torch.tensor(rows, device=device), None
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    left = getattr(tokenizer, "padding_side", "right") == "left"
    gaps = [[pad] * (width - len(row)) for row in rows]
    tokens = torch.tensor(
        [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)], device=device
    )
    return tokens, real_tokens(tokens, [len(row) for row in rows], left)


def real_tokens(tokens: Tensor, lengths: list[int], left: bool) -> Tensor:
    """1 for real tokens and 0 for padding, on the left or on the right, of sequences of these lengths. (batch, pos)"""
    width, real = tokens.shape[1], torch.tensor(lengths, device=tokens.device)[:, None]
    places = torch.arange(width, device=tokens.device)
    return (places >= width - real if left else places < real).long()


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> int | str:
    """Position or keyword of the first tensor among a call's arguments.

    Args:
        args: Positional arguments of a call.
        kwargs: Keyword arguments of a call.
        name: Hook point, for the message.

    Returns:
        A number for a positional argument, a string for a keyword.

    Raises:
        ShapeError: There is no tensor among them.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        if isinstance(value, (Tensor, PackedSequence)):
            return key
    raise ShapeError(f"hook point {name!r}: its module was called without any tensor argument")


def pick(output: Any, index: int | str | None, name: str = "output") -> Any:
    """The tensor among a module's outputs: itself, an element of a tuple, or an entry of a mapping.

    Args:
        output: What a module returned.
        index: Which element; None for the first tensor.
        name: Hook point, for the message.

    Returns:
        The tensor, or packed sequence.

    Raises:
        ShapeError: There is no tensor to hook.
    """
    if index is None:
        if isinstance(output, (Tensor, PackedSequence)):
            return output
        items = output.values() if isinstance(output, Mapping) else output
        if isinstance(items, Iterable):
            for item in items:
                if isinstance(item, (Tensor, PackedSequence)):
                    return item
    elif not isinstance(output, Tensor):
        found = output[index]
        if isinstance(found, (Tensor, PackedSequence)):
            return found
    elif index == 0:
        return output
    raise ShapeError(
        f"hook point {name!r}: its module returned a {type(output).__name__}"
        f"{'' if index is None else f' with nothing at {index!r}'}, and hooks see tensors only"
    )


def put(output: Any, index: int | str | None, new: Any) -> Any:
    """A module's output with the tensor that ``pick`` finds replaced; the original is left alone.

    Args:
        output: What a module returned.
        index: Which element; None for the first tensor.
        new: What replaces it.

    Returns:
        The same kind of output, with ``new`` in it.

    Raises:
        ShapeError: A tuple was asked for an entry by name.
    """
    if isinstance(output, (Tensor, PackedSequence)) and not (isinstance(output, PackedSequence) and index is not None):
        return new
    if isinstance(output, Mapping):
        first = next(k for k, v in output.items() if isinstance(v, (Tensor, PackedSequence)))
        changed = copy.copy(output)
        changed[first if index is None else index] = new  # type: ignore[index]
        return changed
    items = list(output)
    if isinstance(index, str):
        raise ShapeError(f"a {type(output).__name__} has no entry {index!r}")
    first = next(i for i, v in enumerate(items) if isinstance(v, (Tensor, PackedSequence)))
    items[first if index is None else index] = new
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)

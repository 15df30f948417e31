"""Sizes of a wrapped model, and one call of the user's module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "ModelConfig", "StopForward"]


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


class StopForward(BaseException):
    """Ends a forward pass early; carries the residual. Never leaves ``HookedModel``.

    Args:
        resid: The residual stream where the forward ended. (batch, pos, d_model)
    """

    def __init__(self, resid: Tensor) -> None:
        super().__init__("forward pass stopped on purpose")
        self.resid = resid

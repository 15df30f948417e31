"""transformers' models with attention: decoders, encoders, encoder-decoders, and classifiers made of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from probelens.adapters.hf.encoder import HFEncoder
from probelens.adapters.hf.encoder_decoder import HFEncoderDecoder
from probelens.adapters.hf.stack import HFStack
from probelens.hooks.adapter import Adapter

__all__ = ["HFTransformer"]


class HFTransformer(HFStack):
    """Any transformers model whose blocks have an attention and an MLP: GPT-NeoX, Llama, BERT, ViT, T5 and their like."""

    @classmethod
    def matches(cls, module: Any) -> bool:
        return super().matches(module) or HFEncoderDecoder.matches(module)

    @classmethod
    def adapt(cls, module: nn.Module, **options: Any) -> Adapter:
        for kind in (HFEncoderDecoder, HFEncoder):
            if kind.matches(module):
                return kind(module, **options)
        return cls(module, **options)

"""Encoders of transformers, which read both ways: BERT, RoBERTa, DistilBERT, ModernBERT, ViT and classifiers made of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from probelens.adapters.hf.blocks import first_child, join, parts_of, reads_both_ways
from probelens.adapters.hf.decoder import path_of
from probelens.adapters.hf.stack import HFStack
from probelens.errors import InputError
from probelens.hooks.config import Call, StopForward, pick
from probelens.hooks.forwards import length_of_output, passed_over, submodule
from probelens.hooks.points import HookPoint

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["HFEncoder"]


class HFEncoder(HFStack):
    """An encoder of transformers, alone or under a head for masked tokens, tokens, sequences or pictures."""

    caches: ClassVar[bool] = False

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        if self.main_input() == "pixel_values":
            # The patches alone lack the class token, so their positions would not be those of the blocks.
            inner = self.decoder(module)
            whole = first_child(inner, ("embeddings",))
            self.parts.pop("embed", None)
            if whole is not None:
                self.parts["embed"] = join(path_of(module, inner), whole)

        kind, head = type(module).__name__, getattr(module, "classifier", None)
        tagger = kind.endswith("ForTokenClassification") and first_child(module, ("head",)) is None
        if tagger and isinstance(head, nn.Linear):
            self.parts["unembed"], self.cfg.d_vocab_out = "classifier", head.out_features
        else:
            # Heads for masked tokens and for sequences transform what they read first.
            self.nonlinear_head = "unembed" in self.parts or kind.endswith("ForSequenceClassification")

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not super().matches(module):
            return False
        inner = cls.decoder(module)
        block = next(iter(inner.get_submodule(first_child(inner, cls.lists) or "").children()), None)
        attention = None if block is None else parts_of(block, module.config).attention
        return block is not None and attention is not None and _both_ways(block, attention, module.config)

    def embedding(self, inner: nn.Module) -> nn.Module | None:
        # T5's encoder has an embedding of its own, which the model's shares its weights with and doesn't call.
        own = first_child(inner, ("encoder.embed_tokens",))
        return inner.get_submodule(own) if own is not None else super().embedding(inner)

    def points(self) -> list[HookPoint]:
        points = super().points()
        for point in points:
            if point.name == "hook_embed" and self.main_input() == "pixel_values":
                point.note = "embedded patches with the class token and positions"
        return points

    def loss(self, logits: Tensor, call: Call, per_token: bool = False) -> Tensor:
        raise InputError(
            f'return_type="loss" is the loss of the next token, which a {type(self.module).__name__} reads beside the others. '
            'Use return_type="logits" and compute a loss of your own'
        )

    def resumer(self, model: HookedModel) -> Resumer | None:
        return None

    def resid_call(self, resid: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        if self.main_input() != "pixel_values":
            return super().resid_call(resid, mask, extra)
        size = self.config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        blank = torch.zeros(
            len(resid), self.config.num_channels, height, width, dtype=self.cfg.dtype, device=self.device()
        )
        return self.call(blank, mask, extra)

    # -- starting and stopping: heads read what the last block returns in many ways ----------------------------

    def can_skip(self) -> bool:
        return not self._biased()

    def _biased(self) -> bool:
        return bool(getattr(submodule(self.module, self._attention(0)), "has_relative_attention_bias", False))

    def _attention(self, layer: int) -> str:
        return join(self.blocks[layer], self.block_parts[layer].attention or "")

    def stopping_at(self, layer: int) -> contextlib.AbstractContextManager[None]:
        if layer < len(self.blocks):
            return super().stopping_at(layer)
        return _stopped_after(submodule(self.module, self.blocks[-1]))

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        if layer and self._biased():
            raise InputError(
                f"start_at_layer={layer}: later blocks of this {type(self.module).__name__} use the position bias that block 0 "
                "computes, so no run can begin behind it. Run it whole"
            )
        if layer < len(self.blocks):
            with super().starting_at(layer, resid):
                yield
            return
        # What the last block returns is what all heads read, whichever module of them comes first.
        last = submodule(self.module, self.blocks[-1])
        if self._block_outputs is None:
            call = self.resid_call(resid[:1], None, {})
            self._block_outputs = length_of_output(last, lambda: self.run(call))
        with super().starting_at(layer - 1, resid), passed_over([last], self._block_outputs):
            yield


def _both_ways(block: nn.Module, attention: str, config: Any) -> bool:
    module = block.get_submodule(attention)
    if (
        getattr(module, "is_causal", None) is None
        and first_child(block, ("intermediate", "layer.0", "sa_layer_norm")) is None
    ):
        return False
    return reads_both_ways(module, config)


@contextlib.contextmanager
def _stopped_after(module: nn.Module) -> Iterator[None]:
    """End a forward pass of this thread where ``module`` returns, by a ``StopForward`` with its first tensor."""
    thread = threading.get_ident()

    def stop(module: nn.Module, args: Any, out: Any) -> None:
        if threading.get_ident() == thread:
            raise StopForward(pick(out, None, "residual after the last block"))

    with module.register_forward_hook(stop):
        yield

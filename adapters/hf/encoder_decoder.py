"""Encoder-decoders of transformers: T5, BART, Marian, Whisper. The decoder is the stack that counts, the encoder beside it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from probelens.adapters.hf.blocks import ATTENTION, first_child, is_known, join
from probelens.adapters.hf.decoder import is_hf, path_of
from probelens.adapters.hf.stack import HFStack
from probelens.errors import InputError
from probelens.hooks.config import Call
from probelens.hooks.points import NOTES, HookPoint

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["HFEncoderDecoder"]

_LISTS = ("layers", "block")
_NORMS = ("final_layer_norm", "layer_norm", "norm")
_NAMED = re.compile(r"encoder\.blocks\.(\d+)\.(.+)")


class HFEncoderDecoder(HFStack):
    """An encoder-decoder. ``blocks.3`` and ``decoder.blocks.3`` are the decoder's, ``encoder.blocks.3`` the encoder's.

    Tokens alone are what the encoder reads; the decoder then reads them too, one step later, as BART does by itself.
    """

    lists: ClassVar[tuple[str, ...]] = tuple(f"decoder.{name}" for name in _LISTS)
    crosses: ClassVar[bool] = True

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        inner = self.decoder(module)
        self._base = path_of(module, inner)
        encoder = inner.get_submodule("encoder")
        listed = join(self._base, "encoder", first_child(encoder, _LISTS) or "")
        self.encoder_blocks = [f"{listed}.{name}" for name, _ in module.get_submodule(listed).named_children()]
        self.encoder_parts = [self._parts(path, False) for path in self.encoder_blocks]
        self.cfg.extra["n_encoder_layers"] = len(self.encoder_blocks)
        shared = first_child(inner, ("decoder.embed_tokens",))
        if shared and first_child(inner, ("encoder.embed_tokens",)):
            own = inner.get_submodule("encoder.embed_tokens")
            if own is inner.get_submodule(shared):
                self.parts.pop("embed", None)
            if self.cfg.d_vocab:
                self.cfg.d_vocab = int(getattr(own, "num_embeddings", 0))

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not is_hf(module) or not getattr(module.config, "is_encoder_decoder", False):
            return False
        inner = cls.decoder(module)
        decoder, encoder = (
            first_child(inner, [f"{side}.{name}" for name in _LISTS]) for side in ("decoder", "encoder")
        )
        if decoder is None or encoder is None:
            return False
        blocks = [*inner.get_submodule(encoder).children(), *inner.get_submodule(decoder).children()]
        return all(is_known(block) or first_child(block, ATTENTION) is not None for block in blocks)

    def embedding(self, inner: nn.Module) -> nn.Module | None:
        # The model's own embedding shares its weights with those of the two stacks, and isn't called.
        own = first_child(inner, ("decoder.embed_tokens",))
        return inner.get_submodule(own) if own is not None else None

    # -- hook points -----------------------------------------------------------------------------------------

    def points(self) -> list[HookPoint]:
        decoder = super().points()
        for point in decoder:
            point.aliases = (*point.aliases, f"decoder.{point.name}")
        return self._encoder_points() + decoder

    def _encoder_points(self) -> list[HookPoint]:
        points = []
        encoder = self.module.get_submodule(join(self._base, "encoder"))
        embed, norm = first_child(encoder, ("embed_tokens",)), first_child(encoder, _NORMS)
        here = join(self._base, "encoder")
        if embed is not None and "embed" in self.parts:
            points.append(self.boundary("encoder.hook_embed", join(here, embed), "out", note=NOTES["embed"]))
        for layer, (path, parts) in enumerate(zip(self.encoder_blocks, self.encoder_parts, strict=True)):
            prefix = f"encoder.blocks.{layer}."
            points.append(self.boundary(prefix + "hook_resid_pre", path, "in", note=NOTES["resid_pre"]))
            points += self.points_in(prefix, path, parts)
            points.append(self.boundary(prefix + "hook_resid_post", path, "out", note=NOTES["resid_post"]))
        if norm is not None:
            for side in ("in", "out"):
                note = NOTES[f"ln_final_{side}"] + (
                    ", which the decoder's cross-attention reads" if side == "out" else ""
                )
                points.append(self.boundary(f"encoder.ln_final.hook_{side}", join(here, norm), side, note=note))
        return points

    def absent(self, name: str) -> str | None:
        found = _NAMED.fullmatch(name)
        if found is not None and int(found[1]) < len(self.encoder_blocks):
            layer = int(found[1])
            prefix = f"encoder.blocks.{layer}."
            return self.absent_in(prefix, self.encoder_blocks[layer], self.encoder_parts[layer], found[2])
        if name.endswith("hook_embed") and "embed" not in self.parts:
            return "encoder and decoder call one embedding, so each of its calls would be at one point"
        return super().absent(name.removeprefix("decoder."))

    # -- calling the model -----------------------------------------------------------------------------------

    def call(self, tokens: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        call = super().call(tokens, mask, extra)
        given = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
        if any(extra.get(name) is not None for name in given):
            return self._told(call)
        ids = call.kwargs.get("input_ids")
        shift: Any = getattr(
            self.module, "prepare_decoder_input_ids_from_labels", getattr(self.module, "_shift_right", None)
        )
        if ids is None:
            raise InputError(
                f"what the decoder of this {type(self.module).__name__} reads is not known. Give a mapping of its forward's "
                f'arguments: {{"{self.main_input()}": ..., "decoder_input_ids": ...}}'
            )
        if shift is not None:
            call.kwargs["decoder_input_ids"] = shift(ids)
        return self._told(call)

    def _told(self, call: Call) -> Call:
        """The same call, whose tokens are what the decoder reads: they are predicted."""
        ids = call.kwargs.get("decoder_input_ids")
        return Call(call.args, call.kwargs, ids, call.kwargs.get("decoder_attention_mask"))

    def loss(self, logits: Tensor, call: Call, per_token: bool = False) -> Tensor:
        return self._told(call).loss(logits, per_token)

    # -- the decoder reads the encoder's output at every block ---------------------------------------------------

    def rereads(self, layer: int) -> bool:
        return layer < len(self.blocks)

    def can_skip(self) -> bool:
        return False

    def resumer(self, model: HookedModel) -> Resumer | None:
        return None

    def resid_call(self, resid: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        raise InputError(
            f"start_at_layer: blocks of this {type(self.module).__name__} read the encoder's output beside the residual, "
            "so the residual alone isn't enough to go on from. Run it whole."
        )

"""What every Hugging Face decoder has in common: where its blocks, embeddings and norm are."""

from __future__ import annotations

import contextlib
import os
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from probelens.adapters.hf import norms, positions
from probelens.adapters.hf.blocks import first_child, join
from probelens.adapters.hf.components import NORMS, of_model
from probelens.errors import AdapterNotFoundError, InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, ModelConfig
from probelens.hooks.forwards import submodule
from probelens.hooks.points import RESID, HookPoint, in_block
from probelens.hooks.switchboard import Tap
from probelens.hooks.wrapping import unadapted

_BLOCK_LISTS = ("layers", "h", "blocks", "decoder.layers", "block")
ENCODERS = ("encoder.layer", "encoder.layers", "encoder.block", "transformer.layer")
_FINAL_NORMS = (
    "norm", "ln_f", "final_layer_norm", "norm_f", "final_layernorm", "final_norm", "ln_out", "rms_norm",
    "embedding_norm", "out_norm", "layer_norm", "decoder.final_layer_norm", "decoder.layer_norm", "decoder.norm", "layernorm",
)  # fmt: skip


def is_hf(module: Any) -> bool:
    """Whether a module is a transformers model, found out without importing transformers."""
    return isinstance(module, nn.Module) and any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )


def path_of(root: nn.Module, module: nn.Module) -> str:
    """Where a module stands below ``root``."""
    for path, found in root.named_modules():
        if found is module:
            return path
    raise AdapterNotFoundError(f"{type(module).__name__} is not a submodule of {type(root).__name__}")


def _grouped(config: Any, heads: int) -> int | None:
    shared = getattr(config, "num_key_value_heads", None)
    return int(shared) if isinstance(shared, int) and 0 < shared != heads else None


def _mlp_width(config: Any, width: int) -> int:
    for key in ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"):
        found = getattr(config, key, None)
        if isinstance(found, int):
            return found
    # GPT-2's n_inner=None means four times the width.
    return 4 * width if hasattr(config, "n_inner") else 0


class HFAdapter(Adapter):
    """Blocks, embedding, final norm and unembedding of a ``...ForCausalLM`` or a bare ``...Model`` of transformers."""

    options = ("tokenizer",)
    # Whether the model keeps keys and values for later positions if asked.
    caches: ClassVar[bool] = True
    # Where the list of blocks may be, below the module that holds it.
    lists: ClassVar[tuple[str, ...]] = (*_BLOCK_LISTS, *ENCODERS)

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module)
        self.tokenizer = tokenizer
        self.config: Any = module.config
        text: Any = getattr(self.config, "get_text_config", lambda: self.config)()
        inner = self.decoder(module)
        base = path_of(module, inner)
        blocks = first_child(inner, self.lists)
        if blocks is None:
            raise AdapterNotFoundError(
                f"no list of blocks found in {type(module).__name__}: looked for {', '.join(self.lists)} in "
                f'{type(inner).__name__}. Say where it is: pl.wrap(module, blocks="path.to.the.list")'
            )
        count = len(list(inner.get_submodule(blocks).children()))
        self.blocks = [join(base, blocks, str(i)) for i in range(count)]
        embed = self.embedding(inner)
        if embed is not None:
            self.parts["embed"] = path_of(module, embed)
        norm = first_child(inner, _FINAL_NORMS)
        if norm is not None:
            self.parts["ln_final"] = join(base, norm)
        outputs: Any = getattr(module, "get_output_embeddings", None)
        head = outputs() if outputs is not None else None
        if head is not None:
            self.parts["unembed"] = path_of(module, head)
        embed, head = (None if part is None else unadapted(part) for part in (embed, head))
        name = str(getattr(self.config, "_name_or_path", "") or type(module).__name__)
        heads = int(getattr(text, "num_attention_heads", 0) or 0)
        width = int(text.hidden_size)
        self.positions = ""
        self.norms: dict[str, str] = {"ln_final": self.parts["ln_final"]} if norm is not None else {}
        self._name_components(of_model(module, base))
        self.cfg = ModelConfig(
            n_layers=count,
            d_model=width,
            d_vocab=int(getattr(embed, "num_embeddings", 0) or 0) if self.main_input() == "input_ids" else 0,
            n_heads=heads,
            d_head=int(getattr(text, "head_dim", None) or (width // heads if heads else 0)),
            n_key_value_heads=_grouped(text, heads),
            d_mlp=_mlp_width(text, width) if heads else 0,
            n_ctx=int(getattr(text, "max_position_embeddings", 0) or 0),
            d_vocab_out=int(getattr(head, "out_features", 0) or 0),
            # A folder's name says as much as its path, and a path of one machine means nothing on another.
            model_name=os.path.basename(name.rstrip("/")) if os.path.isdir(name) else name,
            architecture=self.name,
        )

    def _name_components(self, paths: dict[str, str]) -> None:
        """Know modules by TransformerLens' names: what enters and leaves them, and what lies inside of norms."""
        self.norms |= {name: path for name, path in paths.items() if in_block(name)[1] in NORMS}
        for name, path in paths.items():
            self.lens_names |= {f"{name}.hook_{end}": f"{path}.hook_{end}" for end in ("in", "out")}
        inside = [f"{name}.{point}" for name in self.norms for point in norms.AXES]
        self.lens_names |= dict(zip(inside, inside, strict=True))
        if "pos_embed" in paths:
            self.lens_names |= dict(zip(positions.POINTS, positions.POINTS, strict=True))
            self.positions = paths["pos_embed"]
        self.lens_names["hook_unembed"] = "unembed.hook_out"

    def find(self, name: str) -> HookPoint | None:
        if self.positions and name in positions.POINTS:
            return self.interior(name, self.positions, axes=RESID, note=positions.NOTE)
        norm, _, point = name.rpartition(".")
        if norm not in self.norms or point not in norms.AXES:
            return None
        return self.interior(name, self.norms[norm], axes=norms.AXES[point], note=norms.NOTES[point])

    def tap_names(self, path: str) -> dict[str, str]:
        if path == self.positions != "":
            return {name: name for name in positions.POINTS}
        name = next((name for name, where in self.norms.items() if where == path), None)
        return super().tap_names(path) if name is None else {point: f"{name}.{point}" for point in norms.AXES}

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        if path in self.norms.values():
            return norms.instrumented(submodule(self.module, path), tap)
        if path == self.positions:
            return positions.instrumented(submodule(self.module, path), tap)
        return self.instrument_mixer(path, tap)

    def instrument_mixer(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        """Swap in the instrumented forward of what mixes positions, as ``Adapter.instrument`` does."""
        return super().instrument(path, tap)

    @classmethod
    def decoder(cls, module: nn.Module) -> nn.Module:
        """The module that holds the list of blocks."""
        prefix = getattr(module, "base_model_prefix", "")
        inner = getattr(module, prefix, module) if prefix else module
        if isinstance(inner, nn.Module) and first_child(inner, cls.lists) is None:
            for name in ("language_model", "text_model", "model", "decoder"):
                found = getattr(inner, name, None)
                if isinstance(found, nn.Module) and first_child(found, cls.lists):
                    return found
        return inner if isinstance(inner, nn.Module) else module

    def embedding(self, inner: nn.Module) -> nn.Module | None:
        """The token embedding that runs; ``inner`` is the module that holds the list of blocks."""
        found: nn.Module | None = self.module.get_input_embeddings()  # type: ignore[operator]
        return found

    def main_input(self) -> str:
        """What the module calls its input: "input_ids", "pixel_values", "input_features"."""
        return str(getattr(self.module, "main_input_name", "input_ids"))

    def call(self, tokens: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        if not isinstance(tokens, Tensor):
            raise InputError(
                f"inputs must be tokens (batch, pos), text or a mapping of keywords, got a {type(tokens).__name__}"
            )
        # A key/value cache costs time and changes no logit; whoever wants one passes use_cache=True. Beside position_ids it
        # does: transformers reads them as several sequences in a row, which don't see each other, only without a cache.
        kwargs = {"use_cache": False, **extra} if self.caches and "position_ids" not in extra else dict(extra)
        if mask is not None:
            kwargs["attention_mask"] = mask
        main = self.main_input()
        if tokens.is_floating_point():
            return Call((), {"inputs_embeds" if main == "input_ids" else main: tokens, **kwargs}, None, mask)
        if main != "input_ids":
            raise InputError(
                f"this {type(self.module).__name__} takes {main}, not tokens: give floats, or a mapping of its forward's arguments"
            )
        return Call((), {"input_ids": tokens, **kwargs}, tokens, mask)

    def resid_call(self, resid: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        # Only its shape is used: the block at which the run starts gets the residual itself.
        weight: Any = self.module.get_submodule(self.parts["embed"]).weight
        blank = torch.zeros(*resid.shape[:2], weight.shape[-1], dtype=weight.dtype, device=self.device())
        return self.call(blank, mask, extra)

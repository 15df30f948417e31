"""Hugging Face decoders with attention: GPT-NeoX/Pythia, GPT-2, Llama, Qwen, Gemma and their like."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from probelens.adapters import _attention
from probelens.adapters._hf import HFAdapter, first_child, is_hf, join
from probelens.hooks import HookPoint, Tap

__all__ = ["HFTransformer"]

ATTENTION = ("attention", "attn", "self_attn", "self_attention")
MLP = ("mlp", "feed_forward", "ffn")
_UP = ("gate_proj", "dense_h_to_4h", "c_fc", "fc1", "fc_in", "up_proj", "w1")
_DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "w2")
_OUT = ("o_proj", "dense", "c_proj", "out_proj")
HEADS = ("batch", "pos", "head", "d_head")
PATTERN = ("batch", "head", "pos", "key_pos")
MLP_AXES = ("batch", "pos", "d_mlp")


class HFTransformer(HFAdapter):
    """Any transformers decoder whose blocks have an attention and an MLP.

    Args:
        module: For example a ``GPTNeoXForCausalLM``.
        tokenizer: For text inputs.
    """

    name = "hf-transformer"
    priority = 10

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        block = module.get_submodule(self.blocks[0])
        for canonical, names in (("attn", ATTENTION), ("mlp", MLP)):
            found = first_child(block, names)
            if found:
                self.segments[canonical] = found

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not is_hf(module) or not hasattr(module, "get_input_embeddings"):
            return False
        inner = cls.decoder(module)
        blocks = first_child(inner, ("layers", "h", "blocks", "decoder.layers"))
        if blocks is None:
            return False
        return all(
            first_child(block, ATTENTION) is not None and first_child(block, ("mamba", "mixer")) is None
            for block in inner.get_submodule(blocks).children()
        )

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        block = self.module.get_submodule(path)
        prefix = f"blocks.{layer}."
        points: list[HookPoint] = []
        attention = first_child(block, ATTENTION)
        mlp = first_child(block, MLP)
        # Sandwich norms (Gemma 2 and 3, OLMo 2): what joins the residual is the norm's output.
        after_mlp = first_child(block, ("post_feedforward_layernorm",))
        after_attention = "post_attention_layernorm" if after_mlp else None
        if attention is not None:
            points += self._inside_attention(prefix, join(path, attention))
            out = first_child(block.get_submodule(attention), _OUT)
            if out is not None and self.cfg.n_heads:
                points.append(
                    self.boundary(
                        prefix + "attn.hook_z", join(path, attention, out), "in", axes=HEADS, heads=self.cfg.n_heads
                    )
                )
            points.append(self.boundary(prefix + "hook_attn_out", join(path, after_attention or attention), "out"))
        middle = self._mid(block)
        if middle is not None:
            points.append(
                self.boundary(
                    prefix + "hook_resid_mid", join(path, middle), "in", carry=path,
                    note="an edit reaches the MLP and the residual stream",
                )
            )  # fmt: skip
        if mlp is not None:
            inner = block.get_submodule(mlp)
            up, down = first_child(inner, _UP), first_child(inner, _DOWN)
            if up is not None:
                points.append(self.boundary(prefix + "mlp.hook_pre", join(path, mlp, up), "out", axes=MLP_AXES))
            if up == "gate_proj" and first_child(inner, ("up_proj",)):
                points.append(
                    self.boundary(prefix + "mlp.hook_pre_linear", join(path, mlp, "up_proj"), "out", axes=MLP_AXES)
                )
            if down is not None:
                points.append(self.boundary(prefix + "mlp.hook_post", join(path, mlp, down), "in", axes=MLP_AXES))
            points.append(self.boundary(prefix + "hook_mlp_out", join(path, after_mlp or mlp), "out"))
        return points

    def _inside_attention(self, prefix: str, path: str) -> list[HookPoint]:
        # Only models that call transformers' attention interface can have their attention replaced.
        if not getattr(self.module, "_supports_attention_backend", False):
            return []
        kv = ("batch", "key_pos", "kv_head", "d_head")
        notes = {
            "hook_q": (HEADS, "after the rotary embedding"),
            "hook_k": (kv, "after the rotary embedding; heads as stored, before grouped queries share them"),
            "hook_v": (kv, "heads as stored, before grouped queries share them"),
            "hook_attn_scores": (PATTERN, "scaled and masked, before the softmax"),
            "hook_pattern": (PATTERN, "after the softmax; an edit is not normalised again"),
        }
        return [
            self.interior(f"{prefix}attn.{name}", path, axes=axes, note=note) for name, (axes, note) in notes.items()
        ]

    def instrumented_paths(self) -> list[str]:
        return list(dict.fromkeys(p.module for p in self.all_points if p.kind == "interior"))

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        module = self.module.get_submodule(path)
        return _attention.instrumented(module, getattr(module, "config", self.config), tap)

    def parallel(self, block: nn.Module) -> bool:
        """Whether attention and MLP of a block both read the residual that enters it."""
        for owner, flag in ((block, "use_parallel_residual"), (self.config, "parallel_attn")):
            if getattr(owner, flag, False):
                return True
        return self.config.model_type in ("gptj", "codegen", "phi", "cohere", "cohere2")

    def _mid(self, block: nn.Module) -> str | None:
        """The submodule whose input is the residual between attention and MLP."""
        if self.parallel(block):
            return None
        if first_child(block, ("post_feedforward_layernorm",)):
            return first_child(block, ("pre_feedforward_layernorm", "mlp"))
        return first_child(block, ("post_attention_layernorm", "ln_2"))

    def absent(self, name: str) -> str | None:
        if name.endswith("hook_resid_mid") and self.parallel(self.module.get_submodule(self.blocks[0])):
            return (
                f"blocks of this {type(self.module).__name__} are parallel (attention and MLP both read resid_pre), "
                "so no residual exists between them; use hook_resid_pre, hook_attn_out or hook_mlp_out"
            )
        return None

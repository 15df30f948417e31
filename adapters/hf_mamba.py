"""Hugging Face Mamba: residual stream and mixer of every block."""

from __future__ import annotations

from typing import Any

from torch import nn

from probelens.adapters._hf import HFAdapter, is_hf, join
from probelens.hooks import HookPoint

__all__ = ["HFMamba"]


class HFMamba(HFAdapter):
    """``MambaForCausalLM``, ``MambaModel`` and FalconMamba.

    Args:
        module: The model.
        tokenizer: For text inputs.
    """

    name = "hf-mamba"
    priority = 60
    model_types = ("mamba", "falcon_mamba")

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        self.segments["mixer"] = "mixer"
        for key in ("state_size", "conv_kernel", "intermediate_size", "time_step_rank"):
            if hasattr(self.config, key):
                self.cfg.extra[key] = getattr(self.config, key)

    @classmethod
    def matches(cls, module: Any) -> bool:
        return is_hf(module) and module.config.model_type in cls.model_types

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        prefix = f"blocks.{layer}."
        mixer = join(path, "mixer")
        return [
            self.boundary(prefix + "mixer.hook_in", mixer, "in", note="the normed residual"),
            self.boundary(prefix + "mixer.hook_out", mixer, "out", aliases=(prefix + "hook_mixer_out",)),
        ]

    def absent(self, name: str) -> str | None:
        if ".attn." in name or ".mlp." in name or name.endswith(("hook_attn_out", "hook_mlp_out", "hook_resid_mid")):
            return "a Mamba block has one mixer in place of attention and MLP; use hook_mixer_out"
        return None

"""Hugging Face Mamba and FalconMamba: the residual stream, and everything inside every mixer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from probelens.adapters.hf import mixers as _mamba
from probelens.adapters.hf.blocks import first_child, join
from probelens.adapters.hf.decoder import HFAdapter, is_hf
from probelens.hooks.forwards import submodule
from probelens.hooks.points import HookPoint
from probelens.hooks.switchboard import Tap

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["HFMamba"]


class HFMamba(HFAdapter):
    """``MambaForCausalLM``, ``MambaModel`` and FalconMamba."""

    name = "hf-mamba"
    priority = 60
    model_types: ClassVar[tuple[str, ...]] = ("mamba", "falcon_mamba")

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        self.segments["mixer"] = "mixer"
        for i, path in enumerate(self.blocks):
            block, prefix = module.get_submodule(path), f"blocks.{i}."
            inside = [f"mixer.{name}" for name, _ in block.get_submodule("mixer").named_children()]
            self._name_components(
                {prefix + name: join(path, name) for name in ("norm", *inside) if first_child(block, (name,))}
            )
            same = {"hook_mixer_in": "mixer.hook_in", "mixer.hook_ssm_out": "mixer.hook_out"}
            self.lens_names[f"{prefix}mixer.hook_x_proj"] = f"{path}.mixer.x_proj.hook_out"
            self.lens_names |= {prefix + name: prefix + own for name, own in same.items()}
        for key in ("state_size", "conv_kernel", "intermediate_size", "time_step_rank"):
            if hasattr(self.config, key):
                self.cfg.extra[key] = getattr(self.config, key)

    @classmethod
    def matches(cls, module: Any) -> bool:
        return is_hf(module) and module.config.model_type in cls.model_types

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        return _mamba.mixer_points(self, f"blocks.{layer}.", join(path, "mixer"))

    def instrumented_paths(self) -> list[str]:
        return [join(path, "mixer") for path in self.blocks]

    def faster_paths(self) -> list[str]:
        return _mamba.faster_mixers(self, self.instrumented_paths())

    def instrument_mixer(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        return _mamba.instrumented(submodule(self.module, path), tap)

    def resumer(self, model: HookedModel) -> Resumer | None:
        from probelens.adapters.hf.resume import Recurrent

        return Recurrent.of(model)

    def absent(self, name: str) -> str | None:
        if ".attn." in name or ".mlp." in name or name.endswith(("hook_attn_out", "hook_mlp_out", "hook_resid_mid")):
            return "a Mamba block has one mixer in place of attention and MLP; use hook_mixer_out"
        return None

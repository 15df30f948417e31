"""Hugging Face decoders with attention: GPT-NeoX/Pythia, GPT-2, Llama, Qwen, Gemma and their like."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from probelens.adapters.hf import attention as _attention
from probelens.adapters.hf.blocks import ATTENTION, BlockParts, first_child, head_count, join, parts_of, uses_interface
from probelens.adapters.hf.decoder import HFAdapter, is_hf
from probelens.hooks.forwards import attach_to_module, submodule
from probelens.hooks.points import HookPoint, in_block
from probelens.hooks.switchboard import Switchboard, Tap

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["HFTransformer"]

HEADS = ("batch", "pos", "head", "d_head")
KV_HEADS = ("batch", "key_pos", "kv_head", "d_head")
PATTERN = ("batch", "head", "pos", "key_pos")
MLP_AXES = ("batch", "pos", "d_mlp")
_INSIDE = {
    "hook_q": (HEADS, "after the rotary embedding"),
    "hook_k": (KV_HEADS, "after the rotary embedding; heads as stored, before grouped queries share them"),
    "hook_v": (KV_HEADS, "heads as stored, before grouped queries share them"),
    "hook_attn_scores": (PATTERN, "scaled and masked, before the softmax"),
    "hook_pattern": (PATTERN, "after the softmax; an edit is not normalised again"),
}


class HFTransformer(HFAdapter):
    """Any transformers decoder whose blocks have an attention and an MLP, such as a ``GPTNeoXForCausalLM``."""

    name = "hf-transformer"
    priority = 10

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        self.block_parts = [parts_of(module.get_submodule(path), self.config) for path in self.blocks]
        for canonical, kind in (("attn", "attention"), ("mlp", "mlp"), ("mixer", "mixer")):
            places = {i: path for i, parts in enumerate(self.block_parts) if (path := getattr(parts, kind))}
            first = next(iter(places.values()), None)
            if first is not None:
                self.segments[canonical] = first
            self.segments |= {f"{i}.{canonical}": path for i, path in places.items() if path != first}
        counts = collections.Counter(filter(None, map(self._heads, range(len(self.blocks)))))
        if counts and self.cfg.n_heads not in counts:
            # The config's number is that of another stack, or was true before heads were pruned.
            self.cfg.n_heads = counts.most_common(1)[0][0]
            self.cfg.d_head = self.cfg.d_model // self.cfg.n_heads

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not is_hf(module) or not hasattr(module, "get_input_embeddings"):
            return False
        inner = cls.decoder(module)
        blocks = first_child(inner, ("layers", "h", "blocks", "decoder.layers"))
        if blocks is None or module.config.model_type == "rwkv":
            return False
        return all(
            first_child(block, ATTENTION) is not None
            and first_child(block, ("mamba", "mixer")) is None
            and not _is_linear(block)
            for block in inner.get_submodule(blocks).children()
        )

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        prefix, parts = f"blocks.{layer}.", self.block_parts[layer]
        points = self._attention_points(layer, prefix, path, parts)
        if parts.middle is not None:
            where = join(path, parts.middle)
            note = "residual between attention and MLP; an edit reaches both the MLP and the residual stream"
            points.append(self.boundary(prefix + "hook_resid_mid", where, "in", carry=path, note=note))
        return points + self._mlp_points(prefix, path, parts)

    def _attention_points(self, layer: int, prefix: str, path: str, parts: BlockParts) -> list[HookPoint]:
        if parts.attention is None:
            return []
        attention = submodule(self.module, join(path, parts.attention))
        points = []
        if uses_interface(attention):
            points = [
                self.interior(f"{prefix}attn.{name}", join(path, parts.attention), axes=axes, note=note)
                for name, (axes, note) in _INSIDE.items()
            ]
        where, heads = join(path, parts.attn_down or ""), self._heads(layer)
        if heads and not _is_linear(submodule(self.module, path)):
            note = "values mixed by the pattern, before attention's output projection"
            points.append(self.boundary(prefix + "attn.hook_z", where, "in", axes=HEADS, heads=heads, note=note))
        if parts.attn_out is not None:
            where, scale = join(path, parts.attn_out), parts.attn_scale
            note = "what attention adds to the residual stream"
            points.append(self.boundary(prefix + "hook_attn_out", where, "out", scale=scale, note=note))
        return points

    def _heads(self, layer: int) -> int | None:
        path, parts = self.blocks[layer], self.block_parts[layer]
        if parts.attention is None or parts.attn_down is None:
            return None
        attention, down = (submodule(self.module, join(path, part)) for part in (parts.attention, parts.attn_down))
        return head_count(attention, down, self.cfg.n_heads)

    def _mlp_points(self, prefix: str, path: str, parts: BlockParts) -> list[HookPoint]:
        inner: dict[str, Any] = {"axes": MLP_AXES}
        rows: list[tuple[str, str | None, str, dict[str, Any], str]] = [
            ("mlp.hook_pre", parts.up, "out", inner, "before the activation"),
            ("mlp.hook_pre_linear", parts.up_linear, "out", inner, "what the activation's output is multiplied with"),
            ("mlp.hook_post", parts.down, "in", inner, "neurons, before the MLP's output projection"),
            (
                "hook_mlp_out",
                parts.mlp_out,
                "out",
                {"scale": parts.mlp_scale},
                "what the MLP adds to the residual stream",
            ),
        ]
        return [
            self.boundary(prefix + name, join(path, where), side, note=note, **options)
            for name, where, side, options, note in rows
            if where is not None
        ]

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        flat = ".mlp." in point.name or point.name.endswith((".hook_mlp_out", ".hook_resid_mid"))
        if point.block is not None and flat:
            # Some blocks (OPT's) and some mixtures of experts run on (batch · pos, d_model).
            return _attach_unflattened(switchboard, point, submodule(self.module, self.blocks[point.block]))
        return attach_to_module(switchboard, point)

    def instrumented_paths(self) -> list[str]:
        return list(dict.fromkeys(p.module for p in self.all_points if p.kind == "interior"))

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        module = submodule(self.module, path)
        return _attention.instrumented(module, getattr(module, "config", self.config), tap)

    def resumer(self, model: HookedModel) -> Resumer | None:
        from probelens.adapters.hf.resume import KeyValues

        return KeyValues.of(model)

    def absent(self, name: str) -> str | None:
        layer, tail = in_block(name)
        if layer is None or layer >= len(self.blocks):
            return None
        parts, last = self.block_parts[layer], tail.rsplit(".", 1)[-1]
        if last in parts.absent:
            return parts.absent[last]
        kind = type(submodule(self.module, self.blocks[layer])).__name__
        if tail.startswith("attn.") or last == "hook_attn_out":
            if parts.attention is None:
                return f"block {layer} (a {kind}) has no attention; use hook_mixer_out"
            return (
                f"the attention of block {layer} doesn't go through transformers' attention interface, "
                f"so its inside is out of reach; use hook_attn_out or '{join(self.blocks[layer], parts.attention)}.hook_in'"
            )
        if tail.startswith("mixer.") or last == "hook_mixer_out":
            if parts.mixer is None:
                return f"block {layer} (a {kind}) has attention, not a mixer; use hook_attn_out"
            inside = f"blocks.{layer}.mixer."
            if any(p.kind == "interior" and p.name.startswith(inside) for p in self.all_points):
                return None
            mixer = submodule(self.module, join(self.blocks[layer], parts.mixer))
            return (
                f"the mixer of block {layer} (a {type(mixer).__name__}) has no reference forward here, so its "
                "inside is out of reach; use hook_mixer_out"
            )
        if tail.startswith("mlp.") or last in ("hook_mlp_out", "hook_resid_mid"):
            return f"block {layer} (a {kind}) has no MLP of its own" if parts.mlp is None else None
        return None


def _is_linear(block: nn.Module) -> bool:
    kinds = (getattr(block, name, None) for name in ("block_type", "layer_type"))
    return any(kind == "linear_attention" for kind in kinds)


class _Unflattened:
    """A switchboard whose hooks see (batch, pos, ...) although the module gets (batch · pos, ...)."""

    def __init__(self, switchboard: Switchboard, shapes: dict[int, tuple[int, int]]) -> None:
        self.root = switchboard.root
        self._switchboard = switchboard
        self._shapes = shapes

    def fire(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim != 2:
            return self._switchboard.fire(name, tensor)
        seen = tensor.unflatten(0, self._shapes[threading.get_ident()])
        new = self._switchboard.fire(name, seen)
        return tensor if new is seen else new.flatten(0, 1)


def _attach_unflattened(switchboard: Switchboard, point: HookPoint, block: nn.Module) -> list[Any]:
    """Hooks that see (batch, pos, ...) also where a block flattens these two."""
    shapes: dict[int, tuple[int, int]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        shapes[threading.get_ident()] = (hidden.shape[0], hidden.shape[1])

    handle = block.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    return [handle, *attach_to_module(_Unflattened(switchboard, shapes), point)]

"""Stacks of blocks with attention and an MLP, as transformers' models have them: their hook points."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from probelens.adapters.hf import attention as _attention
from probelens.adapters.hf.blocks import (
    ATTENTION,
    BlockParts,
    first_child,
    head_count,
    is_known,
    join,
    parts_of,
    uses_interface,
    width_in,
)  # fmt: skip
from probelens.adapters.hf.components import REASONS, TURNING, of_block, queries
from probelens.adapters.hf.decoder import ENCODERS, HFAdapter, is_hf
from probelens.hooks.forwards import attach_to_module, submodule
from probelens.hooks.passes.turned import Layout
from probelens.hooks.points import HookPoint, in_block
from probelens.hooks.switchboard import Switchboard, Tap
from probelens.hooks.wrapping import unadapted

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["HFStack"]

HEADS = ("batch", "pos", "head", "d_head")
KV_HEADS = ("batch", "key_pos", "kv_head", "d_head")
PATTERN = ("batch", "head", "pos", "key_pos")
MLP_AXES = ("batch", "pos", "d_mlp")
_INSIDE = {
    "hook_q": (HEADS, "after the rotary embedding, where there is one"),
    "hook_k": (
        KV_HEADS,
        "after the rotary embedding, where there is one; heads as stored, before grouped queries share them",
    ),
    "hook_v": (KV_HEADS, "heads as stored, before grouped queries share them"),
    "hook_attn_scores": (PATTERN, "scaled and masked, before the softmax"),
    "hook_pattern": (PATTERN, "after the softmax; an edit is not normalised again"),
}


class HFStack(HFAdapter):
    """A transformers model with one list of blocks, or one that counts, whose blocks have an attention and an MLP."""

    name = "hf-transformer"
    priority = 10
    # Whether the blocks attend to an encoder's output.
    crosses: ClassVar[bool] = False

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module, tokenizer)
        self._projected: dict[str, HookPoint] = {}
        self.block_parts = [self._parts(path, self.crosses) for path in self.blocks]
        for canonical, kind in (("attn", "attention"), ("cross_attn", "cross"), ("mlp", "mlp"), ("mixer", "mixer")):
            places = {i: path for i, parts in enumerate(self.block_parts) if (path := getattr(parts, kind))}
            first = next(iter(places.values()), None)
            if first is not None:
                self.segments[canonical] = first
            self.segments |= {f"{i}.{canonical}": path for i, path in places.items() if path != first}
        pairs = list(zip(self.blocks, self.block_parts, strict=True))
        for i, (path, parts) in enumerate(pairs):
            below = of_block(module.get_submodule(path), parts)
            self._name_components({f"blocks.{i}.{name}": join(path, own) for name, own in below.items()})
            if "ln2" in below:
                self.lens_names[f"blocks.{i}.hook_mlp_in"] = join(path, below["ln2"]) + ".hook_in"
            self._name_heads(f"blocks.{i}.attn.", path, parts)
        counts = collections.Counter(
            heads for path, parts in pairs if (heads := self._heads(path, parts.attention, parts.attn_down))
        )
        if counts and self.cfg.n_heads not in counts:
            # The config's number is that of another stack, or was true before heads were pruned.
            self.cfg.n_heads = counts.most_common(1)[0][0]
            self.cfg.d_head = self.cfg.d_model // self.cfg.n_heads
        downs = (submodule(module, join(path, parts.down)) for path, parts in pairs if parts.down is not None)
        if not self.cfg.d_mlp and self.cfg.n_heads:
            self.cfg.d_mlp = next(filter(None, map(width_in, downs)), 0)

    def _name_heads(self, prefix: str, path: str, parts: BlockParts) -> None:
        """TransformerLens' names of what the projections of an attention give: an axis of heads, before any turning."""
        heads = self._heads(path, parts.attention, parts.attn_down)
        where = join(path, parts.attention or "")
        attention = submodule(self.module, where)
        if not heads or parts.attention is None or not uses_interface(attention):
            return
        self.lens_names[f"{prefix}o.hook_in"] = f"{prefix}hook_z"
        turned = first_child(self.decoder(self.module), ("rotary_emb",)) is not None
        changed = {
            "q": turned or first_child(attention, TURNING) is not None,
            "k": turned or first_child(attention, TURNING) is not None,
            "v": first_child(attention, ("v_norm",)) is not None,
        }
        for side, own in queries(attention).items():
            width = getattr(unadapted(attention.get_submodule(own)), "out_features", 0)
            d_head = getattr(unadapted(attention.get_submodule(queries(attention)["q"])), "out_features", 0) // heads
            if changed[side] and width and d_head and width % d_head == 0:
                axes = HEADS if side == "q" else KV_HEADS
                name = f"{prefix}{side}.hook_out"
                note = "before the rotary embedding and any norm"
                self._projected[name] = self.boundary(
                    name, join(where, own), "out", axes=axes, heads=width // d_head, note=note
                )
                self.lens_names[name] = name
        for side in "qkv":
            if not changed[side]:
                self.lens_names[f"{prefix}{side}.hook_out"] = f"{prefix}hook_{side}"
            elif turned and side != "v":
                self.lens_names[f"{prefix}hook_rot_{side}"] = f"{prefix}hook_{side}"

    def find(self, name: str) -> HookPoint | None:
        point = self._projected.get(name)
        return super().find(name) if point is None else point.during(ctx={})

    def _parts(self, path: str, crosses: bool) -> BlockParts:
        return parts_of(self.module.get_submodule(path), self.config, crosses)

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not is_hf(module) or not hasattr(module, "get_input_embeddings"):
            return False
        inner = cls.decoder(module)
        blocks = first_child(inner, cls.lists)
        if blocks is None or module.config.model_type == "rwkv":
            return False
        return all(
            is_known(block)
            if blocks in ENCODERS
            else first_child(block, ATTENTION) is not None
            and first_child(block, ("mamba", "mixer")) is None
            and not _is_linear(block)
            for block in inner.get_submodule(blocks).children()
        )

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        return self.points_in(f"blocks.{layer}.", path, self.block_parts[layer])

    def points_in(self, prefix: str, path: str, parts: BlockParts) -> list[HookPoint]:
        """The points inside the block at ``path``, their names behind ``prefix``."""
        points = []
        if parts.attention is not None and not _is_linear(submodule(self.module, path)):
            points += self._inside(prefix + "attn.", path, parts.attention, parts.attn_down)
        if parts.attn_out is not None:
            where, note = join(path, parts.attn_out), "what attention adds to the residual stream"
            points.append(self.boundary(prefix + "hook_attn_out", where, "out", scale=parts.attn_scale, note=note))
        if parts.cross is not None and parts.cross_out is not None:
            points += self._inside(prefix + "cross_attn.", path, parts.cross, parts.cross_down)
            where, note = join(path, parts.cross_out), "what attention to the encoder adds to the residual stream"
            points.append(self.boundary(prefix + "hook_cross_attn_out", where, "out", note=note))
        if parts.middle is not None:
            where, carry = join(path, parts.middle), path if parts.middle_beside else None
            note = "residual between attention and MLP; an edit reaches both the MLP and the residual stream"
            points.append(self.boundary(prefix + "hook_resid_mid", where, "in", carry=carry, note=note))
        if parts.middle_out is not None:
            note = "residual between attention and MLP, after the norm of their sum; an edit reaches both"
            points.append(self.boundary(prefix + "hook_resid_mid", join(path, parts.middle_out), "out", note=note))
        return points + self._mlp_points(prefix, path, parts)

    def _inside(self, prefix: str, path: str, attention: str, down: str | None) -> list[HookPoint]:
        where = join(path, attention)
        module = submodule(self.module, where)
        points, heads = [], self._heads(path, attention, down)
        if uses_interface(module):
            points = [
                self.interior(prefix + name, where, axes=axes, note=note) for name, (axes, note) in _INSIDE.items()
            ]
        elif heads and first_child(module, ("q",)) and hasattr(module, "compute_bias"):
            # T5 of older versions computes its scores itself. It has no rotary embedding to wait for.
            for name, part in (("hook_q", "q"), ("hook_k", "k"), ("hook_v", "v")):
                axes, note = _INSIDE[name]
                points.append(self.boundary(prefix + name, join(where, part), "out", axes=axes, heads=heads, note=note))
        if heads and down is not None:
            note = "values mixed by the pattern, before attention's output projection"
            points.append(self.boundary(prefix + "hook_z", join(path, down), "in", axes=HEADS, heads=heads, note=note))
        return points

    def _heads(self, path: str, attention: str | None, down: str | None) -> int | None:
        if attention is None or down is None:
            return None
        module, last = (submodule(self.module, join(path, part)) for part in (attention, down))
        return head_count(module, last, self.cfg.n_heads)

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
            switchboard.layouts[point.name] = Layout(point.axes, flat="batch", ndim=len(point.axes), declared=True)
        return attach_to_module(switchboard, point)

    def instrumented_paths(self) -> list[str]:
        return list(dict.fromkeys(p.module for p in self.all_points if p.kind == "interior"))

    def instrument_mixer(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        module = submodule(self.module, path)
        return _attention.instrumented(module, getattr(module, "config", self.config), tap)

    def resumer(self, model: HookedModel) -> Resumer | None:
        from probelens.adapters.hf.resume import KeyValues, Mixed

        return KeyValues.of(model) or Mixed.of(model)

    def unsummed(self, layer: int) -> str | None:
        return next((parts.unsummed for parts in self.block_parts[:layer] if parts.unsummed), None)

    def absent(self, name: str) -> str | None:
        layer, tail = in_block(name)
        if name.startswith("rotary_emb."):
            return REASONS["hook_cos"]
        if layer is None or layer >= len(self.blocks):
            return None
        return self.absent_in(f"blocks.{layer}.", self.blocks[layer], self.block_parts[layer], tail)

    def absent_in(self, prefix: str, path: str, parts: BlockParts, tail: str) -> str | None:
        """Why the block at ``path`` has no point of this name inside it, or None."""
        last = tail.rsplit(".", 1)[-1]
        if last in parts.absent or last in REASONS:
            return parts.absent.get(last) or REASONS[last]
        block, kind = prefix.rstrip(".").replace("blocks.", "block "), type(submodule(self.module, path)).__name__
        if tail.startswith("cross_attn.") or last == "hook_cross_attn_out":
            if parts.cross is None:
                return f"{block} (a {kind}) doesn't attend to an encoder here"
            if self._reads_inside(f"{prefix}cross_attn."):
                return None
            return self._out_of_reach(f"the cross-attention of {block}", join(path, parts.cross), "hook_cross_attn_out")
        if tail.startswith("attn.") or last == "hook_attn_out":
            if parts.attention is None:
                return f"{block} (a {kind}) has no attention; use hook_mixer_out"
            if tail.startswith(("attn.q.", "attn.k.", "attn.v.")):
                return f"what {block} makes queries, keys and values with isn't one module each; use attn.hook_q, hook_k, hook_v"
            if f"{prefix}attn.hook_pattern" in {p.name for p in self.all_points}:
                return None
            return self._out_of_reach(f"the attention of {block}", join(path, parts.attention), "hook_attn_out")
        if tail.startswith("mixer.") or last == "hook_mixer_out":
            if parts.mixer is None:
                return f"{block} (a {kind}) has attention, not a mixer; use hook_attn_out"
            mixer = submodule(self.module, join(path, parts.mixer))
            if self._reads_inside(f"{prefix}mixer."):
                own = ", ".join(
                    p.name.removeprefix(prefix) for p in self.all_points if p.name.startswith(f"{prefix}mixer.")
                )
                return f"the mixer of {block} (a {type(mixer).__name__}) has no such point; it has {own}"
            return (
                f"the mixer of {block} (a {type(mixer).__name__}) has no reference forward here, so its "
                "inside is out of reach; use hook_mixer_out"
            )
        if tail.startswith("mlp.") or last in ("hook_mlp_out", "hook_resid_mid"):
            return f"{block} (a {kind}) has no MLP of its own" if parts.mlp is None else None
        return None

    def _reads_inside(self, prefix: str) -> bool:
        return any(p.kind == "interior" and p.name.startswith(prefix) for p in self.all_points)

    def _out_of_reach(self, what: str, path: str, instead: str) -> str:
        return (
            f"{what} doesn't go through transformers' attention interface, "
            f"so its inside is out of reach; use {instead} or '{path}.hook_in'"
        )


def _is_linear(block: nn.Module) -> bool:
    kinds = (getattr(block, name, None) for name in ("block_type", "layer_type"))
    return any(kind == "linear_attention" for kind in kinds)

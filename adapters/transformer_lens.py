"""TransformerLens: a ``TransformerBridge`` stays what it is, and everything here runs on its own hook points.

Hooks go onto the bridge's own ``HookPoint`` modules and runs through its own ``run_with_hooks``. What is added
is counting: a point that TransformerLens lists but the model never reaches is an error instead of silence.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probelens.adapters.hf.stack import HEADS, KV_HEADS, MLP_AXES, PATTERN
from probelens.errors import AdapterNotFoundError, InputError, ShapeError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, ModelConfig, real_tokens
from probelens.hooks.points import RESID, HookPoint, in_block
from probelens.hooks.switchboard import Switchboard

__all__ = ["TransformerLens"]

_BEFORE = "before the rotary embedding, where the model has one; attn.hook_rot_q and hook_rot_k are after it"
_BRANCH = "an edit reaches the MLP and the residual stream; TransformerLens' own hook there only the MLP"

# Names that mean the same here and there, in the order of the forward pass.
_STREAM = ("hook_embed", "hook_pos_embed", "ln_final.hook_in", "ln_final.hook_out", "unembed.hook_in")
_AROUND = {**dict.fromkeys(_STREAM, (RESID, "")), "unembed.hook_out": (("batch", "pos", "d_vocab"), "")}
_INSIDE = {
    "hook_resid_pre": (RESID, ""),
    "mixer.hook_in": (RESID, ""),
    "mixer.hook_in_proj": (("batch", "pos", "d_in_proj"), ""),
    "mixer.hook_inner_norm": (("batch", "pos", "d_inner"), ""),
    "mixer.hook_out": (RESID, ""),
    "attn.hook_q": (HEADS, _BEFORE),
    "attn.hook_k": (KV_HEADS, _BEFORE),
    "attn.hook_v": (KV_HEADS, "heads as stored, before grouped queries share them"),
    "attn.hook_rot_q": (HEADS, "after the rotary embedding"),
    "attn.hook_rot_k": (KV_HEADS, "after the rotary embedding"),
    "attn.hook_attn_scores": (PATTERN, "scaled and masked, before the softmax"),
    "attn.hook_pattern": (PATTERN, "after the softmax; an edit is not normalised again"),
    "attn.hook_z": (HEADS, ""),
    "attn.hook_result": (("batch", "pos", "head", "d_model"), ""),
    "hook_attn_out": (RESID, ""),
    "hook_resid_mid": (RESID, _BRANCH),
    "mlp.hook_pre": (MLP_AXES, ""),
    "mlp.hook_pre_linear": (MLP_AXES, ""),
    "mlp.hook_post": (MLP_AXES, ""),
    "hook_mlp_out": (RESID, ""),
    "hook_resid_post": (RESID, ""),
}
# The same names with another meaning: other axes, or a state whose edits don't reach the next step.
_FOREIGN = ("mixer.hook_conv", "mixer.hook_ssm_dt", "mixer.hook_ssm_write", "mixer.hook_ssm_state")

_levels = itertools.count(-1, -1)


class TransformerLens(Adapter):
    """A ``TransformerBridge``: its blocks, its names, its own forward.

    Wrapping runs the bridge once, on two tokens, to see which of its hook points are reached.
    """

    name = "transformer-lens"
    tries_layout = False
    priority = 80

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        bridge: Any = module
        cfg = bridge.cfg
        blocks = getattr(bridge, "blocks", None)
        if not isinstance(blocks, nn.ModuleList) or not len(blocks):
            raise AdapterNotFoundError(
                f"this TransformerBridge ({getattr(cfg, 'architecture', '?')}) has no list 'blocks', "
                "which the layer axis needs. Wrap the Hugging Face model itself: pl.wrap(hf_model)"
            )
        self.tokenizer = bridge.tokenizer
        self.blocks = [f"blocks.{i}" for i in range(len(blocks))]
        children = dict(module.named_children())
        attention = any("attn" in dict(block.named_children()) for block in blocks)
        self.parts = {part: part for part in ("embed", "ln_final", "unembed") if part in children}
        self.cfg = ModelConfig(
            n_layers=len(blocks),
            d_model=int(cfg.d_model),
            d_vocab=int(cfg.d_vocab or 0),
            n_heads=int(cfg.n_heads or 0) if attention else 0,
            d_head=int(cfg.d_head or 0) if attention else 0,
            n_key_value_heads=cfg.n_key_value_heads,
            d_mlp=int(cfg.d_mlp or 0),
            n_ctx=int(cfg.n_ctx or 0),
            d_vocab_out=int(cfg.d_vocab_out or 0),
            model_name=str(cfg.model_name),
            architecture=self.name,
        )
        forward = inspect.signature(type(bridge.original_model).forward).parameters
        self._caches = "use_cache" in forward
        self._own: dict[str, Any] = bridge.hook_dict
        self._reached = self._trial()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a wrapped TransformerBridge can't be copied or pickled: its hook points stay tied to the bridge. Copy the "
            "Hugging Face model, make a bridge of the copy and wrap that"
        )

    @classmethod
    def matches(cls, module: Any) -> bool:
        return isinstance(module, nn.Module) and any(
            c.__name__ == "TransformerBridge" and c.__module__.startswith("transformer_lens.")
            for c in type(module).__mro__
        )

    @classmethod
    def adapt(cls, module: Any, **options: Any) -> Adapter:
        if not cls.matches(module):
            raise AdapterNotFoundError(
                f"adapter 'transformer-lens' wraps a TransformerBridge, not a {type(module).__name__}"
            )
        return cls(module, **options)

    # -- hook points ---------------------------------------------------------------------------------

    def points(self) -> list[HookPoint]:
        names = [name for name in _AROUND if name.startswith("hook_")]
        inside = [f"{path}.{name}" for path in self.blocks for name in _INSIDE]
        names += [*inside, *(name for name in _AROUND if not name.startswith("hook_"))]
        return [self._point(name) for name in names if name in self._own and id(self._own[name]) in self._reached]

    def _point(self, name: str) -> HookPoint:
        own = self._own[name]
        axes, note = _AROUND[name] if name in _AROUND else _INSIDE[in_block(name)[1]]
        # TransformerLens' second name for resid_mid is the norm's input, whose edits don't reach the residual.
        others = [n for n, p in self._own.items() if p is own and n != name]
        aliases = () if name.endswith("hook_resid_mid") else tuple(others)
        return HookPoint(name, "boundary", axes, own.name or name, aliases, note=note)

    def find(self, name: str) -> HookPoint | None:
        tail = in_block(name)[1]
        if name not in self._own or tail in _FOREIGN or tail in _INSIDE or tail in _AROUND:
            return None
        return HookPoint(name, "boundary", (), self._own[name].name or name, note="TransformerLens' own point")

    def absent(self, name: str) -> str | None:
        if name.endswith(_FOREIGN):
            return (
                "TransformerLens' point of this name is something else (another layout, or never reached, or a state "
                "whose edits don't reach the next step). Wrap the Hugging Face model itself: pl.wrap(hf_model), or "
                "use the bridge's own run_with_hooks"
            )
        if ".mixer.hook_" in name and name not in self._own:
            return "TransformerLens has no such point; wrap the Hugging Face model itself: pl.wrap(hf_model)"
        if name in self._own:
            return (
                "TransformerLens lists it, but a trial run never reached it: it is off (bridge.set_use_...) "
                "or the model doesn't call that module"
            )
        return None

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        own = self._own[point.name]
        try:
            self.module.check_hooks_to_add(own, point.name, switchboard.fire)  # type: ignore[operator]
        except ValueError as err:
            raise InputError(f"hook point {point.name!r}: {err}") from err
        moved: dict[int, Tensor] = {}
        middle = point.name.endswith("hook_resid_mid")

        def fire(tensor: Any, hook: Any) -> Tensor | None:
            if not switchboard.listeners(point.name):
                return None
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise ShapeError(f"hook point {point.name!r} holds a {kind}, and hooks see tensors only")
            # What an interrupted forward left here must not reach the next one.
            moved.pop(threading.get_ident(), None)
            new = switchboard.fire(point.name, tensor)
            if new is tensor:
                return None
            if middle:
                moved[threading.get_ident()] = new - tensor
            return new

        def carry(tensor: Tensor, hook: Any) -> Tensor | None:
            delta = moved.pop(threading.get_ident(), None)
            return None if delta is None else tensor + delta

        handles = [_Handle(own, fire)]
        if middle:
            # Before the hooks of hook_resid_post, which must see the moved output.
            block = self._own[point.name.replace("hook_resid_mid", "hook_resid_post")]
            handles.append(_Handle(block, carry, first=True))
        return handles

    # -- running ---------------------------------------------------------------------------------------

    def modules(self) -> list[nn.Module]:
        # The bridge keeps the original model beside its tree of modules, with a training flag of its own.
        return [*self.module.modules(), *self.module.original_model.modules()]  # type: ignore[union-attr]

    def tokenize(self, texts: list[str], prepend_bos: bool | None) -> tuple[Tensor, Tensor | None]:
        # TransformerLens puts BOS in front by default.
        tokens = self.module.to_tokens(texts, prepend_bos=prepend_bos)  # type: ignore[operator]
        rows = [self.module.to_tokens(t, prepend_bos=prepend_bos).shape[1] for t in texts]  # type: ignore[operator]
        width = tokens.shape[1]
        if not width:
            raise InputError(f"the text {texts!r} gives no tokens")
        if min(rows) == width:
            return tokens, None
        return tokens, real_tokens(tokens, rows, getattr(self.tokenizer, "padding_side", "right") == "left")

    def call(self, tokens: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        if self._caches:
            extra = {"use_cache": False, **extra}
        return super().call(tokens, mask, extra)

    def run(self, call: Call) -> Any:
        kwargs = dict(call.kwargs)
        args = call.args or (kwargs.pop("input_ids"),)
        return self.module.run_with_hooks(*args, fwd_hooks=[], **kwargs)  # type: ignore[operator]

    def _trial(self) -> set[int]:
        """The hook points that a run reaches with a tensor of floats, by identity."""
        reached: set[int] = set()
        own = {id(p): p for p in self._own.values()}
        call = self.call(torch.zeros(1, 2, dtype=torch.long, device=self.device()), None, {})
        with contextlib.ExitStack() as stack:
            for point in own.values():
                stack.enter_context(_only(point, reached))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.evaluating())
            try:
                self.run(call)
            except Exception as err:
                raise AdapterNotFoundError(
                    f"this TransformerBridge doesn't run on tokens ({type(err).__name__}: {err}). "
                    "Only bridges of decoders can be wrapped"
                ) from err
        return reached


class _Handle:
    """One function on one of TransformerLens' hook points, under a level that only it has."""

    def __init__(self, point: Any, fn: Callable[..., Any], first: bool = False) -> None:
        self._point, self._level = point, next(_levels)
        point.add_hook(fn, level=self._level, prepend=first)

    def remove(self) -> None:
        self._point.remove_hooks("fwd", level=self._level)


@contextlib.contextmanager
def _only(point: nn.Module, reached: set[int]) -> Iterator[None]:
    # Hooks that the caller left there must not see the trial run.
    before = point._forward_hooks
    point._forward_hooks = OrderedDict()
    handle = point.register_forward_hook(
        lambda m, args, out: reached.add(id(point)) if isinstance(out, Tensor) and out.is_floating_point() else None
    )
    try:
        with handle:
            yield
    finally:
        point._forward_hooks = before

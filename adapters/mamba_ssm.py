"""The mamba-ssm package's own ``MambaLMHeadModel``, on any device, and checkpoints in its format.

Its blocks return (output of the mixer, residual) and leave the sum to the next block's norm; its kernels
need CUDA. Here ``resid_pre`` and ``resid_post`` are the residual stream itself, and where the kernels
can't run the reference forwards of ``probelens.kernels.ssm`` do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probelens.adapters.hf import mixers as _mamba
from probelens.adapters.hf.blocks import join
from probelens.adapters.mamba_ssm_files import load as load_checkpoint
from probelens.errors import InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import ModelConfig, StopForward
from probelens.hooks.forwards import device_of, refuse_replaced_forward, submodule, swapped_forward, this_thread
from probelens.hooks.points import RESID, HookPoint
from probelens.hooks.switchboard import Switchboard, Tap
from probelens.kernels.ssm import is_mamba2, mamba2_mixer, mamba_mixer

__all__ = ["MambaSSM", "load_checkpoint"]


class MambaSSM(Adapter):
    """``mamba_ssm.MambaLMHeadModel`` or its backbone, with Mamba, Mamba-2 or attention, with or without MLPs."""

    name = "mamba-ssm"
    priority = 60
    options = ("tokenizer",)

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        super().__init__(module)
        self.tokenizer = tokenizer
        self.backbone = "backbone" if hasattr(module, "backbone") else ""
        inner: Any = module.get_submodule(self.backbone)
        self.fused = bool(inner.fused_add_norm)
        self.blocks = [join(self.backbone, "layers", str(i)) for i in range(len(inner.layers))]
        self.parts = {"embed": join(self.backbone, "embedding"), "ln_final": join(self.backbone, "norm_f")}
        if hasattr(module, "lm_head"):
            self.parts["unembed"] = "lm_head"
        self.segments = {"mixer": "mixer", "attn": "mixer", "mlp": "mlp"}
        vocab, width = inner.embedding.weight.shape
        self.cfg = ModelConfig(
            n_layers=len(self.blocks),
            d_model=width,
            d_vocab=vocab,
            d_vocab_out=vocab if "unembed" in self.parts else 0,
            model_name=type(module).__name__,
            architecture=self.name,
            extra={k: v for k in ("d_state", "d_conv", "expand") if (v := getattr(inner.layers[0].mixer, k, None))},
        )

    @classmethod
    def matches(cls, module: Any) -> bool:
        names = ("MambaLMHeadModel", "MixerModel")
        return any(k.__name__ in names and k.__module__.startswith("mamba_ssm.") for k in type(module).__mro__)

    # -- hook points -------------------------------------------------------------------------------------

    def points(self) -> list[HookPoint]:
        points = super().points()
        if self.fused:
            # The fused final norm is a function of norm_f's weights, so the points stand in the backbone.
            for i, point in enumerate(points):
                if point.name.startswith("ln_final."):
                    points[i] = self.interior(point.name, self.backbone, axes=point.axes, note=point.note)
        return points

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        prefix, mixer = f"blocks.{layer}.", join(path, "mixer")
        block: Any = submodule(self.module, path)
        points: list[HookPoint] = []
        if hasattr(block.mixer, "A_log"):
            points += _mamba.mixer_points(self, prefix, mixer)
        else:
            aliases = (prefix + "hook_mixer_out", prefix + "mixer.hook_out")
            note = "what attention adds to the residual stream"
            points.append(self.boundary(prefix + "hook_attn_out", mixer, "out", aliases=aliases, note=note))
        if block.mlp is not None:
            note = "residual between mixer and MLP; an edit reaches both the MLP and the residual stream"
            points.append(self.interior(prefix + "hook_resid_mid", path, axes=RESID, note=note))
            note = "neurons, before the MLP's output projection"
            axes = ("batch", "pos", "d_mlp")
            points.append(self.boundary(prefix + "mlp.hook_post", join(path, "mlp.fc2"), "in", axes=axes, note=note))
            note = "what the MLP adds to the residual stream"
            points.append(self.boundary(prefix + "hook_mlp_out", join(path, "mlp"), "out", note=note))
        return points

    def absent(self, name: str) -> str | None:
        if name.endswith((".hook_attn_out", ".hook_mlp_out", ".hook_resid_mid")) or ".attn." in name or ".mlp." in name:
            return "this block has no such part; use hook_mixer_out"
        return None

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        if not point.name.endswith((".hook_resid_pre", ".hook_resid_post")):
            return super().attach(switchboard, point)
        block = submodule(self.module, point.module)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            if kwargs is None or not switchboard.listeners(point.name):
                return None
            hidden, residual, rest = _inputs(args, kwargs)
            seen = _sum(hidden, residual)
            new = switchboard.fire(point.name, seen)
            return None if new is seen else (_pair(hidden, residual, new), rest)

        def after(module: nn.Module, args: Any, *given: Any) -> Any:
            if not switchboard.listeners(point.name):
                return None
            hidden, residual = given[-1]
            seen = _sum(hidden, residual)
            new = switchboard.fire(point.name, seen)
            return None if new is seen else _pair(hidden, residual, new)

        if point.name.endswith("_pre"):
            return [block.register_forward_pre_hook(before, with_kwargs=True)]
        return [block.register_forward_hook(after, with_kwargs=True)]

    # -- reference forwards --------------------------------------------------------------------------------

    def required_paths(self) -> list[str]:
        # The package's kernels need a GPU.
        return self.instrumented_paths() if self.device().type == "cpu" else []

    def instrumented_paths(self) -> list[str]:
        mixers = [join(path, "mixer") for path in self.blocks]
        return [self.backbone, *self.blocks, *(m for m in mixers if hasattr(submodule(self.module, m), "A_log"))]

    @contextlib.contextmanager
    def instrument(self, path: str, tap: Tap) -> Iterator[None]:
        module: Any = submodule(self.module, path)
        norms: list[Any] = []
        forward: Callable[..., Any]
        with contextlib.ExitStack() as stack:
            if path == self.backbone:
                norms, forward = [module.norm_f], _backbone_forward(module, tap)
            elif path in self.blocks:
                norms, forward = [module.norm, getattr(module, "norm2", None)], _block_forward(module, tap)
            else:
                refuse_replaced_forward(module, ("mamba_ssm",))
                forward = _mixer_forward(module, tap)
            for norm in norms:
                if norm is not None:
                    stack.enter_context(swapped_forward(norm, _norm_forward(norm, self.fused), here=tap.here))
            stack.enter_context(swapped_forward(module, forward, here=tap.here))
            yield

    # -- starting and stopping at a block --------------------------------------------------------------------

    @contextlib.contextmanager
    def stopping_at(self, layer: int) -> Iterator[None]:
        thread = threading.get_ident()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
            if threading.get_ident() == thread:
                raise StopForward(_sum(*_inputs(args, kwargs)[:2]))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                raise StopForward(_sum(*output))

        block = submodule(self.module, self.blocks[min(layer, len(self.blocks) - 1)])
        if layer < len(self.blocks):
            handle = block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        else:
            handle = block.register_forward_hook(after)
        with handle:
            yield

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        thread = threading.get_ident()
        if layer < len(self.blocks):
            resid = resid.to(device_of(submodule(self.module, self.blocks[layer])) or resid.device)

        def passing(index: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, residual: Tensor | None = None, **kw: Any) -> Any:
                return (torch.zeros_like(hidden), resid) if index == len(self.blocks) - 1 else (hidden, residual)

            return forward

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
            if threading.get_ident() != thread:
                return None
            hidden, _, rest = _inputs(args, kwargs)
            # The first block gets its residual as its input, every other one beside it.
            return _pair(hidden, resid if layer else None, resid), rest

        with contextlib.ExitStack() as stack:
            for index, skipped in enumerate(self.blocks[:layer]):
                block = submodule(self.module, skipped)
                stack.enter_context(swapped_forward(block, passing(index), here=this_thread()))
            if layer < len(self.blocks):
                block = submodule(self.module, self.blocks[layer])
                stack.enter_context(block.register_forward_pre_hook(feed, with_kwargs=True, prepend=True))
            yield


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """What a block was called with: hidden states, residual, and the rest."""
    rest = dict(kwargs)
    hidden = args[0] if args else rest.pop("hidden_states")
    residual = args[1] if len(args) > 1 else rest.pop("residual", None)
    return hidden, residual, rest


def _sum(hidden: Tensor, residual: Tensor | None) -> Tensor:
    return hidden if residual is None else hidden + residual


def _pair(hidden: Tensor, residual: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor | None]:
    """Hidden states and residual whose sum is ``new``, exactly, of the dtypes that the block expects."""
    if residual is None:
        return new.to(hidden.dtype), None
    return torch.zeros_like(hidden), new


def _norm_forward(norm: Any, fused: bool) -> Callable[..., Tensor]:
    # The package's RMSNorm is a Triton kernel. Unfused, it casts the residual down before the norm.
    def forward(x: Tensor) -> Tensor:
        dtype = x.dtype
        if not fused:
            x = x.to(norm.weight.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = norm.weight.to(wide), None if norm.bias is None else norm.bias.to(wide)
        x = x.to(wide)
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps).to(dtype)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight
        return (x if bias is None else x + bias).to(dtype)

    return forward


def _backbone_forward(backbone: Any, tap: Tap) -> Callable[..., Tensor]:
    def forward(input_ids: Tensor, inference_params: Any = None, **kw: Any) -> Tensor:
        hidden, residual = backbone.embedding(input_ids), None
        for layer in backbone.layers:
            hidden, residual = layer(hidden, residual, inference_params=inference_params, **kw)
        resid = tap("hook_in", _sum(hidden, residual))
        return tap("hook_out", backbone.norm_f(resid).to(hidden.dtype))

    return forward


def _block_forward(block: Any, tap: Tap) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(
        hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None, **kw: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = hidden_states.dtype
        resid = _sum(hidden_states, residual)
        out = block.mixer(block.norm(resid).to(dtype), inference_params=inference_params, **kw)
        resid = resid.float() if block.residual_in_fp32 else resid
        if block.mlp is not None:
            resid = tap("hook_resid_mid", out + resid)
            out = block.mlp(block.norm2(resid).to(dtype))
        return out, resid

    return forward


def _mixer_forward(mixer: Any, tap: Tap) -> Callable[..., Tensor]:
    run = mamba2_mixer if is_mamba2(mixer) else mamba_mixer

    def forward(hidden_states: Tensor, inference_params: Any = None, **kw: Any) -> Tensor:
        packed = [name for name, value in kw.items() if value is not None]
        if packed:
            raise InputError(
                f"the reference forward of {type(mixer).__name__} takes (batch, pos, d_model) without {packed[0]}: "
                "packed sequences need the CUDA kernels, and no hook inside a mixer"
            )
        if inference_params is None:
            return run(mixer, hidden_states, tap)
        conv, ssm = mixer._get_states_from_cache(inference_params, hidden_states.shape[0])
        offset = inference_params.seqlen_offset
        before = {"conv_state": conv, "ssm_state": ssm} if offset else {}
        out, state = run(mixer, hidden_states, tap, return_state=True, offset=offset, **before)
        conv.copy_(state.conv)
        ssm.copy_(state.ssm)
        return out

    return forward

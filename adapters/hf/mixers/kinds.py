"""What transformers' recurrent mixers have in common: their points, and the instrumented forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from probelens.adapters.hf.mixers import carried
from probelens.errors import InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.forwards import device_of, refuse_replaced_forward, replaced_forward, submodule, swapped_forward
from probelens.hooks.points import HookPoint
from probelens.hooks.switchboard import Tap
from probelens.hooks.trials import agree, remembered
from probelens.kernels.delta import DELTA_POINTS, delta_mixer
from probelens.kernels.rg_lru import RG_LRU_POINTS, rg_lru_mixer
from probelens.kernels.short_conv import SHORT_CONV_POINTS, short_conv_mixer
from probelens.kernels.ssm import MAMBA2_POINTS, MAMBA_POINTS, inner_norm, is_mamba2, mamba2_mixer, mamba_mixer
from probelens.kernels.tap import KernelPoint
from probelens.kernels.wkv import WKV_POINTS, wkv_mixer

# Whose classes the reference forward is equal to.
PACKAGES = ("transformers", "mamba_ssm")
METHODS = ("forward", "slow_forward", "cuda_kernels_forward")


@dataclass(frozen=True)
class Kind:
    """A sort of mixer, and the reference forward that stands for its own.

    Args:
        points: What the reference forward offers.
        run: The reference forward: ``run(mixer, hidden, tap, ...)``.
        reads: The module whose weight says how wide the input is.
        forward: Makes of ``run`` a forward that takes what the mixer's own takes.
        own: Calls the mixer's own forward on an input alone, for a trial.
        computes: Modules inside that the reference forward doesn't call, and the point that shows what they give.
    """

    points: Mapping[str, KernelPoint]
    run: Callable[..., Any]
    reads: str = "in_proj"
    forward: Callable[..., Callable[..., Any]] = carried.with_cache
    own: Callable[[Any, Tensor], Any] = lambda mixer, x: type(mixer).forward(mixer, x)
    computes: Mapping[str, str] = field(default_factory=dict)


_INNER = {"norm": "hook_inner_norm", "act": "hook_conv"}
_MAMBA = Kind(MAMBA_POINTS, mamba_mixer, computes=_INNER)
_MAMBA2 = Kind(MAMBA2_POINTS, mamba2_mixer, computes=_INNER)
_SHORT_CONV = Kind(SHORT_CONV_POINTS, short_conv_mixer, computes={"conv": "hook_conv"})
_RG_LRU = Kind(
    RG_LRU_POINTS, rg_lru_mixer, "linear_x", carried.with_state_on_module, carried.own_with_state,
    {"rg_lru": "hook_lru_state", "conv_1d": "hook_conv"},
)  # fmt: skip
_DELTA = Kind(DELTA_POINTS, delta_mixer, "in_proj_qkvz", computes={"norm": "hook_inner_norm", "conv1d": "hook_conv"})
_WKV = Kind(WKV_POINTS, wkv_mixer, "key", carried.with_given_state)
# Mixers that compute what a kernel computes, so that their inside is in reach; the first two kinds are told apart later.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _MAMBA),
    **dict.fromkeys(
        (
            "Mamba2Mixer", "BambaMixer", "Zamba2MambaMixer", "NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer",
            "FalconH1Mixer",
        ), _MAMBA2,
    ),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _SHORT_CONV),
    "RecurrentGemmaRecurrentBlock": _RG_LRU,
    "Qwen3NextGatedDeltaNet": _DELTA,
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), replace(_DELTA, reads="in_proj_qkv")),
    "RwkvSelfAttention": _WKV,
}  # fmt: skip
# Before transformers 5.15 these two sum the states of their chunks along the wrong axis on the CPU, so that
# no correct forward equals theirs; they lost the method named torch_forward when that was mended.
_MENDED = ("Zamba2MambaMixer", "NemotronHMamba2Mixer")


def has_inside(mixer: nn.Module) -> bool:
    """Whether a mixer is of a class that a reference forward here computes."""
    kind = type(mixer).__name__
    return kind in _KINDS and not (kind in _MENDED and hasattr(mixer, "torch_forward"))


def kind_of(mixer: nn.Module) -> Kind:
    """The kind of a mixer that has an inside; of classes not known by name, which state space model it is."""
    found = _KINDS.get(type(mixer).__name__)
    return found if found is not None else _MAMBA2 if is_mamba2(mixer) else _MAMBA


def mixer_points(adapter: Adapter, prefix: str, path: str, scale: float = 1.0) -> list[HookPoint]:
    """The points of the mixer at ``path``: its input and output, the latter times ``scale``, and everything between."""
    mixer = submodule(adapter.module, path)
    kind = kind_of(mixer)
    out = []
    for name, point in kind.points.items():
        full, side = f"{prefix}mixer.{name}", name.removeprefix("hook_")
        if name == "hook_inner_norm" and inner_norm(mixer) is None:
            continue
        if side == "out":
            alias = (f"{prefix}hook_mixer_out",)
            out.append(adapter.boundary(full, path, side, axes=point.axes, aliases=alias, scale=scale, note=point.note))
        elif side == "in":
            out.append(adapter.boundary(full, path, side, axes=point.axes, note=point.note))
        else:
            out.append(adapter.interior(full, path, axes=point.axes, step=point.step, note=point.note))
    return out


def faster_mixers(adapter: Adapter, paths: list[str]) -> list[str]:
    """Of these mixers, those that the reference forward runs faster: Mamba's on a CPU, where there are no kernels."""
    return [
        path for path in paths
        if device_of(mixer := submodule(adapter.module, path)) == torch.device("cpu")
        and kind_of(mixer) in (_MAMBA, _MAMBA2)
        and replaced_forward(mixer, PACKAGES, METHODS) is None
    ]  # fmt: skip


def instrumented(mixer: nn.Module, tap: Tap) -> contextlib.AbstractContextManager[None]:
    """Run the reference forward of a mixer, with ``tap``, while the context lasts.

    A mixer whose forward is not its class's own or gives other numbers is an InputError, and so is a PyTorch hook on a
    module that the reference forward computes itself.
    """
    refuse_replaced_forward(mixer, PACKAGES, METHODS)
    kind = kind_of(mixer)
    for name, point in kind.computes.items():
        inner = getattr(mixer, name, None)
        if isinstance(inner, nn.Module) and (inner._forward_hooks or inner._forward_pre_hooks):
            raise InputError(
                f"a PyTorch hook stands on {name!r} inside a {type(mixer).__name__}, and what lies inside the mixer is read "
                f"from a forward that doesn't call that module. Remove the hook, or read and edit at mixer.{point} instead"
            )
    if not remembered(mixer, mixer, "reference forward", lambda: _reference_agrees(mixer)):
        raise InputError(
            f"what lies inside a {type(mixer).__name__} is read from a reference forward, which gives other numbers than "
            "the mixer's own on a trial: something in it was exchanged. Stay at the points around it"
        )
    return swapped_forward(mixer, kind.forward(kind.run, mixer, tap), here=tap.here)


def _reference_agrees(mixer: Any) -> bool:
    """Whether a mixer's own forward gives what the reference gives; True, too, where it can't be tried by itself."""
    weight = next(mixer.parameters(), None)
    if weight is None or weight.is_meta or hasattr(mixer, "_hf_hook"):
        return True
    kind = kind_of(mixer)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        try:
            width = mixer.get_submodule(kind.reads).weight.shape[-1]
            x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
            own = kind.own(mixer, x)
        except Exception:  # kernels that aren't here, or arguments that only the model has
            return True
        found = kind.run(mixer, x)
    own = own[0] if isinstance(own, tuple) else own
    return agree(found, own, weight.dtype)

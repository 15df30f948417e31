"""What transformers' Mamba and Mamba-2 mixers have in common: their points, and the instrumented forward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.forwards import device_of, refuse_replaced_forward, replaced_forward, submodule, swapped_forward
from probelens.hooks.points import HookPoint
from probelens.hooks.switchboard import Tap
from probelens.hooks.trials import agree, remembered
from probelens.kernels.ssm import (
    MAMBA2_POINTS,
    MAMBA_POINTS,
    MambaState,
    inner_norm,
    is_mamba2,
    mamba2_mixer,
    mamba_mixer,
)

# Whose classes the reference forward is equal to.
PACKAGES = ("transformers", "mamba_ssm")
METHODS = ("forward", "slow_forward", "cuda_kernels_forward")

# Positions that each layer of a cache went through while instrumented.
_SEEN: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def mixer_points(adapter: Adapter, prefix: str, path: str, scale: float = 1.0) -> list[HookPoint]:
    """The points of the mixer at ``path``: its input and output, the latter times ``scale``, and everything between."""
    mixer = submodule(adapter.module, path)
    out = []
    for name, point in (MAMBA2_POINTS if is_mamba2(mixer) else MAMBA_POINTS).items():
        full, side = f"{prefix}mixer.{name}", name.removeprefix("hook_")
        if name == "hook_inner_norm" and inner_norm(mixer) is None:
            continue
        if side in ("in", "out"):
            more = {"aliases": (f"{prefix}hook_mixer_out",), "scale": scale} if side == "out" else {}
            out.append(adapter.boundary(full, path, side, axes=point.axes, note=point.note, **more))
        else:
            out.append(adapter.interior(full, path, axes=point.axes, step=point.step, note=point.note))
    return out


def faster_mixers(adapter: Adapter, paths: list[str]) -> list[str]:
    """Of these mixers, those that the reference forward runs faster: all on a CPU, where there are no kernels."""
    return [
        path for path in paths
        if device_of(submodule(adapter.module, path)) == torch.device("cpu")
        and replaced_forward(submodule(adapter.module, path), PACKAGES, METHODS) is None
    ]  # fmt: skip


def instrumented(mixer: nn.Module, tap: Tap) -> contextlib.AbstractContextManager[None]:
    """Run the reference forward of a mixer, with ``tap``, while the context lasts.

    A mixer whose forward is not its class's own or gives other numbers is an InputError, and so is a PyTorch hook on a
    module that the reference forward computes itself.
    """
    refuse_replaced_forward(mixer, PACKAGES, METHODS)
    for name in ("norm", "act"):
        inner = getattr(mixer, name, None)
        if isinstance(inner, nn.Module) and (inner._forward_hooks or inner._forward_pre_hooks):
            raise InputError(
                f"a PyTorch hook stands on {name!r} inside a {type(mixer).__name__}, and what lies inside the mixer is read "
                "from a forward that doesn't call that module. Remove the hook, or read and edit at "
                f"{'mixer.hook_inner_norm' if name == 'norm' else 'mixer.hook_conv'} instead"
            )
    if not remembered(mixer, mixer, "reference forward", lambda: _reference_agrees(mixer)):
        raise InputError(
            f"what lies inside a {type(mixer).__name__} is read from a reference forward, which gives other numbers than "
            "the mixer's own on a trial: something in it was exchanged. Stay at the points around it"
        )
    return swapped_forward(mixer, _forward(mixer, tap), here=tap.here)


def _reference_agrees(mixer: Any) -> bool:
    """Whether a mixer's own forward gives what the reference gives; True, too, where it can't be tried by itself."""
    weight = next(mixer.parameters(), None)
    if weight is None or weight.is_meta or hasattr(mixer, "_hf_hook"):
        return True
    run = mamba2_mixer if is_mamba2(mixer) else mamba_mixer
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        try:
            x = torch.randn(2, 5, mixer.in_proj.weight.shape[-1], generator=torch.Generator().manual_seed(0))
            x = x.to(weight.device, weight.dtype)
            own = type(mixer).forward(mixer, x)
            found = run(mixer, x)
        except Exception:  # kernels that aren't here, or arguments that only the model has
            return True
    own = own[0] if isinstance(own, tuple) else own
    return agree(found, own, weight.dtype)


def _forward(mixer: nn.Module, tap: Tap) -> Callable[..., Tensor]:
    run = mamba2_mixer if is_mamba2(mixer) else mamba_mixer

    def forward(
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        cache = cache if cache is not None else cache_params
        if attention_mask is not None and attention_mask.shape[:2] != hidden_states.shape[:2]:
            # While decoding, transformers may pass the mask of everything so far to a step of one token.
            attention_mask = None
        if cache is None:
            return run(mixer, hidden_states, tap, attention_mask=attention_mask)
        layer: Any = mixer.layer_idx
        conv, ssm = _read(cache, layer)
        # The cache doesn't say how many positions it has seen, and hooks want to know which one this is.
        seen = _SEEN.setdefault(cache, {})
        offset = seen.get(layer, 0) if conv is not None else 0
        out, state = run(
            mixer,
            hidden_states,
            tap,
            conv_state=conv,
            ssm_state=ssm,
            attention_mask=attention_mask,
            return_state=True,
            offset=offset,
        )
        seen[layer] = offset + hidden_states.shape[1]
        _write(cache, layer, state)
        return out

    return forward


def _first(value: Any) -> Any:
    # Newer versions of transformers keep the states of a layer in a mapping (or list), older ones just one state.
    return value[0] if isinstance(value, (dict, list)) else value


def _read(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    if getattr(cache, "is_recording_past", lambda i: False)(layer):
        raise InputError("interior hooks don't work with a cache that records its past. Generate without assistance.")
    held = cache.layers[layer]
    if not _first(held.has_previous_state):
        return None, None
    return _first(held.conv_states), _first(held.recurrent_states)


def _write(cache: Any, layer: int, state: MambaState) -> None:
    held = cache.layers[layer]
    if _first(held.has_previous_state):
        _first(held.conv_states).copy_(state.conv)
    else:
        cache.update_conv_state(state.conv, layer, conv_kernel_size=state.conv.shape[-1])
    cache.update_recurrent_state(state.ssm, layer)

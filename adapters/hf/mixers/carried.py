"""Reference forwards of mixers in the place of transformers' own, with what each carries from one call to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.switchboard import Tap

# What says that a row holds several sequences behind one another, which a reference forward doesn't keep apart.
_PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
# Positions that each layer of a cache went through while instrumented.
_SEEN: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def with_cache(run: Callable[..., Any], mixer: nn.Module, tap: Tap) -> Callable[..., Tensor]:
    """For mixers that keep a convolution's tail and a state, if any, in a layer of transformers' cache."""

    def forward(
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        _refuse_packed(mixer, kwargs)
        cache = next((one for one in (cache, cache_params, past_key_values) if one is not None), None)
        if attention_mask is not None and attention_mask.shape[:2] != hidden_states.shape[:2]:
            # While decoding, transformers may pass the mask of everything so far to a step of one token.
            attention_mask = None
        if cache is None:
            return run(mixer, hidden_states, tap, attention_mask=attention_mask)
        layer: Any = mixer.layer_idx
        carried = _read(cache, layer)
        # The cache doesn't say how many positions it has seen, and hooks want to know which one this is.
        seen = _SEEN.setdefault(cache, {})
        offset = seen.get(layer, 0) if carried else 0
        out, after = run(
            mixer, hidden_states, tap, attention_mask=attention_mask, return_state=True, offset=offset, **carried
        )
        seen[layer] = offset + hidden_states.shape[1]
        _write(cache, layer, *after)
        return out

    return forward


def _refuse_packed(mixer: nn.Module, kwargs: dict[str, Any]) -> None:
    packed = [name for name in _PACKED if kwargs.get(name) is not None]
    if packed:
        raise InputError(
            f"{', '.join(packed)} packs several sequences into one row, and what lies inside a {type(mixer).__name__} is read "
            "from a forward that would run them as one. Give each sequence a row, with padding and an attention_mask"
        )


def _first(value: Any) -> Any:
    # Newer versions of transformers keep the states of a layer in a mapping (or list), older ones just one state.
    return value[0] if isinstance(value, (dict, list)) else value


def _read(cache: Any, layer: int) -> dict[str, Tensor]:
    """What a layer of the cache holds, by the names of a reference forward's arguments; nothing before its first call."""
    if getattr(cache, "is_recording_past", lambda i: False)(layer):
        raise InputError("interior hooks don't work with a cache that records its past. Generate without assistance.")
    held = cache.layers[layer]
    if not _first(held.has_previous_state):
        return {}
    found = {"conv_state": _first(held.conv_states), "ssm_state": _first(held.recurrent_states)}
    return {name: value for name, value in found.items() if value is not None}


def _write(cache: Any, layer: int, conv: Tensor, state: Tensor | None) -> None:
    held = cache.layers[layer]
    if _first(held.has_previous_state):
        _first(held.conv_states).copy_(conv)
    else:
        cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
    if state is not None:
        cache.update_recurrent_state(state, layer)

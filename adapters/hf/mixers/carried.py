"""Reference forwards of mixers in the place of transformers' own, with what each carries from one call to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from probelens.errors import InputError
from probelens.hooks.switchboard import Tap

# What says that a row holds several sequences behind one another, which a reference forward doesn't keep apart.
_PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
_STATES = ("hook_ssm_state", "hook_delta_state", "hook_wkv_state")
# Positions that each layer of a cache went through while instrumented.
_SEEN: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
_SEEN_STATES: MutableMapping[Tensor, dict[int, int]] = WeakTensorKeyDictionary()


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
        offset = _offset(mixer, tap, seen.get(layer)) if carried else 0
        out, after = run(
            mixer, hidden_states, tap, attention_mask=attention_mask, return_state=True, offset=offset, **carried
        )
        seen[layer] = offset + hidden_states.shape[1]
        _write(cache, layer, *after)
        return out

    return forward


def with_state_on_module(run: Callable[..., Any], mixer: nn.Module, tap: Tap) -> Callable[..., Any]:
    """For RecurrentGemma's recurrent blocks, which keep the tail of the convolution and the state themselves."""
    m: Any = mixer

    def forward(
        input_states: Tensor, position_ids: Tensor, attention_mask: Any = None, use_cache: bool = True, **kwargs: Any
    ) -> tuple[Tensor, None]:
        conv = state = None
        if use_cache and m.conv1d_state is not None and len(m.conv1d_state) == len(input_states):
            state = m.rg_lru.recurrent_states
            # As its own forward does: a call of several positions begins the convolution anew.
            conv = m.conv1d_state if position_ids.shape[1] == 1 else None
        offset = int(position_ids[:, 0].max()) if use_cache else 0
        out, (tail, m.rg_lru.recurrent_states) = run(
            m,
            input_states,
            tap,
            begins=position_ids == 0,
            conv_state=conv,
            state=state,
            return_state=True,
            offset=offset,
        )
        m.conv1d_state = tail[..., 1:] if use_cache else None
        return out, None

    return forward


def own_with_state(mixer: Any, x: Tensor) -> Tensor:
    """What a recurrent block of RecurrentGemma gives by itself for a sequence; what it keeps stays as it is."""
    kept = mixer.conv1d_state, mixer.rg_lru.recurrent_states
    try:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out: Tensor = type(mixer).forward(mixer, x, position_ids=positions, attention_mask=None, use_cache=False)[0]
        return out
    finally:
        mixer.conv1d_state, mixer.rg_lru.recurrent_states = kept


def with_given_state(run: Callable[..., Any], mixer: nn.Module, tap: Tap) -> Callable[..., Any]:
    """For RWKV's time mixing, which writes to a list of states that it is given."""
    m: Any = mixer

    def forward(hidden: Tensor, state: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        if state is None:
            return run(m, hidden, tap), None
        last, *held = (s[:, :, m.layer_id] for s in state[1:])
        seen = _SEEN_STATES.setdefault(state[2], {})
        going_on = bool((held[2] > -1e29).any())
        if going_on and len(hidden) > 1:
            raise InputError(
                f"{len(hidden)} examples go on from an RWKV's states: there transformers lets each read the position before of "
                "every other one, and the forward that hooks inside the mixer need doesn't. Run one example at a time, or "
                "without use_cache"
            )
        offset = _offset(m, tap, seen.get(m.layer_id)) if going_on else 0
        out, after = run(m, hidden, tap, before=last, state=held, return_state=True, offset=offset)
        seen[m.layer_id] = offset + hidden.shape[1]
        for whole, part in zip(state[1:], (hidden[:, -1], *after), strict=True):
            whole[:, :, m.layer_id] = part
        return out, state

    return forward


def _offset(mixer: nn.Module, tap: Tap, seen: int | None) -> int:
    """How many positions came before what a mixer is called with, going on from a state.

    An InputError where nothing says it, and an edit of the state would be told the wrong position.
    """
    if seen is not None or (seen := tap.offset()) is not None:
        return seen
    if any(tap.edits(name) for name in _STATES):
        raise InputError(
            f"a {type(mixer).__name__} goes on from a state that doesn't say how many positions came before, so an edit of its "
            "states can't be told where it is. Put the hooks in place before the first run, or run the whole sequence"
        )
    return 0


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

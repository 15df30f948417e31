"""Attention with taps: one function, through transformers' attention interface, for every model that calls it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from einops import repeat
from torch import Tensor, nn

from probelens.hooks.switchboard import Tap

NAME = "probelens"
_TAPS: weakref.WeakKeyDictionary[nn.Module, list[Tap]] = weakref.WeakKeyDictionary()
_ACTIVE: dict[int, tuple[int, Any, Any]] = {}
_LOCK = threading.RLock()


def register() -> None:
    """Make the tapped attention known to transformers under the name "probelens"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention with a tap at q, k, v, the scores and the pattern.

    Heads come before positions, those of ``key`` and ``value`` still grouped. The mask is added to the scores, or
    boolean and True where they count; None for a causal one. ``softcap`` bounds the scores, as in Gemma 2. ``s_aux`` is
    a logit per head that takes weight from the keys, as in GPT-OSS. ``position_bias`` is added to the scores, as in T5. Returns z (batch, pos, head, d_head), and the
    pattern (batch, head, pos, key_pos).
    """
    taps = _TAPS.get(module, ())

    def tapped(name: str, tensor: Tensor, swap: bool = False) -> Tensor:
        for tap in taps:
            if tap.wants(name):
                tensor = tap(name, tensor.transpose(1, 2)).transpose(1, 2) if swap else tap(name, tensor)
        return tensor

    query, key, value = (tapped("hook_q", query, True), tapped("hook_k", key, True), tapped("hook_v", value, True))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (repeat(v, "b kv pos d -> b (kv group) pos d", group=groups) for v in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    causal = kwargs.get("is_causal")
    scores = _masked(scores, attention_mask, getattr(module, "is_causal", True) if causal is None else causal)
    scores = tapped("hook_attn_scores", scores)
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    if sinks is not None:
        # A sink is one more key without a value: it takes part in the softmax and is dropped after it.
        extra = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        pattern = nn.functional.softmax(torch.cat([scores, extra], -1), dim=-1, dtype=torch.float32)[..., :-1]
    else:
        pattern = nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
    pattern = tapped("hook_pattern", pattern.to(query.dtype))
    weights = nn.functional.dropout(pattern, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), pattern


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scores with what a position may not see taken out, whichever attention the mask was made for.

    A run that another thread's hook finds on its way has the mask of the model's own attention: for SDPA that is
    boolean, or None where its causal kernel needs none.
    """
    least = torch.finfo(scores.dtype).min
    if mask is None:
        queries, keys = scores.shape[-2:]
        if not causal or queries == 1:
            return scores
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
        return scores.masked_fill(~seen, least)
    mask = mask[..., : scores.shape[-1]]
    return scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask


@contextlib.contextmanager
def instrumented(module: nn.Module, config: Any, tap: Tap) -> Iterator[None]:
    """Run the attention of ``module`` with ``tap`` while the context lasts.

    The setting is one per config, so the model's other layers run eager attention meanwhile: the same numbers, and no
    tap.
    """
    with _LOCK:
        register()
        count, before, _ = _ACTIVE.get(id(config), (0, None, None))
        if count == 0:
            before = config._attn_implementation
            config._attn_implementation = NAME
        _ACTIVE[id(config)] = (count + 1, before, config)
        _TAPS.setdefault(module, []).append(tap)
    try:
        yield
    finally:
        with _LOCK:
            taps = [t for t in _TAPS[module] if t is not tap]
            if taps:
                _TAPS[module] = taps
            else:
                del _TAPS[module]
            count, before, _ = _ACTIVE[id(config)]
            if count == 1:
                del _ACTIVE[id(config)]
                config._attn_implementation = before
            else:
                _ACTIVE[id(config)] = (count - 1, before, config)

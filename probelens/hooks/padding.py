"""Padding that a model must be told of: whether its mask keeps padding out of real tokens is tried, not assumed."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.forwards import eager
from probelens.hooks.trials import fingerprint

__all__ = ["has_gap", "mask_for_model", "padding_mask", "positions_for_padding", "reads_both_ways"]

How = Literal["mask", "positions", "neither"]
# Of each model, what it consisted of when it was tried, and what came of it.
_TRIED: dict[str, WeakKeyDictionary[Any, tuple[Any, Any]]] = {
    "padding": WeakKeyDictionary(),
    "both ways": WeakKeyDictionary(),
}
_HALF = (torch.float16, torch.bfloat16)


def has_gap(mask: Tensor) -> bool:
    """Whether a real token comes after padding.

    Args:
        mask: 1 for real tokens. (example, pos)

    Returns:
        False where padding stands on the right only.
    """
    real = mask.long()
    return bool((real[:, 1:] > real[:, :-1]).any())


def positions_for_padding(model: Any, mask: Tensor | None, extra: dict[str, Any]) -> dict[str, Any]:
    """Keywords for a run with this mask: with ``position_ids`` where real tokens would stand at wrong positions else.

    Args:
        model: The wrapped model.
        mask: 1 for real tokens. (example, pos)
        extra: Keywords from the user; position_ids among them stay.

    Returns:
        ``extra``, or a copy with ``position_ids``, which count real tokens.

    Raises:
        InputError: Padding before real tokens, which the model's mask doesn't keep out.
    """
    if mask is None or mask.ndim != 2 or extra.get("position_ids") is not None or not has_gap(mask):
        return extra
    if not model.adapter.accepts("attention_mask"):
        return extra  # Refused by the adapter.
    how: How = _remembered("padding", model, _padding)
    if how == "neither":
        raise InputError(
            f"padding before real tokens changes what this {type(model.module).__name__} makes of them although the mask "
            "is given (its state or its positions run over padding). Pad on the right, or run sequences of equal "
            "length together"
        )
    return {**extra, "position_ids": _positions(mask)} if how == "positions" else extra


def reads_both_ways(model: Any) -> bool:
    """Whether a later token changes what the model makes of earlier ones, so that padding on the right is read too.

    Args:
        model: The wrapped model.

    Returns:
        False also where no trial could be made and no module says that it is bidirectional.
    """
    if any(getattr(module, "bidirectional", False) for module in model.module.modules()):
        return True
    return bool(_remembered("both ways", model, _both_ways))


def padding_mask(mask: Tensor | None, model: Any = None) -> Tensor | None:
    """The attention mask that a batch with this mask needs, or None if it needs none.

    Padding on the right never reaches an earlier position of a causal model, so only a real token
    after padding calls for a mask; on a model that reads both ways every padding does.

    Args:
        mask: True on real tokens. (example, pos)
        model: The wrapped model; a causal one if None.

    Returns:
        1 for real tokens, 0 for padding, or None. (example, pos)
    """
    if mask is None or bool(mask.all()):
        return None
    return mask.long() if has_gap(mask) or (model is not None and reads_both_ways(model)) else None


def mask_for_model(model: Any, attention: Tensor | None) -> Tensor | None:
    """The attention mask to give the model; None where it needs none.

    A forward that takes no mask needs none where padding comes after everything that is read; where it doesn't, the
    mask is passed on, and refused with the reason.

    Args:
        model: The wrapped model.
        attention: 1 for real tokens. (example, pos)

    Returns:
        1 for real tokens, int64, or None. (example, pos)
    """
    if attention is None:
        return None
    if not model.adapter.accepts("attention_mask") and padding_mask(attention.bool(), model) is None:
        return None
    return attention.long()


def _remembered(what: str, model: Any, trial: Any) -> Any:
    now, known = fingerprint(model.module), _TRIED[what]
    if model not in known or known[model][0] != now:
        known[model] = now, trial(model)
    return known[model][1]


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _run(model: Any, tokens: Tensor, mask: Tensor | None, **extra: Any) -> Tensor:
    device = model.adapter.device()
    call = model.adapter.call(tokens.to(device), None if mask is None else mask.to(device), extra)
    with model._switchboard.muted(), torch.no_grad(), model.evaluating(), eager():
        return model.adapter.output(model.adapter.run(call))


def _same(model: Any, found: Tensor, own: Tensor) -> bool:
    half = own.dtype in _HALF or model.cfg.dtype in _HALF
    return bool((found - own).abs().max() <= (5e-2 if half else 1e-3) * own.abs().max().float())


def _padding(model: Any) -> How:
    vocab = model.adapter.cfg.d_vocab
    if not vocab:
        return "mask"
    x = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(0))
    padded, mask = torch.cat([x[:, :3], x], 1), torch.ones(2, 8, dtype=torch.long)
    mask[:, :3] = 0
    try:
        own = _run(model, x, None)
        if _same(model, _run(model, padded, mask)[:, 3:], own):
            return "mask"
    except Exception:
        # A model that needs more than tokens fails in a way of its own; its user knows how to run it.
        return "mask"
    try:
        found = _run(model, padded, mask, position_ids=_positions(mask).to(model.adapter.device()))
    except Exception:
        return "neither"
    return "positions" if _same(model, found[:, 3:], own) else "neither"


def _both_ways(model: Any) -> bool:
    vocab = model.adapter.cfg.d_vocab
    if vocab < 2:
        return False
    x = torch.randint(vocab, (2, 6), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 4:] = (x[:, 4:] + 1) % vocab
    try:
        a, b = (_run(model, tokens, None)[:, :4] for tokens in (x, other))
    except Exception:
        return False
    return not _same(model, a, b)

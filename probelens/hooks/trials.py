"""Whether the residual entering a block is all that the rest of the model depends on: tried, not assumed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from probelens.hooks.forwards import eager, is_swapped

__all__ = ["can_start_at", "fingerprint"]

_HALF = (torch.float16, torch.bfloat16)


def can_start_at(model: Any, layer: int) -> bool:
    """Whether a run from this block, fed what a full run feeds it, gives the full run's logits.

    Args:
        model: The wrapped model.
        layer: Block; ``n_layers`` for what follows the last one.

    Returns:
        True also where no trial could be made: a model that random tokens alone don't run.
    """
    vocab = model.adapter.cfg.d_vocab
    if not vocab:
        return True
    x = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(0))
    with model._switchboard.muted(), torch.no_grad(), model.evaluating(), eager():
        call = model._call(x, None, None, {})
        try:
            full = model.adapter.output(model.adapter.run(call))
        except Exception:
            # A model that needs more than tokens fails in a way of its own; its user knows how to run it.
            return True
        resid = model._forward(x, "logits", None, layer, None, {})
        if resid.ndim != 3 or resid.shape[:2] != x.shape:
            return False
        again = model._forward(resid, "logits", layer, None, None, {})
    half = full.dtype in _HALF or model.cfg.dtype in _HALF
    size = full.abs().max().float()
    return again.shape == full.shape and bool((again - full).abs().max() <= (5e-2 if half else 1e-3) * size)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """What a module consists of: equal until a module, a class or a function in it is exchanged.

    What was found out about a model by a trial holds as long as this stays the same. Weights don't count.

    Args:
        module: The module, with everything in it.

    Returns:
        Something to compare with ``==``.
    """
    return tuple(
        (
            id(each),
            type(each),
            type(each).forward,
            *(v for k, v in vars(each).items() if k[0] != "_" and callable(v) and not is_swapped(v)),
        )
        for each in module.modules()
    )

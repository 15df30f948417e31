"""The same architecture at other random weights: what was there before training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.wrapping import wrap
from probelens.models.build import build, config_of

__all__ = ["untrained"]


def untrained(model: HookedModel, seed: int = 0) -> HookedModel:
    """A wrapped model's architecture as its library initialises it, on the same device and in the same dtype.

    Args:
        model: A formal model of ``probelens.models``, or one of transformers.
        seed: Of the weights; the global random state isn't touched.

    Returns:
        Another model, in eval mode; this one stays as it is.

    Raises:
        InputError: Any other model: how to make it again isn't known.

    Examples:
        >>> from probelens.models.config import FormalConfig
        >>> model = wrap(build(FormalConfig("gru", d_vocab=4)))
        >>> fresh = untrained(model, seed=1)
        >>> bool(torch.equal(fresh.module.head.weight, model.module.head.weight))
        False
    """
    module: Any = model.module
    if (config := config_of(module)) is not None:
        fresh = build(replace(config, seed=seed))
    elif hasattr(module, "_init_weights") and hasattr(module, "config"):
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            torch.default_generator.manual_seed(seed)
            fresh = type(module)(module.config)
    else:
        raise InputError(
            f"how to make a {type(module).__name__} again with random weights isn't known: it is neither a formal model nor one "
            "of transformers. Make an untrained one yourself, and wrap it"
        )
    fresh = fresh.eval().to(device=model.cfg.device, dtype=model.cfg.dtype)
    return wrap(fresh, type(model.adapter), tokenizer=getattr(model, "tokenizer", None))

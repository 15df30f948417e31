"""Loading: a model by its name on the Hugging Face hub or from a folder, wrapped."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.wrapping import wrap
from probelens.running.workers import remember

if TYPE_CHECKING:
    import torch

__all__ = ["load"]


def load(
    name: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    strict: bool = True,
    task: str | None = None,
    **kw: Any,
) -> HookedModel:
    """Load a model from the Hugging Face hub or a folder, in eval mode, and wrap it.

    Args:
        name: Hub id such as ``"EleutherAI/pythia-160m"``, a folder written by
            ``save_pretrained``, a folder of a formal model of ``probelens.models``, or any of these
            with a checkpoint in mamba-ssm's own format, which is read into transformers' class.
        adapter: Name of the adapter; None to find it.
        device: Where the model goes.
        dtype: Dtype to load in; None for the checkpoint's own choice.
        trust_remote_code: Run code that comes with the checkpoint. Off unless asked for.
        strict: Refuse a checkpoint that has no weights for a part of the model, or weights that the model doesn't use.
        task: What the model is for, where that isn't what its config names: "causal-lm", "masked-lm", "seq2seq-lm",
            "speech-seq2seq", "sequence-classification", "token-classification", "question-answering",
            "image-classification", or "base" for the model without a head. None takes the class in the config's
            ``architectures``.
        **kw: For ``from_pretrained`` of transformers' class, such as ``revision=``.

    Returns:
        The hooked model, with its tokenizer if it has one.

    Raises:
        InputError: No such model or task, it can't be read, or its weights don't fit its config.
        StoreError: A formal model's file that is damaged.
    """
    if not isinstance(name, (str, os.PathLike)):
        what = f"got a {type(name).__name__}. A model that is in memory goes to pl.wrap()"
        raise InputError(f"load() needs a hub id or a folder, {what}")
    text = os.fspath(name)
    if not text:
        raise InputError("load() needs a hub id or a folder, got an empty name")
    place = Path(text)
    again = functools.partial(
        load, os.path.abspath(text) if os.path.exists(place) else text, adapter=adapter, device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, strict=strict, task=task, **kw,
    )  # fmt: skip
    if os.path.exists(place):  # False for a name that is too long, where pathlib raises
        from probelens.models import checkpoint

        configs = ("config.json", "adapter_config.json")
        if checkpoint.is_checkpoint(place) or not any((place / name).is_file() for name in configs):
            if place.is_dir() and not (place / "model.safetensors").is_file():
                raise InputError(
                    f"the folder {str(place)!r} holds no model: neither config.json (written by save_pretrained) nor "
                    "model.safetensors (of a formal model)."
                )
            if task is not None:
                raise InputError(
                    f"task={task!r}: the folder {str(place)!r} holds a formal model, which has one class only"
                )
            return remember(wrap(checkpoint.load(place, device=device), adapter), again)
    elif place.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or text.endswith("/"):
        raise InputError(
            f"there is no folder {text!r}. Give a folder that holds a model, or a hub id such as 'org/name'"
        )
    from probelens.adapters.hf.loading import load_pretrained

    module, tokenizer = load_pretrained(
        text, device=device, dtype=dtype, trust_remote_code=trust_remote_code, strict=strict, task=task, **kw
    )
    return remember(wrap(module, adapter, tokenizer=tokenizer), again)

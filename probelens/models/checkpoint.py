"""Formal models to and from one safetensors file: plain state-dict keys, the config as JSON beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probelens.errors import InputError, StoreError
from probelens.models.build import build, config_of, construct
from probelens.models.config import FormalConfig
from probelens.results.files import need_room, read_tensors, write_tensors

__all__ = ["is_checkpoint", "load", "save"]

_KEY = "probelens.model"


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write a formal model to one safetensors file, whole or not at all.

    Args:
        model: A model made by `build` or `load`, trained or not.
        path: The file; an existing one is replaced when the new one is complete.

    Returns:
        The path written.

    Raises:
        InputError: The model was not made by `build`, so its config is unknown.
        StoreError: The folder can't be written.
    """
    config = config_of(model)
    if config is None:
        raise InputError(
            f"save() needs a model made by probelens.models.build; this {type(model).__name__} was not. "
            "Save its state dict with safetensors, or with save_pretrained if it is a transformers model."
        )
    # Copies: safetensors refuses tensors that share storage.
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in model.state_dict().items()}
    return write_tensors(path, tensors, {_KEY: json.dumps({"format": 1, "config": config.to_dict()})})


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `load` would take this for a formal model.

    Args:
        path: A file, or a folder that may hold `model.safetensors`.

    Returns:
        True if the file is there and says so in its header; its weights are not read.
    """
    try:
        return _header(_file(path)) is not None
    except StoreError:
        return False


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> nn.Module:
    """Read a formal model back.

    Args:
        path: A file written by `save`, or a folder with such a file named `model.safetensors`, as training leaves it.
        device: Where the weights go; None for the CPU.

    Returns:
        The model, in eval mode, its weights equal to the saved ones bit for bit.

    Raises:
        StoreError: The file is missing, truncated, changed, of another program, or does not fit its config.
    """
    file = _file(path)
    header = _header(file)
    if header is None:
        raise StoreError(
            f"{str(file)!r} is a safetensors file but not a formal model of probelens. Give a file written by "
            "probelens.models.save(). A saved result is read by its own class, such as probelens.PatchResult.load()."
        )
    try:
        fields = json.loads(header)["config"]
        _check_sizes(fields, file)
        model = build(FormalConfig.from_dict(fields))
        weights, own = read_tensors(file)[0], model.state_dict()
        whole = [key for key in own if key in weights and not weights[key].is_floating_point()]
        if any(own[key].is_floating_point() for key in whole):
            # torch would turn integers into weights without a word.
            raise ValueError(f"{whole[0]!r} holds {weights[whole[0]].dtype}")
        model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as err:
        raise StoreError(f"{str(file)!r} does not fit the model it describes: {err}") from err
    return model if device is None else model.to(device)


def _check_sizes(fields: dict[str, Any], file: Path) -> None:
    """Raise ValueError where a model of this config has other tensors than the file, before one is made.

    A forged config of a small file could ask for all the memory there is.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        there = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    most = max((size for shape in there.values() for size in shape), default=0)
    for name, limit in {"n_layers": len(there), "d_vocab": most, "d_model": most, "hidden_size": most}.items():
        value = fields.get(name)
        if isinstance(value, int) and value > limit:
            raise ValueError(f"{name}={value} is more than its {len(there)} tensors can be for")
    with torch.device("meta"):
        wanted = {key: tuple(t.shape) for key, t in construct(FormalConfig.from_dict(fields)).state_dict().items()}
    for key in (*wanted, *there):
        if wanted.get(key) != there.get(key):
            raise ValueError(f"{key!r} is {there.get(key)} in the file, and must be {wanted.get(key)}")


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / "model.safetensors" if os.path.isdir(path) else path


def _header(file: Path) -> str | None:
    """Our part of the file's header; None in a safetensors file of somebody else."""
    from safetensors import SafetensorError, safe_open

    try:
        need_room(file, os.path.getsize(file))
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get(_KEY)
    except (OSError, SafetensorError, ValueError) as err:
        raise StoreError(f"can't read {str(file)!r} as a formal model: {err}") from err

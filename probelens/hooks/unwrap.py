"""The model, and the layer, inside what torch.compile, PEFT and data parallelism put around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from probelens.errors import InputError

__all__ = ["own_layers", "unadapted", "unwrap"]


def unwrap(module: Any) -> Any:
    """The model to wrap: the one that runs, with its weights and adapters, under its own class.

    Args:
        module: What the user gives.

    Returns:
        The module inside a ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel`` wrapper or
        a ``PeftModel`` whose adapters stand in its layers; anything else as it is. Nothing is copied or
        changed.

    Raises:
        InputError: A wrapper that does more than call the model, so that the model alone would be another one.

    Examples:
        >>> layer = torch.nn.Linear(2, 2)
        >>> unwrap(torch.nn.DataParallel(layer)) is layer
        True
    """
    while True:
        if _is(module, "torch._dynamo", "OptimizedModule"):
            module = module._orig_mod
        elif _is(module, "torch.nn.parallel", "DataParallel", "DistributedDataParallel"):
            module = module.module
        elif _is(module, "peft.", "PeftModel", "PeftMixedModel"):
            module = _peft(module)
        else:
            break
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{type(module).__name__} is TorchScript, which calls no hooks inside. Wrap the model it was made from."
        )
    if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise InputError(
            "FullyShardedDataParallel keeps pieces of the weights on each process. Load the checkpoint whole and "
            "wrap that."
        )
    return module


def unadapted(module: nn.Module) -> nn.Module:
    """The layer that PEFT found in a model, whether or not an adapter or a trained copy stands in its place now."""
    while True:
        if _is(module, "peft.", "BaseTunerLayer") and isinstance(module.base_layer, nn.Module):
            module = module.base_layer
        elif _is(module, "peft.", "AuxiliaryTrainingWrapper"):
            module = module.original_module  # type: ignore[assignment]
        else:
            return module


def own_layers(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every submodule with its path, as ``named_modules``, and none that PEFT put inside another.

    An adapted layer stands under its own path as the layer that it was.
    """
    found: list[tuple[str, nn.Module]] = []
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        layer = unadapted(module)
        inside = f"{path}." if layer is not module else None
        found.append((path, layer))
    return found


def _is(module: Any, package: str, *names: str) -> bool:
    """Whether a class of that name from that package is among the module's, without importing it."""
    return any(c.__name__ in names and c.__module__.startswith(package) for c in type(module).__mro__)


def _peft(module: Any) -> Any:
    """The base model, in whose layers LoRA and its like stand; other methods do more than that."""
    tuner, configs = module.base_model, list(module.peft_config.values())
    kind = ", ".join(str(getattr(c.peft_type, "value", c.peft_type)) for c in configs)
    merged = (
        "Wrap what it was trained on, or the model that merge_and_unload() gives, where the method has it."
    )
    if any(c.is_prompt_learning for c in configs):
        raise InputError(
            f"this PeftModel ({kind}) puts tokens of its own before the input, so that positions would not be those "
            f"of your tokens. {merged}"
        )
    if any(getattr(c, "alora_invocation_tokens", None) for c in configs):
        raise InputError(
            f"this PeftModel ({kind}) switches its adapter on at certain tokens, in a call of its own that "
            f"probelens doesn't make. {merged}"
        )
    # AdaLora's own forward only adds a penalty to the loss.
    own = {"BaseTuner", "AdaLoraModel"}
    if type(tuner).forward.__qualname__.partition(".")[0] not in own or not hasattr(tuner, "model"):
        raise InputError(
            f"this PeftModel ({kind}) runs its model in a way of its own, not by adapters in its layers. {merged}"
        )
    return tuner.model

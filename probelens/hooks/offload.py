"""Weights that accelerate keeps on the disk or on another device until their module runs.

``device_map="auto"`` and ``cpu_offload`` put a forward of accelerate's own on the modules, which brings the
weights in and takes them out again. A forward of ours in its place has to do the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from probelens.errors import InputError

__all__ = ["execution_device", "need_data", "stored", "with_weights"]


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module with offloaded weights runs; None if accelerate doesn't say."""
    for found in module.modules():
        hook = getattr(found, "_hf_hook", None)
        for one in (hook, *getattr(hook, "hooks", ())):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def with_weights(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs with the weights of the module and of all below it in place.

    Args:
        module: The module that ``forward`` stands for.
        forward: May read the weights of submodules without calling them.

    Returns:
        ``forward`` itself where nothing is offloaded.
    """
    own: Any = getattr(module, "_hf_hook", None)
    below: list[Any] = [
        m for m in module.modules() if m is not module and getattr(m, "_hf_hook", None) is not None
    ]
    if own is None and not below:
        return forward

    @functools.wraps(forward)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for one in below:
                one._hf_hook.pre_forward(one)
                stack.callback(one._hf_hook.post_forward, one, None)
            if own is None:
                return forward(*args, **kwargs)
            args, kwargs = own.pre_forward(module, *args, **kwargs)
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                own.post_forward(module, None)
                raise
            return own.post_forward(module, output)

    return placed


def stored(root: nn.Module, name: str) -> Tensor | None:
    """The numbers of a parameter or buffer, also of an offloaded one; None where there are none."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    weight: Tensor = getattr(owner, leaf)
    if weight.device.type != "meta":
        return weight
    kept = getattr(getattr(owner, "_hf_hook", None), "weights_map", None)
    return None if kept is None else torch.as_tensor(kept[leaf])


def need_data(name: str, weight: Tensor) -> Tensor:
    """The weight, if it holds numbers.

    Raises:
        InputError: It is on the meta device.
    """
    if weight.device.type == "meta":
        raise InputError(
            f"weight {name!r} isn't in memory: it is offloaded, or the model has no weights (device 'meta'). "
            "Load the model without device_map, or with one that keeps this part on a device."
        )
    return weight

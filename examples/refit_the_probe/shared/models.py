"""Models of the recipes: device and precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

import probelens as pl


def device_of(config: Mapping[str, Any]) -> str:
    """The device a cell runs on: what its config says, else the GPU where there is one."""
    found = str(config.get("device", "auto"))
    return ("cuda" if torch.cuda.is_available() else "cpu") if found == "auto" else found


def is_mamba(model: pl.HookedModel) -> bool:
    """Whether the model has Mamba mixers, which train many times faster under the reference backend on a CPU."""
    return model.cfg.architecture.startswith("hf-mamba")


def mixed(
    model: pl.HookedModel, bf16: bool = False, checkpointing: bool = False
) -> Callable[[], AbstractContextManager[Any]]:
    """The context to train in, as ``train`` takes it.

    bf16 is autocast: weights and optimizer stay in float32. Checkpointing recomputes activations in the backward pass,
    of transformers' models only.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        module: Any = model.module
        with contextlib.ExitStack() as stack:
            if is_mamba(model):
                stack.enter_context(model.backend("reference"))
            if bf16:
                stack.enter_context(torch.autocast(model.cfg.device.type, dtype=torch.bfloat16))
            if checkpointing:
                module.gradient_checkpointing_enable({"use_reentrant": False})
                stack.callback(module.gradient_checkpointing_disable)
            yield

    return context


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars that transformers draws for every file it reads or writes."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def load_pretrained(config: Mapping[str, Any]) -> pl.HookedModel:
    """The pretrained model of a cell, in float32."""
    options = {"revision": config["revision"]} if config["revision"] and not config["weights"] else {}
    with quiet():
        return pl.load(config["model"], device=device_of(config), dtype="float32", **options)

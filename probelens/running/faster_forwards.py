"""Which of two equal forwards the primitives run: on a CPU an SSM's reference mixers are many times the faster one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from probelens.hooks.forwards import hooked_by_hand, submodule
from probelens.hooks.trials import faster_forwards_agree

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel


@contextlib.contextmanager
def faster_forwards(model: HookedModel, names: Iterable[str] = ()) -> Iterator[None]:
    """Run the faster forwards while the context lasts, where hooks are sure to see what the model's own would show.

    The model's own forward runs where the caller has hooks on the model, or a point among ``names``, read or edited
    meanwhile, is on a module inside a mixer, since the two forwards may not call the same modules. Whether both give
    the same numbers is tried, and remembered until something in the model is exchanged.
    """
    paths = model.adapter.faster_paths()
    inside = tuple(f"{path}." for path in paths)
    clear = (
        bool(paths)
        # Rounding in half precision depends on the order of sums.
        and model.cfg.dtype in (torch.float32, torch.float64)
        and not model.has_hooks()
        and not any(model.point(name).module.startswith(inside) for name in names)
        and not any(
            hooked_by_hand(mixer, ("transformers",)) is not None
            or any(each._backward_hooks for each in mixer.modules())
            for mixer in (submodule(model.module, path) for path in paths)
        )
    )
    with (
        model.switchboard.instrumented(paths)
        if clear and faster_forwards_agree(model, paths)
        else contextlib.nullcontext()
    ):
        yield

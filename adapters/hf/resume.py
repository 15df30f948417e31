"""Runs from the middle of a sequence: with kept keys and values, or with kept recurrent states."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.adapters.hf.resume_mixers import Mixers
from probelens.hooks.forwards import submodule
from probelens.hooks.model import HookedModel
from probelens.running.sweep.resumer import Resumer

# What transformers calls the argument: newer versions first, which take the older name too and ignore it.
_CACHE = ("cache", "past_key_values")


class KeyValues(Resumer):
    """For transformers' decoders whose every layer is attention.

    Keys and values of all positions are kept, also where a layer sees a window or a chunk of them only: its mask hides the
    others, as it does in a whole run.
    """

    masks = True

    @classmethod
    def of(cls, model: HookedModel) -> KeyValues | None:
        """None for encoders, and where layers keep something else, as linear attention does."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        config: Any = model.module.config
        adapter = model.adapter
        if getattr(config, "is_encoder_decoder", False) or not any(map(adapter.accepts, _CACHE)):
            return None
        layers = DynamicCache(config=config).layers
        attention = (DynamicLayer, DynamicSlidingWindowLayer)
        if len(layers) != len(adapter.blocks) or any(type(layer) not in attention for layer in layers):
            return None
        return cls(model)

    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        cfg = self.model.cfg
        heads = cfg.n_key_value_heads or cfg.n_heads
        return 2 * cfg.n_layers * batch * length * heads * cfg.d_head * cfg.dtype.itemsize

    def copied(self, batch: int, length: int) -> int:
        # Copies for every layer, and in the one that runs the same once more with the new positions behind them.
        return self.holds(batch, length) * (self.n + 1) // self.n

    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.kept: Any = self._empty()
        return self.forward(tokens, names, **self._with(self.kept))

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        past = {}
        if pos > 0:
            past = {**self._with(self._before(pos, range(layer, until), len(resid))), **self._after(pos, resid)}
        # The sweep has tried that a run may start here; a trial in the midst of this one would see the kept keys.
        call = self.tail_call(resid, layer, pos, past)
        out: Tensor = self.model.run(call, start=layer, stop=until, resid=resid)
        return out

    def _empty(self) -> Any:
        """A cache for the run that keeps."""
        from transformers.cache_utils import DynamicCache

        # Not made from the config, which says of a window that what it has passed is forgotten.
        return DynamicCache()

    def _after(self, pos: int, resid: Tensor) -> dict[str, Any]:
        """What else a run from a position on is given."""
        return {}

    def _with(self, cache: Any) -> dict[str, Any]:
        return {next(filter(self.model.adapter.accepts, _CACHE)): cache, "use_cache": True}

    def _before(self, pos: int, running: range, rows: int) -> Any:
        """The cache of the unedited run up to a position, once for each condition."""
        cut = copy.copy(self.kept)
        cut.layers = []
        for i, layer in enumerate(self.kept.layers):
            part = copy.copy(layer)
            cut.layers.append(part)
            if getattr(layer, "keys", None) is None:
                continue
            # Layers that don't run are only asked how long they are.
            copies = rows // len(layer.keys) if i in running else 1
            for side in ("keys", "values"):
                kept = getattr(layer, side)[..., :pos, :]
                setattr(part, side, kept.repeat(copies, 1, 1, 1) if copies > 1 else kept)
        return cut


class Mixed(KeyValues):
    """For transformers' decoders some of whose layers, or parts of layers, are recurrent, on a CPU: keys or states by layer."""

    def __init__(self, model: HookedModel) -> None:
        super().__init__(model)
        parts = enumerate(model.adapter.block_parts)  # type: ignore[attr-defined]
        paths = {i: f"{model.adapter.blocks[i]}.{part.mixer}" for i, part in parts if part.mixer is not None}
        self.paths = list(paths.values())
        self.mixers = Mixers({i: submodule(model.module, path) for i, path in paths.items()})

    @classmethod
    def of(cls, model: HookedModel) -> Mixed | None:
        """None on a GPU, where the kernels of a whole run are faster, and for mixers that don't begin at given states."""
        from transformers import cache_utils

        config, adapter = model.module.config, model.adapter
        if (
            not hasattr(adapter, "block_parts")
            or not any(map(adapter.accepts, _CACHE))
            or model.cfg.device.type != "cpu"
        ):
            return None
        linear = getattr(cache_utils, "LinearAttentionLayer", None)
        layers = cache_utils.DynamicCache(config=config).layers
        if linear is None or len(layers) != len(adapter.blocks):
            return None
        made = cls(model)
        known = all(
            (isinstance(layer, linear) == (i in made.mixers.mixers)) and isinstance(layer, (linear, cache_utils.DynamicLayer))
            for i, layer in enumerate(layers)
        )  # fmt: skip
        mixers = made.mixers.mixers.values()
        return made if known and mixers and all(map(Mixers.knows, mixers)) else None

    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        return super().holds(batch, length) + self.mixers.holds(batch, length, spacing, self.model.cfg.dtype.itemsize)

    def copied(self, batch: int, length: int) -> int:
        item = self.model.cfg.dtype.itemsize
        return super().holds(batch, length) * (self.n + 1) // self.n + self.mixers.copied(batch, item)

    def spacings(self, length: int) -> range:
        return range(1, length // 4 + 1)

    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        with self.mixers.keeping(self.spacing, self.mask):
            return super().base(tokens, names)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.switchboard.instrumented(self.paths)

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        with self.mixers.beginning(layer, pos, len(resid)):
            return super().tail(resid, layer, pos, until, begins)

    def _after(self, pos: int, resid: Tensor) -> dict[str, Any]:
        # Not all of these models count on from what is in the cache.
        if not self.model.adapter.accepts("position_ids"):
            return {}
        positions = torch.arange(pos, pos + resid.shape[1], device=resid.device)
        return {"position_ids": positions.expand(len(resid), -1)}

    def _empty(self) -> Any:
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        made = DynamicCache(config=self.model.module.config)
        # A window would forget what it has passed; its mask hides that.
        made.layers = [DynamicLayer() if isinstance(x, DynamicSlidingWindowLayer) else x for x in made.layers]
        return made


class Recurrent(Resumer):
    """For transformers' Mamba and Mamba-2, on a CPU: the reference mixers begin at kept states.

    States are kept at every ``spacing``-th position, which grows where the budget asks for it.
    """

    masks = True

    def __init__(self, model: HookedModel) -> None:
        super().__init__(model)
        paths = model.adapter.instrumented_paths()
        self.mixers = Mixers({i: submodule(model.module, path) for i, path in enumerate(paths)})

    @classmethod
    def of(cls, model: HookedModel) -> Recurrent | None:
        """None on a GPU, where the fused kernels that a whole run uses are faster than a part without them."""
        return cls(model) if model.cfg.device.type == "cpu" else None

    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        return self.mixers.holds(batch, length, spacing, self.model.cfg.dtype.itemsize)

    def copied(self, batch: int, length: int) -> int:
        return self.mixers.copied(batch, self.model.cfg.dtype.itemsize)

    def spacings(self, length: int) -> range:
        return range(1, length // 4 + 1)

    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        with self.mixers.keeping(self.spacing, self.mask):
            return self.forward(tokens, names)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        # The model's own way to the reference mixers: a swap of their forward would hide them from its hooks
        # where the caller is inside `model.backend("reference")` already.
        return self.model.backend("reference")

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        with self.mixers.beginning(layer, pos, len(resid)):
            call = self.model.prepare(resid, start=layer)
            out: Tensor = self.model.run(call, start=layer, stop=until, resid=resid)
        return out

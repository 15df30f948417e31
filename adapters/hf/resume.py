"""Runs from the middle of a sequence: with kept keys and values, or with kept recurrent states."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from probelens.hooks.forwards import submodule, swapped_forward, this_thread
from probelens.hooks.model import HookedModel
from probelens.kernels.ssm import is_mamba2, mamba2_mixer, mamba_mixer
from probelens.kernels.tap import NullTap, masked
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
        from transformers.cache_utils import DynamicCache

        # Not made from the config, which says of a window that what it has passed is forgotten.
        self.kept: Any = DynamicCache()
        return self.forward(tokens, names, **self._with(self.kept))

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        past = {} if pos == 0 else self._with(self._before(pos, range(layer, until), len(resid)))
        # The sweep has tried that a run may start here; a trial in the midst of this one would see the kept keys.
        call = self.tail_call(resid, layer, pos, past)
        out: Tensor = self.model.run(call, start=layer, stop=until, resid=resid)
        return out

    def _with(self, cache: Any) -> dict[str, Any]:
        return {next(filter(self.model.adapter.accepts, _CACHE)): cache, "use_cache": True}

    def _before(self, pos: int, running: range, rows: int) -> Any:
        """The cache of the unedited run up to a position, once for each condition."""
        cut = copy.copy(self.kept)
        cut.layers = []
        for i, layer in enumerate(self.kept.layers):
            part = copy.copy(layer)
            # Layers that don't run are only asked how long they are.
            copies = rows // len(layer.keys) if i in running else 1
            for side in ("keys", "values"):
                kept = getattr(layer, side)[..., :pos, :]
                setattr(part, side, kept.repeat(copies, 1, 1, 1) if copies > 1 else kept)
            cut.layers.append(part)
        return cut


class Recurrent(Resumer):
    """For transformers' Mamba and Mamba-2, on a CPU: the reference mixers begin at kept states.

    States are kept at every ``spacing``-th position, which grows where the budget asks for it. The mixers are told of
    padding themselves, whatever the model does with the mask of a part of a sequence.
    """

    masks = True

    def __init__(self, model: HookedModel) -> None:
        super().__init__(model)
        self.mixers: list[Any] = [submodule(model.module, p) for p in model.adapter.instrumented_paths()]
        self.kept: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, model: HookedModel) -> Recurrent | None:
        """None on a GPU, where the fused kernels that a whole run uses are faster than a part without them."""
        return cls(model) if model.cfg.device.type == "cpu" else None

    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        states, inputs = self._sizes(batch)
        size = max(m.conv1d.weight.shape[-1] for m in self.mixers)
        # The states of one layer are whole until those to be kept are copied.
        every = self.n * (states * (length // spacing) + inputs * (length + size - 1))
        return every + states * length

    def copied(self, batch: int, length: int) -> int:
        states, inputs = self._sizes(batch)
        return states + inputs * max(m.conv1d.weight.shape[-1] for m in self.mixers)

    def spacings(self, length: int) -> range:
        return range(1, length // 4 + 1)

    def _sizes(self, batch: int) -> tuple[int, int]:
        """Bytes of one layer's state and of its convolution's input, at one position."""
        one = batch * self.model.cfg.dtype.itemsize
        channels = max(m.conv1d.weight.shape[0] for m in self.mixers)
        return one * max(_state_size(m) for m in self.mixers), one * channels

    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        taps = [_Keep(mixer, self.spacing, self.mask) for mixer in self.mixers]
        with self._mixing(lambda i: {"tap": taps[i], "attention_mask": self.mask}):
            final, cache = self.forward(tokens, names)
        self.kept = [(tap.inputs, tap.states) for tap in taps]
        return final, cache

    def running(self) -> contextlib.AbstractContextManager[Any]:
        # The model's own way to the reference mixers: a swap of their forward would hide them from its hooks
        # where the caller is inside `model.backend("reference")` already.
        return self.model.backend("reference")

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        def begin(i: int) -> dict[str, Any]:
            inputs, states = self.kept[i]
            real = None if self.mask is None else self.mask[:, pos:].repeat(len(resid) // len(self.mask), 1)
            if pos == 0 or i < layer:
                return {"attention_mask": real}
            conv = inputs[:, pos : pos + self.mixers[i].conv1d.weight.shape[-1] - 1].transpose(1, 2)
            state = states[:, pos // self.spacing - 1]
            copies = len(resid) // len(state)
            return {
                "attention_mask": real,
                "conv_state": conv.repeat(copies, 1, 1),
                "ssm_state": state.repeat(copies, *(1,) * (state.ndim - 1)),
            }

        with self._mixing(begin):
            call = self.model.prepare(resid, start=layer)
            out: Tensor = self.model.run(call, start=layer, stop=until, resid=resid)
        return out

    @contextlib.contextmanager
    def _mixing(self, options: Callable[[int], dict[str, Any]]) -> Iterator[None]:
        """Run the reference mixers with these options, by layer, while the context lasts."""

        def forward(i: int) -> Callable[..., Tensor]:
            mixer = self.mixers[i]
            run = mamba2_mixer if is_mamba2(mixer) else mamba_mixer

            def call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                out: Tensor = run(mixer, hidden_states, **options(i))
                return out

            return call

        with contextlib.ExitStack() as stack:
            for i, mixer in enumerate(self.mixers):
                stack.enter_context(swapped_forward(mixer, forward(i), here=this_thread()))
            yield


class _Keep(NullTap):
    """A tap that keeps a mixer's inputs of the convolution, and its states at every ``spacing``-th position."""

    inputs: Tensor
    states: Tensor

    def __init__(self, mixer: nn.Module, spacing: int, mask: Tensor | None) -> None:
        self.mixer: Any = mixer
        self.spacing = spacing
        # Older versions of transformers mask Mamba's branch after it was projected.
        self.mask = mask if hasattr(mixer, "slow_forward") and not is_mamba2(mixer) else None

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        channels, size = self.mixer.conv1d.weight.shape[0], self.mixer.conv1d.weight.shape[-1]
        if name == "hook_in_proj":
            # Mamba: [x, gate]; Mamba-2: [..., x with B and C, dt].
            end = tensor.shape[-1] - self.mixer.A_log.shape[0] if is_mamba2(self.mixer) else channels
            x = masked(tensor[..., end - channels : end], self.mask)
            self.inputs = nn.functional.pad(x, (0, 0, size - 1, 0))
        elif name == "hook_ssm_state":
            self.states = tensor[:, self.spacing - 1 :: self.spacing].clone()
        return tensor

    def wants(self, name: str) -> bool:
        return name in ("hook_in_proj", "hook_ssm_state")


def _state_size(mixer: Any) -> int:
    channels = mixer.D.shape[0] if not is_mamba2(mixer) else mixer.conv1d.weight.shape[0]
    size = mixer.A_log.shape[1] if mixer.A_log.ndim == 2 else int(getattr(mixer, "ssm_state_size", 128))
    return int(channels) * size

"""Recurrent mixers that go on from the states that an unedited run left at a position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from probelens.adapters.hf.mixers import carried
from probelens.adapters.hf.mixers.kinds import has_inside, kind_of
from probelens.hooks.forwards import swapped_forward, this_thread
from probelens.kernels.delta import delta_mixer
from probelens.kernels.short_conv import short_conv_mixer
from probelens.kernels.ssm import is_mamba2, mamba_mixer
from probelens.kernels.tap import NullTap, masked


class Mixers:
    """The reference forwards of some mixers, which keep states in one run and begin at them in others.

    States are kept at every ``spacing``-th position. The mixers are told of padding themselves, whatever the model does with
    the mask of a part of a sequence.

    Args:
        mixers: By the number of their block.
    """

    def __init__(self, mixers: Mapping[int, Any]) -> None:
        self.mixers = mixers
        self.spacing = 1
        self.mask: Tensor | None = None
        # Inputs of the convolution with as many zeros before them as it sees, and states after positions; None without.
        self.kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    @staticmethod
    def knows(mixer: Any) -> bool:
        """Whether a mixer's reference forward begins at states."""
        return has_inside(mixer) and kind_of(mixer).forward is carried.with_cache

    def holds(self, batch: int, length: int, spacing: int, item: int) -> int:
        """Bytes kept of some sequences, with what one layer needs while it runs; ``item`` of a number."""
        sizes = [(_state_size(m), len(_weight(m)) * (length + _reach(m))) for m in self.mixers.values()]
        # The states of one layer are whole until those to be kept are copied.
        whole = max(state for state, _ in sizes) * length
        return batch * item * (whole + sum(state * (length // spacing) + inputs for state, inputs in sizes))

    def copied(self, batch: int, item: int) -> int:
        """Bytes that one condition needs in one layer."""
        return batch * item * max(_state_size(m) + len(_weight(m)) * (_reach(m) + 1) for m in self.mixers.values())

    @contextlib.contextmanager
    def keeping(self, spacing: int, mask: Tensor | None) -> Iterator[None]:
        """Keep the states of the run inside. Mask (example, pos)."""
        self.spacing, self.mask = spacing, mask
        taps = {i: _Keep(mixer, spacing, mask) for i, mixer in self.mixers.items()}
        with self._running(lambda i: {"tap": taps[i], "attention_mask": mask}):
            yield
        self.kept = {i: (tap.inputs, tap.states) for i, tap in taps.items()}

    def beginning(self, layer: int, pos: int, rows: int) -> contextlib.AbstractContextManager[None]:
        """Begin the runs inside at a block and a position, for so many sequences: condition · example."""

        def begin(i: int) -> dict[str, Any]:
            inputs, states = self.kept[i]
            copies = rows // len(inputs)
            given: dict[str, Any] = {
                "attention_mask": None if self.mask is None else self.mask[:, pos:].repeat(copies, 1)
            }
            if pos > 0 and i >= layer:
                before = inputs[:, pos : pos + _reach(self.mixers[i])].transpose(1, 2)
                given["conv_state"] = before.repeat(copies, 1, 1)
                if states is not None:
                    state = states[:, pos // self.spacing - 1]
                    given["ssm_state"] = state.repeat(copies, *(1,) * (state.ndim - 1))
            return given

        return self._running(begin)

    @contextlib.contextmanager
    def _running(self, options: Callable[[int], dict[str, Any]]) -> Iterator[None]:
        def forward(i: int, mixer: Any) -> Callable[..., Tensor]:
            run = kind_of(mixer).run

            def call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                out: Tensor = run(mixer, hidden_states, **options(i))
                return out

            return call

        with contextlib.ExitStack() as stack:
            for i, mixer in self.mixers.items():
                stack.enter_context(swapped_forward(mixer, forward(i, mixer), here=this_thread()))
            yield


class _Keep(NullTap):
    """A tap that keeps a mixer's inputs of the convolution, and its states at every ``spacing``-th position."""

    inputs: Tensor
    states: Tensor | None = None

    def __init__(self, mixer: nn.Module, spacing: int, mask: Tensor | None) -> None:
        self.mixer: Any = mixer
        self.spacing, self.run = spacing, kind_of(mixer).run
        # Older versions of transformers mask Mamba's branch after it was projected.
        self.mask = mask if hasattr(mixer, "slow_forward") and self.run is mamba_mixer else None

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        if name.endswith("_state"):
            self.states = tensor[:, self.spacing - 1 :: self.spacing].clone()
        elif name == self._source():
            x = masked(self._convolved(tensor), self.mask)
            self.inputs = nn.functional.pad(x, (0, 0, _reach(self.mixer), 0))
        return tensor

    def wants(self, name: str) -> bool:
        return name in (self._source(), "hook_ssm_state", "hook_delta_state")

    def _source(self) -> str:
        return "hook_conv_in" if self.run is short_conv_mixer else "hook_in_proj"

    def _convolved(self, tensor: Tensor) -> Tensor:
        """What of a tap's tensor the convolution sees."""
        channels = len(_weight(self.mixer))
        # Mamba: [x, gate]; delta nets: [q with k and v, ...]; Mamba-2: [..., x with B and C, dt].
        first = self.run in (mamba_mixer, delta_mixer, short_conv_mixer)
        end = channels if first else tensor.shape[-1] - self.mixer.A_log.shape[0]
        return tensor[..., end - channels : end]


def _weight(mixer: Any) -> Tensor:
    """Of the convolution. (channel, 1, kernel size)"""
    conv = mixer.conv1d if hasattr(mixer, "conv1d") else mixer.conv
    weight: Tensor = conv.weight
    return weight


def _reach(mixer: Any) -> int:
    """Positions before its own that the convolution sees."""
    return _weight(mixer).shape[-1] - 1


def _state_size(mixer: Any) -> int:
    """Numbers of a state."""
    run = kind_of(mixer).run
    if run is short_conv_mixer:
        return 0
    if run is delta_mixer:
        return int(mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim)
    channels = mixer.D.shape[0] if not is_mamba2(mixer) else mixer.conv1d.weight.shape[0]
    size = mixer.A_log.shape[1] if mixer.A_log.ndim == 2 else int(getattr(mixer, "ssm_state_size", 128))
    return int(channels) * size

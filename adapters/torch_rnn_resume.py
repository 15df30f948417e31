"""Runs from the middle of a sequence through recurrent layers, with the states that the unedited run had there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from probelens.errors import ShapeError
from probelens.hooks.forwards import replaced_forward, submodule, swapped_forward, this_thread
from probelens.hooks.model import HookedModel
from probelens.kernels.rnn import rnn_forward
from probelens.kernels.rnn_layer import GATES, State, Weights, swap
from probelens.kernels.rnn_resume import KeptLayer
from probelens.running.sweep.resumer import Resumer


class RecurrentLayers(Resumer):
    """For models of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` layers in one direction, on a CPU.

    Each condition joins a pass at its own first changed position.
    """

    TOKENS: ClassVar[int] = 8192
    joins = True

    def __init__(self, model: HookedModel) -> None:
        super().__init__(model)
        self.layers: list[tuple[str, int]] = model.adapter.layers  # type: ignore[attr-defined]
        self.modules: dict[str, Any] = {path: submodule(model.module, path) for path, _ in self.layers}
        self.kept: list[KeptLayer] = []

    @classmethod
    def of(cls, model: HookedModel) -> RecurrentLayers | None:
        """None where a layer reads backwards too, runs a forward of the caller's, or is on a GPU."""
        made = cls(model)
        known = all(not m.bidirectional and replaced_forward(m, ("torch",)) is None for m in made.modules.values())
        # On a GPU steps one by one are slower than its fused kernel, and round otherwise.
        return made if known and model.cfg.device.type == "cpu" else None

    def holds(self, batch: int, length: int, spacing: int = 1) -> int:
        return batch * length * sum(_input(m, j) + _states(m) + _gates(m) for m, j in self._each())

    def copied(self, batch: int, length: int) -> int:
        return batch * length * max(2 * _input(m, j) + 2 * _states(m) + _gates(m) for m, j in self._each())

    def base(self, tokens: Tensor, names: Iterable[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        inner = []
        for i, (rnn, _) in enumerate(self._each()):
            states = ("rnn.hook_h", "rnn.hook_c") if rnn.mode == "LSTM" else ("rnn.hook_h",)
            inner.append([f"blocks.{i}.{name}" for name in ("hook_resid_pre", *states)])
        final, cache = self.forward(tokens, {*names, *(name for each in inner for name in each)})
        self.kept = []
        for (rnn, j), each in zip(self._each(), inner, strict=True):
            x, *after = (swap(cache[name]) for name in each)
            self.kept.append(KeptLayer(rnn.mode, Weights.of(rnn, j), x, tuple(after)))
        return final, cache

    def tail(self, resid: Tensor, layer: int, pos: int, until: int, begins: Sequence[int] | None = None) -> Tensor:
        copies = len(resid) // self.kept[0].x.shape[1]
        starts = [pos] * copies if begins is None else begins

        def running(path: str) -> Callable[..., Any]:
            rnn = self.modules[path]
            mine = {j: self.kept[i] for i, (owner, j) in enumerate(self.layers) if owner == path}

            def run_layer(j: int, x: Tensor, first: list[State]) -> tuple[Tensor, list[State]]:
                if x.shape[:2] != (resid.shape[1], len(resid)):
                    raise ShapeError(
                        f"a layer got {tuple(x.shape[:2])} positions and sequences of {tuple(resid.shape)}"
                    )
                out, last = mine[j].go_on(x, pos, starts, first[0])
                return out, [last]

            def forward(input: Any, hx: Any = None) -> Any:
                return rnn_forward(rnn, input, hx, run_layer=run_layer)

            # What starts or stops inside a stack takes the place of this forward.
            forward.run_layer = run_layer  # type: ignore[attr-defined]
            return forward

        with contextlib.ExitStack() as stack:
            for path, rnn in self.modules.items():
                stack.enter_context(swapped_forward(rnn, running(path), here=this_thread()))
            call = self.model.prepare(resid, start=layer)
            out: Tensor = self.model.run(call, start=layer, stop=until, resid=resid)
        return out

    def _each(self) -> list[tuple[Any, int]]:
        return [(self.modules[path], j) for path, j in self.layers]


def _input(rnn: Any, layer: int) -> int:
    """Bytes of a layer's input at one position."""
    return _item(rnn) * (rnn.input_size if layer == 0 else rnn.proj_size or rnn.hidden_size)


def _states(rnn: Any) -> int:
    return _item(rnn) * rnn.hidden_size * (2 if rnn.mode == "LSTM" else 1)


def _gates(rnn: Any) -> int:
    return _item(rnn) * rnn.hidden_size * max(1, len(GATES[rnn.mode]))


def _item(rnn: nn.Module) -> int:
    return next(rnn.parameters()).dtype.itemsize

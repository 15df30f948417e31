"""One layer and direction of a recurrent module: fused, step by step, or fused between edited steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from probelens.kernels.tap import Tap, segments, steps_to_offer

State = tuple[Tensor, ...]  # (h,) or (h, c), each (batch, hidden)
Fire = Callable[[str, Tensor], Tensor]
RunLayer = Callable[[int, Tensor, list[State]], tuple[Tensor, list[State]]]
"""From a layer's number, its input (pos, batch, d_input) and first states by direction to its output and last states."""

GATES = {"LSTM": "ifgo", "GRU": "rzn", "RNN_TANH": "", "RNN_RELU": ""}


def step_names(mode: str) -> list[str]:
    return [f"hook_gate_{g}" for g in GATES[mode]] + (["hook_c"] if mode == "LSTM" else []) + ["hook_h"]


def suffixes(module: Any) -> tuple[str, ...]:
    return ("", "_reverse") if module.bidirectional else ("",)


def swap(x: Tensor) -> Tensor:
    """(batch, pos, ...) -> (pos, batch, ...), and back."""
    return x.transpose(0, 1)


class Weights(NamedTuple):
    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    hr: Tensor | None

    @classmethod
    def of(cls, module: Any, layer: int, way: int = 0) -> Weights:
        """Those of one layer and direction of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``."""
        ih, hh, *rest = module.all_weights[layer * len(suffixes(module)) + way]
        hr = rest.pop() if module.proj_size else None
        bias_ih, bias_hh = rest or (None, None)
        return cls(ih, hh, bias_ih, bias_hh, hr)

    def of_input(self, x: Tensor) -> Tensor:
        return F.linear(x, self.ih, self.bias_ih)


def gates_of(mode: str, from_input: Tensor, h: Tensor, w: Weights, fire: Fire) -> tuple[Tensor, ...]:
    """Activated gates of one step or, with a leading axis, of many."""
    from_h = F.linear(h, w.hh, w.bias_hh)
    if mode == "LSTM":
        i, f, g, o = (from_input + from_h).chunk(4, dim=-1)
        return (
            fire("hook_gate_i", torch.sigmoid(i)),
            fire("hook_gate_f", torch.sigmoid(f)),
            fire("hook_gate_g", torch.tanh(g)),
            fire("hook_gate_o", torch.sigmoid(o)),
        )
    ri, zi, ni = from_input.chunk(3, dim=-1)
    rh, zh, nh = from_h.chunk(3, dim=-1)
    r, z = fire("hook_gate_r", torch.sigmoid(ri + rh)), fire("hook_gate_z", torch.sigmoid(zi + zh))
    return r, z, fire("hook_gate_n", torch.tanh(ni + r * nh))


def one_step(mode: str, from_input: Tensor, state: State, w: Weights, fire: Fire) -> State:
    h = state[0]
    if mode == "LSTM":
        i, f, g, o = gates_of(mode, from_input, h, w, fire)
        c = fire("hook_c", f * state[1] + i * g)
        h = o * torch.tanh(c)
        return fire("hook_h", h if w.hr is None else F.linear(h, w.hr)), c
    if mode == "GRU":
        _, z, n = gates_of(mode, from_input, h, w, fire)
        return (fire("hook_h", n + z * (h - n)),)
    total = from_input + F.linear(h, w.hh, w.bias_hh)
    return (fire("hook_h", torch.tanh(total) if mode == "RNN_TANH" else torch.relu(total)),)


@dataclass(frozen=True)
class Run:
    """One call of a module: what its layers share. Tensors are (pos, batch, ...) inside."""

    module: Any
    tap: Tap
    wanted: set[str]
    length: int
    offset: int
    lengths: Tensor | None  # of packed input, on the CPU
    packed: PackedSequence | None
    batched: bool

    def layer(self, layer: int, x: Tensor, first: list[State]) -> tuple[Tensor, list[State]]:
        """All directions of one layer: output (pos, batch, directions * hidden) and last states."""
        ways = [Weights.of(self.module, layer, way) for way in range(len(first))]
        edited = [[n for n in self._listening(layer, way) if self.tap.edits(n)] for way in range(len(first))]
        if not any(edited):
            out, last = self._fused(x, first, ways)
            outs = list(out.chunk(len(first), dim=-1))
        else:
            outs, last = [], []
            for way in range(len(first)):
                if edited[way]:
                    out, way_last = self._direction(layer, way, x, first[way], ways[way], edited[way])
                else:
                    # Torch has no kernel for the reverse direction alone.
                    both, both_last = self._fused(x, first, ways)
                    out, way_last = both.chunk(len(first), dim=-1)[way], both_last[way]
                outs.append(out)
                last.append(way_last)
            out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        for way in range(len(first)):
            if not edited[way]:
                self._read(layer, way, x, outs[way], first[way], ways[way])
        return out, last

    def _direction(
        self, layer: int, way: int, x: Tensor, state: State, w: Weights, edited: list[str]
    ) -> tuple[Tensor, State]:
        """One direction with edits: step by step, or fused between the edited steps."""
        backwards = way == 1
        x = x.flip(0) if backwards else x
        at: Iterable[int] | None = steps_to_offer(self.tap, edited, self.length, self.offset)
        readers = [n for n in self._listening(layer, way) if n not in edited and n[-2:] != "_h"]
        if at is not None and not readers and self.lengths is None:
            at = [self.length - 1 - p for p in at] if backwards else at
            out, state = self._between(layer, way, x, state, w, list(at))
        else:
            out, state = self._every_step(layer, way, x, state, w, at)
        out = out.flip(0) if backwards else out
        name = self._name(layer, "hook_h", way)
        if name in self.wanted and name not in edited:
            self.tap(name, swap(out), None, self.offset + self.length)
        return out, state

    def _between(
        self, layer: int, way: int, x: Tensor, state: State, w: Weights, at: list[int]
    ) -> tuple[Tensor, State]:
        parts = []
        for start, stop, edited in segments(at, self.length):
            fused_stop = stop - 1 if edited else stop
            if fused_stop > start:
                out, (state,) = self._fused(x[start:fused_stop], [state], [w])
                parts.append(out)
            if edited:
                fire = self._fire(layer, way, stop - 1, None, {})
                state = one_step(self.module.mode, w.of_input(x[stop - 1]), state, w, fire)
                parts.append(state[0][None])
        return torch.cat(parts), state

    def _every_step(
        self, layer: int, way: int, x: Tensor, state: State, w: Weights, at: Iterable[int] | None
    ) -> tuple[Tensor, State]:
        backwards = way == 1
        real = self._real(backwards, x)
        read: dict[str, list[Tensor]] = {}
        outs = []
        wanted_at = None if at is None else set(at)
        for step, from_input in enumerate(w.of_input(x).unbind(0)):
            row = None if real is None else real[step]
            pos = self.length - 1 - step if backwards else step
            offered = wanted_at is None or pos in wanted_at
            fire = self._fire(layer, way, step, row, read, editing=offered)
            new = one_step(self.module.mode, from_input, state, w, fire)
            if row is None:
                state = new
                outs.append(new[0])
            else:
                state = tuple(torch.where(row, n, s) for n, s in zip(new, state))
                outs.append(torch.where(row, new[0], torch.zeros_like(new[0])))
        for name, tensors in read.items():
            whole = torch.stack(tensors)
            self.tap(name, swap(whole.flip(0) if backwards else whole), None, self.offset + self.length)
        return torch.stack(outs), state

    def _fire(
        self, layer: int, way: int, step: int, row: Tensor | None, read: dict[str, list[Tensor]],
        *, editing: bool = True,
    ) -> Fire:  # fmt: skip
        pos = self.length - 1 - step if way == 1 else step

        def fire(point: str, tensor: Tensor) -> Tensor:
            name = self._name(layer, point, way)
            if name not in self.wanted:
                return tensor
            shown = tensor if row is None else torch.where(row, tensor, torch.zeros_like(tensor))
            if self.tap.edits(name):
                if not editing:
                    return tensor
                return self.tap(name, shown.clone(), self.offset + pos, self.offset + self.length)
            if point != "hook_h":
                read.setdefault(name, []).append(shown)
            return tensor

        return fire

    def _read(self, layer: int, way: int, x: Tensor, out: Tensor, state: State, w: Weights) -> None:
        """Show what readers want of a direction that ran fused."""
        names = self._listening(layer, way)
        if not names:
            return
        length = self.offset + self.length
        h_name = self._name(layer, "hook_h", way)
        if h_name in names:
            self.tap(h_name, swap(out), None, length)
        if names == [h_name]:
            return
        backwards = way == 1
        x, out = (x.flip(0), out.flip(0)) if backwards else (x, out)
        h = torch.cat([state[0][None], out[:-1]])
        real = self._real(backwards, x)
        if real is not None:
            before = torch.cat([torch.zeros_like(real[:1]), real[:-1]])
            h = torch.where(before, h, state[0])

        def show(point: str, tensor: Tensor) -> Tensor:
            name = self._name(layer, point, way)
            if name in names:
                shown = tensor if real is None else torch.where(real, tensor, torch.zeros_like(tensor))
                self.tap(name, swap(shown.flip(0) if backwards else shown), None, length)
            return tensor

        gates = gates_of(self.module.mode, w.of_input(x), h, w, show)
        if self._name(layer, "hook_c", way) in names:
            i, f, g, _ = gates
            c, cells = state[1], []
            for step, (kept, new) in enumerate(zip(f.unbind(0), (i * g).unbind(0))):
                now = torch.addcmul(new, kept, c)
                c = now if real is None else torch.where(real[step], now, c)
                cells.append(now)
            show("hook_c", torch.stack(cells))

    def _fused(self, x: Tensor, first: list[State], ways: list[Weights]) -> tuple[Tensor, list[State]]:
        """Torch's own kernel on some steps of one layer, in one or both directions."""
        flat = [tensor for w in ways for tensor in w if tensor is not None]
        state = [torch.stack(tensors) for tensors in zip(*first)]
        kernel = getattr(torch._VF, self.module.mode.lower())
        options = (self.module.bias, 1, 0.0, self.module.training, len(ways) == 2)
        packed = None
        if self.lengths is None:
            data: tuple[Any, ...] = (x, self._hx(state), flat, *options, False)
        else:
            packed = pack_padded_sequence(x, self.lengths, enforce_sorted=False)
            assert packed.sorted_indices is not None
            state = [s.index_select(1, packed.sorted_indices) for s in state]
            data = (packed.data, packed.batch_sizes, self._hx(state), flat, *options)
        with warnings.catch_warnings() if x.is_cuda else contextlib.nullcontext():
            if x.is_cuda:
                # cuDNN copies one layer's weights out of the module's single buffer, and says so each time.
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
            out, *last = kernel(*data)
        if packed is not None and packed.unsorted_indices is not None:
            out = PackedSequence(out, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            out = pad_packed_sequence(out, total_length=self.length)[0]
            last = [s.index_select(1, packed.unsorted_indices) for s in last]
        return out, [tuple(s[way] for s in last) for way in range(len(ways))]

    def _hx(self, state: list[Tensor]) -> Any:
        return tuple(state) if self.module.mode == "LSTM" else state[0]

    def _listening(self, layer: int, way: int) -> list[str]:
        names = (self._name(layer, point, way) for point in step_names(self.module.mode))
        return [name for name in names if name in self.wanted]

    def _name(self, layer: int, point: str, way: int) -> str:
        return f"{layer}.{point}{suffixes(self.module)[way]}"

    def _real(self, backwards: bool, x: Tensor) -> Tensor | None:
        """Which rows have not ended at each step, in the order of processing. (pos, batch, 1)"""
        if self.lengths is None:
            return None
        steps = torch.arange(self.length, device=x.device)[:, None]
        real = (steps < self.lengths.to(x.device))[..., None]
        return real.flip(0) if backwards else real

    def pack(self, x: Tensor) -> Any:
        """The output as the module gives it, from (pos, batch, hidden)."""
        if self.packed is None:
            if not self.batched:
                return x[:, 0]
            return swap(x) if self.module.batch_first else x
        assert self.lengths is not None
        order = self.packed.sorted_indices
        x = x if order is None else x.index_select(1, order)
        lengths = self.lengths if order is None else self.lengths[order.cpu()]
        data = pack_padded_sequence(x, lengths, enforce_sorted=True).data
        return PackedSequence(data, self.packed.batch_sizes, order, self.packed.unsorted_indices)

    def final(self, state: list[Tensor]) -> Any:
        return self._hx([s if self.batched else s[:, 0] for s in state])

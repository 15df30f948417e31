"""Reference forwards of torch's recurrent modules, with every layer, direction, gate and state in reach.

A stacked ``nn.LSTM`` is one fused kernel that shows its top layer only. Here it runs layer by layer, still
fused, and step by step only where a state or gate may be edited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from probelens.errors import InputError, ShapeError
from probelens.kernels.rnn_layer import Run, RunLayer, Weights, one_step, step_names, suffixes, swap
from probelens.kernels.tap import KernelPoint, NullTap, Tap, offer

__all__ = ["KernelPoint", "NullTap", "Tap", "cell_forward", "cell_points", "rnn_forward", "rnn_points"]

_NOTES = {
    "i": "input gate, after its sigmoid",
    "f": "forget gate, after its sigmoid",
    "g": "cell candidate, after its tanh",
    "o": "output gate, after its sigmoid",
    "r": "reset gate, after its sigmoid",
    "z": "update gate, after its sigmoid: the share of the old state that stays",
    "n": "candidate, after its tanh",
    "c": "cell state after the step; an edit changes this step's h and every later step",
    "h": "hidden state after the step; an edit changes this step's output and every later step",
}


def cell_points(module: nn.Module) -> dict[str, KernelPoint]:
    """The points of ``cell_forward`` for a cell, in the order in which they are reached.

    Args:
        module: The cell.

    Returns:
        Point by name.

    Raises:
        InputError: Not an LSTMCell, GRUCell or RNNCell.
    """
    steps = {name: KernelPoint(("batch", "d_hidden"), _NOTES[name[-1]]) for name in step_names(_mode(module))}
    return {"hook_in": KernelPoint(("batch", "d_input"), "input of the step"), **steps}


def rnn_points(module: nn.Module) -> dict[str, KernelPoint]:
    """The points of ``rnn_forward`` for a module: ``"{layer}.hook_in"`` and so on, in order.

    Points of the reverse direction end in ``_reverse``. State points and gates are ``step`` points.

    Args:
        module: The LSTM, GRU or RNN.

    Returns:
        Point by name.

    Raises:
        InputError: Not an LSTM, GRU or RNN.

    Examples:
        >>> [name for name in rnn_points(nn.GRU(2, 3))]
        ['0.hook_in', '0.hook_gate_r', '0.hook_gate_z', '0.hook_gate_n', '0.hook_h', '0.hook_out']
    """
    mode = _mode(module)
    m: Any = module
    points = {}
    for layer in range(m.num_layers):
        note = "input of the layer" if layer == 0 else "output of the layer below, after dropout"
        points[f"{layer}.hook_in"] = KernelPoint(("batch", "pos", "d_input"), note)
        for suffix in suffixes(m):
            for name in step_names(mode):
                axis = "d_out" if name == "hook_h" and m.proj_size else "d_hidden"
                points[f"{layer}.{name}{suffix}"] = KernelPoint(("batch", "pos", axis), _NOTES[name[-1]], step=True)
        note = "h of every step, directions side by side; the final states don't see an edit here"
        points[f"{layer}.hook_out"] = KernelPoint(("batch", "pos", "d_out"), note)
    return points


def rnn_forward(
    module: nn.Module,
    input: Tensor | PackedSequence,
    hx: Any = None,
    tap: Tap | None = None,
    *,
    offset: int = 0,
    start: tuple[int, Tensor] | None = None,
    run_layer: RunLayer | None = None,
) -> tuple[Any, Any]:
    """The forward of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, with a tap at every point of ``rnn_points``.

    Where nobody listens the module's own forward runs. Where ``hook_in``, ``hook_out`` or reading only is wanted,
    each layer is one call of the fused kernel, and gates and cell states are computed from its output for all steps
    at once. A layer and direction runs step by step where a state or a gate may be edited; if that is at some
    positions only, the fused kernel runs between them (not for packed input).

    Args:
        module: Any configuration: layers, directions, bias, batch_first, dropout, proj_size.
        input: As the module takes it, batched, unbatched or packed. Taps get (batch, pos, ...) always; packed input
            is padded for them in its original order, with zeros, and edits of padding are dropped.
        hx: Initial state as the module takes it; zero if None.
        tap: Listens and edits; None for nobody.
        offset: Position of the first step in the whole sequence, for taps.
        start: A layer to begin at and its input (batch, pos, d_input). Layers before it don't run, only the layout
            of ``input`` is used, and their final states stay what they were.
        run_layer: What runs a layer in place of the fused kernel: from its number, its input (pos, batch, d_input) and
            its first states to its output (pos, batch, d_out) and last states. No tap sees what lies inside the layer.

    Returns:
        What the module returns: output, and h_n or (h_n, c_n).

    Raises:
        InputError: Not an LSTM, GRU or RNN; ``run_layer`` with packed input.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> lstm = nn.LSTM(2, 3, num_layers=2)
        >>> x = torch.randn(5, 1, 2)
        >>> out, (h, c) = rnn_forward(lstm, x)
        >>> torch.equal(out, lstm(x)[0])
        True
    """
    tap = tap if tap is not None else NullTap()
    wanted = {name for name in rnn_points(module) if tap.wants(name)}
    if not wanted and start is None and run_layer is None:
        return _kind(module).forward(module, input, hx)  # not the instance's, which may be the one that called us
    m: Any = module
    run, x, state = _unpack(m, tap, wanted, input, hx, offset)
    if run_layer is not None and run.packed is not None:
        raise InputError("packed input is run by the fused kernel: pad it, or leave run_layer out")
    ways = len(suffixes(m))
    lowest, x = (0, x) if start is None else (start[0], swap(start[1]))
    finals = [list(s[: lowest * ways]) for s in state]
    for layer in range(lowest, m.num_layers):
        x = swap(offer(tap, f"{layer}.hook_in", swap(x)))
        first = [tuple(s[layer * ways + way] for s in state) for way in range(ways)]
        out, last = (run_layer or run.layer)(layer, x, first)
        for way_last in last:
            for collected, tensor in zip(finals, way_last):
                collected.append(tensor)
        x = swap(offer(tap, f"{layer}.hook_out", swap(out)))
        if m.dropout and layer < m.num_layers - 1:
            x = F.dropout(x, m.dropout, m.training)
    return run.pack(x), run.final([torch.stack(tensors) for tensors in finals])


def cell_forward(
    module: nn.Module,
    input: Tensor,
    hx: Any = None,
    tap: Tap | None = None,
    *,
    pos: int | None = None,
    length: int | None = None,
) -> Any:
    """The forward of an ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``, with taps at ``cell_points``.

    Args:
        module: The cell.
        input: (batch, d_input) or (d_input,)
        hx: State as the cell takes it; zero if None.
        tap: Listens and edits; None for nobody. Taps get (batch, ...) always.
        pos: Which step of the caller's loop this is, for taps.
        length: How many steps there are, for taps.

    Returns:
        What the cell returns: h, or (h, c).

    Raises:
        InputError: Not a cell.
        ShapeError: An input that is neither (batch, d_input) nor (d_input,).

    Examples:
        >>> cell, x = nn.GRUCell(2, 3), torch.ones(1, 2)
        >>> torch.equal(cell_forward(cell, x), cell(x))
        True
    """
    tap = tap if tap is not None else NullTap()
    if not any(tap.wants(name) for name in cell_points(module)):
        return _kind(module).forward(module, input, hx)
    m: Any = module
    if input.ndim not in (1, 2):
        raise ShapeError(f"a cell takes (batch, d_input) or (d_input,), got {tuple(input.shape)}")
    unbatched = input.ndim == 1
    x = input[None] if unbatched else input
    mode = _mode(m)
    zeros = (x.new_zeros(x.shape[0], m.hidden_size),) * (2 if mode == "LSTM" else 1)
    given = zeros if hx is None else hx if mode == "LSTM" else (hx,)
    state = tuple(s[None] if unbatched and s.ndim == 1 else s for s in given)

    def fire(name: str, tensor: Tensor) -> Tensor:
        return tap(name, tensor.clone() if tap.edits(name) else tensor, pos, length)

    weights = Weights(m.weight_ih, m.weight_hh, m.bias_ih, m.bias_hh, None)
    new = one_step(mode, weights.of_input(fire("hook_in", x)), state, weights, fire)
    new = tuple(s[0] for s in new) if unbatched else new
    return new if mode == "LSTM" else new[0]


def _unpack(
    m: Any, tap: Tap, wanted: set[str], input: Tensor | PackedSequence, hx: Any, offset: int
) -> tuple[Run, Tensor, list[Tensor]]:
    packed, lengths, batched = None, None, True
    if isinstance(input, PackedSequence):
        packed = input
        x, lengths = pad_packed_sequence(packed)
    else:
        if input.ndim not in (2, 3):
            raise ShapeError(f"{type(m).__name__} takes 2 or 3 axes, got {tuple(input.shape)}")
        batched = input.ndim == 3
        x = input[:, None] if not batched else swap(input) if m.batch_first else input
    rows = m.num_layers * len(suffixes(m))
    width = m.proj_size or m.hidden_size
    widths = [width, m.hidden_size] if m.mode == "LSTM" else [width]
    zeros = tuple(x.new_zeros(rows, x.shape[1], n) for n in widths)
    given = zeros if hx is None else hx if m.mode == "LSTM" else (hx,)
    state = [s[:, None] if not batched and s.ndim == 2 else s for s in given]
    for s, zero, name in zip(state, zeros, ("h_0", "c_0")):
        if s.shape != zero.shape:
            raise ShapeError(f"{name} has shape {tuple(s.shape)}, this input needs {tuple(zero.shape)}")
    if x.shape[-1] != m.input_size:
        raise ShapeError(f"input has width {x.shape[-1]}, {type(m).__name__} takes {m.input_size}")
    return Run(m, tap, wanted, x.shape[0], offset, lengths, packed, batched), x, state


def _mode(module: Any) -> str:
    kind = _kind(module).__name__
    return f"RNN_{module.nonlinearity.upper()}" if kind.startswith("RNN") else kind.removesuffix("Cell")


def _kind(module: nn.Module) -> Any:
    for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        if isinstance(module, kind):
            return kind
    raise InputError(
        f"{type(module).__name__} isn't a recurrent module of torch. "
        "Allowed: nn.LSTM, nn.GRU, nn.RNN; nn.LSTMCell, nn.GRUCell, nn.RNNCell."
    )

"""Recurrent forwards equal torch's in every configuration, and edits of gates and states reach the future."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_taps import Recorder, halve, same, zero
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from probelens.errors import InputError, ShapeError
from probelens.kernels import rnn_layer as _rnn_run
from probelens.kernels.rnn import cell_forward, cell_points, rnn_forward, rnn_points

LENGTH, BATCH, WIDTH, HIDDEN = 7, 3, 4, 5
MODES = ["LSTM", "GRU", "tanh", "relu", "LSTM proj"]
LENGTHS = [4, 7, 2]

# torch says so of its own kernel, whoever calls it
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def build(mode: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    if mode in ("tanh", "relu"):
        module: nn.Module = nn.RNN(WIDTH, HIDDEN, nonlinearity=mode, **options)
    else:
        name, _, proj = mode.partition(" ")
        module = getattr(nn, name)(WIDTH, HIDDEN, **({"proj_size": 3} if proj else {}), **options)
    return module.to(dtype).eval()


def configurations() -> list[Any]:
    """Modes with every number of layers and directions; bias and batch_first turned around among them."""
    found = []
    for n, (mode, layers, both) in enumerate(itertools.product(MODES, (1, 2), (False, True))):
        options = {"num_layers": layers, "bidirectional": both, "bias": n % 3 != 0, "batch_first": n % 2 == 0}
        found.append(pytest.param(mode, options, id=f"{mode}-{layers}-{'both' if both else 'one'}"))
    return found


def inputs_for(module: Any, kind: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """An input and an initial state as the module takes them."""
    g = torch.Generator().manual_seed(1)
    batch = () if kind == "unbatched" else (BATCH,)
    x: Any = torch.randn(*batch, LENGTH, WIDTH, generator=g).to(dtype)
    if kind.startswith("packed"):
        lengths = sorted(LENGTHS, reverse=True) if kind == "packed sorted" else LENGTHS
        x = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted="sorted" in kind)
    elif batch and not module.batch_first:
        x = x.transpose(0, 1)
    rows = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(rows, *batch, module.proj_size or HIDDEN, generator=g).to(dtype)
    c = torch.randn(rows, *batch, HIDDEN, generator=g).to(dtype)
    return x, (h, c) if module.mode == "LSTM" else h


def flat(result: Any) -> list[Tensor]:
    """Every tensor of an output, a packed one with its indices."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in flat(part)] if result is not None else []


def assert_same(found: Any, expected: Any, atol: float) -> None:
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for left, right in zip(found, expected):
        torch.testing.assert_close(left, right, atol=atol, rtol=0)


def step_points(module: Any) -> list[str]:
    return [name for name, point in rnn_points(module).items() if point.step]


def taps_for(module: Any) -> dict[str, Recorder]:
    """Every way through the code that must not change a result."""
    points, steps = rnn_points(module), step_points(module)
    return {
        "reading layers": Recorder(read=[n for n in points if n not in steps]),
        "reading all": Recorder(read=points),
        "editing all": Recorder(edit=dict.fromkeys(points, same)),
        "editing at steps": Recorder(edit=dict.fromkeys(points, same), at=[0, 3, LENGTH - 1]),
        "editing h, reading the rest": Recorder(
            read=[n for n in points if "hook_h" not in n],
            edit=dict.fromkeys((n for n in points if "hook_h" in n), same),
            at=[2],
        ),
        "editing one direction only": Recorder(
            read=[n for n in points if not n.endswith("_reverse")],
            edit=dict.fromkeys((n for n in points if n.endswith("_reverse")), same),
            at=[2],
        ),
    }


class TestEqualToTorch:
    @pytest.mark.parametrize("kind", ["batched", "unbatched", "packed", "packed sorted"])
    @pytest.mark.parametrize(("mode", "options"), configurations())
    def test_every_way_through_gives_the_same_outputs_and_states(
        self, mode: str, options: dict[str, Any], kind: str
    ) -> None:
        module = build(mode, **options)
        x, hx = inputs_for(module, kind)
        with torch.no_grad():
            expected = module(x, hx)
            for name, tap in taps_for(module).items():
                result = rnn_forward(module, x, hx, tap)
                try:
                    assert_same(result, expected, atol=1e-12)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error
                assert isinstance(result[0], PackedSequence) == kind.startswith("packed")
            tap = Recorder(edit=dict.fromkeys(rnn_points(module), same))
            assert_same(rnn_forward(module, x, None, tap), module(x), atol=1e-12)

    @pytest.mark.parametrize("mode", MODES)
    def test_float32_is_within_rounding(self, mode: str) -> None:
        module = build(mode, torch.float32, num_layers=2, bidirectional=True)
        x, hx = inputs_for(module, "batched", torch.float32)
        with torch.no_grad():
            for tap in taps_for(module).values():
                assert_same(rnn_forward(module, x, hx, tap), module(x, hx), atol=1e-6)

    @pytest.mark.parametrize("mode", ["LSTM", "GRU", "tanh"])
    def test_bfloat16_is_within_rounding(self, mode: str) -> None:
        module = build(mode, torch.bfloat16, num_layers=2)
        x, hx = inputs_for(module, "batched", torch.bfloat16)
        with torch.no_grad():
            for tap in taps_for(module).values():
                assert_same(rnn_forward(module, x, hx, tap), module(x, hx), atol=2e-2)

    @pytest.mark.parametrize("kind", ["batched", "packed"])
    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_equal_those_of_the_module(self, mode: str, kind: str) -> None:
        module = build(mode, num_layers=2, bidirectional=True)

        def gradients(tap: Recorder | None) -> list[Tensor]:
            module.zero_grad()
            x, hx = inputs_for(module, kind)
            leaf = x.data if kind == "packed" else x
            leaf.requires_grad_()
            out, last = module(x, hx) if tap is None else rnn_forward(module, x, hx, tap)
            data = out.data if kind == "packed" else out
            (data.square().sum() + sum(t.sin().sum() for t in flat(last))).backward()
            return [leaf.grad, *(p.grad for p in module.parameters())]

        expected = gradients(None)
        assert all(g.abs().max() > 0 for g in expected)
        for tap in taps_for(module).values():
            for found, wanted in zip(gradients(tap), expected):
                torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)

    def test_dropout_between_layers_draws_the_same_numbers(self) -> None:
        module = build("LSTM", num_layers=3, dropout=0.5, batch_first=True).train()
        x, hx = inputs_for(module, "batched")
        tap = Recorder(read=rnn_points(module))
        results = []
        for forward in (module, lambda *a: rnn_forward(module, *a, tap)):
            torch.manual_seed(3)
            results.append(forward(x, hx))
        assert_same(results[1], results[0], atol=1e-12)
        dropped = tap.whole["1.hook_in"] == 0
        assert dropped.any()
        assert not (tap.whole["0.hook_out"] == 0).any()

    def test_without_listeners_the_native_kernel_runs_bit_for_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = build("LSTM", num_layers=2)
        x, hx = inputs_for(module, "batched")
        module.__dict__["forward"] = lambda *a: pytest.fail("called the replaced forward")
        try:
            result = rnn_forward(module, x, hx)
        finally:
            del module.__dict__["forward"]
        assert_same(result, module(x, hx), atol=0)

    def test_module_is_left_as_it_was(self) -> None:
        module = build("GRU", num_layers=2)
        before = {n: p.clone() for n, p in module.state_dict().items()}
        x, hx = inputs_for(module, "batched")
        rnn_forward(module, x, hx, Recorder(edit=dict.fromkeys(rnn_points(module), halve)))
        assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items())


class TestReading:
    @pytest.mark.parametrize("kind", ["batched", "packed"])
    @pytest.mark.parametrize("mode", MODES)
    def test_read_at_once_equals_offered_step_by_step(self, mode: str, kind: str) -> None:
        module = build(mode, num_layers=2, bidirectional=True)
        x, hx = inputs_for(module, kind)
        points = rnn_points(module)
        read, offered = Recorder(read=points), Recorder(edit=dict.fromkeys(points, same))
        rnn_forward(module, x, hx, read)
        rnn_forward(module, x, hx, offered)
        assert set(read.whole) == set(points)
        for name, point in points.items():
            left, right = read.trajectory(name), offered.trajectory(name)
            assert left.shape[:2] == (BATCH, LENGTH)
            assert left.ndim == len(point.axes)
            torch.testing.assert_close(left, right, atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}")

    def test_reading_and_layer_points_never_run_step_by_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_rnn_run, "one_step", lambda *a: pytest.fail("ran step by step"))
        module = build("LSTM", num_layers=2, bidirectional=True)
        x, hx = inputs_for(module, "batched")
        edits = {n: halve for n in rnn_points(module) if n.endswith(("hook_in", "hook_out"))}
        rnn_forward(module, x, hx, Recorder(read=step_points(module), edit=edits))

    def test_positions_run_fused_between(self, monkeypatch: pytest.MonkeyPatch) -> None:
        native, count = _rnn_run.one_step, []
        monkeypatch.setattr(_rnn_run, "one_step", lambda *a: (count.append(1), native(*a))[1])
        module = build("LSTM", num_layers=2, bidirectional=True)
        x, hx = inputs_for(module, "batched")
        rnn_forward(module, x, hx, Recorder(edit={"1.hook_c_reverse": halve}, at=[1, 4]))
        assert len(count) == 2

    def test_lstm_points_are_what_a_cell_computes(self) -> None:
        """Gates and states of each layer against the textbook formulas on the cell's own parameters."""
        module = build("LSTM", num_layers=2, batch_first=True)
        x, (h0, c0) = inputs_for(module, "batched")
        tap = Recorder(read=rnn_points(module))
        rnn_forward(module, x, (h0, c0), tap)
        for layer in range(2):
            w_ih, w_hh, b_ih, b_hh = module.all_weights[layer]
            h, c = h0[layer], c0[layer]
            for t in range(LENGTH):
                pre = tap.whole[f"{layer}.hook_in"][:, t] @ w_ih.T + b_ih + h @ w_hh.T + b_hh
                i, f, g, o = pre.split(HIDDEN, dim=-1)
                i, f, o = (1 / (1 + torch.exp(-v)) for v in (i, f, o))
                c = f * c + i * torch.tanh(g)
                h = o * torch.tanh(c)
                expected = {"gate_i": i, "gate_f": f, "gate_g": torch.tanh(g), "gate_o": o, "c": c, "h": h}
                for name, value in expected.items():
                    found = tap.whole[f"{layer}.hook_{name}"][:, t]
                    torch.testing.assert_close(found, value, atol=1e-12, rtol=0)

    def test_gru_points_rebuild_the_state(self) -> None:
        module = build("GRU", batch_first=True)
        x, h0 = inputs_for(module, "batched")
        tap = Recorder(read=rnn_points(module))
        rnn_forward(module, x, h0, tap)
        h, z, n = (tap.whole[f"0.hook_{k}"] for k in ("h", "gate_z", "gate_n"))
        before = torch.cat([h0[0][:, None], h[:, :-1]], dim=1)
        torch.testing.assert_close(h, (1 - z) * n + z * before, atol=1e-12, rtol=0)
        assert not torch.equal(tap.whole["0.hook_gate_r"], z)

    def test_padding_reads_as_zero_and_each_sequence_as_if_alone(self) -> None:
        module = build("LSTM", num_layers=2, bidirectional=True, batch_first=True)
        packed, hx = inputs_for(module, "packed")
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        tap = Recorder(read=rnn_points(module))
        rnn_forward(module, packed, hx, tap)
        for row, length in enumerate(lengths.tolist()):
            alone = Recorder(read=rnn_points(module))
            rnn_forward(module, padded[row, :length], tuple(s[:, row] for s in hx), alone)
            for name, tensor in tap.whole.items():
                torch.testing.assert_close(tensor[row, :length], alone.whole[name][0], atol=1e-12, rtol=0)
                assert not tensor[row, length:].any()

    def test_gradient_reaches_read_states(self) -> None:
        module = build("LSTM", batch_first=True)
        x, hx = inputs_for(module, "batched")
        seen = []

        class Reader(Recorder):
            def __call__(self, name: str, tensor: Tensor, *args: Any) -> Tensor:
                seen.extend([tensor] if self.wants(name) else [])
                return tensor

        rnn_forward(module, x.requires_grad_(), hx, Reader(read=["0.hook_c"]))
        seen[0][:, 3].sum().backward()
        reached = x.grad.abs().amax(dim=(0, 2)) > 0
        assert reached.tolist() == [True] * 4 + [False] * 3


def unrolled(module: Any, x: Tensor, hx: Any, layer: int, step: int, name: str, *, reverse: bool = False) -> Tensor:
    """The module's output from torch's own cells, with one state halved by hand. (batch, pos, hidden)"""
    cell_type = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN_TANH": nn.RNNCell}[module.mode]
    ways = 2 if module.bidirectional else 1
    order = list(range(x.shape[1]))
    for current in range(module.num_layers):
        outs = []
        for way in range(ways):
            row = current * ways + way
            cell = cell_type(x.shape[-1], HIDDEN).to(x.dtype)
            with torch.no_grad():
                for parameter, value in zip(cell.parameters(), module.all_weights[row]):
                    parameter.copy_(value)
            state = [s[row] for s in hx] if module.mode == "LSTM" else [hx[row]]
            out = [torch.empty(0)] * x.shape[1]
            for t in order if way == 0 else reversed(order):
                before = state[0]
                new = cell(x[:, t], tuple(state) if module.mode == "LSTM" else state[0])
                state = list(new) if module.mode == "LSTM" else [new]
                if current == layer and t == step and way == int(reverse):
                    if name == "h":
                        state[0] = halve(state[0], t)
                    else:
                        # this step's h is read from the edited c, through the same output gate
                        state[1] = halve(state[1], t)
                        pre = x[:, t] @ cell.weight_ih.T + cell.bias_ih + before @ cell.weight_hh.T + cell.bias_hh
                        state[0] = torch.sigmoid(pre[:, 3 * HIDDEN :]) * torch.tanh(state[1])
                out[t] = state[0]
            outs.append(torch.stack(out, dim=1))
        x = torch.cat(outs, dim=-1)
    return x


class TestEdits:
    @pytest.mark.parametrize("at", [[3], None], ids=["at", "every step"])
    @pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize(("mode", "name"), [("LSTM", "h"), ("LSTM", "c"), ("GRU", "h"), ("tanh", "h")])
    def test_edited_state_equals_hand_unrolled_cells(
        self, mode: str, name: str, layer: int, both: bool, at: list[int] | None
    ) -> None:
        module = build(mode, num_layers=2, bidirectional=both, batch_first=True)
        x, hx = inputs_for(module, "batched")

        def edit(state: Tensor, pos: int | None) -> Tensor | None:
            return halve(state, pos) if pos == 3 else None

        with torch.no_grad():
            plain = module(x, hx)[0]
            for reverse in (False, True) if both else (False,):
                point = f"{layer}.hook_{name}" + ("_reverse" if reverse else "")
                edited = rnn_forward(module, x, hx, Recorder(edit={point: edit}, at=at))[0]
                expected = unrolled(module, x, hx, layer, 3, name, reverse=reverse)
                torch.testing.assert_close(edited, expected, atol=1e-12, rtol=0)
                assert (edited - plain).abs().max() > 1e-3

    @pytest.mark.parametrize("name", ["gate_i", "gate_f", "gate_g", "gate_o", "c", "h"])
    def test_edit_reaches_its_step_and_later_ones_only(self, name: str) -> None:
        module = build("LSTM", batch_first=True, bidirectional=True)
        x, hx = inputs_for(module, "batched")
        plain = module(x, hx)[0]
        for suffix, half, expected in (
            ("", slice(0, HIDDEN), [False] * 3 + [True] * 4),
            ("_reverse", slice(HIDDEN, None), [True] * 4 + [False] * 3),
        ):
            tap = Recorder(edit={f"0.hook_{name}{suffix}": halve}, at=[3])
            edited = rnn_forward(module, x, hx, tap)[0]
            changed = (edited - plain).abs().amax(dim=0) > 1e-9
            assert changed[:, half].any(-1).tolist() == expected
            other = slice(HIDDEN, None) if suffix == "" else slice(0, HIDDEN)
            assert not changed[:, other].any()

    def test_closed_forget_gate_equals_a_fresh_cell_state(self) -> None:
        module = build("LSTM", batch_first=True)
        x, hx = inputs_for(module, "batched")
        forgotten = rnn_forward(module, x, hx, Recorder(edit={"0.hook_gate_f": zero}, at=[3]))
        first, (h, c) = module(x[:, :3], hx)
        second, last = module(x[:, 3:], (h, torch.zeros_like(c)))
        assert_same(forgotten, (torch.cat([first, second], dim=1), last), atol=1e-12)

    def test_open_update_gate_freezes_a_gru(self) -> None:
        module = build("GRU", batch_first=True)
        x, h0 = inputs_for(module, "batched")
        out, last = rnn_forward(module, x, h0, Recorder(edit={"0.hook_gate_z": lambda t, pos: t * 0 + 1}))
        torch.testing.assert_close(out, h0[0][:, None].expand_as(out), atol=1e-12, rtol=0)
        assert_same(last, h0, atol=1e-12)

    def test_final_state_sees_state_edits_and_not_output_edits(self) -> None:
        module = build("GRU", num_layers=2, batch_first=True)
        x, h0 = inputs_for(module, "batched")
        native = module(x, h0)
        out, last = rnn_forward(module, x, h0, Recorder(edit={"1.hook_h": zero}, at=[LENGTH - 1]))
        assert not out[:, -1].any()
        assert not last[1].any()
        out, last = rnn_forward(module, x, h0, Recorder(edit={"1.hook_out": zero}))
        assert not out.any()
        assert_same(last, native[1], atol=1e-12)

    def test_edited_layer_input_is_what_the_layer_runs_on(self) -> None:
        module = build("LSTM", num_layers=2, batch_first=True)
        x, _ = inputs_for(module, "batched")
        out, _ = rnn_forward(module, x, None, Recorder(edit={"0.hook_in": lambda t, pos: t.flip(0)}))
        torch.testing.assert_close(out, module(x.flip(0))[0], atol=1e-12, rtol=0)

    @pytest.mark.parametrize("name", ["0.hook_h", "0.hook_c_reverse"])
    def test_edits_of_packed_sequences_equal_edits_of_each_alone(self, name: str) -> None:
        module = build("LSTM", num_layers=2, bidirectional=True, batch_first=True)
        packed, hx = inputs_for(module, "packed")
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        result, last = rnn_forward(module, packed, hx, Recorder(edit={name: halve}, at=[1, 5]))
        out, _ = pad_packed_sequence(result, batch_first=True)
        for row, length in enumerate(lengths.tolist()):
            at = [p for p in (1, 5) if p < length]
            alone, alone_last = rnn_forward(
                module, padded[row, :length], tuple(s[:, row] for s in hx), Recorder(edit={name: halve}, at=at)
            )
            torch.testing.assert_close(out[row, :length], alone, atol=1e-12, rtol=0)
            for left, right in zip(last, alone_last):
                torch.testing.assert_close(left[:, row], right, atol=1e-12, rtol=0)

    @pytest.mark.parametrize("at", [[2, 5], None])
    def test_in_place_edits_work_and_gradients_flow(self, at: list[int] | None) -> None:
        module = build("LSTM", num_layers=2, batch_first=True)
        grads = []

        def in_place(tensor: Tensor, pos: int | None) -> None:
            tensor[:, 0] *= 0.5

        def out_of_place(tensor: Tensor, pos: int | None) -> Tensor:
            return torch.cat([tensor[:, :1] * 0.5, tensor[:, 1:]], dim=1)

        for edit in (in_place, out_of_place):
            x, hx = inputs_for(module, "batched")
            tap = Recorder(edit=dict.fromkeys(rnn_points(module), edit), at=at)
            rnn_forward(module, x.requires_grad_(), hx, tap)[0].square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[0], grads[1], atol=1e-12, rtol=0)

    def test_true_positions_with_an_offset(self) -> None:
        module = build("GRU", batch_first=True, bidirectional=True)
        x, hx = inputs_for(module, "batched")
        tap = Recorder(edit={"0.hook_h": same, "0.hook_h_reverse": same}, at=[4, 12])
        rnn_forward(module, x, hx, tap, offset=10)
        assert tap.calls == [("0.hook_h", 12), ("0.hook_h_reverse", 12)]


class TestCells:
    CELLS = ("LSTMCell", "GRUCell", "RNNCell")

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("kind", CELLS)
    def test_equals_the_cell(self, kind: str, bias: bool) -> None:
        torch.manual_seed(0)
        cell = getattr(nn, kind)(WIDTH, HIDDEN, bias=bias).double()
        x, h = torch.randn(BATCH, WIDTH).double(), torch.randn(BATCH, HIDDEN).double()
        hx: Any = (h, h.flip(0)) if kind == "LSTMCell" else h
        for tap in (None, Recorder(edit=dict.fromkeys(cell_points(cell), same))):
            assert_same(cell_forward(cell, x, hx, tap), cell(x, hx), atol=1e-13)
        tap = Recorder(read=cell_points(cell))
        assert_same(cell_forward(cell, x[0], None, tap), cell(x[0]), atol=1e-13)
        assert set(tap.whole) == set(cell_points(cell))
        assert all(t.shape[0] == 1 for t in tap.whole.values())

    def test_relu_cell(self) -> None:
        cell = nn.RNNCell(WIDTH, HIDDEN, nonlinearity="relu")
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
        assert_same(cell_forward(cell, x, None, Recorder(read=["hook_h"])), cell(x), atol=1e-6)

    def test_a_loop_of_cells_equals_the_module_also_when_edited(self) -> None:
        module = build("LSTM", batch_first=True)
        cell = nn.LSTMCell(WIDTH, HIDDEN).double()
        with torch.no_grad():
            for parameter, value in zip(cell.parameters(), module.all_weights[0]):
                parameter.copy_(value)
        x, hx = inputs_for(module, "batched")
        expected = rnn_forward(module, x, hx, Recorder(edit={"0.hook_c": halve}, at=[2]))[0]
        state, outs = (hx[0][0], hx[1][0]), []
        tap = Recorder(edit={"hook_c": halve}, at=[2])
        for t in range(LENGTH):
            state = cell_forward(cell, x[:, t], state, tap, pos=t, length=LENGTH)
            outs.append(state[0])
        torch.testing.assert_close(torch.stack(outs, dim=1), expected, atol=1e-12, rtol=0)
        assert not torch.allclose(expected, module(x, hx)[0], atol=1e-3)


class TestErrors:
    def test_other_modules_are_refused_by_name(self) -> None:
        with pytest.raises(InputError, match=r"Linear isn't a recurrent module.*nn\.LSTM"):
            rnn_forward(nn.Linear(2, 2), torch.zeros(1, 1, 2))

    def test_wrong_shapes_say_what_is_needed(self) -> None:
        module = build("LSTM", batch_first=True)
        tap = Recorder(read=["0.hook_h"])
        x, (h, c) = inputs_for(module, "batched")
        with pytest.raises(ShapeError, match=r"h_0 has shape \(1, 2, 5\).*needs \(1, 3, 5\)"):
            rnn_forward(module, x, (h[:, :2], c), tap)
        with pytest.raises(ShapeError, match="input has width 3, LSTM takes 4"):
            rnn_forward(module, x[..., :3], None, tap)
        with pytest.raises(ShapeError, match="2 or 3 axes"):
            rnn_forward(module, x[None], None, tap)

"""The scans equal the recurrence written out, in value, gradient and memory."""

from __future__ import annotations

import builtins
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probelens.errors import InputError, ShapeError
from probelens.kernels import compiled
from probelens.kernels import scan as _scan
from probelens.kernels import ssd as _ssd
from probelens.kernels import tap as _tap
from probelens.kernels.ssm import causal_conv, fused_kernel, segments, selective_scan, ssd_scan


def scan_inputs(
    batch: int = 2, length: int = 7, channels: int = 3, d_state: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=g)

    x, B, C = normal(batch, length, channels), normal(batch, length, d_state), normal(batch, length, d_state)
    dt, A = F.softplus(normal(batch, length, channels)), -torch.exp(normal(channels, d_state))
    tensors = [x, dt, A, B, C, normal(channels), normal(batch, channels, d_state)]
    return [t.requires_grad_() for t in tensors]


def ssd_inputs(length: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=g)

    x, B, C = normal(2, length, 4, 3), normal(2, length, 2, 5), normal(2, length, 2, 5)
    dt, A = F.softplus(normal(2, length, 4)), -torch.exp(normal(4))
    tensors = [x, dt, A, B, C, normal(4), normal(2, 4, 3, 5)]
    return [t.requires_grad_() for t in tensors]


def unrolled(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, state: Any, edit: dict[int, Any] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Mamba's recurrence in scalar arithmetic, from the paper, sharing nothing with the library."""
    batch, length, channels = x.shape
    ys, states = torch.zeros_like(x), []
    state = state.clone()
    for t in range(length):
        for b in range(batch):
            for c in range(channels):
                for n in range(A.shape[1]):
                    decay = math.exp(float(dt[b, t, c] * A[c, n]))
                    state[b, c, n] = decay * state[b, c, n] + dt[b, t, c] * B[b, t, n] * x[b, t, c]
        if edit and t in edit:
            state = edit[t](state)
        for b in range(batch):
            for c in range(channels):
                ys[b, t, c] = sum(state[b, c, n] * C[b, t, n] for n in range(A.shape[1])) + D[c] * x[b, t, c]
        states.append(state.clone())
    return ys, states


@pytest.fixture(params=["one block", "many blocks and chunks"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the fused scan both as one piece and cut up as it is on large inputs."""
    if request.param != "one block":
        monkeypatch.setattr(_scan, "_CPU_ELEMENTS", 12)
    return str(request.param)


SHAPES = {
    "narrower than a piece": (2, 7, 5, 3), "pieces that don't divide the channels": (3, 9, 40, 2),
    "one state dimension": (2, 5, 17, 1), "one position": (4, 1, 16, 4), "one example": (1, 12, 33, 16),
}  # fmt: skip


class TestCompiled:
    """numba's loops against PyTorch's operations, and against float64."""

    @pytest.fixture(autouse=True)
    def on_small_inputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert compiled.kernels() is not None
        monkeypatch.setattr(compiled, "_FEWEST_ELEMENTS", 1)
        monkeypatch.setattr(compiled, "_WIDEST", 16)

    def run(self, inputs: list[Tensor], index: int | None = None) -> list[Tensor | None]:
        inputs = [t.detach().clone().requires_grad_(index is None or i == index) for i, t in enumerate(inputs)]
        out = selective_scan(*inputs)
        weight = torch.linspace(-1, 2, out.y.numel(), dtype=out.y.dtype).view_as(out.y)
        ((out.y * weight).sum() + out.state.square().sum()).backward()
        return [out.y.detach(), out.state.detach(), *(t.grad for t in inputs)]

    def compiled_calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []
        for name in ("scan", "scan_keeping", "scan_gradients"):
            kept = getattr(compiled, name)
            monkeypatch.setattr(compiled, name, lambda *a, kept=kept, name=name: calls.append(name) or kept(*a))
        return calls

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_values_and_gradients_equal_float64(self, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.compiled_calls(monkeypatch)
        found = self.run(scan_inputs(*shape, dtype=torch.float32))
        assert calls == ["scan", "scan_gradients"]
        exact = self.run([t.float().double() for t in scan_inputs(*shape, dtype=torch.float32)])
        assert calls == ["scan", "scan_gradients"]  # float64 goes through PyTorch's operations
        for a, b in zip(found, exact, strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a.double(), b, atol=2e-6 * float(b.abs().max()), rtol=0)

    def test_each_input_alone_gets_its_gradient(self) -> None:
        inputs = scan_inputs(3, 6, 20, 4, dtype=torch.float32)
        together = self.run(inputs)[2:]
        for index in range(7):
            grads = self.run(inputs, index)[2:]
            assert [g is not None for g in grads] == [i == index for i in range(7)]
            torch.testing.assert_close(grads[index], together[index])

    def test_threads_share_the_examples_out(self) -> None:
        inputs = scan_inputs(5, 6, 20, 4, dtype=torch.float32)
        alone = self.run(inputs)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            for a, b in zip(alone, self.run(inputs), strict=True):
                torch.testing.assert_close(a, b)
        finally:
            torch.set_num_threads(before)

    def test_layouts_that_are_not_contiguous(self) -> None:
        x, dt, A, B, C, D, first = (t.detach() for t in scan_inputs(3, 6, 20, 4, dtype=torch.float32))
        strided = [x.mT.contiguous().mT, dt[..., :1].expand_as(dt), A.T.contiguous().T, B.flip(1), C, D, first]
        plain = [t.contiguous() for t in strided]
        for a, b in zip(self.run(strided), self.run(plain), strict=True):
            torch.testing.assert_close(a, b)

    def test_decays_that_vanish_and_states_that_are_not_numbers(self) -> None:
        x, dt, A, B, C, D, first = (t.detach() for t in scan_inputs(2, 6, 20, 4, dtype=torch.float32))
        vanishing = self.run([x, dt + 200, A - 1, B, C, D, first])
        assert all(v is not None and bool(v.isfinite().all()) for v in vanishing)
        # Only what is written remains of a state whose decay is e^-200.
        torch.testing.assert_close(vanishing[1], (dt + 200)[:, -1, :, None] * (x[:, -1, :, None] * B[:, -1, None]))
        x[1, 2, 3] = torch.nan
        y = self.run([x, dt, A, B, C, D, first])[0]
        assert y is not None
        assert bool(y[1, 2:, 3].isnan().all())
        assert int(y.isnan().sum()) == 4

    def test_second_derivatives_are_there(self) -> None:
        inputs = [t.detach().requires_grad_() for t in scan_inputs(2, 4, 3, 2, dtype=torch.float32)]

        def twice(method: Any) -> Tensor:
            y = selective_scan(*inputs, method=method).y
            (grad,) = torch.autograd.grad(y.square().sum(), inputs[1], create_graph=True)
            return torch.autograd.grad(grad.square().sum(), inputs[0])[0]

        torch.testing.assert_close(twice("fused"), twice("steps"))

    def test_not_where_states_are_read_and_a_gradient_is_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.compiled_calls(monkeypatch)
        inputs = scan_inputs(dtype=torch.float32)
        selective_scan(*inputs, read_states=True).y.sum().backward()
        selective_scan(*inputs, method="steps").y.sum().backward()
        assert calls == []
        y = selective_scan(*inputs).y
        y.sum().backward()
        assert calls == ["scan", "scan_gradients"]
        assert torch.equal(selective_scan(*(t.detach() for t in inputs)).y, y)
        assert calls == ["scan", "scan_gradients", "scan"]

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_reading_states_gives_float64_s_and_changes_no_bit(
        self, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self.compiled_calls(monkeypatch)
        inputs = [t.detach() for t in scan_inputs(*shape, dtype=torch.float32)]
        kept, plain = selective_scan(*inputs, read_states=True), selective_scan(*inputs)
        assert calls == ["scan_keeping", "scan"]
        exact = selective_scan(*(t.double() for t in inputs), read_states=True)
        assert calls == ["scan_keeping", "scan"]
        assert kept.states is not None
        assert exact.states is not None
        torch.testing.assert_close(
            kept.states.double(), exact.states, atol=1e-6 * float(exact.states.abs().max()), rtol=0
        )
        assert torch.equal(kept.states[:, -1], kept.state)
        assert torch.equal(kept.y, plain.y)
        assert torch.equal(kept.state, plain.state)

    def test_a_row_and_a_suffix_alone_give_the_same_bits_as_among_others(self) -> None:
        x, dt, A, B, C, D, first = (t.detach() for t in scan_inputs(5, 12, 40, 4, dtype=torch.float32))
        whole = selective_scan(x, dt, A, B, C, D, first)
        for row in range(5):
            alone = selective_scan(
                *(v[row : row + 1] for v in (x, dt)), A, *(v[row : row + 1] for v in (B, C)), D, first[row : row + 1]
            )
            assert torch.equal(alone.y[0], whole.y[row])
        head = selective_scan(x[:, :5], dt[:, :5], A, B[:, :5], C[:, :5], D, first)
        tail = selective_scan(x[:, 5:], dt[:, 5:], A, B[:, 5:], C[:, 5:], D, head.state)
        assert torch.equal(torch.cat([head.y, tail.y], 1), whole.y)
        assert torch.equal(tail.state, whole.state)

    def test_which_one_runs_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, A = torch.ones(2, 7, 3), -torch.ones(3, 4)
        assert fused_kernel(x, A) == "numba"
        assert fused_kernel(x.double(), A.double()) == "torch"
        assert fused_kernel(x.to("meta"), A) == "torch"
        assert fused_kernel(torch.empty(1, 1 << 19, 3), A) == "torch"  # the states of a piece would take 128 MiB
        monkeypatch.setattr(compiled, "_FEWEST_ELEMENTS", 2 * 7 * 3 * 4 + 1)
        assert fused_kernel(x, A) == "torch"
        with pytest.raises(ShapeError, match=r"\(2, 7, 3\) and \(4, 3\)"):
            fused_kernel(x, A.T)

    @pytest.mark.parametrize("broken", [False, True])
    def test_without_numba_pytorch_runs(self, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = scan_inputs(dtype=torch.float32)
        fast = self.run(inputs)
        calls = self.compiled_calls(monkeypatch)
        monkeypatch.setattr(compiled, "kernels", compiled.kernels.__wrapped__)
        monkeypatch.setitem(sys.modules, "numba", None)
        if broken:
            monkeypatch.setattr("builtins.__import__", _refusing("numba"))
            with pytest.warns(UserWarning, match="Numba needs NumPy .* PyTorch's operations run instead"):
                assert fused_kernel(inputs[0], inputs[2]) == "torch"
            monkeypatch.setattr(compiled, "kernels", lambda: None)
        plain = self.run(inputs)
        assert calls == []
        for a, b in zip(fast, plain, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


class TestKernels:
    def found(self) -> Any:
        return compiled.kernels.__wrapped__()

    def test_a_later_process_compiles_nothing(self) -> None:
        assert compiled.kernels() is not None
        code = (
            "from probelens.kernels import compiled; found = compiled.kernels()\n"
            "print(*(sum(loop.stats.cache_misses.values()) for name, loop in vars(found).items() if name[:4] == 'run_'))"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.split() == ["0"] * 5

    def test_compiling_is_said_once_and_loading_is_not(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        import numba

        def compile_two(loops: object) -> None:
            for add in (1, 2):
                numba.njit(lambda x, add=add: x + add)(1)

        assert compiled.kernels() is not None
        for run, said in ((compiled._try, 0), (compile_two, 1)):
            monkeypatch.setattr(compiled, "_try", run)
            assert self.found() is not None
            assert capfd.readouterr().err.count("compiling Mamba's loops") == said

    def test_none_where_compiling_is_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import numba

        assert self.found() is not None
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
        assert self.found() is None

    def test_a_damaged_cache_is_said_and_pytorch_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(found: object) -> None:
            raise pickle.UnpicklingError("pickle data was truncated")

        monkeypatch.setattr(compiled, "_try", fail)
        with pytest.warns(UserWarning, match=r"can't be used \(UnpicklingError: .*PyTorch's operations run"):
            assert self.found() is None


class TestCompiledConvolution:
    @pytest.fixture(autouse=True)
    def on_small_inputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "_FEWEST_ELEMENTS", 1)

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []
        for name in ("conv", "conv_gradients"):
            kept = getattr(compiled, name)
            monkeypatch.setattr(compiled, name, lambda *a, kept=kept, name=name: calls.append(name) or kept(*a))
        return calls

    def inputs(self, size: int, bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        g = torch.Generator().manual_seed(size)
        x, weight, b = (torch.randn(*s, generator=g).to(dtype) for s in ((3, 6, 20), (20, 1, size), (20,)))
        return [x.requires_grad_(), weight.requires_grad_(), b.requires_grad_() if bias else None]

    def run(self, inputs: list[Any], **options: Any) -> list[Tensor]:
        y = causal_conv(*inputs, **{"need_state": False, **options})[0]
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        return [y.detach(), *(v.grad for v in inputs if v is not None and v.grad is not None)]

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("size", [1, 2, 4, 9])
    def test_values_and_gradients_equal_conv1d_in_float64(self, size: int, bias: bool, calls: list[str]) -> None:
        found = self.run(self.inputs(size, bias))
        assert calls == ["conv", "conv_gradients"]
        exact = self.inputs(size, bias, torch.float64)
        x, weight, b = exact
        assert x is not None
        y = F.conv1d(F.pad(x.mT, (size - 1, 0)), weight, b, groups=20).mT
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        for a, c in zip(found, [y, *(v.grad for v in exact if v is not None)], strict=True):
            assert c is not None
            torch.testing.assert_close(a.double(), c, atol=1e-6 * float(c.detach().abs().max()), rtol=0)

    def test_the_plain_way_where_a_state_comes_or_goes(self, calls: list[str]) -> None:
        for options in ({"need_state": True}, {"state": torch.zeros(3, 20, 4)}):
            self.run(self.inputs(4, True), **options)
        self.run(self.inputs(4, True, torch.float64))
        assert calls == []
        self.run(self.inputs(4, True))
        assert calls == ["conv", "conv_gradients"]
        with torch.no_grad():
            causal_conv(*self.inputs(4, True), need_state=False)
        assert calls == ["conv", "conv_gradients", "conv"]

    def test_sizes_that_do_not_fit_are_pytorch_s_error_as_before(self, calls: list[str]) -> None:
        x, weight, bias = self.inputs(4, True)
        for wrong in ((x, weight[:10], bias), (x, weight, bias[:10])):
            with pytest.raises(RuntimeError, match="must match the size of tensor"):
                causal_conv(*wrong, need_state=False)
        assert calls == []

    def test_second_derivatives_are_there(self, calls: list[str]) -> None:
        found = []
        for dtype in (torch.float32, torch.float64):
            x, weight, bias = self.inputs(4, True, dtype)
            y = causal_conv(x, weight, bias, need_state=False)[0]
            (grad,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), x)[0])
        torch.testing.assert_close(found[0].double(), found[1], atol=1e-4, rtol=1e-4)
        assert calls[0] == "conv"


def _refusing(name: str) -> Any:
    kept = builtins.__import__

    def refuse(asked: str, *args: Any, **kwargs: Any) -> Any:
        if asked == name:
            raise SystemError("Numba needs NumPy 2.3 or less")
        return kept(asked, *args, **kwargs)

    return refuse


class TestSelectiveScan:
    def test_equals_the_recurrence_written_out(self, plan: str) -> None:
        inputs = [t.detach() for t in scan_inputs()]
        out = selective_scan(*inputs, read_states=True)
        y, states = unrolled(*inputs)
        torch.testing.assert_close(out.y, y, atol=1e-12, rtol=0)
        torch.testing.assert_close(out.states, torch.stack(states, dim=1), atol=1e-12, rtol=0)
        torch.testing.assert_close(out.state, states[-1], atol=1e-12, rtol=0)

    def test_large_inputs_are_really_cut_up(self, plan: str) -> None:
        block, chunk, span = _scan._plan(2, 7, 12, "cpu")
        assert (block, chunk, span) == ((2, 7, 7) if plan == "one block" else (1, 1, 3))

    @pytest.mark.parametrize("read_states", [False, True])
    def test_gradients_pass_gradcheck(self, plan: str, read_states: bool) -> None:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(t for t in selective_scan(*inputs, read_states=read_states) if t is not None)

        assert torch.autograd.gradcheck(run, scan_inputs())

    def test_gradients_equal_plain_autograd_for_each_input_alone(self, plan: str) -> None:
        weight = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        for index in range(7):
            grads = []
            for method in ("fused", "steps"):
                inputs = [t.detach().requires_grad_(i == index) for i, t in enumerate(scan_inputs())]
                out = selective_scan(*inputs, method=method)  # type: ignore[arg-type]
                ((out.y * weight).sum() + out.state.square().sum()).backward()
                assert all((t.grad is not None) == (i == index) for i, t in enumerate(inputs))
                grads.append(inputs[index].grad)
            assert grads[0].abs().max() > 0
            torch.testing.assert_close(grads[0], grads[1], atol=1e-12, rtol=1e-12)

    def test_reading_states_changes_nothing_bit_for_bit(self, plan: str) -> None:
        inputs = scan_inputs(dtype=torch.float32)
        assert torch.equal(selective_scan(*inputs).y, selective_scan(*inputs, read_states=True).y)

    def test_continues_from_its_own_state(self) -> None:
        x, dt, A, B, C, D, first = scan_inputs()
        whole = selective_scan(x, dt, A, B, C, D, first)
        a = selective_scan(x[:, :3], dt[:, :3], A, B[:, :3], C[:, :3], D, first)
        b = selective_scan(x[:, 3:], dt[:, 3:], A, B[:, 3:], C[:, 3:], D, a.state)
        torch.testing.assert_close(torch.cat([a.y, b.y], dim=1), whole.y, atol=1e-13, rtol=0)
        torch.testing.assert_close(b.state, whole.state, atol=1e-13, rtol=0)

    def test_equals_mambapy(self) -> None:
        pscan = pytest.importorskip("mambapy.pscan").pscan
        x, dt, A, B, C, D, _ = (t.detach() for t in scan_inputs(length=9))
        decay, write = torch.exp(dt[..., None] * A), (dt * x)[..., None] * B[:, :, None]
        states = pscan(decay, write)
        y = (states @ C[..., None]).squeeze(-1) + D * x
        out = selective_scan(x, dt, A, B, C, D, read_states=True)
        torch.testing.assert_close(out.y, y, atol=1e-12, rtol=0)
        torch.testing.assert_close(out.states, states, atol=1e-12, rtol=0)

    @pytest.mark.parametrize("read_states", [False, True])
    def test_second_derivatives_pass_gradgradcheck(self, read_states: bool) -> None:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(t for t in selective_scan(*inputs, read_states=read_states) if t is not None)

        assert torch.autograd.gradgradcheck(run, scan_inputs(batch=1, length=3, channels=2, d_state=2))

    def test_half_precision_inputs_are_summed_in_float32(self) -> None:
        inputs = [t.detach().bfloat16() for t in scan_inputs(length=200)]
        out = selective_scan(*inputs)
        exact = selective_scan(*(t.double() for t in inputs))
        assert out.y.dtype == out.state.dtype == torch.float32
        torch.testing.assert_close(out.y.double(), exact.y, atol=1e-5, rtol=1e-5)

    def test_autocast_does_not_reach_inside(self) -> None:
        inputs = [t.detach().float() for t in scan_inputs()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = selective_scan(*inputs)
        assert torch.equal(out.y, selective_scan(*inputs).y)

    def test_wrong_shapes_name_the_tensor_and_the_needed_shape(self) -> None:
        x, dt, A, B, C, D, state = scan_inputs()
        with pytest.raises(ShapeError, match=r"dt has shape \(2, 6, 3\).*need \(2, 7, 3\)"):
            selective_scan(x, dt[:, :6], A, B, C)
        with pytest.raises(ShapeError, match=r"initial_state has shape \(2, 4, 3\).*need \(2, 3, 4\)"):
            selective_scan(x, dt, A, B, C, D, state.mT)
        with pytest.raises(ShapeError, match="no positions"):
            selective_scan(x[:, :0], dt[:, :0], A, B[:, :0], C[:, :0])
        with pytest.raises(InputError, match="'fused', 'steps'"):
            selective_scan(x, dt, A, B, C, method="magic")  # type: ignore[arg-type]


class TestStopping:
    def test_several_edits_equal_the_recurrence_written_out(self) -> None:
        inputs = [t.detach() for t in scan_inputs(length=9)]
        edits = {2: lambda s: s * 0.5 + 0.25, 6: torch.zeros_like, 8: lambda s: -s}
        y, states = unrolled(*inputs, edits)
        for steps in ([2, 6, 8], None):
            out = _scan.scan_stopping(*inputs, lambda k, s: edits[k](s) if k in edits else s, steps)
            torch.testing.assert_close(out.y, y, atol=1e-12, rtol=0)
            torch.testing.assert_close(out.state, states[-1], atol=1e-12, rtol=0)
        plain, _ = unrolled(*inputs)
        assert torch.equal(plain[:, :2], y[:, :2])
        assert all(not torch.allclose(plain[:, t], y[:, t], atol=1e-3) for t in range(2, 9))


class Allocations(TorchDispatchMode):
    """Sizes of the storages that operations make, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                # Kept alive, so that no later storage takes the same address.
                self.kept.append(tensor)
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return out

    def at_least(self, elements: float) -> int:
        return sum(size >= elements for size in self.sizes.values())

    @property
    def largest(self) -> int:
        return max(self.sizes.values())


class TestMemory:
    def big(self, length: int) -> tuple[list[Tensor], int]:
        # 64 numbers per position outside the state, 1024 inside.
        inputs = scan_inputs(batch=1, length=length, channels=32, d_state=32, dtype=torch.float32)
        return inputs, length * 32 * 32

    @pytest.fixture(autouse=True)
    def small_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_scan, "_CPU_ELEMENTS", 1024)

    def largest(self, length: int, method: str) -> int:
        inputs, _ = self.big(length)
        with Allocations() as allocations:
            selective_scan(*inputs, method=method).y.sum().backward()  # type: ignore[arg-type]
        return allocations.largest

    def test_forward_and_backward_hold_a_square_root_of_the_states(self) -> None:
        short, long = self.largest(64, "fused"), self.largest(256, "fused")
        assert short <= 1024 * (8 + 1)
        assert long <= 1024 * (16 + 1)

    def test_saved_for_backward_grows_with_the_square_root_where_plain_autograd_saves_all_states(self) -> None:
        def saved(method: str) -> int:
            inputs, _ = self.big(256)
            total = 0

            def pack(tensor: Tensor) -> Tensor:
                nonlocal total
                total += tensor.numel()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                selective_scan(*inputs, method=method)  # type: ignore[arg-type]
            return total

        trajectory = 256 * 32 * 32
        assert saved("fused") < trajectory / 3
        assert saved("steps") > trajectory

    def test_reading_makes_one_trajectory_and_nothing_else_of_that_size(self) -> None:
        inputs, trajectory = self.big(256)
        with Allocations() as allocations, torch.no_grad():
            out = selective_scan(*inputs, read_states=True)
        assert out.states is not None
        assert out.states.numel() == trajectory == allocations.largest
        assert allocations.at_least(trajectory / 4) == 1

    def test_reading_ssd_states_makes_one_trajectory_and_nothing_else_of_that_size(self) -> None:
        g = torch.Generator().manual_seed(0)
        x, B = torch.randn(1, 256, 2, 32, generator=g), torch.randn(1, 256, 1, 32, generator=g)
        with Allocations() as allocations, torch.no_grad():
            out = ssd_scan(x, torch.ones(1, 256, 2), -torch.ones(2), B, B, read_states=True)
        assert out.states is not None
        assert out.states.numel() == allocations.largest
        assert allocations.at_least(out.states.numel() / 4) == 1


class TestSSD:
    @pytest.mark.parametrize("length", [1, 7, 64, 65, 150])
    def test_chunks_equal_steps(self, length: int) -> None:
        inputs = ssd_inputs(length)
        a, b = (ssd_scan(*inputs, read_states=True, method=m) for m in ("chunks", "steps"))
        for left, right in zip(a, b):
            torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-11)

    @pytest.mark.parametrize("length", [1, 7, 64, 65, 150])
    @pytest.mark.parametrize("begun", [False, True])
    def test_what_nobody_asks_for_is_left_out_and_changes_nothing(self, length: int, begun: bool) -> None:
        *inputs, first = ssd_inputs(length)
        start = first if begun else None
        with Allocations() as with_state, torch.no_grad():
            whole = ssd_scan(*inputs, start)
        with Allocations() as without, torch.no_grad():
            part = ssd_scan(*inputs, start, need_state=False)
        assert torch.equal(whole.y, part.y)
        assert part.state.numel() == 0 < whole.state.numel()
        size = whole.state.numel()
        assert without.at_least(size) < with_state.at_least(size)
        torch.testing.assert_close(whole.y, ssd_scan(*inputs, torch.zeros_like(first) if start is None else first).y)

    def test_equals_the_selective_scan_with_a_spread_out(self) -> None:
        x, dt, A, B, C, D, first = (t.detach() for t in ssd_inputs(9))
        for head in range(4):
            group = head // 2
            out = selective_scan(
                x[:, :, head],
                dt[:, :, head, None].expand(-1, -1, 3),
                A[head].expand(3, 5),
                B[:, :, group],
                C[:, :, group],
                D[head].expand(3),
                first[:, head],
            )
            torch.testing.assert_close(ssd_scan(x, dt, A, B, C, D, first).y[:, :, head], out.y, atol=1e-12, rtol=0)

    def test_gradients_pass_gradcheck(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_ssd, "_CHUNK", 4)

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(ssd_scan(*inputs)[:2])

        assert torch.autograd.gradcheck(run, ssd_inputs())

    def test_strong_decay_in_float32_stays_exact_and_finite(self) -> None:
        inputs = [t.detach() for t in ssd_inputs(64)]
        inputs[1] = inputs[1] * 50
        exact, single = ssd_scan(*inputs), ssd_scan(*(t.float() for t in inputs))
        scale = exact.y.abs().max()
        assert (single.y - exact.y).abs().max() / scale < 1e-6

    def test_read_states_without_gradients_equal_those_with(self) -> None:
        inputs = ssd_inputs(10)
        with torch.no_grad():
            fast = ssd_scan(*inputs, read_states=True).states
        slow = ssd_scan(*inputs, read_states=True).states
        assert slow.requires_grad
        torch.testing.assert_close(fast, slow, atol=1e-13, rtol=0)

    def test_wrong_shapes_name_the_tensor(self) -> None:
        x, dt, A, B, C, *_ = ssd_inputs()
        with pytest.raises(ShapeError, match="C has shape"):
            ssd_scan(x, dt, A, B, C[:, :3])
        with pytest.raises(ShapeError, match="4 heads can't be shared out among 3 groups"):
            ssd_scan(x, dt, A, B[:, :, :1].expand(-1, -1, 3, -1), C)
        with pytest.raises(InputError, match="'chunks', 'steps'"):
            ssd_scan(x, dt, A, B, C, method="magic")


class TestSegments:
    def test_pieces_cover_the_sequence_and_end_at_each_position(self) -> None:
        g = torch.Generator().manual_seed(0)
        for length in range(1, 9):
            for _ in range(10):
                wanted = torch.randint(-length, length, (3,), generator=g).tolist()
                pieces = segments(wanted, length)
                covered = [p for start, stop, _ in pieces for p in range(start, stop)]
                assert covered == list(range(length))
                assert sorted({p % length for p in wanted}) == [stop - 1 for _, stop, e in pieces if e]

    def test_position_outside_is_an_error_that_says_what_is_allowed(self) -> None:
        with pytest.raises(InputError, match=r"position 8 asked for.*-8 to 7"):
            segments([8], 8)

    def test_a_null_tap_listens_nowhere(self) -> None:
        assert _tap.NullTap().positions("hook_ssm_state") == []
        assert not _tap.NullTap().wants("hook_ssm_state")

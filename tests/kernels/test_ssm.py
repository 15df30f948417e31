"""The mixers equal transformers', and an edit inside them reaches what it should and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from kernel_taps import Recorder, halve, same, zero
from torch import Tensor, nn
from torch.nn import functional as F

import probelens as pl
from probelens.errors import InputError, ProbelensError, ShapeError
from probelens.hooks.passes.recording import recorders
from probelens.kernels import pages as _pages
from probelens.kernels import scan as _scan
from probelens.kernels import ssd as _ssd
from probelens.kernels import ssm
from probelens.kernels import tap as _tap
from probelens.kernels.ssm import MAMBA2_POINTS, MAMBA_POINTS, MambaState, mamba2_mixer, mamba_mixer, mamba_step

LENGTH = 11


# -- mixers of transformers ---------------------------------------------------------------------------


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Away from the initial values, at which several parameters are all one or all zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.25)
    return module.eval()


def language_model(kind: str, **config: Any) -> nn.Module:
    import transformers as tf

    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, **config}
    torch.manual_seed(0)
    if kind == "mamba":
        return shaken(tf.MambaForCausalLM(tf.MambaConfig(**sizes)))
    if kind == "falcon":
        return shaken(tf.FalconMambaForCausalLM(tf.FalconMambaConfig(**sizes)))
    heads = {"num_heads": 4, "head_dim": 12, "n_groups": 2, "chunk_size": 4}
    return shaken(tf.Mamba2ForCausalLM(tf.Mamba2Config(**{**heads, **sizes})))


def jamba_mixer() -> nn.Module:
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    return shaken(JambaMambaMixer(JambaConfig(hidden_size=24, mamba_d_state=5, mamba_dt_rank=3), 0))


def mixer_of(kind: str) -> nn.Module:
    if kind == "jamba":
        return jamba_mixer()
    name, _, variant = kind.partition(" ")
    options = {
        "": {},
        "bias": {"use_bias": True},
        "no conv bias": {"use_conv_bias": False},
        "one group": {"n_groups": 1},
        "dt limit": {"time_step_limit": (0.05, 0.6)},
        "kernel 2": {"conv_kernel": 2},
    }[variant]
    return language_model(name, **options).backbone.layers[1].mixer


MIXERS = [
    "mamba", "mamba bias", "mamba no conv bias", "mamba kernel 2", "falcon", "jamba",
    "mamba2", "mamba2 bias", "mamba2 one group", "mamba2 dt limit",
]  # fmt: skip
BOTH = ["mamba", "mamba2"]
EVERY_POINT = [("mamba", n) for n in MAMBA_POINTS] + [("mamba2", n) for n in MAMBA2_POINTS]


def run(module: nn.Module, hidden: Tensor, tap: Any = None, **options: Any) -> Any:
    mixer = mamba2_mixer if ssm.is_mamba2(module) else mamba_mixer
    return mixer(module, hidden, tap, **options)


def cached(model: nn.Module, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    """Logits and cache of transformers' own forward; the argument was renamed in 5.15."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "cache_params"
    out = model(tokens, use_cache=True, **({} if cache is None else {name: cache}))
    return out.logits, out[name]


def held(states: Any) -> Tensor:
    """The one state of a layer's cache, which newer versions keep in a mapping."""
    return states if isinstance(states, Tensor) else states[0]


def points_of(module: nn.Module) -> dict[str, Any]:
    return MAMBA2_POINTS if ssm.is_mamba2(module) else MAMBA_POINTS


def hidden_states(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, length, 24, generator=torch.Generator().manual_seed(7)).to(dtype)


def padding() -> Tensor:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return mask


@pytest.fixture
def swapped() -> Iterator[Any]:
    """Put the reference forward in place of a model's mixers, and take it away again."""
    done: list[nn.Module] = []

    def swap(model: nn.Module, taps: dict[int, Any] | None = None) -> None:
        for layer, block in enumerate(model.backbone.layers):
            mixer = block.mixer
            done.append(mixer)

            def forward(
                hidden: Tensor, cache: Any = None, attention_mask: Tensor | None = None,
                *, mixer: nn.Module = mixer, layer: int = layer, **kwargs: Any,
            ) -> Tensor:  # fmt: skip
                return run(mixer, hidden, (taps or {}).get(layer), attention_mask=attention_mask)

            mixer.__dict__["forward"] = forward

    yield swap
    for mixer in done:
        mixer.__dict__.pop("forward", None)


class TestFidelity:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("kind", MIXERS)
    def test_mixer_equals_transformers(self, kind: str, masked: bool) -> None:
        mixer, hidden, mask = mixer_of(kind), hidden_states(), padding() if masked else None
        with torch.no_grad():
            native = mixer(hidden, attention_mask=mask)
            torch.testing.assert_close(run(mixer, hidden, attention_mask=mask), native, atol=2e-6, rtol=1e-6)
            if masked:
                assert not torch.allclose(run(mixer, hidden), native, atol=1e-4)

    @pytest.mark.parametrize("kind", ["mamba", "falcon", "mamba2"])
    def test_logits_equal_transformers(self, kind: str, swapped: Any) -> None:
        model = language_model(kind)
        tokens = torch.randint(31, (3, LENGTH), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            native = model(tokens, attention_mask=padding()).logits
            swapped(model)
            reference = model(tokens, attention_mask=padding()).logits
        torch.testing.assert_close(reference, native, atol=5e-6, rtol=1e-5)

    @pytest.mark.parametrize("kind", MIXERS)
    def test_gradients_equal_transformers(self, kind: str) -> None:
        mixer = mixer_of(kind)
        weight = torch.randn(3, LENGTH, 24, generator=torch.Generator().manual_seed(2))
        grads = []
        for forward in (mixer, lambda h, **k: run(mixer, h, **k)):
            mixer.zero_grad()
            hidden = hidden_states().requires_grad_()
            (forward(hidden, attention_mask=padding()) * weight).sum().backward()
            grads.append({**{n: p.grad for n, p in mixer.named_parameters()}, "hidden": hidden.grad})
        assert grads[0].keys() == grads[1].keys()
        for name, native in grads[0].items():
            if native is None:
                # FalconMamba's norm weights are there and unused
                assert "layernorm" in name
                continue
            scale = float(native.abs().max())
            assert scale > 0
            torch.testing.assert_close(
                grads[1][name], native, atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )

    @pytest.mark.parametrize("kind", BOTH)
    def test_bfloat16_is_within_rounding_of_transformers_and_states_are_float32(self, kind: str) -> None:
        mixer, hidden = mixer_of(kind).bfloat16(), hidden_states(dtype=torch.bfloat16)
        with torch.no_grad():
            native = mixer(hidden)
            out, state = run(mixer, hidden, return_state=True)
        assert out.dtype == torch.bfloat16
        assert state.ssm.dtype == torch.float32
        assert (out - native).abs().max() <= 2**-6 * native.abs().max()

    @pytest.mark.parametrize("kind", BOTH)
    def test_float64_is_computed_in_float64(self, kind: str) -> None:
        single, hidden = mixer_of(kind), hidden_states()
        with torch.no_grad():
            in_single = run(single, hidden)
            in_double = run(single.double(), hidden.double())
        error = (in_single.double() - in_double).abs().max()
        assert 0 < error < 5e-6

    @pytest.mark.parametrize("kind", BOTH)
    def test_module_is_left_as_it_was(self, kind: str) -> None:
        mixer = mixer_of(kind)
        before = {n: p.clone() for n, p in mixer.state_dict().items()}
        run(mixer, hidden_states(), Recorder(edit=dict.fromkeys(points_of(mixer), halve)))
        assert all(torch.equal(p, before[n]) for n, p in mixer.state_dict().items())
        assert "forward" not in mixer.__dict__


class TestContinuing:
    @pytest.mark.parametrize("cut", [1, 2, 5, 10])
    @pytest.mark.parametrize("kind", ["mamba", "mamba2"])
    def test_two_halves_equal_the_whole(self, kind: str, cut: int) -> None:
        mixer, hidden = mixer_of(kind).double(), hidden_states(dtype=torch.float64)
        whole, end = run(mixer, hidden, return_state=True)
        a, state = run(mixer, hidden[:, :cut], return_state=True)
        b, last = run(mixer, hidden[:, cut:], conv_state=state.conv, ssm_state=state.ssm, return_state=True)
        torch.testing.assert_close(torch.cat([a, b], dim=1), whole, atol=1e-10, rtol=0)
        torch.testing.assert_close(last.ssm, end.ssm, atol=1e-10, rtol=0)
        torch.testing.assert_close(last.conv, end.conv)
        without = run(mixer, hidden[:, cut:])
        assert not torch.allclose(without, whole[:, cut:], atol=1e-4)

    @pytest.mark.parametrize("length", [2, LENGTH])
    @pytest.mark.parametrize("kind", BOTH)
    def test_state_equals_transformers_cache(self, kind: str, length: int) -> None:
        model = language_model(kind)
        tokens = torch.randint(31, (2, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            layer = cached(model, tokens)[1].layers[0]
            hidden = model.backbone.layers[0].norm(model.backbone.embeddings(tokens))
            _, state = run(model.backbone.layers[0].mixer, hidden, return_state=True)
        torch.testing.assert_close(state.conv, held(layer.conv_states), atol=1e-6, rtol=0)
        torch.testing.assert_close(state.ssm, held(layer.recurrent_states), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("kind", BOTH)
    def test_token_by_token_equals_the_whole(self, kind: str) -> None:
        mixer, hidden = mixer_of(kind), hidden_states()
        whole = run(mixer, hidden)
        state: MambaState | None = None
        for pos in range(LENGTH):
            out, state = mamba_step(mixer, hidden[:, pos], state, offset=pos)
            torch.testing.assert_close(out, whole[:, pos], atol=5e-6, rtol=0)

    @pytest.mark.parametrize("kind", BOTH)
    def test_taps_see_true_positions_in_a_later_call(self, kind: str) -> None:
        mixer, hidden = mixer_of(kind), hidden_states()
        _, state = run(mixer, hidden[:, :6], return_state=True)
        tap = Recorder(edit={"hook_ssm_state": same}, at=[2, 8])
        run(mixer, hidden[:, 6:], tap, conv_state=state.conv, ssm_state=state.ssm, offset=6)
        assert list(tap.steps["hook_ssm_state"]) == [8]


class TestStateEdits:
    def decode_natively(self, model: nn.Module, tokens: Tensor, step: int, layer: int) -> Tensor:
        """Transformers' own token-by-token decoding, its cache edited by hand after ``step``."""
        with torch.no_grad():
            _, cache = cached(model, tokens[:, : step + 1])
            state = held(cache.layers[layer].recurrent_states)
            state.copy_(halve(state, step))
            logits = []
            for pos in range(step + 1, tokens.shape[1]):
                logits.append(cached(model, tokens[:, pos : pos + 1], cache)[0])
        return torch.cat(logits, dim=1)

    @pytest.mark.parametrize("kind", BOTH)
    def test_edited_state_equals_transformers_decoding_with_an_edited_cache(self, kind: str, swapped: Any) -> None:
        model = language_model(kind)
        tokens = torch.randint(31, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        step = 4
        expected = self.decode_natively(model, tokens, step, layer=1)
        with torch.no_grad():
            plain = model(tokens).logits
            swapped(model, {1: Recorder(edit={"hook_ssm_state": halve}, at=[step])})
            edited = model(tokens).logits
        assert (edited[:, step + 1 :] - expected).abs().max() <= 5e-5
        assert (edited[:, step + 1 :] - plain[:, step + 1 :]).abs().max() > 1e-3
        torch.testing.assert_close(edited[:, :step], plain[:, :step], atol=1e-5, rtol=0)

    @pytest.mark.parametrize("at", [[3], [0, 3, 10], None])
    @pytest.mark.parametrize("kind", BOTH)
    def test_edit_reaches_its_step_and_later_ones_only(self, kind: str, at: list[int] | None) -> None:
        mixer, hidden = mixer_of(kind), hidden_states()

        def only_at_3(state: Tensor, pos: int | None) -> Tensor | None:
            return state + 1 if pos == 3 else None

        tap = Recorder(edit={"hook_ssm_state": only_at_3}, at=at)
        plain, edited = run(mixer, hidden), run(mixer, hidden, tap)
        changed = (plain - edited).abs().amax(dim=(0, 2)) > 1e-4
        assert changed.tolist() == [False] * 3 + [True] * (LENGTH - 3)

    @pytest.mark.parametrize("kind", BOTH)
    def test_zeroed_state_equals_a_fresh_start_after_it(self, kind: str) -> None:
        mixer, hidden = mixer_of(kind), hidden_states()
        edited = run(mixer, hidden, Recorder(edit={"hook_ssm_state": zero}, at=[5]))
        _, state = run(mixer, hidden[:, :6], return_state=True)
        fresh = run(mixer, hidden[:, 6:], conv_state=state.conv)
        torch.testing.assert_close(edited[:, 6:], fresh, atol=2e-6, rtol=0)

    @pytest.mark.parametrize("kind", BOTH)
    def test_gradients_through_an_edited_state_equal_those_of_the_plain_loop(self, kind: str) -> None:
        mixer = mixer_of(kind).double()
        grads = []
        for at in ([4], None):

            def edit(state: Tensor, pos: int | None) -> Tensor | None:
                return state * 0.5 if pos == 4 else None

            hidden = hidden_states(dtype=torch.float64).requires_grad_()
            run(mixer, hidden, Recorder(edit={"hook_ssm_state": edit}, at=at)).square().sum().backward()
            grads.append(hidden.grad)
        torch.testing.assert_close(grads[0], grads[1], atol=1e-10, rtol=1e-9)


class TestTaps:
    @pytest.mark.parametrize("kind", MIXERS)
    def test_every_point_fires_with_the_axes_it_says(self, kind: str) -> None:
        mixer = mixer_of(kind)
        points = points_of(mixer)
        tap = Recorder(read=points)
        out = run(mixer, hidden_states(), tap)
        assert list(tap.whole) == sorted(tap.whole, key=list(tap.whole).index)
        assert set(tap.whole) == set(points)
        for name, point in points.items():
            assert tap.whole[name].shape[:2] == (3, LENGTH)
            assert tap.whole[name].ndim == len(point.axes)
        assert torch.equal(out, run(mixer, hidden_states()))

    @pytest.mark.parametrize("at", [None, [0, 7]])
    @pytest.mark.parametrize("kind", BOTH)
    def test_identity_edits_change_nothing(self, kind: str, at: list[int] | None) -> None:
        mixer = mixer_of(kind)
        tap = Recorder(edit=dict.fromkeys(points_of(mixer), same), at=at)
        torch.testing.assert_close(run(mixer, hidden_states(), tap), run(mixer, hidden_states()), atol=2e-6, rtol=0)
        assert set(tap.steps["hook_ssm_state"]) == set(range(LENGTH) if at is None else at)

    @pytest.mark.parametrize(("kind", "name"), EVERY_POINT)
    def test_every_edit_changes_the_output(self, kind: str, name: str) -> None:
        mixer = mixer_of(kind)
        plain = run(mixer, hidden_states())
        edited = run(mixer, hidden_states(), Recorder(edit={name: halve}))
        assert (plain - edited).abs().max() > 1e-3

    @pytest.mark.parametrize(("kind", "name"), EVERY_POINT)
    def test_in_place_edits_work_and_gradients_still_flow(self, kind: str, name: str) -> None:
        mixer = mixer_of(kind)

        def in_place(tensor: Tensor, pos: int | None) -> Tensor:
            tensor[:, 0] = 0.5
            return tensor

        def out_of_place(tensor: Tensor, pos: int | None) -> Tensor:
            return torch.cat([torch.full_like(tensor[:, :1], 0.5), tensor[:, 1:]], dim=1)

        grads = []
        for edit in (in_place, out_of_place):
            hidden = hidden_states().requires_grad_()
            run(mixer, hidden, Recorder(edit={name: edit})).square().sum().backward()
            grads.append(hidden.grad)
        torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("kind", BOTH)
    def test_states_read_at_once_equal_states_offered_one_by_one(self, kind: str) -> None:
        mixer, name = mixer_of(kind), "hook_ssm_state"
        read, offered = Recorder(read=[name]), Recorder(edit={name: same})
        run(mixer, hidden_states(), read)
        run(mixer, hidden_states(), offered)
        assert read.calls == [(name, None)]
        assert offered.calls == [(name, pos) for pos in range(LENGTH)]
        torch.testing.assert_close(read.trajectory(name), offered.trajectory(name), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("kind", BOTH)
    def test_reading_while_writes_are_edited_shows_the_edited_states(self, kind: str) -> None:
        mixer = mixer_of(kind)
        tap = Recorder(read=["hook_ssm_state"], edit={"hook_ssm_write": zero})
        run(mixer, hidden_states(), tap)
        assert tap.whole["hook_ssm_state"].abs().max() == 0

    @pytest.mark.parametrize("kind", BOTH)
    def test_gradient_reaches_a_state_through_later_outputs(self, kind: str) -> None:
        mixer, kept = mixer_of(kind), {}

        def keep(state: Tensor, pos: int | None) -> Tensor:
            state.retain_grad()
            kept[pos] = state
            return state

        out = run(mixer, hidden_states(), Recorder(edit={"hook_ssm_state": keep}))
        out[:, 8].sum().backward()
        assert [kept[t].grad is not None and bool(kept[t].grad.any()) for t in range(LENGTH)] == (
            [True] * 9 + [False] * 2
        )

    @pytest.mark.parametrize("kind", BOTH)
    def test_zeroed_conv_equals_a_model_without_kernel_and_bias(self, kind: str) -> None:
        mixer, hidden = mixer_of(kind), hidden_states()
        with torch.no_grad():
            plain = mixer(hidden)
            ablated = run(mixer, hidden, Recorder(edit={"hook_conv": zero}))
            mixer.conv1d.weight.zero_()
            mixer.conv1d.bias.zero_()
            without = mixer(hidden)
        torch.testing.assert_close(ablated, without, atol=1e-6, rtol=0)
        assert (plain - ablated).abs().max() > 1e-2

    @pytest.mark.parametrize("kind", BOTH)
    def test_zeroed_write_equals_zeroed_b(self, kind: str) -> None:
        mixer = mixer_of(kind)

        def zero_at_4(tensor: Tensor, pos: int | None) -> Tensor:
            return torch.cat([tensor[:, :4], torch.zeros_like(tensor[:, 4:5]), tensor[:, 5:]], dim=1)

        outs = [
            run(mixer, hidden_states(), Recorder(edit={name: zero_at_4})) for name in ("hook_ssm_write", "hook_ssm_B")
        ]
        torch.testing.assert_close(outs[0], outs[1], atol=2e-6, rtol=0)
        assert not torch.allclose(outs[0], run(mixer, hidden_states()), atol=1e-3)

    @pytest.mark.parametrize("kind", BOTH)
    def test_reading_never_runs_step_by_step_and_positions_run_fused_between(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mixer = mixer_of(kind)
        module, fused = (_ssd, "ssd_scan") if kind == "mamba2" else (_scan, "selective_scan")
        monkeypatch.setattr(module, "by_steps", lambda *a, **k: pytest.fail("ran step by step"))
        native, lengths = getattr(module, fused), []

        def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            lengths.append(x.shape[1])
            return native(x, *args, **kwargs)

        monkeypatch.setattr(module, fused, counted)
        with torch.no_grad():
            run(mixer, hidden_states(), Recorder(read=points_of(mixer)))
            run(mixer, hidden_states(), Recorder(edit={"hook_ssm_state": same}, at=[3, 10]))
        assert lengths == [4, 7]

    def test_x_dt_b_c_are_edited_apart_from_each_other(self) -> None:
        """An edit of what the scan writes leaves dt, B and C alone; one of hook_conv reaches them."""
        mixer, rest = mixer_of("mamba"), ["hook_ssm_dt", "hook_ssm_B", "hook_ssm_C"]
        plain = Recorder(read=rest)
        run(mixer, hidden_states(), plain)
        for name, reaches in (("hook_ssm_x", False), ("hook_conv", True)):
            tap = Recorder(read=rest, edit={name: halve})
            run(mixer, hidden_states(), tap)
            for point in rest:
                assert torch.equal(plain.whole[point], tap.whole[point]) != reaches


# -- mamba-ssm's modules, by their parameter names ----------------------------------------------------


class GatedNorm(nn.Module):
    def __init__(self, width: int, group_size: int, norm_before_gate: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps, self.group_size, self.norm_before_gate = 1e-5, group_size, norm_before_gate


class SSMPackageMamba2(nn.Module):
    """Parameters and attributes as in mamba_ssm.modules.mamba2.Mamba2, whose forward needs a GPU."""

    def __init__(self, *, d_ssm: int, ngroups: int, rmsnorm: bool, before: bool, per_channel_d: bool) -> None:
        super().__init__()
        self.d_state, self.ngroups, self.d_ssm, self.headdim, d_inner = 5, ngroups, d_ssm, 6, 48
        self.nheads, self.dt_limit = d_ssm // 6, (0.0, float("inf"))
        conv = d_ssm + 2 * ngroups * self.d_state
        self.in_proj = nn.Linear(24, 2 * d_inner + 2 * ngroups * self.d_state + self.nheads, bias=False)
        self.conv1d = nn.Conv1d(conv, conv, 4, groups=conv, padding=3)
        self.act = nn.SiLU()
        self.dt_bias = nn.Parameter(torch.randn(self.nheads))
        self.A_log = nn.Parameter(torch.rand(self.nheads) * 2)
        self.D = nn.Parameter(torch.randn(d_ssm if per_channel_d else self.nheads))
        if rmsnorm:
            self.norm = GatedNorm(d_ssm, d_ssm // ngroups, before)
        self.out_proj = nn.Linear(d_inner, 24, bias=False)

    def written_out(self, u: Tensor) -> Tensor:
        """The forward from the definition in the paper, one head and one position at a time."""
        zxbcdt = self.in_proj(u)
        d_mlp = self.out_proj.weight.shape[1] - self.d_ssm
        n = self.ngroups * self.d_state
        z0, x0, z, xbc, dt = zxbcdt.split([d_mlp, d_mlp, self.d_ssm, self.d_ssm + 2 * n, self.nheads], -1)
        xbc = F.silu(self.conv1d(xbc.mT)[..., : u.shape[1]].mT)
        x, B, C = xbc.split([self.d_ssm, n, n], -1)
        dt = F.softplus(dt + self.dt_bias)
        y = torch.zeros_like(x)
        D = self.D if self.D.shape[0] == self.d_ssm else self.D.repeat_interleave(self.headdim)
        for head in range(self.nheads):
            channels = slice(head * self.headdim, (head + 1) * self.headdim)
            group = head // (self.nheads // self.ngroups)
            states = slice(group * self.d_state, (group + 1) * self.d_state)
            state = torch.zeros(u.shape[0], self.headdim, self.d_state, dtype=u.dtype)
            for t in range(u.shape[1]):
                step = dt[:, t, head, None, None]
                outer = x[:, t, channels, None] * B[:, t, None, states]
                state = torch.exp(-step * torch.exp(self.A_log[head])) * state + step * outer
                y[:, t, channels] = (state * C[:, t, None, states]).sum(-1) + D[channels] * x[:, t, channels]
        gate = F.silu(z)
        if hasattr(self, "norm"):
            if not self.norm.norm_before_gate:
                y = y * gate
            groups = y.unflatten(-1, (-1, self.norm.group_size))
            y = (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)
            y = y * self.norm.weight
            if self.norm.norm_before_gate:
                y = y * gate
        else:
            y = y * gate
        return self.out_proj(torch.cat([F.silu(z0) * x0, y], dim=-1))


class TestMambaSSMLayout:
    @pytest.mark.parametrize(
        ("d_ssm", "ngroups", "rmsnorm", "before", "per_channel_d"),
        [
            (48, 1, True, False, False),
            (48, 2, True, True, False),
            (48, 2, False, False, True),
            (24, 1, True, False, False),
        ],
        ids=["default", "norm before gate", "no norm, D per channel", "gated MLP beside"],
    )
    def test_mamba2_equals_the_definition(
        self, d_ssm: int, ngroups: int, rmsnorm: bool, before: bool, per_channel_d: bool
    ) -> None:
        torch.manual_seed(0)
        module = SSMPackageMamba2(
            d_ssm=d_ssm, ngroups=ngroups, rmsnorm=rmsnorm, before=before, per_channel_d=per_channel_d
        ).double()
        tap = Recorder(read=MAMBA2_POINTS)
        hidden = hidden_states(dtype=torch.float64)
        out = mamba2_mixer(module, hidden, tap)
        torch.testing.assert_close(out, module.written_out(hidden), atol=1e-11, rtol=0)
        assert ("hook_inner_norm" in tap.whole) == rmsnorm

    def test_mixers_of_the_other_kind_are_refused(self) -> None:
        with pytest.raises(InputError, match="use mamba2_mixer"):
            mamba_mixer(mixer_of("mamba2"), hidden_states())
        with pytest.raises(InputError, match="use mamba_mixer"):
            mamba2_mixer(mixer_of("mamba"), hidden_states())
        with pytest.raises(InputError, match="Linear has no parameter A_log"):
            mamba_mixer(nn.Linear(2, 2), hidden_states())

    def test_wrong_mask_state_and_input_name_the_shapes(self) -> None:
        mixer, hidden = mixer_of("mamba"), hidden_states()
        with pytest.raises(ShapeError, match=r"attention_mask has shape \(3, 4\).*\(3, 11\)"):
            mamba_mixer(mixer, hidden, attention_mask=torch.ones(3, 4))
        with pytest.raises(ShapeError, match=r"conv_state.*allowed are \(3, 48, 4\) and \(3, 48, 3\)"):
            mamba_mixer(mixer, hidden, conv_state=torch.zeros(3, 48, 2))
        with pytest.raises(ProbelensError, match="initial_state has shape"):
            mamba_mixer(mixer, hidden, ssm_state=torch.zeros(3, 5, 48))
        with pytest.raises(ShapeError, match=r"\(batch, pos, d_model\), got \(3, 24\)"):
            mamba_mixer(mixer, hidden[:, 0])
        with pytest.raises(ShapeError, match="one step takes"):
            mamba_step(mixer, hidden, None)


def test_a_trajectory_is_kept_without_a_copy_only_where_nobody_else_has_it(monkeypatch):
    model, x = pl.wrap(zoo.build("mamba")), zoo.tokens()
    name = "blocks.0.mixer.hook_ssm_state"
    given = []
    monkeypatch.setattr(
        ssm, "offer_last_use", lambda tap, *a: given.append(a[1].data_ptr()) or _tap.offer_last_use(tap, *a)
    )

    def shared(**options):
        return model.run_with_cache(x, name, return_type=None, **options)[1][name].data_ptr() == given[-1]

    with torch.no_grad():
        assert shared()
        kept = model.run_with_cache(x, name)[1][name]
        # The controls: a slice would hold the whole, and two recorders would share one memory.
        assert not shared(pos_slice=slice(0, 1))
        cache, also, _ = recorders([model.hook_dict[name]], False, None, None, None)
        with model.switchboard.listening(also):
            assert not shared()
        torch.testing.assert_close(cache[name], kept, rtol=0, atol=0)
        assert cache[name].data_ptr() != given[-1]
    assert not shared()  # backward may need it


def test_memory_in_huge_pages_is_ordinary_memory(monkeypatch):
    monkeypatch.setattr(_pages, "_SMALLEST", 1)
    like = torch.zeros(1, dtype=torch.float64)
    made = _pages.empty(like, (3, 5))
    made.copy_(torch.arange(15.0).view(3, 5))
    part = made[1:].clone()
    del made
    assert part.tolist() == [[5.0, 6.0, 7.0, 8.0, 9.0], [10.0, 11.0, 12.0, 13.0, 14.0]]
    model, x = pl.wrap(zoo.build("mamba")), zoo.tokens()
    name = "blocks.0.mixer.hook_ssm_state"
    found = model.run_with_cache(x, name)[1][name]
    monkeypatch.setattr(_pages, "_SMALLEST", 1 << 40)
    torch.testing.assert_close(found, model.run_with_cache(x, name)[1][name], rtol=0, atol=0)

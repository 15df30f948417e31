"""The inside of recurrent mixers beside the same mixer written out in plain torch: every value, and every edit.

Each function here is a mixer's formula, one step after the other, from the modules' own parameters. In the place of a
mixer's forward it runs inside the user's model, without us.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

import probelens as pl

AT, LENGTH = 3, 8
Edit = Callable[..., Tensor]


def convolved(conv: Any, x: Tensor) -> Tensor:
    """The last position of the kernel meets the current input. x: (batch, pos, channel)"""
    size = conv.weight.shape[-1]
    padded = F.pad(x, (0, 0, size - 1, 0))
    out = sum(padded[:, k : k + x.shape[1]] * conv.weight[:, 0, k] for k in range(size))
    return out if conv.bias is None else out + conv.bias


def falcon_h1(m: Any, x: Tensor, edit: Edit) -> Tensor:
    """Dao and Gu 2024, arXiv 2405.21060, with the multipliers of Falcon-H1."""
    heads, width, size = m.num_heads, m.head_dim, m.ssm_state_size
    parts = edit("hook_in_proj", m.in_proj(x * m.ssm_in_multiplier) * m.mup_vector)
    z, xBC, dt = parts.split([heads * width, parts.shape[-1] - heads * (width + 1), heads], -1)
    xBC = F.silu(edit("hook_conv", convolved(m.conv1d, xBC)))
    u, B, C = xBC.split([heads * width, m.n_groups * size, m.n_groups * size], -1)
    u = edit("hook_ssm_x", u.unflatten(-1, (heads, width)))
    dt = edit("hook_ssm_dt", F.softplus(dt + m.dt_bias))
    B, C = (edit(n, v.unflatten(-1, (m.n_groups, size))) for n, v in (("hook_ssm_B", B), ("hook_ssm_C", C)))
    B, C = (v.repeat_interleave(heads // m.n_groups, 2) for v in (B, C))
    write = edit("hook_ssm_write", (dt[..., None] * u)[..., None] * B[..., None, :])
    state, ys = torch.zeros_like(write[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.exp(-dt[:, t] * m.A_log.exp())[..., None, None] * state + write[:, t]
        state = edit("hook_ssm_state", state, t)
        ys.append((state * C[:, t, :, None]).sum(-1) + m.D[:, None] * u[:, t])
    y = edit("hook_ssm_y", torch.stack(ys, 1)).flatten(2)
    return m.out_proj(y * edit("hook_gate", F.silu(z)))


def lfm2(m: Any, x: Tensor, edit: Edit) -> Tensor:
    """transformers' Lfm2ShortConv."""
    parts = edit("hook_in_proj", m.in_proj(x)).chunk(3, -1)
    B, C, u = (edit(f"hook_conv_{name}", part) for name, part in zip("BCx", parts, strict=True))
    u = edit("hook_conv", convolved(m.conv, edit("hook_conv_in", B * u)))
    return m.out_proj(edit("hook_conv_y", C * u))


def recurrent_gemma(m: Any, x: Tensor, edit: Edit) -> tuple[Tensor, None]:
    """De et al. 2024, arXiv 2402.19427, section 2.4."""
    lru = m.rg_lru
    u, gate = edit("hook_in_proj", torch.cat([m.linear_x(x), m.linear_y(x)], -1)).chunk(2, -1)
    u = edit("hook_conv", convolved(m.conv_1d, u))
    gates = []
    for side, name in (("input", "hook_lru_gate_i"), ("recurrent", "hook_lru_gate_r")):
        weight, bias = (getattr(lru, f"{side}_gate_{part}") for part in ("weight", "bias"))
        mixed = torch.einsum("bthi,hij->bthj", u.unflatten(-1, weight.shape[:2]), weight) + bias
        gates.append(edit(name, torch.sigmoid(mixed.flatten(-2))))
    a = torch.sigmoid(-lru.recurrent_param) ** (8 * gates[1])
    root = torch.sqrt((1 - a**2).clamp(min=0))
    root[:, 0], first = 1, torch.arange(x.shape[1])[:, None] == 0
    a = edit("hook_lru_a", a.masked_fill(first, 0))
    write = edit("hook_lru_write", root * gates[0] * u)
    state, states = torch.zeros_like(write[:, 0]), []
    for t in range(x.shape[1]):
        state = edit("hook_lru_state", a[:, t] * state + write[:, t], t)
        states.append(state)
    return m.linear_out(torch.stack(states, 1) * edit("hook_gate", m.act_fn(gate))), None


def qwen3_next(m: Any, x: Tensor, edit: Edit) -> Tensor:
    """Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, equation 10, with the state transposed."""
    keys, each = m.num_k_heads, m.num_v_heads // m.num_k_heads
    qkvz = m.in_proj_qkvz(x).unflatten(-1, (keys, -1))
    q, k, v, z = qkvz.split([m.head_k_dim, m.head_k_dim, each * m.head_v_dim, each * m.head_v_dim], -1)
    b, a = m.in_proj_ba(x).unflatten(-1, (keys, -1)).chunk(2, -1)
    parts = edit("hook_in_proj", torch.cat([part.flatten(2) for part in (q, k, v, z, b, a)], -1))
    u, z, b, a = parts.split([m.conv_dim, m.value_dim, keys * each, keys * each], -1)
    u = F.silu(edit("hook_conv", convolved(m.conv1d, u)))
    q, k, v = (
        part.unflatten(-1, (n, -1))
        for part, n in zip(u.split([m.key_dim, m.key_dim, m.value_dim], -1), (keys, keys, keys * each), strict=True)
    )
    q = edit("hook_delta_q", q / (q.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt() / m.head_k_dim**0.5)
    k = edit("hook_delta_k", k / (k.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt())
    v, beta = edit("hook_delta_v", v), edit("hook_delta_beta", torch.sigmoid(b))
    g = edit("hook_delta_g", -m.A_log.exp() * F.softplus(a + m.dt_bias))
    q, k = (part.repeat_interleave(each, 2) for part in (q, k))
    state, ys, one = torch.zeros(len(x), keys * each, m.head_k_dim, m.head_v_dim), [], torch.eye(m.head_k_dim)
    for t in range(x.shape[1]):
        rate = beta[:, t, :, None, None]
        erased = one - rate * k[:, t, :, :, None] * k[:, t, :, None]
        state = erased @ (g[:, t].exp()[..., None, None] * state) + rate * k[:, t, :, :, None] * v[:, t, :, None]
        state = edit("hook_delta_state", state, t)
        ys.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    y = edit("hook_delta_y", torch.stack(ys, 1))
    gate = edit("hook_gate", F.silu(z.unflatten(-1, (-1, m.head_v_dim))))
    normed = m.norm.weight * y / (y.square().mean(-1, keepdim=True) + m.norm.variance_epsilon).sqrt()
    return m.out_proj(edit("hook_inner_norm", (normed * gate).flatten(2)))


def rwkv(m: Any, x: Tensor, edit: Edit) -> tuple[Tensor, None]:
    """Peng et al. 2023, arXiv 2305.13048, equations 11 to 19, in double precision instead of scaled sums."""
    before = F.pad(x, (0, 0, 1, -1))
    mixed = {n: x * (s := getattr(m, f"time_mix_{n}")) + before * (1 - s) for n in ("key", "value", "receptance")}
    r = edit("hook_wkv_r", torch.sigmoid(m.receptance(mixed["receptance"])))
    k, v = edit("hook_wkv_k", m.key(mixed["key"])), edit("hook_wkv_v", m.value(mixed["value"]))
    total, weight, ys = 0.0, 0.0, []
    for t in range(x.shape[1]):
        now, bonus = k[:, t].double().exp(), (m.time_first + k[:, t]).double().exp()
        ys.append((total + bonus * v[:, t]) / (weight + bonus))
        kept = torch.exp(-m.time_decay.double().exp())
        total, weight = kept * total + now * v[:, t], kept * weight + now
        state = edit("hook_wkv_state", torch.stack([total / weight, weight.log()], 1).float(), t).double()
        weight = state[:, 1].exp()
        total = state[:, 0] * weight
    return m.output(r * edit("hook_wkv_y", torch.stack(ys, 1).float())), None


FORMULAS: dict[str, Callable[[Any, Tensor, Edit], Any]] = {
    "falcon-h1": falcon_h1,
    "lfm2": lfm2,
    "recurrent-gemma": recurrent_gemma,
    "qwen3-next": qwen3_next,
    "rwkv": rwkv,
}  # fmt: skip


def mixer_of(raw: nn.Module, model: pl.HookedModel) -> tuple[str, Any]:
    """The last mixer with an inside: the prefix of its points, and the module."""
    point = [p for p in model.hook_dict.values() if p.kind == "interior" and ".mixer." in p.name][-1]
    return point.name.rpartition(".")[0], raw.get_submodule(point.module)


def inside(model: pl.HookedModel, prefix: str) -> list[pl.HookPoint]:
    return [p for p in model.hook_dict.values() if p.kind == "interior" and p.name.startswith(f"{prefix}.")]


def by_hand(name: str, raw: nn.Module, mixer: Any, x: Tensor, edit: Edit) -> Tensor:
    """Logits of the user's model with the formula in the place of one mixer's forward."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return FORMULAS[name](mixer, args[0] if args else next(iter(kwargs.values())), edit)

    mixer.forward = forward
    try:
        return zoo.logits(raw, x, use_cache=False)
    finally:
        del mixer.forward


@pytest.mark.parametrize("name", FORMULAS)
def test_what_lies_inside_a_mixer_is_what_its_formula_says(name: str) -> None:
    raw, x = zoo.more(name), zoo.tokens(2, LENGTH)
    model = pl.wrap(raw)
    prefix, mixer = mixer_of(raw, model)
    seen: dict[str, list[Tensor]] = {}

    def keep(point: str, tensor: Tensor, pos: int | None = None) -> Tensor:
        seen.setdefault(point, []).append(tensor)
        return tensor

    want = zoo.logits(raw, x)
    assert (by_hand(name, raw, mixer, x, keep) - want).abs().max() <= 2e-5 * want.abs().max()
    with torch.no_grad():
        out, cache = model.run_with_cache(x, f"{prefix}.*")
    assert (out - want).abs().max() <= 1e-5 * want.abs().max()
    assert set(seen) == {p.name.rpartition(".")[2] for p in inside(model, prefix)}
    for point, values in seen.items():
        steps = model.point(f"{prefix}.{point}").step
        value = torch.stack(values, 1) if steps else values[0]
        found = cache[f"{prefix}.{point}"]
        assert found.shape == value.shape, point
        assert len(model.point(f"{prefix}.{point}").axes) == value.ndim, point
        assert (found - value).abs().max() <= 2e-5 * value.abs().max(), point


@pytest.mark.parametrize("name", FORMULAS)
def test_an_edit_at_one_position_is_the_same_edit_by_hand(name: str) -> None:
    raw, x = zoo.more(name), zoo.tokens(2, LENGTH)
    model = pl.wrap(raw)
    prefix, mixer = mixer_of(raw, model)
    plain = zoo.logits(raw, x)
    for point in inside(model, prefix):
        short = point.name.rpartition(".")[2]

        def new(tensor: Tensor) -> Tensor:
            return tensor * 0.5 + 2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))

        def edit(name: str, tensor: Tensor, pos: int | None = None, short: str = short) -> Tensor:
            if name != short or pos not in (None, AT):
                return tensor
            if pos is not None:
                return new(tensor)
            tensor = tensor.clone()
            tensor[:, AT] = new(tensor[:, AT])
            return tensor

        def hook(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
            return edit(hook.name.rpartition(".")[2], tensor, hook.pos)

        want = by_hand(name, raw, mixer, x, edit)
        with torch.no_grad():
            got = model.run_with_hooks(x, [(point.name, pl.at(AT, hook) if point.step else hook)])
        assert (got - want).abs().max() <= 3e-5 * want.abs().max(), short
        assert (want - plain)[:, AT:].abs().max() > 1e-3, short
        assert (want - plain)[:, :AT].abs().max() <= 1e-5, short


@pytest.mark.parametrize("name", FORMULAS)
def test_the_primitives_work_inside_these_mixers(name: str) -> None:
    raw = zoo.more(name)
    model = pl.wrap(raw)
    prefix, _ = mixer_of(raw, model)
    states = [p.name for p in model.hook_dict.values() if p.step and p.name.startswith(prefix)]
    point = states[0] if states else f"{prefix}.hook_conv"
    clean, corrupted = zoo.tokens(3, LENGTH), zoo.tokens(3, LENGTH)
    corrupted[:, 1] = (corrupted[:, 1] + 1) % zoo.VOCAB
    acts = pl.collect(model, pl.Batch(clean, {"y": clean % 2}), point)[point]
    with torch.no_grad():
        a, b = (model.run_with_cache(x, point)[1][point] for x in (clean, corrupted))
        put = model.run_with_hooks(corrupted, [(point, pl.at(AT, pl.edits.replace(a[:, AT])))])
    assert torch.allclose(acts.reshape(a.shape), a, atol=1e-6)
    assert not torch.equal(a, b)
    with torch.no_grad():
        answers = torch.stack([zoo.logits(raw, x)[:, -1].argmax(-1) for x in (clean, corrupted)], 1)
    answers[:, 1] = torch.where(answers[:, 1] == answers[:, 0], (answers[:, 0] + 1) % zoo.VOCAB, answers[:, 1])
    pairs = pl.PatchPairs(clean, corrupted, 1, LENGTH - 1, answers)
    patched = pl.patch(model, pairs, [point], pos=AT)
    rows = torch.arange(3)
    difference = put[rows, -1, answers[:, 0]] - put[rows, -1, answers[:, 1]]
    assert torch.allclose(patched.values.flatten(), difference, atol=1e-4)


@pytest.mark.parametrize("before", [True, False])
def test_the_gated_norm_of_falcon_h1_goes_by_groups_before_or_after_the_gate(before: bool) -> None:
    raw = zoo.more("falcon-h1", mamba_rms_norm=True, mamba_norm_before_gate=before, mamba_n_groups=2)
    model, x, name = pl.wrap(raw), zoo.tokens(2, LENGTH), "blocks.1.mixer.hook_inner_norm"
    seen: list[Tensor] = []
    handle = raw.model.layers[1].mamba.norm.register_forward_hook(lambda m, args, out: seen.append(out))
    want = zoo.logits(raw, x)
    handle.remove()
    with torch.no_grad():
        out, cache = model.run_with_cache(x, name)
    assert (out - want).abs().max() <= 1e-5 * want.abs().max()
    assert (cache[name] - seen[0]).abs().max() <= 1e-5 * seen[0].abs().max()
    assert "blocks.1.mixer.hook_inner_norm" not in pl.wrap(zoo.more("falcon-h1")).hook_dict


def stepped(raw: Any, x: Tensor, edit: Callable[[Any], None]) -> Tensor:
    """Logits of the positions after AT by transformers' own decoding, what it carries edited after AT."""
    kind = raw.config.model_type
    name = next(
        n for n in ("state", "cache", "past_key_values") if n in inspect.signature(type(raw).forward).parameters
    )
    # RecurrentGemma doesn't give back the cache that it makes.
    carried = {name: transformers.DynamicCache(config=raw.config)} if kind == "recurrent_gemma" else {}
    with torch.no_grad():
        out = raw(x[:, : AT + 1], use_cache=True, **carried)
        carried = carried or {name: out[name]}
        edit(carried[name])
        logits = [raw(x[:, pos : pos + 1], use_cache=True, **carried).logits for pos in range(AT + 1, x.shape[1])]
    return torch.cat(logits, 1)


def plus(tensor: Any, hook: Any = None) -> Any:
    return tensor + 5


def in_cache(raw: Any, carried: Any, layer: int) -> None:
    states = carried.layers[layer].recurrent_states
    (states if isinstance(states, Tensor) else states[0]).add_(5)


def on_module(raw: Any, carried: Any, layer: int) -> None:
    raw.model.layers[layer].temporal_block.rg_lru.recurrent_states += 5


def in_states(raw: Any, carried: Any, layer: int) -> None:
    total, weight, highest = (s[:, :, layer] for s in carried[2:])
    total += 5 * weight  # the average is total / weight,
    highest += 5  # and the log of the weight log(weight) + highest


CARRIED: dict[str, Callable[[Any, Any, int], None]] = {
    "falcon-h1": in_cache,
    "recurrent-gemma": on_module,
    "qwen3-next": in_cache,
    "rwkv": in_states,
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_an_edited_state_is_transformers_own_decoding_with_that_state(name: str) -> None:
    # In the last block: what the edited step itself puts out reaches no later position.
    change = {"block_types": ["recurrent", "attention", "recurrent"]} if name == "recurrent-gemma" else {}
    raw, x = zoo.more(name, **change), zoo.tokens(1, LENGTH)
    model = pl.wrap(raw)
    (point,) = [p for p in inside(model, mixer_of(raw, model)[0]) if p.step]
    plain = zoo.logits(raw, x)
    want = stepped(raw, x, lambda carried: CARRIED[name](raw, carried, point.layer()))
    with torch.no_grad():
        got = model.run_with_hooks(x, [(point.name, pl.at(AT, plus))])
    assert (stepped(raw, x, lambda carried: None) - plain[:, AT + 1 :]).abs().max() <= 5e-5 * plain.abs().max()
    assert (got[:, AT + 1 :] - want).abs().max() <= 5e-5 * plain.abs().max()
    assert (got - plain)[:, AT + 1 :].abs().max() > 1e-3


def test_rows_that_pack_several_sequences_are_refused_by_name() -> None:
    raw, x = zoo.more("lfm2"), zoo.tokens(1, 6)
    model = pl.wrap(raw)
    packed = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    with (
        pytest.raises(pl.InputError, match="seq_idx packs several sequences.*Lfm2ShortConv"),
        model.hooks([("blocks.0.mixer.hook_conv", lambda t, hook: t)]),
    ):
        raw(x, seq_idx=packed)


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_without_its_past_taps_a_convolution_is_a_product(name: str) -> None:
    raw, x = zoo.more(name), zoo.tokens(4, LENGTH)
    model = pl.wrap(raw)
    batch = pl.Batch(x, {"y": x % 2})
    found = pl.ablate_convolution(model, batch, ["current_tap", "zero"], metric="next_token_loss")
    with torch.no_grad():
        for module in raw.modules():
            if isinstance(module, nn.Conv1d):
                module.weight[..., :-1] = 0
    out = zoo.logits(raw, x)
    loss = F.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(4, -1).mean(1)
    current, zero = found.values
    assert torch.allclose(current.float().flatten(), loss, rtol=1e-4)
    assert not torch.allclose(zero, current, rtol=1e-3)


def test_the_gated_delta_net_of_qwen35_has_the_same_inside() -> None:
    cls, config = (getattr(transformers, f"Qwen3_5{end}", None) for end in ("ForCausalLM", "TextConfig"))
    if cls is None or config is None:
        pytest.skip(f"transformers {transformers.__version__} has no text model of Qwen3.5")
    torch.manual_seed(0)
    sizes = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    }
    raw = cls(
        config(
            **sizes, vocab_size=zoo.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention", "linear_attention"],
            initializer_range=0.1,
        )
    ).eval()  # fmt: skip
    model, x, name = pl.wrap(raw), zoo.tokens(2, LENGTH), "blocks.1.mixer.hook_inner_norm"
    seen: list[Tensor] = []
    handle = raw.get_submodule(model.point(name).module).out_proj.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda m, args: seen.append(args[0])
    )
    want = zoo.logits(raw, x)
    handle.remove()
    with torch.no_grad():
        out, cache = model.run_with_cache(x, "blocks.1.mixer.*")
    assert (out - want).abs().max() <= 1e-5 * want.abs().max()
    assert (cache[name] - seen[0]).abs().max() <= 1e-5 * seen[0].abs().max()
    assert cache["blocks.1.mixer.hook_delta_state"].shape == (2, LENGTH, 4, 4, 4)


def test_a_batch_of_rwkvs_cannot_go_on_from_its_states_inside_hooks() -> None:
    raw, x = zoo.more("rwkv"), zoo.tokens(2, 4)
    model, point = pl.wrap(raw), "blocks.1.mixer.hook_wkv_y"
    with torch.no_grad():
        out = raw(x, use_cache=True)
        hooks = model.hooks([(point, lambda t, hook: t)])
        with pytest.raises(pl.InputError, match="2 examples go on from an RWKV's states.*one example"), hooks:
            raw(x[:, :1], state=out.state, use_cache=True)
        # What is refused: there, what the other example says changes the first one's logits.
        other = raw(x[:, :1].roll(1, 0), state=[s.clone() for s in out.state], use_cache=True).logits
        assert other.shape != (2, 1, zoo.VOCAB)


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3-next", "recurrent-gemma", "mamba", "rwkv"])
def test_an_edit_that_goes_on_from_a_run_without_hooks_is_at_its_position_or_refused(name: str) -> None:
    change = {"block_types": ["recurrent", "attention", "recurrent"]} if name == "recurrent-gemma" else {}
    raw, x = zoo.more(name, **change), zoo.tokens(1, AT + 3)
    model = pl.wrap(raw)
    point = [p.name for p in model.hook_dict.values() if p.step][-1]
    key = next(
        n
        for n in ("state", "cache", "past_key_values", "cache_params")
        if n in inspect.signature(type(raw).forward).parameters
    )
    given = {key: transformers.DynamicCache(config=raw.config)} if name == "recurrent-gemma" else {}
    with torch.no_grad():
        want = model.run_with_hooks(x, [(point, pl.at(AT + 1, plus))])
        out = raw(x[:, : AT + 1], use_cache=True, **given)
        given = given or {key: out[key]}
        if name in ("mamba", "rwkv"):
            with pytest.raises(pl.InputError, match="doesn't say how many positions"), model.hooks([(point, plus)]):
                raw(x[:, AT + 1 : AT + 2], use_cache=True, **given)
            _, cache = model.run_with_cache({"input_ids": x[:, AT + 1 : AT + 2], "use_cache": True, **given}, point)
            assert cache[point].shape[1] == 1
            return
        with model.hooks([(point, pl.at(AT + 1, plus))]):
            got = [raw(x[:, pos : pos + 1], use_cache=True, **given).logits for pos in range(AT + 1, x.shape[1])]
    assert torch.allclose(torch.cat(got, 1), want[:, AT + 1 :], atol=1e-4)
    assert (want - zoo.logits(raw, x))[:, AT + 1 :].abs().max() > 1e-3


@pytest.mark.parametrize("name", FORMULAS)
def test_an_interchange_of_the_whole_inside_is_the_patch_by_hand(name: str) -> None:
    raw = zoo.more(name)
    model = pl.wrap(raw)
    states = [p.name for p in inside(model, mixer_of(raw, model)[0]) if p.step]
    point = states[0] if states else f"{mixer_of(raw, model)[0]}.hook_conv"
    clean = zoo.tokens(6, LENGTH)
    corrupted = (clean + 1 + zoo.tokens(6, LENGTH, seed=1) % (zoo.VOCAB - 1)) % zoo.VOCAB
    with torch.no_grad():
        answers = torch.stack([zoo.logits(raw, x)[:, -1].argmax(-1) for x in (clean, corrupted)], 1)
        held = model.run_with_cache(clean, point)[1][point]
        put = model.run_with_hooks(corrupted, [(point, pl.at(AT, pl.edits.replace(held[:, AT])))])
    rows = answers[:, 0] != answers[:, 1]
    pairs = pl.PatchPairs(clean[rows], corrupted[rows], AT, LENGTH - 1, answers[rows])
    acts = pl.collect(model, pl.Batch(clean, {"y": clean % 2}), point, pos=AT)[point]
    space = pl.subspaces.pca(acts.flatten(1), 1)
    found = pl.interchange(model, pairs, {point: space}, pos=AT, controls=1)
    full = next(row for row in found.rows if row["condition"] == "full")
    assert full["iia"] == pytest.approx(float((put[rows, -1].argmax(-1) == answers[rows, 0]).float().mean()))

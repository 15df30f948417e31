"""ActivationCache: the same tensor by every name, stacked and accumulated, and clear errors."""

from __future__ import annotations

import pytest
import torch
import zoo

import probelens as pl
from probelens.hooks.shorthand import NameTable


@pytest.fixture(scope="module")
def cache() -> pl.ActivationCache:
    return pl.wrap(zoo.build("gpt2")).run_with_cache(zoo.tokens())[1]


def test_names_shorthands_and_negative_layers_are_the_same_tensor(cache: pl.ActivationCache) -> None:
    full = cache["blocks.2.hook_resid_post"]
    for key in (("resid_post", 2), ("resid_post", -1), "blocks.2.hook_resid_post"):
        assert cache[key] is full
        assert key in cache
    assert cache["embed"] is cache["hook_embed"]
    assert cache["post", 1, "mlp"] is cache["blocks.1.mlp.hook_post"]
    assert cache["pattern", 0] is cache["blocks.0.attn.hook_pattern"]
    assert "blocks.9.hook_resid_post" not in cache
    assert 3 not in cache


def test_mapping_methods(cache: pl.ActivationCache) -> None:
    assert list(cache) == list(cache.keys())
    assert len(cache) == len(list(cache.values())) == len(list(cache.items()))
    assert "MiB" in repr(cache)


def test_moving_a_cache_changes_it_as_in_transformer_lens(cache: pl.ActivationCache) -> None:
    mine = pl.ActivationCache(dict(cache.items()), cache.model)
    assert mine.to(dtype=torch.float64) is mine
    assert mine["embed"].dtype == torch.float64
    assert cache["embed"].dtype == torch.float32
    one = pl.ActivationCache({n: t[:1] for n, t in cache.items()}, cache.model)
    assert one.remove_batch_dim() is one
    assert one.remove_batch_dim() is one
    assert torch.equal(one["embed"], cache["embed"][0])
    assert torch.equal(one.accumulated_resid(pos_slice=-1)[0], cache["resid_pre", 0][0, -1])


def test_stack_and_accumulate(cache: pl.ActivationCache) -> None:
    stack = cache.stack_activation("resid_post")
    assert stack.shape == (3, 2, 7, zoo.WIDTH)
    assert torch.equal(stack[1], cache["resid_post", 1])
    assert cache.stack_activation("z", layer=2, sublayer_type="attn").shape[0] == 2
    total, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    assert torch.equal(total[-1], cache["resid_post", -1])
    assert torch.equal(cache.accumulated_resid(1)[-1], cache["resid_pre", 1])
    normed = cache.accumulated_resid(apply_ln=True)
    assert torch.allclose(normed[-1], cache["ln_final.hook_out"], atol=1e-6)
    assert cache.accumulated_resid(pos_slice=-1).shape == (4, 2, zoo.WIDTH)


def test_what_the_layers_add_sums_to_the_residual_stream(cache: pl.ActivationCache) -> None:
    parts, labels = cache.decompose_resid(return_labels=True)
    assert labels[:4] == ["embed", "pos_embed", "0_attn_out", "0_mlp_out"]
    assert torch.allclose(parts.sum(0), cache["resid_post", -1], atol=1e-6)
    assert torch.allclose(cache.decompose_resid(1).sum(0), cache["resid_pre", 1], atol=1e-6)
    assert torch.allclose(cache.decompose_resid(1, mlp_input=True).sum(0), cache["resid_mid", 1], atol=1e-6)
    only = cache.decompose_resid(mode="mlp", incl_embeds=False, pos_slice=-1)
    assert torch.equal(only, torch.stack([cache["mlp_out", i][:, -1] for i in range(3)]))
    mamba = pl.wrap(zoo.build("mamba")).run_with_cache(zoo.tokens())[1]
    parts, labels = mamba.decompose_resid(return_labels=True)
    assert labels == ["embed", "0_mixer_out", "1_mixer_out", "2_mixer_out"]
    assert torch.allclose(parts.sum(0), mamba["resid_post", -1], atol=1e-5)
    for kw, text in (({"apply_ln": True}, "accumulated_resid"), ({"mode": "attention"}, "'attn'")):
        with pytest.raises(pl.InputError, match=text):
            cache.decompose_resid(**kw)


NO_SUM = ("opt-norm-after", "bart", "lstm", "gru")
SUMMED = [n for n in zoo.EVERY if not n.startswith((*NO_SUM, "mamba-ssm"))]


@pytest.mark.parametrize("name", SUMMED)
def test_the_parts_sum_on_every_architecture(name: str) -> None:
    model = pl.wrap(zoo.more(name))
    _, cache = model.run_with_cache(zoo.tokens(2, 5).clamp(min=2))
    n = model.cfg.n_layers
    for layer in range(n + 1):
        parts, labels = cache.decompose_resid(layer or 0, return_labels=True)
        want = cache["resid_post", -1] if layer == n else cache["resid_pre", layer]
        assert (parts.sum(0) - want).norm() <= 1e-5 * want.norm(), (layer, labels)
    assert len(set(labels)) == len(labels) == len(parts)
    if ("resid_mid", 0) in cache:
        parts = cache.decompose_resid(0, mlp_input=True)
        want = cache["resid_mid", 0]
        assert (parts.sum(0) - want).norm() <= 1e-5 * want.norm()
    assert ({"0_mixer_out", "0_attn_out"} <= {*labels}) == (name == "falcon-h1")
    assert ("0_pre_ln" in labels) == (name == "rwkv")


def test_a_residual_stream_that_is_no_sum_is_refused() -> None:
    for name in NO_SUM:
        _, cache = pl.wrap(zoo.more(name)).run_with_cache(zoo.tokens(2, 5).clamp(min=2))
        with pytest.raises(pl.ProbelensError, match="projects one onto|norm every sum|not found"):
            cache.decompose_resid()
    model = pl.wrap(zoo.more("rwkv", num_hidden_layers=4, rescale_every=2))
    _, cache = model.run_with_cache(zoo.tokens(2, 5))
    with pytest.raises(pl.InputError, match="halves its residual stream after every 2"):
        cache.decompose_resid()
    assert torch.allclose(cache.decompose_resid(1).sum(0), cache["resid_pre", 1], rtol=1e-4)
    assert not torch.allclose(cache["resid_pre", 2], cache["resid_post", 1]), "it does"


def test_what_needs_weights_says_where_it_is_to_be_had(cache: pl.ActivationCache) -> None:
    assert not hasattr(cache, "compute_head_results")
    with pytest.raises(pl.InputError, match="build_bridge_from_module"):
        cache.compute_head_results()
    with pytest.raises(AttributeError, match="no attribute 'stack_heads'"):
        cache.stack_heads  # noqa: B018


@pytest.mark.parametrize("short", ["k1", "pattern2", ("attn", 2), ("key", 1), ("k", 1, "a"), ("mixer_out", 0)])
def test_shorthands_of_transformer_lens(cache: pl.ActivationCache, short: object) -> None:
    wanted = {"k1": "attn.hook_k", ("key", 1): "attn.hook_k", ("k", 1, "a"): "attn.hook_k"}
    if short == ("mixer_out", 0):
        cache = pl.wrap(zoo.build("mamba")).run_with_cache(zoo.tokens(), "*hook_out")[1]
        assert cache[short] is cache["blocks.0.mixer.hook_out"]
        return
    layer = 1 if short in wanted else 2
    assert cache[short] is cache[f"blocks.{layer}.{wanted.get(short, 'attn.hook_pattern')}"]


def test_gradients_at_recurrent_states_are_kept_for_every_step() -> None:
    raw, x = zoo.build("lstm"), zoo.tokens()
    model = pl.wrap(raw)
    _, cache = model.run_with_cache(x, "blocks.2.rnn.hook_h", incl_bwd=True, return_type="loss")
    rnn, h, c = raw.layers[2], torch.zeros(2, zoo.WIDTH), torch.zeros(2, zoo.WIDTH)
    cell = torch.nn.LSTMCell(zoo.WIDTH, zoo.WIDTH)
    cell.load_state_dict({name.replace("_l0", ""): value for name, value in rnn.state_dict().items()})
    inputs = raw.layers[1](raw.layers[0](raw.embed(x))[0])[0].detach()
    states = []
    for t in range(x.shape[1]):
        h, c = cell(inputs[:, t], (h, c))
        h.retain_grad()
        states.append(h)
    model.loss_fn(raw.head(torch.stack(states, 1)), x).backward()
    want = torch.stack([h.grad for h in states], 1)
    assert want[:, 1:-1].abs().amax((0, 2)).min() > 1e-5
    assert torch.allclose(cache["blocks.2.rnn.hook_h_grad"], want, atol=1e-6)


def test_batch_axis(cache: pl.ActivationCache) -> None:
    one = cache.apply_slice_to_batch_dim(1)
    assert torch.equal(one["embed"], cache["embed"][1])
    assert not one.has_batch_dim
    with pytest.raises(pl.ShapeError, match="batch of 1"):
        cache.remove_batch_dim()
    with pytest.raises(pl.ShapeError, match="no batch axis"):
        one.apply_slice_to_batch_dim(0)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("resid_post", 3), "3 blocks"),
        (("resid_pots", 1), "hook_resid_post"),
        ("blocks.0.hook_resid_pots", r"hook_resid_post.*holds 44 activations; list"),
        (("resid_post", 1.5), r"the layer is an integer, got 1\.5"),
    ],
)
def test_unknown_keys_say_what_there_is(cache: pl.ActivationCache, key: object, text: str) -> None:
    with pytest.raises(pl.UnknownHookError, match=text):
        cache[key]  # type: ignore[index]


def test_an_ambiguous_shorthand_asks_for_the_layer_type() -> None:
    table = NameTable(["blocks.0.attn.hook_out", "blocks.0.mlp.hook_out"])
    with pytest.raises(pl.UnknownHookError, match="layer type"):
        table.one(("out", 0))
    assert table.one(("out", 0, "mlp")) == "blocks.0.mlp.hook_out"


def test_a_cache_without_its_model_still_resolves_names(cache: pl.ActivationCache) -> None:
    alone = pl.ActivationCache(dict(cache.items()), None)
    assert torch.equal(alone["resid_post", -1], cache["resid_post", -1])
    with pytest.raises(pl.InputError, match="final norm"):
        alone.accumulated_resid(apply_ln=True)


def test_gradients_are_found_by_every_name_of_their_point() -> None:
    raw = zoo.build("neox")
    model, x = pl.wrap(raw), zoo.tokens()
    _, cache = model.run_with_cache(
        x, incl_bwd=True, return_type="loss", names_filter=lambda name: "mlp.hook_out" in name
    )
    assert {*cache} == {f"blocks.{layer}.hook_mlp_out{end}" for layer in range(zoo.LAYERS) for end in ("", "_grad")}
    seen: list[torch.Tensor] = []
    handle = raw.gpt_neox.layers[1].mlp.register_forward_hook(
        lambda m, args, out: (out.retain_grad(), seen.append(out))[0]
    )
    out = raw(x)
    handle.remove()
    torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    want = seen[0].grad
    assert want is not None
    path = "gpt_neox.layers.1.mlp.hook_out_grad"
    for name in (
        "blocks.1.hook_mlp_out_grad",
        "blocks.1.mlp.hook_out_grad",
        ("mlp_out_grad", 1),
        ("mlp_out_grad", -2),
        path,
    ):
        torch.testing.assert_close(cache[name], want, atol=1e-6, rtol=1e-4)
        assert name in cache
    with pytest.raises(pl.UnknownHookError, match="mlp_out"):
        cache["blocks.1.mlp.hook_outs_grad"]
    assert "blocks.1.hook_attn_out_grad" not in cache


def test_what_is_not_listed_is_found_by_every_name_too() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    path = "gpt_neox.layers.0.post_attention_layernorm.hook_in"
    names = {path, "blocks.0.ln2.hook_in", "blocks.0.hook_mlp_in"}
    for asked in names:
        _, cache = model.run_with_cache(x, asked)
        assert list(cache) == [asked]
        assert all(cache[name] is cache[asked] for name in names)

"""Code written for TransformerLens runs unchanged on a wrapped model, and gives TransformerLens' own numbers.

Everything here is run twice: on a TransformerBridge, and on a wrapped Hugging Face model with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bridges
import pytest
import torch
import transformer_lens.patching as patching
import transformer_lens.utilities as utils
import zoo
from transformer_lens import ActivationCache as LensCache
from transformer_lens.head_detector import detect_head
from transformer_lens.model_protocol import TransformerLensModel, TransformerLensModelWithWeights

import probelens as pl

SEQUENTIAL = ("gpt2", "neox-sequential", "llama", "gemma2")
LENGTH = 3


def both(name: str, tokenizer: Any = None) -> tuple[Any, pl.HookedModel]:
    options = {} if tokenizer is None else {"tokenizer": tokenizer}
    return bridges.bridge(name, tokenizer), pl.wrap(zoo.build(name), **options)


def caches(name: str, x: torch.Tensor) -> tuple[Any, pl.ActivationCache]:
    lens, ours = both(name)
    with torch.no_grad():
        return lens.run_with_cache(x, use_cache=False)[1], ours.run_with_cache(x)[1]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def per_example(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def same(got: Any, want: Any, atol: float = 2e-6) -> None:
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-4, atol=atol), (got - want).abs().max()
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key], atol)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other, atol)
    else:
        assert got == (pytest.approx(want, rel=1e-4, abs=atol) if isinstance(want, float) else want)


# -- transformer_lens.patching ------------------------------------------------------------------------------------

HEADS = [
    "attn_head_out_by_pos", "attn_head_q_by_pos", "attn_head_k_by_pos", "attn_head_v_by_pos",
    "attn_head_pattern_by_pos", "attn_head_pattern_dest_src_pos", "attn_head_out_all_pos", "attn_head_q_all_pos",
    "attn_head_k_all_pos", "attn_head_v_all_pos", "attn_head_pattern_all_pos", "attn_head_all_pos_every",
    "attn_head_by_pos_every",
]  # fmt: skip
STREAM = ["resid_pre", "resid_mid", "attn_out", "mlp_out", "block_every"]


def swept(name: str, function: Callable[..., Any], **kw: Any) -> tuple[Any, Any]:
    clean, corrupted = zoo.tokens(2, LENGTH, 1), zoo.tokens(2, LENGTH, 2)
    found = []
    for model, cache in zip(both(name), caches(name, clean), strict=True):
        with torch.no_grad():
            found.append(function(model, corrupted, cache, **kw))
    return found[1], found[0]


@pytest.mark.parametrize("name", bridges.ATTENTION)
def test_the_patching_functions_give_the_numbers_that_they_give_on_a_bridge(name: str) -> None:
    # The whole list where heads are and where they aren't shared; what differs between the others is the rest.
    heads = HEADS if name in ("gpt2", "llama") else HEADS[:5]
    shared = [f for f in STREAM + heads if f != "resid_mid" or name in SEQUENTIAL]
    clean, corrupted = zoo.tokens(2, LENGTH, 1), zoo.tokens(2, LENGTH, 2)
    models, kept = both(name), caches(name, clean)
    for function in shared:
        run = getattr(patching, f"get_act_patch_{function}")
        with torch.no_grad():
            want, got = (run(model, corrupted, cache, metric) for model, cache in zip(models, kept, strict=True))
        assert want.std() > 1e-5, function
        same(got, want)


@pytest.mark.parametrize("name", bridges.SSMS)
def test_generic_patching_runs_on_recurrent_models_too(name: str) -> None:
    got, want = swept(name, patching.get_act_patch_resid_pre, patching_metric=metric)
    assert want.std() > 1e-2
    same(got, want)
    for activation in ("resid_post", "mixer_out"):
        generic = partial(
            patching.generic_activation_patch, patching_metric=metric, activation_name=activation,
            patch_setter=patching.layer_pos_patch_setter, index_axis_names=("layer", "pos"),
        )  # fmt: skip
        same(*swept(name, generic))


def test_statistics_over_examples_and_several_metrics() -> None:
    metrics = {"difference": per_example, "level": lambda logits: logits[:, -1, 3]}
    run = partial(patching.get_act_patch_resid_pre, patching_metric=metrics, reduce="none", baseline=True)
    got, want = swept("gpt2", run)
    same(got.values, want.values)
    same(got.effect(), want.effect())
    same(got["level"].mean(), want["level"].mean())


def test_patching_a_model_in_training_mode_is_refused_as_it_is_of_a_bridge() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens(2, LENGTH)
    _, cache = model.run_with_cache(x)
    model.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        patching.get_act_patch_resid_pre(model, x, cache, metric)
    assert model.original_model is model.module


def test_functions_without_meaning_on_an_architecture_fail_by_name() -> None:
    with pytest.raises(KeyError, match="resid_mid"):
        swept("neox", patching.get_act_patch_resid_mid, patching_metric=metric)
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens(2, LENGTH)
    _, cache = model.run_with_cache(x)
    with pytest.raises(AttributeError, match="build_bridge_from_module"):
        patching.get_act_patch_direct_path(model, x, cache, cache, metric, src_layer=0, src_head=0)
    for attribute in ("W_U", "blocks", "W_Q", "set_use_attn_result"):
        assert not hasattr(model, attribute)
    with pytest.raises(AttributeError, match=r"model\.module\.generate"):
        model.generate("text")
    with pytest.raises(AttributeError, match="no attribute 'run_with_cach'"):
        model.run_with_cach(x)


def test_a_wrapped_model_is_a_model_for_transformer_lens() -> None:
    model = pl.wrap(zoo.build("llama"))
    assert isinstance(model, TransformerLensModel)
    assert not isinstance(model, TransformerLensModelWithWeights)
    bridge = bridges.bridge("llama")
    for key in ("n_layers", "d_model", "n_heads", "d_head", "n_key_value_heads", "d_mlp", "d_vocab", "n_ctx", "dtype"):
        assert getattr(model.cfg, key) == getattr(bridge.cfg, key), key


# -- caches ---------------------------------------------------------------------------------------------------------

STEMS = ["resid_pre", "resid_post", "resid_mid", "attn_out", "mlp_out", "q", "k", "v", "attn_scores", "pattern", "z"]
STEMS += ["pre", "post", "pre_linear"]


@pytest.mark.parametrize("name", bridges.ATTENTION)
def test_caches_hold_the_same_tensors_under_the_same_names(name: str) -> None:
    lens, ours = caches(name, zoo.tokens())
    compared = 0
    for layer in range(zoo.LAYERS):
        for stem in STEMS:
            full = utils.get_act_name(stem, layer)
            if full not in lens.cache_dict:
                assert full not in ours, full
                continue
            compared += 1
            assert ours[full] is ours[stem, layer] is ours[stem, layer - zoo.LAYERS]
            if name != "gpt2" and stem in ("q", "k"):
                # Before the rotary embedding there, after it here: the scores that they make are the same.
                assert (ours[full] - lens[full]).abs().max() > 1e-2
            elif stem == "attn_scores":
                seen = lens[full] > -1e9
                assert torch.equal(seen, ours[full] > -1e9)
                same(ours[full][seen], lens[full][seen])
            else:
                same(ours[full], lens[full])
    assert compared == zoo.LAYERS * (len(STEMS) - (name in ("gpt2", "neox", "neox-sequential")) - (name == "neox"))
    for full in ("hook_embed", "ln_final.hook_in", "ln_final.hook_out", "unembed.hook_in", "unembed.hook_out"):
        same(ours[full], lens[full])
    assert ours["embed"] is ours[utils.get_act_name("embed")]
    for short in ("k1", "pattern2", ("attn", 1), ("key", 0), ("v", 1, "a"), ("mlp_post", 1), ("pattern", -1)):
        wanted = short if isinstance(short, tuple) else (short,)
        wanted = (wanted[0], wanted[1] % 3, *wanted[2:]) if len(wanted) > 1 else wanted
        assert ours[short] is ours[utils.get_act_name(*wanted)], short


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama"])
def test_methods_of_the_cache_that_need_no_weights(name: str) -> None:
    lens, ours = caches(name, zoo.tokens())
    for kw in ({}, {"layer": 1}, {"layer": -1, "incl_mid": name != "neox"}, {"pos_slice": -1}, {"pos_slice": (1, 3)}):
        got, want = (c.accumulated_resid(return_labels=True, **kw) for c in (ours, lens))
        same(got, want)
    same(ours.accumulated_resid(apply_ln=True), lens.accumulated_resid(apply_ln=True))
    for kw in ({}, {"layer": 2}, {"mode": "attn"}, {"mode": "mlp", "incl_embeds": False}, {"pos_slice": 2}):
        got, want = (c.decompose_resid(return_labels=True, **kw) for c in (ours, lens))
        same(got, want)
    for call in (("resid_post",), ("z", 2, "attn"), ("mlp_out", 1)):
        same(ours.stack_activation(*call), lens.stack_activation(*call))
    for index in (1, slice(0, 1), [1, 0]):
        got, want = (c.apply_slice_to_batch_dim(index) for c in (ours, lens))
        assert got.has_batch_dim == want.has_batch_dim
        same(got["resid_post", 1], want["resid_post", 1])
    one, other = caches(name, zoo.tokens(1))
    for cache in (one, other):
        cache.remove_batch_dim()
        cache.to("cpu")
    same(other["pattern", 0], one["pattern", 0])
    same(other.accumulated_resid(pos_slice=-1), one.accumulated_resid(pos_slice=-1))
    before = torch.is_grad_enabled()
    ours.toggle_autodiff(False)
    assert not torch.is_grad_enabled()
    ours.toggle_autodiff(before)


def test_transformer_lens_own_cache_class_works_on_our_activations() -> None:
    lens, ours = caches("gpt2", zoo.tokens())
    model = ours.model
    borrowed = LensCache(dict(ours.items()), model)
    same(borrowed.accumulated_resid(incl_mid=True), lens.accumulated_resid(incl_mid=True))
    same(borrowed.stack_activation("z"), lens.stack_activation("z"))
    same(borrowed.decompose_resid(mode="mlp", incl_embeds=False), ours.decompose_resid(mode="mlp", incl_embeds=False))


# -- snippets: each function is written against TransformerLens and run on both -------------------------------------------


def ablate_a_head(model: Any, x: torch.Tensor) -> Any:
    layer, head = 1, 2

    def silence(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, :, head, :] = 0.0
        return value

    before = model(x, return_type="loss")
    after = model.run_with_hooks(x, return_type="loss", fwd_hooks=[(utils.get_act_name("z", layer), silence)])
    return before.item(), after.item()


def patch_by_hand(model: Any, x: torch.Tensor) -> Any:
    clean, corrupted = x, x.flip(0)
    _, clean_cache = model.run_with_cache(clean)

    def put_back(resid: torch.Tensor, hook: Any, position: int) -> torch.Tensor:
        resid[:, position, :] = clean_cache[hook.name][:, position, :]
        return resid

    table = torch.zeros(model.cfg.n_layers, clean.shape[1])
    for layer in range(model.cfg.n_layers):
        for position in range(clean.shape[1]):
            hook = partial(put_back, position=position)
            name = utils.get_act_name("resid_pre", layer)
            table[layer, position] = metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, hook)]))
    return table


def score_induction_heads(model: Any, x: torch.Tensor) -> Any:
    half = x.shape[1]
    repeated = torch.cat([x, x], dim=1)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

    def note(pattern: torch.Tensor, hook: Any) -> None:
        stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - half)
        scores[hook.layer(), :] = stripe.mean(dim=(0, -1))

    nothing = model.run_with_hooks(
        repeated, return_type=None, fwd_hooks=[(lambda name: name.endswith("pattern"), note)]
    )
    return nothing, scores


def cache_some_without_batch(model: Any, x: torch.Tensor) -> Any:
    wanted = lambda name: name.endswith(("hook_pattern", "hook_resid_post"))  # noqa: E731
    logits, cache = model.run_with_cache(x[:1], remove_batch_dim=True, names_filter=wanted)
    out, plain = model.run_with_cache(x, names_filter=["blocks.1.hook_mlp_out"], return_cache_object=False)
    stopped, early = model.run_with_cache(x, names_filter="blocks.0.hook_resid_post", stop_at_layer=1)
    _, last = model.run_with_cache(x, names_filter="blocks.1.hook_resid_post", pos_slice=-1)
    assert isinstance(plain, dict)
    return (
        logits, cache["pattern", 0, "attn"], cache["resid_post", -1], len(cache), out, plain["blocks.1.hook_mlp_out"],
        stopped, early["resid_post", 0], last["resid_post", 1].squeeze(),
    )  # fmt: skip


def attribution_by_gradients(model: Any, x: torch.Tensor) -> Any:
    cache_type = pl.ActivationCache if isinstance(model, pl.HookedModel) else LensCache
    wanted = lambda name: name.endswith(("hook_resid_pre", "hook_mlp_out"))  # noqa: E731

    def forward_and_backward(tokens: torch.Tensor) -> tuple[float, Any, Any]:
        model.reset_hooks()
        activations: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}

        def keep(act: torch.Tensor, hook: Any) -> None:
            activations[hook.name] = act.detach()

        def keep_gradient(grad: torch.Tensor, hook: Any) -> None:
            gradients[hook.name] = grad.detach()

        model.add_hook(wanted, keep, "fwd")
        model.add_hook(wanted, keep_gradient, "bwd")
        value = metric(model(tokens))
        value.backward()
        model.reset_hooks()
        return value.item(), cache_type(activations, model), cache_type(gradients, model)

    with torch.enable_grad():
        _, clean, _ = forward_and_backward(x)
        value, corrupted, gradient = forward_and_backward(x.flip(0))
    names = [n for n in sorted(clean.keys()) if n.endswith(("resid_pre", "hook_in"))]
    return value, [((clean[n] - corrupted[n]) * gradient[n]).sum(-1) for n in names], len(names)


def hooks_that_stay(model: Any, x: torch.Tensor) -> Any:
    name, seen = "blocks.1.hook_resid_post", []
    model.hook_dict[name].add_hook(lambda t, hook: seen.append(hook.layer()))
    model.add_hook(name, lambda t, hook: t * 0.5)
    first = model(x)
    model.add_perma_hook("blocks.0.hook_resid_post", lambda t, hook: t * 2.0)
    model.reset_hooks()
    second = model(x)
    model.reset_hooks(including_permanent=True)
    third = model(x)
    model.hook_dict[name].add_hook(lambda t, hook: t * 0.5)
    model.hook_dict[name].remove_hooks("fwd")
    return first, second, third, model(x), seen


def hooks_in_a_block(model: Any, x: torch.Tensor) -> Any:
    def scale(t: torch.Tensor, hook: Any) -> torch.Tensor:
        hook.ctx["norm"] = t.norm().item()
        return t * 1.5

    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", scale)]) as hooked:
        inside = hooked(x)
        norm = model.hook_dict["blocks.0.hook_mlp_out"].ctx["norm"]
    model.clear_contexts()
    return inside, norm, model(x), len(model.hook_dict["blocks.0.hook_mlp_out"].ctx)


def caching_hooks(model: Any, x: torch.Tensor) -> Any:
    names = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_z"]
    cache, forward, backward = model.get_caching_hooks(names_filter=lambda name: name in names)
    assert backward == []
    model.run_with_hooks(x, fwd_hooks=forward)
    kept = model.add_caching_hooks(names_filter=names)
    model(x.flip(0))
    model.reset_hooks()
    return [cache[n] for n in names], [kept[n] for n in names]


def losses(model: Any, x: torch.Tensor) -> Any:
    logits, loss = model(x, return_type="both")
    each = model(x, return_type="loss", loss_per_token=True)
    mask = torch.ones_like(x)
    mask[0, -2:] = 0
    return logits, loss, each, model.loss_fn(logits, x), model.loss_fn(logits, x, mask, per_token=True)


def one_example_at_a_time(model: Any, x: torch.Tensor) -> Any:
    def first_position(t: torch.Tensor, hook: Any) -> torch.Tensor:
        assert t.ndim == 2
        t[0] = 0.0
        return t

    hooks = [("blocks.1.hook_resid_pre", first_position)]
    return model.run_with_hooks(x[:1], fwd_hooks=hooks, remove_batch_dim=True)


def resume_from_the_middle(model: Any, x: torch.Tensor) -> Any:
    resid = model(x, stop_at_layer=1)
    return resid, model(resid, start_at_layer=1)


SNIPPETS = [
    ablate_a_head, patch_by_hand, score_induction_heads, cache_some_without_batch, attribution_by_gradients,
    hooks_that_stay, hooks_in_a_block, caching_hooks, losses, one_example_at_a_time, resume_from_the_middle,
]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama"])
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda f: f.__name__)
def test_a_snippet_runs_unchanged_and_gives_the_same(snippet: Callable[..., Any], name: str) -> None:
    x = zoo.tokens(2, LENGTH, 3)
    lens, ours = both(name)
    with torch.no_grad():
        want, got = snippet(lens, x), snippet(ours, x)
    same(got, want, atol=5e-6)
    with torch.no_grad():
        assert torch.allclose(ours(x), lens(x), atol=2e-6), "nothing is left behind"


def test_text_and_tokens(tmp_path: Path) -> None:
    lens, ours = both("gpt2", bridges.tokenizer(tmp_path))
    text = "the cat sat on the mat"
    assert torch.equal(ours.to_tokens(text, prepend_bos=True), lens.to_tokens(text))
    assert torch.equal(ours.to_tokens(text, prepend_bos=False), lens.to_tokens(text, prepend_bos=False))
    assert ours.to_str_tokens(text, prepend_bos=False) == lens.to_str_tokens(text, prepend_bos=False)
    tokens = lens.to_tokens(text)
    assert ours.to_string(tokens) == lens.to_string(tokens)
    assert ours.to_string(tokens[0]) == lens.to_string(tokens[0])
    assert ours.to_str_tokens(tokens) == lens.to_str_tokens(tokens)
    assert ours.to_single_token("cat") == lens.to_single_token("cat")
    assert ours.to_single_str_token(3) == lens.to_single_str_token(3) == "cat"
    for mode in ("first", "last"):
        got, want = (m.get_token_position("the", text, mode, prepend_bos=True) for m in (ours, lens))
        assert got == want
    assert ours.get_token_position(4, tokens) == 3
    with pytest.raises(pl.InputError, match="doesn't occur"):
        ours.get_token_position("dog", text)
    with torch.no_grad():
        same(ours(text, prepend_bos=True), lens(text))
        same(ours(text, return_type="loss", prepend_bos=True), lens(text, return_type="loss"))


def test_the_head_detector_runs_on_a_wrapped_model(tmp_path: Path) -> None:
    tokenizer = bridges.tokenizer(tmp_path)
    lens, ours = both("gpt2", tokenizer)
    # This tokenizer puts no BOS in front, and we follow the tokenizer.
    lens.cfg.default_prepend_bos = False
    for kind in ("previous_token_head", "duplicate_token_head", "induction_head"):
        for error in ("mul", "abs"):
            with torch.no_grad():
                got, want = (
                    detect_head(m, "the cat sat on the cat sat on", kind, error_measure=error) for m in (ours, lens)
                )
            assert want.std() > 0
            same(got, want)


# -- where silence would be wrong ------------------------------------------------------------------------------------------


def halve(t: torch.Tensor, hook: Any) -> None:
    t.mul_(0.5)


def test_writing_into_a_tensor_works_at_every_point() -> None:
    for name in ("gpt2", "llama", "mamba", "lstm"):
        model, x = pl.wrap(zoo.build(name)), zoo.tokens()
        with torch.no_grad():
            plain = model(x)
            for point in model.hook_dict:
                written = model.run_with_hooks(x, [(point, halve)])
                returned = model.run_with_hooks(x, [(point, lambda t, hook: t * 0.5)])
                assert torch.allclose(written, returned, atol=1e-5), (name, point)
                assert (returned - plain).abs().max() > 1e-6, (name, point)


def test_writing_into_what_a_hook_gets_at_one_position_is_not_lost() -> None:
    model, x, point = pl.wrap(zoo.build("gpt2")), zoo.tokens(), "blocks.1.hook_resid_post"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            written = model.run_with_hooks(x, [(point, pl.at(2, halve))])
            returned = model.run_with_hooks(x, [(point, pl.at(2, lambda t, hook: t * 0.5))])
            read = model.run_with_hooks(x, [(point, pl.at(2, lambda t, hook: None))])
            assert torch.equal(written, returned)
            assert not torch.equal(written, model(x))
            assert torch.equal(read, model(x))


def test_writing_into_a_scaled_copy_reaches_the_model() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=zoo.VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, residual_multiplier=0.5, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = pl.wrap(GraniteForCausalLM(config).eval())
    x, point = zoo.tokens(), "blocks.0.hook_attn_out"
    with torch.no_grad():
        written = model.run_with_hooks(x, [(point, halve)])
        assert torch.allclose(written, model.run_with_hooks(x, [(point, lambda t, hook: t * 0.5)]), atol=1e-6)
        assert (written - model(x)).abs().max() > 1e-4
        assert torch.equal(model.run_with_hooks(x, [(point, lambda t, hook: None)]), model(x))


def test_patterns_mean_the_points_that_the_run_comes_by_and_none_at_all_is_an_error() -> None:
    model, x, seen = pl.wrap(zoo.build("gpt2")), zoo.tokens(), []
    every = [(lambda name: name.endswith("resid_post"), lambda t, hook: seen.append(hook.layer()))]
    model.run_with_hooks(x, every, stop_at_layer=2)
    assert seen == [0, 1]
    with pytest.raises(pl.HookNotFiredError):
        model.run_with_hooks(x, [("blocks.2.*", lambda t, hook: None)], stop_at_layer=1)
    with pytest.raises(pl.HookNotFiredError):
        model.run_with_cache(x, "blocks.2.*", stop_at_layer=1)


def test_caching_hooks_keep_every_example() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens(2)
    cache, forward, _ = model.get_caching_hooks("hook_embed", remove_batch_dim=True)
    model.run_with_hooks(x, forward)
    assert cache["hook_embed"].shape == (2, 7, zoo.WIDTH)
    model.run_with_hooks(x[:1], forward)
    assert cache["hook_embed"].shape == (7, zoo.WIDTH)
    with pytest.raises(pl.ShapeError, match="batch of 1"):
        model.run_with_hooks(x, forward, remove_batch_dim=True)


def test_what_is_cached_by_another_name_is_under_both_and_forward_is_the_call() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens(2)
    for names in ("blocks.0.hook_out", ["blocks.0.hook_out", "hook_embed"]):
        cache, forward, backward = model.get_caching_hooks(names, incl_bwd=True)
        with model.hooks(forward, backward):
            model.forward(x, return_type="loss").backward()
        _, plain = model.run_with_cache(x, "resid_post", incl_bwd=True, return_type="loss")
        for end in ("", "_grad"):
            want = plain[f"blocks.0.hook_resid_post{end}"]
            assert torch.equal(cache[f"blocks.0.hook_out{end}"], want)
            assert cache[f"blocks.0.hook_resid_post{end}"] is cache[f"blocks.0.hook_out{end}"]
    with pytest.raises(AttributeError, match="can be hooked without it"):
        model.set_use_hook_mlp_in(True)


def test_a_hook_point_whose_model_is_gone_says_so() -> None:
    import gc

    point = pl.wrap(zoo.build("gpt2")).hook_dict["hook_embed"]
    gc.collect()
    with pytest.raises(pl.InputError, match=r"model\.add_hook"):
        point.add_hook(lambda t, hook: None)

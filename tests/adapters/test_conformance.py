"""What every adapter must do on every architecture: the contract that all results of the library rest on.

One table of tiny models (``zoo.EVERY``) and every installed adapter. The references are the user's own
module run without us, hooks of plain torch, finite differences, and transformers' own caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.hooks import wrapping
from probelens.hooks.verify import left_behind

# Adapters of other libraries' wrappers: tests of their own put them beside the adapter of the wrapped model.
ELSEWHERE = {"transformer-lens", "nnsight"}
NEW = [*(name for name in zoo.EVERY if name not in zoo.ZOO), *zoo.ENCODERS]
NORMED = ("opt-norm-after", "bart", *(name for name in zoo.ENCODERS if name != "modernbert"))
HF = [*zoo.TRANSFORMERS, *zoo.SSMS, *zoo.DECODERS, *zoo.HYBRIDS]
CONVOLUTIONS = (*zoo.SSMS, "falcon-mamba", "jamba", "bamba", "zamba2", "falcon-h1", *zoo.PACKAGED)
# One of each kind of block, where a check is made at every point inside it.
KINDS = (
    "neox",
    "llama",
    "gemma2",
    "mamba",
    "mamba2",
    "jamba",
    "lstm",
    "gru",
    "gru-bidirectional-fused",
    "mamba-ssm",
    "bert",
    "modernbert",
)


def wrapped(name: str, dtype: torch.dtype = torch.float32, **change: Any) -> tuple[nn.Module, pl.HookedModel]:
    raw = zoo.more(name, **change).to(dtype)
    return raw, pl.wrap(raw)


def interior(model: pl.HookedModel, layer: int | None = None) -> list[str]:
    points = model.hook_dict.values()
    return [p.name for p in points if p.kind == "interior" and (layer is None or p.name.startswith(f"blocks.{layer}."))]


def size(tensor: Tensor) -> float:
    return float(tensor.float().abs().max()) or 1.0


def noise(tensor: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


def same(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
    return tensor.clone()


# -- every adapter, every point ------------------------------------------------------------------------------


def test_every_installed_adapter_is_in_the_table() -> None:
    here = {pl.wrap(zoo.more(name)).adapter.name for name in ("neox", "mamba", "mamba2", "lstm", "rwkv", "mamba-ssm")}
    built_in = {name for name, cls in wrapping.adapters().items() if cls.__module__.startswith("probelens.")}
    assert built_in - ELSEWHERE == here
    others = [p.read_text() for p in Path(__file__).parents[1].rglob("test_*.py") if p != Path(__file__)]
    for name in built_in & ELSEWHERE:
        assert any(f"{name}" in text and ".verify(" in text for text in others), name


@pytest.mark.parametrize("name", NEW)
def test_every_point_passes_verify_and_the_module_is_left_as_it_was(name: str) -> None:
    raw, model = wrapped(name)
    with model.backend("reference"):
        model(zoo.tokens())  # RWKV rescales its own weights in its first forward
    before = {k: v.clone() for k, v in raw.state_dict().items()}
    implementation = getattr(getattr(raw, "config", None), "_attn_implementation", None)
    report = model.verify(zoo.tokens(2, 8))
    assert report.ok, str(report)
    assert {row["name"] for row in report.rows} == set(model.hook_dict)
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert getattr(getattr(raw, "config", None), "_attn_implementation", None) == implementation
    assert left_behind(raw) == []


@pytest.mark.parametrize("name", NEW)
def test_an_exception_at_any_point_leaves_nothing_behind(name: str) -> None:
    raw, model = wrapped(name)

    def broken(tensor: Tensor, hook: pl.HookPoint) -> None:
        raise KeyError("the user's own mistake")

    tails = {point.split(".", 2)[-1]: point for point in model.hook_dict}
    for point in tails.values():
        with pytest.raises(KeyError, match="own mistake"):
            model.run_with_hooks(zoo.tokens(), [(point, broken)])
        assert left_behind(raw) == [], point
    assert not model.has_hooks()


@pytest.mark.parametrize("name", [*zoo.DECODERS, *zoo.HYBRIDS, *zoo.ENCODERS])
def test_the_layer_axis_is_what_the_blocks_take_and_return(name: str) -> None:
    raw, model = wrapped(name)
    x = zoo.tokens()
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(i: int) -> Callable[..., None]:
        def hook(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            first = args[0] if args else next(iter(kwargs.values()))
            seen[i] = (first.detach(), (out if isinstance(out, Tensor) else out[0]).detach())

        return hook

    handles = [
        raw.get_submodule(path).register_forward_hook(keep(i), with_kwargs=True)
        for i, path in enumerate(model.adapter.blocks)
    ]
    want = zoo.logits(raw, x)
    for handle in handles:
        handle.remove()
    assert len(seen) == model.cfg.n_layers
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "blocks.*.hook_resid_*")
        for i, (before, after) in seen.items():
            assert torch.equal(cache["resid_pre", i], before)
            assert torch.equal(cache["resid_post", i], after)
            assert torch.equal(model(x, stop_at_layer=i), before)
            if model.adapter.rereads(i):
                with pytest.raises(pl.InputError, match="embedding again"):
                    model(before, start_at_layer=i)
                assert not model.can_skip()
                continue
            assert (model(before, start_at_layer=i) - want).abs().max() <= 1e-5 * size(want)
            assert (model(before + noise(before), start_at_layer=i) - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*HF, "modernbert"])
def test_what_parts_add_to_the_residual_stream_adds_up(name: str) -> None:
    raw, model = wrapped(name)
    with torch.no_grad():
        _, cache = model.run_with_cache(zoo.tokens(), lambda n: "hook_resid" in n or n.endswith(("_out", ".hook_out")))
    for layer in range(model.cfg.n_layers):
        prefix = f"blocks.{layer}."
        pre, post = cache["resid_pre", layer], cache["resid_post", layer]
        if name == "rwkv" and layer == 0:
            # RWKV norms the embedding inside its first block: that is the residual it goes on with.
            pre = raw.rwkv.blocks[0].pre_ln(pre)
        mixed = [cache[prefix + n] for n in ("hook_attn_out", "mixer.hook_out") if prefix + n in cache.cache_dict]
        mlp = [cache[prefix + "hook_mlp_out"]] if prefix + "hook_mlp_out" in cache.cache_dict else []
        if name in NORMED:
            continue
        half = pre + sum(mixed)
        if prefix + "hook_resid_mid" in cache.cache_dict:
            assert torch.allclose(half, cache["resid_mid", layer], atol=1e-5)
        elif mlp:
            with pytest.raises(pl.UnknownHookError, match="parallel"):
                model.point(prefix + "hook_resid_mid")
        assert torch.allclose(half + sum(mlp), post, atol=2e-5)
        assert not torch.allclose(half, pre, atol=1e-3)


@pytest.mark.parametrize("name", NORMED)
def test_blocks_that_norm_every_sum_say_so(name: str) -> None:
    raw, model = wrapped(name)
    with torch.no_grad():
        _, cache = model.run_with_cache(zoo.tokens())
    for layer, path in enumerate(model.adapter.blocks):
        norms = [
            m
            for m in raw.get_submodule(path).modules()
            if isinstance(m, nn.LayerNorm) and m.normalized_shape == (zoo.WIDTH,)
        ]
        assert len(norms) == (3 if name == "bart" else 2)  # BART's decoder has one for an encoder, which isn't there
        middle = norms[0](cache["resid_pre", layer] + cache["attn_out", layer])
        assert torch.allclose(middle, cache["resid_mid", layer], atol=1e-5)
        after = norms[-1](cache["resid_mid", layer] + cache["mlp_out", layer])
        assert torch.allclose(after, cache["resid_post", layer], atol=1e-5)
    with pytest.raises(pl.InputError, match="norm every sum"):
        cache.decompose_resid()


# -- the reference forwards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*zoo.EVERY, *zoo.ENCODERS])
def test_reference_logits_equal_native_ones(name: str) -> None:
    raw, model = wrapped(name)
    x = zoo.tokens(2, 9)
    want = zoo.logits(raw, x)
    with torch.no_grad(), model.backend("reference"):
        assert (model(x) - want).abs().max() <= 1e-5 * size(want)
    assert left_behind(raw) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in (*zoo.EVERY, *zoo.ENCODERS) if n not in ("neox-sequential", "lstm-fused")])
def test_half_precision_is_no_further_from_float32_than_the_native_forward(name: str, dtype: torch.dtype) -> None:
    raw, model = wrapped(name)
    # Small weights: large ones put rounding into every exponential, in either forward.
    with torch.no_grad():
        for p in raw.parameters():
            p.mul_(0.5) if p.ndim == 2 else None
    x = zoo.tokens(2, 9)
    exact = zoo.logits(raw, x)
    raw.to(dtype)
    native = zoo.logits(raw, x)
    with torch.no_grad():
        every = model.run_with_hooks(x, [(lambda n: True, same)])
    assert every.dtype == native.dtype
    assert raw.get_parameter(next(n for n, _ in raw.named_parameters())).dtype == dtype
    off, allowed = (every.float() - exact).abs().max(), (native.float() - exact).abs().max()
    assert off <= 2 * allowed + 2e-2 * size(exact)
    assert torch.isfinite(every).all()


# Without positions that count real tokens these don't give a padded sequence the numbers that it has alone.
SHIFTED = [(name, "left") for name in ("gpt2", "stablelm", "bert", "distilbert", "electra", "deberta", "bert-tagger")]


@pytest.mark.parametrize("name", [*(n for n in HF if n != "rwkv"), *zoo.ENCODERS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_equal_eager_attention_under_padding(name: str, side: str) -> None:
    raw, model = wrapped(name)
    x = zoo.tokens(2, 9)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    mask = mask if side == "left" else mask.flip(1)
    real = mask.bool()
    before = raw.config._attn_implementation
    if any(p.endswith("hook_pattern") for p in model.hook_dict):
        raw.config._attn_implementation = "eager"
    shifted = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if (name, side) in SHIFTED else {}
    eager = zoo.logits(raw, x, attention_mask=mask, **shifted)
    # Zamba2 of transformers 5.13 lets padding on the left change real tokens by some 1e-3.
    changed = name == "zamba2" and (eager[0, 3:] - zoo.logits(raw, x[:1, 3:])[0]).abs().max() > 1e-4
    raw.config._attn_implementation = before
    if side == "left" and (changed or name in ("bart", "recurrent-gemma", "roberta")):
        with pytest.raises(pl.InputError, match="padding before real tokens"):
            model(x, attention_mask=mask)
        return
    with torch.no_grad():
        hooked = model.run_with_hooks(x, [(lambda n: True, same)], attention_mask=mask)
        bare = model(x)
    assert (hooked - eager)[real].abs().max() <= 1e-5 * size(eager[real])
    if side == "left":
        assert (bare - eager)[real].abs().max() > 1e-4


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_zeroing_hook_conv_equals_a_kernel_and_bias_of_zero(name: str) -> None:
    _, model = wrapped(name)
    x = zoo.tokens()
    layer = next((p.layer() for p in model.hook_dict.values() if p.name.endswith("hook_conv")), None)
    if layer is None:
        pytest.skip("this transformers computes these mixers wrongly, so their inside isn't offered")
    with torch.no_grad():
        by_hook = model.run_with_hooks(x, [(f"blocks.{layer}.mixer.hook_conv", lambda t, hook: t * 0)])
        names = (f"blocks.{layer}.mixer.conv1d.weight", f"blocks.{layer}.mixer.conv1d.bias")
        with model.edit_weights(dict.fromkeys(names, torch.zeros_like)):
            by_weight = model(x)
        plain = model(x)
    assert torch.allclose(by_hook, by_weight, atol=1e-5)
    assert not torch.allclose(by_hook, plain, atol=1e-3)


# -- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "falcon-h1", "lfm2", "recurrent-gemma", "qwen3-next", "rwkv"])
def test_gradients_through_the_reference_forwards_are_the_native_ones(name: str) -> None:
    raw, model = wrapped(name)
    x = zoo.tokens()
    if name in zoo.PACKAGED:
        pytest.skip("no native forward on the CPU; compared with the package's own in test_mamba_ssm")
    weight = noise(zoo.logits(raw, x))
    grads = []
    for kind in ("native", "reference"):
        raw.zero_grad()
        with model.backend(kind):
            (model(x) * weight).sum().backward()
        grads.append({n: p.grad.clone() for n, p in raw.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for key, want in grads[0].items():
        if key.endswith("key.bias"):
            continue  # What all keys share cancels in the softmax: its gradient is rounding alone.
        assert (grads[1][key] - want).abs().max() <= 2e-5 * size(want), key


def slopes(model: pl.HookedModel, x: Tensor, weight: Tensor, point: str) -> tuple[float, float]:
    """How a sum of logits changes along a random direction at a point: by its gradient, and measured."""
    grads: dict[int | None, Tensor] = {}

    def note(grad: Tensor, hook: pl.HookPoint) -> None:
        grads[hook.pos] = grad.clone()

    out = model.run_with_hooks(x, bwd_hooks=[(point, note)])
    (out * weight).sum().backward()
    # A recurrent state is met once a step: the directions of all steps go in together.
    way = {pos: noise(grad, 5 + (pos or 0)) for pos, grad in grads.items()}

    def along(factor: float) -> float:
        with torch.no_grad():
            return float(
                (model.run_with_hooks(x, [(point, lambda t, hook: t + factor * way[hook.pos])]) * weight).sum()
            )

    step = 3e-3
    near, far = along(step) - along(-step), along(2 * step) - along(-2 * step)
    return sum(float((way[pos] * grad).sum()) for pos, grad in grads.items()), (8 * near - far) / (12 * step)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_at_every_point_inside_a_block_are_finite_differences(name: str) -> None:
    # The choice of experts is a jump, which has no slope.
    _, model = wrapped(name, torch.float64, **({"num_experts": 1, "scale": 1.5} if name == "jamba" else {}))
    x = zoo.tokens(1, 5)
    weight = noise(model(x).detach())
    for point in interior(model, layer=0 if name == "jamba" else 1):
        if point.endswith("attn_scores"):
            continue  # masked scores are minus infinity; the pattern after them is checked
        slope, measured = slopes(model, x, weight, point)
        assert slope != 0, point
        assert measured == pytest.approx(slope, rel=1e-2, abs=5e-3), point


@pytest.mark.parametrize("name", [*HF, *zoo.ENCODERS])
def test_a_gradient_arrives_at_every_point(name: str) -> None:
    _, model = wrapped(name)
    seen: set[str] = set()
    hooks = [(point, lambda grad, hook: seen.add(hook.name)) for point in model.hook_dict]
    model.run_with_hooks(zoo.tokens(), bwd_hooks=hooks).square().sum().backward()
    assert seen == set(model.hook_dict)


def test_the_gradient_at_a_tensor_that_the_model_adds_to_in_place_is_that_of_a_leaf() -> None:
    raw, model = wrapped("falcon")
    x, leaf = zoo.tokens(), torch.zeros(2, 7, zoo.WIDTH, requires_grad=True)
    with raw.transformer.h[0].mlp.register_forward_hook(lambda module, args, out: out + leaf):
        (want,) = torch.autograd.grad(raw(x).logits.square().sum(), leaf)
    got: list[Tensor] = []
    out = model.run_with_hooks(x, bwd_hooks=[("blocks.0.hook_mlp_out", lambda grad, hook: got.append(grad.clone()))])
    out.square().sum().backward()
    assert torch.allclose(got[0], want, rtol=1e-4, atol=1e-4 * size(want))
    assert want.any()


# -- generation with a cache -------------------------------------------------------------------------------------

GENERATING = [n for n in HF if n not in ("neox-sequential", "opt-norm-after", "bart")]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("name", GENERATING)
def test_identity_hooks_everywhere_give_the_same_generation(name: str) -> None:
    raw, model = wrapped(name)
    # Batches of RWKV's decoding are mixed up by transformers, and refused.
    x = zoo.tokens(1 if name == "rwkv" else 2, 4)
    more = {**GREEDY, "output_scores": True, "return_dict_in_generate": True}
    plain = raw.generate(x, **more)
    calls: list[str] = []

    def count(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        calls.append(hook.name)
        return tensor.clone()

    with model.hooks([(lambda n: True, count)]):
        hooked = model.module.generate(x, **more)
    assert torch.equal(hooked.sequences, plain.sequences)
    for got, want in zip(hooked.scores, plain.scores, strict=True):
        assert (got - want).abs().max() <= 1e-4 * size(want)
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    assert calls.count(last) == 5
    assert left_behind(raw) == []


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-mamba", "jamba", "bamba", "falcon-h1", "llama"])
def test_edits_inside_a_block_reach_what_is_generated_later(name: str) -> None:
    raw, model = wrapped(name)
    x = zoo.tokens(2, 4)
    point = next(p for p in model.hook_dict if p.endswith(("hook_ssm_state", "attn.hook_v")))
    calls: list[int | None] = []

    def once(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
        # Only while the prompt is read: what follows differs through the cache alone.
        calls.append(hook.pos)
        first = len(calls) == 1 if hook.pos is None else hook.pos < x.shape[1]
        return tensor * -3 if first else tensor

    more = {**GREEDY, "output_scores": True, "return_dict_in_generate": True}
    plain = raw.generate(x, **more)
    with model.hooks([(point, once)]):
        edited = model.module.generate(x, **more)
    assert calls == ([None] * 5 if "attn" in point else list(range(8)))
    assert (edited.scores[0] - plain.scores[0]).abs().max() > 1e-4
    if "attn" not in point:
        assert (edited.scores[1] - plain.scores[1]).abs().max() > 1e-4


def token_by_token(raw: nn.Module, x: Tensor, at: int, edit: Callable[[Any], None]) -> Tensor:
    """Logits of the positions after ``at`` by transformers' own decoding, its cache edited after ``at``."""
    names = inspect.signature(type(raw).forward).parameters
    name = next((n for n in ("past_key_values", "cache", "cache_params") if n in names), "past_key_values")
    if "Mamba" in type(raw).__name__ and "cache" in names:
        name = "cache"
    with torch.no_grad():
        out = raw(x[:, : at + 1], use_cache=True)
        cache = next(out[n] for n in (name, "cache", "cache_params", "past_key_values") if out.get(n) is not None)
        edit(cache)
        logits = []
        for pos in range(at + 1, x.shape[1]):
            out = raw(x[:, pos : pos + 1], use_cache=True, **{name: cache})
            logits.append(out.logits)
    return torch.cat(logits, 1)


def first(held: Any) -> Tensor:
    """The one state of a layer's cache, which newer versions keep in a mapping or a list."""
    return held if isinstance(held, Tensor) else held[0]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-mamba"])
def test_an_edited_state_is_transformers_own_decoding_with_an_edited_cache(name: str) -> None:
    raw, model = wrapped(name)
    x, at, last = zoo.tokens(2, 9), 4, model.cfg.n_layers - 1

    def double(cache: Any) -> None:
        first(cache.layers[last].recurrent_states).mul_(2)

    want = token_by_token(raw, x, at, double)
    with torch.no_grad():
        got = model.run_with_hooks(x, [(f"blocks.{last}.mixer.hook_ssm_state", pl.at(at, lambda t, hook: t * 2))])
    plain = zoo.logits(raw, x)
    assert (token_by_token(raw, x, at, lambda cache: None) - plain[:, at + 1 :]).abs().max() <= 5e-5
    assert (got[:, at + 1 :] - want).abs().max() <= 5e-5
    assert (got - plain)[:, at + 1 :].abs().max() > 1e-3
    assert (got - plain)[:, :at].abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["neox", "gpt2", "llama", "qwen3"])
def test_edited_keys_and_values_are_transformers_own_decoding_with_an_edited_cache(name: str) -> None:
    raw, model = wrapped(name)
    x, at, last = zoo.tokens(2, 9), 4, model.cfg.n_layers - 1
    plain = zoo.logits(raw, x)
    for part, point in (("keys", "hook_k"), ("values", "hook_v")):

        def double(cache: Any, part: str = part) -> None:
            getattr(cache.layers[last], part)[:, :, at].mul_(2)

        want = token_by_token(raw, x, at, double)
        with torch.no_grad():
            got = model.run_with_hooks(x, [(f"blocks.{last}.attn.{point}", pl.at(at, lambda t, hook: t * 2))])
        assert (got[:, at + 1 :] - want).abs().max() <= 5e-5
        assert (got - plain)[:, at + 1 :].abs().max() > 1e-3

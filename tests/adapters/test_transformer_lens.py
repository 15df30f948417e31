"""A TransformerBridge stays what it is, and everything of ours runs on it: with hooks that can't be silent."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import bridges
import pytest
import torch
import zoo
from transformer_lens.hook_points import HookPoint as LensHookPoint

import probelens as pl
from probelens.hooks.model import HookedModel

ALL = list(bridges.CLASSES)
# TransformerLens' q and k are those before the rotary embedding; ours are what attention really uses.
ROTARY = {"attn.hook_q", "attn.hook_k"}


def test_a_wrapped_bridge_is_not_copied_but_refused() -> None:
    model = pl.wrap(bridges.bridge(ALL[0]))
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(pl.InputError, match="make a bridge of the copy"):
            way(model)


def lens_hooks(bridge: Any) -> int:
    """Hooks on the bridge's hook points, in TransformerLens' lists and in PyTorch's."""
    points = [m for m in bridge.modules() if isinstance(m, LensHookPoint)]
    return sum(len(p.fwd_hooks) + len(p.bwd_hooks) + len(p._forward_hooks) for p in points)


def pairs(n: int = 4, length: int = 6) -> pl.PatchPairs:
    answers = torch.tensor([[3, 5]] * n)
    ends = torch.full((n,), length - 1)
    return pl.PatchPairs(zoo.tokens(n, length, 1), zoo.tokens(n, length, 2), torch.zeros_like(ends), ends, answers)


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_bridge_finds_its_adapter_and_every_point_fires_and_edits(name: str) -> None:
    bridge = bridges.bridge(name)
    model = pl.wrap(bridge)
    assert model.adapter.name == "transformer-lens"
    assert model.module is bridge
    assert (model.cfg.n_layers, model.cfg.d_model, model.cfg.d_vocab) == (zoo.LAYERS, zoo.WIDTH, zoo.VOCAB)
    assert model.cfg.n_heads == (zoo.HEADS if name in bridges.ATTENTION else 0)
    report = model.verify(zoo.tokens())
    assert report.ok, str(report)
    assert len(report.rows) >= (40 if name in bridges.ATTENTION else 20)
    assert lens_hooks(bridge) == 0


def test_points_hold_what_the_bridge_itself_caches_and_what_our_own_adapter_reads(name: str) -> None:
    model, ours, x = pl.wrap(bridges.bridge(name)), pl.wrap(zoo.build(name)), zoo.tokens()
    with torch.no_grad():
        logits, cache = model.run_with_cache(x)
        own_logits, own = model.module.run_with_cache(x, use_cache=False)
        _, reference = ours.run_with_cache(x)
    assert torch.equal(logits, own_logits)
    assert set(cache) <= set(own.keys())
    for point, tensor in cache.items():
        assert torch.equal(tensor, own[point]), point
    shared = set(cache) & set(reference)
    assert len(shared) >= (35 if name in bridges.ATTENTION else 20)
    assert set(cache) - shared <= {p for p in cache if "hook_rot_" in p or p == "hook_pos_embed"}
    for point in shared:
        different = name != "gpt2" and point.split(".", 2)[-1] in ROTARY
        if different:
            assert (cache[point] - reference[point]).abs().max() > 1e-2, point
        else:
            assert torch.allclose(cache[point], reference[point], atol=2e-6), point
    if name in ("llama", "gemma2"):
        for layer in range(zoo.LAYERS):
            assert torch.allclose(cache["rot_q", layer], reference["q", layer], atol=2e-6)
            assert torch.allclose(cache["rot_k", layer], reference["k", layer], atol=2e-6)


def test_the_bridge_works_as_before_and_nothing_stays_on_it(name: str) -> None:
    bridge, x = bridges.bridge(name), zoo.tokens()
    with torch.no_grad():
        before, kept = bridge.run_with_cache(x, use_cache=False)
    keys = list(bridge.state_dict())
    model = pl.wrap(bridge)

    def broken(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        raise RuntimeError("the user's own mistake")

    with torch.no_grad():
        for point in ("blocks.1.hook_resid_post", "unembed.hook_in"):
            with pytest.raises(RuntimeError, match="own mistake"):
                model.run_with_hooks(x, [("*", lambda t, hook: None), (point, broken)])
        model(x, stop_at_layer=1)
        after, again = bridge.run_with_cache(x, use_cache=False)
    assert lens_hooks(bridge) == 0
    assert torch.equal(before, after)
    assert all(torch.equal(kept[k], again[k]) for k in kept.keys())  # noqa: SIM118 - not a mapping
    assert list(bridge.state_dict()) == keys


def test_runs_go_through_the_bridges_own_run_with_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = bridges.bridge("gpt2")
    model, calls = pl.wrap(bridge), []
    own = bridge.run_with_hooks
    monkeypatch.setattr(bridge, "run_with_hooks", lambda *a, **kw: (calls.append(1), own(*a, **kw))[1])
    model(zoo.tokens())
    model.run_with_cache(zoo.tokens(), "hook_embed")
    assert len(calls) == 2


def test_the_trial_run_of_wrapping_is_neither_seen_nor_felt() -> None:
    bridge = bridges.bridge("gpt2")
    bridge.train()
    bridge.original_model.transformer.eval()
    flags = [m.training for m in (*bridge.modules(), *bridge.original_model.modules())]
    seen: list[str] = []
    bridge.add_hook("blocks.0.hook_resid_pre", lambda t, hook: seen.append(hook.name))
    state = torch.random.get_rng_state()
    model = pl.wrap(bridge)
    assert seen == []
    assert torch.equal(torch.random.get_rng_state(), state)
    with model.evaluating():
        assert not bridge.original_model.training
        model(zoo.tokens())
    assert seen == ["blocks.0.hook_in"], "a hook of the caller's own stays and is called"
    assert [m.training for m in (*bridge.modules(), *bridge.original_model.modules())] == flags


@pytest.mark.parametrize("name", bridges.SSMS)
def test_a_point_that_the_model_never_reaches_is_an_error_and_not_an_effect_of_zero(name: str) -> None:
    bridge, x = bridges.bridge(name), zoo.tokens()
    silent = "blocks.0.mixer.conv1d.hook_out"
    with torch.no_grad():
        plain = bridge(x, use_cache=False)
        zeroed = bridge.run_with_hooks(x, fwd_hooks=[(silent, lambda t, hook: t * 0)], use_cache=False)
    if not torch.equal(plain, zeroed):
        pytest.skip("this version of transformers calls the convolution as a module")
    model = pl.wrap(bridge)
    with pytest.raises(pl.HookNotFiredError, match="conv1d"):
        model.run_with_hooks(x, [(silent, lambda t, hook: t * 0)])
    for point in ("hook_conv", "hook_ssm_state", "hook_ssm_dt", "hook_ssm_y"):
        assert f"blocks.0.mixer.{point}" not in model.hook_dict
        with pytest.raises(pl.UnknownHookError, match=r"pl\.wrap\(hf_model\)"):
            model.run_with_cache(x, f"blocks.0.mixer.{point}")
    # The control: on the model itself the same convolution can be zeroed, and it matters.
    ours = pl.wrap(zoo.build(name))
    with torch.no_grad():
        edited = ours.run_with_hooks(x, [("blocks.0.mixer.hook_conv", lambda t, hook: t * 0)])
    assert (edited - plain).abs().max() > 1e-2


def test_names_of_transformer_lens_alone_can_be_hooked_too() -> None:
    model, x = pl.wrap(bridges.bridge("gpt2")), zoo.tokens()
    point = "blocks.1.ln1.hook_normalized"
    with torch.no_grad():
        _, cache = model.run_with_cache(x, [point, "blocks.1.attn.o.hook_in"])
        _, own = model.module.run_with_cache(x, use_cache=False)
        edited = model.run_with_hooks(x, [(point, lambda t, hook: t * 0)])
        want = model.module.run_with_hooks(x, fwd_hooks=[(point, lambda t, hook: t * 0)])
    assert torch.equal(cache[point], own[point])
    assert torch.equal(cache["z", 1], own["z", 1]), "an alias is the canonical point"
    assert torch.equal(edited, want)
    assert (edited - model(x)).abs().max() > 1e-3
    with pytest.raises(pl.InputError, match="set_use_attn_in"):
        model.run_with_cache(x, "blocks.1.attn.hook_attn_in")
    with pytest.raises(pl.UnknownHookError, match="never reached"):
        model.run_with_cache(x, "blocks.1.attn.hook_result")
    with pytest.raises(pl.UnknownHookError, match=r"blocks\.1\.hook_resid_post"):
        model.run_with_cache(x, "blocks.1.hook_resid_pots")


@pytest.mark.parametrize("name", ["gpt2", "neox-sequential", "llama", "gemma2"])
def test_an_edit_between_attention_and_mlp_reaches_the_residual_stream(name: str) -> None:
    bridge, x, other = bridges.bridge(name), zoo.tokens(seed=1), zoo.tokens(seed=2)
    model, point = pl.wrap(bridge), "blocks.1.hook_resid_mid"
    with torch.no_grad():
        target, cache = model.run_with_cache(other, point)
        source = cache[point]
        patched = model.run_with_hooks(x, [(point, lambda t, hook: source)])
        own = bridge.run_with_hooks(x, fwd_hooks=[(point, lambda t, hook: source)])
    assert torch.allclose(patched, target, atol=1e-5), "all of it patched is the other run"
    assert (own - target).abs().max() > 1e-2, "TransformerLens alone moves the MLP's input only"


def test_a_gradient_at_a_point_is_the_one_that_our_own_adapter_finds(name: str) -> None:
    x, points = zoo.tokens(), ["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre", "unembed.hook_in"]
    if name in bridges.ATTENTION:
        points += ["blocks.1.attn.hook_z", "blocks.1.hook_mlp_out"]
    found = []
    for model in (pl.wrap(bridges.bridge(name)), pl.wrap(zoo.build(name))):
        _, cache = model.run_with_cache(x, points, incl_bwd=True, return_type="loss")
        found.append([cache[f"{p}_grad"] for p in points])
    for point, got, want in zip(points, *found, strict=True):
        assert want.abs().max() > 1e-5, point
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-6), point


def test_a_run_can_stop_and_start_at_every_block_and_really_skips(name: str) -> None:
    model, x = pl.wrap(bridges.bridge(name)), zoo.tokens()
    want = zoo.logits(zoo.build(name), x)
    ran: list[int] = []
    for i, block in enumerate(model.module.blocks):
        block.original_component.register_forward_pre_hook(lambda m, a, i=i: ran.append(i))
    with torch.no_grad():
        for layer in range(zoo.LAYERS + 1):
            resid = model(x, stop_at_layer=layer)
            model(resid, start_at_layer=layer)  # the first time it tries whether it may
            ran.clear()
            got = model(resid, start_at_layer=layer)
            assert set(ran) == set(range(layer, zoo.LAYERS))
            assert torch.allclose(got, want, atol=2e-6)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.float().std() > 0
    assert torch.allclose(got, want, rtol=1e-3, atol=2e-5), (got - want).abs().max()


def test_collect_patch_and_attribute_give_the_same_as_on_the_model_itself(name: str) -> None:
    lens, ours = pl.wrap(bridges.bridge(name)), pl.wrap(zoo.build(name))
    sites = ["resid_pre", "attn_out" if name in bridges.ATTENTION else "mixer_out"]

    def run(model: HookedModel) -> tuple[Any, ...]:
        acts = pl.collect(model, zoo.tokens(6, 5), sites="layers", batch_size=4)
        patched = [pl.patch(model, pairs(), sites=sites, mode=mode) for mode in ("denoise", "noise")]
        return acts, *patched, pl.attribute(model, pairs(), sites=sites)

    for got, want in zip(run(lens), run(ours), strict=True):
        if isinstance(got, pl.Activations):
            assert got.names == want.names
            for site in got:
                same(got[site], want[site])
        else:
            assert got.sites == want.sites
            assert got.path == want.path
            same(got.values, want.values)
            same(got.clean, want.clean)


def test_ablation_gives_the_same_as_on_the_model_itself() -> None:
    task = pl.tasks.Parity()
    batch = task.sample(120, length=6, seed=0)
    directions = pl.subspaces.random(2, zoo.WIDTH, seed=0)
    found = []
    for model in (pl.wrap(bridges.bridge("gpt2")), pl.wrap(zoo.build("gpt2"))):
        result = pl.ablate(
            model, batch, {"blocks.1.hook_resid_post": directions}, "next_token_loss", refit=False, controls=2
        )
        found.append(result.to_dataframe())
    numbers = [frame.select_dtypes("number").to_numpy(dtype=float) for frame in found]
    assert numbers[0].shape == numbers[1].shape
    assert numbers[0].size > 0
    same(torch.from_numpy(numbers[0]).nan_to_num(), torch.from_numpy(numbers[1]).nan_to_num())


def test_hooks_that_stay_act_on_the_bridges_own_generation(tmp_path: Path) -> None:
    bridge = bridges.bridge("gpt2", bridges.tokenizer(tmp_path))
    model, x = pl.wrap(bridge), zoo.tokens(1, 4)
    seen: list[int] = []
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
    with torch.no_grad(), model.hooks([("blocks.2.hook_resid_post", lambda t, hook: seen.append(t.shape[1]))]):
        bridge.generate(x, **options)
    assert len(seen) == 3
    assert lens_hooks(bridge) == 0


def test_text_becomes_the_tokens_that_the_bridge_makes_of_it(tmp_path: Path) -> None:
    bridge = bridges.bridge("gpt2", bridges.tokenizer(tmp_path))
    model = pl.wrap(bridge)
    texts = ["the cat sat", "a dog"]
    assert torch.equal(model.to_tokens(texts), bridge.to_tokens(texts))
    assert model.to_tokens("the cat")[0, 0] == 0, "TransformerLens puts BOS in front"
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[2, 3]]
    assert model.to_str_tokens("the cat") == bridge.to_str_tokens("the cat")
    with torch.no_grad():
        assert torch.equal(model("the cat"), bridge("the cat"))
        both = model(texts)
        assert torch.allclose(both[1, :3], bridge("a dog")[0], atol=1e-6)


def test_only_bridges_are_taken() -> None:
    with pytest.raises(pl.AdapterNotFoundError, match="TransformerBridge"):
        pl.wrap(zoo.build("gpt2"), "transformer-lens")

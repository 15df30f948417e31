"""Blocks that are out of the ordinary: hybrids, scaled and flattened residuals, and what they honestly lack."""

from __future__ import annotations

import pytest
import torch
import zoo

import probelens as pl

SUMMED = ("opt", "bloom", "granite", "glm4", "falcon-sequential", "jamba", "recurrent-gemma", "falcon-h1")


@pytest.mark.parametrize("name", zoo.HYBRIDS)
def test_mixer_out_means_every_block_of_a_hybrid(name: str) -> None:
    model, x = pl.wrap(zoo.more(name)), zoo.tokens()
    assert model.adapter.name == ("hf-mamba" if name == "falcon-mamba" else "generic")
    points, _ = model.points.match("blocks.*.hook_mixer_out")
    assert [p.layer() for p in points] == list(range(model.cfg.n_layers))
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "blocks.*.hook_mixer_out")
    assert [cache["mixer_out", layer].shape for layer in range(model.cfg.n_layers)] == [(2, 7, zoo.WIDTH)] * len(points)


@pytest.mark.parametrize("name", SUMMED)
def test_an_edit_of_what_a_mixer_adds_is_the_same_edit_of_the_residual_after_it(name: str) -> None:
    raw = zoo.more(name)
    model, x, layer = pl.wrap(raw), zoo.tokens(), 1
    shift = torch.randn(zoo.WIDTH, generator=torch.Generator().manual_seed(3))
    before = next(
        p for p in model.hook_dict if p.startswith(f"blocks.{layer}.") and p.endswith(("attn_out", "mixer.hook_out"))
    )
    with torch.no_grad():
        at_mixer = model.run_with_hooks(x, [(before, lambda t, hook: t + shift)])
        at_middle = model.run_with_hooks(x, [(f"blocks.{layer}.hook_resid_mid", lambda t, hook: t + shift)])
        at_mlp = model.run_with_hooks(x, [(f"blocks.{layer}.hook_mlp_out", lambda t, hook: t + shift)])
        at_end = model.run_with_hooks(x, [(f"blocks.{layer}.hook_resid_post", lambda t, hook: t + shift)])
    plain = zoo.logits(raw, x)
    assert torch.allclose(at_mixer, at_middle, atol=1e-4)
    assert torch.allclose(at_mlp, at_end, atol=1e-4)
    assert not torch.allclose(at_middle, at_end, atol=1e-3), "the MLP reads the residual in the middle"
    assert not torch.allclose(at_end, plain, atol=1e-3)


def test_hooks_in_opts_flattened_mlp_see_batch_and_position() -> None:
    model, x = pl.wrap(zoo.more("opt")), zoo.tokens(3, 5)
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "blocks.0.*")
        edited = model.run_with_hooks(x, [("blocks.0.mlp.hook_post", pl.at(3, lambda t, hook: t + 1))])
        changed = (edited - model(x)).abs().amax((0, 2)) > 1e-4
    assert cache["post", 0].shape == (3, 5, 32)
    assert cache["resid_mid", 0].shape == cache["mlp_out", 0].shape == (3, 5, zoo.WIDTH)
    assert changed.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("name", ["jamba", "bamba", "zamba2", "falcon-h1"])
def test_an_edited_state_inside_a_hybrid_reaches_later_positions_only(name: str) -> None:
    raw = zoo.more(name)
    model, x, at = pl.wrap(raw), zoo.tokens(2, 8), 4
    points = [p for p in model.hook_dict if p.endswith("hook_ssm_state")]
    if not points:
        pytest.skip("this transformers computes these mixers wrongly, so their inside isn't offered")
    point = points[-1]
    with torch.no_grad():
        _, plain = model.run_with_cache(x, point)
        hook = (point, pl.at(at, lambda t, hook: t + 5))
        edited = model.run_with_hooks(x, [hook]) - zoo.logits(raw, x)
    assert plain[point].shape[:2] == (2, 8)
    assert edited[:, :at].abs().max() <= 1e-5
    assert (edited[:, at:].abs().amax((0, 2)) > 1e-5).all()


def test_the_shared_block_of_zamba2_acts_on_the_mixers_input_alone() -> None:
    raw = zoo.more("zamba2")
    model, x = pl.wrap(raw), zoo.tokens()
    shared = [p for p in model.hook_dict if p.endswith("shared.hook_out")]
    assert shared == ["blocks.1.shared.hook_out", "blocks.3.shared.hook_out"]
    with torch.no_grad():
        by_hook = model.run_with_hooks(x, [(shared[0], lambda t, hook: t * 0)])
        with model.edit_weights({"blocks.1.linear.weight": torch.zeros_like}):
            by_weight = model(x)
        _, cache = model.run_with_cache(x)
    assert torch.allclose(by_hook, by_weight, atol=1e-6)
    assert not torch.allclose(by_hook, zoo.logits(raw, x), atol=1e-3)
    assert torch.allclose(cache["resid_pre", 1] + cache["mixer_out", 1], cache["resid_post", 1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "point", "reason"),
    [
        ("jamba", "blocks.0.attn.hook_q", "block 0 .*has no attention"),
        ("jamba", "blocks.1.mixer.hook_ssm_state", "has attention, not a mixer"),
        ("falcon", "blocks.0.attn.hook_q", "attention interface"),
        ("falcon", "blocks.0.hook_resid_mid", "parallel"),
        ("phi3", "blocks.0.mlp.hook_pre", "one projection"),
        ("mixtral", "blocks.0.mlp.hook_post", "mixture of experts"),
        ("zamba2", "blocks.0.hook_mlp_out", "no MLP of its own"),
        ("rwkv", "blocks.0.hook_attn_out", "has no attention"),
        ("rwkv", "blocks.0.mixer.hook_ssm_state", "RwkvSelfAttention.*no such point.*mixer.hook_wkv_state"),
    ],
)
def test_a_point_that_a_block_lacks_says_why(name: str, point: str, reason: str) -> None:
    model = pl.wrap(zoo.more(name))
    with pytest.raises(pl.UnknownHookError, match=reason):
        model.run_with_cache(zoo.tokens(), point)


@pytest.mark.parametrize("name", ["jamba", "zamba2", "bamba", "falcon-h1"])
def test_the_weights_of_every_mixer_have_their_canonical_names(name: str) -> None:
    # In Zamba2 the mixer of a hybrid block stands deeper than that of the others.
    model, x = pl.wrap(zoo.more(name)), zoo.tokens()
    layers = [p.layer() for p in model.hook_dict.values() if p.name.endswith("mixer.hook_conv")]
    if not layers:
        pytest.skip("this transformers computes these mixers wrongly, so their inside isn't offered")
    for layer in layers:
        weights = [f"blocks.{layer}.mixer.conv1d.{part}" for part in ("weight", "bias")]
        with torch.no_grad():
            by_hook = model.run_with_hooks(x, [(f"blocks.{layer}.mixer.hook_conv", lambda t, hook: t * 0)])
            with model.edit_weights(dict.fromkeys(weights, torch.zeros_like)):
                by_weight = model(x)
            assert torch.allclose(by_hook, by_weight, atol=1e-5)
            assert not torch.allclose(by_hook, model(x), atol=1e-3)
    with (
        pytest.raises(pl.UnknownHookError, match="Nearest"),
        model.edit_weights({"blocks.1.mixer.conv2d.weight": torch.zeros_like}),
    ):
        pass

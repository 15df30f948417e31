"""ActivationCache: the same tensor by every name, stacked and accumulated, and clear errors."""

from __future__ import annotations

import pytest
import torch
import zoo

import probelens as pl
from probelens.cache import act_name


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
    assert cache.to(dtype=torch.float64)["embed"].dtype == torch.float64
    assert cache["embed"].dtype == torch.float32


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
        ("blocks.0.hook_resid_pots", "names_filter"),
        (("resid_post", 1.5), "layer 1.5"),
    ],
)
def test_unknown_keys_say_what_there_is(cache: pl.ActivationCache, key: object, text: str) -> None:
    with pytest.raises(pl.UnknownHookError, match=text):
        cache[key]  # type: ignore[index]


def test_an_ambiguous_shorthand_asks_for_the_layer_type() -> None:
    names = ["blocks.0.attn.hook_out", "blocks.0.mlp.hook_out"]
    with pytest.raises(pl.UnknownHookError, match="layer type"):
        act_name(("out", 0), names, 1)
    assert act_name(("out", 0, "mlp"), names, 1) == "blocks.0.mlp.hook_out"


def test_a_cache_without_its_model_still_resolves_names(cache: pl.ActivationCache) -> None:
    alone = pl.ActivationCache(dict(cache.items()), None)
    assert torch.equal(alone["resid_post", -1], cache["resid_post", -1])
    with pytest.raises(pl.InputError, match="final norm"):
        alone.accumulated_resid(apply_ln=True)

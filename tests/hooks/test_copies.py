"""Copies and pickles of wrapped models, caches and hook points, and of modules with hooks inside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo

import probelens as pl

X = zoo.tokens()
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["neox", "mamba2", "lstm"])
def test_a_copied_model_gives_the_same_activations_from_points_of_its_own(family: str, way: str) -> None:
    model = pl.wrap(zoo.build(family))
    _, want = model.run_with_cache(X)
    twin = WAYS[way](model)
    _, got = twin.run_with_cache(X)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (twin.module is model.module) == (way == "copy")
    twin.point("blocks.0.hook_resid_post").add_hook(lambda tensor, hook: tensor * 2)
    assert twin.has_hooks()
    assert not model.has_hooks()
    # Hooks in place set compilation aside in the whole process.
    twin.reset_hooks()


def test_options_of_wrap_are_copied_with_the_model() -> None:
    module = torch.nn.ModuleDict({"layers": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))})
    assert copy.deepcopy(pl.wrap(module, blocks="layers")).adapter.blocks == ["layers.0", "layers.1"]


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_cache_has_its_tensors_by_every_name(way: str) -> None:
    _, cache = pl.wrap(zoo.build("mamba")).run_with_cache(X)
    twin = WAYS[way](cache)
    for key in (("resid_post", -1), ("mixer_out", 1), "blocks.1.hook_mixer_out"):
        assert torch.equal(twin[key], cache[key])
        assert (twin[key] is cache[key]) == (way == "copy")
    assert (twin.model is cache.model) == (way != "pickle")


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_hook_point_says_that_it_has_no_model(way: str) -> None:
    model = pl.wrap(zoo.build("mamba"))
    twin = WAYS[way](model.point(("resid_post", 1)))
    assert model.point(twin.name).owner is not None
    with pytest.raises(pl.InputError, match="belongs to no model"):
        twin.add_hook(lambda tensor, hook: None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", ["blocks.0.mixer.hook_conv", "blocks.0.hook_resid_post"])
def test_a_model_with_hooks_in_place_is_not_copied(site: str, way: str) -> None:
    model = pl.wrap(zoo.build("mamba"))
    model.add_hook(site, lambda tensor, hook: None)
    with pytest.raises(pl.InputError, match="hooks are in place.*reset_hooks"):
        WAYS[way](model)
    model.reset_hooks()
    WAYS[way](model)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_module_is_not_copied_while_another_forward_runs_in_its_place(way: str) -> None:
    model = pl.wrap(zoo.build("mamba"))
    with model.backend("reference"), pytest.raises(pl.InputError, match="weights, of the original"):
        WAYS[way](model.module)
    assert WAYS[way](model.module) is not model.module


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    ("family", "site", "inside"),
    [
        ("neox", "blocks.0.hook_resid_post", "gpt_neox.layers.0"), ("neox", "blocks.0.attn.hook_q", "gpt_neox.layers.0.attention"),
        ("mamba", "blocks.0.mixer.hook_conv", "backbone.layers.0.mixer"), ("lstm", "blocks.0.rnn.hook_c", "layers.0"),
    ],
)  # fmt: skip
def test_a_module_is_not_copied_with_hooks_in_place(family: str, site: str, inside: str, way: str) -> None:
    model = pl.wrap(zoo.build(family))
    for part in (model.module, model.module.get_submodule(inside)):
        with model.hooks([(site, lambda tensor, hook: None)]):
            with pytest.raises(pl.InputError, match="hooks are in place inside it"):
                WAYS[way](part)
            model(X)
        twin = WAYS[way](part)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())

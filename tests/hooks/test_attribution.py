"""Direct logit attribution from a cache: parts that add up to the logits, and TransformerLens' own numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo

import probelens as pl


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_parts_add_up_to_the_logit_difference(name: str) -> None:
    model, tokens = pl.wrap(zoo.build(name)), zoo.tokens(2, 6)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    logits, norm = cache["unembed.hook_out"], cache["ln_final.hook_out"]
    right, wrong = tokens[:, 1], tokens[:, 2]
    got = cache.logit_attrs(cache.decompose_resid(), right, wrong).sum(0)
    head = model.module.get_submodule(model.adapter.parts["unembed"])
    ln = model.module.get_submodule(model.adapter.parts["ln_final"])
    toward = head.weight[right] - head.weight[wrong]
    bias = getattr(ln, "bias", None)
    want = logits.gather(-1, right[:, None, None].expand(2, 6, 1)) - logits.gather(
        -1, wrong[:, None, None].expand(2, 6, 1)
    )
    want = want[..., 0] - (0 if bias is None else (bias * toward).sum(-1)[:, None])
    if getattr(head, "bias", None) is not None:
        want = want - (head.bias[right] - head.bias[wrong])[:, None]
    torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-3)
    # One position, and two examples in another order.
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), right, wrong, pos_slice=-1)
    torch.testing.assert_close(last.sum(0), want[:, -1].detach(), rtol=1e-3, atol=1e-3)
    assert norm.shape == (2, 6, model.cfg.d_model)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_for_each_position_and_caches_of_one_example_give_the_same_numbers(name: str) -> None:
    model, tokens = pl.wrap(zoo.build(name)), zoo.tokens(3, 4)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    stack, wanted = cache.decompose_resid(), tokens[1]
    each = torch.stack([cache.logit_attrs(stack, int(token)) for token in wanted], -1)
    got = cache.logit_attrs(stack, wanted)
    torch.testing.assert_close(got, each.diagonal(dim1=-2, dim2=-1), rtol=1e-5, atol=1e-5)
    alone = cache.apply_slice_to_batch_dim(1)
    part = alone.logit_attrs(alone.decompose_resid(), wanted, has_batch_dim=False)
    torch.testing.assert_close(part, got[:, 1], rtol=1e-5, atol=1e-5)
    last = alone.logit_attrs(alone.decompose_resid(pos_slice=-1), int(wanted[-1]), pos_slice=-1, has_batch_dim=False)
    torch.testing.assert_close(last, got[:, 1, -1], rtol=1e-5, atol=1e-5)
    single = cache.apply_slice_to_batch_dim([1])
    torch.testing.assert_close(single.logit_attrs(single.decompose_resid(), wanted), got[:, 1:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_heads_and_the_rest_add_up_to_attention(name: str) -> None:
    model, tokens = pl.wrap(zoo.build(name)), zoo.tokens(2, 6)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    heads, labels = cache.stack_head_results(return_labels=True)
    n = model.cfg.n_heads
    assert labels[:2] == ["L0H0", "L0H1"]
    for layer in range(model.cfg.n_layers):
        down = model.module.get_submodule(model.point(("z", layer)).module)
        bias = getattr(down, "bias", None)
        whole = heads[layer * n : (layer + 1) * n].sum(0) + (0 if bias is None else bias)
        torch.testing.assert_close(whole, cache["attn_out", layer], rtol=1e-4, atol=1e-4)
    every = cache.stack_head_results(incl_remainder=True)
    torch.testing.assert_close(every.sum(0), cache["resid_post", -1], rtol=1e-4, atol=1e-4)


def test_heads_have_the_attributions_that_transformer_lens_gives_with_folded_weights() -> None:
    sources = pytest.importorskip("transformer_lens.model_bridge.sources")
    raw: Any = zoo.build("gpt2")
    bridge = sources.build_bridge_from_module(copy.deepcopy(raw), "GPT2LMHeadModel", hf_config=raw.config)
    bridge.enable_compatibility_mode(disable_warnings=True)
    tokens = zoo.tokens(2, 6)
    right, wrong = tokens[:, 1], tokens[:, 2]
    with torch.no_grad():
        _, theirs = bridge.run_with_cache(tokens)
        want = theirs.logit_attrs(theirs.stack_head_results(), right, wrong)
        _, cache = pl.wrap(raw).run_with_cache(tokens)
    got = cache.logit_attrs(cache.stack_head_results(), right, wrong)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)

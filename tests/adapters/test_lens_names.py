"""Names that TransformerLens 4 gives by module: its own values there, its own effect of an edit, or a reason."""

from __future__ import annotations

from typing import Any

import bridges
import pytest
import torch
import zoo
from transformer_lens import utilities as utils

import probelens as pl

FAMILIES = ["gpt2", "llama", "neox", "gemma2", "mamba"]
# Ours are what attention uses: after the rotary embedding, and masked by the smallest number.
OTHERWISE = ("attn.hook_q", "attn.hook_k", "attn.hook_attn_scores")


def of_block_1(name: str) -> bool:
    return not name.startswith("blocks.") or name.startswith("blocks.1.")


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_in_its_cache_has_its_value_or_is_refused_with_a_reason(name: str) -> None:
    x, model = zoo.tokens(), pl.wrap(zoo.build(name))
    with torch.no_grad():
        _, want = bridges.bridge(name).run_with_cache(x, use_cache=False)
    names, compared, refused = [n for n in want.cache_dict if of_block_1(n)], [], []
    for asked in names:
        try:
            assert model.point(asked)
        except pl.UnknownHookError as error:
            refused.append((asked, str(error)))
        else:
            compared.append(asked)
    with torch.no_grad():
        _, got = model.run_with_cache(x, compared)
    for asked in compared:
        if not asked.endswith(OTHERWISE) or (name == "gpt2" and not asked.endswith("scores")):
            assert close(got[asked].to(want.cache_dict[asked]), want.cache_dict[asked]), asked
    inside = [n for n in compared if n.endswith((".hook_scale", ".hook_normalized"))]
    assert len(inside) == 2 * (1 + {"gemma2": 4, "mamba": 1}.get(name, 2))
    for asked, why in refused:
        assert "not found: " in why, why
        assert any(part in asked for part in (".q.", ".k.", ".v.", "rotary", "_cos", "_sin", "hidden")), why
    assert len(compared) > 25


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_inside_a_norm_does_what_it_does_there(name: str) -> None:
    x, model, lens = zoo.tokens(), pl.wrap(zoo.build(name)), bridges.bridge(name)
    names = [n for n in model.points.unlisted if of_block_1(n) and n.endswith((".hook_scale", ".hook_normalized"))]
    names += ["hook_pos_embed"] if name == "gpt2" else []

    def edit(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        # A new tensor: the bridge takes one written in place for unchanged.
        return torch.stack([tensor[0], tensor[1] * 1.3 + 0.1])

    with torch.no_grad():
        plain = model(x)
        for asked in names:
            got = model.run_with_hooks(x, [(asked, edit)])
            want = lens.run_with_hooks(x, fwd_hooks=[(asked, edit)], use_cache=False)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), asked
            assert torch.allclose(got[0], plain[0], atol=1e-6), asked
            assert (got[1] - plain[1]).abs().max() > 1e-4, asked


def test_gradients_inside_a_norm_are_those_that_autograd_finds() -> None:
    model, x = pl.wrap(zoo.build("llama")), zoo.tokens()
    norm = model.module.model.layers[1].post_attention_layernorm
    name = "blocks.1.ln2.hook_normalized"
    kept: dict[str, torch.Tensor] = {}
    handle = norm.register_forward_hook(lambda m, a, out: (out.retain_grad(), kept.update(out=out))[0])
    loss = model(x, return_type="loss")
    handle.remove()
    loss.backward()
    _, cache = model.run_with_cache(x, name, incl_bwd=True, return_type="loss")
    assert torch.allclose(cache[f"{name}_grad"], kept["out"].grad * norm.weight, atol=1e-7)
    assert cache[f"{name}_grad"].abs().max() > 1e-6


@pytest.mark.parametrize("name", ["opt", "bert", "modernbert", "jamba", "qwen3-moe", "granite", "olmo2", "t5"])
def test_unlisted_points_pass_verify(name: str) -> None:
    model = pl.wrap(zoo.more(name))
    ends = (".hook_scale", ".hook_normalized", "q.hook_out", "hook_pos_embed")
    names = [n for n in model.points.unlisted if of_block_1(n) and n.endswith(ends)]
    assert names
    report = model.verify(names=names)
    assert report.ok, str(report)
    assert not set(names) & set(model.hook_dict)


def test_ways_to_name_them_and_what_isnt_asked_for_costs_nothing() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens()
    every = [f"blocks.{i}.ln1.hook_scale" for i in range(zoo.LAYERS)]
    for names in ("ln1.hook_scale", "blocks.*.ln1.hook_scale", lambda n: n.endswith("ln1.hook_scale"), every):
        assert [p.name for p in model.points.match(names)[0]] == every
    for names in (("scale", 1, "ln1"), "scale1ln1", utils.get_act_name("scale", 1, "ln1")):
        assert model.point(names).name == every[1]
    with torch.no_grad():
        _, cache = model.run_with_cache(x)
        assert not any(n.endswith(("scale", "normalized")) for n in cache)
        with pytest.raises(pl.UnknownHookError, match="where names_filter names it"):
            cache["scale", 1, "ln1"]
        _, cache = model.run_with_cache(x, ["*", "ln1.hook_scale"])
    eps = model.module.transformer.h[1].ln_1.eps
    want = (cache["resid_pre", 1].var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    assert torch.allclose(cache["scale", 1, "ln1"], want, atol=1e-6)


def test_what_a_norm_does_that_is_no_norm_is_refused_by_name() -> None:
    raw = zoo.build("gpt2")
    raw.transformer.h[1].ln_1 = torch.nn.GroupNorm(1, 7)
    with pytest.raises(pl.InputError, match="one number for each feature"):
        pl.wrap(raw).run_with_cache(zoo.tokens(), "blocks.1.ln1.hook_scale")


def test_an_attention_under_a_norm_after_it_has_two_outputs() -> None:
    model, x = pl.wrap(zoo.build("gemma2")), zoo.tokens()
    own: dict[str, torch.Tensor] = {}
    layer = model.module.model.layers[1]
    for key in ("self_attn", "post_attention_layernorm"):
        layer.get_submodule(key).register_forward_hook(
            lambda m, a, out, key=key: own.update({key: out[0] if isinstance(out, tuple) else out})
        )
    with torch.no_grad():
        _, cache = model.run_with_cache(x, ["blocks.1.attn.hook_out", "blocks.1.hook_attn_out"])
    assert torch.equal(cache["blocks.1.attn.hook_out"], own["self_attn"])
    assert torch.equal(cache["blocks.1.hook_attn_out"], own["post_attention_layernorm"])
    assert (own["self_attn"] - own["post_attention_layernorm"]).abs().max() > 1e-2

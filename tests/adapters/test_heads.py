"""Heads are read from each layer: models whose layers differ in their number of heads, or were pruned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl

SIZE = 4


def laguna() -> tuple[nn.Module, list[nn.Module]]:
    """Four heads in layer 0 and eight in layer 1, of width 4."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "LagunaConfig"):
        pytest.skip("this transformers has no Laguna")
    torch.manual_seed(0)
    config = transformers.LagunaConfig(
        vocab_size=zoo.VOCAB, hidden_size=zoo.WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=SIZE, num_attention_heads_per_layer=[4, 8], gating=False, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = transformers.LagunaForCausalLM(config).eval()
    return model, [layer.self_attn for layer in model.model.layers]


def cut(layer: nn.Linear, rows: slice | None = None, columns: slice | None = None) -> nn.Linear:
    weight = layer.weight.detach()[rows or slice(None)][:, columns or slice(None)].clone()
    small = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    small.weight.data = weight
    return small


def pruned_llama() -> tuple[nn.Module, list[nn.Module]]:
    """A Llama whose layer 1 lost its first key-value head, and the two of its four heads that share it."""
    model: Any = zoo.build("llama")
    attention = model.model.layers[1].self_attn
    rest, shared = slice(2 * SIZE, None), slice(SIZE, None)
    attention.q_proj, attention.o_proj = cut(attention.q_proj, rest), cut(attention.o_proj, None, rest)
    attention.k_proj, attention.v_proj = cut(attention.k_proj, shared), cut(attention.v_proj, shared)
    return model, [layer.self_attn for layer in model.model.layers]


def run(raw: nn.Module, x: Tensor, places: dict[str, nn.Module]) -> dict[str, Tensor]:
    """What goes into and comes out of some modules."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            seen[f"{name} in"], seen[f"{name} out"] = args[0].detach(), out.detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in places.items()]
    with torch.no_grad():
        raw(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("make", [laguna, pruned_llama])
def test_each_layer_shows_its_own_heads(make: Any) -> None:
    raw, attentions = make()
    model, x = pl.wrap(raw), zoo.tokens()
    counts = []
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "*.attn.hook_*")
    for layer, attention in enumerate(attentions):
        seen = run(raw, x, {"v": attention.v_proj, "o": attention.o_proj, "q": attention.q_proj})
        z, v, pattern = (cache[name, layer] for name in ("z", "v", "pattern"))
        counts.append(z.shape[2])
        assert torch.allclose(z.flatten(2), seen["o in"], atol=1e-6)
        assert z.shape[2:] == (attention.o_proj.in_features // SIZE, SIZE) == cache["q", layer].shape[2:]
        assert torch.allclose(v.flatten(2), seen["v out"], atol=1e-6)
        if make is laguna:
            continue  # Its attention gates what it mixes.
        mixed = pattern @ v.repeat_interleave(z.shape[2] // v.shape[2], 2).transpose(1, 2)
        assert torch.allclose(mixed.transpose(1, 2), z, atol=1e-5)
    assert len(set(counts)) == 2
    assert model.verify(x).ok


@pytest.mark.parametrize("make", [laguna, pruned_llama])
@pytest.mark.parametrize("layer", [0, 1])
def test_silencing_a_head_is_what_a_plain_hook_gives(make: Any, layer: int) -> None:
    raw, attentions = make()
    model, x = pl.wrap(raw), zoo.tokens()
    plain, down = zoo.logits(raw, x), attentions[layer].o_proj

    def silence(z: Tensor, hook: pl.HookPoint) -> Tensor:
        return z * (torch.arange(z.shape[2]) != 1)[:, None]

    def by_hand(module: nn.Module, args: Any) -> Any:
        return (args[0] * (torch.arange(down.in_features) // SIZE != 1),)

    handle = down.register_forward_pre_hook(by_hand)
    want = zoo.logits(raw, x)
    handle.remove()
    with torch.no_grad():
        got = model.run_with_hooks(x, [(f"blocks.{layer}.attn.hook_z", silence)])
    assert torch.allclose(got, want, atol=1e-6)
    assert (want - plain).abs().max() > 1e-3


def test_heads_of_a_decoder_are_not_those_of_the_encoder_that_its_config_also_describes() -> None:
    model = pl.wrap(zoo.more("bart"))
    assert model.module.config.encoder_attention_heads != zoo.HEADS
    assert {p.site.heads for p in model.hook_dict.values() if p.name.endswith("hook_z") and p.site} == {zoo.HEADS}
    assert model.cfg.n_heads == zoo.HEADS

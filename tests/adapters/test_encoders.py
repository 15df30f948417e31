"""Encoders and classifiers of transformers: what their points show and what edits do, beside transformers and plain hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.ablation.reading import feeds_readout

ENCODERS = [*zoo.ENCODERS, *(name for name in zoo.CLASSIFIERS if name != "llama-classifier")]
# Where a block keeps attention's output projection, the MLP's first and last layer.
DENSE = ("attention.output.dense", "intermediate.dense", "output.dense")
PLACES = {
    "distilbert": ("attention.out_lin", "ffn.lin1", "ffn.lin2"), "modernbert": ("attn.Wo", "mlp.Wi", "mlp.Wo"),
    "vit": ("attention.o_proj", "mlp.fc1", "mlp.fc2"),
}  # fmt: skip


def places(name: str, block: nn.Module) -> list[nn.Module]:
    names = PLACES.get(name.split("-")[0], DENSE)
    try:
        return [block.get_submodule(path) for path in names]
    except AttributeError:  # in older versions ViT is built as BERT
        return [block.get_submodule(path) for path in DENSE]


def made(name: str) -> tuple[nn.Module, pl.HookedModel, Any]:
    raw = zoo.more(name)
    return raw, pl.wrap(raw), zoo.inputs(name)


def hooked(raw: nn.Module, x: Any, module: nn.Module, edit: Callable[[Tensor], Tensor], entering: bool) -> Tensor:
    """Logits with what enters or leaves a module changed by a plain PyTorch hook."""

    def before(module: nn.Module, args: Any) -> Any:
        return (edit(args[0]), *args[1:])

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return edit(out) if isinstance(out, Tensor) else (edit(out[0]), *out[1:])

    handle = module.register_forward_pre_hook(before) if entering else module.register_forward_hook(after)
    with handle:
        return zoo.logits(raw, x)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_point_passes_verify_and_fires_once(name: str) -> None:
    _, model, x = made(name)
    report = model.verify(x)
    assert report.ok, str(report)
    assert {row["fired"] for row in report.rows} == {1}
    assert {row["name"] for row in report.rows} == set(model.hook_dict)
    inside = {"hook_attn_out", "hook_resid_mid", "hook_mlp_out", "attn.hook_z", "mlp.hook_post", "hook_resid_post"}
    for layer in range(model.cfg.n_layers):
        assert {f"blocks.{layer}.{point}" for point in inside} <= set(model.hook_dict)
    assert "hook_embed" in model.hook_dict


@pytest.mark.parametrize("name", ENCODERS)
def test_the_cache_is_what_transformers_gives_as_hidden_states_and_attentions(name: str) -> None:
    raw, model, x = made(name)
    raw.config._attn_implementation = "eager"
    with torch.no_grad():
        out = raw(x, output_hidden_states=True, output_attentions=True)
        _, cache = model.run_with_cache(x)
    assert torch.allclose(cache["resid_pre", 0], out.hidden_states[0], atol=1e-6)
    for layer in range(model.cfg.n_layers - 1):
        assert torch.allclose(cache["resid_post", layer], out.hidden_states[layer + 1], atol=1e-5)
    last = cache["ln_final.hook_out"] if "ln_final.hook_out" in cache else cache["resid_post", -1]
    assert any(torch.allclose(end, out.hidden_states[-1], atol=1e-5) for end in (last, cache["resid_post", -1]))
    if name == "deberta":
        with pytest.raises(pl.UnknownHookError, match="attention interface"):
            model.point(("pattern", 0))
        return
    for layer, weights in enumerate(out.attentions):
        pattern, v, z = (cache[part, layer] for part in ("pattern", "v", "z"))
        assert torch.allclose(pattern, weights, atol=1e-5)
        assert (pattern.triu(1) > 1e-4).any(), "later positions are read too"
        assert torch.allclose(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z, atol=1e-5)
        scores = torch.einsum("bqhd,bkhd->bhqk", cache["q", layer], cache["k", layer]) / model.cfg.d_head**0.5
        kept = weights > 0  # ModernBERT looks only so far
        assert torch.allclose(scores[kept], cache["attn_scores", layer][kept], atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_edits_are_what_plain_hooks_make_of_them(name: str) -> None:
    raw, model, x = made(name)
    plain, size = zoo.logits(raw, x), zoo.WIDTH // zoo.HEADS
    for layer, path in enumerate(model.adapter.blocks):
        block = raw.get_submodule(path)
        out, up, down = places(name, block)
        prefix = f"blocks.{layer}."

        def head(t: Tensor) -> Tensor:
            return t * (torch.arange(zoo.WIDTH) // size != 1)

        def some(t: Tensor) -> Tensor:
            return t * (torch.arange(t.shape[-1]) % 3 != 0)

        cases: list[tuple[str, Tensor]] = [
            ("attn.hook_z", hooked(raw, x, out, head, True)), ("hook_attn_out", hooked(raw, x, out, some, False)),
            ("mlp.hook_post", hooked(raw, x, down, some, True)), ("hook_mlp_out", hooked(raw, x, down, some, False)),
            ("hook_resid_post", hooked(raw, x, block, some, False)), ("hook_resid_pre", hooked(raw, x, block, some, True)),
        ]  # fmt: skip
        if "modernbert" not in name:
            cases.append(("mlp.hook_pre", hooked(raw, x, up, some, False)))
        for point, want in cases:
            edit = some if point != "attn.hook_z" else lambda t: t * (torch.arange(zoo.HEADS) != 1)[:, None]
            got = model.run_with_hooks(x, [(prefix + point, lambda t, hook, edit=edit: edit(t))])
            effect = (want - plain).abs().max()
            assert effect > 1e-5, (layer, point)
            assert (got - want).abs().max() <= 0.02 * effect, (layer, point)


@pytest.mark.parametrize("name", ENCODERS)
def test_runs_start_and_stop_at_every_block(name: str) -> None:
    _, model, x = made(name)
    with torch.no_grad():
        want, cache = model.run_with_cache(x, ["layers"])
        for layer in range(model.cfg.n_layers + 1):
            resid = cache["resid_pre", 0] if layer == 0 else cache["resid_post", layer - 1]
            assert torch.equal(model(x, stop_at_layer=layer), resid)
            assert model.can_start_at(layer, x)
            assert torch.allclose(model(resid, start_at_layer=layer), want, atol=1e-5)
            assert not torch.allclose(model(resid * -1, start_at_layer=layer), want, atol=1e-3)


def test_a_bare_encoder_and_its_pooler_start_from_the_last_block() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    raw = transformers.BertModel(transformers.BertConfig(**zoo._BERT)).eval()
    model, x = pl.wrap(raw), zoo.tokens()
    with torch.no_grad():
        want = raw(x)
        resid = model(x, stop_at_layer=zoo.LAYERS)
        assert torch.equal(resid, want.last_hidden_state)
        assert torch.equal(model(resid, start_at_layer=zoo.LAYERS), want.last_hidden_state)
    assert model.verify(x).ok


def test_what_encoders_do_not_have_says_why() -> None:
    model = pl.wrap(zoo.more("bert"))
    for name, why in (
        ("blocks.0.cross_attn.hook_pattern", "doesn't attend to an encoder"), ("mixer_out", "has attention, not a mixer"),
    ):  # fmt: skip
        with pytest.raises(pl.UnknownHookError, match=why):
            model.point(name)
    with pytest.raises(pl.UnknownHookError, match=r"gate and its input are one projection, mlp\.Wi"):
        pl.wrap(zoo.more("modernbert")).point("blocks.0.mlp.hook_pre")
    with pytest.raises(pl.InputError, match="reads beside the others"):
        model(zoo.tokens(), return_type="loss")
    with pytest.raises(pl.InputError, match="takes pixel_values, not tokens"):
        pl.wrap(zoo.more("vit"))(zoo.tokens())


def test_a_decoder_built_as_bert_is_causal() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    raw = transformers.BertLMHeadModel(transformers.BertConfig(**zoo._BERT, is_decoder=True)).eval()
    model, x = pl.wrap(raw), zoo.tokens()
    assert model.verify(x).ok
    _, cache = model.run_with_cache(x, "pattern")
    assert not cache["pattern", 0].triu(1).any()
    assert model(x, return_type="loss").item() > 0


def test_noise_at_the_embedding_of_a_picture_counts_its_class_token() -> None:
    _, model, x = made("vit")
    _, cache = model.run_with_cache(x, ["hook_embed", "blocks.0.hook_resid_pre"])
    assert cache["hook_embed"].shape[1] == 1 + (8 // 4) ** 2
    assert torch.equal(cache["hook_embed"], cache["resid_pre", 0])


def test_a_classifier_of_a_decoder_has_the_points_of_the_decoder() -> None:
    _, model, x = made("llama-classifier")
    assert model.verify(x).ok
    assert model(x).shape == (2, 3)
    assert "blocks.1.attn.hook_pattern" in model.hook_dict


@pytest.mark.parametrize(
    ("name", "reads"),
    [("bert", False), ("modernbert", False), ("modernbert-classifier", False), ("bert-tagger", True), ("vit", True)],
)
def test_only_a_linear_head_makes_the_end_of_the_blocks_what_the_answer_is_read_from(name: str, reads: bool) -> None:
    model = pl.wrap(zoo.more(name))
    end = "ln_final.hook_out" if "ln_final.hook_out" in model.hook_dict else ("resid_post", -1)
    assert feeds_readout(model, model.point(end).name) is reads
    if "unembed.hook_in" in model.hook_dict:
        assert feeds_readout(model, "unembed.hook_in")
    assert ("unembed.hook_in" in model.hook_dict) == (name in ("bert", "modernbert", "bert-tagger"))

"""Encoder-decoders of transformers: what their points show and what edits do, beside transformers and plain hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.hooks.verify import left_behind

NAMES = list(zoo.ENCODER_DECODERS)
NORMED = ("bart-whole", "marian")


def made(name: str) -> tuple[nn.Module, pl.HookedModel, Any]:
    raw = zoo.more(name)
    return raw, pl.wrap(raw), zoo.inputs(name)


def logits(raw: nn.Module, x: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return raw(**x).logits


def scores_here(model: pl.HookedModel) -> bool:
    """False for T5 of older versions, which doesn't go through the attention interface."""
    return "blocks.0.attn.hook_pattern" in model.hook_dict


def parts(raw: nn.Module, name: str, side: str, layer: int) -> dict[str, nn.Module]:
    """The block itself, and what projects attention, cross-attention and the MLP back to the residual stream."""
    base = raw if name.startswith("t5") else raw.model
    stack = getattr(base, side)
    if name.startswith("t5"):
        block = stack.block[layer]
        found = {"attn": block.layer[0].SelfAttention.o, "mlp": block.layer[-1].DenseReluDense.wo}
        return {"block": block, **found, **({"cross": block.layer[1].EncDecAttention.o} if side == "decoder" else {})}
    block = stack.layers[layer]
    found = {"attn": block.self_attn.out_proj, "mlp": block.fc2}
    return {"block": block, **found, **({"cross": block.encoder_attn.out_proj} if side == "decoder" else {})}


def hooked(
    raw: nn.Module, x: dict[str, Tensor], module: nn.Module, edit: Callable[[Tensor], Tensor], entering: bool
) -> Tensor:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (edit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": edit(kwargs["hidden_states"])}

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return edit(out) if isinstance(out, Tensor) else (edit(out[0]), *out[1:])

    if entering:
        with module.register_forward_pre_hook(before, with_kwargs=True):
            return logits(raw, x)
    with module.register_forward_hook(after):
        return logits(raw, x)


@pytest.mark.parametrize("name", NAMES)
def test_every_point_fires_once_changes_nothing_by_itself_and_everything_by_an_edit(name: str) -> None:
    raw, model, x = made(name)
    before = {k: v.clone() for k, v in raw.state_dict().items()}
    calls: dict[str, int] = {}

    def same(t: Tensor, hook: pl.HookPoint) -> Tensor:
        calls[hook.name] = calls.get(hook.name, 0) + 1
        return t.clone()

    def noise(t: Tensor, hook: pl.HookPoint) -> Tensor:
        return t + torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * (1 + t.abs().clamp(max=100))

    with torch.no_grad():
        plain = model(x)
        assert torch.equal(plain, logits(raw, x))
        again = model.run_with_hooks(x, [(lambda n: True, same)])
        assert torch.allclose(again, plain, atol=1e-5 * float(plain.abs().max()))
        assert calls == dict.fromkeys(model.hook_dict, 1)
        for point in model.hook_dict:
            edited = model.run_with_hooks(x, [(point, noise)])
            assert (edited - plain).abs().max() > 1e-5, point
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert left_behind(raw) == []


@pytest.mark.parametrize("name", [n for n in NAMES if n != "whisper"])
def test_tokens_alone_are_read_by_both_and_verify_passes(name: str) -> None:
    raw, model, _ = made(name)
    x = zoo.tokens(2, 8)
    shifted = torch.cat([torch.full((2, 1), 2), x[:, :-1]], 1)
    if name == "mbart":
        shifted = raw.prepare_decoder_input_ids_from_labels(x)
    with torch.no_grad():
        assert torch.equal(model(x), logits(raw, {"input_ids": x, "decoder_input_ids": shifted}))
    report = model.verify(x)
    assert report.ok, str(report)
    loss = torch.nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), shifted[:, 1:].flatten())
    assert torch.allclose(model(x, return_type="loss"), loss)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_what_transformers_gives(name: str) -> None:
    raw, model, x = made(name)
    raw.set_attn_implementation("eager")
    with torch.no_grad():
        out = raw(**x, output_hidden_states=True, output_attentions=True)
        _, cache = model.run_with_cache(x)
    sides = (("encoder.", 2, out.encoder_hidden_states, out.encoder_attentions),
             ("", zoo.LAYERS, out.decoder_hidden_states, out.decoder_attentions))  # fmt: skip
    for prefix, layers, states, attentions in sides:
        for layer in range(layers):
            block = f"{prefix}blocks.{layer}."
            assert torch.allclose(cache[block + "hook_resid_pre"], states[layer], atol=1e-5)
            if layer + 1 < layers:
                assert torch.allclose(cache[block + "hook_resid_post"], states[layer + 1], atol=1e-5)
            if scores_here(model):
                assert torch.allclose(cache[block + "attn.hook_pattern"], attentions[layer], atol=1e-5)
    for layer, weights in enumerate(out.cross_attentions):
        if not scores_here(model):
            with pytest.raises(pl.UnknownHookError, match="cross-attention of block 0 doesn't go through"):
                model.point("decoder.blocks.0.cross_attn.hook_pattern")
            break
        pattern = cache[f"decoder.blocks.{layer}.cross_attn.hook_pattern"]
        assert torch.allclose(pattern, weights, atol=1e-5)
        assert pattern.shape[2:] == (x["decoder_input_ids"].shape[1], out.encoder_last_hidden_state.shape[1])
    for layer in range(zoo.LAYERS):
        q, k, v, z = (cache[f"blocks.{layer}.cross_attn.hook_{part}"] for part in "qkvz")
        assert q.shape == z.shape == (2, 8, zoo.HEADS, 4)
        assert k.shape[1] == v.shape[1] == out.encoder_last_hidden_state.shape[1]
    assert cache["encoder.blocks.0.attn.hook_z"].shape[2] == (4 if name.startswith("t5") else 2)
    if "encoder.ln_final.hook_out" in cache:
        assert torch.allclose(cache["encoder.ln_final.hook_out"], out.encoder_last_hidden_state, atol=1e-5)
    else:
        assert torch.allclose(cache["encoder.blocks.1.hook_resid_post"], out.encoder_last_hidden_state, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_edits_are_what_plain_hooks_make_of_them(name: str) -> None:
    raw, model, x = made(name)
    plain = logits(raw, x)

    def some(t: Tensor) -> Tensor:
        return t * (torch.arange(t.shape[-1]) % 3 != 0)

    for side, layer in (("encoder", 1), ("decoder", 1)):
        here = parts(raw, name, side, layer)
        prefix = f"{side}.blocks.{layer}."
        heads = 2 if side == "encoder" and not name.startswith("t5") else zoo.HEADS

        def head(t: Tensor, heads: int = heads) -> Tensor:
            return t * (torch.arange(zoo.WIDTH) // (zoo.WIDTH // heads) != 1)

        cases: list[tuple[str, nn.Module, bool, bool]] = [
            ("attn.hook_z", here["attn"], True, True), ("hook_attn_out", here["attn"], False, False),
            ("mlp.hook_post", here["mlp"], True, False), ("hook_mlp_out", here["mlp"], False, False),
            ("hook_resid_post", here["block"], False, False), ("hook_resid_pre", here["block"], True, False),
        ]  # fmt: skip
        if side == "decoder":
            cases += [
                ("cross_attn.hook_z", here["cross"], True, True),
                ("hook_cross_attn_out", here["cross"], False, False),
            ]
        for point, module, entering, by_head in cases:
            want = hooked(raw, x, module, head if by_head else some, entering)
            edit = some if not by_head else lambda t: t * (torch.arange(t.shape[2]) != 1)[:, None]
            with torch.no_grad():
                got = model.run_with_hooks(x, [(prefix + point, lambda t, hook, edit=edit: edit(t))])
            effect = (want - plain).abs().max()
            assert effect > 1e-5, point
            assert (got - want).abs().max() <= 0.02 * effect, point


@pytest.mark.parametrize("name", NAMES)
def test_what_the_parts_of_a_decoder_add_sums_to_its_residual_stream(name: str) -> None:
    _, model, x = made(name)
    with torch.no_grad():
        _, cache = model.run_with_cache(x)
    if name in NORMED:
        with pytest.raises(pl.InputError, match="norm every sum"):
            cache.decompose_resid()
        return
    for layer in (1, zoo.LAYERS):
        found, labels = cache.decompose_resid(layer, return_labels=True)
        want = cache["resid_post", layer - 1]
        assert f"{layer - 1}_cross_attn_out" in labels
        assert (found.sum(0) - want).norm() <= 1e-5 * want.norm()
        assert (found[labels.index("0_cross_attn_out")]).norm() > 1e-3 * want.norm()
    half = cache["resid_pre", 0] + cache["attn_out", 0] + cache["cross_attn_out", 0]
    assert torch.allclose(half, cache["resid_mid", 0], atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart-whole", "whisper"])
def test_the_decoder_is_the_stack_that_names_without_a_side_mean(name: str) -> None:
    _, model, x = made(name)
    assert model.cfg.n_layers == zoo.LAYERS
    assert model.cfg.n_heads == zoo.HEADS
    assert model.cfg.extra["n_encoder_layers"] == 2
    with torch.no_grad():
        _, cache = model.run_with_cache(x, ["layers", "encoder.blocks.*.hook_resid_post"], return_type=None)
    assert [n for n in cache if n.startswith("blocks.")] == ["blocks.0.hook_resid_pre"] + [
        f"blocks.{i}.hook_resid_post" for i in range(zoo.LAYERS)
    ]
    assert model.point("decoder.blocks.2.hook_resid_post") is model.point("blocks.2.hook_resid_post")
    assert model.point("encoder.blocks.1.hook_resid_post").depth == -1
    with torch.no_grad():
        resid, held = model.run_with_cache(
            x, ["*encoder.blocks.1.hook_resid_post", "blocks.*.hook_mlp_out"], stop_at_layer=1
        )
        assert torch.equal(resid, cache["resid_post", 0])
        assert set(held) == {"encoder.blocks.1.hook_resid_post", "blocks.0.hook_mlp_out"}
    with pytest.raises(
        pl.InputError, match="could not be tried" if name == "whisper" else "read the encoder's output beside"
    ):
        model(resid, start_at_layer=1)
    with pytest.raises(pl.UnknownHookError, match="block 0 .* doesn't attend to an encoder here"):
        model.point("encoder.blocks.0.cross_attn.hook_pattern")


def test_what_the_decoder_reads_must_be_said_where_the_encoder_reads_no_tokens() -> None:
    _, model, x = made("whisper")
    with pytest.raises(pl.InputError, match=r"what the decoder .* reads is not known.*decoder_input_ids"):
        model(x["input_features"])
    with torch.no_grad():
        assert torch.equal(model(x["input_features"], decoder_input_ids=x["decoder_input_ids"]), model(x))


def test_an_embedding_that_both_stacks_call_has_no_point() -> None:
    raw: Any = zoo.more("bart-whole")
    raw.model.set_input_embeddings(raw.model.shared)
    model = pl.wrap(raw)
    assert model.verify(zoo.tokens()).ok
    for name in ("hook_embed", "encoder.hook_embed", "decoder.hook_embed"):
        with pytest.raises(pl.UnknownHookError, match="encoder and decoder call one embedding"):
            model.point(name)


@pytest.mark.parametrize("name", ["t5", "bart-whole"])
def test_an_edit_of_the_encoder_reaches_every_generated_token(name: str) -> None:
    # transformers generates with a T5 only where both its stacks have as many blocks.
    raw = zoo.more(name, **({"num_layers": zoo.LAYERS} if name == "t5" else {}))
    model, x = pl.wrap(raw), zoo.inputs(name)
    more = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        "eos_token_id": None,
    }
    ids, calls = x["input_ids"], []

    def flip(t: Tensor, hook: pl.HookPoint) -> Tensor:
        calls.append(hook.name)
        return -t

    def twice(module: nn.Module, args: Any, out: Any) -> Any:
        return -out if isinstance(out, Tensor) else (-out[0], *out[1:])

    plain = raw.generate(ids, **more)
    with parts(raw, name, "encoder", 1)["block"].register_forward_hook(twice):
        want = raw.generate(ids, **more)
    with model.hooks([("encoder.blocks.1.hook_resid_post", flip)]):
        got = model.module.generate(ids, **more)
    assert len(calls) == 1
    assert torch.equal(got.sequences, want.sequences)
    for a, b, c in zip(got.scores, want.scores, plain.scores, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
        assert not torch.allclose(a, c, atol=1e-3)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_mapping_of_the_forwards_arguments_is_verified_and_collected(name: str) -> None:
    raw, model, x = made(name)
    assert model.verify(x).ok
    acts = pl.collect(model, x, ["encoder.blocks.1.hook_resid_post", "resid_post"])
    with torch.no_grad():
        out = raw(**x, output_hidden_states=True)
    assert torch.allclose(acts["blocks.0.hook_resid_post"], out.decoder_hidden_states[1], atol=1e-5)
    assert len(acts["encoder.blocks.1.hook_resid_post"]) == len(out.encoder_last_hidden_state)

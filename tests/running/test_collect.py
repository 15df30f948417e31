"""collect: the same activations as one run, at the sites and positions asked for, in memory or on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

import probelens as pl
from probelens.hooks.names import resolve


@pytest.fixture(scope="module")
def model() -> pl.HookedModel:
    return pl.wrap(zoo.build("neox"))


def named(model: pl.HookedModel, sites: Any) -> list[str]:
    return [point.name for point in resolve(model, sites)]


def test_a_module_path_has_the_layer_of_the_point_that_it_stands_for() -> None:
    model = pl.wrap(zoo.build("gpt2"))
    wanted = {
        "transformer.wte.hook_out": -1, "transformer.wpe.hook_out": -1, "transformer.h.0.hook_in": -1,
        "transformer.h.0.hook_out": 0, "transformer.h.1.hook_in": 0, "transformer.h.1.mlp.c_fc.hook_out": 1,
        "transformer.h.1.mlp.hook_in": 1, "transformer.ln_f.hook_out": 3, "transformer.hook_out": 3, "lm_head.hook_in": 3,
    }  # fmt: skip
    assert {name: model.point(name).depth for name in wanted} == wanted
    names = ["transformer.h.1.mlp.hook_out", "transformer.wte.hook_out"]
    assert list(pl.collect(model, zoo.tokens(2, 5), names).layers.items()) == list(zip(names, (1, -1), strict=True)), (
        "in the order asked for"
    )
    fused = pl.wrap(zoo.build("lstm-fused"))
    assert [fused.point(f"layers.0.hook_{side}").depth for side in ("in", "out")] == [-1, zoo.LAYERS - 1]
    own = pl.wrap(zoo.build("gpt2").transformer.h, blocks="")
    assert [own.point(f"1.hook_{side}").depth for side in ("in", "out")] == [0, 1]


def test_sites_are_shorthands_names_globs_and_lists(model: pl.HookedModel) -> None:
    post = [f"blocks.{i}.hook_resid_post" for i in range(3)]
    assert named(model, "resid_post") == named(model, "hook_resid_post") == post
    assert named(model, "layers") == ["blocks.0.hook_resid_pre", *post]
    assert named(model, "blocks.[12].hook_resid_post") == post[1:]
    assert named(model, ["embed", "resid_post", post[0]]) == ["hook_embed", *post]
    assert named(model, "pattern") == [f"blocks.{i}.attn.hook_pattern" for i in range(3)]
    mamba = pl.wrap(zoo.build("mamba"))
    assert named(mamba, "mixer_out") == [f"blocks.{i}.mixer.hook_out" for i in range(3)]
    assert [point.depth for point in resolve(model, "layers")] == [-1, 0, 1, 2]
    assert model.point("ln_final.hook_in").depth == 3
    for bad, text in (("resid_mid", "parallel"), ("resid_pots", "resid_post"), ([], "empty"), ([3], "string")):
        with pytest.raises(pl.ProbelensError, match=text):
            resolve(model, bad)


@pytest.mark.parametrize("name", ["neox", "mamba", "lstm", "gru-bidirectional-fused"])
def test_batches_give_what_one_run_gives(name: str) -> None:
    model, x = pl.wrap(zoo.build(name)), zoo.tokens(7, 6)
    with torch.no_grad():
        _, cache = model.run_with_cache(x)
    acts = pl.collect(model, x, ["layers", "unembed.hook_in"], batch_size=3)
    assert len(acts) == 7
    assert acts.names == [*named(model, "layers"), "unembed.hook_in"]
    for site in acts:
        assert torch.allclose(acts[site], cache[site], atol=1e-5), site
    assert acts.layers["unembed.hook_in"] == 3
    assert torch.equal(acts.tokens, x)


def test_positions_dtype_and_masks(model: pl.HookedModel) -> None:
    batch = pl.tasks.Parity(bos=True).sample(5, length=6)
    full = pl.collect(model, batch, "resid_post")
    assert torch.equal(full.mask, batch.mask)
    one = pl.collect(model, batch, "resid_post", pos=-1, dtype=torch.float16)
    assert one["blocks.2.hook_resid_post"].shape == (5, 1, zoo.WIDTH)
    assert one["blocks.2.hook_resid_post"].dtype == torch.float16
    assert one.pos.tolist() == [6]
    some = pl.collect(model, batch, "resid_post", pos=[0, 3])
    assert torch.equal(some["blocks.1.hook_resid_post"], full["blocks.1.hook_resid_post"][:, [0, 3]])
    assert some.mask.tolist() == [[False, True]] * 5
    with pytest.raises(pl.ShapeError, match="allowed are"):
        pl.collect(model, batch, "resid_post", pos=[7])


def test_earlier_blocks_only_run_as_far_as_needed(model: pl.HookedModel) -> None:
    ran = []
    handle = model.module.gpt_neox.layers[2].register_forward_pre_hook(lambda m, a: ran.append(1))
    try:
        pl.collect(
            model, zoo.tokens(), ["blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"]
        )  # the layout is tried once
        ran.clear()
        pl.collect(model, zoo.tokens(), "blocks.1.hook_resid_post")
        assert ran == []
        pl.collect(model, zoo.tokens(), "blocks.2.hook_resid_pre")
        assert ran == [1]
    finally:
        handle.remove()


def test_dataset_rows_mappings_and_lists(model: pl.HookedModel) -> None:
    x = zoo.tokens(3, 4)
    want = pl.collect(model, x, "resid_post")["blocks.2.hook_resid_post"]
    for inputs in (x.tolist(), {"input_ids": x}, {"input_ids": x.tolist(), "attention_mask": [[1] * 4] * 3}):
        assert torch.allclose(pl.collect(model, inputs, "resid_post")["blocks.2.hook_resid_post"], want, atol=1e-5)
    ragged = pl.collect(model, {"input_ids": [[1, 2, 3], [4]]}, "resid_post")
    assert ragged.mask.tolist() == [[True] * 3, [True, False, False]]
    alone = pl.collect(model, torch.tensor([[4]]), "resid_post")
    key = "blocks.2.hook_resid_post"
    assert torch.allclose(ragged[key][1, :1], alone[key][0], atol=1e-5)
    for bad in ({"text": ["a"]}, object(), "text"):
        with pytest.raises(pl.InputError):
            pl.collect(model, bad, "resid_post")


class Tagger(torch.nn.Module):
    """A recurrent model of a user's own: its forward takes tokens and nothing else."""

    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.rnn = torch.nn.GRU(8, 8, batch_first=True, bidirectional=bidirectional)
        self.head = torch.nn.Linear(16 if bidirectional else 8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def test_a_model_that_takes_no_mask_is_read_where_padding_cannot_reach() -> None:
    key = "blocks.0.hook_resid_post"
    model = pl.wrap(Tagger(bidirectional=False))
    found = pl.collect(model, {"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 1, 1], [1]]}, key)
    assert found.mask.tolist() == [[True] * 3, [True, False, False]]
    alone = pl.collect(model, torch.tensor([[4]]), key)
    assert torch.allclose(found[key][1, :1], alone[key][0], atol=1e-6)
    left = {"input_ids": [[1, 2, 3], [0, 0, 4]], "attention_mask": [[1, 1, 1], [0, 0, 1]]}
    both_ways = pl.wrap(Tagger(bidirectional=True))
    for asked, inputs in ((model, left), (both_ways, {"input_ids": [[1, 2, 3], [4]]})):
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.collect(asked, inputs, key)


@pytest.mark.parametrize("kind", ["llama", "mamba", "mamba2"])
def test_padding_that_a_batch_names_is_kept_from_the_model(kind: str) -> None:
    model, key = pl.wrap(zoo.build(kind)), "blocks.1.hook_resid_post"
    x = zoo.tokens(4, 8)
    real = torch.arange(8) >= torch.tensor([0, 2, 3, 4])[:, None]
    labels = {"next": (x + 1) % 3}
    batch = pl.Batch(x.where(real, 0), labels, attention_mask=real)
    assert torch.equal(batch.mask, real), "labels on padding don't count"
    assert torch.equal(batch[1:3].attention_mask, real[1:3])
    told, untold = (pl.collect(model, b, key)[key] for b in (batch, pl.Batch(x.where(real, 0), labels, real)))
    size = told.abs().max()
    for i, row in enumerate(x):
        alone = pl.collect(model, row[real[i]][None], key)[key][0]
        assert torch.allclose(told[i][real[i]], alone, atol=1e-4 * float(size))
    assert (told - untold)[real].abs().max() > 1e-3 * size, "without it padding leaks in"
    # The same through the engine: what the ablation's unedited run loses on these examples.
    space = {key: pl.subspaces.random(1, told.shape[-1], seed=0)}
    lost = pl.ablate(model, batch, space, label="next", metric="next_token_loss", refit=False, controls=0)
    shown = lost.to_dataframe()["clean"].iloc[0]
    sums = []
    for i, row in enumerate(x):
        ids = row[real[i]][None]
        logits = model(ids)[0, :-1]
        sums.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    assert shown == pytest.approx(sum(sums) / len(sums), rel=1e-3)


def test_a_stream_of_other_padding_is_not_gone_on_with(tmp_path: Path) -> None:
    model, x, key = pl.wrap(zoo.build("llama")), zoo.tokens(4, 8), "blocks.1.hook_resid_post"
    real = torch.arange(8) >= torch.tensor([0, 2, 3, 4])[:, None]
    pl.collect(model, pl.Batch(x, attention_mask=real), key, out=tmp_path / "acts")
    pl.collect(model, pl.Batch(x, attention_mask=real), key, out=tmp_path / "acts")
    with pytest.raises(pl.StoreError):
        pl.collect(model, x, key, out=tmp_path / "acts")


def test_a_batch_names_padding_that_the_model_cannot_be_told_of() -> None:
    key = "blocks.0.hook_resid_post"
    right = torch.tensor([[True, True, True], [True, False, False]])
    x = torch.tensor([[1, 2, 3], [4, 0, 0]])
    causal, both_ways = (pl.wrap(Tagger(bidirectional=b)) for b in (False, True))
    found = pl.collect(causal, pl.Batch(x, attention_mask=right), key)
    assert torch.allclose(found[key][1, :1], pl.collect(causal, x[1:, :1], key)[key][0], atol=1e-6)
    for model, mask in ((both_ways, right), (causal, right.flip(1))):
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.collect(model, pl.Batch(x, attention_mask=mask), key)
        space = {key: pl.subspaces.random(1, model.cfg.d_model if model is causal else 16, seed=0)}
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.ablate(model, pl.Batch(x, {"t": x % 3}, attention_mask=mask), space, label="t", refit=False, controls=0)


def test_training_mode_and_gradients_come_back(model: pl.HookedModel) -> None:
    raw = zoo.build("gpt2").train()
    raw.transformer.drop.p = 0.5
    frozen = raw.transformer.h[0].eval()
    wrapped, x = pl.wrap(raw), zoo.tokens()
    a, b = (pl.collect(wrapped, x, "resid_post")["blocks.2.hook_resid_post"] for _ in range(2))
    assert torch.equal(a, b)
    assert raw.training
    assert not frozen.training
    assert not a.requires_grad


def test_a_stream_to_disk_is_equal_and_goes_on_where_it_stopped(
    model: pl.HookedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = zoo.tokens(10, 5)
    want = pl.collect(model, x, "layers")
    calls = []

    class Stop(Exception):
        pass

    own = pl.HookedModel.run_with_cache

    def stop_at_third(self: pl.HookedModel, tokens: torch.Tensor, *args: Any, **kw: Any) -> Any:
        calls.append(len(tokens))
        if len(calls) == 3:
            raise Stop
        return own(self, tokens, *args, **kw)

    out = tmp_path / "acts"
    monkeypatch.setattr(pl.HookedModel, "run_with_cache", stop_at_third)
    with pytest.raises(Stop):
        pl.collect(model, x, "layers", out=out, batch_size=3)
    assert json.loads((out / "collect.json").read_text())["done"] == 6
    acts = pl.collect(model, x, "layers", out=out, batch_size=3)
    assert calls == [3, 3, 3, 3, 1]
    for site in want:
        assert torch.equal(acts[site], want[site])
    with pytest.raises(pl.StoreError, match="other data"):
        pl.collect(model, x.flip(0), "layers", out=out)
    assert torch.equal(
        pl.collect(model, x, "layers", out=out)["blocks.0.hook_resid_pre"], want["blocks.0.hook_resid_pre"]
    )
    (out / "collect.json").write_text("{")
    with pytest.raises(pl.StoreError, match="damaged"):
        pl.collect(model, x, "layers", out=out)


def test_activations_survive_the_disk(model: pl.HookedModel, tmp_path: Path) -> None:
    acts = pl.collect(model, pl.tasks.Parity(bos=True).sample(3, length=4), "layers")
    path = acts.save(tmp_path / "a.safetensors")
    back = pl.Activations.load(path)
    assert back.names == acts.names
    assert all(torch.equal(back[s], acts[s]) for s in acts)
    assert torch.equal(back.mask, acts.mask)
    assert set(acts.to_dataframe()["layer"]) == {-1, 0, 1, 2}
    with pytest.raises(pl.UnknownHookError, match="Collected were"):
        acts["hook_embed"]


@pytest.mark.parametrize("kw", [{"batch_size": 0}, {"batch": torch.zeros(0, 4, dtype=torch.long)}])
def test_nothing_to_collect_is_an_error(model: pl.HookedModel, kw: dict) -> None:
    batch = kw.pop("batch", zoo.tokens())
    with pytest.raises(pl.ProbelensError):
        pl.collect(model, batch, "resid_post", **kw)

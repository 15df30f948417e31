"""Inputs that are no plain tokens: what is collected and probed is what plain torch hooks see."""

from __future__ import annotations

import anything
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import probelens as pl

SITE = "blocks.1.hook_resid_post"


class Tagger(nn.Module):
    """A bidirectional LSTM over tokens and a second stream, packed by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 6), nn.LSTM(10, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor, pitch: Tensor, lengths: Tensor, scale: float = 1.0) -> Tensor:
        x = torch.cat([self.embed(tokens), scale * pitch], -1)
        out, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(pad_packed_sequence(out, batch_first=True)[0])


def two_streams(n: int = 7) -> dict[str, object]:
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (n,), generator=gen)
    lengths[0] = 8
    tokens, pitch = torch.randint(30, (n, 8), generator=gen), torch.randn(n, 8, 4, generator=gen)
    return {"tokens": tokens, "pitch": pitch, "lengths": lengths, "scale": 0.5}


def test_streams_that_are_joined_are_probed_without_the_tokens_of_one() -> None:
    """The activations have other positions than the tokens, which then say nothing of a position's baselines."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.patches = nn.Embedding(20, 8), nn.Conv2d(1, 8, 4, 4)
            self.blocks, self.head = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 2)

        def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
            x = torch.cat([self.words(tokens), self.patches(image).flatten(2).mT], 1)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    module = Joined().eval()
    image = torch.randn(60, 1, 8, 8)
    bright = (image[:, 0, :4, :4].mean((1, 2)) > 0).long()
    image[:, 0, :4, :4] += 3 * (2 * bright[:, None, None] - 1)
    batch = pl.Batch({"tokens": torch.randint(20, (60, 5)), "image": image}, {"bright": bright})
    model = pl.wrap(module, blocks="blocks")
    acts = pl.collect(model, batch, "resid_pre")
    assert acts["resid_pre", 0].shape == (60, 9, 8)
    found = pl.probe(acts, batch.labels, batch.groups)
    row = found.row("blocks.0.hook_resid_pre")
    assert "last_w" not in row
    assert "majority" in row
    # The first patch, after five tokens, holds it, and nothing else does.
    assert found.by_position[f"{row['site']}|bright|0|task"].argmax() == 5
    tokens = pl.collect(model, batch, "words.hook_out")
    assert tokens.tokens is not None
    assert "last_w" in pl.probe(tokens, batch.labels, batch.groups).rows[0]


def test_every_argument_of_the_forward_is_batched_with_the_examples() -> None:
    torch.manual_seed(0)
    module = Tagger().eval()
    model, inputs = pl.wrap(module), two_streams()
    found = pl.collect(model, inputs, SITE, batch_size=3)
    acts, batches = found[SITE], inputs["lengths"].split(3)  # type: ignore[attr-defined]
    longest = torch.cat([part.amax().expand(len(part)) for part in batches])
    assert int(longest.min()) < 8, "a batch shorter than the others"
    assert torch.equal(found.mask, torch.arange(8) < longest[:, None]), "no output is taken for one of zeros"
    for i, length in enumerate(inputs["lengths"].tolist()):  # type: ignore[attr-defined]
        x = torch.cat(
            [module.embed(inputs["tokens"][i : i + 1, :length]), 0.5 * inputs["pitch"][i : i + 1, :length]], -1
        )  # type: ignore[index]
        assert torch.allclose(acts[i, :length], module.rnn(x)[0][0], atol=1e-6)
    with pytest.raises(pl.InputError, match="takes no argument 'pitches'.*tokens, pitch, lengths, scale"):
        pl.collect(model, {**inputs, "pitches": inputs["pitch"]}, SITE)
    with pytest.raises(pl.ShapeError, match="'lengths' has shape"):
        pl.collect(model, {**inputs, "lengths": torch.ones(3)}, SITE)


def test_an_argument_that_a_forward_would_swallow_is_refused() -> None:
    import transformers as tf

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = pl.wrap(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=20, **sizes)).eval())
    x = torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(0))
    assert pl.collect(model, {"input_ids": x, "position_ids": torch.arange(5).expand(3, 5)}, SITE)[SITE].shape == (
        3,
        5,
        16,
    )
    with pytest.raises(pl.InputError, match="takes no argument 'token_type_ids'"):
        pl.collect(model, {"input_ids": x, "token_type_ids": x}, SITE)


class Patches(nn.Module):
    """A tiny vision transformer: a classifier of pictures (example, 1, 8, 8) with a [CLS] position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cls = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        layer = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, **layer) for _ in range(2))  # type: ignore[arg-type]
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def test_positions_of_pictures_are_those_of_the_activations() -> None:
    torch.manual_seed(0)
    module = Patches().eval()
    pictures = torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    kinds = (pictures[:, 0, 0, 0] > 0).long() * 4000 + 7
    model, seen = pl.wrap(module, blocks="layers"), []
    handle = module.layers[1].register_forward_hook(lambda m, a, out: seen.append(out))
    module(pictures)
    handle.remove()
    acts = pl.collect(model, pl.Batch(pictures, {"kind": kinds}), SITE)
    assert torch.allclose(acts[SITE], seen[0], atol=1e-6)
    assert acts.pos.tolist() == [0, 1, 2, 3, 4]
    at_cls = pl.collect(model, pictures, SITE, pos=0)
    assert torch.equal(at_cls[SITE], acts[SITE][:, :1])
    found = pl.probe(at_cls, {"kind": kinds}, n_boot=20)
    assert found.rows[0]["n_test"] == 60, "300 different pictures, one position of each"
    assert found.rows[0]["n_classes"] == 2
    assert found.classes["kind"].tolist() == [7, 4007]
    patch = pl.collect(model, pictures, "blocks.0.hook_resid_pre", pos=[1, 4])
    accuracy = pl.probe(patch, {"kind": kinds}, n_boot=20).by_position["blocks.0.hook_resid_pre|kind|0|task"]
    assert accuracy[0] > 0.75 > 0.65 > accuracy[1], "read in its own patch, not in another"
    with pytest.raises(pl.ShapeError, match="allowed are -5 to 4"):
        pl.collect(model, pictures, SITE, pos=7)


def test_the_last_real_position_and_one_position_for_each_example() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    model, x = pl.wrap(Reader().eval()), torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) < torch.tensor([6, 2, 3, 1, 5])[:, None]
    batch = pl.Batch(x, {"y": torch.arange(5)}, mask)
    whole = pl.collect(model, batch, SITE)[SITE]
    last = pl.collect(model, batch, SITE, pos="last", batch_size=2)
    assert torch.equal(last[SITE][:, 0], whole[torch.arange(5), torch.tensor([5, 1, 2, 0, 4])])
    some = pl.collect(model, batch, SITE, pos=torch.tensor([0, 0, -1, 1, 2]))
    assert torch.equal(some[SITE][:, 0], whole[torch.arange(5), torch.tensor([0, 0, 5, 1, 2])])
    assert some.mask[:, 0].tolist() == [True, True, False, False, True]
    with pytest.raises(pl.ShapeError, match="2 positions for 5 examples"):
        pl.collect(model, batch, SITE, pos=torch.tensor([0, 1]))


def test_labels_of_one_position_of_each_example_are_found_among_all() -> None:
    gen = torch.Generator().manual_seed(0)
    x, at = torch.randn(60, 5, 8, generator=gen), torch.randint(5, (60,), generator=gen)
    y = (x[..., 2] > 0).long()
    rows = torch.arange(60)
    acts = pl.Activations(
        {"site": x[rows, at][:, None]}, pos=at[:, None], tokens=torch.randint(9, (60, 5), generator=gen)
    )
    assert pl.probe(acts, {"y": y}, n_boot=20).accuracy("site") > 0.9
    assert pl.probe(acts, {"y": y[rows, at]}, n_boot=20).accuracy("site") > 0.9
    wrong = y[rows, (at + 1) % 5]
    assert pl.probe(acts, {"y": wrong}, n_boot=20).accuracy("site") < 0.8, "control: labels of another position"


@pytest.mark.parametrize("name", anything.NAMES)
def test_every_point_of_any_model_passes_verify_on_its_own_inputs(name: str) -> None:
    case = anything.case(name)
    report = case.model.verify(case.batch.examples.rows(slice(4)))
    assert report.failures() == [], str(report)
    # Embeddings that are given go around the table of embeddings, and its point says that it isn't reached.
    unreached = [row["name"] for row in report.rows if not row["fired"]]
    assert unreached == (["hook_embed"] if name == "embeddings" else [])
    assert len(report.rows) > 3


def test_embeddings_leave_out_the_module_that_makes_them() -> None:
    case = anything.case("embeddings")
    x = case.batch.inputs["inputs_embeds"][:3]
    for given in (x, {"inputs_embeds": x}):
        _, cache = case.model.run_with_cache(given)
        assert set(case.model.hook_dict) - set(cache) == {"hook_embed"}
        assert case.model.verify(given).ok
        with pytest.raises(pl.HookNotFiredError, match="hook_embed"):
            case.model.run_with_cache(given, "hook_embed")
    _, cache = case.model.run_with_cache(torch.zeros(3, 6, dtype=torch.long))
    assert set(case.model.hook_dict) == set(cache)


class Weighted(torch.nn.Module):
    """A tagger that takes a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = torch.nn.Embedding(9, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.layers[0](self.embed(tokens)) * weights[..., None] * scale


def test_a_forward_that_lacks_an_argument_is_refused_by_name() -> None:
    model, tokens = pl.wrap(Weighted(), blocks="layers", embed="embed"), torch.arange(6).view(2, 3)
    calls = (
        lambda: model(tokens),
        lambda: pl.collect(model, tokens, "resid_post"),
        lambda: model.run_with_cache(tokens),
        model.verify,
    )
    for call in calls:
        with pytest.raises(pl.InputError, match="needs 'weights' as well.*'tokens': ..., 'weights': ..."):
            call()
    both = {"tokens": tokens, "weights": torch.ones(2, 3)}
    assert torch.equal(model(both, scale=2.0), 2 * model.module(**both))

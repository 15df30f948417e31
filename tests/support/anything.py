"""Models whose inputs are no plain tokens or that answer once for each example, each with a batch and what it is scored by."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import probelens as pl


@dataclass(frozen=True)
class Case:
    """A model, a batch, a site and the path of the module whose output it is, and the metric with its label."""

    module: nn.Module
    model: pl.HookedModel
    batch: pl.Batch
    last: str
    metric: Any
    target: str
    label: str
    read: Callable[[Any], Tensor] = lambda out: out
    site: str = "blocks.0.hook_resid_post"


class Regressor(nn.Module):
    """An LSTM over a time series (example, pos, feature) that gives one number."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.second, self.head = (
            nn.LSTM(3, 12, batch_first=True), nn.LSTM(12, 12, batch_first=True), nn.Linear(12, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.rnn(x)[0])[0][:, -1])[:, 0]


class Pictures(nn.Module):
    """A tiny vision transformer over (example, 1, 8, 8), with [CLS] first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cls = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        options: dict[str, Any] = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, **options) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), 1, -1), self.embed(x).flatten(2).mT], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Packed(nn.Module):
    """A tagger over tokens and a second stream, packed by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.rnn, self.second = nn.LSTM(8, 6, batch_first=True, bidirectional=True), nn.LSTM(12, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, pitch: Tensor, lengths: Tensor) -> Tensor:
        x = torch.cat([self.embed(tokens), pitch], -1)
        out, _ = self.second(self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0])
        return self.head(pad_packed_sequence(out, batch_first=True)[0])


class Classifier(nn.Module):
    """An LSTM over tokens whose last state gives one of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.rnn, self.second = nn.LSTM(12, 12, batch_first=True), nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.rnn(self.embed(tokens))[0])[0][:, -1])


def _series(gen: torch.Generator) -> Case:
    x = torch.randn(60, 7, 3, generator=gen)
    run = x[..., 0].cumsum(1)
    labels = {"run": run, "end": run[:, -1], "sign": (run[:, -1] > 0).long()}
    module = Regressor().eval()
    return Case(module, pl.wrap(module), pl.Batch(x, labels), "rnn", "r2", "end", "end")


def _pictures(gen: torch.Generator) -> Case:
    x = torch.randn(60, 1, 8, 8, generator=gen)
    labels = {"kind": torch.randint(3, (60,), generator=gen), "bright": (x[:, 0].mean((1, 2)) > 0).long()}
    module = Pictures().eval()
    return Case(module, pl.wrap(module, blocks="layers"), pl.Batch(x, labels), "layers.0", "accuracy", "kind", "bright")


def _embeddings(gen: torch.Generator) -> Case:
    import transformers as tf

    sizes = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 20,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    module = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)).eval()
    x = torch.randn(60, 6, 16, generator=gen)
    labels = {"next": torch.randint(20, (60, 6), generator=gen), "sign": (x[..., 0] > 0).long()}
    batch = pl.Batch({"inputs_embeds": x}, labels)
    return Case(module, pl.wrap(module), batch, "transformer.h.0", "accuracy", "next", "sign", lambda out: out.logits)


def _packed(gen: torch.Generator) -> Case:
    lengths = torch.randint(3, 9, (60,), generator=gen)
    lengths[40] = 8
    tokens, pitch = torch.randint(20, (60, 8), generator=gen), torch.randn(60, 8, 2, generator=gen)
    labels = {
        "tag": torch.randint(4, (60, 8), generator=gen),
        "high": (pitch[..., 0] > 0).long(),
        "first": tokens[:, 0],
    }
    mask = torch.arange(8) < lengths[:, None]
    module = Packed().eval()
    batch = pl.Batch({"tokens": tokens, "pitch": pitch, "lengths": lengths}, labels, mask)
    return Case(module, pl.wrap(module), batch, "rnn", "accuracy", "tag", "high")


def _classifier(gen: torch.Generator) -> Case:
    x = torch.randint(20, (60, 6), generator=gen)
    labels = {"kind": torch.randint(3, (60,), generator=gen), "token": x % 3, "size": torch.rand(60, generator=gen)}
    module = Classifier().eval()
    return Case(module, pl.wrap(module), pl.Batch(x, labels), "rnn", "accuracy", "kind", "token")


_MAKERS = {
    "series": _series, "pictures": _pictures, "embeddings": _embeddings, "packed": _packed, "classifier": _classifier,
}  # fmt: skip
NAMES = list(_MAKERS)


@functools.cache
def case(name: str) -> Case:
    """One of the cases, made once. A model's own answers are the right ones, so that a change costs something."""
    torch.manual_seed(3)
    made = _MAKERS[name](torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in made.module.parameters():
            p.mul_(3)
        labels, inputs = dict(made.batch.labels), made.batch.examples.rows(slice(None))
        out = made.read(made.module(**inputs) if isinstance(inputs, dict) else made.module(inputs))
    labels[made.target] = out if made.metric == "r2" else out.argmax(-1)
    batch = pl.Batch(made.batch.inputs, labels, made.batch.mask)
    return dataclasses.replace(made, batch=batch)

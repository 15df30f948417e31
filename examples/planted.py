"""Small models whose inner workings are known: a code for each token, a block that writes, a block that reads.

What such a model uses is what its second block reads, so a method that says otherwise is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import probelens as pl

WIDTH, LENGTH, NUISANCE = 16, 12, 1024
NOTHING = torch.zeros(WIDTH, WIDTH)
SITE = "blocks.0.hook_resid_post"


class Write(nn.Module):
    """Add x @ matrix to the residual stream, optionally with a sign for each position."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, alternate: bool = False) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.alternate = alternate

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.matrix
        return out * signs(x.shape[1]).to(x)[:, None] if self.alternate else out


class Writer(nn.Module):
    """The first block: two components that write to the residual stream, as in a Transformer."""

    def __init__(self, mixer: Write, mlp: Write) -> None:
        super().__init__()
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x) + self.mlp(x)


class Reader(nn.Module):
    """The second block: turns what it reads into one score per answer."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


class Planted(nn.Module):
    """A code for each token, a block that writes, a block that reads, and answers."""

    def __init__(self, codes: Tensor, writer: Writer, reader: Reader, n_answers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(codes)
        self.layers = nn.ModuleList([writer, reader])
        self.head = nn.Linear(n_answers, n_answers, bias=False)
        nn.init.eye_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def signs(length: int) -> Tensor:
    """+1 at even positions, −1 at odd ones. (length,)"""
    return 1.0 - 2.0 * (torch.arange(length) % 2)


@dataclasses.dataclass(frozen=True)
class World:
    """A model, sequences to fit on, and others to measure on."""

    model: pl.HookedModel
    fit: pl.Batch
    held: pl.Batch

    def acts(self, batch: pl.Batch) -> Tensor:
        """Activations after the first block. (sequence, pos, d)"""
        return pl.collect(self.model, batch, SITE)[SITE]


def axes() -> Tensor:
    """Orthonormal directions, in rows: no variable lies along a feature. (WIDTH, WIDTH)"""
    gen = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=gen, dtype=torch.float64)).Q.float()


def nuisance(spread: Tensor) -> Tensor:
    """Bounded differences between tokens that carry no variable, with a standard deviation for each axis. (NUISANCE, WIDTH)"""
    gen = torch.Generator().manual_seed(1)
    values = torch.rand(NUISANCE, WIDTH, generator=gen) - 0.5
    return (values - values.mean(0)) * 12**0.5 * spread


def spread(quiet: dict[int, float]) -> Tensor:
    """Standard deviations that fall along the axes, small where the model reads."""
    out = torch.linspace(5.0, 0.5, WIDTH)
    out[list(quiet)] = torch.tensor(list(quiet.values()))
    return out


def world(
    variables: dict[str, dict[int, float]], quiet: dict[int, float], read: Callable[[Tensor], Tensor],
    mixer: Tensor = NOTHING, mlp: Tensor = NOTHING, alternate: bool = False, turn: bool = True, n: int = 1600,
    extra: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda bits: {},
) -> World:  # fmt: skip
    """A world of binary variables, each ±amplitude along some axes. Matrices are given on the axes."""
    basis, names = axes() if turn else torch.eye(WIDTH), list(variables)
    n_tokens = NUISANCE * 2 ** len(names)
    ids = torch.arange(n_tokens)
    bits = {name: (ids >> i) & 1 for i, name in enumerate(names)}
    on_axes = nuisance(spread(quiet))[ids >> len(names)]
    for name, amplitude in variables.items():
        for axis, size in amplitude.items():
            on_axes[:, axis] += size * (2.0 * bits[name] - 1)

    def read_axes(x: Tensor) -> Tensor:
        score = read(x @ basis.T)
        return torch.stack([-score, score], dim=-1)

    writer = Writer(Write(basis.T @ mixer @ basis, alternate), Write(basis.T @ mlp @ basis))
    module = Planted(on_axes @ basis, writer, Reader(read_axes), 2)
    tokens = torch.randint(n_tokens, (n, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = {name: value[tokens] for name, value in bits.items()}
    return _world(module, tokens, labels | extra(labels))


def _world(module: nn.Module, tokens: Tensor, labels: dict[str, Tensor]) -> World:
    model = pl.wrap(module, blocks="layers", embed="embed", unembed="head")
    batch = pl.Batch(tokens, labels)
    return World(model, batch[: len(batch) // 2], batch[len(batch) // 2 :])


def entry(source: int, to: int, size: float = 1.0) -> Tensor:
    """A matrix that adds ``size`` times one axis to another."""
    out = torch.zeros(WIDTH, WIDTH)
    out[source, to] = size
    return out


def unused() -> World:
    """z is in the residual stream, and the second block reads y only."""
    return world({"y": {8: 1.0}, "z": {9: 2.0}}, {8: 0.25, 9: 0.5}, lambda x: x[..., 8])


def twice() -> World:
    """Both components write y, and the second block needs only one of the copies."""
    return world(
        {"y": {8: 1.0}}, {8: 0.25, 10: 0.05, 11: 0.05},
        lambda x: x[..., 10].clamp(-0.5, 0.5) + x[..., 11].clamp(-0.5, 0.5), entry(8, 10), entry(8, 11),
    )  # fmt: skip


def exclusive() -> World:
    """The answer is a xor b; the stream holds a and b, each of which alone says nothing about it."""
    return world(
        {"a": {8: 1.0}, "b": {9: 1.0}}, {8: 0.25, 9: 0.25, 10: 0.05, 11: 0.05}, lambda x: -x[..., 10] * x[..., 11],
        entry(8, 10) + entry(9, 11), extra=lambda bits: {"y": bits["a"] ^ bits["b"]},
    )  # fmt: skip


def flipping() -> World:
    """The first block flips the sign of y with the position, and the second, which knows the position, flips it back."""
    # The second component takes the token's own copy away, so that only the turning one is left.
    return world(
        {"y": {8: 1.0}}, {8: 0.25, 10: 0.05}, lambda x: x[..., 10] * signs(x.shape[1]).to(x),
        entry(8, 10), entry(8, 8, -1.0), alternate=True,
    )  # fmt: skip


def spare() -> World:
    """y has large amplitude along one axis, which is read, and small amplitude along another, which a probe prefers."""
    return world({"y": {8: 4.0, 9: 1.0}}, {8: 0.5, 9: 0.1}, lambda x: x[..., 8], turn=False)


def crowded(n: int = 800, answers: int = 64, width: int = 8, noise: float = 0.3) -> World:
    """One of many answers is read off all axes at once; z is an arbitrary division of the answers into four."""
    gen = torch.Generator().manual_seed(3)
    words = torch.randn(answers, width, generator=gen)
    groups = torch.randperm(answers, generator=gen) % 4
    ids = torch.arange(answers * 8)
    codes = words[ids % answers] + noise * (torch.rand(8, width, generator=gen) - 0.5)[ids // answers]

    def nearest(x: Tensor) -> Tensor:
        return -torch.cdist(x, words.to(x)).square()

    zero = torch.zeros(width, width)
    module = Planted(codes, Writer(Write(zero), Write(zero)), Reader(nearest), answers)
    tokens = torch.randint(len(ids), (n, LENGTH), generator=gen)
    answer = tokens % answers
    return _world(module, tokens, {"y": answer, "z": groups[answer]})

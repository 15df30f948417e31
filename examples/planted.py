"""Small models whose inner workings are known: a code for each token, a block that writes, a block that reads.

What such a model uses is what its second block reads, so a method that says otherwise is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import probelens as pl

WIDTH, LENGTH, NUISANCE = 16, 12, 1024
NOTHING = torch.zeros(WIDTH, WIDTH)
SITE = "blocks.0.hook_resid_post"
POST, NEURONS = "blocks.0.mlp.hook_post", 64


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

    def pairs(self, other: Callable[[Tensor], Tensor]) -> pl.PatchPairs:
        """Held-out sequences and the same with another last token, where both are read. ``other`` makes the token."""
        clean, corrupted = self.held.tokens, self.held.tokens.clone()
        corrupted[:, -1] = other(clean[:, -1])
        model = self.model.module
        assert model is not None
        with torch.no_grad():
            answers = torch.stack([model(t)[:, -1].argmax(-1) for t in (clean, corrupted)], dim=1)
        last = torch.full((len(clean),), clean.shape[1] - 1)
        kept = answers[:, 0] != answers[:, 1]
        return pl.PatchPairs(clean[kept], corrupted[kept], last[kept], last[kept], answers[kept])


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


def correlated(agree: float = 0.8, n: int = 3200) -> World:
    """As ``unused``, but z equals y at a share ``agree`` of all positions."""
    made = unused()
    gen = torch.Generator().manual_seed(5)
    y = torch.randint(2, (n, LENGTH), generator=gen)
    z = torch.where(torch.rand(y.shape, generator=gen) < agree, y, 1 - y)
    tokens = torch.randint(NUISANCE, y.shape, generator=gen) << 2 | z << 1 | y
    batch = pl.Batch(tokens, {"y": y, "z": z})
    return World(made.model, batch[: n // 2], batch[n // 2 :])


def spare() -> World:
    """y has large amplitude along one axis, which is read, and hardly any along another, which a probe prefers."""
    return world({"y": {8: 4.0, 9: 0.05}}, {8: 0.5, 9: 0.001}, lambda x: x[..., 8], turn=False)


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


class Recall(nn.Module):
    """An LSTM that keeps one bit of its first token, shows nothing of it, and answers it at the last token.

    Tokens are ``4 * nuisance + 2 * kind + bit``: of kind 0 at every step but the last, which is of kind 1 and asks. The
    output gate of the first unit is shut until then, and its input gate but for the first token, which a unit that
    counts the steps tells apart.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(4)
        self.embed = nn.Embedding.from_pretrained(_recall_codes(width, gen))
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2, bias=False)
        for weight in self.lstm.parameters():
            nn.init.zeros_(weight)
        nn.init.zeros_(self.head.weight)
        shut = 200.0  # the sigmoid of −200 is 0 in single precision: nothing leaks out
        with torch.no_grad():
            into, back, bias = (self.lstm.get_parameter(f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih"))
            gates = {name: range(i * width, (i + 1) * width) for i, name in enumerate("ifgo")}
            # Unit 0 keeps the bit, unit 1 says that a step has passed, the others hold the tokens' other differences.
            into[gates["g"][0], 0] = 3.0
            bias[gates["i"][0]], back[gates["i"][0], 1] = shut, -4 * shut
            bias[gates["f"][0]] = shut
            bias[gates["o"][0]], into[gates["o"][0], 1] = -shut, 2 * shut
            bias[gates["i"][1]] = bias[gates["g"][1]] = bias[gates["o"][1]] = shut
            for unit in range(2, width):
                bias[gates["i"][unit]] = bias[gates["o"][unit]] = shut
                into[gates["g"][unit], unit] = 1.0
            self.head.weight[:, 0] = torch.tensor([-1.0, 1.0])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def _recall_codes(width: int, gen: torch.Generator) -> Tensor:
    ids = torch.arange(4 * 64)
    codes = torch.randn(64, width, generator=gen)[ids // 4]
    codes[:, 0], codes[:, 1] = 2.0 * (ids % 2) - 1, (ids // 2 % 2).float()
    return codes


def held_back(n: int = 600) -> tuple[World, pl.PatchPairs]:
    """A bit of the first token that only the cell state holds until the last token asks for it; and pairs that differ in it."""
    gen = torch.Generator().manual_seed(6)
    bits = torch.randint(2, (n, LENGTH), generator=gen)
    kind = torch.zeros(n, LENGTH, dtype=torch.long)
    kind[:, -1] = 1
    tokens = torch.randint(64, bits.shape, generator=gen) * 4 + 2 * kind + bits
    model = pl.wrap(Recall())
    first = bits[:, :1]
    batch = pl.Batch(tokens, {"y": first.expand(-1, LENGTH).contiguous()}, groups=torch.arange(n))
    other = tokens.clone()
    other[:, 0] ^= 1
    pairs = pl.PatchPairs(
        clean=tokens, corrupted=other, edit_pos=torch.zeros(n, dtype=torch.long), read_pos=torch.full((n,), LENGTH - 1),
        answers=torch.cat([first, 1 - first], dim=1),
    )  # fmt: skip
    return World(model, batch[: n // 2], batch[n // 2 :]), pairs


def illusory() -> tuple[pl.HookedModel, pl.PatchPairs]:
    """A GPT-2 that answers with a token's bit through neuron 0; neuron 1 copies it and is not read, 2 is dormant."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8, n_embd=WIDTH, n_inner=NEURONS, n_layer=1, n_head=2, n_positions=8, activation_function="linear",
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module: Any = transformers.GPT2LMHeadModel(config).eval()
    body = module.transformer
    with torch.no_grad():
        for weight in (body.wpe.weight, body.h[0].attn.c_proj.weight, module.lm_head.weight):
            weight.zero_()
        for layer in (body.h[0].mlp.c_fc, body.h[0].mlp.c_proj):
            layer.weight.normal_(0, 0.5)
            layer.bias.zero_()
        wte, up, down = body.wte.weight, body.h[0].mlp.c_fc.weight, body.h[0].mlp.c_proj.weight
        wte.normal_()
        for rows in (wte, down):  # the rest of the stream: its mean is 0, as a norm would spread it
            rows[:, :6] = 0
            rows[:, 6:] -= rows[:, 6:].mean(1, keepdim=True)
        wte[:, 0] = 2.0 * (torch.arange(8) % 2) - 1  # the bit
        wte[:, 1] = -wte[:, 0]
        up[:2], up[:, :3], down[:3] = 0, 0, 0
        up[0, :2] = 1.0  # neurons 0 and 1 hold the bit
        down[0, 2], down[0, 3] = 1.0, -1.0  # neuron 0 is read, and so is neuron 2, which is always 0
        down[2, 4], down[2, 5] = 4.0, -4.0
        head = module.lm_head.weight
        head[0, 2] = head[0, 4] = -1.0
        head[1, 2] = head[1, 4] = 1.0
    clean = torch.randint(8, (150, 3), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[:, -1] ^= 1
    at = torch.full((150,), 2)
    return pl.wrap(module), pl.PatchPairs(
        clean, corrupted, at, at, torch.stack([clean[:, -1] % 2, corrupted[:, -1] % 2], 1)
    )

"""The character LSTM of ``textgenrnn`` 2.0.0, trained by its author on Reddit titles, rebuilt in torch.

Its weights are those of a Keras 2.1.5 model with ``CuDNNLSTM`` layers. CuDNN's layout differs from a Keras
LSTM's: the gates stand in the order i, f, c, o (torch's i, f, g, o); each gate's input block is a (hidden,
input) matrix whose numbers are merely *stored* under the shape (input, hidden); each gate's recurrent block
is already (hidden, hidden) as torch wants it; and there are two biases, input and recurrent. So converting
copies numbers and computes nothing.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Mapping

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from real_models import fetch

HIDDEN = 128
WINDOW = 40  # the network predicts from the last 40 characters
PAD = 0  # fills the window before a title starts; characters out of the vocabulary get it too
START = "<s>"  # stands before and after a title

FREQUENT = """
    the of and a to in is it that for was on are with as his they be at this have from or had by not what all
    were when we there can an your which their said if do will each about how up out them then she many some
    so these would other into has more her two like him see time could no make than first been its who now
    people my made over did down only way find use may water long little very after words called just where
    most know
"""


class WindowAttention(nn.Module):
    """Average of the last 40 positions, weighted by the softmax of one score per position.

    The Keras layer sees one window and gives one vector; this one gives every position the vector of the
    window that ends there.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, pos, width) -> (batch, pos, width)"""
        step = torch.arange(x.shape[1], device=x.device)
        age = step[:, None] - step
        scores = self.score(x).transpose(1, 2).masked_fill((age < 0) | (age >= WINDOW), -torch.inf)
        return scores.softmax(-1) @ x


class TextLSTM(nn.Module):
    """Embedding, two LSTM layers, attention over the three concatenated, softmax layer.

    Args:
        vocab: Character ids, 1 to the number of characters.
    """

    def __init__(self, vocab: Mapping[str, int]) -> None:
        super().__init__()
        self.vocab = dict(vocab)
        self.characters = {i: c for c, i in self.vocab.items()}
        self.embedding = nn.Embedding(len(vocab) + 1, 100)
        self.rnns = nn.ModuleList([nn.LSTM(100, HIDDEN, batch_first=True), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)])
        self.attention = WindowAttention(100 + 2 * HIDDEN)
        self.head = nn.Linear(100 + 2 * HIDDEN, len(vocab) + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at every position. (batch, pos) -> (batch, pos, d_vocab)

        The network was trained on 40 characters at a time, from a state of zero, to predict one. So those at
        position 39 of a window of 40 are its predictions. The others stand for windows shorter than any it
        has seen.
        """
        levels = [self.embedding(tokens)]
        for rnn in self.rnns:
            levels.append(rnn(levels[-1])[0])
        return self.head(self.attention(torch.cat(levels, -1)))

    def encode(self, text: str) -> list[int]:
        """Ids of the characters."""
        return [self.vocab.get(c, PAD) for c in text]

    def windows(self, texts: Iterable[str]) -> tuple[Tensor, Tensor]:
        """What the network reads before each character of the texts, and that character.

        Returns:
            Windows that end just before it, filled up in front with pads (n, 40); the character (n,).
        """
        rows, targets = [], []
        for text in texts:
            ids = [PAD] * (WINDOW - 1) + [self.vocab[START], *self.encode(text)]
            rows += [ids[end - WINDOW : end] for end in range(WINDOW, len(ids))]
            targets += ids[WINDOW:]
        return torch.tensor(rows), torch.tensor(targets)

    @torch.no_grad()
    def loss(self, texts: Iterable[str]) -> float:
        """Mean cross-entropy of the texts' characters, in nats per character."""
        rows, targets = self.windows(texts)
        return float(nn.functional.cross_entropy(self(rows)[:, -1], targets))

    @torch.no_grad()
    def generate(self, temperature: float, seed: int, longest: int = 100) -> str:
        """A title, sampled as the package does it: from the softmax of the last 40 characters' logits."""
        generator = torch.Generator().manual_seed(seed)
        ids = [PAD] * (WINDOW - 1) + [self.vocab[START]]
        for _ in range(longest):
            p = torch.softmax(self(torch.tensor([ids[-WINDOW:]]))[0, -1] / temperature, -1)
            p[PAD] = 0.0
            ids.append(int(torch.multinomial(p, 1, generator=generator)))
            if ids[-1] == self.vocab[START]:
                break
        return "".join(self.characters[i] for i in ids[WINDOW:] if i != self.vocab[START])


def load(gates: str = "ifco", stored_as: str = "cudnn") -> TextLSTM:
    """The trained network.

    Args:
        gates: Order in which the four gates are taken to be stored. Another than the default builds a
            broken network.
        stored_as: "cudnn", or "keras" to read the gates as a Keras LSTM would store them, which is wrong
            here.
    """
    weights = read_weights()
    model = TextLSTM(json.loads(fetch.read(fetch.TEXTGENRNN, "textgenrnn_vocab.json").decode("utf-8")))
    state = {
        "embedding.weight": weights["embedding/embeddings"],
        "attention.score.weight": weights["attention/attention_W"].T,
        "head.weight": weights["output/kernel"].T,
        "head.bias": weights["output/bias"],
    }
    order = [gates.index(gate) for gate in "ifco"]
    for layer, name in enumerate(("rnn_1", "rnn_2")):
        kernel, recurrent, bias = (weights[f"{name}/{part}"] for part in ("kernel", "recurrent_kernel", "bias"))
        blocks = np.hsplit(kernel, 4), np.hsplit(recurrent, 4), bias.reshape(2, 4, HIDDEN)
        if stored_as == "cudnn":
            w_ih = [block.reshape(HIDDEN, -1) for block in blocks[0]]
            w_hh = blocks[1]
        else:
            w_ih, w_hh = [block.T for block in blocks[0]], [block.T for block in blocks[1]]
        state[f"rnns.{layer}.weight_ih_l0"] = np.concatenate([w_ih[g] for g in order])
        state[f"rnns.{layer}.weight_hh_l0"] = np.concatenate([w_hh[g] for g in order])
        state[f"rnns.{layer}.bias_ih_l0"] = blocks[2][0, order].reshape(-1)
        state[f"rnns.{layer}.bias_hh_l0"] = blocks[2][1, order].reshape(-1)
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.eval()


def bracketed(vocab: Mapping[str, int], n: int, marks: str, seed: int) -> tuple[Tensor, Tensor]:
    """Windows of frequent words in random order, some of them in brackets; and whether a character is inside.

    The words are drawn without regard to the brackets, so only a network that keeps the bracket in mind can
    tell one word from another. The window is full: the start token and 39 characters, as the network knows
    it.

    Args:
        vocab: Character ids.
        n: Number of windows.
        marks: The opening and the closing bracket; a quotation mark twice for a quotation.
        seed: Of the choice of words and places.

    Returns:
        Tokens (n, 40); and 1 from the opening bracket up to before the closing one, else 0. (n, 40)
    """
    draw, words = random.Random(seed), FREQUENT.split()
    tokens, inside = [], []
    for _ in range(n):
        title = [draw.choice(words) for _ in range(WINDOW)]
        first = draw.randint(1, 6)
        last = first + draw.randint(0, 5)
        title[0] = title[0].capitalize()
        title[first] = marks[0] + title[first]
        title[last] = title[last] + marks[1]
        text = " ".join(title)
        opening = text.index(marks[0])
        closing = text.index(marks[1], opening + 1)
        tokens.append([vocab[START], *(vocab[c] for c in text[: WINDOW - 1])])
        inside.append([0, *(int(opening <= i < closing) for i in range(WINDOW - 1))])
    return torch.tensor(tokens), torch.tensor(inside)


def untrained(vocab: Mapping[str, int], seed: int) -> TextLSTM:
    """The same network with torch's own initial weights. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TextLSTM(vocab).eval()


def read_weights() -> dict[str, np.ndarray]:
    """The arrays of the HDF5 file, under ``layer/weight``."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(io.BytesIO(fetch.read(fetch.TEXTGENRNN, "textgenrnn_weights.hdf5")), "r") as file:
        for layer in file:
            for name in file[layer].attrs["weight_names"]:
                # Names read b"rnn_1/kernel:0"; the group of the layer holds them once more.
                path = name.decode() if isinstance(name, bytes) else str(name)
                found[path.removesuffix(":0")] = np.asarray(file[layer][path])
    return found

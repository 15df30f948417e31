"""The spelling-to-sound network of ``g2p-en`` 2.1.0: a GRU reads a word's letters, another says its phonemes.

The package runs it in numpy. Its gates stand in torch's order r, z, n and its candidate is
tanh(W x + b + r * (U h + c)), torch's own formula with both biases, so the arrays go into torch modules as
they are. ``numpy_reference`` runs the package's own forward, from its own source file, for comparison.
"""

from __future__ import annotations

import ast
import io
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from real_models import fetch

PAD, UNKNOWN, END = 0, 1, 2
LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
START, STOP = 2, 3  # ids of <s> and </s> among the phonemes
LONGEST = 20  # the package says at most this many phonemes


class G2P(nn.Module):
    """Letters in, the logits of greedily decoded phonemes out.

    Args:
        phonemes: Their names, by id.
    """

    def __init__(self, phonemes: Iterable[str]) -> None:
        super().__init__()
        self.phonemes = tuple(phonemes)
        self.embedding = nn.Embedding(len(LETTERS), 256)
        self.encoder = nn.GRU(256, 256, batch_first=True)
        self.decoder_embedding = nn.Embedding(len(self.phonemes), 256)
        self.decoder = nn.GRUCell(256, 256)
        self.head = nn.Linear(256, len(self.phonemes))

    def forward(self, letters: Tensor) -> Tensor:
        """(batch, pos) -> (batch, 20, d_phonemes). What follows a decoded </s> means nothing."""
        states, _ = self.encoder(self.embedding(letters))
        end = (letters == END).int().argmax(1)
        return self.decode(states[torch.arange(len(letters)), end])

    def decode(self, state: Tensor) -> Tensor:
        """Greedy decoding from the encoder's last state. (batch, 256) -> (batch, 20, d_phonemes)"""
        said = torch.full((len(state),), START, device=state.device)
        steps = []
        for _ in range(LONGEST):
            state = self.decoder(self.decoder_embedding(said), state)
            steps.append(self.head(state))
            said = steps[-1].argmax(-1)
        return torch.stack(steps, 1)

    def encode(self, words: Iterable[str]) -> Tensor:
        """Letter ids, </s>, then pads. (batch, pos)"""
        ids = [[*(LETTERS.index(c) if c in LETTERS else UNKNOWN for c in word), END] for word in words]
        longest = max(map(len, ids))
        return torch.tensor([one + [PAD] * (longest - len(one)) for one in ids])

    def read(self, logits: Tensor) -> list[str]:
        """The phonemes in the logits, one string a word, such as "B AE1 T"."""
        words = []
        for row in logits.argmax(-1).tolist():
            row = row[: row.index(STOP)] if STOP in row else row
            words.append(" ".join(self.phonemes[i] for i in row))
        return words

    @torch.no_grad()
    def say(self, words: Iterable[str]) -> list[str]:
        """The phonemes of words."""
        return self.read(self(self.encode(words)))


def load() -> G2P:
    """The trained network."""
    array = read_weights()
    model = G2P(_phonemes())
    state = {
        "embedding.weight": array["enc_emb"],
        "decoder_embedding.weight": array["dec_emb"],
        "head.weight": array["fc_w"],
        "head.bias": array["fc_b"],
    }
    for ours, theirs, suffix in (("encoder", "enc", "_l0"), ("decoder", "dec", "")):
        for part in ("w_ih", "w_hh", "b_ih", "b_hh"):
            name = part.replace("w_", "weight_").replace("b_", "bias_")
            state[f"{ours}.{name}{suffix}"] = array[f"{theirs}_{part}"]
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.eval()


def read_weights() -> dict[str, np.ndarray]:
    """The arrays of the package's checkpoint."""
    with np.load(io.BytesIO(fetch.read(fetch.G2P_EN, "checkpoint20.npz"))) as file:
        return {name: file[name] for name in file.files}


def numpy_reference(folder: Path) -> Any:
    """The package's own ``G2p`` object, able to ``predict(word)`` and nothing else.

    Its module imports nltk and asks for corpora, which predicting a word doesn't need. So only the class is
    run, without those lines of ``__init__`` that load a dictionary and a tagger.

    Args:
        folder: An empty folder, to lay the checkpoint into.
    """
    fetch.extract(fetch.G2P_EN, "checkpoint20.npz", folder / "checkpoint20.npz")
    class_def = _class_def()
    for part in class_def.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            part.body = [line for line in part.body if not _needs_nltk(ast.unparse(line))]
    return _run(class_def, str(folder))["G2p"]()


def _needs_nltk(line: str) -> bool:
    return "cmudict" in line or "homograph" in line


def _phonemes() -> list[str]:
    for part in ast.walk(_class_def()):
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "self.phonemes":
            return list(eval(compile(ast.Expression(part.value), "g2p.py", "eval"), {"__builtins__": {}}))
    raise AssertionError("g2p.py defines no self.phonemes")


def _class_def() -> ast.ClassDef:
    text = fetch.read(fetch.G2P_EN, "g2p_en/g2p.py").decode("utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an escape sequence in it that newer Pythons dislike
        warnings.simplefilter("ignore", DeprecationWarning)
        source = ast.parse(text)
    return next(part for part in source.body if isinstance(part, ast.ClassDef) and part.name == "G2p")


def _run(class_def: ast.ClassDef, folder: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"np": np, "os": os, "dirname": folder}
    exec(compile(ast.Module([class_def], []), "g2p.py", "exec"), scope)
    return scope

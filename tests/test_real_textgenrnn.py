"""The character LSTM of textgenrnn: its conversion, and whether it knows that it is inside brackets."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from real_models import fetch, textgenrnn

pytestmark = pytest.mark.network

TITLES = (
    "What is the best way to learn a new language?",
    "TIL that the first person to walk on the moon was born in Ohio",
    "My girlfriend asked me to post this picture of her dog",
    "The president said that he would not attend the meeting on Monday",
    "[Serious] People of Reddit, what is something that you will never forget?",
    "I just finished watching the new Star Wars movie and it was awesome",
    "Scientists discover a new species of fish in the deep ocean",
    "How do I get my friends to play this game with me?",
)


@pytest.fixture(scope="module")
def module() -> textgenrnn.TextLSTM:
    return fetch.or_skip(textgenrnn.load).requires_grad_(False)


# -- the conversion ----------------------------------------------------------------------------------


def test_it_is_the_keras_network_computed_in_numpy(module: textgenrnn.TextLSTM) -> None:
    weights = {name: value.astype(np.float64) for name, value in textgenrnn.read_weights().items()}

    def lstm(x: np.ndarray, name: str) -> np.ndarray:
        # Keras' own rule for loading CuDNNLSTM weights into an LSTM layer, then that layer's equations.
        kernel = np.hstack([k.T.reshape(k.shape, order="F") for k in np.hsplit(weights[f"{name}/kernel"], 4)])
        recurrent = np.hstack([k.T for k in np.hsplit(weights[f"{name}/recurrent_kernel"], 4)])
        bias = sum(np.split(weights[f"{name}/bias"], 2))
        h = c = np.zeros((len(x), 128))
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = np.hsplit(x[:, t] @ kernel + h @ recurrent + bias, 4)
            c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
            h = _sigmoid(o) * np.tanh(c)
            states.append(h)
        return np.stack(states, 1)

    windows, _ = module.windows(TITLES[:2])
    embedded = weights["embedding/embeddings"][windows.numpy()]
    first = lstm(embedded, "rnn_1")
    joined = np.concatenate([embedded, first, lstm(first, "rnn_2")], -1)
    scores = joined @ weights["attention/attention_W"]
    attention = np.exp(scores - scores.max(1, keepdims=True))
    averaged = (joined * attention / attention.sum(1, keepdims=True)).sum(1)
    logits = averaged @ weights["output/kernel"] + weights["output/bias"]
    np.testing.assert_allclose(module(windows)[:, -1].numpy(), logits, atol=5e-4, rtol=1e-5)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_it_predicts_titles_far_better_than_character_frequencies(module: textgenrnn.TextLSTM) -> None:
    counts = Counter("".join(TITLES))
    total = sum(counts.values())
    unigram = -sum(n / total * math.log(n / total) for n in counts.values())  # fitted on the very text
    loss = module.loss(TITLES)
    assert loss < 1.1  # 0.95 nats a character
    assert loss < unigram - 1.5  # 2.95
    assert module.loss(title[::-1] for title in TITLES) > 4  # 5.21: it is order that it knows


def test_every_other_order_of_the_gates_predicts_worse_than_chance(module: textgenrnn.TextLSTM) -> None:
    orders = ["".join(order) for order in itertools.permutations("ifco") if order != tuple("ifco")]
    losses = {order: textgenrnn.load(order).loss(TITLES[:3]) for order in orders}
    assert len(losses) == 23
    assert min(losses.values()) > 5.5  # 6.1 for the best of them on all titles, 0.95 for the right one
    assert textgenrnn.load(stored_as="keras").loss(TITLES[:3]) > 20  # 47.5


def test_it_writes_english(module: textgenrnn.TextLSTM) -> None:
    titles = [module.generate(0.35, seed, longest=60) for seed in range(8)]
    assert _frequent(titles) > 0.35  # 0.5
    rng = np.random.default_rng(0)
    assert _frequent(["".join(rng.permutation(list(title))) for title in titles]) < 0.1


def _frequent(titles: list[str]) -> float:
    """Share of the words that are among the hundred most frequent ones of English."""
    frequent = set(textgenrnn.FREQUENT.split())
    words = [word for title in titles for word in re.findall("[a-z]+", title.lower())]
    return sum(word in frequent for word in words) / len(words)

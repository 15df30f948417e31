"""The character LSTM of textgenrnn: its conversion, and whether it knows that it is inside brackets."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor

import probelens as pl
from probelens.probing.splits import split_by_group
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


# -- what it remembers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(module: textgenrnn.TextLSTM) -> pl.HookedModel:
    return pl.wrap(module)


@pytest.fixture(scope="module")
def open_brackets(module: textgenrnn.TextLSTM) -> pl.PatchPairs:
    """Windows that end inside "(", and the same inside "["; asked for what closes it."""
    tokens, inside = textgenrnn.bracketed(module.vocab, 400, "()", seed=1)
    clean = tokens[inside[:, -1] == 1]
    is_open = clean == module.vocab["("]
    closing = [module.vocab[")"], module.vocab["]"]]
    return pl.PatchPairs(
        clean=clean,
        corrupted=clean.masked_fill(is_open, module.vocab["["]),
        edit_pos=is_open.int().argmax(1),
        read_pos=torch.full((len(clean),), textgenrnn.WINDOW - 1),
        answers=torch.tensor([closing] * len(clean)),
    )


def test_wrapped_logits_are_the_modules_own_bit_for_bit(model: pl.HookedModel, module: textgenrnn.TextLSTM) -> None:
    windows, _ = module.windows(TITLES[:2])
    assert torch.equal(model(windows), module(windows))


def test_every_layers_output_and_state_is_read_as_the_module_computes_it(
    model: pl.HookedModel, module: textgenrnn.TextLSTM
) -> None:
    windows, _ = module.windows(TITLES[:1])
    logits, cache = model.run_with_cache(windows)
    torch.testing.assert_close(logits, module(windows), atol=1e-4, rtol=0)
    level = module.embedding(windows)
    for layer, rnn in enumerate(module.rnns):
        torch.testing.assert_close(cache["resid_pre", layer], level, atol=1e-5, rtol=0)
        level, (h, c) = rnn(level)
        torch.testing.assert_close(cache["resid_post", layer], level, atol=1e-5, rtol=0)
        torch.testing.assert_close(cache[f"blocks.{layer}.rnn.hook_h"][:, -1], h[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(cache[f"blocks.{layer}.rnn.hook_c"][:, -1], c[0], atol=1e-4, rtol=0)


def test_it_closes_the_bracket_that_is_open(model: pl.HookedModel, module: textgenrnn.TextLSTM) -> None:
    tokens, inside = textgenrnn.bracketed(module.vocab, 400, "()", seed=1)
    closes = model(tokens)[:, -1].softmax(-1)[:, module.vocab[")"]]
    ends_inside = inside[:, -1] == 1
    assert closes[ends_inside].mean() > 0.02  # 0.036: one character in 28
    assert closes[~ends_inside].mean() < 0.0005  # 0.00004


def test_the_open_bracket_is_kept_in_the_first_layers_cell_and_shown_only_when_it_is_used(
    model: pl.HookedModel, open_brackets: pl.PatchPairs
) -> None:
    last = textgenrnn.WINDOW - 1
    before = last - 3  # where every bracket is open already
    assert int(open_brackets.edit_pos.max()) < before
    sites = [f"blocks.{layer}.rnn.hook_{state}" for layer in (0, 1) for state in "ch"]
    result = pl.patch(model, open_brackets, sites=sites, pos=[before, last])
    assert int(result.correct.sum()) > 40  # of about 100: it tells "(" from "[" by what it closes
    recovery = {site: row.tolist() for site, row in zip(result.sites, result.recovery(), strict=True)}
    assert recovery["blocks.0.rnn.hook_c"][0] > 0.95  # 0.99
    assert abs(recovery["blocks.0.rnn.hook_h"][0]) < 0.25  # 0.08: the output gate hides it
    assert recovery["blocks.0.rnn.hook_h"][1] > 0.85  # 0.93
    for state in "ch":
        assert max(map(abs, recovery[f"blocks.1.rnn.hook_{state}"])) < 0.15  # 0.05: the second layer has no part


def test_an_edit_of_the_cell_reaches_the_steps_after_it_and_an_edit_of_the_output_does_not(
    model: pl.HookedModel, open_brackets: pl.PatchPairs
) -> None:
    tokens = open_brackets.corrupted[:4]
    _, source = model.run_with_cache(open_brackets.clean[:4], ["blocks.0.rnn.hook_c", "blocks.0.hook_resid_post"])
    _, before = model.run_with_cache(tokens, "blocks.0.hook_resid_post")

    def output_after(name: str) -> Tensor:
        put = pl.at(36, lambda value, hook: source[name][:, hook.pos])
        with model.hooks([(name, put)]):
            return model.run_with_cache(tokens, "blocks.0.hook_resid_post")[1]["blocks.0.hook_resid_post"]

    original = before["blocks.0.hook_resid_post"]
    by_cell, by_output = (output_after(f"blocks.0.{name}") for name in ("rnn.hook_c", "hook_resid_post"))
    assert torch.equal(by_output[:, 37:], original[:, 37:])
    assert (by_cell[:, 37:] - original[:, 37:]).abs().amax((1, 2)).min() > 0.1
    for edited in (by_cell, by_output):
        torch.testing.assert_close(edited[:, :36], original[:, :36], atol=1e-5, rtol=0)


# -- what can be read, and what is used --------------------------------------------------------------

LAYER_0 = "blocks.0.hook_resid_post"
SITES = ["hook_embed", LAYER_0, "blocks.1.hook_resid_post"]


def titles(module: textgenrnn.TextLSTM, marks: str, n: int, seed: int) -> pl.Batch:
    tokens, inside = textgenrnn.bracketed(module.vocab, n, marks, seed)
    return pl.Batch(tokens, {"inside": inside})


def score(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor) -> float:
    """Balanced accuracy, on other titles, of a linear probe."""
    probe = pl.LinearProbe(standardize=True, class_weight="balanced")
    probe.fit(train_x.flatten(0, 1), train_y.flatten())
    return float(balanced_accuracy_score(test_y.flatten(), probe.predict(test_x.flatten(0, 1))))


@pytest.mark.parametrize(("marks", "at_least"), [("()", 0.98), ('""', 0.95)], ids=["brackets", "quotation"])
def test_layer_0_knows_whether_it_is_inside_far_above_the_baselines(
    module: textgenrnn.TextLSTM, model: pl.HookedModel, marks: str, at_least: float
) -> None:
    batch = titles(module, marks, 400, seed=0)
    acts = pl.collect(model, batch, SITES)
    random = pl.collect(pl.wrap(textgenrnn.untrained(module.vocab, 0)), batch, SITES)
    result = pl.probe(acts, batch.labels, batch.groups, untrained=random, control_task=True, mdl=True, w=8)
    row = result.row(LAYER_0)
    assert row["balanced_accuracy"] > at_least  # 0.997 and 0.983
    assert row["accuracy"] > row["majority"] + 0.25  # 0.64
    assert row["accuracy"] > row["position"] + 0.2  # 0.67
    assert row["accuracy"] > row["last_w"] + 0.15  # 0.72
    assert result.row("hook_embed")["balanced_accuracy"] < 0.65  # not in the character itself
    # A random network still echoes the last few characters: 0.75 here, 0.81 one layer up.
    for site in SITES:
        assert row["balanced_accuracy"] > result.row(site, control="untrained")["balanced_accuracy"] + 0.15
    # 0.173 and 0.178: the control labels tell about 256 short contexts apart, most of which the layer holds.
    assert row["selectivity"] > 0.12
    assert row["compression"] > 4  # 72 and 7.7


def test_the_labels_of_other_titles_can_not_be_read(module: textgenrnn.TextLSTM, model: pl.HookedModel) -> None:
    # The control of the test above: labels with the same dependence on position, that aren't this title's.
    train, test = titles(module, "()", 300, seed=0), titles(module, "()", 150, seed=2)
    x, y = pl.collect(model, train, LAYER_0)[LAYER_0], pl.collect(model, test, LAYER_0)[LAYER_0]
    rolled = train.labels["inside"].roll(1, 0), test.labels["inside"].roll(1, 0)
    assert score(x, rolled[0], y, rolled[1]) < 0.7


def test_taking_the_direction_out_of_layer_0_takes_the_closing_bracket_with_it(
    module: textgenrnn.TextLSTM, model: pl.HookedModel
) -> None:
    train, test = titles(module, "()", 300, seed=0), titles(module, "()", 150, seed=2)
    inside = train.labels["inside"], test.labels["inside"]
    x, y = pl.collect(model, train, LAYER_0)[LAYER_0], pl.collect(model, test, LAYER_0)[LAYER_0]
    mean = x.flatten(0, 1).mean(0)
    probe = pl.LinearProbe(standardize=True).fit(x.flatten(0, 1), inside[0].flatten())

    def gap(subspace: pl.Subspace | None) -> float:
        """How much likelier the closing bracket is inside than outside, in nats."""
        hooks = [] if subspace is None else [(LAYER_0, pl.edits.project(subspace))]
        logits = model.run_with_hooks(test.tokens, hooks)
        closing = logits[:, -1].log_softmax(-1)[:, module.vocab[")"]]
        ends_inside = inside[1][:, -1] == 1
        return float(closing[ends_inside].mean() - closing[~ends_inside].mean())

    def refitted(subspace: pl.Subspace) -> float:
        return score(subspace.project_out(x), inside[0], subspace.project_out(y), inside[1])

    rows = pl.subspaces.from_probe(probe, mean)
    means = pl.subspaces.mean_difference(x, inside[0])
    clean = gap(None)
    assert clean > 6  # 6.7
    for seed in range(5):
        assert gap(pl.subspaces.random(1, 128, seed=seed, mean=mean)) > 0.9 * clean
    # Used: without the probe's direction most of it is gone, although another probe still reads the label.
    assert gap(rows) < 0.3 * clean  # 1.0
    assert refitted(rows) > 0.95  # 0.994
    # Without the difference of the class means no linear probe reads it, and the behaviour goes too.
    assert gap(means) < 0.4 * clean  # 1.7
    assert refitted(means) == pytest.approx(0.5, abs=0.05)
    # The second layer's output is read by the same readout and matters little.
    second = "blocks.1.hook_resid_post"
    above = pl.subspaces.mean_difference(pl.collect(model, train, second)[second], inside[0])
    with model.hooks([(second, pl.edits.project(above))]):
        assert gap(None) > 0.8 * clean


def test_ablate_agrees_with_hooks_set_by_hand_and_finds_it_needed_though_a_refit_recovers(
    module: textgenrnn.TextLSTM, model: pl.HookedModel
) -> None:
    train, test = titles(module, "()", 300, seed=0), titles(module, "()", 400, seed=3)
    ends_inside = test.labels["inside"][:, -1] == 1
    half = int(ends_inside.sum())
    even = torch.cat([ends_inside.nonzero()[:, 0], (~ends_inside).nonzero()[:half, 0]])
    test = test[even]

    def closing(logits: Tensor, tokens: Tensor, mask: Tensor, inside: Tensor) -> Tensor:
        """Log-probability of the closing bracket after the window, counted against where none is open."""
        value = torch.zeros(tokens.shape)
        sign = 2 * inside[:, -1] - 1
        value[:, -1] = sign * logits[:, -1].log_softmax(-1)[:, module.vocab[")"]]
        return value

    acts = pl.collect(model, train, LAYER_0)
    probes = pl.probe(acts, train.labels, train.groups)
    rows = split_by_group(train.groups).train
    x, y = acts[LAYER_0][rows].flatten(0, 1), train.labels["inside"][rows].flatten()
    spaces = {
        "class_means": pl.subspaces.class_means(x, y),
        "filter": pl.subspaces.from_probe(probes.coef(LAYER_0), probes.mean(LAYER_0)),
    }
    for name, space in spaces.items():
        result = pl.ablate(
            model, test, probes, metric=closing, controls=5, label="inside", kinds=("random", "pca"), directions=name
        )
        (target,) = result.targets()
        logits = model.run_with_hooks(test.tokens, [(LAYER_0, pl.edits.project(space))])
        by_hand = closing(logits, test.tokens, test.mask, test.labels["inside"])
        assert target["value"] == pytest.approx(float(by_hand.mean()), abs=1e-4), name
    assert target["drop"] > 0.7 * target["clean"]
    random = [row["drop"] for row in result.rows if row["condition"] == "random"]
    assert len(random) == 5
    assert max(map(abs, random)) < 0.1 * target["clean"]
    assert target["refit_accuracy"] > target["baseline"] + 0.2
    assert target["verdict"] == "inconclusive"

"""Baselines against slow dictionaries and scikit-learn."""

from __future__ import annotations

from collections import Counter as Tally

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from probelens.errors import InputError, ShapeError
from probelens.tasks import Dyck, FlipFlop, GroupWords, Parity, Task, baseline_predictions, baselines

TASKS = [Dyck(noop=0.2, bos=True), GroupWords("S3", "transpositions"), FlipFlop(), Parity()]
EACH = pytest.mark.parametrize("task", TASKS, ids=repr)


def most_common(values: list[int]) -> int:
    counts = Tally(values)
    return min(counts, key=lambda value: (-counts[value], value))


def contexts(tokens: list[int], t: int, w: int) -> list[str]:
    """What a guess at position t may go by: windows, longest first, then the position, then nothing."""
    padded: list[int | None] = [None] * w + tokens[: t + 1]
    return [*(f"last {padded[-v:]}" for v in range(w, 0, -1)), f"at {t}", "all"]


@EACH
@pytest.mark.parametrize("w", [1, 2, 5])
def test_guesses_equal_a_slow_dictionary(task: Task, w: int) -> None:
    train, test = task.sample(40, length=15, seed=1), task.sample(25, length=22, seed=2)
    y = train.labels[task.target]
    seen: dict[str, list[int]] = {}
    for row, t in train.mask.nonzero().tolist():
        for key in contexts(train.tokens[row].tolist(), t, w):
            seen.setdefault(key, []).append(int(y[row, t]))
    guess = {key: most_common(values) for key, values in seen.items()}
    found = baseline_predictions(train.tokens, y, test.tokens, train.mask, w)
    backed_off = 0
    for row in range(len(test)):
        for t in range(test.length):
            *windows, position, nothing = contexts(test.tokens[row].tolist(), t, w)
            known = [guess[key] for key in [*windows, nothing] if key in guess]
            backed_off += windows[0] not in guess
            assert found["last_w"][row, t] == known[0]
            assert found["position"][row, t] == guess.get(position, guess["all"])
            assert found["majority"][row, t] == guess["all"]
    if w == 5:
        assert backed_off > 0 or task.name == "parity"


@EACH
def test_scores_equal_scikit_learn(task: Task) -> None:
    train, test = task.sample(300, seed=1), task.sample(200, seed=2)
    label = task.target
    scores = task.baselines(train, test, w=3)
    guesses = baseline_predictions(train.tokens, train.labels[label], test.tokens, train.mask, 3)
    truth = test.labels[label][test.mask].numpy()
    for name, score in scores.items():
        guess = guesses[name][test.mask.numpy()]
        assert score["accuracy"] == pytest.approx(accuracy_score(truth, guess), abs=1e-12)
        assert score["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, guess), abs=1e-12)
    y = train.labels[label][train.mask].numpy()
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((len(y), 1)), y)
    assert scores["majority"]["accuracy"] == pytest.approx(dummy.score(np.zeros((len(truth), 1)), truth), abs=1e-12)


def test_last_tokens_suffice_for_a_label_of_the_last_tokens_and_not_for_parity() -> None:
    tokens, test_tokens = Parity().sample(500, seed=1).tokens, Parity().sample(500, seed=2).tokens
    two_back = [torch.nn.functional.pad(x, (2, 0))[:, :-2] for x in (tokens, test_tokens)]
    assert baselines(tokens, two_back[0], test_tokens, two_back[1], w=3)["last_w"]["accuracy"] == 1.0
    assert baselines(tokens, two_back[0], test_tokens, two_back[1], w=2)["last_w"]["accuracy"] < 0.6
    late = torch.zeros_like(tokens, dtype=torch.bool)
    late[:, 16:] = True
    parity = [Parity().labels(x)["state"] for x in (tokens, test_tokens)]
    scores = baselines(tokens, parity[0], test_tokens, parity[1], late, late, w=4)
    assert all(0.45 < score["accuracy"] < 0.55 for score in scores.values())


def test_only_positions_under_the_mask_are_learned_from_and_scored() -> None:
    task = Dyck()
    train, test = task.sample(60, seed=1), task.sample(60, seed=2)
    mask = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    y_train, y_test = train.labels["depth"], test.labels["depth"]
    expected = baselines(train.tokens, y_train, test.tokens, y_test, mask, mask)
    garbled = [torch.where(mask, y, (y + 3) % 11) for y in (y_train, y_test)]
    assert baselines(train.tokens, garbled[0], test.tokens, garbled[1], mask, mask) == expected
    assert baselines(train.tokens, garbled[0], test.tokens, garbled[1]) != expected


def test_large_vocabularies_and_windows_do_not_overflow() -> None:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 250_000, (20, 30), generator=rng)
    labels = torch.randint(0, 5, (20, 30), generator=rng)
    assert baselines(tokens, labels, tokens, labels, w=8)["last_w"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"w": 0}, InputError, "w=0"),
        ({"train_mask": torch.zeros(3, 4, dtype=torch.bool)}, InputError, "no training label counts"),
        ({"test_mask": torch.zeros(3, 4, dtype=torch.bool)}, InputError, "no test label counts"),
        ({"test_labels": torch.zeros(3, 5, dtype=torch.long)}, ShapeError, r"\(3, 5\)"),
        ({"train_labels": torch.full((3, 4), -1)}, InputError, "negative class ids"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], error: type[Exception], text: str) -> None:
    zeros = torch.zeros(3, 4, dtype=torch.long)
    good = {"train_tokens": zeros, "train_labels": zeros, "test_tokens": zeros, "test_labels": zeros}
    assert baselines(**good)["majority"]["accuracy"] == 1.0  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        baselines(**{**good, **change})  # type: ignore[arg-type]


def test_guesses_take_classes_of_any_ids():
    tokens = torch.randint(0, 3, (40, 9), generator=torch.Generator().manual_seed(0))
    labels, parts = tokens.cumsum(1) % 3, (slice(0, 30), slice(30, 40))
    far = torch.tensor([5, 900_000, 2**40])[labels]
    plain, found = (baselines(*(t for p in parts for t in (tokens[p], y[p]))) for y in (labels, far))
    assert found == plain
    guesses = baseline_predictions(tokens[:30], far[:30], tokens[30:])
    assert set(guesses["last_w"].flatten().tolist()) <= {5, 900_000, 2**40}

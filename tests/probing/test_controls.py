"""Control tasks: random labels of contexts, which only memory can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.probing import fit_path
from probelens.probing.controls import contexts, control_labels, selectivity
from probelens.tasks import Dyck, Parity


def windows(tokens: torch.Tensor, w: int) -> list[tuple[int, ...]]:
    """The last w tokens at every position, by a plain loop."""
    return [tuple(row[max(0, t - w + 1) : t + 1].tolist()) for row in tokens for t in range(tokens.shape[1])]


@pytest.mark.parametrize("w", [1, 2, 3])
def test_contexts_are_the_windows_of_the_last_tokens(w: int) -> None:
    tokens = torch.randint(0, 3, (30, 8), generator=torch.Generator().manual_seed(0))
    ids, found = contexts(tokens, n_contexts=10_000, w=w)
    assert found == w
    pairs = set(zip(windows(tokens, w), ids.flatten().tolist()))
    assert len(pairs) == len(set(windows(tokens, w))) == len(set(ids.flatten().tolist()))


def test_the_window_is_as_long_as_256_contexts_need() -> None:
    batch = Parity().sample(2000, length=40, seed=0)
    ids, w = contexts(batch.tokens)
    # Windows of 8 bits, and the shorter ones at the start of a sequence.
    assert w in (7, 8)
    assert len(ids.unique()) >= 200
    assert int(ids.max()) < 256


def test_labels_depend_on_the_context_only_and_are_as_frequent_as_the_real_ones() -> None:
    batch = Dyck().sample(1500, length=40, seed=0)
    labels = batch.labels["depth"]
    control = control_labels(batch.tokens, labels, batch.mask, seed=3)
    ids, _ = contexts(batch.tokens, mask=batch.mask)
    for context in ids.unique()[:50]:
        assert len(control[ids == context].unique()) == 1
    real, drawn = (torch.bincount(y[batch.mask], minlength=11) / batch.mask.sum() for y in (labels, control))
    assert float((real - drawn).abs().sum() / 2) < 0.05
    assert float((control == labels)[batch.mask].float().mean()) < 0.3  # not the task in disguise


def test_seeds_decide_the_assignment_and_nothing_else_does() -> None:
    batch = Parity().sample(200, length=20, seed=0)
    labels = batch.labels["state"]
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    a, b, c = (control_labels(batch.tokens, labels, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


def test_numeric_labels_are_drawn_from_the_real_ones() -> None:
    batch = Parity().sample(100, length=20, seed=0)
    numbers = batch.labels["state"].float() * 2.5 + 1
    control = control_labels(batch.tokens, numbers, seed=0)
    assert control.dtype == torch.float32
    assert set(control.unique().tolist()) == {1.0, 3.5}


@pytest.mark.parametrize(("memorises", "low", "high"), [(True, -0.05, 0.05), (False, 0.4, 1.0)])
def test_selectivity_is_zero_for_memory_and_large_for_a_code(memorises: bool, low: float, high: float) -> None:
    """Features that name the context make both tasks easy; features that hold the state only one."""
    generator = torch.Generator().manual_seed(0)
    batch = Parity().sample(800, length=20, seed=0)
    # A label that is itself a function of the context, so that memory can do the task as well.
    ids, _ = contexts(batch.tokens, n_contexts=64)
    labels = (ids % 4 == 0).long() + 2 * (ids % 3 == 0).long()
    control = control_labels(batch.tokens, labels, n_contexts=64, seed=0)
    x = torch.nn.functional.one_hot(ids if memorises else labels, 64).float()
    x = x + 0.01 * torch.randn(x.shape, generator=generator)
    train, test = x[:600].flatten(0, 1), x[600:].flatten(0, 1)
    scores = []
    for y in (labels, control):
        ((fit,),) = fit_path(train, y[:600].flatten(), 10.0)
        scores.append(float((fit.predict(test) == y[600:].flatten()).float().mean()))
    assert scores[0] > 0.95
    assert low <= selectivity(*scores) <= high


def test_bad_input_is_named() -> None:
    tokens = torch.zeros(3, 4).long()
    with pytest.raises(ShapeError, match="one shape"):
        control_labels(tokens, tokens[:2])
    with pytest.raises(ShapeError, match="batch, pos"):
        contexts(tokens[0])
    with pytest.raises(InputError, match="at least two contexts"):
        contexts(tokens, n_contexts=1)
    with pytest.raises(InputError, match="False everywhere"):
        control_labels(tokens, tokens, torch.zeros(3, 4).bool())


def test_a_constant_end_does_not_hide_the_contexts_before_it() -> None:
    tokens = torch.randint(0, 9, (200, 10), generator=torch.Generator().manual_seed(0))
    tokens[:, -2:] = 3
    last = torch.zeros(200, 10, dtype=torch.bool)
    last[:, -1] = True
    ids, w = contexts(tokens, 64, last)
    assert w > 3
    assert len(ids[:, -1].unique()) > 30
    same = torch.full((200, 10), 3)
    assert contexts(same, 64, last)[1] <= 10, "and where there is nothing more it ends"

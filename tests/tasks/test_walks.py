"""Dyck and Counter: what is promised about the law of the depth at each position and length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from probelens.tasks import Counter, Dyck, Task

N = 20_000


def depth_counts(task: Task, length: int, pos: int, seed: int) -> np.ndarray:
    depth = task.sample(N, length=length, seed=seed).labels["depth"][:, pos]
    return np.bincount(depth.numpy(), minlength=task.n_classes["depth"])


def promised(task: Task, tokens: int) -> np.ndarray:
    """Law of the depth after so many tokens, as the docstrings of Dyck and Counter state it."""
    m = task.n_classes["depth"] - 1
    law = np.ones(m + 1) if isinstance(task, Counter) else np.array([1.0] + [2.0] * (m - 1) + [1.0])
    if isinstance(task, Dyck) and not task.noop:
        law[(tokens + 1) % 2 :: 2] = 0
    return law / law.sum()


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Probability of counts at least this far from the law (chi-square); 0 where the law says never."""
    if counts[law == 0].any():
        return 0.0
    return float(chisquare(counts[law > 0], counts.sum() * law[law > 0]).pvalue)


# Seeds are fixed, so a test passes always or never. Right laws give p-values spread over (0, 1), the
# smallest of some hundred being far above LOW; wrong ones give values below WRONG.
LOW, WRONG = 1e-6, 1e-30

TASKS = [Dyck(), Dyck(noop=0.2), Dyck(k=1, max_depth=5, noop=0.05), Counter(), Counter(noop=0.2)]
EACH = pytest.mark.parametrize("task", TASKS, ids=repr)


@EACH
@pytest.mark.parametrize("length", [40, 41, 60, 80, 100, 120])
def test_the_last_depth_has_the_promised_law_at_every_length(task: Task, length: int) -> None:
    assert p_value(depth_counts(task, length, -1, seed=length), promised(task, length)) > LOW


@EACH
def test_the_law_holds_from_twice_the_greatest_depth_on_and_not_before(task: Task) -> None:
    settled = 2 * (task.n_classes["depth"] - 1)
    for tokens in (settled, settled + 1, settled + 9):
        assert p_value(depth_counts(task, 60, tokens - 1, seed=tokens), promised(task, tokens)) > LOW
    early = settled // 2
    assert p_value(depth_counts(task, 60, early - 1, seed=0), promised(task, early)) < WRONG


@EACH
def test_a_plain_random_walk_would_not_pass_this_test(task: Task) -> None:
    m, rng = task.n_classes["depth"] - 1, np.random.default_rng(0)
    settled = 2 * m
    depth = np.zeros(N, dtype=int)
    stay = getattr(task, "noop", 0.0)
    for _ in range(settled):
        u = rng.random(N)
        up = np.where(u < stay, 0, np.where(u < (1 + stay) / 2, 1, -1))
        if isinstance(task, Dyck):
            up = np.where((depth == 0) & (up != 0), 1, np.where((depth == m) & (up != 0), -1, up))
        depth = (depth + up).clip(0, m)
    assert p_value(np.bincount(depth, minlength=m + 1), promised(task, settled)) < WRONG


@EACH
def test_the_start_of_a_long_string_is_distributed_as_a_short_string(task: Task) -> None:
    short, long = task.sample(N, length=12, seed=1).labels, task.sample(N, length=110, seed=2).labels

    def agreement(label: str, pos: int, pos_long: int) -> float:
        bins = task.n_classes[label]
        table = np.stack(
            [np.bincount(short[label][:, pos], minlength=bins), np.bincount(long[label][:, pos_long], minlength=bins)]
        )
        return float(chi2_contingency(table[:, table.sum(0) > 20]).pvalue)

    for label in task.label_names:
        assert min(agreement(label, pos, pos) for pos in (3, 5, 11)) > LOW
    assert agreement("depth", 3, 11) < WRONG  # control: other positions do differ


@pytest.mark.parametrize(("noop", "expected"), [(0.2, 0.1), (0.0, 0.2)])
def test_the_position_only_guess_of_the_depth_is_as_documented(noop: float, expected: float) -> None:
    task = Dyck(noop=noop)
    late = {}
    for name, batch in task.splits({"train": 5000, "test": 5000}, length=80).items():
        keep = batch.mask.clone()
        keep[:, :20] = False
        late[name] = type(batch)(batch.tokens, batch.labels, keep)
    score = task.baselines(late["train"], late["test"])["position"]
    assert score["accuracy"] == pytest.approx(expected, abs=0.01)


def test_no_ops_come_as_often_as_asked() -> None:
    for noop in (0.05, 0.2, 0.5):
        task = Dyck(noop=noop)
        tokens = task.sample(4000, length=80).tokens[:, 20:]
        assert (tokens == task.vocab.index(".")).double().mean().item() == pytest.approx(noop, abs=0.005)


def test_types_of_openers_are_uniform() -> None:
    tokens = Dyck(k=3).sample(4000).tokens
    counts = np.bincount(tokens[tokens < 3].numpy())
    assert p_value(counts, np.ones(3) / 3) > LOW


def legal(word: list[str], k: int, m: int) -> bool:
    stack: list[int] = []
    for symbol in word:
        index = int(symbol)
        if index < k:
            stack.append(index)
        elif index < 2 * k and (not stack or stack.pop() != index - k):
            return False
        if len(stack) > m:
            return False
    return True


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    k=st.integers(1, 9),
    m=st.integers(1, 25),
    noop=st.sampled_from([0.0, 0.01, 0.3, 0.9]),
    length=st.integers(1, 60),
    seed=st.integers(0, 2**40),
)
def test_dyck_strings_are_legal_for_any_parameters(k: int, m: int, noop: float, length: int, seed: int) -> None:
    task = Dyck(k=k, max_depth=m, noop=noop)
    tokens = task.sample(8, length=length, seed=seed).tokens
    assert all(legal(row, k, m) for row in tokens.tolist())
    assert tokens.max() < 2 * k + (noop > 0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    k=st.integers(2, 5),
    m=st.integers(3, 20),
    noop=st.sampled_from([0.0, 0.2]),
    length=st.integers(4, 60),
    kind=st.sampled_from(["type", "depth"]),
    data=st.data(),
)
def test_both_strings_of_a_dyck_pair_are_legal_to_the_end(
    k: int, m: int, noop: float, length: int, kind: str, data: st.DataObject
) -> None:
    task = Dyck(k=k, max_depth=m, noop=noop)
    read = data.draw(st.integers(3, length - 1))
    pairs = task.pairs(6, length=length, kind=kind, read_pos=read)
    rows = zip(pairs.clean.tolist(), pairs.corrupted.tolist(), pairs.edit_pos.tolist(), strict=True)
    for clean, corrupted, p in rows:
        assert legal(clean, k, m)
        assert legal(corrupted, k, m)
        assert clean[p] < k
        assert (corrupted[p] < k) == (kind == "type")

"""Splits by sequence and control labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probelens.errors import InputError, ShapeError
from probelens.probing.splits import copies_together, split_by_group


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.integers(0, 30), min_size=12, max_size=80), seed=st.integers(0, 5))
def test_no_group_is_ever_on_two_sides(groups: list[int], seed: int) -> None:
    ids = torch.tensor([*groups, 31, 32, 33, 34, 35])  # five groups at least
    split = split_by_group(ids, seed=seed)
    sides = [set(ids[i].tolist()) for i in (split.train, split.val, split.test)]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    rows = torch.cat([split.train, split.val, split.test])
    assert sorted(rows.tolist()) == list(range(len(ids)))
    assert all(sides)


def test_shares_are_those_asked_for() -> None:
    split = split_by_group(torch.arange(1000), (0.5, 0.3, 0.2))
    assert [len(split.train), len(split.val), len(split.test)] == [500, 300, 200]


def test_equal_seeds_give_equal_splits_and_others_do_not() -> None:
    state = torch.random.get_rng_state()
    a, b, c = (split_by_group(torch.arange(100), seed=s) for s in (1, 1, 2))
    assert torch.equal(a.test, b.test)
    assert not torch.equal(a.test, c.test)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_copies_of_a_sequence_share_a_group_through_any_chain() -> None:
    tokens = torch.tensor([[1, 1], [2, 2], [1, 1], [3, 3], [4, 4]])
    groups = torch.tensor([0, 1, 1, 2, 3])
    # 0 and 2 are one text; 2 and 1 are one group: so 0, 1 and 2 belong together, 3 and 4 stay apart.
    ids = copies_together(tokens, groups).tolist()
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids)) == 3
    assert copies_together(torch.arange(6)[:, None], torch.arange(6)).tolist() == list(range(6))


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_sequences_are_an_error(n: int) -> None:
    with pytest.raises(InputError, match="too few"):
        split_by_group(torch.arange(n))
    assert len(split_by_group(torch.arange(3)).test) == 1


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.6, 0.3, 0.2), (1.0, 0.0, 0.0)])
def test_fractions_must_be_three_positive_shares(fractions: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="three positive fractions"):
        split_by_group(torch.arange(100), fractions)


def test_tokens_and_groups_must_agree() -> None:
    with pytest.raises(ShapeError, match="one per sequence"):
        copies_together(torch.zeros(3, 2), torch.arange(2))

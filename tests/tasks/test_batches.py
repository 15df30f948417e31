"""Batch and PatchPairs: checked when made, sliced by sequence."""

from __future__ import annotations

import pytest
import torch

from probelens.errors import InputError, ShapeError
from probelens.tasks import Batch, Constant, PatchPairs
from probelens.tasks.examples import Examples


def batch() -> Batch:
    tokens = torch.arange(12).reshape(4, 3)
    mask = torch.tensor([[False, True, True]]).expand(4, 3)
    return Batch(tokens, {"y": tokens % 2, "z": tokens % 3}, mask, torch.tensor([7, 7, 8, 9]))


def pair_parts(n: int = 3, length: int = 4) -> dict[str, torch.Tensor]:
    clean = torch.zeros(n, length, dtype=torch.long)
    corrupted = clean.clone()
    corrupted[:, 1] = 1
    return {
        "clean": clean,
        "corrupted": corrupted,
        "edit_pos": torch.full((n,), 1),
        "read_pos": torch.full((n,), length - 1),
        "answers": torch.tensor([[0, 1]]).repeat(n, 1),
    }


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (2, [2]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([3, 0, 0], [3, 0, 0]),
        (torch.tensor([1, -1]), [1, 3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        ([], []),
    ],
)
def test_indexing_takes_whole_sequences_with_all_their_parts(index: object, rows: list[int]) -> None:
    whole = batch()
    part = whole[index]  # type: ignore[index]
    assert part.tokens.tolist() == [whole.tokens[r].tolist() for r in rows]
    assert part.labels["z"].tolist() == [whole.labels["z"][r].tolist() for r in rows]
    assert part.mask.tolist() == [whole.mask[r].tolist() for r in rows]
    assert part.groups.tolist() == [whole.groups[r].item() for r in rows]
    assert len(part) == len(rows)


def test_a_batch_can_be_iterated_and_an_index_beyond_the_end_is_an_error() -> None:
    assert [part.tokens[0, 0].item() for part in batch()] == [0, 3, 6, 9]  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="4 sequences"):
        batch()[4]
    with pytest.raises(InputError, match="list of integers"):
        batch()[torch.tensor([0.5])]
    with pytest.raises(ShapeError, match="bool index"):
        batch()[torch.tensor([True, False])]


def test_mask_and_groups_default_to_everything_and_to_one_group_a_sequence() -> None:
    made = Batch(torch.zeros(3, 2, dtype=torch.long))
    assert made.mask.all()
    assert made.groups.tolist() == [0, 1, 2]
    assert made.labels == {}


def test_to_moves_every_tensor() -> None:
    moved = batch().to(torch.device("cpu"))
    assert {t.device.type for t in (moved.tokens, moved.mask, moved.groups, *moved.labels.values())} == {"cpu"}
    assert moved.tokens.equal(batch().tokens)


def test_other_integer_types_become_int64() -> None:
    made = Batch(torch.zeros(2, 2, dtype=torch.int32), {"y": torch.ones(2, 2, dtype=torch.uint8)})
    assert made.tokens.dtype == made.labels["y"].dtype == torch.int64


def test_a_negative_label_is_fine_exactly_where_the_mask_is_false() -> None:
    tokens, labels = torch.zeros(1, 2, dtype=torch.long), {"y": torch.tensor([[-100, 0]])}
    assert Batch(tokens, labels, torch.tensor([[False, True]])).labels["y"][0, 0] == -100
    with pytest.raises(InputError, match="negative class ids where the mask is True"):
        Batch(tokens, labels)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.long)}, ShapeError, r"tokens\[None\]"),
        ({"tokens": torch.zeros(3, 0, dtype=torch.long)}, ShapeError, "at least one position"),
        ({"tokens": torch.zeros(3, 2)}, InputError, r"float32.*\.long\(\)"),
        ({"tokens": [[1, 2]]}, InputError, "list.*torch.as_tensor"),
        ({"tokens": torch.tensor([[0, -1]])}, InputError, "negative id -1"),
        ({"labels": {"y": torch.zeros(4, 2, dtype=torch.long)}}, ShapeError, r"\(4, 2\).*\(4, 3\)"),
        ({"labels": {"y": torch.ones(4, 3) > 0}}, InputError, "torch.bool"),
        ({"labels": {"y": torch.full((4, 3), torch.nan)}}, InputError, "NaN or infinity where the mask is True"),
        ({"labels": {"y": torch.zeros(3)}}, ShapeError, r"\(3,\).*\(4, 3\), one per position, or \(4,\)"),
        ({"labels": torch.zeros(4, 3, dtype=torch.long)}, InputError, "dict of label name"),
        ({"mask": torch.ones(4, 3)}, InputError, r"mask\.bool\(\)"),
        ({"mask": torch.ones(4, 2, dtype=torch.bool)}, ShapeError, r"\(4, 2\).*\(4, 3\)"),
        ({"groups": torch.zeros(3, dtype=torch.long)}, ShapeError, "one id per sequence"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(
    arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    good = {"tokens": torch.zeros(4, 3, dtype=torch.long)}
    Batch(**good)  # control: without the fault it is accepted
    with pytest.raises(error, match=text):
        Batch(**{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("corrupted", torch.zeros(3, 5, dtype=torch.long), ShapeError, r"\(3, 5\).*\(3, 4\)"),
        ("corrupted", torch.zeros(3, 4, dtype=torch.long), InputError, "equal at edit_pos in 3 of 3"),
        ("edit_pos", torch.tensor([1, 1]), ShapeError, "one position per example"),
        ("edit_pos", torch.tensor([1, 1, 4]), InputError, "0 to 3"),
        ("read_pos", torch.tensor([3, 3, -5]), InputError, "0 to 3, or negative"),
        ("answers", torch.tensor([[0, 1], [0, 1], [2, 2]]), InputError, "equal in 1 of 3 examples, first in example 2"),
        ("answers", torch.tensor([0, 1, 2]), ShapeError, r"\(3, 2\)"),
        ("answers", torch.tensor([[0, 1], [0, 1], [0, -1]]), InputError, "start at 0"),
        ("answers", torch.rand(3, 3), InputError, "float32"),
    ],
)
def test_pairs_that_cannot_be_patched_are_refused(
    name: str, value: torch.Tensor, error: type[Exception], text: str
) -> None:
    PatchPairs(**pair_parts())
    with pytest.raises(error, match=text):
        PatchPairs(**{**pair_parts(), name: value})


def test_pairs_slice_by_example_and_keep_label_and_mask() -> None:
    mask = torch.tensor([[True, True, True, True], [True, True, True, False], [True, True, False, False]])
    pairs = PatchPairs(**pair_parts(), mask=mask, label="state")[[2, 0]]
    assert len(pairs) == 2
    assert pairs.mask.sum(1).tolist() == [2, 4]
    assert pairs.label == pairs.to("cpu").label == "state"
    assert pairs.answers.shape == (2, 2)


def test_inputs_may_be_features_pictures_or_the_arguments_of_a_forward() -> None:
    series = Batch(
        torch.randn(4, 5, 3), {"run": torch.randn(4, 5), "end": torch.randn(4), "sign": torch.tensor([0, 9, 0, 9])}
    )
    assert (series.mask.shape, series.length) == ((4, 5), 5)
    pictures = Batch(
        torch.randn(4, 3, 8, 8), {"kind": torch.tensor([0, 1, 2, 0])}, torch.tensor([True, True, False, True])
    )
    assert (pictures.mask.tolist(), len(pictures)) == ([True, True, False, True], 4)
    by_patch = Batch(torch.randn(4, 3, 8, 8), {"edge": torch.zeros(4, 17).long(), "kind": torch.tensor([0, 1, 2, 0])})
    assert by_patch.mask.shape == (4, 17)
    table = torch.eye(3)
    given = {"tokens": torch.arange(12).reshape(4, 3), "lengths": [3, 2, 1, 3], "scale": 2.0, "table": Constant(table)}
    two = Batch(given, {"y": torch.ones(4)})
    part = two[[3, 1]]
    assert part.inputs["lengths"].tolist() == [3, 2]
    assert part.tokens.tolist() == [[9, 10, 11], [3, 4, 5]]
    assert part.examples.rows([0])["table"] is table
    assert part.to("cpu").inputs["scale"] == 2.0
    for batch in (series, pictures):
        with pytest.raises(InputError, match="has no tokens"):
            _ = batch.tokens
    with pytest.raises(ShapeError, match=r"'lengths' has shape \(3,\).*pl.Constant"):
        Batch({**given, "lengths": torch.ones(3)})
    with pytest.raises(InputError, match="words.* is a list"):
        Batch({**given, "words": ["a", "b"]})


def test_a_mask_of_examples_and_the_mask_among_the_arguments_count() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    assert Batch(tokens, mask=torch.tensor([True, False])).mask.tolist() == [[True] * 3, [False] * 3]
    told = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = Batch({"input_ids": tokens, "attention_mask": told, "token_type_ids": tokens})
    assert batch.mask.tolist() == batch.attention_mask.tolist() == told.bool().tolist()
    whole = {"y": torch.tensor([-100, 3])}
    assert Batch(tokens, whole, torch.tensor([False, True])).labels["y"].tolist() == [-100, 3]
    with pytest.raises(InputError, match="negative class"):
        Batch(tokens, whole)


def test_examples_of_equal_inputs_have_equal_numbers() -> None:
    a = torch.tensor([[1, 2], [1, 2], [3, 4], [1, 2]])
    assert Examples(a).copies().tolist() == [0, 0, 1, 0]
    ids = Examples({"a": a, "b": torch.tensor([0, 0, 0, 5])}).copies().tolist()
    assert ids[0] == ids[1] != ids[2] != ids[3] != ids[0]


def test_one_mask_that_hides_other_tokens_on_each_side_is_refused() -> None:
    long, short = torch.arange(1, 9).expand(2, 8), torch.arange(11, 17).expand(2, 6)
    padded = torch.nn.functional.pad(short, (2, 0))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, :2] = False
    with pytest.raises(InputError, match="corrupted_mask= for corrupted"):
        PatchPairs(long, padded, None, 7, torch.tensor([[3, 5]] * 2), mask)
    pairs = PatchPairs(long, padded, None, 7, torch.tensor([[3, 5]] * 2), corrupted_mask=mask)
    assert bool(pairs.mask.all())
    assert torch.equal(pairs.corrupted_mask, mask)
    # Padding of both is what one mask is for.
    both = torch.nn.functional.pad(torch.arange(1, 7).expand(2, 6), (2, 0))
    assert torch.equal(PatchPairs(both, padded, None, 7, torch.tensor([[3, 5]] * 2), mask).corrupted_mask, mask)

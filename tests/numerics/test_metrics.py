"""Metrics against plain formulas and scikit-learn; undefined cases are errors or NaN, never a number."""

from __future__ import annotations

import pytest
import torch

from probelens.errors import MetricError, ShapeError
from probelens.numerics.metrics import accuracy, balanced_accuracy, cross_entropy, kl, logit_diff, recovered


@pytest.fixture
def run():
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, 4, generator=gen)
    labels = torch.randint(4, (7, 5), generator=gen)
    mask = torch.rand(7, 5, generator=gen) < 0.7
    mask[0] = True
    return logits, labels, mask


def test_accuracy_and_cross_entropy_equal_torch_and_count_only_the_mask(run):
    logits, labels, mask = run
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(7, 5)
    right = (logits.argmax(-1) == labels).float()
    for i in range(7):
        torch.testing.assert_close(cross_entropy(logits, labels, mask)[i], loss[i][mask[i]].mean())
        torch.testing.assert_close(accuracy(logits, labels, mask)[i], right[i][mask[i]].mean())
    torch.testing.assert_close(accuracy(logits, labels).mean(), right.mean())
    assert not torch.equal(accuracy(logits, labels), accuracy(logits, labels, mask))


def test_an_example_without_positions_is_nan_and_touches_no_other(run):
    logits, labels, mask = run
    empty = mask.clone()
    empty[2] = False
    found = accuracy(logits, labels, empty)
    assert found[2].isnan()
    assert torch.equal(found[3:], accuracy(logits, labels, mask)[3:])


def test_masked_positions_may_hold_anything(run):
    logits, labels, mask = run
    junk_logits = logits.masked_fill(~mask[..., None], torch.nan)
    junk_labels = labels.masked_fill(~mask, -100)
    assert torch.equal(accuracy(junk_logits, junk_labels, mask), accuracy(logits, labels, mask))
    torch.testing.assert_close(cross_entropy(junk_logits, junk_labels, mask), cross_entropy(logits, labels, mask))
    with pytest.raises(MetricError, match="NaN"):
        accuracy(junk_logits, labels)
    with pytest.raises(MetricError, match="classes"):
        accuracy(logits, junk_labels)


def test_balanced_accuracy_equals_sklearn_and_ignores_absent_classes(run):
    from sklearn.metrics import balanced_accuracy_score

    logits, labels, mask = run
    assert float(balanced_accuracy(logits, labels, mask)) == pytest.approx(
        balanced_accuracy_score(labels[mask], logits.argmax(-1)[mask])
    )
    absent = labels.clamp(max=2)  # class 3 never occurs, and must not count as a recall of 0
    recalls = [(logits.argmax(-1)[absent == c] == c).float().mean() for c in range(3)]
    assert float(balanced_accuracy(logits, absent)) == pytest.approx(float(sum(recalls)) / 3)
    constant = torch.zeros(6, 3)
    constant[:, 0] = 1.0
    skewed = torch.tensor([0, 0, 0, 0, 1, 2])
    assert float(accuracy(constant, skewed).mean()) == pytest.approx(4 / 6)
    assert float(balanced_accuracy(constant, skewed)) == pytest.approx(1 / 3)
    with pytest.raises(MetricError, match="mask"):
        balanced_accuracy(constant, skewed, torch.zeros(6, dtype=torch.bool))


def test_kl_is_zero_on_itself_positive_elsewhere_and_allows_impossible_tokens(run):
    logits, _, mask = run
    other = logits.roll(1, 0)
    assert torch.allclose(kl(logits, logits, mask), torch.zeros(7), atol=1e-6)
    reference = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=other), torch.distributions.Categorical(logits=logits)
    )
    torch.testing.assert_close(kl(logits, other), reference.mean(1))
    assert not torch.allclose(kl(logits, other), kl(other, logits))
    ruled_out = logits.clone()
    ruled_out[..., 0] = -torch.inf
    assert torch.isfinite(kl(ruled_out, ruled_out)).all()
    assert torch.isinf(kl(ruled_out, logits)).all()


def test_logit_diff_prefers_the_clean_answer_and_wants_one_position():
    logits = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 2.0]])
    answers = torch.tensor([[1, 0], [0, 2]])
    assert logit_diff(logits, answers).tolist() == [2.0, -2.0]
    assert torch.equal(logit_diff(logits, answers.flip(1)), -logit_diff(logits, answers))
    with pytest.raises(ShapeError, match="read position"):
        logit_diff(logits[:, None].expand(2, 5, 3), answers)
    with pytest.raises(MetricError, match="classes"):
        logit_diff(logits, answers + 1)


def test_recovered_is_unclipped_and_undefined_without_a_gap():
    patched = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
    assert recovered(patched, torch.tensor(2.0), torch.tensor(0.0)).tolist() == [0.0, 0.5, 1.0, 1.5, -0.5]
    with pytest.raises(MetricError, match="no gap"):
        recovered(patched, torch.tensor(1.0), torch.tensor(1.0))


def test_half_precision_logits_score_in_float32(run):
    logits, labels, _ = run
    half = cross_entropy(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, cross_entropy(logits.bfloat16().float(), labels))


def test_shapes_that_do_not_fit_are_named(run):
    logits, labels, mask = run
    with pytest.raises(ShapeError, match="labels"):
        accuracy(logits, labels[:, :-1])
    with pytest.raises(ShapeError, match="mask"):
        accuracy(logits, labels, mask[0])
    with pytest.raises(ShapeError, match="one shape"):
        kl(logits, logits[:1])

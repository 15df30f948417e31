"""Functions that score logits, one number per example, for ``metric=``.

Each takes logits and labels and averages the positions that count. Examples are not averaged, so that
intervals can resample them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from probelens.errors import InputError, MetricError, ShapeError
from probelens.numerics.tensors import tensor_of

__all__ = [
    "accuracy", "balanced_accuracy", "cross_entropy", "kl", "logit_diff", "mse", "r2", "recovered", "with_references",
]  # fmt: skip


def accuracy(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of counted positions where the largest logit is the label's.

    Args:
        logits: (example, ..., class)
        labels: Class ids. (example, ...)
        mask: True where a position counts; default: everywhere. (example, ...)

    Returns:
        A fraction per example; NaN for an example without a counted position. (example,)

    Raises:
        ShapeError: Labels or mask that don't fit the logits.
        MetricError: NaN logits, or a label that is no class.

    Examples:
        >>> accuracy(torch.tensor([[[2.0, 1.0], [0.0, 3.0]]]), torch.tensor([[0, 0]]))
        tensor([0.5000])
    """
    keep = _check(logits, labels, mask)
    return _per_example((logits.argmax(-1) == labels).to(_real(logits)), keep)


def balanced_accuracy(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Accuracy within each class, averaged over the classes that occur.

    Args:
        Those of ``accuracy``.

    Returns:
        One fraction over all examples, not a mean over examples; 1 / (number of classes) for a constant guess. ()

    Raises:
        ShapeError: Labels or mask that don't fit the logits.
        MetricError: NaN logits, a label that is no class, or nothing that counts.

    Examples:
        >>> logits = torch.tensor([[5.0, 0.0], [5.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
        >>> balanced_accuracy(logits, torch.tensor([0, 0, 0, 1]))
        tensor(0.5000)
    """
    keep = _check(logits, labels, mask)
    truth, guess = labels[keep], logits.argmax(-1)[keep]
    if truth.numel() == 0:
        raise MetricError("balanced accuracy needs a counted position, and the mask is False everywhere")
    counts = torch.bincount(truth, minlength=logits.shape[-1]).to(_real(logits))
    right = torch.bincount(truth[guess == truth], minlength=logits.shape[-1]).to(_real(logits))
    return (right / counts)[counts > 0].mean()


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean negative log-probability of the labels over counted positions.

    Args:
        Those of ``accuracy``.

    Returns:
        Nats per example; NaN for an example without a counted position. (example,)

    Raises:
        ShapeError: Labels or mask that don't fit the logits.
        MetricError: NaN logits, or a label that is no class.

    Examples:
        >>> cross_entropy(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))
        tensor([0.6931])
    """
    keep = _check(logits, labels, mask)
    safe = labels.masked_fill(~keep, 0)
    loss = -logits.to(_real(logits)).log_softmax(-1).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    return _per_example(loss, keep)


def kl(logits: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL divergence of a run's next-token distribution from the reference's: KL(reference || run).

    Args:
        logits: The edited run. (example, ..., class)
        reference: The unedited run. (example, ..., class)
        mask: True where a position counts. (example, ...)

    Returns:
        Nats per example, 0 where the runs agree. (example,)

    Raises:
        ShapeError: Runs or mask of different shapes.
        MetricError: NaN logits.

    Examples:
        >>> kl(torch.zeros(1, 2), torch.zeros(1, 2))
        tensor([0.])
    """
    logits, reference = tensor_of("logits", logits), tensor_of("reference", reference)
    if logits.shape != reference.shape:
        raise ShapeError(f"both runs need logits of one shape, got {tuple(logits.shape)} and {tuple(reference.shape)}")
    keep = _check(logits, None, mask, labelled=False)
    _check(reference, None, mask, labelled=False)
    new, old = (x.to(_real(x)).log_softmax(-1) for x in (logits, reference))
    # An impossible token (probability 0, logit -inf) adds nothing where the reference rules it out too.
    term = torch.where(old.isneginf(), torch.zeros_like(old), old.exp() * (old - new))
    return _per_example(term.sum(-1), keep)


def logit_diff(logits: Tensor, answers: Tensor) -> Tensor:
    """Logit of the clean answer minus logit of the corrupted one.

    Args:
        logits: Logits at the read position of each pair. (example, class)
        answers: [clean answer, corrupted answer]. (example, 2)

    Returns:
        In logits, positive where the model prefers the clean answer. (example,)

    Raises:
        ShapeError: Answers that aren't a pair for each example.
        MetricError: NaN logits, or an answer that is no class.

    Source:
        Heimersheim and Nanda 2024, arXiv 2404.15255, section 3.

    Examples:
        >>> logit_diff(torch.tensor([[1.0, 4.0, 0.0]]), torch.tensor([[1, 0]]))
        tensor([3.])
    """
    if not isinstance(logits, Tensor) or not isinstance(answers, Tensor):
        raise ShapeError(f"logit_diff needs two tensors, got {type(logits).__name__} and {type(answers).__name__}")
    if logits.ndim != 2 or answers.shape != (len(logits), 2):
        raise ShapeError(
            f"logit_diff needs logits (example, class) and answers (example, 2), "
            f"got {tuple(logits.shape)} and {tuple(answers.shape)}. "
            "Take the logits at each pair's read position first."
        )
    _check(logits, answers[:, 0], None)
    _check(logits, answers[:, 1], None)
    found = logits.gather(1, answers)
    return found[:, 0] - found[:, 1]


def mse(outputs: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error over counted positions.

    Args:
        outputs: Numbers that the model gives. (example, ...)
        values: The right ones. (example, ...)
        mask: True where a position counts; default: everywhere. (example, ...)

    Returns:
        In the squared unit of the values; NaN for an example without a counted position. (example,)

    Raises:
        ShapeError: Tensors of different shapes.

    Examples:
        >>> mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor([0., 4.])
    """
    outputs, values, keep = _numbers(outputs, values, mask)
    return _per_example((outputs - values).square(), keep)


def r2(outputs: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the variance of the values that the outputs explain, over all examples.

    Args:
        Those of ``mse``.

    Returns:
        1 for exact outputs, 0 for the mean of the values, negative for worse. ()

    Raises:
        ShapeError: Tensors of different shapes.
        MetricError: Values that are all equal, or none that counts.

    Examples:
        >>> r2(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 6.0]))
        tensor(0.3571)
    """
    outputs, values, keep = _numbers(outputs, values, mask)
    truth, found = values[keep], outputs[keep]
    spread = (truth - truth.mean()).square().sum() if truth.numel() else torch.zeros(())
    if not bool(spread > 0):
        raise MetricError("R² is undefined: the values that count are all equal, or there are none")
    return 1 - (truth - found).square().sum() / spread


class WithReferences:
    """A metric, and tensors that belong to the examples, which reach it by keyword.

    Args:
        fn: The metric.
        references: Tensors by keyword. (example, ...)
    """

    def __init__(self, fn: Callable[..., Tensor], references: Mapping[str, Tensor]) -> None:
        self.fn, self.references = fn, dict(references)
        self.__name__ = getattr(fn, "__name__", "custom")

    def __call__(self, *args: Tensor, **data: Tensor) -> Tensor:
        """What ``fn`` gives for one batch: a number for each example, or for each position."""
        return self.fn(*args, **data)


def with_references(fn: Callable[..., Tensor], **references: Tensor) -> WithReferences:
    """A metric with tensors of its own for the examples, cut to each batch: a reference run, weights, other answers.

    Args:
        fn: The metric, as the primitive asks for it; it gets each reference by keyword.
        references: One row for each example of the batch or the pairs. (example, ...)

    Returns:
        The metric, to be passed as ``metric=``.

    Raises:
        InputError: No references, or one that isn't a tensor.

    Examples:
        >>> metric = with_references(lambda logits, answers, reference: kl(logits, reference), reference=torch.zeros(4, 9))
        >>> sorted(metric.references)
        ['reference']
    """
    if not references or not all(isinstance(value, Tensor) for value in references.values()):
        raise InputError(
            "with_references needs tensors (example, ...) by keyword: with_references(fn, reference=logits)"
        )
    return WithReferences(fn, references)


def recovered(patched: Tensor, clean: Tensor, corrupted: Tensor) -> Tensor:
    """Fraction of the clean-corrupted gap that a patch restores.

    Args:
        patched: Metric after each patch, in the same unit as the others. (...)
        clean: Metric on the clean run; anything that broadcasts to ``patched``. ()
        corrupted: Metric on the corrupted run. ()

    Returns:
        A fraction: 0 at the corrupted run, 1 at the clean run; not clipped. (...)

    Raises:
        MetricError: clean and corrupted are equal, so there is no gap to restore.
        ShapeError: Shapes that don't broadcast.

    Source:
        Heimersheim and Nanda 2024, arXiv 2404.15255, section 3.

    Examples:
        >>> recovered(torch.tensor([[1.0]]), torch.tensor(2.0), torch.tensor(0.0))
        tensor([[0.5000]])
    """
    patched, clean, corrupted = (
        tensor_of(name, value).to(torch.promote_types(tensor_of(name, value).dtype, torch.float32))
        for name, value in (("patched", patched), ("clean", clean), ("corrupted", corrupted))
    )
    try:
        gap = clean - corrupted
        torch.broadcast_shapes(patched.shape, gap.shape)
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (patched, clean, corrupted))
        raise ShapeError(f"patched, clean and corrupted don't broadcast: {shapes}") from None
    if bool((gap == 0).any()):
        raise MetricError(
            "clean and corrupted metric are equal: there is no gap to restore. Drop such pairs, "
            "or take the ratio of means over pairs (probelens.stats.ratio_of_means)."
        )
    return (patched - corrupted) / gap


def _numbers(outputs: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    outputs, values = tensor_of("outputs", outputs), tensor_of("values", values)
    keep = torch.ones(outputs.shape, dtype=torch.bool) if mask is None else tensor_of("mask", mask).bool()
    if not outputs.ndim or not outputs.shape == values.shape == keep.shape:
        raise ShapeError(
            f"outputs, values and mask need one shape (example, ...), got {tuple(outputs.shape)}, {tuple(values.shape)} and "
            f"{tuple(keep.shape)}"
        )
    return outputs.to(_real(outputs)), values.to(_real(outputs)), keep.to(outputs.device)


def _check(logits: Tensor, labels: Tensor | None, mask: Tensor | None, labelled: bool = True) -> Tensor:
    """Check a metric's inputs; the mask of counted positions."""
    for name, other in (("logits", logits), ("labels", labels), ("mask", mask)):
        wanted = {"logits": True, "labels": labelled, "mask": mask is not None}[name]
        if wanted and not isinstance(other, Tensor):
            raise ShapeError(f"{name} must be a tensor, got a {type(other).__name__}")
    if logits.dtype == torch.bool:
        raise MetricError("logits must be numbers, got torch.bool")
    lead = logits.shape[:-1]
    if logits.ndim < 2 or not logits.shape[-1]:
        raise ShapeError(f"logits must be (example, ..., class), got shape {tuple(logits.shape)}")
    for name, other in (("labels", labels), ("mask", mask)):
        if other is not None and other.shape != lead:
            raise ShapeError(
                f"{name} must have the logits' shape without classes {tuple(lead)}, got {tuple(other.shape)}"
            )
    keep = torch.ones(lead, dtype=torch.bool, device=logits.device) if mask is None else mask.bool()
    if bool((logits.isnan().any(-1) & keep).any()):
        raise MetricError("logits are NaN at a counted position: the run before this metric went wrong")
    if labels is not None:
        if labels.is_floating_point():
            raise MetricError(f"labels must be class ids (integers), got {labels.dtype}")
        counted = labels[keep]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < logits.shape[-1]:
            raise MetricError(
                f"labels run from {int(counted.min())} to {int(counted.max())}, but there are "
                f"{logits.shape[-1]} classes: mask the positions that have no label"
            )
    return keep


def _real(logits: Tensor) -> torch.dtype:
    # Half precision has 8 to 11 bits: too few for a mean over positions.
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _per_example(values: Tensor, keep: Tensor) -> Tensor:
    if values.ndim == 1:
        return torch.where(keep, values, torch.nan)
    return torch.where(keep, values, 0.0).flatten(1).sum(1) / keep.flatten(1).sum(1)

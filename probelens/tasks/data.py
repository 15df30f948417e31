"""Batch and PatchPairs: labelled sequences, and clean/corrupted pairs for patching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.tasks.examples import Constant, Examples

__all__ = ["IGNORE", "Batch", "Constant", "Examples", "Exclude", "PatchPairs", "parts_of"]

IGNORE = -100
"""Label written where the mask is False: the class that ``torch.nn.functional.cross_entropy`` skips."""

Index = int | slice | Sequence[int] | Tensor


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Batch:
    """Inputs of a model with labels, at every position or for each example.

    Args:
        inputs: Token ids (example, pos); features (example, pos, feature), pictures (example, channel, h, w) or other
            floats; or a mapping of the forward's own arguments, each (example, ...), or marked as shared by all examples
            with ``pl.Constant``.
        labels: One tensor per label name, each (example, pos) or (example,): integers are classes, of any ids from 0;
            floats are values.
        mask: True where the labels count; False on BOS and padding. All True when left out. (example, pos), or (example,)
        groups: What a split keeps together: the sequence, or the module a piece of code comes from. Numbered
            0, 1, … when left out. (example,) int64
        attention_mask: True on real tokens, False on padding, which the model then ignores; labels on padding
            don't count. ``mask`` isn't passed to the model: it is enough where padding on the right can't affect
            an earlier position. A mapping may hold its own. (example, pos) bool
        tokens: Another name of ``inputs``, for token ids alone. (example, pos) int64

    Raises:
        ShapeError: Inputs without an axis of examples, or labels, a mask or groups that don't fit them.
        InputError: A wrong dtype, a negative token, a negative class or a value that is no number where the mask is True.

    Examples:
        >>> tokens, labels = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[0, 1, 0], [1, 0, 1]])
        >>> batch = Batch(tokens, {"state": labels, "first": labels[:, 0]})
        >>> len(batch), batch.length
        (2, 3)
        >>> batch[1:].labels["state"], batch[1:].labels["first"]
        (tensor([[1, 0, 1]]), tensor([1]))
        >>> Batch({"series": torch.zeros(5, 8, 3), "lengths": torch.full((5,), 8)}, {"sum": torch.zeros(5)})
        Batch(5 examples × 8 positions of series (5, 8, 3), lengths (5,), labels: sum)
    """

    inputs: Any
    labels: dict[str, Tensor]
    mask: Tensor
    groups: Tensor
    attention_mask: Tensor | None

    def __init__(
        self, inputs: Any = None, labels: Mapping[str, Tensor] | None = None, mask: Tensor | None = None,
        groups: Tensor | None = None, attention_mask: Tensor | None = None, *, tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        if (inputs is None) == (tokens is None):
            raise InputError("a Batch needs inputs: token ids (example, pos), features, or a mapping of arguments.")
        examples = Examples(_inputs("inputs", inputs) if tokens is None else _tokens("tokens", tokens))
        main, n = examples.main, len(examples)
        labels = {} if labels is None else labels
        if not isinstance(labels, Mapping):
            raise InputError(
                f"labels is a {type(labels).__name__}; it must be a dict of label name to tensor. "
                'Wrap a single one: {"state": labels}.'
            )
        found = {str(name): _values(f"labels[{name!r}]", values) for name, values in labels.items()}
        shape = _lead(examples, [*found.values(), mask])
        for name, values in found.items():
            if tuple(values.shape) not in ((n,), shape):
                raise ShapeError(
                    f"labels[{name!r}] has shape {tuple(values.shape)}; it must be {shape}, one per position, "
                    f"or ({n},), one per example."
                    if len(shape) == 2
                    else f"labels[{name!r}] has shape {tuple(values.shape)}; it must be {shape}, one per example."
                )
        mask = _mask(mask, shape, main.device)
        if attention_mask is None:
            attention_mask = examples.attention_mask
        if attention_mask is not None:
            attention_mask = torch.as_tensor(attention_mask).bool()
            if examples.plain or attention_mask.shape == shape:
                mask = mask & _mask(attention_mask, shape, main.device)
        groups = torch.arange(n, device=main.device) if groups is None else groups
        groups = _integers("groups", groups, (n,), "one id per sequence")
        for name, values in found.items():
            counted = values[_counts(mask, values)]
            if values.is_floating_point():
                if not bool(torch.isfinite(counted).all()):
                    raise InputError(
                        f"labels[{name!r}] holds NaN or infinity where the mask is True. Set the mask to False there."
                    )
            elif bool((counted < 0).any()):
                raise InputError(
                    f"labels[{name!r}] has negative class ids where the mask is True; class ids start at 0. "
                    "Set the mask to False at positions without a label."
                )
        vars(self).update(inputs=examples.inputs, labels=found, mask=mask, groups=groups, attention_mask=attention_mask)

    def __repr__(self) -> str:
        labels = ", ".join(self.labels) or "none"
        if self.examples.plain:
            return f"Batch({len(self)} sequences × {self.length} positions, labels: {labels})"
        size = f"{len(self)} examples" + (f" × {self.length} positions" if self.mask.ndim == 2 else "")
        return f"Batch({size} of {self.examples.describe()}, labels: {labels})"

    @functools.cached_property
    def examples(self) -> Examples:
        """The inputs, to be cut by example."""
        return Examples(self.inputs)

    @property
    def tokens(self) -> Tensor:
        """The token ids. (example, pos)

        Raises:
            InputError: The inputs are no tokens.
        """
        found = self.examples.tokens
        if found is None:
            raise InputError(f"this batch has no tokens (example, pos): its inputs are {self.examples.describe()}.")
        return found

    @property
    def length(self) -> int:
        """Number of positions, BOS and padding included; 1 where inputs and labels have no axis of positions."""
        return self.mask.shape[1] if self.mask.ndim == 2 else 1

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, index: Index) -> Batch:
        """The chosen sequences as a Batch; a single integer gives a batch of one."""
        at = _index(index, len(self), self.mask.device)
        return self._map(lambda values: values[at])

    def to(self, device: str | torch.device) -> Batch:
        """The same batch with every tensor on ``device``.

        Args:
            device: The device.

        Returns:
            A new batch.
        """
        return self._map(lambda values: values.to(device))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        labels = {name: fn(values) for name, values in self.labels.items()}
        attention = None if self.attention_mask is None else fn(self.attention_mask)
        return Batch(self.examples.map(fn), labels, fn(self.mask), fn(self.groups), attention)


@dataclass(frozen=True, eq=False)
class PatchPairs:
    """Clean and corrupted sequences, where they differ, where to read, and the two right answers.

    Args:
        clean: Token ids. (example, pos) int64
        corrupted: Token ids of the same shape. (example, pos) int64
        edit_pos: A position at which the two differ; tasks make it the only one. (example,) int64
        read_pos: Position whose logits are read. (example,) int64
        answers: [clean answer, corrupted answer], ids into the model's logits. (example, 2)
        mask: True on real tokens, False on padding. All True when left out. (example, pos) bool
        label: Name of the label whose classes the answers are, or "".

    Raises:
        ShapeError: The tensors don't fit each other.
        InputError: A wrong dtype, a position outside the sequence, equal tokens at edit_pos, or equal answers.

    Examples:
        >>> pairs = PatchPairs(
        ...     clean=torch.tensor([[0, 1, 1]]), corrupted=torch.tensor([[1, 1, 1]]),
        ...     edit_pos=torch.tensor([0]), read_pos=torch.tensor([2]), answers=torch.tensor([[0, 1]]))
        >>> len(pairs), pairs.length
        (1, 3)
    """

    clean: Tensor
    corrupted: Tensor
    edit_pos: Tensor
    read_pos: Tensor
    answers: Tensor
    mask: Tensor = None  # type: ignore[assignment]  # a Tensor after __post_init__
    label: str = ""

    def __post_init__(self) -> None:
        clean = _tokens("clean", self.clean)
        corrupted = _tokens("corrupted", self.corrupted)
        if corrupted.shape != clean.shape:
            raise ShapeError(
                f"corrupted is {tuple(corrupted.shape)} and clean is {tuple(clean.shape)}; they must be "
                "equal. Pad the shorter sequences and pass mask."
            )
        n, length = clean.shape
        mask = _mask(self.mask, tuple(clean.shape), clean.device)
        edit = _integers("edit_pos", self.edit_pos, (n,), "one position per example")
        read = _integers("read_pos", self.read_pos, (n,), "one position per example")
        answers = _integers("answers", self.answers, (n, 2), "[clean answer, corrupted answer] per example")
        for name, values in (("edit_pos", edit), ("read_pos", read)):
            if bool(((values < 0) | (values >= length)).any()):
                raise InputError(
                    f"{name} runs from {int(values.min())} to {int(values.max())}; "
                    f"with {length} positions it must be from 0 to {length - 1}. Count from the left."
                )
        rows = torch.arange(n, device=clean.device)
        same = clean[rows, edit] == corrupted[rows, edit]
        if bool(same.any()):
            raise InputError(
                f"clean and corrupted are equal at edit_pos in {int(same.sum())} of {n} examples, first "
                f"in example {int(same.nonzero()[0])}; a pair must differ there. Drop them or fix edit_pos."
            )
        if bool((answers < 0).any()):
            raise InputError("answers has negative ids; they index the model's logits, so they start at 0.")
        tied = answers[:, 0] == answers[:, 1]
        if bool(tied.any()):
            raise InputError(
                f"both answers are equal in {int(tied.sum())} of {n} examples, first in example "
                f"{int(tied.nonzero()[0])}; a logit difference needs two. Drop pairs with equal answers."
            )
        vars(self).update(clean=clean, corrupted=corrupted, edit_pos=edit, read_pos=read, answers=answers, mask=mask)

    def __repr__(self) -> str:
        return f"PatchPairs({len(self)} pairs × {self.length} positions, label: {self.label or 'none'})"

    @property
    def length(self) -> int:
        """Number of positions, BOS and padding included."""
        return self.clean.shape[1]

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: Index) -> PatchPairs:
        """The chosen pairs as PatchPairs; a single integer gives one pair."""
        at = _index(index, len(self), self.clean.device)
        return self._map(lambda values: values[at])

    def to(self, device: str | torch.device) -> PatchPairs:
        """The same pairs with every tensor on ``device``.

        Args:
            device: The device.

        Returns:
            New pairs.
        """
        return self._map(lambda values: values.to(device))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> PatchPairs:
        return replace(self, **_mapped(self, fn))


Exclude = Batch | Tensor | Iterable[Batch | Tensor] | Mapping[str, Batch]


def parts_of(exclude: Exclude | None) -> list[Batch | Tensor]:
    """The batches or tokens that an exclusion consists of.

    Args:
        exclude: What `Task.sample` takes as ``exclude``.

    Returns:
        Each batch or tensor of tokens (batch, pos), none for None.
    """
    if exclude is None:
        return []
    if isinstance(exclude, Mapping):
        return list(exclude.values())
    return [exclude] if isinstance(exclude, Batch | Tensor) else list(exclude)


def _mapped(data: Any, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: fn(values) for name, values in vars(data).items() if isinstance(values, Tensor)}


def _integers(name: str, values: Any, shape: tuple[int, ...], meaning: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise InputError(f"{name} is a {type(values).__name__}; it must be a tensor ({meaning}). Use torch.as_tensor.")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InputError(f"{name} has dtype {values.dtype}; it must be int64 ({meaning}). Use .long().")
    if tuple(values.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(values.shape)}; it must be {shape}, {meaning}.")
    return values.long()


def _tokens(name: str, values: Any) -> Tensor:
    shape = tuple(values.shape) if isinstance(values, Tensor) else ()
    if isinstance(values, Tensor) and (len(shape) != 2 or shape[1] == 0):
        raise ShapeError(
            f"{name} has shape {shape}; it must be (batch, pos) with at least one position. "
            "Use tokens[None] for a single sequence."
        )
    tokens = _integers(name, values, shape, "token ids (batch, pos)")
    if tokens.numel() and int(tokens.min()) < 0:
        raise InputError(f"{name} has the negative id {int(tokens.min())}; token ids start at 0.")
    return tokens


def _inputs(name: str, values: Any) -> Any:
    """Inputs as given: a mapping, floats, or token ids, which are checked."""
    if isinstance(values, Mapping):
        return values
    if isinstance(values, Tensor) and values.is_floating_point() and values.ndim > 1:
        return values
    return _tokens(name, values)


def _values(name: str, values: Any) -> Tensor:
    """Labels: classes as int64, values as they are."""
    if isinstance(values, Tensor) and values.is_floating_point():
        return values
    return _integers(name, values, tuple(getattr(values, "shape", ())), "class ids or float values")


def _lead(examples: Examples, others: Sequence[Any]) -> tuple[int, ...]:
    """Shape of labels and masks: (example, pos), or (example,) where nothing says how many positions there are."""
    if examples.plain:
        return tuple(examples.main.shape)
    wide = [tuple(other.shape) for other in others if isinstance(other, Tensor) and other.ndim == 2]
    if wide:
        return len(examples), wide[0][1]
    return (len(examples),) if examples.length is None else (len(examples), examples.length)


def _mask(mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask is {found}; it must be a bool tensor, True where labels count: mask.bool().")
    if mask.shape == shape[:1] and len(shape) == 2:
        return mask[:, None].expand(shape)
    if mask.shape != shape:
        raise ShapeError(f"mask has shape {tuple(mask.shape)}; it must be {shape}, as the inputs and labels.")
    return mask


def _counts(mask: Tensor, values: Tensor) -> Tensor:
    """Where labels count, in the shape of the labels."""
    return (
        mask.any(1)
        if mask.ndim > values.ndim
        else mask
        if mask.ndim == values.ndim
        else mask[:, None].expand_as(values)
    )


def _index(index: Any, n: int, device: torch.device) -> Tensor:
    """Positions chosen by an int, slice, list, integer tensor or bool tensor, checked against n."""
    if isinstance(index, slice):
        return torch.tensor(range(n)[index], dtype=torch.long, device=device)
    try:
        at = torch.as_tensor(index, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"can't index sequences with {index!r}; use an int, a slice, a list of ints, or a tensor."
        ) from None
    if at.numel() == 0:
        at = at.long()
    if at.dtype == torch.bool:
        if at.shape != (n,):
            raise ShapeError(f"a bool index needs shape ({n},), one per sequence; it has {tuple(at.shape)}.")
        return at.nonzero()[:, 0]
    if at.is_floating_point() or at.dim() > 1:
        raise InputError(f"can't index sequences with {tuple(at.shape)} {at.dtype}; use a list of integers.")
    if at.numel() and (int(at.min()) < -n or int(at.max()) >= n):
        # IndexError, not InputError: it is what ends a for loop over the batch.
        raise IndexError(f"index {int(at.min())}…{int(at.max())} is out of range: there are {n} sequences.")
    return at.reshape(-1)

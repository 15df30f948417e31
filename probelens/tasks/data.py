"""Batch and PatchPairs: labelled sequences, and clean/corrupted pairs for patching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError

__all__ = ["IGNORE", "Batch", "Exclude", "PatchPairs", "parts_of"]

IGNORE = -100
"""Label written where the mask is False: the class that ``torch.nn.functional.cross_entropy`` skips."""

Index = int | slice | Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with a label at every position.

    Args:
        tokens: Token ids. (batch, pos) int64
        labels: One tensor of class ids per label name. each (batch, pos) int64
        mask: True where the labels count; False on BOS and padding. All True when left out. (batch, pos) bool
        groups: What a split keeps together: the sequence, or the module a piece of code comes from. Numbered
            0, 1, … when left out. (batch,) int64
        attention_mask: True on real tokens, False on padding, which the model then ignores; labels on padding
            don't count. ``mask`` isn't passed to the model: it is enough where padding on the right can't affect
            an earlier position. (batch, pos) bool

    Raises:
        ShapeError: tokens aren't two-dimensional, or labels, a mask or groups don't fit them.
        InputError: A wrong dtype, a negative token, or a negative label where the mask is True.

    Examples:
        >>> tokens, labels = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[0, 1, 0], [1, 0, 1]])
        >>> batch = Batch(tokens, {"state": labels})
        >>> len(batch), batch.length
        (2, 3)
        >>> batch[1:].labels["state"]
        tensor([[1, 0, 1]])
    """

    tokens: Tensor
    labels: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor = None  # type: ignore[assignment]  # a Tensor after __post_init__
    groups: Tensor = None  # type: ignore[assignment]  # a Tensor after __post_init__
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = _tokens("tokens", self.tokens)
        mask = _mask(self.mask, tokens, "tokens")
        attention = self.attention_mask
        if attention is not None:
            attention = _mask(torch.as_tensor(attention).bool(), tokens, "tokens")
            mask = mask & attention
        groups = torch.arange(len(tokens), device=tokens.device) if self.groups is None else self.groups
        groups = _integers("groups", groups, (len(tokens),), "one id per sequence")
        if not isinstance(self.labels, Mapping):
            raise InputError(
                f"labels is a {type(self.labels).__name__}; it must be a dict of label name to tensor. "
                'Wrap a single one: {"state": labels}.'
            )
        labels = {}
        for name, values in self.labels.items():
            values = _integers(f"labels[{name!r}]", values, tuple(tokens.shape), "one class id per token")
            if bool(((values < 0) & mask).any()):
                raise InputError(
                    f"labels[{name!r}] has negative class ids where the mask is True; class ids start at 0. "
                    "Set the mask to False at positions without a label."
                )
            labels[str(name)] = values
        vars(self).update(tokens=tokens, labels=labels, mask=mask, groups=groups, attention_mask=attention)

    def __repr__(self) -> str:
        return f"Batch({len(self)} sequences × {self.length} positions, labels: {', '.join(self.labels) or 'none'})"

    @property
    def length(self) -> int:
        """Number of positions, BOS and padding included."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Index) -> Batch:
        """The chosen sequences as a Batch; a single integer gives a batch of one."""
        at = _index(index, len(self), self.tokens.device)
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
        return replace(self, labels=labels, **_mapped(self, fn))


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
        mask = _mask(self.mask, clean, "clean")
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


def _mask(mask: Any, like: Tensor, name: str) -> Tensor:
    if mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask is {found}; it must be a bool tensor, True where labels count: mask.bool().")
    if mask.shape != like.shape:
        raise ShapeError(f"mask has shape {tuple(mask.shape)}; it must be {tuple(like.shape)}, the shape of {name}.")
    return mask


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

"""``Batch``: inputs of a model with their labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.tasks.examples import Constant, Examples, label_mask
from probelens.tasks.text import tokens_of_texts

__all__ = ["IGNORE", "Batch", "Constant", "Examples", "Exclude", "parts_of"]

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
        examples = Examples(inputs_of("inputs", inputs) if tokens is None else _tokens("tokens", tokens))
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
        mask = mask_of(mask, shape, main.device)
        if attention_mask is None:
            attention_mask = examples.attention_mask
        if attention_mask is not None:
            attention_mask = torch.as_tensor(attention_mask).bool()
            if examples.plain or attention_mask.shape == shape:
                mask = mask & mask_of(attention_mask, shape, main.device)
        groups = torch.arange(n, device=main.device) if groups is None else groups
        groups = integers("groups", groups, (n,), "one id per sequence")
        for name, values in found.items():
            counted = values[label_mask(mask, values)]
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

    @classmethod
    def from_text(
        cls, model: Any, texts: Sequence[str], labels: Mapping[str, Any] | None = None, groups: Tensor | None = None
    ) -> Batch:
        """A batch of texts, tokenized as the model does, padding told to the model and left out of the mask.

        Args:
            model: The wrapped model, with its tokenizer.
            texts: Strings.
            labels: By name, one for each text (example,), or for each token (example, pos).
            groups: As for ``Batch``. (example,)

        Returns:
            The batch; ``pos="last"`` is then the last token of each text.

        Raises:
            InputError: A model without a tokenizer, or texts that are none.
        """
        tokens, mask = tokens_of_texts(model, texts, "texts")
        given = {name: torch.as_tensor(values) for name, values in (labels or {}).items()}
        return cls(tokens, given, None, groups, None if bool(mask.all()) else mask)

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
        at = chosen_rows(index, len(self), self.mask.device)
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


def integers(name: str, values: Any, shape: tuple[int, ...], meaning: str) -> Tensor:
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
    tokens = integers(name, values, shape, "token ids (batch, pos)")
    if tokens.numel() and int(tokens.min()) < 0:
        raise InputError(f"{name} has the negative id {int(tokens.min())}; token ids start at 0.")
    return tokens


def inputs_of(name: str, values: Any) -> Any:
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
    return integers(name, values, tuple(getattr(values, "shape", ())), "class ids or float values")


def _lead(examples: Examples, others: Sequence[Any]) -> tuple[int, ...]:
    """Shape of labels and masks: (example, pos), or (example,) where nothing says how many positions there are."""
    if examples.plain:
        return tuple(examples.main.shape)
    wide = [tuple(other.shape) for other in others if isinstance(other, Tensor) and other.ndim == 2]
    if wide:
        return len(examples), wide[0][1]
    return (len(examples),) if examples.length is None else (len(examples), examples.length)


def mask_of(mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
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


def chosen_rows(index: Any, n: int, device: torch.device) -> Tensor:
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

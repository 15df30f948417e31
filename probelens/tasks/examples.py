"""``Examples``: the inputs of a model, example by example: one tensor, or a mapping of the forward's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError

__all__ = ["Constant", "Examples"]

_MAIN = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")


@dataclass(frozen=True)
class Constant:
    """An argument of the forward that is the same for all examples, in a mapping of inputs.

    Numbers, text, switches and None are constant without it.

    Args:
        value: What the forward gets.

    Examples:
        >>> Constant(torch.eye(2)).value.shape
        torch.Size([2, 2])
    """

    value: Any


class Examples:
    """The inputs of several examples, to be cut by example.

    Args:
        inputs: A tensor (example, ...); or a mapping of the forward's own arguments, whose tensors are (example, ...).

    Attributes:
        inputs: The same, with tensors in the place of arrays and lists.
        main: The tensor, or the argument of the mapping that counts examples and positions. (example, ...)

    Raises:
        InputError: No tensor among the arguments, or a value that is neither a tensor nor a constant.
        ShapeError: Arguments of different numbers of examples.
    """

    def __init__(self, inputs: Tensor | Mapping[str, Any]) -> None:
        self.inputs: Any = inputs
        self.batched: dict[str, Tensor] = {}
        if isinstance(inputs, Tensor):
            self.main = inputs
        else:
            self.inputs = found = _arguments(inputs)
            self.batched = {name: value for name, value in found.items() if isinstance(value, Tensor)}
            self.main = self.batched[_main(self.batched)]
        if not self.main.ndim:
            raise ShapeError("inputs have no axis of examples: they are a single number. Give a tensor (example, ...).")

    @classmethod
    def of(cls, inputs: Any) -> Self:
        """Those of a batch, or of inputs; Examples are given back as they are."""
        if isinstance(inputs, cls):
            return inputs
        return cls(getattr(inputs, "inputs", inputs))

    def __len__(self) -> int:
        return len(self.main)

    @property
    def tokens(self) -> Tensor | None:
        """The token ids (example, pos); None where the main argument isn't integers of two axes."""
        main = self.main
        return main if main.ndim == 2 and not main.is_floating_point() and main.dtype != torch.bool else None

    @property
    def plain(self) -> bool:
        """Whether tokens are all there is."""
        return isinstance(self.inputs, Tensor) and self.tokens is not None

    @property
    def length(self) -> int | None:
        """Positions of tokens (example, pos) or of features (example, pos, feature); None for inputs of other axes."""
        return self.main.shape[1] if self.tokens is not None or self.main.ndim == 3 else None

    @property
    def attention_mask(self) -> Tensor | None:
        """The mapping's own mask (example, pos), True on real tokens; None without one."""
        mask = self.batched.get("attention_mask")
        return None if mask is None or mask.ndim != 2 else mask.bool()

    def rows(self, index: Any) -> Any:
        """What the model is called with for some examples: a tensor, or keywords."""
        if isinstance(self.inputs, Tensor):
            return self.inputs[index]
        return {
            name: value.value if isinstance(value, Constant) else value[index] if name in self.batched else value
            for name, value in self.inputs.items()
        }

    def map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """The inputs with every batched tensor changed; constants are left as they are."""
        if isinstance(self.inputs, Tensor):
            return fn(self.inputs)
        return {name: fn(value) if name in self.batched else value for name, value in self.inputs.items()}

    def part(self, index: Any) -> Self:
        """Some of the examples."""
        return type(self)(self.map(lambda value: value[index]))

    def copies(self) -> Tensor:
        """A number for each example, equal where all arguments are equal. (example,)"""
        parts = [self.main] if isinstance(self.inputs, Tensor) else list(self.batched.values())
        ids = torch.zeros(len(self), dtype=torch.long)
        for part in parts:
            _, found = torch.unique(part.detach().cpu().reshape(len(self), -1), dim=0, return_inverse=True)
            ids = torch.unique(torch.stack([ids, found]), dim=1, return_inverse=True)[1]
        return ids

    def describe(self) -> str:
        """The inputs in words, for messages."""
        if isinstance(self.inputs, Tensor):
            return f"{str(self.main.dtype).removeprefix('torch.')} {tuple(self.main.shape)}"
        return ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.batched.items())


def spread_mask(mask: Tensor, positions: int) -> Tensor:
    """A mask of positions (example, pos), or of examples at all positions.

    Raises ShapeError for a mask of other positions, unless it is the same at all of each example.
    """
    if mask.ndim == 2 and mask.shape[1] == positions:
        return mask
    some = mask if mask.ndim == 1 else mask.any(1)
    if mask.ndim == 2 and not torch.equal(some, mask.all(1)):
        raise ShapeError(
            f"the mask has {mask.shape[1]} positions, the activations {positions}. Give a mask of the activations' positions"
        )
    return some[:, None].expand(-1, positions)


def spread_labels(name: str, labels: Tensor, positions: int) -> Tensor:
    """Labels of positions (example, pos), or of examples at all positions; ShapeError for those of other positions."""
    if labels.ndim == 1:
        return labels[:, None].expand(-1, positions)
    if labels.shape[1] != positions:
        raise ShapeError(
            f"label {name!r} has {labels.shape[1]} positions, the activations {positions}. Give labels of the activations' "
            "positions, or one for each example"
        )
    return labels


def label_mask(mask: Tensor, labels: Tensor) -> Tensor:
    """Where labels count, in their own shape: those of examples where any position does."""
    if mask.ndim == labels.ndim:
        return mask
    return mask.any(1) if mask.ndim > labels.ndim else mask[:, None].expand_as(labels)


def _main(batched: Mapping[str, Tensor]) -> str:
    known = [name for name in _MAIN if name in batched]
    wide = [name for name, value in batched.items() if value.ndim > 1]
    return (known or wide or list(batched))[0]


def _arguments(inputs: Any) -> dict[str, Any]:
    """A mapping of arguments with tensors for arrays and lists of numbers, checked to be of equally many examples."""
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs are a {type(inputs).__name__}; they must be a tensor (example, ...), or a mapping of the forward's "
            "arguments. Use torch.as_tensor."
        )
    out: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, str | int | float | bool | Constant | type(None)):
            out[str(name)] = value
            continue
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"inputs[{name!r}] is a {type(value).__name__}; it must be a tensor (example, ...), or "
                "pl.Constant(value) where all examples share it."
            ) from None
        out[str(name)] = tensor if tensor.ndim else Constant(value)
    batched = {name: value for name, value in out.items() if isinstance(value, Tensor)}
    if not batched:
        raise InputError(f"inputs have no tensor (example, ...) among their arguments {list(out)}")
    main = _main(batched)
    n = len(batched[main])
    odd = {name: tuple(value.shape) for name, value in batched.items() if len(value) != n}
    if odd:
        raise ShapeError(
            f"inputs[{main!r}] has {n} examples, but {', '.join(f'{k!r} has shape {v}' for k, v in odd.items())}: the first "
            "axis of every argument counts examples. Mark what all examples share with pl.Constant(value)."
        )
    return out

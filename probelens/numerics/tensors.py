"""Arguments as a user gives them, checked and brought into the tensors and numbers that the library computes with."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError


def tensor_of(name: str, value: Any) -> Tensor:
    """Make a tensor of an argument; a tensor is returned as it is. Raises ``InputError`` where it holds no numbers."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise InputError(f"{name} must be a tensor or an array of numbers, got a {type(value).__name__}") from err


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Check that an argument is a whole number within its limits; ``InputError`` otherwise."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}={value!r} must be a whole number, {allowed}")
    return number


def class_numbers(labels: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Class ids numbered from 0 in ascending order, 0 where ``mask`` is False; and the id of each number.

    Examples:
        >>> class_numbers(torch.tensor([900_000, 5, 5]))
        (tensor([1, 0, 0]), tensor([     5, 900000]))
    """
    labels = labels.long() if labels.dtype == torch.bool else labels
    known = (labels if mask is None else labels[mask]).unique()
    numbers = torch.searchsorted(known, labels.contiguous()).clamp(max=max(len(known) - 1, 0))
    return numbers if mask is None else numbers.where(mask, 0), known


def to_float64(x: Tensor) -> Tensor:
    """A tensor in float64, on the CPU where its device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def flat_rows(X: Any, *labels: Any, mask: Any = None) -> tuple[Tensor, ...]:
    """Activations (..., d) as (row, d), and labels (..., *k) as (row, *k), without the rows where ``mask`` is False.

    Raises ``ShapeError`` where labels or mask don't fit the activations.
    """
    x = tensor_of("activations", X).detach()
    if x.ndim < 2 or not x.shape[-1] or not x.is_floating_point():
        raise ShapeError(f"activations must be floating point, (..., d), got {x.dtype} of shape {tuple(x.shape)}")
    lead = x.shape[:-1]
    keep = None if mask is None else tensor_of("mask", mask).bool()
    if keep is not None and keep.shape != lead:
        raise ShapeError(f"mask has shape {tuple(keep.shape)}; it must be {tuple(lead)}, as the activations without d")
    found = [x.reshape(lead.numel(), x.shape[-1])]
    for label in labels:
        z = tensor_of("labels", label).detach()
        if z.shape != lead and z.shape[:-1] != lead:
            raise ShapeError(
                f"labels have shape {tuple(z.shape)}; they must be {tuple(lead)}, as the activations without d"
            )
        found.append(z.reshape(lead.numel(), *z.shape[len(lead) :]))
    if keep is None:
        return tuple(found)
    return tuple(t[keep.reshape(-1).to(t.device)] for t in found)

"""Numbers as a user gives them, to a tensor: or an error that says what was given in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError

__all__ = ["tensor_of"]


def tensor_of(name: str, value: Any) -> Tensor:
    """A tensor as it is; anything else made into one.

    Raises:
        InputError: Nothing that numbers can be read from.

    Examples:
        >>> tensor_of("labels", [0, 1])
        tensor([0, 1])
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise InputError(
            f"{name} must be a tensor or an array of numbers, got a {type(value).__name__}"
        ) from err

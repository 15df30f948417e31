"""Shapes of activations and outputs, from one run on the first examples: what an input's own shape doesn't tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.points import HookPoint, has_positions
from probelens.hooks.trials import Untried, remembered, run_alone
from probelens.tasks.examples import Examples

Shape = tuple[int, ...]


def site_shapes(
    model: HookedModel, examples: Examples, names: Sequence[str], attention_mask: Tensor | None = None
) -> dict[str, Shape]:
    """Shapes of the activations (example, ...) at some points, for one example or a few.

    Where an argument counts something of each example, as the lengths of packed sequences do, the largest is among them.
    """
    rows = _telling(examples)
    mask = None if attention_mask is None else attention_mask[rows]

    def trial() -> dict[str, Shape]:
        with torch.no_grad(), model.undisturbed():
            _, cache = model.run_with_cache(examples.rows(rows), list(names), return_type=None, attention_mask=mask)
            return {name: tuple(cache[name].shape) for name in names}

    return remembered(model, model.module, ("shapes", tuple(names), _kinds(examples, rows), mask is None), trial)


def positions_at(
    model: HookedModel, examples: Examples, names: Sequence[str], attention_mask: Tensor | None = None
) -> dict[str, int]:
    """How many positions the activations have at each of the points that have an axis of them.

    Of plain tokens it is their own number; for any other input the first example is run.
    """
    having = [name for name in names if has_positions(model.point(name))]
    if examples.plain or (model.has_hooks() and examples.length is not None):
        return dict.fromkeys(having, examples.main.shape[1])
    shapes = site_shapes(model, examples, having, attention_mask) if having else {}
    axes = {name: model.point(name).pos_axis for name in having}
    return {name: shapes[name][axis] for name, axis in axes.items() if len(shapes[name]) > max(axis, 1)}


def output_shape(model: HookedModel, examples: Examples, attention_mask: Tensor | None = None) -> Shape:
    """Shape of the outputs of the first two examples, or of one where there are no more.

    Raises InputError where they aren't (example, ...).
    """
    n = min(2, len(examples))
    mask = None if attention_mask is None else attention_mask[:n]

    def trial() -> Shape:
        return tuple(run_alone(model, model.prepare(examples.rows(slice(n)), mask)).shape)

    kind = type(model.module).__name__
    try:
        shape = remembered(model, model.module, ("output", n, _kinds(examples, [0]), mask is None), trial)
    except Untried as err:
        raise InputError(f"this {kind} could not be run on the first {n} examples: {err}") from err
    if len(shape) not in (1, 2, 3) or shape[0] != n:
        raise InputError(
            f"this {kind} gives an output of shape {shape} for {n} examples; it must be (example, pos, class), "
            "(example, class) or (example,). Say what the answer is with pl.wrap(module, output=...)."
        )
    return shape


def _telling(examples: Examples) -> list[int]:
    """The first example, and those with the largest of the numbers that count something."""
    counts = [
        x for x in examples.batched.values() if x.ndim == 1 and not x.is_floating_point() and x.dtype != torch.bool
    ]
    return sorted({0, *(int(x.argmax()) for x in counts)})


def _kinds(examples: Examples, rows: list[int]) -> Any:
    """Names, shapes and dtypes of the inputs, without the number of examples, and the numbers that count something."""
    parts = {"": examples.main} if isinstance(examples.inputs, Tensor) else examples.batched
    return tuple(
        (name, part[rows].tolist() if part.ndim == 1 else tuple(part.shape[1:]), part.dtype)
        for name, part in parts.items()
    ).__repr__()


def one_row_each(point: HookPoint, tensor: Tensor, rows: int) -> Tensor:
    """An activation with one row for each example; a ShapeError where it has another layout."""
    if point.axes[:1] == ("batch",) and len(tensor) == 1 < rows:
        return tensor.expand(rows, *tensor.shape[1:])  # one for all, such as the positions' embedding
    if (point.axes and point.axes[0] != "batch") or len(tensor) != rows:
        raise ShapeError(
            f"{point.name!r} gives {tuple(tensor.shape)} for a batch of {rows} examples, not one row for each"
            f"{f': {point.note}' if not has_positions(point) and point.note else ''}. Take the input or the output of a "
            "module that is called with (batch, pos, ...)"
        )
    return tensor

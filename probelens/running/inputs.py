"""What a caller gives as data: a batch, tensors, text, a mapping or a dataset, as examples and the mask for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.inputs import mask_for_model, tokens_of
from probelens.hooks.model import HookedModel
from probelens.tasks.examples import Examples


def inputs_of(
    model: HookedModel, batch: Any, attention: Tensor | None
) -> tuple[Examples, Tensor | None, Tensor | None]:
    """Inputs, where positions count, and the mask to give the model."""
    inputs = getattr(batch, "inputs", None)
    if not isinstance(inputs, (Tensor, Mapping)):
        inputs = getattr(batch, "tokens", None)
    if isinstance(inputs, (Tensor, Mapping)):
        given = getattr(batch, "attention_mask", None) if attention is None else attention
        return Examples(inputs), getattr(batch, "mask", None), mask_for_model(model, given, inputs)
    if isinstance(batch, str) or (
        isinstance(batch, (list, tuple)) and batch and all(isinstance(t, str) for t in batch)
    ):
        inputs, made = tokens_of(model.adapter, batch)
        attention = made if attention is None else attention
    elif isinstance(batch, Tensor):
        inputs = batch
    elif (columns := _columns(model, batch)) is not None:
        inputs, made = _arguments(columns)
        attention = made if attention is None else attention
    else:
        try:
            inputs = torch.as_tensor(batch)
        except (TypeError, ValueError, RuntimeError) as err:
            raise InputError(
                f"can't collect from a {type(batch).__name__}. Give a Batch, tokens (example, pos), strings, "
                "or a mapping with input_ids"
            ) from err
    examples = Examples(inputs)
    if examples.main.ndim < 2:
        raise ShapeError(f"inputs must be (example, pos, ...), got shape {tuple(examples.main.shape)}")
    if attention is None:
        return examples, examples.attention_mask, None
    attention = torch.as_tensor(attention)
    if attention.ndim != 2 or len(attention) != len(examples) or attention.shape[1] != (examples.length or 0):
        raise ShapeError(
            f"attention_mask has shape {tuple(attention.shape)}, the tokens {tuple(examples.main.shape[:2])}: they must agree"
        )
    return examples, attention.bool().cpu(), mask_for_model(model, attention, inputs)


def _arguments(columns: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
    """Columns as the model's inputs: tokens alone where nothing else is there, with a mask where they were padded."""
    if "input_ids" not in columns:
        return dict(columns), None
    tokens, mask = _padded(columns["input_ids"], columns.get("attention_mask"))
    rest = {name: value for name, value in columns.items() if name not in ("input_ids", "attention_mask")}
    if not rest:
        return tokens, mask
    given = {"input_ids": tokens, **rest}
    return (given if mask is None else {**given, "attention_mask": mask.long()}), None


def _texts(column: Any) -> bool:
    return isinstance(column, (list, tuple)) and bool(column) and all(isinstance(x, str) for x in column)


def _columns(model: HookedModel, batch: Any) -> Mapping[str, Any] | None:
    """A mapping, or of a dataset or a list of its rows the columns that the forward takes; None for anything else."""
    if isinstance(batch, Mapping):
        # Rows of a dataset hold their text beside the tokens.
        return {n: v for n, v in batch.items() if "input_ids" not in batch or not _texts(v) or model.adapter.accepts(n)}
    if hasattr(batch, "column_names"):
        found = {name: batch[name] for name in batch.column_names}
    elif isinstance(batch, (list, tuple)) and batch and all(isinstance(row, Mapping) for row in batch):
        found = {name: [row[name] for row in batch] for name in batch[0] if all(name in row for row in batch)}
    else:
        return None
    taken = {
        name: value
        for name, value in found.items()
        if name in ("input_ids", "attention_mask") or model.adapter.accepts(name)
    }
    taken.pop("labels", None)
    if not taken.keys() - {"attention_mask"}:
        raise InputError(
            f"inputs need a column 'input_ids', or others that the forward takes, found {sorted(found)}. Tokenize the text "
            "first."
        )
    return taken


def _padded(ids: Any, attention: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(ids, Tensor):
        return ids, None if attention is None else torch.as_tensor(attention)
    rows = [list(row) for row in ids]
    width = max((len(r) for r in rows), default=0)
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    if attention is not None:
        return tokens, torch.tensor([list(m) + [0] * (width - len(m)) for m in attention])
    if all(len(r) == width for r in rows):
        return tokens, None
    return tokens, torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])

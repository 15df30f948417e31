"""A table of position embeddings with taps: one row serves all examples, and hooks get one for each."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.forwards import refuse_replaced_forward, swapped_forward
from probelens.hooks.switchboard import Tap

POINTS = ("hook_pos_embed", "pos_embed.hook_out")
NOTE = "position embeddings, added to the token embedding"


def instrumented(table: nn.Module, tap: Tap) -> contextlib.AbstractContextManager[None]:
    """Run a table of position embeddings with ``tap`` while the context lasts."""
    refuse_replaced_forward(table, ("torch", "transformers"))

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        rows = type(table).forward(table, *args, **kwargs)
        batch = tap.batch()
        if rows.ndim != 3 or (len(rows) == 1 and batch is None):
            raise InputError(
                f"what a {type(table).__name__} gives here, {tuple(rows.shape)}, isn't one row (pos, d_model) for each example"
            )
        if len(rows) == 1 and batch is not None:
            rows = rows.repeat(batch, 1, 1)
        for name in POINTS:
            rows = tap(name, rows)
        return rows

    return swapped_forward(table, forward, here=tap.here)

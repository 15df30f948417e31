"""Outputs of the unedited model, batch by batch, for metrics that compare an edited run with it."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.hooks.model import HookedModel
from probelens.tasks.examples import Examples


class Unedited:
    """Outputs of the unedited model for the examples that were asked for last, so that one batch of them is in memory.

    Args:
        model: The wrapped model.
        examples: Its inputs.
        attention_mask: 1 for real tokens. (example, pos)
        pos: Positions read of each example; None for the whole output. (example, read)
    """

    def __init__(
        self, model: HookedModel, examples: Examples, attention_mask: Tensor | None, pos: Tensor | None = None
    ) -> None:
        self.model, self.examples, self.mask, self.pos = model, examples, attention_mask, pos
        self._held: tuple[Tensor, Tensor] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """The outputs of some examples. (batch, ...)"""
        if self._held is None or not torch.equal(self._held[0], rows):
            mask = None if self.mask is None else self.mask[rows]
            with torch.no_grad(), self.model.undisturbed():
                out: Tensor = self.model(self.examples.rows(rows), attention_mask=mask)
            if self.pos is not None:
                pos = self.pos[rows].to(out.device)
                out = out.gather(1, pos[..., None].expand(-1, -1, out.shape[-1]))
            self._held = rows, out
        return self._held[1]

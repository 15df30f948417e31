"""Final norm and unembedding of many conditions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.hooks.model import HookedModel
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.memory import Sizes


class Readout:
    """Collects residuals of many conditions, and unembeds them together.

    Args:
        model: The wrapped model.
        read: What is kept of the logits.
        rows: Numbers of the batch's examples. (batch,)
        most: Bytes of logits that may be there at once.
    """

    def __init__(self, model: HookedModel, read: Read, rows: Tensor, most: int) -> None:
        self.model, self.read, self.rows = model, read, rows
        # Tokens whose logits may be there at once.
        self._most = most // (Sizes.width(model) * model.cfg.dtype.itemsize)
        self._tokens = 0
        self._held: list[tuple[int, Tensor]] = []
        self._values: dict[int, Tensor] = {}

    def put(self, index: int, resid: Tensor) -> None:
        """Take the residual of a condition after the last block, at the positions read. (example, read, d_model)"""
        tokens = resid.shape[0] * resid.shape[1]
        if self._tokens + tokens > self._most:
            self._flush()
        self._held.append((index, resid))
        self._tokens += tokens

    def values(self) -> dict[int, Tensor]:
        """Values by index, of all that came since the last call."""
        self._flush()
        out, self._values = self._values, {}
        return out

    def _flush(self) -> None:
        if not self._held:
            return
        logits = self.model(torch.cat([r for _, r in self._held]), start_at_layer=self.model.cfg.n_layers)
        for (index, _), part in zip(self._held, logits.split(len(self._held[0][1])), strict=True):
            self._values[index] = self.read.value(part, self.rows).detach().cpu()
        self._held, self._tokens = [], 0

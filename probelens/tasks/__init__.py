"""Tasks: strings with a known state at every position, and pairs of them that differ in one token."""

from __future__ import annotations

from probelens.tasks.base import Task
from probelens.tasks.baselines import baseline_predictions, baselines
from probelens.tasks.data import Batch, PatchPairs
from probelens.tasks.parity import Parity

__all__ = ["Batch", "Parity", "PatchPairs", "Task", "baseline_predictions", "baselines"]

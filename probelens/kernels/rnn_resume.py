"""One layer of a recurrent module for many sequences that follow a known run up to a step of their own.

The sequences are conditions of the same examples. Each joins the batch at the step where it leaves the known run,
from the state that the known run had there, so that no step is computed twice and one product serves all conditions.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.kernels.rnn_layer import State, Weights, one_step

__all__ = ["KeptLayer"]


@dataclass(frozen=True)
class KeptLayer:
    """A run of one layer in one direction, from which other runs go on.

    Args:
        mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU".
        weights: Of the layer.
        x: Its input. (pos, example, d_input)
        states: After each step: (h,) or (h, c), each (pos, example, d_hidden or d_out).
    """

    mode: str
    weights: Weights
    x: Tensor
    states: State

    @functools.cached_property
    def from_input(self) -> Tensor:
        """What each step's gates get from the input. (pos, example, gates · d_hidden)"""
        return self.weights.of_input(self.x)

    def go_on(self, x: Tensor, pos: int, begins: Sequence[int], first: State) -> tuple[Tensor, State]:
        """Run conditions on from where each begins.

        Args:
            x: Input from ``pos`` on; before its condition begins it equals the kept run's. (pos, condition · example, d_input)
            pos: Up to the first of ``begins``.
            begins: The first step of each condition that may differ from the kept run's, not decreasing. (condition,)
            first: States before step 0. each (condition · example, d_hidden)

        Returns:
            The output from ``pos`` on (pos, condition · example, d_out), the kept run's where a condition has not begun; and
            the last states.
        """
        examples, state, begun = self.x.shape[1], tuple(s[:0] for s in first), 0
        out = x.new_empty(len(x), x.shape[1], self.states[0].shape[-1])
        for t, step in enumerate(range(pos, pos + len(x))):
            # Those that run at a step are the first ones.
            now = bisect.bisect_right(begins, step) * examples
            if now > begun:
                if step == 0:
                    before = tuple(s[begun:now] for s in first)
                else:
                    before = tuple(s[step - 1].repeat((now - begun) // examples, 1) for s in self.states)
                state = tuple(torch.cat(both) for both in zip(state, before, strict=True))
                begun = now
            if now:
                share = self._of_input(x[t, :now], step)
                state = one_step(self.mode, share, state, self.weights, lambda name, tensor: tensor)
                out[t, :now] = state[0]
            out[t, now:].unflatten(0, (-1, examples))[:] = self.states[0][step]
        return out, state

    def _of_input(self, x: Tensor, step: int) -> Tensor:
        """What the gates get of the input at a step: computed only where it isn't the kept run's. (rows, gates · d_hidden)"""
        times = len(x) // self.x.shape[1]
        changed = (x.unflatten(0, (times, -1)) != self.x[step]).any(-1).flatten()
        if bool(changed.all()):
            return self.weights.of_input(x)
        share = self.from_input[step].repeat(times, 1)
        share[changed] = self.weights.of_input(x[changed])
        return share

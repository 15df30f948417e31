"""Training settings: learning rate, batches, curriculum, stopping."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from probelens.errors import InputError
from probelens.numerics.tensors import whole_number

__all__ = ["TrainConfig"]

# The least value of each whole number, and the range of each other number.
_INTEGERS = {
    "steps": 1, "batch_size": 1, "warmup": 0, "decay_steps": 0, "length": 1, "start_length": 1, "grow_by": 1,
    "eval_every": 1, "eval_sequences": 1, "seed": 0, "checkpoint_every": 1, "threads": 1,
}  # fmt: skip
_NUMBERS = {"lr": (1e-12, 1e6), "weight_decay": (0.0, 1e6), "clip": (1e-12, 1e12)}
_NUMBERS |= dict.fromkeys(("target_accuracy", "grow_at"), (0.0, 1.0))
_OPTIONAL = ("target_accuracy", "start_length", "threads")


@dataclass(frozen=True)
class TrainConfig:
    """Training settings. Everything but `checkpoint_every` and `threads` is part of a run's identity.

    The learning rate rises over `warmup` steps, stays, and falls linearly to zero over the last `decay_steps`, which
    begin once the held-out accuracy reaches the target, or in time for `steps`.

    Args:
        steps: Most steps to take, decay included.
        batch_size: Sequences per step.
        lr: Peak learning rate.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        clip: Largest norm of the gradient.
        warmup: Steps of linear warm-up.
        target_accuracy: Held-out accuracy at the full length that begins the decay; None trains for all `steps`.
        decay_steps: Steps of linear decay.
        length: Full sequence length, BOS excluded.
        start_length: Length of the first batches; None starts at the full length. Each batch that the model gets
            right at more than `grow_at` makes the next ones `grow_by` longer.
        grow_by: See `start_length`.
        grow_at: See `start_length`.
        eval_every: Steps between evaluations on held-out sequences.
        eval_sequences: Number of held-out sequences.
        seed: Fixes the data. The initial weights have their own seed, in `FormalConfig`.
        checkpoint_every: Steps between checkpoints.
        threads: CPU threads while training; None leaves torch's setting. Equal bits need equal thread counts.

    Raises:
        InputError: A value out of range.
    """

    steps: int = 2000
    batch_size: int = 64
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: int = 100
    target_accuracy: float | None = 0.99
    decay_steps: int = 100
    length: int = 40
    start_length: int | None = 6
    grow_by: int = 2
    grow_at: float = 0.98
    eval_every: int = 50
    eval_sequences: int = 256
    seed: int = 0
    checkpoint_every: int = 100
    threads: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None or name not in _OPTIONAL}
        for name, least in _INTEGERS.items():
            if name in given:
                object.__setattr__(self, name, whole_number(f"TrainConfig: {name}", given[name], least))
        for name, (low, high) in _NUMBERS.items():
            value = given.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(f"TrainConfig: {name} must be a number from {low} to {high}, not {value!r}.")
        betas = self.betas
        if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise InputError(f"TrainConfig: betas must be two numbers in [0, 1), not {betas!r}.")
        object.__setattr__(self, "betas", tuple(betas))
        if self.start_length is not None and self.start_length > self.length:
            raise InputError(
                f"TrainConfig: start_length={self.start_length} is beyond length={self.length}. "
                "Choose a shorter start, or None for no curriculum."
            )
        if self.decay_steps >= self.steps:
            raise InputError(
                f"TrainConfig: decay_steps={self.decay_steps} leaves nothing of steps={self.steps}. "
                "Choose fewer decay steps."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}

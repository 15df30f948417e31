"""The one description of a formal model: architecture, sizes, seed, all of it JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError, nearest
from probelens.numerics.tensors import whole_number

if TYPE_CHECKING:
    from probelens.tasks.base import Task

__all__ = ["ARCHITECTURES", "FormalConfig"]

ARCHITECTURES = ("transformer", "mamba", "mamba2", "lstm", "gru")
"""The architectures that `probelens.models.build` knows."""

_OPTIONAL = ("hidden_size", "d_state", "d_conv")
# 12 d_model^2 per layer is a Transformer block; the surplus brings 4 x 128 to 830K.
_PARAMETERS_PER_LAYER = 830_000 / (4 * 128**2)


@dataclass(frozen=True)
class FormalConfig:
    """A formal model: four layers, d_model 128, read as a classifier at every position.

    The model maps tokens (batch, pos) to logits (batch, pos, d_vocab). The label of position t is predicted at t, not
    at t - 1, so its class ids are the first ids of the vocabulary: `d_vocab` has to cover the tokens and the classes.
    `for_task` takes care of it.

    Args:
        arch: "transformer" (GPT-NeoX), "mamba", "mamba2", "lstm" or "gru".
        d_vocab: Number of token ids and of logits.
        n_layers: Number of blocks, or of stacked recurrent layers.
        d_model: Width of the embedding, and of the residual stream where there is one.
        seed: Fixes every initial weight.
        n_heads: Attention heads (Transformer only).
        hidden_size: Width inside a block. None takes the usual one: 4 d_model in the Transformer's MLP, 2 d_model
            channels in Mamba and Mamba-2, and for LSTM and GRU the multiple of 4 that brings 4 layers of d_model 128
            nearest to 830K parameters.
        d_state: State size per channel (Mamba: 16) or per head (Mamba-2: 128); None for these.
        d_conv: Taps of the short convolution of Mamba and Mamba-2; None for 4. With 1 it has no past tap: a model
            trained without a convolution.
        embedding_std: Standard deviation of the initial embedding. An LSTM's layer profile depends on it, so it is
            part of the description.

    Raises:
        InputError: An unknown architecture, a size that is not a positive integer, or sizes that do not divide.

    Source:
        Sizes: arXiv 2606.00926, "about 830K parameters where possible". With d_model 128 and the blocks as published
        Mamba has 0.47M and Mamba-2 0.54M.

    Examples:
        >>> FormalConfig("lstm", d_vocab=12).width
        164
        >>> FormalConfig("mamba", d_vocab=12).width
        256
    """

    arch: str
    d_vocab: int
    n_layers: int = 4
    d_model: int = 128
    seed: int = 0
    n_heads: int = 4
    hidden_size: int | None = None
    d_state: int | None = None
    d_conv: int | None = None
    embedding_std: float = 0.02

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            close = nearest(str(self.arch).lower(), ARCHITECTURES)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputError(f"unknown architecture {self.arch!r}. Allowed: {', '.join(ARCHITECTURES)}.{hint}")
        for name in ("d_vocab", "n_layers", "d_model", "n_heads", *_OPTIONAL):
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, whole_number(name, value))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, 2**63 - 1))
        std = self.embedding_std
        if isinstance(std, bool) or not isinstance(std, (int, float)) or not (math.isfinite(std) and std >= 0):
            raise InputError(f"embedding_std must be a finite number >= 0, not {std!r}.")
        object.__setattr__(self, "embedding_std", float(std))
        if self.arch == "transformer":
            if self.d_model % self.n_heads:
                raise InputError(
                    f"d_model={self.d_model} does not divide into n_heads={self.n_heads} equal heads. "
                    "Choose n_heads among the divisors of d_model."
                )
            # The rotary embedding turns a quarter of each head, in pairs.
            if self.d_head % 8:
                raise InputError(
                    f"heads of d_model / n_heads = {self.d_head} dimensions can't be rotated: the rotary "
                    "embedding needs a multiple of 8. Change d_model or n_heads."
                )
        if self.arch in ("mamba", "mamba2") and self.width % self.d_model:
            raise InputError(
                f"hidden_size={self.width} is not a multiple of d_model={self.d_model}: a {self.arch} block "
                "expands d_model by a whole factor."
            )
        if self.arch == "mamba2" and self.width % self.d_head:
            raise InputError(f"hidden_size={self.width} does not divide into heads of {self.d_head}.")

    @property
    def width(self) -> int:
        """Width inside a block: `hidden_size`, or the default where that is None."""
        if self.hidden_size is not None:
            return self.hidden_size
        if self.arch == "transformer":
            return 4 * self.d_model
        if self.arch in ("mamba", "mamba2"):
            return 2 * self.d_model
        return _recurrent_width(4 if self.arch == "lstm" else 3, self.n_layers, self.d_model)

    @property
    def d_head(self) -> int:
        """Dimensions of a head (Transformer, Mamba-2)."""
        return math.gcd(64, self.width) if self.arch == "mamba2" else self.d_model // self.n_heads

    @property
    def state_size(self) -> int:
        """State size of Mamba per channel and of Mamba-2 per head: `d_state` or the default."""
        return self.d_state if self.d_state is not None else {"mamba2": 128}.get(self.arch, 16)

    @property
    def conv_kernel(self) -> int:
        """Taps of the short convolution (Mamba, Mamba-2): `d_conv` or 4."""
        return self.d_conv if self.d_conv is not None else 4

    @classmethod
    def for_task(
        cls, arch: str, task: Task, *, label: str | Sequence[str] | None = None, **options: Any
    ) -> FormalConfig:
        """The config whose vocabulary fits a task.

        Args:
            arch: One of `ARCHITECTURES`.
            task: Gives the number of tokens and of classes.
            label: What the model will be trained on; the task's target when None. Several
                labels get disjoint ranges of logits, one after the other.
            **options: Any other field of the config.

        Returns:
            The config, with d_vocab = max(number of tokens, number of classes).

        Raises:
            InputError: A label that the task doesn't have, or a bad field.
        """
        classes = sum(task.n_classes[name] for name in labels_of(task, label))
        return cls(arch, d_vocab=max(task.d_vocab, classes), **options)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FormalConfig:
        """The config that `to_dict` described.

        Args:
            fields: The fields by name; missing ones take their defaults.

        Returns:
            The config.

        Raises:
            InputError: A field that this version doesn't know, or a bad value.
        """
        known = sorted(f.name for f in dataclasses.fields(cls))
        unknown = sorted(set(fields).difference(known))
        if unknown or not {"arch", "d_vocab"} <= set(fields):
            what = f"unknown fields {unknown}, required fields arch and d_vocab, allowed fields {known}"
            raise InputError(f"not a FormalConfig: {what}.")
        return cls(**fields)


def labels_of(task: Task, label: str | Sequence[str] | None) -> list[str]:
    """The labels that an argument ``label`` names, the task's target if None."""
    names = [task.target] if label is None else [label] if isinstance(label, str) else list(label)
    for name in names:
        if name not in task.n_classes:
            raise InputError(f"task {task.name!r} has no label {name!r}. It has: {', '.join(task.n_classes)}.")
    return names


def _recurrent_width(gates: int, n_layers: int, d_model: int) -> int:
    """The multiple of 4 for which stacked cells come nearest to the common parameter count."""

    def count(width: int) -> int:
        inputs = [d_model] + [width] * (n_layers - 1)
        return sum(gates * width * (d + width + 2) for d in inputs)

    goal = _PARAMETERS_PER_LAYER * n_layers * d_model**2
    below = 4
    while count(below + 4) <= goal:
        below += 4
    return min((below, below + 4), key=lambda width: abs(count(width) - goal))

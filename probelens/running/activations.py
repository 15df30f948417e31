"""``Activations``: what many sequences' activations at several sites are, and what can be asked of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from probelens.errors import StoreError, UnknownHookError
from probelens.hooks.shorthand import Names, NameTable
from probelens.results.result import Result
from probelens.running.stream import RECORD

__all__ = ["Activations"]


@dataclass(frozen=True, eq=False)
class Activations(Result):
    """Activations of many sequences at several sites.

    Args:
        tensors: Site name to activations. (example, pos, ...)
        layers: Site name to its place on the layer axis; −1 is the embedding.
        pos: The positions kept, counted from the start: those of all examples (pos,), or one of each (example, 1). None
            where the sites have different numbers of positions.
        mask: True where a position counts. (example, pos)
        tokens: The tokens they belong to, at all positions. (example, length)
        model: Name of the model.
        aliases: Other names of the sites.
        copies: Numbers that are equal for examples of equal inputs, which a split must keep together; None where the
            tokens up to the last labelled position say that, as in causal models. (example,)
    """

    tensors: dict[str, Tensor]
    layers: dict[str, int] = field(default_factory=dict)
    pos: Tensor | None = None
    mask: Tensor | None = None
    tokens: Tensor | None = None
    model: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    copies: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The sites, in the order in which ``resolve`` gives them: several given as a list keep its order."""
        return list(self.tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values()))) if self.tensors else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: Names) -> Tensor:
        if isinstance(name, str) and name in self.tensors:
            return self.tensors[name]
        try:
            return self.tensors[NameTable(self.tensors, self.aliases).one(name)]
        except UnknownHookError as err:
            listed = ", ".join(map(repr, self.names[:5])) + ", …" * (len(self.names) > 5)
            raise UnknownHookError(f"{err}. Collected were: {listed}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read activations back that ``save`` wrote; those that ``collect`` streamed are read by ``collect``.

        Args:
            path: A file written by ``save``.

        Returns:
            Equal activations, on the CPU.

        Raises:
            StoreError: The file is missing, damaged or of another class, or a folder of a stream.
        """
        if (Path(path) / RECORD).is_file():
            raise StoreError(
                f"{str(path)!r} is a folder that collect streams to, not a file written by save(). Call "
                f"pl.collect with the same arguments and out={str(path)!r}: a finished stream is read, and nothing runs."
            )
        return super().load(path)

    def to_dataframe(self) -> Any:
        """One row a site: layer, shape, mean, standard deviation and norm of its activations."""
        import pandas as pd

        rows = []
        for name, tensor in self.tensors.items():
            values = tensor.float()
            if self.mask is not None and self.mask.shape == tensor.shape[:2]:
                values = values[self.mask]
            rows.append(
                {
                    "site": name, "layer": self.layers.get(name), "shape": "x".join(map(str, tensor.shape)),
                    "mean": values.mean().item(), "std": values.std().item(),
                    "norm": values.norm(dim=-1).mean().item(),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def plot(self) -> Any:
        """Mean norm of the activations by layer."""
        import plotly.express as px

        return px.line(self.to_dataframe(), x="layer", y="norm", markers=True, hover_name="site")

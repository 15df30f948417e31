"""The one linear map that reads a hook point, where there is one: only there can a direction be split by what is read.

A learned direction may combine a dormant part, which the map reads and which hardly varies, with a part of the map's null
space, which varies and which nothing reads. Swapping it moves the answer although the model never uses it (Makelov et
al. 2023, arXiv 2311.17030).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probelens.hooks.forwards import submodule
from probelens.hooks.model import HookedModel

__all__ = ["Reader", "reader_of"]

_PART = 1e-4  # of a direction's length, up to which a part of it is rounding


@dataclass(frozen=True, eq=False)
class Reader:
    """What the only reader of a point can see of it.

    Args:
        basis: Orthonormal rows that span the row space of its weight; None where no single linear map reads it. (k, d)
        why: Why there is none; "" where there is one.
    """

    basis: Tensor | None
    why: str = ""

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Orthonormal rows of the parts of a span in the row space and in the null space; None where one is empty.

        Args:
            rows: Orthonormal directions. (rank, d)
        """
        if self.basis is None or not len(rows):
            return None
        seen = rows @ self.basis.mT @ self.basis
        parts = _span(seen), _span(rows - seen)
        return parts if len(parts[1]) else None


def reader_of(model: HookedModel, name: str, columns: slice = slice(None)) -> Reader:
    """The reader of a hook point, found from the module that the point is the input of.

    An edit at a module's input reaches that module only. Where the module is a plain linear layer, its weight is all that
    reads the point. Everywhere else, and where the weight may not be what runs (subclasses, adapters, offloaded or
    patched layers), there is none.

    Args:
        name: Full name of a hook point.
        columns: The features that are interchanged, those of one head for example.
    """
    point = model.point(name)
    site = point.site
    if point.kind != "boundary" or site is None or site.side != "in":
        return Reader(None, f"{name!r} is not the input of one linear map")
    if site.carry is not None or site.index not in (None, 0):
        return Reader(None, f"{name!r} reaches more than the input of {site.path!r}")
    weight = _weight(submodule(model.module, site.path), model.adapter.has_weights)
    if weight is None:
        return Reader(None, f"what reads {name!r}, {site.path!r}, is no plain linear layer with weights in memory")
    weight = weight[:, columns].double()
    out, width = weight.shape
    # An eigendecomposition of the smaller Gram matrix: the tall unembedding of a large vocabulary is never factored.
    if out >= width:
        values, vectors = torch.linalg.eigh(weight.mT @ weight)
        kept = _above(values.clamp_min(0).sqrt(), width)
        return Reader(vectors[:, kept].mT.contiguous())
    _, size, right = torch.linalg.svd(weight, full_matrices=False)
    return Reader(right[_above(size, out)].contiguous())


def _weight(module: nn.Module, runs: bool) -> Tensor | None:
    """The weight (out, in) of a plain linear layer that runs as it is; None where that isn't sure."""
    kind = type(module)
    turned = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    if not runs or not (kind is nn.Linear or turned) or "forward" in vars(module):
        return None
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.device.type == "meta":
        return None
    if not weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
        return None
    found = weight.detach().cpu()
    return found.mT if turned else found


def _above(size: Tensor, n: int) -> Tensor:
    return size > size.max().clamp_min(1e-300) * n * torch.finfo(torch.float32).eps


def _span(rows: Tensor) -> Tensor:
    _, size, right = torch.linalg.svd(rows, full_matrices=False)
    return right[size > _PART]

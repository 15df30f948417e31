"""The subspace of a probed variable by a named definition, and how much of the variance it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.linalg import covariance_of
from probelens.numerics.tensors import whole_number
from probelens.probing.directions import DEFINITIONS, Definition
from probelens.subspaces.leace import Eraser
from probelens.subspaces.subspace import Subspace

__all__ = ["between_share", "directions", "variance_share"]


def directions(
    probes: Any, label: str | None = None, definition: Definition = "class_means", *, rank: int | None = None
) -> dict[str, Subspace | Eraser]:
    """The directions of a probed variable at every site, by name.

    Args:
        probes: What ``probelens.probe`` returned.
        label: Which label; may be left out when there is one.
        definition: "class_means", the span of the class means, in which the classes differ at all; "pattern", the
            covariance of the activations with what the probe reads; "filter", the probe's own rows, which may carry
            hardly any variance; "leace", the oblique eraser.
        rank: At most so many directions, the first ones by the definition; None for all.

    Returns:
        Site to ``Subspace``, or ``Eraser`` for "leace", around the mean of the training rows. Class means differ a
        little where there is nothing to read, too: whether there is, the probes' intervals say, and the verdicts of what
        takes the directions.

    Raises:
        InputError: Not a ``ProbeResult``, an unknown definition or label, a rank under 1, or a result that was saved
            without patterns and class means.

    Source:
        Haufe et al. 2014, NeuroImage 87 (filter and pattern); Belrose et al. 2023, arXiv 2306.03819 (class means, LEACE).

    Examples:
        >>> import probelens as pl
        >>> x = torch.randn(200, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> found = directions(pl.probe({"a": x}, (x[..., 2] > 0).long()))["a"]
        >>> found.rank, int(found.basis.abs().argmax())
        (1, 2)
    """
    if not hasattr(probes, "directions") or not hasattr(probes, "sites"):
        raise InputError(
            f"directions are taken of what probelens.probe() returned, got a {type(probes).__name__}. Give that; where a "
            "primitive takes subspaces, a mapping from hook point to Subspace or Eraser will do as well"
        )
    if definition not in DEFINITIONS:
        raise InputError(f"directions={definition!r} is not known. Allowed: {', '.join(map(repr, DEFINITIONS))}")
    rank = None if rank is None else whole_number("rank", rank)
    out: dict[str, Subspace | Eraser] = {}
    for site in probes.sites:
        mean = probes.mean(site).double()
        name = definition.replace("_", " ") + (f" of {label}" if label is not None else "")
        if definition == "filter":
            rows = _filter(probes.coef(site, label))
        else:
            found = probes.directions(site, label)
            if definition == "leace":
                left, right = found.leace_left[:rank], found.leace_right[:rank]
                size = (found.leace_right[:rank] @ found.class_means.mT).norm(dim=1)
                out[site] = Eraser(left.mT.contiguous(), right.contiguous(), mean, size.clamp(max=1), name)
                continue
            rows = found.rows(definition)
        out[site] = Subspace(_in_order(rows[:rank]), mean, name)
    return out


def _filter(rows: Tensor) -> Tensor:
    rows = rows.double() - rows.double().mean(0) if len(rows) > 1 else rows.double()
    _, size, right = torch.linalg.svd(rows, full_matrices=False)
    return right[: int((size > size.max().clamp_min(1e-300) * 1e-6).sum())]


def _in_order(rows: Tensor) -> Tensor:
    """Orthonormal rows, the first k of which span the first k of the given ones."""
    if not len(rows):
        return rows
    q, r = torch.linalg.qr((rows / rows.norm(dim=1, keepdim=True)).mT)
    return q[:, r.diagonal().abs() > 1e-6].mT.contiguous()


def variance_share(space: Subspace | Eraser, covariance: Tensor) -> float:
    """The share of the activations' variance that a subspace carries, or that an eraser moves.

    Args:
        space: The subspace or eraser.
        covariance: Σ of the activations. (d, d)

    Returns:
        tr QΣQᵀ / tr Σ, 0 to 1. Of an eraser the mean square of its edit, as a share of at most 1.

    Raises:
        ShapeError: Σ of another width.
    """
    sigma = covariance_of(covariance, space.d)
    total = float(sigma.trace())
    return min(float(space.variance_removed(sigma)) / total, 1.0) if total > 0 else 0.0


def between_share(space: Subspace | Eraser, means: Tensor) -> float:
    """The share of the between-class variance that a subspace carries: how far the class means differ along it.

    Args:
        space: The subspace or eraser.
        means: Rows whose outer products sum to the between-class covariance. (class, d)

    Returns:
        0 to 1; for an eraser, the share of it that is gone afterwards.
    """
    rows = means.double()
    total = float(rows.square().sum())
    if not total:
        return 0.0
    if isinstance(space, Subspace):
        return min(float((rows @ space.basis.to(rows).mT).square().sum()) / total, 1.0)
    left = rows - rows @ space.right.to(rows).mT @ space.left.to(rows).mT
    return max(1 - float(left.square().sum()) / total, 0.0)


def spaces_of(
    subspaces: Any, label: str | None = None, definition: Definition | None = None, rank: int | None = None
) -> dict[Any, Subspace | Eraser]:
    """The subspaces that a primitive was given: a mapping as it is, of a ``ProbeResult`` what ``definition`` names.

    Raises ``InputError`` for anything else, and for a definition or rank that is asked of a mapping.
    """
    if not isinstance(subspaces, Mapping):
        # Labels given to probe() without a name are called "label" there.
        known = ["label"] if getattr(subspaces, "labels", None) == ["label"] else [label]
        return dict(directions(subspaces, known[0], definition or "class_means", rank=rank))
    for name, value in (("directions", definition), ("rank", rank)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} says what is taken of a ProbeResult, and a mapping of subspaces was given. Leave it out, "
                "or give what probelens.probe() returned"
            )
    if not subspaces:
        raise InputError("subspaces is empty. Give a mapping from hook point to Subspace or Eraser")
    for name, space in subspaces.items():
        if not isinstance(space, Subspace | Eraser):
            raise InputError(
                f"the subspace for {name!r} is a {type(space).__name__}. Give a Subspace or an Eraser, such as "
                "probelens.leace(X, y)"
            )
    return dict(subspaces)


def definition_of(subspaces: Any, definition: Definition | None) -> Definition | None:
    """The definition by which ``spaces_of`` takes subspaces; None for a mapping, whose subspaces have labels."""
    return None if isinstance(subspaces, Mapping) else definition or "class_means"

"""Subspaces fitted from activations: from probes, class means and variance.

All are in the space of the activations as they are, so that removing one is an edit of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.linalg import between_rows, eigenvectors, orthonormal_rows
from probelens.numerics.tensors import flat_rows, tensor_of, to_float64, whole_number
from probelens.subspaces.subspace import Subspace

__all__ = ["class_means", "from_probe", "mean_difference", "moments", "pca", "probe_rows", "svd", "top_pca"]

_CHUNK = 8192


def from_probe(
    probe: Any,
    mean: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    site: str | None = None,
    label: str | None = None,
    seed: int | None = None,
    rank: int | None = None,
) -> Subspace:
    """The row space of a linear probe, in the space of the activations.

    A probe fitted on standardised features z = (x − m)/s reads x along w/s: give ``scale=s``. With one row per class
    only differences of rows matter to a softmax, so the row mean is removed and the rank is at most classes − 1.

    Args:
        probe: A ``ProbeResult``; rows (class, d); one row (1, d) or (d,) for two classes; or anything with ``coef_``.
        mean: Mean activation, around which ``project_out`` works; default, for a ``ProbeResult``: of its training rows.
            (d,)
        scale: Standard deviation by which each feature was divided before the fit; none for a ``ProbeResult``, which has
            its rows in raw space already. (d,)
        site: Site of a ``ProbeResult``; None where there is only one.
        label: Label of a ``ProbeResult``, and the subspace's name; default "probe".
        seed: Seed of a ``ProbeResult``; None for the first.
        rank: Keep only the directions in which the rows differ most.

    Returns:
        Largest direction first.

    Raises:
        ShapeError: Rows, mean or scale that don't fit together.
        InputError: Rows that are all equal, no mean, or no such probe in the result.

    Source:
        Row space and rank: Ravfogel et al. 2020, arXiv 2004.07667, section 4.

    Examples:
        >>> from_probe(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), mean=torch.zeros(2)).basis.abs()
        tensor([[1., 0.]], dtype=torch.float64)
        >>> from_probe(torch.tensor([3.0, 3.0]), torch.zeros(2), scale=torch.tensor([1.0, 1e6])).rank
        1
    """
    rows = getattr(probe, "coef_", probe)
    if isinstance(getattr(probe, "sites", None), list):
        if site is None and len(probe.sites) != 1:
            raise InputError(f"the result has {len(probe.sites)} sites: give site=, one of {probe.sites[:5]}")
        where = probe.sites[0] if site is None else site
        rows = probe.coef(where, label, seed)
        mean = probe.mean(where, seed) if mean is None else mean
    if mean is None:
        raise InputError("give mean=, the mean activation: project_out sets the directions to it")
    rows = to_float64(tensor_of("the probe's rows", rows).detach())
    rows = rows[None] if rows.ndim == 1 else rows
    centre = to_float64(tensor_of("mean", mean))
    if rows.ndim != 2 or centre.shape != rows.shape[1:]:
        raise ShapeError(
            f"a probe's rows (class, d) need a mean (d,), got {tuple(rows.shape)} and {tuple(centre.shape)}"
        )
    if scale is not None:
        size = to_float64(tensor_of("scale", scale))
        if size.shape != centre.shape or not bool((size > 0).all()):
            raise ShapeError(f"scale must be {tuple(centre.shape)} and above 0, got {tuple(size.shape)}")
        rows = rows / size
    if len(rows) > 1:
        rows = rows - rows.mean(0)
    basis = orthonormal_rows(rows)
    if not len(basis):
        raise InputError("the rows of the probe are all equal, so it has no direction. Was it fitted?")
    return Subspace(_cut(basis, rank), centre, "probe" if label is None else label)


def probe_rows(probes: Any, label: str | None = None, *, rank: int | None = None) -> dict[str, Subspace]:
    """The row space of the probe at every site of a ``ProbeResult``.

    Args:
        probes: What ``probelens.probe`` returned.
        label: Label; None where there is only one.
        rank: Keep at most so many directions, those in which the rows differ most.

    Returns:
        Site to subspace. Where a probe found nothing its rows are all equal and the subspace is empty.

    Raises:
        InputError: Not a ``ProbeResult``, no such label, or several labels and none given.

    Examples:
        >>> import probelens as pl
        >>> x = torch.randn(40, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> {site: space.rank for site, space in probe_rows(pl.probe({"a": x}, (x[..., 2] > 0).long())).items()}
        {'a': 1}
    """
    if not hasattr(probes, "coef") or not hasattr(probes, "sites"):
        raise InputError(f"need what probelens.probe() returned, not a {type(probes).__name__}")
    spaces = {}
    for site in probes.sites:
        rows, mean = probes.coef(site, label), probes.mean(site)
        name = f"probe rows of {label}" if label is not None else "probe rows"
        if not bool((rows - rows.mean(0) if len(rows) > 1 else rows).any()):
            spaces[site] = Subspace(rows[:0], mean, name)
        else:
            space = from_probe(rows, mean, label=name)
            spaces[site] = space if rank is None else Subspace(_cut(space.basis, min(rank, space.rank)), mean, name)
    return spaces


def mean_difference(X: Tensor, y: Tensor, mask: Tensor | None = None, *, label: str = "mean difference") -> Subspace:
    """The line between the means of two classes.

    For two classes projecting it out makes the class means equal, which guards against every linear probe.

    Args:
        X: Activations. (..., d)
        y: Class ids. (...)
        mask: True for the rows to use. (...)
        label: Name.

    Returns:
        Rank 1, around the mean activation.

    Raises:
        ShapeError: Labels or mask that don't fit.
        InputError: Not two classes; see ``class_means`` for more.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, section 3.

    Examples:
        >>> mean_difference(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1])).rank
        1
    """
    found = class_means(X, y, mask, label=label)
    if (count := len(flat_rows(X, y, mask=mask)[1].unique())) != 2:
        raise InputError(f"a mean difference needs two classes, got {count}: use class_means")
    return found


def class_means(
    X: Tensor, y: Tensor, mask: Tensor | None = None, *, rank: int | None = None, label: str = "class means"
) -> Subspace:
    """The span of the class means around the overall mean, rank at most classes − 1.

    Args:
        Those of ``mean_difference``.
        rank: Keep only so many directions: the first eigenvectors of the between-class covariance
            Σ_k p_k (μ_k − μ)(μ_k − μ)ᵀ, in which each class has its own share p_k.

    Returns:
        Around the mean activation, the direction of the largest between-class variance first.

    Raises:
        ShapeError: Labels or mask that don't fit.
        InputError: One class, or class means that are all equal.

    Examples:
        >>> X = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
        >>> class_means(X, torch.arange(30) % 3).rank
        2
    """
    x, labels = flat_rows(X, y, mask=mask)
    if labels.ndim != 1 or labels.is_floating_point():
        raise InputError("class ids must be integers, one per row")
    ids = labels.unique()
    if len(ids) < 2:
        raise InputError(f"class means need at least two classes, got {len(ids)}")
    overall, _ = moments(x)
    basis = orthonormal_rows(between_rows(x, labels))
    if not len(basis):
        raise InputError("all class means are equal: no direction separates them linearly")
    return Subspace(_cut(basis, rank), overall, label)


def pca(X: Tensor, rank: int, mask: Tensor | None = None, *, label: str = "pca") -> Subspace:
    """The directions of largest variance.

    Args:
        X: Activations. (..., d)
        rank: How many directions.
        mask: True for the rows to use. (...)
        label: Name.

    Returns:
        Largest variance first, around the mean activation.

    Raises:
        ShapeError: A mask that doesn't fit.
        InputError: A rank that isn't between 1 and d.

    Examples:
        >>> pca(torch.tensor([[0.0, 5.0], [1.0, -5.0]]), rank=1).basis.abs().argmax()
        tensor(1)
    """
    mean, covariance = moments(X, mask)
    return top_pca(rank, covariance, mean, label=label)


def top_pca(rank: int, covariance: Tensor, mean: Tensor, *, label: str = "top pca") -> Subspace:
    """The directions of largest variance of a known covariance: the control that removes most variance at equal rank.

    Args:
        rank, label: As for ``pca``.
        covariance: Σ of the activations. (d, d)
        mean: Mean activation. (d,)

    Returns:
        Largest variance first.

    Raises:
        ShapeError: Σ and mean that don't fit together.
        InputError: A rank that isn't between 1 and d.

    Examples:
        >>> top_pca(1, torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2)).basis.abs()
        tensor([[0., 1.]], dtype=torch.float64)
    """
    _, vectors = eigenvectors(covariance)
    whole_number("rank", rank, 1, len(vectors))
    return Subspace(vectors[:, :rank].mT.contiguous(), mean, label)


def svd(X: Tensor, rank: int, mask: Tensor | None = None, *, label: str = "svd") -> Subspace:
    """The right singular vectors of the activations as they are, not centred.

    A large mean is the first direction. The subspace has mean zero: ``project_out`` and ``project_out_raw`` agree.

    Args:
        Those of ``pca``.

    Returns:
        Largest singular value first.

    Raises:
        ShapeError: A mask that doesn't fit.
        InputError: A rank that isn't between 1 and d.

    Examples:
        >>> svd(torch.tensor([[9.0, 1.0], [9.0, -1.0]]), rank=1).basis.abs()
        tensor([[1., 0.]], dtype=torch.float64)
    """
    mean, covariance = moments(X, mask)
    return top_pca(rank, covariance + torch.outer(mean, mean), torch.zeros_like(mean), label=label)


def moments(X: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and covariance (divided by n), in float64.

    Args:
        X: Activations. (..., d)
        mask: True for the rows to use. (...)

    Returns:
        (d,) and (d, d)

    Raises:
        ShapeError: A mask that doesn't fit.
        InputError: No rows, or NaN.

    Examples:
        >>> moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))[1]
        tensor([[1., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    (x,) = flat_rows(X, mask=mask)
    if not len(x):
        raise InputError("no rows: the mask is False everywhere or the activations are empty")
    parts = x.split(_CHUNK)
    mean = sum((to_float64(p).sum(0) for p in parts[1:]), to_float64(parts[0]).sum(0)) / len(x)
    covariance = torch.zeros(x.shape[1], x.shape[1], dtype=mean.dtype, device=mean.device)
    for part in parts:
        centred = to_float64(part) - mean
        covariance.addmm_(centred.mT, centred)
    if not bool(torch.isfinite(covariance).all()):
        raise InputError("activations hold NaN or infinity: mask those rows")
    return mean, covariance / len(x)


def _cut(basis: Tensor, rank: int | None) -> Tensor:
    return basis if rank is None else basis[: whole_number("rank", rank, 1, len(basis))]

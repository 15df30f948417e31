"""Erasers that know the label of what they erase: oracle LEACE, which equalises class means, and QLEACE, also covariances.

They move activations less than LEACE, which has to guess the label from the activations. In exchange they need labels
wherever they are applied, so they measure what is lost at best and are no edit for other inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.linalg import orthonormal_rows
from probelens.numerics.tensors import class_numbers, flat_rows, tensor_of, to_float64
from probelens.results.result import Result
from probelens.subspaces.leace import ConditionalLeaceFitter, Eraser, LeaceFitter

__all__ = ["BoundEraser", "OracleEraser", "QuadraticEraser", "QuadraticFitter", "bind", "oracle", "quadratic"]

_ITERATIONS = 1000


@dataclass(frozen=True)
class OracleEraser(Result):
    """Oracle LEACE: r(x, z) = x − Σ_xz Σ_zz⁺ (z − E z), what is left of x after a regression on the label.

    Args:
        coef: Σ_xz Σ_zz⁺. (d, k)
        mean_z: E z. (k,)
        mean: E x, which the map leaves in place. (d,)
        moved: Mean squared length of the edit on the rows it was fitted on.
        classes: The class ids of the columns, or None where the label is numbers. (k,)
        label: What was erased.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, section 4 (the eraser that knows z).
    """

    coef: Tensor
    mean_z: Tensor
    mean: Tensor
    moved: float
    classes: Tensor | None = None
    label: str = "oracle"

    @property
    def directions(self) -> Tensor:
        """Orthonormal rows of the directions that change. (rank, d)"""
        return orthonormal_rows(self.coef.mT)

    def __call__(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Erase from activations whose labels are known.

        Args:
            x: Activations. (..., d)
            y: Their labels, as the eraser was fitted with. (...) or (..., k)
            mask: True where to erase; elsewhere labels may be anything. (...)

        Returns:
            Activations of the same shape, dtype and device, computed in float64.

        Raises:
            InputError: No labels, or a class that wasn't in the fit.
            ShapeError: Another width, or labels that don't fit.
        """
        x, y, keep = _checked(self, x, y, mask, len(self.coef))
        if self.classes is None:
            z = y.double().reshape(*x.shape[:-1], -1)
        else:
            z = torch.nn.functional.one_hot(_columns(y, self.classes, keep), len(self.classes)).double()
        full = to_float64(x)
        shift = (z.to(full.device) - self.mean_z.to(full.device)) @ self.coef.mT.to(full.device)
        return torch.where(keep.to(full.device)[..., None], full - shift, full).to(device=x.device, dtype=x.dtype)


@dataclass(frozen=True)
class QuadraticEraser(Result):
    """QLEACE: each class is carried to the common barycenter, r(x, z) = A_z (x − E[x | z]) + E x.

    Afterwards all classes have one mean and one covariance, so no linear or quadratic discriminant tells them apart. A_z is the
    optimal transport between Gaussians from the class's covariance to the barycenter's.

    Args:
        class_means: E[x | z]. (k, d)
        maps: A_z, symmetric. (k, d, d)
        mean: E x. The concept-erasure package has the mean of the class means in its place. (d,)
        moved: Mean squared length of the edit on the rows it was fitted on.
        classes: The class ids, ascending. (k,)
        label: What was erased.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, and its package concept-erasure; Álvarez-Esteban et al. 2016, arXiv 1511.05355
        (the barycenter).
    """

    class_means: Tensor
    maps: Tensor
    mean: Tensor
    moved: float
    classes: Tensor
    label: str = "quadratic"

    @property
    def directions(self) -> Tensor:
        """All directions: covariances differ in every one of them. (d, d)"""
        return torch.eye(len(self.mean), dtype=self.mean.dtype)

    def __call__(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Erase from activations whose labels are known.

        Args:
            x: Activations. (..., d)
            y: Their classes. (...)
            mask: True where to erase. (...)

        Returns:
            As ``OracleEraser``.

        Raises:
            InputError: As ``OracleEraser``.
            ShapeError: As ``OracleEraser``.
        """
        x, y, keep = _checked(self, x, y, mask, len(self.mean))
        columns, out = _columns(y, self.classes, keep), to_float64(x).clone()
        for c, (mean, carry) in enumerate(zip(self.class_means, self.maps, strict=True)):
            rows = (keep & (columns == c)).to(out.device)
            out[rows] = (out[rows] - mean.to(out.device)) @ carry.mT.to(out.device) + self.mean.to(out.device)
        return out.to(device=x.device, dtype=x.dtype)


Labelled = OracleEraser | QuadraticEraser


@dataclass(frozen=True)
class BoundEraser(Eraser):
    """An eraser that needs labels, with the labels of one batch: it erases from activations of that batch, and no others.

    As an ``Eraser`` it has the directions that change, and the length of its edit.

    Args:
        eraser: The eraser.
        labels: Labels of the batch. (example, pos)
        mask: Where they count. (example, pos)
    """

    eraser: Labelled | None = field(default=None)
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    mask: Tensor = field(default_factory=lambda: torch.empty(0))

    def on(self, rows: Any) -> BoundEraser:
        """The same for some examples of the batch."""
        return BoundEraser(
            self.left,
            self.right,
            self.mean,
            self.correlations,
            self.label,
            self.eraser,
            self.labels[rows],
            self.mask[rows],
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Erase from the batch's own activations (example, pos, d)."""
        assert self.eraser is not None
        return self.eraser(x, self.labels, self.mask)

    def variance_removed(self, covariance: Tensor) -> float:
        """The mean squared length of the edit, on the rows that the eraser was fitted on."""
        assert self.eraser is not None
        return self.eraser.moved


def bind(eraser: Labelled, labels: Tensor, mask: Tensor) -> BoundEraser:
    """Give an eraser the labels of a batch, (example, pos), where ``mask`` says that they count."""
    rows = eraser.directions.contiguous()
    ones = torch.ones(len(rows), dtype=torch.float64)
    return BoundEraser(rows.mT.contiguous(), rows, eraser.mean, ones, eraser.label, eraser, labels, mask)


def bound(subspaces: Any, labels: Tensor, mask: Tensor) -> Any:
    """A mapping with its erasers that need labels bound to these; anything else as it is."""
    if not isinstance(subspaces, Mapping):
        return subspaces
    return {name: bind(s, labels, mask) if isinstance(s, Labelled) else s for name, s in subspaces.items()}


def oracle(X: Tensor, y: Tensor, mask: Tensor | None = None, *, given: Tensor | None = None) -> OracleEraser:
    """Fit an oracle eraser: afterwards all classes have one mean, at the least change that knowing the label allows.

    Args:
        X: Activations. (..., d)
        y: Class ids (...), or numbers, (...) or (..., k).
        mask: True for the rows to use. (...)
        given: Ids of strata: the regression is then one within strata. (...)

    Returns:
        An eraser, called as ``eraser(x, y)``.

    Raises:
        ShapeError: Labels or mask that don't fit.
        InputError: NaN, negative class ids, or one class only (in every stratum).

    Source:
        Belrose et al. 2023, arXiv 2306.03819, section 4.

    Examples:
        >>> X = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> y = (X[:, 1] > 0).long()
        >>> after = oracle(X, y)(X, y)
        >>> bool(torch.allclose(after[y == 0].mean(0), after[y == 1].mean(0), atol=1e-6))
        True
    """
    if given is not None:
        return oracle_of(ConditionalLeaceFitter().update(X, y, given, mask))
    return oracle_of(LeaceFitter().update(X, y, mask))


def oracle_of(fitter: LeaceFitter | ConditionalLeaceFitter) -> OracleEraser:
    """The oracle eraser from what a fitter of LEACE collected."""
    if isinstance(fitter, ConditionalLeaceFitter):
        fitter = fitter.whole()
    fitter.eraser  # noqa: B018  says what is wrong with the rows
    zz = fitter.label_covariance
    coef = fitter.cross_covariance @ torch.linalg.pinv(zz, hermitian=True, rtol=1e-10)
    moved = float(((coef @ zz) * coef).sum())
    return OracleEraser(coef, fitter.mean_label, fitter.mean, moved, fitter.classes)


class QuadraticFitter:
    """Fits a quadratic eraser from means and covariances of each class that are collected batch by batch.

    Units:
        Memory: k d² numbers in float64. Time: O(n d²) to collect, O(k d³) for each step to the barycenter.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, and its package concept-erasure.

    Examples:
        >>> gen = torch.Generator().manual_seed(0)
        >>> y = torch.randint(2, (500,), generator=gen)
        >>> x = torch.randn(500, 3, generator=gen).double() * (1 + y[:, None])
        >>> after = QuadraticFitter().update(x, y).eraser(x, y)
        >>> bool(torch.allclose(torch.cov(after[y == 0].mT), torch.cov(after[y == 1].mT)))
        True
    """

    def __init__(self) -> None:
        self._parts: dict[int, LeaceFitter] = {}

    def update(self, X: Tensor, y: Tensor, mask: Tensor | None = None) -> QuadraticFitter:
        """Add a batch.

        Args:
            X: Activations. (..., d)
            y: Class ids. (...)
            mask: True for the rows to use. (...)

        Returns:
            The fitter itself.

        Raises:
            ShapeError: Labels, mask or width that don't fit.
            InputError: NaN, or labels that aren't class ids.
        """
        x, z = flat_rows(X, y, mask=mask)
        if z.ndim != 1 or z.is_floating_point():
            raise InputError(
                "a quadratic eraser needs integer class ids, one per row. For numbers use oracle or leace."
            )
        numbers, ids = class_numbers(z)
        for c, one in enumerate(ids.tolist()):
            rows = (numbers == c).to(x.device)
            self._parts.setdefault(one, LeaceFitter()).update(x[rows], numbers.new_zeros(int(rows.sum())))
        return self

    @property
    def eraser(self) -> QuadraticEraser:
        """The eraser of everything collected so far.

        Raises:
            InputError: Fewer than two classes, or a class with no more rows than the width.
        """
        ids = sorted(self._parts)
        if len(ids) < 2:
            raise InputError(f"{len(ids)} classes: a quadratic eraser needs at least 2. Check labels and mask.")
        parts = [self._parts[one] for one in ids]
        d, few = len(parts[0].mean), min(range(len(ids)), key=lambda c: parts[c].n)
        if parts[few].n <= d:
            raise InputError(
                f"class {ids[few]} has {parts[few].n} rows at width {d}, too few for its covariance. Give each class more rows "
                "than the width, or use method 'oracle', which needs its mean only."
            )
        n = torch.tensor([part.n for part in parts], dtype=torch.float64)
        means = torch.stack([part.mean for part in parts])
        sigmas = torch.stack([part.covariance * part.n / (part.n - 1) for part in parts])
        shares = (n / n.sum()).to(means)
        maps = _transport(sigmas, _barycenter(sigmas, shares))
        mean = shares @ means
        off = maps - torch.eye(d).to(maps)
        length = (means - mean).square().sum(1) + ((off @ sigmas) * off).sum((1, 2))
        return QuadraticEraser(means, maps, mean, float(shares @ length), torch.tensor(ids))


def quadratic(X: Tensor, y: Tensor, mask: Tensor | None = None) -> QuadraticEraser:
    """Fit a quadratic eraser: afterwards all classes have one mean and one covariance.

    Args:
        Those of ``QuadraticFitter.update``.

    Returns:
        An eraser, called as ``eraser(x, y)``.

    Raises:
        ShapeError: Labels or mask that don't fit.
        InputError: NaN, labels that aren't class ids, one class only, or a class with no more rows than the width.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, and its package concept-erasure.
    """
    return QuadraticFitter().update(X, y, mask).eraser


def _roots(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric root of a covariance and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(sigma)
    values = values.clamp(min=0)[..., None, :]
    keep = values > values[..., -1:] * sigma.shape[-1] * torch.finfo(sigma.dtype).eps
    return vectors * values.sqrt() @ vectors.mT, vectors * torch.where(keep, values.rsqrt(), 0.0) @ vectors.mT


def _transport(source: Tensor, to: Tensor) -> Tensor:
    """The optimal transport from N(0, source) to N(0, to), a symmetric matrix."""
    root, inverse = _roots(source)
    return inverse @ _roots(root @ to @ root)[0] @ inverse


def _barycenter(sigmas: Tensor, shares: Tensor) -> Tensor:
    """Covariance whose mean squared Wasserstein distance from the classes is least: a fixed point of the mean transport."""
    centre = (shares[:, None, None] * sigmas).sum(0)
    for _ in range(_ITERATIONS):
        root, inverse = _roots(centre)
        mean_root = (shares[:, None, None] * _roots(root @ sigmas @ root)[0]).sum(0)
        step = inverse @ mean_root @ inverse
        last, centre = centre, step @ centre @ step.mT
        centre = (centre + centre.mT) / 2
        if float((centre - last).norm()) <= 1e-14 * float(last.norm()):
            break
    return centre


def _checked(eraser: Labelled, x: Any, y: Any, mask: Any, d: int) -> tuple[Tensor, Tensor, Tensor]:
    if y is None:
        raise InputError(
            f"the {eraser.label} eraser needs the labels of the activations that it erases from, so it can't be a hook on other "
            "inputs or while generating. Call it as eraser(x, y), or use LEACE, which reads the label from the activations."
        )
    x, y = tensor_of("activations", x), tensor_of("labels", y)
    lead = x.shape[:-1]
    if x.shape[-1:] != (d,):
        raise ShapeError(f"eraser {eraser.label!r} was fitted on width {d}, got activations {tuple(x.shape)}")
    if y.shape[: len(lead)] != lead:
        raise ShapeError(
            f"labels have shape {tuple(y.shape)}, the activations are {tuple(x.shape)}: the {eraser.label} eraser takes the "
            "labels of just these activations. At a recurrent state use LEACE."
        )
    keep = torch.ones(lead, dtype=torch.bool) if mask is None else tensor_of("mask", mask).bool().cpu().expand(lead)
    return x, y.cpu(), keep


def _columns(y: Tensor, classes: Tensor, keep: Tensor) -> Tensor:
    """The place of each class id among those of the fit; 0 where ``keep`` is False."""
    ids = classes.cpu()
    columns = torch.searchsorted(ids, y.long().contiguous()).clamp(max=len(ids) - 1)
    unknown = keep & (ids[columns] != y)
    if bool(unknown.any()):
        raise InputError(
            f"class {int(y[unknown][0])} is not among the {len(ids)} classes that the eraser was fitted on. Fit it on rows of every "
            "class, or leave these rows out by the mask."
        )
    return columns.where(keep, 0)

"""LEACE: the smallest affine edit of activations after which no linear probe does better than chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.linalg import covariance_of, pseudo_inverse, whitening
from probelens.numerics.tensors import class_numbers, flat_rows, tensor_of, to_float64
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ConditionalLeaceFitter", "Eraser", "LeaceFitter", "leace"]

_CHUNK = 8192  # rows converted to float64 at once
_MAX_CLASSES = 20_000  # of more, such as hashes, the covariance would fill the memory


@dataclass(frozen=True)
class Eraser(Result):
    """The affine map r(x) = x − L R (x − μ), with I − L R a projection.

    It is oblique: what it subtracts leaves the class means equal at the least expected change of x.

    Args:
        left: L, the directions that change. (d, rank)
        right: R, the directions that are read. (rank, d)
        mean: μ, which the map leaves in place. (d,)
        correlations: Canonical correlations that were erased, largest first. (rank,)
        label: What was erased.

    Source:
        Belrose et al. 2023, arXiv 2306.03819.
    """

    left: Tensor
    right: Tensor
    mean: Tensor
    correlations: Tensor
    label: str = ""

    @property
    def rank(self) -> int:
        """Number of directions erased; at most classes − 1."""
        return self.right.shape[0]

    @property
    def d(self) -> int:
        """Width of the activations."""
        return self.right.shape[1]

    @property
    def matrix(self) -> Tensor:
        """I − L R. (d, d)"""
        return torch.eye(self.d, dtype=self.left.dtype, device=self.left.device) - self.left @ self.right

    def __call__(self, x: Tensor) -> Tensor:
        """Erase from activations (..., d); returns the same shape, dtype and device, computed in float64.

        Raises:
            ShapeError: ``x`` has another width.
        """
        x = tensor_of("activations", x)
        if x.shape[-1:] != (self.d,):
            raise ShapeError(f"eraser {self.label!r} was fitted on width {self.d}, got activations {tuple(x.shape)}")
        full = to_float64(x)
        left, right, mean = (t.to(full.device) for t in (self.left, self.right, self.mean))
        return (full - (full - mean) @ right.mT @ left.mT).to(device=x.device, dtype=x.dtype)

    def variance_removed(self, covariance: Tensor) -> float:
        """E‖x − r(x)‖² = tr L R Σ Rᵀ Lᵀ: for an orthogonal projection, the variance that it takes away.

        Args:
            covariance: Σ of the activations. (d, d)

        Returns:
            The mean squared length of the edit.

        Raises:
            ShapeError: Σ of another width.
        """
        inner = self.right @ covariance_of(covariance, self.d).to(self.right.device) @ self.right.mT
        return float(((self.left @ inner) * self.left).sum())

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each erased direction, with its canonical correlation."""
        import pandas as pd

        table = pd.DataFrame({"direction": range(self.rank), "correlation": self.correlations.tolist()})
        return table.assign(label=self.label)

    def __repr__(self) -> str:
        return f"Eraser(rank={self.rank}, d={self.d}, label={self.label!r})"


class LeaceFitter:
    """Fits a LEACE eraser from means and covariances that are collected batch by batch.

    r(x) = x − W⁺ P W (x − E x) with W = (Σ_xx^{1/2})⁺ and P the orthogonal projector on the columns of W Σ_xz.
    Afterwards Σ_xz is zero, so all classes have the same mean, and then and only then no linear predictor with a convex
    loss beats a constant. Among such maps it moves x least, in every norm. This is exact on the rows fitted; on new
    rows what is left shrinks with d / n. The covariance is neither shrunk nor truncated beyond rounding noise: both
    would leave a residue that a refitted probe finds.

    Args:
        tol: Canonical correlations up to this count as zero.

    Raises:
        InputError: ``tol`` outside [0, 1).

    Units:
        Memory: d² + d k numbers in float64. Time: O(n d²) to collect, O(d³) for the eraser.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, theorems 3.1 and 4.2. Merging: Chan, Golub and LeVeque 1983.

    Examples:
        >>> fitter = LeaceFitter()
        >>> for part in torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0)):
        ...     _ = fitter.update(part, (part[:, 0] > 0).long())
        >>> fitter.n, fitter.eraser.rank
        (200, 1)
    """

    def __init__(self, *, tol: float = 1e-8) -> None:
        if not 0 <= tol < 1:
            raise InputError(f"tol is a correlation, so it must be at least 0 and under 1, got {tol}")
        self.tol = tol
        self.n = 0
        self._eraser: Eraser | None = None

    @torch.no_grad()
    def update(self, X: Tensor, y: Tensor, mask: Tensor | None = None) -> LeaceFitter:
        """Add a batch.

        Args:
            X: Activations. (..., d)
            y: Class ids (...), any integers from 0 on, of which later batches may bring new ones; or numbers to erase, (...)
                or (..., k).
            mask: True for the rows to use. (...)

        Returns:
            The fitter itself.

        Raises:
            ShapeError: Labels, mask or width that don't fit.
            InputError: NaN, or negative class ids.
        """
        x, z = flat_rows(X, y, mask=mask)
        classes = not z.is_floating_point() and z.ndim == 1
        if classes and len(z) and int(z.min()) < 0:
            raise InputError(f"class ids must not be negative, got {int(z.min())}: mask rows without a label")
        z, ids = class_numbers(z) if classes else (z, None)
        width = 0 if ids is None else len(ids)
        if width > _MAX_CLASSES:
            raise InputError(
                f"{width:,} classes occur, and at most {_MAX_CLASSES:,} can be erased. Give coarser labels."
            )
        for some, label in zip(x.split(_CHUNK), z.split(_CHUNK)) if len(x) else ():
            part, label = to_float64(some), label.to(some.device)
            label = torch.nn.functional.one_hot(label.long(), width) if classes else label
            label = label.reshape(len(part), -1).to(part)
            if not bool(torch.isfinite(part).all() and torch.isfinite(label).all()):
                raise InputError("activations or labels hold NaN or infinity: mask those rows")
            means = part.mean(0), label.mean(0)
            dx, dz = part - means[0], label - means[1]
            self._merge(len(part), *means, dx.mT @ dx, dx.mT @ dz, dz.mT @ dz, ids)
        return self

    def merge(self, other: LeaceFitter) -> LeaceFitter:
        """Add what another fitter collected, for example in another process.

        Args:
            other: A fitter of the same width and kind of label; it is left as it is.

        Returns:
            The fitter itself.
        """
        if other.n:
            self._merge(other.n, other.mean, other._mean_z, other._xx, other._xz, other._zz, other._ids)
        return self

    def _merge(
        self, n: int, mean: Tensor, mean_z: Tensor, xx: Tensor, xz: Tensor, zz: Tensor, ids: Tensor | None
    ) -> None:
        self._eraser = None
        if self.n == 0:
            self.n, self._ids = n, ids
            self.mean, self._mean_z, self._xx, self._xz, self._zz = mean, mean_z, xx, xz, zz
            return
        if mean.shape != self.mean.shape:
            raise ShapeError(f"earlier batches had width {len(self.mean)}, this one has {len(mean)}")
        if (ids is None) != (self._ids is None) or (ids is None and mean_z.shape != self._mean_z.shape):
            raise ShapeError("labels of this batch are of another kind or width than those of earlier ones")
        if ids is not None and self._ids is not None:
            # A class not seen yet is a column of zeros, and those have no mean and no covariance.
            every = torch.cat([self._ids, ids.to(self._ids.device)]).unique()
            self._mean_z, self._xz = (_placed(t, self._ids, every) for t in (self._mean_z, self._xz))
            mean_z, xz = (_placed(t, ids, every) for t in (mean_z, xz))
            self._zz, zz = (
                _placed(_placed(t, some, every).mT, some, every) for t, some in ((self._zz, self._ids), (zz, ids))
            )
            self._ids = every
        total = self.n + n
        dx, dz = mean - self.mean, mean_z - self._mean_z
        weight = self.n * n / total
        self._xx = self._xx + xx + weight * torch.outer(dx, dx)
        self._xz = self._xz + xz + weight * torch.outer(dx, dz)
        self._zz = self._zz + zz + weight * torch.outer(dz, dz)
        self.mean = self.mean + dx * (n / total)
        self._mean_z = self._mean_z + dz * (n / total)
        self.n = total

    @property
    def covariance(self) -> Tensor:
        """Σ_xx, divided by n. (d, d)"""
        self._need_rows()
        return (self._xx + self._xx.mT) / (2 * self.n)

    @property
    def cross_covariance(self) -> Tensor:
        """Σ_xz, divided by n; a column for each class that occurs, ids ascending. (d, k)"""
        self._need_rows()
        return self._xz / self.n

    @property
    def label_covariance(self) -> Tensor:
        """Σ_zz, divided by n. (k, k)"""
        self._need_rows()
        return (self._zz + self._zz.mT) / (2 * self.n)

    @property
    def mean_label(self) -> Tensor:
        """E z: the shares of the classes that occur, ids ascending, or the mean of the numbers. (k,)"""
        self._need_rows()
        return self._mean_z

    @property
    def classes(self) -> Tensor | None:
        """Ids of the classes that occur, ascending; None where numbers are erased. (k,)"""
        self._need_rows()
        return self._ids

    @property
    def eraser(self) -> Eraser:
        """The eraser of everything collected so far.

        Raises:
            InputError: No rows, or one class only.
        """
        self._eraser = self._eraser or self._solve()
        return self._eraser

    def _need_rows(self) -> None:
        if self.n == 0:
            raise InputError("no rows yet: call update(X, y) first, and check that the mask isn't all False")

    def _solve(self) -> Eraser:
        self._need_rows()
        rounding = 1e-24 * self._mean_z.square() * self.n  # what it leaves of a constant label
        varies = (self._zz.diagonal() > rounding).to(self._zz)
        root_z, _ = whitening(self._zz * torch.outer(varies, varies) / self.n, floor=1e-10)
        if root_z.shape[1] == 0:
            raise InputError(f"the label is constant over {self.n} rows (one class only): there is nothing to erase")
        eps = torch.finfo(self._xx.dtype).eps
        white, unwhite = whitening(self.covariance, floor=len(self.mean) * eps)
        # With z whitened as well the singular values are canonical correlations, between 0 and 1, and a
        # tolerance on them means the same for every scale of x and every class balance.
        u, s, _ = torch.linalg.svd(white.mT @ self.cross_covariance @ root_z, full_matrices=False)
        u, s = u[:, s > self.tol], s[s > self.tol]
        if unwhite.shape[1] < len(unwhite):
            # Σ lost rank: a new row's part off its support carries nothing of the label, and must not be read.
            white = pseudo_inverse(unwhite)
        left, right = (unwhite @ u).contiguous(), (white @ u).mT.contiguous()
        return Eraser(left, right, self.mean, s.clamp(max=1.0), "leace")


class ConditionalLeaceFitter:
    """Fits a LEACE eraser of a label given another one: of what it tells beyond that one.

    Everything is centred on the means of the strata, the rows of one value of what is given, and pooled over them:
    Σ_xx, Σ_xz and Σ_zz are the covariances within strata. So after erasing, the covariance of activations and
    label, pooled within strata, is zero. Where both labels add up in the activations, their class means are then
    equal within every stratum; where a label has another direction in each stratum, they needn't be, and a probe
    within strata shows it.

    Σ_xx is the one within strata too, so the eraser reads the label from what varies while the given one doesn't, and takes
    that wholly away. With the total Σ_xx it would read how the label differs from what the given one predicts of it, and
    leave the prediction in the label's place: a model that reads the label there would go on nearly as before.

    Args:
        tol: Canonical correlations up to this count as zero.

    Raises:
        InputError: ``tol`` outside [0, 1).

    Units:
        Memory: d² + d k numbers in float64, and d + k for each stratum. Time: as for ``LeaceFitter``.

    Source:
        Belrose et al. 2023, arXiv 2306.03819, theorem 4.2, with covariances within strata (partial covariances).

    Examples:
        >>> gen = torch.Generator().manual_seed(0)
        >>> y = torch.randint(2, (4000,), generator=gen)
        >>> z = torch.where(torch.rand(4000, generator=gen) < 0.9, y, 1 - y)
        >>> x = torch.stack([y, z, torch.randn(4000, generator=gen)], 1) + 0.1 * torch.randn(4000, 3, generator=gen)
        >>> moved = (ConditionalLeaceFitter().update(x, z, y).eraser(x) - x).abs().mean(0)
        >>> bool(moved[1] > 0.4), bool(moved[0] < 0.01)  # z goes, y stays
        (True, True)
    """

    def __init__(self, *, tol: float = 1e-8) -> None:
        self._within = LeaceFitter(tol=tol)
        self._strata: dict[int, LeaceFitter] = {}

    @property
    def n(self) -> int:
        """Rows collected."""
        return sum(part.n for part in self._strata.values())

    @property
    def n_strata(self) -> int:
        """Strata that occurred."""
        return len(self._strata)

    def update(self, X: Tensor, y: Tensor, given: Tensor, mask: Tensor | None = None) -> ConditionalLeaceFitter:
        """Add a batch.

        Args:
            X: Activations. (..., d)
            y: What to erase, as for ``LeaceFitter.update``. (...) or (..., k)
            given: Integer ids of the strata. (...)
            mask: True for the rows to use. (...)

        Returns:
            The fitter itself.

        Raises:
            ShapeError: Labels, mask or width that don't fit.
            InputError: NaN, negative class ids, or strata that aren't integers.
        """
        x, z, strata = flat_rows(X, y, given, mask=mask)
        if strata.ndim != 1 or strata.is_floating_point():
            raise InputError("strata must be integer ids, one per row: numbers have none. Round or bin them first")
        for stratum in strata.unique().tolist():
            rows = (strata == stratum).to(x.device)
            part = self._strata.setdefault(stratum, LeaceFitter())
            part.update(x[rows], z[rows.to(z.device)])
            self._pool(part)
        return self

    def _pool(self, part: LeaceFitter) -> None:
        """Add the sums of a stratum to those within all, and leave it its means, which later batches are joined at."""
        moved = LeaceFitter()
        # Centred on its own mean, a stratum has no part in the sums between strata.
        moved._merge(part.n, part.mean * 0, part._mean_z * 0, part._xx, part._xz, part._zz, part._ids)
        self._within.merge(moved)
        part._xx, part._xz, part._zz = (
            torch.zeros((), dtype=t.dtype, device=t.device).expand_as(t) for t in (part._xx, part._xz, part._zz)
        )

    @property
    def eraser(self) -> Eraser:
        """The eraser of everything collected so far.

        Raises:
            InputError: No rows, or a label that is constant within every stratum.
        """
        return self.whole().eraser

    def whole(self) -> LeaceFitter:
        """A fitter whose covariances are those within strata, and whose means are those over all of them.

        Returns:
            The fitter, whose ``eraser`` is this one's.

        Raises:
            InputError: No rows, or a label that is constant within every stratum.
        """
        within, parts = self._within, list(self._strata.values())
        within._need_rows()
        mean = torch.stack([part.n / self.n * part.mean for part in parts]).sum(0)
        mean_z = torch.stack([part.n / self.n * self._every(part) for part in parts]).sum(0)
        if not bool((within._zz.diagonal() > 1e-24 * mean_z.square() * self.n).any()):
            raise InputError(
                f"the label is constant within each of the {len(parts)} strata of what is given, which tells it wholly: "
                "there is nothing to erase beyond that"
            )
        whole = LeaceFitter(tol=within.tol)
        whole._merge(self.n, mean, mean_z, within._xx, within._xz, within._zz, within._ids)
        return whole

    def _every(self, part: LeaceFitter) -> Tensor:
        """Class shares of a stratum, zero for classes that it lacks."""
        ids, every = part._ids, self._within._ids
        return part._mean_z if ids is None or every is None else _placed(part._mean_z, ids, every)


def leace(
    X: Tensor, y: Tensor, mask: Tensor | None = None, *, given: Tensor | None = None, tol: float = 1e-8
) -> Eraser:
    """The least-squares eraser of a label, in one call.

    Args:
        Those of ``LeaceFitter.update``.
        given: Ids of strata, to erase only what the label tells beyond them; see ``ConditionalLeaceFitter``. (...)
        tol: Canonical correlations up to this count as zero.

    Returns:
        An eraser, called as ``eraser(x)``. Rank at most classes − 1.

    Raises:
        ShapeError: Labels or mask that don't fit.
        InputError: NaN, negative class ids, or one class only (in every stratum).

    Source:
        Belrose et al. 2023, arXiv 2306.03819.

    Examples:
        >>> X = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> y = (X[:, 1] > 0).long()
        >>> after = leace(X, y)(X)
        >>> bool(torch.allclose(after[y == 0].mean(0), after[y == 1].mean(0), atol=1e-6))
        True
    """
    if given is not None:
        return ConditionalLeaceFitter(tol=tol).update(X, y, given, mask).eraser
    return LeaceFitter(tol=tol).update(X, y, mask).eraser


def _placed(t: Tensor, ids: Tensor, every: Tensor) -> Tensor:
    """Columns of some classes (..., k) among those of all, zeros elsewhere. (..., all)"""
    out = t.new_zeros(*t.shape[:-1], len(every))
    out[..., torch.searchsorted(every, ids.to(every.device)).to(t.device)] = t
    return out

"""Random subspaces to compare an ablation with: any of a given rank, or those that remove as much variance."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics import linalg
from probelens.numerics.tensors import whole_number
from probelens.subspaces.leace import Eraser
from probelens.subspaces.subspace import Subspace

__all__ = ["orthogonal_pca", "random", "random_matched", "seed_of_place"]

OVERLAP = 0.3  # of a control with its target, from which on it contains the target and is no control


def seed_of_place(seed: int, place: int) -> int:
    """The seed of the draws at one of several sites, numbered from 0, where it is ``seed`` itself.

    Draws that are the same directions at every site cost alike wherever sites resemble each other, as the blocks of a
    residual stream do. The largest of them over the sites is then hardly larger than one, and a target that differs from
    site to site beats it too often. Apart, the draws can only make p larger.
    """
    return seed + 1_000_003 * place


def random(rank: int, d: int, seed: int = 0, *, mean: Tensor | None = None, label: str = "random") -> Subspace:
    """A subspace drawn uniformly among all of its rank.

    Args:
        rank: How many directions.
        d: Width of the activations.
        seed: Seeds the draw.
        mean: Mean activation; default: zeros. (d,)
        label: Name.

    Returns:
        Orthonormal rows, drawn from Haar measure.

    Raises:
        InputError: A rank that isn't between 1 and d.

    Examples:
        >>> random(2, 5, seed=1)
        Subspace(rank=2, d=5, label='random')
    """
    whole_number("rank", rank, 1, d)
    gen = torch.Generator().manual_seed(seed)
    rows = torch.linalg.qr(torch.randn(d, rank, generator=gen, dtype=torch.float64)).Q.mT
    return Subspace(rows.contiguous(), torch.zeros(d) if mean is None else mean, label)


def orthogonal_pca(
    target: Subspace, covariance: Tensor, *, mean: Tensor | None = None, label: str = "orthogonal pca"
) -> Subspace:
    """The directions of largest variance among those orthogonal to a subspace: what else removes much, but none of it.

    Args:
        target: The subspace.
        covariance: Σ of the activations. (d, d)
        mean: Mean activation; default: the target's. (d,)
        label: Name.

    Returns:
        Of the target's rank, or of what is left beside it where that is less. Largest variance first.

    Raises:
        ShapeError: Σ of another width.
        InputError: The target is all of the space, or has no direction.

    Examples:
        >>> sigma = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
        >>> orthogonal_pca(Subspace(torch.eye(4)[:1], torch.zeros(4)), sigma).basis.abs()
        tensor([[0., 1., 0., 0.]], dtype=torch.float64)
    """
    sigma = linalg.covariance_of(covariance, target.d)
    if not 0 < target.rank < target.d:
        raise InputError(f"rank {target.rank} of {target.d}: nothing is orthogonal to it, or everything is")
    basis = target.basis.to(sigma)
    rest = torch.eye(target.d).to(sigma) - basis.mT @ basis
    _, vectors = linalg.eigenvectors(rest @ sigma @ rest)
    rank = min(target.rank, target.d - target.rank)
    return Subspace(vectors[:, :rank].mT.contiguous(), target.mean if mean is None else mean, label)


def random_matched(
    target: Subspace | Eraser,
    covariance: Tensor,
    n: int = 20,
    seed: int = 0,
    *,
    mean: Tensor | None = None,
    tol: float = 0.01,
    max_overlap: float = 0.95,
    label: str = "random matched",
) -> list[Subspace]:
    """Random subspaces that have the target's rank and remove the variance that the target removes.

    Each draw starts from a uniform random frame G and moves it along span(Λ^{β/2} G), with Λ the eigenvalues of Σ, to
    the β at which tr QΣQᵀ is the target's. β = 0 is the uniform draw, β = 1 a draw from the activations' own
    distribution, and β → ±∞ ends in the directions of largest or smallest variance, so every target is met; the family
    is the matrix angular central Gaussian one. When the target is close to those ends, only its own neighbourhood
    removes as much, and a matched draw is no control. That is refused, by the overlap with the target.

    Args:
        target: The subspace to match, or an eraser, by the mean squared length of its edit.
        covariance: Σ of the activations. (d, d)
        n: How many draws.
        seed: Seeds the draws.
        mean: Mean activation; default: the target's. (d,)
        tol: Largest relative error of the variance.
        max_overlap: Refuse when the draws' mean overlap with the target (``Subspace.overlap``) is above this. Report it
            below: controls that share most of the target understate its effect.
        label: Name.

    Returns:
        The draws.

    Raises:
        ShapeError: Σ of another width.
        InputError: No variance to match, nothing to vary, or draws that coincide with the target.

    Source:
        Chikuse 1990, Journal of Multivariate Analysis 33 (the distribution of the span).

    Examples:
        >>> sigma = torch.diag(torch.arange(1.0, 21.0))
        >>> target = random(3, 20, seed=9)
        >>> draws = random_matched(target, sigma, n=4)
        >>> all(abs(q.variance_removed(sigma) / target.variance_removed(sigma) - 1) < 0.01 for q in draws)
        True
    """
    if n < 1:
        raise InputError(f"n={n}: give the number of draws, at least 1")
    wanted = target.variance_removed(covariance)
    values, vectors = linalg.eigenvectors(covariance)
    rank, d = target.rank, target.d
    if rank == 0 or rank == d:
        raise InputError(f"rank {rank} of {d}: there is only one subspace of that rank, so none can be drawn")
    if not wanted > 1e-12 * float(values.sum()):
        raise InputError("the target removes no variance: its directions are constant over the activations")
    gen = torch.Generator().manual_seed(seed)
    frames = torch.randn(n, d, rank, generator=gen, dtype=torch.float64).to(values.device)
    centre = target.mean if mean is None else mean
    frames = _matched_frames(frames, values, wanted, tol)
    found = [Subspace((vectors @ frame).mT.contiguous(), centre, label) for frame in frames]
    worst = max(abs(q.variance_removed(covariance) / wanted - 1) for q in found)
    if worst > tol:
        raise InputError(
            f"no random subspace of rank {rank} removes the target's variance {wanted:.4g} within {tol:.1%} "
            f"(off by {worst:.1%}): the target is at the end of what this rank can remove, "
            f"{float(values[-rank:].sum()):.4g} to {float(values[:rank].sum()):.4g}"
        )
    span = target.basis if isinstance(target, Subspace) else linalg.orthonormal_rows(target.left.mT)
    shared = sum(Subspace(span, centre).overlap(q) for q in found) / n
    if shared > max_overlap:
        raise InputError(
            f"subspaces that remove as much variance as the target nearly coincide with it "
            f"(overlap {shared:.3f}, allowed {max_overlap}): it holds the activations' extreme directions",
            "Compare with top_pca and random instead, or raise max_overlap and report it.",
        )
    return found


def _matched_frames(frames: Tensor, values: Tensor, wanted: float, tol: float) -> Tensor:
    """Orthonormal frames in the eigenbasis, (n, d, rank), of which each has the wanted variance."""
    n, _, rank = frames.shape
    log = values.clamp(min=float(values[0]) * 1e-14).log()
    # For each sign of β the span is written as [I; Z] with I on the rows that grow fastest: then no entry
    # ever overflows, and the limit β → ∞ is those rows themselves.
    start = _variance(frames, values)
    up = (start < wanted)[:, None, None]
    ordered = torch.where(up, frames, frames.flip(1))
    ordered_log = torch.where(up[:, 0], log, -log.flip(0))
    ordered_values = torch.where(up[:, 0], values, values.flip(0))
    rest = ordered[:, rank:] @ linalg.inverse(ordered[:, :rank])
    gain = ordered_log[:, rank:, None] - ordered_log[:, None, :rank]  # never positive
    eye = torch.eye(rank, dtype=frames.dtype, device=frames.device).expand(n, rank, rank)

    def at(beta: Tensor) -> Tensor:
        return torch.cat([eye, rest * (0.5 * beta[:, None, None] * gain).exp()], dim=1)

    def short(beta: Tensor) -> Tensor:
        """Whether the frames haven't reached the wanted variance yet."""
        variance = _variance(at(beta), ordered_values)
        return torch.where(up[:, 0, 0], variance < wanted, variance > wanted)

    low, high = torch.zeros(n).to(log), torch.ones(n).to(log)
    for _ in range(40):
        far = short(high)
        if not bool(far.any()):
            break
        low, high = torch.where(far, high, low), torch.where(far, 2 * high, high)
    for _ in range(60):
        middle = (low + high) / 2
        far = short(middle)
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
        if bool(((_variance(at(low), ordered_values) / wanted - 1).abs() < 0.01 * tol).all()):
            break
    basis = torch.linalg.qr(at(low)).Q
    return torch.where(up, basis, basis.flip(1))


def _variance(frames: Tensor, values: Tensor) -> Tensor:
    """tr QΛQᵀ of the spans of frames that need not be orthonormal. (n, d, rank) -> (n,)"""
    gram = frames.mT @ frames
    inner = frames.mT @ (values[..., :, None] * frames)
    return linalg.solve(gram, inner).diagonal(dim1=-2, dim2=-1).sum(-1)

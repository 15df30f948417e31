"""The subspaces that an ablation removes: the ones asked for, and the controls that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.model import HookedModel
from probelens.hooks.points import has_positions
from probelens.numerics.linalg import between_rows
from probelens.numerics.tensors import whole_number
from probelens.running.activations import Activations
from probelens.subspaces.directions import between_share, variance_share
from probelens.subspaces.fitted import moments, top_pca
from probelens.subspaces.leace import Eraser
from probelens.subspaces.matched import OVERLAP, orthogonal_pca, random, random_matched, seed_of_place
from probelens.subspaces.subspace import Subspace
from probelens.tasks.data import Batch
from probelens.tasks.examples import spread_labels, spread_mask

Control = Literal["random", "random_matched", "pca", "orthogonal_pca"]
CONTROLS: tuple[Control, ...] = ("random", "random_matched", "pca", "orthogonal_pca")
FEW, MANY = (
    20,
    99,
)  # draws from which on p can reach 0.05 at one site, and by max-T over sites with some digits to spare


@dataclass(frozen=True, eq=False)
class Removal:
    """A subspace to remove at one site: the one asked for ("target") or one draw of a control.

    Args:
        about: The first columns of the row; on targets also how much of the subspace the matched controls share, and why
            they could not be drawn.
        space: What to remove; None where there is nothing.
    """

    about: dict[str, Any]
    space: Subspace | Eraser | None


@dataclass(frozen=True)
class Draws:
    """How many draws: ``most`` of the random control that an effect is measured from, ``other`` of the other one."""

    most: int
    other: int

    @classmethod
    def of(cls, controls: int | None, n_sites: int, adjust: str) -> Draws:
        """As asked for, or for None as many as p ≤ 0.05 takes at this many sites."""
        if controls is not None:
            n = whole_number("controls", controls, 0)
            return cls(n, n)
        if n_sites < 2:
            return cls(FEW, FEW)
        return cls(MANY if adjust == "max_t" else FEW * n_sites - 1, FEW)


def label_of(batch: Any, label: str | None, what: str) -> str:
    """The label that the argument ``what`` names: the batch's only one for None; InputError where there is no such label."""
    if not isinstance(batch, Batch):
        raise InputError(
            f"ablation needs a Batch with tokens, labels and mask, got a {type(batch).__name__}. "
            "Make one with task.sample(), or probelens.Batch(tokens, {name: labels})."
        )
    known = list(batch.labels)
    if label is None and len(known) == 1:
        return known[0]
    if label not in known:
        raise InputError(f"{what}={label!r}: the batch has the labels {known}. Give one of them.")
    return label


def label_asked(batch: Any, subspaces: Any, label: str | None) -> str:
    """The variable that the subspaces are about: for None the one that a ProbeResult was fitted to, or the batch's only one."""
    known = [] if isinstance(subspaces, Mapping) else getattr(subspaces, "labels", [])
    if label is None and len(known) == 1 and isinstance(batch, Batch) and known[0] in batch.labels:
        label = known[0]
    return label_of(batch, label, "label")


def check_activations(model: HookedModel, name: str, x: Tensor, mask: Tensor) -> None:
    """Refuse activations from which no subspace can be removed.

    Raises ShapeError for axes other than (example, pos, d), InputError for NaN or infinity where labels count.
    """
    point = model.point(name)
    if x.ndim != 3 or not has_positions(point) or point.pos_axis != 1:
        raise ShapeError(
            f"{name!r} has activations {tuple(x.shape)}, axes {point.axes}; a subspace is removed from "
            "(example, pos, d). Choose a point of these axes, or ablate_component() for heads and states."
        )
    bad = (~torch.isfinite(x)).any(-1).cpu() & mask.cpu()
    if bool(bad.any()):
        example, pos = bad.nonzero()[0].tolist()
        raise InputError(
            f"activations at {name!r} hold NaN or infinity at {int(bad.sum())} of {int(mask.sum())} positions, first in "
            f"sequence {example} at position {pos}. Check the model up to there, or leave these positions out of the mask."
        )


def with_controls(
    model: HookedModel, acts: Activations, batch: Batch, spaces: Mapping[str, Subspace | Eraser], label: str,
    kinds: Sequence[str], draws: Draws, seed: int, named: str | None = None,
) -> list[Removal]:  # fmt: skip
    """The subspace of each site, followed by its controls, which match the variance of ``acts`` where the mask is True.

    ``named`` is the definition of the subspaces; None for their own labels. Raises InputError for an unknown control or NaN at a site, ShapeError for other axes or a subspace of another width.
    """
    unknown = [k for k in kinds if k not in CONTROLS]
    if unknown:
        raise InputError(f"unknown control {unknown[0]!r}. Allowed: {', '.join(map(repr, CONTROLS))}")
    out: list[Removal] = []
    for place, (name, space) in enumerate(spaces.items()):
        x = acts[name]
        mask = spread_mask(batch.mask, x.shape[1]) if x.ndim > 1 else batch.mask
        check_activations(model, name, x, mask)
        real = x[mask]
        if real.shape[-1] != space.d:
            raise ShapeError(
                f"the subspace for {name!r} has width {space.d}, the activations there have {real.shape[-1]}"
            )
        mean, covariance = moments(real)
        between = between_rows(real, spread_labels(label, batch.labels[label], x.shape[1])[mask])
        site = {"site": name, "layer": model.point(name).depth, "label": label}
        site["directions"] = named or space.label or "given"
        drawn, problem = _draw_controls(space, mean, covariance, kinds, draws, seed_of_place(seed, place))
        about = partial(_about, site, covariance, between, span_of(space))
        target = about("target", 0, space)
        target.update(
            control_overlap=_overlap(space, drawn), control_problem=problem, mean_shift=_shift(space, mean, covariance)
        )
        out.append(Removal(target, space if space.rank else None))
        out += [Removal(about(kind, i, q), q) for kind, i, q in drawn]
    return out


def _about(
    site: dict[str, Any], covariance: Tensor, between: Tensor, target: Subspace, kind: str, draw: int,
    q: Subspace | Eraser,
) -> dict[str, Any]:  # fmt: skip
    shares = {
        "variance": variance_share(q, covariance),
        "between_variance": between_share(q, between) if bool(between.any()) else None,
    }
    shared = target.overlap(q) if isinstance(q, Subspace) else None
    return {**site, "condition": kind, "draw": draw, "rank": q.rank, "control_overlap": shared, **shares}


def _draw_controls(
    space: Subspace | Eraser, mean: Tensor, covariance: Tensor, kinds: Sequence[str], draws: Draws, seed: int
) -> tuple[list[tuple[str, int, Subspace]], str | None]:
    out: list[tuple[str, int, Subspace]] = []
    problem: str | None = None
    if not draws.most or not kinds or not space.rank:
        return out, None if space.rank else "the subspace is empty, so there is nothing to compare with"
    if space.rank == space.d:
        return out, "it takes every direction, so no other subspace of its rank is there to compare with"
    target = span_of(space)
    matched: list[Subspace] = []
    if "random_matched" in kinds:
        try:
            matched = random_matched(space, covariance, n=draws.most, seed=seed, mean=mean)
        except InputError as err:
            problem = err.reason
    shared = sum(target.overlap(q) for q in matched) / len(matched) if matched else 0.0
    if shared >= OVERLAP:
        problem = f"random subspaces that remove as much variance share {shared:.2f} of it: they contain it and are no control"
        matched = matched[: draws.other]
    # Of the two the one that the effect is measured from has the draws that p values need.
    n_random = draws.other if matched and not problem else draws.most
    if "random" in kinds:
        out += [("random", i, random(space.rank, space.d, seed=seed * 1000 + i, mean=mean)) for i in range(n_random)]
    out += [("random_matched", i, q) for i, q in enumerate(matched)]
    if "pca" in kinds:
        out.append(("pca", 0, top_pca(space.rank, covariance, mean)))
    if "orthogonal_pca" in kinds and space.rank < space.d:
        out.append(("orthogonal_pca", 0, orthogonal_pca(target, covariance, mean=mean)))
    return out, problem


def _shift(space: Subspace | Eraser, mean: Tensor, covariance: Tensor) -> float | None:
    """How far the mean that a removal leaves is from the activations' own, in their standard deviations within the subspace."""
    if not space.rank:
        return None
    span = span_of(space)
    basis = span.basis.double().cpu()
    moved = float((basis @ (mean.double().cpu() - span.mean.double().cpu())).square().sum())
    spread = float(torch.einsum("rd,de,re->", basis, covariance.double().cpu(), basis))
    return (moved / spread) ** 0.5 if spread > 0 else None


def _overlap(space: Subspace | Eraser, drawn: Sequence[tuple[str, int, Subspace]]) -> float | None:
    matched = [q for kind, _, q in drawn if kind == "random_matched"]
    return sum(span_of(space).overlap(q) for q in matched) / len(matched) if matched else None


def span_of(space: Subspace | Eraser) -> Subspace:
    """A subspace itself; of an eraser what it changes."""
    return space if isinstance(space, Subspace) else Subspace(torch.linalg.qr(space.left).Q.mT, space.mean)

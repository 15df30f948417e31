"""What is interchanged at one site: the subspace, everything, everything but it, the parts of the illusion check, controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.swap import Swap, factors
from probelens.hooks.edits.values import Add, Replace
from probelens.hooks.model import HookedModel
from probelens.hooks.passes.at import at
from probelens.hooks.points import HookFn
from probelens.numerics.modes import full_precision
from probelens.patching.interchange_reader import reader_of
from probelens.patching.pairs import Column, Side, Sides
from probelens.patching.plan import Source
from probelens.running.collect import collect
from probelens.running.sweep.conditions import Intervention
from probelens.subspaces.directions import between_share
from probelens.subspaces.matched import orthogonal_pca, random, random_matched, seed_of_place
from probelens.subspaces.subspace import Subspace
from probelens.tasks.examples import spread_mask

__all__ = ["CONTROLS", "Given", "Swapped", "head_columns", "parts_at"]

CONTROLS = ("random", "random_matched", "orthogonal_pca")
_WIDEST = 4096  # features up to which a covariance is formed for the controls that need one


@dataclass(frozen=True, eq=False)
class Swapped:
    """One interchange: a part of the activation at a site.

    Args:
        about: The first columns of the row.
        left: Directions that change, as rows; None for the whole activation. (rank, d)
        right: Directions that are read. (rank, d)
        complement: Whether everything but this part is taken.
        noise: Standard deviation of the noise that is added in place of an interchange. (...)
        seed: Of the noise.
        length: Positions of the activation.
    """

    about: dict[str, Any]
    left: Tensor | None = None
    right: Tensor | None = None
    complement: bool = False
    noise: Tensor | None = None
    seed: int = 0
    length: int = 0

    def edit(self, pos: Tensor | None, source: Tensor) -> Edit:
        """Takes this part from ``source`` at ``pos``."""
        if self.left is None:
            return Replace(pos, source)
        return Swap(pos, source, self.left, self.right, self.complement)

    def intervention(self, model: HookedModel, values: Source, where: Column) -> Intervention:
        """This interchange at one position of each example, or at several (example, pos); None for all."""
        name, noise, (column, taken) = self.about["site"], self.noise, where
        if noise is None:
            return values.put_in(name, column, self.edit, taken=taken)
        length, span = self.length, column is not None and column.ndim == 2
        every = column.any(0).nonzero() if span and column is not None else column
        steps = sorted(set(every.flatten().tolist())) if every is not None and model.point(name).step else None

        def edit_for(rows: Tensor) -> HookFn:
            # Of each example its own, so that what is added doesn't depend on the batches.
            lead = length if column is None or span else 1
            drawn = [
                torch.randn(lead, *noise.shape, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + row))
                for row in rows.tolist()
            ]
            value = (torch.stack(drawn) * noise).expand(-1, length, *[-1] * noise.ndim)
            made = Add(None if column is None else column[rows], value)
            return made if steps is None else at(steps, made)

        first = column.long().argmax(1) if span and column is not None else column
        return Intervention(name, edit_for, first)


@dataclass(frozen=True, eq=False)
class Given:
    """Subspaces by site as they were given, with what is known of them.

    Args:
        spaces: Site to Subspace or Eraser, or to a mapping from head to one.
        directions: The definition; None for a mapping, whose subspaces have labels.
        means: Site to rows whose outer products sum to the between-class covariance, where probes know them. (class, d)
        readable: Site to whether its probe reads the label there, "yes", "no" or "can't tell"; empty for a mapping.
    """

    spaces: dict[str, Any]
    directions: str | None
    means: Mapping[str, Tensor]
    readable: Mapping[str, str]


def parts_at(
    model: HookedModel,
    sides: Sides,
    where: Sequence[Column],
    name: str,
    given: Given,
    kinds: Sequence[str],
    draws: int,
    batch_size: int,
    seed: int,
    place: int,
) -> list[Swapped]:
    """Everything that is interchanged at a site, head by head where heads are given. Controls are drawn once for it.

    ``place`` is the site's number among all; each head of each site has draws of its own.
    """
    change, spread, shape, length = _differences(model, sides, where, name, batch_size)
    found, out = given.spaces[name], []
    for number, (head, space) in enumerate((found if isinstance(found, Mapping) else {None: found}).items()):
        columns = head_columns(model, name, head, shape)
        here = Here(
            model,
            name,
            head,
            columns,
            change.shape[1],
            change[:, columns],
            given.directions or space.label or "given",
            given.means.get(name),
            given.readable.get(name),
        )
        if here.width != space.d:
            raise ShapeError(
                f"the subspace for {name!r} has width {space.d}, the activations there have {here.width}"
                + ("" if head is None else f" in head {head}")
            )
        found_here = here.parts(space, kinds, draws, seed_of_place(seed, 1000 * place + number))
        noise = torch.zeros_like(spread)
        noise[columns] = spread[columns] if bool(spread[columns].any()) else 1.0
        found_here.append(Swapped(here.about("noise", space.d), noise=noise.reshape(shape), seed=seed, length=length))
        out += found_here
    return out


@dataclass(frozen=True, eq=False)
class Here:
    """A site ``total`` wide, or one head of it, with the differences between the runs there. (row, d)"""

    model: HookedModel
    name: str
    head: int | None
    columns: slice
    total: int
    change: Tensor
    directions: str
    means: Tensor | None
    readable: str | None

    @property
    def width(self) -> int:
        """Features that are interchanged."""
        return self.change.shape[1]

    def about(self, condition: str, rank: int, **more: Any) -> dict[str, Any]:
        """The first columns of a row."""
        return {
            "site": self.name, "layer": self.model.point(self.name).depth, "head": self.head, "draw": 0, "variance": None,
            "control_overlap": None, "condition": condition, "rank": rank, **more,
        }  # fmt: skip

    def swap(self, about: dict[str, Any], left: Tensor, right: Tensor, complement: bool = False) -> Swapped:
        """The interchange of L R, or of all but that, with what it carries of the difference between the runs."""
        total = float(self.change.square().sum(dtype=torch.float64))
        with full_precision():
            part = self.change @ right.mT.to(self.change) @ left.to(self.change)
        part = self.change - part if complement else part
        about["variance"] = float(part.square().sum(dtype=torch.float64)) / total if total else None
        if complement and self.head is not None:
            # All but that, of this head: what other heads hold stays the base run's.
            eye = torch.eye(self.width, dtype=left.dtype)
            return Swapped(about, self._wide(eye), self._wide(eye - left.mT @ right))
        return Swapped(about, self._wide(left), self._wide(right), complement)

    def parts(self, space: Any, kinds: Sequence[str], draws: int, seed: int) -> list[Swapped]:
        """Full, target, complement, the parts of the illusion check, and the controls."""
        left, right = factors(space)
        between = None if self.means is None else between_share(space, self.means)
        about = self.about("target", space.rank, directions=self.directions, between_variance=between)
        about.update(control_problem=None, illusory=None, illusory_why=None, readable=self.readable)
        target = space if isinstance(space, Subspace) else Subspace(torch.linalg.qr(space.left).Q.mT, space.mean)
        rest = self.about("complement", self.width - space.rank)
        out = [self._everything(), self.swap(about, left, right), self.swap(rest, left, right, complement=True)]
        out += self._seen(target, about)
        if space.rank in (0, space.d):
            what = "the whole activation" if space.rank else "empty"
            about["control_problem"] = f"the subspace is {what}, so there is nothing to compare with"
            return out
        return out + self._controls(target, kinds, draws, seed, about)

    def _everything(self) -> Swapped:
        about = self.about("full", self.width, variance=1.0)
        if self.head is None:
            return Swapped(about)
        eye = self._wide(torch.eye(self.width, dtype=torch.float64))
        return Swapped(about, eye, eye)

    def _seen(self, target: Subspace, about: dict[str, Any]) -> list[Swapped]:
        """The parts of the target in the row space and the null space of its only reader."""
        reader = reader_of(self.model, self.name, self.columns)
        if reader.basis is None:
            about["illusory_why"] = reader.why
            return []
        split = reader.split(target.basis)
        if split is None:
            about["illusory"] = False  # all of it is read
            return []
        return [
            self.swap(self.about(name, len(rows)), rows, rows)
            for name, rows in zip(("row_space", "null_space"), split, strict=True)
        ]

    def _controls(
        self, target: Subspace, kinds: Sequence[str], draws: int, seed: int, about: dict[str, Any]
    ) -> list[Swapped]:
        rank, d = target.rank, target.d

        def control(kind: str, i: int, q: Subspace) -> Swapped:
            row = self.about(kind, q.rank, draw=i, control_overlap=target.overlap(q))
            return self.swap(row, q.basis, q.basis)

        out: list[Swapped] = []
        if "random" in kinds:
            out += [control("random", i, random(rank, d, seed=seed * 1000 + i)) for i in range(draws)]
        if d > _WIDEST:
            about["control_problem"] = f"the activation is {d} wide, over {_WIDEST}: only random subspaces are drawn"
            return out
        # What an interchange moves is a difference of two runs, so that is what a control must match.
        second = self.change.double().mT @ self.change.double() / len(self.change)
        if "random_matched" in kinds and draws:
            try:
                found = random_matched(target, second, n=draws, seed=seed)
            except InputError as err:
                found, about["control_problem"] = [], str(err)
            out += [control("random_matched", i, q) for i, q in enumerate(found)]
        if "orthogonal_pca" in kinds:
            out.append(control("orthogonal_pca", 0, orthogonal_pca(target, second)))
        return out

    def _wide(self, rows: Tensor) -> Tensor:
        """Rows as wide as the activation, zero outside the head."""
        if self.head is None:
            return rows
        out = rows.new_zeros(len(rows), self.total)
        out[:, self.columns] = rows
        return out


def head_columns(model: HookedModel, name: str, head: Any, shape: tuple[int, ...]) -> slice:
    """The features of a head, or all."""
    if head is None:
        return slice(None)
    axes = model.point(name).axes
    if len(shape) != 2 or len(axes) < 3 or "head" not in axes[2]:
        raise InputError(f"{name!r} has no heads: its axes are {axes}. Give one subspace for it, or take attn.hook_z")
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < shape[0]:
        raise InputError(f"head {head!r} asked for, but {name!r} has {shape[0]}: allowed are 0 to {shape[0] - 1}")
    return slice(head * shape[1], (head + 1) * shape[1])


def activations_of(model: HookedModel, side: Side, name: str, batch_size: int) -> tuple[Tensor, Tensor]:
    """Activations of one run (example, pos, ...), and True where they are no padding (example, pos)."""
    axes = model.point(name).axes
    if axes and axes[:2] != ("batch", "pos"):
        raise InputError(f"{name!r} has the axes {axes}: an interchange needs (batch, pos, ...). Take another point")
    n, parts, masks = len(side.examples), [], []
    for rows in torch.arange(n).split(batch_size if side.always else n):
        with model.hooks([(one.name, one.edit_for(rows)) for one in side.always]):
            found = collect(
                model, side.examples.part(rows).inputs, [name], batch_size=batch_size,
                attention_mask=None if side.told is None else side.told[rows],
            )  # fmt: skip
        acts = found[name]
        if acts.ndim < 3:
            raise InputError(
                f"{name!r} gives {tuple(acts.shape)}: an interchange needs (batch, pos, ...). Take another point"
            )
        parts.append(acts)
        real = torch.ones(acts.shape[:2], dtype=torch.bool) if found.mask is None else found.mask
        masks.append(real if side.real is None else real & spread_mask(side.real[rows].cpu(), acts.shape[1]))
    return torch.cat(parts), torch.cat(masks)


def _differences(
    model: HookedModel, sides: Sides, where: Sequence[Column], name: str, batch_size: int
) -> tuple[Tensor, Tensor, tuple[int, ...], int]:
    """Clean less corrupted activations (row, d), the corrupted ones' deviations (d,), their axes, and their positions.

    They are those of all real positions; of the positions that are interchanged where these differ between the sides.
    """
    clean, real = activations_of(model, sides.clean, name, batch_size)
    corrupted, other = activations_of(model, sides.corrupted, name, batch_size)
    shape, length = tuple(corrupted.shape[2:]), corrupted.shape[1]
    moved = [(to, of) for to, of in where if to is not None and of is not None and to.ndim == 1]
    if any(not torch.equal(to, of) for to, of in moved):
        rows = torch.arange(len(corrupted))
        base = torch.cat([corrupted[rows, to.cpu()] for to, _ in moved]).flatten(1).float()
        source = torch.cat([clean[rows, of.cpu()] for _, of in moved]).flatten(1).float()
    else:
        shared = min(length, clean.shape[1])
        both = real[:, :shared] & other[:, :shared]
        if not bool(both.any()):
            raise InputError("no position is real on both sides of a pair. Give pos='last', or (example, 2) positions")
        base, source = (x[:, :shared].flatten(2)[both].float() for x in (corrupted, clean))
    return source - base, base.std(0, correction=0), shape, length

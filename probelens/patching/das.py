"""Distributed alignment search: the subspace that the answer follows, learned by gradient, with controls learned as well.

Class means and probes find where a variable can be read, a search finds what the model follows. It can find too much: with
enough directions some swap brings the wanted answers on the pairs at hand. So it is tested on pairs that it has not seen,
with the controls of an interchange, and the same search runs again where there is nothing to find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ProbelensError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.models.untrained import untrained as made_again
from probelens.numerics.modes import differentiable
from probelens.numerics.tensors import whole_number
from probelens.patching.das_result import DASResult, judged, same_subspace, swapped
from probelens.patching.das_training import Learned, Lesson, Schedule, Swaps, learn, learn_rank
from probelens.patching.interchange import interchange_plan
from probelens.patching.interchange_parts import CONTROLS, activations_of, head_columns
from probelens.patching.interchange_result import InterchangeResult
from probelens.patching.interchange_rows import groups_of_pairs
from probelens.patching.metric import need_logits
from probelens.patching.pairs import Column, Sides, check_pairs, check_positions, chosen_sides, columns, length_at
from probelens.probing.splits import FRACTIONS, copies_together, real_tokens, split_by_group
from probelens.results.progress import progress_bar
from probelens.running.gradients import need_gradients
from probelens.running.sweep.plan import plan
from probelens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    from probelens.hooks.shorthand import Names
    from probelens.patching.pairs import Pos

__all__ = ["das"]

_JUDGED = {column.name for column in DASResult.columns if column.on}


def das(
    model: HookedModel,
    pairs: Any,
    site: Names,
    pos: int | Tensor | Literal["last"] | None = None,
    rank: int | None = None,
    *,
    head: int | None = None,
    same_pairs: Any = None,
    groups: Any = None,
    untrained: HookedModel | Literal[False] | None = None,
    other_site: Names = None,
    splits: Sequence[float] = FRACTIONS,
    steps: int = 200,
    lr: float = 0.03,
    batch_size: int = 32,
    controls: int | None = None,
    kinds: Sequence[str] = CONTROLS,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> DASResult:
    """Learn the subspace whose swap makes the answer the source's, and test it on other pairs.

    Q (rank, d) minimises the cross-entropy of the clean run's answer after h ← h_b + QᵀQ (h_s − h_b) in the corrupted
    run; the model stays as it is. No sequence of the held-out pairs is among those that Q was learned on.

    Args:
        model: The wrapped model; run in eval mode. Its weights get no gradients.
        pairs: ``PatchPairs`` that differ in the variable, as ``interchange`` takes them. Q is learned on those that both runs answer correctly.
        site: One hook point: a residual stream, a mixer, heads, an SSM state, h or c. Axes after the position are taken
            together.
        pos: None for all positions at once, a position, "last" for the last real one of each side, or one for each example
            (example,) or each side (example, 2) = [clean, corrupted].
        rank: Dimensions of Q. None tries 1, 2, 4, … and halves the last gap: the smallest rank that validation pairs
            follow as often as any, within a standard error.
        head: Only this head of a site with an axis of heads.
        same_pairs: ``PatchPairs`` whose two sides agree in the variable, with what must stay as the second answer: also
            learned on, and tested (row "same_value").
        groups: Which pairs are never split between learning and testing, such as those that share a word; as for
            ``interchange``. Pairs that share a sequence never are. (example,)
        untrained: The same architecture at random weights; None makes it where the architecture is known (formal models,
            transformers), False leaves it out.
        other_site: A hook point that should not hold the variable.
        splits: Shares of training, validation and held-out pairs. With a given rank validation pairs are learned on, too.
        steps: Most training steps of each subspace; it ends early once the loss no longer falls.
        lr: Learning rate of Adam.
        batch_size: Pairs in a training step, and examples in a forward of the tests (64 at least there).
        seed: Of the split, the first directions, the order of pairs, the shuffle, and the controls' draws.
        controls, kinds, memory: As for ``interchange``.
        progress: Show a progress bar.

    Returns:
        The subspace, and rows as of ``interchange`` on the held-out pairs with all its controls. Subspaces of the same
        rank are learned again where there is nothing to find:

        - "shuffled": from answers in random order, and swapped in this model. What the search gives without a relation
            between pairs and answers.
        - "untrained": in the untrained model from the right answers, and swapped there, since its directions mean nothing
            in another model. The share is of the same pairs. What the search alone can make a network of this shape do.
        - "other_site": at the other site of this model, and swapped there. Whether the site matters.

        The verdict is that of ``interchange``, but "unspecific" where one of them does as well, judged by the ends of their
        intervals. Where there are two answers, shuffled ones lead to half of the right swap, which hedges: a subspace that
        shares 0.3 or more of the learned one (``control_overlap``) is no control, as in ``interchange``.

    Units:
        Fractions of pairs; losses in nats.

    Raises:
        InputError: Answers that ``interchange`` doesn't take, several sites or positions, a rank outside of the activation, a learning rate that isn't above 0, too few pairs or none that is answered
            correctly, a point or a model from which no gradient comes back.
        UnknownHookError: A site that the model doesn't have.

    Source:
        Geiger et al. 2023, arXiv 2303.02536. Boundless DAS (Wu et al. 2023, arXiv 2305.08809) learns the rank as a mask
        over a full rotation, which has d² numbers, 17 million for an SSM state of 256 × 16.
    """
    need_wrapped(model)
    need_gradients(model, "das()", "interchange() with a subspace of pl.subspaces")
    check_pairs(pairs, "denoise")
    chosen_sides(model, pairs, "das()")
    if not (isinstance(lr, (int, float)) and 0 < lr < math.inf):  # also NaN
        raise InputError(f"lr={lr!r}: the learning rate must be a number above 0")
    schedule = Schedule(whole_number("steps", steps), lr, whole_number("batch_size", batch_size), seed)
    tests: dict[str, Any] = {"batch_size": max(64, batch_size), "memory": memory, "seed": seed}
    with differentiable():
        whole = rank is not None
        parts = _divide(model, pairs, same_pairs, groups, pos, splits, seed, whole, tests["batch_size"])
        here = _Place(parts, model, site, head)
        most = here.width if rank is None else whole_number("rank", rank, 1, here.width)
        places, missing = _controls(parts, here, head, untrained, other_site, seed)
        total = None if rank is None else steps * (2 + len(places))
        with progress_bar(total, "training steps", progress) as bar:
            found, ranks = (
                here.learn_rank(schedule, bar, most) if rank is None else (here.learn(rank, schedule, bar), [])
            )
            space = here.subspace(found.basis, "das")
            again = {"shuffled": (here, here.learn(space.rank, schedule, bar, shuffled=True))}
            for condition, place in places.items():
                if space.rank <= place.width:
                    again[condition] = (place, place.learn(space.rank, schedule, bar))
                else:
                    missing.append(
                        f"{condition}: {place.name} has {place.width} features, fewer than rank {space.rank}"
                    )
        held = here.test(space, progress, same_pairs=parts.same_held, controls=controls, kinds=kinds, **tests)
    rows = held.rows
    (target,) = held.targets()
    rows.append(_row("train", here.test(space, False, train=True, controls=0, kinds=(), **tests)))
    for condition, (place, other) in again.items():
        q = place.subspace(other.basis, condition)
        # An untrained model answers nothing correctly by itself, so the pairs are those of the model.
        tested = place.test(q, False, correct=held.correct, controls=0, kinds=(), **tests)
        rows.append({**_row(condition, tested), "control_overlap": space.overlap(q) if q.d == space.d else None})
    missing += [
        f"{r['condition']}: shares {r['control_overlap']:.2f} of the subspace" for r in rows if same_subspace(r)
    ]
    target["control_problem"] = "; ".join(filter(None, [target["control_problem"], *missing])) or None
    target["verdict"], target["why"] = judged(rows)
    return DASResult(
        rows, space, found.loss, {name: other.loss for name, (_, other) in again.items()}, ranks, parts.train, parts.held_rows,
        here.name, head, here.width, held.path,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Parts:
    """Pairs to learn from, those of validation last, and pairs to test on; ``fit`` and ``check`` are rows of the former."""

    learn: Any
    held: Any
    pos_learn: Pos
    pos_held: Pos
    fit: Tensor
    check: Tensor
    same_learn: Any
    same_held: Any
    train: Tensor
    held_rows: Tensor
    groups_learn: Tensor
    groups_held: Tensor


def _divide(
    model: HookedModel,
    pairs: Any,
    same: Any,
    given: Any,
    pos: Any,
    splits: Sequence[float],
    seed: int,
    whole: bool,
    batch_size: int,
) -> _Parts:
    """Split the pairs; ``whole`` says that validation pairs are learned on as well."""
    known = pos is None or isinstance(pos, Tensor) or (isinstance(pos, str) and pos == "last")
    if not (known or (isinstance(pos, int) and not isinstance(pos, bool))):
        raise InputError(
            f"das() learns one subspace: pos={pos!r} must be None, one position, 'last', or a tensor with one per pair"
        )
    groups = _groups([pairs] if same is None else [pairs, same], groups_of_pairs(pairs, given))
    split = split_by_group(groups, splits, seed)
    n = len(pairs)
    first, second, held = (part[part < n].cpu() for part in (split.train, split.val, split.test))
    ok = _correct(model, pairs, batch_size)
    first, second = first[ok[first]], second[ok[second]]
    if not len(first) or not len(second) or not len(held):
        raise InputError(
            f"of {n} pairs both runs answer {int(ok.sum())} correctly, which leaves {len(first)} to learn from, {len(second)} for "
            f"validation and {len(held)} to test on. Give more pairs, or a model that has learned the task"
        )
    rows = torch.cat([first, second])
    train = rows if whole else first
    same_learn = same_held = None
    if same is not None:
        if isinstance(pos, Tensor):
            raise InputError("same_pairs= takes pos as None, a position or 'last'")
        inside = [part[part >= n].cpu() - n for part in (torch.cat([split.train, split.val]), split.test)]
        same_learn, same_held = (same[part] for part in inside)
        if not all(len(part) for part in inside):
            raise InputError(f"{len(same)} same_pairs are too few to learn from and to test on. Give more")

    def at(part: Tensor) -> Any:
        return pos[part] if isinstance(pos, Tensor) else pos

    return _Parts(
        pairs[rows], pairs[held], at(rows), at(held), torch.arange(len(train)), torch.arange(len(first), len(rows)),
        same_learn, same_held, train, held, groups[rows], groups[held],
    )  # fmt: skip


def _groups(sets: Sequence[Any], given: Tensor) -> Tensor:
    """A group for each pair of all sets: those of one given group of the first set, or that share a sequence. (pair,)"""
    sizes = [len(of) for of in sets]
    seen: dict[Any, int] = {}
    sides = [
        torch.tensor([seen.setdefault(key, len(seen)) for key in _keys(of, side)])[:, None]
        for of in sets
        for side in (0, 1)
    ]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    own = [torch.arange(n) + start for n, start in zip(sizes, starts, strict=True)]
    own[0] = given  # ids of fewer than sizes[0]
    ids = torch.cat([part for part in own for _ in range(2)])
    groups = copies_together(torch.cat(sides), ids)
    # The clean side of each pair; its corrupted one has the same group.
    return torch.cat([groups[2 * start : 2 * start + n] for n, start in zip(sizes, starts, strict=True)])


def _keys(pairs: Any, side: int) -> list[Any]:
    """What tells the inputs of one side apart, example by example: equal where all arguments are, padding apart."""
    examples, mask = pairs.sides[side], (pairs.mask, pairs.corrupted_mask)[side]
    if examples.plain:
        rows = real_tokens(examples.main, mask).tolist()
        return [tuple(token for token in row if token != -1) for row in rows]
    parts = [examples.main] if isinstance(examples.inputs, Tensor) else list(examples.batched.values())
    return [
        tuple((tuple(part.shape[1:]), bytes(part[i].detach().cpu().contiguous().view(-1).numpy())) for part in parts)
        for i in range(len(examples))
    ]


def _correct(model: HookedModel, pairs: Any, batch_size: int) -> Tensor:
    """Whether both runs of each pair give their own answers. (pair,)"""
    sides = chosen_sides(model, pairs, "das()")
    clean, corrupted = (
        plan(
            model, one.examples, (), one.read, batch_size=batch_size, attention_mask=one.told, always=one.always
        ).run().base
        for one in (sides.clean, sides.corrupted)
    )  # fmt: skip
    need_logits(clean, corrupted)
    return (clean[:, 0] > 0) & (corrupted[:, 1] > 0)


class _Place:
    """One hook point of one model, where subspaces are learned and tested."""

    def __init__(self, parts: _Parts, model: HookedModel, site: Names, head: int | None) -> None:
        points = resolve(model, site)
        if len(points) != 1:
            names = ", ".join(point.name for point in points[:3])
            raise InputError(
                f"das() learns one subspace at one hook point, and {site!r} names {len(points)}: {names}, …"
            )
        (self.point,) = points
        self.model, self.parts, self.name = model, parts, self.point.name
        self.sides = chosen_sides(model, parts.learn, "das()")
        column, taken = self._column(parts.learn, self.sides)
        check_positions(model, [self.name], [column])
        one = activations_of(model, chosen_sides(model, parts.learn[:1], "das()").clean, self.name, 1)[0]
        shape = tuple(one.shape[2:])
        inside = head_columns(model, self.name, head, shape)
        first, last, _ = inside.indices(math.prod(shape))
        self.head, self.width, self.lift = head, last - first, (first, math.prod(shape) - last)
        self.answers = [self.sides.answers]
        self.swaps = [Swaps(model, self.sides, self.name, column, self.lift, taken)]
        if parts.same_learn is not None:
            alike = chosen_sides(model, parts.same_learn, "das()")
            again, source = self._column(parts.same_learn, alike)
            self.answers.append(alike.answers)
            self.swaps.append(Swaps(model, alike, self.name, again, self.lift, source))

    def _column(self, pairs: Any, sides: Sides) -> Column:
        """The positions that are swapped, on the corrupted side and on the clean one."""
        pos: Any = self.parts.pos_learn
        length = length_at(self.model, sides.corrupted, [self.name], pairs, pos is not None)
        return columns(pos, length, len(pairs), pairs)[0][0]

    def learn(
        self, rank: int, schedule: Schedule, bar: Any, first: Tensor | None = None, shuffled: bool = False
    ) -> Learned:
        """The subspace that brings the source's answers; with ``shuffled`` those of other pairs."""
        return learn(self._lessons(shuffled, schedule.seed), self.width, rank, schedule, bar, first)

    def learn_rank(self, schedule: Schedule, bar: Any, most: int) -> tuple[Learned, list[dict[str, Any]]]:
        """The smallest sufficient rank, judged on validation pairs; and what was tried."""
        check = Lesson(self.swaps[0], self.parts.check, self.answers[0][:, 0])
        return learn_rank(
            lambda rank, first: self.learn(rank, schedule, bar, first),
            lambda q: check.scores(q, 64),
            len(check.rows),
            most,
        )

    def subspace(self, basis: Tensor, label: str) -> Subspace:
        """Directions as a subspace of the whole activation, around its mean over the pairs learned from."""
        acts, real = activations_of(self.model, self.sides.clean, self.name, 64)
        mean = acts.flatten(2)[real].double().mean(0)
        return Subspace(torch.nn.functional.pad(basis, self.lift), mean, label)

    def test(
        self, space: Subspace, progress: bool, correct: Tensor | None = None, train: bool = False, **options: Any
    ) -> InterchangeResult:
        """Interchanges of held-out pairs, or of those that were learned from."""
        parts = self.parts
        pairs, pos, groups = parts.held, parts.pos_held, parts.groups_held
        if train:
            pairs, groups = parts.learn[parts.fit], parts.groups_learn[parts.fit]
            pos = parts.pos_learn[parts.fit] if isinstance(parts.pos_learn, Tensor) else parts.pos_learn
        given = swapped(self.name, space, self.head, self.width)
        planned = interchange_plan(self.model, pairs, given, pos=pos, groups=groups, **options)
        return planned.run(progress, correct)

    def _lessons(self, shuffled: bool, seed: int) -> list[Lesson]:
        parts, gen = self.parts, torch.Generator().manual_seed(seed)
        wanted = [(parts.fit, self.answers[0][:, 0])]
        if parts.same_learn is not None:
            wanted.append((torch.arange(len(parts.same_learn)), self.answers[1][:, 1]))
        if shuffled:
            wanted = [(rows, _shuffled(answers, rows, gen)) for rows, answers in wanted]
        return [Lesson(swaps, rows, answers) for swaps, (rows, answers) in zip(self.swaps, wanted, strict=True)]


def _shuffled(answers: Tensor, rows: Tensor, gen: torch.Generator) -> Tensor:
    """Answers exchanged among some pairs. (example, ...)"""
    out = answers.clone()
    out[rows] = answers[rows[torch.randperm(len(rows), generator=gen)]]
    return out


def _controls(
    parts: _Parts,
    here: _Place,
    head: int | None,
    untrained: HookedModel | Literal[False] | None,
    other_site: Names,
    seed: int,
) -> tuple[dict[str, _Place], list[str]]:
    """Where subspaces are learned again, by condition, and why others are missing."""
    places, missing = {}, []
    if untrained is not False:
        try:
            other = made_again(here.model, seed + 1000) if untrained is None else untrained
            need_wrapped(other)
            places["untrained"] = _Place(parts, other, here.name, head)
        except ProbelensError as err:
            if untrained is not None:
                raise
            missing.append(f"untrained: {err}")
    if other_site is not None:
        places["other_site"] = _Place(parts, here.model, other_site, None)
    return places, missing


def _row(condition: str, found: InterchangeResult) -> dict[str, Any]:
    """The row of a subspace that isn't judged itself."""
    (row,) = found.targets()
    return {**{k: v for k, v in row.items() if k not in _JUDGED}, "condition": condition}

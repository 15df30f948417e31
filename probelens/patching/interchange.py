"""Interchange: does the model *follow* when only a variable's subspace is taken from another run?

Ablation asks whether the model breaks. An interchange takes a base run (the corrupted side of each pair) and a
source (the clean side) and puts only the projection of the source's activation in. If the answer becomes the
source's, and does not with everything but that projection, the variable is used there. Every answer comes with
its controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.swap import Swap, factors
from probelens.hooks.edits.values import Replace
from probelens.hooks.inputs import padding_mask
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped, resolve
from probelens.numerics.tensors import whole_number
from probelens.patching.interchange_result import InterchangeResult, interchange_rows
from probelens.patching.pairs import check_pairs, check_positions, columns
from probelens.patching.plan import Source
from probelens.results.sentences import count
from probelens.running.collect import collect
from probelens.running.sweep.conditions import Condition, Read
from probelens.running.sweep.plan import SweepPlan, plan

if TYPE_CHECKING:
    from probelens.hooks.shorthand import Names
    from probelens.patching.pairs import Pos

__all__ = ["CONTROLS", "InterchangePlan", "interchange", "interchange_plan"]

CONTROLS = ("random", "random_matched", "orthogonal_pca")
DRAWS = 20  # of each random control, where controls=None
_WIDEST = 4096  # features up to which a covariance is formed for the controls that need one


@dataclass(frozen=True, eq=False)
class Swapped:
    """One interchange: a part of the activation at a site and a position.

    Args:
        about: The first columns of the row.
        left: Directions that change, as rows; None for the whole activation. (rank, d)
        right: Directions that are read. (rank, d)
        complement: Whether everything but this part is taken.
    """

    about: dict[str, Any]
    left: Tensor | None
    right: Tensor | None
    complement: bool = False

    def edit(self, pos: Tensor | None, source: Tensor) -> Edit:
        """Takes this part from ``source`` at ``pos``."""
        if self.left is None:
            return Replace(pos, source)
        return Swap(pos, source, self.left, self.right, self.complement)


@dataclass(frozen=True, eq=False)
class InterchangePlan:
    """What ``interchange`` will run; ``run`` runs it and gives what ``interchange`` gives.

    Args:
        sweep: The interchanged runs, with the base run.
        source: The run that activations come from.
        same: The interchanged runs of pairs that agree in the variable; None without any.
        parts: The interchange of each run.
    """

    sweep: SweepPlan
    source: SweepPlan
    same: SweepPlan | None
    parts: list[Swapped]
    _values: Source
    _same_values: Source | None

    def __str__(self) -> str:
        sites = len({p.about["site"] for p in self.parts})
        more = "" if self.same is None else f"\npairs that agree in the variable:\n{self.same}"
        return f"interchange: {count(len(self.parts), 'run')} at {count(sites, 'site')}\n{self.sweep}{more}"

    __repr__ = __str__

    def run(self, progress: bool = False) -> InterchangeResult:
        """Interchange as planned.

        Args:
            progress: Show a progress bar.

        Returns:
            What ``interchange`` returns.
        """
        try:
            run = self.sweep.run(progress, "interchanges")
            same = None if self.same is None else self.same.run(progress, "pairs that agree")
        finally:
            self._values.forget()
            if self._same_values is not None:
                self._same_values.forget()
        source = self.source.run()
        # Of each run: whether the answer is the source's, whether it is the base's, the logit difference.
        correct = (source.base[:, 0] > 0) & (run.base[:, 1] > 0)
        rows = interchange_rows(
            [p.about for p in self.parts], run.values, run.base, source.base, correct,
            None if same is None else (same.values, same.base),
        )  # fmt: skip
        return InterchangeResult(rows, run.values[..., 0] > 0, correct, run.path)


def interchange_plan(
    model: HookedModel,
    pairs: Any,
    subspaces: Mapping[Any, Any],
    sites: Names = None,
    pos: Pos = None,
    *,
    same_pairs: Any = None,
    controls: int | None = None,
    kinds: Sequence[str] = CONTROLS,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
) -> InterchangePlan:
    """Say what ``interchange`` will run with these arguments, by which path, and what it costs.

    Args:
        Those of ``interchange``, without ``progress``.

    Returns:
        The plan, to print; its ``run()`` gives what ``interchange`` gives. Activations are collected for the
        controls' covariances meanwhile.

    Raises:
        InputError: As ``interchange``.
        ShapeError: As ``interchange``.
        UnknownHookError: As ``interchange``.
    """
    need_wrapped(model)
    check_pairs(pairs, "denoise")
    draws = DRAWS if controls is None else whole_number("controls", controls, 0)
    if unknown := [kind for kind in kinds if kind not in CONTROLS]:
        raise InputError(f"control {unknown[0]!r} is not known. Allowed: {', '.join(map(repr, CONTROLS))}")
    spaces = by_point(model, subspaces)
    if not spaces:
        raise InputError("subspaces is empty. Give a mapping from hook point to Subspace or Eraser")
    if sites is not None:
        wanted = [point.name for point in resolve(model, sites)]
        if missing := [name for name in wanted if name not in spaces]:
            raise InputError(f"no subspace is given for {missing[0]!r}. Given: {', '.join(spaces)}")
        spaces = {name: spaces[name] for name in wanted}
    where, labels = columns(pos, pairs.clean.shape[1], len(pairs))
    check_positions(model, list(spaces), where)
    parts: list[tuple[Swapped, Tensor | None]] = []
    for name, space in spaces.items():
        made = _parts(model, pairs, name, space, kinds, draws, batch_size, seed)
        for column, label in zip(where, labels, strict=True):
            parts += [(Swapped({**m.about, "pos": label}, m.left, m.right, m.complement), column) for m in made]

    def planned(of: Any, chosen: list[tuple[Swapped, Tensor | None]]) -> tuple[SweepPlan, Source]:
        mask = padding_mask(of.mask, model, of.clean)
        values = Source(model, of.clean, list(spaces), mask)
        conditions = [
            Condition((i,), (values.put_in(part.about["site"], column, part.edit),))
            for i, (part, column) in enumerate(chosen)
        ]
        return plan(
            model, of.corrupted, conditions, _read(of), batch_size=batch_size, source_bytes=values.size,
            attention_mask=mask, memory=memory,
        ), values  # fmt: skip

    sweep, values = planned(pairs, parts)
    same = same_values = None
    if same_pairs is not None:
        check_pairs(same_pairs, "denoise")
        if isinstance(pos, Tensor):
            raise InputError("same_pairs= takes pos as None, 'each', an int, a slice or a list")
        again, _ = columns(pos, same_pairs.clean.shape[1], len(same_pairs))
        by_label = dict(zip(labels, again, strict=True))
        targets = [(p, by_label[p.about["pos"]]) for p, _ in parts if p.about["condition"] == "target"]
        same, same_values = planned(same_pairs, targets)
    source = plan(
        model, pairs.clean, (), _read(pairs), batch_size=sweep.batch_size,
        attention_mask=padding_mask(pairs.mask, model, pairs.clean), memory=memory,
    )  # fmt: skip
    return InterchangePlan(sweep, source, same, [p for p, _ in parts], values, same_values)


def interchange(
    model: HookedModel,
    pairs: Any,
    subspaces: Mapping[Any, Any],
    sites: Names = None,
    pos: Pos = None,
    *,
    same_pairs: Any = None,
    controls: int | None = None,
    kinds: Sequence[str] = CONTROLS,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> InterchangeResult:
    """Put only a subspace's part of the clean run into the corrupted run, and ask whether the answer follows.

    The base is the corrupted run, the source the clean one: h ← h_b + QᵀQ (h_s − h_b) at the positions asked for, or
    h_b + L R (h_s − h_b) for an eraser. Beside each subspace stand the *full* swap (the ceiling), its *complement*
    (everything but Q: what is left must not do it), *random* subspaces of equal rank, random ones that carry equal
    variance of the difference between the runs (*random_matched*), and the leading principal components orthogonal to Q
    (*orthogonal_pca*).

    Args:
        model: The wrapped model; run in eval mode.
        pairs: ``PatchPairs`` that differ in the variable.
        subspaces: Hook point to ``Subspace`` or ``Eraser``, as wide as the activation; axes after the position (heads,
            channels, states) are taken together. Residual points, mixers, heads, SSM states, h and c alike.
        sites: Only these of the subspaces' sites; None for all.
        pos: None (all positions at once), "each", a position, slice or list, or one for each example (example,).
        same_pairs: ``PatchPairs`` whose two sides agree in the variable: the answer must stay (row "same_value").
        controls: Draws of each random control; None for 20.
        kinds: Which controls beside full swap and complement.
        seed: Of the control draws.
        batch_size, memory, progress: As for ``patch``.

    Returns:
        Interchange intervention accuracy (IIA): the share of pairs, of those both runs answer correctly, whose argmax
        over all classes is the source's answer; with exact binomial intervals, the part of the logit difference
        recovered, and a verdict for each site and position:

        - "used": Q does it beyond every control, and its complement is at chance;
        - "used elsewhere": the full swap does it, Q does not;
        - "spread": Q does it, and its complement does not stay at chance;
        - "not here": not even the full swap moves the answer;
        - "underpowered": the intervals are too wide to say.

        A control that shares 0.3 or more of the target (``control_overlap``) contains it and is no control; it is left
        out of the verdict.

    Units:
        Fractions of pairs.

    Raises:
        InputError: No subspace, an unknown control, a position out of range.
        ShapeError: A subspace of another width than its site.
        UnknownHookError: A site that the model doesn't have.

    Source:
        Geiger et al. 2021, arXiv 2106.02997; Geiger et al. 2024, arXiv 2301.04709.
    """
    return interchange_plan(
        model, pairs, subspaces, sites, pos, same_pairs=same_pairs, controls=controls, kinds=kinds,
        batch_size=batch_size, memory=memory, seed=seed,
    ).run(progress)  # fmt: skip


def _parts(
    model: HookedModel, pairs: Any, name: str, space: Any, kinds: Sequence[str], draws: int, batch_size: int, seed: int
) -> list[Swapped]:
    """What is interchanged at one site: the target, full and complement, and the controls."""
    from probelens.subspaces.fitted import top_pca
    from probelens.subspaces.leace import Eraser
    from probelens.subspaces.matched import random, random_matched
    from probelens.subspaces.subspace import Subspace

    if not isinstance(space, Subspace | Eraser):
        raise InputError(
            f"the subspace for {name!r} is a {type(space).__name__}. Give a Subspace or an Eraser, such as "
            "probelens.subspaces.class_means(X, y)"
        )
    left, right = factors(space)
    change = _differences(model, pairs, name, batch_size)
    if change.shape[-1] != space.d:
        raise ShapeError(
            f"the subspace for {name!r} has width {space.d}, the activations there have {change.shape[-1]}"
        )
    about = {"site": name, "layer": model.point(name).depth, "draw": 0, "control_overlap": None}
    out = [
        Swapped({**about, "condition": "full", "rank": space.d}, None, None),
        Swapped({**about, "condition": "target", "rank": space.rank, "control_problem": None}, left, right),
        Swapped({**about, "condition": "complement", "rank": space.d - space.rank}, left, right, True),
    ]
    problem = out[1].about
    if not space.rank or space.rank >= space.d:
        problem["control_problem"] = (
            "the subspace is empty or the whole activation, so there is nothing to compare with"
        )
        return out
    target = space if isinstance(space, Subspace) else Subspace(torch.linalg.qr(space.left).Q.mT, space.mean)

    def control(kind: str, i: int, q: Subspace) -> Swapped:
        here = {**about, "condition": kind, "draw": i, "rank": q.rank, "control_overlap": target.overlap(q)}
        return Swapped(here, q.basis, q.basis)

    if "random" in kinds:
        out += [control("random", i, random(space.rank, space.d, seed=seed * 1000 + i)) for i in range(draws)]
    if space.d > _WIDEST:
        problem["control_problem"] = (
            f"the activation is {space.d} wide, over {_WIDEST}: only random subspaces are drawn"
        )
        return out
    # What an interchange moves is a difference of two runs, so that is what a control must match.
    second = change.double().mT @ change.double() / len(change)
    if "random_matched" in kinds and draws:
        try:
            found = random_matched(target, second, n=draws, seed=seed)
        except InputError as err:
            found, problem["control_problem"] = [], str(err)
        out += [control("random_matched", i, q) for i, q in enumerate(found)]
    if "orthogonal_pca" in kinds:
        basis = target.basis.to(second)
        rest = torch.eye(space.d, dtype=second.dtype) - basis.mT @ basis
        rank = min(space.rank, space.d - space.rank)
        q = top_pca(rank, rest @ second @ rest, torch.zeros(space.d, dtype=second.dtype))
        out.append(control("orthogonal_pca", 0, q))
    return out


def _differences(model: HookedModel, pairs: Any, name: str, batch_size: int) -> Tensor:
    """Clean less corrupted activations at real positions. (row, d)"""
    mask = padding_mask(pairs.mask, model, pairs.clean)
    clean, corrupted = (
        collect(model, tokens, [name], batch_size=batch_size, attention_mask=mask)[name].flatten(2)
        for tokens in (pairs.clean, pairs.corrupted)
    )
    return (clean - corrupted)[pairs.mask]


def _read(pairs: Any) -> Read:
    return Read(_answers, pairs.read_pos[:, None].long(), {"answers": pairs.answers})


def _answers(logits: Tensor, answers: Tensor) -> Tensor:
    """Whether the answer is the source's, whether it is the base's, and the logit difference. (example, 3)"""
    scores = logits[:, 0].float()
    high = int(answers.max())
    if high >= scores.shape[-1]:
        raise InputError(f"answer id {high} is outside the {scores.shape[-1]} logits of the model")
    best = scores.argmax(-1)
    gap = scores.gather(1, answers[:, :1]) - scores.gather(1, answers[:, 1:])
    return torch.cat([(best[:, None] == answers).float(), gap], 1)

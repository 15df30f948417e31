"""Interchange: does the model *follow* when only a variable's subspace is taken from another run?

Ablation asks whether the model breaks. An interchange takes a base run (the corrupted side of each pair) and a
source (the clean side) and puts only the projection of the source's activation in. If the answer becomes the
source's, and does not with everything but that projection, the variable is used there. Every answer comes with
its controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped, resolve
from probelens.numerics.tensors import whole_number
from probelens.patching.interchange_parts import CONTROLS, Given, Swapped, parts_at
from probelens.patching.interchange_result import InterchangeResult
from probelens.patching.interchange_rows import groups_of_pairs, interchange_rows
from probelens.patching.metric import need_logits
from probelens.patching.pairs import Column, check_pairs, check_positions, chosen_sides, columns, length_at
from probelens.patching.plan import Source
from probelens.probing.result import read_above
from probelens.results.sentences import count
from probelens.running.sweep.conditions import Condition
from probelens.running.sweep.plan import SweepPlan, plan
from probelens.running.sweep.rounding import kept
from probelens.running.workers import Executor, takes_executor
from probelens.subspaces.directions import definition_of, spaces_of

if TYPE_CHECKING:
    from probelens.hooks.shorthand import Names
    from probelens.patching.pairs import Pos, Sides
    from probelens.probing.directions import Definition
    from probelens.probing.result import ProbeResult

__all__ = ["CONTROLS", "InterchangePlan", "interchange", "interchange_plan"]

DRAWS = 20  # of each random control, where controls=None


@dataclass(frozen=True, eq=False)
class InterchangePlan:
    """What ``interchange`` will run; ``run`` runs it and gives what ``interchange`` gives.

    Args:
        sweep: The interchanged runs, with the base run.
        source: The run that activations come from.
        same: The interchanged runs of pairs that agree in the variable; None without any.
        same_source: The run of their other side; None without any.
        parts: The interchange of each run.
    """

    sweep: SweepPlan
    source: SweepPlan
    same: SweepPlan | None
    same_source: SweepPlan | None
    parts: list[Swapped]
    _values: Source
    _same_values: Source | None
    _groups: Tensor
    _same_groups: Tensor | None

    def __str__(self) -> str:
        sites = len({p.about["site"] for p in self.parts})
        more = "" if self.same is None else f"\npairs that agree in the variable:\n{self.same}"
        return f"interchange: {count(len(self.parts), 'run')} at {count(sites, 'site')}\n{self.sweep}{more}"

    __repr__ = __str__

    def run(self, progress: bool = False, correct: Tensor | None = None) -> InterchangeResult:
        """Interchange as planned.

        Args:
            progress: Show a progress bar.
            correct: The pairs that count, where not those that both runs answer correctly. (example,)

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
        agreeing = None
        if same is not None and self.same_source is not None and self._same_groups is not None:
            agreeing = same.values, same.base, self.same_source.run().base, self._same_groups
        need_logits(source.base, run.base)
        # Of each run: whether the answer is the source's, whether it is the base's, the logit difference.
        correct = (source.base[:, 0] > 0) & (run.base[:, 1] > 0) if correct is None else correct
        rows = interchange_rows(
            [p.about for p in self.parts], run.values, run.base, source.base, correct, self._groups,
            agreeing,
        )  # fmt: skip
        return InterchangeResult(rows, run.values[..., 0] > 0, correct, run.path, kept(run.rounding))


def interchange_plan(
    model: HookedModel,
    pairs: Any,
    subspaces: Mapping[Any, Any] | ProbeResult,
    sites: Names = None,
    pos: Pos = None,
    *,
    directions: Definition | None = None,
    label: str | None = None,
    rank: int | None = None,
    same_pairs: Any = None,
    groups: Any = None,
    controls: int | None = None,
    kinds: Sequence[str] = CONTROLS,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
) -> InterchangePlan:
    """Say what ``interchange`` will run with these arguments, by which path, and what it costs.

    Args:
        Those of ``interchange``, without ``progress`` and ``executor``.

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
    whole_number("seed", seed, 0)
    draws = DRAWS if controls is None else whole_number("controls", controls, 0)
    if unknown := [kind for kind in kinds if kind not in CONTROLS]:
        raise InputError(f"control {unknown[0]!r} is not known. Allowed: {', '.join(map(repr, CONTROLS))}")
    given = _given(model, subspaces, sites, directions, label, rank)
    names = list(given.spaces)
    grouped = groups_of_pairs(pairs, groups)
    sides = chosen_sides(model, pairs, "interchange()")
    where, labels = columns(pos, length_at(model, sides.corrupted, names, pairs, pos is not None), len(pairs), pairs)
    check_positions(model, names, [target for target, _ in where])
    parts: list[tuple[Swapped, Column]] = []
    for place, name in enumerate(names):
        made = parts_at(model, sides, where, name, given, kinds, draws, batch_size, seed, place)
        for column, text in zip(where, labels, strict=True):
            parts += [(replace(m, about={**m.about, "pos": text}), column) for m in made]

    def planned(of: Sides, chosen: list[tuple[Swapped, Column]]) -> tuple[SweepPlan, Source]:
        values = Source(model, of.clean.examples, names, of.clean.told)
        conditions = [
            Condition((i,), (part.intervention(model, values, column),)) for i, (part, column) in enumerate(chosen)
        ]
        base = of.corrupted
        return plan(
            model, base.examples, conditions, base.read, batch_size=batch_size, source_bytes=values.size,
            always=base.always, attention_mask=base.told, memory=memory,
        ), values  # fmt: skip

    def unedited(of: Sides) -> SweepPlan:
        return plan(
            model, of.clean.examples, (), of.clean.read, batch_size=sweep.batch_size, attention_mask=of.clean.told,
            memory=memory,
        )  # fmt: skip

    sweep, values = planned(sides, parts)
    same = same_values = same_source = None
    if same_pairs is not None:
        check_pairs(same_pairs, "denoise")
        if isinstance(pos, Tensor):
            raise InputError("same_pairs= takes pos as None, 'each', 'last', a span, an int, a slice or a list")
        alike = chosen_sides(model, same_pairs, "interchange()")
        long = length_at(model, alike.corrupted, names, same_pairs, pos is not None)
        again, texts = columns(pos, long, len(same_pairs), same_pairs)
        if texts != labels:
            raise InputError(
                f"pos={pos!r} means {count(len(labels), 'position')} of the pairs and {count(len(texts), 'position')} of "
                "same_pairs. Give pairs of equal length, or a list of positions"
            )
        by_label = dict(zip(labels, again, strict=True))
        targets = [(p, by_label[p.about["pos"]]) for p, _ in parts if p.about["condition"] == "target"]
        same, same_values = planned(alike, targets)
        same_source = unedited(alike)
    source = unedited(sides)
    agreeing = None if same_pairs is None else groups_of_pairs(same_pairs)
    return InterchangePlan(
        sweep, source, same, same_source, [p for p, _ in parts], values, same_values, grouped, agreeing
    )


@takes_executor
def interchange(
    model: HookedModel,
    pairs: Any,
    subspaces: Mapping[Any, Any] | ProbeResult,
    sites: Names = None,
    pos: Pos = None,
    *,
    directions: Definition | None = None,
    label: str | None = None,
    rank: int | None = None,
    same_pairs: Any = None,
    groups: Any = None,
    controls: int | None = None,
    kinds: Sequence[str] = CONTROLS,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
    executor: Executor = None,
) -> InterchangeResult:
    """Put only a subspace's part of the clean run into the corrupted run, and ask whether the answer follows.

    The base is the corrupted run, the source the clean one: h ← h_b + QᵀQ (h_s − h_b) at the positions asked for, or
    h_b + L R (h_s − h_b) for an eraser. Beside each subspace stand the *full* swap (the ceiling), its *complement*
    (everything but Q: what is left must not do it), *random* subspaces of equal rank, random ones that carry equal
    variance of the difference between the runs (*random_matched*), and the leading principal components orthogonal to Q
    (*orthogonal_pca*); controls are drawn once for each site and used at all its positions. *noise* of the
    activation's own standard deviation says whether the output depends on the site at all.

    Where one linear map is all that reads a site (the input of a plain linear layer, such as ``mlp.hook_post``,
    ``attn.hook_z`` or the unembedding), Q is split into what the map sees (*row_space*) and what it does not
    (*null_space*), and each is interchanged: a subspace that works while the part that is read does not is an illusion.

    Args:
        model: The wrapped model; run in eval mode.
        pairs: ``PatchPairs`` that differ in the variable, of any inputs, with a padding mask for each side. Their answers are
            one class for each side, or a set of which any is right. A model that answers once for each example is read
            without ``read_pos``.
        subspaces: Hook point to ``Subspace`` or ``Eraser``, as wide as the activation; axes after the position (heads,
            channels, states) are taken together. At a point with heads also a mapping from head to one of the head's
            width: each head is then interchanged by itself. Residual points, mixers, heads, SSM states, h and c alike.
            Or a ``ProbeResult``, of whose sites ``directions`` are taken.
        sites: Only these of the subspaces' sites; None for all.
        pos: None (all positions at once), "each", "last" (the last real one of each side), a span of the pairs by its name,
            a position, slice or list, or one for each example (example,) or each side (example, 2) = [clean, corrupted].
        directions: What is taken from a ``ProbeResult``: "class_means" (the default), "pattern", "filter" or "leace"; see
            ``subspaces.directions``.
        label: Label of a ``ProbeResult``; needed where it has several.
        rank: At most so many of these directions, the first ones; None for all.
        same_pairs: ``PatchPairs`` whose two sides agree in the variable: the answer, the second of ``answers``, must stay
            (row "same_value"; its ``stays_anyway`` says how often the clean run has it, too).
        groups: Which pairs are not independent, such as those of one sequence; None for ``pairs.groups`` where there are
            any, otherwise pairs with one clean sequence are a group. (example,)
        controls: Draws of each random control; None for 20.
        kinds: Which controls beside full swap and complement.
        seed: Of the control draws and the noise.
        batch_size, memory, progress, executor: As for ``patch``.

    Returns:
        Interchange intervention accuracy (IIA): the share of pairs, of those both runs answer correctly, whose argmax
        over all classes is the source's answer; with intervals over independent groups of pairs (exact binomial ones
        where each pair is a group), the part of the logit difference recovered, the share of the difference between
        the runs that each condition carries, and a verdict for each site and position. Q *works* if its lower bound is
        above every control's upper bound and at least 0.5; something is *at chance* if its upper bound is below 0.2:

        - "used": Q works, its complement is at chance, it is not illusory, and given ``same_pairs`` the answer stays there;
        - "spread": Q works, and its complement does not stay at chance;
        - "used elsewhere": the full swap does it, Q does not;
        - "illusory": Q works, the part of it that is read does not;
        - "unspecific": a control does it as often, or the answer moves between runs that agree in the variable;
        - "not here": not even the full swap moves the answer;
        - "unread": noise does not change the output at all;
        - "unreadable": Q works, but the probe that it is taken from reads no more there than the best guess without
            activations, so that its class means differ by what goes with the label, such as the token;
        - "no control": the answer follows Q, but no random subspace was drawn that does not contain it; or Q is empty;
        - "underpowered": the intervals are too wide to say.

        A control that shares 0.3 or more of the target (``control_overlap``) contains it and is no control; it is left
        out of the verdict, and ``controls_left_out`` and the findings say how many are. The column ``why`` has the reason where the word doesn't.

    Units:
        Fractions of pairs.

    Raises:
        InputError: Answers that have no argmax (values, several tokens, outputs of one number) or aren't given,
            ``read_pos`` that doesn't go with the outputs, no subspace, an unknown control, a position out of range, ``directions``, ``label`` or ``rank`` with a
            mapping, a head of a point that has none, or an unknown label.
        ShapeError: A subspace of another width than its site, or groups that aren't one for each pair.
        UnknownHookError: A site that the model doesn't have.
        MetricError: The model's own logits are NaN.

    Source:
        Geiger et al. 2021, arXiv 2106.02997; Geiger et al. 2024, arXiv 2301.04709; Makelov et al. 2023, arXiv 2311.17030
        (illusions); Korn and Graubard 1998, Survey Methodology 24 (intervals over groups).
    """
    return interchange_plan(
        model, pairs, subspaces, sites, pos, directions=directions, label=label, rank=rank, same_pairs=same_pairs,
        groups=groups, controls=controls, kinds=kinds, batch_size=batch_size, memory=memory, seed=seed,
    ).run(progress)  # fmt: skip


def _given(
    model: HookedModel, subspaces: Any, sites: Names, directions: Definition | None, label: str | None, rank: int | None
) -> Given:
    """The subspaces of the sites asked for: those of a mapping, or directions of probes."""
    means: dict[str, Tensor] = {}
    read: dict[str, str] = {}
    if isinstance(subspaces, Mapping):
        if label is not None:
            raise InputError(f"label={label!r} names a label of a ProbeResult, and a mapping of subspaces was given")
        flat: dict[Any, Any] = {}
        for key, space in subspaces.items():
            flat.update({(key, head): s for head, s in space.items()} if isinstance(space, Mapping) else {key: space})
        spaces_of(flat, None, directions, rank)  # refuses what is no subspace
        spaces = by_point(model, subspaces)
    else:
        spaces = by_point(model, spaces_of(subspaces, label, directions, rank))
        known = None if len(subspaces.labels) == 1 else label
        read = by_point(model, {site: read_above(subspaces.row(site, known)) for site in subspaces.sites})
        # A result that was saved without class means has its probes' rows only.
        if directions != "filter":
            means = by_point(model, {site: subspaces.directions(site, known).class_means for site in subspaces.sites})
    if sites is not None:
        wanted = [point.name for point in resolve(model, sites)]
        if missing := [name for name in wanted if name not in spaces]:
            raise InputError(f"no subspace is given for {missing[0]!r}. Given: {', '.join(spaces)}")
        spaces = {name: spaces[name] for name in wanted}
    return Given(spaces, definition_of(subspaces, directions), means, read)

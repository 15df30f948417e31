"""The pairs that are patched: at which positions, and both runs of each as a sweep takes them, with what is read of them.

Answers of several tokens are scored under teacher forcing, each in a run of its own: a pair becomes two examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.edits.values import Add
from probelens.hooks.inputs import mask_for_model, padding_mask
from probelens.hooks.model import HookedModel
from probelens.hooks.points import has_positions
from probelens.numerics.tensors import whole_number
from probelens.patching.metric import NAMES, Metric, answered, chosen_answers, read_metric
from probelens.running.shapes import output_shape, positions_at
from probelens.running.sweep.conditions import Intervention, Read
from probelens.running.sweep.plan import sweep
from probelens.tasks.examples import Examples
from probelens.tasks.pairs import PatchPairs, answer_tokens

Pos = Literal["each", "last"] | int | slice | Sequence[int] | Tensor | None
Heads = Literal["each"] | int | Sequence[int] | None
# A position of each pair on the side that is patched, None for all at once, and the one that its activations come from.
Column = tuple[Tensor | None, Tensor | None]
Mode = Literal["denoise", "noise"]


def check_pairs(pairs: Any, mode: str) -> None:
    """Refuse what isn't PatchPairs, or an unknown mode."""
    if mode not in ("denoise", "noise"):
        raise InputError(f"mode {mode!r} is not known. Allowed: 'denoise', 'noise'")
    if not hasattr(pairs, "clean") or not hasattr(pairs, "answers"):
        raise InputError(
            f"patching needs PatchPairs, got a {type(pairs).__name__}. Make them with task.pairs(), or "
            "probelens.PatchPairs(clean, corrupted, edit_pos, read_pos, answers)."
        )
    if not len(pairs):
        raise InputError("there is no pair to patch: clean and corrupted have no example")


def marks(pairs: Any) -> dict[str, int]:
    """Positions that all pairs share: where they were edited, and where the answer is read."""
    found = {"edited": pairs.edit_pos, "read": pairs.read_pos}
    known = {name: pos for name, pos in found.items() if pos is not None}
    return {name: int(pos.flatten()[0]) for name, pos in known.items() if bool((pos == pos.flatten()[0]).all())}


def notes(pairs: Any, answered: bool) -> dict[str, Any]:
    """What a result keeps of its pairs: positions that all share, and whether they lack right answers."""
    return {"marks": marks(pairs), **({} if answered else {"unanswered": True})}


def check_positions(model: HookedModel, names: Sequence[str], columns: Sequence[Tensor | None]) -> None:
    """Refuse (InputError) points without an axis of positions where some positions are to be patched and others not."""
    if all(column is None for column in columns):
        return
    for name in names:
        point = model.point(name)
        if not has_positions(point):
            raise InputError(
                f"{name!r} has the axes {point.axes}, none of positions, so it can't be patched at some of them. "
                "Patch it at all positions at once with pos=None, or take another point"
            )


def columns(pos: Pos, length: int, n: int, pairs: Any = None) -> tuple[list[Column], list[str]]:
    """Columns of a patch result, as if corrupted runs were patched with clean activations; and their labels.

    Each is the position on the corrupted side and that on the clean side, both of each example (example,), or None for
    all positions at once.
    """

    def constant(p: int) -> Column:
        where = torch.full((n,), p % length)
        return where, where

    if pos is None:
        return [(None, None)], ["all"]
    if isinstance(pos, str):
        if pos == "last" and pairs is not None:
            return [(pairs.places("last", 1), pairs.places("last", 0))], ["last"]
        if pairs is not None and pos in pairs.spans:
            return [(pairs.spans[pos], pairs.spans[pos])], [pos]
        if pos != "each":
            raise InputError(
                f"pos={pos!r} is not known. Allowed: None, 'each', 'last', an int, a slice, a list, a tensor"
                + "".join(f", {name!r}" for name in getattr(pairs, "spans", {}))
            )
        pos = slice(None)
    if isinstance(pos, Tensor) and pos.shape in ((n,), (n, 2)) and pos.ndim and n != 0:
        if bool(((pos < -length) | (pos >= length)).any()):
            raise InputError(f"a position is outside the {length} positions of the sequences")
        pos = pos.long() % length
        return [(pos, pos) if pos.ndim == 1 else (pos[:, 1], pos[:, 0])], ["per example"]
    if isinstance(pos, slice):
        wanted = list(range(length))[pos]
    elif isinstance(pos, Tensor):
        raise ShapeError(
            f"pos as a tensor must be (example,), or (example, 2) = [clean, corrupted], with {n} examples, got "
            f"{tuple(pos.shape)}"
        )
    else:
        several = pos if isinstance(pos, Iterable) else [pos]
        wanted = [whole_number("pos", p, -length, length - 1) for p in several]
    if len({p % length for p in wanted}) < len(wanted):
        raise InputError(f"pos={pos!r} names a position more than once among {length}. Give each once")
    if not wanted:
        raise InputError(f"pos={pos!r} selects no position of {length}")
    return [constant(p) for p in wanted], [str(p % length) for p in wanted]


# -- both runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Side:
    """One run: its inputs, the mask that the model is told, what is read, and what is in place in every run of it.

    ``real`` is True where the inputs are no padding. (example, pos) or (example,)
    """

    examples: Examples
    told: Tensor | None
    read: Read
    always: tuple[Intervention, ...] = ()
    real: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sides:
    """Both runs.

    Args:
        clean: The clean run.
        corrupted: The corrupted run.
        n: Pairs.
        runs: Examples of each pair: 2 where each answer has a run of its own.
        answered: Whether the pairs say what the right answers are.
        answers: Classes that are read by ``chosen_answers``, in sets with -1 for none. (example, 2) or (example, 2, class)
    """

    clean: Side
    corrupted: Side
    n: int
    runs: int
    answered: bool
    answers: Tensor = None  # type: ignore[assignment]  # a Tensor from chosen_sides

    def each(self, column: Tensor | None) -> Tensor | None:
        """A position of each pair as one of each example."""
        if column is None or self.runs == 1:
            return column
        if column.ndim == 1:
            return column.repeat(self.runs)
        # A span (example, pos) of texts that answers were put after.
        more = self.clean.examples.main.shape[1] - column.shape[1]
        return torch.nn.functional.pad(column, (0, more)).repeat(self.runs, 1)

    def joined(self, values: Tensor, probabilities: bool) -> Tensor:
        """What was read of the examples (..., example, 2) as the metric and the preference of each pair (..., pair, 2)."""
        if self.runs == 1:
            return values
        first, second = values[..., : self.n, :1], values[..., self.n :, :1]
        metric = first.exp() - second.exp() if probabilities else first - second
        return torch.cat([metric, first - second], -1)

    def answered_by(self, clean: Tensor, corrupted: Tensor) -> Tensor:
        """Whether both runs of each pair prefer their own answer; every pair counts where none is known. (pair,)"""
        return answered(clean, corrupted) if self.answered else torch.ones(self.n, dtype=torch.bool)


def sides_of(model: HookedModel, pairs: PatchPairs, metric: Metric, batch_size: int) -> Sides:
    """Both runs of some pairs; InputError where the metric, the answers and the model's outputs don't go together."""
    answers = answer_tokens(model, pairs.answers)
    read_metric(metric)
    told = [_told(model, pairs, side) for side in (0, 1)]
    shape = output_shape(model, pairs.sides[0], told[0])
    several = isinstance(answers, Tensor) and answers.ndim == 3 and not pairs.any_of
    _check(model, pairs, answers, metric, shape, several)
    noise = _noise(model, pairs)
    if several:
        made = [_forced(model, pairs, answers, side, metric) for side in (0, 1)]
    else:
        made = [_side(pairs, side, told[side], answers, metric, len(shape) == 3) for side in (0, 1)]
        if metric == "kl":
            made = _with_reference(model, made, batch_size)
    clean, corrupted = made[0], replace(made[1], always=noise)
    whole = len(shape) == 3 and pairs.read_pos is None
    known = answers is not None and not whole and not (metric == "kl" and answers.is_floating_point())
    return Sides(clean, corrupted, len(pairs), 2 if several else 1, known)


def chosen_sides(model: HookedModel, pairs: PatchPairs, caller: str) -> Sides:
    """Both runs of some pairs, read by ``chosen_answers``: the answer of a run is the argmax over all classes.

    Raises InputError where there is none: values, answers of several tokens, outputs of one number.
    """
    answers = None if pairs.answers is None else answer_tokens(model, pairs.answers)
    taken = (
        f"{caller} takes one class for each side, or a set of them: the answer of a run is its argmax over all classes"
    )
    if answers is not None and answers.is_floating_point():
        raise InputError(
            f"answers are values, {tuple(answers.shape)} of {answers.dtype}, and values have no argmax. {taken}. For values, "
            "pl.patch(metric='value') puts whole activations in, and pl.erase(metric='r2') removes a subspace; or swap "
            "one with pl.edits.swap in run_with_hooks and read the number"
        )
    if answers is not None and answers.ndim == 3 and not pairs.any_of:
        raise InputError(
            f"answers are of up to {answers.shape[2]} tokens, and several tokens have no argmax",
            f"{taken}. Give the first token of each, or sets where the tokens are alternatives (any_of=True); pl.patch scores "
            "answers of several tokens by their log-probability",
        )
    told = [_told(model, pairs, side) for side in (0, 1)]
    shape, kind = output_shape(model, pairs.sides[0], told[0]), f"this {type(model.module).__name__}"
    _check_places(kind, pairs, shape)
    if len(shape) == 1 or shape[-1] == 1:
        raise InputError(
            f"{kind} gives one number, which has no argmax",
            f"{taken}. Give two logits with pl.wrap(module, output=...), such as "
            "lambda out: torch.stack([0 * out, out], -1) where the number is a logit; for values, pl.patch(metric='value') "
            "puts whole activations in, and pl.erase(metric='r2') removes a subspace",
        )
    if answers is None:
        raise InputError(
            f"{caller} asks whose answer a run gives, and the pairs say none", "Give PatchPairs(answers=...)"
        )
    made = []
    for side in (0, 1):
        where = pairs.places("read_pos", side)
        read = Read(
            chosen_answers, None if where is None else where[:, None].long(), {"answers": answers},
            by_position=len(shape) == 3,
        )  # fmt: skip
        made.append(Side(pairs.sides[side], told[side], read, real=(pairs.mask, pairs.corrupted_mask)[side]))
    return Sides(made[0], replace(made[1], always=_noise(model, pairs)), len(pairs), 1, True, answers)


def _told(model: HookedModel, pairs: PatchPairs, side: int) -> Tensor | None:
    """The attention mask for one side's inputs; a mapping has its own."""
    mask, examples = (pairs.mask, pairs.corrupted_mask)[side], pairs.sides[side]
    if mask.ndim != 2 or "attention_mask" in examples.batched:
        return None
    return mask_for_model(model, padding_mask(mask, model, examples.main), examples.inputs)


def _check(
    model: HookedModel, pairs: PatchPairs, answers: Tensor | None, metric: Metric, shape: Sequence[int], several: bool
) -> None:
    kind = f"this {type(model.module).__name__}"
    _check_places(kind, pairs, shape, callable(metric))
    number = len(shape) == 1 or shape[-1] == 1
    if metric in ("logit_diff", "prob_diff"):
        if number:
            raise InputError(
                f"metric={metric!r} needs a logit for each class, and {kind} gives one number. Give metric='value'"
            )
        if answers is None or answers.is_floating_point():
            raise InputError(f"metric={metric!r} compares two answers. Give PatchPairs(answers=...), or metric='kl'")
    if metric in ("value", "mse") and not number:
        raise InputError(
            f"metric={metric!r} needs one number as the answer, and {kind} gives {shape[-1]}. Give metric='kl'"
        )
    if metric == "mse" and (answers is None or not answers.is_floating_point()):
        raise InputError(
            "metric='mse' compares with the right values. Give PatchPairs(answers=values), (example, 2) floats"
        )
    if metric == "kl" and number:
        raise InputError(f"metric='kl' compares distributions, and {kind} gives one number. Give metric='value'")
    if several and metric not in ("logit_diff", "prob_diff"):
        raise InputError(
            f"answers of several tokens are scored by their summed log-probability, and metric={_said(metric)} isn't. Give "
            "'logit_diff' (the difference of the sums) or 'prob_diff'"
        )


def _check_places(kind: str, pairs: PatchPairs, shape: Sequence[int], whole: bool = False) -> None:
    """Refuse (InputError) pairs that say where an answer at no position is read, or, unless ``whole``, that don't say where."""
    if len(shape) == 3 and pairs.read_pos is None and not whole:
        raise InputError(
            f"{kind} answers at each position. Say where it is read: PatchPairs(read_pos=...), such as 'last'"
        )
    if len(shape) < 3 and pairs.read_pos is not None:
        raise InputError(f"{kind} answers once for each example, at no position. Leave out read_pos (None)")


def _said(metric: Metric) -> str:
    return repr(metric) if metric in NAMES else "a function"


def _side(
    pairs: PatchPairs, side: int, told: Tensor | None, answers: Tensor | None, metric: Metric, by_position: bool
) -> Side:
    where = pairs.places("read_pos", side)
    whole = by_position and where is None
    read_metric_of = read_metric(metric, by_position and not whole, pairs.any_of)
    data: dict[str, Any] = {} if answers is None else {"answers": answers}
    pos = None if where is None else where[:, None].long()
    return Side(pairs.sides[side], told, Read(read_metric_of, pos, data, by_position=by_position))


def _with_reference(model: HookedModel, made: list[Side], batch_size: int) -> list[Side]:
    clean = made[0]
    read = Read(_outputs, clean.read.pos, by_position=clean.read.by_position)
    outputs = sweep(model, clean.examples, (), read, batch_size=batch_size, attention_mask=clean.told).base
    return [replace(one, read=replace(one.read, data={**one.read.data, "unedited": outputs})) for one in made]


def _outputs(logits: Tensor) -> Tensor:
    return logits


def _noise(model: HookedModel, pairs: PatchPairs) -> tuple[Intervention, ...]:
    noise = pairs.noise
    if noise is None:
        return ()
    if "hook_embed" not in model.hook_dict:
        raise InputError("the pairs put noise on hook_embed, and this model has none")
    return (Intervention("hook_embed", lambda rows: Add(None, noise[rows % len(noise)])),)


# -- answers of several tokens -------------------------------------------------------------------------


def _forced(model: HookedModel, pairs: PatchPairs, answers: Tensor, side: int, metric: Metric) -> Side:
    """One side with each answer after its read position: the clean answers of all pairs, then the corrupted ones."""
    examples, mask = pairs.sides[side], (pairs.mask, pairs.corrupted_mask)[side]
    read = pairs.places("read_pos", side)
    if not examples.plain or read is None:
        raise InputError("answers of several tokens need token ids (example, pos) and read_pos")
    tokens, more = examples.main, answers.shape[2] - 1
    if not torch.equal(read, pairs.places("last", side)):  # type: ignore[arg-type]
        raise InputError(
            "answers of several tokens come after the read position, which must be the last real one. Give read_pos='last', "
            "and a mask where sequences are padded"
        )
    wide = [torch.cat([x, x.new_zeros(len(x), more)], 1) for x in (tokens, mask)]
    parts = []
    for which in (0, 1):
        (text, real), answer = (x.clone() for x in wide), answers[:, which]
        at = read[:, None] + 1 + torch.arange(more)
        # The last token of an answer is predicted, and not an input.
        given = (answer[:, 1:] >= 0).to(text.device)
        text = text.scatter(1, at, torch.where(given, answer[:, :-1], text.gather(1, at)))
        parts.append((text, real.scatter(1, at, given), answer))
    text, real, answer = (torch.cat([part[i] for part in parts]) for i in range(3))
    both = read.repeat(2)
    pos = (both[:, None] + torch.arange(more + 1)).where(answer >= 0, both[:, None])
    told = mask_for_model(model, padding_mask(real, model, text), text)
    return Side(Examples(text), told, Read(_log_probability, pos, {"tokens": answer}))


def _log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Summed log-probability of an answer's tokens: logits (example, token, d_vocab), tokens with −1 for none. (example, 1)"""
    if (high := int(tokens.max())) >= logits.shape[-1]:
        raise InputError(f"answer id {high} is outside the {logits.shape[-1]} logits of the model")
    each = logits.float().log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return each.masked_fill(tokens < 0, 0.0).sum(1, keepdim=True)


# -- positions -----------------------------------------------------------------------------------------


def length_at(model: HookedModel, side: Side, names: Sequence[str], pairs: PatchPairs, some: bool) -> int:
    """Positions of the activations that are patched; InputError where sites differ and only some are to be patched."""
    if pairs.sides[0].plain:
        return int(pairs.sides[0].main.shape[1])
    found = positions_at(model, side.examples, names, side.told)
    lengths = sorted(set(found.values()))
    if len(lengths) > 1 and some:
        raise InputError(
            f"the sites have different numbers of positions, {lengths}. Patch them one by one, or pos=None"
        )
    return lengths[0] if lengths else 1

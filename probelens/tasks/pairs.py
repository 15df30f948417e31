"""``PatchPairs``: clean and corrupted inputs, where they are edited and read, and the right answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.tasks.data import Batch, Index, chosen_rows, inputs_of, integers, mask_of
from probelens.tasks.examples import Examples
from probelens.tasks.text import aligned

__all__ = ["PatchPairs"]

Place = int | Sequence[int] | Tensor | Literal["last"] | None
PAD = -1
"""Stands in answers of several tokens, or sets of them, where one has fewer than others."""


@dataclass(frozen=True, eq=False)
class PatchPairs:
    """Clean and corrupted inputs, where they differ, where to read, and the right answers of both.

    A position is an int for all pairs, one for each (example,), one for each side (example, 2) = [clean, corrupted], or
    "last", the last real position of each side; negative ones count from the end.

    Args:
        clean: Token ids (example, pos), other inputs (example, ...), or a mapping of the forward's own arguments.
        corrupted: The same of the corrupted run, in the same shapes. (example, ...)
        edit_pos: A position at which the two differ; tasks make it the only one. None where there is none to name. (example,)
        read_pos: Position whose logits are read; None where the model answers once for each example. (example,)
        answers: [clean answer, corrupted answer]: ids into the model's logits (example, 2); answers of several tokens, which
            are scored by their summed log-probability (example, 2, token), -1 after the last; pairs of sets of ids, or of
            strings; or the two right values of a regression (example, 2). None for metrics that need none.
        mask: True on real tokens, False on padding, of clean inputs and, without ``corrupted_mask``, of both. All True when
            left out. (example, pos) bool
        label: Name of the label whose classes the answers are, or "".
        corrupted_mask: The same of corrupted inputs. (example, pos) bool
        any_of: The last axis of answers (example, 2, token) holds alternatives, not a sequence.
        noise: What is added to the embedding in the corrupted run. (example, pos, d_model)
        spans: Positions by name, True inside, to be given as ``pos=``; the same on both sides. each (example, pos) bool

    Raises:
        ShapeError: The tensors don't fit each other.
        InputError: A wrong dtype, a position outside the sequence, equal inputs at edit_pos, or equal answers.

    Examples:
        >>> pairs = PatchPairs(
        ...     clean=torch.tensor([[0, 1, 1]]), corrupted=torch.tensor([[1, 1, 1]]),
        ...     edit_pos=0, read_pos=-1, answers=torch.tensor([[0, 1]]))
        >>> len(pairs), pairs.length, pairs.read_pos
        (1, 3, tensor([2]))
    """

    clean: Any
    corrupted: Any
    edit_pos: Any = None
    read_pos: Any = None
    answers: Any = None
    mask: Tensor = None  # type: ignore[assignment]  # a Tensor after __post_init__
    label: str = ""
    corrupted_mask: Tensor = None  # type: ignore[assignment]  # a Tensor after __post_init__
    any_of: bool = False
    noise: Tensor | None = None
    spans: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clean, corrupted = (Examples(inputs_of(name, getattr(self, name))) for name in ("clean", "corrupted"))
        _need_alike(clean, corrupted)
        n, length, device = len(clean), clean.length, clean.main.device
        shape = (n,) if length is None else (n, length)
        mask = mask_of(clean.attention_mask if self.mask is None else self.mask, shape, device)
        given = corrupted.attention_mask if self.corrupted_mask is None else self.corrupted_mask
        other = mask if given is None and self.mask is not None else mask_of(given, shape, device)
        masks = (mask, other)
        if given is None and self.mask is not None:
            _need_shared(clean, corrupted, mask)
        vars(self).update(mask=mask, corrupted_mask=other)
        vars(self).update(clean=clean.inputs, corrupted=corrupted.inputs)
        edit = _places("edit_pos", self.edit_pos, masks, length)
        read = _places("read_pos", self.read_pos, masks, length)
        if self.noise is None:
            _need_different(clean, corrupted, edit)
        elif self.noise.ndim != 3 or self.noise.shape[:2] != shape:
            raise ShapeError(
                f"noise has shape {tuple(self.noise.shape)}; it must be (example, pos, d_model) with {shape}."
            )
        answers, any_of = _answers(self.answers, n, self.any_of)
        vars(self).update(edit_pos=edit, read_pos=read, answers=answers, any_of=any_of)

    def __repr__(self) -> str:
        size = f"{len(self)} pairs" + (f" × {self.length} positions" if self.length is not None else "")
        return f"PatchPairs({size}, label: {self.label or 'none'})"

    @functools.cached_property
    def sides(self) -> tuple[Examples, Examples]:
        """The clean and the corrupted inputs, to be cut by example."""
        return Examples(self.clean), Examples(self.corrupted)

    @property
    def length(self) -> int | None:
        """Number of positions, BOS and padding included; None where the inputs don't tell it."""
        return self.sides[0].length

    def places(self, name: str, side: int) -> Tensor | None:
        """Positions of one side.

        Args:
            name: "edit_pos", "read_pos", or "last" for the last real one.
            side: 0 for clean, 1 for corrupted.

        Returns:
            One for each pair, or None. (example,)
        """
        if name == "last":
            return _last((self.mask, self.corrupted_mask)[side])
        found: Tensor | None = getattr(self, name)
        return found if found is None or found.ndim == 1 else found[:, side]

    def batch(self) -> Batch:
        """Both sides as examples, clean ones first, labelled with their own right answers where these are read.

        To be probed, ablated and erased as any other batch: the model's output at ``read_pos`` is compared with the answer.

        Returns:
            Twice as many examples, with the label "answer", or the pairs' own; True in the mask where answers are read, and a
            pair in one group.

        Raises:
            InputError: Pairs without answers, or with answers of several tokens or noise, so that no example has one label.

        Examples:
            >>> pairs = PatchPairs(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]), 0, -1, torch.tensor([[4, 5]]))
            >>> batch = pairs.batch()
            >>> batch.labels["answer"].masked_select(batch.mask), batch.groups
            (tensor([4, 5]), tensor([0, 0]))
        """
        why = (
            "have no answers" if self.answers is None
            else "have strings as answers, which PatchPairs.from_text makes tokens" if isinstance(self.answers, list)
            else "have answers of several tokens" if self.answers.ndim == 3
            else "differ by noise" if self.noise is not None
            else None
        )  # fmt: skip
        if why is not None:
            raise InputError(
                f"these pairs {why}, so no example has one label of its own to be probed. Give pl.Batch(inputs, labels), with "
                "pairs= for what is patched"
            )
        both = [side.batched or {"": side.main} for side in self.sides]
        joined: dict[str, Any] = {key: torch.cat([side[key] for side in both]) for key in both[0]}
        inputs = joined[""] if "" in joined else {**self.sides[0].inputs, **joined}
        mask = torch.cat([self.mask, self.corrupted_mask])
        told = mask if self.sides[0].plain and not bool(mask.all()) else None
        values, n = torch.cat([self.answers[:, 0], self.answers[:, 1]]), len(self)
        read = [self.places("read_pos", side) for side in (0, 1)]
        if read[0] is not None and read[1] is not None:
            mask = torch.zeros_like(mask)
            mask[torch.arange(2 * n, device=mask.device), torch.cat([read[0], read[1]])] = True
            values = values[:, None].expand(mask.shape)
        return Batch(
            inputs, {self.label or "answer": values}, mask, torch.arange(n, device=mask.device).repeat(2), told
        )

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, index: Index) -> PatchPairs:
        """The chosen pairs as PatchPairs; a single integer gives one pair."""
        at = chosen_rows(index, len(self), self.mask.device)
        return self._map(lambda values: values[at], lambda values: [values[i] for i in at.tolist()])

    def to(self, device: str | torch.device) -> PatchPairs:
        """The same pairs with every tensor on ``device``.

        Args:
            device: The device.

        Returns:
            New pairs.
        """
        return self._map(lambda values: values.to(device), list)

    def _map(self, fn: Callable[[Tensor], Tensor], texts: Callable[[Any], Any]) -> PatchPairs:
        clean, corrupted = (side.map(fn) for side in self.sides)
        names = ("edit_pos", "read_pos", "answers", "mask", "corrupted_mask", "noise")
        rest: dict[str, Any] = {name: fn(values) for name in names if isinstance(values := getattr(self, name), Tensor)}
        if isinstance(self.answers, list):
            rest["answers"] = texts(self.answers)
        rest["spans"] = {name: fn(span) for name, span in self.spans.items()}
        return replace(self, clean=clean, corrupted=corrupted, **rest)

    @classmethod
    def from_text(
        cls, model: Any, clean: Sequence[str], corrupted: Sequence[str], answers: Any = None, *,
        align: Literal["token", "right"] = "token",
    ) -> PatchPairs:  # fmt: skip
        """Pairs of texts, read at the last token of each side.

        Args:
            model: The wrapped model, with its tokenizer.
            clean: Strings.
            corrupted: As many strings.
            answers: As for ``PatchPairs``; strings are tokenized as they are, so give " Paris" with its space.
            align: "token" for pairs of equally many tokens; "right" pads the shorter text of a pair on the left, and tells
                the model so.

        Returns:
            Pairs with ``edit_pos`` at the first token that differs (None with align="right"); where what differs stands at the same positions on
            both sides, ``spans["differing"]`` has it, for ``pos="differing"``.

        Raises:
            InputError: A model without a tokenizer, equal texts, or with align="token" pairs of unequal lengths.
        """
        tokens, masks, spans = aligned(model, clean, corrupted, align)
        places = torch.arange(tokens[0].shape[1])
        inside = [(places >= spans[:, side, :1]) & (places < spans[:, side, 1:]) for side in (0, 1)]
        named = {"differing": inside[0]} if torch.equal(*inside) else {}
        edit = spans[:, :, 0].clamp(max=len(places) - 1)
        rest: dict[str, Any] = {"spans": named}
        if not all(bool(mask.all()) for mask in masks):
            rest.update(mask=masks[0], corrupted_mask=masks[1])
        answers = _tokenized(model, answers, len(clean))
        return cls(*tokens, edit if align == "token" else None, "last", answers, **rest)

    @classmethod
    def from_noise(
        cls, model: Any, inputs: Tensor, edit_pos: Any, read_pos: Any, answers: Any, *, scale: float = 3.0, seed: int = 0,
        mask: Tensor | None = None,
    ) -> PatchPairs:  # fmt: skip
        """Pairs whose corrupted run is the clean one with noise on the embedding of some tokens.

        Args:
            model: The wrapped model, which has the point ``hook_embed``.
            inputs: Token ids. (example, pos)
            edit_pos: Where noise is added: positions as in ``PatchPairs``, or a mask (example, pos) of several.
            read_pos, answers, mask: As for ``PatchPairs``.
            scale: Standard deviation of the noise, in that of the embeddings of ``inputs``.
            seed: Of the noise.

        Returns:
            Pairs with ``noise``, equal clean and corrupted tokens.

        Raises:
            InputError: A model without ``hook_embed``, or no position.

        Source:
            Meng et al. 2022, arXiv 2202.05262, section 2: three standard deviations on the subject's tokens.
        """
        if "hook_embed" not in model.hook_dict:
            raise InputError(
                "noise is put on hook_embed, and this model has none. Say where it is: pl.wrap(module, embed=...)"
            )
        with torch.no_grad():
            _, cache = model.run_with_cache(inputs, "hook_embed", return_type=None)
        embedded = cache["hook_embed"].detach().float().cpu()
        if isinstance(edit_pos, Tensor) and edit_pos.dtype == torch.bool:
            where, edit = mask_of(edit_pos, tuple(inputs.shape), edit_pos.device), None
        else:
            whole = mask_of(mask, tuple(inputs.shape), inputs.device)
            edit = _places("edit_pos", edit_pos, (whole, whole), inputs.shape[1])
            where = torch.zeros(inputs.shape, dtype=torch.bool)
            if edit is not None:
                where[torch.arange(len(inputs)), edit] = True
        if not bool(where.any(1).all()):
            raise InputError(
                "from_noise needs at least one position of each example: edit_pos, or a mask (example, pos)"
            )
        drawn = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
        noise = drawn * (scale * embedded.std()) * where.cpu()[..., None]
        return cls(inputs, inputs, edit, read_pos, answers, mask, noise=noise)  # type: ignore[arg-type]


def _need_alike(clean: Examples, corrupted: Examples) -> None:
    kinds = [isinstance(side.inputs, Tensor) for side in (clean, corrupted)]
    if kinds[0] != kinds[1] or clean.batched.keys() != corrupted.batched.keys():
        raise InputError(
            "clean and corrupted must be inputs of one kind: two tensors, or mappings of the same arguments."
        )
    parts = [("corrupted", clean.main, corrupted.main)]
    parts += [(f"corrupted[{name!r}]", x, corrupted.batched[name]) for name, x in clean.batched.items()]
    for name, x, y in parts:
        if x.shape != y.shape:
            raise ShapeError(
                f"{name} is {tuple(y.shape)} and clean is {tuple(x.shape)}; they must be "
                "equal. Pad the shorter sequences and pass mask and corrupted_mask, or use PatchPairs.from_text."
            )


def _need_shared(clean: Examples, corrupted: Examples, mask: Tensor) -> None:
    """Refuse one mask for both sides where it hides tokens that differ: one side's own, or padding of two kinds."""
    if clean.tokens is None or corrupted.tokens is None:
        return
    hidden = ~mask & (clean.tokens != corrupted.tokens)
    if bool(hidden.any()):
        example, pos = hidden.nonzero()[0].tolist()
        raise InputError(
            f"mask hides position {pos} of example {example}, where the two sides hold different tokens, so it is no padding "
            "of both. Give each side its own: mask= for clean, corrupted_mask= for corrupted."
        )


def _need_different(clean: Examples, corrupted: Examples, edit: Tensor | None) -> None:
    n, rows = len(clean), torch.arange(len(clean), device=clean.main.device)
    if not n:
        return
    if edit is None:
        ids = torch.cat([torch.cat([c.reshape(n, -1), k.reshape(n, -1)]) for c, k in [(clean.main, corrupted.main)]])
        same = (ids[:n] == ids[n:]).all(1)
        for name, values in clean.batched.items():
            same = same & (values == corrupted.batched[name]).reshape(n, -1).all(1)
        where = "everywhere"
    else:
        first, second = (edit, edit) if edit.ndim == 1 else (edit[:, 0], edit[:, 1])
        if clean.batched:
            return  # They may differ in another argument.
        same = (clean.main[rows, first] == corrupted.main[rows, second]).reshape(n, -1).all(1)
        where = "at edit_pos"
    if bool(same.any()):
        raise InputError(
            f"clean and corrupted are equal {where} in {int(same.sum())} of {n} examples, first "
            f"in example {int(same.nonzero()[0])}; a pair must differ there. Drop them or fix edit_pos."
        )


def _last(mask: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise InputError(
            "'last' is the last real position, and these inputs don't tell how many there are. Give numbers."
        )
    if not bool(mask.any(1).all()):
        raise InputError(f"example {int((~mask.any(1)).nonzero()[0])} has no real position, so none is the last.")
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def _places(name: str, given: Any, masks: tuple[Tensor, Tensor], length: int | None) -> Tensor | None:
    """Positions from the left: of each pair (example,) where both sides have the same, of each side (example, 2)."""
    if given is None:
        return None
    n = len(masks[0])
    if isinstance(given, str):
        if given != "last":
            raise InputError(
                f"{name}={given!r} is not known. Allowed: 'last', a number, a tensor (example,) or (example, 2)."
            )
        found = torch.stack([_last(mask) for mask in masks], 1)
    else:
        found = torch.as_tensor(given)
        if found.ndim == 0:
            found = found.expand(n)
        shape = (n, 2) if found.ndim == 2 else (n,)
        found = integers(name, found, shape, "one position per example, or [clean, corrupted]")
        if length is not None:
            if found.numel() and bool(((found < -length) | (found >= length)).any()):
                raise InputError(
                    f"{name} runs from {int(found.min())} to {int(found.max())}; "
                    f"with {length} positions it must be from 0 to {length - 1}, or negative to count from the end."
                )
            found = found % length
    return found[:, 0] if found.ndim == 2 and torch.equal(found[:, 0], found[:, 1]) else found


def _answers(given: Any, n: int, any_of: bool) -> tuple[Any, bool]:
    """Answers as a tensor, or a list of pairs of strings; and whether a third axis holds alternatives."""
    if given is None:
        return None, False
    if not isinstance(given, Tensor):
        rows = [tuple(row) for row in given]
        if len(rows) != n or any(len(row) != 2 for row in rows):
            raise ShapeError(f"answers has {len(rows)} rows; it must have {n}, each [clean answer, corrupted answer].")
        parts = [part for row in rows for part in row]
        if all(isinstance(part, str) for part in parts):
            for i, row in enumerate(rows):
                if row[0] == row[1]:
                    raise InputError(f"both answers are {row[0]!r} in example {i}. Drop pairs with equal answers.")
            return [list(row) for row in rows], False
        if all(isinstance(part, set | frozenset | list | tuple) for part in parts):
            any_of = any_of or all(isinstance(part, set | frozenset) for part in parts)
            wide = max(len(part) for part in parts)
            order = sorted if any_of else list
            given = torch.tensor([[[*order(p), *[PAD] * (wide - len(p))] for p in row] for row in rows])
        else:
            given = torch.as_tensor(rows)
    if given.is_floating_point():
        if given.shape != (n, 2):
            raise InputError(
                f"answers has dtype {given.dtype} and shape {tuple(given.shape)}; values must be ({n}, 2), [clean, corrupted]. "
                "Use .long() for token ids."
            )
    elif given.ndim == 3:
        answers = integers("answers", given, (n, 2, given.shape[2]), "tokens of [clean answer, corrupted answer]")
        if not bool((answers[..., 0] >= 0).all()):
            raise InputError("answers has an answer without a token")
        given = answers[..., 0] if answers.shape[2] == 1 else answers
    else:
        given = integers("answers", given, (n, 2), "[clean answer, corrupted answer] per example")
    if not given.is_floating_point() and bool((given < (PAD if given.ndim == 3 else 0)).any()):
        raise InputError("answers has negative ids; they index the model's logits, so they start at 0.")
    tied = given[:, 0] == given[:, 1]
    if tied.ndim == 2:
        tied = tied.all(1)
    if bool(tied.any()):
        raise InputError(
            f"both answers are equal in {int(tied.sum())} of {n} examples, first in example "
            f"{int(tied.nonzero()[0])}; a logit difference needs two. Drop pairs with equal answers."
        )
    return given, any_of and given.ndim == 3


def _tokenized(model: Any, answers: Any, n: int) -> Any:
    found, any_of = _answers(answers, n, False)
    return answers if any_of else answer_tokens(model, found)


def answer_tokens(model: Any, answers: Any) -> Any:
    """Answers that are strings as token ids (example, 2) or, of several tokens, (example, 2, token); others as they are.

    Args:
        model: The wrapped model, with its tokenizer.
        answers: Of pairs.

    Returns:
        A tensor, or None.

    Raises:
        InputError: Strings for a model without a tokenizer, or one that has no token.
    """
    if not isinstance(answers, list):
        return answers
    if model.tokenizer is None:
        raise InputError(
            "the answers are strings, and this model has no tokenizer. Give token ids, or pl.wrap(…, tokenizer=…)"
        )
    ids = [[model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in row] for row in answers]
    if any(not part for row in ids for part in row):
        raise InputError("an answer has no token")
    return _answers(ids, len(answers), False)[0]

"""Inputs of a model: tokens, text or keywords, checked and made into a call on the right device, and their padding.

Whether a model's mask keeps padding out of real tokens is tried, not assumed (`hooks.trials`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probelens.errors import InputError, ShapeError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call
from probelens.hooks.protocol import Wrapped
from probelens.hooks.trials import Untried, agree, inputs_to_try, random_tokens, remembered, run_alone
from probelens.tasks.examples import Constant


def prepared(model: Wrapped, inputs: Any, mask: Any, start: int | None, extra: dict[str, Any]) -> Call:
    """The call that inputs ask for: tokens (batch, pos), text, keywords, or the residual that enters block ``start``.

    ``extra`` are keywords for the module's forward, and ``prepend_bos``.
    """
    adapter = model.adapter
    device = adapter.device()
    bos, extra = extra.get("prepend_bos"), {k: v for k, v in extra.items() if k != "prepend_bos"}
    if mask is not None:
        mask = torch.as_tensor(mask).to(device)
    if start is not None:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 3:
            raise ShapeError(
                f"start_at_layer={start} needs the residual entering that block, (batch, pos, d_model), "
                f"got {described(inputs)}"
            )
        return adapter.resid_call(inputs.to(device), mask, positions_for_padding(model, mask, extra))
    if isinstance(inputs, str) or (
        isinstance(inputs, (list, tuple)) and len(inputs) > 0 and all(isinstance(t, str) for t in inputs)
    ):
        tokens, made = tokens_of(adapter, inputs, bos)
        mask = made if mask is None else mask
        return adapter.call(tokens, mask, positions_for_padding(model, mask, extra, tokens))
    if isinstance(inputs, Mapping):
        shared = {k: v.value if isinstance(v, Constant) else v for k, v in inputs.items()}
        kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in shared.items()}
        need_accepted(model, kwargs)
        mask = mask if mask is not None else kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = mask
        ids = kwargs.get("input_ids")
        _check_tokens(model, ids)
        kwargs |= extra
        return Call((), positions_for_padding(model, mask, kwargs, kwargs), ids, mask)
    if isinstance(inputs, (list, tuple)):
        if not len(inputs):
            raise ShapeError(f"tokens must be (batch, pos) and not empty, got {inputs!r}")
        try:
            inputs = torch.tensor(inputs)
        except (ValueError, TypeError, RuntimeError) as err:
            raise InputError(f"inputs must be tokens, text or a mapping of keywords, got {inputs!r}") from err
    if isinstance(inputs, Tensor):
        if not inputs.is_floating_point() and inputs.ndim == 1:
            inputs = inputs[None]
        _check_tokens(model, inputs)
        inputs = inputs.to(device)
        return adapter.call(inputs, mask, positions_for_padding(model, mask, extra, inputs))
    return adapter.call(inputs, mask, extra)


def need_accepted(model: Wrapped, kwargs: Mapping[str, Any]) -> None:
    """Refuse tensors that the forward doesn't take: it would raise, or drop them without a word (``**kwargs``)."""
    forward = type(model.module).forward
    if forward is nn.Module.forward:
        return
    taken = inspect.signature(forward).parameters
    given = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in taken]
    if given and any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        # What it hands on unnamed, a module inside may take by name.
        inside = {name for m in model.module.modules() for name in inspect.signature(type(m).forward).parameters}
        given = [name for name in given if name not in inside]
    if given:
        names = [name for name, one in list(taken.items())[1:] if one.kind is not one.VAR_KEYWORD]
        raise InputError(
            f"the forward of this {type(model.module).__name__} takes no argument {given[0]!r}. Its arguments: "
            f"{', '.join(names)}. Leave it out of the inputs, or rename it"
        )


@functools.cache
def _required(forward: Any) -> tuple[list[str], list[str]]:
    """The arguments of a forward by name, and of these the ones that it can't do without."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [one for one in list(inspect.signature(forward).parameters.values())[1:] if one.kind in plain]
    return [one.name for one in taken], [one.name for one in taken if one.default is one.empty]


def need_whole(model: Wrapped, call: Call, start: int | None) -> None:
    """Refuse a call from the inputs that leaves out what the forward needs; torch would say so as a TypeError."""
    forward = getattr(type(model.module), "forward", nn.Module.forward)
    if start is not None or forward is nn.Module.forward:
        return
    names, required = _required(forward)
    given = {*names[: len(call.args)], *call.kwargs}
    if missing := [name for name in required if name not in given]:
        form = ", ".join(f"{name!r}: ..." for name in required)
        raise InputError(
            f"the forward of this {type(model.module).__name__} needs {missing[0]!r} as well, and was given "
            f"{', '.join(name for name in names if name in given) or 'nothing'}. Give a mapping of all that it needs: {{{form}}}"
        )


def need_tokenizer(adapter: Adapter) -> Any:
    """The model's tokenizer; an InputError without one."""
    if adapter.tokenizer is None:
        raise InputError(
            f"text given, but this {type(adapter.module).__name__} has no tokenizer. "
            "Give tokens (batch, pos), or pl.wrap(module, tokenizer=...)"
        )
    return adapter.tokenizer


def tokens_of(
    adapter: Adapter, text: str | Sequence[str], prepend_bos: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Token ids (batch, pos) of text, padded to the longest, and 1 for real tokens where padding was needed."""
    need_tokenizer(adapter)
    return adapter.tokenize([text] if isinstance(text, str) else list(text), prepend_bos)


def _check_tokens(model: Wrapped, tokens: Any) -> None:
    vocab = model.adapter.cfg.d_vocab
    if not isinstance(tokens, Tensor) or not vocab:
        return
    if tokens.is_floating_point():
        if tokens.ndim == 2:
            raise InputError(f"tokens are integers (batch, pos), got {described(tokens)}. Use tokens.long().")
        return
    if tokens.dtype == torch.bool:
        raise InputError(f"tokens are integers (batch, pos), got {described(tokens)}: a mask?")
    if tokens.numel() == 0 or tokens.ndim != 2:
        raise ShapeError(f"tokens must be (batch, pos) and not empty, got shape {tuple(tokens.shape)}")
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise InputError(
            f"token id {bad} is outside the vocabulary: this {type(model.module).__name__} takes ids 0 to {vocab - 1}"
        )


def described(value: Any) -> str:
    """A value in words, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


# -- padding -----------------------------------------------------------------------------------------


def has_gap(mask: Tensor) -> bool:
    """Whether a real token comes after padding; the mask (example, pos) has 1 for real tokens."""
    real = mask.long()
    return bool((real[:, 1:] > real[:, :-1]).any())


def between(mask: Tensor) -> Tensor:
    """Which rows of a mask (example, pos) have padding between real tokens. (example,)"""
    real = mask.long()
    return (real[:, 1:] > real[:, :-1]).sum(1) + real[:, 0] > 1


def positions_for_padding(
    model: Wrapped, mask: Tensor | None, extra: dict[str, Any], inputs: Any = None
) -> dict[str, Any]:
    """Keywords for a run with this mask: with ``position_ids`` where the model would count padding as positions.

    The mask is tried on ``inputs``, tokens or keywords of this call, or on random tokens. Padding that reaches real
    tokens all the same, or where that could not be tried, is an InputError.
    """
    if mask is None or mask.ndim != 2 or extra.get("position_ids") is not None or bool(mask.all()):
        return extra
    if not model.adapter.accepts("attention_mask"):
        return extra  # Refused by the adapter.
    before = has_gap(mask)
    # On the right padding reaches real tokens only where later tokens are read.
    if not before and not reads_both_ways(model, inputs):
        return extra
    where = "padding before real tokens" if before else "padding on the right, in a model that reads both ways,"
    where = "padding between real tokens" if bool(between(mask).any()) else where
    instead = "Pad on the right, or run" if before else "Run"
    kind = type(model.module).__name__
    try:
        how = _kept_out_by(model, mask, before, inputs, extra)
    except _FailsItself:
        return extra  # The call will raise that error.
    except Untried as err:
        raise InputError(
            f"whether the mask of this {kind} keeps {where} out of real tokens could not be tried: {err}. "
            f"{instead} sequences of equal length together"
        ) from err
    if how == "neither":
        raise InputError(
            f"{where} changes what this {kind} makes of them although the mask is given (its state or its positions run "
            f"over padding, or it ignores the mask). {instead} sequences of equal length together"
        )
    return {**extra, "position_ids": _counted(mask)} if how == "positions" else extra


def reads_both_ways(model: Wrapped, inputs: Any = None) -> bool:
    """Whether a later token changes what the model makes of earlier ones; True also where no trial could be made."""
    if any(getattr(module, "bidirectional", False) for module in model.module.modules()):
        return True
    try:
        return remembered(model, model.module, "both ways", lambda: _later_tokens_matter(model, inputs))
    except Untried:
        return True


def padding_mask(mask: Tensor | None, model: Wrapped | None = None, inputs: Any = None) -> Tensor | None:
    """The attention mask that a batch with this mask (example, pos) needs, or None if it needs none.

    Padding on the right never reaches an earlier position of a causal model, so only a real token after padding calls
    for a mask. On a model that reads both ways every padding does; without a model a causal one is meant.
    """
    if mask is None or bool(mask.all()):
        return None
    return mask.long() if has_gap(mask) or (model is not None and reads_both_ways(model, inputs)) else None


def mask_for_model(model: Wrapped, attention: Tensor | None, inputs: Any = None) -> Tensor | None:
    """The attention mask (example, pos) to give the model; None where it needs none.

    A forward that takes no mask needs none where all padding is on the right and the model is causal. Elsewhere the
    mask is passed on, and refused with the reason.
    """
    if attention is None or (isinstance(inputs, Mapping) and "attention_mask" in inputs):
        return None  # A mapping's own mask is among its arguments.
    if not model.adapter.accepts("attention_mask") and padding_mask(attention.bool(), model, inputs) is None:
        return None
    return attention.long()


class _FailsItself(Untried):
    """The model raises an error on the very inputs of the call."""


def _later_tokens_matter(model: Wrapped, inputs: Any) -> bool:
    """Whether later tokens change the outputs at earlier positions."""
    why, vocab = "it doesn't take tokens of a known vocabulary", model.adapter.cfg.d_vocab
    for x in inputs_to_try(model, inputs):
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] < 2:
            why = "its inputs are no sequences of several positions"
            continue
        first = max(1, 2 * x.shape[1] // 3)
        other = x.clone()
        other[:, first:] = (x[:, first:] + 1) % vocab if vocab else x[:, :1]
        if torch.equal(other, x):
            why = "no later token can be changed"
            continue
        try:
            a, b = (run_alone(model, model.prepare(tokens)) for tokens in (x, other))
        except Untried as err:
            why = str(err)
            continue
        # One output for a whole sequence reads all of it.
        return a.shape[:2] != x.shape[:2] or not agree(a[:, :first], b[:, :first], model.cfg.dtype)
    raise Untried(why)


def _kept_out_by(
    model: Wrapped, mask: Tensor, before: bool, inputs: Any, extra: dict[str, Any]
) -> Literal["mask", "positions", "neither"]:
    """What keeps padding out of real tokens: the mask alone, or with positions that count real tokens.

    Sequences of the call (of random tokens, where there are no inputs) run with their padding, and each alone.
    """
    # Some models skip the mask for a batch of one, so that is a question of its own; and padding between real tokens is
    # one, since rotary positions, of which only differences count, are right on the left without being told.
    single, inside = len(mask) == 1, bool(between(mask).any())
    if inputs is None:
        x = random_tokens(model, 1 if single else 2)
        first = 2 if inside else 0 if before else 5
        inputs = torch.cat([x[:, :first], x[:, :3], x[:, first:]], 1)
        mask = torch.ones_like(inputs)
        mask[:, first : first + 3] = 0
    real = mask.bool()
    padded = between(mask) if inside else (real[:, 1:] > real[:, :-1]).any(1) if before else ~real.all(1)
    order = torch.argsort((padded & real.any(1)).long(), descending=True, stable=True)
    rows = [int(row) for row in order if real[row].any()][: 1 if single else 2]
    rows = rows if single else (rows * 2)[:2]

    def cut(value: Any, rows: list[int], where: Tensor | slice) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != mask.shape[:1]:
            return value
        return value[rows][:, where] if value.shape[:2] == mask.shape else value[rows]

    def run(rows: list[int], where: Tensor | slice, given: dict[str, Any], masked: bool) -> Tensor:
        kept = cut(mask, rows, where) if masked else None
        more = {name: cut(value, rows, where) for name, value in given.items() if name != "attention_mask"}
        if isinstance(inputs, Tensor):
            return run_alone(model, model.adapter.call(cut(inputs, rows, where), kept, more))
        more |= {} if kept is None else {"attention_mask": kept}
        return run_alone(model, Call((), more, more.get("input_ids"), kept))

    def right(given: dict[str, Any]) -> bool:
        found = run(rows, slice(None), given, True)
        by_position = found.shape[:2] == (len(rows), mask.shape[1])
        return all(
            agree(one[real[row]] if by_position else one, run([row], real[row], extra, False)[0], model.cfg.dtype)
            for row, one in zip(rows, found, strict=True)
        )

    def trial() -> Literal["mask", "positions", "neither"]:
        try:
            run(rows, slice(None), extra, True)
        except Untried as err:
            raise _FailsItself(str(err)) from err
        if right(extra):
            return "mask"
        try:
            return "positions" if before and right({**extra, "position_ids": _counted(mask)}) else "neither"
        except Untried:
            return "neither"

    return remembered(model, model.module, ("padding", before, inside, single), trial)


def _counted(mask: Tensor) -> Tensor:
    """Positions that count real tokens; 0 at padding before the first. (example, pos)"""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def skipped_embeddings(model: Wrapped, inputs: Any, kw: Mapping[str, Any]) -> set[str]:
    """Points of embeddings that a call leaves out, as it is given embeddings instead of tokens.

    Args:
        model: The wrapped model.
        inputs: What it is called with.
        kw: Its other arguments.

    Returns:
        Names of points.
    """
    given = {**(inputs if isinstance(inputs, Mapping) else {}), **kw}
    out = {"hook_embed"} if given.get("decoder_inputs_embeds") is not None else set()
    main = getattr(model.adapter, "main_input", None)
    floats = isinstance(inputs, Tensor) and inputs.is_floating_point() and main is not None and main() == "input_ids"
    if floats or given.get("inputs_embeds") is not None:
        out.add("encoder.hook_embed" if "encoder.hook_embed" in model.points.named else "hook_embed")
    return out

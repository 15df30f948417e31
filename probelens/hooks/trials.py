"""Trials of a model: a question is tried once, and its answer is remembered until something in the model is exchanged.

Whether a run may begin at a block, whether a mask keeps padding out, and whether a faster forward gives the same
numbers depends on code that this library doesn't know. So each is tried, on random tokens or on the caller's inputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from probelens.errors import InputError, ProbelensError
from probelens.hooks.config import Call
from probelens.hooks.forwards import SwappedForward
from probelens.hooks.passes.kept import restored
from probelens.hooks.protocol import Wrapped

Answer = TypeVar("Answer")
# States of one model that are remembered at a time: with and without a hook, say.
_MOST = 4
_SIMPLE = frozenset({bool, int, float, str, type(None)})
# Coarser numbers than single precision: half precision, and float32 matrix products in TF32.
_COARSE = 5e-2


class Untried(Exception):
    """No trial could be made; the text says why, for the middle of a sentence."""


# -- what a model consists of ------------------------------------------------------------------------


class Fingerprint:
    """What a module consisted of at one time. Two are equal while nothing in the module is exchanged.

    The parts are referred to weakly, so that an identity given to another object is noticed.
    """

    __slots__ = ("_parts", "key")

    def __init__(self, key: tuple[Any, ...], parts: list[Any]) -> None:
        self.key = key
        self._parts = [ref for part in parts if (ref := _weak(part)) is not None]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.key == other.key and self.alive() and other.alive()

    def alive(self) -> bool:
        """Whether every part still exists."""
        return all(ref() is not None for ref in self._parts)


def fingerprint(module: nn.Module) -> Fingerprint:
    """What a module consists of, to compare with ``==``; keeps nothing alive.

    It changes with a module, a class or a function in it, a PyTorch hook, the identity, dtype or in-place version of a
    parameter or buffer, and a number, text or switch among the attributes of a module or its config. Forwards and hooks
    that this library puts there don't count, nor does the training mode, since every trial runs in evaluation mode.
    Tensors kept as plain attributes don't either: many models store what they last computed.
    """
    return Fingerprint(*_parts(module))


def _parts(module: nn.Module) -> tuple[tuple[Any, ...], list[Any]]:
    """The key of a module's fingerprint, and the objects whose identities are in it."""
    key: list[Any] = []
    parts: list[Any] = []
    seen: set[int] = set()
    classes: dict[type[nn.Module], None] = {}
    configs: dict[int, Any] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kept = each.__dict__
        classes[type(each)] = None
        parts.append(each)
        key.append(id(each))
        for name, value in list(kept.items()):
            if name[0] == "_" or name == "training":
                continue
            if type(value) in _SIMPLE:
                key.append(value)
            elif name == "config" or name == "cfg":
                configs[id(value)] = value
            elif callable(value) and not isinstance(value, SwappedForward):
                key.append(id(value))
                parts.append(value)
        for hooks in (kept["_forward_hooks"], kept["_forward_pre_hooks"]):
            # The number of a PyTorch hook is never given twice.
            key += [number for number, hook in hooks.items() if not _is_ours(hook)]
        for tensors in (kept["_parameters"], kept["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None:
                    # Inference tensors count no versions.
                    key += id(tensor), tensor.dtype, None if tensor.is_inference() else tensor._version
                    parts.append(tensor)
        waiting += kept["_modules"].values()
    for kind in classes:
        parts += kind, kind.forward
        key += id(kind), id(kind.forward)
        for base in kind.__mro__:
            if base is nn.Module:
                break
            key += map(id, vars(base).values())
    for config in configs.values():
        key.append(id(config))
        parts.append(config)
        key += [value for value in getattr(config, "__dict__", {}).values() if type(value) in _SIMPLE]
    return tuple(key), parts


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "probelens"


def _weak(part: Any) -> Any:
    try:
        return weakref.ref(part)
    except TypeError:  # a built-in function, say, which lives as long as the process
        return None


# -- one memory --------------------------------------------------------------------------------------

# Of each owner: by the key of a fingerprint, the fingerprint and the answers found in that state.
_States = dict[tuple[Any, ...], tuple[Fingerprint, dict[Hashable, Any]]]
_ANSWERS: weakref.WeakKeyDictionary[Any, _States] = weakref.WeakKeyDictionary()


def remembered(owner: Any, module: nn.Module, question: Hashable, trial: Callable[[], Answer]) -> Answer:
    """The answer to a question about a module, tried once for each state of the module.

    The owner, a wrapped model or a module, is referred to weakly, and a copy of it starts anew. The answer is not None
    and must not refer to the owner. An ``Untried`` of the trial is not remembered.
    """
    answer: Answer | None = recall(owner, module, question)
    if answer is None:
        answer = trial()
        remember(owner, module, question, answer)
    return answer


def recall(owner: Any, module: nn.Module, question: Hashable) -> Any:
    """The answer found while the module was as it is now; None if there is none. Arguments as ``remembered``."""
    states = _ANSWERS.get(owner)
    known = states and states.get(_parts(module)[0])
    return known[1].get(question) if known and known[0].alive() else None


def remember(owner: Any, module: nn.Module, question: Hashable, answer: Any) -> None:
    """Keep an answer until something in the module is exchanged. Arguments as ``remembered``."""
    # The state after the trial: a first run may change the module for good, as where weights are rescaled lazily.
    now, states = fingerprint(module), _ANSWERS.setdefault(owner, {})
    known = states.pop(now.key, None)
    answers = known[1] if known is not None and known[0].alive() else {}
    states[now.key] = now, {**answers, question: answer}
    while len(states) > _MOST:
        states.pop(next(iter(states)))


# -- one comparison ----------------------------------------------------------------------------------


def agree(
    found: Tensor, expected: Tensor, dtype: torch.dtype | None = None, *, bits: int = 10, half: bool = True
) -> bool:
    """Whether two results of one computation differ by rounding only.

    Rounding may take ``bits`` of the precision of the coarsest dtype, at most 5% of the largest value; ``dtype`` is the
    one in which the model computes, if it isn't the results' own. Without ``half`` the precision is float32 whatever
    the model computes in: for runs that stand for one another. False also for another shape, and where nothing finite
    can be compared.
    """
    if found.shape != expected.shape or not expected.numel():
        return False
    different = found != expected
    size = expected.abs().masked_fill(~torch.isfinite(expected), 0).max()
    if not bool(different.any()):
        return bool(torch.isfinite(expected).any())
    rounding = torch.finfo(torch.float32).eps
    for kind in (found.dtype, expected.dtype, dtype, _autocast(expected.device.type)) if half else ():
        if kind is not None and kind.is_floating_point:
            rounding = max(rounding, torch.finfo(kind).eps)
    if expected.device.type == "cuda":
        rounding = max(rounding, 2.0**-10)  # TF32, which kernels use without asking
    allowed = min(2.0**bits * rounding, _COARSE) * size
    return bool((found - expected).abs().masked_fill(~different, 0).max() <= allowed)


def _autocast(device: str) -> torch.dtype | None:
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:  # a device without autocast
        return None


# -- runs to try something on ------------------------------------------------------------------------


def random_tokens(model: Wrapped, rows: int = 2, length: int = 5) -> Tensor:
    """Tokens (rows, length) for a trial, the same at each call; Untried where the vocabulary's size is not known."""
    vocab = model.adapter.cfg.d_vocab
    if not vocab:
        raise Untried("the size of its vocabulary is not known")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (rows, length), generator=generator).to(model.adapter.device())


def run_alone(model: Wrapped, call: Call, restores: bool = True) -> Tensor:
    """The logits of a call in evaluation mode, without hooks, gradients or compiled code; Untried if it raises.

    What the model keeps between calls is put back, unless ``restores`` is False.
    """
    with model.switchboard.muted(), torch.no_grad(), model.undisturbed(), contextlib.ExitStack() as stack:
        if restores:
            # Not before the weights are what the first run makes of them for good.
            model.adapter.apply_lazy_rescaling()
            stack.enter_context(restored(model.module))
        try:
            out: Tensor = model.adapter.output(model.run(call))
        except Exception as err:
            raise Untried(f"its forward raises {type(err).__name__} ({err}) on the inputs of the trial") from err
        return out


def _each_tensor(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        return change(inputs) if inputs.ndim else inputs
    if isinstance(inputs, Mapping):
        return {name: _each_tensor(value, change) for name, value in inputs.items()}
    return inputs


def _reversed_rows(inputs: Any) -> Any:
    return _each_tensor(inputs, lambda tensor: tensor.flip(0))


def inputs_to_try(model: Wrapped, inputs: Any) -> Iterator[Any]:
    """What to try a model on: random tokens, then the caller's inputs for models that don't run on these."""
    if model.adapter.cfg.d_vocab:
        yield random_tokens(model)
    if inputs is not None:
        yield _each_tensor(inputs, lambda tensor: tensor[:2])


# -- the questions -----------------------------------------------------------------------------------


def can_start_at(model: Wrapped, layer: int, inputs: Any = None) -> bool:
    """Whether a run from a block, given what a full run gives it, has the full run's logits.

    False also for a model that gives other logits when it runs a second time. Untried where neither random tokens nor
    the inputs could be run.
    """
    return not _obstacle(model, layer, inputs)


def _obstacle(model: Wrapped, layer: int, inputs: Any = None) -> str:
    return remembered(model, model.module, ("start", layer), lambda: _tried_start(model, layer, inputs))


def _tried_start(model: Wrapped, layer: int, inputs: Any) -> str:
    """Why a run can't begin at a block, in the adapter's words where it knows; "" if it can."""
    other = (
        f"start_at_layer={layer}: in this {type(model.module).__name__} the residual entering block {layer} is not all that "
        "the rest depends on (something goes around the blocks), so a run from there would be wrong. Run from the tokens."
    )
    why = "it doesn't take tokens of a known vocabulary"
    for x in inputs_to_try(model, inputs):
        try:
            full = run_alone(model, model.prepare(x))
        except Untried as err:
            why = str(err)
            continue
        with model.switchboard.muted(), torch.no_grad(), model.undisturbed(), restored(model.module):
            resid = model.run(model.prepare(x), stop=layer)
            if resid.ndim != 3 or resid.shape[0] != len(full):
                return other
            # Another run in between, for models that keep something of the last one.
            model.run(model.prepare(_reversed_rows(x)))
            try:
                call = model.prepare(resid, start=layer)
                again = model.adapter.output(model.run(call, start=layer, resid=resid))
            except InputError as err:
                return str(err)
            except Exception:  # what comes before the blocks, say, doesn't run on stand-ins for the inputs
                return other
        return "" if agree(again, full, model.cfg.dtype) else other
    raise Untried(why)


def require_start_at(model: Wrapped, layer: int) -> None:
    """Refuse a run that begins at a block where that would give other numbers, or where nobody knows."""
    try:
        obstacle = _obstacle(model, layer)
    except Untried as err:
        raise InputError(
            f"start_at_layer={layer}: whether the residual entering block {layer} is all that the rest of this "
            f"{type(model.module).__name__} depends on could not be tried: {err}. "
            f"Call model.can_start_at({layer}, inputs) once, with inputs that the model runs on, or run from the inputs"
        ) from err
    if obstacle:
        raise InputError(obstacle)


def faster_forwards_agree(model: Wrapped, paths: list[str]) -> bool:
    """Whether these modules' instrumented forwards give the logits of their own; False where no trial could be made."""

    def trial() -> bool:
        try:
            call = model.prepare(random_tokens(model, length=9))
            own = run_alone(model, call)
            with model.switchboard.instrumented(paths):
                return agree(run_alone(model, call), own, half=False)
        except (Untried, InputError):  # an instrumented forward may refuse its module
            return False

    return remembered(model, model.module, ("faster forwards", tuple(paths)), trial)


def require_repeatable(model: Wrapped, inputs: Any = None) -> None:
    """Refuse to compare runs of a model that gives other outputs when it runs on the same inputs again."""

    def same(found: Tensor, expected: Tensor) -> bool:
        # A model whose logits are NaN repeats itself as well; what it runs for says what is wrong with it.
        return torch.equal(found.isnan(), expected.isnan()) and agree(
            found.nan_to_num(), expected.nan_to_num(), model.cfg.dtype
        )

    def trial() -> str:
        small = isinstance(inputs, Tensor) and 2 < len(inputs) <= 64
        for x in (*inputs_to_try(model, inputs), *([inputs] if small else [])):
            try:
                calls = [model.prepare(tokens) for tokens in (x, _reversed_rows(x), x)]
                with model.undisturbed():
                    model.adapter.apply_lazy_rescaling()
                with restored(model.module) as kept:
                    first, _, again = (run_alone(model, call, restores=False) for call in calls)
                    changed = kept.put_back()
                    if same(again, first):
                        return "repeats itself"
                    return _cause(
                        changed, same(run_alone(model, calls[0]), run_alone(model, calls[0])), first, model, calls[0]
                    )
            except (Untried, ProbelensError):
                continue
        raise Untried("its forward raises on the inputs of the trial")

    with contextlib.suppress(Untried):  # The run itself will raise what the forward raises.
        found = remembered(model, model.module, "repeatable", trial)
        if found != "repeats itself":
            raise InputError(
                f"this {type(model.module).__name__} gives other outputs for the same inputs when it runs again, in "
                f"evaluation mode: {found}. Runs of it can't be compared"
            )


def _cause(changed: list[str], again: bool, first: Tensor, model: Wrapped, call: Call) -> str:
    """Why a model doesn't repeat itself, and what to do; ``again`` says whether it does from the same state."""
    if again and changed:
        # Both runs drew the same random numbers, so these are no cause.
        with torch.random.fork_rng([]):
            torch.manual_seed(torch.initial_seed() + 1)
            other = run_alone(model, call)
        if agree(other.nan_to_num(), first.nan_to_num(), model.cfg.dtype):
            return f"it keeps state between calls, in {', '.join(changed[:3])}. Reset it at the start of its forward"
    return (
        "it draws random numbers, as dropout does that is always on (F.dropout without training=self.training), or keeps "
        "state that isn't among its attributes. Turn the random numbers off, or reset the state at the start of its forward"
    )

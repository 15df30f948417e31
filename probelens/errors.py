"""The errors a user can meet: every one says what was asked, found, allowed and what to do."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = [
    "AdapterNotFoundError",
    "HookNotFiredError",
    "InputError",
    "MetricError",
    "MissingDependencyError",
    "ProbelensError",
    "ShapeError",
    "StoreError",
    "UnknownHookError",
]


class ProbelensError(Exception):
    """Base of every error that probelens raises on purpose; its ``reason`` is what it says without the advice."""

    def __init__(self, reason: str = "", advice: str = "") -> None:
        super().__init__(f"{reason}. {advice}" if advice else reason)
        self.reason = reason


class UnknownHookError(ProbelensError, KeyError):
    """A hook point, module path or layer that the wrapped model doesn't have."""

    # KeyError prints its argument with repr(), which turns a sentence into a quoted string.
    __str__ = Exception.__str__


class HookNotFiredError(ProbelensError, RuntimeError):
    """A hook was asked for, the model ran, and the hook was never called."""


class AdapterNotFoundError(ProbelensError, TypeError):
    """No installed adapter knows the module, or the adapter asked for isn't installed."""


class ShapeError(ProbelensError, ValueError):
    """A tensor whose shape isn't the one the call needs."""


class InputError(ProbelensError, ValueError):
    """Any other argument that can't be used: NaN activations, one class only, an unknown option."""


class MetricError(ProbelensError, ValueError):
    """A metric that is undefined on this input, such as recovery of a gap of zero."""


class StoreError(ProbelensError, OSError):
    """A file that can't be read back: truncated, foreign, or of another class."""


class MissingDependencyError(ProbelensError, ImportError):
    """An optional package is needed and isn't installed; the text names the extra to install."""


def nearest(name: str, options: Iterable[str], n: int = 3) -> list[str]:
    """The ``n`` options most like ``name``, best first, possibly none.

    Examples:
        >>> nearest("blocks.3.hook_resid_pots", ["blocks.3.hook_resid_post", "hook_embed"])
        ['blocks.3.hook_resid_post']
    """
    return difflib.get_close_matches(str(name), [str(o) for o in options], n=n, cutoff=0.5)


def unknown(what: str, name: str, options: Iterable[str]) -> str:
    """Error message for an unknown name: the nearest names and the allowed ones."""
    options = list(options)
    near = nearest(name, options)
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    return f"{what} {name!r} not found. {hint}Allowed: {', '.join(options) or 'none'}"


def at_least(config: Any, **minima: int) -> None:
    """Refuse a config with a number below what a run needs; None is allowed, and every number of a tuple is checked."""
    for name, least in minima.items():
        value = getattr(config, name)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if one is not None and one < least:
                raise InputError(f"{name}={value!r}: it must be at least {least}")


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional package; a MissingDependencyError says which extra brings it, and what needs it (``why``)."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        missing = err.name or module
        raise MissingDependencyError(
            f"{why} needs the package {module!r}, which can't be imported ({missing!r}: {err}). "
            f'Install it with: pip install "probelens[{extra}]"'
        ) from err


@contextlib.contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Add a note, made only on an error, to whatever a function of the caller's raises, with its traceback as it was."""
    try:
        yield
    except Exception as err:
        text = note()
        if text not in getattr(err, "__notes__", ()):
            err.add_note(text)
        raise


def metric_note(metric: Callable[..., Any], arguments: str) -> str:
    """The note on an error in a metric function, which was called with these arguments."""
    return f"Raised by the metric {_qualified(metric)}, which was called as metric({arguments})."


def need_arguments(metric: Callable[..., Any], arguments: str, *given: Any, **named: Any) -> None:
    """Refuse (MetricError) a metric whose signature doesn't take what it is given, written as ``arguments``."""
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):
        return  # some functions written in C have none
    try:
        signature.bind(*given, **named)
    except TypeError as err:
        raise MetricError(
            f"the metric {_qualified(metric)} is called as metric({arguments}), but it takes {signature}: {err}. "
            "Give it these arguments; **others takes those that it doesn't use."
        ) from None


def metric_name(metric: str | Callable[..., Any]) -> str:
    """The name of a metric, for tables and sentences."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "custom")


def _qualified(metric: Callable[..., Any]) -> str:
    return getattr(metric, "__qualname__", None) or type(metric).__qualname__


# What TransformerLens has and a wrapped model or a cache hasn't.
_WEIGHTS = {
    "W_E", "W_pos", "W_E_pos", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate", "b_Q", "b_K",
    "b_V", "b_O", "b_in", "b_out", "QK", "OV", "blocks", "embed", "pos_embed", "ln_final", "unembed",
    "tokens_to_residual_directions", "accumulated_bias", "all_composition_scores", "fold_layer_norm",
    "process_weights", "enable_compatibility_mode", "tl_parameters", "stack_params_for",
}  # fmt: skip
_ELSEWHERE = {
    "generate": "call model.module.generate(...), inside `with model.hooks(...)` if hooks should act on it",
    "state_dict": "it is model.module.state_dict()",
    "named_parameters": "it is model.module.named_parameters()",
    "set_use_attn_result": "cache.stack_head_results() gives what each head writes",
    "set_use_hook_mlp_in": "blocks.0.hook_mlp_in can be hooked without it",
    **dict.fromkeys(
        ("set_use_split_qkv_input", "set_use_attn_in"),
        "heads have no inputs of their own here; patch attn.hook_q, attn.hook_k and attn.hook_v",
    ),
    "mod_dict": "the points are in model.hook_dict, the modules in model.module.named_modules()",
}
_CACHE_WEIGHTS = {
    "compute_head_results", "get_neuron_results", "stack_neuron_results",
    "logit_lens", "get_full_resid_decomposition", "compute_ssm_state",
    "compute_ssm_effective_attention",
}  # fmt: skip
# What is about one part of a block, and whether a model has such a part.
_PARTS: dict[str, tuple[str, Callable[[Any], int]]] = {
    **dict.fromkeys(
        (
            "compute_head_results", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "QK",
            "OV", "all_composition_scores", "set_use_attn_result", "set_use_split_qkv_input", "set_use_attn_in",
        ), ("attention heads", lambda cfg: cfg.n_heads),
    ),
    **dict.fromkeys(
        ("get_neuron_results", "stack_neuron_results", "W_in", "W_out", "W_gate", "b_in", "b_out", "set_use_hook_mlp_in"),
        ("MLP", lambda cfg: cfg.d_mlp),
    ),
}  # fmt: skip


class _ElsewhereError(InputError, AttributeError):
    """An attribute that is not here, with the way to it. hasattr() stays False."""


def elsewhere(owner: str, name: str, model: Any = None) -> AttributeError:
    """The error for an attribute that TransformerLens has and ``owner`` ("HookedModel" or "ActivationCache") doesn't.

    ``model`` says what its architecture has no part for.
    """
    if name in _PARTS and model is not None and not _PARTS[name][1](model.adapter.cfg):
        part = _PARTS[name][0]
        return _ElsewhereError(f"{owner} has no {name!r}: this {type(model.module).__name__} has no {part}")
    if owner == "HookedModel" and name in _ELSEWHERE:
        return _ElsewhereError(f"HookedModel has no {name!r}: {_ELSEWHERE[name]}")
    if name in (_WEIGHTS if owner == "HookedModel" else _CACHE_WEIGHTS):
        return _ElsewhereError(
            f"{owner} has no {name!r}: it needs the weights in TransformerLens' own layout, and a wrapped model keeps "
            "them as they are (model.module). Build a TransformerBridge of a copy of the model for that part: "
            "transformer_lens.model_bridge.sources.build_bridge_from_module"
        )
    return AttributeError(f"{owner!r} object has no attribute {name!r}")

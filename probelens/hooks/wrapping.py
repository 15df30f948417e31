"""Wrapping: finds the adapter for a model and makes a HookedModel of the two.

Adapters are found among the installed entry points of ``probelens.adapters``, built-in ones in the same way as those
of other packages. One that fails to import, or doesn't answer as an adapter, is passed over with a warning.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from probelens.errors import AdapterNotFoundError, InputError, nearest
from probelens.hooks.adapter import Adapter
from probelens.hooks.model import HookedModel

__all__ = ["adapters", "find_adapter", "own_layers", "unadapted", "unwrap", "wrap"]

GROUP = "probelens.adapters"


def wrap(module: Any, adapter: str | type[Adapter] | None = None, **options: Any) -> HookedModel:
    """A HookedModel over a model of yours, which stays as it is.

    Args:
        module: A transformers model, a module with an ``nn.LSTM``/``nn.GRU``, a TransformerLens or
            nnsight model, or any module whose list of blocks you name with ``blocks=``. Of a compiled
            model, a ``DataParallel`` or a PEFT model with LoRA or its like, the model inside.
        adapter: The adapter, by name or as a class; None to find it.
        **options: For the adapter: ``tokenizer=``, and for the generic one ``blocks=``, ``embed=``,
            ``ln_final=``, ``unembed=`` (module paths). ``output=``, for any module, is
            a function from what it returns to its answer: (example, pos, class), (example, class) or (example,).

    Returns:
        The hooked model. Wrapping costs nothing until hooks are used.

    Raises:
        AdapterNotFoundError: No adapter knows the module, or ``adapter`` isn't installed.
        InputError: An option that the adapter doesn't take, a path the module doesn't have, or a
            wrapper that does more than run the model (prompt tuning, TorchScript, sharded weights).

    Examples:
        >>> import torch
        >>> stack = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> model = wrap(torch.nn.ModuleDict({"layers": stack}), blocks="layers")
        >>> model.cfg.n_layers
        2
    """
    if isinstance(module, HookedModel):
        return module
    if isinstance(module, (str, os.PathLike)):
        raise AdapterNotFoundError(f"wrap() takes a model; to load one by name use pl.load({str(module)!r})")
    if isinstance(module, type):
        raise AdapterNotFoundError(
            f"wrap() takes a model, not the class {module.__name__}: make one first, {module.__name__}(...)"
        )
    options = {k: v for k, v in options.items() if v is not None}
    answer = options.pop("output", None)
    if answer is not None and not callable(answer):
        raise InputError(f"output={answer!r} must be a function of what the module returns, which gives a tensor")
    module = unwrap(module)
    passed: set[type[Adapter]] = set()
    while True:
        found = find_adapter(module, adapter, options, passed)
        old: Any = getattr(found, "wrap", None)
        if old is not None:
            warnings.warn(
                f"{found.__name__}.wrap is deprecated: define {found.__name__}.adapt, which returns the adapter alone",
                DeprecationWarning, stacklevel=2,
            )  # fmt: skip
            model = old(module, **options)
        else:
            made = found.adapt(module, **options)
            model = HookedModel(made.module, made) if isinstance(made, Adapter) else made
        if isinstance(model, HookedModel):
            if answer is not None:
                model.adapter.output = _Answer(answer)  # type: ignore[method-assign]
            return model
        reason = f"it made a {type(model).__name__} of a {type(module).__name__}, which is no adapter"
        if adapter is not None:
            raise AdapterNotFoundError(f"adapter {found.name!r} can't be used: {reason}")
        _pass_over(found.name, reason)
        passed.add(found)


class _Answer:
    """The answer in what a module returns, by a function of the caller's."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, raw: Any) -> torch.Tensor:
        found = self.fn(raw)
        if not isinstance(found, torch.Tensor):
            raise InputError(
                f"output= must give a tensor (example, ...), got a {type(found).__name__} from what the module returned, a "
                f"{type(raw).__name__}"
            )
        return found


@functools.lru_cache(maxsize=1)
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    # Not importlib.metadata.entry_points(): of two records of one package (an installed one, and an
    # egg-info left by an older build in the current folder) it reads the first only.
    for package in importlib.metadata.distributions():
        for point in package.entry_points:
            if point.group == GROUP:
                found.setdefault(point.name, point)
    return found


@functools.cache
def _load(name: str) -> type[Adapter] | str:
    """The adapter class behind an entry point, or why it can't be used."""
    try:
        found = _entry_points()[name].load()
    except (Exception, SystemExit) as err:
        # Another package's import may fail in any way; it must not take the others with it.
        reason = f"{type(err).__name__}: {err}"
    except KeyboardInterrupt as err:
        # Whether the user or the package interrupts can't be told, so it ends the run, and says where.
        err.add_note(
            f"interrupted while the probelens adapter {name!r} was imported, from {_entry_points()[name].value!r}"
        )
        raise
    else:
        if not (isinstance(found, type) and issubclass(found, Adapter)):
            reason = f"it is {found!r}, not a subclass of probelens.Adapter"
        elif not isinstance(found.priority, (int, float)):
            reason = f"its priority is {found.priority!r}, not a number"
        elif not isinstance(found.options, (tuple, list)):
            reason = f"its options are {found.options!r}, not a tuple of names"
        else:
            return found
    _pass_over(name, reason)
    return reason


def _pass_over(name: str, reason: str) -> None:
    warnings.warn(f"probelens adapter {name!r} can't be used: {reason}", RuntimeWarning, stacklevel=4)


def _matches(name: str, cls: type[Adapter], module: Any) -> bool:
    """Whether an adapter says that it knows the module; one that raises or answers neither yes nor no is passed over."""
    try:
        answer: Any = cls.matches(module)
    except Exception as err:
        _pass_over(name, f"its matches() raised {type(err).__name__}: {err}")
        return False
    if not isinstance(answer, bool):
        _pass_over(name, f"its matches() returned {answer!r}, neither True nor False")
    return answer is True


def adapters() -> dict[str, type[Adapter]]:
    """Every adapter that can be imported, the most particular first.

    Returns:
        Entry point name to class, by falling ``priority`` and then by name.
    """
    loaded = {name: _load(name) for name in _entry_points()}
    usable = {name: found for name, found in loaded.items() if isinstance(found, type)}
    return dict(sorted(usable.items(), key=lambda item: (-item[1].priority, item[0])))


def find_adapter(
    module: Any, name: str | type[Adapter] | None = None, options: dict[str, Any] | None = None,
    without: Collection[type[Adapter]] = (),
) -> type[Adapter]:  # fmt: skip
    """The adapter class for a model.

    Args:
        module: What the user wants to wrap.
        name: Entry point name, or the class itself, to skip the search.
        options: Keywords for the adapter. One that no matching adapter takes is an error.
        without: Adapters that the search passes over.

    Returns:
        The first adapter, most particular first, whose ``matches`` says yes.

    Raises:
        AdapterNotFoundError: None knows the module, or ``name`` isn't installed.
        InputError: An option that the adapter doesn't take.
    """
    wanted = set(options or {})
    if isinstance(name, type):
        if not issubclass(name, Adapter):
            raise AdapterNotFoundError(f"an adapter is a subclass of probelens.Adapter, got {name!r}")
        _check_options(name, name.name, wanted)
        return name
    if name is not None:
        if name not in _entry_points():
            known = sorted(_entry_points())
            raise AdapterNotFoundError(
                f"adapter {name!r} is not known. Nearest: {nearest(name, known) or 'none'}. "
                f"Installed: {', '.join(known)}"
            )
        found = _load(name)
        if isinstance(found, str):
            raise AdapterNotFoundError(f"adapter {name!r} can't be used: {found}")
        _check_options(found, name, wanted)
        return found
    usable = [(key, cls) for key, cls in adapters().items() if cls not in without]
    matching = [(key, cls) for key, cls in usable if _matches(key, cls, module)]
    if wanted:
        # blocks="…" says that the user describes the model: the adapter that needs nothing else is meant.
        taking = [(key, cls) for key, cls in usable if wanted <= set(cls.options)]
        chosen = [pair for pair in matching if pair in taking] or [pair for pair in taking if pair[1].any_module]
        if not chosen:
            if matching:
                _check_options(matching[0][1], matching[0][0], wanted)
            known = sorted({option for cls in adapters().values() for option in cls.options})
            odd = next((option for option in sorted(wanted) if option not in known), sorted(wanted)[0])
            raise InputError(
                f"no adapter for a {type(module).__name__} takes the option {odd!r}. "
                f"Nearest: {nearest(odd, known) or 'none'}. Known: {', '.join(known)}"
            )
        return chosen[0][1]
    if matching:
        return matching[0][1]
    kind = type(module)
    broken = {key: why for key in _entry_points() if isinstance(why := _load(key), str)}
    raise AdapterNotFoundError(
        f"no adapter knows {kind.__module__}.{kind.__qualname__}. Installed: {', '.join(adapters())}. "
        + (f"Broken: {broken}. " if broken else "")
        + 'For any module with a list of blocks: pl.wrap(module, blocks="path.to.the.list"), '
        "with embed=, ln_final= and unembed= as far as they exist."
    )


def _check_options(cls: type[Adapter], name: str, wanted: set[str]) -> None:
    unknown = sorted(wanted - set(cls.options))
    if unknown:
        raise InputError(
            f"adapter {name!r} doesn't take {unknown[0]!r}. "
            f"Allowed: {', '.join(cls.options) or 'no options'}. Nearest: {nearest(unknown[0], cls.options) or 'none'}"
        )


def unwrap(module: Any) -> Any:
    """The model that runs: inside ``torch.compile``, (Distributed)DataParallel or a PeftModel; anything else as it is.

    Nothing is copied or changed. Wrappers that do more than call the model raise InputError.

    Examples:
        >>> layer = torch.nn.Linear(2, 2)
        >>> unwrap(torch.nn.DataParallel(layer)) is layer
        True
    """
    while True:
        if _is(module, "torch._dynamo", "OptimizedModule"):
            module = module._orig_mod
        elif _is(module, "torch.nn.parallel", "DataParallel", "DistributedDataParallel"):
            module = module.module
        elif _is(module, "peft.", "PeftModel", "PeftMixedModel"):
            module = _peft(module)
        else:
            break
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{type(module).__name__} is TorchScript, which calls no hooks inside. Wrap the model it was made from."
        )
    if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise InputError(
            "FullyShardedDataParallel keeps pieces of the weights on each process. Load the checkpoint whole and "
            "wrap that."
        )
    return module


def unadapted(module: nn.Module) -> nn.Module:
    """The original layer under a PEFT adapter, or the layer itself if there is none."""
    while True:
        if _is(module, "peft.", "BaseTunerLayer") and isinstance(module.base_layer, nn.Module):
            module = module.base_layer
        elif _is(module, "peft.", "AuxiliaryTrainingWrapper"):
            module = module.original_module  # type: ignore[assignment]
        else:
            return module


def own_layers(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every submodule with its path, as ``named_modules``, and none that PEFT put inside another.

    An adapted layer is given under its own path as the layer that it was.
    """
    found: list[tuple[str, nn.Module]] = []
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        layer = unadapted(module)
        inside = f"{path}." if layer is not module else None
        found.append((path, layer))
    return found


def _is(module: Any, package: str, *names: str) -> bool:
    """Whether a class of that name from that package is among the module's, without importing it."""
    return any(c.__name__ in names and c.__module__.startswith(package) for c in type(module).__mro__)


def _peft(module: Any) -> Any:
    """The base model, in whose layers LoRA and similar methods are. Other methods do more than that."""
    tuner, configs = module.base_model, list(module.peft_config.values())
    kind = ", ".join(str(getattr(c.peft_type, "value", c.peft_type)) for c in configs)
    merged = "Wrap what it was trained on, or the model that merge_and_unload() gives, where the method has it."
    if any(c.is_prompt_learning for c in configs):
        raise InputError(
            f"this PeftModel ({kind}) puts tokens of its own before the input, so that positions would not be those "
            f"of your tokens. {merged}"
        )
    if any(getattr(c, "alora_invocation_tokens", None) for c in configs):
        raise InputError(
            f"this PeftModel ({kind}) switches its adapter on at certain tokens, in a call of its own that "
            f"probelens doesn't make. {merged}"
        )
    # AdaLora's own forward only adds a penalty to the loss.
    own = {"BaseTuner", "AdaLoraModel"}
    if type(tuner).forward.__qualname__.partition(".")[0] not in own or not hasattr(tuner, "model"):
        raise InputError(
            f"this PeftModel ({kind}) runs its model in a way of its own, not by adapters in its layers. {merged}"
        )
    return tuner.model

"""Find where a sequence model keeps a variable, and whether it uses it.

Only names live here. Each is imported from its module when it is first used, so that ``import probelens``
costs little and loads no adapter, no transformers, no pandas.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import edits, errors, metrics, models, plots, report, stats, subspaces, tasks, training
    from .ablation import AblationResult, ablate
    from .adapter import Adapter
    from .cache import ActivationCache
    from .collect import Activations, collect
    from .components import ComponentResult, ablate_component
    from .convolution import ablate_convolution
    from .dose import DoseResult, dose_response
    from .erasure_sweep import ErasureResult, erase
    from .errors import (
        AdapterNotFoundError,
        HookNotFiredError,
        InputError,
        MetricError,
        MissingDependencyError,
        ProbelensError,
        ShapeError,
        StoreError,
        UnknownHookError,
    )
    from .final_layer import PatchSitesResult, patch_sites
    from .hooks import at
    from .lengths import LengthTransfer, length_transfer
    from .loading import load, wrap
    from .model import HookedModel
    from .patch_plan import PatchPlan, patch_plan
    from .patching import PatchResult, attribute, patch
    from .points import HookPoint
    from .probing import LinearProbe, ProbeResult, probe
    from .profile import Profile, profile
    from .subspaces import Eraser, Subspace, leace
    from .tasks import Batch, PatchPairs

__version__ = "0.1.0.dev0"

__all__ = [
    "AblationResult",
    "ActivationCache",
    "Activations",
    "Adapter",
    "AdapterNotFoundError",
    "Batch",
    "ComponentResult",
    "DoseResult",
    "Eraser",
    "ErasureResult",
    "HookNotFiredError",
    "HookPoint",
    "HookedModel",
    "InputError",
    "LengthTransfer",
    "LinearProbe",
    "MetricError",
    "MissingDependencyError",
    "PatchPairs",
    "PatchPlan",
    "PatchResult",
    "PatchSitesResult",
    "ProbeResult",
    "ProbelensError",
    "Profile",
    "ShapeError",
    "StoreError",
    "Subspace",
    "UnknownHookError",
    "__version__",
    "ablate",
    "ablate_component",
    "ablate_convolution",
    "at",
    "attribute",
    "collect",
    "dose_response",
    "edits",
    "erase",
    "errors",
    "leace",
    "length_transfer",
    "load",
    "metrics",
    "models",
    "patch",
    "patch_plan",
    "patch_sites",
    "plots",
    "probe",
    "profile",
    "report",
    "stats",
    "subspaces",
    "tasks",
    "training",
    "wrap",
]

_NAMES = {
    "ablation": ("AblationResult", "ablate"),
    "adapter": ("Adapter",),
    "cache": ("ActivationCache",),
    "collect": ("Activations", "collect"),
    "components": ("ComponentResult", "ablate_component"),
    "convolution": ("ablate_convolution",),
    "dose": ("DoseResult", "dose_response"),
    "erasure_sweep": ("ErasureResult", "erase"),
    "errors": (
        "AdapterNotFoundError",
        "HookNotFiredError",
        "InputError",
        "MetricError",
        "MissingDependencyError",
        "ProbelensError",
        "ShapeError",
        "StoreError",
        "UnknownHookError",
    ),
    "final_layer": ("PatchSitesResult", "patch_sites"),
    "hooks": ("at",),
    "lengths": ("LengthTransfer", "length_transfer"),
    "loading": ("load", "wrap"),
    "model": ("HookedModel",),
    "points": ("HookPoint",),
    "patch_plan": ("PatchPlan", "patch_plan"),
    "patching": ("PatchResult", "attribute", "patch"),
    "probing": ("LinearProbe", "ProbeResult", "probe"),
    "profile": ("Profile", "profile"),
    "subspaces": ("Eraser", "Subspace", "leace"),
    "tasks": ("Batch", "PatchPairs"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in __all__ or _is_module(name):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _is_module(name: str) -> bool:
    return not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps ``probelens.profile`` and ``probelens.collect`` the functions.

    Python binds a submodule to its package after importing it, which would put the module ``profile``
    where the function ``profile`` belongs as soon as anyone writes ``from probelens.profile import Profile``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _HOME:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

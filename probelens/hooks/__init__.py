"""One model, its hook points, and the hooks on them.

Public as ``pl.wrap``, ``pl.HookedModel``, ``pl.HookPoint``, ``pl.at``, ``pl.ActivationCache``, ``pl.Adapter`` and ``pl.edits``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["edits"])

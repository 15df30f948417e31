"""One model, its hook points, and the hooks on them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["edits"])

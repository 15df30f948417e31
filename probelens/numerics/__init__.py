"""Numbers, intervals and tests that know no model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["indices", "metrics", "permutation", "stats"])

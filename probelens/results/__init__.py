"""What a primitive returns: saved, tabled, drawn and reported. Knows no model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["files", "plots", "report"])

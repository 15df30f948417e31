"""Recurrent and state-space forwards with taps, run in place of a module's own."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["rnn", "ssm"])

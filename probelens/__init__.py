"""Find where a sequence model keeps a variable, and whether it uses it.

The public names stand in the stub beside this file. Each is imported from its room when it is first used, so
that ``import probelens`` costs little and loads no adapter, no transformers, no pandas.
"""

import lazy_loader

__version__ = "0.1.0.dev0"

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])


def __dir__() -> list[str]:
    return __all__

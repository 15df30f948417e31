"""Functions of a corpus of Python, and which modules of it no model is pretrained on.

A hash of its name decides whether a module is held out: no model of these recipes is pretrained on such modules, so that
Code-Depth can be probed on code that none of them has seen.
"""

from __future__ import annotations

import hashlib
from typing import Any

from probelens.tasks.code import corpus as _corpus

HELD_OUT = 0.3  # share of the modules


def held_out(module: str) -> bool:
    """Whether a module of the standard library is kept from pretraining, as "unittest" is and "json" isn't."""
    digest = hashlib.blake2b(f"refit the probe/{module}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56 < HELD_OUT


def functions(corpus: Any = "stdlib", max_chars: int = 4000) -> list[tuple[str, str]]:
    """Module (or repository) and text of each function of a corpus as ``CodeDepth`` takes it, in order, no text twice."""
    found = _corpus.load(corpus, 80, max_chars)
    return [(found.names[group], code) for group, code in zip(found.groups, found.codes, strict=True)]

"""One progress bar for everything that takes long: tqdm, and silent where nobody looks."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int | None, describe: str, show: bool, **kw: Any) -> Any:
    """A tqdm bar, silent where ``show`` is False or stderr is neither a terminal nor a notebook."""
    from tqdm.auto import tqdm

    seen = show and ("ipykernel" in sys.modules or sys.stderr.isatty())
    return tqdm(total=total, desc=describe, disable=not seen, leave=False, **kw)

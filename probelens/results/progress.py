"""One progress bar for everything that takes long: tqdm, and silent where nobody looks."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["progress_bar"]


def progress_bar(total: int | None, describe: str, show: bool, **kw: Any) -> Any:
    """A tqdm bar, or one that prints nothing.

    Args:
        total: Number of steps, None if unknown.
        describe: What is being counted.
        show: Whether the caller wants it. It still stays silent when stderr is not a terminal or notebook.
        **kw: Passed to tqdm.

    Returns:
        A context manager with ``update(n)``.
    """
    from tqdm.auto import tqdm

    notebook = "ipykernel" in sys.modules
    return tqdm(
        total=total, desc=describe, disable=not show or not (notebook or sys.stderr.isatty()), leave=False, **kw
    )

"""The error for hooks that were asked for and never called."""

from __future__ import annotations

from collections.abc import Iterable

from probelens.errors import HookNotFiredError
from probelens.hooks.passes.entry import Entry

__all__ = ["check_fired"]


def check_fired(entries: Iterable[Entry], *, backward: bool = True) -> None:
    """Raise a HookNotFiredError that names the silent points when a hook that was asked for was never called.

    Where no backward pass should have happened by now, a backward hook counts once it is attached to the graph.
    """
    # Not those that reset_hooks() took away.
    silent = [e for e in entries if e.active and not e.fired and (backward or not e.attached)]
    if not silent:
        return
    if all(e.attached for e in silent):
        reason = (
            "the forward pass reached them but no backward pass did. "
            "Call .backward() on something computed from them, inside the `with` block."
        )
    else:
        reason = (
            "no forward pass of the model reached them while they were in place. Check that the model "
            "was called, what stop_at_layer and start_at_layer leave out, and whether the model calls "
            "that module at all; model.verify(inputs) tests every point."
        )
    names = list(dict.fromkeys(e.point.name for e in silent))
    shown = ", ".join(repr(n) for n in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise HookNotFiredError(f"{len(silent)} hook(s) did not fire, at {shown}: {reason}")

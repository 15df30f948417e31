"""Edits of activations: small frozen objects that work as hook functions at any hook point.

Each is pure: it returns a new tensor of the same shape, dtype and device and leaves its input as it
was. Restrict one to positions with ``pos=`` here or with ``probelens.at``. At a state point, which
hooks see one step at a time, ``pos`` and per-position values follow ``hook.pos``.

    model.run_with_hooks(tokens, fwd_hooks=[("blocks.3.hook_resid_post", edits.project(subspace))])
"""

from probelens.hooks.edits.edit import Edit
from probelens.hooks.edits.heads import AtHeads, at_heads
from probelens.hooks.edits.removal import Erase, Project, erase, project
from probelens.hooks.edits.swap import Swap, swap
from probelens.hooks.edits.values import (
    Add,
    Mean,
    Replace,
    Resample,
    Scale,
    Zero,
    add,
    mean,
    replace,
    resample,
    scale,
    zero,
)

__all__ = [
    "Add", "AtHeads", "Edit", "Erase", "Mean", "Project", "Replace", "Resample", "Scale", "Swap", "Zero",
    "add", "at_heads", "erase", "mean", "project", "replace", "resample", "scale", "swap", "zero",
]  # fmt: skip

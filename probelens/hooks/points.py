"""Hook points: named tensors of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from probelens.errors import InputError, ShapeError

__all__ = ["Direction", "HookFn", "HookPoint", "Site", "boundary", "in_block", "interior"]

RESID = ("batch", "pos", "d_model")
NOTES = {
    "embed": "output of the token embedding, before positions are added to it",
    "resid_pre": "residual stream entering the block; an edit reaches this block and all after it",
    "resid_post": "residual stream leaving the block; an edit reaches all blocks after it",
    "ln_final_in": "residual stream after the last block",
    "ln_final_out": "residual stream after the final norm",
    "unembed_in": "what the logits are read from",
    "unembed_out": "logits; an edit is what the model returns, unless it caps them afterwards",
}
HookFn = Callable[..., "Tensor | None"]
"""A hook: `fn(tensor, hook)` returns the tensor to go on with, or None for no change."""
Direction = Literal["fwd", "bwd"]
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def in_block(name: str) -> tuple[int | None, str]:
    """The block that a full name belongs to, and the name inside it.

    Args:
        name: Name of a hook point or of a weight.

    Returns:
        Number of the block, and what follows; None and the name itself for what belongs to the whole model.

    Examples:
        >>> in_block("blocks.3.attn.hook_z"), in_block("ln_final.hook_out")
        ((3, 'attn.hook_z'), (None, 'ln_final.hook_out'))
    """
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


@dataclass(frozen=True)
class Site:
    """Where a boundary hook point is: one tensor that goes into or comes out of a module.

    Args:
        path: Module path below the wrapped module; "" is the module itself.
        side: "in" for an argument, "out" for the return value.
        index: Which argument or which element: a position, a keyword, or None for the first tensor.
        heads: Split the last axis into (heads, d_head) for the hook, and merge it again.
        batch_first: False when the tensor is (pos, batch, ...) and must be turned for the hook.
        carry: Path of a module whose output must move by what an edit here adds. It serves points
            whose value the block uses twice, once here and once along its residual path.
        scale: Factor that the model multiplies this tensor with further on; the hook sees the product.
    """

    path: str
    side: Literal["in", "out"]
    index: int | str | None = None
    heads: int | None = None
    batch_first: bool = True
    carry: str | None = None
    scale: float = 1.0

    def to_hook(self, tensor: Tensor) -> Tensor:
        """The tensor as a hook sees it: position first, with an axis of heads.

        Args:
            tensor: As the module has it, of the module's own shape.

        Returns:
            As a hook sees it: (batch, pos, d), or (batch, pos, heads, d_head) where heads are split.
        """
        if not self.batch_first and tensor.ndim >= 2:
            tensor = tensor.transpose(0, 1)
        if self.heads is not None:
            tensor = tensor.unflatten(-1, (self.heads, -1))
        return tensor if self.scale == 1 else tensor * self.scale

    def from_hook(self, tensor: Tensor) -> Tensor:
        """The inverse of ``to_hook``.

        Args:
            tensor: As a hook sees it. (batch, pos, ...)

        Returns:
            As the module has it, of the module's own shape.
        """
        if self.scale != 1:
            tensor = tensor / self.scale
        if self.heads is not None:
            tensor = tensor.flatten(-2)
        if not self.batch_first and tensor.ndim >= 2:
            tensor = tensor.transpose(0, 1)
        return tensor


@dataclass(eq=False)
class HookPoint:
    """One named tensor of a model, which a hook function also gets.

    Args:
        name: Canonical name, for example ``"blocks.3.hook_resid_post"``.
        kind: "boundary" for a module's input or output, "interior" for a tensor inside a forward.
        axes: Names of the axes of the tensor that a hook gets.
        module: Path of the module it belongs to.
        aliases: Other names for the same point.
        site: Where it is, for a boundary point.
        step: True for recurrent state: the hook is called once per position, with ``pos`` set.
        note: What a reader should know, such as what an edit here reaches.
        ctx: Room for what hooks want to keep.
        pos: The step, where a state point's hook is called.
        length: How many positions the sequence has as far as it has run; None where that isn't known.
        offset: Where in the sequence the tensor that a hook gets begins: behind 0 while generating with a cache; None where
            that isn't known.
        call: Which call of its module in one forward is meant, from 0; None where there is one, or each is a position.
        real: 1 for real tokens and 0 for padding, where the run was given a mask. (batch, length)
        owner: Gives the model that the point belongs to.
        block: Number of the block that the point belongs to, taken from its full name; None for a point of the
            whole model.
        depth: Where it is on the layer axis: −1 for the embedding and what enters block 0, l for block l, the number
            of blocks after the last. What enters block l counts as block l − 1's output. A model sets it.
    """

    name: str
    kind: Literal["boundary", "interior"]
    axes: tuple[str, ...]
    module: str
    aliases: tuple[str, ...] = ()
    site: Site | None = None
    step: bool = False
    note: str = ""
    ctx: dict[str, Any] = field(default_factory=dict)
    pos: int | None = None
    length: int | None = None
    owner: Callable[[], Any] | None = None
    block: int | None = None
    depth: int = 0
    offset: int | None = 0
    real: Tensor | None = None
    call: int | None = None

    def __post_init__(self) -> None:
        if self.block is None:
            self.block = in_block(self.name)[0]

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the point without the model."""
        return {**self.__dict__, "owner": None}

    def layer(self) -> int:
        """``block``, for a point that has one.

        Returns:
            Number of the block, from 0.

        Raises:
            InputError: The point belongs to the whole model, such as ``hook_embed``.
        """
        if self.block is None:
            raise InputError(f"hook point {self.name!r} belongs to the whole model, not to one block")
        return self.block

    @property
    def pos_axis(self) -> int:
        """The axis of the hook's tensor that runs over positions; at a pattern, over those of the query."""
        for axis in ("pos", "key_pos"):
            if axis in self.axes:
                return self.axes.index(axis)
        return 1

    def at(self, pos: int, length: int | None = None) -> HookPoint:
        """This point at one position: the same name and ``ctx``, with ``pos`` set.

        Args:
            pos: The position, from the start.
            length: How many positions there are.

        Returns:
            A new hook point.
        """
        return self.during(pos=pos, length=length)

    def during(self, **now: Any) -> HookPoint:
        """This point in one forward pass: the same name and ``ctx``, with some of the other fields set.

        Args:
            **now: Fields of the new point.

        Returns:
            A new hook point.
        """
        point = object.__new__(HookPoint)
        point.__dict__.update(self.__dict__, **now)
        return point

    def add_hook(
        self, hook: Callable[..., Tensor | None], dir: Literal["fwd", "bwd"] = "fwd", is_permanent: bool = False,
        *, prepend: bool = False,
    ) -> None:  # fmt: skip
        """``model.add_hook`` at this point.

        Args:
            Those of ``HookedModel.add_hook``, without ``name``.
        """
        self._model().add_hook(self, hook, dir, is_permanent, prepend=prepend)

    def remove_hooks(self, dir: Literal["fwd", "bwd", "both"] = "fwd", including_permanent: bool = False) -> None:
        """Remove the hooks that ``add_hook`` put at this point.

        Args:
            dir: "fwd", "bwd" or "both".
            including_permanent: Also those added with ``is_permanent=True``.
        """
        self._model().reset_hooks(False, dir, including_permanent, name=self.name)

    def clear_context(self) -> None:
        """Empty ``ctx``."""
        self.ctx.clear()

    def _model(self) -> Any:
        model = self.owner() if self.owner is not None else None
        if model is None:
            raise InputError(f"hook point {self.name!r} belongs to no model that still exists: use model.add_hook")
        return model

    def __repr__(self) -> str:
        where = "" if self.pos is None else f", pos={self.pos}"
        return f"HookPoint({self.name!r}{where})"


def boundary(
    name: str, path: str, side: Any, *, axes: Sequence[str] = RESID,
    aliases: Sequence[str] = (), note: str = "", **site: Any,
) -> HookPoint:  # fmt: skip
    """A hook point at a module's input ("in") or output ("out").

    Args:
        path: Module path below the wrapped module.
        side: "in" for an argument, "out" for the return value.
        name, axes, aliases, note: As for ``HookPoint``.
        site: Further fields of ``Site``, such as ``index`` or ``heads``.

    Returns:
        The point.
    """
    where = Site(path, side, **site)
    return HookPoint(name, "boundary", tuple(axes), path, tuple(aliases), where, note=note)


def interior(
    name: str, path: str, *, axes: Sequence[str], aliases: Sequence[str] = (),
    step: bool = False, note: str = "",
) -> HookPoint:  # fmt: skip
    """A hook point inside the forward of the module at ``path``.

    Args:
        path: Path of the module in whose forward it lies.
        name, axes, aliases, step, note: As for ``HookPoint``.

    Returns:
        The point.
    """
    return HookPoint(name, "interior", tuple(axes), path, tuple(aliases), None, step, note)


def has_positions(point: HookPoint) -> bool:
    """Whether a point's tensor has an axis of positions, ``pos_axis``; taken for granted where no axes are known.

    Examples:
        >>> has_positions(HookPoint("hook_pooled", "boundary", ("batch", "d_model"), "pool"))
        False
    """
    return not point.axes or "pos" in point.axes or "key_pos" in point.axes


def no_positions(point: HookPoint) -> str:
    """Why positions can't be asked for at a point without a known axis of them, for the end of a sentence."""
    if "unknown" not in point.axes:
        return f"the axes ({', '.join(point.axes)}) have no positions"
    return "no position axis is known" + (f": {point.note}" if point.note else "")


def version_of(tensor: Tensor) -> int | None:
    """Number of writes to a tensor; None for inference tensors, which don't count them."""
    return None if tensor.is_inference() else tensor._version


def checked(new: Any, old: Tensor, hook: HookPoint) -> Tensor:
    """What a hook returned, of the point's shape, dtype and device; a ShapeError otherwise."""
    if not isinstance(new, Tensor):
        raise ShapeError(
            f"hook at {hook.name!r} returned a {type(new).__name__}. "
            f"Return a tensor of shape {tuple(old.shape)}, or None to leave it unchanged."
        )
    if new.shape != old.shape:
        axes = f" {hook.axes}" if len(hook.axes) == old.ndim else ""
        raise ShapeError(
            f"hook at {hook.name!r} returned shape {tuple(new.shape)}, but the point has shape "
            f"{tuple(old.shape)}{axes}. Return that shape, or None to leave it unchanged."
        )
    if new.dtype == old.dtype and new.device == old.device:
        return new
    return new.to(device=old.device, dtype=old.dtype)

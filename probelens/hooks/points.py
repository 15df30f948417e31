"""Hook points: what is told of one named tensor in a model, and how to reach it in a module's call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from probelens.errors import InputError, ShapeError

__all__ = ["HookPoint", "Site", "first_argument", "pick", "put"]


@dataclass(frozen=True)
class Site:
    """Where a boundary hook point stands: one tensor going into or coming out of a module.

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
        """The tensor as a hook sees it: position first, heads apart.

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
    """One named tensor of a model, and what a hook function is told about where it stands.

    Args:
        name: Canonical name, for example ``"blocks.3.hook_resid_post"``.
        kind: "boundary" for a module's input or output, "interior" for a tensor inside a forward.
        axes: Names of the axes of the tensor that a hook gets.
        module: Path of the module it belongs to.
        aliases: Other names for the same point.
        site: Where it stands, for a boundary point.
        step: True for recurrent state: the hook is called once per position, with ``pos`` set.
        note: What a reader should know, such as what an edit here reaches.
        ctx: Room for what hooks want to keep.
        pos: The step, in what a state point's hook is told.
        length: How many steps there are.
        owner: Gives the model that the point belongs to.
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

    def layer(self) -> int:
        """The block this point belongs to.

        Returns:
            Number of the block, from 0.

        Raises:
            InputError: The point belongs to the whole model, such as ``hook_embed``.
        """
        parts = self.name.split(".")
        if parts[0] == "blocks" and len(parts) > 1 and parts[1].isdigit():
            return int(parts[1])
        raise InputError(f"hook point {self.name!r} belongs to the whole model, not to one block")

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
        return HookPoint(
            self.name, self.kind, self.axes, self.module, self.aliases, self.site,
            self.step, self.note, self.ctx, pos, length, self.owner,
        )  # fmt: skip

    def add_hook(
        self,
        hook: Callable[..., Tensor | None],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
    ) -> None:
        """``model.add_hook`` at this point.

        Args:
            hook: fn(tensor, hook) returning a tensor, or None for no change.
            dir: "fwd" or "bwd".
            is_permanent: Stay also through ``reset_hooks()``.
        """
        self._model().add_hook(self, hook, dir, is_permanent)

    def remove_hooks(
        self, dir: Literal["fwd", "bwd", "both"] = "fwd", including_permanent: bool = False
    ) -> None:
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
            raise InputError(
                f"hook point {self.name!r} belongs to no model that is still there: use model.add_hook"
            )
        return model

    def __repr__(self) -> str:
        where = "" if self.pos is None else f", pos={self.pos}"
        return f"HookPoint({self.name!r}{where})"


def has_positions(point: HookPoint) -> bool:
    """Whether a point's tensor has an axis of positions, ``pos_axis``; taken for granted where no axes are known.

    Args:
        point: A hook point.

    Returns:
        False where the axes are known and none is of positions.

    Examples:
        >>> has_positions(HookPoint("hook_pooled", "boundary", ("batch", "d_model"), "pool"))
        False
    """
    return not point.axes or "pos" in point.axes or "key_pos" in point.axes


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> int | str:
    """Position or keyword of the first tensor among a call's arguments.

    Args:
        args: Positional arguments of a call.
        kwargs: Keyword arguments of a call.
        name: Hook point, for the message.

    Returns:
        A number for a positional argument, a string for a keyword.

    Raises:
        ShapeError: There is no tensor among them.
    """
    for i, value in enumerate(args):
        if isinstance(value, (Tensor, PackedSequence)):
            return i
    for key, value in kwargs.items():
        if isinstance(value, (Tensor, PackedSequence)):
            return key
    raise ShapeError(f"hook point {name!r}: its module was called without any tensor argument")


def pick(output: Any, index: int | str | None, name: str = "output") -> Any:
    """The tensor among a module's outputs: itself, an element of a tuple, or an entry of a mapping.

    Args:
        output: What a module returned.
        index: Which element; None for the first tensor.
        name: Hook point, for the message.

    Returns:
        The tensor, or packed sequence.

    Raises:
        ShapeError: There is no tensor to hook.
    """
    if index is None:
        if isinstance(output, (Tensor, PackedSequence)):
            return output
        items = output.values() if isinstance(output, Mapping) else output
        if isinstance(items, Iterable):
            for item in items:
                if isinstance(item, (Tensor, PackedSequence)):
                    return item
    elif not isinstance(output, Tensor):
        found = output[index]
        if isinstance(found, (Tensor, PackedSequence)):
            return found
    elif index == 0:
        return output
    raise ShapeError(
        f"hook point {name!r}: its module returned a {type(output).__name__}"
        f"{'' if index is None else f' with nothing at {index!r}'}, and hooks see tensors only"
    )


def put(output: Any, index: int | str | None, new: Any) -> Any:
    """A module's output with the tensor that ``pick`` finds replaced; the original is left alone.

    Args:
        output: What a module returned.
        index: Which element; None for the first tensor.
        new: What stands there instead.

    Returns:
        The same kind of output, with ``new`` in it.

    Raises:
        ShapeError: A tuple was asked for an entry by name.
    """
    if isinstance(output, (Tensor, PackedSequence)) and not (
        isinstance(output, PackedSequence) and index is not None
    ):
        return new
    if isinstance(output, Mapping):
        key = index
        if key is None:
            key = next(k for k, v in output.items() if isinstance(v, (Tensor, PackedSequence)))
        changed = copy.copy(output)
        changed[key] = new  # type: ignore[index]
        return changed
    items = list(output)
    if isinstance(index, str):
        raise ShapeError(f"a {type(output).__name__} has no entry {index!r}")
    first = next(i for i, v in enumerate(items) if isinstance(v, (Tensor, PackedSequence)))
    items[first if index is None else index] = new
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)

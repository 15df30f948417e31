"""The hook points of a model by name, and the one function that resolves every way to say which are meant."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from probelens.errors import InputError, UnknownHookError, nearest
from probelens.hooks.adapter import Adapter
from probelens.hooks.points import HookPoint, Site, in_block
from probelens.hooks.shorthand import GRAD, Names, NameTable, as_layer, asked_name, listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HasPoints", "Points", "by_point", "need_wrapped", "resolve"]

T = TypeVar("T")
# How the names of points begin that a forward reaches before the blocks: an encoder is all done before its decoder's.
_BEFORE = ("hook_embed", "embed", "hook_pos_embed", "encoder")
_BY_MODULE = {
    "hook_embed": "embed.hook_out", ".hook_resid_pre": ".hook_in", ".hook_resid_post": ".hook_out",
    "hook_attn_out": "attn.hook_out", "hook_mlp_out": "mlp.hook_out",
}  # fmt: skip
ALL_NAMES = "All names: model.hook_points()"


class HasPoints(Protocol):
    """A wrapped model, as far as names ask for it: its points."""

    points: Points


def need_wrapped(model: object) -> None:
    """Refuse what isn't a wrapped model; forgetting ``pl.wrap`` is the first slip there is."""
    if not isinstance(getattr(model, "points", None), Points):
        raise InputError(
            f"expected a wrapped model, got a {type(model).__name__}. Wrap a module with probelens.wrap(module), "
            "or load one with probelens.load(name)"
        )


def resolve(model: HasPoints, names: Names) -> list[HookPoint]:
    """The hook points that ``names`` means, everywhere alike.

    Args:
        model: The wrapped model.
        names: What names them:

            - a full name, ``"blocks.3.hook_resid_post"``, or another name of the same point;
            - a shorthand for every layer, ``"resid_post"``, ``"mixer_out"``, ``"pattern"``, ``"ssm_state"``; ``"layers"``
              for the layer axis (the residual entering block 0 and resid_post of every block);
            - a shorthand for one layer as in TransformerLens, ``("resid_post", 3)``, ``("q", -1)``,
              ``("out", 0, "mixer")``, ``"k6"``;
            - a path of the user's own module, ``"gpt_neox.layers.3.mlp.hook_out"`` or ``".hook_in"``;
            - a glob, ``"blocks.[0-3].hook_*"``;
            - a predicate on names, ``lambda name: name.endswith("hook_z")``; of one that leaves out what it names, full ones;
            - a ``HookPoint``;
            - a list of any of these; or None for every hook point.

    Returns:
        Points, each once: of one shorthand, glob or predicate in the order of the forward pass; of several as listed.

    Raises:
        UnknownHookError: Something that fits no hook point, an empty list among them, or fits several kinds of points.
        InputError: ``model`` isn't wrapped.
    """
    need_wrapped(model)
    return model.points.match(names)[0]


def by_point(model: HasPoints, values: Mapping[Any, T]) -> dict[str, T]:
    """A mapping keyed by whatever names hook points, keyed by their full names.

    A key that means several points gives each of them its value. Two keys that mean one point are an InputError.
    """
    found: dict[str, T] = {}
    for key, value in values.items():
        for point in resolve(model, key):
            if point.name in found:
                raise InputError(
                    f"hook point {point.name!r} is named twice, the second time by {key!r}. Give each site once."
                )
            found[point.name] = value
    return found


class Points(NameTable):
    """The hook points of one model, found by name. ``owner`` gives the model that a point's own ``add_hook`` calls."""

    def __init__(self, adapter: Adapter, owner: Callable[[], Any]) -> None:
        self.adapter, self.owner = adapter, owner
        self.named = {point.name: point for point in adapter.all_points}
        aliases = {other: point.name for point in adapter.all_points for other in point.aliases}
        # What the tensor of a point can also be called: by the path of the module that it enters or leaves as it is.
        self.paths = {
            f"{point.site.path}.hook_{point.site.side}": point.name
            for point in adapter.all_points
            if point.site is not None and point.site == Site(point.site.path, point.site.side)
        }
        others, own = self._other_names()
        super().__init__(self.named, others | aliases, adapter.cfg.n_layers)
        # TransformerLens' names of what isn't listed: by the path of a module of the user's, or of what the adapter finds.
        self.unlisted: dict[str, str] = {name: path for name, path in own.items() if name not in self.aliases}
        for point in adapter.all_points:
            self._take(point)

    def _other_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """TransformerLens 4's names, by module, of points that have another name here, and of what isn't listed."""
        found: dict[str, str] = {}
        own: dict[str, str] = {}
        for name in self.named:
            for tail, others in _BY_MODULE.items():
                stem = name.removesuffix(tail)
                other = stem + others
                if stem != name and other not in self.named and not self._has_module(other.rpartition(".hook_")[0]):
                    found[other] = name
        ends = ("in", "out")
        around = {
            f"{part}.hook_{end}": f"{path}.hook_{end}" for part, path in self.adapter.parts.items() for end in ends
        }
        for name, where in (around | self.adapter.lens_names).items():
            if name in self.named or self._has_module(name.rpartition(".hook_")[0] or name):
                continue
            found.pop(name, None)
            target = self.paths.get(where, where)
            (found if target in self.named else own)[name] = target
        return found, own

    def others(self, known: Collection[str]) -> dict[str, str]:
        """What else the points can be called, of a cache too, which has unlisted ones by the name that was asked for."""
        found = {**self.paths, **self.aliases}
        has = {name for name in (*self.unlisted, *self.unlisted.values()) if name in known or name + GRAD in known}
        kept = {self.unlisted.get(name, name): name for name in has}
        for name, path in self.unlisted.items():
            if path in kept:
                found |= {other: kept[path] for other in (name, path) if other != kept[path]}
        return found

    def match(self, names: Names) -> tuple[list[HookPoint], bool]:
        """The points that ``names`` means, each once, and whether each was named by itself; see ``lookup``."""
        found, explicit = self.lookup(names)
        return [self._point(name) for name in found], explicit

    def find(self, name: Names) -> HookPoint:
        """The one point that is meant; an UnknownHookError where nothing fits, or several points do."""
        if isinstance(name, str) and name in self.named:
            return self.named[name]
        return self._point(self.one(name))

    def table(self, names: Names = None) -> pd.DataFrame:
        """A row for each point, in the order of ``match``: name, kind, axes, module, aliases, note."""
        import pandas as pd

        columns = ["name", "kind", "axes", "module", "aliases", "note"]
        rows = [
            (p.name, p.kind, ", ".join(p.axes), p.module, ", ".join(p.aliases), p.note) for p in self.match(names)[0]
        ]
        return pd.DataFrame(rows, columns=columns)

    def block_number(self, layer: int | None, what: str) -> int | None:
        """The number of a block from 0, where a negative one counts from the end; ``what`` is the argument's name."""
        if layer is None:
            return None
        n, layer = self.n_layers, as_layer(layer, what)
        if not -n <= layer <= n:
            kind = type(self.adapter.module).__name__
            raise UnknownHookError(f"{what}={layer!r}: this {kind} has {n} blocks, allowed are {-n} to {n}")
        return layer + n if layer < 0 else layer

    def reached(self, names: Names, start_at_layer: int | None, stop_at_layer: int | None) -> list[HookPoint]:
        """The points that ``names`` means in a run of some blocks; globs and predicates mean those that it reaches."""
        points, explicit = self.match(names)
        if explicit or (start_at_layer is None and stop_at_layer is None):
            return points
        start = self.block_number(start_at_layer, "start_at_layer")
        stop = self.block_number(stop_at_layer, "stop_at_layer")
        # Where a pattern fits only what this run leaves out, all of it stays, to be reported as silent.
        return [p for p in points if self.within(p, start, stop)] or points

    def within(self, point: HookPoint, start: int | None, stop: int | None) -> bool:
        """Whether a run from block ``start`` to block ``stop`` reaches a point.

        False also for a module outside the blocks in a run of some blocks.
        """
        if point.block is not None:
            block = point.block
        elif point.name in self.named:
            block = -1 if point.name.split(".")[0] in _BEFORE else self.n_layers
        elif inside := self.adapter.blocks_with(point.module):
            block = inside[0]
        else:
            return start is None and stop is None
        return (start is None or block >= start) and (stop is None or block < stop)

    def glob(self, pattern: str) -> list[str]:
        found = super().glob(pattern)
        if found:
            return found
        paths = [path for path, _ in self.adapter.module.named_modules() if path]
        return fnmatch.filter([f"{path}.hook_{side}" for path in paths for side in ("in", "out")], pattern)

    def beyond(self, name: str) -> bool:
        return self._own(name) is not None

    def unknown(self, asked: Names) -> UnknownHookError:
        kind = type(self.adapter.module).__name__
        if callable(asked):
            return UnknownHookError(f"the predicate accepts no hook point of this {kind}. {ALL_NAMES}")
        full = asked_name(asked)
        block, inner = in_block(full)
        if block is not None and block >= self.n_layers:
            why, last = f": this {kind} has {self.n_layers} blocks", f"blocks.{self.n_layers - 1}.{inner}"
            near = [last] if self.alias(last) in self.names else self.near(asked)
        else:
            reason = self.adapter.absent(full)
            why, near = f": {reason}" if reason else f" in this {kind}", self.near(asked)
        if not near:
            paths = [f"{path}.hook_out" for path, _ in self.adapter.module.named_modules() if path]
            near = nearest(full, paths)
        return UnknownHookError(f"hook point {asked!r} not found{why}. Nearest: {listed(near)}. {ALL_NAMES}")

    def absent(self, asked: Names) -> str | None:
        """Why the architecture has no such point; None where it has one, or there is nothing to say."""
        full = asked_name(asked)
        if full in self.unlisted:
            return "it isn't listed, so it is kept where names_filter names it"
        return None if self.alias(full) in self.names else self.adapter.absent(full)

    def _point(self, name: str) -> HookPoint:
        point = self.named.get(name) or self._own(name)
        if point is None:
            raise self.unknown(name)
        return point

    def _own(self, name: str) -> HookPoint | None:
        """A point of the backend's own names, or at a path of the user's module."""
        base, _, call = name.partition("#")
        if call.isdecimal() and (point := self.named.get(self.alias(base)) or self._own(base)) is not None:
            # One of several calls of a module in one forward.
            return self._take(point.during(name=f"{point.name}#{int(call)}", call=int(call), aliases=(), ctx={}))
        own = self.adapter.find(name)
        path, _, side = self.unlisted.get(name, name).rpartition(".hook_")
        if own is None and side in ("in", "out") and self._has_module(path):
            own = HookPoint(name, "boundary", (), path, site=Site(path, side))  # type: ignore[arg-type]
        return None if own is None else self._take(own)

    def _has_module(self, path: str) -> bool:
        try:
            self.adapter.module.get_submodule(path)
        except AttributeError:
            return False
        return True

    def _take(self, point: HookPoint) -> HookPoint:
        point.owner = self.owner
        point.depth = self._depth(point)
        return point

    def _depth(self, point: HookPoint) -> int:
        """Where a point is on the layer axis; see ``HookPoint.depth``."""
        if point.name in self.named:
            if point.block is not None:
                return point.block - point.name.endswith(".hook_resid_pre")
            return -1 if point.name.split(".")[0] in _BEFORE else self.n_layers
        path, adapter = point.module, self.adapter
        entering = point.site is not None and point.site.side == "in"
        inside = adapter.blocks_with(path)
        if inside:
            return inside[0] - 1 if entering and path == adapter.blocks[inside[0]] else inside[-1]
        for part, layer in (("embed", -1), ("ln_final", self.n_layers), ("unembed", self.n_layers)):
            if adapter.parts.get(part) == path:
                return layer
        if not path or any(block.startswith(f"{path}.") for block in adapter.blocks):
            return -1 if entering else self.n_layers
        if path.split(".")[0] in ("embed", "pos_embed", "hook_pos_embed"):
            return -1
        paths = [found for found, _ in adapter.module.named_modules()]
        blocks = [paths.index(block) for block in adapter.blocks if block in paths]
        before = path in paths and bool(blocks) and paths.index(path) < min(blocks)
        return -1 if before else self.n_layers

"""Names of hook points on a model: canonical names, aliases, raw module paths, patterns and predicates."""

from __future__ import annotations

import fnmatch
import re
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn

from probelens.errors import UnknownHookError, nearest
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import ModelConfig
from probelens.hooks.points import HookPoint, Site

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["NamesFilter", "PointNames"]

NamesFilter = str | Iterable[str] | Callable[[str], bool] | None
"""What names hook points: a name, a glob, several of either, a predicate on names, or None for all."""


class PointNames:
    """The part of a HookedModel that finds hook points by name.

    Args:
        module: The user's module.
        adapter: What the architecture says about itself.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self.module = module
        self.adapter = adapter
        self._points: dict[str, HookPoint] = {}
        self._aliases: dict[str, str] = {}
        for point in adapter.all_points:
            point.owner = weakref.ref(self)
            self._points[point.name] = point
            self._aliases.update(dict.fromkeys(point.aliases, point.name))

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the model."""
        return self.adapter.cfg

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every advertised hook point by canonical name, in the order of the forward pass."""
        return dict(self._points)

    def hook_points(self) -> pd.DataFrame:
        """A table of the hook points: name, kind, axes, module, aliases, note."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "name": p.name, "kind": p.kind, "axes": ", ".join(p.axes), "module": p.module,
                    "aliases": ", ".join(p.aliases), "note": p.note,
                }
                for p in self._points.values()
            ],
            columns=["name", "kind", "axes", "module", "aliases", "note"],
        )  # fmt: skip

    def alias(self, name: str) -> str:
        """The canonical name of an alias; other names come back as they are.

        Args:
            name: Any name.

        Returns:
            The canonical name.
        """
        return self._aliases.get(name, name)

    def point(self, name: str | HookPoint) -> HookPoint:
        """The hook point of a canonical name, an alias or a raw module path.

        Args:
            name: For example ``"blocks.3.hook_resid_post"``, or
                ``"gpt_neox.layers.3.mlp.hook_out"`` for any module path of the user's model.

        Returns:
            The hook point.

        Raises:
            UnknownHookError: There is none; the message names the nearest and says why.
        """
        if isinstance(name, HookPoint):
            name = name.name
        if not isinstance(name, str):
            raise UnknownHookError(f"a hook point's name is a string, got {name!r}")
        name = self.alias(name)
        if name in self._points:
            return self._points[name]
        own = self.adapter.find(name)
        if own is not None:
            own.owner = weakref.ref(self)
            return own
        path, _, side = name.rpartition(".hook_")
        if side in ("in", "out") and self._has_module(path):
            site = Site(path, side)  # type: ignore[arg-type]
            return HookPoint(name, "boundary", (), path, site=site, owner=weakref.ref(self))
        raise UnknownHookError(self._unknown(name))

    def _has_module(self, path: str) -> bool:
        try:
            self.module.get_submodule(path)
        except AttributeError:
            return False
        return True

    def _unknown(self, name: str) -> str:
        kind, n = type(self.module).__name__, self.cfg.n_layers
        text = f"hook point {name!r} not found"
        found = re.match(r"blocks\.(\d+)\.(.*)", name)
        if found and int(found[1]) >= n:
            last = f"blocks.{n - 1}.{found[2]}"
            near = [last] if last in self._points or last in self._aliases else []
            text += f": this {kind} has {n} blocks"
        else:
            near = []
            reason = self.adapter.absent(name)
            text += f": {reason}" if reason else f" in this {kind}"
        near = near or nearest(name, [*self._points, *self._aliases])
        if not near:
            paths = [f"{path}.hook_out" for path, _ in self.module.named_modules() if path]
            near = nearest(name, paths)
        listed = ", ".join(repr(x) for x in near) or "none"
        return f"{text}. Nearest: {listed}. All names: model.hook_points()"

    def match(self, names: NamesFilter | HookPoint) -> tuple[list[HookPoint], bool]:
        """The points that a names filter means, and whether each was named by the caller.

        Args:
            names: None for all; a name; a glob such as ``"blocks.*.hook_resid_post"``; a predicate
                on names; or an iterable of names and globs.

        Returns:
            Points in the model's order, or the caller's where a list was given; True where single names
            were given.

        Raises:
            UnknownHookError: A name or pattern that fits nothing.
        """
        if names is None:
            return list(self._points.values()), False
        if isinstance(names, HookPoint):
            return [self.point(names)], True
        if isinstance(names, str):
            if not any(c in names for c in "*?["):
                return [self.point(names)], True
            found = fnmatch.filter(self._points, names)
            aliased = [self._aliases[a] for a in fnmatch.filter(self._aliases, names)]
            if not found and not aliased:
                found = self._raw_matches(names)
            if not found and not aliased:
                reason = self.adapter.absent(names.replace("*", "0"))
                raise UnknownHookError(
                    f"pattern {names!r} fits no hook point{f' ({reason})' if reason else ''}. "
                    "All names: model.hook_points()"
                )
            return [self.point(n) for n in dict.fromkeys([*found, *aliased])], False
        if callable(names):
            found = [n for n in self._points if names(n)]
            if not found:
                raise UnknownHookError(
                    "the names filter accepted no hook point. All names: model.hook_points()"
                )
            return [self._points[n] for n in found], False
        if not isinstance(names, Iterable):
            raise UnknownHookError(
                f"a names filter is a name, a pattern, a predicate or a list of these, got {names!r}"
            )
        points: dict[str, HookPoint] = {}
        explicit = True
        for name in names:
            # Long lists of plain names are the common case, and a small model's run is short.
            plain = self._points.get(name) if isinstance(name, str) else None
            some, named = self.match(name) if plain is None else ([plain], True)
            points.update({p.name: p for p in some})
            explicit = explicit and named
        if not points:
            raise UnknownHookError("the names filter is an empty list. Give None for every hook point")
        return list(points.values()), explicit

    def _raw_matches(self, pattern: str) -> list[str]:
        paths = [p for p, _ in self.module.named_modules() if p]
        return fnmatch.filter([f"{p}.hook_{side}" for p in paths for side in ("in", "out")], pattern)

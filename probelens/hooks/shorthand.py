"""What a name, a shorthand, a glob or a predicate means among the names of hook points."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from probelens.errors import UnknownHookError, nearest
from probelens.hooks.points import HookPoint, in_block

LAYER_AXIS = "layers"
"""The name of the layer axis: what enters block 0, then what each block returns."""
GRAD = "_grad"
"""How the name of a point's gradient ends in a cache."""
Names = str | HookPoint | Callable[[str], bool] | Iterable[Any] | None
"""What names hook points, everywhere alike; see `probelens.hooks.names.resolve`."""

# TransformerLens' short names, the parts of a block they belong to, and its names of parts.
_SHORT = {
    "attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v",
    "mlp_pre": "pre", "mlp_mid": "mid", "mlp_post": "post",
}  # fmt: skip
_PARTS = {
    **dict.fromkeys(("q", "k", "v", "z", "attn_scores", "pattern", "result", "rot_q", "rot_k"), "attn"),
    **dict.fromkeys(("pre", "mid", "post", "pre_linear"), "mlp"),
}
_LAYER_TYPES = {"a": "attn", "m": "mlp", "b": None, "block": None, "blocks": None, "attention": "attn"}


# TransformerLens 4's names by module, of points whose other name says more.
_BY_MODULE = re.compile(
    r"(blocks\.\d+(\.(attn|mlp|norm|ln\w+)(\.\w+)?)?|embed)\.hook_(in|out)|.*\.hook_rot_[qk]|hook_unembed"
)


class NameTable:
    """Full names of hook points in the order of the forward pass, and what each way of asking means among them.

    ``n_layers`` is for layers counted from the end; None for what the names show.

    Examples:
        >>> table = NameTable(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
        >>> table.one(("resid_post", -1))
        'blocks.1.hook_resid_post'
    """

    def __init__(
        self, names: Collection[str], aliases: Mapping[str, str] | None = None, n_layers: int | None = None
    ) -> None:
        self.names, self.aliases = names, aliases or {}
        # Names that patterns mean where they fit nothing in ``names``.
        self.unlisted: Mapping[str, str] = {}
        blocks = (in_block(name)[0] for name in names) if n_layers is None else ()
        # Of a model it is all blocks, of names alone those that they show.
        self.whole = n_layers is not None
        self.n_layers = n_layers or 1 + max((block for block in blocks if block is not None), default=-1)

    def alias(self, name: str) -> str:
        """The full name of an alias; other names come back as they are."""
        return self.aliases.get(name, name)

    def one(self, asked: Names) -> str:
        """The one full name that is meant; an UnknownHookError where nothing fits, or several names do."""
        found, _ = self.lookup(asked)
        if len(found) > 1:
            means = "the predicate accepts" if callable(asked) else f"hook point {asked!r} means"
            raise UnknownHookError(
                f"{means} {len(found)} hook points: {listed(found[:3])}{', …' * (len(found) > 3)}. "
                f"Name one of them, for example {found[0]!r}"
            )
        return found[0]

    def lookup(self, asked: Names) -> tuple[list[str], bool]:
        """The full names that are meant, each once, and whether the caller named each of them by itself.

        A shorthand for every layer, a glob, a predicate or None doesn't. UnknownHookError where nothing fits.
        """
        if asked is None:
            return list(self.names), False
        if isinstance(asked, HookPoint):
            asked = asked.name
        if isinstance(asked, str):
            found, explicit = self._text(asked)
        elif _is_short(asked):
            found, explicit = self._short(*asked)  # type: ignore[misc]
        elif callable(asked):
            found = self._accepted(asked) or [name for name in self.unlisted if asked(name)]
            explicit = False
        elif isinstance(asked, Iterable) and not isinstance(asked, (bytes, bytearray)):
            return self._several(asked)
        else:
            raise UnknownHookError(
                f"a hook point is named by a string, a pair such as ('resid_post', 3), a predicate, a HookPoint or a list "
                f"of these, got {asked!r}"
            )
        if not found:
            raise self.unknown(asked)
        return found, explicit

    def _accepted(self, asked: Callable[[str], bool]) -> list[str]:
        """Names that a predicate accepts, or of which it accepts another name.

        Another name doesn't count where anything in its place would do: a predicate that leaves out what it names,
        such as ``lambda name: "resid" not in name``, means full names.
        """
        found = {name for name in self.names if asked(name)}
        for other, name in self.aliases.items():
            if name in self.names and name not in found and asked(other):
                block, _ = in_block(other)
                if not asked("x.hook_x" if block is None else f"blocks.{block}.x.hook_x"):
                    found.add(name)
        return [name for name in self.names if name in found]

    def _several(self, asked: Iterable[Any]) -> tuple[list[str], bool]:
        names: dict[str, None] = {}
        every = True
        for part in asked:
            if isinstance(part, str) and part in self.names:
                # Long lists of full names are the common case, and a small model's run is short.
                names[part] = None
                continue
            if part is None:
                raise UnknownHookError("a list of names holds None. None alone stands for every hook point")
            found, explicit = self.lookup(part)
            names.update(dict.fromkeys(found))
            every = every and explicit
        if not names:
            raise UnknownHookError(
                "an empty list names no hook point. Give at least one name, or None for every hook point"
            )
        return list(names), every

    def _text(self, text: str) -> tuple[list[str], bool]:
        name = self.alias(text)
        if name in self.names:
            return [name], True
        if text == LAYER_AXIS:
            return [*self._text("blocks.0.hook_resid_pre")[0], *self._inside("resid_post")], False
        if any(char in text for char in "*?["):
            return self.glob(text), False
        if self.beyond(text):
            return [text], True
        found = self._inside(text) or [n for n in (self.alias(f"hook_{text}"),) if n in self.names]
        numbered = None if found else re.fullmatch(r"([a-z]+)(\d+)([a-z]\w*)?", text)
        if numbered:  # "k6", "pattern0", "scale4ln1"
            return self._short(numbered[1], int(numbered[2]), numbered[3])
        return found or [name for name in self.unlisted if in_block(name)[1] == text], False

    def _short(self, short: str, layer: Any, kind: str | None = None) -> tuple[list[str], bool]:
        if layer is None:
            return self._text(short) if kind is None else (self._inside(short, None, kind), False)
        n, layer = self.n_layers, as_layer(layer)
        if not -n <= layer < n:
            found = f"the model has {n} blocks" if self.whole else f"the last block here is {n - 1}"
            raise UnknownHookError(
                f"layer {layer} was asked for at {short!r}, but {found}: allowed are {-n} to {n - 1}"
            )
        full = full_name(short, layer % n, kind)
        name = self.alias(full)
        if name in self.names:
            return [name], True
        return self._inside(short, layer % n, kind) or [full] * self.beyond(full), True

    def _inside(self, short: str, layer: int | None = None, kind: str | None = None) -> list[str]:
        """Names of one kind of point in every block, or in one."""
        short = _SHORT.get(short, short)
        tail = short if short.startswith("hook_") or "." in short else f"hook_{short}"
        kind = _LAYER_TYPES.get(kind, kind) if kind else None
        usual = kind or _PARTS.get(short, "")
        parts: dict[str, set[str]] = {}
        for name, full in [*((n, n) for n in self.names), *self.aliases.items()]:
            block, inner = in_block(name)
            part, _, last = inner.rpartition(".")
            if block is None or layer not in (None, block) or tail not in (last, inner):
                continue
            if full in self.names:
                parts.setdefault(usual if inner == tail and "." in tail else part, set()).add(full)
        if usual not in parts and kind is None and len(parts) > 1 and "" not in parts:
            part = sorted(parts)[0]
            raise UnknownHookError(
                f"{short!r} fits points of {listed(sorted(parts))}. Give the layer type too: ({short!r}, "
                f"{layer}, {part!r}) or 'blocks.{'*' if layer is None else layer}.{part}.{tail}'"
            )
        found = parts.get(usual) or (parts.get("") or next(iter(parts.values()), set()) if kind is None else set())
        return [name for name in self.names if name in found]

    def glob(self, pattern: str) -> list[str]:
        """Names that a glob fits, in order; none where it fits nothing."""
        found = {*fnmatch.filter(self.names, pattern)}
        found.update(self.aliases[other] for other in fnmatch.filter(self.aliases, pattern))
        return [name for name in self.names if name in found] or fnmatch.filter(self.unlisted, pattern)

    def beyond(self, name: str) -> bool:
        """Whether a name that isn't listed can be hooked all the same; never in a plain table."""
        return False

    def unknown(self, asked: Names) -> UnknownHookError:
        """The error for what fits nothing, with the nearest names."""
        if callable(asked):
            return UnknownHookError("the predicate accepts none of these hook points")
        beyond = self.whole and (in_block(asked_name(asked))[0] or 0) >= self.n_layers
        why = f": the model has {self.n_layers} blocks" if beyond else ""
        return UnknownHookError(f"hook point {asked!r} not found{why}. Nearest: {listed(self.near(asked))}")

    def near(self, asked: Names) -> list[str]:
        """Up to three full names most like what was asked for, or shorthands where one was asked for."""
        full = asked_name(asked)
        others = (a for a, name in self.aliases.items() if name in self.names and not _BY_MODULE.fullmatch(a))
        known = [*self.names, *others]
        if isinstance(asked, str) and not any(char in asked for char in "*?[."):
            short = sorted({n.rsplit(".", 1)[-1].removeprefix("hook_") for n in self.names})
            if self.alias("blocks.0.hook_resid_pre") in self.names:
                short.insert(0, LAYER_AXIS)
            return nearest(asked, short) or nearest(full, known) or short[:5]
        block, _ = in_block(full)
        inside = [name for name in known if block is not None and in_block(name)[0] == block]
        return nearest(full, inside) or nearest(full, known)


def full_name(short: str, layer: int, kind: str | None = None) -> str:
    """The full name that TransformerLens' ``get_act_name`` gives a shorthand, whether a model has it or not.

    Examples:
        >>> full_name("q", 2), full_name("out", 0, "mixer")
        ('blocks.2.attn.hook_q', 'blocks.0.mixer.hook_out')
    """
    short = _SHORT.get(short, short)
    part = (_LAYER_TYPES.get(kind, kind) if kind else None) or _PARTS.get(short)
    tail = short if short.startswith("hook_") or "." in short else f"hook_{short}"
    return f"blocks.{layer}.{part + '.' if part else ''}{tail}"


def asked_name(asked: Any) -> str:
    """The full name that was most likely meant, of block 0 where none is given, to say why a model doesn't have it.

    Examples:
        >>> asked_name("resid_mid"), asked_name(("q", 2)), asked_name("blocks.*.hook_resid_mid")
        ('blocks.0.hook_resid_mid', 'blocks.2.attn.hook_q', 'blocks.0.hook_resid_mid')
    """
    if _is_short(asked):
        return full_name(asked[0], int(asked[1]) if isinstance(asked[1], (int, np.integer)) else 0, *asked[2:])
    text = asked.name if isinstance(asked, HookPoint) else str(asked)
    text = text.replace("*", "0")
    return text if "." in text else full_name(text, 0)


def of_gradient(asked: Names) -> Names:
    """What a gradient's name is the gradient of; None where it names no gradient.

    Examples:
        >>> of_gradient("blocks.0.hook_out_grad"), of_gradient(("q_grad", 2)), of_gradient("q")
        ('blocks.0.hook_out', ('q', 2), None)
    """
    if isinstance(asked, str):
        return asked.removesuffix(GRAD) if asked.endswith(GRAD) else None
    if _is_short(asked) and asked[0].endswith(GRAD):  # type: ignore[index]
        return (asked[0].removesuffix(GRAD), *asked[1:])  # type: ignore[index]
    return None


def _is_short(asked: Any) -> bool:
    """Whether this is ``(name, layer)`` or ``(name, layer, part)``, not a tuple of names."""
    return (
        isinstance(asked, tuple)
        and len(asked) in (2, 3)
        and isinstance(asked[0], str)
        # A tensor () can be iterated over as far as its class says.
        and (not isinstance(asked[1], (HookPoint, Iterable)) or getattr(asked[1], "ndim", None) == 0)
        and not callable(asked[1])
        and (len(asked) == 2 or asked[2] is None or isinstance(asked[2], str))
    )


def as_layer(layer: Any, what: str = "the layer") -> int:
    """The number of a layer as a plain int; an UnknownHookError for anything else than an integer.

    Examples:
        >>> import numpy as np
        >>> as_layer(np.int64(-1))
        -1
    """
    try:
        # A flag and a tensor () can serve as an index too, but neither is meant as the number of a layer.
        if isinstance(layer, np.integer) or not (isinstance(layer, bool) or hasattr(layer, "ndim")):
            return operator.index(layer)
    except TypeError:
        pass
    raise UnknownHookError(f"{what} is an integer, got {layer!r}")


def listed(names: Iterable[str]) -> str:
    """Names in a row, for an error."""
    return ", ".join(repr(name) for name in names) or "none"

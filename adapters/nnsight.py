"""nnsight: local models run through our own hooks on the module inside, remote ones through nnsight's trace.

There is one engine for everything that runs here. ``remote=`` (NDIF) is another machine, where no hook of
ours exists: there each run is one trace that reads and writes modules' inputs and outputs.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from probelens.errors import AdapterNotFoundError, InputError, ShapeError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, StopForward
from probelens.hooks.passes.entry import Entry
from probelens.hooks.points import HookPoint, Site
from probelens.hooks.switchboard import Switchboard
from probelens.hooks.wrapping import find_adapter

__all__ = ["NNsight"]

# An envoy, where at its module, what hooks are told, and the functions by number (None reads).
_Visit = tuple[Any, Site, SimpleNamespace, list[tuple[int, Callable[..., Any] | None]]]


class NNsight(Adapter):
    """An ``nnsight.NNsight``, ``LanguageModel`` or ``TransformersModel``.

    Without ``remote`` the hooked model is the one over the module inside, with the adapter of its architecture;
    nnsight's traces go on working on it. True runs it on NDIF, "local" or a host as for ``model.trace(remote=)``.
    """

    name = "nnsight"
    priority = 80
    options = ("remote", "tokenizer", "blocks", "embed", "ln_final", "unembed")

    @classmethod
    def matches(cls, module: Any) -> bool:
        return any(c.__name__ == "Envoy" and c.__module__.startswith("nnsight.") for c in type(module).__mro__)

    @classmethod
    def adapt(cls, module: Any, remote: bool | str = False, **options: Any) -> Adapter:
        if not cls.matches(module):
            raise AdapterNotFoundError(f"adapter 'nnsight' wraps nnsight models, not a {type(module).__name__}")
        if any(envoy._edits for envoy in [module, *module.modules()]):
            raise InputError(
                "this nnsight model has default edits (model.edit), which only its own traces apply. "
                "Wrap the model without them, or make the same edits with model.add_hook"
            )
        if remote and not hasattr(module, "to_model_key"):
            raise InputError(
                f"remote={remote!r} needs a model that NDIF can find by name, such as "
                f"nnsight.LanguageModel('openai-community/gpt2'), got nnsight's {type(module).__name__}"
            )
        if not remote and getattr(module, "dispatched", True) is False:
            module.dispatch()
        inner = module._module
        known = find_adapter(inner, None, options)
        if "tokenizer" in known.options and "tokenizer" not in options:
            options["tokenizer"] = getattr(module, "tokenizer", None)
        adapter = known.adapt(inner, **options)
        return Remote(adapter, module, remote) if remote else adapter


class Remote(Adapter):
    """Runs a model elsewhere, through nnsight's trace; knows it through the adapter of its architecture."""

    name = "nnsight"
    differentiable = False
    has_weights = False
    tries_layout = False

    def __init__(self, known: Adapter, model: Any, remote: bool | str) -> None:
        super().__init__(known.module)
        self.known, self.model, self.remote = known, model, remote
        self.blocks, self.parts, self.segments = known.blocks, known.parts, known.segments
        self.cfg, self.tokenizer = known.cfg, known.tokenizer
        self._switchboard: Switchboard | None = None
        self._stop: int | None = None
        self._order = {point.name: i for i, point in enumerate(self.all_points)}

    def points(self) -> list[HookPoint]:
        return [p for p in self.known.all_points if p.site is not None and p.site.carry is None]

    def absent(self, name: str) -> str | None:
        if any(name == p.name or name in p.aliases for p in self.known.all_points):
            return "on a remote model only inputs and outputs of modules can be hooked, not what is inside of one"
        return self.known.absent(name)

    def device(self) -> torch.device:
        # The module here may be a skeleton without weights: inputs are made on the CPU and sent.
        return torch.device("cpu")

    def call(self, tokens: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        return self.known.call(tokens, mask, extra)

    def output(self, raw: Any) -> Tensor:
        return self.known.output(raw)

    def loss(self, logits: Tensor, call: Call, *args: Any, **kw: Any) -> Tensor:
        return self.known.loss(logits, call, *args, **kw)

    def can_skip(self) -> bool:
        return False

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        raise InputError(f"start_at_layer={layer}: a remote model can't start at a block")
        yield

    @contextlib.contextmanager
    def stopping_at(self, layer: int) -> Iterator[None]:
        self._stop = layer
        try:
            yield
        finally:
            self._stop = None

    def attach(self, switchboard: Switchboard, point: HookPoint) -> Sequence[Any]:
        if point.name not in self._order:
            raise InputError(
                f"hook point {point.name!r} can't be hooked on a remote model. Allowed: model.hook_points()"
            )
        self._switchboard = switchboard
        return ()

    def run(self, call: Call) -> Any:
        stop, switchboard = None, self._switchboard
        entries = [] if switchboard is None else [e for n in switchboard.entries for e in switchboard.listeners(n)]
        if any(e.dir == "bwd" for e in entries):
            raise InputError("a remote model has no backward hooks: no gradient comes back")
        entries.sort(key=lambda e: self._order[e.point.name])
        if self._stop is not None:
            path = self.blocks[self._stop] if self._stop < len(self.blocks) else self.known.after_blocks()
            stop = self.model.get(path)
            entries = [e for e in entries if self._before(e.point, self._stop)]
        visits = [
            self._visit(name, list(group))
            for name, group in itertools.groupby(enumerate(entries), lambda pair: pair[1].point.name)
        ]
        try:
            with _by_value():
                kept, refused, out = _trace(self.model, self.remote, visits, stop, call)
        except Exception as err:
            if not (isinstance(err, TypeError) and "pickle" in str(err)) and type(err).__name__ != "PicklingError":
                raise
            raise InputError(
                f"a hook can't be sent to where the model runs: {err}. What a hook uses travels with it: tensors, "
                "functions and edits (edit = pl.edits.zero()) can, the module 'pl' itself, files and locks can't."
            ) from err
        for number, found in refused.items():
            raise ShapeError(
                f"hook at {entries[number].point.name!r} returned {found}. "
                "Return a tensor of the point's own shape, or None to leave it unchanged."
            )
        for number, entry in enumerate(entries):
            entry.fired += 1
            if entry.reads:
                entry.fn(kept[number], hook=entry.point)
        if self._stop is not None:
            raise StopForward(out)
        return out

    def _before(self, point: HookPoint, layer: int) -> bool:
        return point.name == "hook_embed" if point.block is None else point.block < layer

    def _visit(self, name: str, entries: list[tuple[int, Entry]]) -> _Visit:
        point = entries[0][1].point
        layer = point.block
        # What a hook is told travels with it, so it is made of nothing that only exists here.
        hook = SimpleNamespace(
            name=name,
            axes=point.axes,
            pos=None,
            length=None,
            pos_axis=point.pos_axis,
            offset=0,
            real=None,
            ctx={},
            layer=lambda: layer,
        )
        fns = [(number, None if entry.reads else entry.fn) for number, entry in entries]
        assert point.site is not None
        return self.model.get(point.site.path), point.site, hook, fns


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    # probelens need not be installed over there: what a hook uses of it travels with the request.
    import cloudpickle

    probelens = sys.modules["probelens"]
    if probelens.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(probelens)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(probelens)


def _trace(
    model: Any, remote: bool | str, visits: list[_Visit], stop: Any, call: Call
) -> tuple[dict[int, Tensor], dict[int, str], Any]:
    """One trace: what the readers keep, the hooks whose return value can't be used, and the output.

    The body runs on the other machine, where probelens need not be installed: it uses torch, nnsight and this function
    alone.
    """
    import nnsight

    def first(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        values = value.values() if hasattr(value, "values") else value
        return next(v for v in values if isinstance(v, torch.Tensor))

    def replaced(value: Any, old: Any, new: Any) -> Any:
        if value is old:
            return new
        if hasattr(value, "items"):
            return type(value)(**{k: new if v is old else v for k, v in value.items()})
        return type(value)(new if v is old else v for v in value)

    places = [(envoy, site.side, site.index, site.heads, site.scale, hook, fns) for envoy, site, hook, fns in visits]
    kwargs = dict(call.kwargs)
    kept: dict[int, Tensor] = {}
    refused: dict[int, str] = {}
    result: Any = None
    with model.trace(*call.args, remote=remote, **kwargs) as tracer:
        kept = nnsight.save({})
        refused = nnsight.save({})
        for envoy, side, index, heads, scale, hook, fns in places:
            if side == "in":
                args, named = envoy.inputs
                whole = args if args else named
            else:
                whole = envoy.output
            old = first(whole) if index is None or isinstance(whole, torch.Tensor) else whole[index]
            seen = (old if heads is None else old.unflatten(-1, (heads, -1))) * scale
            for number, fn in fns:
                if fn is None:
                    kept[number] = seen.detach().clone()
                    continue
                new = fn(seen, hook=hook)
                if new is not None and (not isinstance(new, torch.Tensor) or new.shape != seen.shape):
                    refused[number] = str(tuple(new.shape)) if isinstance(new, torch.Tensor) else type(new).__name__
                elif new is not None:
                    seen = new.to(device=seen.device, dtype=seen.dtype)
            if any(fn is not None for number, fn in fns):
                back = replaced(whole, old, (seen if heads is None else seen.flatten(-2)) / scale)
                if side == "out":
                    envoy.output = back
                elif args:
                    envoy.inputs = (back, named)
                else:
                    envoy.inputs = (args, back)
        if stop is not None:
            args, named = stop.inputs
            result = nnsight.save(first(args if args else named).detach())
            tracer.stop()
        output = tracer.result
        result = nnsight.save(output.logits if hasattr(output, "logits") else first(output))
    return kept, refused, result

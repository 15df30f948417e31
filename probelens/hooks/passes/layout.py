"""Layout: where examples and positions are in the tensor at a hook point, and how often one forward reaches it.

Nothing in a module says whether it is called with (batch, pos, …), (pos, batch, …) or (batch · pos, …), nor whether the
model calls it once. So it is tried: on two examples, on the same two behind a third one, and on shorter sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from probelens.errors import HookNotFiredError, InputError, ShapeError
from probelens.hooks.config import Call, first_argument, pick
from probelens.hooks.forwards import submodule, this_thread
from probelens.hooks.inputs import skipped_embeddings
from probelens.hooks.passes.turned import Layout
from probelens.hooks.points import HookPoint, Site
from probelens.hooks.protocol import Wrapped
from probelens.hooks.shorthand import Names
from probelens.hooks.trials import Untried, agree, random_tokens, recall, remember, run_alone

__all__ = ["each_call", "find_layouts", "settle"]

Seen = dict[tuple[str, str, Any], list[Tensor]]
"""The tensors that each site was called with, in order, of one run."""


def settle(model: Wrapped, call: Call | None, parts: bool = False) -> None:
    """Find the layout of every point with a hook in place where the adapter doesn't know it, before the model runs.

    Args:
        model: The wrapped model.
        call: What it is about to run on; None to try random tokens alone.
        parts: Whether only some blocks are about to run, so that the layout of the residual stream counts too.

    Raises:
        InputError: A hook at a point that one forward reaches several times, which must be named by its call.
    """
    board = model.switchboard
    entries = [entry for each in list(board.entries.values()) for entry in each if entry.here()]
    points = {entry.point.name: entry.point for entry in entries if is_unsure(model, entry.point)}
    entering = model.points.named.get("blocks.0.hook_resid_pre")
    if parts and entering is not None and is_unsure(model, entering):
        points.setdefault(entering.name, entering)
    if not points or board.listeners_muted():
        return
    found = find_layouts(model, list(points.values()), call)
    board.layouts.update(found)
    if entering is not None and model.adapter.layout == "unknown" and entering.name in found:
        model.adapter.resid_axis = found[entering.name].batch_axis
    for entry in entries:
        layout = found.get(entry.point.name)
        if layout is not None:
            require_one_call(entry.point, layout)
            layout.name_axes(entry.point)


def each_call(
    model: Wrapped, names: Names, start: int | None, stop: int | None, given: tuple[Any, dict[str, Any]]
) -> list[HookPoint]:
    """The points that names mean, with ``name#0`` to ``name#k`` for one that a pattern found and a forward reaches often.

    Args:
        model: The wrapped model.
        names: What is asked for; whoever writes a full name says which call.
        start, stop: The blocks that run. A run from the middle gets a residual, on which nothing can be tried.
        given: The inputs, and the keywords they are called with.
    """
    if isinstance(names, Iterator):
        names = list(names)
    parts = names if isinstance(names, list) else [names]
    points = model.points.reached(names, start, stop)
    looked = [model.points.lookup(part) for part in parts]
    named = {name for found, explicit in looked if explicit for name in found}
    without = skipped_embeddings(model, *given) - named if start is None else set()
    points = [point for point in points if point.name not in without]
    unsure = [p for p in points if p.name not in named and p.kind == "boundary" and is_unsure(model, p)]
    if not unsure or start is not None:
        return points
    inputs, kw = given
    rest = {name: value for name, value in kw.items() if name not in ("attention_mask", "loss_per_token")}
    layouts = find_layouts(model, unsure, model.prepare(inputs, kw.get("attention_mask"), None, rest))
    often = {name: one.calls for name, one in layouts.items() if one.calls > 1 and one.same_each_time and not one.steps}
    found = []
    for point in points:
        calls = [f"{point.name}#{i}" for i in range(often.get(point.name, 0))]
        found += [model.points.match(name)[0][0] for name in calls] or [point]
    return found


def settle_before(model: Callable[[], Wrapped | None]) -> Callable[[Any, Any], None]:
    """What looks for layouts before a forward that didn't come through the wrapped model, as in ``generate``."""

    def before(args: Any, kwargs: Any) -> None:
        if (wrapped := model()) is not None:
            settle(wrapped, Call(args, dict(kwargs)))

    return before


def require_one_call(point: HookPoint, layout: Layout) -> None:
    """Refuse a bare name of a point that one forward reaches several times, and a call that never comes."""
    name, _, _ = point.name.partition("#")
    if layout.calls == 0 or (point.call is None and (layout.calls == 1 or layout.steps)):
        return
    several = f"{name!r} is reached {layout.calls} times in one forward of this model"
    if not layout.same_each_time:
        several += " for one input, and another number of times for another"
    if point.call is None:
        raise InputError(
            f"{several}. Say which call you mean: {name + '#0'!r} to {f'{name}#{layout.calls - 1}'!r}, or all of them in a list"
        )
    if layout.steps:
        raise InputError(f"{several}, once for each position. Name {name!r}, whose positions they are")
    if point.call >= layout.calls and layout.same_each_time:
        raise HookNotFiredError(f"{several}: {point.name!r} never comes")


def is_unsure(model: Wrapped, point: HookPoint) -> bool:
    """Whether the layout or the number of calls of a point must be tried."""
    adapter = model.adapter
    if not adapter.tries_layout:
        return False
    if point.name not in model.points.named:
        return point.site is not None
    return adapter.layout != "known"


def find_layouts(model: Wrapped, points: Sequence[HookPoint], call: Call | None) -> dict[str, Layout]:
    """The layouts of points by name, tried once for each state of the model.

    Args:
        model: The wrapped model.
        points: Boundary points, or points inside a module's forward, of which only the calls of the module count.
        call: Inputs to try them on; None, and for inputs that can't be split into examples, random tokens.

    Returns:
        The layouts. Where nothing could be tried they say why.
    """
    known: dict[str, Layout] = recall(model, model.module, "layouts") or {}
    missing = [point for point in points if point.name not in known]
    if missing:
        try:
            new = _tried(model, missing, call)
        except Untried as err:
            # Not remembered: other inputs may run.
            return known | {
                p.name: _stated(model, p, Layout(None, why=f"it could not be tried: {err}")) for p in missing
            }
        known = known | new
        remember(model, model.module, "layouts", known)
    return {point.name: known[point.name] for point in points}


def _tried(model: Wrapped, points: Sequence[HookPoint], call: Call | None) -> dict[str, Layout]:
    sites = {point.name: point.site or Site(point.module, "out") for point in points}
    why = "the inputs aren't tensors with one row for each example, and the size of the vocabulary is not known"
    for source in _sources(model, call):
        try:
            two, three = (_run(model, sites.values(), _rows(source, rows)) for rows in ([0, 1], [2, 0, 1]))
        except Untried as err:
            why = str(err)
            continue
        shorter: Seen | None = None
        cut = _shortened(_rows(source, [0, 1]))
        if cut is not None:
            try:
                shorter = _run(model, sites.values(), cut)
            except Untried:
                shorter = None
        repeats = None
        layouts = {}
        length = _length(source)
        for point in points:
            key = _key(sites[point.name])
            seen = two.get(key, []), three.get(key, []), None if shorter is None else shorter.get(key, [])
            found = _read(model, *seen, length, call=point.call)
            if found.axes is None and found.calls:
                if repeats is None:
                    again = _run(model, sites.values(), _rows(source, [0, 1]))
                    repeats = all(
                        len(again[k]) == len(v) and all(map(torch.equal, again[k], v))
                        for k, v in two.items()
                        if k in again
                    )
                if not repeats:
                    found = _read(model, *seen, length, values=False, call=point.call)
            layouts[point.name] = _stated(model, point, found)
        return layouts
    raise Untried(why)


def _stated(model: Wrapped, point: HookPoint, found: Layout) -> Layout:
    """What was found, beside what the adapter or the caller says."""
    stated = model.adapter.batch_first
    if model.adapter.layout == "calls" and point.name in model.points.named:
        return found.replace(axes=point.axes, batch_axis=0, flat="", declared=True)
    if stated is None or point.block is None or point.name not in model.points.named or found.calls == 0:
        return found
    axis = 0 if stated else 1
    if found.axes is None:
        return found.replace(axes=("batch", "pos"), batch_axis=axis, flat="")
    if "pos" in found.axes and not found.flat and found.varies and found.batch_axis != axis:
        raise InputError(
            f"batch_first={stated} was given, but the tensor at {point.name!r} has its examples on axis {found.batch_axis}. "
            f"Wrap it with batch_first={not stated}, or without it to have the layout found"
        )
    return found


# -- runs ---------------------------------------------------------------------------------------------------------


def _sources(model: Wrapped, call: Call | None) -> list[Call]:
    """Calls of three examples: the first ones of the caller's own, and random tokens."""
    found = []
    if call is not None and (batch := _batch(call)):
        found.append(_rows(call, [0, min(1, batch - 1), min(2, batch - 1)]))
    if model.adapter.cfg.d_vocab:
        found.append(model.prepare(random_tokens(model, 3)))
    return found


def _tensors(call: Call) -> list[Any]:
    return [*call.args, *call.kwargs.values()]


def _batch(call: Call) -> int | None:
    """How many examples a call has; None where it holds what can't be split into examples."""
    values = _tensors(call)
    if any(not isinstance(v, (Tensor, bool, int, float, str, type(None))) for v in values):
        return None
    return next((len(v) for v in values if isinstance(v, Tensor) and v.ndim), None)


def _length(call: Call) -> int | None:
    first = next(v for v in _tensors(call) if isinstance(v, Tensor) and v.ndim)
    return first.shape[1] if first.ndim in (2, 3) else None


def _each(call: Call, change: Any) -> Call:
    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) and value.ndim else value

    kwargs = {name: one(value) for name, value in call.kwargs.items()}
    return Call(tuple(map(one, call.args)), kwargs, one(call.tokens), one(call.mask))


def _rows(call: Call, rows: list[int]) -> Call:
    batch = _batch(call)
    return _each(call, lambda tensor: tensor[rows] if len(tensor) == batch else tensor)


def _shortened(call: Call) -> Call | None:
    """A call without its last position; None where sequences can't be told or are of one position."""
    length, batch = _length(call), _batch(call)
    if length is None or length < 2:
        return None
    return _each(call, lambda t: t[:, :-1] if t.shape[:2] == (batch, length) else t)


def _key(site: Site) -> tuple[str, str, Any]:
    return site.path, site.side, site.index


def _run(model: Wrapped, sites: Any, call: Call) -> Seen:
    """What each site is called with in a run without hooks."""
    seen: Seen = {}
    handles = []
    here = this_thread()

    def watch(site: Site) -> Any:
        def keep(value: Any) -> None:
            if isinstance(value, PackedSequence):
                value = pad_packed_sequence(value, batch_first=True)[0]
                seen.setdefault(_key(site), []).append(value.detach())
            else:
                seen.setdefault(_key(site), []).append(site.to_hook(value.detach()).clone())

        def before(module: Any, args: Any, kwargs: Any = None) -> None:
            if not here():
                return
            where = site.index if site.index is not None else first_argument(args, kwargs, site.path)
            keep(args[where] if isinstance(where, int) else kwargs[where])

        def after(module: Any, args: Any, output: Any) -> None:
            if here():
                keep(pick(output, site.index, site.path))

        module = submodule(model.module, site.path)
        if site.side == "in":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    try:
        for site in {_key(site): site for site in sites}.values():
            handles.append(watch(site))
        run_alone(model, call)
    except (ShapeError, IndexError, KeyError) as err:  # a site without a tensor
        raise Untried(str(err)) from err
    finally:
        for handle in handles:
            handle.remove()
    return seen


# -- what the runs say --------------------------------------------------------------------------------------------


def _read(
    model: Wrapped, two: list[Tensor], three: list[Tensor], shorter: list[Tensor] | None, length: int | None,
    values: bool = True, call: int | None = None,
) -> Layout:  # fmt: skip
    """The layout that a site's tensors of the runs show; without ``values`` only their shapes count."""
    calls = len(two)
    if not calls:
        return Layout(None, calls=0, why="the forward didn't reach it")
    if len(three) != calls:
        return Layout(
            None, calls=calls, same_each_time=False, why="it is reached another number of times for another input"
        )
    i = min(call or 0, calls - 1)
    found = _read_call(
        model, two[i], three[i], shorter[i] if shorter is not None and i < len(shorter) else None, values
    )
    if calls == 1:
        return found
    # One call for each position: a loop over the steps of a sequence.
    steps = calls == length and shorter is not None and len(shorter) == calls - 1 and _one_position(found, two[0])
    steps = steps and call is None
    return found.replace(calls=calls, steps=steps, axes=_step_axes(found) if steps else found.axes)


def _one_position(found: Layout, tensor: Tensor) -> bool:
    return found.axes is not None and found.batch_axis == 0 and (tensor.ndim == 2 or tensor.shape[1] == 1)


def _step_axes(found: Layout) -> tuple[str, ...]:
    rest = found.ndim - 2 if found.ndim > 2 else found.ndim - 1
    return ("batch", "pos", *(f"axis{i + 2}" for i in range(rest)))


def _read_call(model: Wrapped, two: Tensor, three: Tensor, shorter: Tensor | None, values: bool) -> Layout:
    def same(a: Tensor, b: Tensor) -> bool:
        return not values or agree(a.float(), b.float(), model.cfg.dtype) or (not a.any() and not b.any())

    unlike = "its values for two examples change when a third one runs with them, so examples can't be told apart"
    if not two.ndim or two.ndim != three.ndim:
        return Layout(None, ndim=two.ndim, why="its tensor has another shape for another batch")
    moved = [i for i in range(two.ndim) if two.shape[i] != three.shape[i]]
    if not moved:
        pos = _pos_axis(two, shorter, 0)
        if two.shape[0] == 1:
            return Layout(_names(two.ndim, 0, pos), ndim=two.ndim, varies=False)
        return Layout(None, ndim=two.ndim, why="its tensor has no axis of examples")
    axis = moved[0]
    if len(moved) == 1 and (two.shape[axis], three.shape[axis]) == (2, 3):
        if not same(three.narrow(axis, 1, 2), two):
            return Layout(None, ndim=two.ndim, why=unlike)
        turned = None if shorter is None or shorter.ndim != two.ndim else shorter.movedim(axis, 0)
        return Layout(_names(two.ndim, 0, _pos_axis(two.movedim(axis, 0), turned, 0)), batch_axis=axis, ndim=two.ndim)
    each, left = divmod(two.shape[0], 2)
    if moved == [0] and not left and three.shape[0] == 3 * each and values:
        by_batch = same(three.unflatten(0, (3, each))[1:], two.unflatten(0, (2, each)))
        by_pos = same(three.unflatten(0, (each, 3))[:, 1:], two.unflatten(0, (each, 2)))
        if by_batch != by_pos:
            names = _names(two.ndim + 1, 0, 1)
            return Layout(names, flat="batch" if by_batch else "pos", ndim=two.ndim + 1)
    return Layout(
        None, ndim=two.ndim, why="examples and positions are mixed on one axis, in an order that can't be told"
    )


def _pos_axis(tensor: Tensor, shorter: Tensor | None, batch_axis: int) -> int | None:
    """The axis of positions: the one that is shorter for shorter sequences, by habit axis 1 of three where none can be tried."""
    if shorter is None or shorter.ndim != tensor.ndim:
        return 1 if tensor.ndim == 3 else None
    moved = [i for i in range(tensor.ndim) if tensor.shape[i] != shorter.shape[i] and i != batch_axis]
    return moved[0] if moved else None


def _names(ndim: int, batch: int, pos: int | None) -> tuple[str, ...]:
    return tuple("batch" if i == batch else "pos" if i == pos else f"axis{i}" for i in range(ndim))

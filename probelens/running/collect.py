"""``collect``: the activations of a whole dataset, in memory or streamed to disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.hooks.forwards import hooked_by_hand
from probelens.hooks.inputs import reads_both_ways
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.passes.at import last_real
from probelens.hooks.points import HookPoint, has_positions
from probelens.hooks.shorthand import Names
from probelens.hooks.trials import require_repeatable
from probelens.numerics.tensors import whole_number
from probelens.results.progress import progress_bar
from probelens.running.activations import Activations
from probelens.running.faster_forwards import faster_forwards
from probelens.running.inputs import inputs_of
from probelens.running.shapes import one_row_each, positions_at
from probelens.running.stream import Stream, need_storable
from probelens.running.weights import add_weights
from probelens.running.workers import Executor, spread, takes_executor
from probelens.tasks.examples import Examples

__all__ = ["collect"]


@takes_executor
def collect(
    model: HookedModel,
    batch: Any,
    sites: Names = "resid_post",
    pos: Any = None,
    out: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 64,
    dtype: torch.dtype | None = None,
    attention_mask: Tensor | None = None,
    progress: bool = False,
    executor: Executor = None,
) -> Activations:
    """Run a dataset through the model and keep activations.

    Args:
        model: The wrapped model; run in eval mode, without gradients.
        batch: A ``Batch``, tokens (example, pos), features or pictures (example, ...), strings, a mapping of the
            forward's own arguments, each (example, ...), or rows of a Hugging Face dataset, of which the columns that the
            forward takes are used (but not ``labels``).
        sites: A shorthand, which means every layer, "layers" for the whole layer axis, names,
            globs, or a list.
        pos: Positions to keep, counted on the activations' own axis: None for all, an int, slice or list for all
            examples; "last" for the last real one of each, or a tensor with one for each (example,). One position keeps an
            axis of length 1.
        out: A folder to stream to. What is there already is kept, and an interrupted run of the same data continues
            where it stopped. The result is memory-mapped: editing it changes memory only. Files found there are
            read once and compared with the checksums of what was written (about 0.3 s for 200 MB). A second
            process on the same folder waits for the first, and then reads. Every weight and buffer is read at each
            call, to recognise the model (0.2 s for 100 million float32 weights, on one core).
        batch_size: Sequences in one forward pass.
        dtype: Dtype to keep; None for the model's own (float16 halves what a stream writes).
        attention_mask: 1 for real tokens. (example, pos)
        progress: Show a progress bar.
        executor: Where batches run: None for this process, or ``pl.Workers``, "local", "dask", "submitit".

    Returns:
        Activations on the CPU: (example, pos, ...) by site.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        ShapeError: A position that isn't there, or arguments of different numbers of examples.
        InputError: An argument that the forward doesn't take, no examples, no positions, a batch size below 1, a dtype that isn't a floating one or, with
            ``out``, one that files don't have (bfloat16), an empty ``out``, or ``out`` while the model has hooks.
        StoreError: ``out`` holds activations of other data or another model, weight by weight, or some that were
            changed, or can't be written.
    """
    need_wrapped(model)
    examples, mask, attention = inputs_of(model, batch, attention_mask)
    points = resolve(model, sites)
    names = [point.name for point in points]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(
            f"activations are kept in a floating dtype such as torch.float16, got dtype={dtype!r}. None keeps the model's"
        )
    whole_number("batch_size", batch_size)
    n, length = len(examples), examples.length
    if n == 0 or length == 0:
        raise InputError(f"collect needs sequences with tokens, got {n} sequences of {length}")
    lengths = sorted(set(positions_at(model, examples, names, attention).values()))
    if pos is not None and len(lengths) > 1:
        raise InputError(
            f"pos={pos!r}: the sites have different numbers of positions, {lengths}. Collect them one by one, or pos=None."
        )
    kept = _positions(pos, lengths[0], n, mask) if len(lengths) == 1 else None
    if isinstance(pos, int) and attention is not None and kept is not None and not bool(attention[:, kept].all()):
        raise InputError(
            f"pos={pos} is padding in {int((attention[:, kept] == 0).sum())} of {n} sequences. Give pos='last' for the last "
            "real position of each, or pad on the other side."
        )
    each = kept is not None and kept.ndim == 2
    # Positions of plain tokens are the same in every batch.
    sliced = pos is not None and not each and examples.plain
    require_repeatable(model, examples.rows(slice(2)))
    stop = stops_at(model, names)
    store: _Memory | Stream
    if out is None:
        store = _Memory(n)
    else:
        folder = _folder(out)
        _need_unhooked(model)
        store = Stream(folder, n, _key(model, examples, names, kept, dtype, attention))
        if not store.files:
            need_storable(dtype or model.cfg.dtype)
    chunks = torch.arange(n).split(batch_size)
    # Positions that the model gave nothing at: a batch of packed sequences has those of its longest.
    given, short = torch.ones(n, lengths[0] if len(lengths) == 1 else 0, dtype=torch.bool), False
    reading = _Reading(examples, names, attention, dtype, stop, kept.tolist() if sliced and kept is not None else None)
    with store.writing(), progress_bar(n, "sequences", progress) as bar, contextlib.ExitStack() as stack:
        # Only now: another process may have written some meanwhile.
        todo = [rows for rows in chunks if int(rows[-1]) >= store.done]
        bar.update(n - sum(map(len, todo)))
        for rows, found in zip(todo, stack.enter_context(spread(model, reading, todo)), strict=True):
            if not examples.plain and lengths:
                short |= _lengthened(found, points, lengths[0] if len(lengths) == 1 else 0, given, rows)
            if each and kept is not None:
                found = {p.name: _at_each(found[p.name], kept[rows], p) for p in points}
            elif pos is not None and kept is not None and not sliced:
                found = {p.name: _at_all(found[p.name], kept, p) for p in points}
            store.put(int(rows[0]), found)
            bar.update(len(rows))
    tokens = examples.tokens
    if tokens is not None and lengths and lengths != [tokens.shape[1]]:
        tokens = None  # the activations have other positions, as where two streams are joined
    if short:
        mask = given if mask is None or mask.shape != given.shape else mask.cpu() & given
    seen = _kept_mask(mask, kept, lengths)
    return Activations(
        store.tensors(),
        {point.name: point.depth for point in points},
        kept,
        seen,
        None if tokens is None else tokens.cpu(),
        model.cfg.model_name,
        {other: name for other, name in {**model.points.paths, **model.points.aliases}.items() if name in names},
        _copies(model, examples, kept, seen),
    )


@dataclass(frozen=True, eq=False)
class _Reading:
    """What is read of each batch: of these examples, at these points, until before block ``stop``."""

    examples: Examples
    names: list[str]
    attention: Tensor | None
    dtype: torch.dtype | None
    stop: int | None
    pos: list[int] | None

    @contextlib.contextmanager
    def inside(self, model: HookedModel) -> Iterator[None]:
        with torch.no_grad(), model.undisturbed(), faster_forwards(model, self.names):
            yield

    def __call__(self, model: HookedModel, rows: Tensor) -> dict[str, Tensor]:
        _, cache = model.run_with_cache(
            self.examples.rows(rows),
            self.names,
            pos_slice=self.pos,
            device="cpu",
            dtype=self.dtype,
            return_type=None,
            stop_at_layer=self.stop,
            attention_mask=None if self.attention is None else self.attention[rows],
        )
        return {name: one_row_each(model.point(name), cache[name], len(rows)) for name in self.names}


def stops_at(model: HookedModel, names: list[str]) -> int | None:
    """The block, below ``n_layers``, before which a run that only collects can stop; None for a whole forward."""
    blocks = [model.point(name).block for name in names]
    if None in blocks or not model.can_skip():
        return None
    last = max((block + 1 for block in blocks if block is not None), default=0)
    return last if last < model.cfg.n_layers else None


def _folder(out: Any) -> Path:
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise InputError(
            f"out must name a folder to stream to, got {out!r}. Give '.' for the current one, None to keep "
            "activations in memory"
        )
    return Path(out)


def _positions(pos: Any, length: int, n: int, mask: Tensor | None) -> Tensor:
    """The positions kept: those of all examples (pos,), or one of each (example, 1)."""
    if pos is None:
        return torch.arange(length)
    if isinstance(pos, str):
        if pos != "last":
            raise InputError(
                f"pos={pos!r} is not known. Allowed: None, 'last', an int, a slice, a list, a tensor (example,)"
            )
        real = mask if mask is not None and mask.shape == (n, length) else None
        return last_real(length, real).expand(n)[:, None]
    each = isinstance(pos, Tensor) and pos.ndim == 1
    if isinstance(pos, tuple):
        pos = slice(*pos)
    wanted = torch.arange(length)[pos] if isinstance(pos, slice) else torch.as_tensor(pos).reshape(-1).long().cpu()
    if each and len(wanted) != n:
        raise ShapeError(f"pos has {len(wanted)} positions for {n} examples; a list means all examples")
    if not wanted.numel():
        raise InputError(f"pos={pos!r} keeps none of {length} positions. None keeps all")
    bad = wanted[(wanted < -length) | (wanted >= length)]
    if len(bad):
        raise ShapeError(
            f"position {int(bad[0])} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
        )
    return (wanted % length)[:, None] if each else wanted % length


def _at_each(tensor: Tensor, pos: Tensor, point: HookPoint) -> Tensor:
    """A tensor at one position of each example, (example, 1), on the point's axis of positions, which stays."""
    if not has_positions(point):
        return tensor
    axis = point.pos_axis
    index = pos.reshape(len(pos), *[1] * (tensor.ndim - 1)).expand(
        *[1 if i == axis else k for i, k in enumerate(tensor.shape)]
    )
    return tensor.gather(axis, index)


def _at_all(tensor: Tensor, pos: Tensor, point: HookPoint) -> Tensor:
    """A tensor at the same positions of all examples, on the point's axis of positions."""
    return tensor.index_select(point.pos_axis, pos) if has_positions(point) else tensor


def _lengthened(
    found: dict[str, Tensor], points: Iterable[HookPoint], length: int, given: Tensor, rows: Tensor
) -> bool:
    """Fill up with zeros what has fewer positions than others, and write where that is; whether anything has."""
    short = False
    for point in points:
        tensor, axis = found[point.name], point.pos_axis
        if not has_positions(point) or not length or tensor.ndim <= axis or tensor.shape[axis] >= length:
            continue
        short = True
        given[rows, tensor.shape[axis] :] = False
        more = tensor.new_zeros([length - tensor.shape[axis] if i == axis else k for i, k in enumerate(tensor.shape)])
        found[point.name] = torch.cat([tensor, more], axis)
    return short


def _kept_mask(mask: Tensor | None, kept: Tensor | None, lengths: list[int]) -> Tensor | None:
    """The mask at the positions kept; None where it is of other positions than the sites'."""
    if mask is None or kept is None or mask.ndim != 2 or mask.shape[1] != lengths[0]:
        return None
    mask = mask.cpu()
    return mask.gather(1, kept) if kept.ndim == 2 else mask[:, kept]


def _copies(model: HookedModel, examples: Examples, kept: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """Numbers of equal inputs; None where a causal model makes the tokens up to the last position kept say that."""
    if not examples.plain or kept is None:
        return examples.copies()
    tokens = examples.main
    last = (kept if kept.ndim == 2 else kept.expand(len(tokens), -1)).amax(1)
    if seen is not None:
        last = (kept if kept.ndim == 2 else kept.expand(len(tokens), -1)).masked_fill(~seen, -1).amax(1)
    read = tokens.cpu().masked_fill(torch.arange(tokens.shape[1]) > last[:, None], -1)
    whole = examples.copies()
    # The model is tried only where the two tell examples apart differently.
    same = int(whole.max()) + 1 == len(read.unique(dim=0))
    return None if same or not reads_both_ways(model, tokens) else whole


class _Memory:
    """Activations gathered in memory."""

    done = 0

    def __init__(self, n: int) -> None:
        self.n = n
        self.held: dict[str, Tensor] = {}

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def put(self, start: int, found: Mapping[str, Tensor]) -> None:
        for name, tensor in found.items():
            if name not in self.held:
                self.held[name] = torch.empty(self.n, *tensor.shape[1:], dtype=tensor.dtype)
            self.held[name][start : start + len(tensor)] = tensor

    def tensors(self) -> dict[str, Tensor]:
        return self.held


def _key(
    model: HookedModel,
    examples: Examples,
    names: list[str],
    kept: Tensor | None,
    dtype: torch.dtype | None,
    attention: Tensor | None,
) -> str:
    digest = hashlib.sha256()
    at = None if kept is None else kept.tolist()
    digest.update(json.dumps([model.cfg.model_name, names, str(dtype), list(examples.main.shape), at]).encode())
    for name, tensor in (
        {"": examples.main}.items() if isinstance(examples.inputs, Tensor) else examples.batched.items()
    ):
        digest.update(name.encode())
        content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(content)
    if attention is not None:
        digest.update(attention.bool().cpu().contiguous().numpy().tobytes())
    add_weights(digest, model)
    return digest.hexdigest()


def _need_unhooked(model: HookedModel) -> None:
    """Refuse to stream what hooks change: a folder's record can't tell one hook from another."""
    path = hooked_by_hand(model.module)
    if model.has_hooks():
        where = "the model has hooks of add_hook() or hooks()"
    elif path is not None:
        where = f"{path or type(model.module).__name__} has a PyTorch hook"
    else:
        return
    raise InputError(
        f"out= keeps activations of the model without hooks, but {where}: a later call without them, or with others, "
        "would read these activations. Remove the hooks (model.reset_hooks(), handle.remove()), or collect without "
        "out= and save() the result"
    )

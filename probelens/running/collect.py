"""``collect``: the activations of a whole dataset, in memory or streamed to disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, StoreError, UnknownHookError
from probelens.hooks.cache import Slice
from probelens.hooks.forwards import hooked_by_hand, stored
from probelens.hooks.inputs import mask_for_model, tokens_of
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.shorthand import Names, NameTable
from probelens.numerics.tensors import whole_number
from probelens.results.progress import progress_bar
from probelens.results.result import Result
from probelens.running.faster_forwards import faster_forwards
from probelens.running.stream import RECORD, Stream, need_storable

__all__ = ["Activations", "collect"]


@dataclass(frozen=True, eq=False)
class Activations(Result):
    """Activations of many sequences at several sites.

    Args:
        tensors: Site name to activations. (example, pos, ...)
        layers: Site name to its place on the layer axis; −1 is the embedding.
        pos: The positions kept, counted from the start. (pos,)
        mask: True where a position counts. (example, pos)
        tokens: The tokens they belong to, at all positions. (example, length)
        model: Name of the model.
        aliases: Other names of the sites.
    """

    tensors: dict[str, Tensor]
    layers: dict[str, int] = field(default_factory=dict)
    pos: Tensor | None = None
    mask: Tensor | None = None
    tokens: Tensor | None = None
    model: str = ""
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The sites, in the order in which ``resolve`` gives them: several given as a list keep its order."""
        return list(self.tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values()))) if self.tensors else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: Names) -> Tensor:
        if isinstance(name, str) and name in self.tensors:
            return self.tensors[name]
        try:
            return self.tensors[NameTable(self.tensors, self.aliases).one(name)]
        except UnknownHookError as err:
            listed = ", ".join(map(repr, self.names[:5])) + ", …" * (len(self.names) > 5)
            raise UnknownHookError(f"{err}. Collected were: {listed}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read activations back that ``save`` wrote; those that ``collect`` streamed are read by ``collect``.

        Args:
            path: A file written by ``save``.

        Returns:
            Equal activations, on the CPU.

        Raises:
            StoreError: The file is missing, damaged or of another class, or a folder of a stream.
        """
        if (Path(path) / RECORD).is_file():
            raise StoreError(
                f"{str(path)!r} is a folder that collect streams to, not a file written by save(). Call "
                f"pl.collect with the same arguments and out={str(path)!r}: a finished stream is read, and nothing runs."
            )
        return super().load(path)

    def to_dataframe(self) -> Any:
        """One row a site: layer, shape, mean, standard deviation and norm of its activations."""
        import pandas as pd

        rows = []
        for name, tensor in self.tensors.items():
            values = tensor.float()
            if self.mask is not None and self.mask.shape == tensor.shape[:2]:
                values = values[self.mask]
            rows.append(
                {
                    "site": name, "layer": self.layers.get(name), "shape": "x".join(map(str, tensor.shape)),
                    "mean": values.mean().item(), "std": values.std().item(),
                    "norm": values.norm(dim=-1).mean().item(),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def plot(self) -> Any:
        """Mean norm of the activations by layer."""
        import plotly.express as px

        return px.line(self.to_dataframe(), x="layer", y="norm", markers=True, hover_name="site")


def collect(
    model: HookedModel,
    batch: Any,
    sites: Names = "resid_post",
    pos: Slice = None,
    out: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 64,
    dtype: torch.dtype | None = None,
    attention_mask: Tensor | None = None,
    progress: bool = False,
) -> Activations:
    """Run a dataset through the model and keep activations.

    Args:
        model: The wrapped model; run in eval mode, without gradients.
        batch: A ``Batch``, tokens (example, pos), strings, a mapping with ``input_ids`` (and
            ``attention_mask``), or rows of a Hugging Face dataset that have these columns.
        sites: A shorthand, which means every layer, "layers" for the whole layer axis, names,
            globs, or a list.
        pos: Positions to keep: None for all, int, slice, list. An int keeps an axis of length 1.
        out: A folder to stream to. What is there already is kept, and an interrupted run of the same data continues
            where it stopped. The result is memory-mapped: editing it changes memory only. Files found there are
            read once and compared with the checksums of what was written (about 0.3 s for 200 MB). A second
            process on the same folder waits for the first, and then reads. Every weight and buffer is read at each
            call, to recognise the model (0.2 s for 100 million float32 weights, on one core).
        batch_size: Sequences in one forward pass.
        dtype: Dtype to keep; None for the model's own (float16 halves what a stream writes).
        attention_mask: 1 for real tokens. (example, pos)
        progress: Show a progress bar.

    Returns:
        Activations on the CPU: (example, pos, ...) by site.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        InputError: No examples, no positions, a batch size below 1, a dtype that isn't a floating one or, with
            ``out``, one that files don't have (bfloat16), an empty ``out``, or ``out`` while the model has hooks.
        StoreError: ``out`` holds activations of other data or another model, weight by weight, or some that were
            changed, or can't be written.
    """
    need_wrapped(model)
    tokens, mask, attention = _inputs(model, batch, attention_mask)
    points = resolve(model, sites)
    names = [point.name for point in points]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(
            f"activations are kept in a floating dtype such as torch.float16, got dtype={dtype!r}. None keeps the model's"
        )
    whole_number("batch_size", batch_size)
    if len(tokens) == 0 or tokens.shape[1] == 0:
        raise InputError(f"collect needs sequences with tokens, got {len(tokens)} sequences of {tokens.shape[1]}")
    if isinstance(pos, int):
        pos = [pos]
    length = tokens.shape[1]
    kept = _positions(pos, length)
    stop = stops_at(model, names)
    store: _Memory | Stream
    if out is None:
        store = _Memory(len(tokens))
    else:
        folder = _folder(out)
        _need_unhooked(model)
        store = Stream(folder, len(tokens), _key(model, tokens, names, kept, dtype, attention))
        if not store.files:
            need_storable(dtype or model.cfg.dtype)
    chunks = torch.arange(len(tokens)).split(batch_size)
    with (
        torch.no_grad(),
        model.evaluating(),
        faster_forwards(model, names),
        store.writing(),
        progress_bar(len(tokens), "sequences", progress) as bar,
    ):
        for rows in chunks:
            if int(rows[-1]) < store.done:
                bar.update(len(rows))
                continue
            _, cache = model.run_with_cache(
                tokens[rows],
                names,
                pos_slice=pos,
                device="cpu",
                dtype=dtype,
                return_type=None,
                stop_at_layer=stop,
                attention_mask=None if attention is None else attention[rows],
            )
            store.put(int(rows[0]), {name: cache[name] for name in names})
            bar.update(len(rows))
    return Activations(
        store.tensors(),
        {point.name: point.depth for point in points},
        kept,
        None if mask is None else mask[:, kept],
        tokens.cpu() if not tokens.is_floating_point() else None,
        model.cfg.model_name,
        {other: name for other, name in {**model.points.paths, **model.points.aliases}.items() if name in names},
    )


def stops_at(model: HookedModel, names: list[str]) -> int | None:
    """The block, below ``n_layers``, before which a run that only collects can stop; None for a whole forward."""
    blocks = [model.point(name).block for name in names]
    if None in blocks or not model.can_skip():
        return None
    last = max((block + 1 for block in blocks if block is not None), default=0)
    return last if last < model.cfg.n_layers else None


def _inputs(model: HookedModel, batch: Any, attention: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    tokens = getattr(batch, "tokens", None)
    if isinstance(tokens, Tensor):
        given = getattr(batch, "attention_mask", None) if attention is None else attention
        return tokens, getattr(batch, "mask", None), mask_for_model(model, given, tokens)
    if isinstance(batch, str) or (
        isinstance(batch, (list, tuple)) and batch and all(isinstance(t, str) for t in batch)
    ):
        tokens, made = tokens_of(model.adapter, batch)
        attention = made if attention is None else attention
    elif isinstance(batch, Tensor):
        tokens = batch
    elif (columns := _columns(batch)) is not None:
        if "input_ids" not in columns:
            raise InputError(f"inputs need a column 'input_ids', found {sorted(columns)}. Tokenize the text first.")
        tokens, made = _padded(columns["input_ids"], columns.get("attention_mask"))
        attention = made if attention is None else attention
    else:
        try:
            tokens = torch.as_tensor(batch)
        except (TypeError, ValueError, RuntimeError) as err:
            raise InputError(
                f"can't collect from a {type(batch).__name__}. Give a Batch, tokens (example, pos), strings, "
                "or a mapping with input_ids"
            ) from err
    if tokens.ndim < 2:
        raise ShapeError(f"inputs must be (example, pos, ...), got shape {tuple(tokens.shape)}")
    if attention is not None:
        attention = torch.as_tensor(attention)
        if attention.shape != tokens.shape[:2]:
            raise ShapeError(
                f"attention_mask has shape {tuple(attention.shape)}, the tokens {tuple(tokens.shape[:2])}: they must agree"
            )
        return tokens, attention.bool().cpu(), mask_for_model(model, attention, tokens)
    return tokens, None, None


def _columns(batch: Any) -> Mapping[str, Any] | None:
    """A mapping, a dataset or a list of its rows as columns; None for anything else."""
    if isinstance(batch, Mapping):
        return batch
    if hasattr(batch, "column_names"):
        return {name: batch[name] for name in batch.column_names}
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(row, Mapping) for row in batch):
        return {name: [row[name] for row in batch] for name in batch[0] if all(name in row for row in batch)}
    return None


def _padded(ids: Any, attention: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(ids, Tensor):
        return ids, None if attention is None else torch.as_tensor(attention)
    rows = [list(row) for row in ids]
    width = max((len(r) for r in rows), default=0)
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    if attention is not None:
        return tokens, torch.tensor([list(m) + [0] * (width - len(m)) for m in attention])
    if all(len(r) == width for r in rows):
        return tokens, None
    return tokens, torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])


def _folder(out: Any) -> Path:
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise InputError(
            f"out must name a folder to stream to, got {out!r}. Give '.' for the current one, None to keep "
            "activations in memory"
        )
    return Path(out)


def _positions(pos: Slice, length: int) -> Tensor:
    if pos is None:
        return torch.arange(length)
    if isinstance(pos, tuple):
        pos = slice(*pos)
    wanted = torch.arange(length)[pos] if isinstance(pos, slice) else torch.as_tensor(pos)
    if not wanted.numel():
        raise InputError(f"pos={pos!r} keeps none of {length} positions. None keeps all")
    bad = wanted[(wanted < -length) | (wanted >= length)]
    if len(bad):
        raise ShapeError(
            f"position {int(bad[0])} asked for, but the sequences have {length}: allowed are {-length} to {length - 1}"
        )
    return wanted % length


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
    tokens: Tensor,
    names: list[str],
    kept: Tensor,
    dtype: torch.dtype | None,
    attention: Tensor | None,
) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([model.cfg.model_name, names, str(dtype), list(tokens.shape), kept.tolist()]).encode())
    digest.update(tokens.cpu().contiguous().numpy().tobytes())
    if attention is not None:
        digest.update(attention.bool().cpu().contiguous().numpy().tobytes())
    with model.evaluating():
        model.adapter.apply_lazy_rescaling()
    for name, kind in _state(model.module):
        value = stored(model.module, name)
        digest.update(f"{name} {kind}".encode())
        if value is not None:
            value = value.detach().cpu().contiguous()
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            numbers: Any = value.flatten().view(torch.uint8).numpy()
            digest.update(numbers)
    return digest.hexdigest()


def _state(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters and buffers: all that a run depends on, but for what the length of the last run leaves behind."""
    for name, _ in module.named_parameters():
        yield name, "parameter"
    for name, _ in module.named_buffers():
        owner = module.get_submodule(name.rpartition(".")[0])
        rope = str(getattr(owner, "rope_type", ""))
        if not ("dynamic" in rope or "longrope" in rope):
            yield name, "buffer"


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

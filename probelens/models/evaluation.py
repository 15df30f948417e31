"""Accuracy of a model by length, within and beyond the length that it was trained on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from probelens.errors import InputError, ShapeError
from probelens.models.config import labels_of
from probelens.numerics.shares import share_interval
from probelens.results.columns import Column, table
from probelens.results.rows import Rows
from probelens.results.sentences import between, count, hundredths, percent
from probelens.tasks.base import need_task

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.tasks.base import Task
    from probelens.tasks.data import Batch

__all__ = ["EvalResult", "evaluate"]

Backend = Literal["native", "reference"] | Callable[[], AbstractContextManager[Any]] | None


_SPAN = (
    'Positions counted, from 1, without a start token: "all", "trained" (up to the trained length), "beyond" (later '
    'ones), "late" (after the first 20, or as `late` says).'
)
_FIT = "Build the model with FormalConfig.for_task(arch, task)."


@dataclass(frozen=True)
class EvalResult(Rows):
    """Accuracy of a model on a task, one row per length, label and span of positions.

    Args:
        task: Name of the task.
        trained_length: Length the spans "trained" and "beyond" are divided at.
        rows: One per length, label and span; ``columns`` says what each holds.
    """

    columns = (
        Column("task", str, "Name of the task.", on="the table"),
        Column("label", str, "What the logits name."),
        Column("length", int, "Tokens in each sequence, a start token not counted.", "tokens"),
        Column("span", str, _SPAN),
        Column("accuracy", float, "Share of positions with the right class.", "fraction of 1"),
        Column("lo", float, "Lower end of its 95 % interval, over sequences.", "fraction of 1"),
        Column("hi", float, "Upper end of it.", "fraction of 1"),
        Column("balanced_accuracy", float, "Mean recall of the classes that occur.", "fraction of 1"),
        Column("n_positions", int, "Positions counted.", "positions"),
        Column("n_sequences", int, "Sequences that have any.", "sequences"),
    )

    task: str
    trained_length: int
    rows: list[dict[str, Any]]

    def accuracy(self, length: int, span: str = "all", label: str | None = None) -> float:
        """One accuracy.

        Args:
            length: A length that was evaluated.
            span: "all", "trained", "beyond" or "late".
            label: The label; the first one when None.

        Returns:
            Fraction of positions with the right class.

        Raises:
            InputError: There is no such row.
        """
        label = self.rows[0]["label"] if label is None and self.rows else label
        have = {(row["length"], row["span"], row["label"]): float(row["accuracy"]) for row in reversed(self.rows)}
        if (length, span, label) in have:
            return have[length, span, label]
        raise InputError(f"no accuracy for length {length}, span {span!r}, label {label!r}. There are: {sorted(have)}.")

    def to_dataframe(self) -> pd.DataFrame:
        """The rows, with the task's name."""
        return table([{"task": self.task, **row} for row in self.rows], self.columns)

    def findings(self) -> list[str]:
        """Accuracy at each length, at the positions of training and beyond them.

        Returns:
            Sentences, one per line.
        """
        n = max(row["n_sequences"] for row in self.rows)
        lines = [f"accuracy on {self.task}, {count(n, 'sequence')} of each length, trained at {self.trained_length}:"]
        where = {"trained": "up to the trained length", "beyond": "beyond it"}
        by_length: dict[tuple[str, int], list[str]] = {}
        for row in self.rows:
            if row["span"] in where:
                said = f"{percent(row['accuracy'])}{between(row['lo'], row['hi'], hundredths)} {where[row['span']]}"
                by_length.setdefault((row["label"], row["length"]), []).append(said)
        return [*lines, *(f"  {label}, length {n}: {', '.join(said)}" for (label, n), said in by_length.items())]

    def plot(self) -> go.Figure:
        """Accuracy against length, one line per span, one panel per label."""
        from probelens.results.plots import length_curve

        several = len({row["label"] for row in self.rows}) > 1
        facet, title = "label" if several else None, f"{self.task}: accuracy by length"
        return length_curve(self.rows, color="span", facet=facet, train_length=self.trained_length, title=title)


def evaluate(
    model: Any,
    task: Task,
    lengths: Sequence[int] = (40, 60, 80, 100, 120),
    *,
    n: int = 256,
    label: str | Sequence[str] | None = None,
    trained_length: int = 40,
    late: int = 20,
    batch_size: int = 64,
    seed: int = 0,
    backend: Backend = None,
) -> EvalResult:
    """Accuracy of a per-position classifier on fresh sequences of several lengths.

    The sequences come from another random stream than those of `probelens.training.train`, also at an equal seed.

    Args:
        model: A module that maps tokens (batch, pos) to logits (batch, pos, vocab), or to an object with `.logits`;
            or a HookedModel around one.
        task: Draws the sequences and their labels.
        lengths: Sequence lengths, BOS excluded.
        n: Sequences of each length.
        label: The label the logits stand for, the task's target when None; several when the model was trained on
            several.
        trained_length: The length of the training sequences.
        late: Positions after this one are reported as "late" too: short prefixes recur between training and
            evaluation, late positions do not.
        batch_size: Sequences per forward pass.
        seed: Fixes the sequences.
        backend: A context to run in, as in `train`.

    Returns:
        One row per length, label and non-empty span.

    Raises:
        InputError: An unknown label, no lengths, or a vocabulary too small for the task.
        ShapeError: The model's output is not (batch, pos, vocab).
    """
    module, context = unwrap(model, backend)
    need_task(task)
    if not lengths or min(lengths) < 1 or n < 1 or batch_size < 1:
        given = f"lengths={list(lengths)}, n={n}, batch_size={batch_size}"
        raise InputError(f"{given}: each must be at least 1, and there must be a length.")
    slices = label_slices(task, label)
    check_vocabulary(module, task, slices)
    rows: list[dict[str, Any]] = []
    training = module.training
    module.eval()
    try:
        with context(), torch.no_grad():
            for length in lengths:
                batch = task.sample(n, length=length, seed=derive_seed(seed, "evaluate", length))
                predicted = predict(module, batch.tokens, slices, batch_size)
                rows += _rows(batch, predicted, task, length, trained_length, late)
    finally:
        module.train(training)
    return EvalResult(task=task.name, trained_length=trained_length, rows=rows)


def label_slices(task: Task, label: str | Sequence[str] | None) -> dict[str, slice]:
    """The logits of each label, the task's target if None: all of them for one label, consecutive ranges for several."""
    names = labels_of(task, label)
    if not names or len(set(names)) != len(names):
        raise InputError(f"label must name one label or several different ones, not {label!r}.")
    if len(names) == 1:
        return {names[0]: slice(None)}
    ends = list(itertools.accumulate((task.n_classes[name] for name in names), initial=0))
    return {name: slice(*ends[i : i + 2]) for i, name in enumerate(names)}


def derive_seed(seed: int, stream: str, index: int) -> int:
    """A seed for one draw: different streams and indices never share sequences."""
    words = [seed, sum(ord(c) << (8 * i) for i, c in enumerate(stream[:8])), index]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def unwrap(model: Any, backend: Backend) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """The plain module, and the context that a named or given backend stands for."""
    hooked = hasattr(model, "run_with_hooks")
    module = model.module if hooked else model
    if not isinstance(module, nn.Module):
        raise InputError(f"need a torch module or a HookedModel, got a {type(model).__name__}.")
    if backend is None:
        return module, contextlib.nullcontext
    if callable(backend):
        return module, backend
    from probelens.hooks.wrapping import wrap

    wrapped = model if hooked else wrap(module)
    return module, lambda: wrapped.backend(backend)


def logits_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a module, whatever it wraps them in. (batch, pos, vocab)"""
    # transformers would fill a cache for the next call, which nobody makes.
    options = {"use_cache": False} if hasattr(getattr(module, "config", None), "use_cache") else {}
    out = module(tokens, **options)
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if logits is None and isinstance(out, tuple):
        logits = out[0]
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(out).__name__
        raise ShapeError(
            f"the model must map tokens {tuple(tokens.shape)} to logits (batch, pos, vocab); it gave {found}."
        )
    return logits


def check_vocabulary(module: nn.Module, task: Task, slices: dict[str, slice]) -> None:
    """Refuse a model whose ids can't hold the task's tokens and classes."""
    param = next(module.parameters())
    getter = getattr(module, "get_input_embeddings", None)
    embedding = getter() if callable(getter) else getattr(module, "embedding", None)
    ids = getattr(embedding, "num_embeddings", None)
    if ids is not None and ids < task.d_vocab:
        raise InputError(f"the model has {ids} token ids, task {task.name!r} needs {task.d_vocab}. {_FIT}")
    with torch.no_grad():
        width = logits_of(module, torch.zeros(1, 1, dtype=torch.long, device=param.device)).shape[-1]
    needed = sum(task.n_classes[name] for name in slices)
    if width < needed:
        raise InputError(f"the model has {width} logits, the classes of {', '.join(slices)} need {needed}. {_FIT}")


def predict(module: nn.Module, tokens: Tensor, slices: dict[str, slice], batch_size: int) -> dict[str, Tensor]:
    """The most likely class at every position, for each label, on the CPU. (n, pos)"""
    device = next(module.parameters()).device
    parts: dict[str, list[Tensor]] = {name: [] for name in slices}
    for chunk in tokens.split(batch_size):
        logits = logits_of(module, chunk.to(device))
        for name, part in slices.items():
            parts[name].append(logits[..., part].argmax(-1).cpu())
    return {name: torch.cat(found) for name, found in parts.items()}


def _rows(
    batch: Batch, predicted: dict[str, Tensor], task: Task, length: int, trained_length: int, late: int
) -> list[dict[str, Any]]:
    t = torch.arange(1, batch.tokens.shape[1] + 1) - (batch.tokens.shape[1] - length)
    spans = {"all": t > 0, "trained": (t > 0) & (t <= trained_length), "beyond": t > trained_length, "late": t > late}
    rows = []
    for label, classes in predicted.items():
        truth = batch.labels[label]
        for span, inside in spans.items():
            chosen = batch.mask & inside
            count = int(chosen.sum())
            if not count:
                continue
            hit = (classes == truth)[chosen].double()
            total = torch.bincount(truth[chosen], minlength=task.n_classes[label])
            right = torch.bincount(truth[chosen], weights=hit, minlength=task.n_classes[label])
            hits = ((classes == truth) & chosen).sum(1).double()
            some = chosen.any(1)
            low, high = share_interval(hits[some], chosen.sum(1)[some]) if int(some.sum()) > 1 else (0.0, 1.0)
            row: dict[str, Any] = {"label": label, "length": length, "span": span, "accuracy": float(hit.mean())}
            row |= {"lo": low, "hi": high}
            row["balanced_accuracy"] = float((right[total > 0] / total[total > 0]).mean())
            rows.append(row | {"n_positions": count, "n_sequences": int(chosen.any(1).sum())})
    return rows

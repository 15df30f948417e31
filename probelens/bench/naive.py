"""Rows about patching beside a naive loop, one hooked forward a cell, on inputs, dtypes and models of every day."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import OURS, Work

NAIVE = "plain hooks"


def patch_padded_neox(size: str, device: str) -> Work:
    """GPT-NeoX on padded rows."""
    layers, width, vocab, heads, n = _sizes(size)
    return patching(shapes.neox(layers, width, vocab, heads).to(device), vocab, n, padded=True)


def patch_padded_llama(size: str, device: str) -> Work:
    """Llama on padded rows."""
    layers, width, vocab, heads, n = _sizes(size)
    return patching(shapes.llama(layers, width, vocab, heads).to(device), vocab, n, padded=True)


def patch_half(dtype: torch.dtype, size: str, device: str) -> Work:
    """GPT-NeoX in half precision, where CPUs are slow: medium sizes are smaller ones."""
    layers, width, vocab, heads, n = _sizes(size) if size == "quick" else (6, 512, 8192, 8, 4)
    return patching(shapes.neox(layers, width, vocab, heads).to(device, dtype), vocab, n, padded=False)


def patch_bfloat16(size: str, device: str) -> Work:
    """GPT-NeoX in bfloat16."""
    return patch_half(torch.bfloat16, size, device)


def patch_float16(size: str, device: str) -> Work:
    """GPT-NeoX in float16."""
    return patch_half(torch.float16, size, device)


def patch_window(size: str, device: str) -> Work:
    """Mistral with a window of 12 positions."""
    layers, width, vocab, heads, n = _sizes(size)
    return patching(shapes.mistral(layers, width, vocab, heads, window=12).to(device), vocab, n)


def patch_hybrid(size: str, device: str) -> Work:
    """Jamba with attention in each third layer."""
    layers, width, vocab, heads, n = _sizes(size)
    return patching(shapes.jamba(layers, width, vocab, heads).to(device), vocab, n)


def patch_rnn(cell: str, size: str, device: str) -> Work:
    """A stack of recurrent layers, as the formal models are."""
    return patching(shapes.rnn(cell, 4, 164, 64).to(device), 64, 8)


def patch_lstm(size: str, device: str) -> Work:
    """LSTM."""
    return patch_rnn("lstm", size, device)


def patch_gru(size: str, device: str) -> Work:
    """GRU."""
    return patch_rnn("gru", size, device)


def _sizes(size: str) -> tuple[int, int, int, int, int]:
    """Layers, width, vocabulary, heads and pairs."""
    return (6, 256, 8192, 4, 8) if size == "quick" else (12, 768, 50304, 12, 4)


def patching(module: Any, vocab: int, n: int, padded: bool = False, length: int = 32, sample: int = 16) -> Work:
    """Patching resid_pre of every layer at every position of pairs that differ from the end of their first quarter on.

    Args:
        module: The model.
        vocab: Its vocabulary.
        n: Pairs.
        padded: Whether rows are padded, in turn on the left and on the right, by up to a quarter.
        length: Positions.
        sample: Cells that the naive loop runs; its time is scaled up.
    """
    model = pl.wrap(module)
    where = torch.arange(length)
    pads = torch.arange(n) * (length // 4) // n if padded else torch.zeros(n, dtype=torch.long)
    left = torch.arange(n) % 2 == 0
    mask = torch.where(left[:, None], where >= pads[:, None], where < length - pads[:, None])
    clean = shapes.tokens(vocab, n, length, seed=1)
    differs = torch.full((n,), length // 4)
    changed = (clean + 1 + shapes.tokens(vocab - 1, n, length, seed=2)) % vocab
    corrupted = torch.where(mask & (where >= differs[:, None]), changed, clean)
    end = length - 1 - torch.where(left, 0, pads)
    answers = torch.stack([torch.arange(n), torch.arange(n) + n], 1)
    pairs = pl.PatchPairs(clean, corrupted, differs, end, answers, mask=mask)
    cells = [(layer, pos) for layer in range(model.cfg.n_layers) for pos in range(length)]
    picked = cells[:: max(1, len(cells) // sample)]
    blocks = [module.get_submodule(path) for path in model.adapter.blocks]
    given = ({"use_cache": False} if model.adapter.accepts("use_cache") else {}) | (
        {"attention_mask": mask.long().to(model.cfg.device)} if padded else {}
    )
    kept = _entering(module, blocks, clean.to(model.cfg.device), given)

    def compare(results: dict[str, Any]) -> dict[str, float]:
        ours = torch.stack([results[OURS].values[layer, pos] for layer, pos in picked])
        return {"difference": float((ours - results[NAIVE]).abs().max())}

    def describe(results: dict[str, Any]) -> dict[str, float | str]:
        plan = pl.patch_plan(model, pairs)
        rounding = {} if plan.sweep.rounding is None else {"rounding": str(plan.sweep.rounding)}
        return {"path": results[OURS].path, "spread over cells": float(results[OURS].values.mean(-1).std()), **rounding}

    with torch.no_grad():
        size = float(_logits(module(clean.to(model.cfg.device), **given)).abs().max())
    steps = 2 * torch.finfo(model.cfg.dtype).eps * size
    kind = f", {str(model.cfg.dtype).removeprefix('torch.')}" if model.cfg.dtype != torch.float32 else ""
    return Work(
        {OURS: lambda: pl.patch(model, pairs), NAIVE: lambda: _naive(module, blocks, kept, pairs, picked, given)},
        compare,
        {"difference": steps if kind else 1e-5},
        {NAIVE: len(picked) / len(cells)},
        f"{len(blocks)} layers d {model.cfg.d_model}, {n} × {length} tokens{kind}, pairs that differ from position {length // 4} on"
        f"{', padded left and right in turn by up to a quarter' if padded else ''}; plain hooks run {len(picked)} of the "
        f"{len(cells)} cells, scaled up, with the clean run's cache given",
        {"cells": len(cells)},
        describe,
    )


def _naive(
    module: Any, blocks: list[nn.Module], kept: list[Tensor], pairs: pl.PatchPairs, cells: list[tuple[int, int]],
    given: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The logit difference of each pair after one whole forward a cell. (cell, example)"""
    rows, out = torch.arange(len(pairs)), []
    tokens = pairs.corrupted.to(kept[0].device)
    with torch.no_grad():
        for layer, pos in cells:
            put = partial(_put, kept[layer], pos)
            handle = blocks[layer].register_forward_pre_hook(put, with_kwargs=True)
            read = _logits(module(tokens, **given)).cpu()[rows, pairs.read_pos].float()
            handle.remove()
            out.append(read[rows, pairs.answers[:, 0]] - read[rows, pairs.answers[:, 1]])
    return torch.stack(out)


def _entering(module: Any, blocks: list[nn.Module], tokens: Tensor, given: dict[str, Any]) -> list[Tensor]:
    kept: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda m, args, kw: kept.append(_hidden(args, kw).clone()), with_kwargs=True)
        for block in blocks
    ]
    with torch.no_grad():
        module(tokens, **given)
    for handle in handles:
        handle.remove()
    return kept


def _logits(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _put(source: Tensor, pos: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden = _hidden(args, kwargs).clone()
    hidden[:, pos] = source[:, pos]
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

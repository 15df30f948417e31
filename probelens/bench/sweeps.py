"""Rows about interventions: patching against TransformerLens, ablation against plain hooks."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import torch
from torch import Tensor

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import OURS, TL, Work, worst


def pairs_of(vocab: int, n: int, length: int) -> pl.PatchPairs:
    """Pairs whose tokens differ at every position, so that no cell is spared because nothing changes."""
    clean = shapes.tokens(vocab, n, length, seed=1)
    corrupted = (clean + 1 + shapes.tokens(vocab - 1, n, length, seed=2)) % vocab
    answers = torch.stack([torch.arange(n), torch.arange(n) + n], 1)
    end = torch.full((n,), length - 1)
    return pl.PatchPairs(clean, corrupted, torch.zeros(n, dtype=torch.long), end, answers)


def tl_patching(bridge: Any, pairs: pl.PatchPairs, cells: Any = None) -> Tensor:
    """Mean logit difference after patching resid_pre in each cell (all, or a table of them)."""
    from transformer_lens import patching

    rows = torch.arange(len(pairs.clean))

    def metric(logits: Tensor) -> Tensor:
        last = logits[rows, pairs.read_pos].float()
        return (last.gather(1, pairs.answers.to(last.device)) * torch.tensor([1.0, -1.0])).sum(1).mean()

    # Its progress bar writes to the terminal at every cell.
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        wanted = [n for n in bridge.hook_dict if n.endswith("hook_resid_pre")]
        _, cache = bridge.run_with_cache(pairs.clean, names_filter=wanted, use_cache=False)
        if cells is None:
            return patching.get_act_patch_resid_pre(bridge, pairs.corrupted, cache, metric)
        found = patching.generic_activation_patch(
            bridge, pairs.corrupted, cache, metric, patch_setter=patching.layer_pos_patch_setter,
            activation_name="resid_pre", index_axis_names=None, index_df=cells,
        )  # fmt: skip
    return found


def patch_work(module: Any, vocab: int, length: int, layers: list[int], sample: int | None) -> Work:
    """Patching resid_pre of these layers at every position of 4 pairs; the peer runs a sample of the cells, or all."""
    import pandas as pd

    pairs = pairs_of(vocab, 4, length)
    model, other = pl.wrap(module), shapes.bridge(module)
    sites = [f"blocks.{layer}.hook_resid_pre" for layer in layers]
    every = [(i, p) for i in range(len(layers)) for p in range(length)]
    picked = every if sample is None else every[:: max(1, len(every) // sample)]
    cells = pd.DataFrame([(layers[i], p) for i, p in picked], columns=["layer", "pos"])

    def compare(results: dict[str, Any]) -> dict[str, float]:
        ours = results[OURS].values.mean(-1)
        mine = torch.stack([ours[i, p] for i, p in picked])
        return {"difference": worst(mine, results[TL], False)}

    def describe(results: dict[str, Any]) -> dict[str, float | str]:
        # Differences mean something beside how much the cells differ from each other.
        return {"path": results[OURS].path, "spread over cells": float(results[OURS].values.mean(-1).std())}

    part = f"layers {', '.join(map(str, layers))} at {length} positions"
    if sample is not None:
        part += f"; TransformerLens runs {len(picked)} of the {len(every)} cells, scaled up"
    return Work(
        {OURS: lambda: pl.patch(model, pairs, sites), TL: lambda: tl_patching(other, pairs, cells)},
        compare,
        {"difference": 1e-4},
        {TL: len(picked) / len(every)},
        part,
        {"cells": len(every)},
        describe,
    )


def patch_neox(size: str, device: str) -> Work:
    layers, width, vocab, heads, length = {
        "quick": (6, 256, 8192, 4, 16), "medium": (12, 768, 50304, 12, 32), "full": (12, 768, 50304, 12, 32),
    }[size]  # fmt: skip
    module = shapes.neox(layers, width, vocab, heads).to(device)
    return patch_work(module, vocab, length, list(range(layers)), {"quick": 24, "medium": 12, "full": None}[size])


def patch_mamba(size: str, device: str) -> Work:
    layers, width, vocab, length = {
        "quick": (6, 256, 8192, 16), "medium": (24, 768, 50280, 32), "full": (24, 768, 50280, 32),
    }[size]  # fmt: skip
    module = shapes.mamba(layers, width, vocab).to(device)
    some = list(range(0, layers, 4)) if size == "medium" else list(range(layers))
    return patch_work(module, vocab, length, some, {"quick": 24, "medium": 12, "full": None}[size])


def ablation(size: str, device: str) -> Work:
    width, examples, length, controls = {
        "quick": (128, 32, 32, 3), "medium": (512, 8, 64, 20), "full": (512, 64, 64, 20),
    }[size]  # fmt: skip
    layers, vocab, rank = 6, 256, 4
    module = shapes.neox(layers, width, vocab, 8).to(device)
    model, x = pl.wrap(module), shapes.tokens(vocab, examples, length)
    mask = torch.ones_like(x, dtype=torch.bool)
    batch = pl.tasks.Batch(x, {"token": x}, mask, torch.arange(examples))
    sites = [f"blocks.{layer}.hook_resid_pre" for layer in range(layers)]
    acts = pl.collect(model, x, sites)
    targets = {s: pl.subspaces.pca(acts[s].flatten(0, 1), rank) for s in sites}
    drawn: list[tuple[int, Any]] = []
    for layer, site in enumerate(sites):
        mean = acts[site].flatten(0, 1).double().mean(0)
        spaces = [pl.subspaces.random(rank, width, seed=i, mean=mean) for i in range(controls)]
        drawn += [(layer, space) for space in (targets[site], *spaces)]
    # One condition at every layer stands for all: a full forward costs the same wherever the edit is.
    sampled = drawn[:: controls + 1]

    options: dict[str, Any] = {"metric": "next_token_loss", "refit": False, "controls": controls, "kinds": ("random",)}

    def plain() -> Tensor:
        values = []
        with torch.no_grad():
            module(x.to(device), use_cache=False)
            for layer, space in sampled:
                hook = partial(_project, space)
                handle = module.gpt_neox.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
                logits = module(x.to(device), use_cache=False).logits.cpu()
                handle.remove()
                losses = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none"
                )
                values.append(losses.mean())
        return torch.stack(values)

    def compare(results: dict[str, Any]) -> dict[str, float]:
        mine = torch.tensor([r["value"] for r in results[OURS].rows if r["condition"] == "target"])
        return {"difference": worst(mine, results["plain hooks"])}

    allowed = layers / (sum(range(1, layers + 1)) / layers)
    return Work(
        {OURS: lambda: pl.ablate(model, batch, targets, **options), "plain hooks": plain},
        compare,
        {"difference": 1e-5},
        {"plain hooks": (len(sampled) + 1) / (len(drawn) + 1)},
        f"{controls} controls, {examples} × {length} tokens; plain hooks run {len(sampled)} of {len(drawn)} conditions, scaled up",
        {"allowed by skipping": allowed},
        lambda results: {"path": results[OURS].path},
    )


def interchange(size: str, device: str) -> Work:
    layers, width, length, n, controls = {
        "quick": (3, 32, 12, 24, 3), "medium": (4, 64, 40, 300, 20), "full": (4, 128, 40, 300, 20),
    }[size]  # fmt: skip
    vocab, rank = 64, 4
    module = shapes.neox(layers, width, vocab, 4).to(device)
    model, pairs = pl.wrap(module), pairs_of(vocab, n, length)
    with torch.no_grad():
        said = [model(x.to(device))[:, -1].topk(2).indices.cpu() for x in (pairs.clean, pairs.corrupted)]
    # What the model says is right; where both runs say the same, the base's second choice stands for another answer.
    base = torch.where(said[0][:, 0] == said[1][:, 0], said[1][:, 1], said[1][:, 0])
    pairs = pl.PatchPairs(
        pairs.clean, pairs.corrupted, pairs.edit_pos, pairs.read_pos, torch.stack([said[0][:, 0], base], 1)
    )
    spaces = {f"blocks.{i}.hook_resid_post": pl.subspaces.random(rank, width, seed=i) for i in range(layers)}
    cells = [(layer, pos) for layer in range(layers) for pos in range(length)]
    sampled, kinds = cells[:: max(1, len(cells) // 8)], ("random",)

    options: dict[str, Any] = {"pos": "each", "controls": controls, "kinds": kinds}

    def ours() -> Any:
        return pl.interchange(model, pairs, spaces, **options)

    def plain() -> Tensor:
        """Whether the answer is the source's, by one whole forward of each cell of the sample. (cell, example)"""
        followed = []
        rows = torch.arange(len(pairs))
        with torch.no_grad():
            source = module(pairs.clean.to(device), output_hidden_states=True, use_cache=False).hidden_states
            for layer, pos in sampled:
                # The last hidden state that transformers gives is behind the final norm.
                clean = source[layer + 1] if layer + 1 < layers else _last(module, pairs.clean.to(device))
                q = spaces[f"blocks.{layer}.hook_resid_post"].basis.to(clean)
                hook = partial(_swap, clean, q, pos)
                handle = module.gpt_neox.layers[layer].register_forward_hook(hook)
                logits = module(pairs.corrupted.to(device), use_cache=False).logits.cpu()
                handle.remove()
                followed.append(logits[rows, pairs.read_pos].argmax(-1) == pairs.answers[:, 0])
        return torch.stack(followed)

    def compare(results: dict[str, Any]) -> dict[str, float]:
        found = results[OURS]
        by_cell = {
            (row["layer"], int(row["pos"])): found.followed[i]
            for i, row in enumerate(found.rows)
            if row["condition"] == "target"
        }
        mine = torch.stack([by_cell[cell] for cell in sampled])
        return {"pairs that differ": float((mine != results["plain hooks"]).double().mean())}

    every = len(cells) * (controls + 4)  # full, complement, noise and the subspace itself
    return Work(
        {OURS: ours, "plain hooks": plain},
        compare,
        {"pairs that differ": 0.002},
        {"plain hooks": (len(sampled) + 1) / (every + 2)},
        f"{layers} layers × {length} positions, {n} pairs, {controls} controls; plain hooks run {len(sampled)} of {every} "
        "conditions, scaled up",
        {"conditions": every},
        lambda results: {
            "path": results[OURS].path,
            "times fewer block-positions than whole forwards": pl.interchange_plan(
                model, pairs, spaces, **options
            ).sweep.ratio,
        },
    )


def _last(module: Any, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = module.gpt_neox.layers[-1].register_forward_hook(lambda m, args, out: kept.append(_first(out)))
    module(x, use_cache=False)
    handle.remove()
    return kept[0]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _swap(source: Tensor, q: Tensor, pos: int, module: Any, args: tuple[Any, ...], out: Any) -> Any:
    h = _first(out).clone()
    h[:, pos] += (source[:, pos] - h[:, pos]) @ q.mT @ q
    return (h, *out[1:]) if isinstance(out, tuple) else h


def _project(space: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (space.project_out(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": space.project_out(kwargs["hidden_states"])}

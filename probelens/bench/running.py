"""Rows about plain running: caches, collection to disk, import."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import NNSIGHT, OURS, TL, PeakMemory, Work, cpu_seconds, installed, worst
from probelens.bench.rows import RAW


def cache_work(layers: int, width: int, heads: int, batch: int, length: int, times: int, device: str) -> Work:
    """All resid_post of a GPT-NeoX, ``times`` times in a run."""
    module = shapes.neox(layers, width, 256, heads).to(device)
    x = shapes.tokens(256, batch, length).to(device)
    model = pl.wrap(copy.deepcopy(module))
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(layers)]

    def ours() -> Any:
        for _ in range(times):
            found = model.run_with_cache(x, names)[1]
        return [found[n] for n in names]

    def raw() -> Any:
        for _ in range(times):
            module(x, use_cache=False)

    runs: dict[str, Any] = {OURS: ours, RAW: raw}

    if installed(TL):
        other = shapes.bridge(module)

        def lens() -> Any:
            for _ in range(times):
                found = other.run_with_cache(x, names_filter=names, use_cache=False)[1]
            return [found[n] for n in names]

        runs[TL] = lens

    if installed(NNSIGHT):
        from nnsight import NNsight

        third = NNsight(copy.deepcopy(module))

        def trace() -> list[Tensor]:
            for _ in range(times):
                with third.trace(x, use_cache=False):
                    kept = cast(Any, list()).save()  # noqa: C408 - nnsight saves objects made by a call
                    for layer in third.gpt_neox.layers:
                        kept.append(layer.output)
            return [v[0] if isinstance(v, tuple) else v for v in kept]

        runs[NNSIGHT] = trace

    def compare(results: dict[str, Any]) -> dict[str, float]:
        mine = torch.stack(results[OURS])
        return {name: worst(mine, torch.stack(results[name])) for name in (TL, NNSIGHT) if name in results}

    return Work(
        {name: torch.no_grad()(run) for name, run in runs.items()},
        compare,
        {TL: 1e-4, NNSIGHT: 1e-4},
        note=f"{layers} layers, d {width}, {batch} × {length}",
    )


def cache_large(size: str, device: str) -> Work:
    return cache_work(6, 128 if size == "quick" else 512, 8, 8, 32 if size == "quick" else 64, 3, device)


def cache_small(size: str, device: str) -> Work:
    return cache_work(24, 64, 4, 1, 8, 20, device)


def collecting(size: str, device: str) -> Work:
    width, examples, length = {"quick": (128, 256, 32), "medium": (512, 256, 64), "full": (512, 7813, 128)}[size]
    module = shapes.neox(6, width, 256, 8).to(device)
    model, x = pl.wrap(module), shapes.tokens(256, examples, length)
    # The first run, which is not timed beside the other, is whole; cost grows with the positions, so a part stands for all.
    timed = x if size != "full" else x[: examples // 8]
    place = tempfile.TemporaryDirectory()
    first: dict[str, float] = {}

    def collect(x: Tensor) -> Any:
        # Named here, so that the folder lives as long as the work.
        folder = Path(place.name, "activations")
        shutil.rmtree(folder, ignore_errors=True)
        return pl.collect(model, x, "resid_post", out=folder, dtype=torch.float16)

    def ours() -> Any:
        if first:
            return collect(timed)
        begun = cpu_seconds()
        with PeakMemory() as peak:
            kept = collect(x)
        first["CPU seconds of the whole"] = cpu_seconds() - begun
        if peak.growth is not None:
            first["growth of resident memory, GB"] = peak.growth / 1e9
        return kept

    def raw() -> Tensor:
        with torch.no_grad():
            for chunk in timed.split(64):
                logits = module(chunk.to(device), use_cache=False).logits
        return logits

    def compare(results: dict[str, Any]) -> dict[str, float]:
        with torch.no_grad():
            _, cache = model.run_with_cache(x[-8:], "blocks.*.hook_resid_post")
        kept = results[OURS]
        return {"half-precision rounding": max(worst(kept[n][-8:], cache[n]) for n in kept.names)}

    note = f"{examples * length} positions × 6 layers × d {width}, float16 to disk"
    if len(timed) < len(x):
        note += f"; timed on {len(timed) * length} of them, scaled up"
    share = len(timed) / len(x)
    return Work(
        {OURS: ours, RAW: raw}, compare, {"half-precision rounding": 2e-3}, {OURS: share, RAW: share}, note,
        describe=lambda results: dict(first),
    )  # fmt: skip


def importing(size: str, device: str) -> Work:
    def run(code: str) -> Any:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    ours = run("import torch, probelens")
    return Work({OURS: ours, "import torch": run("import torch")}, lambda results: {}, {})

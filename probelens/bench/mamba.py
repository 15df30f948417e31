"""Rows about the scan: a training step against transformers' CPU paths, all states against TransformerLens."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import MAMBAPY, OURS, TL, PeakMemory, Work, installed, worst
from probelens.bench.rows import DEFAULT


def train_step(size: str, device: str) -> Work:
    width, batch, length = {"quick": (64, 8, 24), "medium": (128, 16, 40), "full": (128, 64, 40)}[size]
    module = shapes.mamba(4, width, 64).to(device)
    x = shapes.tokens(64, batch, length).to(device)
    peers = {DEFAULT: copy.deepcopy(module)}
    if installed(MAMBAPY):
        # Without the flag the same class runs its torch scan; mambapy's parallel scan is chosen in the config.
        parallel = shapes.mamba(4, width, 64, use_mambapy=True).to(device)
        parallel.load_state_dict(module.state_dict())
        peers = {MAMBAPY: parallel, **peers}
    model = pl.wrap(module)
    for each in (module, *peers.values()):
        each.train()

    def step(of: Any) -> tuple[Tensor, Tensor]:
        of.zero_grad(set_to_none=True)
        logits = of(input_ids=x, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])

    def ours() -> tuple[Tensor, Tensor]:
        with model.backend("reference"):
            return step(module)

    channels = 2 * width
    scanned = x.new_empty(batch, length, channels, dtype=torch.float)
    kernel = pl.kernels.ssm.fused_kernel(scanned, x.new_empty(channels, 16))

    def compare(results: dict[str, Any]) -> dict[str, float]:
        mine = results[OURS]
        found = {"gradient": worst(mine[1], results[DEFAULT][1]), "loss": worst(mine[0], results[DEFAULT][0])}
        if MAMBAPY in results:
            found["gradient (mambapy)"] = worst(mine[1], results[MAMBAPY][1])
        return found

    return Work(
        {OURS: ours, **{name: partial(step, peer) for name, peer in peers.items()}},
        compare,
        {"gradient": 1e-3, "gradient (mambapy)": 1e-3, "loss": 1e-5},
        note=f"4 layers, d {width}, {batch} × {length}; scan: {kernel}",
    )


def states(size: str, device: str) -> Work:
    layers, width, batch, length = {"quick": (2, 64, 2, 32), "medium": (2, 256, 2, 64), "full": (6, 512, 8, 128)}[size]
    module = shapes.mamba(layers, width, 64).to(device)
    x = shapes.tokens(64, batch, length).to(device)
    other = shapes.bridge(module)
    for block in other.blocks:
        block.mixer.eager_scan = True
    model = pl.wrap(module)
    names = [f"blocks.{layer}.mixer.hook_ssm_state" for layer in range(layers)]
    needed = ("conv1d.hook_out", "x_proj.hook_out", "dt_proj.hook_out")

    def ours() -> list[Tensor]:
        with torch.no_grad():
            _, cache = model.run_with_cache(x, names, return_type=None)
        return [cache[n] for n in names]

    def scan() -> list[Tensor]:
        with torch.no_grad():
            _, cache = other.run_with_cache(x, use_cache=False, names_filter=names)
        return [cache[n].transpose(1, 2) for n in names]

    # Its decay tensor is quadratic in the length: it gets as many examples as keep that within 1 GiB.
    decay = 2 * width * 16 * length**2 * 4
    part = max(1, min(batch, 2**30 // decay))

    def rebuilt() -> list[Tensor]:
        with torch.no_grad():
            _, cache = other.run_with_cache(x[:part], use_cache=False, names_filter=lambda n: n.endswith(needed))
            return [block.mixer.compute_ssm_state(cache, i).transpose(1, 2) for i, block in enumerate(other.blocks)]

    runs: dict[str, Any] = {OURS: ours, TL + " eager_scan": scan, TL + " compute_ssm_state": rebuilt}
    trajectory = layers * batch * length * 2 * width * 16 * 4

    def compare(results: dict[str, Any]) -> dict[str, float]:
        mine = torch.stack(results[OURS])
        theirs = {name: torch.stack(found) for name, found in results.items() if name != OURS}
        return {name: worst(mine[:, : found.shape[1]], found) for name, found in theirs.items()}

    def memory(results: dict[str, Any]) -> dict[str, float | str]:
        with PeakMemory() as peak:
            held = ours()
        del held
        return {} if peak.growth is None else {"peak memory over trajectory": peak.growth / trajectory}

    note = f"{layers} layers, d {width}, {batch} × {length}"
    if part < batch:
        note += (
            f"; compute_ssm_state gets {part} of the {batch} examples, scaled up, as its decay tensor takes "
            f"{decay / 2**30:.0f} GiB a layer and example"
        )
    share = {TL + " compute_ssm_state": part / batch}

    def least(results: dict[str, Any]) -> tuple[float, float, str]:
        inner, rank = 2 * width, module.config.time_step_rank
        weights = width * 2 * inner + inner * (rank + 32) + rank * inner + inner * width
        gflop = 2 * layers * batch * length * weights / 1e9
        what = "the matrix products of the forward, which every way has, and the states written"
        return gflop, trajectory / 1e9, what

    return Work(runs, compare, dict.fromkeys(runs, 1e-4), share, note, describe=memory, least=least)

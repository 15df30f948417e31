"""Every primitive of the library, each as one small call on one model: what a test of all of them loops over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import zoo
from torch import Tensor

import probelens as pl

LENGTH = 8
RESID = "blocks.1.hook_resid_post"
TASK = pl.tasks.Parity()
BATCH = TASK.sample(30, length=LENGTH, seed=1)
OTHER = TASK.sample(30, length=LENGTH, seed=2)
APART = TASK.splits({"fit": 40, "held": 30}, length=LENGTH, seed=4)
PAIRS = TASK.pairs(6, length=LENGTH, seed=3)
Call = Callable[[pl.HookedModel], Any]


def double(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
    return tensor * 2


def collected(model: pl.HookedModel) -> pl.Activations:
    return pl.collect(model, BATCH, ["blocks.0.hook_resid_post", RESID])


def probed(model: pl.HookedModel, **options: Any) -> pl.ProbeResult:
    return pl.probe(
        collected(model), {"state": BATCH.labels["state"]}, BATCH.groups, mask=BATCH.mask, tokens=BATCH.tokens,
        n_boot=20, Cs=(1.0,), **options,
    )  # fmt: skip


def spaces(model: pl.HookedModel) -> dict[str, Any]:
    x = collected(model)[RESID]
    return {RESID: pl.leace(x[BATCH.mask], BATCH.labels["state"][BATCH.mask])}


def fitted(model: pl.HookedModel) -> pl.LinearProbe:
    x = collected(model)[RESID][BATCH.mask]
    return pl.LinearProbe().fit(x, BATCH.labels["state"][BATCH.mask])


def directions(model: pl.HookedModel) -> list[Tensor]:
    acts, labels, mask = collected(model)[RESID], BATCH.labels["state"], BATCH.mask
    found = [
        pl.subspaces.mean_difference(acts, labels, mask), pl.subspaces.pca(acts, 2, mask),
        pl.subspaces.svd(acts, 2, mask), pl.subspaces.random(2, acts.shape[-1], mean=acts.mean((0, 1)), seed=3),
    ]  # fmt: skip
    return [space.basis for space in found]


def edited(model: pl.HookedModel) -> Tensor:
    name = next(name for name, p in model.module.named_parameters() if p.ndim == 2)
    with model.edit_weights({name: lambda w: w * 0.5}):
        return model(BATCH.tokens)


def hooked(model: pl.HookedModel) -> Tensor:
    with model.hooks([(RESID, double), (RESID, pl.at(2, double))]):
        return model(BATCH.tokens)


def gradients(model: pl.HookedModel) -> dict[str, Tensor]:
    _, cache = model.run_with_cache(BATCH.tokens, RESID, incl_bwd=True, return_type="loss")
    model.zero_grad()
    return dict(cache)


def trained(model: pl.HookedModel) -> dict[str, Tensor]:
    config = pl.models.FormalConfig.for_task("gru", TASK, n_layers=1, d_model=8, hidden_size=8)
    settings = pl.training.TrainConfig(
        steps=3, batch_size=4, decay_steps=1, length=LENGTH, eval_sequences=4, target_accuracy=None
    )
    own = pl.models.build(config)
    pl.training.train(own, TASK, config=settings, progress=False)
    return dict(own.state_dict())


def own_pairs(model: pl.HookedModel) -> pl.PatchPairs:
    """Pairs that differ in every token, with the answers that the model itself gives: all of them count as right."""
    source = zoo.tokens(40, LENGTH)
    base = (source + 1) % zoo.VOCAB
    with torch.no_grad():
        clean, corrupted = (model(x).argmax(-1).cpu() for x in (source, base))
    # Some positions of a tiny model have one answer to everything.
    rows = (clean != corrupted).any(1).nonzero().flatten()
    at = (clean != corrupted)[rows].int().argmax(1)
    return pl.PatchPairs(source[rows], base[rows], at, at, torch.stack([clean[rows, at], corrupted[rows, at]], 1))


def learned(model: pl.HookedModel) -> list[dict[str, Any]]:
    pairs = own_pairs(model)
    return pl.das(model, pairs, RESID, pairs.read_pos, 2, steps=2, controls=1, untrained=False).rows


PRIMITIVES: dict[str, Call] = {
    "call": lambda m: m(BATCH.tokens),
    "loss": lambda m: m(BATCH.tokens, return_type="loss"),
    "stop and start": lambda m: m(m(BATCH.tokens, stop_at_layer=1), start_at_layer=1),
    "run_with_hooks": lambda m: m.run_with_hooks(BATCH.tokens, [(RESID, double)]),
    "hooks": hooked,
    "run_with_cache": lambda m: dict(m.run_with_cache(BATCH.tokens)[1]),
    "run_with_cache incl_bwd": gradients,
    "edit_weights": edited,
    "verify": lambda m: m.verify(BATCH.tokens[:2]).ok,
    "collect": lambda m: collected(m).tensors,
    "probe": lambda m: probed(m).rows,
    "probe with controls": lambda m: probed(m, control_task=True, mdl=True).rows,
    "LinearProbe": lambda m: torch.as_tensor(fitted(m).coef_),
    "leace": lambda m: spaces(m)[RESID](collected(m)[RESID]),
    "subspaces": directions,
    "ablate": lambda m: pl.ablate(m, OTHER, spaces(m), label="state", controls=2).rows,
    "ablate_component": lambda m: pl.ablate_component(
        m, OTHER, [RESID], ["zero", "mean", "resample"], target="state", draws=2
    ).rows,
    "dose_response": lambda m: pl.dose_response(
        m, OTHER, spaces(m), alphas=(0.5, 1.0), label="state", refit=False, controls=2
    ).rows,
    "length_transfer": lambda m: pl.length_transfer(
        m, TASK, spaces(m), (LENGTH, LENGTH + 2), trained_length=LENGTH, n=6, controls=2
    ).rows,
    "erase": lambda m: pl.erase(m, APART["fit"], APART["held"], label="state", sites=[RESID], controls=2, mlp=False).rows,
    "patch": lambda m: pl.patch(m, PAIRS, "resid_pre", pos="each").values,
    "patch_sites": lambda m: pl.patch_sites(m, PAIRS, 3, "ABCD", correct_only=False, n_boot=20).rows,
    "das": learned,
    "attribute": lambda m: pl.attribute(m, PAIRS, "resid_pre", pos="each").values,
    "profile": lambda m: pl.profile(
        m, TASK, length=LENGTH, n_probe=30, n_ablate=20, n_pairs=4, controls=2, mlp=False, filters=False
    ).ablations["state"].rows,
    "train": trained,
}  # fmt: skip


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two results hold the same numbers; NaN equals NaN."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        a, b = a.detach().cpu(), b.detach().cpu()
        if tolerance == 0.0:
            return torch.equal(a.nan_to_num(), b.nan_to_num())
        scale = float(a.double().abs().nan_to_num().max()) if a.numel() else 0.0
        return torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance * (1 + scale), equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k], tolerance) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (a != a and b != b) or abs(a - b) <= tolerance * (1 + abs(a))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b), tolerance)
    return bool(a == b)

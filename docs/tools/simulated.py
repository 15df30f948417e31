"""The experiments of docs/simulations.md: small ones whose truth is known, each run with random numbers of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.ablation.controls import Removal
from probelens.ablation.scoring import Runs
from probelens.examples import planted
from probelens.examples.planted import LENGTH, SITE, Planted, Reader, World, Write, Writer
from probelens.numerics.effects import effect, max_t_over_sites
from probelens.numerics.permutation import holm
from probelens.probing.power import plant
from probelens.probing.refit import refit_check

SITES, N = 13, 100  # sites of a sweep, and sequences of an ablation
READ, SWAPPED = ("numerics", "probing"), ("numerics", "patching", "running", "subspaces")  # rooms that checks try
ABLATED = ("ablation", "numerics", "probing", "running", "subspaces")


@dataclasses.dataclass(frozen=True)
class Check:
    """A share of runs that is to lie within an aim.

    Args:
        group: Heading of the table.
        what: What is measured, and on what.
        aim: Between which shares.
        n: Runs.
        run: Whether it happens in one run, by the run's seed.
        rooms: Whose code it tries.
    """

    group: str
    what: str
    aim: tuple[float, float]
    n: int
    run: Callable[[int], bool]
    rooms: tuple[str, ...] = ABLATED

    @property
    def key(self) -> str:
        return f"{self.group}: {self.what}"


def generator(seed: int, stream: int = 0) -> torch.Generator:
    """A stream of random numbers of one run, with a scrambled seed, so that runs are no neighbours."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([stream, seed]).generate_state(1, np.uint64)[0]))


# Intervals of effects, on costs made by hand


def costs(seed: int, m: int, spread: float, skewed: bool = False) -> Tensor:
    """Costs of a target that is one more draw of its control, target first. (1 + m, 60)"""
    gen = generator(seed)
    level = torch.randn(m + 1, 1, generator=gen)
    if skewed:
        level = level.square() / 2**0.5
    return spread * level + 0.3 * torch.randn(m + 1, 60, generator=gen) + 0.1 * torch.rand(60, generator=gen)


def null_holds(seed: int, m: int, spread: float, skewed: bool = False) -> bool:
    """Whether the interval of a target without an effect holds 0."""
    drawn = costs(seed, m, spread, skewed)
    found = effect(drawn[0], drawn[1:], torch.ones(60), seed=seed)
    return found.low <= 0 <= found.high


def truth_holds(seed: int, m: int, spread: float, size: float) -> bool:
    """Whether the interval of a target that costs ``size`` holds what it costs beyond one more draw."""
    gen = generator(seed, 1)
    shared = 0.1 * torch.rand(60, generator=gen)
    levels = spread * torch.randn(m + 1, 1, generator=gen)
    drawn = levels[1:] + 0.3 * torch.randn(m, 60, generator=gen) + shared
    target = size + 0.3 * torch.randn(60, generator=gen) + shared
    found = effect(target, drawn, torch.ones(60), seed=seed)
    return found.low <= size - float(levels[0]) <= found.high


def some_site(seed: int, m: int, adjust: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether some of 13 unused sites has an adjusted p of 0.05 or less; neighbouring sites resemble each other."""
    made = torch.randn(SITES, m + 1, generator=generator(seed, 2))
    for site in range(1, SITES):
        made[site] = 0.7 * made[site - 1] + 0.51**0.5 * made[site]
    return bool((adjust(made[:, 0], made[:, 1:]) <= 0.05).any())


def by_holm(targets: Tensor, draws: Tensor) -> Tensor:
    """Holm's adjusted p of the share of draws that cost as much."""
    return torch.as_tensor(holm((1 + (draws >= targets[:, None]).double().sum(1)) / (1 + draws.shape[1])))


# Ablations of planted models


@functools.cache
def made(name: str) -> World:
    """A planted model, made once."""
    return getattr(planted, name)()


@functools.cache
def mean_of(name: str) -> Tensor:
    """Mean activation where the planted model is cut. (d,)"""
    return made(name).acts(made(name).fit).flatten(0, 1).mean(0)


def some_of(name: str, seed: int, n: int = N) -> pl.Batch:
    """Random sequences on which nothing was fitted."""
    held = made(name).held
    return held[torch.randperm(len(held), generator=generator(seed, 3))[:n]]


def ablated(name: str, space: pl.Subspace, batch: pl.Batch, draws: int, seed: int) -> dict[str, Any]:
    """The target's row of an ablation beside random subspaces of equal rank."""
    options: dict[str, Any] = {"label": "y", "kinds": ("random",), "refit": False, "batch_size": 1000}
    return pl.ablate(made(name).model, batch, {SITE: space}, controls=draws, seed=seed, **options).targets()[0]


def random_target_holds(seed: int, name: str, rank: int, draws: int) -> bool:
    """Whether the interval of a random subspace, one more draw of its control, holds 0."""
    width = len(mean_of(name))
    space = pl.subspaces.random(rank, width, seed=1_000_000 + seed, mean=mean_of(name))
    row = ablated(name, space, some_of(name, seed), draws, seed)
    return bool(row["effect_lo"] <= 0 <= row["effect_hi"])


@functools.cache
def direction_of_y() -> tuple[pl.Subspace, float]:
    """The direction that the planted model reads, and what it costs on all sequences that were held out."""
    world = made("unused")
    space = pl.subspaces.class_means(world.acts(world.fit), world.fit.labels["y"])
    return space, float(ablated("unused", space, world.held, 2, 0)["damage"])


def true_effect_holds(seed: int) -> bool:
    """Whether the interval of the direction that is read holds what it costs beyond one more random direction."""
    space, cost = direction_of_y()
    other = pl.subspaces.random(1, space.d, seed=2_000_000 + seed, mean=space.mean)
    row = ablated("unused", space, some_of("unused", seed), 20, seed)
    against = float(ablated("unused", other, made("unused").held, 2, seed)["damage"])
    return bool(row["effect_lo"] <= cost - against <= row["effect_hi"])


# Sweeps over thirteen sites that aren't used


@functools.cache
def deep(answers: int = 64, variants: int = 64, width: int = 8, turn: float = 0.1) -> World:
    """As ``crowded``, with twelve blocks before the one that reads; each turns the stream a little."""
    gen = torch.Generator().manual_seed(4)
    words, ids = torch.randn(answers, width, generator=gen), torch.arange(answers * variants)
    codes = words[ids % answers] + 0.3 * (torch.rand(len(ids), width, generator=gen) - 0.5)
    zero, eye, blocks = torch.zeros(width, width), torch.eye(width), []
    for _ in range(SITES - 1):
        skew = torch.randn(width, width, generator=gen)
        rotation = torch.matrix_exp(turn * (skew - skew.mT))
        words = words @ rotation
        blocks.append(Writer(Write(rotation - eye), Write(zero)))
    module = Planted(codes, blocks[0], Reader(lambda x: -torch.cdist(x, words.to(x)).square()), answers)
    module.layers = torch.nn.ModuleList([*blocks, module.layers[1]])
    model = pl.wrap(module, blocks="layers", embed="embed", unembed="head")
    tokens = torch.randint(len(ids), (800, LENGTH), generator=gen)
    batch = pl.Batch(tokens, {"y": tokens % answers, "z": tokens % 2})
    return World(model, batch[:400], batch[400:])


def stream() -> list[str]:
    """The thirteen sites of ``deep``."""
    return ["hook_embed", *(f"blocks.{i}.hook_resid_post" for i in range(SITES - 1))]


def at_once(model: pl.HookedModel, batch: pl.Batch, drawn: Sequence[Removal], *_: Any) -> Runs:
    """What ``probelens.ablation.scoring.run`` gives for ``deep``, all subspaces of a site in one go: 20 times as fast."""
    layers: Any = model.module.layers
    y = batch.labels["y"]

    def right(x: Tensor, after: int) -> Tensor:
        for layer in layers[after:]:
            x = layer(x)
        return x.argmax(-1).view(*x.shape[:-2], *y.shape) == y

    acts = pl.collect(model, batch, stream(), batch_size=len(batch))
    values = torch.zeros(len(drawn), *y.shape)
    for place, site in enumerate(stream()):
        mine = [i for i, one in enumerate(drawn) if one.about["site"] == site]
        spaces = [one.space for one in drawn if one.about["site"] == site and isinstance(one.space, pl.Subspace)]
        basis, mean = (torch.stack([getattr(s, name).float() for s in spaces]) for name in ("basis", "mean"))
        x = acts[site].flatten(0, 1)
        values[mine] = right(x - (x - mean[:, None]) @ basis.mT @ basis, place).float()
    return Runs(values, right(acts["hook_embed"].flatten(0, 1), 0).float(), batch.mask, "full")


def deep_sweep(
    seed: int, chance: bool, n: int = 20, draws: int | None = None, quick: bool = True
) -> list[dict[str, Any]]:
    """Targets of an ablation over the thirteen sites: random directions, or those of a label that tokens have by chance."""
    world, gen = deep(), generator(seed, 7)
    batch = world.held[torch.randperm(len(world.held), generator=gen)[:n]]
    acts = pl.collect(world.model, world.fit, stream(), batch_size=400)
    if chance:
        z = torch.rand(64, 64, generator=gen).argsort(0).flatten() % 2  # of the tokens of each answer one half
        known = z[world.fit.tokens]
        spaces = {site: pl.subspaces.class_means(acts[site], known) for site in stream()}
        batch = pl.Batch(batch.tokens, {"y": batch.labels["y"], "z": z[batch.tokens]})
    else:
        spaces = {
            site: pl.subspaces.random(1, 8, seed=4_000_000 + SITES * seed + i, mean=acts[site].flatten(0, 1).mean(0))
            for i, site in enumerate(stream())
        }
    with mock.patch.object(sys.modules[pl.ablate.__module__], "run", at_once) if quick else contextlib.nullcontext():
        found = pl.ablate(
            world.model, batch, spaces, refit=False, label="z", target="y", kinds=("random_matched",), controls=draws, seed=seed
        )  # fmt: skip
    return found.targets()


def called_needed(seed: int, chance: bool) -> bool:
    """Whether one of thirteen unused sites is called needed."""
    return any(row["needed"] == "yes" for row in deep_sweep(seed, chance))


def beside_needed(seed: int, given: str | None, agree: float = 0.9, n: int = 400) -> bool:
    """Whether z, which goes with y but which nothing reads, is called needed when it is erased."""
    model, gen = made("unused").model, generator(seed, 8)
    y = torch.randint(2, (2 * n, LENGTH), generator=gen)
    z = torch.where(torch.rand(y.shape, generator=gen) < agree, y, 1 - y)
    tokens = torch.randint(planted.NUISANCE, y.shape, generator=gen) << 2 | z << 1 | y
    batch = pl.Batch(tokens, {"y": y, "z": z})
    options: dict[str, Any] = {"label": "z", "target": "y", "sites": SITE, "mlp": False, "batch_size": 1000}
    found = pl.erase(model, batch[:n], batch[n:], given=given, kinds=("random", "random_matched"), seed=seed, **options)
    return bool(found.rows[0]["needed"] == "yes")


# Refitted probes on what is left


def residue(seed: int, n: int, size: float) -> dict[str, Any]:
    """The refit check of activations that keep a label as the product of three signs, after its linear code is gone."""
    gen = generator(seed, 4)
    y = torch.randint(2, (n, 4), generator=gen)
    left = plant(torch.randn(4 * n, 8, generator=gen), y.reshape(-1, 1), size=size, seed=seed).view(n, 4, 8)
    clean = left + 4 * y[..., None] * torch.nn.functional.one_hot(torch.tensor(0), 8)
    mask = torch.ones(n, 4, dtype=torch.bool)
    return refit_check(clean, left, y, mask, torch.arange(n), seed=seed)[0]


def called_erased(seed: int, n: int, size: float) -> bool:
    """Whether no probe reads the residue, and the check doesn't say that it lacks power."""
    row = residue(seed, n, size)
    return bool(row["readable_before"] and not row["readable_after"] and row["powered"])


@functools.cache
def secret(size: float) -> tuple[pl.HookedModel, dict[str, Tensor]]:
    """A model whose stream holds y along the axis that is read, and once more as the product of three signs of a size."""
    names = ("a", "b", "c")
    world = planted.world(
        {name: {axis: size} for name, axis in zip(names, (12, 13, 14), strict=True)}, {8: 0.25, 12: 1.0, 13: 1.0, 14: 1.0},
        lambda x: x[..., 8], n=2,
    )  # fmt: skip
    ids = torch.arange(8 * planted.NUISANCE)
    y = (ids ^ ids >> 1 ^ ids >> 2) & 1
    embed: Any = world.model.module.embed
    embed.weight.data += (2.0 * y - 1)[:, None] * planted.axes()[8]
    return world.model, {"y": y}


def erased_by_verdict(seed: int, n: int, size: float) -> bool:
    """Whether ``pl.erase`` calls the label erased that its eraser leaves as the product of three signs."""
    model, labels = secret(size)
    tokens = torch.randint(len(labels["y"]), (n + 400, LENGTH), generator=generator(seed, 9))
    batch = pl.Batch(tokens, {"y": labels["y"][tokens]})
    options: dict[str, Any] = {"sites": SITE, "kinds": ("random",), "controls": 2, "batch_size": 1000}
    found = pl.erase(model, batch[:400], batch[400:], seed=seed, **options)
    return bool(found.rows[0]["verdict"] == "erased")


# Interchanges


def pairs_of(name: str, seed: int, n: int = 150) -> pl.PatchPairs:
    """Runs of one position that differ in every variable, and what the model answers to each."""
    gen = generator(seed, 5)
    world, at = made(name), torch.full((n,), LENGTH - 1)
    clean = some_of(name, seed, n).tokens
    corrupted = clean.clone()
    corrupted[:, -1] = clean[torch.randperm(n, generator=gen), -1] if name == "crowded" else clean[:, -1] ^ 3
    with torch.no_grad():
        said = [world.model(tokens)[:, -1].argmax(-1) for tokens in (clean, corrupted)]
    kept = said[0] != said[1]
    return pl.PatchPairs(clean[kept], corrupted[kept], at[kept], at[kept], torch.stack(said, 1)[kept])


@functools.cache
def direction_of_z() -> pl.Subspace:
    """The direction of the variable that nothing reads."""
    world = made("unused")
    return pl.subspaces.class_means(world.acts(world.fit), world.fit.labels["z"])


def called_used(seed: int, name: str, space: pl.Subspace | None = None, rank: int = 2) -> bool:
    """Whether an interchange of a subspace that isn't what the model uses is called "used"."""
    if space is None:
        space = pl.subspaces.random(rank, len(mean_of(name)), seed=3_000_000 + seed, mean=mean_of(name))
    found = pl.interchange(
        made(name).model, pairs_of(name, seed), {SITE: space}, pos=LENGTH - 1, seed=seed, batch_size=500
    )
    return any(row["condition"] == "target" and row["verdict"] == "used" for row in found.rows)


# Accuracies of probes


def accuracy_holds(seed: int, gap: float, alike: bool) -> bool:
    """Whether the interval of a probe's accuracy holds its accuracy on 4,000 new sequences."""
    gen = generator(seed, 6)

    def sample(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(2, (n, 5), generator=gen)
        noise = torch.randn(n, 5, 3, generator=gen)
        if alike:  # sequences are easy or hard as a whole
            noise = noise * (0.5 + torch.rand(n, 1, 1, generator=gen) * 1.5)
        noise[..., 0] += gap * (2 * y - 1)
        return noise, y

    (x, y), (new, truth) = sample(300), sample(4000)
    found = pl.probe({"a": x}, y, Cs=(1.0,), seed=seed)
    right = (new @ found.coef("a").T + found.intercept("a")).argmax(-1) == truth
    row = found.rows[0]
    return bool(row["lo"] <= float(right.double().mean()) <= row["hi"])


COVERAGE = (0.93, 0.97)
EFFECT, SWEEP = "An effect's 95 % interval holds the truth", "Some of 13 unused sites has an adjusted p of at most 0.05"
NEEDED = "What isn't used is called needed"
ERASED, USED, PROBE = (
    "A label that is left is called erased",
    "A subspace that isn't used is called used",
    "The 95 % interval of a probe's accuracy holds its accuracy on new sequences",
)


def random_targets(name: str, rank: int, draws: int, n: int) -> Check:
    """Whether intervals of random subspaces of a planted model hold 0."""
    what = f"`{name}`, random targets of rank {rank}, {draws} draws"
    return Check(EFFECT, what, COVERAGE, n, lambda s: random_target_holds(s, name, rank, draws))


def by_hand(group: str, what: str, aim: tuple[float, float], n: int, run: Callable[[int], bool]) -> Check:
    """A check of statistics alone, without a model."""
    return Check(group, what, aim, n, run, ("numerics",))


def left(what: str, n: int, run: Callable[[int], bool]) -> Check:
    """A check of what is called erased."""
    return Check(ERASED, what, (0.0, 0.05), n, run)


CHECKS = (
    by_hand(EFFECT, "no effect, normal costs, 20 draws", COVERAGE, 1500, lambda s: null_holds(s, 20, 0.2)),
    by_hand(EFFECT, "no effect, normal costs, 99 draws", COVERAGE, 1500, lambda s: null_holds(s, 99, 0.2)),
    by_hand(EFFECT, "no effect, draws alike, 99 draws", COVERAGE, 1500, lambda s: null_holds(s, 99, 0.02)),
    by_hand(EFFECT, "no effect, skewed costs, 99 draws", COVERAGE, 1500, lambda s: null_holds(s, 99, 0.2, True)),
    by_hand(EFFECT, "an effect of 0.5, 20 draws", COVERAGE, 1500, lambda s: truth_holds(s, 20, 0.2, 0.5)),
    by_hand(EFFECT, "an effect of 0.5, 99 draws", COVERAGE, 1500, lambda s: truth_holds(s, 99, 0.2, 0.5)),
    random_targets("unused", 4, 20, 300),
    random_targets("unused", 4, 99, 80),
    random_targets("crowded", 2, 20, 200),
    random_targets("crowded", 2, 99, 60),
    Check(EFFECT, "`unused`, the direction that is read, 20 draws", COVERAGE, 100, true_effect_holds),
    by_hand(SWEEP, "max-T, 99 draws", (0.0, 0.06), 20_000, lambda s: some_site(s, 99, max_t_over_sites)),
    by_hand(SWEEP, "Holm, 259 draws", (0.0, 0.06), 20_000, lambda s: some_site(s, 20 * SITES - 1, by_holm)),
    Check(NEEDED, "one of 13 sites, random directions", (0.0, 0.06), 100, lambda s: called_needed(s, False)),
    Check(NEEDED, "one of 13 sites, a label by chance", (0.0, 0.06), 60, lambda s: called_needed(s, True)),
    Check(NEEDED, "a label that goes with the one that is used", (0.0, 0.05), 25, lambda s: beside_needed(s, None)),
    Check(NEEDED, "the same, erased given that one", (0.0, 0.05), 25, lambda s: beside_needed(s, "y")),
    left("beside noise, residue of 1.4, 120 sequences", 75, lambda s: called_erased(s, 120, 1.4)),
    left("beside noise, residue of 1.4, 200 sequences", 75, lambda s: called_erased(s, 200, 1.4)),
    left("beside noise, residue of 2, 100 sequences", 75, lambda s: called_erased(s, 100, 2.0)),
    left("`pl.erase`, residue of 1, 150 sequences", 75, lambda s: erased_by_verdict(s, 150, 3.16)),
    left("`pl.erase`, residue of 1.2, 300 sequences", 75, lambda s: erased_by_verdict(s, 300, 4.0)),
    left("`pl.erase`, residue of 1.5, 300 sequences", 75, lambda s: erased_by_verdict(s, 300, 6.0)),
    left("`pl.erase`, residue of 2, 300 sequences", 40, lambda s: erased_by_verdict(s, 300, 12.0)),
    Check(USED, "`unused`, the direction of z", (0.0, 0.05), 75, lambda s: called_used(s, "unused", direction_of_z()), SWAPPED),
    Check(USED, "`unused`, random subspaces of rank 2", (0.0, 0.05), 75, lambda s: called_used(s, "unused"), SWAPPED),
    Check(USED, "`crowded`, random subspaces of rank 4", (0.0, 0.05), 75, lambda s: called_used(s, "crowded", rank=4), SWAPPED),
    Check(PROBE, "accuracy near 0.8", (0.93, 1.0), 300, lambda s: accuracy_holds(s, 0.85, False), READ),
    Check(PROBE, "accuracy near 0.8, sequences easy or hard", (0.93, 1.0), 300, lambda s: accuracy_holds(s, 1.0, True), READ),
    Check(PROBE, "accuracy near 0.99, sequences easy or hard", (0.93, 1.0), 300, lambda s: accuracy_holds(s, 3.0, True), READ),
    Check(PROBE, "accuracy near 0.999", (0.93, 1.0), 300, lambda s: accuracy_holds(s, 3.1, False), READ),
)  # fmt: skip

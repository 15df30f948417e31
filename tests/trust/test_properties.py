"""Any numbers, shapes, dtypes, masks, positions and batch sizes: a right answer, or one of our errors."""

from __future__ import annotations

import importlib
import inspect
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import primitives
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import probelens as pl
from probelens import edits, metrics, probing, stats, subspaces
from probelens.kernels import rnn, ssm
from probelens.numerics import indices, permutation, tensors
from probelens.probing import controls, splits

SEED = st.integers(0, 2**31)
JUNK: tuple[Any, ...] = (None, 1, -1, 0.5, math.nan, "x", b"x", [], {}, (1,), np.zeros(3), np.zeros((2, 2)))


class Some:
    """Arguments of every kind, by a seed: often of shapes that fit each other, often not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.x = self.floats() if self.chance(0.7) else self.anything()
        self.y = self.labels()
        self.mask = self.a_mask()

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def shape(self, least: int = 0) -> tuple[int, ...]:
        sizes = (0, 1, 2, 3, 4) if self.chance(0.2) else (1, 2, 3, 4, 4)
        return tuple(self.rng.choice(sizes) for _ in range(self.rng.randint(least, 4)))

    def tensor(self, dtype: torch.dtype) -> Tensor:
        x = torch.randn(self.shape(), generator=self.gen)
        if dtype == torch.bool:
            return x > 0
        if not dtype.is_floating_point:
            return (x * 2).round().clamp(-1 if self.chance(0.2) else 0, 5).to(dtype)
        x = x.to(dtype)
        if self.chance(0.15) and x.numel():
            x.view(-1)[self.rng.randrange(x.numel())] = self.pick(math.nan, math.inf, -math.inf, 1e30, 0.0)
        return x

    def floats(self) -> Tensor:
        return self.tensor(self.pick(torch.float32, torch.float64))

    def ids(self) -> Tensor:
        return self.tensor(torch.int64)

    def anything(self) -> Any:
        dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
        return self.rng.choice(JUNK) if self.chance(0.2) else self.tensor(self.rng.choice(dtypes))

    def labels(self) -> Any:
        if not isinstance(self.x, Tensor) or self.chance(0.2):
            return self.anything()
        lead = self.x.shape[: self.x.ndim - 1] if self.chance(0.8) else self.x.shape[:1]
        return torch.randint(3, lead, generator=self.gen)

    def a_mask(self) -> Any:
        if not isinstance(self.x, Tensor) or self.chance(0.5):
            return self.pick(None, None, self.tensor(torch.bool))
        return torch.rand(self.x.shape[:-1], generator=self.gen) > 0.3

    def space(self, d: int = 4) -> pl.Subspace:
        rows = torch.linalg.qr(torch.randn(d, d, generator=self.gen))[0][: self.pick(0, 1, 2, d)]
        return pl.Subspace(rows, torch.randn(d, generator=self.gen))

    def sequences(self) -> tuple[Any, Any]:
        """Activations with labels, enough for a split; or anything."""
        if self.chance(0.5):
            return self.x, self.pick(self.y, self.floats())
        x = torch.randn(self.pick(6, 12), 3, 4, generator=self.gen)
        return x, self.pick(torch.randint(2, x.shape[:2], generator=self.gen), x[..., 0], self.y)

    def rank(self) -> int:
        return self.pick(0, 1, 2, 3, 9, -1)

    def positions(self) -> Any:
        return self.pick(
            None, None, 0, -1, 7, slice(0, 2), [0, 1], [], [9], torch.tensor([0, 1]), "x", 1.5,
            torch.ones(4, 4, dtype=torch.bool), torch.tensor([[0]]),
        )  # fmt: skip

    def sigma(self) -> Any:
        return self.pick(self.x, torch.diag(torch.arange(1.0, 5.0)))

    def edit(self) -> edits.Edit:
        pos, value = self.positions(), self.pick(self.floats(), 1.0)
        return self.pick(
            lambda: edits.zero(pos), lambda: edits.mean(value, pos), lambda: edits.resample(self.floats(), pos=pos),
            lambda: edits.project(self.space(), pos=pos), lambda: edits.replace(value, pos),
            lambda: edits.add(value, pos=pos), lambda: edits.scale(2.0, pos),
            lambda: edits.erase(self.space().project_out, 0.5, pos),
        )()  # fmt: skip

    def split(self) -> splits.Split:
        return splits.split_by_group(torch.arange(max(4, len(self.y) if np.ndim(self.y) else 4)))


# The package has functions of these names, too.
erasure, inlp = (importlib.import_module(f"probelens.subspaces.{name}") for name in ("leace", "inlp"))

# One call of every public function of numbers, with arguments of every kind.
CALLS: dict[str, Callable[[Some], Any]] = {
    "metrics.accuracy": lambda s: metrics.accuracy(s.x, s.y, s.mask),
    "metrics.balanced_accuracy": lambda s: metrics.balanced_accuracy(s.x, s.y, s.mask),
    "metrics.cross_entropy": lambda s: metrics.cross_entropy(s.x, s.y, s.mask),
    "metrics.kl": lambda s: metrics.kl(s.x, s.pick(s.x, s.anything()), s.mask),
    "metrics.logit_diff": lambda s: metrics.logit_diff(s.x, s.pick(s.y, torch.tensor([[0, 1]] * 4))),
    "metrics.recovered": lambda s: metrics.recovered(s.x, s.floats(), s.floats()),
    "metrics.mse": lambda s: metrics.mse(s.x, s.pick(s.x, s.floats()), s.mask),
    "metrics.r2": lambda s: metrics.r2(s.x, s.pick(s.x, s.floats()), s.mask),
    "stats.exact_interval": lambda s: stats.exact_interval(s.pick(0, 3, 2.5, -1, math.nan), s.pick(3, 0, 9.5, math.nan)),
    "stats.share_interval": lambda s: stats.share_interval(s.pick(s.x, torch.rand(3)), s.pick(s.x, torch.ones(3))),
    "stats.hierarchical_bootstrap": lambda s: stats.hierarchical_bootstrap(
        s.x, s.pick(None, None, s.y), n_draws=s.pick(1, 2, 20), level=s.pick(0.95, 0, 1.5)
    ),
    "stats.contrast": lambda s: stats.contrast([s.x, s.pick(s.x, s.floats())], [1, -1], n_draws=10),
    "stats.paired_difference": lambda s: stats.paired_difference(s.x, s.pick(s.x, s.floats()), n_draws=10),
    "stats.ratio_of_means": lambda s: stats.ratio_of_means(s.x, s.pick(s.x, s.floats()), n_draws=10),
    "stats.sign_flip": lambda s: stats.sign_flip(
        s.x, alternative=s.pick("two-sided", "less", "greater", "other"), n_permutations=s.pick(0, 1, 50)
    ),
    "stats.max_t": lambda s: stats.max_t(s.x, n_permutations=50),
    "stats.holm": lambda s: stats.holm(s.pick(s.x, torch.rand(3, generator=s.gen))),
    "stats.smallest_p": lambda s: stats.smallest_p(s.pick(0, 1, 5, 100_000, -1)),
    "indices.profile_statistics": lambda s: indices.profile_statistics(
        s.pick(s.x, torch.rand(2, 5, generator=s.gen)), s.pick(0.5, s.floats(), 1.0, -1)
    ),
    "indices.profile_indices": lambda s: indices.profile_indices(
        s.pick(s.x, torch.rand(2, 3, 5, generator=s.gen)), s.pick(0.5, s.floats(), 1.0), n_draws=10
    ),
    "indices.reversal": lambda s: indices.reversal(*[s.pick(s.x, torch.rand(2, 3, 5))] * 4, s.pick([0.5] * 4, s.floats())),
    "subspaces.from_probe": lambda s: subspaces.from_probe(
        s.x, s.pick(s.floats(), torch.zeros(4)), s.pick(None, s.floats()), rank=s.pick(None, s.rank())
    ),
    "subspaces.mean_difference": lambda s: subspaces.mean_difference(s.x, s.y, s.mask),
    "subspaces.class_means": lambda s: subspaces.class_means(s.x, s.y, s.mask, rank=s.pick(None, s.rank())),
    "subspaces.pca": lambda s: subspaces.pca(s.x, s.rank(), s.mask),
    "subspaces.svd": lambda s: subspaces.svd(s.x, s.rank(), s.mask),
    "subspaces.top_pca": lambda s: subspaces.top_pca(s.rank(), s.sigma(), s.floats()),
    "subspaces.random": lambda s: subspaces.random(s.rank(), s.pick(0, 1, 3), mean=s.pick(None, s.floats())),
    "subspaces.random_matched": lambda s: subspaces.random_matched(s.space(), s.sigma(), n=s.pick(0, 1, 2)),
    "subspaces.orthogonal_pca": lambda s: subspaces.orthogonal_pca(s.space(), s.sigma(), mean=s.pick(None, s.floats())),
    "subspaces.oracle": lambda s: subspaces.oracle(s.x, s.y, s.mask, given=s.pick(None, None, s.ids())),
    "subspaces.quadratic": lambda s: subspaces.quadratic(s.x, s.y, s.mask),
    "subspaces.moments": lambda s: subspaces.moments(s.x, s.mask),
    "subspaces.probe_rows": lambda s: subspaces.probe_rows(s.x),
    "subspaces.Subspace": lambda s: pl.Subspace(s.x, s.floats()),
    "subspaces.Subspace.project_out": lambda s: s.space().project_out(s.x),
    "subspaces.Subspace.project_out_raw": lambda s: s.space().project_out_raw(s.x),
    "subspaces.Subspace.keep": lambda s: s.space().keep(s.x),
    "subspaces.Subspace.variance_removed": lambda s: s.space().variance_removed(s.sigma()),
    "leace.leace": lambda s: erasure.leace(s.x, s.y, s.mask),
    "tensors.flat_rows": lambda s: tensors.flat_rows(s.x, s.y, mask=s.mask),
    "inlp.inlp": lambda s: inlp.inlp(s.x, s.y, mask=s.mask, max_rank=1),
    "probing.LinearProbe": lambda s: pl.LinearProbe(C=s.pick(1.0, 1e-3, 0, -1)).fit(s.floats(), s.pick(s.y, s.ids())),
    "probing.RidgeProbe": lambda s: probing.RidgeProbe(s.pick(1.0, 0, -1)).fit(s.floats(), s.pick(s.floats(), s.ids())),
    "probing.MLPProbe": lambda s: probing.MLPProbe(max_epochs=1).fit(s.x, s.y, s.x, s.y),
    "probing.online_codelength": lambda s: probing.online_codelength(s.x, s.y),
    "probing.probe": lambda s: pl.probe(*s.sequences(), mask=s.pick(None, s.mask), n_boot=s.pick(0, 1, 10)),
    "probing.refit_accuracy": lambda s: probing.refit_accuracy(
        s.x, s.x, s.y, s.pick(s.mask, torch.ones(np.shape(s.y), dtype=torch.bool)), torch.arange(s.pick(4, 6)), mlp=False
    ),
    "probing.fit_path": lambda s: probing.fit_path(s.x, s.y),
    "probing.ridge_path": lambda s: probing.ridge_path(s.x, s.pick(s.floats(), s.y), s.pick(1.0, 0, -1, math.nan)),
    "probing.control_labels": lambda s: probing.control_labels(s.ids(), s.pick(s.y, s.ids()), s.mask),
    "probing.split_by_group": lambda s: probing.split_by_group(s.ids(), s.pick((0.6, 0.2, 0.2), (1, 0, 0), (0.5, 0.5))),
    "probing.contexts": lambda s: controls.contexts(s.ids(), s.pick(1, 2, 4), w=s.pick(None, 0, 1, 2)),
    "probing.copies_together": lambda s: splits.copies_together(s.ids(), s.ids()),
    "edits": lambda s: s.edit()(s.x),
    "tensors.to_float64": lambda s: tensors.to_float64(s.floats()),
}  # fmt: skip

# Public functions that other tests put everything to.
ELSEWHERE = {
    "metrics.with_references": "test_any_input",
    "stats.coverage": "test_stats", "indices.verdict": "test_indices", "probing.selectivity": "test_controls",
    "subspaces.between_share": "test_directions", "subspaces.directions": "test_directions", "subspaces.variance_share": "test_directions",
    "rnn.rnn_forward": "test_rnn", "rnn.cell_points": "test_rnn", "rnn.rnn_points": "test_rnn",
    "rnn.cell_forward": "test_rnn", "ssm.causal_conv": "test_properties", "ssm.is_mamba2": "test_ssm",
    "ssm.mamba2_mixer": "test_ssm", "ssm.mamba_mixer": "test_ssm", "ssm.mamba_step": "test_ssm",
    "ssm.fused_kernel": "test_scan", "ssm.segments": "test_scan", "ssm.selective_scan": "test_scan", "ssm.ssd_scan": "test_scan",
}  # fmt: skip


def test_every_public_function_of_numbers_is_put_to_everything() -> None:
    modules = (metrics, stats, indices, subspaces, erasure, inlp, probing, rnn, ssm, permutation)
    public = {
        f"{module.__name__.split('.')[-1]}.{name}": getattr(module, name)
        for module in modules
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    covered = {inspect.unwrap(fn) for key, fn in public.items() if key in CALLS or key in ELSEWHERE}
    assert [key for key, fn in public.items() if inspect.unwrap(fn) not in covered] == []
    assert {f"probing.{n}" for n in probing.__all__ if n.endswith("Probe")} <= set(CALLS)
    sources = {path.stem: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for name, home in ELSEWHERE.items():
        assert name.rpartition(".")[2] in sources[home].read_text(), name


# An estimator must refuse labels as scikit-learn does.
SKLEARN = ("probing.LinearProbe", "probing.RidgeProbe")


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_every_kind_give_numbers_or_one_of_our_errors(name: str) -> None:
    # Drawn by number, not by hypothesis: what is wanted here is breadth, and each case is its own smallest.
    said: list[str] = []
    for seed in range(400):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                CALLS[name](Some(seed))
            except pl.ProbelensError as err:
                said.append(str(err))
            except Exception as err:
                if name in SKLEARN and isinstance(err, ValueError):
                    continue
                raise AssertionError(f"{name}, seed {seed}: {type(err).__name__}: {err}") from err
    assert all(len(words) > 20 for words in said), "an error that says nothing"
    assert said or name == "tensors.to_float64", "the control: some of it can't be used"


def test_some_of_those_arguments_can_be_used() -> None:
    used = set()
    for name, call in CALLS.items():
        for seed in range(400):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(Some(seed))
            except (pl.ProbelensError, ValueError):
                continue
            used.add(name)
            break
    assert set(CALLS) - used <= {"subspaces.Subspace", "subspaces.probe_rows"}


# -- right numbers, whatever the shape --------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
few = settings(max_examples=40, deadline=None)


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(2, 5), DTYPES, SEED)
def test_metrics_are_those_of_numpy(lead: list[int], classes: int, dtype: torch.dtype, seed: int) -> None:
    logits = drawn((*lead, classes), seed, dtype)
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, lead, generator=gen)
    mask = torch.rand(lead, generator=gen) > 0.4
    x, y, keep = logits.double().numpy(), labels.numpy(), mask.numpy()
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    right = (x.argmax(-1) == y).astype(float)
    loss = -np.take_along_axis(log_p, y[..., None], -1)[..., 0]
    for found, wanted in ((metrics.accuracy, right), (metrics.cross_entropy, loss)):
        each = [w[k].mean() if k.any() else np.nan for w, k in zip(np.atleast_1d(wanted), np.atleast_1d(keep))]
        assert np.allclose(found(logits, labels, mask), each, atol=2e-6, equal_nan=True)
        assert found(logits, labels, mask).shape == (lead[0],)
    if keep.any():
        per_class = [right[keep & (y == c)].mean() for c in range(classes) if (keep & (y == c)).any()]
        assert float(metrics.balanced_accuracy(logits, labels, mask)) == pytest.approx(np.mean(per_class), abs=1e-6)
    assert metrics.kl(logits, logits, mask).nan_to_num().abs().max() < 1e-6
    assert float(metrics.kl(logits, drawn(logits.shape, seed + 1)).min()) > -1e-6
    one, two = drawn((), seed), drawn((), seed + 1)
    assert torch.allclose(metrics.recovered(two + (one - two) * logits.double(), one, two), logits.double())


@few
@given(st.integers(2, 6), st.integers(2, 8), st.integers(0, 3), st.floats(0.5, 0.99), SEED)
def test_intervals_hold_their_estimate_and_do_not_depend_on_the_form(
    seeds: int, examples: int, features: int, level: float, seed: int
) -> None:
    values = drawn((seeds, examples, *[features] * bool(features)), seed)
    found = stats.hierarchical_bootstrap(values, n_draws=50, level=level, seed=seed)
    assert torch.allclose(found.estimate, values.mean((0, 1)))
    assert bool((found.low <= found.estimate).all())
    assert bool((found.estimate <= found.high).all())
    flat = stats.hierarchical_bootstrap(
        values.flatten(0, 1), torch.arange(seeds).repeat_interleave(examples), n_draws=50, level=level, seed=seed
    )
    assert torch.equal(flat.low, found.low)
    wider = stats.hierarchical_bootstrap(values, n_draws=50, level=0.999, seed=seed)
    assert bool((wider.high - wider.low >= found.high - found.low - 1e-12).all())
    moved = stats.hierarchical_bootstrap(values * 2 + 1, n_draws=50, level=level, seed=seed)
    assert torch.allclose(moved.low, found.low * 2 + 1)
    difference = stats.paired_difference(values, values, n_draws=20)
    assert not difference.low.any()
    assert not difference.high.any()


@few
@given(st.integers(2, 9), st.integers(1, 4), st.sampled_from(["two-sided", "greater", "less"]), SEED)
def test_p_values_are_probabilities_and_adjusting_them_makes_none_smaller(
    n: int, tests: int, side: Any, seed: int
) -> None:
    differences = drawn((n, tests), seed)
    found = stats.sign_flip(differences, alternative=side, n_permutations=200)
    floor = stats.smallest_p(n, side)
    assert bool((found.p >= floor - 1e-12).all())
    assert bool((found.p <= 1).all())
    for adjusted in (stats.holm(found.p), stats.max_t(differences, alternative=side, n_permutations=200)):
        assert adjusted.shape == (tests,)
        assert bool((adjusted <= 1).all())
    assert bool((stats.holm(found.p) >= found.p - 1e-12).all())
    order = found.p.argsort()
    assert bool((stats.holm(found.p)[order].diff() >= -1e-12).all())


@few
@given(st.integers(2, 8), st.integers(1, 8), DTYPES, st.lists(st.integers(1, 3), max_size=2), SEED)
def test_subspaces_are_projections(d: int, rank: int, dtype: torch.dtype, lead: list[int], seed: int) -> None:
    if rank > d:
        with pytest.raises(pl.InputError, match="rank"):
            subspaces.random(rank, d, seed)
        return
    x = drawn((*lead, d), seed, dtype)
    space = subspaces.random(rank, d, seed, mean=drawn((d,), seed + 1))
    out, kept = space.project_out(x), space.keep(x)
    assert out.shape == x.shape
    assert out.dtype == dtype
    exact = space.project_out(x.double())
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)
    assert torch.allclose(out.double(), exact, atol=tolerance)
    assert torch.allclose(space.project_out(exact), exact, atol=1e-9), "once is as often as one likes"
    assert (exact - space.mean).matmul(space.basis.mT).abs().max() < 1e-9
    assert torch.allclose(exact + space.keep(x.double()), x.double() + space.mean, atol=1e-9)
    assert kept.dtype == dtype
    rows = drawn((20, d), seed + 2)
    for found in (subspaces.pca(rows, rank), subspaces.svd(rows, rank)):
        assert torch.allclose(found.basis @ found.basis.mT, torch.eye(rank, dtype=torch.float64), atol=1e-9)


@few
@given(st.integers(1, 6), st.integers(2, 4), st.integers(12, 30), SEED)
def test_an_eraser_makes_the_class_means_equal_and_stays(d: int, classes: int, n: int, seed: int) -> None:
    x, y = drawn((n, d), seed), torch.arange(n) % classes
    x[:, 0] += y
    eraser = pl.leace(x, y)
    out = eraser(x)
    means = torch.stack([out[y == c].mean(0) for c in range(classes)])
    assert (means - means[0]).abs().max() < 1e-7
    assert torch.allclose(eraser(out), out, atol=1e-7)
    assert torch.allclose(out.mean(0), x.mean(0), atol=1e-9)
    assert eraser.rank <= min(classes - 1, d)
    mask = torch.arange(n) % 3 > 0
    assert torch.equal(pl.leace(x, y, mask)(x), pl.leace(x[mask], y[mask])(x))


@few
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), DTYPES,
    st.one_of(st.none(), st.integers(-5, 4), st.lists(st.integers(-5, 4), max_size=3)), SEED,
)  # fmt: skip
def test_edits_change_what_they_should_and_nothing_in_place(
    batch: int, length: int, d: int, dtype: torch.dtype, pos: Any, seed: int
) -> None:
    x = drawn((batch, length, d), seed, dtype)
    before = x.clone()
    places = list(range(length)) if pos is None else [pos] if isinstance(pos, int) else pos
    value = drawn((d,), seed + 1, dtype)
    calls = {
        edits.zero(pos): torch.zeros_like(x), edits.scale(3.0, pos): x * 3,
        edits.replace(value, pos): value.expand_as(x), edits.mean(value, pos): value.expand_as(x),
        edits.add(value, 2.0, pos): (x.float() + 2 * value.float()).to(dtype)
        if dtype != torch.float64 else x + 2 * value,
    }  # fmt: skip
    for edit, wanted in calls.items():
        if not places or not all(-length <= p < length for p in places):
            with pytest.raises(pl.InputError, match="allowed are" if places else "names no position"):
                edit(x)
            continue
        out = edit(x)
        here = torch.zeros(length, dtype=torch.bool)
        here[[p % length for p in places]] = True
        assert out.dtype == dtype
        assert torch.equal(out[:, here], wanted[:, here])
        assert torch.equal(out[:, ~here], x[:, ~here])
        assert torch.equal(x, before)


@few
@given(st.integers(1, 4), st.integers(2, 4), st.integers(30, 60), st.sampled_from([torch.float32, torch.float64]), SEED)
def test_probes_of_any_width_find_their_classes(d: int, classes: int, n: int, dtype: torch.dtype, seed: int) -> None:
    x, y = drawn((n, d), seed, dtype), torch.arange(n) % classes
    x[:, 0] += 20 * y
    probe = pl.LinearProbe(C=10.0).fit(x, y)
    assert probe.raw_coef_.shape == (classes, d)
    assert set(probe.predict(x)) <= set(range(classes))
    assert probe.score(x, y.numpy()) > 0.9
    assert np.allclose(probe.predict_proba(x).sum(1), 1, atol=1e-5)
    weighted = pl.LinearProbe(C=10.0).fit(x, y, sample_weight=torch.ones(n))
    assert np.allclose(probe.coef_, weighted.coef_, atol=1e-3)
    values = probing.RidgeProbe(1e-6).fit(x, 3 * x[:, 0] - 1)
    assert np.allclose(values.predict(x), 3 * x[:, 0] - 1, atol=0.1)
    ids = torch.arange(n) // 3
    found = splits.split_by_group(ids, seed=seed)
    sides = [set(ids[rows].tolist()) for rows in (found.train, found.val, found.test)]
    assert sum(map(len, sides)) == len(ids.unique())


@few
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.booleans(), SEED)
def test_kernels_of_any_size_are_the_plain_recurrence(
    batch: int, length: int, channels: int, states: int, biased: bool, seed: int
) -> None:
    x, dt = drawn((batch, length, channels), seed), drawn((batch, length, channels), seed + 1).exp()
    A, B, C = (
        -drawn((channels, states), seed + 2).exp(),
        drawn((batch, length, states), 1),
        drawn((batch, length, states), 2),
    )
    state, ys = torch.zeros(batch, channels, states, dtype=torch.float64), []
    for t in range(length):
        state = state * (dt[:, t, :, None] * A).exp() + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        ys.append((state * C[:, t, None]).sum(-1))
    found = ssm.selective_scan(x, dt, A, B, C)
    assert torch.allclose(found.y, torch.stack(ys, 1))
    assert torch.allclose(found.state, state)
    weight, bias = drawn((channels, states), seed + 3), drawn((channels,), seed + 4) if biased else None
    out, _ = ssm.causal_conv(x, weight, bias)
    padded = torch.nn.functional.pad(x.mT, (states - 1, 0))
    assert torch.allclose(out, torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=channels).mT)
    for kind in (torch.nn.LSTM, torch.nn.GRU):
        module = kind(channels, states, num_layers=2, batch_first=True, bidirectional=biased).double()
        wanted, got = module(x), rnn.rnn_forward(module, x)
        assert torch.allclose(wanted[0], got[0])


# -- tasks and models -------------------------------------------------------------------------------

TASKS = {
    "parity": lambda bos: pl.tasks.Parity(bos=bos), "dyck": lambda bos: pl.tasks.Dyck(k=2, max_depth=3, bos=bos),
    "counter": lambda bos: pl.tasks.Counter(bos=bos), "flip_flop": lambda bos: pl.tasks.FlipFlop(bos=bos),
    "S3": lambda bos: pl.tasks.GroupWords("S3", bos=bos), "Z5": lambda bos: pl.tasks.GroupWords("Z5", bos=bos),
}  # fmt: skip


@few
@given(st.sampled_from(list(TASKS)), st.booleans(), st.integers(1, 12), st.integers(1, 20), st.integers(0, 2**31))
def test_batches_of_any_size_are_what_a_task_says(name: str, bos: bool, n: int, length: int, seed: int) -> None:
    task = TASKS[name](bos)
    try:
        batch = task.sample(n, length, seed)
    except pl.InputError:
        assert name == "dyck", "only balanced strings come in some lengths alone"
        return
    assert batch.tokens.shape == batch.mask.shape == (n, length + bos)
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < task.d_vocab
    for label, values in batch.labels.items():
        counted = values[batch.mask]
        if not counted.numel():
            assert name == "flip_flop", "a label that begins with the first write"
            continue
        assert 0 <= int(counted.min()) <= int(counted.max()) < task.n_classes[label]
    assert not (batch.mask[:, 0].any() and bos)
    assert torch.equal(task.sample(n, length, seed).tokens, batch.tokens)
    # A label at t is a matter of the tokens up to t.
    short = max(1, length // 2) + bos
    again = task.label(batch.tokens[:, :short]) if hasattr(task, "label") else None
    if again is not None:
        assert all(torch.equal(again[k], v[:, :short]) for k, v in batch.labels.items())


@settings(max_examples=12, deadline=None)
@given(batch_size=st.integers(1, 40), family=st.sampled_from(["lstm-fused", "neox"]))
def test_the_batch_size_changes_no_number(batch_size: int, family: str) -> None:
    model, batch, other = pl.wrap(zoo.build(family)), primitives.BATCH, primitives.OTHER
    spaces = primitives.spaces(model)
    calls: tuple[Callable[[int], Any], ...] = (
        lambda size: pl.collect(model, batch, "layers", batch_size=size).tensors,
        lambda size: pl.patch(model, primitives.PAIRS, "layers", batch_size=size).values,
        lambda size: pl.attribute(model, primitives.PAIRS, "layers", batch_size=size).values,
        lambda size: pl.ablate(model, other, spaces, label="state", refit=False, controls=1, batch_size=size).rows,
        lambda size: (
            pl.ablate_component(model, other, "resid_post", "resample", target="state", draws=1, batch_size=size).rows
        ),
        lambda size: (
            pl.length_transfer(
                model, primitives.TASK, spaces, (8, 10), trained_length=8, n=5, controls=1, batch_size=size
            ).rows
        ),
    )
    for i, call in enumerate(calls):
        assert primitives.same(call(1000), call(batch_size), 1e-4), i
    for size in (0, -1):
        for call in calls:
            with pytest.raises(pl.InputError, match="batch"):
                call(size)


def test_what_checks_an_argument_keeps_its_gradient() -> None:
    x = drawn((3, 4), 0).requires_grad_()
    one, two = drawn((), 1), drawn((), 2)
    space = subspaces.random(2, 4)
    for out in (space.project_out(x), pl.leace(x, torch.tensor([0, 1, 0]))(x), metrics.recovered(x, one, two)):
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.any()

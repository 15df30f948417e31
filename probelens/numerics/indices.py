"""Where along the layers a variable becomes readable: profile statistics, verdict, reversal contrast.

Everything is computed from accuracies; nothing here runs a model. The layer axis always starts
with the embedding, ℓ = −1, and goes on with blocks 0 to n − 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.bootstrap import Array, Values, as_array, as_tensor, by_seed
from probelens.numerics.stats import Interval, contrast, hierarchical_bootstrap
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["STATISTICS", "ProfileIndices", "profile_indices", "profile_statistics", "reversal", "verdict"]

STATISTICS = ("com", "concentration", "final_share", "early_share", "l95")
"""Names of the profile statistics."""

SOLVED = 0.95
READABLE = 0.2


@dataclass(frozen=True)
class ProfileIndices(Result):
    """The profile statistics of one architecture on one task, and the verdict that they allow.

    Args:
        verdict: "late", "immediate", "gradual", "undetermined" or "not learned".
        reason: The bounds that decided, in words.
        statistics: Intervals of ``STATISTICS`` in that order, within 0 and 1 (``l95``: −1 and the last block); None when
            not learned.
        accuracy: Mean over the learned seeds, or over all when none learned. (layer + 1,)
        readability: Running maximum R of the scaled accuracy, the same mean. (layer + 1,)
        baseline: Baseline of each seed. (seed,)
        learned: Which seeds solved the task and hold the variable at the last layer.
        per_seed: The verdict of each seed's point estimates: seeds that differ make no joint profile.
    """

    verdict: str
    reason: str
    statistics: Interval | None
    accuracy: Tensor
    readability: Tensor
    baseline: Tensor
    learned: tuple[bool, ...]
    per_seed: tuple[str, ...]

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each statistic; a single row of NaN when not learned."""
        import pandas as pd

        if self.statistics is None:
            table = pd.DataFrame({"statistic": [None], "estimate": [np.nan], "low": [np.nan], "high": [np.nan]})
        else:
            table = self.statistics.to_dataframe().drop(columns="index")
            table.insert(0, "statistic", list(STATISTICS))
        return table.assign(verdict=self.verdict, n_learned=sum(self.learned), n_trained=len(self.learned))

    def plot(self) -> go.Figure:
        """Accuracy and running readability against the layer."""
        import plotly.graph_objects as go

        layers = ["embed", *map(str, range(len(self.accuracy) - 1))]
        figure = go.Figure()
        for name in ("accuracy", "readability"):
            figure.add_scatter(x=layers, y=getattr(self, name).tolist(), name=name, mode="lines+markers")
        figure.add_hline(y=float(self.baseline.mean()), line_dash="dot", annotation_text="baseline")
        return figure.update_layout(title=f"verdict: {self.verdict}", xaxis_title="layer", yaxis_range=[0, 1.02])


def profile_statistics(accuracy: ArrayLike | Tensor, baseline: ArrayLike | Tensor) -> dict[str, Tensor]:
    """Five numbers that say at which layers a variable becomes readable.

    With r = clip((acc − b)/(1 − b), 0), R its running maximum, g the steps of R over blocks and p = g/Σg:
    ``com`` = Σ ℓ p/(n−1); ``concentration`` = (n Σ p² − 1)/(n − 1); ``final_share`` = p of the last block;
    ``early_share`` = R at the end of the first quarter over R at the end; ``l95`` = first ℓ, from −1, with R ≥ 0.95 of its end.

    Args:
        accuracy: Embedding first, then each block. (..., layer + 1)
        baseline: Accuracy of a guess; broadcasts. (...)

    Returns:
        Each statistic, (...): fractions, but ``l95`` counts layers. NaN where it is undefined: all where nothing is
        readable, and ``com``, ``concentration``, ``final_share`` where no block adds to the embedding.

    Raises:
        ShapeError: Fewer than two blocks.
        InputError: A baseline of 1 or more, or values that are not accuracies.

    Examples:
        >>> step = profile_statistics([0.5, 0.5, 0.5, 0.5, 1.0], 0.5)
        >>> float(step["com"]), float(step["final_share"]), float(step["l95"])
        (1.0, 1.0, 3.0)
    """
    scaled = _scaled(as_array(accuracy), as_array(baseline))
    return {name: as_tensor(value) for name, value in zip(STATISTICS, np.moveaxis(_statistics(scaled), -1, 0))}


def verdict(low: dict[str, float], high: dict[str, float]) -> tuple[str, str]:
    """The verdict on a profile whose statistics lie between these bounds, and its reason.

    *immediate* if ``early_share`` > 0.9; *late* if ``final_share`` > 0.5; *gradual* if ``concentration`` < 0.5 and
    ``com`` within (0.25, 0.75); each must hold at the interval's unfavourable end. *immediate* is asked first: where the
    embedding holds nearly everything, the last block's share of the rest says nothing about when that became readable.

    Args:
        low: Lower bound of each of ``STATISTICS``.
        high: Upper bound of each.

    Returns:
        The verdict and the bounds that decided.

    Examples:
        >>> ends = {"com": 0.9, "concentration": 0.8, "final_share": 0.7, "early_share": 0.1, "l95": 3}
        >>> verdict(ends, ends)[0]
        'late'
    """
    if low["early_share"] > 0.9:
        return "immediate", f"early share at least {low['early_share']:.3f}, above 0.9"
    if low["final_share"] > 0.5:
        return "late", f"final share at least {low['final_share']:.3f}, above 0.5"
    if high["concentration"] < 0.5 and low["com"] > 0.25 and high["com"] < 0.75:
        return "gradual", (
            f"concentration at most {high['concentration']:.3f}, below 0.5, and centre of mass "
            f"{low['com']:.3f} to {high['com']:.3f}, within 0.25 to 0.75"
        )
    bounds = ", ".join(f"{name} {low[name]:.3f} to {high[name]:.3f}" for name in STATISTICS[:4])
    return "undetermined", f"no pattern holds over the whole intervals: {bounds}"


def profile_indices(
    accuracy: Values,
    baseline: float | ArrayLike | Tensor,
    seeds: ArrayLike | Tensor | None = None,
    *,
    solved: float | ArrayLike | Tensor | None = None,
    n_draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> ProfileIndices:
    """Profile statistics with intervals over seeds and sequences, and the verdict by their bounds.

    The statistics are taken per seed and averaged. Averaging the accuracies first would turn
    seeds that each jump, at different layers, into one gradual rise.

    Args:
        accuracy: Accuracy of each test sequence at each layer, embedding first: (seed, sequence, layer + 1), a list
            with one (sequence, layer + 1) per seed, or (row, layer + 1) with ``seeds``.
        baseline: Accuracy of a guess: one number () or one per seed. (seed,)
        seeds: Seed of each row of flat accuracies. (row,)
        solved: The model's own accuracy at positions over 20: one number () or one per seed, (seed,). None skips this
            check, for pretrained models that were not trained on the task.
        n_draws, level, seed: As for ``hierarchical_bootstrap``.

    Returns:
        Statistics and verdict over the seeds that solved the task (``solved`` ≥ 0.95) and end
        with readability ≥ 0.2; "not learned" when no seed did. ``learned`` says which.

    Raises:
        ShapeError: Fewer than two blocks, or baselines that don't fit the seeds.
        InputError: NaN, or numbers that aren't accuracies.

    Examples:
        >>> jump = [[[0.5, 0.5, 0.5, 0.5, 1.0]] * 8] * 4
        >>> found = profile_indices(jump, baseline=0.5, solved=1.0)
        >>> found.verdict, found.reason
        ('late', 'final share at least 1.000, above 0.5')
    """
    rows = _sequences(accuracy, seeds)
    b = _per_seed(baseline, len(rows), "baseline")
    score = np.full(len(rows), 1.0) if solved is None else _per_seed(solved, len(rows), "solved")
    scaled = [_scaled(x, base, clip=False) for x, base in zip(rows, b)]
    ends = np.array([_running(x.mean(axis=0))[-1] for x in scaled])
    learned = tuple(bool(s >= SOLVED and r >= READABLE) for s, r in zip(score, ends))
    kept = [i for i, good in enumerate(learned) if good]
    shown = kept or range(len(rows))
    shared: dict[str, Any] = {
        "accuracy": as_tensor(np.mean([rows[i].mean(axis=0) for i in shown], axis=0)),
        "readability": as_tensor(np.mean([_running(scaled[i].mean(axis=0)) for i in shown], axis=0)),
        "baseline": as_tensor(b),
        "learned": learned,
        "per_seed": tuple(
            _words(_statistics(x.mean(axis=0)))[0] if good else "not learned" for x, good in zip(scaled, learned)
        ),
    }
    if not kept:
        solving = f"solved the task (accuracy {_span(score)}, needed {SOLVED})"
        reading = f"has the variable readable at the last block (R {_span(ends)}, needed {READABLE})"
        missing = [said for said, found in ((solving, score >= SOLVED), (reading, ends >= READABLE)) if not found.any()]
        reason = f"no seed {' or '.join(missing)}" if missing else f"no seed {solving} and {reading}"
        return ProfileIndices(verdict="not learned", reason=reason, statistics=None, **shared)
    found = _within(
        hierarchical_bootstrap(
            [scaled[i] for i in kept], statistic=_statistics, n_draws=n_draws, level=level, seed=seed
        ),
        scaled[0].shape[-1] - 1,
    )
    word, reason = _words(found.low.numpy(), found.high.numpy())
    if len(kept) < len(rows):
        reason += f"; over the {len(kept)} of {len(rows)} seeds that learned"
    return ProfileIndices(verdict=word, reason=reason, statistics=found, **shared)


def reversal(
    ssm_parity: Values,
    transformer_parity: Values,
    ssm_dyck: Values,
    transformer_dyck: Values,
    baselines: ArrayLike | Tensor,
    *,
    n_draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Whether two families swap, between two tasks, the order in which they build up a variable.

    Δ = [COM(SSM) − COM(Transformer)] on Parity − [the same] on Dyck. It is a reversal when the
    interval lies above 0: a difference in each task alone is not enough.

    Args:
        ssm_parity: Accuracies as in ``profile_indices``, of the seeds that learned.
        transformer_parity: The other family, same task.
        ssm_dyck: First family, other task.
        transformer_dyck: The other family, other task.
        baselines: One per cell, in this order. (4,)
        n_draws, level, seed: As for ``hierarchical_bootstrap``.

    Returns:
        The interval of Δ.

    Raises:
        ShapeError: Not four baselines, or fewer than two blocks.
        InputError: A seed without any readable layer: leave out the seeds that did not learn.

    Examples:
        >>> late, early = [[[0.5, 0.5, 0.5, 1.0]] * 4] * 3, [[[0.5, 1.0, 1.0, 1.0]] * 4] * 3
        >>> reversal(late, early, early, late, [0.5] * 4).estimate
        tensor(2., dtype=torch.float64)
    """
    cells = [_sequences(x, None) for x in (ssm_parity, transformer_parity, ssm_dyck, transformer_dyck)]
    b = as_array(baselines)
    if b.shape != (4,):
        raise ShapeError(f"baselines must be four, one per cell, got shape {b.shape}")
    scaled = [[_scaled(x, base, clip=False) for x in cell] for cell, base in zip(cells, b)]
    for name, cell in zip(("ssm_parity", "transformer_parity", "ssm_dyck", "transformer_dyck"), scaled):
        if any(not np.isfinite(_statistics(x.mean(axis=0))[0]) for x in cell):
            raise InputError(f"{name} has a seed with no centre of mass: leave out seeds that did not learn")
    return contrast(
        scaled,
        [1.0, -1.0, -1.0, 1.0],
        statistic=lambda means: _statistics(means)[..., 0],
        n_draws=n_draws,
        level=level,
        seed=seed,
    )


def _sequences(accuracy: Values, seeds: ArrayLike | Tensor | None) -> list[Array]:
    """Accuracies of each seed. (sequence, layer + 1)"""
    rows = by_seed(accuracy, seeds)
    if rows[0].ndim != 2:
        raise ShapeError(f"accuracies must be (sequence, layer + 1) for each seed, got {rows[0].shape}")
    return rows


def _scaled(accuracy: Array, baseline: Array, clip: bool = True) -> Array:
    if accuracy.ndim == 0 or accuracy.shape[-1] < 3:
        raise ShapeError(
            f"accuracies need the embedding and at least two blocks on the last axis, got {accuracy.shape}"
        )
    if not np.all((accuracy >= 0) & (accuracy <= 1)):
        raise InputError("accuracies must lie between 0 and 1 and not be NaN: drop sequences without a label")
    b = np.asarray(baseline)[..., None]
    if not np.all((b >= 0) & (b < 1)):
        raise InputError(f"baselines must be at least 0 and under 1, got {np.asarray(baseline).tolist()}")
    try:
        scaled = (accuracy - b) / (1 - b)
    except ValueError:
        raise ShapeError(
            f"baselines {np.asarray(baseline).shape} don't broadcast to accuracies {accuracy.shape}"
        ) from None
    return np.maximum(scaled, 0.0) if clip else scaled


def _running(scaled: Array) -> Array:
    return np.maximum.accumulate(np.maximum(scaled, 0.0), axis=-1)


def _statistics(scaled: Array) -> Array:
    """(..., layer + 1) scaled accuracies to (..., statistic)."""
    top = _running(scaled)
    n = top.shape[-1] - 1
    gain = np.diff(top, axis=-1)
    last = top[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        p = gain / gain.sum(axis=-1, keepdims=True)
        com = (p * np.arange(n)).sum(axis=-1) / (n - 1)
        concentration = (n * (p**2).sum(axis=-1) - 1) / (n - 1)
        early = top[..., -(-n // 4)] / last  # column 0 is ℓ = −1, so ℓ = ⌈n/4⌉ − 1 is column ⌈n/4⌉
    # Rounding may leave a share outside by its last digit.
    com, concentration, early = (np.clip(share, 0.0, 1.0) for share in (com, concentration, early))
    l95 = np.where(last > 0, np.argmax(top >= 0.95 * last[..., None], axis=-1) - 1.0, np.nan)
    return np.stack([com, concentration, p[..., -1], early, l95], axis=-1)


def _within(found: Interval, n_blocks: int) -> Interval:
    """Intervals without what no profile can have: shares beyond 0 and 1, layers beyond the last block.

    Student's width takes them there where few seeds differ; cutting it off leaves out no possible value.
    """
    low, high = torch.zeros(len(STATISTICS)), torch.ones(len(STATISTICS))
    low[-1], high[-1] = -1, n_blocks - 1
    low, high = low.to(found.low), high.to(found.low)
    ends = {name: getattr(found, name).clamp(low, high) for name in ("low", "high", "draws")}
    return dataclasses.replace(found, **ends)


def _words(low: Array, high: Array | None = None) -> tuple[str, str]:
    return verdict(dict(zip(STATISTICS, low)), dict(zip(STATISTICS, low if high is None else high)))


def _per_seed(value: Any, n_seeds: int, name: str) -> Array:
    found = as_array(value)
    if found.shape not in ((), (n_seeds,)):
        raise ShapeError(f"{name} must be one number or one per seed ({n_seeds}), got shape {found.shape}")
    if not np.isfinite(found).all():
        raise InputError(f"{name} must not be NaN")
    return np.broadcast_to(found, (n_seeds,)).copy()


def _span(values: Array) -> str:
    return f"{values.min():.3f} to {values.max():.3f}" if len(values) > 1 else f"{values[0]:.3f}"

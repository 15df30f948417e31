"""Ridge probes of a label of values refitted after an ablation, scored by R², as ``refit`` does for classes by accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probelens.numerics.modes import exact
from probelens.numerics.stats import ratio_of_means
from probelens.probing.intervals import by_group
from probelens.probing.refit import chance_margin
from probelens.probing.splits import FRACTIONS, Split, split_by_group
from probelens.probing.values import DEFAULT_ALPHAS, fit_values

__all__ = ["refit_values"]


@exact
def refit_values(
    clean: Tensor, ablated: Tensor, values: Tensor, mask: Tensor, groups: Tensor, *, margin: float = 0.02, seed: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """Whether values can still be read after an ablation: ridge probes over all positions and one at each.

    Args:
        clean: Activations before. (n, pos, d)
        ablated: Activations after. (n, pos, d)
        values: The values. (n, pos)
        mask: Where values count. (n, pos)
        groups: What a split keeps together. (n,)
        seed: Of the split.
        margin: How far above its baseline an R² still counts as nothing read.

    Returns:
        The columns of ``refit_check`` with R² in the place of accuracies and no MLP, and the refitted probe's R² at each
        position, NaN where that is undefined. (pos,)

    Raises:
        InputError: Too few groups to split.
    """
    values, split = values.double(), split_by_group(groups, FRACTIONS, seed)
    keep = mask[split.test]
    guesses = [_guess(x, values, mask, split) for x in (clean, ablated)]
    truth = values[split.test]
    before, after = (_r2(guess, truth, keep) for guess in guesses)
    lost = [(guess - truth).square().where(keep, 0.0).sum(1) for guess in guesses]
    low = high = None
    spread = (truth - truth[keep].mean()).square().where(keep, 0.0).sum(1)
    more, scale = by_group(groups[split.test], lost[1] - lost[0], spread)
    if len(more) > 1:
        found = ratio_of_means(more, scale, seed=seed)
        low, high = float(found.low), float(found.high)
    position = torch.stack(
        [values[split.train, t][mask[split.train, t]].mean() for t in range(values.shape[1])]
    ).nan_to_num(values[split.train][mask[split.train]].mean().item())
    baseline = max(0.0, _r2(position.expand(truth.shape), truth, keep))
    each = {name: _r2(_each(x, values, mask, split), truth, keep) for name, x in (("new", ablated), ("old", clean))}
    bar = baseline + chance_margin(min(baseline, 1.0), margin)
    row: dict[str, Any] = {
        "refit_score": "r2", "probe_accuracy": before, "refit_accuracy": after, "refit_gap": before - after, "refit_gap_lo": low,
        "refit_gap_hi": high, "refit_mlp_accuracy": None, "refit_n_test": int(keep.sum()), "majority": 0.0,
        "position_baseline": baseline, "baseline": baseline, "refit_position_accuracy": each["new"],
        "readable_after": max(after, each["new"]) > bar, "probe_mlp_accuracy": None, "probe_position_accuracy": None,
        "given_baseline": None, "powered": None, "residue_accuracy": None, "residue_size": None, "n_needed": None,
    }  # fmt: skip
    row["readable_before"] = row["readable_after"] or before > bar
    if not row["readable_before"]:
        row.update(probe_position_accuracy=each["old"], readable_before=each["old"] > bar)
    by_position = [_r2(guesses[1][:, t], truth[:, t], keep[:, t]) for t in range(keep.shape[1])]
    return row, torch.tensor(by_position)


def _guess(x: Tensor, values: Tensor, mask: Tensor, split: Split) -> Tensor:
    """What one ridge probe over all positions guesses on the test sequences; 0 where nothing counts. (test, pos)"""
    (found,) = fit_values(x, [{"label": values}], mask, split, DEFAULT_ALPHAS)
    keep = mask[split.test]
    return torch.zeros(keep.shape, dtype=torch.float64).masked_scatter(keep, found["label"].guess.double())


def _each(x: Tensor, values: Tensor, mask: Tensor, split: Split) -> Tensor:
    """What one ridge probe for each position guesses on the test sequences. (test, pos)"""
    mean = values[split.train][mask[split.train]].mean()
    out = mean.expand(len(split.test), x.shape[1]).clone()
    for t in range(x.shape[1]):
        at = slice(t, t + 1)
        if min(int(mask[rows, t].sum()) for rows in (split.train, split.val, split.test)) > 1:
            out[:, at] = _guess(x[:, at], values[:, at], mask[:, at], split)
    return out


def _r2(guess: Tensor, truth: Tensor, keep: Tensor) -> float:
    """R² where values count; NaN where they are equal."""
    y, found = truth[keep], guess[keep]
    spread = (y - y.mean()).square().sum()
    return float(1 - (found - y).square().sum() / spread) if len(y) > 1 and float(spread) > 0 else float("nan")

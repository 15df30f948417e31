"""``probe``: linear probes, with the baselines and controls that their scores are compared with.

Split by sequence, standardise on train, choose C on validation, test once; beside each score are its
baselines and, where asked for, the untrained model, a control task and the codelength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.modes import exact
from probelens.numerics.threads import few_threads
from probelens.probing.controls import control_labels
from probelens.probing.data import Data
from probelens.probing.fitting import Fitted
from probelens.probing.result import CONTROL, TASK, UNTRAINED, ProbeResult
from probelens.probing.rows import Recorder, guesses
from probelens.probing.solvers.logistic import DEFAULT_CS
from probelens.probing.splits import FRACTIONS, split_by_group
from probelens.probing.values import DEFAULT_ALPHAS, fit_values
from probelens.results.progress import progress_bar

__all__ = ["probe"]


@few_threads()
@exact
def probe(
    acts: Any,
    labels: Tensor | Mapping[str, Tensor],
    groups: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    tokens: Tensor | None = None,
    untrained: Any = None,
    control_task: bool = False,
    mdl: bool = False,
    w: int = 4,
    Cs: Sequence[float] = DEFAULT_CS,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    splits: Sequence[float] = FRACTIONS,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    max_rows: int | None = None,
    tol: float = 1e-3,
    n_boot: int = 1000,
    progress: bool = False,
) -> ProbeResult:
    """Fit linear probes at every site for every label, with baselines and controls beside each score.

    Args:
        acts: Activations, a dict of tensors by site, or one tensor. each (n, pos, d) or (n, d)
        labels: Class ids (integers, of any size) or numbers (floating point; ridge probes, scored by R²), one tensor or a
            dict by label. Where only some positions were collected, labels and masks may have all. Labels (n,) of
            activations (n, pos, d) hold at every position. each (n, pos) or (n,)
        groups: What a split keeps together, each sequence if None; equal inputs always: of a causal model the tokens up to
            the last position that counts, of any other the whole input. (n,)
        mask: Where labels count; ``acts.mask`` if None. (n, pos)
        tokens: For the position and last-w-tokens baselines; ``acts.tokens`` if None. Give those of all positions where
            only some were collected, and for (n, d) activations, to keep copies together. (n, pos) or (n, T)
        untrained: The same sites of the same architecture at random initialisation.
        control_task: Also probe labels that are a hash of the last few tokens (about 256 contexts), for selectivity.
        mdl: Also the online codelength of class labels.
        w: Window of the last-w-tokens baseline.
        Cs: Inverse penalties to choose from on validation, for class labels, until two in a row bring no gain.
        alphas: Penalties to choose from on validation, for numbers, on standardised features.
        splits: Shares of train, validation and test, of groups.
        seed: Seeds the split, where ``seeds`` is None.
        seeds: Several seeds, each with a split and probes of its own.
        max_rows: At most so many training rows of class labels, and of the codelength, drawn at random; None for all.
        tol: Relative gap in the objective at which the solver stops.
        n_boot: Resamples of test sequences for the interval of each R²; those of accuracies are computed.
        progress: Show a progress bar.

    Returns:
        Accuracies on the test sequences with 95 % intervals over their groups, ``share_interval``'s: one of 1 has a lower
        end below 1. Classes are numbered in ascending order of their ids, which ``classes`` keeps.

    Raises:
        ShapeError: Labels, mask or groups that don't fit the activations.
        InputError: NaN activations, one class only, a mask that is False everywhere, too few sequences.

    Source:
        Alain and Bengio 2016, arXiv 1610.01644; Hewitt and Liang 2019, arXiv 1909.03368 (selectivity);
        Voita and Titov 2020, arXiv 2003.12298 (codelength).

    Examples:
        >>> import torch
        >>> x = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> result = probe(x, (x[..., 2] > 0).long())
        >>> result.accuracy("activations") > 0.9
        True
    """
    data = Data.of(acts, labels, groups, mask, tokens)
    other = None if untrained is None else data.like(untrained)
    seeds = list(dict.fromkeys([seed] if seeds is None else seeds))
    if not seeds or not Cs:
        raise InputError("seeds and Cs must not be empty")
    if max_rows is not None and max_rows < 2:
        raise InputError(f"max_rows must be at least 2, got {max_rows}")
    if control_task and data.tokens is None:
        raise InputError("control_task=True needs tokens (n, pos): the control labels are a hash of the last ones")
    out = ProbeResult([], {}, {}, {}, {}, {}, {}, classes=dict(data.ids))
    with progress_bar(len(seeds) * len(data.tensors), "probes", progress) as bar:
        for s in seeds:
            split = split_by_group(data.groups, splits, s)
            data.check(split)
            controls = _controls(data, s) if control_task else {}
            record = Recorder(out, data, split, s, controls, guesses(data, split, w), n_boot)
            tasks = {**data.labels, **{f"{CONTROL}|{k}": controls[k] for k in data.labels if k in controls}}
            for site, x in data.tensors.items():
                fitted = Fitted.of(x, tasks, data.mask, split, Cs, tol, max_rows, s, data.labels, site)
                base = None
                if other is not None:
                    base = Fitted.of(other[site], data.labels, data.mask, split, Cs, tol, max_rows, s, site=site)
                out.means[f"{site}|{s}"] = fitted.mean
                record.site(site, fitted, base)
                if mdl:
                    record.codelength(site, x, Cs, tol, max_rows)
                bar.update(1)
            for site, x in data.tensors.items() if data.numbers else ():
                _numbers(record, site, x, None if other is None else other[site], alphas)
            record.embedding()
    return out


def _controls(data: Data, seed: int) -> dict[str, Tensor]:
    """Control labels for every label."""
    assert data.tokens is not None
    every = {**data.labels, **data.numbers}
    mask = data.spread(data.mask)
    made = {k: control_labels(data.tokens, data.spread(y), mask, seed=seed) for k, y in every.items()}
    if data.at is None:
        return made
    return {k: y[:, data.at] if data.at.ndim == 1 else y.gather(1, data.at) for k, y in made.items()}


def _numbers(record: Recorder, site: str, x: Tensor, other: Tensor | None, alphas: Sequence[float]) -> None:
    """Ridge probes of the numeric labels at one site, on the same split as the others."""
    data, split = record.data, record.split
    sets = {TASK: data.numbers}
    if record.controls:
        sets[CONTROL] = {label: record.controls[label] for label in data.numbers}
    fits = dict(zip(sets, fit_values(x, list(sets.values()), data.mask, split, alphas, site), strict=True))
    if other is not None:
        (untrained,) = fit_values(other, [data.numbers], data.mask, split, alphas, site)
        # Before the control task, as the rows of classes are ordered.
        fits = {TASK: fits.pop(TASK), UNTRAINED: untrained, **fits}
    record.numbers(site, fits)

"""Ablation of a subspace, with the refitted probe and the controls that its cost is compared with.

A drop after projecting a probe's direction out says nothing about necessity by itself. A probe
refitted on the ablated activations may recover, and random subspaces may cost as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.answers import Metric, reader
from probelens.ablation.comparing import Adjust, need_adjust
from probelens.ablation.controls import CONTROLS, Control, Draws, label_asked, label_of, with_controls
from probelens.ablation.given import Given, goes_with, names_given, strata_given
from probelens.ablation.reading import feeds_readout, moves_answers, unread_sites
from probelens.ablation.result import AblationResult
from probelens.ablation.scoring import accuracy_chance, after, run, score
from probelens.ablation.verdict import FLOOR, needed, verdict
from probelens.errors import InputError, metric_name
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped
from probelens.numerics.rounding import without_rounding
from probelens.probing.directions import Definition
from probelens.probing.refit import refit_check
from probelens.probing.refit_values import refit_values
from probelens.probing.result import ProbeResult
from probelens.probing.splits import groups_of
from probelens.running.collect import collect
from probelens.running.workers import Executor, takes_executor
from probelens.subspaces.directions import definition_of, spaces_of
from probelens.subspaces.leace import Eraser
from probelens.subspaces.oracle import OracleEraser, QuadraticEraser, bound
from probelens.subspaces.subspace import Subspace
from probelens.tasks.examples import spread_labels, spread_mask

__all__ = ["ablate"]

MARGIN = 0.02


@takes_executor
def ablate(
    model: HookedModel,
    batch: Any,
    subspaces: Mapping[Any, Subspace | Eraser | OracleEraser | QuadraticEraser] | ProbeResult,
    metric: Metric = "accuracy",
    refit: bool = True,
    controls: int | None = None,
    *,
    directions: Definition | None = None,
    rank: int | None = None,
    label: str | None = None,
    target: str | None = None,
    given: Given = None,
    kinds: Sequence[Control] = CONTROLS,
    adjust: Adjust = "max_t",
    alpha: float = 1.0,
    mlp: bool = True,
    margin: float = MARGIN,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
    executor: Executor = None,
) -> AblationResult:
    """Ablate a subspace at each site in turn, and measure the cost, the refit and the controls.

    Edits are made where ``batch.mask`` is True: a BOS token or padding keeps its activation. The
    refitted probe is trained and tested on ablated activations of ``batch``, split by sequence. At a state
    point every step is edited, and the probes see the states that the model then has.

    Args:
        model: The wrapped model; run in eval mode.
        batch: Inputs of any kind that the subspaces were not fitted on. (example, ...)
        subspaces: Site, named in any way that ``resolve`` takes, to Subspace (projected out, its mean kept) or Eraser
            (one that needs labels gets those of ``batch``);
            or a ProbeResult, of which ``directions`` says what is taken.
        metric: "accuracy" of the argmax of the logits against ``batch.labels[target]``, "next_token_loss" (nats), "r2" or
            "mse" of numbers against it, "kl" from the unedited run's distribution (nats), or a function of the outputs,
            logits (batch, pos, d_vocab) or (batch, ...), and, by keyword, ``tokens`` where there are any, ``mask`` and each
            label, returning (batch, pos), or (batch,) where the model answers once for each example.
            ``pl.metrics.with_references`` gives it tensors of its own, cut by example.
        refit: Fit probes on the ablated activations: linear, one at each position, and (``mlp``) a
            small MLP.
        controls: Draws of each random control; an effect takes at least 2. None for what p ≤ 0.05 takes: 20 at one site;
            at several 99 (``adjust="holm"``: 20 · sites − 1) of the control that the effect is measured from, 20 of the
            other. They run in the sweep of the subspaces themselves, which skips the blocks below.
        directions: What is taken of a ProbeResult: "class_means" (None), the span of the class means, in which the
            classes differ at all; "pattern", the covariance of the activations with what the probe reads; "filter", the
            probe's own rows, which may carry hardly any variance, so that removing them removes nothing; "leace", the
            oblique eraser. See ``probelens.subspaces.directions``.
        rank: At most so many directions of a ProbeResult, the first ones by the definition; None for all.
        label: The variable that the subspaces are about; needed unless the batch has one label.
        target: The label that the model answers with; ``label`` if None.
        given: Labels that the subspaces leave alone. A probe can read the variable through a label that goes with it, so
            the refitted probes then read rows in which these labels tell as little of it as can be, and what they do
            tell is a baseline: "erased" then means that nothing is read beyond them. See ``erase``.
        kinds: Controls: random subspaces of equal rank ("random"), of equal variance removed ("random_matched"), the top
            principal components of equal rank ("pca"), and the top ones orthogonal to the subspace ("orthogonal_pca").
        adjust: How p is adjusted for the number of sites: "max_t", the largest statistic over the sites in each draw,
            standardised at each site (Westfall and Young), or "holm".
        alpha: Strength: 1 removes the subspace, 0 nothing.
        mlp: Whether the refit includes the MLP.
        margin: Largest distance above its baseline at which a probe's accuracy still counts as chance.
        batch_size: Sequences in one forward pass, at most.
        memory: Bytes that the sweep may hold at once; None for the default limits.
        seed: Of control draws, splits and intervals.
        progress: Show a progress bar.
        executor: Where the runs go: None for this process, or ``pl.Workers``, "local", "dask", "submitit".

    Returns:
        The shares of variance that the subspaces carry, drops with intervals over sequences, damage D = drop/(clean −
        chance), the effect N = D − mean D of the random subspaces of equal variance with its prediction interval over
        draws and sequences, its p and that adjusted for the number of sites, refitted accuracies. Matched draws that
        share 0.3 or more of the subspace (``control_overlap``) contain it and are no control: ``control_problem`` says
        so, and the effect is measured from random subspaces of equal rank.

        A verdict for each site, what became of the variable:

        - "unread": noise of the activations' own size changes no output, so the model doesn't read the site.
        - "floor": the clean metric is within 0.2 of chance, so nothing can drop.
        - "tautological": the site feeds a linear readout, so that erasing what is read must hurt.
        - "inconclusive": a refitted probe is above baseline + ``margin``; the model may still use the variable.
        - "absent": no probe reads the variable there, ablated or not, so the cost isn't about it.
        - "underpowered": no probe reads it any more, but with so few sequences they don't read a planted residue of 1.4
            standard deviations of a feature either; ``residue_size`` says which they do, ``n_needed`` with how many they would.
        - "erased": a probe read it before, none does after, and they would have read such a residue; smaller ones may be
            left. ``needed`` says whether the model needed it.
        - "not refitted": without ``refit`` it is unknown what is left.

        Where ``label`` holds values, the refitted probes are ridge regressions, without an MLP, and the columns of their
        accuracies hold R².

        And ``needed``, whether the model needs these directions:

        - "yes": adjusted p ≤ 0.05 and the effect's interval above 0. Where the matched draws are no control, the drop must
            also exceed, interval for interval, that of the top principal components orthogonal to the subspace. Not at
            sites that are "floor", "tautological" or "absent", nor where the label goes with the target and ``given`` isn't,
            nor where the subspace's mean is far from the activations' own (``mean_shift`` above 1).
        - "no": the site is "unread"; or the variable is "erased" and the interval of the drop ends below 0.05 of the accuracy
            above chance (0.05 nats of a loss), or so does that of the effect, measured from draws that share less than 0.3 of
            the subspace.
        - "can't tell": otherwise, and for a metric of your own.

    Units:
        Fractions for "accuracy"; otherwise drop and effect are in the metric's unit, a loss drops
        below 0 when ablation hurts, and there is no damage.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        ShapeError: A subspace of another width, or a site with axes beside (batch, pos, d).
        InputError: An unknown label, metric or control, a single sequence, a value that isn't a subspace, ``directions``
            or ``rank`` with a mapping, a ProbeResult saved without patterns, NaN at a site, or a memory budget that one
            sequence exceeds.
        MetricError: The model has fewer logits than the label has classes, or they hold NaN; a metric that is NaN or
            doesn't take its arguments.

    Source:
        arXiv 2606.00926 v2 (refit and matched controls); Haufe et al. 2014, NeuroImage 87 (filter and pattern);
        Ravfogel et al. 2020, arXiv 2004.07667; Westfall and Young 1993 (max-T).
    """
    need_wrapped(model)
    label = label_asked(batch, subspaces, label)
    target = label_of(batch, target, "target") if target is not None else label
    strata, goes = strata_given(batch, given, label), goes_with(batch, label, target, seed)
    subspaces = bound(subspaces, batch.labels[label], batch.mask)
    spaces = by_point(model, spaces_of(subspaces, label, directions, rank))
    need_adjust(adjust)
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be from 0 to 1, got {alpha}")
    if not 0 <= margin < 1:  # also NaN
        raise InputError(f"margin={margin}: an accuracy so far above its baseline counts as chance; give 0 to below 1")
    draws = Draws.of(controls, len(spaces), adjust)
    reader(model, batch, metric, target)  # what can't be measured is refused before anything long runs
    # batch.mask says where labels count; it isn't a padding mask, as it leaves out BOS, which is read.
    acts = collect(model, batch, list(spaces), batch_size=batch_size)
    drawn = with_controls(model, acts, batch, spaces, label, kinds, draws, seed, definition_of(subspaces, directions))
    runs = run(model, batch, drawn, metric, target, alpha, batch_size, progress, memory)
    chance = accuracy_chance(batch, target, metric)
    rows = [{**d.about, "alpha": float(alpha)} for d in drawn]
    values, clean = score(rows, runs, runs.scored, chance, seed, metric, adjust)
    at = {site: [i for i, row in enumerate(rows) if row["site"] == site] for site in spaces}
    untold = [site for site in spaces if not moves_answers(runs.values[at[site]], runs.clean, runs.scored)]
    unread = unread_sites(model, batch, acts, untold, batch_size, memory, seed)
    floor = chance is not None and clean.mean().item() < chance + FLOOR
    refits: list[Tensor] = []
    for row in (row for row in rows if row["condition"] == "target"):
        site = row["site"]
        readout = feeds_readout(model, site)
        row.update(association=goes, given=", ".join(names_given(given, label)) or None)
        if refit:
            new = after(model, batch, acts, site, spaces[site], alpha, batch_size)
            n = new.shape[1]
            mask = spread_mask(batch.mask, n)
            new = without_rounding(acts[site], new, mask)
            known = (acts[site], new, spread_labels(label, batch.labels[label], n), mask)
            if batch.labels[label].is_floating_point():
                found, by_position = refit_values(*known, groups_of(batch), margin=margin, seed=seed)
            else:
                within = None if strata is None else spread_labels("given", strata, n)
                # What no verdict rests on takes no time.
                found, by_position = refit_check(
                    *known, groups_of(batch), mlp=mlp, margin=margin, given=within, name=label, seed=seed,
                    power=not (floor or readout or site in unread),
                )  # fmt: skip
            row.update(found)
            refits.append(by_position)
        row["verdict"] = verdict(
            floor=floor,
            readout=readout,
            before=row.get("readable_before"),
            after=row.get("readable_after"),
            unread=site in unread,
            power=row.get("powered"),
        )
        row["needed"] = needed(row, [r for r in rows if r["site"] == site and r is not row], metric)
    count = runs.scored.double().sum(0).clamp_min(1)
    return AblationResult(
        rows,
        values.float(),
        clean.float(),
        torch.stack([one.double().where(runs.scored, 0.0).sum(0) / count for one in runs.values]).float(),
        (runs.clean.double().where(runs.scored, 0.0).sum(0) / count).float(),
        label,
        target,
        metric_name(metric),
        chance or 0.0,
        runs.path,
        torch.stack(refits) if refits else None,
    )

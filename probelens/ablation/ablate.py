"""Ablation of a subspace, with the refitted probe and the controls that its cost is compared with.

A drop after projecting a probe's direction out says nothing about necessity by itself. A probe
refitted on the ablated activations may recover, and random subspaces may cost as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.controls import CONTROLS, Control, label_asked, label_of, with_controls
from probelens.ablation.given import Given, goes_with, names_given, strata_given
from probelens.ablation.result import AblationResult
from probelens.ablation.scoring import Metric, accuracy_chance, after, run, score
from probelens.errors import InputError, metric_name
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped
from probelens.probing.directions import Definition
from probelens.probing.refit import refit_check
from probelens.probing.result import ProbeResult
from probelens.probing.splits import groups_of
from probelens.running.collect import collect
from probelens.subspaces.directions import definition_of, spaces_of
from probelens.subspaces.leace import Eraser
from probelens.subspaces.oracle import OracleEraser, QuadraticEraser, bound
from probelens.subspaces.subspace import Subspace

__all__ = ["ablate", "feeds_readout"]

MARGIN = 0.02
FLOOR = 0.2


def ablate(
    model: HookedModel,
    batch: Any,
    subspaces: Mapping[Any, Subspace | Eraser | OracleEraser | QuadraticEraser] | ProbeResult,
    metric: Metric = "accuracy",
    refit: bool = True,
    controls: int = 20,
    *,
    directions: Definition | None = None,
    rank: int | None = None,
    label: str | None = None,
    target: str | None = None,
    given: Given = None,
    kinds: Sequence[Control] = CONTROLS,
    alpha: float = 1.0,
    mlp: bool = True,
    margin: float = MARGIN,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> AblationResult:
    """Ablate a subspace at each site in turn, and measure the cost, the refit and the controls.

    Edits are made where ``batch.mask`` is True: a BOS token or padding keeps its activation. The
    refitted probe is trained and tested on ablated activations of ``batch``, split by sequence. At a state
    point every step is edited, and the probes see the states that the model then has.

    Args:
        model: The wrapped model; run in eval mode.
        batch: Sequences that the subspaces were not fitted on. tokens (example, pos).
        subspaces: Site, named in any way that ``resolve`` takes, to Subspace (projected out, its mean kept) or Eraser
            (one that needs labels gets those of ``batch``);
            or a ProbeResult, of which ``directions`` says what is taken.
        metric: "accuracy" of the argmax of the logits against ``batch.labels[target]``,
            "next_token_loss" (nats), or a function of logits (batch, pos, d_vocab) and, by keyword,
            ``tokens``, ``mask`` and each label, returning (batch, pos).
        refit: Fit probes on the ablated activations: linear, one at each position, and (``mlp``) a
            small MLP.
        controls: Draws of each random control; an effect takes at least 2.
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
        kinds: Controls: random subspaces of equal rank, of equal variance removed, and the top
            principal components of equal rank.
        alpha: Strength: 1 removes the subspace, 0 nothing.
        mlp: Whether the refit includes the MLP.
        margin: Largest distance above its baseline at which a probe's accuracy still counts as chance.
        batch_size: Sequences in one forward pass, at most.
        memory: Bytes that the sweep may hold at once; None for the default limits.
        seed: Of control draws, splits and intervals.
        progress: Show a progress bar.

    Returns:
        The shares of variance that the subspaces carry, drops with intervals over sequences, damage D = drop/(clean − chance), the effect
        N = D − mean D of the matched controls (of the random ones where no subspace matches) with its prediction
        interval over draws and sequences, refitted accuracies, and a verdict for each site:

        - "floor": the clean metric is within 0.2 of chance, so nothing can drop.
        - "tautological": the site feeds a linear readout, so that erasing what is read must hurt.
        - "inconclusive": a refitted probe is above baseline + ``margin``; the model may still use the variable.
        - "absent": no probe reads the variable there, ablated or not, so the cost isn't about it.
        - "erased": a probe read it before and none does after; the effect says whether the model needed it.
        - "not refitted": without ``refit`` it is unknown what is left.

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
        arXiv 2606.00926 v2 (refit and matched controls); Haufe et al. 2014, NeuroImage 87 (filter and pattern); Ravfogel et al. 2020, arXiv 2004.07667.
    """
    need_wrapped(model)
    label = label_asked(batch, subspaces, label)
    target = label_of(batch, target, "target") if target is not None else label
    strata, goes = strata_given(batch, given, label), goes_with(batch, label, target, seed)
    subspaces = bound(subspaces, batch.labels[label], batch.mask)
    spaces = by_point(model, spaces_of(subspaces, label, directions, rank))
    if controls < 0 or not 0 <= alpha <= 1:
        raise InputError(f"controls must be at least 0 and alpha from 0 to 1, got {controls} and {alpha}")
    # batch.mask says where labels count; it isn't a padding mask, as it leaves out BOS, which is read.
    acts = collect(model, batch, list(spaces), batch_size=batch_size)
    drawn = with_controls(
        model, acts, batch, spaces, label, kinds, controls, seed, definition_of(subspaces, directions)
    )
    runs = run(model, batch, drawn, metric, target, alpha, batch_size, progress, memory)
    chance = accuracy_chance(batch, target, metric)
    rows = [{**d.about, "alpha": float(alpha)} for d in drawn]
    values, clean = score(rows, runs, runs.scored, chance, seed, metric)
    refits: list[Tensor] = []
    for row in (row for row in rows if row["condition"] == "target"):
        site = row["site"]
        row.update(association=goes, given=", ".join(names_given(given, label)) or None)
        if refit:
            new = after(model, batch, acts, site, spaces[site], alpha, batch_size)
            found, by_position = refit_check(
                acts[site], new, batch.labels[label], batch.mask, groups_of(batch), mlp=mlp, margin=margin,
                given=strata, seed=seed,
            )  # fmt: skip
            row.update(found)
            refits.append(by_position)
        row["verdict"] = verdict(
            floor=chance is not None and clean.mean().item() < chance + FLOOR,
            readout=feeds_readout(model, site),
            before=row.get("readable_before"),
            after=row.get("readable_after"),
        )
    count = runs.scored.double().sum(0).clamp_min(1)
    return AblationResult(
        rows,
        values.float(),
        clean.float(),
        ((runs.values.double() * runs.scored).sum(1) / count).float(),
        ((runs.clean.double() * runs.scored).sum(0) / count).float(),
        label,
        target,
        metric_name(metric),
        chance or 0.0,
        runs.path,
        torch.stack(refits) if refits else None,
    )


def verdict(*, floor: bool, readout: bool, before: bool | None, after: bool | None) -> str:
    """The verdict on an ablation at one site, one of the words that ``ablate`` explains.

    ``before`` and ``after`` say whether any probe reads the variable; None if none was fitted.
    """
    if floor:
        return "floor"
    if readout:
        return "tautological"
    if after is None:
        return "not refitted"
    if after:
        return "inconclusive"
    return "erased" if before else "absent"


def feeds_readout(model: HookedModel, site: str) -> bool:
    """Whether a site is the input of the linear readout, so that erasing there must damage the answer.

    True after the final norm, and at the last block's output where no norm follows it.
    """
    name, adapter = model.point(site).name, model.adapter
    if name in ("ln_final.hook_out", "unembed.hook_in"):
        return True
    last, parts = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", adapter.parts
    bare = "ln_final" not in parts and "unembed" in parts
    if name in model.hook_dict:
        return bare and name == last
    # A module path: the same tensor under the module's own name.
    where = model.point(name).site
    if where is None:
        return False
    found = (where.path, where.side)
    read = [(parts.get("ln_final"), "out"), (parts.get("unembed"), "in")]
    return found in ([*read, (adapter.blocks[-1], "out")] if bare else read)

"""Ablation of a subspace, with what makes its cost mean something: a refitted probe and controls.

A drop after projecting a probe's direction out says nothing about necessity by itself. A probe
refitted on the ablated activations may recover, and random subspaces may cost as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.collect import collect
from probelens.errors import InputError, MetricError, ShapeError
from probelens.model import HookedModel
from probelens.points import HookPoint
from probelens.results import Result
from probelens.sites import layer_of
from probelens.sweep import Condition, Edit, Read, sweep

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.probing import ProbeResult
    from probelens.subspaces import Eraser, Subspace

__all__ = ["AblationResult", "ablate"]

Metric = Literal["accuracy", "next_token_loss"] | Callable[..., Tensor]
Control = Literal["random", "random_matched", "pca"]
MARGIN = 0.02
FLOOR = 0.2


@dataclass(frozen=True, eq=False)
class AblationResult(Result):
    """What ablating a subspace cost at each site, beside its controls and the refitted probe.

    Args:
        rows: One a site, condition and draw: site, layer, label, condition ("target", "random",
            "random_matched", "pca"), draw, rank, alpha, value, clean, drop, lo, hi, damage; on
            targets also probe_accuracy, refit_accuracy, refit_mlp_accuracy, baseline, effect,
            effect_lo, effect_hi, verdict.
        values: The metric of each example under each row's condition. (row, example)
        clean: The metric of each example without ablation. (example,)
        by_position: Mean metric at each position. (row, pos)
        clean_by_position: The same without ablation. (pos,)
        label: The variable whose subspace was ablated.
        target: The label that the model's answer is compared with, or "".
        metric: Name of the metric.
        chance: What the metric gets by guessing.
        path: How the engine ran: "skip" or "full".
        refit_by_position: Accuracy of the refitted linear probe at each position. (target, pos)
    """

    rows: list[dict[str, Any]]
    values: Tensor
    clean: Tensor
    by_position: Tensor
    clean_by_position: Tensor
    label: str = ""
    target: str = ""
    metric: str = "accuracy"
    chance: float = 0.0
    path: str = "full"
    refit_by_position: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a site, condition and draw."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def targets(self) -> list[dict[str, Any]]:
        """The rows of the ablated subspaces themselves, without controls."""
        return [row for row in self.rows if row["condition"] not in ("random", "random_matched", "pca")]

    def plot(self, title: str | None = None) -> go.Figure:
        """Drop by layer beside its controls, and the refitted probe below."""
        from probelens import plots

        return plots.ablation(
            self.to_dataframe(), metric=self.metric, percent=self.metric == "accuracy", title=title
        )


def ablate(
    model: HookedModel,
    batch: Any,
    subspaces: Mapping[str, Subspace | Eraser] | ProbeResult,
    metric: Metric = "accuracy",
    refit: bool = True,
    controls: int = 20,
    *,
    label: str | None = None,
    target: str | None = None,
    kinds: Sequence[Control] = ("random", "random_matched", "pca"),
    alpha: float = 1.0,
    mlp: bool = True,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> AblationResult:
    """Ablate a subspace at each site in turn, and measure the cost, the refit and the controls.

    Edits are made where ``batch.mask`` is True: a BOS token or padding keeps its activation. The
    refitted probe is trained and tested on ablated activations of ``batch``, split by sequence.

    Args:
        model: The wrapped model; run in eval mode.
        batch: Sequences that the subspaces were not fitted on. tokens (example, pos).
        subspaces: Site to Subspace (projected out, its mean kept) or Eraser; or a ProbeResult,
            whose rows become the subspaces.
        metric: "accuracy" of the argmax of the logits against ``batch.labels[target]``,
            "next_token_loss" (nats), or a function of logits (batch, pos, d_vocab) and, by keyword,
            ``tokens``, ``mask`` and each label, returning (batch, pos).
        refit: Fit probes on the ablated activations, linear and (``mlp``) a small MLP.
        controls: Draws of each random control.
        label: The variable that the subspaces are about; needed unless the batch has one label.
        target: The label that the model answers with; ``label`` if None.
        kinds: Controls: random subspaces of equal rank, of equal variance removed, and the top
            principal components of equal rank.
        alpha: Strength: 1 removes the subspace, 0 nothing.
        mlp: Whether the refit includes the MLP.
        batch_size: Sequences in one forward pass.
        seed: Of control draws, splits and intervals.
        progress: Show a progress bar.

    Returns:
        Drops with intervals over sequences, damage D = drop/(clean − chance), the effect
        N = D − mean D of the matched controls, refitted accuracies, and a verdict for each site:

        - "floor": the clean metric is within 0.2 of chance, so nothing can drop.
        - "tautological": the site feeds a linear readout, so that erasing what is read must hurt.
        - "inconclusive": a refitted probe is above baseline + 0.02; the model may still use the variable.
        - "erased": no probe recovers; the effect says whether the model needed it.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        InputError: An unknown label, metric or control, or a subspace of another width.

    Source:
        arXiv 2606.00926 v2 (refit and matched controls); Ravfogel et al. 2020, arXiv 2004.07667.
    """
    label = _label(batch, label, "label")
    target = _label(batch, target, "target") if target is not None else label
    spaces = _spaces(subspaces, label)
    names = [model.point(name).name for name in spaces]
    if controls < 0 or not 0 <= alpha <= 1:
        raise InputError(f"controls must be at least 0 and alpha from 0 to 1, got {controls} and {alpha}")
    unknown = [k for k in kinds if k not in ("random", "random_matched", "pca")]
    if unknown:
        raise InputError(f"control {unknown[0]!r} is not known. Allowed: 'random', 'random_matched', 'pca'")
    # batch.mask says where labels count, which is no padding mask: it leaves BOS out, which is read.
    attention = getattr(batch, "attention_mask", None)
    acts = collect(model, batch, names, batch_size=batch_size, attention_mask=attention)
    planned: list[tuple[dict[str, Any], Condition]] = []
    for name, space in zip(names, spaces.values(), strict=True):
        real = acts[name][batch.mask]
        if real.shape[-1] != space.d:
            raise ShapeError(
                f"the subspace for {name!r} has width {space.d}, the activations there have {real.shape[-1]}"
            )
        for kind, draw, drawn in _draws(space, real, kinds, controls, seed):
            about = {
                "site": name, "layer": layer_of(name, model.cfg.n_layers), "label": label,
                "condition": kind, "draw": draw, "rank": drawn.rank, "alpha": float(alpha),
            }  # fmt: skip
            planned.append((about, Condition((name, kind, draw), (_edit(name, drawn, alpha, batch.mask),))))
    read = Read(_metric(metric, target), None, _read_data(batch, metric, target))
    run = sweep(
        model, batch.tokens, [c for _, c in planned], read, batch_size=batch_size, attention_mask=attention,
        progress=progress, describe="ablations",
    )  # fmt: skip
    scored = batch.mask.clone()
    if metric == "next_token_loss":
        scored[:, -1] = False
    keep = scored.any(1)
    weight = scored.double() / scored.double().sum(1, keepdim=True).clamp_min(1)
    values = (run.values.double() * weight).sum(-1)[:, keep]
    clean = (run.base.double() * weight).sum(-1)[keep]
    chance = _chance(batch, target) if metric == "accuracy" else 0.0
    rows = [dict(about) for about, _ in planned]
    _drops(rows, values, clean, chance if metric == "accuracy" else None, seed)
    refits = None
    if refit:
        refits = _refits(
            rows, dict(zip(names, spaces.values(), strict=True)), acts, batch, label, alpha, mlp, seed
        )
    _effects(rows, values, clean, chance if metric == "accuracy" else None, seed)
    _verdicts(rows, model, clean.mean().item(), chance if metric == "accuracy" else None, refit)
    count = scored.double().sum(0).clamp_min(1)
    return AblationResult(
        rows,
        values.float(),
        clean.float(),
        ((run.values.double() * scored).sum(1) / count).float(),
        ((run.base.double() * scored).sum(0) / count).float(),
        label,
        target,
        metric if isinstance(metric, str) else getattr(metric, "__name__", "custom"),
        chance,
        run.path,
        refits,
    )


def _label(batch: Any, label: str | None, what: str) -> str:
    known = list(batch.labels)
    if label is None and len(known) == 1:
        return str(known[0])
    if label not in known:
        raise InputError(f"{what}={label!r}: the batch has the labels {known}. Give one of them.")
    return str(label)


def _spaces(subspaces: Any, label: str) -> dict[str, Any]:
    if isinstance(subspaces, Mapping):
        if not subspaces:
            raise InputError("subspaces is empty. Give a mapping from hook point to Subspace or Eraser")
        return dict(subspaces)
    from probelens.subspaces import from_probe

    return {
        site: from_probe(subspaces.coef(site, label), subspaces.mean(site), label=f"probe rows of {label}")
        for site in subspaces.sites
    }


def _draws(
    space: Any, real: Tensor, kinds: Sequence[str], controls: int, seed: int
) -> list[tuple[str, int, Any]]:
    """The subspace itself and its controls: condition, draw, what to remove."""
    from probelens import subspaces as make

    out: list[tuple[str, int, Any]] = [("target", 0, space)]
    mean = real.double().mean(0)
    if not controls or not kinds:
        return out
    rank = space.rank
    if "random" in kinds:
        out += [
            ("random", i, make.random(rank, space.d, seed=seed * 1000 + i, mean=mean))
            for i in range(controls)
        ]
    if "random_matched" in kinds:
        centred = real.double() - mean
        covariance = centred.T @ centred / len(centred)
        matched = make.random_matched(space, covariance, n=controls, seed=seed)
        out += [("random_matched", i, s) for i, s in enumerate(matched)]
    if "pca" in kinds:
        out.append(("pca", 0, make.pca(real, rank)))
    return out


def _edit(name: str, space: Any, alpha: float, mask: Tensor) -> Edit:
    from probelens.subspaces import Subspace

    remove = space.project_out if isinstance(space, Subspace) else space

    def fn(tensor: Tensor, hook: HookPoint, mask: Tensor) -> Tensor:
        new = remove(tensor)
        if alpha != 1:
            new = tensor + alpha * (new - tensor)
        return torch.where(mask.to(tensor.device)[..., None], new, tensor)

    return Edit(name, fn, {"mask": mask})


def _read_data(batch: Any, metric: Metric, target: str) -> dict[str, Tensor]:
    data = {"tokens": batch.tokens, "mask": batch.mask}
    if metric == "accuracy":
        return {**data, "answer": batch.labels[target]}
    return {**data, **batch.labels} if callable(metric) else data


def _metric(metric: Metric, target: str) -> Callable[..., Tensor]:
    if callable(metric):
        given = metric

        def custom(logits: Tensor, **data: Tensor) -> Tensor:
            value = given(logits, **data)
            if not isinstance(value, Tensor) or value.shape != logits.shape[:2]:
                raise ShapeError(
                    f"metric must return one value a position, {tuple(logits.shape[:2])}, got "
                    f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
                )
            return value.float()

        return custom
    if metric == "accuracy":

        def accuracy(logits: Tensor, answer: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
            high = int(answer[mask].max()) if bool(mask.any()) else 0
            if high >= logits.shape[-1]:
                raise MetricError(
                    f"label {target!r} has class {high}, but the model has {logits.shape[-1]} logits. "
                    'Give target= the label that the model answers with, or metric="next_token_loss".'
                )
            return (logits.argmax(-1) == answer).float()

        return accuracy
    if metric == "next_token_loss":

        def loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
            values = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            return torch.nn.functional.pad(values.reshape(len(tokens), -1), (0, 1))

        return loss
    raise InputError(f"metric {metric!r} is not known. Allowed: 'accuracy', 'next_token_loss', or a function")


def _chance(batch: Any, target: str) -> float:
    counts = torch.bincount(batch.labels[target][batch.mask])
    return (counts.max() / counts.sum()).item()


def _drops(
    rows: list[dict[str, Any]], values: Tensor, clean: Tensor, chance: float | None, seed: int
) -> None:
    from probelens.stats import hierarchical_bootstrap

    # One bootstrap over examples for every row at once: the examples are the same in all of them.
    found = hierarchical_bootstrap((clean - values).T[None], seed=seed, n_draws=1000)
    room = clean.mean().item() - (chance if chance is not None else 0.0)
    for i, row in enumerate(rows):
        drop = found.estimate[i].item()
        row.update(
            value=values[i].mean().item(), clean=clean.mean().item(), drop=drop, lo=found.low[i].item(),
            hi=found.high[i].item(), damage=drop / room if chance is not None and room > 0 else None,
        )  # fmt: skip


def _refits(
    rows: list[dict[str, Any]],
    spaces: dict[str, Any],
    acts: Any,
    batch: Any,
    label: str,
    alpha: float,
    mlp: bool,
    seed: int,
) -> Tensor:
    """Refit probes at every target; their accuracy by position. (target, pos)"""
    from probelens.probing import refit_accuracy

    refits: list[Tensor] = []

    for row in rows:
        if row["condition"] != "target":
            continue
        x = acts[row["site"]]
        space = spaces[row["site"]]
        remove = getattr(space, "project_out", space)
        ablated = x + alpha * (remove(x) - x)
        found, by_position = refit_accuracy(
            x, ablated, batch.labels[label], batch.mask, batch.groups, mlp=mlp, seed=seed
        )
        row.update(found)
        refits.append(by_position)
    return torch.stack(refits)


def _effects(
    rows: list[dict[str, Any]], values: Tensor, clean: Tensor, chance: float | None, seed: int
) -> None:
    """N = D of the subspace − mean D of the controls that remove equal variance, paired over examples."""
    from probelens.stats import ratio_of_means

    for i, row in enumerate(rows):
        if row["condition"] != "target" or chance is None:
            continue
        for kind in ("random_matched", "random"):
            mine = [j for j, r in enumerate(rows) if r["site"] == row["site"] and r["condition"] == kind]
            if mine:
                break
        room = clean - chance
        if not mine or room.mean() <= 0:
            row.update(effect=None, effect_lo=None, effect_hi=None, effect_against=None)
            continue
        found = ratio_of_means((values[mine].mean(0) - values[i])[None], room[None], seed=seed, n_draws=1000)
        row.update(
            effect=found.estimate.item(),
            effect_lo=found.low.item(),
            effect_hi=found.high.item(),
            effect_against=kind,
        )


def _verdicts(
    rows: list[dict[str, Any]], model: HookedModel, clean: float, chance: float | None, refit: bool
) -> None:
    for row in rows:
        if row["condition"] != "target":
            continue
        if chance is not None and clean < chance + FLOOR:
            row["verdict"] = "floor"
        elif feeds_readout(model, row["site"]):
            row["verdict"] = "tautological"
        elif not refit:
            row["verdict"] = "not refitted"
        else:
            best = max(row["refit_accuracy"], row["refit_mlp_accuracy"] or 0.0)
            row["verdict"] = "inconclusive" if best > row["baseline"] + MARGIN else "erased"


def feeds_readout(model: HookedModel, site: str) -> bool:
    """Whether a site is what the linear readout reads, so that erasing there must damage the answer.

    True after the final norm, and at the last block's output where no norm follows it.
    """
    if site in ("ln_final.hook_out", "unembed.hook_in"):
        return True
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    return site == last and "ln_final" not in model.adapter.parts and "unembed" in model.adapter.parts

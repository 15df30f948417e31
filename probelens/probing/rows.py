"""What stands in a row of a ``ProbeResult``: accuracies with intervals, and what belongs beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.probing.data import Data
from probelens.probing.fitting import Fitted, by_position, share
from probelens.probing.splits import Split

if TYPE_CHECKING:
    from probelens.probing.probe import ProbeResult
    from probelens.probing.values import ValueProbeResult

__all__ = ["CONTROL", "TASK", "UNTRAINED", "Recorder", "by_group", "guesses", "key", "share_interval"]

TASK, CONTROL, UNTRAINED = "task", "control_task", "untrained"


@dataclass(frozen=True, eq=False)
class Recorder:
    """Writes the rows of one seed into a result.

    Args:
        out: The result.
        data: What is probed.
        split: Its sequences.
        seed: Of the split.
        controls: Control labels of the labels that have them. each (n, pos)
        beside: Baselines of each label.
        n_boot: Resamples for each interval.
    """

    out: ProbeResult
    data: Data
    split: Split
    seed: int
    controls: dict[str, Tensor]
    beside: dict[str, dict[str, float]]
    n_boot: int

    def site(self, site: str, fitted: Fitted, base: Fitted | None) -> None:
        """The rows of every class label at one site."""
        for label, y in self.data.labels.items():
            row = self._row(site, label, TASK, fitted, label, y)
            coef, intercept = fitted.fits[label].softmax()
            self.out.coefs[key(row)], self.out.intercepts[key(row)] = coef.float(), intercept.float()
            row.update(self.beside.get(label, {}))
            if base is not None:
                row["untrained"] = self._row(site, label, UNTRAINED, base, label, y)["accuracy"]
            if label in self.controls:
                control = self._row(site, label, CONTROL, fitted, f"{CONTROL}|{label}", self.controls[label])
                row["selectivity"] = row["accuracy"] - control["accuracy"]

    def codelength(self, site: str, x: Tensor, Cs: Sequence[float], tol: float, max_rows: int | None) -> None:
        """Online codelength of each class label at one site, over all sequences, sent whole."""
        from probelens.probing.mdl import online_codelength

        rows = _whole(self.data, max_rows, self.seed)
        groups = self.data.groups[:, None].expand(rows.shape)[rows]
        features = x[rows].float()
        for label, y in self.data.labels.items():
            # Both sides know the classes that there are, whatever their ids.
            known = y[self.data.mask].unique()
            found = online_codelength(
                features,
                torch.searchsorted(known, y[rows]),
                len(known),
                groups=groups,
                Cs=Cs,
                seed=self.seed,
                tol=tol,
            )
            self.out.row(site, label, self.seed).update(
                codelength=found.bits, uniform_codelength=found.uniform_bits, compression=found.compression
            )

    def numbers(
        self, found: ValueProbeResult, untrained: ValueProbeResult | None, control: ValueProbeResult | None
    ) -> None:
        """The rows of every numeric label at every site."""
        for row in found.rows:
            site, label = row["site"], row["label"]
            mine = self._number(row, TASK)
            self.out.coefs[key(mine)] = found.coef(site, label)[None]
            self.out.intercepts[key(mine)] = found.intercept(site, label)[None]
            for kind, other in ((UNTRAINED, untrained), (CONTROL, control)):
                if other is None:
                    continue
                theirs = next(r for r in other.rows if (r["site"], r["label"]) == (site, label))
                self._number(theirs, kind)
                if kind == UNTRAINED:
                    mine["untrained"] = theirs["r2"]
                else:
                    mine["selectivity"] = mine["r2"] - theirs["r2"]

    def embedding(self) -> None:
        """Beside every task row the score of the embedding, where that is among the sites."""
        mine = [r for r in self.out.rows if r["seed"] == self.seed and r["control"] == TASK]
        for row in mine:
            first = [r for r in mine if r["label"] == row["label"] and r["layer"] == -1]
            if first:
                row["embedding"] = first[0]["r2" if row["kind"] == "regression" else "accuracy"]

    def _number(self, row: Mapping[str, Any], control: str) -> dict[str, Any]:
        about = {
            "site": row["site"], "layer": self.data.layers.get(row["site"]), "label": row["label"], "seed": self.seed,
            "control": control, "kind": "regression",
        }  # fmt: skip
        kept = ["r2", "lo", "hi", "alpha", "n_train", "n_val", "n_test"]
        kept += ["position", "last_w"] if control == TASK else []
        new = {**about, **{name: row[name] for name in kept if name in row}}
        self.out.rows.append(new)
        return new

    def _row(
        self, site: str, label: str, control: str, fitted: Fitted, task: str, y: Tensor
    ) -> dict[str, Any]:
        truth, keep = y[self.split.test], self.data.mask[self.split.test]
        guess, fit = fitted.guess[task], fitted.fits[task]
        right = (guess == truth) & keep
        scored = keep.any(1)
        per_sequence = right[scored].double().sum(1) / keep[scored].double().sum(1)
        low, high = share_interval(right, keep, self.data.groups[self.split.test], self.n_boot, self.seed)
        total = torch.bincount(truth[keep], minlength=fit.n_classes).double()
        recall = torch.bincount(truth[right], minlength=fit.n_classes).double() / total
        accuracy = share(right[keep])
        row: dict[str, Any] = {
            "site": site, "layer": self.data.layers.get(site), "label": label, "seed": self.seed,
            "control": control, "kind": "classification", "accuracy": accuracy,
            "lo": max(0.0, low), "hi": min(1.0, high),
            "balanced_accuracy": recall[total > 0].mean().item(), "C": fit.C,
            "n_train": fitted.n_rows[0], "n_val": fitted.n_rows[1], "n_test": int(keep.sum()),
            "n_classes": fit.n_classes, "converged": fit.converged,
        }  # fmt: skip
        self.out.rows.append(row)
        self.out.by_sequence[key(row)] = per_sequence.float()
        self.out.by_position[key(row)] = by_position(guess == truth, keep)
        self.out.by_class[key(row)] = recall.float()
        return row


def share_interval(
    right: Tensor, keep: Tensor, groups: Tensor, n_boot: int, seed: int
) -> tuple[float, float]:
    """Interval of the share that is right among the positions that count, over groups.

    Over the sequences where they are all of one group.

    Args:
        right: Where a guess counts and is right. (n, pos)
        keep: Where guesses count. (n, pos)
        groups: What a resample draws together. (n,)
        n_boot: Resamples.
        seed: Of the resamples.
    """
    from probelens.numerics.stats import ratio_of_means

    hits, counted = by_group(groups, right.double().sum(1), keep.double().sum(1))
    found = ratio_of_means(hits[None], counted[None], n_draws=n_boot, seed=seed)
    return float(found.low), float(found.high)


def by_group(groups: Tensor, *per_sequence: Tensor) -> list[Tensor]:
    """Sums of each group's sequences, of the groups in which something counts by the last; each sequence by itself
    where there is one such group only. each (group,)"""
    counts = per_sequence[-1] > 0
    if len(groups[counts].unique()) < 2:
        return [values[counts] for values in per_sequence]
    held, where = groups[counts].unique(return_inverse=True)
    empty = torch.zeros(len(held), dtype=torch.float64)
    return [empty.index_add(0, where, values[counts].double()) for values in per_sequence]


def key(row: Mapping[str, Any]) -> str:
    """The name under which tensors of a row are kept."""
    return f"{row['site']}|{row['label']}|{row['seed']}|{row['control']}"


def _whole(data: Data, most: int | None, seed: int) -> Tensor:
    """The mask, or with ``most`` the mask of as many groups at random as stay within so many rows. (n, pos)"""
    if most is None or int(data.mask.sum()) <= most:
        return data.mask
    _, ids = torch.unique(data.groups, return_inverse=True)
    sizes = torch.zeros(int(ids.max()) + 1, dtype=torch.long).index_add_(0, ids, data.mask.sum(1))
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    inside = sizes[order].cumsum(0) <= most
    # At least two groups, one to send first and one to code with what it taught.
    inside[:2] = True
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    chosen[order[inside]] = True
    return data.mask & chosen[ids][:, None]


def guesses(data: Data, split: Split, w: int) -> dict[str, dict[str, float]]:
    """Accuracy on test of the majority class and, with tokens, of position and of the last w tokens."""
    from probelens.tasks.baselines import baselines

    out: dict[str, dict[str, float]] = {}
    train, test = split.train, split.test
    for label, y in data.labels.items():
        if data.tokens is not None:
            x, mask, y = data.tokens, data.spread(data.mask), data.spread(y)
            found = baselines(x[train], y[train], x[test], y[test], mask[train], mask[test], w=w)
            out[label] = {name: scores["accuracy"] for name, scores in found.items()}
        else:
            most = torch.bincount(y[train][data.mask[train]]).argmax()
            out[label] = {"majority": share(y[test][data.mask[test]] == most)}
    return out

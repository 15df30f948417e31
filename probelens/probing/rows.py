"""The rows of a ``ProbeResult``: scores with intervals, and the baselines and controls beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.numerics.mapped import gather
from probelens.probing.data import Data
from probelens.probing.directions import Directions
from probelens.probing.fitting import Fitted, by_position, share
from probelens.probing.intervals import accuracy_interval, r2_interval
from probelens.probing.mdl import online_codelength
from probelens.probing.result import CONTROL, LOCATED, TASK, UNTRAINED, ProbeResult, key
from probelens.probing.splits import Split
from probelens.probing.values import ValueFit, value_guesses
from probelens.results.sentences import is_embedding
from probelens.tasks.baselines import baselines


@dataclass(frozen=True, eq=False)
class Recorder:
    """Writes the rows of one seed into a result."""

    out: ProbeResult
    data: Data
    split: Split
    seed: int
    controls: dict[str, Tensor]  # control labels of the labels that have them, each (n, pos)
    beside: dict[str, dict[str, float]]  # baselines of each label
    n_boot: int

    def site(self, site: str, fitted: Fitted, base: Fitted | None) -> None:
        """Add the rows of every class label at one site."""
        for label, y in self.data.labels.items():
            row = self._row(site, label, TASK, fitted, label, y)
            coef, intercept = fitted.fits[label].softmax()
            self.out.coefs[key(row)], self.out.intercepts[key(row)] = coef.float(), intercept.float()
            self._keep(row, fitted.directions[label])
            row.update(self.beside.get(label, {}))
            if base is not None:
                row["untrained"] = self._row(site, label, UNTRAINED, base, label, y)["accuracy"]
            if label in self.controls:
                control = self._row(site, label, CONTROL, fitted, f"{CONTROL}|{label}", self.controls[label])
                row["selectivity"] = row["accuracy"] - control["accuracy"]

    def _keep(self, row: dict[str, Any], found: Directions) -> None:
        for definition in LOCATED:
            self.out.located[f"{key(row)}|{definition}"] = getattr(found, definition).float()
        for definition in ("filter", "class_means"):
            row[f"{definition}_variance"], row[f"{definition}_between_variance"] = found.carried[definition]

    def codelength(self, site: str, x: Tensor, Cs: Sequence[float], tol: float, max_rows: int | None) -> None:
        """Online codelength of each class label at one site, over all sequences, sent whole."""
        rows = _whole(self.data, max_rows, self.seed)
        groups = self.data.groups[:, None].expand(rows.shape)[rows]
        (features,) = gather(x, [rows], torch.float32, site=site)
        for label, y in self.data.labels.items():
            # Both sides know which classes there are.
            k = len(self.data.ids[label])
            found = online_codelength(features, y[rows], k, groups=groups, Cs=Cs, seed=self.seed, tol=tol)
            self.out.row(site, label, self.seed).update(
                codelength=found.bits, uniform_codelength=found.uniform_bits, label_codelength=found.label_bits,
                compression=found.compression, compression_floor=found.floor,
            )  # fmt: skip

    def numbers(self, site: str, fits: Mapping[str, Mapping[str, ValueFit]]) -> None:
        """Add the rows of every numeric label at one site; ``fits`` has probes by control and label."""
        for label, y in self.data.numbers.items():
            for control, found in fits.items():
                truth = self.controls[label] if control == CONTROL else y
                row = self._number(site, label, control, found[label], truth)
                if control == TASK:
                    mine = row
                    self.out.coefs[key(row)] = found[label].coef[None]
                    self.out.intercepts[key(row)] = found[label].intercept[None]
                    self._keep(row, found[label].directions)
                    row.update(self.beside.get(label, {}))
                elif control == UNTRAINED:
                    mine["untrained"] = row["r2"]
                else:
                    mine["selectivity"] = mine["r2"] - row["r2"]

    def embedding(self) -> None:
        """Add the score of the embedding to every task row, or of what enters block 0, where one is among the sites."""
        mine = [r for r in self.out.rows if r["seed"] == self.seed and r["control"] == TASK]
        for row in mine:
            first = [r for r in mine if r["label"] == row["label"] and r["layer"] == -1 and is_embedding(r["site"])]
            if first:
                row["embedding"] = first[0]["r2" if row["kind"] == "regression" else "accuracy"]

    def _number(self, site: str, label: str, control: str, fit: ValueFit, y: Tensor) -> dict[str, Any]:
        keep = self.data.mask[self.split.test]
        truth = y[self.split.test][keep].double()
        groups = self.data.groups[self.split.test]
        r2, low, high = r2_interval(fit.guess, truth, keep, groups, self.n_boot, self.seed)
        row = {
            "site": site, "layer": self.data.layers.get(site), "label": label, "seed": self.seed,
            "control": control, "kind": "regression", "r2": r2, "lo": low, "hi": high,
            "mse": (fit.guess - truth).square().mean().item(), "alpha": fit.alpha,
            "n_train": fit.n_rows[0], "n_val": fit.n_rows[1], "n_test": len(truth),
        }  # fmt: skip
        self.out.rows.append(row)
        return row

    def _row(self, site: str, label: str, control: str, fitted: Fitted, task: str, y: Tensor) -> dict[str, Any]:
        truth, keep = y[self.split.test], self.data.mask[self.split.test]
        guess, fit = fitted.guess[task], fitted.fits[task]
        right = (guess == truth) & keep
        scored = keep.any(1)
        per_sequence = right[scored].double().sum(1) / keep[scored].double().sum(1)
        low, high = accuracy_interval(right, keep, self.data.groups[self.split.test])
        total = torch.bincount(truth[keep], minlength=fit.n_classes).double()
        recall = torch.bincount(truth[right], minlength=fit.n_classes).double() / total
        accuracy = share(right[keep])
        row: dict[str, Any] = {
            "site": site, "layer": self.data.layers.get(site), "label": label, "seed": self.seed,
            "control": control, "kind": "classification", "accuracy": accuracy,
            "lo": low, "hi": high,
            "balanced_accuracy": recall[total > 0].mean().item(), "C": fit.C,
            "n_train": fitted.n_rows[0], "n_val": fitted.n_rows[1], "n_test": int(keep.sum()),
            "n_classes": fit.n_classes, "converged": fit.converged,
        }  # fmt: skip
        self.out.rows.append(row)
        self.out.by_sequence[key(row)] = per_sequence.float()
        self.out.by_position[key(row)] = by_position(guess == truth, keep)
        self.out.by_class[key(row)] = recall.float()
        return row


def _whole(data: Data, most: int | None, seed: int) -> Tensor:
    """The mask, limited to random groups that together have at most ``most`` rows. (n, pos)"""
    if most is None or int(data.mask.sum()) <= most:
        return data.mask
    _, ids = torch.unique(data.groups, return_inverse=True)
    sizes = torch.zeros(int(ids.max()) + 1, dtype=torch.long).index_add_(0, ids, data.mask.sum(1))
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    inside = sizes[order].cumsum(0) <= most
    # At least two groups: one to send first, and one to code with a probe fitted on it.
    inside[:2] = True
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    chosen[order[inside]] = True
    return data.mask & chosen[ids][:, None]


def guesses(data: Data, split: Split, w: int) -> dict[str, dict[str, float]]:
    """Test scores of guesses without activations, by label: for classes the accuracy of the majority class and, with
    tokens, of position and of the last w tokens; for numbers R² of position and of the last w tokens.
    """
    out = {label: value_guesses(data, y, split, w) for label, y in data.numbers.items()}
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

"""``probe``: the protocol that makes an accuracy mean something, and its result.

Split by sequence, standardise on train, choose C on validation, test once; beside each accuracy its
baselines, the untrained model, a control task and the codelength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, UnknownHookError, nearest
from probelens.probing.factor import Factorised
from probelens.probing.solver import DEFAULT_CS, LogisticFit, fit_path
from probelens.probing.splits import FRACTIONS, Split, split_by_group
from probelens.progress import progress_bar
from probelens.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["ProbeResult", "probe", "refit_accuracy"]

TASK, CONTROL, UNTRAINED = "task", "control_task", "untrained"
_PATIENCE = 2


@dataclass(frozen=True, eq=False)
class ProbeResult(Result):
    """How well labels can be read linearly at each site.

    Args:
        rows: One a site, label, seed and control: site, layer, label, seed, control ("task",
            "untrained", "control_task"), accuracy, lo, hi, balanced_accuracy, C, n_train, n_val,
            n_test, n_classes; on "task" rows also majority, position, last_w, untrained, selectivity,
            codelength, uniform_codelength, compression, as far as they were asked for.
        coefs: Directions in raw space of each task probe, one row a class. (class, d)
        intercepts: (class,)
        means: Mean activation of the training rows at each site and seed. (d,)
        by_sequence: Accuracy of each test sequence, for every row. (sequence,)
        by_position: Accuracy at each position, NaN where no row counts. (pos,)
        by_class: Recall of each class, NaN where absent from test. (class,)
    """

    rows: list[dict[str, Any]]
    coefs: dict[str, Tensor]
    intercepts: dict[str, Tensor]
    means: dict[str, Tensor]
    by_sequence: dict[str, Tensor]
    by_position: dict[str, Tensor]
    by_class: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """Sites, in the order given."""
        return list(dict.fromkeys(row["site"] for row in self.rows))

    @property
    def labels(self) -> list[str]:
        """Labels, in the order given."""
        return list(dict.fromkeys(row["label"] for row in self.rows))

    @property
    def seeds(self) -> list[int]:
        """Seeds of the split."""
        return list(dict.fromkeys(row["seed"] for row in self.rows))

    def row(
        self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK
    ) -> dict[str, Any]:
        """The row of one probe.

        Args:
            site: Hook point.
            label: Label; None if there is only one.
            seed: Seed; None for the first.
            control: "task", "untrained" or "control_task".

        Raises:
            UnknownHookError: No such site.
            InputError: No such label, seed or control.
        """
        if site not in self.sites:
            raise UnknownHookError(
                f"site {site!r} was not probed. Nearest: {nearest(site, self.sites) or self.sites[:5]}"
            )
        label, seed = self._label(label), self.seeds[0] if seed is None else seed
        for row in self.rows:
            if (row["site"], row["label"], row["seed"], row["control"]) == (site, label, seed, control):
                return row
        raise InputError(
            f"no probe of label {label!r}, seed {seed!r}, control {control!r}. Labels: {self.labels}, "
            f"seeds: {self.seeds}, controls: {sorted({r['control'] for r in self.rows})}"
        )

    def accuracy(
        self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK
    ) -> float:
        """Test accuracy; arguments as ``row``."""
        return float(self.row(site, label, seed, control)["accuracy"])

    def coef(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Directions of a probe in the space of the activations, one row a class. (class, d)"""
        row = self.row(site, label, seed)
        return self.coefs[_key(row)]

    def intercept(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Intercepts that belong to ``coef``. (class,)"""
        return self.intercepts[_key(self.row(site, label, seed))]

    def mean(self, site: str, seed: int | None = None) -> Tensor:
        """Mean activation of the training rows. (d,)"""
        row = self.row(site, self.labels[0], seed)
        return self.means[f"{row['site']}|{row['seed']}"]

    def best(self, label: str | None = None) -> dict[str, Any]:
        """The row with the highest test accuracy, the earliest of equals."""
        label = self._label(label)
        return max(
            (r for r in self.rows if r["label"] == label and r["control"] == TASK),
            key=lambda r: r["accuracy"],
        )

    def sequences(self, label: str | None = None, seed: int | None = None, control: str = TASK) -> Tensor:
        """Accuracy of each test sequence at each site. (sequence, site)"""
        return torch.stack([self.by_sequence[_key(self.row(s, label, seed, control))] for s in self.sites], 1)

    def _label(self, label: str | None) -> str:
        if label is None and len(self.labels) == 1:
            return self.labels[0]
        if label not in self.labels:
            raise InputError(f"label {label!r}: this result has {self.labels}. Give one of them.")
        return label

    def to_dataframe(self) -> pd.DataFrame:
        """One row a site, label, seed and control."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def plot(self, title: str | None = None) -> go.Figure:
        """Accuracy by layer with intervals, baselines and the untrained model; one panel a label."""
        from probelens import plots

        table = self.to_dataframe()
        table = table[(table["control"] == TASK) & (table["seed"] == self.seeds[0])]
        return plots.layer_profile(table, facet="label" if len(self.labels) > 1 else None, title=title)


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
    splits: Sequence[float] = FRACTIONS,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    max_rows: int | None = None,
    tol: float = 1e-4,
    n_boot: int = 1000,
    progress: bool = False,
) -> ProbeResult:
    """Fit linear probes at every site for every label, with what belongs beside their accuracy.

    Args:
        acts: Activations, a dict of tensors by site, or one tensor. each (n, pos, d) or (n, d)
        labels: Class ids, one tensor or a dict by label. each (n, pos) or (n,)
        groups: What a split must keep together; each sequence by itself if None. (n,)
        mask: Where labels count; ``acts.mask`` if None. (n, pos)
        tokens: For the position and last-w-tokens baselines; ``acts.tokens`` if None. (n, pos)
        untrained: The same sites of the same architecture at random initialisation.
        control_task: Also probe labels that are a hash of the last ``w`` tokens, for selectivity.
        mdl: Also the online codelength.
        w: Window of the last-w-tokens baseline and the control task.
        Cs: Inverse penalties to choose from on validation. The walk upwards ends early where two in
            a row bring nothing.
        splits: Shares of train, validation and test, of groups.
        seed: Of the split, when ``seeds`` is None.
        seeds: Several seeds: one split, one set of probes each.
        max_rows: At most so many training rows, drawn at random; None for all.
        tol: Relative gap in the objective at which the solver stops.
        n_boot: Resamples of test sequences for each interval.
        progress: Show a progress bar.

    Returns:
        Accuracies on the test sequences with 95 % intervals over these sequences.

    Raises:
        ShapeError: Labels, mask or groups that don't fit the activations.
        InputError: NaN activations, one class only, a mask that is False everywhere, too few sequences.

    Source:
        Alain and Bengio 2016, arXiv 1610.01644; Hewitt and Liang 2019, arXiv 1909.03368 (selectivity);
        Voita and Titov 2020, arXiv 2003.12298 (codelength).

    Examples:
        >>> x = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> result = probe(x, (x[..., 2] > 0).long())
        >>> result.accuracy("activations") > 0.9
        True
    """
    data = _Data.of(acts, labels, groups, mask, tokens)
    other = None if untrained is None else _Data.of(untrained, labels, groups, data.mask, data.tokens)
    if other is not None and set(other.tensors) != set(data.tensors):
        raise InputError(
            f"untrained has the sites {sorted(other.tensors)}, acts {sorted(data.tensors)}: collect the same ones"
        )
    seeds = [seed] if seeds is None else list(seeds)
    if not seeds or not Cs:
        raise InputError("seeds and Cs must not be empty")
    if control_task and data.tokens is None:
        raise InputError("control_task=True needs tokens: the control labels are a hash of the last ones")
    out = ProbeResult([], {}, {}, {}, {}, {}, {})
    with progress_bar(len(seeds) * len(data.tensors), "probes", progress) as bar:
        for s in seeds:
            split = split_by_group(data.groups, splits, s)
            controls: dict[str, Tensor] = {}
            if control_task and data.tokens is not None:
                from probelens.probing.controls import control_labels

                controls = {
                    k: control_labels(data.tokens, y, data.mask, w=w, seed=s) for k, y in data.labels.items()
                }
            record = _Recorder(out, data, split, s, controls, _baselines(data, split, w), n_boot)
            tasks = {**data.labels, **{f"{CONTROL}|{k}": y for k, y in controls.items()}}
            for site, x in data.tensors.items():
                fitted = _Fitted.of(x, tasks, data.mask, split, Cs, tol, max_rows, s)
                base = None
                if other is not None:
                    base = _Fitted.of(
                        other.tensors[site], data.labels, data.mask, split, Cs, tol, max_rows, s
                    )
                out.means[f"{site}|{s}"] = fitted.mean
                record.site(site, fitted, base)
                if mdl:
                    record.codelength(site, x)
                bar.update(1)
    return out


def refit_accuracy(
    clean: Tensor,
    ablated: Tensor,
    labels: Tensor,
    mask: Tensor,
    groups: Tensor,
    *,
    mlp: bool = True,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Whether a label can still be read after an ablation: probes fitted before and after it.

    Args:
        clean: Activations before. (n, pos, d)
        ablated: Activations after. (n, pos, d)
        labels: Class ids. (n, pos)
        mask: Where labels count. (n, pos)
        groups: What a split keeps together. (n,)
        mlp: Also a small MLP on the ablated activations.
        seed: Of the split.

    Returns:
        probe_accuracy, refit_accuracy, refit_mlp_accuracy (None without ``mlp``), the majority
        baseline, and the number of test rows, all on the same test sequences; and the refitted
        linear probe's accuracy at each position. (pos,)
    """
    split = split_by_group(groups, FRACTIONS, seed)
    tasks = {"label": labels}
    before = _Fitted.of(clean, tasks, mask, split, DEFAULT_CS, 1e-4, None, seed)
    after = _Fitted.of(ablated, tasks, mask, split, DEFAULT_CS, 1e-4, None, seed)
    keep = mask[split.test]
    truth = labels[split.test][keep]
    most = torch.bincount(labels[split.train][mask[split.train]]).argmax()
    row = {
        "probe_accuracy": _share(before.guess["label"][keep] == truth),
        "refit_accuracy": _share(after.guess["label"][keep] == truth),
        "refit_mlp_accuracy": None,
        "baseline": _share(truth == most),
        "refit_n_test": int(keep.sum()),
    }
    if mlp:
        from probelens.probing.mlp import mlp_accuracy

        sides = (split.train, split.val, split.test)
        parts = [(ablated[i][mask[i]], labels[i][mask[i]]) for i in sides]
        row["refit_mlp_accuracy"] = mlp_accuracy(*parts, seed=seed)
    return row, _by_position(after.guess["label"] == labels[split.test], keep)


# -- the data of one call ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Data:
    """Activations, labels and masks in one shape: (n, pos, ...)."""

    tensors: dict[str, Tensor]
    labels: dict[str, Tensor]
    mask: Tensor
    groups: Tensor
    tokens: Tensor | None
    layers: dict[str, int]

    @classmethod
    def of(cls, acts: Any, labels: Any, groups: Any, mask: Any, tokens: Any) -> _Data:
        layers: dict[str, int] = {}
        if isinstance(acts, Tensor):
            tensors = {"activations": acts}
        elif isinstance(acts, Mapping):
            tensors = dict(acts)
        elif hasattr(acts, "tensors"):
            tensors, layers = dict(acts.tensors), dict(acts.layers)
            mask = acts.mask if mask is None else mask
            if tokens is None and acts.tokens is not None and acts.pos is not None:
                tokens = acts.tokens[:, acts.pos]
        else:
            raise InputError(
                f"acts must be Activations, a dict of tensors or a tensor, got {type(acts).__name__}"
            )
        if not tensors:
            raise InputError("there are no activations to probe: acts is empty")
        named = dict(labels) if isinstance(labels, Mapping) else {"label": torch.as_tensor(labels)}
        if not named:
            raise InputError("there are no labels to probe: labels is empty")
        flat = all(x.ndim == 2 for x in tensors.values())
        lead = {tuple(x.shape[:1] if flat else x.shape[:2]) for x in tensors.values()}
        if len(lead) != 1 or any(x.ndim < 2 for x in tensors.values()):
            raise ShapeError(f"all sites must have the same (n, pos), found {sorted(lead)}")
        shape = lead.pop()
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool().cpu()
        if tuple(mask.shape) != shape:
            raise ShapeError(
                f"mask has shape {tuple(mask.shape)}, the activations {shape}: one value a position"
            )
        out: dict[str, Tensor] = {}
        for name, y in named.items():
            y = torch.as_tensor(y).cpu()
            if tuple(y.shape) != shape:
                raise ShapeError(
                    f"labels {name!r} have shape {tuple(y.shape)}, the activations {shape}: one class id a position"
                )
            if y.is_floating_point():
                raise InputError(
                    f"labels {name!r} are floating point; class ids are integers. For numbers use RidgeProbe."
                )
            out[str(name)] = y.long()
        if not bool(mask.any()):
            raise InputError("the mask is False everywhere: no label counts")
        for name, y in out.items():
            kept = y[mask]
            if int(kept.min()) < 0:
                raise InputError(f"labels {name!r} have negative class ids where the mask is True")
            if len(kept.unique()) < 2:
                raise InputError(
                    f"labels {name!r} have one class only ({int(kept[0])}): there is nothing to probe"
                )
        groups = torch.arange(shape[0]) if groups is None else torch.as_tensor(groups).cpu()
        if groups.shape != (shape[0],):
            raise ShapeError(
                f"groups has shape {tuple(groups.shape)}; it must be ({shape[0]},), one a sequence"
            )
        prepared: dict[str, Tensor] = {}
        for site, x in tensors.items():
            x = x.detach().cpu()
            x = x[:, None] if flat else x.flatten(2) if x.ndim > 3 else x
            if not bool(torch.isfinite(x[mask[:, None] if flat else mask]).all()):
                raise InputError(
                    f"activations at {site!r} have NaN or infinite values where the mask is True"
                )
            prepared[site] = x
        if flat:
            mask, out = mask[:, None], {k: v[:, None] for k, v in out.items()}
            tokens = None
        if tokens is not None and tuple(tokens.shape) != tuple(mask.shape):
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}, the activations {tuple(mask.shape)}")
        return cls(prepared, out, mask, groups, tokens, layers)


@dataclass(frozen=True, eq=False)
class _Fitted:
    """Probes of every label on one site and split, and their guesses on the test sequences."""

    fits: dict[str, LogisticFit]
    guess: dict[str, Tensor]
    mean: Tensor
    n_rows: tuple[int, int]

    @classmethod
    def of(
        cls, x: Tensor, tasks: Mapping[str, Tensor], mask: Tensor, split: Split, Cs: Sequence[float],
        tol: float, max_rows: int | None, seed: int,
    ) -> _Fitted:  # fmt: skip
        train, val = mask[split.train], mask[split.val]
        x_train = x[split.train][train].float()
        rows = (
            slice(None)
            if max_rows is None or len(x_train) <= max_rows
            else _some(len(x_train), max_rows, seed)
        )
        x_train = x_train[rows]
        x_val = x[split.val][val].float()
        ys = [y[split.train][train][rows] for y in tasks.values()]
        for name, y in zip(tasks, ys, strict=True):
            if len(y.unique()) < 2:
                raise InputError(
                    f"labels {name!r} have one class only among the training sequences. Give more sequences."
                )
        val_ys = [y[split.val][val] for y in tasks.values()]
        counts = [int(y[mask].max()) + 1 for y in tasks.values()]
        shared = Factorised.of(x_train, standardize=True)
        best: list[tuple[float, LogisticFit]] = []
        scores: list[list[float]] = [[] for _ in ys]

        def no_gain(which: int, fit: LogisticFit) -> bool:
            scores[which].append(_share(fit.logits(x_val).argmax(1) == val_ys[which]))
            return len(scores[which]) > _PATIENCE and max(scores[which][-_PATIENCE:]) <= max(
                scores[which][:-_PATIENCE]
            )

        paths = fit_path(shared, ys, sorted(Cs), n_classes=counts, tol=tol, stop=no_gain)
        for path, score in zip(paths, scores, strict=True):
            # On a tie the smaller C, which asks for less.
            top = max(range(len(path)), key=lambda i: (score[i], -i))
            best.append((score[top], path[top]))
        fits = dict(zip(tasks, (fit for _, fit in best), strict=True))
        x_test = x[split.test].float()
        guess = {
            name: fit.logits(x_test.flatten(0, 1)).argmax(1).unflatten(0, x_test.shape[:2])
            for name, fit in fits.items()
        }
        return cls(fits, guess, x_train.double().mean(0).float(), (len(x_train), len(x_val)))


def _some(n: int, k: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values


# -- what stands beside an accuracy ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Recorder:
    """Writes the rows of one seed into a result."""

    out: ProbeResult
    data: _Data
    split: Split
    seed: int
    controls: dict[str, Tensor]
    guesses: dict[str, dict[str, float]]
    n_boot: int

    def site(self, site: str, fitted: _Fitted, base: _Fitted | None) -> None:
        """Everything about one site."""
        for label, y in self.data.labels.items():
            row = self._row(site, label, TASK, fitted, label, y)
            coef, intercept = fitted.fits[label].softmax()
            self.out.coefs[_key(row)], self.out.intercepts[_key(row)] = coef.float(), intercept.float()
            row.update(self.guesses.get(label, {}))
            if base is not None:
                row["untrained"] = self._row(site, label, UNTRAINED, base, label, y)["accuracy"]
            if label in self.controls:
                control = self._row(site, label, CONTROL, fitted, f"{CONTROL}|{label}", self.controls[label])
                row["selectivity"] = row["accuracy"] - control["accuracy"]

    def codelength(self, site: str, x: Tensor) -> None:
        """Online codelength of each label at one site."""
        from probelens.probing.mdl import online_codelength

        mask, order = self.data.mask, torch.cat([self.split.train, self.split.val, self.split.test])
        rows = mask[order]
        for label, y in self.data.labels.items():
            found = online_codelength(
                x[order][rows].float(), y[order][rows], n_classes=int(y[mask].max()) + 1
            )
            self.out.row(site, label, self.seed).update(
                codelength=found.bits, uniform_codelength=found.uniform_bits, compression=found.compression
            )

    def _row(
        self, site: str, label: str, control: str, fitted: _Fitted, task: str, y: Tensor
    ) -> dict[str, Any]:
        from probelens.stats import hierarchical_bootstrap

        truth, keep = y[self.split.test], self.data.mask[self.split.test]
        guess, fit = fitted.guess[task], fitted.fits[task]
        right = (guess == truth) & keep
        scored = keep.any(1)
        per_sequence = right[scored].double().sum(1) / keep[scored].double().sum(1)
        found = hierarchical_bootstrap(per_sequence[None], n_draws=self.n_boot, seed=self.seed)
        total = torch.bincount(truth[keep], minlength=fit.n_classes).double()
        recall = torch.bincount(truth[right], minlength=fit.n_classes).double() / total
        accuracy = _share(right[keep])
        row: dict[str, Any] = {
            "site": site, "layer": self.data.layers.get(site), "label": label, "seed": self.seed,
            "control": control, "accuracy": accuracy,
            # The interval is of the mean over sequences; where sequences differ in length it is moved to
            # the mean over positions, which is what is reported.
            "lo": max(0.0, accuracy + (found.low - found.estimate).item()),
            "hi": min(1.0, accuracy + (found.high - found.estimate).item()),
            "balanced_accuracy": recall[total > 0].mean().item(), "C": fit.C,
            "n_train": fitted.n_rows[0], "n_val": fitted.n_rows[1], "n_test": int(keep.sum()),
            "n_classes": fit.n_classes, "converged": fit.converged,
        }  # fmt: skip
        self.out.rows.append(row)
        self.out.by_sequence[_key(row)] = per_sequence.float()
        self.out.by_position[_key(row)] = _by_position(guess == truth, keep)
        self.out.by_class[_key(row)] = recall.float()
        return row


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['site']}|{row['label']}|{row['seed']}|{row['control']}"


def _share(right: Tensor) -> float:
    return right.double().mean().item()


def _by_position(right: Tensor, keep: Tensor) -> Tensor:
    return ((right & keep).double().sum(0) / keep.double().sum(0)).float()


def _baselines(data: _Data, split: Split, w: int) -> dict[str, dict[str, float]]:
    """Accuracy of the majority class, and with tokens of position and of the last w tokens, on test."""
    from probelens.tasks.baselines import baselines

    out: dict[str, dict[str, float]] = {}
    train, test = split.train, split.test
    for label, y in data.labels.items():
        if data.tokens is not None:
            found = baselines(
                data.tokens[train],
                y[train],
                data.tokens[test],
                y[test],
                data.mask[train],
                data.mask[test],
                w=w,
            )
            out[label] = {name: scores["accuracy"] for name, scores in found.items()}
        else:
            most = torch.bincount(y[train][data.mask[train]]).argmax()
            out[label] = {"majority": _share(y[test][data.mask[test]] == most)}
    return out

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

from probelens.errors import InputError, UnknownHookError, nearest
from probelens.numerics.modes import exact
from probelens.probing.data import Data
from probelens.probing.fitting import Fitted
from probelens.probing.rows import CONTROL, TASK, Recorder, guesses, key
from probelens.probing.solvers.logistic import DEFAULT_CS
from probelens.probing.splits import FRACTIONS, split_by_group
from probelens.results.progress import progress_bar
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["ProbeResult", "probe"]


@dataclass(frozen=True, eq=False)
class ProbeResult(Result):
    """How well labels can be read linearly at each site.

    Args:
        rows: One a site, label, seed and control: site, layer, label, seed, control ("task",
            "untrained", "control_task"), kind, lo, hi, n_train, n_val, n_test. A label of class ids
            (kind "classification") has accuracy, balanced_accuracy, C, n_classes, converged; a label
            of numbers (kind "regression") has r2 and alpha. On "task" rows also, as far as they are
            known or were asked for, in the same unit: majority, position, last_w, embedding (the site
            of layer −1), untrained, selectivity; and codelength, uniform_codelength, compression.
        coefs: Directions in raw space of each task probe, one row a class, one for a number. (class, d)
        intercepts: (class,)
        means: Mean activation of the training rows at each site and seed. (d,)
        by_sequence: Accuracy of each test sequence, for every row of class ids. (sequence,)
        by_position: Accuracy at each position, NaN where no row counts. (pos,)
        by_class: Recall of each class, NaN where absent from test. (class,)
        extra: What the caller wants to keep with the result; saved and loaded with it.
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

        Returns:
            What is in ``rows``.

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
        """Test accuracy of one probe.

        Args:
            site: Hook point.
            label: Label; None if there is only one.
            seed: Seed; None for the first.
            control: "task", "untrained" or "control_task".

        Returns:
            Share of the test positions that are right, 0 to 1.

        Raises:
            InputError: The label is a number.
        """
        return float(self._score(self.row(site, label, seed, control), "accuracy"))

    def r2(self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK) -> float:
        """Share of the variance of a numeric label that a ridge probe explains on test.

        Args:
            site: Hook point.
            label: Label; None if there is only one.
            seed: Seed; None for the first.
            control: "task", "untrained" or "control_task".

        Returns:
            At most 1; below 0 where the mean of the test rows would do better.

        Raises:
            InputError: The label is a class.
        """
        return float(self._score(self.row(site, label, seed, control), "r2"))

    def _score(self, row: Mapping[str, Any], name: str) -> float:
        if name not in row:
            other = "r2" if name == "accuracy" else "accuracy"
            raise InputError(
                f"label {row['label']!r} has no {name}, as its kind is {row['kind']}: ask for {other}"
            )
        return float(row[name])

    def coef(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Directions of a probe in the space of the activations, one row a class.

        Args:
            site: Hook point.
            label: Label; None if there is only one.
            seed: Seed; None for the first.

        Returns:
            Directions. (class, d)
        """
        row = self.row(site, label, seed)
        return self.coefs[key(row)]

    def intercept(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Intercepts that belong to ``coef``.

        Args:
            site: Hook point.
            label: Label; None if there is only one.
            seed: Seed; None for the first.

        Returns:
            Intercepts. (class,)
        """
        return self.intercepts[key(self.row(site, label, seed))]

    def mean(self, site: str, seed: int | None = None) -> Tensor:
        """Mean activation of the training rows.

        Args:
            site: Hook point.
            seed: Seed; None for the first.

        Returns:
            The mean. (d,)
        """
        row = self.row(site, self.labels[0], seed)
        return self.means[f"{row['site']}|{row['seed']}"]

    def best(self, label: str | None = None) -> dict[str, Any]:
        """The row with the highest test accuracy or R², the earliest of equals.

        Args:
            label: Label; None if there is only one.

        Returns:
            A row, as in ``rows``, of the probes of the task.
        """
        label = self._label(label)
        rows = [r for r in self.rows if r["label"] == label and r["control"] == TASK]
        return max(rows, key=lambda r: r["accuracy"] if "accuracy" in r else r["r2"])

    def sequences(self, label: str | None = None, seed: int | None = None, control: str = TASK) -> Tensor:
        """Accuracy of each test sequence at each site.

        Args:
            label: Label; None if there is only one.
            seed: Seed; None for the first.
            control: "task", "untrained" or "control_task".

        Returns:
            Accuracies, sites in order. (sequence, site)

        Raises:
            InputError: The label is a number.
        """
        rows = [self.row(s, label, seed, control) for s in self.sites]
        self._score(rows[0], "accuracy")
        return torch.stack([self.by_sequence[key(row)] for row in rows], 1)

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

    def plot(self, title: str | None = None, label: str | None = None) -> go.Figure:
        """Accuracy by layer with intervals, baselines and the untrained model; one panel a label.

        Args:
            title: Shown above the figure.
            label: This label alone, R² if it is a number. None: all classes, or where there are
                none all numbers.

        Returns:
            A line chart.
        """
        from probelens.results import plots

        table = self.to_dataframe()
        table = table[(table["control"] == TASK) & (table["seed"] == self.seeds[0])]
        if label is not None:
            table = table[table["label"] == self._label(label)]
        classes = table["kind"] == "classification"
        facet = None
        if classes.any():
            table = table[classes]
            facet = "label" if table["label"].nunique() > 1 else None
            return plots.layer_profile(table, facet=facet, title=title)
        facet = "label" if table["label"].nunique() > 1 else None
        return plots.layer_profile(table, y="r2", y_label="R²", percent=False, facet=facet, title=title)


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
    splits: Sequence[float] = FRACTIONS,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    max_rows: int | None = None,
    tol: float = 1e-3,
    n_boot: int = 1000,
    progress: bool = False,
) -> ProbeResult:
    """Fit linear probes at every site for every label, with what belongs beside their accuracy.

    Args:
        acts: Activations, a dict of tensors by site, or one tensor. each (n, pos, d) or (n, d)
        labels: Class ids (integers) or numbers (floating point; ridge probes, scored by R²), one
            tensor or a dict by label. Where only some positions were collected, labels and masks may
            have all of them. each (n, pos) or (n,)
        groups: What a split must keep together; each sequence by itself if None. Sequences of equal
            tokens are kept together as well. (n,)
        mask: Where labels count; ``acts.mask`` if None. (n, pos)
        tokens: For the position and last-w-tokens baselines; ``acts.tokens`` if None. Give those of all
            positions where only some were collected: what the last tokens give away is read from them. For
            (n, d) activations the whole sequences, to keep copies together. (n, pos) or (n, T)
        untrained: The same sites of the same architecture at random initialisation.
        control_task: Also probe labels that are a hash of the last few tokens, as many as make about
            256 contexts, for selectivity.
        mdl: Also the online codelength of class labels.
        w: Window of the last-w-tokens baseline.
        Cs: Inverse penalties to choose from on validation, for class labels. The walk upwards ends
            early where two in a row bring nothing.
        splits: Shares of train, validation and test, of groups.
        seed: Of the split, when ``seeds`` is None.
        seeds: Several seeds: one split, one set of probes each.
        max_rows: At most so many training rows of class labels, and rows of the codelength, drawn at
            random; None for all.
        tol: Relative gap in the objective at which the solver stops.
        n_boot: Resamples of test sequences for each interval.
        progress: Show a progress bar.

    Returns:
        Accuracies on the test sequences with 95 % intervals over their groups.

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
    data = Data.of(acts, labels, groups, mask, tokens)
    other = None if untrained is None else data.like(untrained)
    seeds = list(dict.fromkeys([seed] if seeds is None else seeds))
    if not seeds or not Cs:
        raise InputError("seeds and Cs must not be empty")
    if max_rows is not None and max_rows < 2:
        raise InputError(f"max_rows must be at least 2, got {max_rows}")
    if control_task and data.tokens is None:
        raise InputError(
            "control_task=True needs tokens (n, pos): the control labels are a hash of the last ones"
        )
    out = ProbeResult([], {}, {}, {}, {}, {}, {})
    with progress_bar(len(seeds) * len(data.tensors), "probes", progress) as bar:
        for s in seeds:
            split = split_by_group(data.groups, splits, s)
            data.check(split)
            controls = _controls(data, s) if control_task else {}
            record = Recorder(out, data, split, s, controls, guesses(data, split, w), n_boot)
            tasks = {**data.labels, **{f"{CONTROL}|{k}": controls[k] for k in data.labels if k in controls}}
            for site, x in data.tensors.items():
                fitted = Fitted.of(x, tasks, data.mask, split, Cs, tol, max_rows, s)
                base = None
                if other is not None:
                    base = Fitted.of(other[site], data.labels, data.mask, split, Cs, tol, max_rows, s)
                out.means[f"{site}|{s}"] = fitted.mean
                record.site(site, fitted, base)
                if mdl:
                    record.codelength(site, x, Cs, tol, max_rows)
                bar.update(1)
            if data.numbers:
                _numbers(record, other, w, splits)
            record.embedding()
    return out


def _controls(data: Data, seed: int) -> dict[str, Tensor]:
    """Control labels for every label."""
    from probelens.probing.controls import control_labels

    assert data.tokens is not None
    every = {**data.labels, **data.numbers}
    mask = data.spread(data.mask)
    made = {k: control_labels(data.tokens, data.spread(y), mask, seed=seed) for k, y in every.items()}
    return {k: y if data.at is None else y[:, data.at] for k, y in made.items()}


def _numbers(record: Recorder, other: Mapping[str, Tensor] | None, w: int, splits: Sequence[float]) -> None:
    """Ridge probes of the numeric labels, on the same split as the others."""
    from probelens.probing.values import fit_values

    data = record.data

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Any:
        return fit_values(
            dict(tensors), dict(values), data.groups, data.mask, data.tokens, data.at, w=w, splits=splits,
            seeds=[record.seed], n_boot=record.n_boot,
        )  # fmt: skip

    record.numbers(
        read(data.tensors, data.numbers),
        None if other is None else read(other, data.numbers),
        read(data.tensors, {k: record.controls[k] for k in data.numbers}) if record.controls else None,
    )

"""The result of ``probe``: how well each label can be read at each site, beside its baselines and controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, UnknownHookError, nearest
from probelens.probing.directions import Directions
from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import between, count, fixed, hundredths, listed, percent, place, points, small, valued

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["CONTROL", "TASK", "UNTRAINED", "ProbeResult", "best_guess", "key", "read_above"]

_CLASSES, _NUMBERS, _TOKENS, _MDL = "class labels", "numeric labels", "task rows", "task rows, with mdl"
_BASELINES = {
    "majority": "majority class", "position": "position", "last_w": "last tokens", "embedding": "embedding",
    "untrained": "untrained model",
}  # fmt: skip

TOLD = 0.95  # from which on a guess from the last tokens counts as always right
MARGIN = 0.02  # up to so far above its best baseline a score counts as nothing read
_LITTLE = 0.01  # a share of the variance below which a direction carries almost none
LOCATED = ("pattern", "class_means", "leace_left", "leace_right")
TASK, CONTROL, UNTRAINED = "task", "control_task", "untrained"


def key(row: Mapping[str, Any]) -> str:
    """The name under which a result keeps the tensors of a row."""
    return f"{row['site']}|{row['label']}|{row['seed']}|{row['control']}"


@dataclass(frozen=True, eq=False)
class ProbeResult(Rows):
    """How well labels can be read linearly at each site.

    Args:
        rows: One per site, label, seed and control; ``columns`` says what each holds.
        coefs: Directions of each task probe in the space of the activations, one row per class, one for a
            number. (class, d)
        intercepts: (class,)
        means: Mean activation of the training rows at each site and seed. (d,)
        by_sequence: Accuracy of each test sequence, for every row of class ids. (sequence,)
        by_position: Accuracy at each position, NaN where no row counts. (pos,)
        by_class: Recall of each class, NaN where absent from test. (class,)
        extra: What the caller wants to keep with the result; saved and loaded with it.
        located: Where each label lies, beside the probe's rows: "pattern", "class_means", "leace_left" and
            "leace_right" under the row's key; see ``Directions``. (k, d)
        classes: The class ids of each label, ascending: one per row of ``coefs`` and entry of ``by_class``. (class,)
    """

    columns = (
        Column("site", str, "Hook point."),
        Column("layer", int | None, "Place on the layer axis; −1 is the embedding, None is unknown."),
        Column("label", str, "What is read."),
        Column("seed", int, "Seed of the split."),
        Column(
            "control",
            str,
            '"task"; "untrained": the same architecture at random initialisation; "control_task": labels that are a hash of '
            "the last tokens.",
        ),
        Column("kind", str, '"classification" for class ids, "regression" for numbers.'),
        Column("accuracy", float, "Share of the test positions that are right.", "fraction of 1", _CLASSES),
        Column("r2", float, "Share of the variance explained on test; 0 is the mean.", "fraction of 1", _NUMBERS),
        Column("lo", float, "Lower end of the 95 % interval of accuracy or r2, over groups.", "fraction of 1"),
        Column("hi", float, "Upper end of it.", "fraction of 1"),
        Column("balanced_accuracy", float, "Mean recall of the classes in test.", "fraction of 1", _CLASSES),
        Column("mse", float, "Mean squared error on test.", "the label's, squared", _NUMBERS),
        Column("C", float, "Inverse penalty chosen on validation.", on=_CLASSES),
        Column("alpha", float, "Penalty chosen on validation.", on=_NUMBERS),
        Column("n_train", int, "Training rows.", "positions"),
        Column("n_val", int, "Validation rows.", "positions"),
        Column("n_test", int, "Test rows.", "positions"),
        Column("n_classes", int, "Classes.", on=_CLASSES),
        Column("converged", bool, "Whether the solver reached its tolerance.", on=_CLASSES),
        Column("majority", float, "Accuracy of the most frequent class.", "fraction of 1", _CLASSES),
        Column("position", float, "Score of the best guess from the position alone.", "fraction of 1", _TOKENS),
        Column("last_w", float, "Score of the best guess from the last w tokens.", "fraction of 1", _TOKENS),
        Column("untrained", float, "Score of the untrained model.", "fraction of 1", "task rows, with untrained"),
        Column("selectivity", float, "Score − the control task's.", "fraction of 1", "task rows, with control_task"),
        Column("embedding", float, "Score at the embedding.", "fraction of 1", "task rows, with the embedding probed"),
        Column("codelength", float, "Online codelength of the labels.", "bits", _MDL),
        Column("uniform_codelength", float, "Codelength by an even distribution over the classes.", "bits", _MDL),
        Column("label_codelength", float, "Codelength by the label's own frequencies, n · H(y).", "bits", _MDL),
        Column("compression", float, "uniform_codelength/codelength; to be compared with compression_floor.", "", _MDL),
        Column(
            "compression_floor",
            float,
            "uniform_codelength/label_codelength: what the label's frequencies alone give, 1 for even classes.",
            "",
            _MDL,
        ),
        Column(
            "filter_variance",
            float,
            "Share of the activations' variance in the span of the probe's rows, on the training rows.",
            "fraction of 1",
            "task rows",
        ),
        Column(
            "filter_between_variance",
            float,
            "Share of the between-class variance in that span.",
            "fraction of 1",
            "task rows",
        ),
        Column(
            "class_means_variance",
            float,
            "Share of the activations' variance in the span of the class means.",
            "fraction of 1",
            "task rows",
        ),
        Column(
            "class_means_between_variance",
            float,
            "Share of the between-class variance in that span: all of it.",
            "fraction of 1",
            "task rows",
        ),
    )

    rows: list[dict[str, Any]]
    coefs: dict[str, Tensor]
    intercepts: dict[str, Tensor]
    means: dict[str, Tensor]
    by_sequence: dict[str, Tensor]
    by_position: dict[str, Tensor]
    by_class: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    located: dict[str, Tensor] = field(default_factory=dict)
    classes: dict[str, Tensor] = field(default_factory=dict)

    def directions(self, site: str, label: str | None = None, seed: int | None = None) -> Directions:
        """Where a label lies in the activations of a site: filter, pattern, class means and LEACE.

        Args:
            Those of ``ProbeResult.row``, without ``control``.

        Returns:
            Directions of every definition. each (k, d)

        Raises:
            InputError: The result was saved before probes kept them.
        """
        name = key(self.row(site, label, seed))
        if f"{name}|pattern" not in self.located:
            raise InputError(
                "this ProbeResult was saved without patterns and class means, so only the probe's rows are known. "
                'Probe again, take those with directions="filter", or make subspaces from activations, as '
                "probelens.subspaces.class_means(X, y) does"
            )
        pattern, means, left, right = (self.located[f"{name}|{n}"].double() for n in LOCATED)
        return Directions(self.coefs[name].double(), pattern, means, left, right)

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

    def row(self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK) -> dict[str, Any]:
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

    def accuracy(self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK) -> float:
        """Test accuracy of one probe.

        Args:
            Those of ``ProbeResult.row``.

        Returns:
            Share of the test positions that are right, 0 to 1.

        Raises:
            InputError: The label is a number.
        """
        return float(self._score(self.row(site, label, seed, control), "accuracy"))

    def r2(self, site: str, label: str | None = None, seed: int | None = None, control: str = TASK) -> float:
        """Share of the variance of a numeric label that a ridge probe explains on test.

        Args:
            Those of ``ProbeResult.row``.

        Returns:
            At most 1; below 0 where the mean of the test rows would do better.

        Raises:
            InputError: The label is a class.
        """
        return float(self._score(self.row(site, label, seed, control), "r2"))

    def _score(self, row: Mapping[str, Any], name: str) -> float:
        if name not in row:
            other = "r2" if name == "accuracy" else "accuracy"
            raise InputError(f"label {row['label']!r} has no {name}, as its kind is {row['kind']}: ask for {other}")
        return float(row[name])

    def coef(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Directions of a probe in the space of the activations, one row a class.

        Args:
            Those of ``ProbeResult.row``, without ``control``.

        Returns:
            Directions. (class, d)
        """
        return self.coefs[key(self.row(site, label, seed))]

    def intercept(self, site: str, label: str | None = None, seed: int | None = None) -> Tensor:
        """Intercepts that belong to ``coef``.

        Args:
            Those of ``ProbeResult.row``, without ``control``.

        Returns:
            Intercepts. (class,)
        """
        return self.intercepts[key(self.row(site, label, seed))]

    def mean(self, site: str, seed: int | None = None) -> Tensor:
        """Mean activation of the training rows.

        Args:
            site, seed: As for ``ProbeResult.row``.

        Returns:
            The mean. (d,)

        Raises:
            InputError: The result was saved by a version that kept no means.
        """
        row = self.row(site, self.labels[0], seed)
        name = f"{row['site']}|{row['seed']}"
        if name not in self.means:
            raise InputError("this result was saved without mean activations: probe again, or give the mean")
        return self.means[name]

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
            Those of ``ProbeResult.row``, without ``site``.

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

    def findings(self) -> list[str]:
        """Where each label is read best, beside its baselines and controls.

        Returns:
            Sentences, one per line.
        """
        seeds = count(len(self.seeds), "seed")
        lines = [f"{listed(map(repr, self.labels))} probed at {count(len(self.sites), 'site')}, {seeds}."]
        for label in self.labels:
            row = self.best(label)
            number = "r2" in row
            what, score = ("R²", row["r2"]) if number else ("accuracy", row["accuracy"])
            say, end, gap = (fixed, fixed, fixed) if number else (percent, hundredths, points)
            named = {n: row[n] for n in _BASELINES if n in row and (n != "embedding" or row["layer"] != -1)}
            lines.append(
                f"{label}: highest {what} {say(score)}{between(row['lo'], row['hi'], end)} at {place(row)}, on "
                f"{count(row['n_test'], 'test position')}."
            )
            if named:
                said = listed((f"{_BASELINES[name]} {say(value)}" for name, value in named.items()), 9)
                over = round(score - max(named.values()), 2 if number else 3)
                far = f"{gap(abs(over))} {'above' if over > 0 else 'below'}" if over else "At"
                lines.append(f"  {far} the best baseline. Baseline{'s' if len(named) > 1 else ''}: {said}.")
            more = [f"selectivity {gap(row['selectivity'])}"] if "selectivity" in row else []
            if "compression" in row:
                more.append(_compressed(row))
            if more:
                lines.append(f"  {listed(more).capitalize()}.")
            if row["lo"] > max(named.values(), default=0) and _hardly_any(row):
                lines.append(
                    f"  The probe's rows carry {small(row['filter_variance'])} of the variance, the class means "
                    f"{small(row['class_means_variance'])}: directions to read with, not where the label lies."
                )
        return lines

    def plot(self, title: str | None = None, label: str | None = None) -> go.Figure:
        """Accuracy by layer with intervals, baselines and the untrained model; one panel per label.

        Several seeds are drawn as their mean with a band; see ``layer_profile``. Sites whose layer isn't known are drawn in
        the order given.

        Args:
            title: Shown above the figure.
            label: This label alone, R² if it is a number. None: all classes, or where there are none all numbers.

        Returns:
            A line chart.
        """
        from probelens.results import plots

        table = self.to_dataframe()
        table = table[table["control"] == TASK]
        if label is not None:
            table = table[table["label"] == self._label(label)]
        classes = table["kind"] == "classification"
        scale: dict[str, Any] = {} if classes.any() else {"y": "r2", "y_label": "R²", "percent": False}
        table = table[classes] if classes.any() else table
        facet = "label" if table["label"].nunique() > 1 else None
        unknown = table["layer"].isna().any()
        if unknown:
            table = table.assign(layer=[self.sites.index(site) for site in table["site"]])
        figure = plots.layer_profile(table, facet=facet, title=title, **scale)
        if unknown:
            named = [plots.style.escape(site) for site in self.sites]
            figure.update_xaxes(tickmode="array", tickvals=list(range(len(named))), ticktext=named)
            figure.update_xaxes(selector={"title.text": plots.lines.BY_LAYER}, title_text="site")
        return figure

    @classmethod
    def _read_former(cls, name: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Fields of a ValueProbeResult, which earlier versions saved for numeric labels."""
        if name != "ValueProbeResult":
            return super()._read_former(name, fields)
        rows = [{**row, "control": TASK, "kind": "regression"} for row in fields["rows"]]
        kept = {part: {f"{k}|{TASK}": t[None] for k, t in fields[part].items()} for part in ("coefs", "intercepts")}
        return {"rows": rows, **kept, "means": {}, "by_sequence": {}, "by_position": {}, "by_class": {}}


def _compressed(row: Mapping[str, Any]) -> str:
    """The compression of a row beside what the label's frequencies alone give."""
    said, floor = f"compression {valued(row['compression'])}", row.get("compression_floor")
    if floor is None:
        return said
    beyond = f"{row['compression'] / floor:.2f} times" if row["compression"] > floor else "no more than"
    return f"{said}, {beyond} the {valued(floor)} that the label's frequencies alone give"


def _hardly_any(row: Mapping[str, Any]) -> bool:
    """Whether the probe's rows carry almost no variance, where the class means carry more."""
    if "filter_variance" not in row:
        return False
    return bool(row["filter_variance"] < min(_LITTLE, row["class_means_variance"] / 10))


def best_guess(row: Mapping[str, Any]) -> float:
    """The best score without activations that a row of probes holds."""
    return max([0.0, *(row[k] for k in ("majority", "position", "last_w") if row.get(k) is not None)])


def read_above(row: Mapping[str, Any]) -> str:
    """Whether a probe's interval is over its best baseline by more than ``MARGIN``: "yes", "no" or "can't tell".

    By a quarter of what is left, where that is less. A guess from the last tokens that is nearly always right leaves
    nothing to read beyond it: the label is a property of these tokens. Then a probe that is as good reads it.
    """
    low, high = row["lo"], row["hi"]
    if low is None or high is None or low != low or high != high:
        return "can't tell"
    best, tokens = best_guess(row), row.get("last_w")
    if tokens is not None and TOLD <= tokens == best and high >= tokens:
        best = best_guess({**row, "last_w": None})
    bound = best + min(MARGIN, (1 - best) / 4)
    return "yes" if low > bound else "no" if high <= bound else "can't tell"

"""``AblationResult``: what removing a subspace cost at each site, beside its controls and the refitted probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from probelens.ablation.columns import ABLATION
from probelens.ablation.controls import CONTROLS
from probelens.ablation.given import warning
from probelens.ablation.scoring import COST
from probelens.ablation.verdict import SHIFTED
from probelens.probing.power import RESIDUE
from probelens.results.rows import Rows
from probelens.results.sentences import between, count, fixed, hundredths, percent, place, points, sites, valued

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["AblationResult", "Costs", "carried"]

_EQUAL = {"random": "at equal rank", "random_matched": "at equal variance"}
_ENOUGH = 19  # draws of a control from which on p can reach 0.05
_REFITTED = {
    "refit_accuracy": "a refitted linear probe",
    "refit_mlp_accuracy": "a refitted MLP",
    "refit_position_accuracy": "linear probes refitted at each position",
}
_MEANING = {
    "unread": "noise there changes no output",
    "floor": "the model is near chance without any ablation",
    "tautological": "the readout reads this site, so erasing there must hurt",
    "absent": "no probe read it before either",
    "erased": "no probe reads it any more",
}
BELOW = 0.1  # so far below chance a model answers something else than the labels
_BELOW = "the model does worse than a constant answer; are the labels those that it answers with?"
_SIZE = f"of {RESIDUE:g} standard deviations of a feature"


@dataclass(frozen=True, eq=False)
class AblationResult(Rows):
    """What ablating a subspace cost at each site, beside its controls and the refitted probe.

    Args:
        rows: One per site, condition and draw; ``columns`` says what each holds.
        values: The metric of each example under each row's condition. (row, example)
        clean: The metric of each example without ablation. (example,)
        by_position: Mean metric at each position. (row, pos)
        clean_by_position: The same without ablation. (pos,)
        label: The variable whose subspace was ablated.
        target: The label that the model's answer is compared with, or "".
        metric: Name of the metric.
        chance: Best accuracy of a constant answer, averaged over sequences, as in ``clean``.
        path: How the engine ran: "resume", "skip" or "full"; see ``sweep``.
        refit_by_position: Accuracy of the refitted linear probe at each position. (target, pos)
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = ABLATION

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

    def targets(self) -> list[dict[str, Any]]:
        """The rows of the ablated subspaces themselves, without controls."""
        return [row for row in self.rows if row["condition"] not in CONTROLS]

    def findings(self) -> list[str]:
        """The costliest site beside its controls, what a refitted probe reads there, and the verdicts."""
        targets, costs = self.targets(), Costs(self.metric)
        worst = costs.worst(targets)
        verdicts: dict[str, list[dict[str, Any]]] = {}
        for row in targets:
            verdicts.setdefault(row["verdict"], []).append(row)
        said = (f"{word} at {sites(rows, targets)}{_meaning(word, rows, targets)}" for word, rows in verdicts.items())
        draws = sum((r["site"], r["condition"]) == (worst["site"], worst.get("effect_against")) for r in self.rows)
        lines = [
            f"{self.label!r} removed at {count(len(targets), 'site')}, on {count(len(self.clean), 'sequence')}. "
            f"{costs.metric(worst)}",
            f"{costs.most(worst)} at {place(worst)}, rank {worst['rank']}{carried(worst)}: {costs.cost(worst)}"
            f"{costs.doubt(worst)}.{_effect(worst, draws, self.metric)}{_problem(worst)}",
            costs.controls(r for r in self.rows if r["site"] == worst["site"]),
            _refit(worst),
            warning(worst, self.label, self.target),
            f"Verdict: {'; '.join(said)}.",
            _needed(targets),
        ]
        return [line for line in lines if line]

    def plot(self, title: str | None = None) -> go.Figure:
        """Drop by layer beside its controls, and the refitted probe in a panel below.

        Args:
            title: Shown above the figure.
        """
        from probelens.results import plots

        return plots.ablation(self.to_dataframe(), metric=self.metric, percent=self.metric == "accuracy", title=title)


@dataclass(frozen=True)
class Costs:
    """Says what ablations cost, in the unit of the metric of this name."""

    name: str

    @property
    def sign(self) -> int:
        """The sign of a drop that hurts."""
        return COST.get(self.name, 1)

    def say(self, value: float, unit: bool = True) -> str:
        """A difference of the metric in words."""
        if self.name == "accuracy":
            return points(value) if unit else hundredths(value)
        return valued(value) + (" nats" if unit and self.name == "next_token_loss" else "")

    def metric(self, row: Mapping[str, Any]) -> str:
        """The metric without ablation, and chance."""
        say: Callable[[float | None], str] = percent if self.name == "accuracy" else valued
        chance = "" if row["chance"] is None or self.name == "r2" else f", chance {say(row['chance'])}"
        return f"Without ablation {self.name.replace('_', ' ')} is {say(row['clean'])}{chance}."

    def worst(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The row of the largest cost among those that cost more than their control; among all where none does."""
        return max(rows, key=lambda row: (self.beyond(row), self.sign * row["drop"]))

    def beyond(self, row: Mapping[str, Any]) -> bool:
        """Whether a row costs more than its control on average, as far as there is one."""
        return row.get("effect") is None or self.sign * row["effect"] > 0

    def most(self, row: Mapping[str, Any]) -> str:
        """How a sentence about the costliest row begins."""
        if self.sign * row["drop"] <= 0:
            return "No site costs anything; the largest is"
        return "Costs most" if self.beyond(row) else "No site costs more than its control; the largest is"

    def cost(self, row: Mapping[str, Any]) -> str:
        """The cost of a row with its interval."""
        low, high = sorted(self.sign * row[end] for end in ("lo", "hi"))
        return self.say(self.sign * row["drop"]) + between(low, high, lambda v: self.say(v, unit=False))

    def doubt(self, row: Mapping[str, Any]) -> str:
        """What to add to a cost whose interval holds 0."""
        return ", which can't be told from 0" if self.sign * row["drop"] > 0 and row["lo"] <= 0 <= row["hi"] else ""

    def controls(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Mean costs of the controls among these rows, as a sentence; "" if there are none."""
        drops: dict[str, list[float]] = {}
        for row in rows:
            drops.setdefault(row["condition"], []).append(self.sign * row["drop"])
        mean = {kind: sum(drops[kind]) / len(drops[kind]) for kind in CONTROLS if kind in drops}
        equal = [kind for kind in _EQUAL if kind in mean]
        said = [f"{self.say(mean[kind], unit=i == 0)} {_EQUAL[kind]}" for i, kind in enumerate(equal)]
        found = [f"random subspaces cost {' and '.join(said)}"] if said else []
        names = {"pca": "the top principal components", "orthogonal_pca": "the top ones orthogonal to it"}
        found += [f"{name} {self.say(mean[kind], not said)}" for kind, name in names.items() if kind in mean]
        return f"There {', '.join(found)}." if found else ""


def carried(row: Mapping[str, Any]) -> str:
    """What the directions are and the variance on them, to follow the place in a sentence."""
    if row.get("variance") is None:  # a result saved by an earlier version
        return ""
    between = row.get("between_variance")
    more = "" if between is None else f" and {percent(between)} of that between classes"
    return f", {row['directions'].replace('_', ' ')} with {percent(row['variance'])} of the variance{more}"


def _meaning(word: str, rows: Sequence[Mapping[str, Any]], among: Sequence[Mapping[str, Any]]) -> str:
    """What a verdict means at these sites; of "inconclusive" which probe reads furthest above its baseline."""
    if word == "floor" and all(row["clean"] < row["chance"] - BELOW for row in rows):
        return f" ({_BELOW})"
    if word == "underpowered":
        most = [row.get("n_needed") for row in rows]
        known = max((n for n in most if n is not None), default=None)
        more = "; no sample tried is enough" if None in most or known is None else f"; {known:,} sequences would do"
        sizes = [row.get("residue_size") for row in rows]
        seen = max((size for size in sizes if size is not None), default=None)
        more = more if None in sizes or seen is None else f", only one of {seen:g}{more}"
        return f" (no probe reads it any more, but on so few sequences they don't read a planted residue {_SIZE} either{more})"
    if word == "erased" and all(row.get("residue_size") is not None for row in rows):
        return f" ({_MEANING[word]}, and one {_SIZE} they would have)"
    if word != "inconclusive":
        return f" ({_MEANING[word]})" if word in _MEANING else ""
    read = [
        (row[column] - row["baseline"], row[column], said, row)
        for row in rows
        for column, said in _REFITTED.items()
        if row.get(column) is not None
    ]
    if not read:
        return " (a refitted probe still reads it)"
    _, score, said, row = max(read, key=lambda r: r[0])
    at, say = f" at {sites([row], among)}" if len(rows) > 1 else "", _score(row)
    return f" (still read by {said}: {say(score)}{at}, baseline {say(row['baseline'])})"


def _score(row: Mapping[str, Any]) -> Callable[[float], str]:
    """How what a refitted probe reads is said: accuracies in per cent, R² of values as it is."""
    return (lambda value: f"R² {fixed(value)}") if row.get("refit_score") == "r2" else percent


def _effect(row: Mapping[str, Any], draws: int, metric: str) -> str:
    """The effect as a cost, as the drop is: above 0 it hurts, also of a loss."""
    sign = Costs(metric).sign
    if row.get("effect") is None:
        return ""
    over = _EQUAL[row["effect_against"]]
    p = "" if row["effect_p"] is None else f", p = {row['effect_p']:.2g}"
    adjusted = row.get("effect_p_adjusted")
    if p and adjusted is not None and f"{adjusted:.2g}" != f"{row['effect_p']:.2g}":
        p += f" ({adjusted:.2g} adjusted for the number of sites)"
    if p and draws < _ENOUGH:
        p += f" (the smallest possible with {count(draws, 'draw')} is 1/{draws + 1})"
    low, high = sorted(sign * row[end] for end in ("effect_lo", "effect_hi"))
    share = "of R²" if metric == "r2" else "of the accuracy above chance"
    unit = "" if row["chance"] is None else f", as a share {share}"
    return f" Effect beyond random subspaces {over}: {fixed(sign * row['effect'])}{between(low, high, fixed)}{unit}{p}."


def _problem(row: Mapping[str, Any]) -> str:
    """Why there is no control of equal variance, where one was asked for, and what no control does."""
    said = (
        f" No control of equal variance: {row['control_problem']}."
        if row.get("control_problem") and row["rank"]
        else ""
    )
    if (shift := row.get("mean_shift") or 0.0) > SHIFTED:
        said += (
            f" The subspace's mean is {fixed(shift)} standard deviations from that of these activations, so removing it also "
            "puts in a value that no control does. Give the mean of activations like these."
        )
    return said


def _needed(rows: Sequence[Mapping[str, Any]]) -> str:
    by_word = {word: [r for r in rows if r.get("needed") == word] for word in ("yes", "no", "can't tell")}
    said = [f"{word} at {sites(found, rows)}" for word, found in by_word.items() if found]
    return f"Does the model need these directions? {'; '.join(said)}." if said else ""


def _refit(row: Mapping[str, Any]) -> str:
    if "refit_accuracy" not in row:
        return ""
    say = _score(row)
    more = "".join(
        f", {said} {say(row[column])}" for column, said in list(_REFITTED.items())[1:] if row.get(column) is not None
    )
    return (
        f"There a linear probe reads {say(row['probe_accuracy'])} before, refitted {say(row['refit_accuracy'])}"
        f"{more}; baseline {say(row['baseline'])}."
    )

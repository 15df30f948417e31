"""``Profile``: where one model keeps each variable of a task, and whether it uses it, as one table of four answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probelens.ablation.columns import ABLATION
from probelens.ablation.result import AblationResult
from probelens.ablation.scoring import COST
from probelens.errors import InputError, MetricError
from probelens.numerics.indices import ProfileIndices
from probelens.patching.interchange_result import InterchangeResult
from probelens.patching.result import PatchResult
from probelens.probing.result import ProbeResult
from probelens.profiling.answers import ANSWERS, interchanged, needed, patched, readable
from probelens.profiling.material import WARM_UP
from probelens.results.columns import Column, table
from probelens.results.result import Result
from probelens.results.sentences import fixed, layers, listed, percent, points

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["Profile"]

NAMES = {"accuracy": "accuracy", "r2": "R²", "mse": "squared error", "next_token_loss": "loss"}
_HELD = " Of the sequences that are ablated, as `variance`, where the probe's rows were ablated."
_COST = (
    "directions", "variance", "between_variance", "clean", "value", "drop", "damage", "effect", "effect_lo", "effect_hi",
    "effect_p", "effect_p_adjusted", "control_overlap", "refit_accuracy", "refit_mlp_accuracy", "verdict",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Profile(Result):
    """Where one model keeps each variable of a task, and whether it uses it.

    Args:
        probes: Readable? Probes at every site of the layer axis.
        ablations: Needed? The span of the class means removed, by label.
        patches: Sufficient? By name of the pairs.
        indices: Profile statistics and verdict, by label.
        behaviour: The model's own score on the target: "all", and of a task "late" (positions over 20).
        baseline: The best guess of each label without its state, which the indices count from.
        task: The task's config; what the inputs are, under "inputs", where there is no task.
        length: Positions of each example.
        model: Name of the model.
        filters: As ``ablations``, of the probe's own rows; empty in profiles of earlier versions.
        interchanges: Used? The span of the class means swapped between the runs of pairs that differ in the label; empty in
            profiles of earlier versions.
        target: The label that the model answers with; "" where the metric needs none.
        metric: What the model's answers and ablations are scored by.
        unasked: Why a question has no answer, by "label: question".
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = (
        Column("model", str, "Name of the model."),
        *(
            dataclasses.replace(c, meaning=c.meaning + _HELD) if c.name == "filter_variance" else c
            for c in ProbeResult.columns
        ),
        *(dataclasses.replace(c, type=c.type | None) for c in ABLATION if c.name in _COST),
        Column("drop_lo", float | None, "Lower end of the 95 % interval of the drop, over sequences.", "fraction of 1"),
        Column("drop_hi", float | None, "Upper end of it.", "fraction of 1"),
        *ANSWERS,
    )

    probes: ProbeResult
    ablations: dict[str, AblationResult]
    patches: dict[str, PatchResult]
    indices: dict[str, ProfileIndices]
    behaviour: dict[str, float]
    baseline: dict[str, float]
    task: dict[str, Any]
    length: int
    model: str
    filters: dict[str, AblationResult] = field(default_factory=dict)
    interchanges: dict[str, InterchangeResult] = field(default_factory=dict)
    target: str = ""
    metric: str = "accuracy"
    unasked: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dataframe(self) -> pd.DataFrame:
        """The task's probes, each with the four answers and the numbers that they rest on.

        Returns:
            One row per site, label and seed.
        """
        return table([self._row(row) for row in self.probes.rows if row["control"] == "task"], self.columns)

    def answers(self) -> pd.DataFrame:
        """One row a layer: readable, needed, sufficient, used, and the number that each rests on.

        Returns:
            Columns label, layer, site, readable, accuracy (r2 of values), baseline, needed, drop, variance, effect, verdict (of the
            ablation; "absent" also where readable is "no" and a refitted probe reads nothing), filter_drop, filter_variance, sufficient, recovery, used, iia, iia_complement and interchange.
        """
        shown = (
            "label", "layer", "site", "readable", "accuracy", "r2", "baseline", "needed", "drop", "variance", "effect", "verdict",
            "filter_drop", "filter_variance", "sufficient", "recovery", "used", "iia", "iia_complement", "interchange",
        )  # fmt: skip
        found = self.to_dataframe()
        found = found[found["seed"] == found["seed"].iloc[0]]
        return found[[name for name in shown if name in found]].reset_index(drop=True)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        label, site = row["label"], row["site"]
        targets = {
            name: next((r for r in found[label].targets() if r["site"] == site), None) if label in found else None
            for name, found in (("ablation", self.ablations), ("filter", self.filters))
        }
        cost = targets["ablation"]
        read = readable(row, self.baseline[label])
        merged = {"model": self.model, **row, **read}
        if cost is not None:
            merged |= {name: cost.get(name) for name in _COST}
            merged.update(drop_lo=cost.get("lo"), drop_hi=cost.get("hi"))
        swapped = self.interchanges.get(label)
        return {
            **merged, **needed(cost, targets["filter"], read["readable"]), **patched(self.patches.get(label), site),
            **interchanged([] if swapped is None else swapped.rows, site, read["readable"]),
        }  # fmt: skip

    def measurements(self) -> list[dict[str, Any]]:
        """Every row of the probes, ablations, patches and interchanges.

        Returns:
            Rows with the columns of their own tables, and ``kind``: "probe", "ablation", "filter" (the probe's own rows
            ablated), "patch", the latter with ``pairs``, or "interchange". Of pairs that the model never answers
            correctly, one row with the reason as ``problem``.
        """
        results: list[tuple[dict[str, Any], Any]] = [({"kind": "probe"}, self.probes)]
        results += [({"kind": "ablation"}, found) for found in self.ablations.values()]
        results += [({"kind": "filter"}, found) for found in self.filters.values()]
        results += [({"kind": "patch", "pairs": name}, found) for name, found in self.patches.items()]
        results += [({"kind": "interchange", "label": label}, found) for label, found in self.interchanges.items()]
        rows: list[dict[str, Any]] = []
        for about, found in results:
            try:
                records = found.to_dataframe().to_dict("records")
            except MetricError as err:
                records = [{"problem": str(err)}]
            # A table may have a column `kind`; here it says which table the row is from.
            rows += [{**record, **about} for record in records]
        return rows

    def findings(self) -> list[str]:
        """What the model knows, and one line a label: readable, needed, sufficient, used, with what each rests on."""
        say = _number(self.metric)
        known = f"own {NAMES.get(self.metric, self.metric)} {say(self.behaviour['all'])}"
        if (
            "late" in self.behaviour and self.length + self.task.get("bos", False) > WARM_UP + 1
        ):  # some positions are later
            known += f" ({say(self.behaviour['late'])} after position {WARM_UP})"
        what = self.task.get("inputs") or f"{self.task.get('task', 'a task')} of length {self.length}"
        lines = [f"{self.model} on {what}, {known}."]
        for label in self.indices:
            lines += self.said(label)
        return lines

    def said(self, label: str) -> list[str]:
        """Two sentences on a label: its four answers with what each rests on, and its profile over layers.

        Args:
            label: Which label.

        Returns:
            The sentences.
        """
        rows = [self._row(row) for row in self.probes.rows if (row["control"], row["label"]) == ("task", label)]
        rows = [row for row in rows if row["seed"] == self.probes.seeds[0]]
        found = self.indices[label]
        lines = [f"{label}: {'; '.join(_said(rows, self.metric))}."]
        lines += [
            f"  Not asked: {name.removeprefix(f'{label}: ')}, as {why.rstrip('.')}."
            for name, why in self.unasked.items()
            if name.startswith(f"{label}: ")
        ]
        return [*lines, f"  Profile over layers: {found.verdict}, {found.reason}."]

    def plot(self) -> go.Figure:
        """Probe accuracy by layer with its baselines."""
        return self.probes.plot()

    def plot_needed(self, label: str) -> go.Figure:
        """What removing the class means costs at each layer beside the probe's own rows and random subspaces.

        Args:
            label: Which label.

        Returns:
            As ``AblationResult.plot``.

        Raises:
            InputError: Nothing was ablated for this label.
        """
        import pandas as pd

        from probelens.results import plots

        if label not in self.ablations:
            raise InputError(f"nothing was ablated for {label!r}. Known labels: {listed(self.ablations)}")
        cost = self.ablations[label].to_dataframe()
        parts = [cost.assign(condition=cost["condition"].replace("target", "class means"))]
        if label in self.filters:
            beside = self.filters[label].to_dataframe()
            parts.append(beside[beside["condition"] == "target"].assign(condition="probe's own rows"))
        return plots.ablation(pd.concat(parts, ignore_index=True))


def _number(metric: str) -> Callable[[float], str]:
    """How a metric's numbers are said: shares in per cent."""
    return percent if metric == "accuracy" else fixed


def _said(rows: list[dict[str, Any]], metric: str) -> list[str]:
    """One clause a question: where the answer is yes, and the number there that it rests on."""
    kind = "r2" if "r2" in rows[0] else "accuracy"
    best, say = max(rows, key=lambda row: row[kind]), _number(kind)
    out = [
        f"readable {_where(rows, 'readable')} (probe {'R² ' if kind == 'r2' else ''}{say(best[kind])} at "
        f"{layers([best['layer']])}, best guess {say(best['baseline'])})"
    ]
    if any(row.get("needed") is not None for row in rows):
        cut = [row for row in rows if row.get("effect") is not None]
        worst = max(cut, key=lambda row: COST.get(metric, 1) * row["effect"]) if cut else None
        rests = "no effect could be measured"
        if worst is not None:
            rests = (
                f"without the class means {_lost(worst['drop'], metric)} at {layers([worst['layer']])}, effect beyond controls "
                f"{fixed(worst['effect'])}"
            )
            if worst.get("filter_drop") is not None:
                rests += (
                    f"; without the probe's own rows, {percent(worst.get('filter_variance'))} of the variance, "
                    f"{_lost(worst['filter_drop'], metric).removesuffix(' lost')}"
                )
        out.append(f"needed {_where(rows, 'needed')} ({rests})")
    if any(row.get("sufficient") is not None for row in rows):
        put = [row for row in rows if row.get("recovery") is not None]
        most = max(put, key=lambda row: row["recovery"]) if put else None
        rests = "no pair has a gap to restore" if most is None else (
            f"one position at {layers([most['layer']])} restores {fixed(most['recovery'])} of the gap"
        )  # fmt: skip
        out.append(f"sufficient {_where(rows, 'sufficient')} ({rests})")
    if any(row.get("used") is not None for row in rows):
        moved = [row for row in rows if row.get("iia") is not None and row["readable"] != "no"]
        most = max(moved, key=lambda row: row["iia"]) if moved else None
        nowhere = "it is read at no layer" if all(row["readable"] == "no" for row in rows) else (
            "no layer where it is read has pairs that both runs answer correctly"
        )  # fmt: skip
        rests = nowhere if most is None else (
            f"the answer follows the class means in {percent(most['iia'])} of pairs at {layers([most['layer']])}, all else "
            f"swapped in {percent(most['iia_complement'])}"
        )  # fmt: skip
        out.append(f"used {_where(rows, 'used')} ({rests})")
    return out


def _lost(drop: float, metric: str) -> str:
    return f"{points(drop)} lost" if metric == "accuracy" else f"{NAMES.get(metric, metric)} changed by {fixed(-drop)}"


def _where(rows: list[dict[str, Any]], question: str) -> str:
    yes = [row["layer"] for row in rows if row.get(question) == "yes"]
    if yes:
        return f"at {layers(yes)}"
    asked = [row for row in rows if row.get(question) is not None]
    return "nowhere" if asked and all(row[question] == "no" for row in asked) else "can't tell"

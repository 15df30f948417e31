"""``InterchangeResult``: whether the answer followed, for every site, position and control, and what that says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import count, percent, place, positions, sites
from probelens.subspaces.matched import OVERLAP

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["InterchangeResult"]

SHARE, TARGETS = "fraction of 1", "targets"
NAMES = {
    "complement": "everything but it", "full": "everything", "random": "random subspaces", "same_value": "answers that stay",
    "random_matched": "random subspaces of equal variance", "orthogonal_pca": "components orthogonal to it",
    "row_space": "the part that is read", "null_space": "the part that is not read", "noise": "noise",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class InterchangeResult(Rows):
    """Whether the answer followed, for every site, position and condition.

    Args:
        rows: One per site, position, condition and draw; ``columns`` says what each holds.
        followed: Whether each pair's answer became the source's; no rows of "same_value". (run, example)
        correct: Whether both runs answer a pair correctly. (example,)
        path: How the engine ran: "resume", "skip" or "full".
        extra: What the caller wants to keep with the result; saved and loaded with it. "rounding" says how far runs from
            mid-sequence were from whole ones in half precision.
    """

    columns = (
        Column("site", str, "Hook point."),
        Column("layer", int, "Place on the layer axis; −1 is the embedding."),
        Column("head", int | None, "Number of the head that is interchanged by itself; None for the whole activation."),
        Column("pos", str, 'Position interchanged, as text: "7", "all", "per example".'),
        Column(
            "condition", str,
            'What was taken from the source: "target", the subspace; "complement", everything but it; "full", everything; '
            '"random" subspaces of equal rank; "random_matched", of equal rank and variance; "orthogonal_pca", leading components '
            'orthogonal to it; "same_value", the subspace between runs that agree in the variable, whose answer must stay; '
            '"row_space" and "null_space", what its only reader sees of the subspace and what it does not; "noise", nothing: '
            "noise with the activation's own standard deviation is added.",
        ),
        Column("draw", int, "Number of the draw of a random control, from 0."),
        Column("rank", int, "Dimensions taken."),
        Column(
            "directions", str,
            'What the subspace is: "class_means", "pattern", "filter" or "leace" of a probe, otherwise its own label, or "given".',
            on=TARGETS,
        ),
        Column(
            "variance", float | None,
            "Share of the squared difference between the two runs' activations that is taken, over all real positions of all pairs, "
            "answered or not.", SHARE,
        ),
        Column("between_variance", float | None, "Share of the between-class variance that it carries; None for one given.", SHARE, TARGETS),
        Column("control_overlap", float | None, "Share of the target that a control shares; from 0.3 on it is no control.", SHARE),
        Column(
            "controls_left_out", str | None,
            'How many controls share 0.3 or more of the target, by kind, and are left out: "3 of 20 random"; None where none does.',
            on=TARGETS,
        ),
        Column("control_problem", str | None, "Why controls that were asked for are missing, or None.", on=TARGETS),
        Column(
            "readable", str | None,
            "Whether the probe that the subspace is taken from reads more there than the best guess without activations: \"yes\", "
            "\"no\" or \"can't tell\"; None for one given.", on=TARGETS,
        ),
        Column("n", int, "Pairs counted: those that both runs answer correctly.", "pairs"),
        Column("n_groups", int, "Independent groups of these pairs.", "groups"),
        Column("iia", float | None, "Pairs whose argmax over all classes is the source's answer; None without pairs.", SHARE),
        Column("iia_lo", float, "Lower end of its 95 % interval, exact for independent pairs.", SHARE),
        Column("iia_hi", float, "Upper end of it.", SHARE),
        Column(
            "stays_anyway", float | None,
            "Share of the pairs that agree in the variable whose clean run, too, gives the answer that must stay; a small one is "
            "a sign that they don't agree.", SHARE, '"same_value"',
        ),
        Column("recovery", float | None, "Share of the logit difference between the runs that moves; not clipped.", SHARE),
        Column("changed", bool, "Whether any logit that is read changes by more than rounding."),
        Column("p", float | None, "Share of the control draws with an IIA as high, the target counted among them.", SHARE, TARGETS),
        Column("p_adjusted", float | None, "The same, adjusted over sites and positions by max-T.", SHARE, TARGETS),
        Column(
            "illusory", bool | None,
            "Whether the subspace works and the part of it that its only reader sees does not; None where no single linear map "
            "is known to be the only reader.", "", TARGETS,
        ),
        Column("illusory_why", str | None, "Why `illusory` is None.", on=TARGETS),
        Column(
            "verdict", str,
            '"used", "used elsewhere", "spread", "not here", "unread", "unreadable", "illusory", "unspecific", "no control" or '
            '"underpowered".',
            "", TARGETS,
        ),
        Column("why", str | None, "What the verdict rests on, where its word does not say it.", on=TARGETS),
    )  # fmt: skip

    rows: list[dict[str, Any]]
    followed: Tensor
    correct: Tensor
    path: str = "full"
    extra: dict[str, Any] = field(default_factory=dict)

    def targets(self) -> list[dict[str, Any]]:
        """The rows of the subspaces themselves, without controls."""
        return [row for row in self.rows if row["condition"] == "target"]

    def findings(self) -> list[str]:
        """Where the answer follows the subspace, beside its controls, and the verdicts."""
        targets = self.targets()
        lines = [
            f"Interchange at {count(len({t['site'] for t in targets}), 'site')}, on {count(int(self.correct.sum()), 'pair')} of "
            f"{len(self.correct)} that both runs answer correctly."
        ]
        found = [t for t in targets if t["iia"] is not None]
        if not found:
            return [*lines, "No pair is answered correctly by both runs, so nothing can be said."]
        best = max(found, key=lambda t: t["iia"])
        where = place(best) if best["pos"] == "all" else f"{place(best)}, {positions([best['pos']])}"
        beside: dict[str, list[float]] = {}
        for row in self.rows:
            here = all(row.get(key) == best.get(key) for key in ("site", "head", "pos"))
            if here and row["condition"] not in ("target", "noise") and row["iia"] is not None:
                beside.setdefault(row["condition"], []).append(row["iia"])
        said = ", ".join(f"{NAMES[k]} {percent(sum(v) / len(v))}" for k, v in beside.items())
        lines.append(
            f"The answer follows {_named(best)} most at {where}: in {percent(best['iia'])} of pairs "
            f"({percent(best['iia_lo'])} to {percent(best['iia_hi'])}). Beside it: {said}."
        )
        words: dict[str, list[dict[str, Any]]] = {}
        for row in targets:
            words.setdefault(row["verdict"], []).append(row)
        lines += left_out(targets)
        lines.append(
            f"Verdict: {'; '.join(f'{word} at {_at(rows, targets)}{_why(rows)}' for word, rows in words.items())}."
        )
        return lines

    def plot(self, title: str | None = None) -> go.Figure:
        """Heat map of IIA by layer and position where there are several, otherwise lines by layer beside the controls.

        Args:
            title: Shown above the figure.
        """
        from probelens.results import plots

        return plots.interchange(self.to_dataframe(), title=title)


def left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which controls contain the subspace and don't count, as a sentence; none where all count."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("controls_left_out"):
            alike.setdefault(row["controls_left_out"], []).append(row)
    found = "; ".join(f"{what} at {_at(here, rows)}" for what, here in alike.items())
    return [f"Controls that share {OVERLAP:g} or more of the subspace, so are left out: {found}."] if found else []


def _named(row: dict[str, Any]) -> str:
    """The subspace of a row: "rank 2 (class means, 41.0 % of the difference between the runs)"."""
    kind, carried = row.get("directions"), row.get("variance")
    known = [] if kind in (None, "given") else [str(kind).replace("_", " ")]
    known += [] if carried is None else [f"{percent(carried)} of the difference between the runs"]
    head = "" if row.get("head") is None else f" of head {row['head']}"
    return f"rank {row['rank']}{head}" + (f" ({', '.join(known)})" if known else "")


def _why(rows: Sequence[dict[str, Any]]) -> str:
    """What the verdicts rest on, where all rest on the same."""
    found = {row.get("why") for row in rows}
    (why,) = found if len(found) == 1 else (None,)
    return f" ({why})" if why else ""


def _at(rows: Sequence[dict[str, Any]], among: Sequence[dict[str, Any]]) -> str:
    """Where rows were measured, sites with the same positions together: "layer 0, positions 1 to 4"."""
    by_site: dict[tuple[Any, str], dict[str, None]] = {}
    for row in rows:
        by_site.setdefault((row["layer"], row["site"]), {})[row["pos"]] = None
    alike: dict[str, list[dict[str, Any]]] = {}
    for (layer, site), found in by_site.items():
        alike.setdefault("" if "all" in found else f", {positions(found)}", []).append({"layer": layer, "site": site})
    return ", and at ".join(f"{sites(at, among)}{said}" for said, at in alike.items())

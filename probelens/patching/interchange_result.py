"""``InterchangeResult``: whether the answer followed, for every site, position and control, and what that says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.numerics.effects import max_t_over_sites
from probelens.numerics.shares import exact_interval
from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import count, layers, percent, place, positions

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["InterchangeResult", "interchange_rows", "verdict"]

OVERLAP = 0.3  # of a control with the target, from which on it contains it
WORKS, CHANCE = 0.5, 0.2
SHARE, TARGETS = "fraction of 1", "targets"
NAMES = {
    "complement": "everything but it", "full": "everything", "random": "random subspaces", "same_value": "answers that stay",
    "random_matched": "random subspaces of equal variance", "orthogonal_pca": "components orthogonal to it",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class InterchangeResult(Rows):
    """Whether the answer followed, for every site, position and condition.

    Args:
        rows: One per site, position, condition and draw; ``columns`` says what each holds.
        followed: Whether each pair's answer became the source's; no rows of "same_value". (run, example)
        correct: Whether both runs answer a pair correctly. (example,)
        path: How the engine ran: "resume", "skip" or "full".
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = (
        Column("site", str, "Hook point."),
        Column("layer", int, "Place on the layer axis; −1 is the embedding."),
        Column("pos", str, 'Position interchanged, as text: "7", "all", "per example".'),
        Column(
            "condition", str,
            'What was taken from the source: "target", the subspace; "complement", everything but it; "full", everything; '
            '"random" subspaces of equal rank; "random_matched", of equal rank and variance; "orthogonal_pca", leading components '
            'orthogonal to it; "same_value", the subspace between runs that agree in the variable, whose answer must stay.',
        ),
        Column("draw", int, "Number of the draw of a random control, from 0."),
        Column("rank", int, "Dimensions taken."),
        Column("control_overlap", float | None, "Share of the target that a control shares; from 0.3 on it is no control.", SHARE),
        Column("control_problem", str | None, "Why controls that were asked for are missing, or None.", on=TARGETS),
        Column("n", int, "Pairs counted: those that both runs answer correctly.", "pairs"),
        Column("iia", float | None, "Pairs whose argmax over all classes is the source's answer; None without pairs.", SHARE),
        Column("iia_lo", float, "Lower end of its exact 95 % interval.", SHARE),
        Column("iia_hi", float, "Upper end of it.", SHARE),
        Column("recovery", float | None, "Share of the logit difference between the runs that moves; not clipped.", SHARE),
        Column("p", float | None, "Share of the control draws with an IIA as high, the target counted among them.", SHARE, TARGETS),
        Column("p_adjusted", float | None, "The same, adjusted over sites and positions by max-T.", SHARE, TARGETS),
        Column("verdict", str, '"used", "used elsewhere", "spread", "not here" or "underpowered".', "", TARGETS),
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
            if (row["site"], row["pos"]) == (best["site"], best["pos"]) and row["condition"] != "target":
                beside.setdefault(row["condition"], []).append(row["iia"])
        said = ", ".join(f"{NAMES[k]} {percent(sum(v) / len(v))}" for k, v in beside.items())
        lines.append(
            f"The answer follows rank {best['rank']} most at {where}: in {percent(best['iia'])} of pairs "
            f"({percent(best['iia_lo'])} to {percent(best['iia_hi'])}). Beside it: {said}."
        )
        said = "; ".join(
            f"{word} at {_at([t for t in targets if t['verdict'] == word])}"
            for word in dict.fromkeys(t["verdict"] for t in targets)
        )
        lines.append(f"Verdict: {said}.")
        return lines

    def plot(self, title: str | None = None) -> go.Figure:
        """Heat map of IIA by layer and position where there are several, otherwise lines by layer beside the controls.

        Args:
            title: Shown above the figure.
        """
        from probelens.results import plots

        return plots.interchange(self.to_dataframe(), title=title)


def _at(rows: Sequence[dict[str, Any]]) -> str:
    """Where rows were measured, layers with the same positions together: "layer 0, positions 1 to 4"."""
    by_layer: dict[int, dict[str, None]] = {}
    for row in rows:
        by_layer.setdefault(row["layer"], {})[row["pos"]] = None
    alike: dict[str, list[int]] = {}
    for layer, found in by_layer.items():
        alike.setdefault("" if "all" in found else f", {positions(found)}", []).append(layer)
    return ", and at ".join(f"{layers(at)}{said}" for said, at in alike.items())


def interchange_rows(
    about: Sequence[dict[str, Any]],
    values: Tensor,
    base: Tensor,
    source: Tensor,
    correct: Tensor,
    same: tuple[Tensor, Tensor] | None,
) -> list[dict[str, Any]]:
    """Rows from what each run answered, those of pairs that agree behind the target that they belong to.

    ``values`` (row, example, 3) and ``base`` and ``source`` (example, 3) hold whether the answer is the source's, whether
    it is the base's, and the logit difference; ``correct`` (example,) the pairs that both runs answer correctly; ``same``
    those of pairs that agree in the variable: (target, example, 3) and the base run's (example, 3).
    """
    kept = correct.nonzero().flatten()
    gap = float((source[kept, 2] - base[kept, 2]).double().sum())
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(about):
        moved = float((values[i, kept, 2] - base[kept, 2]).double().sum())
        rows.append({**row, **_share(values[i, kept, 0] > 0), "recovery": moved / gap if abs(gap) > 1e-12 else None})
    targets = [row for row in rows if row["condition"] == "target"]
    agreeing: dict[tuple[Any, Any], dict[str, Any]] = {}
    if same is not None:
        answered = (same[1][:, 1] > 0).nonzero().flatten()
        for i, row in enumerate(targets):
            # Both runs have one answer, so "the source's" is the one that must stay.
            stayed = _share(same[0][i, answered, 1] > 0)
            agreeing[row["site"], row["pos"]] = {
                **{k: row[k] for k in ("site", "layer", "pos", "rank")}, "condition": "same_value", "draw": 0,
                "control_overlap": None, **stayed, "recovery": None,
            }  # fmt: skip
    _tests(rows, targets)
    for row in targets:
        row["verdict"] = verdict([r for r in rows if (r["site"], r["pos"]) == (row["site"], row["pos"])])
    if not agreeing:
        return rows
    out: list[dict[str, Any]] = []
    for row in rows:
        out.append(row)
        if row["condition"] == "target":
            out.append(agreeing[row["site"], row["pos"]])
    return out


def _share(hits: Tensor) -> dict[str, Any]:
    """A share with its exact binomial interval, which has a width at 0 and 1 as well."""
    n, k = len(hits), int(hits.sum())
    if not n:
        return {"n": 0, "iia": None, "iia_lo": 0.0, "iia_hi": 1.0}
    low, high = exact_interval(k, n)
    return {"n": n, "iia": k / n, "iia_lo": low, "iia_hi": high}


def _tests(rows: Sequence[dict[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """p of each target against its draws, and adjusted over sites and positions where all have as many."""
    draws = []
    for row in targets:
        row.update(p=None, p_adjusted=None)
        mine = [r for r in rows if (r["site"], r["pos"]) == (row["site"], row["pos"])]
        for kind in ("random_matched", "random"):
            found = [r for r in mine if r["condition"] == kind and not _contains(r)]
            if found and row["iia"] is not None:
                row["p"] = (1 + sum(r["iia"] >= row["iia"] for r in found)) / (1 + len(found))
                break
        draws.append([r["iia"] for r in mine if r["condition"] == "random"] if row["iia"] is not None else [])
    counts = {len(d) for d in draws}
    if targets and len(counts) == 1 and counts != {0}:
        iia = torch.tensor([row["iia"] for row in targets], dtype=torch.float64)
        for row, p in zip(targets, max_t_over_sites(iia, torch.tensor(draws, dtype=torch.float64)).tolist()):
            row["p_adjusted"] = p


def _contains(row: dict[str, Any]) -> bool:
    return row["control_overlap"] is not None and row["control_overlap"] >= OVERLAP


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What the interchanges at one site and position say, in a word that ``interchange`` explains."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["condition"], []).append(row)
    target, full, complement = (by_kind[kind][0] for kind in ("target", "full", "complement"))
    if target["iia"] is None:
        return "underpowered"
    controls = [
        r for kind in ("random", "random_matched", "orthogonal_pca") for r in by_kind.get(kind, []) if not _contains(r)
    ]
    bound = max((r["iia_hi"] for r in controls), default=0.0)

    def works(row: dict[str, Any]) -> bool | None:
        """Whether it does; None where the intervals don't say."""
        if row["iia_lo"] > bound and row["iia_lo"] >= WORKS:
            return True
        return False if row["iia_hi"] < WORKS or row["iia_hi"] <= bound else None

    q = works(target)
    everything = True if full["iia_lo"] >= WORKS else False if full["iia_hi"] < WORKS else None
    if everything is False and q is not True:
        return "not here"
    if q is None or everything is None:
        return "underpowered"
    if not q:
        return "used elsewhere"
    if complement["iia_hi"] < CHANCE:
        return "used"
    return "spread" if complement["iia_lo"] >= CHANCE or complement["iia"] >= CHANCE else "underpowered"

"""``DASResult``: whether the answer follows a learned subspace, beside subspaces learned where there is nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from probelens.patching.interchange_result import NAMES, InterchangeResult, left_out
from probelens.patching.interchange_rows import OVERLAP
from probelens.results.rows import Rows
from probelens.results.sentences import count, listed, percent, place, positions
from probelens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["REFITTED", "DASResult", "judged", "same_subspace", "swapped"]

REFITTED = {
    "shuffled": "learned on shuffled answers", "untrained": "learned in an untrained model",
    "other_site": "learned at the other site",
}  # fmt: skip
_MORE = (
    ' "train", the learned subspace on the pairs that it was learned on. Learned again, at the same rank: "shuffled", on shuffled '
    'answers; "untrained", in an untrained model and swapped there; "other_site", at another site and swapped there.'
)


@dataclass(frozen=True, eq=False)
class DASResult(Rows):
    """A learned subspace, and whether the answer follows it on pairs that it wasn't learned on.

    Args:
        rows: One per condition and draw; ``columns`` says what each holds.
        subspace: The learned subspace, as wide as the activation, for ``ablate``, ``interchange`` or an edit.
        loss: Cross-entropy at each training step, in nats. (step,)
        losses: The same of the subspaces learned again as controls, by condition. each (step,)
        ranks: The ranks that were tried where none was given, each with its "rank", "loss", "iia" on validation pairs and "n".
        train: Which of the pairs it was learned on. (n_train,)
        held: Which of the pairs it was tested on. (n_held,)
        site: Hook point.
        head: Which head of it; None for the whole activation.
        width: Features of the activation, or of the head.
        path: How the interchanges ran: "resume", "skip" or "full".
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = tuple(
        replace(c, meaning=c.meaning + _MORE) if c.name == "condition" else c for c in InterchangeResult.columns
    )

    rows: list[dict[str, Any]]
    subspace: Subspace
    loss: Tensor
    losses: dict[str, Tensor]
    ranks: list[dict[str, Any]]
    train: Tensor
    held: Tensor
    site: str
    head: int | None = None
    width: int = 0
    path: str = "full"
    extra: dict[str, Any] = field(default_factory=dict)

    def target(self) -> dict[str, Any]:
        """The row of the learned subspace on held-out pairs."""
        return self.find(condition="target")

    def spaces(self) -> dict[str, Any]:
        """The subspace as ``interchange`` takes it.

        Returns:
            The site and the subspace; where it is one of a head, the site, the head, and the subspace in the head's width.
        """
        return swapped(self.site, self.subspace, self.head, self.width)

    def findings(self) -> list[str]:
        """What was learned on what, how often the answer follows it beside its controls, and the verdict."""
        row = self.target()
        by_kind: dict[str, list[float]] = {}
        for r in self.rows:
            if r["iia"] is not None:
                by_kind.setdefault(r["condition"], []).append(r["iia"])
        means = {kind: percent(sum(found) / len(found)) for kind, found in by_kind.items()}
        head = "" if self.head is None else f", head {self.head}"
        where = place(row) + head + ("" if row["pos"] == "all" else f", {positions([row['pos']])}")
        tried = "" if not self.ranks else f", chosen among {listed(sorted(r['rank'] for r in self.ranks))}"
        lines = [
            f"Rank {row['rank']} of {self.subspace.d}{tried}, learned at {where} on {count(len(self.train), 'pair')} in "
            f"{count(len(self.loss), 'step')}; loss {float(self.loss[0]):.3g} to {float(self.loss[-20:].mean()):.3g} nats."
        ]
        if row["iia"] is None:
            return [*lines, "No held-out pair is answered correctly by both runs, so nothing can be said."]
        lines.append(
            f"The answer follows it in {percent(row['iia'])} of {count(row['n'], 'held-out pair')} ({percent(row['iia_lo'])} to "
            f"{percent(row['iia_hi'])}), and in {means.get('train', 'unknown')} of those that it was learned on."
        )
        beside = [f"{NAMES[kind]} {means[kind]}" for kind in NAMES if kind in means]
        lines.append(f"Beside it: {', '.join(beside)}.")
        again = [f"{said} {means[kind]}" for kind, said in REFITTED.items() if kind in means]
        if again:
            lines.append(f"Subspaces of rank {row['rank']} {', '.join(again)}.")
        lines += left_out([row])
        if row["control_problem"]:
            lines.append(f"Missing controls: {row['control_problem']}.")
        why = f" ({row['why']})" if row["why"] else ""
        return [*lines, f"Verdict: {row['verdict']}{why}."]

    def plot(self, title: str | None = None) -> go.Figure:
        """Training loss by step, beside that of the subspaces learned again as controls.

        Args:
            title: Shown above the figure.
        """
        from probelens.results import plots

        named = {"the answers": self.loss, **{REFITTED[kind]: loss for kind, loss in self.losses.items()}}
        steps = [
            {"step": i, "loss": value, "learned": name}
            for name, loss in named.items()
            for i, value in enumerate(loss.tolist())
        ]
        return plots.training_curve(steps, y="loss", color="learned", title=title)


def judged(rows: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """The interchange's verdict and its reason, unless a subspace learned where there is nothing does as well."""
    (target,) = (row for row in rows if row["condition"] == "target")
    if target["verdict"] in ("used", "spread"):
        for row in rows:
            again = row["condition"] in REFITTED and not same_subspace(row)
            if again and row["iia_hi"] >= target["iia_lo"]:
                return "unspecific", f"a subspace {REFITTED[row['condition']]} moves the answer as often"
    return target["verdict"], target["why"]


def same_subspace(row: dict[str, Any]) -> bool:
    """Whether shuffled answers led to much of the target, as they can where there are two: half of its swap hedges."""
    return row["condition"] == "shuffled" and row["control_overlap"] >= OVERLAP


def swapped(site: str, space: Subspace, head: int | None, width: int) -> dict[str, Any]:
    """A subspace of a whole activation as ``interchange`` takes it: one of a head in the head's own width."""
    if head is None:
        return {site: space}
    inside = slice(head * width, (head + 1) * width)
    return {site: {head: Subspace(space.basis[:, inside], space.mean[inside], space.label)}}

"""Dose-response: the cost of removing more and more of a subspace, by rank and by strength."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from probelens.ablation.ablate import ablate
from probelens.ablation.answers import Metric
from probelens.ablation.columns import ABLATION
from probelens.ablation.comparing import Adjust
from probelens.ablation.controls import CONTROLS, Control, label_asked
from probelens.ablation.result import Costs, carried
from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped
from probelens.probing.directions import Definition
from probelens.probing.result import ProbeResult
from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import count, place
from probelens.subspaces.directions import definition_of, spaces_of
from probelens.subspaces.leace import Eraser
from probelens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["DoseResult", "dose_response", "first_directions"]


@dataclass(frozen=True, eq=False)
class DoseResult(Rows):
    """What each dose cost at each site, beside its controls.

    Args:
        rows: One per site, rank, alpha, condition and draw; ``columns`` says what each holds.
        clean: The metric of each example without ablation. (example,)
        label: The variable.
        metric: Name of the metric.
        extra: The caller's own notes, saved and loaded with the result.
    """

    columns = (*ABLATION, Column("full_rank", int, "Rank of the whole subspace."))

    rows: list[dict[str, Any]]
    clean: Tensor
    label: str = ""
    metric: str = "accuracy"
    extra: dict[str, Any] = field(default_factory=dict)

    def targets(self) -> list[dict[str, Any]]:
        """The rows of the subspaces themselves, without controls."""
        return [row for row in self.rows if row["condition"] == "target"]

    def findings(self) -> list[str]:
        """What the smallest, the largest and the first sufficient dose cost at each site, and the controls."""
        costs, by = Costs(self.metric), self._varies()
        targets = self.targets()
        lines = [
            f"{self.label!r} removed dose by dose on {count(len(self.clean), 'sequence')}. {costs.metric(targets[0])}"
        ]
        for site in dict.fromkeys(row["site"] for row in targets):
            rows = sorted((r for r in targets if r["site"] == site), key=lambda r: (r["rank"], r["alpha"]))
            top = max(rows, key=lambda r: (r["alpha"], r["rank"]))
            doses = [r for r in rows if all(r[k] == top[k] for k in ("rank", "alpha") if k != by)]
            full = costs.sign * top["drop"]
            enough = next(r for r in doses if costs.sign * r["drop"] >= 0.9 * full)
            dose = f"alpha {top[by]:g}" if by == "alpha" else f"rank {top[by]} of {top['full_rank']}"
            said = f"{place(top)}{carried(top)}: {dose} costs {costs.cost(top)}"
            if enough is not top and full > 0:
                said += f", and {by} {enough[by]:g} at least 90 % of that"
            same = (r for r in self.rows if all(r[k] == top[k] for k in ("site", "rank", "alpha")))
            lines.append(f"{said}. {costs.controls(same)}".strip())
        return lines

    def _varies(self) -> str:
        """The dose that varies: "rank" or "alpha"."""
        ranks = len({row["rank"] for row in self.rows})
        return "alpha" if ranks == 1 and len({row["alpha"] for row in self.rows}) > 1 else "rank"

    def plot(self, by: str | None = None) -> go.Figure:
        """Mean drop against the dose, one line per site and condition; of several values of the other dose the largest.

        Args:
            by: "rank" or "alpha"; None for the one that varies.
        """
        import plotly.express as px

        table = self.to_dataframe()
        by = self._varies() if by is None else by
        other = "alpha" if by == "rank" else "rank"
        top = table[table[other] == table.groupby("site")[other].transform("max")]
        if by == "rank":
            top = table[table["alpha"] == table["alpha"].max()]
        mean = top.groupby(["site", "condition", by], as_index=False)["drop"].mean()
        return px.line(
            mean, x=by, y="drop", color="site", line_dash="condition", markers=True, log_x=by == "rank",
            title=f"Dose-response: {self.label}",
        )  # fmt: skip


def dose_response(
    model: HookedModel,
    batch: Any,
    subspaces: Mapping[Any, Subspace | Eraser] | ProbeResult,
    ranks: Sequence[int] | None = None,
    alphas: Sequence[float] = (1.0,),
    metric: Metric = "accuracy",
    refit: bool = True,
    controls: int | None = None,
    *,
    directions: Definition | None = None,
    rank: int | None = None,
    label: str | None = None,
    target: str | None = None,
    kinds: Sequence[Control] = CONTROLS,
    adjust: Adjust = "max_t",
    mlp: bool = False,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> DoseResult:
    """Ablate growing numbers of the first directions of each subspace, at one or several strengths.

    Directions count in the order of the subspace: the largest between-class variance first for class means, the
    largest first for probe rows and principal components, the most correlated first for LEACE, in the order of their
    removal for INLP.

    Args:
        subspaces: Site to Subspace or Eraser, or a ProbeResult.
        rank: Of a ProbeResult at most so many directions, as the whole subspace.
        ranks: How many directions; None for 1, 2, 4, … and all. A site has no row for ranks above
            its subspace's.
        alphas: Strengths: 1 removes the directions, 0 nothing.
        Those of ``ablate``, without ``subspaces``, ``rank``, ``given``, ``alpha``, ``margin`` and ``executor``.

    Returns:
        Rows by site, rank, alpha, condition and draw; p adjusted for the sites of each dose.

    Raises:
        InputError: No dose that any subspace has, a strength outside 0 to 1, or a memory budget that one sequence exceeds.
        UnknownHookError: A site that the model doesn't have.
    """
    need_wrapped(model)
    label = label_asked(batch, subspaces, label)
    # Rows have the canonical names.
    spaces = by_point(model, spaces_of(subspaces, label, directions, rank))
    named = definition_of(subspaces, directions)
    full = {site: space.rank for site, space in spaces.items()}
    if ranks is None:
        top = max(full.values(), default=0)
        ranks = sorted({2**i for i in range(top.bit_length()) if 2**i <= top} | set(full.values()) - {0})
    if any(r < 1 for r in ranks) or not alphas:
        raise InputError(
            f"ranks={list(ranks)} and alphas={list(alphas)}: give ranks of at least 1, and at least one alpha"
        )
    rows: list[dict[str, Any]] = []
    found = None
    for dose in ranks:
        some = {site: first_directions(space, dose) for site, space in spaces.items() if space.rank >= dose}
        for alpha in alphas if some else ():
            found = ablate(
                model, batch, some, metric, refit, controls, label=label, target=target, kinds=kinds, adjust=adjust, alpha=alpha,
                mlp=mlp, batch_size=batch_size, memory=memory, seed=seed, progress=progress,
            )  # fmt: skip
            rows += [
                {**row, "directions": named or row["directions"], "full_rank": full[row["site"]]} for row in found.rows
            ]
    if found is None:
        raise InputError(f"no subspace has a rank of {list(ranks)}: they have {full}")
    return DoseResult(rows, found.clean, found.label, found.metric)


def first_directions(space: Subspace | Eraser, rank: int) -> Subspace | Eraser:
    """A subspace or eraser of only the first ``rank`` directions, around the same mean; InputError for another rank."""
    if not 0 <= rank <= space.rank:
        raise InputError(f"rank must be between 0 and {space.rank}, got {rank}")
    if isinstance(space, Eraser):
        return dataclasses.replace(
            space, left=space.left[:, :rank], right=space.right[:rank], correlations=space.correlations[:rank]
        )
    return Subspace(space.basis[:rank], space.mean, space.label)

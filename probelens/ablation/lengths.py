"""Length transfer: subspaces fitted at one length, frozen, and ablated at others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from probelens.ablation.columns import CONDITION, EFFECT, SCORES, SITE
from probelens.ablation.comparing import Adjust, need_adjust
from probelens.ablation.controls import CONTROLS, Control, Draws, Removal, with_controls
from probelens.ablation.result import Costs, carried
from probelens.ablation.scoring import accuracy_chance, run, score
from probelens.ablation.verdict import FLOOR
from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import by_point, need_wrapped
from probelens.probing.directions import Definition
from probelens.probing.result import ProbeResult
from probelens.results.columns import Column
from probelens.results.progress import progress_bar
from probelens.results.rows import Rows
from probelens.results.sentences import count, fixed, place
from probelens.running.collect import collect
from probelens.subspaces.directions import definition_of, spaces_of
from probelens.subspaces.leace import Eraser
from probelens.subspaces.subspace import Subspace
from probelens.tasks.base import need_task

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["LengthTransfer", "length_transfer"]


@dataclass(frozen=True, eq=False)
class LengthTransfer(Rows):
    """What frozen subspaces cost at each length.

    Args:
        rows: One per length, span, site, condition and draw; ``columns`` says what each holds.
        label: The variable.
        target: The label that the model's answer is compared with.
        trained_length: Tokens in the sequences that the subspaces were fitted on.
        extra: The caller's own notes, saved and loaded with the result.
    """

    columns = (
        Column("length", int, "Tokens in each sequence, a start token not counted.", "tokens"),
        Column("span", str, 'Positions counted: "all", "seen" (up to the trained length), "beyond" (later ones).'),
        *SITE,
        *CONDITION,
        *SCORES,
        *EFFECT,
        Column("floor", bool, "Whether the clean accuracy is within 0.2 of chance, so that nothing can drop."),
    )

    rows: list[dict[str, Any]]
    label: str
    target: str
    trained_length: int
    extra: dict[str, Any] = field(default_factory=dict)

    def targets(self) -> list[dict[str, Any]]:
        """The rows of the subspaces themselves, without controls."""
        return [row for row in self.rows if row["condition"] == "target"]

    def findings(self) -> list[str]:
        """The damage at each length, at the site where it is largest, inside and beyond the trained length."""
        targets = self.targets()
        worst = Costs("accuracy").worst([r for r in targets if r["span"] == "all"])
        lengths = list(dict.fromkeys(row["length"] for row in targets))
        lines = [
            f"subspaces of {self.label!r}, fitted at length {self.trained_length}, not refitted, removed at "
            f"{count(len({r['site'] for r in targets}), 'site')}. Damage at {place(worst)}{carried(worst)}, 1 being all above "
            "chance:"
        ]
        where = {"seen": f"up to position {self.trained_length}", "beyond": "beyond"}
        for length in lengths:
            said = []
            for row in targets:
                if (row["site"], row["length"]) == (worst["site"], length) and row["span"] in where:
                    at = where[row["span"]]
                    if row["floor"]:
                        said.append(f"{at}, the model is near chance, so damage can't be measured")
                        continue
                    more = "" if row["effect"] is None else f" ({fixed(row['effect'])} more than random subspaces)"
                    said.append(f"{fixed(row['damage'])}{more} {at}")
            lines.append(f"  length {length}: {'; '.join(said)}")
        return lines

    def plot(self) -> go.Figure:
        """Damage by length; one line per site for seen and for later positions, gaps at the floor."""
        import plotly.express as px

        table = self.to_dataframe()
        table = table[(table["condition"] == "target") & (table["span"] != "all")]
        table.loc[table["floor"], "damage"] = None
        return px.line(
            table, x="length", y="damage", color="site", line_dash="span", markers=True,
            title=f"Ablation of {self.label}, fitted at length {self.trained_length}",
        )  # fmt: skip


def length_transfer(
    model: HookedModel,
    task: Any,
    subspaces: Mapping[Any, Subspace | Eraser] | ProbeResult,
    lengths: Sequence[int] = (40, 60, 80, 100, 120),
    *,
    trained_length: int = 40,
    directions: Definition | None = None,
    rank: int | None = None,
    label: str | None = None,
    target: str | None = None,
    n: int = 100,
    controls: int | None = None,
    kinds: Sequence[Control] = CONTROLS,
    adjust: Adjust = "max_t",
    exclude: Any = None,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LengthTransfer:
    """Ablate the same subspaces in sequences of other lengths.

    The subspaces and their controls are fixed at the trained length and never refitted, so that a
    change with length is one of the model. Positions up to the trained length and later ones are
    scored separately: a long sequence has both.

    Args:
        model, directions, rank, controls, kinds, adjust, batch_size, memory, progress: As for ``ablate``.
        task: Draws the sequences.
        subspaces: Site to Subspace or Eraser, or a ProbeResult; fitted at ``trained_length``.
        lengths: Tokens in each sequence, a start token not counted.
        trained_length: Length at which the subspaces were fitted; "seen" positions end there.
        label: The variable; the task's target if None.
        target: The label that the model answers with; the task's target if None.
        n: Sequences of each length.
        exclude: Sequences that must not be drawn: those that the subspaces were fitted on.
        seed: Of sequences, control draws and intervals.

    Returns:
        Rows by length, span and site. ``floor`` marks spans where the clean accuracy is within 0.2
        of chance: there nothing can drop, and the damage means nothing.

    Raises:
        InputError: No task, an unknown label, no lengths, no subspaces, or a subspace of another width.
        UnknownHookError: A site that the model doesn't have.
    """
    need_wrapped(model)
    need_task(task)
    label = task.target if label is None else label
    target = task.target if target is None else target
    if not lengths or any(name not in task.label_names for name in (label, target)):
        raise InputError(
            f"lengths={list(lengths)}, label={label!r}, target={target!r}: give lengths, and labels among "
            f"{list(task.label_names)}"
        )
    spaces = by_point(model, spaces_of(subspaces, label, directions, rank))
    named = definition_of(subspaces, directions)
    need_adjust(adjust)
    draws = Draws.of(controls, len(spaces), adjust)
    base = task.sample(n, trained_length, seed, exclude=exclude)
    acts = collect(model, base, list(spaces), batch_size=batch_size)
    drawn: list[Removal] = with_controls(model, acts, base, spaces, label, kinds, draws, seed, named)
    rows: list[dict[str, Any]] = []
    with progress_bar(len(lengths), "lengths", progress) as bar:
        for length in lengths:
            batch = base if length == trained_length else task.sample(n, length, seed, exclude=exclude)
            runs = run(model, batch, drawn, "accuracy", target, 1.0, batch_size, memory=memory)
            later = torch.arange(runs.scored.shape[1], device=runs.scored.device) >= trained_length + int(task.bos)
            spans = {"all": runs.scored, "seen": runs.scored & ~later, "beyond": runs.scored & later}
            for span, scored in spans.items():
                if not bool(scored.any()):
                    continue
                chance = accuracy_chance(batch, target, "accuracy", scored)
                some = [{"length": length, "span": span, **d.about, "alpha": 1.0} for d in drawn]
                _, clean = score(some, runs, scored, chance, seed, "accuracy", adjust)
                assert chance is not None
                for row in some:
                    row.update(floor=clean.mean().item() < chance + FLOOR)
                rows += some
            bar.update(1)
    return LengthTransfer(rows, label, target, trained_length)

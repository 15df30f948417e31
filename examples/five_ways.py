"""Five ways to be fooled by a probe: models whose workings are known, and what each method says of them.

    python -m probelens.examples.five_ways

prints a table: for each model, whether it uses a variable, what a usual method concludes, and what the
methods of this library conclude. `--figures FOLDER` also writes a figure for each. It takes ten seconds.
The page "Five ways to be fooled by a probe" tells the story.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from html import escape
from pathlib import Path
from typing import Any

import torch

import probelens as pl
from probelens.ablation.components import ablate_component
from probelens.ablation.erase import erase
from probelens.examples.planted import SITE, World, crowded, exclusive, flipping, spare, twice, unused
from probelens.probing import split_by_group
from probelens.probing.refit import position_probes

USED, UNUSED, OPEN, NOT_SHOWN = "used", "not used", "undecided", "not shown"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One measured number: who measured it, what it is, and for accuracies the guess to compare it with."""

    who: str
    what: str
    value: float
    guess: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to be fooled.

    Args:
        key: Short name.
        title: What hides the truth.
        truth: Whether the model uses the variable; known, since the model was built.
        naive: What the usual method measures.
        naive_says: Its conclusion.
        steps: What this library measures, each with its verdict; the last one is the conclusion.
        bars: The numbers of its figure.
        numbers: Every number that tests need.
    """

    key: str
    title: str
    truth: str
    naive: str
    naive_says: str
    steps: tuple[tuple[str, str], ...]
    bars: tuple[Bar, ...]
    numbers: dict[str, float]

    @property
    def says(self) -> str:
        """The conclusion of the last step."""
        return self.steps[-1][1]


usual, here = functools.partial(Bar, "usual"), functools.partial(Bar, "here")


def by_probe(accuracy: float, baseline: float) -> str:
    """The usual conclusion from a probe: readable, so used."""
    return USED if accuracy > baseline + 0.02 else UNUSED


def by_drop(drop: float) -> str:
    """The usual conclusion from an ablation: it costs something, so used."""
    return USED if drop > 0.02 else UNUSED


def judge(row: dict[str, Any]) -> str:
    """The conclusion from an ablation with its refit and controls.

    If nothing can read the variable any more: used where that costs more than random subspaces do, otherwise not used.
    If it can still be read, or never could be, nothing is decided.
    """
    beyond = row["effect_lo"] > 0 and row["effect_p"] <= 0.05
    if row["verdict"] == "erased":
        return USED if beyond else UNUSED
    return OPEN if beyond or row["drop"] <= 0.02 else NOT_SHOWN


def _ablated(row: dict[str, Any]) -> str:
    return (
        f"drop {row['drop']:.2f} (random subspaces {_matched(row):.2f}), "
        f"refitted probes read {_refit(row):.2f} (guess {row['baseline']:.2f})"
    )


def _refit(row: dict[str, Any]) -> float:
    """Accuracy of the best refitted probe."""
    return max(row["refit_accuracy"], row["refit_mlp_accuracy"], row["refit_position_accuracy"])


def _matched(row: dict[str, Any]) -> float:
    """Mean drop of random subspaces that remove as much variance."""
    return float(row["damage_random_matched"] * (row["clean"] - row["chance"]))


def _numbers(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found = {**row, "matched_drop": _matched(row), "refit": _refit(row)}
    return {f"{prefix}{key}": float(value) for key, value in found.items() if isinstance(value, int | float)}


def _erased(made: World, label: str, target: str | None = None) -> dict[str, Any]:
    return erase(made.model, made.fit, made.held, label=label, target=target or label, sites=SITE).rows[0]


def case_unused() -> Case:
    made = unused()
    read = pl.probe(made.acts(made.fit), made.fit.labels["z"], made.fit.groups)
    accuracy, majority = read.accuracy("activations"), read.rows[0]["majority"]
    row, other = _erased(made, "z", "y"), _erased(made, "y")
    steps = ((f"LEACE of z: {_ablated(row)}", judge(row)),)
    numbers = {"probe": accuracy, "guess": majority, **_numbers(row), **_numbers(other, "y_")}
    naive = f"linear probe reads z: {accuracy:.2f} (guess {majority:.2f})"
    bars = (
        usual("a probe reads z", accuracy, majority),
        here("answers lost without z", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("a refitted probe reads z", numbers["refit"], row["baseline"]),
        here("answers lost without y", other["drop"]),
    )
    return Case("unused", "readable, not used", UNUSED, naive, by_probe(accuracy, majority), steps, bars, numbers)


def case_twice() -> Case:
    made, parts = twice(), ["blocks.0.mixer.hook_out", "blocks.0.hook_mlp_out"]
    alone = ablate_component(made.model, made.held, parts, "mean", target="y").rows
    both = ablate_component(made.model, made.held, parts, "mean", joint=True, target="y").rows[0]
    row = _erased(made, "y")
    drops = [r["drop"] for r in alone]
    steps = (
        (f"both components to their means: drop {both['drop']:.2f}", by_drop(both["drop"])),
        (f"LEACE of y after both: {_ablated(row)}", judge(row)),
    )
    numbers = {"mixer_drop": drops[0], "mlp_drop": drops[1], "joint_drop": both["drop"], **_numbers(row)}
    naive = f"each component alone to its mean: drop {drops[0]:.2f} and {drops[1]:.2f}"
    bars = (
        usual("answers lost without the first component", drops[0]),
        usual("answers lost without the second component", drops[1]),
        here("answers lost without both", both["drop"]),
        here("answers lost without y, after both", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
    )
    return Case("twice", "kept twice", USED, naive, by_drop(max(drops)), steps, bars, numbers)


def case_exclusive() -> Case:
    made = exclusive()
    row = _erased(made, "y")
    part = ablate_component(made.model, made.held, "blocks.0.mixer.hook_out", target="y").rows[0]
    naive = f"linear probe reads y: {row['probe_accuracy']:.2f} (guess {row['baseline']:.2f}); LEACE: drop {row['drop']:.2f}"
    steps = (
        (f"LEACE of y: {_ablated(row)}", judge(row)),
        (f"what writes it, resampled: drop {part['drop']:.2f}", by_drop(part["drop"])),
    )
    numbers = {"resampled_drop": part["drop"], **_numbers(row)}
    bars = (
        usual("a linear probe reads y", row["probe_accuracy"], row["baseline"]),
        usual("answers lost without what it reads", row["drop"]),
        here("a refitted MLP reads y", row["refit_mlp_accuracy"], row["baseline"]),
        here("answers lost without the writing component", part["drop"]),
    )
    says = by_probe(row["probe_accuracy"], row["baseline"])
    return Case("exclusive", "in a code that no linear probe reads", USED, naive, says, steps, bars, numbers)


def case_flipping() -> Case:
    made = flipping()
    row = _erased(made, "y")
    x, y, mask = made.acts(made.fit), made.fit.labels["y"], made.fit.mask
    found = position_probes(x, y, mask, split_by_group(made.fit.groups))
    # The direction in which the classes differ at each position, whatever its sign.
    steps_at = [x[:, t][y[:, t] == 1].mean(0) - x[:, t][y[:, t] == 0].mean(0) for t in range(x.shape[1])]
    line = pl.subspaces.from_probe(torch.stack(steps_at), x.mean((0, 1)), rank=1)
    cut = pl.ablate(made.model, made.held, {SITE: line}, label="y").targets()[0]
    naive = (
        f"linear probe over all positions reads y: {row['probe_accuracy']:.2f}, MLP {row['refit_mlp_accuracy']:.2f} "
        f"(guess {row['baseline']:.2f}); LEACE: drop {row['drop']:.2f}"
    )
    steps = (
        (f"LEACE of y: {_ablated(row)}", judge(row)),
        (f"the line along which positions differ: {_ablated(cut)}", judge(cut)),
    )
    numbers = {"by_position": found.accuracy, **_numbers(row), **_numbers(cut, "line_")}
    bars = (
        usual("a linear probe reads y", row["probe_accuracy"], row["baseline"]),
        usual("an MLP reads y", row["refit_mlp_accuracy"], row["baseline"]),
        usual("answers lost without what they read", row["drop"]),
        here("a probe at each position reads y", found.accuracy, row["position_baseline"]),
        here("answers lost without its direction", cut["drop"]),
        here("… by variance-matched random subspaces", numbers["line_matched_drop"]),
    )
    says = by_probe(row["probe_accuracy"], row["baseline"])
    return Case("flipping", "with a sign that changes with the position", USED, naive, says, steps, bars, numbers)


def case_spare() -> Case:
    made = spare()
    read = pl.probe({SITE: made.acts(made.fit)}, {"y": made.fit.labels["y"]}, made.fit.groups)
    one = pl.ablate(made.model, made.held, read, directions="filter", label="y").targets()[0]
    row = _erased(made, "y")
    naive = f"the probe's direction removed: drop {one['drop']:.2f}"
    steps = ((f"the same, with its refit: {_ablated(one)}", judge(one)), (f"LEACE of y: {_ablated(row)}", judge(row)))
    numbers = {**_numbers(one, "one_"), **_numbers(row)}
    bars = (
        usual("answers lost without the probe's direction", one["drop"]),
        here("a refitted probe still reads y", one["refit_accuracy"], one["baseline"]),
        here("answers lost when y is erased", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("a refitted probe reads y then", numbers["refit"], row["baseline"]),
    )
    title = "a direction is not the variable: removing it costs nothing"
    return Case("spare", title, USED, naive, by_drop(one["drop"]), steps, bars, numbers)


def case_crowded() -> Case:
    made = crowded()
    read = pl.probe({SITE: made.acts(made.fit)}, {"z": made.fit.labels["z"]}, made.fit.groups)
    row = pl.ablate(made.model, made.held, read, directions="filter", label="z", target="y").targets()[0]
    naive = f"the probe's subspace of z removed: drop {row['drop']:.2f}"
    steps = ((f"the same, with its controls: {_ablated(row)}", judge(row)),)
    numbers = {"probe": read.accuracy(SITE), **_numbers(row)}
    bars = (
        usual("a probe reads z", read.accuracy(SITE), row["majority"]),
        usual("answers lost without the probe's subspace", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("a refitted MLP still reads z", row["refit_mlp_accuracy"], row["baseline"]),
    )
    title = "a direction is not the variable: removing it costs much"
    return Case("crowded", title, UNUSED, naive, by_drop(row["drop"]), steps, bars, numbers)


CASES = (case_unused, case_twice, case_exclusive, case_flipping, case_spare, case_crowded)


def table(found: list[Case]) -> str:
    """The cases as a Markdown table: truth, the usual method, this library."""
    lines = ["| the variable is | truth | usual method | says | measured here | says |", "|---|---|---|---|---|---|"]
    for case in found:
        for i, (step, says) in enumerate(case.steps):
            head = (case.title, case.truth, case.naive, f"**{case.naive_says}**") if i == 0 else ("", "", "", "")
            lines.append("| " + " | ".join([*head, step, f"**{says}**"]) + " |")
    return "\n".join(lines)


INK, GREY = "#7A7F87", "#7F8791"
COLORS = {"usual": "#D55E00", "here": "#0072B2"}
LABEL, WIDE, ROW = 345, 250, 26


def figure(case: Case) -> str:
    """The bars of a case as an SVG that reads on light and dark pages."""
    rows = len(case.bars)
    height = (rows + 1) * ROW + 34
    parts = [
        _text(0, 16, f"usual method: {case.naive_says}", COLORS["usual"], weight="bold"),
        _text(LABEL, 16, f"measured here: {case.says}", COLORS["here"], weight="bold"),
    ]
    spoken = []
    for i, bar in enumerate(case.bars):
        top = ROW * (i + 1) + 4
        length = max(WIDE * min(max(bar.value, 0.0), 1.0), 1.5)
        guess = "" if bar.guess is None else f", a guess {bar.guess:.2f}"
        spoken.append(f"{bar.what}: {bar.value:.2f}{guess}")
        parts.append(_text(LABEL - 10, top + 13, bar.what, INK, anchor="end"))
        parts.append(f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="16" fill="{COLORS[bar.who]}"/>')
        if bar.guess is not None:
            x = LABEL + WIDE * bar.guess
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + 19}"'
            parts.append(f'<line {ends} stroke="{GREY}" stroke-width="2"/>')
        end = LABEL + max(length, WIDE * (bar.guess or 0.0)) + 8
        parts.append(_text(end, top + 13, f"{bar.value:.2f}", INK))
    bottom = ROW * (rows + 1) + 8
    parts.append(f'<line x1="{LABEL}" x2="{LABEL}" y1="{ROW}" y2="{bottom}" stroke="{GREY}"/>')
    if any(bar.guess is not None for bar in case.bars):
        parts.append(_text(LABEL, bottom + 18, "grey line: accuracy of a guess", INK, size=12))
    title = escape(f"{case.title}. " + "; ".join(spoken) + ".")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDE + 50} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14"><title>{title}</title>' + "".join(parts) + "</svg>\n"
    )


def _text(
    x: float, y: float, text: str, color: str, anchor: str = "start", weight: str = "normal", size: int = 14
) -> str:
    look = f'fill="{color}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y}" {look}>{escape(text)}</text>'


def write_figures(found: list[Case], folder: Path) -> list[Path]:
    """Write one SVG per case."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{case.key}.svg" for case in found]
    for case, path in zip(found, paths, strict=True):
        path.write_text(figure(case), encoding="utf-8")
    return paths


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description="Five ways to be fooled by a probe.")
    parser.add_argument("--figures", type=Path, default=None, help="folder to write an SVG of each case to")
    args = parser.parse_args()
    found = [make() for make in CASES]
    print(table(found))
    if args.figures is not None:
        write_figures(found, args.figures)


if __name__ == "__main__":
    main()

"""The tables and figures of "Ways to be fooled by a probe", from what was measured on each model."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

USED, UNUSED, OPEN = "used", "not used", "undecided"


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
        verdicts: What each method concludes, right or wrong.
    """

    key: str
    title: str
    truth: str
    naive: str
    naive_says: str
    steps: tuple[tuple[str, str], ...]
    bars: tuple[Bar, ...]
    numbers: dict[str, float]
    verdicts: dict[str, str]

    @property
    def says(self) -> str:
        """The conclusion of the last step."""
        return self.steps[-1][1]


def table(found: list[Case]) -> str:
    """The cases as a Markdown table: truth, the usual method, this library."""
    lines = ["| the variable is | truth | usual method | says | measured here | says |", "|---|---|---|---|---|---|"]
    for case in found:
        for i, (step, says) in enumerate(case.steps):
            head = (case.title, case.truth, case.naive, f"**{case.naive_says}**") if i == 0 else ("", "", "", "")
            lines.append("| " + " | ".join([*head, step, f"**{says}**"]) + " |")
    return "\n".join(lines)


def grid(found: list[Case]) -> str:
    """What each method concludes of each model as a Markdown table: ✓ for the truth, ✗ for the contrary, – for neither."""
    methods = list(dict.fromkeys(method for case in found for method in case.verdicts))
    lines = ["| the variable is | truth | " + " | ".join(methods) + " |", "|---|---|" + "---|" * len(methods)]
    for case in found:
        cells = [_mark(case, case.verdicts[m]) if m in case.verdicts else "" for m in methods]
        lines.append(f"| {case.title} | {case.truth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mark(case: Case, says: str) -> str:
    return f"{'✓' if says == case.truth else '–' if says == OPEN else '✗'} {says}"


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

"""Draws the figure of the home page from two trained models of docs/data/models: ``python docs/tools/home_figure.py --measure``.

It keeps the numbers that are drawn in docs/data/home.csv, and writes docs/figures/home: for wide and narrow
windows, light and dark pages. Without ``--measure``, some minutes of one core, it draws the kept numbers again. A test compares
the two.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import pandas as pd
import torch

import probelens as pl
from probelens.examples.quickstart import aligned
from probelens.examples.refit_the_probe.shared.setup import make_task
from probelens.results.plots.style import PALETTE

DOCS = Path(__file__).resolve().parents[1]
NUMBERS, FIGURES = DOCS / "data" / "home.csv", DOCS / "figures" / "home"
MODELS = {"LSTM": PALETTE[0], "Transformer": PALETTE[1]}
# Measure and its control: what is drawn in each panel, and what it is called there.
PANELS = {
    "Readable": ("a probe reads the depth", "… of the untrained model"),
    "Needed": ("answers lost without the class means", "… without as many random directions"),
    "Sufficient": ("restored by patching the last token", "… by patching the changed token"),
    "Used": ("answers follow the swapped class means", "… everything but them"),
}
INK = {"light": ("#23282f", "#5b626c", "#d9dde2"), "dark": ("#e4e7eb", "#a9b0b9", "#3a414b")}
WIDE, HIGH, GAP, LEFT, TOP = 300, 124, 58, 44, 80


def numbers() -> pd.DataFrame:
    """What is drawn: model, panel, layer, value and control, as fractions."""
    task, out = make_task("dyck"), []
    pairs = {"depth": aligned(task.pairs(40 * 64, 40, 0, label="state", kind="depth"), 64)}
    for name in MODELS:
        module = pl.models.load(DOCS / f"data/models/{name.lower()}-dyck-0.safetensors")
        found = pl.profile(
            pl.wrap(module), task, labels=["depth"], length=40, n_probe=300, n_ablate=100, pairs=pairs,
            untrained=pl.models.untrained(pl.wrap(module), 1000), controls=20, refit=False, filters=False, seed=0,
        )  # fmt: skip
        print(*found.findings(), sep="\n", flush=True)
        lost = found.ablations["depth"].to_dataframe().groupby(["layer", "condition"])["drop"].mean().unstack()
        patched = found.patches["depth"].to_dataframe()
        patched = patched.assign(pos=patched["pos"].astype(int))
        back = patched.pivot(index="layer", columns="pos", values="recovery")
        changed = back.loc[-1].idxmax()
        swapped = found.interchanges["depth"].to_dataframe().groupby(["layer", "condition"])["iia"].mean().unstack()
        for row in found.to_dataframe().to_dict("records"):
            layer = row["layer"]
            pairs_of = {
                "Readable": (row["accuracy"], row["untrained"]),
                "Needed": (lost.loc[layer, "target"], lost.loc[layer, "random"]),
                "Sufficient": (back.loc[layer].iloc[-1], back.loc[layer, changed]),
                "Used": (swapped.loc[layer, "target"], swapped.loc[layer, "complement"]),
            }
            for panel, (value, control) in pairs_of.items():
                out.append({"model": name, "panel": panel, "layer": int(layer), "value": value, "control": control})
    # Adding zero turns −0.0 into 0.0.
    return pd.DataFrame(out).round(3).replace({"value": {-0.0: 0.0}, "control": {-0.0: 0.0}})


def svg(drawn: pd.DataFrame, theme: str, columns: int) -> str:
    """The four panels, in one column or two."""
    ink, faint, grid = INK[theme]
    wide, high = LEFT + columns * WIDE + (columns - 1) * GAP + 16, (TOP + HIGH + 40) * (len(PANELS) // columns)
    spoken = "; ".join(
        f"{model}, {panel.lower()} by layer: " + ", ".join(f"{v:.2f}" for v in part["value"])
        for (panel, model), part in drawn.groupby(["panel", "model"], sort=False)
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13"><title>{escape(spoken)}.</title>'
    ]
    for i, (model, color) in enumerate(MODELS.items()):
        out.append(_mark(model, LEFT + 114 + 70 * i, 15, color))
        out.append(_text(LEFT + 124 + 70 * i, 20, model, ink))
    for i, (panel, (measure, control)) in enumerate(PANELS.items()):
        left, top = LEFT + (i % columns) * (WIDE + GAP), (i // columns) * (TOP + HIGH + 40)
        out.append(_text(left, top + 20, panel, ink, size=16, weight="bold"))
        for j, (words, dash) in enumerate(((measure, ""), (control, ' stroke-dasharray="4 4"'))):
            y = top + 42 + 19 * j
            line = f'<line x1="{left}" x2="{left + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{faint}" stroke-width="2"'
            out += [f"{line}{dash}/>", _text(left + 28, y, words, faint)]
        out += _panel(drawn[drawn["panel"] == panel], left, top + TOP, (ink, faint, grid))
    return "".join(out) + "</svg>\n"


def _panel(part: pd.DataFrame, left: float, top: float, inks: tuple[str, str, str]) -> list[str]:
    _, faint, grid = inks
    layers = sorted(part["layer"].unique())
    step = WIDE / (len(layers) - 1)
    out = []
    for share in (0.0, 0.5, 1.0):
        y = top + HIGH * (1 - share)
        out.append(f'<line x1="{left}" x2="{left + WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="{grid}"/>')
        out.append(_text(left - 6, y + 4, f"{share:.0%}", faint, anchor="end", size=11))
    for i, layer in enumerate(layers):
        name = "embedding" if layer < 0 else f"layer {layer}" if i == len(layers) - 1 else str(layer)
        anchor = "start" if i == 0 else "end" if i == len(layers) - 1 else "middle"
        out.append(_text(left + i * step, top + HIGH + 18, name, faint, anchor=anchor, size=11))
    for column, style in (("control", 'stroke-width="1.5" stroke-dasharray="4 4"'), ("value", 'stroke-width="2.5"')):
        for model, color in MODELS.items():
            shares = part[part["model"] == model].sort_values("layer")[column]
            points = [(left + i * step, top + HIGH * (1 - min(max(v, 0), 1))) for i, v in enumerate(shares)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')
            if column == "value":
                out += [_mark(model, x, y, color) for x, y in points]
    return out


def _mark(model: str, x: float, y: float, color: str) -> str:
    if model == "LSTM":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, color: str, anchor: str = "start", size: int = 13, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def figures() -> dict[str, str]:
    """Every file of the figure by its name, from the kept numbers."""
    drawn = pd.read_csv(NUMBERS)
    shapes = {"wide": 2, "narrow": 1}
    return {f"{shape}-{theme}.svg": svg(drawn, theme, n) for shape, n in shapes.items() for theme in INK}


def main() -> None:
    """Measure, if asked, and draw the kept numbers."""
    parser = argparse.ArgumentParser(description="Draw the home page's figure from the kept numbers.")
    parser.add_argument("--measure", action="store_true", help="measure them first, on the models of docs/data/models")
    if parser.parse_args().measure:
        torch.set_num_threads(1)
        numbers().to_csv(NUMBERS, index=False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, text in figures().items():
        (FIGURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

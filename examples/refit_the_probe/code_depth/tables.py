"""The tables of Code-Depth for a Markdown page, made from its rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from probelens.examples.refit_the_probe.code_depth.report import claims, profiles
from probelens.examples.refit_the_probe.shared.pages import claims_table
from probelens.examples.refit_the_probe.shared.rows import each

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["CELL", "pictures", "tables"]

CELL = ("model", "seed")


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of a page, by the names of their marks."""
    return {"code-claims": claims_table(claims(rows)), "code-layers": layers_table(rows)}


def pictures(rows: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures of a page, by the names of their files."""
    return {"code-depth": profiles(rows)}


def layers_table(rows: pd.DataFrame) -> str:
    """Balanced accuracy by layer of each model, and baselines that need no model."""
    found = rows[rows["kind"] == "probe"]
    lines = [
        "| model, label and classes | layers | balanced accuracy, embedding first (untrained) | position / last 4 tokens | verdict |",
        "|---|---|---|---|---|",
    ]
    verdicts = {(r.model, r.seed, r.label): r.verdict for r in each(rows[rows["kind"] == "indices"])}
    for (model, seed, label), part in found.groupby(["model", "seed", "label"], sort=False):
        part = part.sort_values("layer")
        values = " ".join(f"{r.balanced_accuracy:.2f} ({r.untrained_balanced:.2f})" for r in each(part))
        layers = " ".join(f"{layer:.0f}" for layer in part["layer"])
        first = part.iloc[0]
        guesses = f"{first['position_balanced']:.2f} / {first['last_w_balanced']:.2f}"
        lines.append(
            f"| {model}, {label} {first['classes']} | {layers} | {values} | {guesses} | {verdicts[(model, seed, label)]} |"
        )
    return "\n".join(lines) + "\n"

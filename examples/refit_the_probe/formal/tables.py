"""The formal grid's tables for a Markdown page, made from its rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from probelens.examples.refit_the_probe.formal.claims import claims
from probelens.examples.refit_the_probe.formal.figures import FIGURES
from probelens.examples.refit_the_probe.formal.rows import CELL as CELL
from probelens.examples.refit_the_probe.formal.rows import main_cells, named, of_kind
from probelens.examples.refit_the_probe.shared.pages import claims_table
from probelens.examples.refit_the_probe.shared.rows import where
from probelens.examples.refit_the_probe.shared.setup import LABELS, NAMES, TITLES

if TYPE_CHECKING:
    import plotly.graph_objects as go


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of a page, by the names of their marks."""
    return {
        "claims": claims_table(claims(rows)), "cells": cells_table(rows), "controls": controls_table(rows),
        "sites": sites_table(rows),
    }  # fmt: skip


def pictures(rows: pd.DataFrame) -> dict[str, go.Figure | None]:
    """The figures of a page, by the names of their files."""
    return {name: draw(rows) for name, (draw, _) in FIGURES.items()}


def cells_table(rows: pd.DataFrame) -> str:
    """Each trained model: its training, its accuracy by length, its probes by layer."""
    lines = [
        "| cell | seed | steps | CPU-s | accuracy at 40 / 60 / 80 / 100 / 120 | probe at embedding, blocks 0 to 3 (untrained) |",
        "|---|---|---|---|---|---|",
    ]
    keys = ["task", "arch", "convolution", "embedding_std", "train_seed"]
    order = ["_task", "_arch", "convolution", "embedding_std", "train_seed"]
    ordered = named(rows).sort_values(order, ascending=[True, True, False, True, True], kind="stable")
    for (task, arch, convolution, std, seed), part in ordered.groupby(keys, sort=False):
        name = f"{NAMES[str(arch)]} {TITLES[str(task)]}"
        name += "" if convolution else ", trained without convolution"
        name += "" if std == 0.02 else f", embedding std {std:g}"
        training = where(part, kind="training").dropna(subset=["n_params"]).iloc[-1]
        steps = f"{training['step']:.0f}" + ("" if training["learned"] else ", 99 % not reached")
        answers = where(of_kind(part, "behaviour"), span="all").sort_values("length")
        said = " / ".join(f"{a:.3f}".removeprefix("0").rstrip("0").rstrip(".") for a in answers["accuracy"])
        probes = where(of_kind(part, "probe"), control="task", span="late")
        read = []
        for label in LABELS[str(task)]:
            of = where(probes, label=label).sort_values("layer")
            if len(of):
                values = " ".join(f"{a:.2f} ({u:.2f})" for a, u in zip(of["accuracy"], of["untrained"], strict=True))
                read.append(f"{label}: {values}" if len(LABELS[str(task)]) > 1 else values)
        lines.append(f"| {name} | {seed:.0f} | {steps} | {training['cpu_seconds']:.0f} | {said} | {'; '.join(read)} |")
    return "\n".join(lines) + "\n"


def controls_table(rows: pd.DataFrame) -> str:
    """Baselines of a probe's accuracy: guesses, control task, codelength."""
    found = where(main_cells(rows, "probe"), control="task", span="all")
    lines = [
        "| model, label | majority | position | last 4 tokens | selectivity at embedding, blocks 0 to 3 | compression |",
        "|---|---|---|---|---|---|",
    ]
    floors = "compression_floor" in found  # rows of earlier runs have none
    lines[0] = lines[0].replace("compression", "compression (floor)") if floors else lines[0]
    for (model, task, label), part in found.groupby(["model", "task", "label"], sort=False):
        if label not in LABELS[str(task)]:
            continue
        one = part.groupby("layer")[["majority", "position", "last_w", "selectivity", "compression"]].mean()
        guesses = " | ".join(f"{one[name].mean():.2f}" for name in ("majority", "position", "last_w"))
        bits = " ".join(f"{v:.1f}" for v in one["compression"])
        if floors:
            bits += f" ({part['compression_floor'].mean():.1f})"
        lines.append(
            f"| {model} {part['cell'].iloc[0]} | {guesses} | {' '.join(f'{v:.2f}' for v in one['selectivity'])} | {bits} |"
        )
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def sites_table(rows: pd.DataFrame) -> str:
    """Recovery by patching site, one column per model."""
    found = main_cells(rows, "site").dropna(subset=["recovery"]) if "site" in set(rows["kind"]) else rows.iloc[:0]
    if found.empty:
        return ""
    by_pairs = found["task"].map(TITLES) + " " + found["pairs"].astype(str)
    found = found.assign(column=found["model"] + ", " + found["cell"].where(found["pairs"].isna(), by_pairs))
    sites = list(dict.fromkeys(found["site"]))
    lines = ["| model, pairs | " + " | ".join(sites) + " |", "|---" * (1 + len(sites)) + "|"]
    for column, part in found.groupby("column", sort=False):
        mean = part.groupby("site")["recovery"].mean()
        lines.append(f"| {column} | " + " | ".join(f"{mean[s]:.2f}" if s in mean else "" for s in sites) + " |")
    return "\n".join(lines) + "\n"

"""The tables of the pretrained experiments for a Markdown page, made from their rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from probelens.examples.refit_the_probe.pretrained.report import CELL, answered, claims, figures, named
from probelens.examples.refit_the_probe.shared.pages import claims_table
from probelens.examples.refit_the_probe.shared.rows import each

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["CELL", "pictures", "tables"]

FORCED = {"A": "1", "B": "0", "F": "1", "I": "1"}


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of a page, by the names of their marks."""
    return {
        "pretrained-claims": claims_table(claims(rows)), "pretrained-layers": layers_table(rows),
        "pretrained-sites": sites_table(rows),
    }  # fmt: skip


def pictures(rows: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures of a page, by the names of their files."""
    return {f"pretrained-{chart.name}": chart.figure for chart in figures(rows)}


def layers_table(rows: pd.DataFrame) -> str:
    """Each cell: its answers, where its state is readable, and what each way of taking it out costs at most."""
    lines = [
        "| model, task | steps | answers | probe by layer, embedding first (before fine-tuning; untrained) | "
        "best direction: drop by layer |",
        "|---|---|---|---|---|",
    ]
    answers = answered(rows)
    for (model, task, seed), part in rows.groupby(["model", "task", "train_seed"], sort=False):
        own = answers[(answers["model"] == model) & (answers["task"] == task) & (answers["train_seed"] == seed)]
        training = part[part["kind"] == "training"].dropna(subset=["n_params"]).iloc[-1]
        probes = named(part, "probe")
        probes = probes[(probes["control"] == "task") & (probes["span"] == "all")]
        before = named(part, "probe_before")
        before = before[before["control"] == "task"]
        cuts = part[(part["kind"] == "ablation") & (part["what"] == "direction")] if "what" in part else part.iloc[:0]
        read, cost = [], []
        for cell in dict.fromkeys(probes["cell"]):
            now, then = (p[p["cell"] == cell].sort_values("layer")["accuracy"].tolist() for p in (probes, before))
            bare = probes[probes["cell"] == cell].sort_values("layer")["untrained"].tolist()
            values = [f"{a:.2f} ({b:.2f}; {c:.2f})" for a, b, c in zip(now, then, bare, strict=True)]
            read.append(f"{cell.partition(': ')[2]} {' '.join(values)}".strip())
        for label in dict.fromkeys(cuts["label"]) if len(cuts) else ():
            drops = cuts[cuts["label"] == label].sort_values("layer")["drop"]
            cost.append(f"{label} " + " ".join(f"{d:.3f}" for d in drops))
        steps = f"{training['step']:.0f}" + ("" if training["learned"] else ", 99 % not reached")
        lines.append(
            f"| {model}, {task} | {steps} | {own['accuracy'].iloc[0]:.3f} | {'; '.join(read)} | {'; '.join(cost)} |"
        )
    return "\n".join(lines) + "\n"


def sites_table(rows: pd.DataFrame) -> str:
    """Recovery by patching site with its interval, one line for each model and kind of pairs."""
    found = named(rows, "site")
    found = found.dropna(subset=["recovery"]) if "recovery" in found else found.iloc[:0]
    if found.empty:
        return ""
    names = list(dict.fromkeys(found["site"]))
    lines = ["| model, pairs | " + " | ".join(f"{n} (= {FORCED[n]})" if n in FORCED else n for n in names) + " |"]
    lines.append("|---" * (1 + len(names)) + "|")
    for (model, task, pairs), part in found.groupby(["model", "task", "pairs"], sort=False):
        said = {
            r.site: f"{r.recovery:.2f}" + ("" if r.site in FORCED else f" ({r.lo:.2f} to {r.hi:.2f})")
            for r in each(part)
        }
        lines.append(f"| {model}, {task} {pairs} | " + " | ".join(said.get(name, "") for name in names) + " |")
    return "\n".join(lines) + "\n"

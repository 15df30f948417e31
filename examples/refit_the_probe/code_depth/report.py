"""What Code-Depth's rows say: the paper's claim and ours, the profiles, tables, the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from probelens.examples.refit_the_probe.shared.claims import fits
from probelens.examples.refit_the_probe.shared.pages import claims_table, write_paper_report
from probelens.examples.refit_the_probe.shared.rows import best, each, where
from probelens.experiments import RunRecord
from probelens.results import plots
from probelens.results.report import Chart, Claim, Section, Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

CELL = ("model", "seed")
SAYS = {"depth": "bracket depth", "indent": "indent"}
LEAD = (
    "How deep in brackets, and in indented blocks, each token of real Python code is, read by linear probes from frozen "
    "language models, each with its own tokenizer. Balanced accuracy: every class counts alike."
)


def claims(rows: pd.DataFrame) -> list[Claim]:
    """The paper's claim about code and ours, for each model and label.

    Dyck's side is: a Transformer reads depth at once, a state space model layer by layer.
    """
    made = []
    found = where(rows, kind="indices").sort_values("seed", kind="stable").drop_duplicates(["model", "label"])
    for row in each(found):
        expected = "immediate" if row.arch == "transformer" else "gradual"
        known = row.verdict in ("immediate", "gradual", "late")
        part = where(rows, kind="probe", model=row.model, label=row.label)
        top = best(part, "balanced_accuracy")
        interval = f"early share {row.early_share_lo:.2f} to {row.early_share_hi:.2f}, COM {row.com_lo:.2f} to {row.com_hi:.2f}" if known or row.verdict == "undetermined" else ""  # fmt: skip
        made.append(Claim(
            f"11. {SAYS[row.label].capitalize()} in {row.model}", f"as on Dyck: {expected}",
            f"{row.verdict}; best L{int(top['layer'])} {top['balanced_accuracy']:.1%}, embedding "
            f"{best(where(part, layer=-1), 'balanced_accuracy')['balanced_accuracy']:.1%}, untrained at best {part['untrained_balanced'].max():.1%}, guess {row.baseline:.1%}",
            interval, fits(row, expected),
        ))  # fmt: skip
    return made


def profiles(rows: pd.DataFrame) -> go.Figure:
    """Balanced accuracy by layer as a share of the model's depth, one line per model."""
    found = where(rows, kind="probe").sort_values("seed", kind="stable").drop_duplicates(["model", "label", "layer"])
    table = found.assign(
        accuracy=found["balanced_accuracy"], lo=found["balanced_lo"], hi=found["balanced_hi"],
        panel=found["model"] + ", " + found["label"].map(SAYS),
    ).astype({"layer": int})  # fmt: skip
    return plots.layer_profile(
        table, facet="panel", y_label="balanced accuracy",
        baselines={"untrained_balanced": "untrained", "last_w_balanced": "last 4 tokens", "position_balanced": "position"},
    )  # fmt: skip


def write(rows: pd.DataFrame, config: Any, record: RunRecord) -> Path:
    """Write ``claims.parquet`` and ``report.html`` into the run folder, and return the latter's path."""
    chart = Chart(
        profiles(rows),
        "Balanced accuracy by layer with intervals over modules; dashed: the same architecture untrained, and what the last "
        "four tokens or the position alone give.",
        name="profiles",
    )
    verdicts = where(rows, kind="indices")[["model", "label", "verdict", "why", "baseline"]]
    first = where(rows, kind="probe").drop_duplicates(["model", "seed"])
    return write_paper_report(
        config, record, claims(rows),
        title="Refit the probe: depth of code",
        lead=LEAD,
        sections=[
            Section("Readable", "", [chart], [Table("Verdict of each profile", verdicts, name="verdicts", open=True)],
                    explain=("layers", "probe", "baselines", "untrained", "profile")),
        ],
        measured={
            "Models": ", ".join(f"{r.model} ({r.n_params / 1e6:.1f}M)" for r in each(first.drop_duplicates("model"))),
            "Code": f"{first['functions'].iloc[0]} functions of {first['modules'].iloc[0]} modules; a module is on one side of the split",
        },
    )  # fmt: skip


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of a page, by the names of their marks."""
    return {"code-claims": claims_table(claims(rows)), "code-layers": layers_table(rows)}


def pictures(rows: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures of a page, by the names of their files."""
    return {"code-depth": profiles(rows)}


def layers_table(rows: pd.DataFrame) -> str:
    """Balanced accuracy by layer of each model, and baselines that need no model."""
    lines = [
        "| model, label and classes | layers | balanced accuracy, embedding first (untrained) | position / last 4 tokens | verdict |",
        "|---|---|---|---|---|",
    ]
    verdicts = {(r.model, r.seed, r.label): r.verdict for r in each(where(rows, kind="indices"))}
    for (model, seed, label), part in where(rows, kind="probe").groupby(["model", "seed", "label"], sort=False):
        part = part.sort_values("layer")
        values = " ".join(f"{r.balanced_accuracy:.2f} ({r.untrained_balanced:.2f})" for r in each(part))
        layers = " ".join(f"{layer:.0f}" for layer in part["layer"])
        first = part.iloc[0]
        guesses = f"{first['position_balanced']:.2f} / {first['last_w_balanced']:.2f}"
        lines.append(
            f"| {model}, {label} {first['classes']} | {layers} | {values} | {guesses} | {verdicts[(model, seed, label)]} |"
        )
    return "\n".join(lines) + "\n"

"""The formal grid's tables, figures and report, made from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.formal.claims import claims
from probelens.examples.refit_the_probe.formal.figures import FIGURES
from probelens.examples.refit_the_probe.formal.rows import CELL, main_cells
from probelens.examples.refit_the_probe.shared.pages import write_paper_report
from probelens.examples.refit_the_probe.shared.rows import where
from probelens.examples.refit_the_probe.shared.setup import TASKS
from probelens.experiments import RunRecord
from probelens.results.report import Chart, Section, Table

LEAD = (
    "Small models of five architectures, trained on four tasks whose answer is a running state: where along the layers "
    "the state becomes readable, what it costs to take it out, whether a probe fitted again still finds it, and what "
    "patching the final layer can show. The first version of arXiv 2606.00926 reported such profiles and concluded from "
    "single-direction ablations; its second version took that conclusion back. Both are compared with the results here."
)
SECTIONS = (
    ("Behaviour", ("behaviour",), "How well the models answer, at the trained length and beyond it.", ("interval",)),
    (
        "Readable",
        ("profiles", "embedding"),
        "Where a linear probe reads the state. A profile that the untrained model shows as well was there before training.",
        ("layers", "probe", "untrained", "profile"),
    ),
    (
        "Needed",
        (*(f"{what}-{task}" for task in TASKS for what in ("ablations", "refits")), "transfer"),
        "What it costs to take the state out, and whether it is gone. Where the refitted probe stays high, a drop says "
        "nothing about necessity, nor does its absence.",
        ("ablation", "refit", "random", "tautological"),
    ),
)


def write(rows: pd.DataFrame, config: Any, record: RunRecord) -> Path:
    """Write ``claims.parquet`` and ``report.html`` into the run folder, and return the latter's path."""
    cells = rows[list(CELL)].drop_duplicates()
    sections = []
    for title, names, text, explain in SECTIONS:
        charts = [Chart(figure, FIGURES[n][1], name=n) for n in names if (figure := FIGURES[n][0](rows)) is not None]
        sections.append(Section(title, text, charts, explain=explain))
    patched = "What a middle position patched at the final layer can mean."
    if used := _used(rows):
        text = (
            "Does the answer follow? Of two runs that differ in the variable only the part in the span of the class means is "
            "taken from the one and put into the other."
        )
        sections.append(Section("Used", text, tables=used, explain=("interchange",)))
    sections.append(Section("Patched", patched, tables=_sites(rows)))
    return write_paper_report(
        config, record, claims(rows),
        title="Refit the probe: the formal grid",
        lead=LEAD,
        sections=sections,
        measured={
            "Cells": f"{len(cells)} trained models: {', '.join(sorted(set(rows['arch'])))} on {', '.join(sorted(set(rows['task'])))}",
            "Seeds": f"{rows['train_seed'].nunique()} per cell at most; with one, intervals are over sequences and say "
            "nothing about how another training run would differ",
        },
    )  # fmt: skip


def _used(rows: pd.DataFrame) -> list[Table]:
    if "interchange" not in set(rows["kind"]):  # rows of earlier runs have none
        return []
    found = main_cells(rows, "interchange")
    shares = found.pivot_table(
        index=["model", "cell", "train_seed", "layer"], columns="condition", values="iia", sort=False
    )
    verdicts = where(found, condition="target").set_index(["model", "cell", "train_seed", "layer"])["verdict"]
    return [
        Table("Share of pairs whose answer follows, by layer", shares.join(verdicts).reset_index(), name="interchanges")
    ]


def _sites(rows: pd.DataFrame) -> list[Table]:
    if "site" not in set(rows["kind"]):
        return []
    found = main_cells(rows, "site")
    about = ["model", "task", "pairs", "site", "read"]
    measured = ["expected", "recovery", "lo", "hi", "n", "holds", "why", "description"]
    found = found[[column for column in (*about, *measured) if column in found]]
    return [Table("Recovery at each site", found, name="sites", open=True)]

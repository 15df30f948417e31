"""The formal grid's tables, figures and report, made from its rows alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.claims import claims
from probelens.examples.refit_the_probe.figures import CELL, FIGURES, main_cells, named, of_kind
from probelens.examples.refit_the_probe.running import (
    claims_table,
    command_of,
    fill,
    merged,
    told,
    unfinished,
    write_claims,
    write_pictures,
)
from probelens.examples.refit_the_probe.setup import LABELS, NAMES, TASKS, TITLES
from probelens.experiments import RunRecord
from probelens.results.files import atomic_path, write_rows
from probelens.results.report import Chart, Section, Table, write_report

__all__ = ["main", "slim", "write"]

LEAD = (
    "Small models of five architectures, trained on four tasks whose answer is a running state: where along the layers "
    "the state becomes readable, what it costs to take it out, whether a probe fitted again still finds it, and what "
    "patching the final layer can show. The first version of arXiv 2606.00926 reported such profiles and concluded from "
    "single-direction ablations; its second version took that conclusion back. Both are set beside what came out here."
)
SECTIONS = (
    (
        "Behaviour",
        ("behaviour",),
        "How well the models answer, at the trained length and beyond it.",
        ("interval",),
    ),
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
    """Write ``claims.parquet`` and ``report.html``.

    Args:
        rows: Rows of the finished cells.
        config: Settings of the run; its ``out`` is the run folder.
        record: What the run folder says about itself.

    Returns:
        The report's file.
    """
    folder = Path(config.out)
    found = claims(rows)
    write_claims(found, folder)
    cells = rows[list(CELL)].drop_duplicates()
    sections = []
    for title, names, text, explain in SECTIONS:
        charts = [
            Chart(figure, FIGURES[n][1], name=n) for n in names if (figure := FIGURES[n][0](rows)) is not None
        ]
        sections.append(Section(title, text, charts, explain=explain))
    sections.append(
        Section("Patched", "What a middle position patched at the final layer can mean.", tables=_sites(rows))
    )
    return write_report(
        folder / "report.html",
        title="Refit the probe: the formal grid",
        lead=LEAD,
        sections=sections,
        paper=found,
        measured={
            **unfinished(record, folder),
            "Cells": f"{len(cells)} trained models: {', '.join(sorted(set(rows['arch'])))} on {', '.join(sorted(set(rows['task'])))}",
            "Seeds": f"{rows['train_seed'].nunique()} per cell at most; with one, intervals are over sequences and say "
            "nothing about how another training run would differ",
        },
        config={k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "workers")},
        versions=record.versions,
        reproduce=[command_of(record.recipe, config)],
    )  # fmt: skip


def _sites(rows: pd.DataFrame) -> list[Table]:
    if "site" not in set(rows["kind"]):
        return []
    found = main_cells(rows, "site")
    kept = [
        "model",
        "task",
        "pairs",
        "site",
        "read",
        "expected",
        "recovery",
        "lo",
        "hi",
        "n",
        "holds",
        "why",
        "description",
    ]
    return [Table("Recovery at each site", found[[c for c in kept if c in found]], name="sites", open=True)]


def slim(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without columns that are empty, or that only repeat the run: small enough to publish."""
    kept = rows.dropna(axis=1, how="all").drop(columns=["cell"], errors="ignore")
    # A scale is told apart by its value, so it stays as it was written.
    numbers = kept.select_dtypes("float64").columns.drop("embedding_std", errors="ignore")
    return kept.astype(dict.fromkeys(numbers, "float32"))


def main(argv: Sequence[str] | None = None) -> None:
    """Publish a run: its rows, its figures as SVG, and its tables in a Markdown page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="+",
        help="rows.parquet of runs, or what an earlier call published; a model in several is the last one's",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, help="where to write the rows, smaller")
    parser.add_argument(
        "--figures", type=Path, help="folder for an SVG of each figure; needs kaleido and a Chrome"
    )
    parser.add_argument(
        "--page", type=Path, help="page whose tables to write again, between the marks <!-- NAME -->"
    )
    args = parser.parse_args(argv)
    # Rounded first, so that the tables of a page are those of the rows that stand beside it.
    rows = slim(merged(args.rows, CELL))
    if args.data is not None:
        write_rows(args.data, rows, compression="zstd")
    if args.figures is not None:
        write_pictures({name: FIGURES[name][0](rows) for name in FIGURES}, args.figures)
    if args.page is not None:
        text = filled(args.page.read_text(encoding="utf-8"), rows)
        with atomic_path(args.page) as part:
            part.write_text(text, encoding="utf-8")


def filled(page: str, rows: pd.DataFrame) -> str:
    """A page with its tables written again."""
    return fill(
        page,
        {
            "claims": claims_table(claims(rows)),
            "cells": cells_table(rows),
            "controls": controls_table(rows),
            "sites": sites_table(rows),
        },
    )


def cells_table(rows: pd.DataFrame) -> str:
    """Each trained model: how long it trained, how well it answers by length, where it is readable."""
    lines = [
        "| cell | seed | steps | CPU-s | accuracy at 40 / 60 / 80 / 100 / 120 | probe at embedding, blocks 0 to 3 (untrained) |",
        "|---|---|---|---|---|---|",
    ]
    keys = ["task", "arch", "convolution", "embedding_std", "train_seed"]
    ordered = named(rows).sort_values(["_task", "_arch", "convolution", "embedding_std", "train_seed"],
                                      ascending=[True, True, False, True, True], kind="stable")  # fmt: skip
    for (task, arch, convolution, std, seed), part in ordered.groupby(keys, sort=False):
        name = f"{NAMES[str(arch)]} {TITLES[str(task)]}"
        name += "" if convolution else ", trained without convolution"
        name += "" if std == 0.02 else f", embedding std {std:g}"
        training = part[part["kind"] == "training"].dropna(subset=["n_params"]).iloc[-1]
        steps = f"{training['step']:.0f}" + ("" if training["learned"] else ", 99 % not reached")
        answers, probes = of_kind(part, "behaviour"), of_kind(part, "probe")
        answers = answers[answers["span"] == "all"].sort_values("length")
        said = " / ".join(f"{a:.3f}".removeprefix("0").rstrip("0").rstrip(".") for a in answers["accuracy"])
        probes = probes[(probes["control"] == "task") & (probes["span"] == "late")]
        read = []
        for label in LABELS[str(task)]:
            of = probes[probes["label"] == label].sort_values("layer")
            if len(of):
                values = " ".join(
                    f"{a:.2f} ({u:.2f})" for a, u in zip(of["accuracy"], of["untrained"], strict=True)
                )
                read.append(f"{label}: {values}" if len(LABELS[str(task)]) > 1 else values)
        lines.append(
            f"| {name} | {seed:.0f} | {steps} | {training['cpu_seconds']:.0f} | {said} | {'; '.join(read)} |"
        )
    return "\n".join(lines) + "\n"


def controls_table(rows: pd.DataFrame) -> str:
    """What a probe's accuracy has to be compared with: guesses, control task, codelength."""
    found = main_cells(rows, "probe")
    found = found[(found["control"] == "task") & (found["span"] == "all")]
    lines = [
        "| model, label | majority | position | last 4 tokens | selectivity at embedding, blocks 0 to 3 | compression |",
        "|---|---|---|---|---|---|",
    ]
    for (model, task, label), part in found.groupby(["model", "task", "label"], sort=False):
        if label not in LABELS[str(task)]:
            continue
        one = part.groupby("layer")[["majority", "position", "last_w", "selectivity", "compression"]].mean()
        guesses = " | ".join(f"{one[name].mean():.2f}" for name in ("majority", "position", "last_w"))
        bits = " ".join(f"{v:.1f}" for v in one["compression"])
        lines.append(
            f"| {model} {part['cell'].iloc[0]} | {guesses} | {' '.join(f'{v:.2f}' for v in one['selectivity'])} | {bits} |"
        )
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def sites_table(rows: pd.DataFrame) -> str:
    """Recovery by patching site, one column a model."""
    found = (
        main_cells(rows, "site").dropna(subset=["recovery"]) if "site" in set(rows["kind"]) else rows.iloc[:0]
    )
    if found.empty:
        return ""
    found = found.assign(
        column=found["model"]
        + ", "
        + found["cell"].where(
            found["pairs"].isna(), found["task"].map(TITLES) + " " + found["pairs"].astype(str)
        )
    )
    columns = list(dict.fromkeys(found["column"]))
    lines = ["| model, pairs | " + " | ".join(dict.fromkeys(found["site"])) + " |"]
    lines.append("|---" * (1 + found["site"].nunique()) + "|")
    for column in columns:
        part = found[found["column"] == column].groupby("site")["recovery"].mean()
        cells = [f"{part[s]:.2f}" if s in part else "" for s in dict.fromkeys(found["site"])]
        lines.append(f"| {column} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    told(main)

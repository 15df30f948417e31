"""The formal grid's tables, figures and report, made from its rows alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from probelens.examples.refit_the_probe.claims import claims
from probelens.examples.refit_the_probe.figures import FIGURES, main_cells
from probelens.report import Chart, Section, Table, write_report
from probelens.results import atomic_path

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
        ("ablations", "refits", "transfer"),
        "What it costs to take the state out, and whether it is gone. Where the refitted probe stays high, a drop says "
        "nothing about necessity, nor does its absence.",
        ("ablation", "refit", "random", "tautological"),
    ),
)


def write(rows: pd.DataFrame, folder: Path, config: Mapping[str, Any], versions: Mapping[str, str]) -> Path:
    """Write ``rows.parquet``, ``claims.parquet`` and ``report.html``.

    Args:
        rows: Rows of the finished cells.
        folder: Where to.
        config: Settings of the run.
        versions: Versions of what the numbers depend on.

    Returns:
        The report's file.
    """
    found = claims(rows)
    for name, table in (("rows", rows), ("claims", pd.DataFrame([_plain(c) for c in found]))):
        with atomic_path(folder / f"{name}.parquet") as part:
            table.to_parquet(part, index=False)
    cells = rows[["arch", "task", "train_seed", "embedding_std", "convolution"]].drop_duplicates()
    sections = []
    for title, names, text, explain in SECTIONS:
        charts = [
            Chart(figure, FIGURES[n][1], name=n) for n in names if (figure := drawn(n, rows)) is not None
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
            "Cells": f"{len(cells)} trained models: {', '.join(sorted(set(rows['arch'])))} on {', '.join(sorted(set(rows['task'])))}",
            "Seeds": f"{rows['train_seed'].nunique()} per cell at most; with one, intervals are over sequences and say "
            "nothing about how another training run would differ",
        },
        config={k: v for k, v in config.items() if k not in ("out", "workers")},
        versions=versions,
        reproduce=["probelens run paper-formal --preset cpu"],
    )  # fmt: skip


def drawn(name: str, rows: pd.DataFrame) -> Any:
    """A figure, or None where the run has no rows for it."""
    from probelens.errors import InputError

    try:
        return FIGURES[name][0](rows)
    except (InputError, KeyError):
        return None


def _plain(claim: Any) -> dict[str, Any]:
    return {
        k: v if v is None or isinstance(v, bool) else str(v) for k, v in dataclasses.asdict(claim).items()
    }


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
    numbers = kept.select_dtypes("float64").columns
    return kept.astype(dict.fromkeys(numbers, "float32"))


def main(argv: Sequence[str] | None = None) -> None:
    """Publish a run: its rows, its figures as SVG, and the table of claims as Markdown."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", type=Path, help="rows.parquet of a run, or what an earlier call published")
    parser.add_argument("--data", type=Path, help="where to write the rows, smaller")
    parser.add_argument(
        "--figures", type=Path, help="folder for an SVG of each figure; needs kaleido and a Chrome"
    )
    parser.add_argument("--table", type=Path, help="where to write the claims, as a Markdown table")
    args = parser.parse_args(argv)
    rows = pd.read_parquet(args.rows)
    if args.data is not None:
        with atomic_path(args.data) as part:
            slim(rows).to_parquet(part, index=False, compression="zstd")
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:
            if (figure := drawn(name, rows)) is not None:
                with atomic_path(args.figures / f"{name}.svg") as part:
                    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white").write_image(
                        part, format="svg"
                    )
    if args.table is not None:
        with atomic_path(args.table) as part:
            part.write_text(markdown(rows), encoding="utf-8")


def markdown(rows: pd.DataFrame) -> str:
    """The claims as a Markdown table."""
    word = {True: "yes", False: "no", None: "can't say"}
    lines = ["| claim | paper | here | 95 % interval | agrees |", "|---|---|---|---|---|"]
    for claim in claims(rows):
        ours = f"{claim.ours}. {claim.note}" if claim.note else str(claim.ours)
        lines.append(f"| {claim.claim} | {claim.paper} | {ours} | {claim.interval} | {word[claim.agrees]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

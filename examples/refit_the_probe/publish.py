"""Publish a run on pretrained models: its rows, its figures as SVG, its claims and numbers as tables of a page.

    python -m probelens.examples.refit_the_probe.publish runs/paper-pretrained/rows.parquet \\
        --data docs/data/paper/pretrained.parquet --figures docs/figures/paper --page docs/paper.md

Everything is made from the rows, so a published file does as well as the run's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import probelens as pl
from probelens.examples.refit_the_probe import code_depth_report, pretrained_report
from probelens.examples.refit_the_probe.formal_report import slim
from probelens.examples.refit_the_probe.running import claims_table, each, fill, merged, told, write_pictures
from probelens.results.files import atomic_path, read_rows, write_rows

__all__ = ["code_table", "filled", "layers_table", "main", "sites_table"]

FORCED = {"A": "1", "B": "0", "F": "1", "I": "1"}


def is_code(rows: pd.DataFrame) -> bool:
    """Whether rows are those of `paper-code-depth`; else they are of `paper-pretrained`."""
    return "balanced_lo" in rows


def layers_table(rows: pd.DataFrame) -> str:
    """Each cell: its answers, where its state is readable, and what each way of taking it out costs at most."""
    lines = [
        "| model, task | steps | answers | probe by layer, embedding first (before fine-tuning; untrained) | "
        "best direction: drop by layer |",
        "|---|---|---|---|---|",
    ]
    answers = pretrained_report.answered(rows)
    for (model, task, seed), part in rows.groupby(["model", "task", "train_seed"], sort=False):
        own = answers[
            (answers["model"] == model) & (answers["task"] == task) & (answers["train_seed"] == seed)
        ]
        training = part[part["kind"] == "training"].dropna(subset=["n_params"]).iloc[-1]
        probes = pretrained_report.named(part, "probe")
        probes = probes[(probes["control"] == "task") & (probes["span"] == "all")]
        before = pretrained_report.named(part, "probe_before")
        before = before[before["control"] == "task"]
        cuts = (
            part[(part["kind"] == "ablation") & (part["what"] == "direction")]
            if "what" in part
            else part.iloc[:0]
        )
        read, cost = [], []
        for cell in dict.fromkeys(probes["cell"]):
            now, then = (
                p[p["cell"] == cell].sort_values("layer")["accuracy"].tolist() for p in (probes, before)
            )
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
    found = pretrained_report.named(rows, "site")
    found = found.dropna(subset=["recovery"]) if "recovery" in found else found.iloc[:0]
    if found.empty:
        return ""
    names = list(dict.fromkeys(found["site"]))
    lines = [
        "| model, pairs | " + " | ".join(f"{n} (= {FORCED[n]})" if n in FORCED else n for n in names) + " |"
    ]
    lines.append("|---" * (1 + len(names)) + "|")
    for (model, task, pairs), part in found.groupby(["model", "task", "pairs"], sort=False):
        said = {
            r.site: f"{r.recovery:.2f}" + ("" if r.site in FORCED else f" ({r.lo:.2f} to {r.hi:.2f})")
            for r in each(part)
        }
        lines.append(
            f"| {model}, {task} {pairs} | " + " | ".join(said.get(name, "") for name in names) + " |"
        )
    return "\n".join(lines) + "\n"


def code_table(rows: pd.DataFrame) -> str:
    """Balanced accuracy by layer of each model, beside what needs no model."""
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


def filled(page: str, rows: pd.DataFrame) -> str:
    """A page with its tables written again: each stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``."""
    if is_code(rows):
        tables = {
            "code-claims": claims_table(code_depth_report.claims(rows)),
            "code-layers": code_table(rows),
        }
    else:
        tables = {
            "pretrained-claims": claims_table(pretrained_report.claims(rows)),
            "pretrained-layers": layers_table(rows),
            "pretrained-sites": sites_table(rows),
        }
    return fill(page, tables)


def main(argv: Sequence[str] | None = None) -> None:
    """Publish a run on pretrained models."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="+",
        help="rows.parquet of runs, or what an earlier call published; a model in several is the last one's",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, help="where to write the rows, smaller")
    parser.add_argument(
        "--figures", type=Path, help="folder for the figures as SVG; needs kaleido and a Chrome"
    )
    parser.add_argument("--page", type=Path, help="a Markdown page whose tables to write again")
    args = parser.parse_args(argv)
    codes = {is_code(read_rows(path)) for path in args.rows if path.is_file()}
    if len(codes) > 1:
        raise pl.InputError("rows of two recipes: publish those of code depth and of pretrained models apart")
    code = codes == {True}
    rows = merged(args.rows, ("model", "seed") if code else ("model", "task", "train_seed"))
    if args.data is not None:
        write_rows(args.data, slim(rows), compression="zstd")
    if args.figures is not None:
        drawn = (
            {"code-depth": code_depth_report.profiles(rows)}
            if is_code(rows)
            else {f"pretrained-{chart.name}": chart.figure for chart in pretrained_report.figures(rows)}
        )
        write_pictures(drawn, args.figures)
    if args.page is not None:
        text = filled(args.page.read_text(encoding="utf-8"), rows)
        with atomic_path(args.page) as part:
            part.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    told(main)

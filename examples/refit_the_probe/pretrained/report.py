"""What the pretrained experiments' rows say: the paper's claims and ours, figures, tables, the report.

"Agrees" follows the rules of ``shared.claims``. Only cells that learned their task count.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from probelens.examples.refit_the_probe.shared.claims import INLP, every, inlp_claim, readable, refit_claim, with_known
from probelens.examples.refit_the_probe.shared.pages import claims_table, write_paper_report
from probelens.examples.refit_the_probe.shared.rows import best, each, learned_only, where
from probelens.examples.refit_the_probe.shared.setup import LABELS, TITLES, WHAT
from probelens.experiments import RunRecord
from probelens.results import plots
from probelens.results.report import Chart, Claim, Section, Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

CELL = ("model", "task", "train_seed")
LEARNED = 0.9  # at the trained length
INERT = 0.002  # the paper's "no more than 0.2 %"
FORCED = {"A": "1", "B": "0", "F": "1", "I": "1"}  # recoveries that follow from the construction
LEAD = (
    "Pretrained language models, fine-tuned on tasks whose answer is a running state: where the state is readable before "
    "and after, what it costs to take one direction or all of it out, whether a probe fitted again still finds it, and "
    "what patching the final layer can show."
)


def named(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of one kind, with a column ``cell`` for task and label."""
    found = rows[rows["kind"] == kind]
    label = found["label"] if "label" in found else found["task"]
    many = [isinstance(name, str) and len(LABELS[task]) > 1 for name, task in zip(label, found["task"], strict=True)]
    cell = [TITLES[t] + (f": {n}" if m else "") for t, n, m in zip(found["task"], label, many, strict=True)]
    return found.assign(cell=cell)


def answered(rows: pd.DataFrame) -> pd.DataFrame:
    """Accuracy of every cell's own answers at the trained length."""
    return where(named(rows, "behaviour"), span="all")


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """For each cell the most readable layer and the one where removing the best direction costs most.

    Of equally readable layers the first counts. Damage is looked for at every site of the layer axis, embedding and last
    block included.
    """
    probes, made = where(named(rows, "probe"), control="task", span="all"), []
    cuts = named(rows, "ablation")
    cuts = where(cuts, what="direction") if len(cuts) else cuts
    for (model, seed, cell), cut in cuts.groupby(["model", "train_seed", "cell"], sort=False):
        read = where(probes, model=model, train_seed=seed, cell=cell)
        top, worst = best(read, "accuracy"), best(cut, "drop")
        there: Any = cut[cut["layer"] == top["layer"]].iloc[0]
        made.append({
            "model": model, "arch": cut["arch"].iloc[0], "cell": cell, "train_seed": seed,
            "n_layers": cut["n_layers"].iloc[0], "readable_layer": int(top["layer"]), "accuracy": top["accuracy"],
            "accuracy_lo": top["lo"], "accuracy_hi": top["hi"],
            "as_readable": int((read["accuracy"] >= top["lo"]).sum()), "damaging_layer": int(worst["layer"]),
            "drop_as_readable_hi": cut[cut["layer"].isin(read[read["accuracy"] >= top["lo"]]["layer"])]["hi"].max(),
            "drop": worst["drop"], "drop_lo": worst["lo"], "drop_hi": worst["hi"], "drop_at_readable": there["drop"],
            "drop_at_readable_lo": there["lo"], "drop_at_readable_hi": there["hi"],
        })  # fmt: skip
    return pd.DataFrame(made)


def claims(rows: pd.DataFrame) -> list[Claim]:
    """Claims 8 to 10 of the paper's first version and A to C of its second, and ours; "not run" where no cell learned."""
    learned = learned_only(rows, CELL, LEARNED)
    at = layers(learned) if "ablation" in set(learned["kind"]) else pd.DataFrame()
    return [
        *_dyck(at), _inert(learned), _patching(learned), _refit(learned, "direction", "the best direction"),
        _refit(learned, "rows", "all rows of the probe"), _inlp(learned), _apart(at),
    ]  # fmt: skip


def _range(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}"


def _who(row: Any) -> str:
    return f"{row.model} {row.cell}"


def _dyck(at: pd.DataFrame) -> list[Claim]:
    found = list(each(at[(at["arch"] == "transformer") & at["cell"].str.startswith("Dyck")])) if len(at) else []
    middle = [
        False if r.drop_hi < 0.5 or not 0 <= r.damaging_layer < r.n_layers - 1 else True if r.drop_lo > 0.5 else None
        for r in found
    ]
    weaker = [
        True if 2 * r.drop_at_readable_hi < r.drop_lo else False if 2 * r.drop_at_readable_lo > r.drop_hi else None
        for r in found
    ]
    return [
        Claim(
            "8. Pythia-160M on Dyck: the best direction of a middle layer costs most of the accuracy",
            "≈ 81 % at L6 and L7",
            "; ".join(f"{_who(r)}: {r.drop:.1%} at L{r.damaging_layer} of {r.n_layers}" for r in found) or "not run",
            "; ".join(_range(r.drop_lo, r.drop_hi) for r in found), every(middle),
        ),
        Claim(
            "8. The best probe layer is far weaker", "L11, weaker and noisier",
            "; ".join(f"{_who(r)}: {r.drop_at_readable:.1%} at L{r.readable_layer}" for r in found) or "not run",
            "; ".join(_range(r.drop_at_readable_lo, r.drop_at_readable_hi) for r in found), every(weaker),
        ),
        Claim(
            "8. Pythia-410M on Dyck: plateau of damage from L4 to L18 of 24", "L4 to L18",
            "see the figure" if any(r.n_layers == 24 for r in found) else "not run",
        ),
    ]  # fmt: skip


def _inert(rows: pd.DataFrame) -> Claim:
    claim = "9. Mamba-130M: no single direction costs more than 0.2 % on Parity, Dyck, S3"
    found = named(rows, "ablation")
    if found.empty or (found := where(found, arch="mamba", what="direction")).empty:
        return Claim(claim, "at most 0.2 %", "not run")
    worst = found.sort_values("drop", ascending=False).drop_duplicates(["model", "cell", "train_seed"])
    said = "; ".join(f"{_who(r)}: {r.drop:.1%} at L{int(r.layer)}" for r in each(worst))
    verdicts = [True if r.hi <= INERT else False if r.lo > INERT else None for r in each(worst)]
    span = "; ".join(_range(r.lo, r.hi) for r in each(worst))
    last = found[found["layer"] == found["n_layers"] - 1]
    final = "; ".join(f"{_who(r)} {r.probe_accuracy:.1%}" for r in each(last))
    return Claim(claim, "at most 0.2 %", said, span, every(verdicts), f"Readable at the final layer: {final}.")


def _patching(rows: pd.DataFrame) -> Claim:
    claim = "10. Mamba-130M: a middle position patched at the final layer recovers the logit gap"
    paper, found = "≈ 97 to 98 %", where(named(rows, "site"), arch="mamba", task=("parity", "dyck"))
    if found.empty:
        return Claim(claim, paper, "not run")
    found = found[found["recovery"].notna()] if "recovery" in found else found.iloc[:0]
    if found.empty:
        return Claim(claim, paper, "no pair is answered correctly")
    said = [
        f"{model} {TITLES[str(task)]} ({pairs}): " + ", ".join(f"{r.site} {r.recovery:.2f}" for r in each(part))
        for (model, task, pairs), part in found.groupby(["model", "task", "pairs"], sort=False)
    ]
    near: dict[str, bool | None] = {
        str(site): every(_near(r) for r in each(part))
        for site, part in found[found["expected"].isna()].groupby("site", sort=False)
    }
    met = [site for site, word in near.items() if word]
    verdict = True if met else None if None in near.values() else False
    note = f"Sites at 0.95 to 1 in every cell: {', '.join(met) or 'none'}. A, B, F and I are forced."
    return Claim(claim, paper, "; ".join(said), "", verdict, note)


def _near(row: Any) -> bool | None:
    """Whether a recovery is that of the paper, up to two or three points."""
    return True if row.lo >= 0.95 and row.hi <= 1.0 else False if row.hi < 0.95 or row.lo > 1.0 else None


def _inner(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    """Ablations at blocks before the last where there was something to read."""
    found = named(rows, "ablation")
    if found.empty:
        return found
    found = where(found[(found["layer"] >= 0) & (found["layer"] < found["n_layers"] - 1)], what=what)
    found = with_known(found, rows)
    return found[readable(found)]


def _refit(rows: pd.DataFrame, what: str, name: str) -> Claim:
    about = f"A. A probe refitted after removing {name} recovers", "in every cell"
    found = _inner(rows, what)
    return refit_claim(*about, found) if len(found) else Claim(*about, "not run")


def _inlp(rows: pd.DataFrame) -> Claim:
    whole, one = _inner(rows, "inlp"), _inner(rows, "direction")
    if whole.empty or one.empty:
        return Claim(*INLP, "not run")
    return inlp_claim(one, whole, named(rows, "dose"))


def _apart(at: pd.DataFrame) -> Claim:
    claim, paper = ("C. The most readable layer is not the most damaging one, in any pretrained model", "in none")
    if at.empty:
        return Claim(claim, paper, "not run")
    found_rows = list(each(at))
    said = "; ".join(
        f"{_who(r)}: readable L{r.readable_layer} ({r.accuracy:.1%}), damaging L{r.damaging_layer} ({r.drop:.1%})"
        for r in found_rows
    )
    note = "; ".join(f"{_who(r)}: {r.as_readable} sites are within the best one's interval" for r in found_rows)
    return Claim(claim, paper, said, "", every(_differ(r) for r in found_rows), note)


def _differ(row: Any) -> bool | None:
    """Whether no layer that is as readable as the best one is as damaging as the worst one, by intervals."""
    if row.drop_as_readable_hi < row.drop_lo:
        return True
    return False if row.as_readable == 1 and row.readable_layer == row.damaging_layer else None


def figures(rows: pd.DataFrame) -> list[Chart]:
    """Profiles before and after fine-tuning, and what each ablation costs and leaves, by layer."""
    after = where(named(rows, "probe"), control="task", span="all")
    before = where(named(rows, "probe_before"), control="task")
    table = pd.concat([after.assign(state="fine-tuned"), before.assign(state="pretrained")])
    table = table.assign(panel=table["model"] + ", " + table["cell"]).astype({"layer": int})
    table = table.sort_values("train_seed", kind="stable").drop_duplicates(["panel", "state", "layer"])
    made = [Chart(
        plots.layer_profile(table, color="state", facet="panel", baselines={"untrained": "untrained", "majority": "majority class"}),
        "Probe accuracy by layer before and after fine-tuning; dashed: the same architecture at its random initialisation.",
        name="profiles",
    )]  # fmt: skip
    cuts = named(rows, "ablation")
    if cuts.empty:
        return made
    cuts = cuts.assign(panel=cuts["model"] + ", " + cuts["cell"], what=cuts["what"].map(WHAT)).astype({"layer": int})
    cuts = cuts.sort_values("train_seed", kind="stable").drop_duplicates(["panel", "what", "layer"])
    for y, said, label in (
        ("drop", "What taking the variable out at one layer costs.", "drop in accuracy, points"),
        ("refit_accuracy", "What a probe refitted on the ablated activations reads.", "refitted probe"),
    ):
        shown = cuts if y == "drop" else cuts.drop(columns=["lo", "hi"])
        baselines = {} if y == "drop" else {"probe_accuracy": "before", "baseline": "baseline"}
        figure = plots.layer_profile(shown, y=y, color="what", facet="panel", y_label=label, baselines=baselines)
        made.append(Chart(figure, said, name=y))
    return made


def write(rows: pd.DataFrame, config: Any, record: RunRecord) -> Path:
    """Write ``claims.parquet`` and ``report.html`` into the run folder, and return the latter's path."""
    own = answered(rows)[["model", "task", "train_seed", "length", "accuracy", "balanced_accuracy"]]
    tables = [Table("Accuracy of the fine-tuned models' answers", own, name="behaviour", open=True)]
    learned = learned_only(rows, CELL, LEARNED)
    if "ablation" in set(learned["kind"]):
        tables.append(Table("Most readable and most damaging layer", layers(learned), name="layers", open=True))
    sites = named(rows, "site")
    if len(sites):
        kept = ["model", "cell", "pairs", "site", "read", "expected", "recovery", "lo", "hi", "n", "holds", "why", "problem", "description"]  # fmt: skip
        tables.append(Table("Recovery at each site", sites[[c for c in kept if c in sites]], name="sites"))
    seeds = rows["train_seed"].nunique()
    return write_paper_report(
        config, record, claims(rows),
        title="Refit the probe: pretrained models",
        lead=LEAD,
        sections=[
            Section("Readable, needed, refitted", "", figures(rows), explain=("layers", "probe", "untrained", "ablation", "refit", "random")),
            Section("Numbers", "Sites: the readings of a middle position patched at the final layer.", tables=tables),
        ],
        measured={
            "Cells": f"{', '.join(dict.fromkeys(rows['model']))} on {', '.join(TITLES[t] for t in dict.fromkeys(rows['task']))}",
            "Seeds": f"{seeds}; with one, intervals are over sequences and say nothing about another fine-tuning",
        },
    )  # fmt: skip


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
        own = where(answers, model=model, task=task, train_seed=seed)
        training = where(part, kind="training").dropna(subset=["n_params"]).iloc[-1]
        probes = where(named(part, "probe"), control="task", span="all")
        before = where(named(part, "probe_before"), control="task")
        cuts = where(part, kind="ablation", what="direction") if "what" in part else part.iloc[:0]
        read, cost = [], []
        for cell in dict.fromkeys(probes["cell"]):
            now, then = (where(p, cell=cell).sort_values("layer") for p in (probes, before))
            columns = now["accuracy"], then["accuracy"], now["untrained"]
            values = [f"{a:.2f} ({b:.2f}; {c:.2f})" for a, b, c in zip(*columns, strict=True)]
            read.append(f"{cell.partition(': ')[2]} {' '.join(values)}".strip())
        for label in dict.fromkeys(cuts["label"]) if len(cuts) else ():
            drops = where(cuts, label=label).sort_values("layer")["drop"]
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

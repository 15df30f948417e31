"""Writes docs/used.md: which directions the answers of the trained formal models follow, beside their controls.

    python docs/tools/interchange_table.py [MODEL ...]

measures the models of docs/data/models (all, or those named), keeps what is done in docs/data/interchange.json, and writes
the page from there. One model takes up to two minutes of one core. The models of the quickstart are measured in its run:

    probelens run quickstart --out RUN
    python docs/tools/interchange_table.py lstm-dyck-quickstart transformer-dyck-quickstart --run RUN

What ``subject_number.py`` kept is a section of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch

import probelens as pl
from probelens.examples import quickstart
from probelens.examples.refit_the_probe.shared.setup import make_task
from probelens.experiments import Store

DOCS = Path(__file__).resolve().parents[1]
DATA, PAGE = DOCS / "data/interchange.json", DOCS / "used.md"
SUBJECT = DOCS / "data/subject_number.json"
SITE = "blocks.1.hook_resid_post"  # of four blocks
N_PAIRS, DRAWS = 150, 4
OWN = "quickstart"
LAYERS = 30  # of SmolLM2-135M
DEFINITIONS = {"class_means": "class means", "pattern": "pattern", "filter": "probe rows"}
TABLE = (
    "| model | rank | class means | pattern | probe rows | DAS | complement | orthogonal PCs | random | everything |"
)


def trained(arch: str, run: str) -> Path:
    """Where a run of the quickstart left its model of this architecture."""
    store = Store(run)
    found = [key for key in store.keys() if store.config(key)["arch"] == arch]  # noqa: SIM118
    if len(found) != 1:
        raise SystemExit(f"{run} holds {len(found)} models of {arch!r}: probelens run quickstart --out {run}")
    return store.cell(found[0])


def measure(name: str, run: str) -> list[dict[str, Any]]:
    """The rows of one model: IIA by definition, rank and condition."""
    arch, task_name, kind = name.split("-")
    own = kind == OWN
    task = quickstart.make_task() if own else make_task(task_name)
    model = pl.wrap(pl.models.load(trained(arch, run) if own else DOCS / f"data/models/{name}.safetensors"))
    dyck = task_name == "dyck"
    label = "depth" if dyck else "state"
    pairs = task.pairs(N_PAIRS, length=40, seed=5, **({"label": "state", "kind": "depth"} if dyck else {}))
    data = task.splits({"probe": 300}, length=40, seed=11)["probe"]
    rows = []
    with model.backend("reference") if arch.startswith("mamba") else contextlib.nullcontext():
        probes = pl.probe(pl.collect(model, data, SITE), {label: data.labels[label]}, data.groups, mask=data.mask)
        full = pl.subspaces.directions(probes, label)[SITE].rank
        learned = pl.das(model, pairs, SITE, None, full, controls=DRAWS, splits=(0.5, 0.1, 0.4))
        held = pairs[learned.held]
        rows.append(_row(name, "DAS", full, learned.rows, learned.target()))
        for rank in dict.fromkeys((1, full)):
            for definition in DEFINITIONS:
                found = pl.interchange(
                    model, held, probes, label=label, directions=definition, rank=rank, controls=DRAWS
                )
                rows.append(_row(name, definition, rank, found.rows, found.targets()[0]))
    return rows


def _row(name: str, definition: str, rank: int, rows: list[dict[str, Any]], target: dict[str, Any]) -> dict[str, Any]:
    iia: dict[str, list[float]] = {}
    for row in rows:
        iia.setdefault(row["condition"], []).append(row["iia"])
    return {
        "model": name, "directions": definition, "rank": rank, "n": target["n"], "verdict": target["verdict"],
        "lo": round(target["iia_lo"], 3), "hi": round(target["iia_hi"], 3), "variance": round(target["variance"], 4),
        "iia": {condition: round(sum(values) / len(values), 3) for condition, values in iia.items()},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """One line a model and rank."""
    lines = [TABLE, "|---|---|---|---|---|---|---|---|---|---|"]
    for name, rank in dict.fromkeys(
        (row["model"], row["rank"]) for row in sorted(rows, key=lambda r: (r["model"], r["rank"]))
    ):
        here = {r["directions"]: r for r in rows if (r["model"], r["rank"]) == (name, rank)}
        cells = [_cell(here.get(kind)) for kind in (*DEFINITIONS, "DAS")]
        beside = here["class_means"]["iia"]
        cells += [_number(beside.get(kind)) for kind in ("complement", "orthogonal_pca", "random", "full")]
        lines.append(f"| {_shown(name)} | {rank} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(name: str) -> str:
    model, _, kind = name.rpartition("-")
    return f"{model}, quickstart's" if kind == OWN else model


def _cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['iia']['target']:.2f} ({row['verdict']})"


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if min(values) < max(values) else f"{values[0]:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def refits(rows: list[dict[str, Any]]) -> str:
    """What searches find where there is nothing to find."""
    lines = ["| model | rank | DAS | shuffled answers | untrained model |", "|---|---|---|---|---|"]
    for row in rows:
        if row["directions"] == "DAS":
            cells = [_number(row["iia"].get(kind)) for kind in ("target", "shuffled", "untrained")]
            lines.append(f"| {_shown(row['model'])} | {row['rank']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def subject(rows: list[dict[str, Any]]) -> str:
    """One line a position, block and definition, of the subject's number."""
    kinds = ("complement", "orthogonal_pca", "random", "random_matched", "full")
    lines = [
        "| swapped | directions | followed | verdict | complement | orthogonal PCs | random | as much variance | everything |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = f"{'the subject' if row['pos'] == 'subject' else 'the last token'}, block {row['layer']}"
        name = {**DEFINITIONS, "DAS": "DAS"}[row["directions"]]
        cells = [f"{row['iia']['target']:.2f} [{row['lo']:.2f}, {row['hi']:.2f}]", row["verdict"]]
        cells += [_number(row["iia"].get(kind)) for kind in kinds]
        lines.append(f"| {where} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], number: list[dict[str, Any]]) -> str:
    """The page."""
    das = [row for row in number if row["directions"] == "DAS"]
    shuffled, untrained = ([row["iia"][kind] for row in das] for kind in ("shuffled", "untrained"))
    tested = number[0]
    n = sorted({row["n"] for row in rows})
    full = {row["model"]: row["rank"] for row in rows if row["directions"] == "DAS"}
    probed = [row for row in rows if row["directions"] == "filter" and row["rank"] == full[row["model"]]]
    ignored = sum(row["iia"]["target"] < 0.1 for row in probed)
    return f"""# Which directions the answers follow

Swap one subspace between two runs that differ in a variable: does the answer become that of the other run? Below, the share
of pairs in which it does (interchange intervention accuracy), and the verdict, for the trained formal models of this
project (`docs/data/models`) and of the quickstart, of {min(n)} to {max(n)} held-out pairs that both runs answer
correctly. Swapped is the residual after the second of four blocks, at all positions; Parity's variable is the parity so far, Dyck's the depth. "Everything" is 1 by
construction there, and "complement" is everything but the class means.

{table(rows)}

Rank 1 takes the first direction of each definition, the higher rank the span of the class means (for depth 10). A probe's rows
are what it reads with: in {ignored} of {len(probed)} models hardly an answer (under 0.1) follows all of them.

DAS learns the subspace from other pairs. The same search on shuffled answers, and in an untrained model of the same
architecture, says how much of its success means nothing:

{refits(rows)}

Measured by `python docs/tools/interchange_table.py`, the quickstart's in a run of `probelens run quickstart --out RUN` by
`python docs/tools/interchange_table.py lstm-dyck-quickstart transformer-dyck-quickstart --run RUN`. One model of each kind: the numbers say nothing about another training run.

## The number of a subject, in SmolLM2-135M

"Right now I see that the keys next to the cabinet" goes on with "are", and with "is" where it begins with "the key". Swapped is
one direction of the residual between the two, behind one of the {LAYERS} blocks; the answer is the verb among all tokens. Of
{tested["n"]} pairs in {tested["n_groups"]} clusters of nouns that the directions were not learned from, with the 95 % interval over clusters:

{subject(number)}

Probes read the number in {100 * min(r["accuracy"] for r in number if "accuracy" in r):.0f} % of sentences of held-out nouns. At the subject a probe's own row moves no answer,
and everything but it moves nearly all: the row is what the probe reads with, not what the model follows. The class means move
nearly all answers; the leading principal component orthogonal to them and random directions move none. But random directions
that carry as much of the difference between the runs move about as many beside the class means, so that their verdict is
"underpowered". DAS finds a direction that carries less, beside which they move fewer. DAS on shuffled answers, where a search
should find nothing, moves as many ({_span(shuffled)}): it finds the model's one strong direction from any answers, so that its
success alone says little here. In an untrained model it moves none ({_span(untrained)}). Random controls are drawn twice.

Measured by `python docs/tools/subject_number.py`.
"""


def main() -> None:
    """Measure what is missing, or named, and write the page."""
    parser = argparse.ArgumentParser(description="Which directions the answers of the trained formal models follow.")
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--run", default="runs/quickstart", help="folder of the quickstart, for MODEL-quickstart")
    given = parser.parse_args()
    names = given.names
    torch.set_num_threads(1)
    rows = sorted(json.loads(DATA.read_text()) if DATA.exists() else [], key=lambda row: row["model"])
    known = sorted(path.stem for path in (DOCS / "data/models").glob("*.safetensors"))
    for name in names or known:
        if names or all(row["model"] != name for row in rows):
            since = time.process_time()
            rows = [row for row in rows if row["model"] != name] + measure(name, given.run)
            rows.sort(key=lambda row: row["model"])
            DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {time.process_time() - since:.0f} s of CPU", flush=True)
    PAGE.write_text(page(rows, json.loads(SUBJECT.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()

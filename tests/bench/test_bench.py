"""`probelens bench`: what it lists, runs, keeps and leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probelens.bench import growth, harness, rows, table
from probelens.bench.table import markdown
from probelens.cli.main import main

ROWS = {
    "patch-neox", "patch-mamba", "ablation", "interchange", "probes", "inlp", "mamba-step", "ssm-states", "cache", "cache-small",
    "collect", "import", "patch-padded-neox", "patch-padded-llama", "patch-bfloat16", "patch-float16",
    "patch-window", "patch-hybrid", "patch-lstm", "patch-gru",
}  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    def call(*words: object) -> SimpleNamespace:
        try:
            status = main(["bench", *map(str, words)])
        except SystemExit as exit:
            status = int(exit.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return call


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {peer: ("no_such_package_at_all", how) for peer, (_, how) in harness.PEERS.items()}
    monkeypatch.setattr(harness, "PEERS", absent)
    monkeypatch.setattr(growth, "PEERS", absent)


def planted(monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    """A row whose results differ by this much; 1 is allowed."""

    def build(size: str, device: str) -> harness.Work:
        runs = {harness.OURS: lambda: 0, "other": lambda: 0}
        return harness.Work(runs, lambda results: {"gap": difference}, {"gap": 1.0})

    case = harness.Case("planted", "nothing", build, {})
    monkeypatch.setattr("probelens.bench.rows.CASES", [*rows.CASES, case])


def test_the_rows_are_listed_in_words_and_as_json(run: Any) -> None:
    found = run("--list")
    assert (found.status, found.err) == (0, "")
    assert {line.partition(":")[0] for line in found.out.splitlines()} == ROWS
    content = json.loads(run("--list", "--json").out)
    assert {row["name"] for row in content} == ROWS
    assert all(row["left_out"] == [] for row in content), "every peer is installed where the tests run"


def test_without_the_peers_rows_and_contenders_are_left_out_and_the_package_is_named(run: Any, no_peers: None) -> None:
    left = {row["name"]: row["left_out"] for row in json.loads(run("--list", "--json").out)}
    lens, mambapy = 'pip install "probelens[transformer-lens]"', "pip install mambapy"
    for name in ("patch-neox", "patch-mamba", "ssm-states"):
        assert left[name] == [f"{name} is left out: {lens}"]
    assert left["mamba-step"] == [f"mamba-step runs without its contender 'transformers, mambapy': {mambapy}"]
    assert len(left["cache"]) == 2
    assert left["probes"] == []
    alone = run("--only", "patch-neox")
    assert (alone.status, alone.out) == (2, "")
    assert lens in alone.err
    assert [lens in line for line in growth.missing()] == [True, True]


def test_a_row_runs_and_its_results_are_equal(run: Any, tmp_path: Path) -> None:
    out, page = tmp_path / "b.json", tmp_path / "page.md"
    found = run("--only", "cache", "--repeats", 1, "--out", out, "--page", page, "--json")
    assert (found.status, found.err) == (0, "")
    (row,) = json.loads(found.out)["rows"]
    assert set(row["times"]) == {"probelens", "raw forward", "TransformerLens", "nnsight"}
    assert row["equal"]
    assert set(row["differences"]) == {"TransformerLens", "nnsight"}
    assert max(row["differences"].values()) < 1e-4
    assert (row["size"], row["repeats"]) == ("quick", 1)
    assert json.loads(out.read_text())["rows"] == [row]
    assert "`cache`: 1 runs each" in page.read_text()


def test_the_same_row_runs_beside_the_raw_forward_where_no_peer_is_installed(run: Any, no_peers: None) -> None:
    found = run("--only", "cache", "--repeats", 1)
    assert found.status == 0
    assert "raw forward" in found.out
    assert "TransformerLens" not in found.out
    assert "cache runs without its contender 'nnsight': pip install" in found.err


@pytest.mark.parametrize(("difference", "status", "says"), [(0.5, 0, "results equal"), (2.0, 1, "RESULTS DIFFER")])
def test_results_that_differ_are_status_1(
    run: Any, monkeypatch: pytest.MonkeyPatch, difference: float, status: int, says: str
) -> None:
    planted(monkeypatch, difference)
    found = run("--only", "planted")
    assert found.status == status
    assert says in found.out
    assert ("gap: 2, allowed 1" in found.out) == (status == 1)


def test_rows_of_a_file_are_kept_and_the_same_row_is_replaced(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted(monkeypatch, 0.5)
    out = tmp_path / "b.json"
    out.write_text(json.dumps({"rows": [{"case": "inlp", "device": "cpu", "old": True}]}))
    for repeats in (1, 2):
        assert run("--only", "planted", "--repeats", repeats, "--out", out).status == 0
    inlp, row = json.loads(out.read_text())["rows"]
    assert inlp["old"]
    assert (row["case"], row["repeats"]) == ("planted", 2)


@pytest.mark.parametrize("meanwhile", ['{"rows": [{"case": "inlp", "device": "cpu", "old": true}]}', "{"])
def test_what_another_process_wrote_meanwhile_is_kept(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, meanwhile: str
) -> None:
    planted(monkeypatch, 0.5)
    out, measure = tmp_path / "b.json", harness.measure

    def slow(*args: Any) -> Any:
        row = measure(*args)
        out.write_text(meanwhile)
        return row

    monkeypatch.setattr(harness, "measure", slow)
    assert run("--only", "planted", "--repeats", 1, "--out", out).status == 0
    cases = [row["case"] for row in json.loads(out.read_text())["rows"]]
    assert cases == (["inlp", "planted"] if meanwhile != "{" else ["planted"])


def test_a_peer_that_is_too_old_leaves_its_row_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, 0.5)
    monkeypatch.setattr("probelens.bench.sweeps.shapes.neox", lambda *a: (_ for _ in ()).throw(ImportError("too old")))
    found = run("--only", "planted", "patch-neox")
    assert found.status == 0
    assert "patch-neox is left out: too old" in found.err
    assert "planted" in found.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "cahce"], ["row 'cahce'", "Nearest: cache"]),
        (["--only"], ["--only"]),
        (["--size", "quik"], ["'quik'", "Nearest: quick"]),
        (["--repeats", "0"], ["--repeats 0"]),
        (["--device", "nowhere"], ["--device 'nowhere'"]),
        (["--onyl", "cache"], ["--onyl", "Nearest: --only"]),
        (["--out", "foreign.txt"], ["foreign.txt", "isn't a file of this command"]),
        (["--out", "list.json"], ["list.json", "isn't a file of this command"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_used_is_status_2_and_runs_nothing(
    run: Any, words: list[str], says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "foreign.txt").write_text("not JSON")
    (tmp_path / "list.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    found = run(*words)
    assert (found.status, found.out) == (2, ""), found.err
    for text in says:
        assert text in found.err
    assert (tmp_path / "foreign.txt").read_text() == "not JSON"


def test_the_page_says_what_operations_and_bytes_allow_at_most() -> None:
    times = {name: {"cpu": value, "wall": value} for name, value in ((harness.OURS, 2.0), ("peer", 6.0))}
    row = {
        "case": "a", "what": "work", "size": "full", "device": "cpu", "repeats": 1, "times": times, "ratios": {"peer": 3.0},
        "aims": {"peer": 5.0}, "differences": {}, "limits": {}, "equal": True, "note": "", "facts": {}, "left_out": [],
        "machine": harness.machine(),
        "least": {"gflop": 50.0, "gbyte": 5.0, "what": "the products", "gflops": 100.0, "gbytes": 10.0},
    }  # fmt: skip
    page = markdown([row])
    assert "3.00× (missed)" in page
    assert "50 GFLOP and 5 GB, take 1 s" in page
    assert "at most 6.00× against peer" in page
    assert "bound:" not in markdown([{**row, "least": None}])


def test_the_page_says_whose_runs_took_very_different_times() -> None:
    times = {
        harness.OURS: {"cpu": 1.2, "wall": 1.2, "cpu_min": 0.46, "cpu_max": 1.23},
        "peer": {"cpu": 1.3, "wall": 1.3, "cpu_min": 1.2, "cpu_max": 1.4},
        "old": {"cpu": 1.0, "wall": 1.0},
    }
    assert table._spread({"times": times}) == ["probelens's runs took 460 ms to 1.23 s"]


def test_growth_is_drawn_with_every_contender_once_in_the_legend(tmp_path: Path) -> None:
    names = (harness.OURS, "scikit-learn")
    curve = {
        "what": "probes", "axis": "rows", "sizes": [1, 2], "times": {name: [0.5, 1.0] for name in names},
        "exponents": dict.fromkeys(names, 1.0),
    }  # fmt: skip
    growth.plot([curve, curve], tmp_path / "g.html")
    drawn = (tmp_path / "g.html").read_text()
    assert drawn.count('"showlegend":true') == 2
    assert drawn.count('"showlegend":false') == 2
    assert "k = 1.00, scikit-learn 1.00" in drawn
    assert "![CPU seconds" in markdown([], [curve], "g.svg")
    assert "![" not in markdown([], [curve])

"""The page of simulations: written from what was measured, gone on with after a stop, and every check runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import simulated
import simulations

pytestmark = pytest.mark.skipif(not simulations.PAGE.is_file(), reason="needs a source tree")


def test_the_page_is_the_one_that_the_kept_numbers_give() -> None:
    done = json.loads(simulations.DATA.read_text())["checks"]
    assert set(done) == {check.key for check in simulations.CHECKS}
    written = simulations.PAGE.read_text(encoding="utf-8")
    assert written == simulations.page(done), "stale: python docs/tools/simulations.py"


@pytest.mark.parametrize("check", simulations.CHECKS, ids=lambda check: check.key)
def test_every_check_says_yes_or_no(check: simulated.Check) -> None:
    if "residue" not in check.what or "300" in check.what:  # others look for the number that would do, which takes long
        assert check.run(0) in (True, False)


@pytest.mark.parametrize("chance", [False, True])
def test_the_sweep_of_thirteen_sites_is_what_the_engine_gives(chance: bool) -> None:
    quick, whole = (simulated.deep_sweep(3, chance, n=6, draws=3, quick=quick) for quick in (True, False))
    assert len(quick) == simulated.SITES
    for one, other in zip(quick, whole, strict=True):
        for column in ("value", "clean", "drop", "damage", "effect", "effect_p", "effect_p_adjusted", "needed"):
            assert one[column] == pytest.approx(other[column], abs=1e-6), (one["site"], column)
    # Blocks turn the direction of a label as they turn all, so removing it costs the same at every site.
    assert (len({row["damage"] for row in quick}) > 1) is not chance


def test_an_aim_is_met_or_missed_where_the_whole_interval_says_so() -> None:
    check = simulated.Check("group", "what", (0.93, 0.97), 1000, bool)
    ends = {(950, 1000): "yes", (950, 100_000): "no", (19, 20): "open", (0, 50): "no"}
    for (hits, n), word in ends.items():
        assert simulations.said(check, {"hits": hits, "n": n}).split("|")[-2].strip() == word, (hits, n)
    rare = simulated.Check("group", "what", (0.0, 0.05), 100, bool)
    assert simulations.said(rare, {"hits": 0, "n": 100}) == "| what | at most 5% | 0.0% [0.0, 3.6] | 100 | yes |"


def test_a_stopped_run_goes_on_and_other_code_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def run(seed: int) -> bool:
        tried.append(seed)
        return seed % 2 == 0

    kept, code = tmp_path / "kept.json", simulations.code
    check = simulated.Check("group", "what", (0.0, 1.0), 10, run)
    assert simulations.measure((check,), 4, kept)[check.key]["hits"] == 2
    assert simulations.measure((check,), None, kept)[check.key]["hits"] == 5
    assert tried == list(range(10))
    monkeypatch.setattr(simulations, "code", lambda rooms: "other" if "probing" in rooms else code(rooms))
    assert simulations.measure((check,), 2, kept)[check.key]["n"] == 2
    monkeypatch.setattr(simulations, "code", lambda rooms: "another" if "patching" in rooms else "other")
    assert simulations.measure((check,), 2, kept)[check.key]["n"] == 2
    assert tried[10:] == [0, 1]

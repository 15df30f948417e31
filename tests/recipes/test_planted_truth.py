"""Planted truth: on models whose workings are known the usual method concludes wrongly, and this library does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pages import run_page

from probelens.examples import five_ways, planted
from probelens.examples.five_ways import NOT_SHOWN, OPEN, UNUSED, USED, Case

ROOT = Path(__file__).resolve().parents[2]
NEAR = 0.03  # other BLAS libraries train another MLP and draw other subspaces


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.key: case for case in (make() for make in five_ways.CASES)}


def test_the_usual_method_is_wrong_in_every_case_and_this_library_in_none(cases: dict[str, Case]) -> None:
    assert len(cases) == 6
    for case in cases.values():
        assert case.naive_says in (USED, UNUSED), case.key
        assert case.naive_says != case.truth, case.key
        says = [verdict for _, verdict in case.steps]
        # An open verdict is no error; a wrong one is, at any step.
        assert set(says) <= {case.truth, OPEN, NOT_SHOWN}, case.key
        assert case.says == case.truth or case.key == "crowded", case.key
    assert cases["crowded"].says == NOT_SHOWN


def test_every_model_answers_perfectly_before_anything_is_removed(cases: dict[str, Case]) -> None:
    assert all(case.numbers["clean"] == 1.0 for case in cases.values())


def test_a_readable_variable_that_nothing_reads_is_erased_at_no_cost(cases: dict[str, Case]) -> None:
    got = cases["unused"].numbers
    assert got["probe"] > 0.99 > got["guess"] + 0.4
    assert got["drop"] == 0.0
    assert got["effect_lo"] < 0 < got["effect_hi"]
    assert got["refit"] < got["baseline"] + 0.02
    # The control: the same call finds the drop of the variable that is read.
    assert got["y_drop"] > 0.4


def test_copies_in_two_components_hide_each_other_until_both_are_removed(cases: dict[str, Case]) -> None:
    got = cases["twice"].numbers
    assert got["mixer_drop"] == got["mlp_drop"] == 0.0
    assert got["joint_drop"] > 0.4
    assert got["drop"] > 0.4
    assert got["effect_lo"] > 0.5


def test_the_mlp_of_the_refit_reads_what_no_linear_probe_does(cases: dict[str, Case]) -> None:
    got = cases["exclusive"].numbers
    assert max(got["probe_accuracy"], got["refit_accuracy"], got["refit_position_accuracy"]) < got["baseline"] + 0.02
    assert got["drop"] < 0.02
    assert got["refit_mlp_accuracy"] > 0.95
    assert got["resampled_drop"] > 0.4


def test_the_probe_at_each_position_reads_what_pooled_ones_do_not(cases: dict[str, Case]) -> None:
    got = cases["flipping"].numbers
    assert max(got["probe_accuracy"], got["refit_accuracy"], got["refit_mlp_accuracy"]) < got["baseline"] + 0.02
    assert got["drop"] < 0.02
    assert got["by_position"] > 0.99
    assert got["refit_position_accuracy"] > 0.99
    assert got["line_drop"] > 0.4
    assert got["line_refit"] < got["line_baseline"] + 0.02


def test_removing_a_direction_may_cost_nothing_though_the_variable_is_needed(cases: dict[str, Case]) -> None:
    got = cases["spare"].numbers
    assert got["one_drop"] == 0.0
    assert got["one_refit_accuracy"] > 0.99
    assert got["drop"] > 0.4
    assert got["effect_lo"] > 0.8
    assert got["matched_drop"] < 0.05


def test_removing_a_direction_may_cost_much_though_the_variable_is_not_used(cases: dict[str, Case]) -> None:
    got = cases["crowded"].numbers
    assert got["probe"] > got["baseline"] + 0.1
    assert got["drop"] > 0.3
    assert got["matched_drop"] == pytest.approx(got["drop"], abs=0.08)
    assert got["effect_p"] > 0.05


def test_the_page_shows_what_is_measured(cases: dict[str, Case]) -> None:
    page = (ROOT / "docs/five-ways.md").read_text()
    made = five_ways.table(list(cases.values()))
    start = page.index(made.split("\n", 1)[0])
    shown = page[start : start + len(made) + 200].split("\n\n")[0]
    assert words(shown) == words(made)
    assert numbers(shown) == pytest.approx(numbers(made), abs=NEAR)


def test_the_figures_are_those_of_the_numbers(cases: dict[str, Case], tmp_path: Path) -> None:
    for path in five_ways.write_figures(list(cases.values()), tmp_path):
        kept = (ROOT / "docs/figures/five-ways" / path.name).read_text()
        fresh = path.read_text()
        said = [re.search("<title>(.*)</title>", text)[1] for text in (kept, fresh)]  # type: ignore[index]
        assert words(said[0]) == words(said[1])
        assert numbers(said[0]) == pytest.approx(numbers(said[1]), abs=NEAR)
        assert f"figures/five-ways/{path.name}" in (ROOT / "docs/five-ways.md").read_text()


def test_the_page_runs_as_it_stands() -> None:
    names = run_page("docs/five-ways.md")
    assert names["row"]["verdict"] == "inconclusive"  # type: ignore[index]
    assert names["both"].rows[0]["drop"] > 0.4  # type: ignore[attr-defined]
    assert [row["drop"] for row in names["alone"].rows] == [0.0, 0.0]  # type: ignore[attr-defined]


def test_what_a_model_reads_is_what_its_second_block_is_built_to_read() -> None:
    """The truth that the cases are judged by, checked on the models themselves and not by any method under test."""
    made = planted.unused()
    x = made.acts(made.held).clone().requires_grad_()
    reader = made.model.module.layers[1]  # type: ignore[index]
    grad = torch.autograd.grad(reader(x)[..., 1].sum(), x)[0].flatten(0, 1)
    along_y, along_z = (grad @ planted.axes()[axis] for axis in (8, 9))
    assert along_y.abs().min() > 0.5
    assert along_z.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"verdict": "erased", "effect_lo": 0.5, "effect_p": 0.04, "drop": 0.6}, USED),
        ({"verdict": "erased", "effect_lo": 0.5, "effect_p": 0.4, "drop": 0.6}, UNUSED),
        ({"verdict": "erased", "effect_lo": -0.1, "effect_p": 1.0, "drop": 0.0}, UNUSED),
        ({"verdict": "inconclusive", "effect_lo": 0.5, "effect_p": 0.04, "drop": 0.6}, OPEN),
        ({"verdict": "inconclusive", "effect_lo": -0.1, "effect_p": 1.0, "drop": 0.0}, OPEN),
        ({"verdict": "inconclusive", "effect_lo": 0.01, "effect_p": 0.4, "drop": 0.6}, NOT_SHOWN),
        ({"verdict": "absent", "effect_lo": 0.5, "effect_p": 0.04, "drop": 0.6}, OPEN),
        ({"verdict": "absent", "effect_lo": -0.1, "effect_p": 1.0, "drop": 0.0}, OPEN),
    ],
)
def test_verdicts_follow_from_numbers(row: dict[str, object], says: str) -> None:
    assert five_ways.judge(row) == says


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+", text)]


def words(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", "#", text).strip()


def test_numbers_and_words_tell_pages_apart() -> None:
    assert numbers("drop 0.51 (guess 0.5)") == [0.51, 0.5]
    assert words("drop 0.51") == words("drop 0.49") != words("damage 0.51")

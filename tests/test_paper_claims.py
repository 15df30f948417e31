"""The paper's claims beside rows made by hand: each must be found true, false and undecided where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import probelens as pl
from probelens.examples.refit_the_probe import formal_report
from probelens.examples.refit_the_probe.claims import claims
from probelens.examples.refit_the_probe.figures import FIGURES, over_seeds
from probelens.report import Claim

LENGTHS = (40, 60, 80, 100, 120)


def cell(arch: str, task: str, seed: int = 0, std: float = 0.02, convolution: bool = True) -> dict[str, Any]:
    return {"arch": arch, "task": task, "train_seed": seed, "embedding_std": std, "convolution": convolution}


def behaviour(arch: str, task: str, *accuracy: float, **options: Any) -> list[dict[str, Any]]:
    return [
        {**cell(arch, task, **options), "kind": "behaviour", "span": "all", "label": "state", "length": n,
         "accuracy": a, "lo": a - 0.01, "hi": a + 0.01}
        for n, a in zip(LENGTHS, accuracy, strict=True)
    ]  # fmt: skip


def profile(
    arch: str, task: str, verdict: str, com: float, label: str = "state", spread: float = 0.02
) -> list[dict[str, Any]]:
    row = {**cell(arch, task), "kind": "indices", "span": "late", "label": label, "verdict": verdict}
    for name, value in {"com": com, "final_share": com, "concentration": 0.9, "early_share": 1 - com}.items():
        row |= {name: value, f"{name}_lo": value - spread, f"{name}_hi": value + spread}
    return [row]


def ablated(
    arch: str, task: str, what: str, drops: list[float], refit: float = 0.99, **more: Any
) -> list[dict[str, Any]]:
    return [
        {**cell(arch, task), "kind": "ablation", "label": "state", "what": what, "layer": layer, "drop": drop,
         "lo": drop - 0.02, "hi": drop + 0.02, "probe_accuracy": 0.99, "refit_accuracy": refit, "baseline": 0.5,
         "verdict": "inconclusive", "rank": 3.0, "refit_position_accuracy": 0.9, "clean": 1.0, "chance": 0.5, "damage": 2 * drop, "damage_random": 0.0, "effect": 2 * drop,
         "effect_against": "random_matched", "at_chance": refit <= 0.52, **more}
        for layer, drop in enumerate(drops)
    ]  # fmt: skip


def found(rows: list[dict[str, Any]], start: str) -> Claim:
    (one,) = [c for c in claims(pd.DataFrame(rows)) if c.claim.startswith(start)]
    return one


PERFECT, FADING = (1.0,) * 5, (1.0, 0.9, 0.8, 0.75, 0.7)


def test_generalisation_is_judged_only_of_models_that_learned() -> None:
    claim = "2. LSTM and GRU generalise perfectly on Parity"
    perfect = behaviour("lstm", "parity", *PERFECT)
    assert found(perfect, claim).agrees is True
    assert found(perfect + behaviour("gru", "parity", *FADING), claim).agrees is False
    assert "GRU 70.0% at 120" in str(found(perfect + behaviour("gru", "parity", *FADING), claim).ours)
    assert found(behaviour("gru", "parity", 0.6, 0.6, 0.6, 0.6, 0.6), claim).agrees is None
    assert found(perfect, "2. LSTM and GRU generalise perfectly on S3") == Claim(
        "2. LSTM and GRU generalise perfectly on S3", "100 % at 40 to 120 tokens", "not run"
    )


def test_an_order_of_families_needs_intervals_that_lie_apart() -> None:
    claim = "2. LSTM and GRU beat SSMs and Transformer on Dyck"
    rows = behaviour("lstm", "dyck", *PERFECT) + behaviour("gru", "dyck", *PERFECT)
    assert found(rows + behaviour("transformer", "dyck", *FADING), claim).agrees is True
    assert found(rows + behaviour("mamba", "dyck", *PERFECT), claim).agrees is None
    worse = behaviour("lstm", "dyck", *FADING) + behaviour("mamba", "dyck", *PERFECT)
    assert found(worse, claim).agrees is False


def test_the_same_order_needs_both_tasks() -> None:
    rows = behaviour("lstm", "parity", *PERFECT) + behaviour("mamba", "parity", *FADING)
    rows += behaviour("transformer", "parity", 1.0, 0.7, 0.6, 0.55, 0.5)
    assert found(rows, "2. Order on S3").agrees is None
    again = [{**row, "task": "s3"} for row in rows]
    assert found(rows + again, "2. Order on S3").agrees is True
    other = (
        behaviour("lstm", "s3", *FADING)
        + behaviour("mamba", "s3", *PERFECT)
        + behaviour("transformer", "s3", *FADING)
    )
    assert found(rows + other, "2. Order on S3").agrees is False


def test_a_family_that_did_not_learn_has_no_place_in_an_order() -> None:
    order = [("lstm", PERFECT), ("mamba", FADING), ("transformer", (1.0, 0.7, 0.6, 0.55, 0.5))]
    learned = [row for arch, acc in order for task in ("parity", "s3") for row in behaviour(arch, task, *acc)]
    assert found(learned, "2. Order on S3").agrees is True
    lost = [row for row in learned if (row["arch"], row["task"]) != ("transformer", "s3")]
    lost += behaviour("transformer", "s3", 0.4, 0.3, 0.3, 0.25, 0.25)
    claim = found(lost, "2. Order on S3")
    assert claim.agrees is None
    assert "Transformer 27.5% (not learned)" in str(claim.ours)
    dyck = behaviour("lstm", "dyck", *PERFECT) + behaviour("mamba", "dyck", 0.5, 0.4, 0.4, 0.4, 0.4)
    assert found(dyck, "2. LSTM and GRU beat SSMs").agrees is None
    assert found(dyck + behaviour("gru", "dyck", *FADING), "2. LSTM and GRU beat SSMs").agrees is None


def test_profiles_are_held_against_the_word_of_the_paper() -> None:
    claim = "3. Parity: Mamba, Mamba-2, LSTM and GRU"
    late = profile("lstm", "parity", "late", 0.9)
    assert found(late, claim).agrees is True
    assert found(late + profile("gru", "parity", "not learned", 0.5), claim).agrees is True
    assert found(late + profile("gru", "parity", "immediate", 0.1), claim).agrees is False
    assert found(profile("gru", "parity", "undetermined", 0.5, spread=0.2), claim).agrees is None
    assert found(profile("gru", "parity", "undetermined", 0.3), claim).agrees is False, (
        "it leaves no room for late"
    )


def test_tasks_group_by_their_centres_of_mass() -> None:
    rows = profile("lstm", "s3", "late", 0.9) + profile("lstm", "parity", "late", 0.95)
    far, near = (
        profile("lstm", "dyck", "gradual", 0.3, "depth"),
        profile("lstm", "dyck", "late", 0.94, "depth"),
    )
    assert found(rows + far, "5.").agrees is True
    assert found(rows + near, "5.").agrees is None, "Parity and Dyck can't be told apart"
    opposite = profile("lstm", "s3", "gradual", 0.35) + profile("lstm", "parity", "late", 0.95) + far
    assert found(opposite, "5.").agrees is False


def test_a_direction_that_costs_nothing_contradicts_the_first_version() -> None:
    claim = "6. Ablating the best probe direction"
    assert found(ablated("lstm", "parity", "direction", [0.0, 0.4, 0.1]), claim).agrees is True
    nothing = ablated("lstm", "parity", "direction", [0.0, 0.01, 0.0, 0.5])
    assert found(nothing, claim).agrees is False, "the last block feeds the readout and doesn't count"
    mixed = nothing + ablated("gru", "parity", "direction", [0.5, 0.5, 0.5])
    assert found(mixed, claim).agrees is False
    assert found(ablated("lstm", "parity", "direction", [0.11, 0.1, 0.0]), claim).agrees is None


def test_recovery_by_a_refitted_probe() -> None:
    claim = "A. A probe refitted after removing the best direction"
    rows = ablated("lstm", "parity", "direction", [0.0, 0.3, 0.3])
    assert found(rows, claim).agrees is True
    assert "3 of 3 readable" in str(found(rows, claim).ours)
    lost = rows + ablated("gru", "parity", "direction", [0.3, 0.3, 0.3], refit=0.6)
    assert found(lost, claim).agrees is False
    assert "60.0%" in found(lost, claim).note


def test_what_looked_inert_carries_the_task_or_does_not() -> None:
    def dose(drop: float, random: float) -> list[dict[str, Any]]:
        return ablated(
            "lstm", "parity", "inlp", [drop] * 3, kind="dose", rank=64, damage=2 * drop, damage_random=random
        )

    rows = ablated("lstm", "parity", "direction", [0.0, 0.0, 0.3])
    rows += ablated("lstm", "parity", "inlp", [0.5] * 3, damage=1.0, damage_random=1.0)
    assert found(rows + dose(0.45, 0.1), "B.").agrees is True
    assert "2 readable inner layers" in str(found(rows + dose(0.45, 0.1), "B.").ours), (
        "one direction costs 30 % at the third"
    )
    assert "2 of 2 at rank 64, 0 of 2 at its full rank" in str(found(rows + dose(0.45, 0.1), "B.").ours)
    assert found(rows + dose(0.45, 0.8), "B.").agrees is False
    assert found(rows, "B.").agrees is None, "at full rank everything is gone with any subspace"


def test_erasure_counts_layers_at_chance() -> None:
    rows = ablated("lstm", "parity", "leace", [0.4] * 4, refit=0.51) + ablated(
        "lstm", "parity", "inlp", [0.4] * 4, refit=0.6
    )
    said = str(found(rows, "D.").ours)
    assert (
        "LEACE: a fresh linear probe is at chance at 3 of 3 inner layers, and at 1 of 1 last ones (3 of the 3 that"
        in said
    )
    assert (
        "INLP: a fresh linear probe is at chance at 0 of 3 inner layers, at the others at most 0.10 above"
        in said
    )


def test_a_convolution_is_judged_by_the_sign_of_its_loss() -> None:
    rows = behaviour("mamba", "parity", *PERFECT)
    without = behaviour("mamba", "parity", 0.9, 0.9, 0.9, 0.9, 0.9, convolution=False)
    assert found(rows + without, "7. Mamba without its convolution: Parity").agrees is True
    better = behaviour("mamba", "dyck", 0.96, 0.9, 0.9, 0.9, 0.9) + behaviour(
        "mamba", "dyck", *PERFECT, convolution=False
    )
    assert found(better, "7. Mamba without its convolution: Dyck").agrees is True
    assert found(rows, "7. Mamba without its convolution: Parity").agrees is None


def test_rows_of_one_kind_leave_every_other_claim_open() -> None:
    made = claims(pd.DataFrame(behaviour("lstm", "parity", *PERFECT)))
    assert len(made) > 15
    assert {c.agrees for c in made if c.ours == "not run"} == {None}
    assert sum(c.ours != "not run" for c in made) == 1


def test_seeds_are_averaged_with_an_interval_over_them() -> None:
    rows = [
        r
        for seed, a in enumerate((1.0, 0.98, 1.0))
        for r in behaviour("lstm", "parity", *(a,) * 5, seed=seed)
    ]
    one = found(rows, "2. LSTM and GRU generalise perfectly on Parity")
    assert "99.3%" in str(one.ours)
    low, high = map(float, str(one.interval).split(" to "))
    assert low < 0.98
    assert 0.995 < high <= 1.0, "an accuracy stays one"


@pytest.mark.parametrize("name", ["behaviour", "ablations-parity", "refits-parity"])
def test_figures_come_from_rows_alone(name: str) -> None:
    rows = pd.DataFrame(
        behaviour("lstm", "parity", *PERFECT) + ablated("lstm", "parity", "direction", [0.1, 0.2, 0.3])
    )
    figure = FIGURES[name][0](rows)
    shown = [list(t.y) for t in figure.data if t.y is not None]
    wanted = {"behaviour": [1.0] * 5, "ablations-parity": [0.1, 0.2, 0.3], "refits-parity": [0.99] * 3}[name]
    assert any(pytest.approx(y) == wanted for y in shown if len(y) == len(wanted))


def test_a_figure_without_rows_is_none_and_with_damaged_ones_an_error() -> None:
    rows = pd.DataFrame(behaviour("lstm", "parity", *PERFECT))
    assert [name for name in FIGURES if FIGURES[name][0](rows) is not None] == ["behaviour"]
    with pytest.raises(KeyError):
        FIGURES["behaviour"][0](rows.drop(columns="length"))


def test_length_transfer_shows_inner_layers_only() -> None:
    rows = [
        {**cell("lstm", "parity"), "kind": "length", "span": "all", "label": "state", "what": "leace", "layer": layer,
         "length": n, "drop": drop, "lo": drop, "hi": drop}
        for layer, drop in ((-1, 0.5), (0, 0.1), (1, 0.3), (3, 0.4))
        for n in (40, 80)
    ]  # fmt: skip
    figure = FIGURES["transfer"][0](pd.DataFrame(rows))
    assert figure is not None
    assert [list(t.y) for t in figure.data if t.name == "LSTM"] == [[0.3, 0.3]], (
        "not the embedding, not the last block"
    )


def test_an_interval_over_seeds_stays_within_what_an_accuracy_can_be() -> None:
    rows = pd.DataFrame({"layer": 0, "accuracy": [1.0, 0.99, 0.98], "drop": [0.01, -0.01, 0.0]})
    found = over_seeds(rows, ["layer"], "accuracy").iloc[0]
    assert found["accuracy"] == pytest.approx(0.99)
    assert 0.5 < found["lo"] < 0.98 < 0.995 < found["hi"] < 1
    drop = over_seeds(rows, ["layer"], "drop").iloc[0]
    assert drop["lo"] < -0.01 < 0.01 < drop["hi"], "a drop may be of either sign"


def test_what_is_published_can_be_published_again(tmp_path: Path) -> None:
    trained = {
        **cell("lstm", "parity"),
        "kind": "training",
        "step": 400,
        "n_params": 8e5,
        "learned": True,
        "cpu_seconds": 14.0,
    }
    rows = pd.DataFrame(
        [
            trained,
            *behaviour("lstm", "parity", *PERFECT),
            *ablated("lstm", "parity", "direction", [0.1, 0.2, 0.3]),
        ]
    )
    rows["cell"] = "0123"
    rows.to_parquet(tmp_path / "rows.parquet")
    page = "A\n<!-- claims -->\nold\n<!-- end claims -->\nB\n<!-- cells -->\n<!-- end cells -->\nC\n"
    for source, n in (("rows.parquet", 1), ("small1.parquet", 2)):
        (tmp_path / f"{n}.md").write_text(page)
        formal_report.main(
            [
                str(tmp_path / source),
                "--data",
                str(tmp_path / f"small{n}.parquet"),
                "--page",
                str(tmp_path / f"{n}.md"),
            ]
        )
    text = (tmp_path / "1.md").read_text()
    assert text == (tmp_path / "2.md").read_text()
    assert "old" not in text
    assert (
        "| 2. LSTM and GRU generalise perfectly on Parity | 100 % at 40 to 120 tokens | worst: LSTM 100.0% at 40"
        in text
    )
    assert "| LSTM Parity | 0 | 400 | 14 | 1 / 1 / 1 / 1 / 1 |" in text


def test_runs_are_published_together_and_a_model_in_both_is_the_later_one(tmp_path: Path) -> None:
    def trained(arch: str, steps: int) -> list[dict[str, object]]:
        ends = {"kind": "training", "step": steps, "n_params": 8e5, "learned": True, "cpu_seconds": 14.0}
        return [{**cell(arch, "parity"), **ends}, *behaviour(arch, "parity", *PERFECT)]

    pd.DataFrame([*trained("lstm", 400), *trained("gru", 300)]).to_parquet(tmp_path / "first.parquet")
    pd.DataFrame([*trained("gru", 700), *trained("mamba", 900)]).to_parquet(tmp_path / "second.parquet")
    page = tmp_path / "page.md"
    page.write_text("<!-- cells -->\n<!-- end cells -->\n")
    formal_report.main([str(tmp_path / f"{n}.parquet") for n in ("first", "second")] + ["--page", str(page)])
    said = [line.split(" | ")[:3] for line in page.read_text().splitlines() if "Parity" in line]
    assert said == [
        ["| Mamba Parity", "0", "900"],
        ["| LSTM Parity", "0", "400"],
        ["| GRU Parity", "0", "700"],
    ]


def test_rows_that_are_not_there_or_of_another_recipe_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"kind": ["probe"], "arch": ["lstm"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(
        pl.StoreError, match=r"lacks the columns task, train_seed.*isn't a run of this recipe"
    ):
        formal_report.main([str(tmp_path / "other.parquet")])
    with pytest.raises(pl.StoreError, match=r"no rows at .*none\.parquet"):
        formal_report.main([str(tmp_path / "none.parquet")])


def test_the_tables_of_the_page_are_those_of_its_rows() -> None:
    docs = Path(__file__).resolve().parent.parent / "docs"
    page = (docs / "paper.md").read_text(encoding="utf-8")
    rows = pd.read_parquet(docs / "data" / "paper" / "formal.parquet")
    assert formal_report.filled(page, rows) == page
    for name in FIGURES:
        assert f"figures/paper/{name}.svg" in page
        assert (docs / "figures" / "paper" / f"{name}.svg").is_file()

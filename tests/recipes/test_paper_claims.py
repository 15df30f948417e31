"""The paper's claims beside rows made by hand: each must be found true, false and undecided where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import probelens as pl
from probelens.examples.refit_the_probe import publish
from probelens.examples.refit_the_probe.formal import recipe as formal
from probelens.examples.refit_the_probe.formal import tables
from probelens.examples.refit_the_probe.formal.claims import claims
from probelens.examples.refit_the_probe.formal.figures import FIGURES
from probelens.examples.refit_the_probe.formal.rows import over_seeds
from probelens.examples.refit_the_probe.shared.pages import exit_with_message
from probelens.experiments import RunRecord
from probelens.experiments.recipe import command_of, unfinished
from probelens.results.report import Claim

LENGTHS = (40, 60, 80, 100, 120)


def cell(arch: str, task: str, seed: int = 0, std: float = 0.02, convolution: bool = True) -> dict[str, Any]:
    return {"arch": arch, "task": task, "train_seed": seed, "embedding_std": std, "convolution": convolution}


def behaviour(arch: str, task: str, *accuracy: float, **options: Any) -> list[dict[str, Any]]:
    return [
        {**cell(arch, task, **options), "kind": "behaviour", "span": "all", "label": "state", "length": n,
         "accuracy": a, "lo": a - 0.005, "hi": min(a + 0.005, 1.0)}
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
         "verdict": "inconclusive", "rank": 3.0, "refit_position_accuracy": 0.9, "refit_mlp_accuracy": 0.55, "clean": 1.0, "chance": 0.5, "damage": 2 * drop, "damage_random": 0.0, "effect": 2 * drop, "effect_lo": 2 * drop - 0.02, "effect_hi": 2 * drop + 0.02,
         "effect_against": "random_matched", "at_chance": refit <= 0.52, **more}
        for layer, drop in enumerate(drops)
    ]  # fmt: skip


def found(rows: list[dict[str, Any]], start: str) -> Claim:
    (one,) = [c for c in claims(pd.DataFrame(rows)) if c.claim.startswith(start)]
    return one


NAMES = ("transformer", "mamba", "mamba2", "lstm", "gru")
PERFECT, FADING = (1.0,) * 5, (1.0, 0.9, 0.8, 0.75, 0.7)


def test_generalisation_is_judged_only_of_models_that_learned() -> None:
    claim = "2. LSTM and GRU generalise perfectly on Parity"
    perfect, both = behaviour("lstm", "parity", *PERFECT), behaviour("gru", "parity", *PERFECT)
    assert found(perfect + both, claim).agrees is True
    assert found(perfect, claim).agrees is None, "of the GRU nothing is known"
    assert found(perfect + behaviour("gru", "parity", *FADING), claim).agrees is False
    assert "GRU 70.0% at 120" in str(found(perfect + behaviour("gru", "parity", *FADING), claim).ours)
    nearly = behaviour("gru", "parity", 1.0, 0.992, 1.0, 1.0, 1.0)
    assert found(perfect + nearly, claim).agrees is None, "its interval holds the bound"
    assert found(behaviour("gru", "parity", 0.6, 0.6, 0.6, 0.6, 0.6), claim).agrees is None
    assert found(perfect, "2. LSTM and GRU generalise perfectly on S3") == Claim(
        "2. LSTM and GRU generalise perfectly on S3", "100 % at 40 to 120 tokens", "not run"
    )


def test_a_seed_that_did_not_learn_leaves_the_others_as_they_are() -> None:
    claim = "2. LSTM and GRU generalise perfectly on Parity"
    rows = behaviour("lstm", "parity", *PERFECT) + behaviour("gru", "parity", *PERFECT)
    lost = behaviour("lstm", "parity", 0.6, 0.55, 0.5, 0.5, 0.5, seed=1)
    assert found(rows + lost, claim).agrees is True
    assert "LSTM (1 of 2 seeds learned) 100.0%" in str(found(rows + lost, claim).ours)
    cut = ablated("lstm", "parity", "direction", [0.5, 0.5, 0.5])
    idle = [{**row, "train_seed": 1} for row in ablated("lstm", "parity", "direction", [0.0, 0.0, 0.0])]
    alone, after = (found(rows + lost + cut + more, "6. Ablating the best probe direction") for more in ([], idle))
    assert after == alone
    assert "LSTM Parity 50.0%" in str(after.ours)
    probed = [{**cell("lstm", "parity", seed=1), "kind": "probe", "control": "task", "span": "late", "label": "state",
               "layer": layer, "accuracy": 1.0, "lo": 1.0, "hi": 1.0, "untrained": 0.5} for layer in range(-1, 4)]  # fmt: skip
    assert FIGURES["profiles"][0](pd.DataFrame(rows + lost + probed)) is None
    assert FIGURES["profiles"][0](pd.DataFrame(rows + [{**r, "train_seed": 0} for r in probed])) is not None


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
        behaviour("lstm", "s3", *FADING) + behaviour("mamba", "s3", *PERFECT) + behaviour("transformer", "s3", *FADING)
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
    assert "Transformer (not learned) 27.5%" in str(claim.ours)
    dyck = behaviour("lstm", "dyck", *PERFECT) + behaviour("mamba", "dyck", 0.5, 0.4, 0.4, 0.4, 0.4)
    assert found(dyck, "2. LSTM and GRU beat SSMs").agrees is None
    assert found(dyck + behaviour("gru", "dyck", *FADING), "2. LSTM and GRU beat SSMs").agrees is None


def test_profiles_are_held_against_the_word_of_the_paper() -> None:
    claim = "3. Parity: Mamba, Mamba-2, LSTM and GRU"
    three = [row for arch in ("mamba", "mamba2", "lstm") for row in profile(arch, "parity", "late", 0.9)]
    assert found(three + profile("gru", "parity", "late", 0.9), claim).agrees is True
    assert found(three, claim).agrees is None, "of the GRU nothing is known"
    assert found(three + profile("gru", "parity", "not learned", 0.5), claim).agrees is None
    assert found(three + profile("gru", "parity", "immediate", 0.1), claim).agrees is False
    assert found(three + profile("gru", "parity", "undetermined", 0.5, spread=0.2), claim).agrees is None
    assert found(three + profile("gru", "parity", "undetermined", 0.3), claim).agrees is False, (
        "it leaves no room for late"
    )
    scaled = [{**row, "embedding_std": 1.0} for row in profile("gru", "parity", "immediate", 0.1)]
    one = found(three + profile("gru", "parity", "late", 0.9) + scaled, claim)
    assert (one.agrees, one.note) == (True, "From an embedding of std 0.02; std 1: GRU immediate (COM 0.10).")


def test_tasks_group_by_their_centres_of_mass() -> None:
    def rows(s3: float, parity: float, dyck: float, archs: tuple[str, ...] = NAMES) -> list[dict[str, Any]]:
        made = []
        for arch in archs:
            made += profile(arch, "s3", "late", s3) + profile(arch, "parity", "late", parity)
            made += profile(arch, "dyck", "gradual", dyck, "depth")
        return made

    assert found(rows(0.9, 0.95, 0.3), "5.").agrees is True
    assert found(rows(0.9, 0.95, 0.3, NAMES[:4]), "5.").agrees is None, "one family of five is missing"
    assert found(rows(0.9, 0.95, 0.94), "5.").agrees is None, "Parity and Dyck can't be told apart"
    assert found(rows(0.35, 0.95, 0.3), "5.").agrees is False
    # Three seeds of S3 from 0.05 to 0.9 have a mean nearer to Parity's, and an interval that holds both.
    seeds = [{**row, "train_seed": i} for i, s3 in enumerate((0.9, 0.9, 0.1)) for row in rows(s3, 0.95, 0.3)]
    assert found(seeds, "5.").agrees is None


def test_a_direction_that_costs_nothing_contradicts_the_first_version() -> None:
    claim = "6. Ablating the best probe direction"
    assert found(ablated("lstm", "parity", "direction", [0.0, 0.4, 0.1]), claim).agrees is True
    nothing = ablated("lstm", "parity", "direction", [0.0, 0.01, 0.0, 0.5])
    assert found(nothing, claim).agrees is False, "the last block feeds the readout and doesn't count"
    mixed = nothing + ablated("gru", "parity", "direction", [0.5, 0.5, 0.5])
    assert found(mixed, claim).agrees is False
    assert found(ablated("lstm", "parity", "direction", [0.11, 0.1, 0.0]), claim).agrees is None
    # The class means are a claim of their own, and change nothing in what is said of the probe's direction.
    both = (
        nothing
        + ablated("lstm", "parity", "mean_direction", [0.5, 0.5, 0.5])
        + ablated("lstm", "parity", "means", [0.5] * 3, refit=0.5)
    )
    assert found(both, claim) == found(nothing, claim)
    assert found(both, "6. Ablating the best class-mean direction").agrees is True
    assert found(both, "A. A probe refitted after removing the best class-mean direction").agrees is True
    erased = found(both, "A. A probe refitted after removing the span of the class means")
    assert erased.agrees is False
    assert "by construction" in erased.note
    assert not [c for c in claims(pd.DataFrame(nothing)) if "class-mean" in c.claim], "earlier runs have none"


def test_recovery_by_a_refitted_probe() -> None:
    claim = "A. A probe refitted after removing the best direction"
    rows = ablated("lstm", "parity", "direction", [0.0, 0.3, 0.3])
    assert found(rows, claim).agrees is True
    assert "3 of 3 readable" in str(found(rows, claim).ours)
    lost = rows + ablated("gru", "parity", "direction", [0.3, 0.3, 0.3], refit=0.6)
    assert found(lost, claim).agrees is False
    assert "60.0%" in found(lost, claim).note
    gap = {"probe_accuracy": 0.99, "refit": 0.96}
    for lo, hi, word in ((0.021, 0.039, False), (0.01, 0.05, None), (0.0, 0.02, True)):
        part = ablated("gru", "parity", "direction", [0.3] * 3, refit_gap_lo=lo, refit_gap_hi=hi, **gap)
        assert found(rows + part, claim).agrees is word, "by the interval of the gap"
    assert "open at 3" in str(found(rows + ablated("gru", "parity", "direction", [0.3] * 3, refit_gap_lo=0.01, refit_gap_hi=0.05, **gap), claim).ours)  # fmt: skip


def test_what_the_last_tokens_give_away_is_not_readable() -> None:
    rows = ablated("lstm", "dyck", "direction", [0.0] * 3, label="top", probe_accuracy=0.85, refit=0.6)
    last = {**cell("lstm", "dyck"), "kind": "probe", "control": "task", "span": "all", "label": "top", "layer": 0,
            "accuracy": 0.85, "last_w": 0.81}  # fmt: skip
    claim = "A. A probe refitted after removing the best direction"
    assert found(rows, claim).agrees is False
    assert found([*rows, last], claim).ours == "nothing is readable at an inner layer"


def test_what_looked_inert_carries_the_task_or_does_not() -> None:
    def both(what: str, drops: list[float], **more: Any) -> list[dict[str, Any]]:
        return [row for arch in ("lstm", "gru") for row in ablated(arch, "parity", what, drops, **more)]

    def dose(effect: float, spread: float = 0.1) -> list[dict[str, Any]]:
        ends = {"effect": effect, "effect_lo": effect - spread, "effect_hi": effect + spread}
        return both("inlp", [0.5] * 3, kind="dose", rank=64, **ends)

    rows = both("direction", [0.0, 0.0, 0.0]) + both("inlp", [0.5] * 3, effect_lo=0.4)
    assert found(rows + dose(0.8), "B.").agrees is True
    assert "6 of 6 at rank 64" in str(found(rows + dose(0.8), "B.").ours)
    assert "(median rank 3): 0 of 6" in found(rows + dose(0.8), "B.").note
    assert found(rows + dose(0.2), "B.").agrees is False
    assert found(rows + dose(0.55), "B.").agrees is None, "the intervals hold one half"
    assert "(and less than they do at 6)" in str(found(rows + dose(-0.3), "B.").ours)
    assert found(rows, "B.").agrees is None, "at full rank everything is gone with any subspace"
    few = both("direction", [0.0, 0.0, 0.3]) + both("inlp", [0.5] * 3)
    assert found(few + dose(0.8), "B.").agrees is None, "four layers are too few"
    assert "4 readable inner layers" in str(found(few + dose(0.8), "B.").ours)


def test_erasure_counts_layers_at_chance() -> None:
    rows = ablated("lstm", "parity", "leace", [0.4] * 4, refit=0.51)
    inlp = ablated("lstm", "parity", "inlp", [0.4] * 4, refit=0.6)
    claim = found(rows + inlp, "D.")
    assert "LEACE: a fresh linear probe is at chance at 3 of 3 inner layers and 1 of 1 last layers" in str(claim.ours)
    assert "INLP: a fresh linear probe is at chance at 0 of 3 inner layers (at the others up to 0.10 above)" in str(claim.ours)  # fmt: skip
    assert "LEACE: of 3 inner layers erased this way, a probe at each position still reads 3, an MLP 0" in claim.note
    assert claim.agrees is False
    assert found(inlp, "D.").agrees is True, "reached nowhere, as in the paper"


def test_longer_sequences_are_judged_where_training_never_was() -> None:
    def longer(arch: str, drop: float, **more: Any) -> list[dict[str, Any]]:
        return [
            {**cell(arch, "parity"), "kind": "length", "span": "beyond", "label": "state", "what": "direction", "layer": layer,
             "length": n, "drop": drop, "lo": drop - 0.02, "hi": drop + 0.02, "floor": False, **more}
            for layer in range(3) for n in (80, 100, 120)
        ]  # fmt: skip

    cut = ablated("lstm", "parity", "direction", [0.0] * 3)
    claim = "6. The same at 80, 100 and 120 tokens"
    assert found(cut + longer("lstm", 0.3), claim).agrees is True
    assert found(cut + longer("lstm", 0.0), claim).agrees is False
    assert found(cut + longer("lstm", 0.0) + longer("lstm", 0.9, span="seen"), claim).agrees is False
    silent = found(cut + longer("lstm", 0.3) + longer("gru", 0.0, floor=True), claim)
    assert silent.agrees is True
    assert silent.note == "Left out, within 0.2 of chance there: GRU Parity."


def retrained(task: str, gaps: list[float], trained: float = 0.98) -> list[dict[str, Any]]:
    """Mamba with and without its convolution, one seed for each gap."""
    rows = []
    for seed, gap in enumerate(gaps):
        rows += behaviour("mamba", task, *(trained,) * 5, seed=seed)
        rows += behaviour("mamba", task, *(trained + gap,) * 5, seed=seed, convolution=False)
    return rows


def test_a_convolution_is_judged_by_a_test_over_seeds() -> None:
    claim = "7. Mamba without its convolution: Parity"
    down = [-0.1, -0.12, -0.08, -0.11, -0.09, -0.1]
    assert found(retrained("parity", down), claim).agrees is True
    assert "sign-flip p 0.031, after Holm" in str(found(retrained("parity", down), claim).ours)
    low, high = map(float, str(found(retrained("parity", down), claim).interval).split(" to "))
    assert -12 < low < -10 < high < -8
    assert found(retrained("parity", [-gap / 10 for gap in down]), claim).agrees is False
    assert found(retrained("parity", [0.01, -0.01] * 3), claim).agrees is None
    few = found(retrained("parity", down[:5]), claim)
    assert (few.agrees, few.note) == (None, "A sign-flip test needs at least 6 seeds for p < 0.05.")
    assert found(behaviour("mamba", "parity", *PERFECT), claim).agrees is None
    assert "did not learn" in str(found(retrained("parity", down, trained=0.7), claim).ours)
    dyck = "7. Mamba without its convolution: Dyck"
    assert found(retrained("dyck", [0.01, -0.01] * 3), dyck).agrees is True, "the paper's is not significant"
    assert found(retrained("dyck", down), dyck).agrees is False
    both = retrained("parity", down) + retrained("dyck", down)
    assert found(both, claim).agrees is None, "two tests, so p is doubled"


def test_a_reversal_needs_an_interval_above_zero() -> None:
    claim = "(title of v1)"

    def rows(parity: float, dyck: float, spread: float = 0.02) -> list[dict[str, Any]]:
        return (
            profile("mamba", "parity", "late", parity, spread=spread)
            + profile("transformer", "parity", "gradual", 0.5)
            + profile("mamba", "dyck", "gradual", dyck, "depth")
            + profile("transformer", "dyck", "immediate", 0.3, "depth")
        )

    one = found(rows(0.9, 0.2), claim)
    assert one.agrees is True
    assert str(one.ours).startswith("Mamba +0.50 (+0.40 on Parity, -0.10 on Dyck depth)")
    assert one.interval == "0.46 to 0.54", "four half-widths of 0.02 add as squares"
    assert found(rows(0.5, 0.4), claim).agrees is False
    assert found(rows(0.9, 0.2, spread=0.6), claim).agrees is None
    assert found(rows(0.9, 0.2)[:3], claim).ours == "not run"


def test_several_seeds_of_a_profile_have_one_interval_over_them() -> None:
    rows = []
    for seed, (word, com) in enumerate((("late", 0.9), ("late", 0.8), ("undetermined", 0.3))):
        rows += [{**row, "train_seed": seed} for row in profile("lstm", "parity", word, com)]
    one = found(rows, "3. Parity: Mamba, Mamba-2, LSTM and GRU")
    assert "LSTM late in 2 of 3 / undetermined in 1 of 3 (COM 0.67)" in str(one.ours)
    low, high = map(float, str(one.interval).removeprefix("final share LSTM ").split(" to "))
    half = 4.303 * 0.3215 / 3**0.5  # Student's, of 0.9, 0.8 and 0.3
    assert low < 2 / 3 < high
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert one.agrees is False, "one seed leaves no room for late"


def test_the_largest_drop_is_that_of_a_layer_averaged_over_seeds() -> None:
    rows = []
    for seed, drops in enumerate(([0.5, 0.3, 0.0], [0.0, 0.3, 0.0], [0.0, 0.3, 0.0])):
        rows += [{**row, "train_seed": seed} for row in ablated("lstm", "parity", "direction", drops)]
    assert "LSTM Parity 30.0%" in str(found(rows, "6. Ablating the best probe direction").ours)


def test_rows_of_one_kind_leave_every_other_claim_open() -> None:
    made = claims(pd.DataFrame(behaviour("lstm", "parity", *PERFECT)))
    assert len(made) > 15
    assert {c.agrees for c in made if c.ours == "not run"} == {None}
    assert sum(c.ours != "not run" for c in made) == 1


def test_seeds_are_averaged_with_an_interval_over_them() -> None:
    rows = [r for seed, a in enumerate((1.0, 0.98, 1.0)) for r in behaviour("lstm", "parity", *(a,) * 5, seed=seed)]
    one = found(rows, "2. LSTM and GRU beat")
    assert one.ours == "not run"
    rows += behaviour("transformer", "dyck", *FADING) + [{**row, "task": "dyck"} for row in rows]
    assert "LSTM 99.3%" in str(found(rows, "2. LSTM and GRU beat").ours)
    pooled = over_seeds(pd.DataFrame(rows[:15]), ["length"], "accuracy").iloc[0]
    assert pooled["lo"] < 0.98
    assert 0.995 < pooled["hi"] <= 1.0, "an accuracy stays one"


def test_perfect_is_said_of_each_seed() -> None:
    rows = behaviour("gru", "parity", *PERFECT)
    for seed, a in enumerate((1.0, 0.98, 1.0)):
        rows += behaviour("lstm", "parity", *(a,) * 5, seed=seed)
    one = found(rows, "2. LSTM and GRU generalise perfectly on Parity")
    assert "LSTM 98.0% at 40 (seed 1 of 3)" in str(one.ours)
    assert one.agrees is False


@pytest.mark.parametrize("name", ["behaviour", "ablations-parity", "refits-parity"])
def test_figures_come_from_rows_alone(name: str) -> None:
    rows = pd.DataFrame(behaviour("lstm", "parity", *PERFECT) + ablated("lstm", "parity", "direction", [0.1, 0.2, 0.3]))
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
        {**cell("lstm", "parity"), "kind": "length", "span": span, "label": "state", "what": "leace", "layer": layer,
         "length": n, "drop": drop + extra, "lo": drop, "hi": drop, "floor": n == 120}
        for layer, drop in ((-1, 0.5), (0, 0.1), (1, 0.3), (3, 0.4))
        for n, span, extra in ((40, "all", 0), (80, "all", 0.1), (80, "beyond", 0.05), (120, "beyond", 0))
    ]  # fmt: skip
    figure = FIGURES["transfer"][0](pd.DataFrame(rows))
    assert figure is not None
    assert [list(t.y) for t in figure.data if t.name == "LSTM"] == [[0.3, pytest.approx(0.35)]], (
        "not the embedding, not the last block, nor where the model only guesses"
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
        [trained, *behaviour("lstm", "parity", *PERFECT), *ablated("lstm", "parity", "direction", [0.1, 0.2, 0.3])]
    )
    rows["cell"] = "0123"
    rows.to_parquet(tmp_path / "rows.parquet")
    page = "A\n<!-- claims -->\nold\n<!-- end claims -->\nB\n<!-- cells -->\n<!-- end cells -->\nC\n"
    for source, n in (("rows.parquet", 1), ("small1.parquet", 2)):
        (tmp_path / f"{n}.md").write_text(page)
        publish.main(
            [str(tmp_path / source), "--data", str(tmp_path / f"small{n}.parquet"), "--page", str(tmp_path / f"{n}.md")]
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
    publish.main([str(tmp_path / f"{n}.parquet") for n in ("first", "second")] + ["--page", str(page)])
    said = [line.split(" | ")[:3] for line in page.read_text().splitlines() if "Parity" in line]
    assert said == [["| Mamba Parity", "0", "900"], ["| LSTM Parity", "0", "400"], ["| GRU Parity", "0", "700"]]


def test_rows_that_are_not_there_or_of_another_recipe_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"kind": ["probe"], "arch": ["lstm"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(pl.StoreError, match=r"lacks the columns task, train_seed.*isn't a run of this recipe"):
        publish.main([str(tmp_path / "other.parquet")])
    with pytest.raises(pl.StoreError, match=r"no rows at .*none\.parquet"):
        publish.main([str(tmp_path / "none.parquet")])


def test_the_tables_of_the_page_are_those_of_its_rows() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = (docs / "paper.md").read_text(encoding="utf-8")
    rows = pd.read_parquet(docs / "data" / "paper" / "formal.parquet")
    assert publish.filled(page, rows) == page
    for name in FIGURES:
        assert f"figures/paper/{name}.svg" in page
        assert (docs / "figures" / "paper" / f"{name}.svg").is_file()


def test_the_controls_of_a_probe_stand_beside_it() -> None:
    rows = []
    for layer, selectivity, compression in ((-1, 0.0, 1.0), (0, 0.25, 1.5)):
        about = {**cell("lstm", "dyck"), "kind": "probe", "span": "all", "label": "top", "layer": layer}
        rows.append({**about, "control": "task", "accuracy": 0.9, "majority": 0.4, "position": 0.45, "last_w": 0.8,
                     "selectivity": selectivity, "compression": compression})  # fmt: skip
        rows.append({**about, "control": "control_task", "accuracy": 0.6})
    table = tables.controls_table(pd.DataFrame(rows))
    assert "| LSTM Dyck: top | 0.40 | 0.45 | 0.80 | 0.00 0.25 | 1.0 1.5 |" in table


def test_a_model_is_judged_beyond_the_twentieth_position() -> None:
    rows = behaviour("lstm", "parity", *PERFECT) + behaviour("gru", "parity", 0.97, 0.8, 0.8, 0.8, 0.8)
    claim = "2. LSTM and GRU generalise perfectly on Parity"
    assert "(not learned)" not in str(found(rows, claim).ours)
    late = [{**row, "span": "late", "accuracy": 0.94} for row in rows if row["arch"] == "gru" and row["length"] == 40]
    assert "GRU (not learned) 80.0%" in str(found(rows + late, claim).ours)
    cut = ablated("gru", "parity", "direction", [0.5, 0.5, 0.5])
    assert found(rows + cut, "6. Ablating the best probe direction").agrees is True
    assert found(rows + late + cut, "6. Ablating the best probe direction").ours == "not run"


def test_publishing_says_in_a_sentence_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(pl.InputError, match="no table to write"):
        publish.main([str(docs / "data/paper/formal.parquet"), "--page", str(page)])
    with pytest.raises(pl.InputError, match="several recipes"):
        publish.main([str(docs / f"data/paper/{name}.parquet") for name in ("code", "pretrained")])
    with pytest.raises(SystemExit) as end:
        exit_with_message(lambda: publish.main([str(tmp_path / "none.parquet")]))
    assert end.value.code == 2
    assert "no rows at" in capsys.readouterr().err


def test_a_report_says_how_it_is_made_again_and_what_is_missing(tmp_path: Path) -> None:
    config = formal.Config(out="x", archs=("gru",), seeds=(0, 1), length=12)
    assert (
        command_of("paper-formal", config)
        == "probelens run paper-formal --set archs=gru --set seeds=0,1 --set length=12"
    )
    assert command_of("paper-formal", formal.Config(out="x")) == "probelens run paper-formal"
    record = RunRecord("paper-formal", {}, ["ab", "cd"])
    assert unfinished(record, tmp_path)["Not finished"].startswith("2 of 2 cells")

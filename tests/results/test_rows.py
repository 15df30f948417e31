"""Results that are tables: declared columns are those of real calls, rows are found, and printing says the finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import api_pages
import pandas as pd
import primitives
import pytest
import torch
import zoo

import probelens as pl
from probelens.hooks.verify import VerifyReport
from probelens.models.evaluation import EvalResult
from probelens.numerics.stats import ratio_of_means
from probelens.probing.intervals import accuracy_interval, r2_interval
from probelens.results.columns import Column
from probelens.results.result import Result
from probelens.results.rows import Rows
from probelens.results.sentences import place, positions, sites
from probelens.results.types import fits

LENGTH = 8


class Calls:
    """Real calls of every primitive, with all that adds columns."""

    def __init__(self) -> None:
        self.task = pl.tasks.Parity(bos=True)
        config = pl.models.FormalConfig.for_task("gru", self.task, n_layers=3, d_model=8, hidden_size=8)
        self.model, self.other = (pl.wrap(pl.models.build(config)) for _ in range(2))
        self.batch = self.task.sample(30, length=LENGTH, seed=1)
        self.acts = pl.collect(self.model, self.batch, "layers")
        self.site = self.acts.names[1]
        self.space = {self.site: pl.subspaces.pca(self.acts[self.site][self.batch.mask], 2)}
        self.pairs = self.task.pairs(6, length=LENGTH)

    def tables(self) -> Iterator[tuple[type[Result], pd.DataFrame | list[dict[str, Any]]]]:
        task, model, batch = self.task, self.model, self.batch
        labels = {"state": batch.labels["state"], "number": torch.rand(batch.tokens.shape)}
        untrained = pl.collect(self.other, batch, "layers")
        yield pl.ProbeResult, pl.probe(
            self.acts, labels, batch.groups, mask=batch.mask, tokens=batch.tokens, untrained=untrained,
            control_task=True, mdl=True,
        ).rows  # fmt: skip
        yield pl.AblationResult, pl.ablate(model, batch, self.space, label="state", controls=2).rows
        loss = pl.ablate(model, batch, self.space, "next_token_loss", False, 2, label="state")
        yield pl.AblationResult, loss.rows
        yield pl.DoseResult, pl.dose_response(model, batch, self.space, label="state", controls=2).rows
        yield (
            pl.LengthTransfer,
            pl.length_transfer(
                model, task, self.space, (LENGTH, LENGTH + 2), trained_length=LENGTH, n=6, controls=2
            ).rows,
        )
        parts = task.splits({"fit": 40, "held": 30}, length=LENGTH)
        for method in ("leace", "inlp"):
            yield pl.ErasureResult, pl.erase(
                model, parts["fit"], parts["held"], label="state", method=method, sites=[self.site], controls=1
            ).rows  # fmt: skip
        yield pl.ComponentResult, pl.ablate_component(model, batch, "resid_post", ("zero", "resample")).rows
        mamba = pl.wrap(zoo.build("mamba"))
        tokens = zoo.tokens(4, 6)
        some = pl.Batch(tokens, {"state": tokens % 2})
        yield pl.ComponentResult, pl.ablate_convolution(mamba, some, draws=2).rows
        found = pl.patch(model, self.pairs)
        yield pl.PatchResult, dataclasses.replace(found, correct=torch.ones(6).bool()).to_dataframe()
        swapped = pl.interchange(model, self.pairs, self.space, same_pairs=self.pairs, controls=2)
        yield pl.InterchangeResult, swapped.rows
        gru = pl.wrap(zoo.build("gru"))
        own = primitives.own_pairs(gru)
        yield pl.DASResult, pl.das(
            gru, own, "blocks.0.rnn.hook_h", None, 1, same_pairs=own, other_site="hook_embed", controls=2, steps=2, untrained=gru,
        ).rows  # fmt: skip
        yield pl.PatchSitesResult, pl.patch_sites(model, self.pairs, correct_only=False, n_boot=20).rows
        yield VerifyReport, model.verify().rows
        yield (EvalResult, pl.training.evaluate(model, task, (LENGTH, 24), n=4, trained_length=LENGTH).to_dataframe())
        yield pl.Profile, pl.profile(
            model, task, length=LENGTH, n_probe=30, n_ablate=20, n_pairs=4, controls=2, untrained=self.other,
            control_task=True, mdl=True,
        ).to_dataframe()  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> dict[type[Result], list[dict[str, Any]]]:
    """Rows by class, a table's without the holes that pandas fills with NaN."""
    found: dict[type[Result], list[dict[str, Any]]] = {}
    for cls, rows in Calls().tables():
        if isinstance(rows, pd.DataFrame):
            declared = [c.name for c in cls.columns]
            assert list(rows.columns) == [name for name in declared if name in rows.columns], cls
            rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
        found.setdefault(cls, []).extend(rows)
    return found


CLASSES = list(api_pages.results().values())
# What the small models above can't show.
UNSEEN = {
    pl.Profile: {"r2", "mse", "alpha"}  # a profile's labels are classes
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_rows_of_real_calls_have_exactly_the_declared_columns(cls: type[Result], tables: Any) -> None:
    declared = {column.name: column for column in cls.columns}
    assert len(declared) == len(cls.columns), "a column is declared twice"
    seen: set[str] = set()
    for row in tables[cls]:
        assert set(row) <= set(declared)
        seen |= set(row)
        everywhere = {name for name, column in declared.items() if not column.on}
        assert everywhere <= set(row)
        for name, value in row.items():
            column = declared[name]
            assert fits(value, column.type) or (value is None and column.on), (name, value, column)
    assert set(declared) - seen == UNSEEN.get(cls, set())


def test_every_class_of_rows_declares_its_columns() -> None:
    below = [Rows]
    for cls in below:
        below += cls.__subclasses__()
    library = {cls for cls in below[1:] if cls.__module__.startswith("probelens.")}
    assert library <= set(CLASSES)
    assert len(library) >= 10
    for cls in CLASSES:
        for column in cls.columns:
            assert f"        {column}" in (cls.__doc__ or "").splitlines(), "the docstring lists each column"
            assert column.meaning.endswith(".")


@dataclasses.dataclass(frozen=True, eq=False)
class Weather(Rows):
    """Made by hand.

    Args:
        rows: Days.
    """

    columns = (Column("day", int, "Day.", "days"), Column("rain", float, "Rain.", "mm"))

    rows: list[dict[str, Any]]


def test_a_table_has_declared_columns_in_their_order_then_others_and_no_empty_ones() -> None:
    rows = [{"wind": 3.0, "day": 1}, {"day": 2, "sun": True}]
    assert list(Weather(rows).to_dataframe().columns) == ["day", "wind", "sun"]
    assert list(Weather([{"rain": 1.0, **row} for row in rows]).to_dataframe().columns)[:2] == ["day", "rain"]
    assert "day (an integer, days): Day." in (Weather.__doc__ or "")


def test_a_row_is_found_by_its_values_and_errors_say_what_there_is() -> None:
    rows = [{"day": 1, "rain": 0.0}, {"day": 2, "rain": 0.0}]
    assert Weather(rows).find(day=2) is rows[1]
    with pytest.raises(pl.InputError, match="no column 'dai'. Nearest: .'day'"):
        Weather(rows).find(dai=1)
    with pytest.raises(pl.InputError, match=r"no row has day=3. There are day: \[1, 2\]"):
        Weather(rows).find(day=3)
    with pytest.raises(pl.InputError, match="2 rows have rain=0.0. Add a column that tells them apart, such as day"):
        Weather(rows).find(rain=0.0)


def ablation(metric: str = "accuracy", drops: dict[str, float] | None = None) -> pl.AblationResult:
    """One site whose subspace costs 40 points; random ones cost 1 point at equal rank and 69 at equal variance."""
    drops = drops or {"target": 0.4, "random": 0.01, "random_matched": 0.69, "pca": 0.2}
    rows = [
        {"site": "blocks.3.hook_resid_post", "layer": 3, "label": "state", "condition": kind, "draw": 0, "rank": 2, "alpha": 1.0,
         "chance": 0.5 if metric == "accuracy" else None, "value": 0.9 - drop, "clean": 0.9, "drop": drop,
         "lo": drop - 0.02, "hi": drop + 0.03, "damage": drop / 0.4}
        for kind, drop in drops.items()
    ]  # fmt: skip
    rows[0] |= {
        "effect": -0.725, "effect_lo": -0.8, "effect_hi": -0.7, "effect_against": "random_matched", "effect_p": 1.0,
        "probe_accuracy": 0.98, "refit_accuracy": 0.95, "refit_mlp_accuracy": None, "baseline": 0.5,
        "verdict": "inconclusive",
    }  # fmt: skip
    empty = torch.zeros(4)
    return pl.AblationResult(rows, torch.zeros(4, 4), empty, torch.zeros(4, 4), empty, "state", "state", metric)


def test_an_ablation_says_what_it_cost_beside_its_controls_and_the_verdict() -> None:
    assert repr(ablation()).splitlines() == [
        "AblationResult: 'state' removed at 1 site, on 4 sequences. Without ablation accuracy is 90.0 %, chance 50.0 %.",
        "No site costs more than its control; the largest is at layer 3 (blocks.3.hook_resid_post), rank 2: 40 points [38, 43]. "
        "Effect beyond random subspaces at equal variance: -0.72 [-0.80, -0.70], as a share of the accuracy above chance, "
        "p = 1 (the smallest possible with 1 draw is 1/2).",
        "There random subspaces cost 1 point at equal rank and 69 at equal variance, the top principal components 20.",
        "There a linear probe reads 98.0 % before, refitted 95.0 %; baseline 50.0 %.",
        "Verdict: inconclusive at layer 3 (still read by a refitted linear probe: 95.0 %, baseline 50.0 %).",
    ]


def test_an_ablation_names_the_probe_that_decides_and_a_cost_that_may_be_nothing() -> None:
    result = ablation(drops={"target": 0.01, "random_matched": 0.0})
    result.rows[0] |= {"refit_accuracy": 0.5, "refit_mlp_accuracy": 0.49, "refit_position_accuracy": 0.8}
    cost, _, read, verdict = result.findings()[1:]
    assert "rank 2: 1 point [-1, 4], which can't be told from 0. Effect" in cost
    assert read.endswith(
        "refitted 50.0 %, a refitted MLP 49.0 %, linear probes refitted at each position 80.0 %; baseline 50.0 %."
    )
    assert verdict == (
        "Verdict: inconclusive at layer 3 (still read by linear probes refitted at each position: 80.0 %, baseline 50.0 %)."
    )


def test_a_loss_costs_where_it_rises() -> None:
    worse = ablation("next_token_loss", {"target": -0.5, "random": -0.1}).findings()[1:3]
    assert worse[0].startswith("Costs most at layer 3 (blocks.3.hook_resid_post), rank 2: 0.5 nats [0.47, 0.52].")
    assert worse[1] == "There random subspaces cost 0.1 nats at equal rank."
    better = ablation("next_token_loss", {"target": 0.5})
    assert better.findings()[1].startswith("No site costs anything; the largest is at layer 3")


def test_a_probe_says_where_it_reads_and_how_far_above_its_baselines() -> None:
    row = {"layer": 0, "label": "state", "seed": 0, "control": "task", "kind": "classification", "lo": 0.5, "hi": 1.0,
           "n_test": 1200, "majority": 0.25, "last_w": 0.6}  # fmt: skip
    rows = [{"site": "a", "accuracy": 0.5, **row}, {"site": "b", "accuracy": 0.9, **row}]
    assert repr(pl.ProbeResult(rows, {}, {}, {}, {}, {}, {})).splitlines() == [
        "ProbeResult: 'state' probed at 2 sites, 1 seed.",
        "state: highest accuracy 90.0 % [50, 100] at layer 0 (b), on 1,200 test positions.",
        "  30 points above the best baseline. Baselines: majority class 25.0 % and last tokens 60.0 %.",
    ]


@pytest.mark.parametrize(
    ("majority", "r2", "said"),
    [(0.9004, None, "At the best baseline. Baseline: majority class 90.0 %."),
     (0.952, None, "5.2 points below the best baseline. Baseline: majority class 95.2 %."),
     (0.5, 0.25, "0.25 below the best baseline. Baseline: majority class 0.50.")],
)  # fmt: skip
def test_a_probe_says_in_words_that_it_is_at_or_below_its_one_baseline(
    majority: float, r2: float | None, said: str
) -> None:
    score = {"accuracy": 0.9} if r2 is None else {"r2": r2}
    row = {"site": "a", "layer": 0, "label": "state", "seed": 0, "control": "task", "lo": 0.5, "hi": 1.0, "n_test": 12}
    found = pl.ProbeResult([{**row, **score, "majority": majority}], {}, {}, {}, {}, {}, {}).findings()
    assert found[-1] == f"  {said}"


def costs(**more: Any) -> dict[str, Any]:
    """A row of an ablation of accuracy, from 90 % where chance is 50 %."""
    row = {"layer": 1, "condition": "target", "chance": 0.5, "clean": 0.9, "alpha": 1.0, **more}
    return {"lo": row["drop"] - 0.02, "hi": row["drop"] + 0.02, **row}


def test_a_dose_response_says_what_all_of_a_subspace_costs_and_how_little_of_it_is_enough() -> None:
    rows = [
        costs(site="a", rank=rank, full_rank=4, drop=drop, condition=kind)
        for rank, some in {1: (0.1, 0.0), 2: (0.38, 0.0), 4: (0.4, 0.2)}.items()
        for kind, drop in zip(("target", "random_matched"), some, strict=True)
    ]
    assert pl.DoseResult(rows, torch.zeros(3), "state").findings()[1:] == [
        "layer 1 (a): rank 4 of 4 costs 40 points [38, 42], and rank 2 at least 90 % of that. There random subspaces cost 20 "
        "points at equal variance."
    ]


def test_no_drop_is_told_without_the_variance_on_what_was_removed() -> None:
    about = {"rank": 2, "directions": "class_means", "variance": 0.391, "between_variance": 0.92, "verdict": "erased"}
    row = costs(site="a", drop=0.4, full_rank=2, **about)
    said = "class means with 39.1 % of the variance and 92.0 % of that between classes"
    empty = torch.zeros(1, 3)
    assert f"rank 2, {said}: 40 points" in str(pl.AblationResult([row], empty, empty[0], empty, empty[0], "state"))
    assert f"layer 1 (a), {said}: rank 2 of 2 costs 40 points" in str(pl.DoseResult([row], empty[0], "state"))
    spans = [{**row, "length": 40, "span": "all", "damage": 1.0, "floor": False, "effect": None}]
    assert f"Damage at layer 1 (a), {said}, 1 being all" in str(pl.LengthTransfer(spans, "state", "state", 40))
    one = {**row, "between_variance": None}
    assert "39.1 % of the variance: 40 points" in str(
        pl.AblationResult([one], empty, empty[0], empty, empty[0], "state")
    )


def test_length_transfer_says_the_damage_up_to_the_trained_length_and_beyond() -> None:
    rows = [
        costs(site="a", length=n, span=span, drop=0.2, damage=0.5, effect=0.25, floor=n == 80 and span == "beyond")
        for n in (40, 80)
        for span in ("all", "seen", *(["beyond"] if n == 80 else []))
    ]
    assert pl.LengthTransfer(rows, "state", "state", 40).findings()[1:] == [
        "  length 40: 0.50 (0.25 more than random subspaces) up to position 40",
        "  length 80: 0.50 (0.25 more than random subspaces) up to position 40; beyond, the model is near chance, so damage "
        "can't be measured",
    ]


def test_components_are_named_by_what_they_cost_and_counted_where_that_is_more_than_nothing() -> None:
    rows = [costs(site=site, head=None, how="resample", drop=drop) for site, drop in (("a", 0.01), ("b", 0.3))]
    assert pl.ComponentResult(rows, torch.zeros(2, 3), torch.zeros(3)).findings()[1:] == [
        "resample: 1 of 2 cost more than nothing. Most: b 30 points [28, 32] and a 1 point [-1, 3]."
    ]


def test_an_erasure_says_first_whether_a_fresh_probe_is_at_chance() -> None:
    rows = [
        {"site": site, "layer": 1, "rank": 1, "n_fit": 2000, "refit_accuracy": 0.5 + over, "baseline": 0.5, "at_chance": over == 0,
         "reached": f"{over:.3f} above baseline"}
        for site, over in (("a", 0.0), ("b", 0.1))
    ]  # fmt: skip
    found = pl.ErasureResult(rows, {}, ablation(), "leace", "state").findings()
    assert found[:2] == [
        "'state' erased by LEACE, rank 1, fitted on 2,000 sequences.",
        "A fresh linear probe is at chance at 1 of 2 sites; furthest above it at layer 1 (b): 0.100 above baseline.",
    ]
    assert found[2:] == ablation().findings()


@pytest.mark.parametrize("holds", [True, False])
def test_sites_of_the_final_layer_say_what_is_forced_and_the_recovery_of_the_rest(holds: bool) -> None:
    row = {"description": "text", "expected": None, "lo": None, "hi": None, "holds": None}
    rows = [
        {**row, "site": "A", "recovery": 1.0 if holds else 0.9, "expected": 1.0, "holds": holds},
        {**row, "site": "D", "recovery": 0.25, "lo": 0.2, "hi": 0.3},
        {**row, "site": "H", "recovery": None},
    ]
    some = torch.zeros(3, 5)
    found = pl.PatchSitesResult(rows, some, some, some, some, some, some, some).findings()
    assert found[1:] == [
        "The values that the architecture fixes came out as they must (A)."
        if holds
        else "Of the values that the architecture fixes, A is 0.900, not 1.",
        "D recovers 0.25 [0.20, 0.30]: text",
        "Not measured: H; the column why has the reasons.",
    ]


def test_an_evaluation_says_the_accuracy_up_to_the_trained_length_and_beyond() -> None:
    rows = [
        {"label": "state", "length": 80, "span": span, "accuracy": value, "lo": value - 0.1, "hi": value, "n_sequences": 8}
        for span, value in (("all", 0.75), ("trained", 1.0), ("beyond", 0.5))
    ]  # fmt: skip
    assert repr(EvalResult("parity", 40, rows)).splitlines() == [
        "EvalResult: accuracy on parity, 8 sequences of each length, trained at 40:",
        "  state, length 80: 100.0 % [90, 100] up to the trained length, 50.0 % [40, 50] beyond it",
    ]


def patched(correct: bool = True) -> pl.PatchResult:
    values = torch.tensor([[[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]])
    return pl.PatchResult(
        values, torch.ones(2), -torch.ones(2), torch.full((2,), correct), ["hook_embed"], [-1], ["0", "1", "2"]
    )


def test_patching_says_where_the_answer_comes_back() -> None:
    assert repr(patched()).splitlines()[2:] == [
        "Most is recovered at the embedding (hook_embed), position 2: 1.00 [1.00, 1.00] of the gap.",
        "Half of the gap or more:",
        "  the embedding (hook_embed), positions 1 and 2",
    ]
    assert (
        repr(patched())
        .splitlines()[0]
        .endswith("1 site × 3 positions, on 2 pairs, all answered correctly by both runs.")
    )
    assert "No pair is answered correctly by both runs" in repr(patched(correct=False))


def test_patching_without_a_gap_or_with_little_recovery_or_many_sites_is_said_in_sentences() -> None:
    same = dataclasses.replace(patched(), corrupted=torch.ones(2))
    assert same.findings()[1:] == [
        "logit_diff is the same on clean and corrupted runs, 1, so there is no gap to recover."
    ]
    unknown = dataclasses.replace(patched(), clean=torch.tensor([1.0, torch.nan]))
    assert unknown.findings()[1:] == ["logit_diff is NaN for some pairs, so there is no gap to recover."]
    little = dataclasses.replace(patched(), values=-torch.ones(1, 3, 2))
    assert little.findings()[-1] == "Half of the gap or more: nowhere."
    joint = dataclasses.replace(
        patched(), sites=["hook_embed + blocks.0.hook_resid_post + blocks.1.hook_resid_post"], joint=True
    )
    assert joint.findings()[0].startswith("patch of logit_diff (denoise) at 3 sites together × 3 positions")
    assert joint.findings()[-1] == "  all 3 sites together, positions 1 and 2"


def test_places_and_positions_are_named_as_the_concepts_say() -> None:
    named = {("blocks.1.hook_resid_pre", 0): "layer 0 (blocks.1.hook_resid_pre)",
             ("blocks.0.hook_resid_pre", -1): "the embedding (blocks.0.hook_resid_pre)",
             ("blocks.1.hook_resid_post", 1): "layer 1 (blocks.1.hook_resid_post)",
             ("encoder.hook_embed", -1): "the embedding (encoder.hook_embed)",
             ("encoder.0.hook_out", -1): "encoder.0.hook_out (before the blocks)",
             ("ln_final.hook_out", 2): "ln_final.hook_out"}  # fmt: skip
    assert [place({"site": site, "layer": layer}) for site, layer in named] == list(named.values())
    said = [["3"], ["1", "2", "3", "4", "7", "8"], ["all"], ["per example"]]
    assert [positions(found) for found in said] == [
        "position 3", "positions 1 to 4, 7 and 8", "all positions", "one position of each pair",
    ]  # fmt: skip


def test_an_interchange_says_layers_and_positions_in_words() -> None:
    row = {"condition": "target", "rank": 1, "iia": 1.0, "iia_lo": 0.9, "iia_hi": 1.0}
    each = [
        {**row, "site": f"s{layer}", "layer": layer, "pos": pos, "verdict": word}
        for layer, pos, word in [
            *((layer, p, "used") for layer in (-1, 0, 1) for p in "1234"),
            (2, "6", "not here"),
            (3, "7", "not here"),
        ]
    ]
    whole = [{**row, "site": "s", "layer": layer, "pos": "all", "verdict": "used"} for layer in (-1, 0, 1)]
    some = torch.ones(1, 3, dtype=torch.bool)
    said = [pl.InterchangeResult(rows, some, some[0]).findings()[-1] for rows in (each, whole)]
    assert said == [
        "Verdict: used at the embedding and layers 0 and 1, positions 1 to 4; not here at layer 2, position 6, and at layer 3, position 7.",
        "Verdict: used at the embedding and layers 0 and 1.",
    ]


def test_sequences_and_pairs_print_in_a_line() -> None:
    task = pl.tasks.Parity(bos=True)
    assert repr(task.sample(3, length=5)) == "Batch(3 sequences × 6 positions, labels: state)"
    assert repr(task.pairs(2, length=5)) == "PatchPairs(2 pairs × 6 positions, label: state)"


def test_a_result_without_a_table_or_a_figure_says_so() -> None:
    with pytest.raises(pl.ProbelensError, match="Weather has no figure. Its fields: rows"):
        Weather([]).plot()
    with pytest.raises(pl.ProbelensError, match="Weather has no table"):
        Result.to_dataframe(Weather([]))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_result_of_a_table_says_its_finding(cls: type[Result]) -> None:
    assert cls.findings is not Result.findings
    assert cls.__repr__ is Result.__repr__


def test_printing_shows_at_most_twelve_lines_and_never_fails() -> None:
    rows = [{"name": f"point {i}", "ok": False, "problem": "dead"} for i in range(30)]
    lines = repr(VerifyReport(rows, "Model", 1e-5, [])).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "… and 20 lines more in .findings()"
    assert len(repr(VerifyReport(rows[:11], "Model", 1e-5, [])).splitlines()) == 12
    # Rows of a caller's own making, without what the sentences are about: its fields, as any other result.
    for bare in ([], [{"name": "x"}]):
        assert repr(EvalResult("parity", 40, bare)).startswith("EvalResult(task='parity'")


def test_a_profile_speaks_of_late_positions_only_where_there_are_some() -> None:
    probes = pl.ProbeResult([], {}, {}, {}, {}, {}, {})
    said = [
        pl.Profile(
            probes, {}, {}, {}, {"all": 0.9, "late": 0.8}, {}, {"task": "Parity", "bos": bos}, n, "RNNLM"
        ).findings()[0]
        for n, bos in ((20, True), (21, False), (21, True))
    ]
    assert [line.rpartition("own ")[2] for line in said] == [
        "accuracy 90.0 %.", "accuracy 90.0 %.", "accuracy 90.0 % (80.0 % after position 20).",
    ]  # fmt: skip


def test_intervals_of_shares_and_of_r2_stay_in_their_range_and_others_are_as_they_were() -> None:
    keep, groups = torch.ones(4, 6, dtype=torch.bool), torch.arange(4)
    right = torch.tensor([[1] * 6, [1] * 6, [1] * 6, [0] * 6]).bool()
    assert 0 < accuracy_interval(right, keep, groups)[0] < 0.75 < accuracy_interval(right, keep, groups)[1] < 1
    half = torch.rand(40, 6, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.2, 1, 40)[:, None]
    found = ratio_of_means(half.double().sum(1)[None], torch.full((1, 40), 6.0), n_draws=2000, seed=0)
    assert accuracy_interval(half, torch.ones(40, 6) > 0, torch.arange(40)) == pytest.approx(
        (float(found.low), float(found.high)), abs=0.015
    )
    truth = torch.arange(24).double() % 5
    guess = truth + (torch.arange(24) < 6) * 2.0
    r2, low, high = r2_interval(guess, truth, keep, groups, 200, 0)
    assert low < r2 < high == 1


def test_sites_of_one_layer_are_told_apart_by_name_in_findings() -> None:
    rows = [{"site": f"blocks.{i}.hook_{name}", "layer": i} for i in (0, 1) for name in ("mixer_out", "resid_post")]
    assert sites(rows[:1], rows[:3]) == "blocks.0.hook_mixer_out"
    assert sites(rows[:2], rows[:3]) == "blocks.0.hook_mixer_out and blocks.0.hook_resid_post"
    assert sites(rows[:1] + rows[2:3], rows[:1] + rows[2:3]) == "layers 0 and 1"
    assert sites(rows[1:3], rows[:3]) == "layer 1 and blocks.0.hook_resid_post"
    assert sites([{"site": "ln_final.hook_out", "layer": None}], rows) == "ln_final.hook_out"


def test_modules_before_the_blocks_are_not_called_the_embedding() -> None:
    class Filtered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.rnn = torch.nn.Linear(3, 4), torch.nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(self.filter(x).relu())[0]

    x = torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0))
    model = pl.wrap(Filtered())
    label = (x[..., 0] > 0).long()
    result = pl.probe(pl.collect(model, x, ["filter.hook_out", "blocks.0.hook_resid_post"]), label)
    assert "embedding" not in str(result)
    assert not any("embedding" in row for row in result.rows)
    only = pl.probe(pl.collect(model, x, ["filter.hook_out"]), label)
    assert "at filter.hook_out (before the blocks)" in str(only)
    result = pl.probe(pl.collect(model, x, ["filter.hook_out", "blocks.0.hook_resid_pre"]), label)
    assert all(row["embedding"] == result.row("blocks.0.hook_resid_pre")["accuracy"] for row in result.rows)


@pytest.mark.parametrize("metric", ["kl", "mse", "next_token_loss", "r2"])
def test_the_effect_in_findings_has_the_sign_of_the_cost(metric: str) -> None:
    sign = 1 if metric == "r2" else -1
    result = ablation(metric, {"target": 0.4 * sign, "random": 0.1 * sign})
    result.rows[0] |= {
        "effect": 0.3 * sign, "effect_lo": min(0.2 * sign, 0.4 * sign), "effect_hi": max(0.2 * sign, 0.4 * sign),
        "effect_against": "random", "effect_p": 0.01, "effect_p_adjusted": 0.01, "chance": None,
    }  # fmt: skip
    assert "Effect beyond random subspaces at equal rank: 0.30 [0.20, 0.40]" in str(result)


def test_a_model_below_chance_is_asked_for_its_labels() -> None:
    result = ablation()
    result.rows[0] |= {"verdict": "floor", "clean": 0.05, "chance": 0.5}
    assert "are the labels those that it answers with?" in str(result)
    result.rows[0] |= {"clean": 0.45}
    assert "near chance without any ablation" in str(result)

"""The four answers of a profile: what each rests on, and that planted models get the right ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import probelens as pl
from probelens.profiling import answers


def patch_result(values: list[list[float]], **more: Any) -> pl.PatchResult:
    """Recoveries by [site][pos], the same for every one of 30 pairs: clean 1, corrupted 0."""
    n = 30
    each = torch.tensor(values)[..., None].expand(-1, -1, n).clone()
    sites, positions = [f"s{i}" for i in range(len(values))], [str(j) for j in range(len(values[0]))]
    return pl.PatchResult(
        each,
        torch.ones(n),
        torch.zeros(n),
        torch.ones(n, dtype=torch.bool),
        sites,
        list(range(len(sites))),
        positions,
        **more,
    )


def test_readable_asks_for_more_than_the_best_guess_and_says_when_the_interval_does_not_tell() -> None:
    row = {"majority": 0.3, "position": 0.5, "last_w": None}
    ask = lambda lo, hi, baseline=0.2: answers.readable({**row, "lo": lo, "hi": hi}, baseline)  # noqa: E731
    assert ask(0.53, 0.7) == {"readable": "yes", "baseline": 0.5}
    assert ask(0.4, 0.52)["readable"] == "no"
    assert ask(0.5, 0.6)["readable"] == "can't tell"
    # Near 1 a quarter of what is left is enough.
    assert answers.readable({**row, "position": 0.96, "lo": 0.98, "hi": 1.0}, 0.2)["readable"] == "yes"


def test_what_the_last_tokens_tell_is_read_by_a_probe_that_is_as_good() -> None:
    row = {"majority": 0.5, "position": 0.5, "last_w": 1.0}
    ask = lambda lo, hi, tokens=1.0: answers.readable({**row, "last_w": tokens, "lo": lo, "hi": hi}, 0.5)["readable"]  # noqa: E731
    assert [ask(0.98, 1.0), ask(0.96, 1.0, 0.967)] == ["yes", "yes"]
    assert ask(0.78, 0.84) == "no", "the tokens tell more than this probe reads"
    assert ask(0.78, 0.84, 0.85) == "no"
    assert ask(0.48, 1.0) == "can't tell"


def test_sufficiency_leaves_out_cells_that_are_one_by_construction() -> None:
    found = patch_result([[1.0, 0.2], [0.1, 0.9]], extra={answers.BY_CONSTRUCTION: [[0, 0]]})
    first, second = (answers.patched(found, site) for site in ("s0", "s1"))
    assert (first["sufficient"], first["recovery_pos"], round(first["recovery"], 3)) == ("no", "1", 0.2)
    assert (second["sufficient"], second["recovery_pos"], round(second["recovery"], 3)) == ("yes", "1", 0.9)
    assert answers.patched(found, "elsewhere")["sufficient"] is None
    nothing = patch_result([[1.0]], extra={answers.BY_CONSTRUCTION: [[0, 0]]})
    assert answers.patched(nothing, "s0")["sufficient"] == "can't tell"


@pytest.mark.parametrize(
    ("word", "read", "used"),
    [
        ("used", "yes", "yes"), ("used", "no", "can't tell"), ("used", "can't tell", "can't tell"), ("illusory", "yes", "no"),
        ("used elsewhere", "yes", "no"), ("not here", "yes", "no"), ("spread", "yes", "can't tell"),
        ("underpowered", "yes", "can't tell"), ("unreadable", "no", "can't tell"),
    ],
)  # fmt: skip
def test_used_is_said_only_of_what_can_be_read(word: str, read: str, used: str) -> None:
    rows = [
        {"site": "s", "condition": "target", "verdict": word, "iia": 0.9, "iia_lo": 0.8, "iia_hi": 1.0},
        {"site": "s", "condition": "complement", "iia": 0.1},
    ]
    found = answers.interchanged(rows, "s", read)
    assert (found["used"], found["iia_complement"]) == (used, 0.1)
    assert answers.interchanged(rows, "other", read)["used"] is None


def test_needed_is_said_only_of_what_can_be_read() -> None:
    ask = lambda word, read: answers.needed({"needed": word}, None, read)["needed"]  # noqa: E731
    assert [ask("yes", read) for read in ("yes", "no", "can't tell")] == ["yes", "can't tell", "can't tell"]
    assert [ask(word, "no") for word in ("no", "can't tell")] == ["no", "can't tell"]
    removed = {"needed": "no", "verdict": "erased"}
    found = [answers.needed(removed, None, read).get("verdict", "erased") for read in ("yes", "no", "can't tell")]
    assert found == ["erased", "absent", "erased"]
    beside = {"drop": 0.1, "refit_accuracy": 0.9}
    assert answers.needed(None, beside, "yes") == {"needed": None, "filter_drop": 0.1, "filter_refit_accuracy": 0.9}


def test_shares_of_variance_side_by_side_are_of_the_same_rows(parity: SimpleNamespace) -> None:
    found = parity.profile
    filters = {row["layer"]: row["variance"] for row in found.filters["state"].targets()}
    means = {row["layer"]: row["variance"] for row in found.ablations["state"].targets()}
    assert parity.table["filter_variance"].to_dict() == pytest.approx(filters)
    assert parity.table["variance"].to_dict() == pytest.approx(means)
    fitted = {row["layer"]: row["filter_variance"] for row in found.probes.rows if row["control"] == "task"}
    assert fitted != pytest.approx(filters), "the probe's own rows are others"


@pytest.fixture(scope="module")
def parity() -> SimpleNamespace:
    """Two tokens; one block adds up to now, mod 2, in the first feature; the answer is read from there."""

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            out[..., 0] = 1 - 2 * ((x[..., 1] > 0).cumsum(1) % 2)
            out[..., 1:] = x[..., 1:]
            return out

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gen = torch.Generator().manual_seed(0)
            codes = torch.randn(2, 8, generator=gen) * 0.1
            codes[:, 0], codes[:, 1] = 0.0, torch.tensor([-1.0, 1.0])
            self.embed = torch.nn.Embedding.from_pretrained(codes)
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), Sum(), torch.nn.Identity()])
            self.head = torch.nn.Linear(8, 2, bias=False)
            torch.nn.init.zeros_(self.head.weight)
            with torch.no_grad():
                self.head.weight[:, 0] = torch.tensor([1.0, -1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = pl.wrap(Net(), blocks="blocks", embed="embed", unembed="head")
    found = pl.profile(
        model, pl.tasks.Parity(), length=10, n_probe=150, n_ablate=60, n_pairs=60, mlp=False, controls=20
    )
    return SimpleNamespace(profile=found, table=found.answers().set_index("layer"))


def test_a_planted_parity_is_readable_and_used_from_the_block_that_computes_it(parity: SimpleNamespace) -> None:
    table = parity.table
    assert list(table["readable"]) == ["no", "no", "yes", "yes"]
    assert list(table["used"])[2:] == ["yes", "yes"]
    assert "yes" not in list(table["used"])[:2]
    assert (table["iia"].loc[1], table["iia_complement"].loc[1]) == (1.0, 0.0)
    assert table["drop"].loc[1] > 0.4
    # The last block's output at other positions than the one that is read reaches no answer: fixed in advance.
    assert table["sufficient"].loc[2] == "can't tell"
    assert table["recovery"].isna().loc[2]


def test_a_profile_says_each_answer_with_what_it_rests_on(parity: SimpleNamespace) -> None:
    line = parity.profile.findings()[1]
    assert line.startswith("state: readable at layers 1 and 2 (probe 100.0 % at ")
    assert "used at layers 1 and 2 (the answer follows the class means in 100.0 % of pairs" in line
    assert "all else swapped in 0.0 %" in line
    assert {"interchange", "filter"} <= {row["kind"] for row in parity.profile.measurements()}
    labels = {trace.name for trace in parity.profile.plot_needed("state").data}
    assert any("probe's own rows" in str(name) for name in labels)
    with pytest.raises(pl.InputError, match="nothing was ablated for 'sign'"):
        parity.profile.plot_needed("sign")

"""Profiles of batches and pairs of any inputs: planted truths, the parts against the primitives, and what is refused."""

from __future__ import annotations

from typing import Any

import anything
import pytest
import torch
from torch import Tensor

import probelens as pl
from probelens.profiling.material import material

SIZES = dict.fromkeys(("length", "n_probe", "n_ablate", "n_pairs"))


class Series(torch.nn.Module):
    """Features (example, pos, 6): the second block adds the first feature up, and the last sum is the answer."""

    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[..., :1].cumsum(1), x[..., 1:]], -1)

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self.classes = classes
        self.embed = torch.nn.Identity()
        self.blocks = torch.nn.ModuleList([torch.nn.Identity(), self.Sum(), torch.nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        last = x[:, -1, 0]
        return torch.stack([0 * last, last], -1) if self.classes else last


def series(classes: bool) -> tuple[pl.HookedModel, pl.Batch]:
    # From 1 on with equal chances of either sign, so that one step says little of the sum.
    x = torch.randn(160, 6, 6, generator=torch.Generator().manual_seed(0))
    run = x[..., 0].cumsum(1)
    labels = {"run": run, "end": run[:, -1]}
    if classes:
        labels = {"run": (run > 0).long(), "end": (run[:, -1] > 0).long()}
    return pl.wrap(Series(classes).eval(), blocks="blocks", embed="embed"), pl.Batch(x, labels)


def test_a_planted_sum_of_values_is_read_by_r2_and_needed_by_r2() -> None:
    model, batch = series(False)
    found = pl.profile(model, batch, labels=["run"], target="end", controls=20)
    table = found.answers().set_index("layer")
    assert list(table["readable"].loc[1:]) == ["yes", "yes"]
    assert (table["r2"].loc[1:] > 0.99).all()
    assert (table["r2"].loc[:0] < 0.5).all()
    assert table["needed"].loc[1] == "yes"
    assert table["drop"].loc[1] > 0.9
    assert found.behaviour == {"all": pytest.approx(1.0, abs=1e-5)}
    assert (found.metric, found.target) == ("r2", "end")
    # The end is the target, and the pairs are of it: no question about "run" is answered by them.
    assert list(found.patches) == ["end"]
    assert found.interchanges == {}
    assert found.indices["run"].verdict == "undetermined"
    said = str(found)
    assert "own R² 1.00" in said
    assert "run: readable at" in said
    assert "probe R² 1.00" in said


def test_what_has_no_meaning_for_values_is_not_asked_and_says_why() -> None:
    model, batch = series(False)
    found = pl.profile(model, batch, target="end", controls=2, refit=False, filters=False)
    assert found.interchanges == {}
    assert "values have no argmax" in found.unasked["end: used"]
    assert "Not asked: used, as answers are values" in str(found)
    assert found.patches["end"].metric == "value"
    # Before the sum each of six steps holds a part, and no one of them half of the variance.
    assert list(found.answers()["sufficient"]) == ["no", "no", "yes", "can't tell"]


def test_a_planted_sum_of_classes_is_used_at_the_block_that_makes_it(tmp_path: Any) -> None:
    model, batch = series(True)
    half = {"probe": batch[:100], "ablate": batch[100:]}
    found = pl.profile(model, half, labels=["end"], target="end", controls=20, mlp=False)
    pairs = found.patches["end"]
    assert len(pairs.clean) > 20
    same = pl.Profile.load(found.save(tmp_path / "profile.safetensors"))
    assert str(same) == str(found)
    assert "end: readable" in str(found)
    assert found.answers().set_index("layer")["sufficient"].loc[1] == "yes"


@pytest.mark.parametrize("name", anything.NAMES)
def test_a_batch_of_every_kind_of_input_has_the_numbers_of_the_primitives(name: str) -> None:
    case = anything.case(name)
    model, batch = case.model, case.batch
    options: dict[str, Any] = {"controls": 2, "refit": False, "filters": False, "batch_size": 9}
    found = pl.profile(model, batch, target=case.target, metric=case.metric, labels=[case.label], **options)
    made = material(model, batch, [case.label], case.target, case.metric, None, 0, SIZES)
    apart = set(made.fit.groups.tolist()) | set(made.held.groups.tolist())
    assert (len(made.fit) + len(made.held), len(apart)) == (60, 60)
    again = pl.ablate(
        model, made.held, found.probes, case.metric, label=case.label, target=case.target, controls=2, refit=False,
        batch_size=9,
    )  # fmt: skip
    drops = [row["drop"] for row in again.targets()]
    assert [row["drop"] for row in found.ablations[case.label].targets()] == drops
    assert any(abs(drop) > 1e-3 for drop in drops), "control: it costs something"
    assert found.behaviour["all"] == pytest.approx(again.targets()[0]["clean"], abs=1e-5)
    assert [len(result.values) for result in found.patches.values()] == [3]
    assert len(found.to_dataframe()) == 3


@pytest.mark.parametrize("name", ["series", "pictures", "packed"])
def test_pairs_of_a_batch_are_of_equal_lengths_and_differ_in_the_target(name: str) -> None:
    case = anything.case(name)
    made = material(case.model, case.batch, [case.label], case.target, case.metric, None, 0, SIZES)
    pairs, y, held = made.pairs[case.target], made.held.labels[case.target], made.held.examples
    assert len(pairs) > 5
    for i in range(len(pairs)):
        at = [next(j for j in range(len(held)) if torch.equal(x.main[i], held.main[j])) for x in pairs.sides]
        if name == "packed":
            lengths = made.held.inputs["lengths"][at]
            assert lengths[0] == lengths[1]
            read = int(pairs.read_pos[i])
            assert read < lengths[0]
            found = y[at, read]
        else:
            found = y[at]
        assert torch.equal(pairs.answers[i], found)
        assert found[0] != found[1]


def test_pairs_alone_are_profiled_where_their_answer_is_read() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([1 - 2 * ((x[..., 1:2] > 0).cumsum(1) % 2), x[..., 1:]], -1)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)) * 0.1
            codes[:, 0], codes[:, 1] = 0.0, torch.tensor([-1.0, 1.0])
            self.embed = torch.nn.Embedding.from_pretrained(codes)
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), Sum(), torch.nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return torch.stack([x[..., 0], -x[..., 0]], -1)

    model = pl.wrap(Net().eval(), blocks="blocks", embed="embed")
    found = pl.profile(model, pl.tasks.Parity().pairs(100, length=12, seed=0), controls=20, mlp=False)
    table = found.answers().set_index("layer")
    assert list(table["readable"].loc[1:]) == ["yes", "yes"]
    assert list(table["used"].loc[1:]) == ["yes", "yes"]
    assert "yes" not in list(table["used"].loc[:0])
    assert table["drop"].loc[1] > 0.4
    assert len(found.patches["state"].clean) == 100
    # Half of the pairs, none of them among those that the probe was fitted on.
    assert found.interchanges["state"].targets()[0]["n"] == 50


CLASSIFIER = anything.case("classifier")


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (CLASSIFIER.batch, {}, r"target is None, and the labels are \['kind', 'token', 'size'\]. Give target="),
        (CLASSIFIER.batch, {"target": "sort"}, "label 'sort' is not known"),
        (CLASSIFIER.batch, {"target": "kind", "labels": ["sort"]}, "label 'sort' is not known"),
        (CLASSIFIER.batch, {"target": "size"}, "needs one number as the answer"),
        (CLASSIFIER.batch, {"target": "kind", "metric": "r2"}, "holds classes"),
        (CLASSIFIER.batch, {"target": "kind", "n_probe": 20}, "n_probe=20 says how much of a task to draw"),
        (CLASSIFIER.batch[:6], {"target": "kind"}, "too few"),
        (CLASSIFIER.batch, {"target": "kind", "pairs": 3}, "pairs= is a int"),
        ({"input_ids": CLASSIFIER.batch.tokens}, {"target": "kind"}, r'must be \{"probe": Batch, "ablate": Batch\}'),
        ({"probe": CLASSIFIER.batch, "ablate": CLASSIFIER.batch}, {"target": "kind"}, "also among those"),
        (CLASSIFIER.batch.tokens, {}, "expected a task, a Batch or PatchPairs, got a Tensor"),
    ],
)
def test_what_makes_no_profile_is_refused_by_name(given: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(pl.InputError, match=text):
        pl.profile(CLASSIFIER.model, given, controls=1, refit=False, **options)


def test_pairs_that_give_no_example_a_label_are_refused_by_name() -> None:
    tokens = torch.arange(60).reshape(10, 6) % 20
    ask = lambda **more: pl.profile(CLASSIFIER.model, pl.PatchPairs(tokens, tokens + 1, **more))  # noqa: E731
    with pytest.raises(pl.InputError, match="these pairs have no answers"):
        ask()
    with pytest.raises(pl.InputError, match="answers of several tokens"):
        ask(answers=torch.tensor([[[0, 1], [1, 2]]]).expand(10, 2, 2))

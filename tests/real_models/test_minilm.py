"""A trained sentence encoder: what a sentence is about is read, taken out and put in, beside plain torch hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import probelens as pl
from real_models import fetch, minilm

pytestmark = pytest.mark.network

LAYERS = 6
STATES = [f"blocks.{i}.hook_resid_post" for i in range(LAYERS)]
CLS = 0


class Encoder(NamedTuple):
    model: pl.HookedModel  # answers with the likeness to "an animal" and to "a vehicle"
    bert: Any
    toward: Tensor  # (2, d_model)
    tokens: Tensor  # (sentence, token)
    about: Tensor  # 0 an animal, 1 a vehicle (sentence,)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    bert, tokenizer = fetch.or_skip(minilm.load)
    bert.requires_grad_(False)
    toward = minilm.anchors(bert, tokenizer)
    tokens = minilm.sentences(tokenizer)
    model = pl.wrap(bert, output=lambda out: minilm.meaning(out.last_hidden_state) @ toward.T)
    return Encoder(model, bert, toward, tokens, torch.arange(len(tokens)) // 2 % 2)


def hooked(encoder: Encoder, tokens: Tensor, layer: int, edit: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The likenesses with a plain torch hook on what one layer gives."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        states = out[0] if isinstance(out, tuple) else out
        changed = edit(states)
        return out if changed is None else (changed, *out[1:]) if isinstance(out, tuple) else changed

    handle = encoder.bert.encoder.layer[layer].register_forward_hook(hook)
    states = encoder.bert(tokens).last_hidden_state
    handle.remove()
    return minilm.meaning(states) @ encoder.toward.T


def states(encoder: Encoder, tokens: Tensor, layer: int) -> Tensor:
    seen: list[Tensor] = []
    hooked(encoder, tokens, layer, seen.append)
    return seen[0]


def test_it_knows_animals_from_vehicles(encoder: Encoder) -> None:
    likeness = minilm.meaning(encoder.bert(encoder.tokens).last_hidden_state) @ encoder.toward.T
    assert torch.equal(likeness.argmax(-1), encoder.about)
    assert torch.equal(encoder.model(encoder.tokens), likeness)


def test_every_hook_point_of_it_works(encoder: Encoder) -> None:
    report = encoder.model.verify(encoder.tokens[:1, :4])
    assert len(report.rows) == 79
    assert report.ok, report.failures()
    assert not any(row["note"] for row in report.rows)


def test_what_a_sentence_is_about_comes_to_its_first_token(encoder: Encoder) -> None:
    batch = pl.Batch(encoder.tokens, {"about": encoder.about}, groups=torch.arange(len(encoder.tokens)) // 2)
    acts = pl.collect(encoder.model, batch, ["hook_embed", STATES[0], STATES[-1]], pos=CLS)
    for layer in (0, LAYERS - 1):
        by_hook = states(encoder, encoder.tokens, layer)[:, CLS]
        torch.testing.assert_close(acts[STATES[layer]][:, 0], by_hook, atol=1e-5, rtol=0)
    result = pl.probe(acts, batch.labels, batch.groups)
    # The first token is [CLS] in every sentence, so its embedding can't tell.
    assert result.row("hook_embed")["balanced_accuracy"] == 0.5
    assert result.row(STATES[-1])["balanced_accuracy"] > 0.9


def test_the_direction_of_what_it_is_about_taken_out(encoder: Encoder) -> None:
    fit, held, layer = slice(0, 24), slice(24, 48), 3
    seen = states(encoder, encoder.tokens[fit], layer)
    space = pl.subspaces.mean_difference(seen.flatten(0, 1), encoder.about[fit].repeat_interleave(seen.shape[1]))
    batch = pl.Batch(encoder.tokens[held], {"about": encoder.about[held]})
    sign = 2 * encoder.about[held] - 1
    metric = lambda logits, tokens, mask, about: (2 * about - 1) * (logits[:, 1] - logits[:, 0])  # noqa: E731
    result = pl.ablate(encoder.model, batch, {STATES[layer]: space}, metric, refit=False, controls=6, kinds=["random"])
    (target,) = result.targets()
    clean = encoder.model(encoder.tokens[held])
    erased = hooked(encoder, encoder.tokens[held], layer, space.project_out)
    for found, likeness in ((result.clean, clean), (result.values[result.rows.index(target)], erased)):
        torch.testing.assert_close(found, sign * (likeness[:, 1] - likeness[:, 0]), atol=1e-5, rtol=0)
    others = [abs(row["drop"]) for row in result.rows if row["condition"] == "random"]
    assert target["drop"] > 5 * max(others) > 0


def test_an_animals_state_makes_it_about_an_animal(encoder: Encoder) -> None:
    first = encoder.tokens[::2]  # in the first frame alone
    animals, vehicles = first[::2], first[1::2]
    pairs = pl.PatchPairs(animals, vehicles, answers=torch.tensor([[0, 1]] * len(animals)))
    at, sites = [CLS, minilm.NOUN[0]], [STATES[0], STATES[-1]]
    result = pl.patch(encoder.model, pairs, sites, pos=at)
    assert result.correct.all()
    for row, layer in enumerate((0, LAYERS - 1)):
        source = states(encoder, animals, layer)
        for column, pos in enumerate(at):

            def put(x: Tensor, pos: int = pos, source: Tensor = source) -> Tensor:
                return torch.cat([x[:, :pos], source[:, pos : pos + 1], x[:, pos + 1 :]], 1)

            likeness = hooked(encoder, vehicles, layer, put)
            by_hand = likeness[:, 0] - likeness[:, 1]
            torch.testing.assert_close(result.values[row, column], by_hand, atol=1e-5, rtol=0)
    # Of the first layer the noun's own token has it all; in the last one each token carries some.
    assert result.recovery()[0].tolist() == pytest.approx([0, 1], abs=0.02)
    assert result.recovery()[1].max() < 0.5

"""A trained Arabic diacritizer: the case of a noun is read, taken out and put in, beside plain torch hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import probelens as pl
from real_models import diacritizer, fetch
from real_models.diacritizer import ENDING, FATHA, KASRA, PREPOSITION, STEM

pytestmark = pytest.mark.network

STATES = [f"blocks.{i}.hook_resid_post" for i in range(3)]


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return fetch.or_skip(diacritizer.load).requires_grad_(False)


@pytest.fixture(scope="module")
def model(module: nn.Module) -> pl.HookedModel:
    return pl.wrap(module)


@pytest.fixture(scope="module")
def letters(module: nn.Module) -> Tensor:
    return diacritizer.sentences(module)


def hooked(module: nn.Module, letters: Tensor, layer: int, edit: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The logits with a plain torch hook on what one layer of the LSTM gives."""
    alone = diacritizer.layers(module)
    handle = alone[layer].register_forward_hook(
        lambda m, args, out: None if (x := edit(out[0])) is None else (x, out[1])
    )
    x = module.embedding(letters)
    for lstm in alone:
        x, _ = lstm(x)
    handle.remove()
    return module.classifier(module.attention(x))


def states(module: nn.Module, letters: Tensor, layer: int) -> Tensor:
    seen: list[Tensor] = []
    hooked(module, letters, layer, lambda x: seen.append(x))
    return seen[0]


def says_after_preposition(logits: Tensor) -> Tensor:
    """How much the noun's ending is -i rather than -a. (sentence, ..., class) -> (sentence,)"""
    at_ending = logits[:, ENDING] if logits.ndim == 3 else logits
    return at_ending[:, KASRA] - at_ending[:, FATHA]


def test_it_writes_the_vowels_of_arabic(module: nn.Module, letters: Tensor) -> None:
    assert module.diacritize("ذهب الولد إلى المدرسة") == "ذَهَبَ الْوَلَدُ إلَى الْمَدْرَسَةِ"
    ending = module(letters)[:, ENDING].argmax(-1)
    assert (ending[1::2] == KASRA).float().mean() > 0.95
    assert not (ending[::2] == KASRA).any()


def test_every_hook_point_of_it_works(model: pl.HookedModel, module: nn.Module, letters: Tensor) -> None:
    assert torch.equal(model(letters), module(letters))
    report = model.verify(letters[:1, :3])
    assert len(report.rows) == 43
    assert report.ok, report.failures()


def test_case_is_readable_in_the_nouns_first_letter(model: pl.HookedModel, module: nn.Module, letters: Tensor) -> None:
    case = torch.arange(len(letters)) % 2
    batch = pl.Batch(letters, {"case": case}, groups=torch.arange(len(letters)) // 2)
    acts = pl.collect(model, batch, ["hook_embed", *STATES], pos=STEM)
    for layer, site in enumerate(STATES):
        torch.testing.assert_close(acts[site][:, 0], states(module, letters, layer)[:, STEM], atol=1e-5, rtol=0)
    result = pl.probe(acts, batch.labels, batch.groups)
    # The letter itself is the same in both cases, so its embedding can't tell.
    assert result.row("hook_embed")["balanced_accuracy"] == 0.5
    assert all(result.row(site)["balanced_accuracy"] > 0.9 for site in STATES)


def test_the_direction_of_case_taken_out(module: nn.Module, letters: Tensor) -> None:
    model = pl.wrap(module, output=lambda logits: logits[:, ENDING])
    layer, seen = 1, states(module, letters[:40], 1)
    case = torch.arange(40) % 2
    space = pl.subspaces.mean_difference(seen[:, STEM : ENDING + 1].flatten(0, 1), case.repeat_interleave(3))
    test = pl.Batch(letters[40:], {"case": torch.arange(40) % 2})
    metric = lambda logits, tokens, mask, case: (2 * case - 1) * says_after_preposition(logits)  # noqa: E731
    result = pl.ablate(model, test, {STATES[layer]: space}, metric, refit=False, controls=6, kinds=["random"])
    (target,) = result.targets()
    sign = 2 * case - 1
    clean = says_after_preposition(module(letters[40:])) * sign
    erased = says_after_preposition(hooked(module, letters[40:], layer, space.project_out)) * sign
    torch.testing.assert_close(result.clean, clean, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.values[result.rows.index(target)], erased, atol=1e-4, rtol=0)
    others = [row["drop"] for row in result.rows if row["condition"] == "random"]
    assert target["drop"] > 5 * max(map(abs, others))


def test_the_preposition_put_in_makes_the_ending_i(model: pl.HookedModel, module: nn.Module, letters: Tensor) -> None:
    subject, after = letters[:24:2], letters[1:24:2]
    pairs = pl.PatchPairs(after, subject, read_pos=ENDING, answers=torch.tensor([[KASRA, FATHA]] * len(subject)))
    at = [PREPOSITION, ENDING]
    result = pl.patch(model, pairs, STATES, pos=at)
    torch.testing.assert_close(result.clean, says_after_preposition(module(after)), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.corrupted, says_after_preposition(module(subject)), atol=1e-4, rtol=0)
    for layer in range(3):
        source = states(module, after, layer)
        for column, pos in enumerate(at):

            def put(x: Tensor, pos: int = pos, source: Tensor = source) -> Tensor:
                return torch.cat([x[:, :pos], source[:, pos : pos + 1], x[:, pos + 1 :]], 1)

            by_hand = says_after_preposition(hooked(module, subject, layer, put))
            torch.testing.assert_close(result.values[layer, column], by_hand, atol=1e-4, rtol=0)
    # From the preposition, case comes to the noun's last letter on the way through the layers.
    recovery = result.recovery(correct_only=False)
    assert recovery[:, 1].diff().min() > 0.03
    assert recovery[2, 1] > 0.5
    assert recovery[:, 0].abs().max() < 0.1

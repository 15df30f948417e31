"""The voice detector of silero-vad: its conversion, and where its LSTM keeps that it hears a voice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import probelens as pl
from real_models import fetch, silero_vad

pytestmark = pytest.mark.network

STATE = "blocks.0.hook_resid_post"


@pytest.fixture(scope="module")
def module() -> silero_vad.Silero:
    return fetch.or_skip(silero_vad.load).requires_grad_(False)


@pytest.fixture(scope="module")
def model(module: silero_vad.Silero) -> pl.HookedModel:
    return pl.wrap(module, output=_classes)


def _classes(logit: Tensor) -> Tensor:
    """(batch, frame) -> (batch, frame, 2): no speech, speech"""
    return torch.stack([torch.zeros_like(logit), logit], -1)


def recordings(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A second each, of noise in the even rows and of vowels in the odd ones; and which it is at each frame."""
    make = (silero_vad.noise, silero_vad.voiced)
    audio = torch.stack([make[i % 2](0.5, seed + i) for i in range(n)])
    heard = (torch.arange(n) % 2)[:, None].expand(n, audio.shape[1] // silero_vad.FRAME)
    return audio, heard.contiguous()


def hooked(module: nn.Module, edit: object, audio: Tensor) -> Tensor:
    """The logits with a plain torch hook on the LSTM's output."""
    handle = module.rnn.register_forward_hook(lambda m, args, out: (edit(out[0]), out[1]))
    try:
        return module(audio)
    finally:
        handle.remove()


def test_it_hears_what_the_packages_own_model_hears(module: silero_vad.Silero) -> None:
    theirs = silero_vad.torchscript()
    audio, heard = recordings(6, 0)
    said = torch.stack([theirs(frame, silero_vad.RATE)[:, 0] for frame in audio.split(silero_vad.FRAME, 1)], 1)
    found = module(audio).sigmoid()
    torch.testing.assert_close(found, said, atol=1e-5, rtol=0)
    assert found[heard == 0].max() < 0.1
    assert found[heard == 1].mean() > 0.3


def test_every_hook_point_of_it_works(model: pl.HookedModel, module: silero_vad.Silero) -> None:
    audio, _ = recordings(2, 0)
    assert torch.equal(model(audio), _classes(module(audio)))
    report = model.verify(audio[:, : 4 * silero_vad.FRAME])
    assert report.ok, report.failures()


def test_a_voice_is_readable_in_the_state_and_needed_there(model: pl.HookedModel, module: silero_vad.Silero) -> None:
    audio, heard = recordings(24, 100)
    batch = pl.Batch(audio, {"voice": heard})
    acts = pl.collect(model, batch, STATE)
    torch.testing.assert_close(acts[STATE], module.rnn(_features(module, audio))[0])
    result = pl.probe(acts, batch.labels, batch.groups)
    assert result.row(STATE)["balanced_accuracy"] > 0.9

    held_out, heard = recordings(10, 500)
    test = pl.Batch(held_out, {"voice": heard})
    direction = pl.subspaces.from_probe(result.coef(STATE), result.mean(STATE))
    metric = lambda logits, mask, voice: (2 * voice - 1) * (logits[..., 1] - logits[..., 0])  # noqa: E731
    needed = pl.ablate(model, test, result, metric, label="voice", controls=2, directions="filter", refit=False)
    (target,) = needed.targets()
    by_hand = (2 * heard - 1) * hooked(module, direction.project_out, held_out)
    assert target["clean"] == pytest.approx(float(((2 * heard - 1) * module(held_out)).mean()), abs=1e-4)
    assert target["value"] == pytest.approx(float(by_hand.mean()), abs=1e-4)


def test_a_frames_state_from_the_voice_makes_it_hear_one(model: pl.HookedModel, module: silero_vad.Silero) -> None:
    audio, _ = recordings(8, 900)
    noise, voice = audio[::2], audio[1::2]
    pairs = pl.PatchPairs(voice, noise, read_pos=-1, answers=torch.tensor([[1, 0]] * 4))
    result = pl.patch(model, pairs, STATE, pos=[3, 14])
    clean, corrupted = module(voice)[:, -1], module(noise)[:, -1]
    torch.testing.assert_close(result.clean, clean)
    torch.testing.assert_close(result.corrupted, corrupted)
    # The readout sees one frame's output, so an earlier frame's restores nothing and the last one's everything.
    torch.testing.assert_close(result.recovery()[0], torch.tensor([0.0, 1.0]), atol=1e-5, rtol=0)


def test_a_position_that_the_outputs_do_not_have_is_refused(model: pl.HookedModel) -> None:
    audio, _ = recordings(4, 900)
    frames = audio.shape[1] // silero_vad.FRAME
    pairs = pl.PatchPairs(audio[1::2], audio[::2], read_pos=frames, answers=torch.tensor([[1, 0]] * 2))
    with pytest.raises(pl.InputError, match=f"the outputs have {frames} positions"):
        pl.patch(model, pairs, STATE, pos=None)


def _features(module: silero_vad.Silero, audio: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = module.rnn.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    module(audio)
    handle.remove()
    return seen[0]

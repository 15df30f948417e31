"""The spelling-to-sound network of g2p-en: its conversion, and what edits of its state do to the sounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_models import fetch, g2p_en

pytestmark = pytest.mark.network

WORDS = """
    bat bit bet but boat bite cat cut cot hello world language letter phoneme probe lens mamba state memory
    knight quilt zebra xylophone through thorough rhythm psychology pneumonia island debris colonel yacht queue
    choir recipe banana elephant giraffe computer network gradient transformer activation interpretability
    electroencephalogram strengths a i z it's naive co-op
"""


@pytest.fixture(scope="module")
def module() -> g2p_en.G2P:
    return fetch.or_skip(g2p_en.load).requires_grad_(False)


# -- the conversion ----------------------------------------------------------------------------------


def test_it_says_every_word_as_the_packages_own_numpy_code(module: g2p_en.G2P, tmp_path: Path) -> None:
    reference = g2p_en.numpy_reference(tmp_path)
    words = WORDS.split()
    assert len(words) >= 50
    assert module.say(words) == [" ".join(reference.predict(word)) for word in words]


def test_encoder_states_are_those_of_the_packages_own_numpy_code(module: g2p_en.G2P, tmp_path: Path) -> None:
    reference = g2p_en.numpy_reference(tmp_path)
    for word in ("bat", "interpretability"):
        weights = (reference.enc_w_ih, reference.enc_w_hh, reference.enc_b_ih, reference.enc_b_hh)
        theirs = torch.tensor(reference.gru(reference.encode(word), len(word) + 1, *weights))
        ours, _ = module.encoder(module.embedding(module.encode([word])))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_it_knows_how_english_is_pronounced(module: g2p_en.G2P) -> None:
    said = dict(zip(WORDS.split(), module.say(WORDS.split()), strict=True))
    assert said["bat"] == "B AE1 T"
    assert said["knight"] == "N AY1 T"
    assert said["transformer"] == "T R AE0 N S F AO1 R M ER0"


def test_swapped_gates_say_something_else(module: g2p_en.G2P) -> None:
    broken = g2p_en.load()
    with torch.no_grad():
        for name, value in broken.encoder.named_parameters():
            r, z, n = value.chunk(3)
            getattr(broken.encoder, name).copy_(torch.cat([z, r, n]))
    same = sum(a == b for a, b in zip(broken.say(WORDS.split()), module.say(WORDS.split()), strict=True))
    assert same <= 2

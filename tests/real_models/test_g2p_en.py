"""The spelling-to-sound network of g2p-en: its conversion, and what edits of its state do to the sounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import probelens as pl
from real_models import fetch, g2p_en

pytestmark = pytest.mark.network

WORDS = """
    bat bit bet but boat bite cat cut cot hello world language letter phoneme probe lens mamba state memory
    knight quilt zebra xylophone through thorough rhythm psychology pneumonia island debris colonel yacht
    queue choir recipe banana elephant giraffe computer network gradient transformer activation
    interpretability electroencephalogram strengths a i z it's naive co-op
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


# -- edits of its state ------------------------------------------------------------------------------

STATE = "blocks.0.rnn.hook_h"

# A word, the word whose letter's state is put into it, and the letter in which they differ.
ONE_LETTER = (
    ("bat", "bit", 1),
    ("bat", "cat", 0),
    ("cat", "cab", 2),
    ("hat", "hot", 1),
    ("mate", "mite", 1),
    ("pan", "pen", 1),
    ("stand", "stend", 2),
    ("bits", "bite", 3),
)


@pytest.fixture(scope="module")
def model(module: g2p_en.G2P) -> pl.HookedModel:
    return pl.wrap(module, embed="embedding")


def test_wrapped_logits_are_the_modules_own_bit_for_bit(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    letters = module.encode(WORDS.split())
    assert torch.equal(model(letters), module(letters))


def test_gates_and_states_are_those_of_the_packages_formula(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    weights = {name: torch.tensor(value) for name, value in g2p_en.read_weights().items()}
    _, cache = model.run_with_cache(module.encode(["phoneme"]))
    before = torch.zeros(1, 256)
    for pos in range(8):
        from_input = cache["hook_embed"][:, pos] @ weights["enc_w_ih"].T + weights["enc_b_ih"]
        from_state = before @ weights["enc_w_hh"].T + weights["enc_b_hh"]
        (r_in, z_in, n_in), (r_state, z_state, n_state) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        r, z = torch.sigmoid(r_in + r_state), torch.sigmoid(z_in + z_state)
        n = torch.tanh(n_in + r * n_state)
        before = (1 - z) * n + z * before
        for name, value in (("gate_r", r), ("gate_z", z), ("gate_n", n), ("h", before)):
            found = cache[f"blocks.0.rnn.hook_{name}"][:, pos]
            torch.testing.assert_close(found, value, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("word", "source", "letter"), ONE_LETTER)
def test_a_letters_state_makes_it_say_the_other_word(
    model: pl.HookedModel, module: g2p_en.G2P, word: str, source: str, letter: int
) -> None:
    as_word, as_source = module.say([word, source])
    assert as_word != as_source
    letters = module.encode([word])
    _, cache = model.run_with_cache(module.encode([source]), STATE)
    for pos in range(len(word) + 1):
        put = pl.at(pos, lambda state, hook: cache[STATE][:, hook.pos])
        said = module.read(model.run_with_hooks(letters, [(STATE, put)]))
        # Before the letter the states are equal; from it on the state holds all that was read so far.
        assert said == [as_source if pos >= letter else as_word]
    assert module.read(model(letters)) == [as_word]  # and without the hook it is itself again


def test_output_of_one_step_is_not_state(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    # The control for the test above: the decoder reads the output at the end of the word only, so an edit of
    # the output at a letter reaches nothing, where the same edit of the state reaches everything.
    letters = module.encode(["bat"])
    _, cache = model.run_with_cache(module.encode(["bit"]), "blocks.0.hook_resid_post")
    put = pl.at(1, lambda out, hook: cache["blocks.0.hook_resid_post"][:, hook.pos])
    edited = model.run_with_hooks(letters, [("blocks.0.hook_resid_post", put)])
    assert torch.equal(edited, model(letters))


def test_the_letters_embedding_is_the_letter(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    _, cache = model.run_with_cache(module.encode(["bit"]), "hook_embed")
    put = pl.at(1, lambda embedded, hook: cache["hook_embed"][:, hook.pos])
    edited = model.run_with_hooks(module.encode(["bat"]), [("hook_embed", put)])
    torch.testing.assert_close(edited, model(module.encode(["bit"])))


def test_one_direction_turns_a_into_i_in_words_it_was_not_made_from(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    frames = [(onset, coda) for onset in "bcdfghlmnprstvw" for coda in "bdgkmnpt"]
    with_a = [f"{onset}a{coda}" for onset, coda in frames]
    with_i = [f"{onset}i{coda}" for onset, coda in frames]
    says_a, says_i = module.say(with_a), module.say(with_i)
    usual = [n for n, (a, i) in enumerate(zip(says_a, says_i, strict=True)) if " AE1 " in a and " IH1 " in i]
    assert len(usual) > 100  # of 120: in "war" and the like the vowel is another
    order = torch.randperm(len(usual), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = ([usual[n] for n in part] for part in (order[: len(order) // 2], order[len(order) // 2 :]))

    def states(words: list[str]) -> Tensor:
        return model.run_with_cache(module.encode(words), STATE)[1][STATE][:, 1]

    difference = states([with_i[n] for n in train]) - states([with_a[n] for n in train])
    direction = difference.mean(0)

    def share_saying_i(vector: Tensor) -> float:
        add = pl.at(1, lambda state, hook: state + vector)
        said = module.read(model.run_with_hooks(module.encode([with_a[n] for n in test]), [(STATE, add)]))
        return sum(word == says_i[n] for word, n in zip(said, test, strict=True)) / len(test)

    assert share_saying_i(direction) > 0.8  # 0.91
    for seed in range(5):
        random = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        assert share_saying_i(random / random.norm() * direction.norm()) < 0.05  # 0.0


def test_a_module_that_runs_once_a_phoneme_is_hooked_each_time(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    states: list[Tensor] = []
    letters = module.encode(["bat"])
    keep = lambda state, hook: states.append(state)  # noqa: E731
    with pytest.raises(pl.InputError, match="Say which call you mean"):
        model.run_with_hooks(letters, [("decoder.hook_out", keep)])
    calls = [f"decoder.hook_out#{i}" for i in range(g2p_en.LONGEST)]
    logits = model.run_with_hooks(letters, [(calls, keep)])
    assert len(states) == g2p_en.LONGEST
    torch.testing.assert_close(torch.stack([module.head(state) for state in states], 1), logits)
    _, cache = model.run_with_cache(letters)  # every point: each call by its number
    for i, state in enumerate(states):
        torch.testing.assert_close(cache[f"unembed.hook_in#{i}"], state)


def test_nothing_of_it_stays_on_the_module(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    model.run_with_hooks(module.encode(["bat"]), [(STATE, pl.at(1, lambda state, hook: state * 2))])
    fresh = g2p_en.load()
    assert type(module.encoder) is torch.nn.GRU
    assert "forward" not in vars(module.encoder)
    assert module.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in module.state_dict().items())


def test_patch_restores_the_phoneme_from_the_letter_on(model: pl.HookedModel, module: g2p_en.G2P) -> None:
    cleans, corrupteds = ["bit", "hit", "pin", "lid"], ["bat", "hat", "pan", "lad"]
    ih, ae = module.phonemes.index("IH1"), module.phonemes.index("AE1")
    pairs = pl.PatchPairs(
        clean=module.encode(cleans),
        corrupted=module.encode(corrupteds),
        edit_pos=torch.tensor([1] * 4),
        read_pos=torch.tensor([1] * 4),  # the second phoneme
        answers=torch.tensor([[ih, ae]] * 4),
    )
    result = pl.patch(model, pairs, sites=[STATE, "blocks.0.hook_resid_pre"], pos="each")
    assert bool(result.correct.all())
    assert (result.clean - result.corrupted).min() > 5  # logits
    torch.testing.assert_close(result.recovery()[0], torch.tensor([0.0, 1.0, 1.0, 1.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.recovery()[1], torch.tensor([0.0, 1.0, 0.0, 0.0]), atol=1e-5, rtol=0)

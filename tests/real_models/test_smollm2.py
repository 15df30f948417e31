"""SmolLM2-135M, a trained language model: its conversion, and where it keeps a country."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import probelens as pl
from real_models import fetch, smollm2

pytestmark = pytest.mark.network

CLEAN, CORRUPTED = "The capital of France is the city of", "The capital of Italy is the city of"
SUBJECT, LAST = 3, 7  # positions of " France" and of the last " of"
PROSE = (
    "The Roman Empire was one of the largest empires in history. At its height it covered most of Europe, "
    "northern Africa and western Asia, and millions of people lived under its laws. Roads, aqueducts and "
    "cities were built everywhere, and many of them are still in use today."
)


@pytest.fixture(scope="module")
def model() -> pl.HookedModel:
    module, tokenizer = fetch.or_skip(smollm2.load)
    return pl.wrap(module.requires_grad_(False), tokenizer=tokenizer)


class Capitals(NamedTuple):
    """The two runs, and what they say."""

    model: pl.HookedModel
    clean: pl.ActivationCache
    corrupted: pl.ActivationCache
    paris: int
    rome: int
    clean_gap: float
    corrupted_gap: float

    def gap(self, logits: Tensor) -> float:
        """Logit of Paris over that of Rome."""
        return float(logits[0, -1, self.paris] - logits[0, -1, self.rome])

    def recovery(self, name: str, layer: int, pos: int) -> float:
        """How much of the gap comes back when one activation of the France run is put into the Italy run."""
        put = pl.at(pos, lambda tensor, hook: self.clean[hook.name][:, pos])
        resid = self.corrupted["resid_pre", layer]
        logits = self.model.run_with_hooks(resid, [(name, put)], start_at_layer=layer)
        return self.restored(logits)

    def restored(self, logits: Tensor) -> float:
        """Where the gap stands between that of the Italy run, 0, and that of the France run, 1."""
        return (self.gap(logits) - self.corrupted_gap) / (self.clean_gap - self.corrupted_gap)


@pytest.fixture(scope="module")
def capitals(model: pl.HookedModel) -> Capitals:
    kept = ["*.hook_resid_pre", "*.hook_resid_post", "*.hook_attn_out"]
    clean_logits, clean = model.run_with_cache(CLEAN, kept)
    corrupted_logits, corrupted = model.run_with_cache(CORRUPTED, kept)
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")
    assert clean_logits[0, -1].argmax() == paris
    assert corrupted_logits[0, -1].argmax() == rome
    gaps = (float(logits[0, -1, paris] - logits[0, -1, rome]) for logits in (clean_logits, corrupted_logits))
    return Capitals(model, clean, corrupted, paris, rome, *gaps)


# -- the conversion --------------------------------------------------------------------------------


def test_weights_are_those_of_transformers_own_gguf_loader(model: pl.HookedModel) -> None:
    # What LlamaForCausalLM.from_pretrained(folder, gguf_file=...) of transformers 5.24 gives, dtype
    # float32. It takes 25 s, so its result is kept here and not made anew.
    digest = hashlib.sha256()
    for name, value in sorted(model.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    assert digest.hexdigest() == "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"


def test_tokenizer_splits_as_transformers_own_gguf_loader_and_back(model: pl.HookedModel) -> None:
    text = "The capital is 1234 km² away, don't <|im_start|> return x"
    tokens = [
        *("The", "Ġcapital", "Ġis", "Ġ", "1", "2", "3", "4", "Ġkm", "Â²", "Ġaway", ",", "Ġdon", "'t"),
        *("Ġ", "<|im_start|>", "Ġreturn", "Ġx"),
    ]
    assert model.tokenizer(text).tokens() == tokens
    assert model.tokenizer.decode(model.tokenizer(text).input_ids) == text


def test_it_predicts_english_only_with_query_and_key_rows_in_the_right_order(model: pl.HookedModel) -> None:
    tokens = model.to_tokens(PROSE)
    perplexity = model(tokens, return_type="loss").exp()
    assert perplexity < 12  # 9.8
    config = model.module.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {
        name: value.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(value.shape)
        for name, value in model.module.state_dict().items()
        for part in heads
        if part in name
    }
    assert len(stored) == 2 * config.num_hidden_layers
    logits = torch.func.functional_call(model.module, stored, (tokens,)).logits
    as_stored = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).exp()
    assert as_stored > 3 * perplexity  # 45.4


# -- the hook layer on it --------------------------------------------------------------------------


def test_wrapped_logits_are_the_models_own_bit_for_bit(model: pl.HookedModel) -> None:
    tokens = model.to_tokens(CLEAN)
    assert torch.equal(model(tokens), model.module(tokens).logits)


def test_resid_post_of_a_block_is_what_the_block_returns(model: pl.HookedModel, capitals: Capitals) -> None:
    seen: dict[int, Tensor] = {}
    handles = [
        block.register_forward_hook(
            lambda m, a, out, layer=layer: seen.update({layer: out[0] if isinstance(out, tuple) else out})
        )
        for layer, block in enumerate(model.module.model.layers)
    ]
    model.module(model.to_tokens(CLEAN))
    for handle in handles:
        handle.remove()
    assert sorted(seen) == list(range(30))
    for layer, value in seen.items():
        assert torch.equal(capitals.clean["resid_post", layer], value)
        if layer:
            assert torch.equal(capitals.clean["resid_pre", layer], seen[layer - 1])


def test_right_padding_leaves_the_prediction_alone(model: pl.HookedModel, capitals: Capitals) -> None:
    longer = CLEAN + " Paris, which lies on the Seine"
    logits = model([CLEAN, longer])
    assert logits.shape[:2] == (2, model.to_tokens(longer).shape[1])
    assert abs(capitals.gap(logits[:1, : LAST + 1]) - capitals.clean_gap) < 1e-3


# -- where the country is --------------------------------------------------------------------------


def test_the_country_is_at_the_subject_up_to_layer_23_and_then_at_the_last_position(capitals: Capitals) -> None:
    def recoveries(pos: int) -> list[float]:
        return [capitals.recovery(f"blocks.{layer}.hook_resid_pre", layer, pos) for layer in range(30)]

    assert capitals.clean_gap - capitals.corrupted_gap > 12  # 14.2 logits
    subject, last = recoveries(SUBJECT), recoveries(LAST)
    assert min(subject[:21]) >= 0.95  # 0.978
    assert abs(subject[25]) < 0.02  # 0.003
    assert max(map(abs, last[:21])) < 0.02  # 0.007
    assert 0.6 < last[25] < 0.8  # 0.675
    assert max(map(abs, subject[24:])) < 0.02
    assert min(last[24:]) > 0.6


def test_patch_agrees_with_hooks_set_by_hand(capitals: Capitals) -> None:
    model = capitals.model
    sites = [f"blocks.{layer}.hook_resid_pre" for layer in (0, 12, 20, 24, 25)]
    pairs = pl.PatchPairs(
        clean=model.to_tokens(CLEAN),
        corrupted=model.to_tokens(CORRUPTED),
        edit_pos=torch.tensor([SUBJECT]),
        read_pos=torch.tensor([LAST]),
        answers=torch.tensor([[capitals.paris, capitals.rome]]),
    )
    result = pl.patch(model, pairs, sites=sites, pos=[SUBJECT, LAST], mode="denoise")
    assert float(result.clean) == pytest.approx(capitals.clean_gap, abs=1e-3)
    assert float(result.corrupted) == pytest.approx(capitals.corrupted_gap, abs=1e-3)
    by_hand = [[capitals.recovery(site, int(site.split(".")[1]), pos) for pos in (SUBJECT, LAST)] for site in sites]
    torch.testing.assert_close(result.recovery(), torch.tensor(by_hand), atol=1e-4, rtol=0)
    # The mirror: Italy's activation, put into the France run, takes away what it gave back before.
    mirror = pl.patch(model, pairs, sites=sites[:3], pos=[SUBJECT, LAST], mode="noise")
    torch.testing.assert_close(mirror.values[:, 0, 0], torch.full((3,), capitals.corrupted_gap), atol=1.0, rtol=0)
    torch.testing.assert_close(mirror.values[:, 1, 0], torch.full((3,), capitals.clean_gap), atol=1.0, rtol=0)


def test_positions_that_come_before_the_subject_restore_nothing(capitals: Capitals) -> None:
    for layer in (0, 10, 20, 25):
        for pos in range(SUBJECT):
            restored = capitals.recovery(f"blocks.{layer}.hook_resid_pre", layer, pos)
            assert restored == pytest.approx(0, abs=1e-4)


def test_the_attention_of_block_23_moves_it(capitals: Capitals) -> None:
    moved = {b: capitals.recovery(f"blocks.{b}.hook_attn_out", b, LAST) for b in (10, 16, 20, 22, 23, 24, 26)}
    assert moved.pop(23) > 0.6  # 0.69
    assert max(map(abs, moved.values())) < 0.1  # 0.03


def test_interior_points_leave_the_logits_as_they_are(model: pl.HookedModel) -> None:
    logits, _ = model.run_with_cache(CLEAN, "*.attn.hook_*")
    torch.testing.assert_close(logits, model(CLEAN), atol=1e-3, rtol=0)  # 5e-5


def test_one_head_of_block_23_looks_at_the_country_and_moves_most_of_it(capitals: Capitals) -> None:
    model = capitals.model
    _, clean = model.run_with_cache(CLEAN, ["blocks.23.attn.hook_z", "blocks.23.attn.hook_pattern"])
    assert clean["blocks.23.attn.hook_pattern"][0, 4, LAST, SUBJECT] > 0.7  # 0.81

    def recovery(head: int) -> float:
        def put(z: Tensor, hook: pl.HookPoint) -> Tensor:
            z = z.clone()
            z[:, LAST, head] = clean[hook.name][:, LAST, head]
            return z

        logits = model.run_with_hooks(CORRUPTED, [("blocks.23.attn.hook_z", put)])
        return capitals.restored(logits)

    by_head = [recovery(head) for head in range(9)]
    assert by_head.index(max(by_head)) == 4
    assert by_head[4] > 0.5  # 0.62
    assert sorted(by_head)[-2] < 0.2  # 0.09

    def gap_without(position: int) -> float:
        def cut(scores: Tensor, hook: pl.HookPoint) -> Tensor:
            scores = scores.clone()
            scores[:, 4, LAST, position] = -1e9
            return scores

        return capitals.gap(model.run_with_hooks(CLEAN, [("blocks.23.attn.hook_attn_scores", cut)]))

    assert gap_without(SUBJECT) < capitals.clean_gap - 2  # 3.6 of 6.6
    assert gap_without(SUBJECT - 1) == pytest.approx(capitals.clean_gap, abs=0.2)


def test_it_travels_in_the_subjects_value_not_in_its_key_or_query(capitals: Capitals) -> None:
    model = capitals.model
    names = [f"blocks.23.attn.hook_{part}" for part in "vkq"]
    _, clean = model.run_with_cache(CLEAN, names)
    assert clean[names[0]].shape == (1, 8, 3, 64)  # three heads of keys and values serve nine of queries
    put = pl.at(SUBJECT, lambda tensor, hook: clean[hook.name][:, SUBJECT])
    value, key, query = (capitals.restored(model.run_with_hooks(CORRUPTED, [(name, put)])) for name in names)
    assert value > 0.95  # 1.02
    assert abs(key) < 0.1  # 0.03
    assert abs(query) < 0.02  # 0.001


def test_a_patch_reaches_the_text_that_the_model_writes_and_leaves_with_the_hook(capitals: Capitals) -> None:
    model, italy = capitals.model, capitals.model.to_tokens(CORRUPTED)

    def write() -> str:
        written = model.module.generate(italy, attention_mask=torch.ones_like(italy), max_new_tokens=3, do_sample=False)
        return str(model.to_string(written[0, italy.shape[1] :]))

    def put(resid: Tensor, hook: pl.HookPoint) -> Tensor | None:
        if resid.shape[1] == 1:  # a later step, with the prompt in the key-value cache
            return None
        resid = resid.clone()
        resid[:, SUBJECT] = capitals.clean[hook.name][:, SUBJECT]
        return resid

    assert write().startswith(" Rome")
    with model.hooks([("blocks.10.hook_resid_pre", put)]):
        assert write().startswith(" Paris")
    assert write().startswith(" Rome")
    with model.hooks([("blocks.25.hook_resid_pre", put)]):
        assert write().startswith(" Rome")  # the same edit where the country has moved on

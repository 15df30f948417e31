"""Batches and pairs from text: padding told, spans found, unequal lengths refused or aligned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import probelens as pl

WORDS = ["<pad>", "<unk>", "The", "cat", "dog", "big", "sat", "ran", "on", "mats", "."]


@pytest.fixture(scope="module", params=["right", "left"])
def model(request: pytest.FixtureRequest) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    options = {"pad_token": "<pad>", "unk_token": "<unk>", "padding_side": request.param}
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes)).eval()
    return pl.wrap(module, tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, **options))


def test_a_batch_of_texts_is_read_at_the_last_token_of_each(model: Any) -> None:
    texts = ["The cat sat", "The big dog ran on mats", "dog"]
    batch = pl.Batch.from_text(model, texts, {"animal": [0, 1, 1]})
    site = "blocks.1.hook_resid_post"
    last = pl.collect(model, batch, site, pos="last")[site][:, 0]
    alone = torch.stack([model.run_with_cache(text, site)[1][site][0, -1] for text in texts])
    assert torch.allclose(last, alone, atol=1e-5)
    assert batch.mask.sum(1).tolist() == [3, 6, 1]
    assert batch.labels["animal"].tolist() == [0, 1, 1]
    with pytest.raises(pl.InputError, match="list of strings"):
        pl.Batch.from_text(model, "The cat")


def test_pairs_of_texts_say_where_they_differ_and_are_read_at_the_end(model: Any) -> None:
    clean, corrupted = ["The cat sat on", "The big cat ran"], ["The dog sat on", "The big dog sat"]
    pairs = pl.PatchPairs.from_text(model, clean, corrupted, [("mats", "."), ("on", "mats")])
    assert pairs.spans["differing"].tolist() == [[False, True, False, False], [False, False, True, True]]
    assert pairs.edit_pos.tolist() == [1, 2]
    assert pairs.answers.tolist() == [[9, 10], [8, 9]]
    found = pl.patch(model, pairs, "resid_pre", pos="differing")
    logits = model(clean)[:, -1]
    assert torch.allclose(found.clean, logits.gather(1, pairs.answers).diff(dim=1)[:, 0].neg(), atol=1e-5)
    assert torch.allclose(found.values[0, 0], found.clean, atol=1e-5), "the differing embeddings are all that differs"
    assert (found.values[1, 0] - found.clean).abs().max() > 1e-6, "control: a block later more differs"
    with pytest.raises(pl.InputError, match=r"1 of 1 pairs.*3 for 'The cat sat'.*4 for"):
        pl.PatchPairs.from_text(model, ["The cat sat"], ["The big cat sat"])
    with pytest.raises(pl.InputError, match="equal tokens in pair 0"):
        pl.PatchPairs.from_text(model, ["The cat"], ["The cat"])


def test_pairs_of_unequal_lengths_are_aligned_at_their_ends(model: Any) -> None:
    clean, corrupted = ["The cat sat", "The big dog ran on"], ["The big cat sat", "dog ran on"]
    pairs = pl.PatchPairs.from_text(model, clean, corrupted, [("mats", "on mats"), (".", "mats")], align="right")
    assert pairs.mask.tolist() == [[False] * 2 + [True] * 3, [True] * 5]
    assert pairs.corrupted_mask.tolist() == [[False] + [True] * 4, [False] * 2 + [True] * 3]
    found = pl.patch(model, pairs, "resid_post", pos="last")
    for texts, values in ((clean, found.clean), (corrupted, found.corrupted)):
        for i, text in enumerate(texts):
            score = []
            for answer in (("mats", "on mats"), (".", "mats"))[i]:
                ids = model.to_tokens(f"{text} {answer}")
                logs, k = model(ids)[0].log_softmax(-1), len(answer.split())
                score.append(sum(logs[-1 - k + j, ids[0, -k + j]].item() for j in range(k)))
            assert values[i].item() == pytest.approx(score[0] - score[1], abs=1e-4)


def test_pairs_are_a_batch_that_is_probed_and_ablated_where_they_are_read(model: Any) -> None:
    clean, corrupted = ["The cat sat on", "The big cat ran", "cat"], ["The dog sat on", "The big dog sat", "dog"]
    pairs = pl.PatchPairs.from_text(model, clean, corrupted, [("mats", "."), ("on", "mats"), ("ran", "sat")])
    batch = pairs.batch()
    assert batch.groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.labels["answer"][batch.mask].tolist() == [9, 8, 7, 10, 9, 6]
    assert batch.mask.sum(1).tolist() == [1] * 6
    right = [int(model(text)[0, -1].argmax()) for text in clean + corrupted]
    nothing = {"blocks.1.hook_resid_post": pl.Subspace(torch.eye(16)[:1], torch.zeros(16))}
    measured = pl.ablate(model, batch, nothing, refit=False, controls=0)
    assert measured.clean.tolist() == [float(a == b) for a, b in zip(right, [9, 8, 7, 10, 9, 6], strict=True)]
    for odd, why in ((None, "no answers"), (torch.ones(3, 2, 2).long().cumsum(1), "several tokens")):
        with pytest.raises(pl.InputError, match=why):
            pl.PatchPairs(pairs.clean, pairs.corrupted, None, -1, odd).batch()


def test_labels_of_texts_that_the_model_does_not_answer_are_refused_before_anything_runs(model: Any) -> None:
    batch = pl.Batch.from_text(model, ["The cat sat", "The dog sat"], {"animal": [0, 1]})
    space = pl.Subspace(torch.eye(16)[:1], torch.zeros(16))
    seen: list[int] = []
    handle = model.module.register_forward_pre_hook(
        lambda m, args, kw: seen.append(len(kw["input_ids"])), with_kwargs=True
    )
    with pytest.raises(pl.InputError, match=r"target= a label \(example, pos\), such as pairs.batch\(\)"):
        pl.ablate(model, batch, {"blocks.1.hook_resid_post": space})
    with pytest.raises(pl.InputError, match=r"pairs.batch\(\)"):
        pl.erase(model, batch, pl.Batch.from_text(model, ["The cat ran", "The dog ran"], {"animal": [0, 1]}))
    handle.remove()
    assert len(seen) <= 2  # the shapes of the outputs are read from one run each

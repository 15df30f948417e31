"""The page of models that aren't language models runs, and its results are of the shapes and kinds that it says."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pages import run_page

import probelens as pl

WORDS = ["the", "a", *(f"n{i}" for i in range(24)), "is", "are", "old", "[UNK]"]


def language_model() -> pl.HookedModel:
    """A tiny GPT-2 over words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return pl.wrap(transformers.GPT2LMHeadModel(config).eval(), tokenizer=tokenizer)


def test_the_page_of_any_inputs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(f"the old n{i}", f"a old n{i}", " is", " are") for i in range(24)]
    with Path("pairs.csv").open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([("clean", "corrupted", "right", "wrong"), *rows])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names: dict[str, Any] = run_page("docs/any-input.md", language_model=language_model())
    assert {path.name for path in tmp_path.iterdir()} == {"pairs.csv", "answers.csv", "profile.html"}
    assert (
        names["towers"]["patches.hook_out"].rows[0]["n_test"] > names["towers"]["words.hook_out"].rows[0]["n_test"] / 2
    )
    assert [len(row) for row in names["table"].itertuples(index=False)] == [len(names["table"].columns)] * 3
    assert names["patched"].positions == ["differing"]
    assert names["needed"].metric == "r2"
    assert {row["site"] for row in names["without"].targets()} == {row["site"] for row in names["erased"].rows}
    assert names["fit"].labels["answer"][names["fit"].mask].tolist() == [26] * 12 + [27] * 12

"""``pl.load`` takes the class that a checkpoint's config names, or that of the task, and refuses weights that don't fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo

import probelens as pl

NAMES = [
    "neox", "gpt2", "mamba", "bert", "roberta", "distilbert", "modernbert", "bert-tagger", "bert-classifier",
    "modernbert-classifier", "llama-classifier", "vit", "t5", "bart-whole", "whisper",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_class_of_a_saved_model_is_the_one_that_its_config_names(name: str, tmp_path: Path) -> None:
    raw = zoo.more(name)
    raw.save_pretrained(tmp_path)
    model, x = pl.load(tmp_path), zoo.inputs(name)
    assert type(model.module) is type(raw)
    assert not model.module.training
    with torch.no_grad():
        want = raw(**x).logits if isinstance(x, dict) else raw(x).logits
        assert torch.allclose(model(x), want, atol=1e-6)


def test_a_task_overrides_the_config(tmp_path: Path) -> None:
    raw = zoo.more("bert")
    raw.save_pretrained(tmp_path)
    with pytest.raises(pl.InputError, match="has no weights for 2 of them, such as 'pooler.*add_pooling_layer=False"):
        pl.load(tmp_path, task="base")
    base = pl.load(tmp_path, task="base", add_pooling_layer=False)
    assert type(base.module).__name__ == "BertModel"
    x = zoo.tokens()
    with torch.no_grad():
        want = raw.bert(x).last_hidden_state
        assert torch.allclose(base.run_with_cache(x)[1]["resid_post", -1], want, atol=1e-6)
    with pytest.raises(pl.InputError, match=r"BertForSequenceClassification .* has no weights for 4 of them"):
        pl.load(tmp_path, task="sequence-classification")
    with torch.random.fork_rng():
        drawn = pl.load(tmp_path, task="sequence-classification", strict=False)
    assert drawn(x).shape == (2, 2)
    with pytest.raises(pl.InputError, match=r"task='fill-mask' is not known. Allowed: 'causal-lm', 'masked-lm'"):
        pl.load(tmp_path, task="fill-mask")


def test_heads_of_other_tasks_are_no_weights_that_are_missed(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    raw = transformers.BertForPreTraining(transformers.BertConfig(**zoo._BERT)).eval()
    raw.save_pretrained(tmp_path)
    # As the checkpoints of BERT on the hub: two heads and a pooler, and a class that has one head.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    model, x = pl.load(tmp_path), zoo.tokens()
    assert type(model.module).__name__ == "BertForMaskedLM"
    with torch.no_grad():
        assert torch.allclose(model(x), raw(x).prediction_logits, atol=1e-6)
    config["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(pl.InputError, match=r"has weights that it doesn't use .*bert\.encoder\.layer\.2"):
        pl.load(tmp_path)


def test_a_config_that_names_no_class_of_transformers_is_a_causal_language_model(tmp_path: Path) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomebodysModel"]}))
    assert type(pl.load(tmp_path).module).__name__ == "GPT2LMHeadModel"

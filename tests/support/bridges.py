"""TransformerBridges of the zoo's models, and a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zoo
from transformer_lens.model_bridge.sources import build_bridge_from_module

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "neox": "GPTNeoXForCausalLM",
    "neox-sequential": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}
ATTENTION = ("gpt2", "neox", "neox-sequential", "llama", "gemma2")
SSMS = ("mamba", "mamba2")
TEXT = "the cat sat on a mat and dog ran to his red house by this big tree"
WORDS = ["<s>", "<unk>", *TEXT.split()]


def bridge(name: str, tokenizer: Any = None, seed: int = 0) -> Any:
    """TransformerLens over a model of its own: it rewrites the modules of the model it is given."""
    raw = zoo.build(name, seed)
    return build_bridge_from_module(raw, CLASSES[name], hf_config=raw.config, tokenizer=tokenizer)


def tokenizer(folder: Path) -> Any:
    """Saved in ``folder`` and read from there: TransformerLens reads it once more by its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="<s>", unk_token="<unk>", pad_token="<s>"
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)

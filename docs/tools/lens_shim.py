"""A pytest plugin under which TransformerLens' own tests run on tiny models: its bridges of them, or wrapped ones.

``docs/tools/lens_tests.py`` loads it. What makes a bridge (``boot_transformers``, ``boot_native``,
``build_bridge_from_module``) makes it of a small model with random weights, as nothing is downloaded, and on the side
"wrapped" gives ``pl.wrap`` of that model in its place. The file named by LENS_RESULTS gets what became of each test.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SIDE, RESULTS = os.environ.get("LENS_SIDE", "bridge"), os.environ.get("LENS_RESULTS", "")
VOCAB = 50257
_found: dict[str, tuple[str, str]] = {}


@cache
def tokenizer() -> Any:
    """One token for each byte, and one for the beginning and the end; TransformerLens reads it again by its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    folder = tempfile.mkdtemp()
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), letters[0])
    PreTrainedTokenizerFast(tokenizer_object=fast, **end).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _seeded(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config).eval()


def gpt2(
    layers: int, heads: int, width: int = 0, vocab: int = VOCAB, length: int = 1024, inner: int | None = None
) -> Any:
    """A GPT-2 of these sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width or 8 * heads, vocab_size=vocab, n_positions=length, n_inner=inner,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(GPT2LMHeadModel, config)


def llama(layers: int, heads: int, width: int, vocab: int, length: int, inner: int, shared: int) -> Any:
    """A Llama of these sizes, with ``shared`` heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=shared, hidden_size=width,
        intermediate_size=inner, vocab_size=vocab, max_position_embeddings=length, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(LlamaForCausalLM, config)


def neox(layers: int, heads: int) -> Any:
    """A GPT-NeoX of these sizes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        num_hidden_layers=layers, num_attention_heads=heads, hidden_size=8 * heads, intermediate_size=32 * heads,
        vocab_size=VOCAB, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(GPTNeoXForCausalLM, config)


BY_NAME = {
    "gpt2": lambda: gpt2(12, 12),
    "distilgpt2": lambda: gpt2(6, 12),
    "tiny-random-gpt2": lambda: gpt2(2, 2),
    "pythia-14m": lambda: neox(6, 4),
}


def _bridge(model: Any, tokens: Any = None) -> Any:
    """What stands for a bridge of this model on this side."""
    if SIDE == "bridge":
        return _build(model, type(model).__name__, hf_config=model.config, tokenizer=tokens)
    import probelens as pl

    found = pl.wrap(model) if tokens is None else pl.wrap(model, tokenizer=tokens)

    def enable_compatibility_mode(no_processing: bool = False, **others: Any) -> None:
        if not no_processing:
            raise AttributeError("weights are not folded: no enable_compatibility_mode")

    found.enable_compatibility_mode = enable_compatibility_mode
    found.set_use_hook_mlp_in = lambda use: None
    return found


def _boot_transformers(name: str, *args: Any, **kw: Any) -> Any:
    short = str(name).rpartition("/")[2]
    if short not in BY_NAME:
        pytest.skip(f"no small model stands for {name!r}")
    return _bridge(BY_NAME[short](), tokenizer())


def _boot_native(cfg: Any, *args: Any, **kw: Any) -> Any:
    def get(key: str, other: Any = None) -> Any:
        return cfg.get(key, other) if isinstance(cfg, dict) else getattr(cfg, key, other)

    if get("attn_only"):
        pytest.skip("no small model stands for attention alone")
    width, heads = get("d_model"), get("n_heads") or get("d_model") // get("d_head")
    sizes = get("n_layers"), heads, width, get("d_vocab"), get("n_ctx"), get("d_mlp") or 4 * width
    rotary = get("positional_embedding_type", "standard") != "standard"
    if rotary or get("n_key_value_heads") or get("gated_mlp") or "RMS" in str(get("normalization_type", "LN")):
        return _bridge(llama(*sizes, get("n_key_value_heads") or heads), kw.get("tokenizer"))
    return _bridge(gpt2(*sizes), kw.get("tokenizer"))


def _from_module(model: Any, *args: Any, tokenizer: Any = None, **kw: Any) -> Any:
    return _build(model, *args, tokenizer=tokenizer, **kw) if SIDE == "bridge" else _bridge(model, tokenizer)


def pytest_sessionstart(session: pytest.Session) -> None:
    global _build
    from transformer_lens.model_bridge import TransformerBridge, sources

    _build = sources.build_bridge_from_module
    sources.build_bridge_from_module = _from_module
    TransformerBridge.boot_transformers = staticmethod(_boot_transformers)
    TransformerBridge.boot_native = staticmethod(_boot_native)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" or not report.passed:
        error = call.excinfo
        text = "" if error is None else f"{error.type.__name__}: {error.value}"[:600]
        _found[report.nodeid] = (
            report.outcome if report.when == "call" else f"{report.outcome} in {report.when}",
            text,
        )
        if RESULTS:
            Path(RESULTS).write_text(json.dumps(_found, indent=1), encoding="utf-8")

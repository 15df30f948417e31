"""Models of given shapes with random weights, the same for every contender."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def neox(layers: int, width: int, vocab: int, heads: int) -> Any:
    """A GPT-NeoX (the class of Pythia) in eval mode."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(lambda: GPTNeoXForCausalLM(config))


def llama(layers: int, width: int, vocab: int, heads: int) -> Any:
    """A Llama in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=4 * width, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _seeded(lambda: LlamaForCausalLM(config))


def mistral(layers: int, width: int, vocab: int, heads: int, window: int) -> Any:
    """A Mistral in eval mode, each of whose positions sees ``window`` of them."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(sliding_window=window, **_decoder(layers, width, vocab, heads))
    return _seeded(lambda: MistralForCausalLM(config))


def jamba(layers: int, width: int, vocab: int, heads: int) -> Any:
    """A Jamba in eval mode, two Mamba layers for each with attention."""
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        attn_layer_period=3, attn_layer_offset=1, num_experts=1, mamba_d_state=16, **_decoder(layers, width, vocab, heads)
    )  # fmt: skip
    return _seeded(lambda: JambaForCausalLM(config))


def _decoder(layers: int, width: int, vocab: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "intermediate_size": 4 * width, "max_position_embeddings": 2048,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip


def rnn(cell: str, layers: int, width: int, vocab: int) -> Any:
    """A stack of LSTM or GRU layers, in eval mode.

    Weights are four times PyTorch's own: with those a change of one token fades within a few positions, and results would
    agree whatever was run.
    """
    from probelens.models import RNNLM

    made = _seeded(lambda: RNNLM(cell, d_vocab=vocab, d_model=width, hidden_size=width, n_layers=layers))
    with torch.no_grad():
        for weight in made.layers.parameters():
            weight.mul_(4)
    return made


def mamba(layers: int, width: int, vocab: int, **options: Any) -> Any:
    """A Mamba in eval mode.

    transformers' own scale of random weights, 0.1, makes a model of this depth chaotic: its float32 logits are
    2e-4 from its float64 ones. With 0.02, as in the other models, results can be compared.
    """
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, state_size=16, expand=2, initializer_range=0.02,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **options,
    )  # fmt: skip
    return _seeded(lambda: MambaForCausalLM(config))


def _seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


def bridge(module: nn.Module) -> Any:
    """A TransformerBridge over a copy of the weights: it rewrites the modules that it is given."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    twin: Any = copy.deepcopy(module)
    made = build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config)
    made.eval()
    return made


def tokens(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def spectrum(rows: int, width: int, seed: int = 0) -> Tensor:
    """Features whose covariance has a power-law spectrum, in a random basis. (rows, width)"""
    gen = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(width, width, generator=gen)).Q
    scale = torch.arange(1, width + 1).float() ** -0.5
    return (torch.randn(rows, width, generator=gen) * scale) @ basis


def readable(features: Tensor, classes: int, noise: float, seed: int = 0) -> Tensor:
    """Class ids that a linear map of standardised features tells in part. (rows,)"""
    gen = torch.Generator().manual_seed(seed)
    x = (features - features.mean(0)) / features.std(0)
    logits = x @ torch.randn(x.shape[1], classes, generator=gen) / x.shape[1] ** 0.5
    return (logits + noise * torch.randn(logits.shape, generator=gen)).argmax(-1)

"""Formal models built from a config: classes of transformers and torch, every weight fixed by the seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from probelens.errors import InputError
from probelens.models.config import FormalConfig
from probelens.models.rnn_lm import RNNLM

__all__ = ["build", "config_of", "n_params"]


def build(config: FormalConfig) -> nn.Module:
    """Make the model that a config describes, with initial weights that depend on its seed alone.

    The Transformer is `transformers.GPTNeoXForCausalLM`, Mamba `MambaForCausalLM`, Mamba-2
    `Mamba2ForCausalLM`, each with its library's initialisation, an untied head and no dropout; LSTM
    and GRU are `RNNLM` with torch's. Then the embedding is drawn again with `embedding_std`.

    Args:
        config: What to build.

    Returns:
        The model, in float32 on the CPU, in eval mode. `config_of(model)` gives the config back.

    Raises:
        InputError: `config` is not a FormalConfig.

    Examples:
        >>> model = build(FormalConfig("lstm", d_vocab=12))
        >>> n_params(model)
        845820
        >>> model(torch.tensor([[0, 3, 1]])).shape
        torch.Size([1, 3, 12])
    """
    if not isinstance(config, FormalConfig):
        kind = type(config).__name__
        raise InputError(f"build() takes a FormalConfig, not a {kind}. Write build(FormalConfig('lstm', d_vocab=12)).")
    # Initialisers take no generator of their own. torch.manual_seed would reseed every accelerator too, which fork_rng
    # does not undo for devices it was not given.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.default_generator.manual_seed(config.seed)
        model = construct(config)
        embedding = model.embedding if isinstance(model, RNNLM) else model.get_input_embeddings()  # type: ignore[operator]
        with torch.no_grad():
            embedding.weight.normal_(0.0, config.embedding_std)
    model.formal_config = config  # type: ignore[assignment]
    return model.eval()


def n_params(model: nn.Module) -> int:
    """Number of trainable parameters, a shared one counted once.

    Args:
        model: Any module.

    Returns:
        The count.
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def config_of(model: nn.Module) -> FormalConfig | None:
    """The config that a formal model was built from.

    Args:
        model: A module, possibly not a formal model.

    Returns:
        The config, or None where the model was not made by `build` or `load`.
    """
    config = getattr(model, "formal_config", None)
    return config if isinstance(config, FormalConfig) else None


def construct(config: FormalConfig) -> nn.Module:
    """The model with the weights that its class initialises."""
    if config.arch in ("lstm", "gru"):
        sizes = {"d_vocab": config.d_vocab, "d_model": config.d_model, "n_layers": config.n_layers}
        return RNNLM(config.arch, hidden_size=config.width, **sizes)
    import transformers

    # Formal vocabularies give no meaning to these ids, and their defaults may lie outside.
    common: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    common |= {"vocab_size": config.d_vocab, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers}
    common["tie_word_embeddings"] = False
    if config.arch == "transformer":
        hf = transformers.GPTNeoXConfig(**common, num_attention_heads=config.n_heads, intermediate_size=config.width)
        return transformers.GPTNeoXForCausalLM(hf)
    expand = config.width // config.d_model
    common |= {"expand": expand, "state_size": config.state_size, "conv_kernel": config.conv_kernel}
    if config.arch == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**common))
    heads = {"head_dim": config.d_head, "num_heads": config.width // config.d_head, "n_groups": 1}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**common, **heads))

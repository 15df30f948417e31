"""Formal models built from a config: classes of transformers and torch, every weight fixed by the seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from probelens.errors import InputError
from probelens.models.config import FormalConfig
from probelens.models.rnn_lm import RNNLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
        raise InputError(
            f"build() takes a FormalConfig, not a {type(config).__name__}. "
            "Write build(FormalConfig('lstm', d_vocab=12))."
        )
    with _seeded(config.seed), torch.inference_mode(False):
        model = construct(config)
        with torch.no_grad():
            embedding_of(model).weight.normal_(0.0, config.embedding_std)
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


def embedding_of(model: nn.Module) -> nn.Embedding:
    """The token embedding of a formal model."""
    return model.embedding if isinstance(model, RNNLM) else model.get_input_embeddings()  # type: ignore[operator]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for the block, and restore it at the end.

    Initialisers take no generator of their own. `torch.manual_seed` would reseed every
    accelerator too, which fork_rng does not undo for devices it was not given.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def construct(config: FormalConfig) -> nn.Module:
    """The model with the weights that its class initialises."""
    if config.arch in ("lstm", "gru"):
        return RNNLM(
            config.arch,
            d_vocab=config.d_vocab,
            d_model=config.d_model,
            hidden_size=config.width,
            n_layers=config.n_layers,
        )
    import transformers

    common = {
        "vocab_size": config.d_vocab,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "tie_word_embeddings": False,
        # Formal vocabularies give no meaning to these ids, and their defaults may lie outside.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    hf: PretrainedConfig
    if config.arch == "transformer":
        hf = transformers.GPTNeoXConfig(**common, num_attention_heads=config.n_heads, intermediate_size=config.width)
        return transformers.GPTNeoXForCausalLM(hf)
    expand = config.width // config.d_model
    if config.arch == "mamba":
        hf = transformers.MambaConfig(
            **common, expand=expand, state_size=config.state_size, conv_kernel=config.conv_kernel
        )
        return transformers.MambaForCausalLM(hf)
    hf = transformers.Mamba2Config(
        **common,
        expand=expand,
        state_size=config.state_size,
        conv_kernel=config.conv_kernel,
        head_dim=config.d_head,
        num_heads=config.width // config.d_head,
        n_groups=1,
    )
    return transformers.Mamba2ForCausalLM(hf)

"""Tiny models of every family, with random weights large enough that every edit shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, HEADS = 23, 16, 3, 4


class Recurrent(nn.Module):
    """Embedding, recurrent layers one module each (or one fused stack), head."""

    def __init__(
        self, cell: type[nn.RNNBase], fused: bool = False, bidirectional: bool = False, batch_first: bool = True
    ):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, WIDTH)
        kw = {"batch_first": batch_first, "bidirectional": bidirectional}
        wide = WIDTH * (1 + bidirectional)
        if fused:
            self.layers = nn.ModuleList([cell(WIDTH, WIDTH, LAYERS, **kw)])
        else:
            self.layers = nn.ModuleList([cell(WIDTH if i == 0 else wide, WIDTH, **kw) for i in range(LAYERS)])
        self.head = nn.Linear(wide, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x, _ = layer(x)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(x)


def _hf(cls: str, config: str, **kw: object) -> nn.Module:
    import transformers

    return getattr(transformers, cls)(getattr(transformers, config)(**kw))


def neox(parallel: bool = True) -> nn.Module:
    return _hf(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, intermediate_size=32, max_position_embeddings=64, use_parallel_residual=parallel,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return _hf(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        n_positions=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def llama() -> nn.Module:
    return _hf(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, intermediate_size=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def gemma2() -> nn.Module:
    return _hf(
        "Gemma2ForCausalLM", "Gemma2Config", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, intermediate_size=32, head_dim=4, sliding_window=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def mamba() -> nn.Module:
    return _hf(
        "MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        state_size=4, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def mamba2() -> nn.Module:
    return _hf(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        state_size=8, num_heads=4, head_dim=8, n_groups=2, chunk_size=4, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


ZOO: dict[str, Callable[[], nn.Module]] = {
    "neox": neox,
    "neox-sequential": lambda: neox(parallel=False),
    "gpt2": gpt2,
    "llama": llama,
    "gemma2": gemma2,
    "mamba": mamba,
    "mamba2": mamba2,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm-fused": lambda: Recurrent(nn.LSTM, fused=True),
    "gru-fused-time-first": lambda: Recurrent(nn.GRU, fused=True, batch_first=False),
    "lstm-bidirectional": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "gru-bidirectional-fused": lambda: Recurrent(nn.GRU, fused=True, bidirectional=True),
}
TRANSFORMERS = ("neox", "neox-sequential", "gpt2", "llama", "gemma2")
SSMS = ("mamba", "mamba2")
CAUSAL = tuple(name for name in ZOO if "bidirectional" not in name)


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 32, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_GQA = {**_BASE, "num_key_value_heads": 2}
_GPT = {
    "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_FALCON = {k: v for k, v in _BASE.items() if k not in ("intermediate_size", "max_position_embeddings")}
_OPT = {**_FALCON, "ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {
    "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip

# Decoders whose blocks are attention and MLP: class, config, options.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GQA, "sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {**_GQA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GQA, "head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GQA, **_MOE, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GQA, "head_dim": 4}),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {
            **_GQA, "head_dim": 4, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", _BASE),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GQA, "sliding_window": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": WIDTH}),
    "opt-norm-after": (
        "OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon-sequential": (
        "FalconForCausalLM", "FalconConfig",
        {**_FALCON, "parallel_attn": False, "alibi": True, "multi_query": False, "bias": True},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GQA),
    "bloom": (
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GQA),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GQA),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_GQA, "residual_multiplier": 0.5}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_GQA, "head_dim": 4}),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {
            **_GQA, "head_dim": 4, "intermediate_size_mlp": 32, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 4,
        },
    ),
    "bart": (
        "BartForCausalLM", "BartConfig",
        {
            "vocab_size": VOCAB, "d_model": WIDTH, "decoder_layers": LAYERS, "decoder_attention_heads": HEADS,
            "decoder_ffn_dim": 32, "max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "forced_eos_token_id": None,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {
            **_GQA, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip

# Decoders that mix attention with something else, or have none.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jamba": (
        "JambaForCausalLM", "JambaConfig",
        {
            **_GQA, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 3,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM", "Zamba2Config",
        {
            **_BASE, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 4, "mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 4,
            "num_key_value_heads": 4, "adapter_rank": 4,
        },
    ),
    "rwkv": (
        "RwkvForCausalLM", "RwkvConfig",
        {
            "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "attention_hidden_size": WIDTH,
            "intermediate_size": 32, "bos_token_id": 0, "eos_token_id": 0,
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        {
            **{k: v for k, v in _BASE.items() if k != "max_position_embeddings"}, "num_key_value_heads": 1,
            "head_dim": 4, "lru_width": WIDTH, "intermediate_size": 64, "attention_window_size": 4, "conv1d_width": 4,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**_GQA, **_MIXED, "attn_layer_indices": [1]}),
    "falcon-h1": (
        "FalconH1ForCausalLM", "FalconH1Config",
        {
            **_GQA, **_MIXED, "head_dim": 4, "mamba_d_ssm": 32, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75,
            "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.875], "attention_out_multiplier": 1.5,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {
            **_GQA, **_MOE, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        {
            **_GQA, "initializer_range": 0.1, "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "falcon-mamba": (
        "FalconMambaForCausalLM", "FalconMambaConfig",
        {
            "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        },
    ),
}  # fmt: skip

# Encoders that read tokens both ways, under a head for masked tokens or for the whole sequence.
_BERT = {**_BASE, "pad_token_id": 1}
_DISTIL = {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 32, "pad_token_id": 1}
_MODERN = {**_BASE, "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 0, "local_attention": 4}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_BERT, "max_position_embeddings": 66}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", _MODERN),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 8}),
    "deberta": (
        "DebertaV2ForMaskedLM", "DebertaV2Config", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "bert-tagger": ("BertForTokenClassification", "BertConfig", {**_BERT, "num_labels": 5}),
}  # fmt: skip
# One answer for each sequence or picture, and bare encoders.
CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-classifier": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 3}),
    "roberta-classifier": (
        "RobertaForSequenceClassification", "RobertaConfig", {**_BERT, "max_position_embeddings": 66, "num_labels": 3},
    ),
    "distilbert-classifier": (
        "DistilBertForSequenceClassification", "DistilBertConfig", {**_DISTIL, "num_labels": 3},
    ),
    "modernbert-classifier": ("ModernBertForSequenceClassification", "ModernBertConfig", {**_MODERN, "num_labels": 3}),
    "llama-classifier": ("LlamaForSequenceClassification", "LlamaConfig", {**_GQA, "num_labels": 3}),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {
            "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 32,
            "image_size": 8, "patch_size": 4, "num_labels": 5,
        },
    ),
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": LAYERS, "encoder_attention_heads": 2,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 24, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": LAYERS,
    "num_heads": HEADS, "decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
# Encoder-decoders; the encoder has two blocks and, but in T5, two heads.
ENCODER_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "t5-gated": (
        "T5ForConditionalGeneration", "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart-whole": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "marian": ("MarianMTModel", "MarianConfig", _SEQ2SEQ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _SEQ2SEQ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {
            **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"}, "max_source_positions": 8,
            "max_target_positions": 32, "num_mel_bins": 8, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip

# Models of the mamba-ssm package, whose sources come from the package index.
PACKAGED: dict[str, dict[str, Any]] = {
    "mamba-ssm": {"kind": "Mamba1"},
    "mamba-ssm-2": {"kind": "Mamba2", "fused_add_norm": False},
}
EVERY = (*ZOO, *DECODERS, *HYBRIDS, *PACKAGED)


def more(name: str, seed: int = 0, scale: float = 3.0, **change: Any) -> nn.Module:
    """Any model of ``EVERY`` in eval mode; skips the test where it can't be had. ``change``: other options."""
    if name in ZOO:
        return build(name, seed)
    if name in PACKAGED:
        from real_models import mamba_ssm
        from real_models.fetch import or_skip

        sizes = {"d_model": WIDTH, "n_layer": LAYERS, "vocab_size": VOCAB, "pad_vocab_size_multiple": 1}
        return or_skip(lambda: mamba_ssm.build(**{**sizes, **PACKAGED[name]}, seed=seed))
    import transformers

    cls, config, options = {**DECODERS, **HYBRIDS, **ENCODERS, **CLASSIFIERS, **ENCODER_DECODERS}[name]
    if name.startswith(("t5", "whisper")):
        scale = min(scale, 1.5)  # T5 doesn't scale its scores, and Whisper's tables of positions are drawn large
    if not hasattr(transformers, cls):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _hf(cls, config, **{**options, **change})
        with torch.no_grad():
            for key, p in model.named_parameters():
                if key.endswith("dt_bias"):
                    p.zero_()  # drawn so low that hardly anything is written to the state
                elif p.ndim >= 2 and "A_log" not in key:
                    p.mul_(2 * scale if "mamba." in key else scale)
    return model.eval()


def build(name: str, seed: int = 0, scale: float = 3.0) -> nn.Module:
    """A model of the zoo in eval mode; ``scale`` enlarges the matrices so that effects aren't lost in rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ZOO[name]()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.ndim == 2 and "A_log" not in key:
                    p.mul_(scale if name in TRANSFORMERS + SSMS else 1.5)
    return model.eval()


def tokens(n: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


def inputs(name: str, n: int = 2, length: int = 8, seed: int = 0) -> Any:
    """What a model of this name runs on: tokens, pictures, or sound and the tokens of the decoder."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return torch.randn(n, 3, 8, 8, generator=generator)
    if name == "whisper":
        return {
            "input_features": torch.randn(n, 8, 16, generator=generator),
            "decoder_input_ids": tokens(n, length, seed),
        }
    if name in ENCODER_DECODERS:
        return {"input_ids": tokens(n, length + 2, seed + 9), "decoder_input_ids": tokens(n, length, seed)}
    return tokens(n, length, seed)


def logits(model: nn.Module, x: Tensor, **kw: object) -> Tensor:
    """What the user's model returns without us."""
    with torch.no_grad():
        out = model(x, **kw)
    return out if isinstance(out, Tensor) else out.logits


class Around(nn.Module):
    """A model in which an early layer also goes straight to the output, around the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](self.embed(ids))[0]
        return self.head(torch.cat([first, self.layers[1](first)[0]], -1))

"""Tiny models of every family, with random weights large enough that every edit shows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, HEADS = 23, 16, 3, 4


class Recurrent(nn.Module):
    """Embedding, recurrent layers one module each (or one fused stack), head."""

    def __init__(
        self,
        cell: type[nn.RNNBase],
        fused: bool = False,
        bidirectional: bool = False,
        batch_first: bool = True,
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


def logits(model: nn.Module, x: Tensor, **kw: object) -> Tensor:
    """What the user's model returns without us."""
    with torch.no_grad():
        out = model(x, **kw)
    return out if isinstance(out, Tensor) else out.logits

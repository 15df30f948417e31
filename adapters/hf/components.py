"""The modules of a block and around the blocks under the names that TransformerLens 4 gives them."""

from __future__ import annotations

from torch import nn

from probelens.adapters.hf.blocks import MIDDLE, SANDWICH, BlockParts, first_child, join

# The norm that reads the residual stream first in a block.
_FIRST = (
    "ln_1", "input_layernorm", "ln1", "norm1", "norm_1", "pre_self_attn_layernorm", "attn_norm", "ln_attn",
    "self_attn_layer_norm", "layernorm_before", "layer_norm1", "pre_attention_layernorm", "attention_norm",
    "operator_norm", "temporal_pre_norm", "input_layer_norm", "norm",
)  # fmt: skip
_SECOND = (*MIDDLE, "pre_feedforward_layernorm", "ln_mlp", "final_layer_norm")
_POSITIONS = ("wpe", "embed_positions", "embeddings.position_embeddings", "positions_embed")
_QUERIES = {
    "q": ("q_proj", "q", "query", "q_lin"),
    "k": ("k_proj", "k", "key", "k_lin"),
    "v": ("v_proj", "v", "value", "v_lin"),
}
# What an attention has that changes its queries and keys after their projection.
TURNING = ("rotary_emb", "embed_positions", "q_norm", "q_layernorm", "query_norm")
NORMS = ("ln1", "ln2", "ln1_post", "ln2_post", "norm", "ln_final")
_ASKED = "TransformerLens makes it when asked, one copy of the residual stream for each head"
# Why names of TransformerLens name nothing here, by their last part.
REASONS = {
    "hook_result": "TransformerLens makes it when asked (set_use_attn_result); cache.stack_head_results() gives what each head writes",
    **dict.fromkeys(("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"), f"{_ASKED}; edit attn.hook_q, hook_k or hook_v"),
    **dict.fromkeys(("hook_cos", "hook_sin"), "the rotary embedding's two tables are one module's output; use its path"),
    "hook_hidden_states": "it is hook_attn_out",
}  # fmt: skip


def of_block(block: nn.Module, parts: BlockParts) -> dict[str, str]:
    """Paths below a block, by TransformerLens' names of what it consists of."""
    norms = _norms(block)
    found = {name: own for name, own in norms.items() if own and not isinstance(block.get_submodule(own), nn.Identity)}
    attention, down = parts.attention, parts.attn_down
    if attention and down and down.startswith(f"{attention}.") and parts.attn_out != down:
        inner = block.get_submodule(attention)
        found |= {"attn": attention, "attn.o": down}
        found |= {f"attn.{name}": join(attention, own) for name, own in queries(inner).items()}
    if parts.mlp and parts.down and parts.mlp_out != parts.down:
        found |= {"mlp": parts.mlp, "mlp.out": parts.down}
    elif parts.down:
        found |= {"mlp.out": parts.down}
    if parts.up and parts.up_linear:
        found |= {"mlp.gate": parts.up, "mlp.in": parts.up_linear}
    elif parts.up:
        found |= {"mlp.in": parts.up}
    return found


def queries(attention: nn.Module) -> dict[str, str]:
    """The projections to queries, keys and values, where there are three."""
    found = {name: first_child(attention, options) for name, options in _QUERIES.items()}
    return {name: own for name, own in found.items() if own} if all(found.values()) else {}


def _norms(block: nn.Module) -> dict[str, str | None]:
    if first_child(block, ("attention.output.LayerNorm",)) and first_child(block, ("output.LayerNorm",)):
        return {"ln1": "attention.output.LayerNorm", "ln2": "output.LayerNorm"}
    after: tuple[str, ...] = next((pair for pair in SANDWICH if all(first_child(block, (n,)) for n in pair)), ())
    rest = [name for name in _SECOND if name not in after]
    return {
        "ln1": first_child(block, [name for name in _FIRST if name not in after]), "ln2": first_child(block, rest),
        **dict(zip(("ln1_post", "ln2_post"), after, strict=False)),
    }  # fmt: skip


def of_model(root: nn.Module, base: str) -> dict[str, str]:
    """Paths of what is beside the blocks; ``base`` is that of the module that holds their list."""
    positions = first_child(root.get_submodule(base), _POSITIONS)
    return {} if positions is None else {"pos_embed": join(base, positions)}

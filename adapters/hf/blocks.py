"""What stands where in a block of a transformers model, told from the names of its submodules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from probelens.hooks.wrapping import unadapted

ATTENTION = ("attention", "attn", "self_attn", "self_attention")
_CROSS = ("encoder_attn", "cross_attn", "crossattention")
MIXERS = (
    "mixer", "mamba", "mamba_decoder.mamba", "linear_attn", "conv", "temporal_block", "recurrent_block",
    "time_mixing", "mlstm_layer", "rnn", "lstm", "gru",
)  # fmt: skip
MLP = ("mlp", "feed_forward", "ffn", "mlp_block", "channel_mixing", "block_sparse_moe", "moe", "shared_mlp")
UP = ("gate_proj", "dense_h_to_4h", "c_fc", "fc1", "fc_in", "up_proj", "w1", "lin1", "wi_0", "wi")
UP_LINEAR = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"))
DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "w2", "lin2", "Wo", "wo")
OUT = ("o_proj", "dense", "c_proj", "out_proj", "out_lin", "Wo", "o")
# What an attention may call the width of a head, of its values first, and the number of its heads.
_HEAD_WIDTH = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")
_HEAD_COUNT = ("num_heads", "n_heads", "num_attention_heads", "n_head")
# Norms that read the residual between the two halves of a block.
MIDDLE = (
    "post_attention_layernorm", "ln_2", "ln2", "norm_2", "pre_ff_layernorm", "channel_pre_norm", "ffn_norm",
    "pre_mlp_layernorm", "norm_ffn", "mlp_norm", "layernorm_after", "layer_norm2",
)  # fmt: skip
# What is done to the outputs of attention and MLP before they join the residual: norms mostly.
SANDWICH = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_feedforward_layernorm"),
    ("post_norm1", "post_norm2"),
    ("attn_sconv", "mlp_sconv"),
)
# Norms of the sum of residual and attention, in blocks that norm every sum.
_SUMS = ("self_attn_layer_norm", "ln_1", "sa_layer_norm")
_WEIGHED = ("attn_alpha_factor", "mlp_alpha_factor", "attn_residual_add_idx")
_NORM_AFTER = ("bart", "blenderbot-small", "marian", "mvp", "plbart", "trocr", "openai-gpt")
_PARALLEL_TYPES = ("gptj", "codegen", "phi", "cohere", "cohere2", "cohere2_moe")


@dataclass(frozen=True)
class BlockParts:
    """Module paths below one block; None where it has no such part."""

    attention: str | None = None
    # Whatever mixes positions in attention's place or beside it: a state space model, a recurrence.
    mixer: str | None = None
    # "" where the MLP's layers belong to the block itself, as in OPT.
    mlp: str | None = None
    # The modules whose outputs, times the scale, are added to the residual, and the one whose input is the residual
    # between the two halves.
    attn_out: str | None = None
    mixer_out: str | None = None
    mlp_out: str | None = None
    attn_scale: float = 1.0
    mixer_scale: float = 1.0
    mlp_scale: float = 1.0
    middle: str | None = None
    # Whether that module reads the residual beside the block, which then also adds to it.
    middle_beside: bool = True
    # Instead of it, in blocks that norm every sum: the module whose output is the residual between the two halves.
    middle_out: str | None = None
    # Attention to an encoder's output, its last layer, and the module whose output it adds.
    cross: str | None = None
    cross_down: str | None = None
    cross_out: str | None = None
    # Why what the parts put out doesn't sum to the residual.
    unsummed: str | None = None
    # The MLP's first layer, whose output goes into the activation, the other one that multiplies, and the last.
    up: str | None = None
    up_linear: str | None = None
    down: str | None = None
    # Attention's last layer, which reads z.
    attn_down: str | None = None
    # Why a point is missing, by the last part of its name.
    absent: dict[str, str] = field(default_factory=dict)


def first_child(module: nn.Module, names: Sequence[str]) -> str | None:
    """The first of these names that is a submodule (not None) of ``module``."""
    for name in names:
        try:
            module.get_submodule(name)
        except AttributeError:
            continue
        return name
    return None


def join(*parts: str) -> str:
    """A module path out of parts, empty ones left out."""
    return ".".join(p for p in parts if p)


def parallel(block: nn.Module, config: Any) -> bool:
    """Whether attention and MLP of a block both read the residual that enters it."""
    flags = ((block, "use_parallel_residual"), (config, "parallel_attn"), (config, "new_decoder_architecture"))
    kind = str(getattr(config, "model_type", ""))
    return kind in _PARALLEL_TYPES or any(getattr(owner, flag, False) for owner, flag in flags)


def uses_interface(attention: nn.Module) -> bool:
    """Whether an attention calls transformers' attention interface, so that ours can take its place."""
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ())


def head_count(attention: nn.Module, down: nn.Module, heads: int) -> int | None:
    """How many vectors side by side the output projection ``down`` reads; None where the layer doesn't say.

    Layers of one model differ: some are made with another number of heads, others were pruned. So the width that the
    projection reads and the width of a head decide, and ``heads``, the config's number, only where the layer keeps neither
    the width of a head nor a count, and runs transformers' attention interface.
    """
    width = width_in(down)
    for name in _HEAD_WIDTH:
        size = getattr(attention, name, None)
        if isinstance(size, int) and size > 0:
            return width // size if width and width % size == 0 else None
    counts = [getattr(attention, name, None) for name in _HEAD_COUNT]
    count = next((n for n in counts if isinstance(n, int) and n > 0), heads if uses_interface(attention) else 0)
    return count if count and not (width and width % count) else None


def width_in(layer: nn.Module) -> int | None:
    """Width of what a linear layer reads; None where it isn't one."""
    layer = unadapted(layer)
    size = getattr(layer, "in_features", None)
    if isinstance(size, int):
        return size
    # transformers' Conv1D keeps its weight as (in, out).
    weight = getattr(layer, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, nn.Parameter) and hasattr(layer, "nf") else None


def parts_of(block: nn.Module, config: Any, crosses: bool = False) -> BlockParts:
    """Find the parts of a block. One whose output isn't what it adds to the residual is left out, with the reason.

    ``crosses`` says that the block also attends to an encoder; many have the modules for it and don't use them.
    """
    for known in (_bert, _t5):
        if (found := known(block, crosses)) is not None:
            return BlockParts(**found)
    attention, mixer = first_child(block, ATTENTION), first_child(block, MIXERS)
    if mixer is not None and uses_interface(block.get_submodule(mixer)):
        # Nemotron-H and RecurrentGemma call every kind of mixer by one name, attention among them.
        attention, mixer = mixer, None
    if attention is not None and getattr(config, "model_type", "") == "rwkv":
        attention, mixer = None, attention
    if attention is not None:
        nested = first_child(block.get_submodule(attention), ("attention",))
        attention = join(attention, nested or "")
    found = {"attention": attention, "mixer": mixer, "absent": {}}
    found.update(_mlp(block))
    found["attn_out"], found["mixer_out"] = attention, mixer
    if attention is not None:
        down = first_child(block.get_submodule(attention), OUT)
        found["attn_down"] = join(attention, down) if down else None
        if _adds_residual(block.get_submodule(attention)):
            found["attn_out"] = found["attn_down"]
    if crosses and (cross := first_child(block, _CROSS)):
        down = first_child(block.get_submodule(cross), OUT)
        norm = first_child(block, ("post_cross_attn_layernorm",))
        found.update(cross=cross, cross_down=join(cross, down) if down else None, cross_out=norm or cross)
    found.update(_scales(block, config))
    _order(block, config, found)
    return BlockParts(**found)


# What the blocks of DistilBERT, ViT, CLIP and BART consist of.
_KNOWN = (
    ("attention", "sa_layer_norm", "ffn"), ("attention", "layernorm_after", "mlp"), ("self_attn", "layer_norm2", "mlp"),
    ("self_attn", "self_attn_layer_norm", "fc1"),
)  # fmt: skip


def is_known(block: nn.Module) -> bool:
    """Whether a block is built as those of BERT, DistilBERT, ViT, CLIP, T5 or BART."""
    if _bert(block, False) is not None or _t5(block, False) is not None:
        return True
    return any(all(first_child(block, (name,)) for name in names) for names in _KNOWN)


def reads_both_ways(attention: nn.Module, config: Any) -> bool:
    """Whether an attention of an encoder reads later positions too, as far as it says."""
    causal = getattr(attention, "is_causal", None)
    return not (getattr(config, "is_decoder", False) if causal is None else causal)


def _bert(block: nn.Module, crosses: bool) -> dict[str, Any] | None:
    """A block as BERT has it, or None: every sum is made, and mostly normed, in a module called output."""
    names = ("attention.output.dense", "intermediate.dense", "output.dense")
    inner = first_child(block, ("attention.self", "attention.attention"))
    if inner is None or not all(first_child(block, (name,)) for name in names):
        return None
    attended, up, down = names
    found: dict[str, Any] = {
        "attention": inner, "attn_down": attended, "attn_out": attended, "mlp": "", "mlp_out": down, "up": up, "down": down,
    }  # fmt: skip
    if crosses and first_child(block, ("crossattention.self",)):
        found.update(cross="crossattention.self", cross_down="crossattention.output.dense")
        found["cross_out"] = found["cross_down"]
    if first_child(block, ("output.LayerNorm",)):
        found |= {"middle_out": "crossattention" if "cross" in found else "attention", "unsummed": _normed(block)}
    else:
        found["middle"] = first_child(block, ("layernorm_after", "LayerNorm"))
    return found


def _t5(block: nn.Module, crosses: bool) -> dict[str, Any] | None:
    """A block as T5 has it, or None: a list of two or three layers that add the residual themselves."""
    attention = first_child(block, ("layer.0.SelfAttention",))
    last = len(list(block.get_submodule("layer").children())) - 1 if attention else 0
    mlp = first_child(block, (f"layer.{last}.DenseReluDense", f"layer.{last}.mlp")) if last > 0 else None
    if attention is None or mlp is None:
        return None
    inner = block.get_submodule(mlp)
    up, down = first_child(inner, ("wi_0", "wi")), first_child(inner, ("wo",))
    found: dict[str, Any] = {
        "attention": attention, "attn_down": join(attention, "o"), "attn_out": attention, "mlp": mlp, "mlp_out": mlp,
        "up": join(mlp, up) if up else None, "down": join(mlp, down) if down else None,
        "up_linear": join(mlp, "wi_1") if up == "wi_0" else None, "middle": f"layer.{last}", "middle_beside": False,
    }  # fmt: skip
    cross = first_child(block, ("layer.1.EncDecAttention",))
    if crosses and cross:
        found.update(cross=cross, cross_down=join(cross, "o"), cross_out=cross)
    return found


def _mlp(block: nn.Module) -> dict[str, Any]:
    mlp = first_child(block, MLP)
    if mlp is None and first_child(block, ("fc1",)) and first_child(block, ("fc2",)):
        return {"mlp": "", "mlp_out": "fc2", "up": "fc1", "down": "fc2"}
    if mlp is None:
        return {}
    inner = block.get_submodule(mlp)
    found: dict[str, Any] = {"mlp": mlp, "mlp_out": mlp}
    up, down = first_child(inner, UP), first_child(inner, DOWN)
    found["up"] = join(mlp, up) if up else None
    found["down"] = join(mlp, down) if down else None
    for gate, linear in UP_LINEAR:
        if up == gate and first_child(inner, (linear,)):
            found["up_linear"] = join(mlp, linear)
    if _adds_residual(inner):
        found["mlp_out"] = found["down"]
    if up is None:
        fused = first_child(inner, ("gate_up_proj", "input_linear", "Wi"))
        what = (
            f"its gate and its input are one projection, {join(mlp, fused)}" if fused else "it is a mixture of experts"
        )
        lacking = ("hook_pre",) if down else ("hook_pre", "hook_post")
        found["absent"] = dict.fromkeys(lacking, f"this MLP has no such layer: {what}")
    return found


def _adds_residual(module: nn.Module) -> bool:
    # Bloom and MPT hand the residual to the attention or MLP, which adds it itself.
    return "residual" in inspect.signature(type(module).forward).parameters


def _scales(block: nn.Module, config: Any) -> dict[str, float]:
    for name in ("residual_multiplier", "residual_scale"):
        factor = getattr(block, name, None)
        if isinstance(factor, (int, float)) and factor != 1:
            return dict.fromkeys(("attn_scale", "mixer_scale", "mlp_scale"), float(factor))
    names = (("attn_scale", "attn_out_multiplier"), ("mixer_scale", "ssm_out_multiplier"))
    factors = {part: getattr(block, name, None) for part, name in names}
    return {part: float(factor) for part, factor in factors.items() if isinstance(factor, (int, float))}


def _no_sums(block: nn.Module, config: Any) -> str | None:
    """Why the parts of a block don't simply add to its residual, or None."""
    kind = f"blocks of this model ({type(block).__name__})"
    if any(hasattr(block, name) for name in _WEIGHED):
        return f"{kind} weigh their residual anew at every sum, so nothing is simply added to it"
    if hasattr(block, "attn_hc"):
        return f"{kind} keep several residual streams and mix them, so nothing is simply added to one"
    return None


def _normed(block: nn.Module) -> str:
    return f"blocks of this model ({type(block).__name__}) norm every sum, so nothing is simply added to the residual"


def _order(block: nn.Module, config: Any, found: dict[str, Any]) -> None:
    """Which modules' outputs join the residual, and who reads it in between."""
    reason = _no_sums(block, config)
    if reason is not None:
        found.update(attn_out=None, mixer_out=found["mixer"] or found["attention"], mlp_out=None)
        found["absent"] |= dict.fromkeys(("hook_attn_out", "hook_mlp_out", "hook_resid_mid"), reason)
        return
    late = getattr(block, "do_layer_norm_before", True) is False
    if late or first_child(block, ("sa_layer_norm",)) or str(getattr(config, "model_type", "")) in _NORM_AFTER:
        sums = ("encoder_attn_layer_norm", *_SUMS) if found.get("cross") else _SUMS
        found |= {"middle_out": first_child(block, sums), "unsummed": _normed(block)}
        return
    if parallel(block, config):
        found["absent"]["hook_resid_mid"] = (
            f"blocks of this kind ({type(block).__name__}) are parallel (attention and MLP both read resid_pre), "
            "so no residual exists between them; use hook_resid_pre, hook_attn_out or hook_mlp_out"
        )
        return
    if all(first_child(block, (name,)) for name in ("block_sparse_moe", "shared_mlp")):
        found.update(mlp_out=None)
        found["absent"]["hook_mlp_out"] = "what this block adds is the sum of two MLPs, block_sparse_moe and shared_mlp"
    for after_attention, after_mlp in SANDWICH:
        if first_child(block, (after_mlp,)) and first_child(block, (after_attention,)):
            found.update(attn_out=after_attention if found["attention"] else None, mlp_out=after_mlp)
            middle = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", *MLP)
            found["middle"] = first_child(block, [name for name in middle if name != after_attention])
            return
    if found.get("mlp") is None:
        return
    names = ("final_layer_norm",) if found["mlp"] == "" else MIDDLE
    found["middle"] = first_child(block, names)

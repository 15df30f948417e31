"""Checkpoints in mamba-ssm's own format, read into transformers' Mamba and Mamba-2 classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probelens.errors import InputError

CONFIG, WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")
_DEFAULTS: dict[str, Any] = {
    "d_model": 2560, "n_layer": 64, "vocab_size": 50277, "d_intermediate": 0, "ssm_cfg": {}, "attn_layer_idx": [],
    "rms_norm": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 8, "tie_embeddings": True,
}  # fmt: skip
# Options of the layers that transformers' classes have too, under their names there.
_BOTH = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
_MAMBA = {**_BOTH, "dt_rank": "time_step_rank"}
_MAMBA2 = {
    **_BOTH,
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "chunk_size": "chunk_size",
    "dt_limit": "time_step_limit",
}
# Options that say how weights were first drawn or which kernel runs: nothing to a finished checkpoint.
_NO_MATTER = {
    "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path", "A_init_range", "conv_init",
    "use_mem_eff_path", "process_group", "sequence_parallel",
}  # fmt: skip
# Options that transformers' Mamba-2 has one value of only.
_FIXED = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}


def is_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is mamba-ssm's: no ``model_type``, but ``d_model`` and ``n_layer``."""
    return "model_type" not in config and {"d_model", "n_layer"} <= set(config)


def read_config(name: str, **hub: Any) -> dict[str, Any]:
    """The ``config.json`` of a folder or of a model on the hub; empty if there is none."""
    import json

    path = _file(name, CONFIG, hub)
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def load(name: str, *, dtype: torch.dtype | None = None, **hub: Any) -> nn.Module:
    """A checkpoint in mamba-ssm's format as a ``MambaForCausalLM`` or ``Mamba2ForCausalLM``, in eval mode.

    ``name`` is a folder as written by ``MambaLMHeadModel.save_pretrained``, or a model of that kind on the hub; without
    ``dtype`` that of the checkpoint's projections is kept. Options that transformers' class doesn't have, missing or
    unknown weights and files that can't be read are InputErrors.
    """
    config = {**_DEFAULTS, **read_config(name, **hub)}
    module = _empty(name, config)
    weights = _weights(name, hub)
    weights = {key.replace("backbone.embedding.", "backbone.embeddings."): value for key, value in weights.items()}
    if config["tie_embeddings"]:
        weights.setdefault("lm_head.weight", weights.get("backbone.embeddings.weight", torch.empty(0)))
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as err:
        raise InputError(f"the weights of {name!r} don't fit its {CONFIG}: {err}") from err
    module.tie_weights()  # type: ignore[operator]
    kind = dtype or module.get_submodule("backbone.layers.0.mixer.in_proj").weight.dtype
    module.config._name_or_path = name  # type: ignore[union-attr]
    return module.to(kind).eval()  # type: ignore[arg-type]


def _empty(name: str, config: dict[str, Any]) -> nn.Module:
    """The model without storage for its weights."""
    import transformers

    for option, value in (("attn_layer_idx", []), ("d_intermediate", 0), ("rms_norm", True)):
        if config[option] != value:
            raise _unsupported(name, option, config[option])
    layers = dict(config["ssm_cfg"] or {})
    second = layers.pop("layer", "Mamba1") == "Mamba2"
    renamed, width = (_MAMBA2 if second else _MAMBA), config["d_model"]
    options: dict[str, Any] = {}
    for option, value in layers.items():
        if option in renamed:
            options[renamed[option]] = tuple(value) if isinstance(value, list) else value
        elif option == "d_ssm" and value in (None, layers.get("expand", 2) * width):
            continue
        elif option not in _NO_MATTER and _FIXED.get(option, object()) != value:
            raise _unsupported(name, f"ssm_cfg.{option}", value)
    multiple = config["pad_vocab_size_multiple"]
    options.update(
        vocab_size=-(-config["vocab_size"] // multiple) * multiple, hidden_size=width,
        num_hidden_layers=config["n_layer"], residual_in_fp32=config["residual_in_fp32"],
        tie_word_embeddings=config["tie_embeddings"], bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    if second:
        options = {"head_dim": 64, "n_groups": 1, **options}
        options["num_heads"] = options.get("expand", 2) * width // options["head_dim"]
    with torch.device("meta"):
        if not second:
            return transformers.MambaForCausalLM(transformers.MambaConfig(**options))
        module: nn.Module = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**options))
    if options["n_groups"] > 1 and not hasattr(module.get_submodule("backbone.layers.0.mixer.norm"), "group_size"):
        raise InputError(
            f"{name!r} normalises each of its {options['n_groups']} groups separately, which transformers "
            f"{transformers.__version__} does not support: upgrade it (5.15 and later do)"
        )
    return module


def _unsupported(name: str, option: str, value: Any) -> InputError:
    return InputError(
        f"{name!r} is a mamba-ssm checkpoint with {option}={value!r}, which transformers' classes don't have. "
        "Load it with mamba_ssm.MambaLMHeadModel.from_pretrained and give that to pl.wrap()."
    )


def _weights(name: str, hub: dict[str, Any]) -> dict[str, Tensor]:
    for file in WEIGHTS:
        path = _file(name, file, hub)
        if path is None:
            continue
        try:
            if file.endswith(".safetensors"):
                from safetensors.torch import load_file

                return load_file(path)
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as err:
            # A truncated or foreign file fails in many ways, according to what is read first.
            raise InputError(f"can't read {path}: {err}") from err
    raise InputError(f"{name!r} has a mamba-ssm {CONFIG}, but none of {', '.join(WEIGHTS)}")


def _file(name: str, file: str, hub: dict[str, Any]) -> str | None:
    if os.path.isdir(name):
        path = os.path.join(name, file)
        return path if os.path.isfile(path) else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
            **hub,
        )
    except (OSError, ValueError):
        # No id of the hub at all: transformers says so itself, when it is asked to load it.
        return None
    return None if found is None else str(found)

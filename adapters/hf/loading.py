"""Models of the Hugging Face hub, or of a folder, and their tokenizers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from probelens.errors import InputError

# What `task=` may say, and the class of transformers that loads it.
TASKS = {
    "causal-lm": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM", "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq", "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification", "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification", "base": "AutoModel",
}  # fmt: skip


MOST_LAYERS = 10_000  # many times what the deepest model has; each costs time and memory before any weight is read
_DEPTHS = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
                     "decoder_layers", "depth"})  # fmt: skip


def load_pretrained(
    name: str, *, device: str | torch.device | None, dtype: torch.dtype | str | None, trust_remote_code: bool,
    strict: bool = True, task: str | None = None, **kw: Any,
) -> tuple[nn.Module, Any]:  # fmt: skip
    """A model and its tokenizer (None if it has none) from the hub or a folder.

    The class is the one that the config names, or that of ``task``. A checkpoint in mamba-ssm's own format is read into transformers' class. Where the hub can't be reached, the local
    cache is all that is asked. What can't be found or read is an InputError.
    """
    from transformers import AutoTokenizer

    from probelens.adapters import mamba_ssm_files as mamba_ssm
    from probelens.adapters.hf.hub import unreachable

    options = {"trust_remote_code": trust_remote_code, **kw}
    away = unreachable(name, options)
    if away is not None:
        options["local_files_only"] = True
        # transformers looks for a LoRA adapter by options of its own.
        options["adapter_kwargs"] = {**(kw.get("adapter_kwargs") or {}), "local_files_only": True}
    hub = {k: v for k, v in options.items() if k in ("revision", "cache_dir", "token", "local_files_only")}
    if mamba_ssm.is_config(mamba_ssm.read_config(name, **hub)):
        # Before transformers sees it: that takes "mamba" in a name for the type and its own defaults for sizes.
        module = mamba_ssm.load(name, dtype=_dtype(dtype), **hub)
    else:
        made = _class_of(name, task, hub, trust_remote_code)
        try:
            module, info = made.from_pretrained(
                name, output_loading_info=True, **({"dtype": dtype} if dtype else {}), **options
            )
        except Exception as err:
            # Of a damaged folder transformers raises errors of every kind.
            why = str(err) if isinstance(err, (OSError, ValueError)) else f"{type(err).__name__}: {err}"
            if away is not None:
                absent = isinstance(err, OSError)
                cached = (
                    "it isn't in the local cache" if absent else f"its copy in the local cache can't be used: {why}"
                )
                raise InputError(
                    f"can't load {name!r}: {away}, and {cached.splitlines()[0]}\n"
                    "Give a folder made by save_pretrained(), or try again with a connection. HF_ENDPOINT names "
                    "another hub; with HF_HUB_OFFLINE=1 only the cache (HF_HOME) is asked."
                ) from err
            raise InputError(
                f"can't load {name!r} as {_described(made)}: {why}\n"
                "Give the id of a model on the Hugging Face hub or a folder made by save_pretrained()."
            ) from err
        if strict:
            _require_whole(name, module, info)
    module = module.eval() if device is None else module.eval().to(device)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if os.path.isdir(name) and not any(os.path.exists(os.path.join(name, file)) for file in files):
        # Where there are no files AutoTokenizer makes an empty tokenizer of the model's class.
        return module, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except (OSError, ValueError, KeyError, ImportError):
        # A model saved without a tokenizer is complete: it takes tokens, and text is refused by name.
        tokenizer = None
    return module, tokenizer


def _class_of(name: str, task: str | None, hub: dict[str, Any], trust_remote_code: bool) -> Any:
    """The class of transformers to load a checkpoint with: that of the task, else the one that its config names.

    A causal language model where the config names none that transformers has, and where there is no config to read.
    """
    import transformers

    if task is not None and task not in TASKS:
        raise InputError(f"task={task!r} is not known. Allowed: {', '.join(map(repr, TASKS))}")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except Exception:  # of whatever kind: loading the model with it will raise the same
        return getattr(transformers, TASKS[task]) if task is not None else transformers.AutoModelForCausalLM
    _need_possible(name, config.to_dict())
    if task is not None:
        return getattr(transformers, TASKS[task])
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    remote = getattr(config, "auto_map", None) or {}
    for found in (getattr(transformers, name, None) for name in names if not remote):
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    # The class comes with the checkpoint, and the kind of its own that the map names is the one to ask for it.
    kinds = [kind for kind in TASKS.values() if kind in remote]
    return getattr(transformers, kinds[0] if kinds else "AutoModelForCausalLM")


def _need_possible(name: str, config: dict[str, Any]) -> None:
    """Refuse a config of absurdly many layers before they are made, also in the configs of its parts."""
    for key, value in config.items():
        if isinstance(value, dict):
            _need_possible(name, value)
        elif key in _DEPTHS and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(
                f"the config of {name!r} says {key}={value:,}, and at most {MOST_LAYERS:,} are made. Correct its config.json."
            )


def _described(made: Any) -> str:
    kinds = {kind: task.replace("-", " ") for task, kind in TASKS.items()} | {
        "AutoModelForCausalLM": "causal language model"
    }
    return f"a {kinds.get(made.__name__, made.__name__)}"


def _require_whole(name: str, module: nn.Module, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights of the model as they were drawn, or has weights that it doesn't use."""
    unused = info["unexpected_keys"]
    if not type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        # A checkpoint of an encoder brings the heads of other tasks along, and the pooler that they read.
        prefix, children = f"{module.base_model_prefix}.", dict(module.named_children())
        base = children.get(prefix[:-1])
        tops = children if base is None else dict(base.named_children())
        unused = [
            key
            for key in unused
            if (key.startswith(prefix) or base is None)
            and (top := key.removeprefix(prefix).split(".")[0]) in tops
            and top != "pooler"
        ]
    wrong = {
        "has no weights for": info["missing_keys"], "has weights that it doesn't use": unused,
        "has weights of another shape for": [key[0] for key in info["mismatched_keys"]],
    }  # fmt: skip
    said = [f"{what} {len(keys)} of them, such as {min(keys)!r}" for what, keys in wrong.items() if keys]
    if said:
        poolers = all(".pooler." in f".{key}" for key in (*info["missing_keys"], *unused))
        bare = ". Give add_pooling_layer=False to load it without the pooler" if poolers else ""
        raise InputError(
            f"the checkpoint {name!r} doesn't fit the {type(module).__name__} of its config: it {'; '.join(said)}. Check "
            f"config.json against the weights, or give strict=False to load it all the same, missing weights drawn at random{bare}."
        )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(found, torch.dtype):
        raise InputError(f'dtype={dtype!r} is not known. Give a torch.dtype, its name such as "bfloat16", or "auto"')
    return found

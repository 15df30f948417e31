"""The rest of what TransformerLens code calls on a model: small methods over those of HookedModel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.hooks.config import Call, ModelConfig
from probelens.hooks.inputs import ModelInputs
from probelens.hooks.names import Points
from probelens.hooks.points import Direction, HookFn
from probelens.hooks.shorthand import Names

__all__ = ["LensMethods", "explained"]

_WEIGHTS = {
    "W_E", "W_pos", "W_E_pos", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate", "b_Q", "b_K",
    "b_V", "b_O", "b_in", "b_out", "QK", "OV", "blocks", "embed", "pos_embed", "ln_final", "unembed",
    "tokens_to_residual_directions", "accumulated_bias", "all_composition_scores", "fold_layer_norm",
    "process_weights", "enable_compatibility_mode", "set_use_attn_result", "set_use_split_qkv_input",
    "set_use_attn_in", "set_use_hook_mlp_in", "tl_parameters", "stack_params_for",
}  # fmt: skip
_ELSEWHERE = {
    "generate": "call model.module.generate(...), inside `with model.hooks(...)` if hooks should act on it",
    "state_dict": "it is model.module.state_dict()",
    "named_parameters": "it is model.module.named_parameters()",
    "mod_dict": "the points are in model.hook_dict, the modules in model.module.named_modules()",
}
_CACHE_WEIGHTS = {
    "compute_head_results", "stack_head_results", "get_neuron_results", "stack_neuron_results", "logit_attrs",
    "logit_lens", "apply_ln_to_stack", "get_full_resid_decomposition", "compute_ssm_state",
    "compute_ssm_effective_attention",
}  # fmt: skip
# What is about one part of a block, and whether a model has such a part.
_PARTS: dict[str, tuple[str, Callable[[ModelConfig], int]]] = {
    **dict.fromkeys(
        (
            "compute_head_results", "stack_head_results", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "QK",
            "OV", "all_composition_scores", "set_use_attn_result", "set_use_split_qkv_input", "set_use_attn_in",
        ), ("attention heads", lambda cfg: cfg.n_heads),
    ),
    **dict.fromkeys(
        ("get_neuron_results", "stack_neuron_results", "W_in", "W_out", "W_gate", "b_in", "b_out", "set_use_hook_mlp_in"),
        ("MLP", lambda cfg: cfg.d_mlp),
    ),
}  # fmt: skip


class _Elsewhere(InputError, AttributeError):
    """An attribute that is not here, with the way to it. hasattr() stays False."""


def explained(owner: str, name: str, model: Any = None) -> AttributeError:
    """The error for an attribute that TransformerLens has and ``owner`` doesn't.

    Args:
        owner: "HookedModel" or "ActivationCache".
        name: The attribute.
        model: The model, to say what its architecture has no part for.
    """
    if name in _PARTS and model is not None and not _PARTS[name][1](model.cfg):
        part = _PARTS[name][0]
        return _Elsewhere(f"{owner} has no {name!r}: this {type(model.module).__name__} has no {part}")
    if owner == "HookedModel" and name in _ELSEWHERE:
        return _Elsewhere(f"HookedModel has no {name!r}: {_ELSEWHERE[name]}")
    if name in (_WEIGHTS if owner == "HookedModel" else _CACHE_WEIGHTS):
        return _Elsewhere(
            f"{owner} has no {name!r}: it needs the weights in TransformerLens' own layout, and a wrapped model keeps "
            "them as they are (model.module). Build a TransformerBridge of a copy of the model for that part: "
            "transformer_lens.model_bridge.sources.build_bridge_from_module"
        )
    return AttributeError(f"{owner!r} object has no attribute {name!r}")


class LensMethods(ModelInputs):
    """The part of a HookedModel that is there for code written for TransformerLens."""

    points: Points

    def __getattr__(self, name: str) -> Any:
        # Not while the model is being made: without its adapter there is no cfg to ask.
        raise explained("HookedModel", name, self if "adapter" in self.__dict__ else None)

    def add_perma_hook(self, name: Names, hook: HookFn, dir: Direction = "fwd") -> None:
        """``add_hook`` with ``is_permanent=True``.

        Args:
            name: As for ``run_with_cache``.
            hook: fn(tensor, hook) returning a tensor, or None for no change.
            dir: "fwd" or "bwd".
        """
        self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self, direction: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = False
    ) -> None:
        """``reset_hooks`` that leaves each point's ``ctx`` alone.

        Args:
            direction: "fwd", "bwd" or "both".
            including_permanent: Also those added with ``is_permanent=True``.
        """
        self.reset_hooks(False, direction, including_permanent)

    def clear_contexts(self) -> None:
        """Empty every hook point's ``ctx``."""
        for point in self.points.named.values():
            point.ctx.clear()

    def add_caching_hooks(
        self, names_filter: Names = None, incl_bwd: bool = False,
        device: torch.device | str | None = None, remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Hooks that stay until ``reset_hooks`` and fill a dict whenever the model runs.

        Args:
            names_filter: As for ``run_with_cache``.
            incl_bwd: Keep gradients too, as ``name + "_grad"``.
            device: Where the copies go; None leaves them where they are.
            remove_batch_dim: Remove the batch axis, which must have size 1.
            cache: The dict to fill; None for a new one.

        Returns:
            The dict; empty until then.
        """
        cache, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, fn in fwd:
            self.add_hook(name, fn)
        for name, fn in bwd:
            self.add_hook(name, fn, "bwd")
        return cache

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """Next-token cross-entropy in nats.

        Args:
            logits: (batch, pos, d_vocab)
            tokens: (batch, pos)
            attention_mask: 1 for real tokens; padding is left out. (batch, pos)
            per_token: The loss of each prediction instead of their mean.

        Returns:
            () or, per token, (batch, pos − 1) with zeros at padding.
        """
        tokens = tokens.to(logits.device)
        mask = None if attention_mask is None else torch.as_tensor(attention_mask).to(logits.device)
        return self.adapter.loss(logits, Call((), {}, tokens, mask), per_token)

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token id.

        Args:
            int_token: Token id.

        Returns:
            Its text.
        """
        return self.to_str_tokens(torch.tensor([int_token]))[0]

    def get_token_position(
        self, single_token: str | int, input: str | Tensor, mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
    ) -> int:  # fmt: skip
        """Where a token stands in one text.

        Args:
            single_token: Text that is one token, or its id.
            input: Text, or tokens (pos,) or (1, pos).
            mode: Which one, if there are several.
            prepend_bos: As for ``to_tokens``.

        Returns:
            The position, counted from the start.

        Raises:
            InputError: The token isn't there, or ``input`` is a batch.
        """
        tokens = self.to_tokens(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input)
        if tokens.ndim > 1 and len(tokens) != 1:
            raise InputError(f"get_token_position needs one text, got tokens of shape {tuple(tokens.shape)}")
        if mode not in ("first", "last"):
            raise InputError(f"mode={mode!r} is not known. Allowed: 'first', 'last'")
        wanted = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        found = (tokens.reshape(-1) == wanted).nonzero().flatten().tolist()
        if not found:
            raise InputError(
                f"token {single_token!r} doesn't occur in the {tokens.numel()} tokens of the input"
            )
        return int(found[0 if mode == "first" else -1])

    if TYPE_CHECKING:

        def add_hook(
            self,
            name: Names,
            hook: HookFn,
            dir: Direction = "fwd",
            is_permanent: bool = False,
        ) -> None: ...

        def reset_hooks(
            self, clear_contexts: bool = True, direction: Literal["fwd", "bwd", "both"] = "both",
            including_permanent: bool = False,
        ) -> None: ...  # fmt: skip

        def get_caching_hooks(
            self, names_filter: Names = None, incl_bwd: bool = False,
            device: torch.device | str | None = None, remove_batch_dim: bool = False,
            cache: dict[str, Any] | None = None,
        ) -> tuple[dict[str, Any], Iterable[Any], Iterable[Any]]: ...  # fmt: skip

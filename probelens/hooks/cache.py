"""ActivationCache: the activations of one run by hook point name."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Literal

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, UnknownHookError, elsewhere
from probelens.hooks.forwards import device_of
from probelens.hooks.passes.recording import Slice, slice_positions
from probelens.hooks.protocol import Wrapped
from probelens.hooks.shorthand import GRAD, Names, NameTable, of_gradient
from probelens.numerics.linear_parts import held_norm, of_each_head, stacked_on_last

__all__ = ["ActivationCache"]


class ActivationCache(Mapping[str, Tensor]):
    """Activations by hook point name.

    ``cache["blocks.3.hook_resid_post"]``, ``cache["resid_post", 3]`` and ``cache["resid_post", -1]`` may be the same
    tensor. Whatever names one of the hook points that it has is a key, as in ``probelens.hooks.names.resolve``.
    Gradients of ``incl_bwd=True`` are under ``name + "_grad"``, of whatever names the point.

    Args:
        cache_dict: Name to activation, (batch, pos, ...).
        model: The model they come from.
        has_batch_dim: False once the batch axis of size 1 was removed.
    """

    def __init__(self, cache_dict: Mapping[str, Tensor], model: Wrapped | None, has_batch_dim: bool = True):
        self.cache_dict = dict(cache_dict)
        self.model = model
        self.has_batch_dim = has_batch_dim
        self._known = ({}, None) if model is None else (model.points.others(self.cache_dict), model.points.n_layers)

    def __copy__(self) -> ActivationCache:
        return ActivationCache(self.cache_dict, self.model, self.has_batch_dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationCache:
        """The tensors are copied, and the model is the same one."""
        return ActivationCache(copy.deepcopy(self.cache_dict, memo), self.model, self.has_batch_dim)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the tensors and their names, without the model."""
        return {**self.__dict__, "model": None}

    def _name(self, key: Names) -> str:
        if isinstance(key, str) and key in self.cache_dict:
            return key
        try:
            of = of_gradient(key)
            return self._table().one(key) if of is None else self._table(GRAD).one(of) + GRAD
        except UnknownHookError as err:
            part = self.model is not None and not self.model.points.named.keys() <= self.cache_dict.keys()
            chosen = " (what names_filter asked for)" if part else ""
            raise UnknownHookError(
                f"{err}{self._absent(key)}. This cache holds {len(self.cache_dict)} activations{chosen}; list them with "
                "cache.keys()"
            ) from None

    def _absent(self, key: Names) -> str:
        """Why the architecture has no such point; nothing where it has one or there is nothing to say."""
        reason = None if self.model is None else self.model.points.absent(key)
        return f" ({reason})" if reason else ""

    def _table(self, ending: str = "") -> NameTable:
        names = [name.removesuffix(ending) for name in self.cache_dict if name.endswith(ending)]
        return NameTable(names, *self._known)

    def __getitem__(self, key: Names) -> Tensor:
        return self.cache_dict[self._name(key)]

    def __contains__(self, key: object) -> bool:
        try:
            return self._name(key) in self.cache_dict  # type: ignore[arg-type]
        except UnknownHookError:
            return False

    def __getattr__(self, name: str) -> Any:
        raise elsewhere("ActivationCache", name, self.__dict__.get("model"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def keys(self) -> KeysView[str]:
        """Names of the activations, in the order of the forward pass."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        """The activations."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names with their activations."""
        return self.cache_dict.items()

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in self.cache_dict.values())
        return f"ActivationCache({len(self)} activations, {size / 2**20:.1f} MiB)"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ActivationCache:
        """Move every activation to a device or a dtype; changes this cache, and returns it.

        Args:
            device: Where to; None leaves it.
            dtype: Which dtype; None leaves it.

        Returns:
            This cache.
        """
        self.cache_dict = {n: t.to(device=device, dtype=dtype) for n, t in self.cache_dict.items()}
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """``torch.set_grad_enabled(mode)``, for the whole process, as in TransformerLens.

        Args:
            mode: Whether gradients are recorded from now on.
        """
        torch.set_grad_enabled(mode)

    def remove_batch_dim(self) -> ActivationCache:
        """Remove the batch axis; changes this cache, and returns it.

        Returns:
            This cache, with tensors (pos, ...).

        Raises:
            ShapeError: More than one example.
        """
        if not self.has_batch_dim:
            return self
        for name, tensor in self.cache_dict.items():
            if tensor.shape[0] != 1:
                raise ShapeError(
                    f"remove_batch_dim needs a batch of 1, but {name!r} has shape {tuple(tensor.shape)}. "
                    "Select one example first."
                )
        self.cache_dict = {n: t[0] for n, t in self.cache_dict.items()}
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Slice) -> ActivationCache:
        """A cache with some examples only; an int removes the batch axis.

        Args:
            batch_slice: None, int, slice, list or tensor of examples, or ``(start, stop)``.

        Returns:
            A new cache; this one is left alone.

        Raises:
            ShapeError: The batch axis is gone already, or no example is left.
        """
        if not self.has_batch_dim:
            raise ShapeError("this cache has no batch axis any more (remove_batch_dim was called)")
        index: Any = slice(*batch_slice) if isinstance(batch_slice, tuple) else batch_slice
        index = slice(None) if index is None else index
        kept = {n: t[index] for n, t in self.cache_dict.items()}
        if not isinstance(index, int) and any(not len(t) for t in kept.values()):
            raise ShapeError(f"examples {batch_slice!r} keep none of the batch. Leave them out to keep all")
        return ActivationCache(kept, self.model, not isinstance(index, int))

    def stack_activation(self, activation_name: str, layer: int = -1, sublayer_type: str | None = None) -> Tensor:
        """One activation of several layers in one tensor.

        Args:
            activation_name: Shorthand such as ``"resid_post"`` or ``"q"``.
            layer: Up to but without this layer; -1 for all.
            sublayer_type: "attn", "mlp", "mixer" or "rnn", where the name alone isn't enough.

        Returns:
            (layer, batch, pos, ...)

        Raises:
            UnknownHookError: The cache lacks one of them.
        """
        n_layers = self._table().n_layers
        upto = n_layers if layer in (None, -1) else layer
        if not 0 < upto <= n_layers:
            raise UnknownHookError(f"layer {layer} asked for, allowed are 1 to {n_layers}, or -1 for all")
        key = (sublayer_type,) if sublayer_type else ()
        return stacked_on_last([self[(activation_name, i, *key)] for i in range(upto)])

    def accumulated_resid(
        self, layer: int | None = None, incl_mid: bool = False, apply_ln: bool = False,
        pos_slice: Slice = None, mlp_input: bool = False, return_labels: bool = False,
    ) -> Tensor | tuple[Tensor, list[str]]:  # fmt: skip
        """The residual stream as it grows, layer by layer.

        Args:
            layer: Up to the input of this layer; None or -1 for the input of the final norm too.
            incl_mid: Also the residual between attention and MLP, where the block has one.
            apply_ln: Pass each through the model's final norm (the logit lens).
            pos_slice: Positions to keep.
            mlp_input: End with ``resid_mid`` of ``layer``.
            return_labels: Also names such as ``"3_pre"`` and ``"final_post"``.

        Returns:
            (component, batch, pos, d_model), and the labels if asked for.

        Raises:
            InputError: apply_ln on a model without a final norm.
            UnknownHookError: The cache lacks one of them.
        """
        n_layers = self._table().n_layers
        upto = n_layers if layer in (None, -1) else int(layer or 0)
        parts: list[Tensor] = []
        labels: list[str] = []
        for i in range(upto + 1):
            if i == n_layers:
                parts.append(self["resid_post", n_layers - 1])
                labels.append("final_post")
                break
            parts.append(self["resid_pre", i])
            labels.append(f"{i}_pre")
            if (incl_mid and i < upto) or (mlp_input and i == upto):
                parts.append(self["resid_mid", i])
                labels.append(f"{i}_mid")
        stacked = stacked_on_last([self._at(part, pos_slice) for part in parts])
        if apply_ln:
            if self.model is None or "ln_final" not in self.model.adapter.parts:
                raise InputError(
                    "apply_ln needs a model with a final norm; that of this cache has none, or is not with it"
                )
            norm = self.model.module.get_submodule(self.model.adapter.parts["ln_final"])
            with torch.no_grad():
                stacked = norm(stacked.to(device_of(norm) or stacked.device)).to(stacked.device)
        return (stacked, labels) if return_labels else stacked

    def decompose_resid(
        self, layer: int | None = None, mlp_input: bool = False, mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False, pos_slice: Slice = None, incl_embeds: bool = True, return_labels: bool = False,
    ) -> Tensor | tuple[Tensor, list[str]]:  # fmt: skip
        """What each layer adds to the residual stream; with the embedding, the parts sum to it.

        Args:
            layer: Up to the input of this layer; None or -1 for the input of the final norm.
            mlp_input: Also what attention (or the mixer) of ``layer`` adds.
            mode: "all", or only what "attn" (attention or mixer) or "mlp" adds.
            apply_ln: Not here: it needs the cached scales of TransformerLens' own norms.
            pos_slice: Positions to keep.
            incl_embeds: Also the embedding, and what else enters block 0 (position embeddings).
            return_labels: Also names such as ``"embed"``, ``"3_attn_out"`` and ``"3_mixer_out"``, both where
                a block has the two side by side; ``"0_pre_ln"`` is what RWKV's first norm makes of the embedding.

        Returns:
            (component, batch, pos, d_model), and the labels if asked for.

        Raises:
            InputError: apply_ln, a mode that isn't known, one that no block of this architecture has a part for, or
                an architecture whose parts don't sum to the residual stream.
            UnknownHookError: The cache lacks one of them.
        """
        if apply_ln:
            raise InputError(
                "apply_ln=True needs the cached scales of TransformerLens' own norms, which a wrapped model doesn't have. "
                "For the logit lens use accumulated_resid(apply_ln=True), which applies the final norm"
            )
        if mode not in ("all", "mlp", "attn"):
            raise InputError(f"mode={mode!r} is not known. Allowed: 'all', 'mlp', 'attn'")
        n_layers = self._table().n_layers
        upto = n_layers if layer in (None, -1) else int(layer)
        if incl_embeds and self.model is not None and (why := self.model.adapter.unsummed(upto)):
            raise InputError(f"the parts don't sum to the residual stream: {why}")
        parts = self._entering(upto + mlp_input > 0) if incl_embeds else {}
        for i in range(upto + (mlp_input and upto < n_layers)):
            mixers = self._mixers(i)
            has_mlp = ("mlp_out", i) in self or (mixers[0] == "attn_out" and not self._attn_only())
            if mode != "mlp":
                parts |= {f"{i}_{mixer}": self[mixer, i] for mixer in mixers}
            if mode != "attn" and i < upto and has_mlp:
                parts[f"{i}_mlp_out"] = self["mlp_out", i]
        if not parts or (mode == "mlp" and upto and all("mlp" not in name for name in parts)):
            what = f"mode={mode!r} up to layer {upto}{self._absent(('mlp_out', 0))}"
            raise InputError(f"no part of the residual stream is left for {what}")
        stacked = stacked_on_last([self._at(part, pos_slice) for part in parts.values()])
        return (stacked, list(parts)) if return_labels else stacked

    def stack_head_results(
        self, layer: int = -1, return_labels: bool = False, incl_remainder: bool = False, pos_slice: Slice = None,
        apply_ln: bool = False,
    ) -> Tensor | tuple[Tensor, list[str]]:  # fmt: skip
        """What each attention head writes: its part of ``attn.hook_z`` through the output projection, without the bias.

        Args:
            layer: The heads of the blocks before this one; -1 for all.
            return_labels: Also names such as ``"L3H5"``.
            incl_remainder: Also what the residual stream holds beside them.
            pos_slice: Positions to keep.
            apply_ln: Divide by the final norm's scale, as ``apply_ln_to_stack``.

        Returns:
            (layer · head, batch, pos, d_model), and the labels if asked for.

        Raises:
            InputError: No model with this cache, or a block without attention heads.
            UnknownHookError: The cache lacks ``attn.hook_z`` of one of them.
        """
        model = _with_model(self.model)
        upto = model.points.n_layers if layer in (None, -1) else int(layer)
        parts: list[Tensor] = []
        labels: list[str] = []
        for i in range(upto):
            if f"blocks.{i}.attn.hook_z" not in model.points.named:
                raise InputError(f"block {i} has no attention heads{self._absent(('z', i))}")
            site, out = model.points.named[f"blocks.{i}.attn.hook_z"].site, f"blocks.{i}.hook_attn_out"
            assert site is not None
            down, z = model.module.get_submodule(site.path), self._at(self["z", i], pos_slice)
            own = model.points.named[out].site if out in model.points.named else None
            parts += [part * (1.0 if own is None else own.scale) for part in of_each_head(down, z)]
            labels += [f"L{i}H{head}" for head in range(z.shape[-2])]
        if incl_remainder:
            resid = self._at(self["resid_post", upto - 1] if upto else self["resid_pre", 0], pos_slice)
            parts.append(resid - sum(parts))
            labels.append("remainder")
        if not parts:
            raise InputError(f"layer={layer} has no heads before it")
        stacked = stacked_on_last(parts)
        stacked = self.apply_ln_to_stack(stacked, pos_slice=pos_slice) if apply_ln else stacked
        return (stacked, labels) if return_labels else stacked

    def apply_ln_to_stack(
        self, residual_stack: Tensor, layer: int | None = None, mlp_input: bool = False, pos_slice: Slice = None,
        batch_slice: Slice = None, has_batch_dim: bool = True,
    ) -> Tensor:  # fmt: skip
        """The final norm of parts of the residual stream, its scale held at that of the whole; then they add up.

        Its weight is applied and its bias left out, so nothing needs to be folded.

        Args:
            residual_stack: (component, batch, pos, d_model), as ``decompose_resid`` and ``stack_head_results`` give it.
            layer: None, -1 or the number of blocks: the final norm.
            mlp_input: Not here.
            pos_slice: The positions that the stack was cut to.
            batch_slice: Examples to keep.
            has_batch_dim: Whether the stack still has its batch axis.

        Returns:
            Of the stack's shape: (component, batch, pos, d_model).

        Raises:
            InputError: Another norm than the final one, or a norm whose scale can't be told from its values.
            UnknownHookError: The cache lacks ``ln_final.hook_in`` (or ``resid_post`` of the last block).
        """
        model = _with_model(self.model)
        if mlp_input or layer not in (None, -1, model.points.n_layers) or "ln_final" not in model.adapter.parts:
            raise InputError(
                "apply_ln_to_stack holds the scale of the final norm: give layer=None, on a model with one"
            )
        norm = model.module.get_submodule(model.adapter.parts["ln_final"])
        whole = self._at(self["ln_final.hook_in"], pos_slice)
        if batch_slice is not None and has_batch_dim:
            residual_stack, whole = slice_positions(residual_stack, batch_slice), slice_positions(whole, batch_slice, 0)
        return held_norm(norm, whole)(residual_stack)

    def logit_attrs(
        self, residual_stack: Tensor, tokens: str | int | Tensor, incorrect_tokens: str | int | Tensor | None = None,
        pos_slice: Slice = None, batch_slice: Slice = None, has_batch_dim: bool = True,
    ) -> Tensor:  # fmt: skip
        """What each part of the residual stream adds to a logit, or to the difference of two.

        The parts add up to the logit but for the biases of the final norm and of the unembedding, and before any cap.

        Args:
            residual_stack: (component, batch, pos, d_model)
            tokens: The token whose logit it is: an id, text of one token, or ids (batch,), (pos,) or (batch, pos).
            incorrect_tokens: Tokens whose logits are subtracted: an id, text, or ids (batch,), (pos,) or (batch, pos).
            pos_slice, batch_slice, has_batch_dim: As for ``ActivationCache.apply_ln_to_stack``.

        Returns:
            (component, batch, pos)

        Raises:
            InputError: No unembedding with a weight (d_vocab, d_model).
            ShapeError: ``incorrect_tokens`` of another shape.
        """
        model = _with_model(self.model)
        head = model.module.get_submodule(model.adapter.parts["unembed"]) if "unembed" in model.adapter.parts else None
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] != residual_stack.shape[-1]:
            raise InputError("logit_attrs needs an unembedding with a weight (d_vocab, d_model)")
        toward = weight[_ids(model, tokens, weight.device)].detach()
        if incorrect_tokens is not None:
            against = weight[_ids(model, incorrect_tokens, weight.device)].detach()
            if against.shape != toward.shape:
                raise ShapeError("tokens and incorrect_tokens have different shapes")
            toward = toward - against
        stack = self.apply_ln_to_stack(
            residual_stack, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        if has_batch_dim and stack.ndim == 4 and toward.ndim == 2 and len(toward) == stack.shape[1]:
            toward = toward.unsqueeze(-2)  # one for each example, at all its positions
        return (stack * toward.to(stack)).sum(-1)

    def _entering(self, block: bool) -> dict[str, Tensor]:
        """What the sum starts from: the embedding, what is added to it, and the norm that block 0 begins with."""
        parts, resid = {"embed": self["hook_embed"]}, self["resid_pre", 0]
        if parts["embed"].shape != resid.shape:
            raise InputError(
                f"hook_embed has shape {tuple(parts['embed'].shape)}, the residual stream {tuple(resid.shape)}: the model "
                "projects one onto the other, so the embedding is no part of the sum. Give incl_embeds=False"
            )
        rest = resid - parts["embed"]
        if "hook_pos_embed" in self.cache_dict or bool(rest.any()):
            parts["pos_embed"] = rest
        if block and self.model is not None and self.model.adapter.renormed(0):
            parts["0_pre_ln"] = self["resid_mid", 0] - resid - sum(self[mixer, 0] for mixer in self._mixers(0))
        return parts

    def _mixers(self, layer: int) -> list[str]:
        """The parts before the MLP in a block: attention, a mixer, or the two side by side, and attention to an encoder."""
        kinds, model = ("mixer_out", "attn_out"), self.model
        names = self.cache_dict if model is None else model.points.named
        if model is None:
            found = {k: self._name((k, layer)) for k in kinds if (k, layer) in self}
        else:
            named = {k: model.points.alias(f"blocks.{layer}.hook_{k}") for k in kinds}
            found = {k: name for k, name in named.items() if name in names}
        # In attention blocks of hybrids both are names of one point.
        both = len({*found.values()}) > 1
        crossing = ["cross_attn_out"] * (f"blocks.{layer}.hook_cross_attn_out" in names)
        return (list(found) if both or list(found) == ["mixer_out"] else ["attn_out"]) + crossing

    def _attn_only(self) -> bool:
        return self.model is not None and self.model.adapter.cfg.attn_only

    def _at(self, part: Tensor, pos: Slice) -> Tensor:
        return slice_positions(part, pos, 1 if self.has_batch_dim else 0)


def _with_model(model: Wrapped | None) -> Wrapped:
    if model is None:
        raise InputError("this needs the model of the cache, which isn't with it")
    return model


def _ids(model: Wrapped, tokens: str | int | Tensor, device: torch.device) -> Tensor:
    if isinstance(tokens, str):
        tokens = model.to_single_token(tokens)  # type: ignore[attr-defined]
    return torch.as_tensor(tokens).to(device)

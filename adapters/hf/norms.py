"""A norm with taps: the scale that it divides by, and what it divides, before its weight and bias."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from probelens.errors import InputError
from probelens.hooks.forwards import refuse_replaced_forward, swapped_forward
from probelens.hooks.switchboard import Tap
from probelens.hooks.trials import agree

AXES = {"hook_scale": ("batch", "pos", "scale"), "hook_normalized": ("batch", "pos", "d_model")}
NOTES = {
    "hook_scale": "what the norm divides by",
    "hook_normalized": "the input without its mean, where the norm takes it away, over the scale; weight and bias follow",
}
_EPSILON = ("eps", "variance_epsilon", "epsilon")


def instrumented(norm: nn.Module, tap: Tap) -> contextlib.AbstractContextManager[None]:
    """Run a LayerNorm or RMSNorm with ``tap`` while the context lasts.

    While hooks only read, the norm's own result goes on. An InputError where its class's own forward isn't what it runs,
    or where no form of the two gives what it returns.
    """
    refuse_replaced_forward(norm, ("torch", "transformers", "mamba_ssm"))

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        own = type(norm).forward(norm, *args, **kwargs)
        if len(given) != 1:
            raise _refused(norm, "it isn't called with one tensor")
        x = _with_positions(norm, given[0], tap.batch())
        centers, weight, bias = _form(norm, x, own.view_as(x))
        centered, scale = _parts(norm, x, centers)
        edited = tap.edits("hook_scale") or tap.edits("hook_normalized")
        scale = tap("hook_scale", scale)
        normalized = tap("hook_normalized", centered / scale)
        return _affine(normalized, weight, bias).to(own.dtype).view_as(own) if edited else own

    return swapped_forward(norm, forward, here=tap.here)


def _with_positions(norm: nn.Module, x: Tensor, batch: int | None) -> Tensor:
    """(batch, pos, d), also where a block flattens the first two, as OPT's do."""
    if x.ndim == 2 and batch and len(x) % batch == 0:
        return x.unflatten(0, (batch, -1))
    if x.ndim != 3:
        raise _refused(norm, f"it is called with a tensor {tuple(x.shape)}, not (batch, pos, d)")
    return x


def _parts(norm: nn.Module, x: Tensor, centers: bool) -> tuple[Tensor, Tensor]:
    """What is divided, and what it is divided by, at least in single precision."""
    epsilon = next((float(getattr(norm, name)) for name in _EPSILON if hasattr(norm, name)), None)
    if epsilon is None:
        raise _refused(norm, "what it adds to the variance isn't known")
    wide = x if x.element_size() >= 4 else x.float()
    centered = wide - wide.mean(-1, keepdim=True) if centers else wide
    return centered, (centered.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def _affine(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias


def _form(norm: nn.Module, x: Tensor, own: Tensor) -> tuple[bool, Tensor | None, Tensor | None]:
    """Whether the norm takes the mean away, its weight and its bias: those that give what it returned."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if any(part is not None and part.shape != x.shape[-1:] for part in (weight, bias)):
        raise _refused(norm, "its weight isn't one number for each feature")
    weights = [None] if weight is None else [weight, 1 + weight]
    for centers in (isinstance(norm, nn.LayerNorm), not isinstance(norm, nn.LayerNorm)):
        centered, scale = _parts(norm, x, centers)
        for one in weights:
            if agree(_affine(centered / scale, one, bias).to(own.dtype), own):
                return centers, one, bias
    raise _refused(norm, "it gives other numbers than a LayerNorm or an RMSNorm")


def _refused(norm: nn.Module, why: str) -> InputError:
    return InputError(
        f"the inside of a {type(norm).__name__} can't be read or edited here: {why}. Hook its hook_in or hook_out instead"
    )

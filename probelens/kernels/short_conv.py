"""Reference forward of LFM2's short convolution: two gates around a convolution over a few positions, with taps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from probelens.kernels.conv import causal_conv
from probelens.kernels.tap import KernelPoint, NullTap, Tap, masked, offer


def _point(axes: str, note: str) -> KernelPoint:
    return KernelPoint(("batch", "pos", axes), note)


SHORT_CONV_POINTS: dict[str, KernelPoint] = {
    "hook_in": _point("d_model", "what the mixer gets, after the block's norm, padding still in it"),
    "hook_in_proj": _point("d_in_proj", "B, C and x, side by side; reaches everything"),
    "hook_conv_B": _point("d_model", "gate before the convolution: what x is multiplied with"),
    "hook_conv_C": _point("d_model", "gate after the convolution: what hook_conv is multiplied with"),
    "hook_conv_x": _point("d_model", "what the convolution reads, before the gate B"),
    "hook_conv_in": _point("d_model", "B * x, what the convolution reads; an edit reaches the next positions, too"),
    "hook_conv": _point("d_model", "output of the convolution, trimmed, before the gate C"),
    "hook_conv_y": _point("d_model", "C * hook_conv, what the output projection reads"),
    "hook_out": _point("d_model", "what the mixer adds to the residual stream"),
}
"""Points of ``short_conv_mixer``, in the order in which they are reached."""


def short_conv_mixer(
    module: nn.Module,
    hidden: Tensor,
    tap: Tap | None = None,
    *,
    conv_state: Tensor | None = None,
    attention_mask: Tensor | None = None,
    return_state: bool = False,
    **unused: Any,
) -> Any:
    """The forward of a short convolution, equal to the module's own, tapped at every point of ``SHORT_CONV_POINTS``.

    Args:
        module: A mixer with ``in_proj, conv, out_proj``.
        hidden: Input. (batch, pos, d_model)
        tap: Listens and edits; None for nobody.
        conv_state: What the convolution read before ``hidden``. (batch, d_model, kernel size or one less)
        attention_mask: 1 for real positions, 0 for padding, which enters neither gate nor convolution. (batch, pos)
        return_state: Also give what the convolution read last.
        unused: A state and an offset, which other mixers take.

    Returns:
        Output (batch, pos, d_model); with ``return_state`` a pair of it and (what the convolution read last, None).

    Source:
        transformers' Lfm2ShortConv.
    """
    tap = tap if tap is not None else NullTap()
    m: Any = module
    hidden = masked(offer(tap, "hook_in", hidden), attention_mask)
    B, C, x = offer(tap, "hook_in_proj", m.in_proj(hidden)).chunk(3, dim=-1)
    B, C, x = offer(tap, "hook_conv_B", B), offer(tap, "hook_conv_C", C), offer(tap, "hook_conv_x", x)
    x = offer(tap, "hook_conv_in", B * x)
    x, after = causal_conv(x, m.conv.weight, m.conv.bias, conv_state, need_state=return_state)
    y = offer(tap, "hook_conv_y", C * offer(tap, "hook_conv", x))
    out = offer(tap, "hook_out", m.out_proj(y))
    return (out, (after, None)) if return_state else out

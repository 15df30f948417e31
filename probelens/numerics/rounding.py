"""What rounding leaves of activations that were taken away: a probe that standardises it would read it as a signal."""

from __future__ import annotations

import torch
from torch import Tensor

from probelens.numerics.modes import exact

__all__ = ["without_rounding"]

_UNITS = 2.0  # units in the last place; rounding a constant gives a deviation of half a unit at most


@exact
def without_rounding(clean: Tensor, ablated: Tensor, mask: Tensor) -> Tensor:
    """Ablated activations whose features are constant where they vary by no more than rounding.

    An ablation of x rounds it to the dtype's epsilon of its size, and that error depends on x. So a feature that varies
    by less than that, over all rows or at one position, holds nothing of its own and is set to its mean there.

    Args:
        clean: Activations before. (n, pos, d)
        ablated: Activations after. (n, pos, d)
        mask: The rows that count. (n, pos)

    Returns:
        The ablated activations; the very same where none is rounding. (n, pos, d)

    Examples:
        >>> clean = 100 + torch.randn(200, 1, 2, generator=torch.Generator().manual_seed(0))
        >>> ablated = clean.mean(0) + 1e-7 * clean
        >>> ablated[..., 1] = clean[..., 1]
        >>> without_rounding(clean, ablated, torch.ones(200, 1, dtype=torch.bool)).std((0, 1)) > 0
        tensor([False,  True])
    """
    keep = mask.to(ablated.device)[..., None]
    count = keep.double().sum((0, 1)).clamp_min(1)
    sizes = [(x.double().square().where(keep, 0.0).sum((0, 1)) / count).sqrt() for x in (clean, ablated)]
    size = torch.maximum(*sizes)
    # The map itself is computed in double precision, and mixes the features.
    noise = _UNITS * (
        torch.finfo(ablated.dtype).eps * size
        + torch.finfo(torch.float64).eps * ablated.shape[-1] ** 0.5 * size.amax(-1, keepdim=True)
    )
    out = ablated
    for over in ((0,), (0, 1)):
        rows = keep.double().sum(over, keepdim=True).clamp_min(1)
        mean = out.double().where(keep, 0.0).sum(over, keepdim=True) / rows
        spread = ((out.double() - mean).square().where(keep, 0.0).sum(over, keepdim=True) / rows).sqrt()
        still = spread <= noise
        if bool((still & (spread > 0)).any()):
            out = torch.where(still & keep, mean.to(out.dtype), out)
    return out

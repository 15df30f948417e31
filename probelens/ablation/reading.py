"""Whether the model reads a site at all, and whether a linear readout is what reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.ablation.answers import filled, where
from probelens.hooks.edits.values import Replace
from probelens.hooks.inputs import mask_for_model
from probelens.hooks.model import HookedModel
from probelens.hooks.trials import agree
from probelens.running.activations import Activations
from probelens.running.shapes import output_shape
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import sweep
from probelens.tasks.examples import spread_mask

TRIED_ON = 16  # sequences: that nothing reads a site is a matter of how the model is built, and shows on any


def unread_sites(
    model: HookedModel, batch: Any, acts: Activations, names: Sequence[str], batch_size: int, memory: int | None, seed: int
) -> set[str]:  # fmt: skip
    """The sites at which noise of the activations' own size, where the mask is True, leaves the output as it is.

    The caller leaves out those where ``moves_answers`` knows already that it doesn't. Normal noise with the root mean square of each site's activations is added in some sequences; what is compared is one
    random projection of the logits at every position, which stays where all logits do.
    """
    if not names:
        return set()
    rows = where(batch, False).nonzero().flatten()[:TRIED_ON].cpu()
    few, gen = batch[rows], torch.Generator().manual_seed(seed)

    def noisy(name: str) -> Condition:
        x = acts[name][rows]
        mask = spread_mask(few.mask, x.shape[1])
        real = x[mask.to(x.device)].double()
        noise = torch.randn(x.shape, generator=gen) * float(real.square().mean().sqrt())
        moved = x + noise.to(x)
        return Condition((name,), (Intervention(name, lambda some: Replace(mask[some], moved[some])),))

    def project(logits: Tensor, mask: Tensor) -> Tensor:
        if logits.ndim == 1:
            return logits.float()
        if each and logits.shape[1] != mask.shape[1]:
            logits = filled(logits, mask)
        weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(seed))
        return logits.float() @ weights.to(logits.device)

    told = mask_for_model(model, few.attention_mask, few.inputs)
    each = len(output_shape(model, few.examples, told)) == 3
    read = Read(project, None, {"mask": where(few, each)}, by_position=each)
    found = sweep(
        model, few.inputs, [noisy(name) for name in names], read, batch_size=batch_size, memory=memory,
        attention_mask=few.attention_mask,
    )  # fmt: skip
    dtype = model.cfg.dtype
    return {name for name, one in zip(names, found.values, strict=True) if agree(one, found.base, dtype)}


def moves_answers(values: Tensor, clean: Tensor, scored: Tensor) -> bool:
    """Whether removals at a site have changed so many answers that the model must read it, without a trial of its own.

    One of them must have moved 5 % of the scored values by 1 %: rounding alone doesn't. (removal, example, pos), (example, pos)
    """
    same = torch.isclose(values[:, scored], clean[scored], rtol=0.01, atol=0.01, equal_nan=True)
    return bool(((~same).float().mean(1) >= 0.05).any())


def feeds_readout(model: HookedModel, site: str) -> bool:
    """Whether a site is the input of the linear readout, so that erasing there must damage the answer.

    True after the final norm, and at the last block's output where no norm follows it, unless more than a linear layer follows.
    """
    name, adapter = model.point(site).name, model.adapter
    if name == "unembed.hook_in":
        return True
    if adapter.nonlinear_head:
        read_at = model.point(name).site
        return read_at is not None and (read_at.path, read_at.side) == (adapter.parts.get("unembed"), "in")
    if name == "ln_final.hook_out":
        return True
    last, parts = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", adapter.parts
    bare = "ln_final" not in parts and "unembed" in parts
    if name in model.hook_dict:
        return bare and name == last
    # A module path: the same tensor under the module's own name.
    where = model.point(name).site
    if where is None:
        return False
    found = (where.path, where.side)
    read = [(parts.get("ln_final"), "out"), (parts.get("unembed"), "in")]
    return found in ([*read, (adapter.blocks[-1], "out")] if bare else read)

"""Interchange of one subspace gives what pyvene's rotated interventions give: logits to 1e-5 and the same answers.

pyvene needs packages that nothing else here does (plotnine, ipywidgets, datasets), so it is no requirement of the tests.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zoo
from test_interchange import own_pairs
from torch import Tensor

import probelens as pl
from probelens.hooks.edits.swap import swap
from probelens.patching.interchange import interchange

pyvene = pytest.importorskip("pyvene", reason="pyvene is not installed: pip install pyvene")

RANK, POS = 3, 2


def rotated(kind: str, weight: Tensor, layer: int, module: Any) -> Any:
    """pyvene's intervention with our orthonormal columns, swapping the first ``RANK`` of them. weight (d, k)"""
    low = kind == "LowRankRotatedSpaceIntervention"
    fields = {"layer": layer, "component": "block_output", "unit": "pos", "max_number_of_units": 1}
    if low:
        fields["low_rank_dimension"] = RANK
    config = pyvene.IntervenableConfig(
        model_type=type(module), representations=[pyvene.RepresentationConfig(**fields)],
        intervention_types=getattr(pyvene, kind),
    )  # fmt: skip
    made = pyvene.IntervenableModel(config, module, use_fast=False)
    (intervention,) = made.interventions.values()
    intervention = intervention[0] if isinstance(intervention, (list, tuple)) else intervention
    with torch.no_grad():
        intervention.rotate_layer.weight = weight[:, :RANK] if low else weight
        if not low:
            # The mask is a sigmoid of the place: cold, it is 1 for the first RANK columns and 0 for the rest. At place 0,
            # where pyvene starts, it is one half at any temperature.
            intervention.intervention_population.data = torch.arange(len(weight)) + 0.5
            intervention.set_intervention_boundaries(RANK / len(weight))
            intervention.set_temperature(torch.tensor(1e-3))
    return made


@pytest.mark.parametrize("kind", ["LowRankRotatedSpaceIntervention", "BoundlessRotatedSpaceIntervention"])
def test_a_swap_is_that_of_pyvene(kind: str) -> None:
    module = zoo.build("gpt2")
    model = pl.wrap(module)
    pairs = own_pairs(model)
    gen = torch.Generator().manual_seed(3)
    weight = torch.linalg.qr(torch.randn(zoo.WIDTH, zoo.WIDTH, generator=gen)).Q
    space = pl.Subspace(weight[:, :RANK].mT.contiguous(), torch.zeros(zoo.WIDTH))
    for layer in range(zoo.LAYERS):
        site = f"blocks.{layer}.hook_resid_post"
        found = interchange(model, pairs, {site: space}, pos=POS, controls=0, kinds=())
        source = model.run_with_cache(pairs.clean, site)[1][site]
        with torch.no_grad():
            ours = model.run_with_hooks(pairs.corrupted, [(site, swap(source, space, POS))])
            before = model(pairs.corrupted)
            made = rotated(kind, weight, layer, module)
            _, out = made(
                base={"input_ids": pairs.corrupted}, sources=[{"input_ids": pairs.clean}],
                unit_locations={"sources->base": POS},
            )  # fmt: skip
        theirs = out.logits if hasattr(out, "logits") else out[0]
        print(f"{kind}, block {layer}: {float((ours - theirs).abs().max()):.1e}")
        assert float((ours - theirs).abs().max()) < 1e-5
        assert float((ours - before).abs().max()) > 1e-2
        said = theirs[torch.arange(len(pairs)), pairs.read_pos].argmax(-1) == pairs.answers[:, 0]
        (row,) = (i for i, r in enumerate(found.rows) if r["condition"] == "target")
        assert torch.equal(found.followed[row], said)
        assert math.isclose(found.rows[row]["iia"], float(said.double().mean()))

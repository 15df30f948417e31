"""Interchange of one subspace gives what pyvene's rotated interventions give: logits to 1e-5 and the same answers.

So does the search: DAS in pyvene and ours find subspaces that as many held-out pairs follow. What pyvene gives is kept in
pyvene_reference.json, and had again where pyvene is installed.
"""

from __future__ import annotations

import json
import math

import pytest
import pyvene_reference as reference
import torch

import probelens as pl
from probelens.hooks.edits.swap import swap
from probelens.patching.interchange import interchange

KEPT = json.loads(reference.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", reference.KINDS)
def test_a_swap_is_that_of_pyvene(kind: str) -> None:
    model = pl.wrap(reference.gpt2())
    clean, corrupted, answers = (torch.tensor(KEPT[name]) for name in ("clean", "corrupted", "answers"))
    basis = reference.directions()[:, : reference.RANK].mT.contiguous()
    space, pairs = pl.Subspace(basis, torch.zeros(reference.WIDTH)), pl.PatchPairs(clean, corrupted, 1, -1, answers)
    for layer in range(reference.LAYERS):
        site = f"blocks.{layer}.hook_resid_post"
        found = interchange(model, pairs, {site: space}, pos=reference.POS, controls=0, kinds=())
        source = model.run_with_cache(clean, site)[1][site]
        with torch.no_grad():
            ours = model.run_with_hooks(corrupted, [(site, swap(source, space, reference.POS))])[:, -1]
            before = model(corrupted)[:, -1]
        theirs = torch.tensor(KEPT["swaps"][kind][layer])
        print(f"{kind}, block {layer}: {float((ours - theirs).abs().max()):.1e}")
        assert float((ours - theirs).abs().max()) < 1e-5
        if layer < reference.LAYERS - 1:  # after the last block only the position that is read is
            assert float((ours - before).abs().max()) > 1e-2
        (row,) = (i for i, r in enumerate(found.rows) if r["condition"] == "target")
        said = theirs.argmax(-1) == answers[:, 0]
        assert torch.equal(found.followed[row], said)
        assert math.isclose(found.rows[row]["iia"], float(said.double().mean()))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_search_finds_what_that_of_pyvene_finds(rank: int) -> None:
    model = pl.wrap(reference.Planted(), blocks=["block"], embed="embed", unembed="head")
    clean, corrupted, answers = reference.planted_pairs()
    pairs = pl.PatchPairs(clean, corrupted, 2, 2, answers)
    half, site = len(pairs) // 2, "blocks.0.hook_resid_post"
    theirs = KEPT["search"][str(rank)]
    learned = pl.das(model, pairs[:half], site, 2, rank, untrained=False, controls=0, kinds=())
    found = interchange(model, pairs[half:], {site: learned.subspace}, pos=2, controls=0, kinds=()).targets()[0]
    print(f"rank {rank}: {found['iia']:.3f} of {found['n']} pairs, pyvene {theirs}")
    assert found["n"] == half
    assert abs(found["iia"] - sum(theirs) / len(theirs)) <= 0.02


def test_the_kept_numbers_are_what_pyvene_gives() -> None:
    pytest.importorskip("pyvene", reason="pyvene is not installed: pip install pyvene")
    module, weight = reference.gpt2(), reference.directions()
    clean, corrupted = (torch.tensor(KEPT[name]) for name in ("clean", "corrupted"))
    for kind in reference.KINDS:
        with torch.no_grad():
            made = reference.rotated(kind, weight, module, 1)
            again = reference.swapped(made, clean, corrupted, reference.POS)[:, -1]
        torch.testing.assert_close(again, torch.tensor(KEPT["swaps"][kind][1]), atol=1e-5, rtol=0)
    n = len(reference.planted_pairs()[0])
    again = reference.search(2, torch.arange(n // 2), torch.arange(n // 2, n), 0)
    assert again == pytest.approx(KEPT["search"]["2"][0], abs=0.02)

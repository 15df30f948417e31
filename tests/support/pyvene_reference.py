"""Writes tests/patching/pyvene_reference.json: what pyvene 0.1.8 gives for swaps in a small GPT-2, and what its search finds.

    python tests/support/pyvene_reference.py

It wants pyvene installed beside probelens. pyvene needs packages that nothing else here does (plotnine, ipywidgets, datasets), so the tests read this file. Weights
come from a formula, not from a random generator, so that every version of torch and transformers has the same ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).resolve().parents[1] / "patching/pyvene_reference.json"
KINDS = ("LowRankRotatedSpaceIntervention", "BoundlessRotatedSpaceIntervention")
VOCAB, WIDTH, LAYERS, HEADS, LENGTH, PAIRS = 23, 16, 3, 4, 8, 12
RANK, POS = 3, 2
VALUES, COPIES, WIDE = 3, 40, 12  # of the planted model


def waves(*shape: int, turn: int = 1) -> Tensor:
    """Numbers in [-1, 1] without a pattern that matters here."""
    n = torch.arange(1, 1 + int(torch.tensor(shape).prod()), dtype=torch.float64)
    return torch.sin(n * n * (0.6180339887498949 + 0.1 * turn)).float().reshape(shape)


def gpt2() -> nn.Module:
    """GPT-2, three blocks of width 16."""
    import transformers

    module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    ).eval()
    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(module.named_parameters())):
            size = 0.2 if weight.ndim == 1 else 0.6
            norm = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            weight.copy_(norm + size * waves(*weight.shape, turn=i))
    return module


def directions(d: int = WIDTH) -> Tensor:
    """Orthonormal columns. (d, d)"""
    return torch.linalg.qr(waves(d, d, turn=7).double()).Q.float()


def pairs(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Clean and corrupted tokens (example, pos), which differ at position 1, and what the model says to each (example, 2)."""
    clean = ((waves(40 * PAIRS, LENGTH, turn=3) + 1) * 1e4).long() % VOCAB
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 5) % VOCAB
    with torch.no_grad():
        said = torch.stack([module(x).logits[:, -1].argmax(-1) for x in (clean, corrupted)], 1)
    rows = (said[:, 0] != said[:, 1]).nonzero()[:PAIRS, 0]
    return clean[rows], corrupted[rows], said[rows]


class Planted(nn.Module):
    """Answers with one of three values that tokens write to a plane of the residual stream; other directions hold noise."""

    def __init__(self) -> None:
        super().__init__()
        n, turned = VALUES * COPIES, directions(WIDE)
        self.embed, self.block, self.head = nn.Embedding(n, WIDE), nn.Identity(), nn.Linear(WIDE, VALUES, bias=False)
        # pyvene asks for these.
        self.config, self.device = SimpleNamespace(hidden_size=WIDE, to_dict=dict), torch.device("cpu")
        angle = 2 * torch.pi * torch.arange(VALUES) / VALUES
        points = torch.stack([angle.cos(), angle.sin()], 1)
        held = waves(n, WIDE, turn=5)
        held[:, :2] = points[torch.arange(n) % VALUES]
        with torch.no_grad():
            self.embed.weight.copy_(held @ turned)
            self.head.weight.copy_(3 * nn.functional.pad(points, (0, WIDE - 2)) @ turned)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(input_ids)))


def planted_pairs(n: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Clean and corrupted tokens (example, 3) of which the last decides the answer, and both answers (example, 2)."""
    drawn = ((waves(2, 4 * n, 3, turn=9) + 1) * 1e5).long() % (VALUES * COPIES)
    clean, corrupted = drawn
    corrupted = torch.cat([clean[:, :-1], corrupted[:, -1:]], 1)
    answers = torch.stack([clean[:, -1] % VALUES, corrupted[:, -1] % VALUES], 1)
    rows = (answers[:, 0] != answers[:, 1]).nonzero()[:n, 0]
    return clean[rows], corrupted[rows], answers[rows]


def rotated(kind: str, weight: Tensor, module: nn.Module, layer: int = 0, rank: int = RANK) -> Any:
    """pyvene's intervention with our orthonormal columns, swapping the first ``rank`` of them. weight (d, k)"""
    import pyvene

    pyvene.type_to_module_mapping[Planted] = {"block_output": ("block", "register_forward_hook")}
    pyvene.type_to_dimension_mapping[Planted] = {"block_output": ("hidden_size",)}
    low = kind == "LowRankRotatedSpaceIntervention"
    fields = {"layer": layer, "component": "block_output", "unit": "pos", "max_number_of_units": 1}
    if low:
        fields["low_rank_dimension"] = rank
    config = pyvene.IntervenableConfig(
        model_type=type(module), representations=[pyvene.RepresentationConfig(**fields)],
        intervention_types=getattr(pyvene, kind),
    )  # fmt: skip
    made = pyvene.IntervenableModel(config, module, use_fast=False)
    (intervention,) = made.interventions.values()
    intervention = intervention[0] if isinstance(intervention, (list, tuple)) else intervention
    with torch.no_grad():
        intervention.rotate_layer.weight = weight[:, :rank] if low else weight
        if not low:
            # The mask is a sigmoid of the place: cold, it is 1 for the first columns and 0 for the rest. At place 0,
            # where pyvene starts, it is one half at any temperature.
            intervention.intervention_population.data = torch.arange(len(weight)) + 0.5
            intervention.set_intervention_boundaries(rank / len(weight))
            intervention.set_temperature(torch.tensor(1e-3))
    return made


def swapped(made: Any, clean: Tensor, corrupted: Tensor, pos: int) -> Tensor:
    """Logits of the corrupted run with the clean run's part. (example, pos, vocab)"""
    _, out = made(
        base={"input_ids": corrupted}, sources=[{"input_ids": clean}], unit_locations={"sources->base": pos}
    )  # fmt: skip
    return out.logits if hasattr(out, "logits") else out


def search(rank: int, train: Tensor, held: Tensor, seed: int, steps: int = 300) -> float:
    """The share of held-out pairs whose answer follows the subspace that training in pyvene finds."""
    torch.manual_seed(seed)
    module = Planted().requires_grad_(False)
    clean, corrupted, answers = planted_pairs()
    made = rotated(KINDS[0], torch.linalg.qr(torch.randn(WIDE, WIDE)).Q, module, rank=rank)
    optimizer = torch.optim.Adam(made.get_trainable_parameters(), lr=0.03)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
        rows = train[torch.randperm(len(train))[:32]]
        logits = swapped(made, clean[rows], corrupted[rows], 2)[:, -1]
        loss = nn.functional.cross_entropy(logits, answers[rows, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        said = swapped(made, clean[held], corrupted[held], 2)[:, -1].argmax(-1)
    return float((said == answers[held, 0]).double().mean())


def main() -> None:
    """Write the file, from pyvene alone."""
    from importlib.metadata import version

    module, weight = gpt2(), directions()
    clean, corrupted, answers = pairs(module)
    found: dict[str, Any] = {
        "versions": {name: version(name) for name in ("pyvene", "torch", "transformers")},
        "clean": clean.tolist(), "corrupted": corrupted.tolist(), "answers": answers.tolist(),
    }  # fmt: skip
    with torch.no_grad():
        found["swaps"] = {
            kind: [
                swapped(rotated(kind, weight, module, layer), clean, corrupted, POS)[:, -1].tolist()
                for layer in range(LAYERS)
            ]
            for kind in KINDS
        }
    n = len(planted_pairs()[0])
    halves = torch.arange(n // 2), torch.arange(n // 2, n)
    found["search"] = {str(rank): [search(rank, *halves, seed) for seed in range(3)] for rank in (1, 2)}
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(found["versions"], found["search"], f"{FILE.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()

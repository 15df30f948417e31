"""The methods on inputs that are no tokens and on models that answer once for each example: calls for docs/support.md.

As in ``support_calls``: a call returns the limit under which it works, raises one of our errors where it is refused,
and fails an assertion where it gives something wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anything
import torch
import zoo
from support_calls import PATHS, changed, finite, minus
from torch import Tensor, nn

import probelens as pl
from probelens.profiling.material import drawn

N = 40
LAST = ("resid_post", -1)


@dataclass(frozen=True)
class Case:
    """A wrapped model, inputs with labels, and what it is scored by: its own answers are the right ones."""

    model: pl.HookedModel
    batch: pl.Batch
    metric: Any
    target: str
    label: str

    @functools.cached_property
    def halves(self) -> tuple[pl.Batch, pl.Batch]:
        """Examples to fit on and others."""
        return self.batch[: N // 2], self.batch[N // 2 :]

    @functools.cached_property
    def pairs(self) -> pl.PatchPairs:
        """Pairs whose answers differ."""
        found = drawn(self.model, self.batch, self.target, 4, 0)
        assert found is not None
        return found.pairs

    @functools.cached_property
    def some(self) -> Any:
        """The inputs of three examples."""
        return self.batch.examples.rows([0, 1, 2])

    @property
    def site(self) -> str:
        """The last residual."""
        return str(self.model.point(LAST).name)

    @functools.cached_property
    def space(self) -> pl.Subspace:
        """A plane of the last residual."""
        x = pl.collect(self.model, self.batch, self.site)[self.site]
        return pl.subspaces.pca(x, 2)


class Streams(nn.Module):
    """Tokens and a picture (example, 1, 8, 8), whose patches are put after the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(20, 16), nn.Conv2d(1, 16, 4, 4)
        options: dict[str, Any] = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, **options) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, image: Tensor) -> dict[str, Tensor]:
        x = torch.cat([self.words(tokens), self.patches(image).flatten(2).mT], 1)
        for layer in self.layers:
            x = layer(x)
        return {"features": x, "logits": self.head(x[:, 0])}


def own(name: str) -> Case:
    """One of the modules of ``anything``: a user's own."""
    found = anything.case(name)
    return Case(found.model, found.batch[:N], found.metric, found.target, found.label)


def streams(name: str) -> Case:
    """Two inputs that are joined, and an output that is a mapping."""
    gen = torch.Generator().manual_seed(0)
    inputs = {"tokens": torch.randint(20, (N, 5), generator=gen), "image": torch.randn(N, 1, 8, 8, generator=gen)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Streams().eval()
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(3)
    model = pl.wrap(module, blocks="layers", output=lambda out: out["logits"])
    return _case(model, inputs, (inputs["tokens"][:, 0] > 9).long())


def transformers(name: str) -> Case:
    """A model of transformers with what its forward takes: pictures, padded texts, or both sides of an encoder–decoder."""
    model = pl.wrap(zoo.more(name))
    inputs = zoo.inputs(name, N)
    if isinstance(inputs, dict):
        return _case(model, inputs, inputs["decoder_input_ids"] % 2)
    if name == "vit":
        return _case(model, inputs, (inputs[:, 0].mean((1, 2)) > 0).long())
    mask = torch.arange(8) < 5 + torch.arange(N)[:, None] % 4
    pad = model.module.config.pad_token_id  # by which Llama finds the last real token
    texts = inputs.where(inputs != pad, pad + 1).where(mask, pad)
    return _case(model, {"input_ids": texts, "attention_mask": mask.long()}, inputs[:, 0] % 2)


def _case(model: pl.HookedModel, inputs: Any, label: Tensor) -> Case:
    with torch.no_grad():
        answers = model(inputs).argmax(-1)
    return Case(model, pl.Batch(inputs, {"answer": answers, "seen": label}), "accuracy", "answer", "seen")


# -- calls -----------------------------------------------------------------------------------------------


def hooks(case: Case) -> str:
    model, x = case.model, case.some
    plain = model(x)
    with model.hooks([(case.site, minus)]):
        assert changed(model(x), plain)
    assert torch.equal(model(x), plain)
    return ""


def cache(case: Case) -> str:
    _, held = case.model.run_with_cache(case.some)
    given = case.batch.examples.batched
    # Embeddings leave out the module that makes them.
    assert set(case.model.hook_dict) - set(held) == ({"hook_embed"} if "inputs_embeds" in given else set())
    return ""


def backward(case: Case) -> str:
    seen: list[Tensor] = []
    out = case.model.run_with_hooks(case.some, bwd_hooks=[(case.site, lambda grad, hook: seen.append(grad.clone()))])
    out.square().sum().backward()
    case.model.zero_grad()
    finite(*seen)
    assert seen[0].any()
    return ""


def verify(case: Case) -> str:
    assert case.model.verify(case.some).ok
    return ""


def collect(case: Case) -> str:
    finite(*pl.collect(case.model, case.batch, "layers").tensors.values())
    return ""


def probed(case: Case) -> pl.ProbeResult:
    acts = pl.collect(case.model, case.batch, case.site)
    y = case.batch.labels[case.label]
    return pl.probe(acts, {case.label: y}, case.batch.groups, mask=_mask(case, acts[case.site]), n_boot=20, Cs=(1.0,))


def _mask(case: Case, x: Tensor) -> Tensor | None:
    return case.batch.mask if case.batch.mask.shape == x.shape[:2] else None


def probe(case: Case) -> str:
    assert all(row.get("accuracy", row.get("r2")) <= 1 for row in probed(case).rows)
    return ""


def ablate(case: Case) -> str:
    found = pl.ablate(
        case.model, case.batch, {case.site: case.space}, case.metric, label=case.label, target=case.target, controls=1,
        mlp=False,
    )  # fmt: skip
    assert {row["condition"] for row in found.rows} > {"target", "random"}
    assert found.targets()[0]["clean"] > 0.99
    return PATHS[found.path]


def erase(case: Case) -> str:
    fit, held = case.halves
    found = pl.erase(
        case.model, fit, held, label=case.label, target=case.target, sites=case.site, metric=case.metric, controls=1,
        mlp=False,
    )  # fmt: skip
    assert found.rows
    return ""


def component(case: Case) -> str:
    found = pl.ablate_component(
        case.model, case.batch, case.site, ["zero", "mean"], case.metric, target=case.target, draws=1
    )
    assert found.values.isfinite().all()
    return PATHS[found.path]


def patch(case: Case) -> str:
    """All of the last residual brings the clean run's answer."""
    values = case.metric == "r2"
    found = pl.patch(case.model, case.pairs, case.site, None, metric="value" if values else "logit_diff")
    assert torch.allclose(found.values[0, 0], found.clean, atol=1e-4, rtol=1e-4)
    assert changed(found.clean, found.corrupted)
    return PATHS[found.path]


def attribute(case: Case) -> str:
    values = case.metric == "r2"
    finite(pl.attribute(case.model, case.pairs, case.site, None, metric="value" if values else "logit_diff").values)
    return ""


def interchange(case: Case) -> str:
    found = pl.interchange(case.model, case.pairs, {case.site: case.space}, controls=1)
    by_kind = {row["condition"]: row for row in found.rows}
    assert by_kind.keys() >= {"target", "complement", "random"}
    assert by_kind["full"]["iia"] == 1
    return PATHS[found.path]


def das(case: Case) -> str:
    found = pl.das(case.model, case.pairs, case.site, None, 2, untrained=False, controls=1, steps=4, lr=0.1)
    by_kind = {row["condition"]: row for row in found.rows}
    assert by_kind["full"]["iia"] == 1
    return PATHS[found.path]


def profile(case: Case) -> str:
    found = pl.profile(
        case.model, case.batch, labels=[case.label], target=case.target, metric=case.metric, n_pairs=4, controls=1,
        refit=False, filters=False,
    )  # fmt: skip
    assert len(found.to_dataframe()) == case.model.cfg.n_layers + 1
    return PATHS[found.patches[case.target].path]


METHODS: dict[str, Callable[[Any], str]] = {
    "`run_with_hooks`, `hooks`": hooks,
    "`run_with_cache`": cache,
    "backward hooks": backward,
    "`verify`": verify,
    "`collect`": collect,
    "`probe`": probe,
    "`ablate`": ablate,
    "`erase`": erase,
    "`ablate_component`": component,
    "`patch`": patch,
    "`attribute`": attribute,
    "`interchange`": interchange,
    "`das`": das,
    "`profile`": profile,
}

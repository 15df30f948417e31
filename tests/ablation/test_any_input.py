"""Ablations of models whose inputs are no tokens, or that answer once for each example, against plain torch hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anything
import pytest
import torch
from anything import Case
from torch import Tensor

import probelens as pl
from probelens.subspaces.subspace import Subspace


def score(case: Case, out: Tensor, batch: pl.Batch) -> float:
    """The metric, from outputs for all examples."""
    y, keep = batch.labels[case.target], batch.mask
    if out.ndim == 3:
        return (((out.argmax(-1) == y) & keep).sum(1) / keep.sum(1)).mean().item()
    if case.metric == "accuracy":
        return (out.argmax(-1) == y).float().mean().item()
    return 1 - ((out - y).square().sum() / (y - y.mean()).square().sum()).item()


def edited(case: Case, batch: pl.Batch, site: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Outputs with a change at a site, one example at a time, by a hook on the user's own module."""
    outs = []
    for i in range(len(batch)):
        module, inputs = case.module, batch.examples.rows([i])
        keep = torch.ones(1, 99, dtype=torch.bool) if batch.mask.ndim == 1 else batch.mask[[i]]

        def hook(m: Any, args: Any, out: Any, keep: Tensor = keep) -> Any:
            x = out[0] if isinstance(out, tuple) else out
            x = torch.nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0] if not isinstance(x, Tensor) else x
            new = torch.where(keep[:, : x.shape[1], None], change(x), x)
            if isinstance(out, tuple) and not isinstance(out[0], Tensor):
                lengths = torch.tensor([x.shape[1]])
                new = torch.nn.utils.rnn.pack_padded_sequence(new, lengths, batch_first=True)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handle = module.get_submodule(case.last).register_forward_hook(hook)
        with torch.no_grad():
            out = module(**inputs) if isinstance(inputs, dict) else module(inputs)
        handle.remove()
        out = case.read(out)
        short = batch.mask.shape[1] - out.shape[1] if out.ndim == 3 else 0
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, short)) if short else out)
    return torch.cat(outs)


@pytest.mark.parametrize("name", anything.NAMES)
def test_an_ablation_is_what_a_hook_on_the_module_does(name: str) -> None:
    case = anything.case(name)
    batch, model = case.batch, case.model
    x = pl.collect(model, batch, case.site)[case.site]
    space = Subspace(
        torch.linalg.qr(torch.randn(x.shape[-1], 2, generator=torch.Generator().manual_seed(0)))[0].mT, x[0, 0]
    )
    found = pl.ablate(
        model, batch, {case.site: space}, case.metric, refit=True, controls=2, label=case.label, target=case.target,
        mlp=False, batch_size=7,
    )  # fmt: skip
    row = found.targets()[0]
    clean = score(case, edited(case, batch, case.site, lambda x: x), batch)
    ablated = score(case, edited(case, batch, case.site, lambda x: space.project_out(x)), batch)
    assert row["clean"] == pytest.approx(clean, abs=2e-5)
    assert row["value"] == pytest.approx(ablated, abs=2e-5)
    assert abs(clean - ablated) > 1e-3, "control: it costs something"
    if case.metric == "r2":  # numbers are said as numbers
        said = str(found)
        assert f"a linear probe reads R² {row['probe_accuracy']:.2f} before" in said
        assert "as a share of R²" in said
        assert "max_overlap" not in said
    assert row["verdict"] in {"floor", "tautological", "inconclusive", "absent", "erased"}


@pytest.mark.parametrize("name", anything.NAMES)
def test_components_are_zeroed_and_resampled_as_by_hand(name: str) -> None:
    case = anything.case(name)
    found = pl.ablate_component(
        case.model, case.batch, case.site, ["zero", "mean", "resample"], case.metric, target=case.target, draws=1,
        batch_size=7,
    ) if name != "packed" else pl.ablate_component(
        case.model, case.batch, case.site, "zero", case.metric, target=case.target, batch_size=7,
    )  # fmt: skip
    zeroed = score(case, edited(case, case.batch, case.site, torch.zeros_like), case.batch)
    assert found.rows[0]["value"] == pytest.approx(zeroed, abs=2e-5)
    assert found.rows[0]["drop"] != 0


@pytest.mark.parametrize("name", anything.NAMES)
def test_erasing_leaves_nothing_linear_to_read(name: str) -> None:
    case = anything.case(name)
    half = len(case.batch) // 2
    fit, held = case.batch[:half], case.batch[half:]
    found = pl.erase(
        case.model, fit, held, label=case.label, target=case.target, sites=case.site, metric=case.metric, controls=2,
        mlp=False,
    )  # fmt: skip
    space = found.subspaces[case.site]
    x, y = pl.collect(case.model, fit, case.site)[case.site], fit.labels[case.label]
    mask = fit.mask if fit.mask.ndim == 2 else fit.mask[:, None].expand(x.shape[:2])
    y = (y if y.ndim == 2 else y[:, None].expand(x.shape[:2]))[mask].double()
    erased = space(x[mask]).double()
    covariance = ((erased - erased.mean(0)) * (y - y.mean())[:, None]).mean(0)
    before = ((x[mask].double() - x[mask].double().mean(0)) * (y - y.mean())[:, None]).mean(0)
    assert covariance.norm() < 1e-4 * before.norm()


def test_kl_and_functions_with_references_are_cut_to_the_batch() -> None:
    case = anything.case("classifier")
    batch, model = case.batch, case.model
    with torch.no_grad():
        clean = case.module(batch.tokens)
    zero = edited(case, batch, case.site, torch.zeros_like)
    want = torch.nn.functional.kl_div(zero.log_softmax(-1), clean.softmax(-1), reduction="none").sum(-1).mean().item()
    asked: dict[str, Any] = {"sites": case.site, "how": "zero", "target": case.target, "batch_size": 7}
    assert pl.ablate_component(model, batch, metric="kl", **asked).rows[0]["value"] == pytest.approx(want, rel=1e-4)

    def own(logits: Tensor, mask: Tensor, reference: Tensor, **labels: Tensor) -> Tensor:
        return pl.metrics.kl(logits, reference)

    metric = pl.metrics.with_references(own, reference=clean)
    assert pl.ablate_component(model, batch, metric=metric, **asked).rows[0]["value"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "metric", "target", "text"),
    [
        ("series", "accuracy", "end", "holds values. Give metric='r2'"),
        ("series", "accuracy", "sign", "one number for each example"),
        ("series", "r2", "sign", "holds classes"),
        ("series", "next_token_loss", "end", "needs tokens and an output at each position"),
        ("classifier", "r2", "size", "needs one number as the answer"),
        ("classifier", "accuracy", "token", "one answer for each example"),
        ("packed", "accuracy", "first", r"label 'first' has one value for each example"),
        ("series", "f1", "end", "not known. Allowed: 'accuracy'"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_runs(name: str, metric: Any, target: str, text: str) -> None:
    case = anything.case(name)
    calls: list[int] = []
    with pytest.raises(pl.InputError, match=text), case.model.hooks([(case.site, lambda x, hook: calls.append(1))]):
        pl.ablate_component(case.model, case.batch, case.site, "zero", metric, target=target)
    assert calls == []


def test_the_answer_is_taken_out_of_anything_that_a_module_returns() -> None:
    case = anything.case("classifier")

    class Several(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = case.module

        def forward(self, tokens: Tensor) -> dict[str, Any]:
            return {"hidden": [tokens], "answers": (self.inner(tokens), "text")}

    model = pl.wrap(Several().eval(), output=lambda out: out["answers"][0])
    ours, theirs = (
        pl.ablate_component(m, case.batch, case.site, "zero", target=case.target).rows[0] for m in (model, case.model)
    )
    assert ours["value"] == theirs["value"]
    with pytest.raises(pl.InputError, match="must give a tensor"):
        pl.wrap(Several().eval(), output=lambda out: out["answers"])(case.batch.tokens)
    with pytest.raises(pl.InputError, match="must be a function"):
        pl.wrap(Several().eval(), output="answers")

"""Only positions at which a metric counts are unembedded and scored: what they give is what whole outputs give."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor
from torch.nn import functional

import probelens as pl
from probelens import subspaces

SITE, N, LENGTH = "blocks.0.hook_resid_post", 6, 8


def masks() -> dict[str, Tensor]:
    """Positions that count: the last, unequally many in each sequence, and nearly all, of which nothing is left out."""
    few = torch.zeros(N, LENGTH, dtype=torch.bool)
    few[:, -2:] = True
    few[::2, -3] = True
    some = torch.zeros(N, LENGTH, dtype=torch.bool)
    some[torch.arange(N), torch.arange(N)] = True
    some[3] = False
    some[0, 5:7] = some[4, 1:4] = True
    most = torch.ones(N, LENGTH, dtype=torch.bool)
    most[:, 0] = False
    return {"few": few, "some": some, "most": most}


def by_hand(metric: str, clean: Tensor, new: Tensor, tokens: Tensor, answer: Tensor) -> Tensor:
    """A metric at every position, of whole outputs. (example, pos)"""
    if metric == "accuracy":
        return (new.argmax(-1) == answer).float()
    if metric == "kl":
        return functional.kl_div(new.log_softmax(-1), clean.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return functional.cross_entropy(new.mT, tokens.roll(-1, 1), reduction="none")


@pytest.mark.parametrize("metric", ["accuracy", "kl", "next_token_loss"])
@pytest.mark.parametrize("kept", ["few", "some", "most"])
def test_a_metric_at_some_positions_is_that_of_whole_outputs_there(metric: str, kept: str) -> None:
    model, tokens, mask = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH), masks()[kept]
    space = subspaces.random(8, zoo.WIDTH, seed=1)
    with torch.no_grad():
        clean = model(tokens)
        answer = clean.argmax(-1)
        basis = space.basis.float()

        def remove(x: Tensor, hook: pl.HookPoint) -> Tensor:
            return torch.where(mask[..., None], x - x @ basis.T @ basis, x)

        new = model.run_with_hooks(tokens, [(SITE, remove)])
    counts = mask.clone()
    if metric == "next_token_loss":
        counts[:, -1], counts[:, :-1] = False, mask[:, :-1] & mask[:, 1:]
    want = by_hand(metric, clean, new, tokens, answer)
    batch = pl.Batch(tokens, {"answer": answer}, mask)
    found = pl.ablate(model, batch, {SITE: space}, metric, refit=False, controls=0, target="answer")
    each = torch.stack([row[keep].mean() for row, keep in zip(want, counts, strict=True) if keep.any()])
    torch.testing.assert_close(found.values[0], each.to(found.values), atol=1e-5, rtol=1e-5)
    for t in range(LENGTH):
        if counts[:, t].any():
            assert found.by_position[0, t].item() == pytest.approx(want[counts[:, t], t].mean().item(), abs=1e-5)


def test_positions_that_do_not_count_are_not_unembedded() -> None:
    model, tokens = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH)
    seen: list[int] = []
    handle = model.module.get_output_embeddings().register_forward_hook(
        lambda m, args, out: seen.append(args[0][..., 0].numel())
    )
    rows = {}
    for kept in ("some", "most"):
        batch = pl.Batch(tokens, {"answer": tokens % 3}, masks()[kept])
        pl.ablate(model, batch, {SITE: subspaces.random(8, zoo.WIDTH, seed=1)}, refit=False, controls=40)
        rows[kept], seen[:] = sum(seen), []
    handle.remove()
    assert rows["some"] < 0.55 * rows["most"], rows  # 3 of 8 positions at most, beside a few whole runs


def test_a_metric_of_ones_own_may_be_nan_where_it_does_not_count() -> None:
    model, tokens = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH)
    mask = masks()["most"]

    def metric(logits: Tensor, *, mask: Tensor, **others: Tensor) -> Tensor:
        assert logits.shape[1] == LENGTH  # a metric of one's own is given all positions
        return torch.where(mask, logits.amax(-1), float("nan"))

    batch = pl.Batch(tokens, {"answer": tokens % 3}, mask)
    found = pl.ablate(model, batch, {SITE: subspaces.random(8, zoo.WIDTH, seed=1)}, metric, refit=False, controls=2)
    with torch.no_grad():
        want = (model(tokens).amax(-1) * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(found.clean, want)
    assert bool(found.by_position.isfinite().all())

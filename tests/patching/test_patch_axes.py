"""Positions are counted on a point's own axis of them: at attention patterns the heads come before the query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from test_patch import LENGTH, N, some_pairs
from torch import Tensor

import probelens as pl
from probelens import edits
from probelens.hooks.points import HookPoint
from probelens.patching.final_layer_sites import _gather, _write

PATTERN, SCORES, KEYS = (f"blocks.1.attn.hook_{name}" for name in ("pattern", "attn_scores", "k"))
# Where the positions are, and an axis where they aren't.
AXES = {PATTERN: (2, 1), SCORES: (2, 3), KEYS: (1, 2)}


def by_hand(model: pl.HookedModel, pairs: pl.PatchPairs, sites: list[str], pos: Any, axis: int | None = None) -> Tensor:
    """One full forward with hooks that index an axis by hand."""
    _, cache = model.run_with_cache(pairs.clean, sites)

    def hook(tensor: Tensor, hook: HookPoint) -> Tensor:
        tensor, new = tensor.clone(), cache[hook.name]
        wanted = range(LENGTH) if pos is None else [pos]
        for i in range(N):
            for p in wanted:
                at = int(p[i]) if isinstance(p, Tensor) else p
                index = (i, *[slice(None)] * ((axis or AXES[hook.name][0]) - 1), at)
                tensor[index] = new[index]
        return tensor

    with torch.no_grad():
        logits = model.run_with_hooks(pairs.corrupted, [(site, hook) for site in sites])
    picked = logits[torch.arange(N), pairs.read_pos].gather(1, pairs.answers)
    return picked[:, 0] - picked[:, 1]


@pytest.mark.parametrize("site", AXES)
@pytest.mark.parametrize("family", ["neox", "llama"])
def test_a_patch_at_a_position_is_a_plain_loop_over_the_axis_of_positions(family: str, site: str) -> None:
    model, pairs = pl.wrap(zoo.build(family)), some_pairs()
    one = pl.patch(model, pairs, site, pos=1).values[0, 0]
    torch.testing.assert_close(one, by_hand(model, pairs, [site], 1), atol=1e-4, rtol=0)
    wrong = by_hand(model, pairs, [site], 1, axis=AXES[site][1])
    assert (one - wrong).abs().max() > 1e-3, "the control"
    # Beyond the number of heads, too.
    each = pl.patch_plan(model, pairs, site, pos="each", batch_size=4).run()
    assert each.values.shape == (1, LENGTH, N)
    for p in range(LENGTH):
        want = by_hand(model, pairs, [site], p)
        torch.testing.assert_close(each.values[0, p], want, atol=1e-4, rtol=0)
    own = pl.patch(model, pairs, site, pos=pairs.read_pos, batch_size=4).values[0, 0]
    torch.testing.assert_close(own, by_hand(model, pairs, [site], pairs.read_pos), atol=1e-4, rtol=0)
    every = pl.patch(model, pairs, site, pos=None).values[0, 0]
    torch.testing.assert_close(every, by_hand(model, pairs, [site], None), atol=1e-4, rtol=0)
    assert (every - each.values[0, 0]).abs().max() > 1e-3


def test_points_of_different_axes_are_patched_together() -> None:
    model, pairs = pl.wrap(zoo.build("neox")), some_pairs()
    both = [KEYS, PATTERN, "blocks.0.attn.hook_pattern"]
    AXES["blocks.0.attn.hook_pattern"] = AXES[PATTERN]
    got = pl.patch(model, pairs, both, pos=[3, 5], joint=True).values[0]
    for values, p in zip(got, (3, 5), strict=True):
        torch.testing.assert_close(values, by_hand(model, pairs, both, p), atol=1e-4, rtol=0)
    assert (got[1] - by_hand(model, pairs, [KEYS], 5)).abs().max() > 1e-3


@pytest.mark.parametrize("site", AXES)
def test_attribution_sums_over_everything_but_the_axis_of_positions(site: str) -> None:
    model, pairs = pl.wrap(zoo.build("neox")), some_pairs()
    got = pl.attribute(model, pairs, site, batch_size=4)
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> Tensor:
        kept.append(tensor.detach().requires_grad_())
        return kept[0]

    logits = model.run_with_hooks(pairs.corrupted, [(site, keep)])
    picked = logits[torch.arange(N), pairs.read_pos].gather(1, pairs.answers)
    base = picked[:, 0] - picked[:, 1]
    (grad,) = torch.autograd.grad(base.sum(), kept)
    _, cache = model.run_with_cache(pairs.clean, site)
    effect = grad * (cache[site] - kept[0]).detach()
    axis, other = AXES[site]
    assert got.values.shape == (1, LENGTH, N)
    for p in range(LENGTH):
        want = base + effect.select(axis, p).flatten(1).sum(1)
        torch.testing.assert_close(got.values[0, p], want.detach(), atol=1e-4, rtol=1e-4)
    wrong = base + effect.select(other, 1).flatten(1).sum(1)
    assert (got.values[0, 1] - wrong).abs().max() > 1e-4, "the control"
    total = pl.attribute(model, pairs, site, pos=None).values[0, 0]
    torch.testing.assert_close(total, (base + effect.flatten(1).sum(1)).detach(), atol=1e-4, rtol=1e-4)


def test_masked_scores_that_are_infinite_have_no_effect_instead_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some attentions mask with −inf: equal infinities don't differ."""
    from probelens.patching.attribute import first_order
    from probelens.patching.metric import read_metric
    from probelens.patching.pairs import Side
    from probelens.running.sweep.conditions import Read
    from probelens.tasks.examples import Examples

    model, pairs = pl.wrap(zoo.build("neox")), some_pairs()
    values = {SCORES: pl.collect(model, pairs.clean, SCORES)[SCORES]}
    read = Read(read_metric("logit_diff"), pairs.read_pos[:, None], {"answers": pairs.answers})
    found = []
    for least in (torch.finfo().min, -torch.inf):
        later = torch.ones(LENGTH, LENGTH).triu(1).bool()

        def mask(tensor: Tensor, hook: HookPoint, later: Tensor = later, least: float = least) -> Tensor:
            return tensor.masked_fill(later, least)

        new = {SCORES: values[SCORES].masked_fill(later, least)}
        with model.hooks([(SCORES, mask)]):
            rows = torch.arange(N)
            found.append(first_order(model, Side(Examples(pairs.corrupted), None, read), [SCORES], new, rows)[0][0])
    assert bool(found[1].isfinite().all())
    torch.testing.assert_close(found[1], found[0])
    assert found[0].abs().max() > 1e-4


def test_a_point_without_positions_is_refused_at_some_positions_and_patched_at_all() -> None:
    model, pairs = pl.wrap(zoo.build("neox")), some_pairs()
    want = pl.patch(model, pairs, PATTERN, pos=None).values
    estimate = pl.attribute(model, pairs, PATTERN, pos=None).values
    model.point(PATTERN).axes = ("batch", "head", "one", "other")
    for call in (pl.patch, pl.patch_plan, pl.attribute):
        for pos in ("each", 1, pairs.edit_pos):
            with pytest.raises(pl.InputError, match=r"hook_pattern' has the axes .*'one'.*pos=None"):
                call(model, pairs, ["layers", PATTERN], pos)  # type: ignore[operator]
    assert torch.equal(pl.patch(model, pairs, PATTERN, pos=None).values, want)
    torch.testing.assert_close(pl.attribute(model, pairs, PATTERN, pos=None).values, estimate)
    with pytest.raises(pl.ShapeError, match="axes"):
        model.run_with_hooks(pairs.clean, [(PATTERN, edits.zero(pos=1))])
    with pytest.raises(pl.ShapeError, match="axes"):
        pl.ablate(
            model, pl.Batch(pairs.clean, {"x": pairs.clean % 2}), {PATTERN: pl.subspaces.random(1, LENGTH)},
            refit=False, controls=0,
        )  # fmt: skip


def test_a_tensor_too_short_for_the_position_is_named() -> None:
    model = pl.wrap(zoo.build("neox"))
    x = torch.zeros(2, 3, 4)
    point = model.point("blocks.1.hook_resid_post")
    assert torch.equal(edits.replace(x + 1, pos=torch.tensor([1, 2]))(x, point).sum((1, 2)), torch.tensor([4.0, 4.0]))
    with pytest.raises(pl.InputError, match=r"pos=\[1, 3\] at .*resid_post': .* 3 positions\. None edits all"):
        edits.replace(x + 1, pos=torch.tensor([1, 3]))(x, point)


@pytest.mark.parametrize("pos", [1, [0, -1], torch.tensor([1, 0]), torch.eye(2, 5).bool()])
def test_edits_limited_to_positions_edit_queries_at_a_pattern(pos: Any) -> None:
    point = HookPoint(PATTERN, "interior", ("batch", "head", "pos", "key_pos"), "attn")
    x = torch.rand(2, 3, 5, 5) + 1
    got = edits.zero(pos)(x, point)
    # The same on a tensor whose positions come second.
    want = edits.zero(pos)(x.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(got, want)
    assert 0 < int((got == 0).sum()) < x.numel()


@pytest.mark.parametrize("batched", [True, False])
def test_values_given_for_each_position_are_picked_from_its_axis_at_one_step(batched: bool) -> None:
    """As many heads as positions: only the names of the axes can tell which is which."""
    point = HookPoint(PATTERN, "interior", ("batch", "head", "pos", "key_pos"), "attn")
    x, value = torch.zeros(2, 5, 5, 5), torch.rand(2, 5, 5, 5)
    new = edits.replace(value if batched else value[0])
    got = pl.at(3, new)(x, point)
    assert got is not None
    assert torch.equal(got[:, :, 3], value[:, :, 3] if batched else value[:1, :, 3].expand(2, -1, -1))
    assert got[:, :, :3].abs().sum() == 0


def test_the_windows_of_the_final_layer_sites_are_on_the_axis_of_positions() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH)
    where = (torch.arange(N) % 4)[:, None] + torch.arange(2)
    held = _gather(model, x, {PATTERN: where}, None, 4)[PATTERN]
    _, cache = model.run_with_cache(x, PATTERN)
    rows = torch.arange(N)[:, None]
    assert torch.equal(held, cache[PATTERN].transpose(1, 2)[rows, where])
    zeros = torch.zeros_like(cache[PATTERN])
    wrote = _write(model, PATTERN, held, where, LENGTH).edit_for(torch.arange(N))(zeros, model.point(PATTERN))
    assert wrote is not None
    assert torch.equal(wrote.transpose(1, 2)[rows, where], held)
    assert int((wrote.sum((1, 3)) != 0).sum()) == 2 * N

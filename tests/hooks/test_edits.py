"""Edits: what they do to hand-written tensors, purity, positions, and their use in a hooked model."""

from __future__ import annotations

import pytest
import torch
import zoo

import probelens as pl
from probelens import edits
from probelens.errors import InputError, ShapeError
from probelens.hooks.points import HookPoint
from probelens.subspaces.leace import leace
from probelens.subspaces.matched import random
from probelens.subspaces.subspace import Subspace

BATCH, POS, D = 4, 5, 3
LABELS = torch.arange(BATCH * POS).view(BATCH, POS) % 2


def acts(dtype=torch.float32, seed=0):
    return torch.randn(BATCH, POS, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def point(pos=None, length=None):
    hook = HookPoint("blocks.0.hook_resid_post", "boundary", ("batch", "pos", "d_model"), "layer")
    return hook if pos is None else hook.at(pos, length)


def space():
    return random(2, D, seed=1, mean=torch.arange(D).double())


EDITS = {
    "zero": lambda pos=None: edits.zero(pos),
    "mean": lambda pos=None: edits.mean(acts().mean(0), pos),
    "resample": lambda pos=None: edits.resample(acts(seed=1), 0, pos),
    "project": lambda pos=None: edits.project(space(), 0.5, pos),
    "swap": lambda pos=None: edits.swap(acts(seed=1), space(), pos),
    "erase": lambda pos=None: edits.erase(leace(acts(), LABELS), 1.0, pos),
    "replace": lambda pos=None: edits.replace(acts(seed=2), pos),
    "add": lambda pos=None: edits.add(torch.ones(D), 2.0, pos),
    "scale": lambda pos=None: edits.scale(0.5, pos),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_edits_are_pure_and_keep_shape_and_dtype(name, dtype):
    x = acts(dtype)
    before = x.clone()
    first, again = EDITS[name]()(x, point()), EDITS[name]()(x, hook=point())
    assert torch.equal(x, before)
    assert first.dtype == dtype
    assert first.shape == x.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, x)
    first.add_(1.0)  # writing into a result must reach neither the input nor the edit's own values
    assert torch.equal(x, before)
    assert torch.equal(EDITS[name]()(x, point()), again)


def test_writing_into_a_result_does_not_change_the_edit():
    value = torch.zeros(BATCH, POS, D)
    edit = edits.replace(value)
    edit(acts()).add_(1.0)
    assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(
    "pos",
    [2, -2, [0, -1], slice(1, None, 2), torch.tensor([0, 1, 2, 3]), torch.rand(BATCH, POS).gt(0.5)],
    ids=["int", "negative", "list", "slice", "per example", "mask"],
)
def test_positions_limit_every_edit(name, pos):
    where = torch.zeros(BATCH, POS, dtype=torch.bool)
    if isinstance(pos, torch.Tensor) and pos.dtype == torch.bool:
        where = pos
    elif isinstance(pos, torch.Tensor):
        where[range(BATCH), pos] = True
    else:
        where[:, pos] = True
    x = acts()
    everywhere, limited = EDITS[name]()(x, point()), EDITS[name](pos)(x, point())
    assert torch.equal(limited[where], everywhere[where])
    assert torch.equal(limited[~where], x[~where])
    # One step at a time, as at a state point, must come to the same.
    steps = [EDITS[name](pos)(x[:, t], point(t, POS)) for t in range(POS)]
    torch.testing.assert_close(torch.stack(steps, 1), limited, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EDITS)
def test_at_and_pos_are_the_same_restriction(name):
    torch.testing.assert_close(
        pl.at([1, -1], EDITS[name]())(acts(), hook=point()), EDITS[name]([1, -1])(acts(), hook=point())
    )


def test_mean_is_global_or_per_position():
    x = acts()
    assert torch.equal(edits.mean(x.mean(0))(x)[2], x.mean(0))
    assert torch.equal(edits.mean(x.mean((0, 1)))(x)[1, 3], x.mean((0, 1)))
    square = torch.arange(BATCH * BATCH * D).float().view(BATCH, BATCH, D)
    per_position = square.mean(0)  # (pos, d) with pos equal to batch: still per position, also at a step
    assert torch.equal(edits.mean(per_position)(square[:, 1], point(1, BATCH))[3], per_position[1])


@pytest.mark.parametrize("edit", [edits.replace, edits.add])
def test_a_value_by_position_means_the_same_in_chunks_of_every_size(edit):
    value = acts()[0]  # (pos, d)
    state = HookPoint("blocks.0.rnn.hook_h", "interior", ("batch", "pos", "d_model"), "layer", step=True)
    for batch in (1, POS, POS + 1):
        x = acts()[:1].repeat(batch, 1, 1)
        steps = [edit(value)(x[:, t], state.at(t, POS)) for t in range(POS)]
        torch.testing.assert_close(torch.stack(steps, 1), edit(value)(x))
    rows = acts()[:, 0]  # (batch, d), as many as there are examples and not as positions
    torch.testing.assert_close(edit(rows)(acts()[:, 1], state.at(1, POS)), edit(rows)(acts()[:, 1], None))
    with pytest.raises(ShapeError, match="4 positions, but the hook is at 1 of 5"):
        edit(rows)(acts()[:3, 1], state.at(1, POS))
    with pytest.raises(ShapeError, match=r"as \(batch, ...\) and as \(pos, ...\)"):
        pl.at(1, edit(value))(acts()[:1].repeat(POS, 1, 1), hook=point())
    torch.testing.assert_close(
        pl.at(1, edit(value))(acts(), hook=point())[:, 1], edit(value)(acts())[:, 1], msg="4 rows, 5 positions"
    )


def test_a_value_by_position_at_a_state_point_of_a_model():
    model = pl.wrap(zoo.build("lstm"))
    value, tokens = (torch.randn(POS, zoo.WIDTH, generator=torch.Generator().manual_seed(0)), zoo.tokens(POS, POS))
    hooks = [("blocks.1.rnn.hook_h", edits.replace(value))]
    whole = model.run_with_hooks(tokens, hooks)
    parts = [model.run_with_hooks(rows, hooks) for rows in tokens.split(2)]
    torch.testing.assert_close(whole, torch.cat(parts))
    assert not torch.allclose(whole, model(tokens))


def test_resampling_never_takes_the_own_example_and_follows_the_seed():
    x = acts()
    for seed in range(20):
        rows = edits.resample(x, seed).draw(BATCH)
        assert sorted(rows.tolist()) == list(range(BATCH))
        assert not bool((rows == torch.arange(BATCH)).any())
        assert torch.equal(edits.resample(x, seed)(x), x[rows])
    assert len({tuple(edits.resample(x, s).draw(BATCH).tolist()) for s in range(20)}) > 1
    other = acts(seed=5)
    assert torch.equal(edits.resample(x, 3).draw(BATCH), edits.resample(other, 3).draw(BATCH))
    assert torch.equal(edits.resample(other, rows=torch.tensor([0, 0, 1, 1]))(x)[1], other[0])
    assert edits.resample(acts()[:2], 0).draw(50).unique().tolist() == [0, 1]


def test_doses_run_from_nothing_to_all():
    x, s = acts(), space()
    torch.testing.assert_close(edits.project(s, 0.0)(x), x)
    torch.testing.assert_close(edits.project(s)(x), s.project_out(x))
    torch.testing.assert_close(edits.project(s, 0.3)(x), x + 0.3 * (s.project_out(x) - x))
    torch.testing.assert_close(edits.project(s, raw=True)(x), s.project_out_raw(x))
    torch.testing.assert_close(edits.project(s, keep=True)(x), s.keep(x))
    assert not torch.allclose(edits.project(s, raw=True)(x), edits.project(s)(x))
    half = edits.erase(torch.zeros_like, 0.5)(x.half())
    assert torch.equal(half, (x.half().float() * 0.5).half())


def test_values_spread_over_missing_axes_only():
    x = acts()
    assert torch.equal(edits.replace(torch.tensor(2.0))(x), torch.full_like(x, 2.0))
    assert torch.equal(edits.add(x[0])(x)[1], x[1] + x[0])
    for shape in [(D + 1,), (BATCH, D), (1, POS, D), (BATCH, POS - 1, D)]:
        with pytest.raises(ShapeError, match=r"resid_post.*gives \(4, 5, 3\)"):
            edits.replace(torch.zeros(shape))(x, point())
    with pytest.raises(ShapeError, match="mean"):
        edits.mean(x)(x, point())
    with pytest.raises(ShapeError, match="positions"):
        edits.mean(x.mean(0))(torch.zeros(BATCH, D), point(7, 9))
    with pytest.raises(ShapeError, match="name an example"):
        edits.resample(x, rows=torch.tensor([0]))(x)
    with pytest.raises(ShapeError, match="width"):
        edits.project(Subspace(torch.eye(4)[:1], torch.zeros(4)))(x)


@pytest.mark.parametrize(
    ("error", "pos"),
    [(InputError, 5), (InputError, [-6]), (ShapeError, torch.tensor([0])), (ShapeError, torch.ones(2, 2) > 0)],
)
def test_positions_outside_the_sequence_are_refused(error, pos):
    with pytest.raises(error):
        edits.zero(pos)(acts(), point())


def test_bad_values_are_refused_when_the_edit_is_made():
    with pytest.raises(InputError, match="NaN"):
        edits.mean(torch.tensor([1.0, float("nan")]))
    with pytest.raises(InputError, match="exclude"):
        edits.project(space(), raw=True, keep=True)
    with pytest.raises(InputError, match="example, pos"):
        edits.resample(torch.zeros(0, 4))


def test_gradients_pass_through_what_is_kept():
    x = acts().requires_grad_()
    s = space()
    edits.project(s)(x).sum().backward()
    torch.testing.assert_close(x.grad[0, 0], s.project_out_raw(torch.ones(D)))


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, D)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(D, D), torch.nn.Linear(D, D)])
        self.head = torch.nn.Linear(D, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_edits_change_a_hooked_model_and_leave_it_as_it_was():
    torch.manual_seed(0)
    module = Tower().eval()
    model = pl.wrap(module, blocks="blocks", embed="embed", unembed="head")
    tokens = torch.arange(BATCH * POS).view(BATCH, POS) % 7
    with torch.no_grad():
        plain = model(tokens)
        out = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", edits.zero(pos=1))])
        torch.testing.assert_close(out[:, 1], module.head.bias.expand(BATCH, 7))
        assert torch.equal(out[:, 0], plain[:, 0])
        assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize(
    ("axes", "axis"), [(("batch", "pos", "head", "d_head"), 2), (("batch", "head", "pos", "key_pos"), 1)]
)
def test_an_edit_at_heads_leaves_the_other_heads_as_they_are(axes, axis, step):
    whole = HookPoint("blocks.0.attn.hook_z", "interior", axes, "attn")
    x = torch.rand(2, 3, 3, 3) + 1
    got = edits.at_heads([0, -1], edits.zero())(x, whole)
    if step:
        got = pl.at([0, 1, 2], edits.at_heads([0, -1], edits.zero()))(x, whole)
    assert [bool(got.select(axis, i).any()) for i in range(3)] == [False, True, False]
    assert torch.equal(got.select(axis, 1), x.select(axis, 1))
    edited = edits.replace(2 * x, pos=1)
    limited = edits.at_heads(1, edited)(x, whole)
    assert torch.equal(limited.select(axis, 1), edited(x, whole).select(axis, 1))
    assert torch.equal(limited.select(axis, 0), x.select(axis, 0))


def test_heads_that_are_not_there_are_refused():
    heads = HookPoint("blocks.0.attn.hook_z", "boundary", ("batch", "pos", "head", "d_head"), "attn")
    with pytest.raises(InputError, match=r"heads=\[3\].*hook_z' has 3, from 0 to 2"):
        edits.at_heads(3, edits.zero())(torch.ones(1, 1, 3, 2), heads)
    with pytest.raises(ShapeError, match=r"needs a hook point with heads.*'blocks.0.hook_resid_post'"):
        edits.at_heads(0, edits.zero())(acts(), point())
    with pytest.raises(InputError, match="names no head"):
        edits.at_heads([], edits.zero())

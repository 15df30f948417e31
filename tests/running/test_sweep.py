"""The engine: runs from the first changed position give what one full run a condition gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import zoo

import probelens as pl
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import sweep
from probelens.running.sweep.resume import Resume
from probelens.running.sweep.resumer import Resumer, resumer_of
from probelens.running.sweep.strategy import Full, Skip, Unfit
from probelens.running.sweep.work import Work

N, LENGTH = 5, 12
RESUMES = ["neox", "neox-sequential", "gpt2", "llama", "gemma2", "mamba", "mamba2", "lstm", "gru", "lstm-fused",
           "gru-fused-time-first"]  # fmt: skip
SITES = ["hook_embed", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post",
         "blocks.2.hook_resid_post"]  # fmt: skip


def add_at(name: str, pos: int, size: float = 1.0) -> Condition:
    def fn(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        out = tensor.clone()
        # Not a constant, which a layer norm takes away again.
        out[:, pos] += size * torch.linspace(-1, 1, tensor.shape[-1]).square()
        return out

    return Condition((name, pos), (Intervention(name, lambda rows: fn),))


def last(logits: torch.Tensor) -> torch.Tensor:
    return logits.flatten(1)


def one_by_one(model: pl.HookedModel, x: torch.Tensor, conditions: list[Condition], read: Read) -> torch.Tensor:
    """A full forward for each condition."""
    rows, out = torch.arange(len(x)), []
    for c in conditions:
        with torch.no_grad():
            logits = model.run_with_hooks(x, [(i.name, i.edit_for(rows)) for i in c.interventions])
        if read.pos is not None:
            logits = logits.gather(1, read.pos[..., None].expand(-1, -1, logits.shape[-1]))
        out.append(read.fn(logits))
    return torch.stack(out)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max())


def cells(model: pl.HookedModel) -> list[Condition]:
    inner = "blocks.1.hook_mixer_out" if "blocks.1.hook_mixer_out" in model.hook_dict else "blocks.1.hook_attn_out"
    inner = inner if inner in model.hook_dict else "blocks.1.mixer.hook_out"
    inner = inner if inner in model.hook_dict else "blocks.1.hook_resid_post"
    names = [name for name in (*SITES, inner) if name in model.hook_dict]
    return [add_at(name, p) for name in names for p in range(LENGTH)]


@pytest.mark.parametrize("name", RESUMES)
def test_runs_from_the_middle_equal_whole_runs(name: str) -> None:
    model, x = pl.wrap(zoo.build(name)), zoo.tokens(N, LENGTH, seed=3)
    conditions = cells(model)
    # Two read positions an example, also before edits, and all positions.
    several = torch.stack([torch.arange(N) + 2, torch.full((N,), LENGTH - 1)], 1)
    for read in (Read(last, several), Read(last)):
        got = sweep(model, x, conditions, read, batch_size=3)
        assert got.path == "resume"
        want = one_by_one(model, x, conditions, read)
        assert close(got.values, want)
        assert (want - got.base).abs().max() > 1e-2
        assert close(got.base, one_by_one(model, x, [Condition((), ())], read)[0])


@pytest.mark.parametrize("name", ["neox", "mamba"])
def test_an_edit_after_the_read_position_or_of_nothing_gives_exactly_the_base(name: str) -> None:
    model, x = pl.wrap(zoo.build(name)), zoo.tokens(N, LENGTH, seed=3)
    late = [add_at("blocks.1.hook_resid_pre", p) for p in range(6, LENGTH)]
    nothing = [add_at("blocks.1.hook_resid_pre", p, 0.0) for p in range(LENGTH)]
    got = sweep(model, x, [*late, *nothing], Read(last, torch.full((N, 1), 5)))
    assert got.path == "resume"
    assert torch.equal(got.values, got.base.expand_as(got.values))


def test_passes_shared_or_not_and_kept_states_far_apart_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = zoo.tokens(N, LENGTH, seed=3), Read(last, torch.full((N, 1), LENGTH - 1))
    for name in ("neox", "mamba"):
        model = pl.wrap(zoo.build(name))
        conditions = cells(model)
        together = sweep(model, x, conditions, read)
        monkeypatch.setattr(Resumer, "overhead", lambda self: 0.0)
        alone = sweep(model, x, conditions, read)
        monkeypatch.undo()
        assert close(together.values, alone.values)
        assert together.path == alone.path == "resume"
    resumer = resumer_of(model)
    assert resumer is not None
    monkeypatch.setattr(Resumer, "BUDGET", resumer.holds(N, LENGTH, 3))
    spacings, base = [], type(resumer).base
    monkeypatch.setattr(type(resumer), "base", lambda self, *args: spacings.append(self.spacing) or base(self, *args))
    coarse = sweep(model, x, conditions, read)
    assert set(spacings) == {3}
    assert coarse.path == "resume"
    assert close(coarse.values, together.values)


def test_edits_of_several_blocks_and_inside_them() -> None:
    x, read = zoo.tokens(N, LENGTH, seed=3), Read(last)
    for name, inside in (
        ("neox", "blocks.0.attn.hook_z"), ("mamba", "blocks.0.mixer.hook_ssm_state"), ("lstm", "blocks.0.rnn.hook_c"),
        ("gru-fused-time-first", "blocks.1.rnn.hook_h"),
    ):  # fmt: skip
        model = pl.wrap(zoo.build(name))

        def double(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            return tensor * 2 if hook.pos is None or hook.pos >= 7 else tensor

        joint = [
            Condition(("joint", p), (*add_at("blocks.0.hook_resid_pre", p).interventions, *add_at("blocks.1.hook_resid_post", p).interventions))
            for p in range(4)
        ]  # fmt: skip
        limited = Intervention("blocks.1.hook_resid_pre", lambda rows: pl.edits.scale(3.0, pos=[2, 8]))
        conditions = [
            *joint,
            Condition(("inside",), (Intervention(inside, lambda rows, fn=double: fn),)),
            Condition((), (limited,)),
            Condition((), ()),
        ]
        got = sweep(model, x, conditions, read)
        assert got.path == "resume"
        assert torch.equal(got.values[-1], got.base)
        assert close(got.values, one_by_one(model, x, conditions, read))


@pytest.mark.parametrize("name", list(zoo.DECODERS))
def test_every_decoder_gives_the_numbers_of_whole_runs(name: str) -> None:
    model, x = pl.wrap(zoo.more(name)), zoo.tokens(3, LENGTH, seed=3)
    read = Read(last, torch.full((3, 1), LENGTH - 1))
    conditions = [add_at(f"blocks.1.hook_{kind}", p) for kind in ("resid_pre", "resid_post") for p in (0, 5, 11)]
    got, want = sweep(model, x, conditions, read), one_by_one(model, x, conditions, read)
    # BART keeps its keys in a cache for an encoder, too. Windows and chunks of 4 positions are shorter than the sequence.
    assert (got.path == "resume") == (name != "bart"), got.why
    assert close(got.values, want)
    assert (want - got.base).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["jamba", "bamba", "qwen3-next", "lfm2", "falcon-h1"])
def test_keys_of_some_layers_and_states_of_others_are_kept(name: str) -> None:
    model, x = pl.wrap(zoo.more(name)), zoo.tokens(3, LENGTH, seed=3)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    read = Read(last, torch.full((3, 1), LENGTH - 1))
    conditions = [add_at(f"blocks.{layer}.hook_resid_pre", p) for layer in range(3) for p in (0, 5, 11)]
    for told, spacing in ((None, 1), (mask, 1), (None, 3)):
        work = Work(model, x, conditions, read, told, 64, None, 0)
        resume = Resume(work)
        resume.limits = dataclasses.replace(resume.limits, spacing=spacing)
        values, base = resume.run_all(False, "")
        want = Full(work).run_all(False, "")[0]
        assert close(values, want)
        assert (want - base).abs().max() > 1e-3


def test_what_is_unusual_runs_the_plain_way_with_the_same_numbers() -> None:
    x, read = zoo.tokens(N, LENGTH, seed=3), Read(last, torch.full((N, 1), LENGTH - 1))
    model = pl.wrap(zoo.build("neox"))
    conditions = cells(model)
    want = one_by_one(model, x, conditions, read)
    assert sweep(model, x[:, :7], conditions[:3], Read(last)).path != "resume", "short sequences"
    handle = model.module.gpt_neox.layers[2].register_forward_hook(lambda *a: None)
    got = sweep(model, x, conditions, read)
    assert got.path == "skip", "a hook of the user's own may count positions"
    assert close(got.values, want)
    handle.remove()
    assert sweep(model, x, conditions, read).path == "resume"
    for name in ("lstm-bidirectional", "gru-bidirectional-fused"):
        other = pl.wrap(zoo.build(name))
        some = [add_at("blocks.0.hook_resid_pre", p) for p in range(LENGTH)]
        got = sweep(other, x, some, read)
        assert got.path != "resume", name
        assert close(got.values, one_by_one(other, x, some, read))


def test_a_resumer_that_gives_other_numbers_is_noticed_and_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = zoo.tokens(N, LENGTH, seed=3), Read(last, torch.full((N, 1), LENGTH - 1))
    model = pl.wrap(zoo.build("neox"))
    conditions = cells(model)
    from probelens.adapters.hf.resume import KeyValues

    right = KeyValues.tail
    monkeypatch.setattr(KeyValues, "tail", lambda *a: right(*a) * 1.01)
    got = sweep(model, x, conditions, read)
    monkeypatch.undo()
    assert got.path == "skip"
    assert close(got.values, one_by_one(model, x, conditions, read))
    assert sweep(model, x, conditions, read).path == "skip"


def test_nothing_stays_on_the_module_after_an_edit_that_fails() -> None:
    for name in ("neox", "mamba"):
        model, x = pl.wrap(zoo.build(name)), zoo.tokens(N, LENGTH, seed=3)
        before = model(x)

        def fail(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            raise ValueError("on purpose")

        bad = [Condition((i,), (Intervention("blocks.1.hook_resid_pre", lambda rows, fn=fail: fn),)) for i in range(4)]
        with pytest.raises(ValueError, match="on purpose"):
            sweep(model, x, bad, Read(last))
        assert not any("forward" in vars(m) for m in model.module.modules())
        assert torch.equal(model(x), before)


def test_a_resumer_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = zoo.tokens(N, LENGTH, seed=3), Read(last)
    right, wrong = pl.wrap(zoo.build("neox")), pl.wrap(zoo.build("neox"))
    monkeypatch.setattr(wrong.adapter, "resumer", lambda model: "mine")
    with pytest.raises(pl.InputError, match=r"HFTransformer.resumer\(\) gave a str. It must give a .*Resumer, or None"):
        sweep(wrong, x, cells(wrong), read)
    assert sweep(right, x, cells(right), read).path == "resume"
    monkeypatch.setattr(wrong.adapter, "resumer", lambda model: None)
    assert sweep(wrong, x, cells(wrong), read).path == "skip"


def test_strategies_that_can_not_run_some_work_say_why() -> None:
    model, x, read = pl.wrap(zoo.build("neox")), zoo.tokens(N, LENGTH, seed=3), Read(last)

    def work(conditions: list[Condition], memory: int | None = None) -> Work:
        return Work(model, x, conditions, read, None, 64, memory, 0)

    assert [kind(work(cells(model))).path for kind in (Resume, Skip, Full)] == ["resume", "skip", "full"]
    with pytest.raises(Unfit, match="2 conditions that could begin in mid-sequence"):
        Resume(work(cells(model)[:2]))
    with pytest.raises(Unfit, match="no condition edits the blocks alone"):
        Skip(work([add_at("ln_final.hook_in", 1)]))
    for kind in (Resume, Skip):
        with pytest.raises(Unfit, match="does not fit the memory budget of 1000 bytes"):
            kind(work(cells(model), 1000))
    with pytest.raises(pl.InputError, match="memory=1000 bytes: one example"):
        Full(work(cells(model), 1000))
    values = [kind(work(cells(model))).run_all(False, "")[0] for kind in (Resume, Skip, Full)]
    assert close(values[0], values[2])
    assert close(values[1], values[2])
    assert values[2].std() > 1e-2

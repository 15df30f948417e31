"""Plans of sweeps: what they count is what runs, what they hold is what is held, and no budget changes a number."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from primitives import APART, OTHER, PAIRS, RESID, TASK, spaces
from test_sweep import LENGTH, add_at, last
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import probelens as pl
from probelens.hooks.forwards import forward_now
from probelens.running.sweep.conditions import Condition, Intervention, Read
from probelens.running.sweep.plan import SweepPlan, plan, sweep
from probelens.running.sweep.resume import Resume

N = 5
FAMILIES = {"neox": "resume", "mamba": "resume", "gru": "resume", "lstm-bidirectional": "skip"}
READ = Read(last, torch.full((N, 1), LENGTH - 1))
SITES = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post"]


def stated(name: str, pos: int) -> Condition:
    """``add_at`` that says where it begins."""
    (one,) = add_at(name, pos).interventions
    return Condition((name, pos), (Intervention(name, one.edit_for, torch.full((N,), pos)),))


def cells(make: Callable[[str, int], Condition] = stated) -> list[Condition]:
    return [make(name, pos) for name in SITES for pos in range(LENGTH)]


def wrapped(name: str) -> pl.HookedModel:
    model = pl.wrap(zoo.build(name))
    # Trials on random tokens come once a model, and are over now.
    pl.collect(model, zoo.tokens(2, LENGTH), "layers")
    if name == "gru":
        # So do those of the layout of each point; a plan doesn't count them.
        pl.collect(model, tokens(), ["resid_pre", "blocks.*.rnn.hook_h"])
    if FAMILIES.get(name) == "skip":
        # So do those of the layout where it isn't known; a plan doesn't count them.
        sweep(model, tokens(), cells(), READ)
    return model


def tokens(n: int = N) -> Tensor:
    return zoo.tokens(n, LENGTH, seed=3)


def pairs(n: int = N) -> pl.PatchPairs:
    clean, corrupted = tokens(n), zoo.tokens(n, LENGTH, seed=3)
    rows, edit = torch.arange(n), torch.arange(n) % 3 + 2
    corrupted[rows, edit] = (clean[rows, edit] + 1) % zoo.VOCAB
    answers = torch.stack([rows % zoo.VOCAB, (rows + 3) % zoo.VOCAB], 1)
    return pl.PatchPairs(clean, corrupted, edit, torch.full((n,), LENGTH - 1), answers)


class Counted:
    """Counts positions that go into blocks and into the unembedding, below any hook and any formula of the engine."""

    def __init__(self, model: pl.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = self.unembedded = 0
        module: Any = model.module
        block = module.get_submodule(model.adapter.blocks[0])
        self.head = module.get_submodule(model.adapter.parts["unembed"])
        native = nn.Module.__call__

        def call(this: nn.Module, *args: Any, **kw: Any) -> Any:
            # Blocks before the first one that runs are called, too, and pass on what they get.
            skipped = re.search(r"^passed_over\.|^_blank\.", getattr(forward_now(this), "__qualname__", ""))
            out = native(this, *args, **kw)
            # Where a run stops before a block, the call doesn't come back.
            if type(this) is type(block) and not skipped:
                self.blocks += args[0].shape[0] * args[0].shape[1]
            elif this is self.head:
                self.unembedded += args[0].shape[0] * args[0].shape[1]
            return out

        # Not by hooks or another forward: these are a reason to run another way, and to try everything anew.
        monkeypatch.setattr(nn.Module, "__call__", call)

    def of(self, call: Callable[[], Any]) -> tuple[int, int]:
        self.blocks = self.unembedded = 0
        call()
        return self.blocks, self.unembedded


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.see(x)
        return out

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.now += size
            self.most = max(self.most, self.now)
        self.alive[key] = self.alive.get(key, 0) + 1
        weakref.finalize(x, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key]
            self.now -= size


def peak(call: Callable[[], Any]) -> int:
    with Peak() as found:
        call()
    return found.most


def needs(model: pl.HookedModel, x: Tensor) -> int:
    """The peak of one forward; where there are recurrent states to keep, of one that reads them in one layer."""
    state = "blocks.0.mixer.hook_ssm_state"
    return peak(lambda: model.run_with_cache(x, state if state in model.hook_dict else "hook_embed"))


# -- counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch_size", [64, 2])
def test_a_plan_counts_what_runs(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(name)
    planned = plan(model, tokens(), cells(), READ, batch_size=batch_size)
    assert planned.path == FAMILIES[name]
    assert planned.exact == (planned.path != "resume")
    assert planned.batches == -(-N // batch_size)
    counted = Counted(model, monkeypatch)
    # The first run tries on these inputs whether resuming is right, and the plan knows that it will.
    assert counted.of(planned.run) == (planned.block_positions, planned.unembedded)
    again = plan(model, tokens(), cells(), READ, batch_size=batch_size)
    assert (again.block_positions < planned.block_positions) == (planned.path == "resume")
    assert counted.of(again.run) == (again.block_positions, again.unembedded)

    def naive() -> None:
        for condition in [Condition((), ()), *cells()]:
            model.run_with_hooks(tokens(), [(i.name, i.edit_for(torch.arange(N))) for i in condition.interventions])

    assert counted.of(naive) == (planned.naive_block_positions, planned.naive_unembedded)
    assert planned.ratio > 1


@pytest.mark.parametrize("name", ["neox", "mamba"])
def test_where_positions_are_not_stated_the_plan_is_a_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(name)
    sweep(model, tokens(), cells(), READ)
    known, unknown = (plan(model, tokens(), cells(make), READ) for make in (stated, add_at))
    assert known.block_positions < unknown.block_positions <= unknown.naive_block_positions
    counted = Counted(model, monkeypatch)
    ran = counted.of(unknown.run)[0]
    assert ran <= unknown.block_positions
    assert ran == known.block_positions
    assert "at most" in str(unknown)


@pytest.mark.parametrize("name", FAMILIES)
def test_patching_runs_no_more_than_its_plan_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(name)
    inside = [n for n in model.hook_dict if re.match(r"blocks.1.(attn.hook_z|mixer.hook_ssm_y|rnn.hook_h)$", n)]
    for sites in ("layers", "hook_embed", inside):
        pl.collect(model, zoo.tokens(2, LENGTH), sites)  # trials of the layout come once a point
        planned = pl.patch_plan(model, pairs(), sites, batch_size=3)
        counted = Counted(model, monkeypatch)
        ran = counted.of(planned.run)[0]
        assert 0 < ran <= planned.block_positions <= planned.naive_block_positions
        assert ran == planned.block_positions or not planned.sweep.exact
        monkeypatch.undo()


def test_a_wrong_statement_of_the_first_position_changes_no_number() -> None:
    for name in ("neox", "mamba"):
        model = wrapped(name)
        right = sweep(model, tokens(), cells(), READ)

        def late(name: str, pos: int) -> Condition:
            (one,) = stated(name, pos).interventions
            return Condition((), (Intervention(name, one.edit_for, torch.full((N,), LENGTH)),))

        wrong = sweep(model, tokens(), cells(late), READ)
        assert right.path == wrong.path == "resume"
        torch.testing.assert_close(wrong.values, right.values)
        assert (right.values - right.base).abs().max() > 1e-2


# -- which path, and why ----------------------------------------------------------------------------


@contextmanager
def module_hook(model: pl.HookedModel) -> Iterator[None]:
    handle = model.module.get_submodule(model.adapter.blocks[1]).register_forward_hook(lambda *a: None)
    yield
    handle.remove()


def hooked(model: pl.HookedModel) -> Any:
    return model.hooks([("hook_embed", lambda t, hook: t)])


def of(name: str = "neox", x: Tensor | None = None, context: Any = None, dtype: Any = None, **kw: Any) -> SweepPlan:
    model, x = wrapped(name), tokens() if x is None else x
    if dtype is not None:
        model.module.to(dtype)
    conditions = kw.pop("conditions", cells())
    if context is None:
        return plan(model, x, conditions, Read(last), **kw)
    with context(model):
        found = plan(model, x, conditions, Read(last), **kw)
        model(x)
    return found


REASONS: dict[str, tuple[Callable[[], SweepPlan], str, str]] = {
    "nothing": (of, "resume", "^$"),
    "mask": (lambda: of(attention_mask=torch.ones(N, LENGTH)), "resume", "^$"),
    "half": (lambda: of(dtype=torch.bfloat16), "resume", "^$"),
    "hooks": (lambda: of(context=hooked), "full", "^hooks on the model$"),
    "module hooks": (lambda: of(context=module_hook), "skip", "^hooks on the model's modules$"),
    "short": (lambda: of(x=tokens()[:, :7], conditions=cells()[:5]), "skip", "^sequences shorter than 8"),
    "adapter": (lambda: of("lstm-bidirectional"), "skip", "^the adapter can't resume"),
    "sliding window": (lambda: of("gemma2"), "resume", "^$"),
    "few": (lambda: of(conditions=cells()[:2]), "skip", "^2 conditions that could begin"),
    "none": (lambda: of(conditions=[]), "full", "^no conditions$"),
    "after the blocks": (lambda: of(conditions=[add_at("ln_final.hook_in", p) for p in range(4)]), "full", "edits the blocks"),
    "budget": (lambda: of(memory=20_000), "skip", r"^does not fit the memory budget of 19.53 KiB: needs \d+\.\d+ KiB$"),
    "small budget": (lambda: of(memory=1500), "full", r"^does not fit the memory budget of 1.46 KiB: needs \d+\.\d+ KiB$"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_plan_says_why_no_shorter_path_is_possible(name: str) -> None:
    make, path, why = REASONS[name]
    found = make()
    assert found.path == path
    assert re.search(why, found.why), found.why
    assert found.why in str(found)


def test_what_is_usually_kept_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    from probelens.running.sweep.resumer import Resumer

    monkeypatch.setattr(Resumer, "BUDGET", 1000)
    assert "does not fit the memory budget of 1000 bytes" in of().why
    assert of(memory=10**8).path == "resume", "a budget of the caller's own is the one that counts"


def test_a_trial_that_fails_makes_the_result_say_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from probelens.adapters.hf.resume import KeyValues

    model, right = wrapped("neox"), KeyValues.tail
    want = sweep(wrapped("neox"), tokens(), cells(), READ).values
    planned = plan(model, tokens(), cells(), READ)
    monkeypatch.setattr(KeyValues, "tail", lambda *a: right(*a) * 1.01)
    found = planned.run()
    monkeypatch.undo()
    assert (planned.path, found.path, found.why) == ("resume", "skip", "a trial on this model gave other numbers")
    torch.testing.assert_close(found.values, want)
    assert plan(model, tokens(), cells(), READ).path == "skip"
    assert planned.run().path == "skip", "an older plan doesn't bring it back"


def test_a_plan_of_a_model_that_changed_since_is_made_anew() -> None:
    model = wrapped("neox")
    planned = plan(model, tokens(), cells(), READ)
    before = planned.run()
    with model.hooks([("hook_embed", lambda t, hook: t * 0.5)]):
        found = planned.run()
        want = sweep(model, tokens(), cells(), READ)
    assert (before.path, found.path, found.why) == ("resume", "full", "hooks on the model")
    assert torch.equal(found.values, want.values)
    assert not torch.allclose(found.values, before.values, atol=1e-3)


def test_hidden_states_that_were_asked_for_before_make_no_sweep_longer() -> None:
    model = wrapped("neox")
    before = sweep(model, tokens(), cells(), READ)
    # The recording hooks that transformers puts on the blocks then stay.
    model.module(tokens(), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.module.modules())
    found = sweep(model, tokens(), cells(), READ)
    assert (found.path, found.why) == ("resume", "")
    assert torch.equal(found.values, before.values)


def test_whether_runs_may_begin_at_a_block_is_asked_once_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = wrapped("neox"), []
    native = pl.HookedModel.can_start_at

    def counted(self: pl.HookedModel, layer: int, inputs: Any = None) -> bool:
        asked.append(layer)
        return native(self, layer, inputs)

    monkeypatch.setattr(pl.HookedModel, "can_start_at", counted)
    few, many = ([stated(SITES[1], pos) for pos in range(n)] for n in (3, LENGTH))
    counts = []
    for conditions in (few, many):
        asked.clear()
        plan(model, tokens(), conditions, READ)
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_leaves_the_model_as_it_is(name: str) -> None:
    model, states = wrapped(name), ["training", "forward", "_forward_hooks", "_forward_pre_hooks"]
    model.module.train()

    def look() -> list[Any]:
        return [{key: str(vars(m).get(key)) for key in states} for m in model.module.modules()]

    before, weights = look(), {k: v.clone() for k, v in model.module.state_dict().items()}
    random = torch.random.get_rng_state()
    inside = [n for n in model.hook_dict if n.startswith("blocks.1.")][:3]
    for sites in ("layers", inside):
        pl.patch_plan(model, pairs(), sites, memory=10**6)
    assert look() == before
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(weights[k], v) for k, v in model.module.state_dict().items())
    assert not model.has_hooks()
    model.module.eval()
    assert look() != before, "a change is seen"


# -- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_peak_falls_with_the_budget_and_the_values_stay(name: str) -> None:
    model, many, positions = wrapped(name), pairs(8), [3, 11]
    want = pl.patch(model, many, "layers", positions)
    # The trial of the first run is over.
    peaks, paths = [], []
    for memory in (None, 80_000, 9_000):
        planned = pl.patch_plan(model, many, "layers", positions, memory=memory)
        got = planned.run()
        assert (got.values - want.values).abs().max() <= 1e-6 * want.values.abs().max()
        assert got.path == planned.path
        peaks.append(peak(planned.run))
        paths.append(got.path)
        if memory is not None:
            assert planned.bytes <= memory
            # Beside it stands what a forward of a batch needs by itself while it runs, which a pass doesn't exceed.
            rows = many.clean[: planned.sweep.batch_size]
            assert peaks[-1] <= planned.bytes + needs(model, rows)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2.5
    assert (paths[0], paths[-1]) == (FAMILIES[name], "full" if name == "lstm-bidirectional" else "skip")
    assert want.values.std() > 1e-2


@pytest.mark.parametrize("name", ["neox", "mamba"])
def test_a_budget_spaces_kept_states_divides_passes_and_changes_no_number(name: str) -> None:
    model, x = wrapped(name), tokens()
    want = sweep(model, x, cells(), READ)
    seen = set()
    for memory in (300_000, 100_000, 40_000, 26_000):
        planned = plan(model, x, cells(), READ, memory=memory)
        if planned.path == "resume":
            assert isinstance(planned._strategy, Resume)
            limits = planned._strategy.limits
            seen.add((limits.batch, limits.spacing, limits.together))
            got = planned.run()
            assert got.path == "resume"
            assert planned.bytes <= memory
            assert (got.values - want.values).abs().max() <= 1e-6 * want.values.abs().max()
    assert len(seen) >= 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_budget_too_small_says_what_is_needed(name: str) -> None:
    model = wrapped(name)
    with pytest.raises(pl.InputError, match="memory=10 bytes.*one example of 12 positions.*Give at least") as err:
        pl.patch(model, pairs(), memory=10)
    need = int(re.search(r"needs (\d+)", str(err.value))[1])  # type: ignore[index]
    with pytest.raises(pl.InputError, match="Give at least"):
        pl.patch(model, pairs(), memory=need - 1)
    enough = pl.patch(model, pairs(), memory=need)
    torch.testing.assert_close(enough.values, pl.patch(model, pairs()).values)
    for bad in (0.5, "1 GiB", True):
        with pytest.raises(pl.InputError, match="whole number of bytes"):
            pl.patch(model, pairs(), memory=bad)  # type: ignore[arg-type]


# -- from the primitives ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_run_of_a_plan_is_what_patch_gives(name: str) -> None:
    model = wrapped(name)
    for options in ({}, {"mode": "noise", "pos": None}, {"sites": "layers", "joint": True, "metric": "prob_diff"}):
        got, want = (call(model, pairs(), **options) for call in (pl.patch_plan, pl.patch))
        got = got.run()
        for key, value in vars(want).items():
            mine = vars(got)[key]
            assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, key
    assert not torch.equal(pl.patch(model, pairs(), mode="noise").values, want.values[:, :1])


def test_activations_of_the_source_are_held_for_one_batch() -> None:
    model = wrapped("neox")
    short, long = (pl.patch_plan(model, pairs(n), "layers", batch_size=2) for n in (4, 40))
    assert short.sweep.held["source"] == long.sweep.held["source"] == 2 * 4 * LENGTH * zoo.WIDTH * 4
    long.run()
    assert long._values.held == {}


CALLS: dict[str, Callable[..., Any]] = {
    "ablate": lambda m, **kw: pl.ablate(m, OTHER, spaces(m), label="state", controls=2, refit=False, **kw).values,
    "erase": lambda m, **kw: pl.erase(
        m, APART["fit"], APART["held"], label="state", sites=[RESID], controls=2, mlp=False, **kw
    ).ablation.values,
    "dose_response": lambda m, **kw: pl.dose_response(
        m, OTHER, spaces(m), label="state", refit=False, controls=2, **kw
    ).to_dataframe()["value"].tolist(),
    "length_transfer": lambda m, **kw: pl.length_transfer(
        m, TASK, spaces(m), (8, 10), trained_length=8, n=6, controls=2, **kw
    ).to_dataframe()["value"].tolist(),
    "ablate_component": lambda m, **kw: pl.ablate_component(m, OTHER, [RESID], "zero", target="state", **kw).values,
    "ablate_convolution": lambda m, **kw: pl.ablate_convolution(m, OTHER, "zero", target="state", **kw).values,
    "patch_sites": lambda m, **kw: pl.patch_sites(m, PAIRS, 3, "ABCD", correct_only=False, n_boot=20, **kw).values,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_primitive_takes_a_budget(name: str) -> None:
    model, call = wrapped("mamba"), CALLS[name]
    want, got = call(model), call(model, memory=6_000)
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), equal_nan=True)
    with pytest.raises(pl.InputError, match="Give at least"):
        call(model, memory=6)

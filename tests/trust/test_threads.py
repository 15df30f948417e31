"""Two threads, or two tasks of asyncio, on one model: right numbers or a refusal by name, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.running.gradients import frozen

SOON = 20.0  # what never comes is an error, not a test that hangs
RESID = "blocks.1.hook_resid_post"


class Other(threading.Thread):
    """A thread that keeps what its function gave or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.found, self.error = work, None, None

    def run(self) -> None:
        try:
            self.found = self.work()
        except BaseException as err:
            self.error = err

    def end(self) -> Any:
        self.join(SOON)
        assert not self.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.found


class Pause:
    """Holds up one thread in the midst of its runs of a model."""

    def __init__(self, model: pl.HookedModel, when: Callable[[], bool] = lambda: True) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        run = model.adapter.run

        def slowly(call: Any) -> Any:
            if threading.current_thread() is self.thread and when():
                self.reached.set()
                assert self.go.wait(SOON)
            return run(call)

        model.adapter.run = slowly  # type: ignore[method-assign]

    @contextlib.contextmanager
    def held(self, work: Callable[[], Any]) -> Iterator[Other]:
        """Inside the block another thread stands in the midst of its work."""
        other = Other(work)
        self.thread = other
        other.start()
        assert self.reached.wait(SOON)
        try:
            yield other
        finally:
            self.go.set()
            other.join(SOON)


def swapped(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if "forward" in module.__dict__]


def left(net: nn.Module) -> list[str]:
    hooked = [n for n, m in net.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    return swapped(net) + hooked


def pairs(seed: int, length: int = 8) -> pl.PatchPairs:
    clean = torch.randint(1, 23, (2, length), generator=torch.Generator().manual_seed(seed))
    corrupted = clean.clone()
    corrupted[:, 2] = corrupted[:, 2] % 22 + 1
    ends = torch.full((2,), length - 1)
    return pl.PatchPairs(clean, corrupted, torch.full((2,), 2), ends, torch.tensor([[1, 2]] * 2))


@pytest.mark.parametrize("family", ["neox", "mamba", "lstm"])
def test_two_threads_sweep_one_model_and_its_own_forward_runs_meanwhile(family: str) -> None:
    net, x = zoo.build(family), zoo.tokens(2, 8)
    model = pl.wrap(net)
    both = [pairs(1), pairs(2)]
    want = [pl.patch(model, each, "resid_pre").values for each in both]
    own = zoo.logits(net, x)
    pause = Pause(model, when=lambda: bool(swapped(net)))
    with pause.held(lambda: pl.patch(model, both[0], "resid_pre").values) as first:
        assert swapped(net), "the control: forwards of the sweep are in place"
        assert torch.equal(zoo.logits(net, x), own)
        second = Other(lambda: pl.patch(model, both[1], "resid_pre").values)
        second.start()
        second.join(0.2)  # without a turn it would be in the midst of the first by now, or done
    torch.testing.assert_close([first.end(), second.end()], want, atol=1e-5, rtol=1e-5)
    assert left(net) == []
    assert torch.equal(zoo.logits(net, x), own)


@pytest.mark.parametrize(
    ("family", "point"),
    [
        ("mamba", "blocks.0.mixer.hook_conv"), ("mamba", RESID), ("gpt2", "hook_pos_embed"),
        ("gpt2", "blocks.0.ln1.hook_scale"),
    ],
)  # fmt: skip
def test_hooks_reach_the_calls_of_their_thread_only_also_plain_ones(family: str, point: str) -> None:
    net, x = zoo.build(family), zoo.tokens()
    model, own = pl.wrap(net), zoo.logits(net, x)
    with model.hooks([(point, lambda t, hook: t * 0)]):
        edited = zoo.logits(net, x)
        other = Other(lambda: (zoo.logits(net, x), model(x).detach()))
        other.start()
        plain, wrapped = other.end()
    assert not torch.allclose(edited, own)
    assert torch.equal(plain, own)
    assert torch.equal(wrapped, own)
    assert left(net) == []


class Dropping(nn.Module):
    """In training mode its blocks give zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dropping() -> tuple[Dropping, pl.HookedModel]:
    net = Dropping()
    return net, pl.wrap(net, blocks="blocks", embed="embed", unembed="head")


def test_a_run_in_training_mode_waits_for_the_sweep_of_another_thread() -> None:
    net, model = dropping()
    x = zoo.tokens()
    acts = pl.collect(model, x)[RESID]
    net.train()
    dropped = model(x).detach()
    with Pause(model).held(lambda: pl.collect(model, x)[RESID]) as first:
        assert not net.training
        second = Other(lambda: model(x).detach())
        second.start()
        second.join(0.2)
        assert second.is_alive(), "without a turn it is done, in evaluation mode"
    assert torch.equal(first.end(), acts)
    assert torch.equal(second.end(), dropped)
    assert all(module.training for module in net.modules())


def test_blocks_in_eval_mode_that_overlap_give_the_flags_back_at_the_last_one() -> None:
    net, model = dropping()
    net.train()
    net.blocks[0].eval()
    before = [module.training for module in net.modules()]
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with model.evaluating():
            entered.set()
            assert leave.wait(SOON)

    other = Other(work)
    with model.evaluating():
        other.start()
        assert entered.wait(SOON)
    assert not any(module.training for module in net.modules())
    leave.set()
    other.end()
    assert [module.training for module in net.modules()] == before


def test_gradients_of_two_models_at_once_leave_every_flag_as_it_was() -> None:
    models = [pl.wrap(zoo.build("lstm", seed=seed)) for seed in (0, 1)]
    assert torch.backends.mkldnn.enabled
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with frozen(models[0]):
            entered.set()
            assert leave.wait(SOON)

    other = Other(work)
    other.start()
    assert entered.wait(SOON)
    with frozen(models[1]):  # another model, so it doesn't wait
        leave.set()
        other.end()
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    assert all(p.requires_grad for model in models for p in model.parameters())


def test_models_of_one_module_share_a_turn_and_other_models_do_not_wait() -> None:
    net, x = zoo.build("neox"), zoo.tokens()
    model, other = pl.wrap(net), pl.wrap(zoo.build("neox"))
    assert pl.wrap(net).turn is model.turn
    assert pl.wrap(net.gpt_neox, unembed=None).turn is model.turn
    assert other.turn is not model.turn
    with Pause(model).held(lambda: pl.collect(model, x)):
        free = Other(lambda: pl.collect(other, x)[RESID])
        free.start()
        assert free.end() is not None


def test_weights_that_another_thread_edits_are_refused_by_name() -> None:
    net, x = zoo.build("neox"), zoo.tokens()
    model = pl.wrap(net)
    own, name = model(x), "unembed.weight"
    with model.edit_weights({name: torch.zeros_like}):
        for call in (
            lambda: model(x),
            lambda: pl.collect(model, x),
            lambda: model.edit_weights({name: torch.ones_like}).__enter__(),
        ):
            other = Other(call)
            other.start()
            with pytest.raises(pl.InputError, match=r"in use by thread 'MainThread', inside model.edit_weights\(\)"):
                other.end()
        assert not model(x).any()

        async def inside() -> Any:
            return model(x)

        assert not asyncio.run(inside()).any(), "a loop inside the block is part of it"
    other = Other(lambda: model(x))
    other.start()
    assert torch.equal(other.end(), own)


def test_tasks_have_hooks_of_their_own_and_the_tasks_that_they_start_share_them() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    own = model(x)
    zero = [(RESID, lambda t, hook: t * 0)]
    edited = model.run_with_hooks(x, zero)

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()

        async def hooked() -> list[Tensor]:
            with model.hooks(zero):
                inside.set()
                await done.wait()
                started = asyncio.create_task(plain())
                return [model(x), await started, await asyncio.to_thread(model, x)]

        async def plain() -> Tensor:
            return model(x)

        task = asyncio.create_task(hooked())
        await inside.wait()
        assert torch.equal(await plain(), own)
        assert pl.collect(model, x, RESID)[RESID].any()
        done.set()
        assert all(torch.equal(out, edited) for out in await task)

    asyncio.run(main())
    assert left(model.module) == []


def test_a_task_that_awaits_with_edited_weights_keeps_others_out() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()

        async def edits() -> None:
            with model.edit_weights({"unembed.weight": torch.zeros_like}):
                inside.set()
                await done.wait()
                assert not model(x).any()

        task = asyncio.create_task(edits(), name="editor")
        await inside.wait()
        with pytest.raises(pl.InputError, match="in use by task 'editor'"):
            model(x)
        done.set()
        await task

    asyncio.run(main())
    assert model(x).any()


def test_two_models_that_run_each_other_in_hooks_are_refused_not_stuck() -> None:
    models = [pl.wrap(zoo.build("neox", seed=seed)) for seed in (0, 1)]
    x = zoo.tokens()
    met = threading.Barrier(2, timeout=SOON)

    def work(mine: int) -> Any:
        def hook(tensor: Tensor, hook: Any) -> None:
            met.wait()
            models[1 - mine](x)

        return models[mine].run_with_hooks(x, [("hook_embed", hook)])

    others = [Other(lambda i=i: work(i)) for i in (0, 1)]
    for other in others:
        other.start()
    for other in others:
        other.join(SOON)
    errors = [other.error for other in others]
    assert sorted(err is None for err in errors) == [False, True], errors
    assert "waits for a model that this thread runs" in str(next(filter(None, errors)))


def test_a_hook_may_run_its_own_model() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    own = model(x)
    seen: list[Tensor] = []

    def hook(tensor: Tensor, hook: Any) -> None:
        if not seen:
            seen.append(tensor)
            seen.append(pl.collect(model, x, "hook_embed")["hook_embed"])

    out = model.run_with_hooks(x, [("hook_embed", hook)])
    assert torch.equal(out, own)
    assert torch.equal(seen[0], seen[1])

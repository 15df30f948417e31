"""Running a wrapped model: the user's numbers, the layer axis, skipping, and hooks that can't fail silently."""

from __future__ import annotations

import threading

import pytest
import torch
import zoo
from torch import nn

import probelens as pl
from probelens.hooks.model import HookedModel

ALL = list(zoo.ZOO)
HF = [*zoo.TRANSFORMERS, *zoo.SSMS]


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def raw(name: str) -> nn.Module:
    return zoo.build(name)


def boundary(model: HookedModel) -> list[str]:
    return [p.name for p in model.hook_dict.values() if p.kind == "boundary"]


def leftovers(module: nn.Module) -> list[str]:
    return [
        path
        for path, m in module.named_modules()
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or "forward" in m.__dict__
    ]


def test_an_unhooked_call_gives_the_users_own_numbers(raw: nn.Module) -> None:
    x = zoo.tokens()
    want = zoo.logits(raw, x)
    with torch.no_grad():
        assert torch.equal(pl.wrap(raw)(x), want)


def test_identity_hooks_change_nothing_and_a_changed_tensor_changes_the_output(name: str, raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    want = zoo.logits(raw, x)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        same = model.run_with_hooks(x, [(boundary(model), lambda t, hook: t.clone())])
        assert torch.equal(same, want)
        every = model.run_with_hooks(x, [("*", lambda t, hook: t.clone())])
        assert (every - want).abs().max() <= 1e-5 * want.abs().max()
        for point in model.hook_dict:
            noise = model.run_with_hooks(
                x, [(point, lambda t, hook: t + torch.randn(t.shape, generator=generator).to(t))]
            )
            assert (noise - want).abs().max() > 1e-3, point
        assert torch.equal(zoo.logits(raw, x), want)


def test_the_layer_axis_is_what_the_blocks_take_and_return(name: str, raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    if name in HF:
        blocks = [raw.get_submodule(p) for p in model.adapter.blocks]
    else:
        if len(raw.layers) == 1:
            pytest.skip("the layers of one fused module have no module each; tested against unrolled layers below")
        blocks = list(raw.layers)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []
    for i, block in enumerate(blocks):

        def keep(m: nn.Module, args: tuple, out: object, i: int = i) -> None:
            seen[i] = (args[0].detach(), (out if isinstance(out, torch.Tensor) else out[0]).detach())

        handles.append(block.register_forward_hook(keep))
    zoo.logits(raw, x)
    for handle in handles:
        handle.remove()
    assert len(seen) == model.cfg.n_layers == zoo.LAYERS
    with torch.no_grad():
        _, cache = model.run_with_cache(x, boundary(model))
    for i, (before, after) in seen.items():
        assert torch.equal(cache["resid_pre", i], before)
        assert torch.equal(cache["resid_post", i], after)
    if name in HF:
        norm = raw.get_submodule(model.adapter.parts["ln_final"])
        assert torch.equal(cache["ln_final.hook_in"], seen[zoo.LAYERS - 1][1])
        assert torch.equal(cache["ln_final.hook_out"], norm(seen[zoo.LAYERS - 1][1]).detach())
        # The trap this pins: what HF calls the last hidden state is not the last block's output.
        hidden = raw(x, output_hidden_states=True).hidden_states
        assert not torch.allclose(hidden[-1], cache["resid_post", zoo.LAYERS - 1], atol=1e-3)


@pytest.mark.parametrize(("bidirectional", "batch_first"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_every_layer_of_a_fused_stack_equals_layers_run_one_by_one(
    cell: type, bidirectional: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    raw = zoo.Recurrent(cell, fused=True, bidirectional=bidirectional, batch_first=batch_first).eval()
    model, x = pl.wrap(raw), zoo.tokens()
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "blocks.*.hook_resid_*")
        h = raw.embed(x)
        fused = raw.layers[0]
        for layer in range(zoo.LAYERS):
            assert torch.equal(cache["resid_pre", layer], h)
            one = cell(h.shape[-1], zoo.WIDTH, batch_first=True, bidirectional=bidirectional)
            one.load_state_dict(
                {
                    key.replace(f"_l{layer}", "_l0"): value
                    for key, value in fused.state_dict().items()
                    if f"_l{layer}" in key
                }
            )
            h = one(h)[0]
            assert torch.allclose(cache["resid_post", layer], h, atol=1e-6)


def test_stop_at_layer_returns_the_residual_entering_that_block(raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    with torch.no_grad():
        _, cache = model.run_with_cache(x, "blocks.*.hook_resid_*")
        for layer in range(zoo.LAYERS):
            assert torch.allclose(model(x, stop_at_layer=layer), cache["resid_pre", layer], atol=1e-6)
        assert torch.equal(model(x, stop_at_layer=-1), model(x, stop_at_layer=zoo.LAYERS - 1))
        last = model(x, stop_at_layer=zoo.LAYERS)
    assert torch.allclose(last, cache["resid_post", zoo.LAYERS - 1], atol=1e-6)


def test_start_at_layer_gives_the_same_logits_and_really_skips(name: str, raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    want = zoo.logits(raw, x)
    calls: list[str] = []
    inner = [m for p in set(model.adapter.blocks) for m in raw.get_submodule(p).modules() if not list(m.children())]
    with torch.no_grad():
        for layer in range(zoo.LAYERS + 1):
            resid = model(x, stop_at_layer=layer)
            got = model(resid, start_at_layer=layer)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), layer
            changed = model(resid + torch.randn_like(resid), start_at_layer=layer)
            assert (changed - want).abs().max() > 1e-3
        if name in HF:
            handles = [m.register_forward_pre_hook(lambda m, a: calls.append("ran")) for m in inner]
            assert model.can_start_at(zoo.LAYERS), "with these hooks it is tried anew, which runs them too"
            calls.clear()
            model(x)
            full = len(calls)
            calls.clear()
            model(model(x, stop_at_layer=zoo.LAYERS), start_at_layer=zoo.LAYERS)
            stopped = len(calls)
            calls.clear()
            model(resid, start_at_layer=zoo.LAYERS)
            for handle in handles:
                handle.remove()
            assert stopped == full > 0
            assert calls == []


def test_the_users_module_is_left_as_it_was(name: str, raw: nn.Module) -> None:
    before = {k: v.clone() for k, v in raw.state_dict().items()}
    kind, x = type(raw), zoo.tokens()
    implementation = getattr(getattr(raw, "config", None), "_attn_implementation", None)
    model = pl.wrap(raw)

    def broken(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        raise RuntimeError("the user's own mistake")

    model.run_with_cache(x)
    for point in model.hook_dict:
        with pytest.raises(RuntimeError, match="own mistake"):
            model.run_with_hooks(x, [("*", lambda t, hook: None), (point, broken)])
        assert leftovers(raw) == [], point
    with pytest.raises(pl.InputError):
        model.run_with_hooks(torch.full((1, 3), zoo.VOCAB), [("*", lambda t, hook: None)])
    model(x, stop_at_layer=1)
    assert leftovers(raw) == []
    assert type(raw) is kind
    assert list(raw.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert getattr(getattr(raw, "config", None), "_attn_implementation", None) == implementation


def test_a_backward_hook_sees_the_gradient_that_autograd_computes(name: str, raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    point = "blocks.1.hook_resid_post"
    held: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        tensor.retain_grad()
        held["tensor"] = tensor

    model.run_with_hooks(x, [(point, keep)]).square().sum().backward()
    want = held["tensor"].grad
    got: dict[str, torch.Tensor] = {}

    def note(grad: torch.Tensor, hook: pl.HookPoint) -> None:
        got["grad"] = grad.clone()

    with model.hooks(bwd_hooks=[(point, note)]):
        model(x).square().sum().backward()
    assert want is not None
    assert want.abs().max() > 0
    assert torch.allclose(got["grad"], want, rtol=1e-5, atol=1e-6)


def test_a_backward_hook_replaces_the_gradient(raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()

    def upstream(hooks: list) -> torch.Tensor:
        # The embedding's output, not its weights: those may be tied to the unembedding.
        seen = []
        watch = [("hook_embed", lambda g, hook: seen.append(g.clone()))]
        model.run_with_hooks(x, bwd_hooks=[*watch, *hooks]).square().sum().backward()
        return seen[0]

    assert upstream([]).abs().max() > 0
    assert upstream([("blocks.1.hook_resid_pre", lambda g, hook: torch.zeros_like(g))]).abs().max() == 0


def test_incl_bwd_keeps_gradients_of_the_loss(raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    loss, cache = model.run_with_cache(x, "blocks.*.hook_resid_post", incl_bwd=True, return_type="loss")
    assert loss.ndim == 0
    for layer in range(zoo.LAYERS):
        grad = cache[f"blocks.{layer}.hook_resid_post_grad"]
        assert grad.shape == cache["resid_post", layer].shape
        assert grad.abs().max() > 0


def test_loss_is_the_next_token_cross_entropy(raw: nn.Module) -> None:
    model, x = pl.wrap(raw), zoo.tokens()
    with torch.no_grad():
        logits, loss = model(x, return_type="both")
    want = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, zoo.VOCAB), x[:, 1:].reshape(-1))
    assert torch.allclose(loss, want)
    assert model(x, return_type=None) is None


# -- silence is an error ------------------------------------------------------------------------------


def test_a_hook_that_does_not_fire_is_an_error() -> None:
    raw = zoo.build("mamba")
    model, x = pl.wrap(raw), zoo.tokens()
    silent = "backbone.layers.1.mixer.conv1d.hook_out"
    fired = []
    raw.backbone.layers[1].mixer.conv1d.register_forward_hook(lambda *a: fired.append(1))
    raw(x)
    if fired:
        pytest.skip("this transformers calls the convolution as a module, so the point does fire")
    for run in (
        lambda: model.run_with_hooks(x, [(silent, lambda t, hook: t * 0)]),
        lambda: model.run_with_cache(x, silent),
    ):
        with pytest.raises(pl.HookNotFiredError, match="conv1d.hook_out"):
            run()
    model.add_hook(silent, lambda t, hook: t * 0)
    with pytest.raises(pl.HookNotFiredError, match="conv1d.hook_out"):
        model(x)
    model.reset_hooks()
    model(x)


def test_hooks_that_no_forward_reached_are_an_error_at_the_end_of_the_block() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    with (
        pytest.raises(pl.HookNotFiredError, match="no forward pass"),
        model.hooks([("hook_embed", lambda t, hook: None)]),
    ):
        pass
    with model.hooks([("hook_embed", lambda t, hook: None)]):
        model(x)
    # An error of the user's own is not replaced by ours.
    with pytest.raises(ZeroDivisionError), model.hooks([("hook_embed", lambda t, hook: None)]):
        _ = 1 / 0


def test_a_backward_hook_without_a_backward_pass_is_an_error() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    with (
        pytest.raises(pl.HookNotFiredError, match="backward"),
        model.hooks(bwd_hooks=[("hook_embed", lambda g, hook: None)]),
    ):
        model(x)
    with pytest.raises(pl.InputError, match="no gradient"), torch.no_grad():
        model.run_with_hooks(x, bwd_hooks=[("hook_embed", lambda g, hook: None)])


def test_points_that_stop_at_layer_leaves_out() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    with pytest.raises(pl.HookNotFiredError, match="stop_at_layer"):
        model.run_with_hooks(x, [("blocks.2.hook_resid_post", lambda t, hook: None)], stop_at_layer=1)
    _, cache = model.run_with_cache(x, "*.hook_resid_post", stop_at_layer=2)
    assert list(cache) == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    _, cache = model.run_with_cache(model(x, stop_at_layer=2), "*.hook_resid_post", start_at_layer=2)
    assert list(cache) == ["blocks.2.hook_resid_post"]


# -- hooks and contexts -------------------------------------------------------------------------------------


def test_nested_contexts_run_outer_hooks_first_and_a_cache_sees_their_edits() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    order: list[str] = []
    point = "blocks.1.hook_resid_pre"

    def note(word: str, value: float):
        def fn(tensor: torch.Tensor, hook: pl.HookPoint) -> torch.Tensor:
            order.append(word)
            return torch.full_like(tensor, value)

        return fn

    with model.hooks([(point, note("outer", 1.0))]):
        with model.hooks([(point, note("inner", 2.0))]):
            _, cache = model.run_with_cache(x, point)
            assert order == ["outer", "inner"]
            assert (cache[point] == 2).all()
        _, cache = model.run_with_cache(x, point)
        assert (cache[point] == 1).all()
    _, cache = model.run_with_cache(x, point)
    assert not (cache[point] == 1).all()


def test_hooks_work_during_generation() -> None:
    for name in ("neox", "llama", "mamba"):
        raw = zoo.build(name)
        model, x = pl.wrap(raw), zoo.tokens(1, 4)
        kw = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        plain = raw.generate(x, **kw)
        steps: list[tuple[int, ...]] = []
        last = f"blocks.{zoo.LAYERS - 1}.hook_resid_post"

        def flip(tensor: torch.Tensor, hook: pl.HookPoint) -> torch.Tensor:
            steps.append(tuple(tensor.shape))  # noqa: B023
            return -tensor

        with model.hooks([(last, flip)]):
            edited = model.module.generate(x, **kw)
        assert len(steps) == 5
        assert not torch.equal(plain, edited)
        assert torch.equal(raw.generate(x, **kw), plain)


def test_added_hooks_stay_until_reset_and_permanent_ones_longer() -> None:
    raw = zoo.build("neox")
    model, x = pl.wrap(raw), zoo.tokens()
    want = zoo.logits(raw, x)
    model.add_hook("hook_embed", lambda t, hook: t * 2)
    model.add_hook("blocks.0.hook_resid_post", lambda t, hook: t * 2, is_permanent=True)
    both = zoo.logits(raw, x)
    model.reset_hooks()
    one = zoo.logits(raw, x)
    model.reset_hooks(including_permanent=True)
    assert not torch.allclose(both, one)
    assert not torch.allclose(one, want)
    assert torch.equal(zoo.logits(raw, x), want)
    assert leftovers(raw) == []


def test_reset_hooks_by_direction_and_contexts() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    model.hook_dict["hook_embed"].ctx["seen"] = 1
    model.add_hook("hook_embed", lambda t, hook: None, dir="fwd")
    model.add_hook("hook_embed", lambda g, hook: None, dir="bwd")
    model.reset_hooks(clear_contexts=False, direction="bwd")
    with torch.no_grad():
        model(x)
    assert model.hook_dict["hook_embed"].ctx == {"seen": 1}
    model.reset_hooks()
    assert model.hook_dict["hook_embed"].ctx == {}
    with pytest.raises(pl.InputError, match="Allowed"):
        model.reset_hooks(direction="sideways")  # type: ignore[arg-type]


def test_a_hook_gets_its_point_by_keyword_and_keeps_things_in_ctx() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    seen = []

    def fn(tensor: torch.Tensor, *, hook: pl.HookPoint) -> None:
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1
        seen.append((hook.name, hook.layer(), hook.pos))

    for _ in range(2):
        model.run_with_hooks(x, [("blocks.2.hook_resid_pre", fn)])
    assert seen == [("blocks.2.hook_resid_pre", 2, None)] * 2
    assert model.hook_dict["blocks.2.hook_resid_pre"].ctx == {"calls": 2}
    with pytest.raises(pl.InputError, match="whole model"):
        model.hook_dict["hook_embed"].layer()


def test_threads_have_hooks_of_their_own() -> None:
    raw = zoo.build("neox")
    model, x = pl.wrap(raw), zoo.tokens()
    want = zoo.logits(raw, x)
    errors: list[BaseException] = []

    def work(scale: float) -> None:
        try:
            for _ in range(15):
                with torch.no_grad():
                    _, cache = model.run_with_cache(x, "hook_embed")
                    plain = cache["hook_embed"]
                    with model.hooks([("hook_embed", lambda t, hook: t * scale)]):
                        _, cache = model.run_with_cache(x, "hook_embed")
                    assert torch.equal(cache["hook_embed"], plain * scale)
                    assert torch.equal(model(x), want)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(float(s),)) for s in (2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert leftovers(raw) == []


def test_hooks_at_one_position_leave_the_others() -> None:
    raw = zoo.build("gpt2")
    model, x = pl.wrap(raw), zoo.tokens()
    want = zoo.logits(raw, x)
    got = model.run_with_hooks(x, [("blocks.0.hook_resid_pre", pl.at([2, -1], lambda t, hook: t * 0))])
    changed = (got - want).abs().amax((0, 2)) > 1e-4
    assert changed.tolist() == [False, False, True, True, True, True, True]
    with pytest.raises(pl.InputError, match="7 positions"):
        model.run_with_hooks(x, [("hook_embed", pl.at(7, lambda t, hook: t))])
    for bad in ([], "x", 1.5, [True]):
        with pytest.raises((pl.InputError, TypeError)):
            pl.at(bad, lambda t, hook: t)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("mamba", "mixer.hook_ssm_state"),
        ("mamba2", "mixer.hook_ssm_state"),
        ("lstm", "rnn.hook_c"),
        ("gru", "rnn.hook_h"),
    ],
)
def test_a_cache_beside_an_edit_at_one_step_holds_every_step_as_edited(name: str, point: str) -> None:
    model, x, point = pl.wrap(zoo.build(name)), zoo.tokens(), f"blocks.0.{point}"
    with torch.no_grad():
        _, plain = model.run_with_cache(x, point)
        with model.hooks([(point, pl.at(3, lambda t, hook: t + 1))]):
            out, cache = model.run_with_cache(x, point)
        only = model.run_with_hooks(x, [(point, pl.at(3, lambda t, hook: t + 1))])
        each = model.run_with_hooks(x, [(point, lambda t, hook: t + 1 if hook.pos == 3 else None)])
    assert cache[point].shape == plain[point].shape
    assert torch.allclose(cache[point][:, :3], plain[point][:, :3], atol=1e-6)
    assert torch.allclose(cache[point][:, 3], plain[point][:, 3] + 1, atol=1e-5)
    assert not torch.allclose(cache[point][:, 4], plain[point][:, 4], atol=1e-4)
    assert torch.allclose(out, only, atol=1e-5)
    assert torch.allclose(each, only, atol=1e-5)


@pytest.mark.parametrize("name", ["neox-sequential", "gpt2", "llama", "gemma2"])
def test_an_edit_of_resid_mid_reaches_the_mlp_and_the_residual(name: str) -> None:
    raw = zoo.build(name)
    model, x = pl.wrap(raw), zoo.tokens()
    with torch.no_grad():
        _, cache = model.run_with_cache(x, boundary(model))
        assert torch.allclose(cache["resid_pre", 1] + cache["attn_out", 1], cache["resid_mid", 1], atol=1e-5)
        assert torch.allclose(cache["resid_mid", 1] + cache["mlp_out", 1], cache["resid_post", 1], atol=1e-5)
        shift = torch.randn(zoo.WIDTH, generator=torch.Generator().manual_seed(3))
        mid = model.run_with_hooks(x, [("blocks.1.hook_resid_mid", lambda t, hook: t + shift)])
        # The same edit, one step earlier: what attention adds to the residual.
        out = model.run_with_hooks(x, [("blocks.1.hook_attn_out", lambda t, hook: t + shift)])
    assert torch.allclose(mid, out, atol=1e-4)
    assert (mid - zoo.logits(raw, x)).abs().max() > 1e-3


def test_resid_mid_is_absent_on_parallel_blocks_and_the_error_says_why() -> None:
    model = pl.wrap(zoo.build("neox"))
    assert "blocks.0.hook_resid_mid" not in model.hook_dict
    with pytest.raises(pl.UnknownHookError, match="parallel"):
        model.run_with_cache(zoo.tokens(), "blocks.0.hook_resid_mid")


# -- inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", HF)
def test_padded_batches_give_the_users_numbers(name: str, side: str) -> None:
    raw = zoo.build(name)
    model, x = pl.wrap(raw), zoo.tokens(2, 8)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    mask = mask if side == "left" else mask.flip(1)
    own = {"attention_mask": mask}
    if side == "left" and name == "gpt2":
        own["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)  # as transformers' generate() does
    want = zoo.logits(raw, x, **own)
    with torch.no_grad():
        assert torch.equal(model(x, attention_mask=mask), want)
        assert torch.equal(model({"input_ids": x, "attention_mask": mask}), want)
        resid = model(x, stop_at_layer=2, attention_mask=mask)
        real = mask.bool()
        later = model(resid, start_at_layer=2, attention_mask=mask)
        assert torch.allclose(later[real], want[real], atol=1e-5)
        assert not torch.allclose(model(x)[real], want[real], atol=1e-4) or side == "right"


def test_lists_and_single_rows_are_tokens_too() -> None:
    raw = zoo.build("neox")
    model, x = pl.wrap(raw), zoo.tokens(1, 5)
    want = zoo.logits(raw, x)
    with torch.no_grad():
        assert torch.equal(model(x[0]), want)
        assert torch.equal(model(x.tolist()), want)


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (torch.tensor([[1, zoo.VOCAB]]), pl.InputError, f"0 to {zoo.VOCAB - 1}"),
        (torch.tensor([[-1, 2]]), pl.InputError, "token id -1"),
        (torch.zeros(1, 0, dtype=torch.long), pl.ShapeError, "not empty"),
        (torch.zeros(1, 2, 3, dtype=torch.long), pl.ShapeError, r"\(batch, pos\)"),
        ("some text", pl.InputError, "no tokenizer"),
        (object(), pl.InputError, "tokens"),
        ([[1, 2], [3]], pl.InputError, "tokens"),
    ],
)
def test_bad_inputs_are_refused_by_name(inputs: object, error: type[Exception], text: str) -> None:
    model = pl.wrap(zoo.build("neox"))
    with pytest.raises(error, match=text):
        model(inputs)


def test_bad_arguments_are_refused_by_name() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    with pytest.raises(pl.UnknownHookError, match="3 blocks"):
        model(x, stop_at_layer=4)
    with pytest.raises(pl.UnknownHookError, match="start_at_layer"):
        model(x, start_at_layer=-9)
    with pytest.raises(pl.ShapeError, match="residual"):
        model(x, start_at_layer=1)
    with pytest.raises(pl.InputError, match="'logits', 'loss'"):
        model(x, return_type="logit")  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="one number"):
        model.run_with_cache(x, "hook_embed", incl_bwd=True)
    with pytest.raises(pl.InputError, match="pair"):
        model.run_with_hooks(x, ["hook_embed"])  # type: ignore[list-item]
    lstm = pl.wrap(zoo.build("lstm"))
    with pytest.raises(pl.InputError, match="attention_mask"):
        lstm(x, attention_mask=torch.ones_like(x))


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ("blocks.30.hook_resid_post", ["this GPTNeoXForCausalLM has 3 blocks", "blocks.2.hook_resid_post"]),
        ("blocks.1.hook_resid_pots", ["blocks.1.hook_resid_post", "model.hook_points()"]),
        ("gpt_neox.layers.7.mlp.hook_out", ["gpt_neox.layers"]),
        ("nonsense", ["not found"]),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(asked: str, texts: list[str]) -> None:
    model = pl.wrap(zoo.build("neox"))
    with pytest.raises(pl.UnknownHookError) as err:
        model.run_with_cache(zoo.tokens(), asked)
    assert all(text in str(err.value) for text in texts), str(err.value)


@pytest.mark.parametrize("names", ["blocks.*.hook_nothing", [], lambda name: False])
def test_filters_that_fit_nothing_are_an_error(names: object) -> None:
    model = pl.wrap(zoo.build("neox"))
    with pytest.raises(pl.UnknownHookError):
        model.run_with_cache(zoo.tokens(), names)  # type: ignore[arg-type]


def test_names_can_be_globs_lists_predicates_and_raw_module_paths() -> None:
    raw = zoo.build("neox")
    model, x = pl.wrap(raw), zoo.tokens()
    _, cache = model.run_with_cache(x, "blocks.*.hook_resid_post")
    assert len(cache) == 3
    _, cache = model.run_with_cache(x, ["hook_embed", "blocks.[01].hook_resid_pre"])
    assert list(cache) == ["hook_embed", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    _, cache = model.run_with_cache(x, lambda name: name.endswith("hook_mlp_out"))
    assert len(cache) == 3
    path = "gpt_neox.layers.1.mlp.dense_h_to_4h"
    _, cache = model.run_with_cache(x, [f"{path}.hook_in", f"{path}.hook_out", "blocks.1.mlp.hook_pre"])
    assert torch.equal(cache[f"{path}.hook_out"], cache["blocks.1.mlp.hook_pre"])
    linear = raw.get_submodule(path)
    assert torch.allclose(linear(cache[f"{path}.hook_in"]), cache[f"{path}.hook_out"], atol=1e-6)


@pytest.mark.parametrize(
    ("value", "text"), [(torch.zeros(1), "returned shape"), (3.0, "returned a float"), ("x", "returned a str")]
)
def test_a_hook_that_returns_another_shape_is_an_error(value: object, text: str) -> None:
    raw = zoo.build("neox")
    model = pl.wrap(raw)
    for point in ("hook_embed", "blocks.1.attn.hook_pattern", "unembed.hook_out"):
        with pytest.raises(pl.ShapeError, match=text):
            model.run_with_hooks(zoo.tokens(), [(point, lambda t, hook: value)])
        assert leftovers(raw) == []


def test_wrapping_text_models_uses_their_tokenizer(tmp_path: object) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<s>", "<unk>", "the", "cat", "sat"])}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", unk_token="<unk>", pad_token="<s>")
    raw = zoo.build("neox")
    model = pl.wrap(raw, tokenizer=tokenizer)
    assert model.to_tokens("the cat").tolist() == [[2, 3]]
    assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[0, 2, 3]]
    assert model.to_str_tokens("the cat") == ["the", "cat"]
    assert model.to_str_tokens(["the cat", "sat"]) == [["the", "cat"], ["sat"]]
    for wrong in ([1, "the"], torch.rand(3)):
        with pytest.raises(pl.InputError, match="to_str_tokens takes"):
            model.to_str_tokens(wrong)
    assert model.to_single_token("sat") == 4
    with pytest.raises(pl.InputError, match="2 tokens"):
        model.to_single_token("the cat")
    with torch.no_grad():
        assert torch.equal(model("the cat"), zoo.logits(raw, torch.tensor([[2, 3]])))
        padded = model(["the cat sat", "the"])
    want = zoo.logits(raw, torch.tensor([[2]]))
    assert torch.allclose(padded[1, :1], want[0], atol=1e-5)


# -- the cache ---------------------------------------------------------------------------------------------------


def test_a_hook_that_writes_in_place_cannot_corrupt_the_cache() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens()
    point = "blocks.1.hook_resid_pre"
    _, clean = model.run_with_cache(x, point)

    def spoil(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        tensor.zero_()

    with torch.no_grad():
        with model.hooks([(point, lambda t, hook: None)]):
            _, cache = model.run_with_cache(x, point)
            before = cache[point].clone()
            model.run_with_hooks(x, [(point, spoil)])
            assert torch.equal(cache[point], before)
        cache_, fwd, _ = model.get_caching_hooks(point)
        model.run_with_hooks(x, [*fwd, (point, spoil)])
    assert torch.equal(cache_[point], clean[point])


def test_cache_device_dtype_positions_and_batch_axis() -> None:
    model, x = pl.wrap(zoo.build("neox")), zoo.tokens(1, 6)
    _, full = model.run_with_cache(x)
    _, half = model.run_with_cache(x, "hook_embed", dtype=torch.float16, device="cpu")
    assert half["hook_embed"].dtype == torch.float16
    for pos, want in ((2, full["hook_embed"][:, 2:3]), ([0, -1], full["hook_embed"][:, [0, -1]])):
        _, cut = model.run_with_cache(x, "hook_embed", pos_slice=pos)
        assert torch.equal(cut["hook_embed"], want)
    _, cut = model.run_with_cache(x, "blocks.0.attn.hook_pattern", pos_slice=slice(4, 6))
    assert torch.equal(cut["pattern", 0], full["pattern", 0][:, :, 4:6])
    _, flat = model.run_with_cache(x, "hook_embed", remove_batch_dim=True)
    assert torch.equal(flat["embed"], full["embed"][0])
    with pytest.raises(pl.ShapeError, match="batch of 1"):
        model.run_with_cache(zoo.tokens(2), "hook_embed", remove_batch_dim=True)


def test_one_thousand_hooked_and_failing_calls_leave_nothing() -> None:
    raw = zoo.build("lstm")
    model, x = pl.wrap(raw), zoo.tokens(1, 3)

    def fail(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for i in range(500):
            model.run_with_cache(x, "blocks.*.hook_resid_post")
            with pytest.raises(KeyboardInterrupt):
                model.run_with_hooks(x, [(f"blocks.{i % 3}.hook_resid_post", fail)])
    assert leftovers(raw) == []
    assert not model.has_hooks()


def test_a_run_from_the_middle_is_refused_where_something_goes_around_the_blocks() -> None:
    torch.manual_seed(0)
    model, x = pl.wrap(zoo.Around().eval()), zoo.tokens()
    assert model.can_skip()
    # What the head reads holds everything again; only a start in between loses the way around.
    assert [model.can_start_at(i) for i in range(3)] == [True, False, True]
    resid = model(x, stop_at_layer=1)
    with pytest.raises(pl.InputError, match="goes around"):
        model(resid, start_at_layer=1)
    report = model.verify(x)
    assert report.ok, str(report)
    notes = {row["name"]: row["note"] for row in report.rows if row["note"]}
    # Not block 0's output: the way around begins with it.
    assert set(notes) == {"blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"}
    assert all(pl.wrap(zoo.build(name)).can_start_at(1) for name in ("neox", "mamba", "lstm", "gru-fused-time-first"))


@pytest.mark.parametrize("site", ["blocks.0.hook_resid_post", "blocks.0.mixer.hook_conv"])
def test_a_hook_that_runs_its_own_model_is_an_error_that_says_so_once(site: str) -> None:
    model, x = pl.wrap(zoo.build("mamba")), zoo.tokens()
    with pytest.raises(pl.InputError, match=f"the hook at '{site}' runs its own model") as said:
        model.run_with_hooks(x, [(site, lambda tensor, hook: model(x) and None)])
    assert len(said.value.__notes__) == 1

    def deep(tensor: torch.Tensor, hook: object) -> None:
        deep(tensor, hook)

    with pytest.raises(RecursionError):
        model.run_with_hooks(x, [(site, deep)])
    assert not model.has_hooks()


@pytest.mark.parametrize("point", "qkvz")
def test_a_hook_may_write_into_what_it_gets_with_gradients_on(point: str) -> None:
    raw = zoo.build("gpt2")
    model, tokens = pl.wrap(raw), zoo.tokens(2, 6)

    def ablate(value: torch.Tensor, hook: pl.HookPoint) -> torch.Tensor:
        value[:, :, 1, :] = 0.0
        return value

    def silently(value: torch.Tensor, hook: pl.HookPoint) -> None:
        value[:, :, 1, :] = 0.0

    name = f"blocks.0.attn.hook_{point}"
    with torch.no_grad():
        plain, right = model(tokens), model.run_with_hooks(tokens, [(name, pl.edits.at_heads(1, pl.edits.zero()))])
    assert (plain - right).abs().max() > 1e-4
    for hook in (ablate, silently):
        found = model.run_with_hooks(tokens, [(name, hook)])
        torch.testing.assert_close(found, right)
        found.sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in raw.parameters())
        with torch.no_grad():
            torch.testing.assert_close(model.run_with_hooks(tokens, [(name, hook)]), right)


def test_reset_hooks_inside_a_block_takes_its_hooks_away_and_prepend_comes_first() -> None:
    model, tokens, calls = pl.wrap(zoo.build("gpt2")), zoo.tokens(1, 4), list[str]()
    with model.hooks([("hook_embed", lambda t, hook: calls.append("inside"))]):
        model(tokens)
        model.reset_hooks()
        model(tokens)
    assert calls == ["inside"]
    model.add_hook("hook_embed", lambda t, hook: calls.append("second"))
    model.hook_dict["hook_embed"].add_hook(lambda t, hook: calls.append("first"), prepend=True)
    model(tokens)
    assert calls == ["inside", "first", "second"]
    model.reset_hooks()
    seen: list[int] = []
    loss = model.run_with_hooks(
        tokens, bwd_hooks=[("blocks.0.hook_resid_post", lambda g, hook: (seen.append(1), (g,))[1])], return_type="loss"
    )
    loss.backward()
    assert seen == [1]

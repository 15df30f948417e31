"""The primitives run the faster of two equal forwards, and only where they are sure to be equal."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.adapters.hf.mixers import kinds as _mamba
from probelens.hooks.forwards import replaced_forward
from probelens.hooks.trials import fingerprint
from probelens.running.faster_forwards import faster_forwards

SITE = "blocks.1.hook_resid_post"


def build(kind: str) -> pl.HookedModel:
    return pl.wrap(zoo.build(kind) if kind in zoo.ZOO else zoo.more(kind))


def native(kind: str) -> pl.HookedModel:
    """The same model, kept from the faster forwards."""
    model = build(kind)
    model.adapter.faster_paths = list  # type: ignore[method-assign]
    return model


def instrumented(model: pl.HookedModel, run: Callable[[], object]) -> int:
    """How many mixers ran the reference forward during a call, by what was swapped in."""
    paths, own = [], model.adapter.instrument
    model.adapter.instrument = lambda path, tap: paths.append(path) or own(path, tap)  # type: ignore[method-assign,func-returns-value]
    run()
    del model.adapter.instrument
    return len(set(paths))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "jamba"])
def test_what_is_collected_and_swept_is_what_the_native_forward_gives(kind: str) -> None:
    model, slow, x = build(kind), native(kind), zoo.tokens(3, 9)
    n = len(model.adapter.faster_paths())
    assert n > 0
    pl.collect(model, x, SITE)  # the trial is over
    assert instrumented(model, lambda: pl.collect(model, x, SITE)) == n
    assert instrumented(slow, lambda: pl.collect(slow, x, SITE)) == 0
    found, want = (pl.collect(m, x, "layers").tensors for m in (model, slow))
    for name, tensor in want.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5 * float(tensor.abs().max())), name
    pairs = pl.PatchPairs(x, (x + 1) % zoo.VOCAB, torch.full((3,), 2), torch.full((3,), 8), torch.tensor([[1, 2]] * 3))
    got, plain = (pl.patch(m, pairs, "resid_pre", pos=[2]).values for m in (model, slow))
    assert torch.allclose(got, plain, atol=1e-4 * float(plain.abs().max()))
    estimates = [pl.attribute(m, pairs, "resid_pre", pos=[2]).values for m in (model, slow)]
    assert torch.allclose(*estimates, atol=1e-3 * float(plain.abs().max()))


@pytest.mark.parametrize("kind", ["neox", "gpt2", "lstm"])
def test_what_has_no_faster_forward_runs_its_own(kind: str) -> None:
    model = pl.wrap(zoo.build(kind))
    assert model.adapter.faster_paths() == []


def test_a_point_on_a_module_inside_a_mixer_is_read_in_the_native_forward() -> None:
    model, x = pl.wrap(zoo.build("mamba")), zoo.tokens()
    pl.collect(model, x, SITE)
    name = next(n for n, _ in model.module.named_modules() if n.endswith("mixer.in_proj")) + ".hook_out"
    assert instrumented(model, lambda: pl.collect(model, x, [name])) == 0
    assert instrumented(model, lambda: pl.collect(model, x, [SITE])) > 0


def test_hooks_of_the_callers_own_keep_the_native_forward() -> None:
    model, x = pl.wrap(zoo.build("mamba")), zoo.tokens()
    pl.collect(model, x, SITE)
    mixer = model.module.get_submodule(model.adapter.faster_paths()[0])
    seen: list[int] = []
    handle = mixer.in_proj.register_forward_hook(lambda *a: seen.append(1))
    assert instrumented(model, lambda: pl.collect(model, x, SITE)) == 0
    assert seen
    handle.remove()
    with model.hooks(fwd_hooks=[(SITE, lambda t, hook: None)]):
        assert instrumented(model, lambda: pl.collect(model, x, SITE)) == 0
    assert instrumented(model, lambda: pl.collect(model, x, SITE)) > 0


@pytest.mark.parametrize("noticed", [True, False])
def test_a_mixer_that_computes_something_else_runs_its_own_forward(
    noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not noticed:  # a variant that leaves no trace: what tells is that the numbers differ
        monkeypatch.setattr(_mamba, "replaced_forward", lambda *args: None)
        monkeypatch.setattr(_mamba, "refuse_replaced_forward", lambda *args: None)
    module = zoo.build("mamba")
    model = pl.wrap(module)
    mixer = module.get_submodule(model.adapter.faster_paths()[0])
    own = type(mixer).forward
    mixer.forward = lambda *a, **kw: 2 * own(mixer, *a, **kw)
    x = zoo.tokens()
    want: Tensor = model.run_with_cache(x, SITE)[1][SITE]
    torch.testing.assert_close(pl.collect(model, x, SITE)[SITE], want)
    del mixer.forward
    assert not torch.allclose(pl.collect(model, x, SITE)[SITE], want, rtol=1e-3)


def test_what_a_forward_consists_of_counts_too() -> None:
    class Base(nn.Module):
        def forward(self) -> int:
            return self.slow_forward()

        def slow_forward(self) -> int:
            return 1

    for made in (Base, Base.forward, Base.slow_forward):
        made.__module__ = "transformers.models.mamba.modeling_mamba"
    methods = ("forward", "slow_forward", "cuda_kernels_forward")
    module = Base()
    assert replaced_forward(module, ("transformers",), methods) is None
    module.slow_forward = lambda: 2  # type: ignore[method-assign]
    assert replaced_forward(module, ("transformers",), methods) == "its attribute 'slow_forward' was set"
    assert replaced_forward(module, ("transformers",)) is None

    class Own(Base):
        def slow_forward(self) -> int:
            return 3

    assert replaced_forward(Own(), ("transformers",), methods) == "Own overrides 'slow_forward'"
    assert replaced_forward(Own(), ("mamba_ssm",), methods) is None
    Own.__module__ = Own.slow_forward.__module__ = "transformers.models.falcon_mamba.modeling_falcon_mamba"
    assert replaced_forward(Own(), ("transformers",), methods) is None


def test_half_precision_is_left_to_the_native_forward() -> None:
    half, double = (pl.wrap(zoo.build("mamba").to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    assert instrumented(half, lambda: pl.collect(half, zoo.tokens(), SITE)) == 0
    assert instrumented(double, lambda: pl.collect(double, zoo.tokens(), SITE)) > 0


def test_the_native_forward_is_back_after_an_exception() -> None:
    model = pl.wrap(zoo.build("mamba2"))

    def fail_inside() -> None:
        with faster_forwards(model):
            assert any("forward" in m.__dict__ for m in model.module.modules()), "there is something to put back"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert all("forward" not in m.__dict__ for m in model.module.modules())


def test_a_hook_on_a_module_that_the_reference_forward_skips_is_an_error_not_silence() -> None:
    model, x = pl.wrap(zoo.build("mamba2")), zoo.tokens()
    norm = model.module.get_submodule(model.adapter.faster_paths()[0]).norm
    handle = norm.register_forward_hook(lambda module, args, out: out * 2)
    inside = "blocks.0.mixer.hook_ssm_state"
    with pytest.raises(pl.InputError, match="hook stands on 'norm' inside a Mamba2Mixer"):
        model.run_with_cache(x, inside)
    doubled = pl.collect(model, x, SITE)[SITE]
    handle.remove()
    assert not torch.allclose(doubled, pl.collect(model, x, SITE)[SITE]), "in the native forward it counts"
    assert inside in model.run_with_cache(x, inside)[1]


@pytest.mark.parametrize(
    ("kind", "path", "inside"),
    [
        ("mamba", "backbone.layers.1.mixer", "blocks.1.mixer.hook_ssm_state"),
        ("mamba2", "backbone.layers.1.mixer", "blocks.1.mixer.hook_ssm_state"),
        ("lstm", "layers.1", "blocks.1.rnn.hook_c"),
    ],
)
@pytest.mark.parametrize("how", ["attribute", "subclass"])
def test_a_forward_of_the_user_s_own_is_not_left_out(kind: str, path: str, inside: str, how: str) -> None:
    model = pl.wrap(zoo.build(kind))
    tokens = torch.arange(24).view(2, 12) % 11
    around = "blocks.*.hook_resid_post"
    before = pl.collect(model, tokens, around)  # the reference forward is tried, and found equal, here
    module = model.module.get_submodule(path)
    original, plain = type(module).forward, type(module)

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    if how == "attribute":
        module.forward = types.MethodType(doubled, module)
    else:
        module.__class__ = type("Doubled", (plain,), {"forward": doubled, "__module__": "users_own"})
    _, own = model.run_with_cache(tokens, around)
    after = pl.collect(model, tokens, around)
    for name in after.names:
        torch.testing.assert_close(after[name], own[name])
    assert not torch.allclose(after[after.names[-1]], before[after.names[-1]], atol=1e-3)
    said = "'forward' was set" if how == "attribute" else "Doubled overrides 'forward'"
    with pytest.raises(pl.InputError, match=said):
        model.run_with_cache(tokens, inside)
    with pytest.raises(pl.InputError, match=said):
        pl.collect(model, tokens, inside)
    if how == "attribute":
        del module.forward
    else:
        module.__class__ = plain
    model.run_with_cache(tokens, inside)
    again = pl.collect(model, tokens, around)
    assert all(torch.equal(again[name], before[name]) for name in again.names)


def exchanged_act(model: pl.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.module.get_submodule("backbone.layers.1.mixer").act = nn.Tanh()


def patched_class(model: pl.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model.module.get_submodule("backbone.layers.1.mixer"))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **kw: 2 * own(self, *a, **kw))


def position_dependent(model: pl.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 4

    model.module.gpt_neox.layers[1].mlp = Shifted()


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("mamba", exchanged_act), ("mamba", patched_class), ("mamba2", patched_class), ("neox", position_dependent),
    ],
)  # fmt: skip
def test_what_was_tried_is_tried_again_when_something_in_the_model_is_exchanged(
    kind: str, exchange: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(0, 11, (2, 4, 12), generator=g)
    pairs = pl.PatchPairs(clean, corrupted, torch.full((4,), 3), torch.full((4,), 11), torch.tensor([[0, 1]] * 4))
    model = pl.wrap(zoo.build(kind))
    around, inside = "blocks.*.hook_resid_post", "blocks.1.mixer.hook_ssm_state"
    collected, patched, plan = (
        pl.collect(model, clean, around), pl.patch(model, pairs), pl.patch_plan(model, pairs)
    )  # fmt: skip
    before = model(clean)
    if kind != "neox":
        model.run_with_cache(clean, inside)
    exchange(model, monkeypatch)
    fresh = pl.wrap(model.module)
    want = pl.patch(fresh, pairs).values
    # The control: something changed, unless the native forward doesn't look at what was exchanged.
    ignored = exchange is exchanged_act and torch.equal(fresh(clean), before)
    assert torch.allclose(want, patched.values, atol=1e-4) == ignored
    torch.testing.assert_close(plan.run().values, want)
    torch.testing.assert_close(pl.patch(model, pairs).values, want)
    _, own = model.run_with_cache(clean, around)
    found = pl.collect(model, clean, around)
    for name in found.names:
        torch.testing.assert_close(found[name], own[name])
    assert torch.allclose(found[found.names[-1]], collected[collected.names[-1]], atol=1e-4) == ignored
    if exchange is patched_class or ignored:
        with pytest.raises(pl.InputError, match="from a reference forward"):
            model.run_with_cache(clean, inside)


def test_attributes_that_cannot_be_hashed_are_no_obstacle() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None:
            return None

    model = pl.wrap(zoo.build("mamba"))
    before = fingerprint(model.module)
    model.module.backbone.layers[0].mixer.extra = Odd()
    assert fingerprint(model.module) != before
    assert fingerprint(model.module) == fingerprint(model.module)
    x = zoo.tokens()
    model.run_with_cache(x, "blocks.0.mixer.hook_ssm_state")
    assert torch.isfinite(pl.collect(model, x, SITE)[SITE]).all()

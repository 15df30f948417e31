"""Models as people have them: compiled, with LoRA, spread over devices, called under inference_mode or autocast."""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import fake_devices
import numpy as np
import pandas as pd
import peft
import plotly.io
import pytest
import torch
import zoo
from primitives import PRIMITIVES, collected, probed, same
from torch import Tensor, nn

import probelens as pl
from probelens.hooks.passes import eager as _eager

ROOT = Path(__file__).resolve().parents[2]
X = zoo.tokens(2, 6)
RESID = "blocks.1.hook_resid_post"


def double(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
    return tensor * 2


def stance() -> str:
    import torch._dynamo.eval_frame

    return torch._dynamo.eval_frame._stance.stance


# -- torch.compile ----------------------------------------------------------------------------------


def around(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def blocks_in_place(module: nn.Module) -> nn.Module:
    for path in pl.wrap(module).adapter.blocks:
        module.get_submodule(path).compile(backend="eager")
    return module


def blocks_around(module: nn.Module) -> nn.Module:
    for path in pl.wrap(module).adapter.blocks:
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, around(module.get_submodule(path)))
    return module


@pytest.mark.parametrize("compiled", [around, in_place, blocks_in_place, blocks_around])
@pytest.mark.parametrize("family", ["neox", "lstm-fused"])
def test_every_hook_fires_and_edits_on_a_compiled_model(
    family: str, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    if family == "lstm-fused" and compiled in (blocks_in_place, blocks_around):
        pytest.skip("a fused stack is one module")
    plain = pl.wrap(zoo.build(family))
    user = compiled(zoo.build(family))
    before = zoo.logits(user, X)  # compiled now, without a hook
    model = pl.wrap(user)
    assert model.verify(X).ok, str(model.verify(X))
    expected = plain.run_with_hooks(X, [(RESID, double)])
    assert torch.allclose(model.run_with_hooks(X, [(RESID, double)]), expected, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-2), "the control: the edit shows"
    with model.hooks([(RESID, double)]):
        assert torch.allclose(zoo.logits(user, X), expected, atol=1e-5), "also when the user calls it"
    assert torch.allclose(model(model(X, stop_at_layer=1), start_at_layer=1), before, atol=1e-5)
    assert torch.equal(zoo.logits(user, X), before), "compiled again, and no hook is left in the code"
    assert stance() == "default"


def test_plain_hooks_on_a_compiled_model_are_silent() -> None:
    """Why all of this is needed; once torch changes it, so can we."""
    module = in_place(zoo.build("neox"))
    zoo.logits(module, X)
    called: list[Any] = []
    handle = module.gpt_neox.layers[1].register_forward_hook(lambda *a: called.append(1))  # type: ignore[union-attr]
    zoo.logits(module, X)
    handle.remove()
    assert not called


class Partly(nn.Module):
    """A model that compiles a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.fast = torch.compile(self.slow, backend="eager")

    def slow(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fast(self.embed(tokens))


def test_hooks_fire_inside_a_function_that_the_model_compiled_itself() -> None:
    module = Partly()
    tokens = torch.tensor([[0, 1, 2]])
    before = module(tokens)
    model = pl.wrap(module, blocks="layers", embed="embed")
    edited = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", double)])
    assert not torch.allclose(edited, before)
    assert torch.equal(module(tokens), before)


def test_a_hook_that_stays_keeps_the_model_uncompiled_until_it_is_gone() -> None:
    user = around(zoo.build("neox"))
    before = zoo.logits(user, X)
    model = pl.wrap(user)
    model.add_hook(RESID, double)
    assert stance() == "force_eager"
    assert not torch.allclose(zoo.logits(user, X), before, atol=1e-2)
    model.reset_hooks()
    assert stance() == "default"
    assert torch.equal(zoo.logits(user, X), before)


def test_a_hook_that_fails_gives_compilation_back() -> None:
    model = pl.wrap(around(zoo.build("neox")))
    for name, hook in ((RESID, lambda t, hook: t / (1 // 0)), ("blocks.7.hook_resid_post", double)):
        with pytest.raises((ZeroDivisionError, pl.UnknownHookError)):
            model.run_with_hooks(X, [(name, hook)])
        assert stance() == "default"
        assert _eager._count == 0


def test_threads_share_what_sets_compilation_aside() -> None:
    model = pl.wrap(around(zoo.build("neox")))
    expected = model.run_with_hooks(X, [(RESID, double)])
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(10):
            if not torch.allclose(model.run_with_hooks(X, [(RESID, double)]), expected, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert stance() == "default"


def test_a_wrapped_model_inside_a_compiled_function_is_refused() -> None:
    model = pl.wrap(zoo.build("lstm-fused"))

    @torch.compile(backend="eager")
    def user(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model.run_with_hooks(x, [(RESID, double)]) + 1

    with pytest.raises(pl.InputError, match="from inside a function under torch.compile"):
        user(X)
    assert _eager._count == 0
    assert not model.has_hooks()


# -- PEFT and other wrappers ------------------------------------------------------------------------

LORA = {
    "neox": ["query_key_value", "dense_h_to_4h", "dense"],
    "llama": "all-linear",
    "gpt2": ["c_attn", "c_fc"],
    "mamba": ["in_proj", "x_proj", "embeddings"],
    "lstm": ["head", "embed"],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", LORA)
def test_a_model_with_lora_runs_and_is_hooked_with_its_adapters(family: str) -> None:
    plain = zoo.logits(zoo.build(family), X)
    config = peft.LoraConfig(target_modules=LORA[family], r=2, init_lora_weights=False)
    user = peft.get_peft_model(zoo.build(family), config).eval()
    keys = list(user.state_dict())
    out = zoo.logits(user, X)
    assert not torch.allclose(out, plain, atol=1e-2), "the control: the adapters do something"
    model = pl.wrap(user)
    assert torch.allclose(model(X), out, atol=1e-6)
    assert model.verify(X).ok, str(model.verify(X))
    assert set(model.hook_dict) == set(pl.wrap(zoo.build(family)).hook_dict)
    with user.disable_adapter():
        assert torch.allclose(model(X), plain, atol=1e-6)
    assert list(user.state_dict()) == keys


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whole_modules_that_lora_trained_beside_its_adapters_are_found() -> None:
    config = peft.LoraConfig(target_modules="all-linear", r=2, modules_to_save=["lm_head", "embed_tokens"])
    user = peft.get_peft_model(zoo.build("llama"), config).eval()
    with torch.no_grad():
        user.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    model = pl.wrap(user)
    assert (model.cfg.d_vocab, model.cfg.d_vocab_out) == (zoo.VOCAB, zoo.VOCAB)
    assert torch.allclose(model(X), 2 * zoo.logits(zoo.build("llama"), X), atol=1e-5)
    assert model.verify(X).ok


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, alora_invocation_tokens=[1, 2], target_modules=["q_proj"]),
        peft.PolyConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]),
    ],
    ids=lambda c: type(c).__name__,
)
def test_peft_methods_that_do_more_than_adapt_layers_are_refused(config: peft.PeftConfig) -> None:
    user = peft.get_peft_model(zoo.build("llama"), config)
    with pytest.raises(pl.InputError, match="this PeftModel"):
        pl.wrap(user)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrappers_around_wrappers() -> None:
    config = peft.LoraConfig(target_modules=["query_key_value"], r=2, init_lora_weights=False)
    user = around(nn.DataParallel(peft.get_peft_model(zoo.build("neox"), config).eval()))
    model = pl.wrap(user)
    assert type(model.module).__name__ == "GPTNeoXForCausalLM"
    assert torch.equal(model(X), zoo.logits(user, X))
    assert model.verify(X).ok


def test_torchscript_is_refused_because_it_calls_no_hooks() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(pl.InputError, match="TorchScript"):
        pl.wrap(scripted, blocks="")


# -- weights elsewhere, several devices -------------------------------------------------------------


def offloaded(family: str, folder: Path, how: str) -> nn.Module:
    module = zoo.build(family)
    device = torch.device("cpu")
    if how == "to the cpu":
        return accelerate.cpu_offload(module, execution_device=device)
    if how == "to the disk":
        return accelerate.disk_offload(module, str(folder), execution_device=device)
    places = dict.fromkeys((name for name, _ in module.named_children()), "cpu")
    inner = max(places, key=lambda name: sum(1 for _ in module.get_submodule(name).modules()))
    del places[inner]
    for name, child in module.get_submodule(inner).named_children():
        blocks = isinstance(child, nn.ModuleList)
        places |= {f"{inner}.{name}.{i}": "disk" if i == 1 else "cpu" for i in range(len(child))} if blocks else {}
        places |= {} if blocks else {f"{inner}.{name}": "cpu"}
    return accelerate.dispatch_model(module, places, offload_dir=str(folder), main_device="cpu")


@pytest.mark.parametrize(
    ("family", "how"),
    [(f, h) for f in ("neox", "mamba", "mamba2", "lstm-fused") for h in ("to the cpu", "to the disk")]
    + [("neox", "one block"), ("mamba", "one block")],
)
def test_hooks_fire_on_a_model_whose_weights_come_in_when_they_are_needed(
    tmp_path: Path, family: str, how: str
) -> None:
    plain = pl.wrap(zoo.build(family))
    user = offloaded(family, tmp_path, how)
    assert any(p.device.type == "meta" for p in user.parameters()), "the control: something is offloaded"
    model = pl.wrap(user)
    assert model.cfg.device.type == "cpu"
    assert torch.allclose(model(X), plain(X), atol=1e-6)
    # Among the interior points are those whose forwards read weights of modules that they don't call.
    assert model.verify(X).ok, str(model.verify(X))
    _, cache = model.run_with_cache(X)
    _, expected = plain.run_with_cache(X)
    assert all(torch.allclose(cache[n], expected[n], atol=1e-5, equal_nan=True) for n in expected)
    assert torch.allclose(model(model(X, stop_at_layer=2), start_at_layer=2), plain(X), atol=1e-5)
    assert any(p.device.type == "meta" for p in user.parameters()), "and it is offloaded again"


@pytest.mark.parametrize("family", ["neox", "mamba", "mamba2", "lstm-fused"])
def test_weights_are_offloaded_again_after_an_exception(tmp_path: Path, family: str) -> None:
    user = offloaded(family, tmp_path, "to the disk")
    model = pl.wrap(user)
    before = {name: p.device.type for name, p in user.named_parameters()}
    assert "meta" in before.values()

    def fail(tensor: Any, hook: Any) -> None:
        raise RuntimeError("from the hook")

    for point in (p for p in model.hook_dict.values() if p.kind == "interior"):
        with pytest.raises(RuntimeError, match="from the hook"):
            model.run_with_hooks(X, [(point.name, fail)])
        assert {name: p.device.type for name, p in user.named_parameters()} == before, point.name


def test_skipping_blocks_brings_none_of_their_weights_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pl.wrap(offloaded("neox", tmp_path, "one block"))
    resid = model(X, stop_at_layer=2)
    assert model.can_start_at(2)
    block = model.module.get_submodule(model.adapter.blocks[1])
    for module in block.modules():
        if hasattr(module, "_hf_hook"):
            monkeypatch.setattr(module._hf_hook, "pre_forward", lambda *a, **k: pytest.fail("brought in"))
    model(resid, start_at_layer=2)


def test_offloaded_weights_cannot_be_edited(tmp_path: Path) -> None:
    model = pl.wrap(offloaded("neox", tmp_path, "one block"))
    with model.edit_weights({"blocks.0.mlp.dense_h_to_4h.weight": torch.zeros_like}):
        pass
    edits = {"blocks.1.mlp.dense_h_to_4h.weight": torch.zeros_like}
    with pytest.raises(pl.InputError, match="isn't in memory"), model.edit_weights(edits):
        pass


def test_streams_of_two_offloaded_models_are_told_apart(tmp_path: Path) -> None:
    first = pl.wrap(offloaded("neox", tmp_path / "a", "to the disk"))
    pl.collect(first, X, [RESID], out=tmp_path / "acts")
    other = accelerate.disk_offload(
        zoo.build("neox", seed=1), str(tmp_path / "b"), execution_device=torch.device("cpu")
    )
    with pytest.raises(pl.StoreError, match="another model"):
        pl.collect(pl.wrap(other), X, [RESID], out=tmp_path / "acts")
    again = pl.collect(pl.wrap(offloaded("neox", tmp_path / "c", "to the disk")), X, [RESID], out=tmp_path / "acts")
    assert again[RESID].shape == (2, 6, zoo.WIDTH)


def test_a_device_map_is_passed_on_by_load(tmp_path: Path) -> None:
    zoo.build("neox").save_pretrained(tmp_path / "model")
    places = {"gpt_neox": "cpu", "lm_head": "disk"}
    model = pl.load(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "off"))
    assert model.module.hf_device_map == places
    assert torch.allclose(model(X), zoo.logits(zoo.build("neox"), X), atol=1e-6)
    assert model.verify(X).ok


class Spread(nn.Module):
    """Three blocks on two devices; each block moves what it gets."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.mlp.weight.device)
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (nn.Embedding(zoo.VOCAB, 8), nn.LayerNorm(8), nn.Linear(8, zoo.VOCAB))
        self.layers = nn.ModuleList([Spread.Block() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def wrapped(module: nn.Module) -> pl.HookedModel:
    return pl.wrap(module, blocks="layers", embed="embed", ln_final="norm", unembed="head")


def spread() -> tuple[pl.HookedModel, pl.HookedModel]:
    """One model twice: here, and on two pretended devices."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Spread().eval()
    places = {"": "cuda:1", "embed": "cuda:0", "layers.0": "cuda:0"}
    return wrapped(module), wrapped(fake_devices.spread(copy.deepcopy(module), places))


def test_the_pretended_devices_refuse_to_mix() -> None:
    with fake_devices.pretended():
        _, model = spread()
        assert str(model.cfg.device) == "cuda:0"
        with pytest.raises(RuntimeError, match="same device"):
            model.module.layers[1].mlp(model.module.embed(X.to("cuda:0")))
        with pytest.raises(RuntimeError, match="same device"):
            model.module.embed(X)


@functools.cache
def expected(family: str, name: str) -> Any:
    """What a primitive gives on a plain model of the family, which several tests compare with."""
    return PRIMITIVES[name](pl.wrap(zoo.build(family)))


# Made of the others, and slow where every operation is looked at.
COMPOSED = {"erase", "profile", "dose_response", "length_transfer", "probe with controls", "train"}


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if n not in COMPOSED])
def test_every_primitive_runs_on_a_model_spread_over_two_devices(name: str) -> None:
    with fake_devices.pretended():
        here, there = spread()
        assert same(PRIMITIVES[name](here), PRIMITIVES[name](there), 1e-4)


@pytest.mark.parametrize("family", ["neox", "mamba", "lstm-fused"])
def test_every_primitive_runs_on_a_model_on_another_device(family: str) -> None:
    module = zoo.build(family)
    plain = {name: expected(family, name) for name in PRIMITIVES if name not in COMPOSED}
    with fake_devices.pretended():
        there = pl.wrap(fake_devices.spread(module, {"": "cuda:1"}))
        for name, here in plain.items():
            assert same(here, PRIMITIVES[name](there), 1e-4), name


def test_layers_on_two_devices_are_stacked_on_one() -> None:
    with fake_devices.pretended():
        here, there = spread()
        (_, expected), (_, cache) = here.run_with_cache(X), there.run_with_cache(X)
        assert str(cache["resid_post", 0].device) == "cuda:0"
        for call in (
            lambda c: c.stack_activation("resid_post"),
            lambda c: c.accumulated_resid(),
            lambda c: c.accumulated_resid(apply_ln=True),
        ):
            assert str(call(cache).device) == "cuda:1"
            assert same(call(expected), call(cache), 1e-5)


# -- modes of PyTorch -------------------------------------------------------------------------------

NEEDS_GRADIENT = "run_with_cache incl_bwd"


@pytest.mark.parametrize(
    ("family", "mode"),
    [("lstm-fused", torch.no_grad), *((f, torch.inference_mode) for f in ("neox", "mamba", "lstm-fused"))],
)
def test_every_primitive_under_no_grad_and_inference_mode(family: str, mode: Any) -> None:
    model = pl.wrap(zoo.build(family))
    for name, call in PRIMITIVES.items():
        if name == NEEDS_GRADIENT:
            with mode(), pytest.raises(pl.InputError, match="no gradient"):
                call(model)
            continue
        plain = expected(family, name)
        with mode():
            assert same(plain, call(model), 1e-5), name


def test_a_model_made_under_inference_mode_has_no_attribution() -> None:
    with torch.inference_mode():
        model = pl.wrap(zoo.build("lstm-fused"))
    assert PRIMITIVES["patch"](model).shape[0] == 3
    with pytest.raises(pl.InputError, match="inference_mode"):
        PRIMITIVES["attribute"](model)


def inside(module: nn.Module) -> nn.Module:
    """The same model, with autocast in its own forward."""
    native = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return native(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    return module


def runs_half_lstm() -> bool:
    """Whether torch's own LSTM has a half-precision kernel on this processor; oneDNN has none on some."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8, batch_first=True)(torch.randn(2, 3, 8))
    except RuntimeError:
        return False
    return True


HALF_LSTM = pytest.param(
    "lstm-fused", marks=pytest.mark.skipif(not runs_half_lstm(), reason="torch has no bfloat16 LSTM on this processor")
)


@pytest.mark.parametrize("family", ["neox", "mamba", HALF_LSTM])
def test_autocast_around_a_primitive_is_autocast_of_the_model_and_of_nothing_else(family: str) -> None:
    model, own = pl.wrap(zoo.build(family)), pl.wrap(inside(zoo.build(family)))
    assert not torch.allclose(own(X).float(), model(X), atol=1e-4), "the control: autocast does something"
    for name, call in PRIMITIVES.items():
        if name in ("verify", "train", "stop and start"):
            continue
        inside_only = call(own)
        with torch.autocast("cpu", torch.bfloat16):
            found = call(model)
        assert same(inside_only, found, 1e-6), name


@pytest.mark.parametrize("family", ["neox", "mamba", "mamba2", "llama", HALF_LSTM])
def test_every_hook_point_passes_under_autocast(family: str) -> None:
    model = pl.wrap(zoo.build(family))
    with torch.autocast("cpu", torch.bfloat16):
        report = model.verify(X)
    assert report.ok, str(report)


# -- what belongs to the process --------------------------------------------------------------------


def state_of_the_process() -> dict[str, Any]:
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": str(np.random.get_state()),  # noqa: NPY002
        "Python's generator": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
        ),
        "compilation": (stance(), _eager._count),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "printing": (repr(torch.randn(2, generator=torch.Generator().manual_seed(0))), np.get_printoptions()),
        "pandas": pd.get_option("display.max_rows"),
        "plotly": plotly.io.templates.default,
        "log levels": {n: logging.getLogger(n).level for n in (None, "transformers", "probelens", "torch")},
    }  # fmt: skip


@pytest.mark.parametrize("family", ["neox", "lstm-fused"])
def test_no_primitive_leaves_a_trace_in_the_process(family: str) -> None:
    model = pl.wrap(zoo.build(family))
    work = {**PRIMITIVES, "plot": lambda m: [PRIMITIVES_WITH_RESULTS[n](m).plot() for n in PRIMITIVES_WITH_RESULTS]}
    for name, call in work.items():
        call(model)  # what is imported for the first time may set up itself
        before = state_of_the_process()
        call(model)
        after = state_of_the_process()
        assert {key for key in before if before[key] != after[key]} == set(), name


PRIMITIVES_WITH_RESULTS: dict[str, Callable[[pl.HookedModel], Any]] = {"probe": probed, "collect": collected}


def test_a_trace_in_the_process_is_noticed() -> None:
    before = state_of_the_process()
    torch.randn(1)
    random.random()
    with torch.no_grad():
        after = state_of_the_process()
    assert {key for key in before if before[key] != after[key]} == {
        "torch's generator", "Python's generator", "grad"
    }  # fmt: skip


def test_a_result_does_not_depend_on_the_state_of_the_process() -> None:
    model = pl.wrap(zoo.build("lstm-fused"))
    for name, call in PRIMITIVES.items():
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            assert same(expected("lstm-fused", name), call(model), 1e-6), name


def test_rows_of_a_hugging_face_dataset_are_collected_as_they_are() -> None:
    datasets = pytest.importorskip("datasets")
    model = pl.wrap(zoo.build("neox"))
    rows = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    masks = [[1] * len(row) for row in rows]
    table = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": masks, "text": ["a", "b", "c"]})
    acts = pl.collect(model, table, [RESID])
    assert acts.mask is not None
    assert acts.mask.sum(1).tolist() == [4, 2, 3]
    for i, row in enumerate(rows):
        alone = pl.collect(model, torch.tensor([row]), [RESID])
        assert torch.allclose(acts[RESID][i, : len(row)], alone[RESID][0], atol=1e-5)
    assert torch.equal(pl.collect(model, table.with_format("torch"), [RESID])[RESID], acts[RESID])
    assert torch.equal(pl.collect(model, table[:2], [RESID], batch_size=1)[RESID], acts[RESID][:2])
    listed = pl.collect(model, [table[i] for i in range(3)], [RESID])
    assert torch.equal(listed[RESID], acts[RESID])
    with pytest.raises(pl.InputError, match="input_ids"):
        pl.collect(model, table.remove_columns(["input_ids"]), [RESID])


def test_bars_are_those_that_suit_a_terminal_and_a_notebook() -> None:
    sources = [p for top in ("probelens", "adapters", "examples") for p in (ROOT / top).rglob("*.py")]
    uses = {m for p in sources for m in re.findall(r"from (tqdm\S*) import|import (tqdm\S*)", p.read_text())}
    assert {a or b for a, b in uses} == {"tqdm.auto"}

"""nnsight models: local ones run on our own engine, remote ones through nnsight's trace; its traces go on working."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import bridges
import cloudpickle
import pytest
import torch
import zoo
from nnsight import LanguageModel, NNsight, NNsightDeprecationWarning
from nnsight.intervention.backends.local import LocalSimulationBackend
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.request import RequestModel
from torch import nn

import probelens as pl

NAMES = ["gpt2", "neox", "llama", "gemma2", "mamba"]
POINT = "blocks.1.hook_resid_post"


def named(name: str, folder: Path) -> Any:
    """A model that NDIF could find by name, over weights of the zoo."""
    return TransformersModel(zoo.build(name), task="text-generation", tokenizer=bridges.tokenizer(folder))


def block(model: Any, layer: int) -> Any:
    """An nnsight model's envoy of one block."""
    return model.get(pl.wrap(model).adapter.blocks[layer])


def double_in_block_1(tensor: torch.Tensor, hook: Any) -> torch.Tensor | None:
    return tensor * 2 if hook.layer() == 1 else None


def halve_in_place(tensor: torch.Tensor, hook: Any) -> None:
    tensor.mul_(0.5)


def wrong_shape(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor[:1]


@pytest.mark.parametrize("name", [*NAMES, "lstm"])
def test_a_local_model_is_the_hooked_model_of_its_architecture(name: str) -> None:
    raw, x = zoo.build(name), zoo.tokens()
    want = zoo.logits(raw, x)
    model, ours = pl.wrap(NNsight(raw)), pl.wrap(zoo.build(name))
    assert model.module is raw
    assert model.adapter.name == ours.adapter.name
    assert list(model.hook_dict) == list(ours.hook_dict)
    with torch.no_grad():
        logits, cache = model.run_with_cache(x)
        _, reference = ours.run_with_cache(x)
    assert torch.allclose(logits, want, atol=1e-5)
    for point in cache:
        assert torch.allclose(cache[point], reference[point], atol=1e-5), point
    assert model.verify(x).ok


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_traces_work_as_before_and_hooks_of_ours_act_on_them(name: str) -> None:
    light, x = NNsight(zoo.build(name)), zoo.tokens()
    envoy = block(light, 1)
    first = pl.wrap(light)

    def traced() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), light.trace(x, use_cache=False):
            inside = envoy.output.save()
            out = light.output.logits.save()
        return inside, out

    inside, before = traced()
    with torch.no_grad():
        logits, cache = first.run_with_cache(x, [POINT, "*hook_*"])
        assert torch.allclose(logits, before, atol=1e-5)
        assert torch.allclose(cache[POINT], inside, atol=1e-5)
        with first.hooks([("blocks.0.hook_resid_post", lambda t, hook: t * 0)]):
            _, edited = traced()
        want = first.run_with_hooks(x, [("blocks.0.hook_resid_post", lambda t, hook: t * 0)])
    assert torch.allclose(edited, want, atol=1e-5)
    assert (edited - before).abs().max() > 1e-2
    again, after = traced()
    assert torch.equal(after, before)
    assert torch.equal(again, inside)


def test_a_language_model_brings_its_tokenizer_and_loads_its_weights(tmp_path: Path) -> None:
    tokenizer = bridges.tokenizer(tmp_path)
    raw = zoo.build("neox")
    raw.save_pretrained(tmp_path)
    options = {"task": "text-generation", "tokenizer": tokenizer}
    lazy = TransformersModel(str(tmp_path), **options)
    assert next(lazy._module.parameters()).is_meta
    model = pl.wrap(lazy)
    assert not next(model.module.parameters()).is_meta
    assert model.to_tokens("the cat").tolist() == [tokenizer("the cat")["input_ids"]]
    with torch.no_grad():
        assert torch.allclose(model("the cat"), zoo.logits(raw, torch.tensor([[2, 3]])), atol=1e-5)
    remote = pl.wrap(TransformersModel(str(tmp_path), **options), remote="local")
    assert next(remote.module.parameters()).is_meta, "a remote model needs no weights here"
    assert remote.cfg.n_layers == zoo.LAYERS
    with pytest.warns(NNsightDeprecationWarning):
        older = LanguageModel(raw, tokenizer=tokenizer)
    assert pl.wrap(older).module is raw


# remote="local" is nnsight's own rehearsal: the request is packed, unpacked where neither this file nor
# probelens can be imported, and run here. No network is touched.


@pytest.mark.parametrize("name", NAMES)
def test_a_remote_model_reads_and_edits_at_the_boundary_points(name: str, tmp_path: Path) -> None:
    remote, ours, x = pl.wrap(named(name, tmp_path), remote="local"), pl.wrap(zoo.build(name)), zoo.tokens()
    boundary = [p.name for p in ours.hook_dict.values() if p.kind == "boundary" and p.site.carry is None]
    assert list(remote.hook_dict) == boundary
    with torch.no_grad():
        logits, cache = remote.run_with_cache(x)
        want, reference = ours.run_with_cache(x)
        assert torch.allclose(logits, want, atol=2e-6)
        assert list(cache) == boundary
        for point in cache:
            assert torch.allclose(cache[point], reference[point], atol=2e-6), point
        for point in (POINT, "blocks.1.hook_resid_pre", *(p for p in boundary if p.endswith("1.attn.hook_z"))):
            for fn in (double_in_block_1, halve_in_place, pl.edits.zero()):
                got, edited = (m.run_with_hooks(x, [(point, fn)]) for m in (remote, ours))
                assert torch.allclose(got, edited, atol=2e-6), (point, fn)
                assert (edited - want).abs().max() > 5e-5, (point, fn)
        for layer in range(zoo.LAYERS + 1):
            resid = remote(x, stop_at_layer=layer)
            assert torch.allclose(resid, ours(x, stop_at_layer=layer), atol=2e-6)
        # One after the other at one point, a reader in between.
        hooks = [(POINT, double_in_block_1), (POINT, halve_in_place), ("unembed.hook_in", pl.edits.scale(2.0))]
        assert torch.allclose(remote.run_with_hooks(x, hooks), ours.run_with_hooks(x, hooks), atol=4e-6)
        with remote.hooks([(POINT, double_in_block_1)]), ours.hooks([(POINT, double_in_block_1)]):
            _, cache = remote.run_with_cache(x, POINT)
            _, reference = ours.run_with_cache(x, POINT)
        assert torch.allclose(cache[POINT], reference[POINT], atol=2e-6)


def test_our_own_edits_travel_with_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bool] = []
    pack = RequestModel.serialize

    def serialize(tracer: Any, compress: bool) -> bytes:
        packed.append("probelens" in cloudpickle.list_registry_pickle_by_value())
        blob = pack(tracer, compress)
        packed.append(b"tensor * self.factor" in blob)
        return blob

    monkeypatch.setattr(RequestModel, "serialize", serialize)
    model, x = pl.wrap(named("gpt2", tmp_path), remote="local"), zoo.tokens()
    model.run_with_hooks(x, [(POINT, pl.edits.scale(0.5))])
    assert packed == [True, True], "the source of the edit is in the request"
    assert "probelens" not in cloudpickle.list_registry_pickle_by_value(), "nothing of ours stays registered"


@pytest.mark.parametrize("kind", ["eraser", "subspace"])
def test_edits_made_of_results_travel_and_change_what_they_change_here(kind: str, tmp_path: Path) -> None:
    remote, ours, x = (pl.wrap(named("gpt2", tmp_path), remote="local"), pl.wrap(zoo.build("gpt2")), zoo.tokens())
    space = pl.subspaces.random(2, zoo.WIDTH)
    edit = pl.edits.project(space)
    if kind == "eraser":
        edit = pl.edits.erase(pl.leace(ours.run_with_cache(x, POINT)[1][POINT].detach(), x % 2))
    got, want = (m.run_with_hooks(x, [(POINT, edit)]) for m in (remote, ours))
    assert torch.allclose(got, want, atol=2e-6)
    assert (want - ours(x)).abs().max() > 1e-3


def test_a_hook_that_cannot_travel_is_refused_and_one_that_can_is_not(tmp_path: Path) -> None:
    model, x = pl.wrap(named("gpt2", tmp_path), remote="local"), zoo.tokens()
    for reason, hook in {
        "cannot pickle": lambda t, hook: pl.edits.zero()(t),
        "lock": _holding(threading.Lock()),
    }.items():
        with pytest.raises(pl.InputError, match=f"can't be sent.*{reason}"):
            model.run_with_hooks(x, [(POINT, hook)])
    model.run_with_hooks(x, [(POINT, _holding(torch.ones(1)))])


def _holding(thing: Any) -> Any:
    return lambda tensor, hook: tensor if thing is None else tensor * 2


def test_collect_and_patch_run_on_a_remote_model(tmp_path: Path) -> None:
    remote, ours = pl.wrap(named("neox", tmp_path), remote="local"), pl.wrap(zoo.build("neox"))
    answers, ends = torch.tensor([[3, 5]] * 3), torch.full((3,), 4)
    given = pl.PatchPairs(zoo.tokens(3, 5, 1), zoo.tokens(3, 5, 2), torch.zeros_like(ends), ends, answers)
    acts = [pl.collect(m, given.clean, sites="layers", batch_size=2) for m in (remote, ours)]
    for site in acts[1]:
        assert torch.allclose(acts[0][site], acts[1][site], atol=2e-6)
    found = [pl.patch(m, given, sites=[POINT, "blocks.2.hook_mlp_out"]) for m in (remote, ours)]
    assert found[0].path == "full"
    assert found[1].values.std() > 1e-3
    assert torch.allclose(found[0].values, found[1].values, atol=1e-5)


@pytest.mark.parametrize("where", [True, "https://ndif.example"])
def test_remote_is_passed_to_nnsight_and_the_run_is_made_there(
    where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = named("gpt2", tmp_path)
    asked: list[Any] = []

    def backend(remote: Any, blocking: bool, job_id: Any, verbose: bool) -> Any:
        asked.append((remote, blocking))
        return LocalSimulationBackend(light)

    monkeypatch.setattr(light, "_remote_backend", backend)
    ran: list[int] = []
    model, x = pl.wrap(light, remote=where), zoo.tokens()
    model.module.transformer.h[1].register_forward_hook(lambda m, a, out: ran.append(1))
    with torch.no_grad():
        _, cache = model.run_with_cache(x, POINT)
        model.run_with_hooks(x, [(POINT, double_in_block_1)])
    assert asked == [(where, True)] * 2
    assert len(ran) == 2, "only where the backend ran it"
    assert cache[POINT].shape == (2, 7, zoo.WIDTH)


def test_what_a_remote_model_cannot_do_is_refused(tmp_path: Path) -> None:
    light = named("neox", tmp_path)
    model, x = pl.wrap(light, remote="local"), zoo.tokens()
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: model.run_with_cache(x, "blocks.0.attn.hook_pattern"), pl.UnknownHookError, "inputs and outputs"),
        (lambda: model.run_with_cache(x, "gpt_neox.layers.1.mlp.hook_out"), pl.InputError, "hook_points"),
        (lambda: model(torch.zeros(1, 3, zoo.WIDTH), start_at_layer=1), pl.InputError, "can't start"),
        (lambda: model.run_with_hooks(x, bwd_hooks=[(POINT, lambda g, hook: None)]), pl.InputError, "backward"),
        (lambda: model.run_with_hooks(x, [(POINT, wrong_shape)]), pl.ShapeError, r"\(1, 7, 16\)"),
        (lambda: model.run_with_hooks(x, [(POINT, double_in_block_1)], stop_at_layer=1), pl.HookNotFiredError, POINT),
        (lambda: model.edit_weights({}), pl.InputError, "remote"),
        (lambda: pl.attribute(model, None), pl.InputError, "gradient"),
        (lambda: pl.wrap(NNsight(zoo.build("neox")), remote=True), pl.InputError, "by name"),
        (lambda: pl.wrap(zoo.build("neox"), remote=True), pl.InputError, "remote"),
        (lambda: pl.wrap(zoo.build("neox"), "nnsight"), pl.AdapterNotFoundError, "nnsight models"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_default_edits_of_nnsight_are_not_dropped_silently() -> None:
    light = NNsight(zoo.build("gpt2"))
    with light.edit() as (_, edited):
        light.transformer.h[0].output = light.transformer.h[0].output * 0
    assert pl.wrap(light).cfg.n_layers == zoo.LAYERS
    with pytest.raises(pl.InputError, match="default edits"):
        pl.wrap(edited)


def test_a_module_of_ones_own_inside_nnsight_needs_its_blocks_named() -> None:
    raw = nn.ModuleDict({"steps": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    with pytest.raises(pl.AdapterNotFoundError, match="blocks="):
        pl.wrap(NNsight(raw))
    assert pl.wrap(NNsight(raw), blocks="steps").cfg.n_layers == 2

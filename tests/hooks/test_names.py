"""Names of hook points: every way to say which are meant gives the same points everywhere, and one error where nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import probelens as pl
from probelens.hooks.names import by_point, resolve
from probelens.hooks.shorthand import NameTable

LENGTH, LAST = 8, zoo.LAYERS - 1
TASK = pl.tasks.Parity()
BATCH = TASK.sample(12, length=LENGTH, seed=1)
APART = TASK.splits({"fit": 40, "held": 30}, length=LENGTH, seed=4)
PAIRS = TASK.pairs(4, length=LENGTH, seed=3)
FAMILIES = ("neox", "mamba", "lstm")
MODELS = {family: pl.wrap(zoo.build(family)) for family in FAMILIES}


def each(tail: str) -> list[str]:
    return [f"blocks.{layer}.{tail}" for layer in range(zoo.LAYERS)]


# What is asked for, made for a model, and the full names that are meant. One name is a form for keys of mappings and caches.
RESID: dict[str, tuple[Callable[[pl.HookedModel], Any], list[str]]] = {
    "shorthand": (lambda m: "resid_post", each("hook_resid_post")),
    "shorthand with its prefix": (lambda m: "hook_resid_post", each("hook_resid_post")),
    "layer axis": (lambda m: "layers", ["blocks.0.hook_resid_pre", *each("hook_resid_post")]),
    "full name": (lambda m: "blocks.1.hook_resid_pre", ["blocks.1.hook_resid_pre"]),
    "pair": (lambda m: ("resid_post", 1), ["blocks.1.hook_resid_post"]),
    "pair with a numpy integer": (lambda m: ("resid_post", np.int64(1)), ["blocks.1.hook_resid_post"]),
    "pair from the end": (lambda m: ("resid_post", -1), [f"blocks.{LAST}.hook_resid_post"]),
    "pair with its layer type": (lambda m: ("resid_pre", 1, "block"), ["blocks.1.hook_resid_pre"]),
    "glob": (lambda m: "blocks.[12].hook_resid_post", each("hook_resid_post")[1:]),
    "predicate": (lambda m: lambda name: name.endswith("resid_pre"), each("hook_resid_pre")),
    "hook point": (lambda m: m.hook_dict["blocks.1.hook_resid_post"], ["blocks.1.hook_resid_post"]),
    "tuple of names": (lambda m: tuple(each("hook_resid_pre")[:2]), each("hook_resid_pre")[:2]),
    "point of the whole model": (lambda m: "embed", ["hook_embed"]),
}
LISTS: dict[str, tuple[Callable[[pl.HookedModel], Any], list[str]]] = {
    "list of forms": (
        lambda m: [("resid_post", 2), "blocks.0.hook_resid_*", m.hook_dict["hook_embed"], lambda n: n[7:] == "1.hook_resid_pre"],
        ["blocks.2.hook_resid_post", "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "hook_embed", "blocks.1.hook_resid_pre"],
    ),
    "generator": (lambda m: (n for n in each("hook_resid_post")), each("hook_resid_post")),
    "a point twice": (lambda m: ["resid_post", ("resid_post", 0)], each("hook_resid_post")),
}  # fmt: skip
OWN: dict[str, dict[str, tuple[Any, list[str]]]] = {
    "neox": {
        "inside a part": ("pattern", each("attn.hook_pattern")),
        "name in its part": ("attn.hook_z", each("attn.hook_z")),
        "TransformerLens' name": (("attn", 1), ["blocks.1.attn.hook_pattern"]),
        "pair inside a part": (("q", -1), [f"blocks.{LAST}.attn.hook_q"]),
        "joined": ("k1", ["blocks.1.attn.hook_k"]),
        "layer type": (("mlp_post", 0, "mlp"), ["blocks.0.mlp.hook_post"]),
        "module path": ("gpt_neox.layers.1.mlp.dense_h_to_4h.hook_in", ["gpt_neox.layers.1.mlp.dense_h_to_4h.hook_in"]),
        "glob of module paths": (
            "gpt_neox.layers.*.mlp.hook_out",
            [f"gpt_neox.layers.{i}.mlp.hook_out" for i in range(zoo.LAYERS)],
        ),
    },
    "mamba": {
        "alias": ("mixer_out", each("mixer.hook_out")),
        "alias of one": ("blocks.1.hook_mixer_out", ["blocks.1.mixer.hook_out"]),
        "alias as a pair": (("mixer_out", 1), ["blocks.1.mixer.hook_out"]),
        "layer type": (("out", 0, "mixer"), ["blocks.0.mixer.hook_out"]),
        "state": ("ssm_state", each("mixer.hook_ssm_state")),
        "module path": ("backbone.layers.1.mixer.hook_in", ["backbone.layers.1.mixer.hook_in"]),
    },
    "lstm": {
        "state": ("h", each("rnn.hook_h")),
        "state as a pair": (("c", 1), ["blocks.1.rnn.hook_c"]),
        "gate": (("gate_i", -1, "rnn"), [f"blocks.{LAST}.rnn.hook_gate_i"]),
        "module path": ("head.hook_in", ["head.hook_in"]),
    },
}


def forms(family: str) -> dict[str, tuple[Callable[[pl.HookedModel], Any], list[str]]]:
    own = {name: ((lambda m, asked=asked: asked), want) for name, (asked, want) in OWN[family].items()}
    return {**RESID, **LISTS, **own}


ALL = [(family, form) for family in FAMILIES for form in forms(family)]
KEYS = [(family, form) for family in FAMILIES for form in RESID]


def listening(run: Callable[[Any], Any]) -> list[str]:
    seen: dict[str, None] = {}
    run(lambda tensor, hook: seen.setdefault(hook.name))
    return list(seen)


def added(model: pl.HookedModel, asked: Any) -> list[str]:
    def run(fn: Any) -> None:
        model.add_hook(asked, fn)
        try:
            model(BATCH.tokens)
        finally:
            model.reset_hooks()

    return listening(run)


def in_block(model: pl.HookedModel, asked: Any) -> list[str]:
    def run(fn: Any) -> None:
        with model.hooks([(asked, fn)]):
            model(BATCH.tokens)

    return listening(run)


def filling(model: pl.HookedModel, asked: Any) -> list[str]:
    cache, fwd, _ = model.get_caching_hooks(asked)
    model.run_with_hooks(BATCH.tokens, fwd)
    return list(cache)


# Entry points that take any form; what comes back in the order of the forward pass is compared as a set.
ENTRIES: dict[str, Callable[[pl.HookedModel, Any], Any]] = {
    "run_with_cache": lambda m, asked: {*m.run_with_cache(BATCH.tokens, asked)[1]},
    "run_with_hooks": lambda m, asked: {*listening(lambda fn: m.run_with_hooks(BATCH.tokens, [(asked, fn)]))},
    "hooks": lambda m, asked: {*in_block(m, asked)},
    "add_hook": lambda m, asked: {*added(m, asked)},
    # What is asked for by another name is under both.
    "get_caching_hooks": lambda m, asked: {m.points.alias(name) for name in filling(m, asked)},
    "hook_points": lambda m, asked: list(m.hook_points(asked)["name"]),
    "collect": lambda m, asked: pl.collect(m, BATCH, asked).names,
    "patch": lambda m, asked: pl.patch(m, PAIRS, asked, pos=None).sites,
}
SLOWER: dict[str, Callable[[pl.HookedModel, Any], Any]] = {
    "verify": lambda m, asked: [row["name"] for row in m.verify(BATCH.tokens, asked).rows],
    "attribute": lambda m, asked: pl.attribute(m, PAIRS, asked, pos=None).sites,
    "ablate_component": lambda m, asked: [row["site"] for row in pl.ablate_component(m, BATCH, asked, "zero").rows],
}  # fmt: skip


def space(seed: int = 0) -> Any:
    return pl.subspaces.random(1, zoo.WIDTH, mean=torch.zeros(zoo.WIDTH), seed=seed)


MAPPINGS: dict[str, Callable[[pl.HookedModel, Any], Any]] = {
    "ablate": lambda m, asked: pl.ablate(m, BATCH, {asked: space()}, refit=False, controls=0).targets(),
    "dose_response": lambda m, asked: pl.dose_response(m, BATCH, {asked: space()}, refit=False, controls=0).rows,
    "length_transfer": lambda m, asked: [
        row for row in pl.length_transfer(m, TASK, {asked: space()}, (LENGTH,), trained_length=LENGTH, n=12, controls=0).rows
        if (row["condition"], row["span"]) == ("target", "all")
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "form"), ALL)
def test_every_form_means_its_points(family: str, form: str) -> None:
    model, (asked, want) = MODELS[family], forms(family)[form]
    assert [point.name for point in resolve(model, asked(model))] == want


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("family", "form"), ALL)
def test_every_entry_point_takes_every_form(family: str, form: str, entry: str) -> None:
    model, (asked, want) = MODELS[family], forms(family)[form]
    got = ENTRIES[entry](model, asked(model))
    assert got == (want if isinstance(got, list) else {*want})


@pytest.mark.parametrize("entry", SLOWER)
@pytest.mark.parametrize(("family", "form"), [(f, form) for f in FAMILIES for form in {**RESID, **LISTS}])
def test_slower_entry_points_take_every_form(family: str, form: str, entry: str) -> None:
    model, (asked, want) = MODELS[family], forms(family)[form]
    assert SLOWER[entry](model, asked(model)) == want


@pytest.mark.parametrize("entry", MAPPINGS)
@pytest.mark.parametrize(("family", "form"), KEYS)
def test_a_mapping_may_be_keyed_by_every_form(family: str, form: str, entry: str) -> None:
    model, (asked, want) = MODELS[family], RESID[form]
    assert [row["site"] for row in MAPPINGS[entry](model, asked(model))] == want


@pytest.mark.parametrize("form", ["pair", "predicate"])
def test_erase_takes_sites_alike(form: str) -> None:
    model, (asked, want) = MODELS["lstm"], RESID[form]
    found = pl.erase(model, APART["fit"], APART["held"], sites=asked(model), controls=0, mlp=False)
    assert [row["site"] for row in found.rows] == want


@pytest.mark.parametrize(("family", "form"), [(f, form) for f in FAMILIES for form in forms(f)])
def test_what_means_one_point_is_a_key_of_caches_and_activations_and_others_are_refused(family: str, form: str) -> None:
    model, (asked, want) = MODELS[family], forms(family)[form]
    cache = model.run_with_cache(BATCH.tokens, None)[1]
    if any(name not in cache for name in want):
        cache = model.run_with_cache(BATCH.tokens, want)[1]
    acts = pl.collect(model, BATCH, list(cache))
    if len(want) == 1:
        assert model.point(asked(model)).name == want[0]
        assert cache[asked(model)] is cache[want[0]]
        assert acts[asked(model)] is acts[want[0]]
        assert asked(model) in cache
        return
    for found in (cache, acts):
        with pytest.raises(pl.UnknownHookError, match=r"(means|accepts) \d+ hook points.*Name one of them"):
            found[asked(model)]
    with pytest.raises(pl.UnknownHookError, match="Name one of them"):
        model.point(asked(model))
    assert asked(model) not in cache


def test_a_predicate_sees_second_names_unless_it_leaves_out_what_it_names() -> None:
    model = MODELS["neox"]
    names = lambda asked: [point.name for point in resolve(model, asked)]  # noqa: E731
    assert names(lambda name: name.endswith("mlp.hook_out")) == each("hook_mlp_out")
    assert names(lambda name: name == "blocks.1.hook_out") == ["blocks.1.hook_resid_post"]
    assert names(lambda name: name == "embed.hook_out") == ["hook_embed"]
    rest = [name for name in names(None) if "resid" not in name]
    assert names(lambda name: "resid" not in name) == rest
    assert names(lambda name: name.startswith("blocks.1.") and "resid" not in name) == [n for n in rest if n[7] == "1"]


def test_one_form_resets_what_another_added() -> None:
    model = pl.wrap(zoo.build("neox"))
    seen: list[str] = []
    model.add_hook("resid_post", lambda tensor, hook: seen.append(hook.name))
    model.reset_hooks(name=lambda name: name.endswith("1.hook_resid_post"))
    model(BATCH.tokens)
    assert seen == ["blocks.0.hook_resid_post", "blocks.2.hook_resid_post"]
    model.reset_hooks(name=("resid_post", 0))
    model.reset_hooks(name="blocks.2.*")
    assert not model.has_hooks()


# -- what fits nothing ------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "misspelt": ("resid_pots", "Nearest: 'resid_post'"),
    "misspelt pair": (("resid_pots", 1), r"Nearest: 'blocks\.1\.hook_resid_post'"),
    "misspelt name": ("blocks.0.hook_resid_pots", r"Nearest: 'blocks\.0\.hook_resid_post'"),
    "layer of a pair": (("resid_post", 9), r"3 blocks: allowed are -3 to 2"),
    "layer of a name": ("blocks.9.hook_resid_post", r"has 3 blocks\. Nearest: 'blocks\.2\.hook_resid_post'"),
    "layer that is no integer": (("resid_post", 1.0), r"the layer is an integer, got 1\.0"),
    "flag as a layer": (("resid_post", True), "the layer is an integer, got True"),
    "tensor as a layer": (("resid_post", torch.tensor(1)), r"the layer is an integer, got tensor\(1\)"),
    "bytes": (b"resid_post", "named by a string.*got b'resid_post'"),
    "glob": ("blocks.*.hook_nothing", "not found"),
    "predicate": (lambda name: False, "the predicate accepts no hook point of this "),
    "empty list": ([], "empty"),
    "one of a list": (["resid_post", "resid_pots"], "resid_pots"),
    "number": (3, "named by a string"),
    "number in a list": ([3], "named by a string"),
    "None in a list": ([None], "None alone"),
}
ABSENT = {
    "neox": ("resid_mid", "parallel"), "mamba": (("q", 1), "one mixer in place of attention"), "lstm": ("attn_out", "recurrent layer"),
}  # fmt: skip


@pytest.mark.parametrize("entry", [*ENTRIES, *SLOWER, *MAPPINGS, "erase"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_entry_point_raises_the_one_error_before_anything_runs(family: str, entry: str) -> None:
    model = MODELS[family]
    runs = {**ENTRIES, **SLOWER, **MAPPINGS}
    runs["erase"] = lambda m, asked: pl.erase(m, APART["fit"], APART["held"], sites=asked, controls=0)
    ran: list[Any] = []
    handle = model.module.register_forward_pre_hook(lambda *args: ran.append(args))
    try:
        for asked, text in [*WRONG.values(), ABSENT[family]]:
            if entry in MAPPINGS and isinstance(asked, list):
                continue  # No key of a mapping.
            with pytest.raises(pl.UnknownHookError, match=text) as said:
                runs[entry](model, asked)
            with pytest.raises(pl.UnknownHookError) as plain:
                resolve(model, asked)
            assert str(said.value) == str(plain.value)
    finally:
        handle.remove()
    assert not ran
    assert not model.has_hooks()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_says_why_the_architecture_has_no_such_point(family: str) -> None:
    asked, text = ABSENT[family]
    cache = MODELS[family].run_with_cache(BATCH.tokens, "resid_post")[1]
    for key, reason in ((asked, text), (("resid_pre", 0), "what names_filter asked for")):
        with pytest.raises(pl.UnknownHookError, match=reason):
            cache[key]


def test_what_a_cache_or_activations_lack_is_answered_with_what_they_have() -> None:
    model = MODELS["neox"]
    found = {
        "cache": model.run_with_cache(BATCH.tokens, ["resid_post", "blocks.0.hook_mlp_out"])[1],
        "acts": pl.collect(model, BATCH, ["resid_post", "blocks.0.hook_mlp_out"]),
    }
    for thing in found.values():
        assert thing["gpt_neox.layers.1.hook_out"] is thing["resid_post", 1]
        for key in ("foo", "blocks.7.hook_resid_post", "blocks.0.hook_resid_pre"):
            with pytest.raises(pl.UnknownHookError) as said:
                thing[key]
            nearest = re.findall(r"'([^']+)'", str(said.value).split("Nearest: ")[1].split(". ")[0])
            assert nearest
            assert all(name in ("resid_post", "mlp_out") or name in thing for name in nearest), nearest
    with pytest.raises(pl.UnknownHookError, match=r"the model has 3 blocks.*what names_filter asked for"):
        found["cache"]["blocks.7.hook_resid_post"]
    with pytest.raises(pl.UnknownHookError, match="the last block here is 0: "):
        pl.collect(model, BATCH, ["blocks.0.hook_resid_post"])["resid_post", 2]
    with pytest.raises(pl.UnknownHookError) as said:
        model.run_with_cache(BATCH.tokens)[1]["foo"]
    assert "names_filter" not in str(said.value)


def test_what_fits_points_of_several_parts_asks_which() -> None:
    model = pl.wrap(zoo.more("jamba"))
    with pytest.raises(pl.UnknownHookError, match=r"fits points of .*Give the layer type"):
        NameTable(["blocks.0.attn.hook_out", "blocks.0.mlp.hook_out"]).one(("out", 0))
    # The usual part goes first: what TransformerLens means by "q" stays that where another part has one too.
    both = NameTable(["blocks.0.attn.hook_q", "blocks.0.cross_attn.hook_q"])
    assert both.one(("q", 0)) == both.one("q") == "blocks.0.attn.hook_q"
    assert both.one(("q", 0, "cross_attn")) == "blocks.0.cross_attn.hook_q"
    # Blocks of a hybrid have their points where they have them.
    assert {p.block for p in resolve(model, "ssm_state")} < set(range(model.cfg.n_layers))
    assert {p.block for p in resolve(model, "mixer_out")} == set(range(model.cfg.n_layers))


def test_a_mapping_names_each_point_once() -> None:
    model = MODELS["neox"]
    assert by_point(model, {"resid_pre": 1, ("resid_post", 0): 2}) == {
        **dict.fromkeys(each("hook_resid_pre"), 1), "blocks.0.hook_resid_post": 2,
    }  # fmt: skip
    with pytest.raises(pl.InputError, match=r"blocks\.0\.hook_resid_post' is named twice"):
        pl.ablate(model, BATCH, {"resid_post": space(), ("resid_post", 0): space(1)})


def test_a_name_means_the_same_with_and_without_a_model_that_was_wrapped() -> None:
    for call in (lambda m: resolve(m, "resid_post"), lambda m: pl.collect(m, BATCH)):
        with pytest.raises(pl.InputError, match=r"expected a wrapped model.*probelens\.wrap"):
            call(zoo.build("lstm"))


# -- where a point is -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_point_knows_its_block_and_its_place_on_the_layer_axis(family: str) -> None:
    model = MODELS[family]
    for point in model.hook_dict.values():
        inside = point.name.startswith("blocks.")
        assert (point.block is not None) == inside, point
        if inside:
            block = int(point.name.split(".")[1])
            assert point.block == point.layer() == point.at(0).layer() == block
            assert point.depth == point.at(0).depth == block - point.name.endswith("resid_pre")
        else:
            assert point.depth == (-1 if "embed" in point.name.split(".")[0] and "un" not in point.name else zoo.LAYERS)
            with pytest.raises(pl.InputError, match="belongs to the whole model"):
                point.layer()
    assert [point.depth for point in resolve(model, "layers")] == [-1, *range(zoo.LAYERS)]

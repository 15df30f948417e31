"""Nothing given, or nothing that the architecture has, is an error with its reason: never an empty result."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from primitives import BATCH, PAIRS, RESID, collected, spaces

import probelens as pl
from probelens import probing, stats

X = zoo.tokens(2, 6)
NONE = torch.zeros_like(BATCH.mask)
MASKED = pl.Batch(BATCH.tokens, BATCH.labels, NONE, BATCH.groups)
EMPTY = pl.Batch(BATCH.tokens[:0], {"state": BATCH.labels["state"][:0]}, NONE[:0], BATCH.groups[:0])
NO_PAIRS = pl.PatchPairs(
    PAIRS.clean[:0], PAIRS.corrupted[:0], PAIRS.edit_pos[:0], PAIRS.read_pos[:0], PAIRS.answers[:0]
)
FAMILIES = ("neox-sequential", "mamba", "gru")
WHY = {"mamba": "one mixer in place of attention and MLP", "gru": "a recurrent layer has no attention"}


@pytest.fixture(scope="module")
def models() -> dict[str, pl.HookedModel]:
    return {family: pl.wrap(zoo.build(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def caches(models: dict[str, pl.HookedModel]) -> dict[str, pl.ActivationCache]:
    return {family: model.run_with_cache(X)[1] for family, model in models.items()}


# -- what an architecture doesn't have --------------------------------------------------------------


@pytest.mark.parametrize("name", ["pattern", "q", "z", "attn_scores", "attn_out", "mlp_out", "pre", "resid_mid"])
def test_points_of_attention_and_mlp_say_why_they_are_absent(caches: Any, name: str) -> None:
    assert len(caches["neox-sequential"].stack_activation(name)) == zoo.LAYERS
    for family, why in WHY.items():
        for ask in (lambda c: c.stack_activation(name), lambda c: c[name, 0]):
            with pytest.raises(pl.UnknownHookError, match=why):
                ask(caches[family])


def test_a_point_that_was_only_not_cached_is_not_said_to_be_absent(models: Any) -> None:
    _, cache = models["mamba"].run_with_cache(X, "blocks.*.hook_resid_post")
    with pytest.raises(pl.UnknownHookError, match="names_filter") as err:
        cache["mixer_out", 0]
    assert WHY["mamba"] not in str(err.value)


@pytest.mark.parametrize("glob", ["*.attn.*", "blocks.*.attn.hook_pattern", "*.hook_mlp_out"])
def test_globs_of_attention_and_mlp_say_why_they_fit_nothing(models: Any, glob: str) -> None:
    assert len(models["neox-sequential"].run_with_cache(X, glob)[1]) >= 3
    for family, why in WHY.items():
        for ask in (models[family].points.match, lambda g: pl.collect(models[family], X, g)):  # noqa: B023
            with pytest.raises(pl.UnknownHookError, match=why):
                ask(glob)


def test_heads_and_neurons_are_refused_where_there_are_none(models: Any, caches: Any) -> None:
    for family in WHY:
        kind = type(models[family].module).__name__
        for owner, names, part in (
            (caches[family], ("compute_head_results",), "attention heads"),
            (caches[family], ("stack_neuron_results",), "MLP"),
            (models[family], ("W_Q", "W_O"), "attention heads"),
            (models[family], ("W_in",), "MLP"),
        ):
            for name in names:
                assert not hasattr(owner, name)
                with pytest.raises(pl.InputError, match=f"has no '{name}': this {kind} has no {part}"):
                    getattr(owner, name)
    for owner, name in ((caches["neox-sequential"], "compute_head_results"), (models["neox-sequential"], "W_Q")):
        with pytest.raises(pl.InputError, match="layout"):
            getattr(owner, name)


def test_results_of_heads_are_refused_where_there_are_none(caches: Any) -> None:
    for family in WHY:
        with pytest.raises(pl.InputError, match="no attention heads"):
            caches[family].stack_head_results()


def test_a_decomposition_without_parts_is_refused(caches: Any) -> None:
    _, labels = caches["neox-sequential"].decompose_resid(mode="mlp", return_labels=True)
    assert labels == ["embed", "0_mlp_out", "1_mlp_out", "2_mlp_out"]
    for embeds in (True, False):
        with pytest.raises(pl.InputError, match=r"mode='mlp'.*one mixer in place"):
            caches["mamba"].decompose_resid(mode="mlp", incl_embeds=embeds)
    with pytest.raises(pl.InputError, match="up to layer 0"):
        caches["neox-sequential"].decompose_resid(0, incl_embeds=False)
    assert caches["neox-sequential"].decompose_resid(0).shape == (1, 2, 6, zoo.WIDTH)


# -- nothing given ----------------------------------------------------------------------------------

Call = Callable[[pl.HookedModel], Any]
POSITIONS = ([], slice(2, 2), slice(90, None), torch.tensor([], dtype=torch.long))


@pytest.mark.parametrize("pos", POSITIONS, ids=str)
def test_no_position_is_refused_wherever_positions_are_given(models: Any, pos: Any) -> None:
    calls: dict[str, Call] = {
        "run_with_cache": lambda m: m.run_with_cache(X, RESID, pos_slice=pos),
        "accumulated_resid": lambda m: m.run_with_cache(X)[1].accumulated_resid(pos_slice=pos),
        "collect": lambda m: pl.collect(m, X, [RESID], pos),
        "at": lambda m: m.run_with_hooks(X, [(RESID, pl.at(pos, lambda t, hook: t))]),
        "edit": lambda m: m.run_with_hooks(X, [(RESID, pl.edits.zero(pos))]),
        "patch": lambda m: pl.patch(m, PAIRS, [RESID], pos=pos),
        "attribute": lambda m: pl.attribute(m, PAIRS, [RESID], pos=pos),
    }
    for family in ("neox-sequential", "gru"):
        for call in calls.values():
            with pytest.raises(pl.ProbelensError, match=r"position|pos"):
                call(models[family])
        assert pl.collect(models[family], X, [RESID], [2])[RESID].shape[1] == 1


@pytest.mark.parametrize("which", [[], (1, 1), slice(0, 0)], ids=str)
def test_no_example_of_a_cache_is_refused(caches: Any, which: Any) -> None:
    with pytest.raises(pl.ShapeError, match="keep none of the batch"):
        caches["gru"].apply_slice_to_batch_dim(which)
    assert caches["gru"].apply_slice_to_batch_dim([1])[RESID].shape[0] == 1


EMPTY_CALLS: dict[str, tuple[Call, str]] = {
    "call []": (lambda m: m([]), "not empty"),
    "call no example": (lambda m: m(X[:0]), "not empty"),
    "call no position": (lambda m: m(X[:, :0]), "not empty"),
    "loss of padding": (lambda m: m(X, return_type="loss", attention_mask=torch.zeros_like(X)), "nothing to predict"),
    "loss_fn of padding": (lambda m: m.loss_fn(m(X), X, torch.zeros_like(X)), "nothing to predict"),
    "verify ''": (lambda m: m.verify(""), "verify"),
    "verify []": (lambda m: m.verify([]), "aren't empty"),
    "collect no example": (lambda m: pl.collect(m, EMPTY, [RESID]), "0 sequences"),
    "collect no site": (lambda m: pl.collect(m, BATCH, []), "empty list"),
    "probe no label": (lambda m: pl.probe(collected(m), {}), "label"),
    "probe all masked": (lambda m: pl.probe(collected(m), BATCH.labels, mask=NONE), "mask|sequences|position"),
    "ablate no subspace": (lambda m: pl.ablate(m, BATCH, {}, label="state"), "subspace"),
    "ablate no example": (lambda m: pl.ablate(m, EMPTY, spaces(m), label="state"), "sequences|example|batch"),
    "ablate all masked": (lambda m: pl.ablate(m, MASKED, spaces(m), label="state", controls=2), "mask|position"),
    "component none": (lambda m: pl.ablate_component(m, BATCH, [], target="state"), "empty list"),
    "component all masked": (lambda m: pl.ablate_component(m, MASKED, [RESID], ["zero"], target="state"), "no position"),
    "patch no pair": (lambda m: pl.patch(m, NO_PAIRS, [RESID]), "pair"),
    "plan no pair": (lambda m: pl.patch_plan(m, NO_PAIRS, [RESID]), "pair"),
    "attribute no pair": (lambda m: pl.attribute(m, NO_PAIRS, [RESID]), "pair"),
    "patch no site": (lambda m: pl.patch(m, PAIRS, []), "empty list"),
    "patch_sites none": (lambda m: pl.patch_sites(m, PAIRS, 3, "", correct_only=False), "which|reading|letter"),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY_CALLS)
def test_an_empty_input_is_refused_by_name(models: Any, name: str) -> None:
    call, says = EMPTY_CALLS[name]
    with pytest.raises(pl.ProbelensError) as err:
        call(models["neox-sequential"])
    assert re.search(says, str(err.value)), str(err.value)


def test_the_convolution_of_nothing_but_padding_is_refused(models: Any) -> None:
    with pytest.raises(pl.InputError, match="no position is scored"):
        pl.ablate_convolution(models["mamba"], MASKED, "zero", target="state")


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.contrast([], []),
        lambda: stats.hierarchical_bootstrap([]),
        lambda: stats.paired_difference([], []),
        lambda: stats.sign_flip([]),
        lambda: stats.sign_flip([1.0, 2.0], n_permutations=0),
        lambda: stats.coverage(n_datasets=0),
        lambda: pl.plots.training_curve([{"step": 1, "loss": 2.0}], y=[]),
        lambda: pl.plots.layer_profile([]),
        lambda: pl.leace(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)),
        lambda: pl.subspaces.pca(torch.zeros(0, 5), 1),
        lambda: pl.LinearProbe().fit(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)),
        lambda: probing.split_by_group(torch.zeros(0, dtype=torch.long)),
    ],
)
def test_statistics_plots_and_fits_of_nothing_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(pl.ProbelensError):
        call()


@pytest.mark.parametrize("name", ["collect", "ablate", "erase", "patch", "patch_plan", "attribute", "profile", "patch_sites", "dose_response",
                                  "length_transfer", "ablate_component", "ablate_convolution"])  # fmt: skip
def test_a_module_that_is_not_wrapped_is_told_how(name: str) -> None:
    call = getattr(pl, name)
    needed = [
        p for p in inspect.signature(call).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    arguments = {p.name: None for p in needed} | {needed[0].name: torch.nn.Linear(2, 2)}
    with pytest.raises(pl.InputError, match=r"got a Linear\. Wrap a module with probelens\.wrap"):
        call(**arguments)

"""The library's methods, each as one small call on one model that says whether it works there: for docs/support.md.

A call returns the limit under which it works ("" for none), raises one of our errors where it is refused, and
fails an assertion where it gives something wrong.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import primitives
import torch
from primitives import BATCH, OTHER, PAIRS, RESID, TASK
from torch import Tensor

import probelens as pl
from probelens.hooks.model import HookedModel
from probelens.hooks.points import HookPoint

X = BATCH.tokens[:3]
AT = 3
INSIDE = ("attn.hook_pattern", "mixer.hook_ssm_state", "rnn.hook_h")
# What a family hasn't got at all, as opposed to what is refused there.
NONE = "none"
NO_END = {"eos_token_id": None, "pad_token_id": 0}
# How a sweep ran: ``PatchResult.path``.
PATHS = {"resume": "works, resumed", "skip": "works, from the block", "full": "works, whole runs"}


@dataclass(frozen=True)
class Outcome:
    """What came of a call: "works", or "refused" with the error's class; and the limit, or the error's words."""

    how: str
    text: str = ""
    error: str = ""


def changed(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-5)


def finite(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.numel()
        assert bool(torch.isfinite(tensor).all())


def minus(tensor: Tensor, hook: HookPoint) -> Tensor:
    return tensor * -1


def hooks(model: HookedModel) -> str:
    plain = model(X)
    with model.hooks([(RESID, minus)]):
        inside = model(X)
    assert changed(inside, plain)
    assert changed(model.run_with_hooks(X, [(RESID, minus)]), plain)
    assert torch.equal(model(X), plain)
    return ""


def cache(model: HookedModel) -> str:
    _, held = model.run_with_cache(X)
    assert set(held) == set(model.hook_dict)
    assert changed(held["resid_post", 1], held["resid_post", 0])
    return ""


def points(model: HookedModel, kind: str) -> str:
    """One point of each name: heard, and an edit there reaches the output."""
    wanted = [p.name for p in model.hook_dict.values() if p.kind == kind]
    if kind == "interior":
        # TransformerLens' bridge has points of its own there, modules like any other.
        wanted += [p for p in model.hook_dict if p.endswith(INSIDE)]
        if not wanted:
            model.run_with_cache(X, f"blocks.1.{INSIDE[0] if model.cfg.n_heads else INSIDE[1]}")
            raise AssertionError("a point inside has come without being listed")
    plain = model(X)
    for name in {name.split(".", 2)[-1]: name for name in wanted}.values():
        heard: list[Any] = []
        model.run_with_hooks(X, [(name, lambda t, hook, heard=heard: heard.append(t.shape))])
        gen = torch.Generator().manual_seed(0)
        noise = [(name, lambda t, hook, gen=gen: torch.randn(t.shape, generator=gen).to(t))]
        assert heard, name
        assert changed(model.run_with_hooks(X, noise), plain) or name.endswith("reverse"), name
    return ""


def state(model: HookedModel) -> str:
    """An edit of the state after one step: nothing before it changes, what comes after it does."""
    names = [p.name for p in model.hook_dict.values() if p.step and "reverse" not in p.name]
    if not names:
        model.run_with_hooks(X, [("blocks.1.mixer.hook_ssm_state", pl.at(AT, minus))])
        raise AssertionError("a state has come without being listed")
    plain, out = model(X), model.run_with_hooks(X, [(names[-1], pl.at(AT, minus))])
    assert not changed(out[:, :AT], plain[:, :AT])
    assert changed(out[:, AT + 1 :], plain[:, AT + 1 :])
    return ""


def backward(model: HookedModel) -> str:
    seen: list[Tensor] = []
    out = model.run_with_hooks(X, bwd_hooks=[(RESID, lambda grad, hook: seen.append(grad.clone()))])
    out.square().sum().backward()
    model.zero_grad()
    assert len(seen) == 1
    finite(*seen)
    assert seen[0].any()
    return ""


def stop(model: HookedModel) -> str:
    _, held = model.run_with_cache(X, RESID)
    assert torch.allclose(model(X, stop_at_layer=2), held[RESID], atol=1e-5)
    return ""


def start(model: HookedModel) -> str:
    assert torch.allclose(model(model(X, stop_at_layer=1), start_at_layer=1), model(X), atol=1e-4, rtol=1e-4)
    return ""


def weights(model: HookedModel) -> str:
    name = next((n for n, p in model.module.named_parameters() if p.ndim == 2), "")
    plain = model(X)
    with model.edit_weights({name: lambda w: w * 0.5}):
        assert changed(model(X), plain)
    assert torch.equal(model(X), plain)
    return ""


def generate(model: HookedModel) -> str:
    own = getattr(model.module, "generate", None)
    if own is None:
        return NONE
    heard: list[Any] = []
    longest = "max_length" in inspect.signature(own).parameters
    if longest and not torch.cuda.is_available():
        return "not tried: needs CUDA"  # mamba-ssm's own times itself with CUDA's events
    more: dict[str, Any] = {"max_length": X.shape[1] + 3} if longest else {"max_new_tokens": 3, "do_sample": False}
    if any(kind.__name__ == "GenerationMixin" for kind in type(model.module).__mro__):
        more |= NO_END
    with model.hooks([(RESID, lambda t, hook: heard.append(t.shape))]):
        own(X, **more)
    assert len(heard) >= 3
    return ""


def collect(model: HookedModel) -> str:
    finite(*primitives.collected(model).tensors.values())
    return ""


def probe(model: HookedModel) -> str:
    assert all(0 <= row["accuracy"] <= 1 for row in primitives.probed(model).rows)
    return ""


def ablate(model: HookedModel) -> str:
    found = pl.ablate(model, OTHER, primitives.spaces(model), label="state", controls=1, mlp=False)
    assert {row["condition"] for row in found.rows} > {"target", "random"}
    return PATHS[found.path]


def erase(model: HookedModel) -> str:
    apart = primitives.APART
    found = pl.erase(model, apart["fit"], apart["held"], label="state", sites=[RESID], controls=1)
    assert found.rows
    return ""


def component(model: HookedModel) -> str:
    found = pl.ablate_component(model, OTHER, [RESID], ["zero", "resample"], target="state", draws=1)
    assert {row["how"] for row in found.rows} == {"zero", "resample"}
    assert found.values.isfinite().all()
    return PATHS[found.path]


def convolution(model: HookedModel) -> str:
    assert len(pl.ablate_convolution(model, OTHER, target="state", draws=1).rows) == 5
    return ""


def patch(model: HookedModel) -> str:
    """The last residual, where the answer is read, is all of it; elsewhere it is nothing."""
    found = pl.patch(model, PAIRS, "resid_post", pos="each")
    read, last = int(PAIRS.read_pos[0]), found.values[-1]
    assert torch.allclose(last[read], found.clean, atol=1e-4, rtol=1e-4)
    for pos in range(PAIRS.clean.shape[1]):
        assert pos == read or torch.allclose(last[pos], found.corrupted, atol=1e-4, rtol=1e-4)
    return PATHS[found.path]


def interchange(model: HookedModel) -> str:
    """Taken whole, the last residual where the answer is read brings the clean run's answer; a subspace has its controls."""
    name = model.point(("resid_post", -1)).name
    space = pl.subspaces.pca(pl.collect(model, BATCH, [name])[name], 1, BATCH.mask)
    pairs = primitives.own_pairs(model)
    found = pl.interchange(model, pairs, {name: space}, pos=pairs.read_pos, controls=1)
    assert found.correct.all()
    by_kind = {row["condition"]: row for row in found.rows}
    assert by_kind.keys() >= {"target", "complement", "random"}
    assert by_kind["full"]["iia"] == 1
    return PATHS[found.path]


def das(model: HookedModel) -> str:
    """A plane is learned: the loss falls, all of the last residual brings the clean run's answer, and controls stand beside."""
    name = model.point(("resid_post", -1)).name
    pairs = primitives.own_pairs(model)
    found = pl.das(model, pairs, name, pairs.read_pos, 2, untrained=False, controls=1, steps=8, lr=0.1)
    assert found.loss[-3:].mean() < found.loss[0]
    by_kind = {row["condition"]: row for row in found.rows}
    assert by_kind.keys() >= {"target", "complement", "random", "shuffled"}
    assert by_kind["full"]["iia"] == 1
    return PATHS[found.path]


def attribute(model: HookedModel) -> str:
    finite(pl.attribute(model, PAIRS, "resid_post", pos="each").values)
    return ""


def patch_sites(model: HookedModel) -> str:
    found = pl.patch_sites(model, PAIRS, 3, correct_only=False, n_boot=2)
    assert found.ok, found.to_dataframe().to_string()
    lacking = [row["site"] for row in found.rows if not row["applicable"] and row["site"] != "H+conv"]
    return f"works without {', '.join(lacking)}" if lacking else ""


def profile(model: HookedModel) -> str:
    found = pl.profile(
        model, TASK, length=8, n_probe=20, n_ablate=8, n_pairs=2, controls=1, refit=False, progress=False
    )
    assert set(found.indices) == {"state"}
    assert len(found.to_dataframe()) == model.cfg.n_layers + 1
    return PATHS[found.patches["state"].path]


METHODS: dict[str, Callable[[HookedModel], str]] = {
    "`run_with_hooks`, `hooks`": hooks,
    "`run_with_cache`": cache,
    "boundary points": lambda m: points(m, "boundary"),
    "interior points": lambda m: points(m, "interior"),
    "edits of recurrent state": state,
    "backward hooks": backward,
    "`stop_at_layer`": stop,
    "`start_at_layer`": start,
    "`edit_weights`": weights,
    "hooks during `generate`": generate,
    "`collect`": collect,
    "`probe`": probe,
    "`ablate`": ablate,
    "`erase`": erase,
    "`ablate_component`": component,
    "`ablate_convolution`": convolution,
    "`patch`": patch,
    "`attribute`": attribute,
    "`interchange`": interchange,
    "`das`": das,
    "`patch_sites`": patch_sites,
    "`profile`": profile,
}


def tried(method: str, model: Any, methods: Mapping[str, Callable[[Any], str]] = METHODS) -> Outcome:
    """Call one method on one model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Outcome("works", methods[method](model))
        except pl.ProbelensError as err:
            return Outcome("refused", str(err), type(err).__name__)

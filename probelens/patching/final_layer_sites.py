"""The sites of the final layer: which hook points each one means in a model, and the edits that patch them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.hooks.edits.values import Replace
from probelens.hooks.model import HookedModel
from probelens.hooks.passes.at import at
from probelens.hooks.points import HookFn
from probelens.running.sweep.conditions import Intervention

_STATES = (".hook_ssm_state", ".hook_delta_state", ".hook_lru_state", ".rnn.hook_h", ".rnn.hook_c")


@dataclass(frozen=True)
class Site:
    name: str
    text: str
    read: str
    expected: float | None = None


SITES = (
    Site("A", "residual after the last block at m, read at m", "m", 1.0),
    Site("B", "residual after the last block at m, read at T", "T", 0.0),
    Site("C", "output of the last mixer at m, read at m", "m"),
    Site("D", "residual entering the last block at m, read at m", "m"),
    Site("E", "residual entering the last block at m, read at T", "T"),
    Site("F", "residual after the last block at m to T, read at T", "T", 1.0),
    Site("G", "residual entering the last block at m to T, read at T", "T"),
    Site("H", "recurrent state of the last layer after m, read at T", "T"),
    Site("H+conv", "recurrent state and convolution tail of the last layer after m, read at T", "T"),
    Site("I", "states and convolution tails of all layers after m, read at T", "T", 1.0),
    Site("J", "residual of all layers at m, states not patched, read at T", "T"),
)


# Sites that are one run, read at two positions.
RUN = {site.name: {"B": "A", "E": "D"}.get(site.name, site.name) for site in SITES}


class Plan:
    """Which hook points each site means in this model, and the edits that patch them."""

    def __init__(self, model: HookedModel, m: Tensor, last: Tensor) -> None:
        self.model, self.m, self.last = model, m, last.cpu()
        self.n = model.cfg.n_layers
        end = f"blocks.{self.n - 1}."
        self.after, self.before = end + "hook_resid_post", end + "hook_resid_pre"
        names = model.hook_dict
        inside = [[p.name for p in names.values() if p.block == i] for i in range(self.n)]
        self.states = [[p for p in layer if p.endswith(_STATES)] for layer in inside]
        self.attention = [any(".attn." in p for p in layer) for layer in inside]
        self.backward = any(p.endswith("_reverse") for layer in inside for p in layer)
        self.convs = [[p for p in layer if p.endswith(".hook_in_proj")] for layer in inside]
        outs = [model.points.alias(end + name) for name in ("hook_mixer_out", "hook_attn_out")]
        self.mixer = next((p for p in outs if p in names), None)
        if self.mixer is None and any(".rnn." in p for p in self.states[-1]):
            # A recurrent layer has no residual path: what it puts out is the residual after it.
            self.mixer = self.after

    def reason(self, site: str) -> str | None:
        """Why a site doesn't exist here, or None."""
        if site == "C" and self.mixer is None:
            return f"no point for the output of the last mixer: block {self.n - 1} has no attn_out or mixer_out"
        if site[0] not in "HI":
            return None
        layers = range(self.n) if site == "I" else [self.n - 1]
        missing = [layer for layer in layers if not self.states[layer]]
        if missing and self.attention[missing[0]]:
            return (
                f"block {missing[0]} has no state point; through its attention later positions read the keys and "
                "values of every earlier one"
            )
        if missing and f"blocks.{missing[0]}.mixer.hook_wkv_state" in self.model.hook_dict:
            return f"beside its state, block {missing[0]} carries the position before into its mixer and its MLP"
        if missing:
            return f"block {missing[0]} has no state point (hook_ssm_state, rnn.hook_h)"
        # Attention beside a recurrent state reaches back past it, so then the states aren't everything.
        reaching = [layer for layer in layers if self.attention[layer] or self._attends(layer)]
        if site == "I" and reaching:
            return (
                f"block {reaching[0]} has attention beside its recurrent state: later positions also read the "
                "keys and values of every earlier one"
            )
        if self.backward:
            return "the layers run in both directions: what is after m reaches T from both sides"
        if site == "H+conv" and not self.convs[-1]:
            return "this recurrent layer has no convolution; H is all that it carries"
        return None

    def _attends(self, layer: int) -> bool:
        """Whether a block with a state also holds an attention that has no points."""
        block = self.model.module.get_submodule(self.model.adapter.blocks[layer])
        return any("attention" in type(part).__name__.lower() for part in block.modules())

    def remark(self, site: str) -> str:
        """What a reader should know about a site that applies."""
        if site == "C" and self.mixer == self.after:
            return "a recurrent layer has no residual path: its output is the residual, so C is A"
        if site == "J" and not any(self.states):
            return "without recurrent states, keys and values at m follow from the patched residuals"
        return ""

    def windows(self, sites: Sequence[str]) -> dict[str, Tensor]:
        """The hook points that these sites need, and the positions of each. name to (example, window)"""
        m, out = self.m[:, None], {}
        steps = torch.arange(int((self.last - self.m).max()) + 1)
        # Positions beyond T, and below 0 further down, become the nearest one, which is written twice.
        span = torch.minimum(m + steps, self.last[:, None])
        for site in sites:
            for name in self.points(site):
                if name in self.convs[self.model.point(name).layer()]:
                    mixer: Any = self.model.module.get_submodule(self.model.point(name).module)
                    conv = mixer.conv_1d if hasattr(mixer, "conv_1d") else mixer.conv1d
                    reach = int(conv.weight.shape[-1]) - 1
                    # A kernel of one position has no tail; its own input is harmless to patch.
                    out[name] = (m - torch.arange(max(reach, 1)).flip(0)).clamp_min(0)
                else:
                    out[name] = span if name in (self.after, self.before) else m
        return out

    def points(self, site: str) -> list[str]:
        """The hook points that a site patches together."""
        if site in "AF":
            return [self.after]
        if site == "C":
            return [str(self.mixer)]
        if site in "DG":
            return [self.before]
        if site == "J":
            return [*(f"blocks.{i}.hook_resid_pre" for i in range(self.n)), self.after]
        layers = range(self.n) if site == "I" else [self.n - 1]
        names = [p for i in layers for p in self.states[i]]
        return names if site == "H" else names + [p for i in layers for p in self.convs[i]]

    def edits(
        self, sites: Sequence[str], source: Tensor, mask: Tensor | None, batch_size: int
    ) -> dict[str, tuple[Intervention, ...]]:
        """For each run, the interventions that put the source's values there."""
        runs = list(dict.fromkeys(RUN[site] for site in sites))
        windows = self.windows(runs)
        held = _gather(self.model, source, windows, mask, batch_size)
        out = {}
        for run in runs:
            parts = []
            for name in self.points(run):
                width = None if run in "FG" or name not in (self.after, self.before) else 1
                parts.append(_write(self.model, name, held[name][:, :width], windows[name][:, :width], source.shape[1]))
            out[run] = tuple(parts)
        return out


def _gather(
    model: HookedModel, tokens: Tensor, windows: Mapping[str, Tensor], mask: Tensor | None, batch_size: int
) -> dict[str, Tensor]:
    """Activations at the windows only: whole trajectories of states don't fit in memory. (example, window, ...)"""
    held: dict[str, Tensor] = {}

    def keep(rows: Tensor, name: str, where: Tensor) -> Any:
        def put(value: Tensor, which: Any) -> None:
            if name not in held:
                held[name] = torch.empty(len(tokens), where.shape[1], *value.shape[2:], dtype=value.dtype)
            held[name][which] = value.cpu()

        def whole(tensor: Tensor, hook: Any) -> None:
            local = torch.arange(len(rows), device=tensor.device)[:, None]
            put(tensor.detach().movedim(hook.pos_axis, 1)[local, where[rows].to(tensor.device)], rows)

        def step(tensor: Tensor, hook: Any) -> None:
            here = where[rows, 0] == hook.pos
            put(tensor.detach()[here.to(tensor.device)][:, None], rows[here])

        return at(sorted(set(where[:, 0].tolist())), step) if model.point(name).step else whole

    with torch.no_grad(), model.undisturbed():
        for rows in torch.arange(len(tokens)).split(batch_size):
            hooks = [(name, keep(rows, name, where)) for name, where in windows.items()]
            if hooks:
                given = None if mask is None else mask[rows]
                model.run_with_hooks(tokens[rows], hooks, return_type=None, attention_mask=given)
    return held


def _write(model: HookedModel, name: str, values: Tensor, where: Tensor, length: int) -> Intervention:
    """Put ``values`` (example, window, ...) in at the positions ``where`` (example, window)."""
    point = model.point(name)
    steps = sorted(set(where[:, 0].tolist())) if point.step else None

    def edit_for(rows: Tensor) -> HookFn:
        local, window, given = torch.arange(len(rows))[:, None], where[rows], values[rows]
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        mask[local, window] = True
        if given.shape[1] == 1:
            # The same at every position, without memory for it: only that of the mask is used.
            whole = given.expand(-1, length, *given.shape[2:])
        else:
            whole = given.new_zeros(len(rows), length, *given.shape[2:])
            whole[local, window] = given
        edit = Replace(mask, whole.movedim(1, point.pos_axis))
        return edit if steps is None else at(steps, edit)

    return Intervention(name, edit_for)

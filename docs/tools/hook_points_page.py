"""Writes docs/hook-points.md from the adapters: ``python docs/tools/hook_points_page.py``.

Every table is read off wrapped models of the zoo, so the page says what the adapters say. A test compares
the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import probelens as pl
from probelens.hooks.model import HookedModel
from probelens.hooks.points import HookPoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import zoo

PAGE = Path(__file__).resolve().parents[1] / "hook-points.md"

INTRO = """\
# Hook points

<!-- Written by docs/tools/hook_points_page.py from the adapters. Change the notes there, then run it again. -->

A hook point names one tensor of a model. `model.hook_points()` lists those of your own model with the module
each belongs to, and `model.verify()` tries every one of them: it must fire, returning its input must change
nothing, noise must change the output, and nothing may be left behind.

## How to name them

All of these take the same forms:

- the names of hooks in `run_with_hooks`, `hooks`, `add_hook` and `reset_hooks(name=...)`;
- `names_filter=` of `run_with_cache`;
- `sites=` of `collect`, `patch`, `attribute`, `interchange`, `ablate_component` and `erase`;
- the keys of the subspaces given to `ablate`, `dose_response`, `length_transfer` and `interchange`;
- `cache[...]` and `activations[...]`, where the name must mean one point;
- `model.hook_points(...)` and `model.verify(names=...)`;
- `--match` of `probelens hooks` and `probelens verify`, repeated or with commas: names, shorthands such as `resid_post` and `k6`,
  `layers`, module paths and globs; `resid_post,0,-1` is a shorthand with its layers.

| form | for example | means |
|---|---|---|
| full name, or an alias | `"blocks.3.hook_resid_post"`, `"blocks.3.hook_mixer_out"` | that point |
| shorthand | `"resid_post"`, `"mixer_out"`, `"pattern"`, `"ssm_state"`, `"attn.hook_z"` | the point of every block, or `"embed"` of the model |
| layer axis | `"layers"` | what enters block 0, then what each block returns |
| shorthand and layer, as in TransformerLens | `("resid_post", 3)`, `("q", -1)`, `("out", 0, "mixer")`, `"k6"` | the point of one block |
| path in your module | `"gpt_neox.layers.3.mlp.dense_h_to_4h.hook_out"`, `"….hook_in"` | the output or the input of that module |
| glob | `"blocks.[0-3].hook_*"` | every name that fits |
| predicate | `lambda name: name.endswith("hook_z")` | every name that it accepts, second names included; of one that leaves out what it names, full names |
| hook point | `model.point("blocks.3.hook_resid_post")` | itself |
| list | `["embed", ("resid_post", 3), "*.hook_z"]` | the points of each, each once: results list them in this order, the keys of a cache in the order of the forward pass |
| nothing | `None` | every hook point |

What fits no point is an `UnknownHookError` before anything runs, with the nearest names and, where the architecture has no
such point, the reason. A hook that never fires is an error too.

## What they are

Names in the tables below are under `blocks.{l}.` unless the table says otherwise, position first: `(batch, pos, …)`.

- **boundary**: input or output of a module that the model calls. The model runs its own kernels.
- **interior**: inside a module. While somebody listens there, that module runs a reference forward with the
  same numbers; `model.backend("reference")` runs it always, for experiments whose conditions must share one
  backend.
- **step**: recurrent state. A hook that edits is called once per step with `hook.pos` set and the state after
  that step, `(batch, …)`; what it returns is what this step's output is read from and what the next step sees.
  In a cache the states are stacked: `(batch, pos, …)`. `pl.at(pos, fn)` runs fused kernels between the
  positions it names.
"""

ATTENTION = [*zoo.TRANSFORMERS, *zoo.DECODERS]
ENCODERS = list(zoo.ENCODERS)
CLASSIFIERS = [name for name in zoo.CLASSIFIERS if name != "llama-classifier"]
OTHERS = [*zoo.ENCODERS, *zoo.CLASSIFIERS, *zoo.ENCODER_DECODERS]
RNNS = ["lstm", "gru", "lstm-bidirectional", "gru-bidirectional-fused"]
SECTIONS: list[tuple[str, list[str], str]] = [
    (
        "Attention and MLP",
        ATTENTION,
        "GPT-NeoX and Pythia, GPT-2, Llama, Mistral, Qwen, Gemma, Phi, OPT, Mixtral, GPT-J, Falcon, OLMo and any "
        "other decoder of transformers with such blocks. Inside attention, one function takes the place of the "
        "model's own through transformers' attention interface. With a key/value cache, keys and values are those "
        "of everything read so far, and an edit lasts for one call: it isn't written to the cache.",
    ),
    (
        "Encoders and classifiers",
        [*ENCODERS, *CLASSIFIERS],
        "BERT, RoBERTa, DistilBERT, ModernBERT, ELECTRA, DeBERTa, ViT, the encoders of T5 and BART, alone or under a head "
        "for masked tokens, tokens, sequences or pictures; and classifiers made of decoders, which have the points of the decoder. "
        "Most of these blocks norm every sum: `hook_resid_mid` is then the norm of `hook_resid_pre + hook_attn_out`, and "
        "`hook_resid_post` the norm of `hook_resid_mid + hook_mlp_out`. In ViT and ModernBERT they are the sums themselves.",
    ),
    (
        "Encoder–decoders",
        list(zoo.ENCODER_DECODERS),
        'T5, BART, mBART, Pegasus, Marian, Whisper. The decoder is what `blocks.{l}`, `"resid_post"`, `"layers"` and '
        "`model.cfg.n_layers` mean; `decoder.blocks.{l}` is another name of it. The encoder has the same points, without the "
        "cross-attention, under `encoder.blocks.{l}.`, and `encoder.hook_embed`, `encoder.ln_final.hook_in` and "
        "`encoder.ln_final.hook_out` where it has such modules. A run needs what both read: a mapping with `input_ids` (or "
        "`input_features`) and `decoder_input_ids`. Tokens alone go to the encoder, and the decoder reads them one step later, as "
        "BART does by itself. Every block of the decoder reads the encoder's output, so no run begins at a block.",
    ),
    (
        "Mamba",
        ["mamba", "falcon-mamba"],
        "Mamba and FalconMamba of transformers, `Mamba` layers of the mamba-ssm package, Mamba layers of Jamba.",
    ),
    (
        "Mamba-2",
        ["mamba2"],
        "Mamba-2 of transformers, `Mamba2` layers of the mamba-ssm package, and the mixers of Bamba, Zamba2, "
        "Nemotron-H, Granite 4 (GraniteMoeHybrid) and Falcon-H1, which stand beside attention in every block; there "
        "`mixer.hook_in_proj` and `mixer.hook_out` are what they are after Falcon-H1's multipliers.",
    ),
    (
        "Short convolution",
        ["lfm2"],
        "The mixers of LFM2 that aren't attention. They carry nothing but the last inputs of the convolution.",
    ),
    (
        "RG-LRU",
        ["recurrent-gemma"],
        "The recurrent blocks of RecurrentGemma. With a cache, they keep their states themselves.",
    ),
    (
        "Gated delta net",
        ["qwen3-next"],
        "The mixers of Qwen3-Next and Qwen3.5 that aren't attention. The reference forward runs the recurrence one step "
        "after the other, where the mixer's own runs in chunks.",
    ),
    (
        "RWKV",
        ["rwkv"],
        "The time mixing of RWKV-4 in transformers. Its sums and weights grow with exp(k), so a state point has the average of the "
        "values and the log of their weight instead, which can be carried from one run to another. While generating with a cache, "
        "hooks inside want one example at a time: transformers mixes up the examples of a batch there.",
    ),
    (
        "LSTM, GRU and RNN",
        RNNS,
        "Any module with `nn.LSTM`, `nn.GRU` or `nn.RNN`. Each layer of a stack is a block, also where the stack is "
        "one fused module; its residual stream is the layer's input and output. Points of the reverse direction end "
        "in `_reverse`.",
    ),
]

# What a block has inside, by the point that tells it.
INSIDE = {
    "attention": "attn.hook_pattern",
    "state space": "mixer.hook_ssm_state",
    "short convolution": "mixer.hook_conv_in",
    "RG-LRU": "mixer.hook_lru_state",
    "gated delta net": "mixer.hook_delta_state",
    "time mixing": "mixer.hook_wkv_state",
}


def models(names: Iterable[str]) -> dict[str, HookedModel]:
    """Wrapped models of the zoo by name."""
    return {name: model(name) for name in names}


@cache
def model(name: str) -> HookedModel:
    """One model of the zoo, built once."""
    return pl.wrap(zoo.more(name))


def tail(point: HookPoint) -> str:
    """A point's name without its block."""
    return point.name.split(".", 2)[2] if point.name.startswith("blocks.") else point.name


def inside(model: HookedModel) -> dict[str, HookPoint]:
    """Points of all blocks by the last part of their names, the residual stream left out."""
    found: dict[str, HookPoint] = {}
    for point in model.hook_dict.values():
        if point.name.startswith("blocks.") and "hook_resid_p" not in point.name:
            found.setdefault(tail(point), point)
    return found


def table(points: Iterable[HookPoint], lacking: dict[str, list[str]] | None = None) -> list[str]:
    """Rows of hook points; ``lacking`` names the families without one."""
    rows = ["| point | axes | kind | an edit there |", "|---|---|---|---|"]
    for point in points:
        prefix = point.name[: len(point.name) - len(tail(point))]
        aliases = ", ".join(
            f"`{alias.removeprefix(prefix)}`" for alias in point.aliases if not alias.startswith("decoder.")
        )
        name = f"`{tail(point)}`" + (f" = {aliases}" if aliases else "")
        kind = point.kind + (", step" if point.step else "")
        missing = (lacking or {}).get(tail(point), [])
        note = point.note + (f". Not in {', '.join(missing)}" if missing else "")
        rows.append(f"| {name} | {', '.join(point.axes)} | {kind} | {note} |")
    return rows


def everywhere(model: HookedModel) -> list[HookPoint]:
    """The points that every architecture has."""
    return [
        p
        for p in model.hook_dict.values()
        if not p.name.startswith("blocks.") or p.name.startswith("blocks.0.hook_resid_p")
    ]


def section(title: str, names: list[str], text: str) -> list[str]:
    """One kind of block, or the mixers of a hybrid: its points over all models of the kind."""
    wrapped = models(names)
    by_model = {name: inside(model) for name, model in wrapped.items()}
    if any(name in zoo.HYBRIDS and name != "falcon-mamba" for name in names):
        by_model = {
            name: {key: point for key, point in found.items() if key.startswith("mixer.")}
            for name, found in by_model.items()
        }
    points: dict[str, HookPoint] = {}
    for found in by_model.values():
        for key, point in found.items():
            points.setdefault(key, point)
    first = by_model[names[0]]
    order = [*first, *(key for key in points if key not in first)]
    # Where most of a kind lack a point it is one of a sort (a GRU's gates), and naming them would say nothing.
    lacking = {
        key: gone
        for key in points
        if 0 < len(gone := [name for name in names if key not in by_model[name]]) <= len(names) // 2
    }
    return [f"## {title}", "", text, "", *table((points[key] for key in order), lacking), ""]


def reasons() -> list[str]:
    """What some families lack, in the words of their errors."""
    rows = ["| family | point | why it isn't there |", "|---|---|---|"]
    asked = ("attn.hook_pattern", "hook_resid_mid", "hook_attn_out", "mlp.hook_pre", "hook_mlp_out")
    for name, model in models([*ATTENTION, *ENCODERS, *CLASSIFIERS, *zoo.ENCODER_DECODERS, "mamba"]).items():
        for point in asked:
            full = f"blocks.0.{point}"
            if full in model.hook_dict:
                continue
            if reason := model.adapter.absent(full):
                rows.append(f"| {name} | `{point}` | {reason} |")
    return rows


def families() -> list[str]:
    """One row a family: adapter, blocks, points."""
    rows = ["| family | adapter | class | points per block | all points |", "|---|---|---|---|---|"]
    for name, model in models([*(n for n in zoo.EVERY if n not in zoo.PACKAGED), *OTHERS]).items():
        blocks: dict[int, int] = {}
        for point in model.hook_dict.values():
            if point.name.startswith("blocks."):
                blocks[point.layer()] = blocks.get(point.layer(), 0) + 1
        low, high = min(blocks.values()), max(blocks.values())
        per_block = str(low) if low == high else f"{low} to {high}"
        kind = type(model.module).__name__ if name not in RNNS and not name.startswith(("lstm", "gru")) else "nn.Module"
        rows.append(f"| {name} | {model.adapter.name} | {kind} | {per_block} | {len(model.hook_dict)} |")
    return rows


def hybrids() -> list[str]:
    """One row a hybrid: what each block has inside."""
    rows = ["| family | block | mixer | interior points of | also |", "|---|---|---|---|---|"]
    for name, model in models(n for n in zoo.HYBRIDS if n != "falcon-mamba").items():
        seen = set()
        for layer in range(model.cfg.n_layers):
            prefix = f"blocks.{layer}."
            points = [p for p in model.hook_dict.values() if p.name.startswith(prefix)]
            mixer = next(p for p in points if model.points.alias(prefix + "hook_mixer_out") == p.name)
            kinds = [word for word, sign in INSIDE.items() if any(tail(p) == sign for p in points)]
            also = [
                tail(p)
                for p in points
                if tail(p) in ("hook_resid_mid", "hook_mlp_out", "mlp.hook_post", "shared.hook_out")
            ]
            row = (
                type(model.module.get_submodule(mixer.module)).__name__,
                ", ".join(kinds) or "output only",
                ", ".join(f"`{a}`" for a in also),
            )
            if row not in seen:
                seen.add(row)
                rows.append(f"| {name} | {layer} | {row[0]} | {row[1]} | {row[2]} |")
    return rows


def page() -> str:
    """The whole page."""
    (first,) = models(["neox"]).values()
    lines = [INTRO]
    lines += [
        "## Every model",
        "",
        "The residual stream and what comes before and after the blocks; the first two under `blocks.{l}.`.",
        "",
    ]
    points = everywhere(first)
    lines += [*table([*(p for p in points if "resid" in p.name), *(p for p in points if "resid" not in p.name)]), ""]
    for title, names, text in SECTIONS:
        lines += section(title, names, text)
    lines += [
        "## Hybrids",
        "",
        "Attention, Mamba mixers and MLPs of a hybrid have the points of the tables above, each in its place. Every "
        "block has `hook_mixer_out`: the output of its mixer, or another name of `hook_attn_out`. Blocks of the tiny "
        "test models, one of each sort:",
        "",
        *hybrids(),
        "",
        "RWKV norms the embedding inside its first block: there `hook_resid_mid` is the normed embedding plus the "
        "mixer's output, not `hook_resid_pre` plus it.",
        "",
        "The shared transformer blocks of Zamba and Zamba2 read the embedding again beside the residual stream, so a "
        "run of theirs can't start at a later block, and a patched residual alone doesn't bring another run back.",
        "",
        "## What isn't there, and why",
        "",
        *reasons(),
        "",
        "## Families",
        "",
        "Tiny models of three blocks (Zamba2: four), each of which passes `verify` at every point.",
        "",
        *families(),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

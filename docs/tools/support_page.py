"""Writes docs/support.md, which method works on which architecture: ``python docs/tools/support_page.py [TABLE ...]``.

Every cell comes from calling the method on tiny models of the family (``support_calls``, ``support_inputs``). A test
calls them again and compares. Given the beginnings of titles, only these tables are made anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import probelens as pl
from probelens.hooks.model import HookedModel

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import support_calls
import support_inputs
import zoo
from support_calls import METHODS, Outcome

PAGE = Path(__file__).resolve().parents[1] / "support.md"

INTRO = """\
---
hide: [toc]
---

# What works where

<!-- Written by docs/tools/support_page.py, which calls every method on tiny models. Change the notes there, then run it. -->

Each cell is the outcome of calling the method on tiny models of the family, with random weights, on the CPU; a test calls
every third of them again and fails where this page says something else. What a call has to do to count as *works* is in
`docs/tools/support_calls.py`: an edit must change the output and be removed afterwards, an edit of a state must leave earlier
positions alone and change later ones, the patched last residual must be the other run's answer, and so on.

- **works**: on every model of the column, in the way that the method's page says.
- **works, resumed** / **from the block** / **whole runs**: this is how its many runs are made. Resumed runs begin at
  the first changed block *and* position, many in one pass; else they begin at the edited block; else each run is a whole
  one. The numbers are the same.
- **works without H, I**: these sites of [`patch_sites`](api/patching.md#sites-of-the-final-layer) don't exist in this architecture; its
  rows say why.
- **none**: the model's class has no such thing.
- **refused**: an error of this class, before anything is measured. The reasons are below each table.

`pl.dose_response` and `pl.length_transfer` are `pl.ablate` several times over, and work where it does. Which hook points
a family has is on the page [Hook points](hook-points.md); how compiled, adapted, offloaded and spread models behave,
on [a page of its own](compiled-adapted-spread.md).
"""


def _zoo(name: str) -> HookedModel:
    return pl.wrap(zoo.more(name))


def _bridge(name: str) -> HookedModel:
    import bridges

    return pl.wrap(bridges.bridge(name))


def _nnsight(name: str) -> HookedModel:
    from nnsight import NNsight

    return pl.wrap(NNsight(zoo.build(name)))


def _remote(name: str) -> HookedModel:
    """nnsight's own rehearsal of a remote model: the request is packed, unpacked elsewhere and run here."""
    import bridges
    from nnsight.modeling.transformers import TransformersModel

    with tempfile.TemporaryDirectory() as folder:
        words = bridges.tokenizer(Path(folder))
    return pl.wrap(TransformersModel(zoo.build(name), task="text-generation", tokenizer=words), remote="local")


def _even(name: str) -> HookedModel:
    """With as many blocks on either side: transformers generates with no other T5."""
    return pl.wrap(zoo.more(name, num_layers=zoo.LAYERS))


def _described(name: str) -> HookedModel:
    """Wrapped as any module is, by the paths of its parts alone."""
    parts = {
        "gpt2": {"blocks": "transformer.h", "embed": "transformer.wte", "ln_final": "transformer.ln_f", "unembed": "lm_head"},
        "lstm": {"blocks": "layers", "embed": "embed", "unembed": "head"},
    }  # fmt: skip
    return pl.wrap(zoo.build(name), "generic", **parts[name])


@dataclass(frozen=True)
class Family:
    """One column: how it is called, its models by name, and how each is wrapped."""

    title: str
    names: tuple[str, ...]
    make: Callable[[str], Any] = _zoo
    methods: Mapping[str, Callable[[Any], str]] = field(default_factory=lambda: METHODS)


_Other = partial(Family, methods=support_inputs.METHODS)
MIXED = tuple(n for n in zoo.HYBRIDS if n not in ("jamba", "zamba2", "falcon-mamba"))
TABLES: dict[str, tuple[str, tuple[Family, ...]]] = {
    "Transformers": (
        "Decoders of transformers. The last column is one tiny model of each of: {others}.",
        (
            Family("GPT-NeoX", ("neox", "neox-sequential")),
            Family("GPT-2", ("gpt2",)),
            Family("Llama", ("llama",)),
            Family("other decoders", ("gemma2", *zoo.DECODERS)),
        ),
    ),
    "Encoders and encoder–decoders": (
        "Encoders under a head for masked tokens, and encoder–decoders that are given tokens alone, which both sides read. "
        "The columns of the encoder–decoders are about the decoder; the points of the encoder take the same calls.",
        (
            Family("BERT and its like", ("bert", "roberta", "distilbert", "electra")),
            Family("ModernBERT", ("modernbert",)),
            Family("DeBERTa", ("deberta",)),
            Family("T5", ("t5", "t5-gated"), _even),
            Family("BART and Marian", ("bart-whole", "marian")),
        ),
    ),
    "State space models and hybrids": (
        "Mamba with FalconMamba; both block types of the mamba-ssm package, whose kernels its own torch references replace "
        "here. The last column: {mixed}.",
        (
            Family("Mamba", ("mamba", "falcon-mamba")),
            Family("Mamba-2", ("mamba2",)),
            Family("mamba-ssm", tuple(zoo.PACKAGED)),
            Family("Jamba", ("jamba",)),
            Family("Zamba2", ("zamba2",)),
            Family("other hybrids", MIXED),
        ),
    ),
    "Recurrent networks": (
        "Modules of your own with `nn.LSTM` or `nn.GRU` in them: one module a layer, several layers in one module (stacked), "
        "or reading in both directions.",
        (
            Family("LSTM", ("lstm",)),
            Family("GRU", ("gru",)),
            Family("stacked", ("lstm-fused", "gru-fused-time-first")),
            Family("bidirectional", ("lstm-bidirectional", "gru-bidirectional-fused")),
        ),
    ),
    "Inputs that are no tokens, and one answer for each example": (
        "Batches and pairs of what the forward takes. Classifiers: BERT, RoBERTa, DistilBERT, ModernBERT and Llama, on padded "
        "texts; vision: a ViT, and a module of your own over patches; encoder–decoders: T5, BART and Whisper, given the inputs of "
        "both sides. Modules of your own: an LSTM that reads a time series and gives one number; a tagger over tokens and "
        "a second stream, packed by lengths; a classifier of tokens and a picture, joined. Embeddings go into a GPT-2.",
        (
            _Other(
                "classifiers",
                ("bert-classifier", "roberta-classifier", "distilbert-classifier", "modernbert-classifier", "llama-classifier"),
                support_inputs.transformers,
            ),
            _Other("vision", ("vit",), support_inputs.transformers),
            _Other("own vision", ("pictures",), support_inputs.own),
            _Other("both sides of encoder–decoders", ("t5", "bart-whole", "whisper"), support_inputs.transformers),
            _Other("time series", ("series",), support_inputs.own),
            _Other("packed lengths", ("packed",), support_inputs.own),
            _Other("two streams", ("streams",), support_inputs.streams),
            _Other("embeddings", ("embeddings",), support_inputs.own),
        ),
    ),
    "Other libraries' wrappers, and any module": (
        "A `TransformerBridge` of GPT-2, Llama and Mamba (`HookedTransformer` is gone from TransformerLens 4); nnsight "
        "models of GPT-2, Mamba and an LSTM, run here; a GPT-2 of nnsight with `remote=`, in nnsight's own rehearsal of a "
        "remote run; and a GPT-2 and an LSTM wrapped by nothing but the paths of their parts, as any module can be.",
        (
            Family("TransformerLens bridge", ("gpt2", "llama", "mamba"), _bridge),
            Family("nnsight", ("gpt2", "mamba", "lstm"), _nnsight),
            Family("remote nnsight", ("gpt2",), _remote),
            Family("any module", ("gpt2", "lstm"), _described),
        ),
    ),
}  # fmt: skip
FAMILIES = {family.title: family for _, families in TABLES.values() for family in families}
Column = dict[str, dict[str, Outcome]]


def outcomes(family: Family) -> Column:
    """What came of every method, by method and model."""
    models = {name: family.make(name) for name in family.names}
    methods = family.methods
    return {method: {n: support_calls.tried(method, m, methods) for n, m in models.items()} for method in methods}


def said(outcome: Outcome) -> str:
    """An outcome in the words of a cell."""
    if outcome.how == "refused":
        return f"refused (`{outcome.error}`)"
    return outcome.text or outcome.how


def cell(found: dict[str, Outcome]) -> str:
    """What holds of most models of a family, and the names of the others."""
    groups: dict[str, list[str]] = {}
    for name, outcome in found.items():
        groups.setdefault(said(outcome), []).append(name)
    most, *rest = sorted(groups, key=lambda text: -len(groups[text]))
    return "; ".join([most, *(f"{text}: {', '.join(groups[text])}" for text in rest)])


def column(found: Column) -> list[str]:
    """The cells of a family, in the order of the methods."""
    return [cell(by_name) for by_name in found.values()]


def reasons(found: dict[str, Column]) -> list[str]:
    """Every refusal of a table in the words of its error, those of the same words together."""
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    for title, by_method in found.items():
        for method, by_name in by_method.items():
            for name, outcome in by_name.items():
                if outcome.how == "refused":
                    words = (method, plain(outcome.text))
                    told.setdefault(words, {}).setdefault(title, []).append(name)
    lines = []
    order = list(next(iter(found.values())))
    for method, text in sorted(told, key=lambda words: order.index(words[0])):
        where = [
            title if len(names) == len(FAMILIES[title].names) else f"{title} ({', '.join(names)})"
            for title, names in told[method, text].items()
        ]
        lines.append(f"- {method}, {'; '.join(where)}: “{text}”")
    return lines


def plain(text: str) -> str:
    """An error's words without what is true of one model alone."""
    text = re.split(r"\.? (?:Nearest|All names|Check that|Use patch)", text)[0]
    text = re.sub(r" \(an? \w+\)", "", text)
    text = re.sub(
        r"(this|in this) \w*(?:ForCausalLM|ForMaskedLM|ForConditionalGeneration|LMHeadModel|MTModel|Recurrent|Bridge)\b",
        r"\1 model",
        text,
    )
    return text.rstrip(".")


def table(methods: Iterable[str], columns: dict[str, list[str]]) -> list[str]:
    """The rows of one table."""
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for i, method in enumerate(methods):
        lines.append(f"| {method} | {' | '.join(cells[i] for cells in columns.values())} |")
    return lines


def page(columns: dict[str, list[str]], why: dict[str, list[str]]) -> str:
    """The whole page.

    Args:
        columns: Cells by family.
        why: Reasons by table.
    """
    lines = [INTRO]
    for title, (text, families) in TABLES.items():
        names = {"others": ", ".join(FAMILIES["other decoders"].names), "mixed": ", ".join(MIXED)}
        lines += [f"## {title}", "", text.format(**names), ""]
        lines += [
            *table(families[0].methods, {f.title: columns[f.title] for f in families}),
            "",
            "Refused:",
            "",
            *why[title],
            "",
        ]
    return "\n".join(lines)


def written(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The cells and the reasons of a page."""
    columns: dict[str, list[str]] = {}
    why: dict[str, list[str]] = {}
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        for i, family in enumerate(rows[0][1:], start=1):
            columns[family] = [row[i] for row in rows[1:]]
        why[title] = [line for line in lines if line.startswith("- ")]
    return columns, why


def main(chosen: Sequence[str]) -> None:
    """Call everything, or what these tables need, and write the page.

    Args:
        chosen: Beginnings of the titles of tables; the others stay as they are. All where there are none.
    """
    columns, why = written(PAGE.read_text(encoding="utf-8")) if chosen else ({}, {})
    for title, (_, families) in TABLES.items():
        if chosen and not title.startswith(tuple(chosen)):
            continue
        found = {family.title: outcomes(family) for family in families}
        columns |= {name: column(by_method) for name, by_method in found.items()}
        why[title] = reasons(found)
    PAGE.write_text(page(columns, why), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

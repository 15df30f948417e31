"""Numbers and lists in words, for sentences that say what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def percent(value: float | None) -> str:
    """A fraction of 1 in per cent: "98.4 %"."""
    return "unknown" if value is None or value != value else f"{100 * value:.1f} %"


def small(value: float) -> str:
    """A share that may be tiny, in per cent, to two digits: "39 %", "0.013 %", "under 0.001 %"."""
    return "under 0.001 %" if 0 <= value < 1e-5 else f"{float(f'{100 * value:.2g}'):g} %"


def points(value: float | None) -> str:
    """A difference of fractions in percentage points: "1 point", "69.3 points"."""
    text = hundredths(value)
    return text if text == "unknown" else f"{text} point" if text in ("1", "-1") else f"{text} points"


def hundredths(value: float | None) -> str:
    """A fraction times 100, to one digit: "69.3"."""
    # Adding zero turns −0.0 into 0.0.
    return "unknown" if value is None or value != value else f"{round(100 * value, 1) + 0.0:g}"


def valued(value: float | None) -> str:
    """A number of any unit, to three digits."""
    return "unknown" if value is None or value != value else f"{value:.3g}"


def fixed(value: float) -> str:
    """A number with two decimals, zero without a sign."""
    return f"{round(value, 2) + 0.0:.2f}"


def between(low: float | None, high: float | None, say: Callable[[float], str] = valued) -> str:
    """An interval: " [97.1, 99.2]", or nothing where there is none."""
    return "" if low is None or high is None or low != low or high != high else f" [{say(low)}, {say(high)}]"


def count(n: int, noun: str) -> str:
    """A count with its noun: "1 site", "3 sites"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def share(part: int, whole: int, noun: str) -> str:
    """Some of a count: "2 of 5 sites", "all 5 sites", "the one site"."""
    if part == whole:
        return f"the one {noun}" if whole == 1 else f"all {count(whole, noun)}"
    return f"{part} of {count(whole, noun)}"


def listed(words: Iterable[object], most: int = 6) -> str:
    """A list as a sentence has it: "a, b and c"; of long lists the first few and how many more."""
    found = [str(word) for word in words]
    if len(found) > most:
        return f"{', '.join(found[:most])} and {len(found) - most} more"
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def is_embedding(site: str) -> bool:
    """Whether a site of layer −1 is the embedding, or what enters block 0; other modules before the blocks are not."""
    return "." not in site or site.endswith("hook_embed") or site == "blocks.0.hook_resid_pre"


def place(row: Mapping[str, Any]) -> str:
    """Where a row was measured: "layer 3 (blocks.3.hook_resid_post)"; the final norm is no layer."""
    site, layer = str(row["site"]), row.get("layer")
    if layer is None or site.startswith(("ln_final.", "unembed.")):
        return site
    if layer == -1 and not is_embedding(site):
        return f"{site} (before the blocks)"
    return f"{layers([layer])} ({site})"


def positions(found: Iterable[str]) -> str:
    """Positions in words: "position 3", "positions 1 to 4 and 7", "all positions", "one position of each pair"."""
    named = {"all": "all positions", "per example": "one position of each pair", "last": "the last position of each"}
    labels = list(found)
    if labels and not labels[0].isdigit():
        return named.get(labels[0], f"the span {labels[0]!r}")
    spans: list[list[int]] = []
    for p in map(int, labels):
        if spans and p == spans[-1][-1] + 1:
            spans[-1].append(p)
        else:
            spans.append([p])
    said = listed((word for s in spans for word in ([f"{s[0]} to {s[-1]}"] if len(s) > 2 else s)), 8)
    return f"position{'s' if len(labels) > 1 else ''} {said}"


def layers(found: Sequence[int | None]) -> str:
    """Layers in words: "the embedding", "layer 3", "layers 0, 1 and 2"."""
    numbers = list(dict.fromkeys(layer for layer in found if layer is not None and layer >= 0))
    said = ["the embedding"] if -1 in found else []
    if numbers:
        said.append(f"layer{'s' if len(numbers) > 1 else ''} {listed(numbers, 12)}")
    return " and ".join(said)


def sites(rows: Iterable[Mapping[str, Any]], among: Iterable[Mapping[str, Any]]) -> str:
    """Where rows were measured, in words: their layers; those that share a layer among all the sites by their names."""
    by_layer: dict[Any, set[str]] = {}
    for row in among:
        by_layer.setdefault(row.get("layer"), set()).add(row["site"])
    found = list(dict.fromkeys((row.get("layer"), row["site"]) for row in rows))

    def is_layer(layer: int | None, site: str) -> bool:
        return layer is not None and len(by_layer[layer]) == 1 and (layer >= 0 or is_embedding(site))

    alone = [layer for layer, site in found if is_layer(layer, site)]
    named = [site for layer, site in found if not is_layer(layer, site)]
    return " and ".join(filter(None, [layers(alone), listed(named, 12)]))

"""From results to the table of the docs."""

from __future__ import annotations

from typing import Any

from probelens.bench.harness import OURS

HEAD = """# Benchmarks

How long probelens takes for the work that interpretability does all day, beside the usual way to do it. Every row runs
all contenders in one process, in turn, on the same weights and inputs, and compares what they return before it times
them. Times are medians of CPU time; a ratio above 1 means that probelens takes less.

```bash
pip install "probelens[transformer-lens,nnsight]" mambapy   # the peers; a row without its peer is left out
probelens bench                                             # small shapes, a few minutes
probelens bench --size medium --out b.json                  # real shapes where they fit into minutes
probelens bench --size full --out b.json                    # everything in full: hours on one core
probelens bench --only patch-neox                           # one row; --list names them
probelens bench --growth --out b.json                       # how cost grows with size
```

With `--out FILE` results are kept; a row that is run again replaces the one before, and `--page PAGE` writes this page
from them. `--device cuda` runs the models on a GPU and measures wall time, for a section of its own.
"""


def lines(row: dict[str, Any]) -> list[str]:
    """A row for the terminal: a line for each peer."""
    clock = _clock(row)
    ours = row["times"][OURS][clock]
    outcome = "" if not row["differences"] else "results equal" if row["equal"] else "RESULTS DIFFER"
    out = [f"{row['case']:<12} {row['size']:<7} {OURS} {_seconds(ours):>8}  {outcome}".rstrip()]
    for name, ratio in row["ratios"].items():
        out.append(f"{'':<21}{name} {_seconds(row['times'][name][clock])}, {_ratio(ratio)}")
    if not row["equal"]:
        over = {k: v for k, v in row["differences"].items() if not v <= row["limits"].get(k, float("inf"))}
        out += [f"{'':<21}{k}: {v:.2g}, allowed {row['limits'][k]:.2g}" for k, v in over.items()]
    return out


def growth_line(curve: dict[str, Any]) -> str:
    """A curve for the terminal."""
    grown = ", ".join(f"{name} k = {k:.2f}" for name, k in curve["exponents"].items())
    return f"{curve['what']} by {curve['axis']} {curve['sizes']}: {grown}"


def markdown(rows: list[dict[str, Any]], growth: list[dict[str, Any]] | None = None, figure: str | None = None) -> str:
    """The page; ``figure`` is where its plot of growth lies beside it."""
    out = [HEAD]
    for device in dict.fromkeys(r["device"] for r in rows):
        mine = [r for r in rows if r["device"] == device]
        out.append(f"## {'CPU' if device == 'cpu' else device}\n\n{_machine(mine)}\n")
        out.append("| work | size | probelens | against | its time | ratio | aim | results equal |")
        out.append("|---|---|---|---|---|---|---|---|")
        out += [line for row in mine for line in _lines(row)] + ["", *_notes(mine)]
    if growth:
        out += _growth(growth, figure)
    return "\n".join(out).rstrip() + "\n"


def _machine(rows: list[dict[str, Any]]) -> str:
    seen: dict[str, None] = {}
    for row in rows:
        m = row["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
        hardware = m["gpu"] if row["device"] != "cpu" else f"{m['cpu']}, {m['cores']} cores"
        seen[f"{hardware}, {m['threads']} thread(s), Python {m['python']}, {versions}."] = None
    return "Machine: " + " ".join(seen)


def _lines(row: dict[str, Any]) -> list[str]:
    lines = []
    clock = _clock(row)
    ours = row["times"][OURS]
    for i, (name, ratio) in enumerate(row["ratios"].items()):
        # The aims are for the real shapes.
        aim = row["aims"].get(name) if row["size"] != "quick" else None
        shown, wanted, met = _ratio(ratio), "", ""
        if aim is not None and aim > 0:
            wanted, met = f"≥ {aim:.3g}×", "" if ratio >= aim else " (missed)"
        elif name == "raw forward":
            shown = f"costs {1 / ratio:.2f}×"
        if aim is not None and aim < 0:
            shown = f"costs {1 / ratio:.2f}×"
            wanted, met = f"≤ {-aim:.3g}×", "" if 1 / ratio <= -aim else " (missed)"
        elif row["case"] == "import":
            shown = f"{ours[clock] - row['times'][name][clock]:+.2f} s"
            wanted, met = "≤ +0.4 s", "" if ours[clock] - row["times"][name][clock] <= 0.4 else " (missed)"
        first = [row["what"], row["size"], _seconds(ours[clock])] if i == 0 else ["", "", ""]
        equal = ("yes" if row["equal"] else "**no**") if i == 0 and row["differences"] else ""
        cells = [*first, name, _seconds(row["times"][name][clock]), shown + met, wanted, equal]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _clock(row: dict[str, Any]) -> str:
    return "cpu" if row["device"] == "cpu" else "wall"


def _ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    out = ["For each row: what it ran, the differences of the results, and other numbers.", ""]
    for row in rows:
        parts = [f"{row['repeats']} runs each"] + ([row["note"]] if row["note"] else [])
        for key, value in row["differences"].items():
            limit = row["limits"].get(key)
            parts.append(f"{key}: {value:.2g}" + ("" if limit is None else f" (allowed {limit:.2g})"))
        parts += [f"{key}: {_number(value)}" for key, value in row["facts"].items()]
        parts += _spread(row) + _bound(row)
        out.append(f"- `{row['case']}`: " + "; ".join(parts) + ".")
    return [*out, ""]


def _spread(row: dict[str, Any]) -> list[str]:
    """Whose runs took very different times, so that the median alone says little."""
    wide = {name: t for name, t in row["times"].items() if t.get("cpu_max", 0) > 1.5 * t.get("cpu_min", 0) > 0}
    return [f"{name}'s runs took {_seconds(t['cpu_min'])} to {_seconds(t['cpu_max'])}" for name, t in wide.items()]


def _bound(row: dict[str, Any]) -> list[str]:
    """What the operations and bytes that can't be left out allow at most, against each peer."""
    least = row.get("least")
    if not least:
        return []
    arithmetic, memory = least["gflop"] / least["gflops"], least["gbyte"] / least["gbytes"]
    clock = _clock(row)
    whole = arithmetic + memory
    most = ", ".join(f"{_ratio(row['times'][name][clock] / whole)} against {name}" for name in row["ratios"])
    return [
        f"bound: {least['what']}, {least['gflop']:.3g} GFLOP and {least['gbyte']:.3g} GB, take {_seconds(whole)} at the {least['gflops']:.0f} GFLOP/s and {least['gbytes']:.0f} GB/s of this "
        f"machine, so at most {most}"
    ]


def _growth(curves: list[dict[str, Any]], figure: str | None) -> list[str]:
    out = [
        "## How cost grows", "", "CPU seconds at each size, and the exponent k of a fit time ∝ size^k. Small shapes.", "",
        *([f"![CPU seconds against size, probelens and its peers, on logarithmic axes]({figure})", ""] if figure else []),
        "| work | size | sizes | probelens | k | peer | its times | its k |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for c in curves:
        peer = next(n for n in c["times"] if n != OURS)
        ours, theirs = ([", ".join(map(_seconds, c["times"][n])), f"{c['exponents'][n]:.2f}"] for n in (OURS, peer))
        cells = [c["what"], c["axis"], ", ".join(map(str, c["sizes"])), *ours, peer, *theirs]
        out.append("| " + " | ".join(cells) + " |")
    return [*out, ""]

"""How cost grows with size, ours beside the peer's, as fitted exponents and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import OURS, PEERS, TL, cpu_seconds, installed
from probelens.bench.sweeps import pairs_of, tl_patching

Runs = dict[str, tuple[Callable[[], Any], float]]


def _patching(layers: int, length: int) -> Runs:
    import pandas as pd

    module = shapes.neox(layers, 128, 512, 4)
    model, other, pairs = pl.wrap(module), shapes.bridge(module), pairs_of(512, 4, length)
    cells = [(layer, p) for layer in range(layers) for p in range(length)]
    some = cells[:: max(1, len(cells) // 16)]
    table = pd.DataFrame(some, columns=["layer", "pos"])
    return {
        OURS: (lambda: pl.patch(model, pairs, "resid_pre"), 1.0),
        TL: (lambda: tl_patching(other, pairs, table), len(some) / len(cells)),
    }


def _probing(rows: int, width: int) -> Runs:
    from sklearn.linear_model import LogisticRegression

    from probelens.probing.solvers.logistic import fit_path

    x = shapes.spectrum(rows, width)
    y = shapes.readable(x, 11, 0.5)
    Cs = (1e-2, 1.0, 1e2)

    def loop() -> None:
        for C in Cs:
            LogisticRegression(C=C, max_iter=2000).fit(x.numpy(), y.numpy())

    return {OURS: (lambda: fit_path(x, y, Cs, tol=1e-3), 1.0), "scikit-learn": (loop, 1.0)}


def _collecting(examples: int) -> Runs:
    import torch

    module = shapes.neox(6, 128, 256, 4)
    model, x = pl.wrap(module), shapes.tokens(256, examples, 32)

    def raw() -> None:
        with torch.no_grad():
            for chunk in x.split(64):
                module(chunk, use_cache=False)

    return {OURS: (lambda: pl.collect(model, x), 1.0), "raw forward": (raw, 1.0)}


COLOURS = {OURS: "#0072B2", TL: "#D55E00", "scikit-learn": "#009E73", "raw forward": "#555555"}
TICKS = [m * 10**k for k in range(-2, 3) for m in (1, 2, 5)]
CURVES: list[tuple[str, str, list[int], Callable[[int], Runs], tuple[str, ...]]] = [
    ("patching sweep, 6 layers", "positions", [16, 32, 64, 128], lambda n: _patching(6, n), (TL,)),
    ("patching sweep, 16 positions", "layers", [4, 8, 16, 24], lambda n: _patching(n, 16), (TL,)),
    ("probes, width 128", "rows", [1000, 2000, 4000, 8000], lambda n: _probing(n, 128), ()),
    ("probes, 4,000 rows", "width", [64, 128, 256, 512], lambda n: _probing(4000, n), ()),
    ("collection", "sequences of 32", [128, 256, 512, 1024], _collecting, ()),
]

REPEATS = 3


def missing() -> list[str]:
    """The curves that are left out here, and which package to install for each."""
    return [
        f"the curve {what!r} by {axis} is left out: {PEERS[peer][1]}"
        for what, axis, _, _, needs in CURVES for peer in needs if not installed(peer)
    ]  # fmt: skip


def curves() -> Iterator[dict[str, Any]]:
    """Medians of CPU time at every size, and the slope in log-log; one curve after the other."""
    for what, axis, sizes, build, needs in CURVES:
        if not all(installed(peer) for peer in needs):
            continue
        times: dict[str, list[float]] = {}
        for size in sizes:
            runs = build(size)
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(1 + REPEATS):
                for name, (run, part) in runs.items():
                    start = cpu_seconds()
                    run()
                    taken[name].append((cpu_seconds() - start) / part)
            for name in runs:
                times.setdefault(name, []).append(statistics.median(taken[name][1:]))
        slopes = {n: float(np.polyfit(np.log(sizes), np.log(t), 1)[0]) for n, t in times.items()}
        yield {"what": what, "axis": axis, "sizes": sizes, "times": times, "exponents": slopes}


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per curve: an HTML file, or a picture by the path's suffix, which takes kaleido and a Chrome."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    columns = 3
    titles = []
    for c in found:
        theirs = ", ".join(f"{name} {k:.2f}" for name, k in c["exponents"].items() if name != OURS)
        titles.append(f"{c['what']}<br>k = {c['exponents'][OURS]:.2f}, {theirs}")
    figure = make_subplots(rows=-(-len(found) // columns), cols=columns, subplot_titles=titles, vertical_spacing=0.25)
    shown = set()
    for i, c in enumerate(found):
        at = {"row": i // columns + 1, "col": i % columns + 1}
        for name, times in c["times"].items():
            line = {"color": COLOURS[name], "dash": "solid" if name == OURS else "dot"}
            figure.add_trace(
                go.Scatter(
                    x=c["sizes"], y=times, name=name, mode="lines+markers", line=line, legendgroup=name,
                    showlegend=name not in shown,
                ),
                **at,
            )  # fmt: skip
            shown.add(name)
        figure.update_xaxes(type="log", title=c["axis"], tickvals=c["sizes"], ticktext=c["sizes"], **at)
        figure.update_yaxes(
            type="log", title="CPU seconds" if i % columns == 0 else None, tickvals=TICKS, ticktext=TICKS, **at
        )
    figure.update_annotations(font_size=12)
    figure.update_layout(
        template="plotly_white", width=960, height=620, margin={"t": 70, "b": 60},
        legend={"orientation": "h", "y": -0.12},
    )  # fmt: skip
    if path.suffix == ".html":
        figure.write_html(path, include_plotlyjs=True)
    else:
        figure.write_image(path)

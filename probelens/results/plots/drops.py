"""The ablation figure: what removing a subspace costs, its random controls, and the refitted probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from probelens.results.plots import style
from probelens.results.plots.style import PALETTE, escape

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.results.plots.style import Rows

CONDITIONS = {
    "target": "the subspace",
    "random": "random, equal rank",
    "random_matched": "random, equal variance",
    "pca": "top principal components",
    "orthogonal_pca": "top components orthogonal to it",
    "leace": "LEACE",
    "inlp": "INLP",
}
KEPT = (
    "layer", "site", "condition", "draw", "rank", "drop", "lo", "hi", "probe_accuracy", "refit_accuracy",
    "refit_mlp_accuracy", "baseline", "verdict",
)  # fmt: skip


def ablation(data: Rows, *, metric: str = "accuracy", percent: bool = True, title: str | None = None) -> go.Figure:
    """What ablating a subspace costs at each layer, and whether a refitted probe still reads the label.

    The upper panel has a line for each ablated subspace and a band with points for its random controls: only a drop
    outside the band belongs to the subspace. The lower panel has the probe's accuracy before ablation, the accuracy of
    a probe refitted on the ablated activations, and the baseline: a refitted probe above the baseline means that the
    label can still be read, so the drop says nothing about necessity either way.

    Args:
        data: Rows of ONE model and ONE label. Columns:

            * ``layer``: an int; -1 is the embedding.
            * ``condition``: what was ablated: ``"target"`` (the subspace asked for), ``"pca"``, ``"leace"``, ``"inlp"``, or
              any other name; those whose name starts with ``"random"`` are controls, drawn as bands.
            * ``drop``: the metric without ablation minus with it, a fraction of 1 if ``percent`` (shown in percentage
              points); positive when ablation hurts.
            * ``lo``, ``hi`` (optional): the bounds of its interval.
            * ``probe_accuracy``, ``refit_accuracy``, ``baseline`` (optional, together they make the lower panel), on
              the rows of subspaces that aren't controls: accuracy of the probe on the untouched activations, of a new
              probe trained on the ablated ones, and of the best baseline; ``refit_mlp_accuracy``, drawn dotted where
              there is one. Fractions of 1.
            * ``site``, ``verdict`` (optional): the hook point; what the refit says, for the hover text.

            A control has one row per layer and draw; a subspace, or a control given as an interval, has one per layer.
        metric: What dropped, for the axis title.
        percent: The drop is a fraction of 1, shown in percentage points. False: shown in the unit that ``metric``
            names.
        title: Shown above the figure.

    Returns:
        The figure.

    Raises:
        InputError: No rows, a missing column, text where a number belongs, or two rows of a subspace at one layer.

    Units:
        Drops and accuracies in fractions of 1.

    Source:
        Random controls and the refit: arXiv 2606.00926 v2.

    Examples:
        >>> rows = [{"layer": 0, "condition": "target", "drop": 0.4}]
        >>> rows += [{"layer": 0, "condition": "random", "drop": d} for d in (0.0, 0.02, 0.01)]
        >>> [trace.name for trace in ablation(rows).data if trace.showlegend]
        ['the subspace', 'random, equal rank (3 draws)']
    """
    who = "ablation"
    df = style.ordered(style.frame(data, ["layer", "drop", "condition"], who), "layer", who)
    parts = {name: (CONDITIONS.get(name, name), part) for name, part in style.groups(df, "condition")}
    bands = {name for name in parts if name.startswith("random")}
    subspaces = [entry for name, entry in parts.items() if name not in bands]
    for _, part in subspaces:
        style.unique(part, ["layer"], who, "Give one model and one label, and average over seeds.")
    refitted = [s for s in subspaces if any(v is not None for v in style.numbers(s[1], "refit_accuracy", who))]
    # The lower panel has a legend of its own, which needs a line for each entry on a phone.
    entries = 2 + len(refitted) * (2 if "refit_mlp_accuracy" in df.columns else 1)
    fig = style.panels([250, 230] if refitted else [320], title=title, gap=20 * entries + 22)
    cost = _Cost(fig, f"{metric} drop", percent, style.layer_names(df, "layer", who))
    said = [cost.subspace(label, part, i) for i, (label, part) in enumerate(subspaces)]
    said += [cost.control(*parts[name], i) for i, name in enumerate(n for n in parts if n in bands)]
    if refitted:
        said += _refits(fig, refitted, cost.places)
    fig.add_hline(y=0, line={"color": style.GREY, "width": 1}, row=1, col=1)
    fig.update_yaxes(title_text=f"{escape(metric)} drop" + (" (pp)" if percent else ""), row=1)
    fig.update_xaxes(**style.layer_ticks(cost.places))
    fig.update_xaxes(title_text="ablated layer (residual after block)", row=2 if refitted else 1)
    return style.finish(fig, "Ablation by layer. " + ". ".join(said) + ".", df, KEPT)


class _Cost(NamedTuple):
    """The upper panel: what each ablation costs."""

    fig: go.Figure
    what: str
    percent: bool
    places: Mapping[float, str]

    def read(self, part: pd.DataFrame, column: str) -> list[float | None]:
        """A column in percentage points, or in its own unit."""
        values = style.numbers(part, column, "ablation")
        return [None if v is None else 100 * v for v in values] if self.percent else values

    def line(self, part: pd.DataFrame, name: str, y: Any, lo: Any, hi: Any, **look: Any) -> str:
        say = "{:.1f} pp".format if self.percent else "{:.4g}".format
        x = list(dict.fromkeys(style.defined(part, "layer", "ablation")))
        look |= {"lo": lo, "hi": hi, "name": name, "places": self.places}
        return style.add_line(self.fig, x, y, where="layer", say=say, **look)

    def subspace(self, label: str, part: pd.DataFrame, index: int) -> str:
        """A line with its interval."""
        value, lo, hi = (self.read(part, column) for column in ("drop", "lo", "hi"))
        color, marker = PALETTE[index % len(PALETTE)], style.MARKERS[index % len(style.MARKERS)]
        return self.line(part, label, value, lo, hi, what=self.what, color=color, marker=marker)

    def control(self, label: str, part: pd.DataFrame, index: int) -> str:
        """The mean of a control's draws, with a band over their range and a point for each."""
        part = part[[v is not None for v in self.read(part, "drop")]]
        layers = style.defined(part, "layer", "ablation")
        by_layer = [part[[other == at for other in layers]] for at in dict.fromkeys(layers)]
        draws = [[v for v in self.read(rows, "drop") if v is not None] for rows in by_layer]
        most = max(map(len, draws), default=0)
        lo: list[float | None] = [min(d) for d in draws]
        hi: list[float | None] = [max(d) for d in draws]
        if most > 1:
            label = f"{label} ({most} draws)"
        else:
            lo, hi = ([self.read(rows, column)[0] for rows in by_layer] for column in ("lo", "hi"))
        color = style.GREY if index == 0 else PALETTE[(3 + index) % len(PALETTE)]
        mean = [sum(d) / len(d) for d in draws]
        said = self.line(part, label, mean, lo, hi, what=f"mean {self.what}", color=color, dash="dot")
        if most > 1:
            points = {"mode": "markers", "marker": {"color": style.rgba(color, 0.55), "size": 4}}
            quiet = {"hoverinfo": "skip", "showlegend": False, "legendgroup": label}
            self.fig.add_scatter(x=layers, y=self.read(part, "drop"), row=1, col=1, **points, **quiet)
        return said


def _refits(fig: go.Figure, refitted: list[tuple[str, pd.DataFrame]], places: Mapping[float, str]) -> list[str]:
    """The lower panel: the probe before, the refitted probes, the baseline."""

    def line(part: pd.DataFrame, column: str, name: str, **look: Any) -> list[str]:
        y = style.numbers(part, column, "ablation")
        if all(v is None for v in y):
            return []
        at = style.defined(part, "layer", "ablation")
        look |= {"name": name, "what": "accuracy", "row": 2, "legend": "legend2"}
        return [style.add_line(fig, at, y, where="layer", say=style.percent, places=places, **look)]

    first = refitted[0][1]
    said = line(first, "probe_accuracy", "probe before ablation", color=PALETTE[2], marker="diamond")
    for i, (label, part) in enumerate(refitted):
        alone = len(refitted) == 1
        about = "after ablation" if alone else f"after {label}"
        look = {"color": PALETTE[3 if alone else i % len(PALETTE)], "notes": _verdicts(part)}
        marker = "triangle-up" if alone else style.MARKERS[i % len(style.MARKERS)]
        said += line(part, "refit_accuracy", f"probe refitted {about}", marker=marker, **look)
        said += line(part, "refit_mlp_accuracy", f"MLP refitted {about}", dash="dot", **look)
    said += line(first, "baseline", "baseline", color=style.GREY, dash="dash")
    top = fig.layout.yaxis2.domain[1] + 8 / fig.layout.height
    fig.update_layout(legend2=style.legend_at(top))
    fig.update_yaxes(title_text="probe accuracy (%)", tickformat=".0%", range=[0, 1.03], row=2)
    return said


def _verdicts(part: pd.DataFrame) -> list[str]:
    """What the refit says at each layer, for the hover text."""
    after, base = (style.numbers(part, column, "ablation") for column in ("refit_accuracy", "baseline"))
    verdicts = part["verdict"].tolist() if "verdict" in part.columns else [None] * len(part)
    notes = []
    for v, b, verdict in zip(after, base, verdicts):
        above = [] if v is None or b is None else [f"probe {100 * (v - b):+.1f} pp against the baseline"]
        notes.append("; ".join(above + ([f"verdict: {verdict}"] if isinstance(verdict, str) else [])))
    return notes

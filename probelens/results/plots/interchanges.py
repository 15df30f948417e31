"""Interchange accuracy by layer beside its controls, or by layer and position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probelens.results.plots.lines import layer_profile
from probelens.results.plots.patching import patch_heatmap
from probelens.results.plots.style import frame

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAMES = {
    "target": "the subspace", "full": "everything", "complement": "everything but it", "random": "random, equal rank",
    "random_matched": "random, equal variance", "orthogonal_pca": "components orthogonal to it",
}  # fmt: skip


def interchange(data: Any, *, title: str | None = None) -> go.Figure:
    """Share of pairs whose answer follows what was taken from the other run.

    Args:
        data: Rows of an ``InterchangeResult``: site, layer, pos, condition, iia, iia_lo, iia_hi.
        title: Shown above the figure.

    Returns:
        With one position a line by layer for each condition, means over draws; with several the subspace's accuracy
        by layer and position.

    Raises:
        InputError: No rows, or a missing column.
    """
    table = frame(data, ("site", "layer", "pos", "condition", "iia", "iia_lo", "iia_hi"), "interchange()")
    targets = table[table["condition"] == "target"]
    if targets["pos"].nunique() > 1:
        grid = targets.pivot(index="site", columns="pos", values="iia").loc[targets["site"].drop_duplicates()]
        order = sorted(grid.columns, key=int)
        return patch_heatmap(grid[order].to_numpy(float), list(grid.index), [int(p) for p in order], title=title)
    shown = table[table["condition"].isin(list(_NAMES))]
    lines = shown.groupby(["condition", "layer"], sort=False)[["iia", "iia_lo", "iia_hi"]].mean().reset_index()
    lines = lines.rename(columns={"iia_lo": "lo", "iia_hi": "hi"})
    lines.loc[~lines["condition"].isin(["target", "full", "complement"]), ["lo", "hi"]] = float("nan")
    lines["condition"] = lines["condition"].map(_NAMES)
    return layer_profile(lines, y="iia", color="condition", y_label="answers that follow", title=title)

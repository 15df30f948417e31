"""The figures of this library: each takes tidy rows and returns a plotly figure.

Rows are a DataFrame, a list of dicts, or a result with ``to_dataframe()``. One row is one point. Accuracies are
fractions of 1 and are shown in per cent. The figures have transparent backgrounds, colours that stay apart under
colour blindness, and text that can be read on light and dark; ``figure.update_layout(template=template("dark"))``
switches a theme. Each figure keeps its rows and a text alternative in ``figure.layout.meta``, from which the report
makes the CSV and the description that a screen reader speaks.
"""

from __future__ import annotations

from probelens.results.plots.drops import ablation
from probelens.results.plots.interchanges import interchange
from probelens.results.plots.lines import layer_profile, length_curve, training_curve
from probelens.results.plots.patching import patch_heatmap, site_name
from probelens.results.plots.style import PALETTE, escape, template

__all__ = [
    "PALETTE",
    "ablation",
    "escape",
    "interchange",
    "layer_profile",
    "length_curve",
    "patch_heatmap",
    "site_name",
    "template",
    "training_curve",
]

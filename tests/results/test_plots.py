"""The figures: they show the rows they are given, on any page, to any eye, and show names as text."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import probelens as pl
from probelens import plots
from probelens.errors import InputError, ShapeError
from probelens.results.plots import style
from probelens.results.result import Result

HOSTILE = [
    '<img src=x onerror="alert(1)">',
    "<a href='https://example.org'>go</a>",
    '<span style="background:url(https://example.org/x)">x</span>',
    "<b>bold</b>",
    "</script><script>alert(1)</script>",
    "%{y} $x^2$ &lt;i&gt;",
    "line\none\u2028two",
    "",
]
LAYERS = [-1, 0, 1, 2, 3]


def profile_rows() -> list[dict[str, Any]]:
    rows = []
    for model, top in (("LSTM", 0.9), ("Transformer", 0.95)):
        for label in ("depth", "top"):
            for i, layer in enumerate(LAYERS):
                value = 0.3 + (top - 0.3) * i / 4
                rows.append(
                    {"model": model, "label": label, "layer": layer, "accuracy": value, "lo": value - 0.02,
                     "hi": value + 0.01, "majority": 0.2, "untrained": 0.3 + i / 100 + (model == "LSTM") / 50}
                )  # fmt: skip
    return rows


def ablation_rows(draws: int = 20, refit: bool = True) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for i, layer in enumerate(LAYERS):
        drop = 0.1 * i
        row = {"layer": layer, "condition": "target", "drop": drop, "lo": drop - 0.02, "hi": drop + 0.03}
        if refit:
            row |= {"probe_accuracy": 0.9, "refit_accuracy": 0.6, "baseline": 0.4, "verdict": "inconclusive"}
        rows.append(row)
        rows += [{"layer": layer, "condition": "random", "draw": d, "drop": rng.normal(0, 0.01)} for d in range(draws)]
    return rows


def named(fig: go.Figure, name: str) -> Any:
    found = [trace for trace in fig.data if trace.name == name and trace.mode != "markers"]
    assert found, f"{name!r} is not among {[trace.name for trace in fig.data]}"
    return found[0]


def bands(fig: go.Figure, group: str) -> list[Any]:
    return [trace for trace in fig.data if trace.fill == "toself" and trace.legendgroup == group]


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in strings(v)]
    return [s for v in value for s in strings(v)] if isinstance(value, (list, tuple)) else []


# Colour: checked against the WCAG contrast formula and Machado, Oliveira and Fernandes 2009 (severity 1).

SIGHT = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(color: str) -> np.ndarray:
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    high, low = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def distance(a: str, b: str, sight: np.ndarray) -> float:
    def lab(rgb: np.ndarray) -> np.ndarray:
        to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
        xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.0888])
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    return float(np.linalg.norm(lab(sight @ linear(a)) - lab(sight @ linear(b))))


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize("color", [*plots.PALETTE, style.GREY])
def test_every_line_stands_out_from_both_pages(color: str, page: str) -> None:
    assert contrast(color, style.PAGE[page]) >= 3


def test_series_stay_apart_under_each_colour_blindness() -> None:
    for name, sight in SIGHT.items():
        near = min(itertools.combinations(plots.PALETTE, 2), key=lambda pair: distance(*pair, sight))
        assert distance(*near, sight) >= 15, (name, near)


def test_the_colour_measures_notice_bad_colours() -> None:
    assert contrast("#ffee88", style.PAGE["light"]) < 3
    assert distance("#c04040", "#808000", SIGHT["normal"]) > 40
    assert distance("#b05a00", "#8a7a00", SIGHT["protan"]) < 15


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_each_theme(theme: str) -> None:
    template = plots.template(theme)
    assert contrast(template.layout.font.color, style.PAGE[theme]) >= 7
    for either in style.PAGE.values():
        assert contrast(plots.template().layout.font.color, either) >= 4


def test_backgrounds_are_transparent_and_global_templates_untouched() -> None:
    before = pio.templates.default, sorted(pio.templates)
    fig = plots.layer_profile(profile_rows(), color="model", facet="label")
    assert fig.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert fig.layout.template.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert (pio.templates.default, sorted(pio.templates)) == before


def test_unknown_theme_is_refused() -> None:
    with pytest.raises(InputError, match=r"'sepia'.*'auto', 'light', 'dark'"):
        plots.template("sepia")  # type: ignore[arg-type]


# Profiles


def test_profile_shows_the_values_and_their_intervals() -> None:
    rows = [r for r in profile_rows() if r["label"] == "depth"]
    fig = plots.layer_profile(rows, color="model")
    for model in ("LSTM", "Transformer"):
        mine = [r for r in rows if r["model"] == model]
        line = named(fig, model)
        assert list(line.x) == LAYERS
        assert list(line.y) == [r["accuracy"] for r in mine]
        (band,) = bands(fig, model)
        assert list(band.y) == [r["hi"] for r in mine] + [r["lo"] for r in mine][::-1]
        assert "90.0 % [88.0 %, 91.0 %]" in named(fig, "LSTM").hovertext[-1]


def test_embedding_is_named_and_the_axis_has_units() -> None:
    fig = plots.layer_profile(profile_rows(), color="model", facet="label")
    assert fig.layout.xaxis2.ticktext == ("embed", "0", "1", "2", "3")
    assert fig.layout.xaxis2.title.text == "layer (residual stream after block)"
    assert fig.layout.yaxis.title.text == "probe accuracy (%)"
    assert "layer embed" in named(fig, "LSTM").hovertext[0]


def test_final_norm_is_named_where_the_site_says_so() -> None:
    rows = [{"layer": at, "accuracy": 0.5, "site": f"blocks.{at}.hook_resid_post"} for at in (0, 1)]
    assert plots.layer_profile(rows).layout.xaxis.ticktext == ("0", "1")
    rows.append({"layer": 2, "accuracy": 0.5, "site": "ln_final.hook_out"})
    assert plots.layer_profile(rows).layout.xaxis.ticktext == ("0", "1", "norm")


@pytest.mark.parametrize("n", [2, 12, 24, 47])
def test_deep_models_have_few_ticks_and_always_the_ends(n: int) -> None:
    fig = plots.layer_profile([{"layer": at, "accuracy": 0.5} for at in range(-1, n)])
    assert len(fig.layout.xaxis.tickvals) <= 15
    assert (fig.layout.xaxis.tickvals[0], fig.layout.xaxis.tickvals[-1]) == (-1, n - 1)


def test_baselines_are_one_dashed_line_where_constant_and_one_per_series_where_not() -> None:
    rows = [r for r in profile_rows() if r["label"] == "depth"]
    fig = plots.layer_profile(rows, color="model")
    majority = [t for t in fig.data if t.name and "majority" in t.name]
    assert [(list(t.y), t.line.color) for t in majority] == [([0.2] * 5, style.GREY)]
    untrained = {t.name: t for t in fig.data if t.name and "untrained" in t.name}
    assert list(untrained) == ["untrained model, LSTM", "untrained model, Transformer"]
    assert all(t.line.dash != "solid" for t in [*majority, *untrained.values()])
    assert untrained["untrained model, LSTM"].line.color == named(fig, "LSTM").line.color
    none = plots.layer_profile(rows, color="model", baselines={})
    assert not [t for t in none.data if t.name and "untrained" in t.name]


def test_a_probe_result_is_drawn_beside_its_embedding() -> None:
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(2, (60, 4), generator=gen)
    noise = torch.randn(60, 4, 6, generator=gen)
    told = noise + 6.0 * y[..., None] * torch.eye(6)[0]
    sites = {"hook_embed": noise, "blocks.0.hook_resid_post": told, "blocks.1.hook_resid_post": told}
    layers = {name: at for at, name in enumerate(sites, start=-1)}
    found = pl.probe(pl.Activations(sites, layers=layers), y)
    fig = found.plot()
    first = found.row("hook_embed")["accuracy"]
    assert first < 0.7 < 0.9 < found.row("blocks.0.hook_resid_post")["accuracy"]
    assert list(named(fig, "embedding").y) == [pytest.approx(first)] * 3
    assert named(fig, "embedding").line.dash != "solid"
    inside = {name: x for name, x in sites.items() if name != "hook_embed"}
    without = pl.probe(pl.Activations(inside, layers=layers), y).plot()
    assert not [t for t in without.data if t.name == "embedding"]


def test_panels_share_one_legend_entry_per_name() -> None:
    fig = plots.layer_profile(profile_rows(), color="model", facet="label")
    shown = [t.name for t in fig.data if t.showlegend]
    assert len(shown) == len(set(shown))
    assert {"LSTM", "Transformer", "majority class"} <= set(shown)
    assert [a.text for a in fig.layout.annotations] == ["label: depth", "label: top"]


def test_order_of_the_rows_does_not_matter() -> None:
    rows = [r for r in profile_rows() if r["label"] == "depth" and r["model"] == "LSTM"]
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    assert shuffled != rows
    a, b = (plots.layer_profile(r) for r in (rows, shuffled))
    assert [(t.name, t.x, t.y, t.hovertext) for t in a.data] == [(t.name, t.x, t.y, t.hovertext) for t in b.data]


def test_missing_values_leave_a_gap_in_line_and_band() -> None:
    rows = [r for r in profile_rows() if r["label"] == "depth" and r["model"] == "LSTM"]
    rows[2] = {**rows[2], "accuracy": float("nan"), "lo": None, "hi": None}
    fig = plots.layer_profile(rows)
    line = named(fig, "probe accuracy")
    assert line.y[2] is None
    assert line.connectgaps is False
    assert "not measured" in line.hovertext[2]
    assert [len(band.x) for band in bands(fig, "probe accuracy")] == [4, 4]


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf"), pd.NA, np.float32("nan")])
def test_every_kind_of_missing_value_is_a_gap(missing: Any) -> None:
    rows = [{"layer": 0, "accuracy": 0.5}, {"layer": 1, "accuracy": missing}]
    for data in (rows, pd.DataFrame(rows), pd.DataFrame(rows).convert_dtypes()):
        assert named(plots.layer_profile(data), "probe accuracy").y == (0.5, None)


def test_frames_lists_and_results_give_the_same_figure() -> None:
    @dataclass(frozen=True)
    class Some(Result):
        rows: list[dict[str, Any]]

        def to_dataframe(self) -> pd.DataFrame:
            return pd.DataFrame(self.rows)

    rows = profile_rows()
    figs = [plots.layer_profile(r, color="model", facet="label") for r in (rows, pd.DataFrame(rows), Some(rows))]
    assert figs[0] == figs[1] == figs[2]
    assert figs[0] != plots.layer_profile(rows[:10], color="model", facet="label")


def test_length_curve_marks_the_training_length_in_each_panel() -> None:
    rows = [{"length": n, "accuracy": 0.9, "task": t} for t in ("parity", "dyck") for n in (40, 80)]
    fig = plots.length_curve(rows, facet="task", train_length=40)
    assert [shape.x0 for shape in fig.layout.shapes] == [40, 40]
    assert fig.layout.xaxis2.title.text == "sequence length (tokens)"
    assert not plots.length_curve(rows, facet="task").layout.shapes


def test_training_curve_has_a_panel_per_quantity_with_its_unit() -> None:
    rows = [{"step": s, "loss": 1 / s, "accuracy": 0.5 if s > 1 else None, "model": "GRU"} for s in (1, 10, 100)]
    fig = plots.training_curve(rows, color="model", target=0.99)
    assert (fig.layout.yaxis.title.text, fig.layout.yaxis2.title.text) == ("loss (nats)", "accuracy (%)")
    assert [list(t.x) for t in fig.data] == [[1, 10, 100], [10, 100]]
    assert [shape.y0 for shape in fig.layout.shapes] == [0.99]


# Ablation


def test_ablation_shows_drops_in_points_beside_the_range_of_all_draws() -> None:
    rows = ablation_rows()
    fig = plots.ablation(rows)
    target = [r for r in rows if r["condition"] == "target"]
    assert list(named(fig, "the subspace").y) == pytest.approx([100 * r["drop"] for r in target])
    control = "random, equal rank (20 draws)"
    (band,) = bands(fig, control)
    for i, layer in enumerate(LAYERS):
        draws = [100 * r["drop"] for r in rows if r["condition"] == "random" and r["layer"] == layer]
        assert (band.y[i], band.y[-1 - i]) == pytest.approx((max(draws), min(draws)))
        assert named(fig, control).y[i] == pytest.approx(np.mean(draws))
    (points,) = [t for t in fig.data if t.mode == "markers"]
    assert len(points.y) == 100
    assert fig.layout.yaxis.title.text == "accuracy drop (pp)"


def test_refitted_probe_stands_beside_the_probe_before_and_the_baseline() -> None:
    fig = plots.ablation(ablation_rows())
    for name, value in (("probe before ablation", 0.9), ("probe refitted after ablation", 0.6), ("baseline", 0.4)):
        assert list(named(fig, name).y) == [value] * 5
        assert named(fig, name).yaxis == "y2"
        assert named(fig, name).legend == "legend2"
    hover = named(fig, "probe refitted after ablation").hovertext[0]
    assert "+20.0 pp against the baseline" in hover
    assert "verdict: inconclusive" in hover
    nothing = {"verdict": "absent", "refit_accuracy": 0.4, "probe_accuracy": 0.4}
    gone = [{**row, **nothing} for row in ablation_rows()]
    shown = named(plots.ablation(gone), "probe refitted after ablation").hovertext[0]
    assert "+0.0 pp against the baseline; verdict: absent" in shown
    assert fig.layout.xaxis.matches == "x2"
    without = plots.ablation(ablation_rows(refit=False))
    assert "yaxis2" not in without.layout
    assert not [t for t in without.data if t.name and "refit" in t.name]


def test_an_mlp_refit_is_drawn_only_where_there_is_one() -> None:
    rows = ablation_rows()
    assert not [t for t in plots.ablation(rows).data if t.name and "MLP" in t.name]
    for row in rows:
        row["refit_mlp_accuracy"] = 0.7 if row["condition"] == "target" else None
    assert list(named(plots.ablation(rows), "MLP refitted after ablation").y) == [0.7] * 5


def test_controls_as_intervals_and_other_units() -> None:
    rows = [{"layer": at, "condition": "target", "drop": 0.5} for at in LAYERS]
    rows += [{"layer": at, "condition": "random", "drop": 0.1, "lo": 0.0, "hi": 0.2} for at in LAYERS]
    fig = plots.ablation(rows, metric="loss (nats)", percent=False)
    (band,) = bands(fig, "random, equal rank")
    assert list(band.y) == [0.2] * 5 + [0.0] * 5
    assert list(named(fig, "the subspace").y) == [0.5] * 5
    assert fig.layout.yaxis.title.text == "loss (nats) drop"


def test_two_models_in_one_ablation_are_refused() -> None:
    rows = ablation_rows() + ablation_rows()
    with pytest.raises(InputError, match=r"10 rows that share a point \(layer=-1\).*one model and one label"):
        plots.ablation(rows)


# Patching


def test_map_is_centred_at_the_corrupted_run_and_names_the_clean_one() -> None:
    values = torch.tensor([[0.0, 0.5, -0.2], [float("nan"), 1.0, 0.1]])
    fig = plots.patch_heatmap(values, ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"], [0, 1, 2])
    axis = fig.layout.coloraxis
    assert (axis.cmid, axis.cmin, axis.cmax) == (0, -1, 1)
    assert dict(zip(axis.colorbar.tickvals, axis.colorbar.ticktext))[1] == "1 clean run"
    assert dict(zip(axis.colorbar.tickvals, axis.colorbar.ticktext))[0] == "0 corrupted run"
    assert [list(line) for line in fig.data[0].z] == [[0.0, 0.5, pytest.approx(-0.2)], [None, 1.0, pytest.approx(0.1)]]
    assert "not measured" in fig.data[0].hovertext[1][0]
    scale = [color for _, color in fig.layout.template.layout.coloraxis.colorscale]
    middle = scale[len(scale) // 2]
    assert contrast(middle, "#ffffff") < 1.2 < 3 < min(contrast(scale[0], middle), contrast(scale[-1], middle))


def test_noising_maps_name_the_runs_the_other_way_round() -> None:
    bar = plots.patch_heatmap([[0.5]], [0], [0], mode="noise").layout.coloraxis.colorbar
    assert bar.ticktext == ("\u22121", "0 clean run", "1 corrupted run")
    with pytest.raises(InputError, match="'zero'"):
        plots.patch_heatmap([[0.5]], [0], [0], mode="zero")  # type: ignore[arg-type]


def test_an_outlier_does_not_wash_out_the_map_and_keeps_its_value() -> None:
    fig = plots.patch_heatmap([[0.0, 25.0]], [0], [0, 1])
    assert fig.layout.coloraxis.cmax == 1.5
    assert "\u2265 1.5" in fig.layout.coloraxis.colorbar.ticktext
    assert "recovery 25" in fig.data[0].hovertext[0][1]
    assert fig.layout.meta["rows"][1]["recovery"] == 25.0
    assert plots.patch_heatmap([[0.0, 1.2]], [0], [0, 1]).layout.coloraxis.cmax == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("sites", "labels", "axis"),
    [
        (["hook_embed", "blocks.0.hook_resid_post"], ("embed", "0"), "layer (residual after block)"),
        (["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"], ("embed", "0"), "layer (residual after block)"),
        (["blocks.0.hook_mixer_out", "blocks.1.hook_mixer_out"], ("0", "1"), "block (mixer_out)"),
        ([-1, 0], ("embed", "0"), "layer (residual after block)"),
        (["blocks.0.hook_resid_pre", "blocks.0.hook_mlp_out"], ("resid_pre 0", "mlp_out 0"), "patched at"),
        (["x", "x"], ("x", "x (2)"), "patched at"),
    ],
)
def test_sites_are_named_on_the_layer_axis(sites: list[Any], labels: tuple[str, ...], axis: str) -> None:
    fig = plots.patch_heatmap([[0.0], [1.0]], sites, [0])
    assert fig.data[0].y == labels
    assert fig.layout.yaxis.title.text == axis


def test_tokens_and_marks_are_shown() -> None:
    fig = plots.patch_heatmap([[0.0, 1.0]], [0], [3, 4], ["(", "["], marks={"read": 4})
    assert fig.layout.xaxis.ticktext == ("3<br>(", "4<br>[")
    assert "token [" in fig.data[0].hovertext[0][1]
    assert [a.x for a in fig.layout.annotations if a.text == "read"] == [4]
    assert [shape.x0 for shape in fig.layout.shapes] == [4]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"values": [[0.0]], "sites": [0], "positions": [0, 1]}, ShapeError, r"\(1, 2\); it has shape \(1, 1\)"),
        ({"values": [0.0], "sites": [0], "positions": [0]}, ShapeError, r"shape \(1,\)"),
        ({"values": [[0.0]], "sites": [0], "positions": [0], "lo": [0.0]}, ShapeError, "needs lo of shape"),
        ({"values": [[0.0]], "sites": [0], "positions": [0], "tokens": ["a", "b"]}, ShapeError, "2 tokens for 1"),
        ({"values": [[float("nan")]], "sites": [0], "positions": [0]}, InputError, "no finite value"),
        ({"values": [], "sites": [], "positions": []}, InputError, "no site or no position"),
    ],
)
def test_maps_of_the_wrong_shape_are_refused(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plots.patch_heatmap(**kwargs)


# Names from anywhere


def hostile_figures(name: str, other: str) -> list[go.Figure]:
    profile = [{"layer": 0, "accuracy": 0.5, "untrained": 0.1, name or "c": name, other or "f": other}]
    profile.append({**profile[0], "layer": 1, "untrained": 0.2})
    abl = [{**row, "condition": name if row["condition"] == "target" else "random"} for row in ablation_rows(3)]
    for row in abl:
        row["verdict"] = other
    return [
        plots.layer_profile(profile, color=name or "c", facet=other or "f", y_label=name, title=other,
                            baselines={"untrained": other}),
        plots.length_curve([{"length": 1, "accuracy": 0.5, "m": name}], color="m", title=other),
        plots.training_curve([{"step": 1, "loss": 0.5, "m": name}], y="loss", color="m", title=other),
        plots.ablation(abl, metric=other, title=name),
        plots.patch_heatmap([[0.0], [1.0]], [name, other], [0], [name], marks={other: 0}, title=name),
        plots.interchange(interchange_rows([name, other], verdict=other), title=name),
        plots.interchange(interchange_rows([name, other], verdict=other)[:2], title=name),
    ]  # fmt: skip


def interchange_rows(sites: list[str], verdict: str = "used") -> list[dict[str, Any]]:
    """Two positions of each site: the subspace follows at the first, the control nowhere."""
    return [
        {"site": site, "layer": i, "pos": str(pos), "condition": kind, "iia_lo": 0.0, "iia_hi": 1.0, "head": None,
         "iia": 0.9 - 0.8 * pos if kind == "target" else 0.05, "verdict": verdict if not pos else "not here"}
        for i, site in enumerate(dict.fromkeys(sites)) for pos in (0, 1) for kind in ("target", "random")
    ]  # fmt: skip


def test_a_map_of_interchanges_shows_accuracies_and_marks_the_verdicts() -> None:
    rows = interchange_rows(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
    fig = plots.interchange(rows)
    assert [list(map(float, line)) for line in fig.data[0].z] == [pytest.approx([0.9, 0.1])] * 2
    assert (fig.data[0].y, fig.layout.coloraxis.cmax) == (("0", "1"), 1)
    (marks,) = fig.data[1:]
    assert (marks.name, marks.x, marks.y) == ("used", (0, 0), ("0", "1"))
    assert "highest control 5.0 %" in fig.data[0].hovertext[0][0]
    assert "used in 2 of 4" in fig.layout.meta["alt"]
    # Nothing is merged: sites of one layer, and heads, have panels or rows of their own.
    heads = [{**row, "site": "blocks.0.attn.hook_z", "head": h} for row in rows[:4] for h in (0, 3)]
    assert plots.interchange(heads).data[0].y == ("0, head 0", "0, head 3")
    both = [r for r in [*heads, *rows[:4]] if r["pos"] == "0"]
    panels = {axis for axis in plots.interchange(both).to_dict()["layout"] if axis.startswith("yaxis")}
    assert len(panels) == 3


def tags(fig: go.Figure) -> set[str]:
    spec = json.loads(fig.to_json())
    spec["layout"].pop("meta")
    # legendgroup is an identifier that plotly never draws.
    for trace in spec["data"]:
        trace.pop("legendgroup", None)
    return {tag for text in strings(spec) for tag in re.findall(r"<[^<>]*>", text)}


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_as_text_never_as_markup(name: str) -> None:
    for fig in hostile_figures(name, HOSTILE[0]) + hostile_figures(HOSTILE[2], name or "x"):
        assert tags(fig) <= {"<b>", "</b>", "<br>"}


def test_fields_of_hover_templates_are_not_filled_in_from_names() -> None:
    for fig in hostile_figures("%{y}", "%{x}"):
        assert not any(trace.hovertemplate for trace in fig.data)
        spec = json.loads(fig.to_json())
        shown = [{k: v for k, v in trace.items() if k != "legendgroup"} for trace in spec["data"]]
        assert "%{" not in json.dumps([shown, spec["layout"]["xaxis"], spec["layout"]["yaxis"]])


def test_the_tag_search_would_see_an_unescaped_name() -> None:
    assert tags(go.Figure(go.Scatter(y=[1], name=HOSTILE[1]), {"meta": {}})) == {
        "<a href='https://example.org'>",
        "</a>",
    }


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_escaped_text_comes_back_as_it_was(text: str) -> None:
    entities = {"lt": "<", "gt": ">", "amp": "&"}

    def decode(match: re.Match[str]) -> str:
        code = match.group(1)
        return chr(int(code[1:])) if code.startswith("#") else entities.get(code, match.group(0))

    escaped = plots.escape(text)
    assert not re.search(r"[<>$]|%\{", escaped)
    # plotly.js decodes entities with this expression when it draws text.
    shown = re.sub(r"&(#\d+|[a-z]+);", decode, escaped)
    assert shown.split() == (text.split() or ["\u200b"])


# What the report takes from a figure


def test_figures_carry_their_rows_and_a_text_alternative() -> None:
    rows = profile_rows()
    fig = plots.layer_profile(rows, color="model", facet="label")
    kept = fig.layout.meta["rows"]
    assert [(r["model"], r["label"], r["layer"], r["accuracy"]) for r in kept] == [
        (r["model"], r["label"], r["layer"], r["accuracy"]) for r in rows
    ]
    assert "embed: 30.0 %, 0: 45.0 %" in fig.layout.meta["alt"]
    assert "3: 40.0 pp" in plots.ablation(ablation_rows()).layout.meta["alt"]
    heat = plots.patch_heatmap([[0.0, 0.75]], [2], [4, 9], lo=[[0.0, 0.7]], hi=[[0.0, 0.8]])
    assert heat.layout.meta["rows"][1] == {"site": "2", "position": 9, "recovery": 0.75, "lo": 0.7, "hi": 0.8}
    assert "highest at 2, position 9" in heat.layout.meta["alt"]


def test_figures_survive_their_json() -> None:
    for fig in hostile_figures("a", "b"):
        assert json.loads(pio.from_json(fig.to_json()).to_json()) == json.loads(fig.to_json())


# Bad rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "got no rows"),
        ([{"layer": 0, "acuracy": 0.5}], "needs the column 'accuracy'.*Nearest: 'acuracy'"),
        ([{"layer": 0, "accuracy": "high"}], "numbers in the column 'accuracy'; it found 'high'"),
        ([{"layer": None, "accuracy": 0.5}], "a number in every row of 'layer'"),
        ([{"layer": 0, "accuracy": 0.5}] * 2, r"2 rows that share a point \(layer=0\).*Average over seeds"),
    ],
)
def test_bad_rows_are_refused_with_what_to_do(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plots.layer_profile(rows)


def test_a_named_column_that_is_missing_is_an_error_not_a_silent_omission() -> None:
    rows = profile_rows()
    with pytest.raises(InputError, match=r"'modle'.*Nearest: 'model'"):
        plots.layer_profile(rows, color="modle")
    with pytest.raises(InputError, match="'last_tokens'"):
        plots.layer_profile(rows, color="model", facet="label", baselines={"last_tokens": "last tokens"})


def test_importing_plots_loads_neither_plotly_nor_pandas() -> None:
    code = "import sys; from probelens.results import plots, report; print({'plotly', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_several_seeds_are_drawn_as_their_mean_with_a_band() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, 8, generator=gen)
    y = (x[..., 2] + 1.5 * torch.randn(60, 5, generator=gen) > 0).long()
    names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    tensors = dict(zip(names, (x, x + torch.randn(x.shape, generator=gen)), strict=True))
    acts = pl.Activations(tensors, {names[0]: 0, names[1]: 1})
    result = pl.probe(acts, y, seeds=range(3))
    table = result.to_dataframe()
    means = [table[table["layer"] == layer]["accuracy"].mean() for layer in (0, 1)]
    line = next(t for t in result.plot().data if t.name == "probe accuracy")
    assert list(line.y) == pytest.approx(means)
    first = table[table["seed"] == 0]["accuracy"].to_numpy()
    assert np.abs(np.array(line.y) - first).max() > 1e-3  # the first seed alone is drawn otherwise
    band = next(t for t in result.plot().data if t.fill == "toself")
    assert max(band.y) <= 1
    assert min(band.y) < min(means) < max(means) < max(band.y)
    # Seeds far apart: Student's interval of their mean, from the numbers alone.
    rows = [{"layer": 0, "seed": s, "accuracy": a, "majority": 0.25} for s, a in enumerate((0.5, 0.6, 0.7))]
    figure = plots.layer_profile(rows)
    half = 4.302653 * 0.1 / 3**0.5
    assert sorted(set(next(t for t in figure.data if t.fill == "toself").y)) == pytest.approx([0.6 - half, 0.6 + half])
    assert figure.layout.meta["rows"][0]["seed"] == "mean of 3"
    with pytest.raises(InputError, match="share a point"):
        plots.layer_profile([{**row, "seed": 0} for row in rows])


def test_sites_of_no_known_layer_are_drawn_in_the_order_given() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, 8, generator=gen)
    figure = pl.probe({"late": x, "<b>early</b>": x + 1}, (x[..., 2] > 0).long()).plot()
    assert list(figure.layout.xaxis.ticktext) == ["late", "&lt;b&gt;early&lt;/b&gt;"]
    assert figure.layout.xaxis.title.text == "site"

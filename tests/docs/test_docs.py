"""What the README and the pages show runs as it stands, and every public name is on a page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT, python_blocks, run_page

import probelens as pl


@pytest.mark.slow
def test_the_quickstart_page_runs_and_finds_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/quickstart.md")
    assert names["training"].accuracy > 0.99  # type: ignore[attr-defined]
    assert "blocks.1.hook_resid_post" in capsys.readouterr().out, "the error names the nearest hook point"
    recovery = names["sufficient"].recovery()  # type: ignore[attr-defined]
    assert recovery[-1, -1] == pytest.approx(1.0, abs=1e-5), "the last residual at the read position is the answer"
    assert recovery[-1, :-1].abs().max() < 1e-5, "and elsewhere it is nothing to it"
    assert {p.name for p in tmp_path.iterdir()} == {"patch.html", "patch.safetensors"}


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = pl.tasks.Dyck(k=2, max_depth=10)
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=32)
    model = pl.models.build(config)
    # Patching needs pairs that the model answers right; a little training gives some.
    short = pl.training.TrainConfig(steps=250, batch_size=32, lr=3e-3, warmup=20, decay_steps=50)
    pl.training.train(model, task, config=short, progress=False)
    names = run_page("README.md", my_model=model)
    assert names["logits"].shape[:2] == (300, 40)  # type: ignore[attr-defined]
    assert (tmp_path / "patch.safetensors").is_file()


@pytest.mark.slow
def test_the_example_of_the_home_page_runs_and_fits_on_it() -> None:
    shown = python_blocks("docs/index.md").strip().splitlines()
    assert 8 <= len(shown) <= 14
    with torch.random.fork_rng():
        names = run_page("docs/index.md")
    assert max(names["readable"].accuracy(site) for site in names["acts"]) > 0.95  # type: ignore[attr-defined]
    assert len(names["needed"].targets()) == 3  # type: ignore[attr-defined]
    assert names["sufficient"].recovery()[-1, -1] == pytest.approx(1, abs=1e-5)  # type: ignore[attr-defined]


def test_the_figure_of_the_home_page_shows_the_kept_numbers_and_its_text_says_them() -> None:
    import home_figure
    import pandas as pd

    for name, drawn in home_figure.figures().items():
        kept = (home_figure.FIGURES / name).read_text(encoding="utf-8")
        assert kept == drawn, "python docs/tools/home_figure.py"
        assert f"figures/home/{name}" in (ROOT / "docs/index.md").read_text()
    rows = pd.read_csv(home_figure.NUMBERS).set_index(["model", "panel", "layer"]).sort_index()
    text = (ROOT / "docs/index.md").read_text().replace("\n", " ")
    inner = rows.loc[(slice(None), "Readable", slice(0, 3)), "value"]
    assert inner.min() > 0.99, "nearly all positions"
    assert rows.loc[("Transformer", "Readable", slice(0, 3)), "control"].min() > 0.99
    needed, used = (rows.loc[(slice(None), panel, slice(None))] for panel in ("Needed", "Used"))
    lost, most = needed["value"], needed["control"].max()
    assert f"{lost.min():.0%} to {lost.max():.0%} of answers are lost".replace("%", "", 1).replace("%", " %") in text
    assert f"random ones at most {most:.0%}".replace("%", " %") in text
    follow = f"{used['value'].min():.0%} to {used['value'].max():.0%} of answers *follow*"
    assert follow.replace("%", "", 1).replace("%", " %") in text
    assert used["control"].max() == 0, "none does"
    # The control: other numbers are another figure.
    moved = rows.reset_index().assign(value=lambda t: t["value"] / 2)
    assert home_figure.svg(moved, "light", 3) != home_figure.figures()["wide-light.svg"]


def test_the_questions_page_runs() -> None:
    run_page("docs/faq.md")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_of_compiled_adapted_and_spread_models_runs() -> None:
    with torch.random.fork_rng():
        names = run_page("docs/compiled-adapted-spread.md")
    assert names["logits"].shape == (1, 3, 50)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/api/models.md", "docs/api/tasks.md"])
def test_a_page_with_a_short_example_runs(page: str) -> None:
    run_page(page)


def test_the_pages_on_figures_and_reports_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figure = run_page("docs/api/plots.md")["figure"]
    assert len(figure.data) >= 2  # type: ignore[attr-defined]
    run_page("docs/api/report.md")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Where can depth be read?" in page
    assert "probelens run quickstart" in page


def test_the_page_on_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a few steps of it; what a full training brings is on the quickstart's page and tested there."""
    monkeypatch.chdir(tmp_path)
    full = pl.training.train

    def shorter(model: torch.nn.Module, task: pl.tasks.Task, *, config: pl.training.TrainConfig, **kw: Any) -> Any:
        few = dataclasses.replace(config, steps=4, warmup=1, decay_steps=1)
        return full(model, task, config=few, progress=False, **kw)

    monkeypatch.setattr(pl.training, "train", shorter)
    names = run_page("docs/api/training.md")
    assert names["result"].steps == 4  # type: ignore[attr-defined]
    assert any((tmp_path / "runs/gru-parity").iterdir())
    assert "accuracy" in capsys.readouterr().out


def test_a_page_that_does_not_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    monkeypatch.setattr("pages.ROOT", tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_page("page.md")
    assert caught.traceback[-1].lineno + 1 == 8

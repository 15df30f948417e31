"""The paper's recipes for pretrained models, from pretraining to the report, on models of two blocks and one corpus."""

from __future__ import annotations

import dataclasses
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import probelens as pl
from probelens.cli.main import main
from probelens.examples.refit_the_probe import publish
from probelens.examples.refit_the_probe.code_depth import readings
from probelens.examples.refit_the_probe.code_depth import recipe as code_depth
from probelens.examples.refit_the_probe.pretrained import recipe as pretrained
from probelens.examples.refit_the_probe.pretrained import report as pretrained_report
from probelens.examples.refit_the_probe.pretrained.words import ANSWER, InVocabulary
from probelens.examples.refit_the_probe.pretraining import recipe as pretrain
from probelens.examples.refit_the_probe.pretraining.text import END, NextToken, make_tokenizer
from probelens.examples.refit_the_probe.shared.corpus import held_out
from probelens.examples.refit_the_probe.shared.identity import identity
from probelens.examples.refit_the_probe.shared.models import mixed
from probelens.examples.refit_the_probe.shared.setup import make_task
from probelens.experiments import RunRecord, Store

# The last three are among those that are kept from pretraining.
MODULES = ("argparse.py", "ast.py", "cmd.py", "csv.py", "gzip.py", "calendar.py", "dis.py", "timeit.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few modules of the standard library: reading all of it takes as long as everything else here."""
    folder, library = tmp_path_factory.mktemp("corpus"), Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        shutil.copy(library / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> SimpleNamespace:
    """`paper-pretrain`, interrupted while the second model trains and taken up again, from the command line."""
    folder = tmp_path_factory.mktemp("pretrain") / "run"
    words = [
        "run",
        "paper-pretrain",
        "--preset",
        "smoke",
        "--corpus",
        str(corpus),
        "--out",
        str(folder),
        "--workers",
        "1",
    ]
    seen: list[int] = []
    whole = pl.training.train

    def train(*args: Any, progress: Any, **kwargs: Any) -> Any:
        def step(row: dict[str, Any]) -> None:
            seen.append(row["step"])
            progress(row)
            if len(seen) == 9:
                raise KeyboardInterrupt

        return whole(*args, progress=step, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.training, "train", train)
        first = main(words)
        second = main(words)
    return SimpleNamespace(folder=folder, status=(first, second), steps=seen)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["def f(x):\n    return [x, x]\n"] * 3, 270)


# -- the corpus and the models --------------------------------------------------------------------------


def test_an_interrupted_pretraining_goes_on_and_leaves_models_that_load(run: SimpleNamespace) -> None:
    assert run.status == (130, 0)
    assert run.steps == [*range(1, 7), *range(1, 4), *range(4, 7)], "steps 4 to 6 of the second model follow its third"
    rows = pd.read_parquet(run.folder / "rows.parquet")
    held = rows[rows["kind"] == "held_out"].set_index("arch")
    for arch, adapter in (("transformer", "hf-transformer"), ("mamba", "hf-mamba")):
        model = pl.load(run.folder / "models" / arch)
        assert model.cfg.architecture == adapter
        assert model.tokenizer.eos_token == END
        tokens = model.to_tokens("def f(x):", prepend_bos=False)
        assert model.tokenizer.decode(tokens[0]) == "def f(x):"
        # What was trained is what was saved.
        store = Store(run.folder)
        (key,) = (key for key in RunRecord.load(run.folder).cells if store.config(key)["arch"] == arch)
        trained = pl.load(store.cell(key) / "train")
        torch.testing.assert_close(model(tokens), trained(tokens))
        assert 3 < held.loc[arch, "nats_per_token"] < 7
    assert (run.folder / "report.html").exists()


def test_modules_that_are_kept_out_are_in_no_training_text(corpus: Path) -> None:
    assert [held_out(name.removesuffix(".py")) for name in MODULES] == [False] * 5 + [True] * 3
    seen, unseen, made = pretrain.texts(str(corpus), 300, None)
    text, other = made.decode(seen), made.decode(unseen)
    for phrase, kept in (("def add_argument(", False), ("def formatmonth(", True), ("def disassemble(", True)):
        assert (phrase in other, phrase in text) == (kept, not kept)
    assert text.count(END) == (seen == made.eos_token_id).sum() > 20
    with pytest.raises(pl.InputError, match="both parts are needed"):
        pretrain.texts(str(corpus), 300, 1)


def test_next_token_names_the_token_that_follows() -> None:
    task = NextToken(np.arange(50), [str(i) for i in range(50)])
    batch = task.sample(4, length=8, seed=1)
    assert torch.equal(batch.labels["next"][:, :-1], batch.tokens[:, 1:])
    assert batch.mask[:, :-1].all()
    assert not batch.mask[:, -1].any()
    with pytest.raises(pl.InputError, match="too few"):
        task.sample(1, length=50)


# -- the task in a model's words --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parity", "s3", "dyck", "counter"])
def test_a_task_in_the_models_vocabulary_is_the_same_task(tokenizer: Any, name: str) -> None:
    inner = make_task(name)
    task = InVocabulary(inner, tokenizer)
    batch, plain = task.sample(20, length=12, seed=3), inner.sample(20, length=12, seed=3)
    for label in inner.label_names:
        assert torch.equal(batch.labels[label], plain.labels[label])
    assert torch.equal(batch.mask, plain.mask)
    assert bool((batch.tokens[:, 0] == tokenizer.eos_token_id).all())
    words = [tokenizer.decode([i]) for i in batch.tokens[0, 1:].tolist()]
    symbols = dict(zip(inner.vocab, task.symbols, strict=False))
    assert words == [symbols[inner.vocab[i]] for i in plain.tokens[0, 1:].tolist()]
    answer = batch.labels[ANSWER]
    said = [tokenizer.decode([i]) for i in answer[0, 1:].tolist()]
    assert said == [task.answers[i] for i in plain.labels[inner.target][0, 1:].tolist()]
    assert len(set(task.answers)) == inner.n_classes[inner.target]
    assert task.labels(batch.tokens)[ANSWER].equal(answer)
    options = {"kind": "type"} if name == "dyck" else {}
    pairs, own = (
        task.pairs(6, length=12, seed=2, **options),
        inner.pairs(6, length=12, seed=2, label=inner.target, **options),
    )
    assert torch.equal(pairs.edit_pos, own.edit_pos)
    assert [tokenizer.decode([i]) for i in pairs.answers[:, 0].tolist()] == [
        task.answers[i] for i in own.answers[:, 0].tolist()
    ]
    parts = task.splits({"a": 30, "b": 10}, length=12)
    assert not {tuple(row) for row in parts["a"].tokens.tolist()} & {tuple(row) for row in parts["b"].tokens.tolist()}
    fresh = task.sample(200, length=4, seed=0, exclude=task.sample(3, length=4, seed=9))
    assert len(fresh) == 200


def test_symbols_are_written_as_themselves_where_that_is_one_token(tokenizer: Any) -> None:
    assert InVocabulary(make_task("dyck"), tokenizer).symbols == ("(", "[", ")", "]", ".")
    assert InVocabulary(make_task("parity"), tokenizer).symbols == ("0", "1")
    assert InVocabulary(make_task("s3"), tokenizer).symbols == tuple("abcdef")
    task = InVocabulary(make_task("parity"), tokenizer)
    with pytest.raises(pl.InputError, match="is no symbol of parity: 0, 1"):
        task.labels(torch.tensor([[0, 5]]))
    with pytest.raises(pl.InputError, match="answers 'state'"):
        task.pairs(2, label="depth")


def test_what_cannot_be_written_is_refused(tokenizer: Any) -> None:
    with pytest.raises(pl.InputError, match="without a tokenizer"):
        InVocabulary(make_task("parity"), None)
    many = pl.tasks.GroupWords("Z30", bos=True)
    with pytest.raises(pl.InputError, match="at most 26"):
        InVocabulary(many, tokenizer)


# -- fine-tuning and measuring ----------------------------------------------------------------------------


def test_a_pretrained_cell_gives_every_kind_of_row(run: SimpleNamespace, tmp_path: Path) -> None:
    places = ",".join(str(run.folder / "models" / arch) for arch in ("transformer", "mamba"))
    words = ["run", "paper-pretrained", "--preset", "smoke", "--model", places, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    rows = pd.read_parquet(tmp_path / "run" / "rows.parquet")
    kinds = {"training", "behaviour", "probe", "probe_before", "indices", "ablation", "interchange", "site"}
    for arch in ("transformer", "mamba"):
        part = rows[rows["model"] == arch]
        assert kinds <= set(part["kind"])
        assert set(part["arch"]) == {arch}
        ablations = part[part["kind"] == "ablation"]
        assert set(ablations["what"]) == {"direction", "rows", "mean_direction", "means", "leace", "inlp"}
        assert part.loc[part["kind"] == "probe", "untrained"].notna().any()
        assert part["symbols"].dropna().tolist() == ["0 1"]
    claims = pd.read_parquet(tmp_path / "run" / "claims.parquet")
    assert set(claims["ours"]) == {"not run"}, "models that learned nothing don't speak"
    before = (tmp_path / "run" / "rows.parquet").read_bytes()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "rows.parquet").read_bytes() == before
    page = published(tmp_path, ("pretrained-claims", "pretrained-layers", "pretrained-sites"))
    assert page.count("\n| 8. ") == 3
    assert "| mamba, parity | 12, 99 % not reached |" in page


def published(folder: Path, names: tuple[str, ...]) -> str:
    """A page with the tables of a run, written from published rows as from the run's own."""
    blank = "\n".join(f"<!-- {name} -->old<!-- end {name} -->" for name in names)
    pages = []
    for rows, more in (
        (folder / "run/rows.parquet", ["--data", str(folder / "small.parquet")]),
        (folder / "small.parquet", []),
    ):
        page = folder / "page.md"
        page.write_text(blank)
        publish.main([str(rows), "--page", str(page), *more])
        pages.append(page.read_text())
    assert (folder / "small.parquet").stat().st_size < (folder / "run/rows.parquet").stat().st_size
    assert pages[0] == pages[1]
    assert "old" not in pages[0]
    return pages[0]


def test_a_cell_below_its_least_accuracy_is_probed_only(run: SimpleNamespace, tmp_path: Path) -> None:
    config = pretrained.Config(**{
        **pretrained.PRESETS["smoke"], "out": str(tmp_path), "model": (str(run.folder / "models/transformer"),), "least": 0.99,
    })  # fmt: skip
    rows = pd.read_parquet(pretrained.run(config, progress=False) / "rows.parquet")
    assert set(rows["kind"]) == {"training", "behaviour", "probe", "probe_before", "indices"}


def test_bf16_and_checkpointing_train_the_same_model_up_to_rounding(run: SimpleNamespace) -> None:
    losses: dict[str, list[float]] = {}
    for arch in ("transformer", "mamba"):
        for name, options in (("plain", {}), ("checkpointing", {"checkpointing": True}), ("bf16", {"bf16": True})):
            model = pl.load(run.folder / "models" / arch)
            task = InVocabulary(make_task("parity"), model.tokenizer)
            steps: list[float] = []
            config = pl.training.TrainConfig(
                steps=5, decay_steps=1, batch_size=8, length=8, start_length=None, eval_sequences=8
            )
            pl.training.train(
                model, task, config=config, backend=mixed(model, **options), progress=lambda row, s=steps: s.append(row["loss"])
            )  # fmt: skip
            losses[name] = steps
            assert all(p.dtype == torch.float32 for p in model.module.parameters())
            assert not model.module.is_gradient_checkpointing
        assert losses["checkpointing"] == pytest.approx(losses["plain"], rel=1e-5)
        assert losses["bf16"] == pytest.approx(losses["plain"], rel=0.05)
        assert losses["bf16"] != losses["plain"]


def test_a_folder_with_other_weights_is_another_cell(run: SimpleNamespace, tmp_path: Path) -> None:
    folder = run.folder / "models" / "transformer"
    assert len({identity(str(folder)), identity(str(run.folder / "models" / "mamba")), identity("org/name")}) == 3
    moved = shutil.copytree(folder, tmp_path / "copy")
    assert identity(str(moved)) == identity(str(folder))
    assert identity("org/name") == ""


def test_claims_follow_their_rules() -> None:
    def cell(model: str, arch: str, drops: list[float]) -> list[dict[str, Any]]:
        about = {
            "model": model,
            "arch": arch,
            "task": "dyck",
            "train_seed": 0,
            "label": "depth",
            "n_layers": len(drops) - 1,
        }
        rows = [{**about, "kind": "behaviour", "span": "all", "length": 40, "accuracy": 0.99}]
        for layer, drop in enumerate(drops, start=-1):
            read = {"accuracy": 0.7 + 0.05 * layer, "lo": 0.69 + 0.05 * layer, "hi": 0.71 + 0.05 * layer}
            rows.append({**about, "kind": "probe", "control": "task", "span": "all", "layer": layer, **read})
            rows.append({**about, "kind": "ablation", "what": "direction", "layer": layer, "drop": drop, "lo": drop - 0.01,
                         "hi": drop + 0.01, "probe_accuracy": read["accuracy"], "refit_accuracy": read["accuracy"],
                         "baseline": 0.3})  # fmt: skip
        return rows

    def verdicts(*cells: list[dict[str, Any]]) -> dict[str, Any]:
        table = pd.DataFrame([row for rows in cells for row in rows])
        return {claim.claim.split()[0]: claim.agrees for claim in reversed(pretrained_report.claims(table))}

    as_in_the_paper = verdicts(
        cell("pythia", "transformer", [0.0, 0.1, 0.8, 0.1, 0.2]), cell("mamba", "mamba", [0.0, 0.0, 0.0, 0.0, 0.0])
    )
    assert as_in_the_paper["8."] is True
    assert as_in_the_paper["9."] is None, "an interval that holds 0.2 % says nothing"
    assert as_in_the_paper["C."] is None, "where nothing costs anything no layer costs most"
    assert verdicts(cell("pythia", "transformer", [0.0, 0.1, 0.8, 0.1, 0.2]))["C."] is True
    assert as_in_the_paper["A."] is True
    other = verdicts(
        cell("pythia", "transformer", [0.0, 0.1, 0.2, 0.1, 0.4]), cell("mamba", "mamba", [0.0, 0.3, 0.0, 0.0, 0.5])
    )
    assert other["8."] is False
    assert other["9."] is False
    assert other["C."] is False, "the last layer is both the most readable and the most damaging"


# -- code -------------------------------------------------------------------------------------------------


def test_code_depth_runs_on_frozen_models_with_their_own_tokenizers(
    run: SimpleNamespace, corpus: Path, tmp_path: Path
) -> None:
    places = ",".join(str(run.folder / "models" / arch) for arch in ("transformer", "mamba"))
    words = [
        "run",
        "paper-code-depth",
        "--preset",
        "smoke",
        "--model",
        places,
        "--corpus",
        str(corpus),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    rows = pd.read_parquet(tmp_path / "run" / "rows.parquet")
    probes = rows[rows["kind"] == "probe"]
    assert set(zip(probes["model"], probes["label"], strict=True)) == {
        (m, lab) for m in ("transformer", "mamba") for lab in ("depth", "indent")
    }
    assert sorted(set(probes["layer"])) == [-1, 1]
    for column in (
        "balanced_accuracy",
        "balanced_lo",
        "balanced_hi",
        "untrained_balanced",
        "position_balanced",
        "last_w_balanced",
        "last_w",
    ):
        assert probes[column].between(0, 1).all()
    assert rows.loc[rows["kind"] == "indices", "verdict"].notna().all()
    assert len(pd.read_parquet(tmp_path / "run" / "claims.parquet")) == 4
    assert published(tmp_path, ("code-claims", "code-layers")).count("| mamba, ") == 2
    assert (tmp_path / "run" / "report.html").exists()


def planted(n: int = 60, length: int = 20) -> tuple[pl.Batch, torch.Tensor]:
    """Sequences of ten modules whose label is 1 for one token in ten, and activations that show it."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 10, (n, length)))
    label = (tokens == 3).long()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -2:] = False
    x = torch.from_numpy(rng.normal(size=(n, length, 4))).float()
    x[..., 0] += 1.5 * label
    return pl.Batch(tokens, {"depth": label}, mask, torch.arange(n) % 10), x


def test_balanced_accuracy_is_that_of_scikit_learns_probabilities_over_the_classes_frequencies() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from probelens.probing.splits import split_by_group

    batch, x = planted(300)
    acts = pl.Activations({"a": x}, {"a": 0}, mask=batch.mask, tokens=batch.tokens)
    found = pl.probe(acts, batch.labels, batch.groups, mask=batch.mask, tokens=batch.tokens)
    own = readings.Readings.of(found, acts, batch, "depth", 0)
    split = split_by_group(batch.groups, seed=0)
    parts = [
        (x[i][batch.mask[i]].numpy(), batch.labels["depth"][i][batch.mask[i]].numpy())
        for i in (split.train, split.test)
    ]
    scaled = make_pipeline(StandardScaler(), LogisticRegression(C=found.row("a", "depth")["C"], tol=1e-6))
    plain = scaled.fit(*parts[0])
    odds = plain.predict_log_proba(parts[1][0]) - np.log(np.bincount(parts[0][1]) / len(parts[0][1]))
    expected = balanced_accuracy_score(parts[1][1], odds.argmax(1))
    assert float(own.balanced[0]) == pytest.approx(expected, abs=0.01)
    assert found.row("a", "depth")["balanced_accuracy"] < expected - 0.05, "without the correction rare classes lose"
    low, high = own.drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    assert float(low) < expected < float(high) < float(low) + 0.2


def test_guesses_use_what_they_may_and_nothing_else() -> None:
    batch, x = planted(300)
    acts = pl.Activations({"a": x}, {"a": 0}, mask=batch.mask, tokens=batch.tokens)
    found = pl.probe(acts, batch.labels, batch.groups, mask=batch.mask, tokens=batch.tokens)
    guesses = readings.Readings.of(found, acts, batch, "depth", 0).guesses
    assert guesses["last_w"] > 0.95, "the label is a matter of the last token"
    assert guesses["majority"] == 0.5
    assert guesses["position"] == pytest.approx(0.5, abs=0.07)
    by_place = dataclasses.replace(
        batch, labels={"depth": (torch.arange(20) >= 10).long().expand(300, 20).contiguous()}
    )
    guessed = readings.guess(by_place, by_place, "depth", 0, 2)
    assert guessed[batch.mask].equal(by_place.labels["depth"][batch.mask])


def test_sites_are_the_embedding_every_nth_block_and_the_last(run: SimpleNamespace) -> None:
    model = pl.wrap(pl.models.build(pl.models.FormalConfig("gru", d_vocab=5, n_layers=7, d_model=8, hidden_size=8)))
    layers = [int(site.split(".")[1]) for site in code_depth.chosen(model, 3)[1:]]
    assert layers == [2, 5, 6]
    assert code_depth.chosen(model, 1)[1:] == [f"blocks.{i}.hook_resid_post" for i in range(7)]


def test_code_depth_reads_only_what_was_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def f(x):\n    return [" + ", ".join(f"x{i}" for i in range(30)) + "]"
    found = [(module, code.replace("f", module)) for module in ("json", "unittest", "calendar")]
    monkeypatch.setattr(code_depth, "functions", lambda max_chars: found)
    config = {"corpus": "stdlib", "unseen": True, "max_depth": 3}
    assert code_depth.make_task(config, make_tokenizer(["x"], 257)).group_names == ["unittest", "calendar"]


def test_a_draw_without_the_rarest_class_is_no_draw_of_the_same_task() -> None:
    counts = torch.tensor([[10.0, 0.0]] * 19 + [[10.0, 4.0]], dtype=torch.float64)
    hits = torch.stack([counts * torch.tensor([1.0, 0.0]), counts * torch.tensor([0.5, 1.0])])
    drawn = readings.resampled(hits, counts, seed=0)
    assert drawn.shape == (readings.DRAWS, 2)
    # The class of one module alone is always answered wrong at the first site, so no draw may do better than half.
    assert torch.equal(drawn[:, 0], torch.full((readings.DRAWS,), 0.5, dtype=torch.float64))
    assert torch.equal(drawn[:, 1], torch.full((readings.DRAWS,), 0.75, dtype=torch.float64))
    many = 10 * torch.rand(3, 40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = readings.resampled(many, torch.full((40, 2), 10.0, dtype=torch.float64), seed=0)
    middle = (many.sum(1) / 400).mean(-1)
    assert torch.allclose(spread.mean(0), middle, atol=0.01), "an interval lies around its estimate"
    assert (spread.std(0) > 0.01).all()


def test_a_class_of_hardly_any_module_has_no_share_in_balanced_accuracy() -> None:
    asked = torch.tensor([[9.0, 4.0, 0.0], [9.0, 4.0, 2.0], [9.0, 4.0, 0.0], [9.0, 0.0, 0.0]])
    assert readings.counted(asked).tolist() == [True, True, False]
    assert readings.counted(asked[:2]).tolist() == [True, True, True], "with two modules there is no choice"


def test_the_tables_of_the_page_are_those_of_its_rows() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = (docs / "paper.md").read_text(encoding="utf-8")
    for name in ("pretrained", "code"):
        rows = pd.read_parquet(docs / "data" / "paper" / f"{name}.parquet")
        assert publish.filled(page, rows) == page, name

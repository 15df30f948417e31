"""Erasure sweeps, dose-response and length transfer, on models whose workings are known and on small trained ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens import subspaces
from probelens.ablation.dose import first_directions
from probelens.ablation.erase import require_disjoint
from probelens.examples import planted
from probelens.examples.planted import SITE, World
from probelens.probing import split_by_group
from probelens.probing.refit import guess_accuracy, position_probes, refit_check
from probelens.running.collect import collect
from probelens.tasks import Batch


@pytest.fixture(scope="module")
def spare() -> World:
    return planted.spare()


# -- erase ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["leace", "inlp"])
def test_what_is_used_is_erased_to_chance_and_costs_every_answer(spare: World, method: str) -> None:
    # With other splits INLP's own probe may stop a little early, which the fresh one says; see below.
    kw = {"label": "y", "sites": SITE, "controls": 20, "seed": 1}
    got = pl.erase(spare.model, spare.fit, spare.held, method=method, **kw)  # type: ignore[arg-type]
    (row,) = got.rows
    assert got.at_chance()
    assert row["reached"] == "chance"
    assert row["refit_accuracy"] <= row["baseline"] + 0.02
    assert row["probe_accuracy"] == 1.0
    assert row["damage"] > 0.9
    assert row["effect"] > 0.8
    assert row["effect_lo"] > 0.5
    assert row["effect_p"] == pytest.approx(1 / 21)
    assert row["verdict"] == "erased"
    assert (row["method"], row["n_fit"]) == (method, len(spare.fit))
    if method == "inlp":
        assert row["stopped"] == "at chance"
        assert 2 <= row["rank"] < planted.WIDTH
    else:
        assert row["rank"] == 1


def test_what_is_not_used_is_erased_at_no_cost() -> None:
    made = planted.unused()
    got = pl.erase(made.model, made.fit, made.held, label="z", target="y", sites=SITE, controls=5)
    assert got.at_chance()
    assert got.rows[0]["drop"] == 0.0
    assert got.rows[0]["effect"] < 0.05
    assert got.rows[0]["effect_lo"] < 0 < got.rows[0]["effect_hi"]
    assert (got.label, got.ablation.target) == ("z", "y")


def test_the_layer_axis_is_swept_and_the_subspaces_are_kept(spare: World, tmp_path: Path) -> None:
    got = pl.erase(spare.model, spare.fit, spare.held, label="y", controls=2, mlp=False)
    assert [row["layer"] for row in got.rows] == [-1, 0, 1]
    assert [row["site"] for row in got.rows] == list(got.subspaces)
    assert got.rows[-1]["verdict"] == "tautological"
    back = pl.ErasureResult.load(got.save(tmp_path / "e.safetensors"))
    assert back.rows == got.rows
    x = spare.acts(spare.held)
    torch.testing.assert_close(back.subspaces[SITE](x), got.subspaces[SITE](x))
    assert len(got.to_dataframe()) == 3
    assert len(got.plot().data) > 2
    inlp = pl.erase(spare.model, spare.fit, spare.held, label="y", method="inlp", controls=0, mlp=False, sites=SITE)
    again = pl.ErasureResult.load(inlp.save(tmp_path / "i.safetensors"))
    assert again.subspaces[SITE].history == inlp.subspaces[SITE].history
    assert again.subspaces[SITE].rank == inlp.rows[0]["rank"]


def test_a_budget_that_ends_early_is_said_not_hidden(spare: World) -> None:
    got = pl.erase(
        spare.model, spare.fit, spare.held, label="y", method="inlp", max_rank=1, sites=SITE, controls=2, mlp=False
    )
    (row,) = got.rows
    assert not got.at_chance()
    assert row["stopped"] == "max_rank"
    assert row["fit_accuracy"] > row["fit_baseline"] + 0.4
    assert float(row["reached"].split()[0]) == pytest.approx(row["refit_accuracy"] - row["baseline"], abs=1e-3)
    assert row["verdict"] == "inconclusive"


def test_leace_is_streamed_and_equal_to_leace_of_everything(spare: World) -> None:
    got = pl.erase(spare.model, spare.fit, spare.held, label="y", sites=SITE, controls=0, mlp=False, batch_size=37)
    x, y = spare.acts(spare.fit), spare.fit.labels["y"]
    want = pl.leace(x, y)
    torch.testing.assert_close(got.subspaces[SITE](x), want(x))


def test_the_probe_that_checks_has_not_seen_the_sequences_that_were_erased(spare: World) -> None:
    """On its own rows LEACE leaves exactly nothing, whatever is left on others: too few rows must show."""
    few = spare.fit[:6]
    got = pl.erase(spare.model, few, spare.held, label="y", sites=SITE, controls=0, mlp=False)
    assert not got.at_chance()
    assert got.rows[0]["refit_accuracy"] > got.rows[0]["baseline"] + 0.1
    x, y = spare.acts(few), few.labels["y"]
    after = got.subspaces[SITE](x)
    assert float((after[y == 1].mean(0) - after[y == 0].mean(0)).abs().max()) < 1e-5
    with pytest.raises(pl.InputError, match="also among those that were fitted on"):
        pl.erase(spare.model, spare.fit, spare.fit[:100], label="y", sites=SITE)


def test_the_margin_asked_for_is_that_of_the_verdict_too(spare: World) -> None:
    few, kw = spare.fit[:40], {"label": "y", "sites": SITE, "controls": 0, "mlp": False}
    strict, loose = (
        pl.erase(spare.model, few, spare.held, margin=margin, **kw)  # type: ignore[arg-type]
        for margin in (0.02, 0.12)
    )
    over = strict.rows[0]["refit_accuracy"] - strict.rows[0]["baseline"]
    assert 0.03 < over < 0.11
    assert (strict.at_chance(), strict.rows[0]["verdict"]) == (False, "inconclusive")
    assert (loose.at_chance(), loose.rows[0]["verdict"]) == (True, "erased")
    direct = pl.ablate(spare.model, spare.held, loose.subspaces, label="y", controls=0, mlp=False, margin=0.12)
    assert direct.targets()[0]["verdict"] == "erased"


def test_padding_enters_neither_fit_nor_check(spare: World) -> None:
    def padded(batch: pl.Batch) -> pl.Batch:
        mask = torch.ones_like(batch.mask)
        mask[::2, 8:] = False
        wrong = torch.where(mask, batch.labels["y"], 1 - batch.labels["y"])
        return pl.Batch(batch.tokens, {"y": wrong}, mask)

    fit, held = padded(spare.fit), padded(spare.held)
    got = pl.erase(spare.model, fit, held, sites=SITE, controls=0, mlp=False)
    x = spare.acts(spare.fit)
    torch.testing.assert_close(got.subspaces[SITE](x), pl.leace(x, fit.labels["y"], fit.mask)(x))
    assert got.rows[0]["clean"] == 1.0


def test_mamba_runs_on_the_reference_backend_and_gives_the_same_numbers() -> None:
    model, data = pl.wrap(zoo.build("mamba")), zoo.tokens(80, 7)
    batch = pl.Batch(data, {"token": data % 3, "answer": model(data).argmax(-1)})
    site = "blocks.1.hook_resid_post"
    got = pl.erase(model, batch[:40], batch[40:], label="token", target="answer", sites=site, controls=2, mlp=False)
    want = pl.ablate(model, batch[40:], got.subspaces, label="token", target="answer", controls=2, mlp=False)
    torch.testing.assert_close(got.ablation.values, want.values)
    assert not model.has_hooks()


def test_erase_errors(spare: World) -> None:
    with pytest.raises(pl.InputError, match="'leace', 'inlp'"):
        pl.erase(spare.model, spare.fit, spare.held, label="y", method="amnesic")  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="label='x'"):
        pl.erase(spare.model, spare.fit, spare.held, label="x")
    with pytest.raises(pl.InputError, match="target='x'"):
        pl.erase(spare.model, spare.fit, spare.held, label="y", target="x", sites=SITE)
    with pytest.raises(pl.UnknownHookError):
        pl.erase(spare.model, spare.fit, spare.held, label="y", sites="blocks.9.hook_resid_post")


# -- the refit at each position ------------------------------------------------------------------------------


def coded(
    n: int = 120, pos: int = 6, d: int = 5, k: int = 3, noise: float = 0.2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A label of k classes along directions that are other ones at each position."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n, pos), generator=gen)
    codes = torch.randn(pos, k, d, generator=gen)
    return codes[torch.arange(pos), y] + noise * torch.randn(n, pos, d, generator=gen), y


def test_position_probes_read_a_code_that_changes_and_guess_on_noise() -> None:
    x, y = coded()
    mask, split = torch.ones_like(y, dtype=torch.bool), split_by_group(torch.arange(120))
    assert position_probes(x, y, mask, split).accuracy > 0.9
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    assert position_probes(noise, y, mask, split).accuracy < 0.5
    got = position_probes(x, y, mask, split)
    assert got.by_position.shape == (6,)
    assert got.by_position.double().mean().item() == pytest.approx(got.accuracy, abs=1e-6)


def test_position_probes_never_look_at_masked_rows() -> None:
    x, y = coded()
    mask = torch.ones_like(y, dtype=torch.bool)
    mask[:, 0] = False
    mask[::3, 4:] = False
    split = split_by_group(torch.arange(120))
    spoilt = torch.where(mask[..., None], x, torch.full_like(x, 1e6))
    one, two = position_probes(x, y, mask, split), position_probes(spoilt, y.where(mask, -100), mask, split)
    assert one.accuracy == two.accuracy
    assert torch.equal(one.by_position.nan_to_num(-1), two.by_position.nan_to_num(-1))
    assert torch.isnan(one.by_position[0])


def test_guesses_from_nothing_and_from_the_position() -> None:
    y = torch.tensor([[0, 1, 1, 1]]).expand(20, -1).contiguous()
    mask, split = torch.ones_like(y, dtype=torch.bool), split_by_group(torch.arange(20))
    assert guess_accuracy(y, mask, split) == (0.75, 1.0)
    mask[:, 0] = False
    assert guess_accuracy(y, mask, split) == (1.0, 1.0)


def test_the_refit_asks_all_three_kinds_of_probe() -> None:
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (200, 6, 2), generator=gen)
    y = bits[..., 0] ^ bits[..., 1]
    x = torch.cat([2.0 * bits - 1, torch.randn(200, 6, 3, generator=gen)], -1)
    x = x + 0.1 * torch.randn(x.shape, generator=gen)
    mask, groups = torch.ones_like(y, dtype=torch.bool), torch.arange(200)
    row, _ = refit_check(x, x, y, mask, groups)
    assert row["refit_mlp_accuracy"] > 0.9 > row["refit_accuracy"] + 0.2
    sign = torch.tensor([1.0, -1.0] * 3)
    flipped = torch.cat([((2.0 * y - 1) * sign)[..., None], x[..., 2:]], -1)
    row, _ = refit_check(flipped, flipped, y, mask, groups)
    assert row["refit_position_accuracy"] > 0.9 > max(row["refit_mlp_accuracy"], row["refit_accuracy"]) + 0.2


# -- dose and length -----------------------------------------------------------------------------------------


def test_doses_of_a_subspace_grow_to_the_whole_of_it(spare: World, tmp_path: Path) -> None:
    x = spare.acts(spare.fit)
    space = subspaces.inlp(x, spare.fit.labels["y"])
    full = pl.ablate(spare.model, spare.held, {SITE: space}, label="y", controls=3, mlp=False)
    got = pl.dose_response(spare.model, spare.held, {SITE: space}, label="y", controls=3, alphas=(0.5, 1.0))
    ranks = sorted({row["rank"] for row in got.rows})
    assert ranks[0] == 1
    assert ranks[-1] == space.rank
    whole = next(row for row in got.targets() if row["rank"] == space.rank and row["alpha"] == 1.0)
    assert whole["drop"] == full.targets()[0]["drop"]
    assert whole["refit_accuracy"] == full.targets()[0]["refit_accuracy"]
    at_one = [row["drop"] for row in got.targets() if row["alpha"] == 1.0]
    assert at_one[0] < 0.02 < 0.4 < at_one[-1], "the first direction costs nothing, all of them every answer"
    assert all(row["full_rank"] == space.rank for row in got.rows)
    back = pl.DoseResult.load(got.save(tmp_path / "d.safetensors"))
    assert back.rows == got.rows
    assert len(got.plot().data) >= 2
    assert len(got.plot("alpha").data) >= 2


def test_a_dose_knows_the_full_rank_of_a_site_by_any_of_its_names() -> None:
    model, tokens = pl.wrap(zoo.build("gru")), zoo.tokens(4, 5)
    batch, site = pl.Batch(tokens, {"token": tokens}), "blocks.1.hook_resid_post"
    for name in (site, "blocks.1.rnn.hook_out"):
        spaces = {name: subspaces.random(2, zoo.WIDTH), "hook_embed": subspaces.random(1, zoo.WIDTH)}
        got = pl.dose_response(model, batch, spaces, controls=0, refit=False)
        full = {(row["site"], row["rank"]): row["full_rank"] for row in got.rows}
        assert full == {(site, 1): 2, (site, 2): 2, (model.point("hook_embed").name, 1): 1}


def test_the_first_directions_are_the_first_ones() -> None:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    eraser, space = pl.leace(x, y), subspaces.random(4, 6)
    cut = first_directions(eraser, 1)
    assert (cut.rank, first_directions(space, 3).rank) == (1, 3)
    torch.testing.assert_close(first_directions(eraser, eraser.rank)(x), eraser(x))
    torch.testing.assert_close(first_directions(space, 2).basis, space.basis[:2])
    moved = x - cut(x)
    assert int(torch.linalg.matrix_rank(moved.double(), tol=1e-4)) == 1
    with pytest.raises(pl.InputError, match="between 0 and 4"):
        first_directions(space, 5)


def test_dose_errors(spare: World) -> None:
    space = {SITE: subspaces.random(2, planted.WIDTH)}
    with pytest.raises(pl.InputError, match="at least 1"):
        pl.dose_response(spare.model, spare.held, space, ranks=[0], label="y")
    with pytest.raises(pl.InputError, match="no subspace has"):
        pl.dose_response(spare.model, spare.held, space, ranks=[5], label="y")
    with pytest.raises(pl.InputError, match="alpha"):
        pl.dose_response(spare.model, spare.held, space, alphas=[2.0], label="y", refit=False, controls=0)


class Last(pl.tasks.Task):
    """Each position's answer is its own token, so a model can be exact at any length, or at early positions only."""

    def __init__(self, bos: bool = False) -> None:
        super().__init__("last", ("a", "b"), {"symbol": ("a", "b")}, target="symbol", bos=bos)

    def draw(self, n, length, rng):
        return rng.integers(0, 2, (n, length))

    def annotate(self, symbols):
        return {"symbol": symbols}


class Forgets(torch.nn.Module):
    """Answers with the token, up to some position; later at random but always the same way."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.until = until
        self.embed = torch.nn.Embedding(3, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
        self.head = torch.nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.tensor([[1.0, 0, 2, 0], [-1, 0, -1, 1], [0, 3, 0, 0]]))
            self.head.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 0]]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        late = torch.arange(ids.shape[1]) >= self.until
        x = torch.where((late & (torch.arange(ids.shape[1]) % 2 == 0))[:, None], -x, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("bos", [False, True])
def test_frozen_subspaces_are_scored_on_seen_and_later_positions_require_disjoint(bos: bool, tmp_path: Path) -> None:
    task = Last(bos)
    model = pl.wrap(Forgets(until=10 + bos), blocks="layers", embed="embed", unembed="head")
    line = {"blocks.0.hook_resid_post": pl.Subspace(torch.eye(4)[:1], torch.zeros(4))}
    got = pl.length_transfer(model, task, line, (10, 14), trained_length=10, n=80, controls=4)
    rows = {(row["length"], row["span"]): row for row in got.targets()}
    assert set(rows) == {(10, "all"), (10, "seen"), (14, "all"), (14, "seen"), (14, "beyond")}
    assert rows[14, "seen"]["clean"] == 1.0
    assert not rows[14, "seen"]["floor"]
    assert rows[14, "seen"]["drop"] > 0.4
    assert rows[14, "beyond"]["clean"] < 0.7, "the model fails half of these"
    assert rows[14, "beyond"]["floor"]
    whole = (10 * rows[14, "seen"]["clean"] + 4 * rows[14, "beyond"]["clean"]) / 14
    assert rows[14, "all"]["clean"] == pytest.approx(whole)
    back = pl.LengthTransfer.load(got.save(tmp_path / "l.safetensors"))
    assert back.rows == got.rows
    assert len(got.plot().data) >= 1


def test_at_the_trained_length_transfer_is_the_ablation_and_controls_are_frozen() -> None:
    task, model = Last(), pl.wrap(Forgets(99), blocks="layers", embed="embed", unembed="head")
    line = {"blocks.0.hook_resid_post": pl.Subspace(torch.eye(4)[:1], torch.zeros(4))}
    got = pl.length_transfer(model, task, line, (8, 12), trained_length=8, n=50, controls=3, seed=2)
    want = pl.ablate(model, task.sample(50, 8, seed=2), line, controls=3, refit=False, seed=2)
    mine = [row for row in got.rows if (row["length"], row["span"]) == (8, "all")]
    assert [row["drop"] for row in mine] == [row["drop"] for row in want.rows]
    with pytest.raises(pl.InputError, match="'symbol'"):
        pl.length_transfer(model, task, line, label="depth")


# -- trained models ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trained_model_is_swept_layer_by_layer() -> None:
    """A GRU that keeps parity: erasing it after the last layer's input costs the answers, and little is left to read."""
    task = pl.tasks.Parity()
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=32, hidden_size=32)
    module = pl.models.build(config)
    trained = pl.training.train(module, task, config=pl.training.TrainConfig(length=16, steps=500, threads=1))
    assert trained.accuracy > 0.95
    model = pl.wrap(module)
    data = task.splits({"fit": 1000, "held": 200}, length=16, seed=1)
    got = pl.erase(model, data["fit"], data["held"], controls=3, mlp=False)
    by_layer = {row["layer"]: row for row in got.rows}
    assert by_layer[-1]["probe_accuracy"] < 0.6, "the embedding of one bit doesn't hold the parity of all"
    assert by_layer[1]["verdict"] == "tautological"
    assert by_layer[0]["drop"] > 0.2
    x = collect(model, data["held"], "blocks.0.hook_resid_post")["blocks.0.hook_resid_post"]
    assert x.shape[-1] == 32


if __name__ == "__main__":  # prints the table of times in docs/api/ablation.md
    import time

    task = pl.tasks.Dyck(k=2, max_depth=10, noop=0.2, target="state", bos=True)
    parts = task.splits({"fit": 2000, "held": 200}, length=40, seed=0)
    print("| architecture | LEACE, 1 thread | 2 threads | INLP, 1 thread | 2 threads |")
    print("|---|---|---|---|---|")
    for arch in ("transformer", "lstm", "gru", "mamba", "mamba2"):
        model = pl.wrap(pl.models.build(pl.models.FormalConfig.for_task(arch, task, embedding_std=1.0)))
        said = [arch]
        for name, n_fit in (("leace", 2000), ("inlp", 1000)):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                begun, used = time.perf_counter(), time.process_time()
                kw = {"label": "depth", "target": "state", "method": name, "batch_size": 100}
                pl.erase(model, parts["fit"][:n_fit], parts["held"], **kw)
                wall, used = time.perf_counter() - begun, time.process_time() - used
                said.append(
                    f"{wall:.0f} s" if wall < 1.1 * used / threads else f"{wall:.0f} s (busy: CPU {used:.0f} s)"
                )
        print("| " + " | ".join(said) + " |", flush=True)


def test_held_out_sequences_are_told_by_their_real_tokens() -> None:
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.randint(2, 9, (50, 12), generator=g), torch.ones(50, 12, dtype=torch.bool)
    mask[:, 8:] = False
    fit, held = (Batch(tokens.where(mask, pad), {}, mask) for pad in (0, 1))
    with pytest.raises(pl.InputError, match="50 of 50 held-out"):
        require_disjoint(fit, held)
    shorter = Batch(tokens[:, :8], {})
    with pytest.raises(pl.InputError, match="50 of 50 held-out"):
        require_disjoint(fit, shorter)
    require_disjoint(fit, Batch(torch.randint(2, 9, (50, 12), generator=g), {}, mask))

"""Component and convolution ablation: equal to hand-written hooks and weights, and right on models that are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor

import probelens as pl
from probelens.ablation.components import donor_rows, position_means
from probelens.ablation.convolution import VARIANTS
from probelens.adapters.hf.resume import Recurrent
from probelens.examples import planted
from probelens.running.collect import collect

N, LENGTH = 8, 7


def answered(name: str, n: int = N, mask: Tensor | None = None) -> tuple[pl.HookedModel, pl.Batch]:
    """A model and sequences that it answers perfectly, since its answers are the labels."""
    model, tokens = pl.wrap(zoo.build(name)), zoo.tokens(n, LENGTH)
    with torch.no_grad():
        answer = model(tokens).argmax(-1)
    return model, pl.Batch(tokens, {"answer": answer}, mask)


def accuracy(logits: Tensor, batch: pl.Batch) -> Tensor:
    right = (logits.argmax(-1) == batch.labels["answer"]) & batch.mask
    return (right.sum(1) / batch.mask.sum(1)).float()


def probability(logits: Tensor, answer: Tensor, **rest: Tensor) -> Tensor:
    """A metric that shows changes too small for the argmax."""
    return logits.softmax(-1).gather(-1, answer[..., None])[..., 0]


COMPONENTS = {
    "neox": ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out", "blocks.2.mlp.hook_post"],
    "gpt2": ["blocks.0.hook_attn_out"],
    "mamba": ["blocks.0.hook_mixer_out", "blocks.1.mixer.hook_conv"],
    "mamba2": ["blocks.1.mixer.hook_gate"],
    "lstm": ["blocks.1.hook_resid_post"],
}


@pytest.mark.parametrize("family", list(COMPONENTS))
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_each_way_equals_a_hand_written_hook(family: str, how: str) -> None:
    model, batch = answered(family)
    got = pl.ablate_component(model, batch, COMPONENTS[family], how, draws=1, batch_size=3)  # type: ignore[arg-type]
    acts = collect(model, batch, COMPONENTS[family])
    donors = donor_rows(batch, batch, 0)
    for i, site in enumerate(COMPONENTS[family]):
        x = acts[model.point(site).name]
        new = {"zero": torch.zeros_like(x), "mean": x.mean(0).expand_as(x), "resample": x[donors]}[how]
        with torch.no_grad():
            logits = model.run_with_hooks(batch.tokens, [(site, lambda t, hook, new=new: new)])
        torch.testing.assert_close(got.values[i], accuracy(logits, batch))
    assert max(row["drop"] for row in got.rows) > 0
    assert [row["how"] for row in got.rows] == [how] * len(COMPONENTS[family])


@pytest.mark.parametrize(
    ("family", "site"), [("lstm", "rnn.hook_c"), ("gru", "rnn.hook_h"), ("mamba", "mixer.hook_ssm_state")]
)
def test_states_are_replaced_at_every_step(family: str, site: str) -> None:
    model, batch = answered(family)
    name = f"blocks.1.{site}"
    got = pl.ablate_component(model, batch, name, "mean", probability)
    mean = collect(model, batch, name)[name].mean(0)
    with torch.no_grad():
        logits = model.run_with_hooks(batch.tokens, [(name, lambda t, hook: mean[hook.pos].expand_as(t))])
    torch.testing.assert_close(got.values[0], probability(logits, **batch.labels).mean(1))
    assert not torch.allclose(got.values[0], got.clean, rtol=0, atol=1e-5)


def test_heads_are_ablated_one_at_a_time_or_together() -> None:
    model, batch = answered("neox")
    site = "blocks.1.attn.hook_z"
    each = pl.ablate_component(model, batch, site, "zero", heads="each")
    assert [row["head"] for row in each.rows] == list(range(zoo.HEADS))

    def silent(*heads: int) -> Tensor:
        def hook(z: Tensor, hook: pl.HookPoint) -> Tensor:
            z = z.clone()
            z[:, :, list(heads)] = 0
            return z

        with torch.no_grad():
            return accuracy(model.run_with_hooks(batch.tokens, [(site, hook)]), batch)

    for head in range(zoo.HEADS):
        torch.testing.assert_close(each.values[head], silent(head))
    some = pl.ablate_component(model, batch, site, "zero", heads=[1, -1], joint=True)
    torch.testing.assert_close(some.values[0], silent(1, 3))
    assert some.rows[0]["head"] == "1,3"
    every = pl.ablate_component(model, batch, site, "zero", heads="each", joint=True)
    torch.testing.assert_close(every.values, pl.ablate_component(model, batch, site, "zero").values)
    for bad in (zoo.HEADS, "all", []):
        with pytest.raises(pl.InputError, match="has 4"):
            pl.ablate_component(model, batch, site, "zero", heads=bad)  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="no heads"):
        pl.ablate_component(model, batch, "blocks.1.hook_attn_out", "zero", heads=0)


def test_joint_ablation_finds_what_single_ones_miss() -> None:
    made, parts = planted.twice(), ["blocks.0.mixer.hook_out", "blocks.0.hook_mlp_out"]
    alone = pl.ablate_component(made.model, made.held, parts, ["zero", "mean"], target="y")
    both = pl.ablate_component(made.model, made.held, parts, ["zero", "mean"], target="y", joint=True)
    assert [row["drop"] for row in alone.rows] == [0.0] * 4
    assert [row["how"] for row in alone.rows] == ["zero", "zero", "mean", "mean"]
    assert all(row["damage"] > 0.8 for row in both.rows)
    assert both.rows[0]["site"] == " + ".join(parts)


def test_positions_outside_the_mask_keep_theirs_and_enter_no_mean() -> None:
    mask = torch.ones(N, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    mask[::2, 5:] = False
    model, batch = answered("neox", mask=mask)
    site = "blocks.1.hook_attn_out"
    got = pl.ablate_component(model, batch, site, "mean")
    x = collect(model, batch, site)[site]
    mean = (x * mask[..., None]).sum(0) / mask.sum(0).clamp_min(1)[:, None]
    with torch.no_grad():
        hook = pl.edits.replace(mean, pos=mask)
        want = accuracy(model.run_with_hooks(batch.tokens, [(site, hook)]), batch)
    torch.testing.assert_close(got.values[0], want)


def test_donors_are_other_examples_and_at_least_as_long() -> None:
    mask = torch.ones(30, 6, dtype=torch.bool)
    mask[:20, 4:] = False
    batch = pl.Batch(torch.zeros(30, 6, dtype=torch.long), {}, mask)
    for seed in range(5):
        donors = donor_rows(batch, batch, seed)
        assert (donors != torch.arange(30)).all()
        assert (donors[20:] >= 20).all(), "a long example needs a long one"
    assert not torch.equal(donor_rows(batch, batch, 0), donor_rows(batch, batch, 1))
    short = pl.Batch(batch.tokens[:21], {}, mask[:21])
    with pytest.raises(pl.InputError, match="1 of 21 have none"):
        donor_rows(short, short, 0)


def test_resamples_and_means_may_come_from_other_sequences() -> None:
    model, batch = answered("gpt2")
    other = pl.Batch(zoo.tokens(20, LENGTH, seed=9))
    site = "blocks.1.hook_mlp_out"
    got = pl.ablate_component(model, batch, site, "mean", source=other)
    mean = collect(model, other, site)[site].mean(0)
    with torch.no_grad():
        want = accuracy(model.run_with_hooks(batch.tokens, [(site, pl.edits.mean(mean))]), batch)
    torch.testing.assert_close(got.values[0], want)
    drawn = pl.ablate_component(model, batch, site, "resample", source=other, draws=6)
    assert drawn.rows[0]["draws"] == 6
    assert drawn.rows[0]["draw_sd"] > 0
    with pytest.raises(pl.InputError, match="the same length"):
        pl.ablate_component(model, batch, site, "mean", source=pl.Batch(zoo.tokens(4, 5)))


def test_the_spread_over_draws_is_that_of_the_values_where_lengths_are_unequal() -> None:
    mask = torch.ones(N, LENGTH, dtype=torch.bool)
    mask[: N // 2, 2:] = False
    model, batch = answered("mamba", mask=mask)
    components = {"sites": "blocks.1.hook_mixer_out", "how": "resample"}
    found = [
        pl.ablate_component(model, batch, **components, metric=probability, draws=1, seed=0),  # type: ignore[arg-type]
        pl.ablate_component(model, batch, **components, metric=probability, draws=2, seed=0),  # type: ignore[arg-type]
    ]
    # The mean of two and one of them give the other.
    first, both = (result.rows[0]["value"] for result in found)
    spread = abs(first - (2 * both - first)) / 2**0.5
    assert found[1].rows[0]["draw_sd"] == pytest.approx(spread, rel=1e-4)
    assert spread > 1e-3
    conv = pl.ablate_convolution(model, batch, "resample_past", metric=probability, draws=2)
    once = pl.ablate_convolution(model, batch, "resample_past", metric=probability, draws=1)
    first, both = once.rows[0]["value"], conv.rows[0]["value"]
    assert conv.rows[0]["draw_sd"] == pytest.approx(abs(2 * (first - both)) / 2**0.5, rel=1e-4)


def test_errors_and_results(tmp_path: Path) -> None:
    model, batch = answered("neox")
    with pytest.raises(pl.UnknownHookError, match="Nearest"):
        pl.ablate_component(model, batch, "attn_oot")
    with pytest.raises(pl.InputError, match="'zero', 'mean', 'resample'"):
        pl.ablate_component(model, batch, "attn_out", "median")  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="attn.hook_z"):
        pl.ablate_component(model, batch, "blocks.0.attn.hook_pattern", "zero")
    with pytest.raises(pl.InputError, match="draws"):
        pl.ablate_component(model, batch, "attn_out", draws=0)
    two = pl.Batch(batch.tokens, {"a": batch.labels["answer"], "b": batch.labels["answer"]})
    with pytest.raises(pl.InputError, match=r"\['a', 'b'\]"):
        pl.ablate_component(model, two, "attn_out", "zero")
    got = pl.ablate_component(model, batch, ["attn_out", "mlp_out"], ["zero", "resample"])
    back = pl.ComponentResult.load(got.save(tmp_path / "c.safetensors"))
    assert back.rows == got.rows
    assert len(got.to_dataframe()) == 2 * 2 * zoo.LAYERS
    assert len(got.plot().data) == 2
    again = pl.ablate_component(model, batch, ["attn_out", "mlp_out"], ["zero", "resample"])
    assert torch.equal(again.values, got.values)
    loss = pl.ablate_component(model, batch, "mlp_out", "mean", "next_token_loss")
    assert all(row["damage"] is None for row in loss.rows)


# -- the convolution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@pytest.mark.parametrize("layers", [[1], "together"])
def test_convolution_variants_equal_weights_changed_by_hand(family: str, layers: list[int] | str) -> None:
    model, batch = answered(family)
    state = {k: v.clone() for k, v in model.module.state_dict().items()}
    got = pl.ablate_convolution(model, batch, ("current_tap", "delta", "zero"), layers, batch_size=3)  # type: ignore[arg-type]
    assert all(torch.equal(v, state[k]) for k, v in model.module.state_dict().items()), "restored bit for bit"
    chosen = [1] if isinstance(layers, list) else range(zoo.LAYERS)

    def by_hand(kind: str) -> Tensor:
        twin = pl.wrap(zoo.build(family))
        with torch.no_grad():
            for layer in chosen:
                conv = twin.module.backbone.layers[layer].mixer.conv1d  # type: ignore[union-attr, index]
                taps = conv.weight.clone()
                conv.weight.zero_()
                if kind != "zero":
                    conv.weight[..., -1] = 1 if kind == "delta" else taps[..., -1]
                if kind != "current_tap":
                    conv.bias.zero_()
            return accuracy(twin(batch.tokens), batch)

    for row, values in zip(got.rows, got.values, strict=True):
        torch.testing.assert_close(values, by_hand(row["how"]))
        assert row["drop"] > 0
    assert len({row["drop"] for row in got.rows}) > 1, "they are not the same ablation"


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_resampled_past_taps_are_those_of_the_other_example(family: str) -> None:
    model, batch = answered(family)
    same = pl.Batch(
        batch.tokens[:1].expand(N, -1).clone(), {"answer": batch.labels["answer"][:1].expand(N, -1).clone()}
    )
    twin = pl.ablate_convolution(model, same, "resample_past", draws=2)
    assert twin.rows[0]["drop"] == 0.0, "another example that is the same one changes nothing"
    got = pl.ablate_convolution(model, batch, "resample_past", layers=[1], draws=1)
    donors, site = donor_rows(batch, batch, 0), "blocks.1.mixer.hook_conv"
    whole = collect(model, batch, site)[site]
    conv = "blocks.1.mixer.conv1d.weight"
    with model.edit_weights({conv: lambda w: torch.cat([torch.zeros_like(w[..., :-1]), w[..., -1:]], -1)}):
        current = collect(model, batch, site)[site]
    mixed = current + (whole - current)[donors]
    with torch.no_grad():
        want = accuracy(model.run_with_hooks(batch.tokens, [(site, lambda t, hook: mixed)]), batch)
    torch.testing.assert_close(got.values[0], want)


def test_the_mean_convolution_output_is_taken_position_by_position() -> None:
    model, batch = answered("mamba")
    got = pl.ablate_convolution(model, batch, "mean", layers=[0])
    site = "blocks.0.mixer.hook_conv"
    torch.testing.assert_close(got.values, pl.ablate_component(model, batch, site, "mean").values)


def test_convolutions_by_layer_and_what_has_none() -> None:
    model, batch = answered("mamba")
    got = pl.ablate_convolution(model, batch, layers="each", draws=2)
    assert [(row["how"], row["layers"]) for row in got.rows] == [
        (how, str(l)) for how in VARIANTS for l in range(zoo.LAYERS)
    ]
    assert all(0 <= row["drop"] <= 1 for row in got.rows)
    with pytest.raises(pl.UnknownHookError, match="Mamba and Mamba-2"):
        pl.ablate_convolution(*answered("neox"))
    with pytest.raises(pl.InputError, match=r"\[0, 1, 2\]"):
        pl.ablate_convolution(model, batch, layers=[5])
    with pytest.raises(pl.InputError, match="'together', 'each'"):
        pl.ablate_convolution(model, batch, layers="all")  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="'current_tap'"):
        pl.ablate_convolution(model, batch, "A1")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@pytest.mark.parametrize("layers", ["each", "together"])
def test_convolutions_in_long_sequences_equal_whole_runs(
    family: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that runs go on from the middle of a sequence, inside the reference backend.
    def ablated(model: pl.HookedModel) -> pl.ComponentResult:
        return pl.ablate_convolution(model, batch, "resample_past", layers, draws=4, batch_size=4)

    tokens = zoo.tokens(6, 24)
    model, plain = pl.wrap(zoo.build(family)), pl.wrap(zoo.build(family))
    plain.adapter.resumer = lambda model: None  # type: ignore[method-assign]
    batch = pl.Batch(tokens, {"answer": model(tokens).argmax(-1)})
    kept, base = [], Recurrent.base
    monkeypatch.setattr(Recurrent, "base", lambda self, *args: kept.append(self) or base(self, *args))
    got = ablated(model)
    assert kept, "the control: runs did go on from the middle"
    kept.clear()
    want = ablated(plain)
    assert not kept
    torch.testing.assert_close(got.values, want.values)
    assert all(row["drop"] > 0 for row in got.rows)


def test_means_need_an_example_that_is_real_where_the_batch_is() -> None:
    mask = torch.ones(N, LENGTH, dtype=torch.bool)
    model, batch = answered("lstm", mask=mask)
    short = mask.clone()
    short[:, -2:] = False
    source = pl.Batch(zoo.tokens(N, LENGTH, 5), batch.labels, short)
    site = "blocks.1.hook_resid_post"
    for how in ("mean", "resample"):
        with pytest.raises(pl.ProbelensError, match="longer examples|as long"):
            pl.ablate_component(model, batch, site, how, source=source)  # type: ignore[arg-type]
    with pytest.raises(pl.ProbelensError, match="at position 5 and 1 more"):
        pl.ablate_component(model, batch, site, "mean", source=source)
    fits = pl.Batch(batch.tokens, batch.labels, short)
    x = collect(model, source, site)[site]
    got = pl.ablate_component(model, fits, site, "mean", probability, source=source)
    new = x.mean(0).expand_as(x)
    with torch.no_grad():
        logits = model.run_with_hooks(batch.tokens, [(site, lambda t, hook: torch.where(short[..., None], new, t))])
    wanted = (probability(logits, batch.labels["answer"]) * short).sum(1) / short.sum(1)
    torch.testing.assert_close(got.values[0], wanted, msg="where the source is real, its mean is put in")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_half_precision_are_summed_in_full(dtype: torch.dtype) -> None:
    acts = (torch.randn(2000, 2, 3, generator=torch.Generator().manual_seed(0)) + 60).to(dtype)
    mask = torch.ones(2000, 2, dtype=torch.bool)
    mask[::2, 1] = False
    exact = acts.double()
    got = position_means(acts, mask, mask)
    torch.testing.assert_close(got[0, 0], exact[:, 0].mean(0).float())
    torch.testing.assert_close(got[0, 1], exact[1::2, 1].mean(0).float())
    own = (acts * mask[..., None]).sum(0)[0] / 2000
    assert not torch.allclose(own.float(), got[0, 0], rtol=1e-4), "what the model's own dtype makes of the sum"

"""verify and edit_weights: proof on every family, and weights that come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import probelens as pl
from probelens.hooks.verify import VerifyReport


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_every_hook_point_of_every_family_passes(name: str) -> None:
    model = pl.wrap(zoo.build(name))
    report = model.verify()
    assert report.ok, str(report)
    assert {row["name"] for row in report.rows} == set(model.hook_dict)
    restored = [row["restored"] for row in report.rows if row["restored"] is not None]
    assert len(restored) == 2 * zoo.LAYERS
    assert min(restored) > 0.999


class Deaf(nn.Module):
    """A model with a block that is never called and one whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        self.blocks[2](x)
        return x


def test_verify_finds_points_that_are_silent_or_without_effect() -> None:
    model = pl.wrap(Deaf(), blocks="blocks")
    report = model.verify(torch.randn(2, 3, 4))
    problems = {row["name"]: row["problem"] for row in report.failures()}
    assert not report.ok
    assert "did not fire" in problems["blocks.1.hook_resid_pre"]
    assert "nothing reads it" in problems["blocks.2.hook_resid_post"]
    assert "blocks.0.hook_resid_post" not in problems
    assert "3 of 6" not in str(report)
    assert "2 of 6 hook points pass" in str(report)


def test_what_hardly_matters_is_told_apart_from_what_nothing_reads() -> None:
    raw = zoo.more("bert")
    attention = raw.get_submodule(pl.wrap(raw).adapter.blocks[-1]).attention
    with torch.no_grad():
        attention.output.dense.weight.mul_(1e-9)
    model, x = pl.wrap(raw), zoo.tokens()
    report = model.verify(x)
    assert report.ok, str(report)
    last = f"blocks.{model.cfg.n_layers - 1}."
    noted = {row["name"]: row["note"] for row in report.rows if row["note"]}
    inside = {f"attn.hook_{part}" for part in ("q", "k", "v", "attn_scores", "pattern", "z")}
    assert noted.keys() == {last + name for name in inside | {"hook_attn_out"}}
    assert all("the hook fired" in note and "no more than rounding" in note for note in noted.values())
    assert str(report).count("hardly depends on it") == len(noted)

    # A plain hook finds as much: no noise on the values changes an output by more than its rounding.
    with torch.no_grad():
        plain = zoo.logits(raw, x)
        handle = attention.self.value.register_forward_hook(
            lambda m, args, out: out + torch.randn_like(out) * out.std()
        )
        noisy = zoo.logits(raw, x)
        handle.remove()
    assert (noisy - plain).abs().max() < 1e-6 * plain.abs().max()


class Outside(nn.Module):
    """A model that adds the residual outside its blocks, so that what they return isn't the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_verify_finds_block_outputs_that_are_not_the_residual() -> None:
    report = pl.wrap(Outside(), blocks="blocks").verify(torch.randn(2, 3, 4))
    problems = {row["name"]: row["problem"] for row in report.failures()}
    assert "not 1" in problems["blocks.1.hook_resid_post"]


def test_verify_needs_inputs_where_there_are_no_tokens() -> None:
    with pytest.raises(pl.InputError, match="needs inputs"):
        pl.wrap(Deaf(), blocks="blocks").verify()


def test_a_report_survives_the_disk(tmp_path: Path) -> None:
    report = pl.wrap(zoo.build("gru")).verify()
    report.save(tmp_path / "report.safetensors")
    back = VerifyReport.load(tmp_path / "report.safetensors")
    assert back.rows == report.rows
    assert back.ok


@pytest.mark.parametrize("name", ["neox", "mamba", "lstm"])
def test_edited_weights_come_back_bit_for_bit(name: str) -> None:
    raw = zoo.build(name)
    model, x = pl.wrap(raw), zoo.tokens()
    want, before = zoo.logits(raw, x), {k: v.clone() for k, v in raw.state_dict().items()}
    edits = {"unembed.weight": lambda w: w * 3 + 0.1, next(k for k, _ in raw.named_parameters()): torch.zeros_like}
    with model.edit_weights(edits):
        assert not torch.allclose(zoo.logits(raw, x), want)
    with pytest.raises(ZeroDivisionError), model.edit_weights(edits):
        _ = 1 / 0
    with pytest.raises(pl.ShapeError), model.edit_weights({**edits, "unembed.weight": lambda w: w[:1]}):
        pass
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert torch.equal(zoo.logits(raw, x), want)


def test_zeroing_hook_conv_equals_a_kernel_and_bias_of_zero() -> None:
    for name in zoo.SSMS:
        model, x = pl.wrap(zoo.build(name)), zoo.tokens()
        for layer in range(zoo.LAYERS):
            with torch.no_grad():
                by_hook = model.run_with_hooks(x, [(f"blocks.{layer}.mixer.hook_conv", lambda t, hook: t * 0)])
                names = (f"blocks.{layer}.mixer.conv1d.weight", f"blocks.{layer}.mixer.conv1d.bias")
                with model.edit_weights(dict.fromkeys(names, torch.zeros_like)):
                    by_weight = model(x)
                plain = model(x)
            assert torch.allclose(by_hook, by_weight, atol=1e-5)
            assert not torch.allclose(by_hook, plain, atol=1e-3)


def test_unknown_weights_get_the_nearest_names() -> None:
    model = pl.wrap(zoo.build("mamba"))
    for name, text in (
        ("blocks.0.mixer.conv2d.weight", "conv1d"), ("blocks.9.mixer.D", "3 blocks"), ("nothing", "not found"),
    ):  # fmt: skip
        with pytest.raises(pl.UnknownHookError, match=text), model.edit_weights({name: torch.zeros_like}):
            pass
    with pytest.raises(pl.InputError, match="functions"), model.edit_weights({"unembed.weight": 3}):  # type: ignore[dict-item]
        pass

"""mamba-ssm's own models without its kernels: its numbers, a true residual stream, and its checkpoints.

The reference in these tests is the package's code itself, run with its own torch references in place of its
kernels; while probelens runs, those are taken away again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from real_models import mamba_ssm
from real_models.fetch import or_skip
from torch import Tensor, nn

import probelens as pl
from probelens.adapters.mamba_ssm import load_checkpoint
from probelens.hooks.verify import left_behind

KINDS = ("Mamba1", "Mamba2")
CONFIGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "unfused": {"fused_add_norm": False},
    "layer norm": {"rms_norm": False},
    "layer norm, unfused": {"rms_norm": False, "fused_add_norm": False},
    "residual in the model's dtype": {"residual_in_fp32": False},
    "attention and MLPs": {
        "d_intermediate": 20, "attn_layer_idx": [1], "attn_cfg": {"num_heads": 2, "causal": True},
    },
}  # fmt: skip
LAYERS, VOCAB = 3, 24


def build(kind: str = "Mamba1", **config: Any) -> nn.Module:
    return or_skip(lambda: mamba_ssm.build(kind, **config))


def tokens(n: int = 2, length: int = 7) -> Tensor:
    return torch.randint(VOCAB, (n, length), generator=torch.Generator().manual_seed(0))


def own(raw: nn.Module, x: Tensor) -> Tensor:
    """Logits by the package's own code."""
    with torch.no_grad():
        return raw(x).logits


def own_residuals(raw: nn.Module, x: Tensor, edit: Callable[[int, Tensor], Tensor | None] | None = None) -> Any:
    """The residual entering each block and after the last one, and the logits, by hooks of our own.

    ``edit`` may replace the residual that leaves a block.
    """
    seen: list[Tensor] = []
    handles = []
    for i, block in enumerate(raw.backbone.layers):
        handles.append(
            block.register_forward_pre_hook(
                lambda m, args: seen.append(args[0] if args[1] is None else args[0] + args[1])
            )
        )

        def after(m: nn.Module, args: Any, out: Any, i: int = i) -> Any:
            new = edit(i, out[0] + out[1]) if edit else None
            if i == LAYERS - 1:
                seen.append(out[0] + out[1] if new is None else new)
            # The package's blocks only ever use the sum: here all of it stands in the first part.
            return None if new is None else (new, torch.zeros_like(out[1]))

        handles.append(block.register_forward_hook(after))
    logits = own(raw, x)
    for handle in handles:
        handle.remove()
    return seen, logits


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
class TestModel:
    def test_logits_and_residual_stream_are_those_of_the_package(self, kind: str, config: str) -> None:
        raw, x = build(kind, **CONFIGS[config]), tokens()
        resid, want = own_residuals(raw, x)
        with mamba_ssm.without_kernels():
            with pytest.raises(RuntimeError, match="needs CUDA"):
                own(raw, x)
            with torch.no_grad():
                logits, cache = pl.wrap(raw).run_with_cache(x)
        torch.testing.assert_close(logits, want, atol=2e-5, rtol=1e-5)
        for layer in range(LAYERS):
            torch.testing.assert_close(cache["resid_pre", layer], resid[layer], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(cache["resid_post", layer], resid[layer + 1], atol=2e-5, rtol=1e-5)
            if layer:
                assert torch.equal(cache["resid_pre", layer], cache["resid_post", layer - 1])
        assert torch.equal(cache["ln_final.hook_in"], cache["resid_post", LAYERS - 1])
        assert not torch.allclose(cache["resid_post", 0], cache["blocks.0.hook_mixer_out"], atol=1e-2)

    def test_every_point_passes_verify_and_runs_start_and_stop_anywhere(self, kind: str, config: str) -> None:
        raw, x = build(kind, **CONFIGS[config]), tokens()
        with mamba_ssm.without_kernels(), torch.no_grad():
            model = pl.wrap(raw)
            report = model.verify(x)
            assert report.ok, str(report)
            want = model(x)
            for layer in range(LAYERS + 1):
                resid = model(x, stop_at_layer=layer)
                assert torch.allclose(model(resid, start_at_layer=layer), want, atol=1e-6)
                other = model(resid + torch.randn_like(resid), start_at_layer=layer)
                assert not torch.allclose(other, want, atol=1e-2)
        assert left_behind(raw) == []

    def test_an_edited_residual_goes_on_as_in_the_package(self, kind: str, config: str) -> None:
        raw, x = build(kind, **CONFIGS[config]), tokens()
        shift = torch.randn(16, generator=torch.Generator().manual_seed(1))
        for layer in range(LAYERS):
            _, want = own_residuals(raw, x, lambda i, r, layer=layer: r + shift if i == layer else None)
            with mamba_ssm.without_kernels(), torch.no_grad():
                model = pl.wrap(raw)
                point = f"blocks.{layer}.hook_resid_post"
                got = model.run_with_hooks(x, [(point, lambda t, hook: t + shift)])
                if layer + 1 < LAYERS:
                    point = f"blocks.{layer + 1}.hook_resid_pre"
                    again = model.run_with_hooks(x, [(point, lambda t, hook: t + shift)])
                    assert torch.allclose(again, got, atol=1e-6)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(got, own(raw, x), atol=1e-2)


def test_the_sums_of_blocks_with_an_mlp_hold() -> None:
    raw, x = build(**CONFIGS["attention and MLPs"]), tokens()
    with torch.no_grad():
        _, cache = pl.wrap(raw).run_with_cache(x)
    for layer in range(LAYERS):
        mid = cache["resid_mid", layer]
        assert torch.allclose(cache["resid_pre", layer] + cache["mixer_out", layer], mid, atol=1e-6)
        assert torch.allclose(mid + cache["mlp_out", layer], cache["resid_post", layer], atol=1e-6)
    assert "blocks.1.hook_attn_out" in cache
    assert not any(name.startswith("blocks.1.mixer.") for name in cache)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_the_residual_are_those_of_the_package(kind: str) -> None:
    raw, x = build(kind), tokens()
    held: dict[str, Tensor] = {}

    def keep(m: nn.Module, args: Any, out: Any) -> Any:
        held["sum"] = out[0] + out[1]
        held["sum"].retain_grad()
        return held["sum"], torch.zeros_like(out[1])

    handle = raw.backbone.layers[1].register_forward_hook(keep)
    raw(x).logits.square().sum().backward()
    handle.remove()
    want = held["sum"].grad
    got: list[Tensor] = []
    with mamba_ssm.without_kernels():
        model = pl.wrap(raw)
        out = model.run_with_hooks(x, bwd_hooks=[("blocks.1.hook_resid_post", lambda g, hook: got.append(g.clone()))])
        out.square().sum().backward()
    assert want is not None
    assert want.abs().max() > 0
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("config", ["fused", "unfused"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_within_its_rounding(kind: str, config: str) -> None:
    raw, x = build(kind, **CONFIGS[config]).bfloat16(), tokens()
    want = own(raw, x).float()
    with mamba_ssm.without_kernels(), torch.no_grad():
        model = pl.wrap(raw)
        logits, cache = model.run_with_cache(x, "blocks.*.hook_resid_*")
        assert model.verify(x).ok
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - want).abs().max() < 0.05 * want.abs().max()
    # residual_in_fp32 is the package's default: the sum is wider than what the mixers return.
    assert cache["resid_post", 1].dtype == torch.float32
    assert model.run_with_cache(x, "blocks.*.hook_mixer_out")[1]["mixer_out", 1].dtype == torch.bfloat16


# -- decoding with the package's cache --------------------------------------------------------------------------


def decode(run: Callable[..., Any], x: Tensor, first: int, edit: Callable[[Any, int], None] | None = None) -> Tensor:
    """Logits token by token after a prefill of ``first`` tokens. ``edit`` may change the cache after a step."""
    params = mamba_ssm.package().InferenceParams(max_seqlen=x.shape[1], max_batch_size=x.shape[0])
    out = []
    with torch.no_grad():
        for start in (0, *range(first, x.shape[1])):
            stop = first if start == 0 else start + 1
            got = run(x[:, start:stop], inference_params=params)
            out.append(got if isinstance(got, Tensor) else got.logits)
            params.seqlen_offset = stop
            if edit is not None:
                edit(params, stop - 1)
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_goes_through_hooks_and_the_packages_cache(kind: str) -> None:
    raw, x = build(kind), tokens(2, 9)
    want = own(raw, x)
    torch.testing.assert_close(decode(raw, x, 8), want, atol=1e-5, rtol=1e-5)
    steps: list[Any] = []
    with mamba_ssm.without_kernels():
        model = pl.wrap(raw)
        torch.testing.assert_close(decode(model, x, 4), want, atol=1e-5, rtol=1e-5)

        def note(tensor: Tensor, hook: pl.HookPoint) -> Tensor:
            steps.append(hook.pos)
            return tensor.clone()

        with model.hooks([("blocks.1.mixer.hook_ssm_state", note)]):
            torch.testing.assert_close(decode(raw, x, 4), want, atol=1e-5, rtol=1e-5)
    assert steps == list(range(9))


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_state_is_the_packages_own_decoding_with_an_edited_cache(kind: str) -> None:
    raw, x, at = build(kind), tokens(2, 9), 4

    def double(params: Any, pos: int) -> None:
        if pos == at:
            params.key_value_memory_dict[LAYERS - 1][1].mul_(2)

    want, plain = decode(raw, x, 1, double), own(raw, x)
    with mamba_ssm.without_kernels(), torch.no_grad():
        point = f"blocks.{LAYERS - 1}.mixer.hook_ssm_state"
        got = pl.wrap(raw).run_with_hooks(x, [(point, pl.at(at, lambda t, hook: t * 2))])
    # The package reads its output before the edit: of the last layer, so that later steps alone differ by it.
    assert (got[:, at + 1 :] - want[:, at + 1 :]).abs().max() <= 5e-5
    assert (got[:, at + 1 :] - plain[:, at + 1 :]).abs().max() > 1e-3
    assert torch.allclose(got[:, :at], plain[:, :at], atol=1e-5)


def test_packed_sequences_and_masks_are_refused_by_name() -> None:
    model, x = pl.wrap(build("Mamba2")), tokens()
    with pytest.raises(pl.InputError, match="seq_idx"):
        model(x, seq_idx=torch.zeros_like(x))
    with pytest.raises(pl.InputError, match="attention_mask"):
        model(x, attention_mask=torch.ones_like(x))


def test_wrapping_imports_nothing_of_the_package_and_takes_the_backbone_alone() -> None:
    raw, x = build(), tokens()
    model = pl.wrap(raw.backbone)
    assert model.adapter.name == pl.wrap(raw).adapter.name == "mamba-ssm"
    assert not any(name.startswith(("mamba_ssm", "triton")) for name in sys.modules)
    with torch.no_grad():
        assert torch.equal(model(x), pl.wrap(raw).run_with_cache(x)[1]["unembed.hook_in"])
    with pytest.raises(pl.UnknownHookError, match="hook_mixer_out"):
        model.run_with_cache(x, "blocks.0.hook_mlp_out")


@pytest.mark.parametrize("kind", KINDS)
def test_the_points_are_those_of_transformers_class(kind: str) -> None:
    theirs = pl.wrap(zoo.build("mamba" if kind == "Mamba1" else "mamba2")).hook_dict
    ours = pl.wrap(build(kind)).hook_dict
    assert list(ours) == list(theirs)
    assert [p.axes for p in ours.values()] == [p.axes for p in theirs.values()]


def test_weights_are_edited_under_canonical_names() -> None:
    raw, x = build(), tokens()
    model = pl.wrap(raw)
    with torch.no_grad():
        zeroed = model.run_with_hooks(x, [("blocks.0.mixer.hook_conv", lambda t, hook: t * 0)])
        names = ("blocks.0.mixer.conv1d.weight", "blocks.0.mixer.conv1d.bias")
        with model.edit_weights(dict.fromkeys(names, torch.zeros_like)):
            assert torch.allclose(model(x), zeroed, atol=1e-6)
        assert not torch.allclose(model(x), zeroed, atol=1e-3)


# -- checkpoints ------------------------------------------------------------------------------------------------

LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "Mamba1": {"expand": 2, "d_conv": 3, "bias": True, "dt_rank": 2},
    "Mamba2": {"ngroups": 2, "chunk_size": 4, "dt_limit": (0.01, 0.5), "conv_bias": False},
}


def save(raw: nn.Module, folder: Path, safe: bool = False) -> Path:
    raw.save_pretrained(str(folder))
    if safe:
        from safetensors.torch import save_model

        (folder / "pytorch_model.bin").unlink()
        save_model(raw, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_loads_into_transformers_class_with_the_same_logits(
    kind: str, tied: bool, safe: bool, tmp_path: Path
) -> None:
    import transformers

    raw = build(kind, tie_embeddings=tied, vocab_size=21, ssm=LAYER_OPTIONS[kind])
    folder = save(raw, tmp_path / "some-mamba", safe)
    if kind == "Mamba2" and not hasattr(_gated_norm(), "group_size"):
        with pytest.raises(pl.InputError, match="upgrade"):
            pl.load(folder)
        return
    model, x = pl.load(folder), tokens() % 21
    assert isinstance(
        model.module, getattr(transformers, "MambaForCausalLM" if kind == "Mamba1" else "Mamba2ForCausalLM")
    )
    assert model.tokenizer is None
    assert not model.module.training
    assert model.cfg.d_vocab == 24, "padded to a multiple of 8"
    with torch.no_grad():
        torch.testing.assert_close(model(x), own(raw, x), atol=1e-5, rtol=1e-5)
        # The same weights in both: the residual streams agree block by block.
        resid, _ = own_residuals(raw, x)
        _, cache = model.run_with_cache(x, "blocks.*.hook_resid_*")
    for layer in range(LAYERS):
        torch.testing.assert_close(cache["resid_pre", layer], resid[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache["resid_post", layer], resid[layer + 1], atol=1e-5, rtol=1e-5)


def _gated_norm() -> nn.Module:
    import transformers

    config = transformers.Mamba2Config(
        hidden_size=8, num_heads=2, head_dim=8, num_hidden_layers=1, n_groups=1, vocab_size=8, state_size=2
    )
    return transformers.Mamba2ForCausalLM(config).backbone.layers[0].mixer.norm


def test_a_checkpoint_loads_in_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "model")
    assert pl.load(folder).cfg.dtype == torch.float32
    assert pl.load(folder, dtype=torch.bfloat16).cfg.dtype == torch.bfloat16
    assert pl.load(folder, dtype="float16").cfg.dtype == torch.float16
    assert load_checkpoint(str(folder)).dtype == torch.float32
    with pytest.raises(pl.InputError, match="bfloat16"):
        pl.load(folder, dtype="float17")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rms_norm": False}, "rms_norm=False"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"d_intermediate": 64}, "d_intermediate=64"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "rmsnorm": False}}, "rmsnorm=False"),
        ({"ssm_cfg": {"something_new": 1}}, "something_new"),
        ({"d_model": 32}, "don't fit"),
    ],
)
def test_what_transformers_class_does_not_have_is_refused_by_name(
    change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = save(build(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(pl.InputError, match=text):
        pl.load(folder)


def test_missing_truncated_and_hostile_weights_are_refused(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "model")
    weights = folder / "pytorch_model.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(pl.InputError, match="can't read"):
        pl.load(folder)
    torch.save({"weight": _Bomb(str(tmp_path / "ran"))}, weights)
    with pytest.raises(pl.InputError, match="can't read"):
        pl.load(folder)
    assert not (tmp_path / "ran").exists()
    weights.unlink()
    with pytest.raises(pl.InputError, match="none of"):
        pl.load(folder)


class _Bomb:
    """Something that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (Path(self.path), "x")
